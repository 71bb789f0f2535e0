"""The command line: exit codes, one line for what the user got wrong, and output that goes where it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pgpreemptcheck import __version__, cli, run
from pgpreemptcheck.report.text import WIDTH

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "pgpreemptcheck/demo/capture")


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def run_program(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["pgpreemptcheck", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return run_program


def empty_host(tmp_path: Path) -> str:
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("systemd\n")
    (tmp_path / "proc/1/cmdline").write_bytes(b"/sbin/init\0")
    return str(tmp_path)


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"pgpreemptcheck {__version__}\n", "")


def test_python_m() -> None:
    done = subprocess.run([sys.executable, "-m", "pgpreemptcheck", "--version"], capture_output=True, cwd=ROOT)
    assert done.stdout.decode() == f"pgpreemptcheck {__version__}\n"


def test_check_is_the_default_command(call: Call) -> None:
    with_name, without = call("check", "--root", DEMO), call("--root", DEMO)
    strip = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+Z")
    assert strip.sub("", with_name.out) == strip.sub("", without.out)
    assert with_name.code == without.code == 1


@pytest.mark.parametrize(("fail_on", "code"), [("critical", 0), ("high", 1), ("low", 1), ("never", 0)])
def test_fail_on(call: Call, fail_on: str, code: int) -> None:
    """The demo is exposed at high, and nothing of critical severity is unknown in it but cgroup limits."""
    done = call("demo", "--fail-on", fail_on)
    assert done.code == code and f"Exit code {code}" in done.out


def test_the_demo_is_the_published_case(call: Call) -> None:
    report = json.loads(call("demo", "--format", "json").out)
    verdicts = {v["horizon"]: (v["verdict"], v["severity"], v["certainty"]) for v in report["verdicts"]}
    assert verdicts["now"] == ("exposed", "high", "measured")
    assert verdicts["next_start"][:2] == ("exposed", "high")
    assert report["host"]["kernel"]["preemption"]["mode"]["value"] == "lazy"
    assert report["clusters"][0]["huge_pages_needed"]["now"]["value"] == 62759  # postgres -C of a real 17


@pytest.mark.parametrize(
    ("assumption", "link"),
    [
        ("cluster.segment.backing=huge", "base_pages"),
        ("cluster.freelist=false", "freelist"),
        ("host.kernel.preemption.mode=none", "kernel_preemption"),
        ("cluster.settings.max_connections=50", "parallelism"),
    ],
)
def test_each_link_breaks_the_chain(call: Call, assumption: str, link: str) -> None:
    done = call("--root", DEMO, "--assume", assumption, "--format", "json")
    report = json.loads(done.out)
    now = next(v for v in report["verdicts"] if v["horizon"] == "now")
    assert now["verdict"] == "not-exposed"
    assert [(x["link"], x["certainty"]) for x in now["links"] if x["state"] == "broken"] == [(link, "assumed")]
    assert now["certainty"] == "assumed" and report["assumed"] == [assumption]


def test_an_assumption_carries_over_to_what_follows_from_it(call: Call) -> None:
    done = call("--root", DEMO, "--assume", "next_start:cluster.settings.huge_pages=on", "--format", "json")
    report = json.loads(done.out)
    assert report["clusters"][0]["next_start"]["outcome"]["value"] == "refuses"
    failed = {(f["rule"], f["horizon"]) for f in report["findings"] if f["status"] == "fail"}
    assert ("PPC202", "next_start") in failed and ("PPC202", "crash_restart") not in failed


def test_assumed_cpus_are_those_that_clusters_may_use(call: Call) -> None:
    report = json.loads(call("--root", DEMO, "--assume", "next_start:host.cpus.online=2000", "--format", "json").out)
    broken = {v["horizon"]: [x["link"] for x in v["links"] if x["state"] == "broken"] for v in report["verdicts"]}
    assert broken == {"now": [], "crash_restart": [], "next_start": ["parallelism"]}


def test_what_is_to_come_is_foreseen_and_not_measured(call: Call) -> None:
    """An assumed start on huge pages: neither that nor the start without it is called measured."""
    text = call("--root", DEMO).out
    assert "next start: holds (foreseen):" in " ".join(text.split())
    text = call("--root", DEMO, "--assume", "next_start:cluster.settings.huge_pages=off").out
    assert "next start: holds (foreseen, assumed):" in " ".join(text.split())


def test_assumptions_are_shown(call: Call) -> None:
    assert "ASSUMED: host.cpus.online=8" in call("--root", DEMO, "--assume", "host.cpus.online=8").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--assume", "nonsense"], "expected [HORIZON:][CLUSTER:]FACT=VALUE"),
        (["--assume", "host.cpus.onlin=3"], "did you mean host.cpus.online?"),
        (["--assume", "host.cpus.online=many"], "expected integer"),
        (["--assume", "host.cpus.online=-3"], "expected integer, 0 or more"),
        (["--assume", "host.cpus.online=nan"], "expected integer, 0 or more"),
        (["--assume", "host.cpus.online=\u0663"], "expected integer, 0 or more"),
        (["--assume", "cluster.settings.wal_buffers=-2"], "expected integer, -1 or more"),
        (["--assume", "cluster.settings.shared_buffers=1e999"], "expected integer, -1 or more in bytes"),
        (["--assume", "host.kernel.preemption.mode=lasy"], '"lazy"'),
        (["--assume", "cluster.settings=3"], "has parts"),
        (["--assume", "tomorrow:host.cpus.online=3"], "expected a horizon"),
        (["--assume", "/data/pgdata:host.cpus.online=3"], "is a fact of the host"),
        (["--assume", "cluster.running=true"], "cannot be assumed"),
        (["--rules", "/nonexistent/rules"], "a folder of rule files is expected"),
        (["-o", "report.pdf"], "expected a name ending in .txt or .json"),
        (["-o", "/nonexistent/report.json"], "No such file or directory"),
        (["--dsn", "host=/tmp"], "give one of them"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(call: Call, arguments: list[str], words: str) -> None:
    done = call("--root", DEMO, *arguments)
    assert done.code == 2 and words in done.err
    assert done.err.count("\n") == 1 and done.out == ""


@pytest.mark.parametrize("arguments", [["--format", "xml"], ["frobnicate"], ["--no-such-option"], ["check", "extra"]])
def test_usage_errors_are_exit_2(call: Call, arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.code == 2 and "Error:" in done.err and done.out == ""


def test_no_host_is_one_line_and_exit_2(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    archive = tmp_path / "host.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(DEMO, arcname=".")
    archive.write_bytes(archive.read_bytes()[:-900])
    for root in (tmp_path / "empty", tmp_path / "missing", archive):
        done = call("--root", str(root))
        assert done.code == 2 and str(root) in done.err and done.err.count("\n") == 1


def test_a_broken_rule_file_names_file_and_line(call: Call, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "site.yaml").write_text("id: SITE1\ntitle: x\nscope: host\nseverity: low\nwhen: host.cpus.onlin > 3\n")
    done = call("--root", DEMO, "--rules", str(tmp_path))
    assert done.code == 2 and f"{tmp_path}/site.yaml:5: " in done.err and done.err.count("\n") == 1


def test_a_rule_of_the_users_own(call: Call, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "site.yaml").write_text(
        "thresholds:\n  high_cpus: {value: 128, unit: CPUs, reason: our hosts}\n---\n"
        "id: SITE1\ntitle: Too many CPUs\nscope: host\nseverity: critical\nhorizons: [now]\n"
        "when: host.cpus.online > 64\ntests:\n  - {facts: {host.cpus.online: 96}, expect: fail}\n"
    )
    report = json.loads(call("--root", DEMO, "--rules", str(tmp_path), "--format", "json").out)
    assert any(f["rule"] == "SITE1" and f["status"] == "fail" for f in report["findings"])
    assert {v["severity"] for v in report["verdicts"]} == {"medium"}  # 96 CPUs are no longer many
    assert call("rules", "test", "--rules", str(tmp_path)).code == 0


def test_without_postgresql(call: Call, tmp_path: Path) -> None:
    done = call("--root", empty_host(tmp_path))
    assert done.code == 0
    assert "No PostgreSQL was found on this host" in done.out and "pgpreemptcheck demo" in done.out


def test_a_capture_without_processes_may_hide_one(call: Call, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("ro\n")
    done = call("--root", str(tmp_path))
    assert done.code == 3 and "UNKNOWN: no PostgreSQL was seen, but one may be here" in done.out
    assert "No PostgreSQL was found" not in done.out


def test_output_files(call: Call, tmp_path: Path) -> None:
    text, data = tmp_path / "r.txt", tmp_path / "r.json"
    done = call("--root", DEMO, "-o", str(text), "-o", str(data))
    assert done.out == "" and done.code == 1
    assert "EXPOSED" in text.read_text() and json.loads(data.read_text())["exit_code"] == 1
    assert sorted(os.listdir(tmp_path)) == ["r.json", "r.txt"]


def test_facts_exit_0_with_gaps(call: Call, tmp_path: Path) -> None:
    done = call("facts", "--root", empty_host(tmp_path))
    document = json.loads(done.out)
    assert done.code == 0 and document["schema"] == "pgpreemptcheck.facts/1"
    assert set(document["host"]["kernel"]["release"]) == {"unknown", "hint"}


def test_an_internal_error_is_exit_70_and_in_the_json(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(run, "check", broken)
    done = call("--format", "json")
    document = json.loads(done.out)
    assert done.code == 70 and document["exit_code"] == 70 and "boom" in document["errors"][0]["reason"]
    assert "boom" in done.err and "Traceback" not in done.err
    assert call().out == ""


def test_no_traceback_when_the_reader_goes_away() -> None:
    command = f"{sys.executable} -m pgpreemptcheck demo | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, cwd=ROOT)
    assert done.stderr == b"" and done.stdout.startswith(b"pgpreemptcheck")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_pipe_gets_plain_text_in_80_columns(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pgpreemptcheck", "demo"], capture_output=True, cwd=ROOT, env=environment
    )
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text and done.stderr == b""
    assert max(map(len, text.splitlines())) <= WIDTH
    assert ("─" in text) == (encoding == "utf-8")


def test_the_readme_shows_the_demo_as_it_is(call: Call) -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme.partition("$ pgpreemptcheck demo\n")[2].partition("```")[0]
    shown = [line for line in block.splitlines() if line.strip() not in ("", "...")]
    out = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "DATE", call("demo").out).splitlines()
    assert len(shown) > 15
    for line in shown:
        assert re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "DATE", line) in out


def test_output_goes_into_a_device_and_through_a_link(call: Call, tmp_path: Path) -> None:
    os.symlink(tmp_path / "target.json", tmp_path / "link.json")
    assert call("--root", DEMO, "-o", str(tmp_path / "link.json")).code == 1
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "target.json").exists()
    call("--root", DEMO, "--format", "json", "-o", "/dev/null")
    assert not Path("/dev/null").is_file()


def test_error_lines_do_not_act_on_the_terminal(call: Call) -> None:
    done = call("--root", "/nonexistent/\x1b[31m\r\u202e")
    assert done.code == 2 and done.err.rstrip("\n").isprintable()


def test_a_closed_or_full_stdout_is_no_internal_error() -> None:
    for redirect, code in ((">&-", 1), (">/dev/full", 2)):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m pgpreemptcheck demo {redirect}"], capture_output=True, cwd=ROOT
        )
        assert done.returncode == code and b"internal error" not in done.stderr
