"""The C++ types of a kernel's parameters, compared with what a call passes.

A compiled kernel's mangled name has its types, with templates and typedefs resolved, unless it is
``extern "C"``. The text of the source has them as they are written, and needs no compiler; a list
that the preprocessor or a macro may change is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jax_tilekern.compilation.cubin import signature
from jax_tilekern.plans.cxx import CXX_TYPES

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r"__global__\b[^;{}]*?\b(\w+)\s*\(([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*)\)\s*\{"
)
_TEMPLATE = re.compile(r"\btemplate\s*<[^;{}]*$")
# Words that do not change the type of a parameter.
_NO_MATTER = re.compile(
    r"\b(volatile|__restrict__|__restrict|__grid_constant__|struct|class|typename)\b"
    r"|\balignas\s*\([^()]*\)|\[\[[^\]]*\]\]"
)
_TOKEN = re.compile(r"[A-Za-z_][\w:]*|\[[^\]]*\]|\S")
_BUILTIN = {"unsigned", "signed", "int", "long", "short", "char", "float", "double", "bool", "void"}


@dataclass(frozen=True)
class Element:
    """The type of the elements behind a pointer, or of a scalar."""

    dtype: np.dtype[Any] | None  # the type of each component; None for bytes, which any array is
    lanes: int = 1  # components of a vector type such as float4, or 1

    @property
    def bytes(self) -> int:
        return 1 if self.dtype is None else self.dtype.itemsize * self.lanes

    @property
    def alignment(self) -> int:
        """The number of bytes of which its address is a multiple."""
        return min(self.bytes // self.lanes if self.lanes == 3 else self.bytes, 16)


@dataclass(frozen=True)
class ParameterType:
    """The type of a kernel's parameter."""

    base: str  # its C++ name, without const and pointers
    pointers: int  # how many * follow
    const: bool  # whether a pointer is to const
    element: Element | None  # None for a class of the source, which is not checked

    def __str__(self) -> str:
        return f"{'const ' * self.const}{self.base}{'*' * self.pointers}"


@dataclass(frozen=True)
class Argument:
    """The argument of a call for a parameter."""

    kind: Literal["buffer", "tensor map", "scalar"]
    text: str  # how messages call it
    # of an element or a number; None for a workspace and a tensor map
    dtype: np.dtype[Any] | None = None
    bytes: int = 0  # of a buffer
    value: Any = None  # of a number
    written: bool = False  # whether the kernel must write to the buffer


# -- Types of a source text or of a compiled kernel


def kernels_in(text: str) -> list[tuple[str, bool, str]]:
    """Return the kernels that a text defines: name, whether it is a template, and parameters."""
    code = _COMMENT.sub(" ", text)
    return [
        (match[1], _TEMPLATE.search(code[: match.start()]) is not None, match[2])
        for match in _KERNEL.finditer(code)
    ]


def has_dynamic_shared_memory(text: str) -> bool:
    """Return whether a text declares ``extern __shared__`` memory."""
    return re.search(r"\bextern\s+__shared__\b", _COMMENT.sub(" ", text)) is not None


def declared_types(text: str, name: str) -> tuple[ParameterType, ...] | None:
    """Return the parameter types of the kernel of a C++ name by a text, if that is plain."""
    wanted = name.partition("<")[0].rpartition("::")[2].strip()
    lists = [parameters for found, _, parameters in kernels_in(text) if found == wanted]
    if len(lists) != 1 or "#" in lists[0]:
        return None
    return _types(lists[0], "")


def compiled_types(symbol: str) -> tuple[ParameterType, ...] | None:
    """Return a kernel's parameter types by its mangled name, if it has them."""
    found = signature(symbol)
    return _types(found[1], " _") if found else None


def _types(parameters: str, name: str) -> tuple[ParameterType, ...] | None:
    """Read a list of parameters, to each of which ``name`` is added."""
    if parameters.strip() in ("", "void"):
        return ()
    found = [_type(parameter + name) for parameter in _split(parameters)]
    return None if None in found else tuple(one for one in found if one is not None)


