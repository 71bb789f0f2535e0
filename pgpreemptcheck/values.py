"""Known values and gaps: what every reader returns and every rule compares.

A fact is either `Known` (a value, where it was read, and how sure that is) or `Unknown` (why not,
and what would settle it). Nothing else: a reader never raises for what is missing and never guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, Union

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Certainty = Literal["measured", "inferred", "heuristic"]
"""measured: read off the thing itself. inferred: follows from something read. heuristic: a cut-off of ours."""

GapKind = Literal[
    "absent",  # it does not exist (on a capture: it is not in the capture)
    "permission",  # EACCES: another user, or root, could read it
    "lockdown",  # EPERM for root: the kernel refuses everybody
    "too-large",  # larger than the bound of this read
    "not-text",  # bytes that are no text
    "unsupported",  # this kind of host cannot answer (SQL on a capture, say)
    "other",
]


@dataclass(frozen=True)
class Known(Generic[T_co]):
    """A value with its source, in words or as a path (`/proc/meminfo`, `sql pg_settings`, `FILE line 7`)."""

    value: T_co
    source: str
    certainty: Certainty = "measured"


@dataclass(frozen=True)
class Unknown:
    """A gap: the reason in one sentence, and a hint: the one action that would close it (may be empty)."""

    reason: str
    hint: str = ""
    kind: GapKind = "other"


Fact = Union[Known[T], Unknown]


def value_of(fact: Fact[T], default: T) -> T:
    """Return the fact's value, or `default` where it is unknown: for display and bounds, never for a verdict."""
    return fact.value if isinstance(fact, Known) else default


def measured(*, unit: str = "", doc: str = "") -> Any:
    """Declare a dataclass field that holds a fact, with its unit (bytes, seconds, pages, share, ...) and meaning.

    The fact schema (engine/schema.py) is derived from these declarations and from the annotations.
    """
    return field(metadata={"unit": unit, "doc": doc})
