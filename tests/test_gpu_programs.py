"""Programs as XLA compiles them for GPUs, at the defaults: what they launch, move, send and keep.

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION

with the version of JAX, lets these tests run without a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import compiled, kernels, mesh_of, moved, temporary_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lane_expressions import complex_loops
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from benchmarks import sharded as sharded_programs
from benchmarks.lane_libraries import recurrent
from benchmarks.sharded_bytes import SLACK, bytes_sent, collectives
from jax_tilekern.ops.mixture import moe
from jax_tilekern.partitioning import call
from jax_tilekern.plans import overlap
from jax_tilekern.plans.gpu import KNOWN_GPUS, MIN_COMPUTE_CAPABILITY

pytest.importorskip("jax_cuda13_plugin")
pytestmark = [needs_nvrtc, pytest.mark.defaults]

MIB = 2**20
# Bounds of groups, indices and counters.
SMALL = MIB


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(function, count):
    def loss(*args):
        return jnp.sum(function(*args).astype(np.float32) ** 2)

    return jax.grad(loss, tuple(range(count)))


# XLA is predicted as fast for plain products, so these ask for kernels.
by_kernels = jtk.policy("kernels")


def ragged(x, w):
    return jtk.ragged_dot(x, w, jnp.full(8, 1024, np.int32))


def fp8(x, w):
    return jtk.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))


def capped(q, k, v):
    def score_mod(score, *_):
        return 20 * jnp.tanh(score / 20)

    return jtk.attention(q, k, v, score_mod=score_mod, is_causal=True)


def by_int4(x, w, scales):
    with jtk.policy("kernels"):
        return jtk.scaled_matmul(x, w, None, scales)


WEIGHTS = array(2048, 1024, dtype=jnp.int4), array(2048, 8, dtype=jnp.float32)
BY_INT4 = {"weight_only_few_rows_int4_bfloat": 1}
SQUARE = array(1024, 1024)
HEADS = array(2, 1024, 16, 128)
# Function, operands, and kernels that a program launches.
READ_IN_PLACE = {
    "products of every major order": (
        by_kernels(lambda x, y: [jtk.matmul(a, b) for a in (x, x.T) for b in (y, y.T)]),
        (SQUARE, SQUARE), {"wgmma_matmul_bf": 4},
    ),
    "a product and its gradients": (
        by_kernels(gradients(jtk.matmul, 2)), (SQUARE, SQUARE), {"wgmma_matmul_bf": 3},
    ),
    "a layer and its gradients": (
        by_kernels(gradients(jtk.linear, 3)), (SQUARE, SQUARE, array(1024)),
        {"wgmma_matmul_bf": 3},
    ),
    "groups and their gradients": (
        gradients(ragged, 2), (array(8192, 2048), array(8, 2048, 2048)),
        {"ragged_wgmma_matmul_bf": 3},
    ),
    "8-bit products and their gradients": (
        gradients(fp8, 2), (array(8192, 4096), array(4096, 4096)),
        {"quantize_bfloat": 3, "scaled_wgmma_matmul_fp": 3},
    ),
    "attention and its gradients": (
        gradients(capped, 3), (HEADS, HEADS, HEADS),
        {"attention_bfloat": 1, "attention_gradient_bfloat": 1},
    ),
    "a tangent of attention": (
        lambda *x: jax.jvp(capped, x[:3], x[3:]), (HEADS,) * 6,
        {"attention_bfloat": 1, "attention_tangent_bfloat": 1},
    ),
    "a permutation": (
        lambda x: jtk.transpose(x, (0, 2, 1)), (array(16, 1023, 1023),), {"transpose": 1},
    ),
    "values that groups of threads save": (
        lambda w, u, x: jax.grad(
            lambda w: jnp.sum(jtk.kernel(recurrent, in_axes=(None, 0), threads=64)(w, x) ** 2)
        )((w, u)),
        tuple(array(*shape, dtype=np.float32) for shape in ((64, 16), (64, 64), (512, 128, 16))),
        {"groups_jvp_recurrent_64_": 1, "groups_transposed_tangent_of_jvp_recurrent_64_": 1},
    ),
    "weights of 4 bits": (by_int4, (array(8, 1024), *WEIGHTS), BY_INT4),
    "decompositions of batches": (
        jtk.linalg.svd, (array(10000, 3, 3, dtype=np.float32),), {"matrix_svd_float32_3x": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_IN_PLACE)
def test_operands_are_read_in_place(name):
    function, avals, launched = READ_IN_PLACE[name]
    program = compiled(function, *avals)
    assert moved(program) == []
    found = kernels(program)
    assert {kernel: found.count(kernel) for kernel in set(found)} == launched


def experts(x, up, gate, down, weights, indices):
    return jtk.moe(x, up, down, weights, indices, w_gate=gate)


def calls_of_every_operation(dtype):
    """Functions and operands, a gradient of each operation that has one."""
    tokens, pairs = (array(*shape, dtype=np.int32) for shape in ((1024,), (1024, 2)))

    def of(*shapes):
        return tuple(array(*shape, dtype=dtype) for shape in shapes)

    yield gradients(jtk.matmul, 2), of((1024, 512), (512, 768))
    yield jtk.matmul, of((4096, 4096), (4096,))
    yield (
        gradients(lambda x, w, b: jtk.linear(x, w, b, jax.nn.gelu), 3),
        of((1024, 512), (512, 1024), (1024,)),
    )
    yield gradients(jtk.gated_linear, 3), of((1024, 512), (512, 1024), (512, 1024))
    yield gradients(ragged, 2), of((8192, 256), (8, 256, 512))
    layer = (*of((1024, 256), *[(8, 256, 512)] * 2, (8, 512, 256), (1024, 2)), pairs)
    yield experts, layer
    yield gradients(experts, 5), layer
    yield lambda x: [jtk.sum(x, axis) for axis in (0, 1, None)], of((2048, 4096))
    yield lambda x: jtk.transpose(x, (0, 2, 1)), of((16, 512, 1000))
    yield gradients(jtk.linear_cross_entropy, 2), (*of((1024, 512), (512, 8192)), tokens)
    yield gradients(lambda x, i: jtk.segment_max(x, i, 100), 1), (*of((1024, 64)), tokens)
    yield gradients(lambda x, i: jtk.take(x, i, axis=0), 1), (*of((512, 256)), tokens)
    yield gradients(lambda x: jtk.top_k(x, 4)[0], 1), of((8192, 64))
    if jnp.finfo(dtype).bits == 16:
        return
    for decomposition in (jtk.linalg.svd, jtk.linalg.eigh, jtk.linalg.qr):
        yield decomposition, of((1000, 16, 16))
    yield gradients(jtk.linalg.cholesky, 1), of((64, 128, 128))
    yield gradients(jtk.linalg.solve, 2), of((64, 64, 64), (64, 64, 8))
    yield gradients(jtk.linalg.inv, 1), of((1000, 16, 16))
    wave = jtk.kernel(lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(y), x))
    yield gradients(wave, 1), of((10000,))


# Every model that gpu_target knows, but those that are too old.
GPUS = [gpu.name for gpu in KNOWN_GPUS if gpu.compute_capability >= MIN_COMPUTE_CAPABILITY]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("gpu", "policy"),
    [(gpu, "auto") for gpu in GPUS] + [("H100", "kernels")],
)
@pytest.mark.one_in(4)
def test_gpus_have_programs(gpu, policy, dtype):
    """XLA compiles them, and no kernel fails to compile, which would be a warning."""
    with jtk.policy(policy):
        launched = [
            kernels(compiled(function, *avals, gpu=gpu))
            for function, avals in calls_of_every_operation(dtype)
        ]
    # Some of the calls are XLA's by the policy.
    assert sum(map(bool, launched)) > len(launched) / 2


def test_a_batch_of_one_tall_matrix_has_a_program_of_xla():
    with jtk.policy("xla"):
        compiled(jax.vmap(jtk.linalg.newton_schulz), array(1, 10, 5, dtype=jnp.float32))


def test_an_older_gpu_has_programs_of_xla():
    for function, avals in calls_of_every_operation(np.float32):
        assert kernels(compiled(function, *avals, gpu="T4")) == []


T, D, H, E, K = 16384, 2560, 1280, 64, 4
LAYER = (
    array(T, D), array(E, D, H), array(E, D, H), array(E, H, D),
    array(T, K, dtype=np.float32), array(T, K, dtype=np.int32),
)  # fmt: skip


@pytest.mark.parametrize("devices", [1, 8])
def test_memory_of_a_mixture(devices, monkeypatch):
    """Rows of pairs and their hidden values; with the gradient, a cotangent for each product.

    One device runs the program of a process that has so many.
    """
    if devices == 1:
        monkeypatch.setattr(moe, "is_one_call", lambda *_: False)
    rows, hidden = 2 * T * K * D, 2 * T * K * H
    assert temporary_bytes(compiled(experts, *LAYER)) <= rows + hidden + SMALL
    program = compiled(gradients(experts, 5), *LAYER)
    assert temporary_bytes(program) <= 2 * rows + hidden + SMALL
    assert moved(program) == []
    # Three products forward, and two for each of them backward.
    assert sum("ragged" in kernel for kernel in kernels(program)) == 9


def test_a_mixture_computes_again_what_it_does_not_save():
    def without_products(x, up, gate, down, weights, indices):
        return jtk.moe(x, up, down, weights, indices, w_gate=gate, save="inputs")

    program = compiled(gradients(without_products, 5), *LAYER)
    # The forward pass computes both first products in one kernel.
    assert sum("ragged" in kernel for kernel in kernels(program)) == 10


def test_memory_of_groups_is_that_of_a_cotangent():
    x, w = array(8192, 2048), array(8, 2048, 2048)
    assert temporary_bytes(compiled(gradients(ragged, 2), x, w)) <= 2 * 8192 * 2048 + SMALL


def test_memory_of_a_cross_entropy_is_not_that_of_its_logits():
    def loss(x, w, labels):
        return jnp.sum(jtk.linear_cross_entropy(x, w, labels))

    tokens, width, vocabulary = 16384, 2048, 131072
    args = array(tokens, width), array(width, vocabulary), array(tokens, dtype=np.int32)
    program = compiled(jax.grad(loss, (0, 1)), *args)
    assert temporary_bytes(program) < 2 * tokens * vocabulary / 2


# Sharded programs.


@pytest.fixture
def partitioned_anew(monkeypatch):
    """What GPUs can send each other is the test's, and is no part of what is remembered."""
    monkeypatch.setattr(call, "_answers", {})
    return monkeypatch


