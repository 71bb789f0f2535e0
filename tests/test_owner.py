"""Reading with another user's rights: what is refused, what dies, what lies, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from pgpreemptcheck import forking, owner, ownerchild, procmap
from pgpreemptcheck.host import LiveHost
from pgpreemptcheck.owner import Owner, OwnerHost
from pgpreemptcheck.values import Known, Unknown
from tests import servers
from tests.test_segment import pool

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take on another user's rights")
NOBODY = 65534


@pytest.fixture
def nobody() -> Iterator[Owner]:
    with owner.start(NOBODY) as found:
        yield found


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(word) for word in file.read().split()}


def descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


def child_of(one: Owner) -> int:
    assert one._files is not None
    return one._files._pid


# rights -----------------------------------------------------------------------------------------


@needs_root
def test_what_the_owner_may_not_read_is_refused_and_says_to_whom(nobody: Owner) -> None:
    host = nobody.host()
    assert isinstance(LiveHost().read("/etc/shadow"), Known)
    for answer in (host.read("/etc/shadow"), host.list("/root"), host.status("/root/.profile"), host.link("/root/x")):
        assert isinstance(answer, Unknown)
        assert answer.kind == "permission"
        assert "uid 65534" in answer.reason
    assert host.read("/etc/shadow") == Unknown(
        "/etc/shadow: permission denied to uid 65534", "let the cluster's owner (uid 65534) read it", "permission"
    )


@needs_root
def test_the_child_has_no_more_than_its_user(nobody: Owner) -> None:
    nobody.host().read("/etc/hostname")
    assert rights_of(child_of(nobody)) == (["65534"] * 4, 0)


@needs_root
def test_what_seems_to_be_roots_is_read_as_nobody() -> None:
    """A link in a writable place can make a folder of root's (/tmp) pass for a data directory of root's."""
    with owner.start(0) as found:
        assert found.uid == NOBODY
        assert isinstance(found.host().read("/etc/shadow"), Unknown)


@needs_root
def test_groups_are_those_of_the_process_and_not_of_a_setgid_program() -> None:
    with servers.private_directory() as base:
        for name, gid in (("mine", 4711), ("lent", 4712)):
            with open(f"{base}/{name}", "w") as file:
                file.write(name)
            os.chown(f"{base}/{name}", 0, gid)
            os.chmod(f"{base}/{name}", 0o640)

        def lend() -> None:
            os.setgroups([4711])
            os.setresgid(NOBODY, 4712, 4712)  # real, effective and saved, as a setgid program has them
            os.setresuid(NOBODY, NOBODY, NOBODY)

        os.chmod(base, 0o755)
        with (
            subprocess.Popen(["/bin/sleep", "60"], preexec_fn=lend) as process,
            owner.start(NOBODY, like=process.pid) as found,
        ):
            try:
                assert isinstance(found.host().read(f"{base}/mine"), Known)
                assert isinstance(found.host().read(f"{base}/lent"), Unknown)
            finally:
                process.kill()


@needs_root
def test_rights_that_cannot_be_taken_on_are_no_reason_to_read_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setresuid", refuse)
    with owner.start(NOBODY) as found:
        answer = found.host().read("/etc/passwd")
    assert answer == Unknown("/etc/passwd: the rights of uid 65534 cannot be taken on: Operation not permitted")
    monkeypatch.setattr(os, "setresuid", lambda *_: None)
    with owner.start(NOBODY) as found:
        answer = found.host().read("/etc/passwd")
    assert isinstance(answer, Unknown)
    assert "root's could be had back" in answer.reason


def test_ones_own_rights_need_no_child() -> None:
    before = children()
    with owner.start() as found:
        assert isinstance(found.host(), LiveHost)
        assert children() == before
        answer = found.sql(directories=["/tmp"]).answer()
        assert isinstance(answer, Unknown)


# the same answers as the live host ----------------------------------------------------------------


@needs_root
def test_answers_are_those_of_the_live_host(nobody: Owner) -> None:
    host, live = nobody.host(), LiveHost()
    assert host.live
    assert host.read("/etc/passwd") == live.read("/etc/passwd")
    assert host.list("/usr/bin") == live.list("/usr/bin")
    assert host.status("/etc") == live.status("/etc")
    assert host.link("/proc/mounts") == live.link("/proc/mounts") == Known("self/mounts", "/proc/mounts")
    assert host.read_range("/bin/sh", 0, 4) == Known(b"\x7fELF", "/bin/sh")
    assert host.read_range("/bin/sh", 1, 3) == Known(b"ELF", "/bin/sh")
    big = "/usr/bin/perl" if os.path.exists("/usr/bin/perl") else "/bin/bash"
    assert host.read_bytes(big, 16 << 20) == live.read_bytes(big, 16 << 20)
    for path in ("/nonexistent", "/etc/passwd/x", "/etc", "/dev/zero", "/a\0b"):
        mine = host.read(path)
        assert isinstance(mine, Unknown)
        if "\0" not in path:
            theirs = live.read(path)
            assert isinstance(theirs, Unknown)
            assert (mine.reason, mine.kind) == (theirs.reason, theirs.kind)
    limited = host.read("/etc/passwd", limit=10)
    assert isinstance(limited, Unknown)
    assert limited.kind == "too-large"
    assert isinstance(host.output("dmesg"), Unknown)


@needs_root
def test_names_that_are_no_text_come_through() -> None:
    with servers.private_directory() as base:
        os.chmod(base, 0o755)
        name = b'caf\xe9 \n"'.decode("utf-8", "surrogateescape")
        with open(f"{base}/{name}", "wb") as file:
            file.write(bytes(range(256)))
        with owner.start(NOBODY) as found:
            host = found.host()
            assert host.list(base) == Known((name,), base)
            assert host.read_bytes(f"{base}/{name}") == Known(bytes(range(256)), f"{base}/{name}")


@needs_root
def test_a_containers_files_are_read_inside_its_root_only() -> None:
    with servers.private_directory() as base:
        os.makedirs(f"{base}/etc")
        os.chmod(base, 0o755)
        with open(f"{base}/etc/inside", "w") as file:
            file.write("inside")
        os.symlink("/etc/inside", f"{base}/absolute")
        os.symlink("../../../../../../etc/passwd", f"{base}/out")
        os.symlink("/etc", f"{base}/folder")

        holder = os.fork()
        if holder == 0:
            os.chroot(base)
            time.sleep(60)
            os._exit(0)
        root = f"/proc/{holder}/root"
        try:
            deadline = time.monotonic() + 5
            while not os.path.exists(f"{root}/etc/inside") or not os.path.samefile(root, base):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with owner.start(NOBODY, roots=[root]) as found:
                host = found.host(root)
                assert host.read("/absolute") == Known("inside", "/absolute")
                assert host.read("/folder/inside") == Known("inside", "/folder/inside")
                assert host.list("/folder") == Known(("inside",), "/folder")
                assert host.link("/out") == Known("../../../../../../etc/passwd", "/out")
                out = host.read("/out")
                assert isinstance(out, Unknown)
                assert out.kind == "absent"
                assert isinstance(found.host().read("/etc/passwd"), Known)
            with owner.start(NOBODY) as found:  # not opened before: the owner himself is refused
                refused = found.host(root).read("/etc/inside")
                assert isinstance(refused, Unknown)
                assert refused.kind == "permission"
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)


# children that die, hang and lie ------------------------------------------------------------------


@needs_root
def test_a_child_that_died_is_a_gap(nobody: Owner) -> None:
    os.kill(child_of(nobody), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        answer = nobody.host().read("/etc/hostname")
        if isinstance(answer, Unknown):
            break
    assert answer == Unknown("/etc/hostname: the process that reads as uid 65534 has died")
    assert nobody.host().mapping_page_bytes(1, 0) == Unknown(
        "/proc/1/maps: the process that reads as uid 65534 has died"
    )


@needs_root
def test_a_child_that_hangs_costs_its_time_once(nobody: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "READ_SECONDS", 0.2)
    nobody.host().read("/etc/hostname")
    os.kill(child_of(nobody), signal.SIGSTOP)
    began = time.monotonic()
    answers = [nobody.host().read("/etc/passwd") for _ in range(20)]
    assert time.monotonic() - began < 1
    assert set(answers) == {Unknown("/etc/passwd: the process that reads as uid 65534 gave no answer in time")}
    nobody.close()


@needs_root
def test_a_fifo_does_not_hold_up_the_child(nobody: Owner) -> None:
    with servers.private_directory() as base:
        os.mkfifo(f"{base}/postgresql.conf", 0o666)
        os.chmod(base, 0o755)
        answer = nobody.host().read(f"{base}/postgresql.conf")
        assert isinstance(answer, Unknown)
        assert "not a regular file" in answer.reason
        assert isinstance(nobody.host().read("/etc/passwd"), Known)


def lying(answer: Callable[[int], bytes]) -> Owner:
    """Return an owner whose child is anybody's: it answers each request with whatever bytes."""
    requests, to = os.pipe()
    from_, answers = os.pipe()
    os.set_blocking(from_, False)
    pid = os.fork()
    if pid == 0:
        try:
            number = 0
            os.close(to)
            while os.read(requests, 4096):
                number += 1
                os.write(answers, answer(number))
        finally:
            os._exit(0)
    os.close(requests)
    os.close(answers)
    return Owner(7, owner._Child(pid, to, from_, "reads as uid 7", in_order=True), None)


