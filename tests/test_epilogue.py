"""Epilogues of products: values, types, derivatives, transformations and errors, on any backend."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from numerics import BF16, assert_equal, exact, on_gpu

import jax_tilekern as jtk
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
from jax_tilekern.plans.contraction import Contraction

HIGHEST = lax.Precision.HIGHEST


def small_integers(rng, *shape, dtype=np.float32):
    """Operands whose products every arithmetic computes exactly."""
    return jnp.asarray(rng.integers(-3, 4, shape), dtype)


def unfused(f, a, b, *operands):
    return f(jnp.matmul(a, b, precision=HIGHEST), *operands)


def fused(f, a, b, *operands, **kwargs):
    return jtk.matmul(a, b, epilogue=f, operands=operands, precision=HIGHEST, **kwargs)


def test_transposed_products(rng):
    """Where the kernel swaps A and B, rows and columns of the epilogue are swapped too."""
    a, b = small_integers(rng, 40, 70), small_integers(rng, 50, 40)
    row, column = small_integers(rng, 70, 1), small_integers(rng, 50)

    def f(y, r, c):
        return y + 10 * r - 100 * c

    found = jtk.dot_general(
        a, b, (((0,), (1,)), ((), ())), epilogue=f, operands=(row, column), precision=HIGHEST
    )
    np.testing.assert_array_equal(found, f(jnp.matmul(a.T, b.T), row, column))
    np.testing.assert_array_equal(fused(f, a.T, b.T, row, column), found)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("sizes", [(64, 64, 32), (300, 512, 64), (77, 384, 64), (130, 1000, 96)])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.one_in(3)
def test_matrices_of_small_elements(rng, dtype, sizes, batch):
    """They are read and written in blocks, where the columns divide by a tile's."""
    m, n, k = sizes
    a, b = (rng.integers(-1, 2, (*batch, *s)).astype(dtype) for s in ((m, k), (k, n)))
    residual = rng.integers(-9, 9, (*batch, m, n)).astype(dtype)
    mask, bytes_ = rng.random((*batch, m, n)) < 0.5, rng.integers(-9, 9, (*batch, m, n), np.int8)

    def epilogue(y, residual, mask, bytes_):
        y = jnp.where(mask, y, 0) + residual.astype(y.dtype) + bytes_.astype(y.dtype)
        return y.astype(dtype), (y - 1).astype(dtype), (y > 0).astype(np.int8), y, y > 1

    def call(a, b, *operands):
        return jtk.matmul(
            a, b, epilogue=epilogue, operands=operands, preferred_element_type=np.float32
        )

    found = jax.jit(call)(a, b, residual, mask, bytes_)
    y = exact(a) @ exact(b)
    y = np.where(mask, y, 0) + exact(residual) + bytes_
    for x, expected in zip(found, (y, y - 1, y > 0, y, y > 1), strict=True):
        np.testing.assert_array_equal(exact(x), expected)


@pytest.mark.parametrize(
    ("dtype", "out", "sizes"),
    [
        (BF16, BF16, (1024, 2048, 16)),  # through stages of the mainloop
        (BF16, BF16, (300, 520, 16)),
        (BF16, BF16, (130, 77, 16)),
        (BF16, np.float32, (32, 48, 8192)),  # split-K
        (np.float32, np.float32, (300, 520, 16)),
        (np.float32, np.float32, (33, 65, 24)),
    ],
)
def test_results_in_the_memory_of_operands_that_other_results_read(rng, dtype, out, sizes):
    """The kernel reads both elements before it writes either."""
    m, n, k = sizes
    a, b = small_integers(rng, m, k, dtype=dtype), small_integers(rng, k, n, dtype=dtype)
    first, second = (small_integers(rng, m, n, dtype=out) for _ in range(2))

    @jax.jit
    def call(a, b, first, second):
        first, second = lax.optimization_barrier((first + 1, second - 1))
        return contract_with_epilogue(
            a, b, contraction=Contraction((0, 1), (1, 2), (0, 2)),
            precision=HIGHEST, product=np.dtype(out), shape=(m, n),
            epilogue=lambda y, first, second: [y + second, y - first],
            operands=(first, second), in_place=((0, 0), (1, 1)),
        )  # fmt: skip

    found = call(a, b, first, second)
    product = exact(a) @ exact(b)
    np.testing.assert_array_equal(exact(found[0]), product + exact(second) - 1)
    np.testing.assert_array_equal(exact(found[1]), product - exact(first) - 1)


