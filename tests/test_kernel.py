"""The kernel's facts. Right values: the kernel sources named in the readers, and what real kernels printed."""

from __future__ import annotations

import errno
import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgpreemptcheck.captured import open_captured
from pgpreemptcheck.facts import kernel, kernel_command_line, kernel_config, kernel_identity, kernel_log
from pgpreemptcheck.facts.kernel import DEBUGFS, Kernel, Preemption
from pgpreemptcheck.facts.kernel_command_line import CommandLine
from pgpreemptcheck.values import Fact, Known, Unknown
from tests.fakehost import FakeHost

GAP = Unknown("not asked")

DEBIAN_612 = (
    "Linux db 6.12.117+deb13-cloud-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.12.117-1 (2026-10-01) x86_64 GNU/Linux\n"
)
DEBIAN_70 = "Linux db 7.0.13+deb14-cloud-amd64 #1 SMP PREEMPT_DYNAMIC Debian 7.0.13-1 (2026-06-20) x86_64 GNU/Linux\n"

CONFIG_612 = """\
#
# Automatically generated file; DO NOT EDIT.
# Linux/x86 6.12.117 Kernel Configuration
#
CONFIG_PREEMPT_BUILD=y
# CONFIG_PREEMPT_NONE is not set
CONFIG_PREEMPT_VOLUNTARY=y
# CONFIG_PREEMPT is not set
# CONFIG_PREEMPT_RT is not set
CONFIG_PREEMPT_DYNAMIC=y
"""
CONFIG_70 = """\
#
# Automatically generated file; DO NOT EDIT.
# Linux/x86 7.0.13 Kernel Configuration
#
CONFIG_PREEMPT_BUILD=y
CONFIG_ARCH_HAS_PREEMPT_LAZY=y
# CONFIG_PREEMPT is not set
CONFIG_PREEMPT_LAZY=y
# CONFIG_PREEMPT_RT is not set
CONFIG_PREEMPT_DYNAMIC=y
# CONFIG_RSEQ_SLICE_EXTENSION is not set
"""
STATIC_LAZY = CONFIG_70.replace("CONFIG_PREEMPT_DYNAMIC=y", "# CONFIG_PREEMPT_DYNAMIC is not set")


def known(fact: Fact[Any]) -> Any:
    assert isinstance(fact, Known), fact
    return fact.value


def reason(fact: Fact[Any]) -> str:
    assert isinstance(fact, Unknown), fact
    assert fact.reason
    return fact.reason


def read(files: dict[str, Any], **options: Any) -> Kernel:
    return kernel.read(FakeHost(files, **options))


def mode(result: Kernel) -> tuple[str, str | None, str]:
    """Return the mode, how it is known, and how sure that is."""
    fact = result.preemption.mode
    assert isinstance(fact, Known), fact
    return fact.value, result.preemption.certainty, fact.certainty


# identity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "release", "arch", "token"),
    [
        # live: no GNU/Linux at the end; a node name that looks like a release
        ("Linux vm 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 x86_64", "6.18.44", "x86_64", "PREEMPT_DYNAMIC"),
        (
            "Linux 10.1.2.3 6.8.0-1 #1 SMP PREEMPT_DYNAMIC now aarch64 GNU/Linux",
            "6.8.0-1",
            "aarch64",
            "PREEMPT_DYNAMIC",
        ),
        # uname -srvm, busybox, Gentoo's processor words, quoted mail
        ("Linux 6.8.0-52 #53 SMP PREEMPT_RT Sat x86_64", "6.8.0-52", "x86_64", "PREEMPT_RT"),
        ("Linux a 6.6.1-0-lts #1-Alpine SMP PREEMPT Tue 2024 x86_64 Linux", "6.6.1-0-lts", "x86_64", "PREEMPT"),
        ("> Linux g 6.6.9 #1 SMP Mon x86_64 AMD EPYC 7702 AuthenticAMD GNU/Linux", "6.6.9", "x86_64", None),
        # the RT patches of RHEL 7
        (
            "Linux r 3.10.0-1.rt56 #1 SMP PREEMPT RT Fri x86_64 x86_64 GNU/Linux",
            "3.10.0-1.rt56",
            "x86_64",
            "PREEMPT_RT",
        ),
        ("$ uname -a\nLinux z 6.1.0 #1 SMP Tue Feb 24 s390x GNU/Linux\n", "6.1.0", "s390x", None),
    ],
)
def test_uname_forms(text: str, release: str, arch: str, token: str | None) -> None:
    identity = kernel_identity.identify(FakeHost({"uname.txt": text}))
    assert (known(identity.release), known(identity.arch), known(identity.token)) == (release, arch, token)


