"""Problems of an environment, derived from facts about it, and the command that fixes each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# The oldest and the newest version in continuous integration. A micro release of the newest counts
# as tested.
_OLDEST_JAX, _NEWEST_JAX = (0, 10), (0, 12)
_OLDEST_GPU = (8, 0)
# A float32 product of 128 terms errs by less than this in TF32, and by much less in float32.
_TRIAL_ERROR = 2e-3


@dataclass(frozen=True)
class Problem:
    """A problem of the environment.

    Attributes
    ----------
    what
        The problem, in a sentence.
    fix
        The command that fixes it.
    """

    what: str
    fix: str


def find_problems(facts: Mapping[str, Any], errors: Mapping[str, str]) -> list[Problem]:
    """Return the problems that the facts show.

    Parameters
    ----------
    facts, errors
        The results of :func:`jax_tilekern.cli.machine.facts`. Missing facts are not judged, and a
        probe that failed is itself a problem.
    """
    # What fails for want of a backend is explained by that problem.
    found = [
        Problem(
            f"doctor could not find out about {name.replace('_', ' ')}: {error}",
            f'python -c "from jax_tilekern.cli import machine; machine.{name}()"  # traceback',
        )
        for name, error in errors.items()
        if not error.startswith("NoBackend")
    ]
    rules: dict[Callable[..., Iterator[Problem]], tuple[str, ...]] = {
        _jax_version: ("versions",),
        _no_backend: ("driver", "backends", "versions"),
        _gpu_without_backend: ("driver", "backends", "versions"),
        _driver_too_old: ("driver", "versions"),
        _gpu_too_old: ("driver",),
        _several_architectures: ("driver",),
        _no_nvrtc: ("driver", "nvrtc"),
        _cache_not_writable: ("cache", "nvrtc"),
        _nothing_registered: ("registered_targets", "installation"),
        _wrong_product: ("trial_product", "installation"),
    }
    for rule, needed in rules.items():
        if all(name in facts for name in needed):
            found += rule(*(facts[name] for name in needed))
    return found


def _jax_version(versions: Mapping[str, Any]) -> Iterator[Problem]:
    version = versions["jax"]
    release = tuple(int(part) for part in version.split(".")[:2])
    fix = f"pip install 'jax>={_dotted(_OLDEST_JAX)},<={_dotted(_NEWEST_JAX)}.99'"
    if release < _OLDEST_JAX:
        yield Problem(
            f"jax {version} is older than {_dotted(_OLDEST_JAX)}, the oldest supported", fix
        )
    if release > _NEWEST_JAX:
        yield Problem(f"jax {version} is newer than {_dotted(_NEWEST_JAX)}, the newest tested", fix)


def _no_backend(
    driver: Mapping[str, Any], backends: Mapping[str, Any], versions: Mapping[str, Any]
) -> Iterator[Problem]:
    if backends["default"] is not None:
        return
    restricted = backends["restricted_to"]
    wanted = f" for JAX_PLATFORMS={restricted}" if restricted else ""
    has_gpu = bool(driver["gpus"])
    yield Problem(
        f"JAX starts no backend{wanted} ({backends['why_none']})"
        + ("" if has_gpu else f", and there is no GPU here: {driver['why_none']}"),
        f"pip install 'jax[cuda{_newest_cuda(driver)}]'"
        if has_gpu and not _plugins(versions)
        else "unset JAX_PLATFORMS"
        if restricted
        else "pip install --force-reinstall jax jaxlib",
    )


def _gpu_without_backend(
    driver: Mapping[str, Any], backends: Mapping[str, Any], versions: Mapping[str, Any]
) -> Iterator[Problem]:
    served = backends["default"] is None or {"gpu", "cuda"} & set(backends["devices"])
    if not driver["gpus"] or served:
        return
    gpu = driver["gpus"][0]["name"]
    if not _plugins(versions):
        yield Problem(
            f"the driver shows {gpu}, but JAX has no CUDA plugin and computes on the CPU",
            f"pip install 'jax[cuda{_newest_cuda(driver)}]'",
        )
    elif backends["restricted_to"]:
        yield Problem(
            f"the driver shows {gpu}, but JAX_PLATFORMS={backends['restricted_to']} keeps JAX "
            "from it",
            "unset JAX_PLATFORMS",
        )
    else:
        yield Problem(
            f"the driver shows {gpu} and JAX's CUDA plugin is installed, but JAX cannot use it",
            "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'  # shows the reason",
        )


def _driver_too_old(driver: Mapping[str, Any], versions: Mapping[str, Any]) -> Iterator[Problem]:
    if not driver["gpus"]:
        return
    for major in _plugins(versions):
        if major > int(driver["cuda"].split(".")[0]):
            yield Problem(
                f"JAX's plugin is for CUDA {major}, but the driver supports CUDA "
                f"{driver['cuda']} at most",
                f"pip uninstall -y jax-cuda{major}-plugin jax-cuda{major}-pjrt && "
                f"pip install 'jax[cuda{_newest_cuda(driver)}]'",
            )


def _gpu_too_old(driver: Mapping[str, Any]) -> Iterator[Problem]:
    capabilities = [tuple(gpu["compute_capability"]) for gpu in driver["gpus"]]
    served = [str(i) for i, capability in enumerate(capabilities) if capability >= _OLDEST_GPU]
    for gpu, capability in zip(driver["gpus"], capabilities, strict=True):
        if capability < _OLDEST_GPU:
            yield Problem(
                f"{gpu['name']} has compute capability {_dotted(capability)}; kernels need "
                f"{_dotted(_OLDEST_GPU)}, so XLA computes every call",
                f"export CUDA_VISIBLE_DEVICES={','.join(served)}"
                if served
                else "none: the kernels need a newer GPU",
            )


def _several_architectures(driver: Mapping[str, Any]) -> Iterator[Problem]:
    capabilities = [tuple(gpu["compute_capability"]) for gpu in driver["gpus"]]
    if len(set(capabilities)) > 1:
        newest = [str(i) for i, c in enumerate(capabilities) if c == max(capabilities)]
        yield Problem(
            "GPUs of several architectures are visible, and a program is compiled for one: XLA "
            "computes every product",
            f"export CUDA_VISIBLE_DEVICES={','.join(newest)}",
        )


def _no_nvrtc(driver: Mapping[str, Any], nvrtc: Mapping[str, Any]) -> Iterator[Problem]:
    if driver["gpus"] and nvrtc["path"] is None:
        package = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc>=13,<14"}
        yield Problem(
            "there is a GPU, but no NVRTC to compile kernels with",
            f"pip install '{package[_newest_cuda(driver)]}'",
        )


def _cache_not_writable(cache: Mapping[str, Any], nvrtc: Mapping[str, Any]) -> Iterator[Problem]:
    # Without NVRTC there are no compiled kernels to cache.
    if nvrtc["path"] is not None and not cache["writable"]:
        folder = cache["location"]
        yield Problem(
            f"compiled kernels cannot be cached in {folder}, so each process compiles its own",
            f"sudo mkdir -p '{folder}' && sudo chown -R \"$USER\" '{folder}'",
        )


def _nothing_registered(
    targets: Mapping[str, Any], installation: Mapping[str, Any]
) -> Iterator[Problem]:
    for platform in ("cpu", "CUDA"):
        if not targets.get(platform):
            yield Problem(
                f"the package has no FFI handler for {platform}: its compiled part is of another "
                "version",
                _reinstall(installation),
            )


def _wrong_product(trial: Mapping[str, Any], installation: Mapping[str, Any]) -> Iterator[Problem]:
    # The negation makes an error of NaN a problem.
    if not trial["error"] <= _TRIAL_ERROR:
        yield Problem(
            f"a float32 product by {trial['kernel']} has a relative error of {trial['error']:.1e}",
            _reinstall(installation),
        )


def _reinstall(installation: Mapping[str, Any]) -> str:
    return f"pip install --force-reinstall --no-deps '{installation['from']}'"


def _plugins(versions: Mapping[str, Any]) -> list[int]:
    """Return the CUDA versions of JAX's installed plugins."""
    return [major for major in (12, 13) if versions.get(f"jax-cuda{major}-plugin")]


def _newest_cuda(driver: Mapping[str, Any]) -> int:
    """Return the newest CUDA version with a JAX plugin that the driver supports."""
    return 13 if int(driver["cuda"].split(".")[0]) >= 13 else 12


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
