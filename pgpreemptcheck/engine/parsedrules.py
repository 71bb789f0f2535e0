"""The shipped rule files as parsed when the wheel was built: importing a YAML reader costs as much as all else here.

`rules/parsed.json` holds, for each file, a checksum of its bytes and its documents with their line numbers, without the
tests of the rules: they are half of it, and a check does not run them. A file that was changed since is read as YAML
again, so that the YAML files stay the only source.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from pgpreemptcheck.engine import yamlfile
from pgpreemptcheck.engine.yamlfile import Document, YamlList, YamlMap

NAME = "parsed.json"


def dump(files: Mapping[str, bytes]) -> str:
    """Return what `load` reads, for rule files by their names."""
    parsed = {}
    for name, data in files.items():
        documents = [[document.line, _plain(document.value)] for document in yamlfile.parse(data, name)]
        parsed[name] = [zlib.crc32(data), documents]
    return json.dumps(parsed, separators=(",", ":"))


def load(text: bytes, files: Mapping[str, bytes]) -> dict[str, list[Document]]:
    """Return the documents of those files that are as they were when they were parsed."""
    found = {}
    for name, (checksum, documents) in json.loads(text).items():
        if name in files and zlib.crc32(files[name]) == checksum:
            found[name] = [Document(_value(value), line) for line, value in documents]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, YamlMap):
        items = [[key, value.lines[key], _plain(item)] for key, item in value.items() if key != "tests"]
        return {"line": value.line, "map": items}
    if isinstance(value, YamlList):
        return {
            "line": value.line,
            "list": [[line, _plain(item)] for line, item in zip(value.lines, value, strict=True)],
        }
    return value


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    if "map" in plain:
        mapping = YamlMap(plain["line"])
        for key, line, item in plain["map"]:
            mapping[key] = _value(item)
            mapping.lines[key] = line
        return mapping
    items = YamlList(plain["line"])
    for line, item in plain["list"]:
        items.append(_value(item))
        items.lines.append(line)
    return items
