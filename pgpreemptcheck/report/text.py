"""The report for a terminal: the answer first, then why, what to do, and what is not known.

Plain text, in 80 columns where nothing else is asked for. Colour only where the caller says that the terminal takes
it; without UTF-8 the chain is drawn in ASCII.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from pgpreemptcheck import __version__
from pgpreemptcheck.engine.evaluate import Finding, LinkState, Verdict
from pgpreemptcheck.printable import printable
from pgpreemptcheck.report.outcome import EXPOSED, SEVERITIES, Report, reaches
from pgpreemptcheck.units import as_bytes
from pgpreemptcheck.values import Fact, Known, Unknown, record
from pgpreemptcheck.views import ClusterView, Horizon

WIDTH = 80
LEAST_WIDTH = 72  # of a drawn chain
_COLUMN = 11  # of a link in the drawn chain

HORIZON_NAMES = {"now": "now", "crash_restart": "crash restart", "next_start": "next start"}
LINK_NAMES = {
    "freelist": "freelist",
    "base_pages": "base pages",
    "kernel_preemption": "preemption",
    "parallelism": "parallelism",
}
VERDICT_NAMES = {
    "observed": "OBSERVED",
    "exposed": "EXPOSED",
    "probably-not-exposed": "probably not",
    "not-exposed": "not exposed",
    "undetermined": "undetermined",
    "contradiction": "CONTRADICTION",
    "not-applicable": "-",
}
_COLOURS = {"critical": "1;31", "high": "31", "medium": "33", "low": "36", "info": "2", "good": "32", "bold": "1"}


@record
class Style:
    """What the output can show."""

    colour: bool = False
    unicode: bool = True
    width: int = WIDTH

    def paint(self, text: str, kind: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self.colour else text

    def wrap(self, text: str, indent: str = "", first: str | None = None, *, kind: str | None = None) -> list[str]:
        """Return the lines of a text, painted once they are wrapped: the codes must neither be counted nor escaped."""
        lines = textwrap.wrap(
            printable(text), max(self.width, LEAST_WIDTH), initial_indent=indent if first is None else first,
            subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        return [self.paint(line, kind) for line in lines] if kind else lines


def render(report: Report, style: Style) -> str:
    """Return the whole text report."""
    lines = [*_header(report, style), "", *_answer(report, style)]
    for cluster in report.views["now"].clusters:
        lines += ["", *_cluster(report, cluster, style)]
    lines += _findings(report, style)
    lines += _unknowns(report, style)
    lines += _cut_offs(report, style)
    lines += ["", *_footer(report, style)]
    text = "\n".join(lines) + "\n"
    return text if style.unicode else text.encode("ascii", "replace").decode("ascii")


def shown(fact: Fact[object], otherwise: str = "unknown") -> str:
    """Return a fact's value for a line of text."""
    return printable(str(fact.value)) if isinstance(fact, Known) else otherwise


def _header(report: Report, style: Style) -> list[str]:
    host = report.views["now"].host
    kernel = host.kernel.preemption
    system = f"{shown(host.os.id, 'unknown system')} {shown(host.os.version, '')}".strip()
    lines = [f"pgpreemptcheck {__version__}   {shown(host.hostname, 'unnamed host')}   {report.generated_at}"]
    lines += style.wrap(
        f"{system}, Linux {shown(host.kernel.release)} {shown(host.arch)}, {_machine(report)}", "  ", ""
    )
    if isinstance(kernel.mode, Known):
        how = {"effective": "read off the running kernel", "boot": "inferred from boot", "build": "inferred from build"}
        told = how.get(kernel.certainty or "", "")
        lines += style.wrap(f"kernel preemption: {kernel.mode.value} ({told}: {kernel.mode.source})", "  ", "")
    else:
        lines += style.wrap(f"kernel preemption: unknown ({kernel.mode.reason})", "  ", "")
    lines += style.wrap(f"huge pages: {_pools(report)}", "  ", "")
    for assumption in report.assumed:
        lines += style.wrap(f"ASSUMED: {assumption}", "  ", "")
    return lines


