"""PostgreSQL's settings: what the files and the command line say, as that major version reads them.

The order is the server's own (guc.c, guc-file.l, postmaster.c of 13 to 19): the command line first, where the first
objection ends the start; then postgresql.conf with its includes; then postgresql.auto.conf; then every name; then the
value of each setting's last line, also of one that the command line overrides; then what the values must be together.
Only the first of these stages that finds fault is reported, as in the server's log.

Not judged, since only that host's server can: locales, libraries, paths. What strings hold: see setting_strings.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal, NamedTuple

from pgpreemptcheck.facts import catalogue, conffile, control, setting_strings
from pgpreemptcheck.facts.catalogue import Catalogue, Setting
from pgpreemptcheck.facts.conffile import Entry, Rights
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, measured, record

HugePagesSetting = Literal["on", "off", "try"]


def _later(*, unit: str = "", doc: str = "") -> Any:
    return field(default=Unknown("not read"), metadata={"unit": unit, "doc": doc})


@record
class Settings:
    """The settings that decide anything here. Memory is bytes, times are seconds, the rest as PostgreSQL has it."""

    shared_buffers: Fact[int] = measured(unit="bytes")
    huge_pages: Fact[HugePagesSetting] = measured()
    huge_page_size: Fact[int] = measured(unit="bytes", doc="0: the kernel's default size")
    max_connections: Fact[int] = measured(unit="connections")
    shared_memory_type: Fact[Literal["mmap", "sysv"]] = measured()
    superuser_reserved_connections: Fact[int] = measured(unit="connections")
    autovacuum_max_workers: Fact[int] = measured()
    max_worker_processes: Fact[int] = measured()
    max_wal_senders: Fact[int] = measured()
    max_prepared_transactions: Fact[int] = measured()
    max_locks_per_transaction: Fact[int] = measured()
    max_replication_slots: Fact[int] = measured()
    wal_buffers: Fact[int] = measured(unit="bytes", doc="-1: derived from shared_buffers")
    shared_preload_libraries: Fact[str] = measured()
    port: Fact[int] = measured()
    reserved_connections: Fact[int] = _later(unit="connections", doc="0 before 16")
    autovacuum_worker_slots: Fact[int] = _later(doc="0 before 18")
    max_pred_locks_per_transaction: Fact[int] = _later()
    min_dynamic_shared_memory: Fact[int] = _later(unit="bytes", doc="part of the main segment; 0 before 14")
    track_activity_query_size: Fact[int] = _later(unit="bytes", doc="for each allowed backend")
    hot_standby: Fact[bool] = _later(doc="a standby answers queries, and must not be below its primary's limits")


_SINCE = {
    "huge_page_size": 14,
    "min_dynamic_shared_memory": 14,
    "reserved_connections": 16,
    "autovacuum_worker_slots": 18,
}
"""The major that brought a setting; before it the value is 0, which is what that server does."""


@record
class StartError:
    """PostgreSQL's first objection to its files: file, line (null where it names none) and its own reason."""

    file: str | None
    line: int | None
    reason: str
    suggestion: str | None = None
    """The name that a misspelt one was probably meant to be."""


@record
class FileSettings:
    """What the next start would take from the files and the command line."""

    accepted: Fact[bool] = measured(doc="PostgreSQL takes the files")
    error: StartError | None = measured()
    settings: Settings = measured()
    newest_change: Fact[float] = measured(unit="seconds", doc="latest modification of a file read, epoch seconds")
    given: Mapping[str, str] = measured(doc="every setting that a file sets, as its last line has it")
    errors: tuple[StartError, ...] = ()
    """All objections that the server would log before it gives up; `error` is the first."""


# values -------------------------------------------------------------------------------------------

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
_BYTES = {"B": 1, "kB": 1024, "8kB": 8192, "MB": 1 << 20}

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


class _Judged(NamedTuple):
    """What the server makes of a value: the value, or its message, or why that cannot be said here."""

    value: Any = None
    message: str | None = None
    undecided: str | None = None


