"""Functions as kernels of lanes on the GPU, under compute-sanitizer.

See ``.ci/sanitize``. An argument is the number of threads that evaluate a lane.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.ops.kernel.translation import groups, text

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # For benchmarks.
sys.path.insert(0, str(Path(__file__).parent.parent))
import group_functions
import lane_functions

PARTS = ["1", "32", "64", "128"]
Function = Callable[..., Any]


def _functions() -> Iterator[tuple[str, Function, tuple[Any, ...]]]:
    """Yield names, functions of ``map`` and its arguments, and these arguments."""
    for name, (function, in_axes, args) in lane_functions.table().items():
        if in_axes is not None:
            mapped = functools.partial(_mapped, function, in_axes)
            yield name, mapped, args
    for name, (function, args) in lane_functions.gradients().items():
        yield f"gradient of {name}", functools.partial(_gradient, function), args
    for name, (_, args) in group_functions.cases(jax.vmap).items():
        yield name, functools.partial(_case, name), args


def _mapped(function: Function, in_axes: Any, map_: Function, *args: Any) -> Any:
    return map_(function, in_axes=in_axes)(*args)


def _gradient(function: Function, map_: Function, *args: Any) -> Any:
    return jax.grad(functools.partial(function, map_))(*args)


def _case(name: str, map_: Function, *args: Any) -> Any:
    function, _ = group_functions.cases(map_)[name]
    return function(*args)


def _computed(map_: Function, functions: dict[str, Function], args: dict[str, Any]) -> Any:
    """Return the results of all functions by one program, as arrays of float64."""

    def program(args: dict[str, Any]) -> dict[str, Any]:
        return {name: function(map_, *args[name]) for name, function in functions.items()}

    def array(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).astype(np.float64)

    given = {name: args[name] for name in functions}
    results = jax.jit(program)(given)
    return {name: list(map(array, jax.tree.leaves(x))) for name, x in results.items()}


def check_lanes(threads: int) -> int:
    """Run every function and its gradients; return how many were wrong."""
    # Groups of threads share out the short arrays too, and load rows of operands a step ahead.
    text._UNROLLED_IN_GROUPS = (3, 0)
    if threads != 32:
        groups.NEARBY_BYTES = 0
    cases = list(_functions())
    functions = {name: function for name, function, _ in cases}
    args = {name: given for name, _, given in cases}
    with jtk.strict():
        found = _computed(functools.partial(jtk.kernel, threads=threads), functions, args)
    # XLA's compiler for GPUs is slow under the sanitizer. A CPU has other NaN.
    with jax.default_device(jax.devices("cpu")[0]):
        others = {name: function for name, function in functions.items() if name != "bits"}
        expected = _computed(jax.vmap, others, args)
    expected |= _computed(jax.vmap, {"bits": functions["bits"]}, args)
    wrong = [
        name
        for name in functions
        if not all(
            np.allclose(x, y, 5e-2, 5e-2, equal_nan=True)
            for x, y in zip(found[name], expected[name], strict=True)
        )
    ]
    count = f"{len(found)} functions, {len(wrong)} wrong {wrong or ''}"
    print(f"lanes of {threads} threads: {count}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(sum(check_lanes(int(x)) for x in sys.argv[1:]) > 0)
