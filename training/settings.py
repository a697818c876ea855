"""What defines a run: its settings, their allowed ranges, where it starts, and its loop state."""

import os
from dataclasses import asdict, dataclass, field

from checkpoint import Checkpoint
from data.shards import Corpus
from errors import UserError
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from training.config import TrainConfig
from training.processes import Place

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
