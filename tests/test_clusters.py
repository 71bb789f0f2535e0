"""Clusters: which processes are servers and what they say, data directories that do not run, and what hides others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pgpreemptcheck import run
from pgpreemptcheck.captured import DirectoryHost
from pgpreemptcheck.facts import clusters
from pgpreemptcheck.facts.clusters import Found, Postmaster
from pgpreemptcheck.facts.datadirs import given_in_vain
from pgpreemptcheck.host import ContainerHost, LiveHost
from pgpreemptcheck.values import Known, Unknown
from tests import servers
from tests.fakehost import FakeHost

DATA = "/srv/pg/data"
LOCK = "{pid}\n/srv/pg/data\n1790000000\n5433\n/run/postgresql\nlocalhost\n  5433001         3\nready   \n"
NAMES = "4026531836"


def plain(fact: Any) -> Any:
    return fact.value if isinstance(fact, Known) else None


def process(pid: int, argv: list[str], *, cwd: str | int | None = DATA, **files: Any) -> dict[str, Any]:
    """Return the files of one process on a live host; `cwd` may be an errno."""
    base = f"/proc/{pid}"
    status = f"Name:\tx\nState:\tS (sleeping)\nPPid:\t1\nUid:\t101\t101\t101\t101\nNSpid:\t{pid}\n"
    made: dict[str, Any] = {
        f"{base}/cmdline": "\0".join(argv) + "\0",
        f"{base}/status": status,
        f"{base}/exe": ("->", argv[0]),
        **{f"{base}/{name}": content for name, content in files.items()},
    }
    if cwd is not None:
        made[f"{base}/cwd"] = ("->", cwd) if isinstance(cwd, str) else cwd
    if isinstance(cwd, str) and f"{cwd}/postmaster.pid" in files:
        made[f"{cwd}/postmaster.pid"] = made.pop(f"{base}/{cwd}/postmaster.pid")
    return made


class Host(FakeHost):
    """A live host of dict entries, on which /proc/PID/cwd can be gone through."""

    def _entry(self, path: str) -> Any:
        parts = path.split("/")
        if len(parts) > 4 and parts[3] == "cwd" and path not in self.files:
            link = self.files.get("/".join(parts[:4]))
            if isinstance(link, tuple):
                return super()._entry("/".join([link[1], *parts[4:]]))
        return super()._entry(path)


def host(*parts: dict[str, Any], live: bool = True, owners: dict[str, int] | None = None) -> FakeHost:
    """Return a host on which all belongs to the user that the processes run as, but for what `owners` says."""
    files = {"/proc/1/cmdline": "/sbin/init\0", "/proc/1/status": "State:\tS\nPPid:\t0\n", "/proc/2/cmdline": ""}
    files["/proc/self/ns/pid"] = ("->", f"pid:[{NAMES}]")  # type: ignore[assignment]
    for part in parts:
        files.update(part)
    return Host(files, live=live, uid=101, owners=owners)


def lock(pid: int) -> dict[str, Any]:
    return {f"{DATA}/postmaster.pid": LOCK.format(pid=pid)}


def only(found: Found) -> Postmaster:
    assert len(found.running) == 1, found
    return found.running[0]


# which processes are servers ---------------------------------------------------------------------

SERVER = "/usr/lib/postgresql/15/bin/postgres"


@pytest.mark.parametrize(
    "argv",
    [
        [SERVER, "-D", DATA],
        [SERVER, f"-D{DATA}"],
        ["postgres", "-c", f"config_file={DATA}/postgresql.conf"],
        ["postgres", f"--config-file={DATA}/postgresql.conf"],
        ["/usr/bin/postmaster", "-D", DATA, "-p", "5433"],
        ["/usr/edb/as15/bin/edb-postgres", "-D", DATA],
        ["/usr/pgsql-9.6/bin/postmaster", "-D", DATA],
        ["/nix/store/x/bin/.postgres-wrapped", "-D", DATA],
        ["/lib64/ld-linux-x86-64.so.2", SERVER, "-D", DATA],
        ["/lib/ld-musl-aarch64.so.1", "--library-path", "/x", SERVER, "-D", DATA],
    ],
)
def test_a_server_start_is_known_by_its_command_line(argv: list[str]) -> None:
    """As another user sees it: neither working directory nor environment nor program can be read."""
    for cwd in (errno.EACCES, DATA):
        more = {"exe": errno.EACCES, "environ": errno.EACCES} if cwd == errno.EACCES else {}
        found = clusters.find(host(process(40, argv, cwd=cwd, **more)))
        assert only(found).pid == 40
        assert "ld-" not in only(found).argv[0]


@pytest.mark.parametrize(
    "argv",
    [
        ["postgres: 15/main: checkpointer "],
        ["postgres: walwriter"],
        ["edb-postgres: logger "],
        [SERVER, "--single", "-D", DATA, "postgres"],
        [SERVER, "--boot", "-D", DATA],
        [SERVER, "--check", "-D", DATA],
        [SERVER, "--describe-config"],
        [SERVER, "-D", DATA, "-C", "shared_buffers"],
        [SERVER, "-C", "data_directory", "-D", DATA],
        [SERVER, f"-D{DATA}", "-Cshared_buffers"],
        [SERVER, "-V"],
        [SERVER, "--version"],
        ["/usr/bin/psql", "-h", "/run/postgresql", "postgres"],
        ["postgres_exporter", "-D", DATA],
        ["/usr/bin/pgbouncer", "-d", "/etc/pgbouncer/pgbouncer.ini"],
        ["sudo", "-u", "postgres", SERVER, "-D", DATA],
        ["pg_ctl", "start", "-D", DATA],
        ["sh", "-c", f"exec {SERVER} -D {DATA}"],
        ["java", "-Dpostgres=1", "-D", DATA],
        ["postgres"],
        ["postgres", "-h", "db1"],
    ],
)
def test_other_processes_are_none(argv: list[str]) -> None:
    assert clusters.find(host(process(40, argv, environ="HOME=/x\0"))).running == ()
    assert clusters.find(host(process(40, argv, cwd="/", exe=errno.EACCES))).running == ()


def test_a_client_that_calls_itself_postgres_is_known_by_its_program() -> None:
    client = process(40, ["postgres", "-D", "x"], exe=("->", "/usr/bin/psql"))
    assert clusters.find(host(client)).running == ()


@pytest.mark.parametrize("argv", [["/opt/wrap/mydb", "-D", DATA], ["qemu-aarch64", "/x/postgres", "-D", DATA]])
def test_a_wrapped_server_is_known_by_the_lock_file_in_its_working_directory(argv: list[str]) -> None:
    assert only(clusters.find(host(process(40, argv), lock(40)))).data_directory == Known(DATA, "/proc/40/cwd")
    assert clusters.find(host(process(40, argv), lock(41))).running == ()


def test_inside_of_a_pid_namespace_the_lock_file_has_the_inner_number() -> None:
    status = "State:\tS\nPPid:\t39\nUid:\t999\t999\t999\t999\nNSpid:\t40\t1\n"
    found = clusters.find(host(process(40, ["wrap", "-D", DATA], status=status), lock(1)))
    assert plain(only(found).port) == 5433


def test_a_child_that_has_not_renamed_itself_is_no_server() -> None:
    child = "State:\tR\nPPid:\t40\nUid:\t101\t101\t101\t101\nNSpid:\t41\n"
    argv = [SERVER, "-D", DATA]
    for cwd in (DATA, errno.EACCES):
        both = host(process(40, argv, cwd=cwd), process(41, argv, cwd=cwd, status=child), lock(40))
        assert only(clusters.find(both)).pid == 40


def test_a_server_below_another_server_s_process_is_its_own_cluster() -> None:
    child = "State:\tS\nPPid:\t40\nUid:\t101\t101\t101\t101\nNSpid:\t41\n"
    both = host(
        process(40, [SERVER, "-D", DATA]),
        process(41, [SERVER, "-D", "/srv/other"], cwd="/srv/other", status=child),
        lock(40),
    )
    assert [p.pid for p in clusters.find(both).running] == [40, 41]


def test_pgdata_of_the_environment_is_the_shape_of_a_start() -> None:
    found = clusters.find(host(process(40, ["postgres"], environ=f"PGDATA={DATA}\0PGPORT=5555\0")))
    assert plain(only(found).config_file) == f"{DATA}/postgresql.conf"
    assert only(found).port == Known(5555, "/proc/40/environ (PGPORT)", "inferred")
    assert only(found).data_directory == Known(DATA, "/proc/40/environ (PGDATA)", "inferred")


def test_where_nothing_else_can_be_read_its_children_show_a_server() -> None:
    secret = {"exe": errno.EACCES, "environ": errno.EACCES}
    child = "State:\tS\nPPid:\t40\n"
    lone = process(40, ["postgres"], cwd=errno.EACCES, **secret)
    assert clusters.find(host(lone)).running == ()
    postmaster = only(clusters.find(host(lone, process(41, ["postgres: checkpointer "], status=child))))
    for fact in (postmaster.data_directory, postmaster.config_file, postmaster.port):
        assert isinstance(fact, Unknown) and fact.reason and fact.hint == "run as root or as the owner of the cluster"


@pytest.mark.parametrize("state", ["Z (zombie)", "X (dead)"])
def test_the_dead_vanish_quietly(state: str) -> None:
    dead = process(40, [SERVER, "-D", DATA], status=f"State:\t{state}\nPPid:\t1\n")
    assert clusters.find(host(dead)) == Found((), (), None)
    gone = {"/proc/41/cmdline": errno.ESRCH, "/proc/42/cmdline": f"{SERVER}\0-D\0{DATA}\0"}  # no status any more
    assert clusters.find(host(gone)) == Found((), (), None)


# who may say so ----------------------------------------------------------------------------------


def of(uid: int, pid: int) -> str:
    return f"State:\tS\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\n"


PGDATA = {f"{DATA}/PG_VERSION": "15\n", f"{DATA}/postgresql.conf": ""}
ELSE = "/srv/mine"


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        ([SERVER, "-D", DATA], {}),
        ([SERVER, "-D", "/link"], {"/link": ("->", DATA)}),
        ([SERVER, "-c", f"data_directory={DATA}"], {}),
        (["postgres"], {"/proc/30/environ": f"PGDATA={DATA}\0"}),
        (["postgres", "-D", "x"], {"/proc/30/cwd": ("->", DATA), f"{DATA}/postmaster.pid": LOCK.format(pid=30)}),
        ([SERVER, "-D", "/c"], {"/c/postmaster.pid": LOCK.format(pid=30)}),  # whose line 2 names the directory
        ([SERVER, "-D", ELSE, "-c", f"config_file={DATA}/postgresql.conf"], {f"{ELSE}/PG_VERSION": "15\n"}),
        ([SERVER, "-D", "/nowhere", "-c", f"config_file={DATA}/postgresql.conf"], {}),
    ],
)
def test_another_user_s_process_takes_no_cluster_s_place(argv: list[str], more: dict[str, Any]) -> None:
    """A server refuses to run on a data directory that its user does not own (miscinit.c checkDataDir)."""
    other = {f"/proc/30/{name}": content for name, content in {"status": of(1000, 30), "cwd": errno.EACCES}.items()}
    seen = host(PGDATA, process(30, argv), other, more, owners={ELSE: 1000})
    found = clusters.find(seen, [DATA])
    (cluster,) = found.stopped
    assert (cluster.data_directory, plain(cluster.uid)) == (DATA, 101)
    assert DATA not in [plain(p.data_directory) for p in found.running]


def test_a_data_directory_of_another_user_is_not_believed_and_both_are_named() -> None:
    seen = host(PGDATA, process(30, [SERVER, "-D", DATA, "-p", "5433"], cwd=errno.EACCES, status=of(1000, 30)))
    pretender = only(clusters.find(seen))
    for fact in (pretender.data_directory, pretender.config_file, pretender.port, pretender.socket_directories):
        assert isinstance(fact, Unknown) and fact == pretender.disbelieved
        assert "uid 1000" in fact.reason and "uid 101" in fact.reason and "PID 30" in fact.hint
    mixed = "State:\tS\nPPid:\t1\nUid:\t1000\t101\t101\t101\nNSpid:\t30\n"  # a setuid program
    seen = host(PGDATA, process(30, [SERVER, "-D", DATA], cwd=errno.EACCES, status=mixed))
    assert only(clusters.find(seen)).disbelieved is not None and len(clusters.find(seen, [DATA]).stopped) == 1


def test_a_genuine_server_keeps_its_place_beside_another_user_s_process() -> None:
    fake = process(30, [SERVER, "-D", DATA], cwd=errno.EACCES, status=of(1000, 30))
    found = clusters.find(host(PGDATA, fake, process(40, [SERVER, "-D", DATA]), lock(40), listens()), [DATA])
    assert [(p.pid, plain(p.data_directory)) for p in found.running] == [(30, None), (40, DATA)]
    assert (found.stopped, found.concealed) == ((), None)


def test_another_user_s_process_explains_no_socket() -> None:
    fake = process(30, [SERVER, "-D", DATA, "-p", "5433"], cwd=errno.EACCES, status=of(1000, 30))
    concealed = clusters.find(host(PGDATA, fake, listens())).concealed
    assert concealed is not None and ".s.PGSQL.5433" in concealed.reason


def test_the_lock_file_says_which_of_two_servers_of_one_user_it_is() -> None:
    for pretended in (DATA, "/link"):
        second = process(30, [SERVER, "-D", pretended], cwd="/")
        seen = host(PGDATA, second, process(40, [SERVER, "-D", DATA]), lock(40), {"/link": ("->", DATA)})
        assert only(clusters.find(seen)).pid == 40


def test_a_server_may_have_a_configuration_directory_of_another_user() -> None:
    """Which its -D names, where the working directory is out of sight: a data directory it is not."""
    conf = {"/c/postgresql.conf": f"data_directory = '{DATA}'\n", **PGDATA}
    seen = host(conf, process(40, [SERVER, "-D", "/c"], cwd=errno.EACCES), owners={"/c": 0})
    found = clusters.find(seen, ["/c"])
    assert only(found).disbelieved is None and plain(only(found).config_file) == "/c/postgresql.conf"
    assert found.stopped == ()


def test_a_directory_whose_owner_cannot_be_read_is_believed() -> None:
    seen = host(process(40, [SERVER, "-D", DATA], cwd=errno.EACCES), {DATA: errno.EACCES})
    assert plain(only(clusters.find(seen)).data_directory) == DATA


def test_the_owner_of_a_captured_directory_is_who_captured_it() -> None:
    captured = process(40, [SERVER, "-D", DATA], **{"cwd.txt": DATA})
    seen = host(PGDATA, captured, live=False, owners={"/": 0, "/srv": 0})
    found = clusters.find(seen, [DATA])
    assert plain(only(found).data_directory) == DATA and found.stopped == ()


def test_another_user_s_configuration_takes_no_cluster_s_place() -> None:
    ours, theirs = "/etc/postgresql/15/main", "/etc/postgresql/15/a"
    files = {f"{place}/postgresql.conf": f"data_directory = '{DATA}'\n" for place in (ours, theirs)}
    (cluster,) = clusters.find(host(files, PGDATA, owners={theirs: 1000})).stopped
    assert plain(cluster.config_file) == f"{ours}/postgresql.conf" and plain(cluster.uid) == 101


# what a server says ------------------------------------------------------------------------------


def test_everything_of_a_debian_server() -> None:
    conf = "/etc/postgresql/15/main/postgresql.conf"
    cgroup = "0::/system.slice/system-postgresql.slice/postgresql@15-main.service\n"
    argv = [SERVER, "-D", DATA, "-c", f"config_file={conf}"]
    seen = host(
        process(40, argv, cgroup=cgroup),
        lock(40),
        {
            conf: f"data_directory = '{DATA}'\n",
            "/etc/postgresql/15/main/start.conf": "# auto\n\nauto\n",
            "/etc/systemd/system/multi-user.target.wants/postgresql.service": "",
            f"{DATA}/PG_VERSION": "15\n",
        },
    )
    found = clusters.find(seen)
    postmaster = only(found)
    assert found.stopped == () and found.concealed is None
    assert postmaster.argv == tuple(argv) and plain(postmaster.uid) == 101
    assert plain(postmaster.data_directory) == DATA and plain(postmaster.config_file) == conf
    assert postmaster.port == Known(5433, "/srv/pg/data/postmaster.pid line 4".replace("/srv/pg/data", "/proc/40/cwd"))
    assert plain(postmaster.socket_directories) == ("/run/postgresql",)
    assert plain(postmaster.started) == 1790000000
    assert (postmaster.root, postmaster.container, postmaster.fork) == (None, None, None)
    assert clusters.major(seen, seen, postmaster) == Known(15, f"{DATA}/PG_VERSION")
    assert plain(clusters.starts_at_boot(seen, seen, postmaster)) is True


@pytest.mark.parametrize(
    ("options", "port", "sockets"),
    [
        (["-p", "6000", "-k", "/a, /b"], 6000, ("/a", "/b")),
        (["-p6000", "-k/a"], 6000, ("/a",)),
        (["-ip", "6000"], 6000, None),
        (["-c", "port=6000", "-c", 'unix_socket_directories="/a b"'], 6000, ("/a b",)),
        (["--port=6000", "--unix-socket-directories="], 6000, ()),
        (["-p", "6000", "-c", "PORT=6001"], 6001, None),
        (["-c", "port=6001", "-p", "6000"], 6000, None),
        (["-B", "-p", "-p", "6000"], 6000, None),
        (["-p", "x"], None, None),
        (["-p"], None, None),
    ],
)
def test_port_and_sockets_of_the_command_line(options: list[str], port: int | None, sockets: Any) -> None:
    postmaster = only(clusters.find(host(process(40, [SERVER, "-D", DATA, *options], environ=""))))
    assert plain(postmaster.port) == port
    assert plain(postmaster.socket_directories) == sockets


@pytest.mark.parametrize(
    ("options", "cwd", "data", "config"),
    [
        (["-D", "data"], DATA, DATA, f"{DATA}/postgresql.conf"),
        (["-D", "../pg/data/"], DATA, DATA, f"{DATA}/postgresql.conf"),
        (["-D", "./data"], DATA, DATA, f"{DATA}/postgresql.conf"),
        (["-D", "conf"], DATA, DATA, None),
        (["-D", "/srv//pg/./data/"], DATA, DATA, f"{DATA}/postgresql.conf"),
        (["-D", "/etc/pg", "-c", f"data_directory={DATA}"], DATA, DATA, "/etc/pg/postgresql.conf"),
        (["-D", "/etc/pg", f"--data-directory={DATA}/"], errno.EACCES, DATA, "/etc/pg/postgresql.conf"),
        (["-D", "/etc/pg"], DATA, DATA, "/etc/pg/postgresql.conf"),
        (["-D", DATA, "-c", "config_file=/etc/x.conf"], errno.EACCES, DATA, "/etc/x.conf"),
        (["-D", "data"], errno.EACCES, None, None),
        (["-D", "/a", "-D", DATA], DATA, DATA, f"{DATA}/postgresql.conf"),
    ],
)
def test_directories(options: list[str], cwd: Any, data: str | None, config: str | None) -> None:
    postmaster = only(clusters.find(host(process(40, [SERVER, *options], cwd=cwd), lock(40))))
    assert plain(postmaster.data_directory) == data
    assert plain(postmaster.config_file) == config


@pytest.mark.parametrize(
    ("argv0", "exe", "fork"),
    [
        (SERVER, SERVER, None),
        (SERVER, f"{SERVER} (deleted)", None),
        ("postgres", "/usr/edb/as15/bin/edb-postgres", "edb-postgres"),
        ("/usr/edb/as15/bin/edb-postgres", "/usr/edb/as15/bin/edb-postgres", "edb-postgres"),
        ("/usr/local/gauss/bin/gaussdb", "/usr/local/gauss/bin/gaussdb", "gaussdb"),
    ],
)
def test_forks(argv0: str, exe: str, fork: str | None) -> None:
    found = clusters.find(host(process(40, [argv0, "-D", DATA], exe=("->", exe)), lock(40)))
    assert only(found).fork == fork


@pytest.mark.parametrize(
    ("exe", "expected"),
    [
        ("/usr/lib/postgresql/15/bin/postgres", 15),
        ("/usr/pgsql-16/bin/postgres", 16),
        ("/usr/pgsql-9.6/bin/postmaster", 9),
        ("/usr/edb/as15/bin/edb-postgres", 15),
        ("/opt/pg-17.4/bin/postgres", 17),
        ("/usr/bin/postgres", None),
        ("/usr/lib/x86/12/postgres", None),
    ],
)
def test_without_pg_version_the_program_s_path_suggests_the_major(exe: str, expected: int | None) -> None:
    seen = host(process(40, [exe, "-D", DATA]), {f"{DATA}/PG_VERSION": errno.EACCES})
    found = clusters.major(seen, seen, only(clusters.find(seen)))
    assert plain(found) == expected
    assert isinstance(found, Unknown) or found.certainty == "inferred"


@pytest.mark.parametrize(("text", "value"), [("15\n", "15"), ("9.6\n", "9.6"), ("", None), ("x", None), ("1²\n", None)])
def test_version(text: str, value: str | None) -> None:
    assert plain(clusters.version(FakeHost({"/d/PG_VERSION": text}), "/d")) == value


ID = "0123456789ab" + "c" * 52
UID = "pod1234abcd-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"/system.slice/docker-{ID}.scope", "docker-0123456789ab"),
        (f"/docker/{ID}", "docker-0123456789ab"),
        (f"/kubepods/burstable/{UID}/{ID}", "kubepods-0123456789ab"),
        (f"/kubepods.slice/kubepods-{UID}.slice/cri-containerd-{ID}.scope", "cri-containerd-0123456789ab"),
        (f"/kubepods.slice/kubepods-{UID}.slice/crio-{ID}.scope/container", "crio-0123456789ab"),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", "libpod-0123456789ab"),
        (f"/machine.slice/libpod-{ID}.scope/container", "libpod-0123456789ab"),
        ("/lxc.payload.db1/system.slice/postgresql.service", "lxc-db1"),
        ("/lxc/db1", "lxc-db1"),
        ("/machine.slice/machine-db\\x2d1.scope/payload/system.slice", "machine-db-1"),
        ("/machine.slice/systemd-nspawn@db1.service/payload", "machine-db1"),
        ("/system.slice/postgresql-15.service", None),
        ("/user.slice/user-1000.slice/session-3.scope", "another mount namespace"),
        ("/", "another mount namespace"),
    ],
)
def test_another_mount_namespace_is_a_container_or_a_service_with_mounts_of_its_own(path: str, name: Any) -> None:
    spaces = {
        "/proc/self/ns/mnt": ("->", "mnt:[1]"),
        "/proc/40/ns/mnt": ("->", "mnt:[2]"),
        "/proc/40/root": ("->", "/"),
    }
    server = process(40, [SERVER, "-D", DATA], cgroup=f"0::{path}\n")
    found = clusters.find(host(server, {"/proc/40/cwd/postmaster.pid": LOCK.format(pid=40)}, spaces))
    assert (only(found).root, only(found).container) == ("/proc/40/root", name)
    spaces["/proc/40/ns/mnt"] = ("->", "mnt:[1]")
    found = clusters.find(host(process(40, [SERVER, "-D", DATA], cgroup=f"0::{path}\n"), lock(40), spaces))
    assert (only(found).root, only(found).container) == (None, None)


APART_MOUNTS = {
    "/proc/self/ns/mnt": ("->", "mnt:[1]"),
    "/proc/40/ns/mnt": ("->", "mnt:[2]"),
    "/proc/40/root": ("->", "/"),
}
INSIDE = "/in\x20side"


def inside(mountinfo: str) -> dict[str, Any]:
    """Return a server with mounts of its own; what its working directory leads to is its own, too."""
    files = process(40, [SERVER, "-D", INSIDE], cwd=INSIDE, cgroup="0::/\n", mountinfo=mountinfo)
    return {**files, **APART_MOUNTS, "/proc/40/cwd/postmaster.pid": LOCK.format(pid=40)}


def test_a_server_with_mounts_of_its_own_has_a_name_that_lasts() -> None:
    """The name must not have the PID in it: an id that a restart changes finds nothing again."""
    mountinfo = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "90 22 254:0 /vol/a /in\\040side rw,relatime - ext4 /dev/vda rw\n"
        "91 22 254:0 /vol/b /in\\040side/pg_wal rw,relatime - ext4 /dev/vda rw\n"
    )
    assert only(clusters.find(host(inside(mountinfo)))).container == "a mount of /vol/a"
    twice = mountinfo + "92 22 254:0 /vol/c /in\\040side rw,relatime - ext4 /dev/vda rw\n"
    assert only(clusters.find(host(inside(twice)))).container == "a mount of /vol/c"
    whole = mountinfo.partition("\n")[0]
    for text in (whole, "", "junk\n1 2 3\n"):
        assert only(clusters.find(host(inside(text)))).container == "another mount namespace"
        same = {f"{INSIDE}/postmaster.pid": LOCK.format(pid=40)}  # the very directory that this host has there
        assert only(clusters.find(host(inside(text), same))).container is None


def test_a_server_with_mounts_of_its_own_is_not_listed_again_as_stopped() -> None:
    here = {f"{DATA}/PG_VERSION": "15\n", f"{DATA}/postgresql.conf": "", f"{DATA}/postmaster.pid": LOCK.format(pid=40)}
    seen = host(inside("90 22 254:0 /srv/pg/data /in\\040side rw - ext4 /dev/vda rw\n"), here)
    found = clusters.find(seen, [DATA])
    assert only(found).pid == 40 and found.stopped == ()
    for other in ({f"{DATA}/postmaster.pid": LOCK.format(pid=41)}, {f"{DATA}/postmaster.pid": errno.ENOENT}):
        assert len(clusters.find(host(inside(""), {**here, **other}), [DATA]).stopped) == 1
    theirs = clusters.find(host(inside(""), here, owners={DATA: 1000}), [DATA])
    assert len(theirs.stopped) == 1  # it may have copied the lock file of another user's cluster


def test_a_path_on_the_command_line_of_a_server_with_mounts_of_its_own_is_none_of_this_host() -> None:
    files = process(40, [SERVER, "-D", DATA], cwd=errno.EACCES, cgroup="0::/\n")
    found = clusters.find(host(files, APART_MOUNTS, lock(40), PGDATA), [DATA])
    assert only(found).lock == () and len(found.stopped) == 1


def test_a_changed_root_is_left_out_of_the_data_directory() -> None:
    argv = [SERVER, "-D", "/data"]
    files = {"/jail/data/postmaster.pid": LOCK.format(pid=40), "/proc/40/root": ("->", "/jail")}
    postmaster = only(clusters.find(host(process(40, argv, cwd="/jail/data"), files)))
    assert (plain(postmaster.data_directory), postmaster.root) == ("/data", "/proc/40/root")


# captures ----------------------------------------------------------------------------------------


def capture(tmp_path: Path, files: dict[str, str]) -> DirectoryHost:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return DirectoryHost(str(tmp_path))


def test_a_captured_server(tmp_path: Path) -> None:
    seen = capture(
        tmp_path,
        {
            "proc/40/cmdline": "/lib64/ld-linux-x86-64.so.2\0postgres\0-D\0/d\0-p\0005444\0",
            "proc/40/status": "Name:\tld-linux\nPPid:\t1\nUid:\t26\t26\t26\t26\n",
            "proc/40/cwd.txt": "/d\n",
            "proc/40/exe.txt": "/lib64/ld-linux-x86-64.so.2\n",
            "proc/40/cgroup": f"0::/system.slice/docker-{ID}.scope\n",
            "proc/40/stat": "40 (a b) c) S " + " ".join(["0"] * 18) + " 250 0\n",
            "proc/stat": "cpu 1 2\nbtime 1790000000\n",
            "d/PG_VERSION": "14\n",
        },
    )
    postmaster = only(clusters.find(seen))
    assert plain(postmaster.data_directory) == "/d" and plain(postmaster.port) == 5444
    assert plain(postmaster.uid) == 26 and plain(postmaster.started) == 1790000002.5
    assert postmaster.container == "docker-0123456789ab" and postmaster.root is None
    assert plain(clusters.major(seen, seen, postmaster)) == 14


def test_a_captured_command_line_pasted_with_spaces(tmp_path: Path) -> None:
    seen = capture(tmp_path, {"proc/40/cmdline": f"{SERVER} -D /d -c port=6000\n", "proc/40/cwd.txt": "/d"})
    assert plain(only(clusters.find(seen)).port) == 6000


def test_a_capture_without_processes_does_not_say_that_none_ran(tmp_path: Path) -> None:
    seen = capture(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"})
    concealed = clusters.find(seen).concealed
    assert concealed is not None and "no processes" in concealed.reason
    seen = capture(tmp_path, {"proc/net/unix": "Num       RefCount Protocol Flags    Type St Inode Path\n"})
    assert clusters.find(seen) == Found((), (), None)
    seen = capture(tmp_path, {"d/PG_VERSION": "15\n", "d/postmaster.pid": "40\n"})
    found = clusters.find(seen, ["/d"])
    assert found.concealed is not None and "/d/postmaster.pid" in found.concealed.reason


WHOLE = {  # of a server's process, all that tells what it is
    "cmdline": f"{SERVER}\0-D\0/d\0-c\0max_connections=7\0",
    "comm": "postgres\n",
    "exe.txt": f"{SERVER}\n",
    "status": "Name:\tpostgres\nState:\tS (sleeping)\nPPid:\t1\nUid:\t26\t26\t26\t26\n",
    "maps": f"55d0c0a00000-55d0c1200000 r-xp 000c4000 08:01 1311 {SERVER}\n",
}
ONE_MARK = ("comm", "exe.txt", "status", "maps")
BROKEN = ["", "\0\0", "\x7fELF\x02\x01\0\x80", "/usr/lib/postgresql/15/bin/postg", "\x1b[31m\0-D", None]


@pytest.mark.parametrize("mark", ONE_MARK)
@pytest.mark.parametrize("cmdline", BROKEN)
def test_a_captured_server_whose_command_line_is_spoilt_is_known_by_any_other_mark(
    tmp_path: Path, mark: str, cmdline: str | None
) -> None:
    files = {mark: WHOLE[mark], "cwd.txt": "/d\n", **({"cmdline": cmdline} if cmdline is not None else {})}
    seen = capture(tmp_path, {f"proc/40/{name}": text for name, text in files.items()})
    postmaster = only(clusters.find(seen))
    assert plain(postmaster.data_directory) == "/d" and postmaster.fork is None
    for fact in (postmaster.options, postmaster.config_file, postmaster.port):  # it may set all of these
        assert isinstance(fact, Unknown) and fact.reason


@pytest.mark.parametrize("cmdline", BROKEN)
def test_a_captured_server_is_known_by_the_lock_file_in_its_working_directory(
    tmp_path: Path, cmdline: str | None
) -> None:
    files = {"proc/40/cwd.txt": "/d", "d/postmaster.pid": "40\n/d\n1790000000\n5433\n/run\n"}
    seen = capture(tmp_path, files if cmdline is None else {**files, "proc/40/cmdline": cmdline})
    postmaster = only(clusters.find(seen))
    assert (plain(postmaster.port), bool(postmaster.lock), postmaster.fork) == (5433, True, None)


def test_the_children_of_a_captured_server_are_none_whatever_is_left_of_them(tmp_path: Path) -> None:
    parent = {f"proc/40/{name}": text for name, text in WHOLE.items()}
    child = {"proc/41/comm": "postgres\n", "proc/41/status": "Name:\tpostgres\nPPid:\t40\n", "proc/41/cmdline": ""}
    pasted = {"proc/42/cmdline": "postgres: 15/main: checkpointer \n", "proc/42/comm": "postgres\n"}
    where = {f"proc/{pid}/cwd.txt": "/d\n" for pid in (40, 41, 42)}
    assert only(clusters.find(capture(tmp_path, {**parent, **child, **pasted, **where}))).pid == 40


def test_a_captured_process_that_nothing_names_may_be_a_server(tmp_path: Path) -> None:
    init = {"proc/1/cmdline": "/sbin/init\0", "proc/2/cmdline": ""}  # a kernel thread has no command line
    assert clusters.find(capture(tmp_path / "a", init)) == Found((), (), None)
    for left in ({"proc/40/cmdline": "\x01\x02"}, {"proc/40/cmdline": "", "proc/40/limits": ""}):
        concealed = clusters.find(capture(tmp_path / str(len(left)), {**init, **left})).concealed
        assert concealed is not None and "PID 40" in concealed.reason
    named = {"proc/40/cmdline": "\x01\x02", "proc/40/comm": "chronyd\n"}
    assert clusters.find(capture(tmp_path / "b", {**init, **named})).concealed is None


def test_answers_over_sql_without_a_process_tell_of_a_server(tmp_path: Path) -> None:
    files = {"proc/1/cmdline": "/sbin/init\0", "sql/5433.json": "{}"}
    concealed = clusters.find(capture(tmp_path / "a", files)).concealed
    assert concealed is not None and "/sql/5433.json" in concealed.reason
    server = {f"proc/40/{name}": text for name, text in WHOLE.items()}
    unplaced = clusters.find(capture(tmp_path / "b", {**files, **server}))  # its port is in a file
    assert only(unplaced).pid == 40 and unplaced.concealed is None
    placed = {**server, "proc/40/cmdline": f"{SERVER}\0-D\0/d\0-p\0005434\0"}
    concealed = clusters.find(capture(tmp_path / "c", {**files, **placed})).concealed
    assert concealed is not None and "/sql/5433.json" in concealed.reason


# Printed by procps 4.0.2; sos calls ps so (report/plugins/process.py).
START = "/usr/bin/postgres -D /d -c port=5433"
LONG = f"/usr/bin/java {'-Xmx1g ' * 9}\n"  # what is longest may have been cut off, without `ww`
PS = {
    "ps_auxwwwm": (
        "USER         PID %CPU %MEM    VSZ   RSS TTY      STAT START   TIME COMMAND\n"
        "root           1  0.4  0.0  41872 12920 ?        -    01:03   1:01 /sbin/init\n"
        "root           -  0.4    -      -     - -        SLl  01:03   1:01 -\n"
        f"postgres     812  0.0  0.1 218360 29184 ?        -    Nov30   0:02 {START}\n"
        "postgres       -  0.0    -      -     - -        Ss   Nov30   0:02 -\n"
        "postgres     814  0.0  0.0 218476  9472 ?        -    Nov30   0:00 postgres: checkpointer\n"
    ),
    "ps_alxwww": (
        "F   UID     PID    PPID PRI  NI    VSZ   RSS WCHAN  STAT TTY        TIME COMMAND\n"
        "1     0       2       0  20   0      0     0 kthrea S    ?          0:00 [kthreadd]\n"
        f"4    26     812       1  20   0 218360 29184 ep_pol Ss   ?          0:02 {START}\n"
        "1    26     814     812  20   0 218476  9472 ep_pol Ss   ?          0:00 postgres: checkpointer\n"
    ),
    "ps_-elfL": (
        "F S UID        PID  PPID   LWP  C NLWP PRI  NI ADDR SZ WCHAN  STIME TTY          TIME CMD\n"
        f"4 S root         9     1     9  0   13  80   0 - 10468 -      01:03 ?        00:01:01 {LONG}"
        f"4 S 26         812     1   812  0    1  80   0 - 54590 ep_pol Nov30 ?        00:00:02 {START}\n"
        "1 S 26         814   812   814  0    1  80   0 - 54619 ep_pol Nov30 ?        00:00:00 postgres: checkpointer\n"
    ),
    "ps_axo_flags_state_uid_pid_ppid_pgid_sid_cls_pri_addr_sz_wchan_20_lstart_tty_time_cmd": (
        "F S   UID   PID  PPID  PGID   SID CLS PRI ADDR    SZ WCHAN   STARTED TT   TIME CMD\n"
        f"4 S    26   812     1   812   812  TS  19    - 54590 ep_poll Mon Nov 30 01:03:10 2026 ?  00:00:02 {START}\n"
        f"4 S     0     9     1     9     9  TS  19    - 54590 ep_poll Mon Nov 30 01:03:10 2026 ?  00:00:02 {LONG}"
    ),
    "ps_auxfwww": (
        "USER         PID %CPU %MEM    VSZ   RSS TTY      STAT START   TIME COMMAND\n"
        "root         700  0.0  0.0      0     0 ?        Z    Nov30   0:00  \\_ [postgres] <defunct>\n"
        f"postgres     812  0.0  0.1 218360 29184 ?        Ss   Nov30   0:02  \\_ {START}\n"
        "postgres     814  0.0  0.0 218476  9472 ?        Ss   Nov30   0:00  |   \\_ postgres: checkpointer\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PS)
def test_a_server_that_only_ps_of_a_sosreport_shows(tmp_path: Path, name: str) -> None:
    passwd = {"etc/passwd": "postgres:x:26:26::/var/lib/pgsql:/bin/bash\n"}
    found = clusters.find(capture(tmp_path, {f"sos_commands/process/{name}": PS[name], **passwd}))
    postmaster = only(found)
    assert (postmaster.pid, plain(postmaster.data_directory), plain(postmaster.port)) == (812, "/d", 5433)
    assert plain(postmaster.uid) == 26 and postmaster.options is None
    assert isinstance(postmaster.data_directory, Known) and name in postmaster.data_directory.source
    assert found.concealed is None


def test_a_command_line_that_ps_cut_off_is_not_believed(tmp_path: Path) -> None:
    def at(width: int) -> dict[str, str]:
        lines = (line[:width] + "\n" for line in PS["ps_-elfL"].splitlines() if "checkpointer" not in line)
        return {"sos_commands/process/ps_-elfL": "".join(lines)}

    concealed = clusters.find(capture(tmp_path / "c", at(98))).concealed  # /usr/bin/pos
    assert concealed is not None and "PID 812" in concealed.reason
    cut = at(110)
    postmaster = only(clusters.find(capture(tmp_path / "a", cut)))
    for fact in (postmaster.data_directory, postmaster.config_file, postmaster.port, postmaster.options):
        assert isinstance(fact, Unknown) and "cut off" in fact.reason
    whole = {**cut, "sos_commands/process/ps_alxwww": PS["ps_alxwww"]}
    assert plain(only(clusters.find(capture(tmp_path / "b", whole))).data_directory) == "/d"


def test_ps_fills_in_the_command_line_that_a_sosreport_does_not_copy(tmp_path: Path) -> None:
    """sos 4.8 copies status, limits and some more of /proc/PID, not cmdline."""
    files = {"proc/812/status": WHOLE["status"], "proc/2/status": "Name:\tkthreadd\nPPid:\t0\n", "proc/2/limits": ""}
    found = clusters.find(capture(tmp_path / "a", {**files, "sos_commands/process/ps_auxwwwm": PS["ps_auxwwwm"]}))
    assert plain(only(found).port) == 5433 and plain(only(found).uid) == 26 and found.concealed is None
    found = clusters.find(capture(tmp_path / "b", files))  # ps failed
    assert only(found).pid == 812 and isinstance(only(found).options, Unknown)


def test_ps_shows_that_no_server_ran(tmp_path: Path) -> None:
    text = "".join(line for line in PS["ps_alxwww"].splitlines(True) if "postgres" not in line)
    assert clusters.find(capture(tmp_path / "a", {"sos_commands/process/ps_alxwww": text})) == Found((), (), None)
    bare = PS["ps_alxwww"].replace(" -D /d -c port=5433", "")  # PGDATA is in its environment: its child tells
    assert only(clusters.find(capture(tmp_path / "b", {"sos_commands/process/ps_alxwww": bare}))).pid == 812
    names = "PID TTY TIME CMD\n812 ? 00:00:02 postgres\n813 ? 00:00:00 a-longer-name\n"
    concealed = clusters.find(capture(tmp_path / "c", {"sos_commands/process/ps_-ef": names})).concealed
    assert concealed is not None and "PID 812 (postgres)" in concealed.reason


# what cannot be seen -----------------------------------------------------------------------------

UNIX = (
    "Num       RefCount Protocol Flags    Type St Inode Path\n"
    "0000000000000000: 00000002 00000000 {flags} 0001 01 {inode} {path}\n"
    "0000000000000000: 00000003 00000000 00000000 0001 03 23712\n"
)


def listens(path: str = "/run/postgresql/.s.PGSQL.5433", inode: int = 777, flags: str = "00010000") -> dict[str, Any]:
    return {"/proc/net/unix": UNIX.format(path=path, inode=inode, flags=flags)}


def test_a_socket_without_a_visible_server_conceals_one() -> None:
    for live in (True, False):
        found = clusters.find(host(listens(), live=live))
        assert found.running == () and found.concealed is not None
        assert "/run/postgresql/.s.PGSQL.5433" in found.concealed.reason and found.concealed.hint
    assert clusters.find(host(listens(flags="00000000"))).concealed is None  # connected, not listening
    assert clusters.find(host(listens("/run/.s.PGSQL.5433.lock"))).concealed is None


def test_a_visible_server_explains_its_own_socket_only() -> None:
    server = process(40, [SERVER, "-D", DATA])
    assert clusters.find(host(server, lock(40), listens())).concealed is None
    concealed = clusters.find(host(server, lock(40), listens("/tmp/.s.PGSQL.6543"))).concealed
    assert concealed is not None and "6543" in concealed.reason
    mute = process(40, [SERVER, "-D", DATA], cwd=errno.EACCES, environ=errno.EACCES)  # its port is not known
    secret = {f"{DATA}/postmaster.pid": errno.EACCES}
    assert clusters.find(host(mute, secret, listens("/tmp/.s.PGSQL.6543"))).concealed is None


def test_a_pooler_seen_to_hold_the_socket_conceals_nothing() -> None:
    pooler = process(50, ["/usr/sbin/pgbouncer", "x.ini"], cwd="/", **{"fd/7": ("->", "socket:[777]")})
    assert clusters.find(host(pooler, listens())) == Found((), (), None)
    other = process(50, ["/usr/sbin/pgbouncer", "x.ini"], cwd="/", **{"fd/7": ("->", "socket:[778]")})
    assert clusters.find(host(other, listens())).concealed is not None


def test_a_server_under_another_name_is_found_by_its_socket() -> None:
    renamed = process(50, ["/opt/mydb"])
    found = clusters.find(host(renamed, {"/proc/50/fd/7": ("->", "socket:[777]")}, lock(50), listens()))
    assert (only(found).pid, only(found).fork, found.concealed) == (50, "mydb", None)


@pytest.mark.parametrize("option", ["hidepid=2", "hidepid=invisible", "hidepid=1", "hidepid=ptraceable"])
def test_hidepid(option: str) -> None:
    mounts = {"/proc/self/mounts": f"proc /proc proc rw,relatime,{option} 0 0\n"}
    hidden = Host({**mounts, "/proc/99/cmdline": "x\0", "/proc/self/ns/pid": ("->", f"pid:[{NAMES}]")}, live=True)
    concealed = clusters.find(hidden).concealed
    assert concealed is not None and option in concealed.reason and concealed.kind == "permission"
    assert clusters.find(host(mounts)).concealed is None  # PID 1 is seen: it does not hold for this user
    refused = clusters.find(host(mounts, {"/proc/1/cmdline": errno.EACCES})).concealed
    assert refused is not None


def test_hidepid_off_and_other_mounts() -> None:
    for line in (
        "proc /proc proc rw,hidepid=0 0 0",
        "proc /mnt/proc proc rw,hidepid=2 0 0",
        "x /proc ext4 hidepid=2 0 0",
    ):
        seen = Host({"/proc/self/mounts": line, "/proc/99/cmdline": "x\0"}, live=True)
        assert clusters.find(seen).concealed is None


def test_a_pid_namespace_of_its_own() -> None:
    concealed = clusters.find(host({"/proc/self/ns/pid": ("->", "pid:[4026532201]")})).concealed
    assert concealed is not None and "PID namespace" in concealed.reason
    server = process(40, [SERVER, "-D", DATA])
    assert clusters.find(host(server, {"/proc/self/ns/pid": ("->", "pid:[4026532201]")})).concealed is None


def test_children_without_a_postmaster_conceal_one() -> None:
    """As nobody sees a server started by a wrapper: neither its working directory nor its lock file."""
    wrapped = process(40, ["/opt/wrap/mydb", "-D", DATA], cwd=errno.EACCES)
    child = process(41, ["postgres: checkpointer "], cwd=errno.EACCES)
    concealed = clusters.find(host(wrapped, child)).concealed
    assert concealed is not None and "PID 41" in concealed.reason


# clusters that may run out of sight --------------------------------------------------------------

APART = {"/proc/self/ns/pid": ("->", "pid:[4026532201]")}
HIDDEN = {"/proc/self/mounts": "proc /proc proc rw,hidepid=2 0 0\n", "/proc/1/cmdline": errno.EACCES}


@pytest.mark.parametrize("barrier", [APART, HIDDEN, {"/proc": errno.EACCES}])
def test_where_processes_are_out_of_sight_a_lock_file_is_not_one_left_behind(barrier: dict[str, Any]) -> None:
    for files in (lock(40), {f"{DATA}/postmaster.pid": errno.EACCES}):
        found = clusters.find(host(PGDATA, files, barrier), [DATA])
        (cluster,) = found.stopped
        assert cluster.unseen is not None and f"{DATA}/postmaster.pid" in cluster.unseen.reason
        assert found.concealed is not None
    (cluster,) = clusters.find(host(PGDATA, barrier), [DATA]).stopped
    assert cluster.unseen is None  # no lock file: it does not run, whatever can be seen
    (cluster,) = clusters.find(host(PGDATA, lock(40)), [DATA]).stopped
    assert cluster.unseen is None  # all processes are seen: a crash left it behind
    other = process(50, [SERVER, "-D", "/other"], cwd="/other")
    found = clusters.find(host(PGDATA, lock(40), barrier, other), [DATA])
    assert found.stopped[0].unseen is not None and found.concealed is not None


def test_a_captured_lock_file_whose_process_was_not_captured(tmp_path: Path) -> None:
    files = {"d/PG_VERSION": "15\n", "d/postgresql.conf": "", "d/postmaster.pid": LOCK.format(pid=40)}
    init = {"proc/1/cmdline": "/sbin/init\0"}
    for more in ({}, init):
        found = clusters.find(capture(tmp_path / str(len(more)), {**files, **more}), ["/d"])
        assert found.stopped[0].unseen is not None and found.concealed is not None
    left = {"sos_commands/process/ps_alxwww": PS["ps_alxwww"].replace(" -D /d", " -D /other")}
    found = clusters.find(capture(tmp_path / "ps", {**files, **left}), ["/d"])
    assert found.stopped[0].unseen is None  # ps lists every process, and none is 40
    (cluster,) = clusters.find(capture(tmp_path / "none", {"d/PG_VERSION": "15\n", **init}), ["/d"]).stopped
    assert cluster.unseen is None
    etc = {"etc/postgresql/15/main/postgresql.conf": ""}  # nothing of the data directory was captured
    (cluster,) = clusters.find(capture(tmp_path / "etc", etc)).stopped
    assert cluster.unseen is not None and "no processes" in cluster.unseen.reason


# clusters that do not run ------------------------------------------------------------------------

ETC = "/etc/postgresql/15/main"
WANTS = "/etc/systemd/system/multi-user.target.wants"


def debian(**more: str) -> dict[str, Any]:
    return {
        f"{ETC}/postgresql.conf": "#data_directory = '/x'\nData_Directory = '/srv/it''s'  # here\nport = 5432\n",
        "/srv/it's/PG_VERSION": "15\n",
        **{f"{ETC}/{name}": text for name, text in more.items()},
    }


def test_a_debian_cluster() -> None:
    options = {"pg_ctl.conf": "# options\npg_ctl_options = '-w -o \"-c work_mem=8MB -B 100\" -t 90'\n"}
    found = clusters.find(host(debian(**options)))
    (cluster,) = found.stopped
    assert cluster.data_directory == "/srv/it's" and plain(cluster.config_file) == f"{ETC}/postgresql.conf"
    assert cluster.where == "/etc/postgresql"
    assert cluster.argv == (
        *("postgres", "-D", "/srv/it's", "-c", f"config_file={ETC}/postgresql.conf"),
        *("-c", "work_mem=8MB", "-B", "100"),
    )
    assert plain(clusters.version(host(debian()), cluster.data_directory)) == "15"


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("include 'more.conf'\n", "/srv/b"),
        ("data_directory = '/srv/a'\ninclude_if_exists 'more.conf'\n", "/srv/b"),
        ("include 'more.conf'\ndata_directory = '/srv/a'\n", "/srv/a"),
        ("data_directory = '/srv/a'\ninclude_if_exists = 'none.conf'\n", "/srv/a"),
        ("include_dir 'conf.d'\n", "/srv/c"),
        ("data_directory = '/srv/a'\n#include 'more.conf'\n", "/srv/a"),
        ("data_directory = '/srv/\\141'\n", "/srv/a"),
        ("data_directory = '/srv/a'\nbad bad bad\n", "/srv/a"),
    ],
)
def test_a_debian_cluster_s_data_directory_is_what_its_files_set_last(text: str, data: str) -> None:
    files = {
        f"{ETC}/postgresql.conf": text,
        f"{ETC}/more.conf": "data_directory = '/srv/b'\n",
        f"{ETC}/conf.d/x.conf": "data_directory = '/srv/c'\n",
        **{f"/srv/{name}/PG_VERSION": "15\n" for name in "abc"},
    }
    assert [c.data_directory for c in clusters.find(host(files)).stopped] == [data]


def test_what_a_user_may_have_written_is_read_with_that_user_s_rights() -> None:
    """Each file of a Debian cluster may be a link to anything, made by the owner of its folder."""
    usual = "/var/lib/postgresql/15/main"
    everything = {
        **debian(**{"start.conf": "auto\n", "pg_ctl.conf": ""}),
        f"{usual}/PG_VERSION": "15\n",
        "/d/PG_VERSION": "15\n",
        "/d/postgresql.conf": "",
    }

    class Root(Host):
        def _fetch(self, path: str, offset: int, length: int) -> bytes:
            assert path.startswith(("/proc/", "/sys/")) or path.endswith("/PG_VERSION"), path
            return super()._fetch(path, offset, length)

    asked: list[int] = []

    def as_owner(uid: int, running: Any) -> Host:
        asked.append(uid)
        return Host(everything, live=True)

    for owners, uid in (
        ({ETC: 106, "/d": 107}, 106),
        ({ETC: 0, f"{ETC}/postgresql.conf": 106, "/d": 107}, 106),  # the folder is root's, the file is not
        ({ETC: 0, usual: 106, "/d": 107}, 106),  # neither: the group of the data directory's owner may read it
        ({ETC: 0, "/var": 0, "/d": 107}, 0),  # which stands for nobody
    ):
        asked.clear()
        found = clusters.find(Root(everything, live=True, uid=0, owners=owners), ["/d"], as_owner)
        assert {c.data_directory for c in found.stopped} == {"/srv/it's", "/d"}
        assert set(asked) == {uid, 107}


@pytest.mark.parametrize(
    ("word", "enabled", "expected"),
    [
        ("auto", ["postgresql.service"], True),
        ("auto", ["ssh.service"], False),
        ("auto", ["postgresql@15-main.service"], True),
        ("auto", [], True),  # no systemd: the init script starts it
        ("manual", ["postgresql.service"], False),
        ("manual", ["postgresql@15-main.service"], True),
        ("manual", [], False),
        ("disabled", ["postgresql@15-main.service"], False),
        ("yes", ["postgresql.service"], None),
        (None, ["postgresql.service"], True),
    ],
)
def test_whether_a_debian_cluster_starts_at_boot(word: str | None, enabled: list[str], expected: bool | None) -> None:
    files = debian(**({"start.conf": f"# comment\n{word}\n"} if word else {}))
    seen = host(files, {f"{WANTS}/{unit}": "" for unit in enabled})
    (cluster,) = clusters.find(seen).stopped
    assert plain(cluster.starts_at_boot) is expected
    assert plain(clusters.starts_at_boot(seen, seen, cluster)) is expected


def test_debian_configuration_left_behind_is_no_cluster() -> None:
    files = {f"{ETC}/postgresql.conf": "port = 5432\n"}
    assert clusters.find(host(files)).stopped == ()
    (cluster,) = clusters.find(host(files, live=False)).stopped  # a capture may hold only the configuration
    assert cluster.data_directory == "/var/lib/postgresql/15/main"


@pytest.mark.parametrize(
    ("directory", "unit"),
    [("/var/lib/pgsql/data", "postgresql.service"), ("/var/lib/pgsql/16/data", "postgresql-16.service")],
)
def test_red_hat_and_suse(directory: str, unit: str) -> None:
    for enabled in (unit, "sshd.service"):
        files = {f"{directory}/PG_VERSION": "16\n", f"{WANTS}/{enabled}": ""}
        (cluster,) = clusters.find(host(files)).stopped
        assert (cluster.data_directory, cluster.where) == (directory, "/var/lib/pgsql")
        assert plain(cluster.config_file) == f"{directory}/postgresql.conf"
        assert plain(cluster.starts_at_boot) is (enabled == unit)


@pytest.mark.parametrize(
    "line", ["Environment=PGDATA=/srv/db/", 'Environment="PGDATA=/srv/db"', "Environment=A=b PGDATA=/srv/db"]
)
def test_a_unit_s_own_pgdata(line: str) -> None:
    unit = f"[Service]\n#Environment=PGDATA=/old\n{line}\n"
    for place in ("postgresql-16.service", "postgresql-16.service.d/override.conf"):
        files = {f"/etc/systemd/system/{place}": unit, "/srv/db/PG_VERSION": "16\n"}
        files[f"{WANTS}/postgresql-16.service"] = ""
        (cluster,) = clusters.find(host(files)).stopped
        assert (cluster.data_directory, plain(cluster.starts_at_boot)) == ("/srv/db", True)


def test_a_folder_that_cannot_be_listed_is_not_no_cluster() -> None:
    concealed = clusters.find(host({"/var/lib/pgsql": errno.EACCES})).concealed
    assert concealed is not None and "/var/lib/pgsql" in concealed.reason and concealed.kind == "permission"


def test_pgdata_adds_a_data_directory_or_a_configuration_directory() -> None:
    (cluster,) = clusters.find(host({"/d/PG_VERSION": "15\n", "/d/postgresql.conf": ""}), ["/d/"]).stopped
    assert (cluster.data_directory, plain(cluster.config_file), cluster.where) == (
        "/d",
        "/d/postgresql.conf",
        "--pgdata",
    )
    conf = {"/c/postgresql.conf": "data_directory = '/d' # x\n", "/d/PG_VERSION": "15\n"}
    (cluster,) = clusters.find(host(conf), ["/c"]).stopped
    assert (cluster.data_directory, plain(cluster.config_file)) == ("/d", "/c/postgresql.conf")
    (cluster,) = clusters.find(host(debian()), ["/srv/it's"]).stopped  # Debian's own configuration is used for it
    assert plain(cluster.config_file) == f"{ETC}/postgresql.conf"
    (cluster,) = clusters.find(host({}), ["/nowhere"]).stopped
    assert isinstance(cluster.config_file, Unknown) and isinstance(cluster.uid, Unknown)


def test_pgdata_that_names_no_data_directory_is_a_mistake() -> None:
    def mistake(files: dict[str, Any], given: str, live: bool = True) -> str | None:
        seen = host(files, live=live)
        return given_in_vain(seen, clusters.find(seen, [given]).stopped)

    for files, what in (
        ({}, "does not exist"),
        ({"/d": "text"}, "it is a file"),
        ({"/d/base/1": ""}, "it has neither"),
    ):
        for live in (True, False):
            said = mistake(files, "/d", live)
            assert said is not None and said.startswith("--pgdata /d: expected a data directory") and what in said
    for fine in ({"/d/PG_VERSION": "15\n"}, {"/d/postgresql.conf": ""}, {"/d": errno.EACCES}):
        closed = {f"/d/{name}": errno.EACCES for name in ("PG_VERSION", "postgresql.conf")} if "/d" in fine else {}
        assert mistake({**fine, **closed}, "/d") is None
    captured = process(40, [SERVER, "-D", "/d"], **{"cwd.txt": "/d"})  # its files were not captured
    assert mistake(captured, "/d", live=False) is None
    assert mistake({f"{ETC}/postgresql.conf": "data_directory = '/d'\n"}, "/d", live=False) is None


@pytest.mark.parametrize("given", [DATA, "/link", f"{DATA}/", "/c"])
def test_a_running_cluster_is_not_listed_again(given: str) -> None:
    argv = [SERVER, "-D", "/c"]
    links = {"/link": ("->", DATA), "/c/postgresql.conf": f"data_directory = '{DATA}'\n", f"{DATA}/PG_VERSION": "15\n"}
    found = clusters.find(host(process(40, argv), lock(40), links), [given])
    assert len(found.running) == 1 and found.stopped == ()


# real servers ------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(server: servers.Server) -> Iterator[str]:
    with servers.private_directory() as folder:
        data = f"{folder}/data"
        server.initdb(data)
        yield data


def find_pid(pid: int, found: Found) -> Postmaster:
    return next(p for p in found.running if p.pid == pid)


def as_user(uid: int, work: Callable[[], Any]) -> Any:
    """Return what `work` returns (as JSON) in a child that is another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can look at another user's server, and become another user")


