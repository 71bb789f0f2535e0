"""Access: with whose rights a cluster's files, maps and SQL are read.

Root reads them in one child per cluster owner (owner.py); anybody else, and captures, with the rights at hand.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping, Sequence
from typing import Any

from pgpreemptcheck.facts.clusters import Found, Postmaster
from pgpreemptcheck.host import Host
from pgpreemptcheck.owner import Owner, Pending, discard, start
from pgpreemptcheck.values import Fact, Known, Unknown

Answer = Mapping[str, Any]

ROOT = 0
"""What cannot be root's is read as nobody (owner.py): so too is what belongs to nobody knows whom."""

USUAL_SOCKETS = ("/run/postgresql", "/var/run/postgresql", "/tmp")
"""Where Debian, Red Hat and PostgreSQL itself put sockets: asked where the server's own place is not known."""


class Access:
    """Everything below one host, and SQL answers where they were captured (`sql/PORT.json`)."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __enter__(self) -> Access:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End whatever was started."""

    def files(self, uid: Fact[int], root: str | None) -> Host:
        """Return the files as that user sees them, below `root` (another mount namespace) or on the host itself."""
        return self._host

    def answer(self, postmaster: Postmaster) -> Answer | Unknown:
        """Return what the server said over SQL."""
        if isinstance(postmaster.port, Unknown):
            return Unknown("the capture holds no SQL answers: the port is not known", kind="absent")
        text = self._host.read(f"/sql/{postmaster.port.value}.json")
        if isinstance(text, Unknown):
            return Unknown("the capture holds no SQL answers", "capture with SQL access", kind="absent")
        try:
            answer = json.loads(text.value)
        except (ValueError, RecursionError):
            return Unknown(f"{text.source} is not JSON")
        return answer if isinstance(answer, dict) else Unknown(f"{text.source} holds no answers of a server")

    def given_answer(self) -> Answer | Unknown | None:
        """Return what the server behind --dsn said, None where none was given."""
        return None

    def is_answer_of(self, answer: Answer | Unknown, postmaster: Postmaster) -> bool:
        """Return whether an answer came from this postmaster and no other."""
        return True

    def user_name(self, uid: Fact[int]) -> Fact[str]:
        """Return the name of a user, its number where it has none."""
        if isinstance(uid, Unknown):
            return uid
        text = self._host.read("/etc/passwd")
        if isinstance(text, Known):
            for line in text.value.splitlines():
                parts = line.split(":")
                if len(parts) > 2 and parts[2] == str(uid.value):
                    return Known(parts[0], text.source)
        return Known(str(uid.value), uid.source)


class Owners:
    """The children that read with the rights of cluster owners: one each, started when it is first needed."""

    def __init__(self) -> None:
        self.started: dict[int | None, Owner] = {}

    def files(self, uid: int, running: Sequence[Postmaster]) -> Host:
        """Return this host's files as that user sees them; `running` are the servers that were found."""
        if uid not in self.started:
            self.started[uid] = _start(uid, running)
        return self.started[uid].host()

    def close(self) -> None:
        """End them."""
        for owner in self.started.values():
            owner.close()


def _start(uid: int, running: Sequence[Postmaster], *, sql: bool = False, having: Owner | None = None) -> Owner:
    """Start the child of a user, with the groups of a server of his and into whose containers it must see."""
    mine = _of(uid, running)
    roots = [p.root for p in mine if p.root is not None]
    return start(uid, like=mine[0].pid if mine else None, roots=roots, sql=sql, having=having)


def _of(uid: int, running: Sequence[Postmaster]) -> list[Postmaster]:
    return [p for p in running if isinstance(p.uid, Known) and p.uid.value == uid]


