"""``kernel`` is ``vmap`` under every transformation; what has no kernel, and what kernels take."""

import functools
import gc
import math
import re
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprs import parameters
from lane_functions import collatz, kalman, lorenz
from nvrtc_mark import needs_nvrtc
from sharded import AUTO, devices, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_to_ptx
from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.ops.kernel import checkpoints as lane_checkpoints
from jax_tilekern.ops.kernel.kernel import write_kernel
from jax_tilekern.plans.gpu import known_gpu

PARAMETERS = jnp.array([10.0, 28.0, 8 / 3])
# Lanes that all devices of the mesh share.
LANES = P(("d", "m"))
START = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def last(state, parameters):
    def step(s, _):
        return s + 0.1 * parameters * jnp.sin(s[::-1]), None

    return lax.scan(step, state, None, length=5)[0]


def mapped_by(map_):
    return map_(last, in_axes=(0, None))


def loss_by(map_):
    return lambda parameters: jnp.sum(mapped_by(map_)(START, parameters) ** 2)


def close(found, wanted):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 1e-4), found, wanted)


TRANSFORMATIONS = [
    lambda f: jax.jvp(f, (PARAMETERS,), (PARAMETERS[::-1],)),
    lambda f: jax.value_and_grad(f)(PARAMETERS),
    lambda f: jax.jacfwd(f)(PARAMETERS),
    lambda f: jax.hessian(f)(PARAMETERS),
    lambda f: jax.jacrev(jax.grad(f))(PARAMETERS),
    lambda f: jax.linearize(f, PARAMETERS)[1](PARAMETERS),
    lambda f: jax.grad(jax.checkpoint(f))(PARAMETERS),
    lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable))(
        PARAMETERS
    ),
    lambda f: jax.vmap(jax.grad(f), in_axes=1)(jnp.outer(PARAMETERS, jnp.ones(2))),
    lambda f: lax.scan(lambda c, _: (c + 1e-3 * f(c * PARAMETERS), c), 1.0, None, length=2),
    lambda f: jax.grad(
        lambda p: lax.scan(lambda c, _: (c + 1e-3 * f(c * p), c), 1.0, None, length=2)[0]
    )(PARAMETERS),
]


@needs_nvrtc
@pytest.mark.parametrize("transformed", TRANSFORMATIONS)
@pytest.mark.one_in(4)
def test_transformations_are_kernels_on_a_gpu(transformed):
    with jtk.gpu_target("sm_90"), jtk.strict():
        traced = jax.jit(lambda: transformed(loss_by(jtk.kernel))).trace()
        assert "jax_tilekern_cuda_launch" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_derivative_is_one_kernel_or_two():
    def kernels(function):
        text = str(jax.make_jaxpr(function)(PARAMETERS))
        return text.count("tilekern_lanes")

    loss = loss_by(jtk.kernel)
    assert kernels(loss) == 1
    assert kernels(lambda p: jax.jvp(loss, (p,), (p,))) == 1
    assert kernels(jax.grad(loss)) == 2


def test_residuals_have_lanes_last():
    jaxpr = jax.make_jaxpr(lambda p: jax.vjp(lambda p: mapped_by(jtk.kernel)(START, p), p)[1])(
        PARAMETERS
    )
    shapes = {x.aval.shape for x in jaxpr.jaxpr.outvars}
    assert (5, 3, 16) in shapes
    assert all(shape[0] != 16 for shape in shapes)


def test_residuals_that_all_lanes_share_are_saved_once():
    """The covariances of a Kalman filter depend on no observation."""
    steps = 50
    observed = np.ones((16, steps, 2), np.float32)

    def residuals(transition):
        filtered = jtk.kernel(kalman, in_axes=(None, None, None, 0))
        return jax.vjp(lambda f: filtered(jnp.zeros(6), jnp.eye(6), f, observed), transition)[1]

    saved = jax.make_jaxpr(residuals)(jnp.eye(6)).jaxpr.outvars
    shapes = [x.aval.shape for x in saved]
    assert (steps, 6, 6) in shapes
    assert (steps, 6, 6, 16) not in shapes


