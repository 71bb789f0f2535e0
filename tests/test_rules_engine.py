"""Rule files and what follows from them: strict reading with file and line, findings, verdicts, trust."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest

from pgpreemptcheck.engine import rulefiles, rules, ruletests, yamlfile
from pgpreemptcheck.engine.evaluate import Evaluation, Finding, Verdict, evaluate
from pgpreemptcheck.engine.rulefiles import RuleFile
from pgpreemptcheck.engine.rules import RuleSet, compile_rules
from pgpreemptcheck.engine.schema import Schema
from pgpreemptcheck.engine.types import RuleError
from pgpreemptcheck.values import Known, Unknown
from tests.synthetic import NOT_READ, views

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rules")
SCHEMA = Schema()


def read(name: str) -> bytes:
    with open(os.path.join(HERE, name), "rb") as stream:
        return stream.read()


def compiled(*texts: str | bytes, shipped: bool = False) -> RuleSet:
    files = [
        RuleFile(
            f"{'rules' if shipped else 'site'}/{number}.yaml",
            text if isinstance(text, bytes) else text.encode(),
            shipped,
        )
        for number, text in enumerate(texts)
    ]
    return compile_rules(files, SCHEMA)


GOOD = compiled(read("good/preemption.yaml"))
GB = 1 << 30

HOST: dict[str, Any] = {
    "host.kernel.preemption.preemptible": True,
    "host.kernel.preemption.mode": "lazy",
    "host.kernel.preemption.ignored_parameter": None,
    "host.memory.page_tables_bytes": 1,
    "host.memory.total_bytes": 100,
}
CLUSTER: dict[str, Any] = {
    "cluster.freelist": True,
    "cluster.segment.base_pages": True,
    "cluster.segment.backing": "base",
    "cluster.segment.bytes": 123 * GB,
    "cluster.settings.huge_pages": "try",
    "cluster.settings.max_connections": 1024,
    "cluster.settings.shared_buffers": 120 * GB,
    "cluster.cpus.allowed": 96,
    "cluster.start.outcome": "starts",
    "cluster.start.pages_needed": 62976,
    "cluster.start.page_bytes": 2 << 20,
}


def evaluated(
    host: Mapping[str, Any], *clusters: Mapping[str, Any], at: Any = None, rule_set: RuleSet = GOOD
) -> Evaluation:
    return evaluate(rule_set, views(host, *clusters, at=at))


def verdict(changes: Mapping[str, Any], horizon: str = "now", at: Any = None) -> Verdict:
    facts = {**HOST, **CLUSTER, **changes}
    host = {name: value for name, value in facts.items() if name.startswith("host.")}
    cluster = {name: value for name, value in facts.items() if name.startswith("cluster.")}
    found = [v for v in evaluated(host, cluster, at=at).verdicts if v.horizon == horizon]
    assert len(found) == 1
    return found[0]


def finding(changes: Mapping[str, Any], rule: str, horizon: str = "now", at: Any = None) -> Finding:
    facts = {**HOST, **CLUSTER, **changes}
    host = {name: value for name, value in facts.items() if name.startswith("host.")}
    cluster = {name: value for name, value in facts.items() if name.startswith("cluster.")}
    found = [f for f in evaluated(host, cluster, at=at).findings if (f.rule, f.horizon) == (rule, horizon)]
    assert len(found) == 1
    return found[0]


# the chain --------------------------------------------------------------------------------------


def inferred(value: Any) -> Known[Any]:
    return Known(value, "s", "inferred")


def heuristic(value: Any) -> Known[Any]:
    return Known(value, "s", "heuristic")


@pytest.mark.parametrize(
    ("changes", "expected", "severity", "certainty"),
    [
        ({}, "exposed", "high", "measured"),
        ({"cluster.segment.base_pages": False}, "not-exposed", "info", "measured"),
        ({"cluster.freelist": False}, "not-exposed", "info", "measured"),
        ({"host.kernel.preemption.preemptible": False}, "not-exposed", "info", "measured"),
        ({"cluster.settings.max_connections": 50}, "not-exposed", "info", "measured"),
        # one measured break is enough, whatever else is not known
        ({"cluster.freelist": False, "cluster.segment.base_pages": NOT_READ}, "not-exposed", "info", "measured"),
        # a break that is only inferred, or a guess, is no more than probable
        ({"host.kernel.preemption.preemptible": inferred(False)}, "probably-not-exposed", "info", "inferred"),
        ({"cluster.segment.base_pages": heuristic(False)}, "probably-not-exposed", "info", "heuristic"),
        (
            {"host.kernel.preemption.preemptible": inferred(False), "cluster.freelist": heuristic(False)},
            "probably-not-exposed", "info", "inferred",
        ),
        (
            {"host.kernel.preemption.preemptible": inferred(False), "cluster.freelist": False},
            "not-exposed", "info", "measured",
        ),
        # holding is exposed also where that is inferred
        ({"host.kernel.preemption.preemptible": inferred(True)}, "exposed", "high", "inferred"),
        ({"cluster.segment.base_pages": NOT_READ}, "undetermined", "high", None),
        # size: a small host has nothing to do; an unknown size counts as the largest
        ({"cluster.cpus.allowed": 8}, "exposed", "info", "measured"),
        ({"cluster.settings.shared_buffers": GB}, "exposed", "medium", "measured"),
        ({"cluster.settings.shared_buffers": NOT_READ}, "exposed", "high", "measured"),
        ({"cluster.settings.shared_buffers": NOT_READ, "cluster.cpus.allowed": 40}, "exposed", "medium", "measured"),
    ],
)  # fmt: skip
def test_verdict(changes: dict[str, Any], expected: str, severity: str, certainty: str | None) -> None:
    got = verdict(changes)
    assert (got.verdict, got.severity, got.certainty, got.dormant) == (expected, severity, certainty, False)


def test_parallelism_is_decided_without_sql_and_not_broken_by_a_quiet_minute() -> None:
    quiet = {"cluster.server.active_backends": 0}
    assert verdict(quiet).verdict == "exposed"
    assert verdict({"cluster.settings.max_connections": NOT_READ, **quiet}).verdict == "undetermined"
    busy = {"cluster.settings.max_connections": NOT_READ, "cluster.server.active_backends": 97}
    assert verdict(busy).verdict == "exposed"
    assert verdict({"cluster.settings.max_connections": 96}).verdict == "not-exposed"


def test_dormant_only_now_only_measured_and_never_raised() -> None:
    filled = {"cluster.server.unused_buffers": 0}
    got = verdict(filled)
    assert (got.verdict, got.dormant, got.severity) == ("exposed", True, "low")
    assert got.trigger is not None and got.trigger.because == "filled"
    for horizon in ("crash_restart", "next_start"):
        later = verdict(filled, horizon)
        assert (later.dormant, later.severity) == (False, "high")
    small = verdict({**filled, "cluster.cpus.allowed": 8})
    assert (small.dormant, small.severity) == (True, "info")
    assert not verdict({"cluster.server.unused_buffers": inferred(0)}).dormant
    assert not verdict({"cluster.server.unused_buffers": 5}).dormant
    assert not verdict({**filled, "cluster.freelist": False}).dormant


@pytest.mark.parametrize(
    ("changes", "horizon", "expected"),
    [
        ({"cluster.running": False, "cluster.seen": True}, "now", "not-applicable"),
        ({"cluster.running": False, "cluster.seen": True}, "crash_restart", "not-applicable"),
        ({"cluster.running": False, "cluster.seen": NOT_READ}, "now", "undetermined"),
        ({"cluster.running": False, "cluster.seen": NOT_READ}, "crash_restart", "undetermined"),
        ({"cluster.running": False}, "next_start", "exposed"),
        ({"cluster.start.outcome": "refuses"}, "now", "exposed"),
        ({"cluster.start.outcome": "refuses"}, "crash_restart", "not-applicable"),
        ({"cluster.start.outcome": "refuses"}, "next_start", "not-applicable"),
        ({"cluster.start.outcome": "crashes"}, "crash_restart", "not-applicable"),
        ({"cluster.start.outcome": NOT_READ}, "next_start", "exposed"),
        ({"cluster.start.outcome": "falls-back"}, "next_start", "exposed"),
    ],
)
def test_no_server_no_verdict(changes: dict[str, Any], horizon: str, expected: str) -> None:
    got = verdict(changes, horizon)
    assert got.verdict == expected
    assert bool(got.because) == (expected != "exposed")


def test_links_tell_what_they_rest_on() -> None:
    got = verdict({"cluster.segment.base_pages": NOT_READ, "cluster.freelist": inferred(True)})
    states = {link.link: link for link in got.links}
    assert list(states) == ["freelist", "base_pages", "kernel_preemption", "parallelism"]
    assert (states["freelist"].state, states["freelist"].certainty) == ("holds", "inferred")
    assert states["base_pages"].because == "pages of 123 GB not known (not read)"
    assert states["base_pages"].facts == ("cluster.segment.base_pages",)
    assert states["kernel_preemption"].because == "mode lazy"
    assert [e.fact for e in states["parallelism"].evidence] == [
        "cluster.settings.max_connections", "cluster.cpus.allowed",
    ]  # fmt: skip


def test_the_cheapest_question_has_a_hint() -> None:
    no_way = Unknown("nobody can tell")
    assert (
        verdict({"cluster.freelist": no_way, "cluster.segment.base_pages": NOT_READ}).settles
        == "cluster.segment.base_pages"
    )
    assert verdict({"cluster.freelist": no_way}).settles == "cluster.freelist"
    assert verdict({}).settles is None


def test_a_severity_names_its_cut_offs_and_what_it_waits_for() -> None:
    got = verdict({"cluster.settings.shared_buffers": NOT_READ})
    assert got.unknown_facts == ("cluster.settings.shared_buffers",)
    assert got.thresholds == ("high_cpus = 64 CPUs (one published host had 96)", "high_buffers = 32 GB (it had 120 GB)")
    assert verdict({"cluster.freelist": False}).thresholds == ()


# findings ---------------------------------------------------------------------------------------


def test_a_finding_shows_its_evidence() -> None:
    got = finding({}, "T-FALLBACK")
    assert (got.status, got.severity, got.cluster) == ("fail", "medium", "c1")
    assert got.detail == "The segment of 123 GB is on base pages."
    assert (got.expected, got.action) == ("62,976 pages of 2 MB", "Reserve 62,976 pages.")
    assert got.remedy == ("reserve_huge_pages",)
    assert [(e.fact, e.value, e.shown, e.source) for e in got.evidence] == [
        ("cluster.segment.backing", "base", "base", "source of cluster.segment.backing"),
        ("cluster.running", True, "true", ""),
        ("cluster.settings.huge_pages", "try", "try", "source of cluster.settings.huge_pages"),
    ]


@pytest.mark.parametrize(
    ("changes", "status", "unknown"),
    [
        ({"cluster.segment.backing": "huge"}, "pass", ()),
        ({"cluster.settings.huge_pages": "on"}, "not-applicable", ()),
        ({"cluster.settings.huge_pages": NOT_READ}, "unknown", ("cluster.settings.huge_pages",)),
        ({"cluster.segment.backing": NOT_READ}, "unknown", ("cluster.segment.backing",)),
        # no finding either way, whether it applies or not
        ({"cluster.settings.huge_pages": NOT_READ, "cluster.segment.backing": "huge"}, "pass", ()),
        ({"cluster.settings.huge_pages": "on", "cluster.segment.backing": NOT_READ}, "not-applicable", ()),
    ],
)
def test_status(changes: dict[str, Any], status: str, unknown: tuple[str, ...]) -> None:
    got = finding(changes, "T-FALLBACK")
    assert (got.status, got.unknown_facts) == (status, unknown)
    assert (got.action, got.remedy) == ("", ())
    assert got.detail == ("" if not unknown else f"not known: {unknown[0]}: not read")


def test_other_horizons_and_the_host() -> None:
    got = finding({}, "T-DIFFERS", "next_start", at={"next_start": {"cluster.settings.huge_pages": "on"}})
    assert got.status == "fail"
    assert [(e.fact, e.value) for e in got.evidence] == [
        ("cluster.settings.huge_pages", "on"), ("now.cluster.settings.huge_pages", "try"),
    ]  # fmt: skip
    assert finding({}, "T-DIFFERS", "next_start").status == "pass"
    assert finding({}, "T-TABLES").cluster is None


def test_an_error_of_one_rule_leaves_the_others() -> None:
    got = finding({"host.memory.total_bytes": 0}, "T-TABLES")
    assert (got.status, got.severity) == ("error", "medium")
    assert "division by zero" in got.detail
    wrong = finding({"host.memory.total_bytes": "text"}, "T-TABLES")
    assert wrong.status == "error" and "host.memory.total_bytes" in wrong.detail
    assert finding({"host.memory.total_bytes": 0}, "T-FALLBACK").status == "fail"
    assert verdict({"cluster.cpus.allowed": "text"}).links[3].state == "unknown"


def test_a_heuristic_cut_off_is_named() -> None:
    assert finding({"host.memory.page_tables_bytes": 6}, "T-TABLES").thresholds == ("share = 0.05 (a guess)",)


def test_without_clusters_nothing_applies() -> None:
    got = evaluated({**HOST, "host.hidden_clusters": 0})
    assert {f.status for f in got.findings if f.rule in ("T-FALLBACK", "T-DIFFERS")} == {"not-applicable"}
    assert {(v.verdict, v.cluster) for v in got.verdicts} == {("not-applicable", None)}
    hidden = evaluated(HOST)  # whether one runs out of sight is not known
    assert {(v.verdict, v.cluster, v.settles) for v in hidden.verdicts} == {
        ("undetermined", None, "host.hidden_clusters")
    }
    assert {f.status for f in got.findings if f.rule == "T-TABLES"} == {"pass"}


def test_each_cluster_has_its_own_answer() -> None:
    stopped = {"cluster.running": False, "cluster.seen": True}
    got = evaluated(HOST, CLUSTER, {**CLUSTER, "cluster.freelist": False}, stopped)
    now = [(v.cluster, v.verdict) for v in got.verdicts if v.horizon == "now"]
    assert now == [("c1", "exposed"), ("c2", "not-exposed"), ("c3", "not-applicable")]
    later = [(v.cluster, v.verdict) for v in got.verdicts if v.horizon == "next_start"]
    assert later == [("c1", "exposed"), ("c2", "not-exposed"), ("c3", "undetermined")]


def test_nothing_known_is_neither_safe_nor_exposed() -> None:
    got = evaluated({}, {"cluster.running": True})
    assert {v.verdict for v in got.verdicts} == {"undetermined"}
    assert {f.status for f in got.findings} == {"unknown"}


# rule files -------------------------------------------------------------------------------------

RULE = """\
id: {id}
title: A rule
scope: host
severity: low
when: {when}
"""


def rule(id: str = "SITE-1", when: str = "host.cpus.online > 1", more: str = "") -> str:
    return RULE.format(id=id, when=when) + more


BAD = sorted(name for name in os.listdir(os.path.join(HERE, "bad")) if name.endswith(".yaml"))


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    """The first line of each file says in a comment which line is wrong and what must be said of it."""
    data = read(f"bad/{name}")
    line, _, message = data.decode("utf-8", "replace").partition("\n")[0].removeprefix("# ").partition(": ")
    with pytest.raises(RuleError) as error:
        compile_rules([RuleFile(f"bad/{name}", data, False)], SCHEMA)
    assert str(error.value).startswith(f"bad/{name}:{line}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: " + b"x" * yamlfile.MAX_BYTES, "x.yaml:1: .* 256 kB"),
        (b"a: 1\nb: \xff\n", "x.yaml:2: .* UTF-8"),
        (b"a: 1\nb: \x07\n", "x.yaml:[12]: not YAML"),
        (b"a: [1\n", "x.yaml:2: not YAML"),
        (b"a: {b: 1, b: 2}\n", "'b' stands twice"),
        (b"a: 1\n---\n? [1]\n: 2\n", "x.yaml:3: a key"),
        (b"[" * 20 + b"]" * 20, "x.yaml:1: .* 16 deep"),
        (b"[" * 3000, "x.yaml:1: "),
        (b"a:\n" + b"".join(b" " * n + b"- \n" for n in range(1, 40)), "x.yaml"),
        (b"a: &x 1\nb: *x\n", "x.yaml:1: anchors"),
        (b"a: [" + b"&x [" * 9, "x.yaml:1: anchors"),
        (b"a: !!python/object/apply:os.system [id]\n", "x.yaml:1: tags"),
        (b"a: !!str 1\n", "x.yaml:1: tags"),
        (b"a: ! x\n", "x.yaml:1: tags"),
        (b"!x a: 1\n", "x.yaml:1: a key"),
        (b"%TAG ! tag:x,2000:\n--- \na: 1\n", "tags"),
    ],
)
def test_bad_yaml(data: bytes, message: str) -> None:
    start = time.process_time()
    with pytest.raises(RuleError, match=message) as error:
        yamlfile.parse(data, "x.yaml")
    assert "\n" not in str(error.value)
    assert time.process_time() - start < 2


def test_scalars_are_what_they_look_like() -> None:
    text = b"""\xef\xbb\xbf\