# -- Types. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operands", "preferred", "function", "expected"),
    [
        # A result in the accumulator's type is rounded to the product's.
        (BF16, None, jax.nn.silu, BF16),
        (np.float16, None, jax.nn.silu, np.float16),
        (BF16, np.float32, jax.nn.silu, np.float32),
        (np.float32, None, jax.nn.silu, np.float32),
        (np.int8, np.int32, lambda y: y * 2, np.int32),
        # Any other type is the function's choice.
        (BF16, None, lambda y: y.astype(np.float16), np.float16),
        (BF16, None, lambda y: y > 0, np.bool_),
        (np.int8, None, lambda y: y * np.float32(0.5), np.float32),
    ],
)
def test_type_of_the_result(operands, preferred, function, expected):
    a, b = jnp.ones((8, 16), operands), jnp.ones((16, 8), operands)
    found = jtk.matmul(a, b, epilogue=function, preferred_element_type=preferred)
    assert found.dtype == expected
    accumulator = jnp.matmul(a.astype(np.float32), b.astype(np.float32))
    if operands == np.int8:
        accumulator = accumulator.astype(np.int32)
    np.testing.assert_array_equal(found, function(accumulator).astype(expected))


def test_the_accumulator_is_not_rounded(rng):
    """The sum with a bias is that of the float32 accumulator, not of a rounded product."""
    a, b = jnp.full((16, 64), 1.0, BF16), jnp.full((64, 16), 4.015625, BF16)
    bias = jnp.full(16, -257.0, np.float32)
    found = jtk.matmul(a, b, epilogue=jnp.add, operands=(bias,), preferred_element_type=np.float32)
    product = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_array_equal(found, product + np.asarray(bias))


def test_several_results(rng):
    a, b = small_integers(rng, 70, 40), small_integers(rng, 40, 50)

    def f(y, scale):
        return {"activation": jnp.maximum(y, 0), "pre": y, "scaled": (y * scale, y > 1)}

    scale = small_integers(rng, 70, 1)
    found = fused(f, a, b, scale)
    jax.tree.map(np.testing.assert_array_equal, found, unfused(f, a, b, scale))


# -- Every primitive, at special values. -----------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 2.5, 1e-3, 3.75, 17.0, -30.0, math.inf, -math.inf,
           math.nan]  # fmt: skip
UNARY = [
    "neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc",
    "erf_inv", "lgamma", "digamma", "sqrt", "rsqrt", "cbrt", "floor", "ceil", "round", "is_finite",
    "square",
]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter",
          "eq", "ne", "lt", "le", "gt", "ge"]  # fmt: skip
INTEGER_UNARY = ["neg", "abs", "sign", "bitwise_not", "population_count", "clz", "square"]
INTEGER_BINARY = [
    "add", "sub", "mul", "div", "rem", "max", "min", "bitwise_and", "bitwise_or", "bitwise_xor",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "eq", "lt", "ge",
]  # fmt: skip
INTEGERS = [0, 1, -1, 2, 7, -8, 31, 32, 33, 100, 2**31 - 1, -(2**31), 12345, -777]


def at_every_pair(function, values, dtype, result):
    """The epilogue's and XLA's results of a function at all pairs of values."""
    with np.errstate(all="ignore"):
        x = np.array(values).astype(dtype)
    x, y = (np.ascontiguousarray(z) for z in np.meshgrid(x, x))
    ones = jnp.ones((len(values), 16), np.float32)

    def f(accumulator, x, y):
        return function(x, y).astype(result)

    found = jtk.matmul(ones, ones.T, epilogue=f, operands=(x, y), precision=HIGHEST)
    return np.asarray(found), np.asarray(f(0, jnp.asarray(x), jnp.asarray(y)))


def assert_same_function(found, expected, rtol):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(found[zeros]), np.signbit(expected[zeros]))


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.one_in(6)
def test_functions_of_one_float(name, dtype):
    function = getattr(lax, name)
    found, expected = at_every_pair(lambda x, y: function(x), SPECIAL, dtype, np.float32)
    rtol = {np.float32: 2e-6, np.float16: 2e-3}.get(dtype, 1.6e-2)
    if name == "exp2" and dtype == BF16 and on_gpu():
        # XLA rounds the product with log(2), of up to 17 here, to bfloat16.
        rtol = 17 * 2.0**-8
    assert_same_function(found, expected, rtol)


@pytest.mark.parametrize("result", [BF16, np.float16])
@pytest.mark.parametrize("function", [jax.nn.sigmoid, jnp.exp, jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_functions_whose_results_have_16_bits(function, result):
    values = [*SPECIAL, *np.linspace(-20, 11, 40)]
    found, _ = at_every_pair(lambda x, y: function(x), values, np.float32, result)
    exact = np.asarray(function(jnp.asarray(values, np.float32)))
    with np.errstate(over="ignore"):
        rounded = exact.astype(result).astype(np.float32)
    expected = np.broadcast_to(rounded, found.shape)
    # A result may be rounded to the other neighbour, and XLA's gelu cancels where it is small.
    rounding = float(jnp.finfo(result).eps)
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=1.05 * rounding, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.one_in(2)
def test_functions_of_two_floats(name, dtype):
    if (name, dtype) == ("nextafter", BF16):
        pytest.skip("lax has none")
    found, expected = at_every_pair(getattr(lax, name), SPECIAL, dtype, np.float32)
    assert_same_function(found, expected, 2e-6 if dtype == np.float32 else 1.6e-2)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.uint32, np.int16])
