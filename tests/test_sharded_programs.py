"""Sharded programs: right, a kernel on every device, and no more communication than JAX's own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close
from sharded import (
    AUTO,
    EXPLICIT,
    MESH_TYPES,
    SCHEMES,
    SLACK,
    TRANSFORMS,
    D,
    F,
    T,
    assert_equal_trees,
    bytes_sent,
    check,
    collectives,
    compiled_pair,
    custom_calls,
    explicit_part,
    integers,
    mesh_of,
    needs_devices,
    put,
    transformed,
)

import jax_tilekern as jtk
from jax_tilekern.interop import ffi

pytestmark = needs_devices


def layers(module, types, hidden, result):
    def dot(x, w, spec):
        if EXPLICIT not in types:
            return module.matmul(x, w)
        return module.matmul(x, w, out_sharding=explicit_part(spec, types, x.ndim))

    return lambda x, w1, w2: dot(dot(x, w1, hidden) ** 2, w2, result)


@pytest.mark.parametrize("types", MESH_TYPES.values(), ids=MESH_TYPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(7)
def test_schemes(rng, scheme, transform, types):
    x_spec, w1_spec, w2_spec, hidden, result = SCHEMES[scheme]
    mesh = mesh_of(types)
    x, w1, w2 = integers(rng, T, D), integers(rng, D, F), integers(rng, F, D)
    if transform == "vmap of gradient":
        x, x_spec = integers(rng, 3, T, D), P(None, *x_spec)
    with jax.set_mesh(mesh):
        args = [put(mesh, a, s) for a, s in ((x, x_spec), (w1, w1_spec), (w2, w2_spec))]
        compiled = check(
            mesh, lambda module: transformed(transform, layers(module, types, hidden, result)), args
        )
        got = compiled(*args)
    plain = transformed(transform, layers(jnp, (AUTO, AUTO), None, None))
    assert_equal_trees(got, plain(x, w1, w2))


def test_local_shapes_are_the_shards(rng):
    mesh = mesh_of((AUTO, AUTO))
    a, b = integers(rng, 16, 32), integers(rng, 32, 64)
    for specs, shape in {
        (P("d"), P()): "f32[8,64]",
        (P("d"), P(None, "m")): "f32[8,16]",
        (P("d", "m"), P("m")): "f32[8,64]",
        (P(("d", "m")), P()): "f32[2,64]",
        (P(None, ("d", "m")), P(("d", "m"))): "f32[16,64]",
    }.items():
        args = [put(mesh, x, s) for x, s in zip((a, b), specs, strict=True)]
        compiled = check(mesh, lambda module: module.matmul, args)
        assert custom_calls(compiled, ffi.CPU_MATMUL) == [shape]


def test_contracted_dimension_is_scattered_once(rng):
    mesh = mesh_of((AUTO, AUTO))
    args = [put(mesh, x, s) for x, s in (
        (integers(rng, 16, 32), P(None, "m")), (integers(rng, 32, 64), P("m")),
    )]  # fmt: skip
    for out, kinds in (
        (P(), ["all-reduce"]),
        (P("m"), ["reduce-scatter"]),
        (P(None, "m"), ["reduce-scatter"]),
    ):
        compiled = check(mesh, lambda module: module.matmul, args, out)
        assert [c.kind for c in collectives(compiled)] == kinds


@pytest.mark.parametrize("shape", [(9, 13, 11), (16, 3, 16), (2, 30, 7)])
@pytest.mark.parametrize(
    "specs",
    [(P("m"), P()), (P(), P(None, "m")), (P(None, "m"), P("m")), (P("d", "m"), P("m"))],
    ids=str,
)
@pytest.mark.parametrize("has_epilogue", [False, True])
@pytest.mark.one_in(3)
def test_sizes_that_do_not_divide(rng, shape, specs, has_epilogue):
    """Padding is garbage: poisoned here by what the operands are made of."""
    mesh = mesh_of((AUTO, AUTO))
    m, k, n = shape
    args = [put(mesh, x, P()) for x in (integers(rng, m, k), integers(rng, k, n), integers(rng, n))]

    def program(module):
        def f(a, b, bias):
            a, b = (
                lax.with_sharding_constraint(1 / (x + 2), NamedSharding(mesh, spec))
                for x, spec in zip((a, b), specs, strict=True)
            )
            if not has_epilogue:
                return module.matmul(a, b).sum()
            if module is jtk:
                return jtk.linear(a, b, bias, jnp.tanh).sum()
            return jnp.tanh(a @ b + bias).sum()

        return jax.value_and_grad(f, (0, 1, 2))

    theirs, ours = compiled_pair(mesh, program, args)
    assert_close(jax.tree.leaves(ours(*args)), jax.tree.leaves(theirs(*args)), 1e-5)
    # The slack covers programs that send a few hundred bytes.
    assert bytes_sent(ours) <= max(SLACK * bytes_sent(theirs), bytes_sent(theirs) + 256)


def test_sum_is_scattered_before_the_epilogue(rng):
    mesh = mesh_of((AUTO, AUTO))
    arrays = integers(rng, 16, 32), integers(rng, 32, 64), integers(rng, 16, 64)
    args = [put(mesh, x, s) for x, s in zip(arrays, (P(None, "m"), P("m"), P("m")), strict=True)]

    def program(module):
        if module is jnp:
            return lambda x, w, residual: jnp.maximum(x @ w, residual)
        return lambda x, w, r: jtk.matmul(x, w, epilogue=jnp.maximum, operands=(r,))

    compiled = check(mesh, program, args, P("m"))
    assert [c.kind for c in collectives(compiled)] == ["reduce-scatter"]


# Lanes.


@pytest.mark.parametrize("name", ["complex", "rows"])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_lanes(rng, name, has_gradient):
    """Every device evaluates its own, and the gradient of what all of them read is added up."""
    mesh, lanes = mesh_of((AUTO, AUTO)), P(("d", "m"))
    if name == "complex":
        x, weights = (rng.normal(size=(2, *shape)).astype("f") for shape in ((16, 5), (5,)))
        args = [put(mesh, x[0] + 1j * x[1], lanes), put(mesh, weights[0] + 1j * weights[1], P())]

        def lane(x, weights):
            step = jnp.outer(weights, weights.conj())
            return jnp.abs(lax.fori_loop(0, 4, lambda _, x: x - 0.1j * step @ x, x))
    else:
        diagonals = (*rng.normal(size=(3, 16, 70)),)
        diagonals = [x.astype("f") + 6 * (i == 1) for i, x in enumerate(diagonals)]
        args = [put(mesh, x, lanes) for x in diagonals]
        args.append(put(mesh, rng.normal(size=(70, 1)).astype("f"), P()))
        lane = lax.linalg.tridiagonal_solve

    axes = (*(0 for _ in args[1:]), None)

    def program(module):
        mapped = (jtk.kernel if module is jtk else jax.vmap)(lane, in_axes=axes)
        return jax.grad(lambda *args: (mapped(*args) ** 2).sum(), 1) if has_gradient else mapped

    theirs, ours = compiled_pair(mesh, program, args)
    assert_close(jax.tree.leaves(ours(*args)), jax.tree.leaves(theirs(*args)), 1e-5)
    assert bytes_sent(ours) <= SLACK * bytes_sent(theirs)
    assert (collectives(ours) == []) == (not has_gradient or name == "rows")


# Other products.


def squares(f):
    return lambda *args: (f(*args) ** 2).sum()


@pytest.mark.parametrize("has_gradient", [False, True])
def test_einsum_with_out_sharding(rng, has_gradient):
    """On an explicit mesh the result is sharded as asked, in the order that is asked for."""
    scores, values = integers(rng, 8, 4, 16, 16), integers(rng, 8, 16, 4, 8)
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        args = put(mesh, scores, P("d", "m")), put(mesh, values, P("d", None, "m"))

        def program(module):
            product = functools.partial(
                module.einsum, "bhqk,bkhd->bqhd", out_sharding=P("d", None, "m", None)
            )
            return jax.grad(squares(product), (0, 1)) if has_gradient else product

        theirs, ours = (jax.jit(program(m)).lower(*args).compile() for m in (jnp, jtk))
        got, wanted = ours(*args), theirs(*args)
        assert_equal_trees(got, wanted)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert jax.typeof(x).sharding == jax.typeof(y).sharding
        assert bytes_sent(ours) <= SLACK * bytes_sent(theirs)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_strassen(rng, has_gradient):
    """It is partitioned like a product, and each device cuts its own part."""
    mesh = mesh_of((AUTO, AUTO))
    args = put(mesh, integers(rng, 32, 32), P("d", "m")), put(mesh, integers(rng, 32, 64), P("m"))

    def program(module):
        product = jtk.strassen_matmul if module is jtk else jnp.matmul
        return jax.grad(squares(product), (0, 1)) if has_gradient else product

    ours = check(mesh, program, args)
    assert len(custom_calls(ours, ffi.CPU_MATMUL)) == (21 if has_gradient else 7)


def test_strassen_with_out_sharding(rng):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    a, b = integers(rng, 16, 32), integers(rng, 32, 64)
    with jax.set_mesh(mesh):
        args = put(mesh, a, P("d", "m")), put(mesh, b, P("m", None))
        product = functools.partial(jtk.strassen_matmul, out_sharding=P("d", None))
        with pytest.raises(Exception, match="out_sharding"):
            jtk.strassen_matmul(*args)
        got = jax.jit(product)(*args)
        gradients = jax.jit(jax.grad(squares(product), (0, 1)))(*args)
    assert_equal_trees([got, gradients], [a @ b, jax.grad(squares(jnp.matmul), (0, 1))(a, b)])
    for x, spec in zip((got, *gradients), (P("d", None), P("d", "m"), P("m", None)), strict=True):
        assert jax.typeof(x).sharding.spec == spec


# Functions of a module, and whether there are right-hand sides: of matrices that have no kernel.
LARGE = {
    "inv": (lambda m: m.linalg.inv, (), False), "det": (lambda m: m.linalg.det, (), False),
    "cholesky": (lambda m: m.linalg.cholesky, (), False),
    "solve": (lambda m: m.linalg.solve, (), True),
    "inv of a batch": (lambda m: m.linalg.inv, (8,), False),
    "cholesky of a batch": (lambda m: m.linalg.cholesky, (8,), False),
}  # fmt: skip


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("spec", [P("d"), P("d", "m"), P(None, "m")], ids=str)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.one_in(9)
def test_large_matrices(rng, name, spec, has_gradient):
    function, batch, has_columns = LARGE[name]
    mesh = mesh_of((AUTO, AUTO))
    a = rng.standard_normal((*batch, 72, 72)).astype(np.float32)
    arrays = [a @ a.mT / 72 + np.eye(72, dtype=np.float32)]
    args = [put(mesh, arrays[0], spec)]
    if has_columns:
        arrays.append(rng.standard_normal((72, 8)).astype(np.float32))
        args.append(put(mesh, arrays[1], P(None, "m")))

    def program(module):
        f = function(module)
        return jax.grad(squares(f), tuple(range(len(arrays)))) if has_gradient else f

    theirs, ours = compiled_pair(mesh, program, args)
    found, wanted = ours(*args), jax.jit(program(jnp))(*arrays)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(wanted))
    assert bytes_sent(ours) <= SLACK * bytes_sent(theirs), (collectives(ours), collectives(theirs))


# Grouped GEMMs.

GROUPS, ROWS = 8, 32
RAGGED = {  # rows, matrices and the result
    "rows": (P("d"), P(), P("d")),
    "rows over two axes": (P(("d", "m")), P(), P(("d", "m"))),
    "columns": (P(), P(None, None, "m"), P(None, "m")),
    "contracted": (P(None, "m"), P(None, "m"), P()),
    "experts": (P(), P("m"), P()),
    "rows and columns": (P("d"), P(None, None, "m"), P("d", "m")),
    "rows and experts": (P("d"), P("m"), P("d")),
    "experts and columns": (P(), P("d", None, "m"), P(None, "m")),
}


def ragged(module, sizes, spec):
    product = lax.ragged_dot if module is jnp else jtk.ragged_dot
    return lambda x, w: product(x, w, sizes, **({} if spec is None else {"out_sharding": spec}))


@pytest.mark.parametrize(
    ("rows", "groups", "kind"), [(32, 16, "all-gather"), (512, 2, "all-reduce")]
)
def test_a_gradient_of_groups_sends_rows_or_matrices(rng, rows, groups, kind):
    """Whichever are fewer bytes, where devices have rows and every device wants all matrices."""
    mesh = mesh_of((AUTO, AUTO))
    sizes = np.asarray(rng.multinomial(rows - 3, np.full(groups, 1 / groups)), np.int32)
    x, cotangent = integers(rng, rows, 8), integers(rng, rows, 16)

    def gradient(x, cotangent):
        w = jnp.zeros((groups, 8, 16), x.dtype)
        return jax.vjp(lambda w: jtk.ragged_dot(x, w, sizes), w)[1](cotangent)[0]

    args = [put(mesh, array, P(("d", "m"))) for array in (x, cotangent)]
    whole = jax.jit(gradient, out_shardings=NamedSharding(mesh, P()))
    compiled = whole.lower(*args).compile()
    assert {c.kind for c in collectives(compiled)} == {kind}
    np.testing.assert_array_equal(compiled(*args), jax.jit(gradient)(x, cotangent))


@pytest.mark.parametrize("types", [x for x in MESH_TYPES.values() if EXPLICIT in x], ids=str)
@pytest.mark.parametrize("scheme", RAGGED)
@pytest.mark.one_in(6)
def test_groups_on_explicit_meshes(rng, scheme, types):
    mesh = mesh_of(types)
    x_spec, w_spec, out = RAGGED[scheme]
    sizes = np.asarray(rng.multinomial(ROWS - 3, np.full(GROUPS, 1 / GROUPS)), np.int32)
    x, w = integers(rng, ROWS, 8), integers(rng, GROUPS, 8, 16)

    def loss(f, x, w):
        return (f(x, w) ** 2).sum()

    plain = ragged(jnp, sizes, None)
    wanted = plain(x, w), jax.grad(functools.partial(loss, plain), (0, 1))(x, w)
    with jax.set_mesh(mesh):
        args = [put(mesh, x, x_spec), put(mesh, w, w_spec)]
        ours = ragged(jtk, sizes, explicit_part(out, types, 2))
        got = jax.jit(ours)(*args), jax.jit(jax.grad(functools.partial(loss, ours), (0, 1)))(*args)
        assert jax.typeof(got[0]).sharding.spec == explicit_part(out, types, 2)
        for gradient, arg in zip(got[1], args, strict=True):
            assert jax.typeof(gradient).sharding == jax.typeof(arg).sharding
    assert_equal_trees(got, wanted)


def test_groups_need_out_sharding_on_explicit_meshes(rng):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        x, w = put(mesh, integers(rng, 8, 4), P("d")), put(mesh, integers(rng, 2, 4, 4), P())
        with pytest.raises(NotImplementedError, match="out_sharding"):
            jtk.ragged_dot(x, w, np.array([3, 4]))


# Around the products.


def test_nested_jit_cond_and_while(rng):
    mesh = mesh_of((AUTO, AUTO))
    args = [put(mesh, integers(rng, 16, 32), P("d", "m")), put(mesh, integers(rng, 32, 32), P("m"))]

    def program(module):
        inner = jax.jit(module.matmul)

        def f(x, w):
            y = lax.cond(x.sum() > -1e9, lambda: inner(x, w), lambda: inner(x + 1, w))
            return lax.fori_loop(0, 2, lambda i, h: jnp.sign(inner(h, w)), y)

        return f

    check(mesh, program, args)


@pytest.mark.parametrize("types", MESH_TYPES.values(), ids=MESH_TYPES)
@pytest.mark.parametrize("axes", [{"d"}, {"m"}, {"d", "m"}], ids=["d", "m", "d m"])
@pytest.mark.one_in(3)
def test_shard_map(rng, axes, types):
    """Over all axes there is a kernel; over some, XLA partitions its own operation."""
    mesh = mesh_of(types)
    with jax.set_mesh(mesh):
        x, w = (
            put(mesh, integers(rng, 16, 32), P("d")),
            put(mesh, integers(rng, 32, 8), P(None, "m")),
        )

        def program(module):
            def f(x, w):
                mapped = jax.shard_map(
                    module.matmul,
                    mesh=mesh,
                    in_specs=(
                        P("d" if "d" in axes else None),
                        P(None, "m" if "m" in axes else None),
                    ),
                    out_specs=P("d" if "d" in axes else None, "m" if "m" in axes else None),
                    axis_names=axes,
                )
                return (mapped(x, w) ** 2).sum()

            return jax.value_and_grad(f, (0, 1))

        check(mesh, program, [x, w], kernels=axes == {"d", "m"})
        if axes != {"d", "m"}:
            (choice, *_) = jtk.explain(program(jtk), x, w)
            assert choice.kernel is None
            assert "shard_map" in choice.reason


def test_unreduced_and_reduced_types(rng):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    x, w = integers(rng, 8, 16), integers(rng, 16, 32)
    with jax.set_mesh(mesh):
        args = [put(mesh, x, P("d", "m")), put(mesh, w, P("m", None))]

        def f(a, b):
            y = jtk.matmul(a, b, out_sharding=P("d", None, unreduced={"m"}))
            return jax.sharding.reshard(y, P("d", None))

        assert_equal_trees(jax.jit(f)(*args), x @ w)
        assert_equal_trees(
            jax.jit(jax.grad(lambda a, b: f(a, b).sum(), (0, 1)))(*args),
            jax.grad(lambda a, b: (a @ b).sum(), (0, 1))(x, w),
        )

        def weights(x, w):
            w = jax.sharding.reshard(w, P(None, None, reduced={"d"}))
            gradient = jax.grad(lambda w: jtk.matmul(x, w).sum())(w)
            assert jax.typeof(gradient).sharding.spec.unreduced == {"d"}
            return jax.sharding.reshard(gradient, P(None, None))

        got = jax.jit(weights)(put(mesh, x, P("d", None)), put(mesh, w, P(None, None)))
        assert_equal_trees(got, jax.grad(lambda w: jnp.sum(x @ w))(w))


@pytest.mark.parametrize("out", [P("d"), P("m"), P()])
def test_out_sharding_of_products_with_vectors(rng, out):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    a, v = integers(rng, 8, 16), integers(rng, 16)
    with jax.set_mesh(mesh):
        args = put(mesh, a, P("d", "m")), put(mesh, v, P("m"))
        for f in (jtk.matvec, lambda a, v, **kw: jtk.vecmat(v, a.T, **kw), jtk.dot):
            got = jax.jit(functools.partial(f, out_sharding=out))(*args)
            assert jax.typeof(got).sharding.spec == P(*(out or (None,)))
            assert_equal_trees(got, a @ v)


def test_gspmd_leaves_products_to_xla(rng):
    mesh = mesh_of((AUTO, AUTO))
    x, w = integers(rng, 16, 32), integers(rng, 32, 8)
    try:
        jax.config.update("jax_use_shardy_partitioner", False)
    except Exception:
        pytest.skip("this JAX has no GSPMD")
    try:
        args = put(mesh, x, P("d", "m")), put(mesh, w, P("m"))
        assert_equal_trees(jax.jit(lambda *a: jtk.matmul(*a))(*args), x @ w)
        mapped = jax.shard_map(
            jtk.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
        )
        assert_equal_trees(jax.jit(mapped)(*args), x @ w)
        assert "GSPMD" in jtk.explain(jtk.matmul, *args)[0].reason
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_sixteen_bit_sums_are_no_worse_than_jaxs(rng):
    mesh = mesh_of((AUTO, AUTO))
    k = 4096
    a, b = (rng.standard_normal(s).astype(jnp.bfloat16) for s in ((32, k), (k, 32)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    args = put(mesh, a, P(None, ("d", "m"))), put(mesh, b, P(("d", "m")))
    theirs, ours = (
        np.abs(np.asarray(jax.jit(f)(*args)).astype(np.float64) - exact).mean()
        for f in (jnp.matmul, jtk.matmul)
    )
    assert ours <= 1.05 * theirs
