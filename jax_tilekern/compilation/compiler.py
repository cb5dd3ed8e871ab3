"""CUDA C++ text to cubin through NVRTC, and PTX through nvJitLink, cached in memory and on disk.

NVRTC is the copy that JAX's CUDA wheels bring; it needs neither a toolkit nor a GPU, and is loaded
by the first compilation.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_tilekern.compilation import kernel_cache
from jax_tilekern.compilation.cubin import Entry, read_entry
from jax_tilekern.compilation.headers import Headers, cuda_folder, headers_of
from jax_tilekern.compilation.image import Image
from jax_tilekern.compilation.kernel_cache import CacheInfo
from jax_tilekern.compilation.nvjitlink import assemble, nvjitlink_identity
from jax_tilekern.compilation.nvrtc import (
    CompileError,
    NvrtcNotFound,
    nvrtc,
    nvrtc_identity,
    without_report,
)

__all__ = [
    "CacheInfo", "CompileError", "Compiled", "Entry", "Kernel", "NotCompiled", "NvrtcNotFound",
    "Source", "cache_info", "clear_cache", "compile_kernels", "cuda_folder", "nvrtc",
    "without_compiling",
]  # fmt: skip

# A part of every cache key: increment it when the options below or the format of an entry change.
_CACHE_FORMAT = 3
_MEMORY_ENTRIES = 256
_logger = logging.getLogger("jax_tilekern")
_LANGUAGE = (
    "-std=c++20",
    # A function without an execution space is a device function: headers need no decoration.
    "-default-device",
    # nvcc defines these two without an #include.
    "-DINFINITY=__builtin_bit_cast(float,0x7f800000)",
    "-DNAN=__builtin_bit_cast(float,0x7fffffff)",
)
# Options that include files which the cache key does not cover.
_FILE_OPTIONS = ("-I", "--include-path", "-include", "--pre-include")


@dataclass(frozen=True)
class Source:
    """CUDA C++ text.

    ``#include "x.cuh"`` and ``#include <tilekern/x.cuh>`` find the package's device code;
    :mod:`jax_tilekern.compilation.headers` says which other headers there are.

    Attributes
    ----------
    text
        The text itself.
    file
        What the compiler's messages call it. It is part of the cache key, so the same text has the
        same name in every process.
    headers
        Further headers: the name as an ``#include`` has it, and the text.
    folders
        Folders of further headers.
    """

    text: str
    file: str = "kernel.cu"
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile.

    Attributes
    ----------
    source
        A ``.cuh`` file of the package's device code, for example ``"gemm/sm90/matmul.cuh"``; or the
        text of a kernel that is generated, or a user's; or a user's PTX or cubin.
    name
        The C++ name expression of the kernel, for example ``"tilekern::matmul<128, 256>"``.
    options
        Further NVRTC options, for example ``("-DSTAGES=4",)``. With an include path among them the
        result is not cached on disk.
    """

    source: str | Source | Image
    name: str
    options: tuple[str, ...] = ()

    @property
    def text(self) -> Source | Image:
        """The text of the kernel that is compiled."""
        if not isinstance(self.source, str):
            return self.source
        return Source(f'#include "{self.source}"\n', f"{self.source.removesuffix('.cuh')}.cu")


