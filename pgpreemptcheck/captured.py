"""Captured hosts: a directory, a tar archive or a sosreport in the place of the live host.

Files lie at their own paths below the root (`proc/meminfo`, `sys/...`, `boot/config-RELEASE`). Output of
commands is `dmesg.txt`, `journal.txt`, `uname.txt`; why a read failed there is `<path with - for />.error.txt`.
A sosreport keeps some of these elsewhere (`sos_commands/`): see `_SOS_PLACES`.
An archive is never unpacked to disk, and no link leads out of it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from pgpreemptcheck.host import FileStatus, Host, HostError, RootedHost, resolve_inside
from pgpreemptcheck.values import Fact, GapKind, Known, Unknown

if TYPE_CHECKING:
    import tarfile

_MAX_MEMBERS = 400_000
_MAX_NAME = 4096  # PATH_MAX
_MAX_HEADER = 1 << 20  # of long names and PAX attributes, which tarfile holds in memory
_CACHE_FILE = 4 << 20  # a member that check reads, up to this size, is kept in memory on the one pass over the
_CACHE_TOTAL = 96 << 20  # archive, up to this sum; others are found again by a further pass,
_MAX_PASSES = 20  # of which there are so many at most
_MAX_TOTAL = 64 << 30  # bytes in all members: above, it is no capture of ours but a bomb
_MAX_PADDING = 1 << 15  # blocks of zeros at the end: 16 MB, far above any record of tar
_WANTED = re.compile(
    r"/(proc|sys|sql|etc|var/log|sos_commands/(kernel|host|general|logs|process|processor))/|"
    r"/boot/config-|/modules/[^/]+/config$|/[^/]*\.txt$|"
    r"/(PG_VERSION|postmaster\.pid|pg_control|[^/]*\.conf|[^/]*\.signal)$"
)
"""What check reads, so that a large sosreport does not crowd it out of memory."""
_ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst")

_SOS_PLACES: dict[str, tuple[str, ...]] = {
    "/uname.txt": ("/sos_commands/kernel/uname_-a", "/sos_commands/host/uname_-a"),
    "/dmesg.txt": ("/sos_commands/kernel/dmesg", "/sos_commands/kernel/dmesg_-T", "/sos_commands/general/dmesg_now"),
    "/journal.txt": (
        "/sos_commands/logs/journalctl_--no-pager_--boot",
        "/sos_commands/logs/journalctl_--no-pager_--catalog_--boot",
    ),
    "/etc/hostname": ("/sos_commands/host/hostname", "/sos_commands/general/hostname", "/hostname"),
    "/sys/kernel/debug/sched/preempt": ("/sos_commands/process/sched_preempt",),
}
"""Where sos puts what lies elsewhere on the host (sos report/plugins: kernel.py, host.py, logs.py)."""

_EVIDENCE = (
    "proc", "sys/kernel", "sys/devices/system", "boot", "usr/lib/modules", "lib/modules", "etc/os-release",
    "usr/lib/os-release", "etc/hostname", "etc/postgresql", "var/lib/postgresql", "var/lib/pgsql",
    "var/log/kern.log", "var/log/messages", "uname.txt", "dmesg.txt", "journal.txt", "sql", "sos_commands",
)  # fmt: skip
"""What check reads: a root that has none of it is no host."""


class CapturedHost(Host):
    """A host from bytes that were captured; where exactly they lie is the subclass's business."""

    def output(self, command: str) -> Fact[str]:
        path = f"/{command}.txt"
        text = self.read(path)
        if isinstance(text, Unknown) and text.kind == "absent":
            return Unknown(f"the capture holds no {command}.txt", f"add the output of {command} to it", kind="absent")
        return text

    def read_bytes(self, path: str, limit: int = 4 << 20) -> Fact[bytes]:
        data = super().read_bytes(path, limit)
        if isinstance(data, Known):
            return Known(unpaste(data.value), data.source) if _is_pasted_kind(path) else data
        if data.kind != "absent":
            return data
        for place in _SOS_PLACES.get(path, ()):
            found = super().read_bytes(place, limit)
            if isinstance(found, Known):
                return Known(unpaste(found.value), found.source)
        return self._recorded_error(path) or data

    def _recorded_error(self, path: str) -> Unknown | None:
        """Return why the read failed on the host itself, if the capture says so."""
        name = path.strip("/").replace("/", "-").removesuffix(".txt")
        text = super().read_bytes(f"/{name}.error.txt", 4096)
        if isinstance(text, Unknown):
            return None
        words = text.value.decode("utf-8", "replace").strip()
        kind: GapKind = "other"
        if "Operation not permitted" in words:
            kind = "lockdown" if path.startswith("/sys/kernel/debug") else "permission"
        elif "Permission denied" in words:
            kind = "permission"
        elif "No such file" in words:
            kind = "absent"
        return Unknown(f"{path} could not be read on the host: {words}", kind=kind)

    def _gap(self, path: str, error: OSError) -> Unknown:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return Unknown(f"{path} is not in the capture", kind="absent")
        return Unknown(f"{path}: {error.strerror or error}")


