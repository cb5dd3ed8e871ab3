"""A user's function of scalars: traced once, checked, and vectorised over labelled arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tilekern.epilogue.row_reductions import RowKind, RowReduction, reduced
from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import with_current_modes
from jax_tilekern.partitioning.explicit import split_alike
from jax_tilekern.plans.contraction import Labels
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.epilogue import RowQuantization

# Primitives that combine elements of an array, which do nothing to a scalar. Whoever writes one
# means the rows or columns of the product.
_NOT_ELEMENTWISE = frozenset(
    {
        "reduce", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
        "reduce_or", "reduce_xor", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin",
        "cumlogsumexp", "sort", "dot_general", "psum", "pmax", "pmin", "all_gather", "axis_index",
    }
)  # fmt: skip

# The operands of each kind of function, and how it may read an array.
_KINDS = {
    "epilogue": (
        "an epilogue is a function of scalars, one element of the product and one of each operand",
        "pass the array in operands=(...)",
    ),
    "activation": (
        "an activation is a function of scalars, one element of the product",
        "matmul has epilogues that read arrays",
    ),
    "function": (
        "it is a function of scalars, one element of each array",
        "pass the array as another one, and the rows of it that edges read in gather=(...)",
    ),
}


class Role(NamedTuple):
    """How errors name a function of scalars and its operands."""

    call: str  # the function whose argument it is
    argument: Literal["epilogue", "activation", "function"] = "epilogue"
    name: str | None = None  # the user's function, if another one is traced in its place
    operand: str = "operand {} of the epilogue"  # what an operand is called, by its number

    def of(self, function: Callable[..., Any]) -> str:
        own = getattr(function, "__name__", type(function).__name__)
        return f"{self.call}: the {self.argument} {self.name or own}"


# Functions of the library.
OWN = Role("jax_tilekern")


@dataclass(frozen=True, eq=False)
class ScalarFunction:
    """A function of scalars."""

    name: str  # what explain calls it
    jaxpr: compat.ClosedJaxpr  # (accumulator, *operands) -> results, without constants
    python: Callable[..., list[Any]]  # the same in Python
    out_dtypes: tuple[np.dtype[Any], ...]  # types that the results are cast to
    # For each result: ``None`` for elements, which come first, or how it is reduced over rows of
    # the product; quantised rows come last.
    reductions: tuple[RowKind | None, ...]
    names: tuple[str, ...] = ()  # names that checkpoint_name has given to values inside it
    # Whether it reads values of the program. It is then evaluated where it was traced, and is no
    # parameter of a primitive.
    is_closure: bool = False

    @functools.cached_property
    def dtypes(self) -> frozenset[Any]:
        atoms = (
            x
            for eqn in compat.leaf_equations(self.jaxpr.jaxpr)
            for x in (*eqn.invars, *eqn.outvars)
        )
        return frozenset((*self.out_dtypes, *(x.aval.dtype for x in atoms)))

    @property
    def elements(self) -> int:
        """Number of the results that have an element for each one of the product."""
        return self.reductions.count(None)

    @property
    def accumulator_result(self) -> int | None:
        """The position of the result that is the accumulator itself, if there is one."""
        accumulator = self.jaxpr.jaxpr.invars[0]
        elements = self.jaxpr.jaxpr.outvars[: self.elements]
        found = (i for i, x in enumerate(elements) if x is accumulator)
        return next(found, None)

    @property
    def is_identity(self) -> bool:
        return self.accumulator_result == 0 and len(self.out_dtypes) == 1

    def rounded_product(self, lhs: Any, rhs: Any) -> np.dtype[Any] | None:
        """Return the factors' type, if the accumulator is rounded to it before anything else.

        The function of the product in this type is the same.
        """
        jaxpr = self.jaxpr.jaxpr
        accumulator = jaxpr.invars[0]
        uses = [eqn for eqn in jaxpr.eqns if any(x is accumulator for x in eqn.invars)]
        is_rounded = all(
            eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == lhs
            for eqn in uses
        )
        is_result = any(x is accumulator for x in jaxpr.outvars)
        is_narrow = lhs == rhs and lhs.itemsize == 2
        return np.dtype(lhs) if uses and is_rounded and is_narrow and not is_result else None

    def with_accumulator(self, dtype: np.dtype[Any]) -> ScalarFunction:
        """Return the function with the accumulator in a type as the last of its elements."""
        position = self.elements

        def inserted(results: Sequence[Any], value: Any) -> list[Any]:
            return [*results[:position], value, *results[position:]]

        def added_to(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
            return lambda accumulator, *xs: inserted(function(accumulator, *xs), accumulator)

        with compat.without_mesh():
            jaxpr = jax.make_jaxpr(added_to(compat.jaxpr_as_fun(self.jaxpr)))(*self.jaxpr.in_avals)
        return dataclasses.replace(
            self,
            jaxpr=jaxpr,
            python=added_to(self.python),
            out_dtypes=tuple(inserted(self.out_dtypes, dtype)),
            reductions=tuple(inserted(self.reductions, None)),
        )

    def with_reductions_in_float32(self) -> ScalarFunction:
        """Return the function with float32 reductions, whose parts devices combine.

        Reductions of exact types and of wider ones stay as they are.
        """

        def widened(dtype: np.dtype[Any], kind: RowKind | None) -> np.dtype[Any]:
            if isinstance(kind, RowQuantization):
                return dtype
            exact = not jnp.issubdtype(dtype, jnp.floating) and kind != "logsumexp"
            wide = accumulator_dtype(dtype)
            return dtype if kind is None or exact else jnp.promote_types(wide, np.float32)

        return dataclasses.replace(
            self, out_dtypes=tuple(map(widened, self.out_dtypes, self.reductions))
        )

    @property
    def quantizes(self) -> bool:
        return any(isinstance(kind, RowQuantization) for kind in self.reductions)

    @property
    def sources(self) -> list[int]:
        """For each result itself, or the first one that quantises the same value."""
        outvars = self.jaxpr.jaxpr.outvars
        first: dict[int, int] = {}
        return [
            first.setdefault(id(var), i) if isinstance(kind, RowQuantization) else i
            for i, (var, kind) in enumerate(zip(outvars, self.reductions, strict=True))
        ]

    def without_quantization(self) -> tuple[ScalarFunction, list[int]]:
        """Return the function of elements and reductions, and the position of each of its results.

        Values that are quantised are elements: those of :attr:`sources`.
        """
        kept = dict.fromkeys(self.sources)
        kinds = {i: x if isinstance(x, str) else None for i, x in enumerate(self.reductions)}
        order = sorted(kept, key=lambda i: kinds[i] is not None)

        def chosen(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
            def results(*scalars: Any) -> list[Any]:
                found = function(*scalars)
                return [found[i] for i in order]

            return results

        with compat.without_mesh():
            jaxpr = jax.make_jaxpr(chosen(compat.jaxpr_as_fun(self.jaxpr)))(*self.jaxpr.in_avals)
        function = dataclasses.replace(
            self,
            jaxpr=jaxpr,
            python=chosen(self.python),
            out_dtypes=tuple(self.out_dtypes[i] for i in order),
            reductions=tuple(kinds[i] for i in order),
        )
        return function, order

    @property
    def mapped_dims(self) -> list[int]:
        """Where each result has the dimension that ``vmap`` puts first in the product."""
        return [int(isinstance(kind, RowQuantization) and kind.scales) for kind in self.reductions]

    def result_labels(self, out: Labels) -> list[Labels]:
        """Return the labels of each result of a product.

        In the scales of quantised rows blocks come first, so that the scales of adjacent rows are
        adjacent.
        """

        def labels(kind: RowKind | None) -> Labels:
            if isinstance(kind, RowQuantization):
                return (out[-1], *out[:-1]) if kind.scales else out
            return out if kind is None else out[:-1]

        return [labels(kind) for kind in self.reductions]

    def __call__(self, *scalars: Any) -> list[Any]:
        # A jaxpr that was traced without a mesh does not take values whose types have axes of one.
        in_mesh = not jax.sharding.get_abstract_mesh().empty
        function = self.python if in_mesh else compat.jaxpr_as_fun(self.jaxpr)
        results = function(*scalars)
        # A result may be a number of Python's.
        return [jnp.asarray(x, dtype) for x, dtype in zip(results, self.out_dtypes, strict=True)]

    def over_labels(self, out: Labels, operands: Sequence[Labels]) -> Callable[..., list[Any]]:
        """Return the function of arrays that applies this function to every element.

        ``out`` labels the accumulators and the results, of which reductions lack the last label. An
        operand is broadcast over labels that it lacks.
        """
        assert not self.quantizes
        function: Callable[..., Any] = self.__call__
        for i in reversed(range(len(out))):
            remaining = set(out[i:])
            kept = ([x for x in labels if x in remaining] for labels in (out, *operands))
            axes = [labels.index(out[i]) if out[i] in labels else None for labels in kept]
            function = jax.vmap(function, in_axes=tuple(axes), out_axes=0)
        function = compat.staged(function)

        def with_reductions(*arrays: Any) -> list[Any]:
            elements = function(*split_alike((out, *operands), arrays))
            return [
                reduced(values, kind) if isinstance(kind, str) else values
                for values, kind in zip(elements, self.reductions, strict=True)
            ]

        return with_reductions


class TracedFunction(NamedTuple):
    """The result of tracing."""

    function: ScalarFunction
    closed_over: list[Any]  # scalars that it closes over, which are more operands
    nested: Callable[[Sequence[Any]], Any]  # nests its results as the user's function does


def trace_scalars(
    function: Callable[..., Any],
    accumulator: np.dtype[Any],
    product: np.dtype[Any],
    operands: Sequence[np.dtype[Any]],
    role: Role = OWN,
) -> TracedFunction:
    """Trace a user's ``function(accumulator, *operands)`` on scalars of these types.

    A result in the accumulator's type is rounded to that of the product, a result in any other type
    keeps it. Raises ``TypeError`` if it is not a function of scalars.
    """
    if not callable(function):
        raise TypeError(
            f"{role.call}: the {role.argument} is {function!r}; it must be a function of scalars"
        )
    name = getattr(function, "__name__", type(function).__name__)
    called, (meaning, hint) = role.of(function), _KINDS[role.argument]
    avals = [_scalar(dtype) for dtype in (accumulator, *operands)]
    # The function may be traced anew in a rule.
    function = with_current_modes(function)
    try:
        with compat.without_mesh():
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*avals)
    except jax.dtypes.TypePromotionError:
        raise
    except TypeError as error:
        if takes(function, len(avals)):
            raise
        raise TypeError(f"{called} does not take {len(avals)} arguments; {meaning}") from error
    except (IndexError, ValueError) as error:
        raise TypeError(f"{called} does not take scalars: {error}; {meaning}") from error
    tree, reductions = _results(called, shapes)
    order = sorted(range(len(reductions)), key=lambda i: _order(reductions[i]))

    def python(*args: Any) -> list[Any]:
        results = jax.tree.leaves(function(*args))
        return [results[i] for i in order]

    if order != [*range(len(order))]:
        with compat.without_mesh():
            traced = jax.make_jaxpr(python)(*avals)
    closed_over, is_closure = list(traced.consts), False
    for value in closed_over:
        if jnp.shape(value):
            raise TypeError(
                f"{called} closes over an array of shape {jnp.shape(value)}; {meaning}: {hint}"
            )
    _refuse_arrays(called, meaning, traced.jaxpr)

    names = tuple(
        eqn.params["name"]
        for eqn in compat.leaf_equations(traced.jaxpr)
        if eqn.primitive is compat.name_p
    )
    if closed_over or names:
        evaluated = functools.partial(evaluate_without_names, traced.jaxpr, len(avals))
        with compat.without_mesh():
            converted = jax.make_jaxpr(evaluated)(
                *avals, *(_scalar(jax.typeof(x).dtype) for x in closed_over)
            )
        if is_closure := bool(closed_over) and _has_typed_functions(converted.jaxpr):
            closed_over = []
        else:
            # The jaxpr before has the values that are closed over, which are of one trace.
            count = len(converted.in_avals)
            traced = converted
            python = functools.partial(evaluate_without_names, converted.jaxpr, count)
    elif _is_elementary(traced.jaxpr):
        # Caches keep the result. The user's function may hold a model, with all of its arrays.
        python = functools.partial(evaluate_without_names, traced.jaxpr, len(avals))
    reductions = tuple(reductions[i] for i in order)
    rounded = tuple(
        product if dtype == accumulator and not isinstance(kind, str) else dtype
        for dtype, kind in zip(
            (np.dtype(x.dtype) for x in traced.out_avals), reductions, strict=True
        )
    )
    scalar_function = ScalarFunction(name, traced, python, rounded, reductions, names, is_closure)

    def nested(results: Sequence[Any]) -> Any:
        return jax.tree.unflatten(tree, [results[order.index(i)] for i in range(len(order))])

    return TracedFunction(scalar_function, closed_over, nested)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function may be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # It has no signature.
        return True
    return True


def _is_elementary(jaxpr: compat.Jaxpr) -> bool:
    """Whether nothing but jitted functions, which are inlined, has a jaxpr of its own inside."""
    return all(
        all(map(_is_elementary, inner)) if compat.is_plain_jit(eqn) else not inner
        for eqn, inner in ((eqn, compat.jaxprs_of(eqn)) for eqn in jaxpr.eqns)
    )


def _has_typed_functions(jaxpr: compat.Jaxpr) -> bool:
    """Whether a jaxpr has branches, loops or functions with derivatives of their own inside.

    On a mesh their types differ from those of values, because they were traced without the mesh.
    """
    kinds = {jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Manual}
    has_types = not kinds.isdisjoint(jax.sharding.get_abstract_mesh().axis_types)
    return has_types and any(map(compat.jaxprs_of, jaxpr.eqns))


def _order(kind: RowKind | None) -> int:
    """Elements come before reductions, those before quantised rows, and their scales last."""
    if isinstance(kind, RowQuantization):
        return 2 + kind.scales
    return 0 if kind is None else 1


def _results(called: str, shapes: Any) -> tuple[Any, tuple[RowKind | None, ...]]:
    """Return how a function's results are nested, and how each one is reduced."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, RowReduction))
    if not leaves:
        raise TypeError(f"{called} returns nothing; it must return at least one scalar")
    for leaf in leaves:
        if isinstance(leaf, RowReduction) and not hasattr(leaf.value, "dtype"):
            raise TypeError(f"{called} reduces rows of {leaf.value}; it must be one scalar")
    return tree, tuple(x.kind if isinstance(x, RowReduction) else None for x in leaves)


