"""The settings that decide anything here, and what the running server has of them.

What the next start would take from the files is in file_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal

from pgpreemptcheck.facts import catalogue
from pgpreemptcheck.facts.catalogue import Setting
from pgpreemptcheck.facts.postmaster_options import command_line
from pgpreemptcheck.facts.setting_values import BYTES, parse_bool, parse_integer
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


SINCE = {
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


def scaled(setting: Setting, value: Any) -> Any:
    """Return memory in bytes and booleans as such; what is below 0 means something else and stays."""
    if setting.kind == "b":
        return parse_bool(str(value))
    if setting.kind == "i" and setting.unit in BYTES and value > 0:
        return value * BYTES[setting.unit]
    return "" if value is None and setting.kind == "s" else value


# the running server -------------------------------------------------------------------------------


def from_server(values: Mapping[str, str], major: int, source: str = "sql pg_settings") -> Settings:
    """Return the settings of a running server from pg_settings: `values` maps a name to `setting`, in its base unit."""
    return Settings(**{each.name: _from_sql(each.name, values, major, source) for each in fields(Settings)})


def _from_sql(name: str, values: Mapping[str, str], major: int, source: str) -> Fact[Any]:
    since = SINCE.get(name)
    if since is not None and major < since:
        return Known(0, f"not a setting before {since}")
    if name not in values:
        return _not_shown(name, source)
    setting = catalogue.load(catalogue.nearest(major)).find(name)
    text = values[name]
    if setting is not None and setting.kind == "e" and text not in (setting.values or {}).values():
        return Unknown(f"{source} gives {name} as {text}, which it cannot be")
    if setting is None or setting.kind in "se":
        return Known(text, source)
    if setting.kind == "b":
        return Known(scaled(setting, text), source)
    number = parse_integer(text, "")
    if number is None or not setting.low <= number <= setting.high:
        return Unknown(f"{source} gives {name} as {text}, which it cannot be")
    block = values.get("block_size", "")
    if setting.unit == "8kB" and is_number(block) and number > 0:
        return Known(number * int(block), source)
    return Known(scaled(setting, number), source)


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
    known = catalogue.load(catalogue.nearest(major))
    given = command_line(argv, major)
    changed = _changed_since(files, started)

    def one(name: str) -> Fact[Any]:
        if major is not None and (name in said or major < SINCE.get(name, 0)):
            return _from_sql(name, said, major, "sql pg_settings")
        setting = known.find(name)
        fact = given.get(name)
        if setting is not None and fact is not None:
            return Known(scaled(setting, fact.value), fact.source) if isinstance(fact, Known) else fact
        found: Fact[Any] = changed or getattr(files.settings, name)
        if said and isinstance(found, Unknown):
            return _not_shown(name, "sql pg_settings", found.reason)
        return found

    return Settings(**{each.name: one(each.name) for each in fields(Settings)})


def _changed_since(files: FileSettings, started: Fact[float]) -> Unknown | None:
    hint = "run as root or as the cluster's owner, who may ask it over SQL; for a capture, copy files with cp -p"
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
    known = catalogue.load(catalogue.nearest(major))
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
