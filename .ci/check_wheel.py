"""Fail if a wheel lacks a part of the product, has one of the repository, or is for one machine.

python .ci/check_wheel.py WHEEL [GLIBC]    the newest glibc that it may need, 2.28 for example
"""

from __future__ import annotations

import math
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the wheel has of each folder of the repository.
SOURCES = {"jax_tilekern": ROOT / "jax_tilekern", "jax_tilekern/cuda": ROOT / "ffi/cuda"}
SUFFIXES = {".py", ".pyi", ".typed", ".cuh", ".json", ".npz", ".md"}


def product() -> set[str]:
    """Return the files of a wheel, but for the compiled module, as the repository has them."""
    return {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in SOURCES.items()
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES
    }


def problems(names: list[str]) -> list[str]:
    """Return what is wrong with the files of a wheel."""
    # auditwheel adds entries of folders, which end with a slash.
    files = {name for name in names if not name.endswith("/") and ".dist-info/" not in name}
    compiled = {name for name in files if re.fullmatch(r"jax_tilekern/_core\.[\w.-]+\.so", name)}
    parts = product()
    found = [f"{name} is no part of the product" for name in sorted(files - parts - compiled)]
    found += [f"{name} is missing" for name in sorted(parts - files)]
    if not compiled:
        found.append("jax_tilekern/_core.*.so, the compiled module, is missing")
    return found


def platform_problems(name: str, newest: str = "") -> list[str]:
    """Return what is wrong with the platforms in the file name of a wheel that needs a glibc."""
    limit = tuple(map(int, newest.split("."))) if newest else (math.inf,)
    found = []
    for platform in name.removesuffix(".whl").rpartition("-")[2].split("."):
        glibc = re.match(r"manylinux_(\d+)_(\d+)_", platform)
        if glibc is None and not platform.startswith("manylinux"):
            found.append(
                f"{name} is for {platform}, which says nothing of the libraries that it needs; "
                "auditwheel repair finds the tag of manylinux"
            )
        elif glibc is not None and tuple(map(int, glibc.groups())) > limit:
            found.append(f"{name} needs glibc {glibc[1]}.{glibc[2]}, which is newer than {newest}")
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with zipfile.ZipFile(path) as wheel:
        found = problems(wheel.namelist()) + platform_problems(path.name, *sys.argv[2:])
    sys.exit("\n".join(found) or 0)
