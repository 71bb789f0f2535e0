"""The whole program against real clusters: what it says against what was set, what runs, and what then happens.

Right values come from the server (SQL, its log, whether it starts), from /proc/PID/smaps of its small segment, and from
what the test itself set up. Outcomes foretold for a crash restart and for the next start are tried out.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from tests import servers, tool
from tests.servers import Running, Server, ServerRefusedError
from tests.test_cgroups import inside, real_group, write
from tests.test_segment import POOL, pool
from tests.test_server import pgbouncer
from tests.tool import Answer, check, gap, value

psycopg = pytest.importorskip("psycopg")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can reserve huge pages and read other users' processes"),
]

KEYS = ("npm-13", "npm-14", "npm-15", "npm-16", "npm-17", "npm-18", "system-15", "debian-19")
MB = 1 << 20
PAGE = 2 * MB
CONNECTIONS = (os.cpu_count() or 1) + 10
"""More than there are CPUs, so that the link of parallelism holds."""

EXPOSED = ("--assume", "cluster.kernel_preemptible=true")
"""With a kernel that is preempted the verdict hangs on the other links."""


# clusters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """A data directory of one build, its settings in postgresql.conf alone, its socket inside of it."""

    server: Server
    directory: str
    port: int

    @property
    def conf(self) -> str:
        return f"{self.directory}/postgresql.conf"

    @property
    def conninfo(self) -> str:
        return f"host={self.directory} port={self.port} user=postgres dbname=postgres"

    def configure(self, *lines: str) -> None:
        """Write postgresql.conf: what keeps a server small and quick, and then these lines."""
        usual = (
            f"unix_socket_directories = '{self.directory}'",
            "listen_addresses = ''",
            f"port = {self.port}",
            "fsync = off",
            "min_wal_size = 64MB",
            "shared_buffers = 16MB",
            f"max_connections = {CONNECTIONS}",
        )
        with open(self.conf, "w") as file:
            file.write("\n".join([*usual, *lines]) + "\n")

    def start(self, *options: str) -> Running:
        """Start it from its files alone. Raises ServerRefusedError with the log."""
        command = [self.server.program("postgres"), "-D", self.directory, *options]
        return self.server.start(self.directory, argv=command, port=self.port)


@contextlib.contextmanager
def a_cluster(key: str | int, *lines: str) -> Iterator[Cluster]:
    """Give a cluster of its own, not started."""
    server = servers.require(key)
    with servers.private_directory() as folder:
        cluster = Cluster(server, f"{folder}/data", servers.free_port())
        server.initdb(cluster.directory)
        cluster.configure(*lines)
        yield cluster


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[Cluster]]:
    """One cluster of each build that is here."""
    found = [server for key in KEYS if (server := servers.available().get(key)) is not None]
    if not found:
        pytest.skip("no PostgreSQL server here: python -m tests.servers fetch")
    with servers.private_directory() as folder:
        clusters = [Cluster(server, f"{folder}/{server.key}", servers.free_port()) for server in found]
        together(lambda cluster: cluster.server.initdb(cluster.directory), clusters)
        yield clusters


@pytest.mark.parametrize("key", KEYS)
def test_each_build_is_here(key: str) -> None:
    """Those that are not are skipped by name: the tests of the fleet take what there is."""
    servers.require(key)


def together(do: Callable[[Any], Any], over: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(4) as executor:
        return list(executor.map(do, over))


@contextlib.contextmanager
def started(fleet: Sequence[Cluster]) -> Iterator[dict[str, Running]]:
    """Start clusters at once, and stop them after; those that refuse are not among them."""

    def start(cluster: Cluster) -> Running | None:
        try:
            return cluster.start()
        except ServerRefusedError:
            return None

    running = {r.directory: r for r in together(start, fleet) if r is not None}
    try:
        yield running
    finally:
        together(lambda r: r.stop(), running.values())


# the truth ---------------------------------------------------------------------------------------


class Mapped(NamedTuple):
    backing: str
    size: int
    page_bytes: int


def mapped(pid: int) -> Mapped:
    """Return the main segment as the kernel's own account of it has it: a page walk, which small servers bear."""
    kinds = {"/anon_hugepage": "huge", "/dev/zero": "base", "/SYSV": "sysv"}
    found: list[Mapped] = []
    backing: str | None = None
    size = 0
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            fields = line.split()
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                name = fields[5] if len(fields) > 5 and fields[1] == "rw-s" else ""
                backing = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
            elif backing and fields[0] == "Size:":
                size = int(fields[1]) << 10
            elif backing and fields[0] == "KernelPageSize:":
                found.append(Mapped(backing, size, int(fields[1]) << 10))
    return max(found, key=lambda m: m.size)


