"""The user's functions: a score or a mask as a jaxpr of scalars, and the arrays that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.plain_data import from_equations, to_equations
from jax_tilekern.epilogue.scalar_function import evaluate_without_names, takes
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.jitted import MOST_FUNCTIONS, UserFunction, has_tracers
from jax_tilekern.partitioning import params_text

INDEX = jax.core.ShapedArray((), np.dtype(np.int32))
_NOT_JAX_ARRAYS = (np.ndarray, np.generic, bool, int, float, complex)


@dataclass(frozen=True, eq=False)
class IndexFunction:
    """A function of the user's: of a score or not, of four indices, and of arrays that it reads."""

    name: str  # what explain calls it
    jaxpr: compat.ClosedJaxpr  # (*scalars, *arrays) -> one scalar, without constants
    scalars: int  # 5 for a score and the indices, 4 for the indices

    @property
    def dtypes(self) -> frozenset[Any]:
        """Types of all values, which decide the modes of rules."""
        equations = compat.leaf_equations(self.jaxpr.jaxpr)
        avals = [x.aval for eqn in equations for x in (*eqn.invars, *eqn.outvars)]
        dtypes = (getattr(x, "dtype", None) for x in (*self.jaxpr.in_avals, *avals))
        return frozenset(x for x in dtypes if isinstance(x, np.dtype))

    @property
    def arrays(self) -> int:
        """How many arrays it reads."""
        return len(self.jaxpr.in_avals) - self.scalars

    def __call__(self, *operands: Any) -> Any:
        return evaluate_without_names(self.jaxpr.jaxpr, len(operands), *operands)[0]

    def over_indices(self, *operands: Any) -> Array:
        """Return the function of vectors of indices, and of scores ``(b, h, q, k)``."""
        function: Callable[..., Any] = self.__call__
        for index in reversed(range(4)):
            axes: list[int | None] = [None] * len(operands)
            axes[self.scalars - 4 + index] = 0
            if self.scalars == 5:
                axes[0] = 0
            function = jax.vmap(function, in_axes=tuple(axes))
        result: Array = compat.staged(function)(*operands)
        return result

    def reads(self, index: int) -> bool:
        """Whether the result may depend on an index: of the batch, head, query or key."""
        return is_read(self.jaxpr.jaxpr, self.scalars - 4 + index)

    def mapped(self, count: int, batch: int, is_mapped: Sequence[bool]) -> IndexFunction:
        """Return the function for ``count * batch`` elements, of which mapped arrays have a part.

        A mapped array has a leading dimension of ``count``.
        """
        n = self.scalars
        if not (self.reads(0) or any(is_mapped)):
            return self

        def function(*operands: Any) -> Any:
            scalars, arrays = list(operands[:n]), operands[n:]
            b, size = scalars[n - 4], np.int32(max(1, batch))
            number, scalars[n - 4] = lax.div(b, size), lax.rem(b, size)
            own = (
                x.at[number].get(mode="promise_in_bounds") if leads else x
                for x, leads in zip(arrays, is_mapped, strict=True)
            )
            return self(*scalars, *own)

        avals = [
            x.update(shape=(count, *x.shape)) if leads else x
            for x, leads in zip(self.jaxpr.in_avals[n:], is_mapped, strict=True)
        ]
        return dataclasses.replace(self, jaxpr=closed(function, *self.jaxpr.in_avals[:n], *avals))


def is_read(jaxpr: Any, operand: int) -> bool:
    """Whether an equation or a result reads an operand."""
    var = jaxpr.invars[operand]
    return var in jaxpr.outvars or any(var in x.invars for x in jaxpr.eqns)


def _to_data(function: IndexFunction) -> dict[str, Any] | None:
    """Return a function as plain data; one with a derivative of its own has none."""
    avals = function.jaxpr.in_avals
    types = [getattr(x, "dtype", None) for x in avals]
    equations = function.jaxpr.jaxpr.eqns
    if not all(isinstance(x, np.dtype) for x in types) or any(map(compat.jaxprs_of, equations)):
        return None
    found = to_equations(function.jaxpr)
    return found and {
        "name": function.name,
        "scalars": function.scalars,
        "types": tuple(zip(types, (x.shape for x in avals), strict=True)),
        **found,
    }


