"""Captured hosts: directory, archive and sosreport give the same bytes, and nothing leads out of them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

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


def tar_of(members: list[tuple[str, bytes]], mode: str = "w", **options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, **options) as archive:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


MEMBERS = [(f"proc/{number}", bytes([65 + number]) * 700) for number in range(4)]
"""Each takes a header and two blocks: 1536 bytes; the whole is padded with zeros to a record of 10240."""
LONG = "var/lib/postgresql/" + "long/" * 30 + "postgresql.conf"


def refusal(path: Path) -> str:
    """Return the one line with which an archive is refused."""
    with pytest.raises(HostError) as caught:
        open_captured(str(path))
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line
    return line


def test_a_tar_cut_anywhere_before_its_end_is_refused(tmp_path: Path) -> None:
    whole = tar_of([*MEMBERS, (LONG, b"port = 1")])
    path = tmp_path / "host.tar"
    end = len(whole.rstrip(b"\0")) + 511 & ~511
    assert end < len(whole) - 1024
    for cut in (*range(512, end + 1, 512), *range(100, end, 700)):
        path.write_bytes(whole[:cut])
        refusal(path)
    path.write_bytes(whole[: 3 * 1536])  # three members as they should be, and no more
    assert "cut off" in refusal(path) and "without the mark of its end" in refusal(path)
    for cut in range(end + 512, len(whole) + 1, 512):  # what is cut off is padding
        path.write_bytes(whole[:cut])
        assert open_captured(str(path)).list("/proc") == Known(("0", "1", "2", "3"), "/proc")


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2"])
def test_a_compressed_archive_cut_anywhere_is_refused(tmp_path: Path, compression: str) -> None:
    whole = tar_of(MEMBERS, f"w:{compression}")
    path = tmp_path / f"host.tar.{compression}"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        refusal(path)
    path.write_bytes(whole)
    open_captured(str(path))


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2"])
def test_a_wrong_checksum_is_found_though_the_end_was_seen(tmp_path: Path, compression: str) -> None:
    whole = bytearray(tar_of(MEMBERS, f"w:{compression}"))
    # gzip: CRC of all data, 8 bytes before the end; xz and bz2: the last bytes are checked as well
    whole[-8 if compression == "gz" else -5] ^= 0xFF
    path = tmp_path / f"host.tar.{compression}"
    path.write_bytes(whole)
    assert "damaged" in refusal(path)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "host.tar"
    whole = tar_of(MEMBERS)
    for number in range(len(MEMBERS)):
        for damage in (b"X", b"\0" * 100, b"\0" * 512, b"\xff" * 512, b"\0" * 1024, b"\0" * 1400):
            if number == len(MEMBERS) - 1 and len(damage) == 1400:
                continue  # nothing is left of the last member: the archive is whole without it
            data = bytearray(whole)
            data[number * 1536 : number * 1536 + len(damage)] = damage
            path.write_bytes(data)
            refusal(path)
    data = bytearray(whole)
    data[1536] ^= 1
    path.write_bytes(data)
    assert "header does not match its checksum" in refusal(path)


def test_archives_of_other_tools_are_read(tmp_path: Path) -> None:
    (tmp_path / "host/proc").mkdir(parents=True)
    for name, content in [*MEMBERS, ("proc/unnötig", b""), (LONG, b"port = 1")]:
        (tmp_path / "host" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "host" / name).write_bytes(content)
    os.truncate(tmp_path / "host/proc/0", 3 << 20)  # with a hole
    tried = 0
    for number, argv in enumerate(
        (
            *(["tar", f"--format={f}", "-cf"] for f in ("gnu", "pax", "posix", "ustar", "oldgnu")),
            *(["tar", "-b", blocks, "-cf"] for blocks in ("1", "20", "2000")),
            ["tar", "--sparse", "-cf"],
            *(["bsdtar", f"--format={f}", "-cf"] for f in ("pax", "gnutar", "ustar")),
            *(["busybox", "tar", "-cf"],),
        )
    ):
        if not shutil.which(argv[0]):
            continue
        path = tmp_path / f"{number}.tar"
        subprocess.run([*argv, path, "-C", tmp_path / "host", "proc", "var"], check=True)
        packed = {path: path.read_bytes()}
        for suffix, compress in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)):
            packed[tmp_path / f"{number}.tar.{suffix}"] = compress(packed[path])
        for place, data in packed.items():
            place.write_bytes(data)
            host = open_captured(str(place))
            assert host.read(f"/{LONG}") == Known("port = 1", f"/{LONG}"), place
            assert host.read("/proc/3") == Known("D" * 700, "/proc/3"), place
            assert host.read_range("/proc/0", 695, 10) == Known(b"A" * 5 + b"\0" * 5, "/proc/0"), place
            tried += 1
    assert tried >= 36, "GNU tar is missing"


def test_a_tar_with_members_appended_is_read(tmp_path: Path) -> None:
    if not shutil.which("tar"):
        pytest.skip("no tar here")
    (tmp_path / "proc").mkdir()
    for number in "123":
        (tmp_path / "proc/meminfo").write_text(number)
        subprocess.run(["tar", "-rf", "host.tar", "proc/meminfo"], cwd=tmp_path, check=True)
    assert open_captured(str(tmp_path / "host.tar")).read("/proc/meminfo") == Known("3", "/proc/meminfo")


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2"])
def test_a_stream_in_several_parts_is_read(tmp_path: Path, compression: str) -> None:
    compress: Any = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[compression]
    whole = tar_of(MEMBERS)
    path = tmp_path / f"host.tar.{compression}"
    path.write_bytes(b"".join(compress(whole[at : at + 1000]) for at in range(0, len(whole), 1000)))
    assert open_captured(str(path)).list("/proc") == Known(("0", "1", "2", "3"), "/proc")


def test_of_two_archives_in_one_file_the_first_is_read(tmp_path: Path) -> None:
    """As tar does. A single block of zeros at the end is enough, too."""
    first, second = tar_of(MEMBERS[:2]), tar_of(MEMBERS[2:])
    for name, data in (
        ("a.tar", first + second),
        ("b.tar.gz", gzip.compress(first) + gzip.compress(second)),
        ("c.tar", first[: 2 * 1536 + 512]),
        ("d.tar.gz", gzip.compress(first) + b"\0" * 100),
    ):
        (tmp_path / name).write_bytes(data)
        assert open_captured(str(tmp_path / name)).list("/proc") == Known(("0", "1"), "/proc")


def test_endless_padding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "host.tar.gz"
    path.write_bytes(gzip.compress(tar_of(MEMBERS) + b"\0" * (17 << 20), 1))
    assert "zeros" in refusal(path)


@pytest.mark.parametrize("sizes", [(10, 20), (5 << 20, 6 << 20), (10, 5 << 20), (5 << 20, 10)])
@pytest.mark.parametrize("name", ["proc/x", "./proc/x"])
def test_the_last_of_two_members_with_one_name_counts(tmp_path: Path, sizes: tuple[int, int], name: str) -> None:
    path = tmp_path / "host.tar"
    first, last = b"a" * sizes[0], b"b" * sizes[1]
    path.write_bytes(tar_of([("proc/x", first), ("proc/y", b"y"), (name, last)]))
    host = open_captured(str(path))
    assert host.read_range("/proc/x", 0, 3) == Known(b"bbb", "/proc/x")
    status = host.status("/proc/x")
    assert isinstance(status, Known) and status.value.size == sizes[1]


def test_a_hard_link_keeps_what_was_there_when_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "host.tar"
    with tarfile.open(path, "w") as archive:
        for data in (b"old", b"newer"):
            member = tarfile.TarInfo("proc/meminfo")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
            link = tarfile.TarInfo("etc/same")
            link.type, link.linkname = tarfile.LNKTYPE, "proc/meminfo"
            if data == b"old":
                archive.addfile(link)
    host = open_captured(str(path))
    assert host.read("/etc/same") == Known("old", "/etc/same")
    assert host.read("/proc/meminfo") == Known("newer", "/proc/meminfo")
    status = host.status("/etc/same")
    assert isinstance(status, Known) and status.value.size == 3


def test_zst(tmp_path: Path) -> None:
    path = tmp_path / "host.tar.zst"
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        path.write_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 100)
        assert refusal(path).endswith("recompress it with gzip or xz, or use Python 3.14")
        return
    # a checksum at the end of each of two frames
    options = {zstd.CompressionParameter.checksum_flag: 1}
    tar = tar_of(MEMBERS)
    whole = zstd.compress(tar[:3000], options=options) + zstd.compress(tar[3000:], options=options)
    path.write_bytes(whole)
    assert open_captured(str(path)).list("/proc") == Known(("0", "1", "2", "3"), "/proc")
    first = len(zstd.compress(tar[:3000], options=options))
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        refusal(path)
    for at in (first - 1, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        refusal(path)
    path.write_bytes(b"no zst at all")
    refusal(path)


def test_a_cut_archive_ends_the_program_with_2(tmp_path: Path) -> None:
    path = tmp_path / "host.tar"
    path.write_bytes(tar_of(MEMBERS)[:1536])
    done = subprocess.run(
        [sys.executable, "-m", "pgpreemptcheck", "--root", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(path) in done.stderr and "cut off" in done.stderr


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