a: [on, off, yes, no, True, NULL, none, 22:30:00, 2026-04-03, 010, 0x10, 1_000, +1, .5, 1e3, "1", 'true', ., =, <<]
b: [true, false, null, ~, 1, -1, 0, 1.50, -0.5]
c:
d: |
  true
on: 1
"""
    document = yamlfile.parse(text, "x")[0]
    value = document.value
    assert value["a"] == [
        "on", "off", "yes", "no", "True", "NULL", "none", "22:30:00", "2026-04-03", "010", "0x10", "1_000", "+1", ".5",
        "1e3", "1", "true", ".", "=", "<<",
    ]  # fmt: skip
    assert [(type(item), item) for item in value["b"]] == [
        (bool, True), (bool, False), (type(None), None), (type(None), None), (int, 1), (int, -1), (int, 0),
        (float, 1.5), (float, -0.5),
    ]  # fmt: skip
    assert (value["c"], value["d"], value["on"]) == (None, "true\n", 1)
    assert value.lines == {"a": 1, "b": 2, "c": 3, "d": 4, "on": 6}


def test_the_pure_parser_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    data = read("good/preemption.yaml")
    quick = yamlfile.parse(data, "x")
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert yamlfile.parse(data, "x") == quick
    for bad in (b"a: &x 1\n", b"a: !!str 1\n", b"[" * 3000, b"a: 1\na: 2\n", b"a: \x07"):
        with pytest.raises(RuleError):
            yamlfile.parse(bad, "x")


def test_the_tests_in_the_rules_run() -> None:
    assert [str(failure) for failure in ruletests.run_tests(GOOD)] == []
    for subject in (*GOOD.rules, *GOOD.scenarios):
        text = ruletests.explain(subject, GOOD)
        assert subject.title in text and "\n\n\n" not in text
    assert "high_buffers = 32 GB (it had 120 GB)" in ruletests.explain(ruletests.find_rule(GOOD, "t-chain"), GOOD)
    with pytest.raises(RuleError, match="did you mean T-CHAIN"):
        ruletests.find_rule(GOOD, "T-CHAN")


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("{facts: {host.cpus.online: 2}, expect: pass}", "expected pass, got fail"),
        ("{facts: {}, expect: fail}", "expected fail, got unknown"),
        ("{facts: {host.cpus.online: 2}, expect: fail, severity: high}", "expected severity high, got low"),
        ("{facts: {host.cpus.onlin: 2}, expect: fail}", "did you mean host.cpus.online"),
        ("{facts: {host.cpus.online: two}, expect: fail}", "integer, and never 'two'"),
        ("{facts: {host.cpus.online: {valu: 2}}, expect: fail}", "a value, or"),
        ("{facts: {host.cpus.online: {value: 2, certainty: sure}}, expect: fail}", "certainty: one of"),
        ("{facts: [], expect: fail}", "facts: a mapping"),
        ("{facts: {}, expct: fail}", "did you mean expect"),
        ("{facts: {}}", "expect: one of"),
        ("{facts: {host.cpus.online: 2}, unknown: [host.cpus.online], expect: fail}", "said to be unknown"),
        ("{facts: {}, horizon: yesterday, expect: unknown}", "horizon: one of"),
        ("nothing", "a test is a mapping"),
    ],
)
def test_a_rule_test_that_fails(test: str, message: str) -> None:
    failures = ruletests.run_tests(compiled(rule(more=f"tests:\n  - {test}\n")))
    assert len(failures) == 1
    assert str(failures[0]).startswith("site/0.yaml:7: SITE-1, test 1: ") and message in failures[0].message


def test_a_rule_without_tests_fails() -> None:
    assert "at least one test" in ruletests.run_tests(compiled(rule()))[0].message


# rules of a site --------------------------------------------------------------------------------

SHIPPED = """\
id: PPC901
title: Shipped
scope: host
severity: low
when: host.cpus.online > threshold.many
thresholds:
  many: {value: 64, unit: CPUs, reason: ours}
