"""Products by blocks: plans, bits, what is read, interruptions and errors."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numerics import BF16, UNIT_ROUNDOFF, exact

import jax_tilekern as jtk
from jax_tilekern import out_of_core
from jax_tilekern.out_of_core import product, transfer
from jax_tilekern.out_of_core.plan import WholeProduct, choose_plan

F32 = [np.dtype(np.float32)] * 4
NARROW = [np.dtype(t) for t in (np.float16, np.float32, np.float16, np.float32)]


# Plans.


def test_a_product_that_fits_is_one_block():
    plan = choose_plan(WholeProduct(1000, 900, 800, *F32), 1 << 30)
    assert (plan.rows, plan.columns, plan.depth) == (1000, 900, 800)
    assert plan.read_bytes == 4 * 800 * (1000 + 900)
    assert plan.write_bytes == 4 * 1000 * 900
    assert plan.operations == 2 * 1000 * 900 * 800


sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, st.integers(20, 26), st.integers(1, 4))
def test_plans_keep_to_their_limit_and_cover_the_product(m, n, k, limit, devices):
    plan = choose_plan(WholeProduct(m, n, k, *NARROW), 1 << limit, devices)
    assert plan.memory_bytes <= 1 << limit
    rows, columns, depth = plan.grid
    assert (rows - 1) * plan.rows < m <= rows * plan.rows
    assert (columns - 1) * plan.columns < n <= columns * plan.columns
    assert (depth - 1) * plan.depth < k <= depth * plan.depth
    shared = [tile for i in range(plan.devices) for tile in plan.tiles_of(i)]
    assert shared == plan.tiles
    assert len(set(shared)) == rows * columns

    def size(block):
        outer, whole, dtype = {
            "lhs": (plan.rows, m, np.float16),
            "rhs": (plan.columns, n, np.float32),
        }[block.operand]
        extents = (outer, whole, block.outer), (plan.depth, k, block.depth)
        count = np.prod([min(extent, whole - i * extent) for extent, whole, i in extents])
        return count * np.dtype(dtype).itemsize

    reads = [x for i in range(plan.devices) for s in plan.steps(plan.tiles_of(i)) for x in s.reads]
    assert plan.read_bytes == sum(map(size, reads))


def test_every_device_has_work():
    plan = choose_plan(WholeProduct(5000, 5000, 5000, *F32), 1 << 30, 8)
    assert plan.devices == 8
    assert min(len(plan.tiles_of(i)) for i in range(8)) >= 1


def test_too_little_memory_says_what_is_enough():
    sizes = WholeProduct(5000, 5000, 5000, *F32)
    with pytest.raises(ValueError, match="a memory_limit of 1000 bytes is too small") as error:
        choose_plan(sizes, 1000)
    least = int(str(error.value).split(" need ")[1].split()[0])
    assert choose_plan(sizes, least).memory_bytes <= least
    with pytest.raises(ValueError, match="too small"):
        choose_plan(sizes, least - 1)


# Products.

LIMIT = 600_000


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
@pytest.mark.parametrize(("m", "n", "k"), [(129, 1000, 257), (300, 200, 5000)])
@pytest.mark.one_in(6)
def test_bits_are_those_of_the_same_blocks(rng, x64, m, n, k, dtype, sums):
    a, b = operands(rng, m, n, k, dtype)
    seen = []
    limit = 1_500_000 * np.dtype(sums).itemsize // 4
    result = out_of_core.matmul(a, b, memory_limit=limit, progress=seen.append)
    plan = seen[-1].plan
    assert len(plan.tiles) * plan.grid[2] > 1
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, by_blocks(a, b, plan, sums, dtype))
    error = np.abs(exact(result) - exact(a) @ exact(b)).max()
    magnitude = (np.abs(exact(a)) @ np.abs(exact(b))).max()
    tf32 = jax.default_backend() == "gpu" and dtype == np.float32
    unit = 2.0**-11 if tf32 else UNIT_ROUNDOFF[np.dtype(sums)]
    assert error <= (2 * np.sqrt(k) * unit + UNIT_ROUNDOFF[np.dtype(dtype)]) * magnitude


class Sliced:
    """An array that has slices and nothing else, as those of zarr and h5py."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.read = 0

    def __getitem__(self, index):
        part = np.array(self.array[index])
        self.read += part.nbytes
        return part


def test_operands_of_any_kind_are_read_as_planned(rng):
    a, b = operands(rng, 256, 512, 384, np.int8)
    expected = a.astype(np.int32) @ b.astype(np.int32)

    def check(a, b):
        out = np.zeros_like(expected)
        seen = []
        found = out_of_core.matmul(
            a, b, out=out, memory_limit=LIMIT, preferred_element_type=np.int32, progress=seen.append
        )
        assert found is out
        np.testing.assert_array_equal(out, expected)
        first, *_, last = seen
        assert (first.done, last.done, last.total) == (0, last.total, len(last.plan.tiles))
        assert last.read_bytes == last.plan.read_bytes
        return last

    left, right = Sliced(a), Sliced(b)
    last = check(left, right)
    assert left.read + right.read == last.read_bytes
    check(jnp.asarray(a), np.asfortranarray(b))
    check(a[::-1].copy()[::-1], b.T.copy().T)


