"""What the modules of the engine share: the type of a fact, and the two ways in which a rule can be wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pgpreemptcheck.errors import UserError
from pgpreemptcheck.values import record

Kind = Literal["boolean", "integer", "number", "text", "list", "object", "any"]
"""list and object: facts with parts, of which a rule can only ask whether they are defined. any: not declared."""


class RuleError(UserError):
    """A rule file that cannot be used; the message is one line that says what is expected, and where."""


class EvaluationError(Exception):
    """A rule that erred on the facts it was given (a value of another type than declared)."""


@record
class FactType:
    """The declared type of a fact: what a rule may compare it with."""

    name: str
    kind: Kind
    values: tuple[str, ...] | None = None
    """The texts that it can have, None where any text is possible."""
    unit: str = ""
    doc: str = ""
    nullable: bool = False

    def label(self) -> str:
        """Return the type in words, for people who write rules."""
        words: str = {"list": "list (is defined)", "object": "object (is defined)"}.get(self.kind, self.kind)
        if self.values is not None:
            words = " | ".join(f'"{value}"' for value in self.values)  # quoted: the mode "none" is a text
        return f"{words} | none" if self.nullable else words

    def accepts(self, value: Any) -> bool:
        """Return whether a value is one that this fact can have."""
        if value is None:
            return self.nullable
        if self.kind in ("any", "list", "object"):
            return True
        if self.kind == "boolean":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and (self.values is None or value in self.values)
        numbers = int if self.kind == "integer" else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)


def near(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for a misspelt word, or nothing where nothing is near."""
    import difflib

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""
