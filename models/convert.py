"""Our checkpoints to Hugging Face GPT-2 and Llama folders and back; logits stay equal.

    python -m models.convert to-gpt2 CHECKPOINT OUT [--tokenizer PLACE]     # or to-llama
    python -m models.convert from-gpt2 FOLDER OUT
    python -m models.convert from-llama FOLDER OUT [--context 256]          # Mistral too
    python -m models.convert from-nanogpt ckpt.pt OUT [--vocab-size 50257]
    python -m models.convert from-gguf FILE OUT     # a quantized file as a float32 folder, to grow

PLACE: the tokenizer.json to put beside the weights, or a folder with one: the corpus trained on, or
the model that the checkpoint is from, whose chat template, generation settings, licence and card
then travel too.
"""

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from errors import UserError, exit_on_user_error, read_command_line


@dataclass(frozen=True)
class ConvertConfig:
    """Convert between our checkpoints and Hugging Face GPT-2 or Llama folders or nanoGPT's."""

    direction: tyro.conf.Positional[
        Literal["to-gpt2", "from-gpt2", "to-llama", "from-llama", "from-nanogpt", "from-gguf"]
    ]
    source: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]
    # to-*: the tokenizer.json to put beside the weights, or a folder with one (see above)
    tokenizer: Path | None = None
    context: int = 0  # from-llama: positions of ours, the length it trains on; 0: the folder's
    vocab_size: int = 0  # from-nanogpt: rows to keep of a padded vocabulary; 0: all
    force: bool = False


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(ConvertConfig, __doc__))

import torch
from safetensors import safe_open

import checkpoint
import files
from data.tokenizers import EOT_TEXT, bpe, read_definition
from models import hf_folder, travels
from models.gpt import GPT
from models.gpt2 import from_gpt2, from_nanogpt, to_gpt2
from models.llama import from_llama, to_llama

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(cfg: ConvertConfig) -> None:
    """Write `cfg.out` and say what it is; refuses an existing folder without force."""
    if cfg.direction in ("to-gpt2", "to-llama"):
        convert_to(cfg, to_gpt2 if cfg.direction == "to-gpt2" else to_llama)
    elif cfg.direction == "from-gguf":
        dequantize(cfg.source, cfg.out, cfg.force)
    elif cfg.direction == "from-nanogpt":
        convert_nanogpt(cfg)
    else:
        weights, meta = read_folder(cfg.source, cfg.direction.removeprefix("from-"), cfg.context)
        checkpoint.save(cfg.out, weights, meta, force=cfg.force)
    print_written(cfg.out)


def print_written(out: Path) -> None:
    """What lies in `out` now, and what one does with it."""
    stored, n = list(out.glob("*.safetensors")), 0
    for file in stored:
        with safe_open(file, "pt") as tensors:
            n += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    ours = (out / checkpoint.STATE).is_file()
    kind = "a checkpoint of ours" if ours else "a Hugging Face folder"
    beside = "" if ours or (out / "tokenizer.json").is_file() else ", no tokenizer"
    size = sum(file.stat().st_size for file in stored)
    print(f"wrote {out}: {kind}, {n:,} parameters, {size / 1e6:,.1f} MB{beside}")
    load = f'AutoModelForCausalLM.from_pretrained("{out}")'
    train = f"python train.py --init {out} --data CORPUS --out runs/NAME"
    print(f"next: {train if ours else load}, or python grow.py {out} --out WIDE --factor 2")


def convert_to(cfg: ConvertConfig, to) -> None:
    ckpt = checkpoint.load(cfg.source)
    weights, raw = to(ckpt.model, checkpoint.model_config(ckpt))
    dtype = next(iter(weights.values())).dtype
    raw["dtype"] = str(dtype).removeprefix("torch.")
    with hf_folder.new_folder(cfg.out, cfg.force) as tmp:
        if cfg.tokenizer:
            raw |= bring_tokenizer(cfg.tokenizer, tmp, raw)
        sizes = {name: tensor.nbytes for name, tensor in weights.items()}
        hf_folder.write_weights(tmp, sizes, weights.get, doing="converting")
        files.write_json(tmp / "config.json", raw)


