"""Huge pages and memory. Right values: hugetlbpage.rst, transhuge.rst and mm/shmem.c; this machine's own /proc."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgpreemptcheck.facts import hugepages, meminfo
from pgpreemptcheck.facts.hugepages import NODES, POOLS, THP, HugePages, Pool
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Fact, Known, Unknown
from tests.fakehost import FakeHost

MEMINFO = """\
MemTotal:       65843160 kB
MemAvailable:   50000000 kB
CommitLimit:    737869762947802600 kB
PageTables:      1024 kB
HugePages_Total:    4400
HugePages_Free:       12
HugePages_Rsvd:        3
HugePages_Surp:        0
Hugepagesize:       2048 kB
Hugetlb:         9011200 kB
Unheard_of:          1 2 3
"""


def known(fact: Fact[Any]) -> Any:
    assert isinstance(fact, Known), fact
    return fact.value


def read(files: dict[str, Any], **options: Any) -> HugePages:
    return hugepages.read(FakeHost(files, **options))


def pools(files: dict[str, Any], **options: Any) -> tuple[Pool, ...]:
    result = read(files, **options).pools
    assert isinstance(result, tuple), result
    return result


def sysfs(size_kb: int, folder: str = POOLS, **counts: int | str) -> dict[str, str]:
    names = {"nr": "nr_hugepages", "free": "free_hugepages", "resv": "resv_hugepages", "surp": "surplus_hugepages"}
    return {f"{folder}/hugepages-{size_kb}kB/{names.get(k, k)}": f"{v}\n" for k, v in counts.items()}


def test_meminfo_in_bytes() -> None:
    memory = hugepages.read_memory(FakeHost({"/proc/meminfo": MEMINFO}))
    assert known(memory.total_bytes) == 67_423_395_840
    assert known(memory.available_bytes) == 51_200_000_000
    assert known(memory.page_tables_bytes) == 1 << 20
    assert known(memory.hugetlb_bytes) == 4400 << 21


@pytest.mark.parametrize("form", [MEMINFO, MEMINFO.replace("\n", "\r\n"), MEMINFO.replace("kB", "KB")])
def test_without_sysfs_the_default_pool_of_meminfo(form: str) -> None:
    result = read({"/proc/meminfo": form, "/proc/sys/vm/nr_overcommit_hugepages": "7\n"})
    assert known(result.default_bytes) == 2 << 20
    assert isinstance(result.pools, tuple)
    (pool,) = result.pools
    values = [pool.page_bytes, pool.total, pool.free, pool.reserved, pool.surplus, pool.overcommit]
    assert [known(value) for value in values] == [2 << 20, 4400, 12, 3, 0, 7]
    assert isinstance(pool.per_node, Unknown)


@pytest.mark.parametrize(
    "change",
    [
        ("HugePages_Free:       12", "HugePages_Free:       12\nHugePages_Free:       12"),
        ("HugePages_Total:    4400", "HugePages_Total:    4400 2"),
        ("HugePages_Total:    4400", "HugePages_Total:    4400 kB"),
        ("HugePages_Total:    4400", "HugePages_Total:    many"),
        ("HugePages_Total:    4400", "HugePages_Total:    -1"),
        ("Hugepagesize:       2048 kB", "Hugepagesize:       2048"),
        ("Hugepagesize:       2048 kB", "Hugepagesize:       2 MB"),
        ("Hugepagesize:       2048 kB", "Hugepagesize:       2048 1048576 kB"),
    ],
)
def test_a_listing_that_no_kernel_prints_is_not_used(change: tuple[str, str]) -> None:
    assert change[0] in MEMINFO
    result = read({"/proc/meminfo": MEMINFO.replace(*change)})
    assert isinstance(result.pools, Unknown)
    assert change[0].split(":")[0] in result.pools.reason


def test_only_the_size_is_known() -> None:
    result = read({"/proc/meminfo": "Hugepagesize:     524288 kB\n"})
    assert known(result.default_bytes) == 512 << 20
    assert isinstance(result.pools, tuple)
    (pool,) = result.pools
    assert isinstance(pool.total, Unknown)
    assert isinstance(pool.free, Unknown)


def test_the_size_asked_for_on_the_command_line_is_second_choice() -> None:
    line = {"/proc/cmdline": "default_hugepagesz=1G\n"}
    result = read({**line, **sysfs(1048576, nr=1)})
    assert known(result.default_bytes) == 1 << 30
    assert result.default_bytes.certainty == "inferred"  # type: ignore[union-attr]
    assert known(read({**line, "/proc/meminfo": MEMINFO}).default_bytes) == 2 << 20
    odd = MEMINFO.replace("2048 kB", "2048 kB\nHugepagesize: 4 kB")
    assert isinstance(read({**line, "/proc/meminfo": odd}).default_bytes, Unknown)


def test_every_pool_of_sysfs_and_its_nodes() -> None:
    files = {
        **sysfs(2048, nr=72, free=10, resv=3, surp=62, nr_overcommit_hugepages=5),
        **sysfs(1048576, nr=0, free=0, resv=0, surp=0, nr_overcommit_hugepages=0),
        **sysfs(2048, f"{NODES}/node0/hugepages", nr=70, free=10, surp=60),
        **sysfs(2048, f"{NODES}/node10/hugepages", nr=2, free=0, surp=2),
        f"{NODES}/online": "0,10\n",
        "/proc/meminfo": MEMINFO,
    }
    small, large = pools(files)
    assert [known(p.page_bytes) for p in (small, large)] == [2 << 20, 1 << 30]
    counts = [small.total, small.free, small.reserved, small.surplus, small.overcommit]
    assert [known(c) for c in counts] == [72, 10, 3, 62, 5]
    assert known(small.per_node) == {"node0": 70, "node10": 2}
    assert known(small.per_node_free) == {"node0": 10, "node10": 0}
    assert known(small.per_node_surplus) == {"node0": 60, "node10": 2}
    assert known(large.total) == 0
    assert isinstance(large.per_node, Unknown)


@pytest.mark.parametrize("value", ["18446744073709551615", "-1", "x", ""])
def test_a_count_that_is_none_is_a_gap(value: str) -> None:
    (pool,) = pools(sysfs(2048, nr=10, free=10, resv=value))
    assert isinstance(pool.reserved, Unknown)
    assert known(pool.total) == 10


def test_counts_that_exceed_the_pool_are_not_believed() -> None:
    (pool,) = pools(sysfs(2048, nr=10, free=12, surp=11))
    assert isinstance(pool.free, Unknown)
    assert "run again" in pool.free.hint
    assert isinstance(pool.surplus, Unknown)


def test_a_kernel_without_huge_pages_has_no_pools_which_is_no_gap() -> None:
    plain = {"/proc/meminfo": "MemTotal:  1024 kB\n", f"{THP}/enabled": "always [never]\n"}
    assert pools(plain, live=True) == ()
    assert isinstance(read(plain).pools, Unknown)  # a capture may just lack them
    config = b"# Linux/arm64 4.9.165 Kernel Configuration\nCONFIG_PREEMPT=y\n# CONFIG_HUGETLBFS is not set\n"
    assert pools({**plain, "/proc/config.gz": config}) == ()


def test_nothing_to_read() -> None:
    result = read({})
    for fact in (result.default_bytes, result.pools, result.shmem_thp, result.shmem_thp_possible):
        assert isinstance(fact, Unknown)
    assert isinstance(read({"/proc/meminfo": errno.EACCES}).pools, Unknown)


@given(st.text(alphabet="HugePages_TotalFreeMemkB0123456789: \n\r\t", max_size=300))
def test_any_meminfo_is_read_without_raising(text: str) -> None:
    host = FakeHost({"/proc/meminfo": text})
    hugepages.read(host)
    hugepages.read_memory(host)


# transparent huge pages for shared memory -------------------------------------------------------

TOP = f"{THP}/shmem_enabled"


def choice(word: str, words: str = "always within_size advise never deny force") -> str:
    return " ".join(f"[{w}]" if w == word else w for w in words.split()) + "\n"


def thp(top: str, **sizes: str) -> dict[str, str]:
    files = {TOP: choice(top)}
    for name, word in sizes.items():
        files[f"{THP}/hugepages-{name[1:]}kB/shmem_enabled"] = choice(word, "always inherit within_size advise never")
    return files


@pytest.mark.parametrize(
    ("files", "possible"),
    [
        (thp("never", s64="never", s2048="inherit"), False),
        (thp("advise", s64="advise", s2048="inherit"), False),  # PostgreSQL never calls madvise
        (thp("always", s64="never", s2048="inherit"), True),
        (thp("within_size", s2048="inherit"), True),
        (thp("always", s64="never", s2048="never"), False),
        (thp("never", s64="always", s2048="inherit"), True),  # a size's own word counts below never
        (thp("never", s64="within_size"), True),
        (thp("deny", s64="always", s2048="always"), False),
        (thp("force", s64="never", s2048="inherit"), True),
        (thp("force", s64="always", s2048="never"), False),  # force takes the sizes that inherit, no other
    ],
)
def test_shmem_thp(files: dict[str, str], possible: bool) -> None:
    result = read(files)
    assert known(result.shmem_thp_possible) is possible
    assert result.shmem_thp_possible.certainty == "measured"  # type: ignore[union-attr]


def test_shmem_thp_before_sizes_had_words() -> None:
    uname = {"uname.txt": "Linux h 6.1.0-37-amd64 #1 SMP PREEMPT_DYNAMIC now x86_64 GNU/Linux"}
    assert read({**uname, **thp("never")}).shmem_thp_possible == Known(False, TOP)
    assert read({**uname, **thp("always")}).shmem_thp_possible == Known(True, TOP)
    newer = read({"uname.txt": uname["uname.txt"].replace("6.1.", "7.0."), **thp("never")}).shmem_thp_possible
    assert known(newer) is False
    assert newer.certainty == "inferred"  # type: ignore[union-attr]


def test_shmem_thp_gaps() -> None:
    unreadable: dict[str, Any] = {**thp("never"), f"{THP}/hugepages-64kB/shmem_enabled": errno.EACCES}
    assert isinstance(read(unreadable).shmem_thp_possible, Unknown)
    assert isinstance(read({TOP: "always never\n"}).shmem_thp_possible, Unknown)
    assert isinstance(read({f"{THP}/enabled": choice("always")}).shmem_thp_possible, Unknown)


def test_no_transparent_huge_pages_in_the_kernel() -> None:
    assert known(read({f"{POOLS}/x": ""}, live=True).shmem_thp_possible) is False
    config = b"CONFIG_PREEMPT=y\n# CONFIG_TRANSPARENT_HUGEPAGE is not set\n"
    assert known(read({"/proc/config.gz": config}).shmem_thp_possible) is False


# base pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uname", "size"),
    [
        ("5.14.0-427.el9.aarch64+64k #1 SMP PREEMPT_DYNAMIC now aarch64", 65536),
        ("6.8.0-31-generic-64k #31 SMP PREEMPT_DYNAMIC now aarch64", 65536),
        ("6.11.3-401.asahi.fc40.aarch64+16k #1 SMP PREEMPT_DYNAMIC now aarch64", 16384),
        ("6.8.0-64kernel #1 SMP PREEMPT_DYNAMIC now aarch64", None),
        ("6.8.0 #1 SMP PREEMPT_DYNAMIC now aarch64", None),
        ("6.8.0 #1 SMP PREEMPT_DYNAMIC now ppc64le", None),
        ("6.8.0 #1 SMP PREEMPT_DYNAMIC now x86_64", 4096),
        ("6.8.0 #1 SMP PREEMPT_DYNAMIC now s390x", 4096),
    ],
)
def test_base_pages_of_a_capture(uname: str, size: int | None) -> None:
    fact = hugepages.read_memory(FakeHost({"uname.txt": f"Linux h {uname} GNU/Linux"})).base_page_bytes
    assert (fact.value if isinstance(fact, Known) else None) == size


@pytest.mark.parametrize(
    ("option", "size"),
    [("ARM64_16K_PAGES", 16384), ("PPC_64K_PAGES", 65536), ("PAGE_SIZE_64KB", 65536), ("HAVE_PAGE_SIZE_64KB", None)],
)
def test_base_pages_by_the_build(option: str, size: int | None) -> None:
    config = f"CONFIG_PREEMPT=y\nCONFIG_{option}=y\n"
    fact = hugepages.read_memory(FakeHost({"/proc/config.gz": config})).base_page_bytes
    assert (fact.value if isinstance(fact, Known) else None) == size


# this machine -----------------------------------------------------------------------------------


def test_this_machine() -> None:
    host = LiveHost()
    memory, pages = hugepages.read_memory(host), hugepages.read(host)
    assert known(memory.base_page_bytes) == os.sysconf("SC_PAGESIZE")
    assert known(memory.total_bytes) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    if not os.path.isdir(POOLS):
        pytest.skip(f"no {POOLS} on this machine")
    assert isinstance(pages.pools, tuple)
    assert {f"hugepages-{known(p.page_bytes) >> 10}kB" for p in pages.pools} == set(os.listdir(POOLS))
    default = next(p for p in pages.pools if known(p.page_bytes) == known(pages.default_bytes))
    assert known(default.total) == known(meminfo.read(host).number("HugePages_Total"))
