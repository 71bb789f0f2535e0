"""The program's use cases: from options to a finished report, without printing anything.

What is imported late is imported while the children of `access` start up: they need longest (the SQL driver).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pgpreemptcheck.access import Access, Owners, open_access
from pgpreemptcheck.errors import UserError
from pgpreemptcheck.facts import clusters
from pgpreemptcheck.facts.clusters import Found
from pgpreemptcheck.facts.datadirs import given_in_vain
from pgpreemptcheck.host import Host, LiveHost
from pgpreemptcheck.values import record

if TYPE_CHECKING:
    from pgpreemptcheck.engine.rules import RuleSet
    from pgpreemptcheck.inspection import Facts
    from pgpreemptcheck.report.outcome import Report
    from pgpreemptcheck.views import Horizon, View


@record
class Options:
    """What to look at, as the user gave it."""

    root: str | None = None
    pgdata: tuple[str, ...] = ()
    dsn: str | None = None
    no_sql: bool = False
    deep: bool = False
    assume: tuple[str, ...] = ()


def check(options: Options, *, rules_dirs: Sequence[str], fail_on: str) -> Report:
    """Return the report on a host. Raises UserError for input that cannot be used."""
    with _Opened(options) as opened:
        rule_set = _load_rules(rules_dirs, tests=False)
        from pgpreemptcheck.engine.evaluate import evaluate
        from pgpreemptcheck.report.outcome import Report, exit_code, open_questions

        facts, views = _look(opened, options)
    evaluation = evaluate(rule_set, views)
    return Report(
        facts=facts,
        views=views,
        evaluation=evaluation,
        unknowns=open_questions(evaluation.findings, evaluation.verdicts, views),
        assumed=options.assume,
        fail_on=fail_on,
        exit_code=exit_code(evaluation, fail_on, failed=bool(facts.errors)),
        generated_at=_now(),
    )


def failure(reason: str) -> str:
    """Return the JSON that stands in the place of a report after an internal error."""
    from pgpreemptcheck.report import json as as_json

    return as_json.render_failure(reason, _now())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def facts(options: Options) -> str:
    """Return the facts of a host as JSON text."""
    with _Opened(options) as opened:
        from pgpreemptcheck.report.plain import facts_document, json_text

        document = facts_document(*_look(opened, options))
    return json_text(document)


def render(report: Report, output_format: str, *, colour: bool, unicode: bool, width: int | None = None) -> str:
    """Return the report in one of the formats; `width` in columns, None for the usual one."""
    if output_format == "json":
        from pgpreemptcheck.report import json as as_json

        return as_json.render(report)
    from pgpreemptcheck.report import text

    return text.render(report, text.Style(colour, unicode, min(width, _WIDEST) if width else text.WIDTH))


_WIDEST = 110  # lines of prose beyond that are hard to read


def demo_options() -> Options:
    """Return the options of the demo: the bundled capture."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo", "capture")
    return Options(root=folder)


def rules_list(rules_dirs: Sequence[str]) -> str:
    """Return one line a rule."""
    rule_set = _load_rules(rules_dirs)
    lines = [f"{s.id}  {'scenario':<9} {s.title}" for s in rule_set.scenarios]
    lines += [f"{r.id}  {r.severity[0].level:<9} {r.title}" for r in rule_set.rules]
    return _printable_lines(lines)


def rules_show(rules_dirs: Sequence[str], rule_id: str) -> str:
    """Return all that can be said of one rule."""
    from pgpreemptcheck.engine import ruletests

    rule_set = _load_rules(rules_dirs)
    return _printable_lines(ruletests.explain(ruletests.find_rule(rule_set, rule_id), rule_set).splitlines())


def _printable_lines(lines: Sequence[str]) -> str:
    """Return lines whose text users wrote, so that nothing in them acts on a terminal."""
    from pgpreemptcheck.printable import printable

    return "".join(f"{printable(line)}\n" for line in lines)


def rules_test(rules_dirs: Sequence[str]) -> tuple[str, bool]:
    """Run the tests of all rules; return the text to print and whether any failed."""
    from pgpreemptcheck.engine import ruletests

    shipped = _load_rules(())  # with the cut-offs as shipped, whatever a site overrides
    both = _load_rules(rules_dirs)
    site = replace(
        both,
        rules=tuple(r for r in both.rules if not r.shipped),
        scenarios=tuple(s for s in both.scenarios if not s.shipped),
    )
    failures = ruletests.run_tests(shipped) + ruletests.run_tests(site)
    count = sum(len(r.tests) for rules in (shipped, site) for r in rules.rules)
    count += sum(len(s.tests) for rules in (shipped, site) for s in rules.scenarios)
    lines = [str(failure) for failure in failures]
    lines.append(f"{count - len(failures)} passed, {len(failures)} failed")
    return "\n".join(lines) + "\n", bool(failures)


def rules_schema() -> str:
    """Return every fact with its type, unit and meaning."""
    from pgpreemptcheck.engine.schema import Schema

    lines = []
    for fact in Schema().names():
        unit = f" [{fact.unit}]" if fact.unit else ""
        lines.append(f"{fact.name}: {fact.label()}{unit}" + (f"  {fact.doc}" if fact.doc else ""))
    return "\n".join(lines) + "\n"


def _load_rules(rules_dirs: Sequence[str], *, tests: bool = True) -> RuleSet:
    from pgpreemptcheck.engine import rules  # imports the YAML loader only when it is needed

    return rules.load(rules_dirs, tests=tests)


class _Opened:
    """A host with its clusters found and the children started that read them; they end with the context."""

    def __init__(self, options: Options) -> None:
        self.host = _open_host(options)
        owners = Owners()
        as_owner = owners.files if self.host.live and os.geteuid() == 0 else None
        self.found: Found = clusters.find(self.host, options.pgdata, as_owner)
        mistake = given_in_vain(self.host, self.found.stopped)
        if mistake is not None:
            owners.close()
            raise UserError(mistake)
        self._access = open_access(
            self.host, self.found, sql=not options.no_sql, dsn=options.dsn, deep=options.deep, owners=owners
        )

    def __enter__(self) -> tuple[Host, Found, Access]:
        return self.host, self.found, self._access

    def __exit__(self, *_: object) -> None:
        self._access.close()


def _open_host(options: Options) -> Host:
    if options.root is None or os.path.realpath(options.root) == "/":
        return LiveHost()
    from pgpreemptcheck.captured import open_captured

    return open_captured(options.root, options.pgdata)


def _look(opened: tuple[Host, Found, Access], options: Options) -> tuple[Facts, dict[Horizon, View]]:
    from pgpreemptcheck import assume, inspection, views

    facts = inspection.inspect(*opened)
    assumed = assume.parse(options.assume, [cluster.id for cluster in facts.clusters])
    return facts, views.make_views(facts, assumed)
