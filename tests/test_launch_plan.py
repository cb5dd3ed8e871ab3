"""Launch plans, their handler, and occupancy against what NVIDIA's calculator says."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tilekern.compilation.compiler import Entry
from jax_tilekern.interop import ffi
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans import gpu as gpu_module
from jax_tilekern.plans.gpu import KNOWN_GPUS, Gpu, NoGpu, current_gpu, known_gpu
from jax_tilekern.plans.launch import (
    Buffer,
    Launch,
    LaunchPlan,
    Scalars,
    TensorMap,
)
from jax_tilekern.plans.occupancy import Occupancy, occupancy

ENTRY = Entry(
    name="kernel<4>",
    symbol="_Z6kernel",
    registers=32,
    spill_bytes=0,
    stack_bytes=0,
    serialized=False,
    shared_memory_bytes=1024,
    max_threads=256,
    parameter_bytes=(8, 8),
    cubin=b"\x7fELF cubin",
)
LAUNCH = Launch(ENTRY, (4, 2, 1), (128, 1, 1), (Buffer(0), Buffer(1)))
OVERLAPPING = dataclasses.replace(LAUNCH, overlaps=True)
BRANCHING = dataclasses.replace(LAUNCH, branches=True)
OVERLAPPING_BRANCH = dataclasses.replace(BRANCHING, overlaps=True)
PLAN = LaunchPlan("example", known_gpu("sm_90"), (LAUNCH,), (16, 4))
MAP = TensorMap(0, "bfloat16", (100, 64), (208,), (64, 32), swizzle=128)


# -- Launches and plans


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (512, 1, 1)}, r"block \(512, 1, 1\) has 512 threads, more than 256"),
        ({"parameters": (Buffer(0),)}, r"parameters of \(8,\) bytes, but .* takes \(8, 8\)"),
        ({"parameters": (Buffer(0), Scalars.pack("i", 3))}, r"parameters of \(8, 4\) bytes"),
        ({"repeats": (3, 0)}, r"repeats \(3, 0\) have one below 1"),
        ({"repeats": (3,), "overlaps": True}, "a launch that repeats cannot overlap"),
        ({"branches": True, "joins": True}, "a launch that branches cannot join"),
        ({"joins": True, "overlaps": True}, "a launch that joins cannot overlap"),
        (
            {"repeats": (3, 5), "parameters": (Buffer(0, 0, (4,)), Buffer(1))},
            r"steps \(4,\) do not match repeats \(3, 5\)",
        ),
        (
            {"parameters": (Buffer(0), Buffer(1, 0, (4,)))},
            r"steps \(4,\) do not match repeats \(\)",
        ),
    ],
)
def test_launch_rejects(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"launch of kernel<4>: .*{message}"):
        dataclasses.replace(LAUNCH, **change)


def test_a_launch_is_placed_in_another_plan() -> None:
    entry = dataclasses.replace(ENTRY, parameter_bytes=(8, 8, 128, 8))
    stepping = dataclasses.replace(MAP, offset_bytes=32, steps_bytes=(64,))
    parameters = (Buffer(1, 4, (8,)), Scalars.int64(7), stepping, Buffer(0))
    launch = Launch(entry, (1, 1, 1), (32, 1, 1), parameters, repeats=(3,))
    placed = launch.placed([Buffer(5, 96), Buffer(2, 16)])
    assert placed.parameters == (
        Buffer(2, 20, (8,)),
        Scalars.int64(7),
        dataclasses.replace(stepping, buffer=5, offset_bytes=128),
        Buffer(5, 96),
    )
    assert dataclasses.replace(placed, parameters=parameters) == launch
    with pytest.raises(ValueError, match="an offset is a multiple of 16 bytes, not 40"):
        launch.placed([Buffer(5, 8), Buffer(2)])


def _plan_with(**change: Any) -> LaunchPlan:
    return dataclasses.replace(PLAN, **change)


def _launch_with(cubin: Any) -> Launch:
    return dataclasses.replace(LAUNCH, entry=dataclasses.replace(ENTRY, cubin=cubin))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _plan_with(launches=(LAUNCH, _launch_with(b"text"))),
            "cubin of kernel<4> is not an ELF image",
        ),
        (lambda: _plan_with(alignments=(16,)), "takes buffer 1 of 1"),
        (lambda: _plan_with(launches=(OVERLAPPING, LAUNCH)), "the first launch has none"),
        (
            lambda: _plan_with(launches=(LAUNCH, OVERLAPPING_BRANCH)),
            "overlaps with a launch on another stream",
        ),
        (
            lambda: _plan_with(gpu=known_gpu("sm_89"), launches=(LAUNCH, OVERLAPPING)),
            "overlaps with another launch, which sm_89 lacks",
        ),
        (
            lambda: _plan_with(
                alignments=(4, 4),
                launches=(
                    Launch(
                        dataclasses.replace(ENTRY, parameter_bytes=(128,)),
                        (1, 1, 1),
                        (1, 1, 1),
                        (MAP,),
                    ),
                ),
            ),
            "buffer 0 has a tensor map, which takes an alignment of 16 bytes, but states 4",
        ),
    ],
)
def test_plan_rejects(make: Callable[[], LaunchPlan], message: str) -> None:
    with pytest.raises(ValueError, match=f"plan example: .*{message}"):
        make()


# -- Parameters


def test_scalars_are_laid_out_as_in_c() -> None:
    # struct { int a; long long b; char c; } has 4 bytes of padding inside and 7 at its end.
    assert Scalars.pack("iqb", 1, 2, 3).data == struct.pack("<i4xqb7x", 1, 2, 3)
    assert Scalars.pack("f", 1.5).data == struct.pack("<f", 1.5)
    assert Scalars.int64(1, -2).data == struct.pack("<2q", 1, -2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strides_bytes": ()}, "take 1 strides and a box of 2, not 0 and 2"),
        ({"strides_bytes": (200,)}, r"multiples of 16 bytes below 2\*\*40, not \(200,\)"),
        ({"sizes": (0, 64)}, r"1 to 2\*\*32 elements each, not \(0, 64\)"),
        ({"box": (64, 257)}, r"1 to 256 elements in each dimension, not \(64, 257\)"),
        ({"box": (128, 32)}, "a box row of 256 bytes exceeds the swizzle of 128"),
        ({"element_strides": (1, 9)}, r"1 to 8, not \(1, 9\)"),
        ({"swizzle": 96}, "swizzle 96 is none of 0, 32, 64, 128"),
        ({"dtype": "float8"}, "dtype 'float8' is none of uint8"),
        ({"interleave": 16}, "interleave takes 3 dimensions or more, not 2"),
        ({"dtype": "uint16", "oob_fill": "nan"}, "takes a float type, not uint16"),
        ({"steps_bytes": (8,)}, r"steps are multiples of 16 bytes, not \(8,\)"),
    ],
)
def test_tensor_map_rejects(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MAP, **change)


@pytest.mark.parametrize("fields", [(-1, 0, ()), (0, -4, ()), (0, 0, (4, -4))])
def test_buffer_rejects(fields: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="index, offset and steps must not be negative"):
        Buffer(*fields)


# -- GPUs


def test_arch_names() -> None:
    assert Gpu((8, 7), 16, 163 << 10, 4 << 20, "Orin").arch == "sm_87"
    assert known_gpu("sm_90") is known_gpu("sm_90a")
    for name, arch in (
        ("h100", "sm_90a"),
        ("A100", "sm_80"),
        ("RTX 4090", "sm_89"),
        ("t4", "sm_75"),
        ("H200", "sm_90a"),
        ("B300", "sm_103a"),
        ("Thor", "sm_110a"),
        ("RTX 5090", "sm_120a"),
        ("GB10", "sm_121a"),
    ):
        assert known_gpu(name).arch == arch
    assert known_gpu("H200").name == "NVIDIA H200"
    for gpu in KNOWN_GPUS:
        assert known_gpu(gpu.name) is gpu
    for name in ("sm_42", "", "NVIDIA"):
        message = rf"no GPU is known for '{name}'; known are sm_75 \(Tesla T4\)"
        with pytest.raises(ValueError, match=message):
            known_gpu(name)


def test_target_is_a_gpu_or_a_name() -> None:
    for wrong in (3, None, ["H100"]):
        with (
            pytest.raises(TypeError, match=r"takes a jax_tilekern\.Gpu, or a name .* not "),
            gpu_target(wrong),  # type: ignore[arg-type]
        ):
            pass


def test_target_nests_and_ends() -> None:
    with gpu_target("sm_80") as outer:
        assert current_gpu() is outer
        with gpu_target(known_gpu("sm_90")):
            assert current_gpu().arch == "sm_90a"
        assert current_gpu() is outer


def test_target_is_in_jax_caches() -> None:
    lowered_for = []

    def rule(ctx: Any, x: Any) -> list[Any]:
        lowered_for.append(current_gpu().arch)
        return [x]

    function = jax.jit(_primitive("cuda", rule).bind)
    for arch in ("sm_80", "sm_90", "sm_90"):
        with gpu_target(arch):
            function.trace(jnp.zeros(3)).lower(lowering_platforms=("cuda",))
    assert lowered_for == ["sm_80", "sm_90a"]


class _Driver:
    """Stands in for ``_core``."""

    def __init__(self, gpus: list[Gpu] | str) -> None:
        self.gpus = gpus

    def cuda_devices(self) -> list[Gpu] | str:
        return self.gpus


@pytest.fixture
def driver_shows(monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(devices: list[Gpu] | str) -> None:
        gpu_module._visible_gpu.cache_clear()
        monkeypatch.setattr("jax_tilekern._core.cuda_devices", _Driver(devices).cuda_devices)

    yield show
    gpu_module._visible_gpu.cache_clear()


def test_no_gpu_says_why(driver_shows: Any) -> None:
    driver_shows("no NVIDIA driver: no such file")
    with pytest.raises(NoGpu, match="no NVIDIA driver: no such file"):
        current_gpu()


def test_several_gpus(driver_shows: Any) -> None:
    h100, a100 = known_gpu("sm_90"), known_gpu("sm_80")
    driver_shows([h100, h100])
    assert current_gpu() == h100
    driver_shows([h100, a100])
    with pytest.raises(NoGpu, match=r"A100.* \(sm_80\), NVIDIA H100.* \(sm_90a\).*CUDA_VISIBLE"):
        current_gpu()
    smaller = dataclasses.replace(h100, sm_count=114, name="NVIDIA H100 PCIe")
    driver_shows([h100, smaller])
    assert current_gpu() == smaller


# -- The custom call


def _primitive(platform: str, rule: Callable[..., Any]) -> Primitive:
    primitive = Primitive(f"launch_{platform}")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def test_wrong_number_of_buffers() -> None:
    primitive = _primitive("cuda", lambda ctx, x: ffi.cuda_launch(ctx, [x, x], PLAN))
    traced = jax.jit(primitive.bind).trace(jnp.zeros((3, 5)))
    with pytest.raises(ValueError, match="example is for 2 operands and results, not 2 and 1"):
        traced.lower(lowering_platforms=("cuda",))


# Compiling for the CPU runs the CUDA handler's first stage, which reads the plan and needs no GPU.
# In a process of its own, as XLA takes the state's type for one platform only.
_INSTANTIATE = """
import json, sys
import jax, numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax_tilekern import _core
from jax_tilekern.interop import ffi
from test_launch_plan import plan_of_everything
jax.devices()  # queued types and targets would be registered in the wrong order
(state,) = _core.type_registrations()["CUDA"].values()
jax.ffi.register_ffi_type("state_on_cpu", state, platform="cpu")
handlers = _core.registrations()["CUDA"][ffi.CUDA_LAUNCH]
jax.ffi.register_ffi_target("launch_on_cpu", handlers, platform="cpu")
def outcome(damage):
    attributes = plan_of_everything().attributes()
    exec(damage, {"attributes": attributes, "launch": attributes["launches"]["0"], "np": np})
    primitive = Primitive("launch")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        primitive, lambda ctx, x: ffi.emit(ctx, [x], ffi.CpuCall("launch_on_cpu", attributes))
    )
    try:
        jax.jit(primitive.bind).lower(np.zeros((3, 5), np.float32)).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""
