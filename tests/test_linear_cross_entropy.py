"""``linear_cross_entropy``: values, gradients, options, shardings, and the memory that it takes."""

import contextlib
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numerics import BF16, UNIT_ROUNDOFF, check_derivatives, exact, on_gpu, random, roundoff
from sharded import MESH_TYPES, bytes_sent, collectives, devices, mesh_of, put

import jax_tilekern as jtk
from benchmarks.command_line import main
from jax_tilekern.interop import compat
from jax_tilekern.ops.cross_entropy import logits, row_chunks, vocabulary_chunks, weighted_loss
from jax_tilekern.ops.cross_entropy import loss as module

ROWS, FEATURES, LABELS = 12, 24, 5000
CHUNK_BYTES = module._CHUNK_BYTES
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "z_loss": {"z_loss": 1e-2},
    "label_smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0},
    "ignore_index": {"ignore_index": 3},
    "all": {"z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 5.0, "ignore_index": 3},
}


@pytest.fixture(autouse=True)
def chunks_of_few_columns(monkeypatch):
    """Two equal chunks and a smaller one of 5000 labels."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)


def operands(rng, dtype, rows=(ROWS,), features=FEATURES, size=LABELS):
    """Draw ``h``, ``w``, ``bias`` and labels, of which the first is 3."""
    h = random(rng, (*rows, features), dtype)
    labels = rng.integers(0, size, rows).astype(np.int32)
    labels.flat[0] = 3
    return h, random(rng, (features, size), dtype), random(rng, size, dtype), jnp.asarray(labels)


def loss(h, w, bias, labels, **options):
    return jtk.linear_cross_entropy(h, w, labels, bias=bias, **options)


def unfused(
    h,
    w,
    bias,
    labels,
    *,
    reduction="mean",
    z_loss=0.0,
    label_smoothing=0.0,
    softcap=None,
    ignore_index=None,
):
    """The loss from all logits, by optax."""
    logits = h @ w + bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    target = optax.smooth_labels(jax.nn.one_hot(labels, w.shape[1]), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, target)
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    counted = jnp.ones_like(losses) if ignore_index is None else labels != ignore_index
    losses = jnp.where(counted, losses, 0)
    total = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted.sum()}
    return total[reduction]


def in_float64(function, *args):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(function)(*args))


def weighted_sum(function, weights):
    return lambda *args: (function(*args) * weights).sum()


class Bounds:
    """Error bounds of the loss of each row and of the gradients of a weighted sum of them.

    The logits are sums of d products and a bias. ``lse`` is as uncertain as the logits, plus a sum
    of v exponentials and a logarithm. A logit's cotangent is as uncertain as its exponent, relative
    to itself, and is rounded to the operands' type.
    """

    def __init__(self, h, w, bias, labels, weights, dtype):
        h, w, bias = exact(h), exact(w), exact(bias)
        unit = UNIT_ROUNDOFF[np.dtype(np.float64 if dtype == np.float64 else np.float32)]
        narrow = UNIT_ROUNDOFF[np.dtype(dtype)]
        sizes = np.abs(h) @ np.abs(w) + np.abs(bias)
        logit = (((h.shape[-1] + 4) * unit + 2 * roundoff(dtype)) * sizes).max()
        size = w.shape[1]
        # Twice for the z-loss, whose derivative is 2 z lse.
        self.loss = 4 * logit + 4 * (size + sizes.max()) * unit
        logits = h @ w + bias
        softmax = np.exp(logits - logits.max(-1, keepdims=True))
        softmax /= softmax.sum(-1, keepdims=True)
        onehot = np.eye(size)[np.asarray(labels)]
        # With every option the cotangent is at most this.
        bar = np.abs(np.asarray(weights))[:, None] * (2 * softmax + onehot + 1 / size)
        relative = 2 * narrow + 2 * self.loss + 2 * roundoff(dtype) + (size + len(h)) * unit
        self.gradients = (
            relative * (bar @ np.abs(w).T),
            relative * (np.abs(h).T @ bar),
            relative * bar.sum(0),
        )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float64, np.float16])
@pytest.mark.one_in(16)
def test_against_float64(rng, x64, dtype, name):
    h, w, bias, labels = operands(rng, dtype)
    if name in ("softcap", "all"):
        # The cap and the bound of the logits in Bounds agree in size.
        h = (h / 4).astype(dtype)
    options = {**OPTIONS[name], "reduction": "none"}
    weights = rng.uniform(0.5, 1, ROWS)
    args = (h, w, bias, labels)
    wide = (*(jnp.asarray(exact(x)) for x in args[:3]), labels)
    bounds = Bounds(*args, weights, dtype)
    losses = jax.jit(functools.partial(loss, **options))(*args)
    assert losses.dtype == (np.float64 if dtype == np.float64 else np.float32)
    expected = functools.partial(unfused, **options)
    assert np.abs(exact(losses) - exact(expected(*wide))).max() <= bounds.loss

    def gradients(function, args):
        return jax.jit(jax.grad(weighted_sum(function, weights), (0, 1, 2)))(*args)

    got, wanted = gradients(functools.partial(loss, **options), args), gradients(expected, wide)
    for x, y, bound, operand in zip(got, wanted, bounds.gradients, args, strict=False):
        assert x.dtype == operand.dtype
        rounding = UNIT_ROUNDOFF[np.dtype(dtype)] * np.abs(exact(y)) + np.finfo(np.float64).tiny
        if dtype == np.float16:
            rounding = rounding + 2.0**-24
        assert (np.abs(exact(x) - exact(y)) <= bound + rounding).all()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.one_in(3)
def test_reductions_and_options(rng, x64, name):
    args = operands(rng, np.float64)
    got = loss(*args, **OPTIONS[name])
    wanted = unfused(*args, **OPTIONS[name])
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_logits_of_a_model_keep_float32(rng):
    """Logits of 16-bit operands are not rounded to 16 bits, as those of ``h @ w`` are."""
    h, w, bias, labels = operands(rng, BF16, features=1024)
    losses = loss(h, w, bias, labels, reduction="none")
    wide = (*(exact(x) for x in (h, w, bias)), labels)
    expected = in_float64(functools.partial(unfused, reduction="none"), *wide)
    rounded = jnp.matmul(h, w) + bias
    by_rounded = optax.softmax_cross_entropy_with_integer_labels(exact(rounded), labels)
    error, other = (np.abs(exact(x) - expected).max() for x in (losses, by_rounded))
    assert error < 1e-3 < 1e-2 < other


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.thorough), "all"])
@pytest.mark.thorough
def test_derivatives_of_second_order(rng, x64, name):
    args = operands(rng, np.float64, rows=(3,), features=4, size=7)

    def function(h, w, bias):
        return loss(h, w, bias, args[3], **OPTIONS[name])

    check_derivatives(function, args[:3])


@pytest.mark.parametrize("mapped", [(0, None, None, 0), (0, 0, None, None), (None, 1, 0, 0)])
@pytest.mark.one_in(3)
def test_vmap(rng, x64, mapped):
    rows = {0: (2, ROWS), None: (ROWS,)}
    h = random(rng, (*rows[mapped[0]], 4), np.float64)
    w = random(
        rng, {None: (4, LABELS), 0: (2, 4, LABELS), 1: (4, 2, LABELS)}[mapped[1]], np.float64
    )
    bias = random(rng, (LABELS,) if mapped[2] is None else (2, LABELS), np.float64)
    labels = jnp.asarray(rng.integers(0, LABELS, rows[mapped[3]]))
    args = (h, w, bias, labels)

    def both(function):
        value_and_grad = jax.value_and_grad(function, (0, 1, 2))
        inside = jax.jit(jax.vmap(value_and_grad, mapped))(*args)
        outside = jax.grad(lambda *x: jax.vmap(function, mapped)(*x, labels).sum(), (0, 1, 2))
        return inside, jax.jit(outside)(*args[:3])

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 1e-9, 1e-12), both(loss), both(unfused)
    )


@pytest.mark.thorough
def test_leading_dimensions_scan_and_remat(rng, x64):
    h, w, bias, labels = operands(rng, np.float64, rows=(2, 3, 5))

    def mean(h, w):
        return loss(h, w, bias, labels)

    def by_scan(h, w):
        def step(total, row):
            return total + jax.checkpoint(loss)(row[0], w, bias, row[1]), None

        return jax.lax.scan(step, 0.0, (h, labels))[0] / 2

    def gradients(function):
        return jax.jit(jax.value_and_grad(function, (0, 1)))(h, w)

    expected = gradients(lambda h, w: unfused(h, w, bias, labels))
    for function in (by_scan, jax.checkpoint(mean)):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, 1e-9, 1e-12),
            gradients(function),
            expected,
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint32, np.int64])
@pytest.mark.one_in(5)
def test_labels_of_every_type(rng, x64, dtype):
    h, w, bias, labels = operands(rng, np.float64, size=100)
    expected = unfused(h, w, bias, labels)
    got = loss(h, w, bias, jnp.asarray(labels, dtype), ignore_index=-100)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_labels_out_of_range(rng):
    h, w, bias, labels = operands(rng, np.float32, size=100)
    for wrong in (100, -1, 2**31 - 1):
        losses = loss(h, w, bias, labels.at[4].set(wrong), reduction="none")
        assert np.isnan(losses).nonzero()[0].tolist() == [4]
    bad = labels.at[4].set(100)
    gradient = jax.grad(lambda h: loss(h, w, bias, bad, reduction="sum"))(h)
    assert np.isnan(gradient).any(1).nonzero()[0].tolist() == [4]
    ignored = loss(h, w, bias, bad, reduction="none", ignore_index=100)
    assert np.isfinite(ignored).all()
    assert ignored[4] == 0


@pytest.mark.thorough
def test_ignored_rows_have_no_gradient(rng):
    h, w, bias, labels = operands(rng, np.float32)
    labels = labels.at[4:].set(-100)
    gradients = jax.grad(functools.partial(loss, ignore_index=-100), (0, 1, 2))(h, w, bias, labels)
    assert not np.any(gradients[0][4:])
    expected = jax.grad(loss, (0, 1, 2))(h[:4], w, bias, labels[:4])
    np.testing.assert_allclose(gradients[1], expected[1], 1e-4, 1e-6)
    all_ignored = jax.value_and_grad(functools.partial(loss, ignore_index=-100))(
        h, w, bias, jnp.full_like(labels, -100)
    )
    assert not any(np.any(x) for x in all_ignored)


@pytest.mark.thorough
def test_masked_columns_and_large_logits(rng):
    h, w, bias, labels = operands(rng, np.float32)
    keep = 4000
    labels = labels % keep
    masked = jnp.where(jnp.arange(LABELS) < keep, bias, -jnp.inf)
    got = jax.value_and_grad(loss, (0, 1, 2))(h, w, masked, labels)
    expected = jax.value_and_grad(loss, (0, 1, 2))(h, w[:, :keep], bias[:keep], labels)
    np.testing.assert_allclose(got[0], expected[0], 1e-6)
    for x, y, axis in zip(got[1], expected[1], (None, 1, 0), strict=True):
        assert np.isfinite(x).all()
        part = x if axis is None else jax.lax.slice_in_dim(x, 0, keep, axis=axis)
        np.testing.assert_allclose(part, y, 1e-4, 1e-6)
    # The maximum is in a later chunk than logits from which exponentials would overflow.
    bias = bias.at[0].set(1e4).at[-1].set(2e4)
    np.testing.assert_allclose(loss(h, w, bias, jnp.zeros_like(labels)), 1e4, 1e-2)


def test_a_column_of_minus_infinity_alone():
    """A row without a finite logit has what JAX's functions give: no NaN from the shift."""
    h, w = jnp.ones((2, 4)), jnp.ones((4, 9))
    bias = jnp.full(9, -jnp.inf)
    options = module.Options(None, None, False, 1)
    lse, *_ = module.statistics(h, w, bias, jnp.zeros(2, np.int32), **options._asdict())
    assert np.isneginf(lse).all()


