"""The suite runs on whatever backend JAX has; sharded tests use eight devices of the CPU."""

import datetime
import gc
import json
import math
import os
import sys
from pathlib import Path

# Before jax and NumPy are imported: eight host devices for the sharding tests; no preallocation, so
# that several workers share one GPU; and one thread for the BLAS of each. XLA's compilation takes
# longer than the programs run, and less without autotuning on a GPU and, on a CPU, with few of
# LLVM's optimizations and with XLA's older emitters of fusions, where jaxlib still has them. At
# level 0, sums are less accurate than the tests ask.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_parallel_codegen_split_count=1",
        *(
            ("--xla_gpu_autotune_level=0",)
            if Path("/dev/nvidiactl").exists()
            else (
                "--xla_backend_optimization_level=1",
                "--xla_llvm_disable_expensive_passes=true",
                "--xla_backend_extra_options="
                "xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_loop_unrolling,"
                "xla_cpu_optimize_for_size",
            )
        ),
    )
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# XLA's plugin for CUDA compiles without CUDA's libraries; see gpu_programs.py.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
import pytest
from hypothesis import settings
from nvrtc_mark import needs_emulator
from selection import is_in_sample, is_selected

settings.register_profile("default", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=40, derandomize=True)


@pytest.fixture
def rng(request):
    """Random numbers of the test's own, fresh for every session that has no ``--seed``."""
    seed = request.config.getoption("seed")
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"--seed {seed}")  # pytest shows it when the test fails
    return np.random.default_rng([seed, *request.node.nodeid.encode()])


@pytest.fixture(autouse=True)
def policy_of_the_test(request):
    """Kernels wherever there are any, unless the test is marked ``defaults``."""
    import jax_tilekern as jtk

    defaults = request.node.get_closest_marker("defaults")
    with jtk.policy("auto" if defaults else "kernels"):
        yield


@pytest.fixture
def highest_precision():
    """Multiply float32 exactly where a test compares programs that round TF32 in other places."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def on_the_cpu():
    """Run on the CPU wherever the suite runs, and leave the instruction set as it was."""
    from jax_tilekern import _core

    before = _core.cpu_instruction_set()
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield
    _core.set_cpu_instruction_set(before)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write the outcome, device and versions")
    parser.addoption("--seed", type=int, help="of the tests' random numbers")
    parser.addoption(
        "--thorough",
        type=int,
        default=1,
        metavar="N",
        help="with -m '': run one in N of the tests that the default selection leaves out",
    )
    parser.addoption(
        "--emulated",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of the tests that emulate kernels, which are alike under every Python",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if not is_selected(item):
            item.add_marker("thorough")
    seed, thorough, emulated = map(config.getoption, ("seed", "thorough", "emulated"))

    def is_left_out(item):
        is_thorough = item.get_closest_marker("thorough")
        is_emulated = needs_emulator.mark in item.iter_markers("skipif")
        counts = (thorough if is_thorough else 1, emulated if is_emulated else 1)
        return not is_in_sample(item.nodeid, seed, math.prod(counts))

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        of_sample = set(items).difference(left_out)
        items[:] = [item for item in items if item in of_sample]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Keep what is imported and collected out of every pass of the garbage collector."""
    gc.collect()
    gc.freeze()


_deselected = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[_deselected] = 0
    selection = config.option.markexpr
    settings.load_profile("default" if selection == "not thorough" else "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """End a worker whose GPU computes nothing any more, in the name of the test that did it.

    After an illegal access every call of the process fails. xdist starts another worker.
    """
    report = yield
    if report.failed and hasattr(item.config, "workerinput"):
        try:
            jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(3, np.float32)))
        except Exception as error:
            capture = item.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(f"\nthe GPU ended in {item.nodeid}: {error}", file=sys.stderr)
                print(report.longreprtext, file=sys.stderr, flush=True)
            os._exit(1)
    return report


def pytest_deselected(items):
    items[0].config.stash[_deselected] += len(items)


def pytest_sessionfinish(session):
    """Tell the controller of several workers how many tests each has left out."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = session.config.stash[_deselected]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    # A worker that crashes has no output. Every worker leaves the same tests out.
    output = getattr(node, "workeroutput", {})
    node.config.stash[_deselected] = output.get("deselected", node.config.stash[_deselected])


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Write what ``benchmarks/results/<device>/tests.json`` holds."""
    file = config.getoption("record")
    # A worker whose controller has been killed has its own tests alone.
    if file is None or hasattr(config, "workerinput"):
        return
    from benchmarks.record import environment

    outcomes = ("passed", "failed", "error", "skipped", "xfailed")
    record = {
        "command": " ".join(["pytest", *config.invocation_params.args]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        **environment(),
        "outcome": {
            **{name: len(terminalreporter.stats.get(name, ())) for name in outcomes},
            "deselected": config.stash[_deselected],
        },
        "exit_status": int(exitstatus),
    }
    Path(file).write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture(autouse=True, scope="session")
def every_kernel_compiles():
    """A kernel that cannot be compiled is an error here, and no warning."""
    from jax_tilekern.interop.outcomes import strict

    with strict(allow_fallbacks=True):
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_is_tuned():
    """What somebody has tuned on this machine is not what the tests expect."""
    from jax_tilekern.plans.tuned import TunedChoices, using

    with using(TunedChoices(None)):
        yield
