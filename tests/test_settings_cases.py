"""Real configuration files with answers checked on PostgreSQL 15."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from pgpreemptcheck.captured import DirectoryHost
from pgpreemptcheck.facts import file_settings, settings
from pgpreemptcheck.values import Known, Unknown

CASES = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "cases", "postgresql-conf")
NAMES = sorted(n for n in (os.listdir(CASES) if os.path.isdir(CASES) else ()) if not n.endswith(".json"))


def read(name: str) -> tuple[dict[str, Any], settings.FileSettings]:
    with open(os.path.join(CASES, f"{name}.expect.json")) as file:
        expect: dict[str, Any] = json.load(file)
    host = DirectoryHost(os.path.join(CASES, name))
    entry = "/" + expect["entry"]
    found = file_settings.read(host, data_directory=os.path.dirname(entry), config_file=entry, major=15)
    return expect, found


@pytest.mark.skipif(not NAMES, reason="no folder ../shared/cases/postgresql-conf")
@pytest.mark.parametrize("name", NAMES or ["none"])
def test_real_file(name: str) -> None:
    expect, found = read(name)
    only_here = expect["verified"].partition("only PG 15 refuses: ")[2]
    errors = [e for e in found.errors if f"{str(e.file).lstrip('/')}:{e.line} " not in only_here]
    said = [(str(e.file).lstrip("/"), e.line, e.reason.replace('"/', '"')) for e in errors]
    wanted = [(e["file"], e["line"], e["message"].replace('"/', '"')) for e in expect["errors"]]
    assert said[: len(wanted)] == wanted
    assert len(said) == len(wanted) or len(said) >= expect["errors_total"]
    if not expect["written_for"] or "." not in expect["written_for"].rstrip("."):  # 8.1 and 9.1 files: not for 15
        assert isinstance(found.accepted, Known)
        assert found.accepted.value is (expect["verdict"] == "accepted"), found.error
    for key, want in expect["settings"].items():
        fact = getattr(found.settings, key)
        if want is None:
            assert isinstance(fact, Unknown) or fact.source == "default"
        elif want["value"] == "error":
            assert isinstance(fact, Unknown)
        else:
            assert isinstance(fact, Known), fact
            assert (fact.value, fact.source) == (want["value"], f"/{want['file']} line {want['line']}")