@pytest.mark.thorough
def test_small_cotangents_of_float16(rng):
    """The mean over many rows gives cotangents below float16's smallest number."""
    h, w, bias, labels = operands(rng, np.float16)
    small = 2.0**-24

    def gradient(scale):
        return jax.grad(lambda h: scale * loss(h, w, bias, labels, reduction="sum"))(h)

    np.testing.assert_allclose(
        exact(gradient(1.0)) * small, exact(gradient(small)), rtol=0.1, atol=2.0**-24
    )
    bias_gradient = jax.grad(
        lambda b: small * loss(h, w, b, labels, reduction="sum")
    )(bias.astype(np.float32))  # fmt: skip
    expected = in_float64(
        jax.grad(lambda b: small * unfused(exact(h), exact(w), b, labels, reduction="sum")),
        exact(bias),
    )
    np.testing.assert_allclose(bias_gradient, expected, rtol=1e-2, atol=1e-4 * small)


# What the compiled program holds.


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="a CPU's compiler fuses less into reductions"
)
def test_memory(monkeypatch):
    """At the size of a model: 0.5 GiB for the value and 1 GiB with the gradient, of 8 and 24."""
    rows, features, size = 32768, 2560, 128256
    h = jax.ShapeDtypeStruct((rows, features), BF16)
    w = jax.ShapeDtypeStruct((features, size), BF16)
    labels = jax.ShapeDtypeStruct((rows,), np.int32)
    monkeypatch.setattr(module, "_CHUNK_BYTES", CHUNK_BYTES)
    function = jtk.linear_cross_entropy

    def temporaries(function, *args):
        return compiled(function, *args).memory_analysis().temp_size_in_bytes

    assert temporaries(function, h, w, labels) < 0.5 * 2**30
    assert temporaries(jax.grad(function, (0, 1)), h, w, labels) < 2**30
    table = jax.ShapeDtypeStruct((size, features), BF16)
    tied = jax.grad(lambda h, table, labels: function(h, table.T, labels), (0, 1))
    assert temporaries(tied, h, table, labels) < 2**30


