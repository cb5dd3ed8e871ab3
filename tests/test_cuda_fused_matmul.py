"""Products with epilogues: plans, compiled kernels, staged operands, and values on a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from candidate_calls import run
from compiled_text import compile_source
from fused_products import epilogue_of
from nvrtc_mark import needs_gpu, require_nvrtc
from products import BF16, F16, F32, H100, MODERN, product_of

import jax_tilekern as jtk
from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.select import candidates, plan_matmul
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel

require_nvrtc()

A100 = next(gpu for gpu in MODERN if gpu.arch == "sm_80")


def gelu(y, bias):
    return jax.nn.gelu(y + bias)


def residual_block(y, bias, mask, residual):
    return residual + jnp.where(mask, jax.nn.silu(y + bias), 0)


def shapes(m, n, k, dtype=jnp.bfloat16):
    x, w = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    bias, mask = jax.ShapeDtypeStruct((n,), dtype), jax.ShapeDtypeStruct((m, n), bool)
    return x, w, bias, mask, jax.ShapeDtypeStruct((m, n), dtype)


def lowered(function, *args, gpu="sm_90"):
    with jtk.gpu_target(gpu):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Operations of the program that compute something."""
    found = re.findall(r"= \"?(stablehlo\.\w+)", text)
    return [name for name in found if name not in ("stablehlo.return",)]


# ptxas of CUDA 13.0 spills registers of every kernel of sm_80 with this epilogue.
GPUS = ["sm_80", "sm_90"] if nvrtc().version >= (13, 5) else ["sm_90"]


@pytest.mark.parametrize("gpu", GPUS)
def test_a_layer_is_one_kernel(gpu):
    def layer(x, w, *operands):
        return jtk.matmul(x, w, epilogue=residual_block, operands=operands)

    assert calls(lowered(layer, *shapes(1024, 768, 512), gpu=gpu)) == ["stablehlo.custom_call"]


def test_the_gradient_is_products_and_one_pass():
    def loss(x, w, bias):
        out = jtk.matmul(x, w, epilogue=gelu, operands=(bias,))
        return out.astype(np.float32).sum()

    text = lowered(jax.grad(loss, (0, 1)), *shapes(1024, 768, 512)[:3])
    # The layer with its pre-activation, and a product for each factor's gradient.
    assert calls(text).count("stablehlo.custom_call") == 3
    assert "stablehlo.dot_general" not in text


def test_results_in_the_memory_of_operands():
    def aliases(function, *args):
        return lowered(function, *args).count("output_operand_alias<")

    # In 16 bits, one kernel may compute both products of gated_linear. In float32, two do.
    x, w = shapes(1024, 768, 512)[:2]
    assert aliases(jtk.gated_linear, *(a.update(dtype=np.float32) for a in (x, w, w))) == 1
    assert aliases(jax.grad(lambda *xs: jtk.gated_linear(*xs).sum()), x, w, w) == 0

    def call(x, w, operand, in_place=((0, 0),)):
        return contract_with_epilogue(
            x, w, contraction=Contraction((0, 1), (1, 2), (0, 2)), precision=None,
            product=np.dtype(BF16),
            shape=(512, 512), epilogue=jnp.add, operands=(operand,), in_place=in_place,
        )  # fmt: skip

    square = jax.ShapeDtypeStruct((512, 512), BF16)
    assert aliases(call, square, square, square) == 1
    assert aliases(jax.vmap(call, (0, None, 0)), *batched(square, square, square)) == 1
    # Another type, no mapped axis, a mapped axis elsewhere, and factors of the same product.
    assert aliases(call, square, square, square.update(dtype=np.float32)) == 0
    assert (
        aliases(jax.vmap(call, (0, None, None)), *batched(square, square, square)[:2], square) == 0
    )
    moved = jax.ShapeDtypeStruct((512, 4, 512), BF16)
    assert aliases(jax.vmap(call, (0, None, 1)), *batched(square, square)[:1], square, moved) == 0
    assert aliases(lambda x, w: call(x, w, x), square, square) == 0
    assert aliases(lambda x, w: call(x.T, w, x), square, square) == 0


def batched(first, second, *others):
    """Types of operands of which all but the second have 4 elements of a batch."""
    mapped = [x.update(shape=(4, *x.shape)) for x in (first, *others)]
    return [mapped[0], second, *mapped[1:]]


EPILOGUES = {
    "gelu": lambda n: epilogue_of(gelu, (BF16, "n")),
    "silu": lambda n: epilogue_of(jax.nn.silu),
    "residual": lambda n: epilogue_of(
        residual_block, (BF16, "n"), (np.bool_, "mn"), (BF16, "mn"), n=n
    ),
    "scaled": lambda n: epilogue_of(lambda y, m, n: y * m * n, (F32, "m"), (F32, "n")),
    "in 16 bits": lambda n: epilogue_of(
        lambda y, bias: jax.nn.silu(y.astype(BF16) + bias), (BF16, "n")
    ),
    "cast": lambda n: epilogue_of(lambda y, m: jnp.exp(y - m).astype(BF16), (F32, "m")),
}


