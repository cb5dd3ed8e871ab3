import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.interpreters import mlir
from numerics import on_gpu

import jax_tilekern as jtk
from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import NoGpu, known_gpu
from jax_tilekern.plans.tuned import (
    XLA,
    TunedChoice,
    TunedChoices,
)
from jax_tilekern.tuning import product_timing, random_operands
from jax_tilekern.tuning import tuner as tuning
from jax_tilekern.tuning.product_timing import ArrayProduct, Measured

H100, A100 = known_gpu("sm_90"), known_gpu("sm_80")
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def product(m=64, n=64, k=64, dtype=BF16, arithmetic="bf16"):
    geometry = MatmulGeometry((), m, n, k, (k, 1), (n, 1), (n, 1))
    return Product(geometry, dtype, dtype, dtype, arithmetic)


def choice(winner="b", times=None):
    times = {"a": 20.0, "b": 10.0, XLA: 30.0} if times is None else times
    return TunedChoice(winner, "a", times, "device time", "d")


@pytest.fixture
def store(tmp_path):
    with tuning.using(TunedChoices(tmp_path / "tuned")) as choices:
        yield choices


# What is stored.


def test_choices_survive_the_process(tmp_path):
    for m, winner in ((64, "b"), (128, "a")):
        TunedChoices(tmp_path).put(product(m), H100, choice(winner))
    later = TunedChoices(tmp_path)
    assert later.find(product(), H100) == choice()
    assert later.find(product(128), H100) == choice(winner="a")
    assert later.find(product(256), H100) is None
    assert later.find(product(), A100) is None


@pytest.mark.parametrize("text", ["[]", "\xff"])
def test_a_broken_file_is_one_warning_and_is_kept(tmp_path, text):
    path = tmp_path / "NVIDIA-H100-80GB-HBM3-0.json"
    path.write_text(text, encoding="latin-1")
    choices = TunedChoices(tmp_path)
    with pytest.warns(RuntimeWarning, match="jax_tilekern ignores"):
        assert choices.find(product(), H100) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choices.put(product(), H100, choice())
        assert choices.find(product(), H100) == choice()
    assert path.read_text(encoding="latin-1") == text


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    choices = TunedChoices(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="this process has them alone"):
        choices.put(product(), H100, choice())
    assert choices.find(product(), H100) == choice()


def test_what_is_shipped_comes_first_and_is_not_written(tmp_path, store):
    with tuning.using(TunedChoices(None)) as elsewhere:
        for p, gpu in ((product(), H100), (product(128), H100), (product(128), A100)):
            elsewhere.put(p, gpu, choice(winner="a"))
        assert tuning.export(tmp_path / "shipped.json", H100) == 2
    TunedChoices(tmp_path / "tuned").put(product(), H100, choice())
    assert tuning.load(tmp_path / "shipped.json") == 2
    store.put(product(256), H100, choice())
    assert store.find(product(), H100).winner == "a"
    own = TunedChoices(tmp_path / "tuned")
    assert own.find(product(), H100).winner == "b"
    assert own.find(product(128), H100) is None
    with tuning.using(str(tmp_path / "shipped.json")) as shipped:
        assert shipped.find(product(), H100).winner == "a"
    for read in (tuning.load, lambda path: tuning.using(path).__enter__()):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none.json")
        for text, message in (
            ("[]", "it does not have the fields"),
            ('{"a": 1}', "it does not have the fields"),
            ('{"schema": 1, "gpu": "a", "choices": {"a": {}}}', "it does not have the fields"),
            ('{"schema": 0}', "it has schema 0"),
            ("text", "Expecting value"),
        ):
            (tmp_path / "bad.json").write_text(text)
            with pytest.raises(ValueError, match=f"not a file of tuned choices: {message}"):
                read(tmp_path / "bad.json")
    for wrong in (3, None):
        with pytest.raises(TypeError, match=f"using: choices is {wrong}; it is TunedChoices or"):
            tuning.using(wrong).__enter__()


# What plans make of it.


def explained(x):
    with jtk.gpu_target(H100):
        (made,) = jtk.explain(jtk.matmul, x, x, platform="cuda")
    return made