print(json.dumps([outcome(damage) for damage in sys.argv[1:]]))
"""


def plan_of_everything() -> LaunchPlan:
    """Return a plan with every kind of parameter, and a launch that has none."""
    entry = dataclasses.replace(ENTRY, parameter_bytes=(8, 8, 8, 128, 128))
    line = TensorMap(1, "float32", (64,), (), (64,))
    stepping = dataclasses.replace(MAP, steps_bytes=(0, 64))
    parameters = (Buffer(0), Buffer(1, 4, (8, 0)), Scalars.int64(7), stepping, line)
    nothing = dataclasses.replace(ENTRY, parameter_bytes=())
    launches = (
        Launch(entry, (2, 1, 1), (64, 1, 1), parameters, 100_000, (2, 1, 1), (3, 5)),
        Launch(nothing, (1, 1, 1), (1, 1, 1), (), overlaps=True),
    )
    return LaunchPlan("everything", known_gpu("sm_90"), launches, (16, 16))


def test_handler_reads_the_plan() -> None:
    everything = "launch plan everything (sm_90a): attribute launches.0."
    expected = {
        "": "",
        "del attributes['name']": "launch plan  (sm_90a): attribute name: Unexpected attribute",
        "launch['grid'] = np.array([1, 2])": f"{everything}grid: has 2 dimensions, not 3",
        "launch['cubin'] = 1": f"{everything}cubin: there are only 1 cubins",
        "attributes['cubins']['0'] = 3": (
            "launch plan everything (sm_90a): attribute cubins.0: Wrong attribute type"
        ),
        "launch['entry'] = 3": f"{everything}entry: Wrong attribute type: expected string",
        "launch['parameters']['1']['buffer'] = 9": (
            f"{everything}parameters.1.buffer: there are only 2 buffers"
        ),
        "launch['parameters']['0']['offset_bytes'] = -1": (
            f"{everything}parameters.0.offset_bytes: -1 is out of range"
        ),
        "launch['overlaps'] = 1": f"{everything}overlaps: a launch that is the first or repeats",
        "launch['joins'] = 2": f"{everything}joins: is present and not 1",
        "launch['branches'] = launch['joins'] = 1": f"{everything}joins: a launch that branches",
        "launch['repeats'] = np.array([3, 0])": f"{everything}repeats: one is 0",
        "launch['repeats'] = np.array([15])": (
            f"{everything}parameters.1.steps_bytes: there are 1 repeats to step along"
        ),
        "del launch['repeats']": (
            f"{everything}parameters.1.steps_bytes: there are 0 repeats to step along"
        ),
        "launch['parameters']['1']['steps_bytes'] = np.array([8, -8])": (
            f"{everything}parameters.1.steps_bytes: -8 is out of range"
        ),
        "launch['parameters']['3']['offset_bytes'] = -16": (
            f"{everything}parameters.3.offset_bytes: -16 is out of range"
        ),
        "launch['parameters']['3']['box'] = np.array([1, 2, 3])": (
            f"{everything}parameters.3.sizes: a tensor map has 1 to 5 sizes"
        ),
    }
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.run(
        [sys.executable, "-c", _INSTANTIATE, *expected],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout)
    for outcome, (damage, message) in zip(outcomes, expected.items(), strict=True):
        assert (message in outcome) if message else (outcome == ""), damage


def launch(threads, registers, static_bytes=0, dynamic_bytes=0):
    entry = Entry(
        name="kernel",
        symbol="_Z6kernel",
        registers=registers,
        spill_bytes=0,
        stack_bytes=0,
        serialized=False,
        shared_memory_bytes=static_bytes,
        max_threads=1024,
        parameter_bytes=(),
        cubin=b"\x7fELF",
    )
    return Launch(entry, (1, 1, 1), (threads, 1, 1), (), dynamic_bytes)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "fraction", "limit"),
    [
        ("sm_90", 256, 32, 0, 8, 1, "threads"),
        ("sm_90", 256, 33, 0, 6, 0.75, "registers"),
        ("sm_90", 1024, 65, 0, 0, 0, "registers"),
        ("sm_90", 288, 255, 0, 0, 0, "registers"),
        ("sm_90", 32, 16, 0, 32, 0.5, "blocks"),
        # A block that is no whole number of warps has the rest of the last one too.
        ("sm_90", 33, 16, 0, 32, 1, "threads"),
        # Warps live in four partitions, each of which has a quarter of the registers.
        ("sm_90", 160, 80, 0, 4, 20 / 64, "registers"),
        ("sm_90", 128, 32, 100 << 10, 2, 0.125, "shared memory"),
        ("sm_90", 128, 32, (113 << 10) + 1, 1, 0.0625, "shared memory"),
        ("sm_80", 256, 32, 40 << 10, 4, 0.5, "shared memory"),
        ("sm_86", 256, 32, 0, 6, 1, "threads"),
        ("sm_89", 1024, 32, 0, 1, 2 / 3, "threads"),
        ("sm_120", 256, 40, 0, 6, 1, "threads"),
        ("sm_120", 128, 32, 48 << 10, 2, 8 / 48, "shared memory"),
        ("sm_75", 1024, 64, 0, 1, 1, "threads"),
    ],
)
def test_known_values(arch, threads, registers, shared, blocks, fraction, limit):
    gpu = known_gpu(arch)
    expected = Occupancy(blocks, pytest.approx(fraction), limit)
    assert occupancy(launch(threads, registers, 0, shared), gpu) == expected
    # Static or dynamic is the same.
    assert occupancy(launch(threads, registers, shared, 0), gpu) == expected


def test_shared_memory_comes_in_units():
    """Shared memory is allocated in units of 128 bytes, and each CTA has 1024 more."""
    gpu = known_gpu("sm_90")
    # Nine times 25,900 bytes are fewer than the 233,472 that there are, but 25,984 are taken.
    assert occupancy(launch(32, 16, 25_856 - 1024), gpu).blocks == 9
    assert occupancy(launch(32, 16, 25_900 - 1024), gpu).blocks == 8
    assert occupancy(launch(32, 16, 0, 25_900 - 1024), gpu).blocks == 8


def test_a_gpu_that_is_not_known():
    assert occupancy(launch(256, 32), Gpu((15, 0), 100, 1 << 17, 1 << 25, "a later one")) is None
