"""Updates of parameters."""

from __future__ import annotations

import jax
import numpy as np

from benchmarks.catalog.bounds import F32, UNIT_ROUNDOFF
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import ORACLES


def _update(m, w, gradient):
    optimizer = m.muon(0.1)
    return optimizer.update(gradient, optimizer.init(w), w)[0]


def muon(draw: Draw, name: str) -> Call:
    """Draw one update of a matrix."""
    most = 70 if draw.scale == 1 else 1 << 14  # Layers of models have such parameters.
    rows, columns = max(2, draw.matrix_size(most)), max(2, draw.matrix_size(most))
    operands = tuple(draw.operand((rows, columns), F32) for _ in range(2))

    def errors(result, *arrays):
        with jax.enable_x64(True):
            expected = np.asarray(_update(ORACLES, *(x.astype(np.float64) for x in arrays)))
        # Each step of five multiplies errors by at most the polynomial's largest derivative.
        share = 3.4445**5 * 16 * max(rows, columns) * UNIT_ROUNDOFF[F32]
        return [(np.abs(np.asarray(result) - expected), share * np.ones(expected.shape))]

    return Call(name, "", operands, _update, errors, is_plain=False)


DESCRIPTIONS = describe(muon, "muon", derivatives=0, tolerance=1e-2)
