"""The servers that other tests rest on really run."""

from __future__ import annotations

import pytest

from tests.servers import Server, private_directory, server

__all__ = ["server"]


@pytest.mark.slow
def test_a_server_of_each_major_starts_and_answers(server: Server) -> None:
    psycopg = pytest.importorskip("psycopg")
    with private_directory() as base:
        data = f"{base}/data"
        server.initdb(data)
        said = server.run_postgres_C(data, "port", ["-c", "port=6543"])
        assert (said.stdout, said.returncode) == (b"6543\n", 0)
        with server.start(data, ["-c", "shared_buffers=16MB"]) as running, psycopg.connect(running.conninfo) as sql:
            number = sql.execute("SELECT current_setting('server_version_num')::int / 10000").fetchone()
            assert number == (server.major,)
            with open(f"{data}/postmaster.pid") as file:
                assert file.readline().strip() == str(running.pid)
