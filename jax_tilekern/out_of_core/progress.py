"""How far a product is, as its caller and its progress bar see it."""

from __future__ import annotations

from typing import NamedTuple

from jax_tilekern.out_of_core.plan import Plan


class Progress(NamedTuple):
    """How far a product is.

    Attributes
    ----------
    done, total
        Blocks of the result.
    read_bytes
        Bytes of operands that were copied to devices.
    seconds
        Time since the start.
    plan
        How the product is cut.
    """

    done: int
    total: int
    read_bytes: int
    seconds: float
    plan: Plan
