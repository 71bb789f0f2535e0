"""PostgreSQL clusters on the host: running postmasters, and data directories that do not run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pgpreemptcheck.host import ContainerHost, Host, resolve_inside
from pgpreemptcheck.values import Fact, Known, Unknown

CAPTURED_CLOCK_TICKS = 100
"""USER_HZ of every architecture but alpha and ia64: the unit of starttime in a captured /proc/PID/stat."""

_HEAD = 512  # bytes of a command line that tell what a process is
_MAX_FD_LINKS = 20_000
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h, since 3.8


@dataclass(frozen=True)
class Postmaster:
    """A running postmaster, as its own process tells: never from a default path."""

    pid: int
    argv: tuple[str, ...]  # from the server's own name on: a loader in front of it is left out
    uid: Fact[int]
    started: Fact[float]  # epoch seconds
    data_directory: Fact[str]  # as the process sees it (inside its own root)
    config_file: Fact[str]
    port: Fact[int]
    socket_directories: Fact[tuple[str, ...]]
    root: str | None
    """`/proc/PID/root` where the process has another mount namespace or root than this one, else None."""
    container: str | None
    """A short stable name of its container, None on the host."""
    fork: str | None
    """The name of a fork of PostgreSQL (`edb-postgres`), None for PostgreSQL itself."""


@dataclass(frozen=True)
class StoppedCluster:
    """A data directory that nothing runs from."""

    data_directory: str
    config_file: Fact[str]
    argv: tuple[str, ...]  # the command line of its start, program first, as far as known (pg_ctl.conf, unit files)
    uid: Fact[int]
    where: str  # how it was found: --pgdata, /etc/postgresql, /var/lib/pgsql
    starts_at_boot: Fact[bool]


@dataclass(frozen=True)
class Found:
    """The clusters of a host. `concealed` says that there may be one that cannot be seen, and why."""

    running: tuple[Postmaster, ...]
    stopped: tuple[StoppedCluster, ...]
    concealed: Unknown | None


def find(host: Host, pgdata: Sequence[str] = ()) -> Found:
    """Return all clusters of a host: running ones from /proc, others where Debian, Red Hat and SUSE keep them.

    `pgdata` names further data directories (or configuration directories).
    """
    processes = _Processes(host)
    running = _postmasters(host, processes)
    found_by_socket, sockets = _match_sockets(host, processes, running)
    running += found_by_socket
    stopped = _stopped(host, pgdata, running)
    concealed = _concealed(host, processes, running, stopped, sockets)
    return Found(tuple(sorted(running, key=lambda p: p.pid)), tuple(stopped), concealed)


def version(host: Host, data_directory: str) -> Fact[str]:
    """Return the major version that a data directory belongs to, as its PG_VERSION says (`15`, `9.6`)."""
    path = os.path.join(data_directory, "PG_VERSION")
    text = host.read(path, 4096)
    if isinstance(text, Unknown):
        return text
    word = text.value.strip()
    if not re.fullmatch(r"\d{1,3}(\.\d{1,2})?", word, re.ASCII):
        return Unknown(f"{path} does not hold a version of PostgreSQL")
    return Known(word, path)


def major(host: Host, files: Host, postmaster: Postmaster) -> Fact[int]:
    """Return the major version of a running server: PG_VERSION of its data directory, else the program's path.

    `files` reads files as the server sees them and with its rights; `host` reads /proc.
    """
    directory = postmaster.data_directory
    written = version(files, directory.value) if isinstance(directory, Known) else directory
    if isinstance(written, Known):
        return Known(int(written.value.partition(".")[0]), written.source)
    exe = _process_link(host, postmaster.pid, "exe")
    for path in ([exe] if isinstance(exe, Known) else []) + [Known(postmaster.argv[0], "its command line")]:
        matched = _VERSION_IN_PATH.search(path.value)
        if matched:
            return Known(int(matched[1]), f"the path of its program ({path.value})", "inferred")
    return written


_VERSION_IN_PATH = re.compile(r"/(?:postgresql|postgres|pgsql|pg|as)[-/]?(\d{1,2})(?:\.\d+)*/(?:.*/)?[^/]*\Z")


# which processes are servers ---------------------------------------------------------------------

_SERVER_NAME = re.compile(r"\.?(?P<fork>[a-z0-9_]+-)?(?:postgres|postmaster)(?:[-.](?:\d[\d.]*|bin|real|wrapped))?\Z")
_TITLE = re.compile(r"(?P<name>[^/: ]+): ")  # what a server process other than the postmaster calls itself
_LOADER = re.compile(r"ld(?:64)?(?:[-.].*)?\.so(?:\.\d+)?\Z")
_MAYBE_SERVER = re.compile(rb"postgres|postmaster|pgdata|config_file|\0-D(?:\0|[./])", re.I)

_NOT_A_SERVER = ("--single", "--boot", "--check", "--describe-config", "--version", "-V", "--help", "-?")
_OPTIONS_WITH_VALUE = "BCcDdfhkNprStvW"  # getopt string of postmaster.c, 13 to 19


class _Processes:
    """What a first quick look at every process tells: one short read each, for a host with thousands of them."""

    def __init__(self, host: Host) -> None:
        self.heads: dict[int, bytes] = {}
        self.backends: list[int] = []
        self.servers: list[int] = []
        self.refused = 0
        names = host.list("/proc")
        self.gap = names if isinstance(names, Unknown) else None
        self.pids = sorted(int(name) for name in names.value if name.isdecimal()) if isinstance(names, Known) else []
        for pid in self.pids:
            head = host.read_range(f"/proc/{pid}/cmdline", 0, _HEAD)
            if isinstance(head, Unknown):
                self.refused += head.kind == "permission"
            elif head.value.strip(b"\0"):  # kernel threads and zombies have none
                self._sort(host, pid, head.value)

    def _sort(self, host: Host, pid: int, head: bytes) -> None:
        argv = _split(head, captured=not host.live)
        title = _TITLE.match(argv[0])
        if title and _SERVER_NAME.match(title["name"]):
            self.backends.append(pid)
        elif _SERVER_NAME.match(_base(argv[0])) or _server_behind_loader(argv):
            self.servers.append(pid)
        else:
            self.heads[pid] = head


def _split(cmdline: bytes, *, captured: bool = False) -> list[str]:
    """Return the arguments of a command line; a captured one may have been pasted with spaces between them."""
    data = cmdline.rstrip(b"\0\n" if captured else b"\0")
    parts = data.split() if captured and b"\0" not in data else data.split(b"\0")
    return [part.decode("utf-8", "surrogateescape") for part in parts] or [""]


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _server_behind_loader(argv: Sequence[str]) -> int:
    """Return the index of the server's name after a dynamic loader's, 0 if there is none."""
    if not _LOADER.match(_base(argv[0])):
        return 0
    return next((i for i, word in enumerate(argv) if i and "=" not in word and _SERVER_NAME.match(_base(word))), 0)


@dataclass(frozen=True)
class _Start:
    """The options of a server's command line that say where its cluster is; settings by canonical name."""

    directory: str | None  # -D
    settings: dict[str, str]
    serves: bool  # False: a run that ends by itself (-C, --single, --version)


