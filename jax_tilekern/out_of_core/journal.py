"""Which blocks of a result on disk are done, so that a product that was cut short goes on.

The journal lies beside the result from before its first block until after its last: a result that
has one is not whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jax_tilekern.out_of_core.plan import Tile

SUFFIX = ".unfinished.json"
_FORMAT = 1
_SAMPLED_ROWS = 64


class Journal:
    """The blocks of one result that are done.

    Parameters
    ----------
    out
        The result, which is in a file.
    identity
        A digest of what is computed.
    place
        Where a block lies in the result.

    Raises
    ------
    ValueError
        If the file has a journal of something else.
    OSError
        If there is no space for the result, or the journal cannot be read or written.
    """

    def __init__(
        self, out: np.memmap[Any, Any], identity: str, place: Callable[[Tile], Any]
    ) -> None:
        self._out = out
        self._place = place
        self._path = Path(f"{out.filename}{SUFFIX}")
        self._identity = identity
        self._done: dict[Tile, int] = {}
        if self._path.exists():
            # A file that was made anew since has nothing of what was done.
            found = self._read()
            self._done = {t: check for t, check in found.items() if self._checksum(t) == check}
        else:
            _allocate(out)
            self._write()

    @property
    def done(self) -> frozenset[Tile]:
        """Blocks that need not be computed again."""
        return frozenset(self._done)

    def add(self, tile: Tile) -> None:
        """Note that a block was written to the array: to disk first, and then its note."""
        self._out.flush()
        self._done[tile] = self._checksum(tile)
        self._write()

    def close(self) -> None:
        """Declare the result whole."""
        self._out.flush()
        self._path.unlink()

    def _checksum(self, tile: Tile) -> int:
        return zlib.crc32(np.ascontiguousarray(self._out[self._place(tile)]).view(np.uint8))

    def _read(self) -> dict[Tile, int]:
        text = self._path.read_text()
        try:
            record = json.loads(text)
            known = record["format"] == _FORMAT and record["identity"] == self._identity
            done = {Tile(row, column): check for row, column, check in record["done"]}
        except (ValueError, TypeError, KeyError):
            known, done = False, {}
        if not known:
            raise ValueError(
                f"{self._path} is of an unfinished product of other operands, or cut into other "
                "blocks; finish it with the same arguments, or delete it to start afresh"
            )
        return done

    def _write(self) -> None:
        done = [[*tile, check] for tile, check in sorted(self._done.items())]
        record = {"format": _FORMAT, "identity": self._identity, "done": done}
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f"{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def identity(operands: Iterable[Any], *parts: Any) -> str:
    """Return a digest of operands and of whatever else decides on the result's bits.

    A file is known by its path, size and time; of other arrays some rows are read.
    """
    digest = hashlib.sha256()
    for operand in operands:
        digest.update(repr((tuple(operand.shape), str(operand.dtype))).encode())
        if isinstance(operand, np.memmap) and operand.filename is not None:
            status = os.stat(operand.filename)
            file = os.path.realpath(operand.filename)
            digest.update(repr((file, status.st_size, status.st_mtime_ns)).encode())
            digest.update(repr((operand.__array_interface__["strides"], operand.offset)).encode())
        else:
            rows = np.unique(np.linspace(0, operand.shape[0] - 1, _SAMPLED_ROWS).astype(int))
            for row in rows:
                digest.update(np.ascontiguousarray(operand[int(row)]).tobytes())
    digest.update(repr(parts).encode())
    return digest.hexdigest()


def _allocate(out: np.memmap[Any, Any]) -> None:
    """Take the file's space now: a page that finds none later would end the process."""
    if out.mode == "r" or not hasattr(os, "posix_fallocate"):
        return
    with open(str(out.filename), "rb+") as file:
        os.posix_fallocate(file.fileno(), out.offset, out.nbytes)
