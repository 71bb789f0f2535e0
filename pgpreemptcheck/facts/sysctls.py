"""The vm.* settings that the files of sysctl.d make at boot, with systemd-sysctl's precedence and grammar.

Sources: src/sysctl/sysctl.c, src/basic/sysctl-util.c and src/basic/conf-files.c of systemd 252 to 259, sysctl.d(5);
src/sysctl.c of procps 4; the kernel's own reading of a number is __do_proc_doulongvec_minmax() in kernel/sysctl.c.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Literal

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
"""Where NAME.d folders lie, first wins. /lib counts only where it is no link to /usr/lib; else all is there twice."""

PROCPS_FILE = "/etc/sysctl.conf"

HUGE_PAGES = ("vm.nr_hugepages", "vm.nr_hugepages_mempolicy")
"""The two ways to set the pool of the default size."""

OVERCOMMIT = "vm.nr_overcommit_hugepages"
SHM_GROUP = "vm.hugetlb_shm_group"

_FILE_LIMIT = 1 << 20  # systemd refuses a longer line, and no file of settings comes near
_MAX_FILES = 2000
_BLANK = " \t\n\r"
_CREDENTIALS = ("/etc/credstore/sysctl.extra", "/run/credentials/@system/sysctl.extra")


@record
class Assignment:
    """One line of a file: the key with dots (it may be a glob), and its value, None where it only keeps globs off."""

    key: str
    value: str | None
    path: str
    line: int

    @property
    def source(self) -> str:
        """Return file and line, in words."""
        return f"{self.path} line {self.line}"


@record
class Setting:
    """A setting with its value as written, and which program sets it."""

    name: str
    value: Fact[str] = measured()
    read_by: Literal["systemd-sysctl", "procps"]


@record
class Sysctls:
    """What the files say. `settings` is what systemd-sysctl sets, a glob not resolved but for the huge page settings.

    `procps_only` is what `sysctl -p` or `sysctl --system` would make of /etc/sysctl.conf where systemd-sysctl does not
    read that file and does something else. `lines` are all vm.* lines in the order in which systemd-sysctl reads them.
    `in_force` are the lines that it then acts on, in its order; an Unknown stands where a file could not be read.
    """

    settings: tuple[Setting, ...]
    procps_only: tuple[Setting, ...]
    lines: tuple[Assignment, ...]
    in_force: tuple[Assignment | Unknown, ...]

    def value(self, name: str) -> Fact[str | None]:
        """Return what a setting is given last, as written; None where nothing sets it."""
        last: Fact[str | None] = Known(None, "sysctl.d: no line sets it")
        for write in self.writes(name):
            last = write if isinstance(write, Unknown) else Known(write.value, write.source)
        return last

    def writes(self, *names: str) -> Iterator[Assignment | Unknown]:
        """Yield what is written to these settings, in order: a glob leaves out what has a line of its own."""
        own = {option.key for option in self.in_force if isinstance(option, Assignment)}
        gap: Unknown | None = None
        for option in self.in_force:
            if isinstance(option, Unknown):
                gap = option
                yield gap
            elif option.value is None:
                continue
            elif option.key in names:
                yield option
            elif _is_glob(option.key):
                for name in names:
                    matches = None if name in own else _matches(option.key, name)
                    if isinstance(matches, Unknown):
                        yield Unknown(f"{option.source}: {matches.reason}", matches.hint)
                    elif matches:
                        # a file that could not be read may hold a line of its own for this name
                        yield gap or Assignment(name, option.value, option.path, option.line)


def read(host: Host, *, with_run: bool = True) -> Sysctls:
    """Return every vm.* setting that systemd-sysctl makes from the files as they are.

    Without `with_run`, /run is left out: it is empty at boot, and what is in it now may never come again.
    """
    lines: list[Assignment] = []
    in_force: dict[str, Assignment | Unknown] = {}
    unsure: set[str] = set()  # what a file that could not be read may have changed
    linked = False
    for path, text in files(host, "sysctl.d", with_run=with_run):
        linked = linked or path == PROCPS_FILE
        if isinstance(text, Unknown):
            in_force.pop("", None)  # what it holds comes after all that was read so far
            unsure = set(in_force)
            in_force[""] = Unknown(
                f"not all sysctl settings could be read: {text.reason}", text.hint or "let it be read", text.kind
            )
            continue
        for option in parse(text.value, path):
            lines.append(option)
            before = in_force.get(option.key)
            if isinstance(before, Assignment) and before.value == option.value and option.key not in unsure:
                continue  # the same again keeps its place
            in_force.pop(option.key, None)
            in_force[option.key] = option
            unsure.discard(option.key)
    for path in _CREDENTIALS:
        extra = host.read(path, _FILE_LIMIT)
        if isinstance(extra, Known) and any(parse(extra.value, path)):
            in_force.pop("", None)
            in_force[""] = Unknown(
                f"{path} sets vm.* too, and whether systemd-sysctl reads it depends on its version",
                "write it to a file in /etc/sysctl.d",
            )
    result = Sysctls((), (), tuple(lines), tuple(in_force.values()))
    made = tuple(_settings(result))
    return Sysctls(made, () if linked else tuple(_procps_only(host, result)), result.lines, result.in_force)


def files(host: Host, folder: str, *, with_run: bool = True) -> Iterator[tuple[str, Fact[str]]]:
    """Yield path and text of every NAME.conf in the folders of that name, in the order in which systemd takes them.

    Sorted by name over all folders, the first folder that has a name wins; a link to /dev/null (or nowhere) hides
    the name. A link to /etc/sysctl.conf is named as that file. What cannot be read or listed comes as Unknown.
    """
    places: dict[str, list[str]] = {}
    gaps: list[Unknown] = []
    listed = False
    for top in FOLDERS:
        if top == "/run" and not with_run:
            continue
        path = f"{top}/{folder}"
        names = host.list(path)
        if isinstance(names, Unknown):
            if names.kind != "absent":
                gaps.append(names)
            continue
        listed = True
        for name in names.value[:_MAX_FILES]:
            if name.endswith(".conf") and not name.startswith("."):
                places.setdefault(name, []).append(f"{path}/{name}")
    if not listed and not host.live:
        gaps.append(Unknown(f"no {folder} is in the capture", f"add /etc/{folder} and /usr/lib/{folder}", "absent"))
    for name in sorted(places, key=os.fsencode):
        first, *others = places[name]
        target = _link_target(host, first)
        if target == "/dev/null":
            continue
        text = host.read_bytes(first, _FILE_LIMIT)
        if isinstance(text, Known):
            path = PROCPS_FILE if target == PROCPS_FILE else first
            yield path, Known(text.value.decode("utf-8", "surrogateescape"), path)
        elif text.kind == "not-text" and others:
            yield (
                first,
                Unknown(
                    f"{first} is a folder: whether it hides {others[0]} depends on systemd's version", f"remove {first}"
                ),
            )
        elif text.kind not in ("absent", "not-text"):
            yield first, text
    for gap in gaps:  # last: nothing read before it is sure then
        yield f"/etc/{folder}", gap


def parse(text: str, path: str) -> Iterator[Assignment]:
    """Yield the lines of a file that may concern vm.*, in order. What is no assignment is skipped, as systemd does.

    There are no continuation lines and no comments behind a value: all up to the end of the line is the value.
    """
    for number, raw in enumerate(re.split(r"\r\n|[\n\r\0]", text), 1):
        line = raw.strip(_BLANK)
        if not line or line[0] in "#;":
            continue
        name, equals, value = line.partition("=")
        if name.startswith("-"):
            name = name[1:]  # errors do not matter; and without a value: no glob shall set it
        elif not equals:
            continue
        key = normalize(name.strip(_BLANK))
        first = key.partition(".")[0]
        if first == "vm" or _is_glob(first):
            yield Assignment(key, value.strip(_BLANK) if equals else None, path, number)


def normalize(key: str) -> str:
    """Return a key with dots between its parts. The first separator says which is which: in `a/b.c` the dot is none."""
    separator = re.search(r"[/.]", key)
    if separator is not None and separator[0] == "/":
        key = key.translate({0x2E: "/", 0x2F: "."})
    # `/` is now a dot inside a name; empty parts and lone dots vanish as they do in a path
    return ".".join(part for part in key.split(".") if part not in ("", "/"))


def kernel_number(value: str) -> int | None:
    """Return what the kernel makes of a value written to a file of one unsigned long, None if it refuses it.

    Hexadecimal with 0x and octal with a leading 0; what follows after a blank is not looked at.
    """
    match = re.match(r"[ \t\n\r\v\f]*(0[xX][0-9a-fA-F]{1,16}|0[0-7]*|[1-9][0-9]{0,19})(?![^ \t\n])", value)
    if match is None:
        return None
    word = match[1]
    base = 16 if word[:2] in ("0x", "0X") else 8 if word[0] == "0" else 10
    number = int(word, base)
    return number if number < 1 << 64 else None


def _settings(sysctls: Sysctls) -> Iterator[Setting]:
    """Yield the settings made: those with lines of their own, and the huge page settings that a glob reaches."""
    own = [option.key for option in sysctls.in_force if isinstance(option, Assignment) and not _is_glob(option.key)]
    for name in dict.fromkeys([*own, *HUGE_PAGES, OVERCOMMIT, SHM_GROUP]):
        value = sysctls.value(name)
        if isinstance(value, Unknown):
            yield Setting(name, value, "systemd-sysctl")
        elif value.value is not None:
            yield Setting(name, Known(value.value, value.source), "systemd-sysctl")


def _procps_only(host: Host, sysctls: Sysctls) -> Iterator[Setting]:
    text = host.read(PROCPS_FILE, _FILE_LIMIT)
    if isinstance(text, Unknown):
        return
    last = {option.key: option for option in parse(text.value, PROCPS_FILE) if option.value is not None}
    for name, option in last.items():
        value = sysctls.value(name)
        if option.value is not None and not (isinstance(value, Known) and value.value == option.value):
            yield Setting(name, Known(option.value, option.source), "procps")


def _link_target(host: Host, path: str) -> str | None:
    """Return where a link points, as an absolute path; None for what is no link."""
    link = host.link(path)
    if isinstance(link, Unknown):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(path), link.value))


def _is_glob(text: str) -> bool:
    return any(sign in text for sign in "*?[")


def _matches(pattern: str, name: str) -> bool | Unknown:
    """Say whether a glob reaches a name, part by part as glob(7) in /proc/sys does."""
    if "{" in pattern or "[:" in pattern or "\\" in pattern:
        return Unknown(f"what {pattern} matches is not worked out", "name the settings one by one")
    import fnmatch

    parts, names = pattern.replace("[^", "[!").split("."), name.split(".")
    return len(parts) == len(names) and all(
        fnmatch.fnmatchcase(there, part) for there, part in zip(names, parts, strict=True)
    )
