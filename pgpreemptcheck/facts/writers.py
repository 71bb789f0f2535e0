"""What else sets huge pages after a boot, beside the kernel's command line and sysctl.d.

tmpfiles.d and systemd units ordered before PostgreSQL do it in time. All others are late: tuned, cloud-init's bootcmd,
rc.local, cron, udev rules, libvirt hooks and units that nothing orders before PostgreSQL may write before or after it
has started. Sources: tmpfiles.d(5), src/tmpfiles/tmpfiles.c, systemd.unit(5) and systemd.service(5) of systemd 252;
tuned 2.24 (profiles/locator.py, reapply_sysctl in tuned-main.conf); cloud-init 24 (cc_bootcmd runs at every boot,
cc_runcmd once in the life of an instance, so not at the next boot).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Literal

from pgpreemptcheck.facts import sysctls
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Known, Unknown, record

Stage = Literal["early", "ordered", "late"]
"""early: before sysinit.target, like sysctl.d and in no order with it. ordered: after that and before PostgreSQL."""

ANY_SIZE = 0

_MENTION = re.compile(
    r"nr_(?:overcommit_)?hugepages|hugeadm|\bKVM_HUGEPAGES\s*=\s*1|\bsysctl\b.*\s(?:-p|-f|--load|--system)"
)
_LIMIT = 1 << 18
_MAX_FILES = 500
_MAX_UNITS = 2000


@record
class Write:
    """One place that sets a count of huge pages.

    `page_bytes` is None for the default size and 0 (ANY_SIZE) where it cannot be told; `node` None for all nodes;
    `value` None where what is written is not worked out, for which `why` is the reason.
    """

    count: Literal["pages", "overcommit"]
    page_bytes: int | None
    node: int | None
    value: int | None
    stage: Stage
    source: str
    why: str


@record
class Writers:
    """All writers found, and the places that could not be looked at (with the reason)."""

    writes: tuple[Write, ...]
    not_read: tuple[str, ...]


def read(host: Host) -> Writers:
    """Return everything beside the kernel and sysctl.d that sets huge pages on the way up."""
    look = _Look(host)
    writes = [*_tmpfiles(host), *_units(look), *_tuned(look), *_others(look)]
    return Writers(tuple(writes), tuple(look.gaps))


class _Look:
    """Reads for the search: what is absent is no news, what is refused is noted."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.gaps: dict[str, None] = {}
        self.enabled: set[str] | None = None  # the units that are started at boot, None where that is not known

    def text(self, path: str) -> str:
        """Return a file's text, empty where there is none to be had."""
        text = self.host.read(path, _LIMIT)
        if isinstance(text, Known):
            return text.value
        if text.kind == "permission":
            self.gaps[text.reason] = None
        return ""

    def names(self, path: str) -> tuple[str, ...]:
        names = self.host.list(path)
        if isinstance(names, Known):
            return names.value[:_MAX_FILES]
        if names.kind == "permission":
            self.gaps[names.reason] = None
        return ()


def _may_mention(text: str) -> bool:
    """Say quickly whether a text could be about huge pages."""
    return "hugepages" in text or "sysctl" in text or "hugeadm" in text or "HUGEPAGES" in text


# what a line writes -----------------------------------------------------------------------------

_POOL_FILE = re.compile(
    r"/sys/kernel/mm/hugepages/hugepages-(?P<kb>\d{1,12})kB/(?P<name>nr_\w+)"
    r"|/sys/devices/system/node/node(?P<node>\d{1,5})/hugepages/hugepages-(?P<node_kb>\d{1,12})kB/nr_hugepages"
    r"|(?:/proc/sys/)?vm[/.](?P<sysctl>nr_\w+)"
)
_COUNTS = {"nr_hugepages": "pages", "nr_hugepages_mempolicy": "pages", "nr_overcommit_hugepages": "overcommit"}


def _target(path: str) -> tuple[Literal["pages", "overcommit"], int | None, int | None] | None:
    """Return count, page size and node that a file of the kernel (or a sysctl name) stands for."""
    match = _POOL_FILE.fullmatch(path)
    if match is None:
        return None
    if match["node_kb"]:
        return "pages", int(match["node_kb"]) << 10, int(match["node"])
    name = match["name"] or match["sysctl"]
    if name not in _COUNTS:
        return None
    count: Literal["pages", "overcommit"] = "overcommit" if _COUNTS[name] == "overcommit" else "pages"
    return count, int(match["kb"]) << 10 if match["kb"] else None, None