def _judge(setting: Setting, text: str, written: str, known: Catalogue) -> _Judged:
    """parse_and_validate_value, in the words of that major; `written` is the name as the file has it."""
    major = known.major
    shown = setting.name if major >= 18 else written
    invalid = f'invalid value for parameter "{shown}": "{text}"'
    hooked = f'invalid value for parameter "{setting.name}": "{text}"'  # check hooks always use the proper name
    if setting.context == "internal":
        return _Judged(message=f'parameter "{shown}" cannot be changed')
    if setting.kind == "b":
        truth = parse_bool(text)
        if truth is None:
            return _Judged(message=f'parameter "{shown}" requires a Boolean value')
        if setting.values is not None and ("on" if truth else "off") not in setting.values:  # default_with_oids
            return _Judged(message="tables declared WITH OIDS are not supported")
        if truth and setting.name == "bonjour":
            return _Judged(truth, undecided="a build option decides whether PostgreSQL takes bonjour = on")
        return _Judged(truth)
    if setting.kind == "e":
        values = setting.values or {}
        if text.lower() in values:
            return _Judged(values[text.lower()], undecided=known.undecided_value(setting.name, text))
        why = known.undecided_value(setting.name, text)
        # what is listed nowhere has no values but what its check hook takes
        return _Judged(undecided=why) if why else _Judged(message=invalid if setting.default else hooked)
    if setting.kind in "ir":
        if setting.kind == "i" and _BINARY.match(text):
            return _Judged(undecided="the C library decides whether PostgreSQL takes binary numbers (0b...)")
        number = (parse_integer if setting.kind == "i" else parse_real)(text, setting.unit)
        if number is None:
            return _Judged(message=invalid)
        if not setting.low <= number <= setting.high:
            unit = f" {setting.unit}" if setting.unit else ""
            within = unit if major >= 17 else ""
            low, high = _number(setting, setting.low), _number(setting, setting.high)
            return _Judged(
                message=f"{_number(setting, number)}{unit} is outside the valid range for parameter "
                f'"{shown}" ({low}{within} .. {high}{within})'
            )
        if setting.name == "wal_buffers" and 0 <= number < 4:
            number = 4  # check_wal_buffers raises it silently
        if not _right_size(setting.name, number):
            return _Judged(message=f'invalid value for parameter "{setting.name}": {_number(setting, number)}')
        return _Judged(number, undecided=_decided_elsewhere(setting.name, number))
    content = setting_strings.taken(setting.name, text, major)
    if content.decided is False:
        return _Judged(message=content.message or hooked)
    if content.decided is None:
        return _Judged(text, undecided=f"whether PostgreSQL takes this value of {setting.name} is not checked")
    return _Judged(text)


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


# the command line ---------------------------------------------------------------------------------

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


def option_values(argv: Sequence[str]) -> list[tuple[str, str | None, str]]:
    """Return what a postmaster's command line sets, in order: name, value (None: it has none), and the option.

    `argv` has the program first. The letters are those of PostmasterMain (13 to 19).
    """
    found: list[tuple[str, str | None, str]] = []
    pending = list(argv[1:])[::-1]
    while pending:
        argument = pending.pop()
        if argument == "--":
            break
        if argument.startswith("--"):
            found.append(_assignment(argument[2:], argument.partition("=")[0]))
            continue
        letters = argument[1:] if argument.startswith("-") else ""
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in _FLAG_SETTINGS:
                found.append((*_FLAG_SETTINGS[letter], f"-{letter}"))
            if letter not in _OPTIONS_WITH_VALUE:
                continue
            value = letters or (pending.pop() if pending else "")
            letters = ""
            if letter == "c":
                found.append(_assignment(value, "-c"))
            elif letter in _OPTION_SETTINGS:
                found.append((_OPTION_SETTINGS[letter], value, f"-{letter}"))
    return found


