"""Host: the one way to read bytes, live and captured alike.

Four kinds of source answer the same questions: the live host, a captured directory, a tar archive
(gz, bz2, xz; zst where Python can) and a sosreport (directory or archive). A read returns `Known` bytes or
text with the path that was read, or `Unknown` with the kind of gap; it never raises for what is missing.

Paths are absolute and POSIX, as on the host itself (`/proc/meminfo`). On a capture every path, and every
link met on the way, is a path inside the capture.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from pgpreemptcheck.errors import UserError
from pgpreemptcheck.values import Fact, GapKind, Known, Unknown, record

TEXT_LIMIT = 4 << 20
"""Bound in bytes of one read: far above any file that is read whole (a postgresql.conf is 30 kB)."""

_MAX_LINKS = 40  # as the kernel's own MAXSYMLINKS


class HostError(UserError):
    """The given root is nothing that can be checked; the message is one line for the user."""


@record
class FileStatus:
    """What stat says of a file: type, owner, mode bits, size in bytes, modification time in epoch seconds."""

    is_directory: bool
    uid: int
    mode: int
    size: int
    modified: float


class Host:
    """Where bytes come from. Subclasses implement the four `_` primitives, which raise OSError."""

    live: bool = False
    description: str = ""

    # primitives ---------------------------------------------------------------------------------

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        raise NotImplementedError

    def _names(self, path: str) -> list[str]:
        raise NotImplementedError

    def _target(self, path: str) -> str:
        raise NotImplementedError

    def _status(self, path: str) -> FileStatus:
        raise NotImplementedError

    # questions ----------------------------------------------------------------------------------

    def read_bytes(self, path: str, limit: int = TEXT_LIMIT) -> Fact[bytes]:
        """Return the whole file, or why not (`too-large` above `limit` bytes)."""
        try:
            data = self._fetch(path, 0, limit + 1)
        except OSError as error:
            return self._gap(path, error)
        if len(data) > limit:
            return Unknown(f"{path} is larger than {limit} bytes", kind="too-large")
        return Known(data, path)

    def read_range(self, path: str, offset: int, length: int) -> Fact[bytes]:
        """Return up to `length` bytes from `offset`: for files that are never read whole (ELF)."""
        try:
            return Known(self._fetch(path, offset, length), path)
        except OSError as error:
            return self._gap(path, error)

    def read(self, path: str, limit: int = TEXT_LIMIT) -> Fact[str]:
        """Return the file's text; bytes that are not UTF-8 come as surrogates (PEP 383)."""
        data = self.read_bytes(path, limit)
        if isinstance(data, Unknown):
            return data
        if b"\0" in data.value:
            return Unknown(f"{path} holds binary data where text is expected", kind="not-text")
        return Known(data.value.decode("utf-8", "surrogateescape"), data.source)

    def list(self, path: str) -> Fact[tuple[str, ...]]:
        """Return the sorted names in a folder."""
        try:
            return Known(tuple(sorted(self._names(path))), path)
        except OSError as error:
            return self._gap(path, error)

    def link(self, path: str) -> Fact[str]:
        """Return where a symbolic link points, unresolved."""
        try:
            return Known(self._target(path), path)
        except OSError as error:
            return self._gap(path, error)

    def status(self, path: str) -> Fact[FileStatus]:
        """Return what stat says of the file behind the path."""
        try:
            return Known(self._status(path), path)
        except OSError as error:
            return self._gap(path, error)

    def output(self, command: str) -> Fact[str]:
        """Return what `command` (`dmesg`, `journal` or `uname`) prints on that host."""
        raise NotImplementedError

    def mapping_page_bytes(self, pid: int, address: int) -> Fact[int]:
        """Return the page size in bytes of a process's mapping, without a page walk (PROCMAP_QUERY)."""
        return Unknown("this kind of host cannot be asked for the page size of a mapping", kind="unsupported")

    # gaps ---------------------------------------------------------------------------------------

    def _gap(self, path: str, error: OSError) -> Unknown:
        return gap(path, error)


