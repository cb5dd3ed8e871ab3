"""``policy()``, and what decides between kernels and XLA's operations."""

import json
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tilekern as jtk
from jax_tilekern.plans.gemm import select
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.policy import choose, model
from jax_tilekern.plans.policy.model import (
    DeviceModel,
    Forest,
    OperationModel,
    model_of,
    scaled_model,
)
from jax_tilekern.plans.policy.workload import Workload
from jax_tilekern.plans.quantize import QuantizeCandidate

pytestmark = pytest.mark.defaults

H100 = "NVIDIA H100 80GB HBM3"
X = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def choice_of(function, *operands, arch="sm_90"):
    with jtk.gpu_target(arch):
        (choice,) = jtk.explain(function, *operands, platform="cuda")
    return choice


def lowered(function, *operands, arch="sm_80"):
    """The program that XLA gets for a GPU, whose own operation computes the call."""
    with jtk.gpu_target(arch):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("function", [jtk.matmul, jtk.add])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_a_gpu_without_data_is_xlas(function, arch):
    choice = choice_of(function, X, X, arch=arch)
    assert choice.kernel is None
    if function is jtk.matmul:
        assert "no times on NVIDIA" in choice.reason
        assert 'policy("kernels")' in choice.reason


def test_what_xla_lacks_has_kernels_everywhere():
    rows = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
    experts = jax.ShapeDtypeStruct((8, 128, 256), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    assert choice_of(jtk.ragged_dot, rows, experts, sizes, arch="sm_80").kernel
    gelu = partial(jtk.matmul, epilogue=jax.nn.gelu)
    assert choice_of(gelu, X, X, arch="sm_80").kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_is_taken_where_it_is_asked_for(arch):
    with jtk.policy("kernels"):
        column_sums = partial(jtk.sum, axis=0)
        for function, operands in ((jtk.matmul, (X, X)), (column_sums, (X,)), (jtk.add, (X, X))):
            assert choice_of(function, *operands, arch=arch).kernel
    with jtk.policy("xla"):
        choice = choice_of(jtk.matmul, X, X, arch=arch)
    assert choice.kernel is None
    assert choice.reason == 'jax_tilekern.policy("xla") takes XLA\'s operation'


def test_a_policy_holds_for_its_thread():
    found = []
    with jtk.policy("kernels"):
        thread = threading.Thread(target=lambda: found.append(choice_of(jtk.add, X, X).kernel))
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.parametrize(("us", "by_library", "is_kernels"), [
    (4.5, False, True), (3.5, False, False), (3.5, True, True), (2.9, True, False),
])  # fmt: skip
def test_a_custom_call_begins_later_than_xlas_fusions(us, by_library, is_kernels):
    gpu = known_gpu("NVIDIA H200")
    candidate = QuantizeCandidate(None, 3.0 * gpu.rates.cycles_per_microsecond)
    workload = Workload("quantize", 0, 0, "", (), estimate=us, by_library=by_library)
    choice = choose(workload, [candidate], gpu)
    assert (choice.candidate is not None) == is_kernels
    assert choice.predicted_us.ours == pytest.approx(3.0 if by_library else 4.1)


@pytest.mark.parametrize(("rows", "kernel"), [(16, None), (16384, "quantize bfloat16")])
def test_small_arrays_are_quantised_by_xla(rows, kernel):
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    assert choice_of(jtk.quantize, x, arch="H200").kernel == kernel


def test_outer_products_with_functions_are_xlas():
    column, row = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 1), (1, 512)))
    choices = jtk.explain(jtk.gated_linear, column, row, row, platform="cuda")
    assert {x.kernel for x in choices} == {None}


@pytest.mark.parametrize(("k", "is_kernels"), [(37, False), (128, True)])
def test_small_scaled_products_with_packed_operands_are_xlas(k, is_kernels):
    operands = [jax.ShapeDtypeStruct((128, k), jnp.float8_e4m3fn)] * 2
    scales = [jax.ShapeDtypeStruct((128, 1), jnp.float32)] * 2
    for more in ({}, {"epilogue": lambda y: jnp.maximum(y, 0)}):
        function = partial(jtk.scaled_matmul, **more)
        with jtk.gpu_target("H200"):
            choices = jtk.explain(function, *operands, *scales, platform="cuda")
        assert {x.kernel is not None for x in choices} == {is_kernels}


