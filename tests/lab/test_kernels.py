"""The tool on real kernels, each answer against what the kernel and the server themselves say.

What is expected comes from the guest's own debugfs, kernel log, smaps and SQL (`truth`, see job.py), and from
what Debian's kernels are known to be built as (MODES); never from the tool.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.lab.conftest import PLANS, PROJECT, Boots, Step

pytestmark = pytest.mark.lab

X86 = [name for name in PLANS if "arm64" not in name]
DEFAULT = [name for name in X86 if "preempt=" not in name]  # booted without preempt=: all groups of steps
ARM64 = [name for name in PLANS if "arm64" in name]

# The mode in force after the boot, read off these kernels.
MODES = {
    "6.1": "voluntary",
    "6.1 preempt=none": "none",
    "6.12": "voluntary",
    "6.12 preempt=none": "none",
    "6.18": "lazy",
    "6.18 preempt=none": "none",
    "7.0": "lazy",
    "7.0 preempt=none": "lazy",  # refused: "Dynamic Preempt: unsupported mode: none"
    "7.3": "lazy",
    "7.3 preempt=none": "lazy",
    "arm64 6.12": "voluntary",  # not dynamic: no debugfs file and no log line
    "arm64 7.3-16k": "lazy",
}
PREEMPTIBLE = ("full", "lazy", "rt")
DEBUGFS_SOURCE = "/sys/kernel/debug/sched/preempt"
LINKS = ("freelist", "base_pages", "kernel_preemption", "parallelism")


# what the kernel says ------------------------------------------------------------------------------


def active(truth: dict[str, Any]) -> str:
    """Return the name in parentheses in the kernel's own debugfs file."""
    found = re.search(r"\((\w+)\)", truth["debugfs_preempt"])
    assert found, truth["debugfs_preempt"]
    return found[1]


def logged(truth: dict[str, Any]) -> str:
    """Return the mode of the kernel log's last line."""
    return str(truth["log"][-1]).removeprefix("Dynamic Preempt: ")


def built(truth: dict[str, Any]) -> str:
    for mode in ("none", "voluntary", "lazy"):
        if f"CONFIG_PREEMPT_{mode.upper()}=y" in truth["build"]:
            return mode
    assert "CONFIG_PREEMPT=y" in truth["build"], truth["build"]
    return "full"


def has_procmap_query(truth: dict[str, Any]) -> bool:
    return isinstance(truth["cluster"]["segment"]["procmap_query"], int)


# what the tool says --------------------------------------------------------------------------------


def preemption(step: Step) -> dict[str, Any]:
    assert "host" in step.report, (step.exit, step.stderr, step.report)
    found: dict[str, Any] = step.report["host"]["kernel"]["preemption"]
    return found


def cluster(step: Step) -> dict[str, Any]:
    assert len(step.report["clusters"]) == 1, (step.report["clusters"], step.stderr)
    found: dict[str, Any] = step.report["clusters"][0]
    return found


def verdict(step: Step, horizon: str = "now") -> dict[str, Any]:
    found = [item for item in step.report["verdicts"] if item["horizon"] == horizon]
    assert len(found) == 1, step.report["verdicts"]
    return dict(found[0])


def links(step: Step, horizon: str = "now") -> dict[str, str]:
    """Return the state of each link; one that rests on less than a measurement has ` (inferred)` or such after it."""
    states = {}
    for link in verdict(step, horizon)["links"]:
        weak = "" if link["certainty"] == "measured" or link["state"] == "unknown" else f" ({link['certainty']})"
        states[link["link"]] = link["state"] + weak
    return states


def failed(step: Step, fact: str) -> list[dict[str, Any]]:
    """Return the findings that fail because of a fact."""
    findings = [item for item in step.report["findings"] if item["status"] == "fail"]
    return [item for item in findings if any(proof["fact"].endswith(fact) for proof in item["evidence"])]


# the mode, rung by rung -----------------------------------------------------------------------------


