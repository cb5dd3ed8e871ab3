"""NVRTC, NVIDIA's run-time compiler of CUDA C++, by :mod:`ctypes`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_tilekern.compilation.library_identity import file_identity

# By CUDA version: the library's folder in the wheels' ``nvidia``, and the wheel.
_FOLDERS = {13: "cu13/lib", 12: "cuda_nvrtc/lib"}
_WHEELS = {13: "nvidia-cuda-nvrtc>=13,<14", 12: "nvidia-cuda-nvrtc-cu12"}
# By CUDA version: the folders of headers in the wheels' ``nvidia``.
_INCLUDES = {
    13: ("cu13/include", "cu13/include/cccl"),
    12: ("cuda_runtime/include", "cuda_cccl/include", "curand/include"),
}
_load_lock = threading.Lock()


class NvrtcNotFound(RuntimeError):
    """There is no NVRTC in this environment; the message has the command that installs it."""


class CompileError(RuntimeError):
    """NVRTC rejected a kernel.

    Attributes
    ----------
    log
        The compiler's output.
    """

    def __init__(self, message: str, log: str) -> None:
        # An exception is pickled as its arguments, and processes of a pool return theirs so.
        super().__init__(message, log)
        self.log = log

    def __str__(self) -> str:
        message: str = self.args[0]
        return message


@dataclass(frozen=True)
class Output:
    """The result of a compilation.

    Attributes
    ----------
    cubin
        The ELF image.
    symbol
        Mangled name of the kernel.
    log
        The output of the compiler and of ptxas.
    """

    cubin: bytes
    symbol: str
    log: str


def nvrtc() -> Nvrtc:
    """Return NVRTC, loaded on the first call.

    Raises
    ------
    NvrtcNotFound
        If there is none.
    """
    # The lock lets one thread load; functools.cache alone would let several.
    with _load_lock:
        return _load()


@functools.cache
def nvrtc_identity() -> str:
    """Return what distinguishes the NVRTC that :func:`nvrtc` loads from any other.

    A file is identified without loading it, which takes longer than to read cached kernels.

    Raises
    ------
    NvrtcNotFound
        If there is none.
    """
    _, first = next(_candidates())
    if os.path.isabs(first):
        return file_identity(first)
    library = nvrtc()
    return f"{library.path} {library.version}"


@functools.cache
def _load() -> Nvrtc:
    tried: list[str] = []
    for _, path in _candidates():
        try:
            if os.path.isabs(path):
                # NVRTC opens it by name, and that of CUDA 13.0 does not look beside itself.
                for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins))
            return Nvrtc(ctypes.CDLL(path), path)
        except OSError as error:
            tried.append(f"{path}: {error}")
            if os.path.isabs(path):
                break  # nvrtc_identity() has named this file.
    raise NvrtcNotFound(
        "no NVRTC, which compiles CUDA kernels, in this Python environment or on the system; "
        f"`pip install '{_WHEELS[cuda_majors()[0]]}'` adds it (tried {'; '.join(tried)})"
    )


def cuda_majors() -> list[int]:
    """Return CUDA's major versions, those of JAX's installed plugins first.

    The driver that serves JAX's plugin loads cubins of the plugin's CUDA version, and need not
    load those of a newer one.
    """
    return sorted(_FOLDERS, key=lambda major: not _is_installed(f"jax_cuda{major}_plugin"))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def toolkit_folders() -> list[str]:
    """Return the folders with headers of the CUDA toolkit that the NVRTC in use is of."""
    _, first = next(_candidates())
    if os.path.isabs(first):
        majors, roots = cuda_majors(), _wheel_folders()
        found = [f"{root}/{x}" for m in majors for x in _INCLUDES[m] for root in roots]
        for prefix in _conda_prefix():
            # The folder is named for the platform, such as x86_64-linux.
            targets = sorted(str(target) for target in Path(prefix).glob("targets/*/include"))
            found += [f"{target}{x}" for target in targets for x in ("", "/cccl")]
    else:
        found = ["/usr/local/cuda/include", "/usr/local/cuda/include/cccl"]
    return [folder for folder in found if os.path.isdir(folder)]


def toolkit_wheel(name: str) -> str:
    """Return the wheel of a part of the CUDA toolkit, such as ``"cuda-runtime"``."""
    major = cuda_majors()[0]
    return f"nvidia-{name}-cu12" if major == 12 else f"nvidia-{name}"


def _wheel_folders() -> Sequence[str]:
    """Return the folders ``nvidia`` of installed wheels."""
    wheels = importlib.util.find_spec("nvidia")
    return (wheels and wheels.submodule_search_locations) or ()


def _conda_prefix() -> Sequence[str]:
    """Return the folder of the active conda environment, if there is one."""
    prefix = os.environ.get("CONDA_PREFIX")
    return (prefix,) if prefix else ()


def library_paths(name: str, folders: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Yield CUDA versions, and where a library may be.

    That is the wheel's file, then that of the active conda environment, then the loader's.
    ``folders`` are those of the wheels in ``nvidia``, by CUDA version.
    """
    for major in cuda_majors():
        library = f"{name}.so.{major}"
        in_environments = [os.path.join(root, folders[major], library) for root in _wheel_folders()]
        in_environments += [os.path.join(prefix, "lib", library) for prefix in _conda_prefix()]
        for path in in_environments:
            if os.path.isfile(path):
                yield major, path
        yield major, library


