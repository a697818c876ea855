"""Checkpoints: one folder of safetensors and JSON, written whole or not at all.

    model.safetensors      weights by plain name; a tied head is stored once, as wte.weight
    optimizer.safetensors  Adam moments by name: "<parameter>/exp_avg", "<parameter>/exp_avg_sq"
    state.json             format, version, size and sha256 of each file, and `meta` (readable)

A folder is written beside its place and renamed, every file and folder fsynced, so a kill at any
moment leaves the old checkpoint or the new one. Reading trusts nothing: sizes and hashes come
first, safetensors after; nothing is ever unpickled. Every refusal is a UserError.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

import files
from errors import UserError
from models.gpt import GPT, GPTConfig

FORMAT, VERSION = "gpt-growth-checkpoint", 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
MAX_HEADER = 16 << 20  # bytes of a safetensors header; a 1,000-layer model needs about 2 MB
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: tensors by name, meta, sha256 of model.safetensors, where it lies."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] | None
    meta: dict
    hash: str
    folder: Path
    optimizer_hash: str | None = None


def save(
    folder: Path,
    model: dict[str, torch.Tensor],
    meta: dict,
    optimizer: dict[str, torch.Tensor] | None = None,
    force: bool = False,
) -> str:
    """Write a checkpoint folder atomically; the sha256 of its weights file.

    Raises UserError where `folder` exists and `force` is not set; OSError as the disk gives it.
    """
    folder = Path(folder)
    if folder.exists() and not force:
        raise UserError(f"{folder} exists; remove it or choose another place for the checkpoint")
    with files.new_folder(folder, replace=force) as tmp:
        parts = {MODEL: write_tensors(tmp / MODEL, model)}
        if optimizer is not None:
            parts[OPTIMIZER] = write_tensors(tmp / OPTIMIZER, optimizer)
        state = {"format": FORMAT, "version": VERSION, "files": parts}
        state |= {"meta_sha256": hash_json(meta), "meta": meta}
        with files.naming(tmp / STATE):
            (tmp / STATE).write_text(json.dumps(state, indent=1, allow_nan=False))
    return parts[MODEL]["sha256"]


def load(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint; whatever is wrong with it is a UserError that names it."""
    folder = Path(folder)
    state = read_state(folder)
    parts = {name: read_tensors(folder / name, entry) for name, entry in state["files"].items()}
    if OPTIMIZER not in parts and (folder / OPTIMIZER).exists():
        raise UserError(f"{folder / STATE} was altered: it does not list {OPTIMIZER}")
    hashes = {name: entry["sha256"] for name, entry in state["files"].items()}
    return Checkpoint(
        parts[MODEL],
        parts.get(OPTIMIZER),
        state["meta"],
        hashes[MODEL],
        folder,
        hashes.get(OPTIMIZER),
    )


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest sound `step_XXXXXXXX` of a run, or None. A damaged one is skipped, and said so."""
    for folder in steps(run_dir):
        try:
            return load(folder)
        except UserError as error:
            print(f"skipping {folder.name}: {error}", file=sys.stderr)
    return None


def steps(run_dir: Path) -> list[Path]:
    """The step folders of a run, newest first."""
    found = [p for p in Path(run_dir).glob("step_*") if STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def prune(run_dir: Path, keep: int = 2) -> None:
    """Delete all but the newest `keep` step folders, and what killed writers left behind."""
    for folder in steps(run_dir)[keep:]:
        files.discard(folder)
    files.sweep(run_dir, mine="*")


def model_config(ckpt: Checkpoint) -> GPTConfig:
    """The GPTConfig of a checkpoint; UserError where it is not one or disagrees with the weights.

    The sizes are compared with tensors that really exist, so an absurd config cannot allocate.
    """
    raw, known = ckpt.meta.get("config"), {f.name for f in fields(GPTConfig)}
    if not isinstance(raw, dict) or set(raw) - known or not known & set(raw):
        raise UserError(f"{ckpt.folder}: its config is no GPT config of this project")
    try:
        cfg = GPTConfig(**raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{ckpt.folder}: its config is no GPT config ({error})") from None
    layers = len({name.split(".")[1] for name in ckpt.model if name.startswith("h.")})
    found = (*getattr(ckpt.model.get("wte.weight"), "shape", ()), layers)
    if found != (cfg.vocab_size, cfg.d_model, cfg.n_layer) or cfg.block_size > 1 << 20:
        raise UserError(
            f"{ckpt.folder}: config says vocab_size, d_model, n_layer = {cfg.vocab_size}, "
            f"{cfg.d_model}, {cfg.n_layer} (context {cfg.block_size}) but the weights have {found}"
        )
    with torch.device("meta"):
        check_weights(GPT(cfg, seed=None).state_dict(), ckpt.model, str(ckpt.folder))
    return cfg


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor], source: str) -> None:
    """Copy tensors into a model, every name exactly once and of its shape; else a UserError."""
    check_weights(model.state_dict(), tensors, source)
    model.load_state_dict(tensors)


def check_weights(own: dict, tensors: dict, source: str) -> None:
    """Names and shapes of `tensors` are those of a model's own state_dict; else a UserError."""
    wrong = sorted(set(own) ^ set(tensors))
    wrong += [k for k in own if k in tensors and own[k].shape != tensors[k].shape]
    if wrong:
        raise UserError(
            f"{source}: {len(wrong)} weights are missing, unknown or of another shape "
            f"(first: {wrong[0]}); it belongs to another model config"
        )


