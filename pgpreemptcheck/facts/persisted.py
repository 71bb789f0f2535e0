"""The huge pages that are there after a reboot: what the kernel's next command line, sysctl.d and others reserve.

In the order of a boot: hugepages= and hugepagesz= as memory is set up, then sysctl.vm.* of the command line (5.8 and
later) before the first process, then sysctl.d, tmpfiles.d and early units in no order, then units ordered before
PostgreSQL. Every one of them but those for a single NUMA node sets the total, whatever was there. Late writers may
come before or after PostgreSQL, so where they write something else the number that it finds is not known.

Sources: mm/hugetlb.c (set_max_huge_pages, hugetlb_overcommit_handler, the cmdline handlers), do_sysctl_args() in
fs/proc/proc_sysctl.c and Documentation/admin-guide/mm/hugetlbpage.rst of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pgpreemptcheck.facts import kernel_command_line, sysctls, writers
from pgpreemptcheck.facts.kernel_command_line import CommandLine
from pgpreemptcheck.facts.sysctls import Sysctls
from pgpreemptcheck.facts.writers import ANY_SIZE, Write
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

_NOTHING = "nothing in the kernel's command line, sysctl.d, tmpfiles.d and systemd units"
_SIZES = "the huge page sizes of this kernel"
_FIX = "set it in one place that comes before PostgreSQL: a file in /etc/sysctl.d"
_GIGANTIC = 1 << 30  # pages above the buddy allocator's largest block


@record
class PersistedPool:
    """What a pool is after a reboot, as asked for: the kernel gives less where memory does not suffice."""

    page_bytes: Fact[int] = measured(unit="bytes")
    pages: Fact[int] = measured(unit="pages", doc="reserved after a reboot, before PostgreSQL starts")
    overcommit: Fact[int] = measured(unit="pages", doc="nr_overcommit_hugepages after a reboot")
    per_node: Fact[Mapping[str, int]] = measured(unit="pages", doc="by NUMA node, where it is reserved by node")


@record
class Persisted:
    """The huge pages after a reboot. `late_writers` are FILE line N of all that may write after PostgreSQL started."""

    default_bytes: Fact[int] = measured(unit="bytes", doc="the default huge page size after a reboot")
    pools: tuple[PersistedPool, ...] | Unknown = measured()
    shm_group: Fact[int] = measured(doc="vm.hugetlb_shm_group after a reboot")
    refused: Fact[tuple[str, ...]] = measured(doc="settings that the kernel will refuse or ignore")
    late_writers: Fact[tuple[str, ...]] = measured(doc="what may set huge pages after PostgreSQL has started")
    not_read: Fact[tuple[str, ...]] = measured(doc="places of possible writers that could not be read")
    sysctls: Sysctls = measured()


def read(
    host: Host,
    command_line: Fact[str],
    built_in_default_bytes: Fact[int],
    pool_sizes: Fact[tuple[int, ...]],
    architecture: str | None,
    kernel_version: tuple[int, int] | None = None,
) -> Persisted:
    """Return the pools after a reboot with this kernel command line.

    `built_in_default_bytes` is the default size of a kernel without default_hugepagesz= (see `built_in_default`),
    `pool_sizes` the sizes in bytes that the kernel has, `kernel_version` its version if known. The certainty is
    inferred: what scripts do that nobody told systemd about is not known.
    """
    lasting = sysctls.read(host, with_run=False)
    if isinstance(command_line, Unknown):
        line = kernel_command_line.unread(command_line)
        parameters: list[tuple[str, str | None]] = []
    else:
        line = kernel_command_line.parse(command_line.value, command_line.source, built_in_default_bytes, architecture)
        parameters = kernel_command_line.split(command_line.value.strip())
    found = writers.read(host)
    default = _default(line, built_in_default_bytes)
    boot = _Boot(host, line, parameters, default, lasting, found.writes, kernel_version)
    sizes = _sizes(pool_sizes, default, line, found.writes)
    late = (
        f"{write.source}: {write.why}" if write.why else write.source for write in found.writes if write.stage == "late"
    )
    return Persisted(
        default_bytes=default,
        pools=sizes if isinstance(sizes, Unknown) else tuple(boot.pool(size) for size in sizes),
        shm_group=_shm_group(lasting),
        refused=Known(tuple(boot.refused()), "kernel command line, sysctl.d", "inferred"),
        late_writers=Known(tuple(dict.fromkeys(late)), "systemd units, tuned, cloud-init, rc.local, cron, udev"),
        not_read=Known(found.not_read, "systemd units, tuned, cloud-init, rc.local, cron, udev"),
        sysctls=lasting,
    )


def built_in_default(
    running_default: Fact[int], running_line: CommandLine, architecture: str | None, base_page_bytes: Fact[int]
) -> Fact[int]:
    """Return the default huge page size without default_hugepagesz=: as it is now, unless that was asked for."""
    asked = running_line.default_huge_page_bytes
    if isinstance(asked, Known) and asked.value is None and isinstance(running_default, Known):
        return running_default
    if architecture == "x86":
        return Known(2 << 20, "x86", "inferred")
    if architecture == "s390":
        return Known(1 << 20, "s390", "inferred")
    if architecture == "arm64" and isinstance(base_page_bytes, Known):
        page = base_page_bytes.value  # a page table fills one page with entries of eight bytes
        return Known(page * (page // 8), f"arm64 with pages of {page >> 10} kB", "inferred")
    return Unknown(
        "the default huge page size without default_hugepagesz= is not known",
        "boot once without it, and read Hugepagesize in /proc/meminfo",
    )


def _default(line: CommandLine, built_in: Fact[int]) -> Fact[int]:
    asked = line.default_huge_page_bytes
    if isinstance(asked, Unknown):
        return Unknown(f"the default huge page size after a reboot is not known: {asked.reason}", asked.hint)
    if asked.value is not None:
        return Known(asked.value, f"{asked.source} default_hugepagesz=", "inferred")
    return built_in


def _sizes(
    pool_sizes: Fact[tuple[int, ...]], default: Fact[int], line: CommandLine, writes: Iterable[Write]
) -> tuple[int, ...] | Unknown:
    """Return the page sizes to answer for: all that the kernel has, else those that something names."""
    if isinstance(pool_sizes, Known):
        return pool_sizes.value
    sizes = {write.page_bytes for write in writes if write.page_bytes}
    if not isinstance(line.huge_pages, Unknown):
        sizes |= {request.page_bytes.value for request in line.huge_pages if isinstance(request.page_bytes, Known)}
    if isinstance(default, Known):
        sizes.add(default.value)
    return tuple(sorted(sizes)) or Unknown(f"no huge page size is known: {pool_sizes.reason}", pool_sizes.hint)


class _Boot:
    """One boot, step by step, for any pool."""

    def __init__(
        self,
        host: Host,
        line: CommandLine,
        parameters: list[tuple[str, str | None]],
        default: Fact[int],
        lasting: Sysctls,
        writes: tuple[Write, ...],
        kernel_version: tuple[int, int] | None,
    ) -> None:
        self.line = line
        self.parameters = parameters
        self.default = default
        self.lasting = lasting
        self.writes = writes
        self.takes_sysctls = kernel_version is None or kernel_version >= (5, 8)
        nodes = host.list("/sys/devices/system/node")
        self.nodes = set(nodes.value) if isinstance(nodes, Known) else None
        in_run = isinstance(host.list("/run/sysctl.d"), Known)
        self.fleeting = sysctls.read(host) if in_run else None  # with what lies in /run, which a reboot empties

    def pool(self, size: int) -> PersistedPool:
        """Return one pool."""
        page_bytes: Fact[int] = Known(size, _SIZES, "inferred")
        if isinstance(self.default, Unknown):
            # sysctl.d and hugepages= without a size reserve pages of a size that is not known
            return PersistedPool(page_bytes, self.default, self.default, self.default)
        per_node: Fact[Mapping[str, int]] = Unknown("not reserved by node", kind="absent")
        pages, nodes = self._pages(size)
        if isinstance(pages, Known) and nodes is not None:
            per_node = Known(nodes, pages.source, "inferred")
        elif isinstance(pages, Unknown):
            per_node = pages
        return PersistedPool(page_bytes, pages, self._overcommit(size), per_node)

    def refused(self) -> Iterable[str]:
        """Yield the settings that come to nothing, with their place."""
        ignored = self.line.ignored_huge_pages
        if isinstance(ignored, Known):
            yield from (f"{parameter} ({ignored.source})" for parameter in ignored.value)
        if not isinstance(self.line.huge_pages, Unknown):
            sizes = {
                request.page_bytes.value for request in self.line.huge_pages if isinstance(request.page_bytes, Known)
            }
            yield from filter(None, map(self._missing_node, sorted(sizes)))
        for write in self.lasting.writes(*sysctls.HUGE_PAGES, sysctls.OVERCOMMIT):
            if isinstance(write, sysctls.Assignment) and sysctls.kernel_number(write.value or "") is None:
                yield f"{write.key} = {write.value} ({write.source})"

    def _pages(self, size: int) -> tuple[Fact[int], Mapping[str, int] | None]:
        pages, nodes = self._by_kernel(size)
        set_by_sysctl = self._by_sysctl(sysctls.HUGE_PAGES, size)
        if set_by_sysctl is not None:
            pages, nodes = set_by_sysctl, None
        return self._after_others("pages", size, pages, nodes, set_by_sysctl)

    def _after_others(
        self,
        count: str,
        size: int,
        value: Fact[int],
        nodes: Mapping[str, int] | None,
        beside: Fact[int] | None,
    ) -> tuple[Fact[int], Mapping[str, int] | None]:
        """Return a count once all others had their turn; `beside` is what sysctl.d sets, in no order with the early."""
        writes = [
            write
            for write in self.writes
            if write.count == count
            and (write.page_bytes in (size, ANY_SIZE) or (write.page_bytes is None and self._is_default(size)))
        ]
        value, nodes = _apply(value, nodes, [write for write in writes if write.stage == "early"], beside)
        value, nodes = _apply(value, nodes, [write for write in writes if write.stage == "ordered"], None)
        return _with_late(value, nodes, [write for write in writes if write.stage == "late"])

    def _by_kernel(self, size: int) -> tuple[Fact[int], Mapping[str, int] | None]:
        """Return what hugepages= reserves, by node where it says so, and what sysctl.vm.nr_hugepages= makes of it."""
        requests = self.line.huge_pages
        if isinstance(requests, Unknown):
            return Unknown(f"what the next boot reserves is not known: {requests.reason}", requests.hint), None
        total, source, nodes = 0, _NOTHING, dict[str, int]()
        if missing := self._missing_node(size):
            return Known(0, f"{missing}: the kernel ignores all of it", "inferred"), None
        for request in requests:
            asked, pages_asked, node = request.page_bytes, request.pages, request.node
            if isinstance(asked, Known) and asked.value == size and isinstance(pages_asked, Known):
                total += pages_asked.value
                source = f"{pages_asked.source} hugepages="
                if isinstance(node, Known) and node.value is not None:
                    nodes[f"node{node.value}"] = pages_asked.value
        pages: Fact[int] = Known(total, source, "inferred")
        if total and size >= _GIGANTIC and any(name == "hugetlb_cma" for name, _ in self.parameters):
            pages = Unknown(
                f"{source} has hugetlb_cma=, with which most kernels reserve no pages of {size >> 30} GB at boot",
                "leave hugetlb_cma= out",
            )
        given = self._sysctl_parameter(sysctls.HUGE_PAGES) if self._is_default(size) else None
        return (given, None) if given is not None else (pages, nodes or None)

    def _missing_node(self, size: int) -> str:
        """Return the request that names a NUMA node that this host has not: the kernel then drops all nodes' parts."""
        requests = self.line.huge_pages
        for request in () if isinstance(requests, Unknown) else requests:
            asked, node = request.page_bytes, request.node
            if isinstance(asked, Unknown) or asked.value != size or isinstance(node, Unknown) or node.value is None:
                continue
            if self.nodes is not None and f"node{node.value}" not in self.nodes:
                return f"{node.source} hugepages={kernel_command_line.value_of_request(request)}"
        return ""

    def _sysctl_parameter(self, names: tuple[str, ...]) -> Known[int] | None:
        """Return the last value that sysctl.NAME= gives: the kernel itself writes it, before the first process."""
        last: Known[int] | None = None
        for name, value in self.parameters if self.takes_sysctls else ():
            if name.startswith(("sysctl.", "sysctl/")) and name[7:].replace("/", ".") in names and value:
                number = sysctls.kernel_number(value)
                if number is not None and isinstance(self.line.text, Known):
                    last = Known(number, f"{self.line.text.source} {name}=", "inferred")
        return last

    def _by_sysctl(self, names: tuple[str, ...], size: int) -> Fact[int] | None:
        """Return what sysctl.d sets last, None where it sets nothing that the kernel takes for this size."""
        if not self._is_default(size):
            return None
        lasting = _last_number(self.lasting, names)
        if self.fleeting is None:
            return lasting
        fleeting = _last_number(self.fleeting, names)
        if isinstance(fleeting, Known) and fleeting.source.startswith("/run/") and fleeting != lasting:
            return Unknown(
                f"{fleeting.source} sets {names[0]} to {fleeting.value}: /run is empty after a reboot, and whether"
                " something writes the file again is not known",
                "write it to a file in /etc/sysctl.d",
            )
        return lasting

    def _is_default(self, size: int) -> bool:
        return isinstance(self.default, Known) and self.default.value == size

    def _overcommit(self, size: int) -> Fact[int]:
        value: Fact[int] = Known(0, _NOTHING, "inferred")
        if self._is_default(size):
            if isinstance(self.line.text, Unknown):
                value = self.line.text
            given = self._sysctl_parameter((sysctls.OVERCOMMIT,))
            value = given if given is not None else value
        set_by_sysctl = self._by_sysctl((sysctls.OVERCOMMIT,), size)
        value = set_by_sysctl if set_by_sysctl is not None else value
        value, _ = self._after_others("overcommit", size, value, None, set_by_sysctl)
        if isinstance(value, Known) and value.value and size >= _GIGANTIC:
            return Unknown(
                f"{value.source} sets overcommit for pages of {size >> 30} GB, which most kernels refuse",
                f"read nr_overcommit_hugepages below /sys/kernel/mm/hugepages/hugepages-{size >> 10}kB after the boot",
            )
        return value


