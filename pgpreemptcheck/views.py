"""Views: the facts of the host as they are now, and as they would be after the next start of PostgreSQL.

A view is a complete set of facts under the same names, so that one rule serves every horizon:
`now` what runs; `crash_restart` the same postmaster maps its segment anew, with its running settings;
`next_start` PostgreSQL started again with its files as they are on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal

from pgpreemptcheck.facts.cpus import CpuShare
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.facts.server import Server
from pgpreemptcheck.facts.settings import Settings, StartError, restarts_changed
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.start import Need, Outcome, Start, held, no_start, resulting_segment, start
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, measured, record

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
class Demand:
    """All huge pages of the host against all who want them, in bytes over all page sizes."""

    pool_bytes: Fact[int] = measured(unit="bytes", doc="reserved by the host, all sizes")
    clusters_bytes: Fact[int] = measured(unit="bytes", doc="wanted by the clusters here, at this horizon")
    foreign_bytes: Fact[int] = measured(unit="bytes", doc="used by or promised to anything else")
    nodes_uneven: Fact[bool] = measured(doc="a pool differs between memory nodes by more than a tenth")


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
    clusters = tuple(_cluster(system, cluster, horizon, assumed) for cluster in facts.clusters)
    host = HostView(
        **{field.name: getattr(system, field.name) for field in fields(system)},
        hidden_clusters=facts.hidden or Known(0, "the process list"),
        demand=_demand(system, facts.clusters, clusters),
    )
    return View(horizon, assumed.apply(host, "host", horizon), clusters)


def _cluster(system: System, cluster: ClusterFacts, horizon: Horizon, assumed: Assumptions) -> ClusterView:
    not_running = Unknown("the cluster does not run", kind="unsupported")
    running = cluster.settings is not None
    settings, segment = cluster.settings, cluster.segment
    if horizon == "next_start":
        files = cluster.files
        accepted, error = _standby_limits(cluster, files.accepted, files.error)
        settings = files.settings
    elif settings is None:
        accepted, error = not_running, None
    else:
        accepted, error = Known(True, "it runs with them"), None
    settings = assumed.apply(settings, "cluster.settings", horizon, cluster.id)
    if settings is None:
        begin = no_start(not_running)
    elif cluster.elsewhere is not None:
        begin = no_start(cluster.elsewhere)
    else:
        need = _need(cluster, settings)
        begin = start(
            settings=settings,
            accepted=accepted,
            error=error,
            need=need,
            huge_pages=system.huge_pages,
            hugetlbfs=system.kernel.build.hugetlbfs,
            own=held(cluster.segment),
            memory_nodes=cluster.cpus.memory_nodes,
            limits=cluster.hugetlb_limits,
        )
        begin = assumed.apply(begin, "cluster.start", horizon, cluster.id)
        if horizon == "now":
            begin = replace(begin, outcome=_outcome_now(begin, segment))
        else:
            segment = resulting_segment(
                begin, settings, need, system.memory.base_page_bytes, system.huge_pages.shmem_thp_possible
            )
    postmaster = cluster.postmaster
    view = ClusterView(
        id=cluster.id,
        data_directory=cluster.data_directory,
        running=running,
        version=cluster.version,
        major=cluster.major,
        fork=Known(cluster.fork, "the program's name"),
        owner=cluster.owner,
        pid=Known(postmaster.pid, "/proc") if postmaster else cluster.elsewhere or not_running,
        port=cluster.port,
        config_file=cluster.config_file,
        container=Known(cluster.container, "its cgroup") if cluster.container else Known(None, "its namespaces"),
        starts_at_boot=cluster.starts_at_boot,
        standby=cluster.standby,
        patroni=cluster.patroni,
        settings=settings,
        segment=segment,
        freelist=cluster.freelist,
        cpus=cluster.cpus,
        kernel_preemptible=cluster.elsewhere or system.kernel.preemption.preemptible,
        server=cluster.server,
        start=begin,
    )
    return assumed.apply(view, "cluster", horizon, cluster.id)


def _demand(system: System, facts: Sequence[ClusterFacts], clusters: Sequence[ClusterView]) -> Demand:
    pools = system.huge_pages.pools
    if isinstance(pools, Unknown):
        return Demand(pools, _wanted(clusters), pools, pools)
    reserved = promised = 0
    uneven: Fact[bool] = Known(False, "/sys/devices/system/node")
    for pool in pools:
        counts = (pool.page_bytes, pool.total, pool.free, pool.reserved)
        for fact in counts:
            if isinstance(fact, Unknown):
                return Demand(fact, _wanted(clusters), fact, fact)
        page, total, free, promise = (fact.value for fact in counts if isinstance(fact, Known))
        reserved += page * total
        promised += page * (total - free + promise)
        if isinstance(pool.per_node, Known) and len(pool.per_node.value) > 1 and total:
            spread = pool.per_node.value.values()
            if max(spread) - min(spread) > max(1, total // len(spread) // 10):
                uneven = Known(True, pool.per_node.source)
    source = "/sys/kernel/mm/hugepages"
    ours = sum(h.pages * h.page_bytes for h in (held(cluster.segment) for cluster in facts))
    unseen = next((c.segment.backing for c in facts if c.segment and isinstance(c.segment.backing, Unknown)), None)
    foreign: Fact[int] = Known(max(0, promised - ours), source)
    if unseen is not None and promised > ours:
        foreign = unseen
    return Demand(Known(reserved, source), _wanted(clusters), foreign, uneven)


def _wanted(clusters: Sequence[ClusterView]) -> Fact[int]:
    """Return the sum of what all clusters would take as huge pages, those with huge_pages = off left out."""
    total = 0
    for cluster in clusters:
        settings, begin = cluster.settings, cluster.start
        if settings is None or (isinstance(settings.huge_pages, Known) and settings.huge_pages.value == "off"):
            continue
        if isinstance(begin.pages_needed, Unknown):
            return begin.pages_needed
        if isinstance(begin.page_bytes, Unknown):
            return begin.page_bytes
        total += begin.pages_needed.value * begin.page_bytes.value
    return Known(total, "the segments of the clusters found")


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


_SIZING = (
    "shared_buffers", "max_connections", "autovacuum_max_workers", "max_worker_processes", "max_wal_senders",
    "max_prepared_transactions", "max_locks_per_transaction", "max_replication_slots", "wal_buffers",
    "shared_preload_libraries", "autovacuum_worker_slots", "max_pred_locks_per_transaction",
    "min_dynamic_shared_memory", "track_activity_query_size",
)  # fmt: skip
"""Settings that the size of the segment depends on (PostgreSQL src/backend/storage/ipc/ipci.c)."""


def _need(cluster: ClusterFacts, settings: Settings) -> Need:
    """Return the bytes that the segment takes with these settings: the running one's where nothing changed."""
    at_least: Fact[int] = settings.shared_buffers
    if isinstance(at_least, Known):
        at_least = Known(at_least.value, f"shared_buffers alone ({at_least.source})", "inferred")
    if cluster.segment is None or cluster.settings is None:
        return Need(
            Unknown(
                "the size of the segment is only known of a running server; it is more than shared_buffers",
                "with the server stopped: postgres -D DATA_DIRECTORY -C shared_memory_size_in_huge_pages (15+)",
            ),
            at_least,
        )
    for name in _SIZING:
        mine, running = getattr(settings, name), getattr(cluster.settings, name)
        if isinstance(mine, Unknown):
            return Need(mine, at_least)
        if isinstance(running, Unknown):
            return Need(running, at_least)
        if not _same(name, mine.value, running.value, at_least, cluster.server):
            return Need(
                Unknown(
                    f"{name} changes from {running.value} to {mine.value} ({mine.source}), and the size with it",
                    "with the server stopped: postgres -D DATA_DIRECTORY -C shared_memory_size_in_huge_pages (15+)",
                ),
                at_least,
            )
    other = _other_change(cluster) if settings is cluster.files.settings else None
    if other is not None:
        return Need(
            Unknown(
                f"{other} is not in the files what it is in the running server, and may change the size",
                "with the server stopped: postgres -D DATA_DIRECTORY -C shared_memory_size_in_huge_pages (15+)",
            ),
            at_least,
        )
    return Need(_running_need(cluster), at_least)