@dataclass(frozen=True)
class Compiled:
    """Compiled kernels.

    Attributes
    ----------
    arch
        The architecture they were compiled for.
    entries
        The requested kernels.
    log
        The compiler's warnings; empty when there are none.
    """

    arch: str
    entries: tuple[Entry, ...]
    log: str

    def entry(self, name: str) -> Entry:
        """Return the kernel of a name expression.

        Raises
        ------
        KeyError
            If it was not requested.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"{name} was not compiled, only {[entry.name for entry in self.entries]}")


class NotCompiled(Exception):
    """Inside :func:`without_compiling`: no cache has a kernel."""


_compiles = contextvars.ContextVar("compiles", default=True)


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """Have :func:`compile_kernels` raise :class:`NotCompiled` where no cache has a kernel."""
    token = _compiles.set(False)
    try:
        yield
    finally:
        _compiles.reset(token)


def compile_kernels(*kernels: Kernel, arch: str) -> Compiled:
    """Compile kernels side by side, each into a cubin of its own.

    Plans that have a kernel in common then compile and load it once.

    Parameters
    ----------
    kernels
        One or more.
    arch
        NVRTC's name of the architecture, such as ``"sm_90a"``.

    Raises
    ------
    ValueError
        If there is no kernel.
    CompileError
        If NVRTC rejects them.
    NvrtcNotFound
        If there is no NVRTC.
    """
    if not kernels:
        raise ValueError("no kernel, so nothing to compile")
    requests = [_request(kernel, arch) for kernel in dict.fromkeys(kernels)]
    if not _compiles.get() and not all(request.is_cached() for request in requests):
        raise NotCompiled
    # This thread compiles the first kernel that is not on disk, and further threads the others:
    # NVRTC runs without the interpreter's lock.
    missing = [x for x in requests if not x.is_on_disk()] if len(requests) > 1 else []
    for request in missing[1:]:
        # While the interpreter exits, no thread can be started.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=request.compile_ahead).start()
    # A request that a thread is compiling waits for that thread.
    found = [request.compiled() for request in requests]
    return Compiled(
        arch,
        tuple(entry for compiled in found for entry in compiled.entries),
        "\n".join(compiled.log for compiled in found if compiled.log),
    )


def _request(kernel: Kernel, arch: str) -> _Request:
    text = kernel.text
    if isinstance(text, Image):
        return _ImageRequest(text, kernel.name, arch)
    return _SourceRequest(text, kernel.name, arch, kernel.options)


@dataclass(frozen=True)
class _Request:
    """A kernel of one text, for one architecture."""

    source: Any
    name: str
    arch: str

    @property
    def _key(self) -> str:
        raise NotImplementedError

    @property
    def _is_kept_on_disk(self) -> bool:
        return True

    def _build(self) -> Compiled:
        raise NotImplementedError

    def is_on_disk(self) -> bool:
        """Whether the disk cache has an entry for it, which may be damaged."""
        return kernel_cache.contains(self._key)

    def is_cached(self) -> bool:
        """Whether a cache has it, or it is never cached."""
        return not self._is_kept_on_disk or _memory.has(self._key) or self.is_on_disk()

    def compiled(self) -> Compiled:
        """Return what it compiles to, from a cache if one has it."""
        if not self._is_kept_on_disk:
            return self._build()
        return _memory.get(self._key, self._read_or_build)

    def compile_ahead(self) -> None:
        """Compile it for :meth:`compiled`, which raises the errors."""
        with contextlib.suppress(CompileError, NvrtcNotFound):
            self.compiled()

    def _read_or_build(self) -> Compiled:
        start = time.perf_counter()
        content = kernel_cache.read(self._key)
        if content is None:
            how, compiled = "compiled", self._build()
            kernel_cache.write(self._key, _encoded(compiled))
        else:
            how, compiled = "read from the kernel cache", _decoded(content)
        seconds = time.perf_counter() - start
        _logger.info("kernel %s for %s: %s in %.3f s", self.name, self.arch, how, seconds)
        return compiled


@dataclass(frozen=True)
class _SourceRequest(_Request):
    options: tuple[str, ...]

    @functools.cached_property
    def _headers(self) -> Headers:
        return headers_of(self.source.text, self.source.headers, self.source.folders)

    @property
    def _flags(self) -> tuple[str, ...]:
        return (
            f"--gpu-architecture={self.arch}",
            *_LANGUAGE,
            # Only the report of ptxas has registers and spills.
            "--ptxas-options=--verbose",
            *self.options,
            *self._headers.options,
        )

    @functools.cached_property
    def _key(self) -> str:
        return _cache_key(
            str(_CACHE_FORMAT), nvrtc_identity(), self.source.file, self.source.text,
            *_flat(self._headers.texts.items()), *self._headers.versions,
            "names", self.name, "flags", *self._flags,
        )  # fmt: skip

    @property
    def _is_kept_on_disk(self) -> bool:
        return not any(option.startswith(_FILE_OPTIONS) for option in self.options)

    def _build(self) -> Compiled:
        output = nvrtc().compile(
            self.source.text,
            file=self.source.file,
            name=self.name,
            options=(*self._flags, *_without_driver_cache()),
            headers=self._headers.with_real_names(),
        )
        entry = read_entry(self.name, output.symbol, output.cubin, output.log)
        return Compiled(self.arch, (entry,), without_report(output.log))


class _ImageRequest(_Request):
    @property
    def _key(self) -> str:
        digest = hashlib.sha256(self.source.content).hexdigest()
        tool = "cubin" if self.source.is_cubin else nvjitlink_identity()
        return _cache_key(str(_CACHE_FORMAT), tool, self.source.file, digest, self.name, self.arch)

    @property
    def _is_kept_on_disk(self) -> bool:
        return not self.source.is_cubin

    def _build(self) -> Compiled:
        image: Image = self.source
        symbol = image.symbol(self.name)
        if symbol is None:
            found = f"but {', '.join(image.names)}" if image.names else "and no other"
            message = f"{image.file} has no kernel {self.name}, {found}"
            raise CompileError(message, "")
        image.check_target(self.arch)
        cubin, log = image.content, ""
        if not image.is_cubin:
            cubin, log = assemble(image.content, file=image.file, arch=self.arch)
        # Some versions of nvJitLink report nothing.
        entry = read_entry(self.name, symbol, cubin, log if symbol in log else None)
        return Compiled(self.arch, (entry,), log="")


def compile_to_ptx(kernel: Kernel, *, arch: str) -> str:
    """Return the PTX of a kernel, which ptxas would assemble, for people to read.

    Errors are those of :func:`compile_kernels`; a cubin is a ``ValueError``. Nothing is cached.
    """
    source = kernel.text
    if isinstance(source, Image):
        if source.is_cubin:
            raise ValueError(f"{source.file} is a cubin, of which there is no PTX")
        return source.text
    architecture = f"--gpu-architecture={arch.replace('sm', 'compute')}"
    headers = headers_of(source.text, source.headers, source.folders)
    return nvrtc().compile_to_ptx(
        source.text,
        file=source.file,
        name=kernel.name,
        options=(architecture, *_LANGUAGE, *kernel.options, *headers.options),
        headers=headers.with_real_names(),
    )


def _without_driver_cache() -> tuple[str, ...]:
    """Keep NVRTC from answering out of the driver's cache, which keeps cubins but no reports."""
    return ("--no-cache",) if nvrtc().version >= (12, 9) else ()


