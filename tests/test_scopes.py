"""The public context managers: entered again, in several threads, as decorators, and pickled."""

import threading

import jax
import jax.numpy as jnp
import pytest

import jax_tilekern as jtk
from jax_tilekern.interop import outcomes
from jax_tilekern.interop.global_modes import _intercepting
from jax_tilekern.plans.gpu import known_gpu, target
from jax_tilekern.plans.policy import current_policy

H100 = known_gpu("sm_90")
X = jnp.ones((4, 4))


def state():
    """What the contexts change, in this thread."""
    return bool(_intercepting.value), outcomes.current(), current_policy(), target.value


OUTSIDE = (False, "DEFAULT", "auto", None)
SCOPES = {
    "patch": (jtk.patch, (True, "DEFAULT", "auto", None)),
    "strict": (jtk.strict, (False, "STRICT", "auto", None)),
    "strict with arguments": (
        lambda: jtk.strict(allow_fallbacks=True),
        (False, "STRICT_COMPILATION", "auto", None),
    ),
    "policy": (lambda: jtk.policy("xla"), (False, "DEFAULT", "xla", None)),
    "gpu_target": (lambda: jtk.gpu_target("sm_90"), (False, "DEFAULT", "auto", H100)),
}


@pytest.fixture(autouse=True)
def outside_of_the_suites_own():
    with outcomes.entered("DEFAULT"), jtk.policy("auto"):
        yield


@pytest.mark.parametrize("name", SCOPES)
def test_one_scope_is_entered_again(name):
    make, inside = SCOPES[name]
    scope = make()
    for _ in range(2):
        with scope:
            with pytest.raises(ZeroDivisionError), scope:
                raise ZeroDivisionError
            assert state() == inside
        assert state() == OUTSIDE


@pytest.mark.parametrize("name", SCOPES)
def test_one_scope_in_two_threads(name):
    make, inside = SCOPES[name]
    scope, together, found = make(), threading.Barrier(2, timeout=10), []

    @scope
    def decorated():
        together.wait()
        return state()

    def run():
        with outcomes.entered("DEFAULT"), jtk.policy("auto"):
            before = state()
            with scope:
                together.wait()
                within = state()
                together.wait()
            found.append((before, within, decorated(), state()))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(OUTSIDE, inside, inside, OUTSIDE)] * 2


def test_a_context_is_made_before_another_is_entered():
    strict = outcomes.entered("STRICT")
    with jtk.policy("xla"), strict:
        assert state() == (False, "STRICT", "xla", None)


@pytest.mark.parametrize("name", ["patch", "strict"])
def test_a_decorator_without_parentheses(name):
    make, inside = SCOPES[name]

    @make
    def function(*, argument):
        """What it does."""
        return argument, state()

    assert function.__doc__ == "What it does."
    assert function(argument=1) == (1, inside)
    assert state() == OUTSIDE


@pytest.mark.parametrize("name", SCOPES)
def test_generators_and_coroutines_are_not_decorated(name):
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match="enter the context inside of it"):
            SCOPES[name][0]()(function)


def test_wrong_arguments_are_refused_where_they_are_given():
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        jtk.patch(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fallbacks'"):
        jtk.strict(fallbacks=True)


def test_what_wraps_functions_is_pickled():
    cloudpickle = pytest.importorskip("cloudpickle")

    def product(x):
        return x @ x, state()

    for make, inside in SCOPES.values():
        scope = make()
        with scope:
            for again in cloudpickle.loads(cloudpickle.dumps((scope, scope(product)))):
                call = again(product) if again.__class__ is scope.__class__ else again
                assert call(X)[1] == inside
        assert cloudpickle.loads(cloudpickle.dumps(scope(product)))(X)[1] == inside
    for wrapped in (
        jax.jit(jtk.patch(lambda x: x @ x)),
        jtk.fuse(lambda x: jnp.tanh(x @ x)),
        jtk.fuse(lambda x: jtk.matmul(x, x, epilogue=lambda y: 2 * y)),
    ):
        again = cloudpickle.loads(cloudpickle.dumps(wrapped))
        assert (again(X) == wrapped(X)).all()
