"""What a start takes from the files and the command line. Right values were seen on PostgreSQL 13 to 19."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from pgpreemptcheck import inspection
from pgpreemptcheck.captured import DirectoryHost
from pgpreemptcheck.facts import file_settings, postmaster_options, setting_values, settings
from pgpreemptcheck.facts.settings import FileSettings, Settings
from pgpreemptcheck.host import FileStatus
from pgpreemptcheck.values import Known, Unknown
from tests.test_control import made

AT = 'in file "/d/postgresql.conf" line 2'

Reader = Callable[..., FileSettings]


@pytest.fixture
def read(tmp_path: Any) -> Reader:
    def reader(
        text: bytes = b"", major: int | None = 15, argv: tuple[str, ...] = (), fork: str | None = None, **more: Any
    ) -> FileSettings:
        environment, host = more.pop("environment", None), more.pop("host", None)
        for name, content in {"d/postgresql.conf": text, **more}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return file_settings.read(
            host or DirectoryHost(str(tmp_path)),
            data_directory="/d",
            config_file=None,
            major=major,
            argv=("postgres", *argv) if argv else (),
            fork=fork,
            environment=environment,
        )

    return reader


def accepted(found: FileSettings) -> bool | None:
    return found.accepted.value if isinstance(found.accepted, Known) else None


def value(found: Settings, name: str) -> Any:
    fact = getattr(found, name)
    return (fact.value, fact.source) if isinstance(fact, Known) else None


# values


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        *(("128MB", 16384), ("128 MB", 16384), (" 128MB ", 16384), ("1.5GB", 196608), ("0x40000", 262144)),
        *(("010", 8), ("1e2", 100), ("131072 kB", 16384), ("8192B", 1), ("12kB", 2), ("20kB", 2), ("28kB", 4)),
        *(
            (".5", 0),
            ("0.5", 0),
            ("1.5", 2),
            ("010.5", 10),
            ("-1", -1),
            ("+7", 7),
            ("0x1p4.", None),
            ("1TB", 134217728),
        ),
        *(("128mb", None), ("2G", None), ("25%", None), ("", None), (" ", None), ("08", None), ("0x", None)),
        *(
            ("0x1G", None),
            ("inf", None),
            ("nan", None),
            ("1e999", None),
            ("16TB2", None),
            ("1 2", None),
            ("32TB", None),
        ),
        *(("2147483647", 2147483647), ("2147483648", None), ("99999999999999999999", None), ("1s", None)),
        *(("0.0000001TB", 0), ("30.1GB", 3945216)),
    ],
)
def test_memory(text: str, blocks: int | None) -> None:
    assert setting_values.parse_integer(text, "8kB") == blocks


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        *(("1min", "s", 60), ("1500ms", "s", 2), ("1d", "min", 1440), ("1.5h", "min", 90), ("500us", "ms", 0)),
        *(("1501us", "ms", 2), ("1m", "s", None), ("1Min", "s", None), ("5", "", 5), ("5s", "", None)),
    ],
)
def test_time(text: str, unit: str, number: int | None) -> None:
    assert setting_values.parse_integer(text, unit) == number


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        *(
            ("on", True),
            ("ON", True),
            ("t", True),
            ("tru", True),
            ("y", True),
            ("1", True),
            ("of", False),
            ("F", False),
        ),
        *(
            ("n", False),
            ("0", False),
            ("o", None),
            ("", None),
            ("on ", None),
            ("2", None),
            ("yess", None),
            ("onn", None),
        ),
    ],
)
def test_boolean(text: str, truth: bool | None) -> None:
    assert setting_values.parse_bool(text) is truth


@pytest.mark.parametrize(
    ("major", "line", "reason"),
    [
        (13, b"shared_buffers = 128mb", 'invalid value for parameter "shared_buffers": "128mb"'),
        (16, b"SORT_MEM = x", 'invalid value for parameter "SORT_MEM": "x"'),
        (18, b"SORT_MEM = x", 'invalid value for parameter "work_mem": "x"'),
        (13, b"LOG_destination = x", 'invalid value for parameter "log_destination": "x"'),
        (16, b"work_mem = 12", '12 kB is outside the valid range for parameter "work_mem" (64 .. 2147483647)'),
        (
            17,
            b"shared_buffers = 12",
            '12 8kB is outside the valid range for parameter "shared_buffers" (16 8kB .. 1073741823 8kB)',
        ),
        (19, b"port = 0", '0 is outside the valid range for parameter "port" (1 .. 65535)'),
        (
            17,
            b"vacuum_cost_delay = 1h",
            '3.6e+06 ms is outside the valid range for parameter "vacuum_cost_delay" (0 ms .. 100 ms)',
        ),
        (
            15,
            b"cpu_tuple_cost = 'inf'",
            'Infinity is outside the valid range for parameter "cpu_tuple_cost" (0 .. 1.79769e+308)',
        ),
        (15, b"fsync = maybe", 'parameter "fsync" requires a Boolean value'),
        (15, b"block_size = 8192", 'parameter "block_size" cannot be changed'),
        (15, b"huge_pages = always", 'invalid value for parameter "huge_pages": "always"'),
        (15, b"default_with_oids = on", "tables declared WITH OIDS are not supported"),
        (17, b"notify_buffers = 17", 'invalid value for parameter "notify_buffers": 17'),
        (15, b"max_connections = 262143", 'invalid value for parameter "max_connections": 262143'),
        (13, b"huge_page_size = 0", 'unrecognized configuration parameter "huge_page_size" ' + AT),
        (15, b"logging = on", 'unrecognized configuration parameter "logging" ' + AT),
        (16, b"force_parallel_mode = on", 'unrecognized configuration parameter "force_parallel_mode" ' + AT),
    ],
)  # fmt: skip
def test_a_refusal_in_the_servers_words(read: Reader, major: int, line: bytes, reason: str) -> None:
    found = read(b"# first\n" + line + b"\n", major)
    assert accepted(found) is False
    assert found.error is not None
    assert (found.error.file, found.error.line, found.error.reason) == ("/d/postgresql.conf", 2, reason)


def test_the_stages_of_a_start(read: Reader) -> None:
    value_error, name_error, syntax_error = b"port = zz\n", b"zork = 1\n", b"fsync = on;\n"
    auto = {"d/postgresql.auto.conf": b"x y z\n"}
    assert [e.line for e in read(value_error + name_error + syntax_error, **auto).errors] == [3]
    assert [e.file for e in read(value_error + name_error, **auto).errors] == ["/d/postgresql.auto.conf"]
    assert [e.line for e in read(value_error + name_error, **{"d/postgresql.auto.conf": b""}).errors] == [2]
    assert [e.line for e in read(value_error).errors] == [1]


# what counts


def test_the_last_line_of_a_setting_counts_and_only_it_is_judged(read: Reader) -> None:
    found = read(b"Port = zz\nPort = 7\n", **{"d/postgresql.auto.conf": b"max_connections = '200'\n"})
    assert accepted(found) is True
    assert value(found.settings, "port") == (7, "/d/postgresql.conf line 2")
    assert value(found.settings, "max_connections") == (200, "/d/postgresql.auto.conf line 1")


def test_each_spelling_of_a_name_is_judged(read: Reader) -> None:
    found = read(b"WORK_MEM = 'on'\nport = 1\nPort = 2\nport = 3\nPORT = 4\nwork_mem = 'off'\n")
    assert [(e.line, e.reason) for e in found.errors] == [
        (1, 'invalid value for parameter "WORK_MEM": "on"'),
        (6, 'invalid value for parameter "work_mem": "off"'),
    ]
    assert value(found.settings, "port") == (4, "/d/postgresql.conf line 5")


def test_the_command_line_wins_but_the_file_is_judged_all_the_same(read: Reader) -> None:
    found = read(b"max_connections = 5\n", argv=("-D", "/d", "-c", "max_connections=0x10", "-B", "1MB"))
    assert value(found.settings, "max_connections") == (16, "command line")
    assert value(found.settings, "shared_buffers") == (1048576, "command line")
    assert accepted(read(b"max_connections = zz\n", argv=("-c", "max_connections=7"))) is False


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("-c", "max-connections=1x"), 'invalid value for parameter "max_connections": "1x"'),
        (("--max-connectionz=1",), 'unrecognized configuration parameter "max_connectionz"'),
        (("-c", "port"), "-c port requires a value"),
        (("--port",), "--port requires a value"),
        (("-c", "x.1y=1"), 'invalid configuration parameter name "x.1y"'),
    ],
)
def test_the_command_line_is_refused_first(read: Reader, argv: tuple[str, ...], reason: str) -> None:
    found = read(b"x y z\n", argv=argv)
    assert accepted(found) is False
    assert [error.reason for error in found.errors] == [reason]


def test_options_of_the_postmaster() -> None:
    argv = ["postgres", "-D", "/d", "-N50", "-ip", "5433", "-Fd", "3", "--work-mem=1MB", "-k/tmp", "--", "-N1"]
    assert postmaster_options.option_values(argv) == [
        ("max_connections", "50", "-N"),
        ("listen_addresses", "*", "-i"),
        ("port", "5433", "-p"),
        ("fsync", "false", "-F"),
        ("work_mem", "1MB", "--work-mem=1MB"),
        ("unix_socket_directories", "/tmp", "-k"),
    ]


@pytest.mark.parametrize(("major", "buffers"), [(13, 8 << 20), (14, 8 << 20), (15, 128 << 20), (19, 128 << 20)])
def test_defaults_are_those_of_the_major(read: Reader, major: int, buffers: int) -> None:
    found = read(b"", major).settings
    assert value(found, "shared_buffers") == (buffers, "default")
    assert value(found, "huge_pages") == ("try", "default")
    assert value(found, "huge_page_size") == (0, "default" if major >= 14 else "not a setting before 14")
    assert value(found, "max_connections") == (100, "default")
    assert value(found, "wal_buffers") == (-1, "default")
    assert value(found, "shared_preload_libraries") == ("", "default")
    assert value(found, "autovacuum_worker_slots") == (
        (16, "default") if major >= 18 else (0, "not a setting before 18")
    )


def test_no_default_after_a_failed_include(read: Reader) -> None:
    found = read(b"shared_buffers = 1GB\ninclude 'gone.conf'\n")
    assert accepted(found) is False
    assert value(found.settings, "shared_buffers") == (1 << 30, "/d/postgresql.conf line 1")
    assert value(found.settings, "huge_pages") is None


def test_no_default_after_a_failed_include_whatever_the_major(read: Reader) -> None:
    assert value(read(b"", None).settings, "max_connections") == (100, "default")
    assert value(read(b"include 'gone.conf'\n", None).settings, "max_connections") is None


@pytest.mark.parametrize(
    "line",
    [
        *(b"superuser_reserved_connections = 100", b"wal_level = minimal"),
        b"wal_level = minimal\nmax_wal_senders = 0\narchive_mode = on",
    ],
)
def test_values_that_do_not_go_together(read: Reader, line: bytes) -> None:
    assert accepted(read(line)) is False
    assert accepted(read(line + b"\nwal_compression = lz4")) is False
    assert accepted(read(line + b"\nmax_wal_senders = '0b1'")) is None


def test_what_another_place_decides_is_unknown(read: Reader) -> None:
    assert accepted(read(b"max_stack_depth = 7680")) is True
    assert accepted(read(b"max_stack_depth = 7681")) is None
    assert accepted(read(b"min_wal_size = 32MB")) is True
    assert accepted(read(b"min_wal_size = 16MB")) is None  # the size of a WAL segment is not in this capture


@pytest.mark.parametrize(
    ("megabytes", "lines", "refused"),
    [
        *((1, b"min_wal_size = 2MB\nmax_wal_size = 2MB", None), (16, b"min_wal_size = 32MB", None), (16, b"", None)),
        *((16, b"min_wal_size = 31MB", "min_wal_size"), (16, b"max_wal_size = 31MB", "max_wal_size")),
        *((64, b"min_wal_size = 128MB", None), (64, b"min_wal_size = 127MB", "min_wal_size")),
        (64, b"", "min_wal_size"),  # its default of 80 MB
    ],
)
def test_wal_sizes_hold_two_segments(read: Reader, megabytes: int, lines: bytes, refused: str | None) -> None:
    control = made("<", segment=megabytes << 20)
    found = read(lines, **{"d/global/pg_control": control})
    reason = f'"{refused}" must be at least twice "wal_segment_size"'
    assert [error.reason for error in found.errors] == ([reason] if refused else [])
    assert accepted(found) is (refused is None)
    overridden = read(
        lines, argv=("-c", "min_wal_size=1GB", "-c", "max_wal_size=1GB"), **{"d/global/pg_control": control}
    )
    assert accepted(overridden) is True


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        *(("datestyle = 'iso, mdy'", True), ("datestyle = 'iso, sql'", False), ("DateStyle = 'iso mdy'", False)),
        *(("synchronous_standby_names = 'ANY 1 (a, \"b-c\")'", True), ("synchronous_standby_names = 'node-1'", False)),
        *(("recovery_target_time = '2026-01-01 10:00:00+02'", True), ("recovery_target_time = 'today'", False)),
        *(("recovery_target_time = 'last week'", None), ("recovery_target = latest", False)),
        *(("timezone = 'Europe/Berlin'", True), ("timezone = 'a b'", None), ("log_timezone = ''", False)),
        *(("search_path = 'a, b'", True), ("search_path = 'a b'", False), ("client_encoding = 'zork'", None)),
        *(("wal_consistency_checking = 'zork'", None), ("wal_consistency_checking = 'all'", True)),
        *(("lc_messages = 'de_DE.utf8'", True), ("default_text_search_config = 'pg_catalog.german'", True)),
        *(("shared_preload_libraries = 'a, b'", True), ("primary_slot_name = 'A'", False)),
    ],
)
def test_what_strings_hold(read: Reader, line: str, taken: bool | None) -> None:
    """Right answers: see test_settings_server.py, where real servers give them."""
    found = read(line.encode())
    assert accepted(found) is taken
    if taken is None:
        assert isinstance(found.accepted, Unknown)
        assert found.accepted.reason.startswith("whether PostgreSQL takes this value of ")


@pytest.mark.parametrize(
    ("zone", "taken"),
    [
        *(("Europe/Berlin", True), ("europe/BERLIN", True), ("GMT", True), ("Europe/Zork", None), ("US/Pacific", None)),
        *(("posixrules", None), ("zone.tab", None), ("right/UTC", None), ("../zoneinfo/UTC", None), ("Europe", None)),
    ],
)
def test_a_time_zone_that_the_host_does_not_know_is_doubtful(read: Reader, zone: str, taken: bool | None) -> None:
    names = ("Europe/Berlin", "UTC", "right/UTC", "posixrules")
    table = {f"usr/share/zoneinfo/{name}": b"TZif2..." for name in names}
    found = read(f"timezone = '{zone}'".encode(), **table, **{"usr/share/zoneinfo/zone.tab": b"# a list"})
    assert accepted(found) is taken


def test_a_refused_line_leaves_its_setting_unknown(read: Reader) -> None:
    found = read(b"shared_buffers = 1GB\nmax_connections = 7\nshared_buffers = 4GB;\n")
    assert value(found.settings, "shared_buffers") is None
    assert value(found.settings, "max_connections") == (7, "/d/postgresql.conf line 2")
    fact = found.settings.shared_buffers
    assert isinstance(fact, Unknown) and 'near token ";"' in fact.reason


def test_a_misspelt_name_has_a_suggestion(read: Reader) -> None:
    found = read(b"hugepages = on\n")
    assert found.error is not None and found.error.suggestion == "huge_pages"


def test_what_a_build_option_or_minor_release_decides_is_unknown(read: Reader) -> None:
    for line in (b"wal_compression = zstd", b"restrict_nonsystem_relation_kind = view", b"extension_destdir = '/x'"):
        assert accepted(read(line)) is None, line
    assert accepted(read(b"wal_compression = zstd\nport = zz\n")) is False
    assert accepted(read(b"io_method = io_uring", 18)) is None
    assert accepted(read(b"io_method = io_uring", 17)) is False
    assert accepted(read(b"max_wal_senders = '0b11'")) is None


def test_a_fork_may_have_names_of_its_own(read: Reader) -> None:
    assert accepted(read(b"edb_redwood_date = on\n")) is False
    assert accepted(read(b"edb_redwood_date = on\n", fork="EDB Postgres Advanced Server")) is None
    assert accepted(read(b"port = 5;\n", fork="EDB Postgres Advanced Server")) is False


@pytest.mark.parametrize("major", [None, 12, 20])
def test_a_major_without_a_catalogue_refuses_nothing(read: Reader, major: int | None) -> None:
    found = read(b"shared_buffers = 1GB\nzork = 1\n", major)
    assert accepted(found) is None
    assert found.error is None
    assert value(found.settings, "shared_buffers") == (1 << 30, "/d/postgresql.conf line 1")
    assert value(found.settings, "huge_page_size") == ((0, "not a setting before 14") if major == 12 else None)


def test_an_extensions_setting_is_fine(read: Reader) -> None:
    assert accepted(read(b"pg_stat_statements.max = 1000000\n")) is True


def test_the_data_directory_in_the_file_is_where_auto_conf_lies(read: Reader) -> None:
    auto = {"e/postgresql.auto.conf": b"port = 7\n", "d/postgresql.auto.conf": b"port = 8\n"}
    found = read(b"data_directory = '/e'\n", **auto)
    assert value(found.settings, "port") == (7, "/e/postgresql.auto.conf line 1")


def test_pgport_counts_below_the_files(read: Reader) -> None:
    assert value(read(b"", environment={"PGPORT": "6000"}).settings, "port") == (6000, "environment PGPORT")
    assert value(read(b"port = 1\n", environment={"PGPORT": "6000"}).settings, "port") == (
        1,
        "/d/postgresql.conf line 1",
    )
    assert value(read(b"", environment={"PGPORT": " 0x1538 "}).settings, "port") == (5432, "environment PGPORT")


@pytest.mark.parametrize("text", ["99999999", "65536", "0", "-1"])
@pytest.mark.parametrize("place", ["PGPORT", "-p", "-c", "file"])
def test_a_port_out_of_range_is_refused_and_not_believed(read: Reader, place: str, text: str) -> None:
    """Seen on 13, 17 and 18; PGPORT and the command line are refused even where a later line is right."""
    argv = {"-p": ("-p", text), "-c": ("-c", f"port={text}")}.get(place, ())
    environment = {"PGPORT": text} if place == "PGPORT" else None
    found = read(b"port = 5432" if place != "file" else b"port = " + text.encode(), argv=argv, environment=environment)
    reason = f'{text} is outside the valid range for parameter "port" (1 .. 65535)'
    assert [error.reason for error in found.errors] == [reason]
    running = settings.running(found, None, ("postgres", *argv), 15, Known(1e12, "s"))
    assert (value(running, "port") is None) is (place != "PGPORT")


@pytest.mark.parametrize(
    ("seen", "believed"), [(99999999, False), (65536, False), (0, False), (65535, True), (1, True)]
)
def test_a_port_of_the_process_list_is_one_that_can_be(seen: int, believed: bool) -> None:
    port = inspection._port(Unknown("refused"), Known(seen, "command line"))
    assert (port == Known(seen, "command line")) is believed


class Forbidden(DirectoryHost):
    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return super()._fetch(path, offset, length)

    def _status(self, path: str) -> FileStatus:
        return FileStatus(False, 0, 0o600, 1, 0.0) if path.endswith("secret") else super()._status(path)


def test_what_cannot_be_read_is_neither_refused_nor_guessed(read: Reader, tmp_path: Any) -> None:
    text = b"huge_pages = on\nport = zz\ninclude 'secret'\nmax_connections = 7\n"
    found = read(text, host=Forbidden(str(tmp_path)))
    assert accepted(found) is None  # the file may set port again
    assert found.error is None
    assert value(found.settings, "huge_pages") is None
    assert value(found.settings, "max_connections") == (7, "/d/postgresql.conf line 4")
    assert value(found.settings, "shared_buffers") is None
    assert accepted(read(text + b"x y z\n", host=Forbidden(str(tmp_path)))) is False


def test_a_capture_without_the_file_says_nothing(tmp_path: Any) -> None:
    found = file_settings.read(DirectoryHost(str(tmp_path)), data_directory="/d", config_file=None, major=15)
    assert accepted(found) is None
    assert value(found.settings, "huge_pages") is None


def test_newest_change(read: Reader, tmp_path: Any) -> None:
    read(b"include_dir 'c'\n", **{"d/c/a.conf": b"port = 1\n"})
    times = {"d/postgresql.conf": 1000, "d/c/a.conf": 3000, "d/c": 2000}
    for name, when in times.items():
        os.utime(tmp_path / name, (when, when))
    found = file_settings.read(DirectoryHost(str(tmp_path)), data_directory="/d", config_file=None, major=15)
    assert found.newest_change == Known(3000.0, "/d/c/a.conf")
    os.utime(tmp_path / "d/c", (4000, 4000))  # a file was taken away
    found = file_settings.read(DirectoryHost(str(tmp_path)), data_directory="/d", config_file=None, major=15)
    assert found.newest_change == Known(4000.0, "/d/c")


# the running server


def test_from_server() -> None:
    rows = {
        "shared_buffers": "16384",
        "huge_pages": "on",
        "huge_page_size": "2048",
        "wal_buffers": "512",
        "port": "5433",
    }
    found = settings.from_server(rows, 17)
    assert value(found, "shared_buffers") == (128 << 20, "sql pg_settings")
    assert value(found, "huge_page_size") == (2 << 20, "sql pg_settings")
    assert value(found, "huge_pages") == ("on", "sql pg_settings")
    assert value(found, "port") == (5433, "sql pg_settings")
    assert isinstance(found.max_connections, Unknown)
    assert value(settings.from_server(rows, 13), "huge_page_size") == (0, "not a setting before 14")
    assert value(settings.from_server({**rows, "block_size": "32768"}, 17), "shared_buffers") == (
        512 << 20,
        "sql pg_settings",
    )


def test_running(read: Reader) -> None:
    files = read(b"max_connections = 300\nshared_buffers = 1GB\n")
    assert isinstance(files.newest_change, Known)
    before, after = Known(files.newest_change.value - 1, "t"), Known(files.newest_change.value + 1, "t")
    argv = ("postgres", "-c", "max_connections=50")
    found = settings.running(files, None, argv, 15, after)
    assert value(found, "max_connections") == (50, "command line")
    assert value(found, "shared_buffers") == (1 << 30, "/d/postgresql.conf line 2")
    found = settings.running(files, None, argv, 15, before)
    assert value(found, "max_connections") == (50, "command line")
    assert found.shared_buffers == Unknown(
        "the files were changed after the server started",
        "run as root or as the cluster's owner, who may ask it over SQL; for a capture, copy files with cp -p",
    )
    assert isinstance(settings.running(files, None, argv, 15, Unknown("hidden")).shared_buffers, Unknown)
    assert value(settings.running(files, {"shared_buffers": "16"}, argv, 15, before), "shared_buffers") == (
        16 * 8192,
        "sql pg_settings",
    )


def test_what_sql_does_not_show_comes_from_elsewhere(read: Reader) -> None:
    """pg_settings hides shared_preload_libraries, alone of those that size the memory, from a role without rights."""
    files = read(b"shared_preload_libraries = pg_stat_statements\nmax_connections = 50")
    assert isinstance(files.newest_change, Known)
    before = Known(files.newest_change.value - 1, "s")
    after = Known(files.newest_change.value + 1, "s")
    shown = {"shared_buffers": "16", "max_connections": "20"}
    found = settings.running(files, shown, (), 15, after)
    assert value(found, "max_connections") == (20, "sql pg_settings")
    assert value(found, "shared_preload_libraries") == ("pg_stat_statements", "/d/postgresql.conf line 1")
    found = settings.running(files, shown, ("postgres", "-c", "shared_preload_libraries="), 15, before)
    assert value(found, "shared_preload_libraries") == ("", "command line")
    unread = settings.unread(Unknown("hidden"))
    for rows in (shown, None):
        found = settings.running(unread, rows, (), 13, before)
        assert value(found, "huge_page_size") == (0, "not a setting before 14")
    for gap in (
        settings.running(files, shown, (), 15, before).shared_preload_libraries,
        settings.running(unread, shown, (), 15, after).shared_preload_libraries,
        settings.from_server(shown, 15).shared_preload_libraries,
    ):
        assert isinstance(gap, Unknown) and gap.kind == "permission"
        assert "the role may not see it" in gap.reason and "GRANT pg_read_all_settings" in gap.hint


def test_a_file_of_30_kb_takes_a_few_milliseconds(read: Reader) -> None:
    import time

    text = b"".join(b"#setting_%d = on\t\t\t# a comment about it\n" % n for n in range(750))
    text += b"".join(b"%s = 5\n" % name for name in (b"max_wal_senders", b"max_worker_processes", b"port"))
    read(text)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        read(text)
        best = min(best, time.perf_counter() - start)
    assert len(text) > 29_000
    assert best < 0.02  # about 1 ms on a small idle machine


def test_a_server_cannot_say_what_no_server_has() -> None:
    found = settings.from_server({"max_connections": "-1", "shared_buffers": "9" * 5000}, 17)
    assert isinstance(found.max_connections, Unknown) and isinstance(found.shared_buffers, Unknown)


@pytest.mark.parametrize(
    ("line", "runs", "changed"),
    [
        (b"transaction_buffers = 16MB", {"transaction_buffers": "32"}, "transaction_buffers"),
        (b"transaction_buffers = 256kB", {"transaction_buffers": "32"}, None),
        (b"pg_stat_statements.max = 1000000", {"pg_stat_statements.max": "5000"}, "pg_stat_statements.max"),
        (b"pg_stat_statements.max = 5000", {"pg_stat_statements.max": "5000"}, None),
        (b"pg_stat_statements.max = 5000", {}, None),  # not loaded: it takes no memory
        (b"work_mem = 1GB", {"work_mem": "4096"}, None),  # no start is needed for it
        (b"huge_pages = on", {"huge_pages": "try"}, None),  # looked at by itself, and no matter of size
        (b"max_wal_senders = 20", {"max_wal_senders": "10"}, None),  # the command line keeps it
    ],
)
def test_what_only_a_start_changes(read: Reader, line: bytes, runs: dict[str, str], changed: str | None) -> None:
    files = read(line + b"\n", major=17)
    assert settings.restarts_changed(files, runs, ("postgres", "-c", "max_wal_senders=10"), 17) == changed
