"""CPUs: how many there are, and how many this process or a postmaster may use."""

from __future__ import annotations

from dataclasses import dataclass

from pgpreemptcheck.values import Fact, measured


@dataclass(frozen=True)
class CpuShare:
    """What one process may use: its affinity and cpuset, and the CPU quota of its cgroups."""

    allowed: Fact[int] = measured(unit="CPUs", doc="CPUs that it may run on (affinity and cpuset)")
    quota: Fact[float | None] = measured(unit="CPUs", doc="the tightest CPU quota of its cgroups, null if none")
    memory_nodes: Fact[tuple[int, ...]] = measured(doc="NUMA nodes that it may take memory from")


@dataclass(frozen=True)
class Cpus:
    online: Fact[int] = measured(unit="CPUs")
    allowed: Fact[int] = measured(unit="CPUs", doc="CPUs that pgpreemptcheck itself may run on")
    quota: Fact[float | None] = measured(unit="CPUs", doc="the CPU quota of pgpreemptcheck's own cgroups")
    isolated: Fact[int] = measured(unit="CPUs", doc="CPUs that the scheduler keeps free of unpinned processes")
    numa_nodes: Fact[int] = measured(unit="nodes", doc="NUMA nodes with memory")
    sched_ext: Fact[bool] = measured(doc="a sched_ext (BPF) scheduler is active")