# ---- writing


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors takes them, which then writes the same bytes for the same tensors. Wrapper
    prefixes never reach the disk."""
    return {plain_name(k): own_storage(v) for k, v in tensors.items()}


def model_hash(tensors: dict[str, torch.Tensor]) -> str:
    """The sha256 that save() will give these weights."""
    return hashlib.sha256(safetensors.torch.save(plain(tensors))).hexdigest()


def plain_name(name: str) -> str:
    """A parameter's own name, without what torch.compile and DDP wrap around it."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict:
    """Write one file of a new folder, without a copy of the tensors in memory; its entry {"bytes",
    "sha256"} for state.json."""
    with files.naming(path):
        safetensors.torch.save_file(plain(tensors), path)
    return {"bytes": path.stat().st_size, "sha256": hash_file(path)}


def hash_json(value: object) -> str:
    """sha256 of canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading


def read_state(folder: Path) -> dict:
    """state.json, checked for format, version, structure and its own hash."""
    if not folder.is_dir():
        raise UserError(f"no checkpoint at {folder}: it must be a folder holding {STATE}")
    if not (folder / STATE).is_file():
        raise UserError(f"{folder} is not a checkpoint of this project: it has no {STATE}")
    state = files.read_json(folder / STATE)
    if state.get("format") != FORMAT:
        raise UserError(
            f"{folder} is not a checkpoint of this project: its format is {state.get('format')!r}, "
            f"needed is {FORMAT!r}"
        )
    if state.get("version") != VERSION:
        raise UserError(
            f"{folder} has checkpoint version {state.get('version')!r}; this code reads {VERSION}"
        )
    if not (isinstance(state.get("meta"), dict) and are_files(state.get("files"))):
        raise UserError(f"{folder / STATE} lacks meta or a proper list of files; it is damaged")
    if state.get("meta_sha256") != hash_json(state["meta"]):
        raise UserError(f"{folder / STATE} was altered: its meta does not have the stated sha256")
    return state


def are_files(parts: object) -> bool:
    """A map of our two file names (no other path is ever opened) to {"bytes", "sha256"}."""
    return (
        isinstance(parts, dict)
        and {MODEL} <= set(parts) <= {MODEL, OPTIMIZER}
        and all(
            isinstance(entry, dict)
            and type(entry.get("bytes")) is int
            and isinstance(entry.get("sha256"), str)
            for entry in parts.values()
        )
    )


def read_tensors(path: Path, entry: dict) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file whose size and sha256 are as state.json says."""
    remedy = f"delete {path.parent} and run the command again that made it"
    if not path.is_file():
        raise UserError(f"{path} is missing, the checkpoint is incomplete; {remedy}")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(
            f"{path} is truncated: it has {size} bytes, {entry['bytes']} were written; {remedy}"
        )
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if size < 8 or header > min(size - 8, MAX_HEADER):
            raise UserError(f"{path} claims a header of {header} bytes in a file of {size}")
    if hash_file(path) != entry["sha256"]:
        raise UserError(f"{path} was altered: its sha256 is not the one written; {remedy}")
    try:
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise UserError(f"{path} is no sound safetensors file ({type(e).__name__}: {e})") from None
    check_tensors(path, tensors.items())
    return tensors


def check_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.dtype not in FLOATS or plain_name(name) != name:
            raise UserError(f"{path}: {name} ({tensor.dtype}) is no weight or moment of ours")
