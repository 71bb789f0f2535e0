"""Odd configuration files: our answer against that of the real server of each major.

`postgres -C NAME` reads the files as a start does, logs its objections and prints one value. How many files are tried
is set by PGPREEMPTCHECK_EXAMPLES (default 150 a major).
"""

from __future__ import annotations

import os
import re
import shutil

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from pgpreemptcheck import owner
from pgpreemptcheck.facts import catalogue, file_settings
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Known, Unknown
from tests import tool
from tests.servers import Server, ServerRefusedError, free_port, give, private_directory, require

EXAMPLES = int(os.environ.get("PGPREEMPTCHECK_EXAMPLES", "150"))
REPORTED = (
    *("shared_buffers", "huge_pages", "max_connections", "shared_memory_type", "superuser_reserved_connections"),
    *("autovacuum_max_workers", "max_worker_processes", "max_wal_senders", "max_prepared_transactions"),
    *("max_locks_per_transaction", "max_replication_slots", "port", "track_activity_query_size"),
)
OTHERS = (
    *("work_mem", "fsync", "wal_level", "wal_compression", "huge_page_size", "checkpoint_timeout", "archive_mode"),
    *("seq_page_cost", "autovacuum_vacuum_cost_delay", "cluster_name", "log_destination", "block_size", "sort_mem"),
    *("ssl_renegotiation_limit", "default_with_oids", "log_rotation_age", "max_wal_size", "hugepages"),
    *("max_connection", "a.b", "a.b.c", "plpgsql.x", "reserved_connections", "io_method", "summarize_wal", "role"),
    *("log_parser_stats", "log_statement_stats", "notify_buffers", "vacuum_buffer_usage_limit", "jit_above_cost"),
    *("autovacuum_naptime", "force_parallel_mode", "is_superuser", "min_dynamic_shared_memory", "synchronous_commit"),
)

names = st.one_of(st.sampled_from(REPORTED), st.sampled_from(OTHERS)).flatmap(
    lambda name: st.sampled_from([name, name, name, name.upper(), name.title()])
)
numbers = st.one_of(
    st.integers(-3, 400).map(str),
    st.integers(0, 2**33).map(str),
    st.integers(0, 70000).map(hex),
    st.integers(0, 70000).map(lambda n: f"0{n:o}"),
    st.floats(allow_nan=False).map(repr),
    st.floats(0, 100).map(lambda f: f"{f:.3f}"),
    st.sampled_from(
        ["1e2", "08", "0x", "+5", "-1", ".5", "5.", ".", "1e999", "1e-400", "inf", "nan", "0x1p4", "1e", ""]
    ),
    st.sampled_from(["2147483647", "2147483648", "9223372036854775808", "99999999999999999999", "262143", "262100"]),
)
units = st.sampled_from(
    ["", "", "B", "kB", "MB", "GB", "TB", "KB", "mb", "G", "ms", "s", "min", "h", "d", "us", "kBx", "%"]
)
quantities = st.tuples(numbers, st.sampled_from(["", "", " ", "\t"]), units, st.sampled_from(["", "", " "])).map(
    "".join
)
words = st.sampled_from(
    [
        *("on", "off", "try", "true", "TRUE", "tr", "o", "of", "y", "no", "1", "0", "mmap", "sysv", "MMAP", "minimal"),
        *("replica", "logical", "archive", "hot_standby", "stderr", "stderr, csvlog", "jsonlog", "zork", "lz4", "pglz"),
        *("none", "default", "a.b", "x-y", "/tmp/x", "remote_write", "always", "worker", "sync", "\u00fc"),
    ]
)
values = st.one_of(quantities, words, st.text("abz019 '\\\"#=.,;%-_\u00e9\n\t", max_size=6))


def quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n") + "'"


