"""What the running server says of itself over SQL: facts made of the answer (sql.py), or of a captured one.

The answer is JSON from another process or a file (`sql/PORT.json`): nothing in it is taken for what it should be.
"""

from __future__ import annotations

from collections.abc import Mapping

from pgpreemptcheck.values import Fact, GapKind, Known, Unknown, is_number, measured, record

_MAX_TEXT = 400


@record
class FileError:
    """One line that pg_file_settings reports as not applicable.

    "setting could not be applied" is no fault: it waits for a restart, or the command line wins over it.
    """

    file: str
    line: int
    name: str
    error: str


@record
class Server:
    version: Fact[str] = measured(doc="server_version, as the server prints it")
    settings: Fact[Mapping[str, str]] = measured(doc="pg_settings: name to value in its base unit (8kB is block_size)")
    pending_restart: Fact[tuple[str, ...]] = measured(
        doc="settings whose value in the files differs from the running one; the command line may win over it again"
    )
    huge_pages_status: Fact[str] = measured(doc="on, off or unknown (17+)")
    huge_pages_needed: Fact[int] = measured(unit="pages", doc="shared_memory_size_in_huge_pages (15+)")
    active_backends: Fact[int] = measured(doc="client backends that are active at this moment, this one excluded")
    buffers_allocated: Fact[int] = measured(unit="buffers", doc="buffers_alloc since the statistics were reset")
    unused_buffers: Fact[int] = measured(unit="buffers", doc="buffers never filled since the start (16+)")
    in_recovery: Fact[bool] = measured()
    started: Fact[float] = measured(unit="seconds", doc="pg_postmaster_start_time, since the epoch")
    file_errors: Fact[tuple[FileError, ...]] = measured(doc="pg_file_settings rows with an error")


_REFUSAL_HINTS = {
    "driver": "install it: pip install 'psycopg[binary]'",
    "dsn": "give --dsn as in psql: 'host=... port=... user=... dbname=...' or postgresql://...",
    "socket": "give the server's address by --dsn",
    "denied": "run it as root or as the owner of the cluster",
    "starting": "run it again when the server accepts connections",
    "full": "run it again when a connection is free, or give a role with a reserved one by --dsn",
    "time": "check that the server answers: psql -c 'SELECT 1'",
    "role": "give a role that may log in by --dsn 'host=... port=... user=... dbname=postgres'",
}
_NO_UNUSED = {
    "old": Unknown(
        "before PostgreSQL 16 unused buffers can only be counted by looking at every buffer under its lock",
        "in a quiet hour: SELECT count(*) FROM pg_buffercache WHERE relfilenode IS NULL",
        "unsupported",
    ),
    "not-installed": Unknown(
        "the function pg_buffercache_summary() is not installed in the database that was asked",
        "CREATE EXTENSION pg_buffercache, or ALTER EXTENSION pg_buffercache UPDATE after an upgrade",
        "absent",
    ),
    "large": Unknown(
        "the buffer pool is so large that counting its unused buffers would be felt",
        "run it with --deep",
        "unsupported",
    ),
}
_MONITOR = "ask as a superuser or a member of pg_monitor"
_SUPERUSER = "ask as a superuser"
_NONSENSE = Unknown("the server's answer is not what was asked for")


def facts(answer: Mapping[str, object] | Unknown) -> Server:
    """Return what a server said as facts; each is Unknown with the reason where it was not said."""
    gap = _refused(answer)
    if gap is not None or isinstance(answer, Unknown):
        gap = gap or _NONSENSE
        return Server(gap, gap, gap, gap, gap, gap, gap, gap, gap, gap, gap)
    number = answer.get("version_number")
    major = number // 10000 if isinstance(number, int) else 0
    settings, pending = _settings(_rows(answer, "settings", 3, _MONITOR))
    version, recovery, started = answer.get("version"), answer.get("in_recovery"), answer.get("started")
    return Server(
        version=Known(version, "sql server_version") if isinstance(version, str) else _NONSENSE,
        settings=settings,
        pending_restart=pending,
        huge_pages_status=_huge_pages_status(settings, major),
        huge_pages_needed=_huge_pages_needed(settings, major),
        active_backends=_active(_rows(answer, "active", 3, _MONITOR)),
        buffers_allocated=_count(_rows(answer, "allocated", 1, _MONITOR), "sql pg_stat_bgwriter.buffers_alloc"),
        unused_buffers=_count(_rows(answer, "unused", 1, _MONITOR), "sql pg_buffercache_summary().buffers_unused"),
        in_recovery=Known(recovery, "sql pg_is_in_recovery()") if isinstance(recovery, bool) else _NONSENSE,
        started=Known(float(started), "sql pg_postmaster_start_time()")
        if isinstance(started, (int, float))
        else _NONSENSE,
        file_errors=_file_errors(_rows(answer, "file_errors", 4, _SUPERUSER)),
    )


