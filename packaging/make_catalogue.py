#!/usr/bin/env python3
"""Write pgpreemptcheck/facts/catalogue/MAJOR.json: every setting of each PostgreSQL major, asked of real servers.

    python packaging/make_catalogue.py [--older BIN_DIR]...

Needs the servers of tests/servers.py (`python -m tests.servers fetch` with every key) and psycopg. Nothing is typed
here: names, types, units, bounds and values come from pg_settings; what pg_settings hides (names that are accepted but
listed nowhere, old names, hidden values of enums) is found by trying words of the server's own program file on it.
`--older` names the programs of an older minor release, to find the settings that came in a minor release; what was
found before stays for a major that has none. All majors are written at once, since what is optional in one tells of
the others.

Builds differ by their options: the catalogue is the union, and says which names and values not every build has.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from tests.servers import MAJORS, Server, available, give, private_directory  # noqa: E402

OUT = os.path.join(ROOT, "pgpreemptcheck", "facts", "catalogue")
COLUMNS = ("vartype", "context", "unit", "min_val", "max_val", "boot_val", "enumvals")
BOOLEAN_WORDS = ("on", "off", "true", "false", "yes", "no", "1", "0")
FORMER_WORDS = ("archive", "hot_standby", "info", "panic", "fatal", "debug", "none", "md5", "plain", "default")
"""Values of former releases, which enums keep accepting without listing them."""


def listed(server: Server, base: str) -> dict[str, dict[str, Any]]:
    """Return pg_settings of a server with no settings of its own."""
    import psycopg

    data = os.path.join(base, "data")
    server.initdb(data)
    with open(os.path.join(data, "postgresql.conf"), "w"):
        pass
    with server.start(data) as running, psycopg.connect(running.conninfo) as sql:
        sql.execute("SET client_min_messages = error")
        rows = sql.execute(f"SELECT name, {', '.join(COLUMNS)} FROM pg_catalog.pg_settings").fetchall()
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows if "." not in row[0]}


class Prober:
    """Asks a stopped server what it thinks of a configuration file."""

    def __init__(self, server: Server, base: str) -> None:
        self.server = server
        self.directory = os.path.join(base, "probe")
        os.mkdir(self.directory, 0o700)
        for name, text in (
            ("PG_VERSION", f"{server.major}\n"),
            ("postgresql.conf", ""),
            ("postgresql.auto.conf", ""),
        ):
            with open(os.path.join(self.directory, name), "w") as file:
                file.write(text)
        give(self.directory)

    def complaints(self, lines: list[str]) -> str:
        with open(os.path.join(self.directory, "postgresql.conf"), "w") as file:
            file.write("\n".join(lines) + "\n")
        return self.server.run_postgres_C(self.directory, "port").stderr.decode(errors="replace")

    def refused_values(self, values: dict[str, str]) -> set[str]:
        """Return the names of the enums that refuse the value given for them."""
        said = self.complaints([f"{name} = '{value}'" for name, value in values.items()])
        return set(re.findall(r'invalid value for parameter "([^"]+)"', said))


def words_of(program: str) -> list[str]:
    """Return what looks like a setting's name in a program file."""
    with open(program, "rb") as file:
        data = file.read()
    words = set(re.findall(rb"\0([A-Za-z][A-Za-z0-9_]{2,62})(?=\0)", data))
    return sorted(word.decode() for word in words)


