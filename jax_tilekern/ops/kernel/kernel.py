"""``kernel``: ``jax.vmap`` of a function as one CUDA kernel.

A thread, or a group of threads, evaluates one element of the batch.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat, outcomes
from jax_tilekern.interop.global_modes import by_types
from jax_tilekern.ops.cuda_kernel.sharding import explicit_shardings
from jax_tilekern.ops.jitted import MOST_FUNCTIONS, UserFunction
from jax_tilekern.ops.kernel.checkpoints import Checkpoint, checked
from jax_tilekern.ops.kernel.group_work import has_arrays_beyond
from jax_tilekern.ops.kernel.rules import Axes, LaneFunction, Rules, lane_sizes, type_of_lanes
from jax_tilekern.ops.kernel.translation.callbacks import without_callbacks
from jax_tilekern.ops.kernel.translation.complex_numbers import without_complex
from jax_tilekern.ops.kernel.translation.keys import is_key, without_keys
from jax_tilekern.ops.kernel.translation.text import Layout, lane_kernel
from jax_tilekern.ops.kernel.work import IN_REGISTERS
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.plans.lanes import LaneKernel, plan_lanes
from jax_tilekern.plans.policy import why_excluded
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Rewrite,
    define,
    obstacle,
)


def kernel(
    f: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    checkpoint: Checkpoint = "auto",
    threads: int | None = None,
) -> Callable[..., Any]:
    """Map a function over a batch in one CUDA kernel.

    A thread evaluates one element of the batch, or a group of threads does.

    It means ``jax.vmap(f, in_axes, out_axes)``, which also computes it on other platforms. XLA
    launches a kernel or more for each step of a loop in ``f``; here the loop runs in the kernel.
    Loops (``scan``, ``while_loop``, ``fori_loop``), branches (``cond``, ``switch``), elementwise
    functions, small arrays and ``jax.random`` are translated. Each element of the batch takes its
    own branches. A group of threads shares out the loops over arrays of more than 16 elements, and
    all of it computes the rest alike.

    Derivatives, ``vmap``, ``jit``, ``remat`` and shardings of the batch are those of ``vmap(f)``:
    each derivative is a kernel again. A function with an equation that has no translation is left
    to XLA with a warning that names it; inside :func:`jax_tilekern.strict` that is an error.

    Parameters
    ----------
    f
        The function of one element. What it closes over is read by all threads. Each mapped
        function traces it once for each set of shapes and types, as ``jax.jit`` does, and anew
        where a variable of its closure, or a global, has another value.
    in_axes, out_axes
        As of :func:`jax.vmap`. An argument with the axis ``None`` may be any hashable object. A
        Python number is traced, as by ``jax.jit``: one program serves all values of it.
    checkpoint
        What reverse mode saves of a ``scan``, for all elements. ``None``: what the derivative of
        each step needs. A number of steps: the state at every so many steps; the steps are computed
        again, and between two such checkpoints twice. ``"auto"``, by what is saved: ``None``, or
        ``1`` if that saves half as much or less, or if ``None`` saves more than 256 MiB; if both
        do, about the square root of the number of steps. Where ``1`` computes more than 50
        operations again for each number that it does not save, it is ``None`` up to 1 GiB. Loops of
        up to 8 steps have no checkpoints of their own.
    threads
        How many threads evaluate an element: 1, or a power of two from 32 to 1024. ``None`` chooses
        between 1, 32, 64, 128 and ``vmap`` by predicted times; a group only for arrays of more than
        64 elements. A number asks for a kernel, also where ``vmap`` is predicted to be faster.

    Returns
    -------
    callable
        The mapped function.

    Raises
    ------
    TypeError
        If ``f`` is not callable, or ``checkpoint`` or ``threads`` is no integer.
    ValueError
        If ``checkpoint`` is less than 1, or ``threads`` is no such number.
    FallbackError
        Inside ``strict``: the function has no translation.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> def steps(n):  # of the Collatz sequence until 1
    ...     def step(state):
    ...         n, count = state
    ...         return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1
    ...     return jax.lax.while_loop(lambda state: state[0] != 1, step, (n, 0))[1]
    >>> jtk.kernel(steps)(jnp.arange(1, 8))
    Array([ 0,  1,  7,  2,  5,  8, 16], dtype=int32)
    """
    if not callable(f):
        raise TypeError(f"kernel maps a function, not {f!r}")
    checkpoint, threads = checked(checkpoint), _checked_threads(threads)

    def call(static: _Static, *operands: Any) -> Any:
        args, kwargs = static.arguments(operands)
        mapped = jax.vmap(f, in_axes=in_axes, out_axes=out_axes)
        return _mapped(f, mapped, in_axes, out_axes, checkpoint, threads, args, kwargs)

    @functools.lru_cache(MOST_FUNCTIONS)
    def jitted(_: UserFunction) -> Any:
        # JAX drops the programs of a function with it. It would keep static arguments.
        body = functools.partial(call)
        return jax.jit(body, static_argnums=0, inline=compat.inlined_when_traced)

    @functools.wraps(f)
    def batched(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        static, operands = _Static.of(leaves, tree)
        try:
            return jitted(UserFunction(f))(static, *operands)
        except (TypeError, IndexError) as error:
            if any(isinstance(x, _NUMBERS) for x in operands):
                error.add_note(
                    "Python numbers among the arguments of a kernel are traced, as by jax.jit. A "
                    "function that needs the value of one closes over it."
                )
            raise

    return batched


_NUMBERS = (bool, int, float, complex)
_NUMBERS_OF_THREADS = (1, 32, 64, 128, 256, 512, 1024)


def _checked_threads(threads: Any) -> int | None:
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise TypeError(f"threads is {threads!r}; it is None or an integer")
    if threads is not None and threads not in _NUMBERS_OF_THREADS:
        raise ValueError(f"threads={threads}: a lane has 1, 32, 64, 128, 256, 512 or 1024 threads")
    return threads


class _Static(NamedTuple):
    """The arguments of a call that are no operands."""

    tree: Any
    # The type and the value of each leaf, ``None`` for an operand.
    values: tuple[tuple[type, Hashable] | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: Any) -> tuple[_Static, list[Any]]:
        are_operands = [
            isinstance(x, _NUMBERS) or hasattr(x, "dtype") or hasattr(x, "__jax_array__")
            for x in leaves
        ]
        values = (
            None if is_operand else (type(x), x)
            for x, is_operand in zip(leaves, are_operands, strict=True)
        )
        return cls(tree, tuple(values)), list(itertools.compress(leaves, are_operands))

    def arguments(self, operands: Sequence[Any]) -> Any:
        given = iter(operands)
        leaves = [next(given) if value is None else value[1] for value in self.values]
        return jax.tree.unflatten(self.tree, leaves)


def _mapped(
    f: Callable[..., Any],
    mapped: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    checkpoint: Checkpoint,
    threads: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Bind a call, or compute it by ``vmap``."""
    name = getattr(f, "__name__", type(f).__name__)
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]
    operands = [leaves[i] for i in arrays]
    out_trees: list[Any] = []

    def with_arrays(values: Sequence[Any]) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        return jax.tree.unflatten(tree, filled)

    def batched(*values: Any) -> Any:
        batch_args, batch_kwargs = with_arrays(values)
        return mapped(*batch_args, **batch_kwargs)

    def lane(*values: Any) -> list[Any]:
        one_args, one_kwargs = with_arrays(values)
        found, out_tree = jax.tree.flatten(f(*one_args, **one_kwargs))
        out_trees[:] = [out_tree]
        return [jnp.asarray(x) for x in found]

    # The errors about axes and sizes are those of vmap.
    shapes = jax.eval_shape(batched, *operands)
    axes = _axes_of_leaves(in_axes, args, kwargs)
    operand_axes: list[Axes] = [(_positive(axes[i], leaves[i].ndim),) for i in arrays]

    def lane_type(x: Any, axis: int | None) -> Any:
        aval = jax.typeof(x)
        shape = [n for d, n in enumerate(aval.shape) if d != axis]
        return jax.core.ShapedArray(tuple(shape), aval.dtype, weak_type=aval.weak_type)

    types = [lane_type(x, axis) for x, (axis,) in zip(operands, operand_axes, strict=True)]
    with compat.without_mesh():
        traced = jax.make_jaxpr(lane)(*types)
    try:
        closed, consts = _without_constants(name, traced)
    except Untranslatable as error:
        _note_untranslated(name, str(error))
        return mapped(*args, **kwargs)
    if not closed.out_avals:
        return jax.tree.unflatten(out_trees[0], [])
    operands += consts
    operand_axes += [(None,)] * len(consts)
    raw = [jax.random.key_data(x) if is_key(jax.typeof(x)) else x for x in operands]
    closed, shared = without_callbacks(closed, raw, [axes != (None,) for axes in operand_axes])
    raw += shared
    operand_axes += [(None,)] * len(shared)
    given_axes = compat.broadcast_prefix(out_axes, shapes)
    out_positions = [
        _positive(axis, aval.ndim + 1)
        for axis, aval in zip(given_axes, traced.out_avals, strict=True)
    ]
    if None in out_positions and 0 in lane_sizes(operands, operand_axes):
        # A value that is the same for all lanes is in none of them.
        return mapped(*args, **kwargs)
    results = _rules.bind(
        *raw,
        jaxpr=closed,
        function=LaneFunction.of(name, checkpoint, threads, closed),
        operand_axes=tuple(operand_axes),
        result_axes=tuple((position or 0,) for position in out_positions),
    )
    found = []
    for x, aval, position in zip(results, traced.out_avals, out_positions, strict=True):
        if is_key(aval):
            x = jax.random.wrap_key_data(x, impl=compat.key_functions(aval.dtype).name)
        # vmap has checked that it is the same for all elements.
        found.append(x[0] if position is None else x)
    return jax.tree.unflatten(out_trees[0], found)


