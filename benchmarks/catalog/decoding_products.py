"""Products of layers of models where these decode: 1 to 64 rows of ``x`` by weights of 4 bits.

The peer of ``sample`` multiplies by weights of bfloat16, and ``dequantised`` is XLA's product of
the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_tilekern as jtk
from benchmarks.catalog.bounds import BF16, F32, INT4
from benchmarks.catalog.call import Description, Operand, Side, random_arrays
from benchmarks.catalog.draw import Draw
from benchmarks.samples import MODELS
from jax_tilekern.ops.products.scaled_operands import dequantized

_MOST_ROWS = 64
_GROUPS = 32, 64, 128


class _Product:
    """A call: see :class:`benchmarks.catalog.call.Sampled`."""

    is_wide = False

    def __init__(self, draw: Draw) -> None:
        hidden, intermediate, heads, key_heads, head, _ = draw.one(*MODELS.values())
        width, keys = heads * head, key_heads * head
        self.n, self.k = draw.one(
            (intermediate, hidden), (2 * intermediate, hidden), (hidden, intermediate),
            (width + 2 * keys, hidden), (hidden, width),
        )  # fmt: skip
        rows = math.exp(draw.rng.uniform(0, math.log(_MOST_ROWS)))
        self.m = draw.one(round(rows), 1 << round(math.log2(rows)))
        self.group = draw.one(*_GROUPS)
        self.operands = (
            Operand((self.m, self.k), BF16, (0, 1)),
            Operand((self.n, self.k), BF16, (0, 1)),
        )

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}, int4 in groups of {self.group}"

    @property
    def operations(self) -> float:
        """Those of the product."""
        return 2.0 * self.m * self.n * self.k

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of ``x``, of weights of bfloat16, and of the integers and scales."""
        shapes = (self.n, self.k), (self.n, math.ceil(self.k / self.group))
        return [
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.operands),
            jax.ShapeDtypeStruct(shapes[0], INT4),
            jax.ShapeDtypeStruct(shapes[1], F32),
        ]

    def values(self, seed: int) -> Sequence[Any]:
        """Return normal numbers; weights of bfloat16 are the integers times their scales."""
        x, w = random_arrays(self.operands, seed)
        values, scales = jtk.quantize(w, block=(1, self.group), dtype=INT4)
        return x, dequantized(values, scales).astype(BF16), values, scales

    def of_namespace(self, namespace: Any) -> Callable[..., Any]:
        """Return the product by the integers."""

        def function(x: Any, _: Any, values: Any, scales: Any) -> Any:
            return namespace.scaled_matmul(x, values, None, scales, BF16)

        return function

    def sides(self) -> dict[str, Side]:
        """Return the products of ``jnp``."""

        def of_integers(x: Any, _: Any, *weights: Any) -> Any:
            return jnp.dot(x, dequantized(*weights).astype(BF16).T)

        return {
            "bfloat16": Side(lambda x, w, *_: jnp.dot(x, w.T)),
            "dequantised": Side(of_integers),
        }


SAMPLES = [Description("scaled_matmul, decode", _Product)]
