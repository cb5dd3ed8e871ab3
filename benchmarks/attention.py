"""``attention``: against cuDNN, and against programs of ``jnp`` where cuDNN has no function.

The last row is a training step of ``examples/transformer.py``, which is written without this
library: ``ours`` is that step inside ``jtk.patch()``, and ``linear_cross_entropy`` the same with
that loss.
"""

from __future__ import annotations

import argparse
import functools
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import Arrays, Errors, Program, on_gpu, random_arrays
from benchmarks.timing import wall_times

_GROUP = "attention"
_OVER_CUDNN, _OVER_JNP = f"{_GROUP} over cuDNN", f"{_GROUP} over `jnp`"
_OF_FUNCTIONS = f"{_GROUP} with functions over plain"
_CAP = 20.0
# (batch, length, heads, heads of keys, features)
Sizes = tuple[int, int, int, int, int]
Function = Callable[..., Any]


def dense(score_of: Function, *, is_causal: bool) -> Function:
    """Return attention of ``jnp`` with all scores in memory."""

    def attention(query: Any, key: Any, value: Any) -> Any:
        group = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, group, 2) if group > 1 else x for x in (key, value))
        products = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        scores = score_of(products * query.shape[-1] ** -0.5)
        if is_causal:
            rows, columns = (jnp.arange(x.shape[1]) for x in (query, key))
            scores = jnp.where(rows[:, None] >= columns, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, -1).astype(value.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    return attention


def _cudnn(**options: Any) -> Function:
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options)


def _xla(**options: Any) -> Function:
    return functools.partial(jax.nn.dot_product_attention, implementation="xla", **options)


def with_gradient(attention: Function) -> Function:
    """Return the result and its gradients, of the operands and a cotangent."""

    def both(*operands: Any) -> Any:
        out, gradient = jax.vjp(attention, *operands[:-1])
        return out, *gradient(operands[-1])

    return both


def _with_tangent(attention: Function) -> Function:
    def both(*operands: Any) -> Any:
        half = len(operands) // 2
        return jax.jvp(attention, operands[:half], operands[half:])

    return both


def _operands(
    sizes: Sizes, keys: int | None = None, tangents: bool = False, dtype: Any = jnp.bfloat16
) -> Sequence[Any]:
    """Return query, key, value and a cotangent, or tangents of the first three."""
    batch, length, heads, key_heads, features = sizes
    query = ((batch, length, heads, features), dtype)
    key = ((batch, keys or length, key_heads, features), dtype)
    return random_arrays(query, key, key, *((query, key, key) if tangents else (query,)))


def _largest_error(_: Any, results: Any) -> Errors:
    """Return the largest of the errors of all results; those of the peer are right."""
    peer = next(side for side in results if side != "ours")
    right = [x.astype(np.float32) for x in jax.tree.leaves(results[peer])]

    def error(x: Any, y: Any) -> Any:
        return jnp.max(jnp.abs(x.astype(np.float32) - y)) / jnp.max(jnp.abs(y))

    return {
        side: max(float(error(x, y)) for x, y in zip(jax.tree.leaves(found), right, strict=True))
        for side, found in results.items()
    }