def _parse(argv: Sequence[str]) -> _Start:
    directory = None
    settings: dict[str, str] = {}
    serves = len(argv) < 2 or not (argv[1] in _NOT_A_SERVER or argv[1].startswith("--fork"))
    words = iter(argv[1:])
    for word in words:
        if word.startswith("--") and len(word) > 2:
            _set(settings, word[2:])
            continue
        letters = word[1:] if word.startswith("-") else ""
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter not in _OPTIONS_WITH_VALUE:
                continue
            value, letters = letters or next(words, ""), ""
            if letter == "D":
                directory = value
            elif letter == "C":
                serves = False
            elif letter == "c":
                _set(settings, value)
            elif letter in _SHORT:
                settings[_SHORT[letter]] = value
    return _Start(directory, settings, serves)


_SHORT = {"p": "port", "k": "unix_socket_directories"}


def _set(settings: dict[str, str], assignment: str) -> None:
    name, equals, value = assignment.partition("=")
    if equals:
        settings[name.strip().replace("-", "_").lower()] = value


def _postmasters(host: Host, processes: _Processes) -> list[Postmaster]:
    candidates = [*processes.servers]
    candidates += [pid for pid, head in processes.heads.items() if _MAYBE_SERVER.search(head)]
    found: dict[int, _Candidate] = {}
    for pid in candidates:
        candidate = _look_at(host, processes, pid)
        if candidate is not None:
            found[pid] = candidate
    return [
        _describe(host, candidate)
        for candidate in found.values()
        if not (candidate.parent in found and _same_cluster(candidate, found[candidate.parent]))
    ]


@dataclass(frozen=True)
class _Candidate:
    pid: int
    argv: list[str]
    start: _Start
    status: dict[str, str]
    cwd: Fact[str]
    lock: Fact[list[str]]
    """The lines of its own postmaster.pid."""
    confirmed: bool

    @property
    def parent(self) -> int:
        word = self.status.get("PPid", "")
        return int(word) if word.isdecimal() else 0


def _same_cluster(child: _Candidate, parent: _Candidate) -> bool:
    """Return whether a process is a child that has not renamed itself yet, rather than a server of its own."""
    if child.confirmed:
        return False
    if isinstance(child.cwd, Known) and isinstance(parent.cwd, Known):
        return child.cwd.value == parent.cwd.value
    return child.start == parent.start


def _look_at(host: Host, processes: _Processes, pid: int) -> _Candidate | None:
    """Return what is known of a process if it is a postmaster, by its lock file or by the shape of its start."""
    raw = host.read_bytes(f"/proc/{pid}/cmdline", 1 << 20)
    status = _status(host, pid)
    if isinstance(raw, Unknown) or status is None:
        return None
    argv = _split(raw.value, captured=not host.live)
    argv = argv[_server_behind_loader(argv) :]
    start = _parse(argv)
    if not start.serves:
        return None
    cwd = _process_link(host, pid, "cwd")
    lock = _lock(host, pid, status, cwd, start)
    named = bool(_SERVER_NAME.match(_base(argv[0])))
    confirmed = isinstance(lock, Known) or (
        not host.live and isinstance(host.status(f"/proc/{pid}/pgpreemptcheck.json"), Known)
    )
    candidate = _Candidate(pid, argv, start, status, cwd, lock, confirmed)
    if confirmed or (named and _looks_started(host, processes, candidate)):
        return candidate
    return None


