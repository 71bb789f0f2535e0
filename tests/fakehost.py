"""A host made of a dict, for unit tests: path -> bytes or text, output of commands under their capture's names."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from pgpreemptcheck.host import FileStatus, Host, gap
from pgpreemptcheck.values import Fact, Known, Unknown


class FakeHost(Host):
    """`files` maps absolute paths to contents, an errno, or a link target (`("->", target)`).

    `owners` maps paths to the uid of what lies there and below; all else is `uid`'s.
    `dmesg.txt`, `journal.txt` and `uname.txt` are what the commands print. `asked` notes every output asked for.
    """

    description = "a host in a test"

    def __init__(
        self,
        files: Mapping[str, str | bytes | int | tuple[str, str]] | None = None,
        *,
        live: bool = False,
        modified: float = 2e9,
        uid: int = 0,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self.files = dict(files or {})
        self.live = live
        self.modified = modified
        self.uid = uid
        self.owners = dict(owners or {})
        self.asked: list[str] = []

    def _entry(self, path: str) -> bytes | tuple[str, str]:
        entry = self.files.get(path)
        if isinstance(entry, int):
            raise OSError(entry, os.strerror(entry), path)
        if entry is None:
            raise OSError(errno.EISDIR if self._below(path) else errno.ENOENT, "no such file", path)
        return entry.encode() if isinstance(entry, str) else entry

    def _below(self, path: str) -> set[str]:
        prefix = path.rstrip("/") + "/"
        return {name[len(prefix) :].split("/")[0] for name in self.files if name.startswith(prefix)}

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        entry = self._entry(path)
        if isinstance(entry, tuple):
            return self._fetch(entry[1], offset, length)
        return entry[offset : offset + length]

    def _names(self, path: str) -> list[str]:
        if isinstance(self.files.get(path), int):
            self._entry(path)
        names = self._below(path)
        if not names:
            raise OSError(errno.ENOENT, "no such folder", path)
        return list(names)

    def _target(self, path: str) -> str:
        entry = self._entry(path)
        if isinstance(entry, tuple):
            return entry[1]
        raise OSError(errno.EINVAL, "not a link", path)

    def _status(self, path: str) -> FileStatus:
        if path not in self.files and self._below(path):
            return FileStatus(True, self._owner(path), 0o755, 0, self.modified)
        entry = self._entry(path)
        if isinstance(entry, tuple):
            return self._status(entry[1])
        return FileStatus(False, self._owner(path), 0o644, len(entry), self.modified)

    def _owner(self, path: str) -> int:
        """Return the owner that the longest path says that this one is or lies below."""
        places = [place for place in self.owners if f"{path}/".startswith(f"{place}/")]
        return self.owners[max(places, key=len)] if places else self.uid

    def output(self, command: str) -> Fact[str]:
        self.asked.append(command)
        entry = self.files.get(f"{command}.txt")
        if isinstance(entry, str):
            return Known(entry, command)
        if isinstance(entry, int):
            return gap(command, OSError(entry, os.strerror(entry)), uid=1000)
        return Unknown(f"no {command} here", kind="absent")

    def _gap(self, path: str, error: OSError) -> Unknown:
        return gap(path, error, uid=0)
