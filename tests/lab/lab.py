"""Boots real Debian kernels under QEMU (software emulation, no KVM) and runs a job in them.

    python -m tests.lab.lab COMMAND

    setup                     install what it needs from the distribution (apt-get)
    list [ARCH]               the kernels that Debian's archive offers now (amd64 or arm64)
    kernel SERIES [ARCH]      fetch the newest of a series (7.0, 6.12, 7.3-16k); print where its files are
    root [ARCH]               build the root file system: Debian 13, Python 3.13, PostgreSQL 17
    run SERIES CMDLINE JOB    boot it with CMDLINE appended and run the script JOB (sh or #!) as root in it; prints its
                              output, leaves what it wrote to /out in LAB_OUT (if set), exits with its status (124: no
                              answer in time)

LAB_CACHE (default ~/.cache/pgpreemptcheck/lab) keeps what was fetched and built. LAB_ARCH (amd64), LAB_SMP (2),
LAB_MEM (2G) and LAB_TIMEOUT (300 s) are for `run`. Needs root and a Debian or Ubuntu with apt. Everything comes from
Debian's own archive; nothing on this machine changes but the cache (and, by `setup`, its packages).

A guest is one kernel with one initial RAM disk: the root, then the job laid over it. No disk and no network, so no
kernel module is needed, and any kernel of the archive will do. The job's /out comes back through the serial console.
"""

from __future__ import annotations

import base64
import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

from tests import debian

SUITES = ("trixie", "trixie-backports", "bookworm", "bookworm-backports", "testing")
RELEASE = "trixie"  # of the root: the newest stable Debian, with PostgreSQL 17

# Programs to run, and the packages that have them.
TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "cpio": "cpio",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-system-aarch64": "qemu-system-arm",
}

ROOT_PACKAGES = (
    "base-files", "base-passwd", "dash", "coreutils", "util-linux", "busybox-static",
    "postgresql-17", "python3", "python3-click", "python3-yaml", "python3-psycopg-c",
    "python3-jinja2", "python3-psutil",
)  # fmt: skip
# Nothing in a guest uses them, and every byte of the root is unpacked by an emulated CPU.
ROOT_EXCLUDED = (
    "usr/share/doc", "usr/share/locale", "usr/share/man", "usr/share/i18n", "usr/share/perl", "usr/share/perl5",
    "usr/share/info", "usr/share/zsh", "usr/share/vim", "usr/lib/LIB/perl", "usr/lib/LIB/perl-base",
    "usr/lib/LIB/gconv", "usr/lib/LIB/libLLVM*", "usr/lib/LIB/libz3*", "usr/lib/LIB/libperl*", "usr/bin/perl*",
    "usr/lib/llvm-*", "usr/lib/gcc", "usr/libexec/gcc", "usr/lib/postgresql/17/lib/bitcode",
    "usr/lib/postgresql/17/lib/llvmjit*", "usr/lib/python3.13/test", "usr/lib/python3.13/idlelib",
    "usr/lib/python3.13/pydoc_data", "usr/lib/python3.13/turtledemo", "boot", "var/lib/apt", "var/lib/dpkg",
    "var/cache",
)  # fmt: skip
LIBRARIES = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

PYTHON_FOLDERS = ("/usr/lib/python3.13", "/usr/lib/python3/dist-packages")
DATA_DIRECTORY = "/var/lib/postgresql/17/main"
BEGIN, END, OUT_BEGIN, OUT_END = "=== LAB BEGIN", "=== LAB END", "=== LAB OUT BEGIN", "=== LAB OUT END"
INIT = f"""#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=dumb
alias mount='busybox mount'
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts /out
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs run /run
mkdir -p /run/postgresql
chown postgres:postgres /run/postgresql
mount -t debugfs none /sys/kernel/debug
mount -t cgroup2 cgroup /sys/fs/cgroup
busybox ip link set lo up
busybox hostname lab
echo '{BEGIN}'
/job
echo "{END} $?"
echo '{OUT_BEGIN}'
busybox tar -C /out -c . | busybox gzip -1 | busybox base64
echo '{OUT_END}'
busybox poweroff -f
"""


