"""Kernels of lanes, compiled as C++, in the place of the calls of a traced function."""

import re
import subprocess

import jax
import numpy as np
from emulated import build
from filelock import FileLock

from jax_tilekern.interop import compat
from jax_tilekern.ops.lane_kernel import kernel_of

HEADERS = ("types.cuh", "convert.cuh", "scalar_functions.cuh", "lanes.cuh")
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Emulated:
    """Functions whose calls of lanes run as C++, compiled all at once.

    Parameters
    ----------
    folder
        Where its input and output are written.
    traced
        The functions as jaxprs, by name.
    shared
        Where the program is built, once for all processes of the tests.
    """

    def __init__(self, folder, traced, shared=None):
        self._folder, self._traced = folder, traced
        shared = shared or folder
        kernels = {}
        for closed in traced.values():
            for kernel in _kernels(closed.jaxpr):
                kernels.setdefault(kernel.text, kernel)
        self._numbers = {text: i for i, text in enumerate(kernels)}
        text, table = [], []
        for i, kernel in enumerate(kernels.values()):
            own = kernel.text.replace('#include "lanes.cuh"', "")
            text.append(re.sub(rf"\b{kernel.function}\(", f"lanes_{i}(", own))
            run = f"[](void** buffers) {{ call(&tilekern::lanes_{i}<1>, buffers); }}"
            table.append(f"{{{run}, {kernel.lanes}}}")
        text.append(f"const Kernel kernels[] = {{{', '.join(table)}}};")
        shared.mkdir(parents=True, exist_ok=True)
        self._program = shared / "lanes"
        with FileLock(shared / "lock"):
            if not self._program.exists():
                (shared / "generated.h").write_text("\n".join(text))
                build("lanes", HEADERS, shared, *SANITIZED)

    def __call__(self, name, *args):
        """Return the leaves of a function's results."""
        closed = self._traced[name]
        return self._evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args))

    def _evaluated(self, jaxpr, consts, operands):
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

        def value(x):
            return x.val if compat.is_literal(x) else values[x]

        for eqn in jaxpr.eqns:
            read = [value(x) for x in eqn.invars]
            if eqn.primitive.name == "tilekern_lanes":
                found = self._run(eqn, read)
            elif eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                found = self._evaluated(inner.jaxpr, inner.consts, read)
            else:
                found = compat.bind_equation(eqn, read)
            values.update(zip(eqn.outvars, found, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def _run(self, eqn, operands):
        kernel = kernel_of([x.aval for x in eqn.invars], **eqn.params)
        outputs = [(x.aval.shape, x.aval.dtype) for x in eqn.outvars]
        source, target = self._folder / "input", self._folder / "output"
        with source.open("wb") as file:
            for x in operands:
                data = np.ascontiguousarray(x).tobytes()
                file.write(np.int64(len(data)).tobytes() + data)
            sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in outputs]
            for size in (*sizes, max(1, kernel.workspace_bytes)):
                file.write(np.int64(-size).tobytes())
        number = self._numbers[kernel.text]
        done = subprocess.run(
            [self._program, str(number), source, target], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + kernel.text
        data, found = target.read_bytes(), []
        for (shape, dtype), size in zip(outputs, sizes, strict=True):
            found.append(np.frombuffer(data[:size], dtype).reshape(shape))
            data = data[size:]
        return found


def _kernels(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "tilekern_lanes":
            yield kernel_of([x.aval for x in eqn.invars], **eqn.params)
        elif eqn.primitive.name in ("jit", "pjit"):
            yield from _kernels(eqn.params["jaxpr"].jaxpr)
