"""What the comments of the rungs expect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from claim import (
    CONFIRMED,
    LARGE,
    LONG,
    NOISE,
    NOT_MEASURED,
    PEAK,
    PRODUCT,
    T_SIZE,
    Claim,
    Finding,
    change,
    limits_of,
    matmul,
    mechanism,
    near,
    share_of_peak,
    stalls_of,
    transpose,
)
from records import Records
from tables import count_bytes, markdown

from jax_tilekern.cli.console import duration, rate


def _faster(ladder: str, size: str, name: str, before: str, dtype: str = "", least: float = NOISE,
            ) -> Callable[[Records], Finding]:  # fmt: skip
    """Return a rule that wants a rung to be faster than another by a fraction."""

    def rule(records: Records) -> Finding:
        one, other = (records.rung(ladder, size, rung, dtype) for rung in (name, before))
        gain = change(other.seconds, one.seconds)
        return Finding(
            f"{duration(one.seconds)} against {duration(other.seconds)} of *{before}*, "
            f"{other.seconds / one.seconds:.2f} times",
            mechanism(gain >= least),
            f"{limits_of(one)}; {limits_of(other)}.",
        )

    return rule


def _no_conflicts(name: str, conflicts: float) -> Callable[[Records], Finding]:
    def rule(records: Records) -> Finding:
        found = transpose(records, name, LARGE)
        counted = found.counter("load_conflicts_per_request")
        return Finding(
            f"{counted:.2f} conflicts a load",
            mechanism(near(counted, conflicts, 0.1)),
            f"{found.counter('instructions') / 2**26 * 32:.1f} instructions an element; "
            f"{limits_of(found)}.",
        )

    return rule


def _share_of_memory(ladder: str, size: str, name: str, share: float, title: str = "",
                     ) -> Callable[[Records], Finding]:  # fmt: skip
    def rule(records: Records) -> Finding:
        found = records.rung(ladder, size, name, title)
        return Finding(
            f"{found.share:.0%} of the bandwidth of a long copy or read",
            mechanism(found.share >= share),
            f"DRAM is {found.counter('dram_percent'):.0f} % busy; warps wait {stalls_of(found)}.",
        )

    return rule


def _share_of_cores(name: str, dtype: str, share: float) -> Callable[[Records], Finding]:
    pipe = {"float32": "fma", "float64": "float64"}[dtype]

    def rule(records: Records) -> Finding:
        found = matmul(records, name, dtype)
        reached = share_of_peak(found, dtype)
        return Finding(
            f"{reached:.0%} of {rate(PEAK[dtype], 'FLOP')} ({dtype})",
            mechanism(reached >= share),
            f"The units are {found.counter(f'{pipe}_percent'):.0f} % busy and "
            f"{found.counter('issue_percent'):.0f} % of issue slots are used; warps wait "
            f"{stalls_of(found)}.",
        )

    return rule


def _at_most(name: str, share: float) -> Callable[[Records], Finding]:
    def rule(records: Records) -> Finding:
        found = matmul(records, name, "bfloat16")
        return Finding(
            f"{rate(found.speed, 'FLOP')}, {found.share:.0%} of the fastest line",
            mechanism(found.share <= share),
            f"The tensor cores are {found.counter('tensor_percent'):.0f} % busy; warps wait "
            f"{stalls_of(found)}.",
        )

    return rule


def _half_sectors(records: Records) -> Finding:
    direct, staged = (
        matmul(records, name, "bfloat16") for name in ("ping-pong", "overlapped epilogue")
    )
    return Finding(
        f"{direct.counter('store_sectors_per_request'):.1f} sectors a store of 4 bytes a thread; "
        f"by TMA {count_bytes(staged.total('l2_write_bytes'))} go to L2, directly "
        f"{count_bytes(direct.total('l2_write_bytes'))}",
        mechanism(near(direct.counter("store_sectors_per_request"), 8)),
        "8 rows of 16 bytes: each sector is written in two halves.",
    )


_HOPPER = (
    "mma.sync", "TMA", "wgmma", "producer warp", "persistent grid", "ping-pong",
    "overlapped epilogue",
)  # fmt: skip

EXPECTATIONS = {
    "transpose": [
        Claim("*serial* is thousands of times slower than *naive*", _faster(
            "transpose", T_SIZE, "naive 32x8, along reads", "serial", least=1000.0)),
        Claim("*naive*, along writes is faster than along reads (32x8)", _faster(
            "transpose", LARGE, "naive 32x8, along writes", "naive 32x8, along reads")),
        Claim("*naive* 8x8 beats 64x8", _faster(
            "transpose", LARGE, "naive 8x8, along reads", "naive 64x8, along reads")),
        Claim("*tile* has 31 conflicts a load", _no_conflicts("tile", 31)),
        Claim("*padded* has none", _no_conflicts("padded", 0)),
        Claim("*swizzled* has none", _no_conflicts("swizzled", 0)),
        Claim("*padded* reaches the memory's bandwidth",
              _share_of_memory("transpose", LARGE, "padded", 0.9)),
        Claim("*padded* 32x32, a block of 1024 threads, is slower than *padded*", _faster(
            "transpose", LARGE, "padded", "padded 32x32")),
        Claim("*float4* (2) is the fastest without shared memory", _faster(
            "transpose", LARGE, "float4, 4x64", "float2, 4x64", least=-NOISE)),
        Claim("*TMA* reaches the memory's bandwidth",
              _share_of_memory("transpose", LARGE, "TMA", 0.9)),
    ],
    "dot": [
        Claim("*two stages, float4* reaches the memory's bandwidth",
              _share_of_memory("dot", LONG, "two stages, float4", 0.95)),
        Claim("*warp shuffles and atomicAdd* is as fast as the tree with atomicAdd", _faster(
            "dot", LONG, "warp shuffles and atomicAdd", "tree and atomicAdd", least=-NOISE)),
    ],
    "matmul": [
        Claim("*shared tiles* is a step up from global memory", _faster(
            "matmul", PRODUCT, "shared tiles", "from global memory", "float32")),
        Claim("*register tiles* is several times *shared tiles*", _faster(
            "matmul", PRODUCT, "register tiles", "shared tiles", "float32", least=2.0)),
        Claim("*double-buffered* has most of what multiply-adds can do",
              _share_of_cores("double-buffered", "float32", 0.8)),
        Claim("*warp tiles* has 80 % of it in float64",
              _share_of_cores("warp tiles", "float64", 0.8)),
        Claim("*warp tiles* has 80 % of it in float32 too, where loads share the issue slots",
              _share_of_cores("warp tiles", "float32", 0.8)),
        Claim("*tensor cores* gains in float64", _faster(
            "matmul", PRODUCT, "tensor cores", "warp tiles", "float64")),
        *(
            Claim(f"*{name}* gains over *{before}*", _faster(
                "matmul", PRODUCT, name, before, "bfloat16", least=0.0))
            for before, name in itertools.pairwise(_HOPPER)
        ),
        Claim("*mma.sync* has at best two thirds of what Hopper's tensor cores can do",
              _at_most("mma.sync", 0.67)),
        Claim("*wgmma* is about twice *mma.sync*", _faster(
            "matmul", PRODUCT, "wgmma", "mma.sync", "bfloat16", least=0.7)),
        Claim("*ping-pong* writes half sectors, and the *overlapped epilogue* whole ones",
              _half_sectors),
    ],
    "matvec": [
        Claim("*row per warp* is close to the bandwidth",
              _share_of_memory("matvec", LARGE, "row per warp", 0.9, "a @ x")),
        Claim("*row per warp, float4* reaches it",
              _share_of_memory("matvec", LARGE, "row per warp, float4", 0.95, "a @ x")),
        Claim("*32 columns per block* keeps the memory busy",
              _share_of_memory("matvec", LARGE, "32 columns per block", 0.9, "x @ a")),
    ],
    "add": [
        Claim("*vector, float4* gains over *vector*", _faster(
            "add", LONG, "vector, float4", "vector")),
        Claim("*matrix, float4* is as fast as a vector of float4s",
              _share_of_memory("add", LARGE, "matrix, float4", 0.95)),
    ],
}  # fmt: skip


def table(ladder: str, records: Records) -> str:
    """Return what the comments of a ladder's rungs expect, against what was measured."""
    rows: Iterator[tuple[str, ...]] = (
        (claim.text, found.numbers, "yes" if found.verdict == CONFIRMED else _no(found), found.why)
        for claim in EXPECTATIONS[ladder]
        for found in [claim.finding(records)]
    )
    return markdown(("expected", "measured", "so it is", "by the counters"), rows, left=4)


def _no(found: Finding) -> str:
    return found.verdict if found.verdict == NOT_MEASURED else "no"