# Reverse mode saves what each step needs, or states.


def of_steps(count, reverse=False):
    """Return a function of a lane, and the shapes of its arguments."""

    def f(state, parameters, inputs):
        def step(s, x):
            s = s + 0.1 * parameters * jnp.sin(s[::-1]) * jnp.cos(s) + x
            return s, s[0] * x

        def loop(s):
            return lax.scan(step, s, inputs, reverse=reverse)

        if not reverse:
            return loop(state)
        return lax.cond(parameters[0] > 0, loop, lambda s: (s, inputs), state)

    return f, (np.ones((2, 3), np.float32), np.ones(3, np.float32), np.full(count, 0.1, np.float32))


def loss_of(f, map_, **settings):
    def loss(*args):
        state, stacked = map_(f, in_axes=(0, None, None), **settings)(*args)
        return jnp.sum(state**2) + jnp.sum(jnp.sin(stacked))

    return loss


@pytest.mark.parametrize(
    ("count", "checkpoint", "reverse"),
    [(500, None, False), (500, 1, True), (506, 22, False), (506, 22, True), (9, 1000, False)],
)
@pytest.mark.one_in(3)
def test_gradient_with_checkpoints(count, checkpoint, reverse):
    f, args = of_steps(count, reverse)
    loss, wanted = loss_of(f, jtk.kernel, checkpoint=checkpoint), loss_of(f, jax.vmap)
    close(*(jax.jit(jax.grad(f, (0, 1, 2)))(*args) for f in (loss, wanted)))


def saved(f, args, **settings):
    """Return the shapes of the residuals with a dimension of steps."""
    loss = loss_of(f, jtk.kernel, **settings)
    jaxpr = jax.make_jaxpr(lambda p: jax.vjp(lambda p: loss(args[0], p, args[2]), p)[1])(args[1])
    lanes = args[0].shape[0]
    return [x.aval.shape for x in jaxpr.jaxpr.outvars if len(x.aval.shape) > 2], lanes


@pytest.mark.parametrize(
    ("bytes_", "steps", "arrays"), [(1 << 20, 1024, 1), (0, 32, 1), (1 << 20, None, 0)]
)
def test_what_is_saved_is_chosen_by_its_size(monkeypatch, bytes_, steps, arrays):
    """1024 steps of a state of 12 bytes, for two lanes, of which a step needs more than twice."""
    monkeypatch.setattr(lane_checkpoints, "MAX_SAVED_BYTES", bytes_)
    shapes, lanes = saved(*of_steps(1024), **({} if steps else {"checkpoint": None}))
    found = [shape[0] for shape in shapes if shape[-2:] == (3, lanes)]
    if steps:
        assert found == [steps] * arrays
    else:
        assert len(found) > 2


def test_what_a_step_needs_is_saved_if_it_is_about_its_state():
    def f(state, parameters, inputs):
        return lax.scan(lambda s, x: (jnp.sin(s), s[0]), state * parameters, inputs)

    _, args = of_steps(100)
    shapes, lanes = saved(f, args)
    # The cosine is saved, and not the state.
    assert [shape for shape in shapes if shape[0] == 100] == [(100, 3, lanes)]
    assert "checkpoint" not in str(jax.make_jaxpr(jax.grad(loss_of(f, jtk.kernel)))(*args))


