"""A small ELF reader: is a symbol in a file's dynamic symbol table?

It goes the way the dynamic loader goes (System V gABI, chapter 5; the GNU hash table of binutils and glibc): program
headers, dynamic section, hash table, symbol. So it reads a few pages of a file of many megabytes, needs no section
headers, and works on stripped files. Any class, byte order and machine. A file is material from somebody else: every
count in it is bounded, and whatever does not fit raises `MalformedError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

_PAGE = 32768
_MAX_PAGES = 64  # 2 MB: a look-up of three names in a real server takes about six
_MAX_STEPS = 4096  # of one hash chain; real ones are a few entries long
_MAX_HEADERS = 512
_MAX_NAME = 256

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH = 4, 5, 6, 10, 0x6FFFFEF5
_WIDE_HASH_MACHINES = (22, 0x9026)  # 64-bit s390 and Alpha have 8-byte words in DT_HASH, against the gABI


class MalformedError(ValueError):
    """The bytes are no ELF file with dynamic symbols, as far as it was read; the message says what is wrong."""


class Symbols:
    """The dynamic symbols that an ELF file defines. `fetch(offset, length)` returns its bytes, fewer at its end."""

    def __init__(self, fetch: Callable[[int, int], bytes]) -> None:
        self._fetch = fetch
        self._pages: dict[int, bytes] = {}
        ident = self._bytes(0, 16)
        if ident[:4] != b"\x7fELF" or ident[4] not in (1, 2) or ident[5] not in (1, 2):
            raise MalformedError("no ELF file")
        self._wide = ident[4] == 2
        self._order = "<" if ident[5] == 1 else ">"
        self._loads: list[tuple[int, int, int]] = []
        self._read_dynamic(self._read_headers())

    def defines(self, name: str) -> bool:
        """Return whether the file defines this dynamic symbol."""
        wanted = name.encode()
        return self._in_gnu_hash(wanted) if self._gnu_hash is not None else self._in_hash(wanted)

    # the file ------------------------------------------------------------------------------------

    def _bytes(self, offset: int, length: int) -> bytes:
        """Return exactly these bytes of the file, page by page from a cache."""
        if offset < 0 or offset >= 1 << 48:
            raise MalformedError("an offset lies outside of any file")
        parts = []
        end = offset + length
        while offset < end:
            number, start = divmod(offset, _PAGE)
            page = self._pages.get(number)
            if page is None:
                if len(self._pages) >= _MAX_PAGES:
                    raise MalformedError("its tables are spread over too many pages")
                page = self._pages[number] = self._fetch(number * _PAGE, _PAGE)
            part = page[start : start + end - offset]
            if not part:
                raise MalformedError("it ends before its own tables do")
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        """Unpack integers in the file's byte order; `P` is a word of the file's class."""
        layout = self._order + layout.replace("P", "Q" if self._wide else "I")
        return struct.unpack(layout, self._bytes(offset, struct.calcsize(layout)))

    def _offset(self, address: int) -> int:
        """Return where in the file the loader finds a virtual address."""
        for start, size, offset in self._loads:
            if start <= address < start + size:
                return offset + address - start
        raise MalformedError("its dynamic section points outside of what is loaded")

    # headers -------------------------------------------------------------------------------------

    def _read_headers(self) -> tuple[int, int]:
        """Note the loaded ranges; return offset and size of the dynamic section."""
        _, self._machine, _, _, table, _, _, _, size, count = self._unpack("HHIPPPIHHH", 16)
        if count > _MAX_HEADERS or size != (56 if self._wide else 32):
            raise MalformedError("its program headers are not as they should be")
        dynamic = None
        for index in range(count):
            at = table + index * size
            if self._wide:
                kind, _, offset, address, _, in_file = self._unpack("IIQQQQ", at)
            else:
                kind, offset, address, _, in_file = self._unpack("IIIII", at)
            if kind == _PT_LOAD:
                self._loads.append((address, in_file, offset))
            elif kind == _PT_DYNAMIC:
                dynamic = (offset, in_file)
        if dynamic is None:
            raise MalformedError("it has no dynamic section")
        return dynamic

    def _read_dynamic(self, where: tuple[int, int]) -> None:
        offset, size = where
        entry = 16 if self._wide else 8
        tags: dict[int, int] = {}
        for index in range(min(size // entry, _MAX_HEADERS)):
            tag, value = self._unpack("PP", offset + index * entry)
            if tag == 0:
                break
            tags[tag] = value
        if _DT_SYMTAB not in tags or _DT_STRTAB not in tags or not (_DT_GNU_HASH in tags or _DT_HASH in tags):
            raise MalformedError("it has no dynamic symbols with a hash table")
        self._symbols = self._offset(tags[_DT_SYMTAB])
        self._strings = self._offset(tags[_DT_STRTAB])
        self._strings_size = tags.get(_DT_STRSZ, 0)
        self._gnu_hash = self._offset(tags[_DT_GNU_HASH]) if _DT_GNU_HASH in tags else None
        self._hash = self._offset(tags[_DT_HASH]) if _DT_HASH in tags else 0

    # symbols -------------------------------------------------------------------------------------

    def _is(self, index: int, wanted: bytes) -> bool:
        """Return whether symbol `index` has this name and is defined here, not only asked of a library."""
        if self._wide:
            name, _, _, section = self._unpack("IBBH", self._symbols + index * 24)
        else:
            name, _, _, _, _, section = self._unpack("IIIBBH", self._symbols + index * 16)
        if section == 0 or len(wanted) >= _MAX_NAME or name + len(wanted) >= self._strings_size:
            return False
        return self._bytes(self._strings + name, len(wanted) + 1) == wanted + b"\0"

    def _in_gnu_hash(self, wanted: bytes) -> bool:
        value = 5381
        for byte in wanted:
            value = (value * 33 + byte) & 0xFFFFFFFF
        assert self._gnu_hash is not None
        bucket_count, first, bloom_size, shift = self._unpack("IIII", self._gnu_hash)
        if not bucket_count or not bloom_size:
            raise MalformedError("its hash table is empty")
        word = 64 if self._wide else 32
        bloom = self._gnu_hash + 16
        (bits,) = self._unpack("P", bloom + (value // word) % bloom_size * (word // 8))
        mask = 1 << value % word | 1 << (value >> (shift & 31)) % word
        if bits & mask != mask:
            return False
        buckets = bloom + bloom_size * (word // 8)
        (index,) = self._unpack("I", buckets + value % bucket_count * 4)
        if index < first:
            if index:
                raise MalformedError("its hash table points before its own symbols")
            return False
        for at in range(index, index + _MAX_STEPS):
            (found,) = self._unpack("I", buckets + (bucket_count + at - first) * 4)
            if found | 1 == value | 1 and self._is(at, wanted):
                return True
            if found & 1:
                return False
        raise MalformedError("a chain of its hash table does not end")

    def _in_hash(self, wanted: bytes) -> bool:
        value = 0
        for byte in wanted:
            value = (value << 4) + byte
            high = value & 0xF0000000
            value = (value ^ high >> 24) & 0x0FFFFFFF
        word = "Q" if self._wide and self._machine in _WIDE_HASH_MACHINES else "I"
        size = struct.calcsize("=" + word)
        bucket_count, chain_count = self._unpack(word * 2, self._hash)
        if not bucket_count:
            raise MalformedError("its hash table is empty")
        (index,) = self._unpack(word, self._hash + (2 + value % bucket_count) * size)
        for _ in range(_MAX_STEPS):
            if index == 0:
                return False
            if index >= chain_count:
                raise MalformedError("its hash table points outside of itself")
            if self._is(index, wanted):
                return True
            (index,) = self._unpack(word, self._hash + (2 + bucket_count + index) * size)
        raise MalformedError("a chain of its hash table does not end")
