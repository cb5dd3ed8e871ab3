"""Programs made of products: epilogues, symmetric ones, Muon, Strassen's algorithm, a loss.

In ``symmetric`` each row has ours under both policies. ``muon`` has a step of the optimizer against
optax's; with several GPUs that of parameters that they share, and of replicated ones. The products
alone, by JAX, are a bound for both sides of ``cross_entropy``: one for the value, three for the
gradient.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import (
    KERNELS,
    Arrays,
    Errors,
    Program,
    Sides,
    on_gpu,
    random_arrays,
    relative,
)
from benchmarks.timing import wall_times

Struct = jax.ShapeDtypeStruct
_CHECKED = 64


# Epilogues, in bfloat16.


def _fused(
    name: str,
    group: str,
    sides: Sides,
    *structs: Struct,
    checked: Callable[[Any], Any] = lambda y: y,
) -> Program:
    """Return a program whose error is that of the first rows of a result.

    Each row of the result that ``checked`` takes depends on a row of some operands alone. Matrices
    with as many rows as the first operand have those rows; other matrices are weights.
    """
    rows = structs[0].shape[0]

    def is_rows(x: Any) -> bool:
        return bool(x.ndim == 2 and x.shape[0] == rows)

    def arguments() -> list[Any]:
        keys = jax.random.split(jax.random.key(0), len(structs))
        return [
            jax.random.bernoulli(key, 0.9, x.shape)
            if x.dtype == np.bool_
            else jax.random.normal(key, x.shape, x.dtype)
            * (1 if x.ndim < 2 or is_rows(x) else x.shape[0] ** -0.5)
            for key, x in zip(keys, structs, strict=True)
        ]

    def errors(arguments: Arrays, results: Mapping[str, Any]) -> Errors:
        few = (x[:_CHECKED] if is_rows(x) else x for x in arguments)
        wide = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in few)
        with jax.default_matmul_precision("highest"):
            exact = checked(sides["XLA"](*wide))
        found = {side: checked(result)[:_CHECKED] for side, result in results.items()}
        return relative(found, exact)

    return Program(name, arguments, sides, errors, group)


def _epilogue(
    name: str, epilogue: Any, m: int, n: int, k: int, *operands: Struct, gradient: bool = False
) -> Program:
    """Return a product with an epilogue, or the gradients of both factors."""

    def ours(x: Any, w: Any, *operands: Any) -> Any:
        return jtk.matmul(x, w, epilogue=epilogue, operands=operands)

    def after(matmul: Any, x: Any, w: Any, *operands: Any) -> Any:
        return epilogue(matmul(x, w), *operands).astype(x.dtype)

    sides: Sides = {
        "ours": ours, "XLA": partial(after, jnp.matmul), "unfused": partial(after, jtk.matmul)
    }  # fmt: skip
    structs = (*_arrays((m, k), (k, n)), *operands)
    if not gradient:
        return _fused(name, "epilogues", sides, *structs)
    gradients: Sides = {
        side: jax.grad(lambda *xs, f=f: f(*xs).astype(jnp.float32).sum(), (0, 1))
        for side, f in sides.items()
    }
    return _fused(name, "gradient of an epilogue", gradients, *structs, checked=lambda y: y[0])


def _gated(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate) * (x @ up)


def _two_kernels(x: Any, gate: Any, up: Any) -> Any:
    return jtk.matmul(
        x, gate, epilogue=lambda y, up: jax.nn.silu(y) * up, operands=(jtk.matmul(x, up),)
    )


def _swiglu(m: int, n: int, k: int) -> Program:
    """Return the value and all gradients of a SwiGLU perceptron."""

    def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(cotangent: Any, *arrays: Any) -> Any:
            value, pullback = jax.vjp(f, *arrays)
            return value, *pullback(cotangent)

        return call

    plain = gradients(lambda x, gate, up, down: _gated(x, gate, up) @ down)
    sides: Sides = {
        "ours": jtk.fuse(plain),
        "XLA": plain,
        "gated_linear": gradients(
            lambda x, gate, up, down: jtk.matmul(jtk.gated_linear(x, gate, up), down)
        ),
    }
    structs = _arrays((m, k), (m, k), (k, n), (k, n), (n, k))
    group = "gradient of an epilogue"
    return _fused("SwiGLU gradient", group, sides, *structs, checked=lambda y: y[1])


def _arrays(*shapes: tuple[int, ...]) -> tuple[Struct, ...]:
    return tuple(Struct(shape, jnp.bfloat16) for shape in shapes)


def _gelu(y: Any, bias: Any) -> Any:
    return jax.nn.gelu(y + bias)


def _gelu_and_residual(y: Any, bias: Any, residual: Any) -> Any:
    return jax.nn.gelu(y + bias) + residual


def _residual_block(y: Any, bias: Any, residual: Any, mask: Any) -> Any:
    return residual + jnp.where(mask, jax.nn.silu(y + bias) / 0.9, 0)


def _fused_programs(_: argparse.Namespace) -> Iterator[Program]:
    wide, narrow, few, residual = _arrays((14336,), (4096,), (1024,), (8192, 4096))
    mask = Struct((8192, 4096), jnp.bool_)
    yield _epilogue("gelu k=4096", _gelu, 8192, 14336, 4096, wide)
    yield _epilogue("gelu k=1024", _gelu, 8192, 14336, 1024, wide)
    yield _epilogue("relu k=1024", jax.nn.relu, 8192, 14336, 1024)
    yield _epilogue("silu k=4096", jax.nn.silu, 8192, 4096, 4096)
    name = "residual, bias, mask, silu"
    yield _epilogue(name, _residual_block, 8192, 4096, 4096, narrow, residual, mask)
    for m, n, k in (8192, 3072, 768), (2048, 11008, 4096), (16384, 1024, 1024), (256, 8192, 3072):
        operands = _arrays((n,), (m, n))
        yield _epilogue(f"gelu, residual {m}x{n}x{k}", _gelu_and_residual, m, n, k, *operands)
    yield _epilogue("gelu, few rows", _gelu, 64, 14336, 4096, wide)
    yield _epilogue("gelu, split-K", _gelu, 128, 1024, 16384, few)
    yield _epilogue("gelu gradient", _gelu, 8192, 14336, 4096, wide, gradient=True)
    sides: Sides = {"ours": jtk.gated_linear, "XLA": _gated, "two kernels": _two_kernels}
    for name, m, k in (
        ("k=4096", 8192, 4096), ("k=1024", 8192, 1024), (", 2048 rows", 2048, 4096),
        (", few rows", 64, 4096),
    ):  # fmt: skip
        structs = _arrays((m, k), (k, 14336), (k, 14336))
        title = f"gated linear {name}".replace(" ,", ",")
        yield _fused(title, "`gated_linear`", sides, *structs)
    yield _swiglu(8192, 14336, 4096)


# Products with a symmetric result, and Newton-Schulz iterations made of these.


def _random(shape: tuple[int, ...], dtype: str) -> Arrays:
    (x,) = random_arrays((shape, jnp.float32))
    return [(x / math.sqrt(shape[-1])).astype(dtype)]


def _gram(shape: tuple[int, ...], dtype: str) -> Arrays:
    (x,) = _random(shape, "float32")
    return [(x @ x.mT).astype(dtype)]


def _errors_of(exact: Callable[[Any], Any]) -> Callable[..., Errors]:
    """Return the largest error of the first rows of the last matrix, and of its last columns."""

    def errors(arguments: Arrays, results: Mapping[str, Any]) -> Errors:
        (x,) = (np.asarray(x.reshape(-1, *x.shape[-2:])[-1], np.float64) for x in arguments)

        def parts(result: Any) -> Any:
            last = np.asarray(result.reshape(-1, *result.shape[-2:])[-1], np.float64)
            return np.concatenate([last[:_CHECKED], last[:, -_CHECKED:].T])

        found = {side: parts(y) for side, y in results.items()}
        return relative(found, np.concatenate(exact(x)))

    return errors


def _exact_polynomial(x: Any) -> tuple[Any, Any]:
    first, last = x[:_CHECKED], x[-_CHECKED:]
    return 2 * first @ x - 3 * first, 2 * last @ x - 3 * last


def _polynomial(x: Any) -> Any:
    return jtk.symmetric_matmul(x, x, epilogue=lambda y, x: 2 * y - 3 * x, operands=(x,))


def by_jnp(x: Any) -> Any:
    """Return five Newton-Schulz steps as users write them."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    norm = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    x = (x / norm).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


