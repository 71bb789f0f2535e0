"""Facts as plain data: every leaf is `{"value", "source"}` or `{"unknown", "hint"}` (design: report JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pgpreemptcheck.facts.settings import StartError
from pgpreemptcheck.inspection import ClusterFacts, Facts
from pgpreemptcheck.printable import printable
from pgpreemptcheck.values import Known, Unknown
from pgpreemptcheck.views import ClusterView, Horizon, View


def tree(value: Any) -> Any:
    """Return facts as JSON data: leaves for what was measured, objects and lists for what holds them."""
    if isinstance(value, Known):
        return {"value": bare(value.value), "source": printable(value.source)}
    if isinstance(value, Unknown):
        return {"unknown": printable(value.reason), "hint": printable(value.hint)}
    if is_dataclass(value):
        return {f.name: tree(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [tree(item) for item in value]
    return bare(value)


def bare(value: Any) -> Any:
    """Return a value as JSON data without sources, its texts made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): bare(item) for key, item in value.items()}
    if is_dataclass(value):
        return {f.name: bare(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [bare(item) for item in value]
    return value


def _error(error: StartError | None) -> Any:
    return None if error is None else bare(error)


def cluster_tree(facts: ClusterFacts, views: Mapping[Horizon, ClusterView]) -> dict[str, Any]:
    """Return one cluster: what runs, and beside it what a crash restart and the next start would be."""
    now, crash, restart = views["now"], views["crash_restart"], views["next_start"]
    data: dict[str, Any] = {f.name: tree(getattr(now, f.name)) for f in fields(now)}
    data["settings"] = tree(now.settings) or {}
    data["hugetlb_limits"] = tree(facts.hugetlb_limits)
    data["huge_pages_needed"] = {"now": tree(now.start.pages_needed), "next_start": tree(restart.start.pages_needed)}
    if now.server is not None:
        data["server"].pop("settings", None)  # the ones that matter are in `settings`; the rest may hold secrets
    data["crash_restart"] = {"segment": tree(crash.segment), **_start(crash)}
    data["next_start"] = {
        **_start(restart),
        "accepted": tree(restart.start.accepted),
        "error": _error(restart.start.error),
        "settings": tree(restart.settings),
        "segment": tree(restart.segment),
    }
    data["start"] = _start(now)
    return data


def _start(view: ClusterView) -> dict[str, Any]:
    data: dict[str, Any] = tree(view.start)
    del data["accepted"], data["error"]
    return data


def json_text(document: Any) -> str:
    """Return a document as JSON, ASCII only: the outer levels a line each, what is below them on that line.

    json's own indentation is written in Python, and takes as long for a hundred clusters as all the rest.
    """
    return _laid_out(document, 0) + "\n"


_LAID_OUT_LEVELS = 3  # the document, its parts, and each item of them


def _laid_out(value: Any, level: int) -> str:
    import json

    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if level == _LAID_OUT_LEVELS or not any(isinstance(item, (dict, list)) for item in below):
        return json.dumps(value)
    margin = " " * (level + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_laid_out(item, level + 1)}" for key, item in value.items()]
        opening, closing = "{}"
    else:
        items = [_laid_out(item, level + 1) for item in value]
        opening, closing = "[]"
    return f"{opening}\n{margin}" + f",\n{margin}".join(items) + f"\n{margin[1:]}{closing}"


def facts_document(facts: Facts, views: Mapping[Horizon, View]) -> dict[str, Any]:
    """Return the `pgpreemptcheck.facts/1` document."""
    by_id = {horizon: {c.id: c for c in view.clusters} for horizon, view in views.items()}
    host = tree(views["now"].host)
    return {
        "schema": "pgpreemptcheck.facts/1",
        "host": host,
        "clusters": [cluster_tree(c, {h: by_id[h][c.id] for h in views}) for c in facts.clusters],
        "errors": [{"kind": "internal", **bare(error)} for error in facts.errors],
    }