def evaluate_without_names(jaxpr: compat.Jaxpr, count: int, *args: Any) -> list[Any]:
    """Evaluate a jaxpr on ``count`` operands, and on constants.

    Names are left out, because policies are asked about those of the whole call. Jitted functions
    are inlined, because the types in them may have another mesh than the current one.
    """

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive is compat.name_p:
            return operands
        if compat.is_plain_jit(eqn):
            (inner,) = compat.jaxprs_of(eqn)
            consts = eqn.params["jaxpr"].consts
            return evaluate_without_names(inner, len(operands), *operands, *consts)
        operands = [*compat.unify_varying(*operands)] if operands else operands
        return compat.bind_equation(eqn, operands, jax.sharding.get_abstract_mesh())

    return compat.eval_jaxpr_by(equation, jaxpr, args[count:], args[:count])


def _scalar(dtype: np.dtype[Any]) -> jax.core.ShapedArray:
    # Unlike jax.ShapeDtypeStruct, it may have 64 bits where x64 is off.
    return jax.core.ShapedArray((), dtype)


def _refuse_arrays(called: str, meaning: str, jaxpr: compat.Jaxpr) -> None:
    """Raise a ``TypeError`` for the first equation that is not one of scalars."""
    for eqn in compat.leaf_equations(jaxpr):
        shapes = [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name in _NOT_ELEMENTWISE or any(shapes):
            raise TypeError(
                f"{called} is not elementwise: {eqn.primitive.name} at "
                f"{compat.source_line(eqn)}; {meaning}"
            )
        if eqn.effects:
            raise TypeError(
                f"{called} has a side effect: {eqn.primitive.name} at {compat.source_line(eqn)}"
            )
