"""The fact schema: every name that a rule can use, derived from the declarations of the facts themselves.

`host` is a HostView, `cluster` a ClusterView; `now.`, `crash_restart.` and `next_start.` before a name give its value
at that horizon. Annotations are read as text and names in them resolved through the module that declares the class:
a tenth of the cost of typing.get_type_hints, and only for the names that are asked for.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pgpreemptcheck.engine.types import FactType, Kind, RuleError, near
from pgpreemptcheck.values import Known, Unknown, record
from pgpreemptcheck.views import HORIZONS, ClusterView, Horizon, HostView, View


@record
class _Shape:
    """What an annotation says: a scalar, or (`record`) a dataclass with facts of its own."""

    kind: Kind
    values: tuple[str, ...] | None = None
    nullable: bool = False
    record: type | None = None


_SCALARS: dict[str, Kind] = {"bool": "boolean", "int": "integer", "float": "number", "str": "text"}


class Schema:
    """The types of all facts. `type_of` is cheap for one name; `names` walks everything."""

    def __init__(self, host: type = HostView, cluster: type = ClusterView) -> None:
        self._roots = {"host": host, "cluster": cluster}
        self._types: dict[str, FactType] = {}
        self._records: dict[str, type] = dict(self._roots)
        self._shapes: dict[tuple[str, str], _Shape] = {}

    def type_of(self, name: str) -> FactType:
        """Return the type of a fact, or raise RuleError for a name that is none (with the nearest one that is)."""
        known = self._types.get(name)
        if known is not None:
            return known
        horizon, _, rest = name.partition(".")
        if horizon in HORIZONS and rest.partition(".")[0] in self._roots:
            declared = replace(self.type_of(rest), name=name)
        else:
            declared = self._find(name)
        self._types[name] = declared
        return declared

    def names(self) -> Iterator[FactType]:
        """Yield every fact, by name and in the order of declaration."""
        for root, declared in self._roots.items():
            yield from self._below(root, declared)

    def _below(self, prefix: str, record: type) -> Iterator[FactType]:
        for field in dataclasses.fields(record):
            declared = self.type_of(f"{prefix}.{field.name}")
            if declared.kind == "object":
                yield from self._below(declared.name, self._records[declared.name])
            else:
                yield declared

    def _find(self, name: str) -> FactType:
        parent, _, last = name.rpartition(".")
        if not parent:
            if name in self._roots:
                return FactType(name, "object")
            raise self._unknown(name)
        try:
            kind = self.type_of(parent).kind
        except RuleError:
            raise self._unknown(name) from None
        record = self._records.get(parent)
        field = getattr(record, "__dataclass_fields__", {}).get(last) if kind == "object" else None
        if record is None or field is None:
            raise self._unknown(name)
        # an inherited field is the same object in its base, whose module knows the names in its annotation
        bases = [base for base in record.__mro__ if getattr(base, "__dataclass_fields__", {}).get(last) is field]
        shape = self._shape(field.type, bases[-1].__module__)
        if shape.record is not None:
            self._records[name] = shape.record
        unit, doc = field.metadata.get("unit", ""), field.metadata.get("doc", "")
        return FactType(name, shape.kind, shape.values, unit, doc, shape.nullable)

    def _unknown(self, name: str) -> RuleError:
        bare = name.partition(".")[2] if name.partition(".")[0] in HORIZONS else name
        return RuleError(f"there is no fact {name}{near(bare, (fact.name for fact in self.names()))}")

    def _shape(self, annotation: str, module: str) -> _Shape:
        shape = self._shapes.get((annotation, module))
        if shape is None:
            names = sys.modules[module].__dict__
            shape = self._shapes[annotation, module] = _shape(ast.parse(annotation, mode="eval").body, names)
        return shape


def _shape(node: ast.expr, names: Mapping[str, Any]) -> _Shape:
    """Return what an annotation says. `X | None` is nullable only inside Fact[]: a bare None is a fact not known."""
    if isinstance(node, ast.BinOp):
        sides = [side for side in (node.left, node.right) if not _is_gap(side)]
        return _shape(sides[0], names) if len(sides) == 1 else _Shape("list")
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Fact":
            inner = node.slice
            if isinstance(inner, ast.BinOp) and isinstance(inner.right, ast.Constant) and inner.right.value is None:
                return replace(_shape(inner.left, names), nullable=True)
            return _shape(inner, names)
        if node.value.id == "Literal":
            elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return _Shape("text", tuple(str(ast.literal_eval(element)) for element in elements))
        return _Shape("list")
    if isinstance(node, ast.Name):
        scalar = _SCALARS.get(node.id)
        if scalar is not None:
            return _Shape(scalar)
        named = names[node.id]
        if typing.get_origin(named) is typing.Literal:
            return _Shape("text", typing.get_args(named))
        if dataclasses.is_dataclass(named) and isinstance(named, type):
            return _Shape("object", record=named)
    return _Shape("list")


def _is_gap(node: ast.expr) -> bool:
    return ast.unparse(node) in ("None", "Unknown")


def find(view: View, cluster: ClusterView | None, name: str) -> Known[Any] | Unknown:
    """Return a fact of a view; a part that is not there (the segment of a cluster that does not run) is Unknown."""
    root, *parts = name.split(".")
    node: Any = view.host if root == "host" else cluster
    if node is None:
        return Unknown("there is no such cluster at this horizon")
    for depth, part in enumerate(parts, 1):
        node = getattr(node, part)
        if node.__class__ is Known or node.__class__ is Unknown:
            return node
        if node is None:
            if cluster is not None and not cluster.running and view.horizon != "next_start":
                return Unknown("the cluster does not run", kind="unsupported")
            return Unknown(f"there is no {'.'.join([root, *parts[:depth]])} here", kind="absent")
    return Known(node, "")  # a bare value of the report: it has no place of its own


def lookup(views: Mapping[Horizon, View], horizon: Horizon, cluster: str | None, name: str) -> Known[Any] | Unknown:
    """Return a fact by its name in a rule: of the cluster with that id, at that horizon or the one in the name."""
    first, _, rest = name.partition(".")
    if first in HORIZONS:
        horizon, name = first, rest
    view = views.get(horizon)
    if view is None:
        return Unknown(f"nothing is known of the horizon {horizon}")
    mine = next((c for c in view.clusters if c.id == cluster), None) if name.startswith("cluster") else None
    return find(view, mine, name)
