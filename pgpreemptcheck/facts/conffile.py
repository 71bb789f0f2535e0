"""The grammar of postgresql.conf, as PostgreSQL 13 to 19 read it: lines, quoting, includes, and its own complaints.

Follows src/backend/utils/misc/guc-file.l and conffiles.c (PostgreSQL 13 to 19), whose answers are the same in all
these majors but for the way paths are tidied up. Nothing here knows any setting: see file_settings.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Known, Unknown, record

Rights = Literal["server", "owner", "other"]
"""With whose rights files are read: exactly the server's; its user's, but perhaps not with all its groups; others."""

MAX_DEPTH = 10
"""CONF_FILE_MAX_DEPTH: an include nested deeper is refused."""

_MAX_SYNTAX_ERRORS = 100  # ParseConfigFp gives a file up after so many
_MAX_FILES = 1000  # our own bounds: two files that include each other twice make 2^10 reads
_MAX_BYTES = 16 << 20  # of all files together

_WORD = rb"[A-Za-z_\x80-\xff][A-Za-z0-9_\x80-\xff]*"
_WORD_GOES_ON = rb"[A-Za-z0-9_\x80-\xff\-._:/]"
_UNQUOTED = rb"[A-Za-z_\x80-\xff]" + _WORD_GOES_ON + rb"*"
_STRING = rb"'(?:[^'\\\n]|\\[^\n]|'')*'"
_INTEGER = rb"[+-]?(?:0x[0-9A-Fa-f]+|[0-9]+)[A-Za-z]*"
_REAL = rb"[+-]?[0-9]*\.[0-9]*(?:[Ee][+-]?[0-9]+)?"

# A whole line that is right: nothing, or `name [=] value`, then perhaps a comment. flex takes the longest match, so a
# word must not go on, and `a.b` is a qualified name, which is no value.
_GOOD_LINE = re.compile(
    rb"[ \t\r]*(?:(?P<name>" + _WORD + rb"(?:\." + _WORD + rb")?)(?!" + _WORD_GOES_ON + rb")"
    rb"[ \t\r]*=?[ \t\r]*"
    rb"(?P<value>" + _STRING + rb"|(?!" + _WORD + rb"\." + _WORD + rb"(?!" + _WORD_GOES_ON + rb"))" + _UNQUOTED
    + rb"|" + _INTEGER + rb"|" + _REAL + rb")[ \t\r]*)?(?:#[^\n]*)?(?:\n|\Z)"
)  # fmt: skip

_TOKENS = (  # in flex's order: the longest wins, then the first; compiled only where a line is wrong
    ("id", _WORD),
    ("qualified", _WORD + rb"\." + _WORD),
    ("string", _STRING),
    ("unquoted", _UNQUOTED),
    ("integer", _INTEGER),
    ("real", _REAL),
    ("equals", rb"="),
    ("error", rb"[^\n]"),
)
_VALUE_TOKENS = ("id", "string", "integer", "real", "unquoted")


@record
class Entry:
    """One line that sets something. `value` is None where the line is refused after its name."""

    name: str
    value: str | None
    file: str
    line: int


@record
class Complaint:
    """What PostgreSQL objects to: its message, and the file and line it blames (None where it names none)."""

    message: str
    file: str | None
    line: int | None


class Reading:
    """What a file and all its includes say, in order.

    `complaints` are the syntax and include errors. `gaps` are what could not be read, each with the number of entries
    before it: an entry after a gap wins over it, one before it may be overridden in it. `failed` holds the same number
    for every place where lines were lost for the server itself (an include that failed, a file given up).
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.complaints: list[Complaint] = []
        self.gaps: list[tuple[int, Unknown]] = []
        self.failed: list[tuple[int, str]] = []
        self.files: list[str] = []
        self.directories: list[str] = []

    def complain(self, message: str, file: str | None, line: int | None, *, lost: bool = True) -> None:
        self.complaints.append(Complaint(message, file, line))
        if lost:
            self.failed.append((len(self.entries), message))


def read(host: Host, path: str, major: int, reading: Reading, *, strict: bool = True, rights: Rights = "other") -> None:
    """Add what the file at `path` (absolute, as on the host) and its includes say to `reading`.

    `rights`: what `host` reads with. What the server, too, may not read is a complaint of its, not a gap of ours.
    """
    _Reader(host, major, reading, rights).file(path, None, None, 0, strict)


