"""``explain`` and ``cost_analysis``."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from jax_tilekern.interop.outcomes import Choice
from jax_tilekern.plans.launch import PredictedUs

NAME_A_GPU = r'name the GPU to plan for, as in jax_tilekern\.gpu_target\("H100"\)'


def test_lists_each_call_with_its_kernel():
    x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
    choices = jtk.explain(jax.grad(lambda w, x: (jtk.matmul(x, w) ** 2).sum()), w, x)
    assert [choice.call for choice in choices] == ["mk,kn->mn", "km,kn->mn"]
    assert choices[0].operands == ("f32[64,128]", "f32[128,32]")
    assert choices[0].result == "f32[64,32]"
    assert all(choice.kernel for choice in choices)


def test_nothing_to_explain():
    assert str(jtk.explain(lambda x: x + 1, jnp.ones((8, 8)))) == "no call of jax_tilekern"


def call(name, *, kernel="k", reason="why", times=(None, None), depth=0, partition=""):
    types = ("f32[8]",)
    return Choice(name, types, *types, "cpu", kernel, reason, partition, depth, PredictedUs(*times))


def test_a_table_has_one_row_for_equal_calls():
    step = [
        call("composed", kernel=None, reason="of parts"),
        *[call("part", times=(1.0, 2.0), depth=1)] * 2,
    ]
    left = call("left", kernel=None, reason="no gain", times=(9.0, 8.0), partition="m in 2")
    explained = jtk.Explanation([*step, left, *step, call("unknown")])
    assert (
        str(explained)
        == """\
    call                              kernel, us     XLA, us
2x  composed  f32[8] -> f32[8]
        of parts
4x    part  f32[8] -> f32[8]                 1.0         2.0
          k: why
    left  f32[8] -> f32[8]  [m in 2]         9.0         8.0
        no gain
    unknown  f32[8] -> f32[8]
        k: why
