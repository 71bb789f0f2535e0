"""PostgreSQL clusters on the host: running postmasters, and data directories that do not run."""

from __future__ import annotations

from dataclasses import dataclass

from pgpreemptcheck.values import Fact, Unknown, measured


@dataclass(frozen=True)
class Postmaster:
    """A running postmaster, as its own process tells: never from a default path."""

    pid: int
    argv: tuple[str, ...]
    uid: Fact[int]
    started: Fact[float]  # epoch seconds
    data_directory: Fact[str]  # as the process sees it (inside its own root)
    config_file: Fact[str]
    port: Fact[int]
    socket_directories: Fact[tuple[str, ...]]
    root: str | None
    """`/proc/PID/root` where the process has another mount namespace or root than this one, else None."""
    container: str | None
    """A short stable name of its container, None on the host."""
    fork: str | None
    """The name of a fork of PostgreSQL (`edb-postgres`), None for PostgreSQL itself."""


@dataclass(frozen=True)
class StoppedCluster:
    """A data directory that nothing runs from."""

    data_directory: str
    config_file: Fact[str]
    argv: tuple[str, ...]  # what its start would add on the command line (pg_ctl.conf, unit files), where known
    uid: Fact[int]
    where: str  # how it was found: --pgdata, /etc/postgresql, /var/lib/pgsql
    starts_at_boot: Fact[bool]


@dataclass(frozen=True)
class Found:
    """The clusters of a host. `concealed` says that there may be one that cannot be seen, and why."""

    running: tuple[Postmaster, ...]
    stopped: tuple[StoppedCluster, ...]
    concealed: Unknown | None