def _machine(report: Report) -> str:
    host = report.views["now"].host
    parts = [f"{shown(host.cpus.online)} CPUs", _size(host.memory.total_bytes) + " memory"]
    if isinstance(host.virtualization, Known) and host.virtualization.value:
        parts.append(printable(str(host.virtualization.value)))
    if isinstance(host.container, Known) and host.container.value:
        parts.append(f"in a container ({printable(str(host.container.value))})")
    return ", ".join(parts)


def _size(fact: Fact[int]) -> str:
    return as_bytes(fact.value) if isinstance(fact, Known) else "unknown"


def _pools(report: Report) -> str:
    pools = report.views["now"].host.huge_pages.pools
    if isinstance(pools, Unknown):
        return f"unknown ({pools.reason})"
    told = []
    for pool in pools:
        if isinstance(pool.total, Known) and pool.total.value == 0:
            continue
        surplus = f", {shown(pool.surplus)} surplus" if not _is(pool.surplus, 0) else ""
        told.append(f"{shown(pool.total)} of {_size(pool.page_bytes)} ({shown(pool.free)} free, "
                    f"{shown(pool.reserved)} of them promised{surplus})")  # fmt: skip
    return "; ".join(told) or "none reserved"


def _is(fact: Fact[int], value: int) -> bool:
    return isinstance(fact, Known) and fact.value == value


def _answer(report: Report, style: Style) -> list[str]:
    """The answer, in one paragraph."""
    clusters = report.views["now"].clusters
    verdicts = report.evaluation.verdicts
    hidden = report.facts.hidden
    lines: list[str] = []
    for failure in report.facts.errors:
        text = f"ERROR: {failure.cluster} could not be looked at, by a fault of this program: {failure.reason}."
        lines += style.wrap(f"{text} Please report it.", kind="critical")
    if not clusters and lines:
        return lines
    if not clusters:
        if hidden is not None:
            text = f"UNKNOWN: no PostgreSQL was seen, but one may be here: {hidden.reason}."
            return style.wrap(text) + (style.wrap(f"To settle it: {hidden.hint}.", "  ", "") if hidden.hint else [])
        return [
            *style.wrap(
                "No PostgreSQL was found on this host: nothing here is exposed. What is said below is the "
                "host's part. A cluster that does not run can be named with --pgdata DIRECTORY."
            ),
            "To see a full report on a bundled example: pgpreemptcheck demo",
        ]
    if hidden is not None:
        lines += style.wrap(f"INCOMPLETE: a PostgreSQL may run here that cannot be seen: {hidden.reason}.", kind="bold")
    worst = _worst(verdicts)
    for same in _grouped([f for f in report.evaluation.findings if f.status == "fail" and f.severity == "critical"]):
        owner = f"{same[0].cluster}: " if same[0].cluster and len(clusters) > 1 else ""
        lines += style.wrap(f"CRITICAL: {owner}{same[0].title} ({_horizons(same)}).", kind="critical")
    if worst is None:
        return [*lines, *style.wrap("No cluster runs or would start: there is no exposure to judge.")]
    where = _where(worst, verdicts)
    if worst.verdict in ("observed", "contradiction", "exposed"):
        text = {
            "observed": f"OBSERVED: the preemption regression is happening {where}.",
            "contradiction": f"CONTRADICTION: the profile and the facts disagree {where}.",
            "exposed": f"EXPOSED ({worst.severity}): the Linux preemption regression can hit {where}.",
        }[worst.verdict]
        lines += style.wrap(text, kind=worst.severity)
        if worst.verdict == "exposed" and worst.severity == "info":
            lines += style.wrap("At this size nothing needs to be done about it.")
        elif worst.verdict == "exposed":
            lines += style.wrap("What removes it: huge pages that are really in use. What to do stands under Findings.")
    elif worst.verdict == "undetermined":
        lines += style.wrap(f"UNDETERMINED (at most {worst.severity}): {where}.", kind=worst.severity)
        lines += _settles(report, worst, style)
    elif worst.verdict == "probably-not-exposed":
        lines += style.wrap(f"PROBABLY NOT EXPOSED: {where}, but what says so was inferred, not measured.")
    else:
        lines += style.wrap(f"NOT EXPOSED to the Linux preemption regression: {where}.", kind="good")
    return lines