def compiled_by_both(program, devices):
    mesh = mesh_of((devices,), ("x",))
    avals = [array(*x, dtype=jnp.bfloat16 if len(x) > 1 else np.int32) for x in program.shapes]
    for products in (
        (jtk.matmul, jtk.ragged_dot), (jnp.matmul, jax.lax.ragged_dot),
    ):  # fmt: skip
        function = program.function(*products)
        yield compiled(function, *avals, mesh=mesh, specs=program.specs, out=program.out)


@pytest.mark.parametrize("devices", [2, 8])
def test_sharded_programs_send_no_more_than_those_of_jax(devices, partitioned_anew):
    partitioned_anew.setattr(overlap, "why_no_exchange", lambda: "collectives are compared")
    for program in sharded_programs.programs(devices):
        ours, theirs = compiled_by_both(program, devices)
        assert bytes_sent(ours) <= SLACK * bytes_sent(theirs), program.name
        assert temporary_bytes(ours) <= SLACK * temporary_bytes(theirs) + SMALL, program.name


@pytest.mark.parametrize("scheme", ["tokens", "experts", "columns"])
def test_devices_share_a_mixture(scheme, partitioned_anew):
    """The layer of eight times fewer pairs, or one sum of float32 that is rounded and gathered."""
    mesh = mesh_of((8,), ("x",))
    x, up, down = {
        "tokens": (P("x"), P(), P()),
        "experts": (P(), P("x"), P("x")),
        "columns": (P(), P(None, None, "x"), P(None, "x")),
    }[scheme]
    program = compiled(experts, *LAYER, mesh=mesh, specs=(x, up, up, down, x, x), out=x)
    rows, hidden = 2 * T * K * D, 2 * T * K * H
    if scheme == "tokens":
        assert collectives(program) == []
        assert temporary_bytes(program) <= (rows + hidden) / 8 + SMALL
        return
    shared = 7 / 8 * T * D
    assert collectives(program) == [("reduce-scatter", 4 * shared), ("all-gather", 2 * shared)]
    assert temporary_bytes(program) <= rows + hidden + 4 * T * D * 2 + SMALL


