"""The parameters of primitives that translations understand; others are refused.

A version of JAX may give a primitive another parameter, or a parameter another value, that changes
what the primitive computes. Therefore each primitive that is translated declares its parameters,
with the values of each that its translation is right for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax import lax
from jax.sharding import NamedSharding

from jax_tilekern.interop import compat

# Whether a translation is right for a value of a parameter, for each parameter of a primitive.
Parameters = Mapping[str, Callable[[Any], bool]]


class Untranslatable(Exception):
    """A function that CUDA does not compute; the message says why."""

    is_located = False


@contextlib.contextmanager
def located(eqn: Any) -> Iterator[None]:
    """Let an ``Untranslatable`` from inside the context name the user's line of an equation."""
    try:
        yield
    except Untranslatable as error:
        line = compat.source_line(eqn)
        if error.is_located or not line:
            raise
        found = Untranslatable(f"{error}, at {line}")
        found.is_located = True
        raise found from None


def anything(_: Any) -> bool:
    """Accept every value: the translation reads the parameter, or it changes no results."""
    return True


def one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


absent = one_of(None)


def undivided(sharding: Any) -> bool:
    """Accept a sharding that divides nothing."""
    return sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh.empty)


def all_of(names: str) -> Parameters:
    """Return parameters that may have every value."""
    return dict.fromkeys(names.split(), anything)


def refuse_unknown(eqn: Any, understood: Parameters | None = None) -> None:
    """Raise ``Untranslatable`` for an equation that a translation is not right for.

    ``understood`` has the parameters of its primitive, by default those of :data:`PARAMETERS`. An
    effect, or a device of its own, is not understood either.
    """
    name = eqn.primitive.name
    if understood is None:
        understood = PARAMETERS.get(name, {})
    if eqn.effects:
        raise Untranslatable(f"no CUDA for the effects of {name}")
    if eqn.ctx.compute_type is not None:
        raise Untranslatable(f"{name} is computed on {eqn.ctx.compute_type}")
    for parameter, value in eqn.params.items():
        if parameter not in understood or not understood[parameter](value):
            shown = str(value)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise Untranslatable(f"no CUDA for {name} with {parameter}={shown}")


def is_understood(eqn: Any, understood: Parameters | None = None) -> bool:
    """Whether :func:`refuse_unknown` does not refuse an equation."""
    try:
        refuse_unknown(eqn, understood)
    except Untranslatable:
        return False
    return True


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an elementwise primitive reads an operand of a shape for results of another.

    It does if the operand is a scalar, or has the result's size or 1 in each dimension.
    """
    if not shape:
        return True
    return len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True))


_HAVE_ACCURACY = "cbrt cos erfc exp exp2 expm1 log log1p log2 logistic rsqrt sin sqrt tan tanh"

# The parameters of primitives of scalars and of elements, and of inlined primitives. A primitive
# without an entry has no parameters.
PARAMETERS: dict[str, Parameters] = {
    **{name: {"accuracy": absent} for name in _HAVE_ACCURACY.split()},
    "mul": {"out_dtype": absent},
    "integer_pow": all_of("y"),
    "round": {
        "rounding_method": one_of(
            lax.RoundingMethod.AWAY_FROM_ZERO, lax.RoundingMethod.TO_NEAREST_EVEN
        )
    },
    "convert_element_type": {**all_of("new_dtype weak_type"), "sharding": undivided},
    "name": all_of("name"),
    "broadcast_in_dim": {**all_of("shape broadcast_dimensions"), "sharding": undivided},
    "reshape": {
        **all_of("new_sizes"),
        "dimensions": one_of(None, ()),
        "sharding": undivided,
    },
    "squeeze": all_of("dimensions"),
    "jit": {
        **all_of(
            "jaxpr in_shardings out_shardings in_layouts out_layouts donated_invars ctx_mesh name "
            "keep_unused inline"
        ),
        "compiler_options_kvs": one_of(()),
    },
    "closed_call": all_of("call_jaxpr"),
    "eval_jaxpr": all_of("call_jaxpr"),
    "remat2": all_of("jaxpr prevent_cse differentiated policy"),
    "custom_jvp_call": all_of("call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros"),
    "custom_vjp_call": all_of("call_jaxpr fwd_jaxpr_thunk num_consts bwd out_trees symbolic_zeros"),
}
