"""How a call is partitioned: shardings as mesh axes, reshards, and the choice of a partition."""

from __future__ import annotations

import dataclasses
import itertools
import json
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
from jax_tilekern.partitioning.mesh import axes_of, common_mesh, hlo_sharding
from jax_tilekern.partitioning.params_text import _PROCESS, from_text, to_text
from jax_tilekern.partitioning.reshard import Step, reshard_steps, specs_of
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
    return choose_partition(rule, mesh, specs[:2], specs[2:], *sizes_in_bytes(rule, itemsize))


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


def test_what_is_split_alike_stays():
    found = partition_of(product(64, 64, 64), (2,), (1,), (0,), (None,))
    assert found.axes[K] == (0,)
    assert [x.reduced for x in found.results] == [(0,)]
    assert [x.spec for x in found.operands] == [((), (0,)), ((0,), ())]


def test_a_sum_is_scattered_where_the_result_is_split():
    found = partition_of(product(64, 64, 64), (2, 2), (0, 1), (None, 0), (0, 1))
    assert found.axes == {M: (0,), K: (1,), N: ()}
    assert found.results[0].scattered == ((), (1,))
    assert found.results[0].spec == ((0,), (1,))
    assert not any(x.reduced for x in found.results)


def test_the_smaller_operand_is_gathered():
    large = partition_of(product(4096, 64, 64), (2,), (0,), (1,), (0,))
    assert large.axes[M] == (0,)
    assert large.operands[1].spec == ((), ())
    small = partition_of(product(64, 64, 4096), (2,), (0,), (1,), (1,))
    assert small.axes[N] == (0,)
    assert small.operands[0].spec == ((), ())


def test_operands_that_are_split_unlike_are_gathered_where_the_sum_is_larger():
    """One is split in four along what is contracted, and the other in two."""
    for k, kept in ((16, ()), (4096, (0, 1))):
        found = partition_of(product(64, k, 64), (2, 2), (1, 1), (0, None), (None, None))
        assert found.axes[K] == kept


def test_an_axis_that_changes_dimension_is_an_all_to_all():
    # Weights are larger than what passes through them, and both have the same axis.
    rule = product(64, 4096, 4096)
    found = partition_of(rule, (2,), (0,), (0,), (0,))
    assert found.axes[K] == (0,)
    assert [x.spec for x in found.operands] == [((), (0,)), ((0,), ())]
    assert [x.in_program for x in found.operands] == [(), ()]
    assert found.results[0].scattered == ((0,), ())
    assert found.described() == f"{K} in 2, all-to-all, reduce-scatter"


def test_the_local_program_reshards_what_xla_would_gather():
    """XLA gathers an array that has copies before and after."""
    found = partition_of(product(64, 4096, 4096), (2, 2), (0, None), (0, None), (0, None))
    assert found.axes[K] == (0,)
    assert found.operands[0].in_program == (Step("all-to-all", (0,), 0, 1),)
    assert found.operands[0].spec == ((0,), ())
    assert found.results[0].scattered == ((0,), ())


def test_axes_that_affect_one_another():
    """An operand is gathered over one axis after the other for more bytes than the sum has."""
    found = partition_of(product(32, 128, 32), (2, 2, 2), (1, 1, 1), (None,) * 3, (None,) * 3)
    assert found.axes == {M: (), K: (0, 1, 2), N: ()}
    assert [x.reduced for x in found.results] == [(0, 1, 2)]


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
    found = choose_partition(rule, mesh, specs[:2], specs[2:], *sizes_in_bytes(rule, 4))
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


@pytest.mark.parametrize(
    ("have", "want", "steps"),
    [
        (((), (0,)), ((), (0, 1)), [("slice", (1,))]),
        (((0, 1), ()), ((0,), ()), [("all-gather", (1,))]),
        (((0, 1), ()), ((), (0, 1)), [("all-to-all", (0, 1))]),
        # What makes an array smaller is first.
        (((), (0,)), ((1,), ()), [("slice", (1,)), ("all-gather", (0,))]),
        (((0,), (1,)), ((), (0,)), [("all-gather", (1,)), ("all-to-all", (0,))]),
        (((0,), ()), ((), (0, 1)), [("all-to-all", (0,)), ("slice", (1,))]),
        # One axis in the place of another, and one above another.
        (((0,),), ((1,),), [("slice", (1,)), ("permute", (1, 0)), ("all-gather", (0,))]),
        (((0,),), ((1, 0),), [("slice", (1,)), ("permute", (1, 0))]),
        (((0, 1), ()), ((), (1, 0)), [("all-to-all", (1,)), ("all-to-all", (0,))]),
    ],
)
def test_steps_of_a_reshard(have, want, steps):
    assert [(step.kind, step.axes) for step in reshard_steps(have, want)] == steps


