"""The program as users call it, and what must be true of every report, whatever the host."""

from __future__ import annotations

import atexit
import functools
import glob
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SEVERITIES = ("critical", "high", "medium", "low", "info")

Json = dict[str, Any]


def value(leaf: Json) -> Any:
    """Return what was measured; a gap fails the test with its reason."""
    assert "value" in leaf, leaf
    return leaf["value"]


def gap(leaf: Json) -> str:
    """Return the reason of something not known; a value fails the test."""
    assert "unknown" in leaf, leaf
    return str(leaf["unknown"])


@dataclass(frozen=True)
class Answer:
    """One run of `check --format json`."""

    code: int
    data: Json
    stderr: str

    def cluster(self, directory: str) -> Json:
        found = [c for c in self.data["clusters"] if c["data_directory"] == directory]
        assert len(found) == 1, (directory, [c["id"] for c in self.data["clusters"]])
        return dict(found[0])

    def verdict(self, directory: str, horizon: str) -> Json:
        name = self.cluster(directory)["id"]
        found = [v for v in self.data["verdicts"] if v["cluster"] == name and v["horizon"] == horizon]
        assert len(found) == 1, (directory, horizon)
        return dict(found[0])

    def links(self, directory: str, horizon: str) -> dict[str, str]:
        return {link["link"]: link["state"] for link in self.verdict(directory, horizon)["links"]}

    def finding(self, rule: str, directory: str | None, horizon: str) -> Json:
        """Return what a rule says of a cluster, or of the host (`directory` None)."""
        name = None if directory is None else self.cluster(directory)["id"]
        found = [
            f for f in self.data["findings"] if f["rule"] == rule and f["cluster"] == name and f["horizon"] == horizon
        ]
        assert len(found) == 1, (rule, directory, horizon)
        return dict(found[0])

    def failed(self, directory: str, horizon: str) -> set[str]:
        """Return the rules that found fault with a cluster."""
        name = self.cluster(directory)["id"]
        return {
            f["rule"]
            for f in self.data["findings"]
            if f["cluster"] == name and f["horizon"] == horizon and f["status"] == "fail"
        }


def check(*options: str, user: str | None = None, wrap: Sequence[str] = ()) -> Answer:
    """Run the check as this user or another, behind `wrap` (unshare ...), and hold its report to `assert_sound`."""
    done = run("check", *options, "--format", "json", user=user, wrap=wrap)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 3), (done.returncode, done.stderr)
    answer = Answer(done.returncode, json.loads(done.stdout), done.stderr)
    assert_sound(answer)
    return answer


