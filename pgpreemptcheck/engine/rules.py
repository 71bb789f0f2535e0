"""Rule files: found, read, checked against the fact schema, and compiled.

A file holds YAML documents, separated by `---`. A document is a rule, a scenario (`kind: scenario`), or thresholds
alone (`thresholds:`). Every mistake is one line, `FILE:LINE: what is expected`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pgpreemptcheck.engine import yamlfile
from pgpreemptcheck.engine.expression import Expression, TypeOf, compile_condition
from pgpreemptcheck.engine.message import EMPTY, Message, compile_message
from pgpreemptcheck.engine.rulefiles import RuleFile, shipped_files, user_files
from pgpreemptcheck.engine.schema import Schema
from pgpreemptcheck.engine.types import FactType, RuleError, near
from pgpreemptcheck.engine.yamlfile import YamlList, YamlMap
from pgpreemptcheck.values import Known, record
from pgpreemptcheck.views import HORIZONS, Horizon

Severity = Literal["critical", "high", "medium", "low", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "high", "medium", "low", "info")
"""From worst to least."""
Scope = Literal["host", "cluster"]

MAX_DOCUMENTS = 500  # of one file


@record
class Threshold:
    """A cut-off of ours, or a site's: `threshold.NAME` in expressions. What rests on it is heuristic."""

    name: str
    value: int | float
    unit: str
    reason: str
    shipped: bool
    file: str
    line: int

    def shown(self) -> str:
        """Return it in words: high_cpus = 64 CPUs (heuristic: one published host ...)."""
        from pgpreemptcheck.engine.message import shown

        value = shown(self.value, FactType(self.name, "number", unit=self.unit))
        unit = f" {self.unit}" if self.unit and self.unit not in ("bytes", "pages", "seconds") else ""
        return f"{self.name} = {value}{unit} ({self.reason})"


@record
class Reference:
    title: str
    url: str


@record
class Case:
    """A severity, and the condition under which it holds; None: in every case that is left."""

    level: Severity
    when: Expression | None


@record
class RuleTest:
    """A test that a rule carries, as written; `ruletests` reads and runs it."""

    value: Any
    line: int


@record
class Rule:
    """A check: `when` True is a finding, False a pass; `applies` False is not applicable."""

    id: str
    title: str
    scope: Scope
    severity: tuple[Case, ...]
    horizons: tuple[Horizon, ...]
    applies: Expression | None
    when: Expression
    expected: Message
    detail: Message
    action: Message
    verify: Message
    undo: Message
    remedy: tuple[str, ...]
    references: tuple[Reference, ...]
    tests: tuple[RuleTest, ...]
    shipped: bool
    file: str
    line: int


@record
class Link:
    """One link of a scenario: True holds, False is broken; one text for each state.

    `foreseen` has the texts for the horizons to come where these differ: what would be is not what is.
    """

    link: str
    title: str
    holds: Expression
    because: Mapping[str, Message]
    foreseen: Mapping[str, Message]


@record
class Scenario:
    """Links that must hold at once for a cluster to be exposed, and a trigger that says when it bites."""

    id: str
    title: str
    links: tuple[Link, ...]
    trigger: Link | None
    severity: tuple[Case, ...]
    horizons: tuple[Horizon, ...]
    references: tuple[Reference, ...]
    tests: tuple[RuleTest, ...]
    shipped: bool
    file: str
    line: int


@record
class RuleSet:
    """All rules and scenarios, by id, and the thresholds that they use."""

    rules: tuple[Rule, ...]
    scenarios: tuple[Scenario, ...]
    thresholds: Mapping[str, Threshold]
    schema: Schema


def load(folders: Sequence[str] = (), *, tests: bool = True) -> RuleSet:
    """Return the shipped rules and those of the user's folders. Raises RuleError for the first mistake.

    `tests` False: those that the shipped rules carry are not asked for, which is quicker.
    """
    files = shipped_files(tests=tests)
    for folder in folders:
        files += user_files(folder)
    return compile_rules(files, Schema())


