"""The report as JSON: `pgpreemptcheck.report/1` (report.schema.json beside this file)."""

from __future__ import annotations

from typing import Any

from pgpreemptcheck import __version__
from pgpreemptcheck.engine.evaluate import Finding, Verdict
from pgpreemptcheck.printable import printable
from pgpreemptcheck.report.outcome import Report
from pgpreemptcheck.report.plain import bare, facts_document, json_text
from pgpreemptcheck.values import Known


def render(report: Report) -> str:
    """Return the whole report, one document, ASCII only."""
    return json_text(document(report))


def render_failure(reason: str, generated_at: str) -> str:
    """Return what stands in the place of a report after an internal error (exit code 70)."""
    failure = {
        "schema": "pgpreemptcheck.report/1",
        "tool": {"name": "pgpreemptcheck", "version": __version__},
        "generated_at": generated_at,
        "errors": [{"kind": "internal", "reason": printable(reason)}],
        "exit_code": 70,
    }
    return json_text(failure)


def document(report: Report) -> dict[str, Any]:
    """Return the report as JSON data."""
    facts = facts_document(report.facts, report.views)
    release = report.facts.system.kernel.release
    return {
        "schema": "pgpreemptcheck.report/1",
        "tool": {"name": "pgpreemptcheck", "version": __version__},
        "generated_at": report.generated_at,
        "horizon_kernels": {"now": release.value if isinstance(release, Known) else None, "next_boot": None},
        "assumed": [printable(text) for text in report.assumed],
        "host": facts["host"],
        "clusters": facts["clusters"],
        "verdicts": [_verdict(v) for v in report.evaluation.verdicts],
        "findings": [_finding(f) for f in report.evaluation.findings],
        "remedies": [],
        "evidence": [],
        "unknowns": [bare(u) for u in report.unknowns],
        "errors": facts["errors"],
        "exit_code": report.exit_code,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    data: dict[str, Any] = bare(verdict)
    for link in data["links"]:
        _without_words(link)
    if data["trigger"] is not None:
        data["trigger"]["evidence"] = []
    return data


def _finding(finding: Finding) -> dict[str, Any]:
    data: dict[str, Any] = bare(finding)
    _without_words(data)
    return data


def _without_words(data: dict[str, Any]) -> None:
    """Leave out of the evidence the value as people read it: programs have the value itself."""
    for evidence in data["evidence"]:
        del evidence["shown"]
