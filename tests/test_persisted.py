"""Huge pages after a reboot: from the command line, sysctl.d, tmpfiles.d, units and late writers.

Right values: Documentation/admin-guide/mm/hugetlbpage.rst, runs of real kernels (a 7.0 kernel under QEMU for numbers,
order and nodes), the manuals of systemd, tuned and cloud-init.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

import pytest

from pgpreemptcheck.facts import kernel_command_line, persisted, writers
from pgpreemptcheck.facts.persisted import Persisted, PersistedPool
from pgpreemptcheck.values import Fact, Known, Unknown
from tests.fakehost import FakeHost

M2, G1 = 2 << 20, 1 << 30
Files = Mapping[str, "str | bytes | int | tuple[str, str]"]
ETC = "/etc/systemd/system"
LIB = "/usr/lib/systemd/system"
SYSFS = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
NODE0 = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
NODE1 = NODE0.replace("node0", "node1")


def boot(
    files: Files | None = None,
    line: str | Unknown = "quiet",
    *,
    live: bool = True,
    architecture: str = "x86",
    version: tuple[int, int] | None = None,
    uid: int = 0,
) -> Persisted:
    command_line: Fact[str] = line if isinstance(line, Unknown) else Known(line, "next boot")
    return persisted.read(
        FakeHost(files or {}, live=live, uid=uid),
        command_line,
        Known(M2, "built in"),
        Known((M2, G1), "sysfs"),
        architecture,
        version,
    )


def pool(found: Persisted, size: int = M2) -> PersistedPool:
    assert not isinstance(found.pools, Unknown)
    (one,) = [pool for pool in found.pools if pool.page_bytes == Known(size, pool.page_bytes.source, "inferred")]  # type: ignore[union-attr]
    return one


def pages(found: Persisted, size: int = M2) -> int:
    fact = pool(found, size).pages
    assert isinstance(fact, Known), fact
    return fact.value


def source(found: Persisted, size: int = M2) -> str:
    fact = pool(found, size).pages
    assert isinstance(fact, Known), fact
    return fact.source


def why(found: Persisted, size: int = M2) -> str:
    fact = pool(found, size).pages
    assert isinstance(fact, Unknown), fact
    assert fact.hint
    return fact.reason


def nodes(found: Persisted, size: int = M2) -> Mapping[str, int] | None:
    fact = pool(found, size).per_node
    return fact.value if isinstance(fact, Known) else None


# the command line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "small", "large"),
    [
        ("quiet", 0, 0),
        ("hugepages=50", 50, 0),
        ("hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=100", 100, 4),
        ("hugepagesz=2M hugepages=100 hugepages=7", 100, 0),
        ("hugepagesz=3M hugepages=100", 0, 0),
        ("hugepages=0:100,1:20", 120, 0),
        ("default_hugepagesz=1G hugepages=4", 0, 4),
        ("hugepages=50 sysctl.vm.nr_hugepages=70", 70, 0),
        ("sysctl.vm.nr_hugepages=70 hugepages=50", 70, 0),
        ("hugepages=50 sysctl/vm/nr_hugepages=70", 70, 0),
        ("hugepages=50 sysctl.vm.nr_hugepages=0x46", 70, 0),
        ("hugepages=50 sysctl.vm.nr_hugepages=many", 50, 0),
        ("hugepages=50 sysctl.vm.nr_hugepages=", 50, 0),
        ("sysctl.vm.nr_hugepages=70 sysctl.vm.nr_hugepages_mempolicy=2", 2, 0),
        ("default_hugepagesz=1G hugepages=1 hugepagesz=2M hugepages=0:20,1:30 sysctl.vm.nr_hugepages=2", 50, 2),
        ("init=/x -- hugepages=50", 0, 0),
    ],
)
def test_what_the_kernel_reserves(line: str, small: int, large: int) -> None:
    found = boot(line=line)
    assert (pages(found), pages(found, G1)) == (small, large)


def test_pages_by_node() -> None:
    assert nodes(boot(line="hugepages=0:100,1:20")) == {"node0": 100, "node1": 20}
    assert nodes(boot(line="hugepages=120")) is None
    # a total spreads over the nodes as the kernel likes
    assert nodes(boot(line="hugepages=0:100,1:20 sysctl.vm.nr_hugepages=120")) is None


def test_a_node_that_is_not_there_drops_the_parts_of_all_nodes() -> None:
    one: Files = {"/sys/devices/system/node/node0/cpulist": "0-1"}
    found = boot(one, "hugepages=0:20,1:30 hugepagesz=1G hugepages=0:2")
    assert (pages(found), pages(found, G1)) == (0, 2)
    assert isinstance(found.refused, Known) and "hugepages=1:30" in found.refused.value[0]
    two = {**one, "/sys/devices/system/node/node1/cpulist": "2-3"}
    assert pages(boot(two, "hugepages=0:20,1:30")) == 50


def test_an_old_kernel_takes_no_sysctl_parameter() -> None:
    line = "hugepages=50 sysctl.vm.nr_hugepages=70"
    assert pages(boot(line=line, version=(5, 7))) == 50
    assert pages(boot(line=line, version=(5, 8))) == 70


def test_a_cma_area_for_gigantic_pages_takes_their_place() -> None:
    found = boot(line="hugetlb_cma=4G hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=9")
    assert "hugetlb_cma" in why(found, G1)
    assert pages(found) == 9


def test_a_command_line_that_is_not_known_leaves_even_the_default_size_open() -> None:
    found = boot({"/etc/sysctl.d/a.conf": "vm.nr_hugepages = 9\n"}, Unknown("no boot loader found", "add /boot"))
    assert isinstance(found.default_bytes, Unknown)
    assert "no boot loader found" in why(found)


@pytest.mark.parametrize(
    ("architecture", "page", "expected"),
    [("x86", 4096, M2), ("arm64", 4096, M2), ("arm64", 1 << 14, 32 << 20), ("arm64", 1 << 16, 512 << 20)],
)
def test_the_default_size_once_default_hugepagesz_is_gone(architecture: str, page: int, expected: int) -> None:
    now = kernel_command_line.parse("default_hugepagesz=1G", "/proc/cmdline", Known(G1, "meminfo"), architecture)
    found = persisted.built_in_default(Known(G1, "meminfo"), now, architecture, Known(page, "sysconf"))
    assert isinstance(found, Known) and found.value == expected
    without = kernel_command_line.parse("quiet", "/proc/cmdline", Known(7, "meminfo"), architecture)
    assert persisted.built_in_default(Known(7, "meminfo"), without, architecture, Known(page, "")) == Known(
        7, "meminfo"
    )


def test_the_default_size_of_another_architecture_is_not_guessed() -> None:
    now = kernel_command_line.parse("default_hugepagesz=1G", "/proc/cmdline", Known(G1, "meminfo"), "powerpc")
    assert isinstance(persisted.built_in_default(Known(G1, "m"), now, "powerpc", Known(1 << 16, "")), Unknown)


# sysctl.d ---------------------------------------------------------------------------------------

SYSCTL = "/etc/sysctl.d/30-postgresql.conf"


def test_sysctl_sets_the_total_of_the_default_size() -> None:
    files = {SYSCTL: "vm.nr_hugepages = 500\nvm.nr_overcommit_hugepages=20\nvm.hugetlb_shm_group = 42\n"}
    found = boot(files, "hugepages=0:50,1:50 hugepagesz=1G hugepages=2")
    assert (pages(found), source(found)) == (500, f"{SYSCTL} line 1")
    assert nodes(found) is None
    assert pages(found, G1) == 2
    assert pool(found).overcommit == Known(20, f"{SYSCTL} line 2", "inferred")
    assert found.shm_group == Known(42, f"{SYSCTL} line 3", "inferred")


def test_sysctl_counts_pages_of_the_default_size_at_that_boot() -> None:
    found = boot({SYSCTL: "vm.nr_hugepages = 5\n"}, "default_hugepagesz=1G")
    assert (pages(found), pages(found, G1)) == (0, 5)
    assert found.default_bytes == Known(G1, "next boot default_hugepagesz=", "inferred")


def test_sysctl_can_take_the_kernels_reservation_back() -> None:
    assert pages(boot({SYSCTL: "vm.nr_hugepages = 0\n"}, "hugepages=500")) == 0


def test_what_the_kernel_refuses_changes_nothing_and_is_told() -> None:
    files = {SYSCTL: "vm.nr_hugepages = 10\n", "/etc/sysctl.d/99.conf": "vm.nr_hugepages = 10k\n"}
    found = boot(files, "hugepages=7 hugepages=8")
    assert pages(found) == 7, "the later line has the earlier one's place, and is refused"
    assert isinstance(found.refused, Known)
    assert found.refused.value == ("hugepages=8 (next boot)", "vm.nr_hugepages = 10k (/etc/sysctl.d/99.conf line 1)")


def test_the_policy_setting_sets_the_same_pool() -> None:
    assert pages(boot({SYSCTL: "vm.nr_hugepages = 10\nvm.nr_hugepages_mempolicy = 4\n"})) == 4
    assert pages(boot({SYSCTL: "vm.nr_hugepages_mempolicy = 4\nvm.nr_hugepages = 10\n"})) == 10


def test_a_file_in_run_may_never_come_again() -> None:
    reason = why(boot({"/run/sysctl.d/a.conf": "vm.nr_hugepages = 10\n"}))
    assert "/run/sysctl.d/a.conf line 1" in reason
    assert pages(boot({"/run/sysctl.d/a.conf": "vm.swappiness = 10\n"})) == 0


def test_an_unreadable_sysctl_file_is_a_gap() -> None:
    assert SYSCTL in why(boot({SYSCTL: errno.EACCES}))


def test_overcommit_of_gigantic_pages_is_not_promised() -> None:
    found = boot({SYSCTL: "vm.nr_overcommit_hugepages = 5\n"}, "default_hugepagesz=1G")
    assert isinstance(pool(found, G1).overcommit, Unknown)
    assert pool(found).overcommit == Known(0, pool(found).overcommit.source, "inferred")  # type: ignore[union-attr]


# tmpfiles.d -------------------------------------------------------------------------------------

TMPFILES = "/etc/tmpfiles.d/pages.conf"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"w {SYSFS} - - - - 100", 100),
        (f"w! {SYSFS} - - - - 100", 100),
        (f"w+ {SYSFS} - - - - 100", 100),
        (f"f+ {SYSFS} - - - - 100", 100),
        (f'w "{SYSFS}" - - - - 100', 100),
        (f"w\t{SYSFS}\t0644 root root -   100  ", 100),
        ("w /proc/sys/vm/nr_hugepages - - - - 0x64", 100),
        (f"f {SYSFS} - - - - 100", 7),  # the file is there: it is left as it is
        (f"# w {SYSFS} - - - - 100", 7),
        (f"w {SYSFS} - - - - 0x64", 7),  # sysfs takes decimal numbers only
        (f"w {SYSFS} - - - -", 7),
        (f"z {SYSFS} 0644 - - -", 7),
        (f"w {SYSFS} - - - - 100\nw {SYSFS} - - - - 200", 100),  # a duplicate: the first counts
    ],
)
def test_a_line_of_tmpfiles(line: str, expected: int) -> None:
    assert pages(boot({TMPFILES: line + "\n"}, "hugepages=7")) == expected


def test_tmpfiles_by_node() -> None:
    text = f"w {NODE0} - - - - 60\nw {NODE1} - - - - 40\n"
    found = boot({TMPFILES: text})
    assert (pages(found), nodes(found)) == (100, {"node0": 60, "node1": 40})
    found = boot({TMPFILES: f"w {NODE1} - - - - 40\n"}, "hugepages=0:5,1:5")
    assert (pages(found), nodes(found)) == (45, {"node0": 5, "node1": 40})
    assert "spread" in why(boot({TMPFILES: text}, "hugepages=10"))


def test_tmpfiles_and_sysctl_come_in_no_order() -> None:
    text = f"w {SYSFS} - - - - 100\n"
    assert pages(boot({TMPFILES: text, SYSCTL: "vm.nr_hugepages = 100\n"})) == 100
    reason = why(boot({TMPFILES: text, SYSCTL: "vm.nr_hugepages = 90\n"}))
    assert TMPFILES in reason and SYSCTL in reason
    assert pages(boot({TMPFILES: text, SYSCTL: "vm.nr_hugepages = 90\n"}, "default_hugepagesz=1G")) == 100


def test_a_glob_or_an_escape_in_tmpfiles_is_not_worked_out() -> None:
    assert TMPFILES in why(boot({TMPFILES: "w /sys/kernel/mm/hugepages/hugepages-*/nr_hugepages - - - - 9\n"}))
    assert TMPFILES in why(boot({TMPFILES: f"w {SYSFS} - - - - \\x39\n"}))


def test_tmpfiles_overcommit() -> None:
    path = SYSFS.replace("nr_hugepages", "nr_overcommit_hugepages")
    found = boot({TMPFILES: f"w {path} - - - - 30\n"})
    assert pool(found).overcommit == Known(30, f"{TMPFILES} line 1", "inferred")
    assert pages(found) == 0


# units ------------------------------------------------------------------------------------------

SERVER: Files = {
    f"{LIB}/postgresql-17.service": "[Unit]\nAfter=network.target\n[Service]\n"
    "ExecStart=/usr/pgsql-17/bin/postgres -D x\n",
    f"{ETC}/multi-user.target.wants/postgresql-17.service": ("->", f"{LIB}/postgresql-17.service"),
}
ECHO = f"/bin/sh -c 'echo 300 > {SYSFS}'"


def unit(
    command: str = ECHO,
    *,
    head: str = "",
    service: str = "Type=oneshot",
    wanted_by: str = "multi-user.target",
    more: Files | None = None,
) -> Persisted:
    files: dict[str, str | bytes | int | tuple[str, str]] = {
        **SERVER,
        f"{ETC}/pages.service": f"[Unit]\n{head}\n[Service]\n{service}\nExecStart={command}\n",
        **({f"{ETC}/{wanted_by}.wants/pages.service": ("->", f"{ETC}/pages.service")} if wanted_by else {}),
        **(more or {}),
    }
    return boot(files, "hugepages=7")


@pytest.mark.parametrize(
    "head",
    [
        "Before=postgresql-17.service",
        "Before=foo.service postgresql-17.service",
        "DefaultDependencies=no\nBefore=sysinit.target",
        "DefaultDependencies=no\nAfter=systemd-sysctl.service\nBefore=basic.target",
    ],
)
def test_a_unit_ordered_before_postgresql_sets_the_pool(head: str) -> None:
    found = unit(head=head)
    assert pages(found) == 300
    assert source(found).startswith(f"{ETC}/pages.service line ")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/sbin/sysctl -w vm.nr_hugepages=300", 300),
        ("-/usr/sbin/sysctl -q -w vm.swappiness=1 vm.nr_hugepages=300", 300),
        ('/usr/bin/bash -c "echo 300 > /proc/sys/vm/nr_hugepages"', 300),
        ("/sbin/sysctl -w vm.nr_hugepages=many", 7),
        ("/bin/true", 7),
    ],
)
def test_commands_that_are_worked_out(command: str, expected: int) -> None:
    assert pages(unit(command, head="Before=postgresql-17.service")) == expected


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/hugeadm --pool-pages-min 2MB:300",
        f"/bin/sh -c 'test -e /x && echo 300 > {SYSFS}'",
        f"/bin/sh -c 'echo $PAGES | tee {SYSFS}'",
        f"/bin/echo 300 > {SYSFS}",
    ],
)
def test_commands_that_are_not_worked_out(command: str) -> None:
    assert f"{ETC}/pages.service line " in why(unit(command, head="Before=postgresql-17.service"))


@pytest.mark.parametrize(
    ("head", "service", "reason"),
    [
        ("", "Type=oneshot", "nothing orders pages.service before PostgreSQL"),
        ("Before=postgresql.service", "Type=oneshot", "nothing orders"),  # another unit than the server's
        ("Before=postgresql-17.service", "", "not Type=oneshot"),
        ("Before=postgresql-17.service", "Type=simple", "not Type=oneshot"),
        ("Before=sysinit.target", "Type=oneshot", "a cycle"),
        ("Before=postgresql-17.service\nConditionVirtualization=no", "Type=oneshot", "under a condition"),
    ],
)
def test_a_unit_that_postgresql_does_not_wait_for(head: str, service: str, reason: str) -> None:
    found = unit(head=head, service=service)
    assert reason in why(found)
    if "condition" not in reason:
        assert isinstance(found.late_writers, Known) and len(found.late_writers.value) == 1


def test_a_late_unit_that_sets_the_same_number_does_no_harm() -> None:
    assert pages(unit(f"/bin/sh -c 'echo 7 > {SYSFS}'")) == 7


def test_the_server_can_name_the_order_too() -> None:
    drop_in = f"{ETC}/postgresql-17.service.d/pages.conf"
    assert pages(unit(more={drop_in: "[Unit]\nAfter=pages.service\nRequires=pages.service\n"})) == 300
    found = unit(wanted_by="", more={drop_in: "[Unit]\nAfter=pages.service\nRequires=pages.service\n"})
    assert pages(found) == 300


def test_what_the_server_runs_before_it_starts_is_in_time() -> None:
    drop_in = f"{ETC}/postgresql-17.service.d/pages.conf"
    files: Files = {**SERVER, drop_in: "[Service]\nExecStartPre=+/sbin/sysctl -w vm.nr_hugepages=300\n"}
    assert pages(boot(files)) == 300


def test_a_unit_that_nothing_starts_or_that_is_masked_does_nothing() -> None:
    assert pages(unit(wanted_by="")) == 7
    assert pages(unit(wanted_by="reboot.target")) == 7
    assert pages(unit(wanted_by="rescue.target")) == 7
    masked: Files = {
        **SERVER,
        f"{LIB}/pages.service": f"[Service]\nType=oneshot\nExecStart={ECHO}\n",
        f"{LIB}/multi-user.target.wants/pages.service": ("->", "../pages.service"),
        f"{ETC}/pages.service": ("->", "/dev/null"),
    }
    assert pages(boot(masked, "hugepages=7")) == 7


def test_an_early_unit_and_sysctl_come_in_no_order_unless_one_is_given() -> None:
    head = "DefaultDependencies=no\nBefore=sysinit.target"
    sysctl = {SYSCTL: "vm.nr_hugepages = 90\n"}
    assert "nothing orders them" in why(unit(head=head, more=sysctl))
    after = f"{head}\nAfter=systemd-sysctl.service systemd-tmpfiles-setup.service"
    assert pages(unit(head=after, more=sysctl)) == 300
    assert pages(unit(head="Before=postgresql-17.service", more=sysctl)) == 300


def test_on_debian_being_before_postgresql_service_is_not_enough() -> None:
    debian: Files = {
        "/etc/postgresql/17/main/postgresql.conf": "",
        f"{LIB}/postgresql@.service": "[Unit]\nBefore=postgresql.service\n[Service]\nType=forking\n"
        "ExecStart=-/usr/bin/pg_ctlcluster --skip-systemctl-redirect %i start\n",
        f"{LIB}/postgresql.service": "[Service]\nType=oneshot\nExecStart=/bin/true\n",
        f"{ETC}/multi-user.target.wants/postgresql.service": ("->", f"{LIB}/postgresql.service"),
        f"{ETC}/multi-user.target.wants/pages.service": ("->", f"{ETC}/pages.service"),
    }

    def with_before(name: str) -> Persisted:
        text = f"[Unit]\nBefore={name}\n[Service]\nType=oneshot\nExecStart={ECHO}\n"
        return boot({**debian, f"{ETC}/pages.service": text})

    assert "nothing orders" in why(with_before("postgresql.service"))
    assert pages(with_before("postgresql@17-main.service")) == 300


def test_a_script_that_a_unit_runs_is_looked_into() -> None:
    script: Files = {
        "/usr/lib/systemd/reserve": "#!/bin/sh\n# nr_hugepages\nfor n in 0 1; do\n"
        " echo 4 > /sys/devices/system/node/node$n/hugepages/hugepages-1048576kB/nr_hugepages\ndone\n"
    }
    found = unit("/usr/lib/systemd/reserve", head="DefaultDependencies=no\nBefore=sysinit.target", more=script)
    assert "/usr/lib/systemd/reserve line 4" in why(found, G1)


def test_a_unit_that_reads_sysctl_conf_again() -> None:
    conf = {"/etc/sysctl.conf": "vm.nr_hugepages = 40\n"}
    assert pages(unit("/sbin/sysctl -p", head="Before=postgresql-17.service", more=conf)) == 40
    assert "/etc/sysctl.conf line 1" in why(unit("/sbin/sysctl -p", more=conf))
    linked = {**conf, "/etc/sysctl.d/99-sysctl.conf": ("->", "/etc/sysctl.conf")}
    assert pages(unit("/sbin/sysctl --system", more=linked)) == 40, "it says nothing new"


def test_a_timer_starts_its_service() -> None:
    timer: Files = {
        f"{ETC}/pages.timer": "[Timer]\nOnBootSec=10\n",
        f"{ETC}/timers.target.wants/pages.timer": ("->", f"{ETC}/pages.timer"),
    }
    assert "pages.service" in why(unit(wanted_by="", more=timer))


# late writers -----------------------------------------------------------------------------------

TUNED: Files = {
    "/etc/tuned/active_profile": "site\n",
    f"{LIB}/tuned.service": "[Service]\nExecStart=/usr/sbin/tuned\n",
    f"{ETC}/multi-user.target.wants/tuned.service": ("->", f"{LIB}/tuned.service"),
}
LATE: list[tuple[Files, str]] = [
    ({"/etc/rc.local": f"#!/bin/sh\necho 300 > {SYSFS}\n"}, "/etc/rc.local line 2"),
    ({"/etc/rc.d/rc.local": "#!/bin/sh\nsysctl -w vm.nr_hugepages=300\n"}, "/etc/rc.d/rc.local line 2"),
    ({"/etc/rc.local": "#!/bin/sh\nhugeadm --pool-pages-min 2MB:300\n"}, "/etc/rc.local line 2"),
    (
        {"/etc/rc.local": "#!/bin/sh\nsysctl -p\n", "/etc/sysctl.conf": "vm.nr_hugepages=300\n"},
        "/etc/sysctl.conf line 1",
    ),
    (
        {**TUNED, "/etc/tuned/site/tuned.conf": "[main]\nsummary=x\n[sysctl]\nvm.nr_hugepages=300\n"},
        "site/tuned.conf line 4",
    ),
    (
        {
            **TUNED,
            "/etc/tuned/profiles/site/tuned.conf": "[main]\ninclude=throughput,base\n",
            "/usr/lib/tuned/base/tuned.conf": f"[sysfs]\n{SYSFS}=300\n",
        },
        "/usr/lib/tuned/base/tuned.conf line 2",
    ),
    (
        {
            **TUNED,
            "/etc/tuned/site/tuned.conf": "[script]\nscript=${i:PROFILE_DIR}/script.sh\n",
            "/etc/tuned/site/script.sh": f"#!/bin/sh\necho 300 > {SYSFS}\n",
        },
        "/etc/tuned/site/script.sh line 2",
    ),
    ({**TUNED, "/etc/sysctl.conf": "vm.nr_hugepages=300\n"}, "/etc/sysctl.conf line 1"),
    (
        {"/etc/cloud/cloud.cfg.d/90.cfg": "bootcmd:\n - sysctl -w vm.nr_hugepages=300\n"},
        "/etc/cloud/cloud.cfg.d/90.cfg line 2",
    ),
    ({"/var/lib/cloud/scripts/per-boot/p.sh": f"#!/bin/sh\necho 300 > {SYSFS}\n"}, "per-boot/p.sh line 2"),
    ({"/etc/cron.d/pages": f"@reboot root echo 300 > {SYSFS}\n"}, "/etc/cron.d/pages line 1"),
    ({"/etc/crontab": "@reboot root /opt/p.sh\n", "/opt/p.sh": f"#!/bin/sh\necho 300 > {SYSFS}\n"}, "/opt/p.sh line 2"),
    ({"/etc/libvirt/hooks/qemu": f"#!/bin/sh\necho 300 > {SYSFS}\n"}, "/etc/libvirt/hooks/qemu line 2"),
    (
        {"/etc/udev/rules.d/9.rules": 'SUBSYSTEM=="node", ATTR{hugepages/hugepages-2048kB/nr_hugepages}="8"\n'},
        "9.rules line 1",
    ),
]


class Executable(FakeHost):
    """Files with the x bit: rc.local is run only then."""

    def _status(self, path: str):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return replace(super()._status(path), mode=0o755)


def late(files: Files, line: str = "hugepages=7") -> Persisted:
    host = Executable(files, live=True)
    return persisted.read(host, Known(line, "next boot"), Known(M2, "built in"), Known((M2, G1), "sysfs"), "x86")


@pytest.mark.parametrize(("files", "place"), LATE, ids=[place for _, place in LATE])
def test_a_late_writer_makes_the_pool_unknown(files: Files, place: str) -> None:
    found = late(files)
    assert place in why(found)
    assert isinstance(found.late_writers, Known) and any(place in item for item in found.late_writers.value)


NOT_LATE: dict[str, Files] = {
    "a comment": {"/etc/rc.local": f"#!/bin/sh\n# echo 300 > {SYSFS}\n"},
    "tuned sets the same": {**TUNED, "/etc/tuned/site/tuned.conf": "[sysctl]\nvm.nr_hugepages=7\n"},
    "tuned is not started": {
        "/etc/tuned/active_profile": "site\n",
        "/etc/tuned/site/tuned.conf": "[sysctl]\nvm.nr_hugepages=300\n",
        **SERVER,
    },
    "another profile": {**TUNED, "/etc/tuned/other/tuned.conf": "[sysctl]\nvm.nr_hugepages=300\n"},
    "tuned does not read sysctl.conf": {
        **TUNED,
        "/etc/sysctl.conf": "vm.nr_hugepages=300\n",
        "/etc/tuned/tuned-main.conf": "reapply_sysctl = 0\n",
    },
    "tuned only feeds the boot loader": {
        **TUNED,
        "/etc/tuned/site/tuned.conf": "[bootloader]\ncmdline_x=+hugepages=9 sysctl.vm.nr_hugepages=9\n",
    },
    "runcmd runs once in the life of an instance": {
        "/etc/cloud/cloud.cfg.d/90.cfg": "runcmd:\n - sysctl -w vm.nr_hugepages=300\n"
    },
    "transparent huge pages": {
        "/etc/rc.local": "#!/bin/sh\necho never > /sys/kernel/mm/transparent_hugepage/enabled\n"
    },
    "other settings": {"/etc/rc.local": "#!/bin/sh\nsysctl -w vm.swappiness=1\n"},
}


@pytest.mark.parametrize("name", NOT_LATE)
def test_what_is_no_late_writer(name: str) -> None:
    assert pages(late(NOT_LATE[name])) == 7


def test_rc_local_without_the_x_bit_is_not_run() -> None:
    assert pages(boot({"/etc/rc.local": f"#!/bin/sh\necho 300 > {SYSFS}\n"}, "hugepages=7")) == 7


def test_a_late_writer_of_one_size_leaves_the_others() -> None:
    found = late({"/etc/rc.local": f"#!/bin/sh\necho 3 > {SYSFS.replace('2048', '1048576')}\n"}, "hugepages=7")
    assert pages(found) == 7
    assert "/etc/rc.local" in why(found, G1)


def test_places_that_could_not_be_read_are_named() -> None:
    found = boot({"/var/spool/cron/crontabs/root": errno.EACCES, "/etc/crontab": ""}, "hugepages=7")
    assert pages(found) == 7
    assert isinstance(found.not_read, Known) and "/var/spool/cron/crontabs/root" in found.not_read.value[0]


def test_nothing_odd_raises() -> None:
    odd: Files = {
        "/etc/tuned/active_profile": "../../x . " + "y" * 9000,
        f"{ETC}/pages.service": "[Service]\nExecStart=\n=\nExecStart\n\\\nnr_hugepages",
        f"{ETC}/a.target.wants/pages.service": "",
        f"{ETC}/a.target.wants/b@.service": "",
        f"{ETC}/multi-user.target.wants": "",
        TMPFILES: f'w\nw {SYSFS}\n"\nw "{SYSFS} - - - - 9\n{SYSFS} w\n',
        SYSCTL: b"\xff\xfe\x00vm.nr_hugepages\x00=\x00 5\n-\n=\n==\n-=\n",
        "/etc/cloud/cloud.cfg": "bootcmd: nr_hugepages\n",
        "/etc/crontab": "@reboot nr_hugepages /\n",
    }
    boot(odd)
    boot(odd, live=False)
    writers.read(FakeHost(odd, live=True))
