"""What the running server says of itself over SQL: one short read-only transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from pgpreemptcheck.values import Fact, measured


@dataclass(frozen=True)
class FileError:
    """One line that pg_file_settings reports as not applicable."""

    file: str
    line: int
    name: str
    error: str


@dataclass(frozen=True)
class Server:
    version: Fact[str] = measured(doc="server_version, as the server prints it")
    settings: Fact[Mapping[str, str]] = measured(doc="pg_settings: name to value in its base unit")
    huge_pages_status: Fact[str] = measured(doc="on, off or unknown (17+)")
    huge_pages_needed: Fact[int] = measured(unit="pages", doc="shared_memory_size_in_huge_pages (15+)")
    active_backends: Fact[int] = measured(doc="client backends that are active at this moment, this one excluded")
    buffers_allocated: Fact[int] = measured(unit="buffers", doc="buffers_alloc since the statistics were reset")
    unused_buffers: Fact[int] = measured(unit="buffers", doc="buffers never filled since the start")
    in_recovery: Fact[bool] = measured()
    file_errors: Fact[tuple[FileError, ...]] = measured(doc="pg_file_settings rows with an error")
