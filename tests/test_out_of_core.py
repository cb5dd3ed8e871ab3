"""Products by blocks: plans, bits, what is read, interruptions and errors."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numerics import BF16, UNIT_ROUNDOFF, exact

import jax_tilekern as jtk
from jax_tilekern import out_of_core
from jax_tilekern.out_of_core import transfer
from jax_tilekern.out_of_core.plan import Block, Sizes, choose_plan

F32 = (4, 4, 4, 4)


# Plans.


def test_a_product_that_fits_is_one_block():
    plan = choose_plan(Sizes(1000, 900, 800, *F32), 1 << 30)
    assert (plan.rows, plan.columns, plan.depth) == (1000, 900, 800)
    assert plan.read_bytes == 4 * 800 * (1000 + 900)
    assert plan.write_bytes == 4 * 1000 * 900
    assert plan.operations == 2 * 1000 * 900 * 800


sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, st.integers(20, 26), st.integers(1, 4))
def test_plans_keep_to_their_limit_and_cover_the_product(m, n, k, limit, devices):
    plan = choose_plan(Sizes(m, n, k, 2, 4, 2, 4), 1 << limit, devices)
    assert plan.memory_bytes <= 1 << limit
    rows, columns, depth = plan.grid
    assert (rows - 1) * plan.rows < m <= rows * plan.rows
    assert (columns - 1) * plan.columns < n <= columns * plan.columns
    assert (depth - 1) * plan.depth < k <= depth * plan.depth
    shared = [tile for i in range(plan.devices) for tile in plan.tiles_of(i)]
    assert shared == plan.tiles
    assert len(set(shared)) == rows * columns
    if plan.devices == 1:
        assert plan.read_bytes / 1.5 <= plan.reads_alone <= plan.read_bytes * 1.5


def test_every_device_has_work():
    plan = choose_plan(Sizes(5000, 5000, 5000, *F32), 1 << 30, 8)
    assert plan.devices == 8
    assert min(len(plan.tiles_of(i)) for i in range(8)) >= 1


def test_too_little_memory_says_what_is_enough():
    sizes = Sizes(5000, 5000, 5000, *F32)
    with pytest.raises(ValueError, match="a memory_limit of 1000 bytes is too small") as error:
        choose_plan(sizes, 1000)
    least = int(str(error.value).split(" need ")[1].split()[0])
    assert choose_plan(sizes, least).memory_bytes <= least
    with pytest.raises(ValueError, match="too small"):
        choose_plan(sizes, least - 1)


# Products.


def operands(rng, m, n, k, dtype=np.float32):
    if np.dtype(dtype).kind == "i":
        return (rng.integers(-100, 100, shape).astype(dtype) for shape in ((m, k), (k, n)))
    return (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))


def by_blocks(a, b, plan, sums, out):
    """The same blocks, multiplied one after the other."""
    result = np.empty((a.shape[0], b.shape[1]), out)
    for i in range(0, a.shape[0], plan.rows):
        for j in range(0, b.shape[1], plan.columns):
            total = None
            for k in range(0, a.shape[1], plan.depth):
                part = jtk.matmul(
                    jnp.asarray(a[i : i + plan.rows, k : k + plan.depth]),
                    jnp.asarray(b[k : k + plan.depth, j : j + plan.columns]),
                    preferred_element_type=sums,
                )
                total = part if total is None else total + part
            result[i : i + plan.rows, j : j + plan.columns] = total.astype(out)
    return result


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [(np.float32, np.float32), (BF16, np.float32), (np.float64, np.float64)],
)
@pytest.mark.parametrize(("m", "n", "k"), [(129, 1000, 257), (700, 500, 900), (300, 200, 5000)])
@pytest.mark.thorough
def test_bits_are_those_of_the_same_blocks(rng, x64, m, n, k, dtype, sums):
    a, b = operands(rng, m, n, k, dtype)
    limit = 1_500_000 * np.dtype(sums).itemsize // 4
    plan = out_of_core.plan(a, b, memory_limit=limit)
    assert len(plan.tiles) * plan.grid[2] > 1
    product = out_of_core.matmul(a, b, memory_limit=limit)
    assert product.dtype == dtype
    np.testing.assert_array_equal(product, by_blocks(a, b, plan, sums, dtype))
    error = np.abs(exact(product) - exact(a) @ exact(b)).max()
    magnitude = (np.abs(exact(a)) @ np.abs(exact(b))).max()
    tf32 = jax.default_backend() == "gpu" and dtype == np.float32
    unit = 2.0**-11 if tf32 else UNIT_ROUNDOFF[np.dtype(sums)]
    assert error <= (2 * np.sqrt(k) * unit + UNIT_ROUNDOFF[np.dtype(dtype)]) * magnitude


def test_integers_are_exact(rng):
    a, b = operands(rng, 300, 400, 500, np.int8)
    product = out_of_core.matmul(a, b, memory_limit=700_000, preferred_element_type=np.int32)
    np.testing.assert_array_equal(product, a.astype(np.int32) @ b.astype(np.int32), strict=True)


class Sliced:
    """An array that has slices and nothing else, as those of zarr and h5py."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.read = 0

    def __getitem__(self, index):
        part = np.array(self.array[index])
        self.read += part.nbytes
        return part


