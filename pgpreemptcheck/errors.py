"""Errors that are the user's to mend, and how others are told."""

from __future__ import annotations


class UserError(Exception):
    """Input that cannot be used: one line that names file, line and what is expected. Exit code 2."""


def describe(error: Exception) -> str:
    """Return an error of ours in one line, with the place where it was raised."""
    import os
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"
