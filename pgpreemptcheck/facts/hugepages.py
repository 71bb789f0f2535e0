"""Huge pages and memory: every pool, its per-node part, THP for shared memory, page tables.

Sources: Documentation/admin-guide/mm/hugetlbpage.rst and transhuge.rst, mm/shmem.c of Linux 6.18.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from pgpreemptcheck.facts import kernel as kernel_facts
from pgpreemptcheck.facts import meminfo
from pgpreemptcheck.facts.kernel import Kernel
from pgpreemptcheck.facts.kernel_config import architecture_of, version_of
from pgpreemptcheck.facts.kernel_identity import identify
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, measured, record

POOLS = "/sys/kernel/mm/hugepages"
NODES = "/sys/devices/system/node"
THP = "/sys/kernel/mm/transparent_hugepage"

_MAX_NODES = 1024


@record
class Pool:
    """All huge pages of one size. Counts are pages; `total` is nr_hugepages, surplus included."""

    page_bytes: Fact[int] = measured(unit="bytes")
    total: Fact[int] = measured(unit="pages")
    free: Fact[int] = measured(unit="pages")
    reserved: Fact[int] = measured(unit="pages", doc="promised to a mapping and not yet touched")
    surplus: Fact[int] = measured(unit="pages", doc="above the reservation: gone when they are freed")
    overcommit: Fact[int] = measured(unit="pages", doc="nr_overcommit_hugepages")
    per_node: Fact[Mapping[str, int]] = measured(unit="pages", doc="total by NUMA node (node0, node1, ...)")
    per_node_free: Fact[Mapping[str, int]] = measured(unit="pages", doc="free by NUMA node")
    per_node_surplus: Fact[Mapping[str, int]] = measured(unit="pages", doc="surplus by NUMA node")


@record
class HugePages:
    default_bytes: Fact[int] = measured(unit="bytes", doc="the default huge page size")
    pools: tuple[Pool, ...] | Unknown = measured()
    shmem_thp: Fact[str] = measured(doc="the active word of transparent_hugepage/shmem_enabled")
    shmem_thp_possible: Fact[bool] = measured(doc="shared memory can be backed by transparent huge pages")


@record
class Memory:
    total_bytes: Fact[int] = measured(unit="bytes")
    available_bytes: Fact[int] = measured(unit="bytes")
    page_tables_bytes: Fact[int] = measured(unit="bytes")
    hugetlb_bytes: Fact[int] = measured(unit="bytes", doc="all huge pages of all sizes (the Hugetlb line)")
    base_page_bytes: Fact[int] = measured(unit="bytes")


def read(host: Host, kernel: Kernel | None = None) -> HugePages:
    """Return every huge page pool of a host, and whether shared memory may get transparent huge pages."""
    kernel = kernel or kernel_facts.read(host)
    info = meminfo.read(host)
    default = _default_bytes(info, kernel)
    word = _bracketed(host, f"{THP}/shmem_enabled")
    return HugePages(
        default_bytes=default,
        pools=_pools(host, info, default, kernel),
        shmem_thp=word,
        shmem_thp_possible=_shmem_thp_possible(host, word, kernel),
    )


def read_memory(host: Host, kernel: Kernel | None = None, arch: Fact[str] | None = None) -> Memory:
    """Return the memory of a host, and the size of its base pages."""
    info = meminfo.read(host)
    return Memory(
        total_bytes=info.size("MemTotal"),
        available_bytes=info.size("MemAvailable"),
        page_tables_bytes=info.size("PageTables"),
        hugetlb_bytes=info.size("Hugetlb"),
        base_page_bytes=_base_page_bytes(host, kernel, arch),
    )


# pools ------------------------------------------------------------------------------------------


def _default_bytes(info: meminfo.Meminfo, kernel: Kernel) -> Fact[int]:
    size = info.size("Hugepagesize")
    asked = kernel.command_line.default_huge_page_bytes
    if isinstance(size, Unknown) and size.kind == "absent" and isinstance(asked, Known) and asked.value is not None:
        return Known(asked.value, f"{asked.source} default_hugepagesz=", "inferred")
    return size


def _pools(host: Host, info: meminfo.Meminfo, default: Fact[int], kernel: Kernel) -> tuple[Pool, ...] | Unknown:
    names = host.list(POOLS)
    if isinstance(names, Known):
        sizes = sorted(int(m[1]) for name in names.value if (m := re.fullmatch(r"hugepages-(\d{1,12})kB", name)))
        if sizes:
            nodes = _node_names(host)
            return tuple(_pool_of_sysfs(host, size, nodes) for size in sizes)
    total = info.number("HugePages_Total")
    if isinstance(total, Unknown) and total.kind == "absent":
        without = _without_huge_pages(host, names, info, kernel)
        if without or isinstance(default, Unknown):
            return () if without else Unknown(f"no huge page pool can be read: {total.reason}", total.hint, "absent")
    return _pool_of_meminfo(host, info, default)


def _without_huge_pages(host: Host, names: Fact[tuple[str, ...]], info: meminfo.Meminfo, kernel: Kernel) -> bool:
    """Say whether the kernel has no huge pages at all, which is no gap: no pools."""
    built_in = kernel.build.hugetlbfs
    if isinstance(built_in, Known) and not built_in.value:
        return True
    return (
        host.live
        and isinstance(names, Unknown)
        and names.kind == "absent"
        and isinstance(info.size("MemTotal"), Known)
        and isinstance(host.list("/sys/kernel/mm"), Known)
    )


def _node_names(host: Host) -> tuple[str, ...]:
    names = host.list(NODES)
    if isinstance(names, Unknown):
        return ()
    numbers = sorted(int(name[4:]) for name in names.value if re.fullmatch(r"node\d{1,5}", name))
    return tuple(f"node{number}" for number in numbers[:_MAX_NODES])


def _pool_of_sysfs(host: Host, size_kb: int, nodes: tuple[str, ...]) -> Pool:
    folder = f"{POOLS}/hugepages-{size_kb}kB"

    def count(name: str) -> Fact[int]:
        return _number(host, f"{folder}/{name}")

    def by_node(name: str) -> Fact[Mapping[str, int]]:
        counts: dict[str, int] = {}
        for node in nodes:
            path = f"{NODES}/{node}/hugepages/hugepages-{size_kb}kB/{name}"
            number = _number(host, path)
            if isinstance(number, Known):
                counts[node] = number.value
            elif number.kind != "absent":
                return number
        if not counts:
            return Unknown(f"no {NODES}/node*/hugepages/hugepages-{size_kb}kB/{name}", kind="absent")
        return Known(counts, f"{NODES}/node*/hugepages/hugepages-{size_kb}kB/{name}")

    return _consistent(
        Known(size_kb * 1024, folder),
        total=count("nr_hugepages"),
        free=count("free_hugepages"),
        reserved=count("resv_hugepages"),
        surplus=count("surplus_hugepages"),
        overcommit=count("nr_overcommit_hugepages"),
        by_node=by_node,
    )


def _pool_of_meminfo(host: Host, info: meminfo.Meminfo, default: Fact[int]) -> tuple[Pool, ...] | Unknown:
    """Return the pool of the default size: all that meminfo knows. A listing with an odd line is not used at all."""
    total, free = info.number("HugePages_Total"), info.number("HugePages_Free")
    reserved, surplus = info.number("HugePages_Rsvd"), info.number("HugePages_Surp")
    for fact in (total, free, default):
        if isinstance(fact, Unknown) and fact.kind != "absent":
            return Unknown(f"no huge page pool can be read: {fact.reason}", fact.hint, fact.kind)
    no_nodes = Unknown(f"{meminfo.PATH} does not count by NUMA node", f"read {POOLS}", kind="absent")
    pool = _consistent(
        default,
        total=total,
        free=free,
        reserved=reserved,
        surplus=surplus,
        overcommit=_number(host, "/proc/sys/vm/nr_overcommit_hugepages"),
        by_node=lambda _: no_nodes,
    )
    return (pool,)


def _consistent(
    page_bytes: Fact[int],
    *,
    total: Fact[int],
    free: Fact[int],
    reserved: Fact[int],
    surplus: Fact[int],
    overcommit: Fact[int],
    by_node: Callable[[str], Fact[Mapping[str, int]]],
) -> Pool:
    """Return a pool. Counts that exceed the total (the pool was being resized) are not believed."""

    def within(fact: Fact[int]) -> Fact[int]:
        if isinstance(fact, Known) and isinstance(total, Known) and fact.value > total.value:
            return Unknown(
                f"{fact.source} is {fact.value}, more than the pool's {total.value} pages ({total.source})",
                "run again: the pool was being resized",
            )
        return fact

    return Pool(
        page_bytes=page_bytes,
        total=total,
        free=within(free),
        reserved=reserved,
        surplus=within(surplus),
        overcommit=overcommit,
        per_node=by_node("nr_hugepages"),
        per_node_free=by_node("free_hugepages"),
        per_node_surplus=by_node("surplus_hugepages"),
    )


def _number(host: Host, path: str) -> Fact[int]:
    text = host.read(path, limit=4096)
    if isinstance(text, Unknown):
        return text
    word = text.value.strip()
    if not is_number(word):
        return Unknown(f"{path} is not a number: {word[:40]!r}")
    number = int(word)
    if number >= 1 << 63:
        return Unknown(f"{path} is {number}, a counter that went below zero in the kernel")
    return Known(number, path)


# transparent huge pages -------------------------------------------------------------------------


def _bracketed(host: Host, path: str) -> Fact[str]:
    """Return the word in brackets: how sysfs marks the choice in force."""
    text = host.read(path, limit=4096)
    if isinstance(text, Unknown):
        return text
    marked = re.findall(r"\[(\w+)\]", text.value)
    if len(marked) != 1:
        return Unknown(f"{path} marks no choice: {text.value.strip()[:80]!r}")
    return Known(marked[0], path)


def _shmem_thp_possible(host: Host, word: Fact[str], kernel: Kernel) -> Fact[bool]:
    """Return whether PostgreSQL's segment may be on THP (shmem_allowable_huge_orders() in mm/shmem.c).

    `advise` needs madvise(MADV_HUGEPAGE), which PostgreSQL never calls. From 6.11 on every page size has its own
    word, which counts unless the top one is deny or force; `inherit` takes the top one.
    """
    built_in = kernel.build.thp
    if isinstance(built_in, Known) and not built_in.value:
        return Known(False, f"{built_in.source}: no transparent huge pages")
    names = host.list(THP)
    if isinstance(names, Unknown):
        if host.live and names.kind == "absent" and isinstance(host.list("/sys/kernel/mm"), Known):
            return Known(False, f"no {THP}: no transparent huge pages")
        return Unknown(
            f"whether shared memory gets transparent huge pages is not known: {names.reason}", kind=names.kind
        )
    if isinstance(word, Unknown):
        if host.live and word.kind == "absent":
            return Known(False, f"no {word.reason.split()[0]}: no transparent huge pages for shared memory")
        return word
    if word.value == "deny":
        return Known(False, word.source)
    inherited = word.value in ("always", "within_size", "force")
    sizes: list[Known[str]] = []
    gap: Unknown | None = None
    for name in names.value:
        if not re.fullmatch(r"hugepages-\d+kB", name):
            continue
        choice = _bracketed(host, f"{THP}/{name}/shmem_enabled")
        if isinstance(choice, Known):
            sizes.append(choice)
        elif choice.kind != "absent":
            gap = choice
    for choice in sizes:
        own = choice.value in ("always", "within_size") and word.value != "force"
        if own or (choice.value == "inherit" and inherited):
            return Known(True, choice.source if own else f"{choice.source} inherits {word.source}")
    if gap is not None:
        return gap
    if sizes:
        return Known(False, f"{word.source} and {len(sizes)} sizes below it")
    release = kernel.release
    version = version_of(release.value) if isinstance(release, Known) else None
    if host.live or (version is not None and version < (6, 11)):
        return Known(inherited, word.source)
    # the default of a size is to inherit (the PMD size) or never (the others)
    return Known(inherited, f"{word.source}, the sizes' own words not captured", "inferred")


# base pages -------------------------------------------------------------------------------------


def _base_page_bytes(host: Host, kernel: Kernel | None, arch: Fact[str] | None) -> Fact[int]:
    if host.live:
        return Known(os.sysconf("SC_PAGESIZE"), "sysconf(SC_PAGESIZE)")
    kernel = kernel or kernel_facts.read(host)
    if isinstance(kernel.build.base_page_bytes, Known):
        return kernel.build.base_page_bytes
    if isinstance(kernel.release, Known):
        # flavours of arm64 kernels: aarch64+64k (Red Hat), generic-64k (Ubuntu)
        match = re.search(r"[+.-](4|16|64)k(?![A-Za-z0-9])", kernel.release.value)
        if match:
            return Known(int(match[1]) << 10, f"the release {kernel.release.value}", "inferred")
    arch = arch or identify(host).arch
    if isinstance(arch, Known) and architecture_of(arch.value) in ("x86", "s390"):
        return Known(4096, f"{arch.source}: {arch.value} has 4 kB pages only")
    return Unknown(
        "the size of base pages is not known: an architecture with several, and no build configuration",
        "add the output of getconf PAGESIZE, or /boot/config-RELEASE",
        kind="absent",
    )