@pytest.mark.thorough
def test_anything_with_slices(rng):
    a, b = operands(rng, 300, 200, 400)
    left, right = Sliced(a), Sliced(b)
    expected = out_of_core.matmul(a, b, memory_limit=800_000)
    plan = out_of_core.plan(left, right, memory_limit=800_000)
    sampled = left.read + right.read
    np.testing.assert_array_equal(out_of_core.matmul(left, right, memory_limit=800_000), expected)
    assert left.read + right.read - sampled == plan.read_bytes
    np.testing.assert_array_equal(
        out_of_core.matmul(jnp.asarray(a), jnp.asarray(b), memory_limit=800_000), expected
    )
    views = np.asfortranarray(a), np.ascontiguousarray(b[::-1])[::-1]
    np.testing.assert_array_equal(out_of_core.matmul(*views, memory_limit=800_000), expected)


@pytest.mark.parametrize("ahead_bytes", [1, 2000, 1 << 20])
def test_chunks_arrive_in_their_places(rng, monkeypatch, ahead_bytes):
    monkeypatch.setattr(transfer, "_SMALLEST_CHUNK", 1000)
    whole = rng.standard_normal((70, 90)).astype(np.float32)
    sources = [whole, whole[:, 5:50], whole[3:40], whole.T, whole[:1, :1]]
    parts = [(Block("lhs", i, 0), part) for i, part in enumerate(sources)]
    steps = list(transfer.to_device(parts, jax.devices()[0], ahead_bytes))
    arrived = [step for step in steps if step is not None]
    assert [block.outer for block, _ in arrived] == list(range(len(sources)))
    for (_, array), source in zip(arrived, sources, strict=True):
        np.testing.assert_array_equal(array, source, strict=True)
    rows = sum(map(len, sources))
    assert len(steps) == rows if ahead_bytes == 1 else len(sources) <= len(steps) < rows


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty(shape):
    m, n, k = shape
    product = out_of_core.matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32))
    np.testing.assert_array_equal(product, np.zeros((m, n), np.float32), strict=True)


def test_float64_without_x64_is_float32(rng):
    a, b = operands(rng, 20, 30, 40, np.float64)
    assert out_of_core.matmul(a, b).dtype == np.float32


# On disk.


def memmaps(folder, a, b):
    made = []
    for name, array in (("a", a), ("b", b)):
        file = np.memmap(folder / name, array.dtype, "w+", shape=array.shape)
        file[:] = array
        file.flush()
        made.append(np.memmap(folder / name, array.dtype, "r", shape=array.shape))
    return made


class Stopped(Exception):
    pass


def stop_after(blocks):
    def progress(status):
        if status.done == blocks:
            raise Stopped

    return progress


def journals(folder):
    return [path.name for path in Path(folder).iterdir() if "unfinished" in path.name]


