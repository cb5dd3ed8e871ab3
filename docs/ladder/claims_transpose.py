"""What T, a study of transposes, and S, two transposes through shared memory, claim."""

from __future__ import annotations

from claim import (
    CONFIRMED,
    LARGE,
    NOISE,
    REFUTED,
    S_SIZE,
    T_SIZE,
    THAT_GPU,
    Claim,
    Finding,
    change,
    changes,
    changes_of,
    mechanism,
    near,
    same_direction,
    sectors_of,
    shares_of,
    signed,
    stalls_of,
    transpose,
)
from records import Records
from tables import count_bytes, write_efficiency

from jax_tilekern.cli.console import duration

# T: a study of transposes of 2048x512 float32 on an RTX 5070.


def _naive_sectors(records: Records) -> Finding:
    naive = transpose(records, "naive 64x8, along reads")
    load, store = (naive.counter(f"{op}_sectors_per_request") for op in ("load", "store"))
    holds = near(load, 4) and near(store, 32)
    return Finding(
        f"{sectors_of(naive)}; {naive.counter('load_sectors'):,.0f} against "
        f"{naive.counter('store_sectors'):,.0f}; write efficiency {write_efficiency(naive):.1%}",
        mechanism(holds),
        "A warp is 32 elements of a row: 128 bytes to read, 32 rows to write.",
    )


def _naive_shares(records: Records) -> Finding:
    naive = transpose(records, "naive 64x8, along reads")
    compute, memory = (naive.counter(f"{what}_percent") for what in ("compute", "memory_pipe"))
    alike = near(compute, 12.8, 0.25) and near(memory, 49.5, 0.25)
    return Finding(
        shares_of(naive),
        CONFIRMED if alike else THAT_GPU,
        f"Warps wait: {stalls_of(naive)}; DRAM is {naive.counter('dram_percent'):.0f} % busy.",
    )


def _no_writes(records: Records) -> Finding:
    small, large = (transpose(records, "naive 64x8, along reads", size) for size in (T_SIZE, LARGE))
    outputs = [measured.problem["bytes"] / 2 for measured in (small, large)]
    shares = [
        measured.counter("dram_write_bytes") / output
        for measured, output in zip((small, large), outputs, strict=True)
    ]
    holds = shares[0] < 0.1 < 0.5 < shares[1]
    return Finding(
        f"{count_bytes(small.counter('dram_write_bytes'))} of {count_bytes(outputs[0])} written at "
        f"{T_SIZE}, {count_bytes(large.counter('dram_write_bytes'))} of {count_bytes(outputs[1])} "
        f"at {LARGE}",
        mechanism(holds),
        "L2 writes back: what a kernel has written stays there, dirty, until its room is wanted. "
        "4 MiB fit in the 50 MiB of this GPU, and the kernel ends before any of it is evicted; "
        "256 MiB do not fit."
        if holds
        else "Here the writes do not stay in L2, or do not leave it.",
    )


def _pass_through(records: Records) -> Finding:
    through, naive = (
        transpose(records, name) for name in ("pass-through 32x32", "naive 64x8, along reads")
    )
    cycles = change(through.counter("sm_active_cycles"), naive.counter("sm_active_cycles"))
    time = change(through.seconds, naive.seconds)
    return Finding(
        f"{changes_of(through, naive)}, SM active cycles {signed(cycles)}",
        same_direction(time, 0.63),
        f"The sectors are the same, {sectors_of(through)}; what is added is a barrier for 1024 "
        f"threads: stalls are {stalls_of(through)}, without it {stalls_of(naive)}.",
    )


def _pass_through_conflicts(records: Records) -> Finding:
    conflicts = {
        size: [
            transpose(records, f"pass-through {size}").counter(f"{op}_conflicts_per_request")
            for op in ("load", "store")
        ]
        for size in ("32x32", "8x8")
    }
    text = "; ".join(
        f"{size}: {load:.2f} a load, {store:.2f} a store"
        for size, (load, store) in conflicts.items()
    )
    # One conflict would cost each request a second wavefront.
    real = max(conflicts["8x8"]) > 0.5 and max(conflicts["8x8"]) > max(conflicts["32x32"])
    return Finding(
        f"conflicts per request at {text}",
        mechanism(real),
        "Lane i accesses bank i at either shape"
        + (", and still the counters show conflicts." if real else ": there are none."),
    )


def _no_pass_through_8x8(records: Records) -> Finding:
    without, through = (
        transpose(records, name) for name in ("naive 8x8, along reads", "pass-through 8x8")
    )
    return Finding(
        changes_of(without, through),
        same_direction(change(without.seconds, through.seconds), -0.24),
        f"Both have {sectors_of(without)}; through shared memory warps wait {stalls_of(through)}, "
        f"without {stalls_of(without)}.",
    )


_SHAPES = ("64x8", "32x32", "32x8", "16x16", "8x8", "8x4", "4x8")


