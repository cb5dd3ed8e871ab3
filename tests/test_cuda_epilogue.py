"""The contract of epilogues (``ffi/cuda/epilogue.cuh``), on every path that stores a result."""

import itertools
import re

import pytest
from compiled_text import compile_source
from kernel_samples import grouped_mma_instances, grouped_wgmma_instances, mma_instances
from nvrtc_mark import require_nvrtc
from products import H100, product_of

from jax_tilekern.compilation.compiler import Kernel, Source, compile_to_ptx
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gemm.sm90.config import WgmmaTile
from jax_tilekern.plans.gemm.sm90.emulated import emulated_candidates
from jax_tilekern.plans.grouped_gemm.sm80.candidates import grouped_kernel

require_nvrtc()

# What a user's function would be generated as; each matrix has a bias of its own.
EPILOGUE = """
struct BiasAndRelu {
  static constexpr bool kStores = true;
  static constexpr bool kPrefetches = false;
  static constexpr int kStagedColumns = 0;
  const float* bias;

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&accumulators)[kCount], const Coordinates& at) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = tilekern::min_of(at.column(i), at.columns() - 1);
      const float addend = bias[at.batch(i) * at.columns() + column];
      const float sum = static_cast<float>(accumulators[i]) + addend;
      accumulators[i] = static_cast<Accumulator>(at.row(i) < at.rows() && sum > 0 ? sum : 0);
    }
  }
};
"""
OPERANDS = "BiasAndRelu, const float*"


def with_epilogue(kernel):
    """The source and the name of a kernel with the epilogue, as a planner would ask for them."""
    return (
        f'#include "{kernel.source}"\n{EPILOGUE}',
        f"{kernel.name.removesuffix('>')}, {OPERANDS}>",
    )


def _first(instances, wanted):
    return next(instance for instance in instances if wanted(instance))


def _wgmma(arithmetic, tile, **sides):
    found = wgmma_candidates(product_of(arithmetic, 4096, 4096, 4096, **sides), H100)
    return next(c for c in found if c.tile == tile and not c.swapped).instance.kernel


def _sm80(family, type_):
    instances = mma_instances(H100)
    return _first(instances, lambda i: i.family == family and i.types[0] == type_).kernel


def _grouped_sm80(ragged):
    instances = grouped_mma_instances(H100)
    instance, _ = _first(instances, lambda pair: pair[1] == ragged)
    return grouped_kernel(instance, ragged)


def _grouped_sm90(ragged):
    # Grouped GEMMs with tiles of 128x256 have no registers left for this epilogue.
    def wanted(instance):
        tile = (instance.block_m, instance.block_n, instance.cluster)
        return instance.ragged == ragged and tile == (128, 128, 1) and instance.tma_store

    return _first(grouped_wgmma_instances(H100), wanted).kernel


def _kernels():
    yield "cooperative", lambda: _wgmma("bf16", WgmmaTile(128, 256))
    yield "ping-pong", lambda: _wgmma("bf16", WgmmaTile(128, 128, cooperative=False))
    yield "promoted", lambda: _wgmma("fp8", WgmmaTile(128, 128), rhs_k_major=True)
    yield (
        "registers",
        lambda: _wgmma("tf32", WgmmaTile(128, 128), lhs_k_major=False, rhs_k_major=True),
    )
    f32 = product_of("f32", 4096, 4096, 4096)
    yield "split-float16", lambda: emulated_candidates(f32, H100)[0].instance.kernel
    yield "mma", lambda: _sm80("mma", "tilekern::bfloat16")
    yield "simt", lambda: _sm80("simt", "float")
    for ragged in "mk":
        yield f"grouped mma {ragged}", lambda ragged=ragged: _grouped_sm80(ragged)
    for ragged in "nk":
        yield f"grouped wgmma {ragged}", lambda ragged=ragged: _grouped_sm90(ragged)


@pytest.mark.parametrize("kernel", [pytest.param(kernel, id=name) for name, kernel in _kernels()])
@pytest.mark.one_in(12)
def test_kernels_take_an_epilogue_without_spills(kernel):
    kernel = kernel()
    identity = compile_source(f'#include "{kernel.source}"\n', [kernel.name], arch="sm_90a")
    source, name = with_epilogue(kernel)
    compiled = compile_source(source, [name], arch="sm_90a")
    # ptxas would tell of MMAs that wait for each other.
    assert compiled.log == identity.log == ""
    (before,), (after,) = identity.entries, compiled.entries
    assert after.spill_bytes == before.spill_bytes == 0
    assert after.max_threads == before.max_threads
    # The operands are the last parameters, and the identity has none.
    assert after.parameter_bytes == (*before.parameter_bytes, 8)


