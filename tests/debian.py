"""Debian's archive for tests: a package index of our own, which leaves this machine's apt as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FRESH_SECONDS = 86400


def mirror() -> str:
    """Return the Debian mirror that this machine uses, else Debian's own."""
    for path in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"):
        try:
            with open(path) as file:
                found = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s+)?)((?:https?|file):\S+)", file.read(), re.M)
        except OSError:
            continue
        if found and "debian" in found[1]:
            return found[1].rstrip("/")
    return "http://deb.debian.org/debian"


def source(suite: str) -> str:
    """Return the line of a sources.list for a suite."""
    return f"deb [signed-by={KEYRING}] {mirror()} {suite} main"


def index(folder: str, suites: Sequence[str], arch: str) -> list[str]:
    """Fetch the package index of an architecture into a folder if it is not there or a day old.

    Returns the options that point apt at it. Raises RuntimeError if there is none to be had. A suite that has left the
    archive is no reason to fail: the others still answer. One caller at a time.
    """
    settings = {
        "APT::Architecture": arch,
        "APT::Architectures": arch,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::Etc::sourcelist": f"{folder}/sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": f"{folder}/lists",
        "Dir::State::status": f"{folder}/status",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    ready = f"{folder}/ready"
    if not os.path.exists(ready) or os.path.getmtime(ready) < time.time() - _FRESH_SECONDS:
        os.makedirs(f"{folder}/lists/partial", exist_ok=True)
        with open(f"{folder}/sources.list", "w") as file:
            file.writelines(f"{source(suite)}\n" for suite in suites)
        open(f"{folder}/status", "w").close()
        subprocess.run(["apt-get", *options, "-qq", "update"], stdout=sys.stderr, check=False)
        if not any("_Packages" in name for name in os.listdir(f"{folder}/lists")):
            raise RuntimeError(f"no package index could be fetched from {mirror()}")
        open(ready, "w").close()
    return options