def _mentions(look: _Look, line: str, source: str, stage: Stage, why: str) -> Iterator[Write]:
    """Yield what a line of a script or a configuration may write: where is told as far as it can be, how much not."""
    if re.search(r"\bsysctl\b.*\s(?:-p|-f|--load|--system)", line):
        yield from _reloaded(look, line, source, stage)
    files = [target for match in _POOL_FILE.finditer(line) if (target := _target(match[0]))]
    for count, page_bytes, node in dict.fromkeys(files):
        yield Write(count, page_bytes, node, None, stage, source, why)
    if not files and re.search(r"nr_(?:overcommit_)?hugepages|hugeadm|KVM_HUGEPAGES", line):
        if "nr_overcommit" not in line:
            yield Write("pages", ANY_SIZE, None, None, stage, source, why)
        if "nr_hugepages" not in line and "KVM" not in line:
            yield Write("overcommit", ANY_SIZE, None, None, stage, source, why)


def _reloaded(look: _Look, line: str, source: str, stage: Stage) -> Iterator[Write]:
    """Yield what `sysctl -p FILE` or `sysctl --system` sets again: the former reads /etc/sysctl.conf if not told."""
    lasting = sysctls.read(look.host, with_run=False)
    if "--system" in line:
        paths = [sysctls.PROCPS_FILE]  # read last; what it reads before is what systemd-sysctl has set already
    else:
        paths = re.findall(r"(?<=\s)/[\w./-]+", line.partition("sysctl")[2])[:8] or [sysctls.PROCPS_FILE]
    for option in (option for path in paths for option in sysctls.parse(look.text(path), path)):
        target = _target(option.key)
        number = sysctls.kernel_number(option.value or "")
        before = lasting.value(option.key)
        same = isinstance(before, Known) and before.value == option.value
        if target and number is not None and not same:
            why = "it may do so after PostgreSQL has started" if stage == "late" else ""
            yield Write(*target, number, stage, f"{source}, which reads {option.source}", why)


