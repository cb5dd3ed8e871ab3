"""The cache of compiled kernels on disk: bounded, and shared by processes.

An entry is a file with the SHA-256 of its content, and the content. It is renamed into place, so
that another process reads all of it or nothing. Its modification time is the time of its last use.
When the entries exceed ``LIMIT_BYTES``, any process deletes the least recently used ones. An entry
that is missing, damaged or unreadable is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs

# This is room for about ten thousand kernels.
LIMIT_BYTES = 256 << 20


@dataclass(frozen=True)
class CacheInfo:
    """State of the disk cache.

    Attributes
    ----------
    location
        Its folder, which need not exist.
    entries
        Number of entries.
    bytes
        Their total size, at most about ``LIMIT_BYTES``.
    oldest_use
        When the least recently used entry was used, in seconds since the epoch; ``None`` without
        entries.
    """

    location: Path
    entries: int
    bytes: int
    oldest_use: float | None


def info() -> CacheInfo:
    """Return the location and the size of the cache."""
    files = [file for file in _files() if not file.is_part]
    oldest_use = min((file.used for file in files), default=None)
    return CacheInfo(_folder(), len(files), sum(file.bytes for file in files), oldest_use)


def clear() -> CacheInfo:
    """Delete every entry that may be deleted; return the state before."""
    before = info()
    for file in _files():
        file.delete()
    return before


def contains(key: str) -> bool:
    """Return whether there is an entry, which may be damaged."""
    # Path.exists() raises for a folder without permission; this returns False.
    return os.path.exists(_path(key))


def read(key: str) -> bytes | None:
    """Return an entry's content, or ``None`` if it is missing, damaged or unreadable."""
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def write(key: str, content: bytes) -> None:
    """Store an entry; a folder that cannot be written gives one warning."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=key, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, _path(key))
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _warn_unwritable(str(folder), str(error))
    else:
        _evict()


def _evict() -> None:
    files = _files()
    excess = sum(file.bytes for file in files) - LIMIT_BYTES
    if excess <= 0:
        return
    # Deleting a quarter more than necessary makes a full cache rare.
    excess += LIMIT_BYTES // 4
    for file in sorted(files, key=lambda file: file.used):
        if excess <= 0:
            return
        file.delete()
        excess -= file.bytes


class _File(NamedTuple):
    """A file at the time of listing; another process may have deleted it since."""

    path: str
    bytes: int
    used: float

    @property
    def is_part(self) -> bool:
        """Whether it is being written, or was when its process ended."""
        return self.path.endswith(".part")

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _files() -> list[_File]:
    """Return the files of the cache; none where the folder is not readable."""
    found = []
    with contextlib.suppress(OSError), os.scandir(_folder()) as files:
        for file in files:
            if file.name.endswith((".cubin", ".part")):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat()
                    found.append(_File(file.path, status.st_size, status.st_mtime))
    return found


def _folder() -> Path:
    return platformdirs.user_cache_path("jax_tilekern", appauthor=False) / "cubin"


def _path(key: str) -> Path:
    return _folder() / f"{key}.cubin"


@functools.cache
def _warn_unwritable(folder: str, reason: str) -> None:
    warnings.warn(
        f"jax_tilekern cannot cache compiled kernels in {folder} ({reason}); "
        "each process compiles its own",
        RuntimeWarning,
        stacklevel=2,
    )
