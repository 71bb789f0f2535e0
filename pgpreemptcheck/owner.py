"""What belongs to a cluster's owner, read with that owner's rights and no more.

Root reads files that other users wrote: an `include '/etc/shadow'` in a postgresql.conf must be refused as it is to
the server. So when this process is root, one forked child per owner takes on the owner's user, group and groups for
good (ownerchild.py), and reads for it; a second one, forked beside it where SQL is wanted, imports the driver first (it
could not read Python's own files after the switch) and then talks to the servers. Both serve requests over pipes, and
what they say is not trusted: sizes and times are bounded, and anything malformed is a gap. When this process is not
root there is nothing to switch: files are read here, and only the SQL child is forked, so that its import costs no
time here.

Fork before any thread: `start` must be called while this process has one thread.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pgpreemptcheck import forking, procmap
from pgpreemptcheck.host import ContainerHost, FileStatus, Host, LiveHost, gap
from pgpreemptcheck.ownerchild import HEADER, MAX_BODY, MAX_JSON, NOBODY, FileServer, enter, live
from pgpreemptcheck.values import Fact, Unknown

READ_SECONDS = 5.0
"""How long one read may take before the child counts as dead."""
SQL_SECONDS = 15.0
"""How long all SQL of one cluster may take, the driver's import included."""

_MAX_REQUEST = 1 << 16


class _ChildError(OSError):
    """No answer: the child died, hung, was malformed, or could not take on the rights. `str()` says which."""


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
                data = HEADER.pack(len(data), 0) + data
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
        while len(self._buffer) >= HEADER.size:
            json_length, body_length = HEADER.unpack_from(self._buffer)
            if json_length > MAX_JSON or body_length > MAX_BODY:
                raise self.fail("sent more than was asked for")
            end = HEADER.size + json_length + body_length
            if len(self._buffer) < end:
                return
            text = bytes(self._buffer[HEADER.size : HEADER.size + json_length])
            body = bytes(self._buffer[HEADER.size + json_length : end])
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
        uid, like = NOBODY, None
    asks = files = None
    if sql:
        asks = _fork(forking.ask_over_sql, _ASKS, in_order=False, forked=forking.take())
        asks.ask({"do": "enter", "uid": uid, "like": like, "roots": list(roots)}, 0.0)
    if having is not None:
        files = having._files
    elif uid is not None:
        user = uid

        def read(requests: int, answers: int) -> None:
            live(lambda: FileServer(enter(user, like, roots)), requests, answers)

        files = _fork(read, f"reads as uid {uid}", in_order=True)
    return Owner(uid, files, asks)


def discard() -> None:
    """End the child that was prepared for SQL, if no `start` took it."""
    forked = forking.take()
    if forked is not None:
        _Child(*forked, _ASKS, in_order=False).close()


_ASKS = "asks over SQL"


def _fork(serve: forking.Serve, name: str, *, in_order: bool, forked: forking.Forked | None = None) -> _Child:
    try:
        return _Child(*(forked or forking.fork(serve)), name, in_order=in_order)
    except OSError as error:
        return _Child(0, -1, -1, name, in_order=in_order, failure=f"cannot be started: {error.strerror}")
