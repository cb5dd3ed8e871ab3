import threading

import pytest

import jax_tilekern as jtk
from jax_tilekern.cli import main, tune
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.plans.gpu import NoGpu, known_gpu
from jax_tilekern.plans.tuned import XLA, TunedChoices
from jax_tilekern.tuning import tuner as tuning
from jax_tilekern.tuning.product_timing import Measured

H100 = known_gpu("sm_90")


@pytest.fixture
def meter(monkeypatch, tmp_path):
    """Pretend that there is a GPU, on which candidates take the time of their place."""
    names = []

    def measure(product, found, gpu, seconds):
        names.append(tuning.short_name(product))
        if 666 in (product.geometry.m, product.geometry.n):
            return Measured({}, {"a": "wrong: 1 from XLA's result"}, "nothing")
        times = {c.key: 100.0 - i for i, c in enumerate(found)}
        return Measured(times | {XLA: 50.0 if "f16" in names[-1] else 200.0}, {}, "device time")

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "gpu_to_measure", lambda: H100)
    monkeypatch.setattr(tune, "nvrtc", lambda: None)
    with jtk.gpu_target(H100), tuning.using(TunedChoices(tmp_path / "default")):
        yield names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to tune"),
        (["8,8,8,f32"], "is not matmul TYPE MxNxK"),
        (["matmul f32 8x8x8", "--seconds", "0"], "positive"),
        (["matmul f32 8x8x8", "--top", "0"], "positive"),
        (["matmul f32 8x8x8", "--precision", "sharp"], "sharp"),
    ],
)
@pytest.mark.usefixtures("meter")
def test_bad_arguments(capsys, arguments, message):
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu(capsys, monkeypatch):
    def none():
        raise NoGpu("no NVIDIA driver on this machine")

    monkeypatch.setattr(tuning, "current_gpu", none)
    assert main(["tune", "matmul f32 8x8x8"]) == 2
    assert "tune needs a GPU: no NVIDIA driver" in capsys.readouterr().err


def test_without_nvrtc(capsys, monkeypatch, meter):
    def none():
        raise NvrtcNotFound("no NVRTC here")

    monkeypatch.setattr(tune, "nvrtc", none)
    assert main(["tune", "matmul bf16 64x64x64"]) == 2
    assert "no NVRTC here" in capsys.readouterr().err
    assert meter == []


# Runs, with times that are made up.


def test_tunes_and_says_what_came_of_it(capsys, meter):
    assert main(["tune", "matmul bf16 512x512x512", "matmul f16 4x64x64x64 NT", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert meter == ["bf16 512x512x512 NN -> bfloat16", "f16 4x64x64x64 NT -> float16"]
    assert "Tuned for NVIDIA H100" in out
    assert "1/2  bf16 512x512x512 NN -> bfloat16" in out
    assert "xla" in out
    assert "The model's choices reach 0." in out
    assert "NVIDIA-H100-80GB-HBM3.json" in out


def test_products_of_no_kernel_are_named(capsys, meter):
    assert main(["tune", "matmul int16 64x64x64"]) == 0
    assert "matmul int16 64x64x64: no kernel computes it" in capsys.readouterr().err
    assert meter == []


def test_an_interruption_keeps_what_was_measured(capsys, meter, monkeypatch):
    measure = tuning.measure

    def interrupted(product, *rest):
        if product.geometry.m == 128:
            raise KeyboardInterrupt
        return measure(product, *rest)

    monkeypatch.setattr(tuning, "measure", interrupted)
    products = [f"matmul bf16 {m}x64x64" for m in (64, 128, 256)]
    assert main(["tune", *products]) == 130
    out = capsys.readouterr().out
    assert "Interrupted. The results so far are stored" in out
    assert "the other 2" in out
    assert "bf16 64x64x64" in out
    monkeypatch.setattr(tuning, "measure", measure)
    assert main(["tune", *products]) == 0
    assert len(meter) == 3
    assert capsys.readouterr().out.count("(tuned before)") == 1


def test_a_device_that_fails_ends_it(capsys, meter, monkeypatch):
    def lost(*_):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    main(["tune", "matmul bf16 64x64x64"])
    monkeypatch.setattr(tuning, "measure", lost)
    assert main(["tune", "matmul bf16 64x64x64", "matmul bf16 128x64x64"]) == 1
    out = capsys.readouterr().out
    assert "The device failed: CUDA_ERROR_ILLEGAL_ADDRESS" in out
    assert "(tuned before)" in out


def test_a_product_that_does_not_end_ends_the_process(capsys, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(tune.os, "_exit", lambda status: ended.set())
    with tune._deadline("bf16 8x8x8", 0.01):
        assert ended.wait(10)
    assert "bf16 8x8x8 does not end" in capsys.readouterr().err


def test_a_folder_of_its_own(tmp_path, meter):
    assert main(["tune", "matmul bf16 64x64x64", "--folder", str(tmp_path / "here")]) == 0
    assert list((tmp_path / "here").glob("*.json"))
    assert not (tmp_path / "default").exists()
