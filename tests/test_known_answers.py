"""The known answers: hosts whose verdict is known, each a change of the captured published host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pgpreemptcheck import run
from pgpreemptcheck.report.outcome import Report

DEMO = Path(run.__file__).parent / "demo/capture"
RELEASE = "7.0.0-rc6-next-20260331"


class Captured:
    """A captured host that can be changed file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def remove(self, *paths: str) -> None:
        for path in paths:
            (self.root / path).unlink()

    def said(self, **settings: str) -> None:
        """Change what the server said over SQL."""
        path = self.root / "sql/5432.json"
        answer: dict[str, Any] = json.loads(path.read_text())
        for row in answer["results"]["settings"]["rows"]:
            row[1] = settings.get(row[0], row[1])
        path.write_text(json.dumps(answer))

    def kernel(self, release: str, config: str, dmesg: str | None) -> None:
        """Another kernel: its release, the preemption lines of its build, and its log (None: rotated away)."""
        for path in ("uname.txt", "proc/cmdline"):
            self.replace(path, RELEASE, release)
        old = (self.root / f"boot/config-{RELEASE}").read_text()
        keep = "".join(line for line in old.splitlines(True) if "PREEMPT" not in line)
        self.remove(f"boot/config-{RELEASE}", "dmesg.txt")
        self.write(f"boot/config-{release}", keep.replace(RELEASE, release) + config)
        if dmesg is not None:
            self.write("dmesg.txt", dmesg)

    def huge(self) -> None:
        """The segment on 2 MB pages, of a pool that was filled."""
        self.replace("proc/2417/maps", "/dev/zero (deleted)", "/anon_hugepage (deleted)")
        self.write("proc/2417/pgpreemptcheck.json", json.dumps({"page_bytes": 2 << 20, "freelist": True}))
        self.said(huge_pages_status="on")
        for file, pages in (("nr_hugepages", 62759), ("free_hugepages", 60000), ("resv_hugepages", 60000)):
            self.write(f"sys/kernel/mm/hugepages/hugepages-2048kB/{file}", f"{pages}\n")
        for file, pages in (("nr_hugepages", 62759), ("free_hugepages", 60000)):
            self.write(f"sys/devices/system/node/node0/hugepages/hugepages-2048kB/{file}", f"{pages}\n")

    def check(self) -> Report:
        return run.check(run.Options(root=str(self.root)), rules_dirs=(), fail_on="high")

    def now(self) -> tuple[str, str, list[str]]:
        return answer(self.check())


@pytest.fixture
def host(tmp_path: Path) -> Captured:
    shutil.copytree(DEMO, tmp_path / "host")
    return Captured(tmp_path / "host")


def answer(report: Report, horizon: str = "now") -> tuple[str, str, list[str]]:
    """Return verdict, severity and the broken links."""
    verdict = next(v for v in report.evaluation.verdicts if v.horizon == horizon)
    return verdict.verdict, verdict.severity, [link.link for link in verdict.links if link.state == "broken"]


DYNAMIC = "CONFIG_PREEMPT_BUILD=y\nCONFIG_PREEMPT_DYNAMIC=y\n"


def test_the_published_host(host: Captured) -> None:
    assert host.now() == ("exposed", "high", [])


def test_the_same_on_huge_pages(host: Captured) -> None:
    host.huge()
    report = host.check()
    assert answer(report) == ("not-exposed", "info", ["base_pages"])
    assert not [f for f in report.evaluation.findings if f.rule == "PPC201" and f.status == "fail"]


def test_the_same_with_postgresql_19(host: Captured) -> None:
    host.write("proc/2417/pgpreemptcheck.json", '{"page_bytes": 4096, "symbols": ["StrategyGetBuffer", "s_lock"]}')
    assert host.now() == ("not-exposed", "info", ["freelist"])


def test_the_same_with_a_patched_kernel_in_mode_none(host: Captured) -> None:
    host.replace("dmesg.txt", "Dynamic Preempt: lazy", "Dynamic Preempt: none")
    assert host.now() == ("not-exposed", "info", ["kernel_preemption"])


def test_lockdown_and_no_log_leave_the_build(host: Captured) -> None:
    host.remove("dmesg.txt")
    report = host.check()
    verdict = next(v for v in report.evaluation.verdicts if v.horizon == "now")
    assert (verdict.verdict, verdict.certainty) == ("exposed", "inferred")
    assert report.facts.system.kernel.preemption.certainty in ("boot", "build")


def test_a_break_that_rests_on_inference_alone_is_probable(host: Captured) -> None:
    host.kernel("6.12.43+deb13-arm64", DYNAMIC + "CONFIG_PREEMPT_VOLUNTARY=y\n", None)
    assert host.now() == ("probably-not-exposed", "info", ["kernel_preemption"])