def _assignment(text: str, option: str) -> tuple[str, str | None, str]:
    """ParseLongOption: `name=value`, dashes of the name are underscores."""
    name, equals, value = text.partition("=")
    return name.replace("-", "_"), value if equals else None, f"{option} {text}" if option == "-c" else f"--{text}"


def _nearest_major(major: int | None) -> int:
    """Return the catalogued major that is closest: one that is not known is read as the newest released."""
    return min(max(major if major is not None else 18, catalogue.FIRST), catalogue.LAST)


def command_line(argv: Sequence[str], major: int | None) -> dict[str, Fact[Any]]:
    """Return the settings that a postmaster's command line gives, by name, in PostgreSQL's base units."""
    known = catalogue.load(_nearest_major(major))
    found: dict[str, Fact[Any]] = {}
    for name, value, _ in option_values(argv):
        setting = known.find(name)
        if setting is None or value is None:
            continue
        judged = _judge(setting, value, name, known)
        if judged.message is None and judged.value is not None:
            found[setting.name] = Known(judged.value, "command line")
        else:
            found[setting.name] = Unknown(judged.message or judged.undecided or f"{name} is not understood")
    return found


# reading ------------------------------------------------------------------------------------------


def read(
    host: Host,
    *,
    data_directory: str,
    config_file: str | None,
    major: int | None,
    argv: Sequence[str] = (),
    fork: str | None = None,
    environment: Mapping[str, str] | None = None,
    rights: Rights = "other",
) -> FileSettings:
    """Return what the next start would take from the files in `data_directory` (or `config_file`) and from `argv`.

    `argv` is a postmaster's command line, its program first; of `environment` only PGPORT counts. `fork` is the name
    of a PostgreSQL fork, if one was seen: its names and values may differ, so they are never refused here. `rights` is
    whose rights `host` reads with: what the server may not read either is refused, or passed over, as it would do.
    """
    return _Start(host, data_directory, config_file, major, argv, fork, environment or {}, rights).outcome()


def lines(host: Host, *, data_directory: str, config_file: str | None, major: int | None) -> tuple[Entry, ...]:
    """Return every line of the files that sets something, in the order in which PostgreSQL reads them."""
    return tuple(_Start(host, data_directory, config_file, major, (), None, {}).reading.entries)


