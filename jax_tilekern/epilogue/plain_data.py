"""A scalar function as plain data: what another process needs to partition a call with it.

Calls (``jit``, ``custom_jvp``, ...) are inlined, and what is left are primitives of ``jax.lax`` on
scalars. By then the derivatives have been taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_tilekern.epilogue.primitives import INNER_JAXPR, is_copy, is_translated
from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.epilogue.understood import is_understood
from jax_tilekern.interop import compat
from jax_tilekern.partitioning.params_text import is_plain
from jax_tilekern.plans.gemm.epilogue import RowQuantization

# JAX adds cotangents by a primitive of its own.
_NAMES = {"add_any": "add"}


class _NotPlain(Exception):
    """A function with an equation that is not understood, or is no primitive on scalars."""


def to_data(function: ScalarFunction) -> dict[str, Any] | None:
    """Return a function as plain data, or ``None`` if it has none.

    The values are numbered: first the operands, then the result of each equation. A value is its
    number, or the type and the value of a literal.
    """
    found = to_equations(function.jaxpr)
    return found and {
        "name": function.name,
        "operands": tuple(np.dtype(x.dtype) for x in function.jaxpr.in_avals),
        **found,
        "out_dtypes": function.out_dtypes,
        "reductions": tuple(
            dataclasses.astuple(kind) if isinstance(kind, RowQuantization) else kind
            for kind in function.reductions
        ),
    }


def to_equations(closed: Any) -> dict[str, Any] | None:
    """Return the equations of a jaxpr, and its results, as plain data if they have it."""
    jaxpr = closed.jaxpr
    equations: list[tuple[Any, ...]] = []
    operands = range(len(jaxpr.invars))
    try:
        results = _flattened(jaxpr, closed.consts, operands, equations, len(operands))
    except _NotPlain:
        return None
    return {"equations": tuple(equations), "results": tuple(results)}


def from_equations(data: dict[str, Any]) -> Callable[..., list[Any]]:
    """Return the function that :func:`to_equations` has returned the data of."""

    def python(*operands: Any) -> list[Any]:
        values = list(operands)

        def value(atom: Any) -> Any:
            return values[atom] if isinstance(atom, int) else _number(*atom)

        for name, params, read in data["equations"]:
            values.append(_primitive(name).bind(*map(value, read), **params))
        return [value(atom) for atom in data["results"]]

    return python


def from_data(data: dict[str, Any]) -> ScalarFunction:
    """Return the function that :func:`to_data` has returned the data of."""
    python = from_equations(data)
    avals = [jax.ShapeDtypeStruct((), dtype) for dtype in data["operands"]]
    # XLA calls this function on its own thread, where the user's configuration is not set.
    with jax.enable_x64(True), compat.without_mesh():
        jaxpr = jax.make_jaxpr(python)(*avals)
    reductions = tuple(
        RowQuantization(*kind) if isinstance(kind, tuple) else kind for kind in data["reductions"]
    )
    return ScalarFunction(data["name"], jaxpr, python, data["out_dtypes"], reductions)


def _flattened(
    jaxpr: compat.Jaxpr,
    consts: Sequence[Any],
    operands: Sequence[Any],
    equations: list[tuple[Any, ...]],
    first: int,
) -> list[Any]:
    """Append a jaxpr's equations, whose results are numbered from ``first`` + their index on."""
    values: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        values[var] = _literal(const, np.asarray(const).dtype)

    def value(atom: Any) -> Any:
        return _literal(atom.val, atom.aval.dtype) if compat.is_literal(atom) else values[atom]

    for eqn in jaxpr.eqns:
        name = _NAMES.get(eqn.primitive.name, eqn.primitive.name)
        if is_translated(name) and not is_understood(eqn):
            raise _NotPlain
        read = [value(atom) for atom in eqn.invars]
        if name in INNER_JAXPR:
            inner = eqn.params[INNER_JAXPR[name]]
            inner, own = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            results = _flattened(inner, own, read, equations, first)
        elif is_copy(name) and not getattr(eqn.invars[0].aval, "shape", ()):
            results = read
        elif name == "convert_element_type" and isinstance(read[0], tuple):
            results = [_literal(_number(*read[0]), eqn.params["new_dtype"])]
        else:
            params = {} if name != eqn.primitive.name else dict(eqn.params)
            if _primitive(name) is None or not is_plain(params):
                raise _NotPlain
            equations.append((name, params, tuple(read)))
            results = [first + len(equations) - 1]
        values.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _primitive(name: str) -> Any:
    """Return a primitive of ``jax.lax`` on scalars, or ``None``."""
    primitive = getattr(lax, f"{name}_p", None)
    return primitive if primitive is not None and primitive.name == name else None


def _literal(value: Any, dtype: Any) -> tuple[Any, ...]:
    number = np.asarray(value).astype(dtype).item()
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return np.dtype(dtype), *parts


def _number(dtype: np.dtype[Any], real: Any, imaginary: float | None = None) -> Any:
    return np.asarray(real if imaginary is None else complex(real, imaginary), dtype)
