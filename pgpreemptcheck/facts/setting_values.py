"""What a value means to PostgreSQL: numbers, units, truth and bounds, in the words of each major.

Follows guc.c and bool.c of PostgreSQL 13 to 19. What strings hold: see setting_strings.py.
"""

from __future__ import annotations

import re
from typing import Any

from pgpreemptcheck.facts import setting_strings
from pgpreemptcheck.facts.catalogue import Catalogue, Setting
from pgpreemptcheck.values import record

_INT_MAX = 2147483647
_SPACE = " \t\n\v\f\r"

_UNITS: dict[str, tuple[tuple[str, float], ...]] = {  # largest first, as memory_unit_conversion_table and its twin
    "B": (("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10), ("B", 1)),
    "kB": (("TB", 1 << 30), ("GB", 1 << 20), ("MB", 1 << 10), ("kB", 1), ("B", 1 / 1024)),
    "8kB": (("TB", 1 << 27), ("GB", 1 << 17), ("MB", 1 << 7), ("kB", 1 / 8), ("B", 1 / 8192)),
    "MB": (("TB", 1 << 20), ("GB", 1 << 10), ("MB", 1), ("kB", 1 / 1024), ("B", 1 / (1 << 20))),
    "ms": (("d", 86400000), ("h", 3600000), ("min", 60000), ("s", 1000), ("ms", 1), ("us", 1 / 1000)),
    "s": (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1 / 1000), ("us", 1 / 1e6)),
    "min": (("d", 1440), ("h", 60), ("min", 1), ("s", 1 / 60), ("ms", 1 / 60000), ("us", 1 / 6e7)),
}
BYTES = {"B": 1, "kB": 1024, "8kB": 8192, "MB": 1 << 20}

_STRTOL = re.compile(r"[ \t\n\v\f\r]*([+-]?)(?:0[xX]([0-9A-Fa-f]+)|0([0-7]*)|([1-9][0-9]*))", re.A)
_STRTOD = (  # compiled where it is first needed
    r"[ \t\n\v\f\r]*([+-]?(?:0[xX](?:[0-9A-Fa-f]+\.?[0-9A-Fa-f]*|\.[0-9A-Fa-f]+)(?:[pP][+-]?[0-9]+)?"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?"
    r"|[nN][aA][nN](?:\([A-Za-z0-9_]*\))?))"
)
_BINARY = re.compile(r"[ \t\n\v\f\r]*[+-]?0[bB][01]", re.A)


def parse_bool(text: str) -> bool | None:
    """Return parse_bool's answer (utils/adt/bool.c): on, off, 1, 0 and unique beginnings of true, false, yes, no."""
    low = text.lower()
    if not low or not low.isascii():
        return None
    if "true".startswith(low) or "yes".startswith(low) or low in ("on", "1"):
        return True
    if "false".startswith(low) or "no".startswith(low) or low in ("off", "of", "0"):
        return False
    return None


def _strtod(text: str) -> tuple[float, int] | None:
    """Return C's strtod: the number and where it ends; None where it finds none or the number is out of range."""
    found = re.match(_STRTOD, text)
    if found is None:
        return None
    number = found[1]
    if "x" in number or "X" in number:
        try:
            value = float.fromhex(number)
        except OverflowError:
            return None
    else:
        value = float(number.partition("(")[0])
    finite = number.lstrip("+-")[:1] not in ("i", "I", "n", "N")
    digits = re.split("[eEpP]", number)[0] if "x" not in number.lower() else number.lower().split("x")[1].split("p")[0]
    zero = not digits.strip("+-0.")
    if finite and (value in (float("inf"), float("-inf")) or (abs(value) < 2.2250738585072014e-308 and not zero)):
        return None  # ERANGE
    return value, found.end()


def _in_base_unit(value: float, text: str, base: str) -> float | None:
    """convert_to_base_unit: fractions are rounded to the next smaller unit."""
    unit = text.strip(_SPACE)
    table = _UNITS.get(base)
    if table is None or len(unit) > 3:
        return None
    for index, (name, factor) in enumerate(table):
        if name == unit:
            converted = value * factor
            if abs(converted) == float("inf"):
                return None
            if index + 1 < len(table):
                smaller = table[index + 1][1]
                converted = round(converted / smaller) * smaller
            return converted
    return None


def parse_integer(text: str, unit: str) -> int | None:
    """Return parse_int's answer in the base unit: hex, octal, fractions and units; None where it is refused."""
    found = _STRTOL.match(text)
    value: float
    if found:
        sign, hexadecimal, octal, decimal = found.groups()
        if hexadecimal is not None:
            whole = int(hexadecimal, 16)
        elif decimal is not None:
            whole = int(decimal) if len(decimal) < 25 else 1 << 64
        else:
            whole = int(octal, 8) if octal else 0
        value, end = float(-whole if sign == "-" else whole) if whole < 1 << 64 else 0.0, found.end()
    else:
        whole, value, end = 0, 0.0, 0
    if text[end : end + 1] in (".", "e", "E") or whole > (1 << 63) - 1:
        real = _strtod(text)
        if real is None:
            return None
        value, end = real
    elif not found:
        return None
    if value != value:
        return None
    rest = text[end:].lstrip(_SPACE)
    if rest:
        converted = _in_base_unit(value, rest, unit)
        if converted is None:
            return None
        value = converted
    if abs(value) > _INT_MAX + 2.0:
        return None
    result = round(value)
    return result if -_INT_MAX - 1 <= result <= _INT_MAX else None


def parse_real(text: str, unit: str) -> float | None:
    """Return parse_real's answer in the base unit; None where it is refused."""
    found = _strtod(text)
    if found is None or found[0] != found[0]:
        return None
    value, end = found
    rest = text[end:].lstrip(_SPACE)
    return _in_base_unit(value, rest, unit) if rest else value


@record
class Judged:
    """What the server makes of a value: the value, or its message, or why that cannot be said here."""

    value: Any = None
    message: str | None = None
    undecided: str | None = None


def judge(setting: Setting, text: str, written: str, known: Catalogue) -> Judged:
    """parse_and_validate_value, in the words of that major; `written` is the name as the file has it."""
    major = known.major
    shown = setting.name if major >= 18 else written
    invalid = f'invalid value for parameter "{shown}": "{text}"'
    hooked = f'invalid value for parameter "{setting.name}": "{text}"'  # check hooks always use the proper name
    if setting.context == "internal":
        return Judged(message=f'parameter "{shown}" cannot be changed')
    if setting.kind == "b":
        truth = parse_bool(text)
        if truth is None:
            return Judged(message=f'parameter "{shown}" requires a Boolean value')
        if setting.values is not None and ("on" if truth else "off") not in setting.values:  # default_with_oids
            return Judged(message="tables declared WITH OIDS are not supported")
        if truth and setting.name == "bonjour":
            return Judged(truth, undecided="a build option decides whether PostgreSQL takes bonjour = on")
        return Judged(truth)
    if setting.kind == "e":
        values = setting.values or {}
        if text.lower() in values:
            return Judged(values[text.lower()], undecided=known.undecided_value(setting.name, text))
        why = known.undecided_value(setting.name, text)
        # what is listed nowhere has no values but what its check hook takes
        return Judged(undecided=why) if why else Judged(message=invalid if setting.default else hooked)
    if setting.kind in "ir":
        if setting.kind == "i" and _BINARY.match(text):
            return Judged(undecided="the C library decides whether PostgreSQL takes binary numbers (0b...)")
        number = (parse_integer if setting.kind == "i" else parse_real)(text, setting.unit)
        if number is None:
            return Judged(message=invalid)
        if not setting.low <= number <= setting.high:
            unit = f" {setting.unit}" if setting.unit else ""
            within = unit if major >= 17 else ""
            low, high = _number(setting, setting.low), _number(setting, setting.high)
            return Judged(
                message=f"{_number(setting, number)}{unit} is outside the valid range for parameter "
                f'"{shown}" ({low}{within} .. {high}{within})'
            )
        if setting.name == "wal_buffers" and 0 <= number < 4:
            number = 4  # check_wal_buffers raises it silently
        if not _right_size(setting.name, number):
            return Judged(message=f'invalid value for parameter "{setting.name}": {_number(setting, number)}')
        return Judged(number, undecided=_decided_elsewhere(setting.name, number))
    content = setting_strings.taken(setting.name, text, major)
    if content.decided is False:
        return Judged(message=content.message or hooked)
    if content.decided is None:
        return Judged(text, undecided=f"whether PostgreSQL takes this value of {setting.name} is not checked")
    return Judged(text)


def _number(setting: Setting, number: float) -> str:
    if setting.kind == "i":
        return str(int(number))
    return ("-" if number < 0 else "") + "Infinity" if abs(number) == float("inf") else f"{number:g}"


_SLRU_BUFFERS = (
    "commit_timestamp_buffers",
    "multixact_member_buffers",
    "multixact_offset_buffers",
    "notify_buffers",
    "serializable_buffers",
    "subtransaction_buffers",
    "transaction_buffers",
)


def _right_size(name: str, number: float) -> bool:
    """Return what the check hooks say that look at one number only."""
    if name in _SLRU_BUFFERS:
        return number % 16 == 0
    if name == "vacuum_buffer_usage_limit":
        return number == 0 or number >= 128
    return True


def _decided_elsewhere(name: str, number: float) -> str | None:
    """Return what else decides whether the server takes that number, or None."""
    if name == "max_stack_depth" and number > 7680:  # 512 kB below the usual limit of 8 MB
        return "the postmaster's limit on its stack (ulimit -s) decides whether it takes that max_stack_depth"
    return None
