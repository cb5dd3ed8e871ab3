"""What all planners share: families of kernels that decide for themselves, and a GPU's rates."""

import dataclasses

import pytest
from products import H100, product_of, ragged_product_of

from jax_tilekern.plans.gemm import select
from jax_tilekern.plans.gemm.families import Family, ranked_candidates
from jax_tilekern.plans.gemm.sm80.candidates import mma_candidates
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gemm.vector_product import vector_product_candidates
from jax_tilekern.plans.gpu import KNOWN_GPUS, known_gpu
from jax_tilekern.plans.grouped_gemm import select as grouped_gemm
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.reduction.select import SummedDims, sum_candidates


@dataclasses.dataclass(frozen=True)
class Kernel:
    key: str
    cycles: float


def family(arithmetic, *answers):
    found = answers[0] if isinstance(answers[0], NoKernel) else list(answers)
    return Family({arithmetic}, lambda product, gpu: found)


PRODUCT = product_of("bf16", 64, 64, 64)
REFUSED = NoKernel("bf16 takes 16 arms")


def test_candidates_of_all_families_are_ranked():
    fast, slow, equal = Kernel("fast", 1), Kernel("slow", 3), Kernel("equal", 1)
    families = [
        family("bf16", slow, fast),
        family("f64", Kernel("other", 0)),
        family("bf16", equal),
    ]
    assert ranked_candidates(families, PRODUCT, H100) == [fast, equal, slow]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_no_family_has_a_veto(order):
    families = [family("bf16", REFUSED), family("bf16", Kernel("mine", 1))]
    found = ranked_candidates([families[i] for i in order], PRODUCT, H100)
    assert found == [Kernel("mine", 1)]


def test_the_reason_is_that_of_the_last_family_that_computes_in_the_arithmetic():
    families = [family("bf16", NoKernel("first")), family("bf16", REFUSED)]
    other = family("f64", NoKernel("f64 is not bf16"))
    assert ranked_candidates([*families, other], PRODUCT, H100) == REFUSED
    assert ranked_candidates([other], PRODUCT, H100) == NoKernel("no kernel computes in bf16")


def test_emulated_float32_names_the_gpu_that_it_takes():
    product = product_of("f32", 512, 512, 512)
    product = dataclasses.replace(product, arithmetic="f32_emulated")
    assert select.candidates(product, H100)
    reason = "f32_emulated takes sm_90a, and this is sm_80"
    assert select.candidates(product, known_gpu("sm_80")) == NoKernel(reason)


def slower(**rates):
    """An H100 with some other rates."""
    return dataclasses.replace(H100, rates=dataclasses.replace(H100.rates, **rates))


LARGE = {"bf16": product_of("bf16", 4096, 4096, 4096), "f32": product_of("f32", 2048, 2048, 2048)}
GROUPED = ragged_product_of("bf16", "m", 8, 8192, 4096, 4096)
VECTOR = product_of("bf16", 1, 8192, 8192, rhs_k_major=True)


def sums(gpu):
    return sum_candidates(
        SummedDims((8192, 8192), (True, False)), VECTOR.lhs_dtype, VECTOR.lhs_dtype, gpu
    )


@pytest.mark.parametrize(
    ("candidates", "rates"),
    [
        (lambda gpu: wgmma_candidates(LARGE["bf16"], gpu), {"wgmma_macs": {"bf16": 64}}),
        (lambda gpu: wgmma_candidates(LARGE["bf16"], gpu), {"l2_tma_bandwidth": 8}),
        (lambda gpu: wgmma_candidates(LARGE["bf16"], gpu), {"shared_memory_bandwidth": 16}),
        (lambda gpu: mma_candidates(LARGE["bf16"], gpu), {"mma_macs": {"bf16": 64}}),
        (lambda gpu: mma_candidates(LARGE["bf16"], gpu), {"l2_load_bandwidth": 8}),
        (lambda gpu: mma_candidates(LARGE["bf16"], gpu), {"l2_load_share": 4}),
        (lambda gpu: mma_candidates(LARGE["f32"], gpu), {"cta_cycles": 20_000}),
        (lambda gpu: select.candidates(LARGE["bf16"], gpu), {"memory_bandwidth": 20}),
        (lambda gpu: select.candidates(LARGE["bf16"], gpu), {"launch_cycles": 9000}),
        (lambda gpu: grouped_gemm.candidates(GROUPED, gpu), {"memory_bandwidth": 20}),
        (lambda gpu: vector_product_candidates(VECTOR, gpu), {"memory_bandwidth": 20}),
        (lambda gpu: vector_product_candidates(VECTOR, gpu), {"sm_load_bandwidth": 1}),
        (sums, {"load_latency": 3000}),
        (sums, {"launch_cycles": 9000}),
    ],
)
def test_cost_models_read_the_rates_of_the_gpu(candidates, rates):
    fast = {choice.key: choice.cycles for choice in candidates(H100)}
    slow = {choice.key: choice.cycles for choice in candidates(slower(**rates))}
    both = fast.keys() & slow.keys()
    assert both
    assert all(slow[key] > fast[key] for key in both)


def test_rates_are_no_part_of_what_a_plan_is():
    """The digest of a plan has its GPU's text."""
    assert "rates" not in repr(H100)
    assert {gpu.rates for gpu in KNOWN_GPUS.values()} == {H100.rates}
