"""Views made of given facts; every other fact is not known. For tests of the engine, which reads no host."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from pgpreemptcheck.values import Known, Unknown
from pgpreemptcheck.views import HORIZONS, ClusterView, Horizon, HostView, View

NOT_READ = Unknown("not read", "read it")


def _record(cls: Any, prefix: str, facts: Mapping[str, Any]) -> Any:
    """Fill a dataclass of facts from names like `cluster.settings.port`; a value may be a Known or Unknown itself."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = f"{prefix}.{field.name}"
        given = facts.get(name, NOT_READ)
        if field.type.startswith("Fact["):
            values[field.name] = given if isinstance(given, (Known, Unknown)) else Known(given, f"source of {name}")
            continue
        word = field.type.partition(" ")[0]
        declaring = [c for c in cls.__mro__ if getattr(c, "__dataclass_fields__", {}).get(field.name) is field][-1]
        part = sys.modules[declaring.__module__].__dict__.get(word)
        below = any(key.startswith(name + ".") for key in facts)
        optional = field.type.endswith("| None")
        if dataclasses.is_dataclass(part) and part is not Unknown and (below or not optional):
            values[field.name] = _record(part, name, facts)
        else:
            values[field.name] = None if given is NOT_READ else given
    return cls(**values)


def views(
    facts: Mapping[str, Any], *clusters: Mapping[str, Any], at: Mapping[Horizon, Mapping[str, Any]] | None = None
) -> dict[Horizon, View]:
    """Return all horizons with the same facts, except those that `at` gives for one of them (to every cluster)."""
    made: dict[Horizon, View] = {}
    for horizon in HORIZONS:
        other = (at or {}).get(horizon, {})
        host = _record(HostView, "host", {**facts, **other})
        found = []
        for number, cluster in enumerate(clusters, 1):
            plain = {"cluster.id": f"c{number}", "cluster.running": True}
            found.append(_record(ClusterView, "cluster", {**plain, **cluster, **other}))
        made[horizon] = View(horizon, host, tuple(found))
    return made
