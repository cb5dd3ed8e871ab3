"""Programs that the last release exported still run: see ``exported_programs.py``."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from exported_programs import ON_HOPPER, ON_TWO_DEVICES, PROGRAMS, shardings
from jax import export

from jax_tilekern.interop import ffi

FOLDER = Path(__file__).parent / "exported"
FILES = sorted(FOLDER.glob("*/*.bin"))


def runs_here(name):
    if name not in ON_HOPPER:
        return jax.default_backend() == "cpu"
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_program_of_an_earlier_release_runs(file):
    if not runs_here(file.stem):
        pytest.skip("for another device")
    _, operands, expected = PROGRAMS[file.stem]
    program = jax.jit(export.deserialize(file.read_bytes()).call)
    if file.stem in ON_TWO_DEVICES:
        operands = jax.device_put(operands, shardings())
    compiled = program.lower(*operands).compile()
    # A local product is XLA's on CPUs where that is as fast.
    is_local = file.stem in ON_TWO_DEVICES
    assert re.search(f"jax_tilekern_(cpu|cuda){'|dot' * is_local}", compiled.as_text())
    assert "jax_tilekern_partitioned" not in compiled.as_text()
    np.testing.assert_allclose(compiled(*operands), expected, rtol=1e-5, atol=1e-6)


# Those that a release lacks.
NEW = {
    "0.1.0": {
        ffi.CPU_ORDER_BY_KEY, ffi.CPU_SEGMENT_REDUCE, ffi.CPU_MATRIX_EIGH, ffi.CPU_MATRIX_QR,
        ffi.CPU_MATRIX_SVD, ffi.CUDA_LAUNCH_OVERLAPPED,
    }
}  # fmt: skip


def test_the_programs_have_every_kind_of_call():
    targets = set(ffi.FFI_TARGETS) - {ffi.CUDA_LAUNCH_CHECKED}
    texts = {file: export.deserialize(file.read_bytes()).mlir_module() for file in FILES}
    for release in FOLDER.iterdir():
        text = "".join(text for file, text in texts.items() if file.parent == release)
        known = targets - NEW.get(release.name, set())
        assert set(re.findall(r"@(jax_tilekern_\w+)\(", text)) == known
