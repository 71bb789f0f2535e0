"""What a start does with the huge pages of a host: the arithmetic of pools, and the outcome.

The right values are those seen on real hosts (domain notes 8.5, 14.4 to 14.6; Linux mm/hugetlb.c,
PostgreSQL sysv_shmem.c); the same outcomes are shown on real servers in test_real_clusters.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from pgpreemptcheck.facts.cgroups import HugetlbLimit
from pgpreemptcheck.facts.hugepages import HugePages, Pool
from pgpreemptcheck.facts.settings import Settings
from pgpreemptcheck.need import Need
from pgpreemptcheck.start import Held, Outcome, Start, obtainable, resulting_segment, start
from pgpreemptcheck.values import Fact, Known, Unknown

MB = 1 << 20
PAGE = 2 * MB
GAP = Unknown("not read")
YES = Known(True, "test")
NOTHING = Held(0, 0)


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def pool(total: int, free: int, reserved: int = 0, surplus: int = 0, overcommit: int = 0, size: int = PAGE) -> Pool:
    none = Unknown("no nodes")
    return Pool(
        known(size), known(total), known(free), known(reserved), known(surplus), known(overcommit), none, none, none
    )


def settings(**changes: Any) -> Settings:
    base: dict[str, Any] = {field.name: GAP for field in fields(Settings)}
    base |= {"huge_pages": known("try"), "huge_page_size": known(0), "shared_memory_type": known("mmap")}
    return Settings(**(base | {name: value if isinstance(value, Unknown) else known(value)
                               for name, value in changes.items()}))  # fmt: skip


def run(
    pools: tuple[Pool, ...] | Unknown,
    need: int | None = 72 * PAGE,
    own: Held = NOTHING,
    limits: tuple[HugetlbLimit, ...] | Unknown = (),
    accepted: Fact[bool] = YES,
    hugetlbfs: Fact[bool] = YES,
    at_least: int = 128 * MB,
    **changes: Any,
) -> Start:
    return start(
        settings=settings(**changes),
        accepted=accepted,
        error=None,
        need=Need(known(need) if need is not None else Unknown("does not run"), known(at_least)),
        huge_pages=HugePages(known(PAGE), pools, known("never"), known(False)),
        hugetlbfs=hugetlbfs,
        own=own,
        memory_nodes=known((0,)),
        limits=limits,
    )


def outcome(begin: Start) -> Outcome | None:
    return begin.outcome.value if isinstance(begin.outcome, Known) else None


@pytest.mark.parametrize(
    ("which", "own", "expected"),
    [
        (pool(80, 80), 0, 80),
        (pool(80, 72, 64), 72, 80),  # a running segment of 72 pages, 8 touched: all 80 after it is gone
        (pool(80, 72, 64), 0, 8),  # the same pages, another's segment
        (pool(72, 64, 64, surplus=62), 72, 10),  # pool cut from 100 to 10 while 72 are used: 10 survive
        (pool(0, 0, overcommit=100), 0, 100),
        (pool(10, 10, overcommit=100), 0, 110),
        (pool(2, 2, overcommit=100, size=1 << 30), 0, 2),  # no overcommit of gigantic pages
        (pool(100, 0), 0, 0),
        (pool(10, 10, 20), 0, 0),  # promised beyond the pool (overcommit taken back): never below 0
    ],
)
def test_obtainable(which: Pool, own: int, expected: int) -> None:
    found = obtainable(which, Held(which.page_bytes.value if own else 0, own), GAP)  # type: ignore[union-attr]
    assert isinstance(found, Known) and found.value == expected


def test_obtainable_by_overcommit_is_only_inferred() -> None:
    found = obtainable(pool(0, 0, overcommit=100), Held(0, 0), GAP)
    assert isinstance(found, Known) and found.certainty == "inferred"


def test_a_cpuset_leaves_the_pages_of_its_nodes() -> None:
    """Two nodes with 100 pages each and cpuset.mems=0: a segment of 126 pages fell back."""
    both = replace(
        pool(200, 200),
        per_node=known({"node0": 100, "node1": 100}),
        per_node_free=known({"node0": 100, "node1": 100}),
        per_node_surplus=known({"node0": 0, "node1": 0}),
    )
    one, two = obtainable(both, Held(0, 0), known((0,))), obtainable(both, Held(0, 0), known((0, 1)))
    assert isinstance(one, Known) and one.value == 100
    assert isinstance(two, Known) and two.value == 200


def test_a_cpuset_counts_what_the_cluster_gives_back() -> None:
    both = replace(
        pool(200, 130, 56),
        per_node=known({"node0": 100, "node1": 100}),
        per_node_free=known({"node0": 30, "node1": 100}),
        per_node_surplus=known({"node0": 0, "node1": 0}),
    )
    found = obtainable(both, Held(PAGE, 126), known((0,)))
    assert isinstance(found, Known) and found.value == 100


@pytest.mark.parametrize("unknown", ["total", "free", "reserved", "surplus"])
def test_an_unread_count_is_no_count(unknown: str) -> None:
    assert isinstance(obtainable(replace(pool(80, 80), **{unknown: GAP}), Held(0, 0), GAP), Unknown)


@pytest.mark.parametrize(
    ("mode", "total", "expected"),
    [("off", 0, "starts"), ("try", 0, "falls-back"), ("on", 0, "refuses"), ("try", 71, "falls-back"),
     ("on", 71, "refuses"), ("try", 72, "starts"), ("on", 72, "starts")],
)  # fmt: skip
def test_the_pool_decides(mode: str, total: int, expected: str) -> None:
    assert outcome(run((pool(total, total),), huge_pages=mode)) == expected


def test_missing_pages_are_counted() -> None:
    begin = run((pool(70, 70),))
    assert begin.pages_needed == Known(72, "test")
    assert isinstance(begin.pages_missing, Known) and begin.pages_missing.value == 2


def test_shared_buffers_alone_can_show_that_it_does_not_fit() -> None:
    begin = run((pool(63, 63),), need=None, huge_pages="on")
    assert outcome(begin) == "refuses"
    assert isinstance(begin.pages_needed, Unknown)
    assert isinstance(begin.pages_at_least, Known) and begin.pages_at_least.value == 64


def test_shared_buffers_alone_never_show_that_it_fits() -> None:
    assert outcome(run((pool(64, 64),), need=None)) is None
    assert outcome(run((pool(6400, 6400),), need=None)) is None


@pytest.mark.parametrize(("mode", "expected"), [("on", "refuses"), ("try", "starts"), ("off", "starts")])
def test_system_v_memory_has_no_huge_pages(mode: str, expected: str) -> None:
    assert outcome(run((pool(100, 100),), huge_pages=mode, shared_memory_type="sysv")) == expected


@pytest.mark.parametrize(("mode", "expected"), [("on", "refuses"), ("try", "falls-back")])
def test_a_size_without_a_pool(mode: str, expected: str) -> None:
    begin = run((pool(100, 100),), huge_pages=mode, huge_page_size=32 * MB)
    assert outcome(begin) == expected
    assert begin.pool_exists == Known(False, "/sys/kernel/mm/hugepages")


def test_the_pool_of_the_asked_size_counts() -> None:
    two = (pool(100, 100), pool(1, 1, size=1 << 30))
    assert outcome(run(two, huge_page_size=1 << 30, need=(1 << 30) + 1)) == "falls-back"
    assert outcome(run(two, huge_page_size=1 << 30, need=1 << 30)) == "starts"


def test_a_kernel_without_huge_pages() -> None:
    assert outcome(run((pool(100, 100),), hugetlbfs=known(False), huge_pages="on")) == "refuses"


def limit(fault: int | None, reservation: int | None = None, used: int = 0, rsvd_used: int = 0) -> HugetlbLimit:
    return HugetlbLimit("/cg", PAGE, known(fault), known(used), known(reservation), known(rsvd_used))


@pytest.mark.parametrize(
    ("limits", "mode", "expected"),
    [
        ((limit(None),), "on", "starts"),
        ((limit(72 * PAGE),), "on", "starts"),
        ((limit(72 * PAGE - 1),), "on", "crashes"),
        ((limit(0),), "try", "crashes"),
        ((limit(None, 0),), "try", "falls-back"),
        ((limit(None, 0),), "on", "refuses"),
        ((limit(0, 0),), "try", "falls-back"),  # the reservation fails first, so nothing is touched
        ((limit(None), limit(10 * PAGE)), "on", "crashes"),  # any ancestor
        ((limit(100 * PAGE, None, used=40 * PAGE),), "on", "crashes"),  # others' use in the same cgroup
    ],
)
def test_cgroup_limits(limits: tuple[HugetlbLimit, ...], mode: str, expected: str) -> None:
    assert outcome(run((pool(100, 100),), limits=limits, huge_pages=mode)) == expected


def test_a_cgroups_own_use_is_given_back() -> None:
    own = Held(PAGE, 72)
    assert outcome(run((pool(100, 28),), own=own, limits=(limit(80 * PAGE, None, used=72 * PAGE),))) == "starts"


def test_limits_that_cannot_be_seen_leave_it_unknown() -> None:
    assert outcome(run((pool(100, 100),), limits=Unknown("ancestors cannot be seen"))) is None
    assert outcome(run((pool(10, 10),), limits=Unknown("ancestors cannot be seen"))) == "falls-back"


@pytest.mark.parametrize("name", ["huge_pages", "huge_page_size", "shared_memory_type"])
def test_an_unknown_setting_leaves_it_unknown(name: str) -> None:
    assert outcome(run((pool(100, 100),), **{name: GAP})) is None


def test_unread_pools_leave_it_unknown() -> None:
    assert outcome(run(Unknown("no /sys"))) is None
    assert outcome(run(())) is None
    assert outcome(run(Unknown("no /sys"), huge_pages="off")) == "starts"


def test_refused_files_refuse_whatever_the_pool() -> None:
    assert outcome(run((pool(100, 100),), accepted=known(False))) == "refuses"
    assert outcome(run((pool(100, 100),), accepted=GAP)) is None
    assert outcome(run((pool(0, 0),), accepted=GAP, huge_pages="on")) == "refuses"


@pytest.mark.parametrize(
    ("total", "changes", "backing", "base_pages"),
    [
        (100, {}, "huge", False),
        (0, {}, "base", True),
        (100, {"huge_pages": "off"}, "base", True),
        (100, {"shared_memory_type": "sysv"}, "sysv", True),
        (0, {"huge_pages": "on"}, None, None),
    ],
)
def test_the_segment_that_comes_of_it(
    total: int, changes: dict[str, str], backing: str | None, base_pages: bool | None
) -> None:
    begin = run((pool(total, total),), **changes)
    need = Need(known(72 * PAGE), known(1))
    found = resulting_segment(begin, settings(**changes), need, known(4096), known(False))
    assert (found.backing.value if isinstance(found.backing, Known) else None) == backing
    assert (found.base_pages.value if isinstance(found.base_pages, Known) else None) == base_pages


def test_transparent_huge_pages_leave_base_pages_unknown() -> None:
    begin = run((pool(0, 0),))
    found = resulting_segment(begin, settings(), Need(known(1), known(1)), known(4096), known(True))
    assert isinstance(found.base_pages, Unknown)
    assert found.thp_possible == known(True)


def test_the_reservation_in_words() -> None:
    """What is missing is added to what the pool is set to: other users' pages and surplus ones stay out of it."""
    said = run((pool(100, 30, 10, surplus=5),), need=72 * PAGE).reservation
    assert isinstance(said, Known)  # 95 are set, 80 used by or promised to others: 15 can be had, 57 are missing
    assert said.value.startswith("vm.nr_hugepages must be at least 152 (it is 95; sysctl -w vm.nr_hugepages=152)")
    gigantic = run((pool(2, 2, size=1 << 30),), need=3 << 30, huge_page_size=1 << 30).reservation
    assert isinstance(gigantic, Known)
    assert "echo 3 > /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages" in gigantic.value
    enough = run((pool(100, 100),)).reservation
    assert isinstance(enough, Known) and "can be had as the pool is" in enough.value
    bound = run((pool(10, 10),), need=None).reservation
    assert isinstance(bound, Known) and "must be more than 64 (it is 10)" in bound.value
    other = run((pool(10, 10),), huge_page_size=32 * MB).reservation
    assert isinstance(other, Known) and "has no huge pages of 32 MB" in other.value
