"""The programs of ``python -m benchmarks jax_kernel`` run, and their sides agree."""

import argparse

import jax
import numpy as np
import pytest
from nvrtc_mark import needs_nvrtc

from benchmarks import lanes_by_hand
from benchmarks.jax_kernel import COMMAND

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough


def test_sides_agree(capsys):
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    arguments = parser.parse_args(["--seconds", "0.01"])
    arguments.command_line = "jax_kernel"
    assert COMMAND.run(arguments) == 0
    printed = capsys.readouterr().out
    errors = [float(line.split("error ")[1]) for line in printed.splitlines() if "error" in line]
    assert len(errors) == 22
    assert max(errors) < 1e-4


@needs_nvrtc
def test_kernels_by_hand_compile():
    lanes, steps = 100, 10

    def struct(*shape, dtype=np.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    start, numbers = struct(lanes, 3), struct(lanes, dtype=np.uint32)
    for kernel, inputs in (
        (lanes_by_hand.lorenz(lanes, steps, 0.1), (start, struct(3))),
        (lanes_by_hand.collatz(lanes), (numbers,)),
        (lanes_by_hand.kalman(lanes, steps), (struct(6, 6), struct(lanes, steps))),
    ):
        report = kernel.report(*inputs, gpu="sm_90")
        assert (report.spill_bytes, report.stack_bytes) == (0, 0)