_SHAPES: dict[bool, list[tuple[int, ...]]] = {
    True: [
        *((n, n) for n in (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)),
        (2048, 8192), (16, 512, 512), (16, 1024, 1024), (4, 4096, 11008),
    ],
    False: [(64, 64), (2, 48, 96)],
}  # fmt: skip
_STACKS: dict[bool, list[tuple[int, ...]]] = {
    True: [(512, 512), (8, 256, 1024), (16, 1024, 1024), (4096, 4096), (4, 4096, 11008)],
    False: [(2, 48, 96)],
}


def _symmetric(arguments: argparse.Namespace) -> Iterator[Program]:
    kernels = {"kernels": KERNELS}
    for dtype in arguments.types:
        for shape in _SHAPES[on_gpu()]:
            name = f"{'x'.join(map(str, shape))} {dtype}"
            rows = "2048 rows and more" if shape[-2] >= 2048 else "fewer rows"
            group = f"symmetric 16-bit products {{}}, {rows}" if dtype != "float32" else ""
            ours = jtk.symmetric_matmul
            sides: Sides = {"ours": ours, "kernels": ours, "XLA": lambda x: x @ x.mT}
            errors = _errors_of(lambda x: (x[:_CHECKED] @ x.T, x[-_CHECKED:] @ x.T))
            yield Program(f"x @ x.mT {name}", partial(_random, shape, dtype), sides, errors,
                          group.format("alone"), contexts=kernels)  # fmt: skip
            if shape[-1] == shape[-2]:
                sides = {
                    "ours": _polynomial, "kernels": _polynomial,
                    "XLA": lambda x: 2 * (x @ x) - 3 * x,
                }  # fmt: skip
                yield Program(
                    f"2 x @ x - 3 x {name}", partial(_gram, shape, dtype), sides,
                    _errors_of(_exact_polynomial), group.format("with an epilogue"),
                    contexts=kernels,
                )  # fmt: skip
        for shape in _STACKS[on_gpu()]:
            standard, gram = (
                partial(jtk.linalg.newton_schulz, method=method) for method in ("standard", "gram")
            )
            sides = {
                "ours": jtk.linalg.newton_schulz, "standard": standard, "gram": gram,
                "standard, kernels": standard, "gram, kernels": gram, "XLA": by_jnp,
            }  # fmt: skip
            contexts = {"standard, kernels": KERNELS, "gram, kernels": KERNELS}
            yield Program(f"newton_schulz {'x'.join(map(str, shape))} {dtype}",
                          partial(_random, shape, dtype), sides, contexts=contexts)  # fmt: skip


