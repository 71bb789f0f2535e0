"""YAML for rule files: strict, bounded, and with line numbers.

From YAML only mappings, lists and scalars are taken. Plain scalars are true, false, null or empty, integers and
decimal numbers; all else is text: `on`, `off`, `yes`, `22:30:00` and dates too (they are values of PostgreSQL's
settings). Tags, anchors, aliases and duplicate keys are refused. The values are built from the parser's events, so that
nothing is ever constructed that was not asked for; libyaml gives the events where PyYAML has it.
"""

from __future__ import annotations

import re
from typing import Any

from pgpreemptcheck.engine.types import RuleError
from pgpreemptcheck.values import record

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16


class YamlMap(dict[str, Any]):
    """A mapping that knows its line in the file, and the line of each key."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}


class YamlList(list[Any]):
    """A list that knows its line in the file, and the line of each item."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: list[int] = []


@record
class Document:
    """One document of a file, with the line where it starts."""

    value: Any
    line: int


_NUMBER = r"-?(?:0|[1-9][0-9]{0,29})(\.[0-9]{1,30})?"
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def parse(data: bytes, file: str) -> list[Document]:
    """Return the documents of a file, empty ones left out. Raises RuleError `FILE:LINE: what is expected`."""
    if len(data) > MAX_BYTES:
        raise RuleError(f"{file}:1: a rule file has at most {MAX_BYTES // 1024} kB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RuleError(f"{file}:{line}: a rule file is UTF-8 text") from None
    import yaml

    parser: Any = yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader
    try:
        events = parser(text)
        try:
            return _Builder(events, file).documents()
        finally:
            events.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise RuleError(f"{file}:{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # the reader's: a character that YAML does not allow
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
        reason = str(getattr(error, "reason", "a character that is not allowed")).splitlines()[0]
        raise RuleError(f"{file}:{line}: not YAML: {reason}") from None


class _Builder:
    def __init__(self, events: Any, file: str) -> None:
        self._next = events.get_event
        self._file = file

    def documents(self) -> list[Document]:
        found: list[Document] = []
        while True:
            event = self._next()
            kind = event.__class__.__name__
            if kind == "StreamEndEvent":
                return found
            if kind == "DocumentStartEvent":
                if event.tags:
                    raise self._error(event, "tags are not used in rule files")
                first = self._next()
                value = self._value(first, 0)
                if value is not None:
                    found.append(Document(value, first.start_mark.line + 1))

    def _value(self, event: Any, depth: int) -> Any:
        kind = event.__class__.__name__
        if kind == "AliasEvent" or event.anchor is not None:
            raise self._error(event, "anchors and aliases are not used in rule files: write the value out")
        if event.tag is not None:
            raise self._error(event, "tags are not used in rule files")
        if kind == "ScalarEvent":
            return _scalar(event.value) if event.implicit[0] else event.value
        if depth == MAX_DEPTH:
            raise self._error(event, f"values are nested at most {MAX_DEPTH} deep")
        line = event.start_mark.line + 1
        return self._mapping(line, depth) if kind == "MappingStartEvent" else self._list(line, depth)

    def _mapping(self, line: int, depth: int) -> YamlMap:
        mapping = YamlMap(line)
        while True:
            event = self._next()
            kind = event.__class__.__name__
            if kind == "MappingEndEvent":
                return mapping
            if kind != "ScalarEvent" or event.tag is not None or event.anchor is not None:
                raise self._error(event, "a key is plain text")
            key = event.value
            if key in mapping:
                raise self._error(event, f"{key!r} stands twice here (first in line {mapping.lines[key]})")
            mapping.lines[key] = event.start_mark.line + 1
            mapping[key] = self._value(self._next(), depth + 1)

    def _list(self, line: int, depth: int) -> YamlList:
        items = YamlList(line)
        while True:
            event = self._next()
            if event.__class__.__name__ == "SequenceEndEvent":
                return items
            items.lines.append(event.start_mark.line + 1)
            items.append(self._value(event, depth + 1))

    def _error(self, event: Any, message: str) -> RuleError:
        return RuleError(f"{self._file}:{event.start_mark.line + 1}: {message}")


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "-0123456789":
        return text
    number = re.fullmatch(_NUMBER, text, re.ASCII)
    if number is None:
        return text
    return float(text) if number[1] else int(text)
