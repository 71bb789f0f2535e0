"""Which rule files there are: those shipped with the program, and folders of the user's own."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from pgpreemptcheck.engine import parsedrules, yamlfile
from pgpreemptcheck.engine.types import RuleError
from pgpreemptcheck.engine.yamlfile import Document
from pgpreemptcheck.values import record

MAX_FILES = 200


@record
class RuleFile:
    """The bytes of one rule file, how it is named in messages, and its documents where they were parsed before."""

    name: str
    data: bytes
    shipped: bool
    parsed: Sequence[Document] | None = None


def shipped_files(*, tests: bool = True) -> list[RuleFile]:
    """Return the shipped rule files: in a wheel inside the package, in a checkout beside it, or out of a zip file.

    Without the tests that rules carry they need not be parsed where that was done before.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (os.path.join(package, "rules"), os.path.join(os.path.dirname(package), "rules")):
        try:
            names = _rule_names(os.listdir(folder))
        except OSError:
            continue
        if names:
            files = {f"rules/{name}": _bytes(os.path.join(folder, name)) for name in names}
            parsed = {} if tests else _parsed(files, folder)
            return [RuleFile(name, data, True, parsed.get(name)) for name, data in files.items()]
    from importlib import resources  # a zip file: the only place that needs this import, at twice a bare start

    inside = {item.name: item for item in resources.files("pgpreemptcheck").joinpath("rules").iterdir()}
    return [RuleFile(f"rules/{name}", inside[name].read_bytes(), True) for name in _rule_names(inside)]


def _parsed(files: Mapping[str, bytes], folder: str) -> Mapping[str, Sequence[Document]]:
    try:
        return parsedrules.load(_bytes(os.path.join(folder, parsedrules.NAME)), files)
    except OSError:  # a checkout
        return {}


def _bytes(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


def user_files(folder: str) -> list[RuleFile]:
    """Return a user's rule files. As root, a folder or file that another user could write is refused (RuleError)."""
    path = os.path.realpath(folder)
    try:
        if os.geteuid() == 0:
            _trusted(path, folder)
        names = _rule_names(os.listdir(path))
    except OSError as error:
        raise RuleError(f"{folder}: a folder of rule files is expected ({error.strerror})") from None
    if not names:
        raise RuleError(f"{folder}: a folder with rule files (*.yaml) is expected")
    if len(names) > MAX_FILES:
        raise RuleError(f"{folder}: a folder has at most {MAX_FILES} rule files")
    return [RuleFile(os.path.join(folder, name), _read_user_file(os.path.join(path, name)), False) for name in names]


def _rule_names(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith((".yaml", ".yml")) and not name.startswith("."))


def _read_user_file(path: str) -> bytes:
    real = os.path.realpath(path)
    try:
        if os.geteuid() == 0:
            _trusted(real, path)
        fd = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if os.geteuid() == 0:
                _check_owner(status, path)  # of what was opened, should the path have changed meanwhile
            with os.fdopen(os.dup(fd), "rb") as stream:
                return stream.read(yamlfile.MAX_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise RuleError(f"{path}: a readable rule file is expected ({error.strerror})") from None


def _trusted(real: str, named: str) -> None:
    """Refuse a path of which any part could be replaced by a user other than root and the caller."""
    part = real
    while True:
        status = os.lstat(part)
        sticky = part != real and status.st_mode & stat.S_ISVTX  # /tmp: others cannot rename what is not theirs
        if not sticky:
            _check_owner(status, named, part)
        if part == "/":
            return
        part = os.path.dirname(part)


def _check_owner(status: os.stat_result, named: str, part: str | None = None) -> None:
    where = f" ({part})" if part is not None and os.path.realpath(named) != part else ""
    if status.st_uid not in (0, os.geteuid()):
        raise RuleError(f"{named}: as root, rules of root only are read; its owner is uid {status.st_uid}{where}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuleError(f"{named}: as root, rules that others can write are not read: chmod go-w{where}")
