"""Products that overlap with their communication: values and derivatives, and what GPUs run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import emulated_gpu
import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
from jax import lax, shard_map
from jax._src.lib import xla_client
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from nvrtc_mark import needs_emulator, needs_nvrtc
from sharded import bytes_sent, collectives, devices, needs_devices

import jax_tilekern as jtk
from benchmarks import sharded as sharded_programs
from jax_tilekern.interop import ffi
from jax_tilekern.ops import planned_kernel
from jax_tilekern.ops.products import overlapped
from jax_tilekern.partitioning import call, xla
from jax_tilekern.partitioning.mesh import hlo_sharding, spec_of
from jax_tilekern.partitioning.sharing import Sharing
from jax_tilekern.plans import overlap
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.launch import Buffer

pytestmark = needs_devices

M, K, N, B = 8, 12, 16, 3
ROWS, COLUMNS = (
    (P("x"), P(None, ("y", "x")), P(None, ("y", "x"))),
    (P(None, "x"), P("x", "y"), P("x", "y")),
)


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices()[:8])


@pytest.fixture
def x(rng):
    return rng.standard_normal((M, K), np.float32)


@pytest.fixture
def w(rng):
    return rng.standard_normal((K, N), np.float32)


def by_lax_gathered(x, w, axis):
    return lax.all_gather(x, axis, tiled=True) @ w


def by_lax_scattered(x, w, axis):
    return lax.psum_scatter(x @ w, axis, tiled=True)


FUNCTIONS = {
    "gathered": (jtk.all_gather_matmul, by_lax_gathered, ROWS),
    "scattered": (jtk.matmul_reduce_scatter, by_lax_scattered, COLUMNS),
}


def over(mesh, function, specs, check_vma=True):
    return shard_map(
        lambda x, w: function(x, w, "x"),
        mesh=mesh, in_specs=specs[:2], out_specs=specs[2], check_vma=check_vma,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def on_cpu():
    """What the meshes' products are compared with is a CPU's, too: a GPU rounds to TF32."""
    with jax.default_device(devices()[0]) if devices() else contextlib.nullcontext():
        yield


def close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), ours, theirs)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(mesh, x, w, name, check_vma):
    function, _, specs = FUNCTIONS[name]

    def all_of(f):
        def loss(x, w):
            return jnp.sin(f(x, w)).sum()

        def run(x, w):
            product, tangent = jax.jvp(f, (x, w), (x + 1, w - 1))
            along_x = jax.jvp(lambda x: f(x, w), (x,), (x + 1,))[1]
            gradient = jax.grad(loss, (0, 1))
            second = jax.jvp(gradient, (x, w), (x + 1, w - 1))[1]
            return product, tangent, along_x, gradient(x, w), jax.grad(loss, 1)(x, w), second

        return jax.jit(run)

    close(all_of(over(mesh, function, specs, check_vma))(x, w), all_of(jnp.matmul)(x, w))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operands_that_all_devices_have(mesh, x, w, name):
    function, by_lax, _ = FUNCTIONS[name]

    def gradients(function):
        f = over(mesh, function, (P(), P(), P("x")))
        return jax.jit(jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1)))(x, w)

    close(gradients(function), gradients(by_lax))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_collectives(mesh, x, w, name):
    """Those of XLA's program, none of them twice."""
    function, by_lax, specs = FUNCTIONS[name]

    def found(function):
        f = over(mesh, function, specs)

        def run(x, w, cotangent):
            product, transpose = jax.vjp(f, x, w)
            return product, transpose(cotangent)

        compiled = jax.jit(run).lower(x, w, np.ones((M, N), np.float32)).compile()
        return sorted(c.kind for c in collectives(compiled))

    assert found(function) == found(by_lax) != []


