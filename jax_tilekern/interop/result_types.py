"""Types of results that do not depend on sizes, found once for operands of all sizes.

Abstract evaluation traces a function of JAX's. Where every size of its results is one of its
operands', the traced sizes may be others: equal ones stay equal, and 0 and 1 stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tilekern.interop import compat

# Products of distinct primes differ where those of the sizes that they stand for may be equal; the
# function then fails, and is evaluated at the operands' own sizes.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def product_type(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the abstract value of one of JAX's products at the user's own arguments.

    Its exceptions are JAX's.
    """

    def trace(*operands: Any) -> Any:
        return compat.result_type(functools.partial(function, **options), *operands)

    if options.get("out_sharding") is not None or not all(isinstance(x, jax.Array) for x in args):
        return trace(*args)
    key = function, tuple(options.items())
    found = evaluated_at_any_size(
        lambda avals: _product_type(key, avals), list(map(jax.typeof, args))
    )
    return trace(*args) if found is None else found[0]


@compat.cached(max_size=4096)
def _product_type(key: tuple[Any, Any], avals: tuple[Any, ...]) -> list[Any]:
    function, options = key
    return [compat.result_type(functools.partial(function, **dict(options)), *avals)]


def evaluated_at_any_size(
    evaluate: Callable[[tuple[Any, ...]], Sequence[Any]], avals: Sequence[Any]
) -> list[Any] | None:
    """Return the results of ``evaluate`` at abstract values, evaluated at others in their place.

    ``None`` if the sizes matter: on a mesh with explicit axes, for symbolic sizes, or where the
    function fails.
    """
    sizes = dict.fromkeys(size for aval in avals for size in aval.shape)
    others = [size for size in sizes if not isinstance(size, int) or size > 1]
    if not all(isinstance(size, int) for size in others) or len(others) > len(_PRIMES):
        return None
    if any(compat.explicit_sharding(aval) is not None for aval in avals):
        return None
    stand_ins = {0: 0, 1: 1, **dict(zip(others, _PRIMES, strict=False))}
    own = {stand_in: size for size, stand_in in stand_ins.items()}
    key = tuple(aval.update(shape=tuple(stand_ins[size] for size in aval.shape)) for aval in avals)
    try:
        results = evaluate(key)
    # Whatever it is, the user gets it, or none, at the operands' own sizes.
    except Exception:
        return None
    return [x.update(shape=tuple(own[size] for size in x.shape)) for x in results]
