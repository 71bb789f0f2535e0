"""Boots the kernels that the selected tests ask for, two at a time, and hands out what each boot left."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.lab import lab

HERE = os.path.dirname(os.path.abspath(__file__))
PROJECT = os.path.dirname(os.path.dirname(HERE))
PARALLEL = int(os.environ.get("LAB_PARALLEL", "2"))
TIMEOUT = float(os.environ.get("LAB_TIMEOUT", "600"))


@dataclass(frozen=True)
class Plan:
    """One boot: which kernel, with what on its command line, and which groups of steps of job.py run in it."""

    series: str
    cmdline: str = ""
    groups: tuple[str, ...] = ("ladder", "rewrite", "hidepid", "huge")
    arch: str = "amd64"
    cpus: int = 16


PLANS = {
    "6.1": Plan("6.1"),
    "6.12": Plan("6.12", groups=("capture", "ladder", "rewrite", "hidepid", "huge")),
    "6.18": Plan("6.18"),
    "7.0": Plan("7.0", groups=("capture", "ladder", "rewrite", "hidepid", "huge")),
    "7.3": Plan("7.3"),
    "6.1 preempt=none": Plan("6.1", "preempt=none", ("ladder",)),
    "6.12 preempt=none": Plan("6.12", "preempt=none", ("ladder",)),
    "6.18 preempt=none": Plan("6.18", "preempt=none", ("ladder",)),
    "7.0 preempt=none": Plan("7.0", "preempt=none", ("ladder",)),
    "7.3 preempt=none": Plan("7.3", "preempt=none", ("ladder",)),
    # arm64: the 4 kB kernel of Debian 13, and the newest with 16 kB pages (the archive has none with 64 kB)
    "arm64 6.12": Plan("6.12", "", ("facts", "huge"), "arm64", 2),
    "arm64 7.3-16k": Plan("7.3-16k", "preempt=none", ("facts", "huge"), "arm64", 2),
}


@dataclass(frozen=True)
class Step:
    """What one step of a job left: the tool's report, and what kernel and server themselves say."""

    report: dict[str, Any]
    truth: dict[str, Any]
    exit: int
    stderr: str
    refused: str = ""


class Boots:
    """The boots that this test session needs, started at once, so that those that come first do not wait alone."""

    def __init__(self, names: list[str], folder: str) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(PARALLEL)
        self._results: dict[str, Future[str]] = {name: self._pool.submit(self._boot, name) for name in names}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _boot(self, name: str) -> str:
        plan = PLANS[name]
        kernel = lab.fetch_kernel(plan.series, plan.arch)
        out = os.path.join(self._folder, name.replace(" ", "-"))
        os.makedirs(out)
        with open(out + "/plan.json", "w") as file:
            json.dump({"groups": plan.groups}, file)
        with open(os.path.join(HERE, "job.py")) as file:
            job = file.read()
        files = {
            "/plan.json": out + "/plan.json",
            "/opt/pgpreemptcheck/pgpreemptcheck": os.path.join(PROJECT, "pgpreemptcheck"),
            "/opt/pgpreemptcheck/rules": os.path.join(PROJECT, "rules"),
        }
        done = lab.boot(kernel, job, cmdline=plan.cmdline, files=files, out=out, smp=plan.cpus, timeout=TIMEOUT)
        if done.status != 0:
            raise lab.LabError(f"the job on {kernel.release} ended with status {done.status}: {done.output[-2000:]}")
        return out

    def out(self, name: str) -> str:
        """Return the folder that a boot left; skips the test if the archive has no such kernel."""
        try:
            return self._results[name].result()
        except lab.NoKernelError as error:
            pytest.skip(str(error))

    def step(self, name: str, step: str) -> Step:
        """Return one step of a boot."""
        out = self.out(name)
        path = f"{out}/{step}.json"
        if not os.path.exists(path):
            reasons = []
            for failed in glob.glob(out + "/*.failed"):
                with open(failed) as file:
                    reasons.append(f"{os.path.basename(failed)}: {file.read()}")
            pytest.fail(f"{name}: the guest left no step {step}; {reasons}")
        with open(path) as file:
            found = json.load(file)
        tool = found["tool"]
        return Step(tool["report"], found["truth"], tool["exit"], tool["stderr"], found.get("refused", ""))


def results_folder() -> str:
    """Return a folder of this session's own; it stays, to look into after a failure, until a later session starts."""
    for old in glob.glob(os.path.join(lab.cache_directory(), "results-*")):
        if not os.path.exists("/proc/" + old.rpartition("-")[2]):  # that session has ended
            shutil.rmtree(old, ignore_errors=True)
    return os.path.join(lab.cache_directory(), f"results-{os.getpid()}")


@pytest.fixture(scope="session")
def boots(request: pytest.FixtureRequest) -> Iterator[Boots]:
    if not os.environ.get("CI") and not os.environ.get("PGPREEMPTCHECK_LAB"):
        pytest.skip("boots real kernels for ten minutes, and installs QEMU: set PGPREEMPTCHECK_LAB=1 (CI does it)")
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("the kernel lab needs root and apt-get (Debian or Ubuntu)")
    names: dict[str, None] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        name = callspec.params.get("boot") if callspec else None
        if name in PLANS and item.get_closest_marker("lab"):
            names[name] = None
    try:
        lab.setup()
    except lab.LabError as error:
        pytest.skip(str(error))
    started = Boots(list(names), results_folder())
    yield started
    started.close()
