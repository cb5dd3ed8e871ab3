"""``add`` has the semantics of ``jnp.add``, its very bits, and all of JAX's transformations."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numerics import BF16, random
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern import _core
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.add import ADDED_DTYPES, AddedDims, add_kernel, plan_add
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel


def test_every_instruction_set(rng):
    before = _core.cpu_instruction_set()
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            for dtype in (np.float32, BF16, np.float16, np.int8):
                x, y = random(rng, (3, 331), dtype), random(rng, (3, 1), dtype)
                # The handler looks its kernel up when it runs.
                compiled = jax.jit(jtk.add).lower(x, y).compile()
                for level in _core.cpu_instruction_sets():
                    _core.set_cpu_instruction_set(level)
                    np.testing.assert_array_equal(compiled(x, y), jnp.add(x, y), level)
    finally:
        _core.set_cpu_instruction_set(before)


def test_nothing_is_materialised():
    """Neither a broadcast nor a copy: the call reads its operands where they lie."""
    x, y = jnp.ones((64, 128)), jnp.ones((128,))
    text = jax.jit(jtk.add).lower(x, y).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == 1
    assert not {"broadcast", "copy", "transpose", "add"} & set(names), names


def test_explain_says_why():
    x = jnp.ones((4, 6))
    for y, reason in (
        (x, None),
        (x > 0, "no kernel adds bool"),
        (x * 1j, "no kernel adds complex64"),
        (x[:0], "an operand is empty, so there is nothing to compute"),
    ):
        for platform in ("cpu", "cuda"):
            with jtk.gpu_target("sm_90"):
                (choice,) = jtk.explain(jtk.add, y, y, platform=platform)
            assert choice.call == "add"
            assert (choice.kernel is None) == (reason is not None)
            assert reason is None or choice.reason == reason
    (short,) = jtk.explain(jtk.add, x, x[:, :1], platform="cpu")
    assert short.reason == "XLA adds rows of 6 elements"
    rows = jnp.ones((4, 600))
    (choice,) = jtk.explain(jtk.add, rows, rows[0], platform="cpu")
    assert choice.kernel == "cpu_add float32"
    assert choice.reason.startswith("sizes (4, 600), strides (600, 1) and (0, 1)")


# The plan.

sizes = st.sampled_from([1, 1, 2, 3, 4, 8, 16])
H100 = known_gpu("sm_90")


@given(st.lists(st.tuples(sizes, st.sampled_from("xyb")), max_size=7))
def test_dims_address_what_broadcasting_does(dims):
    """``b`` is a dimension of both operands, ``x`` and ``y`` one of theirs alone."""
    left = [size if who in "xb" else 1 for size, who in dims]
    right = [size if who in "yb" else 1 for size, who in dims]
    found = AddedDims.of(left, right)
    for shape, strides in ((left, found.lhs_strides), (right, found.rhs_strides)):
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        index = np.indices(found.sizes)
        addresses = sum(i * stride for i, stride in zip(index, strides, strict=True))
        expected = np.broadcast_to(numbers, np.broadcast_shapes(tuple(left), tuple(right)))
        np.testing.assert_array_equal(addresses.ravel(), expected.ravel())
        assert strides[-1] in (0, 1)


def test_plans_that_no_launch_has():
    rank_7 = AddedDims.of((2, 1, 2, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2, 1))
    huge = AddedDims.of((2**35,), (1,))
    with jtk.policy("kernels"):
        for dims in (rank_7, huge):
            plan = plan_add(dims, np.dtype(np.float32), H100)
            assert isinstance(plan, NoKernel)
            assert "more than" in plan.reason


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.one_in(3)
def test_kernels_compile(arch):
    kernels = {add_kernel(dtype, n) for dtype in ADDED_DTYPES for n in (1, 16 // dtype.itemsize)}
    compiled = compile_kernels(*kernels, arch=arch)
    assert compiled.log == ""
    for kernel in kernels:
        entry = compiled.entry(kernel.name)
        assert entry.spill_bytes == entry.stack_bytes == 0


# The page that is made around it.

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "add-an-operation.md"
_HEADING_OR_BLOCK = re.compile(r"^## [^\n]*`(\S+)`$|^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_guide_quotes_the_code():
    named, blocks = None, 0
    for heading, block in _HEADING_OR_BLOCK.findall(GUIDE.read_text()):
        named = heading or named
        if block:
            blocks += 1
            assert block in (ROOT / named).read_text(), f"{named} does not have:\n{block}"
    assert blocks >= 4
