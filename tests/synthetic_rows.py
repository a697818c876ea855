"""Made-up result rows for tests: the shape of real ones, numbers from a formula and a seed."""

import copy
import json
import zlib
from pathlib import Path

import numpy as np

OFFSETS = {  # final validation loss minus nrio's (nats/token)
    "scratch": 0.38,
    "scratch-flops": 0.11,
    "nrio": 0.0,
    "nrio-policies": -0.005,
    "zero-pad": 0.04,
    "srio": -0.008,
    "full-nogate": -0.012,
    "full": -0.011,
}
STAGE_TOKENS = 3_000_000


def row(variant: str, seed: int = 0, stage: int = 2, offset: float | None = None) -> dict:
    """One finished row; `offset` overrides OFFSETS."""
    offset = OFFSETS.get(variant, 0.0) if offset is None else offset
    scratch = variant.startswith("scratch")
    noise = np.random.default_rng([seed, zlib.crc32(variant.encode())]).normal(0, 0.002)
    final = 2.92 + 0.004 * seed + offset + noise
    tokens = STAGE_TOKENS * (2 if variant == "scratch-flops" else 1)
    start = 7.6 if scratch else 3.23 + 4 * abs(offset)
    at = np.linspace(0, tokens, 13)
    curve = final + (start - final) * np.exp(-6 * at / tokens) * (1 - at / tokens)
    parent = {"run_id": f"parent-s{seed}", "hash": f"{seed:064x}", "val_loss": 3.09 + 0.004 * seed}
    parent |= {"train_loss": 3.05, "tokens": 7_000_000, "flops": 1e13}
    return {
        "schema": 1, "preset": "tiny", "variant": variant, "seed": seed, "stage": stage,
        "run_id": f"{variant}-s{seed}-g{stage}", "status": "done", "reason": None,
        "command": "python run_ablations.py --local --preset tiny",
        "commit": "0" * 40, "dirty": False,
        "config": {
            "seed": seed, "data_seed": seed, "out": f"runs/{variant}-s{seed}", "lr": 1e-3,
            "batch_size": 32, "eval_tokens": 65536, "last_tokens": 300_000,
            "growth": {"operator": variant},
        },
        "config_hash": f"{variant}{seed}", "seeds": {"init": seed, "data": seed, "growth": seed},
        "manifest_hash": "ab" * 32,
        "corpus": {"source": "speeches", "tokenizer": "bpe:2048",
                   "train_tokens": 2_000_000, "val_tokens": 100_000},
        "lineage": [] if scratch else [{"stage": 1, "d_model": 64}],
        "parent": None if scratch else parent,
        "params": 600_000, "d_model": 96,
        "metrics": {"train_loss": final - 0.05, "val_loss": final, "val_loss_start": start,
                    "spike": None if scratch else start - parent["val_loss"]},
        "tokens": {"parent": 0 if scratch else 7_000_000, "operator": 0, "stage": tokens,
                   "total": tokens + (0 if scratch else 7_000_000)},
        "flops": {"parent": 0.0 if scratch else 1e13, "operator": 0.0, "stage": 1.1e13,
                  "total": 1.1e13 + (0.0 if scratch else 1e13)},
        "wall_s": 40.0, "tokens_per_s": 75_000.0,
        "hardware": {"cpu": "test", "threads": 1, "dtype": "float32"},
        "versions": {"python": "3", "torch": "2", "numpy": "2"},
        "curve": {"tokens": at[1:].tolist(), "train": (curve[1:] - 0.05).tolist(),
                  "val_tokens": at.tolist(), "val": curve.tolist()},
        "report": None, "finished": "2026-01-01T00:00:00Z",
    }  # fmt: skip


def grid(variants=tuple(OFFSETS), seeds=range(3), stage: int = 2) -> list[dict]:
    """A full variants x seeds grid of finished rows."""
    return [row(variant, seed, stage) for variant in variants for seed in seeds]


def diverged(base: dict, at: int = 4) -> dict:
    """The row as a diverged run leaves it: curve cut at evaluation `at`, no final numbers."""
    bad = copy.deepcopy(base)
    bad |= {"status": "diverged", "reason": "loss is nan at step 120"}
    bad["metrics"] = {"train_loss": None, "val_loss": None, "val_loss_start": 3.2, "spike": 0.1}
    bad["curve"] = {name: values[:at] for name, values in bad["curve"].items()}
    return bad


def write(rows: list[dict], folder: Path) -> Path:
    """Write rows as files below folder/rows; returns the folder."""
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    for one in rows:
        name = f"{one['variant']}-s{one['seed']}-g{one['stage']}.json"
        (folder / "rows" / name).write_text(json.dumps(one))
    return folder