def test_lowering_follows_the_choice(store):
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    with jtk.gpu_target(H100):
        (p,) = tuning.products_of(jtk.matmul, x, x)
    by_model = explained(x)
    mma = next(c for c in candidates(p, H100) if c.key.startswith("mma"))
    store.put(p, H100, choice(winner=mma.key, times={mma.key: 1.0}))
    by_measurement = explained(x)
    assert by_measurement.kernel.startswith("mma_matmul")
    assert by_measurement.reason.endswith(", tuned")
    store.put(p, H100, choice(winner=XLA))
    assert explained(x).kernel is None
    assert explained(x).reason == "tuning found XLA's own product faster"
    store.put(p, H100, choice(winner="wgmma 1x1", times={"wgmma 1x1": 1.0}))
    with pytest.warns(RuntimeWarning, match="no kernel for it any more"):
        assert explained(x) == by_model


def test_jitted_functions_are_lowered_for_the_choices_in_use(store):
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    function = jax.jit(jtk.matmul)

    def kernels():
        text = function.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("jax_tilekern_cuda_launch")

    with jtk.gpu_target(H100):
        (p,) = tuning.products_of(jtk.matmul, x, x)
        assert kernels() == 1
        with tuning.using(TunedChoices(None)) as xla:
            xla.put(p, H100, choice(winner=XLA))
            assert kernels() == 0
        assert kernels() == 1


# What there is to tune.


def test_products_of_a_function(monkeypatch):
    def compiled(*args, **kwargs):
        raise AssertionError("nothing is compiled to find products")

    monkeypatch.setattr("jax_tilekern.plans.gemm.sm80.candidates.compile_kernels", compiled)
    monkeypatch.setattr("jax_tilekern.plans.gemm.sm90.candidates.compile_kernels", compiled)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 128), (128, 32)))

    def loss(w, x):
        return (jtk.matmul(x, w) + jtk.matmul(x, w)).astype(jnp.float32).sum()

    with jtk.gpu_target(H100):
        found = tuning.products_of(jax.jit(jax.grad(loss, (0, 1))), w, x)
        names = [tuning.short_name(p) for p in found]
        # Forward products are dead code in the gradient of a linear function.
        assert sorted(names) == ["bf16 128x32x64 TN -> bfloat16", "bf16 64x128x32 NT -> bfloat16"]
        assert tuning.products_of(jnp.matmul, x, w) == []
        integers = jax.ShapeDtypeStruct((8, 8), jnp.int16)
        assert tuning.products_of(jtk.matmul, integers, integers) == []


# Tuning, with times that are made up.


def measured(times, failures=()):
    return Measured(times, dict(failures), "device time")


@pytest.fixture
def meter(monkeypatch):
    """Replace the measurement; returns the list of what was measured."""
    calls = []

    def measure(product, found, gpu, seconds):
        calls.append((product, [c.key for c in found]))
        times = {c.key: 100.0 + i for i, c in enumerate(found)}
        times[found[1].key] = 50.0
        return measured(times | {XLA: 80.0})

    monkeypatch.setattr(tuning, "measure", measure)
    return calls


def tuned_rows(*products, **options):
    return list(tuning.tune_products(products, H100, **options))


def test_winners_are_stored_and_not_measured_again(store, meter, monkeypatch):
    (row,) = tuned_rows(product())
    found = [c.key for c in candidates(product(), H100)]
    assert meter[0][1][:8] == found[:8]
    assert (row.choice.winner, row.choice.model) == (found[1], found[0])
    assert row.choice.microseconds[XLA] == 80
    assert store.find(product(), H100) == row.choice
    assert [row.known for row in tuned_rows(product(), product(128))] == [True, False]
    assert [p for p, _ in meter] == [product(), product(128)]
    tuned_rows(product(), force=True)
    assert len(meter) == 3
    monkeypatch.setattr(tuning, "_digest", lambda: "other kernels")
    tuned_rows(product())
    assert len(meter) == 4


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"model": 100.0, "b": 99.5, XLA: 99.9}, "model"),
        ({"model": 102.0, "b": 100.1, "c": 100.0, XLA: 99.5}, "c"),
        ({"model": 102.0, "b": 100.0, XLA: 98.0}, XLA),
        ({"b": 100.0, XLA: 120.0}, "b"),
        ({XLA: 120.0}, XLA),
    ],
)
def test_of_equals_the_model_is_right_and_xla_last(times, winner):
    assert tuning._chosen(measured(times), "model", "d").winner == winner