def test_what_only_root_may_read_does_not_reach_the_report(tmp_path: Path) -> None:
    need_root()
    secret, data = tmp_path / "secret", tmp_path / "data"
    secret.write_text("data_directory = '/srv/of-the-secret'\n")
    secret.chmod(0o600)
    data.mkdir()
    (data / "PG_VERSION").write_text("15\n")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (data / "postgresql.conf").symlink_to(secret)
    os.chown(data, 65534, 65534)
    options = run.Options(pgdata=(str(data),), no_sql=True)
    assert "of-the-secret" not in run.facts(options)
    (data / "postgresql.conf").unlink()
    (data / "postgresql.conf").write_text("include 'more'\n")
    (data / "more").symlink_to(secret)
    assert "of-the-secret" not in run.facts(options)
    secret.chmod(0o644)  # the same by a link that its owner may follow
    assert "of-the-secret" in run.facts(options)


@pytest.mark.slow
@pytest.mark.parametrize("major", servers.MAJORS)
def test_a_running_server_of_every_major(major: int) -> None:
    server = servers.require(major)
    with cluster(server) as data:
        before = time.time()
        with server.start(data) as running:
            host_ = LiveHost()
            # sessions at hand, so that backends can be mistaken
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as session:
                session.connect(f"{data}/.s.PGSQL.{running.port}")
                found = clusters.find(host_, [data])
            postmaster = find_pid(running.pid, found)
            assert [p.pid for p in found.running if plain(p.data_directory) == data] == [running.pid]
            assert data not in [c.data_directory for c in found.stopped]
            assert plain(postmaster.config_file) == f"{data}/postgresql.conf"
            assert plain(postmaster.port) == running.port
            assert plain(postmaster.socket_directories) == (data,)
            assert plain(postmaster.uid) == servers.server_user().pw_uid
            assert plain(clusters.major(host_, host_, postmaster)) == major
            assert before - 0.1 <= plain(postmaster.started) <= time.time()
            assert (postmaster.root, postmaster.container, postmaster.fork) == (None, None, None)
        assert running.pid not in [p.pid for p in clusters.find(host_).running]


