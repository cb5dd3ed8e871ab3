"""The tracked text speaks the field's language: it has none of the words that were retired."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What may not be written, and what to write. A space in a pattern matches a line break as well,
# with the next line's comment mark. Words that are only retired in one sense (line, item, sum,
# turn, box, share) have patterns for that sense.
RETIRED = {
    r"copy engines?": "TMA",
    r"copying threads?": "producer thread",
    r"multiplying warpgroups?": "consumer (math) warpgroup",
    r"second-level caches?": "L2",
    r"(?<!streaming\x20)multiprocessors?": "SM",
    r"blocks? of threads": "CTA (thread block)",
    r"(?:take|takes|taking|took) turns|in turns": "ping-pong (kernels), interleaved (measurements)",
    r"turn barriers?": "ordered barrier",
    r"slabs?": "epilogue subtile",
    r"octets?": "8-row core matrix",
    r"stopwatch": "measured choice, autotuned",
    r"(?:product|products|by|of|float16) pieces": "hi/lo split, split-float16 emulation",
    r"grouped products?": "grouped GEMM",
    r"in \d+ splits": "split-K",
    r"splits of `?k`?": "split-K",
    r"tiles? of `?k`?": "k-tile",
    r"steps? of `?k`?": "MMA k-step",
    r"(?:promoted|promoting|promotes) sums": "promoted accumulators",
    r"(?:the|an) assembler": "ptxas",
    r"(?:shared|exchanged) operands|operands? (?:are|is) exchanged": "swapped A and B",
    r"boxes in shared memory|box in shared memory": "TMA tile",
    r"bands? of (?:\w+ )?(?:rows|columns|tiles)|in bands": "grouped (L2) rasterization",
    r"mends?|mended": "fixes, fixed",
    r"colours?": "RGB (channels-last)",
    r"nobody can use": "an upper bound that ignores grouping",
    r"fence_sums": "warpgroup_fence_operand",
    r"fence_products": "warpgroup_arrive",
    r"publish_barriers": "fence_barrier_init",
    r"load_shared_vector": "load_global_vector",
    r"load_shared_box": "a name that says multicast",
}
# A sentence of a comment has a subject and a verb; one that opens so has neither at hand.
DANGLING = re.compile(
    r"(?:^[ ]*(?:(?://|\#)[ ]|\"\"\")(Of)\b)|(?:(?:^|[.:][ ])(Of[ ](?:which|a|an|nothing))\b)",
    re.MULTILINE,
)

# Records, others' words, and generated or binary files.
NOT_PROSE = (
    "LICENSE",
    "benchmarks/results/",
    "examples/data/",
    "docs/ladder.md",  # has tables of the comments of examples/ladder
    "examples/ladder/",  # the records have digests of these sources
    "tests/test_language.py",
)
# Not converted yet. To be emptied.
NOT_CONVERTED = (
    "jax_tilekern/plans/gemm/sm90/config.py",  # has a key that tuning stores
)
SUFFIXES = (".cc", ".cu", ".cuh", ".h", ".in", ".inc", ".md", ".py", ".toml", ".txt", ".yml")

# Within a phrase: a space, or a line break and the comment mark of the next line. What comes before
# a phrase is looked at afterwards, since the search is fast only for a pattern that opens with
# text.
_SPACE = r"(?: |[ ]*\n[ ]*(?://|#|\*|>)?[ ]*)"
_PATTERNS = {
    re.compile(rf"(?:{words.replace(' ', _SPACE)})(?![\w-])"): instead
    for words, instead in RETIRED.items()
}


def retired_words(text: str) -> list[tuple[int, str]]:
    """Return the line of each retired word or dangling opening, and what to say instead."""
    lower = text.lower()
    found = [
        (match.start(), f'"{" ".join(match[0].split())}": say "{instead}"')
        for pattern, instead in _PATTERNS.items()
        for match in pattern.finditer(lower)
        if not re.match(r"[\w-]", lower[match.start() - 1 : match.start()])
    ]
    for match in DANGLING.finditer(text):
        opening = match[1] or match[2]
        found.append((match.end() - len(opening), f'"{opening} ...": open with the subject'))
    return sorted((text.count("\n", 0, start) + 1, message) for start, message in found)


@pytest.mark.parametrize(
    "text",
    [
        "A streaming multiprocessor (SM) has four subpartitions.",
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
        "for item in items: total += item",
        "the sum of a line's elements",
        "Most of a row is read once.",
        "An amendment recommends tiles of keys.",
        "copy, engine and k-tile",
    ],
)
def test_other_words_are_not(text: str) -> None:
    assert retired_words(text) == []


def test_no_tracked_file_has_a_retired_word() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if files.returncode:
        pytest.skip("not a git checkout")
    paths = [
        path
        for path in files.stdout.splitlines()
        if path.endswith(SUFFIXES) and not path.startswith(NOT_PROSE + NOT_CONVERTED)
    ]
    assert len(paths) > 100
    found = [
        f"{path}:{line}: {message}"
        for path in paths
        if (ROOT / path).is_file()
        for line, message in retired_words((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)
