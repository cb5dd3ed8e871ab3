"""Rules of primitives in kernels of lanes, and primitives of other libraries."""

import itertools
import sys
import types

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_tilekern as jtk
from benchmarks import translations
from jax_tilekern.epilogue.cuda_text import ScalarWriter, cuda_text
from jax_tilekern.epilogue.plain_data import to_data
from jax_tilekern.epilogue.primitives import is_translated
from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.epilogue.understood import PARAMETERS, Untranslatable
from jax_tilekern.fusion.elementwise import inlined_call, readings
from jax_tilekern.fusion.groups import product_of
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation import keys
from jax_tilekern.ops.kernel.translation.refusals import REASONS
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


RULES_OF_PRIMITIVES = primitives()


def written(function, *args):
    """Translate a function of one lane."""
    closed = compat.in_low_primitives(jax.make_jaxpr(function)(*args))
    buffers = [
        Buffer(f"x{i}", np.dtype(x.dtype), x.shape, row_major(x.shape))
        for i, x in enumerate(closed.in_avals)
    ]
    return LaneWriter(16, 1).jaxpr(closed, [in_memory(buffer) for buffer in buffers])


def test_the_primitives_of_jax_are_found():
    assert len(RULES_OF_PRIMITIVES) > 200
    assert {"sin", "while", "scatter-add", "cholesky", "jit", "random_bits"} <= set(
        RULES_OF_PRIMITIVES
    )


@pytest.mark.parametrize(
    "declared",
    [RULES, PARAMETERS, keys._RANDOM, keys._MOVES],
    ids=["rules", "elements", "keys", "moves"],
)
def test_what_is_declared_exists(declared):
    ours = {name for name in declared if name.startswith("lane_")}
    assert set(declared) - ours <= set(RULES_OF_PRIMITIVES) | OF_OTHER_VERSIONS


@pytest.mark.parametrize("name", sorted(RULES_OF_PRIMITIVES))
def test_an_unknown_parameter_is_refused(name):
    """Each primitive is translated by what it declares, or is refused by name."""
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    eqn = eqn.replace(primitive=RULES_OF_PRIMITIVES[name], params={"mystery": 1})
    operand = everywhere(np.dtype(np.float32), (), "1.0f")
    with pytest.raises(Untranslatable, match=f"no CUDA for {name}"):
        LaneWriter(16, 1)._equation(eqn, [operand], [None])


@pytest.mark.parametrize("name", keys._RANDOM)
def test_an_unknown_parameter_of_keys_is_refused(name):
    (eqn,) = jax.make_jaxpr(jax.random.key_data)(jax.random.key(0)).eqns
    eqn = eqn.replace(primitive=RULES_OF_PRIMITIVES[name], params={"mystery": 1})
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


F32 = np.dtype(np.float32)
PRIMITIVES = {
    x.name: x
    for module in (lax, jax.extend.core.primitives)
    for x in vars(module).values()
    if isinstance(x, compat.Primitive)
}


@jax.custom_jvp
def with_tangent(x):
    return jnp.sin(x)


with_tangent.defjvps(lambda g, out, x: 3 * g)


@jax.custom_vjp
def with_cotangent(x):
    return jnp.sin(x)


with_cotangent.defvjp(lambda x: (x, x), lambda x, g: (g,))

# Calls of primitives that lax has no function of the same name for, or not of operands alone.
# There is none of broadcast_in_dim of a scalar to a scalar, closed_call and eval_jaxpr.
CALLS = {
    "add_any": lambda x, y: PRIMITIVES["add_any"].bind(x, y),
    "and": lax.bitwise_and,
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.int8),
    "copy": lambda x: lax.copy_p.bind(x),
    "custom_jvp_call": with_tangent,
    "custom_vjp_call": with_cotangent,
    "integer_pow": lambda x: lax.integer_pow(x, -3),
    "jit": jax.jit(jnp.sin),
    "le_to": lambda x, y: lax.le_to_p.bind(x, y),
    "lt_to": lambda x, y: lax.lt_to_p.bind(x, y),
    "name": lambda x: checkpoint_name(x, "x"),
    "not": lax.bitwise_not,
    "one_minus_square": lambda x: lax.one_minus_square_p.bind(x),
    "or": lax.bitwise_or,
    "remat2": jax.checkpoint(jnp.sin),
    "reshape": lambda x: lax.reshape_p.bind(x, new_sizes=(), dimensions=None, sharding=None),
    "square": lambda x: lax.square_p.bind(x),
    "squeeze": lambda x: lax.squeeze_p.bind(x, dimensions=()),
    "xor": lax.bitwise_xor,
}