def test_a_version_cut_within_its_token_is_not_a_kernel_without_preemption() -> None:
    result = read({"uname.txt": "Linux h 7.0.1 #1-very-long SMP PREEMPT_DYN x86_64 GNU/Linux"})
    assert "cut" in reason(result.version_token)
    assert isinstance(result.preemption.preemptible, Unknown)


def test_proc_takes_the_place_of_uname() -> None:
    identity = kernel_identity.identify(
        FakeHost(
            {"/proc/version": "Linux version 5.14.0-427.el9.x86_64 (b@h) (gcc) #1 SMP PREEMPT_DYNAMIC Wed May 1\n"}
        )
    )
    assert known(identity.release) == "5.14.0-427.el9.x86_64"
    assert known(identity.token) == "PREEMPT_DYNAMIC"
    assert known(identity.arch) == "x86_64"  # from the release's suffix


def test_the_line_of_proc_version_given_as_uname() -> None:
    text = (
        "Linux version 6.1.0-13-amd64 (d@k) (gcc-12 (Debian 12.2.0-14) 12.2.0) #1 SMP PREEMPT_DYNAMIC Debian 6.1.55-1\n"
    )
    identity = kernel_identity.identify(FakeHost({"uname.txt": text}))
    assert (known(identity.release), known(identity.token)) == ("6.1.0-13-amd64", "PREEMPT_DYNAMIC")
    assert isinstance(identity.nodename, Unknown)


def test_the_kernel_log_names_the_kernel_where_nothing_else_does() -> None:
    log = "[    0.000000] Linux version 6.1.0-37-amd64 (d@k) (gcc-12) #1 SMP PREEMPT_DYNAMIC Debian 6.1.140-1\n"
    identity = kernel_identity.identify(FakeHost({"dmesg.txt": log}))
    assert (known(identity.release), known(identity.token)) == ("6.1.0-37-amd64", "PREEMPT_DYNAMIC")


def test_nothing_to_read_is_unknown_throughout() -> None:
    result = read({})
    for fact in (result.release, result.version_token, result.lockdown, result.build.model, result.command_line.text):
        reason(fact)
    assert result.preemption.certainty is None
    assert reason(result.preemption.mode)
    assert reason(result.preemption.preemptible)
    assert reason(result.preemption.ignored_parameter)


# build configuration ----------------------------------------------------------------------------


def test_an_option_name_is_matched_whole() -> None:
    text = """\
# Linux/x86 6.12.1 Kernel Configuration
CONFIG_PREEMPT_BUILD=y
CONFIG_HAVE_PREEMPT_DYNAMIC=y
CONFIG_PREEMPT_RT_DECOY=y
CONFIG_RISCV_ISA_V_PREEMPTIVE=y
CONFIG_DRM_I915_PREEMPT_TIMEOUT=640
XCONFIG_PREEMPT=y
#CONFIG_PREEMPT=y
CONFIG_PREEMPT_NONE=y
"""
    config = kernel_config.parse(text.encode(), "x")
    assert config.options == {"PREEMPT_NONE": "y"}
    assert known(kernel_config.build(config).model) == "none"
    assert known(kernel_config.build(config).dynamic) is False


@pytest.mark.parametrize(
    ("lines", "model"),
    [
        ("CONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_LAZY=y", "rt"),  # RT flavour of Debian 6.12
        ("CONFIG_PREEMPT=y\nCONFIG_PREEMPT_RT_FULL=y", "rt"),  # RT patches for 4.x
        ("CONFIG_PREEMPT__LL=y", "full"),
        ("CONFIG_PREEMPT=y\nCONFIG_PREEMPT_VOLUNTARY_BUILD=y", "full"),
        ("CONFIG_PREEMPT_NONE=y\r\n# CONFIG_PREEMPT is not set\r", "none"),
    ],
)
def test_models(lines: str, model: str) -> None:
    assert known(kernel_config.build(kernel_config.parse(lines.encode() + b"\n", "x")).model) == model


def test_preempt_auto_is_no_model_known_here() -> None:
    config = kernel_config.parse(b"# CONFIG_PREEMPT is not set\nCONFIG_PREEMPT_AUTO=y\n", "x")
    assert "PREEMPT_AUTO" in reason(kernel_config.build(config).model)


