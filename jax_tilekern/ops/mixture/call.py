"""A layer of experts as one call, which XLA partitions in a ``jit`` over several devices.

The operations of a layer cannot be partitioned one by one, because the order of all tokens is not
that of a device's own. As one call, a device computes the part of its tokens, of its experts or of
its columns of the hidden values. The tangents and the cotangents are one call each. They compute
the first products again, because no sharding names the order of a device's own tokens. XLA computes
them once where the forward pass is in the same computation.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.mixture.activation import Activation
from jax_tilekern.ops.mixture.layer import DIMS, expert_layer
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import Dims, ShardingRule, sizes_of
from jax_tilekern.primitives.operation import (
    Operation,
    Params,
    Planner,
    Rewrite,
    Transposes,
    define,
    no_refusal,
)

# Labels of the dimensions that devices share. A device needs the others whole.
TOKENS, EXPERTS, HIDDEN, FEATURES = range(4)
_LABELS = {"tokens": TOKENS, "experts": EXPERTS, "hidden": HIDDEN}
_RESULT: Dims = (TOKENS, FEATURES)
Names = tuple[str, ...]


def is_one_call(arrays: Mapping[str, Any]) -> bool:
    """Return whether several devices may compute a layer, by shardings that only XLA knows."""
    leaves = jax.tree.leaves(arrays)
    if max(map(_most_devices, leaves)) == 1:
        return False
    if jax.sharding.get_abstract_mesh().manual_axes:
        return False
    if any(compat.explicit_sharding(jax.typeof(x)) is not None for x in leaves):
        return False
    return 0 not in (*arrays["x"].shape, *arrays["w_up"].shape, *arrays["indices"].shape)


def _most_devices(x: Any) -> int:
    """Return how many devices may have a part of an array."""
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "primal", None)
    if x is not None:
        return len(x.sharding.device_set)
    # A program may be for CPUs in a process with a GPU, unless JAX is restricted to GPUs.
    with contextlib.suppress(RuntimeError):
        return max(jax.device_count(), jax.device_count("cpu"))
    return jax.device_count()


def one_call(
    arrays: Mapping[str, Array],
    offset: Array | None,
    *,
    activation: Activation,
    precision: Any,
    out_dtype: np.dtype[Any],
    save: str,
) -> Array:
    """Compute a layer, whose arguments are those of :func:`jax_tilekern.moe`."""
    first = jnp.zeros((), np.int32) if offset is None else offset
    result: Array = _bind(
        *arrays.values(),
        first,
        jnp.ones((), np.float32),
        names=tuple(arrays),
        activation=activation,
        precision=compat.canonicalize_precision(precision),
        out_dtype=out_dtype,
        save=save,
        differentiated=False,
    )
    return result


# Meaning. The operands are the arrays, the first expert that these have, and the share of a device
# in ``b_down``: each of the devices that add up columns of hidden values would add all of it.


def _reference(*operands: Array, names: Names, **params: Any) -> Array:
    *values, first, share = operands
    arrays = dict(zip(names, values, strict=True))
    if "b_down" in arrays:
        arrays["b_down"] = jnp.where(share != 0, arrays["b_down"], 0)
    return expert_layer(arrays, first, **params)


def _function_of_moving(
    primals: Sequence[Array], names: Names, moving: Names, params: Params
) -> tuple[Callable[..., Array], list[Array]]:
    """Return the layer as a function of the arrays that move, and these arrays."""
    places = [names.index(name) for name in moving]

    def function(*values: Array) -> Array:
        operands = list(primals)
        for place, value in zip(places, values, strict=True):
            operands[place] = value
        return _reference(*operands, names=names, **params)

    return function, [primals[place] for place in places]


def _reference_of_tangent(*operands: Array, names: Names, moving: Names, **params: Any) -> Array:
    tangents, primals = operands[: len(moving)], operands[len(moving) :]
    function, values = _function_of_moving(primals, names, moving, params)
    tangent: Array = jax.jvp(function, values, [*tangents])[1]
    return tangent


def _reference_of_cotangents(
    cotangent: Array, *primals: Array, names: Names, moving: Names, **params: Any
) -> list[Array]:
    function, values = _function_of_moving(primals, names, moving, params)
    return list(jax.vjp(function, *values)[1](cotangent))


def _like_result(*operands: Array, names: Names, out_dtype: np.dtype[Any], **_: Any) -> Array:
    arrays = dict(zip(names, operands[-len(names) - 2 :], strict=False))
    return jnp.zeros((arrays["x"].shape[0], arrays["w_down"].shape[2]), out_dtype)


def _like_moving(_: Array, *primals: Array, names: Names, moving: Names, **__: Any) -> list[Array]:
    return [primals[names.index(name)] for name in moving]


# Derivatives.


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, names: Names, **params: Any
) -> tuple[Array, Any]:
    given = {
        name: tangent
        for name, tangent in zip(names, tangents, strict=False)
        if type(tangent) is not ad.Zero
    }
    if given and params["save"] == "hidden":
        params["differentiated"] = True
    result = _bind(*primals, names=names, **params)
    if not given:
        return result, compat.zero_tangent(result)
    moving = tuple(given)
    params["activation"] = params["activation"].differentiated()
    return result, _tangent(*given.values(), *primals, names=names, moving=moving, **params)


def _transposes_of_tangent(*, moving: Names, **_: Any) -> Transposes:
    def rule(cotangent: Array, *operands: Any, **params: Any) -> list[Array]:
        cotangents: list[Array] = _cotangents(cotangent, *operands[len(moving) :], **params)
        return cotangents

    return {tuple(range(len(moving))): rule}


def _transpose_of_cotangents(cotangents: Sequence[Array], *operands: Any, **params: Any) -> Array:
    tangent: Array = _tangent(*cotangents, *operands[1:], **params)
    return tangent


def _batch(
    reference: Callable[..., Any],
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, Any]:
    results = jax.vmap(functools.partial(reference, **params), dims)(*operands)
    return results, [0] * len(results) if isinstance(results, list) else 0


# Partitioning.


def _dims(name: str) -> Dims:
    labels = _LABELS | ({"features": FEATURES} if name.endswith("_down") else {})
    return tuple(labels.get(dim) for dim in DIMS.get(name, ()))


def _rule(
    leading: Sequence[tuple[Dims, Any]],
    primals: Sequence[Any],
    results: Sequence[Dims],
    names: Names,
    passes: int,
) -> ShardingRule:
    """Return the rule of a call that computes each product of the layer so many times."""
    operands = [*leading, *((_dims(name), x) for name, x in zip(names, primals, strict=False))]
    sizes = sizes_of(*((dims, x.shape) for dims, x in operands))
    shapes = {name: x.shape for name, x in zip(names, primals, strict=False)}
    matrices = [math.prod(x[1:]) for name, x in shapes.items() if name.startswith("w_")]
    return ShardingRule(
        (*(dims for dims, _ in operands), (), ()),
        tuple(results),
        sizes,
        flops=2 * math.prod(shapes["indices"]) * sum(matrices) * passes,
        zero_padding=False,
        names={TOKENS: "tokens", EXPERTS: "experts", HIDDEN: "hidden", FEATURES: "features"},
        each_result_is_a_sum=True,
        # The gradients of the matrices may be larger than the tokens.
        gatherable=frozenset(() if [*results] == [_RESULT] else (TOKENS,)),
    )


def _sharding_rule(*operands: Any, names: Names, **_: Any) -> ShardingRule:
    return _rule((), operands, [_RESULT], names, 1)


def _rule_of_tangent(*operands: Any, names: Names, moving: Names, **_: Any) -> ShardingRule:
    tangents, primals = operands[: len(moving)], operands[len(moving) :]
    leading = [(_dims(name), x) for name, x in zip(moving, tangents, strict=True)]
    return _rule(leading, primals, [_RESULT], names, 3)


def _rule_of_cotangents(
    cotangent: Any, *primals: Any, names: Names, moving: Names, **_: Any
) -> ShardingRule:
    results = [_dims(name) for name in moving]
    return _rule([(_RESULT, cotangent)], primals, results, names, 3)


def _localised(shard: Shard, *operands: Array, **_: Any) -> list[Array]:
    """Give a device its first expert, and ``b_down`` to the first of the devices that add it."""
    *others, first, share = operands
    if shard.is_split(EXPERTS):
        first = first + shard.start(EXPERTS)
    if shard.is_split(HIDDEN):
        share = jnp.where(shard.start(HIDDEN) == 0, share, 0)
    return [*others, first, share]


def _in_float32(*, out_dtype: np.dtype[Any], **params: Any) -> Params:
    return {**params, "out_dtype": np.dtype(jnp.promote_types(out_dtype, np.float32))}


def _define(
    name: str,
    reference: Callable[..., Any],
    sharding_rule: Callable[..., ShardingRule],
    describe: str,
    **rules: Any,
) -> Callable[..., Any]:
    def plan(_: Any, __: Any, **params: Any) -> Rewrite:
        return Rewrite("its products have kernels", functools.partial(reference, **params))

    planner = Planner(no_refusal, plan)
    return define(
        Operation(
            name=name,
            reference=reference,
            batch=functools.partial(_batch, reference),
            sharding_rule=sharding_rule,
            planners=dict.fromkeys(("cpu", "cuda"), planner),
            describe=lambda **_: describe,
            localised=_localised,
            **rules,
        )
    )


_bind = _define(
    "tilekern_experts", _reference, _sharding_rule, "moe",
    jvp=_jvp,
    like_results=_like_result,
    in_float32=_in_float32,
    terms_in_float32=True,
)  # fmt: skip
_tangent = _define(
    "tilekern_experts_tangent", _reference_of_tangent, _rule_of_tangent, "moe, tangent",
    transposes=_transposes_of_tangent,
    refuse_tangent=lambda *_, **__: None,
    like_results=_like_result,
    in_float32=_in_float32,
    terms_in_float32=True,
)  # fmt: skip
_cotangents = _define(
    "tilekern_experts_cotangents", _reference_of_cotangents, _rule_of_cotangents, "moe, cotangents",
    several_results=True,
    transposes={0: _transpose_of_cotangents},
    refuse_tangent=lambda *_, **__: None,
    like_results=_like_moving,
)  # fmt: skip
