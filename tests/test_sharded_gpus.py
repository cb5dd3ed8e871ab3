"""Sharded programs on several GPUs."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import collectives
from test_sharded_processes import free_port, output

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from jax_tilekern.ops.segments.lowering import FEW_ROWS
from jax_tilekern.plans.overlap import in_parts

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="several GPUs"
)


@pytest.fixture
def mesh():
    return jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))


def placed(mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def check(function, plain, args, out=None):
    compiled = jax.jit(function, out_shardings=out).lower(*args).compile()
    text = compiled.as_text()
    assert "jax_tilekern_cuda_launch" in text
    assert "jax_tilekern_partitioned" not in text
    wanted = jax.tree.leaves(plain(*map(np.asarray, args)))
    for x, y in zip(jax.tree.leaves(compiled(*args)), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    return compiled


@pytest.mark.parametrize(
    "specs",
    [(P("x"), P()), (P(), P(None, "x")), (P(None, "x"), P("x")), (P("x"), P("x"))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_products_and_gradients(rng, mesh, specs, dtype):
    a, b = (rng.integers(-1, 2, shape).astype(dtype) for shape in ((256, 512), (512, 384)))
    args = placed(mesh, (a, b), specs)

    def loss(matmul):
        return lambda a, b: matmul(a, b).astype(np.float32).sum()

    def exact(a, b):
        return np.matmul(a.astype(np.float32), b.astype(np.float32))

    check(jtk.matmul, exact, args)
    gradient = jax.jit(jax.grad(loss(jtk.matmul), (0, 1)))(*args)
    wanted = jax.grad(loss(jnp.matmul), (0, 1))(a, b)
    for x, y in zip(gradient, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_partial_results_are_scattered(rng, mesh):
    a, b = (rng.integers(-1, 2, shape).astype(jnp.bfloat16) for shape in ((512, 512), (512, 512)))
    args = placed(mesh, (a, b), (P(None, "x"), P("x")))
    rows = NamedSharding(mesh, P("x"))
    compiled = check(
        jtk.matmul, lambda a, b: a.astype(np.float32) @ b.astype(np.float32), args, rows
    )
    assert {c.kind for c in collectives(compiled)} == {"reduce-scatter"}


@pytest.mark.parametrize(
    "specs", [(P("x"), P()), (P(), P(None, None, "x")), (P(), P("x"))], ids=str
)
def test_groups(rng, mesh, specs):
    sizes = np.asarray(rng.multinomial(500, np.full(8, 1 / 8)), np.int32)
    x, w = (rng.integers(-1, 2, s).astype(jnp.bfloat16) for s in ((512, 128), (8, 128, 256)))
    args = placed(mesh, (x, w), specs)
    plain = lambda x, w: lax.ragged_dot(x.astype(np.float32), w.astype(np.float32), sizes)  # noqa: E731
    check(lambda x, w: jtk.ragged_dot(x, w, sizes), plain, args)


def test_a_mixture_is_rounded_once(rng, mesh):
    """Devices have experts, add float32, and gather what they have rounded."""
    tokens, features, hidden, experts = 8192, 2048, 64, 2 * mesh.size
    x = rng.integers(-1, 2, (tokens, features))
    up = rng.integers(-1, 2, (experts, features, hidden))
    down = rng.integers(-8, 9, (experts, hidden, features))
    weights, indices = np.ones((tokens, 2), np.float32), rng.integers(0, experts, (tokens, 2))

    def layer(x, up, down):
        # The sums of the first products have a spread of 30, and are integers of bfloat16.
        return jtk.moe(x, up, down, weights, indices, activation=lambda x: x)

    arrays = [a.astype(np.float32) for a in (x, up, down)]
    args = placed(mesh, [a.astype(jnp.bfloat16) for a in arrays], (P(), P("x"), P("x")))
    out = NamedSharding(mesh, P())
    compiled = jax.jit(layer, out_shardings=out).lower(*args).compile()
    assert [c.kind for c in collectives(compiled)] == ["reduce-scatter", "all-gather"]
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = np.asarray(layer(*arrays)).astype(jnp.bfloat16)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(compiled(*args)), wanted)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "x")], ids=str)
def test_large_matrices(rng, mesh, spec):
    """Factors, inverses and solutions where a batch, or rows or columns of matrices, are split."""
    rows, count = 640, 4
    x = rng.standard_normal((count, rows, rows), np.float32)
    positive = x @ x.swapaxes(1, 2) / rows + np.eye(rows, dtype=np.float32)
    (a,) = placed(mesh, (positive,), (spec,))
    for function, residual in (
        (jtk.linalg.cholesky, lambda factor: factor @ factor.swapaxes(1, 2) - positive),
        (jtk.linalg.inv, lambda inverse: positive @ inverse - np.eye(rows)),
        (lambda a: jtk.linalg.solve(a, a), lambda solution: positive @ (solution - np.eye(rows))),
    ):
        compiled = jax.jit(function).lower(a).compile()
        assert bool(collectives(compiled)) == (spec != P("x"))
        error = np.abs(residual(np.asarray(compiled(a), np.float64))).max()
        assert error <= rows * np.finfo(np.float32).eps / 2 * np.abs(positive).max()
        if function is jtk.linalg.cholesky:
            assert "jax_tilekern_cuda_launch" in compiled.as_text()


ROWS_TO_ADD = {
    "rows of the table": (P("x"), P()),
    "updates": (P(), P("x")),
    "columns": (P(None, "x"), P(None, "x")),
}


@pytest.mark.parametrize("policy", ["auto", "kernels"])
@pytest.mark.parametrize("name", [*ROWS_TO_ADD, "columns by shard_map"])
def test_few_rows_are_added_to_a_table(rng, mesh, name, policy):
    """Values and gradients. A whole call that a device makes is one of few rows by default."""
    specs = ROWS_TO_ADD[name.removesuffix(" by shard_map")]
    specs = (*specs, specs[0], P())
    arrays = [rng.integers(-1, 2, (n, 256)).astype(jnp.bfloat16) for n in (50304, 512, 50304)]
    args = placed(mesh, (*arrays, rng.integers(-1, 64, 512).astype(np.int32) * 786), specs)

    def program(m):
        def run(table, updates, cotangent, indices):
            add = functools.partial(m.scatter_add, mode="drop")
            out, back = jax.vjp(lambda t, u: add(t, indices, u), table, updates)
            return out, back(cotangent)

        return run

    ours, by_hand = program(jtk), "shard_map" in name
    if by_hand:
        out = (specs[0], specs[:2])
        ours = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=out)
    with jtk.policy(policy):
        compiled = jax.jit(ours).lower(*args).compile()
        reasons = [choice.reason for choice in jtk.explain(ours, *args)]
    assert "jax_tilekern_partitioned" not in compiled.as_text()
    assert ("jax_tilekern_cuda_launch" in compiled.as_text()) == (policy == "kernels")
    if by_hand:
        assert any(FEW_ROWS in reason for reason in reasons) == (policy == "auto")
    with jax.default_device(jax.devices("cpu")[0]):
        *wide, indices = (np.asarray(x, np.float32) for x in args)
        wanted = program(ORACLES)(*wide, indices.astype(np.int32))
    for x, y in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y))


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x"), P(None, "x")], ids=str)
def test_float32_attention(rng, mesh, spec):
    """Values and gradients where devices share batches, heads, or queries of all keys."""
    # Numbers of float16 are numbers of TF32, which products do not round.
    arrays = [
        rng.standard_normal(shape, np.float32).astype(np.float16).astype(np.float32)
        for shape in 4 * [(mesh.size, 512, 2 * mesh.size, 64)]
    ]

    def program(m):
        def run(*operands):
            *xs, cotangent = operands
            attend = functools.partial(m.attention, score_mod=RING["score"]["score_mod"])
            out, back = jax.vjp(attend, *xs)
            return out, *back(cotangent)

        return run

    args = placed(mesh, arrays, [spec] * 4)
    compiled = jax.jit(program(jtk)).lower(*args).compile()
    assert "jax_tilekern_cuda_launch" in compiled.as_text()
    assert "jax_tilekern_partitioned" not in compiled.as_text()
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        wanted = jax.tree.map(np.asarray, jax.jit(program(ORACLES))(*exact))
    for x, y in zip(compiled(*args), wanted, strict=True):
        # Weights, gradients of scores and cotangents are rounded to TF32.
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error <= 3 * 2.0**-11


def test_cuda_kernel_with_a_sharding_rule(rng, mesh):
    scaled_sum = jtk.cuda_kernel(
        """
        __global__ void scaled_sum(const float* x, const float* scale, float* out, int k) {
          float sum = 0;
          for (int i = 0; i < k; ++i) sum += x[blockIdx.x * k + i] * scale[i];
          out[blockIdx.x] = sum;
        }
        """,
        out=lambda x, scale: jax.ShapeDtypeStruct(x.shape[:1], x.dtype),
        grid=lambda x, scale: x.shape[0],
        block=1,
        scalars=lambda x, scale: (np.int32(x.shape[1]),),
        sharding_rule="rows k, k -> rows",
    )
    x, scale = rng.integers(-1, 2, (64, 32)).astype(np.float32), np.arange(32, dtype=np.float32)
    for specs, expected in (
        ((P("x"), P()), set()),
        ((P(None, "x"), P("x")), {"all-reduce"}),
        # To gather 32 numbers is less than to add 64.
        ((P(), P("x")), {"all-gather"}),
    ):
        args = placed(mesh, (x, scale), specs)
        compiled = check(scaled_sum, lambda x, scale: x @ scale, args)
        assert {c.kind for c in collectives(compiled)} == expected
    batch = placed(mesh, (np.stack([x, -x]), scale), (P(None, "x"), P()))
    check(jax.vmap(scaled_sum, (0, None)), lambda x, scale: x @ scale, batch)


# Products that overlap with their communication.

OVERLAPPED = "jax_tilekern_cuda_launch_overlapped"


def integers(rng, mesh, specs, shapes, dtype=jnp.bfloat16):
    return placed(mesh, [rng.integers(-1, 2, s).astype(dtype) for s in shapes], specs)


def exact(a, b):
    return a.astype(np.float32) @ b.astype(np.float32)


SPECS = {
    "gathered": (P("x"), P(None, "x"), P(None, "x")),
    "scattered": (P(None, "x"), P("x"), P("x")),
}
ALONG_AXIS = {"gathered": jtk.all_gather_matmul, "scattered": jtk.matmul_reduce_scatter}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_overlapped_products(rng, mesh, name, parts, dtype):
    *specs, out = SPECS[name]
    args = integers(rng, mesh, specs, ((512, 256), (256, 1024)), dtype)
    with in_parts(parts):
        jitted = jax.jit(jtk.matmul, out_shardings=NamedSharding(mesh, out))
        compiled = jitted.lower(*args).compile()
    assert OVERLAPPED in compiled.as_text()
    assert not collectives(compiled)
    for _ in range(3):
        np.testing.assert_array_equal(
            np.asarray(compiled(*args), np.float32), exact(*map(np.asarray, args))
        )


@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_overlapped_products(rng, mesh, name):
    *specs, out = SPECS[name]
    args = integers(rng, mesh, specs, ((1024, 256), (256, 512)))
    cotangent = rng.integers(-1, 2, (1024, 512)).astype(jnp.bfloat16)

    def program(f):
        def run(x, w, cotangent):
            y, transpose = jax.vjp(f, x, w)
            return y, *transpose(cotangent), jax.jvp(f, (x, w), (x, w))[1]

        return jax.jit(run)

    along = jax.shard_map(
        lambda x, w: ALONG_AXIS[name](x, w, "x"), mesh=mesh, in_specs=tuple(specs), out_specs=out
    )
    with in_parts(2):
        compiled = program(along).lower(*args, cotangent).compile()
    # The product, the cotangent of x and the tangent; the other gradient reads the gathered rows.
    assert compiled.as_text().count(f'custom_call_target="{OVERLAPPED}"') >= 2
    wanted = program(jnp.matmul)(*map(np.asarray, args), cotangent)
    for x, y in zip(compiled(*args, cotangent), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_gradients_of_a_layer_gather_rows_once(rng, mesh):
    """Products of the same rows, and gradients of weights, read what one product gathers."""

    def layer(matmul, by_columns):
        def run(x, gate, up, down, cotangent):
            def forward(x, gate, up, down):
                opened, hidden = by_columns(matmul(x, gate)), by_columns(matmul(x, up))
                return matmul(jnp.tanh(opened) * hidden, down)

            y, transpose = jax.vjp(forward, x, gate, up, down)
            return y, transpose(cotangent)

        return run

    rows, columns = P("x"), P(None, "x")
    specs = (rows, columns, columns, rows, rows)
    shapes = ((1024, 256), (256, 512), (256, 512), (512, 256), (1024, 256))
    arrays = [rng.standard_normal(s, np.float32) / np.sqrt(s[0]) for s in shapes]
    args = placed(mesh, [x.astype(jnp.bfloat16) for x in arrays], specs)
    out = jax.tree.map(
        lambda s: NamedSharding(mesh, s), (rows, specs[:4]), is_leaf=lambda x: isinstance(x, P)
    )
    split = NamedSharding(mesh, columns)
    ours = layer(jtk.matmul, lambda x: jax.lax.with_sharding_constraint(x, split))
    with in_parts(2):
        compiled = jax.jit(ours, out_shardings=out).lower(*args).compile()
    assert not collectives(compiled)
    assert compiled.as_text().count(f'custom_call_target="{OVERLAPPED}"') == 5
    found = [jax.tree.map(np.asarray, compiled(*args)) for _ in range(3)]
    for again in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], again)
    with jax.default_device(jax.devices("cpu")[0]):
        theirs = layer(jnp.matmul, lambda x: x)
        wanted = theirs(*(np.asarray(x, np.float32) for x in args))
    for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted), strict=True):
        # Each of at most four roundings to bfloat16 adds half a unit in the last place.
        error = np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y)
        assert error <= 4 * 2.0**-8


@pytest.mark.parametrize("parts", [1, 2, 3], ids=str)
def test_cotangents_of_several_products_are_one_scatter(rng, mesh, parts):
    """Also in parts of different numbers of rows."""
    rows, columns, outputs = P("x"), P(None, "x"), [P(None, "x")] * 3
    specs = (rows, *[columns] * 3)
    shapes = ((8192, 1024), *[(1024, 2048)] * 3)
    args = integers(rng, mesh, specs, shapes)
    cotangents = [rng.integers(-1, 2, (8192, 2048)).astype(jnp.bfloat16) for _ in range(3)]

    def program(f):
        def run(x, a, b, c, cotangents):
            return jax.vjp(f, x, a, b, c)[1](cotangents)

        return jax.jit(run)

    def along(x, *ws):
        return jtk.all_gather_matmul(x, ws, "x")

    ours = jax.shard_map(along, mesh=mesh, in_specs=specs, out_specs=outputs)
    with in_parts(parts):
        compiled = program(ours).lower(*args, cotangents).compile()
    assert not collectives(compiled)
    assert compiled.as_text().count(f'custom_call_target="{OVERLAPPED}"') == 2
    theirs = program(lambda x, *ws: [jnp.matmul(x, w) for w in ws])
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.tree.map(
            lambda x: np.asarray(x, np.float32),
            theirs(*(np.asarray(x, np.float32) for x in args), [np.float32(x) for x in cotangents]),
        )
    found = [jax.tree.map(np.asarray, compiled(*args, cotangents)) for _ in range(3)]
    for again in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], again)
    for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted), strict=True):
        # Roundings to bfloat16: of the sum of two products, of each device's term, and of the sum.
        error = np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y)
        assert error <= 4 * 2.0**-9


def test_overlapped_products_in_loops(rng, mesh):
    """A call is executed several times in one run."""
    x, w, v = integers(
        rng,
        mesh,
        (P("x"), P(None, None, "x"), P(None, "x")),
        ((512, 256), (9, 256, 512), (9, 512, 256)),
    )

    def layer(x, weights):
        hidden = jtk.matmul(x, weights[0])
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P(None, "x")))
        y = jtk.matmul(hidden, weights[1]) * jnp.bfloat16(2**-9)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("x"))), y.sum()

    with in_parts(2):
        compiled = jax.jit(lambda x, w, v: lax.scan(layer, x, (w, v))).lower(x, w, v).compile()
    assert OVERLAPPED in compiled.as_text()
    first = jax.tree.map(np.asarray, compiled(x, w, v))
    for _ in range(5):
        jax.tree.map(
            np.testing.assert_array_equal, first, jax.tree.map(np.asarray, compiled(x, w, v))
        )


@pytest.mark.parametrize("name", SPECS)
def test_executions_in_flight(rng, mesh, name):
    """Large products of several inputs, not waited for, beside other collectives; and donation."""
    *specs, out = SPECS[name]
    sharding = NamedSharding(mesh, out)
    xs = [integers(rng, mesh, specs[:1], ((16384, 4096),))[0] for _ in range(3)]
    (w,) = integers(rng, mesh, specs[1:], ((4096, 4096),))
    with jtk.policy("auto" if mesh.size == 2 else "kernels"):
        compiled = jax.jit(jtk.matmul, out_shardings=sharding).lower(xs[0], w).compile()
        donating = jax.jit(jtk.matmul, out_shardings=sharding, donate_argnums=0)
        donating = donating.lower(xs[0], w).compile()
    text = compiled.as_text()
    assert OVERLAPPED in text
    theirs = jax.jit(jnp.matmul, out_shardings=sharding)
    total = jax.jit(lambda y: y.astype(np.float32).sum())
    wanted = [np.asarray(theirs(x, w)) for x in xs]
    results = [(compiled(x, w), total(x)) for _ in range(4) for x in xs]
    for i, (y, _) in enumerate(results):
        np.testing.assert_array_equal(np.asarray(y), wanted[i % 3])
    del results
    copies = [x + 0 for x in xs for _ in range(3)]
    results = [donating(x, w) for x in copies]
    for i, y in enumerate(results):
        np.testing.assert_array_equal(np.asarray(y), wanted[i // 3])


RING = {
    "all keys": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (300, 0)},
    "score": {"score_mod": lambda s, b, h, q, k: s - 2.0 ** -(h + 1.0) * jnp.abs(q - k)},
}


@pytest.mark.parametrize("name", RING)
def test_ring_attention(rng, mesh, name):
    """Values and gradients of a sequence that devices share are those of one device."""
    options, sequence = RING[name], P(None, "x")
    shapes = ((2, 1024, 4, 64), (2, 1024, 2, 64), (2, 1024, 2, 64), (2, 1024, 4, 64))
    arrays = [rng.standard_normal(s, np.float32).astype(jnp.bfloat16) for s in shapes]
    over = jax.shard_map(
        functools.partial(jtk.ring_attention, axis_name="x", **options),
        mesh=mesh, in_specs=(sequence,) * 3, out_specs=sequence,
    )  # fmt: skip

    def with_gradients(attend):
        def run(query, key, value, cotangent):
            out, transpose = jax.vjp(attend, query, key, value)
            return out, *transpose(cotangent)

        return jax.jit(run)

    args = placed(mesh, arrays, [sequence] * 4)
    compiled = with_gradients(over).lower(*args).compile()
    assert {x.kind for x in collectives(compiled)} <= {"collective-permute", "all-reduce"}
    assert "jax_tilekern_cuda_launch" in compiled.as_text()
    # Float64 on one device.
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        wanted = with_gradients(functools.partial(ORACLES.attention, **options))(*exact)
        wanted = jax.tree.map(np.asarray, wanted)
    found = [jax.tree.map(np.asarray, compiled(*args)) for _ in range(3)]
    for again in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], again)
    for x, y in zip(found[0], wanted, strict=True):
        # Weights, results of blocks, the merged result and cotangents are rounded to 8 bits.
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error <= 8 * 2.0**-9


def test_many_executions():
    assert soak.main(["--executions", "2000", "--seconds", "20"]) == 0


def test_one_process_for_each_gpu():
    count = min(4, len(jax.devices()))
    program, port = Path(__file__).with_name("sharded_process.py"), free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, program, "distributed", str(i), str(port), str(count), "cuda"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    for process in processes:
        assert "done" in output(process)