def _smallest_block(records: Records) -> Finding:
    small, large = (transpose(records, f"naive {shape}, along reads") for shape in ("8x8", "32x32"))
    sectors = change(small.counter("store_sectors"), large.counter("store_sectors"))
    return Finding(
        f"{changes_of(small, large)}, sectors stored {signed(sectors)}",
        mechanism(near(sectors, -0.75)),
        "A warp of 8x8 writes 8 runs instead of 32: "
        f"{sectors_of(small)} against {sectors_of(large)}.",
    )


def _fastest_shape(records: Records) -> Finding:
    shapes = {shape: transpose(records, f"naive {shape}, along reads").seconds for shape in _SHAPES}
    order = sorted(shapes, key=lambda shape: shapes[shape])
    # The claim is about shapes of the source, of which 4x8 is none.
    best = min((shape for shape in shapes if shape != "4x8"), key=lambda shape: shapes[shape])
    within = shapes["8x8"] <= (1 + NOISE) * shapes[best]
    fastest = transpose(records, f"naive {best}, along reads")
    return Finding(
        ", ".join(f"{shape} {duration(shapes[shape])}" for shape in order),
        CONFIRMED if within else THAT_GPU,
        f"{best} has {sectors_of(fastest)} and an occupancy of "
        f"{fastest.counter('occupancy_percent'):.0f} %.",
    )


def _half_warps(records: Records) -> Finding:
    wide, high = (transpose(records, f"naive {shape}, along reads") for shape in ("8x4", "4x8"))
    holds = (
        near(wide.counter("load_sectors_per_request"), 4)
        and near(wide.counter("store_sectors_per_request"), 8)
        and near(high.counter("load_sectors_per_request"), 8)
        and near(high.counter("store_sectors_per_request"), 4)
    )
    return Finding(
        f"8x4: {sectors_of(wide)}; 4x8: {sectors_of(high)}",
        mechanism(holds),
        "32 elements are four sectors; a side of four elements takes eight, half of each for "
        "nothing.",
    )


def _best_form(records: Records) -> Finding:
    straight, by_rows = (transpose(records, f"float4{form}, 8x8") for form in (" straight", ""))
    gain = change(by_rows.seconds, straight.seconds)
    return Finding(
        f"(1) {duration(straight.seconds)}, (2) {duration(by_rows.seconds)}: {signed(gain)}",
        same_direction(gain, -1),
        f"(1) waits {stalls_of(straight)} and sends {straight.counter('load_requests'):,.0f} load "
        f"requests; (2) {stalls_of(by_rows)} and {by_rows.counter('load_requests'):,.0f}.",
    )


def _same_code(records: Records) -> Finding:
    by_rows, rows_first = (transpose(records, f"float4{form}, 8x8") for form in ("", " rows first"))
    apart = change(rows_first.seconds, by_rows.seconds)
    equal = by_rows.counter("instructions") == rows_first.counter("instructions")
    return Finding(
        f"(2) {duration(by_rows.seconds)}, (3) {duration(rows_first.seconds)}: {signed(apart)}",
        REFUTED if equal or apart < NOISE else CONFIRMED,
        f"They issue {by_rows.counter('instructions'):,.0f} and "
        f"{rows_first.counter('instructions'):,.0f} instructions. A test shows that both compile "
        "to the same machine code, byte by byte, so any difference of their times is noise.",
    )


def _float4_against_tile(records: Records) -> Finding:
    vectors, tile = transpose(records, "float4, 8x8"), transpose(records, "pass-through 32x32")
    time, compute, _ = changes(vectors, tile)
    return Finding(
        changes_of(vectors, tile),
        CONFIRMED if time < -NOISE and compute > 0 else THAT_GPU,
        f"{sectors_of(vectors)} of 16 bytes a thread, against {sectors_of(tile)} of 4 bytes.",
    )


def _float4_large_block(records: Records) -> Finding:
    large, small = (transpose(records, f"float4, {shape}") for shape in ("32x32", "8x8"))
    compute = changes(large, small)[1]
    return Finding(
        changes_of(large, small),
        same_direction(compute, -0.34),
        f"{large.kernel['grid'][0] * large.kernel['grid'][1]} blocks of 1024 threads for 132 SMs, "
        f"and an occupancy of {large.counter('occupancy_percent'):.0f} % against "
        f"{small.counter('occupancy_percent'):.0f} %.",
    )


def _float4_small_block(records: Records) -> Finding:
    warp, block = (transpose(records, f"float4, {shape}") for shape in ("8x4", "8x8"))
    time = change(warp.seconds, block.seconds)
    return Finding(
        f"time {signed(time)} (a block of one warp)",
        same_direction(time, 0.08),
        f"Occupancy {warp.counter('occupancy_percent'):.0f} % against "
        f"{block.counter('occupancy_percent'):.0f} %: at most 32 blocks fit an SM.",
    )


