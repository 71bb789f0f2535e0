"""What the next start of PostgreSQL takes from its files and its command line, or why it refuses.

The order is the server's own (guc.c, guc-file.l, postmaster.c of 13 to 19): the command line first, where the first
objection ends the start; then postgresql.conf with its includes; then postgresql.auto.conf; then every name; then the
value of each setting's last line, also of one that the command line overrides; then what the values must be together;
then what they must be with pg_control.
Only the first of these stages that finds fault is reported, as in the server's log.

Not judged, since only that host's server can: locales, libraries, paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pgpreemptcheck.facts import catalogue, conffile, control, setting_strings
from pgpreemptcheck.facts.catalogue import Setting
from pgpreemptcheck.facts.conffile import Entry, Rights
from pgpreemptcheck.facts.postmaster_options import option_values
from pgpreemptcheck.facts.setting_values import Judged, judge
from pgpreemptcheck.facts.settings import SINCE, FileSettings, Settings, StartError, scaled
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown

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
    return Start(host, data_directory, config_file, major, argv, fork, environment or {}, rights).outcome()


class Start:
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
        self.known = catalogue.load(catalogue.nearest(major))
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
            judged = judge(setting, entry.value, entry.name, self.known)
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
        judged = judge(setting, value, written, self.known)
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
        since = SINCE.get(name)
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
        return Known(scaled(setting, fact.value), fact.source, certainty)

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
            return Known(scaled(setting, setting.default), "default", "inferred")
        return Known(scaled(setting, setting.default), "default")

    def port_of_environment(self) -> Judged | None:
        """Return what PGPORT makes of the port (InitializeGUCOptionsFromEnvironment); everything else overrides it."""
        text, setting = self.environment.get("PGPORT"), self.known.find("port")
        return None if text is None or setting is None else judge(setting, text, "port", self.known)

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


def _is_custom_name(name: str) -> bool:
    """valid_custom_variable_name: each part is letters, digits, _ and $, the first no digit; all above ASCII counts."""
    first, rest = r"[^\x00-@\[-^`{-\x7f]", r"[^\x00-#%-/:-@\[-^`{-\x7f]*"
    return all(re.fullmatch(first + rest, part) for part in name.split("."))