@pytest.mark.skipif(on_gpu(), reason="a CPU's choices and program")
def test_chunks_are_products_of_the_library(rng):
    h, w, bias, labels = operands(rng, np.float32)
    choices = jtk.explain(jax.grad(loss, (0, 1)), h, w, bias, labels)
    outer = [choice.reason for choice in choices if choice.kernel is None]
    assert all("chunk" in why or "XLA fuses it into one pass" in why for why in outer)
    results = [choice.result for choice in choices if choice.kernel]
    # Both loops make the logits of each kind of chunk, and the second one two gradients.
    for size in (2048, 904):
        assert results.count(f"f32[{ROWS},{size}]") == 2
        assert results.count(f"f32[{FEATURES},{size}]") == 1
    assert results.count(f"f32[{ROWS},{FEATURES}]") == 2
    program = compiled(jax.grad(loss, (0, 1)), h, w, bias, labels).as_text()
    for size in (2048, 904):
        assert program.count(f"= f32[{ROWS},{size}]{{1,0}} custom-call(") == 2
    frozen = compiled(jax.grad(loss), h, w, bias, labels).as_text()
    assert f"f32[{FEATURES},2048]{{1,0}} custom-call" not in frozen
    assert f"f32[{ROWS},{LABELS}]" not in frozen


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.one_in(2)
def test_the_program_of_a_gpu(rng, x64, by_rows):
    """Its reduction and its loop differ from a CPU's, and run on a CPU as well."""
    h, w, bias, labels = operands(rng, np.float64, size=9001)
    # A row of a chunk without a finite logit, and one that begins with such logits.
    bias = bias.at[:2048].set(-np.inf).at[3000].set(-np.inf)
    bars = [random(rng, ROWS, np.float64) for _ in range(3)]
    options = logits.Options(5.0, None, True, 1)

    def all_results(lowering, *args):
        setting = {"options": options, "lowering": lowering}
        lse, *others = vocabulary_chunks.statistics(*args, **setting)
        read = (*args, lse, *bars)
        return lse, *others, vocabulary_chunks.cotangents(*read, wanted=(0, 1, 2), **setting)

    found = [
        jax.jit(all_results, static_argnums=0)(logits.Lowering(by_rows, gpu), h, w, bias, labels)
        for gpu in (False, True)
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-10, 1e-12), *found)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("offset", [0, 200])
@pytest.mark.one_in(5)
def test_rows_at_a_time(rng, x64, monkeypatch, dtype, by_rows, softcap, offset):
    """The program of Hopper's gradient, which runs on a CPU as well."""
    monkeypatch.setattr(row_chunks, "_MIN_ROWS", 1)
    monkeypatch.setattr(row_chunks, "_ROW_MULTIPLE", 8)
    h, w, bias, labels = operands(rng, dtype, rows=(5, 10), size=160)
    bias = bias if softcap else (bias + offset).astype(dtype)
    if offset:
        # Every estimate is far from some logits, so that all is computed again.
        monkeypatch.setattr(row_chunks, "_MAX_DIFFERENCE", 1e-6)
    wide = np.promote_types(np.float32, dtype) if dtype != BF16 else np.float32
    weights = jnp.asarray(rng.random((5, 10)), wide).at[1, 2].set(0)
    labels = labels.at[3, 4].set(-1)
    precision = compat.canonicalize_precision("highest")
    options = logits.Options(softcap, precision, False, 1)
    call = functools.partial(
        row_chunks.loss_and_cotangents,
        z_loss=1e-3,
        wanted=(0, 1, 2),
        options=options,
        lowering=logits.Lowering(by_rows, reduces_rows=True),
    )
    found = jax.jit(call)(h, w, bias, labels, weights)
    in_float64 = (jnp.asarray(exact(x)) for x in (h, w, bias))
    reference = functools.partial(
        weighted_loss._gradient_reference, z_loss=1e-3, wanted=(0, 1, 2), **options._asdict()
    )
    expected = jax.jit(reference)(*in_float64, labels, jnp.asarray(exact(weights)))
    assert [x.dtype for x in found] == [wide, wide, dtype, dtype, dtype]
    # A logit of 200 is rounded to a multiple of 2^-16 in float32, which its exponential multiplies.
    unit = UNIT_ROUNDOFF[np.dtype(wide)] * (1 + offset)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        bound = 64 * unit + (4 * UNIT_ROUNDOFF[np.dtype(dtype)] if i >= 2 else 0)
        assert np.abs(exact(x) - np.asarray(y)).max() <= bound * np.abs(y).max()


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("largest", [np.nan, np.inf, -np.inf])
@pytest.mark.one_in(3)
def test_rows_at_a_time_with_hostile_logits(rng, largest, dtype):
    h, w, bias, labels = operands(rng, dtype, size=160)
    bias = bias.at[:].set(largest) if largest == -np.inf else bias.at[7].set(largest)
    weights = jnp.ones(ROWS, np.float32)
    options = logits.Options(None, None, False, 1)
    settings = {"z_loss": 0.0, "wanted": (0, 1)}
    call = functools.partial(
        row_chunks.loss_and_cotangents,
        options=options,
        lowering=logits.Lowering(False, True),
        **settings,
    )
    reference = functools.partial(
        weighted_loss._gradient_reference, **settings, **options._asdict()
    )
    found, expected = (jax.jit(f)(h, w, bias, labels, weights) for f in (call, reference))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isfinite(exact(x)), np.isfinite(exact(y)))