written = values.flatmap(
    lambda value: st.sampled_from([quote(value), quote(value), value.replace("\n", ""), f"'{value}'", f'"{value}"'])
)
setting_lines = st.tuples(
    st.sampled_from(["", "", " ", "\t"]),
    names,
    st.sampled_from([" = ", "=", " ", "  =\t", "== ", ""]),
    written,
    st.sampled_from(["", "", "", " # c", "#c", " x", ";", "\r"]),
).map("".join)
odd_lines = st.sampled_from(
    [
        *(
            "",
            "# comment 'x",
            "   ",
            "port",
            "port =",
            "= 5",
            "'port' = 5",
            "12 = 3",
            "[section]",
            "{{ x }}",
            "a.b = 1",
        ),
        *(
            "include 'a.conf'",
            "include = 'a.conf'",
            "include a.conf",
            "include_if_exists 'missing.conf'",
            "Include 'a.conf'",
        ),
        *("include 'missing.conf'", "include_dir 'd'", "include_dir 'nowhere'", "include_dir 'a.conf'", "include 'd'"),
        *(
            "include 'postgresql.conf'",
            "include ''",
            "include '../x/y.conf'",
            "include './a.conf'",
            "include 'a.conf/x'",
        ),
        *(
            "shared_buffers = '\\061\\066MB'",
            "port = '5\\0641'",
            "cluster_name = 'a\\'b''c\\n'",
            "port = '\\400'",
            "\ufeffport = 1",
        ),
        *("cluster_name = 'a\0b'", "port\0 = 1", "\x0cport = 1", "max_connections = 1\v"),
    ]
)
lines = st.one_of(setting_lines, setting_lines, odd_lines)
ends = st.sampled_from(["\n", "\n", "\n", "\r\n", ""])


def a_file(most: int) -> st.SearchStrategy[bytes]:
    whole = st.tuples(st.lists(lines, max_size=most), ends)
    text = whole.map(lambda f: ("\r\n" if f[1] == "\r\n" else "\n").join(f[0]) + f[1])
    return st.one_of(text.map(lambda t: t.encode()), text.map(lambda t: t.encode("latin-1", "replace")))


options = st.lists(
    st.one_of(
        st.tuples(names, quantities).map(lambda p: ["-c", f"{p[0]}={p[1]}"]),
        st.tuples(names, values).map(lambda p: [f"--{p[0].replace('_', '-')}={p[1]}"]),
        quantities.map(lambda v: ["-B", v] if v and not v.startswith("-") else []),
        st.integers(1, 500).map(lambda n: [f"-N{n}"]),
        st.sampled_from([["-i"], ["-F"], ["-p", "0x10"], ["-c", "port"], ["--x.y=1"], ["-c", "x.1y=1"], ["-S", "64"]]),
    ),
    max_size=2,
).map(lambda found: [word.replace("\0", "") for words in found for word in words])


def said_by(stderr: bytes) -> list[str]:
    """Return what the server objects to: the messages of its log, hints and details aside."""
    text = stderr.decode("utf-8", "surrogateescape")
    found: list[str] = []
    for entry in re.split(r"(?m)^(?=\d{4}-\d\d-\d\d [\d:.]+ \w+ \[\d+\] |postgres: )", text):
        matched = re.match(r"(?:\S+ \S+ \w+ \[\d+\] (LOG|FATAL|HINT|DETAIL|WARNING):  |postgres: )(.*)\Z", entry, re.S)
        if not matched or matched[1] in ("HINT", "DETAIL", "WARNING"):
            continue
        message = matched[2].rstrip("\n").replace("\n\t", "\n")
        if not message.startswith(("skipping missing", "configuration file ")) or "recursion" in message:
            found.append(message)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("major", range(catalogue.FIRST, catalogue.LAST + 1))