def test_several_matrices_share_the_gathered_rows(mesh, rng, x, w):
    v = rng.standard_normal((K, 8), np.float32)

    def by_lax(x, w, v):
        gathered = lax.all_gather(x, "x", tiled=True)
        return [gathered @ w, gathered @ v]

    def ours(x, w, v):
        return jtk.all_gather_matmul(x, (w, v), "x")

    specs = (P("x"), *[P(None, ("y", "x"))] * 2)

    def results(function):
        f = shard_map(function, mesh=mesh, in_specs=specs, out_specs=[*specs[1:]])

        def loss(*args):
            return sum(jnp.sin(y).sum() for y in f(*args))

        gradient = jax.grad(loss, (0, 1, 2))
        args = x, w, v
        run = jax.jit(
            lambda *args: (
                f(*args), gradient(*args), jax.jvp(gradient, args, args)[1],
                # The cotangent of the rows is linear in the cotangents, and has a transpose.
                jax.linear_transpose(lambda *bars: jax.vjp(f, *args)[1]([*bars])[0], *f(*args))(x),
                jax.vmap(gradient, (0, None, None))(jnp.stack([x, x + 1]), w, v),
            )
        )  # fmt: skip
        programs = [jax.jit(each).lower(*args).compile() for each in (f, gradient)]
        return run(*args), [sorted(c.kind for c in collectives(each)) for each in programs]

    (found, kinds), (wanted, as_by_lax) = results(ours), results(by_lax)
    close(found, wanted)
    assert kinds == as_by_lax
    assert kinds[0] == ["all-gather"]
    assert kinds[1].count("reduce-scatter") == 1


@pytest.mark.parametrize("types", [(np.float16, np.float32), (np.float32, np.float16)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_narrow_operands_are_sent_as_they_are(mesh, x, w, name, types):
    """Rows are gathered before they are cast, and gradients are cast before they are summed."""
    function, by_lax, _ = FUNCTIONS[name]
    x, w = x.astype(types[0]), w.astype(types[1])
    rows = P(("y", "x"))
    specs = (rows, P(), rows) if name == "gathered" else (P("y", "x"), P("x"), rows)

    def results(function):
        f = over(mesh, function, specs)
        gradient = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))
        compiled = jax.jit(lambda x, w: (f(x, w), gradient(x, w))).lower(x, w).compile()
        return compiled(x, w), bytes_sent(compiled)

    (found, sent), (wanted, sent_by_lax) = results(function), results(by_lax)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-2, 1e-1), found, wanted)
    assert sent <= sent_by_lax


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_order_sends_no_more_than_lax(mesh, x, w, name):
    function, by_lax, specs = FUNCTIONS[name]

    def sent(function):
        f = over(mesh, function, specs)

        def loss(x, w):
            return (f(x, w) ** 3).sum()

        def squared_sum(x, w):
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1))(x, w))

        return bytes_sent(jax.jit(jax.grad(squared_sum, (0, 1))).lower(x, w).compile())

    assert sent(function) <= sent(by_lax)


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(mesh, rng, x, w, name, dims):
    function, _, specs = FUNCTIONS[name]
    x, w = (
        a if dim is None else np.moveaxis(rng.standard_normal((B, *a.shape), np.float32), 0, dim)
        for a, dim in zip((x, w), dims, strict=True)
    )

    def all_of(f):
        f = jax.vmap(f, dims)
        return jax.jit(lambda x, w: (f(x, w), jax.jvp(f, (x, w), (x + 1, w - 1))[1]))

    close(all_of(over(mesh, function, specs))(x, w), all_of(jnp.matmul)(x, w))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpoint_policies_see_products(mesh, x, w, name):
    function, _, specs = FUNCTIONS[name]

    def products(policy):
        f = over(mesh, function, specs)
        loss = jax.checkpoint(lambda x, w: jnp.sin(f(x, w)).sum(), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).jaxpr
        names = [eqn.primitive.name for eqn in equations(jaxpr)]
        return sum(name == "tilekern_exchanged_product" for name in names)

    saved = products(jax.checkpoint_policies.dots_saveable)
    assert products(jax.checkpoint_policies.nothing_saveable) == saved + 1


def test_names_of_vmap_and_rows_of_several_dimensions(mesh, rng, w):
    x = rng.standard_normal((8, 4, K), np.float32)
    f = over(mesh, jtk.all_gather_matmul, (P("x"), P(), P()), check_vma=False)
    close(jax.jit(f)(x, w), x @ w)
    mapped = jax.vmap(lambda x: jtk.all_gather_matmul(x, w, "i"), axis_name="i")(x)
    close(mapped[0], x.reshape(-1, K) @ w)
    scatter = jax.vmap(lambda x: jtk.matmul_reduce_scatter(x, w, "i"), axis_name="i")
    close(scatter(np.stack([x[:, 0]] * 4)).reshape(8, N), 4 * x[:, 0] @ w)


