"""What a start needs beyond its files: huge pages that it can get, and cgroup limits that let it keep them.

Sources: PostgreSQL src/backend/port/sysv_shmem.c (CreateAnonymousSegment: one mmap of the whole segment, all or
nothing; `try` retries without MAP_HUGETLB, silently), Linux mm/hugetlb.c (hugetlb_acct_memory: a mapping is
promised its pages from free - reserved, and on a cpuset's nodes from what is free there) and
mm/hugetlb_cgroup.c (the reservation limit makes mmap fail, the fault limit kills by SIGBUS later).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeGuard

from pgpreemptcheck.facts.hugepages import HugePages, Pool
from pgpreemptcheck.facts.segment import Backing, Segment
from pgpreemptcheck.facts.settings import Settings, StartError
from pgpreemptcheck.need import Need
from pgpreemptcheck.units import as_bytes, as_pages
from pgpreemptcheck.values import Certainty, Fact, Known, Unknown, measured, record

if TYPE_CHECKING:
    from pgpreemptcheck.facts.cgroups import HugetlbLimit

Outcome = Literal["starts", "refuses", "falls-back", "crashes"]
"""starts: as configured. refuses: it does not start. falls-back: `try` comes up on base pages, silently.
crashes: it maps huge pages and is killed by SIGBUS when it touches more than its cgroup may have."""

GIGANTIC = 64 << 20
"""From this size on pages are gigantic on x86-64 and arm64 with 4 kB pages: the kernel gives no surplus of them."""


@record
class Start:
    """What happens when PostgreSQL maps its segment at this horizon."""

    outcome: Fact[Outcome] = measured()
    accepted: Fact[bool] = measured(doc="PostgreSQL takes its files")
    error: StartError | None = measured()
    page_bytes: Fact[int] = measured(unit="bytes", doc="the huge page size that it would ask for")
    pool_exists: Fact[bool] = measured(doc="the kernel has a pool of that size")
    pages_needed: Fact[int] = measured(unit="pages", doc="huge pages that the whole segment takes")
    pages_at_least: Fact[int] = measured(unit="pages", doc="the same, or for shared_buffers alone where it is unknown")
    pages_obtainable: Fact[int] = measured(unit="pages", doc="pages it could get: its own, the unpromised, overcommit")
    pages_missing: Fact[int] = measured(unit="pages", doc="needed minus obtainable, never below 0")
    pages_claimed_by_others: Fact[int] = measured(
        unit="pages", doc="of the obtainable ones, those that other clusters, which hold none yet, would take"
    )
    reservation: Fact[str] = measured(doc="in words: what the pool must be for this start, or how to learn that")
    fault_limit_bytes: Fact[int | None] = measured(unit="bytes", doc="tightest cgroup fault limit, null: none")
    reservation_limit_bytes: Fact[int | None] = measured(unit="bytes", doc="tightest cgroup rsvd limit, null: none")


@record
class Held:
    """Huge pages that the cluster's running segment holds, given back before it maps anew."""

    page_bytes: int
    pages: int


