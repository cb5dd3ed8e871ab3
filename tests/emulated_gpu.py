"""A GPU that this machine lacks: functions of the library with its kernels, emulated on the CPU.

Inside ``emulated_gpu()`` a function that is lowered for the CPU is planned as for the GPU, and each
launch plan runs by :mod:`emulated_plans`.
"""

import contextlib
import dataclasses

import emulated_plans
import jax
import numpy as np
import pytest
from jax._src import config
from jax.interpreters import mlir
from products import H100

import jax_tilekern as jtk
from jax_tilekern.interop import ffi
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops import planned_kernel
from jax_tilekern.primitives import operation

# Few CTAs have several tiles each.
SMALL_H100 = dataclasses.replace(H100, sm_count=4)
# Orders in which asynchronous operations take place.
HOWS = [{}, {"late": ["reads"], "backwards": True}, {"late": ["writes"], "held": 4}]
# How kernels are emulated: ``how`` of :func:`emulated_plans.run_plan`.
in_each_mode = pytest.mark.parametrize(
    "how",
    [
        {"late": ["reads"], "backwards": True},
        {"late": ["writes"]},
        {"options": emulated_plans.SANITIZED},
    ],
    ids=["late reads", "late writes", "sanitized"],
)


@contextlib.contextmanager
def emulated_gpu(gpu=SMALL_H100, *, policy="kernels", **how):
    """Plan for a GPU, and emulate its kernels; yield the list of plans that have run.

    ``how`` is passed to :func:`emulated_plans.run_plan`.
    """
    ran = []
    outcome, launch = operation._outcome, ffi.cuda_launch

    def cuda_outcome(op, platform, *rest, **params):
        return outcome(op, "cuda" if platform == "cpu" else platform, *rest, **params)

    def emulated_launch(ctx, operands, plan, *, aliases=None, scratch=(), checked=False):
        avals = (*ctx.avals_out, *scratch)

        def run(*arrays):
            ran.append(plan)
            shapes = [(aval.shape, aval.dtype) for aval in avals]
            arrays = [np.asarray(x) for x in arrays]
            assert [x.dtype for x in arrays] == [aval.dtype for aval in inputs]
            return emulated_plans.run_plan(
                plan, recorded, arrays, shapes, aliases=aliases or {}, **how
            )

        def call(*arrays):
            results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            return jax.pure_callback(run, results, *arrays)

        inputs = [_aval(operand.type) for operand in operands]
        inner = ctx.replace(avals_in=inputs, avals_out=list(avals))
        values = mlir.lower_fun(call, multiple_results=True)(inner, *operands)
        return values[: len(ctx.avals_out)]

    with (
        emulated_plans.record() as recorded,
        jtk.policy(policy),
        gpu_target(gpu),
        jax.enable_x64(jax.config.jax_enable_x64),
    ):
        planned_kernel._plan_once.cache_clear()
        operation._outcome, ffi.cuda_launch = cuda_outcome, emulated_launch
        # XLA calls back on threads of its own, which have no context of this one.
        of_threads = config.enable_x64.get_global()
        jax.config.update("jax_enable_x64", True)
        try:
            yield ran
        finally:
            jax.config.update("jax_enable_x64", of_threads)
            operation._outcome, ffi.cuda_launch = outcome, launch
            jax.clear_caches()


_TYPES = (
    "float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int16",
    "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip


def _aval(type_):
    for dtype in map(jax.numpy.dtype, _TYPES):
        if mlir.dtype_to_ir_type(dtype) == type_.element_type:
            return jax.core.ShapedArray(tuple(type_.shape), dtype)
    raise TypeError(f"no type of NumPy for {type_}")
