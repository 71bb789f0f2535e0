"""The kernel: release, build configuration, command line, and the preemption model that is in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pgpreemptcheck.values import Fact, Unknown, measured

Mode = Literal["none", "voluntary", "full", "lazy", "rt"]
ModeCertainty = Literal["effective", "boot", "build"]
VersionToken = Literal["PREEMPT", "PREEMPT_DYNAMIC", "PREEMPT_RT"]


@dataclass(frozen=True)
class Build:
    """What the kernel's build configuration says."""

    model: Fact[Mode] = measured(doc="the preemption model it was built with")
    dynamic: Fact[bool] = measured(doc="CONFIG_PREEMPT_DYNAMIC: the model can be chosen at boot")
    selectable: Fact[tuple[str, ...]] = measured(doc="the models that preempt= accepts; none where not dynamic")
    lazy_supported: Fact[bool] = measured(doc="CONFIG_ARCH_HAS_PREEMPT_LAZY")
    rseq_slice_extension: Fact[bool] = measured(doc="CONFIG_RSEQ_SLICE_EXTENSION is built in")
    hugetlbfs: Fact[bool] = measured(doc="CONFIG_HUGETLBFS: the kernel has huge pages at all")
    cgroup_hugetlb: Fact[bool] = measured(doc="CONFIG_CGROUP_HUGETLB")
    thp_default: Fact[Literal["always", "madvise", "never"]] = measured(doc="transparent huge pages at boot")
    base_page_bytes: Fact[int] = measured(unit="bytes", doc="the base page size it was built for")


@dataclass(frozen=True)
class RequestedHugePages:
    """One `hugepages=` request on the command line."""

    page_bytes: Fact[int] = measured(unit="bytes")
    pages: Fact[int] = measured(unit="pages")
    node: Fact[int | None] = measured(doc="the NUMA node, null for all")


@dataclass(frozen=True)
class CommandLine:
    """The command line that the running kernel was booted with."""

    text: Fact[str] = measured()
    preempt: Fact[str | None] = measured(doc="the last preempt= as written, null if there is none")
    default_huge_page_bytes: Fact[int | None] = measured(unit="bytes", doc="default_hugepagesz=, null if not given")
    huge_pages: tuple[RequestedHugePages, ...] | Unknown = measured(doc="hugepagesz= and hugepages= requests")
    transparent_hugepage: Fact[str | None] = measured(doc="transparent_hugepage= as written, null if not given")
    isolated_cpus: Fact[str | None] = measured(doc="the CPU list of isolcpus=, null if not given")


@dataclass(frozen=True)
class Preemption:
    """The preemption model in force, by the first rung of the ladder that answers (its source names it)."""

    mode: Fact[Mode] = measured()
    certainty: ModeCertainty | None = measured(doc="effective: read off the running kernel; boot, build: inferred")
    preemptible: Fact[bool] = measured(doc="kernel code can be preempted: lazy, full or rt")
    ignored_parameter: Fact[str | None] = measured(doc="a preempt= value that this kernel ignores, as written")


@dataclass(frozen=True)
class Kernel:
    release: Fact[str] = measured(doc="uname -r")
    version_token: Fact[VersionToken | None] = measured(doc="the PREEMPT word of uname -v")
    lockdown: Fact[Literal["none", "integrity", "confidentiality"]] = measured()
    build: Build = measured()
    command_line: CommandLine = measured()
    preemption: Preemption = measured()
