"""The operations in plain JAX: its functions of the same names, and what it lacks written out."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import lax

import jax_tilekern as jtk
from benchmarks.catalog.bounds import F8E4

_MODULES = {"jnp": jnp, "jnp.linalg": jnp.linalg, "lax": lax, "jax.ops": jax.ops}
_MODULES_OF_MATRICES = {
    "jnp.linalg": jnp.linalg, "jax.scipy.linalg": jax.scipy.linalg, "lax.linalg": lax.linalg
}  # fmt: skip


# Functions of JAX with other parameters, and one that JAX 0.10 lacks.
_OTHERS = ("lax.scatter_add", "jnp.top_k")


def namesake(name: str) -> str | None:
    """Return JAX's function of the name of an operation, from the first module that has one."""
    *matrices, name = name.split(".")
    modules = _MODULES_OF_MATRICES if matrices == ["linalg"] else {} if matrices else _MODULES
    found = (f"{x}.{name}" for x, module in modules.items() if hasattr(module, name))
    return next((x for x in found if x not in _OTHERS), None)


def _namesakes(ours: Any, modules: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in reversed([*modules.values()]):
        found |= {name: getattr(module, name) for name in ours.__all__ if hasattr(module, name)}
    return found


def _with_epilogue(y: Any, epilogue: Any, operands: Any) -> Any:
    return y if epilogue is None else epilogue(y, *operands)


def _matmul(a: Any, b: Any, *, epilogue: Any = None, operands: Any = (), **options: Any) -> Any:
    return _with_epilogue(jnp.matmul(a, b, **options), epilogue, operands)


def _symmetric_matmul(a: Any, b: Any = None, **options: Any) -> Any:
    return _matmul(a, a.mT if b is None else b, **options)


def _linear(x: Any, w: Any, b: Any, activation: Any) -> Any:
    return activation(x @ w + b)


def _gated_linear(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate) * (x @ up)


def _linear_cross_entropy(
    h: Any, w: Any, labels: Any, *, bias: Any = None, reduction: str = "mean", z_loss: float = 0.0,
    label_smoothing: float = 0.0, softcap: float | None = None, ignore_index: int | None = None,
) -> Any:  # fmt: skip
    y = h @ w if bias is None else h @ w + bias
    y = y if softcap is None else softcap * jnp.tanh(y / softcap)
    lse, at_label = jax.nn.logsumexp(y, 1), jnp.take_along_axis(y, jnp.asarray(labels)[:, None], 1)
    losses = lse - (1 - label_smoothing) * at_label[:, 0] - label_smoothing * y.mean(1)
    counted = jnp.ones_like(lse, bool) if ignore_index is None else labels != ignore_index
    losses = jnp.where(counted, losses + z_loss * lse**2, 0)
    if reduction == "none":
        return losses
    return losses.sum() / jnp.maximum(1, counted.sum()) if reduction == "mean" else losses.sum()


def _attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Any = None, score_mod: Any = None, mask_mod: Any = None,
    return_residual: bool = False, precision: Any = None,
) -> Any:  # fmt: skip
    """Attention with all scores, in which a query that sees no key gives zeros."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    indices = jnp.ix_(*map(jnp.arange, (*query.shape[::2], *(x.shape[1] for x in (query, key)))))
    b, h, q, k = (x.astype(jnp.int32) for x in indices)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    score = jnp.einsum(
        "btnh,bsnh->bnts", query, key, precision=precision, preferred_element_type=wide
    ) / np.sqrt(query.shape[3]).astype(wide)
    score = score if bias is None else score + bias.astype(wide)
    score = score if score_mod is None else score_mod(score, b, h, q, k)
    visible = jnp.ones(score.shape, bool) if mask is None else mask
    if mask_mod is not None:
        visible &= mask_mod(b, h, q, k)
    if is_causal:
        visible &= k <= q
    if local_window_size is not None:
        visible &= (q - local_window_size[0] <= k) & (k <= q + local_window_size[1])
    if query_seq_lengths is not None:
        visible &= q < query_seq_lengths[:, None, None, None]
    if key_value_seq_lengths is not None:
        visible &= k < key_value_seq_lengths[:, None, None, None]
    visible = jnp.broadcast_to(visible, score.shape) & (score != -jnp.inf)
    seen = visible.any(-1, keepdims=True)
    score = jnp.where(visible | ~seen, score, -jnp.inf)
    p = jnp.where(seen, jax.nn.softmax(score, -1), 0).astype(value.dtype)
    out = jnp.einsum("bnts,bsnd->btnd", p, value, precision=precision)
    if not return_residual:
        return out
    residual = jnp.where(seen[..., 0], jax.nn.logsumexp(score, -1), -jnp.inf)
    return out, residual.transpose(0, 2, 1)


def _ring_attention(query: Any, key: Any, value: Any, axis_name: str, **options: Any) -> Any:
    """Attention of the whole sequence, of which a device has its queries."""
    whole = (lax.all_gather(x, axis_name, axis=1, tiled=True) for x in (query, key, value))
    count = query.shape[1]
    return lax.dynamic_slice_in_dim(
        _attention(*whole, **options), lax.axis_index(axis_name) * count, count, 1
    )


def _masked_products(lhs: Any, rhs: Any, sizes: Any, **options: Any) -> Any:
    """Choose among products by the matrix of each group, because others' may have NaN."""
    out = jax.eval_shape(functools.partial(lax.ragged_dot, **options), lhs, rhs, sizes)
    masks = (_groups(lhs, sizes) == jnp.arange(rhs.shape[0])[:, None])[..., None]
    y = jnp.einsum("mk,gkn->gmn", lhs, rhs, preferred_element_type=out.dtype)
    return jnp.where(masks, y, jnp.zeros((), y.dtype)).sum(0, dtype=y.dtype)


