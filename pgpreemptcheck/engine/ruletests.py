"""The tests that rules carry, and what can be said of a rule to a person: for `rules test` and `rules show`.

A test gives facts by name; every other fact is not known. A value with another certainty than measured is written
`{value: lazy, certainty: inferred}`. `expect` is a finding's status or a scenario's verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from pgpreemptcheck.engine.evaluate import Finding, LinkStatus, Status, Verdict, VerdictName, judge, judge_scenario
from pgpreemptcheck.engine.expression import CERTAINTIES, Environment
from pgpreemptcheck.engine.rules import SEVERITIES, Case, Rule, RuleSet, RuleTest, Scenario
from pgpreemptcheck.engine.types import RuleError, near
from pgpreemptcheck.engine.yamlfile import YamlMap
from pgpreemptcheck.values import Known, Unknown, record
from pgpreemptcheck.views import Horizon

_RULE_KEYS = ("name", "facts", "unknown", "horizon", "expect", "severity")
_SCENARIO_KEYS = (*_RULE_KEYS, "dormant", "links", "settles")


@record
class FailedTest:
    """A test that did not go as it says; `test` is its name, or its number from 1 on."""

    rule: str
    test: str
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}, test {self.test}: {self.message}"


def run_tests(rules: RuleSet) -> list[FailedTest]:
    """Run the tests of all rules and scenarios and return the failures; a rule without tests is one."""
    failures: list[FailedTest] = []
    subjects: list[Rule | Scenario] = [*rules.rules, *rules.scenarios]
    for subject in subjects:
        if not subject.tests:
            failures.append(FailedTest(subject.id, "-", subject.file, subject.line, "at least one test is expected"))
        for number, test in enumerate(subject.tests, 1):
            try:
                message = _run(subject, test, rules)
            except RuleError as error:
                message = str(error)
            if message:
                name = test.value.get("name") if isinstance(test.value, YamlMap) else None
                failures.append(FailedTest(subject.id, str(name or number), subject.file, test.line, message))
    return failures


def _run(subject: Rule | Scenario, test: RuleTest, rules: RuleSet) -> str:
    """Return what went otherwise than the test says, or nothing. Raises RuleError for a test that is none."""
    value = test.value
    keys = _RULE_KEYS if isinstance(subject, Rule) else _SCENARIO_KEYS
    if not isinstance(value, YamlMap):
        raise RuleError("a test is a mapping (facts, expect)")
    for key in value:
        if key not in keys:
            raise RuleError(f"there is no key {key!r} here{near(key, keys)}; keys: {', '.join(keys)}")
    facts = Environment(_table(value, rules))
    horizon: Horizon = _choice(value, "horizon", subject.horizons, subject.horizons[0])
    cluster = "test"
    if isinstance(subject, Rule):
        _choice(value, "expect", get_args(Status))
        finding = judge(subject, facts, horizon, cluster if subject.scope == "cluster" else None, rules)
        return _compare(value, finding, finding.status, finding.detail)
    _choice(value, "expect", get_args(VerdictName))
    verdict = judge_scenario(subject, facts, horizon, cluster, rules)
    states = {link.link: link.state for link in verdict.links}
    links = value.get("links", {})
    if not isinstance(links, dict):
        raise RuleError("links: a mapping (link: state) is expected")
    for link, state in links.items():
        if link not in states or state not in get_args(LinkStatus):
            raise RuleError(f"links: {link}: {state} is no link and state of this scenario here")
        if states[link] != state:
            return f"link {link}: expected {state}, got {states[link]}"
    for key, got in (("dormant", verdict.dormant), ("settles", verdict.settles)):
        if key in value and value[key] != got:
            return f"{key}: expected {value[key]}, got {got}"
    return _compare(value, verdict, verdict.verdict, verdict.because)


def _compare(value: YamlMap, result: Finding | Verdict, got: str, why: str) -> str:
    if got != value["expect"]:
        return f"expected {value['expect']}, got {got}" + (f" ({why})" if why else "")
    if "severity" in value and _choice(value, "severity", SEVERITIES) != result.severity:
        return f"expected severity {value['severity']}, got {result.severity}"
    return ""


def _choice(value: dict[str, Any], key: str, allowed: Sequence[Any], default: Any = None) -> Any:
    given = value.get(key, default)
    if given not in allowed:
        raise RuleError(f"{key}: one of {', '.join(allowed)} is expected{near(str(given), allowed)}")
    return given


def _table(value: YamlMap, rules: RuleSet) -> Callable[[str], Known[Any] | Unknown]:
    """Return the lookup over the facts of a test, each checked against the schema."""
    given, unknown = value.get("facts", {}), value.get("unknown", [])
    if not isinstance(given, dict) or not isinstance(unknown, list):
        raise RuleError("facts: a mapping (name: value), unknown: a list of names")
    for name in unknown:
        rules.schema.type_of(str(name))
        if name in given:
            raise RuleError(f"{name} is given a value and said to be unknown")
    table: dict[str, Known[Any]] = {}
    for name, fact in given.items():
        certainty = "measured"
        if isinstance(fact, dict):
            if not {"value"} <= set(fact) <= {"value", "certainty"}:
                raise RuleError(f"{name}: a value, or {{value: ..., certainty: ...}}, is expected")
            certainty = _choice(fact, "certainty", CERTAINTIES, "measured")
            fact = fact["value"]
        declared = rules.schema.type_of(name)
        if not declared.accepts(fact):
            raise RuleError(f"{name} is {declared.label()}, and never {fact!r}")
        table[name] = Known(fact, "the test", certainty)  # type: ignore[arg-type]  # checked above
    gap = Unknown("not given in the test", "give it in the test")
    return lambda name: table.get(name, gap)


# telling ----------------------------------------------------------------------------------------


def find_rule(rules: RuleSet, name: str) -> Rule | Scenario:
    """Return the rule or scenario of that id (in any case of letters). Raises RuleError with the nearest one."""
    known: dict[str, Rule | Scenario] = {rule.id: rule for rule in rules.rules}
    known.update((scenario.id, scenario) for scenario in rules.scenarios)
    subject = known.get(name.upper())
    if subject is None:
        raise RuleError(f"there is no rule {name}{near(name.upper(), known)}")
    return subject


def explain(subject: Rule | Scenario, rules: RuleSet) -> str:
    """Return everything about a rule as text: what it compares, its texts, cut-offs, references and tests."""
    lines = [f"{subject.id}  {subject.title}", ""]
    names: list[str] = []
    if isinstance(subject, Rule):
        lines += [f"Scope:       {subject.scope}", f"Horizons:    {', '.join(subject.horizons)}"]
        if subject.applies is not None:
            lines.append(f"Applies if:  {_one_line(subject.applies.text)}")
            names += subject.applies.names
        lines.append(f"Finding if:  {_one_line(subject.when.text)}")
        names += subject.when.names
    else:
        lines += ["Scope:       cluster", f"Horizons:    {', '.join(subject.horizons)}"]
        for link in subject.links:
            lines.append(f"Link         {link.link}: {link.title}; holds if {_one_line(link.holds.text)}")
            names += link.holds.names
        if subject.trigger is not None:
            holds = subject.trigger.holds
            lines.append(f"Trigger      {subject.trigger.link}: {subject.trigger.title}; if {_one_line(holds.text)}")
            names += holds.names
    lines += _severities(subject.severity)
    names += [name for case in subject.severity if case.when is not None for name in case.when.names]
    if isinstance(subject, Rule):
        texts = (("Why", subject.detail), ("Expected", subject.expected), ("What to do", subject.action),
                 ("Verify", subject.verify), ("Undo", subject.undo))  # fmt: skip
        for label, message in texts:
            if message.text:
                lines += ["", f"{label}:", f"  {message.text}"]
    used = dict.fromkeys(name.partition(".")[2] for name in names if name.startswith("threshold."))
    if used:
        lines += ["", "Cut-offs (heuristic, a site can set its own in a folder given by --rules):"]
        lines += [f"  {rules.thresholds[name].shown()}" for name in used]
    lines += ["", "Facts:"]
    for name in dict.fromkeys(name for name in names if not name.startswith("threshold.")):
        declared = rules.schema.type_of(name)
        about = "; ".join(part for part in (declared.label(), declared.unit, declared.doc) if part)
        lines.append(f"  {name}: {about}")
    if subject.references:
        lines += ["", "References:", *(f"  {reference.title}: {reference.url}" for reference in subject.references)]
    lines += ["", f"Tests: {len(subject.tests)}   File: {subject.file}:{subject.line}"]
    return "\n".join(lines) + "\n"


def _severities(cases: Sequence[Case]) -> list[str]:
    if len(cases) == 1:
        return [f"Severity:    {cases[0].level}"]
    return ["Severity:"] + [
        f"  {case.level:<9}  " + (f"if {_one_line(case.when.text)}" if case.when is not None else "otherwise")
        for case in cases
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())
