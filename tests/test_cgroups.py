"""Limits of cgroups: as trees of both versions show them, and as the real hugetlb controller enforces them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pgpreemptcheck.facts import cgroups
from pgpreemptcheck.facts.cgroups import HugetlbLimit
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Known, Unknown
from tests import servers
from tests.fakehost import FakeHost
from tests.test_segment import pool

MB = 1 << 20
V1_UNLIMITED = "9223372036854771712\n"

V2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 25 0:26 / /sys/fs/cgroup/hugetlb rw,nosuid shared:9 - cgroup cgroup rw,hugetlb\n"
    "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)
HYBRID = V1.splitlines()[1] + "\n" + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")


def plain(fact: Any) -> Any:
    return fact.value if isinstance(fact, Known) else None


def v2_files(folder: str, limit: str, used: int, reserved: str, promised: int, size: str = "2MB") -> dict[str, str]:
    start = f"{folder}/hugetlb.{size}"
    return {
        f"{start}.max": f"{limit}\n",
        f"{start}.current": f"{used}\n",
        f"{start}.rsvd.max": f"{reserved}\n",
        f"{start}.rsvd.current": f"{promised}\n",
        f"{start}.events": "max 0\n",
        f"{start}.numa_stat": "total=0 N0=0\n",
        f"{folder}/cgroup.events": "populated 1\n",
    }


def v2_host(path: str, files: dict[str, Any], live: bool = True, namespace: int = 4026531835) -> FakeHost:
    return FakeHost(
        {
            "/proc/7/cgroup": f"0::{path}\n",
            "/proc/self/mountinfo": V2,
            "/proc/self/ns/cgroup": ("->", f"cgroup:[{namespace}]"),
            "/sys/fs/cgroup/cgroup.controllers": "cpu hugetlb\n",
            **files,
        },
        live=live,
    )


def rows(limits: tuple[HugetlbLimit, ...] | Unknown) -> list[tuple[Any, ...]]:
    assert isinstance(limits, tuple), limits
    return [
        (x.path, x.page_bytes, *map(plain, (x.fault_limit, x.fault_usage, x.reservation_limit, x.reservation_usage)))
        for x in limits
    ]


def test_version_2_every_ancestor_counts() -> None:
    top = "/sys/fs/cgroup/a.slice"
    files = {
        **v2_files(top, "max", 8 * MB, str(64 * MB), 16 * MB),
        **v2_files(f"{top}/b.service", str(20 * MB), 4 * MB, "max", 6 * MB),
        **v2_files(f"{top}/b.service", "0", 0, "max", 0, size="1GB"),
    }
    assert rows(cgroups.hugetlb_limits(v2_host("/a.slice/b.service", files), 7)) == [
        (f"{top}/b.service", 1 << 30, 0, 0, None, 0),
        (f"{top}/b.service", 2 * MB, 20 * MB, 4 * MB, None, 6 * MB),
        (top, 2 * MB, None, 8 * MB, 64 * MB, 16 * MB),
    ]


@pytest.mark.parametrize(("tag", "size"), [("64KB", 64 << 10), ("2MB", 2 * MB), ("16GB", 16 << 30)])
def test_page_sizes(tag: str, size: int) -> None:
    files = v2_files("/sys/fs/cgroup/a", "0", 0, "max", 0, size=tag)
    assert rows(cgroups.hugetlb_limits(v2_host("/a", files), 7)) == [("/sys/fs/cgroup/a", size, 0, 0, None, 0)]


@pytest.mark.parametrize(
    "word", [V1_UNLIMITED, "9223372036852678656\n", "9223372036854775807\n", "9223372035781033984\n"]
)
def test_version_1_and_its_unlimited_values(word: str) -> None:
    """The largest multiple of the page size, or of the huge page size, below 2**63: what kernels show for no limit."""
    top = "/sys/fs/cgroup/hugetlb"
    files = {"release_agent": "", "hugetlb.2MB.limit_in_bytes": word, "hugetlb.2MB.usage_in_bytes": "0\n"}
    lower = {
        "hugetlb.2MB.limit_in_bytes": f"{30 * MB}\n",
        "hugetlb.2MB.usage_in_bytes": f"{2 * MB}\n",
        "hugetlb.2MB.rsvd.limit_in_bytes": word,
        "hugetlb.2MB.rsvd.usage_in_bytes": "0\n",
        "hugetlb.2MB.max_usage_in_bytes": "0\n",
        "hugetlb.2MB.failcnt": "0\n",
    }
    host = FakeHost(
        {
            "/proc/7/cgroup": "12:hugetlb:/docker/ab\n3:cpu,cpuacct:/\n0::/\n",
            "/proc/self/mountinfo": V1,
            **{f"{top}/{name}": text for name, text in files.items()},
            **{f"{top}/docker/release": ""},
            **{f"{top}/docker/ab/{name}": text for name, text in lower.items()},
        },
        live=True,
    )
    limits = cgroups.hugetlb_limits(host, 7)
    assert rows(limits) == [
        (f"{top}/docker/ab", 2 * MB, 30 * MB, 2 * MB, None, 0),
        (top, 2 * MB, None, 0, None, None),
    ]
    assert isinstance(limits, tuple)
    missing = limits[1].reservation_limit  # kernels before 5.7 have no rsvd files
    assert isinstance(missing, Unknown) and missing.kind == "absent"


def test_hybrid_takes_the_hierarchy_that_has_the_controller() -> None:
    unified = "/sys/fs/cgroup/unified/x"
    host = FakeHost(
        {
            "/proc/7/cgroup": "3:cpu,cpuacct:/y\n1:name=systemd:/z\n0::/x\n",
            "/proc/self/mountinfo": HYBRID,
            "/sys/fs/cgroup/unified/cgroup.controllers": "hugetlb\n",
            **v2_files(unified, str(MB), 0, "max", 0),
            "/sys/fs/cgroup/cpu,cpuacct/release_agent": "",
            "/sys/fs/cgroup/cpu,cpuacct/y/cpu.cfs_quota_us": "150000\n",
            "/sys/fs/cgroup/cpu,cpuacct/y/cpu.cfs_period_us": "100000\n",
        },
        live=True,
    )
    assert rows(cgroups.hugetlb_limits(host, 7)) == [(unified, 2 * MB, MB, 0, None, 0)]
    assert plain(cgroups.cpu_quota(host, 7)) == 1.5


def test_the_root_group_limits_nothing() -> None:
    assert cgroups.hugetlb_limits(v2_host("/", {}), 7) == ()
    assert plain(cgroups.cpu_quota(v2_host("/", {}), 7)) is None
    assert isinstance(cgroups.cpu_quota(v2_host("/", {}), 7), Known)


@pytest.mark.parametrize("text", ["", "4:memory:/a\n"])
def test_a_kernel_without_the_controller_limits_nothing(text: str) -> None:
    host = FakeHost({"/proc/7/cgroup": text}, live=True)
    assert cgroups.hugetlb_limits(host, 7) == ()


# what cannot be seen -----------------------------------------------------------------------------


def in_container(**more: str) -> FakeHost:
    files = v2_files("/sys/fs/cgroup", "max", 0, "max", 0)
    files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    files.update({f"/sys/fs/cgroup/{name}": text for name, text in more.items()})
    return v2_host("/", {**files, "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n"}, namespace=402653)


def test_in_a_container_the_ancestors_outside_are_unknown() -> None:
    limits = cgroups.hugetlb_limits(in_container(), 7)
    assert isinstance(limits, tuple)
    assert [(x.path, x.page_bytes) for x in limits] == [("/sys/fs/cgroup", 2 * MB), ("/..", 2 * MB), ("/..", 1 << 30)]
    assert plain(limits[0].fault_usage) == 0
    outside = limits[1].fault_limit
    assert isinstance(outside, Unknown) and outside.kind != "absent"
    assert outside.reason == "ancestors outside of this cgroup namespace cannot be seen"
    quota = cgroups.cpu_quota(in_container(), 7)
    assert isinstance(quota, Unknown) and "cannot be seen" in quota.reason


def test_a_quota_that_is_seen_is_an_upper_bound_of_those_outside() -> None:
    quota = cgroups.cpu_quota(in_container(**{"cpu.max": "50000 100000\n"}), 7)
    assert isinstance(quota, Known) and (quota.value, quota.certainty) == (0.5, "inferred")


def test_a_cgroup_namespace_at_the_real_root_hides_nothing() -> None:
    assert cgroups.hugetlb_limits(v2_host("/", {}, namespace=402653), 7) == ()


def test_a_process_outside_of_the_namespace_is_unknown() -> None:
    limits = cgroups.hugetlb_limits(v2_host("/../system.slice/x", {}, namespace=402653), 7)
    assert isinstance(limits, Unknown) and "outside of this cgroup namespace" in limits.reason


def test_a_container_of_version_1_without_a_namespace_sees_its_own_part() -> None:
    top = "/sys/fs/cgroup/hugetlb"
    files = {
        "/proc/7/cgroup": "12:hugetlb:/docker/ab/c\n",
        "/proc/9/cgroup": "12:hugetlb:/docker/cd\n",
        "/proc/self/mountinfo": V1.replace(" / /sys/fs/cgroup/hugetlb", " /docker/ab /sys/fs/cgroup/hugetlb"),
        f"{top}/hugetlb.2MB.limit_in_bytes": "4194304\n",
        f"{top}/c/hugetlb.2MB.limit_in_bytes": V1_UNLIMITED,
    }
    limits = cgroups.hugetlb_limits(FakeHost(files, live=True), 7)
    assert isinstance(limits, tuple)
    assert [(x.path, plain(x.fault_limit)) for x in limits] == [(f"{top}/c", None), (top, 4 * MB), ("/..", None)]
    other = cgroups.hugetlb_limits(FakeHost(files, live=True), 9)
    assert isinstance(other, Unknown) and other.kind != "absent"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"/proc/7/cgroup": errno.EACCES},
        {"/proc/7/cgroup": "0::/a\n"},  # nothing mounted
        {"/proc/7/cgroup": "0::/a\n", "/proc/self/mountinfo": V2},  # gone meanwhile
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_what_cannot_be_read_is_unknown_and_not_absent(files: dict[str, Any], live: bool) -> None:
    for answer in (
        cgroups.hugetlb_limits(FakeHost(files, live=live), 7),
        cgroups.cpu_quota(FakeHost(files, live=live), 7),
    ):
        assert isinstance(answer, Unknown) and answer.kind != "absent" and answer.reason


@pytest.mark.parametrize("words", ["", "much\n", "-5\n", "1e6\n", "²\n"])
def test_odd_numbers_are_unknown(words: str) -> None:
    files = v2_files("/sys/fs/cgroup/a", words.strip(), 0, words.strip(), 0)
    limits = cgroups.hugetlb_limits(v2_host("/a", files), 7)
    assert isinstance(limits, tuple) and len(limits) == 1
    assert isinstance(limits[0].fault_limit, Unknown) and isinstance(limits[0].reservation_limit, Unknown)


# CPU quota ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ("max 100000", "max 100000", None),
        ("200000 100000", "max 100000", 2.0),
        ("200000 100000", "50000 100000", 0.5),
        ("50000 50000", "800000 100000", 1.0),
    ],
)
def test_the_tightest_quota_of_all_ancestors(outer: str, inner: str, expected: float | None) -> None:
    files = {"/sys/fs/cgroup/a/cpu.max": outer, "/sys/fs/cgroup/a/b/cpu.max": inner}
    quota = cgroups.cpu_quota(v2_host("/a/b", files), 7)
    assert isinstance(quota, Known) and quota.value == expected


@pytest.mark.parametrize("text", ["", "max", "x 100000", "100000 0", "0 100000", "1 2 3"])
def test_an_odd_quota_is_unknown(text: str) -> None:
    quota = cgroups.cpu_quota(v2_host("/a", {"/sys/fs/cgroup/a/cpu.max": text}), 7)
    assert isinstance(quota, Known if text == "max" else Unknown)


@pytest.mark.parametrize(("text", "expected"), [("-1\n", None), ("25000\n", 0.25)])
def test_quota_of_version_1(text: str, expected: float | None) -> None:
    host = FakeHost(
        {
            "/proc/7/cgroup": "3:cpu,cpuacct:/y\n",
            "/proc/self/mountinfo": V1,
            "/sys/fs/cgroup/cpu,cpuacct/release_agent": "",
            "/sys/fs/cgroup/cpu,cpuacct/y/cpu.cfs_quota_us": text,
            "/sys/fs/cgroup/cpu,cpuacct/y/cpu.cfs_period_us": "100000\n",
        },
        live=True,
    )
    quota = cgroups.cpu_quota(host, 7)
    assert isinstance(quota, Known) and quota.value == expected


# captures ----------------------------------------------------------------------------------------


def test_a_capture_with_the_tree_but_without_mountinfo() -> None:
    files = v2_files("/sys/fs/cgroup/a", str(MB), 0, "max", 0)
    host = FakeHost({"/proc/7/cgroup": "0::/a\n", "/sys/fs/cgroup/cgroup.controllers": "hugetlb", **files})
    assert rows(cgroups.hugetlb_limits(host, 7)) == [("/sys/fs/cgroup/a", 2 * MB, MB, 0, None, 0)]
    host = FakeHost(
        {
            "/proc/7/cgroup": "5:hugetlb:/a\n",
            "/sys/fs/cgroup/hugetlb/release_agent": "",
            "/sys/fs/cgroup/hugetlb/a/hugetlb.2MB.limit_in_bytes": "1048576",
        }
    )
    assert rows(cgroups.hugetlb_limits(host, 7)) == [("/sys/fs/cgroup/hugetlb/a", 2 * MB, MB, None, None, None)]


def test_a_capture_without_the_tree_says_so() -> None:
    limits = cgroups.hugetlb_limits(FakeHost({"/proc/7/cgroup": "0::/a\n"}), 7)
    assert isinstance(limits, Unknown) and "capture" in limits.reason


# the real controller -----------------------------------------------------------------------------


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


@contextlib.contextmanager
def real_group() -> Iterator[str]:
    """Make a cgroup (with one below it) that has the hugetlb controller, on the mounted version 2 hierarchy."""
    if os.geteuid() != 0:
        pytest.skip("only root can make cgroups")
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split()[4] for line in file if " - cgroup2 " in line]
    if not mounts:
        pytest.skip("no cgroup version 2 hierarchy is mounted")
    top = mounts[0]
    with open(f"{top}/cgroup.controllers") as file:
        if "hugetlb" not in file.read().split():
            pytest.skip(f"the hugetlb controller is not in {top}")
    with open(f"{top}/cgroup.subtree_control") as file:
        enabled = "hugetlb" in file.read().split()
    with open("/proc/self/cgroup") as file:
        home = next(line.split(":", 2)[2].strip() for line in file if line.startswith("0::"))
    group = f"{top}/pgpreemptcheck-test-{os.getpid()}"
    try:
        if not enabled:
            write(f"{top}/cgroup.subtree_control", "+hugetlb")
        os.mkdir(group)
        write(f"{group}/cgroup.subtree_control", "+hugetlb")
        os.mkdir(f"{group}/leaf")
        yield group
    finally:
        write(f"{top}{home.rstrip('/')}/cgroup.procs", str(os.getpid()))
        for folder in (f"{group}/leaf", group):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if not enabled:
            with contextlib.suppress(OSError):  # another test may be using it
                write(f"{top}/cgroup.subtree_control", "-hugetlb")


@contextlib.contextmanager
def inside(group: str) -> Iterator[None]:
    """Run the body in a cgroup: what it starts is born there, so that every page is charged to it."""
    with open("/proc/self/cgroup") as file:
        home = next(line.split(":", 2)[2].strip() for line in file if line.startswith("0::"))
    top = os.path.dirname(group.removesuffix("/leaf"))
    write(f"{group}/cgroup.procs", str(os.getpid()))
    try:
        yield
    finally:
        write(f"{top}{home.rstrip('/')}/cgroup.procs", str(os.getpid()))


@pytest.mark.slow
def test_a_real_server_below_real_limits() -> None:
    """The kernel's charges are what the segment takes, and a reservation limit makes `try` fall back."""
    server = servers.require(15)
    with real_group() as group, servers.private_directory() as folder, pool(200):
        data = f"{folder}/data"
        server.initdb(data)
        write(f"{group}/hugetlb.2MB.max", str(300 * MB))
        write(f"{group}/leaf/hugetlb.2MB.rsvd.max", str(320 * MB))
        with inside(f"{group}/leaf"):
            running = server.start(data, ["-c", "huge_pages=on", "-B", "16384"])
        with running:
            with open(f"/proc/{running.pid}/status") as file:
                touched = next(int(line.split()[1]) << 10 for line in file if line.startswith("HugetlbPages"))
            limits = cgroups.hugetlb_limits(LiveHost(), running.pid)
        assert isinstance(limits, tuple)
        by_path = {x.path: x for x in limits if x.page_bytes == 2 * MB}
        leaf, parent = by_path[f"{group}/leaf"], by_path[group]
        assert (plain(leaf.fault_limit), plain(leaf.reservation_limit)) == (None, 320 * MB)
        assert isinstance(leaf.fault_limit, Known)
        assert (plain(parent.fault_limit), plain(parent.reservation_limit)) == (300 * MB, None)
        assert 128 * MB < plain(leaf.reservation_usage) == plain(parent.reservation_usage) < 200 * MB
        assert 0 < touched <= plain(parent.fault_usage) <= plain(parent.reservation_usage)
        assert list(by_path) == [f"{group}/leaf", group]  # the root group has no limits

        write(f"{group}/hugetlb.2MB.rsvd.max", "0")
        with inside(f"{group}/leaf"):
            running = server.start(data, ["-c", "huge_pages=try", "-B", "16384"])
        with running:
            limits = cgroups.hugetlb_limits(LiveHost(), running.pid)
            with open(f"/proc/{running.pid}/maps") as file:
                assert "/anon_hugepage" not in file.read()
        assert isinstance(limits, tuple)
        assert {plain(x.reservation_limit) for x in limits if x.path == group and x.page_bytes == 2 * MB} == {0}
        with inside(f"{group}/leaf"), pytest.raises(servers.ServerRefusedError):
            server.start(data, ["-c", "huge_pages=on", "-B", "16384"])
