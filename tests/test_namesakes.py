"""A program may replace JAX's functions by the library's of the same name and meaning."""

import ast
import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from jax import lax
from numerics import assert_close
from operations import OPERATIONS, arrays_of

import jax_tilekern as jtk

# Functions of JAX that have other parameters, results or types.
OTHERS = {
    (lax, "dot"), (lax, "transpose"), (lax, "scatter_add"), (lax.linalg, "eigh"),
    (lax.linalg, "lu"), (jax.nn, "scaled_matmul"),
}  # fmt: skip
MODULES = {
    jtk: (jnp, lax, jax.nn, jax.ops),
    jtk.linalg: (jnp.linalg, jsp_linalg, lax.linalg),
}
NAMESAKES = [
    (theirs, name, getattr(ours, name))
    for ours, modules in MODULES.items()
    for theirs in modules
    for name in sorted({*ours.__all__, *(dir(ours) if ours is jtk.linalg else ())})
    if callable(getattr(theirs, name, None))
    and (theirs, name) not in OTHERS
    # A name that both modules of JAX have means what it means in the first.
    and not (theirs is jsp_linalg and hasattr(jnp.linalg, name))
]
# Calls of JAX's functions, before and after, that the table of operations lacks: of a matrix.
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


@contextlib.contextmanager
def swapped():
    """JAX with the library's functions."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, ours in NAMESAKES:
            patch.setattr(module, name, ours)
        # A trace of before would hide a call of a function by itself.
        jax.clear_caches()
        yield
    jax.clear_caches()


@jax.default_matmul_precision("highest")
def _values(function, name):
    """Values, gradients, and values of a batch of an operation."""
    rng = np.random.default_rng(7)
    matrix = rng.standard_normal((4, 4)) / 2 + 4 * np.eye(4)
    arrays = [matrix.astype(np.float32)] if name in CALLS else arrays_of(rng, name)

    def total(*arrays):
        return jnp.sin(function(*arrays).astype(np.float32)).sum()

    found = [function(*arrays), jax.jit(jax.grad(total, tuple(range(len(arrays)))))(*arrays)]
    if name in OPERATIONS:  # JAX maps not all the others.
        found.append(jax.jit(jax.vmap(function))(*(np.stack([x, x]) for x in arrays)))
    return found


@pytest.mark.parametrize("name", [*OPERATIONS, *CALLS])
@pytest.mark.one_in(3)
def test_values(name):
    ours, theirs = (CALLS[name],) * 2 if name in CALLS else OPERATIONS[name][:2]
    wanted = _values(theirs, name)
    with swapped():
        assert_close(_values(ours, name), wanted, 1e-4)


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
