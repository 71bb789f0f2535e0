"""Access: with whose rights a cluster's files, maps and SQL are read.

Root reads them in one child per cluster owner (owner.py); anybody else, and captures, with the rights at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from pgpreemptcheck.facts.clusters import Found, Postmaster
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown

Answer = Mapping[str, Any]


class Access:
    """Everything below one host, and SQL answers where they were captured (`sql/PORT.json`)."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __enter__(self) -> Access:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
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
        except ValueError:
            return Unknown(f"{text.source} is not JSON")
        return answer if isinstance(answer, dict) else Unknown(f"{text.source} holds no answers of a server")

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


def open_access(host: Host, found: Found, *, sql: bool, dsn: str | None, deep: bool) -> Access:
    """Return the access to the clusters of a host."""
    return Access(host)