def compile_rules(files: Sequence[RuleFile], schema: Schema) -> RuleSet:
    """Return the compiled rules of all files together. Raises RuleError for the first mistake."""
    documents: dict[str, _Section] = {}
    thresholds: dict[str, Threshold] = {}
    for file in files:
        parsed = file.parsed if file.parsed is not None else yamlfile.parse(file.data, file.name)
        if len(parsed) > MAX_DOCUMENTS:
            raise RuleError(f"{file.name}:1: a rule file has at most {MAX_DOCUMENTS} documents")
        for document in parsed:
            section = _Section(document.value, file, document.line, "a rule")
            if "thresholds" in section.value:
                _read_thresholds(section, thresholds)
            if set(section.value) - {"thresholds"}:
                _take(section, documents)
    compiler = _Compiler(schema, thresholds)
    rules: list[Rule] = []
    scenarios: list[Scenario] = []
    for name in sorted(documents):
        section = documents[name]
        kind = section.choice("kind", ("rule", "scenario"), "rule")
        if kind == "scenario":
            scenarios.append(compiler.scenario(name, section))
        else:
            rules.append(compiler.rule(name, section))
    for threshold in thresholds.values():
        if not threshold.shipped and threshold.name not in compiler.used:
            hint = near(threshold.name, compiler.used)
            raise RuleError(f"{threshold.file}:{threshold.line}: no rule uses threshold.{threshold.name}{hint}")
    return RuleSet(tuple(rules), tuple(scenarios), thresholds, schema)


def _take(section: _Section, documents: dict[str, _Section]) -> None:
    """Add a document under its id; one that is taken is an error unless a user's rule says `overrides: true`."""
    shipped = section.file.shipped
    name = section.text("id")
    overrides = section.flag("overrides")
    known = documents.get(name)
    if not re.fullmatch(r"[A-Z][A-Z0-9_-]{1,63}", name, re.ASCII):
        raise section.error("id", "an id is capital letters, digits, _ and -, and begins with a letter")
    ours = re.fullmatch(r"PPC[0-9]{3}", name, re.ASCII) is not None
    if shipped and not ours:
        raise section.error("id", "the id of a shipped rule is PPC and three digits")
    if known is not None and not (overrides and not shipped):
        where = f"{known.file.name}:{known.line}"
        raise section.error("id", f"{name} is also in {where}; a rule of your own replaces it with overrides: true")
    if known is None and overrides:
        raise section.error("overrides", f"there is no rule {name} to override{near(name, documents)}")
    if known is None and ours and not shipped:
        raise section.error("id", "ids of PPC and three digits are for shipped rules: choose another prefix")
    documents[name] = section


def _read_thresholds(section: _Section, thresholds: dict[str, Threshold]) -> None:
    named = section.section("thresholds")
    shipped = section.file.shipped
    for name in named.value:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name, re.ASCII):
            raise named.error(name, "the name of a threshold is small letters, digits and _")
        old = thresholds.get(name)
        entry = named.section(name, ("value", "unit", "reason"))
        if old is not None and (shipped or not old.shipped):
            raise named.error(name, f"threshold {name} is also in {old.file}:{old.line}")
        value = entry.value.get("value")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise entry.error("value", "value: a number is expected")
        unit = entry.text("unit", old.unit if old else "")
        if old is not None and unit != old.unit:
            raise entry.error("unit", f"the unit of threshold {name} is {old.unit or 'none'}")
        reason = entry.text("reason", f"set in {section.file.name}" if old else None)
        thresholds[name] = Threshold(name, value, unit, reason, shipped, section.file.name, named.value.lines[name])


_Entry = TypeVar("_Entry", bound=str)
_REQUIRED = object()