def text(*options: str, user: str | None = None) -> str:
    """Return the report as text."""
    done = run("check", *options, user=user)
    assert done.returncode in (0, 1, 3), (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return str(done.stdout)


def run(*arguments: str, user: str | None = None, wrap: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the program as this user or another one."""
    program = _program()
    env = {name: text for name, text in os.environ.items() if not name.startswith("PG")}
    env |= {**program.env, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*wrap, *_as(user), program.python, "-m", "pgpreemptcheck", *arguments],
        cwd=program.folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _as(user: str | None) -> list[str]:
    """Return the command that runs another as that user; behind `unshare`, what needs root comes first."""
    if user is None:
        return []
    if os.geteuid() != 0:
        pytest.skip(f"only root can run the program as {user}")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not here")
    try:
        who = pwd.getpwnam(user)
    except KeyError:
        pytest.skip(f"there is no user {user}")
    return ["setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups", "--inh-caps=-all"]


@dataclass(frozen=True)
class _Program:
    """Where the program lies, and the Python that runs it."""

    folder: str
    python: str
    env: dict[str, str]


_NEEDED = ("click", "psycopg", "psycopg_binary", "psycopg_binary.libs", "yaml", "_yaml", "typing_extensions.py")


@functools.cache
def _program() -> _Program:
    """Return the checkout and this Python; copies that everybody can read, where they lie in root's own folders."""
    program = _Program(ROOT, sys.executable, {})
    if os.geteuid() != 0 or _works_for_nobody(program):
        return program
    copy = tempfile.mkdtemp(prefix="pgpreemptcheck-", dir="/tmp")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    waste = shutil.ignore_patterns("__pycache__", "test", "tests", "site-packages", "idlelib", "ensurepip", "config-*")
    shutil.copytree(f"{sys.base_prefix}/{library}", f"{copy}/{library}", ignore=waste)
    for shared in glob.glob(f"{sys.base_prefix}/lib/libpython*.so*"):
        shutil.copy(shared, f"{copy}/lib")
    os.mkdir(f"{copy}/bin")
    shutil.copy(os.path.realpath(sys.executable), f"{copy}/bin/python")
    packages = sysconfig.get_path("purelib")
    for source in [*(f"{packages}/{name}" for name in _NEEDED), f"{ROOT}/pgpreemptcheck", f"{ROOT}/rules"]:
        if os.path.isdir(source):
            shutil.copytree(source, f"{copy}/site/{os.path.basename(source)}")
        elif os.path.exists(source):
            shutil.copy(source, f"{copy}/site")
    subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
    env = {"PYTHONHOME": copy, "PYTHONPATH": f"{copy}/site", "LD_LIBRARY_PATH": f"{copy}/lib"}
    program = _Program(f"{copy}/site", f"{copy}/bin/python", env)
    assert _works_for_nobody(program)
    subprocess.run([program.python, "-m", "compileall", "-q", copy], env={**os.environ, **env}, check=False)
    return program


def _works_for_nobody(program: _Program) -> bool:
    done = subprocess.run(
        [*_as("nobody"), program.python, "-c", "import click, psycopg, yaml, pgpreemptcheck.run"],
        cwd=program.folder,
        env={**os.environ, **program.env},
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


# what is true of every report --------------------------------------------------------------------


@functools.cache
def _validator() -> Callable[[Json], Json]:
    fastjsonschema = pytest.importorskip("fastjsonschema")
    with open(os.path.join(ROOT, "pgpreemptcheck/report/report.schema.json")) as file:
        validate: Callable[[Json], Json] = fastjsonschema.compile(json.load(file))
    return validate


def assert_sound(answer: Answer) -> None:
    """Hold a report to its schema, to the conjunction of its links, to its exit code, and to a reason for each gap."""
    data = answer.data
    _validator()(data)
    for where, reason in _gaps(data, ""):
        assert reason.strip(), f"{where}: a gap without a reason"
    for verdict in data["verdicts"]:
        assert verdict["verdict"] == _expected_verdict(verdict), verdict
        for link in verdict["links"]:
            assert link["because"].strip(), link
    for finding in data["findings"]:
        assert finding["title"] and (finding["status"] != "fail" or finding["detail"]), finding
    for question in data["unknowns"]:
        assert question["reason"].strip() and question["settles"], question
    assert answer.code == data["exit_code"] == _expected_code(data)


def _gaps(tree: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        if set(tree) == {"unknown", "hint"}:
            yield where, str(tree["unknown"])
        for name, item in tree.items():
            yield from _gaps(item, f"{where}.{name}")
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from _gaps(item, f"{where}[{number}]")


def _expected_verdict(verdict: Json) -> str:
    """Return the three-valued conjunction: one broken link is enough, and nothing unknown counts as broken."""
    if verdict["verdict"] == "not-applicable":
        return "not-applicable"
    if not verdict["links"]:  # whether anything runs is not known
        assert verdict["settles"] in ("cluster.seen", "host.hidden_clusters"), verdict
        return "undetermined"
    broken = [link["certainty"] for link in verdict["links"] if link["state"] == "broken"]
    assert {link["link"] for link in verdict["links"]} == {
        "freelist", "base_pages", "kernel_preemption", "parallelism"
    }  # fmt: skip
    if broken:
        return "not-exposed" if {"measured", "assumed"} & set(broken) else "probably-not-exposed"
    states = {link["state"] for link in verdict["links"]}
    return "exposed" if states == {"holds"} else "undetermined"


def _expected_code(data: Json) -> int:
    """Return the exit code for --fail-on high."""
    serious = [item for item in data["findings"] + data["verdicts"] if item["severity"] in ("critical", "high")]
    words = {item.get("status") or item.get("verdict") for item in serious}
    if words & {"fail", "exposed", "observed", "contradiction"}:
        return 1
    return 3 if words & {"unknown", "error", "undetermined"} else 0