class _Reader:
    def __init__(self, host: Host, major: int, reading: Reading, rights: Rights) -> None:
        self.host = host
        self.major = major
        self.reading = reading
        self.rights = rights
        self.bytes = 0

    def file(self, name: str, parent: str | None, line: int | None, depth: int, strict: bool) -> bool:
        """ParseConfigFile: returns whether PostgreSQL is content."""
        reading = self.reading
        if not name.strip(" \t\r\n"):
            reading.complain(f'empty configuration file name: "{name}"', parent, line)
            return False
        if depth > MAX_DEPTH:
            reading.complain(
                f'could not open configuration file "{name}": maximum nesting depth exceeded', parent, line
            )
            return False
        path = self.locate(name, parent)
        if path == parent:
            reading.complain(f'configuration file recursion in "{path}"', parent, line)
            return False
        if len(reading.files) >= _MAX_FILES or self.bytes > _MAX_BYTES:
            if not reading.gaps or reading.gaps[-1][0] != len(reading.entries):
                reading.gaps.append(
                    (len(reading.entries), Unknown("the configuration files are too many or too large"))
                )
            return True
        data = self.host.read_bytes(path) if path != "/dev/null" else Known(b"", path)
        if isinstance(data, Unknown):
            return self.unreadable(path, data, parent, line, strict)
        reading.files.append(path)
        self.bytes += len(data.value)
        return self.lines(data.value, path, depth)

    def unreadable(self, path: str, gap: Unknown, parent: str | None, line: int | None, strict: bool) -> bool:
        denied = self.denied(path, gap)
        if gap.kind == "absent" or denied:
            if strict:
                why = _DENIED if denied else _why_absent(self.host, path)
                self.reading.complain(f'could not open configuration file "{path}": {why}', parent, line)
            return not strict
        status = self.host.status(path)
        if isinstance(status, Known) and status.value.is_directory:  # it can be opened, and the first read fails
            self.reading.complain(f'input in flex scanner failed at file "{path}" line 1', path, 1)
            return False
        self.reading.gaps.append((len(self.reading.entries), gap))
        return True

    def denied(self, path: str, gap: Unknown) -> bool:
        """Return whether the server itself may not read what we may not."""
        if gap.kind != "permission" or self.rights == "other":
            return False
        if self.rights == "server":
            return True
        # What the server's group, or an access list, may allow shows in the bits of the group.
        allows = 0o040
        while True:  # the first above that can be looked at is the one that keeps us out, unless links lead elsewhere
            status = self.host.status(path)
            if isinstance(status, Known):
                return not status.value.mode & allows
            if path == "/":
                return False
            path, allows = path.rpartition("/")[0] or "/", 0o010

    def directory(self, name: str, parent: str, line: int, depth: int) -> bool:
        """ParseConfigDirectory: its `*.conf` files in the order of their bytes, up to the first that fails."""
        reading = self.reading
        if not name.strip(" \t\r\n"):
            reading.complain(f'empty configuration directory name: "{name}"', parent, line)
            return False
        path = self.locate(name, parent)
        names = self.host.list(path)
        if isinstance(names, Unknown):
            denied = self.denied(path, names)
            if names.kind == "absent" or denied:
                why = _DENIED if denied else _why_absent(self.host, path)
                reading.complain(f'could not open configuration directory "{path}": {why}', parent, line)
                return False
            reading.gaps.append((len(reading.entries), names))
            return True
        reading.directories.append(path)
        found: list[bytes] = []
        for each in names.value:
            if len(each) < 6 or each.startswith(".") or not each.endswith(".conf"):
                continue
            inside = _tidy(_join(path, each), self.major)
            status = self.host.status(inside)
            if isinstance(status, Unknown):
                if status.kind == "absent":  # a link that leads nowhere
                    reading.complain(f'could not stat file "{inside}": No such file or directory', parent, line)
                    return False
                if not self.denied(inside, status):
                    reading.gaps.append((len(reading.entries), status))
                elif self.major <= 15 or isinstance(self.host.link(inside), Known):
                    reading.complain(f'could not stat file "{inside}": {_DENIED}', parent, line)
                    return False
                else:  # it knows a file from a folder without looking at it, and fails to open it
                    found.append(inside.encode("utf-8", "surrogateescape"))
            elif not status.value.is_directory:
                found.append(inside.encode("utf-8", "surrogateescape"))
        return all(
            self.file(each.decode("utf-8", "surrogateescape"), parent, line, depth, True) for each in sorted(found)
        )

    def locate(self, name: str, parent: str | None) -> str:
        """AbsoluteConfigLocation: relative names are relative to the including file."""
        if name.startswith("/") or parent is None:
            return name
        return _tidy(_join(parent.rpartition("/")[0], name), self.major)

    def lines(self, data: bytes, path: str, depth: int) -> bool:
        """ParseConfigFp."""
        reading = self.reading
        entries = reading.entries
        match = _GOOD_LINE.match
        content = True
        errors = 0
        position = number = 0
        end = len(data)
        while position < end:
            number += 1
            good = match(data, position)
            if good is None:
                newline = data.find(b"\n", position)
                stop = end if newline < 0 else newline
                token, name = _first_wrong(data[position:stop])
                if token is None:
                    # at the end of the file the scanner has counted no line for it, and blames the one before
                    at = number if newline >= 0 else number - 1
                    message = f'syntax error in file "{path}" line {at}, near end of line'
                else:
                    at = number
                    message = f'syntax error in file "{path}" line {at}, near token "{_text(token)}"'
                errors += 1
                content = False
                reading.complain(message, path, at, lost=name is None)
                if name is not None:
                    entries.append(Entry(name, None, path, number))
                if errors >= _MAX_SYNTAX_ERRORS:
                    reading.complain(f'too many syntax errors found, abandoning file "{path}"', path, at)
                    break
                position = stop + 1
                continue
            position = good.end()
            raw = good["name"]
            if raw is None:
                continue
            name = _text(raw)
            value = _unquote(good["value"])
            if name[:7].lower() == "include" and name.lower() in _INCLUDES:
                kind = name.lower()
                if kind == "include_dir":
                    fine = self.directory(value, path, number, depth + 1)
                else:
                    fine = self.file(value, path, number, depth + 1, kind == "include")
                content = content and fine
                continue
            entries.append(Entry(name, value, path, number))
        return content


