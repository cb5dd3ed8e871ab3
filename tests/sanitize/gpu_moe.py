"""Small layers of experts on the GPU, under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.ops import planned_kernel
from jax_tilekern.ops.mixture.rows import combine_rows, spread_rows
from jax_tilekern.ops.segments.order import order_and_places
from jax_tilekern.plans.grouped_gemm.sm90 import candidates

# Tokens, chosen experts and columns: rows of lanes of every number, whole and odd.
SIZES = [(1, 1, 1), (300, 3, 40), (70, 2, 520), (130, 9, 7), (40, 8, 2048)]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
OUTSIDE = np.array([-1, 2**31 - 1, -(2**31)])


def check_rows() -> int:
    """Spread and combine by places of which some are out of bounds; return how many were wrong."""
    rng = np.random.default_rng(0)
    wrong, calls = [], 0
    for tokens, chosen, columns in SIZES:
        pairs = tokens * chosen
        for dropped in (0.0, 0.4, 1.0):
            places = rng.permutation(pairs)
            outside = rng.random(pairs) < dropped
            places = np.where(outside, rng.choice([pairs, *OUTSIDE], pairs), places).astype(
                np.int32
            )
            of_pairs = np.arange(pairs, dtype=np.int32) // chosen
            token = np.zeros(pairs, np.int32)
            token[places[~outside]] = of_pairs[~outside]
            by_token = places.reshape(tokens, chosen)
            combine = jax.jit(functools.partial(combine_rows, places=by_token, tokens=token))
            what = f"{tokens} {chosen} {columns} {dropped}"
            for dtype in (*DTYPES, np.int8):
                x = rng.integers(-4, 5, (tokens, columns)).astype(dtype)
                spread = np.asarray(jax.jit(spread_rows)(x, by_token, token)[0])
                calls += 1
                if not np.array_equal(spread[places[~outside]], x[of_pairs[~outside]]):
                    wrong.append(f"spread {np.dtype(dtype)} {what}")
                for arrays in (1, 2) if dtype != np.int8 else ():
                    rows = rng.integers(-4, 5, (arrays, pairs, columns)).astype(dtype)
                    sums = np.zeros((tokens, columns))
                    terms = rows.astype(np.float64).sum(0)[places[~outside]]
                    np.add.at(sums, of_pairs[~outside], terms)
                    calls += 1
                    if not np.array_equal(np.asarray(combine(*rows), np.float64), sums):
                        wrong.append(f"combine {np.dtype(dtype)} {arrays} {what}")
    print(f"rows of experts: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def on_cpu():
    """Compute what is expected, because a sanitizer makes XLA's compiler for GPUs slow."""
    return jax.default_device(jax.devices("cpu")[0])


def ours(indices, x, up, gate, down, weights):
    """Return a layer of experts; activations are linear, so that small integers stay exact."""
    return jtk.moe(x, up, down, weights, indices, w_gate=gate, activation=lambda a: a / 32)


def dense(indices, x, up, gate, down, weights):
    """Return the same, where every expert computes every token."""
    product = jnp.einsum("td,edh->teh", x, up) * jnp.einsum("td,edh->teh", x, gate) / 32
    share = jax.nn.one_hot(indices, len(up), dtype=x.dtype) * weights[..., None]
    return jnp.einsum("te,teh,ehd->td", share.sum(1), product, down)


