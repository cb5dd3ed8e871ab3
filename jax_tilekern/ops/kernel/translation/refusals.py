"""Why primitives of JAX have no translation: for errors, and for the table of the documentation."""

from __future__ import annotations

_NAMES_BY_REASON = {
    "a lane cannot call Python; solvers of diffrax, optimistix and lineax report errors by such "
    "calls unless they get throw=False, and equinox.error_if unless EQX_ON_ERROR is nan or off": (
        "pure_callback"
    ),
    "a kernel has no side effects": (
        "check debug_callback debug_print inspect_sharding io_callback"
    ),
    "lanes do not exchange values": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced "
        "all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start "
        "axis_index pbroadcast pmax pmin ppermute ppermute_done ppermute_start precv preduced "
        "psend psum psum_done psum_invariant psum_invariant_start ragged_all_to_all "
        "reduce_scatter reduce_scatter_done reduce_scatter_start reduced_vary_cast_p "
        "unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter "
        "vary_unreduced_cast_p"
    ),
    "a lane has no devices or memory spaces": (
        "layout_constraint relayout reshard shard_map sharding_constraint "
        "with_memory_space_constraint"
    ),
    "a lane has no references to mutable arrays; carry the array through the loop": (
        "accum_grad_in_ref addupdate broadcast_to create_linear empty_ref free_ref freeze get "
        "new_ref pin run_state swap unpin"
    ),
    "vmap draws for a whole batch by the key of its first element, so that the draws of a lane "
    "depend on other lanes; use threefry2x32 or philox4x32 keys": "rng_bit_generator",
    "it has no key, so nothing determines its draws": "rng_uniform",
    "it has no implementation in a lane": (
        "cholesky_update eig geqp3 geqrf hessenberg householder_product ormqr schur "
        "symmetric_product tridiagonal"
    ),
    "a lane has no windows or convolutions": (
        "conv_general_dilated reduce_window reduce_window_max reduce_window_min reduce_window_sum "
        "select_and_gather_add select_and_scatter select_and_scatter_add"
    ),
    "a lane has no products of groups, nor of types with scales; use dot_general": (
        "ragged_dot_general scaled_dot scaled_matmul scaled_matmul_wrapper"
    ),
    "vmap has no rule for it": "composite linear_call",
    "it approximates; use top_k": "approx_top_k",
    "it calls a program or a kernel of its own": (
        "call_exported call_hi_primitive call_hi_primitive_linearized cudnn_fusion "
        "custom_partitioning dot_product_attention_bwd dot_product_attention_bwd_wrapper "
        "dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper "
        "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper "
        "dot_product_attention_fwd dot_product_attention_fwd_wrapper ffi_call"
    ),
    "a kernel needs every size": "dim_as_value dimension_size shape_assertion",
    "no traced function of arrays has it": (
        "after_all create_token custom_jvp_call_jaxpr custom_lin dce_sink from_edtype "
        "program_order remat_opt stage to_edtype unreachable zeros_like"
    ),
}
REASONS = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names.split()}


def refusal(name: str) -> str:
    """Return the message about a primitive that has no translation."""
    return f"no CUDA for {name}" + (f": {REASONS[name]}" if name in REASONS else "")