def test_errors(mesh, x, w):
    def call(function, x, w, axis="x"):
        specs = (P(), P(), P("x"))
        return jax.eval_shape(over(mesh, lambda x, w, _: function(x, w, axis), specs), x, w)

    with pytest.raises(TypeError, match="contract"):
        call(jtk.all_gather_matmul, x, w[:3])
    with pytest.raises(ValueError, match=r"\(12,\)"):
        call(jtk.all_gather_matmul, x[0], w)
    with pytest.raises(ValueError, match="is a matrix"):
        call(jtk.matmul_reduce_scatter, x, w[0])
    with pytest.raises(ValueError, match="divi"):
        call(jtk.matmul_reduce_scatter, x[:3], w)
    with pytest.raises(TypeError, match=r"one type, not of \['float32', 'float16'\]"):
        call(jtk.all_gather_matmul, x, [w, w.astype(np.float16)], "x")
    with pytest.raises(TypeError, match=r"one type, not of \[\]"):
        call(jtk.all_gather_matmul, x, [], "x")
    with pytest.raises(NameError, match="nowhere"):
        call(jtk.all_gather_matmul, x, w, "nowhere")


# What GPUs run.


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(overlap, "why_no_exchange", lambda: "")
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices()[:2])


def explained(
    mesh,
    function,
    specs,
    m=16384,
    k=4096,
    n=4096,
    policy="auto",
    dtype=jnp.bfloat16,
    gpu="H100",
):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n))]
    with jtk.gpu_target(gpu), jtk.policy(policy):
        return jtk.explain(jax.jit(over(mesh, function, specs)), *args, platform="cuda")


GATHER, SCATTER = (P("x"), P(None, "x"), P(None, "x")), (P(None, "x"), P("x"), P("x"))


@needs_nvrtc
@pytest.mark.parametrize("policy", ["auto", "kernels"])
def test_large_products_overlap(two, policy):
    """Also those which are XLA's on one device, as that of 16384x4096x2048 is."""

    def reason(function, specs, *shape):
        (call,) = explained(two, function, specs, *shape, policy=policy)
        assert call.kernel.startswith("wgmma_matmul")
        assert "XLA" not in call.reason
        return call.reason.partition("; ")[2]

    gathered = "rows gathered over x in {} meanwhile".format
    assert reason(jtk.all_gather_matmul, GATHER, 16384, 4096, 4096) == gathered("1 part")
    assert reason(jtk.all_gather_matmul, GATHER, 4096, 4096, 14336) == gathered("1 part")
    scattered = "terms scattered over x in 2 parts meanwhile"
    for shape in ((16384, 4096, 4096), (4096, 14336, 4096)):
        assert reason(jtk.matmul_reduce_scatter, SCATTER, *shape) == scattered


@needs_nvrtc
def test_scatters_to_several_devices_send_whole_terms(two):
    axes = (AxisType.Auto,)
    four = jax.make_mesh((4,), ("x",), axis_types=axes, devices=devices()[:4])
    (call,) = explained(four, jtk.matmul_reduce_scatter, SCATTER, policy="kernels")
    assert "terms scattered over x in 1 part meanwhile" in call.reason


@needs_nvrtc
def test_the_first_of_several_matrices_overlaps(two):
    def function(x, w, axis):
        return sum(jtk.all_gather_matmul(x, [w, w], axis))

    overlapped, product = explained(two, function, GATHER)
    assert "rows gathered over x in 1 part meanwhile" in overlapped.reason
    assert "meanwhile" not in product.reason


@needs_nvrtc
def test_what_does_not_overlap(two, monkeypatch):
    def reason(mesh=two, **options):
        call, product = explained(mesh, jtk.all_gather_matmul, GATHER, **options)
        assert call.kernel is None
        assert product.depth == 1
        return call.reason

    assert 'policy("xla")' in reason(policy="xla")
    assert "no times of float32" in reason(dtype=jnp.float32)
    assert "no times on NVIDIA A100" in reason(gpu="A100")
    with overlap.in_parts(0):
        assert "collective" in reason(policy="kernels")
    axes = (AxisType.Auto,)
    four = jax.make_mesh((4,), ("x",), axis_types=axes, devices=devices()[:4])
    assert "more than 2 devices" in reason(four)
    for policy in ("auto", "kernels"):
        assert "MiB are too few" in reason(m=2048, policy=policy)
        assert "predicted to hide" in reason(m=4096, n=512, policy=policy)
    monkeypatch.setattr(overlap, "why_no_exchange", lambda: "GPU 0 and GPU 1 have no peer access")
    assert "no peer access" in reason()