def _float2(records: Records, block: str, slower: float) -> Finding:
    float2, float4 = transpose(records, f"float2, {block}"), transpose(records, "float4, 8x8")
    time = change(float2.seconds, float4.seconds)
    dram = change(float2.counter("dram_percent"), float4.counter("dram_percent"))
    return Finding(
        f"time {signed(time)}, DRAM {signed(dram)}; long scoreboard "
        f"{float4.stall('long_scoreboard'):.1f} to {float2.stall('long_scoreboard'):.1f} cycles",
        same_direction(time, slower),
        f"{sectors_of(float2)} against {sectors_of(float4)}; occupancy "
        f"{float2.counter('occupancy_percent'):.0f} % against "
        f"{float4.counter('occupancy_percent'):.0f} %.",
    )


def _one_by_two(records: Records) -> Finding:
    one, vectors = transpose(records, "one row by two columns"), transpose(records, "float4, 4x64")
    return Finding(
        f"{duration(one.seconds)}, {one.share:.0%} of the ceiling; float4 "
        f"{duration(vectors.seconds)}",
        CONFIRMED
        if one.seconds < transpose(records, "naive 64x8, along reads").seconds
        else REFUTED,
        f"{sectors_of(one)}; warps wait {stalls_of(one)}.",
    )


T = [
    Claim("naive 64x8 reads 4 sectors a request and writes 32: 12.5 % write efficiency",
          _naive_sectors),
    Claim("the same: compute 12.8 %, memory pipes 49.5 %", _naive_shares),
    Claim("the same: no writes to DRAM are seen; why?", _no_writes),
    Claim("through shared memory, 32x32, without a transpose inside the tile: 63 % slower than "
          "naive 64x8, compute +11.6 %, memory -39 %, SM active cycles +60.7 %", _pass_through),
    Claim("that is for bank conflicts, worse at 8x8 than at 32x32", _pass_through_conflicts),
    Claim("at 8x8, without shared memory 24 % faster, memory +26 %", _no_pass_through_8x8),
    Claim("naive 8x8 against 32x32: compute +148.8 %, memory +14.5 %, sectors written -75 %",
          _smallest_block),
    Claim("8x8 is the fastest of all shapes", _fastest_shape),
    Claim("a warp of 8x4 or 4x8 coalesces one side by whole sectors and wastes half of the other",
          _half_warps),
    Claim("float4: (2), all loads first and rows stored as they are formed, beats (1), through "
          "pointers", _best_form),
    Claim("float4: (2) beats (3), rows formed first", _same_code),
    Claim("float4 at 8x8 against the 32x32 tile: compute +183 %, memory +39 %",
          _float4_against_tile),
    Claim("float4: a block of 32x32 loses 34 % compute and 22 % memory", _float4_large_block),
    Claim("float4: 8x4 is 8 % slower than 8x8", _float4_small_block),
    Claim("float2 is 27 % slower than float4 at equal block 8x8; DRAM -36 %",
          lambda records: _float2(records, "8x8", 0.27)),
    Claim("float2 is 44 % slower at equal data, block 16x16; DRAM -43 %; long scoreboard 16 to "
          "9.5 cycles", lambda records: _float2(records, "16x16", 0.44)),
    Claim("one row by two columns a thread (proposed, not measured) is worth trying", _one_by_two),
]  # fmt: skip


# S: a square and a non-square transpose through shared memory, of 1024x1024.


def _classic(records: Records) -> Finding:
    names = (
        "serial", "row per thread", "naive 32x32, along reads", "tile of 1024 threads", "padded",
    )  # fmt: skip
    found = [transpose(records, name, S_SIZE) for name in names]
    seconds = [measured.seconds for measured in found]
    tile, padded = found[3], found[4]
    return Finding(
        ", ".join(f"{m.name.partition(',')[0]} {duration(m.seconds)}" for m in found),
        CONFIRMED if seconds == sorted(seconds, reverse=True) else THAT_GPU,
        f"{tile.counter('load_conflicts_per_request'):.1f} conflicts a load of the tile, "
        f"{padded.counter('load_conflicts_per_request'):.2f} padded.",
    )


def _not_square(records: Records) -> Finding:
    found = {shape: transpose(records, f"padded {shape}", S_SIZE) for shape in ("32x32", "64x8")}
    return Finding(
        ", ".join(
            f"{shape} {duration(m.seconds)} with {sectors_of(m)}" for shape, m in found.items()
        ),
        CONFIRMED if all(m.rung["failure"] is None for m in found.values()) else REFUTED,
        "Right at either shape: the tile is stored as it was read, and threads are dealt out anew "
        "for the way out. What a side shorter than 32 costs is in the sectors.",
    )


S = [
    Claim("serial, a row a thread, naive, tile of 1024 threads, padded: each is faster than the "
          "one before", _classic),
    Claim("a tile that is not square works, with the index swapped on the way out", _not_square),
]  # fmt: skip