def check_products() -> int:
    """Compute layers with each kernel of two products; return how many were wrong.

    The layers are not differentiated, and have groups of many tiles, of one row and of none.
    """
    rng = np.random.default_rng(2)
    tokens, features, hidden, experts, chosen = 400, 136, 264, 7, 2
    up, down = (experts, features, hidden), (experts, hidden, features)
    arrays = [
        rng.integers(-1, 2, shape).astype(ml_dtypes.bfloat16)
        for shape in ((tokens, features), up, up, down)
    ]
    arrays.append((rng.integers(0, 2, (tokens, chosen)) / 128).astype(ml_dtypes.bfloat16))
    wide = [a.astype(np.float64) for a in arrays]
    several = rng.integers(-1, 8, (tokens, chosen)) // 2
    kinds = {"several": several, "one": several * 0 + 3, "none": several * 0 - 1}
    kinds["one row"] = np.where(np.arange(tokens)[:, None] == 5, several * 0 + 2, -1)
    wrong, calls, tiles = [], 0, candidates.PAIR_TILES
    for tile in tiles:
        candidates.PAIR_TILES = [tile]
        planned_kernel._plan_once.cache_clear()
        for name, indices in kinds.items():
            indices = indices.astype(np.int32)
            found = jax.jit(lambda *args, i=indices: ours(i, *args))(*arrays)
            with on_cpu():
                wanted = np.asarray(jax.jit(dense)(indices, *wide))
            calls += 1
            error = np.abs(np.asarray(found, np.float64) - wanted).max()
            if not error <= 0.05 * np.abs(wanted).max(initial=1):
                wrong.append(f"{tile} {name}")
    candidates.PAIR_TILES = tiles
    planned_kernel._plan_once.cache_clear()
    print(f"products of experts: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def check_orders() -> int:
    """Order rows by few keys, in one tile and in several; return how many were wrong."""
    rng = np.random.default_rng(3)
    wrong, calls = [], 0
    for rows, bins in ((1, 3), (1000, 66), (1025, 129), (65536, 65), (5000, 512), (3000, 600)):
        keys = rng.integers(-2, bins, rows).astype(np.int32)
        bin_of = np.clip(keys, -1, bins - 2) + 1
        order = np.argsort(bin_of, kind="stable")
        begins = np.searchsorted(bin_of[order], np.arange(bins))
        expected = order, np.argsort(order), begins
        found = jax.jit(functools.partial(order_and_places, bins=bins))(keys)
        calls += 1
        if not all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(f"{rows} rows of {bins} bins")
    print(f"orders of rows: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def gradients(layer):
    """Return a function of a layer's arguments that gives the gradients of all but indices."""
    return jax.grad(lambda *args: layer(*args).sum(), (1, 2, 3, 4, 5))


def check_layers() -> int:
    """Compute layers of any indices with their gradients; return how many were wrong."""
    rng = np.random.default_rng(1)
    experts, features, hidden, chosen = 5, 24, 40, 3
    up, down = (experts, features, hidden), (experts, hidden, features)
    wrong, calls = [], 0
    for dtype in DTYPES:
        for tokens, low, high in ((0, 0, 1), (50, 0, 1), (50, 0, 5), (50, -3, 8), (50, 5, 2**31)):
            indices = rng.integers(low, high, (tokens, chosen)).astype(np.int32)
            shapes = (tokens, features), up, up, down
            arrays = [rng.integers(-1, 2, shape).astype(dtype) for shape in shapes]
            arrays.append((rng.integers(0, 2, (tokens, chosen)) / 128).astype(dtype))
            wide = [a.astype(np.float64) for a in arrays]
            for f, g in ((ours, dense), (gradients(ours), gradients(dense))):
                found = jax.tree.leaves(jax.jit(f)(indices, *arrays))
                with on_cpu():
                    wanted = jax.tree.leaves(jax.jit(g)(indices, *wide))
                for a, b in zip(found, wanted, strict=True):
                    calls += 1
                    error = np.abs(np.asarray(a, np.float64) - np.asarray(b)).max(initial=0)
                    if not error <= 0.05 * np.abs(b).max(initial=1):
                        wrong.append(f"{np.dtype(dtype)} {tokens} tokens, experts {low} to {high}")
    print(f"layers of experts: {calls} results, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    with jtk.policy("kernels"):
        sys.exit(check_rows() + check_layers() + check_products() + check_orders() > 0)
