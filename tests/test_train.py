import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import checkpoint
import files
import train as train_module
from data.shards import Corpus
from errors import UserError, exit_on_user_error
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from train import Interrupted, TrainConfig, train
from training import numerics
from training.optimizer import decay_groups, lr_at
from training.processes import Place
from training.settings import Setup, State, find_origin

ROOT = Path(__file__).resolve().parents[1]
MODEL = GPTConfig(vocab_size=48, block_size=16, n_layer=2, n_head=2, head_dim=4, d_model=8)
WALL_CLOCK = ("wall_s", "tokens_per_s", "finished")


@pytest.fixture
def cfg(tmp_path, corpus_folder):
    """20 steps of 8 sequences of 16 tokens, evaluated every 6 and saved every 5."""
    return TrainConfig(
        out=tmp_path / "run",
        data=corpus_folder,
        model=MODEL,
        seed=1,
        data_seed=2,
        steps=20,
        batch_size=8,
        lr=1e-2,
        warmup_steps=4,
        eval_every=6,
        eval_tokens=320,
        save_every=5,
        last_tokens=5 * 128,
        device="cpu",
        dtype="float64",
        run_id="run",
    )


def timeless(row: dict) -> dict:
    return {k: v for k, v in row.items() if k not in WALL_CLOCK}


def rows(cfg) -> list[dict]:
    return [timeless(json.loads(x)) for x in (cfg.out / "metrics.jsonl").read_text().splitlines()]


def result(cfg) -> tuple:
    """Everything that must not depend on interruptions: summary, metrics, weights, moments."""
    final = checkpoint.load(cfg.out / "final")
    summary = json.loads((cfg.out / "done.json").read_text())
    return timeless(summary), rows(cfg), final.hash, final.optimizer_hash


# ---- schedule, groups, accumulation


def test_lr_schedules(cfg):
    cfg = replace(cfg, lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    ramp = [lr_at(s, cfg) for s in range(4)]
    assert ramp == [0.25, 0.5, 0.75, 1.0]
    cosine = [lr_at(s, cfg) for s in range(4, 20)]
    assert cosine == sorted(cosine, reverse=True) and cosine[0] < 1
    assert cosine[7] == pytest.approx(0.55) and cosine[-1] == pytest.approx(0.1)
    wsd = replace(cfg, schedule="wsd", decay_fraction=0.25)
    assert [lr_at(s, wsd) for s in range(4, 15)] == [1.0] * 11
    assert [lr_at(s, wsd) for s in (15, 17, 19)] == pytest.approx([0.82, 0.46, 0.1])
    flat = replace(cfg, schedule="constant", warmup_steps=0)
    assert {lr_at(s, flat) for s in range(20)} == {1.0}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_every_parameter_is_in_one_decay_group(tied, norm):
    model = GPT(replace(MODEL, tied=tied, norm=norm), seed=0)
    decayed, plain = decay_groups(model)
    assert sorted(decayed + plain) == sorted(n for n, _ in model.named_parameters())
    assert {"wte.weight", "wpe.weight", "h.0.attn.q.weight"} <= set(decayed)
    assert {"h.1.ln_2.weight", "ln_f.weight", "h.0.mlp.up.bias"} <= set(plain)
    assert ("lm_head.weight" in decayed) is not tied


def test_a_parameter_the_groups_do_not_know_is_an_error():
    model = GPT(MODEL, seed=0)
    model.h[0].temperature = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(AssertionError):
        decay_groups(model)


def make_run(cfg, **changes) -> Setup:
    cfg = replace(cfg, **changes)
    model = GPT(cfg.model, seed=cfg.seed).double()
    place = Place(dtype="float64")
    return Setup(cfg, place, Corpus(cfg.data), model, None, find_origin(None), {})


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_accumulation_equals_the_full_batch(cfg, micro):
    whole, parts = make_run(cfg), make_run(cfg, micro_batch=micro)
    losses = [float(train_module.gradients(run, run.model, 3)) for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-13)
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-14)
    other = make_run(cfg)
    assert abs(float(train_module.gradients(other, other.model, 4)) - losses[0]) > 1e-4


def test_micro_batches_train_to_the_same_losses(cfg):
    train(cfg)
    split = replace(cfg, out=cfg.out.with_name("split"), micro_batch=3)
    train(split)
    for a, b in zip(rows(cfg), rows(split), strict=True):
        assert a.get("loss") == pytest.approx(b.get("loss"), abs=1e-11)


# ---- a whole run