def _groups(lhs: Any, sizes: Any) -> Any:
    """Return the group of each row."""
    bounds = jnp.cumsum(jnp.asarray(sizes))
    return jnp.searchsorted(bounds, jnp.arange(lhs.shape[0]), side="right")


def _ragged_dot(
    product: Any,
    lhs: Any,
    rhs: Any,
    sizes: Any,
    *,
    epilogue: Any = None,
    operands: Any = (),
    group_operands: Any = (),
    **options: Any,
) -> Any:
    y = product(lhs, rhs, sizes, **options)
    if epilogue is None:
        return y
    group = _groups(lhs, sizes)
    of_groups = (jnp.asarray(x)[jnp.minimum(group, len(x) - 1)] for x in group_operands)
    y = epilogue(y, *operands, *of_groups)
    return jnp.where((group < rhs.shape[0])[:, None], y, jnp.zeros((), y.dtype))


def _ragged_dot_general(lhs: Any, rhs: Any, sizes: Any, dimensions: Any) -> Any:
    """Contract the rows of each group."""
    assert list(dimensions.lhs_ragged_dimensions) == [0]
    assert not dimensions.rhs_group_dimensions
    rows = (_groups(lhs, sizes) == jnp.arange(len(sizes))[:, None])[..., None] * lhs
    return jnp.einsum("gmk,mn->gkn", rows, rhs)


def _all_gather_matmul(x: Any, w: Any, axis: str) -> Any:
    return lax.all_gather(x, axis, tiled=True) @ w


def _matmul_reduce_scatter(x: Any, w: Any, axis: str) -> Any:
    return lax.psum_scatter(x @ w, axis, tiled=True)


def _moe(
    x: Any,
    up: Any,
    down: Any,
    weights: Any,
    indices: Any,
    *,
    activation: Any,
    w_gate: Any = None,
    save: Any = None,
    **biases: Any,
) -> Any:
    def with_bias(y: Any, of: str) -> Any:
        return y + biases[f"b_{of}"][:, None] if biases else y

    hidden = with_bias(jnp.einsum("td,edh->eth", x, up), "up")
    if w_gate is None:
        hidden = activation(hidden)
    else:
        hidden *= activation(with_bias(jnp.einsum("td,edh->eth", x, w_gate), "gate"))
    # As in moe, weights multiply hidden values, which decides what becomes of infinite ones.
    weights = weights.T[:, :, None]
    y = jnp.einsum("ekth,ehd->ektd", weights * hidden[:, None], down)
    if biases:
        y += weights * biases["b_down"][:, None, None]
    chosen = jnp.arange(len(up))[:, None, None] == indices.T
    return jnp.where(chosen[..., None], y, jnp.zeros((), y.dtype)).sum((0, 1))