@pytest.mark.parametrize(
    ("version", "none_line", "expected"),
    [
        ("6.18.2", True, ("none", "voluntary", "full", "lazy")),
        ("7.0.0", False, ("full", "lazy")),
        ("7.0.0", True, None),  # the mode was put back by a patch: what preempt= takes is not known
        ("6.12.0", False, None),  # the restriction was backported, or the file is cut
    ],
)
def test_selectable_is_not_claimed_against_the_file(
    version: str, none_line: bool, expected: tuple[str, ...] | None
) -> None:
    lines = [
        f"# Linux/x86 {version} Kernel Configuration",
        "CONFIG_ARCH_HAS_PREEMPT_LAZY=y",
        "CONFIG_PREEMPT_DYNAMIC=y",
    ]
    if none_line:
        lines.append("# CONFIG_PREEMPT_NONE is not set")
    fact = kernel_config.selectable(kernel_config.parse("\n".join([*lines, ""]).encode(), "x"))
    assert (fact.value if isinstance(fact, Known) else None) == expected


def test_rt_and_dynamic_takes_full_and_lazy_only() -> None:
    text = b"CONFIG_ARCH_HAS_PREEMPT_LAZY=y\nCONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_DYNAMIC=y\n"
    assert known(kernel_config.selectable(kernel_config.parse(text, "x"))) == ("full", "lazy")


@pytest.mark.parametrize("path", kernel_config.places("6.12.117+deb13-cloud-amd64"))
def test_every_place_of_this_release_is_read(path: str) -> None:
    result = read({"uname.txt": DEBIAN_612, path: CONFIG_612})
    assert known(result.build.model) == "voluntary"
    assert result.build.model.source.startswith(path)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "files",
    [
        {"/boot/config-6.12.116+deb13-cloud-amd64": CONFIG_612},  # another release by its name
        {"/boot/config-6.12.117+deb13-cloud-amd64": CONFIG_70},  # by its header
        {"/lib/modules/6.12.117+deb13-cloud-amd64/build/.config": CONFIG_612.replace("DYNAMIC=y", "DYNAMIC=n")},
    ],
)
def test_a_configuration_of_another_kernel_is_never_used(files: dict[str, str]) -> None:
    result = read({"uname.txt": DEBIAN_612, **files})
    reason(result.build.model)
    assert isinstance(result.preemption.mode, Unknown)


def test_without_a_release_only_the_running_kernels_own_file_counts() -> None:
    assert isinstance(read({"/boot/config-7.0.13": CONFIG_70}).build.model, Unknown)
    packed = gzip.compress(CONFIG_70.encode())
    for data in (packed, CONFIG_70.encode()):
        assert known(read({"/proc/config.gz": data}).build.model) == "lazy"


def test_a_damaged_config_gz_falls_through_to_the_next_place() -> None:
    packed = gzip.compress(CONFIG_612.encode())
    files = {"uname.txt": DEBIAN_612, "/proc/config.gz": packed[:10] + b"\xff" * 40}
    assert "holds no kernel configuration" in reason(read(files).build.model)
    files["/boot/config-6.12.117+deb13-cloud-amd64"] = CONFIG_612
    assert known(read(files).build.model) == "voluntary"


def test_a_release_with_a_slash_names_no_file() -> None:
    text = "Linux h 6.1/../../etc/passwd #1 SMP PREEMPT now x86_64 GNU/Linux"
    assert "names no file" in reason(read({"uname.txt": text}).build.model)


def test_a_configuration_that_may_not_be_read_says_so() -> None:
    result = read({"uname.txt": DEBIAN_612, "/boot/config-6.12.117+deb13-cloud-amd64": errno.EACCES})
    assert "permission denied" in reason(result.build.model)


# command line -----------------------------------------------------------------------------------


def line(text: str, default: Fact[int] = GAP, architecture: str | None = "x86") -> CommandLine:
    return kernel_command_line.parse(text, "/proc/cmdline", default, architecture)


def requests(parsed: CommandLine) -> list[tuple[int | None, int, int | None]]:
    assert isinstance(parsed.huge_pages, tuple)
    return [
        (r.page_bytes.value if isinstance(r.page_bytes, Known) else None, known(r.pages), known(r.node))
        for r in parsed.huge_pages
    ]


