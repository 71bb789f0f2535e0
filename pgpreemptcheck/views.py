"""Views: the facts of the host as they are now, and as they would be after the next start of PostgreSQL.

A view is a complete set of facts under the same names, so that one rule serves every horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pgpreemptcheck.facts.cpus import CpuShare
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.facts.server import Server
from pgpreemptcheck.facts.settings import Settings, StartError
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.values import Fact, measured

Horizon = Literal["now", "crash_restart", "next_start"]
HORIZONS: tuple[Horizon, ...] = ("now", "crash_restart", "next_start")

Outcome = Literal["starts", "refuses", "falls-back", "crashes"]
"""starts: as configured. refuses: it does not start. falls-back: `try` comes up on base pages, silently.
crashes: it starts and is killed by SIGBUS later (a cgroup's hugetlb fault limit below the segment)."""


@dataclass(frozen=True)
class Start:
    """What happens if PostgreSQL maps its segment at this horizon."""

    outcome: Fact[Outcome] = measured()
    accepted: Fact[bool] = measured(doc="PostgreSQL takes its files")
    error: StartError | None = measured()
    page_bytes: Fact[int] = measured(unit="bytes", doc="the huge page size that it would ask for")
    pool_exists: Fact[bool] = measured(doc="the kernel has a pool of that size")
    pages_needed: Fact[int] = measured(unit="pages", doc="huge pages that the whole segment takes")
    pages_obtainable: Fact[int] = measured(unit="pages", doc="pages it could get: its own, the unpromised, overcommit")
    pages_missing: Fact[int] = measured(unit="pages", doc="needed minus obtainable, never below 0")
    hugetlb_fault_limit_bytes: Fact[int | None] = measured(unit="bytes", doc="tightest cgroup fault limit, null: none")
    hugetlb_reservation_limit_bytes: Fact[int | None] = measured(unit="bytes", doc="tightest cgroup rsvd limit")


@dataclass(frozen=True)
class ClusterView:
    """One cluster at one horizon. `settings`, `segment` and `server` are None where there is none."""

    id: str
    data_directory: str | None
    running: bool
    version: Fact[str] = measured(doc="PG_VERSION, or the running server's own")
    major: Fact[int] = measured()
    fork: Fact[str | None] = measured(doc="a fork of PostgreSQL by its program name, null for PostgreSQL")
    owner: Fact[str] = measured()
    pid: Fact[int] = measured()
    port: Fact[int] = measured()
    config_file: Fact[str] = measured()
    container: Fact[str | None] = measured()
    starts_at_boot: Fact[bool] = measured()
    standby: Fact[bool] = measured(doc="standby.signal or recovery.signal is there")
    patroni: Fact[bool] = measured(doc="Patroni started it, so its command line beats the files")
    settings: Settings | None = measured()
    segment: Segment | None = measured()
    freelist: Fact[bool] = measured(doc="the server has the buffer freelist (PostgreSQL 9.5 to 18)")
    cpus: CpuShare = measured()
    allowed_backends: Fact[int] = measured(
        unit="backends", doc="client backends and autovacuum workers allowed at once"
    )
    server: Server | None = measured()
    start: Start = measured()


@dataclass(frozen=True)
class View:
    horizon: Horizon
    host: System
    clusters: tuple[ClusterView, ...]
