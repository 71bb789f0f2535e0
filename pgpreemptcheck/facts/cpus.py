"""CPUs: how many there are, and how many this process or a postmaster may use."""

from __future__ import annotations

import re

from pgpreemptcheck.facts import kernel as kernel_facts
from pgpreemptcheck.facts.kernel import Kernel
from pgpreemptcheck.facts.kernel_identity import Identity, identify
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

_HIGHEST = 1 << 16
"""No kernel has more CPUs or nodes (NR_CPUS is at most 8192): a bound for what a list may expand to."""


@record
class CpuShare:
    """What one process may use: its affinity and cpuset, and the CPU quota of its cgroups."""

    allowed: Fact[int] = measured(unit="CPUs", doc="CPUs that it may run on (affinity and cpuset)")
    quota: Fact[float | None] = measured(unit="CPUs", doc="the tightest CPU quota of its cgroups, null if none")
    memory_nodes: Fact[tuple[int, ...]] = measured(doc="NUMA nodes that it may take memory from")


@record
class Cpus:
    online: Fact[int] = measured(unit="CPUs")
    allowed: Fact[int] = measured(unit="CPUs", doc="CPUs that pgpreemptcheck itself may run on")
    quota: Fact[float | None] = measured(unit="CPUs", doc="the CPU quota of pgpreemptcheck's own cgroups")
    isolated: Fact[int] = measured(unit="CPUs", doc="CPUs that the scheduler keeps free of unpinned processes")
    numa_nodes: Fact[int] = measured(unit="nodes", doc="NUMA nodes with memory")
    sched_ext: Fact[bool] = measured(doc="a sched_ext (BPF) scheduler is active")


def read(host: Host, kernel: Kernel | None = None, identity: Identity | None = None) -> Cpus:
    """Return the CPUs of a host; on a capture, what the tool itself may use is Unknown."""
    identity = identity or identify(host)
    kernel = kernel or kernel_facts.read(host, identity)
    own: CpuShare | Unknown
    if host.live:
        own = share(host, "self")
    else:
        own = Unknown("a capture holds nothing of the process that checks it", kind="unsupported")
    return Cpus(
        online=_online(host),
        allowed=own.allowed if isinstance(own, CpuShare) else own,
        quota=own.quota if isinstance(own, CpuShare) else own,
        isolated=_isolated(host, kernel),
        numa_nodes=_numa_nodes(host),
        sched_ext=kernel_facts.sched_ext(host, identity),
    )


def share(host: Host, pid: int | str) -> CpuShare:
    """Return what a process may use (`/proc/PID/status`, its cgroups); `self` is the tool."""
    from pgpreemptcheck.facts.cgroups import cpu_quota

    path = f"/proc/{pid}/status"
    status = host.read(path, limit=1 << 16)
    return CpuShare(
        allowed=_allowed(host, status),
        quota=cpu_quota(host, pid),
        memory_nodes=_memory_nodes(host, status),
    )


