"""Products that are known to be symmetric: values, derivatives, and the kernels of halves."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from candidate_calls import run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nvrtc_mark import needs_gpu, needs_nvrtc
from products import BF16, F16, F32, H100, INT32, TYPES, row_major
from sharded import AUTO, devices, mesh_of

import jax_tilekern as jtk
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gemm import select
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu


def polynomial(product, scale, x):
    return scale * product - x


@pytest.mark.usefixtures("highest_precision")
def test_types_and_empty_matrices(rng):
    z = rng.normal(size=(3, 5)) + 1j * rng.normal(size=(3, 5))
    z = z.astype(np.complex64)
    np.testing.assert_allclose(jtk.symmetric_matmul(z), z @ z.T, atol=1e-5)
    ones = jnp.ones((3, 4), np.int8)
    np.testing.assert_array_equal(jtk.symmetric_matmul(ones), np.full((3, 3), 4, np.int8))
    assert jtk.symmetric_matmul(np.ones((2, 0, 3), np.float32)).shape == (2, 0, 0)


@pytest.mark.parametrize(
    ("shapes", "operands", "words"),
    [
        ([(3,)], (), r"not shape \(3,\)"),
        ([(3, 4), (4, 2)], (), r"not shapes \(3, 4\) and \(4, 2\)"),
        ([(3, 4)], [(3,)], r"0 operands of rows .* and 1 of columns .* \[\(3,\)\]"),
        ([(3, 4)], [(3, 1), (1, 1)], "1 operands of rows .* and 0 of columns"),
    ],
)
def test_errors(shapes, operands, words):
    arrays = [jnp.ones(shape) for shape in shapes]
    epilogue = (lambda x, *_: x) if operands else None
    with pytest.raises(ValueError, match=words):
        jtk.symmetric_matmul(*arrays, epilogue=epilogue, operands=[*map(jnp.ones, operands)])


def test_an_operand_that_nothing_reads():
    with pytest.raises(TypeError, match="no epilogue="):
        jtk.symmetric_matmul(jnp.ones((3, 4)), operands=(1.0,))


# Kernels of halves.


def kernels(function, *shapes, dtype=jnp.bfloat16, policy="kernels"):
    """The kernels of a function on an H100."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with gpu_target(H100), jtk.policy(policy):
        choices = jtk.explain(jax.jit(function), *structs, platform="cuda")
    return [x.kernel for x in choices if x.kernel or "XLA" in x.reason]


HALF, WHOLE = "wgmma_symmetric_matmul bf16", "wgmma_matmul bf16"


def test_which_products_are_halved():
    f = jtk.symmetric_matmul
    square, batch = (4096, 4096), (4, 2048, 2048)
    cubic = lambda x: f(x, x, epilogue=polynomial, operands=(2.0, x))  # noqa: E731
    for function in (f, cubic, jax.vmap(f), jax.vmap(cubic), lambda x: jtk.matmul(x, x.mT)):
        assert kernels(function, batch) == [HALF]
    assert kernels(jax.vmap(f), batch, batch) == [HALF]
    # Rows of all matrices are multiplied by one, so they are rows of one matrix.
    assert kernels(jax.vmap(f, (0, None)), batch, batch[1:]) == [WHOLE]
    # The matrix of an epilogue need not be symmetric.
    plain = lambda x, y: jtk.matmul(x, x.T, epilogue=jnp.add, operands=(y,))  # noqa: E731
    assert kernels(plain, square, square) == [WHOLE]
    assert kernels(lambda x: jtk.matmul(x, x.T, epilogue=polynomial, operands=(2.0, 1.0)),
                   square) == [HALF]  # fmt: skip


def test_derivatives_have_whole_products():
    square = (4096, 4096)
    found = kernels(lambda x, t: jax.jvp(jtk.symmetric_matmul, (x,), (t,)), square, square)
    assert found == [HALF, WHOLE, WHOLE]


def is_halved(rows, batch=(), dtype=BF16, arithmetic="bf16"):
    geometry = row_major(rows, rows, rows, batch=batch, rhs_k_major=True)
    product = Product(geometry, dtype, dtype, dtype, arithmetic, symmetric=True)
    with jtk.policy("auto"):
        plan = select.plan_matmul(product, H100)
    return "symmetric" in getattr(plan, "name", "")


