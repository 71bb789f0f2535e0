"""The catalogue of settings against what is documented, and against the servers themselves."""

from __future__ import annotations

import pytest

from pgpreemptcheck.facts import catalogue
from tests.servers import EVERY_KEY, private_directory, require

ALL = range(catalogue.FIRST, catalogue.LAST + 1)


@pytest.mark.parametrize("major", ALL)
def test_what_the_release_notes_say(major: int) -> None:
    known = catalogue.load(major)
    since = {
        **{"shared_memory_type": 12, "huge_page_size": 14, "shared_memory_size": 15, "huge_pages_status": 17},
        **{"reserved_connections": 16, "summarize_wal": 17, "io_method": 18, "autovacuum_worker_slots": 18},
    }
    assert {name for name in since if name in known} == {name for name, first in since.items() if first <= major}
    buffers = known.find("Shared_Buffers")
    assert buffers is not None
    assert (buffers.unit, buffers.low, buffers.high) == ("8kB", 16, 1073741823)
    assert buffers.default == (1024 if major <= 14 else 16384)


@pytest.mark.parametrize("major", ALL)
def test_what_is_accepted_but_listed_nowhere(major: int) -> None:
    known = catalogue.load(major)
    pages, oids, limit = (
        known.find("huge_pages"),
        known.find("default_with_oids"),
        known.find("ssl_renegotiation_limit"),
    )
    assert pages is not None and pages.values is not None
    assert {v: pages.values[v] for v in ("true", "yes", "1", "no", "try")} == {
        **{"true": "on", "yes": "on", "1": "on", "no": "off", "try": "try"}
    }
    assert oids is not None and oids.values == {"off": "off"}
    assert limit is not None and (limit.low, limit.high) == (0, 0)
    renamed = known.find("sort_mem")
    assert renamed is not None and renamed.name == "work_mem"


@pytest.mark.parametrize("major", ALL)
def test_build_options_and_minor_releases_decide_some(major: int) -> None:
    known = catalogue.load(major)
    if major >= 15:
        assert known.undecided_value("wal_compression", "ZSTD")
    if major >= 14:
        assert known.undecided_value("default_toast_compression", "lz4")
        assert not known.undecided_value("default_toast_compression", "pglz")
    if major >= 18:
        assert known.undecided_value("io_method", "io_uring")
    assert bool(known.undecided_name("restrict_nonsystem_relation_kind")) == (major <= 16)
    assert not known.undecided_name("shared_buffers")


def test_a_misspelt_name_finds_the_right_one() -> None:
    known = catalogue.load(15)
    assert known.nearest("hugepages") == "huge_pages"
    assert known.nearest("effective_cash_size") == "effective_cache_size"
    assert known.nearest("Max-Connections") == "max_connections"
    assert known.nearest("zork") is None


@pytest.mark.slow
@pytest.mark.parametrize("key", (*EVERY_KEY, "system-15"))
def test_each_server_lists_nothing_that_the_catalogue_lacks(key: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    server = require(key)
    known = catalogue.load(server.major)
    with private_directory() as base:
        server.initdb(f"{base}/data")
        with server.start(f"{base}/data") as running, psycopg.connect(running.conninfo) as sql:
            rows = sql.execute("SELECT name, vartype, unit, min_val, max_val, context, enumvals FROM pg_settings")
            listed = [row for row in rows.fetchall() if "." not in row[0]]
    assert len(listed) > 300
    for name, kind, unit, low, high, context, values in listed:
        setting = known.find(name)
        assert setting is not None, name
        assert (setting.name, setting.kind, setting.unit, setting.context) == (name, kind[0], unit or "", context)
        if kind in ("integer", "real") and context != "internal":
            assert (setting.low, setting.high) == (float(low), float(high))
        assert {value.lower() for value in values or ()} <= set(setting.values or ())
