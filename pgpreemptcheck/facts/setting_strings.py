"""What PostgreSQL makes of the contents of string settings at a start: their check hooks, as far as they can be told.

Followed are the hooks that look at the text alone (PostgreSQL 13 to 19: variable.c, xlogrecovery.c, xlog.c,
syncrep_gram.y, slot.c, namespace.c, tablespace.c). What only that host's server can say (locales, libraries, paths) is
not looked at; of values that a hook would look up in a table of its own, those surely in it are told from the others.
"""

from __future__ import annotations

import re

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Known, record


@record
class Taken:
    """Whether PostgreSQL takes a value; None where that is not checked. `message`: its own, if it has a special one."""

    decided: bool | None
    message: str | None = None


_YES, _NO, _UNCHECKED = Taken(True), Taken(False), Taken(None)


def taken(name: str, text: str, major: int) -> Taken:
    """Return whether PostgreSQL `major` takes this value of a string setting (`name` as PostgreSQL spells it)."""
    check = _CHECKS.get(name)
    return check(text, major) if check else _YES


# lists --------------------------------------------------------------------------------------------


def _space(major: int) -> str:
    return " \t\n\r\f\v" if major >= 17 else " \t\n\r\f"


def identifiers(text: str, major: int) -> list[str] | None:
    """Return SplitIdentifierString's answer (varlena.c): names and "names" with commas between; None for no list."""
    space, other = f"[{_space(major)}]*", f"[^,{_space(major)}]"
    each = f'(?:"((?:[^"]|"")*)"|((?!"){other}+))'
    if re.fullmatch(space, text):
        return []
    if not re.fullmatch(f"{space}{each}{space}(?:,{space}{each}{space})*", text):
        return None
    found = re.finditer(each, text)
    return [
        quoted.replace('""', '"') if plain is None else plain.lower() for quoted, plain in (m.groups() for m in found)
    ]


def _list(text: str, major: int) -> Taken:
    return _NO if identifiers(text, major) is None else _YES


def _log_destination(text: str, major: int) -> Taken:
    return _words(text, major, {"stderr", "csvlog", "syslog", *(["jsonlog"] if major >= 15 else [])})


def _words(text: str, major: int, known: set[str]) -> Taken:
    words = identifiers(text, major)
    return Taken(words is not None and {word.lower() for word in words} <= known)


def _restrict_relations(text: str, major: int) -> Taken:
    return _words(text, major, {"view", "foreign-table"})


def _self_grant(text: str, major: int) -> Taken:
    return _words(text, major, {"set", "inherit"})


_RESOURCE_MANAGERS = {
    *("all", "heap2", "heap", "btree", "hash", "gin", "gist", "sequence", "spgist", "brin", "generic", "xlog")
}


def _wal_consistency(text: str, major: int) -> Taken:
    words = identifiers(text, major)
    if words is None:
        return _NO
    return _YES if {word.lower() for word in words} <= _RESOURCE_MANAGERS - {"xlog"} else _UNCHECKED


def _log_connections(text: str, major: int) -> Taken:
    words = identifiers(text, major)
    if words is None:
        return _NO
    aspects = {"receipt", "authentication", "authorization", "setup_durations", "all"}
    alone = text.lower() in ("on", "off", "true", "false", "yes", "no", "1", "0")
    return _YES if alone or {word.lower() for word in words} <= aspects else _UNCHECKED


def _date_style(text: str, major: int) -> Taken:
    words = identifiers(text, major)
    if words is None:
        return _NO
    styles, orders = set(), set()
    for word in (word.lower() for word in words):
        if word in ("iso", "sql", "german") or word.startswith("postgres"):
            styles.add(word[:3])
        elif word in ("ymd", "dmy", "mdy", "us") or word.startswith(("euro", "noneuro")):
            orders.add("mdy" if word.startswith(("us", "noneuro")) else "dmy" if word.startswith("euro") else word)
        elif word != "default":
            return _NO
    return Taken(len(styles) < 2 and len(orders) < 2)


# recovery -----------------------------------------------------------------------------------------


def _recovery_target(text: str, major: int) -> Taken:
    return Taken(text in ("", "immediate"))


def _recovery_lsn(text: str, major: int) -> Taken:
    return Taken(text == "" or bool(re.fullmatch("[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}", text)))


def _recovery_name(text: str, major: int) -> Taken:
    return Taken(_size(text) < 64)  # MAXFNAMELEN


_TIME = (  # ISO 8601, which reads the same under every DateStyle
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[ T]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.[0-9]{1,6})?)?"
    r"(?: ?(?:UTC|GMT|[+-](?:0[0-9]|1[0-4])(?::?[0-5][0-9])?))?)?"
)
_NO_TIMES = ("now", "today", "tomorrow", "yesterday", "epoch", "infinity", "-infinity")


def _recovery_time(text: str, major: int) -> Taken:
    if text in _NO_TIMES:  # in small letters
        return _NO
    found = re.fullmatch(_TIME, text)
    if text and not found:
        return _UNCHECKED
    year, month, day, hour, minute, second = (
        (int(part or 0) for part in found.groups()) if found else (1, 1, 1, 0, 0, 0)
    )
    plain = year >= 1 and 1 <= month <= 12 and 1 <= day <= 28 and hour < 24 and minute < 60 and second < 60
    # what is no date is refused, but days 29 to 31 and leap seconds are not counted here
    return _YES if plain else _NO if found and (month > 12 or day > 31 or not month or not day) else _UNCHECKED


def _recovery_timeline(text: str, major: int) -> Taken:
    if not text:
        return Taken(major < 19)
    return _YES if re.fullmatch("latest|current|[1-9][0-9]{0,8}", text) else _UNCHECKED