@pytest.mark.thorough
def test_the_gradient_on_hopper_has_three_products():
    rows, features, size = 4096, 2560, 64000
    args = (
        jax.ShapeDtypeStruct((rows, features), BF16),
        jax.ShapeDtypeStruct((features, size), BF16),
        jax.ShapeDtypeStruct((rows,), np.int32),
    )
    gradient = jax.value_and_grad(jtk.linear_cross_entropy, (0, 1))
    with jtk.gpu_target("sm_90a"):
        choices = jtk.explain(gradient, *args, platform="cuda")
        text = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert choices[0].reason == "a chunk of the rows at a time"
    fused = [choice.call.split(", ", 1)[1] for choice in choices if ", " in choice.call]
    assert [call.split("(")[0] for call in fused] == [
        "to_exponential", "to_h_cotangent", "to_sum_and_remainder",
    ]  # fmt: skip
    # The other product estimates the largest logits from a few rows.
    assert len(choices) == 5
    assert choices[1].result == f"f32[16,{size}]"
    # The cotangent of w and its remainder are added up where they are.
    assert text.count("operand_index = 2") == text.count("operand_index = 3") == 1


@pytest.mark.thorough
def test_products_on_hopper_have_the_elementwise_parts():
    rows, features, size = 4096, 2560, 8192
    args = (
        jax.ShapeDtypeStruct((rows, features), BF16),
        jax.ShapeDtypeStruct((features, size), BF16),
        jax.ShapeDtypeStruct((rows,), np.int32),
    )
    gradient = jax.grad(functools.partial(jtk.linear_cross_entropy, **OPTIONS["all"]), (0, 1))
    with jtk.gpu_target("sm_90a"):
        choices = jtk.explain(gradient, *args, platform="cuda")
    products = [choice for choice in choices if choice.kernel]
    assert all("chunk" in choice.reason for choice in choices if choice.kernel is None)
    named = [choice.call.split(", ", 1)[1] for choice in products if ", " in choice.call]
    for name in ("of_row(", "to_cotangent(", "add("):
        assert any(call.startswith(name) for call in named)


