"""Programs with random shapes and shardings over a mesh of 2 x 4 devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
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


class Drawn(NamedTuple):
    """A function of a module with random operands, before it is sharded."""

    function: Callable[[Any], Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    exact: bool = True


def matmul(rng: np.random.Generator) -> Drawn:
    """Return a product of matrices or of batches of them."""
    m, k, n = _sizes(rng, 3)
    batch = (8,) if rng.integers(3) == 0 else ()
    return Drawn(lambda module: module.matmul, ((*batch, m, k), (*batch, k, n)))


def two_layers(rng: np.random.Generator) -> Drawn:
    """Return two products with an elementwise function in between."""
    m, k, n, o = _sizes(rng, 4)

    def function(module: Any) -> Any:
        return lambda x, up, down: module.matmul(jnp.square(module.matmul(x, up)), down)

    return Drawn(function, ((m, k), (k, n), (n, o)))


_EINSUMS: dict[str, tuple[tuple[int, ...], ...]] = {
    "bqhd,bkhd->bhqk": ((8, 16, 4, 8), (8, 16, 4, 8)),
    "bhqk,bkhd->bqhd": ((8, 4, 16, 16), (8, 16, 4, 8)),
    "bsd,dhk->bshk": ((8, 16, 32), (32, 4, 8)),
    "bshk,hkd->bsd": ((8, 16, 4, 8), (4, 8, 32)),
    "ebd,edf->ebf": ((8, 16, 32), (8, 32, 64)),
    "ab,bc->ca": ((32, 64), (64, 16)),
    "ab,cb->ac": ((16, 64), (32, 64)),
    "ab,bc,cd->ad": ((16, 32), (32, 64), (64, 8)),
}


def einsum(rng: np.random.Generator) -> Drawn:
    """Return a contraction of tensors."""
    subscripts = str(rng.choice(list(_EINSUMS)))
    return Drawn(lambda module: functools.partial(module.einsum, subscripts), _EINSUMS[subscripts])


def solve(rng: np.random.Generator) -> Drawn:
    """Return the solutions of a batch of systems."""
    return Drawn(lambda module: module.linalg.solve, _systems(rng), exact=False)


def triangular_solve(rng: np.random.Generator) -> Drawn:
    """Return the solutions of a batch of triangular systems."""
    lower = bool(rng.integers(2))

    def function(module: Any) -> Any:
        linalg = jax_tilekern.linalg if module is jax_tilekern else jsp_linalg
        return functools.partial(linalg.solve_triangular, lower=lower)

    return Drawn(function, _systems(rng), exact=False)


KINDS = {
    "matmul": matmul,
    "two layers of matmul": two_layers,
    "einsum": einsum,
    "linalg.solve": solve,
    "triangular solves": triangular_solve,
}


def drawn(kind: str, seed: int, count: int) -> Iterator[Program]:
    """Yield programs of a kind, each forward and with its gradients."""
    for index in range(count):
        rng = np.random.default_rng([seed, index, *kind.encode()])
        function, shapes, exact = KINDS[kind](rng)
        specs = tuple(_random_spec(rng, shape) for shape in shapes)
        arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        result = _random_spec(rng, jax.eval_shape(function(jnp), *arrays).shape)
        # Half of the programs state the shardings of their results: gradients have the operands'.
        stated = bool(rng.integers(2))
        yield Program(
            f"`{kind}`, forward", function, shapes, specs, result if stated else None, exact
        )
        gradients = functools.partial(_gradients, function, len(shapes))
        yield Program(
            f"`{kind}`, gradients", gradients, shapes, specs, specs if stated else None, exact
        )


def operands(rng: np.random.Generator, program: Program) -> list[Any]:
    """Return random operands of a program."""
    if program.exact:
        return [rng.integers(-1, 2, shape).astype(np.float32) for shape in program.shapes]
    (matrices, sides) = (rng.standard_normal(shape) for shape in program.shapes)
    n = matrices.shape[-1]
    return [(matrices / (2 * np.sqrt(n)) + 2 * np.eye(n)).astype(np.float32), np.float32(sides)]


def _random_spec(rng: np.random.Generator, shape: tuple[int, ...]) -> P:
    """Return a sharding: each mesh axis splits a dimension that it divides, or none."""
    axes: list[list[str]] = [[] for _ in shape]
    for axis in rng.permutation(list(MESH)):
        sizes = [
            size // math.prod(MESH[a] for a in own) for size, own in zip(shape, axes, strict=True)
        ]
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


def _systems(rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    n, columns = int(rng.choice([4, 8, 16])), int(rng.choice([1, 3, 8]))
    return (64, n, n), (64, n, columns)
