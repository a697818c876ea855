"""How long grow.py takes on GPT-2 124M and how much memory: results/grow_gpt2.md and .json.

    python -m bench.grow_gpt2

A randomly initialised GPT-2 of the small size is written to a temporary folder and grown by the
command a user would type, twice at whole process cost: x2 (lossless) and x1.5 (pad). Each result is
loaded by transformers and its logits compared with the parent's. The memory bound is 1.25 times the
bytes of both models; torch and transformers themselves take part of it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from files import write_json, write_text  # noqa: E402
from provenance import provenance  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CASES = {"x2 lossless": ["--factor", "2"], "x1.5 pad": ["--factor", "1.5", "--method", "pad"]}


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        source, x_bt = Path(place) / "gpt2", torch.arange(64)[None] * 700
        GPT2LMHeadModel(GPT2Config()).save_pretrained(source)
        before = logits(source, x_bt)
        rows = [measure(name, options, source, before, x_bt) for name, options in CASES.items()]
    report = {"command": "python -m bench.grow_gpt2", "rows": rows, **provenance()}
    write_json(ROOT / "results" / "grow_gpt2.json", report)
    write_text(ROOT / "results" / "grow_gpt2.md", markdown(report))
    print(markdown(report))


def measure(name: str, options: list[str], source: Path, before, x_bt) -> dict:
    out = source.with_name(name.replace(" ", "-"))
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "grow.py"), str(source), "--out", str(out), *options]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    card = json.loads((out / "growth_report.json").read_text())
    gap = (logits(out, x_bt) - before).abs().max().item() / before.std().item()
    both = sum(weights_bytes(folder) for folder in (source, out))
    return {
        "name": name,
        "grow_s": card["wall_s"],
        "process_s": seconds,
        "peak_rss_mb": card["peak_rss_mb"],
        "limit_mb": 1.25 * both / 1e6,
        "max_rel_dlogit": gap,
    }


def logits(folder: Path, x_bt: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(x_bt).logits


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def markdown(report: dict) -> str:
    where = report["hardware"].get("cpu", "GPU")
    lines = [
        "# Growing GPT-2 124M",
        "",
        f"`{report['command']}` on {where}, {report['hardware']['threads']} threads; float32.",
        "",
        "| growth | written in s | command in s | peak MB | limit MB | max Δlogit / std |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for r in report["rows"]:
        lines.append(
            f"| {r['name']} | {r['grow_s']:.1f} | {r['process_s']:.1f} | {r['peak_rss_mb']:.0f} "
            f"| {r['limit_mb']:.0f} | {r['max_rel_dlogit']:.1e} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
