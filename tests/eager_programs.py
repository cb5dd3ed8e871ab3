"""One call of each public function that computes something, and operands for it.

What a call passes that is no array, such as an activation, is the same object in each call.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from operations import OPERATIONS, ROWS, SHAPES, message

import jax_tilekern as jtk

KEPT_PLAN = jtk.segment_plan(np.arange(ROWS) % 4, 4)


def _scaling():
    return jtk.cuda_kernel(
        "__global__ void scale(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }",
        out=lambda x: x,
        grid=1,
        block=4 * ROWS,
        reference=lambda x: 2 * x,
    )


SCALE, SCALE_WITH_RULE = _scaling(), _scaling()
SCALE_WITH_RULE.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))


@functools.cache
def _optimizer():
    return jtk.muon(lambda step: 0.1 / (1 + step), ns_coeffs=(3.0, -4.0, 2.0))


def _updated(x, w):
    params = {"w": w, "b": w[0]}
    return _optimizer().update({"w": w, "b": x[0]}, _optimizer().init(params), params)[0]


def _narrow(*arrays):
    return [x.astype(jnp.float8_e4m3fn) for x in arrays]


def _scaled_matmul(x, w, **epilogue):
    one = jnp.ones((1, 1), jnp.float32)
    return jtk.scaled_matmul(*_narrow(x, w), one, one, **epilogue)


def _scaled_ragged_dot(x, w, sizes):
    scales = jnp.ones((ROWS, 1), jnp.float32), jnp.ones((2, 1, 1), jnp.float32)
    return jtk.scaled_ragged_dot(*_narrow(x, w), sizes, *scales)


def _along_axis(function, x, w):
    return jax.vmap(lambda x: function(x, w, "i"), axis_name="i")(x)


def _moe(x, w, weights, chosen, **options):
    return jtk.moe(x, w, w, weights, chosen, w_gate=w, b_up=w[:, 0], **options)


def _of_edges(x, w, ids, plan=None):
    return jtk.segment_reduce(
        message, w, x, segment_ids=plan or ids, num_segments=4, gather=(ids, None)
    )


_ROWS_OF_GROUPS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_LINE = jtk.kernel(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) * x, x))

_SHAPES = {**SHAPES, "s": (ROWS, 2)}
# By name, or by name and variant: a function, and letters for its operands. Those of operations.py
# are floats, `s` the weights of two experts, the others integers.
PROGRAMS = {
    **{name: (ours, letters) for name, (ours, _, letters) in OPERATIONS.items()},
    "all_gather_matmul": (functools.partial(_along_axis, jtk.all_gather_matmul), "aw"),
    "bincount": (lambda ids: jtk.bincount(ids, length=4), "i"),
    "cuda_kernel": (SCALE, "x"),
    "cuda_kernel, defjvp": (SCALE_WITH_RULE, "x"),
    "dot_general": (lambda x, w: jtk.dot_general(x, w, (((1,), (0,)), ((), ()))), "xw"),
    "dot_general, epilogue": (
        lambda x, w: jtk.dot_general(x, w, (((1,), (0,)), ((), ())), epilogue=jnp.tanh),
        "xw",
    ),
    "fp8_dot_general": (lambda x, w: jtk.fp8_dot_general(x, w, (((1,), (0,)), ((), ()))), "xw"),
    "kernel": (_LINE, "x"),
    "matmul_reduce_scatter": (
        lambda p, w: _along_axis(jtk.matmul_reduce_scatter, jnp.concatenate([p, p], 1), w),
        "pw",
    ),
    "moe": (_moe, "xgse"),
    "moe, activation": (functools.partial(_moe, activation=jnp.tanh, save="inputs"), "xgse"),
    "muon": (_updated, "xw"),
    "quantize": (jtk.quantize, "x"),
    "ragged_dot_general": (
        lambda x, g, sizes: jtk.ragged_dot_general(x, g, sizes, _ROWS_OF_GROUPS),
        "xgn",
    ),
    "ragged_dot, sizes": (
        lambda x, g, sizes: jtk.ragged_dot(x, g, sizes, epilogue=jnp.tanh, group_offset=1),
        "xgn",
    ),
    "route": (lambda x: jtk.route(x, 2), "x"),
    "route, groups": (
        lambda x, b: jtk.route(
            x, 2, score_function="sigmoid", bias=b, num_groups=2, chosen_groups=1
        ),
        "xb",
    ),
    "row_quantize": (lambda x, w: jtk.matmul(x, w, epilogue=jtk.row_quantize), "xw"),
    "scaled_matmul": (_scaled_matmul, "xw"),
    "scaled_matmul, epilogue": (functools.partial(_scaled_matmul, epilogue=jnp.tanh), "xw"),
    "scaled_ragged_dot": (_scaled_ragged_dot, "xgn"),
    "scatter_add": (lambda w, ids, x: jtk.scatter_add(w, ids, x), "wix"),
    "segment_mean": (lambda x, ids: jtk.segment_mean(x, ids, 4), "xi"),
    "segment_min": (lambda x, ids: jtk.segment_min(x, ids, 4), "xi"),
    "segment_prod": (lambda x, ids: jtk.segment_prod(x, ids, 4), "xi"),
    "segment_plan": (lambda ids: jtk.segment_plan(ids, 4), "i"),
    "segment_reduce, ids": (_of_edges, "xwi"),
    "segment_reduce, plan": (functools.partial(_of_edges, plan=KEPT_PLAN), "xwi"),
    "segment_sum, plan": (lambda x: jtk.segment_sum(x, KEPT_PLAN), "x"),
    "sort_by_key": (lambda ids, x: jtk.sort_by_key(ids, x[:, 0], num_keys=4), "ix"),
    "linalg.eigh": (jtk.linalg.eigh, "p"),
    "linalg.expm": (jtk.linalg.expm, "a"),
    "linalg.newton_schulz": (jtk.linalg.newton_schulz, "a"),
    "linalg.pinv": (jtk.linalg.pinv, "a"),
    "linalg.svd": (jtk.linalg.svd, "a"),
    "linalg.triangular_solve": (lambda a, c: jtk.linalg.triangular_solve(a, c, lower=True), "ac"),
    "out_of_core.matmul": (lambda x, w: jtk.out_of_core.matmul(np.asarray(x), np.asarray(w)), "xw"),
}
WITHOUT_GRADIENT = {
    "bincount", "out_of_core.matmul", "quantize", "row_quantize", "scaled_matmul",
    "scaled_matmul, epilogue", "scaled_ragged_dot", "segment_plan", "segment_prod",
}  # fmt: skip
_INTEGERS = {"i": ((ROWS,), 4), "e": ((ROWS, 2), 2), "n": ((2,), 4)}


def operands_of(rng, name):
    """Draw operands of a program."""

    def drawn(letter):
        if letter in _INTEGERS:
            shape, end = _INTEGERS[letter]
            return jnp.asarray(rng.integers(end, size=shape), jnp.int32)
        x = rng.standard_normal(_SHAPES[letter]) / 2
        x = x @ x.mT + np.eye(4) if letter == "p" else x
        return jnp.asarray(x, jnp.float32)

    return [drawn(letter) for letter in PROGRAMS[name][1]]