@pytest.mark.parametrize(("k", "gathered_after_slice"), [(64, True), (63, False)])
def test_an_operand_is_sliced_before_it_is_gathered(k, gathered_after_slice):
    """One axis splits the batch of the other operand, another one a dimension of this one."""
    batch, m, n = 8, 16, 1024
    rule = ShardingRule(
        ((0, 1, 2), (0, 2, 3)), ((0, 1, 3),), {0: batch, 1: m, 2: k, 3: n}, flops=2 * m * k * n
    )
    lhs, rhs = ((), (), (0,)), ((1,), (), ())
    found = choose_partition(rule, (2, 4), [lhs, rhs], [rhs], *sizes_in_bytes(rule, 4))
    assert found.axes == {0: (1,), 1: (), 2: (), 3: ()}
    if gathered_after_slice:
        assert found.operands[0].spec == ((1,), (), (0,))
        assert found.operands[0].in_program == (Step("all-gather", (0,), 2, None),)
    else:
        # Parts with padding are gathered by XLA.
        assert found.operands[0].spec == ((1,), (), ())
        assert found.operands[0].in_program == ()
    assert found.operands[1].in_program == ()
    assert "operand 0 gathered" in found.described()


BATCHES = ShardingRule(
    ((0, 1, 2), (0, 3, 4)),
    ((0, 5, 6),),
    {0: 64, 1: 16, 2: 16, 3: 16, 4: 2, 5: 16, 6: 2},
    flops=1,
    unsplit=frozenset(range(1, 7)),
)


def test_the_local_program_reshards_two_axes_that_move():
    """XLA has one all-to-all, and gathers otherwise."""
    matrices, columns = ((), (1,), (0,)), ((0, 1), (), ())
    sizes = sizes_in_bytes(BATCHES, 4)
    found = choose_partition(BATCHES, (2, 4), [matrices, columns], [columns], *sizes)
    assert found.axes[0] == (0, 1)
    assert found.operands[0].spec == matrices
    assert [x.kind for x in found.operands[0].in_program] == ["all-to-all"] * 2


def test_xla_gathers_before_the_local_program_reshards():
    """So that calls share what is gathered."""
    matrices, columns = ((), (), (0, 1)), ((0,), (), ())
    sizes = sizes_in_bytes(BATCHES, 4)
    found = choose_partition(BATCHES, (2, 4), [matrices, columns], [columns], *sizes)
    assert found.axes[0] == (0,)
    assert found.operands[0].spec == ((), (), (0,))
    assert found.operands[0].in_program == (Step("all-to-all", (0,), 2, 0),)


def test_large_products_are_not_computed_twice():
    found = partition_of(product(8192, 8192, 28672), (2, 2), (0, 0), (None, None), (None, None))
    assert found.axes[M] == (0, 1)


@pytest.mark.parametrize("k", [3, 5, 7])
def test_padding_is_not_moved_or_scattered(k):
    found = partition_of(product(16, k, 16), (2, 2), (1, 1), (0, 0), (0, 0))
    assert found.axes[K] == (0, 1)
    assert found.operand_shape(0, (16, k)) == (16, math.ceil(k / 4))
    crossed = partition_of(product(16, k, 16), (2,), (0,), (0,), (0,))
    assert crossed.axes[K] == ()


def test_a_reduction_without_neutral_padding_is_split_evenly():
    for size, axes in ((8, (0,)), (7, ())):
        rule = ShardingRule(((0,),), ((),), {0: size}, flops=size, zero_padding=False)
        found = choose_partition(rule, (2,), [((0,),)], [()], [4 * size], [4])
        assert found.axes[0] == axes


def test_labels_of_some_results_are_whole():
    rule = ShardingRule(((0, 1),), ((0, 1), (0,)), {0: 8, 1: 8}, flops=64)
    assert rule.splittable == {0}
    assert rule.reductions == ()
    assert rule.summed == frozenset()