def _split(parameters: str) -> Iterator[str]:
    depth = start = 0
    for at, character in enumerate(parameters):
        depth += {"<": 1, "(": 1, "[": 1, "{": 1, ">": -1, ")": -1, "]": -1, "}": -1}.get(
            character, 0
        )
        if character == "," and depth == 0:
            yield parameters[start:at]
            start = at + 1
    yield parameters[start:]


def _type(parameter: str) -> ParameterType | None:
    text = _NO_MATTER.sub(" ", parameter.partition("=")[0])
    # A template's arguments are a part of a class's name, which is not looked into.
    while re.search(r"<[^<>]*>", text):
        text = re.sub(r"<[^<>]*>", "", text)
    const = re.search(r"\bconst\b", text.partition("*")[0]) is not None
    tokens = _TOKEN.findall(re.sub(r"\bconst\b", " ", text))
    form = re.fullmatch(
        r"(?P<words>w+)(?P<stars>\**)(?P<name>w?)(?P<arrays>a*)",
        "".join("*" if x == "*" else "a" if x[0] == "[" else "w" if x[0] not in "&(.~" else "?"
                for x in tokens),
    )  # fmt: skip
    if form is None:
        return None
    words, named = tokens[: form.end("words")], bool(form["name"])
    pointers = len(form["stars"]) + len(form["arrays"])
    if not form["stars"] and words[-1] not in _BUILTIN and len(words) > 1:
        words, named = words[:-1], True
    if _BUILTIN.issuperset(words):
        return ParameterType(" ".join(words), pointers, const and pointers > 0, _builtin(words))
    # A lone name that is not known may be a type or a macro.
    if len(words) > 1 or not (pointers or named):
        return None
    return ParameterType(words[0], pointers, const and pointers > 0, _NAMED.get(words[0]))


def _builtin(words: Sequence[str]) -> Element:
    if "void" in words or ("char" in words and "signed" not in words):
        return Element(None)
    for word in ("double", "float", "bool"):
        if word in words:
            return Element(np.dtype({"double": "f8", "float": "f4", "bool": "?"}[word]))
    size = 8 if "long" in words else 2 if "short" in words else 1 if "char" in words else 4
    return Element(np.dtype(f"{'u' if 'unsigned' in words else 'i'}{size}"))


def _named() -> Iterator[tuple[str, Element]]:
    for dtype, name in CXX_TYPES.items():
        if dtype.kind != "c":
            yield name, Element(dtype)
    for space in ("", "std::"):
        for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)):
            yield f"{space}{name}_t", Element(np.dtype(name))
            yield f"tilekern::{name}", Element(np.dtype(name))
        yield f"{space}size_t", Element(np.dtype("u8"))
        yield f"{space}ptrdiff_t", Element(np.dtype("i8"))
    yield "std::byte", Element(None)
    for name, narrow in (
        ("half", np.float16),
        ("__half", np.float16),
        ("nv_bfloat16", ml_dtypes.bfloat16),
        ("__nv_bfloat16", ml_dtypes.bfloat16),
    ):
        yield name, Element(np.dtype(narrow))
        yield f"{name}2", Element(np.dtype(narrow), 2)
    yield "__nv_fp8_e4m3", Element(np.dtype(ml_dtypes.float8_e4m3fn))
    yield "__nv_fp8_e5m2", Element(np.dtype(ml_dtypes.float8_e5m2))
    vectors = {
        "char": "i1", "short": "i2", "int": "i4", "long": "i8", "longlong": "i8",
        "uchar": "u1", "ushort": "u2", "uint": "u4", "ulong": "u8", "ulonglong": "u8",
        "float": "f4", "double": "f8",
    }  # fmt: skip
    for name, component in vectors.items():
        for lanes in (1, 2, 3, 4):
            yield f"{name}{lanes}", Element(np.dtype(component), lanes)
    for name, component in (("Complex", "f4"), ("FloatComplex", "f4"), ("DoubleComplex", "f8")):
        yield f"cu{name}", Element(np.dtype(component), 2)