class LiveAccess(Access):
    """This host: one child per cluster owner where root asks, and one that asks over SQL for each owner."""

    def __init__(
        self, host: Host, found: Found, *, sql: bool, dsn: str | None, deep: bool, owners: Owners | None = None
    ) -> None:
        super().__init__(host)
        self._owners: dict[int | None, Owner] = {}
        if owners is not None:
            self._owners.update(owners.started)
        self._pending: dict[int, Pending] = {}
        self._by_dsn: Pending | None = None
        self._names: dict[int, str] = {}

        def asked(postmaster: Postmaster) -> bool:
            return postmaster.disbelieved is None

        uids = {p.uid.value for p in found.running if isinstance(p.uid, Known)}
        stopped = {c.uid.value for c in found.stopped if isinstance(c.uid, Known)}
        try:
            if dsn is not None:
                self._owners[None] = start(sql=True)
                self._by_dsn = self._owners[None].sql(dsn=dsn, deep=deep)
            for uid in sorted(uids | stopped):
                mine = _of(uid, found.running)
                wanted = sql and any(asked(p) for p in mine)
                self._owners[uid] = _start(uid, found.running, sql=wanted, having=self._owners.get(uid))
                for postmaster in filter(asked, mine):
                    self._pending[postmaster.pid] = self._ask(self._owners[uid], postmaster, deep)
        except OSError:
            self.close()
            raise
        finally:
            discard()

    def _ask(self, owner: Owner, postmaster: Postmaster, deep: bool) -> Pending:
        known = isinstance(postmaster.socket_directories, Known)
        directories = postmaster.socket_directories.value if known else ()  # type: ignore[union-attr]
        port = postmaster.port.value if isinstance(postmaster.port, Known) else 5432
        if not directories:  # /var/run is /run on most hosts: each failed login is a line in the server's log
            directories = tuple(dict.fromkeys(os.path.realpath(path) for path in USUAL_SOCKETS))
        return owner.sql(directories=directories, port=port, root=postmaster.root, deep=deep)

    def close(self) -> None:
        for owner in self._owners.values():
            owner.close()

    def files(self, uid: Fact[int], root: str | None) -> Host:
        number = uid.value if isinstance(uid, Known) else ROOT
        if number not in self._owners:
            self._owners[number] = start(number)
        return self._owners[number].host(root)

    def answer(self, postmaster: Postmaster) -> Answer | Unknown:
        given = self.given_answer()
        if given is not None and self.is_answer_of(given, postmaster):
            return given
        pending = self._pending.get(postmaster.pid)
        if pending is None:
            return postmaster.disbelieved or Unknown(
                "whose server it is is not known, so it was not asked", "run as root"
            )
        answer = pending.answer()
        if not isinstance(answer, Unknown) and "refused" not in answer and not self.is_answer_of(answer, postmaster):
            return Unknown("another server answered at its socket", "give its address with --dsn")
        return answer

    def given_answer(self) -> Answer | Unknown | None:
        """Return what the server behind --dsn said, None where none was given."""
        if self._by_dsn is None:
            return None
        if self._given is None:
            self._given = self._by_dsn.answer()
        return self._given

    _given: Answer | Unknown | None = None

    def is_answer_of(self, answer: Answer | Unknown, postmaster: Postmaster) -> bool:
        """Return whether an answer came from this postmaster and no other."""
        from pgpreemptcheck.facts import server

        directory, started = postmaster.data_directory, postmaster.started
        return server.belongs_to(
            answer,
            postmaster.pid,
            directory.value if isinstance(directory, Known) else None,
            started.value if isinstance(started, Known) else None,
        )

    def user_name(self, uid: Fact[int]) -> Fact[str]:
        if isinstance(uid, Unknown):
            return uid
        try:
            return Known(pwd.getpwuid(uid.value).pw_name, uid.source)
        except KeyError:
            return Known(str(uid.value), uid.source)


def open_access(
    host: Host, found: Found, *, sql: bool, dsn: str | None, deep: bool, owners: Owners | None = None
) -> Access:
    """Return the access to the clusters of a host; children are forked at once, so no thread may run yet.

    `owners` are those that finding the clusters has started: they are used further, and end with the access.
    """
    if not host.live:
        return Access(host)
    return LiveAccess(host, found, sql=sql, dsn=dsn, deep=deep, owners=owners)
