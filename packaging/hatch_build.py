"""Build hook: put the parsed rule files into the wheel (see pgpreemptcheck/engine/parsedrules.py)."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ParsedRules(BuildHookInterface[Any]):
    """Adds rules/parsed.json to a wheel; an editable install reads the YAML files themselves."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        sys.path.insert(0, self.root)
        from pgpreemptcheck.engine import parsedrules

        folder = os.path.join(self.root, "rules")
        files = {}
        for name in sorted(os.listdir(folder)):
            if name.endswith(".yaml"):
                with open(os.path.join(folder, name), "rb") as stream:
                    files[f"rules/{name}"] = stream.read()
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, parsedrules.NAME)
        with open(path, "w", encoding="ascii") as target:
            target.write(parsedrules.dump(files))
        build_data["force_include"][path] = f"pgpreemptcheck/rules/{parsedrules.NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