@pytest.mark.parametrize("name", [*INTEGER_UNARY, *INTEGER_BINARY])
@pytest.mark.one_in(5)
def test_functions_of_integers(name, dtype):
    if name == "abs" and np.dtype(dtype).kind == "u":
        pytest.skip("lax has none")
    function = getattr(lax, name)
    if name in INTEGER_UNARY:
        found, expected = at_every_pair(lambda x, y: function(x), INTEGERS, dtype, np.float32)
    else:
        found, expected = at_every_pair(function, INTEGERS, dtype, np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", [np.int32, np.int8, np.uint8, np.int16, np.bool_, BF16])
@pytest.mark.parametrize("source", [np.float32, np.int32, np.uint8, BF16, np.bool_])
@pytest.mark.one_in(3)
def test_conversions(target, source):
    values = [0, 1, -1, 2.5, -2.5, 127.4, 128, -129, 255.9, 256, 1e9, 3e9, -3e9, 1e20]
    if source in (np.float32, BF16):
        values += [math.nan, math.inf, -math.inf]
    elif source != np.float32:
        values = [int(v) % 2**20 - 2**10 for v in values]
    found, expected = at_every_pair(lambda x, y: x.astype(target), values, source, np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: lax.clamp(x, np.float32(0.25), y),
        lambda x, y: lax.select(x > y, x, y),
        lambda x, y: lax.integer_pow(x, 5) + lax.integer_pow(y, -2),
        lambda x, y: jnp.where(jnp.isnan(x), y, lax.stop_gradient(x)),
        lambda x, y: jnp.logaddexp(x, y),
        lambda x, y: jax.jvp(jnp.tanh, (x,), (jnp.sin(y),))[1],
        lambda x, y: jax.nn.relu(x) + jax.nn.softplus(y),
        lambda x, y: jax.nn.gelu(x, approximate=False) + jax.nn.gelu(x),
        lambda x, y: jax.jit(jax.nn.elu)(x) * jax.checkpoint(jnp.sin)(y),
        lambda x, y: lax.reduce_precision(x, 8, 7) + y,
        lambda x, y: lax.cond(x > 0, jnp.sin, jnp.cos, y),
    ],
)
def test_compositions(function):
    """Calls are inlined; what CUDA has no function for is computed by XLA."""
    mapped = jax.vmap(jax.vmap(lambda x, y: function(x, y)))
    values = np.array(SPECIAL[:11], np.float32)
    x, y = np.meshgrid(values, values)
    ones = jnp.ones((len(values), 16), np.float32)
    found = fused(lambda _, x, y: function(x, y), ones, ones.T, x, y)
    np.testing.assert_allclose(found, mapped(x, y), rtol=4e-6, atol=1e-6)


_LEAVES = st.sampled_from(["y", "bias", "scale", "residual", "1.5", "-0.25"])
_BOUNDED = [
    "tanh",
    "logistic",
    "sin",
    "cos",
    "sign",
    "floor",
    "relu",
    "gelu",
    "abs",
    "negative",
    "exp",
]
_PAIRS = ["add", "subtract", "maximum", "minimum", "mul", "where"]
EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.tuples(st.sampled_from(_BOUNDED), inner)
        | st.tuples(st.sampled_from(_PAIRS), inner, inner)
    ),
    max_leaves=8,
)
_FUNCTIONS = {
    "exp": lambda x: jnp.exp(jnp.clip(x, -8, 2)),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "logistic": jax.nn.sigmoid,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "mul": lambda x, y: jnp.clip(x, -4, 4) * jnp.clip(y, -4, 4),
    "where": lambda x, y: jnp.where(x > y, x, 0.5 * y),
}


def evaluated(expression, leaves):
    if isinstance(expression, str):
        return leaves.get(expression) if expression in leaves else jnp.float32(float(expression))
    name, *inner = expression
    function = _FUNCTIONS.get(name) or getattr(jnp, name)
    return function(*(evaluated(x, leaves) for x in inner))


@given(EXPRESSIONS, st.integers(0, 2**32 - 1))
def test_random_functions(expression, seed):
    rng = np.random.default_rng(seed)
    a, b = small_integers(rng, 32, 16), small_integers(rng, 16, 24)
    operands = small_integers(rng, 24), small_integers(rng, 32, 1), small_integers(rng, 32, 24)

    def f(y, bias, scale, residual):
        leaves = {"y": y / 8, "bias": bias, "scale": scale, "residual": residual}
        return evaluated(expression, leaves) + jnp.float32(0) * y

    found, expected = fused(f, a, b, *operands), unfused(f, a, b, *operands)
    # A function may jump where its argument is rounded differently.
    close = np.isclose(found, expected, rtol=1e-4, atol=1e-4)
    assert close.mean() > 0.98


