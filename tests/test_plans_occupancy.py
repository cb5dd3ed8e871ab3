"""Occupancy, against what NVIDIA's occupancy calculator says."""

from __future__ import annotations

import pytest

from jax_tilekern.compilation.compiler import Entry
from jax_tilekern.plans.gpu import Gpu, known_gpu
from jax_tilekern.plans.launch import Launch
from jax_tilekern.plans.occupancy import Occupancy, occupancy


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