# Steps of Muon. On a GPU about 1e9 parameters: layers, width, hidden, and a stack of matrices.

_MODELS = {True: (16, 2048, 8192, (4, 4096, 11008)), False: (2, 64, 256, (2, 64, 192))}


def _parameters(layers: int, d: int, h: int) -> list[dict[str, Any]]:
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, h), "gate": (d, h)}
    shapes["down"] = (h, d)
    arrays = iter(
        random_arrays(*((x, jnp.float32) for _ in range(layers) for x in shapes.values()))
    )
    return [{name: next(arrays) for name in shapes} for _ in range(layers)]


def _step(optimizer: Any, params: Any) -> Any:
    """Return the updates of the first step, whose gradients are the parameters."""
    return optimizer.update(params, optimizer.init(params), params)[0]


def _errors_of_first(exact: Callable[[Any], Any]) -> Callable[..., Errors]:
    """Return errors of the first matrix: the Frobenius norm, relative to that in float64."""

    def errors(arguments: Arrays, results: Mapping[str, Any]) -> Errors:
        def first(tree: Any) -> Any:
            x = jax.tree.leaves(tree)[0]
            return np.asarray(x.reshape(-1, *x.shape[-2:])[0], np.float64)

        with jax.enable_x64(True):
            wanted = np.asarray(jax.jit(exact)(first(arguments)))
        norm = np.linalg.norm(wanted)
        return {
            side: float(np.linalg.norm(first(x) - wanted) / norm) for side, x in results.items()
        }

    return errors


