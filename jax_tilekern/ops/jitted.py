"""Jitting of public functions, so that eager calls and tracing cost as much as JAX's own."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_tilekern.interop import compat
from jax_tilekern.interop.array_sources import ArraySource, source_of
from jax_tilekern.scope import Function

# The number of functions that a public function keeps programs of.
MOST_FUNCTIONS = 128


def jitted(
    *static: str,
    functions: Sequence[str] = (),
    unless: Sequence[str] = (),
    weights: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """Return a decorator that jits a public function, inlined where it is traced.

    So are the functions of ``jax.numpy``. An eager call is then the dispatch of a compiled program,
    and a call inside a ``jit`` copies equations that were made for the same types before.

    ``static`` are the parameters that are no operands; sequences among them become tuples, which
    have a hash. ``functions`` are those that are functions of the user's: keywords, or the last one
    that has a position. A call is traced once for each :class:`UserFunction`, and those that were
    used last are kept with their programs. One that reads tracers is traced for each call. A call
    with a keyword of ``unless`` is not jitted, because it looks at values. ``weights`` are operands
    that may be quantised: those stay as they are, and an array that was made of some is replaced by
    them.
    """

    def decorate(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)
        prepare = dict.fromkeys(names, _operand) | dict.fromkeys(static, _with_hash)
        prepare |= dict.fromkeys(functions, _unchanged)
        prepare |= dict.fromkeys(weights, _weights)

        def jitted_with(users: tuple[tuple[str, UserFunction], ...]) -> Any:
            # JAX drops the programs of a function with it. It would keep static arguments.
            body = functools.partial(function, **{name: x.function for name, x in users})
            constants = (*static, *functions)
            return jax.jit(body, static_argnames=constants, inline=compat.inlined_when_traced)

        kept_with = functools.lru_cache(MOST_FUNCTIONS)(jitted_with)
        compat.register_cache(kept_with, function.__name__)
        without_functions = jitted_with(())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # jit raises the error for too many arguments.
            given = [change(x) for change, x in zip(prepare.values(), args, strict=False)]
            given += args[len(given) :]
            for name, x in kwargs.items():
                if name not in prepare:
                    # jit would say that its value is no array.
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    )
                kwargs[name] = prepare[name](x)
            if any(map(kwargs.get, unless)):
                return function(*given, **kwargs)
            for name in functions:
                if names.index(name) < len(given):
                    if name in kwargs:
                        raise TypeError(
                            f"{function.__name__}() got multiple values for argument {name!r}"
                        )
                    kwargs[name] = given.pop(names.index(name))
            users = tuple(
                (name, UserFunction(kwargs.pop(name)))
                for name in functions
                if kwargs.get(name) is not None
            )
            if not users:
                return without_functions(*given, **kwargs)
            # Tracers are of one trace. A function that is kept would keep all of it.
            reads_tracers = any(user.reads_tracers for _, user in users)
            return (jitted_with if reads_tracers else kept_with)(users)(*given, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


class UserFunction:
    """A function of the user's, as a key: equal to itself as long as it reads the same values."""

    def __init__(self, function: Any) -> None:
        self.function, self.read = function, tuple(_values_read(function))

    @property
    def reads_tracers(self) -> bool:
        """Whether it reads values of a program that is traced."""
        return has_tracers(self.read)

    def __hash__(self) -> int:
        return id(self.function)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, UserFunction)
            and self.function is other.function
            and len(self.read) == len(other.read)
            and all(map(_is_same, self.read, other.read))
        )


def has_tracers(values: Sequence[Any]) -> bool:
    """Return whether trees of values have tracers."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


def _values_read(function: Any, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield what a function reads besides its arguments: closure, defaults, globals, attributes.

    Functions in its closure are followed; ``seen`` are those on the way, which may call each other.
    """
    if isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        return
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, types.FunctionType | types.ModuleType | type):
        # A bound method, or an object that is called, reads its attributes.
        yield from getattr(owner, "__dict__", {}).values()
        method = type(function).__call__ if owner is function else function
        function = getattr(method, "__func__", method)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # Its variable has no value yet.
            continue
        yield value
        yield from _values_read(value, seen | {id(function)})
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if not callable(value) and not isinstance(value, types.ModuleType):
            yield value


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function and in those inside it."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return (*code.co_names, *(name for names in inner for name in names))


def _is_same(x: Any, y: Any) -> bool:
    # Other types than Python's numbers may compare element by element.
    return x is y or (type(x) is type(y) and isinstance(x, int | float | complex) and x == y)


def _unchanged(x: Any) -> Any:
    return x


def _operand(x: Any) -> Any:
    # jax.jit does not call this function. A tracer has None in its place.
    convert = getattr(x, "__jax_array__", None)
    return x if convert is None else convert()


def _weights(x: Any) -> Any:
    source = source_of(x)
    return source if isinstance(source, ArraySource) else _operand(x)


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
        values = tuple(map(_with_hash, value))
        for x in filter(_is_whole, values):
            raise TypeError(f"{values} has the float {x}, which is {int(x)} as an integer")
        return values
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and value.is_integer()
