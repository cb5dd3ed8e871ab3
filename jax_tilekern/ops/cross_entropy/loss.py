"""``linear_cross_entropy``: the loss of a vocabulary's logits, which are never in memory."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.ops.arguments import check_choice, number
from jax_tilekern.ops.cross_entropy.logits import Options, row_losses, statistics_type
from jax_tilekern.ops.cross_entropy.primitives import cross_entropy, statistics
from jax_tilekern.ops.jitted import jitted

LossReduction = Literal["mean", "sum", "none"]
_REDUCTIONS = ("mean", "sum", "none")

# With 128,256 columns in bfloat16, these are the exponentials of 1536 rows. With the remainder of
# the cotangent of a w of 2560 rows, all temporaries are below 1 GiB (docs/linear-cross-entropy.md).
_CHUNK_BYTES = 384 << 20


def linear_cross_entropy(
    h: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    reduction: LossReduction = "mean",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    precision: lax.PrecisionLike = None,
) -> Array:
    r"""Cross-entropy of ``softmax(h @ w + bias)`` and integer labels, without the logits in memory.

    With the logits ``y`` of a row, its label ``l`` and ``lse = log(sum(exp(y)))``, the loss of the
    row is ``lse - (1 - label_smoothing) * y[l] - label_smoothing * mean(y) + z_loss * lse ** 2``.

    Only a chunk of the logits is ever in memory. Sums, statistics and the loss are in float32 at
    least, and what stands for the logits' cotangent in the products that follow is rounded to the
    operands' type. Second derivatives are supported, but form all logits.

    Parameters
    ----------
    h
        Array of shape ``(..., d)``, of a floating-point type.
    w
        Array of shape ``(d, v)``, of a floating-point type; ``w.T`` for a table of embeddings of
        shape ``(v, d)``.
    labels
        Integers of shape ``(...)``. A label outside ``[0, v)`` makes the loss of its row, and the
        gradients to which the row contributes, NaN, unless it is ``ignore_index``.
    bias
        Added to the logits: an array of shape ``(v,)``.
    reduction
        ``"mean"`` over the rows that are not ignored (0 if there are none), ``"sum"``, or
        ``"none"``.
    z_loss
        Weight of the square of ``lse``, which keeps it near 0.
    label_smoothing
        Weight of the uniform distribution in the target, from 0 to 1.
    softcap
        Bounds the logits by ``softcap * tanh(logit / softcap)``.
    ignore_index
        Rows with this label have loss and gradient 0 and do not count in the mean.
    axis_name
        Inside :func:`jax.shard_map`, the mesh axes over which the vocabulary is sharded: ``w`` and
        ``bias`` are then the device's part, and labels count from the first column of all.
    precision
        Of the products, as of :func:`jax_tilekern.matmul`.

    Returns
    -------
    Array
        A scalar, or the shape of ``labels``; float32, or float64 where an operand is.

    Raises
    ------
    TypeError
        If ``labels`` are not integers, or another operand is not of a floating-point type.
    ValueError
        If shapes do not go together, or an option has no meaning.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> h, w = jnp.ones((4, 8)), jnp.zeros((8, 16))
    >>> jtk.linear_cross_entropy(h, w, jnp.arange(4))  # log(16)
    Array(2.7725887, dtype=float32)
    """
    compat.check_arraylike("linear_cross_entropy", h, w, labels, **compat.given(bias=bias))
    h, w, labels = (jnp.asarray(x) for x in (h, w, labels))
    bias = None if bias is None else jnp.asarray(bias)
    _check_operands(h, w, labels, bias)
    z_loss = number("linear_cross_entropy", "z_loss", z_loss)
    label_smoothing = number("linear_cross_entropy", "label_smoothing", label_smoothing)
    softcap = None if softcap is None else number("linear_cross_entropy", "softcap", softcap)
    check_choice("linear_cross_entropy", "reduction", reduction, _REDUCTIONS)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"linear_cross_entropy: label_smoothing is {label_smoothing}; it must be from 0 to 1"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"linear_cross_entropy: softcap is {softcap}; it must be positive, or None"
        )
    columns = w.shape[1] * (1 if axis_name is None else lax.axis_size(axis_name))
    precision = compat.canonicalize_precision(precision)
    options = Options(softcap, z_loss, label_smoothing, columns, precision, _CHUNK_BYTES)
    return _loss(h, w, labels, bias, reduction, ignore_index, axis_name, options)


def _check_operands(h: Array, w: Array, labels: Array, bias: Array | None) -> None:
    arrays = {"h": h, "w": w} | ({} if bias is None else {"bias": bias})
    types = ", ".join(
        f"{name} {x.dtype}{[*x.shape]}" for name, x in (*arrays.items(), ("labels", labels))
    )
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"linear_cross_entropy: {name} must have a floating-point type: {types}"
            )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            "linear_cross_entropy: labels must be integers, the positions of the right columns of "
            f"w: {types}"
        )
    if h.ndim < 1 or w.ndim != 2 or h.shape[-1] != w.shape[0]:
        raise ValueError(
            "linear_cross_entropy: the shapes of h and w must be (..., d) and (d, v); pass w.T if "
            f"w has a row for each label: {types}"
        )
    if labels.shape != h.shape[:-1]:
        raise ValueError(
            "linear_cross_entropy: labels must have the shape of h without its last dimension, "
            f"{h.shape[:-1]}: {types}"
        )
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"linear_cross_entropy: the shape of bias must be {w.shape[1:]}: {types}")
    if w.shape[1] == 0:
        raise ValueError(f"linear_cross_entropy: w must have at least one column: {types}")


@jitted("reduction", "ignore_index", "axis_name", "options")
@mode_independent
def _loss(
    h: Array,
    w: Array,
    labels: Array,
    bias: Array | None,
    reduction: LossReduction,
    ignore_index: int | None,
    axis_name: str | tuple[str, ...] | None,
    options: Options,
) -> Array:
    """Return the losses of the rows by weights, which are NaN for labels out of range."""
    if bias is None:
        bias = jnp.zeros_like(w[0])
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    info = np.iinfo(labels.dtype)
    counted = jnp.ones_like(labels, bool)
    if ignore_index is not None and info.min <= ignore_index <= info.max:
        counted = labels != ignore_index
    valid = (labels >= 0) & (labels < options.columns)
    label = jnp.where(valid, labels, -1).astype(jnp.int32)
    weights = jnp.where(counted, jnp.where(valid, 1, jnp.nan), 0).astype(statistics_type(h, w))
    if reduction == "mean":
        weights /= jnp.maximum(1, counted.sum())
    if axis_name is None and reduction != "none":
        total: Array
        (total,) = cross_entropy(h, w, bias, label, weights, wanted=(), options=options)
        return total
    if axis_name is None:
        found = statistics(h, w, bias, label, options=options)
    else:
        label = label - lax.axis_index(axis_name) * w.shape[1]
        lse, *sums = statistics(h, w, bias, label, options=options)
        found = [_logsumexp_over(axis_name, lse), *(lax.psum(x, axis_name) for x in sums)]
    losses = row_losses(options, weights, *found)
    return losses if reduction == "none" else losses.sum()


def _logsumexp_over(axis_name: str | tuple[str, ...], lse: Array) -> Array:
    top = lax.pmax(lax.stop_gradient(lse), axis_name)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return top + jnp.log(lax.psum(jnp.exp(lse - top), axis_name))
