"""Numbers as people read them: sizes in PostgreSQL's binary units, pages, counts, times."""

from __future__ import annotations


def as_bytes(value: float) -> str:
    """Return a size in PostgreSQL's binary units, to two decimals: 1.5 GB, 960 MB, 512 bytes."""
    size = float(abs(value))
    if size < 1024:
        return f"{value:g} byte{'' if size == 1 else 's'}"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1024
        if round(size, 2) < 1024 or unit == "TB":
            break
    number = f"{size:.2f}".rstrip("0").rstrip(".")
    return f"{'-' if value < 0 else ''}{number} {unit}"


def as_pages(value: float) -> str:
    """Return a number of pages: 61,440 pages."""
    return f"{as_count(value)} page{'' if value == 1 else 's'}"


def as_count(value: float) -> str:
    """Return a number with separators: 61,440."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")


def as_seconds(value: float) -> str:
    """Return a time, in its two largest units: 5 s, 1 min 30 s, 3 h, 2 d 4 h."""
    if abs(value) < 60:
        return f"{value:.3g} s"
    rest = round(abs(value))
    told = []
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, seconds)
        if count:
            told.append(f"{count} {unit}")
    return ("-" if value < 0 else "") + " ".join(told[:2])
