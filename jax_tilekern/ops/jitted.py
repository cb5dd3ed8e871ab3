"""Jitting of public functions, so that eager calls and tracing cost as much as JAX's own."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_tilekern.interop import compat
from jax_tilekern.scope import Function


def jitted(*static: str, unless: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Return a decorator that jits a public function, inlined where it is traced.

    So are the functions of ``jax.numpy``. An eager call is then the dispatch of a compiled program,
    and a call inside a ``jit`` copies equations that were made for the same types before.

    Parameters
    ----------
    static
        The parameters that are no operands. Sequences among them become tuples, which have a hash.
    unless
        Keywords with any of which a call is not jitted, because it looks at values or has a
        function that JAX would compare by identity.
    """

    def decorate(function: Function) -> Function:
        body: Any = jax.jit(function, static_argnames=static, inline=compat.inlined_when_traced)
        parameters = inspect.signature(function).parameters
        prepare = [_with_hash if name in static else _operand for name in parameters]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # jit raises the error for too many arguments.
            given = [change(x) for change, x in zip(prepare, args, strict=False)]
            given += args[len(given) :]
            for name, x in kwargs.items():
                if name not in parameters:
                    # jit would say that its value is no array.
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    )
                kwargs[name] = _with_hash(x) if name in static else _operand(x)
            return (function if any(map(kwargs.get, unless)) else body)(*given, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _operand(x: Any) -> Any:
    # jax.jit does not call this function. A tracer has None in its place.
    convert = getattr(x, "__jax_array__", None)
    return x if convert is None else convert()


def _with_hash(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (np.ndarray, jax.Array)):
        # If it is a tracer, the error names it.
        if value.ndim:
            return _with_hash(value.tolist())
        return bool(value) if value.dtype == np.bool_ else operator.index(value)
    # Instances of other classes, such as jax.lax.DotAlgorithm, are excluded.
    if type(value) in (list, tuple) or isinstance(value, Iterator):
        # jit would take 1.0 for an axis 1 that it has seen, since both have one hash.
        return tuple(operator.index(x) if _is_whole(x) else _with_hash(x) for x in value)
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and value.is_integer()
