"""Typed keys of ``jax.random`` replaced by their data, and draws by JAX's integer arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tilekern.epilogue.primitives import INNER_JAXPR
from jax_tilekern.epilogue.understood import (
    Parameters,
    Untranslatable,
    all_of,
    located,
    refuse_unknown,
)
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.meanings import meaning_of

# Primitives that move keys: they move each word of the data alike.
_MOVES = frozenset(
    {
        "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice",
        "gather", "reshape", "rev", "scatter", "select_n", "slice", "split",
        "squeeze", "stack", "tile", "transpose", "unstack",
    }
)  # fmt: skip
# Calls with derivatives of their own; `custom_lin` is one that reverse mode is about to transpose.
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_lin")


def translated() -> frozenset[str]:
    """Return the names of primitives of keys."""
    return frozenset({*_RANDOM, "random_gamma"})


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def raw_type(aval: Any) -> jax.core.ShapedArray:
    """Return the type of an array, or of the data of keys."""
    if not is_key(aval):
        return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
    shape = compat.key_functions(aval.dtype).key_shape
    return jax.core.ShapedArray((*aval.shape, *shape), jnp.dtype("uint32"))


def without_keys(closed: Any, *, inlined: bool = False) -> Any:
    """Return a jaxpr that takes and returns the data of keys, if the keys are used so.

    Functions with custom derivatives keep their keys, and their derivatives, unless they are
    ``inlined``.
    """
    if not _has_keys(closed):
        return closed
    with compat.without_mesh():
        return jax.make_jaxpr(lambda *raw: _evaluated(closed, raw, inlined))(
            *map(raw_type, closed.in_avals)
        )


def _has_keys(closed: Any) -> bool:
    jaxpr = closed.jaxpr
    atoms = (*jaxpr.invars, *jaxpr.constvars, *(x for e in jaxpr.eqns for x in e.outvars))
    return any(is_key(x.aval) for x in atoms) or any(
        _has_keys(compat.closed_jaxpr(inner))
        for eqn in jaxpr.eqns
        for inner in compat.jaxprs_of(eqn)
    )


def _evaluated(closed: Any, operands: Sequence[Any], inlined: bool) -> list[Any]:
    consts = [_data(x) for x in closed.consts]
    equation = functools.partial(_equation, inlined=inlined)
    return compat.eval_jaxpr_by(equation, closed.jaxpr, consts, operands)


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(jax.typeof(x)) else x


def typed(x: Any, aval: Any) -> Any:
    """Return an array, or keys of some type by their data."""
    if not is_key(aval):
        return x
    return jax.random.wrap_key_data(x, impl=compat.key_functions(aval.dtype).name)


def _equation(eqn: Any, operands: list[Any], inlined: bool) -> list[Any]:
    name = eqn.primitive.name
    touches = any(is_key(x.aval) for x in (*eqn.invars, *eqn.outvars))
    inner = [compat.closed_jaxpr(x) for x in compat.jaxprs_of(eqn)]
    if not touches and not any(map(_has_keys, inner)):
        return compat.bind_equation(eqn, operands)
    with compat.traced_from(eqn), located(eqn):
        if name in _RANDOM:
            function, parameters = _RANDOM[name]
            refuse_unknown(eqn, parameters)
            return [function(eqn, *operands)]
        if name in ("scan", "while", "cond"):
            params = {key: _raw(value, inlined) for key, value in eqn.params.items()}
            results = eqn.primitive.bind(*operands, **params)
            return list(results)
        if name in _CUSTOM and not inlined:
            given = [typed(x, y.aval) for x, y in zip(operands, eqn.invars, strict=True)]
            return [_data(x) for x in compat.bind_equation(eqn, given)]
        if name in INNER_JAXPR:
            refuse_unknown(eqn)
            return _evaluated(compat.closed_jaxpr(eqn.params[INNER_JAXPR[name]]), operands, inlined)
        if name in _MOVES and all(compat.key_functions(x.aval.dtype).key_shape == (2,) for x in
                             (*eqn.invars, *eqn.outvars) if is_key(x.aval)):  # fmt: skip
            return _for_each_word(eqn, operands)
        if name == "random_gamma":
            refuse_unknown(eqn, all_of("log_space"))
            by_jax = functools.partial(eqn.primitive.impl, **eqn.params)
            meaning = jax.make_jaxpr(by_jax)(*(x.aval for x in eqn.invars))
        else:
            meaning = meaning_of(eqn)
        if meaning is not None:
            return _evaluated(meaning, operands, inlined)
        raise Untranslatable(f"no CUDA for {name} of random keys")


def _raw(param: Any, inlined: bool) -> Any:
    if isinstance(param, compat.ClosedJaxpr):
        return without_keys(param, inlined=inlined)
    if isinstance(param, tuple) and any(isinstance(x, compat.ClosedJaxpr) for x in param):
        return tuple(without_keys(x, inlined=inlined) for x in param)
    return param


def _for_each_word(eqn: Any, operands: list[Any]) -> list[Any]:
    """Apply an equation that moves keys to each word of their data."""
    axes = [-1 if is_key(x.aval) else None for x in eqn.invars]

    def bound(*words: Any) -> list[Any]:
        results = eqn.primitive.bind(*words, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]

    return list(jax.vmap(bound, in_axes=axes, out_axes=-1)(*operands))


def _for_each_key(function: Callable[..., Any], keys: Any, key_dims: int) -> Any:
    for _ in range(keys.ndim - key_dims):
        function = jax.vmap(function)
    return function(keys)


def _split(eqn: Any, keys: Any) -> Any:
    functions, shape = compat.key_functions(eqn.invars[0].aval.dtype), eqn.params["shape"]
    return _for_each_key(lambda key: functions.split(key, shape), keys, len(functions.key_shape))


def _bits(eqn: Any, keys: Any) -> Any:
    functions = compat.key_functions(eqn.invars[0].aval.dtype)
    width, shape = eqn.params["bit_width"], eqn.params["shape"]
    return _for_each_key(
        lambda key: functions.random_bits(key, width, shape), keys, len(functions.key_shape)
    )


def _fold_in(eqn: Any, keys: Any, data: Any) -> Any:
    functions = compat.key_functions(eqn.invars[0].aval.dtype)
    shape = tuple(eqn.outvars[0].aval.shape)
    keys = jnp.broadcast_to(keys, (*shape, *functions.key_shape))
    function = functions.fold_in
    for _ in shape:
        function = jax.vmap(function)
    return function(keys, jnp.broadcast_to(data, shape))


def _seed(eqn: Any, seeds: Any) -> Any:
    function = compat.key_functions(eqn.outvars[0].aval.dtype).seed
    return _for_each_key(function, jnp.asarray(seeds), 0)


# The translation of each primitive, and the parameters that it understands.
_RANDOM: dict[str, tuple[Callable[..., Any], Parameters]] = {
    "random_split": (_split, all_of("shape")),
    "random_bits": (_bits, all_of("bit_width shape")),
    "random_fold_in": (_fold_in, {}),
    "random_seed": (_seed, all_of("impl")),
    "random_wrap": (lambda _, data: data, all_of("impl")),
    "random_unwrap": (lambda _, keys: keys, {}),
    "random_clone": (lambda _, keys: keys, {}),
}
