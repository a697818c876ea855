"""Two gloo processes on this machine against one, in float64."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import checkpoint
import train as train_module
from data.shards import Corpus
from errors import UserError
from models.gpt import GPT, GPTConfig
from train import Interrupted, TrainConfig, train
from training.processes import Place, find_place, mean_over_processes
from training.settings import Setup, check_fit, find_origin

ROOT = Path(__file__).resolve().parents[1]
MODEL = GPTConfig(vocab_size=48, block_size=16, n_layer=1, n_head=2, head_dim=4, d_model=8)

WORKER = """
import sys
root, folder, data, task = sys.argv[1:]
sys.path[:0] = [root, root + "/tests"]
import test_ddp
test_ddp.work(folder, data, task)
"""


def work(folder: str, data: str, task: str) -> None:
    """What each of the two processes does; `task` names what happens to process 1 at update 7."""
    torch.set_num_threads(1)
    cfg, place = config(folder, data), find_place("cpu", "float64")
    dist.init_process_group("gloo")
    if task == "die":
        dump_gradients(make_run(cfg, place), Path(folder))
    original = Corpus.batch_at

    def batch_at(self, at, *args):
        if at == 7 and place.rank == 1 and task != "train":
            os.kill(os.getpid(), signal.SIGKILL if task == "die" else signal.SIGTERM)
        return original(self, at, *args)

    Corpus.batch_at = batch_at
    try:
        train(cfg)
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    try:
        train(replace(cfg, lr=0.5))
    except UserError as error:
        sys.exit(f"refused: {error}")


def dump_gradients(run: Setup, folder: Path) -> None:
    """Loss, gradients of update 3 and the validation loss, as process `rank` has them."""
    net = train_module.data_parallel(run.model, run.place)
    loss = mean_over_processes(train_module.gradients(run, net, 3), run.place)
    tensors = {name: p.grad for name, p in run.model.named_parameters()}
    val, n_tokens = train_module.evaluate(run, run.model, {"signum": 0})
    tensors |= {"loss": loss, "val": torch.tensor([val, n_tokens], dtype=torch.float64)}
    save_file(tensors, folder / f"grads-{run.place.rank}.safetensors")


def config(folder, data) -> TrainConfig:
    return TrainConfig(
        out=Path(folder) / "run",
        data=Path(data),
        model=MODEL,
        steps=12,
        batch_size=8,
        micro_batch=3,  # in two processes: 3 + 1 sequences each; in one: 3 + 3 + 2
        lr=1e-2,
        warmup_steps=2,
        eval_every=6,
        eval_tokens=320,
        save_every=4,
        last_tokens=256,
        dtype="float64",
        device="cpu",
    )


def make_run(cfg, place) -> Setup:
    model = GPT(cfg.model, seed=cfg.seed).double()
    return Setup(cfg, place, Corpus(cfg.data), model, None, find_origin(None), {})


def launch(tmp_path, corpus_folder, task: str) -> list[subprocess.CompletedProcess]:
    """Two workers of one run, as torchrun would start them; their results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (tmp_path / "worker.py").write_text(WORKER)
    words = [sys.executable, str(tmp_path / "worker.py"), str(ROOT)]
    words += [str(tmp_path), str(corpus_folder), task]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = [
        subprocess.Popen(
            words,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [
        subprocess.CompletedProcess(words, worker.returncode, *text)
        for worker, text in zip(workers, texts, strict=True)
    ]


def check_gradients(folder: Path, cfg: TrainConfig) -> None:
    """Both processes had the gradients and the losses that one process computes."""
    run = make_run(cfg, Place(dtype="float64"))
    loss = train_module.gradients(run, run.model, 3)
    val = train_module.evaluate(run, run.model, {"signum": 0})
    for rank in range(2):
        found = load_file(folder / f"grads-{rank}.safetensors")
        assert found["loss"].item() == pytest.approx(loss.item(), abs=1e-14)
        assert found["val"].tolist() == pytest.approx(val, abs=1e-12)
        for name, p in run.model.named_parameters():
            assert torch.allclose(found[name], p.grad, rtol=0, atol=1e-15), name
    other = make_run(cfg, Place(dtype="float64"))
    train_module.gradients(other, other.model, 4)
    assert not torch.allclose(found["wpe.weight"], other.model.wpe.weight.grad, atol=1e-6)


def rows(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def check_equals_one_process(cfg: TrainConfig, whole: TrainConfig) -> None:
    """The run ended like one that a single process trained without interruption."""
    summary = train(whole)
    a, b = (checkpoint.load(c.out / "final") for c in (cfg, whole))
    assert a.model.keys() == b.model.keys() == GPT(MODEL).state_dict().keys()
    assert all(torch.allclose(a.model[k], b.model[k], rtol=0, atol=1e-9) for k in a.model)
    for x, y in zip(rows(cfg.out), rows(whole.out), strict=True):
        assert x == pytest.approx(y, abs=1e-9)
    theirs = json.loads((cfg.out / "done.json").read_text())
    assert theirs["tokens"] == summary["tokens"] and theirs["flops"] == summary["flops"]
    seconds = a.meta["state"]["train_s"]  # throughput counts the tokens of all processes
    assert theirs["tokens_per_s"] == pytest.approx(theirs["tokens"]["stage"] / seconds)
    assert theirs["metrics"] == pytest.approx(summary["metrics"], abs=1e-9)


@pytest.mark.slow
def test_two_processes_train_like_one_and_survive_the_death_of_one(tmp_path, corpus_folder):
    """Same gradients; a killed process ends the other; the same command finishes the run as if
    nothing had happened; and a refusal reaches every process."""
    cfg = config(tmp_path, corpus_folder)
    results = launch(tmp_path, corpus_folder, "die")
    assert [r.returncode for r in results] == [1, -signal.SIGKILL], results[0].stderr
    check_gradients(tmp_path, cfg)
    assert checkpoint.newest(cfg.out).meta["step"] == 4
    results = launch(tmp_path, corpus_folder, "train")
    assert all(r.returncode == 1 and "refused: " in r.stderr for r in results), results[0].stderr
    check_equals_one_process(cfg, replace(cfg, out=tmp_path / "whole"))


@pytest.mark.slow
def test_a_signal_at_one_process_stops_both_and_one_process_can_go_on(tmp_path, corpus_folder):
    cfg = config(tmp_path, corpus_folder)
    results = launch(tmp_path, corpus_folder, "term")
    assert [r.returncode for r in results] == [75, 75], results[0].stderr + results[1].stderr
    assert checkpoint.newest(cfg.out).meta["step"] == 8
    train(cfg)
    check_equals_one_process(cfg, replace(cfg, out=tmp_path / "whole", run_id="run"))


def test_gradients_are_exchanged_once_per_step(tmp_path, corpus_folder):
    """no_sync covers forward and backward of all micro-batches but the last."""
    seen = []

    class Net(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.silent = model, False

        @contextmanager
        def no_sync(self):
            self.silent = True
            yield
            self.silent = False

        def forward(self, *batch):
            seen.append(("forward", self.silent))
            loss = self.model(*batch)
            loss.register_hook(lambda _: seen.append(("backward", self.silent)))
            return loss

    cfg = replace(config(tmp_path, corpus_folder), micro_batch=2)
    run = make_run(cfg, Place(size=2, rank=1, dtype="float64"))
    train_module.gradients(run, Net(run.model), 0)
    assert seen == [("forward", True), ("backward", True), ("forward", False), ("backward", False)]


def test_place_comes_from_torchrun_or_srun(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    assert find_place("cpu") == Place()
    batch_script = {"SLURM_JOB_ID": "40001", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    monkeypatch.setattr(os, "environ", batch_script)
    assert find_place("cpu").size == 1  # only srun's steps share a run
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    srun = batch_script | step | {"SLURM_STEP_NODELIST": "node7"}
    monkeypatch.setattr(os, "environ", srun)
    place = find_place("cpu", "bfloat16")
    assert (place.rank, place.size, place.local, place.dtype) == (3, 4, 1, "bfloat16")
    assert (srun["MASTER_ADDR"], srun["MASTER_PORT"]) == ("node7", "20001")
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    monkeypatch.setattr(os, "environ", torchrun)
    assert find_place("cpu") == Place(rank=1, size=2, local=1)


def test_a_batch_that_does_not_divide_is_refused(tmp_path, corpus_folder):
    cfg = replace(config(tmp_path, corpus_folder), batch_size=9)
    check_fit(cfg, MODEL, Corpus(corpus_folder), Place(size=3))
    with pytest.raises(UserError, match="multiple of 2"):
        check_fit(cfg, MODEL, Corpus(corpus_folder), Place(size=2))
