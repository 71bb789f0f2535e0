"""The kernel: release, build configuration, command line, and the preemption model that is in force.

The model in force has no single place where everybody may read it, so the first rung that answers counts:
RT (uname, build, /sys/kernel/realtime); sched/preempt in debugfs; a build that is not dynamic; the last mode line
or backtrace header in the kernel log of this boot; the build's model with the last valid `preempt=`; the version
token of `uname -v`. Only the first four tell the model in force now; the rest is what was so at boot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pgpreemptcheck.facts import kernel_command_line, kernel_config, kernel_log, meminfo
from pgpreemptcheck.facts.kernel_command_line import CommandLine, RequestedHugePages
from pgpreemptcheck.facts.kernel_config import (
    LAZY_ARCHITECTURES,
    LAZY_FROM,
    RESTRICTED_FROM,
    Build,
    Mode,
    VersionToken,
    architecture_of,
    version_of,
)
from pgpreemptcheck.facts.kernel_identity import Identity, family, identify
from pgpreemptcheck.facts.kernel_log import LogEvidence
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record

__all__ = [
    "Build",
    "CommandLine",
    "Kernel",
    "Mode",
    "ModeCertainty",
    "Preemption",
    "RequestedHugePages",
    "VersionToken",
    "read",
    "sched_ext",
]

ModeCertainty = Literal["effective", "boot", "build"]

DEBUGFS = "/sys/kernel/debug/sched/preempt"
_MODES: tuple[Mode, ...] = ("none", "voluntary", "full", "lazy")


@record
class Preemption:
    """The preemption model in force, by the first rung of the ladder that answers (its source names it)."""

    mode: Fact[Mode] = measured()
    certainty: ModeCertainty | None = measured(doc="effective: read off the running kernel; boot, build: inferred")
    preemptible: Fact[bool] = measured(doc="kernel code can be preempted: lazy, full or rt")
    ignored_parameter: Fact[str | None] = measured(doc="a preempt= value that this kernel ignores, as written")


@record
class Kernel:
    release: Fact[str] = measured(doc="uname -r")
    version_token: Fact[VersionToken | None] = measured(doc="the PREEMPT word of uname -v")
    lockdown: Fact[Literal["none", "integrity", "confidentiality"]] = measured()
    build: Build = measured()
    command_line: CommandLine = measured()
    preemption: Preemption = measured()


def read(host: Host, identity: Identity | None = None) -> Kernel:
    """Return the kernel of a host."""
    identity = identity or identify(host)
    config = kernel_config.read(host, identity.release, identity.token)
    architecture = family(identity)
    if architecture is None and isinstance(config, kernel_config.Config) and config.architecture:
        architecture = architecture_of(config.architecture)
    default_size = meminfo.read(host).size("Hugepagesize")
    command_line = kernel_command_line.read(host, default_size, architecture)
    ladder = _Ladder(host, identity, kernel_config.build(config), command_line, architecture)
    return Kernel(
        release=identity.release,
        version_token=identity.token,
        lockdown=_lockdown(host, ladder.debugfs),
        build=ladder.build,
        command_line=command_line,
        preemption=ladder.preemption(),
    )


# lockdown, sched_ext ----------------------------------------------------------------------------


def _lockdown(host: Host, debugfs: Fact[str]) -> Fact[Literal["none", "integrity", "confidentiality"]]:
    path = "/sys/kernel/security/lockdown"
    text = host.read(path, limit=4096)
    if isinstance(text, Unknown):
        suspicion = ""
        if isinstance(debugfs, Unknown) and debugfs.kind == "lockdown":
            suspicion = f"; that root may not read {DEBUGFS} suggests that it is on"
        hint = text.hint or ("mount securityfs, or read it on the host itself" if text.kind == "absent" else "")
        return Unknown(f"the lockdown state is not known: {text.reason}{suspicion}", hint, text.kind)
    word: Literal["none", "integrity", "confidentiality"]
    for word in ("none", "integrity", "confidentiality"):
        if f"[{word}]" in text.value.split():
            return Known(word, path)
    return Unknown(f"{path} marks no state: {text.value.strip()[:80]!r}")


def sched_ext(host: Host, identity: Identity) -> Fact[bool]:
    """Return whether a sched_ext (BPF) scheduler runs the tasks (/sys/kernel/sched_ext/state, Linux 6.12)."""
    path = "/sys/kernel/sched_ext/state"
    state = host.read(path, limit=4096)
    if isinstance(state, Known):
        return Known(state.value.strip() == "enabled", path)
    if state.kind != "absent":
        return state
    version = version_of(identity.release.value) if isinstance(identity.release, Known) else None
    if host.live:
        return Known(False, f"{path} is not there")
    if version is not None and version < (6, 12):
        return Known(False, f"Linux {version[0]}.{version[1]} has no sched_ext", "inferred")
    return state


# the ladder -------------------------------------------------------------------------------------


class _Ladder:
    """Collects the evidence in the order of its worth and stops asking when a rung answers."""

    def __init__(
        self, host: Host, identity: Identity, build: Build, command_line: CommandLine, architecture: str | None
    ) -> None:
        self.host = host
        self.identity = identity
        self.command_line = command_line
        self.architecture = architecture
        self.version = version_of(identity.release.value) if isinstance(identity.release, Known) else None
        self.logs: list[LogEvidence] = []
        self.log_gaps: list[Unknown] = []
        self.debugfs = host.read(DEBUGFS, limit=4096)
        self.listed, self.marked = _debugfs_words(self.debugfs)
        self.build = self._with_debugfs(build)
        self.rt = self._real_time()
        if self.rt is None and self.marked is None and not self._is_static():
            self._ask_logs()
        self.build = self._with_logs_and_version(self.build)

    # evidence

    def _with_debugfs(self, build: Build) -> Build:
        if isinstance(self.debugfs, Known):
            build = replace(build, dynamic=Known(True, DEBUGFS))
        if self.listed:
            build = replace(build, selectable=Known(self.listed, DEBUGFS))
        return build

    def _is_static(self) -> bool:
        """Say whether the build file alone settles the model: the kernel is not dynamic."""
        return (
            isinstance(self.build.dynamic, Known)
            and not self.build.dynamic.value
            and isinstance(self.build.model, Known)
        )

    def _real_time(self) -> Known[Mode] | None:
        token, model = self.identity.token, self.build.model
        if isinstance(token, Known) and token.value == "PREEMPT_RT":
            return Known("rt", token.source)
        if isinstance(model, Known) and model.value == "rt":
            return Known("rt", model.source)
        path = "/sys/kernel/realtime"
        flag = self.host.read(path, limit=64)
        if isinstance(flag, Known) and flag.value.strip() == "1":
            return Known("rt", path)
        return None

    def _ask_logs(self) -> None:
        """Read the ring buffer, then the slower logs as long as none of them tells the mode."""
        release = self.identity.release
        token = self.identity.token
        for name in ("dmesg", "journal", "file"):
            if name == "file":
                text = kernel_log.boot_log_file(self.host, release, self.command_line.text)
            else:
                text = self.host.output(name)
            if isinstance(text, Unknown):
                self.log_gaps.append(text)
            else:
                evidence = kernel_log.scan(text.value, text.source, self.version)
                self.logs.append(evidence)
                if evidence.mode is not None or evidence.emulator:
                    return
            if self._emulator() or (isinstance(token, Known) and token.value is None):
                return  # neither has mode lines: not worth the wait for the journal

    def _emulator(self) -> str | None:
        """Return what emulates a kernel here: its release and version are made up and say nothing."""
        release, version, text = self.identity.release, self.identity.version, self.command_line.text
        for fact in (release, version, text):
            if isinstance(fact, Known) and "gvisor" in fact.value.lower():
                return "gVisor"
        if isinstance(version, Known) and version.value.startswith("#1 SMP Sun Jan 10 15:06:54 PST 2016"):
            return "gVisor"  # the constant of pkg/sentry/kernel, whatever the host runs
        if isinstance(release, Known) and release.value.endswith("-Microsoft"):
            return "WSL 1"
        return next((log.emulator for log in self.logs if log.emulator), None)

    def _with_logs_and_version(self, build: Build) -> Build:
        """Fill in what the build file would say, from the log, else from the token and the version."""
        token = self.identity.token
        if isinstance(build.model, Unknown) and self.rt is not None:
            build = replace(build, model=self.rt)
        if self._emulator():
            return build
        if isinstance(build.dynamic, Unknown):
            log = next((log for log in self.logs if log.dynamic), None)
            if log is not None:
                build = replace(build, dynamic=Known(True, f'{log.source}: "Dynamic Preempt:" lines'))
            elif isinstance(token, Known) and token.value == "PREEMPT_DYNAMIC":
                build = replace(build, dynamic=Known(True, token.source))
            elif isinstance(token, Known) and self._token_is_static(token.value):
                build = replace(build, dynamic=Known(False, token.source, "inferred"))
        if isinstance(build.selectable, Unknown) and isinstance(build.dynamic, Known):
            build = replace(build, selectable=self._selectable_without_list(build))
        return build

    def _token_is_static(self, token: VersionToken | None) -> bool:
        """Say whether the version token excludes a dynamic kernel: those print PREEMPT from 5.12 to 5.17."""
        if token == "PREEMPT":
            return self.version is not None and not (5, 12) <= self.version < (5, 18)
        return token is None

    def _selectable_without_list(self, build: Build) -> Fact[tuple[str, ...]]:
        assert isinstance(build.dynamic, Known) and isinstance(build.selectable, Unknown)
        if not build.dynamic.value:
            return Known((), build.dynamic.source, build.dynamic.certainty)
        for log in self.logs:
            if log.dynamic and {"none", "voluntary"} & set(log.refused):
                return Known(("full", "lazy"), f"{log.source}: the kernel refused {', '.join(log.refused)}", "inferred")
        takes = [(mode, self._takes_by_version(mode)) for mode in _MODES]
        if self.version is None or any(answer is None for _, answer in takes):
            return build.selectable
        source = f"Linux {self.version[0]}.{self.version[1]} on {self.architecture}"
        return Known(tuple(mode for mode, answer in takes if answer), source, "inferred")

    def _takes_by_version(self, value: str) -> bool | None:
        """Say whether a dynamic mainline kernel of this version takes a value; None: not known."""
        version, architecture = self.version, self.architecture
        if value not in _MODES:
            return False
        if value == "full":
            return True
        if version is None or self.rt is not None:
            return None
        lazy: bool | None = None
        if version < LAZY_FROM:
            lazy = False
        elif architecture == "x86" or (architecture in LAZY_ARCHITECTURES and version >= (6, 18)):
            lazy = True
        if value == "lazy":
            return lazy
        return True if version < RESTRICTED_FROM else (not lazy if lazy is not None else None)

    def _takes(self, value: str) -> bool | None:
        """Say whether this kernel takes `preempt=VALUE`; None: not known."""
        dynamic, selectable = self.build.dynamic, self.build.selectable
        if any(value in log.refused for log in self.logs):
            return False
        if isinstance(selectable, Known):
            return value in selectable.value
        if isinstance(dynamic, Unknown):
            return None if value in _MODES else False
        return self._takes_by_version(value)

    # answers

    def preemption(self) -> Preemption:
        emulator = self._emulator()
        if emulator:
            gap = Unknown(
                f"this is {emulator}'s emulated kernel: what preempts is the kernel of the host around it",
                "run pgpreemptcheck on that host",
                kind="unsupported",
            )
            return Preemption(gap, None, gap, gap)
        mode, certainty = self._mode()
        preemptible: Fact[bool]
        if isinstance(mode, Known):
            preemptible = Known(mode.value in ("full", "lazy", "rt"), mode.source, mode.certainty)
        else:
            preemptible = self._preemptible_by_token(mode)
        scheduler = sched_ext(self.host, self.identity)
        if isinstance(scheduler, Known) and scheduler.value:
            preemptible = Unknown(
                f"a sched_ext (BPF) scheduler is active ({scheduler.source}): it decides who is preempted when",
                "check again with the scheduler stopped",
            )
        return Preemption(mode, certainty, preemptible, self._ignored())

    def _mode(self) -> tuple[Fact[Mode], ModeCertainty | None]:
        if self.rt is not None:
            return self.rt, "effective"
        if self.marked is not None:
            return Known(self.marked, f"{DEBUGFS} (debugfs)"), "effective"
        if self._is_static():
            assert isinstance(self.build.model, Known)
            return replace(self.build.model, source=f"{self.build.model.source} (not dynamic)"), "effective"
        for log in self.logs:
            if log.mode is not None:
                return log.mode, "effective"
        return self._mode_at_boot()

    def _mode_at_boot(self) -> tuple[Fact[Mode], ModeCertainty | None]:
        """The last valid `preempt=`, else what the kernel was built with: a change at run time is not seen here."""
        start = self._built_with()
        if isinstance(self.build.dynamic, Known) and not self.build.dynamic.value:
            if isinstance(start, Known):
                return start, "effective"
            return start, None
        line = self.command_line.text
        if isinstance(line, Unknown):
            return start, "build" if isinstance(start, Known) else None
        given = kernel_command_line.values(kernel_command_line.split(line.value), "preempt")
        for value in reversed(given):
            takes = self._takes(value)
            if takes is None or (takes and not self._is_dynamic()):
                return self._unknown_mode(f"whether this kernel takes preempt={value} is not known"), None
            if takes:
                mode = next(m for m in _MODES if m == value)
                return Known(mode, f"{line.source} preempt={value}", "inferred"), "boot"
        if isinstance(start, Unknown):
            return start, None
        return replace(start, source=f"{start.source}, no valid preempt= in {line.source}"), "boot"

    def _is_dynamic(self) -> bool:
        return isinstance(self.build.dynamic, Known) and self.build.dynamic.value

    def _built_with(self) -> Fact[Mode]:
        if isinstance(self.build.model, Known):
            return replace(self.build.model, certainty="inferred")
        token = self.identity.token
        if isinstance(token, Known) and token.value == "PREEMPT" and self.version is not None:
            if self.version < (5, 12) or (5, 18) <= self.version < LAZY_FROM:
                return Known("full", f"{token.source} (a build that is not dynamic)")
            if self.version < (5, 16):  # dynamic kernels of these versions are built full
                return Known("full", token.source, "inferred")
            if self.version >= LAZY_FROM:
                return self._unknown_mode("uname says PREEMPT, which a full and a lazy build both print")
        if isinstance(token, Known) and token.value is None:
            return self._unknown_mode("uname names no preemption model, so the build is none or voluntary")
        return self._unknown_mode("")

    def _preemptible_by_token(self, mode: Unknown) -> Fact[bool]:
        """Where the mode is open between two, both may answer the question that matters."""
        token = self.identity.token
        if isinstance(token, Unknown) or self.version is None:
            return mode
        if token.value == "PREEMPT" and self.version >= LAZY_FROM:
            return Known(True, f"{token.source} (full or lazy, not dynamic)")
        if token.value is None:
            if self.version >= RESTRICTED_FROM and (
                self.architecture is None or self.architecture in LAZY_ARCHITECTURES
            ):
                return mode  # no such build is possible there: something else is odd
            return Known(False, f"{token.source} (none or voluntary, not dynamic)", "inferred")
        return mode

    def _unknown_mode(self, first: str) -> Unknown:
        """Say what was asked for the model in force, and the cheapest way to learn it."""
        gaps = [gap for gap in (self.debugfs, self.build.model, *self.log_gaps) if isinstance(gap, Unknown)]
        tried = [gap.reason for gap in gaps]
        if isinstance(self.debugfs, Known):
            tried.insert(0, f"{DEBUGFS} marks no mode")
        if self.logs:
            tried.append(f"no mode line in {', '.join(log.source for log in self.logs)}")
        reason = "; ".join(dict.fromkeys([first, *tried] if first else tried))
        kinds = [gap.kind for gap in gaps]
        if "permission" in kinds:
            return Unknown(reason, "run as root", kind="permission")
        if not self.host.live:
            hint = f"add dmesg.txt, {DEBUGFS.lstrip('/')} or the kernel's build configuration to the capture"
        elif "lockdown" in kinds:
            hint = "journalctl -k -b | grep 'Dynamic Preempt'"
        else:
            hint = f"on the host, as root: mount -t debugfs none /sys/kernel/debug; cat {DEBUGFS}"
        return Unknown(reason, hint, kind="lockdown" if "lockdown" in kinds else "absent")

    def _ignored(self) -> Fact[str | None]:
        preempt = self.command_line.preempt
        if isinstance(preempt, Unknown):
            return preempt
        if preempt.value is None:
            return Known(None, f"no preempt= in {preempt.source}")
        takes = self._takes(preempt.value)
        refusing = next((log for log in self.logs if preempt.value in log.refused), None)
        if takes is None:
            return Unknown(
                f"whether this kernel takes preempt={preempt.value} is not known",
                "read the kernel log of this boot, or the build configuration",
            )
        if refusing is not None:
            return Known(preempt.value, f"{preempt.source}, refused in {refusing.source}")
        if isinstance(self.build.selectable, Known):
            by = self.build.selectable
            certainty = by.certainty
            source = f"{preempt.source} preempt={preempt.value}, against {by.source}"
        else:
            certainty, source = "inferred", f"{preempt.source} preempt={preempt.value}"
        return Known(None if takes else preempt.value, source, certainty)


def _debugfs_words(text: Fact[str]) -> tuple[tuple[str, ...], Mode | None]:
    """Return the modes that sched/preempt lists, and the one in parentheses (none marked: None)."""
    if isinstance(text, Unknown):
        return (), None
    words = text.value.lstrip("> ").split()
    marked = [word[1:-1] for word in words if word.startswith("(") and word.endswith(")")]
    listed = tuple(word.strip("()") for word in words)
    if not all(word in _MODES for word in listed):
        return (), None
    mode = next((m for m in _MODES if marked == [m]), None)
    return listed, mode