def _route(logits: Any, k: int) -> Any:
    weights, indices = lax.top_k(jax.nn.softmax(logits), k)
    return weights / weights.sum(-1, keepdims=True), indices


def _segment_mean(x: Any, ids: Any, count: int, **options: Any) -> Any:
    sums = jax.ops.segment_sum(x, ids, count, **options)
    counts = jax.ops.segment_sum(jnp.ones(len(x), x.dtype), ids, count, **options)
    return sums / jnp.maximum(counts, 1)[:, None]


def _segment_reduce(
    function: Any,
    *arrays: Any,
    segment_ids: Any,
    num_segments: int,
    gather: Any,
    reduction: str,
) -> Any:
    rows = (
        x if index is None else x.at[index].get(mode="fill", fill_value=0)
        for x, index in zip(arrays, gather, strict=True)
    )  # fmt: skip
    return getattr(ORACLES, f"segment_{reduction}")(function(*rows), segment_ids, num_segments)


def _segment_extreme(reduce: Any, bound: str) -> Any:
    """Reduce by masks: cotangents of JAX's own are infinite where a segment is empty."""

    def reduced(
        x: Any, ids: Any, count: int, *, indices_are_sorted: bool = False, mode: Any = None
    ) -> Any:
        is_whole = jnp.issubdtype(x.dtype, jnp.integer)
        limits = jnp.iinfo(x.dtype) if is_whole else SimpleNamespace(min=-np.inf, max=np.inf)
        neutral = np.asarray(getattr(limits, bound), x.dtype)
        own = jnp.clip(ids, 0, count - 1) if mode == "clip" else jnp.asarray(ids)
        belongs = own[:, None, None] == jnp.arange(count)[:, None]
        return reduce(jnp.where(belongs, x[:, None], neutral), 0, initial=neutral)

    return reduced


def _scatter_add(x: Any, index: Any, updates: Any, *, mode: Any = None) -> Any:
    return x.at[index].add(updates, mode=mode)


def _sort_by_key(keys: Any, *values: Any, num_keys: int) -> Any:
    keys = jnp.asarray(keys)
    order = jnp.argsort(keys, stable=True)
    return (keys[order], *(x[order] for x in values))


def _top_k(x: Any, k: int, *, axis: int) -> Any:
    values, indices = lax.top_k(jnp.moveaxis(x, axis, -1), k)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


def _cumulative(name: str) -> Any:
    def cumulative(
        a: Any, axis: int | None = None, dtype: Any = None, *, reverse: bool = False
    ) -> Any:
        function = getattr(jnp, name)
        if not reverse:
            return function(a, axis, dtype)
        a, axis = (jnp.ravel(a), 0) if axis is None else (a, axis)
        return jnp.flip(function(jnp.flip(a, axis), axis, dtype), axis)

    return cumulative


def _linear_recurrence(
    a: Any, b: Any, *, axis: int, reverse: bool = False, initial: Any = None
) -> Any:
    a, b = jnp.broadcast_arrays(a, b)
    if initial is not None and a.shape[axis]:
        first = -1 if reverse else 0
        along = [first if i == axis % a.ndim else slice(None) for i in range(a.ndim)]
        b = b.at[tuple(along)].add(a[tuple(along)] * initial)

    def combine(x: Any, y: Any) -> Any:
        return x[0] * y[0], y[0] * x[1] + y[1]

    return lax.associative_scan(combine, (a, b), reverse, axis)[1]


