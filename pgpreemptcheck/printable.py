"""Texts that others wrote, made harmless: what a report, an error line or a rule shows must not act on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with control characters, bidi controls and undecodable bytes escaped: nothing acts on a terminal.

    Files that other users wrote end up in a report that root reads.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_harmless(c) else _escaped(c) for c in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() and not "\ud800" <= char <= "\udfff"


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8 (PEP 383)
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
