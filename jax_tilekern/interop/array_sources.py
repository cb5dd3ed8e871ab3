"""Values that JAX takes for arrays, and that this library's products take as they are.

JAX asks such a value for an array (``__jax_array__``), for example in a layer that casts its
parameters. The array is remembered, so that a product that gets it finds the value.
"""

from __future__ import annotations

import weakref
from typing import Any

from jax import Array


class ArraySource:
    """A value that stands for an array, which :meth:`array` computes."""

    def array(self) -> Array:
        """Return the array that the value stands for."""
        raise NotImplementedError

    def __jax_array__(self) -> Array:
        array = self.array()
        key = id(array)
        _sources[key] = self
        weakref.finalize(array, _sources.pop, key, None)
        return array


_sources: dict[int, ArraySource] = {}


def source_of(x: Any) -> Any:
    """Return the value that an array was computed of, and anything else as it is."""
    return _sources.get(id(x), x)