def _quantize(x: Any, block: Any = (1, 128), dtype: Any = F8E4, symmetric: bool = True) -> Any:
    """Blocks of a matrix, each with one scale, and a zero point if not symmetric."""
    *leading, m, n = x.shape
    rows, columns = block
    of_rows, of_columns = -(-m // rows), -(-n // columns)
    whole = of_rows * rows, of_columns * columns
    unused = [*((0, 0) for _ in leading), (0, whole[0] - m), (0, whole[1] - n)]
    split = of_rows, rows, of_columns, columns
    wide = jnp.pad(x.astype(np.float32), unused).reshape(*leading, *split)
    bits = {"int4": 4, "int8": 8}.get(np.dtype(dtype).name)
    largest = 2 ** (bits - 1) - 1 if bits else 448

    def of_elements(y: Any) -> Any:
        return y[..., None, :, None]

    low, high = wide.min((-3, -1)).clip(max=0), wide.max((-3, -1)).clip(min=0)
    if symmetric:
        scales = abs(wide).max((-3, -1)) * np.float32(1 / largest)
    else:
        scales = (high - low) * np.float32(1 / (2 * largest + 1))
    scales = jnp.where(abs(wide).max((-3, -1)) < 2.0**-90, 1, scales)
    values = wide * of_elements(1 / scales)
    zeros = 0 * scales if symmetric else jnp.round(-1 - largest - low / scales)
    if bits:
        values = jnp.round(values) + of_elements(zeros)
        values = values.clip(-1 - largest, largest)
    values = values.astype(dtype).reshape(*leading, *whole)[..., :m, :n]
    return (values, scales) if symmetric else (values, scales, zeros)


def _fp8_dot_general(lhs: Any, rhs: Any, dimensions: Any) -> Any:
    """Multiply matrices by what 8-bit floats and their scales keep of them."""
    assert [*map(list, dimensions[0])] == [[1], [0]]
    rows, columns = (
        _dequantized(*_quantize(x, block)) for x, block in ((lhs, (1, 128)), (rhs, (128, 128)))
    )
    return (rows @ columns).astype(jnp.promote_types(lhs.dtype, rhs.dtype))


def _quantize_weights(params: Any, dtype: Any, block: Any) -> Any:
    """Return the matrices for which their quantised values stand."""

    def rounded(w: Any) -> Any:
        values, scales = _quantize(w.mT, block, dtype)
        return (values.astype(np.float32) * element_scales(scales, values.shape)).mT.astype(w.dtype)

    return jax.tree.map(rounded, params)


def _row_quantize(y: Any) -> Any:
    return _quantize(y)


def element_scales(scales: Any, shape: Sequence[int]) -> Any:
    """Return the scale of each element, of scales of blocks or of whole dimensions."""
    for axis in (-2, -1):
        size, count = shape[axis], scales.shape[axis]
        if count not in (1, size):
            block = next(x for x in (128, 64, 32) if -(-size // x) == count)
            scales = jnp.take(scales, np.arange(size) // block, axis)
    return scales


def _dequantized(x: Any, scales: Any, zeros: Any = None) -> Any:
    if scales is None:
        return x.astype(jnp.promote_types(x.dtype, np.float32))
    wide = jnp.promote_types(scales.dtype, np.float32)
    values = x.astype(wide)
    if zeros is not None:
        values = values - element_scales(zeros, x.shape).astype(wide)
    return values * element_scales(scales, x.shape).astype(wide)


def _scaled_matmul(
    lhs: Any, rhs: Any, lhs_scales: Any, rhs_scales: Any, *, rhs_zeros: Any = None,
    epilogue: Any = None, operands: Any = (),
) -> Any:  # fmt: skip
    rows, columns = _dequantized(lhs, lhs_scales), _dequantized(rhs, rhs_scales, rhs_zeros)
    return _with_epilogue(rows @ columns.mT, epilogue, operands)


def _scaled_ragged_dot(
    lhs: Any, rhs: Any, sizes: Any, lhs_scales: Any, rhs_scales: Any, *, rhs_zeros: Any = None
) -> Any:
    rows, matrices = _dequantized(lhs, lhs_scales), _dequantized(rhs, rhs_scales, rhs_zeros)
    return _masked_products(rows, matrices.mT, sizes)


def _causal_conv1d(
    x: Any, weights: Any, bias: Any = None, activation: Any = None, state: Any = None
) -> Any:
    width, channels = weights.shape
    zeros = jnp.zeros((*x.shape[:-2], width - 1, channels), x.dtype)
    inputs = jnp.concatenate((zeros if state is None else state, x), -2)
    sequences = inputs.reshape(math.prod(inputs.shape[:-2]), *inputs.shape[-2:])
    out = x
    if channels:  # XLA has no convolution of no channel.
        out = lax.conv_general_dilated(
            sequences, weights[:, None], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=channels,
        ).reshape(x.shape)  # fmt: skip
    out = out if bias is None else out + bias
    out = jax.nn.silu(out) if activation == "silu" else out
    return out if state is None else (out, inputs[..., x.shape[-2] :, :])


def _newton_schulz(x: Any, precision: Any = None) -> Any:
    x = x / (jnp.sqrt((x * x).sum((-2, -1), keepdims=True)) + 1e-8)
    for _ in range(5):
        square = jnp.matmul(x, x.mT, precision=precision)
        polynomial = -4.775 * square + 2.0315 * jnp.matmul(square, square, precision=precision)
        x = 3.4445 * x + jnp.matmul(polynomial, x, precision=precision)
    return x


def _muon(learning_rate: float) -> Any:
    import optax

    return optax.contrib.muon(learning_rate)


def _lu(a: Any) -> Any:
    factors = jax.scipy.linalg.lu
    for _ in a.shape[2:]:
        factors = jax.vmap(factors)
    return factors(a)


ORACLES = SimpleNamespace(
    **{
        **_namesakes(jtk, _MODULES),
        "attention": _attention,
        "all_gather_matmul": _all_gather_matmul,
        "causal_conv1d": _causal_conv1d,
        "cumprod": _cumulative("cumprod"),
        "cumsum": _cumulative("cumsum"),
        "fp8_dot_general": lax.dot_general,
        "gated_linear": _gated_linear,
        "linear": _linear,
        "linear_cross_entropy": _linear_cross_entropy,
        "linear_recurrence": _linear_recurrence,
        "matmul": _matmul,
        "matmul_reduce_scatter": _matmul_reduce_scatter,
        "moe": _moe,
        "muon": _muon,
        "quantize": _quantize,
        "quantize_weights": _quantize_weights,
        "ragged_dot": functools.partial(_ragged_dot, _masked_products),
        "ragged_dot_general": _ragged_dot_general,
        "ring_attention": _ring_attention,
        "route": _route,
        "row_logsumexp": functools.partial(jax.nn.logsumexp, axis=-1),
        "row_max": functools.partial(jnp.max, axis=-1),
        "row_quantize": _row_quantize,
        "row_sum": functools.partial(jnp.sum, axis=-1),
        "scaled_matmul": _scaled_matmul,
        "scaled_ragged_dot": _scaled_ragged_dot,
        "scatter_add": _scatter_add,
        "segment_max": _segment_extreme(jnp.max, "min"),
        "segment_min": _segment_extreme(jnp.min, "max"),
        "segment_mean": _segment_mean,
        "segment_reduce": _segment_reduce,
        "sort_by_key": _sort_by_key,
        "sort_operands": lax.sort,
        "strassen_matmul": lambda a, b, levels: jnp.matmul(a, b),
        "symmetric_matmul": _symmetric_matmul,
        "top_k": _top_k,
        "out_of_core": SimpleNamespace(matmul=lambda a, b, memory_limit: a @ b),
        "linalg": SimpleNamespace(
            **{
                **_namesakes(jtk.linalg, _MODULES_OF_MATRICES),
                "lu": _lu,
                "newton_schulz": _newton_schulz,
            }
        ),
    }
)
# What users of plain JAX call. Oracles differ where JAX lets NaN of one group reach another, has no
# derivatives, or rounds.
PEERS = SimpleNamespace(
    **{
        **vars(ORACLES),
        "fp8_dot_general": _fp8_dot_general,
        "ragged_dot": functools.partial(_ragged_dot, lax.ragged_dot),
        "ragged_dot_general": lax.ragged_dot_general,
        "segment_max": jax.ops.segment_max,
        "segment_min": jax.ops.segment_min,
    }
)