@pytest.mark.thorough
def test_an_interrupted_product_goes_on(rng, tmp_path):
    x, y = operands(rng, 500, 400, 300)
    a, b = memmaps(tmp_path, x, y)
    expected = out_of_core.matmul(x, y, memory_limit=600_000)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=expected.shape)
    total = len(out_of_core.plan(a, b, memory_limit=600_000).tiles)
    assert total > 6
    with pytest.raises(Stopped):
        out_of_core.matmul(a, b, out=out, memory_limit=600_000, progress=stop_after(4))
    assert journals(tmp_path) == ["out.unfinished.json"]
    done = len(json.loads((tmp_path / "out.unfinished.json").read_text())["done"])
    assert 4 <= done < total
    # As after the end of the process: another map of the same file.
    del out
    out = np.memmap(tmp_path / "out", np.float32, "r+", shape=expected.shape)
    seen = []
    assert out_of_core.matmul(a, b, out=out, memory_limit=600_000, progress=seen.append) is out
    assert seen[0].done == done
    assert len(seen) == total - done + 1
    np.testing.assert_array_equal(out, expected)
    assert journals(tmp_path) == []


def test_blocks_that_were_lost_are_computed_again(rng, tmp_path):
    x, y = operands(rng, 500, 400, 300)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(500, 400))
    with pytest.raises(Stopped):
        out_of_core.matmul(x, y, out=out, memory_limit=600_000, progress=stop_after(4))
    del out
    # Made anew: the journal knows of blocks that the file no longer has.
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(500, 400))
    seen = []
    out_of_core.matmul(x, y, out=out, memory_limit=600_000, progress=seen.append)
    assert seen[0].done == 0
    np.testing.assert_array_equal(out, out_of_core.matmul(x, y, memory_limit=600_000))


def test_a_result_of_something_else_is_not_continued(rng, tmp_path):
    x, y = operands(rng, 300, 300, 300)
    a, b = memmaps(tmp_path, x, y)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(300, 300))
    with pytest.raises(Stopped):
        out_of_core.matmul(a, b, out=out, memory_limit=600_000, progress=stop_after(1))
    for arguments in ((x, b), (b, a), (a, -y)):
        with pytest.raises(ValueError, match="unfinished product of other operands"):
            out_of_core.matmul(*arguments, out=out, memory_limit=600_000)
    with pytest.raises(ValueError, match="or with other blocks"):
        out_of_core.matmul(a, b, out=out, memory_limit=1 << 30)
    changed = np.memmap(tmp_path / "a", np.float32, "r+", shape=a.shape)
    changed[0, 0] += 1
    changed.flush()
    os.utime(tmp_path / "a", ns=(1, 1))
    with pytest.raises(ValueError, match="unfinished product of other operands"):
        out_of_core.matmul(a, b, out=out, memory_limit=600_000)
    (tmp_path / "out.unfinished.json").write_text("{")
    with pytest.raises(ValueError, match="delete it to start again"):
        out_of_core.matmul(a, b, out=out, memory_limit=600_000)


def test_a_full_disk_is_an_error_before_the_start(rng, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    x, y = operands(rng, 100, 100, 100)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(100, 100))
    monkeypatch.setattr(os, "posix_fallocate", full)
    seen = []
    with pytest.raises(OSError, match="No space left"):
        out_of_core.matmul(x, y, out=out, progress=seen.append)
    assert seen == []


def test_an_error_of_an_operand_is_raised(rng):
    class Broken(Sliced):
        def __getitem__(self, index):
            raise OSError("lost")

    a, b = operands(rng, 300, 300, 300)
    with pytest.raises(OSError, match="lost"):
        out_of_core.matmul(a, Broken(b), memory_limit=600_000)


def test_errors(rng):
    a, b = operands(rng, 30, 40, 50)
    with pytest.raises(ValueError, match=r"a has shape \(50,\), which is not a matrix"):
        out_of_core.matmul(a[0], b)
    with pytest.raises(ValueError, match=r"a has shape \(30, 50\), b \(40, 50\)"):
        out_of_core.matmul(a, b.T)
    with pytest.raises(TypeError, match="b is list, which has no shape"):
        out_of_core.matmul(a, [[1.0]])
    with pytest.raises(ValueError, match=r"out has shape \(30, 30\), but the product has"):
        out_of_core.matmul(a, b, out=np.empty((30, 30), np.float32))
    with pytest.raises(TypeError, match="out is float64, but the product is float32"):
        out_of_core.matmul(a, b, out=np.empty((30, 40), np.float64))
    with pytest.raises(ValueError, match="is too small"):
        out_of_core.matmul(a, b, memory_limit=100)
