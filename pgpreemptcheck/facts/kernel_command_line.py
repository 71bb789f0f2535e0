"""The kernel's command line, as the kernel itself reads it: quotes, `--`, repeated parameters, memory sizes.

Sources: next_arg() in lib/cmdline.c, parameqn() in kernel/params.c and the hugepages=, hugepagesz= and
default_hugepagesz= handlers in mm/hugetlb.c of Linux 6.18; isolcpus= in kernel/sched/isolation.c.
"""

from __future__ import annotations

import re
from dataclasses import replace

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

PATH = "/proc/cmdline"


@record
class RequestedHugePages:
    """One `hugepages=` request on the command line."""

    page_bytes: Fact[int] = measured(unit="bytes")
    pages: Fact[int] = measured(unit="pages")
    node: Fact[int | None] = measured(doc="the NUMA node, null for all")


@record
class CommandLine:
    """The command line that the running kernel was booted with."""

    text: Fact[str] = measured()
    preempt: Fact[str | None] = measured(doc="the last preempt= as written, null if there is none")
    default_huge_page_bytes: Fact[int | None] = measured(unit="bytes", doc="default_hugepagesz=, null if not given")
    huge_pages: tuple[RequestedHugePages, ...] | Unknown = measured(doc="hugepagesz= and hugepages= requests")
    ignored_huge_pages: Fact[tuple[str, ...]] = measured(doc="huge page parameters that the kernel ignores")
    transparent_hugepage: Fact[str | None] = measured(doc="transparent_hugepage= as written, null if not given")
    isolated_cpus: Fact[str | None] = measured(doc="CPU list of isolcpus=, null if it takes none from the scheduler")


def read(host: Host, default_huge_page_bytes: Fact[int], architecture: str | None) -> CommandLine:
    """Return what /proc/cmdline says. The default huge page size (of meminfo) sizes a `hugepages=` without one."""
    text = host.read(PATH, limit=1 << 16)
    if isinstance(text, Unknown):
        return unread(text)
    return parse(text.value, text.source, default_huge_page_bytes, architecture)


def unread(gap: Unknown) -> CommandLine:
    """Return a command line of which nothing is known."""
    return CommandLine(gap, gap, gap, gap, gap, gap, gap)


def parse(text: str, source: str, default_huge_page_bytes: Fact[int], architecture: str | None) -> CommandLine:
    """Return the parameters that matter here. Nothing is taken of a text of several lines: it is no command line."""
    line = text.strip("\r\n \t")
    if "\n" in line:
        return unread(Unknown(f"{source} has more than one line: that is no kernel command line", "copy it again"))
    parameters = split(line)
    preempt = values(parameters, "preempt")
    thp = values(parameters, "transparent_hugepage")
    requests, default, ignored = _huge_pages(parameters, source, default_huge_page_bytes, architecture)
    return CommandLine(
        text=Known(line, source),
        preempt=Known(preempt[-1] if preempt else None, source),
        default_huge_page_bytes=Known(default, source),
        huge_pages=requests,
        ignored_huge_pages=Known(ignored, source),
        transparent_hugepage=Known(thp[-1] if thp else None, source),
        isolated_cpus=Known(_isolated(values(parameters, "isolcpus")), source),
    )


def split(line: str) -> list[tuple[str, str | None]]:
    """Return the kernel's parameters in order, up to `--`: what follows is for the first process.

    Names have `_` for `-`, which the kernel holds for the same; quotes may hold blanks and are not part of a value.
    """
    parameters: list[tuple[str, str | None]] = []
    for word in re.findall(r'(?:"[^"]*(?:"|$)|[^\s"])+', line):
        if word == "--":
            break
        if word.startswith('"'):
            word = word[1:].removesuffix('"')
        name, equals, value = word.partition("=")
        if value.startswith('"'):
            value = value[1:].removesuffix('"')
        parameters.append((name.replace("-", "_"), value if equals else None))
    return parameters


def values(parameters: list[tuple[str, str | None]], name: str) -> list[str]:
    """Return every value that a parameter is given, in order."""
    return [value for key, value in parameters if key == name and value is not None]


def memory_size(text: str) -> int:
    """Return what the kernel's memparse() makes of a size in bytes: `2M`, `0x200000`, `1GB` (the B is ignored)."""
    match = re.match(r"(0[xX][0-9a-fA-F]{1,16}|\d{1,20})([KMGTPEkmgtpe]?)", text)
    if match is None:
        return 0
    digits = match[1]
    if digits[:2].lower() == "0x":
        number = int(digits, 16)
    elif digits[0] == "0":
        octal = re.match(r"0[0-7]*", digits)
        number = int(octal[0], 8) if octal else 0
    else:
        number = int(digits)
    return number << (10 * (" KMGTPE".index(match[2].upper()) if match[2] else 0))


