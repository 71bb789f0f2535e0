"""What a capture notes of a process that no file can hold: `proc/PID/pgpreemptcheck.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown


def read(host: Host, pid: int) -> Fact[Mapping[str, Any]]:
    """Return the notes: `page_bytes` of the main segment, and `symbols` (a list) or `freelist` of the program."""
    path = f"/proc/{pid}/pgpreemptcheck.json"
    text = host.read(path)
    if isinstance(text, Unknown):
        return text
    try:
        noted = json.loads(text.value)
    except (ValueError, RecursionError):
        return Unknown(f"{path} is not JSON")
    return Known(noted, path) if isinstance(noted, dict) else Unknown(f"{path} is no JSON object")
