"""Asking a server over SQL: one short read-only transaction; runs in the child (ownerchild.py), and returns plain JSON.

Neither a session setting nor a startup parameter is used, so that a pooler in between is not harmed: everything is set
by SET LOCAL, and ends with the transaction. (PgBouncer in transaction pooling takes an application_name on connecting,
and shows it to its next client that gives none.) Works on PostgreSQL 13 to 19.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

CONNECT_SECONDS = 5
AFFORDABLE_BYTES = 16 << 30
"""pg_buffercache_summary() looks at every buffer header: by default only for less than this in shared_buffers."""

_MAX_ROWS = 5000
_MAX_VALUE = 1 << 16
_MAX_TEXT = 400

_BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY;
SET LOCAL application_name = 'pgpreemptcheck';
SET LOCAL client_encoding = 'UTF8';
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL statement_timeout = '3s';
SET LOCAL lock_timeout = '500ms';
SET LOCAL idle_in_transaction_session_timeout = '10s'
"""

_IDENTITY = """
SELECT current_setting('server_version'), current_setting('server_version_num'), pg_backend_pid(),
       pg_is_in_recovery(), extract(epoch FROM pg_postmaster_start_time()), host(inet_server_addr())
"""

# Strings are only those needed: others may hold passwords (primary_conninfo, placeholders of applications).
_QUERIES = {
    "settings": """
SELECT name, setting, pending_restart FROM pg_settings
 WHERE vartype <> 'string' OR name IN ('cluster_name', 'config_file', 'data_directory', 'listen_addresses',
       'server_version', 'shared_preload_libraries', 'unix_socket_directories')
""",
    # Roles without pg_read_all_stats see other users' rows, but not what they are.
    "active": """
SELECT count(*) FILTER (WHERE backend_type = 'client backend' AND state = 'active'
                          AND pid <> pg_backend_pid()),
       coalesce(bool_or(backend_type IS NULL), false),
       coalesce(bool_or(backend_type = 'client backend' AND state = 'disabled'), false)
  FROM pg_stat_activity
""",
    "allocated": "SELECT buffers_alloc FROM pg_stat_bgwriter",
    "file_errors": f"""
SELECT sourcefile, sourceline, name, error FROM pg_file_settings WHERE error IS NOT NULL ORDER BY seqno
 LIMIT {_MAX_ROWS}
""",
}

# Only a function that belongs to the extension is called: in a schema that others can write to, its name could be
# anybody's. The extension's older versions (a cluster upgraded from 15) have no summary.
_BUFFERCACHE = """
SELECT pg_size_bytes(current_setting('shared_buffers')),
       (SELECT quote_ident(n.nspname) FROM pg_extension e
          JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND d.deptype = 'e'
          JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
          JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE e.extname = 'pg_buffercache' AND p.proname = 'pg_buffercache_summary' AND p.pronargs = 0)
"""


_SESSION_VARIABLES = ("PGOPTIONS", "PGDATESTYLE", "PGTZ", "PGGEQO", "PGAPPNAME", "PGCLIENTENCODING")
"""What libpq would send when it connects: a pooler refuses some, and PgBouncer leaves others to its next client."""


def import_driver() -> str:
    """Import the driver and all that it needs later; return why it cannot be had, or nothing."""
    try:
        import socket  # noqa: F401

        import psycopg
        import psycopg.conninfo
    except Exception as error:
        lines = str(error).strip().split("\n")
        return f"the SQL driver psycopg cannot be used: {lines[0]}"
    del psycopg
    return ""


def clean_environment(*, trusted: bool, home: bool) -> None:
    """Take out of the environment what must not reach a server: all of PG*, unless it is the user's own (`trusted`)."""
    for name in list(os.environ):
        if name in _SESSION_VARIABLES or (not trusted and name.startswith("PG")):
            del os.environ[name]
    if not trusted:
        os.environ["PGPASSFILE"] = os.devnull
    if not home:
        os.environ["HOME"] = "/nonexistent"


def ask(
    *,
    directories: Sequence[str] = (),
    port: int = 5432,
    users: Sequence[str] = (),
    dsn: str | None = None,
    deep: bool = False,
) -> dict[str, Any]:
    """Return what a server says, as JSON; never raises for a server that refuses.

    The server is the one that `dsn` names, else the one whose socket for `port` lies in one of `directories`, asked
    as the first of `users` that it lets in. `deep`: also what costs a large pool something.
    """
    missing = import_driver()
    if missing:
        return {"refused": missing, "code": "driver"}
    import psycopg

    secrets: list[str] = []
    try:
        attempts = list(_by_dsn(dsn, secrets) if dsn is not None else _by_socket(directories, port, users))
    except psycopg.Error:  # its text would show parts of the string
        return {"refused": "the connection string cannot be parsed", "code": "dsn"}
    if not attempts:
        return {"refused": "the server listens on no Unix socket that can be reached", "code": "socket"}
    reasons: list[str] = []
    for parameters in attempts:
        try:
            connection = psycopg.connect(**parameters)
        except (psycopg.Error, OSError, ValueError) as error:
            reason = _masked(_one_line(str(error)), secrets)
            if reason not in reasons:
                reasons.append(reason)
            code = _refusal(reason)
            if code in ("starting", "full", "time"):
                return {"refused": reason, "code": code}
            continue
        try:
            answer = _ask(connection, deep)
        except (psycopg.Error, OSError, ValueError) as error:
            answer = {"refused": f"the connection broke: {_one_line(str(error))}", "code": "other"}
        finally:
            connection.close()
        if "refused" in answer:
            answer["refused"] = _masked(answer["refused"], secrets)
        return answer
    return {"refused": "; ".join(reasons[:3]), "code": _refusal(reasons[0])}


