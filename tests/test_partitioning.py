"""How a call is shared out: shardings as digits, and the choice among ways to split a call."""

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
from sharded import devices

import jax_tilekern as jtk
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.partitioning.choice import choose_split
from jax_tilekern.partitioning.digits import Digit, common_digits, sharding_of
from jax_tilekern.partitioning.params_text import _PROCESS, from_text, to_text
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.split import Move
from jax_tilekern.plans.contraction import Contraction

M, N, K = range(3)


def product(m, k, n):
    sizes = {M: m, K: k, N: n}
    return ShardingRule(((M, K), (K, N)), ((M, N),), sizes, flops=2 * m * k * n)


def split_of(rule, radix, lhs, rhs, out, itemsize=2):
    """Split a product; for each array, the dimension that each digit splits, major first."""

    def digits(dims):
        weights = {}
        found = []
        for a in reversed(range(len(radix))):
            dim = dims[a]
            weight = weights.get(dim, 1)
            weights[dim] = weight * radix[a]
            found.append(None if dim is None else Digit(dim, weight))
        return tuple(reversed(found))

    nbytes = [
        itemsize * math.prod(rule.sizes[x] for x in dims)
        for dims in (*rule.operands, *rule.results)
    ]
    return choose_split(
        rule, radix, [digits(lhs), digits(rhs)], [digits(out)], nbytes[:2], nbytes[2:]
    )


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (6,)])
def test_shardings_are_digits_and_back(shape):
    names = "abc"[: len(shape)]
    count = math.prod(shape)
    mesh = jax.make_mesh(
        shape, tuple(names), (AxisType.Auto,) * len(shape), devices=jax.devices("cpu")[:count]
    )
    parts = [None, *names, *itertools.permutations(names, 2)]
    for spec in itertools.product(parts, repeat=2):
        used = [a for part in spec for a in (part or ())]
        if len(set(used)) < len(used):
            continue
        sharding = NamedSharding(mesh, P(*spec))._to_xla_hlo_sharding(2)
        radix, (digits,) = common_digits([sharding], [2])
        if sharding.is_replicated():
            assert digits == (None,) * len(radix)
            continue
        assert math.prod(radix) == count
        dims = [
            sorted(
                (a for a, digit in enumerate(digits) if digit and digit.dimension == dim),
                key=lambda a: -digits[a].weight,
            )
            for dim in range(2)
        ]
        back = sharding_of(dims, radix)
        shard_shape = NamedSharding(mesh, P(*spec)).shard_shape((count * 2, count * 2))
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


def test_what_is_split_alike_stays():
    split = split_of(product(64, 64, 64), (2,), (1,), (0,), (None,))
    assert split.digits[K] == (0,)
    assert [x.reduced for x in split.results] == [(0,)]
    assert split.operand_digits == (((), (0,)), ((0,), ()))


def test_a_sum_is_scattered_where_the_result_is_split():
    split = split_of(product(64, 64, 64), (2, 2), (0, 1), (None, 0), (0, 1))
    assert split.digits == {M: (0,), K: (1,), N: ()}
    assert split.results[0].scattered == ((), (1,))
    assert split.results[0].digits == ((0,), (1,))
    assert not any(x.reduced for x in split.results)


def test_the_smaller_operand_is_gathered():
    large = split_of(product(4096, 64, 64), (2,), (0,), (1,), (0,))
    assert large.digits[M] == (0,)
    assert large.operand_digits[1] == ((), ())
    small = split_of(product(64, 64, 4096), (2,), (0,), (1,), (1,))
    assert small.digits[N] == (0,)
    assert small.operand_digits[0] == ((), ())


def test_operands_that_are_split_unlike_are_gathered_where_the_sum_is_larger():
    """One is split in four along what is contracted, and the other in two."""
    for k, kept in ((16, ()), (4096, (0, 1))):
        split = split_of(product(64, k, 64), (2, 2), (1, 1), (0, None), (None, None))
        assert split.digits[K] == kept


