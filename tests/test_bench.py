"""The benchmark measures train.py's step itself, and says what it measured."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench import scaling, step, throughput
from errors import UserError
from figures.throughput import draw
from grid import PRESETS
from models.gpt import GPTConfig
from train import update

READING = [getattr(torch.Tensor, name) for name in
           ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")]  # fmt: skip
MODEL = GPTConfig(vocab_size=48, block_size=16, n_layer=1, n_head=2, head_dim=4, d_model=8)


@pytest.fixture
def trainer(tmp_path):
    return step.open_trainer(tmp_path, model=MODEL, batch_size=4, device="cpu", eval_tokens=64)


def test_the_step_is_train_pys(trainer, monkeypatch):
    calls = []
    monkeypatch.setattr("train.update", lambda *a: calls.append(a) or update(*a))
    before = {name: p.detach().clone() for name, p in trainer.setup.model.named_parameters()}
    trainer.step()
    assert len(calls) == 1 and trainer.state.step == 1
    after = dict(trainer.setup.model.named_parameters())
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert trainer.evaluate() == 64


def test_a_step_waits_for_the_device_once(trainer):
    """On a GPU every value that Python reads is a wait: a step reads loss and norm, together."""
    read, synced = [], []

    class Reads(TorchFunctionMode):
        def __torch_function__(self, f, types, args=(), kwargs=None):
            if f in READING:
                read.append(f)
            return f(*args, **kwargs or {})

    class Syncs(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            if f.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
                synced.append(f)
            return f(*args, **kwargs or {})

    trainer.step()
    with Reads(), Syncs():
        trainer.step()
    assert read == [torch.Tensor.tolist] and synced == []


def test_times_of_a_step_as_json(capsys, monkeypatch):
    monkeypatch.setattr(step, "SECONDS", 0.01)
    settings = {"model": MODEL.as_dict(), "batch_size": 4, "threads": 1, "device": "cpu"}
    monkeypatch.setattr(sys, "argv", ["step", json.dumps(settings)])
    step.main()
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] > 0 and found["eval_token_s"] > 0


NANOGPT = """
import dataclasses, torch

@dataclasses.dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int
    dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wte = torch.nn.Embedding(cfg.vocab_size, cfg.n_embd)

    def forward(self, x, y):
        logits = self.wte(x) @ self.wte.weight.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        return logits, loss
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The benchmark at a size of milliseconds, without compiler and files of its own."""
    preset = PRESETS["smoke"]
    monkeypatch.setattr(throughput, "SHAPES", {"tiny": (preset, MODEL, 4)})
    monkeypatch.setattr(throughput, "ROOT", tmp_path)
    monkeypatch.setattr(throughput, "RESULTS", tmp_path / "results" / "throughput.json")
    monkeypatch.setattr(throughput, "alone", lambda name: 100.0)
    monkeypatch.setattr(torch, "compile", lambda f: f)
    (tmp_path / "results").mkdir()
    (tmp_path / "figures").mkdir()
    (tmp_path / "model.py").write_text(NANOGPT)
    return tmp_path


def test_the_whole_benchmark(small, capsys, monkeypatch):
    command = ["x", "--nanogpt", str(small), "--hf", "--turns", "1", "--shape", "tiny"]
    for dtype in ("float32", "bfloat16", "float32"):
        monkeypatch.setattr(sys, "argv", [*command, "--dtype", dtype])
        throughput.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {"ours", "nanogpt", "hf", "ratio_nanogpt", "ratio_hf"}
    assert last["ratio_hf"] == pytest.approx(last["ours"] / last["hf"])
    rows = json.loads((small / "results" / "throughput.json").read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]  # one row per measurement
    row = rows[1]
    assert set(row["tokens_per_s"]) == {
        *("ours float32", "ours float32 compiled", "nanogpt float32", "nanogpt bfloat16"),
        *("hf float32", "hf bfloat16"),
    }
    assert row["nanogpt"] == max(
        row["tokens_per_s"][f"nanogpt {d}"] for d in ("float32", "bfloat16")
    )
    assert 0 < row["loader_share"] < 1 and 0 < row["evaluation_share"] < 1
    assert str(small) not in row["command"] and row["commit"]
    table = (small / "results" / "throughput.md").read_text()
    assert table.count("\n| tiny") == 2
    assert {p.name for p in (small / "figures").iterdir()} == {"throughput.png", "throughput.svg"}
    assert len(draw([row], small / "figures")) == 2


def test_a_clone_without_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--nanogpt", str(tmp_path)])
    with pytest.raises(UserError, match="no model.py"):
        throughput.main()


def test_the_shapes_are_the_presets():
    assert throughput.SHAPES["tiny"][1] == PRESETS["tiny"].config(1)
    assert throughput.SHAPES["d256"][1] == GPTConfig() == PRESETS["paper"].config(0)
    assert throughput.SHAPES["d768"][1] == replace(GPTConfig(), d_model=768, n_head=12, d_ff=3072)


def test_memory_is_the_process_own():
    command = [sys.executable, "-c", "from bench.throughput import peak_mb; print(peak_mb(int))"]
    hog = torch.ones(200_000_000)  # 800 MB that a child must not be charged with
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=throughput.ROOT)
    assert hog[0] == 1 and 50 < float(done.stdout) < 800


def test_scaling_on_paper(tmp_path, monkeypatch, capsys):
    preset = replace(scaling.PAPER, model=replace(MODEL, d_model=64, n_head=1, head_dim=64))
    monkeypatch.setattr(scaling, "PAPER", preset)
    monkeypatch.setattr(scaling, "RESULTS", tmp_path / "scaling.json")
    monkeypatch.setattr(sys, "argv", ["x", "--widths", "64,128"])
    scaling.main()
    report = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["d_model"] for row in report["rows"]] == [64, 128]
    assert all(row["step_s"] > 0 and row["growth_s"] > 0 for row in report["rows"])
    by_name = {row["name"]: row for row in report["planned"]}
    assert by_name["3B grown to 6.7B"]["params"] == pytest.approx(6.7e9, rel=0.02)
    assert by_name["0.5B grown to 1.1B"]["params"] == pytest.approx(1.1e9, rel=0.03)
    assert by_name["3B grown to 6.7B"]["gpus_for_state"] == 2
    assert "FSDP2" in (tmp_path / "scaling.md").read_text()
    rows = [{"d_model": d, "flops": 5 * d**1.5} for d in (64, 128, 256)]
    assert scaling.slope(rows, "flops") == pytest.approx(1.5)
    monkeypatch.setattr(sys, "argv", ["x", "--widths", "64,100"])
    with pytest.raises(UserError, match="multiples of 64"):
        scaling.main()