_NAMED = dict(_named())

# -- The comparison


def check_parameters(
    kernel: str, types: Sequence[ParameterType], arguments: Sequence[Argument]
) -> None:
    """Raise an error unless a call passes what a kernel takes."""
    if len(types) != len(arguments):
        raise ValueError(
            f"kernel {kernel} takes {len(types)} parameters ({', '.join(map(str, types))}), but "
            f"the call passes {len(arguments)}: {', '.join(x.text for x in arguments)}. {_ORDER}"
        )
    for number, (type_, argument) in enumerate(zip(types, arguments, strict=True)):
        problem = _problem(type_, argument)
        if problem is not None:
            raise TypeError(
                f"kernel {kernel}: parameter {number} is {type_}, but the call passes "
                f"{argument.text} there. {problem}"
            )


_ORDER = (
    "A kernel takes pointers to inputs, outputs and workspaces, then tensor maps, scalars and "
    "strides of a batch_axis"
)


def _problem(type_: ParameterType, argument: Argument) -> str | None:
    """Return why a parameter does not take an argument, and what to do about it."""
    # A class passed by value may be anything.
    if not type_.pointers and type_.element is None:
        return None
    if argument.kind == "tensor map" or (argument.kind == "buffer") != bool(type_.pointers):
        return _ORDER
    if argument.kind == "buffer":
        return _problem_of_buffer(type_, argument)
    return _problem_of_scalar(type_, argument)


def _problem_of_buffer(type_: ParameterType, argument: Argument) -> str | None:
    if argument.written and type_.const:
        return f"A kernel writes to its outputs. {_ORDER}"
    if argument.dtype is None:
        return None
    declaration = f"{'const ' * type_.const}{CXX_TYPES.get(argument.dtype, 'unsigned char')}*"
    if type_.pointers > 1:
        return f"An array is one pointer: declare it {declaration}"
    element = type_.element
    if element is None or element.dtype is None:
        return None
    complex_ = argument.dtype.kind == "c"
    component = np.dtype(f"f{argument.dtype.itemsize // 2}") if complex_ else argument.dtype
    if element.dtype != component:
        return (
            f"Declare it {declaration}, or {'const ' * type_.const}void* for any array, or give it "
            f"an array of {element.dtype}"
        )
    if argument.bytes % element.bytes:
        return (
            f"Its {argument.bytes} bytes are no multiple of the {element.bytes} of {type_.base}: "
            f"pad it, or declare {declaration}"
        )
    return None


def _problem_of_scalar(type_: ParameterType, argument: Argument) -> str | None:
    dtype, element = argument.dtype, type_.element
    assert dtype is not None
    # A structured type is a class or a vector of the kernel, whose size is checked elsewhere.
    if dtype.names is not None or element is None:
        return None
    wanted = element.dtype or np.dtype("i1" if type_.base == "char" else "u1")
    if element.lanes == 1 and (wanted == dtype or _same_integer(wanted, dtype, argument.value)):
        return None
    return f"Declare it {CXX_TYPES.get(dtype, 'as a class')}, or pass np.{wanted}(...)"


def _same_integer(wanted: np.dtype[Any], dtype: np.dtype[Any], value: Any) -> bool:
    """Return whether a signed and an unsigned type have the same bits for a value."""
    return (
        {wanted.kind, dtype.kind} == {"i", "u"}
        and wanted.itemsize == dtype.itemsize
        and 0 <= int(value) < 1 << (8 * dtype.itemsize - 1)
    )


def alignments(types: Sequence[ParameterType] | None, count: int) -> tuple[int, ...]:
    """Return what the addresses of a kernel's first arrays are multiples of, by their types."""
    if types is None:
        return (1,) * count
    return tuple(
        type_.element.alignment if type_.pointers == 1 and type_.element else 1
        for type_ in types[:count]
    )