def _other_change(cluster: ClusterFacts) -> str | None:
    """Return a setting that only a start changes, changed in the files, which is none of those compared above."""
    server, postmaster = cluster.server, cluster.postmaster
    if (
        server is None
        or postmaster is None
        or isinstance(server.settings, Unknown)
        or isinstance(cluster.major, Unknown)
    ):
        return None
    return restarts_changed(cluster.files, server.settings.value, postmaster.argv, cluster.major.value)


def _same(name: str, wanted: object, running: object, shared_buffers: Fact[int], server: Server | None) -> bool:
    """Return whether a setting leaves the size of the segment as it is."""
    if wanted == running or name != "wal_buffers" or wanted != -1 or isinstance(shared_buffers, Unknown):
        return wanted == running
    # xlog.c XLOGChooseNumBuffers: a 32nd of shared_buffers, at least 64 kB, at most a WAL segment (16 MB unless
    # initdb was told otherwise)
    said = server.settings.value if server is not None and isinstance(server.settings, Known) else {}
    segment = said.get("wal_segment_size", "")
    most = int(segment) if is_number(segment) else 16 << 20
    return running == max(64 << 10, min(shared_buffers.value // 8192 // 32 * 8192, most))


def _running_need(cluster: ClusterFacts) -> Fact[int]:
    assert cluster.segment is not None
    size = cluster.segment.bytes
    if isinstance(size, Known):
        return Known(size.value, f"the running segment ({size.source})", size.certainty)
    server, running = cluster.server, cluster.settings
    if server is not None and running is not None and isinstance(server.huge_pages_needed, Known):
        megabytes = server.settings.value.get("shared_memory_size") if isinstance(server.settings, Known) else None
        if megabytes is not None and is_number(megabytes):
            return Known(int(megabytes) << 20, "sql shared_memory_size")
    return size


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