M2, G1 = 2 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "expected", "ignored"),
    [
        ("hugepagesz=1G hugepages=0:4,1:8", [(G1, 4, 0), (G1, 8, 1)], ()),
        ("default-hugepagesz=1G hugepages=3", [(G1, 3, None)], ()),  # dashes are underscores
        ("hugepages=7 default_hugepagesz=2M", [(M2, 7, None)], ()),
        ("hugepages=7 hugepagesz=1g hugepages=2", [(None, 7, None), (G1, 2, None)], ()),
        ("hugepagesz=0x200000 hugepages=5", [(M2, 5, None)], ()),
        ("hugepagesz=2048K hugepages=5", [(M2, 5, None)], ()),
        # refused by the kernel, with what follows
        ("hugepagesz=3M hugepages=5", [], ("hugepagesz=3M", "hugepages=5")),
        ("hugepagesz=3M hugepages=5 hugepages=6", [(None, 6, None)], ("hugepagesz=3M", "hugepages=5")),
        ("hugepagesz=16M hugepages=5", [], ("hugepagesz=16M", "hugepages=5")),  # no such page on x86
        ("hugepagesz=2M hugepages=5 hugepages=6", [(M2, 5, None)], ("hugepages=6",)),
        ("hugepagesz=2M hugepages=5 hugepagesz=2M hugepages=6", [(M2, 5, None)], ("hugepagesz=2M", "hugepages=6")),
        ("hugepages=all", [], ("hugepages=all",)),
        ("hugepages=-5", [], ("hugepages=-5",)),
        # the kernel stops at what follows a number
        ("hugepages=8G", [(None, 8, None)], ()),
        ("hugepages=5 -- hugepagesz=1G hugepages=9", [(None, 5, None)], ()),
        ("xhugepages=5 hugepages", [], ()),
    ],
)
def test_huge_page_requests(text: str, expected: Any, ignored: tuple[str, ...]) -> None:
    parsed = line(text)
    assert requests(parsed) == expected
    assert known(parsed.ignored_huge_pages) == ignored


def test_other_architectures_have_other_sizes() -> None:
    parsed = line("hugepagesz=16M hugepages=5", architecture="powerpc")
    assert requests(parsed) == [(16 << 20, 5, None)]


def test_a_request_without_a_size_is_of_the_default_size() -> None:
    assert requests(line("hugepages=9", Known(512 << 20, "/proc/meminfo"), "arm64")) == [(512 << 20, 9, None)]
    # mm/hugetlb.c: the implicit setting overwrites an explicit one for the same size
    parsed = line("hugepages=9 hugepagesz=2M hugepages=4", Known(M2, "/proc/meminfo"))
    assert requests(parsed) == [(M2, 9, None)]
    assert known(parsed.ignored_huge_pages) == ("hugepages=4",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("preempt=none quiet preempt=full", "full"),
        ('x="a preempt=none b" preempt="lazy"', "lazy"),
        ("nopreempt=none preempt.x=1 preempt", None),
        ("quiet -- preempt=none", None),
        ("preempt=Full", "Full"),
        ("preempt=", ""),
    ],
)
def test_the_last_preempt_as_written(text: str, value: str | None) -> None:
    assert known(line(text).preempt) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("isolcpus=2-15", "2-15"),
        ("isolcpus=domain,managed_irq,1,3-4", "1,3-4"),
        ("isolcpus=managed_irq,2-15", None),  # without `domain` the scheduler still uses them
        ("isolcpus=1 isolcpus=2", "1"),
        ("quiet", None),
    ],
)
def test_isolated_cpus(text: str, value: str | None) -> None:
    assert known(line(text).isolated_cpus) == value


def test_several_lines_are_no_command_line() -> None:
    parsed = line("preempt=none\nroot=/dev/sda1\n")
    assert "more than one line" in reason(parsed.preempt)
    assert isinstance(parsed.huge_pages, Unknown)


@given(st.text())
def test_any_text_is_parsed_without_raising(text: str) -> None:
    parsed = line(text)
    if isinstance(parsed.huge_pages, tuple):
        assert all(known(request.pages) >= 0 for request in parsed.huge_pages)


# lockdown, sched_ext ----------------------------------------------------------------------------


def test_lockdown() -> None:
    path = "/sys/kernel/security/lockdown"
    assert known(read({path: "none [integrity] confidentiality\n"}).lockdown) == "integrity"
    assert "marks no state" in reason(read({path: "none integrity\n"}).lockdown)
    suspicion = reason(read({DEBUGFS: errno.EPERM}).lockdown)
    assert "suggests that it is on" in suspicion


