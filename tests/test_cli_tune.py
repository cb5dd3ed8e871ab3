import json
import threading

import jax.numpy as jnp
import pytest

import jax_tilekern as jtk
from jax_tilekern.cli import main, tune
from jax_tilekern.cli.bench.suite import SuiteError
from jax_tilekern.compilation import compiler
from jax_tilekern.plans.gpu import NoGpu, known_gpu
from jax_tilekern.plans.tuned import XLA, TunedChoices
from jax_tilekern.tuning import tune as tuning
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
    monkeypatch.setattr(compiler, "nvrtc", lambda: None)
    with jtk.gpu_target(H100), tuning.using(TunedChoices(tmp_path / "default")):
        yield names


# The command line.


def test_products():
    row = tune.parse_product("4096,16,512,bf16")
    assert (row.lhs, row.rhs, row.type, row.result) == ("mk", "kn", "bfloat16", None)
    assert row.sizes == {"m": 4096, "n": 16, "k": 512}
    row = tune.parse_product("8,32,16,64,int8:tn", precision="highest")
    assert (row.lhs, row.rhs, row.result) == ("bkm", "bkn", "int32")
    assert row.sizes == {"b": 8, "m": 32, "n": 16, "k": 64}
    assert row.precision == "highest"
    row = tune.parse_product("8,8,8,e4m3:TT", out="f32")
    assert (row.lhs, row.rhs, row.type, row.result) == ("km", "nk", "float8_e4m3fn", "float32")
    assert tune.parse_product("8,8,8,e5m2").result == "bfloat16"


@pytest.mark.parametrize(
    "text",
    ["", "8,8,8", "8,8,bf16", "1,2,3,4,5,bf16", "8,0,8,bf16", "8,x,8,bf16", "8,8,8,bf16:N",
     "8,8,8,bf16:XX", "8,8,8,bf16:NTN"],
)  # fmt: skip
def test_malformed_products(text):
    with pytest.raises(SuiteError, match="is not M,N,K,TYPE"):
        tune.parse_product(text)


