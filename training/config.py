"""The settings of a training run. No torch, so that a command line is read without it."""

import importlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from errors import UserError
from models.config import GPTConfig
from settings import Range, check

Seed = Annotated[int, Range(0, 2**63 - 1)]
Count = Annotated[int, Range(1, 10**15)]
Share = Annotated[float, Range(0.0, 1.0)]


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Lengths are in optimizer steps unless they say tokens."""

    out: Path  # run folder
    data: Path  # prepared corpus
    init: Path | None = None  # checkpoint to start from, with its own model config
    model: GPTConfig = field(default_factory=GPTConfig)
    seed: Seed = 0  # initialisation only
    data_seed: Seed = 0  # order of the training windows
    first_batch: Annotated[int, Range(0, 10**12)] = 0  # of the first update, in that order
    steps: Annotated[int, Range(1, 10**8 - 1)] = 1000
    batch_size: Annotated[int, Range(1, 10**12)] = 32  # sequences per step, over all processes
    micro_batch: Annotated[int, Range(0, 10**9)] = 0  # per forward; 0: a process's share at once
    lr: Annotated[float, Range(1e-12, 100.0)] = 1e-3
    min_lr_ratio: Share = 0.1  # final learning rate / lr
    warmup_steps: Annotated[int | None, Range(0)] = None  # default: a tenth of `steps`, 100 at most
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: stable, then linear decay
    decay_fraction: Share = 0.2  # wsd: part of `steps` spent decaying
    weight_decay: Annotated[float, Range(0.0, 100.0)] = 0.1
    beta1: Annotated[float, Range(0.0, 0.99999)] = 0.9
    beta2: Annotated[float, Range(0.0, 0.9999999)] = 0.95
    adam_eps: Annotated[float, Range(1e-30, 1.0)] = 1e-8
    clip: Annotated[float, Range(0.0, 1e9)] = 1.0  # largest global gradient norm; 0: no clipping
    eval_every: Annotated[int, Range(1, 10**12)] = 100  # also before the first step, after the last
    eval_at: tuple[int, ...] = ()  # further steps to evaluate after
    eval_tokens: Annotated[int, Range(1, 10**12)] = 65_536
    save_every: Count = 200
    keep: Count = 2  # step checkpoints kept while running
    last_tokens: Count = 20_000_000  # window of the final training loss (the last shard)
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # bfloat16: autocast
    matmul: Literal["auto", "highest", "high", "medium"] = "auto"  # float32's; auto: measured
    compile: bool = False  # at the price of half a minute at the start, once per model shape
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    threads: Annotated[int, Range(0, 1024)] = 0  # CPU threads; 0: torch's choice
    tracker: Literal["", "tensorboard", "wandb"] = ""
    gate_steps: Annotated[int, Range(0)] = 0  # length of the warm-up gate after growth
    rewarm_steps: Annotated[int, Range(0, 10**8)] = 0  # warm-up of new coordinates' updates alone
    new_lr: Annotated[float, Range(0.0, 1e4)] = 1.0  # of new coordinates, relative to the old ones'
    d_old: Annotated[int, Range(0, 10**9)] = 0  # width before growth, for gate, rewarm, new_lr
    run_id: str = ""  # name of the run in lineages; default: name of the run folder


def settled(cfg: TrainConfig) -> TrainConfig:
    """`cfg` with the defaults that depend on other fields, every field allowed; else a UserError
    that names value, range and remedy."""
    check(cfg)
    if cfg.warmup_steps is None:
        cfg = replace(cfg, warmup_steps=min(100, cfg.steps // 10))
    for name, last in (("warmup_steps", cfg.steps - 1), ("gate_steps", cfg.steps)):
        if getattr(cfg, name) > last:  # both must end with the run at the latest
            raise UserError(
                f"{name} is {getattr(cfg, name)}; with {cfg.steps} steps it must be in 0..{last}"
            )
    if cfg.tracker:
        check_tracker(cfg.tracker)
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", cfg.device):
        raise UserError(f"device is {cfg.device!r}; choose auto, cpu, cuda or cuda:N")
    if any(type(step) is not int or not 0 <= step for step in cfg.eval_at):
        raise UserError(f"eval_at is {cfg.eval_at!r}; it must be steps, whole numbers >= 0")
    return cfg


def check_tracker(name: str) -> None:
    """UserError where the tracker cannot be used: a mere folder of its name imports as well."""
    module, needed = {
        "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
        "wandb": ("wandb", "init"),
    }[name]
    try:
        getattr(importlib.import_module(module), needed)
    except (ImportError, AttributeError):
        raise UserError(
            f"tracker {name} is not installed here; run: pip install {name} (or leave it out)"
        ) from None