class _Start:
    """One start in thought: the stages of the server's own, each adding to `errors`, `undecided` and `values`."""

    def __init__(
        self,
        host: Host,
        data_directory: str,
        config_file: str | None,
        major: int | None,
        argv: Sequence[str],
        fork: str | None,
        environment: Mapping[str, str],
        rights: Rights = "other",
    ) -> None:
        self.host = host
        self.rights = rights
        self.major = major
        self.fork = fork
        self.environment = environment
        self.directory: str | None = None  # where the files say that the data are
        self.known = catalogue.load(_nearest_major(major))
        self.catalogued = major is not None and catalogue.FIRST <= major <= catalogue.LAST
        self.reading = conffile.Reading()
        self.errors: list[StartError] = []
        self.undecided: list[str] = []
        self.values: dict[str, Fact[Any]] = {}
        self.numbers: dict[str, Any] = {}  # what is in force so far: for the check hooks that look at others

        self.arguments(argv)
        self.from_command_line = dict(self.values)
        given = self.values.get("config_file")
        path = config_file or (given.value if isinstance(given, Known) else None)
        self.main = path or os.path.join(data_directory, "postgresql.conf")
        self.files(data_directory)
        self.judge_files()
        if not self.errors:
            self.check_together()
        if not self.errors and not self.reading.gaps:
            self.check_wal_sizes()

    # stages -------------------------------------------------------------------------------------

    def arguments(self, argv: Sequence[str]) -> None:
        port = self.port_of_environment()
        if port is not None and port.message is not None:
            self.refuse(port.message)
        for name, value, option in option_values(argv):
            if name in ("single", "boot", "check", "describe_config", "version", "help") and value is None:
                continue
            if value is None:
                self.refuse(f"{option} requires a value")
                continue
            setting = self.known.find(name)
            if setting is None:
                self.unknown_name(name, None)
                continue
            self.take(setting, value, name, None, "command line")
        del self.errors[1:]  # the first one ends the start

    def files(self, data_directory: str) -> None:
        reading, major = self.reading, self.known.major
        conffile.read(self.host, self.main, major, reading, rights=self.rights)
        if not reading.files and not reading.gaps and reading.complaints[:1] and reading.complaints[0].file is None:
            why = reading.complaints[0].message.rpartition(": ")[2]
            reading.complaints.clear()
            if isinstance(self.host.status(self.main), Known):
                reading.complain(f'could not open configuration file "{self.main}": {why}', None, None)
            elif self.host.live:
                reading.complain(f'could not access the server configuration file "{self.main}": {why}', None, None)
            else:
                reading.failed.append((0, f"{self.main} is not there"))
                reading.gaps.append((0, Unknown(f"{self.main} is not in the capture", kind="absent")))
        self.main_complaints = len(reading.complaints)
        directory: str | None = data_directory
        chosen = [e for e in reading.entries if e.name.lower() == "data_directory" and e.value is not None]
        given = self.from_command_line.get("data_directory")
        if isinstance(given, Known):
            directory = given.value
        elif chosen:
            directory = chosen[-1].value
        if not directory or not directory.startswith("/"):
            gap = Unknown(f"data_directory = {directory} is relative to where PostgreSQL is started")
            reading.gaps.append((len(reading.entries), gap))
            return
        self.directory = directory
        auto = os.path.join(directory, "postgresql.auto.conf")
        conffile.read(self.host, auto, major, reading, strict=False, rights=self.rights)

    def judge_files(self) -> None:
        reading = self.reading
        complaints = reading.complaints[: self.main_complaints] or reading.complaints
        if not self.errors:
            self.errors += [StartError(c.file, c.line, c.message) for c in complaints]
        stopped = bool(self.errors)
        last: dict[str, tuple[int, Entry]] = {}  # by spelling: `PORT` does not make the server forget a bad `port`
        for index, entry in enumerate(reading.entries):
            if entry.name in self.known:
                last[entry.name] = index, entry
            elif "." not in entry.name and entry.value is not None and not stopped:
                self.unknown_name(entry.name, entry)
        if self.errors:
            stopped = True
        for index, entry in sorted(last.values(), key=lambda found: found[0]):
            setting = self.known.find(entry.name)
            if setting is not None:
                self.take_line(setting, entry, index, stopped)

    def take_line(self, setting: Setting, entry: Entry, index: int, stopped: bool) -> None:
        """Judge a setting's last line; once `stopped`, the server does not come to it, and only its value counts."""
        later = [gap for at, gap in self.reading.gaps if at > index]
        if entry.value is None:
            why = next((c.message for c in self.reading.complaints if (c.file, c.line) == (entry.file, entry.line)), "")
            fact: Fact[Any] = Unknown(why or f"{entry.file} line {entry.line} is refused")
            if setting.name not in self.from_command_line:
                self.values[setting.name] = fact
            return
        if stopped or later:
            judged = _judge(setting, entry.value, entry.name, self.known)
            if later and not stopped and (judged.message or judged.undecided):
                self.undecided.append(f"{later[0].reason}, which may set {setting.name} again")
            if setting.name in self.from_command_line:
                return
            if later:
                self.values[setting.name] = later[0]
            elif judged.message or judged.value is None:
                self.values[setting.name] = Unknown(judged.message or judged.undecided or "")
            else:
                self.values[setting.name] = Known(judged.value, f"{entry.file} line {entry.line}")
            return
        self.take(setting, entry.value, entry.name, entry, f"{entry.file} line {entry.line}")

    def take(self, setting: Setting, value: str, written: str, entry: Entry | None, source: str) -> None:
        judged = _judge(setting, value, written, self.known)
        message = judged.message
        if message is None and judged.undecided is None:
            message = self.objection(setting.name, judged.value)
        overridden = entry is not None and setting.name in self.from_command_line
        undecided = judged.undecided or self.known.undecided_name(setting.name)
        if undecided is None and message is None and setting.name in setting_strings.ZONE_SETTINGS:
            undecided = setting_strings.zone_doubt(self.host, value)
        if message is None and undecided:
            self.undecided.append(undecided)
        if message is not None:
            self.refuse(message, entry, value_only=True)
        elif not overridden:
            self.numbers[setting.name] = judged.value
        if overridden:
            return
        if message is not None or judged.value is None:
            self.values[setting.name] = Unknown(message or judged.undecided or "")
        else:
            self.values[setting.name] = Known(judged.value, source)

    def unknown_name(self, name: str, entry: Entry | None) -> None:
        """A name that is no setting's: with a dot an extension's, else refused unless this cannot be said."""
        if "." in name:
            if self.known.major >= 14 and not _is_custom_name(name):
                self.refuse(f'invalid configuration parameter name "{name}"', entry)
            return
        why = self.known.undecided_name(name)
        if why:
            self.undecided.append(why)
            return
        where = f' in file "{entry.file}" line {entry.line}' if entry else ""
        self.refuse(f'unrecognized configuration parameter "{name}"{where}', entry, value_only=True, suggest=name)

    def refuse(
        self, message: str, entry: Entry | None = None, *, value_only: bool = False, suggest: str | None = None
    ) -> None:
        """Note an objection; of names and values only where this major, and no fork, is known to make it."""
        if value_only and self.fork:
            self.undecided.append(f"{message}: but {self.fork} may have names and values of its own")
            return
        near = self.known.nearest(suggest) if suggest else None
        file, line = (entry.file, entry.line) if entry else (None, None)
        self.errors.append(StartError(file, line, message, near))

    def objection(self, name: str, value: Any) -> str | None:
        """Return what the check hooks say that compare a value with those already in force."""
        if value is True and name in _STAGE_STATS and self.numbers.get("log_statement_stats"):
            return f'invalid value for parameter "{name}": 1'
        if value is True and name == "log_statement_stats" and any(self.numbers.get(n) for n in _STAGE_STATS):
            return f'invalid value for parameter "{name}": 1'
        if self.known.major <= 17 and name in _BACKENDS:
            others = sum(self.in_force(other) for other in _BACKENDS if other != name)
            if value + others + 1 > _MAX_BACKENDS:
                return f'invalid value for parameter "{name}": {value}'
        return None

    def in_force(self, name: str) -> Any:
        setting = self.known.find(name)
        default = None if setting is None else setting.default
        return self.numbers.get(name, default)

    def check_together(self) -> None:
        """PostmasterMain's checks of several values, and InitializeMaxBackends'."""
        major = self.known.major
        q = '"' if major >= 17 else ""
        get = self.in_force
        if self.reading.gaps or any(get(name) is None for name in (*_COMPARED, *_BACKENDS)):
            return
        reserved, extra = get("superuser_reserved_connections"), get("reserved_connections") or 0
        allowed = get("max_connections")
        if reserved + extra >= allowed:
            plus = f" plus {q}reserved_connections{q} ({extra})" if major >= 16 else ""
            self.refuse(
                f"{q}superuser_reserved_connections{q} ({reserved}){plus} must be less than "
                f"{q}max_connections{q} ({allowed})"
            )
        elif get("wal_level") == "minimal" and get("archive_mode") != "off":
            self.refuse(f'WAL archival cannot be enabled when {q}wal_level{q} is "minimal"')
        elif get("wal_level") == "minimal" and get("max_wal_senders") > 0:
            needs = 'requires "wal_level" to be' if major >= 17 else "requires wal_level"
            self.refuse(f'WAL streaming ({q}max_wal_senders{q} > 0) {needs} "replica" or "logical"')
        elif get("wal_level") == "minimal" and get("summarize_wal") is True:
            self.refuse('WAL cannot be summarized when "wal_level" is "minimal"')
        elif get("wal_level") == "minimal" and get("sync_replication_slots") is True and major >= 19:
            self.refuse(
                'replication slot synchronization ("sync_replication_slots" = on) requires "wal_level" to be '
                '"replica" or "logical"'
            )
        elif sum(1 for name in _RECOVERY_TARGETS if get(name)) > 1:
            self.refuse("multiple recovery targets specified")
        elif major >= 18 and sum(get(name) or 0 for name in _SERVER_PROCESSES) >= _MAX_BACKENDS - 1:
            self.refuse("too many server processes configured")

    def check_wal_sizes(self) -> None:
        """ReadControlFile's check (xlog.c): either size must hold two WAL segments, whose size initdb has set."""
        segment: Fact[int] | None = None
        for name in ("min_wal_size", "max_wal_size"):
            megabytes = self.in_force(name)
            if megabytes is None or megabytes >= _MOST_SEGMENTS:
                continue
            if segment is None:
                segment = self.wal_segment()
            if isinstance(segment, Known):
                if megabytes // segment.value < 2:
                    self.refuse(f'"{name}" must be at least twice "wal_segment_size"')
                    return
            elif megabytes < 2 * _USUAL_SEGMENT:
                self.undecided.append(f"{name} must be twice wal_segment_size, which is not known: {segment.reason}")

    def wal_segment(self) -> Fact[int]:
        """Return the size of a WAL segment in MB."""
        if self.directory is None:
            return Unknown("the data directory is not known")
        found = control.read(self.host, self.directory)
        return found if isinstance(found, Unknown) else Known(found.value.wal_segment_bytes >> 20, found.source)

    # the answer ---------------------------------------------------------------------------------

    def outcome(self) -> FileSettings:
        errors = tuple(self.errors)
        error = errors[0] if errors else None
        accepted: Fact[bool]
        if not self.catalogued:
            what = "the major version" if self.major is None else f"PostgreSQL {self.major}"
            accepted = Unknown(f"{what} is not known here, so what it refuses cannot be said", _ASK)
            errors, error = (), None
        elif error is not None:
            accepted = Known(False, f"{error.file} line {error.line}" if error.file else "command line and files")
        elif self.reading.gaps:
            gap = self.reading.gaps[0][1]
            accepted = Unknown(gap.reason, gap.hint or _ASK, gap.kind)
        elif self.undecided:
            accepted = Unknown(self.undecided[0], _ASK)
        else:
            accepted = Known(True, self.main)
        given = {entry.name.lower(): entry.value for entry in self.reading.entries if entry.value is not None}
        return FileSettings(accepted, error, self.settings(), self.newest_change(), given, errors)

    def settings(self) -> Settings:
        return Settings(**{each.name: self.setting(each.name) for each in fields(Settings)})

    def setting(self, name: str) -> Fact[Any]:
        setting = self.known.find(name)
        since = _SINCE.get(name)
        if since is not None and self.major is not None and self.major < since:
            return Known(0, f"not a setting before {since}")
        if setting is None:
            return Unknown(f"{name} is no setting of this major version")
        fact = self.values.get(name)
        if fact is None:
            return self.default(setting)
        if isinstance(fact, Unknown):
            return fact
        certainty = fact.certainty if self.catalogued else "inferred"
        return Known(_scaled(setting, fact.value), fact.source, certainty)

    def default(self, setting: Setting) -> Fact[Any]:
        """Return what holds where no line that could be read sets it."""
        name = setting.name
        if self.reading.gaps:
            gap = self.reading.gaps[0][1]
            return Unknown(f"{gap.reason}, which may set {name}", gap.hint, gap.kind)
        if self.reading.failed:
            return Unknown(f"{self.reading.failed[0][1]}: what was lost there may set {name}")
        if self.errors and self.catalogued:
            return Unknown(f"no line that can be read sets {name}, and PostgreSQL refuses: {self.errors[0].reason}")
        port = self.port_of_environment() if name == "port" else None
        if port is not None:
            return Known(port.value, "environment PGPORT")
        if not self.catalogued:
            defaults = {self._default_in(major, name) for major in (catalogue.FIRST, catalogue.LAST)}
            if len(defaults) != 1 or self.major is not None:
                return Unknown(f"no file sets {name}, and the default of this PostgreSQL version is not known", _ASK)
            return Known(_scaled(setting, setting.default), "default", "inferred")
        return Known(_scaled(setting, setting.default), "default")

    def port_of_environment(self) -> _Judged | None:
        """Return what PGPORT makes of the port (InitializeGUCOptionsFromEnvironment); everything else overrides it."""
        text, setting = self.environment.get("PGPORT"), self.known.find("port")
        return None if text is None or setting is None else _judge(setting, text, "port", self.known)

    @staticmethod
    def _default_in(major: int, name: str) -> Any:
        setting = catalogue.load(major).find(name)
        return setting.default if setting else None

    def newest_change(self) -> Fact[float]:
        newest: Known[float] | None = None
        for path in dict.fromkeys([*self.reading.files, *self.reading.directories]):
            status = self.host.status(path)
            if isinstance(status, Unknown):
                return status
            if newest is None or status.value.modified > newest.value:
                newest = Known(status.value.modified, path)
        if self.reading.gaps:
            return self.reading.gaps[0][1]
        return newest or Unknown(f"no configuration file was found at {self.main}")


