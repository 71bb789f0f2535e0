"""sysctl.d: which line wins, against a real systemd-sysctl (--cat-config, which writes nothing) and its documents."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgpreemptcheck.facts import sysctls
from pgpreemptcheck.facts.sysctls import Assignment, Setting, Sysctls
from pgpreemptcheck.host import RootedHost
from pgpreemptcheck.values import Known, Unknown
from tests.fakehost import FakeHost

PAGES = "vm.nr_hugepages"


def read(files: dict[str, str | bytes | int | tuple[str, str]], *, live: bool = True, with_run: bool = True) -> Sysctls:
    return sysctls.read(FakeHost(files, live=live), with_run=with_run)


def pages(files: dict[str, str | bytes | int | tuple[str, str]]) -> object:
    value = read(files).value(PAGES)
    return (value.value, value.source) if isinstance(value, Known) else value


# the grammar: sysctl.d(5), and the source where the manual is silent ------------------------------


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("vm.nr_hugepages = 5", PAGES, "5"),
        ("vm/nr_hugepages=5", PAGES, "5"),
        ("  vm.nr_hugepages\t=\t5  \r", PAGES, "5"),
        ("-vm.nr_hugepages = 5", PAGES, "5"),
        ("- vm.nr_hugepages = 5", PAGES, "5"),
        ("-vm.nr_hugepages", PAGES, None),
        ("vm//nr_hugepages = 5", PAGES, "5"),
        ("/vm/nr_hugepages = 5", PAGES, "5"),
        ("vm.nr_hugepages =", PAGES, ""),
        ("vm.nr_hugepages = 5 # five", PAGES, "5 # five"),
        ("vm.nr_hugepages = 5 \\", PAGES, "5 \\"),
        ("vm.nr_hugepages = a=b", PAGES, "a=b"),
        ("vm/nr.hugepages = 5", "vm.nr/hugepages", "5"),  # a dot inside a name: no such file, but no error of ours
        ("vm.nr/hugepages = 5", "vm.nr/hugepages", "5"),
        ("v*.nr_hugepages = 5", "v*.nr_hugepages", "5"),
    ],
)
def test_a_line(line: str, key: str, value: str | None) -> None:
    assert list(sysctls.parse(line, "/f")) == [Assignment(key, value, "/f", 1)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        " \t",
        "# vm.nr_hugepages = 5",
        "  ; vm.nr_hugepages = 5",
        "vm.nr_hugepages 5",
        "vm.nr_hugepages: 5",
        "net.core.somaxconn = 5",
        "\ufeffvm.nr_hugepages = 5",  # a byte order mark is part of the name
        "vmx.nr_hugepages = 5",
    ],
)
def test_a_line_that_sets_nothing_here(line: str) -> None:
    assert list(sysctls.parse(line, "/f")) == []


def test_lines_are_counted_as_an_editor_does() -> None:
    text = "# one\r\n\r\nvm.nr_hugepages = 3\r\n\n-vm.nr_overcommit_hugepages = 4"
    assert [(line.key, line.line) for line in sysctls.parse(text, "/f")] == [
        (PAGES, 3),
        ("vm.nr_overcommit_hugepages", 5),
    ]


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("100", 100),
        ("0", 0),
        ("0x64", 100),
        ("0144", 100),
        ("100 # pages", 100),
        ("100\t200", 100),
        ("08", None),
        ("100k", None),
        ("1,5", None),
        ("-1", None),
        ("+1", None),
        ("", None),
        ("5 \\", 5),
        ("5\\", None),
        ("18446744073709551615", (1 << 64) - 1),
        ("18446744073709551616", None),
        ("9" * 30, None),
    ],
)
def test_a_number_as_the_kernel_reads_it(written: str, number: int | None) -> None:
    assert sysctls.kernel_number(written) == number


# precedence -------------------------------------------------------------------------------------


def test_files_are_sorted_by_name_over_all_folders() -> None:
    files: dict[str, str | bytes | int | tuple[str, str]] = {
        "/etc/sysctl.d/10-pages.conf": "vm.nr_hugepages = 1\n",
        "/usr/lib/sysctl.d/90-vendor.conf": "vm.nr_hugepages = 2\n",
        "/usr/local/lib/sysctl.d/50-site.conf": "vm.nr_hugepages = 3\n",
        "/etc/sysctl.d/99-not.conf.bak": "vm.nr_hugepages = 4\n",
        "/etc/sysctl.d/.99-hidden.conf": "vm.nr_hugepages = 5\n",
    }
    assert pages(files) == ("2", "/usr/lib/sysctl.d/90-vendor.conf line 1")


@pytest.mark.parametrize("hidden_by", ["/dev/null", "../../dev/null", "/nowhere"])
def test_a_link_to_nothing_hides_the_name_below(hidden_by: str) -> None:
    vendor = "/usr/lib/sysctl.d/90-vendor.conf"
    files: dict[str, str | bytes | int | tuple[str, str]] = {vendor: "vm.nr_hugepages = 2\n", "/dev/null": errno.EINVAL}
    assert pages(files) == ("2", f"{vendor} line 1")
    value = read({**files, "/etc/sysctl.d/90-vendor.conf": ("->", hidden_by)}).value(PAGES)
    assert isinstance(value, Known) and value.value is None


def test_sysctl_conf_counts_only_by_its_link() -> None:
    text = "vm.nr_hugepages = 7\n"
    unlinked = read({"/etc/sysctl.conf": text, "/etc/sysctl.d/README": ""})
    assert unlinked.value(PAGES) == Known(None, "sysctl.d: no line sets it")
    assert unlinked.procps_only == (Setting(PAGES, Known("7", "/etc/sysctl.conf line 1"), "procps"),)

    linked = read({"/etc/sysctl.conf": text, "/etc/sysctl.d/99-sysctl.conf": ("->", "/etc/sysctl.conf")})
    assert linked.settings == (Setting(PAGES, Known("7", "/etc/sysctl.conf line 1"), "systemd-sysctl"),)
    assert linked.procps_only == ()

    same = read({"/etc/sysctl.conf": text, "/etc/sysctl.d/a.conf": text})
    assert same.procps_only == (), "the two do not differ"


def test_what_only_lies_in_run_is_gone_at_boot() -> None:
    files: dict[str, str | bytes | int | tuple[str, str]] = {
        "/run/sysctl.d/50-a.conf": "vm.nr_hugepages = 1\n",
        "/usr/lib/sysctl.d/50-a.conf": "vm.nr_hugepages = 2\n",
    }
    assert pages(files) == ("1", "/run/sysctl.d/50-a.conf line 1")
    assert read(files, with_run=False).value(PAGES) == Known("2", "/usr/lib/sysctl.d/50-a.conf line 1")


# globs ------------------------------------------------------------------------------------------


def test_a_glob_leaves_out_what_has_a_line_of_its_own() -> None:
    text = "vm.nr_*hugepages = 4\nvm.nr_hugepages = 9\n"
    assert {s.name: s.value for s in read({"/etc/sysctl.d/a.conf": text}).settings} == {
        PAGES: Known("9", "/etc/sysctl.d/a.conf line 2"),
        "vm.nr_overcommit_hugepages": Known("4", "/etc/sysctl.d/a.conf line 1"),
    }


def test_a_name_excluded_from_globs_is_set_by_none_and_takes_an_earlier_line_back() -> None:
    assert read({"/etc/sysctl.d/a.conf": "-vm.nr_hugepages\n*/nr_hugepages = 4\n"}).settings == ()
    assert read({"/etc/sysctl.d/a.conf": "vm.nr_hugepages = 4\n-vm.nr_hugepages\n"}).settings == ()
    assert pages({"/etc/sysctl.d/a.conf": "-vm.nr_hugepages\nvm.nr_hugepages = 4\n"}) == (
        "4",
        "/etc/sysctl.d/a.conf line 2",
    )


def test_the_later_of_two_globs_wins_and_the_same_again_keeps_its_place() -> None:
    assert pages({"/etc/sysctl.d/a.conf": "vm.nr_h* = 1\nvm.*_hugepages = 2\n"}) == ("2", "/etc/sysctl.d/a.conf line 2")
    text = "vm.nr_h* = 1\nvm.*_hugepages = 2\nvm.nr_h* = 1\n"
    assert pages({"/etc/sysctl.d/a.conf": text}) == ("2", "/etc/sysctl.d/a.conf line 2")


def test_a_glob_that_is_not_worked_out_is_a_gap() -> None:
    value = read({"/etc/sysctl.d/a.conf": "vm.nr_{huge,small}pages* = 1\n"}).value(PAGES)
    assert isinstance(value, Unknown) and "/etc/sysctl.d/a.conf line 1" in value.reason


# gaps -------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_hides_what_came_before_it_only() -> None:
    files: dict[str, str | bytes | int | tuple[str, str]] = {
        "/etc/sysctl.d/10.conf": "vm.nr_hugepages = 1\nvm.nr_overcommit_hugepages = 1\n",
        "/etc/sysctl.d/20.conf": errno.EACCES,
        "/etc/sysctl.d/30.conf": "vm.nr_hugepages = 1\n",
    }
    found = read(files)
    assert found.value(PAGES) == Known("1", "/etc/sysctl.d/30.conf line 1")
    overcommit = found.value("vm.nr_overcommit_hugepages")
    assert isinstance(overcommit, Unknown) and "/etc/sysctl.d/20.conf" in overcommit.reason
    assert isinstance(found.value(sysctls.SHM_GROUP), Unknown), "the file may set what no other file names"


def test_a_folder_that_cannot_be_listed_leaves_nothing_sure() -> None:
    found = read({"/etc/sysctl.d": errno.EACCES, "/usr/lib/sysctl.d/99.conf": "vm.nr_hugepages = 1\n"})
    assert isinstance(found.value(PAGES), Unknown)


def test_a_capture_without_sysctl_folders_says_nothing() -> None:
    assert isinstance(read({"/proc/meminfo": ""}, live=False).value(PAGES), Unknown)
    assert read({"/proc/meminfo": ""}, live=True).value(PAGES) == Known(None, "sysctl.d: no line sets it")


def test_a_folder_named_as_a_file_is_a_gap_only_where_it_may_hide_one() -> None:
    odd: dict[str, str | bytes | int | tuple[str, str]] = {"/etc/sysctl.d/a.conf/x": ""}
    assert read(odd).value(PAGES) == Known(None, "sysctl.d: no line sets it")
    assert isinstance(read({**odd, "/usr/lib/sysctl.d/a.conf": "vm.nr_hugepages = 1\n"}).value(PAGES), Unknown)


def test_a_credential_may_be_read_last() -> None:
    files: dict[str, str | bytes | int | tuple[str, str]] = {"/etc/sysctl.d/a.conf": "vm.nr_hugepages = 1\n"}
    assert isinstance(read({**files, "/etc/credstore/sysctl.extra": "vm.nr_hugepages = 2\n"}).value(PAGES), Unknown)
    assert isinstance(read({**files, "/etc/credstore/sysctl.extra": "kernel.x = 2\n"}).value(PAGES), Known)


# a real systemd-sysctl --------------------------------------------------------------------------

PROGRAM = "/usr/lib/systemd/systemd-sysctl"
TOPS = ("etc", "run", "usr/local/lib", "usr/lib")
END = "=== end of configuration ==="


class RealSysctl:
    """systemd-sysctl in a mount namespace of its own, in which its folders are those of `root`.

    Only --cat-config is asked of it: it prints the files in the order in which they count, and writes nothing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clear()
        mounts = " && ".join(
            f"mount --bind {root}/{place} /{place}" for place in ("etc", "run", "usr/local/lib", "usr/lib/sysctl.d")
        )
        self.shell = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{mounts} && echo ready && exec sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="surrogateescape",
        )
        assert self.shell.stdout is not None
        first = self.shell.stdout.readline()
        if first != "ready\n":
            self.close()
            pytest.skip(f"no mount namespace with folders bound in it: {first.strip()}")

    def clear(self) -> None:
        for top in TOPS:
            folder = self.root / top / "sysctl.d"
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                path.unlink()
        (self.root / "etc/sysctl.conf").unlink(missing_ok=True)

    def configuration(self) -> str:
        assert self.shell.stdin is not None and self.shell.stdout is not None
        self.shell.stdin.write(f"{PROGRAM} --cat-config --no-pager; echo; echo '{END}'\n")
        self.shell.stdin.flush()
        lines: list[str] = []
        while (line := self.shell.stdout.readline()) not in (f"{END}\n", ""):
            lines.append(line)
        return "".join(lines)

    def close(self) -> None:
        assert self.shell.stdin is not None and self.shell.stdout is not None
        self.shell.stdin.close()
        self.shell.wait()
        self.shell.stdout.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSysctl]:
    if os.geteuid() != 0 or not os.access(PROGRAM, os.X_OK) or not shutil.which("unshare"):
        pytest.skip(f"{PROGRAM}, unshare or the right to use them is missing")
    if not os.path.islink("/lib"):
        pytest.skip("/lib is no link to /usr/lib: a fifth folder would be read")
    program = RealSysctl(tmp_path_factory.mktemp("sysctl"))
    yield program
    program.close()