def test_odd_files_against_the_server(major: int) -> None:
    server = require(major)
    with private_directory() as base:

        @profile(
            max_examples=EXAMPLES if major in (13, 15, 18) else EXAMPLES // 3,
            deadline=None,
            derandomize="PGPREEMPTCHECK_EXAMPLES" not in os.environ,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(a_file(5), a_file(2), a_file(2), a_file(2), options, st.sampled_from(REPORTED))
        def compare(main: bytes, auto: bytes, a: bytes, d: bytes, argv: list[str], name: str) -> None:
            files = {"postgresql.conf": main, "postgresql.auto.conf": auto, "a.conf": a, "d/1.conf": d, "d/.2.conf": a}
            compare_one(server, f"{base}/data", files, argv, name)

        compare()


def compare_one(server: Server, data: str, files: dict[str, bytes], argv: list[str], name: str) -> None:
    shutil.rmtree(data, ignore_errors=True)
    os.makedirs(f"{data}/d", 0o700)
    os.chmod(data, 0o700)
    for path, text in {"PG_VERSION": b"%d\n" % server.major, **files}.items():
        with open(f"{data}/{path}", "wb") as file:
            file.write(text)
    give(data)
    done = server.run_postgres_C(data, name, argv)
    theirs = said_by(done.stderr)
    start = file_settings.Start(LiveHost(), data, None, server.major, ["postgres", "-D", data, *argv], None, {})
    # `-C` ends before the values are checked together: see test_values_that_do_not_go_together
    start.errors = [error for error in start.errors if error.file or "must be less than" not in error.reason]
    ours = [error.reason for error in start.errors if not error.reason.startswith(TOGETHER)]
    context = f"{server.key}\n{files}\n{argv}\ntheirs {theirs}\nours {ours} {start.undecided}"
    if start.undecided or start.reading.gaps:
        assert ours == theirs[: len(ours)] or not ours, context
    else:
        assert ours == theirs, context
    if done.returncode == 0:
        fact = start.values.get(name)
        if fact is None:
            setting = start.known.find(name)
            assert setting is not None
            assert str(setting.default) == done.stdout.decode().strip(), context
        elif isinstance(fact, Known):
            assert str(fact.value) == done.stdout.decode().strip(), f"{context}\n{name} {fact} {done.stdout!r}"
        else:
            assert start.undecided, f"{context}\n{name} {fact} {done.stdout!r}"


TOGETHER = (
    "WAL archival cannot",
    "WAL streaming (",
    "WAL cannot be summ",
    "replication slot synch",
    "too many server",
    "multiple recovery",
)


@pytest.mark.slow
@pytest.mark.parametrize("major", range(catalogue.FIRST, catalogue.LAST + 1))
def test_values_that_do_not_go_together(major: int) -> None:
    """What PostmasterMain refuses only at a real start."""
    server = require(major)
    minimal = b"wal_level = minimal\nmax_wal_senders = 0\n"
    contents = [
        b"max_connections = 5\nsuperuser_reserved_connections = 5\n",
        b"max_connections = 6\nsuperuser_reserved_connections = 5\n",
        b"wal_level = minimal\n",
        minimal,
        minimal + b"archive_mode = on\n",
        b"max_connections = 262143\n",
        b"max_connections = 262000\nmax_worker_processes = 200\n",
        b"recovery_target_xid = '9'\nrecovery_target_name = 'x'\n",
    ]
    if major >= 16:
        contents.append(b"max_connections = 5\nsuperuser_reserved_connections = 2\nreserved_connections = 3\n")
    if major >= 17:
        contents += [minimal + b"summarize_wal = on\n", minimal + b"sync_replication_slots = on\n"]
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data)
        for text in contents:
            compare_starts(server, data, text)


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 15, 17, 18, 19])
@pytest.mark.parametrize("segment", [1, 16, 64])
def test_wal_sizes_against_the_size_of_a_segment(major: int, segment: int) -> None:
    server = require(major)
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data, f"--wal-segsize={segment}")
        for text in (
            b"",
            b"min_wal_size = %dMB\nmax_wal_size = %dMB\n" % (2 * segment, 2 * segment),
            b"min_wal_size = %dMB\n" % max(2 * segment - 1, 2),
            b"max_wal_size = %dMB\n" % max(2 * segment - 1, 2),
            b"min_wal_size = 80MB\n",
        ):
            compare_starts(server, data, text)