GOLDEN = (
    3.87076840, 3.84835410, 3.78704016, 3.80743872, 3.73790663,
    3.68010930, 3.53700207, 3.48952125, 3.40253267, 3.38648969,
    3.21502938, 3.19510611, 3.20781481, 3.07923259, 2.98538701,
    2.98930841, 3.04567872, 2.81666689, 2.90990517, 2.91952843,
)  # fmt: skip


def test_golden_losses(cfg):
    train(replace(cfg, lr=3e-2))
    losses = [row["loss"] for row in rows(cfg) if "loss" in row]
    assert losses == pytest.approx(GOLDEN, abs=1e-7)


def test_summary_and_files(cfg):
    summary = train(cfg)
    assert summary == json.loads((cfg.out / "done.json").read_text())
    assert summary["status"] == "done" and summary["parent"] is None
    losses = [row["loss"] for row in rows(cfg) if "loss" in row]
    vals = {row["step"]: row["val_loss"] for row in rows(cfg) if "val_loss" in row}
    assert len(losses) == 20 and list(vals) == [0, 6, 12, 18, 20]
    assert summary["metrics"] == {
        "train_loss": pytest.approx(sum(losses[-5:]) / 5, abs=1e-12),
        "val_loss": vals[20],
        "val_loss_start": vals[0],
        "spike": None,
        "spike_open": None,
    }
    assert summary["metrics"]["val_loss"] < summary["metrics"]["val_loss_start"] - 0.05
    assert summary["params"] == count_parameters(MODEL)
    assert summary["tokens"] == {"parent": 0, "operator": 0, "stage": 2560, "total": 2560}
    assert summary["flops"]["total"] == 2560 * flops_per_token(MODEL)
    assert summary["flops"]["evaluation"] == 5 * 320 * flops_per_token(MODEL, backward=False)
    assert summary["curve"]["train"] == losses and summary["curve"]["val_tokens"][-1] == 2560
    assert summary["lineage"][-1]["hash"] == checkpoint.load(cfg.out / "final").hash
    names = {"config.json", "done.json", "final", "lock", "metrics.jsonl", "progress.json"}
    assert {p.name for p in cfg.out.iterdir()} == names
    assert json.loads((cfg.out / "progress.json").read_text())["step"] == 20


def test_first_evaluation_is_the_model_as_it_starts(cfg):
    summary = train(replace(cfg, eval_tokens=16))
    model = GPT(MODEL, seed=cfg.seed).double()
    (x, y), *rest = Corpus(cfg.data).eval_batches(16, 8, 16)
    assert not rest and summary["metrics"]["val_loss_start"] == pytest.approx(model(x, y).item())


def test_a_finished_run_is_returned_without_training(cfg, monkeypatch):
    summary = train(cfg)
    monkeypatch.setattr(train_module, "fit", None)
    assert train(cfg) == summary


def test_batches_do_not_depend_on_evaluation_or_init_seed(cfg, monkeypatch):
    seen, original = [], Corpus.batch_at

    def record(self, *args):
        x_bt, y_bt = original(self, *args)
        seen.append(x_bt)
        return x_bt, y_bt

    monkeypatch.setattr(Corpus, "batch_at", record)
    train(cfg)
    wide = replace(MODEL, d_model=16, n_head=4, d_ff=64)
    train(replace(cfg, out=cfg.out.with_name("b"), seed=9, eval_every=3, model=wide))
    assert all(torch.equal(a, b) for a, b in zip(seen[:20], seen[20:], strict=True))
    train(replace(cfg, out=cfg.out.with_name("c"), data_seed=3))
    assert not torch.equal(seen[0], seen[40])


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_and_float32_store_float32_weights(cfg, tied):
    for dtype in ("bfloat16", "float32"):
        model = replace(MODEL, tied=tied)
        run = replace(cfg, out=cfg.out.with_name(dtype), dtype=dtype, model=model, steps=5)
        assert math.isfinite(train(run)["metrics"]["val_loss"])
        weights = checkpoint.load(run.out / "final").model
        assert {v.dtype for v in weights.values()} == {torch.float32}
        assert weights.keys() == GPT(model).state_dict().keys()


