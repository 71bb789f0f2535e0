"""PostgreSQL's settings: what the files and the command line say, as that major version reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pgpreemptcheck.values import Fact, Unknown, measured

HugePagesSetting = Literal["on", "off", "try"]


@dataclass(frozen=True)
class Settings:
    """The settings that decide anything here. Memory is bytes, times are seconds, the rest as PostgreSQL has it."""

    shared_buffers: Fact[int] = measured(unit="bytes")
    huge_pages: Fact[HugePagesSetting] = measured()
    huge_page_size: Fact[int] = measured(unit="bytes", doc="0: the kernel's default size")
    max_connections: Fact[int] = measured(unit="connections")
    shared_memory_type: Fact[Literal["mmap", "sysv"]] = measured()
    superuser_reserved_connections: Fact[int] = measured(unit="connections")
    autovacuum_max_workers: Fact[int] = measured()
    max_worker_processes: Fact[int] = measured()
    max_wal_senders: Fact[int] = measured()
    max_prepared_transactions: Fact[int] = measured()
    max_locks_per_transaction: Fact[int] = measured()
    max_replication_slots: Fact[int] = measured()
    wal_buffers: Fact[int] = measured(unit="bytes", doc="-1: derived from shared_buffers")
    shared_preload_libraries: Fact[str] = measured()
    port: Fact[int] = measured()


@dataclass(frozen=True)
class StartError:
    """PostgreSQL's first objection to its files: file, line (null where it names none) and its own reason."""

    file: str | None
    line: int | None
    reason: str


@dataclass(frozen=True)
class FileSettings:
    """What the next start would take from the files and the command line."""

    accepted: Fact[bool] = measured(doc="PostgreSQL takes the files")
    error: StartError | None = measured()
    settings: Settings = measured()
    newest_change: Fact[float] = measured(unit="seconds", doc="latest modification of a file read, epoch seconds")
