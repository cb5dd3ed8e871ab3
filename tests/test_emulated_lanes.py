"""Functions as kernels of lanes: the CUDA text, compiled as C++, against ``jax.vmap``."""

import os

import jax
import jax.numpy as jnp
import lane_expressions
import lane_functions
import lane_programs
import numpy as np
import pytest
from lanes import Emulated
from nvrtc_mark import needs_emulator

import jax_tilekern as jtk

TABLE = lane_functions.table() | lane_expressions.table()
WIDE = lane_functions.wide_table() | lane_expressions.wide_table()
GRADIENTS = lane_functions.gradients() | lane_expressions.gradients()
GRADIENT_NAMES = {f"gradient of {name}": case for name, case in GRADIENTS.items()}
# Systems whose condition is large.
LONG = (
    jax.lax.linalg.tridiagonal_solve, 0,
    (*lane_expressions.diagonals(100, 1e-3), lane_functions.normal(7, 100, 1)),
)  # fmt: skip


def walks(x, y):
    """Loops that read and write long rows, one of which is a result and another changed."""

    def step(sum_, row):
        sum_ = 0.5 * sum_ + row[0] * row[1]
        return sum_, (jnp.sin(sum_), row[1] > 0)

    sum_, (found, signs) = jax.lax.scan(step, 0.0, (x, y[:, 0]))
    changed = jax.lax.fori_loop(0, 50, lambda i, x: x.at[2 * i].add(x[2 * i + 1]), x)
    return sum_, found, signs, changed, y, y


# Two dimensions of lanes, more than a CTA has.
ROWS = walks, (lane_functions.normal(5, 9, 100), lane_functions.normal(5, 9, 100, 1))


def rows_by(map_):
    function, args = ROWS
    return jax.vmap(map_(function, out_axes=(0, 0, 0, 0, 0, 1))), args


# Random programs of the default selection.
RANDOM = {
    f"{kind} {seed}": (kind, seed)
    for kind, seed in zip(lane_programs.DERIVATIVES, (0, 1, 1, 0), strict=True)
}
PROGRAM_ARGUMENTS = (
    lane_functions.normal(6, 3), lane_functions.integers_of(6), lane_functions.normal(6, 5),
)  # fmt: skip
TOLERANCE = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 2e-5, "float64": 1e-12}
pytestmark = needs_emulator


def mapped_by(case, map_):
    function, in_axes, args = case
    if in_axes is None:
        return map_(lambda _: function(*args)), (np.zeros(3, np.float32),)
    return map_(function, in_axes=in_axes), args


def gradient_by(case, map_):
    function, args = case
    numbers = tuple(range(len(args)))
    return jax.value_and_grad(lambda *args: function(map_, *args), argnums=numbers), args


def raw(tree):
    keys = jax.dtypes.prng_key
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x
        for x in jax.tree.leaves(tree)
    ]


def traced_as(name):
    """A function of the tests by its name, as a jaxpr."""
    if name == "rows":
        function, args = rows_by(jtk.kernel)
        return jax.make_jaxpr(function)(*args)
    if name in RANDOM:
        return _random_traced(*RANDOM[name])
    if name in GRADIENT_NAMES:
        function, args = gradient_by(GRADIENT_NAMES[name], jtk.kernel)
        return jax.make_jaxpr(function)(*args)
    function, args = mapped_by((TABLE | WIDE | {"long tridiagonal": LONG})[name], jtk.kernel)
    with jax.enable_x64(name in WIDE):
        return jax.make_jaxpr(lambda *args: raw(function(*args)))(*args)