def _is_huge_page_size(size: int, architecture: str | None) -> bool:
    """Say whether the kernel may have such pages (arch_hugetlb_valid_size): exact for x86 and s390."""
    if architecture == "x86":
        return size in (2 << 20, 1 << 30)
    if architecture == "s390":
        return size in (1 << 20, 2 << 30)
    return size >= 1 << 16 and size & (size - 1) == 0


def _huge_pages(
    parameters: list[tuple[str, str | None]], source: str, kernel_default: Fact[int], architecture: str | None
) -> tuple[tuple[RequestedHugePages, ...], int | None, tuple[str, ...]]:
    """Return the requests in force, the size of default_hugepagesz= and the parameters that the kernel ignores."""
    given: dict[int | None, list[RequestedHugePages]] = {}  # by page size; None: the default size, not named yet
    default: int | None = None
    current: int | None = None  # the size that a hugepages= counts for
    valid = True  # the last size was one: a hugepages= after a bad one is ignored
    ignored: list[str] = []
    for name, value in parameters:
        if value is None or name not in ("hugepages", "hugepagesz", "default_hugepagesz"):
            continue
        written = f"{name}={value}"
        if name == "hugepages":
            if not valid:
                valid = True  # mm/hugetlb.c forgives after one
                ignored.append(written)
                continue
            requests = None if current in given else _requests(value, source)
            if requests is None:  # a second one without a size in between, or no number
                ignored.append(written)
            else:
                given[current] = requests
            continue
        size = memory_size(value)
        valid = _is_huge_page_size(size, architecture)
        if name == "default_hugepagesz":
            valid = valid and default is None
            if valid:
                default = current = size
                if None in given:  # an earlier hugepages= was for the default size, whatever it would be
                    given[size] = given.pop(None)
        elif valid:
            valid = size not in given
            current = size if valid else current
        if not valid:
            ignored.append(written)
    if None in given and isinstance(kernel_default, Known) and kernel_default.value in given:
        # without default_hugepagesz= the request without a size overwrites the one that names the default size
        ignored.extend(f"hugepages={value_of_request(r)}" for r in given.pop(kernel_default.value))
    result: list[RequestedHugePages] = []
    for page_size, requested in given.items():
        page_bytes: Fact[int]
        if page_size is not None:
            page_bytes = Known(page_size, source)
        elif isinstance(kernel_default, Known):
            page_bytes = kernel_default
        else:
            page_bytes = Unknown(
                f"{source} names no size for hugepages=, and the default size is not known: {kernel_default.reason}",
                "add /proc/meminfo",
            )
        result.extend(replace(request, page_bytes=page_bytes) for request in requested)
    return tuple(result), default, tuple(ignored)


def value_of_request(request: RequestedHugePages) -> str:
    """Return a request as it would be written after `hugepages=`."""
    pages = request.pages.value if isinstance(request.pages, Known) else "?"
    node = request.node.value if isinstance(request.node, Known) else None
    return f"{pages}" if node is None else f"{node}:{pages}"


def _requests(value: str, source: str) -> list[RequestedHugePages] | None:
    """Parse `N` or `NODE:N,NODE:N`; like the kernel, stop at what follows a number. None: refused."""
    unset = Unknown("")
    requests: list[RequestedHugePages] = []
    for part in value.split(","):
        match = re.match(r"(\d{1,19})(?::(\d{1,19}))?", part)
        if match is None or (requests and match[2] is None):
            return None
        if match[2] is None:
            return (
                None
                if part[match.end() :].startswith(":")
                else [RequestedHugePages(unset, Known(int(match[1]), source), Known(None, source))]
            )
        requests.append(RequestedHugePages(unset, Known(int(match[2]), source), Known(int(match[1]), source)))
        if match.end() < len(part):
            break
    return requests


def _isolated(given: list[str]) -> str | None:
    """Return the CPU list that isolcpus= takes from the scheduler's domains; the first one counts.

    Flags may stand before the list; `nohz` or `managed_irq` alone leave the CPUs to the scheduler.
    """
    for value in given:
        flags, parts = [], value.split(",")
        while parts and parts[0] in ("nohz", "domain", "managed_irq"):
            flags.append(parts.pop(0))
        if parts and (not flags or "domain" in flags):
            return ",".join(parts)
    return None
