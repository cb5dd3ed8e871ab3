"""The GPU that a plan is made for: what the planners and the compiler need to know of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from jax_tilekern.scope import Setting

# Architectures some of whose MMA instructions exist only in the architecture-specific instruction
# set (wgmma and setmaxnreg on 9.0, tcgen05 on 10.x and 11.0, block scales on 12.x). A cubin for the
# plain name runs on more GPUs.
_ARCH_SPECIFIC = {(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)}
# On every architecture: threads of a warp, registers of an SM, bytes of shared memory of each CTA
# that the system has, and bytes of the widest access of a thread.
WARP = 32
SM_REGISTERS = 65536
RESERVED_SHARED_BYTES = 1024
VECTOR_BYTES = 16
# The share of the shorter of compute and memory time that the longer one does not hide (H100).
_NOT_HIDDEN = 0.15
# XLA's kernel behind another one: its microseconds, and the share of the memory bandwidth (H200).
_XLA_PASS, _XLA_SHARE = 1.2, 0.85


def overlapped_cycles(busy: float, memory: float) -> float:
    """Return the time of computation and memory accesses that overlap."""
    return max(busy, memory) + _NOT_HIDDEN * min(busy, memory)


def xla_pass_us(bytes_: float, gpu: Gpu) -> float:
    """Estimate the microseconds of XLA's kernel that reads and writes so many bytes each."""
    moved = 2 * bytes_ / (_XLA_SHARE * gpu.rates.memory_bandwidth)
    return _XLA_PASS + moved / gpu.rates.cycles_per_microsecond


class NoGpu(RuntimeError):
    """There is no GPU to plan for; the message says why, in words that ``explain`` can show."""


@dataclass(frozen=True)
class GpuRates:
    """How fast a GPU is, as the planners' cost models see it.

    A cost model only has to decide which of two kernels is faster, so each rate stands for many
    kernels. Times are in cycles of the SM clock.
    """

    cycles_per_microsecond: float  # The SM clock during long products.
    memory_bandwidth: float  # Bytes per cycle between memory and the GPU.
    l2_tma_bandwidth: float  # Bytes per cycle that TMA brings each SM from L2 while all SMs ask.
    # Bytes per cycle that ``cp.async`` brings one SM from L2 while few SMs ask.
    l2_load_bandwidth: float
    # Bytes per cycle that ``cp.async`` brings each SM from L2 while all SMs ask.
    l2_load_share: float
    shared_memory_bandwidth: float  # Bytes per cycle of one SM's shared memory.
    cta_cycles: float  # Cycles to start and to end a CTA.
    # Cycles of the first launch of a plan with its first loads, and of each launch that follows.
    launch_cycles: float
    next_launch_cycles: float
    # Microseconds that the GPU idles before a custom call of a program, and not before a kernel of
    # XLA's: XLA captures a custom call as a child graph. Times of a call alone have none of it.
    custom_call_us: float
    # By arithmetic, multiply-adds per cycle of one SM with ``mma.sync``, or on CUDA cores for
    # ``"f32"``.
    mma_macs: Mapping[str, int] = field(hash=False)
    # By arithmetic, multiply-adds per cycle of one SM with ``wgmma``.
    wgmma_macs: Mapping[str, int] = field(hash=False)


H100_RATES = GpuRates(
    # Measured on long products; the data sheet's boost clock is 1.83 GHz.
    cycles_per_microsecond=1700,
    # Measured: 3.0 TB/s at that clock. Long reads reach 3.07 TB/s, and the data sheet has 3.35.
    memory_bandwidth=1760,
    # Measured.
    l2_tma_bandwidth=62,
    # The port of an SM to L2 is 64 bytes wide; the share is an estimate.
    l2_load_bandwidth=64,
    l2_load_share=34,
    # CUDA Programming Guide: 32 banks of 4 bytes.
    shared_memory_bandwidth=128,
    # Measured on matrix-vector products (docs/tuning-log.md).
    cta_cycles=2500,
    # Measured: 2.6 us, and 2.4 us for each launch that follows.
    launch_cycles=4500,
    next_launch_cycles=4000,
    # Measured on an H200: 0.9 to 1.3 behind short kernels, and up to 1.9 behind long ones.
    custom_call_us=1.1,
    # A100 data sheet, dense: 312 TFLOP/s of bfloat16 by 108 SMs at 1.41 GHz, and so on; float8 is
    # Ada's. 100 stands between the A100's 64 and the H100's 128. Only the order of magnitude
    # matters, because these kernels mostly wait for bytes.
    mma_macs={
        "bf16": 1024, "f16": 1024, "tf32": 512, "f32": 100, "f64": 100, "int8": 2048,
        "fp8": 1024, "fp8_fast": 1024,
    },
    # H100 data sheet, dense: 989 TFLOP/s of bfloat16 by 132 SMs at 1.83 GHz, and so on.
    wgmma_macs={
        "bf16": 2048, "f16": 2048, "tf32": 1024, "int8": 4096, "fp8": 4096, "fp8_fast": 4096,
    },
)  # fmt: skip