"""


def together(site: str) -> RuleSet:
    files = [RuleFile("rules/a.yaml", SHIPPED.encode(), True), RuleFile("site/b.yaml", site.encode(), False)]
    return compile_rules(files, SCHEMA)


def test_a_site_sets_a_threshold() -> None:
    got = together("thresholds:\n  many: {value: 8}\n")
    assert (got.thresholds["many"].value, got.thresholds["many"].unit) == (8, "CPUs")
    assert got.thresholds["many"].reason == "set in site/b.yaml"
    found = evaluate(got, views({"host.cpus.online": 16})).findings[0]
    assert (found.status, found.thresholds) == ("fail", ("many = 8 CPUs (set in site/b.yaml)",))


def test_a_site_replaces_a_rule_on_purpose() -> None:
    site = "id: PPC901\ntitle: Mine\nscope: host\nseverity: high\nwhen: host.cpus.online > 1\n"
    with pytest.raises(RuleError, match=r"site/b.yaml:1: PPC901 is also in rules/a.yaml:1.*overrides: true"):
        together(site)
    assert [r.title for r in together(site + "overrides: true\n").rules] == ["Mine"]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("thresholds:\n  mny: {value: 8, reason: x}\n", r"b.yaml:2: no rule uses threshold.mny \(did you mean many"),
        ("thresholds:\n  many: {value: 8, unit: bytes}\n", "b.yaml:2: the unit of threshold many is CPUs"),
        ("thresholds:\n  many: {value: big}\n", "b.yaml:2: value: a number"),
        ("thresholds:\n  many: {value: true}\n", "b.yaml:2: value: a number"),
        ("thresholds: [many]\n", "b.yaml:1: thresholds is a mapping"),
        (rule("PPC902"), "b.yaml:1: ids of PPC and three digits are for shipped rules"),
        (rule("SITE-1", more="overrides: true\n"), "b.yaml:6: there is no rule SITE-1 to override"),
        (rule("site-1"), "b.yaml:1: an id is capital letters"),
        (rule("SITE-1") + "---\n" + rule("SITE-1", more="overrides: perhaps\n"), "b.yaml:12: overrides: true or false"),
    ],
)
def test_a_site_errs(site: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        together(site)


def test_folders(tmp_path: Any) -> None:
    for name, message in (("missing", "No such file"), ("empty", "rule files"), ("file", "Not a directory")):
        if name == "empty":
            (tmp_path / name).mkdir()
        elif name == "file":
            (tmp_path / name).write_text("x")
        with pytest.raises(RuleError, match=message) as error:
            rulefiles.user_files(str(tmp_path / name))
        assert "\n" not in str(error.value)
    (tmp_path / "good").mkdir(mode=0o755)
    (tmp_path / "good" / "a.yaml").write_text(rule())
    (tmp_path / "good" / ".hidden.yaml").write_text("{")
    (tmp_path / "good" / "README").write_text("{")
    assert [(f.name, f.shipped) for f in rulefiles.user_files(str(tmp_path / "good"))] == [
        (str(tmp_path / "good" / "a.yaml"), False)
    ]
    os.mkfifo(tmp_path / "good" / "b.yaml", 0o600)  # must not block
    with pytest.raises(RuleError, match=r"b\.yaml: a readable rule file is expected \(not a regular file\)"):
        rulefiles.user_files(str(tmp_path / "good"))
    (tmp_path / "good" / "b.yaml").unlink()
    (tmp_path / "good" / "b.yaml").mkdir()
    with pytest.raises(RuleError, match=r"b\.yaml: a readable rule file"):
        rulefiles.user_files(str(tmp_path / "good"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root refuses rules of other users, and only root can make them")
@pytest.mark.parametrize("what", ["folder", "file", "folder-owner", "file-owner", "parent", "link"])
def test_root_reads_no_rules_that_others_can_write(tmp_path: Any, what: str) -> None:
    folder = tmp_path / "parent" / "site"
    folder.mkdir(parents=True)
    file = folder / "a.yaml"
    file.write_text(rule())
    for path, mode in ((folder.parent, 0o755), (folder, 0o755), (file, 0o644)):
        path.chmod(mode)
    assert len(rulefiles.user_files(str(folder))) == 1
    if what == "folder":
        folder.chmod(0o775)
    elif what == "file":
        file.chmod(0o646)
    elif what == "folder-owner":
        os.chown(folder, 65534, 0)
    elif what == "file-owner":
        os.chown(file, 65534, 0)
    elif what == "parent":
        folder.parent.chmod(0o777)
    else:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        file.rename(tmp_path / "open" / "real.yaml")
        file.symlink_to(tmp_path / "open" / "real.yaml")
    with pytest.raises(RuleError, match="as root"):
        rulefiles.user_files(str(folder))


def test_the_shipped_rules_load_and_pass_their_tests() -> None:
    loaded = rules.load()
    assert len(loaded.rules) >= 20 and [s.id for s in loaded.scenarios] == ["PPC100"]
    assert [str(failure) for failure in ruletests.run_tests(loaded)] == []
