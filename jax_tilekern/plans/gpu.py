"""The GPU that a plan is made for: what the planners and the compiler need to know of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

# Architectures whose matrix instructions exist only in the architecture-specific instruction set
# (wgmma and setmaxnreg on 9.0, tcgen05 on 10.x). Elsewhere the plain name runs more widely.
_ARCH_SPECIFIC = {(9, 0), (10, 0), (10, 3), (11, 0)}


class NoGpu(RuntimeError):
    """There is no GPU to plan for; the message says why, in words that ``explain`` can show."""


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Attributes
    ----------
    compute_capability
        Major and minor, for example ``(9, 0)``.
    multiprocessors
        Number of streaming multiprocessors.
    shared_memory_bytes
        The most shared memory a block can have, static and dynamic, once it opts in.
    l2_bytes
        Size of the second-level cache.
    name
        The driver's name for it.
    """

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory_bytes: int
    l2_bytes: int
    name: str

    @property
    def arch(self) -> str:
        """NVRTC's name of the architecture, ``sm_80`` or ``sm_90a``."""
        major, minor = self.compute_capability
        suffix = "a" if self.compute_capability in _ARCH_SPECIFIC else ""
        return f"sm_{major}{minor}{suffix}"


# One well-known model of each architecture, for planning where that GPU is not at hand.
_A100 = Gpu((8, 0), 108, 163 << 10, 40 << 20, "NVIDIA A100-SXM4-40GB")
_A10 = Gpu((8, 6), 72, 99 << 10, 6 << 20, "NVIDIA A10")
_RTX_4090 = Gpu((8, 9), 128, 99 << 10, 72 << 20, "NVIDIA GeForce RTX 4090")
_H100 = Gpu((9, 0), 132, 227 << 10, 50 << 20, "NVIDIA H100 80GB HBM3")
_B200 = Gpu((10, 0), 148, 227 << 10, 126 << 20, "NVIDIA B200")
_RTX_5090 = Gpu((12, 0), 170, 99 << 10, 96 << 20, "NVIDIA GeForce RTX 5090")
_T4 = Gpu((7, 5), 40, 64 << 10, 4 << 20, "Tesla T4")

KNOWN_GPUS: dict[str, Gpu] = {
    gpu.arch: gpu for gpu in (_T4, _A100, _A10, _RTX_4090, _H100, _B200, _RTX_5090)
}

# JAX's own kind of context: its value is part of the key under which JAX keeps what it has
# lowered, so that one function can be lowered for one GPU and then for another.
_target = jax.make_user_context(None)


def known_gpu(arch: str) -> Gpu:
    """Return the well-known model of an architecture.

    Parameters
    ----------
    arch
        ``"sm_80"``, ``"sm_90"`` or ``"sm_90a"``, ...; the suffix may be left out.

    Raises
    ------
    ValueError
        If no model of that architecture is known; pass a :class:`Gpu` instead.
    """
    gpu = KNOWN_GPUS.get(arch) or KNOWN_GPUS.get(f"{arch}a")
    if gpu is None:
        raise ValueError(f"no GPU is known for {arch!r}; known are {', '.join(KNOWN_GPUS)}")
    return gpu


@contextmanager
def gpu_target(gpu: Gpu | str) -> Iterator[Gpu]:
    """Plan and lower for ``gpu`` inside the context, whatever this machine has.

    For ahead-of-time lowering and tests. Holds for the current thread; trace and lower inside.

    Parameters
    ----------
    gpu
        A :class:`Gpu`, or an architecture such as ``"sm_90"`` for its well-known model.
    """
    chosen = known_gpu(gpu) if isinstance(gpu, str) else gpu
    with _target(chosen):
        yield chosen


def current_gpu() -> Gpu:
    """Return the GPU to plan for: the target of :func:`gpu_target`, else this process's own.

    Raises
    ------
    NoGpu
        If the driver shows none, or shows several models of which no one plan can serve all.
    """
    target: Gpu | None = _target.value
    if target is not None:
        return target
    found = _visible_gpu()
    if isinstance(found, str):
        raise NoGpu(found)
    return found


@functools.cache
def _visible_gpu() -> Gpu | str:
    """Return the model of the visible GPUs, or why there is not exactly one."""
    from jax_tilekern import _core

    devices = _core.cuda_devices()
    if isinstance(devices, str):
        return devices
    models = {
        Gpu(
            compute_capability=device.compute_capability,
            multiprocessors=device.sm_count,
            shared_memory_bytes=device.shared_memory_bytes,
            l2_bytes=device.l2_bytes,
            name=device.name,
        )
        for device in devices
    }
    if len(models) == 1:
        return models.pop()
    # One executable may run on each of them, and a cubin serves one architecture.
    if len({gpu.compute_capability for gpu in models}) > 1:
        names = ", ".join(sorted(f"{gpu.name} ({gpu.arch})" for gpu in models))
        return f"GPUs of several architectures are visible: {names}; CUDA_VISIBLE_DEVICES picks"
    # Same architecture, different size: a plan for the smallest is right on all.
    return min(models, key=lambda gpu: (gpu.shared_memory_bytes, gpu.multiprocessors, gpu.name))
