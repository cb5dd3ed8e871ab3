"""An error names the function that was called, the argument, and what it may be."""

import jax
import jax.numpy as jnp
import pytest

import jax_tilekern as jtk

X, W, F = jnp.ones((4, 6)), jnp.ones((6, 8)), jnp.ones((4, 4))
G, DOWN, SIZES = jnp.ones((2, 6, 8)), jnp.ones((2, 8, 6)), jnp.array([2, 2])
IDS = jnp.array([0, 1, 1, 0])
SHARES, CHOSEN = jnp.ones((4, 1)), jnp.ones((4, 1), int)
PLAN, CLIPPED = jtk.segment_plan(IDS, 2), jtk.segment_plan(IDS, 2, mode="clip")
EDGES = {"segment_ids": IDS, "num_segments": 2}
DIMENSIONS = (((1,), (0,)), ((), ()))


def mapped_plans():
    return jax.vmap(lambda ids: jtk.segment_plan(ids, 2))(jnp.stack([IDS, IDS, IDS]))


# By the function, pairs of a call and a part of its message.
PLAIN = "it must be a function of scalars"
CLOSES_OVER = r"closes over an array of shape \(4, 6\)"
NOT_ELEMENTWISE = "is not elementwise: reduce_sum"
FUNCTIONS = (
    (3, f"is 3; {PLAIN}"),
    (lambda y: X, f"<lambda> {CLOSES_OVER}"),
    (lambda y: jnp.sum(y), f"<lambda> {NOT_ELEMENTWISE}"),
    (lambda y: y[0], "<lambda> does not take scalars"),
    (lambda y, z: y, "does not take 1 argument"),
)


def refused_functions(argument, call):
    """Calls with each function that is no function of one scalar."""
    return [
        (lambda jtk_function, f=f: call(jtk_function, f), f"the {argument} .*{message}")
        for f, message in FUNCTIONS
    ]


def epilogues(*operands):
    return [
        *refused_functions("epilogue", lambda f, epilogue: f(*operands, epilogue=epilogue)),
        (lambda f: f(*operands, operands=(X,)), "1 operands of an epilogue, but no epilogue="),
        (
            lambda f: f(*operands, epilogue=jnp.add, operands=(jnp.ones(5),)),
            r"operand 0 of the epilogue has shape \(5,\)",
        ),
        (lambda f: f(*operands, epilogue=jnp.add, operands=X), r"operands=\(x,\)"),
    ]


