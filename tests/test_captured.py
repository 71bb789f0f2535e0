"""Captured hosts: directory, archive and sosreport give the same bytes, and nothing leads out of them."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from pgpreemptcheck.captured import ArchiveHost, DirectoryHost, open_captured, unpaste
from pgpreemptcheck.host import ContainerHost, Host, HostError, LiveHost, resolve_inside
from pgpreemptcheck.values import Known, Unknown

FILES = {
    "proc/meminfo": b"MemTotal: 1 kB\n",
    "proc/cmdline": b"root=/dev/sda1\n",
    "etc/real.conf": b"real\n",
    "uname.txt": b"Linux host 6.1.0 #1 SMP x86_64 GNU/Linux\r\n",
}
LINKS = {
    "etc/relative.conf": "real.conf",
    "etc/absolute.conf": "/etc/real.conf",
    "etc/up.conf": "../../../../../../etc/real.conf",
    "etc/loop.conf": "loop.conf",
    "etc/out.conf": "../../../../../../etc/passwd",
    "etc/folder": "/proc",
}


def make_directory(root: Path) -> None:
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)


def make_archive(path: Path, mode: str, top: str = "") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in FILES.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in LINKS.items():
            member = tarfile.TarInfo(top + name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)


@pytest.fixture(params=["directory", "tar", "tar.gz", "tar.xz", "tar.bz2", "tgz-in-a-top-folder"])
def captured(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    if request.param == "directory":
        make_directory(tmp_path)
        return open_captured(str(tmp_path))
    if request.param == "tgz-in-a-top-folder":
        make_archive(tmp_path / "sosreport.tgz", "w:gz", "sosreport-host-2026/")
        return open_captured(str(tmp_path / "sosreport.tgz"))
    compression = request.param.partition(".")[2]
    path = tmp_path / f"host.{request.param}"
    make_archive(path, f"w:{compression}")
    return open_captured(str(path))


def test_reads_and_lists(captured: Host) -> None:
    assert captured.read("/proc/meminfo") == Known("MemTotal: 1 kB\n", "/proc/meminfo")
    assert captured.list("/proc") == Known(("cmdline", "meminfo"), "/proc")
    assert captured.output("uname") == Known("Linux host 6.1.0 #1 SMP x86_64 GNU/Linux\n", "/uname.txt")
    assert captured.read_range("/etc/real.conf", 1, 2) == Known(b"ea", "/etc/real.conf")
    status = captured.status("/etc/real.conf")
    assert isinstance(status, Known) and not status.value.is_directory and status.value.size == 5


def test_gaps_have_a_kind(captured: Host) -> None:
    absent = captured.read("/proc/nothing")
    assert isinstance(absent, Unknown) and absent.kind == "absent" and "capture" in absent.reason
    large = captured.read("/proc/meminfo", limit=4)
    assert isinstance(large, Unknown) and large.kind == "too-large"
    folder = captured.read("/proc")
    assert isinstance(folder, Unknown)
    assert isinstance(captured.list("/proc/meminfo"), Unknown)
    loop = captured.read("/etc/loop.conf")
    assert isinstance(loop, Unknown) and loop.kind == "other"


@pytest.mark.parametrize("name", ["relative", "absolute", "up"])
def test_links_stay_inside(captured: Host, name: str) -> None:
    text = captured.read(f"/etc/{name}.conf")
    assert isinstance(text, Known) and text.value == "real\n"


def test_no_link_leads_out(captured: Host) -> None:
    assert os.path.exists("/etc/passwd")
    text = captured.read("/etc/out.conf")
    assert isinstance(text, Unknown) and text.kind == "absent"
    assert captured.link("/etc/out.conf") == Known(LINKS["etc/out.conf"], "/etc/out.conf")
    assert captured.list("/etc/folder") == Known(("cmdline", "meminfo"), "/etc/folder")


def test_a_captured_hosts_answers_are_not_this_machines(captured: Host) -> None:
    assert not captured.live
    assert isinstance(captured.read("/proc/self/status"), Unknown)
    assert isinstance(captured.mapping_page_bytes(1, 0), Unknown)


def test_recorded_errors_say_why(tmp_path: Path) -> None:
    make_directory(tmp_path)
    (tmp_path / "sys-kernel-debug-sched-preempt.error.txt").write_text("cat: Operation not permitted\n")
    (tmp_path / "dmesg.error.txt").write_text("dmesg: read kernel buffer failed: Permission denied\n")
    host = open_captured(str(tmp_path))
    preempt, dmesg = host.read("/sys/kernel/debug/sched/preempt"), host.output("dmesg")
    assert isinstance(preempt, Unknown) and preempt.kind == "lockdown"
    assert isinstance(dmesg, Unknown) and dmesg.kind == "permission"


def test_sosreport_places(tmp_path: Path) -> None:
    (tmp_path / "sos_commands/kernel").mkdir(parents=True)
    (tmp_path / "sos_commands/kernel/uname_-a").write_text("Linux h 5.14.0 #1 SMP x86_64\n")
    (tmp_path / "sos_commands/kernel/dmesg").write_text("[0.0] Dynamic Preempt: voluntary\n")
    host = open_captured(str(tmp_path))
    assert host.output("uname") == Known("Linux h 5.14.0 #1 SMP x86_64\n", "/sos_commands/kernel/uname_-a")
    assert host.output("dmesg") == Known("[0.0] Dynamic Preempt: voluntary\n", "/sos_commands/kernel/dmesg")


def test_large_members_are_read_again(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192  # 2 MiB: above what is kept in memory
    path = tmp_path / "host.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [("proc/meminfo", b"x"), ("boot/large", data), ("uname.txt", b"y")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    host = open_captured(str(path))
    assert host.read_range("/boot/large", 1_500_001, 3) == Known(data[1_500_001:1_500_004], "/boot/large")


def test_hard_links_in_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "host.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("proc/meminfo")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
        link = tarfile.TarInfo("etc/same")
        link.type, link.linkname = tarfile.LNKTYPE, "proc/meminfo"
        archive.addfile(link)
    assert open_captured(str(path)).read("/etc/same") == Known("x", "/etc/same")


@pytest.mark.parametrize("name", ["host.tar.gz", "host.tar.xz", "host.tar"])
def test_a_truncated_archive_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with tarfile.open(path, f"w:{name.split('.tar')[1].lstrip('.')}") as archive:  # type: ignore[call-overload]
        for number in range(20):
            member = tarfile.TarInfo(f"proc/{number}")
            member.size = 5000
            archive.addfile(member, io.BytesIO(os.urandom(5000)))
    path.write_bytes(path.read_bytes()[:40_000])
    with pytest.raises(HostError) as caught:
        open_captured(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_host_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "bad.tar.gz").write_bytes(b"not a tar")
    (tmp_path / "bad.tar.xz").write_bytes(lzma.compress(b"not a tar"))
    for name in ("empty", "file.txt", "bad.tar.gz", "bad.tar.xz", "missing"):
        with pytest.raises(HostError) as caught:
            open_captured(str(tmp_path / name))
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_data_directory_makes_a_host(tmp_path: Path) -> None:
    (tmp_path / "srv/pg").mkdir(parents=True)
    assert isinstance(open_captured(str(tmp_path), ("/srv/pg",)), DirectoryHost)


@pytest.mark.parametrize(
    ("pasted", "plain"),
    [
        (b"a\r\nb\r\n", b"a\nb\n"),
        (b"> a\n> b\n", b"a\nb\n"),
        (b"> a\nb\n", b"> a\nb\n"),
        (b"\xef\xbb\xbfa\n", b"a\n"),
        (b">a\n\n>b", b"a\n\nb"),
        (b"\x1f\x8b\r\n", b"\x1f\x8b\r\n"),
    ],
)
def test_unpaste(pasted: bytes, plain: bytes) -> None:
    assert unpaste(pasted) == plain


def test_configuration_files_are_taken_to_the_byte(tmp_path: Path) -> None:
    make_directory(tmp_path)
    (tmp_path / "etc/postgresql.conf").write_bytes(b"\xef\xbb\xbfport = 1\r\n")
    assert open_captured(str(tmp_path)).read_bytes("/etc/postgresql.conf") == Known(
        b"\xef\xbb\xbfport = 1\r\n", "/etc/postgresql.conf"
    )


def test_a_fifo_neither_blocks_nor_is_read(tmp_path: Path) -> None:
    make_directory(tmp_path)
    os.mkfifo(tmp_path / "etc/fifo")
    assert isinstance(open_captured(str(tmp_path)).read("/etc/fifo"), Unknown)
    assert isinstance(LiveHost().read(str(tmp_path / "etc/fifo")), Unknown)


def test_container_root_resolves_inside(tmp_path: Path) -> None:
    make_directory(tmp_path)
    host = ContainerHost(str(tmp_path))
    assert host.read("/etc/absolute.conf") == Known("real\n", "/etc/absolute.conf")
    assert isinstance(host.read("/etc/out.conf"), Unknown)


def test_resolve_inside_bounds_links() -> None:
    with pytest.raises(OSError):
        resolve_inside("/a", lambda path: "/a")


def test_archive_members_with_dots_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "host.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("proc/meminfo", "../../etc/evil"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    host = ArchiveHost(str(path))
    assert isinstance(host.read("/etc/evil"), Unknown)
    assert host.read("/../proc/meminfo") == Known("x", "/../proc/meminfo")


def test_a_header_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "host.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("proc/meminfo")
        member.pax_headers = {"comment": "x" * (8 << 20)}
        archive.addfile(member)
    with pytest.raises(HostError):
        open_captured(str(path))
