"""Programs with random shapes and shardings over a mesh of 2 x 4 devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_tilekern

MESH = {"d": 2, "m": 4}
_SIZES = (16, 32, 64, 128)


class Program(NamedTuple):
    """A program of ``jnp`` or of this package.

    Attributes
    ----------
    name
        What it is, and whether it is the gradient of that.
    function
        ``function(jax.numpy or jax_tilekern)`` returns it.
    shapes, specs
        Shape and sharding of each operand.
    out
        The sharding of the results, or ``None`` if XLA chooses it.
    exact
        Whether operands of small integers make every sum exact. If not, the matrices are well
        conditioned.
    """

    name: str
    function: Callable[[Any], Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: Any
    exact: bool


def matmul(rng: np.random.Generator) -> tuple[Any, list[tuple[int, ...]], bool]:
    """Return a product of matrices or of batches of them."""
    m, k, n = _sizes(rng, 3)
    batch = [(), (), (8,)][rng.integers(3)]
    return (lambda module: module.matmul), [(*batch, m, k), (*batch, k, n)], True


def two_layers(rng: np.random.Generator) -> tuple[Any, list[tuple[int, ...]], bool]:
    """Return two products with an elementwise function in between."""
    m, k, n, o = _sizes(rng, 4)

    def function(module: Any) -> Any:
        return lambda x, up, down: module.matmul(jnp.square(module.matmul(x, up)), down)

    return function, [(m, k), (k, n), (n, o)], True


_EINSUMS = {
    "bqhd,bkhd->bhqk": [(8, 16, 4, 8), (8, 16, 4, 8)],
    "bhqk,bkhd->bqhd": [(8, 4, 16, 16), (8, 16, 4, 8)],
    "bsd,dhk->bshk": [(8, 16, 32), (32, 4, 8)],
    "bshk,hkd->bsd": [(8, 16, 4, 8), (4, 8, 32)],
    "ebd,edf->ebf": [(8, 16, 32), (8, 32, 64)],
    "ab,bc->ca": [(32, 64), (64, 16)],
    "ab,cb->ac": [(16, 64), (32, 64)],
    "ab,bc,cd->ad": [(16, 32), (32, 64), (64, 8)],
}


def einsum(rng: np.random.Generator) -> tuple[Any, list[tuple[int, ...]], bool]:
    """Return a contraction of tensors."""
    subscripts = str(rng.choice(list(_EINSUMS)))
    return (
        lambda module: functools.partial(module.einsum, subscripts),
        _EINSUMS[subscripts],
        True,
    )


def solve(rng: np.random.Generator) -> tuple[Any, list[tuple[int, ...]], bool]:
    """Return a solution with a batch of matrices, small or large."""
    return (lambda module: module.linalg.solve), _systems(rng), False


def triangular_solve(rng: np.random.Generator) -> tuple[Any, list[tuple[int, ...]], bool]:
    """Return a solution with a batch of triangular matrices."""
    lower = bool(rng.integers(2))

    def function(module: Any) -> Any:
        if rng_choice:
            f = jax_tilekern.linalg if module is jax_tilekern else jsp_linalg
            return functools.partial(f.solve_triangular, lower=lower)
        g = jax_tilekern.linalg if module is jax_tilekern else lax.linalg
        return functools.partial(g.triangular_solve, left_side=True, lower=lower)

    rng_choice = bool(rng.integers(2))
    return function, _systems(rng), False


KINDS = {
    "matmul": matmul,
    "two layers of matmul": two_layers,
    "einsum": einsum,
    "linalg.solve": solve,
    "triangular solves": triangular_solve,
}


def drawn(kind: str, seed: int, count: int) -> Iterator[Program]:
    """Yield programs of a kind, each forward and with its gradient."""
    for index in range(count):
        rng = np.random.default_rng([seed, index, *kind.encode()])
        function, shapes, exact = KINDS[kind](rng)
        specs = tuple(random_spec(rng, shape) for shape in shapes)
        shape = jax.eval_shape(
            function(jnp), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        ).shape
        # Half of the programs state how their results are sharded: gradients as the operands are.
        stated = bool(rng.integers(2))
        out = random_spec(rng, shape)
        yield Program(
            f"{kind}, forward", function, tuple(shapes), specs, out if stated else None, exact
        )
        yield Program(
            f"{kind}, gradients", functools.partial(_gradients, function, len(shapes)),
            tuple(shapes), specs, specs if stated else None, exact,
        )  # fmt: skip


def operands(rng: np.random.Generator, program: Program) -> list[Any]:
    """Return random operands of a program."""
    if program.exact:
        return [rng.integers(-1, 2, shape).astype(np.float32) for shape in program.shapes]
    (matrices, sides) = (rng.standard_normal(shape) for shape in program.shapes)
    n = matrices.shape[-1]
    return [(matrices / (2 * np.sqrt(n)) + 2 * np.eye(n)).astype(np.float32), np.float32(sides)]


def random_spec(rng: np.random.Generator, shape: tuple[int, ...]) -> P:
    """Return a sharding: each mesh axis splits a dimension that it divides, or none."""
    axes: list[list[str]] = [[] for _ in shape]
    for axis in rng.permutation(list(MESH)):
        sizes = [n // int(np.prod([MESH[a] for a in own])) for n, own in zip(shape, axes, strict=True)]
        able = [i for i, n in enumerate(sizes) if n % MESH[axis] == 0]
        choice = rng.integers(-1, len(able))
        if choice >= 0:
            axes[able[choice]].append(str(axis))
    return P(*(tuple(own) or None for own in axes))


def _gradients(function: Any, count: int, module: Any) -> Callable[..., Any]:
    f = function(module)
    return jax.grad(lambda *args: jnp.square(f(*args)).sum(), tuple(range(count)))


def _sizes(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.choice(_SIZES, count))


def _systems(rng: np.random.Generator) -> list[tuple[int, ...]]:
    n, columns = int(rng.choice([4, 8, 16])), int(rng.choice([1, 3, 8]))
    return [(64, n, n), (64, n, columns)]