kernels for 5 of 6 calls; predicted 12.0 us, by XLA alone 16.0 us (5 of them)"""
    )
    assert explained.predicted_us == (12.0, 16.0)


def test_calls_with_different_parts_are_different_rows():
    parts = (call("part", depth=1), call("part", depth=1, reason="other"))
    whole = call("composed", kernel=None)
    text = str(jtk.Explanation([whole, parts[0], whole, parts[1]]))
    assert "2x" not in text
    assert text.endswith("\nkernels for 2 of 2 calls")


def test_a_model_fits_on_a_page():
    def mixture(x, up, down, indices, weights):
        return jtk.moe(x, up, down, indices=indices, weights=weights).sum()

    shapes = (4096, 512), (8, 512, 2048), (8, 2048, 512)
    x, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    indices = jax.ShapeDtypeStruct((4096, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((4096, 2), jnp.float32)
    gradient = jax.grad(mixture, (0, 1, 2, 4))
    explained = jtk.explain(gradient, x, up, down, indices, weights, platform="cpu")
    text = str(explained)
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) < 50
    for choice in explained:
        assert choice.reason in " ".join(text.split())


@pytest.mark.defaults
def test_predicted_times_are_numbers():
    x = jax.ShapeDtypeStruct((509, 509), jnp.bfloat16)
    with jtk.gpu_target("H100"):
        explained = jtk.explain(lambda x: jtk.matmul(jtk.transpose(jtk.matmul(x, x)), x), x)
        with jtk.policy("kernels"):
            (asked,) = jtk.explain(jtk.matmul, x, x)
    first, *_ = explained
    assert asked.predicted_us == first.predicted_us
    assert all(time > 0 for time in first.predicted_us)
    taken = [
        choice.predicted_us.ours if choice.kernel else choice.predicted_us.xla
        for choice in explained
    ]
    assert explained.predicted_us.ours == sum(taken)
    assert explained.predicted_us.xla == sum(choice.predicted_us.xla for choice in explained)
    (whole,) = jtk.explain(jtk.matmul, jnp.ones((4, 4), jnp.int16), jnp.ones((4, 4), jnp.int16))
    assert whole.predicted_us == (None, None)
    assert jtk.Explanation([whole]).predicted_us == (None, None)


@pytest.mark.defaults
def test_a_prediction_for_xla_is_no_error_in_strict():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    with jtk.gpu_target("H100"), jtk.strict():
        (choice,) = jtk.explain(jtk.matmul, x, x)
    assert choice.kernel is None
    assert choice.reason.startswith("XLA is predicted as fast")


def test_parts_of_a_call_are_below_it():
    x = jnp.ones((64, 64))
    product, other = jtk.explain(
        lambda x: jtk.matmul(jtk.matmul(x, x, epilogue=jax.nn.gelu), x), x, platform="cpu"
    )[1:]
    assert (product.depth, other.depth) == (1, 0)
    text = str(jtk.explain(lambda x: jtk.matmul(x, x, epilogue=jax.nn.gelu), x, platform="cpu"))
    assert "\ncontract mk,kn->mn, gelu" in text
    assert "\n  mk,kn->mn  f32[64,64]" in text


def test_parts_of_a_partitioned_call_are_below_it():
    """What XLA removes, such as an order that nothing reads, is not listed."""
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    rows = jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh, P("d")))
    ids = jax.device_put(jnp.arange(64, dtype=jnp.int32) % 5, NamedSharding(mesh, P("d")))

    def summed(rows, ids):
        return jtk.segment_sum(rows, ids, 5), jtk.matmul(rows, jnp.ones((16, 4)))

    choices = jtk.explain(summed, rows, ids, platform="cpu")
    depths = [(choice.depth, choice.call.partition(",")[0]) for choice in choices]
    assert depths == [
        (0, "segment_sum"),
        (1, "segment_sum"),
        (2, "sort rows by 7 keys"),
        (2, "segment_sum"),
        (0, "mk"),
    ]
    assert all(choice.partition for choice in choices[1:])


def test_says_why_a_cpu_kernel_takes_a_call():
    x = jnp.ones((512, 512))
    reasons = [
        jtk.explain(function, *args, platform="cpu")[0].reason
        for function, *args in (
            (jtk.matmul, x, x),
            (jtk.matmul, x, x[:, 0]),
            (jtk.matmul, x[0], x[0]),
            (jtk.transpose, x),
            (jtk.sum, x),
        )
    ]
    starts = [
        "large or narrow operands are packed for the caches first; computes in float32",
        "a product with a vector reads the matrix once, as it lies; computes in float32",
        "a dot product reads both vectors once, as they lie; computes in float32",
        "sizes (512, 512) in the order (1, 0)",
        "sizes (262144,)",
    ]
    for reason, start in zip(reasons, starts, strict=True):
        assert reason.startswith(start)


def test_says_why_xla_takes_a_call():
    x = jnp.ones((8, 8), jnp.int16)
    (choice,) = jtk.explain(jtk.matmul, x, x)
    assert choice.kernel is None
    assert choice.reason == "no kernel for int16 x int16 -> int16 at precision DEFAULT"
    (choice,) = jtk.explain(jtk.matmul, jnp.ones((0, 3)), jnp.ones((3, 4)))
    assert choice.reason == "an operand is empty, so there is nothing to compute"
    (choice,) = jtk.explain(jtk.matmul, jnp.ones((5, 1)), jnp.ones((1, 4)))
    assert choice.kernel is None
    assert choice.reason.startswith("nothing is contracted")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jtk.matmul(x, w, epilogue=jtk.row_max),
        lambda h, w: jtk.linear_cross_entropy(h, w, jnp.zeros(5, int)),
    ],
)
def test_xla_fuses_outer_products_with_reductions_of_rows(function):
    arrays = [jnp.ones(shape, jnp.bfloat16) for shape in ((5, 1), (1, 4))]
    with jtk.gpu_target("sm_90"):
        choices = jtk.explain(function, *arrays, platform="cuda")
    assert not any(choice.kernel for choice in choices)
    assert any("nothing is contracted" in choice.reason for choice in choices)


def test_an_array_in_place_of_the_function_is_refused():
    x = jnp.ones((4, 4))
    with pytest.raises(TypeError, match=r"as in explain\(matmul, a, b\), and got ArrayImpl"):
        jtk.explain(jtk.matmul(x, x))


def test_needs_no_execution_and_no_arrays():
    big = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)
    assert len(jtk.explain(jtk.matmul, big, big, platform="cpu")) == 1


def test_repeated_explanations_agree():
    x = jnp.ones((16, 16))
    function = jax.jit(lambda x: jtk.matmul(x, x))
    function(x)
    assert jtk.explain(function, x) == jtk.explain(function, x)
    assert len(jtk.explain(function, x)) == 1


def test_for_a_gpu_that_is_not_here():
    x = jnp.ones((512, 512), jnp.bfloat16)
    for arch in ("sm_80", "sm_90", "sm_120"):
        with jtk.gpu_target(arch):
            (choice,) = jtk.explain(jtk.matmul, x, x, platform="gpu")
        assert choice.platform == "cuda"
        assert choice.kernel


def test_a_target_is_what_a_function_is_explained_for():
    x = jnp.ones((512, 512), jnp.bfloat16)
    with jtk.gpu_target("H100"):
        assert jtk.explain(jtk.matmul, x, x) == jtk.explain(jtk.matmul, x, x, platform="cuda")
        assert jtk.explain(jtk.matmul, x, x, platform="cpu")[0].platform == "cpu"
    assert jtk.explain(jtk.matmul, x, x)[0].platform == EXPLAINED[jax.default_backend()]


EXPLAINED = {"cpu": "cpu", "gpu": "cuda"}


@pytest.fixture
def no_gpu(monkeypatch):
    reason = "no NVIDIA driver on this machine"
    monkeypatch.setattr("jax_tilekern.plans.gpu._visible_gpu", lambda: reason)
    return f"{reason}; {NAME_A_GPU}"


def test_without_any_gpu_a_call_is_the_fallback_and_says_what_to_name(no_gpu):
    x = jnp.ones((64, 64))
    (choice,) = jtk.explain(jtk.matmul, x, x, platform="cuda")
    assert choice.kernel is None
    assert re.fullmatch(no_gpu, choice.reason)


def test_a_report_without_any_gpu_says_what_to_name(no_gpu):
    kernel = jtk.cuda_kernel(
        "__global__ void copy(const float* x, float* out) { out[0] = x[0]; }",
        out=lambda x: x, grid=1, block=1,
    )  # fmt: skip
    with pytest.raises(jtk.NoGpu, match=no_gpu):
        kernel.report(jnp.ones((1,)))


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_have_no_kernel(platform):
    x = jnp.ones((4, 8, 8))

    def function(x):
        return jtk.kernel(jnp.sin)(jtk.linalg.inv(jtk.matmul(x, x)))

    choices = jtk.explain(function, x, platform=platform)
    assert [choice.call for choice in choices] == ["bmk,bkn->bmn", "inv", "kernel sin"]
    for choice in choices:
        assert (choice.platform, choice.kernel) == (platform, None)
        assert choice.reason == (
            f"XLA computes every call on {platform}: kernels are for CPUs and CUDA"
        )


def test_an_unknown_platform():
    with pytest.raises(ValueError, match="platform 'npu' is none of cpu, cuda, gpu, rocm, tpu"):
        jtk.explain(jtk.matmul, jnp.ones((4, 4)), jnp.ones((4, 4)), platform="npu")


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
W = jax.ShapeDtypeStruct((128, 32), jnp.float32)


def perceptron(matmul, x, w):
    return jnp.tanh(matmul(x, w)).sum()


def counts(function, *args):
    lowered = jax.jit(function).lower(*args)
    # On a GPU only compiled programs are counted.
    found = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return {name: found[name] for name in ("flops", "bytes accessed", "transcendentals")}


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(f, (0, 1))])
@pytest.mark.parametrize("jitted", [False, True])
def test_counts_are_jaxs(transform, jitted):
    ours = transform(functools.partial(perceptron, jtk.matmul))
    theirs = counts(transform(functools.partial(perceptron, jnp.matmul)), X, W)
    found = jtk.cost_analysis(jax.jit(ours) if jitted else ours, X, W)
    assert found["flops"] >= 2 * 64 * 128 * 32
    for name, count in theirs.items():
        # A gradient's product may be a transpose and a product in JAX's own.
        assert found[name] == pytest.approx(count, rel=0.2), name
    assert found["flops"] == theirs["flops"]


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (jtk.transpose, {"axes": (1, 0)}), (jtk.sum, {"axis": 0}), (jtk.top_k, {"k": 3}),
        (jtk.tensordot, {"b": jnp.ones((16, 4)), "axes": 1}), (jtk.route, {"k": 2}),
        (jtk.segment_sum, {"segment_ids": jnp.zeros(8, int), "num_segments": 4}),
    ],
)  # fmt: skip
def test_numbers_have_their_values(function, numbers):
    """As in an eager call: a function may need the value of one."""
    x = jnp.ones((8, 16))
    expected = jtk.explain(lambda x: function(x, **numbers), x)
    assert len(expected) > 0
    for found in (jtk.explain(function, x, **numbers), jtk.explain(function, x, *numbers.values())):
        assert str(found) == str(expected)


def test_static_arguments():
    jitted = jax.jit(lambda x, power: jtk.matmul(x, x.T) ** power, static_argnums=1)
    assert jtk.cost_analysis(jitted, X, 2)["flops"] >= 2 * 64 * 64 * 128