@pytest.fixture(scope="module")
def emulated(request, tmp_path_factory):
    """The functions of the tests that run, compiled in one program."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and "emulated" in item.fixturenames
    ]
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    return Emulated({name: traced_as(name) for name in names}, root / "lock_of_lanes")


def assert_close(found, wanted, factor=1):
    """Compare results; bounds of floats are ``factor`` times those of values of size 1."""
    assert len(found) == len(wanted)
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if x.dtype.kind == "c":
            x, y = (np.stack([z.real, z.imag]) for z in (x, y))
        tolerance = TOLERANCE.get(x.dtype.name)
        if tolerance is None:
            np.testing.assert_array_equal(x, y, err_msg=f"result {i}")
        else:
            x, y = x.astype(np.float64), y.astype(np.float64)
            bound = factor * tolerance
            np.testing.assert_allclose(x, y, bound, bound, err_msg=f"result {i}")


def _random_traced(kind, seed):
    return jax.make_jaxpr(lane_programs.program(kind, seed, jtk.kernel))(*PROGRAM_ARGUMENTS)


def _assert_random_is_vmap(emulated, name, kind, seed):
    function = lane_programs.program(kind, seed, jax.vmap)
    # Values of 16 bits are rounded as the program says.
    options = {"xla_allow_excess_precision": False}
    wanted = jax.jit(function, compiler_options=options)(*PROGRAM_ARGUMENTS)
    largest = max(np.nanmax(np.abs(y), initial=0) for y in wanted if y.dtype == np.float32)
    assert_close(
        emulated(name, *PROGRAM_ARGUMENTS), wanted, 1 if kind == "values" else max(5, 5 * largest)
    )


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.one_in(4)
def test_random_programs(emulated, name):
    _assert_random_is_vmap(emulated, name, *RANDOM[name])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_random_programs(tmp_path, seed):
    traced = {kind: _random_traced(kind, seed) for kind in lane_programs.DERIVATIVES}
    emulated = Emulated(traced, tmp_path / "lock")
    for kind in traced:
        _assert_random_is_vmap(emulated, kind, kind, seed)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.one_in(10)
def test_is_vmap(emulated, name):
    function, args = mapped_by(TABLE[name], jax.vmap)
    assert_close(emulated(name, *args), raw(jax.jit(function)(*args)))


@pytest.mark.parametrize("name", ["digamma"])
def test_digamma_of_zero(emulated, name):
    # NaN in JAX 0.10.
    zeros = np.float32([0, -0.0] * 3)
    assert_close(emulated(name, zeros), [np.full_like(zeros, -np.inf)])


@pytest.mark.parametrize("name", ["long tridiagonal"])
def test_tridiagonal_solutions_have_small_residuals(emulated, name):
    """Also where pivots are small.

    With row exchanges the elements of L are at most 1, two in a column. Those of U are at most as
    large as the matrix's, besides a pivot, which is at most twice that, or three times where both
    ends meet, and there are three in a column, or five where both ends meet. So the 1-norm of
    ``|L| |U|`` is at most 13 times the largest element there, and 8 times elsewhere. An element of
    the matrix, and of the right side, takes part in at most 12 roundings.
    """
    lower, diagonal, upper, b = operands = LONG[2]
    (x,) = emulated(name, *operands)
    unit = np.finfo(np.float32).eps / 2
    for i in range(len(b)):
        above, below = np.diag(upper[i, :-1], 1), np.diag(lower[i, 1:], -1)
        matrix = (np.diag(diagonal[i]) + above + below).astype(np.float64)
        residual = np.abs(matrix @ x[i] - b[i]).sum()
        assert residual <= 13 * 12 * unit * np.abs(matrix).max() * np.abs(x[i]).sum()


@pytest.mark.parametrize("name", ["rows"])
def test_rows_in_shared_memory(emulated, name):
    function, args = rows_by(jax.vmap)
    assert_close(emulated(name, *args), jax.jit(function)(*args))
    (kernel,) = emulated.kernels(name)
    # Both operands, which two results are, and the other long result of 32 bits.
    assert (kernel.text.count("lax::load_rows"), kernel.text.count("lax::store_rows")) == (2, 3)
    assert kernel.shared_bytes == 32 * 4 * (3 * 101)


@pytest.mark.parametrize("name", WIDE)
def test_is_vmap_of_64_bits(emulated, name, x64):
    function, args = mapped_by(WIDE[name], jax.vmap)
    assert_close(emulated(name, *args), raw(jax.jit(function)(*args)))


@pytest.mark.parametrize("name", GRADIENT_NAMES)
@pytest.mark.one_in(5)
def test_gradient_is_that_of_vmap(emulated, name):
    function, args = gradient_by(GRADIENT_NAMES[name], jax.vmap)
    found = emulated(name, *args)
    assert_close(found, jax.tree.leaves(jax.jit(function)(*args)))