def held(segment: Segment | None) -> Held:
    """Return the huge pages of the running segment; none where there is none, or it is not on huge pages."""
    if segment is not None and isinstance(segment.backing, Known) and segment.backing.value == "huge":
        size, page = segment.bytes, segment.page_bytes
        if isinstance(size, Known) and isinstance(page, Known) and page.value > 0:
            return Held(page.value, -(-size.value // page.value))
    return Held(0, 0)


def find_pool(huge_pages: HugePages, page_bytes: int) -> Fact[Pool | None]:
    """Return the pool of that page size, None where the kernel has none."""
    if isinstance(huge_pages.pools, Unknown):
        return huge_pages.pools
    complete = True
    for pool in huge_pages.pools:
        if isinstance(pool.page_bytes, Unknown):
            complete = False
        elif pool.page_bytes.value == page_bytes:
            return Known(pool, pool.page_bytes.source)
    if not complete or not huge_pages.pools:
        return Unknown("the huge page pools of this host were not read", "run on the host itself, or capture /sys")
    return Known(None, "/sys/kernel/mm/hugepages")


def obtainable(pool: Pool, own: Held, memory_nodes: Fact[tuple[int, ...]]) -> Fact[int]:
    """Return how many pages a start could get: total - surplus + overcommit - what others use or were promised.

    With fewer memory nodes than the host has, also no more than what is free on those nodes.
    """
    total, free, reserved, surplus = pool.total, pool.free, pool.reserved, pool.surplus
    for fact in (total, free, reserved, surplus):
        if isinstance(fact, Unknown):
            return fact
    assert isinstance(total, Known) and isinstance(free, Known)  # for the type checker: the loop above
    assert isinstance(reserved, Known) and isinstance(surplus, Known)
    page_bytes = pool.page_bytes.value if isinstance(pool.page_bytes, Known) else 0
    own_pages = own.pages if own.page_bytes == page_bytes else 0
    others = max(0, total.value - free.value + reserved.value - own_pages)
    nominal = max(0, total.value - surplus.value)
    pages = nominal - others
    certainty: Certainty = "measured"
    source = f"{total.source}: {nominal} reserved by the host"
    if others:
        source += f", {others} used by or promised to others"
    if isinstance(pool.overcommit, Known) and pool.overcommit.value and page_bytes < GIGANTIC:
        pages += pool.overcommit.value
        source += f", {pool.overcommit.value} more by overcommit if memory can be found"
        certainty = "inferred"
    on_nodes = _free_on_nodes(pool, own_pages, memory_nodes)
    if isinstance(on_nodes, Known) and on_nodes.value < pages:
        return Known(max(0, on_nodes.value), on_nodes.source, "inferred")
    return Known(max(0, pages), source, certainty)


def _free_on_nodes(pool: Pool, own_pages: int, memory_nodes: Fact[tuple[int, ...]]) -> Fact[int]:
    """Return the pages free on the nodes that a cpuset leaves, own pages given back (assumed to lie there)."""
    per_node, free = pool.per_node, pool.per_node_free
    if isinstance(per_node, Unknown):
        return per_node
    if isinstance(free, Unknown):
        return free
    if isinstance(memory_nodes, Unknown):
        return memory_nodes
    names = {f"node{node}" for node in memory_nodes.value}
    if names >= set(per_node.value):
        return Unknown("all nodes are allowed")
    total_here = sum(count for name, count in per_node.value.items() if name in names)
    free_here = sum(count for name, count in free.value.items() if name in names)
    surplus = pool.per_node_surplus.value if isinstance(pool.per_node_surplus, Known) else {}
    surplus_here = sum(count for name, count in surplus.items() if name in names)
    own_touched = min(own_pages, max(0, total_here - free_here))
    pages = free_here + own_touched - surplus_here
    return Known(pages, f"{free.source}: free on the memory nodes it may use ({', '.join(sorted(names))})")


def _headroom(
    limits: tuple[HugetlbLimit, ...] | Unknown, page_bytes: int, own: Held, kind: Literal["fault", "reservation"]
) -> Fact[int | None]:
    """Return the bytes of that page size that every cgroup above still allows, None where none limits."""
    if isinstance(limits, Unknown):
        return limits
    own_bytes = own.pages * own.page_bytes if own.page_bytes == page_bytes else 0
    tightest: Known[int | None] = Known(None, "no cgroup above it limits huge pages")
    gap: Unknown | None = None
    for entry in limits:
        if entry.page_bytes != page_bytes:
            continue
        limit = entry.fault_limit if kind == "fault" else entry.reservation_limit
        usage = entry.fault_usage if kind == "fault" else entry.reservation_usage
        if isinstance(limit, Unknown):
            gap = limit if limit.kind != "absent" else gap  # no such file: this kernel has no such limit
            continue
        if limit.value is None:
            continue
        used_by_others = max(0, usage.value - own_bytes) if isinstance(usage, Known) else 0
        left = max(0, limit.value - used_by_others)
        if tightest.value is None or left < tightest.value:
            tightest = Known(left, limit.source)
    if tightest.value is None and gap is not None:
        return gap
    return tightest


def no_start(why: Unknown) -> Start:
    """Return the start of a cluster that there is nothing to say about."""
    return Start(why, why, None, why, why, why, why, why, why, why, why, why, why)


def start(
    *,
    settings: Settings,
    accepted: Fact[bool],
    error: StartError | None,
    need: Need,
    huge_pages: HugePages,
    hugetlbfs: Fact[bool],
    own: Held,
    memory_nodes: Fact[tuple[int, ...]],
    limits: tuple[HugetlbLimit, ...] | Unknown,
) -> Start:
    """Work out what a start with these settings does on this host."""
    page_bytes = _page_bytes(settings, huge_pages)
    pool: Fact[Pool | None] = find_pool(huge_pages, page_bytes.value) if isinstance(page_bytes, Known) else page_bytes
    if isinstance(pool, Known) and pool.value is not None:
        can_get: Fact[int] = obtainable(pool.value, own, memory_nodes)
    elif isinstance(pool, Known):
        can_get = Known(0, f"{pool.source}: no pool of this page size")
    else:
        can_get = pool
    needed = _pages(need.exact, page_bytes)
    at_least = needed if isinstance(needed, Known) else _pages(need.at_least, page_bytes)
    missing = _missing(needed, at_least, can_get)
    words = _reservation(huge_pages, pool, need, page_bytes, at_least, can_get)
    size = page_bytes.value if isinstance(page_bytes, Known) else 0
    fault = _headroom(limits, size, own, "fault") if size else Unknown("the huge page size is not known")
    rsvd = _headroom(limits, size, own, "reservation") if size else Unknown("the huge page size is not known")
    exists: Fact[bool] = Known(pool.value is not None, pool.source) if isinstance(pool, Known) else pool
    mapping = _mapping(settings, hugetlbfs, exists, missing, needed, page_bytes, fault, rsvd)
    outcome = _with_files(accepted, mapping)
    given = (settings.huge_pages, settings.shared_memory_type, page_bytes, hugetlbfs, need.exact, accepted)
    if isinstance(outcome, Known) and any(isinstance(fact, Known) and fact.certainty == "assumed" for fact in given):
        outcome = Known(outcome.value, outcome.source, "assumed")
    return Start(
        outcome, accepted, error, page_bytes, exists, needed, at_least, can_get, missing,
        Known(0, "no other cluster wants them"), words, fault, rsvd,
    )  # fmt: skip


def _page_bytes(settings: Settings, huge_pages: HugePages) -> Fact[int]:
    size = settings.huge_page_size
    if isinstance(size, Known) and size.value:
        return size
    if isinstance(size, Unknown):
        return size
    default = huge_pages.default_bytes
    return Known(default.value, default.source) if isinstance(default, Known) else default


def _pages(size: Fact[int], page_bytes: Fact[int]) -> Fact[int]:
    if isinstance(size, Unknown):
        return size
    if isinstance(page_bytes, Unknown):
        return page_bytes
    if page_bytes.value <= 0:
        return Unknown("the huge page size reads as 0")
    return Known(-(-size.value // page_bytes.value), size.source, size.certainty)


def _reservation(
    huge_pages: HugePages,
    pool: Fact[Pool | None],
    need: Need,
    page_bytes: Fact[int],
    at_least: Fact[int],
    can_get: Fact[int],
) -> Fact[str]:
    """Return in words what the pool must be: what is missing is added to it, so that nobody's pages are taken."""
    for fact in (pool, page_bytes, at_least, can_get):
        if isinstance(fact, Unknown):
            return fact
    assert isinstance(pool, Known) and isinstance(page_bytes, Known)  # for the type checker: the loop above
    assert isinstance(at_least, Known) and isinstance(can_get, Known)
    size = as_bytes(page_bytes.value)
    if pool.value is None:
        return Known(f"this host has no huge pages of {size}: choose a huge_page_size that it has", pool.source)
    total, surplus = pool.value.total, pool.value.surplus
    if isinstance(total, Unknown):
        return total
    if isinstance(surplus, Unknown):
        return surplus
    set_now = max(0, total.value - surplus.value)
    knob = f"/sys/kernel/mm/hugepages/hugepages-{page_bytes.value >> 10}kB/nr_hugepages"
    command = "echo {} > " + knob
    if isinstance(huge_pages.default_bytes, Known) and huge_pages.default_bytes.value == page_bytes.value:
        knob, command = "vm.nr_hugepages", "sysctl -w vm.nr_hugepages={}"
    takes = f"{as_pages(at_least.value)} of {size} ({as_bytes(at_least.value * page_bytes.value)})"
    short = max(0, at_least.value - can_get.value)
    source = f"{at_least.source}; {can_get.source}"
    if isinstance(need.exact, Unknown):
        hint = f"; the exact number: {need.exact.hint}" if need.exact.hint else f" ({need.exact.reason})"
        return Known(
            f"{knob} must be more than {set_now + short} (it is {set_now}): shared_buffers alone is {takes}, and the "
            f"segment is larger{hint}",
            source,
        )
    if not short:
        return Known(f"the {takes} that it takes can be had as the pool is, by a start of PostgreSQL", source)
    return Known(
        f"{knob} must be at least {set_now + short} (it is {set_now}; {command.format(set_now + short)}): this cluster "
        f"takes {takes}, of which {can_get.value:,} can be had",
        source,
    )


def _missing(needed: Fact[int], at_least: Fact[int], can_get: Fact[int]) -> Fact[int]:
    if isinstance(can_get, Unknown):
        return can_get
    if isinstance(needed, Known):
        weakest: Certainty = "inferred" if "inferred" in (needed.certainty, can_get.certainty) else "measured"
        return Known(max(0, needed.value - can_get.value), f"{needed.source}; {can_get.source}", weakest)
    if isinstance(at_least, Known) and at_least.value > can_get.value:
        return Known(at_least.value - can_get.value, f"at least: {at_least.source}; {can_get.source}", "inferred")
    return needed


def _mapping(
    settings: Settings,
    hugetlbfs: Fact[bool],
    pool_exists: Fact[bool],
    missing: Fact[int],
    needed: Fact[int],
    page_bytes: Fact[int],
    fault_limit: Fact[int | None],
    reservation_limit: Fact[int | None],
) -> Fact[Outcome]:
    """Return the outcome of mapping the segment, the files taken for good."""
    mode = settings.huge_pages
    if isinstance(mode, Unknown):
        return mode
    if mode.value == "off":
        return Known("starts", mode.source, mode.certainty)
    kind = settings.shared_memory_type
    if isinstance(kind, Known) and kind.value == "sysv":  # PostgreSQL has no huge pages for System V memory on Linux
        return Known("refuses" if mode.value == "on" else "starts", kind.source)
    short: Outcome = "refuses" if mode.value == "on" else "falls-back"
    if isinstance(hugetlbfs, Known) and not hugetlbfs.value:
        return Known(short, f"{hugetlbfs.source}: this kernel has no huge pages", hugetlbfs.certainty)
    if isinstance(pool_exists, Known) and not pool_exists.value:
        return Known(short, pool_exists.source)
    if isinstance(missing, Known) and missing.value > 0:
        return Known(short, missing.source, missing.certainty)
    size = needed.value * page_bytes.value if isinstance(needed, Known) and isinstance(page_bytes, Known) else None
    if _is_below(reservation_limit, size):
        return Known(short, reservation_limit.source)
    for fact in (kind, pool_exists, missing):
        if isinstance(fact, Unknown):
            return fact
    assert isinstance(missing, Known) and size is not None  # for the type checker: missing is known from needed
    if _is_below(fault_limit, size):
        return Known("crashes", fault_limit.source)
    for limit in (reservation_limit, fault_limit):
        if isinstance(limit, Unknown) and limit.kind != "absent":
            return limit
    return Known("starts", missing.source, missing.certainty)


def _is_below(limit: Fact[int | None], size: int | None) -> TypeGuard[Known[int]]:
    return isinstance(limit, Known) and limit.value is not None and size is not None and limit.value < size


def _with_files(accepted: Fact[bool], mapping: Fact[Outcome]) -> Fact[Outcome]:
    if isinstance(accepted, Known):
        return mapping if accepted.value else Known("refuses", accepted.source)
    if isinstance(mapping, Known) and mapping.value == "refuses":
        return mapping
    return accepted


def resulting_segment(
    begin: Start,
    settings: Settings,
    need: Need,
    base_page_bytes: Fact[int],
    shmem_thp_possible: Fact[bool],
) -> Segment:
    """Return the segment that such a start ends up with."""
    backing = _backing(begin, settings)
    if isinstance(backing, Unknown):
        return Segment(need.exact, backing, backing, shmem_thp_possible, backing)
    if backing.value == "huge":
        no = Known(False, backing.source, backing.certainty)
        return Segment(need.exact, begin.page_bytes, backing, no, no)
    if isinstance(shmem_thp_possible, Known):
        base: Fact[bool] = (
            Unknown(
                "shared memory can be on transparent huge pages here, and how much of it will be cannot be told",
                "cat /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            )
            if shmem_thp_possible.value
            else Known(True, backing.source, backing.certainty)
        )
    else:
        base = shmem_thp_possible
    return Segment(need.exact, base_page_bytes, backing, shmem_thp_possible, base)


def _backing(begin: Start, settings: Settings) -> Fact[Backing]:
    kind, mode = settings.shared_memory_type, settings.huge_pages
    if isinstance(begin.outcome, Known) and begin.outcome.value == "refuses":
        return Unknown("it does not start", kind="unsupported")
    if isinstance(kind, Known) and kind.value == "sysv":
        return Known("sysv", kind.source)
    if isinstance(mode, Known) and mode.value == "off":
        return Known("base", mode.source, mode.certainty) if isinstance(kind, Known) else kind
    outcome = begin.outcome
    if isinstance(outcome, Unknown):
        return outcome
    if outcome.value == "falls-back":
        return Known("base", outcome.source, outcome.certainty)
    return Known("huge", outcome.source, outcome.certainty)