_DENIED = "Permission denied"
_INCLUDES = ("include", "include_if_exists", "include_dir")


def _first_wrong(line: bytes) -> tuple[bytes | None, str | None]:
    """Return the token at which a bad line goes wrong (None: its end), and the name it sets, if it has one."""
    tokens = _tokens(line)
    kind, text = next(tokens, ("end", b""))
    if kind not in ("id", "qualified"):
        return text if kind != "end" else None, None
    name = _text(text)
    kind, text = next(tokens, ("end", b""))
    if kind == "equals":
        kind, text = next(tokens, ("end", b""))
    if kind in _VALUE_TOKENS:
        kind, text = next(tokens, ("end", b""))
    return text if kind != "end" else None, name


def _tokens(line: bytes) -> Iterator[tuple[str, bytes]]:
    blank = re.compile(rb"(?:[ \t\r]+|#[^\n]*)*")
    patterns = [(kind, re.compile(pattern)) for kind, pattern in _TOKENS]
    position = 0
    while True:
        skipped = blank.match(line, position)
        position = skipped.end() if skipped else position
        if position >= len(line):
            return
        best, kind = b"", "error"
        for name, pattern in patterns:
            found = pattern.match(line, position)
            if found and len(found[0]) > len(best):
                best, kind = found[0], name
        position += len(best)
        yield kind, best


def _text(raw: bytes) -> str:
    """Return a C string's text: up to its first NUL; bytes that are no UTF-8 come as surrogates (PEP 383)."""
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)|''", re.S)
_LETTERS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unquote(raw: bytes) -> str:
    """DeescapeQuotedString, for a value in quotes; others are what they are."""
    if raw[:1] != b"'":
        return _text(raw)
    raw = raw.split(b"\0", 1)[0][1:-1]  # what lies behind a NUL is lost, and the character before it is
    if b"\\" in raw or b"''" in raw:
        raw = _ESCAPE.sub(_escaped, raw)
    return _text(raw)


def _escaped(found: re.Match[bytes]) -> bytes:
    code: bytes | None = found[1]
    if code is None:
        return b"'"
    if code[0] in b"01234567":
        return bytes([int(code, 8) & 0xFF])
    return _LETTERS.get(code, code)


def _why_absent(host: Host, path: str) -> str:
    """Return the system's reason for a path that cannot be opened though nobody forbids it."""
    above = host.status(path.rstrip("/").rpartition("/")[0] or "/")
    if isinstance(above, Known) and not above.value.is_directory:
        return "Not a directory"
    here = host.status(path)
    if isinstance(here, Known) and not here.value.is_directory:
        return "Not a directory"
    return "No such file or directory"


def _join(folder: str, name: str) -> str:
    """join_path_components: a leading `./` of the name is dropped."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return f"{folder}/{name}" if name else folder


def _tidy(path: str, major: int) -> str:
    """canonicalize_path of an absolute path: up to 14 it only tidied the end of the path."""
    parts = [part for part in path.split("/") if part]
    done: list[str] = []
    if major <= 14:
        pending = 0
        while parts and (parts[-1] in (".", "..") or pending):
            last = parts.pop()
            if last == "..":
                pending += 1
            elif last != "." and pending:
                pending -= 1
        done = parts
    else:
        for part in parts:
            if part == "..":
                del done[-1:]
            elif part != ".":
                done.append(part)
    return "/" + "/".join(done)