def test_an_active_sched_ext_scheduler_leaves_the_mode_and_takes_the_conclusion() -> None:
    result = read({DEBUGFS: "full (lazy) \n", "/sys/kernel/sched_ext/state": "enabled\n"})
    assert mode(result) == ("lazy", "effective", "measured")
    assert "sched_ext" in reason(result.preemption.preemptible)
    result = read({DEBUGFS: "full (lazy) \n", "/sys/kernel/sched_ext/state": "disabled\n"})
    assert known(result.preemption.preemptible) is True


# the ladder -------------------------------------------------------------------------------------


def preemption(files: dict[str, Any], **options: Any) -> Preemption:
    return read(files, **options).preemption


def test_debugfs_beats_the_command_line_and_the_logs_are_not_asked() -> None:
    host = FakeHost(
        {
            "uname.txt": DEBIAN_612,
            "/proc/cmdline": "preempt=none\n",
            DEBUGFS: "none voluntary (full) \n",
            "dmesg.txt": "[ 0.1] Dynamic Preempt: none\n",
        }
    )
    assert mode(kernel.read(host)) == ("full", "effective", "measured")
    assert "dmesg" not in host.asked
    assert "journal" not in host.asked


@pytest.mark.parametrize("listing", ["", "\n", "full lazy \n", "(none) (full)\n"])
def test_debugfs_that_marks_no_mode_is_no_mode_but_a_dynamic_kernel(listing: str) -> None:
    result = read({DEBUGFS: listing})
    assert known(result.build.dynamic) is True
    assert "marks no mode" in reason(result.preemption.mode)
    result = read({DEBUGFS: listing, "dmesg.txt": "[    0.29] Dynamic Preempt: lazy\n"})
    assert mode(result) == ("lazy", "effective", "measured")


def test_the_last_mode_line_counts_and_a_refusal_is_no_mode() -> None:
    # written to sched/preempt at run time, 6.12 built voluntary: only the log shows it
    log = """\
[    0.000000] Linux version 6.12.117+deb13-cloud-amd64 (d@k) #1 SMP PREEMPT_DYNAMIC Debian
[    0.028401] Dynamic Preempt: unsupported mode: eager
[    0.292574] Dynamic Preempt: voluntary
[ 4711.000000] Dynamic Preempt: full
"""
    result = read({"uname.txt": DEBIAN_612, DEBUGFS: errno.EPERM, "dmesg.txt": log, "/proc/cmdline": "preempt=eager\n"})
    assert mode(result) == ("full", "effective", "measured")
    assert known(result.preemption.ignored_parameter) == "eager"


@pytest.mark.parametrize(
    "log",
    [
        "[ 0.02] Dynamic Preempt: unsupported mode: lazy\n[ 0.29] Dynamic Preempt: full\n",
        "[ 0.02] Dynamic Preempt: Unsupported preempt mode lazy, default to full\n",  # 5.12
        '[ 0.02] Unknown kernel command line parameters "splash preempt=lazy", will be passed to user space.\n',
    ],
)
def test_a_refusal_in_the_log_settles_what_is_ignored(log: str) -> None:
    result = preemption({"dmesg.txt": log, "/proc/cmdline": "splash preempt=lazy\n"})
    assert known(result.ignored_parameter) == "lazy"


def test_a_capture_of_a_host_under_lockdown(tmp_path: Path) -> None:
    (tmp_path / "uname.txt").write_text(DEBIAN_70)
    (tmp_path / "sys-kernel-debug-sched-preempt.error.txt").write_text("cat: preempt: Operation not permitted\n")
    result = kernel.read(open_captured(str(tmp_path)))
    assert "Operation not permitted" in reason(result.preemption.mode)
    assert "suggests that it is on" in reason(result.lockdown)
    (tmp_path / "dmesg.txt").write_text("[    0.29] Dynamic Preempt: lazy\n")
    assert mode(kernel.read(open_captured(str(tmp_path)))) == ("lazy", "effective", "measured")


def test_only_the_last_boot_in_a_log_counts() -> None:
    log = """\
Linux version 6.8.0 (x) #1
Dynamic Preempt: full
Linux version 6.8.0 (x) #1
"""
    assert kernel_log.scan(log, "x").mode is None


