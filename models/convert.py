"""Our checkpoints to Hugging Face GPT-2 folders and back; logits stay equal.

python -m models.convert to-gpt2 CHECKPOINT OUT [--tokenizer tokenizer.json]
python -m models.convert from-gpt2 FOLDER OUT
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

import checkpoint
from errors import UserError, exit_on_user_error, read_command_line
from models import hf_folder
from models.gpt import GPT
from models.hf import from_gpt2, to_gpt2


@dataclass(frozen=True)
class ConvertConfig:
    """Convert between our checkpoints and Hugging Face GPT-2 folders."""

    direction: tyro.conf.Positional[str]  # to-gpt2 | from-gpt2
    source: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]
    tokenizer: Path | None = None  # to-gpt2: a tokenizer.json to put beside the weights
    force: bool = False


def convert(cfg: ConvertConfig) -> None:
    """Write `cfg.out`; refuses an existing folder without force."""
    if cfg.direction not in ("to-gpt2", "from-gpt2"):
        raise UserError(f"direction is {cfg.direction!r}; choose to-gpt2 or from-gpt2")
    if cfg.direction == "to-gpt2":
        ckpt = checkpoint.load(cfg.source)
        weights, raw = to_gpt2(ckpt.model, checkpoint.model_config(ckpt))
        dtype = next(iter(weights.values())).dtype
        raw["dtype"] = str(dtype).removeprefix("torch.")
        with hf_folder.new_folder(cfg.out, cfg.force) as tmp:
            hf_folder.write_weights(tmp, {n: t.nbytes for n, t in weights.items()}, weights.get)
            checkpoint.write_json(tmp / "config.json", raw)
            if cfg.tokenizer:
                shutil.copyfile(cfg.tokenizer, tmp / "tokenizer.json")
                settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
                (tmp / "tokenizer_config.json").write_text(json.dumps(settings))
        return
    source = hf_folder.open_folder(cfg.source)
    if source.raw["model_type"] != "gpt2":
        raise UserError(f"{cfg.source} is a {source.raw['model_type']}, not a gpt2")
    weights, ours = from_gpt2({n: source.stored[n] for n in source.stored}, source.config)
    with torch.device("meta"):
        checkpoint.check_weights(GPT(ours, seed=None).state_dict(), weights, str(cfg.source))
    checkpoint.save(cfg.out, weights, {"config": asdict(ours), "step": 0}, force=cfg.force)


def main() -> None:
    convert(read_command_line(ConvertConfig, __doc__))


if __name__ == "__main__":
    exit_on_user_error(main)