def _recovery_xid(text: str, major: int) -> Taken:
    return _YES if not text or re.fullmatch("[1-9][0-9]{1,8}", text) else _UNCHECKED


# names --------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _slot(text: str, major: int) -> Taken:
    return Taken(bool(re.fullmatch("[a-z0-9_]{0,63}", text)))


def _slots(text: str, major: int) -> Taken:
    names = identifiers(text, major)
    if names is None:
        return _NO
    return _YES if all(re.fullmatch("[a-z0-9_]{1,63}", name) for name in names) else _UNCHECKED


def _access_method(text: str, major: int) -> Taken:
    return Taken(text != "")  # a long one is cut


def _backtrace(text: str, major: int) -> Taken:
    return Taken(bool(re.fullmatch("[0-9A-Za-z_, \n\t]*", text)))


_STANDBY_TOKEN = (  # syncrep_scanner.l
    r"(?P<space>[ \t\n\r\f\v]+)|(?P<n>[0-9]+)|(?P<p>[,()])"
    r'|(?P<a>[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9$\x80-\U0010ffff]*|\*|"(?:[^"]|"")*")'
)


def _standby_names(text: str, major: int) -> Taken:
    """syncrep_gram.y: `[[FIRST | ANY] NUMBER (] NAME, ... [)]`."""
    pattern = re.compile(_STANDBY_TOKEN)
    kinds, position, count = "", 0, ""
    while position < len(text):
        token = pattern.match(text, position)
        if token is None:
            return _NO
        position = token.end()
        kind = str(token.lastgroup)
        if kind == "p":
            kinds += token[0]
        elif kind != "space":
            kinds += "f" if token[0].lower() in ("first", "any") else kind
            count = count or (token[0] if kind == "n" else "")
    names = "[na](?:,[na])*"
    if not text or re.fullmatch(names, kinds):  # blanks alone are refused
        return _YES
    if not re.fullmatch(rf"f?n\({names}\)", kinds):
        return _NO
    if len(count) > 9:
        return _UNCHECKED
    if int(count) == 0:
        return Taken(False, f"number of synchronous standbys ({int(count)}) must be greater than zero")
    return _YES


# tables of the server's own -----------------------------------------------------------------------


def _encoding(text: str, major: int) -> Taken:
    name = re.sub("[^a-z0-9]", "", text.lower())
    return (
        _YES
        if re.fullmatch("utf8|unicode|sqlascii|latin(?:[1-9]|10)|win125[0-8]|euc(?:jp|cn|kr|tw)", name)
        else _UNCHECKED
    )


def _abbreviations(text: str, major: int) -> Taken:
    return _YES if text in ("Default", "Australia", "India") else _UNCHECKED


def _zone(text: str, major: int) -> Taken:
    if not text:
        return _NO
    return _YES if re.fullmatch(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*", text) else _UNCHECKED


def _levels(text: str, major: int) -> Taken:
    """From 19 on a list with a level for each type of process; before that it is no string."""
    levels = "debug[1-5]?|info|notice|warning|error|log|fatal|panic"
    return _YES if re.fullmatch(levels, text.lower()) else _UNCHECKED


def _direct_io(text: str, major: int) -> Taken:
    return _UNCHECKED if text else _YES


_CHECKS = {
    "DateStyle": _date_style,
    "TimeZone": _zone,
    "backtrace_functions": _backtrace,
    "client_encoding": _encoding,
    "createrole_self_grant": _self_grant,
    "debug_io_direct": _direct_io,
    "default_table_access_method": _access_method,
    "log_connections": _log_connections,
    "log_destination": _log_destination,
    "log_min_messages": _levels,
    "log_timezone": _zone,
    "primary_slot_name": _slot,
    "recovery_target": _recovery_target,
    "recovery_target_lsn": _recovery_lsn,
    "recovery_target_name": _recovery_name,
    "recovery_target_time": _recovery_time,
    "recovery_target_timeline": _recovery_timeline,
    "recovery_target_xid": _recovery_xid,
    "restrict_nonsystem_relation_kind": _restrict_relations,
    "search_path": _list,
    "synchronized_standby_slots": _slots,
    "synchronous_standby_names": _standby_names,
    "temp_tablespaces": _list,
    "timezone_abbreviations": _abbreviations,
    "wal_consistency_checking": _wal_consistency,
}

# time zones ---------------------------------------------------------------------------------------

ZONE_SETTINGS = ("TimeZone", "log_timezone")
_ZONES = "/usr/share/zoneinfo"


def zone_doubt(host: Host, text: str) -> str | None:
    """Return why a server of that host may not know a time zone, or None.

    The server has a table of its own or the system's; a zone that the system does not know is the doubtful one. Where
    the system has no table at all nothing speaks against the zone.
    """
    if text == "GMT" or not isinstance(host.status(_ZONES), Known):
        return None
    if not text.lower().startswith(("posix", "right/")):  # variants that a table of PostgreSQL's own has not
        if _is_zone(host, f"{_ZONES}/{text}"):
            return None
        path = _ZONES
        for part in text.split("/"):  # the server takes no account of case
            names = host.list(path)
            same = [name for name in names.value if name.lower() == part.lower()] if isinstance(names, Known) else []
            path = f"{path}/{same[0] if same else part}"
        if _is_zone(host, path):
            return None
    return f"this host's table of time zones has no {text}, and PostgreSQL may have none either"


def _is_zone(host: Host, path: str) -> bool:
    head = host.read_range(path, 0, 4)
    return isinstance(head, Known) and head.value == b"TZif"
