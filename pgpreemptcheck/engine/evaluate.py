"""Evaluation: rules over views, to findings and verdicts. Pure: it reads nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from pgpreemptcheck.engine.expression import CERTAINTIES, UNKNOWN, Environment, Result, Undecided
from pgpreemptcheck.engine.message import shown
from pgpreemptcheck.engine.rules import SEVERITIES, Case, Link, Reference, Rule, RuleSet, Scenario, Severity
from pgpreemptcheck.engine.schema import Schema, find
from pgpreemptcheck.engine.types import EvaluationError
from pgpreemptcheck.values import Certainty, Known, Unknown, record
from pgpreemptcheck.views import ClusterView, Horizon, View

Status = Literal["fail", "pass", "unknown", "not-applicable", "waived", "error"]
LinkStatus = Literal["holds", "broken", "unknown"]
VerdictName = Literal[
    "observed", "exposed", "probably-not-exposed", "not-exposed", "undetermined", "contradiction", "not-applicable"
]


@record
class Evidence:
    """A fact that a finding or link rests on: its value, the same for people, and where it was read."""

    fact: str
    value: Any
    shown: str
    source: str


@record
class Finding:
    """What a rule says of the host (cluster None) or of a cluster at one horizon.

    `thresholds` are the cut-offs that the status or severity rests on, in words; `unknown_facts` the facts that would
    settle the status, or the severity of a finding whose size is not known (its severity is then the highest possible).
    """

    rule: str
    cluster: str | None
    horizon: Horizon
    status: Status
    severity: Severity
    title: str
    detail: str
    evidence: tuple[Evidence, ...]
    expected: str
    action: str
    verify: str
    undo: str
    remedy: tuple[str, ...]
    references: tuple[Reference, ...]
    thresholds: tuple[str, ...]
    unknown_facts: tuple[str, ...]


@record
class LinkState:
    """One link of a chain. `facts` are the names that decided it; of an unknown link those that are missing.

    `certainty` is None where the state is unknown. `foreseen`: the state is one to come, worked out from what is now.
    """

    link: str
    title: str
    state: LinkStatus
    certainty: Certainty | None
    because: str
    facts: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    foreseen: bool


@record
class Verdict:
    """What a scenario says of a cluster at one horizon.

    `settles` is the cheapest fact that would settle an undetermined verdict; `unknown_facts` are those that the
    severity waits for (it is then the highest possible). `certainty` is None where nothing was decided.
    """

    scenario: str
    cluster: str | None
    horizon: Horizon
    verdict: VerdictName
    dormant: bool
    severity: Severity
    certainty: Certainty | None
    links: tuple[LinkState, ...]
    trigger: LinkState | None
    because: str
    settles: str | None
    thresholds: tuple[str, ...]
    unknown_facts: tuple[str, ...]


@record
class Evaluation:
    """All findings, by rule, horizon and cluster, and all verdicts, by scenario, cluster and horizon."""

    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]


def evaluate(rules: RuleSet, views: Mapping[Horizon, View]) -> Evaluation:
    """Return what all rules say of all views. Cluster rules on a host without clusters are not applicable."""
    tables = _tables(views)
    clusters = list(dict.fromkeys(cluster for _, cluster in tables if cluster is not None))
    findings: list[Finding] = []
    verdicts: list[Verdict] = []
    for rule in rules.rules:
        subjects: Sequence[str | None] = [None] if rule.scope == "host" else clusters
        for horizon in rule.horizons:
            if horizon not in views:
                continue
            if not subjects:
                findings.append(_not_judged(rule, None, horizon, _NO_CLUSTER))
            for subject in subjects:
                if (horizon, subject) in tables:
                    findings.append(judge(rule, tables[horizon, subject], horizon, subject, rules))
    for scenario in rules.scenarios:
        horizons = [horizon for horizon in scenario.horizons if horizon in views]
        for name in clusters:
            for horizon in horizons:
                if (horizon, name) not in tables:
                    continue
                verdicts.append(judge_scenario(scenario, tables[horizon, name], horizon, name, rules))
        if not clusters:
            verdicts += [_without_cluster(scenario, tables[horizon, None], horizon) for horizon in horizons]
    return Evaluation(tuple(findings), tuple(verdicts))


_NO_CLUSTER = "no PostgreSQL was found on this host"
_NOT_RUNNING = "the cluster does not run"


def _tables(views: Mapping[Horizon, View]) -> dict[tuple[Horizon, str | None], Environment]:
    """Return the facts by horizon and cluster id; those of the host are shared by its clusters."""
    tables: dict[tuple[Horizon, str | None], Environment] = {}
    for horizon, view in views.items():
        host = Environment(_Reader(tables, view, None, None))
        tables[horizon, None] = host
        for cluster in view.clusters:
            tables[horizon, cluster.id] = Environment(_Reader(tables, view, cluster, host))
    return tables


class _Reader:
    """Looks a fact up in a view; facts of the host and of other horizons come from those tables."""

    def __init__(
        self,
        tables: dict[tuple[Horizon, str | None], Environment],
        view: View,
        cluster: ClusterView | None,
        host: Environment | None,
    ) -> None:
        self._tables = tables
        self._view = view
        self._cluster = cluster
        self._host = host

    def __call__(self, name: str) -> Known[Any] | Unknown:
        first, _, rest = name.partition(".")
        if first == "cluster" or (first == "host" and self._host is None):
            return find(self._view, self._cluster, name)
        if first == "host" and self._host is not None:
            return self._host.fact(name)
        subject = None if rest.startswith("host") or self._cluster is None else self._cluster.id
        table = self._tables.get((cast(Horizon, first), subject))
        return table.fact(rest) if table is not None else Unknown(f"nothing is known of this cluster at {first}")


# rules ------------------------------------------------------------------------------------------


def judge(rule: Rule, facts: Environment, horizon: Horizon, cluster: str | None, rules: RuleSet) -> Finding:
    """Return what one rule says over a table of facts."""
    if rule.scope == "cluster" and horizon in ("now", "crash_restart") and facts["cluster.running"][0] is False:
        return _not_judged(rule, cluster, horizon, _NOT_RUNNING)
    try:
        status, names, unknown, reason = _status(rule, facts)
        level, deciding, missing = _severity(rule.severity, facts) if status in ("fail", "unknown") else _NONE
    except EvaluationError as error:
        status, names, unknown, reason = "error", (), (), str(error)
        level, deciding, missing = rule.severity[0].level, (), ()
    if status == "fail":
        unknown = missing
    elif status == "error":
        level = rule.severity[0].level
    failed = status == "fail"
    return Finding(
        rule=rule.id,
        cluster=cluster,
        horizon=horizon,
        status=status,
        severity=level,
        title=rule.title,
        detail=rule.detail.fill(facts) if failed else reason,
        evidence=_evidence(names, facts, rules.schema),
        expected=rule.expected.fill(facts) if status in ("fail", "unknown", "pass") else "",
        action=rule.action.fill(facts) if failed else "",
        verify=rule.verify.fill(facts) if failed else "",
        undo=rule.undo.fill(facts) if failed else "",
        remedy=rule.remedy if failed else (),
        references=rule.references,
        thresholds=_thresholds(names + deciding, rules) if status != "not-applicable" else (),
        unknown_facts=tuple(dict.fromkeys(unknown)),
    )


_NONE: tuple[Severity, tuple[str, ...], tuple[str, ...]] = ("info", (), ())


def _status(rule: Rule, facts: Environment) -> tuple[Status, tuple[str, ...], tuple[str, ...], str]:
    """Return the status, the names that decided it, the unknown ones that would, and the reason of a gap or error.

    A rule whose `when` is False is a pass although it is not known whether it applies: it is no finding either way.
    """
    applies: Result = rule.applies.run(facts) if rule.applies is not None else (True, (), 0)
    if applies[0] is False:
        return "not-applicable", applies[1], (), ""
    when = rule.when.run(facts)
    if when[0] is False:
        return "pass", when[1], (), ""
    unknown = tuple(name for value, names, _ in (applies, when) if value is UNKNOWN for name in names)
    if unknown:
        return "unknown", unknown, unknown, _gaps(unknown, facts)
    for value, names, _ in (applies, when):
        if isinstance(value, Undecided):
            return "error", names, (), f"{value.reason} ({', '.join(dict.fromkeys(names))})"
    return "fail", when[1] + applies[1], (), ""


def _gaps(names: Sequence[str], facts: Environment) -> str:
    """Return which facts are not known, and why."""
    told = []
    for name in dict.fromkeys(names):
        fact = facts.fact(name)
        if isinstance(fact, Unknown):
            told.append(f"{name}: {fact.reason}")
    return "not known: " + "; ".join(told)


def _severity(cases: Sequence[Case], facts: Environment) -> tuple[Severity, tuple[str, ...], tuple[str, ...]]:
    """Return the first case that holds or could hold, the names it rests on, and those it waits for."""
    deciding: tuple[str, ...] = ()
    for case in cases:
        if case.when is None:
            return case.level, deciding, ()
        value, names, _ = case.when.run(facts)
        deciding += names
        if value is True:
            return case.level, deciding, ()
        if value is not False:
            # what the case names besides the gap belongs to it too: its cut-offs could not be ruled out
            return case.level, deciding + case.when.names, names if value is UNKNOWN else ()
    raise AssertionError("the last case has no condition")


def _evidence(names: Sequence[str], facts: Environment, schema: Schema) -> tuple[Evidence, ...]:
    """Return the known facts among the names."""
    told = facts.told
    for name in names:
        if name not in told:
            told[name] = _tell(name, facts, schema)
    return tuple(evidence for evidence in [told[name] for name in dict.fromkeys(names)] if evidence is not None)


def _tell(name: str, facts: Environment, schema: Schema) -> Evidence | None:
    fact = None if name.startswith("threshold.") else facts.fact(name)
    if not isinstance(fact, Known):
        return None
    return Evidence(name, fact.value, shown(fact.value, schema.type_of(name)), fact.source)


def _thresholds(names: Sequence[str], rules: RuleSet) -> tuple[str, ...]:
    used = dict.fromkeys(name for name in names if name.startswith("threshold."))
    return tuple(rules.thresholds[name.partition(".")[2]].shown() for name in used)


def _not_judged(rule: Rule, cluster: str | None, horizon: Horizon, reason: str) -> Finding:
    return Finding(
        rule.id, cluster, horizon, "not-applicable", "info", rule.title, reason,
        (), "", "", "", "", (), rule.references, (), (),
    )  # fmt: skip


# scenarios --------------------------------------------------------------------------------------


def judge_scenario(
    scenario: Scenario, facts: Environment, horizon: Horizon, cluster: str | None, rules: RuleSet
) -> Verdict:
    """Return the verdict of a chain: one broken link is enough, all must hold, else it is undetermined."""
    reason = _without_subject(facts, horizon)
    unseen = facts.fact("cluster.seen")
    if reason == _NOT_RUNNING and isinstance(unseen, Unknown):
        return _out_of_sight(
            scenario, cluster, horizon, "cluster.seen", f"whether it runs is not known: {unseen.reason}"
        )
    if reason:
        return _not_applicable(scenario, cluster, horizon, reason)
    links = tuple(_link(link, facts, horizon, rules) for link in scenario.links)
    trigger = _link(scenario.trigger, facts, horizon, rules) if scenario.trigger is not None else None
    verdict, certainty = _chain(links)
    severity: Severity = "info"
    thresholds: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    dormant = False
    if verdict in ("exposed", "undetermined"):
        try:
            severity, deciding, missing = _severity(scenario.severity, facts)
            thresholds = _thresholds(deciding, rules)
        except EvaluationError:
            severity = scenario.severity[0].level
    if verdict == "exposed" and horizon == "now" and trigger is not None:
        dormant = trigger.state == "broken" and trigger.certainty in _SURE
        if dormant:
            severity = max(severity, "low", key=SEVERITIES.index)
    return Verdict(
        scenario=scenario.id,
        cluster=cluster,
        horizon=horizon,
        verdict=verdict,
        dormant=dormant,
        severity=severity,
        certainty=certainty,
        links=links,
        trigger=trigger,
        because="",
        settles=_cheapest(links, facts) if verdict == "undetermined" else None,
        thresholds=thresholds,
        unknown_facts=tuple(dict.fromkeys(missing)),
    )


_SURE = ("measured", "assumed")


def _chain(links: Sequence[LinkState]) -> tuple[VerdictName, Certainty | None]:
    broken = [CERTAINTIES.index(link.certainty) for link in links if link.state == "broken" and link.certainty]
    if broken:
        strongest = CERTAINTIES[min(broken)]
        return "not-exposed" if strongest in _SURE else "probably-not-exposed", strongest
    if all(link.state == "holds" for link in links):
        return "exposed", max((link.certainty for link in links if link.certainty), key=CERTAINTIES.index)
    return "undetermined", None


def _link(link: Link, facts: Environment, horizon: Horizon, rules: RuleSet) -> LinkState:
    try:
        value, names, rank = link.holds.run(facts)
    except EvaluationError as error:
        return LinkState(link.link, link.title, "unknown", None, f"the rule erred: {error}", (), (), False)
    state: LinkStatus = "holds" if value is True else "broken" if value is False else "unknown"
    foreseen = horizon != "now" and state in link.foreseen
    because = (link.foreseen if foreseen else link.because)[state].fill(facts)
    if state == "unknown":
        gap = facts.fact(names[0]) if value is UNKNOWN else value
        because = f"{because} ({gap.reason})" if isinstance(gap, (Unknown, Undecided)) else because
    facts_used = tuple(dict.fromkeys(name for name in names if not name.startswith("threshold.")))
    evidence = _evidence(names, facts, rules.schema)
    certainty = None if state == "unknown" else CERTAINTIES[rank]
    return LinkState(link.link, link.title, state, certainty, because, facts_used, evidence, foreseen)


def _cheapest(links: Sequence[LinkState], facts: Environment) -> str | None:
    """Return the first unknown fact with a hint, in the order of the links; without any hint the first one."""
    unknown = [name for link in links if link.state == "unknown" for name in link.facts]
    for name in unknown:
        fact = facts.fact(name)
        if isinstance(fact, Unknown) and fact.hint:
            return name
    return unknown[0] if unknown else None


def _without_subject(facts: Environment, horizon: Horizon) -> str:
    """Return why there is no server to judge at this horizon, or nothing."""
    if horizon in ("now", "crash_restart") and facts["cluster.running"][0] is False:
        return _NOT_RUNNING
    outcome = facts["cluster.start.outcome"][0]
    if horizon == "next_start" and outcome == "refuses":
        return "PostgreSQL does not start with its files as they are"
    if horizon == "crash_restart" and outcome in ("refuses", "crashes"):
        return "PostgreSQL does not come back after a crash of one backend"
    return ""


def _without_cluster(scenario: Scenario, host: Environment, horizon: Horizon) -> Verdict:
    """No cluster was found: there is nothing to judge, unless one may run that cannot be seen."""
    hidden = host.fact("host.hidden_clusters")
    if isinstance(hidden, Known):
        return _not_applicable(scenario, None, horizon, _NO_CLUSTER)
    why = f"no PostgreSQL was seen, but one may be here: {hidden.reason}"
    return _out_of_sight(scenario, None, horizon, "host.hidden_clusters", why)


def _out_of_sight(scenario: Scenario, cluster: str | None, horizon: Horizon, fact: str, reason: str) -> Verdict:
    """What runs, or whether anything does, cannot be seen: the verdict waits for that one fact."""
    return replace(
        _not_applicable(scenario, cluster, horizon, reason),
        verdict="undetermined",
        severity=scenario.severity[0].level,
        settles=fact,
        unknown_facts=(fact,),
    )


def _not_applicable(scenario: Scenario, cluster: str | None, horizon: Horizon, reason: str) -> Verdict:
    return Verdict(scenario.id, cluster, horizon, "not-applicable", False, "info", None, (), None, reason, None, (), ())