def test_tune_takes_a_function(store, meter, monkeypatch):
    monkeypatch.setattr(tuning, "gpu_to_measure", lambda: H100)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    with jtk.gpu_target(H100):
        result = tuning.tune(jtk.matmul, x, b=x)
        assert len(tuning.tune(jtk.matmul, x, x)) == len(meter) == 1
    heading, line = str(result).splitlines()
    assert heading.startswith("product")
    assert line.startswith("bf16 512x512x512 NN -> bfloat16")
    assert line.split()[-2:] == ["80", "us"]
    assert str(tuning.Tuning()) == "no product has a kernel"


def test_tuning_needs_a_gpu(monkeypatch):
    with jtk.gpu_target(dataclasses.replace(H100, name="another")), pytest.raises(NoGpu):
        tuning.gpu_to_measure()


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


class JaxCandidate:
    """A candidate whose plan is itself: a function of JAX, where there is no GPU."""

    def __init__(self, key, function):
        self.key, self.function = key, function

    def plan(self, gpu):
        if isinstance(self.function, Exception):
            raise self.function
        return self


@pytest.fixture
def timing(monkeypatch):
    """Measure candidates, whose plans are executed by their functions on a CPU, and wait little."""

    def emit(ctx, lhs, rhs, *, plan, results):
        return mlir.lower_fun(lambda *xs: [plan.function(*xs)], multiple_results=True)(
            ctx, lhs, rhs
        )

    mlir.register_lowering(product_timing._planned, emit, platform="cpu")
    monkeypatch.setattr(random_operands, "_MOST_COPIES", 3)
    monkeypatch.setattr(product_timing, "_MOST_CALLS", 3)

    def measure(p, **functions):
        found = [JaxCandidate(*item) for item in functions.items()]
        return product_timing.measure(p, found, H100, 0.01)

    return measure


@pytest.mark.skipif(on_gpu(), reason="plans are executed by the CPU")
def test_candidates_are_measured_if_they_are_right(timing):
    right = functools.partial(jnp.matmul, precision="highest")
    # The profile of a CPU shows no device, so the times are by the wall clock.
    result = timing(
        product(dtype=F32, arithmetic="f32"),
        wrong=lambda a, b: right(a, b).at[3, 3].add(1),
        nan=lambda a, b: right(a, b) * np.nan,
        right=right,
        large=ValueError("too large"),
        rejected=CompileError("no such type", ""),
    )
    assert set(result.microseconds) == {"right", XLA}
    assert all(time > 0 for time in result.microseconds.values())
    assert result.method.startswith("wall time")
    assert set(result.failures) == {"wrong", "nan", "large", "rejected"}
    assert "at most" in result.failures["wrong"]
    assert result.failures["large"] == "cannot be planned: too large"


@pytest.mark.skipif(on_gpu(), reason="plans are executed by the CPU")
def test_integers_and_float64_are_compared_exactly(timing):
    geometry = product().geometry
    int8 = Product(geometry, *map(np.dtype, ("int8", "int8", "int32")), "int8")
    sums = functools.partial(jnp.matmul, preferred_element_type=np.int32)
    found = timing(int8, x=sums, y=lambda a, b: sums(a, b).at[0, 0].add(1))
    assert set(found.microseconds) == {"x", XLA}
    f64 = Product(geometry, *[np.dtype(np.float64)] * 3, "f64")
    found = timing(f64, x=jnp.matmul, y=lambda a, b: jnp.matmul(a, b) * (1 + 1e-10))
    assert set(found.microseconds) == {"x", XLA}


@pytest.mark.skipif(not on_gpu(), reason="measures on a GPU")
def test_on_a_gpu(store):
    x = jnp.ones((256, 256), jnp.bfloat16)
    (row,) = tuning.tune(jtk.matmul, x, x, seconds=0.2)
    assert not row.failures
    assert len(row.choice.microseconds) >= 3
    assert row.choice.method == "device time"
    assert all(0.5 < time < 1000 for time in row.choice.microseconds.values())
    (made,) = jtk.explain(jtk.matmul, x, x)
    assert "tun" in made.reason