@pytest.mark.parametrize(
    ("function", "shape"),
    [(jtk.quantize, (20786, 1856)), (partial(jtk.cumsum, axis=0), (7, 181206))],
)
def test_xla_reads_transposed_arrays_where_they_lie(function, shape):
    x, stored = (jax.ShapeDtypeStruct(size, jnp.float32) for size in (shape, shape[::-1]))
    assert choice_of(function, x, arch="H200").kernel
    assert choice_of(lambda stored: function(stored.T), stored, arch="H200").kernel is None


def test_two_products_of_xlas_are_merged():
    rows, columns = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1693, 3232), (3232, 1868)))
    with jtk.gpu_target("H200"):
        choices = jtk.explain(jtk.gated_linear, rows, columns, columns, platform="cuda")
    (choice,) = choices
    assert choice.kernel is None
    assert "TMA" in choice.reason


def test_there_are_three_policies():
    with pytest.raises(ValueError, match="auto, kernels, xla, not 'fast'"):
        jtk.policy("fast").__enter__()


# What is left to XLA keeps the arithmetic of docs/design.md.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("swapped", [False, True])
def test_16_bit_products_with_a_vector_are_stated_in_float32(dtype, swapped):
    matrix = jax.ShapeDtypeStruct((300, 300), dtype)
    vector = jax.ShapeDtypeStruct((300,), dtype)
    function, operands = jtk.matvec, (matrix, vector)
    if swapped:
        function, operands = jtk.vecmat, (vector, matrix)
    text = lowered(function, *operands)
    assert "dot_general" not in text
    assert "stablehlo.multiply" in text
    (product,) = (line for line in text.splitlines() if "stablehlo.multiply" in line)
    assert "xf32>" in product


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("k", "is_loop"), [(6, True), (16, True), (17, False)])
def test_16_bit_products_in_loops_are_stated_in_float32(dtype, k, is_loop):
    x, y = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((5, 2, k), (k, 5, 4)))
    with jtk.policy("xla"):
        text = lowered(partial(jtk.einsum, "bmk,kbn->bmn"), x, y)
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    assert ("xf32>" in product.split("->")[0]) == is_loop


@pytest.mark.parametrize(("columns", "is_small"), [(2, True), (512, False)])
def test_few_int4_left_to_xla_are_an_array_of_bytes(columns, is_small):
    shapes = ((16, 8), jnp.bfloat16), ((columns, 8), jnp.int4), ((columns, 1), jnp.float32)
    x, w, scales = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    with jtk.policy("xla"):
        text = lowered(lambda x, w, scales: jtk.scaled_matmul(x, w, None, scales), x, w, scales)
    assert ("optimization_barrier" in text) == is_small