def _looks_started(host: Host, processes: _Processes, candidate: _Candidate) -> bool:
    """Return whether a process that bears a server's name is one, its lock file out of sight or not yet written."""
    exe = _process_link(host, candidate.pid, "exe")
    if isinstance(exe, Known):
        name = _base(exe.value.removesuffix(" (deleted)"))
        if not (_SERVER_NAME.match(name) or _LOADER.match(name)):
            return False
    settings = candidate.start.settings
    if candidate.start.directory or "config_file" in settings or "data_directory" in settings:
        return True
    environment = _environment(host, candidate.pid)
    if isinstance(environment, Known):
        return "PGDATA" in environment.value
    children = (_status(host, pid) or {} for pid in processes.backends)
    return any(child.get("PPid") == str(candidate.pid) for child in children)


def _status(host: Host, pid: int) -> dict[str, str] | None:
    """Return the fields of /proc/PID/status that are used; None where the process is gone or dead."""
    text = host.read(f"/proc/{pid}/status")
    if isinstance(text, Unknown):
        return {} if not host.live else None
    fields = dict(re.findall(r"^(PPid|Uid|NSpid|State):[ \t]*(.*)", text.value, re.M))
    return None if fields.get("State", "")[:1] in ("Z", "X") else fields


def _process_link(host: Host, pid: int, name: str) -> Fact[str]:
    """Return where /proc/PID/NAME points; a capture has the text in NAME.txt instead."""
    path = f"/proc/{pid}/{name}"
    if host.live:
        return host.link(path)
    text = host.read(f"{path}.txt", 1 << 16)
    if isinstance(text, Known):
        return Known(text.value.strip("\r\n"), path)
    linked = host.link(path)
    return linked if isinstance(linked, Known) else text


def _environment(host: Host, pid: int) -> Fact[dict[str, str]]:
    data = host.read_bytes(f"/proc/{pid}/environ")
    if isinstance(data, Unknown):
        return data
    separator = "\0" if b"\0" in data.value or host.live else "\n"
    words = data.value.decode("utf-8", "surrogateescape").split(separator)
    return Known(
        {name: value for name, equals, value in (word.partition("=") for word in words) if equals}, data.source
    )


def _lock(host: Host, pid: int, status: dict[str, str], cwd: Fact[str], start: _Start) -> Fact[list[str]]:
    """Return the lines of the postmaster.pid that names this process, from its working directory or its -D.

    Its working directory is its data directory (ChangeToDataDir). Inside of a PID namespace the file has the number
    that the process has there: the last one of NSpid.
    """
    own = {str(pid), (status.get("NSpid") or str(pid)).split()[-1]}
    gap: Unknown | None = None
    for directory in _places(host, pid, cwd, start):
        path = f"{directory}/postmaster.pid"
        # below the directory only: another user's link must not make root open a device
        text = ContainerHost(directory).read("/postmaster.pid", 4096) if host.live else host.read(path, 4096)
        if isinstance(text, Known):
            lines = text.value.split("\n")
            if lines[0].strip() in own:
                return Known(lines, path)
            text = Unknown(f"{path} names another process", kind="absent")
        elif host.live:
            text = Unknown(f"{path} cannot be read", _hint(text), text.kind)
        gap = gap if gap is not None and gap.kind != "absent" else text
    return gap or Unknown(f"the data directory of PID {pid} is not known", kind="absent")


def _places(host: Host, pid: int, cwd: Fact[str], start: _Start) -> list[str]:
    places = [f"/proc/{pid}/cwd" if host.live else cwd.value] if isinstance(cwd, Known) and cwd.value != "/" else []
    given = start.settings.get("data_directory") or start.directory or ""
    return [*places, given] if given.startswith("/") else places


def _hint(gap: Unknown) -> str:
    return "run as root or as the owner of the cluster" if gap.kind == "permission" else gap.hint


# what a postmaster says of itself ----------------------------------------------------------------


def _describe(host: Host, candidate: _Candidate) -> Postmaster:
    pid = candidate.pid
    cgroup = host.read(f"/proc/{pid}/cgroup")
    root, other_root = _root(host, pid)
    text = cgroup.value if isinstance(cgroup, Known) else ""
    container = _container(text) if root or not host.live else None
    if root and container is None and _unit(text) is None:  # a service of the host may have mounts of its own
        container = f"pid {pid}"
    environment: list[Fact[dict[str, str]]] = []

    def variable(name: str) -> Fact[str]:
        if not environment:  # read once, and only where the command line leaves it open
            environment.append(_environment(host, pid))
        seen = environment[0]
        if isinstance(seen, Unknown):
            return Unknown(f"the environment of PID {pid} cannot be read", _hint(seen), seen.kind)
        if name not in seen.value:
            return Unknown(f"{name} is not in the environment of PID {pid}", kind="absent")
        return Known(seen.value[name], f"{seen.source} ({name})")

    directory = _data_directory(candidate, other_root, candidate.confirmed or not host.live, variable)
    return Postmaster(
        pid=pid,
        argv=tuple(candidate.argv),
        uid=_uid(host, candidate),
        started=_started(host, candidate),
        data_directory=directory,
        config_file=_config_file(candidate, directory, variable),
        port=_port(candidate, variable),
        socket_directories=_socket_directories(candidate),
        root=root,
        container=container,
        fork=_fork(host, candidate),
    )