@pytest.mark.skipif(on_gpu(), reason="a CPU's program")
def test_a_transposed_table_is_read_where_it_lies(rng):
    h, w, bias, labels = operands(rng, np.float32)
    table = jnp.asarray(w).T

    def tied(h, table):
        return loss(h, table.T, bias, labels)

    program = compiled(jax.value_and_grad(tied, (0, 1)), h, table)
    assert "transpose(" not in program.as_text().replace("transpose(jvp", "")
    value, (h_bar, table_bar) = program(h, table)
    expected, (h_expected, w_expected) = jax.value_and_grad(loss, (0, 1))(h, w, bias, labels)
    np.testing.assert_allclose(value, expected, 1e-6)
    np.testing.assert_allclose(h_bar, h_expected, 1e-5, 1e-6)
    np.testing.assert_allclose(table_bar.T, w_expected, 1e-5, 1e-6)


def test_disabled(rng):
    args = operands(rng, np.float32)
    expected = loss(*args)
    with jtk.policy("xla"):
        program = compiled(loss, *args)
    assert "jax_tilekern" not in program.as_text()
    np.testing.assert_allclose(program(*args), expected, 1e-5)


# Several devices.

SHARDINGS = {
    "vocabulary": (P(), P(None, ("d", "m"))),
    "rows": (P(("d", "m")), P()),
    "both": (P("d"), P(None, "m")),
    "features of w": (P("d"), P("d", "m")),
}
needs_devices = pytest.mark.skipif(devices() is None, reason="eight CPU devices")
SIZE = 16384


