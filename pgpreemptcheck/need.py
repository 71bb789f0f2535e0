"""Need: the bytes that the main segment of a cluster takes with given settings.

The running segment tells it where nothing changed; what is known otherwise is shared_buffers, and it is more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgpreemptcheck.facts.server import Server
from pgpreemptcheck.facts.settings import Settings, restarts_changed
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, record

if TYPE_CHECKING:
    from pgpreemptcheck.inspection import ClusterFacts


@record
class Need:
    """Bytes of the segment to come. `exact` may be unknown while `at_least` is not (shared_buffers alone)."""

    exact: Fact[int]
    at_least: Fact[int]


_SIZING = (
    "shared_buffers", "max_connections", "autovacuum_max_workers", "max_worker_processes", "max_wal_senders",
    "max_prepared_transactions", "max_locks_per_transaction", "max_replication_slots", "wal_buffers",
    "shared_preload_libraries", "autovacuum_worker_slots", "max_pred_locks_per_transaction",
    "min_dynamic_shared_memory", "track_activity_query_size",
)  # fmt: skip
"""Settings that the size of the segment depends on (PostgreSQL src/backend/storage/ipc/ipci.c)."""


def need(cluster: ClusterFacts, settings: Settings) -> Need:
    """Return the bytes that the segment takes with these settings: the running one's where nothing changed."""
    at_least: Fact[int] = settings.shared_buffers
    if isinstance(at_least, Known):
        at_least = Known(at_least.value, f"shared_buffers alone ({at_least.source})", "inferred")
    if cluster.segment is None or cluster.settings is None:
        why = "the size of the segment is only known of a running server; it is more than shared_buffers"
        return Need(Unknown(why, how_to_learn(cluster)), at_least)
    for name in _SIZING:
        mine, running = getattr(settings, name), getattr(cluster.settings, name)
        if isinstance(mine, Unknown):
            return Need(mine, at_least)
        if isinstance(running, Unknown):
            return Need(running, at_least)
        if not _same(name, mine.value, running.value, at_least, cluster.server):
            why = f"{name} changes from {running.value} to {mine.value} ({mine.source}), and the size with it"
            return Need(Unknown(why, how_to_learn(cluster)), at_least)
    other = _other_change(cluster) if settings is cluster.files.settings else None
    if other is not None:
        why = f"{other} is not in the files what it is in the running server, and may change the size"
        return Need(Unknown(why, how_to_learn(cluster)), at_least)
    return Need(_running_need(cluster), at_least)


def how_to_learn(cluster: ClusterFacts) -> str:
    """Return what tells the size exactly: PostgreSQL itself (15 and later, while no server holds the directory)."""
    if isinstance(cluster.major, Known) and cluster.major.value < 15:
        return "start it with huge_pages = try and check again: the running segment has the size"
    from shlex import quote  # only for a gap

    program = cluster.postmaster.argv[0] if cluster.postmaster is not None else ""
    command = f"{quote(program) if program.startswith('/') else 'postgres'} -D {quote(cluster.data_directory or 'DIR')}"
    config = cluster.config_file
    if isinstance(config, Known) and config.value != f"{cluster.data_directory}/postgresql.conf":
        command += f" -c config_file={quote(config.value)}"
    owner = f"as {cluster.owner.value}" if isinstance(cluster.owner, Known) else "as its owner"
    return f"with the server stopped, {owner}: {command} -C shared_memory_size_in_huge_pages"


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
