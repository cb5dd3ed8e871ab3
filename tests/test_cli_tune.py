import pytest

import jax_tilekern as jtk
from jax_tilekern.cli import main, tune
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.plans.gpu import NoGpu, known_gpu
from jax_tilekern.plans.tuned import XLA, TunedChoices, using
from jax_tilekern.tuning import tuner
from jax_tilekern.tuning.product_timing import Measured

H100 = known_gpu("sm_90")


@pytest.fixture
def meter(monkeypatch, tmp_path):
    """Pretend that there is a GPU, on which candidates take the time of their place."""
    names = []

    def measure(product, found, gpu, seconds):
        names.append(tuner.short_name(product))
        if product.geometry.m == 666:
            return Measured({}, {"a": "wrong: 1 from XLA's result"}, "nothing")
        times = {c.key: 100.0 - i for i, c in enumerate(found)}
        return Measured(times | {XLA: 50.0 if "f16" in names[-1] else 200.0}, {}, "device time")

    monkeypatch.setattr(tuner, "measure", measure)
    monkeypatch.setattr(tuner, "gpu_to_measure", lambda: H100)
    with jtk.gpu_target(H100), using(TunedChoices(tmp_path)):
        yield names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to tune"),
        (["8,8,8,f32"], "is not matmul TYPE MxNxK"),
        (["matmul f32 8x8x8", "--seconds", "0"], "positive"),
        (["matmul f32 8x8x8", "--precision", "sharp"], "sharp"),
        (["matmul int16 64x64x64"], "matmul int16 64x64x64: no kernel computes it"),
    ],
)
def test_bad_arguments(capsys, meter, arguments, message):
    assert main(["tune", *arguments]) == (0 if "int16" in message else 2)
    assert message in capsys.readouterr().err
    assert meter == []


@pytest.mark.parametrize("error", [NoGpu("no NVIDIA driver"), NvrtcNotFound("no NVRTC here")])
def test_without_a_gpu_or_a_compiler(capsys, monkeypatch, error):
    def none():
        raise error

    monkeypatch.setattr(tuner, "gpu_to_measure", none)
    assert main(["tune", "matmul f32 8x8x8"]) == 2
    assert capsys.readouterr().err == f"tune: {error}\n"


# Runs, with times that are made up.


def test_tunes_and_says_what_came_of_it(capsys, meter, monkeypatch, tmp_path):
    deadlines = []
    monkeypatch.setattr(
        tune.faulthandler, "dump_traceback_later", lambda s, *, exit, file: deadlines.append(s)
    )
    products = ["matmul bf16 512x512x512", "matmul f16 4x64x64x64 NT", "matmul f32 666x64x64"]
    assert main(["tune", *products, "--export", str(tmp_path / "all.json")]) == 1
    out = capsys.readouterr().out
    # A kernel that never ends would not let go of the GPU.
    assert deadlines == [310.0] * 3
    assert meter[:2] == ["bf16 512x512x512 NN -> bfloat16", "f16 4x64x64x64 NT -> float16"]
    for text in (
        "1/3  bf16 512x512x512 NN -> bfloat16", "    a: wrong: 1 from XLA's result", "nothing ran",
        "Tuned for NVIDIA H100", "xla", "Stored in ",
        f"2 choices written to {tmp_path / 'all.json'}",
    ):  # fmt: skip
        assert text in out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted. The same command continues with the other 2."),
        (RuntimeError("CUDA_ERROR_X"), 1, "The device failed: CUDA_ERROR_X"),
    ],
)
def test_what_was_measured_before_an_end_is_kept(
    capsys, meter, monkeypatch, error, status, message
):
    measure = tuner.measure

    def ended(product, *rest):
        if product.geometry.m == 128:
            raise error
        return measure(product, *rest)

    products = [f"matmul bf16 {m}x64x64" for m in (64, 128, 256)]
    with monkeypatch.context() as patch:
        patch.setattr(tuner, "measure", ended)
        assert main(["tune", *products]) == status
    out = capsys.readouterr().out
    assert message in out
    assert "Stored in " in out
    assert main(["tune", *products]) == 0
    assert len(meter) == 3
    assert capsys.readouterr().out.count("(known)") == 1
