"""Control groups: what every group above a process allows of huge pages and of CPU time.

Versions 1 and 2, and both at once (hybrid). Limits hold for every ancestor (Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/hugetlb.rst). hugetlb has two kinds: a *reservation* limit (rsvd) makes the mapping fail, so that PostgreSQL
falls back or refuses to start; a *fault* limit lets it start and kills it by SIGBUS later.
"""

from __future__ import annotations

from collections.abc import Iterator

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, measured, record

_MAX_DEPTH = 64
_UNLIMITED = 1 << 60
"""v1 has no word for "no limit": it shows the largest count of pages in bytes, a little below 2**63."""

_INITIAL_NAMESPACE = "cgroup:[4026531835]"  # PROC_CGROUP_INIT_INO, include/linux/proc_ns.h, since 4.6
_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_OUTSIDE = "ancestors outside of this cgroup namespace cannot be seen"
_ON_THE_HOST = "run it on the host itself, outside of the container"


@record
class HugetlbLimit:
    """The limits of one cgroup for huge pages of one size. A limit is null where there is none."""

    path: str
    page_bytes: int
    fault_limit: Fact[int | None] = measured(unit="bytes", doc="hugetlb.SIZE.max or .limit_in_bytes")
    fault_usage: Fact[int] = measured(unit="bytes")
    reservation_limit: Fact[int | None] = measured(unit="bytes", doc="hugetlb.SIZE.rsvd.max or .rsvd.limit_in_bytes")
    reservation_usage: Fact[int] = measured(unit="bytes")


@record
class _Groups:
    """The cgroups of a process for one controller, its own first, up to the topmost that can be seen."""

    version: int
    folders: tuple[tuple[str, tuple[str, ...]], ...]  # each with the names of the files in it
    complete: bool  # the topmost is the root of the hierarchy


def hugetlb_limits(host: Host, pid: int | str) -> tuple[HugetlbLimit, ...] | Unknown:
    """Return the huge page limits of every cgroup above a process (or "self"), per page size; () if nothing limits.

    Ancestors that cannot be seen from here count as one more entry a page size, its limits Unknown.
    """
    groups = _groups(host, pid, "hugetlb")
    if groups is None:
        return ()
    if isinstance(groups, Unknown):
        return groups
    found: list[HugetlbLimit] = []
    for folder, names in groups.folders:
        for name in names:
            tag = _page_size(name)
            if tag is not None:
                page_bytes = int(tag[:-2]) * _UNITS[tag[-2:]]
                found.append(_limit(host, groups.version, folder, tag, page_bytes))
    if not groups.complete:
        gap = Unknown(_OUTSIDE, _ON_THE_HOST)
        sizes = {entry.page_bytes for entry in found} | _pool_sizes(host)
        found += [HugetlbLimit("/..", size, gap, gap, gap, gap) for size in sorted(sizes)]
    return tuple(found)