def _sharded_steps(parameters: Callable[[], Any], optax_muon: Any) -> Iterator[Program]:
    """Yield steps of parameters that all devices share, or that each of them has."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,))
    optimizers = {"ours": jtk.muon(0.02, mesh=mesh), "XLA": optax_muon}
    for name, spec in (("rows", P("d")), ("replicated", P())):
        sharding = NamedSharding(mesh, spec)

        def step(optimizer: Any, params: Any, sharding: Any = sharding) -> Any:
            return jax.lax.with_sharding_constraint(_step(optimizer, params), sharding)

        title = f"on {count} devices, {name}"
        yield Program(
            f"step {title}",
            partial(_placed, parameters, sharding),
            {side: partial(step, x) for side, x in optimizers.items()},
            _errors_of_first(partial(_step, optax_muon)), f"`muon` {title}", timing=wall_times,
        )  # fmt: skip


def _placed(parameters: Callable[[], Any], sharding: Any) -> Arrays:
    return (jax.device_put(parameters(), sharding),)


def _stack(shape: tuple[int, ...], dtype: str) -> Arrays:
    return [x.astype(dtype) for x in random_arrays((shape, jnp.float32))]


def _muon(_: argparse.Namespace) -> Iterator[Program]:
    # An optional dependency.
    import optax

    layers, width, hidden, stack = _MODELS[on_gpu()]
    parameters = partial(_parameters, layers, width, hidden)
    by_optax = optax.contrib.muon(0.02)
    steps: Sides = {
        "ours": partial(_step, jtk.muon(0.02)),
        "standard": partial(_step, jtk.muon(0.02, ns="standard")),
        "XLA": partial(_step, by_optax),
    }
    if jax.device_count() > 1:
        yield from _sharded_steps(parameters, by_optax)
    else:
        errors = _errors_of_first(steps["XLA"])
        yield Program("step", lambda: (parameters(),), steps, errors, "`muon`")
    iterations: Sides = {
        "ours": jtk.linalg.newton_schulz,
        "standard": partial(jtk.linalg.newton_schulz, method="standard"),
        "XLA": by_jnp,
    }
    for dtype in ("float32", "bfloat16"):
        yield Program(
            f"newton_schulz {'x'.join(map(str, stack))} {dtype}",
            partial(_stack, stack, dtype),
            iterations, _errors_of_first(by_jnp), "`newton_schulz`",
        )  # fmt: skip


# A level of Strassen's algorithm against the product without one.


def _errors_of_rows(operands: Any, products: Any) -> Errors:
    """Return root-mean-square errors of some rows, relative to the terms' own size."""
    lhs, rhs = (np.asarray(x, np.float64) for x in (operands[0][:_CHECKED], operands[1]))
    exact, scale = lhs @ rhs, np.sqrt(lhs**2 @ rhs**2)
    return {name: float(np.std((x[:_CHECKED] - exact) / scale)) for name, x in products.items()}