@pytest.mark.parametrize(("bytes_", "arrays"), [(12_000, 2), (4000, 0)])
def test_what_a_step_needs_is_saved_if_computing_it_again_takes_long(monkeypatch, bytes_, arrays):
    """A product with a matrix takes 64 operations for each number that a step needs."""
    monkeypatch.setattr(lane_checkpoints, "MAX_SAVED_BYTES", bytes_)

    def f(state, matrix):
        return lax.scan(lambda s, _: (jnp.tanh(matrix @ s), None), state, None, length=20)[0]

    mapped = jtk.kernel(f, in_axes=(0, None))
    jaxpr = jax.make_jaxpr(lambda s, m: jax.vjp(lambda m: mapped(s, m), m)[1])(
        np.zeros((2, 64), np.float32), np.zeros((64, 64), np.float32)
    )
    # The state and the derivative of tanh, of 10 kB each, or the states of some steps. Before jax
    # 0.11 the derivative is one of the next state.
    saved = [x for x in jaxpr.jaxpr.outvars if x.aval.shape == (20, 64, 2)]
    derivative = str(jax.make_jaxpr(lambda x: jax.jvp(jnp.tanh, [x], [x]))(1.0))
    assert len(saved) == (arrays if "one_minus_square" in derivative else arrays // 2)


@pytest.mark.parametrize("checkpoint", [None, 7])
def test_residuals_that_depend_on_no_operand(checkpoint):
    """The index of a loop, which is the same for all lanes, and under vmap for all of a batch."""

    def f(a):
        return lax.fori_loop(0, 100, lambda i, c: 0.9 * c + jnp.sin(a) * i * 0.01, a)

    def gradient(map_, **settings):
        return jax.grad(lambda x: map_(f, **settings)(x).sum())

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    found, wanted = gradient(jtk.kernel, checkpoint=checkpoint), gradient(jax.vmap)
    close(jax.jit(found)(x[0]), wanted(x[0]))
    close(jax.jit(jax.vmap(found))(x), jax.vmap(wanted)(x))
    close(jax.jit(jax.vmap(found, in_axes=1))(x), jax.vmap(wanted, in_axes=1)(x))


def test_forward_mode_through_a_while_loop_and_not_reverse_mode():
    doubled = jtk.kernel(lambda x: lax.while_loop(lambda c: c < 10.0, lambda c: c * 2, x))
    _, tangent = jax.jvp(doubled, (jnp.ones(3),), (jnp.ones(3),))
    np.testing.assert_array_equal(tangent, 16.0)
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax\.wh"):
        jax.grad(lambda x: doubled(x).sum())(jnp.ones(3))


@pytest.mark.parametrize(
    ("f", "in_axes", "out_axes", "args"),
    [
        (lambda x, y: (x, y.sum()), (0, None), (0, None), (jnp.ones(3), jnp.ones(4))),
        (lambda x, y: x + y["a"], (1, {"a": -1}), 1, (START, {"a": START})),
        (lambda x: jnp.outer(x, x), 0, -1, (START,)),
        (lambda x, n: x * n, (0, None), 0, (START, 2)),
        (lambda x, b, z: jnp.where(b, x * z, z), (0, None, None), 0, (START, True, 1j)),
        (lambda x, name: getattr(jnp, name)(x), (0, None), 0, (START, "sin")),
        (lambda x, f: f(x), (0, None), 0, (START, jnp.sin)),
        (lambda x, each: x * sum(each), (0, [None, 0]), 0, (START, [2.0, START])),
        (lambda x: 1.0, 0, 0, (START,)),
        (lambda x: (1, 2.0, True), 0, None, (START,)),
        (lambda x: None, 0, 0, (START,)),
        (lambda x: {}, 0, None, (START,)),
        (lambda x: (x, {"a": None}, ()), 0, 0, (START,)),
        (lambda x: 1, 0, None, (START[:0],)),
        (lambda x, y: (x, y.sum()), (0, None), (0, None), (START[:0], START)),
        (lambda x: x * START.sum(), 0, 0, (START,)),
        (lambda x: (x, x.sum() * jnp.ones(0)), 0, 0, (START[:0],)),
        (lambda x: jtk.kernel(lambda y: y * 2)(x).sum(), 0, 0, (START,)),
        (lambda x: jax.vmap(collatz)(x.astype(int))[1], 0, 0, (START,)),
        (lambda key: jax.random.split(key), 0, 0, (jax.random.split(jax.random.key(0), 3),)),
    ],
)
def test_arguments_are_those_of_vmap(f, in_axes, out_axes, args):
    found = jtk.kernel(f, in_axes=in_axes, out_axes=out_axes)(*args)
    wanted = jax.vmap(f, in_axes=in_axes, out_axes=out_axes)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, 1e-6)


