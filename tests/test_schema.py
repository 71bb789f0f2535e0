"""The fact schema: names, types and values as the fact classes declare them."""

from __future__ import annotations

import pytest

from pgpreemptcheck.engine.schema import Schema, lookup
from pgpreemptcheck.engine.types import FactType, RuleError
from pgpreemptcheck.values import Known, Unknown
from tests.synthetic import NOT_READ, views

SCHEMA = Schema()


@pytest.mark.parametrize(
    ("name", "kind", "values", "unit", "nullable"),
    [
        # names, words and units of the report's format (README: the JSON report)
        ("host.kernel.preemption.mode", "text", ("none", "voluntary", "full", "lazy", "rt"), "", False),
        ("host.kernel.preemption.certainty", "text", ("effective", "boot", "build"), "", False),
        ("host.kernel.preemption.ignored_parameter", "text", None, "", True),
        ("host.kernel.version_token", "text", ("PREEMPT", "PREEMPT_DYNAMIC", "PREEMPT_RT"), "", True),
        ("host.os.id", "text", None, "", False),  # declared in a base class, in another module
        ("host.memory.total_bytes", "integer", None, "bytes", False),
        ("host.cpus.quota", "number", None, "CPUs", True),
        ("host.huge_pages.pools", "list", None, "", False),
        ("cluster.running", "boolean", None, "", False),
        ("cluster.id", "text", None, "", False),
        ("cluster.settings.huge_pages", "text", ("on", "off", "try"), "", False),
        ("cluster.settings.shared_buffers", "integer", None, "bytes", False),
        ("cluster.segment.backing", "text", ("base", "huge", "sysv"), "", False),
        ("cluster.segment", "object", None, "", False),
        ("cluster.start.outcome", "text", ("starts", "refuses", "falls-back", "crashes"), "", False),
        ("cluster.start.error.line", "integer", None, "", False),
        ("cluster.start.fault_limit_bytes", "integer", None, "bytes", True),
        ("next_start.cluster.settings.huge_pages", "text", ("on", "off", "try"), "", False),
        ("now.host.memory.total_bytes", "integer", None, "bytes", False),
    ],
)  # fmt: skip
def test_declared(name: str, kind: str, values: tuple[str, ...] | None, unit: str, nullable: bool) -> None:
    found = SCHEMA.type_of(name)
    assert (found.name, found.kind, found.values, found.unit, found.nullable) == (name, kind, values, unit, nullable)


def test_every_fact_has_a_type() -> None:
    names = [fact.name for fact in SCHEMA.names()]
    assert len(names) == len(set(names)) > 80
    assert all(SCHEMA.type_of(f"now.{name}").kind != "any" for name in names)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cluster.setings.huge_pages", "cluster.settings.huge_pages"),
        ("next_start.cluster.settings.huge_page", "cluster.settings.huge_pages"),
        ("host.kernel.preemption.mode.value", "host.kernel.preemption.mode"),
        ("host.kernel.preemption.__class__", "host.kernel.preemption"),
        ("kernel.preemption.mode", "host.kernel.preemption.mode"),
        ("now", ""),
        ("now.now.cluster.id", ""),
        ("", ""),
    ],
)
def test_unknown_names(name: str, near: str) -> None:
    with pytest.raises(RuleError, match=f"there is no fact .*{near}"):
        SCHEMA.type_of(name)


def test_labels_tell_the_text_none_from_none() -> None:
    assert SCHEMA.type_of("host.kernel.preemption.mode").label() == '"none" | "voluntary" | "full" | "lazy" | "rt"'
    assert SCHEMA.type_of("host.cpus.quota").label() == "number | none"


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        (FactType("x", "integer"), 1, True), (FactType("x", "integer"), True, False),
        (FactType("x", "integer"), 1.5, False),
        (FactType("x", "number"), 1.5, True), (FactType("x", "number"), "1", False),
        (FactType("x", "boolean"), 1, False),
        (FactType("x", "text", ("a",)), "b", False), (FactType("x", "text"), None, False),
        (FactType("x", "text", nullable=True), None, True),
    ],
)  # fmt: skip
def test_accepts(declared: FactType, value: object, expected: bool) -> None:
    assert declared.accepts(value) is expected


def test_lookup() -> None:
    made = views(
        {"host.memory.total_bytes": 5, "host.cpus.quota": None},
        {"cluster.port": 5432, "cluster.segment.bytes": 7},
        {"cluster.running": False, "cluster.settings": None},
        at={"next_start": {"cluster.settings.port": 5433}},
    )

    def found(cluster: str | None, name: str, horizon: str = "now") -> object:
        return lookup(made, horizon, cluster, name)  # type: ignore[arg-type]

    assert found(None, "host.memory.total_bytes") == Known(5, "source of host.memory.total_bytes")
    assert found(None, "host.cpus.quota") == Known(None, "source of host.cpus.quota")
    assert found("c1", "cluster.segment.bytes") == Known(7, "source of cluster.segment.bytes")
    assert found("c1", "cluster.segment.backing") == NOT_READ
    assert found("c1", "cluster.running") == Known(True, "")
    assert found("c1", "next_start.cluster.settings.port") == Known(5433, "source of cluster.settings.port")
    assert found("c2", "cluster.settings.port", "next_start") == Known(5433, "source of cluster.settings.port")
    # what is not there is not known, never an error, and never a null that compares as one
    for cluster, name, reason in (
        ("c2", "cluster.settings.port", "the cluster does not run"),
        ("c2", "cluster.segment.backing", "the cluster does not run"),
        ("c1", "cluster.settings.port", "there is no cluster.settings here"),
        ("c1", "cluster.server", "there is no cluster.server here"),
        (None, "cluster.port", "there is no such cluster at this horizon"),
        ("c9", "cluster.port", "there is no such cluster at this horizon"),
    ):
        gap = found(cluster, name)
        assert isinstance(gap, Unknown) and gap.reason == reason
