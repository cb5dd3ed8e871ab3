"""``linear_cross_entropy``: values, gradients, options, shardings, and the memory that it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numerics import BF16, UNIT_ROUNDOFF, exact, on_gpu, random
from sharded import MESH_TYPES, bytes_sent, collectives, devices, mesh_of, needs_devices, put

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from benchmarks.command_line import main
from benchmarks.record import read
from jax_tilekern.interop import compat
from jax_tilekern.ops.cross_entropy import logits, primitives, row_chunks
from jax_tilekern.ops.cross_entropy import loss as module

ROWS, FEATURES, LABELS = 12, 24, 5000
CHUNK_BYTES = module._CHUNK_BYTES
ALL = {"z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 5.0, "ignore_index": 3}


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


def loss(h, w, bias, labels, m=jtk, **options):
    return m.linear_cross_entropy(h, w, labels, bias=bias, **options)


def assert_trees_close(got, wanted, rtol=1e-4, atol=1e-6):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(exact(x), exact(y), rtol, atol)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float64, np.float16])
@pytest.mark.parametrize("options", [{}, ALL], ids=["no option", "all options"])
@pytest.mark.one_in(4)
def test_chunks(rng, x64, dtype, options):
    *args, labels = operands(rng, dtype)
    both = [
        jax.jit(jax.value_and_grad(functools.partial(loss, m=m, **options), (0, 1, 2)))
        for m in (jtk, ORACLES)
    ]
    # By default a GPU multiplies float32 in TF32.
    with jax.default_matmul_precision("highest"):
        wanted = both[1](*(jnp.asarray(exact(x)) for x in args), labels)
        value, gradient = both[0](*args, labels)
    unit = UNIT_ROUNDOFF[np.dtype(dtype)]
    # Logits of 16-bit operands are not rounded to 16 bits.
    np.testing.assert_allclose(value, wanted[0], 1e-5)
    for x, y in zip(gradient, wanted[1], strict=True):
        assert x.dtype == dtype
        limit = 1e-12 if dtype == np.float64 else 8 * unit + 2e-5
        assert np.abs(exact(x) - exact(y)).max() <= limit * np.abs(exact(y)).max()


def test_labels_out_of_range(rng):
    *args, labels = operands(rng, np.float32, size=100)
    for wrong in (100, -1, 2**31 - 1):
        bad = labels.at[4].set(wrong)
        gradient = jax.grad(functools.partial(loss, reduction="sum"))(*args, bad)
        for found in (loss(*args, bad, reduction="none"), gradient.sum(1)):
            assert np.isnan(found).nonzero()[0].tolist() == [4]
        ignored = loss(*args, bad, reduction="none", ignore_index=wrong)
        assert np.isfinite(ignored).all()
        assert ignored[4] == 0
    both = jax.value_and_grad(functools.partial(loss, ignore_index=7), (0, 1, 2))
    assert not any(map(np.any, jax.tree.leaves(both(*args, jnp.full_like(labels, 7)))))


@pytest.mark.thorough
def test_masked_columns_and_large_logits(rng):
    h, w, bias, labels = operands(rng, np.float32)
    # A chunk without a finite logit, and a column.
    masked = bias.at[:2048].set(-np.inf).at[3000].set(-np.inf)
    keep = np.isfinite(masked).nonzero()[0]
    label = labels % keep.size
    both = jax.value_and_grad(loss, (0, 1, 2))
    got, (h_bar, w_bar, bias_bar) = both(h, w, masked, keep[label])
    assert all(np.isfinite(x).all() for x in (w_bar, bias_bar))
    found = got, (h_bar, w_bar[:, keep], bias_bar[keep])
    assert_trees_close(found, both(h, w[:, keep], bias[keep], label))
    # The maximum is in a later chunk than logits from which exponentials would overflow.
    bias = bias.at[0].set(1e4).at[-1].set(2e4)
    np.testing.assert_allclose(loss(h, w, bias, jnp.zeros_like(labels)), 1e4, 1e-2)
    lse, *_ = primitives.statistics(h, w, jnp.full_like(bias, -np.inf), labels, options=options())
    assert np.isneginf(lse).all()


@pytest.mark.thorough
def test_small_cotangents_of_float16(rng):
    """The mean over many rows gives cotangents below float16's smallest number."""
    small, args = 2.0**-24, operands(rng, np.float16)

    def gradient(scale):
        return jax.grad(lambda *x: (scale * loss(*x, reduction="none")).sum(), (0, 2))(*args)

    for x, y in zip(gradient(small), gradient(1.0), strict=True):
        np.testing.assert_allclose(exact(x), exact(y) * small, rtol=0.1, atol=2.0**-24)