# The SMs of an H100; 4.2 TB/s measured.
H200_RATES = dataclasses.replace(H100_RATES, memory_bandwidth=2475)
# By the driver's name; others count as H100s.
_RATES = {"NVIDIA H200": H200_RATES}


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Attributes
    ----------
    compute_capability
        Major and minor, for example ``(9, 0)``.
    sm_count
        Number of streaming multiprocessors (SMs).
    shared_memory_bytes
        The maximum shared memory of a CTA (thread block), static and dynamic, once it opts in.
    l2_bytes
        Size of the L2 cache.
    name
        The driver's name for it.
    rates
        What cost models count with: the rates of an H100, unless given.
    beside_collectives
        Whether collective operations may occupy some of the SMs while a kernel runs, as in a
        program of several devices.
    reserved_sms
        SMs that other launches of the same plan occupy while a product runs.
    """

    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory_bytes: int
    l2_bytes: int
    name: str
    rates: GpuRates = field(default=H100_RATES, repr=False)
    beside_collectives: bool = False
    reserved_sms: int = 0

    @property
    def available_sms(self) -> int:
        """Number of SMs that a product is planned for."""
        return self.sm_count - self.reserved_sms

    @property
    def arch(self) -> str:
        """NVRTC's name of the architecture, ``sm_80`` or ``sm_90a``."""
        major, minor = self.compute_capability
        suffix = "a" if self.compute_capability in _ARCH_SPECIFIC else ""
        return f"sm_{major}{minor}{suffix}"


# Minimum of the package's kernels. A kernel of the user's may run on an older GPU.
MIN_COMPUTE_CAPABILITY = (8, 0)

# Well-known models, for planning where that GPU is not at hand. Those that were not measured have
# the rates of the H100. Rates from the others' data sheets (memory bandwidth and
# clock) would change 3 to 9 % of the choices, and nobody has measured whether for the better.
# Shared memory is that of the CUDA Programming Guide; SMs and L2 caches are those that the driver
# shows.
_A100 = Gpu((8, 0), 108, 163 << 10, 40 << 20, "NVIDIA A100-SXM4-40GB")
_A10 = Gpu((8, 6), 72, 99 << 10, 6 << 20, "NVIDIA A10")
_RTX_4090 = Gpu((8, 9), 128, 99 << 10, 72 << 20, "NVIDIA GeForce RTX 4090")
_H100 = Gpu((9, 0), 132, 227 << 10, 50 << 20, "NVIDIA H100 80GB HBM3")
_H200 = Gpu((9, 0), 132, 227 << 10, 60 << 20, "NVIDIA H200", H200_RATES)
_B200 = Gpu((10, 0), 148, 227 << 10, 126 << 20, "NVIDIA B200")
_B300 = Gpu((10, 3), 148, 227 << 10, 126 << 20, "NVIDIA B300")
_THOR = Gpu((11, 0), 20, 227 << 10, 32 << 20, "NVIDIA Thor")
_RTX_5090 = Gpu((12, 0), 170, 99 << 10, 96 << 20, "NVIDIA GeForce RTX 5090")
_GB10 = Gpu((12, 1), 48, 99 << 10, 24 << 20, "NVIDIA GB10")
_T4 = Gpu((7, 5), 40, 64 << 10, 4 << 20, "Tesla T4")

# The name of an architecture stands for its first model.
KNOWN_GPUS = (
    _T4, _A100, _A10, _RTX_4090, _H100, _H200, _B200, _B300, _THOR, _RTX_5090, _GB10,
)  # fmt: skip

# The GPU that a context names to plan for.
target: Setting[Gpu | None] = Setting("GPU", None)


def known_gpu(name: str) -> Gpu:
    """Return a well-known model by its architecture or its name.

    The architecture may lack its suffix, as ``"sm_90"``, which is the H100; models are named as
    ``"H200"`` or ``"RTX 4090"``.
    """
    words = re.findall(r"\w+", name.lower())
    for gpu in KNOWN_GPUS:
        model = re.findall(r"\w+", gpu.name.lower())
        names = [gpu.arch], [gpu.arch.removesuffix("a")], model
        if words in names or (words and set(words) <= {*model[1:]}):
            return gpu
    known = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in KNOWN_GPUS)
    raise ValueError(f"no GPU is known for {name!r}; known are {known}")


def target_is_set() -> bool:
    """Return whether :func:`~jax_tilekern.gpu_target` has named the GPU to plan for."""
    return target.value is not None


@contextmanager
def planning_beside_collectives() -> Iterator[None]:
    """Inside the context, :func:`current_gpu` shares its SMs with collective operations."""
    found = target.value or _visible_gpu()
    if isinstance(found, str):
        yield
        return
    with target(dataclasses.replace(found, beside_collectives=True)):
        yield


def current_gpu() -> Gpu:
    """Return the GPU to plan for: the target of ``gpu_target``, else the visible one."""
    why = why_no_gpu()
    if why is not None:
        raise NoGpu(why)
    found = target.value or _visible_gpu()
    assert isinstance(found, Gpu)
    return found


def why_no_gpu() -> str | None:
    """Return why :func:`current_gpu` raises :class:`NoGpu`, or ``None`` if it does not."""
    found = target.value or _visible_gpu()
    if isinstance(found, Gpu):
        return None
    return f'{found}; name the GPU to plan for, as in jax_tilekern.gpu_target("H100")'


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
            sm_count=device.sm_count,
            shared_memory_bytes=device.shared_memory_bytes,
            l2_bytes=device.l2_bytes,
            name=device.name,
            rates=_RATES.get(device.name, H100_RATES),
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
    return min(models, key=lambda gpu: (gpu.shared_memory_bytes, gpu.sm_count, gpu.name))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than a number."""
    return 1 << (number - 1).bit_length()
