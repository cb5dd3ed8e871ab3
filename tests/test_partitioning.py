"""How a call is partitioned: shardings as mesh axes, reshards, and the choice of a partition."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import AUTO, devices, mesh_of

import jax_tilekern as jtk
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.partitioning.choice import choose_partition
from jax_tilekern.partitioning.mesh import axes_of, common_mesh, hlo_sharding, local_shape
from jax_tilekern.partitioning.params_text import _PROCESS, from_text, to_text
from jax_tilekern.partitioning.reshard import specs_of
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.contraction import Contraction

M, N, K = range(3)


def product(m, k, n):
    sizes = {M: m, K: k, N: n}
    return ShardingRule(((M, K), (K, N)), ((M, N),), sizes, flops=2 * m * k * n)


def sizes_in_bytes(rule, itemsize):
    return [
        [itemsize * math.prod(rule.sizes[x] for x in dims) for dims in arrays]
        for arrays in (rule.operands, rule.results)
    ]


def partition_of(rule, mesh, lhs, rhs, out, itemsize=2):
    """Partition a product; for each array, the dimension that each mesh axis splits."""
    specs = [
        tuple(tuple(a for a, dim in enumerate(dims) if dim == i) for i in range(2))
        for dims in (lhs, rhs, out)
    ]
    return choose_partition(
        rule, mesh, specs[:2], specs[2:], *sizes_in_bytes(rule, itemsize), [1, 1]
    )


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (6,)])
def test_shardings_are_mesh_axes_and_back(shape):
    names = "abc"[: len(shape)]
    count = math.prod(shape)
    user = jax.make_mesh(
        shape, tuple(names), (AxisType.Auto,) * len(shape), devices=jax.devices("cpu")[:count]
    )
    parts = [None, *names, *itertools.permutations(names, 2)]
    for given in itertools.product(parts, repeat=2):
        used = [a for part in given for a in (part or ())]
        if len(set(used)) < len(used):
            continue
        named = NamedSharding(user, P(*given))
        sharding = named._to_xla_hlo_sharding(2)
        mesh, (spec,) = common_mesh([sharding], [2])
        if sharding.is_replicated():
            assert spec == ((), ())
            continue
        assert math.prod(mesh) == count
        back = hlo_sharding(spec, mesh)
        shard_shape = named.shard_shape((count * 2, count * 2))
        assert tuple(back.tile_assignment_dimensions()[:2]) == tuple(
            count * 2 // size for size in shard_shape
        )
        own, found = (
            np.array(s.tile_assignment_devices()).reshape(s.tile_assignment_dimensions())
            for s in (sharding, back)
        )
        tiles = own.shape[:2]
        for index in np.ndindex(*tiles):
            assert set(own[index].ravel()) == set(found[index].ravel())


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_axes_that_split_every_array_together_are_one():
    mesh = mesh_of((AUTO, AUTO))

    def found(*specs):
        shardings = [NamedSharding(mesh, spec)._to_xla_hlo_sharding(2) for spec in specs]
        return common_mesh(shardings, [2] * len(specs))

    assert found(P("d", "m"), P("m")) == ((2, 4), [((0,), (1,)), ((1,), ())])
    assert found(P(("d", "m")), P()) == ((8,), [((0,), ()), ((), ())])
    assert found(P(("m", "d")), P()) == ((2, 4), [((1, 0), ()), ((), ())])


PRODUCTS = [
    (((M, K), (K, N)), (M, N)),
    (((3, M, K), (3, K, N)), (3, M, N)),
    (((3, M, 4, K), (3, N, 4, K)), (3, 4, M, N)),
]


@pytest.mark.parametrize(("operands", "result"), PRODUCTS, ids=str)
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.one_in(10)
def test_a_label_has_one_order_in_every_operand(operands, result, seed):
    """Axes that operands move to it from other dimensions included."""
    rng = np.random.default_rng(seed)
    mesh = (2,) * int(rng.integers(1, 5))
    labels = sorted({x for dims in operands for x in dims})
    sizes = {x: int(rng.choice([16, 32, 64, 128])) for x in labels}
    rule = ShardingRule(operands, (result,), sizes, flops=2 * math.prod(sizes.values()))
    specs = [random_spec(rng, len(dims), len(mesh)) for dims in (*operands, result)]
    found = choose_partition(rule, mesh, specs[:2], specs[2:], *sizes_in_bytes(rule, 4), [1, 1])
    for dims, given, operand in zip(operands, specs[:2], found.operands, strict=True):
        by_xla = operand.steps[: len(operand.steps) - len(operand.in_program)]
        assert operand.spec == specs_of(given, by_xla)[-1]
        wanted = tuple(found.axes[label] for label in dims)
        assert specs_of(operand.spec, operand.in_program)[-1] == wanted
        # No more axes are gathered than must be.
        gathered = {a for step in operand.steps if step.kind == "all-gather" for a in step.axes}
        assert gathered == set(axes_of(given)) - set(axes_of(wanted))


def random_spec(rng, rank, axes):
    """A spec in which each axis splits some dimension, or none."""
    found = [() for _ in range(rank)]
    for axis in rng.permutation(axes).tolist():
        dim = int(rng.integers(-1, rank))
        if dim >= 0:
            found[dim] = (*found[dim], axis)
    return tuple(found)


@pytest.mark.parametrize("k", [3, 5, 7])
def test_padding_is_not_moved_or_scattered(k):
    found = partition_of(product(16, k, 16), (2, 2), (1, 1), (0, 0), (0, 0))
    assert found.axes[K] == (0, 1)
    assert local_shape((16, k), found.operands[0].spec, found.mesh) == (16, math.ceil(k / 4))
    crossed = partition_of(product(16, k, 16), (2,), (0,), (0,), (0,))
    assert crossed.axes[K] == ()


def test_a_reduction_without_neutral_padding_is_split_evenly():
    for size, axes in ((8, (0,)), (7, ())):
        rule = ShardingRule(((0,),), ((),), {0: size}, flops=size, zero_padding=False)
        found = choose_partition(rule, (2,), [((0,),)], [()], [4 * size], [4], [1])
        assert found.axes[0] == axes


@pytest.mark.parametrize(
    "params",
    [
        {"contraction": Contraction((0, 1), (1, 2), (0, 2)), "precision": None},
        {"precision": (lax.Precision.HIGHEST, lax.Precision.DEFAULT), "out_sharding": None},
        {"precision": lax.DotAlgorithmPreset.BF16_BF16_F32_X3, "axes": (1, 0)},
        {"out_dtype": np.dtype(jnp.bfloat16), "flag": True, "x": 1.5, "name": "a"},
        {
            "precision": lax.DotAlgorithm(
                np.dtype(np.float16), np.dtype(np.float16), np.dtype(np.float32), 1, 1, 1, False
            )
        },
    ],
    ids=lambda params: "-".join(params),
)
def test_parameters_are_text_and_back(params):
    text = to_text(params)
    assert from_text(text) == params
    assert to_text(from_text(text)) == text


def scalar_function(f, *dtypes):
    return trace_scalars(f, np.dtype(np.float32), np.dtype(np.float32), dtypes).function


F32, BOOL = np.dtype(np.float32), np.dtype(bool)
FUNCTIONS = {
    "gelu": (jax.nn.gelu, ()),
    "custom rule": (jax.nn.relu, ()),
    "operands": (lambda y, b, keep: jnp.where(keep, jnp.round(y + b) ** 3, -jnp.inf), (F32, BOOL)),
    "16 bits": (lambda y, b: jax.nn.silu(y.astype(jnp.bfloat16) * b), (np.dtype(jnp.bfloat16),)),
    "several": (lambda y: (y, jnp.exp(y) > 1, y.astype(jnp.int32) & 7), ()),
}


@pytest.mark.parametrize(("f", "dtypes"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_scalar_functions_are_text_and_back(f, dtypes):
    function = scalar_function(f, *dtypes)
    text = to_text({"function": function})
    assert text == to_text({"function": scalar_function(f, *dtypes)})
    assert _PROCESS not in text
    found = from_text(text)["function"]
    assert to_text({"function": found}) == text
    assert (found.name, found.out_dtypes) == (function.name, function.out_dtypes)
    for y in (-1.75, 0.5, 3.0):
        operands = jnp.float32(y), *(jnp.asarray(0.25, dtype) for dtype in dtypes)
        for x, wanted in zip(found(*operands), function(*operands), strict=True):
            assert x.dtype == wanted.dtype
            np.testing.assert_array_equal(x, wanted)


def test_a_scalar_function_with_a_loop_belongs_to_its_process():
    function = scalar_function(lambda y: jax.lax.fori_loop(0, 3, lambda _, x: x * 2, y))
    text = to_text({"function": function})
    assert _PROCESS in text
    assert from_text(text)["function"] is function


def test_objects_without_text_stand_for_themselves_in_this_process():
    kernel = object()
    assert from_text(to_text({"settings": kernel}))["settings"] is kernel
    with pytest.raises(RuntimeError, match="another process"):
        from_text('{"dict": {"settings": {"object": "somewhere-0"}}}')


def test_tuned_choices_are_part_of_the_text():
    """So that no program is found that was made with others."""
    from jax_tilekern.partitioning.call import _operations, _text
    from jax_tilekern.plans.tuned import TunedChoices, using

    operation = _operations["tilekern_contract"]
    texts = []
    with jtk.gpu_target("sm_90") as gpu:
        for winner in ("a", "b"):
            choices = TunedChoices(None)
            choices._winners = {gpu.name: {"product": winner}}
            with using(choices):
                texts.append(_text(operation, "cuda", {}))
    assert texts[0] != texts[1]
    assert gpu.name in texts[0]