def _without_constants(name: str, traced: Any) -> tuple[Any, list[Any]]:
    """Return a jaxpr of raw arrays, and the arrays that the function closes over, as operands."""
    for eqn in compat.leaf_equations(traced.jaxpr):
        if eqn.effects:
            raise Untranslatable(
                f"{eqn.primitive.name} at {compat.source_line(eqn)} has a side effect, which a "
                f"kernel has not; move it out of {name}, or map the function by jax.vmap"
            )
    consts = list(traced.consts)
    if consts:
        jaxpr = traced.jaxpr
        explicit = (compat.explicit_sharding(jax.typeof(x)) for x in consts)
        if any(x is not None for x in explicit) and any(map(compat.jaxprs_of, jaxpr.eqns)):
            raise Untranslatable(
                f"{name} closes over an array of a mesh with explicit axes, and the types of its "
                "jitted functions, loops and branches name that mesh; pass the array as an "
                "argument with in_axes=None"
            )

        def function(*values: Any) -> list[Any]:
            own = len(jaxpr.invars)
            return compat.eval_jaxpr(jaxpr, values[own:], *values[:own])

        types = [
            jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type)
            for a in map(jax.typeof, consts)
        ]
        with compat.without_mesh():
            traced = jax.make_jaxpr(function)(*traced.in_avals, *types)
    closed = without_keys(traced)
    without_keys(closed, inlined=True)  # Its errors come before derivatives are taken.
    return closed, consts


