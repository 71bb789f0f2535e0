"""Hosts captured in the lab and kept in the project: mode, segment and next start, from files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.lab.conftest import PROJECT

CAPTURES = os.path.join(PROJECT, "tests", "captures")


def check(name: str, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pgpreemptcheck", "check", "--format", "json", "--root", f"{CAPTURES}/{name}"]
    done = subprocess.run([*argv, *options], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode in (0, 3), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


# The right values stand in the captured files: sched/preempt, maps (/dev/zero, 0x8bf4000 bytes), meminfo, cpu/online.
@pytest.mark.parametrize(
    ("name", "mode", "link", "now", "next_start"),
    [
        ("debian-6.12-voluntary", "voluntary", "broken", {"not-exposed"}, "not-exposed"),
        ("debian-7.0-lazy", "lazy", "holds", {"exposed", "undetermined"}, "exposed"),
    ],
)
def test_captured_guest(name: str, mode: str, link: str, now: set[str], next_start: str) -> None:
    report = check(name)
    preemption = report["host"]["kernel"]["preemption"]
    assert preemption["mode"]["value"] == mode
    assert preemption["certainty"] == "effective"
    assert report["host"]["cpus"]["online"]["value"] == 16
    (cluster,) = report["clusters"]
    assert cluster["segment"]["bytes"]["value"] == 0x8BF4000
    assert cluster["segment"]["backing"]["value"] == "base"
    assert cluster["segment"]["page_bytes"]["value"] == 4096
    verdicts = {item["horizon"]: item for item in report["verdicts"]}
    assert verdicts["now"]["verdict"] in now  # a checkout has no file times to tell which settings run
    assert verdicts["next_start"]["verdict"] == next_start
    links = {item["link"]: item["state"] for item in verdicts["now"]["links"]}
    assert (links["kernel_preemption"], links["base_pages"], links["freelist"]) == (link, "holds", "holds")


def test_a_capture_is_not_mixed_with_this_machine() -> None:
    report = check("debian-7.0-lazy")
    assert report["host"]["hostname"]["value"] == "lab"
    assert report["host"]["kernel"]["release"]["value"] == "7.0.13+deb13-cloud-amd64"
    assert "unknown" in report["host"]["kernel"]["build"]["model"]  # its build configuration was not installed