def frame(text: bytes, body: bytes = b"") -> bytes:
    return ownerchild.HEADER.pack(len(text), len(body)) + text + body


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\xff" * 64, "sent more than was asked for"),
        (ownerchild.HEADER.pack(2, 1 << 31) + b"{}", "sent more than was asked for"),
        (frame(b"not JSON"), "talks nonsense"),
        (frame(b"[" * 100_000), "talks nonsense"),
        (frame(b"9" * 6000), "talks nonsense"),
        (frame(b"[]"), "talks nonsense"),
        (frame(b'{"id": "1"}'), "talks nonsense"),
        (frame(b'{"id": 2}'), "talks nonsense"),
        (frame(b'{"id": 1, "answer": {"a": 1}}'), "talks nonsense"),
        (frame(b'{"id": 1, "answer": [1, 2, 3, Infinity, 5]}'), "talks nonsense"),
        (frame(b'{"id": 1, "answer": [1, 2]}'), "talks nonsense"),
        (frame(b'{"id": 1, "answer": "text"}'), "talks nonsense"),
        (frame(b'{"id": 1, "errno": 99999}'), "talks nonsense"),
        (frame(b'{"id": 1, "errno": "x"}'), "talks nonsense"),
    ],
)
def test_a_child_that_lies_is_a_gap(said: bytes, why: str) -> None:
    with lying(lambda _: said) as found:
        answer = found.host().status("/x")
        assert answer == Unknown(f"/x: the process that reads as uid 7 {why}")
        assert found.host().read("/y") == Unknown(f"/y: the process that reads as uid 7 {why}")


