"""Faults of rules, each with the test of ``test_derived.py`` that catches it.

``python tests/planted_faults.py`` plants each in a temporary copy of the tree and runs the test
there; it prints which are caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# File, text, and what takes its place; the transformation and the operation of the test, and the
# number of its draw, which is 0 if it is left out.
FAULTS = [
    ("primitives/linearity.py", "if all(type(tangents[i]) is ad.Zero",
     "if any(type(tangents[i]) is ad.Zero", "jvp", "add"),
    ("ops/arrays/add.py", "else jnp.moveaxis(x, dim, mapped)",
     "else x", "vmap", "add"),
    ("ops/arrays/sum.py", "axis + (axis >= mapped) for axis in axes",
     "axis for axis in axes", "vmap", "sum"),
    ("ops/arrays/sum.py", "mapped - len([axis for axis in shifted if axis < mapped])",
     "mapped", "vmap", "sum"),
    ("ops/arrays/sum.py", "kept = tuple(dim for dim in dims if dim not in axes)",
     "kept = dims[: x.ndim - len(axes)]", "sharded", "sum"),
    ("ops/arrays/transpose.py", "axes=tuple(map(axes.index, range(len(axes))))",
     "axes=axes", "vjp", "transpose"),
    ("ops/arrays/transpose.py", "(mapped, *(axis + (axis >= mapped) for axis in axes))",
     "(mapped, *(axis + 1 for axis in axes))", "vmap", "transpose"),
    ("ops/arrays/transpose.py", "rule_over_axes(((dims, x.shape),), axes, flops=0)",
     "rule_over_axes(((dims, x.shape),), dims, flops=0)", "sharded", "transpose"),
    ("ops/scans/linear_recurrence.py", "jnp.moveaxis(x, dim, place)", "x", "vmap",
     "linear_recurrence"),
    ("ops/scans/linear_recurrence.py", "is_before=not is_before", "is_before=is_before", "vjp",
     "linear_recurrence"),
    ("ops/scans/cumulative.py", "reverse=not reverse", "reverse=reverse", "vjp", "cumsum"),
    ("ops/scans/cumulative.py", "return x, before", "return before, x", "jvp", "cumprod"),
    ("ops/products/contraction.py", "factors[operand] = (cotangent, c.out)",
     "factors[operand] = (2 * cotangent, c.out)", "vjp", "matmul"),
    ("ops/products/contraction.py", "if operand == 0 and c.ragged_dimension == \"k\":",
     "if False:", "vjp", "ragged_dot_general"),
    ("ops/products/vector_products.py", "a = jnp.conj(a) if", "a = a if", "complex", "vdot"),
    ("ops/products/vector_products.py", "(jnp.conj(x1) if", "(x1 if", "complex", "vecmat"),
    ("ops/linalg/matrices.py", "[-product(x, product(tangents[0], x))]",
     "[product(x, product(tangents[0], x))]", "jvp", "linalg.inv"),
    ("ops/linalg/matrices.py", "product(_transposed_if(a_dot, transpose), x)",
     "product(a_dot, x)", "second order", "linalg.solve"),
    ("ops/linalg/matrices.py", "off_diagonal = int(unit_diagonal)",
     "off_diagonal = 0", "jvp", "linalg.solve_triangular"),
    ("ops/linalg/matrices.py", "jnp.tril(inner) / (1 + jnp.eye(a.shape[-1], dtype=a.dtype))",
     "jnp.tril(inner)", "vjp", "linalg.cholesky"),
    ("ops/linalg/matrices.py", "product(lower, jnp.tril(inner, -1)) +", "", "jvp", "linalg.lu"),
    ("ops/linalg/matrices.py", "{**params, \"transpose\": not params[\"transpose\"]}",
     "params", "vjp", "linalg.solve"),
    ("ops/linalg/matrices.py", "at = a.ndim if left_side else a.ndim - 2",
     "at = a.ndim - 1 if left_side else a.ndim - 2", "vmap", "linalg.solve"),
    ("ops/linalg/matrices.py", "moves.append(-change(a_dot, x, **params))",
     "pass", "jvp", "linalg.solve"),
    ("ops/linalg/decompositions.py", "u_dot, v_dot.mT]", "u_dot, v_dot]", "jvp", "linalg.svd"),
    ("ops/linalg/decompositions.py", "by_row + by_row.mT", "by_row - by_row.mT", "vjp",
     "linalg.svd"),
    ("ops/linalg/decompositions.py", "w[..., None, :] - w[..., :, None]",
     "w[..., :, None] - w[..., None, :]", "jvp", "linalg.eigh"),
    ("ops/linalg/decompositions.py", "skew = below - below.mT", "skew = below", "jvp", "linalg.qr"),
    ("ops/linalg/matrix_functions.py", "-inner + left", "inner + left", "vjp", "linalg.pinv"),
    ("ops/products/contraction.py", "labelled(own, new, dim)",
     "labelled(own, new, None)", "vmap", "matmul, epilogue"),
    ("ops/products/epilogues.py", "(pre_activation, *read), (changed, *moved))",
     "(pre_activation, *read), (changed, *map(compat.zero_tangent, read)))",
     "jvp", "matmul, epilogue"),
    ("ops/segments/derivatives.py", "if aval.shape[i] == 1 and n != 1",
     "if False", "vjp", "segment_reduce"),
    ("ops/segments/derivatives.py", "is None else g + 1 for i in known",
     "is None else g for i in known", "vjp", "segment_reduce"),
    ("ops/segments/reduce.py", "own + first_of_batches(size, rows), -1",
     "own, -1", "vmap", "segment_reduce"),
    ("ops/segments/reduce.py", "own + first_of_batches(size, rows), -1",
     "own, -1", "nested vmap", "segment_reduce"),
    ("ops/along_axis.py", "jnp.moveaxis(x, dim, place), **params", "x, **params", "vmap", "top_k"),
    ("ops/along_axis.py", "else jnp.moveaxis(x, dim, place)", "else x", "vmap", "sort_operands"),
    ("ops/along_axis.py", "-1 if axis is None else params[axis]", "-1", "sharded values",
     "sort_operands"),
    ("ops/products/scaled_call.py", "has_axis = any(mapped[i] for i in group)",
     "has_axis = mapped[group[0]]", "vmap", "scaled_matmul"),
    ("ops/selection/top_k.py",
     "jnp.take_along_axis(tangents[0], indices, -1, mode=\"promise_in_bounds\")",
     "tangents[0][..., :k]", "jvp", "top_k"),
    ("ops/along_axis.py", "params[axis] += place <= params[axis]", "pass", "vmap",
     "sort_operands"),
    ("ops/segments/take.py", "cotangent, *placed, reduction=\"sum\"",
     "2 * cotangent, *placed, reduction=\"sum\"", "vjp", "take"),
    ("ops/cross_entropy/primitives.py", "for x, dot in moved)]",
     "for x, dot in moved[1:])]", "jvp", "linear_cross_entropy, mean"),
    ("ops/products/fp8_dot_general.py", "if call.rhs_first else (along_m, left)",
     "if not call.rhs_first else (along_m, left)", "vjp", "fp8_dot_general"),
    ("ops/kernel/rules.py", "sums = (jnp.sum(x, axes) if axes",
     "sums = (jnp.max(x, axes) if axes", "vjp", "kernel"),
    ("ops/linalg/functions.py", "(jnp.zeros_like(sign), trace)",
     "(jnp.zeros_like(sign), -trace)", "jvp", "linalg.slogdet"),
    ("ops/linalg/functions.py", ".at[..., -1].set(others)",
     ".at[..., -1].set(determinant)", "jvp", "linalg.det"),
    ("ops/segments/keys.py", "if clip and segments:", "if False:", "eager", "segment_mean"),
    ("ops/segments/keys.py", "jnp.where(numbers < 0, numbers + rows, numbers)", "numbers",
     "eager", "segment_reduce"),
    ("ops/segments/take.py", "indices = indices % rows", "pass", "eager", "take", 1),
    ("ops/segments/take.py", "mode=\"clip\" if mode == \"clip\" else \"drop\"",
     "mode=\"drop\"", "eager", "take"),
    ("ops/linalg/functions.py", "return factor.mT if upper else factor", "return factor",
     "eager", "linalg.cholesky", 1),
    ("ops/linalg/functions.py", "transpose=transpose_a,", "transpose=False,",
     "eager", "linalg.triangular_solve"),
    ("ops/products/scaled_product.py", "linear_in = ((2,), (3,))", "linear_in = ((2,),)",
     "jvp", "scaled_matmul, epilogue"),
    ("ops/products/weight_product.py", "if not self.has_zeros or", "if True or",
     "jvp", "scaled_ragged_dot, weights"),
    ("ops/products/weight_product.py", "slopes = of_elements(scales, w) * -jnp",
     "slopes = of_elements(scales, w) * jnp", "vjp", "scaled_ragged_dot, weights"),
    ("ops/products/weight_product.py", "y if i == operand else each", "each",
     "vjp", "scaled_ragged_dot, weights"),
    ("ops/quantisation/quantize.py", "jnp.expand_dims(scales, axis + 1), (*leading",
     "jnp.expand_dims(jnp.flip(scales, axis), axis + 1), (*leading", "eager", "scaled_matmul"),
    ("ops/products/fp8_dot_general.py", "moved = jnp.transpose(x, (*batch, *parts[0], *parts[1]))",
     "moved = x", "eager", "fp8_dot_general"),
    ("ops/products/fp8_dot_general.py", "_Copies(transposed, last) if first else",
     "_Copies(last, transposed) if first else", "vjp", "fp8_dot_general", 1),
    ("ops/products/groups.py", "jnp.clip(bounds - shard.start(ragged), 0",
     "jnp.clip(bounds, 0", "sharded values", "ragged_dot, epilogue"),
    ("ops/products/groups.py", "jnp.clip(bounds - shard.start(ragged), 0",
     "jnp.clip(bounds, 0", "sharded", "ragged_dot, epilogue"),
    ("partitioning/local_program.py", "largest = lax.pmax(reordered(",
     "largest = lax.pmin(reordered(", "sharded values", "row_max"),
    ("partitioning/local_program.py", "x, axis_names(axes), scatter_dimension=dim, tiled=True)",
     "2 * x, axis_names(axes), scatter_dimension=dim, tiled=True)",
     "sharded", "matmul, epilogue", 1),
    ("ops/products/epilogues.py", "(pre_activation, *read), (changed, *moved))",
     "(pre_activation, *read), (changed, *map(compat.zero_tangent, read)))",
     "sharded second order", "matmul, epilogue"),
    ("ops/products/contraction.py", "rounded = call.multiply(lhs, right[1]",
     "rounded = call.multiply(lhs, right[0]", "vmap", "moe, biases"),
    ("ops/products/contraction.py", "rounded = call.multiply(lhs, right[1]",
     "rounded = call.multiply(lhs, right[0]", "second order", "gated_linear"),
    ("ops/products/epilogues.py", "kind if isinstance(kind, str) else \"sum\"", "\"sum\"",
     "sharded vmap", "row_logsumexp"),
]  # fmt: skip


def passes(tree: Path, *tests: tuple) -> bool:
    """Whether tests pass, each a transformation, an operation, and perhaps a draw."""
    names = [
        f"tests/test_derived.py::test_derived[{(*draw, 0)[0]}-{case}-{name}]"
        for case, name, *draw in tests
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        *names,
    ]
    # JAX's cache of programs does not know the rules by which it splits a call over devices.
    env = os.environ | {"PYTHONPATH": ".", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=env)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.returncode == 0


def caught(tree: Path, file: str, old: str, new: str, *test: str | int) -> bool:
    """Whether the test fails with the fault."""
    path = tree / "jax_tilekern" / file
    text = path.read_text()
    assert old in text, f"{file} has no {old!r}"
    path.write_text(text.replace(old, new))
    found = not passes(tree, test)
    path.write_text(text)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("jax_tilekern", "benchmarks", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / part, tree / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        assert passes(tree, *{tuple(test) for _, _, _, *test in FAULTS}), (
            "tests fail without a fault"
        )
        missed = 0
        for fault in FAULTS:
            found = caught(tree, *fault)
            missed += not found
            print("caught" if found else "not caught", *fault, sep=" | ", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults are caught")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
