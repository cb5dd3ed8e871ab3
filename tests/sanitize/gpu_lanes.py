"""Functions as kernels of lanes on the GPU, under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.ops.kernel.translation import text

sys.path.insert(0, str(Path(__file__).parent.parent))
import lane_functions


def check_lanes() -> int:
    """Run every function and its gradients; return how many were wrong."""
    wrong = []
    # Groups of threads share out the short arrays too.
    text._UNROLLED_IN_GROUPS = (3, 0)
    cases = {
        f"{name} by {threads}": (
            jtk.kernel(function, in_axes=in_axes, threads=threads),
            jax.vmap(function, in_axes=in_axes),
            args,
        )
        for name, (function, in_axes, args) in lane_functions.table().items()
        if in_axes is not None
        for threads in (1, 32, 64)
    }
    for name, (function, args) in lane_functions.gradients().items():
        cases[f"gradient of {name}"] = (
            *(
                jax.grad(lambda *args, f=function, map_=map_: f(map_, *args))
                for map_ in (jtk.kernel, jax.vmap)
            ),
            args,
        )
    for name, (ours, vmap, args) in cases.items():
        with jtk.strict():
            found = jax.tree.leaves(jax.jit(ours)(*args))
        # The sanitizer makes XLA's compiler for GPUs slow. A CPU has other NaN.
        device = jax.devices()[0] if name.startswith("bits") else jax.devices("cpu")[0]
        with jax.default_device(device):
            expected = jax.tree.leaves(jax.jit(vmap)(*args))
        for x, y in zip(found, expected, strict=True):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            x, y = (np.asarray(each).astype(np.float64) for each in (x, y))
            if not np.allclose(x, y, 5e-2, 5e-2, equal_nan=True):
                wrong.append(name)
    print(f"lanes: {len(cases)} functions, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(check_lanes())