def test_8_cpus_and_1_gb_need_nothing(host: Captured) -> None:
    for path in ("sys/devices/system/cpu/online", "proc/2417/status"):
        host.replace(path, "0-95", "0-7")
    host.said(shared_buffers="131072", max_connections="100")
    host.write("data/pgdata/postgresql.conf", "max_connections = 100\nshared_buffers = 1GB\n")
    report = host.check()
    assert answer(report) == ("exposed", "info", [])
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("dmesg", "expected"),
    [
        ("Dynamic Preempt: voluntary\nDynamic Preempt: full\n", ("exposed", "high", [])),
        (None, ("probably-not-exposed", "info", ["kernel_preemption"])),
    ],
)
def test_full_written_at_run_time(host: Captured, dmesg: str | None, expected: tuple[str, str, list[str]]) -> None:
    host.kernel("6.12.43+deb13-arm64", DYNAMIC + "CONFIG_PREEMPT_VOLUNTARY=y\n", dmesg)
    assert host.now() == expected


def test_the_40_core_run_that_saw_no_loss(host: Captured) -> None:
    """7.0-rc7 built with defaults, PostgreSQL 18.3, 20 GB, 400 clients, huge pages not stated."""
    for path in ("sys/devices/system/cpu/online", "proc/2417/status"):
        host.replace(path, "0-95", "0-39")
    host.said(shared_buffers=str(20 * 131072), max_connections="400", huge_pages_status="unknown")
    host.write("data/pgdata/postgresql.conf", "max_connections = 400\nshared_buffers = 20GB\n")
    host.remove("proc/2417/maps")
    host.replace("proc/2417/status", "HugetlbPages:\t       0 kB\n", "")
    shutil.rmtree(host.root / "sys/kernel/mm/hugepages")
    host.remove("proc/meminfo")
    report = host.check()
    assert answer(report) == ("undetermined", "medium", [])
    shown = run.render(report, "text", colour=False, unicode=True)
    assert "saw no loss" in " ".join(shown.split()) and "storage" in shown


@pytest.mark.parametrize(
    ("release", "model"),
    [("7.0.3-arch1-1", "full"), ("6.17.5-200.fc42.x86_64", "lazy"), ("6.18.15+deb14-amd64", "lazy")],
)
def test_the_version_does_not_decide(host: Captured, release: str, model: str) -> None:
    option = {"full": "CONFIG_PREEMPT=y\n", "lazy": "CONFIG_PREEMPT_LAZY=y\n"}[model]
    host.kernel(release, DYNAMIC + "CONFIG_ARCH_HAS_PREEMPT_LAZY=y\n" + option, f"Dynamic Preempt: {model}\n")
    assert host.now() == ("exposed", "high", [])


@pytest.mark.parametrize("release", ["5.14.0-570.el9.aarch64", "6.12.43+deb13-arm64", "6.8.0-52-generic"])
def test_voluntary_distributions_are_not_exposed_now(host: Captured, release: str) -> None:
    host.kernel(release, DYNAMIC + "CONFIG_PREEMPT_VOLUNTARY=y\n", "Dynamic Preempt: voluntary\n")
    assert host.now() == ("not-exposed", "info", ["kernel_preemption"])


def test_preempt_none_on_7_is_ignored_and_said_so(host: Captured) -> None:
    host.replace("proc/cmdline", "ro ", "ro preempt=none ")
    host.replace(
        "dmesg.txt", "Dynamic Preempt: lazy", "Dynamic Preempt: unsupported mode: none\n[    0.0] Dynamic Preempt: lazy"
    )
    report = host.check()
    assert answer(report) == ("exposed", "high", [])
    assert [f.rule for f in report.evaluation.findings if f.status == "fail" and f.rule == "PPC102"]


def test_an_active_sched_ext_scheduler_leaves_it_undetermined(host: Captured) -> None:
    host.write("sys/kernel/sched_ext/state", "enabled\n")
    assert host.now()[0] == "undetermined"


def test_a_filled_pool_is_dormant_now_and_not_later(host: Captured) -> None:
    path = host.root / "sql/5432.json"
    said = json.loads(path.read_text())
    said["results"]["unused"] = {"rows": [["0"]]}
    path.write_text(json.dumps(said))
    report = host.check()
    dormant = {v.horizon: (v.dormant, v.severity) for v in report.evaluation.verdicts}
    assert dormant == {"now": (True, "low"), "crash_restart": (False, "high"), "next_start": (False, "high")}


def test_a_map_that_the_server_contradicts_settles_nothing(host: Captured) -> None:
    """Pieces of two times: neither what the map shows nor what the server said may make it safe or exposed."""
    host.huge()
    host.said(huge_pages_status="off")
    report = host.check()
    assert answer(report)[0] == "undetermined"
    backing = report.facts.clusters[0].segment
    assert backing is not None and "huge_pages_status = off" in backing.backing.reason  # type: ignore[union-attr]


def test_a_segment_larger_than_its_pool_settles_nothing(host: Captured) -> None:
    host.huge()
    host.remove("sql/5432.json")
    host.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "62758\n")
    report = host.check()
    assert answer(report)[0] == "undetermined"
    host.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "62759\n")
    assert answer(host.check())[0] == "not-exposed"