def counted(f):
    """Return a function, and the list that it appends to where it is traced."""
    traced = []

    def function(*args):
        traced.append(args)
        return f(*args)

    return function, traced


def test_a_mapped_function_is_traced_once():
    f, traced = counted(lambda x: x + 1)
    mapped = jtk.kernel(f)
    for _ in range(3):
        mapped(jnp.ones(3))
        # Once for the types of results, and once for the kernel.
        once = len(traced)
        assert once <= 2
    mapped(jnp.ones(4))
    assert len(traced) == 2 * once
    # A partial of it, a method, and a callable object.
    for other in (functools.partial(f), [1.0, 2.0].__getitem__):
        assert callable(jtk.kernel(other))
    alive = weakref.ref(f)
    del f, other, mapped
    traced.clear()
    gc.collect()
    assert alive() is None


def test_numbers_are_operands():
    f, traced = counted(lambda x, y: x * y)
    mapped = jtk.kernel(f, in_axes=(0, None))
    for y in (0.0, -0.0, math.nan, *np.arange(20.0).tolist()):
        found, wanted = mapped(jnp.ones(3), y), np.full(3, y, np.float32)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    once = len(traced)
    assert once <= 2
    for y in (1, 2, True, False, 1j, 2j):
        found, wanted = mapped(jnp.ones(3), y), jax.vmap(lambda x, y=y: x * y)(jnp.ones(3))
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    assert len(traced) == 4 * once
    assert jax.grad(lambda y: mapped(jnp.ones(3), y).sum())(2.0) == 3.0


def test_a_mapped_function_reads_what_it_closes_over_anew():
    factor = 2.0

    def f(x):
        return x * factor

    first = jtk.kernel(f)
    np.testing.assert_array_equal(first(jnp.ones(3)), 2.0)
    factor = 3.0
    np.testing.assert_array_equal(jtk.kernel(f)(jnp.ones(3)), 3.0)
    np.testing.assert_array_equal(first(jnp.ones(3)), 3.0)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: x[:n],
        lambda x, n: x if n else -x,
        lambda x, n: jnp.zeros(n),
        lambda x, n: sum(x for _ in range(n)),
        lambda x, n: x * np.sin(n),
        lambda x, n: lax.scan(lambda c, _: (c, None), x, None, length=n)[0],
    ],
)
def test_a_function_that_needs_the_value_of_a_number_closes_over_it(f):
    with pytest.raises((TypeError, IndexError), match="needs the value of one closes over it"):
        jtk.kernel(f, in_axes=(0, None))(START, 2)
    found = jtk.kernel(lambda x: f(x, 2))(START)
    np.testing.assert_array_equal(found, jax.vmap(f, (0, None))(START, 2))
    # Errors about other arguments have no such note.
    with pytest.raises(TypeError) as info:
        jtk.kernel(lambda x: jnp.zeros(x))(jnp.arange(3))
    assert not any("Python numbers" in note for note in info.value.__notes__)


