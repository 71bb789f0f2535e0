"""The host: name, distribution, virtual machine, container. Right values: what such hosts show of themselves."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from pgpreemptcheck.facts import system
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Fact, Known, Unknown
from tests.fakehost import FakeHost

DMI = "/sys/class/dmi/id"
CPUINFO = "processor\t: 0\nflags\t\t: fpu vme{} sse\n"


def known(fact: Fact[Any]) -> Any:
    assert isinstance(fact, Known), fact
    return fact.value


def read(files: dict[str, Any], **options: Any) -> System:
    return system.read(FakeHost(files, **options))


def test_names() -> None:
    result = read(
        {
            "/etc/hostname": "db1\n",
            "/etc/os-release": "# comment\nID=\"rhel\"\nVERSION_ID='9.4'\nNAME=x\n",
            "uname.txt": "Linux db2 6.8.0 #1 SMP PREEMPT_DYNAMIC now aarch64 GNU/Linux",
        }
    )
    assert (known(result.hostname), known(result.os.id), known(result.os.version)) == ("db2", "rhel", "9.4")
    assert known(result.arch) == "aarch64"
    assert known(read({"/etc/hostname": "db1\n"}).hostname) == "db1"
    assert known(read({"/proc/sys/kernel/hostname": "db0\n", "/etc/hostname": "db1\n"}).hostname) == "db0"


def test_a_distribution_without_a_version() -> None:
    result = read({"/usr/lib/os-release": "ID=debian\n"})  # Debian testing
    assert known(result.os.id) == "debian"
    assert isinstance(result.os.version, Unknown)


def test_nothing_to_read() -> None:
    result = read({})
    for fact in (result.hostname, result.os.id, result.arch, result.virtualization, result.container):
        assert isinstance(fact, Unknown)
        assert fact.reason


WSL = "Linux PC 5.15.167.4-microsoft-standard-WSL2 #1 SMP Tue Nov 5 00:21:55 UTC 2024 x86_64 GNU/Linux"
CLOCKS = "/sys/devices/system/clocksource/clocksource0/available_clocksource"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"uname.txt": WSL}, "wsl"),
        ({"/sys/hypervisor/type": "xen\n"}, "xen"),
        ({f"{DMI}/sys_vendor": "QEMU\n", f"{DMI}/product_name": "Standard PC (Q35 + ICH9, 2009)\n"}, "qemu"),
        ({f"{DMI}/sys_vendor": "VMware, Inc.\n", f"{DMI}/product_name": "VMware7,1\n"}, "vmware"),
        ({f"{DMI}/sys_vendor": "Microsoft Corporation\n", f"{DMI}/product_name": "Virtual Machine\n"}, "hyperv"),
        ({f"{DMI}/sys_vendor": "Amazon EC2\n", f"{DMI}/product_name": "m8g.24xlarge\n"}, "kvm"),
        ({f"{DMI}/sys_vendor": "Amazon EC2\n", f"{DMI}/product_name": "m8g.metal-24xl\n"}, None),
        ({f"{DMI}/sys_vendor": "Google\n", f"{DMI}/product_name": "Google Compute Engine\n"}, "kvm"),
        ({"/proc/cpuinfo": CPUINFO.format(" hypervisor"), CLOCKS: "kvm-clock tsc\n"}, "kvm"),
        ({"/proc/cpuinfo": CPUINFO.format(" hypervisor"), CLOCKS: "tsc\n"}, "unnamed hypervisor"),
        ({"/proc/cpuinfo": CPUINFO.format("")}, None),
        (
            {"/proc/cpuinfo": CPUINFO.format(""), f"{DMI}/sys_vendor": "Dell Inc.\n", f"{DMI}/product_name": "R750\n"},
            None,
        ),
        ({"/proc/device-tree/hypervisor/compatible": b"linux,kvm\0"}, "kvm"),
        ({"/proc/cpuinfo": "processor : 0\nFeatures : fp asimd\n", f"{DMI}/sys_vendor": "HPE\n"}, "unknown"),
    ],
)
def test_virtualization(files: dict[str, Any], expected: str | None) -> None:
    fact = read(files).virtualization
    assert (fact.value if isinstance(fact, Known) else "unknown") == expected


FIRST = {
    "/proc/self/ns/pid": ("->", "pid:[4026531836]"),
    "/proc/self/ns/uts": ("->", "uts:[4026531838]"),
    "/proc/self/ns/ipc": ("->", "ipc:[4026531839]"),
}
OWN = {**FIRST, "/proc/self/ns/pid": ("->", "pid:[4026532777]")}


@pytest.mark.parametrize(
    ("files", "live", "expected"),
    [
        ({"/proc/1/environ": b"PATH=/bin\0container=lxc\0"}, True, "lxc"),
        ({"/proc/1/environ": b"xcontainer=lxc\0"}, False, "unknown"),
        ({"/run/systemd/container": "systemd-nspawn\n"}, True, "systemd-nspawn"),
        ({"/run/.containerenv": 'engine="podman-5.0"\n'}, True, "podman"),
        ({"/proc/1/cgroup": "0::/kubepods.slice/kubepods-burstable.slice/x\n", **OWN}, True, "kubernetes"),
        ({"/.dockerenv": "", "/proc/1/cgroup": "0::/\n", **OWN}, True, "docker"),
        # the file system of an image, booted as a machine of its own
        ({"/.dockerenv": "", "/proc/1/cgroup": "0::/\n", **FIRST}, True, None),
        (FIRST, True, None),
        (OWN, True, "unknown"),
        ({"/.dockerenv": ""}, False, "docker"),
        ({"/etc/hostname": "x"}, False, "unknown"),
    ],
)
def test_container(files: dict[str, Any], live: bool, expected: str | None) -> None:
    fact = read(files, live=live).container
    assert (fact.value if isinstance(fact, Known) else "unknown") == expected


def test_this_machine() -> None:
    result = system.read(LiveHost())
    assert known(result.hostname) == os.uname().nodename
    assert known(result.arch) == os.uname().machine


def test_reading_this_machine_is_quick() -> None:
    host = LiveHost()
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        system.read(host)
        best = min(best, time.perf_counter() - start)
    assert best < 0.05  # takes about 4 ms on two small CPUs: a bound against a slip, not a measurement
