"""The text of a scalar function in CUDA C++.

Its jaxpr becomes straight-line code with numbered names, so equal functions have equal texts, which
are the key of a compiled kernel. Calls (``jit``, ``custom_jvp``, ...) are inlined. Values of 16-bit
floats are held in float32 and rounded after each operation; XLA may keep them in float32 over a
whole fusion, so its results can differ by the rounding of intermediate values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.epilogue.primitives import (
    INNER_JAXPR,
    TO_16_BITS,
    is_copy,
    is_translated,
    translation,
)
from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.epilogue.understood import Untranslatable, located, refuse_unknown
from jax_tilekern.interop import compat
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, FP8

_SIXTEEN_BITS = (F16, BF16)
_CONVERSION = 2
# The instructions of ``logistic(2 x)``, less the instructions of ``(1 + tanh(x)) / 2``.
_LOGISTIC_FOR_TANH = -7


@dataclass(frozen=True)
class CudaText:
    """A scalar function in CUDA."""

    # In C++, where x0 is the accumulator and x1, x2, ... are the operands.
    statements: tuple[str, ...]
    results: tuple[str, ...]  # C++ expressions: elements, then values that are reduced
    instructions: int  # an estimate for one evaluation


def cuda_text(function: ScalarFunction) -> CudaText:
    """Translate a scalar function; raise ``Untranslatable`` if a primitive or type has no CUDA."""
    for atom, kind in zip(function.jaxpr.jaxpr.outvars, function.reductions, strict=True):
        if kind is not None and computed_type(_dtype(atom)) != "float":
            raise Untranslatable(f"no kernel reduces rows of {_dtype(atom)}")
    to_16_bits = set(function.out_dtypes) <= set(_SIXTEEN_BITS)
    writer = ScalarWriter(TO_16_BITS if to_16_bits else {})
    jaxpr = function.jaxpr.jaxpr
    names = [f"x{i}" for i in range(len(jaxpr.invars))]
    results = [
        writer.stored(expression, _dtype(atom), dtype)
        for expression, atom, dtype in zip(
            writer.inlined(jaxpr, function.jaxpr.consts, names),
            jaxpr.outvars,
            function.out_dtypes,
            strict=True,
        )
    ]
    return CudaText(tuple(writer.statements), tuple(results), writer.instructions)


def computed_type(dtype: np.dtype[Any]) -> str:
    """Return the C++ type that values of a type are computed in, if there is one."""
    if dtype in _SIXTEEN_BITS:
        return "float"
    # NumPy says that some 8-bit floats are of the kind "f".
    if dtype.kind not in "fiub" or dtype in FP8 or dtype not in CXX_TYPES:
        raise Untranslatable(f"CUDA has no arithmetic of {dtype}")
    return CXX_TYPES[dtype]


class ScalarWriter:
    """Writes equations of scalars as C++ statements, each of which names a value.

    ``shorter`` has functions of float32 that stand for others, and their instructions.
    """

    def __init__(self, shorter: Mapping[str, tuple[str, int]]) -> None:
        self.statements: list[str] = []
        self._shorter = shorter
        self.instructions = 0
        # The call whose value each name has, unless the value is rounded.
        self._calls: dict[str, tuple[str, list[str]]] = {}
        # The expression before rounding, for each name of a rounded value.
        self._unrounded: dict[str, str] = {}

    def inlined(
        self, jaxpr: compat.Jaxpr, consts: Sequence[Any], operands: Sequence[str]
    ) -> list[str]:
        """Write a jaxpr's equations; return the expressions of its results."""
        names: dict[Any, str] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            names[var] = literal(np.asarray(value), _dtype(var))

        def expression(atom: Any) -> str:
            if compat.is_literal(atom):
                return literal(np.asarray(atom.val), atom.aval.dtype)
            return names[atom]

        for eqn in jaxpr.eqns:
            read = [expression(atom) for atom in eqn.invars]
            with located(eqn):
                names.update(zip(eqn.outvars, self.equation(eqn, read), strict=True))
        return [expression(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[str]) -> list[str]:
        """Write an equation of one element of each operand; return its results."""
        name = eqn.primitive.name
        if not is_translated(name):
            raise Untranslatable(f"no CUDA for {name}")
        refuse_unknown(eqn)
        if name in INNER_JAXPR:
            inner = eqn.params[INNER_JAXPR[name]]
            jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.inlined(jaxpr, consts, operands)
        if is_copy(name):
            return operands
        (out,) = eqn.outvars
        types = [atom.aval.dtype for atom in eqn.invars]
        if name == "convert_element_type":
            return [self._converted(operands[0], types[0], out.aval.dtype)]
        if name == "div":
            name, operands = _by_reciprocal(eqn, operands)
        how = translation(name, eqn.params)
        # The first operand of a selection is a condition.
        for dtype in types[1:] if name == "select_n" else types:
            computed_type(dtype)
            if dtype.kind not in how.kinds and not (dtype in _SIXTEEN_BITS and "f" in how.kinds):
                raise Untranslatable(f"no CUDA for {name} of {dtype}")
            if dtype in _SIXTEEN_BITS and not how.in_float32:
                raise Untranslatable(f"no CUDA for {name} of {dtype}")
        if name == "select_n" and len(types) != 3:
            which, *cases = operands
            self.instructions += 2 * len(cases)
            tests = "".join(f"{which} == {i} ? {case} : " for i, case in enumerate(cases[:-1]))
            return [self.named(out.aval.dtype, f"{tests}{cases[-1]}")]
        self.instructions += how.instructions
        function, operands = self._simplified(how.function, operands, out.aval.dtype)
        if function in self._shorter and computed_type(types[0]) == "float":
            precise = translation(function, {})
            function, instructions = self._shorter[function]
            self.instructions += instructions - precise.instructions
        call = f"lax::{function}({', '.join(operands)})"
        result = self.named(out.aval.dtype, call)
        if out.aval.dtype not in _SIXTEEN_BITS:
            self._calls[result] = function, operands
        return [result]

    def _simplified(
        self, function: str, operands: list[str], dtype: np.dtype[Any]
    ) -> tuple[str, list[str]]:
        """Write ``(1 + tanh(x)) / 2``, which gelu has, as ``logistic(2 x)``.

        It takes fewer instructions, and is accurate where the result is small.
        """
        if dtype.kind != "f":
            return function, operands
        one, half, two = (literal(np.asarray(x), dtype) for x in (1.0, 0.5, 2.0))
        outer = self._other_operand((function, operands), "mul", half)
        inner = self._other_operand(self._calls.get(outer), "add", one)
        name, arguments = self._calls.get(inner, ("", []))
        if name != "tanh":
            return function, operands
        self.instructions += _LOGISTIC_FOR_TANH
        return "logistic", [f"lax::mul({two}, {arguments[0]})"]

    @staticmethod
    def _other_operand(call: tuple[str, list[str]] | None, function: str, known: str) -> str:
        """Return the other operand of a call of a function of two, one of which is known."""
        if call is None or call[0] != function or known not in call[1]:
            return ""
        return call[1][1 - call[1].index(known)]

    def _converted(self, operand: str, source: np.dtype[Any], target: np.dtype[Any]) -> str:
        computed, wanted = computed_type(source), computed_type(target)
        if computed == wanted and target not in _SIXTEEN_BITS:
            return operand
        self.instructions += _CONVERSION
        return self.named(target, f"lax::convert<{wanted}>({operand})")

    def named(self, dtype: np.dtype[Any], expression: str) -> str:
        """Name an expression, rounded to its type."""
        name = f"v{len(self.statements)}"
        value = rounded(expression, dtype)
        self.statements.append(f"{computed_type(dtype)} {name} = {value};")
        if value != expression:
            self._unrounded[name] = expression
        return name

    def stored(self, expression: str, given: np.dtype[Any], wanted: np.dtype[Any]) -> str:
        """Return what is stored as ``wanted`` for an expression of the type ``given``.

        A store rounds. If results were rounded before the store, ptxas would serialize the MMAs.
        """
        if given == wanted and wanted in _SIXTEEN_BITS:
            return self._unrounded.get(expression, expression)
        computed = computed_type(wanted)
        if computed_type(given) == computed:
            return expression
        return f"lax::convert<{computed}>({expression})"


def _by_reciprocal(eqn: Any, operands: list[str]) -> tuple[str, list[str]]:
    """Write a division by a number as the multiplication by its reciprocal, as XLA does."""
    divisor, dtype = eqn.invars[1], _dtype(eqn.invars[1])
    if not compat.is_literal(divisor) or dtype not in (np.float32, np.float64):
        return "div", operands
    with np.errstate(all="ignore"):
        reciprocal = np.reciprocal(np.asarray(divisor.val, dtype))
    if not np.isfinite(reciprocal) or abs(reciprocal) < np.finfo(dtype).tiny:
        return "div", operands
    return "mul", [operands[0], literal(reciprocal, dtype)]


def _dtype(atom: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(atom.aval.dtype)
    return dtype


def rounded(expression: str, dtype: np.dtype[Any]) -> str:
    """Round an expression to a type, if values of it are computed in a wider one."""
    if dtype not in _SIXTEEN_BITS:
        return expression
    return f"lax::rounded<{CXX_TYPES[dtype]}>({expression})"


def literal(value: np.ndarray, dtype: np.dtype[Any]) -> str:
    """Return a number as a C++ expression, in the type in which it is computed."""
    kind = computed_type(dtype)
    number = value.astype(dtype).item()
    if kind == "bool":
        return "true" if number else "false"
    if kind not in ("float", "double"):
        # The lowest int64 is no literal, but the value of an unsigned one.
        return f"static_cast<{kind}>({int(number) % 2**64}ull)"
    suffix = "f" if kind == "float" else ""
    if math.isnan(number):
        return f"static_cast<{kind}>(__int_as_float(0x7fc00000))"
    if math.isinf(number):
        sign = "-" if number < 0 else ""
        return f"static_cast<{kind}>({sign}__int_as_float(0x7f800000))"
    # Hexadecimal floats are exact.
    return f"({float(number).hex()}{suffix})"
