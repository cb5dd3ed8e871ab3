"""Problems of an environment, derived from results of probes, and the command that fixes each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# The oldest and the newest version in continuous integration. A micro release of the newest counts
# as tested.
_OLDEST_JAX, _NEWEST_JAX = (0, 10), (0, 12)
_OLDEST_GPU = (8, 0)
# A float32 product of 128 terms errs by less than this in TF32, and by much less in float32.
_TRIAL_ERROR = 2e-3

Result = Mapping[str, Any]


class Diagnosis(NamedTuple):
    """A problem of the environment, in a sentence, and the command that fixes it."""

    what: str
    fix: str


def find_problems(results: Result, errors: Mapping[str, str]) -> list[Diagnosis]:
    """Return the problems that results of probes show.

    Parameters
    ----------
    results, errors
        What :func:`jax_tilekern.cli.machine.probe_results` returns. Missing results are not judged,
        and a probe that failed is itself a problem.
    """
    # A missing backend explains the probes that fail for want of it.
    found = [
        Diagnosis(
            f"doctor could not find out about {name.replace('_', ' ')}: {error}",
            f'python -c "from jax_tilekern.cli import machine; machine.{name}()"  # traceback',
        )
        for name, error in errors.items()
        if not error.startswith("NoBackend")
    ]
    # The parameters of a rule are the results that it needs.
    for rule in (_jax, _backend, _plugin, _gpus, _nvrtc, _cache, _handlers, _product):
        needed = inspect.signature(rule).parameters
        if needed.keys() <= results.keys():
            found += rule(**{name: results[name] for name in needed})
    return found


def _jax(versions: Result) -> Iterator[Diagnosis]:
    version = versions["jax"]
    release = tuple(int(part) for part in version.split(".")[:2])
    fix = f"pip install 'jax>={_dotted(_OLDEST_JAX)},<={_dotted(_NEWEST_JAX)}.99'"
    if release < _OLDEST_JAX:
        what = f"jax {version} is older than {_dotted(_OLDEST_JAX)}, the oldest supported"
        yield Diagnosis(what, fix)
    if release > _NEWEST_JAX:
        yield Diagnosis(
            f"jax {version} is newer than {_dotted(_NEWEST_JAX)}, the newest tested", fix
        )


def _backend(driver: Result, backends: Result, versions: Result) -> Iterator[Diagnosis]:
    restricted, gpus = backends["restricted_to"], driver["gpus"]
    lacks_plugin = gpus and not _plugins(versions)
    fix = (
        f"pip install 'jax[cuda{_newest_cuda(driver)}]'"
        if lacks_plugin
        else "unset JAX_PLATFORMS"
        if restricted
        else None
    )
    if backends["default"] is None:
        wanted = f" for JAX_PLATFORMS={restricted}" if restricted else ""
        yield Diagnosis(
            f"JAX starts no backend{wanted} ({backends['why_none']})"
            + ("" if gpus else f", and there is no GPU here: {driver['why_none']}"),
            fix or "pip install --force-reinstall jax jaxlib",
        )
    elif gpus and not {"gpu", "cuda"} & set(backends["devices"]):
        yield Diagnosis(
            f"the driver shows {gpus[0]['name']}, but "
            + (
                "JAX has no CUDA plugin and computes on the CPU"
                if lacks_plugin
                else f"JAX_PLATFORMS={restricted} keeps JAX from it"
                if restricted
                else "JAX cannot use it, although its CUDA plugin is installed"
            ),
            fix or "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'  # shows the reason",
        )


def _plugin(driver: Result, backends: Result, versions: Result) -> Iterator[Diagnosis]:
    on_cpu = backends["default"] == "cpu" and not backends["restricted_to"]
    if on_cpu and _plugins(versions) and not driver["gpus"]:
        yield Diagnosis(
            "JAX's CUDA plugin is installed, but there is no GPU here, so JAX computes on the CPU: "
            f"{driver['why_none'] or 'the driver shows none'}",
            "nvidia-smi  # shows what the driver finds",
        )
    for major in _plugins(versions) if driver["gpus"] else []:
        if major > int(driver["cuda"].split(".")[0]):
            yield Diagnosis(
                f"JAX's plugin is for CUDA {major}, but the driver supports CUDA "
                f"{driver['cuda']} at most",
                f"pip uninstall -y jax-cuda{major}-plugin jax-cuda{major}-pjrt && "
                f"pip install 'jax[cuda{_newest_cuda(driver)}]'",
            )


def _gpus(driver: Result) -> Iterator[Diagnosis]:
    capabilities = [tuple(gpu["compute_capability"]) for gpu in driver["gpus"]]
    newest = max(capabilities, default=_OLDEST_GPU)
    only_newest = ",".join(str(i) for i, found in enumerate(capabilities) if found == newest)
    show_newest = f"export CUDA_VISIBLE_DEVICES={only_newest}"
    for gpu, capability in zip(driver["gpus"], capabilities, strict=True):
        if capability < _OLDEST_GPU:
            yield Diagnosis(
                f"{gpu['name']} has compute capability {_dotted(capability)}; kernels need "
                f"{_dotted(_OLDEST_GPU)}, so XLA computes every call",
                show_newest if newest >= _OLDEST_GPU else "none: the kernels need a newer GPU",
            )
    if len(set(capabilities)) > 1:
        yield Diagnosis(
            "GPUs of several architectures are visible, and a program is compiled for one: XLA "
            "computes every product",
            show_newest,
        )


def _nvrtc(driver: Result, nvrtc: Result) -> Iterator[Diagnosis]:
    if driver["gpus"] and nvrtc["path"] is None:
        package = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc>=13,<14"}
        yield Diagnosis(
            "there is a GPU, but no NVRTC to compile kernels with",
            f"pip install '{package[_newest_cuda(driver)]}'",
        )


def _cache(cache: Result, nvrtc: Result) -> Iterator[Diagnosis]:
    # Without NVRTC there are no compiled kernels to cache.
    if nvrtc["path"] is not None and not cache["writable"]:
        folder = cache["location"]
        yield Diagnosis(
            f"compiled kernels cannot be cached in {folder}, so each process compiles its own",
            f"sudo mkdir -p '{folder}' && sudo chown -R \"$USER\" '{folder}'",
        )


def _handlers(registered_targets: Result, installation: Result) -> Iterator[Diagnosis]:
    for platform in ("cpu", "CUDA"):
        if not registered_targets.get(platform):
            yield Diagnosis(
                f"the package has no FFI handler for {platform}: its compiled part is of another "
                "version",
                _reinstall(installation),
            )


def _product(trial_product: Result, installation: Result) -> Iterator[Diagnosis]:
    error = trial_product["error"]
    # The negation makes an error of NaN a problem.
    if not error <= _TRIAL_ERROR:
        yield Diagnosis(
            f"a float32 product by {trial_product['kernel']} has a relative error of {error:.1e}",
            _reinstall(installation),
        )


def _reinstall(installation: Result) -> str:
    return f"pip install --force-reinstall --no-deps '{installation['from']}'"


def _plugins(versions: Result) -> list[int]:
    """Return the CUDA versions of JAX's installed plugins."""
    return [major for major in (12, 13) if versions.get(f"jax-cuda{major}-plugin")]


def _newest_cuda(driver: Result) -> int:
    """Return the newest CUDA version with a JAX plugin that the driver supports."""
    return 13 if int(driver["cuda"].split(".")[0]) >= 13 else 12


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
