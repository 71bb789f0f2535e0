"""The program's entry, for the console script and `python -m pgpreemptcheck`."""

import _signal  # type: ignore[import-not-found]  # the module signal takes a millisecond more to import
import gc
import os
import sys

INTERRUPTED = 130
"""What a shell says of a program that SIGINT ended: 128 and its number."""

# Until the command line takes over (cli.py), Ctrl-C ends the run at once: nothing could be left half done yet.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else it is ignored, as under nohup
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(INTERRUPTED))

# A run lasts a fraction of a second: without collecting cycles it starts a sixth quicker, and needs little more memory.
gc.disable()


def asks_servers(arguments: list[str]) -> bool:
    """Return whether a command line looks like one that will ask servers over SQL: a guess that only costs time."""
    command = next((word for word in arguments if not word.startswith("-")), "check")
    without = {"--no-sql", "--root", "--version", "--help", "-h"}
    return command in ("check", "facts") and not any(word.partition("=")[0] in without for word in arguments)


if asks_servers(sys.argv[1:]):
    from pgpreemptcheck import forking

    forking.prepare()  # the import of the SQL driver takes longer than all else: it begins here, in a child

from typing import NoReturn  # noqa: E402

from pgpreemptcheck import cli  # noqa: E402


def main() -> NoReturn:
    """Run the command line, and end without taking Python down piece by piece: that takes a tenth of a run."""
    code: object = cli.INTERNAL_ERROR
    try:
        cli.main()
    except SystemExit as done:
        code = done.code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, or nobody reads it any more
            pass
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
