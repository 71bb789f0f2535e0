"""SQL against real servers of every major, poolers, and servers that refuse, hang and lie."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgpreemptcheck import forking, owner, sql
from pgpreemptcheck.facts import server as server_facts
from pgpreemptcheck.facts.server import FileError
from pgpreemptcheck.values import Fact, Known, Unknown
from tests import servers, tool
from tests.servers import Running, Server, private_directory, require, server, server_user

__all__ = ["server"]

psycopg = pytest.importorskip("psycopg")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take on another user's rights")


def plain(fact: Fact[Any]) -> Any:
    assert isinstance(fact, Known), fact
    return fact.value


def gap(fact: Fact[Any]) -> Unknown:
    assert isinstance(fact, Unknown), fact
    return fact


@contextlib.contextmanager
def started(build: Server, *options: str, initdb: tuple[str, ...] = ()) -> Iterator[Running]:
    with private_directory() as base:
        data = f"{base}/data"
        build.initdb(data, *initdb)
        given = [part for option in ("shared_buffers=16MB", *options) for part in ("-c", option)]
        with build.start(data, given) as running:
            yield running


def ask(running: Running, **more: Any) -> dict[str, Any]:
    """Ask it in this process (trust authentication); what comes back must be JSON."""
    how = {"directories": [running.socket_directory], "port": running.port, "users": ["postgres"], **more}
    if "dsn" in more:
        how = more
    answer = sql.ask(**how)
    return dict(json.loads(json.dumps(answer)))


# what is read -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_major_is_read_as_it_says_itself(server: Server) -> None:
    with started(server, "max_connections=23") as running, psycopg.connect(running.conninfo, autocommit=True) as own:

        def said(statement: str) -> Any:
            return own.execute(statement).fetchone()[0]

        own.execute("ALTER SYSTEM SET max_worker_processes = 9")
        own.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 10
        while not said("SELECT bool_or(pending_restart) FROM pg_settings"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with open(f"{running.directory}/postgresql.auto.conf", "a") as file:
            file.write("no_such_setting = 1\n")
        answer = ask(running)
        found = server_facts.facts(answer)
        assert plain(found.version) == said("SHOW server_version")
        settings = plain(found.settings)
        theirs = own.execute(
            "SELECT name, setting FROM pg_settings WHERE vartype IN ('bool', 'integer', 'real', 'enum')"
        ).fetchall()
        assert len(theirs) > 250
        for name, setting in theirs:
            if name != "transaction_read_only":
                local = {"statement_timeout": "3000", "lock_timeout": "500"}
                local["idle_in_transaction_session_timeout"] = "10000"
                assert (name, settings[name]) == (name, local.get(name, setting))
        assert settings["transaction_read_only"] == "on"
        assert (settings["max_connections"], settings["data_directory"]) == ("23", running.directory)
        assert "primary_conninfo" not in settings
        # The two on the command line as well, though no restart would change them: the files have other values.
        assert plain(found.pending_restart) == ("max_connections", "max_worker_processes", "shared_buffers")
        assert plain(found.in_recovery) is False
        assert plain(found.started) == pytest.approx(
            float(said("SELECT extract(epoch FROM pg_postmaster_start_time())")), abs=0.001
        )
        assert FileError(
            f"{running.directory}/postgresql.auto.conf", 4, "no_such_setting", "unrecognized configuration parameter"
        ) in plain(found.file_errors)
        assert plain(found.buffers_allocated) >= 0
        assert plain(found.active_backends) == 0
        if server.major >= 15:
            assert plain(found.huge_pages_needed) == int(said("SHOW shared_memory_size_in_huge_pages"))
        else:
            assert gap(found.huge_pages_needed).kind == "unsupported"
        if server.major >= 17:
            assert plain(found.huge_pages_status) == said("SHOW huge_pages_status")
        else:
            assert gap(found.huge_pages_status).kind == "unsupported"
        assert gap(found.unused_buffers).kind == ("absent" if server.major >= 16 else "unsupported")
        assert server_facts.belongs_to(answer, running.pid, running.directory)
        assert not server_facts.belongs_to(answer, os.getpid(), running.directory)


@pytest.mark.slow
def test_backends_that_are_active_are_counted() -> None:
    with started(require(15)) as running:
        busy = [psycopg.connect(running.conninfo) for _ in range(3)]
        for connection in busy[:2]:
            connection.pgconn.send_query(b"SELECT pg_sleep(30)")
        deadline = time.monotonic() + 5
        while plain(server_facts.facts(ask(running)).active_backends) != 2:
            assert time.monotonic() < deadline
        for connection in busy:
            connection.cancel()
            connection.close()
        with psycopg.connect(running.conninfo, autocommit=True) as own:
            own.execute("ALTER ROLE postgres SET track_activities = off")
            with psycopg.connect(running.conninfo):
                assert "track_activities" in gap(server_facts.facts(ask(running)).active_backends).reason


@pytest.mark.slow
@pytest.mark.parametrize("major", [16, 18])
def test_unused_buffers_where_that_is_affordable(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(require(major)) as running, psycopg.connect(running.conninfo, autocommit=True) as own:
        own.execute('CREATE SCHEMA "odd Name"')
        own.execute('CREATE EXTENSION pg_buffercache SCHEMA "odd Name"')
        unused = plain(server_facts.facts(ask(running)).unused_buffers)
        theirs = own.execute('SELECT buffers_unused FROM "odd Name".pg_buffercache_summary()').fetchone()[0]
        assert theirs <= unused < 2048
        assert unused - theirs < 200  # other pages were read in between
        monkeypatch.setattr(sql, "AFFORDABLE_BYTES", 16 << 20)
        assert gap(server_facts.facts(ask(running)).unused_buffers).hint == "run it with --deep"
        assert plain(server_facts.facts(ask(running, deep=True)).unused_buffers) <= unused
        monkeypatch.setattr(sql, "AFFORDABLE_BYTES", (16 << 20) + 1)
        assert plain(server_facts.facts(ask(running)).unused_buffers) <= unused


@pytest.mark.slow
def test_a_function_that_only_bears_the_name_is_not_called() -> None:
    with started(require(16)) as running, psycopg.connect(running.conninfo, autocommit=True) as own:
        own.execute("CREATE EXTENSION pg_buffercache SCHEMA public VERSION '1.3'")
        own.execute("CREATE TABLE called()")
        own.execute(
            "CREATE FUNCTION public.pg_buffercache_summary(OUT buffers_unused bigint) LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE EXCEPTION 'called'; END $$"
        )
        found = gap(server_facts.facts(ask(running)).unused_buffers)
        assert found.kind == "absent"
        assert "called" not in running.log()


# what is refused ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 17])
def test_a_plain_role_loses_only_what_it_may_not_see(major: int) -> None:
    with started(require(major)) as running, psycopg.connect(running.conninfo, autocommit=True) as own:
        own.execute("CREATE ROLE plain LOGIN")
        answer = ask(running, users=["plain"])
        found = server_facts.facts(answer)
        assert plain(found.settings)["max_connections"] == "100"
        assert "data_directory" not in plain(found.settings)
        for fact in (found.active_backends, found.file_errors):
            assert gap(fact).kind == "permission"
            assert gap(fact).hint.startswith("ask as a superuser")
        assert "permission denied" in gap(found.file_errors).reason
        assert plain(found.in_recovery) is False
        assert server_facts.belongs_to(
            answer, running.pid, running.directory
        )  # the postmaster is at the socket's other end
        own.execute("GRANT pg_monitor TO plain")
        assert plain(server_facts.facts(ask(running, users=["plain"])).active_backends) == 0


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("major", [15, 17])
def test_a_plain_role_does_not_make_the_need_of_the_next_start_unknown(major: int) -> None:
    """pg_settings hides shared_preload_libraries from it: the files tell, unless they are newer or cannot be read."""

    def found(running: Running) -> Any:
        dsn = f"host={running.directory} port={running.port} user=plain dbname=postgres"
        return tool.check("--dsn", dsn).cluster(running.directory)

    with started(require(major)) as running, psycopg.connect(running.conninfo, autocommit=True) as own:
        own.execute("CREATE ROLE plain LOGIN")
        cluster = found(running)
        needed = cluster["huge_pages_needed"]
        assert needed["next_start"]["value"] == needed["now"]["value"]
        assert cluster["settings"]["shared_preload_libraries"] == {"value": "", "source": "default"}
        row = own.execute("SHOW shared_memory_size").fetchone()
        assert row is not None
        assert needed["next_start"]["value"] * 2 >= int(row[0].removesuffix("MB")) > 16
        own.execute("ALTER SYSTEM SET work_mem = '5MB'")  # now the files are newer than the start
        gap = found(running)["settings"]["shared_preload_libraries"]
        assert "the role may not see it" in gap["unknown"] and "GRANT pg_read_all_settings" in gap["hint"]
        own.execute("GRANT pg_read_all_settings TO plain")
        assert found(running)["settings"]["shared_preload_libraries"]["source"] == "sql pg_settings"


@pytest.mark.slow
def test_other_roles_and_databases_are_tried_in_turn() -> None:
    with (
        started(require(15)) as running,
        psycopg.connect(f"{running.conninfo} dbname=template1", autocommit=True) as own,
    ):
        answer = ask(running, users=["nosuch", "postgres"])
        assert (answer["user"], answer["database"]) == ("postgres", "postgres")
        own.execute("DROP DATABASE postgres")
        answer = ask(running, directories=["/nonexistent", running.socket_directory])
        assert (answer["user"], answer["database"]) == ("postgres", "template1")
        found = gap(server_facts.facts(ask(running, users=["nosuch"])).settings)
        assert 'role "nosuch" does not exist' in found.reason
        assert (found.kind, "--dsn" in found.hint) == ("permission", True)


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 18])
def test_a_server_that_takes_nobody_says_why(major: int) -> None:
    with started(
        require(major), "max_connections=4", "superuser_reserved_connections=0", "max_wal_senders=0"
    ) as running:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(psycopg.connect(running.conninfo))
            answer = ask(running)
            assert answer["code"] == "full"
            assert "too many clients" in gap(server_facts.facts(answer).version).reason
        running.stop()
        with open(f"{running.directory}/standby.signal", "w"):
            pass
        settings = ["-c", "max_connections=4", "-c", "max_wal_senders=0", "-c", "hot_standby=off"]
        with running.server.start(running.directory, settings) as standby:
            before = standby.log().count("FATAL")
            answer = ask(standby)
            assert answer["code"] == "starting"
            assert gap(server_facts.facts(answer).version).hint == "run it again when the server accepts connections"
            assert standby.log().count("FATAL") == before + 1  # and it is not knocked at again


@pytest.mark.slow
def test_a_server_in_recovery_says_so() -> None:
    with started(require(14)) as running:
        running.stop()
        with open(f"{running.directory}/standby.signal", "w"):
            pass
        with running.server.start(running.directory) as standby:
            deadline = time.monotonic() + 10
            while "refused" in (answer := ask(standby)):
                assert time.monotonic() < deadline
            assert plain(server_facts.facts(answer).in_recovery) is True


def test_no_socket_is_no_server() -> None:
    answer = sql.ask(directories=["/nonexistent"], users=["postgres"])
    assert answer["code"] == "socket"
    assert gap(server_facts.facts(answer).settings).hint == "give the server's address by --dsn"


@needs_root
@pytest.mark.slow
def test_peer_authentication_with_the_owners_rights(server: Server) -> None:
    with started(server, initdb=("-U", "postgres", "-A", "peer", "--locale=C")) as running:
        where = {"directories": [running.socket_directory], "port": running.port}
        with open(f"{running.directory}/postgresql.conf", "a") as file:
            file.write("include '/etc/shadow'\n")
        forking.prepare()
        with owner.start(server_user().pw_uid, like=running.pid, sql=True) as found:
            pending = found.sql(**where)  # type: ignore[arg-type]
            files = found.host()
            assert "include '/etc/shadow'" in plain(files.read(f"{running.directory}/postgresql.conf"))
            assert gap(files.read("/etc/shadow")).kind == "permission"
            assert isinstance(files.read(f"/proc/{running.pid}/maps"), Known)
            answer = pending.answer()
            assert plain(server_facts.facts(answer).version).split()[0] == server.version
            assert server_facts.belongs_to(answer, running.pid, running.directory)
        assert not isinstance(answer, Unknown)
        assert answer["backend_parent_pid"] == answer["peer_pid"] == running.pid
        with owner.start(65534, sql=True) as found:
            refused = gap(server_facts.facts(found.sql(**where).answer()).version)  # type: ignore[arg-type]
            assert (refused.kind, refused.hint) == ("permission", "run it as root or as the owner of the cluster")
            assert "Permission denied" in refused.reason
        wrong = sql.ask(**where, users=["postgres"])  # type: ignore[arg-type]
        refused = gap(server_facts.facts(wrong).version)
        assert refused.kind == "permission"
        assert 'Peer authentication failed for user "postgres"' in refused.reason


@needs_root
@pytest.mark.slow
def test_many_servers_of_one_owner_share_one_child() -> None:
    with started(require(15)) as running, owner.start(server_user().pw_uid, like=running.pid, sql=True) as found:
        where = {"directories": [running.socket_directory], "port": running.port}
        pending = [found.sql(**where) for _ in range(60)]  # type: ignore[arg-type]
        assert all(plain(server_facts.facts(one.answer()).in_recovery) is False for one in pending)


@needs_root
@pytest.mark.slow
def test_a_containers_socket_is_looked_for_inside_its_root() -> None:
    """There /var/run/postgresql is a link to an absolute path, which leads elsewhere outside of the container."""
    with started(require(15)) as running, private_directory() as inside:
        os.chmod(inside, 0o755)
        os.makedirs(f"{inside}/var")
        os.makedirs(f"{inside}/run/postgresql")
        os.symlink("/run", f"{inside}/var/run")
        name = f".s.PGSQL.{running.port}"
        os.rename(f"{running.socket_directory}/{name}", f"{inside}/run/postgresql/{name}")
        holder = os.fork()
        if holder == 0:
            os.chroot(inside)
            time.sleep(60)
            os._exit(0)
        try:
            root = f"/proc/{holder}/root"
            deadline = time.monotonic() + 5
            while not os.path.samefile(root, inside):
                assert time.monotonic() < deadline
            with owner.start(server_user().pw_uid, like=running.pid, roots=[root], sql=True) as found:
                answer = found.sql(directories=["/var/run/postgresql"], port=running.port, root=root).answer()
                assert server_facts.belongs_to(answer, running.pid, None)
        finally:
            os.kill(holder, 9)
            os.waitpid(holder, 0)


# what hangs ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent_server() -> Iterator[dict[str, Any]]:
    """A socket that takes connections and never answers."""
    with private_directory() as base, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{base}/.s.PGSQL.6000")
        os.chmod(f"{base}/.s.PGSQL.6000", 0o777)
        listener.listen(8)
        yield {"directories": [base], "port": 6000, "users": ["postgres"]}


@pytest.mark.slow
def test_a_server_that_never_answers_costs_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "CONNECT_SECONDS", 2)  # the driver's least
    with silent_server() as where:
        began = time.monotonic()
        answer = sql.ask(**where)
        assert time.monotonic() - began < 4
        assert answer["code"] == "time"
        assert "timeout" in gap(server_facts.facts(answer).version).reason


@pytest.mark.slow
def test_a_server_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_server() as where, started(require(15)) as running, owner.start(sql=True) as found:
        monkeypatch.setattr(owner, "SQL_SECONDS", 2.5)
        hanging = found.sql(**where)
        good = found.sql(directories=[running.socket_directory], port=running.port, users=["postgres"])
        assert gap(server_facts.facts(hanging.answer()).version).reason == "no answer over SQL came in time"
        assert plain(server_facts.facts(good.answer()).in_recovery) is False


@pytest.mark.slow
def test_locks_and_long_statements_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(require(16)) as running, psycopg.connect(running.conninfo) as own:
        own.execute("LOCK TABLE pg_catalog.pg_extension IN ACCESS EXCLUSIVE MODE")
        monkeypatch.setitem(sql._QUERIES, "allocated", "SELECT pg_sleep(60)")
        began = time.monotonic()
        found = server_facts.facts(ask(running))
        assert time.monotonic() - began < 6
        assert "due to lock timeout" in gap(found.unused_buffers).reason
        assert "due to statement timeout" in gap(found.buffers_allocated).reason
        assert plain(found.active_backends) == 0
        assert plain(found.settings)["max_connections"] == "100"


@pytest.mark.slow
def test_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(require(15)) as running:
        monkeypatch.setitem(sql._QUERIES, "allocated", "SELECT 1; CREATE TABLE public.x()")
        assert "read-only transaction" in gap(server_facts.facts(ask(running)).buffers_allocated).reason


# poolers and --dsn --------------------------------------------------------------------------------


@contextlib.contextmanager
def pgbouncer(running: Running) -> Iterator[str]:
    """PgBouncer before a server, in transaction pooling with one server connection; give the way to it."""
    program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    with private_directory() as base:
        port = servers.free_port()
        with open(f"{base}/ini", "w") as file:
            file.write(
                f"[databases]\n* = user=postgres host={running.socket_directory} port={running.port}\n[pgbouncer]\n"
                f"listen_addr =\nlisten_port = {port}\nunix_socket_dir = {base}\nauth_type = any\n"
                "pool_mode = transaction\ndefault_pool_size = 1\nmax_client_conn = 20\n"
                f"logfile = {base}/log\npidfile = {base}/pid\n"
            )
        servers.give(base)
        with subprocess.Popen(  # type: ignore[call-overload]
            [program, f"{base}/ini"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **servers.as_server_user()
        ) as process:
            try:
                deadline = time.monotonic() + 10
                while not os.path.exists(f"{base}/.s.PGSQL.{port}"):
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.02)
                yield f"host={base} port={port} user=postgres dbname=postgres"
            finally:
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 18])
def test_a_pooler_in_between_is_not_harmed(major: int) -> None:
    with started(require(major)) as running, pgbouncer(running) as pool:
        names = [
            *("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "search_path"),
            *("default_transaction_read_only", "transaction_read_only", "transaction_isolation", "client_encoding"),
            *("DateStyle", "TimeZone", "standard_conforming_strings"),
        ]

        def session() -> tuple[Any, ...]:
            with psycopg.connect(pool, autocommit=True, prepare_threshold=None) as client:
                values = [client.execute(f"SHOW {name}").fetchone() for name in names]
                pid = client.execute("SELECT pg_backend_pid()").fetchone()
                prepared = client.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
                told = client.execute("SHOW application_name").fetchone()
                return pid, prepared, told, values

        with psycopg.connect(running.conninfo, autocommit=True) as own:
            own.execute("CREATE DATABASE old TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
        pool = pool.replace("dbname=postgres", "dbname=old")
        before = session()
        answer = ask(running, dsn=pool)
        after = session()
        assert answer["backend_pid"] == before[0][0], "it went through the same server connection"
        assert after == before
        found = server_facts.facts(answer)
        assert plain(found.settings)["data_directory"] == running.directory
        assert answer["peer_pid"] != running.pid
        assert server_facts.belongs_to(answer, running.pid, running.directory)


@pytest.mark.slow
def test_a_pooler_without_a_free_connection_ends_by_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        started(require(15)) as running,
        pgbouncer(running) as pool,
        owner.start(sql=True) as found,
        psycopg.connect(pool) as holder,
    ):
        holder.execute("SELECT 1")  # a transaction is open now
        monkeypatch.setattr(owner, "SQL_SECONDS", 2.0)
        pending = found.sql(dsn=pool)
        direct = found.sql(directories=[running.socket_directory], port=running.port, users=["postgres"])
        assert plain(server_facts.facts(direct.answer()).in_recovery) is False
        assert gap(server_facts.facts(pending.answer()).version).reason == "no answer over SQL came in time"


@pytest.mark.slow
def test_a_dsn_over_tcp_belongs_to_its_postmaster_and_shows_no_password() -> None:
    with started(require(15), "listen_addresses=127.0.0.1") as running:
        dsn = f"postgresql://postgres:SECRET-{{x}}@127.0.0.1:{running.port}/postgres"
        answer = ask(running, dsn=dsn)
        assert answer["peer_pid"] is None
        assert answer["server_address"] == "127.0.0.1"
        assert server_facts.belongs_to(answer, running.pid, running.directory + "/", time.time() - 5)
        assert not server_facts.belongs_to(answer, running.pid, "/elsewhere")
        assert not server_facts.belongs_to(answer, running.pid, running.directory, 1000.0)
        assert "SECRET" not in json.dumps(answer)
        refused = ask(running, dsn=dsn.replace("/postgres", "/SECRET-{x}").replace("//SECRET-{x}:", "//postgres:"))
        assert "does not exist" in refused["refused"]
        assert "SECRET" not in json.dumps(refused)


def test_a_dsn_that_is_none_is_not_repeated() -> None:
    for dsn in ("postgresql://u:pass%ZZword@h/db", "host=x passwd=hunter2", "password='hunter2", "hunter2"):
        answer = sql.ask(dsn=dsn)
        assert answer == {"refused": "the connection string cannot be parsed", "code": "dsn"}


def test_the_environment_is_roots_own_and_reaches_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPASSWORD", "PGSERVICEFILE", "PGOPTIONS", "PGTZ", "PGSSLKEY"):
        monkeypatch.setenv(name, "/x")
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("PGPASSFILE", "/root/.pgpass")
    sql.clean_environment(trusted=True, home=True)
    left = {name for name in os.environ if name.startswith("PG")} - {"PGPREEMPTCHECK_CACHE"}
    assert left == {"PGHOST", "PGPASSWORD", "PGSERVICEFILE", "PGSSLKEY", "PGPASSFILE"}
    sql.clean_environment(trusted=False, home=False)
    assert {name: value for name, value in os.environ.items() if name.startswith("PG")} == {"PGPASSFILE": "/dev/null"}
    assert os.environ["HOME"] == "/nonexistent"


# answers that are not believed --------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ROWS = st.fixed_dictionaries(
    {"rows": st.lists(st.lists(st.none() | st.text(max_size=6), max_size=5) | JSON, max_size=3)}
)
KEYS = ("version", "version_number", "in_recovery", "started", "refused", "code", "peer_pid", "backend_parent_pid")


@given(
    st.dictionaries(st.sampled_from(KEYS), JSON),
    JSON | st.dictionaries(st.sampled_from([*sql._QUERIES, "unused"]), ROWS | JSON),
)
def test_no_answer_raises(answer: dict[str, Any], results: Any) -> None:
    answer["results"] = results
    found = server_facts.facts(answer)
    server_facts.belongs_to(answer, 1, "/d", 5.0)
    for name in ("settings", "active_backends", "file_errors", "unused_buffers", "started"):
        assert isinstance(getattr(found, name), (Known, Unknown))


def test_no_answer_at_all_is_that_everywhere() -> None:
    why = Unknown("no SQL", "hint")
    found = server_facts.facts(why)
    assert {found.version, found.settings, found.unused_buffers} == {why}
    assert not server_facts.belongs_to(why, 1, "/d")


def answer(**more: Any) -> dict[str, Any]:
    rows = [["data_directory", "/d", "f"]]
    return {
        "backend_parent_pid": 7,
        "peer_pid": None,
        "started": 1000.5,
        "results": {"settings": {"rows": rows}},
        **more,
    }


@pytest.mark.parametrize(
    ("said", "directory", "started_at", "expected"),
    [
        (answer(), "/d", None, True),
        (answer(), "/d/", 1000.0, True),
        (answer(), "/d", 900.0, False),  # the same directory on another host, and by chance the same PID
        (answer(), "/e", 1000.0, False),
        (answer(), None, 1000.0, True),
        (answer(), None, None, False),
        (answer(results={}), "/d", 1000.0, True),  # the role may not see its data directory
        (answer(results={}), "/d", None, False),
        (answer(backend_parent_pid=8), "/d", 1000.0, False),
        (answer(backend_parent_pid=None), "/d", 1000.0, False),
        (answer(backend_parent_pid=8, peer_pid=7), None, None, True),
        (answer(backend_parent_pid=8, peer_pid=9), "/d", 1000.0, False),
    ],
)
def test_which_server_answered(
    said: dict[str, Any], directory: str | None, started_at: float | None, expected: bool
) -> None:
    assert server_facts.belongs_to(said, 7, directory, started_at) is expected
