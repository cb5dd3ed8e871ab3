"""Parameters of primitives that a translation does not understand are refused."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_tilekern.epilogue.understood import (
    PARAMETERS,
    Untranslatable,
    broadcasts,
    refuse_unknown,
)


def equation(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).eqns
    return eqn


def test_known_parameters_are_accepted():
    eqn = equation(lambda x: lax.convert_element_type(x, jnp.int32), 1.0)
    refuse_unknown(eqn, PARAMETERS["convert_element_type"])


def test_an_unknown_parameter_is_refused():
    eqn = equation(jnp.negative, 1.0)
    refuse_unknown(eqn, {})
    with pytest.raises(Untranslatable, match="no CUDA for neg with mystery=None"):
        refuse_unknown(eqn.replace(params={"mystery": None}), {})


def test_an_unknown_value_is_refused():
    eqn = equation(lambda x: lax.mul(x, x, out_dtype=jnp.float32), jnp.float16(1))
    with pytest.raises(Untranslatable, match="no CUDA for mul with out_dtype="):
        refuse_unknown(eqn, PARAMETERS["mul"])


def test_an_effect_is_refused():
    eqn = equation(lambda x: jax.debug.callback(print, x), 1.0)
    with pytest.raises(Untranslatable, match="no CUDA for the effects of"):
        refuse_unknown(eqn, dict.fromkeys(eqn.params, lambda _: True))


def test_operands_that_broadcast():
    assert all(broadcasts(x, (2, 3)) for x in [(), (2, 3), (1, 3), (2, 1), (1, 1)])
    assert not any(broadcasts(x, (2, 3)) for x in [(3,), (3, 2), (2, 3, 1), (2, 2)])
