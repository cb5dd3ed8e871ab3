"""Random fused functions: the CUDA text of their epilogues, compiled as C++, against JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_programs import fused, random_fusion, with_epilogue
from jaxprs import FUSED, equations, name_of
from lanes import Emulated
from nvrtc_mark import needs_emulator

import jax_tilekern as jtk
from jax_tilekern.interop import compat
from jax_tilekern.ops.products.contraction import contract

pytestmark = [needs_emulator, pytest.mark.usefixtures("highest_precision")]


def programs(seed):
    """Functions with fused products, the same by JAX, and their arguments."""
    after, args = random_fusion(seed)

    def gradient(f):
        def loss(*args):
            return sum((x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum() for x in f(*args))

        return jax.grad(loss, range(len(args)))

    def tangent(f):
        return lambda *args: jax.jvp(f, args, tuple(map(jnp.cos, args)))[1]

    for transform in (lambda f: f, gradient, tangent):
        function = transform(fused(after))
        yield jtk.fuse(function), function, args
        yield *map(transform, with_epilogue(after)), args


def lanes_of(eqn):
    """The function of a fused product as a kernel of lanes."""
    function, size = eqn.params["function"], eqn.outvars[0].aval.size
    avals = [jax.ShapeDtypeStruct((size,), x.dtype) for x in function.jaxpr.in_avals]
    return jax.make_jaxpr(jtk.kernel(lambda *scalars: function(*scalars)))(*avals)


def run(emulated, eqn, lhs, rhs, *operands):
    """Evaluate a fused product, of whose elements the emulated kernel computes the function."""
    params, contraction = eqn.params, eqn.params["contraction"]
    accumulators = contract(
        lhs, rhs, contraction=contraction, precision=params["precision"],
        out_dtype=params["accumulator"],
    )  # fmt: skip
    scalars = [accumulators.ravel()]
    for x, labels in zip(operands, params["operand_labels"], strict=True):
        places = [contraction.out.index(label) for label in labels]
        ordered = np.transpose(x, np.argsort(places))
        missing = [i for i in range(accumulators.ndim) if i not in places]
        whole = np.broadcast_to(np.expand_dims(ordered, missing), accumulators.shape)
        scalars.append(whole.ravel())
    found = emulated(id(eqn), *map(np.asarray, scalars))
    return [x.reshape(v.aval.shape) for x, v in zip(found, eqn.outvars, strict=True)]


def evaluated(emulated, jaxpr, consts, operands):
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def value(x):
        return x.val if compat.is_literal(x) else values[x]

    for eqn in jaxpr.eqns:
        read = [value(x) for x in eqn.invars]
        is_fused = name_of(eqn) == FUSED
        found = run(emulated, eqn, *read) if is_fused else compat.bind_equation(eqn, read)
        values.update(zip(eqn.outvars, found, strict=True))
    return [value(x) for x in jaxpr.outvars]


def assert_fused_are_jaxs(seeds, lock):
    cases = [
        (seed, jax.make_jaxpr(ours)(*args), theirs, args)
        for seed in seeds
        for ours, theirs, args in programs(seed)
    ]
    calls = [
        eqn for _, closed, *_ in cases for eqn in equations(closed.jaxpr) if name_of(eqn) == FUSED
    ]
    assert len(calls) >= 3 * len(seeds)
    emulated = Emulated({id(eqn): lanes_of(eqn) for eqn in calls}, lock)
    for seed, closed, theirs, args in cases:
        found = evaluated(emulated, closed.jaxpr, closed.consts, args)
        for x, y in zip(found, jax.tree.leaves(jax.jit(theirs)(*args)), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            scale = 1 + float(jnp.abs(y).max())
            # A function may jump where its argument is rounded differently.
            assert np.isclose(x, y, 2e-3, 2e-3 * scale).mean() > 0.9, seed


def test_random_functions(tmp_path):
    assert_fused_are_jaxs(range(4), tmp_path / "lock")


@pytest.mark.thorough
@pytest.mark.parametrize("first", [10, 30, 50])
def test_more_random_functions(tmp_path, first):
    assert_fused_are_jaxs(range(first, first + 20), tmp_path / "lock")
