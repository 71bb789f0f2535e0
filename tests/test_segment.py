"""The main segment: from maps and status as the kernel prints them, and of real servers on every kind of memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pgpreemptcheck.facts import segment
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.values import Fact, Known, Unknown
from tests import servers
from tests.fakehost import FakeHost

MB = 1 << 20
NEVER: Fact[bool] = Known(False, "shmem_enabled")
ALWAYS: Fact[bool] = Known(True, "shmem_enabled")
POOL = "/proc/sys/vm/nr_hugepages"

# PostgreSQL 15 on Linux 6.18, shortened
BASE = """\
55d2c8a00000-55d2c8acb000 r--p 00000000 fe:00 131 /usr/lib/postgresql/15/bin/postgres
55d2c95f2000-55d2c9656000 rw-p 00000000 00:00 0                          [heap]
7f1c2a600000-7f1c33198000 rw-s 00000000 00:01 1034                       /dev/zero (deleted)
7f1c33300000-7f1c33319000 rw-s 00000000 00:19 5                          /dev/shm/PostgreSQL.2893157716
7f1c3331c000-7f1c3331d000 rw-s 00000000 00:01 4                          /SYSV00aa5a11 (deleted)
7ffd8d1d7000-7ffd8d1f8000 rw-p 00000000 00:00 0                          [stack]
"""
HUGE = BASE.replace(
    "7f1c2a600000-7f1c33198000 rw-s 00000000 00:01 1034                       /dev/zero (deleted)",
    "7f1c2a600000-7f1c33600000 rw-s 00000000 00:10 2061                       /anon_hugepage (deleted)",
)
SYSV = BASE.replace(
    "7f1c2a600000-7f1c33198000 rw-s 00000000 00:01 1034                       /dev/zero (deleted)\n", ""
).replace("7f1c3331c000-7f1c3331d000", "7f1c20000000-7f1c28b98000")


def read(host: FakeHost | LiveHost, pid: int = 7, size: Fact[int] | None = None, thp: Fact[bool] = NEVER) -> Segment:
    return segment.read(
        host,
        pid,
        huge_page_size=size or Known(0, "huge_page_size"),
        default_huge_page_bytes=Known(2 * MB, "/proc/meminfo"),
        base_page_bytes=Known(4096, "sysconf"),
        shmem_thp_possible=thp,
    )


def plain(fact: Any) -> Any:
    return fact.value if isinstance(fact, Known) else None


def host(maps: str | int, status: str = "Name:\tpostgres\nHugetlbPages:\t       0 kB\n", **more: str) -> FakeHost:
    return FakeHost({"/proc/7/maps": maps, "/proc/7/status": status, **{f"/proc/{k}": v for k, v in more.items()}})


@pytest.mark.parametrize(
    ("maps", "backing", "size", "page", "base"),
    [
        (BASE, "base", 0x8B98000, 4096, True),
        (HUGE, "huge", 0x9000000, 2 * MB, False),
        (SYSV, "sysv", 0x8B98000, 4096, True),
    ],
)
def test_each_kind(maps: str, backing: str, size: int, page: int, base: bool) -> None:
    found = read(host(maps))
    assert [plain(f) for f in (found.backing, found.bytes, found.page_bytes, found.base_pages)] == [
        backing, size, page, base
    ]  # fmt: skip
    assert plain(found.thp_possible) is False


def test_parts_that_adjoin_are_one_segment() -> None:
    split = BASE.replace(
        "7f1c2a600000-7f1c33198000 rw-s 00000000 00:01 1034                       /dev/zero (deleted)",
        "7f1c2a600000-7f1c2c600000 rw-s 00000000 00:01 1034                       /dev/zero (deleted)\n"
        "7f1c2c600000-7f1c33198000 rw-s 02000000 00:01 1034                       /dev/zero (deleted)",
    )
    assert plain(read(host(split)).bytes) == 0x8B98000


@pytest.mark.parametrize(
    "larger",
    [
        "7e0000000000-7f0000000000 rw-s 00000000 00:19 6    /dev/shm/PostgreSQL.99",
        "7e0000000000-7f0000000000 rw-s 00000000 00:0f 6    anon_inode:[io_uring]",
        "7e0000000000-7f0000000000 rw-p 00000000 00:10 6    /anon_hugepage (deleted)",  # malloc
        "7e0000000000-7f0000000000 rw-p 00000000 00:01 6    /dev/zero (deleted)",
        "7e0000000000-7f0000000000 rw-s 00000000 fe:00 6    /data/pg_dynshmem/mmap.1 (deleted)",
        "7e0000000000-7f0000000000 rw-s 00000000 00:01 6    /memfd:x (deleted)",
        "7e0000000000-7f0000000000 rw-s 00000000 fe:00 6    /SYSV00aa5a11/x (deleted)",
        "7e0000000000-7f0000000000 rw-s 00000000 fe:00 6    /home/a/dev/zero (deleted)",
        "7e0000000000-7f0000000000 r--s 00000000 00:01 6    /dev/zero (deleted)",
        "zzzz-yyyy rw-s 00000000 00:01 6    /dev/zero (deleted)",
        "7e00 rw-s 00000000 00:01 6    /dev/zero (deleted)",
        "rw-s",
    ],
)
def test_other_mappings_are_not_the_segment(larger: str) -> None:
    found = read(host(f"{larger}\n{BASE}"))
    assert (plain(found.backing), plain(found.bytes)) == ("base", 0x8B98000)


def test_without_any_candidate_nothing_is_known() -> None:
    found = read(host("55d2c8a00000-55d2c8acb000 r--p 00000000 fe:00 131 /usr/bin/sleep\n"))
    assert all(isinstance(f, Unknown) for f in (found.bytes, found.backing, found.page_bytes, found.base_pages))


class Asked(FakeHost):
    """A host whose kernel answers PROCMAP_QUERY."""

    page_bytes = 0

    def mapping_page_bytes(self, pid: int, address: int) -> Fact[int]:
        assert (pid, address) in ((7, 0x7F1C2A600000), (7, 0x7F1C20000000))
        return Known(self.page_bytes, "PROCMAP_QUERY")


def test_the_kernel_s_page_size_wins_over_settings() -> None:
    asked = Asked({"/proc/7/maps": HUGE}, live=True)
    asked.page_bytes = 1 << 30
    assert read(asked).page_bytes == Known(1 << 30, "PROCMAP_QUERY")


def test_system_v_memory_made_huge_by_a_preloaded_library_is_not_on_base_pages() -> None:
    asked = Asked({"/proc/7/maps": SYSV}, live=True)
    asked.page_bytes = 2 * MB
    found = read(asked, thp=ALWAYS)
    assert (plain(found.backing), plain(found.base_pages), plain(found.thp_possible)) == ("sysv", False, False)


@pytest.mark.parametrize(
    ("noted", "expected"),
    [('{"page_bytes": 1073741824}', 1 << 30), ('{"page_bytes": "x"}', 2 * MB), ('{"page_bytes": true}', 2 * MB)],
)
def test_a_capture_has_noted_the_page_size(noted: str, expected: int) -> None:
    captured = FakeHost({"/proc/7/maps": HUGE, "/proc/7/pgpreemptcheck.json": noted})
    assert plain(read(captured).page_bytes) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [(Known(0, "s"), 2 * MB), (Known(1 << 30, "s"), 1 << 30), (Unknown("not read"), None)],
)
def test_else_the_running_setting_gives_the_page_size(size: Fact[int], expected: int | None) -> None:
    assert plain(read(host(HUGE), size=size).page_bytes) == expected


@pytest.mark.parametrize("maps", [BASE, SYSV])
def test_transparent_huge_pages_leave_it_unknown(maps: str) -> None:
    found = read(host(maps), thp=ALWAYS)
    assert plain(found.thp_possible) is True and isinstance(found.base_pages, Unknown)
    assert "transparent huge pages" in found.base_pages.reason and "shmem_enabled" in found.base_pages.hint
    found = read(host(maps), thp=Unknown("shmem_enabled cannot be read"))
    assert isinstance(found.base_pages, Unknown) and "shmem_enabled cannot be read" in found.base_pages.reason


def test_transparent_huge_pages_do_not_matter_to_a_huge_segment() -> None:
    found = read(host(HUGE), thp=ALWAYS)
    assert (plain(found.base_pages), plain(found.thp_possible)) == (False, False)


# maps out of reach: status -----------------------------------------------------------------------


def test_no_hugetlb_pages_prove_base_pages() -> None:
    found = read(host(errno.EACCES))
    assert (plain(found.backing), plain(found.base_pages), plain(found.page_bytes)) == ("base", True, 4096)
    assert isinstance(found.bytes, Unknown) and found.bytes.kind == "permission"


def test_some_hugetlb_pages_prove_nothing() -> None:
    found = read(host(errno.EACCES, "Name:\tpostgres\nHugetlbPages:\t    2048 kB\n"))
    for fact in (found.backing, found.base_pages, found.page_bytes):
        assert isinstance(fact, Unknown) and "suggests" in fact.reason and fact.hint


@pytest.mark.parametrize("status", ["Name:\tpostgres\n", "HugetlbPages: many kB\n", ""])
def test_without_the_line_nothing_is_known(status: str) -> None:
    found = read(host(errno.EACCES, status))
    assert isinstance(found.backing, Unknown) and isinstance(found.base_pages, Unknown)


SHM = (
    "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid\n"
    "  11164177          3   600                    56    9     9      6   101   103   101   103\n"
    "  11164178          4   600             146374656    {}     9      6   101   103   101   103\n"
)


@pytest.mark.parametrize(("creator", "expected"), [(7, ("sysv", 146374656)), (8, ("base", None))])
def test_the_list_of_system_v_segments_tells_these_apart(creator: int, expected: tuple[str, int | None]) -> None:
    found = read(host(errno.EACCES, **{"sysvipc/shm": SHM.format(creator)}))
    assert (plain(found.backing), plain(found.bytes)) == expected and plain(found.base_pages) is True


# real servers ------------------------------------------------------------------------------------


@contextlib.contextmanager
def pool(pages: int) -> Iterator[None]:
    """Reserve huge pages of the default size, and put the pool back as it was."""
    with open("/tmp/pgpreemptcheck-pool.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with open(POOL) as file:
                before = file.read()
        except OSError as error:
            pytest.skip(f"{POOL}: {error.strerror}")
        try:
            try:
                with open(POOL, "w") as file:
                    file.write(str(pages))
                with open(POOL) as file:
                    got = int(file.read())
            except OSError as error:
                pytest.skip(f"{POOL}: {error.strerror}")
            if got < pages:
                pytest.skip(f"only {got} of {pages} huge pages could be reserved")
            yield
        finally:
            with contextlib.suppress(OSError), open(POOL, "w") as file:
                file.write(before)


def status_of(running: servers.Running) -> str | None:
    """Return huge_pages_status, which servers have from 17 on."""
    if running.server.major < 17:
        return None
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(running.conninfo) as connection:
        row = connection.execute("SHOW huge_pages_status").fetchone()
    return str(row[0])


def as_nobody(pid: int) -> list[Any]:
    """Return backing and base_pages as another user reads them."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            found = read(LiveHost(), pid)
            os.write(writer, json.dumps([plain(found.backing), plain(found.base_pages)]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return list(json.loads(text))


@pytest.mark.slow
@pytest.mark.parametrize("major", servers.MAJORS)
def test_real_servers(major: int) -> None:
    """Each setting of huge_pages with and without a pool, mmap and sysv, against what was set and reserved."""
    if os.geteuid() != 0:
        pytest.skip("only root can reserve huge pages and read the maps of another user's server")
    server = servers.require(major)
    sysv = ("-c", "shared_memory_type=sysv")
    cases = [
        (200, "on", (), "huge"),
        (200, "try", (), "huge"),
        (200, "off", (), "base"),
        (200, "try", sysv, "sysv"),
        (0, "try", (), "base"),
        (0, "off", sysv, "sysv"),
    ]
    with servers.private_directory() as folder:
        data = f"{folder}/data"
        server.initdb(data)
        for pages, mode, more, expected in cases:
            with pool(pages), server.start(data, ["-c", f"huge_pages={mode}", "-B", "16384", *more]) as running:
                found = read(LiveHost(), running.pid)
                status = status_of(running)
                other = as_nobody(running.pid)
            assert plain(found.backing) == expected, (pages, mode, more)
            assert plain(found.base_pages) is (expected != "huge")
            assert plain(found.page_bytes) == (2 * MB if expected == "huge" else 4096)
            size = plain(found.bytes)
            assert isinstance(size, int) and 128 * MB < size < 200 * MB
            assert status in (None, "on" if expected == "huge" else "off")
            assert other == ([None, None] if expected == "huge" else [expected, True])