def equations_of(name):
    """Yield equations of scalars that JAX makes of a primitive, for every type it takes."""
    call = CALLS.get(name, getattr(lax, name, None))
    if call is None:
        return
    for count, dtypes in itertools.product((1, 2, 3), ((np.float32,), (np.int32,), (bool,))):
        avals = [jax.ShapeDtypeStruct((), x) for x in (bool,) * (name == "select_n") + dtypes]
        avals += avals[-1:] * (count - len(avals))
        try:
            closed = jax.make_jaxpr(call)(*avals)
        except (TypeError, ValueError):
            continue
        if [eqn.primitive.name for eqn in closed.eqns] == [name]:
            yield closed


def refused(eqn, words):
    """Whether every translation refuses an equation."""
    with pytest.raises(Untranslatable, match=words):
        ScalarWriter({}).equation(eqn, ["x"] * len(eqn.invars))
    return readings(eqn, eqn.outvars[0].aval.shape) is None


def planted(eqn, **params):
    return eqn.replace(params={**eqn.params, **params})


TRANSLATED = sorted(filter(is_translated, PRIMITIVES))


@pytest.mark.parametrize("name", TRANSLATED)
def test_parameters_of_a_translated_primitive_are_declared(name):
    found = list(equations_of(name))
    assert found or name in ("broadcast_in_dim", "closed_call", "eval_jaxpr")
    translated, reasons = [], []
    for closed in found:
        dtypes = tuple(np.dtype(x.dtype) for x in closed.out_avals)
        function = ScalarFunction("f", closed, compat.jaxpr_as_fun(closed), dtypes, (None,))
        try:
            translated.append(cuda_text(function))
        except Untranslatable as error:
            reasons.append(str(error))
        (eqn,) = closed.eqns
        assert refused(planted(eqn, mystery=1), "with mystery=1")
        other = closed.replace(jaxpr=closed.jaxpr.replace(eqns=[planted(eqn, mystery=1)]))
        assert to_data(ScalarFunction("f", other, None, dtypes, (None,))) is None
    assert translated or not found
    # Types are what has no translation.
    assert not any(" with " in reason for reason in reasons)


def test_no_other_primitive_is_translated():
    """Nor is any with a parameter that is not declared."""
    (eqn,) = jax.make_jaxpr(lax.add)(1.0, 1.0).eqns
    for primitive in PRIMITIVES.values():
        words = "with mystery" if primitive.name in TRANSLATED else f"no CUDA for {primitive.name}"
        assert refused(eqn.replace(primitive=primitive, params={"mystery": 1}), words)


def test_primitives_with_a_reason_have_no_translation():
    assert not [name for name in REASONS if translations.translator(name)]


@pytest.mark.parametrize(
    ("call", "params"),
    [
        (lax.exp, {"accuracy": lax.AccuracyMode.HIGHEST}),
        (lambda x: lax.mul(x, x), {"out_dtype": F32}),
        (lambda x: lax.convert_element_type(x, jnp.int8), {"sharding": "x"}),
        (lax.round, {"rounding_method": 7}),
        (lambda x: lax.broadcast_in_dim(x, (3,), ()), {"sharding": "x"}),
        (lambda x: lax.broadcast_in_dim(x, (3,), ()), {"mystery": 1}),
        (jax.jit(jnp.sin), {"compiler_options_kvs": (("x", "y"),)}),
    ],
)
def test_values_of_parameters_that_change_results_are_refused(call, params):
    (eqn,) = jax.make_jaxpr(call)(1.5).eqns
    ((name, _),) = params.items()
    assert refused(planted(eqn, **params), f"with {name}=")


def test_an_equation_of_another_device_is_refused():
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    host = types.SimpleNamespace(compute_type="device_host")
    assert refused(eqn.replace(ctx=host), "sin is computed on device_host")


def test_calls_with_unknown_parameters_are_not_inlined():
    (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns
    assert inlined_call(eqn) is not None
    assert inlined_call(planted(eqn, mystery=1)) is None


@pytest.mark.parametrize("multiply", [jnp.matmul, jtk.matmul])
def test_products_with_unknown_parameters_have_no_epilogue(multiply):
    (eqn,) = jax.make_jaxpr(multiply)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
    assert product_of(eqn) is not None
    for params in ({"mystery": 1}, {"out_sharding": "x"}):
        assert product_of(planted(eqn, **params)) is None


def test_a_function_that_is_not_understood_is_xlas():
    def epilogue(x):
        return lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)

    x, w = jnp.ones((8, 16)) / 16, jnp.ones((16, 8))
    with pytest.raises(Untranslatable, match="no CUDA for exp with accuracy="):
        cuda_text(trace_scalars(epilogue, F32, F32, ()).function)
    fused = jtk.fuse(lambda x, w: epilogue(x @ w))
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(fused)(x, w).eqns]
    assert names == ["tilekern_contract", "exp"]
    for f in (fused, lambda x, w: jtk.matmul(x, w, epilogue=epilogue)):
        with jtk.gpu_target("sm_90"), jtk.policy("kernels"):
            choices = jtk.explain(f, x, w, platform="cuda")
        assert any(choice.kernel for choice in choices)
        np.testing.assert_allclose(f(x, w), np.exp(np.ones((8, 8))), 1e-6)