def gap(path: str, error: OSError, uid: int | None = None) -> Unknown:
    """Turn a failed read of the live host into a reason and a hint; `uid` is who tried (default: this process)."""
    uid = os.geteuid() if uid is None else uid
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ESRCH):
        return Unknown(f"{path} does not exist", kind="absent")
    if error.errno == errno.EPERM and uid == 0 and path.startswith("/sys/kernel/debug"):
        return Unknown(
            f"{path}: the kernel refuses it even to root (Operation not permitted: kernel lockdown)",
            "the kernel log still holds the value: journalctl -k -b",
            kind="lockdown",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        who = "root" if uid == 0 else f"uid {uid}"
        hint = "" if uid == 0 else "run as root"
        return Unknown(f"{path}: permission denied to {who}", hint, kind="permission")
    kinds: dict[int | None, GapKind] = {errno.EISDIR: "not-text"}
    return Unknown(f"{path}: {error.strerror or error}", kind=kinds.get(error.errno, "other"))


def resolve_inside(path: str, target: Callable[[str], str | None], *, follow_last: bool = True) -> str:
    """Resolve `path` as if chrooted: no link and no `..` leads out. Returns an absolute path without links.

    `target(path)` returns where a link points, or None for anything else. Raises OSError(ELOOP).
    """
    pending = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
            continue
        here = "/" + "/".join([*done, name])
        to = None if not pending and not follow_last else target(here)
        if to is None:
            done.append(name)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if to.startswith("/"):
            done.clear()
        pending.extend(to.split("/")[::-1])
    return "/" + "/".join(done)


# live -------------------------------------------------------------------------------------------


def _read_regular(path: str, offset: int, length: int, flags: int = 0) -> bytes:
    """Read from a regular file only: a FIFO or a device in its place must not even be opened."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        mode = os.fstat(place).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        if offset:
            os.lseek(fd, offset, os.SEEK_SET)
        chunks: list[bytes] = []
        while length > 0:  # files in /proc answer in pages, whatever is asked for
            chunk = os.read(fd, min(length, 1 << 20))
            if not chunk:
                break
            chunks.append(chunk)
            length -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def _file_status(path: str, *, follow: bool = True) -> FileStatus:
    s = os.stat(path, follow_symlinks=follow)
    return FileStatus(stat.S_ISDIR(s.st_mode), s.st_uid, stat.S_IMODE(s.st_mode), s.st_size, s.st_mtime)


class LiveHost(Host):
    """This machine, as the calling user."""

    live = True
    description = "this host"

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        return _read_regular(path, offset, length)

    def _names(self, path: str) -> list[str]:
        return os.listdir(path)

    def _target(self, path: str) -> str:
        return os.readlink(path)

    def _status(self, path: str) -> FileStatus:
        return _file_status(path)

    def output(self, command: str) -> Fact[str]:
        if command == "uname":
            u = os.uname()
            return Known(f"{u.sysname} {u.nodename} {u.release} {u.version} {u.machine}", "uname")
        if command == "dmesg":
            return _kernel_ring_buffer()
        if command == "journal":
            return _journal()
        return Unknown(f"no such command output: {command}", kind="unsupported")

    def mapping_page_bytes(self, pid: int, address: int) -> Fact[int]:
        from pgpreemptcheck import procmap

        return procmap.fact(pid, address)


class RootedHost(Host):
    """Files below a folder that stands for the root: links resolve inside it, never outside."""

    def __init__(self, root: str, description: str) -> None:
        self._root = root
        self.description = description

    def _below(self, path: str, *, follow_last: bool = True) -> str:
        return self._root + resolve_inside(path, self._link_target, follow_last=follow_last)

    def _link_target(self, path: str) -> str | None:
        try:
            return os.readlink(self._root + path)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        return _read_regular(self._below(path), offset, length, os.O_NOFOLLOW)

    def _names(self, path: str) -> list[str]:
        return os.listdir(self._below(path))

    def _target(self, path: str) -> str:
        return os.readlink(self._below(path, follow_last=False))

    def _status(self, path: str) -> FileStatus:
        return _file_status(self._below(path), follow=False)


class ContainerHost(RootedHost):
    """The files of another mount namespace, below `/proc/PID/root`."""

    live = True

    def __init__(self, root: str) -> None:
        super().__init__(root, f"the file system at {root}")


def _kernel_ring_buffer() -> Fact[str]:
    """The kernel log from /dev/kmsg, one message a line, oldest first (Documentation/ABI/testing/dev-kmsg)."""
    source = "kernel log (/dev/kmsg)"
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return Unknown(
                "the kernel log is closed to this user (kernel.dmesg_restrict)", "run as root", kind="permission"
            )
        return gap("/dev/kmsg", error)
    lines: list[str] = []
    try:
        if not stat.S_ISCHR(os.fstat(fd).st_mode):
            return Unknown("/dev/kmsg is not the kernel's device", kind="unsupported")
        for _ in range(200_000):
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # this record was overwritten meanwhile: the next read goes on
                    continue
                return gap("/dev/kmsg", error)
            if not record:
                break
            # "priority,sequence,microseconds,flags;message\n KEY=value\n"
            lines.append(record.partition(b";")[2].partition(b"\n")[0].decode("utf-8", "replace"))
    finally:
        os.close(fd)
    return Known("\n".join(lines), source)


def _journal() -> Fact[str]:
    """The kernel messages of this boot from the systemd journal."""
    program = "/usr/bin/journalctl"
    text = run_bounded([program, "--no-pager", "-q", "-k", "-b", "-o", "cat"], seconds=10.0)
    if isinstance(text, Unknown):
        return text
    if not text.value.strip():
        return Unknown("the systemd journal holds no kernel messages of this boot for this user", "run as root")
    return Known(text.value, "journalctl -k -b")


def run_bounded(argv: list[str], seconds: float, limit: int = 16 << 20) -> Fact[str]:
    """Run a root-owned program without a shell and return its stdout, bounded in time and size."""
    import select
    import signal
    import time

    try:
        owner = os.stat(argv[0])
    except OSError as error:
        return gap(argv[0], error)
    if owner.st_uid != 0 or owner.st_mode & 0o022:
        return Unknown(f"{argv[0]} could be replaced by a user other than root: not run", kind="unsupported")
    reader, writer = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        redirect = [
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, writer, 1),
            (os.POSIX_SPAWN_DUP2, null, 2),
        ]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        pid = os.posix_spawn(argv[0], argv, env, file_actions=redirect)
    except OSError as error:
        os.close(reader)
        return gap(argv[0], error)
    finally:
        os.close(writer)
        os.close(null)
    chunks: list[bytes] = []
    size = 0
    deadline = time.monotonic() + seconds
    complete = False
    while size <= limit:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            complete = True
            break
        chunks.append(chunk)
        size += len(chunk)
    os.close(reader)
    if not complete:
        os.kill(pid, signal.SIGKILL)
    _, code = os.waitpid(pid, 0)
    if not complete:
        return Unknown(f"{argv[0]} gave no complete answer within {seconds:g} s")
    if code != 0:
        return Unknown(f"{argv[0]} failed (exit status {os.waitstatus_to_exitcode(code)})")
    return Known(b"".join(chunks).decode("utf-8", "replace"), " ".join(argv))
