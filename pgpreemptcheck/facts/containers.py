"""Containers and services: which file system a process sees, and what its cgroup says of who manages it."""

from __future__ import annotations

import re

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Known


def root_of(host: Host, pid: int) -> tuple[str | None, str | None]:
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
    r"[/:](docker|libpod|cri-containerd|crio|containerd|podman|nerdctl)[-/:]" + _ID,
    r"/(kubepods)[^:]*/(?:[a-z]+-)*" + _ID + r"(?:\.scope)?(?:/|\Z)",
    r"/(lxc)(?:\.payload)?[./]([^/]+)",
    r"/(machine)\.slice/(?:machine-|systemd-nspawn@)?([^/]+?)\.(?:scope|service)",
    r"/(ecs|garden)/(?:[^/]+/)?" + _ID,
)
"""How container managers name the cgroup of a container: the manager, and an id (cut to twelve digits) or a name."""


def container_name(cgroup: str) -> str | None:
    """Return the container that a cgroup path names."""
    paths = [line.split(":", 2)[2] for line in cgroup.split("\n") if line.count(":") >= 2]
    for pattern in _CONTAINERS:
        for path in paths:
            matched = re.search(pattern, path)
            if matched:
                return f"{matched[1]}-{matched[2]}".replace("\\x2d", "-")
    return None


def service_unit(cgroup: str) -> str | None:
    """Return the systemd service that a cgroup path names."""
    names = (name for line in cgroup.split("\n") for name in line.split("/"))
    return next((name.replace("\\x2d", "-") for name in names if name.endswith(".service")), None)


def mount_name(host: Host, pid: int, directory: str | None) -> str | None:
    """Return what a process has mounted for a directory: a folder of a file system, which is the same after a restart.

    None where that file system is mounted whole, since any root is then called `/`. From /proc/PID/mountinfo (proc(5)).
    """
    text = host.read(f"/proc/{pid}/mountinfo", 16 << 20)
    best = ("", "")
    for line in text.value.split("\n") if isinstance(text, Known) and directory is not None else ():
        fields = line.split(" ")
        if len(fields) < 6:
            continue
        source, place = (_unescaped(field) for field in fields[3:5])
        if f"{directory}/".startswith(place.rstrip("/") + "/") and len(place) >= len(best[1]):
            best = (source, place)  # of two on one place the later is on top
    source, place = best
    return f"a mount of {source}" if source not in ("", "/") and source != place else None


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