def parse_list(text: str) -> frozenset[int] | None:
    """Return the numbers of a kernel list (`0-3,8,16-31:1/4`; bitmap_parselist), None if it is none."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part.isascii() and part.isdigit() and len(part) < 6:
            numbers.add(int(part))
            continue
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9})/(\d{1,9}))?)?\s*", part)
        if match is None:
            if part.strip():
                return None
            continue
        first, last = int(match[1]), int(match[2] or match[1])
        used, group = int(match[3] or 1), int(match[4] or 1)
        if last < first or last >= _HIGHEST or not 0 < used <= group:
            return None
        for start in range(first, last + 1, group):
            numbers.update(range(start, min(start + used, last + 1)))
    return frozenset(numbers)


def _list_at(host: Host, path: str) -> Fact[frozenset[int]]:
    text = host.read(path, limit=1 << 16)
    if isinstance(text, Unknown):
        return text
    numbers = parse_list(text.value)
    if numbers is None:
        return Unknown(f"{path} is no list of numbers: {text.value.strip()[:60]!r}")
    return Known(numbers, path)


def _online_set(host: Host) -> Fact[frozenset[int]]:
    online = _list_at(host, "/sys/devices/system/cpu/online")
    if isinstance(online, Known) and not online.value:
        return Unknown("/sys/devices/system/cpu/online names no CPU")
    return online


def _online(host: Host) -> Fact[int]:
    online = _online_set(host)
    if isinstance(online, Known):
        return Known(len(online.value), online.source)
    info = host.read("/proc/cpuinfo", limit=32 << 20)
    if isinstance(info, Known):
        # "processor : 0" on x86, arm64, ppc64, riscv; "processor 0: version = FF, ..." on s390x
        count = len(re.findall(r"^processor[ \t]*\d*[ \t]*:", info.value, re.M))
        if count:
            return Known(count, "/proc/cpuinfo, lines processor")
    text = host.read("/sos_commands/processor/lscpu", limit=1 << 20)
    if isinstance(text, Known):
        match = re.search(r"^On-line CPU\(s\) list:\s*(\S+)", text.value, re.M)
        numbers = parse_list(match[1]) if match else None
        if numbers:
            return Known(len(numbers), f"{text.source} On-line CPU(s) list")
        match = re.search(r"^CPU\(s\):\s*(\d{1,9})\s*$", text.value, re.M)
        # all CPUs: lscpu prints a list of those off-line beside it, if there are any
        if match and "Off-line CPU(s) list:" not in text.value:
            return Known(int(match[1]), f"{text.source} CPU(s)")
    return Unknown(f"the number of CPUs is not known: {online.reason}", "add /proc/cpuinfo", online.kind)


def _allowed(host: Host, status: Fact[str]) -> Fact[int]:
    allowed = _status_list(status, "Cpus_allowed_list")
    if isinstance(allowed, Unknown):
        return allowed
    online = _online_set(host)
    if isinstance(online, Unknown):
        return Unknown(f"which of the allowed CPUs are online is not known: {online.reason}", online.hint, online.kind)
    # an affinity that nobody narrowed names every CPU that could be plugged in
    return Known(len(allowed.value & online.value), allowed.source)


def _memory_nodes(host: Host, status: Fact[str]) -> Fact[tuple[int, ...]]:
    nodes = _status_list(status, "Mems_allowed_list")
    if isinstance(nodes, Unknown):
        return nodes
    with_memory = _list_at(host, "/sys/devices/system/node/has_memory")
    usable = nodes.value & with_memory.value if isinstance(with_memory, Known) else nodes.value
    return Known(tuple(sorted(usable)), nodes.source)


def _status_list(status: Fact[str], key: str) -> Fact[frozenset[int]]:
    if isinstance(status, Unknown):
        return status
    _, found, rest = ("\n" + status.value).partition(f"\n{key}:")
    numbers = parse_list(rest.partition("\n")[0]) if found else None
    if numbers is None:
        return Unknown(f"{status.source} has no {key}", kind="absent")
    return Known(numbers, f"{status.source} {key}")


def _isolated(host: Host, kernel: Kernel) -> Fact[int]:
    now = _list_at(host, "/sys/devices/system/cpu/isolated")
    if isinstance(now, Known):
        return Known(len(now.value), now.source)
    asked = kernel.command_line.isolated_cpus
    if isinstance(asked, Unknown):
        return asked
    source = f"{asked.source} isolcpus="
    if asked.value is None:
        return Known(0, source, "inferred")
    numbers = parse_list(asked.value)
    if numbers is None:
        return Unknown(f"{source} is a list that cannot be counted: {asked.value}", "read " + now.reason.split()[0])
    online = _online_set(host)
    return Known(len(numbers & online.value if isinstance(online, Known) else numbers), source, "inferred")


def _numa_nodes(host: Host) -> Fact[int]:
    for path in ("/sys/devices/system/node/has_memory", "/sys/devices/system/node/online"):
        nodes = _list_at(host, path)
        if isinstance(nodes, Known) and nodes.value:
            return Known(len(nodes.value), path)
    names = host.list("/sys/devices/system/node")
    if isinstance(names, Known):
        count = sum(1 for name in names.value if re.fullmatch(r"node\d+", name))
        if count:
            return Known(count, names.source)
    elif host.live and names.kind == "absent" and isinstance(host.list("/sys/devices/system"), Known):
        return Known(1, "no /sys/devices/system/node: a kernel without NUMA")
    return Unknown("the NUMA nodes are not known: /sys/devices/system/node does not list them", kind="absent")
