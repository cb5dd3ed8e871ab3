"""The progress of a product, for its caller and its progress bar."""

from __future__ import annotations

from typing import NamedTuple

from jax_tilekern.out_of_core.plan import Plan


class Progress(NamedTuple):
    """The progress of a product.

    Attributes
    ----------
    done, total
        Blocks of the result.
    read_bytes
        Bytes of operands that were copied to devices.
    seconds
        Seconds since the start.
    plan
        The plan of the product.
    """

    done: int
    total: int
    read_bytes: int
    seconds: float
    plan: Plan