def _is_pasted_kind(path: str) -> bool:
    """Return whether a file is a listing that people paste; configuration files are taken to the byte."""
    return path.startswith(("/proc/", "/sys/")) or (path.count("/") == 1 and path.endswith(".txt"))


def unpaste(data: bytes) -> bytes:
    """Undo what mail and Windows do to a pasted listing: CRLF, a byte-order mark, `> ` before every line."""
    if b"\0" in data or data[:2] == b"\x1f\x8b":
        return data
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    lines = data.split(b"\n")
    if any(lines) and all(line.startswith(b">") for line in lines if line):
        data = b"\n".join(line[1:].removeprefix(b" ") for line in lines)
    return data


class DirectoryHost(RootedHost, CapturedHost):
    """A captured directory, or an unpacked sosreport."""

    def __init__(self, root: str) -> None:
        super().__init__(root.rstrip("/"), root)


class ArchiveHost(CapturedHost):
    """A tar archive, indexed in one pass. Small members stay in memory, large ones are read again on demand.

    Where a name comes twice its last member counts, as when tar unpacks. An archive that is cut off or damaged
    anywhere is refused: what is missing could be the very file that says otherwise.
    """

    def __init__(self, path: str) -> None:
        self.description = path
        self._path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        self._data: dict[int, bytes] = {}  # by where a member's data begin
        self._folders: dict[str, set[str]] = {"/": set()}
        self._passes = 0
        self._index()
        self._prefix = self._find_root()

    @contextmanager
    def _open(self) -> Iterator[tarfile.TarFile]:
        import tarfile

        class Member(tarfile.TarInfo):
            @classmethod
            def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
                try:
                    return super().fromtarfile(archive)
                except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros: the archive's end
                    raise
                except tarfile.HeaderError as error:  # where tarfile takes the archive for ended after a first member
                    raise tarfile.ReadError(_HEADER_FAULTS.get(type(error).__name__, str(error))) from None

            def _proc_member(self, archive: tarfile.TarFile) -> Any:
                if self.size > _MAX_HEADER and self.type not in tarfile.REGULAR_TYPES:
                    raise tarfile.ReadError("a member's name or attributes are larger than can be")
                return super()._proc_member(archive)  # type: ignore[misc]  # where tarfile reads such headers whole

        with (
            open(self._path, "rb") as file,
            _decompress(file, self._path) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as archive,
        ):
            yield archive

    def _index(self) -> None:
        kept = total = 0
        try:
            with self._open() as archive:
                for number, member in enumerate(archive):
                    if number >= _MAX_MEMBERS:
                        raise HostError(f"{self._path}: more than {_MAX_MEMBERS} members; capture less")
                    name = _member_path(member.name)
                    if ".." in name.split("/") or len(name) > _MAX_NAME:
                        continue
                    self._members[name] = member
                    if member.islnk():  # a hard link names a member before it, which holds the bytes
                        self._members[name] = self._members.get(_member_path(member.linkname), member)
                    self._add_folder(name, member.isdir())
                    total += member.size
                    if total > _MAX_TOTAL:
                        raise HostError(f"{self._path}: more than {_MAX_TOTAL >> 30} GB in it; capture less")
                    small = member.isreg() and member.size <= _CACHE_FILE and kept + member.size <= _CACHE_TOTAL
                    if small and _WANTED.search(name):
                        stream = archive.extractfile(member)
                        data = stream.read() if stream else b""
                        if len(data) < member.size:
                            raise EOFError("unexpected end of data")
                        self._data[member.offset_data] = data
                        kept += len(data)
                _check_rest(archive)
        except Exception as error:
            if not isinstance(error, _reading_errors()):
                raise
            what, expected = "the archive is cut off or damaged", "copy or make it again"
            if not self._members:
                what = "not a tar archive, or a damaged one"
                expected = "expected a captured directory, a tar archive of one, or a sosreport"
            raise HostError(f"{self._path}: {what} ({_one_line(error)}); {expected}") from None
        if not self._members:
            raise HostError(f"{self._path}: the archive is empty")

    def _add_folder(self, name: str, is_directory: bool) -> None:
        if is_directory:
            self._folders.setdefault(name, set())
        while name != "/":
            parent, _, last = name.rpartition("/")
            names = self._folders.setdefault(parent or "/", set())
            if last in names:
                return
            names.add(last)
            name = parent or "/"

    def _find_root(self) -> str:
        """Return the folder that is the host's root: the archive's own, or its only top folder (sosreport)."""
        top = self._folders["/"]
        if len(top) == 1 and not any(f"/{item}" in self._folders or f"/{item}" in self._members for item in _EVIDENCE):
            return "/" + next(iter(top))
        return ""

    def _link_target(self, path: str) -> str | None:
        member = self._members.get(self._prefix + path)
        return member.linkname if member is not None and member.issym() else None

    def _find(self, path: str) -> str:
        return self._prefix + resolve_inside(path, self._link_target)

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        name = self._find(path)
        member = self._members.get(name)
        if member is None and name not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if member is None or member.isdir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if member.islnk():  # to what is not in the archive
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not member.isreg():
            raise OSError(errno.EINVAL, "not a regular file", path)
        if member.offset_data in self._data:
            return self._data[member.offset_data][offset : offset + length]
        return self._fetch_again(member, offset, length)

    def _fetch_again(self, wanted: tarfile.TarInfo, offset: int, length: int) -> bytes:
        self._passes += 1
        if self._passes > _MAX_PASSES:
            raise OSError(errno.EFBIG, "too many files of this archive are too large to be kept", wanted.name)
        try:
            with self._open() as archive:
                for member in archive:
                    if member.offset_data != wanted.offset_data:
                        continue
                    stream = archive.extractfile(member)
                    if stream is None:
                        break
                    while offset > 0:
                        skipped = len(stream.read(min(offset, 1 << 20)))
                        if not skipped:
                            return b""
                        offset -= skipped
                    return stream.read(length)
        except Exception as error:
            if isinstance(error, OSError) or not isinstance(error, _reading_errors()):
                raise
            raise OSError(errno.EIO, f"the archive changed while it was read ({_one_line(error)})") from None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), wanted.name)

    def _names(self, path: str) -> list[str]:
        name = self._find(path) or "/"
        if name != "/":
            name = name.rstrip("/")
        if name not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return list(self._folders[name])

    def _target(self, path: str) -> str:
        name = self._prefix + resolve_inside(path, self._link_target, follow_last=False)
        member = self._members.get(name)
        if member is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not member.issym():
            raise OSError(errno.EINVAL, "not a link", path)
        return member.linkname

    def _status(self, path: str) -> FileStatus:
        name = self._find(path)
        member = self._members.get(name)
        if member is not None:
            return FileStatus(member.isdir(), member.uid, member.mode & 0o7777, member.size, float(member.mtime))
        if name.rstrip("/") in self._folders or not name:
            return FileStatus(True, 0, 0o755, 0, 0.0)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _member_path(name: str) -> str:
    return "/" + "/".join(part for part in name.split("/") if part not in ("", "."))