def test_sums_of_splits_take_an_epilogue_without_spills():
    name = "tilekern::sum_splits<float, tilekern::bfloat16, tilekern::SumConfig{.vector = 4}"
    source = f'#include "gemm/passes/reduce_splits.cuh"\n{EPILOGUE}'
    compiled = compile_source(source, [f"{name}>", f"{name}, {OPERANDS}>"], arch="sm_90a")
    assert compiled.log == ""
    identity, entry = compiled.entries
    assert entry.spill_bytes == 0
    assert entry.parameter_bytes == (*identity.parameter_bytes, 8)


# -- Where accumulators lie. -----------------------------------------------------------------------


def table(layout, count, include, lanes=32):
    """Rows and columns of a layout's accumulators, by lane and number, as the compiler has them."""
    source = f"""
#include "{include}"
using namespace tilekern;
using Layout = {layout};
struct Table {{
  int at[{2 * lanes * count}];
}};
constexpr Table make_table() {{
  Table table = {{}};
  for (int i = 0; i < {lanes * count}; ++i) {{
    table.at[2 * i] = Layout::row(i / {count}, i % {count});
    table.at[2 * i + 1] = Layout::column(i / {count}, i % {count});
  }}
  return table;
}}
__constant__ Table table_of_layout = make_table();
__global__ void read(int* out, int i) {{ *out = table_of_layout.at[i]; }}
"""
    ptx = compile_to_ptx(Kernel(Source(source), "read"), arch="sm_90a")
    (body,) = re.findall(r"table_of_layout\[\d+\] = \{([^}]*)\}", ptx)
    values = [int(value) for value in body.split(",")]
    if "b8" in ptx[: ptx.index(body)].rsplit("\n", 1)[-1]:
        values = [
            int.from_bytes(bytes(values[i : i + 4]), "little") for i in range(0, len(values), 4)
        ]
    # Zeros at the end may be left out.
    values += [0] * (2 * lanes * count - len(values))
    pairs = list(zip(values[::2], values[1::2], strict=True))
    return {(lane, i): pairs[lane * count + i] for lane in range(lanes) for i in range(count)}


def assert_covers(found, rows, columns):
    """Every element of the tile is one accumulator's."""
    assert sorted(found.values()) == list(itertools.product(range(rows), range(columns)))


@pytest.mark.parametrize("paired", [False, True])
def test_wgmma_accumulators_are_where_ptx_says(paired):
    layout = f"WgmmaAccumulatorLayout<{str(paired).lower()}>"
    found = table(layout, 32, "gemm/sm90/epilogue.cuh")
    assert_covers(found, 16, 64)
    for (lane, i), (row, column) in found.items():
        # The PTX manual shows the registers d0 to d3 of lane 4g + t in wgmma's accumulators.
        g, t = divmod(lane, 4)
        mma_row = g + 8 * (i // 2 % 2)
        # lhs through registers: row g of the MMA is row 2g, and 8+g is 2g+1.
        assert row == (2 * (mma_row % 8) + mma_row // 8 if paired else mma_row)
        assert column == 8 * (i // 4) + 2 * t + i % 2


def _engine(instance):
    lhs, rhs, _ = instance.types
    name = "MmaEngine" if instance.family == "mma" else "SimtEngine"
    config = re.search(r"tilekern::MatmulConfig\{[^}]*\}", instance.kernel.name)[0]
    return f"{name}<{lhs}, {rhs}, {config}>::Layout"


def _layouts():
    found = {}
    for instance in mma_instances(H100):
        key = (instance.family, instance.types[0], instance.lhs.k_major, instance.rhs.k_major)
        found.setdefault(key, instance)
    return [
        pytest.param(instance, id=f"{family} {type_.removeprefix('tilekern::')} {lhs:d}{rhs:d}")
        for (family, type_, lhs, rhs), instance in found.items()
    ]


@pytest.mark.parametrize("instance", _layouts())
@pytest.mark.one_in(2)
def test_accumulators_of_a_warp_cover_its_tile(instance):
    tile = instance.tile
    rows, columns = tile.block_m // tile.warps_m, tile.block_n // tile.warps_n
    found = table(_engine(instance), rows * columns // 32, instance.kernel.source)
    assert_covers(found, rows, columns)