# The gradient on Hopper, a part of the rows at a time, whose program runs on a CPU as well.


def options(softcap=None, z_loss=0.0):
    precision = compat.canonicalize_precision("highest")
    return logits.Options(softcap, z_loss, 0.0, LABELS, precision, 1)


def by_rows(h, w, *args, w_dims="dv", **params):
    """Results a part of the rows at a time, and the same from a part of the columns in float64."""

    def call(h, w, bias, *others):
        layer = logits.Layer(h, w, bias, params["options"], w_dims, reduces_rows=True)
        return row_chunks.loss_and_cotangents(layer, *others, wanted=params["wanted"])

    reference = functools.partial(primitives._loss_and_gradient, **params)
    wide = (jnp.asarray(exact(x)) if x.dtype != np.int32 else x for x in (h, w, *args))
    return jax.jit(call)(h, w, *args), jax.jit(reference)(*wide)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
@pytest.mark.parametrize("w_dims", ["vd", "dv"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("offset", [0, 200])
@pytest.mark.one_in(5)
def test_rows_at_a_time(rng, x64, monkeypatch, dtype, w_dims, softcap, offset):
    monkeypatch.setattr(row_chunks, "_MIN_ROWS", 1)
    monkeypatch.setattr(row_chunks, "_ROW_MULTIPLE", 8)
    h, w, bias, labels = operands(rng, dtype, rows=(5, 10), size=160)
    bias = bias if softcap else (bias + offset).astype(dtype)
    if offset:
        # Every estimate is far from some logits, so that all is computed again.
        monkeypatch.setattr(row_chunks, "_MAX_DIFFERENCE", 1e-6)
    wide = np.float64 if dtype == np.float64 else np.float32
    weights = jnp.asarray(rng.random((5, 10)), wide).at[1, 2].set(0)
    params = {"wanted": (0, 1, 2), "options": options(softcap, 1e-3)}
    args = (h, w, bias, labels.at[3, 4].set(-1), weights)
    found, expected = by_rows(*args, w_dims=w_dims, **params)
    assert [x.dtype for x in found] == [wide, dtype, dtype, dtype]
    # A logit of 200 is rounded to a multiple of 2^-16 in float32, which its exponential multiplies.
    unit = UNIT_ROUNDOFF[np.dtype(wide)] * (1 + offset)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        bound = 64 * unit + (4 * UNIT_ROUNDOFF[np.dtype(dtype)] if i else 0)
        assert np.abs(exact(x) - np.asarray(y)).max() <= bound * np.abs(y).max()


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("largest", [np.nan, np.inf, -np.inf])
@pytest.mark.one_in(3)
def test_rows_at_a_time_with_hostile_logits(rng, x64, largest, dtype):
    h, w, bias, labels = operands(rng, dtype, size=160)
    bias = bias.at[:].set(largest) if largest == -np.inf else bias.at[7].set(largest)
    weights = jnp.ones(ROWS, np.float32)
    found, expected = by_rows(h, w, bias, labels, weights, wanted=(0, 1), options=options())
    for x, y in zip(found, expected, strict=True):
        assert not (np.isfinite(exact(x)) & ~np.isfinite(exact(y))).any()


@pytest.mark.thorough
def test_kernels_on_hopper():
    rows, features, size = 4096, 2560, 64000
    h, w = (jax.ShapeDtypeStruct(s, BF16) for s in ((rows, features), (features, size)))
    args = (h, w, jax.ShapeDtypeStruct((rows,), np.int32))

    def epilogues(**options):
        function = functools.partial(jtk.linear_cross_entropy, **options)
        gradient = jax.value_and_grad(function, (0, 1))
        with jtk.gpu_target("sm_90a"):
            choices = jtk.explain(gradient, *args, platform="cuda")
            text = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        named = [choice.call.split(", ", 1)[1] for choice in choices if ", " in choice.call]
        return list(dict.fromkeys(call.split("(")[0] for call in named)), text

    names, text = epilogues()
    assert names == ["to_exponential", "to_h_cotangent", "to_sum_and_remainder"]
    # The cotangent of w and its remainder are added up where they are.
    assert text.count("operand_index = 2") == text.count("operand_index = 3") == 1
    assert epilogues(**ALL)[0] == ["row_statistics", "to_cotangent", "add", "to_w_cotangent"]


# What the compiled program holds.


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="a CPU's compiler fuses less into reductions"
)
def test_memory(monkeypatch):
    """At the size of a model: 0.5 GiB for the value and 1 GiB with the gradient, of 8 and 24."""
    rows, features, size = 32768, 2560, 128256
    h, w, table = (
        jax.ShapeDtypeStruct(shape, BF16)
        for shape in ((rows, features), (features, size), (size, features))
    )
    labels = jax.ShapeDtypeStruct((rows,), np.int32)
    monkeypatch.setattr(module, "_CHUNK_BYTES", CHUNK_BYTES)
    function = jtk.linear_cross_entropy

    def temporaries(function, *args):
        return compiled(function, *args).memory_analysis().temp_size_in_bytes

    assert temporaries(function, h, w, labels) < 0.5 * 2**30
    assert temporaries(jax.grad(function, (0, 1)), h, w, labels) < 2**30
    tied = jax.grad(lambda h, table, labels: function(h, table.T, labels), (0, 1))
    assert temporaries(tied, h, table, labels) < 2**30


@pytest.mark.skipif(on_gpu(), reason="a CPU's program")
def test_chunks_are_products_of_the_library(rng):
    args = operands(rng, np.float32)
    program = compiled(jax.grad(loss, (0, 1)), *args).as_text()
    # Both loops make the logits.
    for size in (2048, 904):
        assert program.count(f"= f32[{ROWS},{size}]{{1,0}} custom-call(") == 2
        assert program.count(f"= f32[{FEATURES},{size}]{{1,0}} custom-call(") == 1
    frozen = compiled(jax.grad(loss), *args).as_text()
    assert f"f32[{FEATURES},2048]{{1,0}} custom-call" not in frozen
    assert f"f32[{ROWS},{LABELS}]" not in program + frozen


@pytest.mark.skipif(on_gpu(), reason="a CPU's program")
def test_a_transposed_table_is_read_where_it_lies(rng):
    h, w, bias, labels = operands(rng, np.float32)

    def tied(h, table):
        return loss(h, table.T, bias, labels)

    program = compiled(jax.value_and_grad(tied, (0, 1)), h, w.T)
    assert "transpose(" not in program.as_text().replace("transpose(jvp", "")
    value, (h_bar, table_bar) = program(h, w.T)
    expected = jax.value_and_grad(loss, (0, 1))(h, w, bias, labels)
    assert_trees_close((value, (h_bar, table_bar.T)), expected, 1e-5)


# Several devices.

SHARDINGS = {
    "vocabulary": (P(), P(None, ("d", "m"))),
    "rows": (P(("d", "m")), P()),
    "both": (P("d"), P(None, "m")),
    "features of w": (P("d"), P("d", "m")),
}
SIZE = 16384


def on_one_cpu(function, *args):
    return jax.jit(function)(*jax.device_put(args, devices()[0]))


@needs_devices
@pytest.mark.parametrize("kinds", ["auto", "explicit"])
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.one_in(8)
def test_sharded(rng, name, kinds):
    rows, features = 64, 32
    args = operands(rng, np.float32, rows=(rows,), features=features, size=SIZE)
    function = jax.value_and_grad(functools.partial(loss, **ALL), (0, 1, 2))
    expected = on_one_cpu(function, *args)
    mesh, (h_spec, w_spec) = mesh_of(MESH_TYPES[kinds]), SHARDINGS[name]
    specs = h_spec, w_spec, P(*w_spec[1:]), h_spec
    with jax.set_mesh(mesh):
        args = [put(mesh, x, spec) for x, spec in zip(args, specs, strict=True)]
        program = compiled(function, *args)
        assert_trees_close(program(*args), expected)
    # Statistics of the rows, and each gradient once; w whole only along its features.
    limit = 4 * 2 * (4 * rows + rows * features)
    if name != "vocabulary":
        limit += 4 * 2 * (features + 1) * SIZE / (1 if name == "rows" else 4)
    gathers = [x for x in collectives(program) if x.kind == "all-gather"]
    assert len(gathers) == (name == "features of w")
    limit += 4 * features * SIZE / 4 * len(gathers)
    assert bytes_sent(program) <= limit
    assert f"f32[{rows},{SIZE}]" not in program.as_text()


@needs_devices
@pytest.mark.parametrize("derived", [lambda f: f, jax.value_and_grad], ids=["loss", "gradient"])
@pytest.mark.parametrize("name", ["vocabulary", "both"])
def test_sharded_vocabulary_sends_no_more_than_jax(rng, name, derived):
    h_spec, w_spec = SHARDINGS[name]
    h, w, _, labels = operands(rng, np.float32, rows=(64,), features=32, size=1024)
    mesh = mesh_of(MESH_TYPES["auto"])
    args = [put(mesh, x, spec) for x, spec in ((h, h_spec), (w, w_spec), (labels, h_spec))]

    ours, jaxs = (compiled(derived(m.linear_cross_entropy), *args) for m in (jtk, ORACLES))
    assert bytes_sent(ours) <= bytes_sent(jaxs), collectives(ours)


@needs_devices
@pytest.mark.parametrize("kinds", ["auto", "explicit"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.one_in(3)
def test_vmap_over_weights_of_devices(rng, kinds, reduction):
    """Each device has the loss and the gradient of its own model; nothing is sent."""
    mesh = mesh_of(MESH_TYPES[kinds])
    h, w = (random(rng, shape, np.float32) for shape in ((2, ROWS, 4), (2, 4, LABELS)))
    args = h, w, jnp.asarray(rng.integers(0, LABELS, (2, ROWS)))

    def each(**mapped):
        def total(*args):
            return jtk.linear_cross_entropy(*args, reduction=reduction).sum()

        return jax.vmap(jax.value_and_grad(total, (0, 1)), **mapped)

    with jax.set_mesh(mesh):
        args = [put(mesh, x, P("d")) for x in args]
        program = compiled(each(spmd_axis_name="d" if kinds == "auto" else None), *args)
    assert bytes_sent(program) == 0


def test_no_rows():
    args = jnp.ones((0, 4)), jnp.ones((4, 5)), jnp.zeros(0, np.int32)
    assert not any(map(np.any, jax.value_and_grad(jtk.linear_cross_entropy, 1)(*args)))


@pytest.mark.thorough
def test_benchmark(tmp_path):
    record = tmp_path / "record.json"
    assert main(["cross_entropy", "--sizes", "8x16x2500", "--json", str(record)]) == 0
    value, gradient = read(record)["rows"]
    assert value["error"]["ours"] < 1e-5
    for row in (value, gradient):
        assert all(seconds > 0 for seconds in row["seconds"].values())
