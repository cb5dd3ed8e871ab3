"""Contexts in functions that JAX traces hold where programs are lowered and differentiated."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from nvrtc_mark import needs_nvrtc
from sharded import AUTO, devices

import jax_tilekern as jtk
from jax_tilekern import scope, tuning
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.tuned import XLA, TunedChoices

X = jnp.ones((64, 64))
SHARDED = pytest.mark.skipif(devices() is None, reason="needs 8 devices of a CPU")


class _LeftToXla(TunedChoices):
    """Choices by which XLA's product is the fastest."""

    def __init__(self):
        super().__init__(None)

    def digest(self, gpu):
        return "left to XLA"

    def find(self, what, gpu):
        return XLA


LEFT_TO_XLA = _LeftToXla()


def product(x):
    return jtk.matmul(x, x)


@pytest.fixture
def no_settings():
    """As outside of the suite's own contexts."""
    with scope._settings(()):
        yield


# -- Each context at each place. ``place(inside)`` is a function of X, or of what ``given`` makes of
# it, that calls products only in functions that ``inside`` returns.


def _with(inside):
    def function(x):
        with inside.context():
            return product(x)

    return function


def _sum(function):
    return lambda x: function(x).sum()


def _grad(inside):
    return jax.grad(_sum(inside(product)))


def _second_derivative(inside):
    return jax.grad(_sum(jax.grad(_sum(inside(lambda x: product(product(x)))))))


def _pullback(inside):
    def function(x):
        result, pullback = jax.vjp(inside(product), x)
        return pullback(result)

    return function


def _grad_inside(inside):
    return inside(jax.grad(_sum(product)))


def _grad_of_jit(inside):
    return jax.grad(_sum(jax.jit(inside(product))))


def _vmap(inside):
    return jax.vmap(inside(product))


def _scan(inside):
    return lambda x: lax.scan(lambda y, _: (inside(product)(y), None), x, None, length=3)[0]


def _branches(inside):
    return lambda x: lax.cond(x[0, 0] > 0, inside(product), inside(lambda x: product(x).T), x)


def _custom_vjp(inside):
    @jax.custom_vjp
    def function(x):
        return inside(product)(x)

    function.defvjp(
        inside(lambda x: (product(x), x)), inside(lambda x, g: (product(g) + product(x),))
    )
    return jax.grad(_sum(function))


def _checkpoint(policy, inside):
    checkpointed = jax.checkpoint(inside(lambda x: jnp.sin(product(x))), policy=policy)
    return jax.grad(_sum(lambda x: checkpointed(checkpointed(x))))


def _jet(inside):
    return lambda x: jet.jet(inside(product), [x], [[x, x]])


def _jaxpr(inside):
    closed = jax.make_jaxpr(inside(product))(X)
    return jaxpr_as_fun(closed)


def _mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AUTO,), devices=devices()[:8])


def _shard_map(inside):
    mesh = _mesh()

    def function(x):
        return inside(product)(x[0])[None]

    return jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def _sharded(inside):
    return jax.jit(inside(product), in_shardings=NamedSharding(_mesh(), P("d")))


PLACES = {
    "with": _with,
    "decorator": lambda inside: inside(product),
    "jit": lambda inside: jax.jit(inside(product)),
    "grad": _grad,
    "grad inside": _grad_inside,
    "grad of jit": _grad_of_jit,
    "second derivative": _second_derivative,
    "pullback": _pullback,
    "jet": _jet,
    "vmap": _vmap,
    "scan": _scan,
    "cond": _branches,
    "custom_vjp": _custom_vjp,
    "checkpoint": functools.partial(_checkpoint, None),
    "checkpoint that saves": functools.partial(_checkpoint, jax.checkpoint_policies.dots_saveable),
    "jaxpr": _jaxpr,
    "shard_map": _shard_map,
    "sharded": _sharded,
}
BATCHED = ("vmap", "shard_map")


class Inside:
    """Decorates a function by a context; without one it leaves it as it is."""

    def __init__(self, context=None):
        self._context = context

    def context(self):
        return jtk.policy("kernels") if self._context is None else self._context()

    def __call__(self, function):
        return function if self._context is None else self._context()(function)


def _lowered(name, inside, x=X, platform="cpu"):
    if name in ("shard_map", "sharded") and devices() is None:
        pytest.skip("needs 8 devices of a CPU")
    x = jnp.stack([x] * 8) if name in BATCHED else x
    traced = jax.jit(PLACES[name](inside)).trace(x)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("name", PLACES)