def _uid(host: Host, candidate: _Candidate) -> Fact[int]:
    fields = candidate.status.get("Uid", "").split()
    path = f"/proc/{candidate.pid}/status"
    if len(fields) < 2 or not fields[1].isdecimal():
        return Unknown(f"{path} does not say the owner", kind="absent")
    return Known(int(fields[1]), path)


def _started(host: Host, candidate: _Candidate) -> Fact[float]:
    """Return when the postmaster started: its own start time (field 22 of stat), else line 3 of postmaster.pid."""
    path = f"/proc/{candidate.pid}/stat"
    text = host.read(path)
    if isinstance(text, Known):
        fields = text.value.rpartition(")")[2].split()
        booted = _booted(host)
        if len(fields) > 19 and fields[19].isdecimal() and isinstance(booted, Known):
            ticks = os.sysconf("SC_CLK_TCK") if host.live else CAPTURED_CLOCK_TICKS
            return Known(booted.value + int(fields[19]) / ticks, path)
    if isinstance(candidate.lock, Known):
        line = _line(candidate.lock.value, 3)
        if line.isdecimal():
            return Known(float(line), f"{candidate.lock.source} line 3")
    return text if isinstance(text, Unknown) else Unknown(f"{path} does not say the start time")


def _booted(host: Host) -> Fact[float]:
    """Return when the host booted. /proc/stat is long on a host with many CPUs, and has whole seconds only."""
    if host.live:
        import time

        return Known(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), "CLOCK_BOOTTIME")
    text = host.read("/proc/stat")
    if isinstance(text, Unknown):
        return text
    line = re.search(r"^btime (\d+)", text.value, re.M)
    return Known(float(line[1]), "/proc/stat") if line else Unknown("/proc/stat has no btime")


def _line(lines: Sequence[str], number: int) -> str:
    return lines[number - 1].strip() if len(lines) >= number else ""


def _data_directory(
    candidate: _Candidate, other_root: str | None, settled: bool, variable: Callable[[str], Fact[str]]
) -> Fact[str]:
    """Return the data directory as the process sees it: its working directory, else what it was started with.

    `settled`: the process has changed to its data directory already.
    """
    pid, cwd = candidate.pid, candidate.cwd
    if isinstance(cwd, Known) and settled and not cwd.value.endswith(" (deleted)"):
        path = cwd.value
        if other_root and (path + "/").startswith(other_root.rstrip("/") + "/"):
            path = path[len(other_root.rstrip("/")) :] or "/"
        return Known(path, f"/proc/{pid}/cwd")
    if isinstance(candidate.lock, Known) and _line(candidate.lock.value, 2).startswith("/"):
        return Known(_line(candidate.lock.value, 2), f"{candidate.lock.source} line 2")
    source = f"/proc/{pid}/cmdline"
    given = candidate.start.settings.get("data_directory", "")
    if given.startswith("/"):
        return Known(_clean(given), source)
    directory = candidate.start.directory or ""
    if not directory:
        found = variable("PGDATA")
        if isinstance(found, Unknown):
            return Unknown(f"the working directory of PID {pid} cannot be read, and {found.reason}", found.hint)
        directory, source = found.value, found.source
    if directory.startswith("/"):  # a configuration directory can name another data directory in its file
        return Known(_clean(directory), source, "inferred")
    gap = cwd if isinstance(cwd, Unknown) else Unknown(f"PID {pid} was started with a relative path")
    return Unknown(f"the working directory of PID {pid} cannot be read", _hint(gap), gap.kind)


def _clean(path: str) -> str:
    """Return an absolute path as PostgreSQL shows it (canonicalize_path): no `.`, no doubled or trailing slash."""
    return os.path.normpath("/" + path.lstrip("/"))


def _config_file(candidate: _Candidate, data_directory: Fact[str], variable: Callable[[str], Fact[str]]) -> Fact[str]:
    """Return the configuration file: config_file, else postgresql.conf in -D or PGDATA.

    A relative path is relative to where the server was started, which nothing keeps; it is known where it ends as the
    data directory does.
    """
    source = f"/proc/{candidate.pid}/cmdline"
    given = candidate.start.settings.get("config_file")
    if given is None:
        given, directory = "postgresql.conf", candidate.start.directory
        if not directory:
            found = variable("PGDATA")
            if isinstance(found, Unknown):
                return found
            directory, source = found.value, found.source
        given = f"{directory}/{given}"
    if given.startswith("/"):
        return Known(_clean(given), source)
    if isinstance(data_directory, Known):
        folder, name = os.path.split(os.path.normpath(given))
        while folder == ".." or folder.startswith("../"):
            folder = folder[3:]
        if not folder or f"{data_directory.value}/".endswith(f"/{folder}/"):
            return Known(f"{data_directory.value}/{name}", f"{source} and {data_directory.source}", "inferred")
    return Unknown(f"{source} has a relative path, and where the server was started is not kept", "use --pgdata")


