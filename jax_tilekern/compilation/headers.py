"""The headers that a CUDA text includes, and how to get one that is not there.

NVRTC has no headers of its own. A text finds, in this order, the headers that come with it, the
folders that come with it, the package's device code, the standard headers that ``standard.cuh``
stands for, and those of the CUDA toolkit, where a wheel or the system has them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_tilekern.compilation.nvrtc import toolkit_folders, toolkit_wheel

# There is no anchor to the start of the line, because it would take ten times as long.
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*["<]([^">]+)[">]')
_STANDARD = frozenset(
    f"{prefix}{name}{suffix}"
    for prefix, suffix in (("c", ""), ("", ".h"))
    for name in ("assert", "float", "limits", "math", "stddef", "stdint", "stdio", "stdlib")
) | {"cstring", "string.h", "cuda_runtime.h", "device_launch_parameters.h"}
# Headers of libcu++ that take the place of the standard library's.
_LIBCUXX = frozenset((
    "algorithm", "array", "atomic", "barrier", "bit", "bitset", "chrono", "complex", "concepts",
    "functional", "initializer_list", "iterator", "latch", "limits", "mdspan", "new", "numbers",
    "numeric", "optional", "ratio", "semaphore", "span", "string_view", "tuple", "type_traits",
    "utility", "variant", "version",
))  # fmt: skip
_HOST = "#ifndef __CUDACC_RTC__ and #endif"
_HEADER_OF = {
    **dict.fromkeys(("half", "half2", "__half", "__half2", "__float2half"), "cuda_fp16.h"),
    **dict.fromkeys(
        ("nv_bfloat16", "nv_bfloat162", "__nv_bfloat16", "__nv_bfloat162", "__float2bfloat16"),
        "cuda_bf16.h",
    ),
    **dict.fromkeys(("__nv_fp8_e4m3", "__nv_fp8_e5m2"), "cuda_fp8.h"),
    **dict.fromkeys(("M_PI", "HUGE_VAL"), "math.h"),
    **dict.fromkeys(("FLT_MAX", "FLT_MIN", "FLT_EPSILON", "DBL_MAX", "DBL_EPSILON"), "float.h"),
    **dict.fromkeys(("INT_MAX", "INT_MIN", "UINT_MAX", "LLONG_MAX"), "limits.h"),
    **{f"{sign}int{bits}_t": "stdint.h" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Headers:
    """What a text includes, directly or not.

    Attributes
    ----------
    texts
        Headers by the name that an ``#include`` has.
    folders
        Where NVRTC finds others: those that come with the text, and the CUDA toolkit's, if the text
        includes one of its headers.
    files
        Headers in the folders that come with the text: path and content.
    """

    texts: Mapping[str, str]
    folders: tuple[str, ...]
    files: Mapping[str, str]

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options."""
        return tuple(f"--include-path={folder}" for folder in self.folders)

    @property
    def versions(self) -> tuple[str, ...]:
        """What changes when a header does, or another version of the toolkit is installed."""
        toolkit = set(self.folders) & set(toolkit_folders())
        return (
            *(str(os.stat(folder).st_mtime_ns) for folder in sorted(toolkit)),
            *(part for file in self.files.items() for part in file),
        )

    def with_real_names(self) -> dict[str, str]:
        """Return the texts, marked with the names of files that an editor or profiler can open."""
        paths = {name: cuda_folder() / name for name in self.texts}
        return {
            name: f'#line 1 "{paths[name]}"\n{text}' if os.path.isfile(paths[name]) else text
            for name, text in self.texts.items()
        }


@functools.cache
def cuda_folder() -> Path:
    """Return the folder of the package's device code.

    It lies inside an installed package, and in ``ffi/cuda`` of a checkout.
    """
    package = Path(__file__).parent.parent
    installed = package / "cuda"
    return installed if installed.is_dir() else package.parent / "ffi" / "cuda"


