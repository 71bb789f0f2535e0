"""The parsed rule files of a wheel say the same as the YAML files, and never what these no longer say."""

from __future__ import annotations

from typing import Any

from pgpreemptcheck.engine import parsedrules, rulefiles, yamlfile
from pgpreemptcheck.engine.yamlfile import YamlList, YamlMap


def with_lines(value: Any) -> Any:
    if isinstance(value, YamlMap):
        return value.line, [(key, value.lines[key], with_lines(item)) for key, item in value.items() if key != "tests"]
    if isinstance(value, YamlList):
        return value.line, list(zip(value.lines, map(with_lines, value), strict=True))
    return value


def test_parsed_rules_are_the_yaml_files() -> None:
    files = {file.name: file.data for file in rulefiles.shipped_files()}
    loaded = parsedrules.load(parsedrules.dump(files).encode(), files)
    assert list(loaded) == list(files) and len(files) >= 4
    for name, data in files.items():
        fresh = yamlfile.parse(data, name)
        assert [(d.line, with_lines(d.value)) for d in loaded[name]] == [(d.line, with_lines(d.value)) for d in fresh]
        assert all("tests" not in d.value for d in loaded[name]) and any("tests" in d.value for d in fresh)


def test_a_changed_file_is_not_taken_as_it_was() -> None:
    text = parsedrules.dump({"rules/a.yaml": b"id: A\n", "rules/b.yaml": b"id: B\n"}).encode()
    loaded = parsedrules.load(text, {"rules/a.yaml": b"id: C\n", "rules/b.yaml": b"id: B\n"})
    assert list(loaded) == ["rules/b.yaml"]