@pytest.mark.parametrize(
    "text",
    [
        "<6>[    0.070719] Dynamic Preempt: full",
        "[    0.070719][    T0] Dynamic Preempt: full",
        "[Tue Dec  1 01:02:03 2026] Dynamic Preempt: full",
        "kern  :info  : [    0.07] Dynamic Preempt: full",
        "2026-12-01T01:02:03,070719+00:00 Dynamic Preempt: full",
        "Dec  1 01:02:03 db1 kernel: [    0.07] Dynamic Preempt: full",
        "2026-12-01T01:02:03.123456+00:00 db1 kernel: Dynamic Preempt: full",
        "> [    0.07] Dynamic Preempt:\n>  full",  # quoted and wrapped by mail
        "[    0.07] Dynamic Preempt: full\r",
        "Dynamic Preempt: full",
    ],
)
def test_forms_of_a_mode_line(text: str) -> None:
    evidence = kernel_log.scan(f"before\n{text}\nafter\n", "x")
    assert evidence.mode is not None
    assert evidence.mode.value == "full"


@pytest.mark.parametrize(
    "text",
    [
        "Dec  1 01:02:03 db1 monitor[9]: saw Dynamic Preempt: none",
        "[    0.07] Dynamic Preempt: nonesuch",
        "[    0.07] Dynamic Preempt: unsupported mode: none",
        "[    0.07] Dynamic Preempt: Unsupported preempt mode none, default to full",
        "Oops: Oops: 0000 [#1] PREEMPT SMP NOPTI",  # printed for every dynamic build before 6.15
        "[ 1.0] CPU: 2 PID: 927 Comm: x Not tainted 6.1.0 #1\n[ 1.0] Hardware name: PREEMPT",
        "Linux version 6.8.0 (b@h) (gcc) #1 PREEMPT Mon Jan 1",
    ],
)
def test_what_is_no_mode_line(text: str) -> None:
    assert kernel_log.scan(text + "\n", "x").mode is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PREEMPT(none)", "none"),
        ("PREEMPT(voluntary)", "voluntary"),
        ("PREEMPT(full)", "full"),
        ("PREEMPT(lazy)", "lazy"),
        ("PREEMPT", "full"),
        ("PREEMPTLAZY", "lazy"),
        ("PREEMPT_RT", "rt"),
        ("PREEMPT_{RT,LAZY}", "rt"),
        ("PREEMPT_{RT,(lazy)}", "rt"),
        ("NONE", "none"),
        ("VOLUNTARY", "voluntary"),
        ("PREEMPT(undef)", None),  # a bug of 6.15 and 6.16-rc only
    ],
)
def test_backtrace_headers(text: str, expected: str | None) -> None:
    header = f"[ 9.1] CPU: 1 UID: 0 PID: 7 Comm: swapper/1 Not tainted 6.17.0 #1 {text}  Debian 1\n"
    found = kernel_log.scan(header, "x").mode
    assert (found.value if found else None) == expected


def test_undef_is_how_some_kernels_print_none() -> None:
    header = "CPU: 1 UID: 0 PID: 7 Comm: x Not tainted 6.15.2 #1 PREEMPT(undef)\n"
    found = kernel_log.scan(header, "x")
    assert found.mode is not None
    assert found.mode.value == "none"


def test_the_latest_of_mode_lines_and_backtraces_counts() -> None:
    log = """\
[ 1.0] CPU: 1 UID: 0 PID: 7 Comm: x Not tainted 6.17.0 #1 PREEMPT(lazy)
[ 2.0] Dynamic Preempt: full
"""
    assert known(kernel_log.scan(log, "x").mode) == "full"  # type: ignore[arg-type]
    assert known(kernel_log.scan("\n".join(reversed(log.splitlines())), "x").mode) == "lazy"  # type: ignore[arg-type]


def test_a_backtrace_of_another_kernel_does_not_count() -> None:
    header = "CPU: 1 UID: 0 PID: 7 Comm: x Not tainted 6.17.0 #1 PREEMPT(none)\n"
    assert kernel_log.scan(header, "x", (7, 0)).mode is None


def test_the_journal_is_asked_only_after_the_ring_buffer() -> None:
    files: dict[str, Any] = {
        "uname.txt": DEBIAN_70,
        "dmesg.txt": "[99.0] rotated\n",
        "journal.txt": "Dynamic Preempt: lazy\n",
    }
    host = FakeHost(files)
    result = kernel.read(host)
    assert mode(result) == ("lazy", "effective", "measured")
    assert "journal" in result.preemption.mode.source  # type: ignore[union-attr]
    host = FakeHost({**files, "dmesg.txt": "Dynamic Preempt: full\n"})
    assert mode(kernel.read(host))[0] == "full"
    assert "journal" not in host.asked


