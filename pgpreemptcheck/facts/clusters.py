"""PostgreSQL clusters on the host: running postmasters, data directories that do not run, and what hides others."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from pgpreemptcheck.facts.containers import service_unit
from pgpreemptcheck.facts.datadirs import StoppedCluster, debian_start, enabled, is_version, real_path, stopped_clusters
from pgpreemptcheck.facts.postmasters import Postmaster, postmaster, postmasters
from pgpreemptcheck.facts.processes import Processes, process_link
from pgpreemptcheck.host import Host, LiveHost
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, record

__all__ = ["Found", "Postmaster", "StoppedCluster", "find", "major", "starts_at_boot", "version"]

_MAX_FD_LINKS = 20_000
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h, since 3.8


AsOwner = Callable[[int, Sequence[Postmaster]], Host]
"""Gives the files of this host with the rights of a user, of whose servers some run."""


@record
class Found:
    """The clusters of a host. `concealed` says that there may be one that cannot be seen, and why."""

    running: tuple[Postmaster, ...]
    stopped: tuple[StoppedCluster, ...]
    concealed: Unknown | None


def find(host: Host, pgdata: Sequence[str] = (), as_owner: AsOwner | None = None) -> Found:
    """Return all clusters of a host: running ones from /proc, others where Debian, Red Hat and SUSE keep them.

    `pgdata` names further data directories (or configuration directories). `as_owner` lets root read with a user's
    rights what that user may have written; without it, it is read as is.
    """
    processes = Processes(host)
    running = _without_pretenders(host, _with_their_owners(host, processes, postmasters(host, processes)))
    found_by_socket, sockets = _match_sockets(host, processes, running)
    running += found_by_socket
    barrier = _barrier(host, processes)

    def files(uid: int) -> Host:
        return host if as_owner is None else as_owner(uid, running)

    stopped = [
        replace(cluster, unseen=_unseen(host, processes, barrier, cluster))
        for cluster in stopped_clusters(host, pgdata, running, files)
    ]
    concealed = _concealed(host, processes, running, stopped, sockets, barrier)
    return Found(tuple(sorted(running, key=lambda p: p.pid)), tuple(stopped), concealed)


def _with_their_owners(host: Host, processes: Processes, running: list[Postmaster]) -> list[Postmaster]:
    """Return the postmasters, looked at again with their owners' rights where root has too few to see them whole.

    Root in a container lacks SYS_PTRACE as a rule: it may not read the working directory or the environment of
    another user's process, which that user may.
    """
    if not isinstance(host, LiveHost) or os.geteuid() != 0:
        return running
    seen: list[Postmaster] = []
    for found in running:
        cwd = host.link(f"/proc/{found.pid}/cwd")
        if isinstance(cwd, Unknown) and cwd.kind == "permission" and isinstance(found.uid, Known):
            from pgpreemptcheck import owner

            with owner.start(found.uid.value, like=found.pid) as rights:
                found = postmaster(rights.host(), found.pid, processes) or found
        seen.append(found)
    return seen


def _without_pretenders(host: Host, running: list[Postmaster]) -> list[Postmaster]:
    """Return the postmasters without those that name a data directory whose postmaster.pid names another of them.

    Such a one is a start that is about to be refused, or no server at all.
    """
    if not any(found.lock for found in running):
        return running

    def place(found: Postmaster) -> tuple[str | None, str | None]:
        directory = found.data_directory
        return found.root, real_path(host, directory.value) if isinstance(directory, Known) else None

    taken = {place(found) for found in running if found.lock}
    return [found for found in running if found.lock or place(found) not in taken]


def version(host: Host, data_directory: str) -> Fact[str]:
    """Return the major version that a data directory belongs to, as its PG_VERSION says (`15`, `9.6`)."""
    path = os.path.join(data_directory, "PG_VERSION")
    text = host.read(path, 4096)
    if isinstance(text, Unknown):
        return text
    word = text.value.strip()
    if not is_version(word):
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
    exe = process_link(host, postmaster.pid, "exe")
    for path in ([exe] if isinstance(exe, Known) else []) + [Known(postmaster.argv[0], "its command line")]:
        matched = re.search(_VERSION_IN_PATH, path.value)
        if matched:
            return Known(int(matched[1]), f"the path of its program ({path.value})", "inferred")
    return written


_VERSION_IN_PATH = r"/(?:postgresql|postgres|pgsql|pg|as)[-/]?(\d{1,2})(?:\.\d+)*/(?:.*/)?[^/]*\Z"


def starts_at_boot(host: Host, files: Host, cluster: Postmaster | StoppedCluster) -> Fact[bool]:
    """Return whether the cluster is started when the host boots: by start.conf or by the enablement of its unit.

    `files` reads files with the rights of its owner.
    """
    if isinstance(cluster, StoppedCluster):
        return cluster.starts_at_boot
    if cluster.container is not None:
        return Unknown(f"it runs in {cluster.container}, and what starts that is not looked at")
    config = cluster.config_file.value if isinstance(cluster.config_file, Known) else ""
    parts = config.split("/")
    if parts[:3] == ["", "etc", "postgresql"] and len(parts) == 6:
        return debian_start(host, files, config.rpartition("/")[0], f"postgresql@{parts[3]}-{parts[4]}.service")
    cgroup = host.read(f"/proc/{cluster.pid}/cgroup")
    unit = service_unit(cgroup.value) if isinstance(cgroup, Known) else None
    if unit is None or unit.startswith("user@"):
        return Unknown("the server was not started by a service of the host, so what starts it at boot is not known")
    return enabled(host, unit)


# what cannot be seen -----------------------------------------------------------------------------


@record
class _Socket:
    """A Unix socket on which a server or a connection pooler listens: /proc/net/unix shows it to everybody."""

    path: str
    port: int
    inode: int


_POOLERS = (b"bouncer", b"pgpool", b"odyssey", b"pgcat", b"pgagroal")
_ACCEPTS = 0x10000  # __SO_ACCEPTCON: it listens


def _sockets(host: Host) -> list[_Socket]:
    text = host.read("/proc/net/unix", 64 << 20)
    if isinstance(text, Unknown) or ".s.PGSQL." not in text.value:
        return []
    found: dict[str, _Socket] = {}
    for line in text.value.split("\n"):
        place, named, port = line.rpartition("/.s.PGSQL.")
        fields = place.split(maxsplit=7)  # Num RefCount Protocol Flags Type St Inode Path
        if not named or len(fields) < 7 or not is_number(port) or not is_number(fields[6]):
            continue
        try:
            listens = int(fields[3], 16) & _ACCEPTS
        except ValueError:
            continue
        if listens:
            path = (fields[7] if len(fields) > 7 else "") + named + port
            found[path] = _Socket(path, int(port), int(fields[6]))
    return list(found.values())


def _match_sockets(
    host: Host, processes: Processes, running: list[Postmaster]
) -> tuple[list[Postmaster], list[_Socket]]:
    """Return postmasters found only by their socket, and the sockets that no visible process explains."""
    ports = {p.port.value for p in running if isinstance(p.port, Known)}
    left = [socket for socket in _sockets(host) if socket.port not in ports]
    unplaced = sum(isinstance(p.port, Unknown) and p.disbelieved is None for p in running)
    if not left or len({socket.port for socket in left}) <= unplaced:  # as another user, ports are not known
        return [], []
    holders = _holders(host, processes, {socket.inode for socket in left}) if host.live else {}
    more = []
    for pid in sorted(set(holders.values())):
        found = postmaster(host, pid, processes)
        if found is not None and all(p.pid != pid for p in running):
            more.append(found)
    return more, [socket for socket in left if socket.inode not in holders]


def _holders(host: Host, processes: Processes, inodes: set[int]) -> dict[int, int]:
    """Return which process holds each socket, poolers looked at first; only for sockets that nothing else explains."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    budget = _MAX_FD_LINKS

    def unlikely(pid: int) -> bool:
        return not any(name in processes.heads.get(pid, b"") for name in _POOLERS)

    for pid in sorted([*processes.heads, *processes.servers], key=unlikely):
        names = host.list(f"/proc/{pid}/fd")
        for name in names.value if isinstance(names, Known) else ():
            link = host.link(f"/proc/{pid}/fd/{name}")
            if isinstance(link, Known) and link.value in wanted:
                found.setdefault(wanted[link.value], pid)
            budget -= 1
            if budget <= 0 or len(found) == len(wanted):
                return found
    return found


