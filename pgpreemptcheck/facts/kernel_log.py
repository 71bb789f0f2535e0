"""What the kernel log of this boot says of the preemption model: mode lines, refusals, backtrace headers.

Sources: kernel/sched/core.c (setup_preempt_mode, __sched_dynamic_update, preempt_model_str) of Linux 5.12 to 7.2;
dump_stack_print_info() in lib/dump_stack.c.
"""

from __future__ import annotations

import re

from pgpreemptcheck.facts.kernel_config import Mode, Version, version_of
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, record

LOG_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_TAIL = 8 << 20
"""How much of a log file is read, from its end, in bytes."""

# What stands before a kernel message: quoting, `<6>`, facility and level (dmesg -x), an ISO time, a syslog or
# journal header that ends in `kernel:`, `[   12.345678]`, `[T1]`.
_PREFIX = (
    r"[>\s]*(?:<\d+>)?(?:\d{4}-\d\d-\d\dT\S+\s+)?(?:[a-z]+\s*:\s*[a-z]+\s*:\s*)?"
    r"(?:[^\n]*\bkernel(?:\[\d+\])?:)?\s*(?:\[[^\]\n]*\]\s*)*"
)
_MODE_LINE = (
    r"Dynamic[ \t]+Preempt:[>\s]*(?:(none|voluntary|full|lazy)(?!\S)|"
    r"[Uu]nsupported[>\s]+(?:preempt[>\s]+)?mode:?[>\s]+([^\s,]+))"
)
# `Comm: x ... RELEASE #1 PREEMPT(lazy)`. Not `Oops: 0000 [#1] PREEMPT SMP`: that is printed for every dynamic build.
_BACKTRACE = (
    r"\bComm: (?:[^\n]|\n(?![>\s]*\[)){1,240}?[>\s](\S+)[>\s]+#\d+\S*[>\s]+"
    r"(PREEMPT\S*|NONE|VOLUNTARY)(?!\S)"
)


@record
class LogEvidence:
    """What a kernel log says; `mode` is by the last line that tells, the effective one."""

    mode: Known[Mode] | None
    dynamic: bool
    """There is a `Dynamic Preempt:` line: the kernel was built with CONFIG_PREEMPT_DYNAMIC."""
    refused: tuple[str, ...]
    """Values of preempt= that the kernel refused at this boot."""
    emulator: str | None
    """What emulates a kernel here, if the log says so."""
    source: str


def boot_text(text: str) -> str:
    """Return what follows the last `Linux version` line, which begins a boot; all of it where there is none."""
    return text[max(0, _last_boot(text)) :]


def _last_boot(text: str) -> int:
    """Return where the last `Linux version RELEASE` begins, -1 if nowhere."""
    end = len(text)
    while (start := text.rfind("Linux version ", 0, end)) >= 0:
        if text[start + 14 : start + 15].isdigit():
            return start
        end = start
    return -1


def scan(text: str, source: str, version: Version | None = None) -> LogEvidence:
    """Return the evidence in the log of one boot. `version` is the running kernel's, for one bug's sake."""
    text = boot_text(text)
    modes: list[tuple[int, Mode, str]] = []
    refused: list[str] = []
    dynamic = False
    for match in re.finditer(_MODE_LINE, text) if "Preempt:" in text else ():
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not re.fullmatch(_PREFIX, line):
            continue
        dynamic = True
        if match[2] is not None:
            refused.append(match[2])
            continue
        word: Mode
        for word in ("none", "voluntary", "full", "lazy"):
            if match[1] == word:
                modes.append((match.start(), word, f"Dynamic Preempt: {word}"))
    for match in re.finditer(_BACKTRACE, text) if "Comm: " in text else ():
        of = version_of(match[1])
        if version is not None and of is not None and of != version:
            continue  # of another kernel: a crash dump's or a guest's log passed on
        mode = _model_string(match[2], of or version)
        if mode is not None:
            modes.append((match.start(), mode, f"backtrace header {match[2]}"))
    for passed_on in text.split('Unknown kernel command line parameters "')[1:]:
        words = passed_on.partition("\n")[0].partition('"')[0].split()
        refused.extend(word[8:] for word in words if word.startswith("preempt="))
    last = max(modes, default=None)
    return LogEvidence(
        mode=Known(last[1], f'{source}: last line "{last[2]}"') if last else None,
        dynamic=dynamic,
        refused=tuple(refused),
        emulator="gVisor" if "Starting gVisor" in text else None,
        source=source,
    )


def _model_string(text: str, version: Version | None) -> Mode | None:
    """Return the mode that preempt_model_str() printed (Linux 6.15 and later)."""
    if text.startswith(("PREEMPT_RT", "PREEMPT_{RT")):
        return "rt"
    fixed: dict[str, Mode] = {
        "NONE": "none",
        "VOLUNTARY": "voluntary",
        "PREEMPT": "full",
        "PREEMPTLAZY": "lazy",
        "PREEMPT(none)": "none",
        "PREEMPT(voluntary)": "voluntary",
        "PREEMPT(full)": "full",
        "PREEMPT(lazy)": "lazy",
    }
    if text == "PREEMPT(undef)" and version in ((6, 15), (6, 16)):
        return "none"  # printed for none until commit 3ebb1b652239
    return fixed.get(text)


def boot_log_file(host: Host, release: Fact[str], command_line: Fact[str]) -> Fact[str]:
    """Return what a log file says of this boot, or why none does.

    A file counts only if this boot is in it: a `Linux version` line of the running release, no older than the
    boot itself, and the same command line where it shows one.
    """
    objections: list[str] = []
    booted = _boot_time(host)
    for path in LOG_FILES:
        status = host.status(path)
        if isinstance(status, Unknown):
            if status.kind != "absent":
                objections.append(status.reason)
            continue
        data = host.read_range(path, max(0, status.value.size - _TAIL), _TAIL)
        if isinstance(data, Unknown):
            objections.append(data.reason)
            continue
        text = data.value.decode("utf-8", "replace")
        start = _last_boot(text)
        if start < 0:
            objections.append(f"{path} does not reach back to this boot")
            continue
        text = text[start:]
        if booted is not None and status.value.modified < booted:
            objections.append(f"{path} ends before this boot")
        elif isinstance(release, Known) and not text.startswith(f"Linux version {release.value} "):
            objections.append(f"{path} is of another kernel")
        elif not _same_command_line(text, command_line):
            objections.append(f"{path} is of a boot with another command line")
        else:
            return Known(text, path)
    return Unknown("; ".join(objections) or f"no kernel log is at {', '.join(LOG_FILES)}", kind="absent")


def _boot_time(host: Host) -> float | None:
    """Return when the host booted in epoch seconds (btime of /proc/stat), None if not known."""
    text = host.read("/proc/stat", limit=1 << 20)
    match = re.search(r"^btime (\d+)", text.value, re.M) if isinstance(text, Known) else None
    return float(match[1]) if match else None


def _same_command_line(text: str, command_line: Fact[str]) -> bool:
    match = re.search(r"(?:^|\] |kernel: )(?:Kernel c|C)ommand line: ([^\r\n]*)", text, re.M)
    if match is None or isinstance(command_line, Unknown):
        return True
    logged, running = match[1].split(), command_line.value.split()
    if not logged:
        return True
    # a long line is cut in the log, possibly within a word
    return " ".join(running).startswith(" ".join(logged)) or " ".join(logged).endswith(" ".join(running))