def _pairs(
    name: str, sizes: Sizes, ours: Function, peer: Function, side: str, group: str,
    dtype: Any = jnp.bfloat16,
) -> Iterator[Program]:  # fmt: skip
    """Yield the programs of the result, and of the result with its gradients."""
    program = functools.partial(Program, errors=_largest_error, peer=side, group=group)
    forward = {"ours": ours, side: peer}
    operands = functools.partial(_operands, sizes, dtype=dtype)
    yield program(name, lambda: operands()[:3], forward)
    both = {side: with_gradient(x) for side, x in forward.items()}
    yield program(f"{name}, with gradient", operands, both)


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    full = on_gpu()

    def sized(*sizes: int) -> Any:
        if full:
            return sizes
        _, length, heads, key_heads, features = sizes
        return 1, max(1, length // 64), 2 * heads // key_heads, 2, features // 8

    def named(what: str, sizes: Sizes) -> str:
        batch, length, heads, key_heads, features = sizes
        of_keys = f" on {key_heads}" if key_heads != heads else ""
        return f"{what}, {batch}x{length}, {heads}{of_keys} heads of {features}"

    peer_of, peer = (_cudnn, "cuDNN") if full else (_xla, "XLA")
    for what, options, sizes in (
        ("plain", {}, sized(8, 4096, 16, 16, 128)),
        ("causal", {"is_causal": True}, sized(8, 4096, 16, 16, 128)),
        ("causal", {"is_causal": True}, sized(2, 8192, 32, 8, 128)),
        ("causal", {"is_causal": True}, sized(16, 1024, 16, 16, 64)),
        ("window of 512", {"is_causal": True, "local_window_size": (511, 0)},
         sized(4, 4096, 16, 16, 128)),
    ):  # fmt: skip
        ours = functools.partial(jtk.attention, **options)
        yield from _pairs(named(what, sizes), sizes, ours, peer_of(**options), peer, _OVER_CUDNN)
    sizes = sized(32, 1, 32, 8, 128)
    keys = 8192 if full else 64
    yield Program(
        named(f"decode of {keys} keys", sizes),
        functools.partial(lambda sizes, keys: _operands(sizes, keys)[:3], sizes, keys),
        {"ours": jtk.attention, peer: peer_of()},
        errors=_largest_error,
        peer=peer,
        group=_OVER_CUDNN,
    )
    sizes = sized(4, 4096, 16, 16, 128)
    length, heads = sizes[1], sizes[2]

    def capped(score: Any, *_: Any) -> Any:
        return _CAP * jnp.tanh(score / _CAP)

    ours = functools.partial(jtk.attention, score_mod=capped, is_causal=True)
    theirs = dense(capped, is_causal=True)
    yield from _pairs(named("soft cap, causal", sizes), sizes, ours, theirs, "XLA", _OVER_JNP)
    yield Program(
        named("jvp", sizes),
        functools.partial(_operands, sizes, tangents=True),
        {"ours": _with_tangent(jtk.attention), "XLA": _with_tangent(_xla())},
        errors=_largest_error,
        group=_OVER_JNP,
    )
    single = sized(2, 4096, 16, 16, 128)
    yield from _pairs(
        named("float32, causal", single), single, functools.partial(jtk.attention, is_causal=True),
        _xla(is_causal=True), "XLA", _OVER_JNP, np.dtype(np.float32),
    )  # fmt: skip
    yield from _of_bias(named("bias", sizes), sizes, peer_of, peer)
    yield from _functions(sizes, length, heads, named)
    yield _model_step()


def _of_bias(name: str, sizes: Sizes, peer_of: Function, peer: str) -> Iterator[Program]:
    _, length, heads, _, _ = sizes

    def operands() -> Sequence[Any]:
        query, key, value, cotangent = _operands(sizes)
        (bias,) = random_arrays(((1, heads, length, length), jnp.bfloat16), seed=1)
        return query, key, value, bias, cotangent

    sides = {"ours": with_gradient(jtk.attention), peer: with_gradient(peer_of())}
    program = functools.partial(Program, errors=_largest_error, peer=peer, group=_OVER_CUDNN)
    yield program(f"{name}, with gradient", operands, sides)


def _of_numbers(
    sizes: Sizes, slopes: Any, learned: Any, table: Any, named: Callable[[str, Sizes], str]
) -> Iterator[Program]:
    """Yield gradients by arrays that scores read, against those without them."""

    def operands(x: Any) -> Sequence[Any]:
        query, key, value, cotangent = _operands(sizes)
        return query, key, value, x, cotangent

    for name, x, function in (
        ("slopes", slopes, lambda x, s, b, h, q, k: s - x[h] * (q - k)),
        ("a temperature", learned, lambda x, s, b, h, q, k: s * x[h]),
        ("a cap", learned, lambda x, s, b, h, q, k: _CAP * x[h] * jnp.tanh(s / (_CAP * x[h]))),
        ("a table", table, lambda x, s, b, h, q, k: s + x[h, jnp.clip(q - k, 0, 31)]),
    ):

        def attention(query: Any, key: Any, value: Any, x: Any, function: Any = function) -> Any:
            score_mod = functools.partial(function, x)
            return jtk.attention(query, key, value, score_mod=score_mod, is_causal=True)

        def fixed(query: Any, key: Any, value: Any, x: Any, attention: Any = attention) -> Any:
            return attention(query, key, value, jax.lax.stop_gradient(x))

        yield Program(
            named(f"gradient by {name}", sizes),
            functools.partial(operands, x),
            {"ours": with_gradient(attention), "plain": with_gradient(fixed)},
            errors=lambda *_: {},
            peer="plain",
            group=_OF_FUNCTIONS,
        )


def _functions(
    sizes: Sizes, length: int, heads: int, named: Callable[[str, Sizes], str]
) -> Iterator[Program]:
    """Yield programs of score functions and masks, against the same tiles without them."""
    slopes = 2.0 ** -jnp.arange(1, heads + 1, dtype=jnp.float32)
    table = jax.random.normal(jax.random.key(3), (heads, 32))
    learned = jnp.linspace(0.5, 2, heads)
    documents = jnp.asarray(np.sort(np.arange(length) * 8 // length))

    def causal(_: Any, __: Any, q: Any, k: Any) -> Any:
        return k <= q

    functions: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "ALiBi": ({"score_mod": lambda s, b, h, q, k: s - slopes[h] * (q - k)}, {}),
        "T5's table": (
            {"score_mod": lambda s, b, h, q, k: s + table[h, jnp.clip(q - k, 0, 31)]}, {}
        ),
        "T5's buckets": ({"score_mod": lambda s, b, h, q, k: s + table[h, _bucket(q - k)]}, {}),
        "tanh gate": ({"score_mod": lambda s, b, h, q, k: s * (1 + jnp.tanh(s))}, {}),
        "learned temperature": ({"score_mod": lambda s, b, h, q, k: s * learned[h]}, {}),
        "causal by a function": ({"mask_mod": causal}, {"is_causal": True}),
        "prefix of half": (
            {"mask_mod": lambda b, h, q, k: (k <= q) | (k < length // 2)}, {}
        ),
    }  # fmt: skip
    program = functools.partial(Program, peer="plain", group=_OF_FUNCTIONS, errors=lambda *_: {})
    first = functools.partial(lambda sizes: _operands(sizes)[:3], sizes)
    for name, (options, plain) in functions.items():
        sides = {
            "ours": functools.partial(jtk.attention, **options),
            "plain": functools.partial(jtk.attention, **plain),
        }
        yield program(named(name, sizes), first, sides)
    yield from _of_numbers(sizes, slopes, learned, table, named)
    packed = sizes[0] // 2 or 1, 2 * length, *sizes[2:]
    documents = jnp.repeat(documents, 2)
    sides = {
        "ours": functools.partial(
            jtk.attention,
            is_causal=True,
            mask_mod=lambda b, h, q, k: documents[q] == documents[k],
        ),
        "plain": functools.partial(jtk.attention, is_causal=True),
    }
    arguments = functools.partial(lambda sizes: _operands(sizes)[:3], packed)
    yield program(named("8 documents, causal", packed), arguments, sides)


def _bucket(difference: Any) -> Any:
    """Return T5's place of a relative position: of 8 differences, and of logarithms up to 128."""
    distance = jnp.abs(difference)
    logarithm = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / 8) / np.log(128 / 8)
    far = jnp.minimum(8 + (logarithm * 8).astype(jnp.int32), 15)
    return jnp.where(distance < 8, distance, far) + 16 * (difference < 0)


def _model_step() -> Program:
    """Return the program of a training step of a transformer."""
    path = Path(__file__).parent.parent / "examples" / "transformer.py"
    model = SimpleNamespace(**runpy.run_path(str(path)))
    sizes = model.LARGE if on_gpu() else model.SMALL

    def arguments() -> Arrays:
        params = model.initial_params(sizes)
        return params, model.OPTIMIZER.init(params), model.batches(sizes, 1)[0]

    step = functools.partial(model.training_step, heads=sizes.heads)
    with_loss = functools.partial(step, cross_entropy=_mean_loss)
    patched = "ours", "linear_cross_entropy"
    return Program(
        f"model of {sizes.layers} layers of {sizes.width}, {sizes.batch}x{sizes.length}",
        arguments,
        {"ours": step, "XLA": step, "linear_cross_entropy": with_loss},
        _gradient_errors,
        f"{_GROUP} of a training step",
        contexts=dict.fromkeys(patched, jtk.patch),
        timing=wall_times,
    )


def _mean_loss(x: Any, head: Any, labels: Any) -> Any:
    return jtk.linear_cross_entropy(x, head, labels).mean()


def _gradient_errors(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the differences of gradients, as Adam's state has them, from XLA's."""
    gradients = {
        side: np.concatenate([np.ravel(x.astype(np.float32)) for x in jax.tree.leaves(state[0].mu)])
        for side, (_, state, _) in results.items()
    }
    right = gradients["XLA"]
    return {
        side: float(np.linalg.norm(x - right) / np.linalg.norm(right))
        for side, x in gradients.items()
    }


COMMAND = ProgramsCommand("attention against cuDNN and `jnp`", _programs)
