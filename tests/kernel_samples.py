"""Samples of the matmul kernels that plans can ask for, which tests compile.

All kernels would be thousands, so features that are independent in the code are not crossed.
"""

import itertools

from jax_tilekern.plans.gemm.arithmetic import BF16, F32, FP8
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.sm80 import config as mma
from jax_tilekern.plans.gemm.sm80.config import OperandLayout
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS, WgmmaTile
from jax_tilekern.plans.gpu import VECTOR_BYTES
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.grouped_gemm.sm80.candidates import grouped_mma_candidates
from jax_tilekern.plans.grouped_gemm.sm90.candidates import grouped_wgmma_candidates
from jax_tilekern.plans.launch import NoKernel

# A size that is not short, and an extent of k that has many k-tiles.
SIZE = 1 << 12
LONG = 1 << 20


def mma_instances(gpu):
    """Dense kernels of ``gemm/sm80``.

    Every arithmetic has its largest tile in all four major orders, and each of these in one order:
    the other tiles, a single k-tile, the narrower loads, the other types.
    """
    orders = list(itertools.product((True, False), repeat=2))
    for arithmetic, how in mma.MMA_ARITHMETICS.items():
        if gpu.compute_capability < how.min_capability:
            continue
        operands, results = how.types.operands, how.types.results
        types = (operands[0], operands[-1], results[0])
        wide = [i.tile for i in _instances(arithmetic, types, LONG, VECTOR_BYTES, orders[0], gpu)]
        samples = [(wide[0], LONG, VECTOR_BYTES, order, types) for order in orders]
        samples += [
            (tile, k, VECTOR_BYTES, order, types)
            for tile, k, order in zip(wide[1:], (LONG, 1, 1), orders[1:], strict=False)
        ]
        narrow = {4: (8, 4), 8: (8,)}.get(types[0].itemsize, (8, 4, 1))
        for load_bytes, order in zip(narrow, orders[1:], strict=False):
            found = _instances(arithmetic, types, LONG, load_bytes, order, gpu)
            samples.append((found[0].tile, LONG, load_bytes, order, types))
        samples += [
            (wide[-1], LONG, VECTOR_BYTES, orders[1], (lhs, rhs, out))
            for lhs, rhs, out in itertools.product(operands, operands, results[1:])
        ]
        for tile, k, load_bytes, order, dtypes in samples:
            found = _instances(arithmetic, dtypes, k, load_bytes, order, gpu)
            yield next(instance for instance in found if instance.tile == tile)


def _instances(arithmetic, dtypes, k, load_bytes, order, gpu):
    product = Product(_geometry(*order, 0, k), *dtypes, arithmetic)
    lhs, rhs = (OperandLayout(k_major, load_bytes) for k_major in order)
    return [instance for instance, _ in mma.instances_for(product, lhs, rhs, gpu)]


def wgmma_instances(gpu):
    """Dense kernels of ``gemm/sm90``; none unless the GPU is Hopper.

    Of bfloat16, TF32, int8 and a pair of float8 types there is each tile in the order that most
    tiles take, and, with the first type of results, the larger tiles in all four major orders and
    with stores of single elements; of the other types one tile in one order.
    """
    for arithmetic, how in WGMMA_ARITHMETICS.items():
        operands = how.types.operands
        for lhs, rhs, out in itertools.product(operands, operands, how.types.results):
            first = (lhs, rhs) == (operands[0], operands[0])
            one_tile = not first or out.name == "float16" or arithmetic == "f16"
            orders = itertools.product((True, False), repeat=2)
            for lhs_k_major, rhs_k_major, odd in (*((*o, 0) for o in orders), (True, True, 1)):
                geometry = _geometry(lhs_k_major, rhs_k_major, odd)
                product = Product(geometry, lhs, rhs, out, arithmetic)
                first_order = lhs_k_major and rhs_k_major and not odd
                every_order = not one_tile and out == how.types.results[0]
                for candidate in _found(wgmma_candidates(product, gpu)):
                    tile = candidate.tile
                    if one_tile and tile != WgmmaTile(128, 128):
                        continue
                    if first_order or (every_order and tile.block_m * tile.block_n >= 128 * 128):
                        yield candidate.instance