def _settles(report: Report, verdict: Verdict, style: Style) -> list[str]:
    """What one thing is missing for a verdict, and how to learn it."""
    for question in report.unknowns:
        if question.fact == verdict.settles and question.cluster in (verdict.cluster, None):
            hint = f" To settle it: {question.hint}." if question.hint else ""
            return style.wrap(f"Not known: {question.reason}.{hint}", "  ", "")
    return []


_RANK = {
    "observed": 0,
    "contradiction": 0,
    "exposed": 1,
    "undetermined": 1,
    "probably-not-exposed": 2,
    "not-exposed": 3,
}


def _worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict that the answer is about: what may be bad comes before what surely is of no matter."""
    real = [v for v in verdicts if v.verdict in _RANK]
    return min(
        real,
        key=lambda v: (_RANK[v.verdict], SEVERITIES.index(v.severity), v.verdict == "undetermined"),
        default=None,
    )


def _where(worst: Verdict, verdicts: Sequence[Verdict]) -> str:
    same = [v for v in verdicts if v.verdict == worst.verdict]
    clusters = list(dict.fromkeys(v.cluster for v in same))
    horizons = [HORIZON_NAMES[h] for h in dict.fromkeys(v.horizon for v in same)]
    names = printable(clusters[0] or "") if len(clusters) == 1 else f"{len(clusters)} clusters"
    return f"{names} ({', '.join(horizons)})"


def _cluster(report: Report, cluster: ClusterView, style: Style) -> Iterator[str]:
    state = f"running, pid {shown(cluster.pid)}" if cluster.running else "not running"
    if isinstance(cluster.seen, Unknown):
        state = "running or not: not known"
    port = f", port {shown(cluster.port)}" if isinstance(cluster.port, Known) else ""
    yield style.paint(f"Cluster {printable(cluster.id)}", "bold")
    yield from style.wrap(f"PostgreSQL {shown(cluster.version)}{port}, {state}, owner {shown(cluster.owner)}", "  ")
    yield from style.wrap(_memory_line(cluster), "  ")
    if cluster.server is not None and isinstance(cluster.server.version, Unknown):
        hint = f" ({cluster.server.version.hint})" if cluster.server.version.hint else ""
        yield from style.wrap(f"{cluster.server.version.reason}{hint}", "  ")
    verdicts = [v for v in report.evaluation.verdicts if v.cluster == cluster.id]
    if not any(v.links for v in verdicts):
        return
    yield ""
    names = "".join(f"{LINK_NAMES.get(link.link, link.link):<{_COLUMN}}" for link in _links(verdicts))
    yield f"{'':<16}{names} verdict"
    for verdict in verdicts:
        yield _chain(verdict, style)
    yield ""
    yield from _because(verdicts, style)


def _links(verdicts: Sequence[Verdict]) -> Sequence[LinkState]:
    return max((v.links for v in verdicts), key=len)


def _memory_line(cluster: ClusterView) -> str:
    settings, segment = cluster.settings, cluster.segment
    if settings is None or segment is None:
        return "no shared memory was seen" if isinstance(cluster.seen, Unknown) else "no shared memory: it does not run"
    backing = shown(segment.backing)
    page = f" of {_size(segment.page_bytes)}" if isinstance(segment.page_bytes, Known) else ""
    pages = {"huge": f"huge pages{page}", "base": f"base pages{page}", "sysv": f"System V memory, base pages{page}"}
    parts = [
        f"shared_buffers {_size(settings.shared_buffers)}",
        f"huge_pages = {shown(settings.huge_pages)}",
        f"segment {_size(segment.bytes)} on {pages.get(backing, 'pages of unknown size')}",
    ]
    if isinstance(cluster.start.pages_needed, Known) and backing != "huge":
        parts.append(
            f"as huge pages it would be {cluster.start.pages_needed.value:,} of {_size(cluster.start.page_bytes)}"
        )
    return ", ".join(parts)


def _chain(verdict: Verdict, style: Style) -> str:
    """One row: the links as a chain, the broken one visibly cut."""
    solid, cut, open_ = ("─", "╳", "?") if style.unicode else ("-", "X", "?")
    row = f"  {HORIZON_NAMES[verdict.horizon]:<14}"
    for position, link in enumerate(verdict.links):
        word = {"holds": "holds", "broken": "BROKEN", "unknown": "unknown"}[link.state]
        last = position == len(verdict.links) - 1
        rest = _COLUMN - 1 - len(word)
        joint = {"holds": solid, "broken": cut, "unknown": open_}[link.state]
        bar = f" {solid}{joint}{solid * (rest - 3)} " if not last else (f" {joint}" if link.state == "broken" else "")
        painted = style.paint(word, {"holds": "medium", "broken": "good", "unknown": "bold"}[link.state])
        row += painted + bar.ljust(_COLUMN - len(word))
    if not verdict.links:
        row += " " * 4 * _COLUMN
    name = VERDICT_NAMES[verdict.verdict]
    if verdict.verdict in ("exposed", "undetermined"):
        name += f", {verdict.severity}"
    if verdict.dormant:
        name += " (dormant)"
    return (row + " " + style.paint(name, verdict.severity)).rstrip()


def _because(verdicts: Sequence[Verdict], style: Style) -> Iterator[str]:
    """Why each link is as it is, once where the horizons agree."""
    for position, link in enumerate(_links(verdicts)):
        reasons: dict[str, list[str]] = {}
        for verdict in verdicts:
            if position < len(verdict.links):
                state = verdict.links[position]
                reasons.setdefault(f"{state.state}{_certainty(state)}: {state.because}", []).append(
                    HORIZON_NAMES[verdict.horizon]
                )
        label = LINK_NAMES.get(link.link, link.link)
        for text, horizons in reasons.items():
            when = "" if len(reasons) == 1 else f"{', '.join(horizons)}: "
            yield from style.wrap(f"{when}{text}", " " * 14, f"  {label:<12}")
            label = ""


def _certainty(link: LinkState) -> str:
    """How sure a state is; one to come is never measured, only foreseen from what was."""
    if link.state == "unknown" or link.certainty is None:
        return ""
    if not link.foreseen:
        return f" ({link.certainty})"
    return " (foreseen)" if link.certainty == "measured" else f" (foreseen, {link.certainty})"


def _findings(report: Report, style: Style) -> list[str]:
    groups = _grouped([f for f in report.evaluation.findings if f.status in ("fail", "error")])
    if not groups:
        return []
    ordered = sorted(groups, key=lambda same: SEVERITIES.index(_worst_of(same).severity))
    many = len(report.views["now"].clusters) > 1
    lines: list[str] = []
    for same in ordered:
        if _worst_of(same).severity != "info":
            lines += ["", *_finding(same, style, many=many)]
    if lines:
        lines = ["", style.paint("Findings", "bold"), *lines]
    information = [same for same in ordered if _worst_of(same).severity == "info"]
    if information:
        lines += ["", style.paint("For information (no action needed)", "bold")]
        for same in information:
            lines += _short(same, style, many=many)
    return lines


def _grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that say the same of one cluster at several horizons, together."""
    groups: dict[tuple[str, str | None, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.cluster, finding.detail), []).append(finding)
    return list(groups.values())


