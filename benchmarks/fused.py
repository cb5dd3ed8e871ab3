"""``fused``: products with epilogues, in bfloat16, against the same programs of ``jnp``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Program, ProgramCommand, Sides

_CHECKED = 64

Struct = jax.ShapeDtypeStruct


def _program(
    name: str,
    sides: Sides,
    structs: Sequence[Struct],
    checked: Callable[[Any], Any] = lambda result: result,
) -> Program:
    """Return a program whose error is that of the first rows of a result.

    Parameters
    ----------
    name, sides
        Of the program. Each row of the checked result depends on a row of some operands alone.
    structs
        Of the operands. Matrices with as many rows as the first have those rows; other matrices
        are weights.
    checked
        Takes the result that is checked from all of them.
    """
    rows = structs[0].shape[0]

    def arguments() -> list[Any]:
        keys = jax.random.split(jax.random.key(0), len(structs))
        return [_random(*each, rows) for each in zip(keys, structs, strict=True)]

    def errors(arguments: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
        few = (x[:_CHECKED] if x.ndim == 2 and len(x) == rows else x for x in arguments)
        wide = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in few)
        with jax.default_matmul_precision("highest"):
            exact = np.asarray(checked(sides["XLA"](*wide)), np.float64)
        return {
            side: float(
                np.abs(np.asarray(checked(result)[:_CHECKED], np.float64) - exact).max()
                / np.abs(exact).max()
            )
            for side, result in results.items()
        }

    return Program(name, arguments, sides, errors)


def _random(key: Any, struct: Struct, rows: int) -> Any:
    if struct.dtype == np.bool_:
        return jax.random.bernoulli(key, 0.9, struct.shape)
    is_weight = struct.ndim == 2 and struct.shape[0] != rows
    scale = struct.shape[0] ** -0.5 if is_weight else 1
    return jax.random.normal(key, struct.shape, struct.dtype) * scale


def _epilogue(
    name: str,
    epilogue: Callable[..., Any],
    m: int,
    n: int,
    k: int,
    *operands: Struct,
    gradient: bool = False,
) -> Program:
    """Return a product with an epilogue, or the gradients of both factors."""

    def ours(x: Any, w: Any, *operands: Any) -> Any:
        return jtk.matmul(x, w, epilogue=epilogue, operands=operands)

    def xla(x: Any, w: Any, *operands: Any) -> Any:
        return epilogue(jnp.matmul(x, w), *operands).astype(x.dtype)

    def unfused(x: Any, w: Any, *operands: Any) -> Any:
        return epilogue(jtk.matmul(x, w), *operands).astype(x.dtype)

    sides: Sides = {"ours": ours, "XLA": xla, "unfused": unfused}
    structs = _arrays((m, k), (k, n)) + operands
    if not gradient:
        return _program(name, sides, structs)
    gradients: Sides = {
        side: jax.grad(lambda *xs, f=f: f(*xs).astype(jnp.float32).sum(), (0, 1))
        for side, f in sides.items()
    }
    return _program(name, gradients, structs, lambda result: result[0])


def _gated_linear(name: str, m: int, n: int, k: int) -> Program:
    """Return the value of a gated linear unit."""

    def xla(x: Any, gate: Any, up: Any) -> Any:
        return jax.nn.silu(x @ gate) * (x @ up)

    def two_kernels(x: Any, gate: Any, up: Any) -> Any:
        return jtk.matmul(x, gate, epilogue=_gate, operands=(jtk.matmul(x, up),))

    sides: Sides = {"ours": jtk.gated_linear, "XLA": xla, "two kernels": two_kernels}
    return _program(name, sides, _arrays((m, k), (k, n), (k, n)))


def _swiglu(name: str, m: int, n: int, k: int) -> Program:
    """Return the value and all gradients of a SwiGLU perceptron."""

    def xla(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return jtk.matmul(jtk.gated_linear(x, gate, up), down)

    def value_and_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(cotangent: Any, *arrays: Any) -> Any:
            value, pullback = jax.vjp(f, *arrays)
            return value, *pullback(cotangent)

        return call

    sides: Sides = {
        "ours": jtk.fuse(value_and_gradients(xla)),
        "XLA": value_and_gradients(xla),
        "gated_linear": value_and_gradients(gated),
    }
    structs = _arrays((m, k), (m, k), (k, n), (k, n), (n, k))
    return _program(name, sides, structs, lambda result: result[1])


def _arrays(*shapes: tuple[int, ...]) -> tuple[Struct, ...]:
    return tuple(Struct(shape, jnp.bfloat16) for shape in shapes)


def _gelu_with_bias(accumulator: Any, bias: Any) -> Any:
    return jax.nn.gelu(accumulator + bias)


def _gate(accumulator: Any, up: Any) -> Any:
    return jax.nn.silu(accumulator) * up


def _residual_block(accumulator: Any, bias: Any, residual: Any, mask: Any) -> Any:
    return residual + jnp.where(mask, jax.nn.silu(accumulator + bias) / 0.9, 0)


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    wide, narrow, few = _arrays((14336,), (4096,), (1024,))
    residual = *_arrays((8192, 4096)), Struct((8192, 4096), jnp.bool_)
    yield _epilogue("gelu k=4096", _gelu_with_bias, 8192, 14336, 4096, wide)
    yield _epilogue("gelu k=1024", _gelu_with_bias, 8192, 14336, 1024, wide)
    yield _epilogue("relu k=1024", lambda y: jax.nn.relu(y), 8192, 14336, 1024)
    yield _epilogue("silu k=4096", lambda y: jax.nn.silu(y), 8192, 4096, 4096)
    yield _epilogue(
        "residual, bias, mask, silu", _residual_block, 8192, 4096, 4096, narrow, *residual
    )
    yield _epilogue("gelu, few rows", _gelu_with_bias, 64, 14336, 4096, wide)
    yield _epilogue("gelu, split-K", _gelu_with_bias, 128, 1024, 16384, few)
    yield _epilogue("gelu gradient", _gelu_with_bias, 8192, 14336, 4096, wide, gradient=True)
    yield _gated_linear("gated linear k=4096", 8192, 14336, 4096)
    yield _gated_linear("gated linear k=1024", 8192, 14336, 1024)
    yield _gated_linear("gated linear, 2048 rows", 2048, 14336, 4096)
    yield _gated_linear("gated linear, few rows", 64, 14336, 4096)
    yield _swiglu("SwiGLU gradient", 8192, 14336, 4096)


COMMAND = ProgramCommand(
    "products with epilogues against the same programs of jnp", _programs, seconds=0.5
)
