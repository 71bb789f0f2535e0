"""Processes: a first quick look at all of them, and which ones bear the marks of a server.

On a capture a process is known by whatever is there of it: its command line, else what `ps` printed, else the name of
its program. One that nothing names is not taken for harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, is_number

if TYPE_CHECKING:
    from pgpreemptcheck.facts.processlist import Listed

_HEAD = 512  # bytes of a command line that tell what a process is
_MAX_MAPS = 16 << 20

_SUFFIXES = ("", "bin", "real", "wrapped")  # of wrapped programs (Nix: .postgres-wrapped), beside version numbers
MAYBE_SERVER = (b"postgres", b"postmaster", b"pgdata", b"config_file", b"\0-d\0", b"\0-d/", b"\0-d.")
"""Words in the head of a command line, in lower case, that make a closer look worth its cost."""


class Processes:
    """What a first quick look at every process tells: one short read each, for a host with thousands of them."""

    def __init__(self, host: Host) -> None:
        self.heads: dict[int, bytes] = {}
        self.backends: list[int] = []
        self.servers: list[int] = []
        self.unnamed: list[int] = []
        """Processes of a capture of which nothing says what they are."""
        self.listed: dict[int, Listed] = {}
        """What `ps` printed of each process, in a capture that has it."""
        self.refused = 0
        names = host.list("/proc")
        self.gap = names if isinstance(names, Unknown) else None
        self.pids = sorted(int(name) for name in names.value if is_number(name)) if isinstance(names, Known) else []
        if not host.live:
            self._captured(host)
            return
        for pid in self.pids:
            head = host.read_range(f"/proc/{pid}/cmdline", 0, _HEAD)
            if isinstance(head, Unknown):
                self.refused += head.kind == "permission"
            elif head.value.strip(b"\0"):  # kernel threads and zombies have none
                self._sort(pid, head.value, split(head.value))

    def _sort(self, pid: int, head: bytes, argv: Sequence[str]) -> None:
        if is_backend(head):
            self.backends.append(pid)
        elif named_as_server(base(argv[0])) is not None or server_behind_loader(argv):
            self.servers.append(pid)
        else:
            self.heads[pid] = head

    def _captured(self, host: Host) -> None:
        from pgpreemptcheck.facts import processlist

        self.listed = processlist.read(host)
        for pid in sorted({*self.pids, *self.listed}):
            head = self.command_line(host, pid)
            if isinstance(head, Known):
                self._sort(pid, head.value, split(head.value, captured=True))
                if pid not in self.heads:
                    continue
            listed = self.listed.get(pid)
            name = program(host, pid) or (listed.command.strip("[]") if listed is not None and not listed.cut else None)
            if name is not None and named_as_server(name) is not None:
                self.heads.pop(pid, None)
                self.servers.append(pid)
            elif isinstance(head, Unknown) and name is None:
                if listed is not None or _is_more_than_a_kernel_thread(host, pid):
                    self.unnamed.append(pid)
            elif isinstance(head, Unknown):
                self.heads[pid] = b""

    def command_line(self, host: Host, pid: int) -> Fact[bytes]:
        """Return a process's command line, arguments divided by NUL; on a capture perhaps by spaces."""
        path = f"/proc/{pid}/cmdline"
        data = host.read_bytes(path, 1 << 20)
        if host.live or (isinstance(data, Known) and _is_command_line(data.value)):
            return data
        listed = self.listed.get(pid)
        command = listed.command.encode("utf-8", "surrogateescape") if listed is not None else b"["
        # in brackets ps shows the name of one that has no command line
        if listed is not None and not command.startswith(b"[") and (not listed.cut or _is_command_line(command)):
            return Known(command, f"{listed.source} (PID {pid})")
        if isinstance(data, Unknown):
            return data
        return Unknown(f"{path} of the capture holds no command line", "capture it again", kind="not-text")


def _is_command_line(data: bytes) -> bool:
    """Return whether a captured file holds a command line: it begins with a name that can be printed, whole."""
    first = split(data[:_HEAD], captured=True)[0]
    if not first or not first.isprintable():
        return False
    if b"\0" in data or len(data.split()) > 1:
        return True
    name = base(first)  # alone and unfinished it may be a server's name that was cut off
    return not name or not any(word != name and word.startswith(name) for word in ("postgres", "postmaster"))


def _is_more_than_a_kernel_thread(host: Host, pid: int) -> bool:
    """Return whether more was captured of a process than an empty command line, which is all that some have."""
    folder = f"/proc/{pid}"
    files = host.list(folder)
    data = host.read_bytes(f"{folder}/cmdline", 1 << 20)
    empty = isinstance(data, Known) and not data.value.strip(b"\0\n")
    return isinstance(files, Known) and not (empty and files.value == ("cmdline",))