def _unseen(host: Host, processes: Processes, barrier: Unknown | None, cluster: StoppedCluster) -> Unknown | None:
    """Return why a cluster may run though no process of it was seen, None where it does not run.

    A server keeps its postmaster.pid as long as it runs, and one that crashed leaves it behind.
    """
    path = f"{cluster.data_directory}/postmaster.pid"
    gap = (processes.gap if host.live else None) or barrier
    if host.live:
        status = host.status(path)
        if gap is None or (isinstance(status, Unknown) and status.kind == "absent"):
            return None
        there = "is there" if isinstance(status, Known) else "cannot be read"
        return Unknown(f"{path} {there}, but its process may be out of sight: {gap.reason}", gap.hint, gap.kind)
    lock = host.read(path, 4096)
    if isinstance(lock, Unknown) and lock.kind == "absent":
        whole = isinstance(host.status(f"{cluster.data_directory}/PG_VERSION"), Known)
        return None if gap is None or whole else gap
    if processes.listed and isinstance(lock, Known):
        word = lock.value.partition("\n")[0].strip()
        if is_number(word) and int(word) not in processes.listed:
            return None  # left behind: ps lists every process
    why = f": {gap.reason}" if gap else ", which may be for want of capturing it"
    return Unknown(
        f"{path} is there, but no process of its server is in the capture{why}",
        "capture /proc/PID of the postmaster too",
    )


