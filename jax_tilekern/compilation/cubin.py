"""A compiled kernel: its description from the cubin and from ptxas, and the packed cubin."""

from __future__ import annotations

import base64
import functools
import re
import struct
import zlib
from dataclasses import dataclass, field

# Attributes of a kernel's ``.nv.info.<symbol>`` section.
_MAX_THREADS = 0x05
_KERNEL_PARAMETER = 0x17
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


def read_entry(name: str, symbol: str, cubin: bytes, report: str) -> Entry:
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
        The output of ``ptxas --verbose``.

    Raises
    ------
    ValueError
        If the cubin or the report does not mention the kernel.
    """
    usage = re.search(
        rf"Compiling entry function '{re.escape(symbol)}'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        report,
        re.DOTALL,
    )
    if usage is None:
        raise ValueError(f"ptxas reported nothing on {symbol}:\n{report}")
    shared = re.search(r"(\d+) bytes smem", usage[5])
    max_threads, parameter_bytes = _read_info(_section(cubin, f".nv.info.{symbol}"))
    return Entry(
        name=name,
        symbol=symbol,
        registers=int(usage[4]),
        spill_bytes=int(usage[2]) + int(usage[3]),
        stack_bytes=int(usage[1]),
        serialized=re.search(rf"are serialized due to .*'{re.escape(symbol)}'", report) is not None,
        shared_memory_bytes=int(shared[1]) if shared else 0,
        max_threads=max_threads,
        parameter_bytes=parameter_bytes,
        cubin=cubin,
    )


@functools.lru_cache(maxsize=256)
def demangled(symbol: str) -> str | None:
    """Return a C++ function with its parameters' types, or ``None`` if a name has none.

    ``extern "C"`` names have none. The C++ runtime, which the package's own library loads too,
    reads the others.
    """
    import ctypes

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


@functools.lru_cache(maxsize=256)
def packed(cubin: bytes) -> str:
    """Return a cubin as the text that ``ffi/packed_cubin.cc`` unpacks: deflated, in base85."""
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return base64.b85encode(deflate.compress(cubin) + deflate.flush()).decode()


def _section(image: bytes, name: str) -> bytes:
    """Return a section of a 64-bit little-endian ELF image."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<3H", image, 0x3A)
    # Each header has the name's offset, then (past type, flags and address) file offset and size.
    headers = [struct.unpack_from("<I20xQQ", image, table + i * size) for i in range(count)]
    names = headers[names_index][1]
    wanted = name.encode() + b"\0"
    for name_offset, offset, length in headers:
        if image.startswith(wanted, names + name_offset):
            return image[offset : offset + length]
    raise ValueError(f"the cubin has no section {name}")


def _read_info(info: bytes) -> tuple[int, tuple[int, ...]]:
    """Return a kernel's launch bound and its parameters' sizes."""
    max_threads = _HARDWARE_MAX_THREADS
    sizes: dict[int, int] = {}
    at = 0
    while at < len(info):
        # Each attribute is a format, a code and a 16-bit value; format 4 is followed by that many
        # bytes.
        form, code, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:
            continue
        if code == _MAX_THREADS:
            x, y, z = struct.unpack_from("<3I", info, at)
            max_threads = x * y * z
        elif code == _KERNEL_PARAMETER:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
            sizes[ordinal] = packed >> 18
        at += value
    return max_threads, tuple(sizes[ordinal] for ordinal in sorted(sizes))