@pytest.mark.parametrize("boot", X86)
def test_root_reads_the_mode_off_debugfs(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "root")
    assert active(step.truth) == MODES[boot]
    found = preemption(step)
    assert found["mode"]["value"] == MODES[boot]
    assert found["mode"]["source"].startswith(DEBUGFS_SOURCE)
    assert found["certainty"] == "effective"


@pytest.mark.parametrize("boot", X86)
def test_without_debugfs_the_kernel_log_tells(boots: Boots, boot: str) -> None:
    """Both as root, and as a user where the kernel lets everybody read its log."""
    for name in ("root-log", "nobody-log"):
        step = boots.step(boot, name)
        assert logged(step.truth) == MODES[boot]
        found = preemption(step)
        assert found["mode"]["value"] == MODES[boot], name
        assert "kernel log" in found["mode"]["source"], name
        assert found["certainty"] == "effective", name


@pytest.mark.parametrize("boot", X86)
def test_without_debugfs_and_log_the_mode_is_that_of_build_and_boot(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "nobody")
    found = preemption(step)
    if not step.truth["configs"]:
        assert found["mode"]["unknown"] and found["mode"]["hint"], found
        assert found["certainty"] is None
        assert links(step)["kernel_preemption"] == "unknown"
        return
    assert found["mode"]["value"] == MODES[boot]  # nothing was written since the boot
    honoured = "preempt=" in step.truth["command_line"] and built(step.truth) != MODES[boot]
    assert ("/proc/cmdline" if honoured else step.truth["configs"][0]) in found["mode"]["source"]
    assert found["certainty"] == "boot"


@pytest.mark.parametrize("boot", X86)
def test_a_parameter_that_the_kernel_refuses_is_found(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "root")
    refused = "Dynamic Preempt: unsupported mode: none" in step.truth["log"]
    assert refused == (boot in ("7.0 preempt=none", "7.3 preempt=none"))
    for name in ("root", "root-log", "nobody-log", "nobody"):
        found = preemption(boots.step(boot, name))["ignored_parameter"]
        assert found.get("value", "not known") == ("none" if refused else None), (name, found)
    assert bool(failed(step, "kernel.preemption.ignored_parameter")) == refused


@pytest.mark.parametrize("boot", DEFAULT)
def test_build_configuration_is_that_of_the_kernel(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "root")
    build = step.report["host"]["kernel"]["build"]
    assert step.report["host"]["kernel"]["release"]["value"] == step.truth["release"]
    assert step.report["host"]["kernel"]["version_token"]["value"] == "PREEMPT_DYNAMIC"
    if not step.truth["configs"]:
        assert "unknown" in build["model"], build
        return
    assert build["model"]["value"] == built(step.truth) == MODES[boot]
    assert build["dynamic"]["value"] is True
    assert step.truth["configs"][0] in build["model"]["source"]
    names = re.findall(r"\w+", step.truth["debugfs_preempt"])  # the kernel lists what it takes
    assert sorted(build["selectable"]["value"]) == sorted(names)


@pytest.mark.parametrize("boot", ["7.3"])
def test_the_only_config_is_beside_the_modules(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "root")
    path = f"/usr/lib/modules/{step.truth['release']}/config"
    if step.truth["configs"] != [path]:
        pytest.skip(f"this kernel's packages keep the config at {step.truth['configs']}")
    assert path in step.report["host"]["kernel"]["build"]["model"]["source"]


# the mode written at run time -------------------------------------------------------------------------


@pytest.mark.parametrize("boot", DEFAULT)
def test_a_mode_written_at_run_time_counts(boots: Boots, boot: str) -> None:
    for name in ("full-root", "full-log"):
        step = boots.step(boot, name)
        assert step.refused == "" and active(step.truth) == logged(step.truth) == "full"
        assert preemption(step)["mode"]["value"] == "full", name
        assert preemption(step)["certainty"] == "effective", name
        assert links(step) == dict.fromkeys(LINKS, "holds"), name
        assert verdict(step)["verdict"] == "exposed", name


