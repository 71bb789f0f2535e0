"""Data directories that nothing runs from: where Debian, Red Hat, SUSE and PGDG keep them, and where --pgdata says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence

from pgpreemptcheck.facts import conffile
from pgpreemptcheck.facts.postmasters import Postmaster, clean_path, has_lock
from pgpreemptcheck.host import Host, resolve_inside
from pgpreemptcheck.values import Fact, Known, Unknown, record

Files = Callable[[int], Host]
"""Gives the files of a host with the rights of a user: of whoever could have made a link of one of them."""


@record
class StoppedCluster:
    """A data directory that nothing that can be seen runs from."""

    data_directory: str
    config_file: Fact[str]
    argv: tuple[str, ...]  # the command line of its start, program first, as far as known (pg_ctl.conf, unit files)
    uid: Fact[int]
    where: str  # how it was found: --pgdata, /etc/postgresql, /var/lib/pgsql
    starts_at_boot: Fact[bool]
    unseen: Unknown | None = None
    """Why it may run all the same, out of sight; None where it does not run."""


def stopped_clusters(
    host: Host, pgdata: Sequence[str], running: Sequence[Postmaster], files: Files
) -> list[StoppedCluster]:
    """Return the clusters of the usual places and of --pgdata that are none of the running ones.

    `host` only says what is there and whose it is; what another user may have written is read through `files`.
    """
    taken: dict[str, set[int | None]] = {}  # real path of a data directory or configuration file: who runs from it

    def take(paths: Iterable[str], uid: Fact[int]) -> None:
        for path in paths:
            taken.setdefault(path, set()).add(uid.value if isinstance(uid, Known) else None)

    for postmaster in running:
        if postmaster.root is None:  # paths of another root name other files
            named = (postmaster.data_directory, postmaster.config_file)
            take((real_path(host, path.value) for path in named if isinstance(path, Known)), postmaster.uid)
    found: list[StoppedCluster] = []
    known: set[str] = set()

    def runs_from(config_file: str) -> bool:
        """Return whether a process of the very user whose configuration it is runs from it: no need to read it."""
        status = host.status(config_file) if host.live else None
        return isinstance(status, Known) and status.value.uid in taken.get(real_path(host, config_file), ())

    # those first that say of themselves what is so: another user's configuration may name any data directory
    for cluster in sorted(_everywhere(host, pgdata, files, runs_from), key=lambda c: isinstance(c.uid, Unknown)):
        names = {real_path(host, cluster.data_directory)}
        if isinstance(cluster.config_file, Known):
            names.add(real_path(host, cluster.config_file.value))
        status = host.status(cluster.data_directory)
        users = set().union(*(taken.get(name, set()) for name in names))
        owner = status.value.uid if isinstance(status, Known) and host.live else None
        runs = owner in users if owner is not None else bool(users)
        runs = runs or any(
            isinstance(p.uid, Known) and p.uid.value == owner and has_lock(host, cluster.data_directory, p.lock)
            for p in running
            if p.root is not None  # from here it has another path, or the same one names other files
        )
        if not runs and not names & known:
            known |= names
            found.append(cluster)
    return found


GIVEN = "--pgdata"


def given_in_vain(host: Host, stopped: Iterable[StoppedCluster]) -> str | None:
    """Return what is wrong with a directory that --pgdata names and that is none of a cluster, None where all are.

    One that cannot be read, or that only a configuration or a process of a capture names, is no mistake.
    """
    for cluster in stopped:
        if cluster.where != GIVEN or not _is_absent(cluster.config_file):
            continue
        directory = cluster.data_directory
        if not _is_absent(host.status(f"{directory}/PG_VERSION")):
            continue
        status = host.status(directory)
        if isinstance(status, Unknown):
            what = status.reason.removeprefix(directory).lstrip(": ")
        else:
            what = "has neither of them" if status.value.is_directory else "is a file"
        return (
            f"--pgdata {directory}: expected a data directory (with PG_VERSION in it) or a configuration directory "
            f"(with postgresql.conf): it {what}"
        )
    return None


def _is_absent(fact: Fact[object]) -> bool:
    return isinstance(fact, Unknown) and fact.kind == "absent"


def _everywhere(
    host: Host, pgdata: Sequence[str], files: Files, runs_from: Callable[[str], bool]
) -> Iterable[StoppedCluster]:
    for directory in pgdata:
        yield _given(host, directory, files)
    for number, name in _debian_clusters(host):
        if not runs_from(_debian_config(number, name)):
            cluster = _debian_cluster(host, files, number, name)
            if cluster is not None:
                yield cluster
    yield from _red_hat(host)


def real_path(host: Host, path: str) -> str:
    """Return the path with its links resolved, as they are on that host."""

    def target(place: str) -> str | None:
        link = host.link(place)
        return link.value if isinstance(link, Known) else None

    try:
        return resolve_inside(path, target)
    except OSError:
        return path


def is_version(word: str) -> bool:
    """Return whether this is a major version as PostgreSQL writes it: 15, 9.6."""
    return word.isascii() and len(word) < 6 and word[:1].isdigit() and word.replace(".", "", 1).isdigit()


def _exists(host: Host, path: str) -> bool:
    return isinstance(host.status(path), Known)


def _owner(host: Host, directory: str, config_file: str | None = None) -> Fact[int]:
    """Return whose cluster it is: the owner of its data directory, whom its configuration must belong to too.

    Else whoever writes a configuration could have it read with the rights of any user whose directory it names.
    """
    status = host.status(directory)
    if isinstance(status, Unknown):
        return status
    if config_file is not None and host.live:
        config = host.status(config_file)
        if isinstance(config, Known) and config.value.uid not in (0, status.value.uid):
            return Unknown(f"{config_file} belongs to another user than {directory}", "give both to the same user")
    return Known(status.value.uid, f"owner of {directory}")


def _as_owner(host: Host, files: Files, *paths: str) -> Host:
    """Return the files with the rights of the first owner of these that is not root, else of nobody.

    Root itself must not read them: their owners could have put links there to what only root may read.
    """
    for path in paths:
        status = host.status(path)
        if isinstance(status, Known) and status.value.uid != 0:
            return files(status.value.uid)
    return files(0)


def _named_data_directory(files: Host, config_file: str, major: int) -> str | None:
    """Return the data_directory that a configuration file and its includes set: the last one counts."""
    reading = conffile.Reading()
    conffile.read(files, config_file, major, reading)
    named = [entry.value for entry in reading.entries if entry.name.lower() == "data_directory"]
    path = named[-1] if named else None
    return clean_path(path) if path is not None and path.startswith("/") else None


def _major(number: str) -> int:
    return int(number.partition(".")[0])


_ANY_MAJOR = 15  # where the version is not known: majors tell apart only some paths with `..` in them


def _given(host: Host, directory: str, files: Files) -> StoppedCluster:
    """Return the cluster that --pgdata names, by its data directory or by its configuration directory."""
    directory = clean_path(os.path.abspath(directory) if host.live else directory)
    config_file = os.path.join(directory, "postgresql.conf")
    data = directory
    if _exists(host, config_file):
        data = (
            _named_data_directory(_as_owner(host, files, directory, config_file), config_file, _ANY_MAJOR) or directory
        )
        config: Fact[str] = Known(config_file, GIVEN)
    else:
        for number, name in _debian_clusters(host):
            cluster = _debian_cluster(host, files, number, name)
            if cluster is not None and real_path(host, cluster.data_directory) == real_path(host, directory):
                return cluster
        gap = host.status(config_file)
        config = gap if isinstance(gap, Unknown) else Known(config_file, GIVEN)
    unknown = Unknown("nothing says how this cluster is started", kind="absent")
    return StoppedCluster(data, config, (), _owner(host, data, config_file), GIVEN, unknown)


def _debian_clusters(host: Host) -> Iterable[tuple[str, str]]:
    """Yield (version, name) of the clusters in /etc/postgresql (postgresql-common)."""
    versions = host.list("/etc/postgresql")
    for number in versions.value if isinstance(versions, Known) else ():
        if is_version(number):
            names = host.list(f"/etc/postgresql/{number}")
            yield from ((number, name) for name in (names.value if isinstance(names, Known) else ()))


def _debian_config(number: str, name: str) -> str:
    return f"/etc/postgresql/{number}/{name}/postgresql.conf"


def _debian_cluster(host: Host, files: Files, number: str, name: str) -> StoppedCluster | None:
    config_file = _debian_config(number, name)
    folder = os.path.dirname(config_file)
    if not _exists(host, config_file):
        return None
    usual = f"/var/lib/postgresql/{number}/{name}"
    owned = _as_owner(host, files, folder, config_file, usual)
    data = _named_data_directory(owned, config_file, _major(number)) or usual
    status = host.status(data)
    if isinstance(status, Unknown) and status.kind == "absent" and host.live:
        return None  # configuration left behind by a removed cluster
    argv = (
        "postgres",
        "-D",
        data,
        "-c",
        f"config_file={config_file}",
        *_pg_ctl_options(owned, f"{folder}/pg_ctl.conf"),
    )
    starts = debian_start(host, owned, folder, f"postgresql@{number}-{name}.service")
    return StoppedCluster(
        data, Known(config_file, folder), argv, _owner(host, data, config_file), "/etc/postgresql", starts
    )


def _pg_ctl_options(files: Host, path: str) -> tuple[str, ...]:
    """Return the server options that pg_ctl.conf adds: the -o parts of pg_ctl_options (pg_createcluster(1))."""
    text = files.read(path)
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


def enabled(host: Host, *units: str) -> Fact[bool]:
    """Return whether systemd starts one of these units at boot (systemctl enable)."""
    links = host.list(_WANTS)
    if isinstance(links, Unknown):
        return Unknown(f"whether systemd starts it is not known: {links.reason}", links.hint, links.kind)
    for unit in units:
        if unit in links.value:
            return Known(True, f"{_WANTS}/{unit}")
    return Known(False, f"{_WANTS} (no {' or '.join(units)})", "inferred")


def debian_start(host: Host, files: Host, folder: str, unit: str) -> Fact[bool]:
    """Return whether a Debian cluster starts at boot: start.conf (auto, manual, disabled) and the units."""
    path = f"{folder}/start.conf"
    text = files.read(path)
    if isinstance(text, Unknown) and text.kind != "absent":
        return text
    lines = (line.partition("#")[0].strip() for line in (text.value.split("\n") if isinstance(text, Known) else ()))
    word = next((line for line in lines if line), "auto")  # without the file too (PgCommon.pm)
    if word == "disabled":
        return Known(False, path)
    if word not in ("auto", "manual"):
        return Unknown(f"{path} does not hold auto, manual or disabled")
    systemd = enabled(host, unit, *(["postgresql.service"] if word == "auto" else []))
    if isinstance(systemd, Known) and systemd.value:
        return Known(True, f"{path} ({word}), {systemd.source}")
    if word == "manual":
        return Known(False, path)
    return systemd if isinstance(systemd, Known) else Known(True, path, "inferred")


def _red_hat(host: Host) -> Iterable[StoppedCluster]:
    """Yield the clusters of the packages of Red Hat, SUSE and PGDG, and of units that name a PGDATA."""
    places: list[tuple[str, str]] = [("/var/lib/pgsql/data", "postgresql.service")]
    names = host.list("/var/lib/pgsql")
    for name in names.value if isinstance(names, Known) else ():
        if is_version(name):
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
        yield StoppedCluster(directory, config, argv, _owner(host, directory), where, enabled(host, unit))


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
            for matched in re.finditer(_UNIT_PGDATA, text.value) if isinstance(text, Known) else ():
                yield name.removesuffix(".d"), clean_path(matched[1])


_UNIT_PGDATA = r"""(?m)^[ \t]*Environment=(?:.*[\s"'])?["']?PGDATA=(/[^\s"'%$]+)"""
