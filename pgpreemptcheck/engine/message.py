"""Text with placeholders `{fact:unit}`, checked when a rule is loaded and filled from the fact table.

Units: bytes (as PostgreSQL writes sizes: 120 GB), pages, seconds, count, text; without a unit the fact's own. `{{`
and `}}` are literal braces. There is no attribute access, conversion, width or nesting: no text grows without bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pgpreemptcheck.engine.expression import Environment, TypeOf
from pgpreemptcheck.engine.types import FactType, RuleError, near
from pgpreemptcheck.units import as_bytes, as_count, as_pages, as_seconds
from pgpreemptcheck.values import Known, record

MAX_LENGTH = 4000
MAX_SHOWN = 400  # characters of one value


def as_text(value: Any) -> str:
    """Return any value in words: true, none, full, lazy."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}: {as_text(item)}" for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        text = ", ".join(as_text(item) for item in value)
    else:
        text = str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


_NUMERIC: dict[str, Callable[[float], str]] = {
    "bytes": as_bytes, "pages": as_pages, "seconds": as_seconds, "count": as_count,
}  # fmt: skip
UNITS = (*_NUMERIC, "text")
_MEASURES = ("bytes", "pages", "seconds")  # units that a fact itself can have


def shown(value: Any, declared: FactType) -> str:
    """Return a value as a person reads it, in the unit of the fact."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and declared.unit in _MEASURES:
        return _NUMERIC[declared.unit](value)
    return as_text(value)


@record
class _Placeholder:
    name: str
    show: Callable[[Any], str]


@record
class Message:
    """A text in parts; `fill(environment)` returns it with the facts in their places."""

    parts: tuple[str | _Placeholder, ...]
    text: str

    def fill(self, environment: Environment) -> str:
        """Return the text; a fact that is not known reads `unknown (reason)`."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return self.parts[0]
        return "".join(p if isinstance(p, str) else _fill(p, environment) for p in self.parts)


def _fill(placeholder: _Placeholder, environment: Environment) -> str:
    fact = environment.fact(placeholder.name)
    if isinstance(fact, Known):
        return "none" if fact.value is None else placeholder.show(fact.value)
    return f"unknown ({fact.reason})"


EMPTY = Message(("",), "")

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def compile_message(text: str, type_of: TypeOf, constants: Mapping[str, Known[Any]] | None = None) -> Message:
    """Return the compiled text, or raise RuleError for a placeholder that is none."""
    if len(text) > MAX_LENGTH:
        raise RuleError(f"a text has at most {MAX_LENGTH} characters")
    if "{" not in text and "}" not in text:
        return Message((text,), text)
    parts: list[str | _Placeholder] = []
    start = 0
    for match in _PART.finditer(text):
        parts.append(text[start : match.start()])
        start = match.end()
        if match[0] in ("{{", "}}"):
            parts.append(match[0][0])
        elif match[1] is None:
            raise RuleError(f"a brace that belongs to no placeholder is written twice: {text[match.start() :][:20]!r}")
        else:
            parts.append(_placeholder(match[1], type_of, constants or {}))
    parts.append(text[start:])
    return Message(tuple(part for part in parts if part != ""), text)


def _placeholder(inner: str, type_of: TypeOf, constants: Mapping[str, Known[Any]]) -> str | _Placeholder:
    name, colon, unit = inner.partition(":")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII) or (colon and not unit):
        raise RuleError(f"{{{inner[:60]}}} is no placeholder: {{fact}} or {{fact:unit}} is expected")
    if unit and unit not in UNITS:
        raise RuleError(f"{{{inner[:60]}}}: a unit is one of {', '.join(UNITS)}{near(unit, UNITS)}")
    declared = type_of(name)
    if declared.kind == "object":
        raise RuleError(f"{{{inner[:60]}}}: {name} has facts below it and no text of its own")
    if not unit:
        return _constant(name, lambda value: shown(value, declared), constants)
    if unit == "text":
        return _constant(name, as_text, constants)
    if declared.kind not in ("integer", "number", "any"):
        raise RuleError(f"{{{inner[:60]}}}: {name} is {declared.label()}, not a number of {unit}")
    if unit in _MEASURES and declared.unit and declared.unit != unit:
        raise RuleError(f"{{{inner[:60]}}}: {name} is in {declared.unit}, not in {unit}")
    return _constant(name, _NUMERIC[unit], constants)


def _constant(name: str, show: Callable[[Any], str], constants: Mapping[str, Known[Any]]) -> str | _Placeholder:
    """A threshold is known when the rule is loaded."""
    return show(constants[name].value) if name in constants else _Placeholder(name, show)