_HEADER_FAULTS = {
    "EmptyHeaderError": "it ends without the mark of its end",
    "TruncatedHeaderError": "it ends in the middle of a member's header",
    "InvalidHeaderError": "a member's header does not match its checksum",
}
"""What tarfile's errors of a header mean for an archive."""


def _reading_errors() -> tuple[type[Exception], ...]:
    """Return what reading a damaged archive can raise."""
    import lzma
    import tarfile
    import zlib

    return (
        tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, RecursionError, MemoryError,
        *_zst_errors(),
    )  # fmt: skip


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_rest(archive: tarfile.TarFile) -> None:
    """Read on from the first block of zeros to the end of the file: only there are a compressed stream's checksums.

    Zeros may follow, and behind two blocks of them and a whole record another archive, which tar does not look at
    either. Anything else shows that the zeros are damage. Raises tarfile.ReadError.
    """
    import tarfile

    stream: Any = archive.fileobj
    zeros = 1
    while (block := stream.read(tarfile.BLOCKSIZE)) and not block.strip(b"\0"):
        zeros += 1
        if zeros > _MAX_PADDING:
            raise tarfile.ReadError("more zeros follow its end than any padding has")
    if not block:
        return
    try:
        if zeros < 2 or (stream.tell() - tarfile.BLOCKSIZE) % tarfile.RECORDSIZE:
            raise tarfile.HeaderError
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        raise tarfile.ReadError("zeros in the place of a member's header") from None
    rest = 0
    while chunk := stream.read(1 << 20):
        rest += len(chunk)
        if rest > _MAX_TOTAL:
            raise tarfile.ReadError("too much follows its end")


