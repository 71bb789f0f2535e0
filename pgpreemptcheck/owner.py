"""What belongs to a cluster's owner, read with that owner's rights and no more.

Root reads files that other users wrote: an `include '/etc/shadow'` in a postgresql.conf must be refused as it is to
the server. So when this process is root, one forked child per owner takes on the owner's user, group and groups for
good, and reads for it; a second one, forked beside it where SQL is wanted, imports the driver first (it could not read
Python's own files after the switch) and then talks to the servers. Both serve requests over pipes, and what they say
is not trusted: sizes and times are bounded, and anything malformed is a gap. When this process is not root there is
nothing to switch: files are read here, and only the SQL child is forked, so that its import costs no time here.

Fork before any thread: `start` must be called while this process has one thread.
"""

from __future__ import annotations

import errno
import json
import os
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pgpreemptcheck import procmap
from pgpreemptcheck.host import ContainerHost, FileStatus, Host, LiveHost, gap
from pgpreemptcheck.values import Fact, Unknown

READ_SECONDS = 5.0
"""How long one read may take before the child counts as dead."""
SQL_SECONDS = 15.0
"""How long all SQL of one cluster may take, the driver's import included."""

_HEADER = struct.Struct(">II")  # bytes of JSON, bytes after it
_MAX_JSON = 8 << 20
_MAX_BODY = 64 << 20
_MAX_REQUEST = 1 << 16
_NOBODY = 65534


class _ChildError(OSError):
    """No answer: the child died, hung, was malformed, or could not take on the rights. `str()` says which."""


# the parent's side ------------------------------------------------------------------------------


class Owner:
    """The rights of one owner: `host()` to read files, `sql()` to ask servers. `close()` it, or use `with`."""

    def __init__(self, uid: int | None, files: _Child | None, sql: _Child | None) -> None:
        self.uid = uid
        """Whose rights are taken on; None where they are this process's own."""
        self._files = files
        self._sql = sql

    def host(self, root: str | None = None) -> Host:
        """Return the files that the owner can read; below `root` (`/proc/PID/root`) only, if one is given."""
        if self._files is not None and self.uid is not None:
            return OwnerHost(self._files, self.uid, root)
        return LiveHost() if root is None else ContainerHost(root)

    def sql(
        self,
        *,
        directories: Sequence[str] = (),
        port: int = 5432,
        users: Sequence[str] = (),
        root: str | None = None,
        dsn: str | None = None,
        deep: bool = False,
    ) -> Pending:
        """Ask a server, at once; take the answer later.

        The server is the one whose socket is in one of `directories` (below `root`), asked as the first of `users`
        (default: the owner's name, then postgres; below a root: postgres) that it lets in; or the one that `dsn`
        names. The answer goes to `facts.server.facts`.
        """
        if self._sql is None:
            return Pending(None, Unknown("SQL was not asked for", "run it without --no-sql", kind="unsupported"))
        request = {
            "directories": list(directories),
            "port": port,
            "users": list(users),
            "root": root,
            "dsn": dsn,
            "deep": deep,
        }
        return self._sql.ask(request, time.monotonic() + SQL_SECONDS)

    def close(self) -> None:
        """End the children, whatever they are doing."""
        for child in (self._files, self._sql):
            if child is not None:
                child.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """An answer to come."""

    def __init__(self, child: _Child | None, what: int | Unknown, deadline: float = 0.0) -> None:
        self._child = child
        self._what = what
        self._deadline = deadline

    def answer(self) -> Mapping[str, object] | Unknown:
        """Return the answer, waiting for it, or why there is none."""
        if isinstance(self._what, int) and self._child is not None:
            try:
                message, _ = self._child.collect(self._what, self._deadline)
                self._what = Unknown("the answer was taken before")
                answer = message.get("answer")
                return answer if isinstance(answer, dict) else Unknown("the process that asks over SQL talks nonsense")
            except OSError as error:
                self._what = Unknown(str(error), "check that the server answers: psql -c 'SELECT 1'")
        assert isinstance(self._what, Unknown)
        return self._what