@pytest.mark.slow
def test_a_server_as_nobody_and_as_its_owner() -> None:
    need_root()
    server = servers.require(15)
    with cluster(server) as data, server.start(data, env={"PGPORT": "1"}, argv=None) as running:

        def look() -> list[Any]:
            found = clusters.find(LiveHost())
            p = find_pid(running.pid, found)
            return [plain(p.data_directory), plain(p.port), isinstance(p.socket_directories, Known)]

        for uid in (65534, servers.server_user().pw_uid):
            assert as_user(uid, look) == [data, running.port, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "ps auxwwwm",
        "ps alxwww",
        "ps -elfL",
        "ps axo flags,state,uid,pid,ppid,pgid,sid,cls,pri,addr,sz,wchan:20,lstart,tty,time,cmd",
    ],
)
def test_a_real_server_in_the_real_output_of_ps(tmp_path: Path, command: str) -> None:
    """As a sosreport has it: the file is named after the command."""
    if shutil.which("ps") is None:
        pytest.skip("no ps (procps)")
    server = servers.require(15)
    with cluster(server) as data, server.start(data) as running:
        printed = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
        live = find_pid(running.pid, clusters.find(LiveHost()))
    name = command.translate(str.maketrans(" ,:", "___"))
    passwd = {"etc/passwd": Path("/etc/passwd").read_text()}
    postmaster = find_pid(
        running.pid, clusters.find(capture(tmp_path, {f"sos_commands/process/{name}": printed, **passwd}))
    )
    assert plain(postmaster.uid) == plain(live.uid)
    if postmaster.options is None:
        assert postmaster.argv == live.argv and plain(postmaster.data_directory) == data
    else:  # cut off at the width of a screen
        assert "ww" not in command and isinstance(postmaster.data_directory, Unknown)