def compare_starts(server: Server, data: str, text: bytes) -> list[str]:
    """Compare what is foretold of these lines in postgresql.auto.conf with a real start; return the refusal."""
    with open(f"{data}/postgresql.auto.conf", "wb") as file:
        file.write(text)
    found = file_settings.read(LiveHost(), data_directory=data, config_file=None, major=server.major)
    try:
        server.start(data, ["-c", "fsync=off"]).stop()
        theirs: list[str] = []
    except ServerRefusedError as refused:
        theirs = said_by(str(refused).encode("utf-8", "surrogateescape"))[:1]
    assert [error.reason for error in found.errors] == theirs, text
    assert isinstance(found.accepted, Known), text
    return theirs


LONG = "n" * 64
CONTENTS: dict[str, tuple[str, ...]] = {
    "DateStyle": (
        *(
            "ISO, MDY",
            "iso, dmy",
            "German",
            "SQL, European",
            "default",
            "postgresql",
            "noneuro",
            '"ISO", MDY',
            "",
            "us",
        ),
        *("Postgres,ISO", "mdy,dmy", "ISO,,MDY", "iso-8601", "x", '"a', "a b(", "ymd,us", "german, iso", "iso,iso"),
        *("ISO\vMDY", "ISO,\vMDY", "ISO MDY", "usa", "euro, dmy", " , iso", "iso,"),
    ),
    "TimeZone": ("Europe/Berlin", "UTC", "Etc/UTC", "GMT", "America/New_York", "europe/berlin", "Asia/Kolkata", ""),
    "log_timezone": ("Europe/Berlin", "UTC", "GMT", ""),
    "backtrace_functions": ("", "a,b", "a b", "a\tb\nc", "-1", "a(", '"a"', "\u00e9"),
    "client_encoding": ("utf8", "UTF-8", "sql_ascii", "SQL_ASCII", "latin1", "LATIN9", "WIN1252", "U T F 8", "unicode"),
    "createrole_self_grant": ("", "set", "SET , inherit", '"set"', "x", "set inherit"),
    "default_table_access_method": ("heap", "", "x", LONG, LONG[1:]),
    "log_connections": ("on", "off", "TRUE", "1", "receipt,authentication", "all", "", '"a', "a b"),
    "log_destination": (
        "stderr",
        "",
        "csvlog, syslog",
        "x",
        '"stderr"',
        "STDERR",
        "stderr csvlog",
        "jsonlog",
        "stderr,",
    ),
    "primary_slot_name": ("", "a_1", LONG[1:], LONG, "UPPER", "a-b", "zork nonsense", "\u00e9"),
    "recovery_target": ("", "immediate", "Immediate", "x", " immediate"),
    "recovery_target_lsn": ("", "0/0", "FFFFFFFF/ffffffff", "1/123456789", " 0/0", "0/0 ", "x", "1", "/1", "1/", "0/g"),
    "recovery_target_name": ("", LONG, LONG[1:], "a b", "\u00e9" * 31, "\u00e9" * 32),
    "recovery_target_time": (
        *("", "2026-01-01", "2026-01-01 00:00:00", "2026-12-28T23:59:59.123456", "2026-01-01 10:00+02", "today"),
        *("2026-01-01 10:00:00 UTC", "2026-01-01 00:00:00 GMT", "2026-01-01 00:00:00+05:30"),
        *("tomorrow", "yesterday", "epoch", "infinity", "-infinity", "2026-13-01", "2026-00-10", "2026-01-32"),
        *("2026-01-01 00:00:00+0530", "2026-01-01 00:00:00-14", "0001-01-01 00:00"),
    ),
    "recovery_target_timeline": ("", "latest", "current", "2", "123456789"),
    "recovery_target_xid": ("", "1000", "123456789"),
    "restrict_nonsystem_relation_kind": ("", "view", "view, foreign-table", "x", "view view"),
    "search_path": (
        '"$user", public',
        "",
        "a,b",
        "a b",
        '"a',
        'a"b',
        '"a""b"',
        '"a"b',
        '""',
        ",",
        "a,",
        " a , b ",
        "a;b",
    ),
    "synchronized_standby_slots": ("", "a,b", "A", '"a', "zork nonsense"),
    "synchronous_standby_names": (
        *(
            "",
            "*",
            "FIRST 1 (a, b)",
            "ANY 2 (a,b)",
            "2 (a,b)",
            '"a-b"',
            "a,b,c",
            "1",
            "first 2(x)",
            "any 1 (*)",
            "a, *",
        ),
        *("a-b", "a.b", "0 (a)", "FIRST 1(a", "FIRST", "first, a", '"first"', '""', '"a""b"', "1a", "a b", "a,", "()"),
        *(
            "1 ()",
            "1 (a) b",
            "FIRST (a)",
            "ANY 00 (a)",
            "\u00e9",
            "a$1",
            "$1",
            "(a)",
            "1 (1, 2)",
            "\v",
            "a;",
            " ",
            "a,\vb",
        ),
    ),
    "temp_tablespaces": ("", "a,b", "a b", '"a'),
    "timezone_abbreviations": ("Default", "India", "Australia"),
    "wal_consistency_checking": ("", "all", "heap,btree", "HEAP2", "a b", '"a'),
}
UNCHECKED: dict[str, tuple[str, ...]] = {
    "TimeZone": ("x y", "INTERVAL '3'", "Europe/Zork", "/etc/passwd", "posixrules", "posix/UTC", "right/UTC"),
    "client_encoding": ("x", "", "latin11"),
    "debug_io_direct": ("data", "x"),
    "log_connections": ("x", "all, on"),
    "recovery_target_time": (
        "2026-02-30",
        "NOW",
        "2026-01-01 10:00:00Z",
        "2026-01-01 25:00",
        "01.02.2026",
        "x",
        "2026-01-01 00:00 Europe/Berlin",
    ),
    "recovery_target_timeline": ("x", "0", "-1", "99999999999999999999"),
    "recovery_target_xid": ("x", "0", "0x10", "99999999999999999999"),
    "synchronized_standby_slots": ("-1", "/x"),
    "synchronous_standby_names": ("99999999999999999999 (a)",),
    "timezone_abbreviations": ("default", "x", ""),
    "wal_consistency_checking": ("x",),
}