@needs_nvrtc
def test_where_halves_are_chosen():
    assert not any((is_halved(512), is_halved(1024), is_halved(512, (16,))))
    assert all((is_halved(2048), is_halved(8192)))
    # Nobody has timed those of other types.
    assert not is_halved(8192, dtype=np.dtype(np.float32), arithmetic="tf32")


def test_a_product_without_a_kernel_has_the_type_of_its_result():
    """XLA's product is as fast as that of ``jnp``, which makes no float32 numbers of it."""
    x = jnp.ones((48, 32), jnp.bfloat16)
    with jtk.policy("xla"):
        text = jax.jit(jtk.symmetric_matmul).lower(x).as_text()
    assert "dot_general" in text
    assert "f32" not in text


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_a_square_part_of_the_result_is_not_symmetric(rng):
    """Devices of a mesh of 2x2 would take theirs for one."""
    mesh = mesh_of((AUTO, AUTO))
    parts = NamedSharding(mesh, P("d", "m"))
    x = rng.normal(size=(16, 8)).astype(np.float32)
    product = jax.jit(jtk.symmetric_matmul, out_shardings=parts)
    np.testing.assert_allclose(product(x), x @ x.T, atol=1e-5)
    text = product.lower(x).as_text()
    assert re.findall(r'symmetric[\\2": ]+(true|false)', text) == ["false"]


# Newton-Schulz iterations consist of these.


@pytest.mark.parametrize(
    ("method", "dtype", "halves", "wholes"),
    [
        ("standard", jnp.bfloat16, 10, 5),
        ("gram", jnp.float16, 16, 2),
        # Float16 has the precision of TF32.
        ("standard", jnp.float32, 10, 5),
        ("gram", jnp.float32, 16, 2),
    ],
)
@pytest.mark.one_in(4)
def test_newton_schulz_has_only_products(method, dtype, halves, wholes):
    shape = (4, 4096, 11008)
    x = jax.ShapeDtypeStruct(shape, dtype)
    ns = jax.jit(lambda x: jtk.linalg.newton_schulz(x, method=method))
    with gpu_target(H100), jtk.policy("kernels"):
        text = ns.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    main = text[: text.index("func.func private")].splitlines()
    calls = [line for line in main if " call @wgmma" in line]
    assert sum("symmetric" in line for line in calls) == halves
    assert len(calls) == halves + wholes
    # Between the first one and the last, nothing else touches matrices.
    between = main[main.index(calls[0]) : main.index(calls[-1]) + 1]
    matrices = ("x4096x11008x", "x4096x4096x")
    assert [x for x in between if any(m in x for m in matrices)] == calls


@needs_gpu
@pytest.mark.parametrize(
    ("kind", "out", "rows", "batch"),
    [
        ("bf16", BF16, 1160, ()),
        ("bf16", F32, 520, (2,)),
        ("f16", F16, 2056, ()),
        ("tf32", F32, 648, (3,)),
        ("int8", INT32, 528, ()),
        ("fp8", BF16, 528, (2,)),
    ],
)
def test_every_kernel_of_halves(rng, kind, out, rows, batch):
    dtype, k = TYPES[kind][0], 208
    geometry = row_major(rows, rows, k, batch=batch, rhs_k_major=True)
    product = Product(geometry, dtype, dtype, out, kind, symmetric=True)
    gpu = current_gpu()
    # Tiles are claimed where each SM has several.
    few_sms = dataclasses.replace(gpu, beside_collectives=True, reserved_sms=gpu.sm_count - 4)
    # Sums of small integers are exact in every arithmetic, and in bfloat16 up to 256.
    x = rng.integers(-1, 2, (*batch, rows, k))
    expected, operand = x @ x.swapaxes(-1, -2), jnp.asarray(x, dtype)
    for planned in (gpu, few_sms):
        found = wgmma_candidates(product, planned)
        assert any(x.instance.dynamic for x in found) == planned.beside_collectives
        for candidate in found:
            got = run(candidate.plan(planned), (operand, operand), (*batch, rows, rows), out)
            np.testing.assert_array_equal(got, expected, err_msg=candidate.key)
