import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numerics import on_gpu

import jax_tilekern as jtk
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.tuned import XLA, TunedChoices
from jax_tilekern.tuning import product_timing
from jax_tilekern.tuning import tuner as tuning
from jax_tilekern.tuning.device_time import Unattributed
from jax_tilekern.tuning.product_timing import ArrayProduct, Measured

H100, A100 = known_gpu("sm_90"), known_gpu("sm_80")
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
X = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


def product(m=64, n=64, k=64, dtype=BF16, arithmetic="bf16"):
    geometry = MatmulGeometry((), m, n, k, (k, 1), (n, 1), (n, 1))
    return Product(geometry, dtype, dtype, dtype, arithmetic)


@pytest.fixture
def store(tmp_path):
    with tuning.using(TunedChoices(tmp_path / "tuned.json")) as choices:
        yield choices


# What is stored.


def test_choices_survive_the_process_and_are_shipped(tmp_path):
    path = tmp_path / "folder" / "tuned.json"
    one, other = TunedChoices(path), TunedChoices(path)
    assert one.find(product(), H100) is other.find(product(), H100) is None
    one.put(product(), H100, "a")
    other.put(product(128), H100, "b")
    with tuning.using(str(path)) as later:
        for m, gpu, winner in (
            (64, H100, "a"),
            (128, H100, "b"),
            (256, H100, None),
            (64, A100, None),
        ):
            assert later.find(product(m), gpu) == winner


@pytest.mark.parametrize("text", ["[]", "text", "\xff", '{"a": 1}', '{"schema": 0}'])
def test_another_file_is_an_error_and_is_kept(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text, encoding="latin-1")
    choices = TunedChoices(path)
    with pytest.warns(RuntimeWarning, match="jax_tilekern ignores"):
        assert choices.find(product(), H100) is None
    with pytest.raises(ValueError, match="is not a file of tuned choices"):
        choices.put(product(), H100, "a")
    assert choices.find(product(), H100) == "a"
    with pytest.raises(ValueError, match="is not a file of tuned choices"):
        tuning.using(path).__enter__()
    assert path.read_text(encoding="latin-1") == text


# What plans make of it.


def explained(x):
    with jtk.gpu_target(H100):
        (made,) = jtk.explain(jtk.matmul, x, x, platform="cuda")
    return made


def test_lowering_follows_the_choice(store):
    with jtk.gpu_target(H100):
        (p,) = tuning.products_of(jtk.matmul, X, X)
    by_model = explained(X)
    mma = next(c for c in candidates(p, H100) if c.key.startswith("mma"))
    store.put(p, H100, mma.key)
    by_measurement = explained(X)
    assert by_measurement.kernel.startswith("mma_matmul")
    assert by_measurement.reason.endswith(", tuned")
    store.put(p, H100, XLA)
    assert explained(X).kernel is None
    assert explained(X).reason == "tuning found XLA's own product faster"
    store.put(p, H100, "wgmma 1x1")
    with pytest.warns(RuntimeWarning, match="is no kernel for it; tune it again"):
        assert explained(X) == by_model


# What is chosen, with times that are made up.


def test_products_of_a_function_are_tuned(store, monkeypatch):
    """Forward products are dead code in the gradient of a linear function."""
    measured = []

    def measure(product, found, gpu, seconds):
        measured.append(product)
        assert [c.key for c in found[:8]] == [c.key for c in candidates(product, H100)[:8]]
        times = {c.key: 100.0 + i for i, c in enumerate(found)}
        return Measured(times | {found[1].key: 50.0, XLA: 80.0}, {"other": "failed"})

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "gpu_to_measure", lambda: H100)

    def loss(w, x):
        return (jtk.matmul(x, w) + jtk.matmul(x, w)).astype(jnp.float32).sum()

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 128), (128, 32)))
    with jtk.gpu_target(H100):
        rows = tuning.tune(jax.jit(jax.grad(loss, (0, 1))), w, x)
        assert tuning.tune(jnp.matmul, x, w) == ()
    assert sorted(row.name.partition(":")[0] for row in rows) == [
        "bf16 128x32x64",
        "bf16 64x128x32",
    ]
    for row, p in zip(rows, measured, strict=True):
        assert row.winner == store.find(p, H100) == candidates(p, H100)[1].key
        first, fastest, *_, last = str(row).splitlines()
        assert first == f"{row.name}: {row.winner}"
        assert (fastest, last) == (f"    {row.winner}: 50 us", "    other: failed")


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"model": 100.0, "b": 99.5, XLA: 99.9}, "model"),
        ({"model": 102.0, "b": 100.1, "c": 100.0, XLA: 99.5}, "c"),
        ({"model": 102.0, "b": 100.0, XLA: 98.0}, XLA),
        ({}, None),
    ],
)
def test_of_equals_the_model_is_right_and_xla_last(times, winner):
    assert tuning._chosen(Measured(times, {}), "model") == winner


# Measuring. The products of JAX that stand for strided ones:

CALLS = {
    "transposed": (lambda a, b: jtk.matmul(a.T, b.T), (4, 3), (5, 4)),
    "gradient": (
        jax.grad(lambda a, b: (jtk.matmul(a, b) ** 2).astype(jnp.float32).sum()), (3, 4), (4, 5)
    ),
    "row": (lambda a, b: jtk.matmul(a, b), (1, 4), (4, 5)),
    "attention": (
        lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b, _dot_general=jtk.dot_general),
        (2, 3, 4, 6), (2, 5, 4, 6),
    ),
    "innermost vmap": (jax.vmap(jtk.matmul, (1, None), 1), (3, 2, 4), (4, 5)),
    "outer vmaps": (
        jax.vmap(jax.vmap(jtk.matmul, (0, None)), (None, 0)), (2, 3, 4), (5, 4, 6)
    ),
}  # fmt: skip


def by_numpy(p, lhs, rhs):
    """The product from its strides, and the memory that the result takes."""
    g, strided = p.geometry, np.lib.stride_tricks.as_strided

    def view(x, sizes, strides):
        flat = np.ascontiguousarray(np.asarray(x, np.float64)).ravel()
        return strided(flat, (*g.batch, *sizes), [8 * stride for stride in strides])

    exact = view(lhs, (g.m, g.k), g.lhs_strides) @ view(rhs, (g.k, g.n), g.rhs_strides)
    out = np.zeros(exact.size)
    strided(out, exact.shape, [8 * stride for stride in g.out_strides])[...] = exact
    return out


@pytest.mark.parametrize("name", CALLS)
def test_arrays_stand_for_strided_operands(name, rng):
    function, *shapes = CALLS[name]
    structs = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    with jtk.gpu_target(H100):
        found = tuning.products_of(function, *structs)
    assert found
    for p in found:
        problem = ArrayProduct.of(p)
        operands = [rng.standard_normal(x.shape, F32) for x in (problem.lhs, problem.rhs)]
        result = problem.by_xla(*operands)
        assert (result.shape, result.dtype) == (problem.out.shape, np.float32)
        tolerance = 1e-2 if on_gpu() else 1e-5
        flat = np.asarray(result).ravel()
        np.testing.assert_allclose(flat, by_numpy(p, *operands), tolerance, tolerance)


def test_candidates_are_measured_if_they_are_right(x64):
    def found(product, expected, **sides):
        operands = ArrayProduct.of(product).operands(0)
        tolerance = product_timing.tolerance_of(product)
        return product_timing.faults({XLA: expected, **sides}, operands, tolerance)

    right = functools.partial(jnp.matmul, precision="highest")
    f32 = product(dtype=F32, arithmetic="f32")
    failures = found(
        f32,
        right,
        wrong=lambda a, b: right(a, b).at[3, 3].add(1),
        nan=lambda a, b: right(a, b) * np.nan,
        same=lambda a, b: right(b.T, a.T).T,
        failed=lambda a, b: right(a, b[1:]),
    )
    assert set(failures) == {"wrong", "nan", "failed"}
    assert "at most" in failures["wrong"]
    int8 = Product(f32.geometry, *map(np.dtype, ("int8", "int8", "int32")), "int8")
    sums = functools.partial(jnp.matmul, preferred_element_type=np.int32)
    assert set(found(int8, sums, wrong=lambda a, b: sums(a, b).at[0, 0].add(1))) == {"wrong"}
    f64 = Product(f32.geometry, *[np.dtype(np.float64)] * 3, "f64")
    assert set(found(f64, right, wrong=lambda a, b: right(a, b) * (1 + 1e-10))) == {"wrong"}


@pytest.mark.skipif(on_gpu(), reason="tunes here")
@pytest.mark.parametrize("target", [contextlib.nullcontext, lambda: jtk.gpu_target("H100")])
def test_tuning_needs_a_gpu_to_measure_on(target):
    with (
        target(),
        pytest.raises(jtk.NoGpu, match=r"on an NVIDIA GPU, and JAX.* here is cpu"),
    ):
        jtk.tune(jtk.matmul, jnp.ones((8, 8)), jnp.ones((8, 8)))


@pytest.mark.skipif(on_gpu(), reason="the profile of a CPU shows no device")
def test_times_that_cannot_be_attributed_are_an_error(monkeypatch):
    monkeypatch.setattr(product_timing, "_MOST_CALLS", 2)
    with pytest.raises(Unattributed, match=r"the kernels of each candidate: .* tune"):
        product_timing.timed({"a": lambda: jnp.ones(3)}, 0.01)


@pytest.mark.skipif(not on_gpu(), reason="measures on a GPU")
def test_on_a_gpu(store):
    x = jnp.ones((256, 256), jnp.bfloat16)
    (row,) = tuning.tune(jtk.matmul, x, x, seconds=0.2)
    assert not row.failures
    assert len(row.microseconds) >= 3
    assert all(0.5 < time < 1000 for time in row.microseconds.values())
    (made,) = jtk.explain(jtk.matmul, x, x)
    assert "tun" in made.reason