_ASK = "ask the server itself, as its owner: postgres -D DIRECTORY -C port"
_STAGE_STATS = ("log_parser_stats", "log_planner_stats", "log_executor_stats")
_BACKENDS = ("max_connections", "autovacuum_max_workers", "max_worker_processes", "max_wal_senders")
_SERVER_PROCESSES = ("max_connections", "autovacuum_worker_slots", "max_worker_processes", "max_wal_senders")
_COMPARED = ("superuser_reserved_connections", "wal_level", "archive_mode")
_MAX_BACKENDS = 262143  # 2^18 - 1: backends must fit into 18 bits of a buffer's state
_MOST_SEGMENTS = 2048  # MB: twice the largest WAL segment
_USUAL_SEGMENT = 16  # MB
_RECOVERY_TARGETS = (
    "recovery_target",
    "recovery_target_lsn",
    "recovery_target_name",
    "recovery_target_time",
    "recovery_target_xid",
)


def _is_custom_name(name: str) -> bool:
    """valid_custom_variable_name: each part is letters, digits, _ and $, the first no digit; all above ASCII counts."""
    first, rest = r"[^\x00-@\[-^`{-\x7f]", r"[^\x00-#%-/:-@\[-^`{-\x7f]*"
    return all(re.fullmatch(first + rest, part) for part in name.split("."))


