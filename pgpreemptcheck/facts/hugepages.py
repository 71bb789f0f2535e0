"""Huge pages and memory: every pool, its per-node part, THP for shared memory, page tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from pgpreemptcheck.values import Fact, Unknown, measured


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class HugePages:
    default_bytes: Fact[int] = measured(unit="bytes", doc="the default huge page size")
    pools: tuple[Pool, ...] | Unknown = measured()
    shmem_thp: Fact[str] = measured(doc="the active word of transparent_hugepage/shmem_enabled")
    shmem_thp_possible: Fact[bool] = measured(doc="shared memory can be backed by transparent huge pages")


@dataclass(frozen=True)
class Memory:
    total_bytes: Fact[int] = measured(unit="bytes")
    available_bytes: Fact[int] = measured(unit="bytes")
    page_tables_bytes: Fact[int] = measured(unit="bytes")
    hugetlb_bytes: Fact[int] = measured(unit="bytes", doc="all huge pages of all sizes (the Hugetlb line)")
    base_page_bytes: Fact[int] = measured(unit="bytes")