def test_compiled_code_trains_the_same_and_stores_plain_names(cfg, monkeypatch):
    """Traced as always, but run by torch: the C++ compiler would take minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    gated = replace(cfg, steps=8, gate_steps=4, d_old=4, compile=True, dtype="float32")
    plain = replace(gated, out=cfg.out.with_name("eager"), compile=False)
    for run in (gated, plain):
        train(run)
    a, b = (checkpoint.load(run.out / "final").model for run in (gated, plain))
    assert a.keys() == b.keys() == GPT(MODEL).state_dict().keys()
    for x, y in zip(rows(gated), rows(plain), strict=True):
        assert x.get("loss") == pytest.approx(y.get("loss"), abs=1e-4)
        assert x.get("val_loss") == pytest.approx(y.get("val_loss"), abs=1e-4)


# ---- interruption and resume


def at_batch(monkeypatch, step: int, action):
    """Do `action` when the batch of update `step` is read, once."""
    original, done = Corpus.batch_at, []

    def batch_at(self, at, *args):
        if at == step and not done:
            done.append(at)
            action()
        return original(self, at, *args)

    monkeypatch.setattr(Corpus, "batch_at", batch_at)


def crash():
    raise RuntimeError("crash")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The result of a config that was never interrupted, computed once for each."""
    known = {}

    def get(cfg):
        key = repr(replace(cfg, out=Path(), init=None))
        if key not in known:
            whole = replace(cfg, out=tmp_path_factory.mktemp("whole") / "run")
            train(whole)
            known[key] = result(whole)
        return known[key]

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [0, 3, 5, 6, 19])
def test_resume_after_a_crash_is_bitwise(cfg, uninterrupted, monkeypatch, step, dtype):
    cfg = replace(cfg, dtype=dtype)
    at_batch(monkeypatch, step, crash)
    with pytest.raises(RuntimeError, match="crash"):
        train(cfg)
    assert not (cfg.out / "done.json").exists()
    train(cfg)
    assert result(cfg) == uninterrupted(cfg)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_signals_save_within_a_step(cfg, uninterrupted, monkeypatch, name):
    signum = getattr(signal, name)
    before = signal.getsignal(signum)
    at_batch(monkeypatch, 7, lambda: os.kill(os.getpid(), signum))
    with pytest.raises(Interrupted) as stop:
        train(cfg)
    assert stop.value.signum == signum
    assert stop.value.exit_code == (130 if name == "SIGINT" else 75)
    assert checkpoint.newest(cfg.out).meta["step"] == 8
    assert signal.getsignal(signum) is before
    train(cfg)
    assert result(cfg) == uninterrupted(cfg)


@pytest.mark.parametrize("after", [0, 6, 20])
def test_a_signal_during_evaluation_repeats_it(cfg, uninterrupted, monkeypatch, after):
    original, calls = Corpus.eval_batches, []

    def eval_batches(self, *args):
        calls.append(1)
        if len(calls) == {0: 1, 6: 2, 20: 5}[after]:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(Corpus, "eval_batches", eval_batches)
    with pytest.raises(Interrupted):
        train(cfg)
    assert checkpoint.newest(cfg.out).meta["step"] == after
    train(cfg)
    assert result(cfg) == uninterrupted(cfg)


def test_a_crash_inside_every_save_loses_nothing(cfg, uninterrupted, monkeypatch):
    """Each attempt dies in its next save, and the next one starts from the save before."""
    original, budget = files.publish, []

    def publish(tmp, folder, replace):
        if not budget:
            raise OSError(28, "No space left on device")
        budget.pop()
        original(tmp, folder, replace)

    monkeypatch.setattr(files, "publish", publish)
    for done in range(4):  # step 5, 10, 15, final
        with pytest.raises(OSError, match="No space"):
            train(cfg)
        newest = checkpoint.newest(cfg.out)
        assert (newest.meta["step"] if newest else 0) == 5 * done
        budget.append(1)
    budget.append(1)
    train(cfg)
    assert result(cfg) == uninterrupted(cfg)


def test_a_damaged_newest_checkpoint_falls_back(cfg, uninterrupted, monkeypatch, capsys):
    at_batch(monkeypatch, 12, crash)
    with pytest.raises(RuntimeError):
        train(cfg)
    os.truncate(cfg.out / "step_00000010" / checkpoint.MODEL, 10)
    train(cfg)
    assert "skipping step_00000010" in capsys.readouterr().err
    assert result(cfg) == uninterrupted(cfg)


KILL = """
import os, signal, sys, tyro
sys.path.insert(0, sys.argv.pop(1))
step = int(sys.argv.pop(1))
import torch
from data.shards import Corpus
from train import TrainConfig, train
torch.set_num_threads(1)
original = Corpus.batch_at
def batch_at(self, at, *args):
    if at == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, at, *args)
Corpus.batch_at = batch_at
train(tyro.cli(TrainConfig))
"""


def arguments(cfg) -> list[str]:
    """The command line of a config."""
    words = []
    for key, value in asdict(cfg).items():
        if isinstance(value, dict):
            words += [w for k, v in value.items() for w in flag(f"model.{k}", v)]
        elif value is not None:
            words += flag(key, value)
    return words