@pytest.mark.slow
@pytest.mark.parametrize("major", range(catalogue.FIRST, catalogue.LAST + 1))
def test_what_strings_hold(major: int) -> None:
    server = require(major)
    known = catalogue.load(major)
    wrong: list[str] = []
    with private_directory() as base:
        data = f"{base}/data"
        for name, text in (
            (n, text) for found in (CONTENTS, UNCHECKED) for n, texts in found.items() for text in texts
        ):
            setting = known.find(name)
            if setting is None or setting.kind != "s":
                continue
            line = f"{name} = {quote(text)}\n".encode()
            try:
                compare_one(server, data, {"postgresql.conf": line}, [], "port")
            except AssertionError as error:
                wrong.append(str(error))
            start = file_settings.Start(LiveHost(), data, None, major, ["postgres", "-D", data], None, {})
            unchecked = text in UNCHECKED.get(name, ()) or bool(known.undecided_name(name))
            if bool(start.undecided) is not (unchecked and not start.errors):
                wrong.append(f"{name} = {text!r} {start.undecided}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("major", range(catalogue.FIRST, catalogue.LAST + 1))
def test_no_other_string_is_refused_by_the_server(major: int) -> None:
    """What setting_strings.py does not know is never refused for what it holds, but for what the host decides."""
    from pgpreemptcheck.facts import setting_strings

    server = require(major)
    known = catalogue.load(major)
    host_decides = {"config_file", "lc_messages", "lc_monetary", "lc_numeric", "lc_time"}
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data)
        for name in known.names():
            setting = known.find(name)
            assert setting is not None
            looked_at = name in setting_strings._CHECKS or name in host_decides or known.undecided_name(name)
            if setting.kind != "s" or setting.context == "internal" or looked_at:
                continue
            # all at once would end at the first: each string is seen to be taken
            for text in ("", "x", "zork nonsense", '"a', "\u00e9", "-1", "a b(,"):
                done = server.run_postgres_C(data, "port", ["-c", f"{name}={text}"])
                assert done.returncode == 0, (name, text, done.stderr)


