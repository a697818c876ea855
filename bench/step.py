"""train.py's own step by itself: what the benchmark and the time estimates measure.

    python -m bench.step '{"model": {"d_model": 64, ...}, "batch_size": 16, "threads": 1}'

prints {"step_s", "eval_token_s", "timed_s"} as JSON. Nothing here is a copy: data, model, optimizer
and update are set up by train.py's functions, on a corpus of random tokens.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import checkpoint
import files
import train
from data.prepare import ShardWriter
from data.shards import FORMAT, SPLITS, Corpus, manifest_hash
from models.gpt import GPTConfig
from training.config import TrainConfig, settled
from training.numerics import choose
from training.optimizer import make_optimizer
from training.processes import find_place
from training.settings import Setup, State, find_origin

TOKENS = {"train": 1 << 20, "val": 1 << 17}
SECONDS = 1.0  # of steps that are timed


@dataclass
class Trainer:
    """A run as train.fit has it before its loop; no checkpoints, no log."""

    setup: Setup
    net: torch.nn.Module
    optimizer: torch.optim.AdamW
    state: State

    def step(self) -> None:
        train.update(self.setup, self.net, self.optimizer, self.state)

    def load(self) -> None:
        """A step's batch, as the step itself fetches it."""
        cfg, run = self.setup.cfg, self.setup
        run.corpus.batch_at(self.state.step, cfg.data_seed, cfg.batch_size, run.block_size)

    def evaluate(self) -> int:
        """One evaluation of cfg.eval_tokens; the tokens it saw."""
        return train.evaluate(self.setup, self.net, {"signum": 0})[1]


def open_trainer(folder: Path, **settings) -> Trainer:
    """A Trainer for TrainConfig fields; its corpus is written into `folder`."""
    data = random_corpus(folder / "corpus", settings["model"].vocab_size)
    return trainer_of(TrainConfig(folder / "run", data, **{"steps": 10**6} | settings))


def trainer_of(cfg: TrainConfig) -> Trainer:
    """A Trainer of a run as train.train begins it; gates and re-warm-ups are left out."""
    cfg = settled(cfg)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    init = checkpoint.load(cfg.init) if cfg.init else None
    model_cfg = checkpoint.model_config(init) if init else cfg.model
    place = choose(cfg, model_cfg, find_place(cfg.device, cfg.dtype))
    model = train.build_model(cfg.seed, model_cfg, init, place)
    setup = Setup(cfg, place, Corpus(cfg.data), model, init, find_origin(init), {})
    _, net = train.compiled(place.compile, model, model)
    return Trainer(setup, net, make_optimizer(cfg, model)[0], State())


def random_corpus(folder: Path, vocab_size: int) -> Path:
    """A prepared corpus of uniform random tokens."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    rng, shards = np.random.default_rng(0), []
    for split in SPLITS:
        writer = ShardWriter(folder, split, shard_tokens=1 << 30)
        writer.add(rng.integers(vocab_size, size=TOKENS[split]), 0)
        writer.close()
        shards += writer.shards
    tokenizer = {"spec": f"random:{vocab_size}", "hash": ""}
    manifest = {"format": FORMAT, "source": "random", "vocab_size": vocab_size, "eot": None}
    manifest |= {"tokenizer": tokenizer, "shards": shards}
    manifest["manifest_hash"] = manifest_hash(manifest)
    files.write_json(folder / "manifest.json", manifest)
    return folder


def seconds(action, at_least: float = SECONDS) -> list[float]:
    """The times of `action`, repeated for `at_least` seconds, twice or more; one before is not
    counted."""
    action()
    times = []
    while sum(times) < at_least or len(times) < 2:
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    settings = json.loads(sys.argv[1])
    model = GPTConfig(**settings.pop("model"))
    tokens = settings["batch_size"] * model.block_size
    with tempfile.TemporaryDirectory() as folder:
        trainer = open_trainer(Path(folder), model=model, **settings | {"eval_tokens": tokens})
        began = time.perf_counter()
        step_s = float(np.median(seconds(trainer.step)))
        eval_s = float(np.median(seconds(trainer.evaluate, SECONDS / 3)))
        timed_s = time.perf_counter() - began
    print(json.dumps({"step_s": step_s, "eval_token_s": eval_s / tokens, "timed_s": timed_s}))


if __name__ == "__main__":
    main()