def flag(key: str, value) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        head, _, tail = name.rpartition(".")
        return [f"--{head}{'.' if head else ''}{'' if value else 'no-'}{tail}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)] if value else []
    return [f"--{name}", str(value)]


def python(*words: str, timeout=120, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def test_kill_9_and_the_same_command_again(cfg, uninterrupted, tmp_path):
    cfg = replace(cfg, dtype="float32", threads=1)
    script = tmp_path / "kill.py"
    script.write_text(KILL)
    killed = python(str(script), str(ROOT), "13", *arguments(cfg), cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoint.newest(cfg.out).meta["step"] == 10
    again = python(str(ROOT / "train.py"), *arguments(cfg), cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.startswith("done:"), again.stderr
    assert result(cfg) == uninterrupted(cfg)


@pytest.mark.slow
def test_a_compiled_run_killed_and_resumed_is_bitwise(cfg, uninterrupted, monkeypatch, tmp_path):
    """By the real C++ compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    if not numerics.compiler_works():
        pytest.skip("no C++ compiler that torch.compile can use")
    cfg = replace(cfg, dtype="float32", threads=1, compile=True)
    script = tmp_path / "kill.py"
    script.write_text(KILL)
    killed = python(str(script), str(ROOT), "13", *arguments(cfg), cwd=tmp_path, timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list((tmp_path / "code").rglob("*.so"))
    again = python(str(ROOT / "train.py"), *arguments(cfg), cwd=tmp_path, timeout=600)
    assert again.returncode == 0 and again.stdout.startswith("done:"), again.stderr
    assert result(cfg) == uninterrupted(cfg)


# ---- growth: init, lineage, gate


def grown_from(cfg, tmp_path, **meta) -> Path:
    """The parent's final checkpoint as a growth program would hand it on."""
    parent = checkpoint.load(cfg.out / "final")
    keep = {k: parent.meta[k] for k in ("config", "lineage", "tokens_total", "flops_total")}
    checkpoint.save(tmp_path / "child", parent.model, keep | meta)
    return tmp_path / "child"


def test_a_child_starts_from_its_parent_and_extends_the_lineage(cfg, tmp_path):
    parent = train(cfg)
    record = {"settings": {"seed": 7}, "parent": "x", "tokens": 100, "flops": 1000, "report": {}}
    total = {"tokens_total": 2660, "flops_total": parent["flops"]["total"] + 1000}
    init = grown_from(cfg, tmp_path, growth=record, **total)
    child = train(replace(cfg, out=tmp_path / "c", init=init, run_id="child", data_seed=5))
    assert child["metrics"]["val_loss_start"] == parent["metrics"]["val_loss"]
    assert child["metrics"]["spike"] == 0
    hashes = [entry["hash"] for entry in child["lineage"]]
    assert hashes == [checkpoint.load(f / "final").hash for f in (cfg.out, tmp_path / "c")]
    assert [entry["stage"] for entry in child["lineage"]] == [0, 1]
    assert child["parent"]["hash"] == hashes[0] and child["parent"]["run_id"] == "run"
    assert child["parent"]["val_loss"] == parent["metrics"]["val_loss"]
    assert child["tokens"] == {"parent": 2560, "operator": 100, "stage": 2560, "total": 5220}
    assert child["flops"]["operator"] == 1000 and child["seeds"]["growth"] == 7
    final = checkpoint.load(tmp_path / "c" / "final").meta
    assert final["tokens_total"] == 5220 and final["lineage"] == child["lineage"]
    assert "report" not in child["lineage"][-1]["growth"]


def test_moments_are_taken_over_if_the_checkpoint_has_them(cfg, tmp_path):
    """Going on with weights, moments and step for 10 more steps is 20 steps in one go."""
    flat = replace(cfg, schedule="constant", warmup_steps=0)
    train(replace(flat, out=tmp_path / "whole"))
    train(replace(flat, out=tmp_path / "half", steps=10))
    half = checkpoint.load(tmp_path / "half" / "final")
    assert half.meta["optimizer_step"] == 10

    def go_on(name, moments):
        checkpoint.save(tmp_path / f"{name}-init", half.model, half.meta, moments)
        run = make_run(replace(flat, init=tmp_path / f"{name}-init"))
        checkpoint.load_weights(run.model, half.model, "half")
        optimizer, names = train_module.make_optimizer(run.cfg, run.model)
        init = checkpoint.load(tmp_path / f"{name}-init")
        train_module.load_optimizer(optimizer, names, init)
        state = State(step=10)
        for _ in range(10):
            train_module.update(run, run.model, optimizer, state)
        return checkpoint.model_hash(run.model.state_dict())

    whole = checkpoint.load(tmp_path / "whole" / "final").hash
    assert go_on("with", half.optimizer) == whole
    assert go_on("without", None) != whole


def test_moments_that_do_not_fit_are_refused_before_anything_is_written(cfg, tmp_path):
    train(cfg)
    final = checkpoint.load(cfg.out / "final")
    wrong = dict(final.optimizer)
    del wrong["ln_f.bias/exp_avg"]
    checkpoint.save(tmp_path / "wrong", final.model, final.meta, wrong)
    with pytest.raises(UserError, match="optimizer state"):
        train(replace(cfg, out=tmp_path / "c", init=tmp_path / "wrong"))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("step", [2, 5, 9])
def test_the_gate_ramps_and_resumes_exactly(cfg, uninterrupted, monkeypatch, step):
    cfg = replace(cfg, gate_steps=8, d_old=4, dtype="float32")
    at_batch(monkeypatch, step, crash)
    with pytest.raises(RuntimeError):
        train(replace(cfg, save_every=1))
    train(replace(cfg, save_every=1))
    assert result(cfg) == uninterrupted(cfg)
    alphas = [row.get("alpha") for row in rows(cfg) if "loss" in row]
    assert alphas == [s / 8 for s in range(8)] + [None] * 12


def test_the_gate_changes_training_while_it_lasts(cfg):
    train(cfg)
    gated = replace(cfg, out=cfg.out.with_name("gated"), gate_steps=8, d_old=4)
    train(gated)
    pairs = zip(rows(cfg), rows(gated), strict=True)
    assert all(a != b for a, b in pairs)
    final = checkpoint.load(gated.out / "final")
    model = GPT(MODEL, seed=None).double()
    checkpoint.load_weights(model, final.model, "gated")
    x, y = next(Corpus(cfg.data).eval_batches(16, 1, 16))
    short = train(replace(gated, out=cfg.out.with_name("short"), eval_tokens=16))
    assert model(x, y).item() == pytest.approx(short["metrics"]["val_loss"])  # a plain GPT


# ---- divergence


def test_a_nan_stops_the_run_with_a_row_and_keeps_the_last_good_weights(cfg, monkeypatch):
    original = train_module.gradients

    def poisoned(run, net, step):
        loss = original(run, net, step)
        if step == 12:
            run.model.ln_f.weight.grad[0] = math.nan
        return loss

    monkeypatch.setattr(train_module, "gradients", poisoned)
    summary = train(cfg)
    assert summary["status"] == "diverged" and "step 12" in summary["reason"]
    assert summary["metrics"]["val_loss"] is None and summary["metrics"]["train_loss"] is None
    assert summary == json.loads((cfg.out / "done.json").read_text())
    assert rows(cfg)[-1]["grad_norm"] is None and not (cfg.out / "final").exists()
    good = checkpoint.newest(cfg.out)
    assert good.meta["step"] == 10 and all(t.isfinite().all() for t in good.model.values())
    assert train(cfg) == summary  # not tried again


def test_weights_that_are_nan_from_the_start_are_reported(cfg, tmp_path):
    weights = GPT(MODEL, seed=0).state_dict()
    weights["ln_f.bias"] = weights["ln_f.bias"] * math.nan
    checkpoint.save(tmp_path / "nan", weights, {"config": asdict(MODEL)})
    summary = train(replace(cfg, init=tmp_path / "nan"))
    assert summary["status"] == "diverged" and "step 0" in summary["reason"]


def test_divergence_rule():
    def run(losses, warmup=0):
        state = State()
        for loss in losses:
            reason = train_module.divergence(state, loss, 1.0, warmup, 2048)
            if reason:
                return state.step, reason
            state.step += 1
        return None

    assert run([7.6] * 50 + [3.0] * 50) is None
    assert run([3.0] * 10 + [9.0] * 3 + [3.0] * 50) is None  # a spike is no divergence
    step, reason = run([3.0] * 10 + [9.0] * 50)
    assert 10 < step < 40 and "nats above" in reason
    assert run([20.0] * 50 + [9.0] * 100) is None  # bad start that recovers
    assert "2 ln V" in run([20.0] * 200)[1]
    assert "nan" in run([3.0, math.nan])[1] and "inf" in run([math.inf])[1]


# ---- refusals: nothing is written


BAD = {
    "steps": (0, -1, 2.0, True, "10"),
    "batch_size": (0, 10**6),
    "micro_batch": (-1,),
    "lr": (0.0, -1.0, math.nan, math.inf),
    "min_lr_ratio": (-0.1, 1.1),
    "warmup_steps": (-1, 20, 21),
    "schedule": ("linear",),
    "decay_fraction": (1.5,),
    "beta1": (1.0,),
    "beta2": (1.0,),
    "adam_eps": (0.0,),
    "clip": (-1.0,),
    "eval_every": (0,),
    "eval_tokens": (0,),
    "save_every": (0,),
    "keep": (0,),
    "last_tokens": (0,),
    "dtype": ("float16",),
    "device": ("gpu", "cuda:x", "cuda:99"),
    "threads": (-1,),
    "tracker": ("mlflow",),
    "gate_steps": (-1, 21),
    "d_old": (-1,),
    "new_lr": (-1.0, math.nan),
    "first_batch": (-1, 1.5),
    "eval_at": ((-1,), (1.5,)),
    "seed": (-1,),
    "data_seed": (-1, 2**63),
    "init": (Path("/nowhere/at/all"),),
    "data": (Path("/nowhere/at/all"),),
}


@pytest.mark.parametrize("name, value", [(k, v) for k, values in BAD.items() for v in values])
def test_bad_values_are_refused_before_anything_is_written(cfg, name, value):
    with pytest.raises(UserError) as caught:
        train(replace(cfg, **{name: value}))
    assert name in str(caught.value) or "/nowhere" in str(caught.value)
    assert not cfg.out.exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gate_steps": 2, "d_old": 8}, "d_old"),
        ({"gate_steps": 2}, "d_old"),
        ({"new_lr": 2.0}, "d_old"),
        ({"model": replace(MODEL, vocab_size=47)}, "vocab_size"),
        ({"model": replace(MODEL, block_size=4096)}, "windows"),
        ({"model": replace(MODEL, n_layer=10**9)}, "n_layer"),
        ({"model": replace(MODEL, n_head=10**5, d_model=4 * 10**5, d_ff=10**6)}, "GB"),
    ],
)
def test_what_does_not_fit_is_refused(cfg, changes, message):
    with pytest.raises(UserError, match=message):
        train(replace(cfg, **changes))
    assert not cfg.out.exists()


def test_missing_tracker_names_the_pip_command(cfg, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        train(replace(cfg, tracker="wandb"))
    assert not cfg.out.exists()


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_folder_named_like_a_tracker_is_none(cfg, tmp_path, monkeypatch, name):
    for module in [m for m in sys.modules if name in m.split(".")]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "here" / name).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    with pytest.raises(UserError, match=f"pip install {name}"):
        train(replace(cfg, tracker=name))


def test_tensorboard_gets_every_row(cfg, monkeypatch):
    sent, package = [], ModuleType("tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)
    bridge = ModuleType("torch.utils.tensorboard")
    bridge.SummaryWriter = lambda folder: SimpleNamespace(
        add_scalar=lambda *row: sent.append(row), close=lambda: sent.append(("closed",))
    )
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", bridge)
    summary = train(replace(cfg, tracker="tensorboard"))
    assert [row[2] for row in sent if row[0] == "loss"] == [128 * s for s in range(1, 21)]
    assert ("val_loss", summary["metrics"]["val_loss"], 2560) in sent and sent[-1] == ("closed",)


def command(monkeypatch, cfg) -> int:
    """The exit code of train.py's command line."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments(cfg)])
    with pytest.raises(SystemExit) as stop:
        exit_on_user_error(train_module.main)
    return stop.value.code


def test_exit_codes_and_messages_of_the_command(cfg, monkeypatch, capsys):
    assert command(monkeypatch, replace(cfg, lr=-1.0)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "lr is -1.0" in lines[0] and not cfg.out.exists()
    for number, code in ((signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        monkeypatch.undo()
        step = 3 if code == 75 else 5
        at_batch(monkeypatch, step, lambda number=number: os.kill(os.getpid(), number))
        assert command(monkeypatch, cfg) == code
        assert f"at step {step + 1}" in capsys.readouterr().err.splitlines()[-1]


def test_model_options_beside_init_are_never_ignored(cfg, tmp_path, monkeypatch, capsys):
    train(cfg)
    words = ["train.py", "--data", str(cfg.data), "--init", str(cfg.out / "final")]
    words += ["--out", str(tmp_path / "next"), "--steps", "1", "--batch-size", "8"]
    for more in (["--model.n-layer", "7"], ["--model.n_layer=7"], ["--model.no-tied"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit, match="2"):
            exit_on_user_error(train_module.main)
        line = capsys.readouterr().err
        assert more[0].split("=")[0].replace("no-", "") in line, line
        assert "with --init leave" in line and not (tmp_path / "next").exists()
    same = ["--model.n-layer", str(MODEL.n_layer), "--model.tied"]
    monkeypatch.setattr(sys, "argv", [*words, *same])
    train_module.main()
    assert "done" in capsys.readouterr().out


def test_a_folder_belongs_to_one_config(cfg):
    train(cfg)
    before = result(cfg)
    with pytest.raises(UserError, match=r"lr \(0.01 there, 0.02 here\)"):
        train(replace(cfg, lr=0.02))
    with pytest.raises(UserError, match="model.n_layer"):
        train(replace(cfg, model=replace(MODEL, n_layer=1)))
    assert result(cfg) == before
    assert train(replace(cfg, save_every=7, micro_batch=2, threads=1, keep=1))["status"] == "done"


def test_a_shard_that_changed_is_refused_by_name(cfg, make_corpus, tmp_path):
    data = make_corpus(tmp_path / "corpus", seed=3)
    with open(data / "train_00000.bin", "r+b") as file:
        file.write(b"\1\1")
    with pytest.raises(UserError, match="train_00000.bin"):
        train(replace(cfg, data=data))
    assert not cfg.out.exists()


def test_other_folders_and_files_are_left_alone(cfg):
    cfg.out.mkdir()
    (cfg.out / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="thesis.tex"):
        train(cfg)
    assert [p.name for p in cfg.out.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="a file"):
        train(replace(cfg, out=cfg.out / "thesis.tex"))


def test_a_second_process_is_told_who_holds_the_folder(cfg, monkeypatch):
    words = arguments(replace(cfg, threads=1))
    second = []
    at_batch(monkeypatch, 7, lambda: second.append(python(str(ROOT / "train.py"), *words)))
    train(cfg)
    assert second[0].returncode == 2 and second[0].stdout == ""
    assert f"in use by pid {os.getpid()} on " in second[0].stderr
    assert "Traceback" not in second[0].stderr


def cut_log(path: Path) -> None:
    os.truncate(path, 10)


def spoil_log(path: Path) -> None:
    """Zeros over the end of line 3 and the start of line 4: the length stays."""
    data = bytearray(path.read_bytes())
    end = [i for i, byte in enumerate(data) if byte == ord("\n")][2]
    data[end - 20 : end + 20] = bytes(40)
    path.write_bytes(data)


@pytest.mark.parametrize("damage, lost", [(cut_log, 10), (spoil_log, 2), (Path.unlink, 10)])
def test_a_damaged_log_never_costs_the_model(cfg, uninterrupted, monkeypatch, capsys, damage, lost):
    at_batch(monkeypatch, 12, crash)
    with pytest.raises(RuntimeError):
        train(cfg)
    damage(cfg.out / "metrics.jsonl")
    told = []
    at_batch(monkeypatch, 11, lambda: told.append(capsys.readouterr().err))
    summary, known = train(cfg), uninterrupted(cfg)
    assert f"metrics.jsonl is damaged: {lost} of 10 steps are lost" in told[0]  # before training
    final = checkpoint.load(cfg.out / "final")
    assert summary["lost_steps"] == lost and (final.hash, final.optimizer_hash) == known[2:]
    for name in ("train_loss", "val_loss"):  # their window was not hit
        assert summary["metrics"][name] == known[0]["metrics"][name]
    assert train(cfg) == summary


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_summary_without_its_model_is_not_believed(cfg, uninterrupted, capsys, damage):
    train(cfg)
    if damage == "gone":
        shutil.rmtree(cfg.out / "final")
    else:
        os.truncate(cfg.out / "final" / checkpoint.MODEL, 10)
    train(cfg)
    assert "final" in capsys.readouterr().err and result(cfg) == uninterrupted(cfg)


def test_rewarm_slows_new_coordinates_alone_and_resumes(cfg, tmp_path):
    """The asymmetric policy through train(): old block as without it, new one slower, resumable."""
    from growth.child import grow_checkpoint
    from growth.plan import GrowConfig

    train(cfg)
    child = tmp_path / "child"
    grow_checkpoint(cfg.out / "final", child, 12, GrowConfig("nrio"), optimizer="asymmetric")
    base = replace(cfg, init=child, steps=1, warmup_steps=0, out=tmp_path / "plain", d_old=8)
    slow = replace(base, rewarm_steps=10, out=tmp_path / "slow")
    start = checkpoint.load(child).model["h.0.attn.q.weight"]
    plain, rewarmed = (
        checkpoint.load(c.out / "final").model["h.0.attn.q.weight"] - start
        for c in (base, slow)
        if train(c)
    )
    assert torch.equal(plain[:8, :8], rewarmed[:8, :8])
    assert rewarmed[8:].norm() < 0.3 * plain[8:].norm()
    with pytest.raises(UserError, match="d_old"):
        train(replace(slow, out=tmp_path / "bad", d_old=0))


def test_new_coordinates_have_a_learning_rate_of_their_own(cfg, uninterrupted, monkeypatch):
    """Adam's first update is +-lr: new coordinates move `new_lr` times as far; resumes exactly."""
    first = replace(cfg, steps=1, warmup_steps=0, d_old=4, weight_decay=0.0, lr=1e-3)
    start = GPT(MODEL, seed=1).double().state_dict()["h.0.attn.q.weight"]
    moves = {}
    for factor in (1.0, 3.0):
        one = replace(first, new_lr=factor, out=cfg.out.with_name(f"x{factor}"))
        train(one)
        moved = checkpoint.load(one.out / "final").model["h.0.attn.q.weight"] - start
        moves[factor] = moved
    assert torch.equal(moves[1.0][:4, :4], moves[3.0][:4, :4])
    new = torch.ones(8, 8, dtype=torch.bool)
    new[:4, :4] = False
    torch.testing.assert_close(moves[3.0][new], 3 * moves[1.0][new])

    cfg = replace(cfg, d_old=4, new_lr=2.0)
    at_batch(monkeypatch, 9, crash)
    with pytest.raises(RuntimeError):
        train(cfg)
    train(cfg)
    assert result(cfg) == uninterrupted(cfg)


def test_a_run_may_start_later_in_the_common_order(cfg):
    """Its last window is then the same text as that of a run which started at batch 0."""
    whole = replace(cfg, lr=1e-12)  # nothing is learned: losses are those of the batches
    train(whole)
    late = replace(whole, steps=15, first_batch=5, out=cfg.out.with_name("late"), eval_every=5)
    train(late)
    losses = [[row["loss"] for row in rows(c) if "loss" in row] for c in (whole, late)]
    assert losses[1] == pytest.approx(losses[0][5:], abs=1e-9)
    assert losses[1] != pytest.approx(losses[0][:15], abs=1e-3)
    final = [json.loads((c.out / "done.json").read_text())["metrics"] for c in (whole, late)]
    assert final[0]["train_loss"] == pytest.approx(final[1]["train_loss"], abs=1e-9)
    assert json.loads((late.out / "config.json").read_text())["config"]["first_batch"] == 5


def test_further_evaluations_change_nothing_but_the_curve(cfg):
    often = replace(cfg, eval_at=(1, 7), out=cfg.out.with_name("often"))
    plain, extra = train(cfg), train(often)
    assert extra["curve"]["val_tokens"] == [128 * s for s in (0, 1, 6, 7, 12, 18, 20)]
    assert extra["metrics"] == plain["metrics"]


def test_the_spike_is_also_measured_with_the_gate_open(cfg, tmp_path):
    parent = train(cfg)
    from growth.child import grow_checkpoint
    from growth.plan import GrowConfig

    child = tmp_path / "child"
    grow_checkpoint(cfg.out / "final", child, 12, GrowConfig("srio", ffn="tiled"))
    base = replace(cfg, init=child, steps=3, warmup_steps=0, d_old=8)
    gated, plain = (
        train(replace(base, gate_steps=steps, out=tmp_path / str(steps)))["metrics"]
        for steps in (2, 0)
    )
    assert gated["spike_open"] == plain["spike"] == plain["spike_open"] != gated["spike"]
    assert plain["val_loss_start"] - plain["spike"] == parent["metrics"]["val_loss"]


def test_the_bar_says_why_it_stands_still(cfg, capsys):
    train(cfg)
    assert re.search(r"0/20 .*evaluating", capsys.readouterr().err)


# ---- clocks and the environment


def test_a_clock_that_is_set_back_changes_nothing_but_the_date(cfg, tmp_path, monkeypatch):
    train(cfg)
    other = replace(cfg, out=tmp_path / "set back")
    clock = count(2e9, -3600.0)  # an hour back at every look
    monkeypatch.setattr("time.time", lambda: next(clock))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    train(other)
    assert result(other) == result(cfg)
    summary = json.loads((other.out / "done.json").read_text())
    assert summary["wall_s"] > 0 and summary["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x' in the environment; unset it"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        ({"RANK": "1"}, "RANK 1 and WORLD_SIZE 1 in the environment are of no torchrun"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 in the environment are of no torchrun or srun"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0"),
    ],
)
def test_what_another_program_left_in_the_environment_is_named(cfg, monkeypatch, env, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        train(cfg)
    assert not cfg.out.exists()