@needs_nvrtc
def test_the_plan_of_a_scatter(two):
    """Both kernels have a part of the operands, and the second one the terms of other devices."""
    axis = overlap.MeshAxis("x", 3, 2)
    with jtk.gpu_target("H100"), jtk.policy("kernels"):
        term = plan_of(lambda x, w: jtk.matmul(x, w))
        total = plan_of(
            lambda x, w, r, s: jtk.matmul(
                x, w, epilogue=lambda y, r, s: y + r + s, operands=(r, s)
            ),
            operands=2,
        )
    part = overlap.Part(512, [term, total], [[0, 1], [0, 1]])
    plan = overlap.scatter_plan([part] * 2, None, axis, 2 << 20)
    sizes = 2 * [len(term.launches)] + 2 * [len(total.launches)]
    assert plan.exchange.rows == (512, 512)
    assert plan.exchange.ends == tuple(itertools.accumulate(sizes))
    assert len(plan.launches) == sum(sizes)
    assert len(plan.alignments) == 6
    used = [
        {getattr(p, "index", getattr(p, "buffer", None)) for p in launch.parameters} - {None}
        for launch in plan.launches
    ]
    assert {0, 1, 3} <= used[0] <= {0, 1, 3, *range(6, 9)}
    assert 4 in used[-1]
    offsets = {
        p.offset_bytes
        for p in plan.launches[-1].parameters
        if getattr(p, "index", getattr(p, "buffer", None)) == 4
    }
    assert offsets == {0, 2 << 20}


def plan_of(function, operands=0):
    from jax_tilekern.interop import ffi

    plans, launch = [], ffi.cuda_launch

    def recorded(ctx, values, plan, **kwargs):
        plans.append(plan)
        return launch(ctx, values, plan, **kwargs)

    shapes = [(512, 512)] * (2 + operands)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ffi, "cuda_launch", recorded)
        jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    (plan,) = plans
    return plan


# What XLA's partitioner gets, in a plain ``jit``.

BFLOAT16 = jnp.dtype(jnp.bfloat16)
PRODUCT = Contraction((0, 2), (2, 1), (0, 1))
OF_TRANSPOSE = Contraction((2, 1), (0, 2), (0, 1))


def partitioned(mesh, shapes, specs, contraction=PRODUCT, policy="auto", sharing=None):
    """Return what each device runs, and the shardings that XLA gives it."""
    operation = call._operations["tilekern_contract"]
    params = {
        "contraction": contraction, "precision": None, "out_dtype": BFLOAT16, "out_sharding": None
    }  # fmt: skip
    *operands, result = [xla_client.Shape.array_shape(BFLOAT16, shape) for shape in shapes]
    *given, wanted = [hlo_sharding(spec, mesh) for spec in specs]
    with jtk.gpu_target("H100"), jtk.policy(policy):
        text = call._text(operation, "cuda", params)
        (_, taken, _), choices = call._answer(
            operands, given, result, wanted, text, sharing or Sharing()
        )
    return choices, [spec_of(x, 2, mesh) for x in taken]


