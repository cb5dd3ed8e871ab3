"""Group sizes, and what a ragged product of them is: float64 products group by group."""

import jax
import numpy as np
from hypothesis import strategies as st
from jax import lax
from numerics import UNIT_ROUNDOFF, accumulator, exact, frobenius, rounding

from jax_tilekern.plans.contraction import Contraction

# Dimension numbers of the gradient of ``ragged_dot`` in the weights.
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def group_sizes(rng, kind, groups, rows):
    """Sizes of a kind, for the given number of rows."""
    if kind == "random":  # some rows are left for no group
        cuts = np.sort(rng.integers(0, rows + 1, groups))
        sizes = np.diff(cuts, prepend=0)
    elif kind == "full":
        sizes = rng.multinomial(rows, np.full(groups, 1 / groups))
    elif kind == "skewed":
        share = 1 / np.arange(1, groups + 1) ** 1.5
        sizes = rng.permutation(rng.multinomial(rows, share / share.sum()))
    elif kind == "one-hot":
        sizes = np.zeros(groups, int)
        sizes[rng.integers(groups)] = rows
    elif kind == "empty":
        sizes = np.zeros(groups, int)
    elif kind == "every other":
        sizes = np.where(np.arange(groups) % 2, 2 * rows // groups, 0)
    elif kind == "over-long":
        sizes = rng.integers(0, rows + 1, groups)
        sizes[groups // 2] = 2**31 - 1
        sizes[-1] = 2**31 - 1
    elif kind == "negative":
        sizes = rng.integers(-rows, rows // 2, groups)
    return np.asarray(sizes, np.int32)


KINDS = ("random", "full", "skewed", "one-hot", "empty", "every other", "over-long", "negative")


def spans(sizes, rows):
    """First and last row of every group, by the documented rules."""
    ends = np.minimum(np.cumsum([min(max(int(size), 0), rows) for size in sizes]), rows)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def assert_rows(out, lhs, rhs, sizes, operand_roundoff=0.0):
    """Each group's rows are those of a product of its own, and the others are zeros."""
    a, b, out = exact(lhs), exact(rhs), np.asarray(out)
    assert out.shape == (len(a), b.shape[2])
    rest = np.ones(len(out), bool)
    for g, (begin, end) in enumerate(spans(sizes, len(a))):
        rest[begin:end] = False
        assert_matrix(out[begin:end], a[begin:end], b[g], lhs.dtype, operand_roundoff)
    assert not out[rest].astype(np.float64).any()


def assert_sums(out, lhs, rhs, sizes, operand_roundoff=0.0):
    """Each group's matrix is a product of its own rows, zeros if it has none."""
    a, b, out = exact(lhs), exact(rhs), np.asarray(out)
    assert out.shape == (len(sizes), a.shape[1], b.shape[1])
    for g, (begin, end) in enumerate(spans(sizes, len(a))):
        assert_matrix(out[g], a[begin:end].T, b[begin:end], lhs.dtype, operand_roundoff)


def assert_matrix(out, a, b, dtype, operand_roundoff):
    """``out`` is ``a @ b``, given exactly, with the error that ``error_bound`` allows."""
    product = a @ b
    if out.dtype.kind in "iu":
        np.testing.assert_array_equal(out, product.astype(out.dtype))
        return
    sums = 4 * np.sqrt(a.shape[1] + 1) * UNIT_ROUNDOFF[accumulator(dtype)]
    bound = (sums + 2 * operand_roundoff) * frobenius(np.abs(a) @ np.abs(b))
    bound += frobenius(rounding(product, out.dtype))
    error = frobenius(exact(out) - product)
    assert error <= bound, f"error {error:.3e} exceeds {bound:.3e}"


def on_the_cpu(function, *args):
    """What ``function`` of ``jax.lax`` returns on the CPU, where JAX itself says what it means.

    For a GPU it is an instruction of XLA's, which refuses batch dimensions with one set of sizes
    and others, and takes float32 for TF32.
    """
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return function(*jax.device_put(args, cpu))


@st.composite
def contractions(draw):
    """A ragged contraction and the size of each label; any label may be in any place."""
    ragged, group = 0, 1
    arrays = {"lhs": [ragged], "rhs": [], "bounds": [], "out": []}
    contracts = draw(st.booleans())
    arrays["rhs" if contracts else "out"].append(ragged)
    arrays["out" if contracts else "rhs"].append(group)
    places = [
        ("lhs", "out"), ("rhs", "out"), ("lhs", "rhs"), ("lhs", "rhs", "out"), ("bounds", "out"),
        ("bounds", "lhs", "out"), ("bounds", "rhs", "out"), ("bounds", "lhs", "rhs", "out"),
        ("bounds", "lhs"), ("bounds", "rhs"), ("bounds", "lhs", "rhs"),
    ]  # fmt: skip
    count = draw(st.integers(0, 4))
    for label in range(2, 2 + count):
        for array in draw(st.sampled_from(places)):
            arrays[array].append(label)
    order = {name: tuple(draw(st.permutations(labels))) for name, labels in arrays.items()}
    order["bounds"] += (group,)
    sizes = {label: draw(st.integers(1, 4)) for label in range(2 + count)}
    sizes[ragged] = draw(st.integers(1, 9))
    return Contraction(**order, ragged=ragged, group=group), sizes


def random_bounds(rng, contraction, sizes):
    """Bounds in order for every index of the batch; rows before and behind the groups too."""
    shape = [sizes[x] for x in contraction.bounds]
    shape[-1] += 1
    return np.sort(rng.integers(0, sizes[contraction.ragged] + 1, shape), -1).astype(np.int32)


def masked_einsum(contraction, lhs, rhs, bounds):
    """A ragged contraction by its definition: an einsum of the operands and a mask."""
    c = contraction
    position = np.arange(lhs.shape[c.lhs.index(c.ragged)])
    mask = (bounds[..., :-1, None] <= position) & (position < bounds[..., 1:, None])
    return np.einsum(lhs, c.lhs, rhs, c.rhs, mask.astype(lhs.dtype), (*c.bounds, c.ragged), c.out)