@pytest.mark.slow
def test_nobody_s_process_does_not_hide_a_real_cluster() -> None:
    need_root()
    server = servers.require(15)
    with cluster(server) as data, servers.private_directory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy("/bin/sleep", f"{folder}/postgres")
        begin = subprocess.Popen([f"{folder}/postgres", "60"], env={"PGDATA": data}, user=65534, group=65534)
        try:
            while os.readlink(f"/proc/{begin.pid}/exe") != f"{folder}/postgres":
                time.sleep(0.01)
            found = clusters.find(LiveHost(), [data])
            assert find_pid(begin.pid, found).disbelieved is not None
            assert data in [c.data_directory for c in found.stopped]
            with server.start(data) as running:
                found = clusters.find(LiveHost(), [data])
                assert [p.pid for p in found.running if plain(p.data_directory) == data] == [running.pid]
                assert data not in [c.data_directory for c in found.stopped]
        finally:
            begin.kill()
            begin.wait()


@pytest.mark.slow
def test_a_server_started_through_the_loader_with_a_relative_path() -> None:
    server = servers.require("system-15")
    loader = "/lib64/ld-linux-x86-64.so.2"
    if not os.path.exists(loader):
        pytest.skip(f"no {loader}")
    with cluster(server) as data:
        argv = [loader, server.program("postgres"), "-D", os.path.relpath(data, "/"), "-k", data, "-h", ""]
        with server.start(data, argv=argv) as running:
            assert os.path.basename(os.readlink(f"/proc/{running.pid}/exe")).startswith("ld")
            postmaster = find_pid(running.pid, clusters.find(LiveHost()))
            assert plain(postmaster.data_directory) == data
            assert plain(postmaster.config_file) == f"{data}/postgresql.conf"
            assert postmaster.argv == tuple(argv[1:]) and postmaster.fork is None


