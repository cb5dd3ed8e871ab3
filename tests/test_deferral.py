"""Programs whose kernels are compiled side by side, as they are lowered. No GPU is needed."""

import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvrtc_mark import require_nvrtc

import jax_tilekern as jtk
from jax_tilekern.compilation import compiler, nvrtc
from jax_tilekern.interop import compat, outcomes
from jax_tilekern.ops import planned_kernel
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
from jax_tilekern.plans.contraction import Contraction

require_nvrtc()

X = jax.ShapeDtypeStruct((64, 96), np.float32)


@pytest.fixture(autouse=True)
def compiled_names(tmp_path, monkeypatch):
    """Give each test empty caches; return the names of the kernels that NVRTC compiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_memory", compiler._Memory())
    planned_kernel._plan_once.cache_clear()
    names = []
    with _compiling(lambda name: names.append(name)):
        yield names
    planned_kernel._plan_once.cache_clear()


@contextlib.contextmanager
def _compiling(before):
    """Call a function with the name of a kernel before NVRTC compiles it."""
    real = nvrtc.Nvrtc.compile

    def compile(self, source, **rest):
        before(rest["name"])
        return real(self, source, **rest)

    with mock.patch.object(nvrtc.Nvrtc, "compile", compile):
        yield


def _lowered(function, *types):
    with jtk.gpu_target("H100"):
        traced = jax.jit(lambda *args: function(*args)).trace(*types)
        return traced.lower(lowering_platforms=("cuda",))


def _text(function, *types):
    return _lowered(function, *types).as_text(debug_info=True)


def _launches(text):
    return len(re.findall(r"custom_call @jax_tilekern_cuda_launch\b", text))


def three_kernels(x):
    return jtk.add(x, x), jtk.transpose(x), jtk.sum(x, axis=1)


def in_functions(x):
    """Calls in functions that JAX inlines, copies or calls, some with a transpose outside."""
    once = jax.checkpoint(lambda x, w: jnp.sin(jtk.matmul(x, w)))
    inside = jax.jit(lambda x, w: jtk.matmul(x, w.T))
    y = once(x, x.T) + once(x + 1, x.T) + inside(x, x)
    y = jax.lax.cond(y[0, 0] > 0, lambda y: jtk.add(y, y), lambda y: jtk.transpose(y), y)
    return jax.lax.scan(lambda carry, row: (jtk.add(carry, row), jtk.sum(carry)), y[0], y)


def in_place(x):
    """A product whose epilogue may write over a matrix, once of its own operand."""

    def product(x, w, added):
        return contract_with_epilogue(
            x, w, contraction=Contraction((0, 1), (1, 2), (0, 2)), precision=None,
            product=np.dtype(np.float32), shape=(64, 64), epilogue=jnp.add, operands=(added,),
            in_place=((0, 0),),
        )  # fmt: skip

    twice = jax.checkpoint(lambda x: product(x.T, x, x) + product(x + 1, x, x - 1))
    return twice(x[:, :64]), product(x[:, :64].T, x[:, :64], x[:, :64])


def gradient(x):
    return jax.grad(lambda x: jnp.sum(in_functions(x)[1]))(x)


def two_cuda_kernels(x):
    text = "__global__ void scale(const float* x, float* y) {{ *y = {} * *x; }}"
    return [jtk.cuda_kernel(text.format(i), grid=1, block=1, out=x)(x) for i in range(2)]


def test_kernels_of_users_are_compiled_at_the_same_time():
    barrier = threading.Barrier(2)
    with _compiling(lambda _: barrier.wait(timeout=60)):
        assert _launches(_text(two_cuda_kernels, X)) == 2


def test_a_call_with_a_structure_of_numbers_is_not_deferred():
    pair = np.array((1, 2.5), np.dtype([("first", "i4"), ("second", "f4")]))[()]
    source = """
    struct Pair { int first; float second; };
    __global__ void add(float* out, Pair pair) { *out = pair.first + pair.second; }
    """
    out = jax.ShapeDtypeStruct((1,), np.float32)
    kernel = jtk.cuda_kernel(source, out=out, grid=1, block=1, scalars=(pair,))
    assert _launches(_text(kernel)) == 1


def test_kernels_of_a_program_are_compiled_at_the_same_time():
    """Each compilation waits until all have begun, which they would not one after the other."""
    barrier = threading.Barrier(3)
    with _compiling(lambda _: barrier.wait(timeout=60)):
        assert _launches(_text(three_kernels, X)) == 3


@pytest.mark.parametrize("function", [three_kernels, in_functions, in_place, gradient])
def test_the_module_does_not_depend_on_the_caches(function, compiled_names):
    """JAX's cache of compiled programs has the module in its key."""
    texts, numbers = [], []
    for _ in range(2):
        texts.append(_text(function, X))
        numbers.append(len(compiled_names))
        planned_kernel._plan_once.cache_clear()
    assert texts[0] == texts[1]
    assert numbers[0] == numbers[1] > 0
    assert "deferred" not in texts[0]