def on_one_cpu(function, *args):
    return jax.jit(function)(*jax.device_put(args, devices()[0]))


@needs_devices
@pytest.mark.parametrize("kinds", ["auto", "explicit"])
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.one_in(8)
def test_sharded(rng, name, kinds):
    rows, features = 64, 32
    h, w, bias, labels = operands(rng, np.float32, rows=(rows,), features=features, size=SIZE)
    function = jax.value_and_grad(functools.partial(loss, **OPTIONS["all"]), (0, 1, 2))
    expected = on_one_cpu(function, h, w, bias, labels)
    mesh = mesh_of(MESH_TYPES[kinds])
    of_h, of_w = SHARDINGS[name]
    of_bias = P(*of_w[1:])
    with jax.set_mesh(mesh) if kinds == "explicit" else contextlib.nullcontext():
        args = [
            put(mesh, x, spec)
            for x, spec in ((h, of_h), (w, of_w), (bias, of_bias), (labels, of_h))
        ]
        program = compiled(function, *args)
        got = program(*args)
    np.testing.assert_allclose(got[0], expected[0], 1e-6)
    for x, y in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-6)
    # Statistics of the rows, and each gradient once; w whole only along its features.
    row_bytes = 4 * rows * 4 * 2
    gradients = 4 * 2 * (rows * features + (features + 1) * SIZE / (1 if name == "rows" else 4))
    if name == "vocabulary":
        gradients = 4 * 2 * rows * features
    gathers = [x for x in collectives(program) if x.kind == "all-gather"]
    limit = gradients + row_bytes
    if name == "features of w":
        assert len(gathers) == 1
        limit += 4 * features * SIZE / 4
    else:
        assert not gathers
    assert bytes_sent(program) <= limit
    assert f"f32[{rows},{SIZE}]" not in program.as_text()


@needs_devices
@pytest.mark.parametrize("derived", [lambda f: f, jax.value_and_grad], ids=["loss", "gradient"])
@pytest.mark.parametrize("name", ["vocabulary", "both"])
def test_sharded_vocabulary_sends_no_more_than_jax(rng, name, derived):
    of_h, of_w = SHARDINGS[name]
    h, w, _, labels = operands(rng, np.float32, rows=(64,), features=32, size=1024)
    mesh = mesh_of(MESH_TYPES["auto"])
    args = [put(mesh, x, spec) for x, spec in ((h, of_h), (w, of_w), (labels, of_h))]

    def by_jax(h, w, labels):
        logits = h @ w
        at_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, 1) - at_label).mean()

    ours, jaxs = (compiled(derived(f), *args) for f in (jtk.linear_cross_entropy, by_jax))
    assert bytes_sent(ours) <= bytes_sent(jaxs), collectives(ours)


