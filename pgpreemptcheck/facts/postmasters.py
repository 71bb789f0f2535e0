"""Running postmasters: which of the processes are some, and what each one says of its cluster.

Known by their own process (command line, working directory, lock file), never by a default path or a port.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from pgpreemptcheck.facts.containers import container_name, mount_name, root_of, service_unit
from pgpreemptcheck.facts.postmaster_options import options
from pgpreemptcheck.facts.processes import (
    MAYBE_SERVER,
    Processes,
    base,
    environment,
    is_loader,
    named_as_server,
    process_link,
    process_status,
    program,
    server_behind_loader,
    split,
)
from pgpreemptcheck.host import ContainerHost, Host, LiveHost
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, record

CAPTURED_CLOCK_TICKS = 100
"""USER_HZ of every architecture but alpha and ia64: the unit of starttime in a captured /proc/PID/stat."""


@record
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
    lock: tuple[str, ...] = ()
    """The lines of its data directory's postmaster.pid, if that names it: then the cluster is its own."""
    options: Unknown | None = None
    """Why the options that it was started with are not known, None where `argv` has them."""
    disbelieved: Unknown | None = None
    """Why what it says of its cluster is not believed: its data directory belongs to another user."""


# what a start is ---------------------------------------------------------------------------------

_NOT_A_SERVER = ("--single", "--boot", "--check", "--describe-config", "--version", "-V", "--help", "-?")


@record
class _Start:
    """The options of a server's command line that say where its cluster is; settings by canonical name."""

    directory: str | None  # -D
    settings: dict[str, str]
    serves: bool  # False: a run that ends by itself (-C, --single, --version)


def _parse(argv: Sequence[str]) -> _Start:
    directory = None
    settings: dict[str, str] = {}
    serves = len(argv) < 2 or not (argv[1] in _NOT_A_SERVER or argv[1].startswith("--fork"))
    for letter, value in options(argv):
        if letter == "D":
            directory = value
        elif letter == "C":
            serves = False
        elif letter in "-c":
            _set(settings, value)
        elif letter in _SHORT:
            settings[_SHORT[letter]] = value
    return _Start(directory, settings, serves)


_SHORT = {"p": "port", "k": "unix_socket_directories"}


def _set(settings: dict[str, str], assignment: str) -> None:
    name, equals, value = assignment.partition("=")
    if equals:
        settings[name.strip().replace("-", "_").lower()] = value


def postmaster(host: Host, pid: int, processes: Processes) -> Postmaster | None:
    """Return that process as a postmaster, None if it is not one."""
    candidate = _look_at(host, processes, pid)
    return _describe(host, candidate) if candidate is not None else None


def postmasters(host: Host, processes: Processes) -> list[Postmaster]:
    """Return the running postmasters."""
    candidates = [*processes.servers]
    candidates += [pid for pid, head in processes.heads.items() if any(word in head.lower() for word in MAYBE_SERVER)]
    candidates += [*processes.unnamed, *(pid for pid, head in processes.heads.items() if not head)]
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


@record
class _Candidate:
    pid: int
    argv: list[str]
    options: Unknown | None
    start: _Start
    source: str
    """Where its command line was read."""
    status: dict[str, str]
    uid: Fact[int]
    cwd: Fact[str]
    lock: Fact[list[str]]
    """The lines of its own postmaster.pid."""
    confirmed: bool

    @property
    def parent(self) -> int:
        word = self.status.get("PPid", "")
        return int(word) if is_number(word) else 0


def _same_cluster(child: _Candidate, parent: _Candidate) -> bool:
    """Return whether a process is a child that has not renamed itself yet, rather than a server of its own."""
    if child.confirmed:
        return False
    if isinstance(child.cwd, Known) and isinstance(parent.cwd, Known):
        return child.cwd.value == parent.cwd.value
    return child.start == parent.start