def scaled_wgmma_instances(gpu):
    """Kernels of operands with scales of blocks: each tile, with scales of rows on either side."""
    for out, odd in ((F32, 0), (BF16, 0), (BF16, 1), (F32, 1)):
        geometry = _geometry(True, True, odd)
        of_lhs = Scales(1, (), 1, SIZE)
        for of_rhs in (
            Scales(128, (), SIZE // 128, 1),
            Scales(1, (), 1, SIZE + 4 * odd, padded=True),
        ):
            product = Product(geometry, *FP8, out, "fp8", scales=(of_lhs, of_rhs))
            for candidate in _found(wgmma_candidates(product, gpu)):
                yield candidate.instance
        # Rows of groups are columns as well where they have one scale.
        for of_lhs in (Scales(1, (0,), 1, SIZE), Scales(1, (0,), 0, 1)):
            rhs_strides = (SIZE * (SIZE + odd), 1, SIZE)
            grouped = MatmulGeometry(
                (8,), SIZE, SIZE + odd, SIZE, (0, SIZE, 1), rhs_strides, (0, SIZE + odd, 1)
            )
            of_groups = Product(
                GroupedGeometry.of(grouped, "m", ()), *FP8, out, "fp8",
                scales=(of_lhs, Scales(128, (SIZE,), SIZE // 128, 1)),
            )  # fmt: skip
            yield from (x.instance for x in _found(grouped_wgmma_candidates(of_groups, gpu)))


def symmetric_instances(gpu):
    """Kernels of half of a symmetric output: each tile of each type."""
    for arithmetic, how in WGMMA_ARITHMETICS.items():
        operand = how.types.operands[0]
        for out in how.types.results:
            geometry = _geometry(lhs_k_major=True, rhs_k_major=True, odd=0)
            product = Product(geometry, operand, operand, out, arithmetic, symmetric=True)
            yield from (x.instance for x in _found(wgmma_candidates(product, gpu)))


def grouped_mma_instances(gpu):
    """Dense kernels whose tiles grouped GEMMs have, and the ragged dimension.

    Registers differ by a few from the dense kernels', so the sample is the largest tile of each
    arithmetic in the major orders of row-major arrays, and for operands of 2 bytes and of 1 those
    in which groups start at any byte. Two arithmetics are left out whose code differs from
    another's in the MMA instruction alone.
    """
    for arithmetic, how in mma.MMA_ARITHMETICS.items():
        if gpu.compute_capability < how.min_capability or arithmetic in ("f16", "fp8_fast"):
            continue
        types = (how.types.operands[0], how.types.operands[-1], how.types.results[0])
        rows, columns, matrix = (SIZE, 1), (1, SIZE), SIZE * SIZE
        sizes = ((8,), SIZE, SIZE, SIZE)
        for aligned in (True, False) if arithmetic in ("bf16", "int8") else (True,):
            lhs, rhs = (rows, columns) if aligned else (columns, rows)
            ragged_m = MatmulGeometry(*sizes, (0, *lhs), (matrix, *rows), (0, *rows))
            ragged_k = MatmulGeometry(*sizes, (0, *rhs), (0, *lhs), (matrix, *rows))
            for ragged, geometry in (("m", ragged_m), ("k", ragged_k)):
                grouped = GroupedGeometry.of(geometry, ragged, ())
                found = grouped_mma_candidates(Product(grouped, *types, arithmetic), gpu)
                yield found[0].instance, ragged


def grouped_wgmma_instances(gpu):
    """Kernels of ``grouped_gemm/sm90``; none unless the GPU is Hopper.

    Of each arithmetic there is each tile in the major orders that the kernels take; of further
    result types, and of stores of single elements, the largest tile, which leaves the fewest
    registers.
    """
    for arithmetic, how in WGMMA_ARITHMETICS.items():
        operands = (how.types.operands[0], how.types.operands[-1])
        for out, (geometry, odd) in itertools.product(how.types.results, _grouped_geometries()):
            first = out == how.types.results[0]
            if odd and not first:
                continue
            product = Product(geometry, *operands, out, arithmetic)
            found = _found(grouped_wgmma_candidates(product, gpu))
            for candidate in found:
                if (first and not odd) or candidate.tile == found[0].tile:
                    yield candidate.instance


def _found(candidates):
    return [] if isinstance(candidates, NoKernel) else candidates


def _geometry(lhs_k_major, rhs_k_major, odd, k=SIZE):
    n = SIZE + odd
    return MatmulGeometry(
        (),
        SIZE,
        n,
        k,
        (k, 1) if lhs_k_major else (1, SIZE),
        (1, k) if rhs_k_major else (n, 1),
        (n, 1),
    )


def _grouped_geometries():
    """Geometries, and whether the output's rows are not multiples of 16 bytes."""
    # Rows have room for an odd number of elements.
    row, groups = 2 * SIZE, 8
    matrix = row * row
    rows, columns = (row, 1), (1, row)
    for odd in (False, True):
        n = SIZE + odd
        sizes = ((groups,), SIZE, n, SIZE)
        for rhs in (columns,) if odd else (rows, columns):
            product = MatmulGeometry(*sizes, (0, *rows), (matrix, *rhs), (0, n, 1))
            yield GroupedGeometry.of(product, "m", ()), odd
        product = MatmulGeometry(*sizes, (0, *columns), (0, *rows), (matrix, n, 1))
        yield GroupedGeometry.of(product, "k", ()), odd