SEGMENTS = [
    (lambda f: f(X, jnp.ones(4)), "segment_ids are integers, not float32"),
    (lambda f: f(X, IDS[:2]), r"data of shape \(4, 6\) for segment ids of shape \(2,\)"),
    (lambda f: f("text", IDS), "requires ndarray or scalar arguments"),
    (lambda f: f(X, "text"), "segment_ids are an array of integers, not a str"),
    (lambda f: f(X, [0, 1, 1, 0], 2), "segment_ids are an array of integers, not a list"),
    (lambda f: f(X, IDS, -1), "num_segments must be non-negative, not -1"),
    (lambda f: f(X, IDS, 1.5), r"num_segments is 1\.5; it is an integer"),
    (lambda f: f(X, IDS, 2, mode="foo"), "mode is 'foo'; it is 'drop', 'clip'"),
    (lambda f: jax.jit(lambda ids: f(X, ids))(IDS), "without num_segments it is one more"),
    (lambda f: f(X, PLAN, 3), "num_segments is 3, and the plan has 2"),
    (lambda f: f(X, PLAN, mode="clip"), "mode is 'clip', and the plan has the mode 'drop'"),
    (lambda f: f(X, CLIPPED, mode="drop"), "mode is 'drop', and the plan has the mode 'clip'"),
    (lambda f: f(X, mapped_plans()), "is a batch of plans"),
]
CALLS = {
    "matmul": epilogues(X, W),
    "dot_general": epilogues(X, W, DIMENSIONS),
    "ragged_dot": epilogues(X, G, SIZES),
    "symmetric_matmul": [
        *epilogues(F, F)[:-2],
        (lambda f: f(X, W), r"matrices \(..., m, k\) and \(..., k, m\)"),
    ],
    "linear": [
        *refused_functions("activation", lambda f, activation: f(X, W, None, activation)),
        *refused_functions("activation", lambda f, activation: f(X, W, W[0], activation)),
        (lambda f: f(X, W, jnp.ones(5)), r"bias has shape \(5,\)"),
    ],
    "gated_linear": [
        *refused_functions("activation", lambda f, activation: f(X, W, W, activation)),
        *refused_functions("activation", lambda f, activation: f(X, W, W.astype(int), activation)),
        (lambda f: f(X, W, W, lambda y: (y, y)), "the activation returns .* one scalar"),
        (lambda f: f(X, W, W[:, :3]), r"w_gate has shape .*, w_up \(6, 3\)"),
        (lambda f: f(X, W, W, epilogue=3), f"the epilogue is 3; {PLAIN}"),
        (lambda f: f(X, W, W, epilogue=lambda y: X), f"with the epilogue <lambda> {CLOSES_OVER}"),
    ],
    "strassen_matmul": [
        (lambda f: f(X, W, levels=-1), "levels=-1"),
        (lambda f: f(X, W[:, 0]), r"not shapes \("),
        (lambda f: f(X, W, levels="a"), "levels is 'a'; it is an integer"),
    ],
    "scaled_matmul": [
        (lambda f: f(X, X, X, X), "float8_e4m3fn and float8_e5m2, and lhs is"),
        (lambda f: f(X, X, None, X), "rhs of int4, int8, .*not float32; jax_tilekern.quantize"),
        (lambda f: f(X, X, None, None), "NoneType'> as rhs_scales"),
        (lambda f: f(X, X, [[1.0]], X), "list'> as lhs_scales"),
    ],
    "scaled_ragged_dot": [
        (lambda f: f(X, G, X, G, SIZES), r"rhs \(groups, N, K\)"),
        (lambda f: f(X, G.mT, SIZES, None, G), "rhs of int4, int8, .*not float32; jax_tilekern"),
        (lambda f: f(X, G.mT, SIZES, None, None), "NoneType'> as rhs_scales"),
    ],
    "fp8_dot_general": [
        (lambda f: f(X.astype(int), W, DIMENSIONS), "bfloat16, float16 or float32, and lhs is"),
    ],
    "quantize": [
        (lambda f: f(X, "text"), "not text"),
        (lambda f: f(IDS), "bfloat16, float16 or float32, not int32"),
    ],
    "quantize_weights": [
        (lambda f: f({"kernel": W}, dtype=jnp.int16), "rounds to .*int4 or int8, not int16"),
        (lambda f: f([IDS[None]], lambda *_: True), r"\[0\] is an array of floats .*not int32"),
        (lambda f: f({"a": F[0]}, lambda *_: True), r"\['a'\] has shape \(4,\); where= takes"),
    ],
    "moe": [
        *refused_functions(
            "activation", lambda f, activation: f(X, G, DOWN, SHARES, CHOSEN, activation=activation)
        ),
        (lambda f: f(X, G, G, SHARES, CHOSEN), "w_down does not fit"),
        (lambda f: f(X, G, DOWN, SHARES, SHARES), "indices are integers, not float32"),
        (lambda f: f(X, G, DOWN, SHARES, CHOSEN, save="a"), "save is 'a'; it is 'hidden' or"),
        (lambda f: f("text", G, DOWN, SHARES, CHOSEN), "requires ndarray or .*str'> as x"),
        (lambda f: f(X, G, DOWN, SHARES, CHOSEN, b_up=[1.0]), "list'> as b_up"),
        (lambda f: f(X, G, DOWN, SHARES), "indices is None"),
        (lambda f: f(X, G, DOWN, (SHARES, CHOSEN)), "weights is a pair of arrays"),
    ],
    "route": [
        (lambda f: f(X[0], 1), r"logits of shape \(6,\)"),
        (lambda f: f(X, 9), "k is 9"),
        (lambda f: f(X, 1.5), r"k is 1\.5; it is an integer"),
        (lambda f: f(X, 1, score_function="relu"), "score_function is 'relu'; it is 'softmax' or"),
        (lambda f: f("text", 1), "requires ndarray or scalar arguments"),
        (lambda f: f(X, 1, bias=[1.0]), "list'> as bias"),
        (lambda f: f(X, 1, bias=X), "a bias of shape"),
    ],
    **dict.fromkeys((f"segment_{kind}" for kind in ("max", "min", "mean")), SEGMENTS),
    **{
        f"segment_{kind}": [
            *SEGMENTS,
            (lambda f: f(X > 0, IDS, 2), f"a {kind} does not take bool"),
        ]
        for kind in ("sum", "prod")
    },
    "segment_plan": [
        (lambda f: f(X[0]), "segment_ids are integers, not float32"),
        (lambda f: f([0, 1], 2), "segment_ids are an array of integers, not a list"),
        (lambda f: f(IDS, 2**40), "4 segment_ids and num_segments=1099511627776 are at most"),
        (lambda f: f(X.astype(int)), r"segment_ids are a vector, not of shape \(4, 6\)"),
        (lambda f: f(IDS, 1.5), r"num_segments is 1\.5; it is an integer"),
        (lambda f: f(IDS, 2, mode="foo"), "mode is 'foo'; it is 'drop', 'clip'"),
    ],
    "segment_reduce": [
        *refused_functions("function", lambda f, function: f(function, X, **EDGES)),
        (lambda f: f(lambda y: (y, y), X, **EDGES), "the function <lambda> returns 2 values"),
        (lambda f: f(jtk.row_sum, X, **EDGES), "the function row_sum returns 1 values"),
        (lambda f: f(jnp.sin, **EDGES), "takes at least one array"),
        (lambda f: f(jnp.sin, X, **EDGES, reduction="mean"), "reduction is 'mean'; it is 'sum', "),
        (lambda f: f(jnp.sin, X, **EDGES, gather=(X[:, 0],)), "entries of gather are integers"),
        (lambda f: f(jnp.sin, X, **EDGES, gather=()), "0 entries of gather for 1 arrays"),
        (lambda f: f(jnp.sin, X, **EDGES, gather=(IDS[:1],)), "an entry of gather has shape"),
        (lambda f: f(jnp.add, X, X[:, :5], **EDGES), "dimensions after the first"),
        (lambda f: f(jnp.sin, X, segment_ids=IDS, mode="foo"), "mode is 'foo'; it is 'drop'"),
        (lambda f: f(jnp.sin, X, segment_ids=PLAN, mode="clip"), "mode is 'clip', and the plan"),
        (lambda f: f(jnp.sin, X, segment_ids=[0, 1]), "segment_ids are an array of integers"),
        (lambda f: f(jnp.sin, X, **EDGES, gather=([0, 1],)), "entries of gather are an array of"),
        (lambda f: f(jnp.isnan, X, **EDGES), "a sum does not take bool"),
    ],
    "sort_by_key": [
        (lambda f: f(X[0], num_keys=3), "keys are integers, not float32"),
        (lambda f: f(X.astype(int), num_keys=3), "keys are a vector"),
        (lambda f: f(IDS, X[:2], num_keys=3), r"an array of shape \(2, 6\) for 4 keys"),
        (lambda f: f(IDS, num_keys=2**40), "4 keys and num_keys=1099511627776 are at most"),
        (lambda f: f(IDS, num_keys=-1), "num_keys must be non-negative, not -1"),
        (lambda f: f(IDS, num_keys=1.5), r"num_keys is 1\.5; it is an integer"),
    ],
    "sort_operands": [
        (lambda f: f((X, IDS)), r"must have one shape, and have \[\(4, 6\), \(4,\)\]"),
        (lambda f: f(()), r"must have one shape, and have \[\]"),
        (lambda f: f((X, X), num_keys=3), "num_keys is 3; there are 2 operands"),
        (lambda f: f((X, X), num_keys=1.5), r"num_keys is 1\.5; it is an integer"),
        (lambda f: f(X, 2), r"dimension 2 is out of range for \(4, 6\)"),
        (lambda f: f((X, "text")), r"type <class 'str'> .* at path operand\[1\]"),
    ],
    "bincount": [
        (lambda f: f(X[0]), "elements of x are integers, not float32"),
        (lambda f: f(X.astype(int)), "elements of x are a vector"),
        (lambda f: f(IDS, X[0]), r"weights of shape \(6,\) for x of shape \(4,\)"),
        (lambda f: f(IDS, length=2**40), "4 elements of x and length=1099511627776 are at most"),
        (lambda f: f(IDS, length=-1), "length must be non-negative, not -1"),
        (lambda f: f(IDS, minlength="a"), "minlength is 'a'; it is an integer"),
        (lambda f: jax.jit(f)(IDS), "without length it is one more than the largest integer"),
    ],
    "take": [
        (lambda f: f(X, PLAN, 0), "a plan of 2 rows"),
        (lambda f: f(F[:2], PLAN, mode="clip"), "mode is 'clip', and the plan"),
        (lambda f: f(X, X, 0), "indices are integers, not float32"),
        (lambda f: f(X, IDS, 0, X), "out is not supported"),
    ],
    "scatter_add": [
        (lambda f: f(X, X[:, 0], X), "indices are integers, not float32"),
        (lambda f: f(X, IDS, X[:3, :3]), r"updates of shape \(3, 3\) do not broadcast to \(4, 6\)"),
        (lambda f: f(X, IDS, X, mode="foo"), "mode is 'foo'; it is 'drop', 'clip'"),
        (lambda f: f(X, PLAN, X), "a plan of 2 rows for a table of 4"),
        (lambda f: f(F[:2], PLAN, X, mode="clip"), "mode is 'clip', and the plan"),
        (lambda f: f(X, [0], X), "indices are an array of integers, not a list"),
        (lambda f: f(X > 0, IDS, X > 0), "a sum does not take bool"),
    ],
    "linear_cross_entropy": [
        (lambda f: f(X, X, IDS), r"the shapes of h and w must be .*w float32\[4, 6\]"),
        (lambda f: f(X, W, SHARES), r"labels must be integers.*labels float32\[4, 1\]"),
        (lambda f: f(X, W, IDS[:2]), r"labels must have the shape of h .*labels int32\[2\]"),
        (lambda f: f(X, W, IDS, bias=X), r"the shape of bias must be \(8,\)"),
        (
            lambda f: f(X, W, IDS, bias=1j * W[0]),
            r"bias must have a floating.* bias complex64\[8\]",
        ),
        (lambda f: f(X, W[:, :0], IDS), "at least one column"),
        (lambda f: f(X, W, IDS, softcap=0), r"softcap is 0\.0"),
        (lambda f: f(X, W, IDS, reduction="foo"), "reduction is 'foo'; it is 'mean', 'sum' or"),
        (lambda f: f(X, W, IDS, label_smoothing=2), r"label_smoothing is 2\.0"),
        (lambda f: f(X, W, IDS, label_smoothing="a"), "label_smoothing is 'a'; it is a number"),
        (lambda f: jax.jit(lambda z: f(X, W, IDS, z_loss=z))(1.0), "z_loss is traced; .* static"),
        (lambda f: f("text", W, IDS), "requires ndarray or scalar arguments"),
    ],
    "linear_recurrence": [
        (lambda f: f(IDS, IDS, axis=0), "of type int32; they must be floats"),
        (lambda f: f(X, X, axis=2), r"axis 2 is out of range for the shape \(4, 6\)"),
        (lambda f: f(X, X, axis=None), "axis is None; it is an integer"),
        (lambda f: f(X, W, axis=0), r"shapes \(4, 6\) and \(6, 8\) do not broadcast"),
        (lambda f: f(X, X, axis=0, initial=X), r"initial has the shape \(4, 6\)"),
    ],
    "causal_conv1d": [
        (lambda f: f(X[0], X), r"\(\.\.\., length, channels\).* shapes \(6,\) and \(4, 6\)"),
        (lambda f: f(X, W[:, :5]), r"\(4, 6\) and \(6, 5\)"),
        (lambda f: f(X, X[:0]), r"\(4, 6\) and \(0, 6\)"),
        (lambda f: f(X, X, X[0, :5]), r"bias has shape \(5,\).* it is \(6,\)"),
        (lambda f: f(X, X, state=X[:2]), r"state has shape \(2, 6\).* it is \(3, 6\)"),
        (lambda f: f(X, X, activation="gelu"), "activation is 'gelu'; it is None or 'silu'"),
        (lambda f: f(X.astype(int), X.astype(int)), "floats or complex numbers, not int32"),
        (lambda f: f(X, None), "requires ndarray or scalar .*NoneType'> at position 1"),
        (lambda f: f(X, X, state=[X]), "list'> as state"),
    ],
    "ring_attention": [
        (lambda f: f(X, None, X, "i"), "NoneType'> as key"),
        (lambda f: f(X, X, X, "i", bias=X), "unexpected keyword argument 'bias'"),
    ],
    "kernel": [(lambda f: f(3), "a function, not 3")],
    "fuse": [(lambda f: f(3), "a function, got int")],
    "explain": [
        (lambda f: f(3), r"explain\(matmul, a, b\), and got int"),
        (lambda f: f(jnp.sin, X, platform="foo"), "'foo' is none of cpu"),
    ],
    "cost_analysis": [(lambda f: f(3), r"cost_analysis\(matmul, a, b\), and got int")],
    "policy": [(lambda f: f("foo").__enter__(), "one of auto, .*, not 'foo'")],
    **{
        f"row_{name}": [(lambda f: f(X), r"takes a scalar .* array of shape \(4, 6\)")]
        for name in ("sum", "max", "logsumexp", "quantize")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_names_the_function_and_the_argument(name):
    for call, message in CALLS[name]:
        with pytest.raises(
            (TypeError, ValueError, NotImplementedError), match=f"(?s)^.*{name}.*{message}"
        ):
            call(getattr(jtk, name))