def _scaled(setting: Setting, value: Any) -> Any:
    """Return memory in bytes and booleans as such; what is below 0 means something else and stays."""
    if setting.kind == "b":
        return parse_bool(str(value))
    if setting.kind == "i" and setting.unit in _BYTES and value > 0:
        return value * _BYTES[setting.unit]
    return "" if value is None and setting.kind == "s" else value


# the running server -------------------------------------------------------------------------------


def from_server(values: Mapping[str, str], major: int, source: str = "sql pg_settings") -> Settings:
    """Return the settings of a running server from pg_settings: `values` maps a name to `setting`, in its base unit."""
    return Settings(**{each.name: _from_sql(each.name, values, major, source) for each in fields(Settings)})


def _from_sql(name: str, values: Mapping[str, str], major: int, source: str) -> Fact[Any]:
    since = _SINCE.get(name)
    if since is not None and major < since:
        return Known(0, f"not a setting before {since}")
    if name not in values:
        return _not_shown(name, source)
    setting = catalogue.load(_nearest_major(major)).find(name)
    text = values[name]
    if setting is not None and setting.kind == "e" and text not in (setting.values or {}).values():
        return Unknown(f"{source} gives {name} as {text}, which it cannot be")
    if setting is None or setting.kind in "se":
        return Known(text, source)
    if setting.kind == "b":
        return Known(_scaled(setting, text), source)
    number = parse_integer(text, "")
    if number is None or not setting.low <= number <= setting.high:
        return Unknown(f"{source} gives {name} as {text}, which it cannot be")
    block = values.get("block_size", "")
    if setting.unit == "8kB" and is_number(block) and number > 0:
        return Known(number * int(block), source)
    return Known(_scaled(setting, number), source)