_KEPT_BYTES = 1 << 16
"""A read of no more than that is kept: each costs a round trip to the child."""


class OwnerHost(Host):
    """This host's files with the rights of one user, through that user's child."""

    live = True

    def __init__(self, child: _Child, uid: int, root: str | None) -> None:
        self._child = child
        self._uid = uid
        self._root = root
        self.description = f"this host as uid {uid}" if root is None else f"the file system at {root} as uid {uid}"

    def _ask(self, what: str, path: str, *arguments: int) -> tuple[Any, bytes]:
        request = {"do": what, "path": path, "arguments": arguments, "root": self._root}
        deadline = time.monotonic() + READ_SECONDS
        pending = self._child.ask(request, deadline)
        if isinstance(pending._what, Unknown):
            raise _ChildError(pending._what.reason)
        message, body = self._child.collect(pending._what, deadline)
        number = message.get("errno")
        if isinstance(number, int) and 0 < number < 4096:
            raise OSError(number, str(message.get("why"))[:200], path)
        return message.get("answer"), body

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        key = (self._root, path, offset, length)
        if key in self._child.kept:
            return self._child.kept[key]
        _, body = self._ask("read", path, offset, length)
        if len(body) > length:
            raise self._child.fail("sent more than was asked for")
        if len(body) <= _KEPT_BYTES:
            self._child.kept[key] = body
        return body

    def _names(self, path: str) -> list[str]:
        answer, _ = self._ask("list", path)
        if isinstance(answer, list) and all(isinstance(name, str) and name and "/" not in name for name in answer):
            return answer
        raise self._child.fail("talks nonsense")

    def _target(self, path: str) -> str:
        answer, _ = self._ask("link", path)
        if isinstance(answer, str):
            return answer
        raise self._child.fail("talks nonsense")

    def _status(self, path: str) -> FileStatus:
        answer, _ = self._ask("status", path)
        try:
            directory, uid, mode, size, modified = answer
            return FileStatus(bool(directory), int(uid), int(mode), int(size), float(modified))
        except (TypeError, ValueError, OverflowError):
            raise self._child.fail("talks nonsense") from None

    def output(self, command: str) -> Fact[str]:
        return Unknown(f"{command} is not run with a cluster owner's rights", kind="unsupported")

    def mapping_page_bytes(self, pid: int, address: int) -> Fact[int]:
        return procmap.fact(pid, address, self._page_bytes, self._uid)

    def _page_bytes(self, pid: int, address: int) -> int:
        answer, _ = self._ask("procmap", "", pid, address)
        if isinstance(answer, int):
            return answer
        raise self._child.fail("talks nonsense")

    def _gap(self, path: str, error: OSError) -> Unknown:
        if isinstance(error, _ChildError):
            return Unknown(f"{path}: {error}")
        found = gap(path, error, self._uid)
        if found.kind != "permission":
            return found
        kernel = path.startswith(("/proc/", "/sys/"))
        return Unknown(found.reason, "" if kernel else f"let the cluster's owner (uid {self._uid}) read it", found.kind)


