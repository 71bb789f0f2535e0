"""pg_control against pg_controldata, the servers' own functions, and what real standbys refuse."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgpreemptcheck.facts import control
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Known, Unknown
from tests.fakehost import FakeHost
from tests.servers import Server, ServerRefusedError, private_directory, require, server

__all__ = ["server"]

VALUES = {
    "max_connections": 37,
    "max_worker_processes": 11,
    "max_wal_senders": 7,
    "max_prepared_transactions": 3,
    "max_locks_per_transaction": 71,
}
GIVEN = [part for name, value in VALUES.items() for part in ("-c", f"{name}={value}")]


def read(directory: str) -> control.Control:
    found = control.read(LiveHost(), directory)
    assert isinstance(found, Known), found
    return found.value


@pytest.mark.slow
def test_every_major_is_read_as_its_server_says(server: Server) -> None:
    psycopg = pytest.importorskip("psycopg")
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data)
        with server.start(data, [*GIVEN, "-c", "track_commit_timestamp=on"]) as running:
            found = read(data)
            with psycopg.connect(running.conninfo) as sql:
                versions = sql.execute(
                    "SELECT pg_control_version, catalog_version_no, system_identifier FROM pg_control_system()"
                ).fetchone()
            assert (found.version, found.catalog_version, found.system_identifier) == versions
            assert found.state == "in production"
            assert found.wal_segment_bytes == 1 << 20  # as the tests' initdb has it
            assert (found.required, found.track_commit_timestamp, found.wal_level) == (VALUES, True, "replica")
        assert read(data).state == "shut down"


@pytest.mark.slow
@pytest.mark.parametrize("key", ["debian-13", "system-15", "debian-17", "debian-18", "debian-19"])
def test_pg_controldata_agrees(key: str) -> None:
    builds = require(key)
    with private_directory() as base:
        data = f"{base}/data"
        builds.initdb(data, "--wal-segsize=64")
        said = builds.run(["pg_controldata", data]).stdout.decode()
        lines = dict(re.findall(r"^(.+?):\s+(.*)$", said, re.M))
        found = read(data)
        assert str(found.version) == lines["pg_control version number"]
        assert str(found.system_identifier) == lines["Database system identifier"]
        assert found.state == lines["Database cluster state"]
        assert found.wal_level == lines["wal_level setting"]
        names = {"max_prepared_transactions": "max_prepared_xacts", "max_locks_per_transaction": "max_locks_per_xact"}
        for name, value in found.required.items():
            assert str(value) == lines[f"{names.get(name, name)} setting"]
        assert str(found.wal_segment_bytes) == lines["Bytes per WAL segment"] == str(64 << 20)
        assert lines["track_commit_timestamp setting"] == ("on" if found.track_commit_timestamp else "off")


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 18])
def test_a_standby_refuses_what_is_below_and_nothing_else(major: int) -> None:
    build = require(major)
    with private_directory() as base:
        data = f"{base}/data"
        build.initdb(data)
        build.start(data, GIVEN).stop()
        assert control.is_standby(LiveHost(), data) == Known(False, f"{data}: no standby.signal and no recovery.signal")
        with open(f"{data}/standby.signal", "w"):
            pass
        assert control.is_standby(LiveHost(), data) == Known(True, f"{data}/standby.signal")
        for name, value in read(data).required.items():
            low = [f"{name}={value - 1}" if part == f"{name}={value}" else part for part in GIVEN]
            with pytest.raises(ServerRefusedError, match=rf"{name} = {value - 1} is a lower setting.*\b{value}\b"):
                build.start(data, low)
        build.start(data, [*GIVEN, "-c", "track_commit_timestamp=on"]).stop()
        build.start(data, ["-c", "max_connections=20", "-c", "hot_standby=off"]).stop()


# without a server -------------------------------------------------------------------------------

PATH = "/d/global/pg_control"


def reference_crc(data: bytes) -> int:
    """CRC-32C bit by bit, as its definition has it (RFC 3720, appendix B.4: the check value is asserted below)."""
    crc = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            feed = (crc ^ byte >> bit) & 1
            crc = crc >> 1 ^ (0x82F63B78 if feed else 0)
    return crc ^ 0xFFFFFFFF


def made(
    order: str, version: int = 1300, float_format: float = 1234567.0, state: int = 6, segment: int = 16 << 20
) -> bytes:
    head = struct.pack(f"{order}QIIi", 7, version, 202107181, state).ljust(172, b"\0")
    sizes = (8192, 131072, 8192, segment)
    body = struct.pack(f"{order}iB3xiiiiiB3xId4I", 1, 0, 37, 11, 7, 3, 71, 1, 8, float_format, *sizes)
    data = (head + body).ljust(288, b"\x5a")
    return (data + struct.pack(f"{order}I", reference_crc(data))).ljust(8192, b"\0")


def found_in(data: bytes) -> Known[control.Control] | Unknown:
    return control.read(FakeHost({PATH: data}), "/d")


def test_the_reference_has_the_published_check_value() -> None:
    assert reference_crc(b"123456789") == 0xE3069283


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders_are_read(order: str) -> None:
    found = found_in(made(order))
    assert isinstance(found, Known)
    assert found.source == PATH
    assert (found.value.required, found.value.system_identifier) == (VALUES, 7)
    assert found.value.wal_segment_bytes == 16 << 20


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too short"),
        (made("<")[:200], "cut off"),
        (made("<", version=942), "version 942"),
        (made("<", version=1905), "does not match its checksum"),
        (made("<")[:180] + b"\xff" + made("<")[181:], "does not match its checksum"),
        (made("<", float_format=1.0), "not its layout"),
        (made("<", state=9), "not its layout"),
        (made("<", segment=3 << 20), "not its layout"),
        (made("<", segment=0), "not its layout"),
    ],
)
def test_what_is_no_control_file_is_unknown(data: bytes, reason: str) -> None:
    found = found_in(data)
    assert isinstance(found, Unknown)
    assert reason in found.reason


def test_a_read_that_met_a_write_is_tried_again() -> None:
    class Writing(FakeHost):
        reads = 0

        def _fetch(self, path: str, offset: int, length: int) -> bytes:
            self.reads += 1
            data = super()._fetch(path, offset, length)
            return data if self.reads > 2 else data[:24] + b"\xff" * 8 + data[32:]

    assert isinstance(control.read(Writing({PATH: made("<")}, live=True), "/d"), Known)


@example(bytes(17), 1300)  # between the version and the end of the state
@given(st.binary(max_size=400), st.sampled_from([1300, 1700, 1800, 1905]))
def test_no_bytes_raise(data: bytes, version: int) -> None:
    found_in(data)
    found_in(data[:8] + struct.pack("<I", version) + data[12:])


def test_signals() -> None:
    assert control.is_standby(FakeHost({"/d/PG_VERSION": "15", "/d/recovery.signal": ""}), "/d") == Known(
        True, "/d/recovery.signal"
    )
    dangling = FakeHost({"/d/PG_VERSION": "15", "/d/standby.signal": 2}, live=True)
    found = control.is_standby(dangling, "/d")
    assert isinstance(found, Known)
    assert not found.value
    captured = control.is_standby(FakeHost({"/d/PG_VERSION": "15"}), "/d")
    assert isinstance(captured, Known)
    assert (captured.value, captured.certainty) == (False, "inferred")
    assert isinstance(control.is_standby(FakeHost({"/d": 13}), "/d"), Unknown)
    assert isinstance(control.is_standby(FakeHost(), "/d"), Unknown)
