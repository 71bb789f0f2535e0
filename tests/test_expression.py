"""The `when:` language: the same answers as Jinja2, Kleene's logic over what is not known, nothing else reachable."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from pgpreemptcheck.engine.expression import (
    CERTAINTIES,
    MAX_DEPTH,
    MAX_LENGTH,
    UNKNOWN,
    Environment,
    Result,
    Undecided,
    compile_condition,
)
from pgpreemptcheck.engine.types import EvaluationError, FactType, RuleError
from pgpreemptcheck.values import Known, Unknown

NUMBERS = ("n.one", "n.two", "n.three")
TEXTS = ("t.one", "t.two")
FLAGS = ("f.one", "f.two", "f.three")
WORDS = ("lazy", "full", "none")


def any_type(name: str) -> FactType:
    return FactType(name, "any")


def environment(facts: Mapping[str, Any]) -> Environment:
    def find(name: str) -> Known[Any] | Unknown:
        value = facts.get(name, UNKNOWN)
        if isinstance(value, Known):
            return value
        return Unknown("not given") if value is UNKNOWN else Known(value, "given")

    return Environment(find)


def run(text: str, facts: Mapping[str, Any] | None = None) -> Result:
    return compile_condition(text, any_type).run(environment(facts or {}))


def value(text: str, **facts: Any) -> Any:
    return run(text, facts)[0]


# grammar ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True),
        ("False or True", True),
        ("not (1 == 1.0)", False),
        ('a == "1"', False),
        ("1 < 2 < 3", True),
        ("1 < 3 < 2", False),
        ("1 < 2 == 2 != 3", True),
        ("a + 2 * 3 == 7", True),
        ("-7 // 2 == -4 and 7 % 3 == 1 and 7 / 2 == 3.5", True),
        ("- -a == 1", True),
        ("+a == 1", True),
        ("a in [1, 2] and a not in [-1, 0.5]", True),
        ("t in ['lazy', \"full\"]", True),
        ("z == none and z in [none, 1]", True),
        ("z != None", False),
        ("a is defined and b is not defined", True),
        ("not a is defined", False),
        ("not b", UNKNOWN),
        ("a == 1\n  and\tt == 'lazy'", True),
        ("t == 'it is \"quoted\"  twice'", False),
        ("1e3 == 1000", True),
    ],
)
def test_value(text: str, expected: object) -> None:
    assert value(text, a=1, t="lazy", z=None) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "(", ")", "a ==", "a b", "a = 1", "a; b", "a # b", "a or\\\n b", "a == 'x", "a == 'x\\'y'",
        "a()", "a.b()", "a[0] == 1", "a.b.c[0]", "a | upper == 'A'", "a ** 2 == 4", "a @ b", "a & b", "~a", "a << 1",
        "a if b else c", "lambda: 1", "[x for x in a]", "{1: 2}", "{1}", "f'{a}' == a", "b'a' == a", "r'a' == a",
        "u'a' == a", "'a' 'b' == a", "'''a''' == a", "a := 1", "*a", "a, b", "(a, b)", "a in b", "a in (1, 2)",
        "a in []", "a in [b]", "a in [[1]]", "1_000 == a", "0x10 == a", "010 == a", "1j == a", "1e999 == a", "1. == a",
        "a is none", "a is b", "a is 1", "1 is defined", "a + 1 is defined", "a is defined is defined",
        "a is defined == true", "a == b is defined", "a in [1] == true", "a.b .c", "a..b", ".a", "a.", "ä == 1",
        "a == 'x\x00'", "a\x00", "await a", "yield", "not", "1", "'text'", "none", "1 + 1", "-'a' == 1", "'a' * 3 == a",
        "'%s' % a == a", "true + 1 == 2", "1 and 2", "a == ...", "__import__('os')", "a.__class__()",
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    with pytest.raises(RuleError) as error:
        compile_condition(text, any_type)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "a " * (MAX_LENGTH // 2 + 1),
        "(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1),
        "not " * (MAX_DEPTH + 1) + "a",
        "not " * (MAX_LENGTH // 4 - 1) + "a",
        "-" * (MAX_LENGTH - 6) + "1 == 1",
        "1" + " + 1" * (MAX_DEPTH + 1) + " == 1",
        "[" * MAX_LENGTH,
    ],
)
def test_bounds(text: str) -> None:
    with pytest.raises(RuleError, match=r"at most|deeper"):
        compile_condition(text, any_type)


def test_wide_is_not_deep() -> None:
    assert value(" or ".join(["a == 1"] * 200), a=1) is True


def test_names_are_looked_up_and_never_walked() -> None:
    asked: list[str] = []

    def find(name: str) -> Unknown:
        asked.append(name)
        return Unknown("no")

    expression = compile_condition("x.__class__.__mro__ == 1", any_type)
    assert expression.run(Environment(find))[0] is UNKNOWN
    assert asked == ["x.__class__.__mro__"]


def test_text_is_never_multiplied() -> None:
    with pytest.raises(EvaluationError):
        run("a * 1000 == b", {"a": "x", "b": "y"})


@pytest.mark.parametrize("text", ["a and true", "not a", "false or a"])
def test_no_truthiness(text: str) -> None:
    with pytest.raises(EvaluationError):
        run(text, {"a": 1})


def test_mixed_order_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="a"):
        run("a < 3", {"a": "x"})


# three values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("u == 1", UNKNOWN), ("u != 1", UNKNOWN), ("not u", UNKNOWN), ("u < 1", UNKNOWN), ("u in [1]", UNKNOWN),
        ("u + 1 == 2", UNKNOWN), ("1 < u < 0", UNKNOWN), ("2 < 1 < u", False),
        ("u == 1 or true", True), ("true or u == 1", True), ("u == 1 and false", False), ("false and u == 1", False),
        ("u == 1 and true", UNKNOWN), ("u == 1 or false", UNKNOWN),
    ],
)  # fmt: skip
def test_kleene(text: str, expected: object) -> None:
    assert value(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a / b > 1", "fault"), ("a // b > 1", "fault"), ("a % b > 1", "fault"), ("n < 3", "fault"),
        ("n + 1 == 2", "fault"),
        ("b != 0 and a / b > 1", False), ("a / b > 1 and b != 0", False), ("n == none or n < 3", True),
        ("n < 3 and u", UNKNOWN), ("u and n < 3", UNKNOWN), ("not (a / b > 1)", "fault"), ("a / b > u", UNKNOWN),
        ("n == none and n < 3", "fault"), ("a * 1e308 * 1e308 > 1", True), ("f / 1 == 1", "fault"),
    ],
)  # fmt: skip
def test_faults(text: str, expected: object) -> None:
    got = value(text, a=1, b=0, n=None, f=10**400)
    if expected == "fault":
        assert isinstance(got, Undecided) and got is not UNKNOWN and got.reason
    else:
        assert got is expected


# what decided -----------------------------------------------------------------------------------


def measured(value: object) -> Known[Any]:
    return Known(value, "s")


INFERRED, HEURISTIC = CERTAINTIES.index("inferred"), CERTAINTIES.index("heuristic")


def inferred(value: object) -> Known[Any]:
    return Known(value, "s", "inferred")


def heuristic(value: object) -> Known[Any]:
    return Known(value, "s", "heuristic")


@pytest.mark.parametrize(
    ("text", "facts", "expected"),
    [
        # all operands of a True `and`, the weakest of them
        ("a and b", {"a": measured(True), "b": inferred(True)}, (True, ("a", "b"), INFERRED)),
        # the False operands of a False `and`, the strongest of them
        (
            "a and b and c",
            {"a": heuristic(False), "b": inferred(False), "c": measured(True)},
            (False, ("a", "b"), INFERRED),
        ),
        ("a and b", {"a": inferred(True), "b": measured(False)}, (False, ("b",), 0)),
        # each False operand is as weak as its weakest part
        (
            "(a or b) and c",
            {"a": measured(False), "b": heuristic(False), "c": inferred(False)},
            (False, ("a", "b", "c"), INFERRED),
        ),
        # the True operands of a True `or`, the strongest
        (
            "a or b or c",
            {"a": heuristic(True), "b": measured(False), "c": inferred(True)},
            (True, ("a", "c"), INFERRED),
        ),
        ("a or b", {"a": measured(False), "b": heuristic(False)}, (False, ("a", "b"), HEURISTIC)),
        ("a or u", {"a": inferred(True)}, (True, ("a",), INFERRED)),
        ("a and u and v", {"a": measured(True)}, (UNKNOWN, ("u", "v"), 0)),
        ("a == u", {"a": inferred(1)}, (UNKNOWN, ("u",), 0)),
        ("not (a and b)", {"a": measured(True), "b": heuristic(False)}, (True, ("b",), HEURISTIC)),
        ("a + b > 2", {"a": inferred(1), "b": heuristic(2)}, (True, ("a", "b"), HEURISTIC)),
        ("a < b < c", {"a": measured(1), "b": inferred(2), "c": heuristic(3)}, (True, ("a", "b", "b", "c"), HEURISTIC)),
        ("a is defined", {"a": heuristic(1)}, (True, ("a",), 0)),
        ("u is defined", {}, (False, ("u",), 0)),
    ],
)  # fmt: skip
def test_what_decided(text: str, facts: dict[str, Any], expected: Result) -> None:
    assert run(text, facts) == expected


def test_a_list_is_joined_by_and() -> None:
    expression = compile_condition(["a or b", "c"], any_type)
    assert expression.run(environment({"a": True, "b": False, "c": False}))[:2] == (False, ("c",))
    assert expression.text == "(a or b) and (c)"
    assert expression.names == ("a", "b", "c")


def test_a_constant_weakens_what_rests_on_it() -> None:
    constants = {"threshold.cpus": Known(64, "reason", "heuristic")}
    expression = compile_condition("cpus >= threshold.cpus", any_type, constants)
    assert expression.run(environment({"cpus": 96})) == (True, ("cpus", "threshold.cpus"), HEURISTIC)


# types ------------------------------------------------------------------------------------------

TYPES = {
    t.name: t
    for t in (
        FactType("mode", "text", ("none", "lazy")),
        FactType("title", "text"),
        FactType("maybe", "text", nullable=True),
        FactType("bytes", "integer", unit="bytes"),
        FactType("pages", "integer", unit="pages"),
        FactType("limit", "integer", unit="bytes", nullable=True),
        FactType("cpus", "integer", unit="CPUs"),
        FactType("connections", "integer", unit="connections"),
        FactType("share", "number"),
        FactType("running", "boolean"),
        FactType("pools", "list"),
        FactType("server", "object"),
    )
}


def known_type(name: str) -> FactType:
    if name not in TYPES:
        raise RuleError(f"there is no fact {name}")
    return TYPES[name]


@pytest.mark.parametrize(
    "text",
    [
        'mode == "lazy"', 'mode in ["none", "lazy"]', "mode == title", "maybe == none", "running",
        "maybe in [none, 'x']",
        "bytes > 3 and limit > bytes and bytes / limit > 0.5", "connections > 4 * cpus", "pages * 4096 > 1",
        "pools is defined and server is not defined", "share * bytes > limit", "bytes // pages == 4096", "-bytes < 0",
        "bytes + 1 > limit - bytes", "limit != none", "running == true", "1 < share < 2",
    ],
)  # fmt: skip
def test_types_accepted(text: str) -> None:
    compile_condition(text, known_type)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mode == "lasy"', "one of none, lazy"),
        ('mode in ["lazy", "ful"]', "ful"),
        ('"ful" == mode', "ful"),
        ("mode == none", "never none"),
        ("mode == 1", "cannot equal"),
        ("bytes == '1'", "cannot equal"),
        ("bytes > '1'", "takes numbers"),
        ("title < 'b'", "takes numbers"),
        ("bytes < none", "takes numbers"),
        ("bytes", "no condition"),
        ("not title", "no condition"),
        ("running and share", "no condition"),
        ("running == 1", "cannot equal"),
        ("running < true", "takes numbers"),
        ("bytes > pages", "bytes .* pages"),
        ("bytes + pages > 1", "bytes .* pages"),
        ("bytes > cpus", "bytes .* CPUs"),
        ("title + 1 == 2", "arithmetic"),
        ("running * 2 == 2", "arithmetic"),
        ("pools == 1", "only be asked"),
        ("server == none", "only be asked"),
        ("nothing is defined", "no fact"),
        ("running or nothing", "no fact"),
        ("bytes in [1, 'x']", "cannot equal"),
    ],
)
def test_types_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        compile_condition(text, known_type)


# properties -------------------------------------------------------------------------------------


class Maker:
    """Random expressions of the whole grammar over the facts above."""

    def __init__(self, seed: int, *, defined: bool = True) -> None:
        self.random = random.Random(seed)
        self.defined = defined

    def number(self, depth: int) -> str:
        pick = self.random.random()
        if depth <= 0 or pick < 0.6:
            literals = ["0", "1", "2", "3", "2.5", "-1"]
            return self.random.choice(NUMBERS if pick < 0.4 else literals)
        if pick < 0.7:
            divided = f"{self.random.choice(['/', '//', '%'])} {self.random.choice(['2', '3', '1.5'])}"
            return f"{self.number(depth - 1)} {divided}"
        if pick < 0.75:
            return f"-{self.random.choice(NUMBERS)}"
        inner = f"{self.number(depth - 1)} {self.random.choice('+-*')} {self.number(depth - 1)}"
        return f"({inner})" if pick < 0.9 else inner

    def atom(self, depth: int) -> str:
        pick = self.random.random()
        if pick < 0.2:
            return self.random.choice([*FLAGS, "true", "false"])
        if pick < 0.45:
            operators = ["==", "!=", "<", "<=", ">", ">="]
            parts = [self.number(depth)]
            for _ in range(self.random.choice([1, 1, 1, 2])):
                parts += [self.random.choice(operators), self.number(depth)]
            return " ".join(parts)
        if pick < 0.6:
            right = self.random.choice(["t.two", "'lazy'"])
            return f"{self.random.choice(TEXTS)} {self.random.choice(['==', '!='])} {right}"
        if pick < 0.85 or not self.defined:
            word = self.random.choice(["in", "not in"])
            if self.random.random() < 0.5:
                return f"{self.random.choice(TEXTS)} {word} {self.random.sample(WORDS, 2)}"
            return f"{self.number(0)} {word} [1, -1, 2.5]"
        return f"{self.random.choice(NUMBERS)} is {self.random.choice(['', 'not '])}defined"

    def condition(self, depth: int) -> str:
        pick = self.random.random()
        if depth <= 0 or pick < 0.25:
            return self.atom(depth)
        if pick < 0.4:
            return f"not {self.bracket(depth - 1)}"
        word = self.random.choice([" and ", " or "])
        return word.join(self.bracket(depth - 1) for _ in range(self.random.choice([2, 2, 3])))

    def bracket(self, depth: int) -> str:
        inner = self.condition(depth)
        return f"({inner})" if self.random.random() < 0.6 else inner

    def facts(self) -> dict[str, Any]:
        made: dict[str, Any] = {name: self.random.choice([-1, 0, 1, 2, 3, 2.5]) for name in NUMBERS}
        made.update((name, self.random.choice(WORDS)) for name in TEXTS)
        made.update((name, self.random.random() < 0.5) for name in FLAGS)
        return made


@pytest.mark.parametrize("batches", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_the_same_answers_as_jinja2(batches: int) -> None:
    """100 expressions a batch, all facts known: Ansible's own evaluator gives the same answers."""
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is the oracle of this test")
    maker = Maker(7)
    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined)
    answers = {True: 0, False: 0}
    for _ in range(batches):
        facts = maker.facts()
        nested: dict[str, dict[str, Any]] = {}
        for name, known in facts.items():
            first, _, rest = name.partition(".")
            nested.setdefault(first, {})[rest] = known
        texts = [maker.condition(3) for _ in range(100)]
        ours = [run(text, facts)[0] for text in texts]
        theirs = jinja.compile_expression("[" + ", ".join(f"({text})" for text in texts) + "]")(**nested)
        for text, mine, other in zip(texts, ours, theirs, strict=True):
            assert mine is other, (text, facts)
            answers[mine] += 1
    assert min(answers.values()) > 20 * batches  # neither answer is rare, so that agreement says something


