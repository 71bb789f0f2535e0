"""Demand: all huge pages of the host against everything that wants them, and clusters that want the same ones.

One pool serves all clusters of a host. What one of them could get is worked out for it alone (start.py); here the
starts of all are looked at together, since pages that two clusters could each get cannot be had by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pgpreemptcheck.facts.settings import Settings
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.need import Need
from pgpreemptcheck.start import Held, Start
from pgpreemptcheck.units import as_bytes
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record


@record
class Demand:
    """All huge pages of the host against all who want them, in bytes over all page sizes."""

    pool_bytes: Fact[int] = measured(unit="bytes", doc="reserved by the host, all sizes")
    clusters_bytes: Fact[int] = measured(unit="bytes", doc="wanted by the clusters here, at this horizon")
    foreign_bytes: Fact[int] = measured(unit="bytes", doc="used by or promised to anything else")
    nodes_uneven: Fact[bool] = measured(doc="a pool differs between memory nodes by more than a tenth")


@record
class Prospect:
    """The start of one cluster to come, as it would be with no other cluster started before it."""

    cluster: str
    settings: Settings | None
    need: Need | None
    own: Held
    backing: Fact[str] | None
    """What the running segment is on; None where there is none."""
    start: Start
    comes_up: bool
    """False for a cluster that does not run and is not started at boot: it takes no pages by itself."""


def share(prospects: Sequence[Prospect]) -> list[Prospect]:
    """Return the prospects with the outcome Unknown where it hangs on which cluster is started first.

    A cluster that holds its pages gets them back (what it gives up when it stops, it maps again a moment later). One
    that holds none takes its pages from those that nobody has yet: where several want more of these than there are,
    the first one started gets them (Linux mm/hugetlb.c hugetlb_acct_memory: all or nothing, first come).
    """
    claims = {one.cluster: _extra(one) for one in prospects}
    return [replace(one, start=_beside(one, prospects, claims)) if claims[one.cluster] else one for one in prospects]


def _beside(one: Prospect, prospects: Sequence[Prospect], claims: Mapping[str, int]) -> Start:
    start, page_bytes, obtainable = one.start, one.start.page_bytes, one.start.pages_obtainable
    if isinstance(page_bytes, Unknown) or isinstance(obtainable, Unknown):
        return start
    rivals = [
        other
        for other in prospects
        if other is not one and claims[other.cluster] and other.comes_up and _page_bytes(other) == page_bytes.value
    ]
    if not rivals:
        return start
    claimed = sum(claims[rival.cluster] for rival in rivals)
    names = ", ".join(rival.cluster for rival in rivals[:3])
    if len(rivals) > 3:
        names += f" and {len(rivals) - 3} more"
    start = replace(start, pages_claimed_by_others=Known(claimed, f"what {names} would take and does not hold yet"))
    if not (isinstance(start.outcome, Known) and start.outcome.value in ("starts", "crashes")):
        return start
    if isinstance(start.pages_needed, Known) and start.pages_needed.value + claimed > obtainable.value:
        missing = start.pages_needed.value + claimed - obtainable.value
        return replace(
            start,
            outcome=Unknown(
                f"it hangs on which cluster is started first: of the {obtainable.value:,} huge pages that can be had "
                f"this one takes {start.pages_needed.value:,}, and {names} would take {claimed:,}",
                "reserve huge pages for all of them",
            ),
            reservation=Known(
                f"the pool of {as_bytes(page_bytes.value)} pages must grow by at least {missing:,}, so that this "
                f"cluster and {names} all find theirs",
                obtainable.source,
            ),
        )
    if any(isinstance(rival.start.pages_needed, Unknown) for rival in rivals):
        return replace(start, outcome=Known(start.outcome.value, start.outcome.source, "inferred"))
    return start


def _page_bytes(one: Prospect) -> int | None:
    return one.start.page_bytes.value if isinstance(one.start.page_bytes, Known) else None


def _extra(one: Prospect) -> int:
    """Return the huge pages that a start would take beyond those that the cluster holds; 0 where it would take none."""
    settings, start = one.settings, one.start
    if settings is None or not (isinstance(settings.huge_pages, Known) and settings.huge_pages.value in ("on", "try")):
        return 0
    if isinstance(settings.shared_memory_type, Known) and settings.shared_memory_type.value != "mmap":
        return 0
    if isinstance(start.outcome, Known) and start.outcome.value in ("refuses", "falls-back"):
        return 0
    if isinstance(start.pages_at_least, Unknown) or isinstance(start.page_bytes, Unknown):
        return 0
    held = one.own.pages if one.own.page_bytes == start.page_bytes.value else 0
    return max(0, start.pages_at_least.value - held)


def demand(system: System, prospects: Sequence[Prospect]) -> Demand:
    """Return what all huge pages of the host are, and who wants them at the horizon of these starts."""
    pools, wanted = system.huge_pages.pools, _wanted(prospects)
    if isinstance(pools, Unknown):
        return Demand(pools, wanted, pools, pools)
    reserved = promised = 0
    uneven: Fact[bool] = Known(False, "/sys/devices/system/node")
    for pool in pools:
        counts = (pool.page_bytes, pool.total, pool.free, pool.reserved)
        for fact in counts:
            if isinstance(fact, Unknown):
                return Demand(fact, wanted, fact, fact)
        page, total, free, promise = (fact.value for fact in counts if isinstance(fact, Known))
        reserved += page * total
        promised += page * (total - free + promise)
        if isinstance(pool.per_node, Known) and len(pool.per_node.value) > 1 and total:
            spread = pool.per_node.value.values()
            if max(spread) - min(spread) > max(1, total // len(spread) // 10):
                uneven = Known(True, pool.per_node.source)
    source = "/sys/kernel/mm/hugepages"
    ours = sum(p.own.pages * p.own.page_bytes for p in prospects)
    unseen = next((p.backing for p in prospects if isinstance(p.backing, Unknown)), None)
    foreign: Fact[int] = Known(max(0, promised - ours), source)
    if unseen is not None and promised > ours:
        foreign = unseen
    return Demand(Known(reserved, source), wanted, foreign, uneven)


def _wanted(prospects: Sequence[Prospect]) -> Fact[int]:
    """Return the sum of what all clusters would take as huge pages, those with huge_pages = off left out."""
    total = 0
    for one in prospects:
        settings, begin = one.settings, one.start
        if settings is None or (isinstance(settings.huge_pages, Known) and settings.huge_pages.value == "off"):
            continue
        if isinstance(begin.pages_needed, Unknown):
            return begin.pages_needed
        if isinstance(begin.page_bytes, Unknown):
            return begin.page_bytes
        total += begin.pages_needed.value * begin.page_bytes.value
    return Known(total, "the segments of the clusters found")
