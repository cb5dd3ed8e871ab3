"""A wheel holds the product alone; ``.ci/wheels`` builds them and checks them by the same rules."""

import os
import re
import runpy
import subprocess
import textwrap
import tomllib
from pathlib import Path

import pytest

import jax_tilekern

ROOT = Path(__file__).parent.parent
CHECKS = runpy.run_path(str(ROOT / ".ci" / "check_wheel.py"))
problems, platform_problems = CHECKS["problems"], CHECKS["platform_problems"]


@pytest.fixture
def names():
    package = [p.relative_to(ROOT) for p in (ROOT / "jax_tilekern").rglob("*") if p.is_file()]
    cuda = ROOT / "ffi" / "cuda"
    return [
        "jax_tilekern/",
        "jax_tilekern/_core.abi3.so",
        f"jax_tilekern-{jax_tilekern.__version__}.dist-info/METADATA",
        *(str(path) for path in package if "__pycache__" not in path.parts),
        *(f"jax_tilekern/cuda/{path.relative_to(cuda)}" for path in cuda.rglob("*.cuh")),
    ]


def test_every_file_of_the_package_belongs_in_the_wheel(names):
    assert problems(names) == []


@pytest.mark.parametrize(
    "name",
    [
        "benchmarks/command_line.py", "jax_tilekern/ladder/matmul/01_naive.cu",
        "jax_tilekern/cli/suites/sum-cpu.toml", "jax_tilekern/tests/test_add.py",
    ],
)  # fmt: skip
def test_a_file_of_the_repository_alone_is_refused(names, name):
    assert problems([*names, name]) == [f"{name} is no part of the product"]


def test_a_missing_part_is_named(names):
    parts = ["jax_tilekern/cli/digits.npz", "jax_tilekern/cuda/add.cuh", "jax_tilekern/linalg.py"]
    for part in parts:
        assert problems([n for n in names if n != part]) == [f"{part} is missing"]
    (problem,) = problems([n for n in names if not n.endswith(".so")])
    assert "compiled module" in problem


def test_a_wheel_names_the_manylinux_that_it_is_for():
    name = "jax_tilekern-0.1.0-cp312-abi3-manylinux_2_{}_x86_64.whl"
    assert platform_problems(name.format("26_x86_64.manylinux_2_28"), "2.28") == []
    assert platform_problems(name.format(34)) == []
    assert platform_problems("jax_tilekern-0.1.0-cp312-abi3-manylinux2014_aarch64.whl") == []
    (problem,) = platform_problems(name.format(34), "2.28")
    assert "needs glibc 2.34, which is newer than 2.28" in problem
    (problem,) = platform_problems("jax_tilekern-0.1.0-cp312-abi3-linux_x86_64.whl")
    assert "is for linux_x86_64" in problem


def test_every_copy_of_the_version_is_the_same():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == jax_tilekern.__version__
    copies = {
        "CITATION.cff": f"version: {version}",
        ".ci/conda/recipe.yaml": f'  version: "{version}"',
        "docs/changelog.md": f"## {version}",
    }
    for name, line in copies.items():
        assert line in (ROOT / name).read_text().splitlines(), name


@pytest.mark.parametrize("version", [jax_tilekern.__version__, "9.9.9"])
def test_the_workflow_refuses_the_tag_of_another_version(version):
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (script,) = re.findall(r"The tag is the version\n.*\n +run: \|\n((?: {10}.*\n)+)", workflow)
    finished = subprocess.run(
        ["bash", "-e", "-c", textwrap.dedent(script)], cwd=ROOT, check=False,
        env={"PATH": os.environ["PATH"], "GITHUB_REF_NAME": f"v{version}"},
    )  # fmt: skip
    assert (finished.returncode == 0) == (version == jax_tilekern.__version__)


def test_every_build_is_for_the_same_glibc():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    images = {settings[f"manylinux-{arch}-image"] for arch in ("x86_64", "aarch64")}
    (glibc,) = re.findall(r"^glibc=(\d+\.\d+)$", (ROOT / ".ci" / "wheels").read_text(), re.M)
    assert images == {f"manylinux_{glibc.replace('.', '_')}"}
    assert f"glibc {glibc} and later" in (ROOT / "docs" / "compatibility.md").read_text()
    variants = (ROOT / ".ci" / "conda" / "variants.yaml").read_text()
    assert f'c_stdlib_version: ["{glibc}"]' in variants


def test_the_recipe_of_conda_has_its_variants():
    """rattler-build knows no default of ``stdlib``, and builds one package without versions."""
    conda = ROOT / ".ci" / "conda"
    recipe, variants = ((conda / f"{x}.yaml").read_text() for x in ("recipe", "variants"))
    for language in re.findall(r'stdlib\("(\w+)"\)', recipe):
        assert f"\n{language}_stdlib: " in variants
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    (minors,) = re.findall(r"cp3(\d){([\d,]+)}", wheels)
    versions = [f"3.{minors[0]}{x}" for x in minors[1].split(",")]
    assert re.findall(r'"(3\.\d+)\.\*"', variants) == versions


def test_the_recipe_of_conda_needs_what_the_wheel_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    recipe = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text().replace(" ", "")
    dependencies = project["project"]["dependencies"] + project["build-system"]["requires"]
    assert [name for name in dependencies if f"-{name}\n" not in recipe] == []