def test_what_is_decided_stays_decided() -> None:
    """Whatever unknown facts turn out to be; and the deciding names alone are enough."""
    maker = Maker(11, defined=False)
    decided = 0
    for _ in range(4000):
        expression = compile_condition(maker.condition(3), any_type)
        facts = maker.facts()
        hidden = {name: known for name, known in facts.items() if maker.random.random() < 0.5}
        result, names, _ = expression.run(environment(hidden))
        if result is UNKNOWN:
            assert names and not set(names) & set(hidden)
            continue
        decided += 1
        for _ in range(4):
            assert expression.run(environment({**maker.facts(), **hidden}))[0] is result, expression.text
        only = {name: known for name, known in hidden.items() if name in names}
        assert expression.run(environment(only))[0] is result, expression.text
    assert decided > 1000


def test_what_is_unknown_can_become_either() -> None:
    """Where each fact stands once: no unknown that is really decided."""
    maker = random.Random(13)
    unknown = 0

    def build(atoms: list[str]) -> str:
        if len(atoms) == 1:
            return atoms[0]
        cut = maker.randrange(1, len(atoms))
        text = f"({build(atoms[:cut])}) {maker.choice(['and', 'or'])} ({build(atoms[cut:])})"
        return f"not ({text})" if maker.random() < 0.3 else text

    for _ in range(600):
        names = [f"a{index}" for index in range(maker.randrange(1, 6))]
        shapes = ["{} > 0", "{} == 1", "{} in [1]", "not ({} != 1)", "{} + 1 >= 2", "0 < {} < 2"]
        expression = compile_condition(build([maker.choice(shapes).format(name) for name in names]), any_type)
        known = {name: maker.choice([0, 1]) for name in names if maker.random() < 0.5}
        open_names = [name for name in names if name not in known]
        filled = {
            expression.run(environment({**known, **dict(zip(open_names, values, strict=True))}))[0]
            for values in itertools.product((0, 1), repeat=len(open_names))
        }
        result = expression.run(environment(known))[0]
        if result is UNKNOWN:
            unknown += 1
            assert filled == {True, False}, expression.text
        else:
            assert filled == {result}, expression.text
    assert unknown > 200
