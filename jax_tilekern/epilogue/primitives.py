"""The CUDA of each primitive of ``jax.lax``: a function of ``ffi/cuda/scalar_functions.cuh``.

A primitive that is in no table here is computed by XLA, after the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_FLOATS, _INTEGERS, _BOOL = "f", "iu", "b"
_NUMBERS = _FLOATS + _INTEGERS
_ANY = _NUMBERS + _BOOL


class Translation(NamedTuple):
    """How CUDA computes a primitive."""

    function: str  # its name in tilekern::lax
    kinds: str  # the operands' numpy.dtype.kind
    instructions: int = 1  # approximately, of an evaluation in float32, for cost models
    in_float32: bool = True  # whether float32, rounded, computes 16-bit types


def _same_name(kinds: str, instructions: Mapping[str, int]) -> dict[str, Translation]:
    return {name: Translation(name, kinds, cost) for name, cost in instructions.items()}


# Numbers of instructions of CUDA's functions on sm_90. XLA's functions have similar numbers.
_FUNCTIONS_OF_FLOATS = {
    "exp": 8, "exp2": 4, "expm1": 20, "log": 20, "log1p": 25, "log2": 20,
    "logistic": 10, "digamma": 120,
    "tanh": 16, "sin": 30, "cos": 30, "tan": 40, "asin": 20, "acos": 20, "atan": 20, "atan2": 30,
    "sinh": 20, "cosh": 20, "asinh": 30, "acosh": 30, "atanh": 30,
    "erf": 20, "erfc": 30, "erf_inv": 30, "lgamma": 60,
    "sqrt": 15, "rsqrt": 5, "cbrt": 12, "pow": 40, "floor": 1, "ceil": 1, "is_finite": 2,
}  # fmt: skip

_TABLE: dict[str, Translation] = {
    **_same_name(_FLOATS, _FUNCTIONS_OF_FLOATS),
    **_same_name(
        _NUMBERS,
        {"add": 1, "sub": 1, "mul": 1, "neg": 1, "div": 6, "rem": 20, "abs": 1, "sign": 4},
    ),
    **_same_name(_NUMBERS, {"square": 1}),
    **_same_name(_ANY, {"max": 1, "min": 1, "clamp": 2}),
    **_same_name(_ANY, {"eq": 1, "ne": 1, "lt": 1, "le": 1, "gt": 1, "ge": 1}),
    **_same_name(_NUMBERS, {"lt_to": 4, "le_to": 4}),
    **_same_name(
        _INTEGERS,
        {"shift_left": 3, "shift_right_logical": 3, "shift_right_arithmetic": 3,
         "population_count": 2, "clz": 2},
    ),
    "add_any": Translation("add_any", _NUMBERS),
    "one_minus_square": Translation("one_minus_square", _NUMBERS),
    "and": Translation("bitwise_and", _INTEGERS + _BOOL),
    "or": Translation("bitwise_or", _INTEGERS + _BOOL),
    "xor": Translation("bitwise_xor", _INTEGERS + _BOOL),
    "not": Translation("bitwise_not", _INTEGERS + _BOOL),
    "nextafter": Translation("nextafter", _FLOATS, 8, in_float32=False),
    "select_n": Translation("select_n", _ANY),
}  # fmt: skip

# Functions of float32 that take fewer instructions where every result of an epilogue is rounded to
# 16 bits. Their errors are a hundredth of that rounding.
TO_16_BITS = {"exp": ("exp_to_16_bits", 2), "logistic": ("logistic_to_16_bits", 4)}

# Results are operands as they are.
_SAME_SHAPE_COPIES = ("copy", "name", "stop_gradient")
_COPIES = (*_SAME_SHAPE_COPIES, "broadcast_in_dim", "reshape", "squeeze")

# Primitives whose function is known from their parameters.
_BY_PARAMETERS: dict[str, Callable[..., Translation]] = {
    "integer_pow": lambda y: Translation(
        f"integer_pow<{y}>", _FLOATS if y < 0 else _NUMBERS, abs(y).bit_length() * 2
    ),
    "round": lambda rounding_method: Translation(
        ("round_away_from_zero", "round_to_even")[int(rounding_method)], _FLOATS, 2
    ),
}

# Primitives that contain a jaxpr, and the parameter that has it.
INNER_JAXPR = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def translation(name: str, params: Mapping[str, Any]) -> Translation:
    """Return how CUDA computes a primitive that :func:`has_translation`."""
    return _BY_PARAMETERS[name](**params) if name in _BY_PARAMETERS else _TABLE[name]


def has_translation(name: str) -> bool:
    """Whether a primitive has a :func:`translation`."""
    return name in _BY_PARAMETERS or name in _TABLE


def is_elementwise(name: str) -> bool:
    """Whether a primitive of arrays is one of their elements that CUDA computes."""
    return name == "convert_element_type" or name in _SAME_SHAPE_COPIES or has_translation(name)


def is_translated(name: str) -> bool:
    return name in INNER_JAXPR or is_copy(name) or is_elementwise(name)


def is_copy(name: str) -> bool:
    """Whether a primitive returns its scalar operand as it is."""
    return name in _COPIES
