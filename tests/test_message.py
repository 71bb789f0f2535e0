"""Texts of rules: sizes as PostgreSQL writes them, gaps as gaps, nothing but facts in the braces."""

from __future__ import annotations

from typing import Any

import pytest

from pgpreemptcheck.engine.expression import Environment
from pgpreemptcheck.engine.message import MAX_LENGTH, as_bytes, as_count, as_pages, as_seconds, compile_message
from pgpreemptcheck.engine.types import FactType, RuleError
from pgpreemptcheck.values import Known, Unknown

TYPES = {
    t.name: t
    for t in (
        FactType("size", "integer", unit="bytes"),
        FactType("pages", "integer", unit="pages"),
        FactType("cpus", "integer", unit="CPUs"),
        FactType("mode", "text", ("none", "lazy")),
        FactType("limit", "integer", unit="bytes", nullable=True),
        FactType("running", "boolean"),
        FactType("models", "list"),
        FactType("server", "object"),
        FactType("gap", "integer", unit="bytes"),
    )
}
FACTS: dict[str, Any] = {
    "size": 120 << 30, "pages": 61440, "cpus": 96, "mode": "lazy", "limit": None, "running": True,
    "models": ("full", "lazy"),
}  # fmt: skip


def known_type(name: str) -> FactType:
    if name not in TYPES:
        raise RuleError(f"there is no fact {name}")
    return TYPES[name]


def filled(text: str) -> str:
    facts = Environment(lambda name: Known(FACTS[name], "s") if name in FACTS else Unknown("not read"))
    return compile_message(text, known_type, {"mode2": Known(1, "s")}).fill(facts)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # what SHOW prints, with a blank: 128MB, 8GB, 1536kB ...
        (128 << 20, "128 MB"), (8 << 30, "8 GB"), (1536 << 10, "1.5 MB"), (120 << 30, "120 GB"), (960 << 20, "960 MB"),
        (2 << 20, "2 MB"), (16 << 10, "16 kB"), (0, "0 bytes"), (1, "1 byte"), (512, "512 bytes"), (1024, "1 kB"),
        (3 << 40, "3 TB"), (5000 << 40, "5000 TB"), ((1 << 30) - 1, "1 GB"), (int(1.25 * (1 << 30)), "1.25 GB"),
        (-1, "-1 byte"), (-(2 << 20), "-2 MB"), (1023 << 10, "1023 kB"),
    ],
)  # fmt: skip
def test_bytes(value: int, expected: str) -> None:
    assert as_bytes(value) == expected


def test_other_units() -> None:
    assert [as_pages(n) for n in (0, 1, 61440)] == ["0 pages", "1 page", "61,440 pages"]
    assert [as_count(n) for n in (31457280, 0.5, 4.0)] == ["31,457,280", "0.5", "4"]
    assert [as_seconds(n) for n in (5, 0.25, 90, 3600, 186300, 59.6)] == [
        "5 s", "0.25 s", "1 min 30 s", "1 h", "2 d 3 h", "59.6 s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("{size:bytes} are {pages:pages} on {cpus:count} CPUs", "120 GB are 61,440 pages on 96 CPUs"),
        ("{size} {pages} {cpus} {mode} {running}", "120 GB 61,440 pages 96 lazy true"),
        ("{size:text}", "128849018880"),
        ("{models:text}", "full, lazy"),
        ("{limit:bytes} {limit}", "none none"),
        ("a {gap:bytes} b", "a unknown (not read) b"),
        ("{{literal}} {{{mode:text}}}", "{literal} {lazy}"),
    ],
)
def test_filled(text: str, expected: str) -> None:
    assert filled(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{", "}", "{}", "{:bytes}", "{size:}", "{size!r}", "{size:>1000000000}", "{size.__class__}", "{size[0]}",
        "{size:{cpus}}", "{0}", "{ size }", "{size:byte}", "{nothing:text}", "{mode:bytes}", "{pages:bytes}",
        "{size:seconds}", "{server:text}", "{models:count}", "{running:count}", "{{}", "{size}}", "{size:bytes:text}",
        "x" * (MAX_LENGTH + 1),
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    with pytest.raises(RuleError) as error:
        compile_message(text, known_type)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_long_value_is_cut() -> None:
    facts = Environment(lambda name: Known("x" * 100_000, "s"))
    assert len(compile_message("{mode:text}", known_type).fill(facts)) == 400