ROW, COLUMN, LARGE = ((0,), ()), ((), (0,)), ((16384, 4096), (4096, 4096), (16384, 4096))
CASES = {
    "gathered": ((2,), LARGE, (ROW, COLUMN, COLUMN), PRODUCT, "rows gathered over axis0"),
    "scattered": ((2,), LARGE, (COLUMN, ROW, ROW), PRODUCT, "rows scattered over axis0"),
    "two axes, gathered": (
        (2, 2), ((32768, 4096), *LARGE[1:2], (32768, 4096)),
        (((0, 1), ()), ((), (1,)), ((0,), (1,))), PRODUCT, "rows gathered over axis1",
    ),
    "two axes, scattered": (
        (2, 2), ((32768, 4096), *LARGE[1:2], (32768, 4096)),
        (((0,), (1,)), ((1,), ()), ((0, 1), ())), PRODUCT, "rows scattered over axis1",
    ),
    "the second operand has the rows": (
        (2,), (LARGE[1], LARGE[0], LARGE[2]), (COLUMN, ROW, COLUMN), OF_TRANSPOSE,
        "rows gathered over axis0",
    ),
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_a_plain_jit_overlaps(two, name):
    mesh, shapes, specs, contraction, what = CASES[name]
    (choice,), taken = partitioned(mesh, shapes, specs, contraction)
    assert what in choice.call
    assert choice.kernel is not None
    assert "meanwhile" in choice.reason
    assert taken == list(specs[:2])
    (choice,), _ = partitioned(mesh, shapes, specs, contraction, policy="kernels")
    assert what in choice.call


@needs_nvrtc
def test_a_plain_jit_does_not_overlap(two):
    small = ((1024, 4096), (4096, 4096), (1024, 4096))
    for specs in ((ROW, COLUMN, COLUMN), (COLUMN, ROW, ROW), (COLUMN, ROW, ((), ()))):
        (choice,), _ = partitioned((2,), small, specs)
        assert "over axis0" not in choice.call
    # An all-reduce leaves no rows to anybody, and columns are not rows.
    for specs in ((COLUMN, ROW, ((), ())), (COLUMN, ROW, COLUMN)):
        (choice,), _ = partitioned((2,), LARGE, specs)
        assert "over axis0" not in choice.call


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_one_all_gather_serves_several_products(two, name):
    mesh, shapes, specs, contraction, what = CASES[name]
    one_of_the_rows = (2, 1) if name.startswith("the second") else (1, 2)

    def overlaps(readers, policy="auto"):
        sharing = Sharing(readers=readers)
        (choice,), _ = partitioned(mesh, shapes, specs, contraction, policy, sharing)
        return what in choice.call

    assert overlaps(one_of_the_rows)
    assert overlaps((2, 2)) == ("scattered" in name)
    assert overlaps((2, 2), "kernels")


def test_calls_say_how_many_like_them_read_their_operands(two):
    def function(x, w, v, u):
        layer = jtk.linear(x, v, jnp.ones(64, x.dtype))
        return jtk.matmul(x, w), layer, jtk.matmul(x.T, v), jtk.matmul(x, u), jtk.matmul(u, u)

    matrix = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(two, P("x")))
    lowered = jax.jit(function).trace(*[matrix] * 4).lower(lowering_platforms=("cuda",))
    (main,) = (
        op
        for op in lowered.compiler_ir().operation.regions[0].blocks[0].operations
        if "main" in str(op.attributes["sym_name"])
    )
    found = [xla._text_and_sharing_of(op) for op in main.regions[0].blocks[0].operations]
    calls = [
        (json.loads(text)["operation"], "function" in json.loads(text)["params"], sharing.readers)
        for text, sharing in filter(None, found)
    ]
    name = "tilekern_contract"
    assert calls == [
        (name, True, ()), (name, False, (2, 1)), (name, False, ()), (name, False, (2, 2)),
        (name, False, (1, 2)),
    ]  # fmt: skip


# The plans, by their emulated kernels: what ``ffi/cuda_overlap.cc`` does with them.


@pytest.fixture
def plans(two):
    """Return a function to the plan of another, on two devices, and the recorded kernels."""
    with emulated_plans.record() as recorded:
        planned_kernel._plan_once.cache_clear()

        def plan(function, specs, shapes):
            found, launch = [], ffi.cuda_launch

            def spy(ctx, values, plan, **kwargs):
                found.append(plan)
                return launch(ctx, values, plan, **kwargs)

            args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
            with pytest.MonkeyPatch.context() as patched, overlap.in_parts(2):
                patched.setattr(ffi, "cuda_launch", spy)
                with jtk.gpu_target(emulated_gpu.SMALL_H100), jtk.policy("kernels"):
                    jitted = jax.jit(over(two, function, specs))
                    jitted.trace(*args).lower(lowering_platforms=("cuda",))
            return found[0]

        yield plan, recorded


def run_launches(plan, recorded, group, buffers, out):
    """Run launches of a part, given the buffers before the workspaces; ``out`` is a result."""
    number = plan.exchange.out
    first, last = [0, *plan.exchange.ends][group : group + 2]
    read = [x for i, x in enumerate(buffers) if i != number]
    places = [Buffer(i - (i > number)) for i in range(len(buffers))]
    places[number] = Buffer(len(read))
    workspaces = map(Buffer, range(len(buffers), len(buffers) + len(plan.workspace_bytes)))
    places += workspaces
    part = dataclasses.replace(
        plan,
        launches=tuple(launch.placed(places) for launch in plan.launches[first:last]),
        alignments=(16,) * len(buffers),
        exchange=None,
    )
    (result,) = emulated_plans.run_plan(part, recorded, read, [(out, BFLOAT16)])
    return result