def unlisted(prober: Prober, known: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names that the server takes though pg_settings does not list them."""
    lower = {name.lower() for name in known}
    words = [word for word in words_of(prober.server.program("postgres")) if word.lower() not in lower]
    words = [word for word in words if not word.startswith("include")]
    said = prober.complaints([f"{word} = 'x'" for word in words])
    unknown = set(re.findall(r'unrecognized configuration parameter "([^"]+)"', said))
    return [word for word in words if word not in unknown]


def classify(prober: Prober, name: str, known: dict[str, dict[str, Any]], base: str) -> dict[str, Any]:
    """Return what an unlisted name is: another name of a listed setting, or a setting of its own with its values."""
    said = prober.complaints([f"{name} = 'no such value'"])
    if "cannot be changed" in said:
        return {"vartype": "string", "context": "internal"}
    if "requires a Boolean value" in said:
        kind, candidates = "bool", ["on", "off"]
    else:
        kind, candidates = "enum" if said else "string", ["0", "1", "64", "1024", "on", "off", "none", "default", ""]
    accepted = [value for value in candidates if not prober.complaints([f"{name} = '{value}'"])]
    for value in reversed(accepted):
        target = renamed_to(prober.server, base, name, value, known)
        if target:
            return {"renamed": target}
    bounds = re.search(r"outside the valid range .* \((\S+).* \.\. (\S+).*\)", prober.complaints([f"{name} = 1234567"]))
    if bounds:
        return {"vartype": "integer", "context": "user", "min_val": bounds[1], "max_val": bounds[2], "unlisted": True}
    return {"vartype": kind, "context": "user", "unlisted": True, **({"accepted": accepted} if said else {})}


def renamed_to(server: Server, base: str, name: str, value: str, known: dict[str, dict[str, Any]]) -> str | None:
    import psycopg

    with server.start(os.path.join(base, "data"), ["-c", f"{name}={value}"]) as running:
        try:
            with psycopg.connect(running.conninfo) as sql:
                row = sql.execute(
                    "SELECT name FROM pg_catalog.pg_settings WHERE source = 'command line' AND name NOT IN "
                    "('port', 'listen_addresses', 'unix_socket_directories')"
                ).fetchone()
        except psycopg.OperationalError:  # such a value lets no session in: no mere rename
            return None
    return str(row[0]) if row and row[0] in known else None


def hidden_values(prober: Prober, known: dict[str, dict[str, Any]], words: set[str]) -> dict[str, list[str]]:
    """Return the values that enums take without listing them."""
    enums = {name: what for name, what in known.items() if what["vartype"] == "enum" and what["context"] != "internal"}
    hidden: dict[str, list[str]] = {}
    for word in sorted({*BOOLEAN_WORDS, *FORMER_WORDS, *words}):
        tried = {name: word for name, what in enums.items() if word not in (v.lower() for v in what["enumvals"])}
        for name in tried.keys() - prober.refused_values(tried):
            hidden.setdefault(name, []).append(word)
    return hidden


def meaning(prober: Prober, name: str, value: str) -> str:
    """Return how the server shows a hidden value (`true` of huge_pages is `on`)."""
    with open(os.path.join(prober.directory, "postgresql.conf"), "w") as file:
        file.write(f"{name} = '{value}'\n")
    return prober.server.run_postgres_C(prober.directory, name).stdout.decode().strip()


def ask(server: Server, words: set[str]) -> dict[str, Any]:
    """Return everything that one build says of its settings."""
    with private_directory() as base:
        known = listed(server, base)
        prober = Prober(server, base)
        renamed: dict[str, str] = {}
        for name in unlisted(prober, known):
            found = classify(prober, name, known, base)
            if "renamed" in found:
                renamed[name] = found["renamed"]
            else:
                known[name] = {**dict.fromkeys(COLUMNS), "unlisted": True, **found}
        values = hidden_values(prober, {n: w for n, w in known.items() if "unlisted" not in w}, words)
        hidden = {name: {v: meaning(prober, name, v) for v in found} for name, found in values.items()}
        return {"known": known, "renamed": renamed, "hidden": hidden}


def number(text: str | None) -> float | int | None:
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        return float(text)


def record(what: dict[str, Any], hidden: dict[str, str]) -> list[Any]:
    """Return the compact form: [type, context, unit, min, max, default, {value: shown as}]."""
    kind = what["vartype"]
    short = {"bool": "b", "integer": "i", "real": "r", "string": "s", "enum": "e"}[kind]
    values: dict[str, str] | None = None
    if kind == "enum" and what["enumvals"]:
        values = {**{value.lower(): value for value in what["enumvals"]}, **hidden}
    if what.get("accepted") is not None:
        values = {value: value for value in what["accepted"]}
    numeric = kind in ("integer", "real")
    default = number(what["boot_val"]) if numeric else what["boot_val"]
    compact: list[Any] = [
        short,
        what["context"],
        what["unit"] or "",
        number(what["min_val"]) if numeric else None,
        number(what["max_val"]) if numeric else None,
        # paths and locales of one build are nobody else's default
        default if kind != "string" or not default or "/" not in str(default) else None,
        values,
    ]
    while compact and (compact[-1] is None or compact[-1] == ""):
        compact.pop()
    return compact


def merge(builds: dict[str, dict[str, Any]]) -> tuple[dict[str, list[Any]], list[str], dict[str, list[str]]]:
    """Return the union of the builds' settings, the names and the values that only some builds have."""
    names: dict[str, list[Any]] = {}
    for build in builds.values():
        for name, what in build["known"].items():
            new = record(what, build["hidden"].get(name, {}))
            old = names.setdefault(name.lower(), new)
            if old is not new and old[0] == "e" and len(old) > 6 and len(new) > 6:
                old[6] = {**old[6], **new[6]}
            elif old is not new and old[0] in "ir" and len(old) > 4:
                old[3], old[4] = min(old[3], new[3]), max(old[4], new[4])
    optional_names = [
        name for name in names if not all(name in {n.lower() for n in b["known"]} for b in builds.values())
    ]
    optional_values: dict[str, list[str]] = {}
    for name, what in names.items():
        if what[0] != "e" or len(what) < 7 or name in optional_names:
            continue
        for build in builds.values():
            known = {n.lower(): w for n, w in build["known"].items()}
            if "unlisted" in known[name]:
                continue
            have = {v.lower() for v in known[name]["enumvals"] or ()} | set(build["hidden"].get(name, {}))
            for value in set(what[6]) - have:
                optional_values.setdefault(name, []).append(value)
    return names, sorted(optional_names), {n: sorted(set(v)) for n, v in sorted(optional_values.items())}


def older_names(bin_dirs: list[str]) -> dict[int, tuple[str, set[str]]]:
    """Return per major the names that an older minor release knows (`postgres --describe-config` and the program)."""
    import subprocess

    found: dict[int, tuple[str, set[str]]] = {}
    for bin_dir in bin_dirs:
        program = os.path.join(bin_dir, "postgres")
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        version = said.split()[-1]
        server = Server(f"older-{version}", int(version.split(".")[0]), version, bin_dir)
        with private_directory() as base:
            found[server.major] = version, {name.lower() for name in listed(server, base)}
    return found


def main(argv: list[str]) -> int:
    older: list[str] = []
    pending = list(argv)
    while pending:
        if pending.pop(0) != "--older" or not pending:
            print(__doc__, file=sys.stderr)
            return 2
        older.append(pending.pop(0))
    servers: dict[int, dict[str, Server]] = {}
    for key, server in available().items():
        if isinstance(key, str):
            servers.setdefault(server.major, {})[key] = server
    words: set[str] = set()
    for builds in servers.values():
        for server in builds.values():
            with private_directory() as base:
                for what in listed(server, base).values():
                    words.update(value.lower() for value in what["enumvals"] or ())
    before = older_names(older)
    missing = [major for major in MAJORS if major not in servers]
    if missing:
        print(f"no server of {missing} here: python -m tests.servers fetch", file=sys.stderr)
        return 1
    gathered = {major: {key: ask(server, words) for key, server in sorted(servers[major].items())} for major in MAJORS}
    os.makedirs(OUT, exist_ok=True)
    merged = {major: merge(asked) for major, asked in gathered.items()}
    some_names = {name for _, optional_names, _ in merged.values() for name in optional_names}
    some_values: dict[str, set[str]] = {}
    for _, _, optional_values in merged.values():
        for name, values in optional_values.items():
            some_values.setdefault(name, set()).update(values)
    for major, asked in gathered.items():
        names, _, optional_values = merged[major]
        everywhere = set.intersection(*({name.lower() for name in build["known"]} for build in asked.values()))
        # Only some builds of a major are at hand: what is optional in another major may be so here.
        for name, taken in some_values.items():
            if name in names and names[name][0] == "e" and name not in optional_values and len(asked) == 1:
                optional_values[name] = sorted(taken)
        path = os.path.join(OUT, f"{major}.json")
        later: dict[str, str] = {}
        if os.path.exists(path):
            with open(path) as file:
                later = json.load(file)["absent_in"]
        if major in before:
            version, old = before[major]
            plain = {n.lower() for build in asked.values() for n, w in build["known"].items() if "unlisted" not in w}
            later = {name: version for name in sorted((plain & everywhere) - old) if names[name][1] != "internal"}
        document: dict[str, Any] = {
            "major": major,
            "builds": {key: servers[major][key].version for key in asked},
            "renamed": {old: new for build in asked.values() for old, new in build["renamed"].items()},
            "spelling": {
                name.lower(): name for build in asked.values() for name in build["known"] if name != name.lower()
            },
            "optional_names": sorted(some_names - everywhere),
            "optional_values": optional_values,
            "absent_in": later,
            "names": dict(sorted(names.items())),
        }
        with open(path, "w") as file:
            head = {key: value for key, value in document.items() if key != "names"}
            file.write(json.dumps(head, indent=1, sort_keys=True)[:-2] + ',\n "names": {\n')
            rows = [f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in document["names"].items()]
            file.write(",\n".join(rows) + "\n }\n}\n")
        print(path, len(names), "settings,", os.path.getsize(path), "bytes", head["builds"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
