"""What computes a call on a CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tilekern as jtk
from jax_tilekern import _core
from jax_tilekern.ops.products import strassen
from jax_tilekern.plans.cpu import Cpu
from jax_tilekern.plans.gemm import strassen as strassen_times
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.policy import choose
from jax_tilekern.plans.policy.choice import PredictedTimes
from jax_tilekern.plans.policy.model import DeviceModel
from jax_tilekern.plans.policy.workload import product_workload

pytestmark = pytest.mark.defaults

F32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)


@pytest.fixture
def portable():
    """A CPU of which no times are recorded."""
    before = _core.cpu_instruction_set()
    _core.set_cpu_instruction_set("portable")
    yield
    _core.set_cpu_instruction_set(before)


def choice_of(function, *operands):
    (choice,) = jtk.explain(function, *operands, platform="cpu")
    return choice


CALLS = [
    (jtk.transpose, [(700, 900)]),
    (functools.partial(jtk.sum, axis=0), [(700, 900)]),
    (jtk.add, [(700, 900), (900,)]),
    (jtk.matmul, [(64, 128), (128, 32)]),
    (jtk.matvec, [(1000, 500), (500,)]),
]


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize(("function", "shapes"), CALLS)
def test_a_cpu_without_times_is_xlas(function, shapes):
    choice = choice_of(function, *map(F32, shapes))
    assert choice.kernel is None
    # XLA's own products take AMX where the CPU has it.
    assert re.search("no times on CPU with portable( and AMX)? are recorded", choice.reason)
    with jtk.policy("kernels"):
        assert choice_of(function, *map(F32, shapes)).kernel


def test_few_elements_are_added_by_xla():
    x = F32((31, 32))
    assert choice_of(jtk.add, x, x).reason == "XLA adds few elements without a call"
    with jtk.policy("kernels"):
        assert choice_of(jtk.add, x, x).kernel


def test_transposes_of_operands_fuse_with_additions():
    x, y = F32((900, 700)), F32((700, 900))
    of_transpose = choice_of(lambda x, y: jtk.add(jnp.swapaxes(x, 0, 1), y), x, y)
    assert of_transpose.reason == "XLA reads an operand before its transpose"
    with jtk.policy("kernels"):
        assert choice_of(lambda x, y: jtk.add(jnp.swapaxes(x, 0, 1), y), x, y).kernel


def chosen(device, m, n, k, dtype, out, *, lhs_strides=None, out_strides=None, batch=()):
    inner = (0,) * len(batch)
    geometry = MatmulGeometry(
        batch, m, n, k, lhs_strides or (*inner, k, 1), (*inner, n, 1), out_strides or (*inner, n, 1)
    )
    product = Product(geometry, *map(jnp.dtype, (dtype, dtype, out)), dtype)
    return choose(product_workload(product), ["a kernel"], device)


@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "bfloat16"), ("int8", "int32")])
def test_products_in_matrix_units_are_xlas(dtype, out):
    amx, without = Cpu("avx512_vnni", has_amx=True), Cpu("avx512_bf16")
    assert "(AMX)" in chosen(amx, 512, 512, 512, dtype, out).reason
    assert "(AMX)" not in chosen(without, 512, 512, 512, dtype, out).reason
    assert "(AMX)" not in chosen(amx, 512, 4, 512, dtype, out).reason
    assert "(AMX)" not in chosen(amx, 512, 512, 512, dtype, out, lhs_strides=(1, 512)).reason
    assert "(AMX)" not in chosen(amx, 512, 512, 512, "float32", "float32").reason
    with jtk.policy("kernels"):
        assert chosen(amx, 512, 512, 512, dtype, out).candidate


@pytest.mark.parametrize("spec", ["bkm,kbn->bmn", "bkm,nbk->bmn", "mbk,bkn->mbn", "kbm,bkn->mbn"])
def test_what_ends_a_program_in_xla_is_stated_otherwise(spec):
    """XLA's CPU backend has no products of bfloat16 to float32 in some orders of dimensions."""
    sizes = {"b": 3, "m": 130, "n": 136, "k": 20}
    operands = [
        jnp.ones([sizes[label] for label in labels], jnp.bfloat16)
        for labels in spec.split("->")[0].split(",")
    ]
    for policy in ("auto", "xla"):
        with jtk.policy(policy):
            out = jtk.einsum(spec, *operands, preferred_element_type=jnp.float32)
        assert (out == sizes["k"]).all()
    amx = Cpu("avx512_vnni", has_amx=True)
    batch = {"batch": (3,), "lhs_strides": (20, 60, 1)}
    assert "(AMX)" not in chosen(amx, 64, 64, 20, "bfloat16", "float32", **batch).reason


def test_strassen_is_one_product_where_that_is_predicted_faster(monkeypatch):
    def how(device):
        monkeypatch.setattr(strassen, "current_cpu", lambda: device)
        jax.clear_caches()
        choice, *_ = jtk.explain(jtk.strassen_matmul, jnp.ones((300, 300)), jnp.ones((300, 300)))
        return choice.reason

    assert how(Cpu("avx512_bf16")) == "one product is predicted faster than 7 of blocks"
    assert how(Cpu("of no data")) == "7 products of blocks"
    with jtk.policy("kernels"):
        assert how(Cpu("avx512_bf16")) == "7 products of blocks"


@pytest.mark.parametrize(
    ("size", "multiply_adds", "slower"), [(64, 1e3, True), (4096, 1e3, False), (4096, 1e6, True)]
)
def test_strassen_pays_where_products_take_longer_than_additions(
    monkeypatch, size, multiply_adds, slower
):
    """A product takes the time of its multiply-adds, and an addition that of its bytes."""
    known = DeviceModel("a CPU", 0.0, 1e4, {"f64": multiply_adds}, {}, {})

    def predicted(workload, *_):
        return PredictedTimes(np.array([np.inf]), known.roofline(workload), 1.0, known.device)

    monkeypatch.setattr(strassen_times, "predicted_times", predicted)
    geometry = MatmulGeometry((), size, size, size, (size, 1), (size, 1), (size, 1))
    product = Product(geometry, *[np.dtype(np.float64)] * 3, "float64")
    assert strassen_times.is_slower_in_blocks(product, 1, Cpu("any")) == slower


def test_arrays_in_another_order_are_moved_by_a_kernel():
    """``vdot`` of a transpose, which XLA would move first."""
    x, y = jnp.arange(60.0).reshape(12, 5), jnp.arange(60.0).reshape(5, 12)
    with jtk.policy("kernels"):
        first, moved, _ = jtk.explain(lambda x, y: jtk.vdot(x.T, y), x, y)
        assert jtk.vdot(x.T, y) == jnp.vdot(x.T, y)
    assert first.reason.startswith("operands reordered first")
    assert moved.kernel == "cpu_transpose"