@pytest.mark.slow
def test_a_server_in_a_mount_namespace_and_pid_namespace_of_its_own() -> None:
    """As a container runtime starts it: other mounts, PID 1 inside; its files are read through its own root."""
    need_root()
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("no unshare and setpriv (util-linux)")
    server = servers.require(15)
    user = servers.server_user()
    with cluster(server) as data:
        inner = "/mnt/pgpreemptcheck-test"
        os.makedirs(inner, exist_ok=True)
        script = (
            f"mount --bind {data} {inner} && cd / && exec setpriv --reuid={user.pw_uid} --regid={user.pw_gid} "
            f"--clear-groups {server.program('postgres')} -D {inner} -k {inner} -h '' -p {servers.free_port()}"
        )
        with open(f"{data}/server.log", "wb") as log:
            outer = subprocess.Popen(
                ["unshare", "-m", "-p", "--fork", "--kill-child", "sh", "-c", script], stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + 30
            while "ready" not in (
                Path(f"{data}/postmaster.pid").read_text() if os.path.exists(f"{data}/postmaster.pid") else ""
            ):
                assert time.monotonic() < deadline and outer.poll() is None, Path(f"{data}/server.log").read_text()
                time.sleep(0.05)
            found = clusters.find(LiveHost())
            (postmaster,) = (p for p in found.running if plain(p.data_directory) == inner)
            assert Path(f"{data}/postmaster.pid").read_text().split("\n")[0] == "1" != str(postmaster.pid)
            assert postmaster.root == f"/proc/{postmaster.pid}/root"
            assert postmaster.container is not None and postmaster.container.startswith("a mount of /")
            assert postmaster.container.endswith(os.path.basename(os.path.dirname(data)) + "/data")
            assert data not in [c.data_directory for c in clusters.find(LiveHost(), [data]).stopped]
            assert not os.path.exists(f"{inner}/PG_VERSION")
            files = ContainerHost(postmaster.root)
            assert plain(clusters.major(LiveHost(), files, postmaster)) == 15
            assert plain(postmaster.port) is not None
        finally:
            for left in clusters.find(LiveHost()).running:  # the change of user let go of --kill-child
                if plain(left.data_directory) == inner:
                    os.kill(left.pid, signal.SIGQUIT)
            try:
                outer.wait(20)
            except subprocess.TimeoutExpired:
                outer.kill()
                outer.wait()
            os.rmdir(inner)


@pytest.mark.slow
def test_root_without_ptrace_rights_sees_a_server_whole() -> None:
    """As in most containers: root may not read the working directory and environment of another user's process."""
    need_root()
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux)")
    server = servers.require(15)
    with cluster(server) as data:
        argv = [server.program("postgres"), "-k", data, "-h", "", "-p", str(servers.free_port())]
        with server.start(data, argv=argv, env={"PGDATA": data}) as running:
            code = (
                "import os, sys; from pgpreemptcheck.facts import clusters; from pgpreemptcheck.host import LiveHost\n"
                f"try: os.readlink('/proc/{running.pid}/cwd')\n"
                "except PermissionError: print('refused')\n"
                f"p = next(p for p in clusters.find(LiveHost()).running if p.pid == {running.pid})\n"
                "print(p.data_directory.value, p.port.value, p.config_file.value)"
            )
            less = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
            root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            done = subprocess.run(
                [*less, sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.stdout.split() == [
                "refused",
                data,
                argv[-1],
                f"{data}/postgresql.conf",
            ], done.stdout + done.stderr


@pytest.mark.slow
def test_hidepid_on_the_real_kernel() -> None:
    """Under hidepid=2 another user sees no postmaster, and /proc/net/unix still lists its socket (with a mount of /proc
    in a namespace of our own, so that the host's is left alone)."""
    need_root()
    if shutil.which("unshare") is None:
        pytest.skip("no unshare (util-linux)")
    server = servers.require(15)
    with cluster(server) as data, server.start(data) as running:
        code = (
            "import os; from pgpreemptcheck.facts import clusters; from pgpreemptcheck.host import LiveHost\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "f = clusters.find(LiveHost()); print(len(f.running), f.concealed.reason)"
        )
        script = f'mount -t proc -o hidepid=2 proc /proc && exec {sys.executable} -c "$CODE"'
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script],
            env={**os.environ, "CODE": code, "PYTHONPATH": root},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if "mount" in done.stderr:
            pytest.skip(f"/proc cannot be mounted with hidepid here: {done.stderr.strip()}")
        assert done.stdout.startswith("0 ") and "hidepid=" in done.stdout, done.stdout + done.stderr
        assert f".s.PGSQL.{running.port}" in done.stdout


@pytest.mark.slow
def test_a_look_at_hundreds_of_processes_costs_milliseconds() -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(300)]
    try:
        costs = []
        for _ in range(5):
            begin = time.process_time()
            clusters.find(LiveHost())
            costs.append(time.process_time() - begin)
        assert min(costs) < 0.05
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()
