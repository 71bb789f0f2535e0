"""The grammar of postgresql.conf. Right values come from PostgreSQL 13 to 19 (`postgres -C`, pg_file_settings)."""

from __future__ import annotations

import os

import pytest

from pgpreemptcheck.captured import DirectoryHost
from pgpreemptcheck.facts import conffile
from pgpreemptcheck.host import FileStatus, Host, gap
from pgpreemptcheck.values import Fact, Known, Unknown


def read(tmp_path: object, text: bytes, files: dict[str, bytes] | None = None, *, major: int = 15) -> conffile.Reading:
    root = str(tmp_path)
    for name, content in {"c/postgresql.conf": text, **{f"c/{n}": c for n, c in (files or {}).items()}}.items():
        os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
        with open(os.path.join(root, name), "wb") as file:
            file.write(content)
    reading = conffile.Reading()
    conffile.read(DirectoryHost(root), "/c/postgresql.conf", major, reading)
    return reading


def pairs(reading: conffile.Reading) -> list[tuple[str, str | None]]:
    return [(entry.name, entry.value) for entry in reading.entries]


def messages(reading: conffile.Reading) -> list[str]:
    return [complaint.message.replace("/c/", "") for complaint in reading.complaints]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"x = 8kB", "8kB"),
        (b"x 8kB", "8kB"),
        (b"x=8kB", "8kB"),
        (b"  x\t=\t8kB  # comment", "8kB"),
        (b"x = 8kB#comment", "8kB"),
        (b"x'y'", "y"),
        (b"x = '8 GB'", "8 GB"),
        (b"x = 'it''s'", "it's"),
        (b"x = 'it\\'s'", "it's"),
        (b"x = '\\061\\062\\tA\\q'", "12\tAq"),
        (b"x = '\\400'", ""),
        (b"x = ''", ""),
        (b"x = '#no comment'", "#no comment"),
        (b"x = 1.5", "1.5"),
        (b"x = .5", ".5"),
        (b"x = -0x1F", "-0x1F"),
        (b"x = on-line_a.b:c/d", "on-line_a.b:c/d"),
        (b"x = a.b.c", "a.b.c"),
        (b"x = \xfcber", b"\xfcber".decode("utf-8", "surrogateescape")),
        (b"x = 'a\0b'", ""),
        (b"x = 5\r", "5"),
    ],
)
def test_values(tmp_path: object, line: bytes, value: str) -> None:
    reading = read(tmp_path, line + b"\n")
    assert pairs(reading) == [("x", value)]
    assert not reading.complaints


@pytest.mark.parametrize(
    ("line", "token"),
    [
        (b"shared_buffers = 8 GB", "GB"),
        (b"shared_buffers = 0.5GB", "GB"),
        (b"shared_buffers = 25%", "%"),
        (b"shared_buffers = 4GB;", ";"),
        (b'shared_buffers = "4GB"', '"'),
        (b"shared_buffers = '4GB", "'"),
        (b"log_filename = postgresql.log", "postgresql.log"),
        (b"max_connections = 1e2", "2"),
        (b"port == 5", "="),
        (b"my.own.setting = 1", "my.own.setting"),
        (b"my-setting = 1", "my-setting"),
        (b"= 5", "="),
        (b"'port' = 5", "'port'"),
        (b"port = 5\f", "\f"),
        (b"port\0 = 5", ""),
    ],
)
def test_a_syntax_error_names_the_token(tmp_path: object, line: bytes, token: str) -> None:
    reading = read(tmp_path, b"a = 1\n" + line + b"\nb = 2\n")
    assert messages(reading) == [f'syntax error in file "postgresql.conf" line 2, near token "{token}"']
    assert (reading.complaints[0].file, reading.complaints[0].line) == ("/c/postgresql.conf", 2)
    assert [pair for pair in pairs(reading) if pair[1] is not None] == [("a", "1"), ("b", "2")]


def test_a_line_that_ends_early(tmp_path: object) -> None:
    assert messages(read(tmp_path, b"port =\n")) == ['syntax error in file "postgresql.conf" line 1, near end of line']
    # without a newline the scanner has not counted the line yet: PostgreSQL blames the one before
    assert messages(read(tmp_path, b"port =")) == ['syntax error in file "postgresql.conf" line 0, near end of line']


def test_a_byte_order_mark_belongs_to_the_first_name(tmp_path: object) -> None:
    assert pairs(read(tmp_path, b"\xef\xbb\xbfport = 5\n")) == [("\ufeffport", "5")]
    assert messages(read(tmp_path, b"\xef\xbb\xbf# comment\n")) == [
        'syntax error in file "postgresql.conf" line 1, near end of line'
    ]


def test_a_file_is_given_up_after_100_errors(tmp_path: object) -> None:
    reading = read(tmp_path, b"= 1\n" * 120 + b"port = 5\n")
    assert len(reading.complaints) == 101
    assert messages(reading)[-1] == 'too many syntax errors found, abandoning file "postgresql.conf"'
    assert not reading.entries