pieces = st.sampled_from(
    [
        *(
            '"',
            '""',
            ",",
            " ",
            "(",
            ")",
            "*",
            "-",
            ".",
            "/",
            ":",
            "+",
            "\t",
            "\n",
            "\v",
            "$",
            "\u00e9",
            "0",
            "1",
            "2",
            "63",
        ),
        *(
            "a",
            "b_1",
            "iso",
            "MDY",
            "dmy",
            "postgres",
            "us",
            "german",
            "first",
            "ANY",
            "view",
            "heap",
            "all",
            "set",
            "inherit",
        ),
        *("2026-01-01", "10:00:00", "23:59", "UTC", "latest", "immediate", "0/16B3748", "FFFFFFFF", "n" * 31, "stderr"),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize("major", range(catalogue.FIRST, catalogue.LAST + 1))
def test_odd_strings_against_the_server(major: int) -> None:
    server = require(major)
    known = catalogue.load(major)
    strings = sorted(name for name in CONTENTS if (setting := known.find(name)) and setting.kind == "s")
    with private_directory() as base:

        @profile(
            max_examples=EXAMPLES if major in (13, 15, 18) else EXAMPLES // 3,
            deadline=None,
            derandomize="PGPREEMPTCHECK_EXAMPLES" not in os.environ,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.sampled_from(strings), st.one_of(st.sampled_from(CONTENTS["DateStyle"]), st.lists(pieces, max_size=6))
        )
        def compare(name: str, text: str | list[str]) -> None:
            line = f"{name} = {quote(''.join(text))}\n".encode()
            compare_one(server, f"{base}/data", {"postgresql.conf": line}, [], "port")

        compare()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-17", "debian-18", "debian-19"])
@pytest.mark.parametrize("options", [(), ("--locale=C.UTF-8",), ("-T", "german")])
def test_what_initdb_writes_is_taken(key: str, options: tuple[str, ...]) -> None:
    server = require(key)
    with private_directory() as base:
        server.initdb(f"{base}/data", "--no-sync", *options)
        found = file_settings.read(LiveHost(), data_directory=f"{base}/data", config_file=None, major=server.major)
        assert found.accepted == Known(True, f"{base}/data/postgresql.conf")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files that a server may not read")
@pytest.mark.parametrize("major", range(catalogue.FIRST, catalogue.LAST + 1))
@pytest.mark.parametrize(
    ("main", "closed"),
    [
        ("port = 7\ninclude 'a.conf'\n", "a.conf"),
        ("port = 7\ninclude_if_exists 'a.conf'\n", "a.conf"),
        ("port = 7\ninclude_dir 'd'\n", "d"),
        ("port = 7\ninclude_dir 'd'\n", "d/1.conf"),
        ("port = 7\ninclude 'd/1.conf'\n", "d"),
        ("port = 7\ninclude_if_exists 'd/1.conf'\n", "d"),
        ("port = 7\n", "postgresql.conf"),
        ("port = 7\n", "postgresql.auto.conf"),
        ("port = 7\ninclude_dir 'd'\n", "d searchable by nobody"),
        ("port = 7\ninclude_dir 'links'\n", "d"),
    ],
)
def test_what_the_server_may_not_read(major: int, main: str, closed: str) -> None:
    """Read with its rights: refused, or passed over, as the server itself does; with other rights it is unknown."""
    from tests.servers import server_user

    server = require(major)
    with private_directory() as base:
        data = f"{base}/data"
        os.makedirs(f"{data}/d", 0o700)
        os.mkdir(f"{data}/links")
        os.symlink("../d/1.conf", f"{data}/links/1.conf")
        texts = {"PG_VERSION": f"{major}\n", "postgresql.conf": main, "postgresql.auto.conf": "work_mem = 1MB\n"}
        for name, text in {**texts, "a.conf": "port = 8\n", "d/1.conf": "port = 9\n"}.items():
            with open(f"{data}/{name}", "w") as file:
                file.write(text)
        give(data)
        path = f"{data}/{closed.split()[0]}"
        os.chown(path, 0, 0)
        os.chmod(path, 0o744 if "searchable" in closed else 0o700)
        done = server.run_postgres_C(data, "port")
        child = owner.start(server_user().pw_uid)
        try:
            for rights in ("server", "owner"):
                found = file_settings.read(
                    child.host(), data_directory=data, config_file=None, major=major, rights=rights
                )
                if "links" in main and rights == "owner":  # what keeps it out is not above it
                    assert isinstance(found.accepted, Unknown)
                    continue
                assert [error.reason for error in found.errors] == said_by(done.stderr)
                if done.returncode == 0:
                    assert found.accepted == Known(True, f"{data}/postgresql.conf")
                    assert str(found.settings.port.value) == done.stdout.decode().strip()  # type: ignore[union-attr]
                else:
                    assert isinstance(found.accepted, Known) and found.accepted.value is False
                    assert isinstance(found.settings.shared_buffers, Unknown)  # it may be in what is closed
            found = file_settings.read(child.host(), data_directory=data, config_file=None, major=major)
            assert isinstance(found.accepted, Unknown) and found.accepted.kind == "permission"
            os.chmod(path, 0o774 if "searchable" in closed else 0o770)  # a server with a further group might read it
            found = file_settings.read(child.host(), data_directory=data, config_file=None, major=major, rights="owner")
            assert isinstance(found.accepted, Unknown) and found.accepted.kind == "permission"
        finally:
            child.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files that a server may not read")
@pytest.mark.parametrize("runs", [True, False])
def test_the_check_says_that_a_closed_include_stops_the_next_start(runs: bool) -> None:
    server = require(15)
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data)
        running = server.start(data) if runs else None
        try:
            with open(f"{data}/closed.conf", "w"):
                pass
            os.chmod(f"{data}/closed.conf", 0o600)
            with open(f"{data}/postgresql.conf", "w") as file:
                file.write("include 'closed.conf'\n")
            found = tool.check("--no-sql", "--pgdata", data).cluster(data)["next_start"]
        finally:
            if running is not None:
                running.stop()
        assert tool.value(found["outcome"]) == "refuses"
        assert found["error"]["line"] == 1
        reason = f'could not open configuration file "{data}/closed.conf": Permission denied'
        assert found["error"]["reason"] == reason
        with pytest.raises(ServerRefusedError, match=re.escape(reason)):
            server.start(data)


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 18])
def test_the_port_of_the_environment(major: int) -> None:
    server = require(major)
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data)
        for text in ("99999999", "65536", "0", "-1", "x", "", "5433", " 0x1539 ", "1e3", "5433 "):
            done = server.run_postgres_C(data, "port", env={"PGPORT": text})
            host = LiveHost()
            found = file_settings.read(
                host, data_directory=data, config_file=None, major=major, environment={"PGPORT": text}
            )
            assert [error.reason for error in found.errors] == said_by(done.stderr)
            if done.returncode == 0:
                assert found.settings.port == Known(int(done.stdout), "environment PGPORT")
        port = free_port()
        argv = [server.program("postgres"), "-D", data, "-k", data, "-h", ""]
        with server.start(data, argv=argv, env={"PGPORT": str(port)}, port=port):
            found_port = tool.check("--no-sql").cluster(data)["port"]
            assert found_port == {"value": port, "source": "environment PGPORT"}
