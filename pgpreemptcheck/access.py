"""Access: with whose rights a cluster's files, maps and SQL are read.

Root reads them in one child per cluster owner (owner.py); anybody else, and captures, with the rights at hand.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
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


class LiveAccess(Access):
    """This host: one child per cluster owner where root asks, and one that asks over SQL for each owner."""

    def __init__(self, host: Host, found: Found, *, sql: bool, dsn: str | None, deep: bool) -> None:
        super().__init__(host)
        self._owners: dict[int | None, Owner] = {}
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
                mine = [
                    p for p in found.running if p.uid == Known(uid, p.uid.source if isinstance(p.uid, Known) else "")
                ]
                roots = [p.root for p in mine if p.root is not None]
                like = mine[0].pid if mine else None
                self._owners[uid] = start(uid, like=like, roots=roots, sql=sql and any(asked(p) for p in mine))
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


def open_access(host: Host, found: Found, *, sql: bool, dsn: str | None, deep: bool) -> Access:
    """Return the access to the clusters of a host; children are forked at once, so no thread may run yet."""
    if not host.live:
        return Access(host)
    return LiveAccess(host, found, sql=sql, dsn=dsn, deep=deep)