def _port(candidate: _Candidate, variable: Callable[[str], Fact[str]]) -> Fact[int]:
    """Return the port: line 4 of postmaster.pid, else of the command line, else PGPORT; files are read later."""
    lock = candidate.lock
    if isinstance(lock, Known) and _line(lock.value, 4).isdecimal():
        return Known(int(_line(lock.value, 4)), f"{lock.source} line 4")
    given = candidate.start.settings.get("port", "").strip()
    if given.isdecimal():
        return Known(int(given), f"/proc/{candidate.pid}/cmdline")
    if isinstance(lock, Unknown) and lock.kind == "permission":
        return lock  # a file of the cluster may say otherwise than the environment
    found = variable("PGPORT")
    if isinstance(found, Known) and found.value.isdecimal():
        return Known(int(found.value), found.source, "inferred")
    return lock if isinstance(lock, Unknown) else found if isinstance(found, Unknown) else Unknown("no port is named")


def _socket_directories(candidate: _Candidate) -> Fact[tuple[str, ...]]:
    """Return the directories of its Unix sockets: all from the command line, else the first, from postmaster.pid."""
    lock, given = candidate.lock, candidate.start.settings.get("unix_socket_directories")
    if given is not None:
        names = (word.strip().strip('"') for word in given.split(","))
        return Known(tuple(name for name in names if name), f"/proc/{candidate.pid}/cmdline")
    if isinstance(lock, Known) and len(lock.value) >= 5:
        first = _line(lock.value, 5)
        return Known((first,) if first else (), f"{lock.source} line 5")
    return lock if isinstance(lock, Unknown) else Unknown(f"{lock.source} has no line 5 yet")


def _fork(host: Host, candidate: _Candidate) -> str | None:
    name = _base(candidate.argv[0])
    matched = _SERVER_NAME.match(name)
    if matched is None or matched["fork"]:
        return name or "unnamed"
    exe = _process_link(host, candidate.pid, "exe")
    program = _base(exe.value.removesuffix(" (deleted)")) if isinstance(exe, Known) else ""
    behind = _SERVER_NAME.match(program)
    return program if behind and behind["fork"] else None


# containers --------------------------------------------------------------------------------------


def _root(host: Host, pid: int) -> tuple[str | None, str | None]:
    """Return `/proc/PID/root` if the process sees other files than this one, and that root's path if it has one."""
    if not host.live:
        return None, None
    place = f"/proc/{pid}/root"
    link = host.link(place)
    target = link.value if isinstance(link, Known) else "/"
    here, there = host.link("/proc/self/ns/mnt"), host.link(f"/proc/{pid}/ns/mnt")
    if isinstance(here, Known) and isinstance(there, Known) and here.value != there.value:
        return place, target if target != "/" else None
    return (place, target) if target != "/" else (None, None)


_ID = r"([0-9a-f]{12})[0-9a-f]*"
_CONTAINERS = (
    re.compile(r"[/:](docker|libpod|cri-containerd|crio|containerd|podman|nerdctl)[-/:]" + _ID),
    re.compile(r"/(kubepods)[^:]*/(?:[a-z]+-)*" + _ID + r"(?:\.scope)?(?:/|\Z)"),
    re.compile(r"/(lxc)(?:\.payload)?[./]([^/]+)"),
    re.compile(r"/(machine)\.slice/(?:machine-|systemd-nspawn@)?([^/]+?)\.(?:scope|service)"),
    re.compile(r"/(ecs|garden)/(?:[^/]+/)?" + _ID),
)
"""How container managers name the cgroup of a container: the manager, and an id (cut to twelve digits) or a name."""


def _container(cgroup: str) -> str | None:
    """Return the container that a cgroup path names."""
    paths = [line.split(":", 2)[2] for line in cgroup.split("\n") if line.count(":") >= 2]
    for pattern in _CONTAINERS:
        for path in paths:
            matched = pattern.search(path)
            if matched:
                return f"{matched[1]}-{matched[2]}".replace("\\x2d", "-")
    return None


def _unit(cgroup: str) -> str | None:
    """Return the systemd service that a cgroup path names."""
    matched = re.search(r"/([^/\n]+\.service)(?:/|$)", cgroup, re.M)
    return matched[1].replace("\\x2d", "-") if matched else None


# what cannot be seen -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Socket:
    """A Unix socket on which a server or a connection pooler listens: /proc/net/unix shows it to everybody."""

    path: str
    port: int
    inode: int


_SOCKET_LINE = re.compile(
    r"\S+: \S+ \S+ (?P<flags>[0-9A-Fa-f]{8}) \S+ \S+ +(?P<inode>\d+) (?P<path>.*/\.s\.PGSQL\.(?P<port>\d{1,5}))\Z"
)
_ACCEPTS = 0x10000  # __SO_ACCEPTCON: it listens


def _sockets(host: Host) -> list[_Socket]:
    text = host.read("/proc/net/unix", 64 << 20)
    if isinstance(text, Unknown) or ".s.PGSQL." not in text.value:
        return []
    found: dict[str, _Socket] = {}
    for line in text.value.split("\n"):
        matched = _SOCKET_LINE.match(line) if ".s.PGSQL." in line else None
        if matched and int(matched["flags"], 16) & _ACCEPTS:
            found[matched["path"]] = _Socket(matched["path"], int(matched["port"]), int(matched["inode"]))
    return list(found.values())