def test_unknown_types():
    with pytest.raises(SuiteError, match="f33"):
        tune.parse_product("8,8,8,f33")
    with pytest.raises(SuiteError, match="f33"):
        tune.parse_product("8,8,8,f32", out="f33")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to tune"),
        (["8,8,8"], "is not M,N,K,TYPE"),
        (["--suite", "none"], "no suite 'none'"),
        (["8,8,8,f32", "--rows", "x"], "--rows picks rows of --suite"),
        (["8,8,8,f32", "--seconds", "0"], "positive"),
        (["8,8,8,f32", "--top", "0"], "positive"),
        (["8,8,8,f32", "--precision", "sharp"], "sharp"),
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
    assert main(["tune", "8,8,8,f32"]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err


def test_without_nvrtc(capsys, monkeypatch, meter):
    def none():
        raise compiler.NvrtcNotFound("no NVRTC here")

    monkeypatch.setattr(compiler, "nvrtc", none)
    assert main(["tune", "64,64,64,bf16"]) == 2
    assert "no NVRTC here" in capsys.readouterr().err
    assert meter == []


# Runs, with times that are made up.


def test_tunes_and_says_what_came_of_it(capsys, meter):
    assert (
        main(["tune", "--op", "matmul", "512,512,512,bf16", "4,64,64,64,f16:NT", "--top", "3"]) == 0
    )
    out = capsys.readouterr().out
    assert meter == ["bf16 512x512x512 NN -> bfloat16", "f16 4x64x64x64 NT -> float16"]
    assert "Tuned for NVIDIA H100" in out
    assert "1/2  bf16 512x512x512 NN -> bfloat16" in out
    assert "xla" in out
    assert "The model's choices reach 0." in out
    assert "NVIDIA-H100-80GB-HBM3.json" in out


def test_float64_and_conversions_are_tuned(meter):
    assert main(["tune", "64,64,64,f64", "64,64,64,int8"]) == 0
    assert main(["tune", "64,64,64,int8", "--out", "f32"]) == 0
    assert meter == [
        "f64 64x64x64 NN -> float64",
        "int8 64x64x64 NN -> int32",
        "tf32 64x64x64 NN -> float32",
    ]


def test_products_of_no_kernel_are_named(capsys, meter):
    assert main(["tune", "64,64,64,int16"]) == 0
    assert "64,64,64,int16: no kernel computes it" in capsys.readouterr().err
    assert meter == []


def test_resumes(capsys, meter):
    main(["tune", "64,64,64,bf16"])
    main(["tune", "64,64,64,bf16", "128,64,64,bf16"])
    assert len(meter) == 2
    assert "(tuned before)" in capsys.readouterr().out
    main(["tune", "64,64,64,bf16", "--force"])
    assert len(meter) == 3


def test_an_interruption_keeps_what_was_measured(capsys, meter, monkeypatch):
    measure = tuning.measure

    def interrupted(product, *rest):
        if product.geometry.m == 128:
            raise KeyboardInterrupt
        return measure(product, *rest)

    monkeypatch.setattr(tuning, "measure", interrupted)
    products = [f"{m},64,64,bf16" for m in (64, 128, 256)]
    assert main(["tune", *products]) == 130
    out = capsys.readouterr().out
    assert "Interrupted. What was measured is kept" in out
    assert "the other 2" in out
    assert "bf16 64x64x64" in out
    monkeypatch.setattr(tuning, "measure", measure)
    assert main(["tune", *products]) == 0
    assert len(meter) == 3
    assert capsys.readouterr().out.count("(tuned before)") == 1


def test_a_device_that_fails_ends_it(capsys, meter, monkeypatch):
    def lost(*_):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    main(["tune", "64,64,64,bf16"])
    monkeypatch.setattr(tuning, "measure", lost)
    assert main(["tune", "64,64,64,bf16", "128,64,64,bf16"]) == 1
    out = capsys.readouterr().out
    assert "The device failed: CUDA_ERROR_ILLEGAL_ADDRESS" in out
    assert "(tuned before)" in out


def test_a_product_that_does_not_end_ends_the_process(capsys, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(tune.os, "_exit", lambda status: ended.set())
    with tune._deadline("bf16 8x8x8", 0.01):
        assert ended.wait(10)
    assert "bf16 8x8x8 does not end" in capsys.readouterr().err


def test_failures_are_shown(capsys, meter):
    assert main(["tune", "666,64,64,bf16", "64,64,64,bf16"]) == 1
    out = capsys.readouterr().out
    assert "a: wrong: 1 from XLA's result" in out
    assert len(meter) == 2


def test_export(tmp_path, capsys, meter):
    file = tmp_path / "shipped.json"
    assert main(["tune", "64,64,64,bf16", "--export", str(file)]) == 0
    assert main(["tune", "--export", str(file)]) == 0
    assert "1 choices written" in capsys.readouterr().out
    shipped = json.loads(file.read_text())
    assert shipped["gpu"] == H100.name
    (text,) = shipped["choices"]
    assert text.startswith("bf16 64x64x64: ")
    with tuning.using(TunedChoices(None)):
        assert tuning.load(file) == 1


def test_a_folder_of_its_own(tmp_path, meter):
    assert main(["tune", "64,64,64,bf16", "--folder", str(tmp_path / "here")]) == 0
    assert list((tmp_path / "here").glob("*.json"))
    assert not (tmp_path / "default").exists()


def test_rows_of_a_suite(meter):
    assert main(["tune", "--suite", "matmul-h100", "--rows", "bf16 4096³ ABᵀ"]) == 0
    assert meter == ["bf16 4096x4096x4096 NT -> bfloat16"]


def test_every_row_of_the_suite_has_products():
    from jax_tilekern.cli.bench.suite import load_suite

    rows = load_suite("matmul-h100").rows
    with jtk.gpu_target(H100):
        found = tune._products(rows)
    assert len(found) > 0.7 * len(rows)
    assert all(jnp.dtype(p.out_dtype) for p in found)
