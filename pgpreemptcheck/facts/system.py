"""The host itself: name, distribution, architecture, virtual machine or container."""

from __future__ import annotations

import re

from pgpreemptcheck.facts import cpus as cpu_facts
from pgpreemptcheck.facts import hugepages as huge_page_facts
from pgpreemptcheck.facts import kernel as kernel_facts
from pgpreemptcheck.facts.cpus import Cpus
from pgpreemptcheck.facts.hugepages import HugePages, Memory
from pgpreemptcheck.facts.kernel import Kernel
from pgpreemptcheck.facts.kernel_identity import Identity, identify
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, measured, record


@record
class OperatingSystem:
    id: Fact[str] = measured(doc="ID of os-release")
    version: Fact[str] = measured(doc="VERSION_ID of os-release")


@record
class System:
    """Everything measured of the host: the `host` object of the report."""

    hostname: Fact[str] = measured()
    os: OperatingSystem = measured()
    arch: Fact[str] = measured(doc="uname -m")
    virtualization: Fact[str | None] = measured(doc="the hypervisor (kvm, xen, wsl, ...), null on bare metal")
    container: Fact[str | None] = measured(doc="the container runtime that this tool runs in, null if none")
    cpus: Cpus = measured()
    memory: Memory = measured()
    kernel: Kernel = measured()
    huge_pages: HugePages = measured()


def read(host: Host) -> System:
    """Return everything that is measured of a host, clusters aside."""
    identity = identify(host)
    kernel = kernel_facts.read(host, identity)
    return System(
        hostname=_hostname(host, identity),
        os=_operating_system(host),
        arch=identity.arch,
        virtualization=_virtualization(host, identity),
        container=_container(host),
        cpus=cpu_facts.read(host, kernel, identity),
        memory=huge_page_facts.read_memory(host, kernel, identity.arch),
        kernel=kernel,
        huge_pages=huge_page_facts.read(host, kernel),
    )


def _word(host: Host, path: str) -> Fact[str]:
    """Return a one-line file without its line end; an empty one is a gap."""
    text = host.read(path, limit=1 << 16)
    if isinstance(text, Unknown):
        return text
    word = text.value.strip("\0 \t\r\n")
    return Known(word, path) if word else Unknown(f"{path} is empty", kind="absent")


def _hostname(host: Host, identity: Identity) -> Fact[str]:
    for fact in (_word(host, "/proc/sys/kernel/hostname"), identity.nodename, _word(host, "/etc/hostname")):
        if isinstance(fact, Known):
            return fact
    return Unknown("the host's name is not known: no /etc/hostname, no line of uname", kind="absent")


def _operating_system(host: Host) -> OperatingSystem:
    text = host.read("/etc/os-release", limit=1 << 16)
    if isinstance(text, Unknown):
        text = host.read("/usr/lib/os-release", limit=1 << 16)
    if isinstance(text, Unknown):
        return OperatingSystem(text, text)
    values: dict[str, str] = {}
    for line in text.value.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            values[name] = value.strip().strip("\"'")

    def fact(name: str) -> Fact[str]:
        value = values.get(name)
        return (
            Known(value, f"{text.source} {name}") if value else Unknown(f"{text.source} has no {name}", kind="absent")
        )

    return OperatingSystem(fact("ID"), fact("VERSION_ID"))


# virtual machine --------------------------------------------------------------------------------

_DMI = "/sys/class/dmi/id"

# What firmware of virtual machines says of itself (sys_vendor, product_name), first match counts.
_VENDORS: tuple[tuple[str, str], ...] = (
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("innotek", "virtualbox"),
    ("xen", "xen"),
    ("parallels", "parallels"),
    ("bhyve", "bhyve"),
    ("bochs", "bochs"),
    ("apple virtualization", "apple"),
    ("microsoft corporation virtual machine", "hyperv"),
    ("amazon ec2", "kvm"),
    ("google compute engine", "kvm"),
    ("openstack", "kvm"),
    ("digitalocean", "kvm"),
    ("alibaba cloud", "kvm"),
    ("nutanix ahv", "kvm"),
    ("ovirt", "kvm"),
    ("rhev", "kvm"),
    ("hetzner vserver", "kvm"),
    ("qemu", "qemu"),
    ("kvm", "kvm"),
)


