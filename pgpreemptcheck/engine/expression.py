"""The language of `when:`: a strict subset of the Jinja (and so Ansible) expression grammar, with three values.

Grammar: `and or not ( )`, `== != < <= > >=` (chained too), `in` and `not in` a literal list, `+ - * / // %` on
numbers, numbers, quoted text, `true false none`, dotted fact names, `NAME is defined`, `NAME is not defined`.
There are no calls, filters, indexes or attributes, so nothing can be reached but the facts. The text is valid
Python and valid Jinja2 at once and means the same in both; it is parsed by `ast` and compiled into closures.

Three values: a fact that is not known makes every operator over it unknown, but `and`, `or` and `not` are Kleene's:
`unknown and false` is false. A division by zero, or arithmetic or `<` on a null, is a fault: it is absorbed as an
unknown is (`x != none and x < 3` is sound in either order), and is an error of the rule where the result rests on it.
Operands of `and`, `or` and `not` must be true or false: there is no truthiness.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pgpreemptcheck.engine.types import EvaluationError, FactType, RuleError
from pgpreemptcheck.values import Certainty, Known, Unknown, record

MAX_LENGTH = 2000
MAX_DEPTH = 40

CERTAINTIES: tuple[Certainty, ...] = ("measured", "assumed", "inferred", "heuristic")
"""By rank: 0 is the strongest."""
_RANK = {certainty: rank for rank, certainty in enumerate(CERTAINTIES)}


class Undecided:
    """A value that is none: UNKNOWN, or a fault with its reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"Undecided({self.reason!r})"


UNKNOWN = Undecided("unknown")

Result = tuple[Any, tuple[str, ...], int]
"""A value (or Undecided), the names that decided it (for UNKNOWN: the unknown ones), and the rank of its certainty."""


class Environment(dict[str, Result]):
    """The facts of one subject as expressions see them, each looked up once."""

    def __init__(self, lookup: Callable[[str], Known[Any] | Unknown]) -> None:
        self._lookup = lookup
        self.facts: dict[str, Known[Any] | Unknown] = {}
        self.told: dict[str, Any] = {}  # the evidence of each fact (evaluate.py), made once for all rules

    def __missing__(self, name: str) -> Result:
        fact = self.fact(name)
        if isinstance(fact, Known):
            result: Result = (fact.value, (name,), _RANK[fact.certainty])
        else:
            result = (UNKNOWN, (name,), 0)
        self[name] = result
        return result

    def fact(self, name: str) -> Known[Any] | Unknown:
        """Return the fact itself, with its source or reason."""
        fact = self.facts.get(name)
        if fact is None:
            fact = self.facts[name] = self._lookup(name)
        return fact


Run = Callable[[Environment], Result]
TypeOf = Callable[[str], FactType]
"""Returns the type of a name, or raises RuleError for a name that is none."""


@record
class Expression:
    """A compiled condition: `run(environment)` returns its Result; `names` are the facts it reads."""

    text: str
    names: tuple[str, ...]
    run: Run


def compile_condition(
    text: str | Sequence[str], type_of: TypeOf, constants: Mapping[str, Known[Any]] | None = None
) -> Expression:
    """Return the compiled condition (a list is joined by `and`), checked against the types of the names in it.

    `constants` are names with a fixed value (thresholds). Raises RuleError.
    """
    parts = [text] if isinstance(text, str) else list(text)
    compiler = _Compiler(type_of, constants or {})
    runs = [compiler.condition(_parse(part), 0) for part in parts]
    run = runs[0] if len(runs) == 1 else _junction(runs, decisive=False)
    return Expression(" and ".join(parts) if len(parts) == 1 else _join(parts), tuple(compiler.names), run)


def _join(parts: Sequence[str]) -> str:
    return " and ".join(f"({part})" for part in parts)


