"""Tile kernels for JAX that compose with ``jit``, ``vmap``, ``grad`` and sharding."""

import pkgutil

# In a checkout, ``python -m jax_tilekern`` finds this folder before the installed package: the
# compiled module then comes from there.
__path__ = pkgutil.extend_path(__path__, __name__)

# JAX's own policies see the library's products: remat.py.
from jax import checkpoint_policies

from jax_tilekern import linalg, out_of_core, tuning
from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.epilogue.row_reductions import (
    row_logsumexp,
    row_max,
    row_quantize,
    row_sum,
)
from jax_tilekern.fusion.fuse import fuse
from jax_tilekern.inspection.cost import cost_analysis
from jax_tilekern.inspection.explain import Explanation, explain
from jax_tilekern.inspection.kernel_report import KernelReport
from jax_tilekern.interop.ffi import FFI_TARGETS, export_checks
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.interop.outcomes import FallbackError, strict
from jax_tilekern.interop.patch import patch
from jax_tilekern.ops.arrays.add import add
from jax_tilekern.ops.arrays.sum import sum
from jax_tilekern.ops.arrays.transpose import transpose
from jax_tilekern.ops.attention.attention import attention
from jax_tilekern.ops.attention.ring import ring_attention
from jax_tilekern.ops.convolution.causal_conv1d import causal_conv1d
from jax_tilekern.ops.cross_entropy.loss import linear_cross_entropy
from jax_tilekern.ops.cuda_kernel.cuda_kernel import CudaKernel, cuda_kernel, cxx_type
from jax_tilekern.ops.kernel.kernel import kernel
from jax_tilekern.ops.mixture.moe import Routing, moe, route
from jax_tilekern.ops.muon.muon import muon
from jax_tilekern.ops.products.fp8_dot_general import fp8_dot_general
from jax_tilekern.ops.products.linear import gated_linear, linear
from jax_tilekern.ops.products.matmul import dot_general, matmul, symmetric_matmul
from jax_tilekern.ops.products.overlapped import all_gather_matmul, matmul_reduce_scatter
from jax_tilekern.ops.products.quantized_weights import QuantizedWeights, quantize_weights
from jax_tilekern.ops.products.ragged_dot import ragged_dot, ragged_dot_general
from jax_tilekern.ops.products.scaled_matmul import scaled_matmul
from jax_tilekern.ops.products.scaled_ragged_dot import scaled_ragged_dot
from jax_tilekern.ops.products.strassen import strassen_matmul
from jax_tilekern.ops.products.tensor_products import einsum, inner, multi_dot, tensordot, vecdot
from jax_tilekern.ops.products.vector_products import dot, matvec, vdot, vecmat
from jax_tilekern.ops.quantisation.quantize import quantize
from jax_tilekern.ops.scans.associative_scan import associative_scan
from jax_tilekern.ops.scans.cumulative import cumlogsumexp, cummax, cummin, cumprod, cumsum
from jax_tilekern.ops.scans.linear_recurrence import linear_recurrence

# Loaded for what it replaces inside patch().
from jax_tilekern.ops.segments import jax_scatters as _jax_scatters  # noqa: F401
from jax_tilekern.ops.segments.functions import (
    segment_max,
    segment_mean,
    segment_min,
    segment_prod,
    segment_reduce,
    segment_sum,
)
from jax_tilekern.ops.segments.plan import SegmentPlan, segment_plan
from jax_tilekern.ops.segments.small_integers import bincount, sort_by_key
from jax_tilekern.ops.segments.take import scatter_add, take
from jax_tilekern.ops.selection.quantile import median, percentile, quantile
from jax_tilekern.ops.selection.searchsorted import digitize, searchsorted
from jax_tilekern.ops.selection.sort import argsort, sort
from jax_tilekern.ops.selection.sort_operands import lexsort, sort_operands
from jax_tilekern.ops.selection.top_k import top_k
from jax_tilekern.ops.selection.unique import unique
from jax_tilekern.plans.gpu import Gpu, NoGpu
from jax_tilekern.plans.launch import TensorMap
from jax_tilekern.plans.policy import policy
from jax_tilekern.tuning.tuner import tune

__version__ = "0.1.0"

__all__ = [
    "FFI_TARGETS",
    "CompileError",
    "CudaKernel",
    "Explanation",
    "FallbackError",
    "Gpu",
    "KernelReport",
    "NoGpu",
    "QuantizedWeights",
    "Routing",
    "SegmentPlan",
    "TensorMap",
    "add",
    "all_gather_matmul",
    "argsort",
    "associative_scan",
    "attention",
    "bincount",
    "causal_conv1d",
    "checkpoint_policies",
    "cost_analysis",
    "cuda_kernel",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "cxx_type",
    "digitize",
    "dot",
    "dot_general",
    "einsum",
    "explain",
    "export_checks",
    "fp8_dot_general",
    "fuse",
    "gated_linear",
    "gpu_target",
    "inner",
    "kernel",
    "lexsort",
    "linalg",
    "linear",
    "linear_cross_entropy",
    "linear_recurrence",
    "matmul",
    "matmul_reduce_scatter",
    "matvec",
    "median",
    "moe",
    "multi_dot",
    "muon",
    "out_of_core",
    "patch",
    "percentile",
    "policy",
    "quantile",
    "quantize",
    "quantize_weights",
    "ragged_dot",
    "ragged_dot_general",
    "ring_attention",
    "route",
    "row_logsumexp",
    "row_max",
    "row_quantize",
    "row_sum",
    "scaled_matmul",
    "scaled_ragged_dot",
    "scatter_add",
    "searchsorted",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_plan",
    "segment_prod",
    "segment_reduce",
    "segment_sum",
    "sort",
    "sort_by_key",
    "sort_operands",
    "strassen_matmul",
    "strict",
    "sum",
    "symmetric_matmul",
    "take",
    "tensordot",
    "top_k",
    "transpose",
    "tune",
    "tuning",
    "unique",
    "vdot",
    "vecdot",
    "vecmat",
]


def __dir__() -> list[str]:
    """List the public names, and no modules of the implementation."""
    return sorted((*__all__, "__version__"))