# -- Transformations. ------------------------------------------------------------------------------


def test_custom_derivatives_are_respected(rng):
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    a, b = (jnp.asarray(rng.normal(size=(8, 8)), np.float32) for _ in range(2))
    found = jax.grad(lambda a: fused(rounded, a, b).sum())(a)
    expected = jax.grad(lambda a: unfused(lambda y: y, a, b).sum())(a)
    # Sums of a row of b, which may cancel.
    bound = 1e-6 * np.abs(b).sum(1)
    assert (np.abs(found - expected) <= bound).all()


def test_scalars_that_the_function_closes_over(rng):
    """They become operands, so their derivatives are right, and jitted ones are no leaks."""
    a, b = (jnp.asarray(rng.normal(size=(8, 8)), np.float32) for _ in range(2))

    for scale in (0.5, 2.0):
        found, expected = (
            jax.grad(lambda s, call=call: call(lambda y: jnp.tanh(y * s), a, b).sum())(scale)
            for call in (fused, unfused)
        )
        # The 64 terms are at most |a| |b|, and may cancel.
        magnitude = float((jnp.abs(a) @ jnp.abs(b)).sum())
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * magnitude)


# -- Errors. ---------------------------------------------------------------------------------------

ONES = jnp.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y - jnp.max(y), r"not elementwise: reduce_max at .*test_epilogue.py:\d+"),
        (lambda y: y + jnp.arange(3)[0], r"not elementwise: iota at .*test_epilogue.py:\d+"),
        (lambda y: y + ONES[0, 0], r"closes over an array of shape \(4, 4\).*operands=\("),
        (lambda y: (jax.debug.print("{}", y), y)[1], "side effect"),
        (lambda y: (), "returns nothing"),
        (jax.nn.softmax, "softmax does not take scalars: axis -1 .*; an epilogue is a function of"),
        (lambda y: y[0], "does not take scalars: Too many indices"),
        ("relu", "the epilogue is 'relu'; it must be a function of scalars"),
    ],
)
def test_what_is_not_a_function_of_scalars_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        jtk.matmul(ONES, ONES, epilogue=function)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 4)])
def test_operands_that_do_not_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match=r"operand 0 of the epilogue has shape .* \(4, 4\)"):
        jtk.matmul(ONES, ONES, epilogue=jnp.add, operands=(jnp.ones(shape),))


def test_operands_without_an_epilogue_are_refused():
    with pytest.raises(TypeError, match="no epilogue= that reads them"):
        jtk.matmul(ONES, ONES, operands=(ONES,))
    with pytest.raises(TypeError, match="no epilogue= that reads them"):
        jtk.dot_general(ONES, ONES, (((1,), (0,)), ((), ())), operands=(ONES,))


def test_operands_that_are_no_sequence_are_refused():
    bias, sizes = jnp.ones(4), jnp.array([4])
    for call in (
        functools.partial(jtk.matmul, ONES, ONES),
        functools.partial(jtk.ragged_dot, ONES, ONES[None], sizes),
    ):
        for epilogue in (jnp.add, None):
            with pytest.raises(TypeError, match=r"got one of shape \(4,\): pass operands=\(x,\)"):
                call(epilogue=epilogue, operands=bias)
    with pytest.raises(TypeError, match=r"pass group_operands=\(x,\)"):
        call(epilogue=jnp.add, group_operands=bias[None])


def test_a_bias_is_named_in_calls_and_in_errors():
    np.testing.assert_array_equal(
        jtk.linear(ONES, ONES, bias=ONES[0]), jtk.linear(ONES, ONES, ONES[0])
    )
    with pytest.raises(ValueError, match=r"linear: bias has shape \(3,\)"):
        jtk.linear(ONES, ONES, bias=jnp.ones(3))


def test_an_activation_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="the activation is 'relu'"):
        jtk.linear(ONES, ONES, ONES[0], "relu")


def test_a_gate_of_several_scalars_is_refused():
    with pytest.raises(TypeError, match=r"the activation returns \(.*it must return one scalar"):
        jtk.gated_linear(ONES, ONES, ONES, activation=lambda y: (y, y))


def test_results_may_be_numbers():
    found = jtk.matmul(ONES, ONES, epilogue=lambda y: (1.5, y, 2, jtk.row_sum(1.0)))
    expected = jnp.full((4, 4), 1.5), ONES @ ONES, jnp.full((4, 4), 2), jnp.full(4, 4.0)
    assert_equal(found, expected)
