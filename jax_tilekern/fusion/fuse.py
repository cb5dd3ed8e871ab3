"""``fuse``: a function with its products and what follows them in one kernel each."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.epilogue.scalars import equation_of_scalars
from jax_tilekern.fusion.elementwise import elementwise_first, inlined_call, is_elementwise_jit
from jax_tilekern.fusion.groups import Group, find_groups, product_of
from jax_tilekern.fusion.in_place import operands_to_overwrite
from jax_tilekern.inspection.tracing import bind_non_arrays, is_array
from jax_tilekern.interop import compat, linen
from jax_tilekern.interop.global_modes import by_types
from jax_tilekern.interop.patch import patch
from jax_tilekern.ops.products.contraction import contract_with_scalar_function
from jax_tilekern.ops.products.fused_lowering import InPlace
from jax_tilekern.ops.products.labelled_operands import common_type
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.scope import Function, entered, settings_of

# Calls whose functions are fused too.
_CALLS = frozenset(
    {
        "jit", "closed_call", "eval_jaxpr", "scan", "while", "cond", "remat2", "custom_jvp_call",
        "custom_vjp_call",
    }
)  # fmt: skip


def fuse(
    function: Function,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Function:
    """Compute a function's matrix products and what follows each of them in one kernel.

    The function is traced inside :func:`patch`, so all of its products are this library's. One
    whose elements go through elementwise operations (a bias, an activation, a residual, a mask,
    casts) is computed by :func:`jax_tilekern.dot_general` with these as its ``epilogue``.
    Everything else is evaluated as it is.

    Parameters
    ----------
    function
        A function of arrays and trees of arrays, which is traced as ``jax.jit`` does, or a method
        of a model. Functions that it calls, loops, conditionals and checkpointed parts are fused
        too; the insides of ``shard_map`` and of kernels are not.
    static_argnums, static_argnames
        Arguments that are no arrays, as for ``jax.jit``. They need not be named: without a name
        such an argument, for example ``self``, is traced as it is at each call, and equal
        products have one compiled program. Only inside a ``jax.jit`` does this cost nothing.

    Returns
    -------
    Callable
        A function of the same arguments and results. It differs from ``function`` by the rounding
        of the sums in each product, and rounds each product and each operation to its type, as
        ``function`` does; see "Fuse a whole function" in the guide to epilogues.

    See Also
    --------
    explain : which products are fused, with what, and which kernel computes them.
    patch : makes all products of JAX this library's.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> @jtk.fuse
    ... def layer(x, w, b):
    ...     return jax.nn.relu(x @ w + b)
    >>> x, w, b = jnp.ones((64, 128)), jnp.ones((128, 32)), jnp.ones(32)
    >>> layer(x, w, b).shape
    (64, 32)
    >>> step = jax.jit(jtk.fuse(jax.grad(lambda w: layer(x, w, b).sum())))
    """
    if not callable(function):
        raise TypeError(f"fuse takes a function, got {type(function).__name__}")

    @functools.wraps(function)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        return linen.lifted_over_variables(_evaluated, function)(*args, **kwargs)

    return _FusedFunction(evaluated, static_argnums, static_argnames)  # type: ignore[return-value]


@patch
def _evaluated(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Evaluate a function; its arguments that are no arrays are constants."""
    call, arrays = bind_non_arrays(function, args, kwargs, lambda x: isinstance(x, jax.Array))
    traced, shapes = jax.make_jaxpr(call, return_shape=True)(*arrays)
    results = _fused(traced, arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


class _FusedFunction:
    """The result of :func:`fuse`, with the interface of the result of ``jax.jit``.

    Its methods are those of a class, because ``functools.wraps`` copies attributes of a function,
    and JAX takes a function with a method ``trace`` for a jitted one.
    """

    def __init__(
        self,
        evaluated: Callable[..., Any],
        argnums: int | Sequence[int] | None,
        argnames: str | Iterable[str] | None,
    ) -> None:
        functools.update_wrapper(self, evaluated)
        self._evaluated = evaluated
        self._static = _static_arguments(evaluated, argnums, argnames)
        self._jitted: Any = jax.jit(
            evaluated,
            static_argnums=argnums,
            static_argnames=argnames,
            inline=compat.inlined_when_traced,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        if all(isinstance(x, jax.Array | np.ndarray) for x in leaves):
            return self._jitted(*args, **kwargs)
        if compat.in_traced_program() or not self._can_jit(args, kwargs):
            return self._evaluated(*args, **kwargs)
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        if self._can_jit(args, kwargs):
            return self._jitted.trace(*args, **kwargs)
        # Numbers are constants, as in a call.
        described = jax.Array, np.ndarray, jax.ShapeDtypeStruct
        call, arrays = bind_non_arrays(
            self._evaluated, args, kwargs, lambda x: isinstance(x, described)
        )
        return jax.jit(call).trace(*arrays)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        self._jitted.clear_cache()

    def _can_jit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the arguments that are not static are trees of arrays."""
        given = (*enumerate(args), *kwargs.items())
        dynamic = [x for name, x in given if name not in self._static]
        return all(map(is_array, jax.tree.leaves(dynamic)))


def _static_arguments(
    function: Callable[..., Any],
    argnums: int | Sequence[int] | None,
    argnames: str | Iterable[str] | None,
) -> set[int | str]:
    """Return positions and names of static arguments; each may be given by either."""
    if argnums is None and argnames is None:
        return set()
    parameters = [*inspect.signature(function).parameters]
    positions = (argnums,) if isinstance(argnums, int) else argnums or ()
    names = {argnames} if isinstance(argnames, str) else {*(argnames or ())}
    static = {*(i % len(parameters) for i in positions)}
    static |= {i for i, name in enumerate(parameters) if name in names}
    return {*static, *names, *(parameters[i] for i in static)}


def _fused(closed: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with its products fused."""
    if not _has_products(closed.jaxpr):
        return compat.eval_jaxpr(closed.jaxpr, closed.consts, *operands)
    inlined = jax.make_jaxpr(functools.partial(_inlined, closed.jaxpr, closed.consts))(*operands)
    jaxpr = elementwise_first(inlined.jaxpr)
    results = _Evaluation(jaxpr, inlined.consts, operands).results()
    return [
        _with_weak_type(x, atom.aval) for x, atom in zip(results, closed.jaxpr.outvars, strict=True)
    ]


def _has_products(jaxpr: compat.Jaxpr) -> bool:
    return any(
        product_of(eqn) is not None
        or (eqn.primitive.name in _CALLS and any(map(_has_products, compat.jaxprs_of(eqn))))
        for eqn in jaxpr.eqns
    )


def _inlined(jaxpr: compat.Jaxpr, consts: Sequence[Any], *operands: Any) -> list[Any]:
    """Evaluate a jaxpr, inlining jitted functions that have products or are elementwise."""

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        inner = inlined_call(eqn)
        if inner is None or not (_has_products(inner.jaxpr) or is_elementwise_jit(eqn)):
            return compat.bind_equation(eqn, operands)
        with compat.traced_from(eqn):
            return _inlined(inner.jaxpr, inner.consts, *operands)

    return compat.eval_jaxpr_by(equation, jaxpr, consts, operands)


class _Evaluation:
    """The values of a jaxpr whose products are computed with their epilogues."""

    def __init__(self, jaxpr: compat.Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> None:
        self._jaxpr = jaxpr
        variables = (*jaxpr.constvars, *jaxpr.invars)
        self._values = dict(zip(variables, (*consts, *operands), strict=True))
        self._groups, self._remaining = find_groups(jaxpr)
        self._overwritten = operands_to_overwrite(jaxpr, self._groups, self._remaining)

    def results(self) -> list[Any]:
        """Evaluate every equation that something needs."""
        fused = {group.last: i for i, group in enumerate(self._groups)}
        waiting: list[Any] = []
        for position, eqn in enumerate(self._jaxpr.eqns):
            if position in self._remaining:
                waiting.append(eqn)
            if position in fused:
                waiting = self._evaluate_ready(waiting)
                i = fused[position]
                self._evaluate_group(self._groups[i], self._overwritten[i])
            waiting = self._evaluate_ready(waiting)
        return [self._value(x) for x in self._jaxpr.outvars]

    def _value(self, atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else self._values[atom]

    def _evaluate_ready(self, eqns: Sequence[Any]) -> list[Any]:
        """Evaluate equations whose operands are known; return the others."""
        waiting = []
        for eqn in eqns:
            if all(compat.is_literal(x) or x in self._values for x in eqn.invars):
                results = _bound(eqn, [self._value(x) for x in eqn.invars])
                for x, value in zip(eqn.outvars, results, strict=True):
                    self._values.setdefault(x, value)
            else:
                waiting.append(eqn)
        return waiting

    def _evaluate_group(self, group: Group, in_place: InPlace) -> None:
        (source,) = group.eqn.outvars
        product, contraction = group.product, group.product.contraction
        lhs, rhs = map(self._value, group.eqn.invars)
        lhs, rhs = common_type(lhs, rhs, product.dtype, product.precision)
        arrays = [self._value(reading.array) for reading in group.operands]
        accumulator = accumulator_dtype(lhs.dtype, product.dtype)

        def epilogue(sum_of_products: Any, *scalars: Any) -> list[Any]:
            values = dict(zip(group.operands, scalars, strict=True))
            results = {source: sum_of_products.astype(product.dtype)}
            for eqn, readings in group.equations:
                read = [
                    reading.array.val
                    if compat.is_literal(reading.array)
                    else values[reading]
                    if reading in values
                    else results[reading.array]
                    for reading in readings
                ]
                results.update(zip(eqn.outvars, equation_of_scalars(eqn, read), strict=True))
            # The kernel rounds the sum to the product's type when it stores it.
            results[source] = sum_of_products
            return [results[x] for x in group.results]

        epilogue.__name__ = "_".join(
            dict.fromkeys(str(eqn.params.get("name", eqn.primitive)) for eqn, _ in group.equations)
        )
        types = by_types(lhs, rhs, arrays, product.dtype, [x.aval for x in group.results])
        settings = entered(settings_of(group.eqn.params))
        with compat.traced_from(group.eqn), types, settings:
            function = trace_scalars(
                epilogue, accumulator, product.dtype, [x.dtype for x in arrays]
            ).function
            results = contract_with_scalar_function(
                lhs,
                rhs,
                contraction=contraction,
                precision=product.precision,
                product=product.dtype,
                function=dataclasses.replace(
                    function, out_dtypes=tuple(x.aval.dtype for x in group.results)
                ),
                operands=[
                    _labelled(x, reading.dims, contraction.out)
                    for x, reading in zip(arrays, group.operands, strict=True)
                ],
                in_place=in_place,
            )
        for x, value in zip(group.results, results, strict=True):
            self._values[x] = _with_weak_type(value, x.aval)


def _bound(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluate an equation, with the products in the functions that it calls fused."""
    if eqn.primitive.name in _CALLS and any(map(_has_products, compat.jaxprs_of(eqn))):
        eqn = eqn.replace(params={name: _rewritten(x) for name, x in eqn.params.items()})
    return compat.bind_equation(eqn, operands)


def _rewritten(param: Any) -> Any:
    """Return a parameter of an equation with the products in its jaxprs fused."""
    if isinstance(param, tuple):
        return tuple(map(_rewritten, param))
    if not isinstance(param, compat.Jaxpr | compat.ClosedJaxpr):
        return param
    closed = compat.closed_jaxpr(param)
    rewritten = jax.make_jaxpr(lambda *operands: _fused(closed, operands))(*closed.in_avals)
    return compat.jaxpr_like(rewritten, param)


def _labelled(x: Any, dims: Sequence[int], out: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Return an operand without its dimensions of size 1, and the labels of the others."""
    kept = [i for i, size in enumerate(x.shape) if size != 1]
    dropped = [i for i, size in enumerate(x.shape) if size == 1]
    return jax.lax.squeeze(x, dropped), tuple(out[dims[i]] for i in kept)


def _with_weak_type(x: Any, aval: Any) -> Any:
    return compat.with_type(x, aval.dtype, aval.weak_type) if aval.weak_type else x
