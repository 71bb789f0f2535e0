#!/usr/bin/python3
"""Runs in a guest as root: puts the kernel and a cluster in one state after another, and looks at each twice.

Once with the tool, once without it: `/out/STEP.json` holds what the tool reported and what the kernel and the
server themselves say (`truth`, gathered here by other means: smaps, the ioctl, SQL through psql, dmesg).
`/plan.json` says which groups of steps to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

BIN = "/usr/lib/postgresql/17/bin/"
DATA = "/var/lib/postgresql/17/main"
SERVER_LOG = "/var/lib/postgresql/server.log"
DEBUGFS = "/sys/kernel/debug"
RELEASE = os.uname().release
CONFIGS = (f"/boot/config-{RELEASE}", f"/usr/lib/modules/{RELEASE}/config")


def read(path: str) -> str:
    """Return a file's text, or the error in its place: the error is a truth as well."""
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"


def write(path: str, text: str) -> str:
    """Write and return "" or the error's name (EINVAL, ...)."""
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def run(argv: list[str], user: str | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    rights: dict[str, Any] = {"user": user, "group": user if user != "nobody" else "nogroup", "extra_groups": []}
    return subprocess.run(argv, capture_output=True, text=True, cwd="/", **(rights if user else {}), **more)


# the cluster ---------------------------------------------------------------------------------------


def start_cluster() -> None:
    # not through a pipe: the postmaster would keep its end open
    argv = [BIN + "pg_ctl", "-w", "-D", DATA, "-l", SERVER_LOG, "start"]
    done = subprocess.run(argv, user="postgres", group="postgres", extra_groups=[], cwd="/", stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit("the server did not start: " + read(SERVER_LOG)[-2000:])


def stop_cluster() -> None:
    run([BIN + "pg_ctl", "-w", "-D", DATA, "-m", "immediate", "stop"], user="postgres", check=True)


def ask(query: str) -> str:
    done = run([BIN + "psql", "-XAtqc", query, "-d", "postgres"], user="postgres")
    return done.stdout.strip() or done.stderr.strip()


def postmaster() -> int | None:
    line = read(DATA + "/postmaster.pid").split("\n")[0]
    return int(line) if line.isdigit() else None


# truth ---------------------------------------------------------------------------------------------


class ProcmapQuery(ctypes.Structure):
    """struct procmap_query of include/uapi/linux/fs.h (6.11)."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("query_flags", ctypes.c_uint64),
        ("query_addr", ctypes.c_uint64),
        ("vma_start", ctypes.c_uint64),
        ("vma_end", ctypes.c_uint64),
        ("vma_flags", ctypes.c_uint64),
        ("vma_page_size", ctypes.c_uint64),
        ("vma_offset", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("dev_major", ctypes.c_uint32),
        ("dev_minor", ctypes.c_uint32),
        ("vma_name_size", ctypes.c_uint32),
        ("build_id_size", ctypes.c_uint32),
        ("vma_name_addr", ctypes.c_uint64),
        ("build_id_addr", ctypes.c_uint64),
    ]


PROCMAP_QUERY = 3 << 30 | ctypes.sizeof(ProcmapQuery) << 16 | 0x66 << 8 | 17  # _IOWR('f', 17, struct procmap_query)


def procmap_query(pid: int, address: int) -> int | str:
    """Return the page size that the ioctl gives, or its error."""
    query = ProcmapQuery(size=ctypes.sizeof(ProcmapQuery), query_addr=address)
    try:
        with open(f"/proc/{pid}/maps") as maps:
            fcntl.ioctl(maps, PROCMAP_QUERY, query)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return int(query.vma_page_size)


def segment(pid: int) -> dict[str, Any]:
    """Return the largest shared mapping as smaps shows it: a walk that a lab may do and the tool may not."""
    best: dict[str, Any] = {"bytes": 0}
    mapping = r"^([0-9a-f]+)-([0-9a-f]+) rw-s (.*)\n((?:[A-Z]\w+:.*\n)*)"
    for block in re.findall(mapping, read(f"/proc/{pid}/smaps"), re.M):
        start, end = int(block[0], 16), int(block[1], 16)
        if end - start > best["bytes"]:
            page = re.search(r"KernelPageSize: +(\d+) kB", block[3])
            best = {"bytes": end - start, "name": block[2].split(None, 3)[-1], "address": start,
                    "page_bytes": int(page[1]) * 1024 if page else None}  # fmt: skip
    best["procmap_query"] = procmap_query(pid, best.get("address", 0))
    return best


@contextlib.contextmanager
def own_debugfs() -> Iterator[str]:
    """Mount debugfs for the truth alone, out of the tool's sight (it is gone when the tool runs)."""
    os.makedirs("/run/truth", exist_ok=True)
    run(["busybox", "mount", "-t", "debugfs", "none", "/run/truth"], check=True)
    try:
        yield "/run/truth"
    finally:
        run(["busybox", "umount", "/run/truth"], check=True)


def truth() -> dict[str, Any]:
    with own_debugfs() as debugfs:
        preempt = read(debugfs + "/sched/preempt")
    configs = [path for path in CONFIGS if os.path.exists(path)]
    build = re.findall(r"^(?:CONFIG_\w*PREEMPT\w*=.*|CONFIG_RSEQ\w*=.*|# CONFIG_RSEQ_SLICE_EXTENSION is.*)$",
                       read(configs[0]) if configs else "", re.M)  # fmt: skip
    log = run(["busybox", "dmesg"]).stdout
    facts: dict[str, Any] = {
        "release": RELEASE,
        "version": os.uname().version,
        "arch": os.uname().machine,
        "command_line": read("/proc/cmdline").strip(),
        "debugfs_preempt": preempt,
        "log": re.findall(r"Dynamic Preempt: .*", log),
        "configs": configs,
        "build": build,
        "cpus": len([name for name in os.listdir("/sys/devices/system/cpu") if re.fullmatch(r"cpu\d+", name)]),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "mem_total_bytes": int(re.search(r"MemTotal: +(\d+)", read("/proc/meminfo"))[1]) * 1024,  # type: ignore[index]
        "default_huge_page_bytes": default_huge_page() * 1024,
        "pools": {
            re.sub(r"\D", "", os.path.basename(folder)): {
                name: int(read(f"{folder}/{name}"))
                for name in ("nr_hugepages", "free_hugepages", "resv_hugepages", "surplus_hugepages")
            }
            for folder in glob.glob("/sys/kernel/mm/hugepages/hugepages-*kB")
        },
    }
    pid = postmaster()
    if pid is not None:
        settings = ("huge_pages_status", "shared_memory_size_in_huge_pages", "max_connections", "server_version")
        shown = ask("select " + ", ".join(f"current_setting('{name}')" for name in settings)).split("|")
        facts["cluster"] = {"pid": pid, "segment": segment(pid), **dict(zip(settings, shown, strict=True))}
    return facts


def default_huge_page() -> int:
    """Return the default huge page size in kB."""
    found = re.search(r"Hugepagesize: +(\d+) kB", read("/proc/meminfo"))
    return int(found[1]) if found else 0


# the tool ------------------------------------------------------------------------------------------


def tool(user: str | None = None, *options: str, command: str = "check") -> dict[str, Any]:
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": "/opt/pgpreemptcheck", "HOME": "/"}
    argv = ["/usr/bin/python3", "-B", "-m", "pgpreemptcheck", command, *options]
    done = run(argv, user=user, env=environment, timeout=120)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {"no JSON": done.stdout[-2000:]}
    return {"argv": argv, "user": user or "root", "exit": done.returncode, "report": report, "stderr": done.stderr}


def look(step: str, user: str | None = None, *, sql: bool = False, command: str = "check", **extra: Any) -> None:
    """Run the tool, gather the truth, keep both."""
    options = (["--format", "json"] if command == "check" else []) + ([] if sql else ["--no-sql"])
    result = {"tool": tool(user, *options, command=command), "truth": truth(), **extra}
    with open(f"/out/{step}.json", "w") as file:
        json.dump(result, file)


@contextlib.contextmanager
def no_debugfs() -> Iterator[None]:
    run(["busybox", "umount", DEBUGFS], check=True)
    try:
        yield
    finally:
        run(["busybox", "mount", "-t", "debugfs", "none", DEBUGFS], check=True)


# groups of steps -----------------------------------------------------------------------------------


def group_facts() -> None:
    look("facts", command="facts")


def group_ladder() -> None:
    """The rungs of the ladder: debugfs, the log, and what is left to an unprivileged user."""
    write("/proc/sys/kernel/dmesg_restrict", "1")
    look("root", sql=True)
    with no_debugfs():
        look("root-log")
    look("nobody", "nobody")
    write("/proc/sys/kernel/dmesg_restrict", "0")
    look("nobody-log", "nobody")
    write("/proc/sys/kernel/dmesg_restrict", "1")


def group_hidepid() -> None:
    run(["busybox", "mount", "-o", "remount,hidepid=2", "/proc"], check=True)
    look("hidepid", "nobody")
    run(["busybox", "mount", "-o", "remount,hidepid=0", "/proc"], check=True)


def group_rewrite() -> None:
    """Another mode written at run time, and one that newer kernels refuse."""
    path = DEBUGFS + "/sched/preempt"
    before = re.search(r"\((\w+)\)", read(path))
    refused = write(path, "full")
    look("full-root", refused=refused)
    with no_debugfs():
        look("full-log", refused=refused)
    look("full-nobody", "nobody", refused=refused)
    refused = write(path, "none")
    with no_debugfs():
        look("none-log", refused=refused)
    if before:
        write(path, before[1])


def group_huge() -> None:
    """The segment on huge pages, then the pool cut under it."""
    pool = f"/sys/kernel/mm/hugepages/hugepages-{default_huge_page()}kB/nr_hugepages"
    need = int(ask("show shared_memory_size_in_huge_pages"))
    stop_cluster()
    write(pool, str(need + 3))
    start_cluster()
    look("huge", sql=True)
    look("huge-nobody", "nobody")
    write(pool, "1")
    look("huge-cut", sql=True)
    stop_cluster()
    write(pool, "0")
    start_cluster()


def group_capture() -> None:
    """Keep this host as a captured directory, small: what check reads of a host, and the postmaster's own files."""
    root = "/out/capture"
    pid = postmaster()
    names = ["/proc/cmdline", "/proc/meminfo", "/proc/version", "/proc/mounts", "/proc/sys/kernel/osrelease",
             "/proc/sys/vm/nr_overcommit_hugepages", "/proc/self/cgroup", "/etc/os-release", "/etc/hostname",
             "/sys/kernel/debug/sched/preempt", "/sys/devices/system/cpu/online", "/sys/devices/system/node/online",
             "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
             DATA + "/PG_VERSION", DATA + "/postmaster.pid", DATA + "/postgresql.conf", DATA + "/postgresql.auto.conf",
             *glob.glob("/sys/kernel/mm/hugepages/hugepages-*kB/*_hugepages"), *CONFIGS,
             *(f"/proc/{pid}/{name}" for name in ("cmdline", "comm", "status", "stat", "maps", "limits", "cgroup")),
             ]  # fmt: skip
    for name in names:
        text = read(name)
        if re.match(r"[A-Z]\w+Error: ", text):
            if "No such file" not in text:
                write(f"{root}/{name.strip('/').replace('/', '-')}.error.txt", text.partition(": ")[2])
            continue
        if name in CONFIGS:  # of its 250 kB what bears on preemption, rseq and huge pages
            wanted = r"^(?:# )?CONFIG_\w*(?:PREEMPT|RSEQ|HUGETLB|TRANSPARENT_HUGEPAGE|SCHED_CLASS_EXT|HZ)\w*[ =].*\n"
            text = "".join(re.findall(wanted, text, re.M))
        if name.endswith("/maps"):  # without its hundred private mappings
            text = "".join(re.findall(r"^.*(?: rw-s |/bin/postgres).*\n", text, re.M))
        os.makedirs(os.path.dirname(root + name), exist_ok=True)
        write(root + name, text)
        shutil.copystat(name, root + name)  # whether a file is newer than the server's start is told by its time
    write(f"{root}/proc/{pid}/cwd.txt", os.readlink(f"/proc/{pid}/cwd") + "\n")
    write(f"{root}/proc/{pid}/exe.txt", os.readlink(f"/proc/{pid}/exe") + "\n")
    write(f"{root}/uname.txt", run(["busybox", "uname", "-a"]).stdout)
    log = run(["busybox", "dmesg"]).stdout
    kept = r"^.*(?:Linux version|ommand line|Dynamic Preempt|PREEMPT|HugeTLB|Lockdown|DMI:|smp: Brought).*\n"
    write(f"{root}/dmesg.txt", "".join(re.findall(kept, log, re.M)))


def main() -> None:
    plan = json.loads(read("/plan.json"))
    groups = {name.removeprefix("group_"): function for name, function in globals().items() if name[:6] == "group_"}
    start_cluster()
    for name in plan["groups"]:
        try:
            groups[name]()
        except Exception as error:  # one group that fails must not take the others' results with it
            write(f"/out/{name}.failed", f"{type(error).__name__}: {error} {getattr(error, 'stderr', '')}")
    stop_cluster()
    shutil.copyfile(SERVER_LOG, "/out/server.log")


if __name__ == "__main__":
    main()
