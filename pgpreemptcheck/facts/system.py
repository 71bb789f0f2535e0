"""The host itself: name, distribution, architecture, virtual machine or container."""

from __future__ import annotations

from dataclasses import dataclass

from pgpreemptcheck.facts.cpus import Cpus
from pgpreemptcheck.facts.hugepages import HugePages, Memory
from pgpreemptcheck.facts.kernel import Kernel
from pgpreemptcheck.values import Fact, measured


@dataclass(frozen=True)
class OperatingSystem:
    id: Fact[str] = measured(doc="ID of os-release")
    version: Fact[str] = measured(doc="VERSION_ID of os-release")


@dataclass(frozen=True)
class System:
    """Everything measured of the host: the `host` object of the report."""

    hostname: Fact[str] = measured()
    os: OperatingSystem = measured()
    arch: Fact[str] = measured(doc="uname -m")
    virtualization: Fact[str | None] = measured(doc="the hypervisor (kvm, xen, wsl, ...), null on bare metal")
    container: Fact[str | None] = measured(doc="the container runtime that this tool runs in, null if none")
    cpus: Cpus = measured()
    memory: Memory = measured()
    kernel: Kernel = measured()
    huge_pages: HugePages = measured()