def _look_at(host: Host, processes: Processes, pid: int) -> _Candidate | None:
    """Return what is known of a process if it is a postmaster, by its lock file or by the shape of its start."""
    raw = processes.command_line(host, pid)
    status = process_status(host, pid)
    if status is None or (host.live and isinstance(raw, Unknown)):
        return None
    listed = processes.listed.get(pid)
    if listed is not None and listed.parent is not None:
        status.setdefault("PPid", str(listed.parent))
    options = raw if isinstance(raw, Unknown) else None
    if listed is not None and listed.cut and isinstance(raw, Known) and raw.source.startswith(listed.source):
        options = Unknown(f"{raw.source} may be cut off", "capture the output of ps auxww too")
    argv = split(raw.value, captured=not host.live) if isinstance(raw, Known) else [""]
    argv = argv[server_behind_loader(argv) :]
    if not host.live and pid in processes.servers and named_as_server(base(argv[0])) is None:
        options = options or Unknown(f"the command line of PID {pid} is not that of a server", "capture it again")
    if options is not None:  # known by the name of its program alone
        argv = [program(host, pid) or "postgres"]
    start = _parse(argv) if options is None else _Start(None, {}, True)
    if not start.serves:
        return None
    source = raw.source if isinstance(raw, Known) else f"/proc/{pid}/cmdline"
    cwd = process_link(host, pid, "cwd")
    lock = _lock(host, pid, status, cwd, start)
    confirmed = isinstance(lock, Known) or (
        not host.live and isinstance(host.status(f"/proc/{pid}/pgpreemptcheck.json"), Known)
    )
    uid = _uid(pid, status, listed.uid if listed is not None else None)
    candidate = _Candidate(pid, argv, options, start, source, status, uid, cwd, lock, confirmed)
    if confirmed or (pid in processes.servers and _looks_started(host, processes, candidate)):
        return candidate
    return None


def _looks_started(host: Host, processes: Processes, candidate: _Candidate) -> bool:
    """Return whether a process that bears a server's name is one, its lock file out of sight or not yet written."""
    if candidate.options is not None:
        return True
    exe = process_link(host, candidate.pid, "exe")
    if isinstance(exe, Known) and (host.live or exe.value.isprintable()):
        name = base(exe.value.removesuffix(" (deleted)"))
        if named_as_server(name) is None and not is_loader(name):
            return False
    settings = candidate.start.settings
    if candidate.start.directory or "config_file" in settings or "data_directory" in settings:
        return True
    variables = environment(host, candidate.pid)
    if isinstance(variables, Known):
        return "PGDATA" in variables.value
    if not host.live and program(host, candidate.pid) is not None:
        return True  # its program is a server's, and a run that ends by itself would say so
    parents = ((process_status(host, pid) or {}).get("PPid") for pid in processes.backends)
    listed = (processes.listed[pid].parent for pid in processes.backends if pid in processes.listed)
    return str(candidate.pid) in parents or candidate.pid in listed


def _lock(host: Host, pid: int, status: dict[str, str], cwd: Fact[str], start: _Start) -> Fact[list[str]]:
    """Return the lines of the postmaster.pid that names this process, from its working directory or its -D.

    Its working directory is its data directory (ChangeToDataDir). Inside of a PID namespace the file has the number
    that the process has there: the last one of NSpid.
    """
    own = {str(pid), (status.get("NSpid") or str(pid)).split()[-1]}
    gap: Unknown | None = None
    if isinstance(cwd, Unknown):
        gap = Unknown(f"the working directory of PID {pid} cannot be read", _hint(cwd), cwd.kind)
    for directory in _places(host, pid, cwd, start):
        path = f"{directory}/postmaster.pid"
        text = _read_lock(host, directory)
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
    elsewhere = root_of(host, pid)[0] is not None  # the same path is another file here
    return [*places, given] if given.startswith("/") and not elsewhere else places


def _hint(gap: Unknown) -> str:
    return "run as root or as the owner of the cluster" if gap.kind == "permission" else gap.hint


# what a postmaster says of itself ----------------------------------------------------------------


