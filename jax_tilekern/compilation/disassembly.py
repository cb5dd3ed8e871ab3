"""Disassembly of a cubin to SASS, by NVIDIA's ``nvdisasm``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin.

    Raises
    ------
    FileNotFoundError
        If ``nvdisasm`` is not installed; the message has the command that installs it.
    """
    program = _nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([program, "-c", file], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} failed: {done.stderr.strip()}")
    return done.stdout


def _nvdisasm() -> str:
    for path in _candidates():
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(
        "no nvdisasm on PATH, in this Python environment or in /usr/local/cuda; "
        "`pip install nvidia-cuda-nvdisasm` adds it"
    )


def _candidates() -> Iterator[str]:
    found = shutil.which("nvdisasm")
    if found:
        yield found
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels and wheels.submodule_search_locations) or ():
        yield from map(str, Path(root).glob("*/bin/nvdisasm"))
    yield "/usr/local/cuda/bin/nvdisasm"
