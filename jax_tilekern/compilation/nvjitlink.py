"""nvJitLink, NVIDIA's assembler and linker of PTX, by :mod:`ctypes`."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

from jax_tilekern.compilation.library_identity import file_identity
from jax_tilekern.compilation.nvrtc import (
    CompileError,
    NvrtcNotFound,
    library_paths,
    toolkit_wheel,
    without_report,
)

_FOLDERS = {13: "cu13/lib", 12: "nvjitlink/lib"}
_PTX = 2


class NvJitLinkNotFound(NvrtcNotFound):
    """There is no nvJitLink in this environment; the message has the command that installs it."""


def assemble(ptx: bytes, *, file: str, arch: str) -> tuple[bytes, str]:
    """Assemble PTX for an architecture such as ``sm_90a``; return the cubin and the log.

    Raises
    ------
    CompileError
        If nvJitLink rejects it.
    NvJitLinkNotFound
        If there is no nvJitLink.
    """
    return _load().assemble(ptx, file, arch)


@functools.cache
def nvjitlink_identity() -> str:
    """Return what distinguishes the library that :func:`assemble` uses from any other."""
    _, path = next(_candidates())
    return file_identity(path) if os.path.isabs(path) else path


@functools.cache
def _load() -> _NvJitLink:
    for major, path in _candidates():
        try:
            return _NvJitLink(ctypes.CDLL(path), major)
        except OSError:
            continue
    raise NvJitLinkNotFound(
        "no nvJitLink, which assembles PTX, in this Python environment or on the system; "
        f"`pip install {toolkit_wheel('nvjitlink')}` adds it"
    )


def _candidates() -> Iterator[tuple[int, str]]:
    return library_paths("libnvJitLink", _FOLDERS)


class _NvJitLink:
    def __init__(self, library: Any, major: int) -> None:
        self._library, self._major = library, major

    def assemble(self, ptx: bytes, file: str, arch: str) -> tuple[bytes, str]:
        handle = ctypes.c_void_p()
        # Only the report of ptxas has registers and spills.
        given = (f"-arch={arch}".encode(), b"-Xptxas=-v")
        options = (ctypes.c_char_p * len(given))(*given)
        status = self._call("Create", ctypes.byref(handle), len(given), options)
        if status:
            raise CompileError(f"nvJitLink does not assemble for {arch} (error {status})", "")
        try:
            size = ctypes.c_size_t(len(ptx) + 1)
            status = self._call("AddData", handle, _PTX, ptx, size, file.encode())
            status = status or self._call("Complete", handle)
            log = self._text("ErrorLog", handle) + self._text("InfoLog", handle)
            if status:
                raise CompileError(
                    f"nvJitLink rejects {file} for {arch} ({status}):\n{without_report(log)}", log
                )
            return self._bytes("LinkedCubin", handle), log
        finally:
            self._call("Destroy", ctypes.byref(handle))

    def _call(self, function: str, *arguments: Any) -> int:
        # The plain names are inline functions of the header.
        call = getattr(self._library, f"__nvJitLink{function}_{self._major}_0")
        status: int = call(*arguments)
        return status

    def _text(self, what: str, handle: Any) -> str:
        return self._bytes(what, handle).rstrip(b"\0").decode(errors="replace")

    def _bytes(self, what: str, handle: Any) -> bytes:
        size = ctypes.c_size_t()
        if self._call(f"Get{what}Size", handle, ctypes.byref(size)) or not size.value:
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", handle, buffer)
        content: bytes = buffer.raw
        return content
