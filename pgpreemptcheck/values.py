"""Known values and gaps: what every reader returns and every rule compares.

A fact is either `Known` (a value, where it was read, and how sure that is) or `Unknown` (why not,
and what would settle it). Nothing else: a reader never raises for what is missing and never guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, Union

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda function: function


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Certainty = Literal["measured", "assumed", "inferred", "heuristic"]
"""measured: read off the thing itself. assumed: the user says so (--assume), and wants to know what then follows.
inferred: follows from something read. heuristic: a cut-off of ours."""

GapKind = Literal[
    "absent",  # it does not exist (on a capture: it is not in the capture)
    "permission",  # EACCES: another user, or root, could read it
    "lockdown",  # EPERM for root: the kernel refuses everybody
    "too-large",  # larger than the bound of this read
    "not-text",  # bytes that are no text
    "unsupported",  # this kind of host cannot answer (SQL on a capture, say)
    "other",
]


@dataclass(frozen=True)
class Known(Generic[T_co]):
    """A value with its source, in words or as a path (`/proc/meminfo`, `sql pg_settings`, `FILE line 7`)."""

    value: T_co
    source: str
    certainty: Certainty = "measured"


@dataclass(frozen=True)
class Unknown:
    """A gap: the reason in one sentence, and a hint: the one action that would close it (may be empty)."""

    reason: str
    hint: str = ""
    kind: GapKind = "other"


Fact = Union[Known[T], Unknown]


def is_number(text: str) -> bool:
    """Return whether a text is a whole number that any counter could have: ASCII digits, twenty at most.

    Files of a capture, and those that other users write, can hold anything; int() raises above 4300 digits.
    """
    return text.isascii() and text.isdigit() and len(text) <= 20


def measured(*, unit: str = "", doc: str = "") -> Any:
    """Declare a dataclass field that holds a fact, with its unit (bytes, seconds, pages, share, ...) and meaning.

    The fact schema (engine/schema.py) is derived from these declarations and from the annotations.
    """
    return field(metadata={"unit": unit, "doc": doc})


@dataclass_transform(frozen_default=True, field_specifiers=(measured, field))
def record(cls: type[T]) -> type[T]:
    """Declare a frozen dataclass of facts. The same as `@dataclass(frozen=True)`, at a fifth of its start-up cost.

    dataclasses compiles six methods for every class, about a millisecond each; these are shared by all instead. It
    also makes a text for a class without one, which costs as much as all the rest.
    """
    cls.__doc__ = cls.__doc__ or cls.__name__  # where there is none, dataclass() makes one with inspect.signature
    made: Any = dataclass(init=False, repr=False, eq=False)(cls)
    made._names = frozenset(made.__match_args__)
    made.__init__, made.__repr__ = _init, _repr
    made.__eq__, made.__hash__ = _equal, _hash
    made.__setattr__ = made.__delattr__ = _refuse
    return made  # type: ignore[no-any-return]


def _init(self: Any, *values: Any, **named: Any) -> None:
    names: tuple[str, ...] = self.__match_args__
    own = self.__dict__
    own.update(zip(names, values, strict=False))
    own.update(named)
    if len(own) < len(values) + len(named):
        raise TypeError(f"{type(self).__name__} takes {', '.join(names)}, each once")
    if own.keys() != self._names:
        for name in names:
            if name not in own:
                own[name] = getattr(type(self), name)  # the default; AttributeError names the field that has none
        if len(own) > len(names):
            raise TypeError(f"{type(self).__name__} takes {', '.join(names)}")


def _repr(self: Any) -> str:
    parts = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
    return f"{type(self).__name__}({parts})"


def _equal(self: Any, other: object) -> bool:
    return type(self) is type(other) and self.__dict__ == other.__dict__


def _hash(self: Any) -> int:
    return hash(tuple(self.__dict__.values()))


def _refuse(self: Any, name: str, *_: Any) -> NoReturn:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")
