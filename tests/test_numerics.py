"""What a run computes with: measured, kept by a resumed run, named in its row."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from errors import UserError
from models.gpt import GPTConfig
from train import TrainConfig, train
from training import numerics
from training.processes import Place

MODEL = GPTConfig(vocab_size=48, block_size=16, n_layer=1, n_head=2, head_dim=4, d_model=8)
LARGE = replace(MODEL, n_layer=2, n_head=4, head_dim=16, d_model=64, d_ff=256, block_size=64)


@pytest.fixture
def cfg(tmp_path, corpus_folder):
    return TrainConfig(
        out=tmp_path / "run",
        data=corpus_folder,
        model=MODEL,
        steps=4,
        batch_size=4,
        warmup_steps=1,
        eval_tokens=64,
        device="cpu",
        dtype="float32",
    )


def test_only_float32_calls_itself_float32():
    """Inputs rounded to bfloat16 or to TF32's 10 bits are refused, torch's own product is not."""

    def tf32(x):
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    for n_in, n_out in ((8, 8), (64, 256), (1024, 64)):
        assert numerics.is_float32(F.linear, n_in, n_out)
        assert not numerics.is_float32(lambda x, w: tf32(x) @ tf32(w).T, n_in, n_out)
        assert not numerics.is_float32(lambda x, w: x.bfloat16() @ w.bfloat16().T, n_in, n_out)


@pytest.mark.parametrize(
    ("exact", "seconds", "chosen"),
    [(True, 0.5, "medium"), (True, 0.95, "highest"), (False, 0.5, "highest")],
)
def test_the_faster_product_is_taken_if_it_is_float32(exact, seconds, chosen, monkeypatch):
    monkeypatch.setattr(numerics, "is_float32", lambda *_: exact)
    monkeypatch.setattr(numerics, "step_seconds", lambda *_: {"highest": 1.0, "medium": seconds})
    assert numerics.fastest(LARGE, 64 * 64) == chosen
    assert numerics.fastest(MODEL, 64) == "highest"  # too small to measure


def test_both_products_are_timed_and_torch_is_left_as_it_was():
    seconds = numerics.step_seconds(MODEL, 64)
    assert set(seconds) == {"highest", "medium"} and min(seconds.values()) > 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_resumed_run_keeps_what_it_began_with(cfg, monkeypatch):
    monkeypatch.setattr(numerics, "fastest", lambda *_: "medium")
    began = train(cfg)
    assert began["config"]["matmul"] == began["hardware"]["matmul"] == "medium"
    monkeypatch.setattr(numerics, "fastest", lambda *_: "highest")  # another machine, say
    assert numerics.choose(cfg, MODEL, Place()).matmul == "medium"
    assert train(cfg) == began
    with pytest.raises(UserError, match="another matmul .medium there, highest here"):
        train(replace(cfg, matmul="highest"))
    # bfloat16 and float64 have no such choice
    other = replace(cfg, out=cfg.out.with_name("other"))
    assert numerics.choose(other, MODEL, Place(dtype="float64")).matmul == "highest"


def test_without_a_compiler_a_run_is_eager_and_says_so(cfg, monkeypatch, capsys):
    monkeypatch.setattr(numerics, "compiler_works", lambda: False)
    summary = train(replace(cfg, compile=True))
    assert summary["hardware"]["compile"] is False and summary["status"] == "done"
    assert "not compiled" in capsys.readouterr().err
    assert json.loads((cfg.out / "config.json").read_text())["config"]["compile"] is False


def test_compiler_that_fails(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f: lambda x: 1 / 0)
    assert not numerics.compiler_works()


def test_compiled_code_is_kept_apart_by_processor_and_version(tmp_path, monkeypatch):
    here = numerics.compile_cache(tmp_path)
    assert here == numerics.compile_cache(tmp_path) and tmp_path in here.parents
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert numerics.compile_cache(tmp_path) != here


@pytest.mark.parametrize("odd", [{"matmul": 7}, {"compile": "yes"}, {"dtype": [1]}, 5])
def test_a_damaged_config_is_refused(cfg, odd):
    train(cfg)
    (cfg.out / "done.json").unlink()
    found = json.loads((cfg.out / "config.json").read_text())
    found["config"] = found["config"] | odd if isinstance(odd, dict) else odd
    (cfg.out / "config.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="belongs to a run with another"):
        train(cfg)