def test_policy(name):
    assert "jax_tilekern" in _lowered(name, Inside())
    assert "jax_tilekern" not in _lowered(name, Inside(lambda: jtk.policy("xla")))
    with jtk.policy("xla"):
        assert "dot_general" not in _lowered(name, Inside(lambda: jtk.policy("kernels")))


@pytest.mark.parametrize("name", PLACES)
def test_strict(name):
    # No kernel is for a GPU that is so old, nor for integers of 16 bits.
    x, platform = (X.astype(np.int16), "cpu") if name == "sharded" else (X, "cuda")
    with gpu_target("T4"):
        _lowered(name, Inside(), x, platform)
        with pytest.raises(jtk.FallbackError, match=r"older than sm_80|no kernel for int16"):
            _lowered(name, Inside(jtk.strict), x, platform)


@needs_nvrtc
@pytest.mark.parametrize("name", PLACES)
def test_tuned_choices(name):
    with gpu_target("H100") as gpu:
        digest = LEFT_TO_XLA.digest(gpu)
        outside = _lowered(name, Inside(), platform="cuda")
        inside = _lowered(name, Inside(lambda: tuning.using(LEFT_TO_XLA)), platform="cuda")
    if name == "sharded":
        # It is planned when XLA has partitioned the program.
        assert digest in inside
        assert digest not in outside
    else:
        assert "jax_tilekern_cuda_launch" in outside
        assert "jax_tilekern_cuda_launch" not in inside


# -- Which settings hold.


def _has_kernel(function, *args):
    return "jax_tilekern" in jax.jit(lambda *args: function(*args)).lower(*args).as_text()


def test_a_trace_without_settings_has_those_where_it_is_lowered(no_settings):
    traced = jax.jit(product).trace(X)
    assert "contexts" not in str(traced.jaxpr)
    with jtk.policy("kernels"):
        assert "jax_tilekern" in traced.lower().as_text()
    with jtk.policy("xla"):
        assert "jax_tilekern" not in traced.lower().as_text()


def test_a_trace_keeps_the_settings_around_it(no_settings):
    with jtk.policy("xla"):
        traced = jax.jit(lambda x: product(x)).trace(X)
    with jtk.policy("kernels"):
        assert "jax_tilekern" not in traced.lower().as_text()


def test_the_inner_context_holds(no_settings):
    @jtk.policy("xla")
    def outer(x):
        with jtk.policy("kernels"):
            inner = product(x)
        return inner, jtk.transpose(x)

    for policy in ("kernels", "xla"):
        with jtk.policy(policy):
            text = jax.jit(outer).lower(X).as_text()
        # The product has a kernel, and the transpose has none.
        assert text.count("custom_call @jax_tilekern") == 1


@SHARDED
def test_a_default_overrides_what_holds_where_a_program_is_lowered(no_settings):
    for place in ("with", "sharded"):
        inside = Inside(lambda: jtk.policy("auto"))
        with jtk.policy("xla"):
            # Whether "auto" takes a kernel on one device depends on the machine.
            text = _lowered(place, inside)
    assert r"\22policy\22: \22auto\22" in text


def test_cost_analysis_counts_every_kernel():
    def function(x):
        with jtk.policy("kernels"), jtk.strict():
            return product(x)

    assert jtk.cost_analysis(function, X)["flops"] == 2 * 64**3


def test_a_program_has_one_gpu():
    @gpu_target("H100")
    def function(x):
        return product(x)

    for transformed in (
        jax.jit(function),
        jax.vmap(jax.jit(function)),
        jax.grad(_sum(jax.jit(function))),
    ):
        with pytest.raises(RuntimeError, match=r"enter it around jax\.jit"):
            transformed(X)
    with jax.ensure_compile_time_eval():
        function(X)


def test_settings_of_an_evaluated_jaxpr(no_settings):
    closed = jax.make_jaxpr(product)(X)
    with jtk.policy("kernels"):
        (eqn,) = jax.make_jaxpr(jaxpr_as_fun(closed))(X).eqns
    assert eqn.params["contexts"] == (("policy", "kernels"),)


def test_a_file_of_choices_has_one_key(tmp_path):
    file, traces = tmp_path / "choices.json", []
    file.write_text('{"schema": 2, "choices": {}}')

    @jax.jit
    def function(x):
        traces.append(x)
        return product(x)

    for _ in range(3):
        with tuning.using(file):
            function(X)
    assert len(traces) == 1


