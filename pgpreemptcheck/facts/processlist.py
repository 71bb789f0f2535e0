"""What `ps` printed of every process, as a sosreport keeps it (sos 3 and 4, report/plugins/process.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Known, is_number, record

_FOLDER = "/sos_commands/process"
_MAX_BYTES = 32 << 20
_NAME = re.compile(r"ps_(?:-?(?:aux|alx|elf|ef)\w*|axo_flags\w*.*)\Z", re.I)
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@record
class Listed:
    """One process in the output of ps: its command line with spaces between the arguments."""

    command: str
    parent: int | None  # None: this form of output does not have it
    uid: int | None
    source: str
    cut: bool
    """Whether ps may have cut the command line off: without `ww` it does so at the width of a screen."""


def read(host: Host) -> dict[int, Listed]:
    """Return the processes that the captured outputs of ps list, none where there is no such output."""
    names = host.list(_FOLDER)
    found: dict[int, Listed] = {}
    uids: dict[str, int] = {}
    for name in names.value if isinstance(names, Known) else ():
        if not _NAME.match(name) or "c" in name.partition("aux")[2]:  # `c`: names in place of command lines
            continue
        uids = uids or _uids(host)
        text = host.read(f"{_FOLDER}/{name}", _MAX_BYTES)
        for pid, listed in _lines(text.value, text.source, uids) if isinstance(text, Known) else ():
            before = found.get(pid, listed)
            best = listed if before.cut and not listed.cut else before
            parent = listed.parent if before.parent is None else before.parent
            found[pid] = replace(best, parent=parent, uid=listed.uid if before.uid is None else before.uid)
    return found


def _lines(text: str, source: str, uids: dict[str, int]) -> Iterator[tuple[int, Listed]]:
    """Yield (PID, process) of one output. The line of titles says which columns there are; the last one has spaces."""
    width = 0 if re.search(r"/ps_a\w+ww", source) else max(map(len, text.split("\n")))
    lines = iter(text.split("\n"))
    titles: list[str] = []
    for line in lines:
        titles = line.split()
        if "PID" in titles and titles[-1] in ("COMMAND", "CMD"):
            break
    date = titles.index("STARTED") if "STARTED" in titles else None
    for line in lines:
        words = line.split(maxsplit=len(titles) + 3)
        if date is not None and len(words) > date and words[date] in _DAYS:  # a date of five words under one title
            words[date : date + 5] = ["-"]
        else:
            words = line.split(maxsplit=len(titles) - 1)
        fields = dict(zip(titles, words, strict=False))
        command = fields.get(titles[-1] if titles else "", "").lstrip("\\_| ").rstrip()
        if not is_number(fields.get("PID", "")) or not command or command.endswith("<defunct>"):
            continue  # a thread, or a dead one
        parent, user = fields.get("PPID", ""), fields.get("UID") or fields.get("USER", "")
        uid = int(user) if is_number(user) else uids.get(user)
        yield (
            int(fields["PID"]),
            Listed(command, int(parent) if is_number(parent) else None, uid, source, 0 < width <= len(line)),
        )


def _uids(host: Host) -> dict[str, int]:
    text = host.read("/etc/passwd")
    entries = (line.split(":") for line in text.value.split("\n")) if isinstance(text, Known) else ()
    return {entry[0]: int(entry[2]) for entry in entries if len(entry) > 2 and is_number(entry[2])}