def test_the_estimate_and_the_printed_progress(rng, capsys, monkeypatch):
    monkeypatch.setattr(product, "_MEASURED_BYTES", 1 << 20)
    a, b = operands(rng, 256, 256, 256)
    plan = out_of_core.plan(a, b, memory_limit=LIMIT)
    assert plan.seconds > 0
    out_of_core.matmul(a, b, memory_limit=LIMIT, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert str(plan).startswith(lines[0])
    assert lines[-1].startswith(f"{len(plan.tiles)} of {len(plan.tiles)} blocks")


@pytest.mark.parametrize("ahead_bytes", [1, 2000, 1 << 20])
def test_chunks_arrive_in_their_places(rng, monkeypatch, ahead_bytes):
    monkeypatch.setattr(transfer, "_SMALLEST_CHUNK", 1000)
    whole = rng.standard_normal((20, 90)).astype(np.float32)
    sources = [whole, whole[:, 5:50], whole[3:14], whole.T, whole[:1, :1]]
    steps = list(transfer.to_device(sources, jax.devices()[0], ahead_bytes))
    arrived = [step for step in steps if step is not None]
    for array, source in zip(arrived, sources, strict=True):
        np.testing.assert_array_equal(array, source, strict=True)
    rows = sum(map(len, sources))
    assert len(steps) == rows if ahead_bytes == 1 else len(sources) <= len(steps) < rows


def test_empty_and_float64():
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        result = out_of_core.matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32))
        np.testing.assert_array_equal(result, np.zeros((m, n), np.float32), strict=True)
    # Without 64-bit types.
    assert out_of_core.matmul(np.ones((2, 2)), np.ones((2, 2))).dtype == np.float32


# On disk.


class Stopped(Exception):
    pass


def stop_after(blocks):
    def progress(status):
        if status.done == blocks:
            raise Stopped

    return progress


class Files:
    """Operands and the result of a product in files."""

    def __init__(self, folder, rng):
        self.folder = folder
        self.arrays = list(operands(rng, 1024, 384, 128))
        self.a, self.b = (
            self.mapped(name, array.shape) for name, array in zip("ab", self.arrays, strict=True)
        )
        self.a[:], self.b[:] = self.arrays
        self.out = self.mapped("out", (1024, 384))
        self.journal = folder / "out.unfinished.json"

    def mapped(self, name, shape, mode="w+"):
        return np.memmap(self.folder / name, np.float32, mode, shape=shape)

    def stop(self, blocks):
        with pytest.raises(Stopped):
            self.product(progress=stop_after(blocks))

    def product(self, a=None, b=None, limit=LIMIT, **options):
        a, b = self.a if a is None else a, self.b if b is None else b
        return out_of_core.matmul(a, b, out=self.out, memory_limit=limit, **options)


@pytest.fixture
def files(tmp_path, rng):
    return Files(tmp_path, rng)


def test_an_interrupted_product_goes_on(files):
    files.stop(2)
    done = len(json.loads(files.journal.read_text())["done"])
    assert done >= 2
    # As after the end of the process: another map of the same file.
    files.out = files.mapped("out", (1024, 384), "r+")
    # A block that is not what was written is computed again.
    files.out[0, 0] += 1
    seen = []
    assert files.product(progress=seen.append) is files.out
    assert seen[0].done == done - 1
    assert len(seen) == seen[0].total - done + 2
    np.testing.assert_array_equal(files.out, out_of_core.matmul(*files.arrays, memory_limit=LIMIT))
    assert {path.name for path in files.folder.iterdir()} == {"a", "b", "out"}


def test_a_result_of_something_else_is_not_continued(files):
    files.stop(1)
    others = ({"a": files.arrays[0]}, {"b": -files.arrays[1]}, {"limit": 1 << 30})
    for changes in others:
        with pytest.raises(ValueError, match="other operands or with other blocks"):
            files.product(**changes)
    os.utime(files.folder / "a", ns=(1, 1))
    with pytest.raises(ValueError, match="other operands or with other blocks"):
        files.product()
    files.journal.write_text("{")
    with pytest.raises(ValueError, match="delete it to start again"):
        files.product()


def test_a_full_disk_is_an_error_before_the_start(files, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    seen = []
    with pytest.raises(OSError, match="No space left"):
        files.product(progress=seen.append)
    assert seen == []
    assert not files.journal.exists()


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
