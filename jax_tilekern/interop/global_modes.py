"""Modes that a user sets around a call, and the modes in which rules of operations run.

A mode such as ``jax_enable_x64`` may be a context around a part of the user's program. JAX calls
the rules of a primitive at other times: it differentiates, batches and lowers a function outside of
such a context. So rules, and functions that compute with values of their own, run in modes that
follow from the types of their arguments alone (:func:`by_types`, :func:`mode_independent`). What
the user wrote runs in the modes of the user's call (:func:`with_current_modes`).

``patch`` makes primitives trace to operations of this library, by :func:`intercept`. JAX traces
an operation by ``primitive.bind``, which is shadowed with a function that tests a flag. The flag is
a setting: it belongs to the thread, and a trace under one value is never reused under the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_tilekern.interop import compat
from jax_tilekern.scope import Setting

P = ParamSpec("P")
R = TypeVar("R")

_64_BITS = frozenset(map(np.dtype, (np.float64, np.int64, np.uint64, np.complex128)))


class Modes(NamedTuple):
    """Values of JAX's modes that change what a function means."""

    x64: bool = False  # jax_enable_x64
    # Whether types and ranks of operands may differ.
    dtype_promotion: Any = "standard"
    rank_promotion: Any = "allow"
    matmul_precision: Any = None  # of products that name none

    @classmethod
    def current(cls) -> Modes:
        """Return the values of this thread's contexts."""
        config: Any = jax.config
        return cls(
            config.jax_enable_x64,
            config.jax_numpy_dtype_promotion,
            config.jax_numpy_rank_promotion,
            config.jax_default_matmul_precision,
        )

    def with_types_of(self, *values: Any) -> Modes:
        """Return the modes with 64-bit types enabled if one of the values has 64 bits."""
        return self._replace(x64=self.x64 or any(map(_has_64_bits, jax.tree.leaves(values))))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which the modes have these values."""
        if self == self.current():
            yield
            return
        with (
            jax.enable_x64(self.x64),
            jax.numpy_dtype_promotion(self.dtype_promotion),
            jax.numpy_rank_promotion(self.rank_promotion),
            jax.default_matmul_precision(self.matmul_precision),
        ):
            yield


def by_types(*values: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which only types decide what a function means.

    64-bit types are enabled if one of the types in trees of arrays, abstract values and types has
    64 bits. An object with ``dtypes`` stands for these.
    """
    return Modes().with_types_of(*values).entered()


def mode_independent(function: Callable[P, R]) -> Callable[P, R]:
    """Make the types of a function's arguments decide its meaning, as :func:`by_types` does."""

    @functools.wraps(function)
    def independent(*args: P.args, **kwargs: P.kwargs) -> R:
        with by_types(args, kwargs):
            return function(*args, **kwargs)

    return independent


def with_current_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of the user's mean, at any later time, what it means now."""
    modes = Modes.current()

    @functools.wraps(function)
    def as_now(*args: P.args, **kwargs: P.kwargs) -> R:
        with modes.entered():
            return function(*args, **kwargs)

    return as_now


def _has_64_bits(value: Any) -> bool:
    if hasattr(value, "dtypes"):
        return any(map(_has_64_bits, value.dtypes))
    dtype = getattr(value, "dtype", value)
    return isinstance(dtype, np.dtype) and dtype in _64_BITS


Group = Literal["products", "matrices"]

_intercepting: Setting[tuple[Group, ...]] = Setting("intercepting", ())


def intercepting(group: Group = "products") -> AbstractContextManager[None]:
    """Make intercepted primitives of a group trace to their replacements, in this thread."""
    return _intercepting(tuple(sorted({*_intercepting.value, group})))


def by_xla(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` bind JAX's own primitives, wherever it is called."""

    @functools.wraps(function)
    def not_intercepted(*args: P.args, **kwargs: P.kwargs) -> R:
        with _intercepting(()):
            return function(*args, **kwargs)

    return not_intercepted


def intercept(
    primitive: compat.Primitive, replacement: Callable[..., Any], group: Group = "products"
) -> None:
    """Make a primitive of JAX trace to ``replacement`` inside :func:`intercepting` of a group.

    ``replacement`` takes the operands and parameters of the primitive. Its own calls bind JAX's
    primitives.
    """
    bind: Callable[..., Any] = primitive.bind
    # The primitive's parameters are final: no mode changes what they say.
    replaced = by_xla(mode_independent(replacement))

    @functools.wraps(bind)
    def intercepted(*operands: Any, **params: Any) -> Any:
        if group in _intercepting.value and not compat.in_pallas_kernel():
            # The modes of the caller decide which type an array of NumPy has. JAX refuses lists.
            arrays = [*map(_as_array, operands)]
            if all(hasattr(x, "dtype") or isinstance(x, complex | float | int) for x in arrays):
                return replaced(*arrays, **params)
        return bind(*operands, **params)

    vars(primitive)["bind"] = intercepted


def intercept_function(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Make a function of JAX's trace to ``replacement`` inside :func:`intercepting` of products.

    The function runs where the replacement returns ``NotImplemented``.
    """
    function, replaced = getattr(module, name), by_xla(replacement)
    if name in _functions:
        return

    @functools.wraps(function)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        if "products" in _intercepting.value and not compat.in_pallas_kernel():
            result = replaced(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    _functions[name] = function
    setattr(module, name, intercepted)


# Functions that are intercepted, as they are in JAX.
_functions: dict[str, Callable[..., Any]] = {}


def release_function(module: Any, name: str) -> None:
    """Undo :func:`intercept_function`."""
    setattr(module, name, _functions.pop(name))


def _as_array(operand: Any) -> Any:
    return jnp.asarray(operand) if isinstance(operand, np.ndarray | np.generic) else operand


def release(primitive: compat.Primitive) -> None:
    """Undo :func:`intercept`."""
    del vars(primitive)["bind"]