def _describe(host: Host, candidate: _Candidate) -> Postmaster:
    pid, uid = candidate.pid, candidate.uid
    cgroup = host.read(f"/proc/{pid}/cgroup")
    root, other_root = root_of(host, pid)
    text = cgroup.value if isinstance(cgroup, Known) else ""
    container = container_name(text) if root or not host.live else None
    variables: list[Fact[dict[str, str]]] = []

    def variable(name: str) -> Fact[str]:
        if not variables:  # read once, and only where the command line leaves it open
            variables.append(environment(host, pid))
        seen = variables[0]
        if isinstance(seen, Unknown):
            return Unknown(f"the environment of PID {pid} cannot be read", _hint(seen), seen.kind)
        if name not in seen.value:
            return Unknown(f"{name} is not in the environment of PID {pid}", kind="absent")
        return Known(seen.value[name], f"{seen.source} ({name})")

    directory = _data_directory(candidate, other_root, candidate.confirmed or not host.live, variable)
    doubt = _disbelief(host, pid, uid, root, directory)
    lock = tuple(candidate.lock.value) if isinstance(candidate.lock, Known) and doubt is None else ()
    path = directory.value if isinstance(directory, Known) else None
    # a service of the host may have mounts of its own, and so may anything that has this directory in them as it is
    if root and container is None and service_unit(text) is None and not (path and has_lock(host, path, lock)):
        container = mount_name(host, pid, path) or "another mount namespace"
    return Postmaster(
        pid=pid,
        argv=tuple(candidate.argv),
        uid=uid,
        started=_started(host, candidate),
        data_directory=doubt or directory,
        config_file=doubt or _config_file(candidate, directory, variable),
        port=doubt or _port(candidate, variable),
        socket_directories=doubt or _socket_directories(candidate),
        root=root,
        container=container,
        fork=_fork(host, candidate),
        options=candidate.options,
        lock=lock,
        disbelieved=doubt,
    )


def has_lock(host: Host, directory: str, lock: Sequence[str]) -> bool:
    """Return whether a directory holds this postmaster.pid: then a server in another mount namespace runs from it.

    Process, start time and the key of its memory (lines 1, 3 and 7) tell it from any other.
    """

    def marks(lines: Sequence[str]) -> list[str]:
        return [line.strip() for line in (*lines[:1], *lines[2:3], *lines[6:7])]

    if len(lock) < 3:
        return False
    text = _read_lock(host, directory)
    return isinstance(text, Known) and marks(text.value.split("\n")) == marks(lock)


def _read_lock(host: Host, directory: str) -> Fact[str]:
    """Return the postmaster.pid of a directory; below it only: another user's link must not make root open a device."""
    if isinstance(host, LiveHost):
        return ContainerHost(directory).read("/postmaster.pid", 4096)
    return host.read(f"{directory}/postmaster.pid", 4096)


def _disbelief(host: Host, pid: int, uid: Fact[int], root: str | None, directory: Fact[str]) -> Unknown | None:
    """Return why a process cannot be the server of the data directory that it names, None if it can be.

    Anybody may start a program under a server's name with another user's data directory on its command line. A server
    refuses to run on a directory that its user does not own (checkDataDir in miscinit.c, 13 to 19). Below a
    container's root both users are numbers of this process's own user namespace, so they compare there too. A captured
    folder belongs to whoever captured it.
    """
    if not host.live or isinstance(directory, Unknown):
        return None
    files = ContainerHost(root) if root is not None and isinstance(host, LiveHost) else host
    status = files.status(directory.value)
    if isinstance(status, Unknown) or (isinstance(uid, Known) and uid.value == status.value.uid):
        return None
    version = files.status(f"{directory.value}/PG_VERSION")
    if isinstance(version, Unknown) and version.kind == "absent":
        return None  # no data directory: a configuration directory, which may belong to anybody
    runs_as = f"as uid {uid.value}" if isinstance(uid, Known) else "with the rights of two users"
    return Unknown(
        f"PID {pid} runs {runs_as} and names {directory.value}, which belongs to uid {status.value.uid}: "
        "no server runs on another user's data directory",
        f"find out what PID {pid} is",
        kind="unsupported",
    )


def _uid(pid: int, status: dict[str, str], listed: int | None) -> Fact[int]:
    fields = status.get("Uid", "").split()
    path = f"/proc/{pid}/status"
    if len(fields) < 2 or not is_number(fields[1]):
        if listed is not None:
            return Known(listed, "the output of ps")
        return Unknown(f"{path} does not say the owner", kind="absent")
    if len(set(fields)) != 1:  # a setuid program under a server's name must not lend us the rights of its owner
        return Unknown(f"{path}: its real and effective users differ, as no server's do", kind="unsupported")
    return Known(int(fields[1]), path)