def headers_of(text: str, own: Mapping[str, str], folders: Sequence[str] = ()) -> Headers:
    """Return the headers that a text includes.

    Preprocessor conditions and comments are ignored: an unused header does no harm.

    Parameters
    ----------
    text
        CUDA C++.
    own
        Headers that come with it, by the name that an ``#include`` has.
    folders
        Folders of headers that come with it.

    Raises
    ------
    ValueError
        If a header of a folder has the name of one of the package's that is included too.
    """
    found: dict[str, str] = {}
    files: dict[str, str] = {}
    # Headers of a library may compute the name of one of the toolkit's.
    from_toolkit = bool(folders)
    # Texts, and where a file among them finds its neighbours; the package's see no folders.
    pending: list[tuple[str, tuple[str, ...]]] = [(text, tuple(folders))]
    in_folders: set[str] = set()
    while pending:
        including, searched = pending.pop()
        for name in _includes(including):
            path = None if name in own else _path_in(searched, name)
            if path is not None:
                in_folders.add(name)
                if path not in files:
                    files[path] = _content(path, os.stat(path).st_mtime_ns)
                    pending.append((files[path], (os.path.dirname(path), *folders)))
            elif name not in found:
                header = own[name] if name in own else _package_text(name)
                if header is not None:
                    found[name] = header
                    pending.append((header, tuple(folders) if name in own else ()))
                # NVRTC finds or reports a header that is not found here.
                elif not from_toolkit and _path_in(toolkit_folders(), name):
                    from_toolkit = True
    # NVRTC looks for the name of a header among the texts first.
    for name in in_folders & set(found):
        raise ValueError(
            f"header {name} of {_path_in(folders, name)} has the name of one of the library's, "
            "which another header includes: rename it"
        )
    everywhere = (*folders, *(toolkit_folders() if from_toolkit else ()))
    return Headers(dict(sorted(found.items())), everywhere, dict(sorted(files.items())))


def _path_in(folders: Sequence[str], name: str) -> str | None:
    for folder in folders:
        path = os.path.normpath(f"{folder}/{name}")
        if os.path.isfile(path):
            return path
    return None


@functools.lru_cache(maxsize=4096)
def _content(path: str, _modified: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


@functools.lru_cache(maxsize=8192)
def _includes(text: str) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(text))


def _package_text(name: str) -> str | None:
    if name in _STANDARD:
        return '#include "standard.cuh"\n'
    # NVRTC identifies headers by name alone, so each text gets one name.
    short = name.removeprefix("tilekern/")
    text = _read_once(cuda_folder(), short)
    return text if text is None or name == short else f'#include "{short}"\n'


@functools.cache
def _read_once(folder: Path, name: str) -> str | None:
    # A process keeps the text that it has read first, as it keeps the package's Python code.
    path = folder / name
    return path.read_text() if os.path.isfile(path) else None


def advice(log: str) -> str:
    """Return what to write or install for the headers that a compiler's log misses, or nothing."""
    return "\n".join(dict.fromkeys(_advice(log)))


def _advice(log: str) -> Iterator[str]:
    for name in re.findall(r'(?:could not|cannot) open source file "([^"]+)"', log):
        yield _how_to_get(name)
    for name in re.findall(r'identifier "(\w+)" is undefined', log):
        if name in _HEADER_OF:
            yield f"{name} is declared in a header: #include <{_HEADER_OF[name]}>"
    for name in re.findall(r'namespace "std" has no member "(\w+)"', log):
        yield (
            f"NVRTC has no C++ standard library. cuda::std::{name} of libcu++ takes the place of "
            f"std::{name}: `pip install {toolkit_wheel('cuda-cccl')}` adds <cuda/std/*>"
        )
    if "kernel launch could not be processed" in log:
        yield f"A launch is host code, which NVRTC does not compile: put it inside {_HOST}"
    if "uses too much shared data" in log:
        yield (
            "A larger array is dynamic shared memory: declare it extern __shared__, and give its "
            "bytes to shared_memory_bytes"
        )


def _how_to_get(name: str) -> str:
    if name.removeprefix("cccl/").startswith(("cuda/", "cub/", "thrust/", "nv/")):
        return f"<{name}> is part of CCCL: `pip install {toolkit_wheel('cuda-cccl')}` adds it"
    if name.startswith("curand"):
        return f"<{name}> is part of cuRAND: `pip install {toolkit_wheel('curand')}` adds it"
    if re.match(r"(cuda\w*|mma|cooperative_groups|cuComplex|math_constants|vector_\w+)\.h$", name):
        wheel = toolkit_wheel("cuda-runtime")
        return f"<{name}> is part of the CUDA runtime: `pip install {wheel}` adds it"
    if name in _LIBCUXX:
        wheel = toolkit_wheel("cuda-cccl")
        return (
            f"NVRTC has no C++ standard library. <cuda/std/{name}> of libcu++ takes the place of "
            f"<{name}>: `pip install {wheel}` adds it"
        )
    if re.fullmatch(r"\w+", name):
        return (
            f"NVRTC has no C++ standard library, and device code cannot use <{name}>: remove it, "
            f"or put it and the rest of the host code inside {_HOST}"
        )
    return (
        f"{name} is no header that is known here: pass the folder of it, include=..., or its text, "
        f'headers={{"{name}": ...}}'
    )
