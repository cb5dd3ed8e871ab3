"""Operands of epilogues that come through the stages of the mainloop (sm_90a)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from candidate_calls import run
from fused_products import epilogue_of
from nvrtc_mark import needs_gpu, require_nvrtc
from products import BF16, F16, F32, H100, product_of

from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu

require_nvrtc()


def masked(y, bias, mask, residual):
    return residual + jnp.where(mask, jax.nn.silu(y + bias), 0)


def scaled(y, a, b):
    return y * a.astype(jnp.float32) + b


def product(m, n, k, *types, function=masked, **batch):
    """A bfloat16 product; operands are matrices, but for the row that `masked` begins with.

    The last one has a matrix for each of the batch, which shares the others.
    """
    lies = ["mn"] * len(types)
    if batch.get("batch"):
        lies[-1] = (m, "bmn")
    if function is masked:
        lies[0] = "n"
    epilogue = epilogue_of(function, *zip(types, lies, strict=True), n=n, **batch)
    return product_of("bf16", m, n, k, **batch).with_epilogue(epilogue)


@pytest.mark.parametrize("types", [(BF16, bool, BF16), (F16, bool, F32)], ids=str)
@pytest.mark.parametrize("sizes", [(8192, 4096, 4096), (8191, 4064, 4096)], ids=str)
@pytest.mark.one_in(3)
def test_no_register_is_spilled(sizes, types):
    fused = product(*sizes, *types)
    (candidate,) = (c for c in wgmma_candidates(fused, H100) if c.key == "wgmma 128x256")
    entry = candidate.plan(H100).launches[0].entry
    assert entry.spill_bytes == entry.stack_bytes == 0
    assert not entry.serialized


CASES = {
    "mask and residual": (masked, (BF16, bool, BF16)),
    "two of 16 bits": (scaled, (BF16, F16)),
    "1 and 4 bytes": (scaled, (np.int8, F32)),
}


@needs_gpu
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(1000, 1056, 328), (2200, 2208, 656)], ids=str)
def test_every_candidate_applies_the_epilogue(rng, sizes, case, batch):
    m, n, k = sizes
    function, types = CASES[case]
    fused = product(m, n, k, *types, function=function, batch=batch)

    def draw(shape, dtype):
        if np.dtype(dtype) == bool:
            return jnp.asarray(rng.random(shape) < 0.7)
        if np.dtype(dtype) == np.int8:
            return jnp.asarray(rng.integers(-3, 4, shape, np.int8))
        return jnp.asarray(rng.standard_normal(shape), dtype)

    lhs, rhs = draw((*batch, m, k), BF16), draw((*batch, k, n), BF16)
    row = function is masked
    shapes = [(m, n)] * (len(types) - 1) + [(*batch, m, n)]
    if row:
        shapes[0] = (n,)
    operands = [*map(draw, shapes, types)]
    with jax.enable_x64(True):
        exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
        wide = (jnp.asarray(x, bool if x.dtype == bool else np.float64) for x in operands)
        expected = np.asarray(function(jnp.asarray(exact), *wide))
    gpu = current_gpu()
    wrong = {}
    # Plain kernels of other families are tested without staged operands.
    for candidate in filter(lambda c: c.key.startswith("wgmma"), candidates(fused, gpu)):
        got = run(candidate.plan(gpu), (lhs, rhs, *operands), (*batch, m, n), BF16)
        # The result's rounding, that of float32 accumulators, and of approximate exponentials.
        bound = 2.0**-8 * np.abs(expected) + 1e-5 * k**0.5 * (1 + np.abs(exact))
        if not (np.abs(got - expected) <= bound).all():
            wrong[candidate.key] = np.abs(got - expected).max()
    assert not wrong