def _not_shown(name: str, source: str, otherwise: str = "") -> Unknown:
    """Return the gap of a setting that pg_settings leaves out: it hides those for superusers from other roles."""
    also = f", and {otherwise}" if otherwise else ""
    return Unknown(f"{source} did not show {name}: the role may not see it{also}", _SHOW, "permission")


_SHOW = "let the role see all settings: GRANT pg_read_all_settings TO the role (pg_monitor includes it)"


def running(
    files: FileSettings,
    server_settings: Mapping[str, str] | None,
    argv: Sequence[str],
    major: int | None,
    started: Fact[float],
) -> Settings:
    """Return what the running server has.

    From SQL, else the postmaster's command line, else the file's value if no file is newer than the start; a single
    setting that SQL does not show, likewise.
    """
    said = server_settings if server_settings and major is not None else {}
    known = catalogue.load(_nearest_major(major))
    given = command_line(argv, major)
    changed = _changed_since(files, started)

    def one(name: str) -> Fact[Any]:
        if major is not None and (name in said or major < _SINCE.get(name, 0)):
            return _from_sql(name, said, major, "sql pg_settings")
        setting = known.find(name)
        fact = given.get(name)
        if setting is not None and fact is not None:
            return Known(_scaled(setting, fact.value), fact.source) if isinstance(fact, Known) else fact
        found: Fact[Any] = changed or getattr(files.settings, name)
        if said and isinstance(found, Unknown):
            return _not_shown(name, "sql pg_settings", found.reason)
        return found

    return Settings(**{each.name: one(each.name) for each in fields(Settings)})


