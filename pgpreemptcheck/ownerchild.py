"""The forked child that reads and asks with the rights of a cluster's owner (owner.py is its parent).

It takes on the owner's user, group and groups for good before it reads anything, and serves requests over pipes: JSON
with a length before it, and bytes after it. Nothing of the parent's is run, written or left open in it.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pgpreemptcheck import procmap
from pgpreemptcheck.host import ContainerHost, LiveHost

HEADER = struct.Struct(">II")  # bytes of JSON, bytes after it
MAX_JSON = 8 << 20
MAX_BODY = 64 << 20
NOBODY = 65534


def live(make: Callable[[], FileServer | SqlServer], requests: int, answers: int) -> NoReturn:
    """Be the child: nothing of the parent's is run, written or left open, and it ends when the parent does."""
    try:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd > 2 and fd not in (requests, answers):
                try:
                    os.close(fd)
                except OSError:
                    pass
        _serve(make, requests, answers)
    finally:
        os._exit(0)


def _serve(make: Callable[[], FileServer | SqlServer], requests: int, answers: int) -> None:
    def send(message: Mapping[str, object], body: bytes = b"") -> None:
        text = json.dumps(message).encode()
        if len(text) > MAX_JSON or len(body) > MAX_BODY:
            why = os.strerror(errno.EFBIG)
            text, body = json.dumps({"id": message["id"], "errno": errno.EFBIG, "why": why}).encode(), b""
        data = memoryview(HEADER.pack(len(text), len(body)) + text + body)
        while data:
            data = data[os.write(answers, data) :]

    server: FileServer | SqlServer | None = None
    failed = ""
    try:
        server = make()
    except OSError as error:
        failed = str(error)
    while True:
        length, _ = HEADER.unpack(_read_exactly(requests, HEADER.size))
        request = json.loads(_read_exactly(requests, length))
        if server is None:
            send({"id": request["id"], "failed": failed})
        else:
            server.serve(request, send)


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            os._exit(0)  # the parent is gone, or has closed us
        data += chunk
    return data


_Send = Callable[..., None]


class _Roots:
    """The file systems that a child may read: this host's, and containers' below their roots."""

    def __init__(self, opened: Mapping[str, str]) -> None:
        self._opened = opened
        self._hosts: dict[str | None, LiveHost | ContainerHost] = {None: LiveHost()}

    def path(self, root: str) -> str:
        return self._opened.get(root, root)

    def host(self, root: str | None) -> LiveHost | ContainerHost:
        found = self._hosts.get(root)
        if found is None:
            assert root is not None
            found = self._hosts[root] = ContainerHost(self.path(root))
        return found


class FileServer:
    """Serves reads, in the order of requests."""

    def __init__(self, roots: _Roots) -> None:
        self._roots = roots

    def serve(self, request: dict[str, Any], send: _Send) -> None:
        answer: object = None
        body = b""
        host = self._roots.host(request["root"])
        path, arguments = request["path"], request["arguments"]
        try:
            if request["do"] == "read":
                body = host._fetch(path, *arguments)
            elif request["do"] == "list":
                answer = host._names(path)
            elif request["do"] == "link":
                answer = host._target(path)
            elif request["do"] == "status":
                s = host._status(path)
                answer = [s.is_directory, s.uid, s.mode, s.size, s.modified]
            else:
                answer = procmap.page_bytes(*arguments)
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError):  # a NUL in a path
                error = FileNotFoundError(errno.ENOENT, "")
            send({"id": request["id"], "errno": error.errno or errno.EIO, "why": error.strerror or str(error)})
            return
        send({"id": request["id"], "answer": answer}, body)


class SqlServer:
    """Asks servers, each request in a thread of its own: one that hangs holds up no other."""

    _MAX_THREADS = 32
    _MAX_DATA_BYTES = 256 << 20

    def __init__(self) -> None:
        import pwd  # noqa: F401 - once the rights are dropped, Python's own files may be out of reach
        import resource
        import threading

        from pgpreemptcheck import sql

        sql.import_driver()
        self._sql = sql
        self._threading = threading
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self._MAX_THREADS)
        threading.stack_size(1 << 20)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._MAX_DATA_BYTES if hard == resource.RLIM_INFINITY else min(hard, self._MAX_DATA_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))  # a server may send without end
        self._failed = "whose rights to ask with was not said"
        self._name: str | None = None
        self._roots = _Roots({})

    def _take_rights(self, uid: int | None, like: int | None, roots: Sequence[str]) -> None:
        self._sql.clean_environment(trusted=os.geteuid() != 0, home=uid is None)
        self._name = os.environ.get("PGUSER") or _user_name(os.geteuid() if uid is None else uid)
        try:
            self._roots = enter(uid, like, roots)
            self._failed = ""
        except OSError as error:
            self._failed = str(error)

    def serve(self, request: dict[str, Any], send: _Send) -> None:
        if request.get("do") == "enter":
            self._take_rights(request["uid"], request["like"], request["roots"])
            return
        if self._failed:
            send({"id": request["id"], "failed": self._failed})
            return

        def work() -> None:
            with self._free:
                try:
                    answer = self._answer(request)
                except Exception as error:
                    answer = {"refused": f"asking failed: {type(error).__name__}"}
            with self._lock:
                send({"id": request["id"], "answer": answer})

        self._threading.Thread(target=work, daemon=True).start()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        directories = request["directories"]
        if request["root"] is not None:
            host = self._roots.host(request["root"])
            assert isinstance(host, ContainerHost)
            # Resolved inside the container, where /var/run is a link to an absolute path.
            directories = [host._below(path) for path in directories if path.startswith("/")]
        users = request["users"] or self._users(request["root"])
        return self._sql.ask(
            directories=directories, port=request["port"], users=users, dsn=request["dsn"], deep=request["deep"]
        )

    def _users(self, root: str | None) -> list[str]:
        if root is None and self._name is not None and self._name != "postgres":
            return [self._name, "postgres"]
        return ["postgres"]


def _user_name(uid: int) -> str | None:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def enter(uid: int | None, like: int | None, roots: Sequence[str]) -> _Roots:
    """Take on the rights of a user for good, and return the file systems to read. Raises OSError."""
    opened: dict[str, str] = {}
    import fcntl  # noqa: F401 - procmap needs it after the switch, when Python's own files may be out of reach

    if uid is None:
        return _Roots(opened)
    for root in roots:
        try:
            opened[root] = f"/proc/self/fd/{os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"
        except OSError:
            pass  # it may have ended: the read will say so
    gid, groups = _groups(uid, like)
    try:
        os.chdir("/")
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise OSError(f"the rights of uid {uid} cannot be taken on: {error.strerror}") from None
    try:
        os.setuid(0)
    except OSError:
        return _Roots(opened)
    raise OSError(f"the rights of uid {uid} cannot be taken on for good: root's could be had back")


def _groups(uid: int, like: int | None) -> tuple[int, list[int]]:
    """Return the group and the further groups of a process of that user, else of the user."""
    if like is not None:
        try:
            with open(f"/proc/{like}/status", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read(1 << 20).splitlines() if b":" in line)
            # The real ones: a setgid program under a server's name must not lend us its group.
            if {int(word) for word in fields[b"Uid"].split()} == {uid}:
                return int(fields[b"Gid"].split()[0]), [int(word) for word in fields[b"Groups"].split()]
        except (OSError, ValueError, KeyError, IndexError):
            pass
    import pwd

    try:
        user = pwd.getpwuid(uid)
        return user.pw_gid, os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return NOBODY, []