def test_threads():
    together, found = threading.Barrier(2, timeout=60), {}

    def run(policy):
        def function(x):
            with jtk.policy(policy):
                together.wait()
                result = product(x)
                together.wait()
            return result

        found[policy] = _has_kernel(function, X)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("kernels", "xla")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"kernels": True, "xla": False}


def test_a_compiled_program_is_found_again(no_settings):
    traces = []

    @jax.jit
    def function(x):
        traces.append(x)
        return product(x)

    for policy in ("kernels", "xla", "kernels", "xla"):
        with jtk.policy(policy):
            np.testing.assert_allclose(function(X), 64)
    assert len(traces) == 2


@SHARDED
def test_a_sharded_program_is_planned_under_the_settings_of_the_trace(no_settings):
    function = _sharded(Inside(lambda: jtk.policy("kernels")))
    with jtk.policy("xla"):
        (choice,) = jtk.explain(function, X)
    assert choice.operands == ("f32[8,64]", "f32[64,64]")
    assert choice.partition.startswith("m in 8")
    assert choice.reason.endswith('jax_tilekern.policy("kernels")')


# -- Rules that JAX calls later than the function itself.

BATCH = jnp.stack([jnp.eye(4)] * 64)


def _experts():
    def function(x):
        w, indices = jnp.ones((4, 128, 256)), jnp.arange(128)[:, None] % 4
        x, weights = jnp.tile(x, (2, 2)), jnp.ones((128, 1))
        return jtk.moe(x, w, w.mT, weights, indices, activation=jnp.tanh)

    # Elsewhere a layer that several devices may share is one equation.
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AUTO,), devices=jax.devices()[:1])
    return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P())


def _fp8(x):
    return jtk.fp8_dot_general(x, x, (((1,), (0,)), ((), ())))


def _kernel_with_a_rule():
    source = "__global__ void f(const float* x, float* out) {}"
    kernel = jtk.cuda_kernel(source, out=lambda x: x, grid=1, block=1, reference=jnp.sin)

    def rule(primals, tangents):
        return kernel(*primals), jtk.matmul(*tangents, *primals)

    kernel.defjvp(rule)
    return kernel


def _out_of_core(x):
    there = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    product = jtk.out_of_core.matmul(x, jax.device_put(X, there), memory_limit=1 << 20)
    return jax.device_put(product, jax.memory.Space.Device)


FUNCTIONS = {
    "det": (jtk.linalg.det, BATCH),
    "slogdet": (lambda a: jtk.linalg.slogdet(a)[1], BATCH),
    "inv": (jtk.linalg.inv, BATCH),
    "solve": (lambda a: jtk.linalg.solve(a, a), BATCH),
    "pinv": (jtk.linalg.pinv, BATCH),
    "epilogue": (lambda x: jtk.matmul(x, x, epilogue=jnp.tanh), X),
    "pair": (lambda x: jtk.gated_linear(x, x, x), X),
    "moe": (_experts(), X),
    "fp8": (_fp8, X),
    "fused product": (jtk.fuse(lambda x: jnp.tanh(product(x))), X),
    "fused product of JAX": (jtk.fuse(lambda x: jnp.tanh(x @ x) @ x), X),
    "segments": (lambda x: jtk.segment_max(x, jnp.arange(64) % 4, 4), X),
    "cross entropy": (lambda x: jtk.linear_cross_entropy(x, x, jnp.arange(64)), X),
    "lanes": (jtk.kernel(lambda x: lax.fori_loop(0, 3, lambda _, y: jnp.sin(x * y), x)), X),
    "kernel with a rule": (_kernel_with_a_rule(), X),
    "out of core": (_out_of_core, X),
}
BY_COTANGENTS = ("fp8", "moe in fp8", "out of core")
SAVING = jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(2)
def test_derivatives(name):
    function, x = FUNCTIONS[name]
    left_to_xla = jtk.policy("xla")(function)
    saving = jtk.policy("xla")(jax.checkpoint(function, policy=SAVING))
    derivatives = [jax.grad(_sum(jax.jit(f))) for f in (left_to_xla, saving)]
    if name not in BY_COTANGENTS:
        derivatives.append(lambda x: jax.jvp(jax.jit(left_to_xla), [x], [x]))
    for derivative in derivatives:
        found = [
            dict(eqn.params["contexts"])["policy"]
            for eqn in equations(jax.make_jaxpr(derivative)(x).jaxpr)
            if eqn.primitive.name.startswith("tilekern")
        ]
        assert found
        assert set(found) == {"xla"}
