"""``attention`` on every backend: values, derivatives, masks, memory and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numerics import assert_close, on_gpu
from sharded import AUTO, collectives, devices, mesh_of, put

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from jax_tilekern.interop import compat
from jax_tilekern.ops.attention import block_loop
from jax_tilekern.ops.attention.index_functions import traced
from jax_tilekern.ops.attention.score_factors import FactoredScore, factored
from jax_tilekern.ops.attention.scores import Scores, score_jaxpr, visible_jaxpr
from jax_tilekern.partitioning import params_text

pytestmark = pytest.mark.usefixtures("highest_precision")

B, T, S, N, K, H, D = 2, 7, 9, 4, 2, 8, 6
RNG = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return jnp.asarray(RNG.standard_normal(shape).astype(dtype))


QUERY, KEY, VALUE = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, D)
TABLE, SLOPES, CAP = draw(N, 40), draw(N), jnp.float32(3.0)
DOCUMENTS = jnp.asarray(RNG.integers(0, 3, (B, S)))
LENGTHS = jnp.array([5, 0], jnp.int32)


@pytest.fixture(params=["one block", "many blocks"])
def block_sizes(request, monkeypatch):
    """Blocks of a few queries, or of all."""
    if request.param == "many blocks":
        monkeypatch.setattr(block_loop, "_SCORES", 200)
        monkeypatch.setattr(block_loop, "_SCORES_OF_GPU", 200)
        monkeypatch.setattr(block_loop, "_FEW_QUERIES", 3)
        jax.clear_caches()
        yield
        jax.clear_caches()
    else:
        yield


def dense(query, key, value, score_of=lambda s, *_: s, visible=lambda *_: True, out_scale=None):
    """All scores at once, of functions of arrays that broadcast."""
    scale = 1 / np.sqrt(query.shape[-1]) if out_scale is None else out_scale
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value))
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    indices = [x.astype(np.int32) for x in np.ix_(*map(np.arange, shape))]
    score = score_of(jnp.einsum("btnh,bsnh->bnts", query, key) * scale, *indices)
    sees = jnp.broadcast_to(visible(*indices), shape)
    some = sees.any(-1, keepdims=True)
    score = jnp.where(sees | ~some, score, -jnp.inf)
    p = jnp.where(some, jax.nn.softmax(score, -1), 0)
    return jnp.einsum("bnts,bsnd->btnd", p, value)


# Score functions of a score, the indices and an array, and mask functions.
SCORES = {
    "slopes": (lambda s, b, h, q, k, x: s - x[h] * (q - k), SLOPES),
    "table": (lambda s, b, h, q, k, x: s + x[h, q - k + 15], TABLE),
    "cap": (lambda s, b, h, q, k, x: x * jnp.tanh(s / x), CAP),
    "batch": (lambda s, b, h, q, k, x: jnp.where(x[b, k] > 0, s, s * 2) * x[b, q], draw(B, S)),
    "out of range": (lambda s, b, h, q, k, x: s + x[h, q * 9 + k], TABLE),
}
MASKS = {
    "all": lambda b, h, q, k: True | (q == k),
    "causal": lambda b, h, q, k: k <= q,
    "documents": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q > 0),
    "dilated": lambda b, h, q, k: (q - k) % (h + 1) == 0,
}


def pulled(f, cotangent):
    return lambda *xs: jax.vjp(f, *xs)[1](cotangent)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.one_in(4)
@pytest.mark.usefixtures("block_sizes")
def test_functions_and_their_derivatives(name, mask):
    function, x = SCORES[name]
    visible = MASKS[mask]

    def ours(q, k, v, x):
        score_mod = lambda *scalars: function(*scalars, x)  # noqa: E731
        return jtk.attention(q, k, v, score_mod=score_mod, mask_mod=visible)

    def theirs(q, k, v, x):
        return dense(q, k, v, jnp.vectorize(lambda *scalars: function(*scalars, x)), visible)

    xs, cotangent = (QUERY, KEY, VALUE, x), draw(B, T, N, D)
    dots = tuple(draw(*y.shape) for y in xs)

    def everything(f):
        along = lambda *xs: jax.jvp(f, xs, dots)[1]  # noqa: E731
        back = pulled(f, cotangent)
        return lambda *xs: (
            f(*xs),
            along(*xs),
            back(*xs),
            jax.jvp(back, xs, dots)[1],
            pulled(along, cotangent)(*xs),
        )

    found, expected = (jax.jit(everything(f))(*xs) for f in (ours, theirs))
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-4)


OPTIONS = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "causal window": {"is_causal": True, "local_window_size": (2, 0)},
    "lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS[::-1] + 1},
    "mask": {"mask": jnp.asarray(RNG.random((B, 1, T, S)) < 0.5)},
    "bias": {"bias": draw(1, N, T, S)},
    "bias of keys": {"bias": draw(S)},
    "bias of a batch": {"bias": draw(B, 1, T, 1)},
}


def with_options(m, name):
    """Values and gradients of a call with options, and of calls that are mapped."""
    options = OPTIONS[name]
    bias = options.get("bias")
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    others = {key: x for key, x in options.items() if key != "bias"}

    def f(q, k, v, bias):
        return m.attention(q, k, v, bias, **others)

    # A mapped bias and a mapped query, each alone.
    mapped = [(0, None, None, None)]
    operands = [(jnp.stack([QUERY, -QUERY]), KEY, VALUE, bias)]
    if bias is not None:
        mapped.append((None, None, None, 0))
        operands.append((QUERY, KEY, VALUE, jnp.stack([bias, -bias])))
    argnums = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    gradient = jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), argnums)
    both = lambda *xs: (f(*xs), gradient(*xs))  # noqa: E731
    functions = [both, *(jax.vmap(both, axes) for axes in mapped)]

    @jax.jit
    def everything(*operands):
        return [function(*xs) for function, xs in zip(functions, operands, strict=True)]

    return jax.tree.leaves(everything((QUERY, KEY, VALUE, bias), *operands))


# Blocks of any size have the results of all scores at once.
with_all_scores = functools.cache(functools.partial(with_options, ORACLES))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("block_sizes")
def test_options(name):
    assert_close(with_options(jtk, name), with_all_scores(name), 1e-4)


def test_vmap_twice_of_a_bias():
    """The description of the batch stays exact where mapped axes are merged more than once."""
    bias = draw(3, 2, B, 1, T, 1)

    query = jnp.stack([QUERY, 2 * QUERY, 3 * QUERY])
    keys = jnp.stack([KEY, -KEY])

    def mapped(m, outer, inner):
        twice = jax.vmap(jax.vmap(m.attention, (None, 0, None, inner)), (0, None, None, outer))
        return twice(query, keys, VALUE, x)

    for outer, inner in ((0, 0), (0, None), (None, 0)):
        x = bias if outer == 0 else bias[0]
        x = x if inner == 0 else x[:, 0]
        assert_close(mapped(jtk, outer, inner), mapped(ORACLES, outer, inner), 1e-4)


def test_vmap_of_a_slope():
    slopes = draw(3, N)

    def f(x):
        score_mod = lambda s, b, h, q, k: s - x[h] * (q - k)  # noqa: E731
        return jtk.attention(QUERY, KEY, VALUE, score_mod=score_mod, is_causal=True)

    found = jax.vmap(f)(slopes)
    assert_close(found, jnp.stack([f(x) for x in slopes]), 1e-5)
    gradient = jax.grad(lambda x: f(x).sum())
    assert_close(jax.vmap(gradient)(slopes), jnp.stack([gradient(x) for x in slopes]), 1e-4)


def test_without_a_batch():
    found = jtk.attention(QUERY[0], KEY[0], VALUE[0], return_residual=True)
    expected = jtk.attention(QUERY, KEY, VALUE, return_residual=True)
    assert_close(found, tuple(x[0] for x in expected), 1e-6)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 0, 1)])
@pytest.mark.usefixtures("block_sizes")
def test_keys_of_a_feature_side_by_side(order):
    """A CPU multiplies keys and values as they lie."""
    inverse = np.argsort(order)

    def ours(q, k, v):
        return jtk.attention(q, k.transpose(inverse), v.transpose(inverse))

    for key_heads in (1, K):
        key, value = (x[:, :, :key_heads] for x in (KEY, VALUE))
        stored = [x.transpose(order) for x in (key, value)]
        assert_close(jax.jit(ours)(QUERY, *stored), dense(QUERY, key, value))
    if not on_gpu():
        one = [x[:1] for x in (QUERY, *(x[:, :, :1] for x in (KEY, VALUE)))]
        stored = [x.transpose(order) for x in one[1:]]
        text = jax.jit(ours).lower(one[0], *stored).compile().as_text()
        moved = re.findall(r"f32\[\S* (?:copy|transpose)\(.*", text)
        assert not [line for line in moved if f"1,{S}" in line or f"{S},1" in line], moved


def test_residual():
    (out, lse), pull = jax.vjp(
        lambda q: jtk.attention(q, KEY, VALUE, is_causal=True, return_residual=True), QUERY
    )
    score = jnp.einsum("btnh,bsnh->btns", QUERY, jnp.repeat(KEY, 2, 2)) / np.sqrt(H)
    sees = jnp.arange(S) <= jnp.arange(T)[:, None, None]
    expected = jax.nn.logsumexp(jnp.where(sees, score, -jnp.inf), -1)
    assert lse.dtype == np.float32
    assert_close(lse, expected, 1e-5)
    p = jnp.where(sees, jnp.exp(score - expected[..., None]), 0)
    (found,) = pull((jnp.zeros_like(out), jnp.ones_like(lse)))
    gradient = jnp.einsum("btns,bsnh->btnh", p, jnp.repeat(KEY, 2, 2)) / np.sqrt(H)
    assert_close(found, gradient, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.zeros((1, 1, T, S), bool)},
        {"key_value_seq_lengths": np.zeros(B, np.int32)},
        {"bias": np.full((1, 1, 1, S), -np.inf, np.float32)},
        {"mask_mod": lambda b, h, q, k: q > T},
    ],
)
@pytest.mark.usefixtures("block_sizes")
def test_queries_without_keys_give_zeros(options):
    def f(*xs):
        return jtk.attention(*xs, **options)

    def loss(*xs):
        return jnp.sum(jnp.cos(f(*xs)))

    @jax.jit
    def everything(*xs):
        first = jax.grad(loss, (0, 1, 2))
        return f(*xs), first(*xs), jax.jvp(first, xs, xs)[1]

    for x in jax.tree.leaves(everything(QUERY, KEY, VALUE)):
        np.testing.assert_array_equal(x, 0)


def test_empty_sequences():
    assert jtk.attention(QUERY[:, :0], KEY, VALUE).shape == (B, 0, N, D)
    assert jtk.attention(QUERY[:0], KEY[:0], VALUE[:0], is_causal=True).shape == (0, T, N, D)
    out, lse = jtk.attention(QUERY, KEY[:, :0], VALUE[:, :0], return_residual=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_empty_batches_of_mapped_calls():
    def attend(x, key, value, bias):
        return jtk.attention(x, key, value, bias)

    xs = [jnp.broadcast_to(x[:0], (5, 0, *x.shape[1:])) for x in (QUERY, KEY, VALUE)]
    bias = jnp.zeros((5, 1, N, T, 1))
    assert jax.vmap(attend)(*xs, bias).shape == (5, 0, T, N, D)
    by_bias = jax.grad(lambda bias: jax.vmap(attend)(*xs, bias).sum())(bias)
    np.testing.assert_array_equal(by_bias, np.zeros(bias.shape))


@pytest.mark.parametrize("large", [-1e9, 1e9, -1e30])
def test_rows_of_large_scores(large):
    """Derivatives of rows of equal scores whose logarithm of a sum is the score itself."""
    bias = np.zeros((1, 1, 9, 9), np.float32)
    bias[:, :, :4], bias[:, :, 4:, 7:] = large, -1e9
    q, k, v, d_out = (draw(1, 9, 2, 8) for _ in range(4))

    def derivatives(attention):
        out, pull = jax.vjp(lambda *x: attention(*x, bias), q, k, v)
        return out, pull(d_out), jax.jvp(lambda v: attention(q, k, v, bias), (v,), (d_out,))[1]

    assert_close(derivatives(jtk.attention), derivatives(jax.nn.dot_product_attention), 1e-5)


def test_nan_stays_in_its_row():
    query = QUERY.at[1, 3, 2].set(jnp.nan)
    found = np.array(jtk.attention(query, KEY, VALUE, is_causal=True))
    expected = np.array(jtk.attention(QUERY, KEY, VALUE, is_causal=True))
    assert np.isnan(found[1, 3, 2]).all()
    found[1, 3, 2] = expected[1, 3, 2]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_narrow_types(dtype):
    xs = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
    function, x = SCORES["table"]
    score_mod = lambda *scalars: function(*scalars, x)  # noqa: E731
    found = jtk.attention(*xs, score_mod=score_mod)
    assert found.dtype == dtype
    expected = dense(*(x.astype(np.float32) for x in xs), score_mod)
    assert_close(found.astype(np.float32), expected, 2e-2)


def test_float64():
    with jax.enable_x64(True):
        xs = [jnp.asarray(x, np.float64) for x in (QUERY, KEY, VALUE)]
        found = jtk.attention(*xs, is_causal=True)
        assert found.dtype == np.float64
        assert_close(found, dense(*xs, visible=lambda b, h, q, k: k <= q), 1e-12)


@pytest.mark.skipif(on_gpu(), reason="a GPU's blocks are larger")
@pytest.mark.parametrize("order", [0, 1, 2])
def test_memory_is_linear(order):
    """Twice the lengths take twice the temporaries, and less than all scores."""

    def f(q, k, v):
        cap = lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)  # noqa: E731
        return jtk.attention(q, k, v, is_causal=True, score_mod=cap)

    def loss(*xs):
        return jnp.sum(f(*xs) ** 2)

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 4, 16), np.float32)
        first = jax.grad(loss, (0, 1, 2))
        program = [f, first, lambda *xs: jax.jvp(first, xs, xs)[1]][order]
        analysis = jax.jit(program).lower(x, x, x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    short, long = map(temporaries, (4096, 8192))
    assert long < 2.5 * short
    assert long < 4 * 8192**2 * 4 / 8


def test_checkpoint_policies_know_the_results():
    def loss(q, policy):
        f = jax.checkpoint(lambda q: jtk.attention(q, KEY, VALUE), policy=policy)
        return jnp.sum(jnp.sin(f(q)))

    policies = jax.checkpoint_policies

    def calls(policy):
        return str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(QUERY, policy)).count(
            "tilekern_attention["
        )

    assert calls(None) == 2
    assert calls(policies.save_only_these_names("attention")) == 1
    assert calls(policies.dots_saveable) == 1
    assert calls(policies.dots_with_no_batch_dims_saveable) == 2


# Descriptions as functions of scalars, as kernels read them.

# A score function, its factors, and whether what is left of it is between -1 and 1.
FACTORS = {
    "soft cap": (lambda s, *_: 30 * jnp.tanh(s / 30), 1 / 30, 30, True),
    "chains": (lambda s, *_: jax.lax.logistic(2 * (s * 3)) / 4 * 0.5, 6, 1 / 8, True),
    "read twice": (lambda s, *_: 2 * (jnp.sin(s * 3) + (3 * s) ** 2), 3, 2, False),
    "read by two factors": (lambda s, *_: 2 * jnp.exp(s * 3 + s), 1, 2, False),
    "multiple": (lambda s, *_: s * 2 / 8, 1 / 4, 1, False),
    "negative": (lambda s, *_: -0.5 * (2 * jnp.tanh(s * -3)), -3, 1, False),
    "twice negative": (lambda s, *_: -0.5 * (-2 * jnp.tanh(s)), 1, 1, True),
    "by an index": (lambda s, b, h, *_: jnp.cos(s + h) * 4, 1, 4, True),
    "not of the product": (lambda s, b, h, q, k: 4 * (q - k).astype(s.dtype), 1, 4, False),
    "number": (lambda *_: jnp.float32(4), 1, 1, False),
    "infinite": (lambda s, *_: jnp.tanh(s / 0) * 1e30, 1, 1, False),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_scores(name):
    function, inner, outer, is_up_to_one = FACTORS[name]
    score_mod, _ = traced(function, "score_mod", np.dtype(np.float32))
    score = score_jaxpr(Scores(1.0, score_mod=score_mod), np.dtype(np.float32), [])
    found = factored(score)
    np.testing.assert_allclose([found.inner, found.outer], [inner, outer], 1e-6)
    assert found.is_up_to_one == is_up_to_one
    indices = [np.int32(i) for i in (0, 1, 7, 2)]
    inside = found.with_outer_inside()
    assert inside.outer == 1
    for form in (found, inside):
        of_product = compat.jaxpr_as_fun(form.with_slope())
        for s in (np.float32(-1.5), np.float32(0.75)):
            value, slope = of_product(np.float32(s * form.inner), *indices)
            expected = jax.jvp(lambda s: function(s, *indices), [s], [np.float32(1)])
            assert_close(value * form.outer, expected[0], 1e-6)
            assert_close(slope * form.outer * form.inner, expected[1], 2e-6)


def test_jaxprs_of_scalars():
    function, x = SCORES["table"]
    score_mod, read = traced(lambda *s: function(*s, x), "score_mod", np.dtype(np.float32))
    mask_mod, documents = traced(MASKS["documents"], "mask_mod", None)
    bias, lengths = draw(1, N, T, 1), LENGTHS
    scores = Scores(0.5, (("bias", None), ("key_lengths", None)), score_mod, mask_mod, True, (3, 0))
    arrays = scores.in_order({"bias": bias, "key_lengths": lengths}, read, documents)
    wide = np.dtype(np.float32)
    score = score_jaxpr(scores, wide, arrays)
    slope = FactoredScore(score).with_slope()
    visible = visible_jaxpr(scores, arrays)
    of_score, of_mask = arrays[: scores.score_arrays], arrays[scores.score_arrays :]
    evaluate = compat.jaxpr_as_fun
    for b, h, q, k in [(0, 3, 6, 4), (1, 0, 2, 2), (0, 1, 1, 3)]:
        indices = [np.int32(i) for i in (b, h, q, k)]
        expected = 0.25 + bias[0, h, q, 0] + x[h, q - k + 15]
        assert_close(evaluate(score)(np.float32(0.25), *indices, *of_score)[0], expected, 1e-6)
        both = evaluate(slope)(np.float32(0.25), *indices, *of_score)
        assert_close(both, [expected, 1.0], 1e-6)
        sees = q - 3 <= k <= q and k < lengths[b] and MASKS["documents"](b, h, q, k)
        assert bool(evaluate(visible)(*indices, *of_mask)[0]) == bool(sees)
    # A device whose part begins elsewhere.
    origins = jnp.array([0, 1, 2], np.int32)
    moved = visible_jaxpr(scores, [*arrays, origins])
    indices = [np.int32(i) for i in (0, 1, 2, 4)]
    assert bool(evaluate(moved)(*indices, *of_mask, origins)[0]) == bool(
        MASKS["documents"](0, 2, 4, 4)
    )


def test_descriptions_have_a_text():
    """XLA partitions a call by it, perhaps in another process."""
    function, x = SCORES["table"]
    score_mod, _ = traced(lambda *s: function(*s, x), "score_mod", np.dtype(np.float32))
    mask_mod, _ = traced(MASKS["documents"], "mask_mod", None)
    scores = Scores(0.5, (("bias", None), ("mask", 3)), score_mod, mask_mod, True, (3, 0))
    found = params_text.from_text(params_text.to_text(scores))
    for own, other in zip(vars(scores).values(), vars(found).values(), strict=True):
        assert str(getattr(own, "jaxpr", own)) == str(getattr(other, "jaxpr", other))
    # Equal functions are one, whatever arrays they read.
    other = -x
    same, _ = traced(lambda *s: function(*s, other), "score_mod", np.dtype(np.float32))
    assert same is score_mod
    # Its text would lack a derivative of its own.
    relu, _ = traced(lambda s, b, h, q, k: jax.nn.relu(s), "score_mod", np.dtype(np.float32))
    assert "object" in params_text.to_text(relu)


def test_plain_calls_have_no_functions():
    scores = Scores(1.0)
    assert score_jaxpr(scores, np.dtype(np.float32), []) is None
    assert visible_jaxpr(scores, []) is None


# Several devices.


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("order", [0, 1])
def test_devices_share_batch_and_heads_without_collectives(order):
    mesh = mesh_of((AUTO, AUTO))
    query, key, value = draw(4, 8, 8, 8), draw(4, 8, 4, 8), draw(4, 8, 4, 8)
    lengths = jnp.array([8, 3, 5, 1], np.int32)

    def f(q, k, v):
        return jtk.attention(
            q, k, v, is_causal=True, key_value_seq_lengths=lengths,
            score_mod=lambda s, b, h, q, k: s - (b + 1) * h * (q - k) / 8,
        )  # fmt: skip

    def gradient(*xs):
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))(*xs)

    program = gradient if order else f
    xs = query, key, value
    split = [put(mesh, x, P("d", None, "m")) for x in xs]
    compiled = jax.jit(program).lower(*split).compile()
    assert not collectives(compiled)
    assert_close(jax.tree.leaves(compiled(*split)), jax.tree.leaves(program(*xs)), 1e-5)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_devices_share_queries():
    mesh = mesh_of((AUTO, AUTO))
    xs = draw(2, 8, 2, 8), draw(2, 8, 2, 8), draw(2, 8, 2, 8)

    def f(*xs):
        return jtk.attention(*xs, is_causal=True)

    def both(*xs):
        return f(*xs), jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))(*xs)

    split = [put(mesh, xs[0], P(None, "d")), *(put(mesh, x, P()) for x in xs[1:])]
    found = jax.jit(both)(*split)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(both(*xs)), 1e-5)


# Bad input.

_F = functools.partial(jnp.zeros, dtype=np.float32)
_EMPTY = _F((0, 3))
BAD = {
    "types": (ValueError, "one type", {"key": KEY.astype(jnp.bfloat16)}),
    "nothing": (TypeError, "NoneType'> as query", {"query": None}),
    "no keys": (TypeError, "NoneType'> as key", {"key": None}),
    "a list": (TypeError, "list'> as key_value_seq_lengths", {"key_value_seq_lengths": [1, 2]}),
    "integers": (TypeError, "query must be", {"query": jnp.zeros((B, T, N, H), int)}),
    "heads": (ValueError, "multiple", {"query": _F((B, T, 3, H))}),
    "no heads": (
        ValueError, r"key and value must have a head at least: query float32\[2, 8, 4, 16\]",
        {"query": _F((2, 8, 4, 16)), "key": _F((2, 8, 0, 16)), "value": _F((2, 8, 0, 16))},
    ),
    "features": (ValueError, "features", {"query": _F((B, T, N, H + 1))}),
    "values": (ValueError, "key and value", {"value": VALUE[:, 1:]}),
    "ranks": (ValueError, "dimensions", {"query": QUERY[0]}),
    "bias": (ValueError, "bias must broadcast", {"bias": _F((3, 1, T, S))}),
    "type of bias": (TypeError, "mask", {"bias": jnp.zeros((T, S), bool)}),
    "mask": (ValueError, "booleans", {"mask": _F((T, S))}),
    "lengths": (ValueError, "batch", {"query_seq_lengths": jnp.zeros(3, np.int32)}),
    "type of lengths": (TypeError, "integers", {"query_seq_lengths": _F(B)}),
    "window": (ValueError, "negative", {"local_window_size": (-1, 2)}),
    "windows": (ValueError, "two", {"local_window_size": (1, 2, 3)}),
    "scale": (TypeError, "scale", {"scale": "large"}),
    "function": (TypeError, "function", {"score_mod": 3}),
    "a string": (
        TypeError, "score_mod <lambda> returns 'x'; it must return one scalar",
        {"score_mod": lambda *_: "x"},
    ),
    "an empty table": (
        ValueError, r"score_mod <lambda> reads .* without elements, of shape \(0, 3\); give",
        {"score_mod": lambda s, b, h, q, k: s + _EMPTY[q, k]},
    ),
    "an index": (IndexError, "of range", {"score_mod": lambda s, *_: s + (1, 2)[3]}),
    "arguments": (TypeError, "5 scalars", {"score_mod": lambda s: s}),
    "result": (TypeError, "one scalar", {"score_mod": lambda s, b, h, q, k: SLOPES}),
    "results": (TypeError, "one scalar", {"score_mod": lambda s, b, h, q, k: (s, s)}),
    "type of result": (TypeError, "real", {"score_mod": lambda s, b, h, q, k: q < k}),
    "type of mask": (TypeError, "boolean", {"mask_mod": lambda b, h, q, k: q - k}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    error, text, changed = BAD[name]
    given = {"query": QUERY, "key": KEY, "value": VALUE} | changed
    with pytest.raises(error, match=text):
        jtk.attention(**given)


def test_a_traced_scale_names_score_mod():
    with pytest.raises(TypeError, match="score_mod"):
        jax.jit(lambda x: jtk.attention(QUERY, KEY, VALUE, scale=x))(0.5)


# In place of JAX's own.


of_cpus = pytest.mark.skipif(on_gpu(), reason="GPUs have no kernel of float32")


@of_cpus
@pytest.mark.parametrize("name", OPTIONS)
def test_patch_takes_jaxs_attention(name):
    options = OPTIONS[name]
    options = {
        key: x.reshape((1,) * (4 - x.ndim) + x.shape) if key == "bias" else x
        for key, x in options.items()
    }
    value = KEY[..., ::-1]  # of the size of a key's, as JAX requires

    def f(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, **options)

    def both(*xs):
        return f(*xs), jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))(*xs)

    if name == "lengths":  # JAX's gives the mean of all values to a query that sees no key.
        options["key_value_seq_lengths"] = LENGTHS + 1
    with jtk.patch():
        jaxpr = str(jax.make_jaxpr(f)(QUERY, KEY, value))
        found = jax.jit(both)(QUERY, KEY, value)
    assert "tilekern_attention" in jaxpr
    assert "tilekern_attention" not in str(jax.make_jaxpr(f)(QUERY, KEY, value))
    mask = options.get("mask")
    if mask is None or bool(mask.any(-1).all()):
        assert_close(jax.tree.leaves(found), jax.tree.leaves(both(QUERY, KEY, value)), 1e-4)


def test_patch_leaves_what_it_does_not_take():
    def f(scale):
        return jax.nn.dot_product_attention(QUERY, KEY, KEY, scale=scale)

    with jtk.patch():
        assert "tilekern_attention" not in str(jax.make_jaxpr(f)(0.5))
        assert_close(jax.jit(f)(0.5), f(0.5), 1e-5)
    out, residual = jax.nn.dot_product_attention(QUERY, KEY, KEY, return_residual=True)
    with jtk.patch():
        found = jax.nn.dot_product_attention(QUERY, KEY, KEY, return_residual=True)
    assert_close(found, (out, residual), 1e-4)


@pytest.mark.parametrize(
    ("gpu", "dtype", "options", "is_taken"),
    [
        ("H200", jnp.bfloat16, {"bias": _F((1, N, T, T))}, True),
        ("H200", np.float32, {}, False),
        ("A100", jnp.bfloat16, {}, True),
        ("A100", jnp.bfloat16, {"is_causal": True}, True),
        ("A100", jnp.bfloat16, {"bias": _F((1, N, T, T))}, False),
    ],
)
def test_patch_takes_what_no_gpu_computes_slower(gpu, dtype, options, is_taken):
    x = QUERY.astype(dtype)
    with jtk.patch(), jtk.gpu_target(gpu):
        jaxpr = str(jax.make_jaxpr(lambda x: jax.nn.dot_product_attention(x, x, x, **options))(x))
    assert ("tilekern_attention" in jaxpr) == is_taken


@of_cpus
def test_patch_takes_the_attention_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(
        num_heads=2, in_features=8, qkv_features=8, decode=False, rngs=nnx.Rngs(0)
    )
    x = draw(2, 5, 8)
    with jtk.patch():
        assert "tilekern_attention" in str(jax.make_jaxpr(layer)(x))
        found = layer(x)
    assert_close(found, layer(x), 1e-5)


def test_explain_shows_what_a_call_runs():
    def loss(q):
        return jtk.attention(q, KEY, VALUE, is_causal=True, mask_mod=MASKS["dilated"]).sum()

    found = jtk.explain(jax.grad(loss), QUERY, platform="cpu")
    calls = [choice.call for choice in found]
    assert calls == ["attention (causal, <lambda>)", "attention_backward (causal, <lambda>)"]
    assert "blocks" in found[0].reason


def test_devices_add_their_first_index_where_the_call_reads_it():
    def scores(function=None, **fields):
        mod = traced(function, "score_mod", np.dtype(np.float32))[0] if function else None
        return Scores(1.0, score_mod=mod, **fields)

    split = dict.fromkeys(("batch", "queries", "heads"), False)
    for own, read in (
        (scores(), set()),
        (scores(lambda s, b, h, q, k: jnp.tanh(s)), set()),
        (scores(lambda s, b, h, q, k: s * h), {"heads"}),
        (scores(is_causal=True), {"queries"}),
        (scores(named=(("bias", 2),)), {"batch"}),
        (scores(lambda s, b, h, q, k: s + b * (q - k)), {"batch", "queries"}),
    ):
        assert {x for x in split if own.reads_origins(**{**split, x: True})} == read


@pytest.mark.parametrize("shape", ["batch, 7, 4, 8", "batch, length, 4, 8", "2, 7, 4, features"])
def test_symbolic_sizes(shape):
    def attention(x, scale=0.5):
        return jtk.attention(x, x, x, is_causal=True, scale=scale)

    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), np.float32)
    if "features" in shape:
        without_scale = jax.jit(lambda x: attention(x, None))
        with pytest.raises(TypeError, match="number of features, features, is symbolic"):
            jax.export.export(without_scale)(symbolic)
    exported = jax.export.export(jax.jit(attention))(symbolic)
    assert_close(exported.call(QUERY), attention(QUERY))
