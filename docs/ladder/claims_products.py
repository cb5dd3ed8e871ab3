"""What D, a page for beginners, and M, a paper on matrix products, claim."""

from __future__ import annotations

from claim import (
    CONFIRMED,
    LONG,
    NOISE,
    PEAK,
    REFUTED,
    SHORT,
    THAT_GPU,
    Claim,
    Finding,
    change,
    matmul,
    mechanism,
    same_direction,
    share_of_peak,
    signed,
    stalls_of,
)
from records import Measured, NotMeasured, Records
from tables import count_bytes, predicted_reuse

from jax_tilekern.cli.console import duration, rate

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
        f"A serial block waits {stalls_of(_dot(records, SHORT, serial))}; a tree "
        f"{stalls_of(_dot(records, SHORT, tree))}. A long vector hides either.",
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
        "32 blocks leave 100 of 132 SMs idle: DRAM is "
        f"{few.counter('dram_percent'):.0f} % busy, and {many.counter('dram_percent'):.0f} % with "
        "more.",
    )


def _sums_in_memory(records: Records) -> Finding:
    memory, register = (
        matmul(records, name, "float32") for name in ("sums in global memory", "shared tiles")
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
        measured = matmul(records, name, "float64")
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
        "off the prediction by: " + ", ".join(f"{name} {signed(error)}" for name, error in errors),
        mechanism(worst < 0.1),
        "It counts what threads ask for; what comes from DRAM is less, for L2 serves the blocks "
        "that share rows and columns: see the table of reuse.",
    )


def _plain(records: Records) -> Finding:
    plain, better = (
        matmul(records, name, "float64")
        for name in ("four sums a thread", "column of b in registers")
    )
    gain = change(plain.seconds, better.seconds)
    return Finding(
        f"{share_of_peak(plain, 'float64'):.0%} and {share_of_peak(better, 'float64'):.0%} of "
        f"{rate(PEAK['float64'], 'FLOP')}",
        same_direction(gain, 1),
        f"{plain.counter('shared_load_wavefronts'):.2e} wavefronts of shared memory against "
        f"{better.counter('shared_load_wavefronts'):.2e}; the float64 units are "
        f"{plain.counter('float64_percent'):.0f} % and {better.counter('float64_percent'):.0f} % "
        f"busy, and warps wait {stalls_of(better)}.",
    )


def _of_peak(records: Records) -> Finding:
    better = matmul(records, "column of b in registers", "float64")
    peer = matmul(records, "jnp.matmul", "float64")
    share = share_of_peak(better, "float64")
    return Finding(
        f"{share:.0%} of the CUDA cores' peak, {better.speed / peer.speed:.0%} of cuBLAS",
        CONFIRMED if share >= 0.9 else THAT_GPU,
        "A GT200 has one float64 unit an SM, which a warp keeps busy for 32 cycles; an "
        "H100 has 64, and cuBLAS uses its tensor cores. Here the float64 units are "
        f"{better.counter('float64_percent'):.0f} % busy.",
    )


def _near_peak(records: Records) -> Finding:
    tiles = matmul(records, "warp tiles", "float64")
    share = share_of_peak(tiles, "float64")
    return Finding(
        f"{rate(tiles.speed, 'FLOP')}, {share:.0%} of {rate(PEAK['float64'], 'FLOP')}",
        mechanism(share >= 0.8),
        f"The float64 units are {tiles.counter('float64_percent'):.0f} % busy; "
        f"{tiles.counter('load_conflicts_per_request'):.2f} bank conflicts a load; warps wait "
        f"{stalls_of(tiles)}.",
    )


M = [
    Claim("an element that is loaded serves 2 / (1/w + 1/h) operations in a tile of w x h",
          _formula),
    Claim("a column of b in registers beats both operands in shared memory (float64)", _plain),
    Claim("that is 97 % of the peak and equal to CUBLAS", _of_peak),
    Claim("plain float64 arithmetic can come near its peak: 80 % (*warp tiles*)", _near_peak),
]  # fmt: skip