KEYS = ("vm.nr_hugepages", "vm.nr_overcommit_hugepages", "vm.hugetlb_shm_group")
GLOBS = {"vm.nr_h*": KEYS[:1], "vm/nr_*": KEYS[:2], "*.nr_?ugepages": KEYS[:1], "vm.h[a-z]getlb*": KEYS[2:]}
NAMES = ("10-a.conf", "10-B.conf", "50-site.conf", "99-sysctl.conf", "a.conf", "\u00e9.conf", "Z.conf", "~.conf")
NOT_READ = (".50-hidden.conf", "50-site.conf.bak", "50-site.conf~", "README", "50-site")

ways_to_write = st.sampled_from(
    [
        "{key} = {value}",
        "{key}={value}",
        "\t {key}  =  {value} \t",
        "-{key} = {value}",
        "{slashed}={value}",
        "- {key}={value}",
    ]
)
lines = st.one_of(
    st.tuples(st.sampled_from(KEYS), ways_to_write),
    st.tuples(st.sampled_from(KEYS), ways_to_write),
    st.tuples(st.sampled_from(KEYS), st.just("-{key}")),
    st.tuples(st.sampled_from(sorted(GLOBS)), ways_to_write),
    st.tuples(
        st.just(""), st.sampled_from(["", "# {value} vm.nr_hugepages = 1", " ; {value}", "vm.nr_hugepages {value}"])
    ),
    st.tuples(st.just(""), st.sampled_from(["net.core.somaxconn = {value}", "kernel.shmmax={value}"])),
)
contents = st.tuples(st.lists(lines, max_size=4), st.sampled_from(["\n", "\r\n"]), st.booleans())
entries = st.one_of(contents, contents, contents, st.sampled_from(["/dev/null", "../../dev/null", "/etc/sysctl.conf"]))
trees = st.dictionaries(st.tuples(st.sampled_from(TOPS), st.sampled_from(NAMES + NOT_READ)), entries, max_size=9)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees, sysctl_conf=contents)
def test_the_files_count_as_a_real_systemd_sysctl_takes_them(
    real: RealSysctl,
    tree: dict[tuple[str, str], tuple[list[tuple[str, str]], str, bool] | str],
    sysctl_conf: tuple[list[tuple[str, str]], str, bool],
) -> None:
    real.clear()
    meaning: dict[str, tuple[str, str | None]] = {}  # what each line written says, by construction

    def text(content: tuple[list[tuple[str, str]], str, bool]) -> str:
        written = []
        for key, form in content[0]:
            value = str(len(meaning) % 4)
            line = form.format(key=key, value=value, slashed=key.replace(".", "/"))
            meaning.setdefault(line.strip(), (key.replace("/", "."), None if form == "-{key}" else value))
            written.append(line)
        return content[1].join(written) + (content[1] if content[2] else "")

    (real.root / "etc/sysctl.conf").write_bytes(text(sysctl_conf).encode())
    for (top, name), entry in tree.items():
        path = real.root / top / "sysctl.d" / name
        if isinstance(entry, str):
            path.symlink_to(entry if entry.startswith("/") else "../" * top.count("/") + entry)
        else:
            path.write_bytes(text(entry).encode())

    # what systemd-sysctl reads, in its order, with the file that each line is in
    path_now, options, places = "", dict[str, str | None](), dict[str, str]()
    for line in real.configuration().splitlines():
        stripped = line.strip()
        if stripped.startswith("# /"):
            path_now = stripped[2:]
        key, value = meaning.get(stripped, ("", None))
        if key and not (key in options and options[key] == value):
            options.pop(key, None)
            options[key], places[key] = value, path_now
    expected: dict[str, tuple[str, str]] = {}
    for key, value in options.items():
        reached = GLOBS.get(key) or GLOBS.get(key.replace(".", "/", 1)) or (key,)
        for name in reached:
            if value is not None and (name == key or name not in options):
                expected[name] = (value, places[key])

    found = sysctls.read(RootedHost(str(real.root), "a tree"))
    got: dict[str, tuple[str, str]] = {}
    for setting in found.settings:
        if setting.name in KEYS:
            assert isinstance(setting.value, Known), setting
            got[setting.name] = (setting.value.value, setting.value.source.partition(" line ")[0])
    for name, (given_value, given_path) in expected.items():
        if os.path.realpath(real.root / given_path[1:]) == "/etc/sysctl.conf":
            expected[name] = (given_value, "/etc/sysctl.conf")
    assert got == expected