class _Section:
    """A mapping of a rule file, read key by key; every mistake names file and line."""

    def __init__(self, value: Any, file: RuleFile, line: int, what: str, keys: Sequence[str] | None = None) -> None:
        self.file = file
        self.line = line
        if not isinstance(value, YamlMap):
            raise RuleError(f"{file.name}:{line}: {what} is a mapping (key: value)")
        self.value = value
        if keys is not None:
            self.only(keys)

    def only(self, keys: Sequence[str]) -> None:
        """Refuse every key but these."""
        for key in self.value:
            if key not in keys:
                raise self.error(key, f"there is no key {key!r} here{near(key, keys)}; keys: {', '.join(keys)}")

    def error(self, key: str, message: str) -> RuleError:
        return RuleError(f"{self.file.name}:{self.value.lines.get(key, self.line)}: {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value.get(key)
        if value is None and key not in self.value:
            if default is None:
                raise self.error(key, f"{key} is missing")
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"{key}: text is expected")
        return value

    def flag(self, key: str) -> bool:
        value = self.value.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"{key}: true or false is expected")
        return value

    def choice(self, key: str, allowed: Sequence[_Entry], default: _Entry | None = None) -> _Entry:
        value = self.text(key, default)
        for entry in allowed:
            if entry == value:
                return entry
        raise self.error(key, f"{key}: one of {', '.join(allowed)} is expected{near(value, allowed)}")

    def section(self, key: str, keys: Sequence[str] | None = None) -> _Section:
        line = self.value.lines.get(key, self.line)
        return _Section(self.value.get(key), self.file, line, key, keys)

    def items(self, key: str) -> list[tuple[Any, int]]:
        """Return the items of a list with their lines; an absent key is an empty list."""
        value = self.value.get(key)
        if value is None and key not in self.value:
            return []
        if not isinstance(value, YamlList):
            raise self.error(key, f"{key}: a list is expected")
        return list(zip(value, value.lines, strict=True))

    def names(self, key: str, pattern: str) -> tuple[str, ...]:
        items = self.items(key)
        for item, line in items:
            if not isinstance(item, str) or not re.fullmatch(pattern, item, re.ASCII):
                raise RuleError(f"{self.file.name}:{line}: {key}: names of small letters, digits and _ are expected")
        return tuple(item for item, _ in items)

    def horizons(self) -> tuple[Horizon, ...]:
        if "horizons" not in self.value:
            return HORIZONS
        chosen: list[Horizon] = []
        for item, line in self.items("horizons"):
            if item not in HORIZONS or item in chosen:
                hint = near(str(item), HORIZONS)
                raise RuleError(f"{self.file.name}:{line}: horizons: each of {', '.join(HORIZONS)} at most once{hint}")
            chosen.append(item)
        if not chosen:
            raise self.error("horizons", "horizons: at least one is expected")
        return tuple(chosen)

    def references(self) -> tuple[Reference, ...]:
        found = []
        for item, line in self.items("references"):
            entry = _Section(item, self.file, line, "a reference", ("title", "url"))
            url = entry.text("url")
            if not re.fullmatch(r"https?://[^\s<>\"']+", url):
                raise entry.error("url", "url: an http or https address is expected")
            found.append(Reference(entry.text("title"), url))
        return tuple(found)

    def tests(self) -> tuple[RuleTest, ...]:
        return tuple(RuleTest(item, line) for item, line in self.items("tests"))


_COMMON = ("id", "kind", "title", "scope", "severity", "horizons", "thresholds", "references", "tests", "overrides")
_RULE_KEYS = (
    *_COMMON, "applies", "when", "expected", "detail", "action", "verify", "undo", "remedy",
)  # fmt: skip
_SCENARIO_KEYS = (*_COMMON, "links", "trigger")
_STATES = ("holds", "broken", "unknown")


