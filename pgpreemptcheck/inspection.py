"""Inspection: all readers over one host, in the order that keeps a check short.

Clusters are looked for first, so that one child per owner (owner.py) can start up, and import the SQL
driver, while the host's own facts are read and the rules are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pgpreemptcheck import owner
from pgpreemptcheck.facts import binary, cgroups, clusters, control, cpus, segment, server, settings, system
from pgpreemptcheck.facts.cgroups import HugetlbLimit
from pgpreemptcheck.facts.clusters import Postmaster, StoppedCluster
from pgpreemptcheck.facts.control import Control
from pgpreemptcheck.facts.cpus import CpuShare
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.facts.server import Server
from pgpreemptcheck.facts.settings import FileSettings, Settings
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown


@dataclass(frozen=True)
class ClusterFacts:
    """Everything read about one cluster. What only a running one has is None where it does not run."""

    id: str
    data_directory: str | None
    version: Fact[str]
    major: Fact[int]
    fork: str | None
    owner: Fact[str]
    config_file: Fact[str]
    container: str | None
    starts_at_boot: Fact[bool]
    standby: Fact[bool]
    control: Fact[Control]
    patroni: Fact[bool]
    files: FileSettings
    freelist: Fact[bool]
    cpus: CpuShare
    hugetlb_limits: tuple[HugetlbLimit, ...] | Unknown
    postmaster: Postmaster | None
    port: Fact[int]
    settings: Settings | None
    segment: Segment | None
    server: Server | None


@dataclass(frozen=True)
class Facts:
    """What was read of the host and its clusters; `hidden` says that there may be a cluster that cannot be seen."""

    system: System
    clusters: tuple[ClusterFacts, ...]
    hidden: Unknown | None
