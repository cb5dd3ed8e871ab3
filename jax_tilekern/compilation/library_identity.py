"""What distinguishes a shared library from any other, found without loading it."""

from __future__ import annotations

import os
import struct

_NOTES = 4  # the type of a segment
_BUILD_ID = 3  # the type of a note
# A build ID has 20 bytes. What claims to be longer than this is no note.
_LONGEST = 1 << 16


def file_identity(path: str) -> str:
    """Return the build ID of a library, or its path, size and time if it has none.

    Copies of a library in several environments have one build ID, so they share cached kernels.
    """
    file = os.stat(path)
    return _build_id(path) or f"{path} {file.st_size} {file.st_mtime_ns}"


def _build_id(path: str) -> str | None:
    """Return the build ID in the notes of a 64-bit little-endian ELF file."""
    with open(path, "rb") as file:

        def read(at: int, length: int) -> bytes:
            file.seek(at)
            return file.read(length)

        try:
            header = read(0, 64)
            if header[:6] != b"\x7fELF\x02\x01":
                return None
            (table,) = struct.unpack_from("<Q", header, 0x20)
            size, count = struct.unpack_from("<2H", header, 0x36)
            for i in range(count):
                # Past the flags: the offset in the file; past both addresses: the size there.
                kind, offset, length = struct.unpack("<I4xQ16xQ", read(table + i * size, 40))
                if kind == _NOTES and length <= _LONGEST:
                    found = _build_id_of(read(offset, length))
                    if found:
                        return found
        except struct.error:  # The file is truncated.
            pass
    return None


def _build_id_of(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, value_bytes, kind = struct.unpack_from("<3I", notes, at)
        name, value = at + 12, at + 12 + -(-name_bytes // 4) * 4
        at = value + -(-value_bytes // 4) * 4
        is_whole = value + value_bytes <= len(notes)
        if kind == _BUILD_ID and notes[name : name + name_bytes] == b"GNU\0" and is_whole:
            return notes[value : value + value_bytes].hex()
    return None
