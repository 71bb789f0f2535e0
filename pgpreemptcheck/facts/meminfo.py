"""/proc/meminfo (Documentation/filesystems/proc.rst): one line a key, sizes in kB, huge page counts without a unit."""

from __future__ import annotations

from collections.abc import Mapping

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, is_number, record

PATH = "/proc/meminfo"

_WRAPPED = 1 << 63
"""The kernel's counters are signed longs here: a number above it is one that went below zero."""


@record
class Meminfo:
    """The lines of /proc/meminfo by key, every value as written; or why the file could not be read."""

    lines: Mapping[str, tuple[str, ...]] | Unknown

    def _words(self, key: str) -> list[str] | Unknown:
        if isinstance(self.lines, Unknown):
            return self.lines
        values = self.lines.get(key)
        if values is None:
            return Unknown(f"{PATH} has no line {key}", kind="absent")
        if len(values) > 1:
            return Unknown(f"{PATH} has {len(values)} lines {key}, which no kernel prints", "read the file again")
        return values[0].split()

    def number(self, key: str) -> Fact[int]:
        """Return a number that has no unit (pages)."""
        words = self._words(key)
        if isinstance(words, Unknown):
            return words
        if len(words) != 1 or not is_number(words[0]):
            return Unknown(f"{PATH}: {key} is not one number: {' '.join(words)[:60]}", "read the file again")
        number = int(words[0])
        if number >= _WRAPPED:
            return Unknown(f"{PATH}: {key} is {number}, a counter that went below zero in the kernel")
        return Known(number, f"{PATH} {key}")

    def size(self, key: str) -> Fact[int]:
        """Return a size in bytes; the kernel prints kB and means 1024 bytes."""
        words = self._words(key)
        if isinstance(words, Unknown):
            return words
        if len(words) != 2 or not is_number(words[0]) or words[1].lower() != "kb":
            return Unknown(f"{PATH}: {key} is not one size in kB: {' '.join(words)[:60]}", "read the file again")
        number = int(words[0])
        if number >= _WRAPPED:
            return Unknown(f"{PATH}: {key} is {number} kB, a counter that went below zero in the kernel")
        return Known(number * 1024, f"{PATH} {key}")


def read(host: Host) -> Meminfo:
    """Read the file once; every question about it is then answered from memory."""
    text = host.read(PATH, limit=1 << 16)
    if isinstance(text, Unknown):
        return Meminfo(text)
    lines: dict[str, tuple[str, ...]] = {}
    for line in text.value.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            key = key.strip()
            lines[key] = (*lines.get(key, ()), value.strip())
    return Meminfo(lines)