def _match_sockets(
    host: Host, processes: _Processes, running: list[Postmaster]
) -> tuple[list[Postmaster], list[_Socket]]:
    """Return postmasters found only by their socket, and the sockets that no visible process explains."""
    ports = {p.port.value for p in running if isinstance(p.port, Known)}
    left = [socket for socket in _sockets(host) if socket.port not in ports]
    unplaced = sum(isinstance(p.port, Unknown) for p in running)
    if not left or len({socket.port for socket in left}) <= unplaced:  # as another user, ports are not known
        return [], []
    holders = _holders(host, processes, {socket.inode for socket in left}) if host.live else {}
    more = []
    for pid in sorted(set(holders.values())):
        candidate = _look_at(host, processes, pid)
        if candidate is not None and all(p.pid != pid for p in running):
            more.append(_describe(host, candidate))
    return more, [socket for socket in left if socket.inode not in holders]


def _holders(host: Host, processes: _Processes, inodes: set[int]) -> dict[int, int]:
    """Return which process holds each socket, poolers looked at first; only for sockets that nothing else explains."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    budget = _MAX_FD_LINKS
    pooler = re.compile(rb"bouncer|pgpool|odyssey|pgcat|pgagroal")
    for pid in sorted(
        [*processes.heads, *processes.servers], key=lambda p: not pooler.search(processes.heads.get(p, b""))
    ):
        names = host.list(f"/proc/{pid}/fd")
        for name in names.value if isinstance(names, Known) else ():
            link = host.link(f"/proc/{pid}/fd/{name}")
            if isinstance(link, Known) and link.value in wanted:
                found.setdefault(wanted[link.value], pid)
            budget -= 1
            if budget <= 0 or len(found) == len(wanted):
                return found
    return found


def _concealed(
    host: Host,
    processes: _Processes,
    running: Sequence[Postmaster],
    stopped: Sequence[StoppedCluster],
    sockets: Sequence[_Socket],
) -> Unknown | None:
    """Return why there may be a running server that was not found, None where nothing says so."""
    barrier = _barrier(host, processes)
    if sockets:
        names = ", ".join(sorted(socket.path for socket in sockets)[:4])
        why = f" ({barrier.reason})" if barrier else ""
        return Unknown(
            f"something listens at {names} and no server that can be seen does: a PostgreSQL server out of sight, "
            f"or a connection pooler{why}",
            barrier.hint if barrier else _run_as_root(host),
            "permission",
        )
    if processes.gap is not None and host.live:
        return Unknown(f"the processes cannot be listed: {processes.gap.reason}", processes.gap.hint)
    if running:
        return None
    for cluster in stopped:
        path = f"{cluster.data_directory}/postmaster.pid"
        if (barrier or not host.live) and isinstance(host.status(path), Known):
            return Unknown(
                f"{path} says that a server runs or ran there, and its process cannot be seen"
                + (f" ({barrier.reason})" if barrier else ""),
                barrier.hint if barrier else "capture /proc/PID of the postmaster too",
            )
    packaged = host.list("/var/lib/pgsql")
    if barrier is None and not stopped and isinstance(packaged, Unknown) and packaged.kind == "permission":
        return Unknown(f"clusters that do not run may be there: {packaged.reason}", packaged.hint, packaged.kind)
    return barrier


def _run_as_root(host: Host) -> str:
    return "run as root" if host.live and os.geteuid() else "run on the host itself"


def _barrier(host: Host, processes: _Processes) -> Unknown | None:
    """Return what keeps processes out of sight: hidepid, a PID namespace, or a capture without processes."""
    hidepid = _hidepid(host)
    if host.live:
        if hidepid and (1 not in processes.pids or processes.refused):
            return Unknown(
                f"/proc is mounted with hidepid={hidepid}, which hides the processes of other users",
                "run as root",
                "permission",
            )
        namespace = host.link("/proc/self/ns/pid")
        if isinstance(namespace, Known) and namespace.value != _INITIAL_PID_NAMESPACE:
            return Unknown(
                "this runs in a PID namespace of its own, where only the processes of its container can be seen",
                "run on the host itself, or share its PID namespace",
            )
        return None
    if processes.heads or processes.servers or processes.backends:
        return None
    if hidepid:
        return Unknown(f"/proc was mounted with hidepid={hidepid} when the host was captured", "capture as root")
    if isinstance(host.status("/proc/net/unix"), Known):
        return None  # the list of sockets was captured, and has none of a server
    return Unknown(
        "the capture holds no processes, so it does not tell whether a server ran",
        "capture with pgpreemptcheck collect",
    )


def _hidepid(host: Host) -> str | None:
    text = host.read("/proc/self/mounts")
    if isinstance(text, Unknown):
        text = host.read("/proc/mounts")
    value = None
    for line in text.value.split("\n") if isinstance(text, Known) else ():
        fields = line.split(" ")
        if len(fields) > 3 and fields[1] == "/proc" and fields[2] == "proc":
            options = [option for option in fields[3].split(",") if option.startswith("hidepid=")]
            value = options[-1].partition("=")[2] if options else None
    return None if value in ("0", "off") else value


# clusters that do not run ------------------------------------------------------------------------


def _stopped(host: Host, pgdata: Sequence[str], running: Sequence[Postmaster]) -> list[StoppedCluster]:
    known: set[str] = set()
    for postmaster in running:
        if postmaster.root is None:  # paths of another root name other files
            known.update(_real(host, f.value) for f in (postmaster.data_directory,) if isinstance(f, Known))
            known.update(_real(host, f.value) for f in (postmaster.config_file,) if isinstance(f, Known))
    found: list[StoppedCluster] = []
    for cluster in _everywhere(host, pgdata):
        names = {_real(host, cluster.data_directory)}
        if isinstance(cluster.config_file, Known):
            names.add(_real(host, cluster.config_file.value))
        if not names & known:
            known |= names
            found.append(cluster)
    return found


def _everywhere(host: Host, pgdata: Sequence[str]) -> Iterable[StoppedCluster]:
    for directory in pgdata:
        yield _given(host, directory)
    yield from _debian(host)
    yield from _red_hat(host)


def _real(host: Host, path: str) -> str:
    """Return the path with its links resolved, as they are on that host."""

    def target(place: str) -> str | None:
        link = host.link(place)
        return link.value if isinstance(link, Known) else None

    try:
        return resolve_inside(path, target)
    except OSError:
        return path


def _exists(host: Host, path: str) -> bool:
    return isinstance(host.status(path), Known)


def _owner(host: Host, directory: str) -> Fact[int]:
    status = host.status(directory)
    return Known(status.value.uid, f"owner of {directory}") if isinstance(status, Known) else status


_DATA_DIRECTORY = re.compile(r"^[ \t]*data_directory[ \t]*=?[ \t]*(?:'((?:[^'\n]|'')*)'|([^\s#']+))", re.M | re.I)


def _named_data_directory(host: Host, config_file: str) -> str | None:
    """Return the data_directory that a configuration file sets: the last one in the file counts."""
    text = host.read(config_file)
    if isinstance(text, Unknown):
        return None
    found = _DATA_DIRECTORY.findall(text.value)
    path = (found[-1][0].replace("''", "'") or found[-1][1]) if found else ""
    return _clean(path) if path.startswith("/") else None


def _given(host: Host, directory: str) -> StoppedCluster:
    """Return the cluster that --pgdata names, by its data directory or by its configuration directory."""
    directory = _clean(os.path.abspath(directory) if host.live else directory)
    config_file = f"{directory}/postgresql.conf"
    data = directory
    if _exists(host, config_file):
        data = _named_data_directory(host, config_file) or directory
        config: Fact[str] = Known(config_file, "--pgdata")
    else:
        for number, name in _debian_clusters(host):
            cluster = _debian_cluster(host, number, name)
            if cluster is not None and _real(host, cluster.data_directory) == _real(host, directory):
                return cluster
        gap = host.status(config_file)
        config = gap if isinstance(gap, Unknown) else Known(config_file, "--pgdata")
    unknown = Unknown("nothing says how this cluster is started", kind="absent")
    return StoppedCluster(data, config, (), _owner(host, data), "--pgdata", unknown)


def _debian_clusters(host: Host) -> Iterable[tuple[str, str]]:
    """Yield (version, name) of the clusters in /etc/postgresql (postgresql-common)."""
    versions = host.list("/etc/postgresql")
    for number in versions.value if isinstance(versions, Known) else ():
        if re.fullmatch(r"\d+(\.\d+)?", number, re.ASCII):
            names = host.list(f"/etc/postgresql/{number}")
            yield from ((number, name) for name in (names.value if isinstance(names, Known) else ()))


def _debian(host: Host) -> Iterable[StoppedCluster]:
    for number, name in _debian_clusters(host):
        cluster = _debian_cluster(host, number, name)
        if cluster is not None:
            yield cluster


def _debian_cluster(host: Host, number: str, name: str) -> StoppedCluster | None:
    folder = f"/etc/postgresql/{number}/{name}"
    config_file = f"{folder}/postgresql.conf"
    if not _exists(host, config_file):
        return None
    data = _named_data_directory(host, config_file) or f"/var/lib/postgresql/{number}/{name}"
    status = host.status(data)
    if isinstance(status, Unknown) and status.kind == "absent" and host.live:
        return None  # configuration left behind by a removed cluster
    argv = ("postgres", "-D", data, "-c", f"config_file={config_file}", *_pg_ctl_options(host, f"{folder}/pg_ctl.conf"))
    starts = _debian_start(host, folder, f"postgresql@{number}-{name}.service")
    return StoppedCluster(data, Known(config_file, folder), argv, _owner(host, data), "/etc/postgresql", starts)


def _pg_ctl_options(host: Host, path: str) -> tuple[str, ...]:
    """Return the server options that pg_ctl.conf adds: the -o parts of pg_ctl_options (pg_createcluster(1))."""
    text = host.read(path)
    line = (
        re.search(r"^[ \t]*pg_ctl_options[ \t]*=[ \t]*(['\"]?)(.*)\1[ \t]*$", text.value, re.M)
        if isinstance(text, Known)
        else None
    )
    if line is None or not line[2].strip():
        return ()
    import shlex

    try:
        words = iter(shlex.split(line[2]))
        options: list[str] = []
        for word in words:
            if word in ("-o", "--options"):
                options += shlex.split(next(words, ""))
            elif word.startswith("--options="):
                options += shlex.split(word.partition("=")[2])
            elif word.startswith("-o"):
                options += shlex.split(word[2:])
    except ValueError:
        return ()
    return tuple(options)


_WANTS = "/etc/systemd/system/multi-user.target.wants"


def _enabled(host: Host, *units: str) -> Fact[bool]:
    """Return whether systemd starts one of these units at boot (systemctl enable)."""
    links = host.list(_WANTS)
    if isinstance(links, Unknown):
        return Unknown(f"whether systemd starts it is not known: {links.reason}", links.hint, links.kind)
    for unit in units:
        if unit in links.value:
            return Known(True, f"{_WANTS}/{unit}")
    return Known(False, f"{_WANTS} (no {' or '.join(units)})", "inferred")


def _debian_start(host: Host, folder: str, unit: str) -> Fact[bool]:
    """Return whether a Debian cluster starts at boot: start.conf (auto, manual, disabled) and the units."""
    path = f"{folder}/start.conf"
    text = host.read(path)
    if isinstance(text, Unknown) and text.kind != "absent":
        return text
    lines = (line.partition("#")[0].strip() for line in (text.value.split("\n") if isinstance(text, Known) else ()))
    word = next((line for line in lines if line), "auto")  # without the file too (PgCommon.pm)
    if word == "disabled":
        return Known(False, path)
    if word not in ("auto", "manual"):
        return Unknown(f"{path} does not hold auto, manual or disabled")
    enabled = _enabled(host, unit, *(["postgresql.service"] if word == "auto" else []))
    if isinstance(enabled, Known) and enabled.value:
        return Known(True, f"{path} ({word}), {enabled.source}")
    if word == "manual":
        return Known(False, path)
    return enabled if isinstance(enabled, Known) else Known(True, path, "inferred")


def _red_hat(host: Host) -> Iterable[StoppedCluster]:
    """Yield the clusters of the packages of Red Hat, SUSE and PGDG, and of units that name a PGDATA."""
    places: list[tuple[str, str]] = [("/var/lib/pgsql/data", "postgresql.service")]
    names = host.list("/var/lib/pgsql")
    for name in names.value if isinstance(names, Known) else ():
        if re.fullmatch(r"\d+(\.\d+)?", name, re.ASCII):
            places.append((f"/var/lib/pgsql/{name}/data", f"postgresql-{name}.service"))
    for unit, directory in _unit_directories(host):
        places.append((directory, unit))
    for directory, unit in places:
        status = host.status(f"{directory}/PG_VERSION")
        if isinstance(status, Unknown) and status.kind == "absent":
            continue
        if isinstance(status, Unknown) and not _exists(host, directory) and unit == "postgresql.service":
            continue  # out of this user's sight: nothing says that it is there
        where = "/var/lib/pgsql" if directory.startswith("/var/lib/pgsql/") else f"/etc/systemd/system ({unit})"
        config: Fact[str] = Known(f"{directory}/postgresql.conf", where)
        argv = ("postgres", "-D", directory)
        yield StoppedCluster(directory, config, argv, _owner(host, directory), where, _enabled(host, unit))


def _unit_directories(host: Host) -> Iterable[tuple[str, str]]:
    """Yield (unit, PGDATA) of the units and drop-ins that an administrator wrote for postgresql services."""
    base = "/etc/systemd/system"
    names = host.list(base)
    for name in names.value if isinstance(names, Known) else ():
        if not name.startswith("postgresql"):
            continue
        files = [f"{base}/{name}"] if name.endswith(".service") else []
        if name.endswith(".service.d"):
            drop_ins = host.list(f"{base}/{name}")
            files = [f"{base}/{name}/{file}" for file in (drop_ins.value if isinstance(drop_ins, Known) else ())]
        for file in files:
            text = host.read(file)
            for matched in _UNIT_PGDATA.finditer(text.value) if isinstance(text, Known) else ():
                yield name.removesuffix(".d"), _clean(matched[1])


_UNIT_PGDATA = re.compile(r"""^[ \t]*Environment=(?:.*[\s"'])?["']?PGDATA=(/[^\s"'%$]+)""", re.M)


def starts_at_boot(host: Host, cluster: Postmaster | StoppedCluster) -> Fact[bool]:
    """Return whether the cluster is started when the host boots: by start.conf or by the enablement of its unit."""
    if isinstance(cluster, StoppedCluster):
        return cluster.starts_at_boot
    if cluster.container is not None:
        return Unknown(f"what starts the container {cluster.container} is not looked at")
    config = cluster.config_file.value if isinstance(cluster.config_file, Known) else ""
    debian = re.fullmatch(r"(/etc/postgresql/([^/]+)/([^/]+))/postgresql\.conf", config)
    if debian:
        return _debian_start(host, debian[1], f"postgresql@{debian[2]}-{debian[3]}.service")
    cgroup = host.read(f"/proc/{cluster.pid}/cgroup")
    unit = _unit(cgroup.value) if isinstance(cgroup, Known) else None
    if unit is None or unit.startswith("user@"):
        return Unknown("the server was not started by a service of the host, so what starts it at boot is not known")
    return _enabled(host, unit)
