"""Trace a function of any arguments: for ``explain``, ``tune`` and ``fuse``."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def traced(
    caller: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> jax.stages.Traced:
    """Trace a function as ``jax.jit`` does; one that is jitted keeps its static arguments.

    Arguments are trees of arrays and ``jax.ShapeDtypeStruct``. Other leaves, such as Python numbers
    and the functions inside a model, are static, and so are those of the result. Errors name the
    ``caller``.
    """
    if not callable(function):
        raise TypeError(
            f"{caller} takes a function and its arguments, as in {caller}(matmul, a, b), and got "
            f"{type(function).__name__} in place of the function"
        )
    if isinstance(function, types.MethodType):
        # A method has the attributes of its function, which lacks the instance.
        args = (function.__self__, *args)
        function = function.__func__
    trace = getattr(function, "trace", None)
    if trace is not None:
        own: jax.stages.Traced = trace(*args, **kwargs)
        return own
    # A number may be one that a call needs the value of, such as a number of segments.
    call, arrays = bind_non_arrays(function, args, kwargs, _is_described)

    def arrays_of_result(*arrays: Any) -> list[Any]:
        return [leaf for leaf in jax.tree.leaves(call(*arrays)) if _is_described(leaf)]

    return jax.jit(arrays_of_result).trace(*arrays)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, described or given, or a number."""
    return _is_described(leaf) or isinstance(leaf, bool | int | float | complex)


def _is_described(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def bind_non_arrays(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_array: Callable[[Any], bool],
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of the arrays among a call's arguments alone, and these arrays."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    dynamic = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def call(*arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        own_args, own_kwargs = jax.tree.unflatten(tree, filled)
        return function(*own_args, **own_kwargs)

    return call, [leaves[i] for i in dynamic]