def _changed_since(files: FileSettings, started: Fact[float]) -> Unknown | None:
    hint = "give SQL access"
    if isinstance(started, Unknown):
        return Unknown(f"whether the files were changed after the server started is not known: {started.reason}", hint)
    if isinstance(files.newest_change, Unknown):
        return Unknown(
            f"whether the files were changed after the server started is not known: {files.newest_change.reason}", hint
        )
    if files.newest_change.value > started.value:
        return Unknown("the files were changed after the server started", hint)
    return None


def unread(gap: Unknown) -> FileSettings:
    """Return the file settings of a cluster whose files cannot be read, or are not known."""
    return FileSettings(gap, None, Settings(*[gap] * len(fields(Settings))), gap, {})


def restarts_changed(
    files: FileSettings, server_settings: Mapping[str, str], argv: Sequence[str], major: int
) -> str | None:
    """Return a setting that only a start changes, and whose line in the files is not what the server runs with.

    Any of them can size the shared memory (SLRU buffers, what extensions ask for), but for those of Settings, which are
    looked at one by one. None if there is none.
    """
    known = catalogue.load(_nearest_major(major))
    compared = {field.name for field in fields(Settings)} | command_line(argv, major).keys()
    for name, text in files.given.items():
        setting = known.find(name)
        if setting is not None and (setting.context != "postmaster" or setting.name in compared):
            continue
        runs = server_settings.get(setting.name if setting is not None else name)
        if runs is None:  # text that was not asked for, or a setting of an extension that is not loaded
            continue
        if not _says_the_same(setting, text, runs):
            return name
    return None


def _says_the_same(setting: Setting | None, text: str, runs: str) -> bool:
    if setting is not None and setting.kind == "b":
        return parse_bool(text) == parse_bool(runs)
    if setting is not None and setting.kind == "i":
        number = parse_integer(text, setting.unit)
        return number is not None and (str(number) == runs or number == -1)  # -1: derived from others, compared there
    return text.strip().lower() == runs.strip().lower()
