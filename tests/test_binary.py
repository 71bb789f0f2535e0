"""The ELF reader against pyelftools on real programs, on tiny files of every class and byte order, and on hostile ones;
and the freelist of real servers of every major."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgpreemptcheck.captured import DirectoryHost
from pgpreemptcheck.elf import MalformedError, Symbols
from pgpreemptcheck.facts import binary
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Known, Unknown
from tests import servers
from tests.fakehost import FakeHost

SERVER, POP, PUSH = "StrategyGetBuffer", "have_free_buffer", "StrategyFreeBuffer"
ABSENT = ("no_such_function", "StrategyGetBuffe", "StrategyGetBuffers", "")
MAJOR_15 = Known(15, "PG_VERSION")
NO_MAJOR = Unknown("PG_VERSION cannot be read", "run as root")


def of_file(path: str) -> Callable[[int, int], bytes]:
    def fetch(offset: int, length: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    return fetch


def of_bytes(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def oracle(path: str) -> set[str]:
    """Return the dynamic symbols that a file defines, by pyelftools."""
    elffile = pytest.importorskip("elftools.elf.elffile")
    with open(path, "rb") as file:
        table = elffile.ELFFile(file).get_section_by_name(".dynsym")
        return {s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s.name}


def foreign() -> list[str]:
    """Return servers of other machines, if somebody has put them there: ARCH/postgres."""
    folder = os.path.join(os.path.dirname(servers.cache_directory()), "foreign")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name, "postgres") for name in names]


def check_against_oracle(path: str) -> None:
    defined = oracle(path)
    reads: list[int] = []

    def counted(offset: int, length: int) -> bytes:
        reads.append(length)
        return of_file(path)(offset, length)

    symbols = Symbols(counted)
    for name in (SERVER, POP, PUSH, *ABSENT):
        assert symbols.defines(name) == (name in defined), name
    assert sum(reads) < 1 << 19, "it reads only a few pieces of nine megabytes"
    for name in sorted(defined)[::97]:
        assert symbols.defines(name), name
    assert not any(symbols.defines(name + "_") for name in sorted(defined)[::997] if name + "_" not in defined)


@pytest.mark.slow
@pytest.mark.parametrize("key", [*servers.EVERY_KEY, "system-15"])
def test_symbols_of_real_servers_are_what_pyelftools_sees(key: str) -> None:
    check_against_oracle(servers.require(key).program("postgres"))


@pytest.mark.slow
@pytest.mark.parametrize("path", foreign() or [""])
def test_symbols_of_servers_of_other_machines(path: str) -> None:
    if not path:
        pytest.skip(
            "no foreign/ARCH/postgres in the cache: unpack it from Debian's postgresql-17 for arm64, s390x, ..."
        )
    check_against_oracle(path)


def test_symbols_of_libraries_and_of_this_python() -> None:
    for path in {os.path.realpath(sys.executable), os.path.realpath("/lib64/ld-linux-x86-64.so.2")}:
        if os.path.exists(path):
            check_against_oracle(path)


# tiny files --------------------------------------------------------------------------------------


def gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def sysv_hash(name: bytes) -> int:
    """As printed in the System V gABI."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        if high:
            value ^= high >> 24
        value &= ~high
    return value


