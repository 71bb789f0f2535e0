"""global/pg_control: what the cluster last was, and the limits that a standby must not be below.

Sources: PostgreSQL src/include/catalog/pg_control.h (13 to 19), src/common/controldata_utils.c, and
src/backend/access/transam/xlogrecovery.c (CheckRequiredParameterValues).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from pgpreemptcheck.host import Host
from pgpreemptcheck.values import Fact, Known, Unknown, record

# By pg_control_version: where `wal_level` and what follows it lies, xlog_seg_size, and the CRC of all before it.
# 13 to 16 share 1300; 19 is 1905 from its release candidates on (its betas had others).
_LAYOUTS: dict[int, tuple[int, int, int]] = {
    1300: (172, 228, 288),
    1700: (172, 228, 288),
    1800: (172, 228, 292),
    1905: (180, 240, 308),
}

# wal_level, wal_log_hints, MaxConnections, max_worker_processes, max_wal_senders, max_prepared_xacts,
# max_locks_per_xact, track_commit_timestamp, maxAlign, floatFormat
_PARAMETERS = "iB3x5iB3xId"
_FLOAT_FORMAT = 1234567.0  # FLOATFORMAT_VALUE: right only if the layout is
_REQUIRED = (
    "max_connections",
    "max_worker_processes",
    "max_wal_senders",
    "max_prepared_transactions",
    "max_locks_per_transaction",
)
_STATES = (
    "starting up",
    "shut down",
    "shut down in recovery",
    "shutting down",
    "in crash recovery",
    "in archive recovery",
    "in production",
)
_WAL_LEVELS = ("minimal", "replica", "logical")
_ATTEMPTS = 5  # the server writes the file in place, so a read can meet a write


@record
class Control:
    """What pg_control holds.

    On a standby `required` are its primary's settings, as replayed last: with hot_standby = on (the default) it
    refuses to start when one of its own is lower. `track_commit_timestamp` is the primary's too and refuses nothing.
    A standby of a primary whose `wal_level` was minimal refuses to start in any case.
    `wal_segment_bytes` is what initdb --wal-segsize set.
    """

    version: int
    catalog_version: int
    system_identifier: int
    state: str
    wal_level: str
    required: Mapping[str, int]
    track_commit_timestamp: bool
    wal_segment_bytes: int


def read(host: Host, data_directory: str) -> Fact[Control]:
    """Return what `global/pg_control` of a data directory holds (PostgreSQL 13 to 19), its CRC checked."""
    path = f"{data_directory}/global/pg_control"
    found: Fact[Control] = Unknown(f"{path} was not read")
    for _ in range(_ATTEMPTS):
        data = host.read_range(path, 0, 512)
        if isinstance(data, Unknown):
            return data
        found = _parse(data.value, path)
        if isinstance(found, Known) or not host.live:
            break
    return found


def _parse(data: bytes, path: str) -> Fact[Control]:
    if len(data) < 20:  # up to `state`
        return Unknown(f"{path} is too short to be a control file")
    order = next((o for o in "<>" if struct.unpack_from(f"{o}I", data, 8)[0] in _LAYOUTS), "")
    if not order:
        version = struct.unpack_from("=I", data, 8)[0]
        return Unknown(f"{path} has version {version}, whose layout is not known here", kind="unsupported")
    identifier, version, catalog, state = struct.unpack_from(f"{order}QIIi", data)
    start, segment_at, end = _LAYOUTS[version]
    if len(data) < end + 4:
        return Unknown(f"{path} is cut off")
    if _crc32c(data[:end]) != struct.unpack_from(f"{order}I", data, end)[0]:
        return Unknown(f"{path} does not match its checksum", "pg_controldata tells whether it is damaged")
    level, _, *required, commit_timestamps, _, float_format = struct.unpack_from(order + _PARAMETERS, data, start)
    (segment,) = struct.unpack_from(f"{order}I", data, segment_at)
    # IsValidWalSegSize (xlog_internal.h): a power of 2 from 1 MB to 1 GB
    valid = segment in (1 << 20 << power for power in range(11))
    if float_format != _FLOAT_FORMAT or level not in range(3) or state not in range(len(_STATES)) or not valid:
        return Unknown(f"{path} has version {version}, but not its layout", kind="unsupported")
    return Known(
        Control(
            version=version,
            catalog_version=catalog,
            system_identifier=identifier,
            state=_STATES[state],
            wal_level=_WAL_LEVELS[level],
            required=dict(zip(_REQUIRED, required, strict=True)),
            track_commit_timestamp=bool(commit_timestamps),
            wal_segment_bytes=segment,
        ),
        path,
    )


_table: list[int] = []


def _crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes."""
    if not _table:
        for index in range(256):
            for _ in range(8):
                index = index >> 1 ^ (0x82F63B78 if index & 1 else 0)
            _table.append(index)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def is_standby(host: Host, data_directory: str) -> Fact[bool]:
    """Return whether the next start will be one in recovery: standby.signal or recovery.signal is there (12+)."""
    names = host.list(data_directory)
    if isinstance(names, Unknown):
        return names
    for name in ("standby.signal", "recovery.signal"):
        if name in names.value:
            status = host.status(f"{data_directory}/{name}")
            if isinstance(status, Known):
                return Known(True, f"{data_directory}/{name}")
            if status.kind != "absent":  # the server, too, takes a link that leads nowhere for no file
                return status
    source = f"{data_directory}: no standby.signal and no recovery.signal"
    return Known(False, source, "measured" if host.live else "inferred")
