"""The journal of a result on disk: its completed blocks, so that a call can resume a product.

The journal exists beside the result from before its first block until after its last: a result that
has one is incomplete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jax_tilekern.files import replace_text
from jax_tilekern.out_of_core.plan import Plan, Tile

_FORMAT = 1
_SAMPLED_ROWS = 64


class Journal:
    """The completed blocks of one result.

    Parameters
    ----------
    out
        The result, in a file.
    plan
        The blocks.
    identity
        A digest of the computation.

    Attributes
    ----------
    done
        Checksums of the blocks that need not be computed again.

    Raises
    ------
    ValueError
        If the file has a journal of another computation.
    OSError
        If there is no space for the result, or the journal cannot be read or written.
    """

    def __init__(self, out: np.memmap[Any, Any], plan: Plan, identity: str) -> None:
        self._out = out
        self._plan = plan
        self._path = Path(f"{out.filename}.unfinished.json")
        self._identity = identity
        self.done: dict[Tile, int] = {}
        if self._path.exists():
            # The file may have been replaced since; the checksums show which blocks it has.
            found = self._read()
            self.done = {t: check for t, check in found.items() if self._checksum(t) == check}
        else:
            _allocate(out)
            self._write()

    def add(self, tile: Tile) -> None:
        """Record that a block was written: flush it to disk first, and then the journal."""
        self._out.flush()
        self.done[tile] = self._checksum(tile)
        self._write()

    def close(self) -> None:
        """Declare the result complete."""
        self._out.flush()
        self._path.unlink()

    def _checksum(self, tile: Tile) -> int:
        return zlib.crc32(np.ascontiguousarray(self._out[self._plan.place(tile)]).view(np.uint8))

    def _read(self) -> dict[Tile, int]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(self._path.read_text())
            if (record["format"], record["identity"]) == (_FORMAT, self._identity):
                return {Tile(row, column): check for row, column, check in record["done"]}
        raise ValueError(
            f"{self._path} belongs to an unfinished product of other operands or with other "
            "blocks; finish it with the same arguments, or delete it to start again"
        )

    def _write(self) -> None:
        done = [[*tile, check] for tile, check in sorted(self.done.items())]
        record = {"format": _FORMAT, "identity": self._identity, "done": done}
        replace_text(self._path, json.dumps(record))


def identity(operands: Iterable[Any], *parts: Any) -> str:
    """Return a digest of the operands and of everything else that decides the result's bits.

    A file is identified by its path, size and time, and other arrays by a sample of their rows.
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
    """Allocate the file's space now; a page without space would later kill the process."""
    if hasattr(os, "posix_fallocate"):
        with open(str(out.filename), "rb+") as file:
            os.posix_fallocate(file.fileno(), out.offset, out.nbytes)