@pytest.mark.parametrize("boot", DEFAULT)
def test_a_mode_written_at_run_time_and_out_of_reach_is_not_claimed_away(boots: Boots, boot: str) -> None:
    """The kernel runs `full`, and neither debugfs nor the log can be read."""
    step = boots.step(boot, "full-nobody")
    assert active(step.truth) == "full"
    found = verdict(step)["verdict"]
    if not step.truth["configs"]:
        assert found == "undetermined"
    elif built(step.truth) in PREEMPTIBLE:
        assert found in ("exposed", "undetermined")
        assert links(step)["kernel_preemption"] == "holds (inferred)"
    else:
        assert found == "probably-not-exposed"
        assert links(step)["kernel_preemption"] == "broken (inferred)"


@pytest.mark.parametrize("boot", DEFAULT)
def test_none_written_at_run_time(boots: Boots, boot: str) -> None:
    """Up to 6.19 the kernel takes it; from 7.0 on it answers EINVAL and stays as it was (full, written before)."""
    step = boots.step(boot, "none-log")
    assert step.refused == ("Invalid argument" if boot in ("7.0", "7.3") else "")
    expected = "full" if step.refused else "none"
    assert logged(step.truth) == active(step.truth) == expected
    assert preemption(step)["mode"]["value"] == expected
    assert verdict(step)["verdict"] == ("exposed" if step.refused else "not-exposed")


# verdicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boot", X86)
def test_chain_of_a_running_cluster_on_base_pages(boots: Boots, boot: str) -> None:
    """17 on base pages, 100 connections on 16 CPUs: all depends on the kernel."""
    step = boots.step(boot, "root")
    truth = step.truth["cluster"]
    assert truth["server_version"].startswith("17.") and truth["huge_pages_status"] == "off"
    assert int(truth["max_connections"]) > step.truth["cpus"] == 16
    preempts = MODES[boot] in PREEMPTIBLE
    assert links(step) == {**dict.fromkeys(LINKS, "holds"), "kernel_preemption": "holds" if preempts else "broken"}
    found = verdict(step)
    assert found["verdict"] == ("exposed" if preempts else "not-exposed")
    assert found["certainty"] == "measured"
    # 16 CPUs and 128 MB of buffers: nobody is to be woken for that
    assert found["severity"] in ("low", "info")
    assert step.exit == 0
    assert verdict(step, "next_start")["verdict"] == found["verdict"]


@pytest.mark.parametrize("boot", X86)
def test_a_user_without_rights_is_told_no_more_than_is_known(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "nobody")
    found = verdict(step)["verdict"]
    preempts = MODES[boot] in PREEMPTIBLE
    # never a measured "not exposed" from build and command line, and never "not exposed" at all where it is
    assert found in (("exposed", "undetermined") if preempts else ("probably-not-exposed",))
    segment = cluster(step)["segment"]
    assert step.truth["cluster"]["segment"]["page_bytes"] == step.truth["page_bytes"]
    assert segment["base_pages"]["value"] is True and "status" in segment["base_pages"]["source"]
    assert "unknown" in segment["bytes"] and segment["bytes"]["hint"]
    assert "Traceback" not in step.stderr and step.exit == 3
    assert all(item["reason"] for item in step.report["unknowns"])


@pytest.mark.parametrize("boot", DEFAULT)
def test_a_hidden_server_is_not_taken_for_none(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "hidepid")
    assert step.truth["cluster"]["pid"]  # it runs
    assert step.report["clusters"] == []
    assert step.exit == 3
    hidden = [item for item in step.report["unknowns"] if "hidden_clusters" in item["fact"]]
    assert hidden and "hidepid" in hidden[0]["reason"] and hidden[0]["hint"]
    assert not [item for item in step.report["verdicts"] if item["verdict"] in ("not-exposed", "probably-not-exposed")]
    assert not [item for item in step.report["verdicts"] if "no PostgreSQL was found" in str(item.get("because"))]