def _script(look: _Look, path: str, stage: Stage, why: str, *, comment: str = "#") -> Iterator[Write]:
    """Yield what the lines of a file may write."""
    text = look.text(path)
    if not _may_mention(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare and bare[0] not in comment and _MENTION.search(bare):
            yield from _mentions(look, bare, f"{path} line {number}", stage, why)


# tmpfiles.d -------------------------------------------------------------------------------------


def _tmpfiles(host: Host) -> Iterator[Write]:
    """Yield what the `w` and `f+` lines write; of several lines for one path, systemd-tmpfiles takes the first."""
    seen: set[str] = set()
    for path, text in sysctls.files(host, "tmpfiles.d", with_run=False):
        if isinstance(text, Unknown) or "hugepages" not in text.value:
            continue  # a file of others that cannot be read is no sign of huge pages
        for number, line in enumerate(text.value.splitlines(), 1):
            bare = line.strip()
            if not bare or bare[0] == "#":
                continue
            fields = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', bare)[:6]
            if len(fields) < 2 or "hugepages" not in fields[1]:
                continue
            kind, target = fields[0].strip('"'), fields[1].strip('"')
            if not (kind.startswith("w") or kind.startswith(("f+", "F"))):
                continue
            yield from _tmpfile(f"{path} line {number}", kind, os.path.normpath(target), bare, fields, seen)


def _tmpfile(source: str, kind: str, target: str, line: str, fields: list[str], seen: set[str]) -> Iterator[Write]:
    where = _target(target)
    if where is None:
        if any(sign in target for sign in "*?[%"):
            yield Write("pages", ANY_SIZE, None, None, "early", source, f"which files {target} means is not worked out")
        return
    if target in seen and "+" not in kind:
        return
    seen.add(target)
    argument = line
    for field in fields[:6]:
        argument = argument.partition(field)[2].lstrip()
    if any(sign in argument for sign in '\\%"') or any(flag in kind for flag in "~^"):
        number, why = None, f"the argument {argument!r} is not worked out"
    else:
        number, why = kernel_count(argument, target), ""
        if number is None:
            return  # the kernel refuses it
    yield Write(*where, number, "early", source, why)


def kernel_count(value: str, path: str) -> int | None:
    """Return what the kernel makes of a value: sysfs takes decimal numbers only (kstrtoul), /proc/sys others too."""
    if path.startswith("/proc/"):
        return sysctls.kernel_number(value)
    return int(value) if re.fullmatch(r"\+?\d{1,19}", value, re.ASCII) else None


# systemd units ----------------------------------------------------------------------------------

_UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_NOT_AT_BOOT = re.compile(
    r"(?:reboot|halt|poweroff|kexec|shutdown|final|umount|sleep|suspend\S*|hybrid-sleep|hibernate|rescue|emergency"
    r"|initrd\S*|system-update\S*|factory-reset|soft-reboot)\.target"
)
_BEFORE_ALL = {
    "sysinit.target",
    "basic.target",
    "local-fs.target",
    "local-fs-pre.target",
    "dev-hugepages.mount",
    "systemd-sysctl.service",
    "systemd-tmpfiles-setup.service",
    "systemd-modules-load.service",
}
_COMMANDS = ("ExecStart", "ExecStartPre", "ExecStartPost", "ExecCondition")
_PULLS_IN = re.compile(r"^\s*(?:Wants|Requires|BindsTo|Upholds|Unit)\s*=(.*)", re.MULTILINE)
_PROGRAM = re.compile(r"(?<=[\s'\"=@:+!-])/[\w@%+,./-]+")
_SERVER_COMMAND = re.compile(
    r"/(?:postgres|postmaster|pg_ctl|pg_ctlcluster|patroni|edb-postgres|pg_autoctl|postgresql-script)(?:\s|$)"
)


class _Units:
    """The units of a host by systemd's rules: folders in precedence, templates, drop-ins, what pulls what in."""

    def __init__(self, look: _Look) -> None:
        self.look = look
        self.place: dict[str, str] = {}
        self.drop_ins: dict[str, list[str]] = {}
        self.wanted: dict[str, list[str]] = {}  # who wants it, by link
        for folder in _UNIT_FOLDERS:
            names = look.host.list(folder)
            for name in names.value if isinstance(names, Known) else ():
                unit, dot, kind = name.rpartition(".")
                if dot and kind in ("wants", "requires"):
                    if not _NOT_AT_BOOT.fullmatch(unit):
                        for wanted in look.names(f"{folder}/{name}"):
                            self.wanted.setdefault(wanted, []).append(unit)
                elif kind == "d":
                    self.drop_ins.setdefault(unit, []).append(f"{folder}/{name}")
                else:
                    self.place.setdefault(name, f"{folder}/{name}")

    def files(self, name: str) -> list[str]:
        """Return a unit's file and its drop-ins, empty for one that is masked or not there."""
        template = re.sub(r"@[^@]*(?=\.\w+$)", "@", name)
        path = self.place.get(name) or self.place.get(template)
        if path is None or self.look.host.link(path) == Known("/dev/null", path):
            return []
        found: dict[str, str] = {}
        for unit in dict.fromkeys((name, template)):
            for folder in self.drop_ins.get(unit, ()):
                for drop_in in self.look.names(folder):
                    if drop_in.endswith(".conf"):
                        found.setdefault(drop_in, f"{folder}/{drop_in}")
        return [path, *(found[drop_in] for drop_in in sorted(found))]


@record
class _Unit:
    """The settings of a unit that matter here: (key, value, source), a value cleared by an empty one."""

    name: str
    settings: tuple[tuple[str, str, str], ...]

    def words(self, *keys: str) -> set[str]:
        """Return all words that these settings have."""
        return {word for key, value, _ in self.settings if key in keys for word in value.split()}

    def last(self, key: str) -> str:
        """Return the last value of a setting."""
        return ([value for name, value, _ in self.settings if name == key] or [""])[-1]


def _parse_unit(name: str, files: Iterable[tuple[str, str]]) -> _Unit:
    settings: list[tuple[str, str, str]] = []
    for path, text in files:
        held, start = "", 0
        for number, line in enumerate(text.splitlines(), 1):
            bare = line.strip()
            if not bare or bare[0] in "#;":
                continue
            start = start if held else number
            if bare.endswith("\\"):
                held += bare[:-1] + " "
                continue
            key, equals, value = (held + bare).partition("=")
            held = ""
            key, value = key.strip(), value.strip()
            if equals and not value:
                settings = [setting for setting in settings if setting[0] != key]
            elif equals:
                settings.append((key, value, f"{path} line {start}"))
    return _Unit(name, tuple(settings))


def _units(look: _Look) -> Iterator[Write]:
    units = _Units(look)
    if not units.place:
        return
    texts: dict[str, list[tuple[str, str]]] = {}
    pending = [*units.wanted, *_debian_clusters(look, units)]
    while pending and len(texts) < _MAX_UNITS:
        name = pending.pop()
        if name in texts:
            continue
        texts[name] = [(path, look.text(path)) for path in units.files(name)]
        stem, _, kind = name.rpartition(".")
        if kind in ("timer", "path", "socket"):
            pending.append(f"{stem}.service")
        for _, text in texts[name]:
            pending.extend(word for words in _PULLS_IN.findall(text) for word in words.split())
    look.enabled = {name for name, files in texts.items() if any(text for _, text in files)}
    servers = [
        _parse_unit(name, files)
        for name, files in texts.items()
        if any("ExecStart" in text and _SERVER_COMMAND.search(text) for _, text in files)
    ]
    order = _servers(servers)
    scripts: dict[str, bool] = {}
    for name, files in texts.items():
        if any(_may_mention(text) or _runs_script(look, text, scripts) for _, text in files):
            unit = _parse_unit(name, files)
            for key, command, source in unit.settings:
                if key in _COMMANDS:
                    yield from _command(look, unit, key, command, source, order, scripts)


def _runs_script(look: _Look, text: str, scripts: dict[str, bool]) -> bool:
    """Say whether a unit names a program that is a script and may set huge pages."""
    if "Exec" not in text:
        return False
    for path in _PROGRAM.findall(text):
        if path not in scripts:
            head = look.host.read_range(path, 0, 2)
            scripts[path] = isinstance(head, Known) and head.value == b"#!" and _may_mention(look.text(path))
        if scripts[path]:
            return True
    return False


def _debian_clusters(look: _Look, units: _Units) -> Iterator[str]:
    """Yield the units of Debian's clusters: a generator makes the links that want them, anew at each boot."""
    if "postgresql@.service" in units.place and "postgresql.service" in units.wanted:
        for version in look.names("/etc/postgresql"):
            for cluster in look.names(f"/etc/postgresql/{version}"):
                yield f"postgresql@{version}-{cluster}.service"


def _servers(units: Iterable[_Unit]) -> dict[str, set[str]]:
    """Return the units that start PostgreSQL, each with what it is ordered after.

    Debian's postgresql.service is none of them: it starts nothing, and what is before it may be after the clusters.
    """
    return {
        unit.name: unit.words("After")
        for unit in units
        if any(key == "ExecStart" and _SERVER_COMMAND.search(value) for key, value, _ in unit.settings)
    }


def _command(
    look: _Look,
    unit: _Unit,
    key: str,
    command: str,
    source: str,
    servers: dict[str, set[str]],
    scripts: dict[str, bool],
) -> Iterator[Write]:
    """Yield what one command of a unit writes, itself or in the script that it runs."""
    stage, why = _order(unit, key, servers)
    unsure = f"{unit.name} runs under a condition that is not worked out" if _conditional(unit, key) else ""
    if not _MENTION.search(command):
        for path in _PROGRAM.findall(f" {command}"):
            if scripts.get(path):
                yield from _script(look, path, stage, unsure or why or f"{unit.name} runs this script")
    elif _reloads(command) and not unsure:
        yield from _reloaded(look, command, source, stage)
    else:
        plain = [] if unsure else list(_plain(command))
        for target, value in plain:
            where, number = _target(target), kernel_count(value, "/proc/" if target.startswith("vm") else target)
            if where and number is not None:
                yield Write(*where, number, stage, source, why)
        if not plain:
            yield from _mentions(look, command, source, stage, unsure or why or "what it writes is not worked out")


def _reloads(command: str) -> bool:
    return (
        re.fullmatch(r"[-@:+!]*(?:/usr)?/s?bin/sysctl(?:\s+(?:-[qep]+|--system|--load|/[\w./-]+))+", command)
        is not None
    )


def _plain(command: str) -> Iterator[tuple[str, str]]:
    """Yield file (or sysctl name) and value of a command simple enough to know what it does."""
    echo = re.fullmatch(
        r"[-@:+!]*(?:/usr)?/bin/(?:ba|da)?sh\s+-c\s+(['\"])\s*echo\s+(\+?\d{1,19})\s*>{1,2}\s*(/(?:sys|proc)/[\w./-]+)\s*;?\s*\1",
        command,
    )
    if echo:
        yield echo[3], echo[2]
        return
    setting = re.fullmatch(r"[-@:+!]*(?:/usr)?/s?bin/sysctl((?:\s+(?:-[qwe]+|[\w./-]+=[\w]+))+)", command)
    for word in setting[1].split() if setting else ():
        name, equals, value = word.partition("=")
        if equals and not name.startswith("-"):
            yield sysctls.normalize(name), value


def _conditional(unit: _Unit, key: str) -> bool:
    return key == "ExecCondition" or any(name.startswith(("Condition", "Assert")) for name, _, _ in unit.settings)


def _order(unit: _Unit, key: str, servers: dict[str, set[str]]) -> tuple[Stage, str]:
    """Return when a unit's command is done, and why that may be too late for PostgreSQL."""
    if unit.name in servers:
        if key == "ExecStartPre" and len(servers) == 1:
            return "ordered", ""
        return "late", f"{unit.name} sets it for itself only, as it starts"
    waits = key == "ExecStartPre" or unit.last("Type") == "oneshot"
    if not waits:
        return "late", f"{unit.name} is not Type=oneshot, so nothing waits until it has set it"
    before, after = unit.words("Before"), unit.words("After")
    default = unit.last("DefaultDependencies").lower() not in ("no", "false", "off", "0", "n", "f")
    first = bool(servers) and all(name in before or unit.name in behind for name, behind in servers.items())
    if not default and (before & _BEFORE_ALL or first):
        settled = {"systemd-sysctl.service", "systemd-tmpfiles-setup.service"} <= after or "sysinit.target" in after
        return ("ordered" if settled else "early"), ""
    if first:
        return "ordered", ""
    if before & _BEFORE_ALL:
        return "late", f"{unit.name} is ordered before and after {sorted(before & _BEFORE_ALL)[0]}: a cycle"
    return "late", f"nothing orders {unit.name} before PostgreSQL"


# tuned ------------------------------------------------------------------------------------------

_PROFILES = ("/etc/tuned/profiles", "/etc/tuned", "/usr/lib/tuned/profiles", "/usr/lib/tuned")


def _tuned(look: _Look) -> Iterator[Write]:
    """Yield what the active profile and those that it includes set; where tuned is not started, nothing."""
    active = look.text("/etc/tuned/active_profile").split()
    if not active or (look.enabled is not None and "tuned.service" not in look.enabled):
        return
    seen: set[str] = set()
    pending = list(active)
    while pending and len(seen) < 32:
        name = pending.pop()
        if name in seen or not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
            continue
        seen.add(name)
        for folder in _PROFILES:
            names = look.names(f"{folder}/{name}")
            if "tuned.conf" in names:
                yield from _profile(look, f"{folder}/{name}", names, pending)
                break
    main = look.text("/etc/tuned/tuned-main.conf")
    if not re.search(r"^\s*reapply_sysctl\s*=\s*(?:0|false|no|off)\b", main, re.MULTILINE | re.IGNORECASE):
        yield from _reloaded(look, "sysctl --system", "tuned (reapply_sysctl)", "late")


def _profile(look: _Look, folder: str, names: tuple[str, ...], pending: list[str]) -> Iterator[Write]:
    path, section = f"{folder}/tuned.conf", ""
    for number, line in enumerate(look.text(path).splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            section = bare.strip("[]")
        elif bare and bare[0] not in "#;":
            key, _, value = (part.strip() for part in bare.partition("="))
            if section == "main" and key == "include":
                pending.extend(word.lstrip("-") for word in re.split(r"[\s,;]+", value))
            where = _target(sysctls.normalize(key) if section == "sysctl" else key)
            if where:
                count = kernel_count(value, "/proc/" if section == "sysctl" else key)
                yield Write(*where, count, "late", f"{path} line {number}", "tuned may set it after PostgreSQL started")
            elif section != "bootloader" and _MENTION.search(bare):
                yield from _mentions(look, bare, f"{path} line {number}", "late", "tuned may set it late")
    for name in names:
        if name.endswith((".sh", ".py")):
            yield from _script(look, f"{folder}/{name}", "late", "a script of tuned's profile may set it late")


# all else ---------------------------------------------------------------------------------------

_FILES = (
    ("/etc/crontab", "cron runs it at its own time"),
    ("/var/spool/cron/crontabs/root", "cron runs it at its own time"),
    ("/var/spool/cron/root", "cron runs it at its own time"),
    ("/etc/default/qemu-kvm", "qemu-kvm's start sets it at its own time"),
)
_RUN_AT_BOOT = ("/etc/rc.local", "/etc/rc.d/rc.local", "/etc/init.d/boot.local", "/etc/init.d/after.local")
_SCRIPT_FOLDERS = (
    ("/etc/cron.d", "cron runs it at its own time"),
    ("/var/lib/cloud/scripts/per-boot", "cloud-init runs it late in the boot"),
    ("/etc/libvirt/hooks", "libvirt runs it as guests start"),
    ("/etc/libvirt/hooks/qemu.d", "libvirt runs it as guests start"),
    ("/etc/libvirt/hooks/daemon.d", "libvirt runs it as guests start"),
    ("/etc/udev/rules.d", "udev acts on it when a device appears"),
    ("/etc/rc.d/init.d", "an init script is not ordered before PostgreSQL"),
)
_CLOUD = ("/etc/cloud/cloud.cfg", "/var/lib/cloud/instance/cloud-config.txt", "/var/lib/cloud/instance/user-data.txt")


def _others(look: _Look) -> Iterator[Write]:
    for path in _RUN_AT_BOOT:
        status = look.host.status(path)
        if isinstance(status, Known) and not status.value.is_directory and status.value.mode & 0o111:
            yield from _script(look, path, "late", f"{path} runs at the end of the boot")
    for path, why in _FILES:
        yield from _cron(look, path, why) if "cron" in path else _script(look, path, "late", why)
    for folder, why in _SCRIPT_FOLDERS:
        for name in look.names(folder):
            path = f"{folder}/{name}"
            yield from _cron(look, path, why) if folder == "/etc/cron.d" else _script(look, path, "late", why)
    for path in (*_CLOUD, *(f"/etc/cloud/cloud.cfg.d/{name}" for name in look.names("/etc/cloud/cloud.cfg.d"))):
        yield from _cloud_config(look, path)


def _cron(look: _Look, path: str, why: str) -> Iterator[Write]:
    yield from _script(look, path, "late", why)
    for line in look.text(path).splitlines():
        if line.strip().startswith("@reboot") and not _MENTION.search(line):
            for script in re.findall(r"(?<=\s)/[\w./-]+", line)[:4]:
                head = look.host.read_range(script, 0, 2)
                if isinstance(head, Known) and head.value == b"#!":
                    yield from _script(look, script, "late", f"cron runs it at boot ({path})")


def _cloud_config(look: _Look, path: str) -> Iterator[Write]:
    """Yield what bootcmd mentions: it runs at every boot. runcmd and write_files run once, and not again."""
    text = look.text(path)
    if not _may_mention(text):
        return
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        top = re.match(r"([\w-]+)\s*:", line)
        section = top[1] if top else section
        if section == "bootcmd" and not line.lstrip().startswith("#") and _MENTION.search(line):
            yield from _mentions(look, line, f"{path} line {number}", "late", "cloud-init runs it at its own time")
