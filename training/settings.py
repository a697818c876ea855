"""What defines a run: its settings, their allowed ranges, where it starts, and its loop state."""

import importlib.util
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from checkpoint import Checkpoint
from data.shards import Corpus
from errors import UserError
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from training.processes import Place


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Lengths are in optimizer steps unless they say tokens."""

    out: Path  # run folder
    data: Path  # prepared corpus
    init: Path | None = None  # checkpoint to start from; its model config replaces `model`
    model: GPTConfig = field(default_factory=GPTConfig)
    seed: int = 0  # initialisation only
    data_seed: int = 0  # order of the training windows
    steps: int = 1000
    batch_size: int = 32  # sequences per optimizer step, over all processes
    micro_batch: int = 0  # sequences per forward; 0: all of a process's share at once
    lr: float = 1e-3
    min_lr_ratio: float = 0.1  # final learning rate / lr
    warmup_steps: int = 100
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, linear decay) | constant
    decay_fraction: float = 0.2  # wsd: part of `steps` spent decaying
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    clip: float = 1.0  # largest global gradient norm; 0: no clipping
    eval_every: int = 100  # also before the first step and after the last
    eval_tokens: int = 65_536
    save_every: int = 200
    keep: int = 2  # step checkpoints kept while running
    last_tokens: int = 20_000_000  # window of the final training loss (the last shard)
    dtype: str = "auto"  # auto | float32 | bfloat16 (autocast) | float64
    compile: bool = False
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    threads: int = 0  # CPU threads; 0: torch's choice
    tracker: str = ""  # "" | tensorboard | wandb
    gate_steps: int = 0  # length of the warm-up gate after growth (growth/gate.py)
    rewarm_steps: int = 0  # warm-up of new coordinates' updates alone (growth/rewarm.py)
    d_old: int = 0  # width before growth, for gate_steps and rewarm_steps
    run_id: str = ""  # name of the run in lineages; default: name of the run folder


# not part of what a run computes: these may change when it is resumed
FREE = {"out", "data", "init", "run_id", "threads", "device", "compile", "micro_batch"}
FREE |= {"save_every", "keep", "tracker"}


@dataclass
class State:
    """What a resumed run needs besides weights, Adam moments and RNG. Stored in checkpoints."""

    step: int = 0  # updates done
    evaluated: int = -1  # step of the latest evaluation
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
class Run:
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
    identity |= {"model": model_cfg.as_dict(), "dtype": place.dtype, "data": corpus.manifest_hash}
    identity["init"] = init.hash if init else None
    identity["init_optimizer"] = init.optimizer_hash if init else None
    return identity


def check_config(cfg: TrainConfig) -> None:
    """Every number in its range, every choice known; UserError names value, range and remedy."""
    choices = {
        "schedule": ("cosine", "wsd", "constant"),
        "dtype": ("auto", "float32", "bfloat16", "float64"),
        "tracker": ("", "tensorboard", "wandb"),
    }
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            shown = ", ".join(repr(a) for a in allowed)
            raise UserError(f"{name} is {getattr(cfg, name)!r}; choose one of {shown}")
    if cfg.tracker and importlib.util.find_spec(cfg.tracker) is None:
        raise UserError(
            f"tracker {cfg.tracker} is not installed here; run: pip install {cfg.tracker} "
            f"(or leave it out)"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(cfg.device)):
        raise UserError(f"device is {cfg.device!r}; choose auto, cpu, cuda or cuda:N")
    last = cfg.steps if type(cfg.steps) is int else 1
    whole = {"steps": (1, 10**8 - 1), "seed": (0, 2**63 - 1), "data_seed": (0, 2**63 - 1)}
    whole |= dict.fromkeys(("batch_size", "eval_every", "eval_tokens"), (1, 10**12))
    whole |= dict.fromkeys(("save_every", "keep", "last_tokens"), (1, 10**15))
    whole |= {"micro_batch": (0, 10**9), "threads": (0, 1024), "d_old": (0, 10**9)}
    whole |= {"rewarm_steps": (0, 10**8)}
    # the warm-up must end before the last step, and the gate with it at the latest
    whole |= {"warmup_steps": (0, last - 1), "gate_steps": (0, last)}
    real = {"lr": (1e-12, 100.0), "min_lr_ratio": (0.0, 1.0), "decay_fraction": (0.0, 1.0)}
    real |= {"weight_decay": (0.0, 100.0), "beta1": (0.0, 0.99999), "beta2": (0.0, 0.9999999)}
    real |= {"adam_eps": (1e-30, 1.0), "clip": (0.0, 1e9)}
    for kinds, ranges in (((int,), whole), ((int, float), real)):
        for name, (low, high) in ranges.items():
            value = getattr(cfg, name)
            if type(value) not in kinds or not low <= value <= high:
                kind = "a whole number" if kinds == (int,) else "a number"
                raise UserError(f"{name} is {value!r}; it must be {kind} in {low}..{high}")


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
    if (cfg.gate_steps or cfg.rewarm_steps) and not 0 < cfg.d_old < model_cfg.d_model:
        raise UserError(
            f"d_old is {cfg.d_old}; with gate_steps or rewarm_steps it must be in "
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