def _flat(pairs: Iterable[tuple[str, str]]) -> Iterable[str]:
    for pair in pairs:
        yield from pair


def _cache_key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        # The length keeps different lists of parts from becoming the same bytes.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class _Memory:
    """The last few results. Threads that request the same one wait for a single build."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}

    def get(self, key: str, build: Callable[[], Compiled]) -> Compiled:
        with self._lock:
            # A slot that is used moves to the end, so the first one was used least recently.
            slot = self._slots.pop(key, None) or _Slot()
            self._slots[key] = slot
            if len(self._slots) > _MEMORY_ENTRIES:
                del self._slots[next(iter(self._slots))]
        with slot.lock:
            if slot.compiled is None:
                slot.compiled = build()
            return slot.compiled

    def has(self, key: str) -> bool:
        slot = self._slots.get(key)
        return slot is not None and slot.compiled is not None

    def clear(self) -> None:
        with self._lock:
            self._slots.clear()


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.compiled: Compiled | None = None


_memory = _Memory()

# -- An entry of the disk cache: a line of JSON, and the cubin. ------------------------------------


def cache_info() -> CacheInfo:
    """Return where the disk cache is and how much is in it."""
    return kernel_cache.info()


def clear_cache() -> CacheInfo:
    """Empty the cache, in memory and on disk, and return what was on disk."""
    _memory.clear()
    return kernel_cache.clear()


def _decoded(content: bytes) -> Compiled:
    line, _, cubin = content.partition(b"\n")
    fields = json.loads(line)
    entries = tuple(
        Entry(**{**entry, "parameter_bytes": tuple(entry["parameter_bytes"]), "cubin": cubin})
        for entry in fields["entries"]
    )
    return Compiled(fields["arch"], entries, fields["log"])


def _encoded(compiled: Compiled) -> bytes:
    entries = [dataclasses.asdict(entry) for entry in compiled.entries]
    # A text is compiled for one kernel.
    cubin: bytes
    (cubin,) = (entry.pop("cubin") for entry in entries)
    line = json.dumps({"arch": compiled.arch, "entries": entries, "log": compiled.log})
    return line.encode() + b"\n" + cubin