class LabError(Exception):
    """The lab cannot do what it was asked; the message is one line."""


class NoKernelError(LabError):
    """The archive offers no kernel of that series."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as its packages lay it out. `files` maps paths in the guest to files here (the build config)."""

    series: str
    arch: str
    release: str
    vmlinuz: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Boot:
    """What a boot left: the job's console output, its exit status, and the folder with its /out."""

    output: str
    status: int
    out: str


def cache_directory() -> str:
    path = os.environ.get("LAB_CACHE") or os.path.expanduser("~/.cache/pgpreemptcheck/lab")
    os.makedirs(path, exist_ok=True)
    return path


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Let one process (or thread) at a time build one thing of the cache."""
    with open(os.path.join(cache_directory(), name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(argv: Sequence[str], cwd: str | None = None, stdin: str | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise LabError(f"{' '.join(argv[:4])} failed ({done.returncode}): {last}")
    return done.stdout


# packages of this machine ------------------------------------------------------------------------


def setup() -> None:
    """Install the missing tools with apt-get. Needs root."""
    packages = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if not os.path.exists(debian.KEYRING):
        packages.append("debian-archive-keyring")
    if not packages:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise LabError(f"the lab needs root and apt-get to install {', '.join(packages)}")
    with _locked("setup"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "-qq", "update"], env=environment, stdout=sys.stderr, check=False)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        if subprocess.run(install, env=environment, stdout=sys.stderr, check=False).returncode != 0:
            raise LabError(f"apt-get could not install {', '.join(packages)}")


# Debian's archive --------------------------------------------------------------------------------


def _index(arch: str) -> list[str]:
    """Return apt's options for the package index of an architecture."""
    with _locked("apt-" + arch):
        try:
            return debian.index(os.path.join(cache_directory(), "apt-" + arch), SUITES, arch)
        except RuntimeError as error:
            raise LabError(str(error)) from None