class _Compiler:
    def __init__(self, schema: Schema, thresholds: Mapping[str, Threshold]) -> None:
        self._schema = schema
        self._thresholds = thresholds
        self._constants: dict[str, Known[Any]] = {
            f"threshold.{t.name}": Known(t.value, t.reason, "heuristic") for t in thresholds.values()
        }
        self.used: set[str] = set()

    def rule(self, name: str, section: _Section) -> Rule:
        section.only(_RULE_KEYS)
        scope: Scope = section.choice("scope", ("host", "cluster"))
        types = self._types(scope)
        return Rule(
            id=name,
            title=section.text("title"),
            scope=scope,
            severity=self._severity(section, types),
            horizons=section.horizons(),
            applies=self._condition(section, "applies", types) if "applies" in section.value else None,
            when=self._condition(section, "when", types),
            expected=self._message(section, "expected", types),
            detail=self._message(section, "detail", types),
            action=self._message(section, "action", types),
            verify=self._message(section, "verify", types),
            undo=self._message(section, "undo", types),
            remedy=section.names("remedy", r"[a-z][a-z0-9_]{0,63}"),
            references=section.references(),
            tests=section.tests(),
            shipped=section.file.shipped,
            file=section.file.name,
            line=section.line,
        )

    def scenario(self, name: str, section: _Section) -> Scenario:
        section.only(_SCENARIO_KEYS)
        section.choice("scope", ("cluster",), "cluster")
        types = self._types("cluster")
        links: list[Link] = []
        for item, line in section.items("links"):
            links.append(self._link(_Section(item, section.file, line, "a link"), types))
            if links[-1].link in [link.link for link in links[:-1]]:
                raise RuleError(f"{section.file.name}:{line}: link {links[-1].link} stands twice")
        if not links:
            raise section.error("links", "links: a list of at least one link is expected")
        return Scenario(
            id=name,
            title=section.text("title"),
            links=tuple(links),
            trigger=self._link(section.section("trigger"), types) if "trigger" in section.value else None,
            severity=self._severity(section, types),
            horizons=section.horizons(),
            references=section.references(),
            tests=section.tests(),
            shipped=section.file.shipped,
            file=section.file.name,
            line=section.line,
        )

    def _link(self, section: _Section, types: TypeOf) -> Link:
        section.only(("link", "title", "holds", "because", "foreseen"))
        name = section.text("link")
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name, re.ASCII):
            raise section.error("link", "link: a name of small letters, digits and _ is expected")
        because = section.section("because", _STATES)
        texts = {state: self._message(because, state, types, required=True) for state in _STATES}
        foreseen = {}
        if "foreseen" in section.value:
            given = section.section("foreseen", _STATES)
            foreseen = {state: self._message(given, state, types) for state in _STATES if state in given.value}
        return Link(name, section.text("title"), self._condition(section, "holds", types), texts, foreseen)

    def _severity(self, section: _Section, types: TypeOf) -> tuple[Case, ...]:
        """Return the cases from worst to least, the last of them without a condition."""
        if not isinstance(section.value.get("severity"), YamlList):
            return (Case(section.choice("severity", SEVERITIES), None),)
        cases: list[Case] = []
        items = section.items("severity")
        for item, line in items:
            entry = _Section(item, section.file, line, "a severity", ("level", "when"))
            level = entry.choice("level", SEVERITIES)
            last = len(cases) == len(items) - 1
            if cases and SEVERITIES.index(level) <= SEVERITIES.index(cases[-1].level):
                raise entry.error("level", "severities go from worst to least")
            if last == ("when" in entry.value):
                raise entry.error("when", "every severity but the last has a condition (when), the last has none")
            cases.append(Case(level, None if last else self._condition(entry, "when", types)))
        if not cases:
            raise section.error("severity", "severity: at least one is expected")
        return tuple(cases)

    def _condition(self, section: _Section, key: str, types: TypeOf) -> Expression:
        value = section.value.get(key)
        parts = section.items(key) if isinstance(value, YamlList) else [(value, section.value.lines.get(key, 0))]
        if value is None or not parts:
            raise section.error(key, f"{key}: a condition is expected")
        texts: list[str] = []
        for part, line in parts:
            text = str(part).lower() if isinstance(part, bool) else part  # `when: true`
            if not isinstance(text, str):
                raise RuleError(f"{section.file.name}:{line}: {key}: a condition is expected")
            texts.append(text)
        if len(texts) > 1:
            for text, (_, line) in zip(texts, parts, strict=True):
                self._compile(section, key, line, text, types)  # for its own line in the message
        return self._compile(section, key, parts[0][1], texts, types)

    def _compile(self, section: _Section, key: str, line: int, text: str | list[str], types: TypeOf) -> Expression:
        try:
            return compile_condition(text, types, self._constants)
        except RuleError as error:
            raise RuleError(f"{section.file.name}:{line}: {key}: {error}") from None

    def _message(self, section: _Section, key: str, types: TypeOf, *, required: bool = False) -> Message:
        if key not in section.value and not required:
            return EMPTY
        try:
            return compile_message(section.text(key).strip(), types, self._constants)
        except RuleError as error:
            if str(error).startswith(f"{section.file.name}:"):
                raise
            raise section.error(key, f"{key}: {error}") from None

    def _types(self, scope: Scope) -> TypeOf:
        def type_of(name: str) -> FactType:
            first, _, rest = name.partition(".")
            if first == "threshold":
                threshold = self._thresholds.get(rest)
                if threshold is None:
                    raise RuleError(f"there is no threshold {rest}{near(rest, self._thresholds)}")
                self.used.add(rest)
                return FactType(name, "number", unit=threshold.unit)
            declared = self._schema.type_of(name)
            if scope == "host" and (first == "cluster" or rest.startswith("cluster.")):
                raise RuleError(f"{name} is a fact of a cluster, and the rule's scope is host")
            return declared

        return type_of
