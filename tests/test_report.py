"""Reports: nothing that was read acts on a terminal, the JSON keeps to its schema, exit codes follow the findings."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgpreemptcheck import run
from pgpreemptcheck.printable import printable
from pgpreemptcheck.report import json as as_json
from pgpreemptcheck.report.outcome import Report, exit_code
from tests.synthetic import views

PACKAGE = Path(run.__file__).parent
DEMO = PACKAGE / "demo/capture"


def schema(name: str) -> Any:
    return fastjsonschema.compile(json.loads((PACKAGE / f"report/{name}.schema.json").read_text()))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("ünïcode ─", "ünïcode ─"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb\nc\td", "a\\x0db\\x0ac\\x09d"),
        ("\u202eevil", "\\u202eevil"),
        ("\udce9t\udcff", "\\xe9t\\xff"),
        ("\x9b31m", "\\x9b31m"),
        ("\u2028", "\\u2028"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_printable_leaves_nothing_that_acts(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")  # raises for what is no text


def hostile(tmp_path: Path) -> Report:
    shutil.copytree(DEMO, tmp_path / "host")
    root = tmp_path / "host"
    uname = (root / "uname.txt").read_text()
    (root / "uname.txt").write_text(uname.replace("pg-demo", "evil\x1b[31m\u202ename"))
    (root / "etc/os-release").write_bytes(b'ID="\x1b]0;x\x07"\nVERSION_ID="\xff"\n')
    (root / "data/pgdata/postgresql.conf").write_bytes(b"shared_buffers = '1\x1b[2JGB'\nmax_connections = 3\n")
    return run.check(run.Options(root=str(root)), rules_dirs=(), fail_on="high")


def test_hostile_files_do_not_reach_the_terminal(tmp_path: Path) -> None:
    report = hostile(tmp_path)
    for unicode in (True, False):
        text = run.render(report, "text", colour=False, unicode=unicode)
        assert all(line.isprintable() for line in text.splitlines())
        assert "\\x1b[2JGB" in text and "evil\\x1b[31m" in text
    document = as_json.document(report)
    assert "\x1b" not in json.dumps(document, ensure_ascii=False)


def test_colour_paints_and_nothing_else(tmp_path: Path) -> None:
    report = hostile(tmp_path)
    plain = run.render(report, "text", colour=False, unicode=True)
    painted = run.render(report, "text", colour=True, unicode=True)
    assert painted != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


@pytest.mark.parametrize("options", [{}, {"root": str(DEMO)}, {"root": str(DEMO), "assume": ("host.cpus.online=4",)}])
def test_the_json_keeps_to_its_schema(options: dict[str, Any]) -> None:
    chosen = run.Options(no_sql=True, **options)
    report = run.check(chosen, rules_dirs=(), fail_on="high")
    schema("report")(json.loads(run.render(report, "json", colour=False, unicode=True)))
    schema("facts")(json.loads(run.facts(chosen)))


def test_the_schema_refuses_what_is_no_report() -> None:
    report = json.loads(run.render(demo(), "json", colour=False, unicode=True))
    check = schema("report")
    check(report)
    for change in (
        lambda d: d.pop("verdicts"),
        lambda d: d["verdicts"][0].update(verdict="safe"),
        lambda d: d["host"]["cpus"].update(online=96),
        lambda d: d["clusters"][0]["freelist"].pop("source"),
        lambda d: d.update(exit_code=2),
    ):
        broken = json.loads(json.dumps(report))
        change(broken)
        with pytest.raises(fastjsonschema.JsonSchemaException):
            check(broken)


def demo() -> Report:
    return run.check(run.demo_options(), rules_dirs=(), fail_on="high")


def test_an_internal_error_keeps_to_the_schema() -> None:
    schema("report")(json.loads(run.failure("RuntimeError: boom (x.py:1)")))


def test_every_unknown_that_a_rule_waits_for_is_told() -> None:
    report = demo()
    waiting = {f.rule for f in report.evaluation.findings if f.status == "unknown"}
    told = {rule for question in report.unknowns for rule in question.settles}
    assert waiting and waiting <= told
    assert all(question.reason for question in report.unknowns)


@pytest.mark.parametrize(
    ("facts", "fail_on", "code"),
    [
        ({"cluster.start.accepted": False, "cluster.start.outcome": "refuses"}, "critical", 1),
        ({"cluster.start.accepted": True}, "never", 0),
        ({}, "never", 0),
        ({}, "high", 3),
        ({}, "critical", 3),
    ],
)
def test_exit_codes(facts: dict[str, Any], fail_on: str, code: int) -> None:
    from pgpreemptcheck.engine import evaluate, rules

    evaluation = evaluate.evaluate(rules.load(), views({"host.hidden_clusters": 0}, facts))
    assert exit_code(evaluation, fail_on) == code


def two_clusters(tmp_path: Path) -> run.Options:
    """The demo host with a second cluster beside the first."""
    root = tmp_path / "host"
    shutil.copytree(DEMO, root)
    shutil.copytree(root / "proc/2417", root / "proc/2999")
    shutil.copytree(root / "data/pgdata", root / "data/other")
    for name in ("proc/2999/cmdline", "proc/2999/cwd.txt", "data/other/postmaster.pid"):
        text = (root / name).read_text()
        text = text.replace("/data/pgdata", "/data/other").replace("2417", "2999").replace("5432", "5433")
        (root / name).write_text(text)
    return run.Options(root=str(root))


def test_a_cluster_that_we_fail_on_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgpreemptcheck.facts import binary

    options = two_clusters(tmp_path)
    right = binary.freelist

    def fails(host: Any, pid: int, major: Any) -> Any:
        if pid == 2999:
            raise RuntimeError("boom")
        return right(host, pid, major)

    monkeypatch.setattr(binary, "freelist", fails)
    report = run.check(options, rules_dirs=(), fail_on="high")
    assert [c.id for c in report.facts.clusters] == ["/data/pgdata"] and report.exit_code == 1
    document = json.loads(run.render(report, "json", colour=False, unicode=True))
    schema("report")(document)
    assert [(e["kind"], e["cluster"]) for e in document["errors"]] == [("internal", "/data/other")]
    assert "RuntimeError: boom" in document["errors"][0]["reason"]
    assert "ERROR: /data/other could not be looked at" in run.render(report, "text", colour=False, unicode=True)
    assert run.check(options, rules_dirs=(), fail_on="critical").exit_code == 70
    assert run.check(options, rules_dirs=(), fail_on="never").exit_code == 0
    assert json.loads(run.facts(options))["errors"]


def test_the_answer_is_about_what_may_be_worst() -> None:
    """A cluster is exposed and too small to matter, of another nothing is known: the answer must not be "info"."""
    report = demo()
    first = report.evaluation.verdicts[0]
    small = replace(first, verdict="exposed", severity="info")
    unknown = replace(first, cluster="/data/other", verdict="undetermined", severity="high")
    report = replace(report, evaluation=replace(report.evaluation, verdicts=(small, unknown)))
    text = run.render(report, "text", colour=False, unicode=True)
    assert "UNDETERMINED (at most high): /data/other" in text and "nothing needs to be done" not in text


def test_a_host_without_postgresql_is_exit_0() -> None:
    from pgpreemptcheck.engine import evaluate, rules

    evaluation = evaluate.evaluate(rules.load(), views({"host.hidden_clusters": 0, "host.cpus.online": 4}))
    assert exit_code(evaluation, "high") == 0
    unseen = evaluate.evaluate(rules.load(), views({"host.cpus.online": 4}))
    assert exit_code(unseen, "high") == 3
