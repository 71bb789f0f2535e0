"""Captures with anything in them: every outcome is a report, and nothing is safe because it cannot be read."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pgpreemptcheck import run
from pgpreemptcheck.report.outcome import Report

DEMO = Path(run.__file__).parent / "demo/capture"
FILES = sorted(
    os.path.relpath(os.path.join(folder, name), DEMO) for folder, _, names in os.walk(DEMO) for name in names
)

GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "binary": lambda data: b"\x7fELF\xff\x00\xfe" * 50,
    "nested": lambda data: b"[" * 100_000,
    "long digits": lambda data: re.sub(rb"\d+", b"9" * 5000, data, count=1),
    "all digits long": lambda data: re.sub(rb"\d+", b"9" * 5000, data),
    "negative": lambda data: re.sub(rb"\d+", b"-1", data),
    "cut": lambda data: data[: len(data) // 2],
    "one line": lambda data: data.replace(b"\n", b" "),
}


def check(root: Path) -> Report:
    report = run.check(run.Options(root=str(root)), rules_dirs=(), fail_on="high")
    run.render(report, "text", colour=True, unicode=True)
    run.render(report, "json", colour=False, unicode=True)
    return report


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_any_one_file(tmp_path: Path, kind: str) -> None:
    shutil.copytree(DEMO, tmp_path / "host")
    for name in FILES:
        path = tmp_path / "host" / name
        data = path.read_bytes()
        path.write_bytes(GARBAGE[kind](data))
        report = check(tmp_path / "host")
        # no single file of the demo is all that keeps a link from being broken
        safe = [v for v in report.evaluation.verdicts if v.verdict == "not-exposed"]
        assert not safe, (name, safe[0].links)
        path.write_bytes(data)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_every_file(tmp_path: Path, kind: str) -> None:
    shutil.copytree(DEMO, tmp_path / "host")
    for name in FILES:
        path = tmp_path / "host" / name
        path.write_bytes(GARBAGE[kind](path.read_bytes()))
    assert not [v for v in check(tmp_path / "host").evaluation.verdicts if v.verdict == "not-exposed"]
