"""``small_weights``: products by weights of 4 and 8 bits, and their errors.

``ours`` is the library at its defaults. ``XLA`` multiplies by dequantised weights, and
``bfloat16`` by weights of bfloat16, which take four times or twice the bytes. Those of layers of
experts are ``jtk.moe``, too. Calls alternate among copies of the weights that exceed a GPU's L2, as
the layers of a model do.

``small_weights_accuracy`` compares the same sides with float64. What is exact is the product of the
dequantised weights, and for ``bfloat16`` that of its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks import moe
from benchmarks.commands import ProgramsCommand, RowsCommand
from benchmarks.programs import Arrays, Errors, Program, on_gpu, random_arrays, relative
from benchmarks.record import Record
from jax_tilekern.ops.products.scaled_operands import dequantized

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


# Tokens of a layer of experts.
_DECODED = 1, 16, 64


def _experts(sizes: moe.Sizes) -> Arrays:
    """Return a layer's arguments, and its quantised matrices, of which the plain ones are made."""
    x, *matrices, weights, indices = moe.operands(sizes)
    small = jtk.quantize_weights(matrices, lambda *_: True, block=(1, _GROUP))
    arrays = jax.jit(lambda small: [w.array() for w in small])(small)
    return x, weights, indices, arrays, small


def _layer(given: Any, matrices: Any) -> Any:
    (x, weights, indices, *_), (up, gate, down) = given, matrices
    return jtk.moe(x, up, down, weights, indices, w_gate=gate)


def _layers() -> Iterator[Program]:
    sizes = moe.SIZES[on_gpu()][f"{'128' if on_gpu() else '8'} experts"]
    sides = {
        "ours": lambda *args: _layer(args, args[-1]),
        "bfloat16": lambda *args: _layer(args, args[-2]),
        "dequantised": lambda *args: _layer(args, [w.array() for w in args[-1]]),
    }
    for tokens in _DECODED:
        yield Program(
            f"moe int4, {sizes.experts} experts, decode of {tokens}",
            functools.partial(_experts, sizes._replace(tokens=tokens)),
            sides,
            group="`moe` by int4",
            peer="bfloat16",
            beyond_cache=True,
        )


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
                    beyond_cache=True,
                )
    yield from _layers()


# Errors. A result of float32 has those of the sums, and one of bfloat16 its rounding beside.
_ERRORS = 16, 1024, 4096


def _accuracy(_: argparse.Namespace) -> Iterator[Record]:
    m, n, k = _ERRORS
    for stored, group in itertools.product((jnp.int4, jnp.int8), (32, 128, k)):
        x, w = random_arrays(((m, k), _BF16), ((n, k), _BF16))
        values, scales = jtk.quantize(w, block=(1, group if group < k else None), dtype=stored)
        wide = dequantized(values, scales)
        exact, own = (_in_float64(x) @ _in_float64(y).T for y in (wide, w))
        row: Record = {"name": f"{np.dtype(stored).name} in groups of {group}"}
        for out in (np.dtype(np.float32), np.dtype(_BF16)):
            dot = functools.partial(jnp.dot, preferred_element_type=out)
            results = {
                "ours": jtk.scaled_matmul(x, values, None, scales, out),
                "XLA": dot(x, wide.astype(_BF16).T),
                "bfloat16": dot(x, w.T),
            }
            row[out.name] = {
                side: _relative_norm(found, own if side == "bfloat16" else exact)
                for side, found in results.items()
            }
        yield row


def _in_float64(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


def _relative_norm(found: Any, exact: Any) -> float:
    return float(np.linalg.norm(_in_float64(found) - exact) / np.linalg.norm(exact))


COMMANDS = {
    "small_weights": ProgramsCommand("products by weights of 4 and 8 bits", _programs),
    "small_weights_accuracy": RowsCommand("compare products by weights with float64", _accuracy),
}
