"""How long a check takes, in multiples of a bare interpreter start of the same run.

    python -m tests.benchmarks.startup [--fast]

Measures the installed wheel in a new virtual environment with pyperf. A command that does not exit as it should, or
that did not reach the server it was to ask, is no measurement. The bars are those of the design; nothing fails here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pyperf

from tests import servers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class Case:
    """One command, the bar for it in multiples of a bare start, and how many clusters its report must hold."""

    name: str
    command: list[str]
    bar: float
    clusters: int | None = None
    sql: bool = False
    megabytes: float | None = None


def main() -> None:
    fast = "--fast" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        python, program = install(work)
        with running_server() as port:
            bare = [python, "-c", "pass"]
            check = [program, "--fail-on", "never"]
            cases = [
                Case("version", [program, "--version"], 6),
                Case("check --no-sql", [*check, "--no-sql"], 10),
                *([Case("check with SQL", check, 18, 1, True, 60)] if port else []),
                Case("100 clusters", [*check, "--root", hundred_clusters(work)], 100, 100),
            ]
            for case in cases:
                verify(case, port)
            start = measure("bare", bare, fast)
            results = [(case, measure(case.name, case.command, fast)) for case in cases]
            again = measure("bare again", bare, fast)
        base = (start.median() + again.median()) / 2
        print(f"{'bare python -c pass':<20} {base * 1000:8.1f} ms   1.0x")
        for case, result in results:
            times = result.median() / base
            verdict = "within" if times <= case.bar else "OVER"
            memory = f", {peak_megabytes(case.command):.0f} MB" + (f" of {case.megabytes:g}" if case.megabytes else "")
            print(f"{case.name:<20} {result.median() * 1000:8.1f} ms {times:5.1f}x  {verdict} {case.bar:g}x{memory}")


def install(work: str) -> tuple[str, str]:
    """Install the wheel into a new environment and return its python and the program."""
    environment = os.path.join(work, "venv")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [os.path.join(environment, "bin", "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, ROOT], check=True, env=ENVIRONMENT)
    return os.path.join(environment, "bin", "python"), os.path.join(environment, "bin", "pgpreemptcheck")


@contextlib.contextmanager
def running_server() -> Iterator[int | None]:
    """Run one real server; None where there is none to run."""
    found = servers.available()
    if not found:
        print("no PostgreSQL server to ask: python -m tests.servers fetch", file=sys.stderr)
        yield None
        return
    server = max((s for s in found.values() if s.major <= 18), key=lambda s: s.major)
    with servers.private_directory() as folder:
        data = os.path.join(folder, "data")
        server.initdb(data)
        with server.start(data) as running:
            yield running.port


def hundred_clusters(work: str) -> str:
    """Return a captured host on which a hundred clusters run: the demo's, a hundred times."""
    demo = os.path.join(ROOT, "pgpreemptcheck", "demo", "capture")
    root = os.path.join(work, "hundred")
    shutil.copytree(demo, root)
    process, data, sql = (os.path.join(root, part) for part in ("proc/2417", "data/pgdata", "sql/5432.json"))
    for number in range(1, 100):
        pid, port, folder = str(5000 + number), str(6000 + number), f"/data/pgdata{number}"
        new = os.path.join(root, "proc", pid)
        shutil.copytree(process, new)
        replace(os.path.join(new, "cmdline"), "/data/pgdata", folder)
        replace(os.path.join(new, "cwd.txt"), "/data/pgdata", folder)
        replace(os.path.join(new, "status"), "2417", pid)
        shutil.copytree(data, root + folder)
        replace(root + folder + "/postmaster.pid", "2417", pid)
        replace(root + folder + "/postmaster.pid", "/data/pgdata", folder)
        replace(root + folder + "/postmaster.pid", "5432", port)
        shutil.copy(sql, os.path.join(root, "sql", f"{port}.json"))
    return root


def replace(path: str, old: str, new: str) -> None:
    with open(path, encoding="utf-8") as stream:
        text = stream.read()
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text.replace(old, new))


def verify(case: Case, port: int | None) -> None:
    """Refuse to measure a command that does not do what it is measured for."""
    done = subprocess.run(case.command, env=ENVIRONMENT, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{case.name}: exit code {done.returncode}: {done.stderr.decode()}")
    if case.clusters is None:
        return
    text = subprocess.run([*case.command, "--format", "json"], env=ENVIRONMENT, capture_output=True, check=True).stdout
    report = json.loads(text)
    running = [cluster for cluster in report["clusters"] if cluster["running"]]
    if case.sql:
        running = [cluster for cluster in running if cluster["port"].get("value") == port]
        if not running or "value" not in running[0]["server"]["version"]:
            raise SystemExit(f"{case.name}: the server was not reached")
    elif len(running) != case.clusters:
        raise SystemExit(f"{case.name}: {len(running)} clusters instead of {case.clusters}")


def measure(name: str, command: list[str], fast: bool) -> pyperf.Benchmark:
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "times.json")
        options = ["--processes", "5" if fast else "15", "--values", "3", "--warmups", "1"]
        subprocess.run(
            [sys.executable, "-m", "pyperf", "command", "-q", *options, "--copy-env", "--name", name,
             "-o", target, "--", *command],
            check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return pyperf.Benchmark.load(target)


def peak_megabytes(command: list[str]) -> float:
    """Return the peak resident memory of the largest process of a run."""
    code = "import os, resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code, *command], env=ENVIRONMENT, capture_output=True, check=True)
    return int(done.stdout) / 1024


if __name__ == "__main__":
    main()