def test_products_of_the_same_rows_read_what_the_first_one_gathers(partitioned_anew):
    partitioned_anew.setattr(overlap, "why_no_exchange", lambda: "")
    mesh, by_columns = mesh_of((2,), ("x",)), P(None, "x")
    x, w = array(16384, 4096), array(4096, 4096)
    for count in (1, 3):
        program = compiled(
            lambda x, *ws: tuple(jtk.matmul(x, w) for w in ws), x, *[w] * count, mesh=mesh,
            specs=(P("x"), *[by_columns] * count), out=(by_columns,) * count,
        )  # fmt: skip
        assert collectives(program) == []
        assert program.as_text().count(OVERLAPPED) == 1


def test_a_gated_layer_sends_nothing_beside_its_products(partitioned_anew):
    """Its first product is split as its result is, and gathers the rows for the second one."""
    partitioned_anew.setattr(overlap, "why_no_exchange", lambda: "")
    mesh, rows, columns = mesh_of((2,), ("x",)), P("x"), P(None, "x")

    def layer(x, gate, up, down):
        hidden, sharding = jtk.gated_linear(x, gate, up), NamedSharding(mesh, columns)
        return jtk.matmul(jax.lax.with_sharding_constraint(hidden, sharding), down)

    avals = array(8192, 4096), array(4096, 8192), array(4096, 8192), array(8192, 4096)
    program = compiled(layer, *avals, mesh=mesh, specs=(rows, columns, columns, rows), out=rows)
    assert collectives(program) == []
    assert program.as_text().count(OVERLAPPED) == 2