def test_keywords_and_closed_over_tracers():
    by_keyword = jtk.kernel(lambda x, *, y: x + y)
    np.testing.assert_array_equal(by_keyword(jnp.ones(3), y=jnp.ones(3)), 2.0)
    table = jax.vmap(lambda a: jtk.kernel(lambda x: x * a)(jnp.arange(3.0)))(jnp.arange(2.0))
    np.testing.assert_array_equal(table, np.outer(np.arange(2), np.arange(3)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jtk.kernel(3), TypeError, "maps a function, not 3"),
        (lambda: jtk.kernel(len, checkpoint=True), TypeError, "checkpoint is True; it is 'auto'"),
        (lambda: jtk.kernel(len, checkpoint=0), ValueError, "checkpoint=0: there is at least"),
        (lambda: jtk.kernel(lambda x, y: x)(jnp.ones(3), jnp.ones(4)), ValueError, "inconsistent"),
        (lambda: jtk.kernel(lambda x: x, in_axes=(0, 0))(jnp.ones(3)), ValueError, "in_axes"),
        (lambda: jtk.kernel(lambda x: x, out_axes=None)(jnp.ones(3)), ValueError, "out_axes"),
        (lambda: jtk.kernel(lambda x: jnp.ones(int(x)))(jnp.ones(3)), TypeError, "concrete value"),
    ],
)
def test_errors_are_those_of_vmap(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_64_bit_types_follow_the_call():
    with jax.enable_x64(True):
        rounded = jtk.kernel(lambda x: (x.astype(jnp.float64) + 1e-9 - x).astype(jnp.float32) > 0)
        traced = jax.jit(rounded).trace(np.ones(3, np.float32))
    np.testing.assert_array_equal(traced.lower().compile()(np.ones(3, np.float32)), True)


# Several devices.


def no_collectives(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    return not re.search(r"all-reduce|all-gather|all-to-all|collective-permute", text)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_lanes_need_no_collectives():
    mesh = mesh_of((AUTO, AUTO))
    start, parameters = put(mesh, START, LANES), put(mesh, PARAMETERS, P())
    mapped = mapped_by(jtk.kernel)
    assert no_collectives(mapped, start, parameters)
    assert no_collectives(jax.grad(lambda x: jnp.sum(mapped(x, parameters) ** 2)), start)
    found = jax.jit(mapped)(start, parameters)
    assert found.sharding.spec[0] == ("d", "m")
    close(found, mapped_by(jax.vmap)(START, PARAMETERS))
    # XLA's vmap asks all devices whether any of them goes on.
    counts = put(mesh, np.arange(1, 17), LANES)
    assert no_collectives(jtk.kernel(collatz), counts)
    assert not no_collectives(jax.vmap(collatz), counts)


# What is planned for a GPU.


def explained(function, *args, gpu="sm_90"):
    with jtk.gpu_target(gpu):
        return jtk.explain(function, *args, platform="cuda")


@needs_nvrtc
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("f", "in_axes", "shapes", "registers"),
    [
        (lorenz, (0, None), ((3,), (3,)), 40),
        (kalman, (0, None, None, 0), ((6,), (6, 6), (6, 6), (50, 2)), 255),
    ],
)
@pytest.mark.one_in(3)
def test_loops_are_in_registers(f, in_axes, shapes, registers, gpu):
    lanes = 1 << 20
    args = [
        jax.ShapeDtypeStruct((lanes, *shape) if axis == 0 else shape, jnp.float32)
        for axis, shape in zip(in_axes, shapes, strict=True)
    ]
    (choice,) = explained(jtk.kernel(f, in_axes=in_axes), *args, gpu=gpu)
    assert choice.kernel.startswith(f"lanes_{f.__name__}<128>")
    found = re.search(r"(\d+) registers, (\d+) bytes spilled, (\d+) bytes of stack", choice.reason)
    used, spilled, stack = map(int, found.groups())
    assert used <= registers
    assert (spilled, stack) == (0, 0)
    assert (
        f"{lanes} elements, a thread each, in {lanes // 128} CTAs of 128 threads" in choice.reason
    )


def backward_of(function, *args):
    """The kernel that runs the loop of a function backwards."""
    eqns = [e for e in jax.make_jaxpr(function)(*args).jaxpr.eqns if "function" in e.params]
    return write_kernel([x.aval for x in eqns[-1].invars], **parameters(eqns[-1]))


@needs_nvrtc
def test_loops_backwards_load_ahead_and_add_no_zeros():
    def gradient(function, **settings):
        kernel = jtk.kernel(function, in_axes=(0, None), **settings)
        return jax.grad(lambda p: jnp.sum(kernel(START, p)[0] ** 2))

    kernel = backward_of(gradient(lorenz), PARAMETERS)
    assert kernel.text.count("#pragma unroll 4") == 1
    # A cotangent of an element is one of an array that is zero elsewhere.
    ptx = compile_to_ptx(kernel.kernel(32), arch="sm_90a")
    assert "add.f32" in ptx
    if nvrtc().version >= (13, 5):  # has __builtin_constant_p
        assert not re.search(r"add\.f32.*0f00000000", ptx)
    # Only innermost loops.
    chunks = backward_of(gradient(lorenz, checkpoint=10), PARAMETERS).text
    assert chunks.count("#pragma unroll 1\n") > chunks.count("#pragma unroll 4\n")


@needs_nvrtc
def test_long_functions_are_called_where_there_are_many():
    def sines(count, x):
        for _ in range(count):
            x = jnp.sin(x) * x
        return x

    for count, called in ((3, False), (60, True)):
        avals, call = _call_of(jtk.kernel(lambda x, n=count: sines(n, x)), jnp.ones(4))
        text = write_kernel(avals, **call).text
        assert ("called::sin(" in text) == called
    start = time.process_time()
    (choice,) = explained(jtk.kernel(lambda x: sines(200, x)), jnp.ones(4))
    assert choice.kernel
    assert time.process_time() - start < 3


def _call_of(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return [x.aval for x in eqn.invars], parameters(eqn)


@needs_nvrtc
def test_few_lanes_are_spread_over_the_gpu():
    (choice,) = explained(jtk.kernel(lambda x: x * 2), jnp.ones(10000))
    assert f"in {-(-10000 // 32)} CTAs of 32 threads" in choice.reason
    assert known_gpu("sm_90").sm_count < 10000 // 32


@needs_nvrtc
@pytest.mark.parametrize("threads", [1, 32])
def test_complex_numbers_and_their_spectra_are_kernels(threads):
    kernel = jtk.kernel(lambda x: jnp.abs(jnp.fft.fft(x)) * x[0], threads=threads)
    (choice,) = explained(kernel, jnp.ones((100, 16), jnp.complex64))
    assert choice.kernel.startswith("lanes" if threads == 1 else "groups")


@needs_nvrtc
def test_long_arrays_are_in_a_workspace():
    def f(x):
        return lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=1000)[1].max()

    (choice,) = explained(jtk.kernel(f, threads=1), jnp.ones(64))
    assert f"{64 * 4000} bytes of workspace" in choice.reason
    assert " 0 bytes of stack" in choice.reason


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (
            lambda x: lax.approx_max_k(x * jnp.arange(4), 2)[0],
            "no CUDA for approx_top_k: it approximates; use top_k, at .*test_lane_k",
        ),
        (lambda x: jnp.linalg.eigvalsh(x * jnp.eye(20)), "no CUDA for eigh of 20x20, only up"),
        (lambda x: jnp.linalg.cholesky(x * jnp.eye(20)), "no CUDA for cholesky of 20x20, only up"),
        (
            lambda x: jnp.sort(x * 1j * jnp.arange(3)),
            "no CUDA for sort of complex numbers, at .*test_lane_k",
        ),
        (lambda x: jnp.fft.fft(jnp.full(74, x)), "no CUDA for fft of .*74.* points; .* up to 64"),
        (lambda x: jnp.fft.fft(jnp.full(37, x)), "no CUDA for fft of 37 points, .* factor 37"),
        (
            lambda x: lax.scan(lambda c, _: (jnp.convolve(c, c), None), x[None], None, 2)[0],
            "no windows or convolutions, at",
        ),
        (
            lambda x: x + jax.random.normal(jax.random.key(0, impl="rbg")),
            "no CUDA for rng_bit_generator: .* use threefry2x32 .*, at .*test_lane_k",
        ),
    ],
)
def test_what_has_no_kernel_is_xlas_and_named(f, reason):
    with pytest.warns(RuntimeWarning, match=reason):
        (choice, *_) = explained(jtk.kernel(f), jnp.ones(4))
    assert choice.kernel is None
    assert re.search(reason, choice.reason)
    with jtk.strict(), pytest.raises(jtk.FallbackError, match=reason):
        explained(jtk.kernel(f), jnp.ones(4))


