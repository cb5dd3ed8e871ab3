"""``small_weights``: products by weights of 4 and 8 bits.

``ours`` is the library at its defaults. ``XLA`` multiplies by dequantised weights, and
``bfloat16`` by weights of bfloat16, which take four times or twice the bytes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import (
    Arrays,
    Errors,
    Program,
    on_gpu,
    program_command,
    random_arrays,
    relative,
)

_BF16 = jnp.bfloat16
_GROUP = 128
# Results, contracted elements and rows.
_LAYERS: dict[bool, list[tuple[int, int, tuple[int, ...]]]] = {
    True: [(14336, 4096, (1, 16, 64, 256)), (4096, 14336, (1, 16, 64)), (4096, 4096, (1, 16))],
    False: [(64, 256, (1, 16))],
}
# What float32 and bfloat16 round, over the largest element, of so many checked results.
_CHECKED = 64


def _operands(m: int, n: int, k: int, dtype: Any) -> Arrays:
    x, w = random_arrays(((m, k), _BF16), ((n, k), _BF16))
    return x, w, *jtk.quantize(w, block=(1, _GROUP), dtype=dtype)


def _ours(x: Any, _: Any, values: Any, scales: Any) -> Any:
    return jtk.scaled_matmul(x, values, None, scales)


def _of_dequantised(x: Any, _: Any, values: Any, scales: Any) -> Any:
    wide = values.reshape(*scales.shape, _GROUP).astype(_BF16) * scales[..., None].astype(_BF16)
    return jnp.dot(x, wide.reshape(values.shape).T)


def _of_bfloat16(x: Any, w: Any, *_: Any) -> Any:
    return jnp.dot(x, w.T)


def _errors(arguments: Arrays, results: Mapping[str, Any]) -> Errors:
    x, _, values, scales = (np.asarray(each)[:_CHECKED] for each in arguments)
    weights = values.astype(np.float64) * np.repeat(scales.astype(np.float64), _GROUP, axis=1)
    own = {side: results[side][:_CHECKED, :_CHECKED] for side in ("ours", "XLA")}
    return relative(own, x.astype(np.float64) @ weights.T)


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    for dtype in (jnp.int4, jnp.int8):
        name = np.dtype(dtype).name
        for n, k, rows in _LAYERS[on_gpu()]:
            for m in rows:
                yield Program(
                    f"{name} {m} x {n} x {k}",
                    functools.partial(_operands, m, n, k, dtype),
                    {"ours": _ours, "XLA": _of_dequantised, "bfloat16": _of_bfloat16},
                    _errors,
                    group=f"`scaled_matmul` by {name}",
                    margin=1.0,
                )


COMMAND = program_command("products by weights of 4 and 8 bits", _programs)