def test_a_product_with_an_epilogue_reads_rows_that_another_one_gathers(partitioned_anew):
    partitioned_anew.setattr(overlap, "why_no_exchange", lambda: "")
    mesh, rows, columns = mesh_of((2,), ("x",)), P("x"), P(None, "x")

    def layer(x, gate, up, down):
        sharding = NamedSharding(mesh, columns)
        hidden = jax.lax.with_sharding_constraint(jtk.matmul(x, gate), sharding)
        gated = jtk.matmul(
            x, up, epilogue=lambda y, gate: y * jax.nn.silu(gate), operands=(hidden,)
        )
        return jtk.matmul(jax.lax.with_sharding_constraint(gated, sharding), down)

    avals = array(8192, 4096), array(4096, 8192), array(4096, 8192), array(8192, 4096)
    specs = (rows, columns, columns, rows)
    program = compiled(layer, *avals, mesh=mesh, specs=specs, out=rows)
    assert collectives(program) == []
    assert program.as_text().count(OVERLAPPED) == 2


def test_the_gradient_of_rows_of_several_products_is_one_scatter(partitioned_anew):
    """Gate and up share a gather, their cotangents of the rows a scatter; both are hidden."""
    partitioned_anew.setattr(overlap, "why_no_exchange", lambda: "")
    mesh, rows, columns = mesh_of((2,), ("x",)), P("x"), P(None, "x")
    specs = (rows, columns, columns, rows)

    def layer(x, gate, up, down):
        opened, hidden = jtk.all_gather_matmul(x, [gate, up], "x")
        return jtk.matmul_reduce_scatter(jax.nn.silu(opened) * hidden, down, "x")

    def with_gradients(x, gate, up, down, cotangent):
        forward = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=rows)
        y, transpose = jax.vjp(forward, x, gate, up, down)
        return y, transpose(cotangent)

    x, up, down = array(8192, 4096), array(4096, 8192), array(8192, 4096)
    program = compiled(
        with_gradients, x, up, up, down, x, mesh=mesh, specs=(*specs, rows), out=(rows, specs)
    )
    assert collectives(program) == []
    assert program.as_text().count(OVERLAPPED) == 4


