"""The outcome of a check: what every report shows, and the exit code that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgpreemptcheck.engine.evaluate import Evaluation, Finding, Verdict
from pgpreemptcheck.engine.schema import lookup
from pgpreemptcheck.inspection import Facts
from pgpreemptcheck.values import Unknown, record
from pgpreemptcheck.views import Horizon, View

SEVERITIES = ("critical", "high", "medium", "low", "info")
"""From worst to least."""


EXPOSED = ("exposed", "observed", "contradiction")
"""The verdicts that count as found."""


@record
class OpenQuestion:
    """A fact that is not known, why, what would settle it, and which rules wait for it."""

    fact: str
    cluster: str | None
    reason: str
    hint: str
    settles: tuple[str, ...]
    severity: str
    """The worst that one of those rules would report."""


@record
class Report:
    """Everything that a report is made of."""

    facts: Facts
    views: Mapping[Horizon, View]
    evaluation: Evaluation
    unknowns: tuple[OpenQuestion, ...]
    assumed: tuple[str, ...]
    fail_on: str
    exit_code: int
    generated_at: str


def reaches(severity: str, fail_on: str) -> bool:
    """Return whether a severity is at or above the one that a run fails on (`never`: none is)."""
    return fail_on != "never" and SEVERITIES.index(severity) <= SEVERITIES.index(fail_on)


def exit_code(evaluation: Evaluation, fail_on: str, *, failed: bool = False) -> int:
    """Return 1 for a finding at or above `fail_on`, 3 if none but something there is unknown, else 0.

    `failed`: a cluster could not be looked at by a fault of ours, so that 70 takes the place of 0 and 3.
    """
    findings, verdicts = evaluation.findings, evaluation.verdicts
    if any(f.status == "fail" and reaches(f.severity, fail_on) for f in findings):
        return 1
    if any(v.verdict in EXPOSED and reaches(v.severity, fail_on) for v in verdicts):
        return 1
    if failed and fail_on != "never":
        return 70
    if any(f.status in ("unknown", "error") and reaches(f.severity, fail_on) for f in findings):
        return 3
    if any(v.verdict == "undetermined" and reaches(v.severity, fail_on) for v in verdicts):
        return 3
    return 0


def open_questions(
    findings: Sequence[Finding], verdicts: Sequence[Verdict], views: Mapping[Horizon, View]
) -> tuple[OpenQuestion, ...]:
    """Return the unknown facts that rules and links wait for, those that settle most first."""
    waiting: dict[tuple[str | None, str], tuple[Unknown, dict[str, str]]] = {}

    def add(rule: str, severity: str, cluster: str | None, horizon: Horizon, names: Sequence[str]) -> None:
        for name in names:
            fact = lookup(views, horizon, cluster, name)
            if isinstance(fact, Unknown):
                owner = cluster if "cluster." in name else None
                rules = waiting.setdefault((owner, name), (fact, {}))[1]
                rules[rule] = min(severity, rules.get(rule, severity), key=SEVERITIES.index)

    for finding in findings:
        if finding.status == "unknown":
            add(finding.rule, finding.severity, finding.cluster, finding.horizon, finding.unknown_facts)
    for verdict in verdicts:
        if verdict.verdict == "undetermined" and not verdict.links:
            add(verdict.scenario, verdict.severity, verdict.cluster, verdict.horizon, verdict.unknown_facts)
        for link in verdict.links:
            if link.state == "unknown" and verdict.verdict == "undetermined":
                add(verdict.scenario, verdict.severity, verdict.cluster, verdict.horizon, link.facts)
    questions = [
        OpenQuestion(name, cluster, fact.reason, fact.hint, tuple(rules), min(rules.values(), key=SEVERITIES.index))
        for (cluster, name), (fact, rules) in waiting.items()
    ]
    return tuple(sorted(questions, key=lambda q: (SEVERITIES.index(q.severity), -len(q.settles))))