def tiny_elf(
    names: list[str],
    *,
    wide: bool = True,
    order: str = "<",
    machine: int = 62,
    table: str = "gnu",
    undefined: tuple[str, ...] = (),
    spoil: Callable[[dict[str, bytearray]], None] | None = None,
) -> bytes:
    """Build an ELF file that has nothing but a dynamic section: all that the loader would need to find a symbol."""
    word = "Q" if wide else "I"
    buckets = 3
    if table == "gnu":
        names = sorted(names, key=lambda n: gnu_hash(n.encode()) % buckets)
    strings = bytearray(b"\0")
    entries = bytearray(24 if wide else 16)
    for name in names:
        at, section = len(strings), 0 if name in undefined else 1
        strings += name.encode() + b"\0"
        if wide:
            entries += struct.pack(order + "IBBHQQ", at, 0x12, 0, section, 0x1000, 8)
        else:
            entries += struct.pack(order + "IIIBBH", at, 0x1000, 8, 0x12, 0, section)
    hashes = bytearray()
    if table == "gnu":
        values = [gnu_hash(n.encode()) for n in names]
        bits = 64 if wide else 32
        bloom = 0
        for value in values:
            bloom |= 1 << value % bits | 1 << (value >> 5) % bits
        hashes += struct.pack(order + "IIII", buckets, 1, 1, 5) + struct.pack(order + word, bloom)
        rows = [[i + 1 for i, value in enumerate(values) if value % buckets == b] for b in range(buckets)]
        hashes += b"".join(struct.pack(order + "I", row[0] if row else 0) for row in rows)
        last = {row[-1] for row in rows if row}
        hashes += b"".join(struct.pack(order + "I", v & ~1 | (i + 1 in last)) for i, v in enumerate(values))
    else:
        cell = order + ("Q" if table == "wide" else "I")
        heads, chain = [0] * buckets, [0] * (len(names) + 1)
        for i, name in enumerate(names, 1):
            bucket = sysv_hash(name.encode()) % buckets
            chain[i], heads[bucket] = heads[bucket], i
        hashes += b"".join(struct.pack(cell, n) for n in (buckets, len(chain), *heads, *chain))
    parts = {"symbols": entries, "strings": strings, "hash": hashes}
    if spoil:
        spoil(parts)
    header_size, row_size = (64, 56) if wide else (52, 32)
    base, offset = 0x400000, 0x200
    places = {}
    body = bytearray()
    for key, part in parts.items():
        places[key] = base + offset + len(body)
        body += part + bytes(-len(part) % 8)
    dynamic_at = offset + len(body)
    tags = [(5, places["strings"]), (6, places["symbols"]), (10, len(parts["strings"]))]
    tags += [(0x6FFFFEF5 if table == "gnu" else 4, places["hash"]), (0, 0)]
    dynamic = b"".join(struct.pack(order + word * 2, *tag) for tag in tags)
    size = dynamic_at + len(dynamic)
    if wide:
        rows_ = struct.pack(order + "IIQQQQQQ", 1, 4, 0, base, base, size, size, 4096)
        rows_ += struct.pack(order + "IIQQQQQQ", 2, 4, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 8)
    else:
        rows_ = struct.pack(order + "IIIIIIII", 1, 0, base, base, size, size, 4, 4096)
        rows_ += struct.pack(order + "IIIIIIII", 2, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 4, 4)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    header = ident + struct.pack(
        order + "HHI" + word * 3 + "IHHHHHH", 3, machine, 1, 0, header_size, 0, 0, header_size, row_size, 2, 0, 0, 0
    )
    return (header + rows_).ljust(offset, b"\0") + bytes(body) + dynamic


KINDS = [
    pytest.param(wide, order, machine, table, id=f"{name}-{table}")
    for name, wide, order, machine in (
        ("x86_64", True, "<", 62),
        ("aarch64", True, "<", 183),
        ("ppc64", True, ">", 21),
        ("s390x", True, ">", 22),
        ("i386", False, "<", 3),
        ("mips", False, ">", 8),
    )
    for table in ("gnu", "wide" if machine == 22 else "sysv")
]


@pytest.mark.parametrize(("wide", "order", "machine", "table"), KINDS)
def test_every_class_and_byte_order(wide: bool, order: str, machine: int, table: str) -> None:
    names = [SERVER, POP, PUSH, *(f"function_{n}" for n in range(40))]
    data = tiny_elf(names, wide=wide, order=order, machine=machine, table=table)
    symbols = Symbols(of_bytes(data))
    assert all(symbols.defines(name) for name in names)
    assert not any(symbols.defines(name) for name in ABSENT)


