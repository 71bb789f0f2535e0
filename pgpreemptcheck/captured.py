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
from typing import TYPE_CHECKING, Any

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
    """A tar archive, indexed in one pass. Small members stay in memory, large ones are read again on demand."""

    def __init__(self, path: str) -> None:
        self.description = path
        self._path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        self._data: dict[str, bytes] = {}
        self._folders: dict[str, set[str]] = {"/": set()}
        self._passes = 0
        self._index()
        self._prefix = self._find_root()

    def _open(self) -> tarfile.TarFile:
        import tarfile

        class Member(tarfile.TarInfo):
            def _proc_member(self, archive: tarfile.TarFile) -> Any:
                if self.size > _MAX_HEADER and self.type not in tarfile.REGULAR_TYPES:
                    raise tarfile.ReadError("a member's name or attributes are larger than can be")
                return super()._proc_member(archive)  # type: ignore[misc]  # where tarfile reads such headers whole

        if self._path.endswith((".zst", ".tzst")):
            return tarfile.open(fileobj=_open_zst(self._path), mode="r|", tarinfo=Member)
        return tarfile.open(self._path, mode="r|*", tarinfo=Member)

    def _index(self) -> None:
        import lzma
        import tarfile
        import zlib

        kept = total = 0
        try:
            with self._open() as archive:
                for number, member in enumerate(archive):
                    if number >= _MAX_MEMBERS:
                        raise HostError(f"{self._path}: more than {_MAX_MEMBERS} members; capture less")
                    name = "/" + "/".join(p for p in member.name.split("/") if p not in ("", "."))
                    if ".." in name.split("/") or len(name) > _MAX_NAME:
                        continue
                    self._members[name] = member
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
                        self._data[name] = data
                        kept += len(data)
        except (
            tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, RecursionError, MemoryError,
        ) as error:  # fmt: skip
            raise HostError(
                f"{self._path}: not a whole tar archive ({str(error) or type(error).__name__}); "
                "expected a captured directory, a tar archive of one, or a sosreport"
            ) from None
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
        if member.islnk():  # a hard link names the member that holds the bytes
            linked = "/" + "/".join(p for p in member.linkname.split("/") if p not in ("", "."))
            if self._members.get(linked) in (None, member):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            name, member = linked, self._members[linked]
        if not member.isreg():
            raise OSError(errno.EINVAL, "not a regular file", path)
        if name in self._data:
            return self._data[name][offset : offset + length]
        return self._fetch_again(member.name, offset, length)

    def _fetch_again(self, member_name: str, offset: int, length: int) -> bytes:
        self._passes += 1
        if self._passes > _MAX_PASSES:
            raise OSError(errno.EFBIG, "too many files of this archive are too large to be kept", member_name)
        with self._open() as archive:
            for member in archive:
                if member.name == member_name:
                    stream = archive.extractfile(member)
                    if stream is None:
                        break
                    while offset > 0:
                        skipped = len(stream.read(min(offset, 1 << 20)))
                        if not skipped:
                            return b""
                        offset -= skipped
                    return stream.read(length)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), member_name)

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


def _open_zst(path: str) -> Any:
    """Open a zst stream where Python can (3.14, or the zstandard package)."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        pass
    else:
        return zstd.open(path, "rb")
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise HostError(
            f"{path}: this Python cannot read zst; install the Python package zstandard, or recompress with gzip"
        ) from None
    return zstandard.open(path, "rb")


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