def _version_key(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _flavour(arch: str, variant: str) -> str:
    """The cloud flavour is the smallest; only the ordinary one comes with other page sizes (`16k`)."""
    return f"{arch}-{variant}" if variant else f"cloud-{arch}"


def _split(series: str) -> tuple[str, str]:
    number, _, variant = series.partition("-")
    return number, variant


def releases(arch: str) -> list[str]:
    """Return the kernel releases (`uname -r`) that the archive has, oldest first; real-time ones left out."""
    text = _run(["apt-cache", *_index(arch), "search", "-n", "^linux-(image|binary)-[0-9]"])
    name = rf"^linux-(?:image|binary)-([0-9]\S*?-(?:cloud-)?{arch}(?:-[0-9]+k)?)(?:-unsigned)? "
    names = re.findall(name, text, re.M)
    return sorted(set(names), key=lambda name: (_version_key(name.split(f"-{arch}")[0]), name))


def fetch_kernel(series: str, arch: str = "amd64") -> Kernel:
    """Return the newest kernel of a series (`7.0`, `7.3-16k`), fetched if need be. Raises NoKernelError."""
    number, variant = _split(series)
    flavour = _flavour(arch, variant)
    wanted = re.compile(rf"{re.escape(number)}\.[^-]*(?:-[0-9]+)?-{flavour}")
    found = [release for release in releases(arch) if wanted.fullmatch(release)]
    if not found:
        raise NoKernelError(f"Debian's archive ({', '.join(SUITES)}) has no {number} kernel of flavour {flavour} now")
    release = found[-1]
    directory = os.path.join(cache_directory(), "kernel-" + release)
    with _locked("kernel-" + release):
        if not os.path.isdir(directory):
            _unpack_kernel(release, arch, directory)
    files = {}
    vmlinuz = ""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith("vmlinuz"):
                vmlinuz = path
            else:
                files[path.removeprefix(directory)] = path
    if not vmlinuz:
        raise LabError(f"the packages of {release} hold no vmlinuz")
    return Kernel(series, arch, release, vmlinuz, files)


def _unpack_kernel(release: str, arch: str, directory: str) -> None:
    """Keep vmlinuz and the build config of a kernel's packages, at their own paths.

    Up to 6.19 one package has all; from 7.0 on linux-binary has vmlinuz, and linux-base the config, which the archive
    may have dropped by now: such a guest then has none, like a host where it is not installed.
    """
    options = _index(arch)
    wanted = rf"^linux-(image|binary|base)-{re.escape(release)}(-unsigned)?$"
    text = _run(["apt-cache", *options, "search", "-n", wanted])
    names = set(re.findall(r"^(\S+) ", text, re.M))
    names -= {name for name in names if name.removesuffix("-unsigned") in names and name.endswith("-unsigned")}
    with tempfile.TemporaryDirectory(dir=cache_directory()) as work:
        for name in sorted(names):
            _run(["apt-get", *options, "-qq", "download", name], cwd=work)
        os.mkdir(work + "/x")
        for deb in sorted(name for name in os.listdir(work) if name.endswith(".deb")):
            unpack = ["dpkg-deb", "--fsys-tarfile", deb]
            with (
                subprocess.Popen(unpack, cwd=work, stdout=subprocess.PIPE) as stream,
                tarfile.open(fileobj=stream.stdout, mode="r|") as archive,
            ):
                for member in archive:
                    if member.isreg() and re.search(r"/(vmlinuz|config)(-[^/]*)?$", member.name):
                        archive.extract(member, work + "/x")
        os.rename(work + "/x", directory)


# the root file system ------------------------------------------------------------------------------


def build_root(arch: str = "amd64") -> str:
    """Return the root's cpio archive, built if need be: Debian 13 unpacked, not configured, with a cluster in it.

    The packages' scripts do not run, so that a root of another architecture needs no emulation to be built.
    Python is compiled beforehand, and the cluster of the amd64 root serves all: its format is that of every
    64-bit little-endian machine.
    """
    path = _root_folder(arch) + ".cpio"
    native = _root_folder("amd64")
    if arch != "amd64":
        build_root("amd64")
    with _locked("root-" + arch):
        if os.path.exists(path):
            return path
        for old in glob.glob(os.path.join(cache_directory(), f"root-{arch}-*")):
            if os.path.getmtime(old) < time.time() - 86400:  # a younger one may be in use by another checkout
                shutil.rmtree(old) if os.path.isdir(old) else os.unlink(old)
        with tempfile.TemporaryDirectory(dir=cache_directory()) as work:
            root = work + "/root"
            _run(
                ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=" + arch,
                 "--include=" + ",".join(ROOT_PACKAGES), RELEASE, work + "/root.tar",
                 debian.source(RELEASE)]
            )  # fmt: skip
            os.mkdir(root)
            _run(["tar", "-C", root, "-xf", work + "/root.tar", "--exclude=./dev/*"])
            _strip(root, arch)
            _configure(root)
            if arch == "amd64":
                _make_cluster(root)
                os.rename(root, native)  # kept: its Python compiles for every root and every job
                root = native
            else:
                _run(["cp", "-a", native + "/var/lib/postgresql", root + "/var/lib/"])
            for folder in PYTHON_FOLDERS:
                _compile(native, root + folder, folder)
            _pack(root, path + ".tmp")
        os.rename(path + ".tmp", path)
    return path


def _root_folder(arch: str) -> str:
    """Return where a root lies in the cache; another recipe (this file) makes another root."""
    with open(os.path.abspath(__file__), "rb") as file:
        recipe = hashlib.sha256(file.read()).hexdigest()[:12]
    return os.path.join(cache_directory(), f"root-{arch}-{recipe}")


