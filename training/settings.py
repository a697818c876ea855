"""What defines a run: its settings, their allowed ranges, where it starts, and its loop state."""

import importlib
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from checkpoint import Checkpoint
from data.shards import Corpus
from errors import UserError
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from settings import Range, check
from training.processes import Place

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


# not part of what a run computes: these may change when it is resumed
FREE = {"out", "data", "init", "run_id", "threads", "device", "micro_batch"}
FREE |= {"save_every", "keep", "tracker"}


@dataclass
class State:
    """What a resumed run needs besides weights, Adam moments and RNG. Stored in checkpoints."""

    step: int = 0  # updates done
    evaluated: int = -1  # step of the latest evaluation
    open_loss: float | None = None  # validation loss before step 0 with the gate open
    first_loss: float | None = None
    ema: float | None = None  # of the training loss
    metrics_bytes: int = 0  # length of metrics.jsonl
    eval_tokens: int = 0  # seen by evaluations so far
    train_s: float = 0.0  # seconds in updates
    wall_s: float = 0.0  # seconds in all


@dataclass(frozen=True)
class Origin:
    """What a run starts from, as the rows and its own checkpoints tell it.

    lineage: the finished stages before it, oldest first; growth: how the starting checkpoint was
    grown, or None; tokens, flops: spent before this stage, a learned operator's included; parent:
    the last trained checkpoint, or None for a run from scratch.
    """

    lineage: list[dict] = field(default_factory=list)
    growth: dict | None = None
    tokens: int = 0
    flops: int = 0
    parent: dict | None = None

    def split(self, what: str, stage: int) -> dict:
        """`what` ("tokens" or "flops") by what it was spent on, given this stage's."""
        before, operator = getattr(self, what), (self.growth or {}).get(what, 0)
        return {
            "parent": before - operator,
            "operator": operator,
            "stage": stage,
            "total": before + stage,
        }


@dataclass(frozen=True)
class Setup:
    """All that stays the same while a run trains."""

    cfg: TrainConfig
    place: Place
    corpus: Corpus
    model: GPT
    init: Checkpoint | None
    origin: Origin
    identity: dict

    @property
    def name(self) -> str:
        return self.cfg.run_id or self.cfg.out.resolve().name

    @property
    def block_size(self) -> int:
        return self.model.cfg.block_size

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.batch_size * self.block_size

    def spent(self, step: int) -> tuple[int, int]:
        """Training tokens and FLOPs of this stage after `step` updates; evaluation is neither."""
        tokens = step * self.tokens_per_step
        return tokens, tokens * flops_per_token(self.model.cfg)


def find_origin(init: Checkpoint | None) -> Origin:
    """The Origin a checkpoint's meta tells; UserError where it makes no sense."""
    if init is None:
        return Origin()
    meta = init.meta
    lineage, growth = meta.get("lineage", []), meta.get("growth")
    counts = [meta.get("tokens_total", 0), meta.get("flops_total", 0)]
    counts += [(growth or {}).get(k, 0) for k in ("tokens", "flops")] if is_record(growth) else [0]
    if not (
        isinstance(lineage, list)
        and all(isinstance(entry, dict) for entry in lineage)
        and is_record(growth)
        and all(type(n) is int and n >= 0 for n in counts)
    ):
        raise UserError(f"{init.folder}: its lineage, growth or token counts make no sense")
    last = lineage[-1] if lineage else {}
    parent = {k: last.get(k) for k in ("run_id", "val_loss", "train_loss", "manifest_hash")}
    parent |= {"source": last["source"]} if "source" in last else {}  # a pretrained model's
    parent["hash"] = str(last.get("hash") or (growth or {}).get("parent") or init.hash)
    origin = Origin(lineage, growth, *counts[:2], parent)
    parent |= {what: origin.split(what, 0)["parent"] for what in ("tokens", "flops")}
    return origin


def is_record(value: object) -> bool:
    return value is None or isinstance(value, dict)


def identify(
    cfg: TrainConfig, model_cfg: GPTConfig, place: Place, corpus: Corpus, init: Checkpoint | None
) -> dict:
    """What defines a run's numbers. Data and parent count by content, not by path."""
    identity = {k: v for k, v in asdict(cfg).items() if k not in FREE}
    identity |= {"model": model_cfg.as_dict(), "data": corpus.manifest_hash}
    identity |= {key: getattr(place, key) for key in ("dtype", "matmul", "compile")}
    identity["eval_at"] = list(cfg.eval_at)  # as JSON has it
    identity["init"] = init.hash if init else None
    identity["init_optimizer"] = init.optimizer_hash if init else None
    return identity


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


def check_fit(cfg: TrainConfig, model_cfg: GPTConfig, corpus: Corpus, place: Place) -> None:
    """Config, model, corpus and processes fit together and into memory."""
    if corpus.vocab_size > model_cfg.vocab_size:
        raise UserError(
            f"the corpus has {corpus.vocab_size} token ids, the model's vocab_size is "
            f"{model_cfg.vocab_size}; use model.vocab_size >= {corpus.vocab_size}"
        )
    for split, needed in (("train", cfg.batch_size), ("val", 1)):
        windows = corpus.n_windows(split, model_cfg.block_size)
        if windows < needed:
            raise UserError(
                f"the corpus has {windows} {split} windows of {model_cfg.block_size} tokens, "
                f"{needed} are needed; use a smaller batch_size or context, or more data"
            )
    if cfg.batch_size % place.size:
        raise UserError(
            f"batch_size {cfg.batch_size} does not divide among {place.size} processes; "
            f"use a multiple of {place.size}"
        )
    apart = cfg.gate_steps or cfg.rewarm_steps or cfg.new_lr != 1
    if apart and not 0 < cfg.d_old < model_cfg.d_model:
        raise UserError(
            f"d_old is {cfg.d_old}; with gate_steps, rewarm_steps or new_lr it must be in "
            f"1..{model_cfg.d_model - 1}, the width before growth"
        )
    if model_cfg.n_layer > 1000:
        raise UserError(f"model.n_layer is {model_cfg.n_layer}; it must be in 1..1000")
    needed = 16 * count_parameters(model_cfg)  # weights, gradients and two moments in float32
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"the model needs at least {needed / 1e9:.1f} GB to train, this machine has "
            f"{memory / 1e9:.1f} GB; use a smaller model"
        )