def test_includes_are_read_in_place(tmp_path: object) -> None:
    reading = read(
        tmp_path,
        b"a = 1\ninclude 'sub/x.conf'\ninclude_if_exists 'no.conf'\nInclude_Dir = d\nb = 2\n",
        {
            "sub/x.conf": b"include 'y.conf'\n",
            "sub/y.conf": b"y = 1",
            "d/Z.conf": b"z = 1",
            "d/a.conf": b"z = 2",
            "d/.h.conf": b"z = 3",
            "d/b.conf~": b"z = 4",
            "d/.conf": b"z = 5",
            "d/sub.conf/x": b"z = 6",
            "d/\u00fc.conf": b"z = 7",
        },
    )
    assert pairs(reading) == [("a", "1"), ("y", "1"), ("z", "1"), ("z", "2"), ("z", "7"), ("b", "2")]
    assert not reading.complaints
    assert reading.directories == ["/c/d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"include 'no.conf'", 'could not open configuration file "no.conf": No such file or directory'),
        (b"include 'x.conf/y'", 'could not open configuration file "x.conf/y": Not a directory'),
        (b"include_dir 'no'", 'could not open configuration directory "no": No such file or directory'),
        (b"include_dir 'x.conf'", 'could not open configuration directory "x.conf": Not a directory'),
        (b"include ' '", 'empty configuration file name: " "'),
        (b"include_if_exists ''", 'empty configuration file name: ""'),
        (b"include_dir ''", 'empty configuration directory name: ""'),
        (b"include 'postgresql.conf'", 'configuration file recursion in "postgresql.conf"'),
        (b"include 'loop.conf'", 'could not open configuration file "loop.conf": maximum nesting depth exceeded'),
    ],
)
def test_a_failed_include_blames_its_line(tmp_path: object, line: bytes, message: str) -> None:
    reading = read(tmp_path, b"a = 1\n" + line + b"\n", {"x.conf": b"", "loop.conf": b"include 'postgresql.conf'\n"})
    assert messages(reading) == [message]
    assert reading.complaints[0].line == 2
    assert reading.failed


def test_a_folder_is_left_at_its_first_bad_file(tmp_path: object) -> None:
    reading = read(tmp_path, b"include_dir d\nb = 1\n", {"d/1.conf": b"x", "d/2.conf": b"y = 2"})
    assert pairs(reading) == [("x", None), ("b", "1")]
    assert len(reading.complaints) == 1


def test_including_a_folder(tmp_path: object) -> None:
    reading = read(tmp_path, b"include_if_exists 'd'\n", {"d/1.conf": b"x = 1"})
    assert messages(reading) == ['input in flex scanner failed at file "/c/d" line 1'.replace("/c/", "")]


@pytest.mark.parametrize(
    ("major", "path"),
    [(13, "/c/a/../x/./y.conf"), (14, "/c/a/../x/./y.conf"), (15, "/c/x/y.conf"), (19, "/c/x/y.conf")],
)
def test_paths_are_tidied_as_that_major_does(tmp_path: object, major: int, path: str) -> None:
    reading = read(tmp_path, b"include 'a/../x/./y.conf'\n", major=major)
    assert reading.complaints[0].message == f'could not open configuration file "{path}": No such file or directory'


class Forbidden(DirectoryHost):
    """A host whose files named `secret` this user may not read, though PostgreSQL's owner may."""

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return super()._fetch(path, offset, length)

    def _status(self, path: str) -> FileStatus:
        if path.endswith("secret"):
            return FileStatus(False, 0, 0o600, 1, 0.0)
        return super()._status(path)

    def _gap(self, path: str, error: OSError) -> Unknown:
        return gap(path, error, 1000)


def test_a_file_that_only_the_owner_may_read_is_a_gap(tmp_path: object) -> None:
    read(tmp_path, b"a = 1\ninclude 'secret'\nb = 2\n")
    reading = conffile.Reading()
    conffile.read(Forbidden(str(tmp_path)), "/c/postgresql.conf", 15, reading)
    assert pairs(reading) == [("a", "1"), ("b", "2")]
    assert not reading.complaints
    assert [at for at, gap in reading.gaps] == [1]


@pytest.mark.parametrize("rights", ["server", "owner"])
@pytest.mark.parametrize(("line", "complaint"), [("include", True), ("include_if_exists", False)])
def test_what_the_server_may_not_read_either_is_its_own_complaint(
    tmp_path: object, rights: conffile.Rights, line: str, complaint: bool
) -> None:
    """See test_settings_server.py, where real servers do so."""
    read(tmp_path, f"a = 1\n{line} 'secret'\nb = 2\n".encode())
    reading = conffile.Reading()
    conffile.read(Forbidden(str(tmp_path)), "/c/postgresql.conf", 15, reading, rights=rights)
    assert not reading.gaps
    message = 'could not open configuration file "/c/secret": Permission denied'
    assert reading.complaints == ([conffile.Complaint(message, "/c/postgresql.conf", 2)] if complaint else [])


def test_files_that_include_each_other_end(tmp_path: object) -> None:
    text = b"include 'b.conf'\n" * 3
    reading = read(tmp_path, text, {"b.conf": b"include 'postgresql.conf'\n" * 3})
    assert len(reading.files) <= 1000
    assert reading.gaps or reading.complaints


def test_the_host_is_the_only_way_in() -> None:
    class Empty(Host):
        def read_bytes(self, path: str, limit: int = 0) -> Fact[bytes]:
            return Known(b"include '/etc/passwd'", path) if path == "/x" else Unknown("no", kind="permission")

        def status(self, path: str) -> Fact[FileStatus]:
            return Unknown("no", kind="permission")

    reading = conffile.Reading()
    conffile.read(Empty(), "/x", 15, reading)
    assert not reading.entries
    assert reading.gaps[0][1].kind == "permission"
