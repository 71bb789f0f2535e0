"""Clusters that want the same huge pages: what can be had by each alone cannot be had by all of them.

Right values come from the kernel's accounting (mm/hugetlb.c hugetlb_acct_memory: all of a mapping or nothing, first
come); test_real_clusters.py shows the same with servers that are started one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgpreemptcheck.demand import Prospect, share
from pgpreemptcheck.need import Need
from pgpreemptcheck.start import Held
from pgpreemptcheck.values import Known, Unknown
from tests.test_start import PAGE, outcome, pool, run, settings

TWO_MB = Known(PAGE, "test")


def cluster(
    name: str, pages: int | None = 72, held: int = 0, comes_up: bool = True, *, total: int, **changes: Any
) -> Prospect:
    """Return a cluster that needs so many pages, on a pool of `total` pages of which it holds `held`."""
    need = pages * PAGE if pages is not None else None
    own = Held(PAGE if held else 0, held)
    accepted = Known(changes.pop("accepted", True), "test")
    begin = run((pool(total, total - held),), need=need, own=own, accepted=accepted, **changes)
    return Prospect(name, settings(**changes), Need(TWO_MB, TWO_MB), own, None, begin, comes_up)


def outcomes(*prospects: Prospect) -> list[str | None]:
    return [outcome(one.start) for one in share(prospects)]


def test_a_pool_for_one_is_promised_to_none_of_three() -> None:
    assert outcomes(*[cluster(name, total=80) for name in "abc"]) == [None] * 3
    assert outcomes(*[cluster(name, total=80, huge_pages="on") for name in "ab"]) == [None] * 2


@pytest.mark.parametrize(("total", "expected"), [(143, None), (144, "starts")])
def test_a_pool_for_two(total: int, expected: str | None) -> None:
    assert outcomes(cluster("a", total=total), cluster("b", total=total)) == [expected] * 2


def test_the_reason_names_the_others_and_what_is_missing() -> None:
    found = share([cluster("a", total=80), cluster("/srv/b", pages=9, total=80)])[0].start
    assert isinstance(found.outcome, Unknown) and "/srv/b" in found.outcome.reason
    assert found.pages_claimed_by_others == Known(9, "what /srv/b would take and does not hold yet")
    assert isinstance(found.reservation, Known) and "grow by at least 1," in found.reservation.value


@pytest.mark.parametrize(
    "rival",
    [
        cluster("b", total=80, huge_pages="off"),
        cluster("b", total=80, shared_memory_type="sysv"),
        cluster("b", total=80, comes_up=False),
        cluster("b", pages=200, total=80),  # finds too few pages by itself: takes none
        cluster("b", total=80, accepted=False),
        cluster("b", total=80, huge_page_size=1 << 30),
    ],
)
def test_who_takes_no_pages_is_no_rival(rival: Prospect) -> None:
    assert outcomes(cluster("a", total=80), rival)[0] == "starts"


def test_a_cluster_gets_back_what_it_holds() -> None:
    """What is left for the other one is not enough, and it is told so; the first is not made unsure by that."""
    holder = cluster("a", held=72, total=80)
    late = replace(cluster("b", total=80), start=run((pool(80, 8),)))
    assert outcomes(holder, late) == ["starts", "falls-back"]


def test_growing_beyond_what_is_held_competes() -> None:
    grown = cluster("a", pages=100, held=72, total=110)
    other = replace(cluster("b", pages=30, total=110), start=run((pool(110, 38),), need=30 * PAGE))
    assert outcomes(grown, other) == [None, None]


def test_a_rival_of_unknown_size_leaves_the_outcome_inferred() -> None:
    """shared_buffers alone (64 pages) show that it is short; that it suffices they cannot show."""
    assert outcomes(cluster("a", total=120), cluster("b", pages=None, total=120)) == [None, None]
    start = share([cluster("a", total=1000), cluster("b", pages=None, total=1000)])[0].start
    assert isinstance(start.outcome, Known) and start.outcome.certainty == "inferred"
    alone = share([cluster("a", total=1000)])[0].start
    assert isinstance(alone.outcome, Known) and alone.outcome.certainty == "measured"