@needs_devices
def test_shard_map(rng):
    """Rows along one axis and the vocabulary along the other."""
    h, w, bias, labels = operands(rng, np.float32, rows=(64,), size=SIZE)
    function = jax.value_and_grad(functools.partial(loss, **OPTIONS["all"]), (0, 1, 2))
    expected = on_one_cpu(function, h, w, bias, labels)
    mesh = mesh_of(MESH_TYPES["auto"])

    def local(h, w, bias, labels):
        options = {**OPTIONS["all"], "reduction": "sum"}
        total = loss(h, w, bias, labels, **options, axis_name="m")
        counted = (labels != 3).sum()
        return jax.lax.psum(total, "d") / jax.lax.psum(counted, "d")

    function = jax.shard_map(
        local, mesh=mesh, in_specs=(P("d"), P(None, "m"), P("m"), P("d")), out_specs=P()
    )
    program = compiled(jax.value_and_grad(function, (0, 1, 2)), h, w, bias, labels)
    got = program(h, w, bias, labels)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-6), got, expected)
    assert {x.kind for x in collectives(program)} == {"all-reduce"}


# Bad input.


def test_errors():
    h, w, labels = jnp.ones((3, 4)), jnp.ones((4, 5)), jnp.zeros(3, np.int32)
    function = jtk.linear_cross_entropy
    with pytest.raises(TypeError, match=r"labels are float32\[3\]; they must be integers"):
        function(h, w, labels.astype(np.float32))
    with pytest.raises(TypeError, match=r"h is int32\[3, 4\]; .* floating-point"):
        function(h.astype(np.int32), w, labels)
    with pytest.raises(TypeError, match=r"bias is complex64\[5\]"):
        function(h, w, labels, bias=jnp.ones(5, np.complex64))
    with pytest.raises(ValueError, match=r"w is float32\[5, 4\].*Pass w\.T if w has a row"):
        function(h, w.T, labels)
    with pytest.raises(ValueError, match=r"h is float32\[\]"):
        function(jnp.float32(1), w, labels)
    with pytest.raises(ValueError, match=r"w is float32\[4\]"):
        function(h, w[:, 0], labels)
    with pytest.raises(ValueError, match=r"labels are int32\[3, 1\] .* \(3,\)"):
        function(h, w, labels[:, None])
    with pytest.raises(ValueError, match=r"bias is float32\[4\] .* must be \(5,\)"):
        function(h, w, labels, bias=jnp.ones(4))
    with pytest.raises(ValueError, match="needs at least one column"):
        function(h, w[:, :0], labels)
    with pytest.raises(ValueError, match=r"reduction is 'average'; it must be one of"):
        function(h, w, labels, reduction="average")
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.5"):
        function(h, w, labels, label_smoothing=1.5)
    with pytest.raises(ValueError, match="softcap is 0"):
        function(h, w, labels, softcap=0)


def test_no_rows():
    h, w = jnp.ones((0, 4)), jnp.ones((4, 5))
    labels = jnp.zeros(0, np.int32)
    assert jtk.linear_cross_entropy(h, w, labels) == 0
    assert not jax.grad(jtk.linear_cross_entropy, 1)(h, w, labels).any()


@pytest.mark.thorough
def test_benchmark(tmp_path):
    record = tmp_path / "record.json"
    assert main(["cross_entropy", "--sizes", "8x16x2500", "--json", str(record)]) == 0
    value, gradient = json.loads(record.read_text())["rows"]
    assert value["error"]["ours"] < 1e-5
    for row in (value, gradient):
        assert all(seconds > 0 for seconds in row["seconds"].values())


@needs_devices
@pytest.mark.parametrize("kinds", ["auto", "explicit"])
def test_vmap_over_weights_of_devices(rng, kinds):
    """Each device has the loss and the gradient of its own model; nothing is sent."""
    mesh = mesh_of(MESH_TYPES[kinds])
    h, w = (random(rng, shape, np.float32) for shape in ((2, ROWS, 4), (2, 4, LABELS)))
    labels = jnp.asarray(rng.integers(0, LABELS, (2, ROWS)))

    def each(reduction, **mapped):
        def total(*args):
            return jtk.linear_cross_entropy(*args, reduction=reduction).sum()

        return jax.vmap(jax.value_and_grad(total, (0, 1)), **mapped)

    for reduction in ("none", "mean"):
        wanted = on_one_cpu(each(reduction), h, w, labels)
        with jax.set_mesh(mesh):
            args = [put(mesh, x, P("d")) for x in (h, w, labels)]
            mapped = each(reduction, spmd_axis_name="d" if kinds == "auto" else None)
            program = compiled(mapped, *args)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-5), program(*args), wanted
        )
        assert bytes_sent(program) == 0
