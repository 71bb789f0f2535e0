"""The build configuration of one kernel release: where it lies, and what its options say.

Option names and their meaning: kernel/Kconfig.preempt of Linux 3.10 to 7.2; mm/Kconfig; arch/*/Kconfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

Mode = Literal["none", "voluntary", "full", "lazy", "rt"]
VersionToken = Literal["PREEMPT", "PREEMPT_DYNAMIC", "PREEMPT_RT"]
Version = tuple[int, int]

LAZY_ARCHITECTURES = frozenset({"x86", "arm64", "loongarch", "powerpc", "riscv", "s390"})
"""Architectures that select ARCH_HAS_PREEMPT_LAZY (arch/*/Kconfig of Linux 6.18), by the kernel's own names."""

RESTRICTED_FROM: Version = (7, 0)
"""From here on, none and voluntary are no choice where lazy exists (commit 7dadeaa6e851)."""

LAZY_FROM: Version = (6, 13)
"""First mainline release with the lazy model (commit 7c70cb94d29c)."""

_PAGE_OPTIONS = {
    "ARM64_4K_PAGES": 4096,
    "ARM64_16K_PAGES": 16384,
    "ARM64_64K_PAGES": 65536,
    "PPC_4K_PAGES": 4096,
    "PPC_16K_PAGES": 16384,
    "PPC_64K_PAGES": 65536,
    "PPC_256K_PAGES": 262144,
    "PAGE_SIZE_4KB": 4096,
    "PAGE_SIZE_8KB": 8192,
    "PAGE_SIZE_16KB": 16384,
    "PAGE_SIZE_32KB": 32768,
    "PAGE_SIZE_64KB": 65536,
    "PAGE_SIZE_256KB": 262144,
}

# In the order in which they win: RT kernels may set several; PREEMPT_RT_FULL, PREEMPT_RTB and PREEMPT__LL are
# the choices of the RT patches for 4.x, where the last two preempt like full.
_MODELS: tuple[tuple[str, Mode], ...] = (
    ("PREEMPT_RT", "rt"),
    ("PREEMPT_RT_FULL", "rt"),
    ("PREEMPT_LAZY", "lazy"),
    ("PREEMPT__LL", "full"),
    ("PREEMPT_RTB", "full"),
    ("PREEMPT", "full"),
    ("PREEMPT_VOLUNTARY", "voluntary"),
    ("PREEMPT_NONE", "none"),
)

_NAMES = (
    *(option for option, _ in _MODELS),
    *_PAGE_OPTIONS,
    "PREEMPT_AUTO",
    "PREEMPT_DYNAMIC",
    "ARCH_HAS_PREEMPT_LAZY",
    "RSEQ_SLICE_EXTENSION",
    "HUGETLBFS",
    "CGROUP_HUGETLB",
    "TRANSPARENT_HUGEPAGE",
    "TRANSPARENT_HUGEPAGE_ALWAYS",
    "TRANSPARENT_HUGEPAGE_MADVISE",
    "TRANSPARENT_HUGEPAGE_NEVER",
)


@record
class Config:
    """The options of interest as the file has them: `y`, `m`, a value, or `n` for "is not set"."""

    options: Mapping[str, str]
    source: str
    release: str | None
    """The release in the file's header: often only the upstream part of `uname -r`."""
    architecture: str | None
    """The kernel's own name of the architecture, in the header (x86, x86_64, arm64, powerpc, ...)."""

    @property
    def version(self) -> Version | None:
        return version_of(self.release) if self.release else None

    def has(self, option: str) -> bool:
        return self.options.get(option, "n") == "y"


@record
class Build:
    """What the kernel's build configuration says."""

    model: Fact[Mode] = measured(doc="the preemption model it was built with")
    dynamic: Fact[bool] = measured(doc="CONFIG_PREEMPT_DYNAMIC: the model can be chosen at boot")
    selectable: Fact[tuple[str, ...]] = measured(doc="the models that preempt= accepts; none where not dynamic")
    lazy_supported: Fact[bool] = measured(doc="CONFIG_ARCH_HAS_PREEMPT_LAZY")
    rseq_slice_extension: Fact[bool] = measured(doc="CONFIG_RSEQ_SLICE_EXTENSION is built in")
    hugetlbfs: Fact[bool] = measured(doc="CONFIG_HUGETLBFS: the kernel has huge pages at all")
    cgroup_hugetlb: Fact[bool] = measured(doc="CONFIG_CGROUP_HUGETLB")
    thp: Fact[bool] = measured(doc="CONFIG_TRANSPARENT_HUGEPAGE: the kernel has transparent huge pages at all")
    thp_default: Fact[Literal["always", "madvise", "never"]] = measured(doc="transparent huge pages at boot")
    base_page_bytes: Fact[int] = measured(unit="bytes", doc="the base page size it was built for")


def version_of(release: str) -> Version | None:
    """Return the first two numbers of a kernel release (`6.12.43+deb13-amd64`: 6, 12), None if it has none."""
    major, _, rest = release[:32].partition(".")
    end = next((n for n, c in enumerate(rest) if not c.isdigit()), len(rest))
    minor = rest[:end]
    if not (release.isascii() and major.isdigit() and minor and len(major) < 5 and len(minor) < 5):
        return None
    return int(major), int(minor)


def architecture_of(machine: str) -> str:
    """Return the kernel's own name (arch/) for what `uname -m` or a configuration's header says."""
    if machine in ("x86_64", "x86", "i386", "i486", "i586", "i686"):
        return "x86"
    if machine in ("aarch64", "aarch64_be"):
        return "arm64"
    for prefix, name in (("ppc", "powerpc"), ("s390", "s390"), ("riscv", "riscv"), ("loongarch", "loongarch")):
        if machine.startswith(prefix):
            return name
    return machine


# reading ----------------------------------------------------------------------------------------


def read(host: Host, release: Fact[str], token: Fact[VersionToken | None]) -> Config | Unknown:
    """Return the configuration of that release, from the first place that has it.

    `/proc/config.gz` is the running kernel's own. Any other file counts only if it is named after the very
    release, is of the same series by its header, and agrees with the version token of `uname -v`: in a container
    and beside a rebuilt source tree such files belong to other kernels.
    """
    tried: list[str] = []
    own = host.read_bytes("/proc/config.gz")
    if isinstance(own, Known):
        text = _unpacked(own.value)
        if text is not None:
            config = parse(text, own.source)
            if config.options:
                return config
        tried.append("/proc/config.gz holds no kernel configuration")
    if isinstance(release, Unknown):
        return Unknown(
            "; ".join([*tried, f"no build configuration can be chosen: {release.reason}"]),
            "add /proc/config.gz, or uname.txt and /boot/config-RELEASE" if not host.live else "",
            kind="absent",
        )
    if "/" in release.value:
        return Unknown(f"the release {release.value!r} names no file")
    hint = ""
    for path in places(release.value):
        data = host.read_bytes(path)
        if isinstance(data, Unknown):
            if data.kind != "absent":
                tried.append(data.reason)
                hint = hint or data.hint
            continue
        config = parse(data.value, path)
        objection = _objection(config, release.value, token)
        if objection is None:
            return config
        tried.append(objection)
    where = f"/proc/config.gz, /boot/config-{release.value}, /usr/lib/modules/{release.value}/config"
    reason = f"no build configuration of {release.value} is there ({where})"
    return Unknown("; ".join([*tried, reason]), hint or f"make one of these readable: {where}", kind="absent")


def places(release: str) -> tuple[str, ...]:
    """Return the files that hold the configuration of a release, by how directly they belong to it."""
    return (
        f"/boot/config-{release}",
        f"/usr/lib/modules/{release}/config",
        f"/lib/modules/{release}/config",
        f"/usr/lib/ostree-boot/config-{release}",
        f"/usr/lib/kernel/config-{release}",
        f"/lib/modules/{release}/build/.config",
        f"/usr/lib/modules/{release}/build/.config",
    )


def _objection(config: Config, release: str, token: Fact[VersionToken | None]) -> str | None:
    """Say why a file is not the configuration of this kernel, or None."""
    if not config.options:
        return f"{config.source} holds no kernel configuration"
    if config.version is not None and config.version != version_of(release):
        return f"{config.source} is of another kernel ({config.release})"
    if isinstance(token, Known):
        dynamic, rt = config.has("PREEMPT_DYNAMIC"), config.has("PREEMPT_RT") or config.has("PREEMPT_RT_FULL")
        if (token.value == "PREEMPT_DYNAMIC" and not dynamic) or (token.value is None and (dynamic or rt)):
            return f"{config.source} is of another build than this kernel's (its version says {token.value})"
        if (token.value == "PREEMPT_RT") != rt:
            return f"{config.source} is of another build than this kernel's (its version says {token.value})"
    return None


def _unpacked(data: bytes) -> bytes | None:
    if data[:2] != b"\x1f\x8b":
        return data
    import zlib

    try:
        return zlib.decompressobj(31).decompress(data, 8 << 20)
    except zlib.error:
        return None


def parse(data: bytes, source: str) -> Config:
    """Return the options of interest of a configuration file; the last line of an option counts, as in kconfig."""
    options: dict[str, str] = {}
    for name in _NAMES:
        option = f"CONFIG_{name}".encode()
        at = data.find(option)
        while at >= 0:
            end = data.find(b"\n", at)
            before = data[data.rfind(b"\n", 0, at) + 1 : at].strip(b" \t")
            after = data[at + len(option) : end if end >= 0 else len(data)].rstrip(b" \t\r")
            if after.startswith(b"=") and not before and len(after.split()) == 1 and len(after) > 1:
                options[name] = after[1:].decode("ascii", "replace")
            elif after == b" is not set" and before and not before.strip(b"# \t"):
                options[name] = "n"
            at = data.find(option, at + len(option))
    head = data[:4096]
    header = re.search(rb"^#+[ \t]*Linux/(\S+)[ \t]+(\S+)[ \t]+Kernel Configuration", head, re.M)
    release = header[2] if header else None
    if header is None:
        old = re.search(rb"^#+[ \t]*Linux kernel version:[ \t]*(\S+)", head, re.M)
        release = old[1] if old else None
    return Config(
        options,
        source,
        release.decode("ascii", "replace") if release else None,
        header[1].decode("ascii", "replace") if header else None,
    )


# meaning ----------------------------------------------------------------------------------------


def build(config: Config | Unknown) -> Build:
    """Return what a configuration says, every fact with its option as source; all Unknown where there is none."""
    if isinstance(config, Unknown):
        gap = config
        return Build(gap, gap, gap, gap, gap, gap, gap, gap, gap, gap)
    return Build(
        model=_model(config),
        dynamic=Known(config.has("PREEMPT_DYNAMIC"), _of(config, "PREEMPT_DYNAMIC")),
        selectable=selectable(config),
        lazy_supported=Known(config.has("ARCH_HAS_PREEMPT_LAZY"), _of(config, "ARCH_HAS_PREEMPT_LAZY")),
        rseq_slice_extension=_switch(config, "RSEQ_SLICE_EXTENSION"),
        hugetlbfs=_switch(config, "HUGETLBFS"),
        cgroup_hugetlb=_switch(config, "CGROUP_HUGETLB"),
        thp=_switch(config, "TRANSPARENT_HUGEPAGE"),
        thp_default=_thp_default(config),
        base_page_bytes=_base_page_bytes(config),
    )


def _of(config: Config, option: str) -> str:
    return f"{config.source} CONFIG_{option}"


def _switch(config: Config, option: str) -> Fact[bool]:
    value = config.options.get(option)
    if value is None:
        return Unknown(f"{config.source} has no line CONFIG_{option}", kind="absent")
    return Known(value == "y", _of(config, option))


def _model(config: Config) -> Fact[Mode]:
    for option, mode in _MODELS:
        if config.has(option):
            return Known(mode, _of(config, option))
    if config.has("PREEMPT_AUTO"):
        return Unknown(f"{config.source}: PREEMPT_AUTO, an out-of-tree model from before lazy, is not known here")
    return Unknown(f"{config.source} sets no preemption model")


def selectable(config: Config) -> Fact[tuple[str, ...]]:
    """Return the values of `preempt=` that a kernel of this configuration takes, in the kernel's order.

    Linux 7.0 leaves none and voluntary out where lazy exists. The choices in the file itself show that: a file
    that offers PREEMPT_NONE beside lazy is from before, one that does not is from after, and a file that
    contradicts its own version is of a patched kernel, about which nothing is claimed.
    """
    source = f"{config.source} CONFIG_PREEMPT_DYNAMIC"
    if not config.has("PREEMPT_DYNAMIC"):
        return Known((), source)
    lazy = config.has("ARCH_HAS_PREEMPT_LAZY")
    last = ("full", "lazy") if lazy else ("full",)
    if config.has("PREEMPT_RT"):
        return Known(last, source)
    if not lazy:
        return Known(("none", "voluntary", "full"), source)
    offered = "PREEMPT_NONE" in config.options
    version = config.version
    if version is not None and offered != (version < RESTRICTED_FROM):
        return Unknown(
            f"{config.source}: Linux {config.release} {'offers' if offered else 'does not offer'} the model none, "
            "unlike the mainline kernel of that version: it is patched, or the file is cut",
            "read /sys/kernel/debug/sched/preempt as root: it lists what this kernel takes",
        )
    return Known((("none", "voluntary") if offered else ()) + last, f"{source}, ARCH_HAS_PREEMPT_LAZY")


def _thp_default(config: Config) -> Fact[Literal["always", "madvise", "never"]]:
    word: Literal["always", "madvise", "never"]
    for word in ("always", "madvise", "never"):
        option = f"TRANSPARENT_HUGEPAGE_{word.upper()}"
        if config.has(option):
            return Known(word, _of(config, option))
    return Unknown(f"{config.source} sets no default for transparent huge pages", kind="absent")


def _base_page_bytes(config: Config) -> Fact[int]:
    for option, size in _PAGE_OPTIONS.items():
        if config.has(option):
            return Known(size, _of(config, option))
    if config.architecture and architecture_of(config.architecture) in ("x86", "s390"):
        return Known(4096, f"{config.source} ({config.architecture} has 4 kB pages only)")
    return Unknown(f"{config.source} does not say the base page size")
