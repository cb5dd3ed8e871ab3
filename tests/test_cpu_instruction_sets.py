"""Every instruction set that this CPU has kernels for, and not only the best of them.

An executable looks the instruction set up when it runs, so one compilation serves all of them.
"""

import hashlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numerics import BF16, F8E4, F8E5, assert_product, exact, random

import jax_tilekern as jtk
from jax_tilekern import _core

LEVELS = _core.cpu_instruction_sets()
TYPES = [
    (np.float32, np.float32, None),
    (np.float64, np.float64, None),
    (BF16, BF16, None),
    (BF16, BF16, np.float32),
    (np.float16, np.float16, None),
    (F8E4, F8E5, np.float32),
    (F8E5, F8E5, BF16),
    (np.int8, np.int8, np.int32),
]
MAJORS = {"mk,kn": (1, 0), "km,kn": (0, 0), "mk,nk": (1, 1), "km,nk": (0, 1)}
# (m, n, k): ones, the vector path (up to four rows or columns), odd and prime sizes, whole tiles,
# and a k of several blocks.
SHAPES = [
    (1, 1, 1), (3, 5, 1), (1, 67, 130), (131, 4, 33), (2, 150, 35), (17, 31, 61), (64, 64, 64),
    (49, 66, 803),
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Run on the CPU wherever the suite runs, and leave the instruction set as it was."""
    before = _core.cpu_instruction_set()
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield
    _core.set_cpu_instruction_set(before)


def each_level(check):
    """Call ``check`` under every instruction set; a failure names it."""
    for level in LEVELS:
        _core.set_cpu_instruction_set(level)
        assert _core.cpu_instruction_set() == level
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{level}: {error}") from error


def product(subscripts, out):
    left, right = subscripts.split("->")[0].split(",")
    dims = (((left.index("k"),), (right.index("k"),)), ((), ()))
    return jax.jit(lambda a, b: jtk.dot_general(a, b, dims, preferred_element_type=out))


def test_levels_are_in_order_and_start_with_the_portable_one():
    order = ["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
    assert order[: len(LEVELS)] == LEVELS
    # The highest one is in use, but for avx512_bf16 where it is slower (ffi/cpu/dispatch.cc).
    assert _core.cpu_instruction_set() == LEVELS[-1] or LEVELS[-1] == "avx512_bf16"


@pytest.mark.parametrize("name", ["", "sse9", "PORTABLE", "avx2 "])
def test_unknown_level_is_refused(name):
    before = _core.cpu_instruction_set()
    with pytest.raises(ValueError, match="portable"):
        _core.set_cpu_instruction_set(name)
    assert _core.cpu_instruction_set() == before


@pytest.mark.parametrize("subscripts", MAJORS)
@pytest.mark.parametrize(("lhs", "rhs", "out"), TYPES)
def test_types_majors_shapes(rng, lhs, rhs, out, subscripts):
    run = product(subscripts, out)
    left, right = subscripts.split(",")
    for m, n, k in SHAPES:
        sizes = {"m": m, "n": n, "k": k}
        a = random(rng, [sizes[x] for x in left], lhs)
        b = random(rng, [sizes[x] for x in right], rhs)
        compiled = run.lower(a, b).compile()
        each_level(lambda: assert_product(compiled(a, b), a, b, f"{subscripts}->mn"))  # noqa: B023


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int8])
def test_batches_broadcast_and_strides(rng, dtype):
    out = np.int32 if dtype is np.int8 else np.float32
    # A batch dimension in every place, missing from one operand, and innermost.
    cases = ["bmk,bkn->bmn", "bmk,kn->bmn", "mk,bkn->bmn", "mbk,bkn->bmn", "mkb,knb->bmn",
             "bkm,nbk->bmn", "bcmk,ckn->bcmn", "bqhd,bkhd->bhqk"]  # fmt: skip
    sizes = dict(zip("bcmknqhd", (5, 2, 13, 37, 20, 17, 4, 16), strict=True))
    for subscripts in cases:
        left, right = subscripts.split("->")[0].split(",")
        a = random(rng, [sizes[x] for x in left], dtype)
        b = random(rng, [sizes[x] for x in right], dtype)
        run = jax.jit(
            lambda a, b, s=subscripts: jnp.einsum(
                s, a, b, preferred_element_type=out, _dot_general=jtk.dot_general
            )
        )
        compiled = run.lower(a, b).compile()
        each_level(lambda: assert_product(compiled(a, b), a, b, subscripts))  # noqa: B023


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.float16, F8E5])
def test_nan_and_inf_propagate(rng, dtype):
    for m, n, k in [(17, 33, 65), (1, 64, 128), (70, 3, 96)]:
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
        for x in (a, b):
            for value in (np.nan, np.inf, -np.inf, 0.0):
                x[tuple(rng.integers(0, s) for s in x.shape)] = value
        a, b = jnp.asarray(a.astype(dtype)), jnp.asarray(b.astype(dtype))
        with np.errstate(invalid="ignore"):
            expected = exact(a) @ exact(b)
        out = np.float64 if dtype is np.float64 else np.float32
        compiled = product("mk,kn", out).lower(a, b).compile()

        def check(compiled=compiled, a=a, b=b, expected=expected):
            got = np.asarray(compiled(a, b))
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            np.testing.assert_array_equal(np.isposinf(got), np.isposinf(expected))
            np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))

        each_level(check)


def test_integers_are_the_same_on_every_level(rng):
    """Extremes of int8, where instructions that saturate or take one unsigned side go wrong."""
    a = jnp.asarray(rng.choice(np.array([-128, 127], np.int8), (37, 1031)))
    b = jnp.asarray(rng.choice(np.array([-128, 127], np.int8), (1031, 41)))
    compiled = product("mk,kn", np.int32).lower(a, b).compile()
    each_level(lambda: assert_product(compiled(a, b), a, b, "mk,kn->mn"))


# In processes of their own, for XLA makes its pool once: a digest of the products for each level.
_DIGESTS = """
import json
from test_cpu_instruction_sets import digests
print(json.dumps(digests()))
"""


def digests():
    """Digests of products that are shared between threads, under every instruction set."""
    rng = np.random.default_rng(0)
    # Split by columns, by rows of a tall matrix, by chunks of a vector product, and by batches.
    shapes = [((150, 700), (700, 331)), ((3000, 130), (130, 24)), ((2, 900), (900, 1500)),
              ((64, 20, 150), (64, 150, 20))]  # fmt: skip
    found = {}
    for dtype in (np.float32, np.float64, BF16):
        for left, right in shapes:
            a, b = (jnp.asarray(rng.standard_normal(s).astype(dtype)) for s in (left, right))
            compiled = jax.jit(jtk.matmul).lower(a, b).compile()
            for level in LEVELS:
                _core.set_cpu_instruction_set(level)
                digest = hashlib.sha256(np.asarray(compiled(a, b)).tobytes()).hexdigest()
                found[f"{level} {np.dtype(dtype)} {left} {right}"] = digest
    return found


def test_results_do_not_depend_on_the_number_of_threads():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS],
            # XLA takes the size of its pool from the first of these that it knows.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONPATH": path,
                 "PJRT_NPROC": threads, "NPROC": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in ("1", "5")
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    one, several = map(json.loads, outputs)
    assert len(one) == 12 * len(LEVELS)
    assert several == one


def test_types_have_their_own_kernels():
    """What the other tests compare is not one and the same kernel at every level."""
    name = str(np.dtype(ml_dtypes.bfloat16))
    geometry = {"sizes": (64, 64, 64), "lhs_strides": (64, 1), "rhs_strides": (64, 1),
                "out_strides": (64, 1)}  # fmt: skip
    for types in (("float32",) * 3, ("int8", "int8", "int32"), (name, name, name)):
        kernels = []
        for level in LEVELS:
            _core.set_cpu_instruction_set(level)
            kernels.append(_core.cpu_matmul_kernel(*types, **geometry))
        assert kernels[0].startswith("portable ")
        assert len(set(kernels)) >= min(len(LEVELS), 3), kernels