def _strassen(_: argparse.Namespace) -> Iterator[Program]:
    size = 16384 if on_gpu() else 256
    sides: Any = {"XLA": jnp.matmul, "ours": jtk.strassen_matmul, "matmul": jtk.matmul}
    sides = {name: partial(side, precision="highest") for name, side in sides.items()}
    for dtype in ("float32", "float64"):
        structs = [((size, size), dtype)] * 2
        yield Program(f"{size} {dtype}", partial(random_arrays, *structs), sides, _errors_of_rows,
                      wide=dtype == "float64")  # fmt: skip


# The loss of a vocabulary against JAX's program with all logits in memory. Sizes are rows, features
# and labels.

_LOSS_SIZES = {True: [(32768, 2560, 128256), (8192, 4096, 151936)], False: [(512, 128, 16000)]}


def _plain_loss(h: Any, w: Any, labels: Any) -> Any:
    logits = (h @ w).astype(np.float32)
    at_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - at_label).mean()


_LOSSES: dict[str, Callable[..., Any]] = {"ours": jtk.linear_cross_entropy, "XLA": _plain_loss}


def _three_products(h: Any, w: Any, labels: Any) -> Any:
    logits = h @ w
    return logits, logits @ w.T, h.T @ logits


def _loss_operands(dtype: str, rows: int, features: int, labels: int) -> tuple[Any, ...]:
    """Return features, weights of logits of size 1, and labels."""
    h, w = random_arrays(((rows, features), dtype), ((features, labels), dtype))
    w = w / np.sqrt(features).astype(h.dtype)
    return h, w, jax.random.randint(jax.random.key(2), (rows,), 0, labels)


def _loss_errors(arguments: Arrays, _: Mapping[str, Any]) -> Errors:
    """Return each side's error of the mean loss of a few rows."""
    h, w, labels = (x if i == 1 else x[:16] for i, x in enumerate(arguments))
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64)
    at_label = np.take_along_axis(logits, np.asarray(labels)[:, None], 1)[:, 0]
    exact = (np.logaddexp.reduce(logits, 1) - at_label).mean()
    return {name: abs(float(f(h, w, labels)) - exact) for name, f in _LOSSES.items()}


def _cross_entropy(arguments: argparse.Namespace) -> Iterator[Program]:
    gradients = {name: jax.value_and_grad(f, (0, 1)) for name, f in _LOSSES.items()}
    for dtype in arguments.types:
        for size in arguments.sizes or _LOSS_SIZES[on_gpu()]:
            name, make = "x".join(map(str, size)), partial(_loss_operands, dtype, *size)
            for what, sides, products in (
                ("value", _LOSSES, lambda h, w, labels: h @ w),
                ("gradient", gradients, _three_products),
            ):
                yield Program(f"{name} {dtype}, {what}", make, {**sides, "products": products},
                              _loss_errors, f"`linear_cross_entropy`, {what}")  # fmt: skip


COMMANDS = {
    "fused": ProgramsCommand(
        "products with epilogues against the same programs of jnp", _fused_programs
    ),
    "symmetric": ProgramsCommand(
        "products with a symmetric result, and Newton-Schulz iterations", _symmetric,
        types={"nargs": "*", "default": ["bfloat16", "float16", "float32"]},
    ),
    "muon": ProgramsCommand("steps of Muon and Newton-Schulz iterations", _muon, 1.0),
    "strassen": ProgramsCommand("a level of Strassen's algorithm", _strassen, 1.0),
    "cross_entropy": ProgramsCommand(
        "the cross-entropy of a vocabulary against all logits in memory", _cross_entropy, 2.0,
        types={"nargs": "*", "default": ["bfloat16"]},
        sizes={
            "nargs": "*", "metavar": "ROWSxFEATURESxLABELS",
            "type": lambda text: tuple(map(int, text.split("x"))),
        },
    ),
}  # fmt: skip
