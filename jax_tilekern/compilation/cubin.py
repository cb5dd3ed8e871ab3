"""A compiled kernel: its description from the cubin and from ptxas."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Attributes of a kernel's ``.nv.info.<symbol>`` section.
_MAX_THREADS = 0x05
_KERNEL_PARAMETER = 0x17
# Attributes of the ``.nv.info`` section, of symbols.
_MIN_STACK_SIZE = 0x12
_REGISTERS = 0x2F
# The ELF ABI since CUDA 13; the other one has the architecture in other bits.
_NEW_ABI = 0x41
# Shared memory of a CTA that the system reserves, from Hopper on.
_RESERVED_SHARED_BYTES = 1024
_HARDWARE_MAX_THREADS = 1024


@dataclass(frozen=True)
class Entry:
    """A compiled kernel.

    Attributes
    ----------
    name
        The C++ name expression that requested it.
    symbol
        Its mangled name, by which the driver finds it.
    registers
        Registers per thread.
    spill_bytes
        Bytes per thread of registers spilled to and loaded from local memory.
    stack_bytes
        Bytes per thread of local memory: spilled registers, and arrays that are not in registers.
    serialized
        Whether ptxas made each wgmma wait for the one before it.
    shared_memory_bytes
        Static shared memory per CTA.
    max_threads
        The maximal number of threads per CTA: its launch bound, or the hardware's limit.
    parameter_bytes
        Sizes of its parameters, in order.
    cubin
        The ELF image that contains it, which the driver loads.
    """

    name: str
    symbol: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    serialized: bool
    shared_memory_bytes: int
    max_threads: int
    parameter_bytes: tuple[int, ...]
    cubin: bytes = field(repr=False)


def read_entry(name: str, symbol: str, cubin: bytes, report: str | None) -> Entry:
    """Describe a kernel.

    Parameters
    ----------
    name
        Its name expression.
    symbol
        Its mangled name.
    cubin
        The ELF image that contains it.
    report
        The output of ``ptxas --verbose``. Without one spilled registers are only a part of the
        stack.

    Raises
    ------
    ValueError
        If the cubin or the report does not mention the kernel.
    """
    sections = _sections(cubin)
    info = sections.get(f".nv.info.{symbol}")
    if info is None:
        raise ValueError(f"the cubin has no kernel {symbol}")
    resources = _resources(sections)
    shared = len(sections.get(f".nv.shared.{symbol}", b""))
    if target_of(cubin) >= 90 and shared >= _RESERVED_SHARED_BYTES:
        shared -= _RESERVED_SHARED_BYTES
    max_threads, parameter_bytes = _read_info(info)
    return Entry(
        name=name,
        symbol=symbol,
        registers=resources.get((_REGISTERS, symbol), 0),
        spill_bytes=0 if report is None else _spill_bytes(symbol, report),
        stack_bytes=resources.get((_MIN_STACK_SIZE, symbol), 0),
        serialized=f"'{symbol}'" in "".join(re.findall("are serialized due to .*", report or "")),
        shared_memory_bytes=shared,
        max_threads=max_threads,
        parameter_bytes=parameter_bytes,
        cubin=cubin,
    )


def _spill_bytes(symbol: str, report: str) -> int:
    found = re.search(
        rf"Compiling entry function '{re.escape(symbol)}'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        report,
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"ptxas reported nothing on {symbol}:\n{report}")
    return int(found[1]) + int(found[2])


def is_cubin(content: bytes) -> bool:
    """Return whether a content is a 64-bit ELF image for NVIDIA GPUs."""
    return content[:5] == b"\x7fELF\x02" and content[18:20] == b"\xbe\0"


def target_of(cubin: bytes) -> int:
    """Return the compute capability that a cubin is for, such as 90."""
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    sm: int = (flags >> 8 if cubin[7] == _NEW_ABI else flags) & 0xFF
    return sm


def kernels_of(cubin: bytes) -> tuple[str, ...]:
    """Return the symbols of a cubin's kernels."""
    prefix = ".nv.info."
    return tuple(x.removeprefix(prefix) for x in _sections(cubin) if x.startswith(prefix))


@functools.lru_cache(maxsize=256)
def signature(symbol: str) -> tuple[str, str] | None:
    """Return a C++ function with its result, and its parameters' types, or ``None`` without these.

    ``extern "C"`` names have none. The C++ runtime, which the package's own library loads too,
    reads the others.
    """
    text = _demangled(symbol) or ""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[at], 0)
        if depth == 0:
            return (text[:at], text[at + 1 : -1]) if text.endswith(")") else None
    return None


def _demangled(symbol: str) -> str | None:
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    text = demangle(symbol.encode(), None, None, None) if symbol.startswith("_Z") else None
    if text is None:
        return None
    try:
        return ctypes.string_at(text).decode()
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


def _sections(image: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit little-endian ELF image."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<3H", image, 0x3A)
    # Each header has the name's offset, the type, and (past flags and address) file offset and
    # size.
    headers = [struct.unpack_from("<II16xQQ", image, table + i * size) for i in range(count)]
    _, _, names, length = headers[names_index]
    strings = image[names : names + length]
    return {
        # A section of type 8 has no bytes in the file.
        _string(strings, name): bytes(length) if kind == 8 else image[offset : offset + length]
        for name, kind, offset, length in headers
    }


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _resources(sections: Mapping[str, bytes]) -> dict[tuple[int, str], int]:
    """Return the numbers that the ``.nv.info`` section has, by attribute and symbol."""
    symbols, strings = sections[".symtab"], sections[".strtab"]
    found = {}
    for code, value in _attributes(sections[".nv.info"]):
        if len(value) == 8:
            index, number = struct.unpack("<2I", value)
            (name,) = struct.unpack_from("<I", symbols, 24 * index)
            found[code, _string(strings, name)] = number
    return found


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a section that have a value of several bytes."""
    at = 0
    while at < len(info):
        # Each attribute is a format, a code and a 16-bit value; format 4 is followed by that many
        # bytes.
        form, code, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:
            yield code, info[at : at + value]
            at += value


def _read_info(info: bytes) -> tuple[int, tuple[int, ...]]:
    """Return a kernel's launch bound and its parameters' sizes."""
    max_threads = _HARDWARE_MAX_THREADS
    sizes: dict[int, int] = {}
    for code, value in _attributes(info):
        if code == _MAX_THREADS:
            x, y, z = struct.unpack_from("<3I", value)
            max_threads = x * y * z
        elif code == _KERNEL_PARAMETER:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", value)
            sizes[ordinal] = packed >> 18
    return max_threads, tuple(sizes[ordinal] for ordinal in sorted(sizes))