def test_a_digit_that_changes_dimension_is_an_all_to_all():
    # Weights are larger than what passes through them, and both have the same axis.
    rule = product(64, 4096, 4096)
    split = split_of(rule, (2,), (0,), (0,), (0,))
    assert split.digits[K] == (0,)
    assert split.operand_digits == (((), (0,)), ((0,), ()))
    assert split.operand_moves == ((), ())
    assert split.results[0].scattered == ((0,), ())
    now = (Digit(0, 1),)
    assert split.described([now, now]) == f"{K} in 2, all-to-all, reduce-scatter"


def test_the_local_program_moves_what_xla_would_gather():
    """XLA gathers an array that has copies before and after."""
    split = split_of(product(64, 4096, 4096), (2, 2), (0, None), (0, None), (0, None))
    assert split.digits[K] == (0,)
    ((move,), ()) = split.operand_moves
    assert move == Move("exchange", (0,), 0, 1)
    assert split.operand_digits[0] == ((0,), ())
    assert split.results[0].scattered == ((0,), ())


def test_digits_that_are_chosen_together():
    """An operand is gathered over one axis after the other for more bytes than the sum has."""
    split = split_of(product(32, 128, 32), (2, 2, 2), (1, 1, 1), (None,) * 3, (None,) * 3)
    assert split.digits == {M: (), K: (0, 1, 2), N: ()}
    assert [x.reduced for x in split.results] == [(0, 1, 2)]


PRODUCTS = [
    (((M, K), (K, N)), (M, N)),
    (((3, M, K), (3, K, N)), (3, M, N)),
    (((3, M, 4, K), (3, N, 4, K)), (3, 4, M, N)),
]


@pytest.mark.parametrize(("operands", "result"), PRODUCTS, ids=str)
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.one_in(10)
def test_a_label_has_one_order_in_every_operand(operands, result, seed):
    """Digits that operands move to it from other dimensions included."""
    rng = np.random.default_rng(seed)
    radix = (2,) * int(rng.integers(1, 5))

    def digits(dims):
        weights = dict.fromkeys(range(len(dims)), 1)
        found = {}
        for a in rng.permutation(len(radix)).tolist():
            dim = int(rng.integers(-1, len(dims)))
            found[a] = None if dim < 0 else Digit(dim, weights[dim])
            if dim >= 0:
                weights[dim] *= 2
        return tuple(found[a] for a in range(len(radix)))

    labels = sorted({x for dims in operands for x in dims})
    sizes = {x: int(rng.choice([16, 32, 64, 128])) for x in labels}
    rule = ShardingRule(operands, (result,), sizes, flops=2 * math.prod(sizes.values()))
    nbytes = [4 * math.prod(sizes[x] for x in dims) for dims in (*operands, result)]
    now = [digits(dims) for dims in operands]
    split = choose_split(rule, radix, now, [digits(result)], nbytes[:2], nbytes[2:])
    moves = split.operand_moves
    for dims, taken, own in zip(operands, split.operand_digits, moves, strict=True):
        held = list(taken)
        for move in own:
            if move.kind != "slice":
                assert held[move.source][-len(move.digits) :] == move.digits
                held[move.source] = held[move.source][: -len(move.digits)]
            if move.kind != "gather":
                held[move.target] = (*held[move.target], *move.digits)
        assert held == [split.digits[label] for label in dims]


@pytest.mark.parametrize(("k", "gathered_after_slice"), [(64, True), (63, False)])
def test_an_operand_is_sliced_before_it_is_gathered(k, gathered_after_slice):
    """One axis splits the batch of the other operand, another one a dimension of this one."""
    batch, m, n = 8, 16, 1024
    rule = ShardingRule(
        ((0, 1, 2), (0, 2, 3)), ((0, 1, 3),), {0: batch, 1: m, 2: k, 3: n}, flops=2 * m * k * n
    )
    lhs, rhs = (Digit(2, 1), None), (None, Digit(0, 1))
    sizes = [4 * batch * m * k, 4 * batch * k * n], [4 * batch * m * n]
    split = choose_split(rule, (2, 4), [lhs, rhs], [rhs], *sizes)
    assert split.digits == {0: (1,), 1: (), 2: (), 3: ()}
    if gathered_after_slice:
        assert split.operand_digits[0] == ((1,), (), (0,))
        assert split.operand_moves[0] == (Move("gather", (0,), 2, 2),)
    else:
        # Parts with padding are gathered by XLA.
        assert split.operand_digits[0] == ((1,), (), ())
        assert split.operand_moves[0] == ()
    assert split.operand_moves[1] == ()
    assert "operand 0 gathered" in split.described([lhs, rhs])