def _strip(root: str, arch: str) -> None:
    for pattern in ROOT_EXCLUDED:
        for path in glob.glob(os.path.join(root, pattern.replace("LIB", LIBRARIES[arch]))):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def _configure(root: str) -> None:
    """Do what the packages' scripts would: users, a shell, devices for the chroot, and the guest's init."""
    for name in ("passwd", "group"):
        with open(f"{root}/usr/share/base-passwd/{name}.master") as file:
            text = file.read()
        text += "postgres:x:105:105::/var/lib/postgresql:/bin/sh\n" if name == "passwd" else "postgres:x:105:\n"
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text.replace(":*:", ":x:"))
    for name, minor in (("null", 3), ("zero", 5), ("urandom", 9)):
        path = f"{root}/dev/{name}"
        if not os.path.exists(path):
            os.mknod(path, 0o20666, os.makedev(1, minor))
            os.chmod(path, 0o666)
    os.makedirs(root + "/dev/shm", exist_ok=True)
    os.chmod(root + "/dev/shm", 0o1777)
    os.chmod(root + "/tmp", 0o1777)
    if not os.path.islink(root + "/var/run"):
        shutil.rmtree(root + "/var/run", ignore_errors=True)
        os.symlink("/run", root + "/var/run")
    with open(root + "/init", "w") as file:
        file.write(INIT)
    os.chmod(root + "/init", 0o755)


def _make_cluster(root: str) -> None:
    os.makedirs(root + DATA_DIRECTORY, exist_ok=True)
    folder = root + DATA_DIRECTORY
    os.chmod(folder, 0o700)
    for path in (folder, os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
        os.chown(path, 105, 105)
    _run(
        ["chroot", "--userspec=postgres:postgres", root, "/usr/lib/postgresql/17/bin/initdb", "-D", DATA_DIRECTORY,
         "-A", "peer", "--no-sync", "--wal-segsize=1", "--locale=C.UTF-8", "-E", "UTF8"]
    )  # fmt: skip
    with open(folder + "/postgresql.conf", "w") as file:
        file.write("listen_addresses = ''\nfsync = off\nautovacuum = off\njit = off\n")


def _compile(native: str, folder: str, target: str) -> None:
    """Compile the Python files of a folder that will lie at `target` in a guest, with the amd64 root's Python.

    Byte code is the same for every architecture. It is used unchecked: no file time decides.
    """
    with tempfile.TemporaryDirectory(dir=native) as place:
        inside = place.removeprefix(native) + "/tree"
        shutil.copytree(folder, native + inside, symlinks=True)
        _run(
            ["chroot", native, "/usr/bin/python3", "-m", "compileall", "-q", "--invalidation-mode",
             "unchecked-hash", "-s", inside, "-p", target, inside]
        )  # fmt: skip
        shutil.rmtree(folder)
        os.rename(native + inside, folder)


def _pack(tree: str, path: str) -> None:
    """Write a folder as a cpio archive that the kernel unpacks as its initial RAM disk."""
    with open(path, "wb") as file:
        find = subprocess.Popen(["find", ".", "-mindepth", "1"], cwd=tree, stdout=subprocess.PIPE)
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, stdin=find.stdout, stdout=file, check=True)
        find.wait()


# a boot ------------------------------------------------------------------------------------------


def _qemu(kernel: Kernel, initrd: str, cmdline: str, smp: int, memory: str) -> list[str]:
    if kernel.arch == "arm64":
        # pauth-impdef: the architecture's own pointer authentication is costly to emulate
        machine = ["qemu-system-aarch64", "-M", "virt", "-cpu", "max,pauth-impdef=on"]
        console = "ttyAMA0"
    else:
        # the fewest features to emulate that Debian 13 runs on, and 1 GB pages: a third quicker than `max`
        machine = ["qemu-system-x86_64", "-cpu", "Nehalem,+pdpe1gb"]
        console = "ttyS0"
    # One thread for all guest CPUs: with one each, QEMU now and then runs an instruction that the kernel is just
    # patching (static keys), and the guest dies of an int3. It is also quicker with 16 guest CPUs on 2 real ones.
    return [
        *machine, "-accel", "tcg,thread=single", "-m", memory, "-smp", str(smp), "-nographic", "-nic", "none",
        "-no-reboot", "-kernel", kernel.vmlinuz, "-initrd", initrd,
        "-append", f"console={console} quiet loglevel=3 panic=-1 mitigations=off {cmdline}".strip(),
    ]  # fmt: skip