OVERLAPPED = 'custom_call_target="jax_tilekern_cuda_launch_overlapped"'
SCHEMES = {
    "tensor": ((2,), (P("m"), P(None, "m"), P("m")), P(None, "m"), []),
    "data and tensor": (
        (2, 2), (P(("d", "m")), P(None, "m"), P("m")), P("d", "m"), 2 * ["all-reduce"]
    ),
    "data": ((2, 2), (P(("d", "m")), P(), P()), P(("d", "m")), 2 * ["all-reduce"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_of_weights_read_the_rows_that_products_gather(partitioned_anew, name):
    """Nothing is sent beside products but sums of gradients, and no more than by JAX's program."""
    partitioned_anew.setattr(overlap, "why_no_exchange", lambda: "")
    shape, (x, up, down), hidden, kinds = SCHEMES[name]
    mesh = mesh_of(shape, ("d", "m")[-len(shape) :])
    tokens = array(8192 * mesh.size // 2, 4096)

    def programs():
        for matmul in (jtk.matmul, jnp.matmul):

            def layer(x, up, down, matmul=matmul):
                product = matmul(x, up)
                sharding = NamedSharding(mesh, hidden)
                product = jax.lax.with_sharding_constraint(product, sharding)
                return matmul(jax.nn.silu(product), down)

            def run(x, up, down, cotangent, layer=layer):
                y, transpose = jax.vjp(layer, x, up, down)
                return y, transpose(cotangent)

            avals = (tokens, array(4096, 8192), array(8192, 4096), tokens)
            yield compiled(run, *avals, mesh=mesh, specs=(x, up, down, x), out=(x, (x, up, down)))

    ours, theirs = programs()
    assert sorted(c.kind for c in collectives(ours)) == kinds
    assert ours.as_text().count(OVERLAPPED) == (0 if name == "data" else 4)
    assert bytes_sent(ours) <= bytes_sent(theirs)


@pytest.mark.parametrize(("specs", "columns"), [((P(), P("d")), 768), ((P(None, "d"), P()), 384)])
def test_devices_fill_what_they_scatter_to(specs, columns, partitioned_anew):
    program = compiled(
        gradients(lambda x, i: jtk.take(x, i, axis=0), 1),
        array(50304, 768), array(2048, dtype=np.int32), mesh=mesh_of((2,), ("d",)), specs=specs,
    )  # fmt: skip
    assert kernels(program) == ["fill"]
    assert f"bf16[50304,{columns}]{{1,0}} custom-call()" in program.as_text()


@pytest.mark.parametrize("function", [jtk.cumsum, jtk.cumprod])
def test_elements_of_a_scan_have_the_type_that_is_asked_for(function):
    # XLA computes it, which may leave out a rounding to a type that it widens again.
    x = array(9, 1, dtype=np.float32)
    program = compiled(lambda x: function(x, 0, dtype=jnp.bfloat16), x)
    assert not kernels(program)
    assert "f32[9,1]{1,0} convert(%" in program.as_text()


def test_a_device_chooses_by_its_own_lanes():
    """Lanes over four devices are few enough for groups of threads, and on one device XLA's."""
    data = jnp.linspace(-1, 1, 1600).reshape(200, 8)

    def descend(x):
        gradient = jax.grad(lambda x: jnp.sum(jnp.logaddexp(data @ x, 0)))
        return jax.lax.fori_loop(0, 10, lambda _, x: x - 0.1 * gradient(x), x)

    lanes, split = array(16384, 8, dtype=np.float32), P("x")
    assert kernels(compiled(jtk.kernel(descend), lanes)) == []
    program = compiled(jtk.kernel(descend), lanes, mesh=mesh_of((4,), ("x",)), specs=(split,))
    assert kernels(program) == ["groups_descend_32_"]
    assert collectives(program) == []


@pytest.mark.parametrize("name", ["complex", "rows", "groups"])
def test_devices_share_lanes(name):
    """Lanes of complex numbers, with rows in shared memory, and of groups of threads."""
    single, lanes, shared = np.float32, P("x"), P()
    function, avals, specs, kernel = {
        "complex": (
            jtk.kernel(complex_loops, in_axes=(0, None)),
            [array(4096, 6, dtype=np.complex64), array(6, dtype=np.complex64)],
            (lanes, shared),
            "lanes_complex_loops_32_",
        ),
        "rows": (
            jtk.kernel(jax.lax.linalg.tridiagonal_solve),
            [array(10_000, 100, *ends, dtype=single) for ends in ((), (), (), (1,))],
            (lanes,) * 4,
            "lanes_tridiagonal_solve_128_",
        ),
        "groups": (
            jtk.kernel(lambda w, x: recurrent((w, w), x), in_axes=(None, 0), threads=64),
            [array(64, 64, dtype=single), array(4096, 8, 64, dtype=single)],
            (shared, lanes),
            "groups__lambda__64_",
        ),
    }[name]
    program = compiled(function, *avals, mesh=mesh_of((4,), ("x",)), specs=specs)
    assert kernels(program) == [kernel]
    assert (moved(program), collectives(program)) == ([], [])


@pytest.mark.parametrize("name", ["functions", "queries"])
def test_devices_share_attention(name):
    """Devices share the batch and the heads without a collective, or the queries of all keys."""
    lengths = jnp.array([900, 500, 300, 1000], np.int32)

    def attend(*operands):
        return jtk.attention(
            *operands,
            is_causal=True,
            key_value_seq_lengths=lengths,
            score_mod=lambda s, b, h, q, k: s - (b + h) * (q - k),
        )

    by_heads, whole = P("x", None, "y"), P()
    specs = {"functions": (by_heads,) * 3, "queries": (P(None, "x"), whole, whole)}[name]
    x, y = array(4, 1024, 8, 64), array(4, 1024, 4, 64)
    mesh = mesh_of((2, 2), ("x", "y"))
    program = compiled(gradients(attend, 3), x, y, y, mesh=mesh, specs=specs)
    assert kernels(program) == ["attention_bfloat", "attention_gradient_bfloat"]
    sent = [x.kind for x in collectives(program)]
    assert sent == [] if name == "functions" else set(sent) <= {"all-reduce", "reduce-scatter"}


@pytest.mark.parametrize(
    ("specs", "out", "sent"),
    [
        ((P(), P("d"), P("d")), P(None, "d"), []),
        ((P("d"), P(), P()), P("d"), []),
        # Sums of float32 of both devices.
        ((P(None, "d"), P(None, "d"), P(None, "d")), P(), [("all-reduce", 16 * 2048 * 4)]),
    ],
)
def test_sharded_products_by_weights(specs, out, sent):
    program = compiled(
        by_int4, array(16, 1024), *WEIGHTS, mesh=mesh_of((2,), ("d",)), specs=specs, out=out
    )
    assert kernels(program) == [*BY_INT4]
    assert [(x.kind, x.bytes_sent) for x in collectives(program)] == sent