def program(host: Host, pid: int) -> str | None:
    """Return the name of a captured process's program, a server's name first; None where nothing names it."""
    names = []
    exe = process_link(host, pid, "exe")
    if isinstance(exe, Known) and exe.value.startswith("/") and exe.value.isprintable():
        names.append(base(exe.value.removesuffix(" (deleted)")))
    comm = host.read(f"/proc/{pid}/comm", 4096)
    status = process_status(host, pid) or {}
    for name in (comm.value.strip() if isinstance(comm, Known) else "", status.get("Name", "")):
        if name and name.isprintable():
            names.append(name)
    server = next((name for name in names if named_as_server(name) is not None), None)
    if server is None and (not names or is_loader(names[0])):
        server = _mapped_server(host, pid)
    return server or next(iter(names), None)


def _mapped_server(host: Host, pid: int) -> str | None:
    maps = host.read(f"/proc/{pid}/maps", _MAX_MAPS)
    for line in maps.value.split("\n") if isinstance(maps, Known) else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1]:
            name = base(fields[5].rstrip().removesuffix(" (deleted)"))
            if named_as_server(name) is not None:
                return name
    return None


def process_status(host: Host, pid: int) -> dict[str, str] | None:
    """Return the fields of /proc/PID/status; None where the process is gone or dead, none where a capture has none."""
    text = host.read(f"/proc/{pid}/status")
    if isinstance(text, Unknown):
        return {} if not host.live else None
    lines = (line.partition(":") for line in text.value.split("\n"))
    fields = {name: value.strip() for name, _, value in lines}
    return None if fields.get("State", "")[:1] in ("Z", "X") else fields


def is_backend(head: bytes) -> bool:
    """Return whether a command line is the title that every server process but the postmaster gives itself."""
    text = head.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    title, colon, rest = text.partition(":")
    return bool(colon) and rest[:1].strip() == "" and named_as_server(title) is not None


def split(cmdline: bytes, *, captured: bool = False) -> list[str]:
    """Return the arguments of a command line; a captured one may have been pasted with spaces between them."""
    data = (cmdline.rstrip(b"\n") if captured else cmdline).removesuffix(b"\0")  # an empty argument may be the last
    parts = data.split() if captured and b"\0" not in data else data.split(b"\0")
    return [part.decode("utf-8", "surrogateescape") for part in parts] or [""]


def base(path: str) -> str:
    return path.rpartition("/")[2]


def named_as_server(name: str) -> str | None:
    """Return the prefix of a server program's name ("" for PostgreSQL's own, "edb-" for a fork), None for others."""
    for word in ("postgres", "postmaster"):
        before, found, after = name.removeprefix(".").partition(word)
        if not found:
            continue
        before_fits = not before or (before.endswith("-") and before[:-1].replace("_", "").isalnum())
        after_fits = not after or (after[0] in "-." and (after[1:] in _SUFFIXES or after.strip("-.0123456789") == ""))
        return before if before_fits and after_fits else None
    return None


def is_loader(name: str) -> bool:
    """Return whether this is a dynamic loader: ld-linux-x86-64.so.2, ld64.so.1, ld-musl-aarch64.so.1, ld-2.31.so."""
    return name.startswith("ld") and name[2:3] in ("-", ".", "6") and ".so" in name


def server_behind_loader(argv: Sequence[str]) -> int:
    """Return the index of the server's name after a dynamic loader's, 0 if there is none."""
    if not is_loader(base(argv[0])):
        return 0
    names = enumerate(argv[1:], 1)
    return next((i for i, word in names if "=" not in word and named_as_server(base(word)) is not None), 0)


def process_link(host: Host, pid: int, name: str) -> Fact[str]:
    """Return where /proc/PID/NAME points; a capture has the text in NAME.txt instead."""
    path = f"/proc/{pid}/{name}"
    if host.live:
        return host.link(path)
    text = host.read(f"{path}.txt", 1 << 16)
    if isinstance(text, Known):
        return Known(text.value.strip("\r\n"), path)
    linked = host.link(path)
    return linked if isinstance(linked, Known) else text


def environment(host: Host, pid: int) -> Fact[dict[str, str]]:
    data = host.read_bytes(f"/proc/{pid}/environ")
    if isinstance(data, Unknown):
        return data
    separator = "\0" if b"\0" in data.value or host.live else "\n"
    words = data.value.decode("utf-8", "surrogateescape").split(separator)
    return Known(
        {name: value for name, equals, value in (word.partition("=") for word in words) if equals}, data.source
    )