def _virtualization(host: Host, identity: Identity) -> Fact[str | None]:
    """Return the hypervisor below, None only where the CPU or the vendor shows that there is none."""
    release = identity.release
    if isinstance(release, Known) and "microsoft" in release.value.lower():
        return Known("wsl", f"the release {release.value}")
    hypervisor = _word(host, "/sys/hypervisor/type")
    if isinstance(hypervisor, Known):
        return Known(hypervisor.value.lower(), hypervisor.source)
    tree = _device_tree(host)
    if tree is not None:
        return tree
    vendor, product = _word(host, f"{_DMI}/sys_vendor"), _word(host, f"{_DMI}/product_name")
    firmware = " ".join(fact.value for fact in (vendor, product) if isinstance(fact, Known)).lower()
    source = f"{_DMI}/sys_vendor, product_name"
    if "amazon ec2" in firmware and ".metal" in firmware:
        return Known(None, source)
    for word, name in _VENDORS:
        if word in firmware:
            return Known(name, source)
    info = host.read_range("/proc/cpuinfo", 0, 16384)  # the first CPU is enough: the file is long on large hosts
    text = info.value.decode("ascii", "replace") if isinstance(info, Known) else ""
    start = text.find("\nflags")
    if start < 0:
        return Unknown(
            "whether this is a virtual machine is not known: its firmware and CPU do not say",
            "run systemd-detect-virt",
            kind="absent",
        )
    if "hypervisor" not in text[start + 1 :].partition("\n")[0].partition(":")[2].split():
        return Known(None, "/proc/cpuinfo: no flag hypervisor", "inferred")
    clock = _word(host, "/sys/devices/system/clocksource/clocksource0/available_clocksource")
    if isinstance(clock, Known):
        for word, name in (("kvm-clock", "kvm"), ("hyperv_clocksource", "hyperv"), ("xen", "xen")):
            if word in clock.value:
                return Known(name, clock.source)
    return Known("unnamed hypervisor", "/proc/cpuinfo flag hypervisor")


def _device_tree(host: Host) -> Known[str | None] | None:
    """Return the hypervisor that the device tree names (arm64, riscv, ppc64 without ACPI)."""
    for path in ("/proc/device-tree/hypervisor/compatible", "/sys/firmware/devicetree/base/hypervisor/compatible"):
        data = host.read_bytes(path, limit=4096)
        if isinstance(data, Known):
            for text, name in ((b"linux,kvm", "kvm"), (b"xen", "xen"), (b"vmware", "vmware")):
                if text in data.value:
                    return Known(name, path)
    return None


# container --------------------------------------------------------------------------------------

# Inode numbers of the first namespaces (enum in include/linux/proc_ns.h): a container has others.
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "uts": "uts:[4026531838]", "ipc": "ipc:[4026531839]"}


def _container(host: Host) -> Fact[str | None]:
    """Return the container runtime around this tool (on a capture: around what was captured)."""
    environment = host.read_bytes("/proc/1/environ", limit=1 << 20)
    if isinstance(environment, Known):
        match = re.search(rb"(?:^|\0)container=([\w.+-]+)", environment.value)
        if match:
            return Known(match[1].decode(), "/proc/1/environ container=")
    declared = _word(host, "/run/systemd/container")
    if isinstance(declared, Known):
        return Known(declared.value, declared.source)
    podman = host.read("/run/.containerenv", limit=1 << 16)
    if isinstance(podman, Known):
        return Known("podman", podman.source)
    groups = host.read("/proc/1/cgroup", limit=1 << 16)
    if isinstance(groups, Known):
        for text, name in (
            ("/kubepods", "kubernetes"),
            ("/docker", "docker"),
            ("/libpod", "podman"),
            ("/lxc", "lxc"),
        ):
            if text in groups.value:
                return Known(name, groups.source)
    if host.live:
        links = {name: host.link(f"/proc/self/ns/{name}") for name in _FIRST_NAMESPACES}
        if all(isinstance(link, Known) and link.value == _FIRST_NAMESPACES[name] for name, link in links.items()):
            return Known(None, "/proc/self/ns: the first namespaces")
    if isinstance(host.status("/.dockerenv"), Known):
        return Known("docker", "/.dockerenv")
    if not host.live:
        return Unknown("nothing in the capture says whether it was taken in a container", kind="absent")
    return Unknown("this process is in namespaces of its own, and nothing names a container runtime")