def test_effects_and_keys_without_a_kernel_are_vmaps():
    def printing(x):
        jax.debug.print("{x}", x=x)
        return x + 1

    with pytest.warns(RuntimeWarning, match="debug.* at .*test_lane_k.* has a side effect"):
        np.testing.assert_array_equal(jtk.kernel(printing)(jnp.ones(2)), 2.0)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)

    def doubled(key):
        return jax.random.key_data(jnp.concatenate([key[None], key[None]]))

    with_rule = jax.custom_jvp(doubled)
    with_rule.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0]))
    for function in (doubled, with_rule):
        with pytest.warns(
            RuntimeWarning, match="broadcast_in_dim of random keys, at .*test_lane_k"
        ):
            found = jtk.kernel(function)(keys)
        np.testing.assert_array_equal(found, jax.vmap(doubled)(keys))
    with jtk.strict(), pytest.raises(jtk.FallbackError, match="side effect"):
        jtk.kernel(printing)(jnp.ones(2))


def test_policy_xla_takes_vmap():
    with jtk.policy("xla"):
        (choice,) = explained(jtk.kernel(jnp.sin), jnp.ones(4))
    assert choice.kernel is None


@needs_nvrtc
def test_empty_arrays():
    def f(x):
        return lax.scan(lambda c, a: (c + a, c), x, jnp.zeros(0))

    (choice,) = explained(jtk.kernel(f), jnp.ones(4))
    assert choice.kernel.startswith("lanes_f")
    (choice,) = explained(jtk.kernel(f), jnp.ones(0))
    assert choice.reason == "its results have no elements"