@pytest.mark.parametrize(("k", "dtype"), [(1024, "f16"), (1025, "i32")])
def test_int8_left_to_xla_is_in_a_type_that_is_exact(k, dtype):
    a = jax.ShapeDtypeStruct((64, k), jnp.int8)
    b = jax.ShapeDtypeStruct((k, 64), jnp.int8)
    with jtk.policy("xla"):
        text = lowered(partial(jtk.matmul, preferred_element_type=jnp.int32), a, b)
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"x{dtype}>" in product.split("->")[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_int8_has_kernels_by_default(arch):
    x = jax.ShapeDtypeStruct((512, 512), jnp.int8)
    multiply = partial(jtk.matmul, preferred_element_type=jnp.int32)
    choice = choice_of(multiply, x, x, arch=arch)
    assert choice.kernel
    assert "XLA's int8 products are not exact" in choice.reason


# Data.


def test_a_forest_is_the_sum_of_its_trees():
    rng = np.random.default_rng(0)
    trees, depth, numbers = 7, 3, 5
    inner = 2**depth - 1
    forest = Forest(
        rng.integers(numbers, size=(trees, inner)).astype(np.uint8),
        rng.standard_normal((trees, inner)).astype(np.float32),
        rng.standard_normal((trees, inner + 1)).astype(np.float32),
        0.5,
    )
    rows = rng.standard_normal((11, numbers)).astype(np.float32)

    def value(tree, row):
        node = 0
        while node < inner:
            larger = row[forest.features[tree, node]] > forest.thresholds[tree, node]
            node = 2 * node + 1 + larger
        return forest.values[tree, node - inner]

    expected = [0.5 + sum(value(tree, row) for tree in range(trees)) for row in rows]
    np.testing.assert_allclose(forest(rows), expected, rtol=1e-6)
    np.testing.assert_array_equal(Forest.from_json(forest.to_json())(rows), forest(rows))


def test_a_correction_is_trees_beside_those_of_another_device():
    rng = np.random.default_rng(0)
    rows = rng.uniform(size=(9, 3)).astype(np.float32)

    def forest(trees, depth):
        inner = 2**depth - 1
        features = rng.integers(3, size=(trees, inner)).astype(np.uint8)
        thresholds = rng.uniform(size=(trees, inner)).astype(np.float32)
        values = rng.uniform(size=(trees, inner + 1)).astype(np.float32)
        return Forest(features, thresholds, values, rng.uniform())

    deep, shallow = forest(4, 5), forest(3, 2)
    for first, second in ((deep, shallow), (shallow, deep)):
        np.testing.assert_allclose((first + second)(rows), first(rows) + second(rows), rtol=1e-6)


def test_a_file_has_what_it_lacks_from_another_device():
    trees = {name: constant(value).to_json() for name, value in (("xla", 0.5), ("ours", 0.25))}
    content = {
        "format": model.FORMAT,
        "device": "a GPU",
        "rates": {"launch": 1, "bytes": 2, "operations": {}},
        "models": {
            name: {"margin": [0, 0], **trees, "error": trees["xla"], "is_correction": corrects}
            for name, corrects in (("corrected", True), ("new", False))
        },
    }
    known = OperationModel(constant(1.0), constant(2.0), constant(3.0), (0.1, 1.0))
    models = {"corrected": known, "as it is": known}
    scaled = DeviceModel("another GPU, scaled", 1.0, 1.0, {}, {}, models)
    found = DeviceModel.from_json(content, scaled).models
    rows = [[0.0]]
    assert {name: (x.xla(rows)[0], x.ours(rows)[0], x.device) for name, x in found.items()} == {
        "corrected": (1.5, 2.25, ""),
        "as it is": (1.0, 2.0, "another GPU, scaled"),
        "new": (0.5, 0.25, ""),
    }


def constant(value):
    """A forest that gives the same number for every call."""
    nodes = np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.float32)
    return Forest(*nodes, np.zeros((1, 2), np.float32), value)


def test_another_devices_data_are_scaled_by_the_memorys_bandwidth():
    scaled, of = scaled_model("NVIDIA H200"), model_of(H100)
    assert all(found is of.models[name] for name, found in scaled.models.items())
    assert scaled.bytes == pytest.approx(1.37 * of.bytes)
    assert scaled.device == f"{H100}, with 1.37 times its memory bandwidth"
    assert model.data_digest("NVIDIA H200")
    assert scaled_model("NVIDIA A100-SXM4-40GB") is None


def test_a_product_with_an_epilogue_is_xlas_where_its_pass_is_predicted_faster(monkeypatch):
    def call(m):
        rows = jax.ShapeDtypeStruct((m, 1024), jnp.bfloat16)
        with jtk.gpu_target("H100"):
            gelu = partial(jtk.matmul, epilogue=jax.nn.gelu)
            return jtk.explain(gelu, rows, jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16))

    (choice,) = call(1000)
    assert choice.kernel
    assert "predicted faster than XLA" in choice.reason
    assert choice.predicted_us.ours < choice.predicted_us.xla
    monkeypatch.setattr(select, "_xla_us", lambda *_: 0.5)
    choice = call(1001)[0]
    assert choice.kernel is None
    assert "XLA is predicted as fast" in choice.reason
    with jtk.policy("kernels"):
        assert call(1002)[0].kernel