def _axes_of_leaves(in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the axis of each leaf of the arguments; ``vmap`` has checked them."""
    axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    return [
        *compat.broadcast_prefix(axes, args),
        *compat.broadcast_prefix(0, kwargs),
    ]


def _positive(axis: int | None, ndim: int) -> int | None:
    return None if axis is None else axis % ndim


def _note_untranslated(name: str, reason: str, platform: str | None = None) -> None:
    """Warn that XLA computes a call, on one platform or on all; an error inside ``strict``."""
    outcomes.note_loss(f"kernel {name}", reason, platform)
    outcomes.note_fallback(f"kernel {name}", reason, platform)
    warnings.warn(
        f"jax_tilekern.kernel leaves {name} to XLA's vmap: {reason} (inside jax_tilekern.strict() "
        "this is an error)",
        RuntimeWarning,
        stacklevel=2,
    )


# The rules of the primitive.


def _reference(
    *operands: Any,
    jaxpr: Any,
    function: LaneFunction,
    operand_axes: tuple[Axes, ...],
    result_axes: tuple[Axes, ...],
) -> list[Any]:
    del function
    mapped: Callable[..., Any] = compat.jaxpr_as_fun(jaxpr)
    dims = len(result_axes[0])
    for k in reversed(range(dims)):
        mapped = jax.vmap(
            mapped,
            in_axes=tuple(_within(axes, k) for axes in operand_axes),
            out_axes=[_within(axes, k) for axes in result_axes],
        )
    results: list[Any] = mapped(*operands)
    return results


def _within(axes: Axes, k: int) -> int | None:
    """Return which dimension a dimension of lanes is, where the outer ones are removed."""
    axis = axes[k]
    if axis is None:
        return None
    return axis - sum(outer is not None and outer < axis for outer in axes[:k])


def _like_results(
    *operands: Any,
    jaxpr: Any,
    function: LaneFunction,
    operand_axes: tuple[Axes, ...],
    result_axes: tuple[Axes, ...],
) -> list[Any]:
    sizes = lane_sizes(operands, operand_axes)
    varying = tuple(sorted(compat.varying_axes(operands[0]) if operands else ()))
    avals = [jax.typeof(x) for x in operands]
    rule = _sharding_rule(
        *avals,
        jaxpr=jaxpr,
        function=function,
        operand_axes=operand_axes,
        result_axes=result_axes,
    )
    shardings = explicit_shardings(function.name, "lanes", rule, avals)
    results = []
    for aval, axes, sharding in zip(
        jaxpr.out_avals, result_axes, shardings or (None,) * len(result_axes), strict=True
    ):
        whole = type_of_lanes(aval, axes, sizes)
        zeros = lax.full(whole.shape, 0, whole.dtype, sharding=sharding)
        x = compat.with_type(zeros, whole.dtype, weak_type=aval.weak_type)
        results.append(lax.pcast(x, varying, to="varying") if varying else x)
    return results


def _sharding_rule(
    *avals: Any,
    jaxpr: Any,
    function: LaneFunction,
    operand_axes: tuple[Axes, ...],
    result_axes: tuple[Axes, ...],
) -> ShardingRule:
    """Label the dimensions of lanes; every device has the others whole."""
    del function
    dims = tuple(
        tuple(axes.index(d) if d in axes else None for d in range(aval.ndim))
        for aval, axes in zip(avals, operand_axes, strict=True)
    )
    results = tuple(
        tuple(axes.index(d) if d in axes else None for d in range(aval.ndim + len(axes)))
        for aval, axes in zip(jaxpr.out_avals, result_axes, strict=True)
    )
    sizes = sizes_of(*((d, tuple(aval.shape)) for d, aval in zip(dims, avals, strict=True)))
    names = {label: f"lanes {label}" if len(sizes) > 1 else "lanes" for label in sizes}
    return ShardingRule(dims, results, sizes, flops=0, zero_padding=False, names=names)


def write_kernel(
    avals: Sequence[Any],
    jaxpr: Any,
    function: LaneFunction,
    operand_axes: tuple[Axes, ...],
    result_axes: tuple[Axes, ...],
    *,
    group: bool = False,
) -> LaneKernel:
    """Return the kernel of a call; raise ``Untranslatable`` if there is none.

    A thread evaluates a lane, or a ``group`` of threads does.
    """
    sizes = lane_sizes(avals, operand_axes)
    results = [
        type_of_lanes(aval, axes, sizes)
        for aval, axes in zip(jaxpr.out_avals, result_axes, strict=True)
    ]
    layouts = [
        [Layout(np.dtype(x.dtype), tuple(x.shape), a) for x, a in zip(given, axes, strict=True)]
        for given, axes in ((avals, operand_axes), (results, result_axes))
    ]
    with by_types(function):
        low = without_keys(compat.in_low_primitives(jaxpr), inlined=True)
        return lane_kernel(function.name, without_complex(low), *layouts, group=group)


def _on_cuda(
    place: Place,
    operands: Sequence[Operand],
    results: Sequence[Any],
    *,
    function: LaneFunction,
    **call: Any,
) -> Outcome | None:
    excluded = why_excluded()
    if excluded is not None:
        return Fallback(excluded)
    avals, values = [x.aval for x in operands], [x.value for x in operands]
    if _has_symbolic_sizes(avals):
        return Fallback("a plan needs every size, and this shape is symbolic")
    if all(0 in aval.shape for aval in results):
        return Rewrite(
            "its results have no elements",
            lambda *_: [lax.full(aval.shape, 0, aval.dtype) for aval in results],
        )
    try:
        alone = write_kernel(avals, function=function, **call)
        group = _group_kernel(avals, function=function, **call)
    except Untranslatable as error:
        _note_untranslated(function.name, str(error), "cuda")
        return Fallback(str(error))
    if place is Place.LOCAL:
        return planned_kernel(values, plan_lanes, alone, group, function.threads)
    why = obstacle(place, (*avals, *results))
    return None if why is None else Fallback(why)


def _group_kernel(avals: Sequence[Any], function: LaneFunction, **call: Any) -> LaneKernel | None:
    """Return the kernel of groups of threads, if it is asked for or may be faster."""
    # Short arrays are best in the registers of one thread.
    may_be_faster = has_arrays_beyond(IN_REGISTERS, call["jaxpr"])
    if function.threads == 1 or (function.threads is None and not may_be_faster):
        return None
    try:
        return write_kernel(avals, function=function, group=True, **call)
    except Untranslatable:
        if function.threads is None:
            return None
        raise


def _elsewhere(
    platform: str, place: Place, operands: Sequence[Operand], results: Sequence[Any], **call: Any
) -> Outcome | None:
    """Partition a call as on a GPU: XLA's loop would ask all devices whether a lane goes on."""
    avals = (*(x.aval for x in operands), *results)
    if place is not Place.LOCAL and not _has_symbolic_sizes(avals) and not obstacle(place, avals):
        return None
    reason = "vmap: no CUDA here" if platform == "cpu" else outcomes.why_elsewhere(platform)
    return Rewrite(reason, functools.partial(_reference, **call))


def _has_symbolic_sizes(avals: Sequence[Any]) -> bool:
    return not all(isinstance(size, int) for aval in avals for size in aval.shape)


_rules = Rules()
define(
    Operation(
        "tilekern_lanes",
        reference=_reference,
        like_results=_like_results,
        batch=_rules.batch,
        sharding_rule=_sharding_rule,
        planners={
            "cuda": _on_cuda,
            **{x: functools.partial(_elsewhere, x) for x in ("cpu", "rocm", "tpu")},
        },
        describe=lambda function, **_: f"kernel {function}",
        several_results=True,
        jvp=_rules.jvp,
        register=_rules.register,
    )
)
