"""Real inputs with right answers, handed over beside the repository: skipped where they are not there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pgpreemptcheck.captured import open_captured
from pgpreemptcheck.facts import cpus, hugepages, kernel, kernel_command_line, kernel_identity, meminfo
from pgpreemptcheck.facts.kernel_config import version_of
from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Known, Unknown

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no cases at {CASES}")


def cases(kind: str) -> pytest.MarkDecorator:
    found = sorted((CASES / kind).glob("*.expect.json"))
    return pytest.mark.parametrize("expected", found, ids=[path.name.split("-")[0] for path in found])


def load(path: Path) -> tuple[dict[str, Any], Path]:
    """Return what is expected, and the input beside it (a file, or a directory laid out as on the host)."""
    expected = json.loads(path.read_text())
    source = path.parent / (expected.get("file") or expected["case"])
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    if not any(path.stat().st_size for path in files):
        pytest.skip(f"the input of {source.name} is empty: there is nothing to read the right values from")
    return expected, source


def lay(tmp_path: Path, files: dict[str, bytes]) -> Host:
    for name, data in files.items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return open_captured(str(tmp_path))


def plain(fact: Any) -> Any:
    """Return a fact's value, None where it is unknown; a gap must say why."""
    if isinstance(fact, Unknown):
        assert fact.reason
        return None
    assert fact.source
    return list(fact.value) if isinstance(fact.value, tuple) else fact.value


@cases("kernel-config")
@pytest.mark.parametrize("place", ["proc/config.gz", "boot"])
def test_kernel_config(expected: Path, place: str, tmp_path: Path) -> None:
    right, source = load(expected)
    data = source.read_bytes()
    if place == "boot":
        release = right["header_release"]
        token = "PREEMPT_RT" if right["build_default_preempt"] == "rt" else "PREEMPT_DYNAMIC"
        if not right["preempt_dynamic"] and token != "PREEMPT_RT":
            token = "PREEMPT" if right["build_default_preempt"] in ("full", "lazy") else ""
        uname = f"Linux host {release} #1 SMP {token} Mon Jan 1 00:00:00 UTC 2024 x86_64 GNU/Linux\n"
        files = {f"boot/config-{release}": data, "uname.txt": uname.encode()}
    else:
        files = {place: data}
    host = lay(tmp_path, files)
    result = kernel.read(host)
    build = result.build
    assert plain(build.model) == right["build_default_preempt"]
    assert plain(build.dynamic) == right["preempt_dynamic"]
    assert plain(build.selectable) == right["runtime_selectable"]
    assert plain(build.lazy_supported) == right["arch_has_preempt_lazy"]
    assert plain(build.rseq_slice_extension) == right["rseq_slice_extension"]
    assert plain(build.hugetlbfs) == right["hugetlbfs"]
    assert plain(build.cgroup_hugetlb) == right["cgroup_hugetlb"]
    assert plain(build.thp_default) == right["thp_default"]
    assert plain(build.base_page_bytes) == right["base_page_bytes"]
    assert plain(result.preemption.mode) == right["build_default_preempt"]
    certain = right["conclusion"] == "effective model = build default, certain"
    assert result.preemption.certainty == ("effective" if certain else "build")
    assert isinstance(result.preemption.mode, Known)
    assert result.preemption.mode.certainty == ("measured" if certain else "inferred")


@cases("uname")
def test_uname(expected: Path, tmp_path: Path) -> None:
    right, source = load(expected)
    host = lay(tmp_path, {"uname.txt": source.read_bytes()})
    identity = kernel_identity.identify(host)
    result = kernel.read(host, identity)
    assert plain(result.release) == right["release"]
    assert plain(identity.arch) == right["arch"]
    if right["version"] is not None:
        assert list(version_of(result.release.value) or ()) == right["version"]  # type: ignore[union-attr]
        assert (tuple(right["version"]) >= (7, 0)) == right["kernel_7_0_or_later"]
    if right.get("expect_error"):
        assert isinstance(result.version_token, Unknown)
    else:
        assert isinstance(result.version_token, Known)
        assert result.version_token.value == right["preempt_token"]
    alone = right["model_from_uname_alone"]
    preemption = result.preemption
    if alone in ("full", "rt"):
        assert plain(preemption.mode) == alone
        assert plain(preemption.preemptible) is True
    else:
        assert isinstance(preemption.mode, Unknown)
        if alone is None or alone.startswith("dynamic"):
            assert isinstance(preemption.preemptible, Unknown)
        elif alone.startswith("none or voluntary"):
            assert preemption.preemptible.value is False  # type: ignore[union-attr]
            assert preemption.preemptible.certainty == "inferred"  # type: ignore[union-attr]
        else:
            assert alone.startswith("full or lazy")
            assert plain(preemption.preemptible) is True
    if "base_page_hint" in right:
        assert plain(hugepages.read_memory(host).base_page_bytes) == right["base_page_hint"]
    if source.name.startswith("U27"):
        assert "Darwin" in result.release.reason  # type: ignore[union-attr]