@pytest.mark.parametrize("sizes", [(8192, 4096, 4096), (1000, 1016, 1024), (100, 77, 333)])
@pytest.mark.parametrize("gpu", [H100, A100], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.one_in(9)
def test_plans_spill_no_registers_and_serialize_no_mma(name, gpu, sizes):
    product = product_of("bf16", *sizes).with_epilogue(EPILOGUES[name](sizes[1]))
    plan = plan_matmul(product, gpu)
    if isinstance(plan, NoKernel):
        # Kernels of sm_80 have few registers left, and the epilogue then runs in XLA.
        assert gpu.arch == "sm_80"
        return
    # On Hopper some versions of ptxas spill a few words, for which the choice counts little.
    few = 64 if gpu is H100 else 0
    for launch in plan.launches:
        assert launch.entry.spill_bytes <= few
        assert not launch.entry.serialized
    assert len(plan.alignments) == 3 + len(product.epilogue.operands)


@pytest.mark.parametrize(
    ("arithmetic", "kernel"),
    [
        ("f32", "split_float16"),
        ("tf32", "wgmma"),
        ("f64", "mma"),
        ("int8", "wgmma"),
        ("fp8_fast", "wgmma"),
    ],
)
@pytest.mark.one_in(3)
def test_every_arithmetic_takes_an_epilogue(x64, arithmetic, kernel):
    dtypes = {"f64": np.float64, "int8": np.int32}
    dtype = np.dtype(dtypes.get(arithmetic, np.float32))
    product = product_of(arithmetic, 1024, 1024, 1024)
    epilogue = epilogue_of(
        lambda y, bias: jnp.maximum(y + bias, 0), (dtype, "n"), out=dtype, accumulator=dtype
    )
    plan = plan_matmul(product.with_epilogue(epilogue), H100)
    assert plan.name.startswith(kernel)
    assert not any(launch.entry.serialized for launch in plan.launches)
    plain = candidates(product, H100)
    fused = candidates(product.with_epilogue(epilogue), H100)
    assert {c.key for c in fused} <= {c.key for c in plain}


def test_split_k_applies_it_once():
    product = product_of("bf16", 64, 512, 16384)
    fused = product.with_epilogue(EPILOGUES["gelu"](512))
    plan = plan_matmul(fused, H100)
    *first, last = plan.launches
    assert "sum_splits" in last.entry.name
    assert "GeneratedEpilogue" in last.entry.name
    assert all("GeneratedEpilogue" not in launch.entry.name for launch in first)


def test_explain_names_what_is_not_translated():
    def f(y):
        return jax.lax.bessel_i1e(y)

    x, w = shapes(1024, 768, 512)[:2]
    with jtk.gpu_target("sm_90"):
        first, second = jtk.explain(
            lambda x, w: jtk.matmul(x, w, epilogue=f), x, w, platform="cuda"
        )
    assert first.kernel is None
    assert re.search(
        r"in XLA, after the product: no CUDA for bessel_i1e, at .*test_cuda_fused", first.reason
    )
    assert first.call == "contract mk,kn->mn, f(accumulator)"
    assert second.kernel == "wgmma_matmul bf16"


# -- The table of primitives. ----------------------------------------------------------------------

_ONE, _TWO = (np.float32, np.float64, np.int32, np.int8, np.uint64), (1, 2)
FUNCTIONS = [
    "neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc",
    "erf_inv", "lgamma", "digamma", "sqrt", "rsqrt", "cbrt", "floor", "ceil", "round", "is_finite",
    "square", "add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "eq",
    "lt", "bitwise_not", "bitwise_and", "shift_left", "shift_right_arithmetic", "population_count",
    "clz",
]  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.one_in(2)
def test_every_function_compiles_for_every_type(x64, arch):
    """One translation unit, with a function of each primitive and type that JAX traces."""
    texts = []
    for name in FUNCTIONS:
        for dtype in _ONE:
            function = getattr(jax.lax, name)
            for operands in _TWO:
                try:
                    traced = trace_scalars(
                        lambda y, *xs, f=function: f(*xs), F32, F32, [np.dtype(dtype)] * operands
                    )
                except (TypeError, ValueError):
                    continue
                text = cuda_text(traced.function)
                kind = computed_type(np.dtype(dtype))
                parameters = ", ".join(f"{kind} x{i + 1}" for i in range(operands))
                body = "\n".join(text.statements)
                texts.append(
                    f"__device__ void f{len(texts)}(float x0, {parameters}, double* out) {{\n"
                    f"{body}\n*out += static_cast<double>({text.results[0]}); }}"
                )
    assert len(texts) > 2 * len(FUNCTIONS)
    source = '#include "scalar_functions.cuh"\nusing namespace tilekern;\n' + "\n".join(texts)
    source += "\n__global__ void nothing() {}\n"
    assert compile_source(source, ["nothing"], arch=arch).log == ""


def test_literals_are_exact():
    values = [0.1, -0.0, 1e-45, 3.4028235e38, float("inf"), float("-inf")]

    def f(y):
        for value in values:
            y = y + np.float32(value)
        return y

    text = " ".join(cuda_text(trace_scalars(f, F32, F32, []).function).statements)
    assert float(np.float32(0.1)).hex() in text
    assert "-0x0.0p+0" in text
    assert text.count("__int_as_float(0x7f800000)") == 2


def test_loops_are_untranslatable():
    def until(y):
        return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[1], c[0] + 1), (y, y))[0]

    def counted(y):
        return jax.lax.fori_loop(0, 3, lambda _, y: 2 * y, y)

    for loop, name in ((until, "while"), (counted, "scan")):
        with pytest.raises(Untranslatable, match=rf"no CUDA for {name}, at .*\.py:\d+"):
            cuda_text(trace_scalars(loop, F32, F32, []).function)


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
def test_no_register_of_staged_operands_is_spilled(sizes, types):
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
