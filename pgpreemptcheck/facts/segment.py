"""The main shared memory segment of a running postmaster: its size and what pages it is really on.

Read off `/proc/PID/maps` and the PROCMAP_QUERY ioctl, never by a page-table walk (smaps, numa_maps), which would hold
the mmap lock of a segment of many gigabytes.
"""

from __future__ import annotations

from typing import Literal

from pgpreemptcheck.facts import notes
from pgpreemptcheck.facts.hugepages import Pool
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, measured, record

Backing = Literal["base", "huge", "sysv"]

_KINDS: tuple[tuple[str, Backing], ...] = (("/anon_hugepage", "huge"), ("/dev/zero", "base"), ("/SYSV", "sysv"))
"""How the kernel names the three kinds of main segment in maps (mm/shmem.c, fs/hugetlbfs/inode.c, ipc/shm.c).

Other shared mappings are not the main segment: dynamic shared memory (/dev/shm/PostgreSQL.*), io_uring rings, files.
"""

_TELLTALE_BYTES = 1 << 20
_ADDRESS = (1 << 64) - 1
_LEAST_PAGE, _LARGEST_PAGE = 4 << 10, 16 << 30  # x86-64 to POWER (hash)
"""With mmap a System V page of 4 kB or less is there too, as an interlock; a main segment is never that small."""


@record
class Segment:
    bytes: Fact[int] = measured(unit="bytes", doc="mapped size, rounding included")
    page_bytes: Fact[int] = measured(unit="bytes")
    backing: Fact[Backing] = measured()
    thp_possible: Fact[bool] = measured(doc="part of it may be on transparent huge pages")
    base_pages: Fact[bool] = measured(doc="it is on base pages in fact: unknown where THP may back part of it")


def agreed(segment: Segment, status: Fact[str], pools: tuple[Pool, ...] | Unknown) -> Segment:
    """Return the segment, its backing Unknown where something else that was read cannot be so beside it.

    `status` is the server's huge_pages_status (17+), set when the segment is mapped, also after a crash. A pool's total
    counts the pages of all mappings, surplus ones too (Linux mm/hugetlb.c hugetlb_acct_memory). On a live host they
    agree; a capture in which they do not was taken at two times, or of two hosts.
    """
    backing = segment.backing
    if isinstance(backing, Unknown):
        return segment
    huge = backing.value == "huge"
    against = ""
    if isinstance(status, Known) and status.value in ("on", "off") and huge != (status.value == "on"):
        against = f"the server says huge_pages_status = {status.value}"
    elif huge and _is_larger(segment, pools):
        against = "the pool of that page size is smaller than the segment"
    if not against:
        return segment
    gap = Unknown(
        f"{backing.source} shows {'huge' if huge else 'base'} pages, and {against}: they were not taken together",
        "capture the memory map, the pools and the answers over SQL at one time",
    )
    return Segment(segment.bytes, gap, gap, segment.thp_possible, gap)


def _is_larger(segment: Segment, pools: tuple[Pool, ...] | Unknown) -> bool:
    """Return whether a segment on huge pages is larger than all of its pool."""
    size, page = segment.bytes, segment.page_bytes
    if isinstance(pools, Unknown) or isinstance(size, Unknown) or isinstance(page, Unknown):
        return False
    totals = [p.total for p in pools if isinstance(p.page_bytes, Known) and p.page_bytes.value == page.value]
    return any(isinstance(total, Known) and total.value * page.value < size.value for total in totals)


def read(
    host: Host,
    postmaster_pid: int,
    *,
    huge_page_size: Fact[int],
    default_huge_page_bytes: Fact[int],
    base_page_bytes: Fact[int],
    shmem_thp_possible: Fact[bool],
) -> Segment:
    """Return the main segment of a postmaster; `host` should have rights on it (its owner, or root).

    `huge_page_size` is the running setting in bytes (0: the default size), which gives the page size where the
    kernel cannot be asked.
    """
    path = f"/proc/{postmaster_pid}/maps"
    maps = host.read(path)
    if isinstance(maps, Unknown):
        return _from_status(host, postmaster_pid, maps, base_page_bytes, shmem_thp_possible)
    found = _largest(maps.value)
    if found is None:
        gap = Unknown(f"{path} shows no main shared memory segment of PostgreSQL")
        return Segment(gap, gap, gap, gap, gap)
    start, size, backing, name = found
    source = f"{path} ({name})"
    page_bytes = _asked(host, postmaster_pid, start)
    if isinstance(page_bytes, Unknown):
        page_bytes = _by_setting(huge_page_size, default_huge_page_bytes) if backing == "huge" else base_page_bytes
    return _segment(Known(size, source), page_bytes, Known(backing, source), base_page_bytes, shmem_thp_possible)


def _asked(host: Host, pid: int, start: int) -> Fact[int]:
    """Return the page size that the kernel gives for the mapping, or gave when the host was captured."""
    if host.live:
        return host.mapping_page_bytes(pid, start)
    noted = notes.read(host, pid)
    if isinstance(noted, Unknown):
        return noted
    value = noted.value.get("page_bytes")
    if type(value) is int and _LEAST_PAGE <= value <= _LARGEST_PAGE and not value & (value - 1):
        return Known(value, noted.source)
    return Unknown(f"{noted.source} says nothing of the page size")