# parsing ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<name>[A-Za-z_][A-Za-z_0-9]*(?:\.[A-Za-z_][A-Za-z_0-9]*)*)
      | (?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
      | (?P<text>"[^"\\\x00-\x1f]*"|'[^'\\\x00-\x1f]*')
      | (?P<operator>[()\[\],]|[=!<>]=|<|>|//|[-+*/%])
    )""",
    re.VERBOSE,
)


def _parse(text: str) -> ast.expr:
    """Return the syntax tree. The tokens are checked first: no more of Python's grammar gets through."""
    if len(text) > MAX_LENGTH:
        raise RuleError(f"an expression has at most {MAX_LENGTH} characters")
    position = depth = 0
    before = ""
    end = len(text.rstrip())
    while position < end:
        token = _TOKEN.match(text, position)
        if token is None:
            rest = text[position:].lstrip()
            what = "a quote is not closed or has a backslash before" if rest[0] in "\"'" else "an expression has no"
            raise RuleError(f"{what} {rest[:12]!r}")
        kind = token.lastgroup or ""
        if kind == "text" and before == "text":
            raise RuleError("two texts stand side by side, an operator is expected between them")
        if kind != "operator" and before not in ("", "operator") and token.start(kind) == position:
            raise RuleError(f"an operator or a blank is expected before {token[kind][:12]!r}")
        if kind == "operator":
            word = token["operator"]
            depth += (word in "([") - (word in ")]")
            if depth > MAX_DEPTH:
                raise RuleError(f"an expression is nested at most {MAX_DEPTH} deep")
        before = kind
        position = token.end()
    if not before:
        raise RuleError("an expression is expected")
    try:
        return ast.parse(re.sub(r"\s", " ", text).strip(), mode="eval").body
    except SyntaxError as error:
        place = f" near {text[max(0, error.offset - 1) :][:12]!r}" if error.offset else ""
        raise RuleError(f"not an expression: {error.msg}{place}") from None
    except (ValueError, RecursionError, MemoryError):
        raise RuleError(f"not an expression, or nested deeper than {MAX_DEPTH}") from None


# compiling --------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """A compiled operand with what is known of it beforehand. Kind `null` is the literal none."""

    run: Run
    kind: str
    source: str  # how the author wrote it, for messages
    type: FactType | None = None
    constant: Any = None
    unit: str = ""


_COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_LITERALS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
_COUNTS = {"CPUs", "connections", "nodes", "backends"}  # numbers of things, which may be held against each other


class _Compiler:
    def __init__(self, type_of: TypeOf, constants: Mapping[str, Known[Any]]) -> None:
        self._type_of = type_of
        self._constants = constants
        self.names: dict[str, None] = {}

    def condition(self, node: ast.expr, depth: int) -> Run:
        """Compile an operand that must be true or false."""
        operand = self.operand(node, depth)
        if operand.kind not in ("boolean", "any") or (operand.type is not None and operand.type.nullable):
            raise RuleError(f"{operand.source} is no condition (true or false), but {_kind(operand)}")
        return operand.run

    def operand(self, node: ast.expr, depth: int) -> _Operand:
        if depth > MAX_DEPTH:
            raise RuleError(f"an expression is nested at most {MAX_DEPTH} deep")
        depth += 1
        if isinstance(node, ast.BoolOp):
            runs = [self.condition(value, depth) for value in node.values]
            return _Operand(_junction(runs, decisive=isinstance(node.op, ast.Or)), "boolean", "this condition")
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Not):
                return _Operand(_negation(self.condition(node.operand, depth)), "boolean", "not ...")
            if isinstance(node.op, (ast.USub, ast.UAdd)):
                inner = self._number(node.operand, depth)
                if isinstance(node.op, ast.UAdd):
                    return inner
                zero = _Operand(_constant(0), "number", "0")
                constant = -inner.constant if inner.constant is not None else None
                run = _constant(constant) if constant is not None else _arithmetic(operator.sub, zero.run, inner.run)
                return inner._replace(run=run, constant=constant, source=f"-{inner.source}", type=None)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._binary(node, depth)
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.Constant):
            return _literal(node.value)
        name = _dotted(node)
        if name in _LITERALS:
            return _literal(_LITERALS[name])
        if name:
            return self._fact(name)
        raise RuleError(f"an expression has no {_construct(node)}")

    def _fact(self, name: str) -> _Operand:
        declared = self._type_of(name)
        self.names[name] = None
        constant = self._constants.get(name)
        if constant is not None:
            result: Result = (constant.value, (name,), _RANK[constant.certainty])
            run: Run = lambda _: result  # noqa: E731
        else:
            run = operator.itemgetter(name)
        kind = "number" if declared.kind == "integer" else declared.kind
        return _Operand(run, kind, name, declared, None, declared.unit)

    def _number(self, node: ast.expr, depth: int) -> _Operand:
        operand = self.operand(node, depth)
        if operand.kind not in ("number", "any"):
            raise RuleError(f"arithmetic takes numbers, but {operand.source} is {_kind(operand)}")
        return operand

    def _binary(self, node: ast.BinOp, depth: int) -> _Operand:
        left, right = self._number(node.left, depth), self._number(node.right, depth)
        symbol, function = _ARITHMETIC[type(node.op)]
        unit = left.unit or right.unit
        if symbol in "+-%":
            _same_unit(left, right)
        elif right.unit and (left.unit or symbol in ("/", "//")):
            unit = ""  # a product or ratio of two measures: not followed further
        source = f"{left.source} {symbol} {right.source}"
        return _Operand(_arithmetic(function, left.run, right.run), "number", source, unit=unit)

    def _comparison(self, node: ast.Compare, depth: int) -> _Operand:
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return self._defined(node)
        operands = [node.left, *node.comparators]
        runs: list[Run] = []
        left = None
        for op, left_node, right_node in zip(node.ops, operands, node.comparators, strict=False):
            # where chained, `a < b < c` is `a < b and b < c`: facts do not change in between
            left = left or self.operand(left_node, depth)
            if isinstance(op, (ast.In, ast.NotIn)):
                if len(node.ops) > 1:
                    raise RuleError("`in` is not chained with other comparisons: use brackets and `and`")
                runs.append(self._membership(left, right_node, isinstance(op, ast.NotIn)))
                continue
            right = self.operand(right_node, depth)
            symbol, function = _COMPARISONS[type(op)]
            _comparable(left, symbol, right)
            runs.append(_compare(function, left.run, right.run))
            left = right
        run = runs[0] if len(runs) == 1 else _junction(runs, decisive=False)
        return _Operand(run, "boolean", "this comparison")

    def _membership(self, left: _Operand, node: ast.expr, negated: bool) -> Run:
        if not isinstance(node, ast.List) or not node.elts:
            raise RuleError('`in` takes a literal list: x in ["a", "b"]')
        values = []
        for element in node.elts:
            item = self.operand(element, 0)
            if item.kind != "null" and item.constant is None:
                raise RuleError(f"a list holds literals only, not {item.source}")
            _comparable(left, "==", item)
            values.append(item.constant)
        listed = tuple(values)
        run = left.run

        def member(environment: Environment) -> Result:
            value, names, rank = run(environment)
            if value.__class__ is Undecided:
                return (value, names, rank)
            return ((value in listed) is not negated, names, rank)

        return member

    def _defined(self, node: ast.Compare) -> _Operand:
        name, word = _dotted(node.left), _dotted(node.comparators[0])
        if len(node.ops) > 1 or not name or name in _LITERALS or word != "defined":
            raise RuleError("`is` is only used as: NAME is defined, NAME is not defined (use == for values)")
        self._type_of(name)
        if name in self._constants:
            raise RuleError(f"{name} is always defined")
        self.names[name] = None
        negated = isinstance(node.ops[0], ast.IsNot)

        def defined(environment: Environment) -> Result:
            return ((environment[name][0] is not UNKNOWN) is not negated, (name,), 0)

        return _Operand(defined, "boolean", f"{name} is defined")


