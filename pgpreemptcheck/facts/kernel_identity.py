"""Which kernel runs: release, version text and architecture, from uname or the banner in the kernel log."""

from __future__ import annotations

import re
from dataclasses import replace

from pgpreemptcheck.facts import kernel_log
from pgpreemptcheck.facts.kernel_config import VersionToken, architecture_of, version_of
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, record


@record
class Identity:
    """What names the running kernel."""

    release: Fact[str]
    version: Fact[str]  # uname -v
    token: Fact[VersionToken | None]
    arch: Fact[str]  # uname -m
    nodename: Fact[str]


def identify(host: Host) -> Identity:
    """Return what `uname` says, or what of it lies in /proc and in the kernel log."""
    found = _from_uname(host.output("uname"))
    gaps = [fact for fact in (found.release, found.version, found.arch) if isinstance(fact, Unknown)]
    if gaps and gaps[0].kind != "unsupported":
        found = _complete(host, found)
    if isinstance(found.version, Known) and isinstance(found.token, Unknown):
        found = replace(found, token=_token(found.version))
    return found


def _from_uname(text: Fact[str]) -> Identity:
    """Parse `uname -a` (or -srvm, -r, -v), skipping lines of another kind before it."""
    if isinstance(text, Unknown):
        return Identity(text, text, text, text, text)
    unread = Unknown(f"{text.source} holds no line of uname", "add the output of uname -a")
    found = Identity(unread, unread, unread, unread, unread)
    for line in text.value.splitlines():
        words = line.lstrip("> \t").split()
        if not words:
            continue
        if words[:2] == ["Linux", "version"]:
            return _from_banner(line, text.source, found)
        if words[0] == "Linux" and len(words) > 2:
            at = 1 if version_of(words[1]) and words[2].startswith("#") else 2
            if version_of(words[at]) is None or len(words) <= at + 1:
                continue
            rest = words[at + 1 :]
            machine = next((n for n, word in enumerate(rest) if n and _is_machine(word)), None)
            return Identity(
                release=Known(words[at], text.source),
                version=Known(" ".join(rest[:machine]), text.source),
                token=unread,
                arch=Known(rest[machine], text.source) if machine is not None else unread,
                nodename=Known(words[1], text.source) if at == 2 else unread,
            )
        if words[0] in ("Darwin", "FreeBSD", "OpenBSD", "NetBSD", "SunOS", "AIX", "CYGWIN_NT-10.0"):
            foreign = Unknown(f"this host runs {words[0]}, not Linux: out of scope", kind="unsupported")
            arch: Fact[str] = Known(words[-1], text.source) if _is_machine(words[-1]) else foreign
            return Identity(foreign, foreign, foreign, arch, foreign)
        if len(words) == 1 and re.match(r"\d+\.\d+[.\d]*\S*$", words[0]):
            found = replace(found, release=Known(words[0], text.source))
        elif re.match(r"#\d", words[0]) and len(words) > 2:
            found = replace(found, version=Known(" ".join(words), text.source))
    return found


def _is_machine(word: str) -> bool:
    """Say whether a word is what `uname -m` prints (by hand: a pattern costs more than all of this read)."""
    if word.startswith(("armv", "mips", "parisc", "sparc")):
        return word.isalnum()
    return word in (
        *("x86_64", "i386", "i486", "i586", "i686", "aarch64", "aarch64_be", "arm64", "ppc", "ppc64", "ppc64le"),
        *("s390", "s390x", "riscv32", "riscv64", "loongarch64", "ia64", "alpha", "m68k"),
    )


def _complete(host: Host, found: Identity) -> Identity:
    """Fill in from /proc, or from the line that begins the kernel log."""
    release = host.read("/proc/sys/kernel/osrelease", limit=4096)
    if isinstance(release, Known) and isinstance(found.release, Unknown) and version_of(release.value.strip()):
        found = replace(found, release=Known(release.value.strip(), release.source))
    version = host.read("/proc/sys/kernel/version", limit=4096)
    if isinstance(version, Known) and isinstance(found.version, Unknown):
        found = replace(found, version=Known(version.value.strip(), version.source))
    arch = host.read("/proc/sys/kernel/arch", limit=4096)
    if isinstance(arch, Known) and isinstance(found.arch, Unknown):
        found = replace(found, arch=Known(arch.value.strip(), arch.source))
    line = host.read("/proc/version", limit=4096)
    if isinstance(line, Unknown) and isinstance(found.release, Unknown):
        line = host.output("dmesg")
    if isinstance(line, Known):
        found = _from_banner(line.value, line.source, found)
    if isinstance(found.arch, Unknown) and isinstance(found.release, Known):
        suffix = re.search(r"[.-](x86_64|amd64|aarch64|arm64|ppc64le|s390x|riscv64)\b", found.release.value)
        if suffix:
            name = {"amd64": "x86_64", "arm64": "aarch64"}.get(suffix[1], suffix[1])
            found = replace(found, arch=Known(name, f"the release {found.release.value}", "inferred"))
    return found


def _from_banner(text: str, source: str, found: Identity) -> Identity:
    """Fill in from `Linux version RELEASE (builder) (compiler) #1 SMP ...`, the line of /proc/version and of a boot."""
    match = re.search(r"\bLinux version (\d\S*)(?:[^\n]*?(#\d[^\n]*))?", kernel_log.boot_text(text))
    if match is None or version_of(match[1]) is None:
        return found
    if isinstance(found.release, Unknown):
        found = replace(found, release=Known(match[1], source))
    if isinstance(found.version, Unknown) and match[2]:
        found = replace(found, version=Known(match[2].strip(), source))
    return found


def _token(version: Known[str]) -> Fact[VersionToken | None]:
    """Return the PREEMPT word of `uname -v` (init/Makefile; the RT patches before 5.4 print `PREEMPT RT`)."""
    words = version.value.replace("PREEMPT RT", "PREEMPT_RT").split()
    tokens: tuple[VersionToken, ...] = ("PREEMPT_RT", "PREEMPT_DYNAMIC", "PREEMPT")
    for token in tokens:
        if token in words:
            return Known(token, f"{version.source}: {version.value}")
    if "PREEMPT" in version.value:
        return Unknown(f"the version {version.value!r} ({version.source}) is cut or unknown after PREEMPT")
    return Known(None, f"{version.source}: {version.value}")


def family(identity: Identity) -> str | None:
    """Return the architecture as the kernel's sources name it (x86, arm64), None where it is not known."""
    return architecture_of(identity.arch.value) if isinstance(identity.arch, Known) else None