KERN_LOG = """\
Nov 30 10:00:00 db kernel: [    0.000000] Linux version 7.0.12+deb14-cloud-amd64 (d@k) #1 SMP PREEMPT_DYNAMIC
Nov 30 10:00:00 db kernel: [    0.292574] Dynamic Preempt: lazy
Dec  1 10:00:00 db kernel: [    0.000000] Linux version 7.0.13+deb14-cloud-amd64 (d@k) #1 SMP PREEMPT_DYNAMIC
Dec  1 10:00:00 db kernel: [    0.000000] Command line: BOOT_IMAGE=/vmlinuz ro preempt=full
Dec  1 10:00:00 db kernel: [    0.292574] Dynamic Preempt: full
"""


@pytest.mark.parametrize("path", kernel_log.LOG_FILES)
def test_log_files(path: str) -> None:
    files = {"uname.txt": DEBIAN_70, path: KERN_LOG, "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro preempt=full\n"}
    assert mode(read(files)) == ("full", "effective", "measured")


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"uname.txt": DEBIAN_612}, "of another kernel"),
        ({"/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro preempt=lazy\n"}, "another command line"),
        ({"/proc/stat": "cpu 1 2 3\nbtime 2100000000\n"}, "ends before this boot"),
        ({"/var/log/kern.log": "Dec  1 11:00:00 db kernel: Dynamic Preempt: full\n"}, "does not reach back"),
    ],
)
def test_a_log_file_of_another_boot_does_not_count(change: dict[str, str], objection: str) -> None:
    files = {
        "uname.txt": DEBIAN_70,
        "/var/log/kern.log": KERN_LOG,
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro preempt=full\n",
        **change,
    }
    host = FakeHost(files)
    identity = kernel_identity.identify(host)
    text = kernel_log.boot_log_file(host, identity.release, kernel.read(host).command_line.text)
    assert objection in reason(text)


def test_rt_is_not_one_of_the_modes_it_lists() -> None:
    uname = "Linux h 6.14.0 #1 SMP PREEMPT_RT Wed x86_64 GNU/Linux"
    assert mode(read({"uname.txt": uname, DEBUGFS: "(full) lazy \n"})) == ("rt", "effective", "measured")
    assert mode(read({"/sys/kernel/realtime": "1\n"})) == ("rt", "effective", "measured")
    assert isinstance(preemption({"/sys/kernel/realtime": "0\n"}).mode, Unknown)


def test_a_static_build_is_effective_and_ignores_every_preempt() -> None:
    uname = DEBIAN_70.replace("PREEMPT_DYNAMIC", "PREEMPT")
    path = "/usr/lib/modules/7.0.13+deb14-cloud-amd64/config"
    host = FakeHost({"uname.txt": uname, path: STATIC_LAZY, "/proc/cmdline": "preempt=full\n"})
    result = kernel.read(host)
    assert mode(result) == ("lazy", "effective", "measured")
    assert known(result.build.selectable) == ()
    assert known(result.preemption.ignored_parameter) == "full"
    assert "journal" not in host.asked


@pytest.mark.parametrize(
    ("cmdline", "expected", "ignored"),
    [
        ("ro quiet\n", ("voluntary", "boot", "inferred"), None),
        ("preempt=none\n", ("none", "boot", "inferred"), None),
        ("preempt=none preempt=full\n", ("full", "boot", "inferred"), None),  # each valid one is applied
        ("preempt=full preempt=bogus\n", ("full", "boot", "inferred"), "bogus"),
        ("preempt=lazy\n", ("voluntary", "boot", "inferred"), "lazy"),  # 6.12 has no lazy
        (None, ("voluntary", "build", "inferred"), "unknown"),
    ],
)
def test_build_and_the_last_valid_preempt(cmdline: str | None, expected: Any, ignored: str | None) -> None:
    files = {"uname.txt": DEBIAN_612, "/boot/config-6.12.117+deb13-cloud-amd64": CONFIG_612, DEBUGFS: errno.EPERM}
    if cmdline is not None:
        files["/proc/cmdline"] = cmdline
    result = read(files)
    assert mode(result) == expected
    fact = result.preemption.ignored_parameter
    assert (fact.value if isinstance(fact, Known) else "unknown") == ignored
    assert known(result.preemption.preemptible) == (expected[0] in ("full", "lazy"))
    assert result.preemption.preemptible.certainty == "inferred"  # type: ignore[union-attr]


