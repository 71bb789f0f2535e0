"""The command line of a postmaster: what its options set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pgpreemptcheck.facts import catalogue
from pgpreemptcheck.facts.setting_values import judge
from pgpreemptcheck.values import Fact, Known, Unknown

_OPTIONS_WITH_VALUE = "BcCDdfhkNprStWv"
_OPTION_SETTINGS = {
    "B": "shared_buffers",
    "h": "listen_addresses",
    "k": "unix_socket_directories",
    "N": "max_connections",
    "p": "port",
    "S": "work_mem",
    "W": "post_auth_delay",
}
_FLAG_SETTINGS = {
    "F": ("fsync", "false"),
    "i": ("listen_addresses", "*"),
    "l": ("ssl", "true"),
    "O": ("allow_system_table_mods", "true"),
    "P": ("ignore_system_indexes", "true"),
    "s": ("log_statement_stats", "true"),
}


def options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what a postmaster's command line says, in order: letter and value, "-" and the text of a long option.

    `argv` has the program first; a flag's value is empty. The letters are those of PostmasterMain (13 to 19).
    """
    words = iter(argv[1:])
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            yield "-", word[2:]
            continue
        letters = word[1:] if word.startswith("-") else ""
        while letters:
            letter, letters = letters[0], letters[1:]
            value = ""
            if letter in _OPTIONS_WITH_VALUE:
                value, letters = letters or next(words, ""), ""
            yield letter, value


def option_values(argv: Sequence[str]) -> list[tuple[str, str | None, str]]:
    """Return what a postmaster's command line sets, in order: name, value (None: it has none), and the option."""
    found: list[tuple[str, str | None, str]] = []
    for letter, value in options(argv):
        if letter in "-c":
            found.append(_assignment(value, "-c" if letter == "c" else "--"))
        elif letter in _FLAG_SETTINGS:
            found.append((*_FLAG_SETTINGS[letter], f"-{letter}"))
        elif letter in _OPTION_SETTINGS:
            found.append((_OPTION_SETTINGS[letter], value, f"-{letter}"))
    return found


def _assignment(text: str, option: str) -> tuple[str, str | None, str]:
    """ParseLongOption: `name=value`, dashes of the name are underscores."""
    name, equals, value = text.partition("=")
    return name.replace("-", "_"), value if equals else None, f"{option} {text}" if option == "-c" else f"--{text}"


def command_line(argv: Sequence[str], major: int | None) -> dict[str, Fact[Any]]:
    """Return the settings that a postmaster's command line gives, by name, in PostgreSQL's base units."""
    known = catalogue.load(catalogue.nearest(major))
    found: dict[str, Fact[Any]] = {}
    for name, value, _ in option_values(argv):
        setting = known.find(name)
        if setting is None or value is None:
            continue
        judged = judge(setting, value, name, known)
        if judged.message is None and judged.value is not None:
            found[setting.name] = Known(judged.value, "command line")
        else:
            found[setting.name] = Unknown(judged.message or judged.undecided or f"{name} is not understood")
    return found
