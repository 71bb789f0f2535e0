"""CPUs and NUMA nodes. Right values: the forms that the kernel documents (bitmap_parselist, proc.rst, cpuset)."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgpreemptcheck.facts import cpus
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Fact, Known, Unknown
from tests.fakehost import FakeHost

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"

X86 = "processor\t: 0\nmodel name\t: x\nflags\t\t: fpu\n\nprocessor\t: 1\nflags\t\t: fpu\n\n"
ARM64 = "processor\t: 0\nBogoMIPS\t: 2000\n\nprocessor\t: 1\n\nprocessor\t: 2\n\nCPU architecture: 8\n"
S390 = """\
vendor_id       : IBM/S390
# processors    : 2
bogomips per cpu: 3033.00
processor 0: version = FF,  identification = 1A2B3C,  machine = 8561
processor 1: version = FF,  identification = 1A2B3C,  machine = 8561
"""
PPC = "processor\t: 0\ncpu\t\t: POWER9\n\nprocessor\t: 8\ncpu\t\t: POWER9\n\nplatform\t: pSeries\n"
ARM32 = "Processor\t: ARMv7 Processor rev 4\nprocessor\t: 0\nBogoMIPS\t: 38\n"


def known(fact: Fact[Any]) -> Any:
    assert isinstance(fact, Known), fact
    return fact.value


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("\n", set()),
        ("0-9:2/5", {0, 1, 5, 6}),
        ("7", {7}),
        ("3-1", None),
        ("0-99999999", None),
        ("all", None),
        ("0-9:0/5", None),
    ],
)
def test_lists(text: str, numbers: set[int] | None) -> None:
    assert cpus.parse_list(text) == (None if numbers is None else frozenset(numbers))


@given(st.sets(st.integers(0, 8191), max_size=40))
def test_a_list_of_single_numbers_comes_back(numbers: set[int]) -> None:
    assert cpus.parse_list(",".join(map(str, sorted(numbers)))) == frozenset(numbers)


def test_online_is_what_the_kernel_lists() -> None:
    assert known(cpus.read(FakeHost({f"{CPU}/online": "0-47,96-143\n", "/proc/cpuinfo": X86})).online) == 96


@pytest.mark.parametrize(("text", "count"), [(X86, 2), (ARM64, 3), (S390, 2), (PPC, 2), (ARM32, 1)])
def test_online_by_cpuinfo(text: str, count: int) -> None:
    assert known(cpus.read(FakeHost({"/proc/cpuinfo": text})).online) == count


def test_online_by_lscpu_of_a_sosreport() -> None:
    path = "/sos_commands/processor/lscpu"
    text = "CPU(s):              96\nOn-line CPU(s) list: 0-79\nOff-line CPU(s) list: 80-95\n"
    assert known(cpus.read(FakeHost({path: text})).online) == 80
    assert known(cpus.read(FakeHost({path: "CPU(s):   8\n"})).online) == 8
    assert isinstance(cpus.read(FakeHost({path: "CPU(s):   8\nOff-line CPU(s) list: 1\n"})).online, Unknown)


def test_no_cpu_count_is_unknown_not_one() -> None:
    assert isinstance(cpus.read(FakeHost({})).online, Unknown)
    assert isinstance(cpus.read(FakeHost({"/proc/cpuinfo": "garbage\n"})).online, Unknown)


STATUS = "Name:\tpostgres\nCpus_allowed:\tff\nCpus_allowed_list:\t{}\nMems_allowed:\t1\nMems_allowed_list:\t{}\n"


def test_a_share_is_affinity_within_what_is_online() -> None:
    # a mask that nobody narrowed names every CPU that could be plugged in
    files = {
        f"{CPU}/online": "0-95\n",
        "/proc/77/status": STATUS.format("0-511", "0-7"),
        f"{NODE}/has_memory": "0-1\n",
    }
    share = cpus.share(FakeHost(files, live=True), 77)
    assert known(share.allowed) == 96
    assert known(share.memory_nodes) == (0, 1)
    files["/proc/77/status"] = STATUS.format("2-5,200", "1")
    share = cpus.share(FakeHost(files, live=True), 77)
    assert known(share.allowed) == 4
    assert known(share.memory_nodes) == (1,)


def test_a_share_without_its_file_is_a_gap() -> None:
    for entry in ({}, {"/proc/77/status": errno.EACCES}, {"/proc/77/status": "Name:\tx\n"}):
        share = cpus.share(FakeHost({f"{CPU}/online": "0-1\n", **entry}), 77)
        assert isinstance(share.allowed, Unknown)
        assert isinstance(share.memory_nodes, Unknown)


def test_a_capture_says_nothing_of_the_tool_itself() -> None:
    result = cpus.read(FakeHost({f"{CPU}/online": "0-1\n", "/proc/self/status": STATUS.format("0-1", "0")}))
    for fact in (result.allowed, result.quota):
        assert isinstance(fact, Unknown)
        assert fact.kind == "unsupported"


def test_isolated_is_what_the_kernel_lists_else_what_was_asked() -> None:
    files = {f"{CPU}/online": "0-7\n", "/proc/cmdline": "isolcpus=managed_irq,domain,2-15\n"}
    assert known(cpus.read(FakeHost(files)).isolated) == 6  # 8 to 15 are not there
    assert known(cpus.read(FakeHost({**files, f"{CPU}/isolated": "\n"})).isolated) == 0
    assert known(cpus.read(FakeHost({**files, f"{CPU}/isolated": "2-3\n"})).isolated) == 2
    assert known(cpus.read(FakeHost({"/proc/cmdline": "quiet\n"})).isolated) == 0
    assert isinstance(cpus.read(FakeHost({})).isolated, Unknown)
    assert isinstance(cpus.read(FakeHost({"/proc/cmdline": "isolcpus=1-N\n"})).isolated, Unknown)


def test_numa_nodes() -> None:
    assert known(cpus.read(FakeHost({f"{NODE}/has_memory": "0,2\n", f"{NODE}/online": "0-3\n"})).numa_nodes) == 2
    assert known(cpus.read(FakeHost({f"{NODE}/online": "0-3\n"})).numa_nodes) == 4
    assert known(cpus.read(FakeHost({f"{NODE}/node0/meminfo": "", f"{NODE}/node1/meminfo": ""})).numa_nodes) == 2
    assert known(cpus.read(FakeHost({f"{CPU}/online": "0"}, live=True)).numa_nodes) == 1  # built without NUMA
    assert isinstance(cpus.read(FakeHost({f"{CPU}/online": "0"})).numa_nodes, Unknown)


def test_sched_ext() -> None:
    path = "/sys/kernel/sched_ext/state"
    assert known(cpus.read(FakeHost({path: "enabled\n"})).sched_ext) is True
    assert known(cpus.read(FakeHost({path: "disabled\n"})).sched_ext) is False
    assert known(cpus.read(FakeHost({}, live=True)).sched_ext) is False
    old = "Linux h 6.8.0 #1 SMP PREEMPT_DYNAMIC now x86_64 GNU/Linux"
    assert known(cpus.read(FakeHost({"uname.txt": old})).sched_ext) is False
    assert isinstance(cpus.read(FakeHost({"uname.txt": old.replace("6.8", "6.12")})).sched_ext, Unknown)


def test_this_machine_as_python_sees_it() -> None:
    result = cpus.read(LiveHost())
    assert known(result.allowed) == len(os.sched_getaffinity(0))
    assert known(result.online) == os.sysconf("SC_NPROCESSORS_ONLN")