def test_preempt_none_on_7_0_is_ignored() -> None:
    files = {"uname.txt": DEBIAN_70, "/proc/cmdline": "ro preempt=none\n"}
    path = "/usr/lib/modules/7.0.13+deb14-cloud-amd64/config"
    result = read({**files, path: CONFIG_70})
    assert mode(result) == ("lazy", "boot", "inferred")
    assert known(result.preemption.ignored_parameter) == "none"
    result = read({**files, DEBUGFS: "full (lazy) \n"})
    assert mode(result) == ("lazy", "effective", "measured")
    assert known(result.preemption.ignored_parameter) == "none"


def test_a_7_0_kernel_with_the_mode_put_back_is_believed() -> None:
    result = read({"uname.txt": DEBIAN_70, DEBUGFS: "(none) voluntary full lazy \n", "/proc/cmdline": "preempt=none\n"})
    assert mode(result) == ("none", "effective", "measured")
    assert known(result.preemption.ignored_parameter) is None


def test_the_version_alone_never_says_that_a_kernel_is_preemptible() -> None:
    result = preemption({"uname.txt": DEBIAN_70, "/proc/cmdline": "ro\n"})
    assert isinstance(result.mode, Unknown)
    assert isinstance(result.preemptible, Unknown)


def test_no_token_on_a_kernel_that_must_have_one_is_odd_not_safe() -> None:
    uname = "Linux h 7.0.13 #1 SMP Mon Jun 1 x86_64 GNU/Linux"
    assert isinstance(preemption({"uname.txt": uname}).preemptible, Unknown)
    # armv7 has no lazy model: voluntary is still possible there
    assert known(preemption({"uname.txt": uname.replace("x86_64", "armv7l")}).preemptible) is False


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("5.10.0", ("full", "effective", "measured")),
        ("5.15.0", ("full", "boot", "inferred")),  # dynamic kernels of 5.12 to 5.15 print it too, and are built full
        ("5.17.0", None),  # dynamic kernels of any build print it
        ("6.6.0", ("full", "effective", "measured")),
        ("6.13.0", None),  # full or lazy
    ],
)
def test_a_plain_preempt_token(release: str, expected: Any) -> None:
    uname = f"Linux h {release} #1 SMP PREEMPT Mon Jun 1 x86_64 GNU/Linux"
    result = read({"uname.txt": uname, "/proc/cmdline": "ro\n"})
    if expected:
        assert mode(result) == expected
    else:
        assert isinstance(result.preemption.mode, Unknown)
        fact = result.preemption.preemptible
        assert (fact.value if isinstance(fact, Known) else None) == (True if release == "6.13.0" else None)


@pytest.mark.parametrize(
    "files",
    [
        {"uname.txt": "Linux h 4.19.0-gvisor #1 SMP Sun Jan 10 15:06:54 PST 2016 x86_64 GNU/Linux"},
        {"uname.txt": "Linux h 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016 x86_64 GNU/Linux"},
        {"uname.txt": "Linux h 4.4.0 #1 SMP Mon x86_64 GNU/Linux", "dmesg.txt": "[   0.000000] Starting gVisor...\n"},
        {"uname.txt": "Linux h 4.4.0 #1 SMP Mon x86_64", "/proc/cmdline": "BOOT_IMAGE=/vmlinuz-4.4.0-gvisor quiet\n"},
        {"uname.txt": "Linux PC 4.4.0-19041-Microsoft #488-Microsoft Mon Sep 01 13:43:00 PST 2020 x86_64 GNU/Linux"},
    ],
)
def test_an_emulated_kernel_says_nothing_of_the_host(files: dict[str, str]) -> None:
    result = preemption(files)
    assert "emulated" in reason(result.mode)
    assert "emulated" in reason(result.preemptible)


def test_gaps_say_what_would_close_them() -> None:
    result = preemption({"uname.txt": DEBIAN_70, DEBUGFS: errno.EPERM, "dmesg.txt": errno.EPERM}, live=True)
    assert isinstance(result.mode, Unknown)
    assert "lockdown" in result.mode.reason
    assert "dmesg" in result.mode.reason
    assert result.mode.hint
    result = preemption({"uname.txt": DEBIAN_70}, live=True)
    assert isinstance(result.mode, Unknown)
    assert "mount -t debugfs" in result.mode.hint


def test_the_running_kernel_is_read_as_it_reports_itself() -> None:
    import os

    from pgpreemptcheck.host import LiveHost

    result = kernel.read(LiveHost())
    assert known(result.release) == os.uname().release
    with open("/proc/cmdline") as file:
        assert known(result.command_line.text) == file.read().strip()
