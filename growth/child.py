"""From a parent checkpoint to a grown child checkpoint, report card and lineage included."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

import checkpoint
from growth.apply import grow, stored_as
from growth.operators import find
from growth.optim import carry
from growth.plan import GrowConfig
from growth.report import NotExact, report_card
from models.sizes import TOGETHER, Apart

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, (B, T) each


def grow_checkpoint(
    parent: Path,
    out: Path,
    d_new: int,
    cfg: GrowConfig,
    probe: Batch | None = None,
    batches: Iterable[Batch] | None = None,
    optimizer: str = "reset",
    force: bool = False,
    force_inexact: bool = False,
    apart: Apart = TOGETHER,
) -> dict:
    """Write the child of `parent` at width `d_new` to the folder `out`; its `growth` record.

    The child starts at step 0 with cumulative tokens and FLOPs, a learned operator's included, and
    names its parent's hash. probe: tokens and targets (B, T) for the report card; None draws 256
    random tokens of the vocabulary. batches: for learned operators. optimizer: the policy of
    growth/optim.py for the parent's Adam state.
    Raises UserError as checkpoint.load, growth.apply.grow, growth.optim.carry and checkpoint.save,
    and NotExact where the card breaks the promise of an exact operator.
    """
    began, ckpt = time.perf_counter(), checkpoint.load(parent)
    old = checkpoint.model_config(ckpt)
    lineage = ckpt.meta.get("lineage", [])
    # a static operator acts in float64: the card then measures the operator, not the rounding
    learns = find(cfg.operator).learned
    weights = ckpt.model if learns else {k: w.double() for k, w in ckpt.model.items()}
    grown = grow(weights, old, d_new, cfg, ages_of(ckpt.meta, old.d_model), batches, apart)
    moments = carry(grown.plan, ckpt.optimizer, optimizer)
    wall_s, learned = time.perf_counter() - began, grown.learned
    x_bt, y_bt = probe or random_probe(old)
    record = {
        "settings": asdict(cfg),
        "optimizer": optimizer,
        "parent": ckpt.hash,
        "tokens": learned.tokens if learned else 0,
        "flops": learned.flops if learned else 0,
        "learning_losses": learned.losses if learned else None,
        "report": report_card(grown.plan, old, grown.weights, grown.cfg, x_bt, y_bt)
        | {"wall_s": wall_s},
    }
    report = record["report"]
    if report["contract"] == "exact" and not report["exact"] and not force_inexact:
        raise NotExact(
            f"method {cfg.operator} promises an exact result, but the logits changed by "
            f"{report['max_rel_dlogit']:.3g} of their spread in float64; nothing was written. "
            f"--force-inexact keeps it"
        )
    meta = {
        "config": grown.cfg.as_dict(),
        "step": 0,
        "tokens": 0,
        "flops": 0,
        "tokens_total": ckpt.meta.get("tokens_total", 0) + record["tokens"],
        "flops_total": ckpt.meta.get("flops_total", 0) + record["flops"],
        "lineage": lineage,
        "growth": record,
    }
    if moments:
        meta["optimizer_step"] = ckpt.meta["optimizer_step"]
    stored = {n: stored_as(n, w, ckpt.model[n].dtype) for n, w in grown.weights.items()}
    checkpoint.save(out, stored, meta, moments, force=force)
    return record


def continue_checkpoint(parent: Path, out: Path) -> None:
    """Write `parent` to the folder `out` as the start of a stage that does not grow it: step 0, no
    optimizer state, as a grown child under optimizer "reset"."""
    ckpt = checkpoint.load(parent)
    counts = {key: ckpt.meta.get(key, 0) for key in ("tokens_total", "flops_total")}
    meta = {"config": ckpt.meta["config"], "step": 0, "tokens": 0, "flops": 0, "growth": None}
    checkpoint.save(out, ckpt.model, meta | counts | {"lineage": ckpt.meta.get("lineage", [])})


def ages_of(meta: dict, d_model: int) -> tuple[int, ...]:
    """The widths this model had before `d_model`, oldest first; trained or not, each once."""
    widths = {entry["d_model"] for entry in meta.get("lineage", [])}
    growth = meta.get("growth") or {}
    widths |= {growth["report"]["d_model"][0]} if growth.get("report") else set()
    return tuple(sorted(width for width in widths if width < d_model))


def random_probe(cfg, n_tokens: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform random tokens (B, T) and targets, fixed: enough to measure exactness, not loss."""
    length = min(cfg.block_size, n_tokens)
    gen = torch.Generator().manual_seed(0)
    draw = torch.randint(cfg.vocab_size, (max(1, n_tokens // length), length + 1), generator=gen)
    return draw[:, :-1], draw[:, 1:]