def _worst_of(same: Sequence[Finding]) -> Finding:
    return min(same, key=lambda f: SEVERITIES.index(f.severity))


def _horizons(same: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(HORIZON_NAMES[f.horizon] for f in same))


def _seen(finding: Finding) -> str:
    shown_facts = [evidence for evidence in finding.evidence if evidence.fact != "cluster.running"]
    return "; ".join(f"{_words(e.fact)} = {e.shown}" + (f" ({e.source})" if e.source else "") for e in shown_facts)


def _words(fact: str) -> str:
    """The name of a fact for a line of text: settings by their own names, others without the path before them."""
    horizon, _, rest = fact.partition(".")
    if horizon in HORIZON_NAMES:
        return f"{HORIZON_NAMES[cast(Horizon, horizon)]}: {_words(rest)}"
    if fact.startswith("cluster.settings."):
        return fact.rpartition(".")[2]
    return rest.replace("_", " ").replace(".", " ")


def _short(same: Sequence[Finding], style: Style, *, many: bool) -> Iterator[str]:
    finding = _worst_of(same)
    owner = f", cluster {finding.cluster}" if many and finding.cluster else ""
    yield from style.wrap(
        f"{finding.rule}  {finding.title} ({_horizons(same)}{owner}): {_seen(finding)}", " " * 10, "  "
    )