def _started(host: Host, candidate: _Candidate) -> Fact[float]:
    """Return when the postmaster started: its own start time (field 22 of stat), else line 3 of postmaster.pid."""
    path = f"/proc/{candidate.pid}/stat"
    text = host.read(path)
    if isinstance(text, Known):
        fields = text.value.rpartition(")")[2].split()
        booted = _booted(host)
        if len(fields) > 19 and is_number(fields[19]) and isinstance(booted, Known):
            ticks = os.sysconf("SC_CLK_TCK") if host.live else CAPTURED_CLOCK_TICKS
            return Known(booted.value + int(fields[19]) / ticks, path)
    if isinstance(candidate.lock, Known):
        line = _line(candidate.lock.value, 3)
        if is_number(line):
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
    word = ("\n" + text.value).partition("\nbtime ")[2].partition("\n")[0].strip()
    return Known(float(word), "/proc/stat") if is_number(word) else Unknown("/proc/stat has no btime")


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
    if candidate.options is not None:
        return candidate.options
    source = candidate.source
    given = candidate.start.settings.get("data_directory", "")
    if given.startswith("/"):
        return Known(clean_path(given), source)
    directory = candidate.start.directory or ""
    if not directory:
        found = variable("PGDATA")
        if isinstance(found, Unknown):
            return Unknown(f"the working directory of PID {pid} cannot be read, and {found.reason}", found.hint)
        directory, source = found.value, found.source
    if directory.startswith("/"):  # a configuration directory can name another data directory in its file
        return Known(clean_path(directory), source, "inferred")
    gap = cwd if isinstance(cwd, Unknown) else Unknown(f"PID {pid} was started with a relative path")
    return Unknown(f"the working directory of PID {pid} cannot be read", _hint(gap), gap.kind)


def clean_path(path: str) -> str:
    """Return an absolute path as PostgreSQL shows it (canonicalize_path): no `.`, no doubled or trailing slash."""
    return os.path.normpath("/" + path.lstrip("/"))


def _config_file(candidate: _Candidate, data_directory: Fact[str], variable: Callable[[str], Fact[str]]) -> Fact[str]:
    """Return the configuration file: config_file, else postgresql.conf in -D or PGDATA.

    A relative path is relative to where the server was started, which nothing keeps; it is known where it ends as the
    data directory does.
    """
    if candidate.options is not None:
        return candidate.options
    source = candidate.source
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
        return Known(clean_path(given), source)
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
    if isinstance(lock, Known) and is_number(_line(lock.value, 4)):
        return Known(int(_line(lock.value, 4)), f"{lock.source} line 4")
    given = candidate.start.settings.get("port", "").strip()
    if is_number(given):
        return Known(int(given), candidate.source)
    if isinstance(lock, Unknown) and lock.kind == "permission":
        return lock  # a file of the cluster may say otherwise than the environment
    if candidate.options is not None:
        return candidate.options
    found = variable("PGPORT")
    if isinstance(found, Known) and is_number(found.value):
        return Known(int(found.value), found.source, "inferred")
    return lock if isinstance(lock, Unknown) else found if isinstance(found, Unknown) else Unknown("no port is named")


def _socket_directories(candidate: _Candidate) -> Fact[tuple[str, ...]]:
    """Return the directories of its Unix sockets: all from the command line, else the first, from postmaster.pid."""
    lock, given = candidate.lock, candidate.start.settings.get("unix_socket_directories")
    if given is not None:
        names = (word.strip().strip('"') for word in given.split(","))
        return Known(tuple(name for name in names if name), candidate.source)
    if isinstance(lock, Known) and len(lock.value) >= 5:
        first = _line(lock.value, 5)
        return Known((first,) if first else (), f"{lock.source} line 5")
    return lock if isinstance(lock, Unknown) else Unknown(f"{lock.source} has no line 5 yet")


def _fork(host: Host, candidate: _Candidate) -> str | None:
    name = base(candidate.argv[0])
    if named_as_server(name) != "":
        return name or "unnamed"
    exe = process_link(host, candidate.pid, "exe")
    program = base(exe.value.removesuffix(" (deleted)")) if isinstance(exe, Known) else ""
    return program if named_as_server(program) else None
