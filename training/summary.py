"""What a run leaves behind: the meta of its checkpoints and the summary in done.json."""

import math
from dataclasses import asdict
from datetime import UTC, datetime

import checkpoint
from models.gpt import count_parameters, flops_per_token
from provenance import hardware, versions
from training.settings import Setup, State

CURVE_POINTS = 200


def describe(run: Setup, state: State) -> dict:
    """Checkpoint meta: config, counts of this stage and of the whole lineage, loop state."""
    tokens, flops = run.spent(state.step)
    return {
        "config": run.model.cfg.as_dict(),
        "run_id": run.name,
        "config_hash": checkpoint.hash_json(run.identity),
        "manifest_hash": run.corpus.manifest_hash,
        "step": state.step,
        "tokens": tokens,
        "flops": flops,
        "tokens_total": run.origin.tokens + tokens,
        "flops_total": run.origin.flops + flops,
        "lineage": run.origin.lineage,
        "growth": run.origin.growth,
        "state": asdict(state),
    }


def summarize(run: Setup, state: State, reason: str | None, rows: list[dict]) -> dict:
    """The result of a run as done.json has it. reason: why it diverged, or None; rows: the lines
    of metrics.jsonl."""
    corpus, growth = run.corpus, run.origin.growth or {}
    losses = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    vals = [(row["tokens"], row["val_loss"]) for row in rows if "val_loss" in row]
    tokens, flops = run.spent(state.step)
    forward = flops_per_token(run.model.cfg, backward=False)
    seeds = {"init": run.cfg.seed, "data": run.cfg.data_seed}
    return {
        "status": "diverged" if reason else "done",
        "reason": reason,
        "run_id": run.name,
        "config": run.identity,
        "config_hash": checkpoint.hash_json(run.identity),
        "seeds": seeds | {"growth": (growth.get("settings") or {}).get("seed")},
        "manifest_hash": corpus.manifest_hash,
        "corpus": {
            "source": corpus.manifest.get("source"),
            "tokenizer": corpus.manifest["tokenizer"]["spec"],
            "train_tokens": corpus.n_tokens("train"),
            "val_tokens": corpus.n_tokens("val"),
        },
        "lineage": list(run.origin.lineage),
        "parent": run.origin.parent,
        "params": count_parameters(run.model.cfg),
        "d_model": run.model.cfg.d_model,
        "metrics": metrics(run, reason is None, losses, vals, state.open_loss),
        "tokens": run.origin.split("tokens", tokens),
        # evaluation is not training: told apart, in no total
        "flops": run.origin.split("flops", flops) | {"evaluation": state.eval_tokens * forward},
        "wall_s": state.wall_s,
        "tokens_per_s": tokens / state.train_s if state.train_s else 0.0,
        "hardware": hardware(run.place),
        "versions": versions(),
        "curve": curve(losses, vals),
        "lost_steps": state.step - len(losses),  # of a damaged log: the run went on without them
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def metrics(
    run: Setup, ok: bool, losses: list[tuple], vals: list[tuple], open_loss: float | None
) -> dict:
    """The numbers a comparison reads; None where a diverged run has none.

    train_loss: mean over the last cfg.last_tokens training tokens (whole steps); spike: loss right
    after growth minus the parent's final loss, where both were measured on the same corpus;
    spike_open: the same with the warm-up gate open (alpha 1): what growth itself did.
    """
    window = max(1, round(run.cfg.last_tokens / run.tokens_per_step)) * run.tokens_per_step
    parent, start = run.origin.parent or {}, dict(vals).get(0)
    same = parent.get("manifest_hash") == run.corpus.manifest_hash
    before = parent.get("val_loss") if same else None
    return {
        "train_loss": mean([v for t, v in losses if t > losses[-1][0] - window]) if ok else None,
        "val_loss": vals[-1][1] if ok else None,
        "val_loss_start": start,
        "spike": difference(start, before),
        "spike_open": difference(start if open_loss is None else open_loss, before),
    }


def difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def lineage_entry(run: Setup, summary: dict) -> dict:
    """This finished stage as its descendants will list it."""
    growth = {k: v for k, v in (run.origin.growth or {}).items() if k != "report"}
    return {
        "stage": len(run.origin.lineage),
        "run_id": run.name,
        "hash": checkpoint.model_hash(run.model.state_dict()),
        "d_model": run.model.cfg.d_model,
        "tokens": summary["tokens"]["stage"],
        "flops": summary["flops"]["stage"],
        "growth": growth or None,
        "val_loss": summary["metrics"]["val_loss"],
        "train_loss": summary["metrics"]["train_loss"],
        "manifest_hash": run.corpus.manifest_hash,
    }


def curve(losses: list[tuple], vals: list[tuple]) -> dict:
    """Training loss as at most CURVE_POINTS block means, every validation loss; without NaNs."""
    losses = [(t, v) for t, v in losses if v is not None]
    vals = [(t, v) for t, v in vals if v is not None]
    size = max(1, math.ceil(len(losses) / CURVE_POINTS))
    blocks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return {
        "tokens": [mean([t for t, _ in block]) for block in blocks],
        "train": [mean([v for _, v in block]) for block in blocks],
        "val_tokens": [t for t, _ in vals],
        "val": [v for _, v in vals],
    }


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