def _finding(same: Sequence[Finding], style: Style, *, many: bool) -> Iterator[str]:
    worst = _worst_of(same)
    heading = style.wrap(f"{worst.severity.upper()}  {worst.rule}  {worst.title}  ({_horizons(same)})", "  ", "")
    yield from (style.paint(line, worst.severity) for line in heading)
    if many and worst.cluster is not None:
        yield from style.wrap(f"cluster {worst.cluster}", "  ")
    yield from _part(style, "seen", _seen(worst))
    yield from _part(style, "expected", worst.expected)
    yield from _part(style, "why", worst.detail)
    yield from _part(style, "do", worst.action)
    yield from _part(style, "check", worst.verify)
    yield from _part(style, "undo", worst.undo)
    if worst.thresholds:
        yield from _part(style, "severity", "by cut-offs of ours, explained below")


def _part(style: Style, label: str, text: str) -> Iterable[str]:
    return style.wrap(text, " " * 12, f"  {label + ':':<10}") if text else ()


def _unknowns(report: Report, style: Style) -> list[str]:
    relevant = [question for question in report.unknowns if question.severity != "info"]
    if not relevant:
        return []
    lines = ["", style.paint("Not known", "bold")]
    many = len(report.views["now"].clusters) > 1
    reasons: dict[tuple[str, str], list[str]] = {}
    for question in relevant:
        owner = f"{question.cluster}: " if many and question.cluster else ""
        reasons.setdefault((question.reason, question.hint), []).append(owner + _words(question.fact))
    for (reason, hint), names in reasons.items():
        shown_names = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines += style.wrap(f"{shown_names}: {reason}" + (f". To settle it: {hint}" if hint else ""), "    ", "  ")
    hints: dict[str, set[tuple[str | None, str]]] = {}
    for question in relevant:
        if question.hint:
            hints.setdefault(question.hint, set()).update((question.cluster, rule) for rule in question.settles)
    if hints:
        best = max(hints, key=lambda hint: len(hints[hint]))
        if len(hints[best]) > 1:
            lines += style.wrap(f"What would settle most ({len(hints[best])} checks): {best}", "  ")
    return lines


def _cut_offs(report: Report, style: Style) -> list[str]:
    """The cut-offs that severities rest on, each once, with the reason why it is no more than that."""
    found = report.evaluation.findings
    told = [v.thresholds for v in report.evaluation.verdicts]
    told += [f.thresholds for f in found if f.status == "fail" and f.severity != "info"]
    names = dict.fromkeys(text for texts in told for text in texts)
    if not names:
        return []
    lines = ["", style.paint("Cut-offs of ours that severities rest on", "bold")]
    for text in names:
        lines += style.wrap(text, "    ", "  ")
    return lines


def _footer(report: Report, style: Style) -> list[str]:
    findings = report.evaluation.findings
    failed = [f.severity for f in findings if f.status == "fail"]
    told = [f"{failed.count(s)} {s}" for s in SEVERITIES[:-1] if s in failed]
    for status, word in (("pass", "passed"), ("unknown", "not known"), ("error", "in error")):
        rules = [f.rule for f in findings if f.status == status]
        names = f" ({', '.join(dict.fromkeys(rules))})" if status != "pass" and len(rules) <= 3 else ""
        told += [f"{len(rules)} {word}{names}"] if rules else []
    if "info" in failed:
        told.append(f"{failed.count('info')} for information")
    return [
        *style.wrap(f"Checks: {', '.join(told) or 'none applies'}. Exit code {report.exit_code}: {_why_exit(report)}."),
        *style.wrap("All of it, passes included: --format json. One rule explained: pgpreemptcheck rules show ID"),
    ]


def _why_exit(report: Report) -> str:
    level = report.fail_on
    if level == "never":
        return "--fail-on never"
    if report.exit_code == 0:
        return f"nothing at or above {level}"
    if report.exit_code == 70:
        return "a cluster could not be looked at"
    status, verdicts = ("fail", EXPOSED) if report.exit_code == 1 else ("unknown", ("undetermined",))
    names = [v.scenario for v in report.evaluation.verdicts if v.verdict in verdicts and reaches(v.severity, level)]
    names += [f.rule for f in report.evaluation.findings if f.status == status and reaches(f.severity, level)]
    what = "found" if report.exit_code == 1 else "not known, and may be,"
    return f"{what} at or above {level}: {', '.join(dict.fromkeys(names))}"