def test_a_child_that_sends_more_than_asked_for_or_names_that_are_paths() -> None:
    with lying(lambda number: frame(b'{"id": %d}' % number, b"12345")) as found:
        assert found.host().read_range("/x", 0, 5) == Known(b"12345", "/x")
        assert isinstance(found.host().read_range("/x", 0, 4), Unknown)
    for names in (b'["a/b"]', b'[""]', b"[1]", b'"ab"'):
        with lying(lambda number, names=names: frame(b'{"id": %d, "answer": %s}' % (number, names))) as found:  # type: ignore[misc]
            assert isinstance(found.host().list("/x"), Unknown)
    for size in (b"0", b"-4096", b"4097", b'"4096"', b"null"):
        with lying(lambda number, size=size: frame(b'{"id": %d, "answer": %s}' % (number, size))) as found:  # type: ignore[misc]
            assert isinstance(found.host().mapping_page_bytes(1, 0), Unknown)


# nothing is left behind ---------------------------------------------------------------------------


@needs_root
def test_neither_processes_nor_descriptors_are_left() -> None:
    processes, files = children(), descriptors()
    for sql in (False, True):
        found = owner.start(NOBODY, sql=sql)
        found.host().read("/etc/hostname")
        found.close()
        found.close()
        assert children() == processes
        assert descriptors() == files
        answer = found.host().read("/etc/hostname")
        assert isinstance(answer, Unknown)


@needs_root
def test_a_child_made_early_serves_the_first_owner_and_is_not_left_over() -> None:
    processes, files = children(), descriptors()
    forking.prepare()
    forking.prepare()
    early = children() - processes
    assert len(early) == 1
    with owner.start(NOBODY, sql=True) as found:
        assert found._sql is not None
        assert {found._sql._pid} == early
        owner.discard()
        answer = found.sql(directories=["/nonexistent"]).answer()
        assert not isinstance(answer, Unknown)
        assert answer["code"] in ("socket", "driver")
        assert rights_of(found._sql._pid) == (["65534"] * 4, 0)
    forking.prepare()
    owner.discard()
    assert (children(), descriptors()) == (processes, files)


def rights_of(pid: int) -> tuple[list[str], int]:
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    assert set(fields["Gid"].split()) != {"0"}
    assert "0" not in fields["Groups"].split()
    return fields["Uid"].split(), int(fields["CapPrm"], 16) | int(fields["CapEff"], 16)


@needs_root
def test_the_child_holds_nothing_of_the_parents() -> None:
    with open("/etc/shadow"), owner.start(NOBODY) as found:
        found.host().read("/etc/hostname")
        links = {os.readlink(f"/proc/{child_of(found)}/fd/{n}") for n in os.listdir(f"/proc/{child_of(found)}/fd")}
        assert "/etc/shadow" not in links
        assert {link.partition(":")[0] for link in links} == {"/dev/null", "pipe"}


