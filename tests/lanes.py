"""Kernels of lanes, emulated, in the place of the calls of a traced function."""

import math
import re
from types import SimpleNamespace
from typing import NamedTuple

import emulated_plans
import jax
import numpy as np
from filelock import FileLock
from jaxprs import parameters

from jax_tilekern.compilation.compiler import Source
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.kernel import write_kernel
from jax_tilekern.plans.lanes import LANES_WITH_ROWS, THREADS_WITH_ROWS
from jax_tilekern.plans.launch import Buffer

# Optimising all kernels together takes minutes.
OPTIONS = ("-O0", *emulated_plans.SANITIZED)
THREADS = 32


class Request(NamedTuple):
    """What a kernel is compiled from."""

    source: Source
    name: str
    arch: str = "sm_90"


class Emulated:
    """Functions whose calls of lanes are emulated, by one program.

    Parameters
    ----------
    traced
        The functions as jaxprs, by name.
    lock
        A file that processes lock which would build the same program.
    threads
        How many threads evaluate a lane.
    backwards
        Whether threads get their turns in the opposite order.
    """

    def __init__(self, traced, lock, threads=1, *, backwards=False):
        self._traced, self._threads, self.backwards = traced, threads, backwards
        kernels = {}
        for closed in traced.values():
            for kernel in self._kernels(closed.jaxpr):
                kernels.setdefault(kernel.text, kernel)
        self._numbers = {text: i for i, text in enumerate(kernels)}
        include = '#include "lanes.cuh"\n' if threads == 1 else '#include "lane_groups.cuh"\n'
        text = include + "\n".join(
            re.sub(rf"\b{kernel.function}\(", f"lanes_{i}(", kernel.text.replace(include, ""))
            for i, kernel in enumerate(kernels.values())
        )
        self._requests = [
            Request(Source(text), f"tilekern::lanes_{i}<{self._of_cta(kernel)[0]}>")
            for i, kernel in enumerate(kernels.values())
        ]
        with FileLock(lock):
            emulated_plans.build(self._requests, *OPTIONS)

    def __call__(self, name, *args):
        """Return the leaves of a function's results."""
        closed = self._traced[name]
        return self._evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args))

    def kernels(self, name):
        """Return the kernels of a function."""
        return list(self._kernels(self._traced[name].jaxpr))

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

    def _of_cta(self, kernel):
        """Return the threads and the lanes of a CTA."""
        if self._threads > 1:
            return self._threads, 1
        if kernel.shared_bytes:
            return THREADS_WITH_ROWS, LANES_WITH_ROWS
        return THREADS, THREADS

    def _run(self, eqn, operands):
        kernel = self._kernel(eqn)
        threads, lanes = self._of_cta(kernel)
        results = [x.aval for x in eqn.outvars]
        dims = [*map(np.ndim, operands), *(x.ndim for x in results)]
        orders = kernel.orders or [tuple(range(n)) for n in dims]
        of_results = orders[len(operands) :]
        operands = [np.transpose(x, order) for x, order in zip(operands, orders, strict=False)]
        outputs = [
            (tuple(x.shape[d] for d in order), x.dtype)
            for x, order in zip(results, of_results, strict=True)
        ]
        request = self._requests[self._numbers[kernel.text]]
        launch = SimpleNamespace(
            entry=SimpleNamespace(name=request.name, cubin=b""),
            grid=(math.ceil(kernel.lanes / lanes), 1, 1),
            block=(threads, 1, 1),
            cluster=(1, 1, 1),
            shared_memory_bytes=kernel.shared_bytes,
            repeats=(),
            parameters=[*map(Buffer, range(len(operands) + len(outputs) + 1))],
        )
        workspace = max(1, kernel.workspace_bytes)
        plan = SimpleNamespace(name=request.name, launches=(launch,), workspace_bytes=(workspace,))
        found = emulated_plans.run_plan(
            plan, {(request.name, b""): request}, operands, outputs, options=OPTIONS,
            requests=self._requests, backwards=self.backwards, late=("writes",),
        )  # fmt: skip
        return [np.transpose(x, np.argsort(y)) for x, y in zip(found, of_results, strict=True)]

    def _kernel(self, eqn):
        avals = [x.aval for x in eqn.invars]
        return write_kernel(avals, group=self._threads > 1, **parameters(eqn))

    def _kernels(self, jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "tilekern_lanes":
                yield self._kernel(eqn)
            elif eqn.primitive.name in ("jit", "pjit"):
                yield from self._kernels(eqn.params["jaxpr"].jaxpr)
