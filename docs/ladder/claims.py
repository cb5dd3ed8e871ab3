"""What the sources claim and what the rungs' comments expect, held against the records by rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from records import Measured, NotMeasured, Records
from tables import count_bytes, markdown, predicted_reuse, write_efficiency

from jax_tilekern.cli.console import duration, rate

CONFIRMED = "confirmed"
REFUTED = "refuted"
THAT_GPU = "true of that GPU only"
NOT_MEASURED = "not measured yet"

# Two times that differ by less are not told apart.
NOISE = 0.03
# Operations per second of 132 multiprocessors at 1980 MHz without tensor cores.
PEAK = {"float32": 132 * 128 * 2 * 1.98e9, "float64": 132 * 64 * 2 * 1.98e9}

T_SIZE, LARGE, S_SIZE = "2048x512", "8192x8192", "1024x1024"
SHORT, LONG = "1024", str(1 << 26)
PRODUCT = "4096x4096x4096"


class Finding(NamedTuple):
    """What the records say of a claim: our numbers, the verdict, and why, by counters."""

    numbers: str
    verdict: str
    why: str


@dataclass(frozen=True)
class Claim:
    """A sentence of a source, and the rule that decides about it."""

    text: str
    rule: Callable[[Records], Finding]

    def finding(self, records: Records) -> Finding:
        """Decide, or say what is missing."""
        try:
            return self.rule(records)
        except NotMeasured as missing:
            return Finding("-", NOT_MEASURED, f"The records lack {missing}.")


def table(claims: list[Claim], records: Records) -> str:
    """Return claims as a table."""
    rows = ((claim.text, *claim.finding(records)) for claim in claims)
    return markdown(("claim", "here", "verdict", "why"), rows, left=4)


# Rules speak of changes: of a rung against another, as a fraction.


def change(of: float, against: float) -> float:
    """Return by what fraction ``of`` is more than ``against``."""
    return of / against - 1


def signed(fraction: float) -> str:
    """Return a change as text."""
    return f"{fraction:+.0%}"


def same_direction(ours: float, theirs: float) -> str:
    """Judge a change that depends on a GPU: confirmed if ours has the same sign and is no noise."""
    return CONFIRMED if ours * theirs > 0 and abs(ours) >= NOISE else THAT_GPU


def mechanism(holds: bool) -> str:
    """Judge what follows from how memory works, and so on every GPU alike."""
    return CONFIRMED if holds else REFUTED


def near(value: float, expected: float, within: float = 0.02) -> bool:
    """Say whether a counter is what it should be, but for a small part."""
    return abs(value - expected) <= within * max(abs(expected), 1)


def _t(records: Records, name: str, size: str = T_SIZE) -> Measured:
    return records.rung("transpose", size, name)


def _shares(measured: Measured) -> str:
    return (
        f"compute {measured.counter('compute_percent'):.1f} %, "
        f"memory pipes {measured.counter('memory_pipe_percent'):.1f} %"
    )


def _sectors(measured: Measured) -> str:
    load, store = (measured.counter(f"{op}_sectors_per_request") for op in ("load", "store"))
    return f"{load:.1f} sectors a load, {store:.1f} a store"


def _waits(measured: Measured) -> str:
    stalls = list(measured.kernel["stalls"].items())[:2]
    return ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in stalls) + " cycles"


def _changes(of: Measured, against: Measured) -> tuple[float, float, float]:
    """Return the changes of time, compute and memory pipes."""
    return (
        change(of.seconds, against.seconds),
        change(of.counter("compute_percent"), against.counter("compute_percent")),
        change(of.counter("memory_pipe_percent"), against.counter("memory_pipe_percent")),
    )


def _changes_text(of: Measured, against: Measured) -> str:
    time, compute, memory = map(signed, _changes(of, against))
    return f"time {time}, compute {compute}, memory pipes {memory}"


# T: a study of transposes of 2048x512 float32 on an RTX 5070.


def _naive_sectors(records: Records) -> Finding:
    naive = _t(records, "naive 64x8, along reads")
    load, store = (naive.counter(f"{op}_sectors_per_request") for op in ("load", "store"))
    holds = near(load, 4) and near(store, 32)
    return Finding(
        f"{_sectors(naive)}; {naive.counter('load_sectors'):,.0f} against "
        f"{naive.counter('store_sectors'):,.0f}; write efficiency {write_efficiency(naive):.1%}",
        mechanism(holds),
        "A warp is 32 elements of a row: 128 bytes to read, 32 rows to write.",
    )


def _naive_shares(records: Records) -> Finding:
    naive = _t(records, "naive 64x8, along reads")
    compute, memory = (naive.counter(f"{what}_percent") for what in ("compute", "memory_pipe"))
    alike = near(compute, 12.8, 0.25) and near(memory, 49.5, 0.25)
    return Finding(
        _shares(naive),
        CONFIRMED if alike else THAT_GPU,
        f"Warps wait: {_waits(naive)}; DRAM is {naive.counter('dram_percent'):.0f} % busy.",
    )


def _no_writes(records: Records) -> Finding:
    small, large = (_t(records, "naive 64x8, along reads", size) for size in (T_SIZE, LARGE))
    outputs = [measured.problem["bytes"] / 2 for measured in (small, large)]
    shares = [
        measured.counter("dram_write_bytes") / output
        for measured, output in zip((small, large), outputs, strict=True)
    ]
    return Finding(
        f"{count_bytes(small.counter('dram_write_bytes'))} of {count_bytes(outputs[0])} written at "
        f"{T_SIZE}, {count_bytes(large.counter('dram_write_bytes'))} of {count_bytes(outputs[1])} "
        f"at {LARGE}",
        mechanism(shares[0] < 0.1 < 0.5 < shares[1]),
        "L2 writes back: what a kernel has written stays there, dirty, until its room is wanted. "
        "4 MiB fit in the 50 MiB of this GPU, and the kernel ends before any of it is evicted; "
        "256 MiB do not fit.",
    )


def _pass_through(records: Records) -> Finding:
    through, naive = (
        _t(records, name) for name in ("pass-through 32x32", "naive 64x8, along reads")
    )
    cycles = change(through.counter("sm_active_cycles"), naive.counter("sm_active_cycles"))
    time = change(through.seconds, naive.seconds)
    return Finding(
        f"{_changes_text(through, naive)}, SM active cycles {signed(cycles)}",
        same_direction(time, 0.63),
        f"The sectors are the same, {_sectors(through)}; what is added is a barrier for 1024 "
        f"threads: stalls are {_waits(through)}, without it {_waits(naive)}.",
    )


def _pass_through_conflicts(records: Records) -> Finding:
    conflicts = {
        size: [
            _t(records, f"pass-through {size}").counter(f"{op}_conflicts_per_request")
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
        "Lane i accesses bank i at either shape.",
    )


def _no_pass_through_8x8(records: Records) -> Finding:
    without, through = (
        _t(records, name) for name in ("naive 8x8, along reads", "pass-through 8x8")
    )
    return Finding(
        _changes_text(without, through),
        same_direction(change(without.seconds, through.seconds), -0.24),
        f"Both have {_sectors(without)}; through shared memory warps wait {_waits(through)}, "
        f"without {_waits(without)}.",
    )


_SHAPES = ("64x8", "32x32", "32x8", "16x16", "8x8", "8x4", "4x8")


def _smallest_block(records: Records) -> Finding:
    small, large = (_t(records, f"naive {shape}, along reads") for shape in ("8x8", "32x32"))
    sectors = change(small.counter("store_sectors"), large.counter("store_sectors"))
    return Finding(
        f"{_changes_text(small, large)}, sectors stored {signed(sectors)}",
        mechanism(near(sectors, -0.75)),
        f"A warp of 8x8 writes 8 runs instead of 32: {_sectors(small)} against {_sectors(large)}.",
    )


def _fastest_shape(records: Records) -> Finding:
    shapes = {shape: _t(records, f"naive {shape}, along reads").seconds for shape in _SHAPES}
    order = sorted(shapes, key=lambda shape: shapes[shape])
    # The claim is about shapes of the source, of which 4x8 is none.
    best = min((shape for shape in shapes if shape != "4x8"), key=lambda shape: shapes[shape])
    within = shapes["8x8"] <= (1 + NOISE) * shapes[best]
    fastest = _t(records, f"naive {best}, along reads")
    return Finding(
        ", ".join(f"{shape} {duration(shapes[shape])}" for shape in order),
        CONFIRMED if within else THAT_GPU,
        f"{best} has {_sectors(fastest)} and an occupancy of "
        f"{fastest.counter('occupancy_percent'):.0f} %.",
    )


def _half_warps(records: Records) -> Finding:
    wide, high = (_t(records, f"naive {shape}, along reads") for shape in ("8x4", "4x8"))
    holds = (
        near(wide.counter("load_sectors_per_request"), 4)
        and near(wide.counter("store_sectors_per_request"), 8)
        and near(high.counter("load_sectors_per_request"), 8)
        and near(high.counter("store_sectors_per_request"), 4)
    )
    return Finding(
        f"8x4: {_sectors(wide)}; 4x8: {_sectors(high)}",
        mechanism(holds),
        "32 elements are four sectors; a side of four elements takes eight, half of each for "
        "nothing.",
    )


def _best_form(records: Records) -> Finding:
    straight, by_rows = (_t(records, f"float4{form}, 8x8") for form in (" straight", ""))
    gain = change(by_rows.seconds, straight.seconds)
    return Finding(
        f"(1) {duration(straight.seconds)}, (2) {duration(by_rows.seconds)}: {signed(gain)}",
        same_direction(gain, -1),
        f"(1) waits {_waits(straight)} and sends {straight.counter('load_requests'):,.0f} load "
        f"requests; (2) {_waits(by_rows)} and {by_rows.counter('load_requests'):,.0f}.",
    )


def _same_code(records: Records) -> Finding:
    by_rows, rows_first = (_t(records, f"float4{form}, 8x8") for form in ("", " rows first"))
    apart = change(rows_first.seconds, by_rows.seconds)
    equal = by_rows.counter("instructions") == rows_first.counter("instructions")
    return Finding(
        f"(2) {duration(by_rows.seconds)}, (3) {duration(rows_first.seconds)}: {signed(apart)}",
        REFUTED if equal else NOT_MEASURED,
        "Both compile to the same machine code, byte by byte, as a test shows; any difference is "
        f"noise. Each issues {by_rows.counter('instructions'):,.0f} instructions.",
    )


def _float4_against_tile(records: Records) -> Finding:
    vectors, tile = _t(records, "float4, 8x8"), _t(records, "pass-through 32x32")
    time, compute, _ = _changes(vectors, tile)
    return Finding(
        _changes_text(vectors, tile),
        CONFIRMED if time < -NOISE and compute > 0 else THAT_GPU,
        f"{_sectors(vectors)} of 16 bytes a thread, against {_sectors(tile)} of 4 bytes.",
    )


def _float4_large_block(records: Records) -> Finding:
    large, small = (_t(records, f"float4, {shape}") for shape in ("32x32", "8x8"))
    compute = _changes(large, small)[1]
    return Finding(
        _changes_text(large, small),
        same_direction(compute, -0.34),
        f"{large.kernel['grid'][0] * large.kernel['grid'][1]} blocks of 1024 threads for 132 "
        f"multiprocessors, and an occupancy of {large.counter('occupancy_percent'):.0f} % against "
        f"{small.counter('occupancy_percent'):.0f} %.",
    )


def _float4_small_block(records: Records) -> Finding:
    warp, block = (_t(records, f"float4, {shape}") for shape in ("8x4", "8x8"))
    time = change(warp.seconds, block.seconds)
    return Finding(
        f"time {signed(time)} (a block of one warp)",
        same_direction(time, 0.08),
        f"Occupancy {warp.counter('occupancy_percent'):.0f} % against "
        f"{block.counter('occupancy_percent'):.0f} %: at most 32 blocks fit a multiprocessor.",
    )


def _float2(records: Records, block: str, slower: float) -> Finding:
    float2, float4 = _t(records, f"float2, {block}"), _t(records, "float4, 8x8")
    time = change(float2.seconds, float4.seconds)
    dram = change(float2.counter("dram_percent"), float4.counter("dram_percent"))
    return Finding(
        f"time {signed(time)}, DRAM {signed(dram)}; long scoreboard "
        f"{float4.stall('long_scoreboard'):.1f} to {float2.stall('long_scoreboard'):.1f} cycles",
        same_direction(time, slower),
        f"{_sectors(float2)} against {_sectors(float4)}; occupancy "
        f"{float2.counter('occupancy_percent'):.0f} % against "
        f"{float4.counter('occupancy_percent'):.0f} %.",
    )


def _one_by_two(records: Records) -> Finding:
    one, vectors = _t(records, "one row by two columns"), _t(records, "float4, 4x64")
    return Finding(
        f"{duration(one.seconds)}, {one.share:.0%} of the ceiling; float4 "
        f"{duration(vectors.seconds)}",
        CONFIRMED if one.seconds < _t(records, "naive 64x8, along reads").seconds else REFUTED,
        f"{_sectors(one)}; warps wait {_waits(one)}.",
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
    found = [_t(records, name, S_SIZE) for name in names]
    seconds = [measured.seconds for measured in found]
    tile, padded = found[3], found[4]
    return Finding(
        ", ".join(f"{m.name.partition(',')[0]} {duration(m.seconds)}" for m in found),
        CONFIRMED if seconds == sorted(seconds, reverse=True) else THAT_GPU,
        f"{tile.counter('load_conflicts_per_request'):.1f} conflicts a load of the tile, "
        f"{padded.counter('load_conflicts_per_request'):.2f} padded.",
    )


def _not_square(records: Records) -> Finding:
    found = {shape: _t(records, f"padded {shape}", S_SIZE) for shape in ("32x32", "64x8")}
    return Finding(
        ", ".join(
            f"{shape} {duration(m.seconds)} with {_sectors(m)}" for shape, m in found.items()
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


# D: a beginner's page with a dot product and two matrix products.


def _dot(records: Records, size: str, name: str) -> Measured:
    return records.rung("dot", size, name)


def _nanoseconds(measured: Measured) -> float:
    return measured.total("nanoseconds")


def _tree(records: Records) -> Finding:
    serial, tree = "serial sum of a block, rest on the host", "tree, rest on the host"
    kernels = {
        size: [_nanoseconds(_dot(records, size, name)) for name in (serial, tree)]
        for size in (SHORT, LONG)
    }
    gain, gain_long = (change(tree, serial) for serial, tree in kernels.values())
    return Finding(
        f"kernels of {kernels[SHORT][0] / 1e3:.2f} and {kernels[SHORT][1] / 1e3:.2f} us at {SHORT} "
        f"elements ({signed(gain)}), {signed(gain_long)} at {LONG}",
        same_direction(gain, -1),
        f"A serial block waits {_waits(_dot(records, SHORT, serial))}; a tree "
        f"{_waits(_dot(records, SHORT, tree))}. A long vector hides either.",
    )


def _atomics(records: Records) -> Finding:
    host, atomic = (
        [_dot(records, size, f"tree{how}, 512 threads, 32 blocks{rest}") for size in (SHORT, LONG)]
        for how, rest in (("", ", rest on the host"), (" and atomicAdd", ""))
    )
    return Finding(
        "; ".join(
            f"{size} elements: {duration(by_host.seconds)} with the host, "
            f"{duration(by_atomic.seconds)} with atomicAdd"
            for size, by_host, by_atomic in zip((SHORT, LONG), host, atomic, strict=True)
        ),
        mechanism(all(a.seconds < h.seconds for h, a in zip(host, atomic, strict=True))),
        "The kernels alone differ by "
        f"{signed(change(_nanoseconds(atomic[1]), _nanoseconds(host[1])))} at {LONG}; the rest is "
        "a copy and a wait. The order of additions, and with it the last digits, changes from run "
        "to run.",
    )


def _few_blocks(records: Records) -> Finding:
    few, many = (
        _dot(records, LONG, name)
        for name in ("tree and atomicAdd, 512 threads, 32 blocks", "tree and atomicAdd")
    )
    return Finding(
        f"{rate(few.speed, 'B')} against {rate(many.speed, 'B')} with up to 1024 blocks of 256",
        THAT_GPU if change(few.seconds, many.seconds) > NOISE else CONFIRMED,
        "32 blocks leave 100 of 132 multiprocessors idle: DRAM is "
        f"{few.counter('dram_percent'):.0f} % busy, and {many.counter('dram_percent'):.0f} % with "
        "more.",
    )


def _matmul(records: Records, name: str, dtype: str, size: str = PRODUCT) -> Measured:
    return records.rung("matmul", size, name, dtype)


def _sums_in_memory(records: Records) -> Finding:
    memory, register = (
        _matmul(records, name, "float32") for name in ("sums in global memory", "shared tiles")
    )
    slower = change(memory.seconds, register.seconds)
    return Finding(
        f"time {signed(slower)}; to L2 go {count_bytes(memory.total('l2_write_bytes'))} instead of "
        f"{count_bytes(register.total('l2_write_bytes'))}",
        REFUTED,
        "Nobody clears the output: the result is the product plus what the memory held, as a test "
        "shows with sevens. With zeros below it is right, and every k-tile reads and writes all "
        "of c.",
    )


D = [
    Claim("a log2 tree beats a serial sum of the block", _tree),
    Claim("atomicAdd beats partial sums that are added on the host", _atomics),
    Claim("512 threads a block and at most 32 blocks are enough", _few_blocks),
    Claim("a tiled product may add to the output in global memory with `+=`", _sums_in_memory),
]


# M: a paper on matrix products on a GT200.


def _formula(records: Records) -> Finding:
    rungs = ("shared tiles", "register tiles", "double-buffered", "warp tiles")
    errors = []
    for name in rungs:
        measured = _matmul(records, name, "float64")
        predicted = predicted_reuse(measured)
        elements = measured.total("load_sectors") * 32 / 8
        counted = measured.problem["flops"] / elements if elements else 0.0
        # cp.async is no load of a thread to global memory that this counter sees in every version.
        if counted:
            errors.append((name, change(counted, predicted)))
    if not errors:
        raise NotMeasured("loads of the product's rungs")
    worst = max(abs(error) for _, error in errors)
    return Finding(
        ", ".join(f"{name} {signed(error)}" for name, error in errors) + " of the prediction",
        mechanism(worst < 0.1),
        "It counts what threads ask for; what comes from DRAM is less, for L2 serves the blocks "
        "that share rows and columns: see the table of reuse.",
    )


def _share_of_peak(measured: Measured, dtype: str) -> float:
    return measured.speed / PEAK[dtype]


def _plain(records: Records) -> Finding:
    plain, better = (
        _matmul(records, name, "float64")
        for name in ("four sums a thread", "column of b in registers")
    )
    gain = change(plain.seconds, better.seconds)
    return Finding(
        f"{_share_of_peak(plain, 'float64'):.0%} and {_share_of_peak(better, 'float64'):.0%} of "
        f"{rate(PEAK['float64'], 'FLOP')}",
        same_direction(gain, 1),
        f"{plain.counter('shared_load_wavefronts'):.2e} wavefronts of shared memory against "
        f"{better.counter('shared_load_wavefronts'):.2e}; the float64 units are "
        f"{plain.counter('float64_percent'):.0f} % and {better.counter('float64_percent'):.0f} % "
        f"busy, and warps wait {_waits(better)}.",
    )


def _of_peak(records: Records) -> Finding:
    better = _matmul(records, "column of b in registers", "float64")
    peer = _matmul(records, "jnp.matmul", "float64")
    share = _share_of_peak(better, "float64")
    return Finding(
        f"{share:.0%} of the CUDA cores' peak, {better.speed / peer.speed:.0%} of cuBLAS",
        CONFIRMED if share >= 0.9 else THAT_GPU,
        "A GT200 has one float64 unit a multiprocessor, which a warp keeps busy for 32 cycles; an "
        "H100 has 64, and cuBLAS uses its tensor cores. Here the float64 units are "
        f"{better.counter('float64_percent'):.0f} % busy.",
    )


def _near_peak(records: Records) -> Finding:
    tiles = _matmul(records, "warp tiles", "float64")
    share = _share_of_peak(tiles, "float64")
    return Finding(
        f"{rate(tiles.speed, 'FLOP')}, {share:.0%} of {rate(PEAK['float64'], 'FLOP')}",
        mechanism(share >= 0.8),
        f"The float64 units are {tiles.counter('float64_percent'):.0f} % busy; "
        f"{tiles.counter('load_conflicts_per_request'):.2f} bank conflicts a load; warps wait "
        f"{_waits(tiles)}.",
    )


M = [
    Claim("an element that is loaded serves 2 / (1/w + 1/h) operations in a tile of w x h",
          _formula),
    Claim("a column of b in registers beats both operands in shared memory (float64)", _plain),
    Claim("that is 97 % of the peak and equal to CUBLAS", _of_peak),
    Claim("plain float64 arithmetic can come near its peak: 80 % (*warp tiles*)", _near_peak),
]  # fmt: skip


# What the comments of the rungs expect.


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
            f"{_state(one)}; *{before}* {_state(other)}.",
        )

    return rule


def _state(measured: Measured) -> str:
    """Return what the counters say about what limits a kernel."""
    return (
        f"is at {measured.counter('compute_percent'):.0f} % compute and "
        f"{measured.counter('memory_percent'):.0f} % memory, waits {_waits(measured)}"
    )


def _no_conflicts(name: str, conflicts: float) -> Callable[[Records], Finding]:
    def rule(records: Records) -> Finding:
        found = _t(records, name, LARGE)
        counted = found.counter("load_conflicts_per_request")
        return Finding(
            f"{counted:.2f} conflicts a load",
            mechanism(near(counted, conflicts, 0.1)),
            f"{found.counter('instructions') / 2**26 * 32:.1f} instructions an element; "
            f"{_state(found)}.",
        )

    return rule


def _share_of_memory(ladder: str, size: str, name: str, share: float, title: str = "",
                     ) -> Callable[[Records], Finding]:  # fmt: skip
    def rule(records: Records) -> Finding:
        found = records.rung(ladder, size, name, title)
        return Finding(
            f"{found.share:.0%} of the bandwidth of a long copy or read",
            mechanism(found.share >= share),
            f"DRAM is {found.counter('dram_percent'):.0f} % busy; warps wait {_waits(found)}.",
        )

    return rule


def _share_of_cores(name: str, dtype: str, share: float) -> Callable[[Records], Finding]:
    pipe = {"float32": "fma", "float64": "float64"}[dtype]

    def rule(records: Records) -> Finding:
        found = _matmul(records, name, dtype)
        reached = _share_of_peak(found, dtype)
        return Finding(
            f"{reached:.0%} of {rate(PEAK[dtype], 'FLOP')} ({dtype})",
            mechanism(reached >= share),
            f"The units are {found.counter(f'{pipe}_percent'):.0f} % busy and "
            f"{found.counter('issue_percent'):.0f} % of issue slots are used; warps wait "
            f"{_waits(found)}.",
        )

    return rule


def _half_sectors(records: Records) -> Finding:
    direct, staged = (
        _matmul(records, name, "bfloat16") for name in ("ping-pong", "overlapped epilogue")
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


def expectations(ladder: str, records: Records) -> str:
    """Return what the comments of a ladder's rungs expect, against what was measured."""
    rows: Iterator[tuple[str, ...]] = (
        (claim.text, found.numbers, "yes" if found.verdict == CONFIRMED else _no(found), found.why)
        for claim in EXPECTATIONS[ladder]
        for found in [claim.finding(records)]
    )
    return markdown(("expected", "measured", "so it is", "by the counters"), rows, left=4)


def _no(found: Finding) -> str:
    return found.verdict if found.verdict == NOT_MEASURED else "no"