def query(conninfo: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        return list(connection.execute(statement).fetchall())


def show(conninfo: str, name: str) -> str:
    return str(query(conninfo, f"SHOW {name}")[0][0])


def wait_for(done: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def answers(conninfo: str) -> bool:
    try:
        return query(conninfo, "SELECT 1") == [(1,)]
    except psycopg.Error:
        return False


def crash(running: Running) -> bool:
    """Kill one backend as the OOM killer does; return whether the postmaster came back."""
    before = running.log().count("reinitializing")
    with psycopg.connect(running.conninfo) as victim:
        pid = victim.info.backend_pid
        os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda: running.process.poll() is not None or running.log().count("reinitializing") > before,
            "the postmaster did not notice",
        )
    wait_for(lambda: running.process.poll() is not None or answers(running.conninfo), "the server did not come back")
    return running.process.poll() is None


def fell_back_or_not(running: Running) -> str:
    """Return what became of a server that is up, in the words of the report."""
    mode = show(running.conninfo, "huge_pages")
    kind = show(running.conninfo, "shared_memory_type")
    return "falls-back" if (mode, kind, mapped(running.pid).backing) == ("try", "mmap", "base") else "starts"


def after_a_crash(running: Running) -> tuple[str, str | None]:
    """Crash a server; return the outcome and the backing."""
    pid = running.pid
    if not crash(running):
        return "refuses", None
    assert running.pid == pid
    return fell_back_or_not(running), mapped(pid).backing


def after_a_restart(cluster: Cluster, running: Running) -> tuple[str, str | None]:
    """Stop and start a server; return the outcome and the backing, and leave it stopped."""
    running.stop()
    try:
        again = cluster.start()
    except ServerRefusedError:
        return "refuses", None
    with again:
        return fell_back_or_not(again), mapped(again.pid).backing


def foretold(part: dict[str, Any]) -> tuple[str, str | None]:
    """Return outcome and backing as a report has them for crash_restart or next_start."""
    outcome = str(value(part["outcome"]))
    return outcome, None if outcome == "refuses" else str(value(part["segment"]["backing"]))


# every major, every setting, with a pool and without -----------------------------------------------

_FACTORS = {None: 1, "": 1, "B": 1, "kB": 1 << 10, "8kB": 8 << 10, "MB": 1 << 20, "ms": 1, "s": 1, "min": 60}


def assert_settings_as_server_says(cluster: Cluster, found: dict[str, Any]) -> None:
    """Hold every running setting of a report against pg_settings."""
    rows = {
        name: (text, unit)
        for name, text, unit in query(cluster.conninfo, "SELECT name, setting, unit FROM pg_settings")
    }
    for name, leaf in found.items():
        text, unit = rows.get(name, ("0", None))  # not a setting of that major: 0 is what the server does
        if isinstance(value(leaf), bool):
            expected: Any = text == "on"
        elif isinstance(value(leaf), int):
            expected = int(text) * _FACTORS[unit] if text != "-1" else -1
        else:
            expected = text
        assert value(leaf) == expected, (cluster.server.key, name)


@pytest.mark.parametrize("kind", ["mmap", "sysv"])
@pytest.mark.parametrize("pages", [0, 200])
@pytest.mark.parametrize("mode", ["off", "try", "on"])
def test_every_major(fleet: list[Cluster], mode: str, pages: int, kind: str) -> None:
    """All builds at once, so that they also share one pool: what runs, what is needed, and what would come."""
    for cluster in fleet:
        cluster.configure(f"huge_pages = {mode}", f"shared_memory_type = {kind}")
    backing = {"sysv": "sysv"}.get(kind, "huge" if pages and mode != "off" else "base")
    refuses = mode == "on" and backing != "huge"
    falls_back = mode == "try" and kind == "mmap" and not pages
    with pool(pages), started(fleet) as running:
        stopped = [option for c in fleet if c.directory not in running for option in ("--pgdata", c.directory)]
        report = check(*EXPOSED, *stopped)
        for cluster in fleet:
            key, found = cluster.server.key, report.cluster(cluster.directory)
            assert (cluster.directory not in running) is refuses, key
            assert found["running"] is not refuses, key
            assert value(found["freelist"]) is (cluster.server.major < 19), key
            assert value(found["owner"]) == servers.server_user().pw_name, key
            written = {"shared_buffers": 16 * MB, "huge_pages": mode, "max_connections": CONNECTIONS}
            written |= {"shared_memory_type": kind}
            for name, right in written.items():
                leaf = found["next_start"]["settings"][name]
                assert value(leaf) == right, (key, name)
                assert_names_its_line(leaf["source"], cluster.conf, name)
            assert value(found["next_start"]["settings"]["huge_page_size"]) == 0
            assert value(found["next_start"]["accepted"]) is True, key
            assert found["next_start"]["error"] is None, key
            if refuses:
                assert value(found["next_start"]["outcome"]) == "refuses", key
                rule = "PPC207" if kind == "sysv" else "PPC202"
                assert rule in report.failed(cluster.directory, "next_start"), key
                assert report.verdict(cluster.directory, "next_start")["verdict"] == "not-applicable", key
                assert report.code == 1
                continue
            assert_running_as_it_is(report, cluster, running[cluster.directory], backing)
            assert ("PPC201" in report.failed(cluster.directory, "now")) is (mode == "try" and backing != "huge")
            assert ("PPC214" in report.failed(cluster.directory, "now")) is (mode == "try" and kind == "sysv")
            expected = ("falls-back" if falls_back else "starts", backing)
            assert foretold(found["crash_restart"]) == foretold(found["next_start"]) == expected, key
            fallen = report.failed(cluster.directory, "crash_restart") & {"PPC202", "PPC203"}
            assert fallen == ({"PPC203"} if falls_back else set()), key
        crashed = together(after_a_crash, running.values())
        assert set(crashed) <= {("falls-back" if falls_back else "starts", backing)}
        by_directory = {c.directory: c for c in fleet}
        again = together(lambda r: after_a_restart(by_directory[r.directory], r), running.values())
        assert set(again) <= {("falls-back" if falls_back else "starts", backing)}


def assert_names_its_line(source: str, path: str, name: str) -> None:
    with open(path) as file:
        lines = [number for number, line in enumerate(file, 1) if line.split("=")[0].strip() == name]
    assert source == f"{path} line {lines[-1]}", source


def assert_running_as_it_is(report: Answer, cluster: Cluster, running: Running, backing: str) -> None:
    """Hold what a report says of a running cluster against its server and /proc."""
    key, found = cluster.server.key, report.cluster(cluster.directory)
    truth = mapped(running.pid)
    assert truth.backing == backing and truth.page_bytes == (PAGE if backing == "huge" else os.sysconf("SC_PAGESIZE"))
    segment: dict[str, Any] = found["segment"]
    assert (value(segment["backing"]), value(segment["bytes"]), value(segment["page_bytes"])) == tuple(truth), key
    assert value(segment["base_pages"]) is (backing != "huge"), key
    assert value(found["pid"]) == running.pid and value(found["port"]) == cluster.port, key
    assert value(found["version"]) == show(cluster.conninfo, "server_version"), key
    assert_settings_as_server_says(cluster, found["settings"])
    needed = found["huge_pages_needed"]
    assert value(needed["now"]) == value(needed["next_start"]) == -(-truth.size // PAGE), key
    if cluster.server.major >= 15:
        assert value(needed["now"]) == int(show(cluster.conninfo, "shared_memory_size_in_huge_pages")), key
    if cluster.server.major >= 17:
        status = show(cluster.conninfo, "huge_pages_status")
        assert status == ("on" if backing == "huge" else "off"), key
        assert value(found["server"]["huge_pages_status"]) == status, key
    links = report.links(cluster.directory, "now")
    assert links["freelist"] == ("holds" if cluster.server.major < 19 else "broken"), key
    assert links["base_pages"] == ("broken" if backing == "huge" else "holds"), key
    assert links["parallelism"] == "holds", key
    exposed = cluster.server.major < 19 and backing != "huge"
    assert report.verdict(cluster.directory, "now")["verdict"] == ("exposed" if exposed else "not-exposed"), key


@pytest.mark.parametrize("key", KEYS)
def test_the_page_count_is_exact(key: str) -> None:
    """With one page fewer than the report says the server falls back, with that many it does not."""
    with a_cluster(key, "huge_pages = try") as cluster, pool(0):
        with cluster.start():
            needed = value(check().cluster(cluster.directory)["huge_pages_needed"]["next_start"])
        for pages, backing in ((needed - 1, "base"), (needed, "huge")):
            set_pool(pages)
            with cluster.start() as running:
                assert mapped(running.pid).backing == backing, (pages, needed)


def set_pool(pages: int) -> None:
    """Change the pool inside of `pool()`, which puts it back."""
    write(POOL, str(pages))


# the silent fallback, and the pool that is cut meanwhile ------------------------------------------


@pytest.mark.parametrize("key", ["npm-14", "system-15", "npm-18"])
def test_try_with_an_empty_pool_and_with_enough(key: str) -> None:
    """Base pages, a finding for the silent fallback and the page count it needs; then huge, and the link broken."""
    with a_cluster(key, "huge_pages = try") as cluster, pool(0):
        with cluster.start() as running:
            report, text = check(*EXPOSED), tool.text(*EXPOSED)
            assert "HUGETLB" not in running.log().upper() and "huge" not in running.log().lower()
            needed = -(-mapped(running.pid).size // PAGE)
        found = report.finding("PPC201", cluster.directory, "now")
        assert found["status"] == "fail"
        assert {(e["fact"], e["value"]) for e in found["evidence"]} >= {
            ("cluster.segment.backing", "base"),
            ("cluster.settings.huge_pages", "try"),
        }
        assert re.search(rf"\b{needed} pages? of 2 MB", found["expected"]), found["expected"]
        assert report.links(cluster.directory, "now")["base_pages"] == "holds"
        assert "PPC201" in text and re.search(rf"\b{needed} of 2\s+MB", " ".join(text.split()))
        set_pool(needed + 5)
        with cluster.start() as running:
            report = check(*EXPOSED)
            assert mapped(running.pid).backing == "huge"
            assert report.finding("PPC201", cluster.directory, "now")["status"] == "pass"
            assert report.links(cluster.directory, "now")["base_pages"] == "broken"
            assert report.verdict(cluster.directory, "now")["verdict"] == "not-exposed"


@pytest.mark.parametrize("mode", ["try", "on"])
def test_a_pool_cut_while_servers_run(fleet: list[Cluster], mode: str) -> None:
    """All majors at once: now still huge, and then what the report foretold."""
    for cluster in fleet:
        cluster.configure(f"huge_pages = {mode}")
    expected = ("falls-back", "base") if mode == "try" else ("refuses", None)
    with pool(200), started(fleet) as running:
        assert len(running) == len(fleet)
        set_pool(0)
        report = check(*EXPOSED)
        for cluster in fleet:
            key, found = cluster.server.key, report.cluster(cluster.directory)
            assert_running_as_it_is(report, cluster, running[cluster.directory], "huge")
            assert foretold(found["crash_restart"]) == foretold(found["next_start"]) == expected, key
            rule = "PPC203" if mode == "try" else "PPC202"
            for horizon in ("crash_restart", "next_start"):
                finding = report.finding(rule, cluster.directory, horizon)
                assert finding["status"] == "fail", key
                assert finding["severity"] == "critical" or mode == "try", key
                fallen_back = "exposed" if cluster.server.major < 19 else "not-exposed"
                verdict = report.verdict(cluster.directory, horizon)["verdict"]
                assert verdict == (fallen_back if mode == "try" else "not-applicable"), key
        assert report.code == 1 or mode == "try"
        assert set(together(after_a_crash, running.values())) == {expected}
        by_directory = {c.directory: c for c in fleet}
        again = together(lambda r: after_a_restart(by_directory[r.directory], r), running.values())
        assert set(again) == {expected}


@pytest.mark.parametrize("mode", ["try", "on"])
@pytest.mark.parametrize("short", [0, 1])
def test_a_pool_cut_to_the_need_and_one_below(mode: str, short: int) -> None:
    """The pages that the running segment holds are its own again after a crash: the count decides, to the page."""
    with a_cluster(17, f"huge_pages = {mode}") as cluster, pool(60), cluster.start() as running:
        needed = mapped(running.pid).size // PAGE
        set_pool(needed - short)
        found = check().cluster(cluster.directory)
        assert value(found["crash_restart"]["pages_missing"]) == short
        lost = ("falls-back", "base") if mode == "try" else ("refuses", None)
        expected = lost if short else ("starts", "huge")
        assert foretold(found["crash_restart"]) == foretold(found["next_start"]) == expected
        assert after_a_crash(running) == expected
        assert after_a_restart(cluster, running) == expected


def test_pages_that_another_cluster_holds_cannot_be_had() -> None:
    """The second of two clusters finds the pool taken, and is told so; overcommit would give it more."""
    overcommit = "/proc/sys/vm/nr_overcommit_hugepages"
    with open(overcommit) as file:
        before = file.read()
    with (
        a_cluster(17, "huge_pages = on") as first,
        a_cluster(18, "huge_pages = try") as second,
        pool(60),
        first.start() as running,
    ):
        set_pool(mapped(running.pid).size // PAGE + 5)
        with second.start() as beside:
            report = check()
            assert foretold(report.cluster(first.directory)["next_start"]) == ("starts", "huge")
            found = report.cluster(second.directory)["next_start"]
            assert foretold(found) == ("falls-back", "base") and value(found["pages_obtainable"]) == 5
            assert after_a_crash(beside) == ("falls-back", "base")
            try:
                write(overcommit, "100")
                found = check().cluster(second.directory)["next_start"]
                assert value(found["pages_obtainable"]) == 105
                assert foretold(found) == after_a_crash(beside) == ("starts", "huge")
            finally:
                write(overcommit, before)


@pytest.mark.parametrize("mode", ["try", "on"])
def test_a_pool_for_one_of_two_is_promised_to_neither(mode: str) -> None:
    """Each would find its pages, both do not: started in one order the first gets them, in the other the second."""
    line = f"huge_pages = {mode}"
    with a_cluster(17, line) as first, a_cluster(18, line) as second, pool(200):
        with first.start() as one, second.start() as two:
            needs = [mapped(one.pid).size // PAGE, mapped(two.pid).size // PAGE]
        first.configure("huge_pages = off")
        second.configure("huge_pages = off")
        with first.start(), second.start():
            first.configure(line)
            second.configure(line)
            set_pool(sum(needs) - 1)
            report = check(*EXPOSED)
            for cluster in (first, second):
                assert gap(report.cluster(cluster.directory)["next_start"]["outcome"])
                assert "PPC216" in report.failed(cluster.directory, "next_start")
                assert report.links(cluster.directory, "next_start")["base_pages"] == "unknown"
        for order in ((first, second), (second, first)):
            set_pool(sum(needs) - 1)
            with order[0].start() as early:
                assert mapped(early.pid).backing == "huge"
                assert started_late(order[1]) == ("base" if mode == "try" else None)


def started_late(cluster: Cluster) -> str | None:
    try:
        with cluster.start() as running:
            return mapped(running.pid).backing
    except ServerRefusedError:
        return None


def test_pages_of_another_size() -> None:
    """huge_page_size names a pool of its own: without one `try` falls back and `on` refuses, with one it is used."""
    gigantic = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
    with a_cluster(17, "huge_pages = try", "huge_page_size = 32MB") as cluster, pool(60):
        with cluster.start() as running:
            report = check()
            found = report.cluster(cluster.directory)
            assert value(found["next_start"]["pool_exists"]) is os.path.exists(
                "/sys/kernel/mm/hugepages/hugepages-32768kB"
            )
            assert "PPC206" in report.failed(cluster.directory, "next_start")
            assert foretold(found["next_start"]) == after_a_crash(running) == ("falls-back", "base")
            assert after_a_restart(cluster, running) == ("falls-back", "base")
        if not os.path.exists(gigantic):
            return
        with open(gigantic) as file:
            before = file.read()
        try:
            write(gigantic, str(int(before) + 1))
            with open(gigantic) as file:
                if int(file.read()) <= int(before):
                    return  # memory is too scattered for a page of that size
            cluster.configure("huge_pages = on", "huge_page_size = 1GB")
            with cluster.start() as running:
                found = check().cluster(cluster.directory)
                assert mapped(running.pid) == ("huge", 1 << 30, 1 << 30)
                assert value(found["segment"]["page_bytes"]) == value(found["segment"]["bytes"]) == 1 << 30
                assert value(found["huge_pages_needed"]["now"]) == 1
                assert foretold(found["next_start"]) == ("starts", "huge")
                assert value(found["settings"]["huge_page_size"]) == 1 << 30
        finally:
            write(gigantic, before)


# cgroups -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(cluster: Cluster, **limits: int) -> Iterator[Running]:
    """Start a cluster in a cgroup whose parent has these hugetlb limits (fault, rsvd) in bytes."""
    names = {"fault": "hugetlb.2MB.max", "rsvd": "hugetlb.2MB.rsvd.max"}
    with real_group() as group:
        for name, limit in limits.items():
            write(f"{group}/{names[name]}", str(limit))
        with inside(f"{group}/leaf"):
            running = cluster.start()
        with running:
            yield running


@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-18", "debian-19"])
def test_a_fault_limit_below_the_segment_is_critical(key: str) -> None:
    """The server starts and says that huge pages are on; touching its buffers kills it."""
    with (
        a_cluster(key, "huge_pages = on", "shared_buffers = 64MB", "autovacuum = off") as cluster,
        pool(100),
        limited(cluster, fault=40 * MB) as running,
    ):
        truth = mapped(running.pid)
        assert truth.backing == "huge" and truth.size > 64 * MB
        if cluster.server.major >= 17:
            assert show(cluster.conninfo, "huge_pages_status") == "on"
        report = check(*EXPOSED)
        found = report.cluster(cluster.directory)
        for horizon, part in (
            ("now", found["start"]),
            ("crash_restart", found["crash_restart"]),
            ("next_start", found["next_start"]),
        ):
            assert value(part["outcome"]) == "crashes", horizon
            assert value(part["fault_limit_bytes"]) == 40 * MB, horizon
            finding = report.finding("PPC204", cluster.directory, horizon)
            assert (finding["status"], finding["severity"]) == ("fail", "critical"), horizon
        assert report.code == 1
        # INSERT takes buffers until none is left; CREATE TABLE AS would go round in a ring of a few
        with contextlib.suppress(psycopg.Error), psycopg.connect(cluster.conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE big (filler text)")
            connection.execute("INSERT INTO big SELECT repeat('x', 2000) FROM generate_series(1, 40000)")
        wait_for(lambda: "terminated by signal 7" in running.log(), "no SIGBUS")


def test_a_fault_limit_above_the_segment_is_none_to_mention() -> None:
    with (
        a_cluster(17, "huge_pages = on") as cluster,
        pool(60),
        limited(cluster, fault=40 * MB, rsvd=40 * MB) as running,
    ):
        assert mapped(running.pid).size < 40 * MB
        report = check()
        found = report.cluster(cluster.directory)
        assert foretold(found["crash_restart"]) == foretold(found["next_start"]) == ("starts", "huge")
        assert not {"PPC204", "PPC205"} & report.failed(cluster.directory, "next_start")


def test_a_reservation_limit_keeps_the_pages_away() -> None:
    """With `try` it runs on base pages in silence; with `on` in the files it would not come back."""
    with a_cluster(17, "huge_pages = try") as cluster, pool(60), limited(cluster, rsvd=0) as running:
        report = check(*EXPOSED)
        found = report.cluster(cluster.directory)
        assert value(found["segment"]["backing"]) == mapped(running.pid).backing == "base"
        assert "PPC201" in report.failed(cluster.directory, "now")
        assert value(found["crash_restart"]["reservation_limit_bytes"]) == 0
        assert value(found["crash_restart"]["pages_missing"]) == 0
        assert {"PPC203", "PPC205"} <= report.failed(cluster.directory, "crash_restart")
        assert foretold(found["crash_restart"]) == after_a_crash(running) == ("falls-back", "base")
        with open(f"/proc/{running.pid}/cgroup") as file:
            group = next(line.strip().split(":", 2)[2] for line in file if line.startswith("0::"))
        cluster.configure("huge_pages = on")
        report = check(*EXPOSED)
        assert foretold(report.cluster(cluster.directory)["next_start"]) == ("refuses", None)
        assert {"PPC202", "PPC205"} <= report.failed(cluster.directory, "next_start") and report.code == 1
        running.stop()
        with (
            inside(unified() + group),
            pytest.raises(ServerRefusedError, match="could not map anonymous shared memory"),
        ):
            cluster.start()


def unified() -> str:
    """Return where the version 2 hierarchy is mounted."""
    with open("/proc/self/mountinfo") as file:
        return next(line.split()[4] for line in file if " - cgroup2 " in line)


# without rights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-18", "debian-19"])
@pytest.mark.parametrize("backing", ["base", "huge"])
def test_as_nobody(key: str, backing: str) -> None:
    """What another user can't see is a gap with a reason; HugetlbPages = 0 proves base pages, more proves nothing."""
    with (
        a_cluster(key, "huge_pages = try") as cluster,
        pool(60 if backing == "huge" else 0),
        cluster.start() as running,
    ):
        assert mapped(running.pid).backing == backing
        report = check(*EXPOSED, user="nobody")
        found = report.cluster(cluster.directory)
        assert value(found["pid"]) == running.pid and found["running"] is True
        for part in (found["settings"]["shared_buffers"], found["segment"]["bytes"], found["next_start"]["accepted"]):
            assert gap(part)
        links = report.links(cluster.directory, "now")
        if backing == "base":
            assert value(found["segment"]["backing"]) == "base" and links["base_pages"] == "holds"
        else:
            assert gap(found["segment"]["backing"]) and gap(found["segment"]["page_bytes"])
            assert links["base_pages"] == "unknown"
        for horizon in ("now", "crash_restart", "next_start"):
            links, verdict = report.links(cluster.directory, horizon), report.verdict(cluster.directory, horizon)
            assert links["freelist"] in ("unknown", "holds" if cluster.server.major < 19 else "broken"), links
            assert links["parallelism"] == "unknown", links
            if links["freelist"] != "broken":
                assert verdict["verdict"] == "undetermined", horizon
        assert report.finding("PPC301", cluster.directory, "next_start")["status"] == "unknown"
        assert report.code == 3
        text = tool.text(user="nobody")
        assert cluster.directory in " ".join(text.split()) and "Not known" in text


def test_as_the_owner() -> None:
    """The owner sees all of its own cluster that root sees."""
    owner = servers.server_user().pw_name
    with a_cluster(17, "huge_pages = try") as cluster, pool(60), cluster.start() as running:
        report = check(*EXPOSED, user=owner)
        assert_running_as_it_is(report, cluster, running, "huge")
        found = report.cluster(cluster.directory)
        assert foretold(found["crash_restart"]) == foretold(found["next_start"]) == ("starts", "huge")


HIDEPID = ("unshare", "-m", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh")
PID_NAMESPACE = ("unshare", "-m", "-p", "--fork", "--mount-proc")


def can_unshare(wrap: Sequence[str]) -> None:
    done = subprocess.run([*wrap, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{wrap[0]}: {done.stderr.strip()}")


def test_hidepid_hides_clusters_and_says_so() -> None:
    can_unshare(HIDEPID)
    with a_cluster(17, "huge_pages = off") as cluster, cluster.start() as running:
        report = check(*EXPOSED, user="nobody", wrap=HIDEPID)
        assert all(c["data_directory"] != cluster.directory for c in report.data["clusters"])
        assert "hidepid" in gap(report.data["host"]["hidden_clusters"])
        finding = report.finding("PPC306", None, "now")
        assert (finding["status"], finding["severity"]) == ("unknown", "high") and report.code == 3
        owned = check(*EXPOSED, user=servers.server_user().pw_name, wrap=HIDEPID)
        assert value(owned.cluster(cluster.directory)["pid"]) == running.pid
        assert owned.verdict(cluster.directory, "now")["verdict"] == "exposed"


def test_hidepid_and_a_data_directory_named() -> None:
    """A cluster whose process is hidden is not one that does not run."""
    can_unshare(HIDEPID)
    with a_cluster(17) as cluster, cluster.start():
        for wrap, user in ((HIDEPID, "nobody"), (PID_NAMESPACE, None)):
            report = check(*EXPOSED, "--pgdata", cluster.directory, user=user, wrap=wrap)
            assert gap(report.data["host"]["hidden_clusters"])
            assert report.finding("PPC306", None, "now")["status"] == "unknown" and report.code in (1, 3)


def test_in_a_pid_namespace_no_postmaster_is_not_none() -> None:
    can_unshare(PID_NAMESPACE)
    with a_cluster(17) as cluster, cluster.start():
        report = check(*EXPOSED, wrap=PID_NAMESPACE)
        assert all(c["data_directory"] != cluster.directory for c in report.data["clusters"])
        assert gap(report.data["host"]["hidden_clusters"])
        assert report.finding("PPC306", None, "now")["status"] == "unknown" and report.code in (1, 3)


# files that changed after the start --------------------------------------------------------------


@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-18", "debian-19"])
def test_settings_changed_on_disk(key: str) -> None:
    """What runs stays what it is, and the next start has the new values; a real restart then has them too."""
    with a_cluster(key, "huge_pages = off") as cluster, pool(0), cluster.start() as running:
        cluster.configure("huge_pages = off", "shared_buffers = '24 MB'", "huge_pages = try")
        with open(f"{cluster.directory}/postgresql.auto.conf", "a") as file:
            file.write(f"max_connections = '{CONNECTIONS + 7}'\n")
        report = check(*EXPOSED)
        found = report.cluster(cluster.directory)
        assert_settings_as_server_says(cluster, found["settings"])
        assert value(found["settings"]["huge_pages"]) == "off"
        later = found["next_start"]["settings"]
        assert value(later["shared_buffers"]) == 24 * MB and later["shared_buffers"]["source"].endswith(" line 9")
        assert value(later["huge_pages"]) == "try" and later["huge_pages"]["source"].endswith(" line 10")
        assert value(later["max_connections"]) == CONNECTIONS + 7
        assert "postgresql.auto.conf" in later["max_connections"]["source"]
        assert "PPC302" in report.failed(cluster.directory, "next_start")
        assert gap(found["next_start"]["pages_needed"]) and value(found["next_start"]["pages_at_least"]) == 12
        assert foretold(found["crash_restart"]) == ("starts", "base")
        assert foretold(found["next_start"]) == ("falls-back", "base")
        running.stop()
        with cluster.start() as again:
            names = ("shared_buffers", "huge_pages", "max_connections")
            assert [show(cluster.conninfo, n) for n in names] == ["24MB", "try", str(CONNECTIONS + 7)]
            assert fell_back_or_not(again) == "falls-back"


BROKEN = [
    "max_connections = lots",
    "shared_buffers = 16 MB",
    "shared_buffers = 10kB",
    "work_mem = 64mb",
    "huge_pages = yes_please",
    "shared_bufers = 16MB",
    "include 'not-there.conf'",
    "wal_level",
    "max_wal_senders = 5\nwal_level = minimal",
]


@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-18", "debian-19"])
def test_files_that_the_server_refuses(key: str) -> None:
    """It runs on; the next start is refused with the words, the file and the line that the report has."""
    with a_cluster(key) as cluster:
        errors = {}
        with cluster.start():
            for lines in BROKEN:
                cluster.configure(*lines.split("\n"))
                errors[lines] = refusal_foretold(cluster, lines)
        for lines, error in errors.items():
            cluster.configure(*lines.split("\n"))
            with pytest.raises(ServerRefusedError) as refused:
                cluster.start()
            log = str(refused.value)
            first = next(line for line in log.split("\n") if re.search(r"(LOG|FATAL):  ", line))
            said = re.sub(r"^.*?(LOG|FATAL):  ", "", first)
            assert error["reason"] in said or said in error["reason"], (error, log)
            place = re.search(r'in file "([^"]+)" line (\d+)|"([^"]+)" line (\d+)', log)
            if place is not None:
                assert (error["file"], error["line"]) == (place[1] or place[3], int(place[2] or place[4])), (error, log)


def refusal_foretold(cluster: Cluster, lines: str) -> dict[str, Any]:
    """Return the error that a report has for the next start of a cluster that runs."""
    report = check(*EXPOSED)
    found = report.cluster(cluster.directory)
    finding = report.finding("PPC301", cluster.directory, "next_start")
    assert (finding["status"], finding["severity"], report.code) == ("fail", "critical", 1), lines
    assert value(found["next_start"]["accepted"]) is False and value(found["next_start"]["outcome"]) == "refuses"
    assert report.verdict(cluster.directory, "next_start")["verdict"] == "not-applicable", lines
    assert report.verdict(cluster.directory, "now")["verdict"] in ("exposed", "not-exposed"), lines
    assert foretold(found["crash_restart"])[0] in ("starts", "falls-back"), lines
    error: dict[str, Any] = found["next_start"]["error"]
    return error


# standbys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["npm-13", "npm-14", "system-15", "npm-18", "debian-19"])
def test_a_standby_with_fewer_connections_than_its_primary(key: str) -> None:
    """Its files are fine, and it refuses to start all the same, with the words of the report."""
    with a_cluster(key, "wal_level = replica") as primary, servers.private_directory() as folder:
        with primary.start():
            query(primary.conninfo, "SELECT pg_switch_wal()")
        standby = Cluster(primary.server, f"{folder}/data", servers.free_port())
        shutil.copytree(primary.directory, standby.directory, symlinks=True)
        servers.give(standby.directory)
        with open(f"{standby.directory}/standby.signal", "w"):
            pass
        os.chmod(standby.directory, 0o700)
        standby.configure(f"max_connections = {CONNECTIONS}")
        with primary.start():
            fine = check("--pgdata", standby.directory)
            assert fine.finding("PPC301", standby.directory, "next_start")["status"] == "pass"
            standby.configure(f"max_connections = {CONNECTIONS - 2}")
            report = check("--pgdata", standby.directory)
            found = report.cluster(standby.directory)
            assert value(found["standby"]) is True and value(found["next_start"]["outcome"]) == "refuses"
            finding = report.finding("PPC301", standby.directory, "next_start")
            assert (finding["status"], report.code) == ("fail", 1)
            with pytest.raises(ServerRefusedError) as refused:
                standby.start()
            reason = found["next_start"]["error"]["reason"]
            log = " ".join(str(refused.value).split())
            words = f"max_connections = {CONNECTIONS - 2} is a lower setting than on the"
            assert words in reason and words in log, (reason, log)
            assert str(CONNECTIONS) in reason.partition(words)[2]
            fatal = re.search(r"FATAL:  (.*?)(?: max_connections|\n|$)", str(refused.value))
            assert fatal is not None and fatal[1] in reason, (reason, fatal)
            standby.configure(f"max_connections = {CONNECTIONS - 2}", "hot_standby = off")
            report = check("--pgdata", standby.directory)
            cold = standby_takes(standby)
            assert report.finding("PPC301", standby.directory, "next_start")["status"] == ("pass" if cold else "fail")
            os.unlink(f"{standby.directory}/standby.signal")
            report = check("--pgdata", standby.directory)
            assert report.finding("PPC301", standby.directory, "next_start")["status"] == "pass"


def standby_takes(standby: Cluster) -> bool:
    """Return whether a standby without hot_standby starts recovery; it never becomes ready, so its log is read."""
    try:
        standby.server.start(
            standby.directory,
            argv=[standby.server.program("postgres"), "-D", standby.directory],
            port=standby.port,
            timeout=2,
        ).stop()
    except ServerRefusedError as refused:
        return "FATAL" not in str(refused).rpartition("not ready after")[2]
    return True


# where and how a server runs ---------------------------------------------------------------------


def launched(cluster: Cluster, command: Sequence[str]) -> Running:
    return cluster.server.start(cluster.directory, argv=command, port=cluster.port)


def test_started_through_the_loader() -> None:
    """/proc/PID/exe is the loader, which has no symbols of PostgreSQL: the version tells of the freelist."""
    ELFFile = pytest.importorskip("elftools.elf.elffile").ELFFile  # noqa: N806 - its own name
    for key in (17, "debian-19"):
        with a_cluster(key) as cluster:
            program = cluster.server.program("postgres")
            with open(program, "rb") as file:
                (loader,) = (s.get_interp_name() for s in ELFFile(file).iter_segments("PT_INTERP"))
            with launched(cluster, [loader, program, "-D", cluster.directory]) as running:
                assert "ld-" in os.readlink(f"/proc/{running.pid}/exe")
                report = check(*EXPOSED)
                found = report.cluster(cluster.directory)
                assert value(found["pid"]) == running.pid
                assert value(found["freelist"]) is (cluster.server.major < 19)
                assert value(found["segment"]["backing"]) == mapped(running.pid).backing
                assert_settings_as_server_says(cluster, found["settings"])
                verdicts = ("exposed",) if cluster.server.major < 19 else ("not-exposed", "probably-not-exposed")
                assert report.verdict(cluster.directory, "now")["verdict"] in verdicts


def test_started_under_another_name() -> None:
    with a_cluster(17) as cluster, servers.private_directory() as folder:
        os.symlink(cluster.server.program("postgres"), f"{folder}/dbserver")
        with launched(cluster, [f"{folder}/dbserver", "-D", cluster.directory]) as running:
            report = check(*EXPOSED)
            assert_running_as_it_is(report, cluster, running, mapped(running.pid).backing)


def test_replaced_on_disk_while_it_runs() -> None:
    """The running program counts, not the file that an upgrade put in its place."""
    with a_cluster("npm-17") as cluster, servers.private_directory() as folder:
        newer = servers.require("debian-19").program("postgres")
        shutil.copytree(os.path.dirname(cluster.server.bin_dir), f"{folder}/native", symlinks=True)
        servers.give(folder)
        program = f"{folder}/native/bin/postgres"
        with launched(cluster, [program, "-D", cluster.directory]) as running:
            shutil.copy(newer, f"{program}.new")
            os.rename(f"{program}.new", program)
            assert os.readlink(f"/proc/{running.pid}/exe").endswith(" (deleted)")
            report = check(*EXPOSED)
            assert_running_as_it_is(report, cluster, running, mapped(running.pid).backing)


def test_in_a_mount_namespace_of_its_own() -> None:
    """Its data directory is on a file system that only it sees: files, settings and SQL are read through its root."""
    can_unshare(("unshare", "-m"))
    with a_cluster(17, "huge_pages = off") as cluster, servers.private_directory() as folder:
        os.rename(cluster.directory, f"{folder}/kept")
        os.mkdir(cluster.directory)  # what can be seen from outside: an empty folder
        user = servers.server_user()
        script = (
            f"mount -t tmpfs tmpfs {cluster.directory} && cp -a {folder}/kept/. {cluster.directory} && "
            f"chmod 700 {cluster.directory} && chown {user.pw_uid} {cluster.directory} && cd / && "
            f"exec setpriv --reuid={user.pw_uid} --regid={user.pw_gid} --clear-groups "
            f"{cluster.server.program('postgres')} -D {cluster.directory}"
        )
        with (
            open(f"{folder}/log", "wb") as log,
            subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=log, stderr=log, cwd="/") as process,
        ):
            try:
                inside_conninfo = cluster.conninfo.replace("host=", f"host=/proc/{process.pid}/root")
                wait_for(lambda: answers(inside_conninfo), "it did not start")
                report = check(*EXPOSED)
                found = report.cluster(cluster.directory)
                assert value(found["pid"]) == process.pid
                assert value(found["settings"]["shared_buffers"]) == 16 * MB
                assert value(found["server"]["version"]) == show(inside_conninfo, "server_version")
                assert value(found["next_start"]["accepted"]) is True
                assert value(found["next_start"]["settings"]["huge_pages"]) == "off"
                assert value(found["segment"]["bytes"]) == mapped(process.pid).size
                assert report.verdict(cluster.directory, "now")["verdict"] == "exposed"
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(30)


def test_two_clusters_and_an_unusual_socket_directory() -> None:
    """Each is asked at its own address, though the port of one is the other's default elsewhere."""
    with a_cluster(15) as one, a_cluster(18) as two, servers.private_directory() as folder:
        os.makedirs(f"{folder}/a b/c'd")
        servers.give(folder)
        odd = Cluster(two.server, two.directory, two.port)
        odd.configure(f"unix_socket_directories = '/tmp, \"{folder}/a b/c''d\"'", "listen_addresses = '127.0.0.1'")
        with one.start() as first, odd.start() as second:
            report = check(*EXPOSED)
            assert_running_as_it_is(report, one, first, mapped(first.pid).backing)
            found = report.cluster(odd.directory)
            assert (value(found["pid"]), value(found["port"])) == (second.pid, odd.port)
            assert value(found["version"]) == show(f"host=127.0.0.1 port={odd.port} user=postgres", "server_version")
            assert value(found["settings"]["shared_buffers"]) == 16 * MB
            assert "sql" in found["settings"]["shared_buffers"]["source"]


# --dsn -------------------------------------------------------------------------------------------


def test_a_dsn_to_one_of_two_local_clusters() -> None:
    """What the server says is said of its own cluster; the other is asked at its own socket."""
    with (
        a_cluster(17) as named,
        a_cluster(17, "shared_buffers = 24MB") as other,
        named.start() as one,
        other.start() as two,
    ):
        report = check(*EXPOSED, "--dsn", named.conninfo)
        assert_running_as_it_is(report, named, one, mapped(one.pid).backing)
        assert_running_as_it_is(report, other, two, mapped(two.pid).backing)
        assert not [c for c in report.data["clusters"] if "dsn" in c["id"]]


@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-18"])
def test_a_dsn_through_pgbouncer(key: str) -> None:
    """The pooler is no wall: the backend behind it runs here. Its next client finds nothing changed."""
    with a_cluster(key) as cluster, cluster.start() as running, pgbouncer(running) as through:
        report = check(*EXPOSED, "--dsn", through)
        assert_running_as_it_is(report, cluster, running, mapped(running.pid).backing)
        assert not [c for c in report.data["clusters"] if "dsn" in c["id"]]
        with psycopg.connect(through, autocommit=True, prepare_threshold=None) as next_client:
            for name, usual in (("statement_timeout", "0"), ("lock_timeout", "0"), ("search_path", '"$user", public')):
                row = next_client.execute(f"SHOW {name}").fetchone()
                assert row is not None and row[0] == usual


@pytest.mark.parametrize("key", ["npm-13", "system-15", "npm-18", "debian-19"])
def test_a_dsn_to_a_server_elsewhere(key: str) -> None:
    """Seen from another PID and network namespace nothing of this host can be said of the server, whatever is known."""
    elsewhere = ("unshare", "-m", "-p", "-n", "--fork", "--mount-proc")
    can_unshare(elsewhere)
    with a_cluster(key, "huge_pages = off") as cluster, cluster.start():
        report = check("--dsn", cluster.conninfo, wrap=elsewhere)
        (found,) = (c for c in report.data["clusters"] if "dsn" in c["id"])
        assert found["data_directory"] is None
        assert value(found["version"]) == show(cluster.conninfo, "server_version")
        assert value(found["settings"]["shared_buffers"]) == 16 * MB
        assert value(found["freelist"]) is (cluster.server.major < 19)
        for leaf in (found["segment"]["backing"], found["kernel_preemptible"], found["cpus"]["allowed"], found["pid"]):
            assert "elsewhere" in gap(leaf)
        for verdict in (v for v in report.data["verdicts"] if v["cluster"] == found["id"]):
            links = {link["link"]: link["state"] for link in verdict["links"]}
            if verdict["horizon"] == "now":
                assert links["base_pages"] == links["kernel_preemption"] == links["parallelism"] == "unknown"
            allowed = {"undetermined", "not-applicable"} if cluster.server.major < 19 else {
                "not-exposed", "probably-not-exposed", "not-applicable"}  # fmt: skip
            assert verdict["verdict"] in allowed, verdict