PROGRAM = """
import atexit, os, sys, time
sys.path.insert(0, {root!r})
atexit.register(lambda: os.write(1, b"cleanup\\n"))
print("buffered", end="")
from pgpreemptcheck import owner
found = owner.start(65534 if os.geteuid() == 0 else None, sql=True)
found.host().read("/etc/hostname")
os.write(1, ("%s\\n" % open(f"/proc/self/task/{{os.getpid()}}/children").read()).encode())
{then}
"""


def program(then: str) -> subprocess.Popen[str]:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(root=root, then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        start_new_session=True,
    )


def test_the_children_run_none_of_the_parents_exit_and_say_nothing() -> None:
    with program("found.close()") as process:
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out.count("cleanup") == 1
    assert out.count("buffered") == 1
    assert "Traceback" not in out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_children_end_with_the_parent(how: signal.Signals) -> None:
    with program("time.sleep(60)") as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == (2 if os.geteuid() == 0 else 1)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.kill()
        deadline = time.monotonic() + 5
        while any(os.path.exists(f"/proc/{pid}/cmdline") and running(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def running(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


# page sizes ---------------------------------------------------------------------------------------


def address_of(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_page_sizes_are_those_that_were_asked_for() -> None:
    page = resource.getpagesize()
    with mmap.mmap(-1, 16 * page) as memory:
        where = address_of(memory)
        found = procmap.fact(os.getpid(), where)
        if isinstance(found, Unknown) and found.kind == "unsupported":
            pytest.skip("this kernel has no PROCMAP_QUERY (Linux 6.11)")
        assert found == Known(page, f"/proc/{os.getpid()}/maps (PROCMAP_QUERY)")
        del where
    gap = procmap.fact(os.getpid(), 16)
    assert isinstance(gap, Unknown)
    assert gap.kind == "absent"
    assert isinstance(procmap.fact(2**22 + 1, 4096), Unknown)


@needs_root
def test_huge_pages_are_told_apart_also_with_the_owners_rights_alone() -> None:
    script = (
        "import mmap, ctypes, sys\n"
        "m = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000)\n"
        "print(ctypes.addressof(ctypes.c_char.from_buffer(m)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with (
        pool(2),
        subprocess.Popen(
            ["/usr/bin/python3", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        ) as process,
    ):
        assert process.stdout is not None
        address = int(process.stdout.readline())
        source = f"/proc/{process.pid}/maps (PROCMAP_QUERY)"
        found = procmap.fact(process.pid, address)
        if isinstance(found, Unknown) and found.kind == "unsupported":
            pytest.skip("this kernel has no PROCMAP_QUERY (Linux 6.11)")
        assert found == Known(2 << 20, source)
        with owner.start(NOBODY, like=process.pid) as nobody:
            assert isinstance(nobody.host(), OwnerHost)
            assert nobody.host().mapping_page_bytes(process.pid, address) == Known(2 << 20, source)
            refused = nobody.host().mapping_page_bytes(os.getpid(), address)
            assert isinstance(refused, Unknown)
            assert refused.kind == "permission"
        process.communicate("")


# no more processes -------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_where_no_process_can_be_forked_every_read_is_a_gap_that_says_so(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse() -> int:
        raise OSError(number, os.strerror(number))

    before = descriptors()
    monkeypatch.setattr(os, "fork", refuse)
    with owner.start(NOBODY, sql=True) as found:
        for answer in (found.host().read("/etc/passwd"), found.sql().answer()):
            assert isinstance(answer, Unknown) and os.strerror(number) in answer.reason
    assert descriptors() == before


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_check_that_can_fork_no_process_still_reports(uid: int) -> None:
    code = (
        "import os, sys\n"
        "def refuse(): raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        f"os.fork = refuse; os.geteuid = lambda: {uid}\n"
        "sys.argv = ['pgpreemptcheck', 'facts']\n"
        "from pgpreemptcheck.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["host"]


@pytest.mark.parametrize("part", ["click", "pgpreemptcheck.cli", "pgpreemptcheck.forking"])
def test_an_interrupt_before_the_command_line_has_begun_is_silent(part: str) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a job that runs in the background
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {part!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt()); sys.argv = ['pgpreemptcheck']\n"
        "from pgpreemptcheck.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupts_while_it_works_are_one_line() -> None:
    """Each import of a module is interrupted, that of what an error line needs too."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'pgpreemptcheck.host': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt()); sys.argv = ['pgpreemptcheck', '--no-sql']\n"
        "from pgpreemptcheck.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "pgpreemptcheck: interrupted")


def test_an_ignored_interrupt_stays_ignored() -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv = ['pgpreemptcheck', '--version']\n"
        "from pgpreemptcheck.__main__ import main; os.kill(os.getpid(), signal.SIGINT); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("pgpreemptcheck ")