def _concealed(
    host: Host,
    processes: Processes,
    running: Sequence[Postmaster],
    stopped: Sequence[StoppedCluster],
    sockets: Sequence[_Socket],
    barrier: Unknown | None,
) -> Unknown | None:
    """Return why there may be a running server that was not found, None where nothing says so."""
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
    unseen = next((cluster.unseen for cluster in stopped if cluster.unseen is not None), None)
    trace = _children_alone(processes, running) if host.live else _captured_traces(host, processes, running)
    if unseen is not None or trace is not None or running:
        return trace or unseen
    packaged = host.list("/var/lib/pgsql")
    if barrier is None and not stopped and isinstance(packaged, Unknown) and packaged.kind == "permission":
        return Unknown(f"clusters that do not run may be there: {packaged.reason}", packaged.hint, packaged.kind)
    return barrier


def _children_alone(processes: Processes, running: Sequence[Postmaster]) -> Unknown | None:
    if running or not processes.backends:
        return None
    return Unknown(
        f"PID {processes.backends[0]} calls itself a process of a PostgreSQL server, and which one is its postmaster "
        "cannot be told",
        "run as root, or give the data directory with --pgdata",
    )


def _captured_traces(host: Host, processes: Processes, running: Sequence[Postmaster]) -> Unknown | None:
    """Return what in a capture tells of a server that was not found in it."""
    found = {postmaster.pid for postmaster in running}
    ports = {postmaster.port.value for postmaster in running if isinstance(postmaster.port, Known)}
    names = host.list("/sql")
    asked = [
        name
        for name in (names.value if isinstance(names, Known) else ())
        if is_number(name.removesuffix(".json")) and name.endswith(".json") and int(name[:-5]) not in ports
    ]
    if len(asked) > sum(isinstance(postmaster.port, Unknown) for postmaster in running):
        return Unknown(
            f"/sql/{asked[0]} has the answers of a server, and no process in the capture has its port",
            "capture /proc/PID of the postmaster too",
        )
    if not found and processes.servers:
        pid = processes.servers[0]
        listed = processes.listed.get(pid)
        shown = f" ({listed.command[:200]})" if listed else ""
        return Unknown(
            f"PID {pid}{shown} of the capture has the name of a PostgreSQL server, and what it is cannot be told",
            "capture all of /proc/PID of the postmaster",
        )
    alone = _children_alone(processes, running)
    if alone is not None:
        return alone
    unnamed = [pid for pid in processes.unnamed if pid not in found]
    if unnamed and (processes.heads or found):
        return Unknown(
            f"nothing in the capture says what PID {unnamed[0]} is", "capture cmdline, comm and exe of each process"
        )
    return None


def _run_as_root(host: Host) -> str:
    return "run as root" if host.live and os.geteuid() else "run on the host itself"


def _barrier(host: Host, processes: Processes) -> Unknown | None:
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
    if processes.heads or processes.servers or processes.backends or processes.listed:
        return None
    if hidepid:
        return Unknown(f"/proc was mounted with hidepid={hidepid} when the host was captured", "capture as root")
    if isinstance(host.status("/proc/net/unix"), Known):
        return None  # the list of sockets was captured, and has none of a server
    return Unknown(
        "the capture holds no processes, so it does not tell whether a server ran",
        "capture /proc/PID of the postmaster too, or run it on the host itself",
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