def boot(
    kernel: Kernel,
    job: str,
    *,
    cmdline: str = "",
    files: Mapping[str, str] | None = None,
    out: str,
    smp: int = 2,
    memory: str = "2G",
    timeout: float = 300,
) -> Boot:
    """Boot a kernel and run `job` (the text of a script) as root in it.

    `files` maps paths in the guest to files or folders here. What the job writes to /out lands in the folder `out`.
    Raises LabError if the guest gives no answer within `timeout` seconds.
    """
    root = build_root(kernel.arch)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as work:
        tree = work + "/job"
        os.mkdir(tree)
        for target, source in {**kernel.files, **(files or {})}.items():
            os.makedirs(os.path.dirname(tree + target), exist_ok=True)
            if os.path.isdir(source):
                shutil.copytree(source, tree + target, ignore=shutil.ignore_patterns("__pycache__"))
                _compile(_root_folder("amd64"), tree + target, target)
            else:
                shutil.copyfile(source, tree + target)
        with open(tree + "/job", "w") as file:
            file.write(job if job.startswith("#!") else "#!/bin/sh\n" + job)
        os.chmod(tree + "/job", 0o755)
        _pack(tree, work + "/job.cpio")
        with open(work + "/initrd", "wb") as initrd:
            for part in (root, work + "/job.cpio"):
                with open(part, "rb") as source_file:
                    shutil.copyfileobj(source_file, initrd, 1 << 20)
        argv = _qemu(kernel, work + "/initrd", cmdline, smp, memory)
        with open(work + "/console", "wb") as console:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
        with open(work + "/console", "rb") as console:
            text = console.read().decode("utf-8", "replace").replace("\r", "")
    return _answer(text, out, timeout, kernel.release)


def _answer(text: str, out: str, timeout: float, release: str) -> Boot:
    ended = re.search(rf"^{END} (\d+)$", text, re.M)
    packed = re.search(rf"^{OUT_BEGIN}\n(.*?)^{OUT_END}$", text, re.M | re.S)
    if not ended or not packed:
        fault = re.findall(r"(?:panic|Oops|BUG:|RIP:|Out of memory).*", text)[:3]
        tail = " | ".join(fault or text.strip().splitlines()[-4:])
        raise LabError(f"{release}: no answer (limit {timeout:g} s); from the console: {tail}")
    output = text[: ended.start()].partition(BEGIN + "\n")[2]
    data = base64.b64decode("".join(re.findall(r"^[A-Za-z0-9+/=]+$", packed[1], re.M)))
    os.makedirs(out, exist_ok=True)
    with tarfile.open(fileobj=BytesIO(data), mode="r:gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # the default from Python 3.14 on
        archive.extractall(out)
    return Boot(output, int(ended[1]), out)


# command line --------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    command, *rest = arguments or [""]
    try:
        if command == "setup" and not rest:
            setup()
        elif command == "list" and len(rest) <= 1:
            print("\n".join(releases(*(rest or ["amd64"]))))
        elif command == "kernel" and 1 <= len(rest) <= 2:
            kernel = fetch_kernel(*rest)
            print(kernel.release, kernel.vmlinuz, *(kernel.files.values() or ["-"]), sep="\n")
        elif command == "root" and len(rest) <= 1:
            print(build_root(*rest))
        elif command == "run" and len(rest) == 3:
            series, cmdline, job = rest
            with open(job) as file, tempfile.TemporaryDirectory() as scratch:
                result = boot(
                    fetch_kernel(series, os.environ.get("LAB_ARCH", "amd64")),
                    file.read(),
                    cmdline=cmdline,
                    out=os.environ.get("LAB_OUT", scratch),
                    smp=int(os.environ.get("LAB_SMP", "2")),
                    memory=os.environ.get("LAB_MEM", "2G"),
                    timeout=float(os.environ.get("LAB_TIMEOUT", "300")),
                )
            sys.stdout.write(result.output)
            return result.status
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except NoKernelError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 124 if "no answer" in str(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
