"""A program may replace JAX's functions by the library's of the same name and meaning.

``test_derived.py`` runs the library's own functions in such a program.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from jax import lax
from namesakes import NAMESAKES, swapped
from numerics import assert_close

import jax_tilekern as jtk

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
    of_matrices = {name for module, name, _ in NAMESAKES if "linalg" in module.__name__}
    others = {name for module, name, _ in NAMESAKES if "linalg" not in module.__name__}
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
