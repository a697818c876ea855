"""What one job runs: grow where the run has a parent, train, write the run's row.

Jobs reach `execute` by its name (cluster.job.TARGET), in a process of their own, from a copy of
the code. Called again after any interruption it goes on where the last life stopped.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import checkpoint
import files
from analysis.rows import read_row, row_path, write_row
from data.shards import Corpus
from errors import UserError
from grid import Run
from growth.child import continue_checkpoint, grow_checkpoint
from growth.plan import GrowConfig
from models.gpt import GPTConfig, count_parameters
from train import TrainConfig, train
from training.numerics import compile_cache
from training.processes import env_number


def execute(out: str, run_id: str, spec: dict) -> None:
    """Grow (where the run has a parent), train and write the row of one run; resumes by itself."""
    run, folder, row = Run(**spec["run"]), Path(out) / "runs" / run_id, row_path(out, run_id)
    if row.exists() and (read_row(row)["status"] != "done" or (folder / "final").exists()):
        return require_done(run_id, read_row(row))
    first = env_number("RANK") == 0  # of several processes, one grows and writes
    if first:
        files.sweep(row.parent, mine=row.name)  # a run has one writer at a time
        files.sweep(Path(out) / "grown", mine=run_id)
    data = Path(spec["data"])
    model, child = GPTConfig(**run.train["model"]), None
    if run.grow or run.continues:
        child, parent = Path(out) / "grown" / run_id, Path(out) / "parent"  # a given one
        if run.needs:
            parent = Path(out) / "runs" / run.needs / "final"
        if first and run.continues and not child.exists():
            continue_checkpoint(parent, child)
        if first and run.grow and not child.exists():
            corpus, cfg = Corpus(data), GrowConfig(**run.grow)
            probe = next(iter(corpus.eval_batches(*probe_size(model))))
            batches = learning_batches(corpus, run, cfg, model.block_size)
            grow_checkpoint(parent, child, run.d_model, cfg, probe, batches, run.optimizer)
        wait_for(child)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache(Path(out))))
    settings = {**run.train, "model": model, "run_id": run_id}
    summary = train(TrainConfig(out=folder, data=data, init=child, **settings))
    if first:
        write_row(row, make_row(run, spec, summary, child))
    require_done(run_id, summary)


def require_done(run_id: str, result: dict) -> None:
    """UserError where a run ended badly: its children must not start."""
    if result["status"] != "done":
        raise UserError(f"{run_id} {result['status']}: {result.get('reason')}")


def wait_for(folder: Path, seconds: float = 3600) -> None:
    """Until another process of this run has put `folder` in place (whole, by a rename)."""
    end = time.monotonic() + seconds
    while not folder.exists():
        if time.monotonic() > end:
            raise UserError(f"{folder} did not appear in {seconds:.0f} s; see the log of task 0")
        time.sleep(0.2)


def learning_batches(
    corpus: Corpus, run: Run, cfg: GrowConfig, block_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a learned operator sees: training windows in an order of its own, the same for all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data_seed = run.train["data_seed"] + 500  # stages count from 1: never a stage's own order
    for step in range(cfg.learn_steps):
        batch = corpus.batch_at(step, data_seed, cfg.learn_batch, block_size)
        yield tuple(tokens_bt.to(device) for tokens_bt in batch)


def probe_size(model: GPTConfig) -> tuple[int, int, int]:
    """eval_batches arguments for one batch of about 1,024 tokens: the report card's probe. 256 for
    models above 30 M parameters and 128 above 100 M, whose float64 activations and logits would
    fill the memory."""
    params = count_parameters(model)
    tokens = 1024 if params < 30e6 else 256 if params < 100e6 else 128
    length = min(tokens, model.block_size)
    sequences = tokens // length
    return sequences * length, sequences, length


def make_row(run: Run, spec: dict, summary: dict, child: Path | None) -> dict:
    """The result row: everything a table, a claim or a sceptical reader needs."""
    growth = checkpoint.read_state(child)["meta"]["growth"] if child else None
    return {
        "schema": 1,
        "preset": spec["preset"],
        "variant": run.variant,
        "seed": run.seed,
        "stage": run.stage,
        "command": spec["command"],
        **{key: spec["code"][key] for key in ("commit", "dirty")},
        **summary,
        "config": run.plan,
        "config_hash": checkpoint.hash_json(run.plan),
        "report": growth["report"] if growth else None,
    }