# memory -----------------------------------------------------------------------------------------------


def check_memory(step: Step) -> None:
    """Compare memory, pools and segment with sysconf, sysfs, smaps and the server's own word."""
    host, truth = step.report["host"], step.truth
    assert host["cpus"]["online"]["value"] == truth["cpus"]
    assert host["memory"]["base_page_bytes"]["value"] == truth["page_bytes"]
    assert host["memory"]["total_bytes"]["value"] == truth["mem_total_bytes"]
    assert host["huge_pages"]["default_bytes"]["value"] == truth["default_huge_page_bytes"]
    names = {"total": "nr_hugepages", "surplus": "surplus_hugepages"}
    pools = {
        pool["page_bytes"]["value"]: {kernel: pool[tool]["value"] for tool, kernel in names.items()}
        for pool in host["huge_pages"]["pools"]
    }
    assert pools == {
        int(size) * 1024: {kernel: pool[kernel] for kernel in names.values()} for size, pool in truth["pools"].items()
    }
    # a backend may touch a page between the two looks, so of free and reserved only the difference is steady
    for pool in host["huge_pages"]["pools"]:
        kernel = truth["pools"][str(pool["page_bytes"]["value"] // 1024)]
        assert pool["free"]["value"] - pool["reserved"]["value"] == kernel["free_hugepages"] - kernel["resv_hugepages"]
    segment, real = cluster(step)["segment"], truth["cluster"]["segment"]
    assert segment["bytes"]["value"] == real["bytes"]
    assert segment["page_bytes"]["value"] == real["page_bytes"]
    huge = truth["cluster"]["huge_pages_status"] == "on"
    assert huge == (real["page_bytes"] > truth["page_bytes"])
    assert segment["backing"]["value"] == ("huge" if huge else "base")


@pytest.mark.parametrize("boot", X86)
def test_base_pages(boots: Boots, boot: str) -> None:
    for name in ("root", "root-log"):
        step = boots.step(boot, name)
        check_memory(step)
        assert cluster(step)["segment"]["backing"]["value"] == "base"
    findings = failed(boots.step(boot, "root"), "segment.backing")
    assert findings, "huge_pages=try that silently runs without them is not reported"


@pytest.mark.parametrize("boot", DEFAULT)
def test_huge_pages(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "huge")
    check_memory(step)
    assert cluster(step)["segment"]["backing"]["value"] == "huge"
    assert links(step)["base_pages"] == "broken"
    assert verdict(step)["verdict"] == "not-exposed"
    # the pool was filled at run time to what is needed and three more: enough for another start
    assert cluster(step)["next_start"]["outcome"]["value"] == "starts"
    assert cluster(step)["crash_restart"]["outcome"]["value"] == "starts"


@pytest.mark.parametrize("boot", DEFAULT)
def test_huge_pages_seen_without_rights_prove_nothing(boots: Boots, boot: str) -> None:
    """HugetlbPages of /proc/PID/status is more than 0: that suggests huge pages for the segment, no more."""
    step = boots.step(boot, "huge-nobody")
    assert step.truth["cluster"]["huge_pages_status"] == "on"
    assert links(step)["base_pages"] in ("unknown", "broken (inferred)", "broken (heuristic)")
    preempts = MODES[boot] in PREEMPTIBLE
    assert verdict(step)["verdict"] in ("undetermined", "probably-not-exposed")
    assert preempts or verdict(step)["verdict"] == "probably-not-exposed"


@pytest.mark.parametrize("boot", DEFAULT)
def test_pool_cut_below_a_running_segment(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "huge-cut")
    pool = step.truth["pools"][str(step.truth["default_huge_page_bytes"] // 1024)]
    assert pool["surplus_hugepages"] > 0 and step.truth["cluster"]["huge_pages_status"] == "on"
    check_memory(step)
    assert verdict(step)["verdict"] == "not-exposed"
    found = cluster(step)
    preempts = MODES[boot] in PREEMPTIBLE
    for name in ("crash_restart", "next_start"):
        assert found[name]["outcome"]["value"] == "falls-back", name
        assert verdict(step, name)["verdict"] == ("exposed" if preempts else "not-exposed"), name
        assert links(step, name)["base_pages"].startswith("holds"), name
    assert int(step.truth["cluster"]["shared_memory_size_in_huge_pages"]) == found["huge_pages_needed"]["now"]["value"]


@pytest.mark.parametrize("boot", DEFAULT)
def test_page_size_of_the_mapping_is_asked_of_the_kernel_where_it_can_tell(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "huge")
    assert has_procmap_query(step.truth) == (boot != "6.1")  # since 6.11
    source = cluster(step)["segment"]["page_bytes"]["source"]
    assert ("PROCMAP_QUERY" in source) == has_procmap_query(step.truth), source


# arm64 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boot", ARM64)
def test_arm64_facts(boots: Boots, boot: str) -> None:
    """Neither kernel is dynamic: the build alone decides, and that is the effective mode."""
    step = boots.step(boot, "facts")
    assert step.exit == 0 and step.report["schema"] == "pgpreemptcheck.facts/1"
    assert step.truth["page_bytes"] == (16384 if "16k" in boot else 4096)
    assert step.report["host"]["arch"]["value"] == step.truth["arch"] == "aarch64"
    assert step.truth["log"] == [] and "Error" in step.truth["debugfs_preempt"]
    assert built(step.truth) == MODES[boot] and "CONFIG_PREEMPT_DYNAMIC=y" not in step.truth["build"]
    found = preemption(step)
    assert found["mode"]["value"] == MODES[boot]
    assert step.truth["configs"][0] in found["mode"]["source"]
    assert found["certainty"] == "effective"
    token = "PREEMPT" if " PREEMPT " in step.truth["version"] else None
    assert step.report["host"]["kernel"]["version_token"]["value"] == token
    # nothing reads preempt= on a kernel that is not dynamic
    asked = "none" if "preempt=none" in step.truth["command_line"] else None
    assert found["ignored_parameter"]["value"] == asked
    check_memory(step)


@pytest.mark.parametrize("boot", ARM64)
def test_arm64_huge_pages(boots: Boots, boot: str) -> None:
    step = boots.step(boot, "huge")
    assert step.truth["cluster"]["huge_pages_status"] == "on"
    assert step.truth["cluster"]["segment"]["page_bytes"] == (32 << 20 if "16k" in boot else 2 << 20)
    check_memory(step)
    assert links(step)["base_pages"] == "broken"
    assert verdict(step)["verdict"] == "not-exposed"
    cut = boots.step(boot, "huge-cut")
    check_memory(cut)
    assert cluster(cut)["crash_restart"]["outcome"]["value"] == "falls-back"


# captured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boot", [name for name in PLANS if "capture" in PLANS[name].groups])
def test_a_capture_says_what_the_live_host_said(boots: Boots, boot: str) -> None:
    live = boots.step(boot, "root")
    argv = [sys.executable, "-m", "pgpreemptcheck", "check", "--format", "json", "--root", boots.out(boot) + "/capture"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=PROJECT, env={**os.environ, "NO_COLOR": "1"})
    assert done.stdout, done.stderr
    captured = Step(json.loads(done.stdout), live.truth, done.returncode, done.stderr)
    assert preemption(captured)["mode"]["value"] == active(live.truth)
    assert preemption(captured)["certainty"] == "effective"
    segment = cluster(captured)["segment"]
    assert segment["bytes"]["value"] == live.truth["cluster"]["segment"]["bytes"]
    assert segment["backing"]["value"] == "base"
    assert verdict(captured)["verdict"] == verdict(live)["verdict"]
