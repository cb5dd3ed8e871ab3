"""The activation of a layer of experts as plain data, which XLA's partitioner takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import (
    Role,
    ScalarFunction,
    TracedFunction,
    trace_scalars,
)
from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.partitioning import params_text

_ROLE = Role("moe", "activation")


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function, traced for each type of values that it is applied to."""

    # The function of a scalar of each type, and of the scalars that it closes over.
    values: tuple[ScalarFunction, ...]
    # For each type, the indices of the closed-over values that the function reads.
    reads: tuple[tuple[int, ...], ...]
    # Its derivatives by each operand that is a float, or none. The text of a function has no custom
    # derivative, so they are functions of their own.
    slopes: tuple[ScalarFunction, ...] = ()

    def __call__(self, x: Array, *closed_over: Array) -> Array:
        dtypes = [function.jaxpr.in_avals[0].dtype for function in self.values]
        place = dtypes.index(x.dtype)
        labels = tuple(range(jnp.ndim(x)))
        x, *operands = compat.unify_varying(x, *(closed_over[i] for i in self.reads[place]))

        def by_element(function: ScalarFunction, *operands: Array) -> list[Array]:
            return function.over_labels(labels, [()] * (len(operands) - 1))(*operands)

        def value(*operands: Array) -> Array:
            return by_element(self.values[place], *operands)[0]

        if not self.slopes:
            return value(x, *operands)
        function = jax.custom_jvp(value)

        @function.defjvp
        @mode_independent
        def _(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Array]:
            result, slopes = function(*primals), by_element(self.slopes[place], *primals)
            moving = (tangents[i] for i in _floats([x.dtype for x in primals]))
            terms = [slope * t for slope, t in zip(slopes, moving, strict=True)]
            return result, sum(terms[1:], terms[0]).astype(result.dtype)

        result: Array = function(x, *operands)
        return result

    def differentiated(self) -> Activation:
        def slopes_of(function: ScalarFunction) -> ScalarFunction:
            dtypes = [np.dtype(aval.dtype) for aval in function.jaxpr.in_avals]
            floats = _floats(dtypes)

            def slopes(*operands: Array) -> list[Array]:
                def value_of_floats(*moving: Array) -> Array:
                    replaced = [*operands]
                    for i, x in zip(floats, moving, strict=True):
                        replaced[i] = x
                    result: Array = function(*replaced)[0]
                    return result

                # Types of scalars have no mesh; transposes compare them with values.
                with compat.without_mesh():
                    result, pull = jax.vjp(value_of_floats, *(operands[i] for i in floats))
                    return list(pull(jnp.ones_like(result)))

            return trace_scalars(slopes, dtypes[0], dtypes[0], dtypes[1:]).function

        return dataclasses.replace(self, slopes=tuple(map(slopes_of, self.values)))


def _floats(dtypes: Sequence[Any]) -> list[int]:
    return [i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact)]


def traced_activation(
    function: Callable[[Any], Any], dtypes: Sequence[np.dtype[Any]]
) -> tuple[Activation | None, list[Array]]:
    """Trace a user's function for values of some types; return the values that it closes over.

    There is no activation if the function closes over values and has branches, loops or functions
    with a derivative of their own: their jaxprs have the types of the place where they were traced.
    """
    traced = [_traced(function, dtype) for dtype in dict.fromkeys(dtypes)]
    places: dict[int, int] = {}
    values: list[Array] = []
    for value in (x for each in traced for x in each.closed_over):
        if id(value) not in places:
            places[id(value)] = len(values)
            values.append(jnp.asarray(value))
    reads = (tuple(places[id(x)] for x in each.closed_over) for each in traced)
    functions = tuple(each.function for each in traced)
    equations = (eqn for function in functions for eqn in function.jaxpr.jaxpr.eqns)
    if any(each.is_closure for each in functions) or (
        values and any(map(compat.jaxprs_of, equations))
    ):
        return None, []
    return Activation(functions, tuple(reads)), values


def _traced(function: Callable[[Any], Any], dtype: np.dtype[Any]) -> TracedFunction:
    traced = trace_scalars(function, dtype, dtype, (), _ROLE)
    results = traced.function.out_dtypes
    if traced.function.reductions != (None,) or traced.nested([0]) != 0:
        raise TypeError(
            f"{_ROLE.of(function)} returns {traced.nested(results)}; it must return one scalar"
        )
    if jnp.issubdtype(results[0], np.complexfloating) and dtype.kind != "c":
        raise TypeError(
            f"{_ROLE.of(function)} returns {results[0]} for {dtype}; take its "
            "real part, or cast x to a complex type"
        )
    return traced


# An activation's closed-over values are arrays of the layer beside those of `DIMS`.
_NAME = "activation_"


def named(values: Sequence[Array]) -> dict[str, Array]:
    """Return the values that an activation closes over as arrays of the layer."""
    return {f"{_NAME}{i}": x for i, x in enumerate(values)}


def closed_over(arrays: Mapping[str, Array]) -> list[Array]:
    """Return those of the layer's arrays that are values that its activation closes over."""
    count = sum(name.startswith(_NAME) for name in arrays)
    return [arrays[f"{_NAME}{i}"] for i in range(count)]


params_text.register(
    Activation,
    lambda activation: (activation.values, activation.reads, activation.slopes),
    lambda data: Activation(*data),
)
