"""A captured host gives what the live one gave, as a directory and as an archive; what it cannot hold is unknown."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests import servers
from tests.test_real_clusters import Cluster, a_cluster, mapped, set_pool
from tests.test_segment import pool
from tests.tool import Answer, check, value

psycopg = pytest.importorskip("psycopg")
ELFFile = pytest.importorskip("elftools.elf.elffile").ELFFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can capture another user's process"),
]

HOST_FILES = (
    "/etc/hostname",
    "/etc/os-release",
    "/etc/passwd",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/mounts",
    "/proc/net/unix",
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/proc/self/mounts",
    "/proc/self/status",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/osrelease",
    "/proc/version",
    "/sys/class/dmi/id/product_name",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource",
    "/sys/devices/system/cpu/isolated",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/node/has_memory",
    "/sys/devices/system/node/node*/hugepages/*/*",
    "/sys/devices/system/node/node*/meminfo",
    "/sys/hypervisor/type",
    "/sys/kernel/debug/sched/preempt",
    "/sys/kernel/mm/hugepages/*/*",
    "/sys/kernel/mm/transparent_hugepage/*",
    "/sys/kernel/mm/transparent_hugepage/*/*",
    "/sys/kernel/realtime",
    "/sys/kernel/sched_ext/state",
    "/sys/kernel/security/lockdown",
    "/sys/fs/cgroup/*/*",
    f"/boot/config-{os.uname().release}",
)
PROCESS_FILES = ("cmdline", "comm", "status", "maps", "limits", "cgroup", "environ", "stat")
DIRECTORY_FILES = ("PG_VERSION", "postmaster.pid", "*.conf", "global/pg_control", "*.signal")
FREELIST_SYMBOLS = {"StrategyGetBuffer", "StrategyFreeBuffer", "have_free_buffer", "s_lock"}


def capture(root: str, clusters: Sequence[Cluster]) -> None:
    """Write all that check reads of this host and these clusters below `root`, in the documented format."""
    for pattern in HOST_FILES:
        for path in glob.glob(pattern) or [pattern]:
            keep(root, path)
    put(root, "/uname.txt", run("uname", "-a"))
    log = run("dmesg")
    if log:
        put(root, "/dmesg.txt", log)
    keep_process(root, 1)
    for pid in run("pgrep", "-f", "postgres").split():  # servers of others too: their sockets are in the list
        keep_process(root, int(pid))
    for cluster in clusters:
        for pattern in DIRECTORY_FILES:
            for path in glob.glob(f"{cluster.directory}/{pattern}"):
                keep(root, path)
        with open(f"{cluster.directory}/postmaster.pid") as file:
            postmaster = int(file.readline())
        with open(f"/proc/{postmaster}/exe", "rb") as file:
            symbols = {symbol.name for symbol in ELFFile(file).get_section_by_name(".dynsym").iter_symbols()}
        notes = {"page_bytes": mapped(postmaster).page_bytes, "symbols": sorted(symbols & FREELIST_SYMBOLS)}
        put(root, f"/proc/{postmaster}/pgpreemptcheck.json", json.dumps(notes))
        put(root, f"/sql/{cluster.port}.json", json.dumps(asked(cluster)))


def asked(cluster: Cluster) -> dict[str, Any]:
    from pgpreemptcheck import sql

    return sql.ask(directories=[cluster.directory], port=cluster.port, users=["postgres"])


def keep_process(root: str, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):  # it may end meanwhile
        for name in PROCESS_FILES:
            keep(root, f"/proc/{pid}/{name}")
        for name in ("cwd", "exe"):
            put(root, f"/proc/{pid}/{name}.txt", os.readlink(f"/proc/{pid}/{name}") + "\n")


def keep(root: str, path: str) -> None:
    """Copy one file with its time; where it cannot be read, keep why."""
    if os.path.isdir(path):
        return
    try:
        with open(path, "rb") as file:
            data = file.read()
        changed = os.stat(path).st_mtime
    except FileNotFoundError:
        return
    except OSError as error:
        name = path.strip("/").replace("/", "-")
        put(root, f"/{name}.error.txt", f"cat: {path}: {error.strerror}\n")
        return
    put(root, path, data)
    os.utime(root + path, (changed, changed))


def put(root: str, path: str, data: bytes | str) -> None:
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    with open(root + path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout


# the comparison ----------------------------------------------------------------------------------

NOT_IN_A_CAPTURE = {"PPC104": "that /sys/kernel/sched_ext is not there, so that no such scheduler can be active"}


def statuses(report: Answer, ids: set[str]) -> dict[tuple[str, str | None, str], str]:
    return {
        (f["rule"], f["cluster"], f["horizon"]): f["status"]
        for f in report.data["findings"]
        if f["cluster"] is None or f["cluster"] in ids
    }


def verdicts(report: Answer, ids: set[str]) -> dict[tuple[str, str], Any]:
    return {
        (v["cluster"], v["horizon"]): (
            v["verdict"],
            v["severity"],
            v["certainty"],
            {link["link"]: (link["state"], link["certainty"]) for link in v["links"]},
        )
        for v in report.data["verdicts"]
        if v["cluster"] in ids
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Look at a host with clusters of all kinds, live and captured, while nothing changes."""
    for key in (13, "system-15", 18, "debian-19"):
        servers.require(key)
    root = str(tmp_path_factory.mktemp("capture"))
    with (
        a_cluster(13, "huge_pages = try") as small,
        a_cluster("system-15", "huge_pages = on") as huge,
        a_cluster(18, "huge_pages = off") as changed,
        a_cluster("debian-19", "shared_memory_type = sysv") as newest,
        pool(0),
    ):
        clusters = [small, huge, changed, newest]
        for cluster in clusters:  # written well before the start, as files are
            os.utime(cluster.conf, (0, 1_700_000_000))
            os.utime(f"{cluster.directory}/postgresql.auto.conf", (0, 1_700_000_000))
        with small.start(), changed.start(), newest.start():
            set_pool(60)
            with huge.start() as running:
                set_pool(mapped(running.pid).size // 2097152 - 1)  # no crash would bring it back
                changed.configure("huge_pages = try", "max_connections = none")
                live = check()
                capture(root, clusters)
                archive = f"{root}.tar.gz"
                with tarfile.open(archive, "w:gz") as tar:
                    tar.add(root, arcname="host")
                yield {
                    "clusters": clusters,
                    "live": live,
                    "directory": check("--root", root),
                    "tar.gz": check("--root", archive),
                }
                os.unlink(archive)


@pytest.mark.parametrize("form", ["directory", "tar.gz"])
def test_the_same_findings_and_verdicts(reports: dict[str, Any], form: str) -> None:
    ids = {c.directory for c in reports["clusters"]}
    live, captured = statuses(reports["live"], ids), statuses(reports[form], ids)
    assert captured.keys() == live.keys()
    differ = {key: (live[key], captured[key]) for key in live if live[key] != captured[key]}
    running = sum(c["running"] for c in reports["live"].data["clusters"])
    others = {"PPC210", "PPC211"} if running > len(ids) else set()  # what another's server wants was not captured
    assert {key[0] for key in differ} <= set(NOT_IN_A_CAPTURE) | others, differ
    assert all(after == "unknown" for _, after in differ.values()), differ
    assert verdicts(reports[form], ids) == verdicts(reports["live"], ids)
    assert reports[form].code == reports["live"].code == 1


def test_the_host_has_something_to_say(reports: dict[str, Any]) -> None:
    """Nothing is equal for being empty: each cluster brings findings of its own."""
    small, huge, changed, newest = reports["clusters"]
    live: Answer = reports["live"]
    assert "PPC201" in live.failed(small.directory, "now") and "PPC203" in live.failed(small.directory, "next_start")
    assert "PPC202" in live.failed(huge.directory, "crash_restart")
    assert "PPC301" in live.failed(changed.directory, "next_start")
    assert "PPC214" in live.failed(newest.directory, "now")


@pytest.mark.parametrize("form", ["directory", "tar.gz"])
def test_the_same_values(reports: dict[str, Any], form: str) -> None:
    """What is known of both has the same value: settings, segments, starts, the kernel, the pools."""
    for cluster in reports["clusters"]:
        before, after = (reports[name].cluster(cluster.directory) for name in ("live", form))
        for part in ("settings", "segment", "freelist", "version", "cpus", "crash_restart", "next_start", "owner"):
            assert known(after[part]) == known(before[part]), (cluster.server.key, part)
    before, after = reports["live"].data["host"], reports[form].data["host"]
    for part in ("arch", "os", "hostname"):
        assert known(after[part]) == known(before[part]), part
    for part in ("release", "build", "version_token", "command_line"):
        assert known(after["kernel"][part]) == known(before["kernel"][part]), part
    assert value(after["kernel"]["preemption"]["mode"]) == value(before["kernel"]["preemption"]["mode"])
    assert value(after["cpus"]["online"]) == value(before["cpus"]["online"])
    for mine, theirs in zip(known(after["huge_pages"])["pools"], known(before["huge_pages"])["pools"], strict=True):
        for count in ("page_bytes", "total", "surplus", "overcommit", "per_node"):
            assert mine[count] == theirs[count], count
        assert mine["free"] - mine["reserved"] == theirs["free"] - theirs["reserved"]  # a page touched is both


def known(tree: Any) -> Any:
    """Return a part of a report without where each value was read and why one is missing."""
    if isinstance(tree, dict):
        if "source" in tree:
            return tree["value"]
        if "unknown" in tree:
            return None
        return {name: known(item) for name, item in tree.items()}
    return [known(item) for item in tree] if isinstance(tree, list) else tree


def test_without_sql_and_notes_the_files_still_tell(reports: dict[str, Any], tmp_path: Any) -> None:
    """A capture without SQL answers knows less, says why, and contradicts nothing."""
    small, huge, *_ = reports["clusters"]
    root = str(tmp_path / "host")
    capture(root, reports["clusters"])
    shutil.rmtree(f"{root}/sql")
    report = check("--root", root)
    for cluster, backing in ((small, "base"), (huge, "huge")):
        found = report.cluster(cluster.directory)
        assert value(found["segment"]["backing"]) == backing
        assert value(found["settings"]["shared_buffers"]) == 16 << 20
        assert "SQL" in found["server"]["version"]["unknown"]
    ids = {c.directory for c in reports["clusters"]}
    live, captured = statuses(reports["live"], ids), statuses(report, ids)
    for key, before in live.items():
        assert captured[key] in (before, "unknown") or (before, captured[key]) == ("not-applicable", "pass"), key
