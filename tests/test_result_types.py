"""Types of products that are found at other sizes than the operands' own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tilekern as jtk
from jax_tilekern.interop.result_types import evaluated_at_any_size, product_type

TYPES = ("float32", "bfloat16", "int8", "int32", "complex64", "bool")


def operands_of(rng, labels):
    sizes = {label: int(rng.choice([0, 1, 2, 6, 30, 31])) for label in "abmkn"}
    return [jnp.zeros([sizes[x] for x in own], rng.choice(TYPES)) for own in labels.split(",")]


@pytest.mark.parametrize(
    ("function", "labels", "options"),
    [
        (jnp.matmul, "abmk,akn", {"precision": "highest"}),
        (jnp.matmul, "k,kn", {"preferred_element_type": jnp.float32}),
        (jnp.dot, "amk,bkn", {}),
        (jnp.vdot, "mk,km", {}),
        (lax.dot_general, "amk,ank", {"dimension_numbers": (((2,), (2,)), ((0,), (0,)))}),
    ],
)
def test_types_and_errors_are_those_at_the_operands_own_sizes(rng, function, labels, options):
    def outcome(type_of, operands):
        try:
            return type_of(*operands)
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    def of_own_sizes(*operands):
        return jax.make_jaxpr(functools.partial(function, **options))(*operands).out_avals[0]

    def of_any_size(*operands):
        return product_type(function, *operands, **options)

    for _ in range(12):
        operands = operands_of(rng, labels)
        assert outcome(of_any_size, operands) == outcome(of_own_sizes, operands)


def test_sizes_whose_products_alone_are_equal_are_not_taken_for_each_other():
    found = product_type(jnp.vdot, jnp.ones((4, 9)), jnp.ones((6, 6)))
    assert found.shape == ()
    with pytest.raises(TypeError):
        product_type(jnp.vdot, jnp.ones((4, 9)), jnp.ones((6, 5)))


def test_a_function_is_traced_once_for_all_sizes():
    traced = []

    def evaluate(avals):
        traced.append(avals)
        return [avals[0].update(shape=avals[0].shape[::-1])]

    known = {}
    for shape in ((7, 9), (100, 3), (5, 5), (1, 4)):
        aval = jax.typeof(np.zeros(shape, np.float32))
        (found,) = evaluated_at_any_size(
            lambda avals: known.setdefault(avals, None) or known.update({avals: evaluate(avals)})
            or known[avals], [aval],
        )  # fmt: skip
        assert found.shape == shape[::-1]
    assert [x.shape for (x,) in traced] == [(2, 3), (2, 2), (1, 2)]


def test_the_number_of_groups_is_no_size_of_an_operand(rng, highest_precision):
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (3, 4, 5)))
    sizes = np.array([1, 2, 3], np.int32)
    gradient = jax.grad(lambda w: jtk.ragged_dot(x, w, sizes).sum())(w)
    wanted = jax.grad(lambda w: lax.ragged_dot(x, w, sizes).sum())(w)
    np.testing.assert_allclose(gradient, wanted, 1e-5)
