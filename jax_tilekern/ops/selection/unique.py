"""``unique``: JAX's function over this library's sort."""

from __future__ import annotations

from typing import Any

from jax.typing import ArrayLike

from jax_tilekern.interop.originals import jnp
from jax_tilekern.interop.patch import patch


def unique(
    ar: ArrayLike,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
    sorted: bool = True,
) -> Any:
    """Return the elements of an array without repetitions, as :func:`jax.numpy.unique` does.

    It is JAX's function, inside :func:`jax_tilekern.patch`.

    Parameters
    ----------
    ar
        Array of any type.
    return_index, return_inverse, return_counts
        Whether to return where each element is first, which one each element of ``ar`` is, and how
        often each is there.
    axis
        The axis of the slices that are compared; ``None`` compares elements.
    equal_nan
        Whether every NaN is the same element.
    size
        How many elements to return, which a traced call needs.
    fill_value
        What follows them where they are fewer than ``size``, the smallest unless given.
    sorted
        As in JAX. The elements are sorted in either case.

    Returns
    -------
    Array or tuple of Array
        The elements, and what else is asked for.

    Raises
    ------
    TypeError
        If ``ar`` is no array, or is traced without a ``size``.
    ValueError
        If the axis is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.unique(jnp.array([3, 1, 3]), return_counts=True)
    (Array([1, 3], dtype=int32), Array([1, 2], dtype=int32))
    """
    with patch():
        return jnp.unique(
            ar, return_index, return_inverse, return_counts, axis, equal_nan=equal_nan, size=size,
            fill_value=fill_value, sorted=sorted,
        )  # fmt: skip