@pytest.mark.parametrize("rows", [1000, 100_000])
def test_reductions_of_rows_are_xlas_only_where_l2_holds_the_product(monkeypatch, rows):
    monkeypatch.setattr(select, "_xla_us", lambda *_: 0.5)
    x, y = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 64), (64, 1024)))
    with jtk.gpu_target("H200"):
        choice = jtk.explain(partial(jtk.matmul, epilogue=jtk.row_max), x, y)[0]
    assert (choice.kernel is None) == (rows == 1000)


def test_xlas_product_has_the_type_that_an_epilogue_rounds_to(monkeypatch):
    """XLA computes what the program says, and not a product of float32 accumulators."""
    monkeypatch.setattr(select, "_xla_us", lambda *_: 0.5)
    x, b = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.bfloat16)
    rounded = lowered(jtk.fuse(lambda x, b: jnp.tanh(x @ x + b)), x, b, arch="sm_90")
    in_float32 = partial(jtk.matmul, epilogue=jnp.tanh)
    for text, result in ((rounded, "bf16"), (lowered(in_float32, x, x, arch="sm_90"), "f32")):
        # The product by itself is a kernel's or XLA's.
        names = "custom_call @jax_tilekern_cuda_launch", "dot_general"
        (product,) = (x for x in text.splitlines() if any(name in x for name in names))
        assert product.rstrip().endswith(f"-> tensor<1024x1024x{result}>")


DAMAGES = ["missing", "no JSON", "other format", "other device", "no forest"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_read_is_a_warning_and_xlas(monkeypatch, tmp_path, damage):
    content = json.loads((model._FOLDER / model.FILES[H100]).read_text())
    if damage == "other format":
        content["format"] = 0
    if damage == "other device":
        content["device"] = "CPU with avx2"
    if damage == "no forest":
        content["models"]["product"]["xla"]["values"] = "?"
    if damage != "missing":
        text = "{" if damage == "no JSON" else json.dumps(content)
        (tmp_path / model.FILES[H100]).write_text(text)
    monkeypatch.setattr(model, "_FOLDER", tmp_path)
    forget()
    try:
        # Plans are kept, by their problem.
        rows = jax.ShapeDtypeStruct((4097 + DAMAGES.index(damage), 64), jnp.float32)
        columns = jax.ShapeDtypeStruct((64, 96), jnp.float32)
        with pytest.warns(RuntimeWarning, match="cannot read .*; install the package again"):
            choice = choice_of(jtk.matmul, rows, columns)
    finally:
        forget()
    assert choice.kernel is None


def forget():
    """Let files be read again."""
    model_of.cache_clear()
    model._own.cache_clear()


def test_a_device_has_models_that_it_lacks_from_another_one(monkeypatch, tmp_path):
    """They are as they are in the other one's file, and take nothing from it that it has."""
    own = json.loads((model._FOLDER / model.FILES[H100]).read_text())
    lent = own | {"device": "NVIDIA H200", "models": {"attention": own["models"]["transpose"]}}
    lent["models"]["product"] = own["models"]["transpose"]
    for name, content in ((model.FILES[H100], own), ("h200.json", lent)):
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(model, "_FOLDER", tmp_path)
    monkeypatch.setitem(model.FILES, "NVIDIA H200", "h200.json")
    forget()
    try:
        found, other = model_of(H100), model_of("NVIDIA H200")
        assert found.models["attention"].device == "NVIDIA H200"
        assert found.models["product"].device == ""
        assert len(found.models["product"].xla.values) == own["models"]["product"]["xla"]["trees"]
        assert found.launch == own["rates"]["launch"]
        assert other.models["attention"].device == ""
        assert "attention" not in scaled_model("NVIDIA H200").models
    finally:
        forget()
