"""Views: the facts of the host as they are now, and as they would be after the next start of PostgreSQL.

A view is a complete set of facts under the same names, so that one rule serves every horizon:
`now` what runs; `crash_restart` the same postmaster maps its segment anew, with its running settings;
`next_start` PostgreSQL started again with its files as they are on disk.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal

from pgpreemptcheck.demand import Demand, Prospect, demand, share
from pgpreemptcheck.facts.cpus import CpuShare
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.facts.server import Server
from pgpreemptcheck.facts.settings import Settings, StartError
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.need import need
from pgpreemptcheck.start import Outcome, Start, held, no_start, resulting_segment, start
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

if TYPE_CHECKING:
    from pgpreemptcheck.assume import Assumptions
    from pgpreemptcheck.inspection import ClusterFacts, Facts

Horizon = Literal["now", "crash_restart", "next_start"]
HORIZONS: tuple[Horizon, ...] = ("now", "crash_restart", "next_start")


@record
class ClusterView:
    """One cluster at one horizon. `settings`, `segment` and `server` are None where there is none."""

    id: str
    data_directory: str | None
    running: bool
    seen: Fact[bool] = measured(doc="whether it runs could be told; unknown where its process may be out of sight")
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
    kernel_preemptible: Fact[bool] = measured(doc="the kernel under it preempts kernel code (its own host's kernel)")
    server: Server | None = measured()
    start: Start = measured()


@record
class HostView(System):
    """The host at one horizon, with what follows from its clusters."""

    hidden_clusters: Fact[int] = measured(doc="0; unknown where a cluster may run that cannot be seen")
    demand: Demand = measured()


@record
class View:
    """All facts at one horizon."""

    horizon: Horizon
    host: HostView
    clusters: tuple[ClusterView, ...]


def make_views(facts: Facts, assumed: Assumptions) -> dict[Horizon, View]:
    """Return a view for each horizon, in the order of HORIZONS."""
    return {horizon: _view(facts, horizon, assumed) for horizon in HORIZONS}


def _view(facts: Facts, horizon: Horizon, assumed: Assumptions) -> View:
    system = assumed.apply(facts.system, "host", horizon)
    prospects = [_prospect(system, cluster, horizon, assumed) for cluster in facts.clusters]
    if horizon == "next_start":
        prospects = share(prospects)
    clusters = tuple(
        _cluster(system, cluster, prospect, horizon, assumed)
        for cluster, prospect in zip(facts.clusters, prospects, strict=True)
    )
    host = HostView(
        **{field.name: getattr(system, field.name) for field in fields(system)},
        hidden_clusters=facts.hidden or Known(0, "the process list"),
        demand=demand(system, prospects),
    )
    return View(horizon, assumed.apply(host, "host", horizon), clusters)


def _prospect(system: System, cluster: ClusterFacts, horizon: Horizon, assumed: Assumptions) -> Prospect:
    """Return the start of one cluster with the settings of that horizon, the other clusters as they are now."""
    settings = cluster.settings
    if horizon == "next_start":
        files = cluster.files
        accepted, error = _standby_limits(cluster, files.accepted, files.error)
        settings = files.settings
    else:
        accepted, error = Known(True, "it runs with them"), None
    settings = assumed.apply(settings, "cluster.settings", horizon, cluster.id)
    needed = None
    if settings is None:
        begin = no_start(_NOT_RUNNING)
    elif cluster.elsewhere is not None:
        begin = no_start(cluster.elsewhere)
    else:
        needed = need(cluster, settings)
        begin = start(
            settings=settings,
            accepted=accepted,
            error=error,
            need=needed,
            huge_pages=system.huge_pages,
            hugetlbfs=system.kernel.build.hugetlbfs,
            own=held(cluster.segment),
            memory_nodes=cluster.cpus.memory_nodes,
            limits=cluster.hugetlb_limits,
        )
    running = cluster.settings is not None
    return Prospect(
        cluster=cluster.id,
        settings=settings,
        need=needed,
        own=held(cluster.segment),
        backing=cluster.segment.backing if cluster.segment is not None else None,
        start=begin,
        comes_up=running or not (isinstance(cluster.starts_at_boot, Known) and not cluster.starts_at_boot.value),
    )


def _server(server: Server | None, settings: Settings | None, horizon: Horizon) -> Server | None:
    """Return what the server says; after a start no buffer has been used yet, whatever it says now."""
    if server is None or settings is None or horizon == "now":
        return server
    buffers = settings.shared_buffers
    if isinstance(buffers, Known):
        buffers = Known(buffers.value // _BLOCK_BYTES, f"all of them after a start ({buffers.source})", "inferred")
    return replace(server, unused_buffers=buffers)


def _cpus(share: CpuShare, system: System) -> CpuShare:
    """Return what the cluster may use; of a host whose CPUs are assumed, all of them."""
    online = system.cpus.online
    return replace(share, allowed=online) if isinstance(online, Known) and online.certainty == "assumed" else share


_BLOCK_BYTES = 8192  # of every packaged build (configure --with-blocksize)

_NOT_RUNNING = Unknown("the cluster does not run", kind="unsupported")


def _cluster(
    system: System, cluster: ClusterFacts, prospect: Prospect, horizon: Horizon, assumed: Assumptions
) -> ClusterView:
    settings, segment, begin = prospect.settings, cluster.segment, prospect.start
    if settings is not None and prospect.need is not None:
        begin = assumed.apply(begin, "cluster.start", horizon, cluster.id)
        if horizon == "now":
            begin = replace(begin, outcome=_outcome_now(begin, segment))
        else:
            segment = resulting_segment(
                begin, settings, prospect.need, system.memory.base_page_bytes, system.huge_pages.shmem_thp_possible
            )
    postmaster = cluster.postmaster
    view = ClusterView(
        id=cluster.id,
        data_directory=cluster.data_directory,
        running=cluster.settings is not None,
        seen=cluster.unseen or Known(True, "the process list"),
        version=cluster.version,
        major=cluster.major,
        fork=Known(cluster.fork, "the program's name"),
        owner=cluster.owner,
        pid=Known(postmaster.pid, "/proc") if postmaster else cluster.elsewhere or _NOT_RUNNING,
        port=cluster.port,
        config_file=cluster.config_file,
        container=Known(cluster.container, "its cgroup and mounts" if cluster.container else "its namespaces"),
        starts_at_boot=cluster.starts_at_boot,
        standby=cluster.standby,
        patroni=cluster.patroni,
        settings=settings,
        segment=segment,
        freelist=cluster.freelist,
        cpus=_cpus(cluster.cpus, system),
        kernel_preemptible=cluster.elsewhere or system.kernel.preemption.preemptible,
        server=_server(cluster.server, settings, horizon),
        start=begin,
    )
    return assumed.apply(view, "cluster", horizon, cluster.id)


def _outcome_now(begin: Start, segment: Segment | None) -> Fact[Outcome]:
    """Return what became of the start that this server runs from: it is up, but may have fallen back or be doomed."""
    if segment is None:
        return Unknown("the segment was not read")
    if isinstance(segment.backing, Unknown):
        return segment.backing
    if segment.backing.value == "huge":
        limit, size = begin.fault_limit_bytes, segment.bytes
        if isinstance(limit, Unknown):
            return limit if limit.kind != "absent" else Known("starts", segment.backing.source)
        if limit.value is not None and isinstance(size, Known) and limit.value < size.value:
            return Known("crashes", limit.source)
    return Known("starts", segment.backing.source, segment.backing.certainty)


def _standby_limits(
    cluster: ClusterFacts, accepted: Fact[bool], error: StartError | None
) -> tuple[Fact[bool], StartError | None]:
    """Refuse a standby whose limits are below its primary's (xlogrecovery.c CheckRequiredParameterValues)."""
    if not (isinstance(accepted, Known) and accepted.value):
        return accepted, error
    if not (isinstance(cluster.standby, Known) and cluster.standby.value) or isinstance(cluster.control, Unknown):
        return accepted, error
    settings = cluster.files.settings
    if cluster.control.value.wal_level == "minimal":
        reason = "WAL was generated with wal_level=minimal, cannot continue recovering"
        return Known(False, cluster.control.source), StartError(None, None, reason)
    if isinstance(settings.hot_standby, Known) and not settings.hot_standby.value:
        return accepted, error
    for name, required in cluster.control.value.required.items():
        mine = getattr(settings, name, None)
        if isinstance(mine, Known) and mine.value < required:
            below = f"{name} = {mine.value} is a lower setting than on the"
            if isinstance(cluster.major, Known) and cluster.major.value < 14:
                reason = f"hot standby is not possible because {below} master server (its value was {required})"
            else:
                reason = (
                    "recovery aborted because of insufficient parameter settings: "
                    f"{below} primary server, where its value was {required}"
                )
            return Known(False, f"{cluster.control.source}; {mine.source}"), StartError(None, None, reason)
    return accepted, error
