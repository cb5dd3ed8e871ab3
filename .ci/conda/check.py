"""Build the conda package with rattler-build, and run the recipe's tests, without conda-forge.

python .ci/conda/check.py FOLDER    needs packaging, pip, py-rattler and py-rattler-build

What the recipe needs comes from a channel in FOLDER, made of this Python and of wheels from PyPI;
the compiler is the system's. The package is built and tested as from any other channel. Names and
versions of conda-forge's packages are not checked.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler.index import index_fs
from rattler_build import Stage0Recipe, ToolConfiguration, VariantConfig, assemble_package
from rattler_build.progress import LogEvent

RECIPE = Path(__file__).resolve().parent / "recipe.yaml"
PYTHON = sysconfig.get_python_version()
SITE = f"lib/python{PYTHON}/site-packages"
# The wheels of these, and of what they depend on.
NEEDED = ["pip", "scikit-build-core>=0.11", "nanobind>=2.7", "cmake", "ninja", "jax==0.10.2",
          "jaxlib==0.10.2", "platformdirs", "nvidia-cuda-nvrtc"]  # fmt: skip
# Where wheels have the files that conda has in the prefix, and the package of conda.
MOVED = {
    "cmake": ("cmake/data", ".", "cmake"),
    "ninja": ("ninja-*.data/scripts", "bin", "ninja"),
    "nvidia-cuda-nvrtc": ("nvidia/cu13/lib", "lib", "cuda-nvrtc"),
}


def add(channel: Path, name: str, version: str, files: Path, *depends: str) -> None:
    """Add a package to a channel."""
    assemble_package(
        name=name, version=version, target_platform="linux-64", build_string="0",
        output_dir=channel / "linux-64", files_dir=files, depends=list(depends),
        compression_level=1,
    )  # fmt: skip


def add_python(channel: Path, work: Path) -> None:
    base, library = Path(sys.base_prefix), f"lib/python{PYTHON}"
    ignored = shutil.ignore_patterns("site-packages", "__pycache__", "test", "idlelib")
    shutil.copytree(base / library, work / library, ignore=ignored, symlinks=True)
    (work / SITE).mkdir()
    (work / SITE / "README.txt").write_text("packages\n")
    shutil.copytree(base / f"include/python{PYTHON}", work / f"include/python{PYTHON}")
    (work / "bin").mkdir()
    shutil.copy(base / f"bin/python{PYTHON}", work / "bin")
    for name in ("python", "python3"):
        (work / "bin" / name).symlink_to(f"python{PYTHON}")
    for found in (base / "lib").glob("libpython*.so*"):
        shutil.copy(found, work / "lib", follow_symlinks=False)
    add(channel, "python", sys.version.split()[0], work)


def add_wheel(channel: Path, wheel: Path, work: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(work / "wheel")
    (info,) = (work / "wheel").glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    name, version = canonicalize_name(metadata["Name"]), metadata["Version"]
    if name in MOVED:
        pattern, target, name = MOVED[name]
        (source,) = (work / "wheel").glob(pattern)
        shutil.copytree(source, work / "prefix" / target, dirs_exist_ok=True)
        for program in (work / "prefix").glob("bin/*"):
            program.chmod(0o755)
        add(channel, name, version, work / "prefix")
    else:
        shutil.copytree(work / "wheel", work / "prefix" / SITE)
        required = map(Requirement, metadata.get_all("Requires-Dist", []))
        names = (
            canonicalize_name(x.name)
            for x in required
            if not x.marker or x.marker.evaluate({"extra": ""})
        )
        add(channel, name, version, work / "prefix", f"python {PYTHON}.*", *names)


def make_channel(channel: Path, work: Path) -> None:
    add_python(channel, work / "python")
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "--quiet", "--dest", work / "wheels", *NEEDED], check=True)
    for wheel in sorted((work / "wheels").glob("*.whl")):
        add_wheel(channel, wheel, work / wheel.stem)
    activate = work / "gxx" / "etc/conda/activate.d/gxx.sh"
    activate.parent.mkdir(parents=True)
    activate.write_text("export CC=/usr/bin/gcc CXX=/usr/bin/g++\n")
    add(channel, "gxx_linux-64", "12", work / "gxx")
    (work / "sysroot").mkdir()
    (work / "sysroot" / "empty").touch()
    add(channel, "sysroot_linux-64", "2.28", work / "sysroot")
    (channel / "noarch").mkdir(exist_ok=True)
    asyncio.run(index_fs(channel))


class Log:
    """What rattler-build tells of its steps."""

    def on_log(self, event: LogEvent) -> None:
        print(event.message, flush=True)


def main(folder: Path) -> None:
    channel, work = folder / "channel", folder / "work"
    make_channel(channel, work)
    variants = VariantConfig.from_file(str(RECIPE.parent / "variants.yaml")).to_dict()
    variants = VariantConfig(variants | {"python": [f"{PYTHON}.*"]})
    Stage0Recipe.from_file(RECIPE).run_build(
        variants, ToolConfiguration(test_strategy="native"), folder / "packages",
        [channel.as_uri()], Log(),
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
