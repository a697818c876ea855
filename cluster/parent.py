"""A parent that nobody trains here: a pretrained model as the start of every run of a grid.

`run_ablations.py --parent FOLDER` takes a checkpoint of ours, a converted one or a Hugging Face
folder. It is brought into OUT/parent once: float32 weights, the grid's context, its loss on the
grid's validation tokens, and a lineage entry that names source, sha256 and licence, so that every
row grown from it does.
"""

from dataclasses import replace
from pathlib import Path

import torch

import checkpoint
from data.shards import Corpus
from errors import UserError
from grid import Preset
from models import convert
from models.gpt import GPT, GPTConfig
from training.processes import find_place, on_device


def read_parent(path: Path, context: int) -> tuple[dict, GPTConfig, dict]:
    """(weights by our names, config, lineage entry without its loss) of a folder.

    context: tokens per sequence of the grid. RoPE has no table of positions, so any is right; a
    model with learned positions keeps its own. Raises UserError for anything that is no model of
    ours, GPT-2 or Llama.
    """
    if (path / "final" / checkpoint.STATE).is_file():
        path = path / "final"  # a run folder
    if (path / checkpoint.STATE).is_file():
        ckpt = checkpoint.load(path)
        weights, cfg, meta = ckpt.model, checkpoint.model_config(ckpt), ckpt.meta
    else:
        weights, meta = convert.read_folder(path)
        cfg = GPTConfig(**meta["config"])
    weights = {name: w.float() for name, w in weights.items()}
    if cfg.position == "rope":
        cfg = replace(cfg, block_size=context)
    digest = checkpoint.model_hash(weights)
    ours = {"name": path.resolve().name, "sha256": digest, "licence": "not stated"}
    entry = {
        "stage": 0,
        "run_id": "parent",
        "hash": digest,
        "d_model": cfg.d_model,
        "tokens": meta.get("tokens_total", 0),
        "flops": meta.get("flops_total", 0),
        "growth": None,
        "source": meta.get("source") or ours,
    }
    return weights, cfg, entry


def bring_parent(path: Path, out: Path, preset: Preset, data: Path, dtype: str) -> None:
    """Write OUT/parent from `path`, its loss measured on the grid's validation tokens of `data`.

    Raises UserError where OUT/parent holds another model, or one measured on another corpus.
    """
    corpus, place = Corpus(data), out / "parent"
    weights, cfg, entry = read_parent(path, preset.model.block_size)
    if place.exists():
        old = checkpoint.read_state(place)["meta"]["lineage"][-1]
        if (old["hash"], old["manifest_hash"]) != (entry["hash"], corpus.manifest_hash):
            raise UserError(
                f"{place} was made from {old['source']['name']}, or for another corpus, not from "
                f"{path}; choose another --out"
            )
        return
    entry |= {
        "val_loss": mean_loss(weights, cfg, corpus, preset, dtype),
        "train_loss": None,
        "manifest_hash": corpus.manifest_hash,
    }
    meta = {"config": cfg.as_dict(), "step": 0, "lineage": [entry]}
    meta |= {"tokens_total": entry["tokens"], "flops_total": entry["flops"]}
    checkpoint.save(place, weights, meta)


@torch.no_grad()
def mean_loss(weights: dict, cfg: GPTConfig, corpus: Corpus, preset: Preset, dtype: str) -> float:
    """Mean loss (nats per token) on the validation tokens that every run is evaluated on."""
    place, total, n = find_place(dtype=dtype), 0.0, 0
    model = GPT(cfg, seed=None)
    checkpoint.load_weights(model, weights, "parent")
    model.to(place.device).eval()
    for batch in corpus.eval_batches(preset.eval_tokens, 1, cfg.block_size):
        x_bt, y_bt = on_device(batch, place)
        with place.autocast():
            total += model(x_bt, y_bt).double().item() * y_bt.numel()
        n += y_bt.numel()
    return total / n