def test_a_symbol_that_is_only_imported_is_not_defined() -> None:
    symbols = Symbols(of_bytes(tiny_elf([SERVER, POP], table="sysv", undefined=(POP,))))
    assert symbols.defines(SERVER) and not symbols.defines(POP)


def test_a_chain_that_loops_ends() -> None:
    def loop(parts: dict[str, bytearray]) -> None:
        count = (len(parts["hash"]) // 4) - 5  # header 2, buckets 3
        parts["hash"][20:] = struct.pack("<I", 1) * count  # every symbol's successor is the first

    symbols = Symbols(of_bytes(tiny_elf(["a", "b", "c", "d"], table="sysv", spoil=loop)))
    with pytest.raises(MalformedError, match="does not end"):
        for name in ("x1", "x2", "x3", "x4", "x5"):  # some bucket is not empty
            symbols.defines(name)


def test_a_chain_that_leaves_its_table_is_refused() -> None:
    def leave(parts: dict[str, bytearray]) -> None:
        parts["hash"][8:20] = struct.pack("<III", 9, 9, 9)  # buckets: beyond the last of five entries
        parts["symbols"] += bytes(24 * 40)

    symbols = Symbols(of_bytes(tiny_elf(["a", "b", "c", "d"], table="sysv", spoil=leave)))
    with pytest.raises(MalformedError, match="outside of itself"):
        symbols.defines("a")


def test_a_chain_without_an_end_ends() -> None:
    def no_end(parts: dict[str, bytearray]) -> None:
        parts["hash"][16:24] = b"\xff" * 8  # the Bloom filter lets all pass
        parts["hash"][36:] = bytes(1 << 20)

    symbols = Symbols(of_bytes(tiny_elf(["a"], spoil=no_end)))
    with pytest.raises(MalformedError, match="does not end"):
        for name in ("x1", "x2", "x3", "x4"):
            symbols.defines(name)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 700),
    st.lists(st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])), max_size=6),
    st.sampled_from(["gnu", "sysv"]),
    st.booleans(),
)
def test_damaged_files_answer_or_are_refused_quickly(
    cut: int, damage: list[tuple[int, int]], table: str, shorten: bool
) -> None:
    data = bytearray(tiny_elf([SERVER, POP, "a", "b"], table=table))
    for at, value in damage:
        data[at % len(data)] = value
    before = time.process_time()
    try:
        symbols = Symbols(of_bytes(bytes(data[:cut] if shorten else data)))
        for name in (SERVER, POP, "nothing"):
            assert symbols.defines(name) in (True, False)
    except MalformedError:
        pass
    assert time.process_time() - before < 1.0


# the freelist ------------------------------------------------------------------------------------


def live(data: bytes | int, target: str = "/usr/lib/postgresql/15/bin/postgres") -> FakeHost:
    class Host(FakeHost):
        def _target(self, path: str) -> str:
            return target

    binary._looked_at.clear()
    return Host({"/proc/7/exe": data}, live=True)


@pytest.mark.parametrize(
    ("names", "value"),
    [([SERVER, POP, PUSH], True), ([SERVER, PUSH], True), ([SERVER, POP], True), ([SERVER, "s_lock"], False)],
)
def test_what_the_program_exports_is_measured(names: list[str], value: bool) -> None:
    wrong = Known(19 if value else 15, "PG_VERSION")  # what runs counts, whatever the version says
    answer = binary.freelist(live(tiny_elf(names)), 7, wrong)
    assert isinstance(answer, Known) and (answer.value, answer.certainty) == (value, "measured")
    assert "/proc/7/exe" in answer.source


@pytest.mark.parametrize(("major", "value"), [(13, True), (18, True), (19, False), (20, False)])
@pytest.mark.parametrize("data", [tiny_elf(["dlopen"]), b"#!/bin/sh\n", b"", errno.EACCES])
def test_elsewhere_the_version_is_all_there_is(data: bytes | int, major: int, value: bool) -> None:
    answer = binary.freelist(live(data), 7, Known(major, "PG_VERSION"))
    assert isinstance(answer, Known) and (answer.value, answer.certainty) == (value, "inferred")
    assert f"PostgreSQL {major}" in answer.source and "PG_VERSION" in answer.source


