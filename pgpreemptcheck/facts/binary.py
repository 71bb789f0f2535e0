"""The running server's program: does it have the buffer freelist?

PostgreSQL up to 18 hands out free buffers from a list behind a spinlock in `StrategyGetBuffer`; 19 removed the list
(commit 2c789405275, 2025-09-05). The server exports its functions to extensions, so the dynamic symbols of the
program that runs tell, whatever a version string or a vendor's patches say.
"""

from __future__ import annotations

from pgpreemptcheck.elf import MalformedError, Symbols
from pgpreemptcheck.facts import notes
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown

LAST_MAJOR_WITH_FREELIST = 18

_FREELIST = ("have_free_buffer", "StrategyFreeBuffer")
_SERVER = "StrategyGetBuffer"

_looked_at: dict[tuple[str, int, float], tuple[bool, bool] | str] = {}
"""What live programs hold, by path, size and modification time: a hundred clusters of one build take one look."""


def freelist(host: Host, pid: int, major: Fact[int]) -> Fact[bool]:
    """Return whether the running server has the buffer freelist.

    Measured off the dynamic symbols of `/proc/PID/exe` (the running file, even where an upgrade has replaced it on
    disk). Where that is not the server (a loader or a wrapper runs it) or cannot be read, inferred from `major`.
    """
    answer = _by_live_program(host, pid) if host.live else _by_capture(host, pid)
    return answer if isinstance(answer, Known) else by_major(major, answer)


def by_major(major: Fact[int], why: Unknown) -> Fact[bool]:
    """Return what the version lets expect, where the program cannot tell: `why` says why not."""
    if isinstance(major, Unknown):
        return Unknown(f"{why.reason}; its version is not known either: {major.reason}", why.hint or major.hint)
    source = f"PostgreSQL {major.value} ({major.source}); {why.reason}"
    return Known(major.value <= LAST_MAJOR_WITH_FREELIST, source, "inferred")


def _judge(has_server: bool, has_freelist: bool, path: str) -> Known[bool] | Unknown:
    if has_freelist:
        return Known(True, f"{path} (exports {_FREELIST[0]} or {_FREELIST[1]})")
    if has_server:
        return Known(False, f"{path} (exports {_SERVER}, but neither {_FREELIST[0]} nor {_FREELIST[1]})")
    return Unknown(f"{path} is not the server itself (it exports no {_SERVER})")


def _by_live_program(host: Host, pid: int) -> Known[bool] | Unknown:
    path = f"/proc/{pid}/exe"
    target, status = host.link(path), host.status(path)
    if isinstance(target, Unknown):
        return target
    if isinstance(status, Unknown):
        return status
    name = f"{path} -> {target.value}"
    key = (target.value, status.value.size, status.value.modified)
    found = _looked_at.get(key)
    if found is None:
        found = _looked_at[key] = _look(host, path)
    if isinstance(found, str):
        return Unknown(f"{name} cannot be read as a program: {found}")
    return _judge(*found, name)


def _look(host: Host, path: str) -> tuple[bool, bool] | str:
    """Return whether the program exports the server's own symbol, and one of the freelist; or what is wrong."""

    def fetch(offset: int, length: int) -> bytes:
        data = host.read_range(path, offset, length)
        if isinstance(data, Unknown):
            raise MalformedError(data.reason)
        return data.value

    try:
        symbols = Symbols(fetch)
        return symbols.defines(_SERVER), any(symbols.defines(name) for name in _FREELIST)
    except MalformedError as error:
        return str(error)


def _by_capture(host: Host, pid: int) -> Known[bool] | Unknown:
    """Return what was noted of the program when the host was captured."""
    noted = notes.read(host, pid)
    if isinstance(noted, Unknown):
        return noted
    answer, symbols = noted.value.get("freelist"), noted.value.get("symbols")
    if isinstance(answer, bool):
        return Known(answer, f"{noted.source} (freelist)")
    if isinstance(symbols, list):
        return _judge(_SERVER in symbols, any(name in symbols for name in _FREELIST), noted.source)
    return Unknown(f"{noted.source} says nothing of the program's symbols")
