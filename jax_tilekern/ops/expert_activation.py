"""The activation of a layer of experts as plain data, which XLA's partitioner takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.partitioning import params_text


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function, traced for each type of values that it is applied to.

    Attributes
    ----------
    values
        The function of a scalar of each type.
    slopes
        Its derivatives, or none. A function that is text has no custom derivative.
    """

    values: tuple[ScalarFunction, ...]
    slopes: tuple[ScalarFunction, ...] = ()

    def __call__(self, x: Array) -> Array:
        """Apply it to each element."""
        dtypes = [function.jaxpr.in_avals[0].dtype for function in self.values]
        place = dtypes.index(x.dtype)

        def by_element(function: ScalarFunction, x: Array) -> Array:
            result: Array = function.over_labels(tuple(range(jnp.ndim(x))), ())(x)[0]
            return result

        if not self.slopes:
            return by_element(self.values[place], x)

        @jax.custom_jvp
        def value(x: Array) -> Array:
            return by_element(self.values[place], x)

        @value.defjvp
        def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
            result, slope = value(*primals), by_element(self.slopes[place], *primals)
            return result, (slope * tangents[0]).astype(result.dtype)

        result: Array = value(x)
        return result

    def differentiated(self) -> Activation:
        """Return the function with its derivatives."""

        def slope_of(function: ScalarFunction) -> Callable[[Array], Array]:
            def slope(x: Array) -> Array:
                (result,), pull = jax.vjp(function, x)
                cotangent: Array = pull([jnp.ones_like(result)])[0]
                return cotangent

            return slope

        dtypes = [np.dtype(function.jaxpr.in_avals[0].dtype) for function in self.values]
        slopes = (_traced(slope_of(f), x) for f, x in zip(self.values, dtypes, strict=True))
        return dataclasses.replace(self, slopes=tuple(f for f, _ in slopes))


def traced_activation(
    function: Callable[[Any], Any], dtypes: Sequence[np.dtype[Any]]
) -> Activation | None:
    """Trace a user's function for values of some types; ``None`` if it reads other values.

    Raises
    ------
    TypeError
        If it is not a function of scalars.
    """
    traced = [_traced(function, dtype) for dtype in dict.fromkeys(dtypes)]
    if any(closed_over for _, closed_over in traced):
        return None
    return Activation(tuple(f for f, _ in traced))


def _traced(
    function: Callable[[Any], Any], dtype: np.dtype[Any]
) -> tuple[ScalarFunction, list[Any]]:
    scalar, closed_over, _ = trace_scalars(function, dtype, dtype, ())
    return scalar, closed_over


params_text.register(
    Activation,
    lambda activation: (activation.values, activation.slopes),
    lambda data: Activation(*data),
)