def bring_tokenizer(place: Path, out: Path, raw: dict) -> dict:
    """Put the tokenizer at `place` into `out`, and all that may travel where that is a model's
    folder; the ids of its special pieces for config.json, which is `raw` so far."""
    file = place / "tokenizer.json" if place.is_dir() else place
    eot = end_of_text(file, raw["vocab_size"])
    if place.is_dir() and (place / "config.json").is_file():
        theirs = hf_folder.read_config(place)
        width = theirs.get("hidden_size") or theirs.get("n_embd")
        widths = (width, raw.get("hidden_size") or raw.get("n_embd"))
        travels.copy(place, out, widths, travels.trained_note(place.resolve().name))
        return {key: theirs[key] for key in SPECIAL if key in theirs}
    shutil.copyfile(file, out / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {} if eot is None else {"bos_token": EOT_TEXT, "eos_token": EOT_TEXT}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return {} if eot is None else {"bos_token_id": eot, "eos_token_id": eot}


def end_of_text(tokenizer: Path, vocab_size: int) -> int | None:
    """The id that ends a document in this tokenizer.json; None where it has no such piece."""
    known = bpe(read_definition(tokenizer))
    if known.vocab_size > vocab_size:
        raise UserError(
            f"{tokenizer} has {known.vocab_size:,} entries, but the model's vocabulary is "
            f"{vocab_size:,}; pass the tokenizer that the model was trained with"
        )
    return known.eot


def convert_nanogpt(cfg: ConvertConfig) -> None:
    weights, ours = from_nanogpt(hf_folder.load_pickle(cfg.source), cfg.vocab_size)
    with torch.device("meta"):
        checkpoint.check_weights(GPT(ours, seed=None).state_dict(), weights, str(cfg.source))
    digest = checkpoint.hash_file(cfg.source)
    source = {"name": cfg.source.name, "sha256": digest, "licence": "not stated"}
    meta = {"config": ours.as_dict(), "step": 0, "source": source}
    checkpoint.save(cfg.out, weights, meta, force=cfg.force)


def dequantize(file: Path, out: Path, force: bool = False) -> None:
    """Write a GGUF file's model as a float32 Hugging Face folder, with its tokenizer and licence.

    The values are those that the quantized model computes with. Raises UserError without the
    packages that transformers needs for it, and for files that it cannot read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": file.name, "local_files_only": True}
    try:
        from gguf import GGUFReader

        fields = GGUFReader(file).fields
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except ImportError as error:
        raise UserError(
            f"reading GGUF needs more packages ({error}); run: pip install --no-deps gguf==0.19.0 "
            f"accelerate==1.15.0 psutil==7.2.2"
        ) from None
    except Exception as error:  # noqa: BLE001 - any of transformers' own complaints
        raise UserError(f"{file} cannot be read as a GGUF model ({error})") from None
    del model.config.quantization_config  # the values are floats now
    licence = fields["general.license"].contents() if "general.license" in fields else ""
    with hf_folder.new_folder(out, force) as tmp:
        plain = type(model)(model.config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        header = f"---\nlicense: {licence}\n---\n" if licence else ""
        (tmp / "README.md").write_text(f"{header}Dequantized from {file.name}.\n")


def read_folder(path: Path, kind: str = "", context: int = 0) -> tuple[dict, dict]:
    """(weights by our names, meta of our checkpoint) of a Hugging Face folder.

    kind: gpt2 or llama, refused if it is the other; empty takes both. Raises UserError for every
    other family, and for variants that models/gpt.py does not have.
    """
    source = hf_folder.open_folder(path)
    found = source.raw["model_type"]
    family = "llama" if found == "mistral" else found
    if family not in ("gpt2", "llama") or kind not in ("", family):
        raise UserError(f"{path} is a {found}, not a {kind or 'gpt2 or llama'}")
    if not 0 <= context <= 1 << 20:
        raise UserError(f"--context is {context}; it must be in 0 (the folder's) to {1 << 20}")
    if context and family == "gpt2":
        raise UserError("--context is for Llama; a GPT-2 has a table of positions, which stays")
    weights = {name: source.stored[name] for name in source.stored}
    if family == "gpt2":
        weights, ours = from_gpt2(weights, source.config)
    else:
        weights, ours = from_llama(weights, source.config, context)
    with torch.device("meta"):
        checkpoint.check_weights(GPT(ours, seed=None).state_dict(), weights, str(path))
    return weights, {"config": ours.as_dict(), "step": 0, "source": describe(source)}


def describe(source: hf_folder.Folder) -> dict:
    """Where converted weights come from: folder name, sha256 of its weights, licence."""
    files = sorted({file for file, _ in source.stored.files.values()})
    hashes = {file: checkpoint.hash_file(source.path / file) for file in files}
    only = next(iter(hashes.values())) if len(hashes) == 1 else checkpoint.hash_json(hashes)
    return {"name": source.path.resolve().name, "sha256": only, "licence": licence_of(source.path)}


def licence_of(folder: Path) -> str:
    """What the folder's model card says (its `license:` line), else its LICENSE file's first line;
    "not stated" without either."""
    card, file = folder / "README.md", folder / "LICENSE"
    text = card.read_text(errors="replace")[:20_000] if card.is_file() else ""
    if found := re.search(r"\A---\n(?:.*\n)*?license:\s*(\S+)", text):
        return found[1]
    lines = file.read_text(errors="replace")[:2_000].split("\n") if file.is_file() else []
    return next((line.strip() for line in lines if line.strip()), "not stated")[:100]


def main() -> None:
    convert(read_command_line(ConvertConfig, __doc__))


if __name__ == "__main__":
    exit_on_user_error(main)
