"""From a parent checkpoint to a grown child checkpoint, report card and lineage included."""

from dataclasses import asdict
from pathlib import Path

import torch

import checkpoint
from growth.apply import grow
from growth.plan import GrowConfig
from growth.report import report_card


def grow_checkpoint(
    parent: Path,
    out: Path,
    d_new: int,
    cfg: GrowConfig,
    probe: tuple[torch.Tensor, torch.Tensor] | None = None,
    force: bool = False,
) -> dict:
    """Write the child of `parent` at width `d_new` to the folder `out`; its `growth` record.

    The child starts at step 0 with cumulative tokens and FLOPs, and names its parent's hash. probe:
    tokens and targets (B, T) for the report card; None draws 256 random tokens of the vocabulary.
    Raises UserError as checkpoint.load, growth.apply.grow and checkpoint.save do.
    """
    ckpt = checkpoint.load(parent)
    old = checkpoint.model_config(ckpt)
    lineage = ckpt.meta.get("lineage", [])
    ages = tuple(entry["d_model"] for entry in lineage[:-1])
    grown = grow(ckpt.model, old, d_new, cfg, ages)
    x_bt, y_bt = probe or random_probe(old)
    record = {
        "settings": asdict(cfg),
        "parent": ckpt.hash,
        "tokens": 0,
        "flops": 0,
        "report": report_card(grown.plan, old, grown.weights, grown.cfg, x_bt, y_bt),
    }
    meta = {
        "config": asdict(grown.cfg),
        "step": 0,
        "tokens": 0,
        "flops": 0,
        "tokens_total": ckpt.meta.get("tokens_total", 0),
        "flops_total": ckpt.meta.get("flops_total", 0),
        "lineage": lineage,
        "growth": record,
    }
    checkpoint.save(out, grown.weights, meta, force=force)
    return record


def random_probe(cfg, n_tokens: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform random tokens (B, T) and targets, fixed: enough to measure exactness, not loss."""
    length = min(cfg.block_size, n_tokens)
    gen = torch.Generator().manual_seed(0)
    draw = torch.randint(cfg.vocab_size, (max(1, n_tokens // length), length + 1), generator=gen)
    return draw[:, :-1], draw[:, 1:]