def test_large_products_are_not_computed_twice():
    split = split_of(product(8192, 8192, 28672), (2, 2), (0, 0), (None, None), (None, None))
    assert split.digits[M] == (0, 1)


@pytest.mark.parametrize("k", [3, 5, 7])
def test_padding_is_not_moved_or_scattered(k):
    split = split_of(product(16, k, 16), (2, 2), (1, 1), (0, 0), (0, 0))
    assert split.digits[K] == (0, 1)
    assert split.local_size(K) == math.ceil(k / 4)
    crossed = split_of(product(16, k, 16), (2,), (0,), (0,), (0,))
    assert crossed.digits[K] == ()


def test_a_reduction_without_neutral_padding_is_split_evenly():
    for size, digits in ((8, (0,)), (7, ())):
        rule = ShardingRule(((0,),), ((),), {0: size}, flops=size, zero_padding=False)
        split = choose_split(rule, (2,), [(Digit(0, 1),)], [(None,)], [4 * size], [4])
        assert split.digits[0] == digits


def test_labels_of_some_results_are_whole():
    rule = ShardingRule(((0, 1),), ((0, 1), (0,)), {0: 8, 1: 8}, flops=64)
    assert rule.splittable == {0}
    assert rule.reductions == ()
    assert rule.summed == frozenset()


def test_results_that_are_sums_split_what_each_of_them_lacks():
    """Gradients of both factors: a digit adds up the gradient that it does not split."""
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
    rows, columns, none = Digit(0, 1), Digit(1, 1), None
    read = [(rows, none), (none, columns), (rows, columns)]
    split = choose_split(rule, (2, 2), read, read[:2], [256] * 3, [256] * 2)
    assert split.digits == {M: (0,), N: (1,)}
    assert [x.reduced for x in split.results] == [(1,), (0,)]
    assert split.operand_digits == (((0,), ()), ((), (1,)), ((0,), (1,)))
    uneven = dataclasses.replace(rule, sizes={M: 7, N: 8})
    split = choose_split(uneven, (2, 2), read, read[:2], [256] * 3, [256] * 2)
    assert split.digits == {M: (), N: (1,)}


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
    columns, rows, none = Digit(1, 1), Digit(0, 1), None
    sizes = [2**14] * 2, [2**14, 2**8, 2**8]
    split = choose_split(rule, (2,), [(none,), (columns,)], [(columns,), (none,), (none,)], *sizes)
    assert split.digits == {M: (), K: (), N: (0,)}
    assert split.sum is None
    assert [x.reduced for x in split.results] == [(), (0,), (0,)]
    # A sum is scattered where its result is split, and a maximum is not.
    split = choose_split(rule, (2,), [(none,), (columns,)], [(columns,), (rows,), (rows,)], *sizes)
    assert [x.scattered for x in split.results] == [((), ()), ((),), ((0,),)]
    assert [x.reduced for x in split.results] == [(), (0,), ()]
    # Terms of the product are added first; the reductions follow.
    split = choose_split(
        rule,
        (2, 2),
        [(columns, none), (rows, columns)],
        [(none, columns), (none, none), (none, none)],
        *sizes,
    )
    assert split.digits == {M: (), K: (0,), N: (1,)}
    assert split.sum.reduced == (0,)
    assert [x.reduced for x in split.results] == [(), (1,), (1,)]
    # Padding would be reduced.
    uneven = dataclasses.replace(rule, sizes={M: 64, K: 64, N: 63})
    split = choose_split(
        uneven, (2,), [(none,), (columns,)], [(columns,), (none,), (none,)], *sizes
    )
    assert N not in split.digits or split.digits[N] == ()


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
