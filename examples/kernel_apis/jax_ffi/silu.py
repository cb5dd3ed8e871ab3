"""SiLU with jax.ffi: build the library with CMake and nvcc, then register its handler."""

import ctypes
from pathlib import Path

import jax

library = ctypes.cdll.LoadLibrary(str(Path(__file__).parent / "build/libsilu.so"))
handler = jax.ffi.pycapsule(library.SiluHandler)
jax.ffi.register_ffi_target("silu", handler, platform="CUDA")


def silu(x: jax.Array) -> jax.Array:
    """Return x * sigmoid(x) of a float32 array."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("silu", out, vmap_method="broadcast_all")(x)