class _Child:
    """A forked child and the pipes to it. Once it fails it stays failed."""

    def __init__(self, pid: int, to: int, from_: int, name: str, *, in_order: bool, failure: str = "") -> None:
        self._pid = pid
        self._in_order = in_order  # a late answer holds up all that follow
        self._to = to
        self._from = from_
        self._name = name
        self._sent = 0
        self._buffer = bytearray()
        self._answers: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._failure = ""
        self.kept: dict[tuple[str | None, str, int, int], bytes] = {}
        """What was read, by root, path, offset and length: several readers look at one file, and see the same."""
        if failure:
            self.fail(failure)

    def ask(self, request: Mapping[str, object], deadline: float) -> Pending:
        """Send a request; its answer is for `collect`."""
        if not self._failure:
            self._sent += 1
            data = json.dumps({**request, "id": self._sent}).encode()
            if len(data) > _MAX_REQUEST:
                return Pending(None, Unknown("the request is too long to be one"))
            try:
                data = _HEADER.pack(len(data), 0) + data
                if os.write(self._to, data) != len(data):
                    self.fail("does not listen")
            except BlockingIOError:
                self.fail("does not listen")
            except OSError:
                self.fail("has died")
        if self._failure:
            return Pending(None, Unknown(self._failure))
        return Pending(self, self._sent, deadline)

    def collect(self, number: int, deadline: float) -> tuple[dict[str, Any], bytes]:
        """Return the JSON and the bytes of one answer. Raises _ChildError."""
        while number not in self._answers:
            if self._failure:
                raise _ChildError(self._failure)
            self._receive(deadline)
        message, body = self._answers.pop(number)
        failed = message.get("failed")
        if failed is not None:
            raise _ChildError(str(failed)[:500])
        return message, body

    def _receive(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if self._in_order:
                raise self.fail("gave no answer in time")
            raise _ChildError("no answer over SQL came in time")
        try:
            chunk = os.read(self._from, 1 << 20)
        except BlockingIOError:
            return
        if not chunk:
            raise self.fail("has died")
        self._buffer += chunk
        while len(self._buffer) >= _HEADER.size:
            json_length, body_length = _HEADER.unpack_from(self._buffer)
            if json_length > _MAX_JSON or body_length > _MAX_BODY:
                raise self.fail("sent more than was asked for")
            end = _HEADER.size + json_length + body_length
            if len(self._buffer) < end:
                return
            text = bytes(self._buffer[_HEADER.size : _HEADER.size + json_length])
            body = bytes(self._buffer[_HEADER.size + json_length : end])
            del self._buffer[:end]
            try:
                message = json.loads(text)
                number = message["id"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise self.fail("talks nonsense") from None
            if not isinstance(message, dict) or not isinstance(number, int) or not 0 < number <= self._sent:
                raise self.fail("talks nonsense")
            self._answers[number] = message, body

    def fail(self, why: str) -> _ChildError:
        """Note that nothing can be had from this child any more, and return the error that says so."""
        if not self._failure:
            self._failure = f"the process that {self._name} {why}"
        self._buffer.clear()
        self.kept.clear()
        return _ChildError(self._failure)

    def close(self) -> None:
        if self._pid == 0:
            return
        os.close(self._to)
        os.close(self._from)
        self.fail("was ended")
        try:
            os.kill(self._pid, 9)
            for _ in range(1000):  # a process in uninterruptible sleep takes no signal: it is not waited for
                if os.waitpid(self._pid, os.WNOHANG)[0]:
                    break
                time.sleep(0.001)
        except (ProcessLookupError, ChildProcessError):
            pass
        self._pid = 0


def start(
    uid: int | None = None,
    *,
    like: int | None = None,
    roots: Sequence[str] = (),
    sql: bool = False,
    having: Owner | None = None,
) -> Owner:
    """Fork what is needed to read with the rights of `uid`, and return at once.

    `uid` None: this process's own rights; so it is too where this process is not root. PostgreSQL does not run as
    root, so what seems to be root's is read as nobody: a link in a writable place can make anything seem so. Group
    and groups are those of the process `like` (the postmaster), else those of the user database. `roots` are the
    container roots (`/proc/PID/root`) that will be asked for: they are opened before the rights are dropped, since
    the owner itself may not be let in from outside. `sql`: servers will be asked, so the driver is imported at once.
    `having` was started before for the same user, process and roots: what it reads with is used further. Where no
    process can be forked, all that it was to do is a gap that says so.
    """
    if os.geteuid() != 0:
        uid = None
    elif uid == 0:
        uid, like = _NOBODY, None
    asks = files = None
    if sql:
        global _prepared
        asks, _prepared = _prepared or _fork_sql(), None
        asks.ask({"do": "enter", "uid": uid, "like": like, "roots": list(roots)}, 0.0)
    if having is not None:
        files = having._files
    elif uid is not None:
        files = _fork(lambda: _FileServer(_enter(uid, like, roots)), f"reads as uid {uid}", in_order=True)
    return Owner(uid, files, asks)


_prepared: _Child | None = None


def prepare() -> None:
    """Fork the SQL child of the first `start` to come, so that its import runs while clusters are still looked for."""
    global _prepared
    _prepared = _prepared or _fork_sql()


def discard() -> None:
    """End the child that `prepare` made, if no `start` took it."""
    global _prepared
    if _prepared is not None:
        _prepared.close()
    _prepared = None


def _fork_sql() -> _Child:
    return _fork(_SqlServer, "asks over SQL", in_order=False)


def _fork(make: Callable[[], _FileServer | _SqlServer], name: str, *, in_order: bool) -> _Child:
    opened: list[int] = []
    try:
        opened += os.pipe2(os.O_CLOEXEC)
        opened += os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
    except OSError as error:  # no more processes, memory or files are to be had
        for fd in opened:
            os.close(fd)
        return _Child(0, -1, -1, name, in_order=in_order, failure=f"cannot be started: {error.strerror}")
    requests, to, from_, answers = opened
    os.set_blocking(to, False)
    os.set_blocking(from_, False)
    if pid == 0:
        _live(make, requests, answers)
    os.close(requests)
    os.close(answers)
    return _Child(pid, to, from_, name, in_order=in_order)


# the child's side -------------------------------------------------------------------------------


def _live(make: Callable[[], _FileServer | _SqlServer], requests: int, answers: int) -> NoReturn:
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


def _serve(make: Callable[[], _FileServer | _SqlServer], requests: int, answers: int) -> None:
    def send(message: Mapping[str, object], body: bytes = b"") -> None:
        text = json.dumps(message).encode()
        if len(text) > _MAX_JSON or len(body) > _MAX_BODY:
            why = os.strerror(errno.EFBIG)
            text, body = json.dumps({"id": message["id"], "errno": errno.EFBIG, "why": why}).encode(), b""
        data = memoryview(_HEADER.pack(len(text), len(body)) + text + body)
        while data:
            data = data[os.write(answers, data) :]

    server: _FileServer | _SqlServer | None = None
    failed = ""
    try:
        server = make()
    except OSError as error:
        failed = str(error)
    while True:
        length, _ = _HEADER.unpack(_read_exactly(requests, _HEADER.size))
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


class _FileServer:
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


class _SqlServer:
    """Asks servers, each request in a thread of its own: one that hangs holds up no other."""

    _MAX_THREADS = 32
    _MAX_DATA_BYTES = 256 << 20

    def __init__(self) -> None:
        import pwd  # noqa: F401 - once the rights are dropped, Python's own files may be out of reach
        import resource
        import threading

        from pgpreemptcheck.facts import server

        server.import_driver()
        self._server = server
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

    def _enter(self, uid: int | None, like: int | None, roots: Sequence[str]) -> None:
        self._server.clean_environment(trusted=os.geteuid() != 0, home=uid is None)
        self._name = os.environ.get("PGUSER") or _user_name(os.geteuid() if uid is None else uid)
        try:
            self._roots = _enter(uid, like, roots)
            self._failed = ""
        except OSError as error:
            self._failed = str(error)

    def serve(self, request: dict[str, Any], send: _Send) -> None:
        if request.get("do") == "enter":
            self._enter(request["uid"], request["like"], request["roots"])
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
        return self._server.ask(
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


def _enter(uid: int | None, like: int | None, roots: Sequence[str]) -> _Roots:
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
        return _NOBODY, []
