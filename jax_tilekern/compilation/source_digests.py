"""Digests of the sources that decide a kernel's speed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from jax_tilekern.compilation.compiler import cuda_folder


def source_digests() -> dict[str, str | None]:
    """Return SHA-256 digests of the sources that decide a kernel's speed.

    Returns
    -------
    dict[str, str | None]
        Digests of the CUDA device code, of the planners, and of the CPU kernels' sources. The last
        is ``None`` for an installed package, which has no such sources.
    """
    package = Path(__file__).parent.parent
    cpu_sources = package.parent / "ffi" / "cpu"
    return {
        "cuda": _digest(cuda_folder().rglob("*.cuh"), cuda_folder()),
        "plans": _digest((package / "plans").rglob("*.py"), package),
        "cpu": _digest(cpu_sources.rglob("*"), cpu_sources) if cpu_sources.is_dir() else None,
    }


def _digest(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