def _from_data(data: dict[str, Any]) -> IndexFunction:
    avals = [jax.core.ShapedArray(shape, dtype) for dtype, shape in data["types"]]
    # XLA calls this function on its own thread, where the user's configuration is not set.
    with jax.enable_x64(True):
        jaxpr = closed(from_equations(data), *avals)
    return IndexFunction(data["name"], jaxpr, data["scalars"])


params_text.register(IndexFunction, _to_data, _from_data)


def closed(function: Callable[..., Any], *avals: Any) -> Any:
    """Trace a function whose types have no mesh."""
    with compat.without_mesh():
        return jax.make_jaxpr(function)(*avals)


def traced(
    function: Callable[..., Any], argument: str, score: np.dtype[Any] | None
) -> tuple[IndexFunction, list[Array]]:
    """Trace a function of the user's; return it with the arrays that it closes over.

    ``score`` is the type of its first operand and of its result; without one it is a mask.

    Raises
    ------
    TypeError
        If it does not take these operands, or does not return such a scalar.
    """
    if not callable(function):
        raise TypeError(f"attention: {argument} is {function!r}; it is a function of scalars")
    user = UserFunction(function)
    if user.reads_tracers:
        return _traced(function, argument, score)
    kept: list[tuple[IndexFunction, list[Array]]] = _kept(user, argument, score)
    if kept:
        return kept[0]
    found = _traced(function, argument, score)
    if not has_tracers(found[1]):
        kept.append(found)
    return found


@compat.cached(max_size=MOST_FUNCTIONS)
def _kept(*_: Any) -> list[tuple[IndexFunction, list[Array]]]:
    """Return where a function that is traced for some types is kept, if it reads no tracers."""
    return []


def _is_empty(x: Any) -> bool:
    return isinstance(x, Array | np.ndarray) and x.size == 0


def _traced(
    function: Callable[..., Any], argument: str, score: np.dtype[Any] | None
) -> tuple[IndexFunction, list[Array]]:
    scalars = [INDEX] * 4 if score is None else [jax.core.ShapedArray((), score), *[INDEX] * 4]
    name = getattr(function, "__name__", type(function).__name__)
    called = f"attention: {argument} {name}"
    if not takes(function, len(scalars)):
        first = "" if score is None else "score, "
        raise TypeError(
            f"{called} does not take {len(scalars)} scalars, ({first}batch, head, query_index, "
            "key_index)"
        )

    def checked(*values: Any) -> Any:
        result = function(*values)
        for leaf in jax.tree.leaves(result):
            if not isinstance(leaf, (Array, *_NOT_JAX_ARRAYS)):
                raise TypeError(f"{called} returns {leaf!r}; it must return one scalar")
        return result

    try:
        # Arrays that vary over a mesh become operands, whose types say nothing of it.
        with compat.without_casts_to_varying():
            # make_jaxpr keeps what it traced of a function, whatever the function reads since.
            traced, result = jax.make_jaxpr(checked, return_shape=True)(*scalars)
    except IndexError as error:
        empty = [jnp.shape(x) for x in jax.tree.leaves(UserFunction(function).read) if _is_empty(x)]
        if not empty:
            raise
        raise ValueError(
            f"{called} reads an element of an array without elements, of shape "
            f"{' or '.join(map(str, empty))}; give the array the elements that the indices number"
        ) from error
    if getattr(result, "shape", None) != ():
        raise TypeError(f"{called} returns {result}; it must return one scalar")
    kind, wanted = ("b", "a boolean") if score is None else ("f", "a real number")
    kind_of_result = "f" if jnp.issubdtype(result.dtype, jnp.floating) else result.dtype.kind
    if kind_of_result != kind and not (kind == "f" and kind_of_result in "iu"):
        raise TypeError(f"{called} returns {result.dtype}; it must return {wanted}")
    if traced.effects:
        raise TypeError(f"{called} has a side effect; it is evaluated any number of times")
    consts = [jnp.asarray(x) if isinstance(x, _NOT_JAX_ARRAYS) else x for x in traced.consts]

    def converted(*values: Any) -> Any:
        own, arrays = values[: len(scalars)], values[len(scalars) :]
        (found,) = evaluate_without_names(traced.jaxpr, len(own), *own, *arrays)
        return found if score is None else jnp.asarray(found).astype(score)

    types = (jax.core.ShapedArray(jnp.shape(x), jax.typeof(x).dtype) for x in consts)
    found = IndexFunction(name, closed(converted, *scalars, *types), len(scalars))
    # Functions of the same equations have one program.
    return params_text.shared(found), consts
