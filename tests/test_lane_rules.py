"""Rules of lanes refuse what they do not declare, for every primitive of the installed JAX."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tilekern.epilogue.understood import PARAMETERS, Untranslatable
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation import keys
from jax_tilekern.ops.kernel.translation.text import LaneWriter
from jax_tilekern.ops.kernel.translation.values import Buffer, everywhere, in_memory, row_major
from jax_tilekern.ops.kernel.translation.writer import RULES

# Primitives that not every supported version of JAX has.
OF_OTHER_VERSIONS = {"closed_call", "log2", "polynomial"}


def primitives():
    """Return the primitives that the modules of JAX have, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "jax":
            values = list(vars(module).values())
            found |= {x.name: x for x in values if isinstance(x, compat.Primitive)}
    return found


PRIMITIVES = primitives()


def written(function, *args):
    """Translate a function of one lane."""
    closed = compat.in_low_primitives(jax.make_jaxpr(function)(*args))
    buffers = [
        Buffer(f"x{i}", np.dtype(x.dtype), x.shape, row_major(x.shape))
        for i, x in enumerate(closed.in_avals)
    ]
    return LaneWriter(16, 1).jaxpr(closed, [in_memory(buffer) for buffer in buffers])


def test_the_primitives_of_jax_are_found():
    assert len(PRIMITIVES) > 200
    assert {"sin", "while", "scatter-add", "cholesky", "jit", "random_bits"} <= set(PRIMITIVES)


@pytest.mark.parametrize(
    "declared",
    [RULES, PARAMETERS, keys._RANDOM, keys._MOVES],
    ids=["rules", "elements", "keys", "moves"],
)
def test_what_is_declared_exists(declared):
    assert set(declared) <= set(PRIMITIVES) | OF_OTHER_VERSIONS


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_an_unknown_parameter_is_refused(name):
    """Each primitive is translated by what it declares, or is refused by name."""
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    eqn = eqn.replace(primitive=PRIMITIVES[name], params={"mystery": 1})
    operand = everywhere(np.dtype(np.float32), (), "1.0f")
    with pytest.raises(Untranslatable, match=f"no CUDA for {name}"):
        LaneWriter(16, 1)._equation(eqn, [operand], [None])


@pytest.mark.parametrize("name", keys._RANDOM)
def test_an_unknown_parameter_of_keys_is_refused(name):
    (eqn,) = jax.make_jaxpr(jax.random.key_data)(jax.random.key(0)).eqns
    eqn = eqn.replace(primitive=PRIMITIVES[name], params={"mystery": 1})
    with pytest.raises(Untranslatable, match=f"no CUDA for {name} with mystery=1"):
        keys._equation(eqn, [jnp.zeros(2, jnp.uint32)], inlined=False)


X = np.ones((2, 3), np.float32)
HALF = np.ones((2, 3), np.float16)
REFUSED = {
    "mul with out_dtype": (lambda x: lax.mul(x, x, out_dtype=jnp.float32), HALF),
    "exp with accuracy": (lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), X),
    "dot_general with precision": (
        lambda x: lax.dot(x, x.T, precision=lax.DotAlgorithmPreset.F16_F16_F16),
        HALF,
    ),
    "qr with pivoting": (lambda x: lax.linalg.qr(x, pivoting=True), X),
    "bitcast_convert_type of float32 to uint8": (
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        X,
    ),
    "reduce_precision to": (lambda x: lax.reduce_precision(x, 5, 10), X),
    "conv_general_dilated": (lambda x: jnp.convolve(x[0], x[1]), X),
    "reduce_window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"), X),
    "fft": (lambda x: jnp.fft.rfft(x).real, X),
    "rng_bit_generator": (
        lambda x: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1],
        X,
    ),
    "pure_callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2, 3), jnp.float32), x),
        X,
    ),
    "debug_callback": (lambda x: jax.debug.callback(print, x), X),
    "tridiagonal_solve with perturb_singular": (
        lambda x: lax.linalg.tridiagonal_solve(x[0], x[0], x[0], x.T, perturb_singular=True),
        X,
    ),
    "svd with subset_by_index": (
        lambda x: lax.linalg.svd(x, full_matrices=False, subset_by_index=(0, 1)),
        X,
    ),
    "nextafter of float16": (lambda x: lax.nextafter(x, x), HALF),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_understood_is_refused(reason):
    with pytest.raises(Untranslatable, match=f"no CUDA for {reason}"):
        written(*REFUSED[reason])


def test_operands_of_other_shapes_are_refused():
    """No primitive has them yet."""
    (eqn,) = jax.make_jaxpr(lax.add)(X, X).eqns
    row = everywhere(np.dtype(np.float32), (3,), "1.0f")
    with pytest.raises(Untranslatable, match=r"no CUDA for add of shape \(3,\) for a result of"):
        LaneWriter(16, 1)._equation(eqn, [row, row], [None])