def _refused(answer: Mapping[str, object] | Unknown) -> Unknown | None:
    if isinstance(answer, Unknown):
        return answer
    reason = answer.get("refused")
    if reason is not None:
        code = str(answer.get("code"))
        kind: GapKind = "permission" if code in ("role", "denied") else "unsupported" if code == "driver" else "other"
        return Unknown(f"no answer over SQL: {str(reason)[:_MAX_TEXT]}", _REFUSAL_HINTS.get(code, ""), kind)
    return None


def _rows(answer: Mapping[str, object], name: str, columns: int, hint: str) -> list[list[str | None]] | Unknown:
    """Return the rows of one query, or why there are none; `hint`: what helps where the role may not read it."""
    results = answer.get("results")
    result = results.get(name) if isinstance(results, dict) else None
    if not isinstance(result, dict):
        return _NONSENSE
    if "error" in result:
        code = str(result.get("code"))
        if name == "unused" and code in _NO_UNUSED:
            return _NO_UNUSED[code]
        denied = code == "42501"  # insufficient_privilege
        reason = f"the server refuses it: {str(result['error'])[:_MAX_TEXT]}"
        return Unknown(reason, hint if denied else "", "permission" if denied else "other")
    rows = result.get("rows")
    if isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == columns and all(v is None or isinstance(v, str) for v in row)
        for row in rows
    ):
        return rows
    return _NONSENSE


def _settings(rows: list[list[str | None]] | Unknown) -> tuple[Fact[Mapping[str, str]], Fact[tuple[str, ...]]]:
    if isinstance(rows, Unknown):
        return rows, rows
    source = "sql pg_settings"
    values = {name: value for name, value, _ in rows if name is not None and value is not None}
    pending = tuple(sorted(name for name, _, waits in rows if name is not None and waits == "t"))
    return Known(values, source), Known(pending, f"{source}.pending_restart")


def _huge_pages_status(settings: Fact[Mapping[str, str]], major: int) -> Fact[str]:
    if isinstance(settings, Unknown):
        return settings
    value = settings.value.get("huge_pages_status")
    if value is None:
        return Unknown(
            f"PostgreSQL {major} does not say whether it got huge pages (17 and later do)", "", "unsupported"
        )
    return Known(value, "sql huge_pages_status")


def _huge_pages_needed(settings: Fact[Mapping[str, str]], major: int) -> Fact[int]:
    if isinstance(settings, Unknown):
        return settings
    name = "shared_memory_size_in_huge_pages"
    value = settings.value.get(name)
    if value is None:
        return Unknown(
            f"PostgreSQL {major} does not say how many huge pages it needs (15 and later do)", "", "unsupported"
        )
    if not is_number(value):
        return Unknown(f"{name} is {value[:20]}: the server cannot use huge pages here", "", "unsupported")
    return Known(int(value), f"sql {name}")


def _count(rows: list[list[str | None]] | Unknown, source: str) -> Fact[int]:
    if isinstance(rows, Unknown):
        return rows
    value = rows[0][0] if len(rows) == 1 else None
    if value is None or not is_number(value):
        return _NONSENSE
    return Known(int(value), source)


def _active(rows: list[list[str | None]] | Unknown) -> Fact[int]:
    if isinstance(rows, list) and len(rows) == 1:
        if rows[0][1] != "f":
            return Unknown("this role does not see what other users' backends do", _MONITOR, "permission")
        if rows[0][2] != "f":
            return Unknown("track_activities is off, so the server does not know which backends are active")
        rows = [rows[0][:1]]
    return _count(rows, "sql pg_stat_activity")


def _file_errors(rows: list[list[str | None]] | Unknown) -> Fact[tuple[FileError, ...]]:
    if isinstance(rows, Unknown):
        return rows
    errors = [
        FileError(file or "", int(line) if line and is_number(line) else 0, name or "", error or "")
        for file, line, name, error in rows
    ]
    return Known(tuple(errors), "sql pg_file_settings")


_START_TOLERANCE = 60.0
"""Seconds between the start of a postmaster's process and what it calls its start: it sets up its memory first."""


def belongs_to(
    answer: Mapping[str, object] | Unknown,
    postmaster_pid: int,
    data_directory: str | None,
    started: float | None = None,
) -> bool:
    """Return whether the server that answered is the one of that postmaster on this host, and no other elsewhere.

    It is if the postmaster itself listens at the other end of the socket; or if the backend that answered runs here
    as its child, and its data directory (or, where the role may not see that, the time of its start) is the same.
    """
    if isinstance(answer, Unknown):
        return False
    if answer.get("peer_pid") == postmaster_pid:
        return True
    if answer.get("backend_parent_pid") != postmaster_pid:
        return False
    theirs = answer.get("started")
    if started is not None and isinstance(theirs, (int, float)) and abs(theirs - started) > _START_TOLERANCE:
        return False
    said = facts(answer).settings
    directory = said.value.get("data_directory") if isinstance(said, Known) else None
    if directory is not None and data_directory is not None:
        return directory.rstrip("/") == data_directory.rstrip("/")
    return started is not None and isinstance(theirs, (int, float))
