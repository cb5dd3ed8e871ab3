"""Kernels of a text, compiled one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_tilekern.compilation.compiler import Compiled, Kernel, Source, compile_kernels


def compile_source(
    source: str,
    names: Sequence[str],
    *,
    arch: str,
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    file: str = "kernel.cu",
) -> Compiled:
    """Compile the kernels of these names."""
    text = Source(source, file, headers or {})
    return compile_kernels(*(Kernel(text, name, tuple(options)) for name in names), arch=arch)