def _dotted(node: ast.expr) -> str:
    """Return a dotted name as written, or nothing for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def _construct(node: ast.AST) -> str:
    names = {
        "Call": "calls",
        "Subscript": "indexes",
        "List": "lists except after `in`",
        "Tuple": "commas outside a list",
        "IfExp": "if ... else",
        "Lambda": "functions",
    }
    return names.get(type(node).__name__, f"such construct ({type(node).__name__})")


def _literal(value: Any) -> _Operand:
    if value is None:
        return _Operand(_constant(None), "null", "none")
    if isinstance(value, bool):
        return _Operand(_constant(value), "boolean", str(value).lower(), constant=value)
    if isinstance(value, str):
        return _Operand(_constant(value), "text", repr(value), constant=value)
    if isinstance(value, (int, float)) and math.isfinite(value):
        return _Operand(_constant(value), "number", str(value), constant=value)
    raise RuleError(f"{value!r} is no number, text, true, false or none")


def _kind(operand: _Operand) -> str:
    if operand.type is not None:
        return operand.type.label()
    return {"null": "none"}.get(operand.kind, operand.kind)


def _comparable(left: _Operand, symbol: str, right: _Operand) -> None:
    """Refuse a comparison that can only be a mistake: other types, other units, a text that never occurs."""
    for operand in (left, right):
        if operand.kind in ("list", "object"):
            raise RuleError(f"{operand.source} is {_kind(operand)}: it can only be asked whether it is defined")
    if "any" in (left.kind, right.kind):
        return
    if symbol not in ("==", "!="):
        for operand in (left, right):
            if operand.kind != "number":
                raise RuleError(f"{symbol} takes numbers, but {operand.source} is {_kind(operand)}")
    elif "null" in (left.kind, right.kind):
        other = left if right.kind == "null" else right
        if other.type is not None and not other.type.nullable:
            raise RuleError(f"{other.source} is never none (for a fact that is not known: is not defined)")
        return
    elif left.kind != right.kind:
        raise RuleError(f"{left.source} ({_kind(left)}) cannot equal {right.source} ({_kind(right)})")
    for fact, other in ((left, right), (right, left)):
        values = fact.type.values if fact.type is not None else None
        if values is not None and other.constant is not None and other.constant not in values:
            raise RuleError(f"{fact.source} is never {other.source}: it is one of {', '.join(values)}")
    _same_unit(left, right)


def _same_unit(left: _Operand, right: _Operand) -> None:
    units = {"count" if unit in _COUNTS else unit for unit in (left.unit, right.unit) if unit}
    if len(units) > 1:
        raise RuleError(f"{left.source} is in {left.unit}, but {right.source} is in {right.unit}")


# running ----------------------------------------------------------------------------------------


def _constant(value: Any) -> Run:
    result: Result = (value, (), 0)
    return lambda _: result


def _undecided(left: Result, right: Result) -> Result:
    """Return the result of an operator with an undecided operand: unknown before a fault."""
    unknown = tuple(name for value, names, _ in (left, right) if value is UNKNOWN for name in names)
    if unknown:
        return (UNKNOWN, unknown, 0)
    fault = left if isinstance(left[0], Undecided) else right
    return (fault[0], left[1] + right[1], 0)


def _compare(function: Callable[[Any, Any], Any], left: Run, right: Run) -> Run:
    def compare(environment: Environment) -> Result:
        one, two = left(environment), right(environment)
        a, b = one[0], two[0]
        if a.__class__ is Undecided or b.__class__ is Undecided:
            return _undecided(one, two)
        try:
            value = function(a, b)
        except TypeError:
            if a is None or b is None:
                return (Undecided("none is compared with a number"), one[1] + two[1], 0)
            raise EvaluationError(f"{a!r} cannot be compared with {b!r} ({', '.join(one[1] + two[1])})") from None
        return (value, one[1] + two[1], max(one[2], two[2]))

    return compare


def _arithmetic(function: Callable[[Any, Any], Any], left: Run, right: Run) -> Run:
    def calculate(environment: Environment) -> Result:
        one, two = left(environment), right(environment)
        a, b = one[0], two[0]
        if a.__class__ is Undecided or b.__class__ is Undecided:
            return _undecided(one, two)
        names = one[1] + two[1]
        for operand in (a, b):
            if operand is None:
                return (Undecided("arithmetic on none"), names, 0)
            if operand.__class__ not in (int, float):  # text and lists could be multiplied without bound
                raise EvaluationError(f"{operand!r} is no number ({', '.join(names)})")
        try:
            value = function(a, b)
        except ArithmeticError as error:
            return (Undecided(str(error)), names, 0)
        return (value, names, max(one[2], two[2]))

    return calculate


def _negation(inner: Run) -> Run:
    def negate(environment: Environment) -> Result:
        value, names, rank = inner(environment)
        if value is True or value is False:
            return (not value, names, rank)
        if value.__class__ is Undecided:
            return (value, names, rank)
        raise EvaluationError(f"{value!r} is neither true nor false ({', '.join(names)})")

    return negate


def _junction(parts: Sequence[Run], *, decisive: bool) -> Run:
    """Return `or` (True decides) or `and` (False decides).

    Names and certainty: where one operand decides, the operands that do, and the strongest of them; where all have
    to hold together, all of them, and the weakest.
    """

    def join(environment: Environment) -> Result:
        deciding: list[Result] = []
        agreeing: tuple[str, ...] = ()
        unknown: tuple[str, ...] = ()
        fault: Result | None = None
        weakest = 0
        for part in parts:
            result = part(environment)
            value, names, rank = result
            if value is decisive:
                deciding.append(result)
            elif value is True or value is False:
                agreeing += names
                if rank > weakest:
                    weakest = rank
            elif value is UNKNOWN:
                unknown += names
            elif value.__class__ is Undecided:
                fault = result
            else:
                raise EvaluationError(f"{value!r} is neither true nor false ({', '.join(names)})")
        if deciding:
            if len(deciding) == 1:
                return deciding[0]
            names = tuple(name for _, some, _ in deciding for name in some)
            return (decisive, names, min(rank for _, _, rank in deciding))
        if unknown:
            return (UNKNOWN, unknown, 0)
        if fault is not None:
            return fault
        return (not decisive, agreeing, weakest)

    return join
