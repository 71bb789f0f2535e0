"""Inspection: all readers over one host, in the order that keeps a check short.

Clusters are found first (run.py), so that one child per owner (owner.py) can start up, and import the SQL driver,
while the host's own facts are read and the rules are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pgpreemptcheck.access import Access
from pgpreemptcheck.errors import UserError, describe
from pgpreemptcheck.facts import (
    binary,
    clusters,
    control,
    cpus,
    file_settings,
    processes,
    segment,
    server,
    settings,
    system,
)
from pgpreemptcheck.facts.cgroups import HugetlbLimit, hugetlb_limits
from pgpreemptcheck.facts.clusters import Found, Postmaster, StoppedCluster
from pgpreemptcheck.facts.conffile import Rights
from pgpreemptcheck.facts.control import Control
from pgpreemptcheck.facts.cpus import CpuShare
from pgpreemptcheck.facts.segment import Segment
from pgpreemptcheck.facts.server import Server
from pgpreemptcheck.facts.settings import FileSettings, Settings
from pgpreemptcheck.facts.system import System
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, record

T = TypeVar("T")


@record
class ClusterFacts:
    """Everything read about one cluster. What only a running one has is None where it does not run."""

    id: str
    data_directory: str | None
    version: Fact[str]
    major: Fact[int]
    fork: str | None
    owner: Fact[str]
    config_file: Fact[str]
    container: str | None
    starts_at_boot: Fact[bool]
    standby: Fact[bool]
    control: Fact[Control]
    patroni: Fact[bool]
    files: FileSettings
    freelist: Fact[bool]
    cpus: CpuShare
    hugetlb_limits: tuple[HugetlbLimit, ...] | Unknown
    postmaster: Postmaster | None
    port: Fact[int]
    settings: Settings | None
    segment: Segment | None
    server: Server | None
    unseen: Unknown | None = None
    """Why it may run out of sight, though no process of it was seen (postmaster.pid is there, say)."""
    elsewhere: Unknown | None = None
    """Why nothing of the host is known of it: it runs on another one (--dsn)."""


@record
class Failure:
    """A cluster of which nothing can be said, because of an error of ours."""

    cluster: str
    reason: str


@record
class Facts:
    """What was read of the host and its clusters; `hidden` says that there may be a cluster that cannot be seen."""

    system: System
    clusters: tuple[ClusterFacts, ...]
    hidden: Unknown | None
    errors: tuple[Failure, ...]


def inspect(host: Host, found: Found, access: Access) -> Facts:
    """Return everything that can be read of the host and of the clusters that were found on it."""
    host_facts = system.read(host)
    reader = _Reader(host, found, access, host_facts)
    inspected = tuple(_unique(list(reader.clusters())))
    return Facts(host_facts, inspected, found.concealed, tuple(reader.failures))


class _Reader:
    """Reads one cluster after the other, each with the rights that `access` gives."""

    def __init__(self, host: Host, found: Found, access: Access, host_facts: System) -> None:
        self._host = host
        self._found = found
        self._access = access
        self._system = host_facts
        self.failures: list[Failure] = []

    def clusters(self) -> Iterator[ClusterFacts]:
        """Yield what is known of each cluster; one that an error of ours stands before becomes a failure."""
        begun = [(self._name(p), self._tried(self._name(p), self._running, p)) for p in self._found.running]
        begun += [(c.data_directory, self._tried(c.data_directory, self._stopped, c)) for c in self._found.stopped]
        for name, finish in begun:
            cluster = self._tried(name, finish) if finish is not None else None
            if cluster is not None:
                yield cluster
        yield from self._elsewhere()

    def _name(self, postmaster: Postmaster) -> str:
        return _identity(_known(postmaster.data_directory), postmaster)

    def _tried(self, name: str, read: Callable[..., T], *arguments: object) -> T | None:
        try:
            return read(*arguments)
        except UserError:
            raise
        except Exception as error:  # the other clusters must not be lost with this one
            self.failures.append(Failure(name, describe(error)))
            return None

    def _running(self, postmaster: Postmaster) -> Callable[[], ClusterFacts]:
        """Read all but what the server says over SQL, which may still be on its way, and return what takes that in."""
        host = self._host
        files = self._access.files(postmaster.uid, postmaster.root)
        process = self._access.files(postmaster.uid, None)
        major = clusters.major(host, files, postmaster)
        if postmaster.options is None:
            on_disk = _read_files(
                files,
                postmaster.data_directory,
                postmaster.config_file,
                major,
                postmaster.argv,
                postmaster.fork,
                _rights(host, postmaster.uid, running=True),
                _known(processes.environment(process, postmaster.pid)),
            )
        else:
            on_disk = settings.unread(postmaster.options)  # the files alone do not say what a start takes
        directory = _known(postmaster.data_directory)
        standby = control.is_standby(files, directory) if directory else _NO_DIRECTORY
        pg_control = control.read(files, directory) if directory else _NO_DIRECTORY
        patroni = _patroni(files, postmaster.config_file, directory)
        version = _version(files, directory, major)
        freelist = binary.freelist(process, postmaster.pid, major)
        limits = hugetlb_limits(host, postmaster.pid)
        share = cpus.share(host, postmaster.pid)
        at_boot = clusters.starts_at_boot(host, process, postmaster)

        def finish() -> ClusterFacts:
            said = server.facts(self._access.answer(postmaster))
            sql_settings = said.settings.value if isinstance(said.settings, Known) else None
            now = settings.running(on_disk, sql_settings, postmaster.argv, _known(major), postmaster.started)
            mapped = segment.read(
                process,
                postmaster.pid,
                huge_page_size=now.huge_page_size,
                default_huge_page_bytes=self._system.huge_pages.default_bytes,
                base_page_bytes=self._system.memory.base_page_bytes,
                shmem_thp_possible=self._system.huge_pages.shmem_thp_possible,
            )
            return ClusterFacts(
                id=self._name(postmaster),
                data_directory=directory,
                version=said.version if isinstance(said.version, Known) else version,
                major=major,
                fork=postmaster.fork,
                owner=self._access.user_name(postmaster.uid),
                config_file=postmaster.config_file,
                container=postmaster.container,
                starts_at_boot=at_boot,
                standby=standby,
                control=pg_control,
                patroni=patroni,
                files=on_disk,
                freelist=freelist,
                cpus=share,
                hugetlb_limits=limits,
                postmaster=postmaster,
                port=_port(now.port, postmaster.port),
                settings=now,
                segment=segment.agreed(mapped, said.huge_pages_status, self._system.huge_pages.pools),
                server=said,
            )

        return finish

    def _elsewhere(self) -> Iterator[ClusterFacts]:
        """Yield the server behind --dsn where it is none of this host's: only what it says itself is known."""
        answer = self._access.given_answer()
        if answer is None or any(self._access.is_answer_of(answer, p) for p in self._found.running):
            return
        said = server.facts(answer)
        if isinstance(answer, Unknown) or isinstance(said.settings, Unknown):
            why = answer if isinstance(answer, Unknown) else said.version
            raise UserError(f"--dsn: {why.reason if isinstance(why, Unknown) else 'the server says nothing of itself'}")
        gap = Unknown("the server is elsewhere: not on this host", "run pgpreemptcheck on its own host")
        major = Known(int(answer["version_number"]) // 10000, "sql server_version")
        now = settings.from_server(said.settings.value, major.value)
        yield ClusterFacts(
            id=f"server behind --dsn ({answer.get('server_address') or 'no address'}, port "
            f"{now.port.value if isinstance(now.port, Known) else 'unknown'})",
            data_directory=None,
            version=said.version,
            major=major,
            fork=None,
            owner=gap,
            config_file=gap,
            container=None,
            starts_at_boot=gap,
            standby=said.in_recovery,
            control=gap,
            patroni=gap,
            files=settings.unread(gap),
            freelist=binary.by_major(major, gap),
            cpus=CpuShare(gap, gap, gap),
            hugetlb_limits=gap,
            postmaster=None,
            port=now.port,
            settings=now,
            segment=Segment(gap, gap, gap, gap, gap),
            server=said,
            elsewhere=gap,
        )

    def _stopped(self, cluster: StoppedCluster) -> Callable[[], ClusterFacts]:
        files = self._access.files(cluster.uid, None)
        directory = cluster.data_directory
        version = clusters.version(files, directory)
        major: Fact[int] = (
            Known(int(version.value.partition(".")[0]), version.source) if isinstance(version, Known) else version
        )
        rights = _rights(self._host, cluster.uid, running=False)
        where = Known(directory, cluster.where)
        on_disk = _read_files(files, where, cluster.config_file, major, cluster.argv, None, rights)
        why = Unknown("the cluster does not run, so no program of it can be looked at")
        found = ClusterFacts(
            id=directory,
            data_directory=directory,
            version=version,
            major=major,
            fork=None,
            owner=self._access.user_name(cluster.uid),
            config_file=cluster.config_file,
            container=None,
            starts_at_boot=cluster.starts_at_boot,
            standby=control.is_standby(files, directory),
            control=control.read(files, directory),
            patroni=_patroni(files, cluster.config_file, directory),
            files=on_disk,
            freelist=binary.by_major(major, why),
            cpus=_future_share(self._system),
            hugetlb_limits=Unknown("which cgroup it will start in is not known", "start it, and check again"),
            postmaster=None,
            port=on_disk.settings.port,
            settings=None,
            segment=None,
            server=None,
            unseen=cluster.unseen,
        )
        return lambda: found


_NO_DIRECTORY = Unknown("its data directory is not known", "run as root, or as the cluster's owner")


def _known(fact: Fact[T]) -> T | None:
    return fact.value if isinstance(fact, Known) else None


def _read_files(
    files: Host,
    directory: Fact[str],
    config_file: Fact[str],
    major: Fact[int],
    argv: Sequence[str],
    fork: str | None,
    rights: Rights,
    environment: Mapping[str, str] | None = None,
) -> FileSettings:
    if isinstance(directory, Unknown):
        return settings.unread(directory)
    return file_settings.read(
        files,
        data_directory=directory.value,
        config_file=_known(config_file),
        major=_known(major),
        argv=argv,
        fork=fork,
        rights=rights,
        environment=environment,
    )


def _port(running: Fact[int], found: Fact[int]) -> Fact[int]:
    """Return the port of a running server: `found` in its process or lock file, where its settings do not tell it."""
    if isinstance(running, Known) or (isinstance(found, Known) and not 1 <= found.value <= 65535):
        return running
    return found


def _rights(host: Host, uid: Fact[int], *, running: bool) -> Rights:
    """Return with whose rights a cluster's files are read: root takes on those of its server (owner.py)."""
    if not host.live or isinstance(uid, Unknown) or uid.value == 0:
        return "other"
    me = os.geteuid()
    if me == 0 and running:
        return "server"
    return "owner" if me in (0, uid.value) else "other"


def _version(files: Host, directory: str | None, major: Fact[int]) -> Fact[str]:
    if directory is not None:
        written = clusters.version(files, directory)
        if isinstance(written, Known):
            return written
    return Known(str(major.value), major.source, major.certainty) if isinstance(major, Known) else major


def _patroni(files: Host, config_file: Fact[str], directory: str | None) -> Fact[bool]:
    """Return whether Patroni writes the configuration (its banner at the top of postgresql.conf)."""
    path = _known(config_file) or (f"{directory}/postgresql.conf" if directory else None)
    if path is None:
        return _NO_DIRECTORY
    head = files.read_range(path, 0, 512)
    if isinstance(head, Unknown):
        return head
    return Known(b"overwritten by Patroni" in head.value, path)


def _future_share(host_facts: System) -> CpuShare:
    """Return what a cluster that does not run may use when it does: all that the host has, as far as is known."""
    online = host_facts.cpus.online
    if isinstance(online, Known):
        online = Known(online.value, f"{online.source} (it does not run: nothing may pin it)", "inferred")
    why = Unknown("which cgroup and cpuset it will start in is not known", "start it, and check again")
    return CpuShare(online, why, why)


def _identity(directory: str | None, postmaster: Postmaster) -> str:
    """Return a name that stays the same over restarts where it can: the data directory, and its container."""
    name = directory or f"pid {postmaster.pid}"
    return f"{name} in {postmaster.container}" if postmaster.container else name


def _unique(found: Sequence[ClusterFacts]) -> Iterator[ClusterFacts]:
    """Tell apart clusters that would have the same id (two containers without a name of their own)."""
    seen: set[str] = set()
    for cluster in found:
        name = cluster.id
        if name in seen and cluster.postmaster is not None:
            name = f"{name} pid {cluster.postmaster.pid}"
        while name in seen:
            name += "'"
        seen.add(name)
        yield replace(cluster, id=name) if name != cluster.id else cluster