def test_the_cache_has_the_same_entries_where_nothing_is_deferred(tmp_path, monkeypatch):
    files = []
    for folder, listeners in (("one", None), ("two", [])):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        monkeypatch.setattr(compiler, "_memory", compiler._Memory())
        planned_kernel._plan_once.cache_clear()
        jax.clear_caches()
        if listeners is not None:
            # As after jax.monitoring.clear_event_listeners().
            monkeypatch.setattr("jax._src.monitoring._scalar_listeners", listeners)
        text = _text(three_kernels, X)
        files.append(({x.name for x in (tmp_path / folder).rglob("*.cubin")}, text))
    assert files[0] == files[1]
    assert len(files[0][0]) == 3


def test_kernels_are_compiled_while_the_interpreter_exits(compiled_names):
    with mock.patch.object(ThreadPoolExecutor, "submit", side_effect=RuntimeError("shutdown")):
        text = _text(three_kernels, X)
    assert _launches(text) == len(compiled_names) == 3
    assert "deferred" not in text


def test_only_calls_of_the_program_are_compiled(compiled_names):
    """A call that is mapped or differentiated is compiled as what it becomes."""
    inner = jax.jit(lambda x: jtk.transpose(jtk.add(x, x)))
    text = _text(jax.vmap(jax.grad(lambda x: inner(x).sum())), X)
    entries = set(re.findall(r'entry = "(\w+)"', text))
    assert len(compiled_names) == len(set(compiled_names)) == len(entries)


def _failing(name):
    if "transpose" in name:
        raise nvrtc.CompileError("error: planted", "planted")


def test_a_failing_kernel_falls_back_alone():
    warns = pytest.warns(RuntimeWarning, match="its kernel failed: error: planted")
    with outcomes.entered("DEFAULT"), _compiling(_failing), warns:
        text = _text(three_kernels, X)
    assert _launches(text) == 2
    assert "stablehlo.transpose" in text
    assert "deferred" not in text


def test_a_failing_kernel_falls_back_in_each_copy_of_its_function():
    def function(x):
        once = jax.checkpoint(lambda x: jnp.sin(jtk.transpose(x)))
        return once(x) + once(x + 1)

    warns = pytest.warns(RuntimeWarning, match="its kernel failed: error: planted")
    with outcomes.entered("DEFAULT"), _compiling(_failing), warns:
        text = _text(function, X)
    assert _launches(text) == 0
    assert text.count("stablehlo.transpose") == 2
    assert "deferred" not in text


def test_a_failing_kernel_is_an_error_in_strict_mode():
    with jtk.strict(), _compiling(_failing), pytest.raises(jtk.CompileError, match="planted"):
        _lowered(three_kernels, X)
    # The next program is lowered as any other.
    planned_kernel._plan_once.cache_clear()
    assert _launches(_text(three_kernels, X)) == 3


def test_an_error_of_another_call_is_raised():
    def function(x):
        return jtk.transpose(fails.bind(jtk.add(x, x)))

    fails = compat.Primitive("fails")
    fails.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match="fails"):
        _lowered(function, X)
    assert _launches(_text(three_kernels, X)) == 3


def test_a_program_is_lowered_while_another_is():
    inner = []

    def rule(_, value):
        inner.append(_text(two_cuda_kernels, X))
        return [value]

    lowers = compat.Primitive("lowers")
    lowers.def_abstract_eval(lambda x: x)
    compat.mlir.register_lowering(lowers, rule)
    outer = _text(lambda x: three_kernels(lowers.bind(jtk.add(x, x))), X)
    assert _launches(outer) == 3
    assert [_launches(text) for text in inner] == [2]
    assert "deferred" not in outer + inner[0]


def test_exported_programs_have_their_cubins(compiled_names):
    with jtk.gpu_target("H100"):
        exported = jax.export.export(
            jax.jit(lambda x: three_kernels(x)),
            platforms=("cuda", "cpu"),
            disabled_checks=jtk.export_checks(),
        )(X)
    module = exported.mlir_module()
    assert len(compiled_names) == 3
    # An ELF image begins with these bytes.
    assert len(set(re.findall(r'dense<"0x7F454C46\w{1000,}"', module))) == 3
    assert "deferred" not in module
    x = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(x)[1], x.T)


def test_explain_lists_calls_in_the_order_of_the_program():
    with jtk.gpu_target("H100"):
        explained = str(jtk.explain(three_kernels, X, platform="cuda"))
    places = [explained.index(name) for name in ("add", "transpose", "sum")]
    assert places == sorted(places)