@pytest.mark.parametrize(
    "of_map",
    [
        lambda map_: jax.jacfwd(map_(jnp.sin))(jnp.ones(0)),
        lambda map_: jax.jacfwd(map_(lambda x: x * 2))(jnp.ones((3, 0))),
        lambda map_: jax.vmap(
            lambda t: jax.jvp(map_(jnp.sin), (START,), (t,)), in_axes=1, out_axes=(None, 0)
        )(jnp.ones((16, 0, 3))),
        # The loop has no end for the zeros of an empty sum.
        lambda map_: jax.vmap(
            map_(lambda x, y: (collatz(x), collatz(y))), in_axes=(None, 0), out_axes=(None, 0)
        )(jnp.arange(1, 4), jnp.ones((0, 3), jnp.int32)),
    ],
    ids=["jacfwd", "jacfwd of rows", "jvp", "loops"],
)
def test_results_that_do_not_depend_on_an_empty_batch_have_none(of_map):
    found, wanted = of_map(jtk.kernel), of_map(jax.vmap)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    close(found, wanted)


def test_symbolic_sizes_are_vmaps():
    (lanes,) = jax.export.symbolic_shape("lanes")
    exported = jax.export.export(jax.jit(jtk.kernel(collatz)))(
        jax.ShapeDtypeStruct((lanes,), jnp.int32)
    )
    counts = exported.call(jnp.arange(1, 8, dtype=jnp.int32))[1]
    np.testing.assert_array_equal(counts, [0, 1, 7, 2, 5, 8, 16])
    f, (_, parameters, inputs) = of_steps(20)
    gradient = jax.jit(jax.grad(lambda x: loss_of(f, jtk.kernel)(x, parameters, inputs)))
    exported = jax.export.export(gradient)(jax.ShapeDtypeStruct((lanes, 3), jnp.float32))
    wanted = jax.grad(loss_of(f, jax.vmap))(START, parameters, inputs)
    close(exported.call(START), wanted)


def test_checkpoints_of_64_bits_follow_the_call():
    f, args = of_steps(40)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, args)
        traced = jax.jit(jax.grad(loss_of(f, jtk.kernel, checkpoint=6))).trace(*wide)
        wanted = jax.jit(jax.grad(loss_of(f, jax.vmap)))(*wide)
    compiled = traced.lower().compile()
    with jax.enable_x64(True):
        np.testing.assert_allclose(compiled(*wide), wanted, 1e-12)