def _last_number(settings: Sysctls, names: tuple[str, ...]) -> Fact[int] | None:
    last: Fact[int] | None = None
    for write in settings.writes(*names):
        if isinstance(write, Unknown):
            last = write
        else:
            number = sysctls.kernel_number(write.value or "")
            if number is not None:  # else the kernel refuses it, and what was there stays
                last = Known(number, write.source, "inferred")
    return last


def _apply(
    pages: Fact[int], nodes: Mapping[str, int] | None, writes: list[Write], beside: Fact[int] | None
) -> tuple[Fact[int], Mapping[str, int] | None]:
    """Return a count after writers that come in no order with each other, nor with `beside` (None: nothing)."""
    if not writes:
        return pages, nodes
    if isinstance(beside, Unknown):
        return beside, None
    totals: dict[int, str] = {} if beside is None else {beside.value: beside.source}
    by_node: dict[int, tuple[int, str]] = {}
    clash = False
    for write in writes:
        if write.value is None:
            return Unknown(f"{write.source}: {write.why}", _FIX), None
        if write.node is None:
            totals.setdefault(write.value, write.source)
        elif by_node.setdefault(write.node, (write.value, write.source))[0] != write.value:
            clash = True
    if clash or len(totals) > 1 or (totals and by_node):
        sources = dict.fromkeys([*totals.values(), *(write.source for write in writes)])
        return Unknown(f"{' and '.join(sources)} set different numbers, and nothing orders them", _FIX), None
    for value, source in totals.items():
        return Known(value, source, "inferred"), None
    if isinstance(pages, Unknown):
        return pages, None
    source = next(iter(by_node.values()))[1]
    if pages.value and nodes is None:
        return Unknown(f"{source} sets one node's part of {pages.value} pages, whose spread is not known", _FIX), None
    nodes = {**(nodes or {}), **{f"node{node}": value for node, (value, _) in by_node.items()}}
    return Known(sum(nodes.values()), source, "inferred"), nodes


def _with_late(
    pages: Fact[int], nodes: Mapping[str, int] | None, late: list[Write]
) -> tuple[Fact[int], Mapping[str, int] | None]:
    for write in late:
        same = isinstance(pages, Known) and (
            write.value == pages.value if write.node is None else (nodes or {}).get(f"node{write.node}") == write.value
        )
        if not same:
            return Unknown(f"{write.source} may set it before or after PostgreSQL starts: {write.why}", _FIX), None
    return pages, nodes


def _shm_group(settings: Sysctls) -> Fact[int]:
    number = _last_number(settings, (sysctls.SHM_GROUP,))
    return number if number is not None else Known(0, _NOTHING, "inferred")