def test_results_that_are_sums_split_what_each_of_them_lacks():
    """Gradients of both factors: an axis adds up the gradient that it does not split."""
    factors = ((M, None), (None, N))
    rule = ShardingRule(
        (*factors, (M, N)),
        factors,
        {M: 8, N: 8},
        flops=64,
        zero_padding=False,
        each_result_is_a_sum=True,
    )
    assert rule.splittable == rule.summed == {M, N}
    read = [((0,), ()), ((), (1,)), ((0,), (1,))]
    found = choose_partition(rule, (2, 2), read, read[:2], [256] * 3, [256] * 2)
    assert found.axes == {M: (0,), N: (1,)}
    assert [x.reduced for x in found.results] == [(1,), (0,)]
    assert [x.spec for x in found.operands] == read
    uneven = dataclasses.replace(rule, sizes={M: 7, N: 8})
    found = choose_partition(uneven, (2, 2), read, read[:2], [256] * 3, [256] * 2)
    assert found.axes == {M: (), N: (1,)}


def test_reductions_of_a_split_label_are_combined():
    rule = ShardingRule(
        ((M, K), (K, N)),
        ((M, N), (M,), (M,)),
        {M: 64, K: 64, N: 64},
        flops=2.0 * 64**3,
        epilogue_from=2,
        reduced=frozenset({N}),
        combined_by=("sum", "max", "sum"),
    )
    assert rule.splittable == {M, K, N}
    assert rule.reductions == (K,)
    whole, columns = ((), ()), ((), (0,))
    sizes = [2**14] * 2, [2**14, 2**8, 2**8]
    found = choose_partition(rule, (2,), [whole, columns], [columns, ((),), ((),)], *sizes)
    assert found.axes == {M: (), K: (), N: (0,)}
    assert found.sum is None
    assert [x.reduced for x in found.results] == [(), (0,), (0,)]
    # A sum is scattered where its result is split, and a maximum is not.
    found = choose_partition(rule, (2,), [whole, columns], [columns, ((0,),), ((0,),)], *sizes)
    assert [x.scattered for x in found.results] == [((), ()), ((),), ((0,),)]
    assert [x.reduced for x in found.results] == [(), (0,), ()]
    # Terms of the product are added first; the reductions follow.
    found = choose_partition(
        rule, (2, 2), [((), (0,)), ((0,), (1,))], [((), (1,)), ((),), ((),)], *sizes
    )
    assert found.axes == {M: (), K: (0,), N: (1,)}
    assert found.sum.reduced == (0,)
    assert [x.reduced for x in found.results] == [(), (1,), (1,)]
    # Padding would be reduced.
    uneven = dataclasses.replace(rule, sizes={M: 64, K: 64, N: 63})
    found = choose_partition(uneven, (2,), [whole, columns], [columns, ((),), ((),)], *sizes)
    assert N not in found.axes or found.axes[N] == ()


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


def test_calls_in_programs_of_an_earlier_release_are_known():
    """Grouped GEMMs were operations of their own in 0.1.0, with labels of a type of their own."""
    from jax_tilekern.partitioning.call import _operations

    labels = {
        "lhs": [0, 1],
        "rhs": [2, 1, 3],
        "bounds": [2],
        "out": [0, 3],
        "ragged": 0,
        "group": 2,
    }
    text = json.dumps({"dict": {"contraction": {"RaggedContraction": labels}}})
    contraction = Contraction((0, 1), (2, 1, 3), (0, 3), (2,), 0, 2)
    assert from_text(text) == {"contraction": contraction}
    for name in ("tilekern_contract", "tilekern_contract_with_epilogue"):
        earlier = name.replace("contract", "contract_groups")
        assert _operations[earlier] is _operations[name]


def test_tuned_choices_are_part_of_the_text():
    """So that no program is found that was made with others."""
    from jax_tilekern.partitioning.call import _operations, _text
    from jax_tilekern.plans.tuned import TunedChoice, TunedChoices, using

    operation = _operations["tilekern_contract"]
    texts = []
    with jtk.gpu_target("sm_90") as gpu:
        for winner in ("a", "b"):
            choices = TunedChoices(None)
            choice = TunedChoice(winner, "a", {"a": 1.0, "b": 2.0}, "", "", "", "")
            choices._of(gpu.name)["product"] = choice
            with using(choices):
                texts.append(_text(operation, "cuda", {}))
    assert texts[0] != texts[1]
    assert gpu.name in texts[0]