def _page_size(name: str) -> str | None:
    """Return SIZE (`2MB`) of a file named hugetlb.SIZE.max or hugetlb.SIZE.limit_in_bytes."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "hugetlb" or parts[2] not in ("max", "limit_in_bytes"):
        return None
    tag = parts[1]
    return tag if tag[-2:] in _UNITS and is_number(tag[:-2]) else None


def _limit(host: Host, version: int, folder: str, tag: str, page_bytes: int) -> HugetlbLimit:
    limit, usage = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    start = f"{folder}/hugetlb.{tag}"
    return HugetlbLimit(
        folder,
        page_bytes,
        _bytes_or_none(host, f"{start}.{limit}"),
        _count(host, f"{start}.{usage}"),
        _bytes_or_none(host, f"{start}.rsvd.{limit}"),
        _count(host, f"{start}.rsvd.{usage}"),
    )


def _pool_sizes(host: Host) -> set[int]:
    folders = host.list("/sys/kernel/mm/hugepages")
    names = folders.value if isinstance(folders, Known) else ()
    sizes = (name.removeprefix("hugepages-").removesuffix("kB") for name in names)
    return {int(size) << 10 for size in sizes if is_number(size)}


def cpu_quota(host: Host, pid: int | str) -> Fact[float | None]:
    """Return the tightest CPU quota (in CPUs) of the cgroups above a process (or "self"), None if there is none.

    Read from cpu.max (v2) or cpu.cfs_quota_us and cpu.cfs_period_us (v1).
    """
    groups = _groups(host, pid, "cpu")
    if groups is None:
        return Known(None, f"/proc/{pid}/cgroup")
    if isinstance(groups, Unknown):
        return groups
    tightest: Known[float | None] = Known(None, f"{groups.folders[0][0]} (no quota in it or above)")
    for folder, names in groups.folders:
        quota = _quota(host, groups.version, folder, names)
        if isinstance(quota, Unknown):
            return quota
        if quota.value is not None and (tightest.value is None or quota.value < tightest.value):
            tightest = quota
    if groups.complete:
        return tightest
    if tightest.value is None:
        return Unknown(_OUTSIDE, _ON_THE_HOST)
    return Known(tightest.value, f"{tightest.source}; {_OUTSIDE}", "inferred")


def _quota(host: Host, version: int, folder: str, names: tuple[str, ...]) -> Fact[float | None]:
    path = f"{folder}/cpu.max" if version == 2 else f"{folder}/cpu.cfs_quota_us"
    if path.rpartition("/")[2] not in names:  # the root, or a cgroup without the controller
        return Known(None, folder)
    text = host.read(path, 4096)
    if isinstance(text, Unknown):
        return text
    fields = text.value.split()
    if version == 1:
        period = host.read(f"{folder}/cpu.cfs_period_us", 4096)
        if isinstance(period, Unknown):
            return period
        fields += period.value.split()
    if fields and fields[0] in ("max", "-1"):
        return Known(None, path)
    if len(fields) != 2 or not all(is_number(field) and int(field) for field in fields):
        return Unknown(f"{path} does not read as a quota and a period")
    return Known(int(fields[0]) / int(fields[1]), path)


# where the groups of a process are ---------------------------------------------------------------


def _groups(host: Host, pid: int | str, controller: str) -> _Groups | Unknown | None:
    """Return the groups of a process that can limit through `controller`; None where it is in the root group."""
    listing = f"/proc/{pid}/cgroup"
    text = host.read(listing)
    if isinstance(text, Unknown):
        return _unread(text)
    version, path = _membership(text.value, controller)
    if path is None:
        return None  # the kernel has no such controller, or it is in no hierarchy
    namespaced = host.live and _other_namespace(host)
    if path.split("/")[1:2] == [".."]:
        return Unknown(f"{listing}: the process is outside of this cgroup namespace", _ON_THE_HOST)
    mounts = _mounts(host, version, controller)
    for root, mount in mounts:
        inside = path if root == "/" else path.removeprefix(root)
        if root != "/" and path != root and not path.startswith(f"{root}/"):
            continue
        folders: list[tuple[str, tuple[str, ...]]] = []
        for parent in _ancestors(inside):
            names = host.list(mount + parent)
            if isinstance(names, Unknown):
                return _unread(names)
            if len(folders) >= _MAX_DEPTH:
                return Unknown(f"{listing}: more than {_MAX_DEPTH} cgroups above each other")
            folders.append((mount + parent, names.value))
        complete = root == "/" and _is_root(version, folders[-1][1], namespaced)
        return _Groups(version, tuple(folders), complete)
    if path == "/" and not namespaced:
        return None
    if not host.live:
        return Unknown("the capture holds no /sys/fs/cgroup, so limits of cgroups are not known", "capture it too")
    return Unknown(f"no cgroup file system that shows {path} ({controller}) is mounted here", _ON_THE_HOST)


def _unread(gap: Unknown) -> Unknown:
    """Return the gap as one that matters: kind `absent` is kept for a limit that this kernel does not have."""
    return Unknown(gap.reason, gap.hint, "other" if gap.kind == "absent" else gap.kind)


def _membership(listing: str, controller: str) -> tuple[int, str | None]:
    """Return the version of the hierarchy that has the controller, and the path of the process in it.

    A line is `ID:CONTROLLERS:PATH`; version 2 is `0::PATH` and has every controller that no version 1 line names.
    """
    unified = None
    for line in listing.split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        path = path.removesuffix(" (deleted)")
        if controller in controllers.split(","):
            return 1, path
        if number == "0" and not controllers:
            unified = path
    return 2, unified


def _other_namespace(host: Host) -> bool:
    link = host.link("/proc/self/ns/cgroup")
    return isinstance(link, Known) and link.value != _INITIAL_NAMESPACE


def _is_root(version: int, names: tuple[str, ...], namespaced: bool) -> bool:
    """Return whether this is the root of the whole hierarchy: some files are only there, others never."""
    if version == 2:
        return "cgroup.events" not in names
    return "release_agent" in names or not namespaced


def _ancestors(path: str) -> Iterator[str]:
    """Yield the path and every one above it: /a/b, /a, and "" for the top."""
    path = path.rstrip("/")
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _mounts(host: Host, version: int, controller: str) -> list[tuple[str, str]]:
    """Return (root inside of the hierarchy, mount point) of each mount of it, the whole hierarchy first."""
    text = host.read("/proc/self/mountinfo")
    if isinstance(text, Unknown):
        return _captured_mounts(host, version, controller)
    found: list[tuple[str, str]] = []
    for line in text.value.split("\n"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(kind) < 3:
            continue
        wanted = kind[0] == "cgroup" and controller in kind[2].split(",") if version == 1 else kind[0] == "cgroup2"
        if wanted:
            found.append((_unescape(fields[3]), _unescape(fields[4])))
    return sorted(found, key=lambda item: len(item[0]))


def _captured_mounts(host: Host, version: int, controller: str) -> list[tuple[str, str]]:
    """Return where the hierarchy lies in a capture without mountinfo, by the usual places."""
    top = host.list("/sys/fs/cgroup")
    if isinstance(top, Unknown) or host.live:
        return []
    if version == 2:
        below = "/unified" if "unified" in top.value else ""
        return [("/", f"/sys/fs/cgroup{below}")]
    named = (name for name in top.value if controller in name.split(","))
    return [("/", f"/sys/fs/cgroup/{name}") for name in named]


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo (space, tab, newline, backslash)."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, character)
    return field


# values ------------------------------------------------------------------------------------------


def _bytes_or_none(host: Host, path: str) -> Fact[int | None]:
    text = host.read(path, 4096)
    if isinstance(text, Unknown):
        return text
    word = text.value.strip()
    if word == "max":
        return Known(None, path)
    if not is_number(word):
        return Unknown(f"{path} does not read as a number of bytes")
    return Known(None if int(word) >= _UNLIMITED else int(word), path)


def _count(host: Host, path: str) -> Fact[int]:
    text = host.read(path, 4096)
    if isinstance(text, Unknown):
        return text
    word = text.value.strip()
    return Known(int(word), path) if is_number(word) else Unknown(f"{path} does not read as a number of bytes")