def test_neither_program_nor_version_is_unknown() -> None:
    answer = binary.freelist(live(tiny_elf(["dlopen"])), 7, NO_MAJOR)
    assert isinstance(answer, Unknown)
    assert "not the server itself" in answer.reason and "PG_VERSION cannot be read" in answer.reason
    assert answer.hint == "run as root"


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        ('{"page_bytes": 4096, "symbols": ["StrategyGetBuffer", "StrategyFreeBuffer", "s_lock"]}', (True, "measured")),
        ('{"symbols": ["StrategyGetBuffer"]}', (False, "measured")),
        ('{"freelist": false}', (False, "measured")),
        ('{"symbols": []}', (True, "inferred")),
        ('{"symbols": "StrategyGetBuffer"}', (True, "inferred")),
        ('["StrategyGetBuffer"]', (True, "inferred")),
        ("{", (True, "inferred")),
        ("[" * 100_000, (True, "inferred")),
        (None, (True, "inferred")),
    ],
)
def test_captures(tmp_path: Path, noted: str | None, expected: tuple[bool, str]) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    if noted is not None:
        (tmp_path / "proc/7/pgpreemptcheck.json").write_text(noted)
    answer = binary.freelist(DirectoryHost(str(tmp_path)), 7, MAJOR_15)
    assert isinstance(answer, Known) and (answer.value, answer.certainty) == expected


@pytest.mark.slow
@pytest.mark.parametrize("major", servers.MAJORS)
def test_running_servers_of_every_major(major: int) -> None:
    binary._looked_at.clear()
    server = servers.require(major)
    with servers.private_directory() as folder:
        server.initdb(f"{folder}/data")
        with server.start(f"{folder}/data") as running:
            answer = binary.freelist(LiveHost(), running.pid, NO_MAJOR)
    assert isinstance(answer, Known) and answer.certainty == "measured"
    assert answer.value is (server.major <= 18)  # commit 2c789405275 removed it in 19


@pytest.mark.slow
def test_a_server_whose_file_was_replaced_and_one_started_through_the_loader() -> None:
    binary._looked_at.clear()
    server = servers.require("system-15")
    loader = "/lib64/ld-linux-x86-64.so.2"
    if not os.path.exists(loader):
        pytest.skip(f"no {loader}")
    with servers.private_directory() as folder:
        data = f"{folder}/data"
        server.initdb(data)
        # the share and lib folders are found relative to the program
        copy = f"{folder}/usr/lib/postgresql/15"
        shutil.copytree(os.path.dirname(server.bin_dir), copy)
        os.makedirs(f"{folder}/usr/share/postgresql")
        os.symlink("/usr/share/postgresql/15", f"{folder}/usr/share/postgresql/15")
        servers.give(folder)
        program = f"{copy}/bin/postgres"
        plain = ["-D", data, "-c", "listen_addresses=", "-c", f"unix_socket_directories={data}"]
        with server.start(data, argv=[program, *plain]) as running:
            os.unlink(program)
            shutil.copy("/bin/true", program)
            assert os.readlink(f"/proc/{running.pid}/exe").endswith(" (deleted)")
            answer = binary.freelist(LiveHost(), running.pid, Known(19, "PG_VERSION"))
        assert isinstance(answer, Known) and (answer.value, answer.certainty) == (True, "measured")
        with server.start(data, argv=[loader, server.program("postgres"), *plain]) as running:
            answer = binary.freelist(LiveHost(), running.pid, MAJOR_15)
            assert os.path.basename(os.readlink(f"/proc/{running.pid}/exe")).startswith("ld")
        assert isinstance(answer, Known) and (answer.value, answer.certainty) == (True, "inferred")
        assert "not the server itself" in answer.source
