"""Fail if a wheel lacks a part of the product, has one of the repository, or is for one machine.

python .ci/check_wheel.py WHEEL [GLIBC]    the newest glibc that it may need, 2.28 for example
"""

from __future__ import annotations

import math
import re
import sys
import zipfile
from pathlib import Path, PurePosixPath

# Folders of the package; a new one is added here on purpose.
FOLDERS = {
    "cli", "compilation", "cuda", "epilogue", "fusion", "inspection", "interop", "ops",
    "out_of_core", "partitioning", "plans", "primitives", "tuning",
}  # fmt: skip
SUFFIXES = {".py", ".pyi", ".so", ".cuh"}
DATA = {
    "jax_tilekern/py.typed",
    "jax_tilekern/cli/digits.npz",
    "jax_tilekern/cli/digits.md",
    *(
        f"jax_tilekern/plans/policy/data/{name}.json"
        for name in ("avx2", "avx512_bf16", "avx512_vnni", "avx512_vnni_amx", "h100", "h200")
    ),
}


def problems(names: list[str]) -> list[str]:
    """Return what is wrong with the files of a wheel."""
    # auditwheel adds entries of folders, which end with a slash.
    files = [
        PurePosixPath(name)
        for name in names
        if not name.endswith("/") and ".dist-info/" not in name
    ]
    found = [
        f"{file} is no part of the product"
        for file in files
        if file.parts[0] != "jax_tilekern"
        or (len(file.parts) > 2 and file.parts[1] not in FOLDERS)
        or (file.suffix not in SUFFIXES and str(file) not in DATA)
    ]
    folders = {file.parts[1] for file in files if len(file.parts) > 2}
    found += [f"the folder {folder} is missing" for folder in sorted(FOLDERS - folders)]
    found += [f"{name} is missing" for name in sorted(DATA - set(names))]
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
