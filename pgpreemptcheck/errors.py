"""Errors that are the user's to mend."""


class UserError(Exception):
    """Input that cannot be used: one line that names file, line and what is expected. Exit code 2."""