@cases("cmdline")
def test_cmdline(expected: Path, tmp_path: Path) -> None:
    right, source = load(expected)
    host = lay(tmp_path, {"proc/cmdline": source.read_bytes()})
    line = kernel_command_line.read(host, meminfo.read(host).size("Hugepagesize"), None)
    assert plain(line.preempt) == right["preempt_requested"]
    assert plain(line.default_huge_page_bytes) == right["default_hugepagesz_bytes"]
    assert plain(line.transparent_hugepage) == right["transparent_hugepage"]
    if right.get("expect_error"):
        assert isinstance(line.text, Unknown)
        assert isinstance(line.huge_pages, Unknown)
        return
    assert isinstance(line.huge_pages, tuple)
    asked = [{"size_bytes": plain(pool.page_bytes), "pages": plain(pool.pages)} for pool in line.huge_pages]
    assert asked == [{"size_bytes": p["size_bytes"], "pages": p["pages"]} for p in right["requested_pools"]]
    assert plain(line.ignored_huge_pages) == []
    isolated = {"L07": "1-35,37-71", "L24": "2-15"}.get(source.name.split("-")[0])
    assert plain(line.isolated_cpus) == isolated


def test_cmdline_isolated_cpus_are_counted(tmp_path: Path) -> None:
    host = lay(tmp_path, {"proc/cmdline": (CASES / "cmdline" / "L07-reframer-isolated.txt").read_bytes()})
    assert plain(cpus.read(host).isolated) == 70


@cases("sched-preempt")
def test_sched_preempt(expected: Path) -> None:
    right, source = load(expected)
    result = kernel.read(open_captured(str(source)))
    mode = result.preemption.mode
    if right["effective"] == "unknown":
        assert isinstance(mode, Unknown)
        assert result.preemption.certainty is None
    else:
        assert plain(mode) == right["effective"]
        inferred = right.get("certainty") == "medium"
        assert result.preemption.certainty == ("boot" if inferred else "effective")
        assert isinstance(mode, Known)
        assert mode.certainty == ("inferred" if inferred else "measured")
        assert plain(result.preemption.preemptible) == (right["effective"] in ("full", "lazy", "rt"))
    assert plain(result.build.dynamic) == right["dynamic"]
    assert plain(result.build.selectable) == right["selectable"]
    if source.name.startswith("S01"):
        assert plain(result.preemption.ignored_parameter) == "voluntary"
    else:
        assert plain(result.preemption.ignored_parameter) is None


@cases("proc-meminfo")
@pytest.mark.parametrize("form", ["directory", "tar.gz"])
def test_proc_meminfo(expected: Path, form: str, tmp_path: Path) -> None:
    right, source = load(expected)
    root = str(source)
    if form == "tar.gz":
        root = shutil.make_archive(os.fspath(tmp_path / "host"), "gztar", root)
    host = open_captured(root)
    pages, memory = hugepages.read(host), hugepages.read_memory(host)
    assert plain(memory.total_bytes) == right["mem_total_bytes"]
    assert plain(memory.hugetlb_bytes) == right["hugetlb_line_bytes"]
    assert plain(pages.default_bytes) == right["default_huge_page_bytes"]
    if right["pools"] is None:
        assert isinstance(pages.pools, Unknown)
        assert "lines" in pages.pools.reason or "not one" in pages.pools.reason
        return
    assert isinstance(pages.pools, tuple)
    if not right["pools"]:  # only the size is known: totals unknown, not 0
        assert all(isinstance(pool.total, Unknown) and isinstance(pool.free, Unknown) for pool in pages.pools)
        return
    assert [pool_values(pool) for pool in pages.pools] == [
        {key: value for key, value in pool.items() if key not in ("total_bytes", "evidence")} for pool in right["pools"]
    ]
    in_bytes = [plain(pool.page_bytes) * plain(pool.total) for pool in pages.pools]
    assert in_bytes == [pool["total_bytes"] for pool in right["pools"]]
    assert sum(in_bytes) == right["all_pools_bytes"]
    per_node: dict[str, dict[str, int]] = {}
    for pool in pages.pools:
        for node, total in (plain(pool.per_node) or {}).items():
            per_node.setdefault(node, {})[str(plain(pool.page_bytes))] = total
    assert per_node == (right["per_node"] or {})


def pool_values(pool: hugepages.Pool) -> dict[str, int | None]:
    free, reserved = plain(pool.free), plain(pool.reserved)
    return {
        "size_bytes": plain(pool.page_bytes),
        "total": plain(pool.total),
        "free": free,
        "reserved": reserved,
        "surplus": plain(pool.surplus),
        "available": max(0, free - (reserved or 0)),
    }
