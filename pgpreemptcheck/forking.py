"""Forking a child with a pipe each way.

It imports nothing but os, so that the child that asks over SQL is forked before all else: its import of the SQL driver
takes longer than the rest of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

Forked = tuple[int, int, int]
"""The process ID, and the ends of the pipes to the child and from it; both are not blocking."""
Serve = Callable[[int, int], None]
"""What a child does with its ends of the pipes, for requests and for answers."""

_prepared: Forked | None = None


def fork(serve: Serve) -> Forked:
    """Fork a child that serves and then ends. Raises OSError where no process, memory or file is to be had."""
    opened: list[int] = []
    try:
        opened += os.pipe2(os.O_CLOEXEC)
        opened += os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    requests, to, from_, answers = opened
    if pid == 0:
        try:
            serve(requests, answers)
        finally:
            os._exit(0)
    os.set_blocking(to, False)
    os.set_blocking(from_, False)
    os.close(requests)
    os.close(answers)
    return pid, to, from_


def ask_over_sql(requests: int, answers: int) -> None:
    """Serve as the child that asks over SQL."""
    from pgpreemptcheck import ownerchild

    ownerchild.live(ownerchild.SqlServer, requests, answers)


def prepare() -> None:
    """Fork the first child that will be wanted for SQL, so that its imports run while clusters are looked for."""
    global _prepared
    if _prepared is None:
        try:
            _prepared = fork(ask_over_sql)
        except OSError:
            pass  # whoever wants one will try again, and say why there is none


def take() -> Forked | None:
    """Return the child that `prepare` made, once."""
    global _prepared
    found, _prepared = _prepared, None
    return found
