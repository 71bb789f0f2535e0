"""What if: `--assume [HORIZON:][CLUSTER:]FACT=VALUE` replaces facts, typed and checked against the fact schema.

An assumption is put in before anything is worked out from the fact, so that what follows from it follows: with
`cluster.settings.huge_pages=on` a start may refuse, with `host.kernel.preemption.mode=none` that link breaks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pgpreemptcheck.engine.schema import Schema
from pgpreemptcheck.engine.types import FactType, RuleError
from pgpreemptcheck.errors import UserError
from pgpreemptcheck.facts.kernel import Preemption
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.values import Known, record
from pgpreemptcheck.views import HORIZONS, Horizon

T = TypeVar("T")

SOURCE = "assumed with --assume"
_UNITS = {"B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


@record
class Assumption:
    """One replaced fact; horizon and cluster None mean all of them."""

    horizon: Horizon | None
    cluster: str | None
    name: str
    value: Any


class Assumptions:
    """All assumptions of a run."""

    def __init__(self, entries: Sequence[Assumption] = ()) -> None:
        self.entries = tuple(entries)

    def apply(self, value: T, prefix: str, horizon: Horizon, cluster: str | None = None) -> T:
        """Return the dataclass with the facts below `prefix` replaced, and what follows from them alone."""
        for entry in self.entries:
            if (
                entry.name.startswith(prefix + ".")
                and entry.horizon in (None, horizon)
                and entry.cluster in (None, cluster)
            ):
                value = _replaced(
                    value, entry.name[len(prefix) + 1 :].split("."), Known(entry.value, SOURCE, "assumed")
                )
        return value


def _replaced(value: Any, path: Sequence[str], fact: Known[Any]) -> Any:
    if value is None:  # the segment of a cluster that does not run, say
        return None
    name = path[0]
    if not hasattr(value, name):  # worked out later (host.demand): replaced there
        return value
    if len(path) > 1:
        return dataclasses.replace(value, **{name: _replaced(getattr(value, name), path[1:], fact)})
    changes: dict[str, Any] = {name: fact}
    if isinstance(value, Preemption) and name == "mode":
        changes["preemptible"] = Known(fact.value in ("full", "lazy", "rt"), SOURCE, "assumed")
        changes["certainty"] = "effective"
    if isinstance(value, Segment) and name == "backing":
        changes["base_pages"] = Known(fact.value != "huge", SOURCE, "assumed")
    return dataclasses.replace(value, **changes)


def parse(texts: Sequence[str], clusters: Sequence[str]) -> Assumptions:
    """Return the assumptions as given. Raises UserError in one line for what is none."""
    schema = Schema()
    return Assumptions([_parse(text, schema, clusters) for text in texts])


def _parse(text: str, schema: Schema, clusters: Sequence[str]) -> Assumption:
    left, equals, right = text.partition("=")
    if not equals:
        raise UserError(f"--assume {text}: expected [HORIZON:][CLUSTER:]FACT=VALUE")
    scope, _, name = left.rpartition(":")
    horizon: Horizon | None = None
    for candidate in HORIZONS:
        if scope == candidate or scope.startswith(candidate + ":"):
            horizon, scope = candidate, scope[len(candidate) + 1 :]
            break
    if scope and scope not in clusters:
        known = ", ".join(clusters) or "none were found"
        raise UserError(f"--assume {text}: expected a horizon ({', '.join(HORIZONS)}) or a cluster ({known}) "
                        f"before the fact, not {scope}")  # fmt: skip
    try:
        declared = schema.type_of(name)
    except RuleError as error:
        raise UserError(f"--assume {text}: {error}; all names: pgpreemptcheck rules schema") from None
    if declared.kind in ("list", "object"):
        raise UserError(f"--assume {text}: {name} has parts; assume one of them")
    if name in ("cluster.id", "cluster.data_directory", "cluster.running", "host.kernel.preemption.certainty"):
        raise UserError(f"--assume {text}: {name} cannot be assumed")
    if scope and not name.startswith("cluster."):
        raise UserError(f"--assume {text}: {name} is a fact of the host, not of a cluster")
    return Assumption(horizon, scope or None, name, _value(text, declared, right.strip()))


def _value(text: str, declared: FactType, written: str) -> Any:
    value: Any = written
    if declared.nullable and written.lower() in ("null", "none"):
        value = None
    elif declared.kind == "boolean":
        value = {"true": True, "false": False}.get(written.lower(), written)
    elif declared.kind in ("integer", "number"):
        value = _number(declared, written)
    if not declared.accepts(value):
        unit = f" in {declared.unit}" if declared.unit else ""
        least = f", {_least(declared)} or more" if declared.kind in ("integer", "number") else ""
        raise UserError(f"--assume {text}: expected {declared.label()}{least}{unit}, not {written!r}")
    return value


def _number(declared: FactType, written: str) -> Any:
    """Return the number; what is none, or none that a fact can have (negative, infinite), as it was written."""
    if len(written) > 20 or not written.isascii():
        return written
    if declared.unit == "bytes":
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|kB|MB|GB|TB)", written)
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    for read in (int, float):
        try:
            number = read(written)
        except ValueError:
            continue
        return number if _least(declared) <= number < float("inf") else written
    return written


def _least(declared: FactType) -> int:
    """Return the least number that a fact can have: settings know -1, "as another setting says"."""
    return -1 if declared.name.startswith("cluster.settings.") else 0