def _decompress(file: IO[bytes], path: str) -> Any:
    """Return a stream of an archive's plain bytes, by what the file begins with.

    Unlike tarfile's own streams these read all members of a gzip file, and compare the checksums.
    """
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        import gzip

        return gzip.GzipFile(fileobj=file)
    if magic.startswith(b"BZh"):
        import bz2

        return bz2.BZ2File(file)
    if magic.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        import lzma

        return lzma.LZMAFile(file)
    if magic.startswith(b"\x28\xb5\x2f\xfd") or path.endswith((".zst", ".tzst")):
        zstd = _zstd()
        if zstd is None:
            raise HostError(f"{path}: this Python cannot read zst; recompress it with gzip or xz, or use Python 3.14")
        return zstd.ZstdFile(file)
    return file


def _zstd() -> Any:
    """Return the module for zst (Python 3.14 has it), or None."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return zstd


def _zst_errors() -> tuple[type[Exception], ...]:
    zstd = _zstd()
    return () if zstd is None else (zstd.ZstdError,)


def open_captured(root: str, pgdata: tuple[str, ...] = ()) -> CapturedHost:
    """Return the host that `--root` names. Raises HostError with one line for what is none."""
    try:
        status = os.stat(root)
    except OSError as error:
        raise HostError(f"{root}: {error.strerror}; expected a captured directory or archive") from None
    if stat.S_ISDIR(status.st_mode):
        host: CapturedHost = DirectoryHost(root)
    elif stat.S_ISREG(status.st_mode) and root.endswith(_ARCHIVE_SUFFIXES):
        host = ArchiveHost(root)
    else:
        raise HostError(f"{root}: expected a captured directory or a tar archive ({', '.join(_ARCHIVE_SUFFIXES)})")
    known = any(isinstance(host.status("/" + item), Known) for item in _EVIDENCE)
    if not known and not any(isinstance(host.status(directory), Known) for directory in pgdata):
        raise HostError(f"{root}: no host in it: none of {', '.join(_EVIDENCE[:3])}, ... is there")
    return host
