"""What PostgreSQL's settings are, major by major: the files in catalogue/, written by packaging/make_catalogue.py.

They are asked of real servers: the union of the builds at hand, with the names and values that only a build option,
a distribution's patch or a later minor release brings.
"""

from __future__ import annotations

import os
from typing import Any

from pgpreemptcheck.values import record

FIRST, LAST = 13, 19
"""The majors that have a catalogue."""


@record
class Setting:
    """One setting: kind is b(ool), i(nteger), r(eal), s(tring) or e(num); `values` maps what is accepted to its name.

    Bounds and default are in `unit` (8kB, kB, B, MB, ms, s, min or none).
    """

    name: str
    kind: str
    context: str
    unit: str = ""
    low: float = 0
    high: float = 0
    default: Any = None
    values: dict[str, str] | None = None


class Catalogue:
    """The settings of one major."""

    def __init__(self, major: int, document: dict[str, Any]) -> None:
        self.major = major
        self._names: dict[str, list[Any]] = document["names"]
        self._spelling: dict[str, str] = document["spelling"]
        self._renamed: dict[str, str] = document["renamed"]
        self._optional_names = frozenset(document["optional_names"])
        self._optional_values: dict[str, list[str]] = document["optional_values"]
        self._absent_in: dict[str, str] = document["absent_in"]
        self._found: dict[str, Setting | None] = {}

    def find(self, name: str) -> Setting | None:
        """Return the setting of that name, old names included; names are case-insensitive."""
        key = name.lower()
        if key not in self._found:
            key_now = self._renamed.get(key, key)
            row = self._names.get(key_now)
            self._found[key] = None if row is None else Setting(self._spelling.get(key_now, key_now), *row)
        return self._found[key]

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def names(self) -> list[str]:
        """Return all names, as PostgreSQL spells them."""
        return [self._spelling.get(name, name) for name in self._names]

    def undecided_name(self, name: str) -> str | None:
        """Return why it cannot be said whether a server of this major takes the name, or None."""
        key = name.lower()
        if key in self._absent_in:
            return f'"{name}" came with a minor release of PostgreSQL {self.major} after {self._absent_in[key]}'
        if key in self._optional_names:
            return f'only some builds or minor releases of PostgreSQL {self.major} have "{name}"'
        return None

    def undecided_value(self, name: str, value: str) -> str | None:
        """Return why it cannot be said whether a server of this major takes that value of an enum, or None."""
        if value.lower() in self._optional_values.get(name.lower(), ()):
            return f"a build option decides whether PostgreSQL {self.major} takes {name} = {value}"
        return None

    def nearest(self, name: str) -> str | None:
        """Return the setting that a misspelt name was probably meant to be, or None."""
        import difflib

        plain = name.lower()
        spelt = {known.replace("_", ""): known for known in self._names}
        if plain.replace("_", "").replace("-", "") in spelt:
            return spelt[plain.replace("_", "").replace("-", "")]
        close = difflib.get_close_matches(plain, self._names, n=1, cutoff=0.8)
        return self._spelling.get(close[0], close[0]) if close else None


def nearest(major: int | None) -> int:
    """Return the catalogued major that is closest: one that is not known is read as the newest released."""
    return min(max(major if major is not None else 18, FIRST), LAST)


_loaded: dict[int, Catalogue] = {}


def load(major: int) -> Catalogue:
    """Return the catalogue of a major from 13 to 19 (kept after the first call)."""
    if major not in _loaded:
        import json

        path = os.path.join(os.path.dirname(__file__), "catalogue", f"{major}.json")
        # The loader of this module reads it from a folder and from a zip file alike.
        data: bytes = __spec__.loader.get_data(path)  # type: ignore[union-attr]
        _loaded[major] = Catalogue(major, json.loads(data))
    return _loaded[major]