def _candidates() -> Iterator[tuple[int, str]]:
    return library_paths("libnvrtc", _FOLDERS)


def without_report(log: str) -> str:
    """Return the output of a compiler without what ptxas reports about each kernel."""
    # Notes of ptxas about wgmma are marked as information too, and are kept.
    report = re.compile(r"ptxas( info +: (?!\(C\d+\))| +\.)")
    return "\n".join(line for line in log.splitlines() if line and not report.match(line))


class Nvrtc:
    """A loaded NVRTC.

    Attributes
    ----------
    path
        The library's file, or its bare name where the system's loader found it.
    version
        Major and minor.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = path
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(
        self,
        source: str,
        *,
        file: str,
        name: str,
        options: Sequence[str],
        headers: Mapping[str, str],
    ) -> Output:
        """Compile ``source`` for an architecture such as ``sm_90a``.

        Parameters
        ----------
        source
            CUDA C++ text.
        file
            The name of the source in messages.
        name
            Name expression of the kernel to instantiate.
        options
            NVRTC's options.
        headers
            Texts of headers, by the name in the ``#include``.

        Raises
        ------
        CompileError
            If NVRTC rejects it.
        """
        with self._compiled(source, file, name, options, headers) as (program, log):
            return Output(self._bytes("CUBIN", program), self._symbol(program, name), log)

    def compile_to_ptx(
        self,
        source: str,
        *,
        file: str,
        name: str,
        options: Sequence[str],
        headers: Mapping[str, str],
    ) -> str:
        """Compile ``source`` for a virtual architecture such as ``compute_90a`` to PTX.

        Parameters and errors are those of :meth:`compile`.
        """
        with self._compiled(source, file, name, options, headers) as (program, _):
            return self._bytes("PTX", program).rstrip(b"\0").decode()

    @contextlib.contextmanager
    def _compiled(
        self,
        source: str,
        file: str,
        name: str,
        options: Sequence[str],
        headers: Mapping[str, str],
    ) -> Iterator[tuple[ctypes.c_void_p, str]]:
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            file.encode(),
            len(headers),
            self._strings(list(headers.values())),
            self._strings(list(headers)),
        )
        try:
            self._call("nvrtcAddNameExpression", program, name.encode())
            status = self._library.nvrtcCompileProgram(
                program, len(options), self._strings(options)
            )
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                raise CompileError(
                    f"{self._error(status)} in {name} of {file}, compiled with "
                    f"NVRTC {'.'.join(map(str, self.version))} {' '.join(options)}:\n"
                    f"{without_report(log)}",
                    log,
                )
            yield program, log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function}: {self._error(status)}")

    def _error(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()

    def _strings(self, strings: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
        encoded = [string.encode() for string in strings]
        return (ctypes.c_char_p * len(encoded))(*encoded)

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        # NVRTC writes into the buffer, and Python shares small bytes objects.
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]

    def _symbol(self, program: ctypes.c_void_p, name: str) -> str:
        symbol = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(symbol))
        return (symbol.value or b"").decode()
