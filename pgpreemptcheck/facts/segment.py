"""The main shared memory segment of a running postmaster: its size and what pages it is really on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pgpreemptcheck.values import Fact, measured

Backing = Literal["base", "huge", "sysv"]


@dataclass(frozen=True)
class Segment:
    bytes: Fact[int] = measured(unit="bytes", doc="mapped size, rounding included")
    page_bytes: Fact[int] = measured(unit="bytes")
    backing: Fact[Backing] = measured()
    thp_possible: Fact[bool] = measured(doc="part of it may be on transparent huge pages")
    base_pages: Fact[bool] = measured(doc="it is on base pages in fact: unknown where THP may back part of it")