@needs_nvrtc
@needs_emulator
@pytest.mark.parametrize("parts", [(64, 64), (32, 96)], ids=str)
def test_emulated_gather(plans, rng, monkeypatch, parts):
    plan, recorded = plans
    monkeypatch.setattr(overlap, "_divided", lambda *_: parts)
    x, w = (rng.integers(-1, 2, s).astype(BFLOAT16) for s in ((256, 64), (64, 128)))
    found = plan(jtk.all_gather_matmul, GATHER, (x.shape, w.shape))
    exchange = found.exchange
    assert exchange.rows == parts
    for column in range(2):
        own = w[:, 64 * column : 64 * (column + 1)]
        for place in range(4):
            first = 128 * (place // 2) + sum(parts[: place % 2])
            part = x[first : first + parts[place % 2]]
            buffers = [own, own, np.uint32(0), None, x]
            buffers[exchange.lhs] = part
            got = run_launches(found, recorded, place % 2, buffers, (len(part), 64))
            np.testing.assert_array_equal(got, (part.astype(int) @ own.astype(int)))


@needs_nvrtc
@needs_emulator
@pytest.mark.parametrize("rows", [(64, 64), (32, 96)], ids=str)
@pytest.mark.parametrize("is_sum", [False, True], ids=["product", "sum"])
def test_emulated_scatter(plans, rng, monkeypatch, rows, is_sum):
    plan, recorded = plans
    monkeypatch.setattr(overlap, "_divided", lambda *_: rows)
    x, w = (rng.integers(-1, 2, s).astype(BFLOAT16) for s in ((256, 128), (128, 64)))
    # A device has a term of its own of all rows.
    added = rng.integers(-1, 2, (2, 256, 64)).astype(BFLOAT16)

    def scattered(x, w, axis):
        if not is_sum:
            return jtk.matmul_reduce_scatter(x, w, axis)
        params = {"contraction": PRODUCT, "precision": None, "out_dtype": BFLOAT16}
        term = jnp.broadcast_to(w[0], (256, 64))
        return overlapped._scattered_sum(x, w, term, axis=overlap.MeshAxis(axis, 2, 1), **params)

    found = plan(scattered, SCATTER, (x.shape, w.shape))
    exchange = found.exchange
    assert exchange.rows == rows
    assert len(exchange.ends) == 4
    assert (exchange.addend is not None) == is_sum

    def run(device, owner, part, group, received):
        """Return what a device computes of a part of a device's rows."""
        columns = slice(64 * device, 64 * (device + 1))
        first = sum(rows[:part])
        own = slice(128 * owner + first, 128 * owner + first + rows[part])
        buffers = [None] * (exchange.send + 1)
        for i in range(exchange.device):
            buffers[i] = w[columns]
        buffers[exchange.lhs] = x[own, columns]
        if is_sum:
            buffers[exchange.addend] = added[device, own]
        buffers[exchange.device] = np.uint32(0)
        buffers[exchange.receive] = buffers[exchange.send] = received
        return run_launches(found, recorded, group, buffers, (rows[part], 64))

    wanted = x.astype(int) @ w.astype(int) + is_sum * added.astype(int).sum(0)
    for device, part in itertools.product(range(2), range(2)):
        first = sum(rows[:part])
        # What is left of the buffer of all parts, from this one on.
        received = np.full((128 - first, 64), np.nan, BFLOAT16)
        received[: rows[part]] = run(1 - device, device, part, part, received * 0)
        got = run(device, device, part, 2 + part, received)
        begin = 128 * device + first
        np.testing.assert_array_equal(got, wanted[begin : begin + rows[part]])


@needs_nvrtc
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_of_what_takes_the_link_long(two, name):
    """The more parts there are, the less is computed while nothing is sent; none has few bytes."""

    function, _, _ = FUNCTIONS[name]
    gathers = name == "gathered"
    specs, usual = (GATHER, "in 1 part") if gathers else (SCATTER, "in 2 parts")

    def parts(m, k, n):
        (call,) = explained(two, function, specs, m, *((k, n) if gathers else (n, k)))
        return call.reason.partition(" over x ")[2]

    assert parts(32768, 8192, 2048) == "in 8 parts meanwhile"
    assert parts(4096, 8192, 1024) == "in 4 parts meanwhile"
    assert parts(32768, 8192, 8192) == f"{usual} meanwhile"


def test_parts_that_rows_do_not_divide_into():
    assert overlap._divided(1024, 4) == [256] * 4
    assert overlap._divided(640, 2) == [320] * 2
    assert overlap._divided(640, 3) == [128, 256, 256]
    assert overlap._divided(10, 4) == [2, 3, 2, 3]
    axis = overlap.MeshAxis("x", 2, 1)
    sizes = {"sent": 0, "flops": 1.0, "dtype": np.dtype(np.float32)}

    def parts(rows, columns, count):
        size = 4 * rows * columns
        with overlap.in_parts(count):
            return overlap.parts_of_rows(
                scatters=True, axis=axis, rows=rows, lhs=2 * size, out=size, **sizes
            )

    assert parts(10, 32, 4) == (2, 3, 2, 3)
    # Parts begin at multiples of 128 bytes.
    assert parts(8, 16, 3) == (4, 4)
    assert parts(8, 4, 3) == (8,)
    assert "no multiples of 128 bytes" in parts(7, 4, 3)
    assert "no multiples of 128 bytes" in parts(0, 32, 3)


@needs_nvrtc
def test_kernels_that_are_asked_for_have_their_registers():
    """Tiles that hold an epilogue may be slower than XLA, where the fastest ones spill."""
    x, w, y = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((1792, 6912), (5120, 6912), (1792, 5120))
    )

    def product(x, w, y):
        return jtk.matmul(x, w.T, epilogue=lambda p, y: p + y, operands=(y,))

    with jtk.gpu_target("H100"), jtk.policy("kernels"):
        (call,) = jtk.explain(product, x, w, y, platform="cuda")
    assert call.kernel is not None


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="tests/test_sharded_gpus.py has it")
def test_the_soak_finds_differences(monkeypatch, capsys):
    small = [
        "--devices",
        "2",
        "--executions",
        "6",
        "--count",
        "2",
        "--tokens",
        "16",
        "--width",
        "8",
    ]
    assert soak.main([*small, "--check-every", "2"]) == 0
    assert "in each of 7 runs on 2 devices" in capsys.readouterr().out
    monkeypatch.setattr(soak, "exact", lambda _, x, up, down: (x, (x, up, down)))
    assert soak.main(small) == 1
    assert "4 results differ" in capsys.readouterr().out