def _largest(maps: str) -> tuple[int, int, Backing, str] | None:
    """Return start, size in bytes, kind and name of the largest candidate; parts that adjoin count as one."""
    best: tuple[int, int, Backing, str] | None = None
    start = end = 0
    last = ("", "")
    for line in maps.split("\n"):
        fields = line.split(maxsplit=5)  # range, rights, offset, device, inode, name
        if len(fields) < 6 or fields[1] != "rw-s" or not fields[5].rstrip().endswith(" (deleted)"):
            continue
        name = fields[5].rstrip().removesuffix(" (deleted)")
        kind = next((kind for prefix, kind in _KINDS if _bears(name, prefix)), None)
        try:
            low, high = (int(word, 16) & _ADDRESS for word in fields[0].split("-"))
        except ValueError:
            continue
        if kind is None:
            continue
        start = start if low == end and (fields[4], name) == last else low
        end, last = high, (fields[4], name)
        if best is None or end - start > best[1]:
            best = (start, end - start, kind, name)
    return best


def _bears(name: str, prefix: str) -> bool:
    """Return whether a mapping's name is that of a kind; a System V segment has its key of eight digits after it."""
    if prefix != "/SYSV":
        return name == prefix
    return name.startswith(prefix) and len(name) == 13 and "/" not in name[1:]


def _by_setting(huge_page_size: Fact[int], default_huge_page_bytes: Fact[int]) -> Fact[int]:
    if isinstance(huge_page_size, Known) and huge_page_size.value == 0:
        return default_huge_page_bytes
    return huge_page_size


def _segment(
    size: Fact[int],
    page_bytes: Fact[int],
    backing: Known[Backing],
    base_page_bytes: Fact[int],
    shmem_thp_possible: Fact[bool],
) -> Segment:
    if backing.value == "huge" or _larger(page_bytes, base_page_bytes):  # System V memory too can be made so by preload
        no = Known(False, backing.source if backing.value == "huge" else f"page size by {_source(page_bytes)}")
        return Segment(size, page_bytes, backing, no, no)
    base_pages: Fact[bool] = Known(True, backing.source, backing.certainty)
    if isinstance(shmem_thp_possible, Unknown):
        base_pages = Unknown(
            f"whether transparent huge pages back part of the segment is not known: {shmem_thp_possible.reason}",
            shmem_thp_possible.hint,
        )
    elif shmem_thp_possible.value:
        base_pages = Unknown(
            f"transparent huge pages may back part of the segment ({shmem_thp_possible.source}), which only a "
            "page-table walk would show",
            "write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled before PostgreSQL's next restart",
        )
    return Segment(size, page_bytes, backing, shmem_thp_possible, base_pages)


def _larger(page_bytes: Fact[int], base_page_bytes: Fact[int]) -> bool:
    return (
        isinstance(page_bytes, Known)
        and isinstance(base_page_bytes, Known)
        and page_bytes.value > base_page_bytes.value
    )


def _source(fact: Fact[int]) -> str:
    return fact.source if isinstance(fact, Known) else ""


def _from_status(
    host: Host, pid: int, why: Unknown, base_page_bytes: Fact[int], shmem_thp_possible: Fact[bool]
) -> Segment:
    """Return what `HugetlbPages` in the world-readable status says: 0 proves that the segment is on base pages."""
    path = f"/proc/{pid}/status"
    status = host.read(path)
    if isinstance(status, Unknown):
        return Segment(why, why, why, why, why)
    words = status.value.partition("\nHugetlbPages:")[2].partition("\n")[0].split()
    if len(words) != 2 or words[1] != "kB" or not is_number(words[0]):
        return Segment(why, why, why, why, why)
    if int(words[0]):
        gap = Unknown(
            f"{why.reason}; HugetlbPages in {path} is {words[0]} kB, which suggests huge pages and does not prove "
            "them for the segment: other memory of the process can be on huge pages too",
            why.hint or "run as root or as the owner of the cluster",
            why.kind,
        )
        return Segment(why, gap, gap, gap, gap)
    source = f"{path} (HugetlbPages is 0)"
    size: Fact[int] = why
    backing: Known[Backing] = Known("base", source)
    segment = _system_v_bytes(host, pid)
    if isinstance(segment, Known):
        size, backing = segment, Known("sysv", segment.source)
    page_bytes: Fact[int] = base_page_bytes
    if isinstance(base_page_bytes, Known):
        page_bytes = Known(base_page_bytes.value, source)
    return _segment(size, page_bytes, backing, base_page_bytes, shmem_thp_possible)


def _system_v_bytes(host: Host, pid: int) -> Fact[int]:
    """Return the size of the largest System V segment that the postmaster created, if it can be the main one."""
    path = "/proc/sysvipc/shm"
    table = host.read(path)
    if isinstance(table, Unknown):
        return table
    largest = 0
    for line in table.value.split("\n")[1:]:  # key shmid perms size cpid lpid nattch ...
        fields = line.split()
        if len(fields) > 6 and fields[4] == str(pid) and is_number(fields[3]) and fields[6] != "0":
            largest = max(largest, int(fields[3]))
    if largest < _TELLTALE_BYTES:
        return Unknown("the postmaster has no large System V segment", kind="absent")
    return Known(largest, f"{path} (created by PID {pid})")
