"""Signatures and names of JAX's functions, and the outcomes of calls at their edges."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from guides import DOCS
from jax import lax
from jax.sharding import PartitionSpec as P
from namesakes import NAMESAKES as REPLACED
from namesakes import swapped
from numerics import assert_close

import jax_tilekern as jtk

OURS = {
    **dict.fromkeys(jtk.__all__, (jtk, (jnp, jnp.linalg, lax, jax.nn, jax.ops))),
    # jnp.top_k and lax.scatter_add are other functions.
    "top_k": (jtk, (lax,)),
    "scatter_add": (jtk, ()),
    **dict.fromkeys(jtk.linalg.__all__, (jtk.linalg, (jnp.linalg, jax.scipy.linalg, lax.linalg))),
}
NAMESAKES = {
    name: (getattr(module, name), theirs)
    for name, (module, searched) in OURS.items()
    for theirs in [next((getattr(m, name) for m in searched if hasattr(m, name)), None)]
    if callable(theirs)
}


def documented_differences():
    """Return the parameters that only one of the two has, by function, as the page lists them."""
    page = (DOCS / "reference/index.md").read_text()
    page = page.partition("\n## Signatures")[2].partition("\n## ")[0]
    differences = {}
    for row in re.findall(r"^\| `.*\|$", page, re.MULTILINE):
        functions, ours, theirs = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:4])
        differences |= dict.fromkeys(functions, (ours, theirs))
    return differences


DIFFERENCES = documented_differences()


def parameters(function):
    return {
        name: (parameter.kind, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
    }


@pytest.mark.parametrize("module", [jtk, jtk.out_of_core, jtk.tuning])
def test_modules_list_their_public_names(module):
    assert set(dir(module)) - {"__version__"} == set(module.__all__)


@pytest.mark.parametrize("name", NAMESAKES)
def test_parameters_are_those_of_jax(name):
    ours, theirs = map(parameters, NAMESAKES[name])
    only_here, only_there = DIFFERENCES.get(name, ((), ()))
    # Older versions of JAX lack some.
    added = [ours.pop(parameter) for parameter in only_here if parameter not in theirs]
    removed = [theirs.pop(parameter) for parameter in only_there if parameter in theirs]
    # The order of keywords does not matter.
    assert ours == theirs
    positional = [[key for key, (kind, _) in p.items() if kind < 2] for p in (ours, theirs)]
    assert positional[0] == positional[1]
    if (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.empty) not in removed:
        assert all(kind == inspect.Parameter.KEYWORD_ONLY for kind, _ in added)


# Calls of the functions of a namespace, JAX's or the library's.

JAX = SimpleNamespace(**{name: theirs for name, (_, theirs) in NAMESAKES.items()})
X = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
Y = jnp.arange(20, dtype=jnp.float32).reshape(4, 5)
LIST = [[1.0, 2.0, 3.0, 4.0]] * 3
WIDE = np.arange(12.0).reshape(3, 4)
INT4 = jnp.arange(4, dtype=jnp.int4)
BATCH = jnp.ones((2, 3, 4))
MATRICES, SIZES = jnp.ones((2, 4, 5)), jnp.array([1, 2])
DIMS = (((1,), (0,)), ((), ()))
ALGORITHM = lax.DotAlgorithm(np.float32, np.float32, np.float32, 1, 1, 1, False)
UNEQUAL = lax.DotAlgorithm(np.float32, jnp.bfloat16, np.float32, 1, 2, 1, False)
DELETED = jnp.ones((4, 5))
DELETED.delete()


def leaked():
    kept = []
    jax.jit(lambda y: kept.append(y) or y)(Y)
    return kept[0]


def lower_on_cpu(function):
    return jax.jit(function).trace().lower(lowering_platforms=("cpu",))


# Exceptions of the same type.
REFUSED = {
    "list": lambda m: m.matmul(LIST, Y),
    "list of vdot": lambda m: m.vdot(LIST, X),
    "list of vdot, second": lambda m: m.vdot(X, LIST),
    "list of einsum": lambda m: m.einsum("ij,jk->ik", LIST, Y),
    "tuple of einsum": lambda m: m.einsum("ij,jk", X, tuple(LIST)),
    "set of einsum": lambda m: m.einsum("ij,jk->ik", {1, 2}, Y),
    "list of dot_general": lambda m: m.dot_general(LIST, X.T, DIMS),
    "list of ragged_dot": lambda m: m.ragged_dot(X, MATRICES, [1, 2]),
    "list of transpose": lambda m: m.transpose([[1, 2]]),
    "None": lambda m: m.dot(None, Y),
    "None of vdot": lambda m: m.vdot(None, Y),
    "None of einsum": lambda m: m.einsum("ij,jk->ik", None, Y),
    "None of sum": lambda m: m.sum(None),
    "text": lambda m: m.inner("ab", X),
    "dates": lambda m: m.add(np.array(["2020-01-01"], "datetime64[D]"), X),
    "ShapeDtypeStruct": lambda m: m.matmul(jax.ShapeDtypeStruct((3, 4), jnp.float32), Y),
    "keys": lambda m: m.dot(jax.random.split(jax.random.key(0), 4), Y),
    "deleted": lambda m: m.matmul(X, DELETED),
    "deleted of einsum": lambda m: m.einsum("ij,jk->ki", X, DELETED),
    "leaked": lambda m: m.matmul(X, leaked()),
    "leaked of tensordot": lambda m: m.tensordot(X, leaked(), 1),
    "too many": lambda m: m.matmul(X, Y, None),
    "unknown keyword": lambda m: m.vdot(X, X, axis=0),
    "positional-only": lambda m: m.matvec(x1=X, x2=X[0]),
    "positional-only of add": lambda m: m.add(x=X, y=X),
    "scalar of matmul": lambda m: m.matmul(2.0, Y),
    "contracted sizes": lambda m: m.matmul(X, X),
    "batch sizes": lambda m: m.matmul(BATCH, jnp.ones((3, 4, 5))),
    "sizes of vdot": lambda m: m.vdot(X, Y),
    "rank of matvec": lambda m: m.matvec(X[0], X[0]),
    "sizes of vecmat": lambda m: m.vecmat(X, X),
    "sizes of vecdot": lambda m: m.vecdot(X, Y),
    "axis of vecdot": lambda m: m.vecdot(X, X, axis=2),
    "shapes of add": lambda m: m.add(X, Y),
    "precision name": lambda m: m.matmul(X, Y, precision="nonsense"),
    "precision number": lambda m: m.dot(X, Y, precision=3),
    "precision triple": lambda m: m.einsum("ij,jk->ik", X, Y, precision=("high",) * 3),
    "algorithm": lambda m: lower_on_cpu(lambda: m.matmul(X, Y, precision=ALGORITHM)),
    "algorithm of einsum": lambda m: lower_on_cpu(
        lambda: m.einsum("ij,jk->ki", X, Y, precision=UNEQUAL)
    ),
    "element type": lambda m: m.matmul(X, Y, preferred_element_type="nonsense"),
    "element type of integers": lambda m: m.matmul(X, Y, preferred_element_type=object),
    "out_sharding": lambda m: m.matmul(X, Y, out_sharding="d"),
    "out_sharding without a mesh": lambda m: m.dot(X, Y, out_sharding=P("d", None)),
    "no permutation": lambda m: m.transpose(X, (0, 0)),
    "short permutation": lambda m: m.transpose(X, (0,)),
    "permutation out of range": lambda m: m.transpose(X, (2, 0)),
    "floats of a permutation": lambda m: (m.transpose(X, (1, 0)), m.transpose(X, (1.0, 0.0))),
    "floats of axes": lambda m: (m.sum(X, (1, 0)), m.sum(X, np.array([1.0, 0.0]))),
    "floats of dimensions": lambda m: m.dot_general(X, Y, (((1.0,), (0,)), ((), ()))),
    "axis out of range": lambda m: m.sum(X, 2),
    "axis twice": lambda m: m.sum(X, (0, -2)),
    "axes of text": lambda m: m.sum(X, "ab"),
    "out": lambda m: m.sum(X, out=X),
    "out of NumPy": lambda m: m.sum(X, out=np.zeros(1)),
    "out of einsum": lambda m: m.einsum("ij,jk->ik", X, Y, out=X),
    "initial array": lambda m: m.sum(X, initial=jnp.ones(4)),
    "where of floats": lambda m: m.sum(X, where=X),
    "where that does not broadcast": lambda m: m.sum(X, where=X[:2] > 3),
    "axes of tensordot": lambda m: m.tensordot(X, Y, 3),
    "unequal axes of tensordot": lambda m: m.tensordot(X, Y, ((1,), (0, 1))),
    "axes of tensordot twice": lambda m: m.tensordot(X, Y, ((1, 1), (0, 0))),
    "subscripts of another rank": lambda m: m.einsum("ijk,jk->ik", X, Y),
    "subscripts of one operand": lambda m: m.einsum("ij->ik", X),
    "subscripts of more operands": lambda m: m.einsum("ij,jk->ik", X),
    "unknown subscript": lambda m: m.einsum("ij,jk->il", X, Y),
    "subscript twice": lambda m: m.einsum("ij,jk->ii", X, Y),
    "sizes of subscripts": lambda m: m.einsum("ij,jk->ik", X, X),
    "no einsum": lambda m: m.einsum(),
    "way to optimize": lambda m: m.einsum("ij,jk,kl->il", X, Y, Y.T, optimize="nonsense"),
    "one matrix of multi_dot": lambda m: m.multi_dot([X]),
    "ranks of multi_dot": lambda m: m.multi_dot([BATCH, Y]),
    "dimension out of range": lambda m: m.dot_general(X, Y, (((5,), (0,)), ((), ()))),
    "negative dimension": lambda m: m.dot_general(X, Y, (((-1,), (0,)), ((), ()))),
    "batch that is contracted": lambda m: m.dot_general(X, Y, (((1,), (0,)), ((1,), (0,)))),
    "dimensions of one kind": lambda m: m.dot_general(X, Y, ((1,), (0,))),
    "floats of group_sizes": lambda m: m.ragged_dot(X, MATRICES, jnp.ones(2)),
    "shape of group_sizes": lambda m: m.ragged_dot(X, MATRICES, jnp.array([1, 2, 3])),
    "rank of ragged_dot": lambda m: m.ragged_dot(X, Y, SIZES),
    "traced permutation": lambda m: jax.jit(lambda i: m.transpose(X, (i, 0)))(1),
    "traced axes of tensordot": lambda m: jax.jit(lambda i: m.tensordot(X, X, i))(1),
    "truth of traced axis": lambda m: jax.jit(lambda i: m.vecdot(X, X, axis=i))(1),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_jax_refuses(call):
    with pytest.raises(Exception) as expected:  # noqa: PT011 - the type is what is compared
        REFUSED[call](JAX)
    with pytest.raises(expected.type) as found:
        REFUSED[call](jtk)
    assert found.type is expected.type, str(found.value)


# Results of the same type, weak or not.
ACCEPTED = {
    "keywords": lambda m: (m.dot(a=X, b=Y), m.vdot(a=X, b=X), m.transpose(a=X)),
    "NumPy": lambda m: (m.matmul(WIDE, Y), m.sum(WIDE), m.transpose(WIDE.T)),
    "numbers": lambda m: (m.dot(2, 3.0), m.add(2, True), m.sum(3), m.vdot(2, X[0, 0])),
    "number and array": lambda m: (m.dot(2.0, X[0]), m.inner(2, X > 3), m.add(1j, X)),
    "weak types": lambda m: m.einsum(",", jnp.asarray(2.0), 3),
    "weak type of a sum": lambda m: (m.sum(2.5), m.sum(2.5, initial=1), m.sum(2, dtype=jnp.int8)),
    "names of precisions": lambda m: m.matmul(X, Y, precision=("highest", "bfloat16")),
    "preset": lambda m: m.dot(X, Y, precision="F32_F32_F32"),
    "list of precisions": lambda m: m.dot_general(X, Y, DIMS, ["highest", "default"]),
    "element type by name": lambda m: m.dot(X, Y, preferred_element_type="bfloat16"),
    "truncated element type": lambda m: m.tensordot(X, Y, 1, preferred_element_type=float),
    "reversed": lambda m: (m.transpose(BATCH), m.transpose(BATCH, None), m.transpose(2.0, ())),
    "permutations": lambda m: (m.transpose(BATCH, (-1, 0, 1)), m.transpose(BATCH, [2, 0, 1])),
    "array of axes": lambda m: (m.transpose(X, jnp.array([1, 0])), m.sum(X, jnp.array([0, 1]))),
    "iterator of axes": lambda m: m.transpose(X, reversed(range(2))),
    "axes of NumPy": lambda m: (m.sum(X, np.int64(-1)), m.sum(X, np.array([1]), keepdims=1)),
    "no axes": lambda m: (m.sum(X, ()), m.sum(jnp.ones((0, 3))), m.sum(jnp.ones((0, 3)), 0)),
    "axis of an array": lambda m: m.sum(X, jnp.array(1)),
    "sums of booleans": lambda m: (m.sum(X > 3), m.sum(X > 3, promote_integers=False)),
    "sum of int4": lambda m: m.sum(INT4, promote_integers=False),
    "initial and where": lambda m: m.sum(X, 0, initial=2, where=np.ones((3, 1), bool)),
    "axes of tensordot": lambda m: [
        m.tensordot(X, Y, axes) for axes in (0, 1, (1, 0), [[-1], [-2]])
    ],
    "sublists": lambda m: (m.einsum(X, [0, 1], Y, [1, 2]), m.einsum(X, (0, ...), (..., 0))),
    "spaces": lambda m: m.einsum("i j, jk -> k i", X, Y),
    "implicit subscripts": lambda m: (m.einsum("ij,jk", X, Y), m.einsum("ba", X)),
    "ellipses": lambda m: (m.einsum("...ij,...jk->...ki", BATCH, Y), m.einsum("...->...", X)),
    "diagonal": lambda m: (m.einsum("ii,ij->j", X[:, :3], X), m.einsum("ii", X[:, :3])),
    "sizes of 1": lambda m: (m.einsum("ij,kj->ik", X[:1], X), m.einsum("ij,jk->ik", X[:, :1], Y)),
    "paths": lambda m: [
        m.einsum("ij,jk,kl->il", X, Y, Y.T, optimize=way)
        for way in (True, False, "optimal", [(0, 1), (0, 1)])
    ],
    "path of two": lambda m: m.einsum("ij,jk->ik", X, Y, optimize=np.array([[0, 1]])),
    "list of dimensions": lambda m: m.dot_general(X, Y, [[[1], np.array([0])], [[], []]]),
    "out_sharding of ragged_dot": lambda m: m.ragged_dot(
        X, MATRICES, SIZES, None, None, None, None
    ),
    "vectors of multi_dot": lambda m: m.multi_dot((X[:, 0], X, X[0])),
    "empty": lambda m: (m.matmul(X[:0], Y), m.dot(X[:, :0], Y[:0]), m.vdot(X[:0], X[:0])),
}


@pytest.mark.parametrize("call", ACCEPTED)
def test_what_jax_accepts(call):
    for expected, found in zip(
        *(jax.tree.leaves(ACCEPTED[call](module)) for module in (JAX, jtk)), strict=True
    ):
        assert (found.dtype, found.weak_type, found.shape) == (
            expected.dtype,
            expected.weak_type,
            expected.shape,
        )
        np.testing.assert_allclose(
            np.asarray(found, np.complex64), np.asarray(expected, np.complex64), rtol=1e-2
        )


@pytest.mark.parametrize(
    ("given", "swapped"),
    [
        (("highest", "default"), (lax.Precision.DEFAULT, lax.Precision.HIGHEST)),
        (UNEQUAL, lax.DotAlgorithm(jnp.bfloat16, np.float32, np.float32, 2, 1, 1, False)),
    ],
    ids=["pair", "algorithm"],
)
def test_einsum_swaps_precisions_with_operands(given, swapped):
    program = jax.make_jaxpr(lambda x, y: jtk.einsum("ij,jk->ki", x, y, precision=given))(X, Y)
    (product,) = program.jaxpr.eqns
    assert product.invars == program.jaxpr.invars[::-1]
    assert product.params["precision"] == swapped


# Calls of JAX's functions, before and after, of a matrix.
CALLS = {
    "dot_general": lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ()))),
    "lax.add": lambda x: lax.add(x, x),
    "lax.ragged_dot": lambda x: lax.ragged_dot(x, jnp.stack([x, -x]), jnp.array([1, 3])),
    "ragged_dot_general": lambda x: lax.ragged_dot_general(
        x,
        jnp.stack([x, -x]),
        jnp.array([1, 3]),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
    "bincount": lambda x: jnp.bincount(jnp.array([1, 3, 1, 0]), x[0], length=4),
    "segment_min": lambda x: jax.ops.segment_min(x, jnp.array([1, 0, 1, 0]), 2),
    "segment_prod": lambda x: jax.ops.segment_prod(
        x, jnp.array([1, 0, 2, 3]), 4, unique_indices=True
    ),
    "eigh": lambda x: jnp.linalg.eigh(x @ x.mT)[0],
    "lax.linalg.cholesky": lambda x: lax.linalg.cholesky(x @ x.mT),
    "lax.linalg.qr": lambda x: abs(lax.linalg.qr(x)[1]),
    "lax.linalg.svd": lambda x: lax.linalg.svd(x, compute_uv=False),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(x, x, lower=True),
    "pinv": lambda x: jnp.linalg.pinv(x),
    "expm": lambda x: jsp_linalg.expm(x / 8),
    "lstsq": lambda x: jnp.linalg.lstsq(x[:, :2], x[:, 2])[0],
    "cond": lambda x: jnp.linalg.cond(x),
    "norm": lambda x: jnp.linalg.norm(x, "nuc"),
    "cho_solve": lambda x: jsp_linalg.cho_solve(jsp_linalg.cho_factor(x @ x.mT), x),
    "polar": lambda x: jsp_linalg.polar(x, method="svd")[0],
    "softmax": lambda x: jax.nn.softmax(x),
    "multi_head attention": lambda x: jax.nn.dot_product_attention(*(x[None, :, None],) * 3),
}


@jax.default_matmul_precision("highest")
def _value_and_gradient(function):
    rng = np.random.default_rng(7)
    matrix = (rng.standard_normal((4, 4)) / 2 + 4 * np.eye(4)).astype(np.float32)
    gradient = jax.grad(lambda x: jnp.sin(function(x).astype(np.float32)).sum())
    return function(matrix), jax.jit(gradient)(matrix)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(6)
def test_values(name):
    wanted = _value_and_gradient(CALLS[name])
    with swapped():
        assert_close(_value_and_gradient(CALLS[name]), wanted, 1e-4)


def test_sources_name_jaxs_own():
    """A function of JAX that has a namesake is taken from where none replaces it."""
    of_matrices = {name for module, name, _ in REPLACED if "linalg" in module.__name__}
    others = {name for module, name, _ in REPLACED if "linalg" not in module.__name__}
    aliases = {"jnp", "lax", "ops", "jsp_linalg"}
    for path in Path(jtk.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "jax_tilekern.interop.originals"
            for alias in node.names
        }
        for node in ast.walk(tree):
            module = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            if module and node.attr in (of_matrices if "linalg" in module else others):
                module = module.removesuffix(".linalg")
                where = f"{path.name}:{node.lineno}: {ast.unparse(node)}"
                assert module not in aliases - own, where
                assert module not in ("jax.numpy", "jax.lax", "jax.ops", "jax.nn"), where