def test_benchmark_of_a_shared_sequence(monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices()[:2])
    monkeypatch.setattr(sharded_programs, "interleaved", lambda sides, _: {x: [1.0] for x in sides})
    monkeypatch.setattr(sharded_programs, "REPEATS", 1)
    for row in sharded_programs.attention_programs(mesh):
        small = dataclasses.replace(row, shapes=((2, 64, 2, 16),) * len(row.shapes))
        measured = sharded_programs.measured(small, mesh, 0, None)
        assert set(measured["seconds"]) == {"XLA", "ours"}
        assert "failure" not in measured


def test_random_rows_of_the_benchmark():
    """Sizes follow from the seed alone, and divide among devices."""
    first, again, other = (
        list(sharded_programs.random_programs(4, 20, seed)) for seed in (1, 1, 2)
    )
    assert [x.name for x in first] == [x.name for x in again] != [x.name for x in other]
    assert {x.group for x in first} == {"random rows gathered", "random rows scattered"}
    for program in first:
        (m, k), (_, n) = program.shapes
        assert m % 4 == k % 4 == n % 4 == 0


def test_benchmark(monkeypatch):
    """Every side of a small row is compiled, and its results are compared."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices()[:2])
    one = lambda sides, _: {x: [1.0] for x in sides}  # noqa: E731
    monkeypatch.setattr(sharded_programs, "interleaved", one)
    monkeypatch.setattr(sharded_programs, "REPEATS", 1)
    row = list(sharded_programs.overlapped_programs(mesh))[-1]
    shapes = ((64, 32), *2 * ((32, 128),), (128, 32), (64, 32))
    small = dataclasses.replace(row, shapes=shapes)
    measured = sharded_programs.measured(small, mesh, 0, [2])
    sides = {"XLA", "collective", "ours", "ours 2", "shard_map", "shard_map 2"}
    assert set(measured["seconds"]) == sides
    assert measured["ratio"] == {"XLA": 1}
    assert "failure" not in measured
