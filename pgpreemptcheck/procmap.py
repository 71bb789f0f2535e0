"""PROCMAP_QUERY: the page size of one mapping of a process, asked of the kernel without a page-table walk.

An ioctl on an open `/proc/PID/maps` (Linux 6.11, fs/proc/task_mmu.c do_procmap_query; struct procmap_query in
include/uapi/linux/fs.h). The kernel checks the right to read that process when the file is opened.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable

from pgpreemptcheck.host import gap
from pgpreemptcheck.values import Fact, Known, Unknown

# size, query_flags, query_addr | vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode |
# dev_major, dev_minor, vma_name_size, build_id_size | vma_name_addr, build_id_addr
_QUERY = struct.Struct("=9Q4I2Q")
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17  # _IOWR('f', 17, struct procmap_query)


def page_bytes(pid: int, address: int) -> int:
    """Return the page size in bytes of the mapping that covers `address`; raises OSError where it cannot be had."""
    import fcntl

    query = bytearray(_QUERY.pack(_QUERY.size, 0, address, *[0] * 12))
    fd = os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _PROCMAP_QUERY, query)
    finally:
        os.close(fd)
    return int(_QUERY.unpack(query)[6])


def fact(pid: int, address: int, ask: Callable[[int, int], int] = page_bytes, uid: int | None = None) -> Fact[int]:
    """Return what `ask` (by default `page_bytes`) finds, or why there is no answer; `uid` is who asked."""
    path = f"/proc/{pid}/maps"
    try:
        size = ask(pid, address)
    except OSError as error:
        if error.errno == errno.ENOTTY:
            return Unknown(
                "this kernel has no PROCMAP_QUERY, which came with Linux 6.11 "
                "and gives the page size of a mapping without a page walk",
                kind="unsupported",
            )
        if error.errno == errno.ENOENT and os.path.lexists(path):
            return Unknown(f"process {pid} has no mapping at {address:#x}", kind="absent")
        return gap(path, error, uid)
    if size <= 0 or size & (size - 1):
        return Unknown(f"{path}: {size} is no page size")
    return Known(size, f"{path} (PROCMAP_QUERY)")