_OURS = {"autocommit": True, "prepare_threshold": None}


def _by_socket(directories: Sequence[str], port: int, users: Sequence[str]) -> Iterator[dict[str, Any]]:
    for directory in directories:
        if not directory.startswith("@"):  # an abstract socket, which is no file
            try:
                os.stat(f"{directory}/.s.PGSQL.{port}")
            except FileNotFoundError:
                continue
            except OSError:
                pass  # the attempt says why not
        for user in users:
            for database in ("postgres", "template1"):
                yield {
                    **_OURS,
                    "host": directory,
                    "port": port,
                    "user": user,
                    "dbname": database,
                    "connect_timeout": CONNECT_SECONDS,
                    "sslmode": "disable",
                    "gssencmode": "disable",
                }


def _by_dsn(dsn: str, secrets: list[str]) -> Iterator[dict[str, Any]]:
    from psycopg.conninfo import conninfo_to_dict

    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    secrets += [str(parameters[name]) for name in ("password", "sslpassword") if parameters.get(name)]
    secrets += [str(value) for name, value in parameters.items() if name.endswith(("_secret", "_key")) and value]
    parameters.setdefault("connect_timeout", CONNECT_SECONDS)
    yield {**_OURS, **parameters}


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _one_line(text: str) -> str:
    """Return the last attempt of a driver's message, as one line."""
    text = " ".join(text.split())
    text = text.rpartition("Multiple connection attempts failed.")[2].strip() or text
    return text.removeprefix("connection failed: ")[:_MAX_TEXT]


_REFUSALS = (
    (
        "starting",
        ("is starting up", "is shutting down", "in recovery mode", "system is not accepting", "system is not yet"),
    ),
    ("full", ("too many clients", "too many connections", "connection slots are reserved")),
    ("time", ("timeout expired", "timed out")),
    ("denied", ("failed: Permission denied",)),
    ("socket", ("No such file or directory", "Connection refused", "could not translate host name")),
)


def _refusal(reason: str) -> str:
    """Return what kind of refusal a message is. A server that speaks another language is taken as refusing the role."""
    for code, phrases in _REFUSALS:
        if any(phrase in reason for phrase in phrases):
            return code
    return "role"


def _ask(connection: Any, deep: bool) -> dict[str, Any]:
    begun = _execute(connection, _BEGIN)
    identity = begun if "error" in begun else _execute(connection, _IDENTITY)
    if "error" in identity:
        return {"refused": identity["error"], "code": "other"}
    version, number, backend, recovery, started, address = identity["rows"][0]
    answer: dict[str, Any] = {
        "version": version,
        "version_number": int(number),
        "backend_pid": int(backend),
        "backend_parent_pid": _parent(int(backend)),
        "peer_pid": _peer(connection),
        "in_recovery": recovery == "t",
        "started": float(started),
        "server_address": address,
        "user": connection.info.user,
        "database": connection.info.dbname,
    }
    results = {name: _execute(connection, sql, savepoint=True) for name, sql in _QUERIES.items()}
    results["unused"] = _unused(connection, int(number), deep)
    answer["results"] = results
    _execute(connection, "COMMIT")
    return answer


def _execute(connection: Any, sql: str, *, savepoint: bool = False) -> dict[str, Any]:
    """Return the rows of the last statement, or the server's error. Values are text as the server sends it."""
    from psycopg.pq import DiagnosticField, ExecStatus

    pgconn = connection.pgconn
    result = pgconn.exec_((f"SAVEPOINT q; {sql}" if savepoint else sql).encode())
    if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        if result.ntuples > _MAX_ROWS:
            return {"error": "the server sends more rows than there can be", "code": ""}
        columns = range(result.nfields)
        return {"rows": [[_text(result.get_value(row, column)) for column in columns] for row in range(result.ntuples)]}
    state = result.error_field(DiagnosticField.SQLSTATE)
    message = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    if savepoint:
        pgconn.exec_(b"ROLLBACK TO SAVEPOINT q")
    return {"error": _one_line(_text(message) or "no reason given"), "code": _text(state) or ""}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:_MAX_VALUE].decode("utf-8", "surrogateescape")


def _unused(connection: Any, version_number: int, deep: bool) -> dict[str, Any]:
    if version_number < 160000:
        return {"error": "", "code": "old"}
    found = _execute(connection, _BUFFERCACHE, savepoint=True)
    if "error" in found:
        return found
    size, schema = found["rows"][0]
    if schema is None:
        return {"error": "", "code": "not-installed"}
    if int(size) >= AFFORDABLE_BYTES and not deep:
        return {"error": "", "code": "large"}
    return _execute(connection, f"SELECT buffers_unused FROM {schema}.pg_buffercache_summary()", savepoint=True)


def _parent(pid: int) -> int | None:
    """Return the parent of a process of this host, if there is such a process: the backend lives only while asked."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"PPid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _peer(connection: Any) -> int | None:
    """Return the PID of who listens at the other end of a Unix socket: the postmaster's, unless a pooler is between."""
    import socket
    import struct

    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        if end.family != socket.AF_UNIX:
            return None
        pid = int(struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return pid or None
