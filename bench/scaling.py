"""How step and growth time scale with width, and what larger models would take: results/scaling.md.

    python -m bench.scaling --threads 2

One sequence of the paper's model at each width, through train.py's step, and growth x1.5 with the
full recipe, both measured here. The hours below them are arithmetic: tokens x FLOPs per token over
GPUs x an assumed FLOP rate; memory is 16 bytes a parameter (float32 weights, gradients and two
moments) beside activations.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from errors import UserError, exit_on_user_error, read_command_line
from settings import Range, check


@dataclass(frozen=True)
class Args:
    threads: Annotated[int, Range(1, 1024)] = 1
    widths: str = "64,128,256,384,512,768"
    """comma-separated, multiples of 64"""


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(Args, __doc__))

import numpy as np

import files
from bench.step import open_trainer, seconds
from grid import PRESETS, RECIPE
from growth.apply import grow
from growth.plan import GrowConfig
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from provenance import provenance

RESULTS = Path(__file__).resolve().parents[1] / "results" / "scaling.json"
PAPER = PRESETS["paper"]
GPU_FLOPS = 0.4 * 989e12  # an assumption: 40 % of an H100's dense bfloat16 peak
GPU_BYTES = 80e9
LLAMA = {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "position": "rope"}
LLAMA |= {"block_size": 2048, "head_dim": 128, "vocab_size": 32000, "tied": False}
# name -> (the grown model, tokens per parameter, runs)
PLANNED = {
    "preset paper, its wide runs": (PAPER.config(1), 20, len(PAPER.variants) * len(PAPER.seeds)),
    "0.5B grown to 1.1B": (
        GPTConfig(**LLAMA, n_layer=22, n_head=16, n_kv_head=4, d_model=2048, d_ff=5632), 20, 1
    ),
    "3B grown to 6.7B": (
        GPTConfig(**LLAMA, n_layer=32, n_head=32, d_model=4096, d_ff=11008), 20, 1
    ),
}  # fmt: skip


def main() -> None:
    args = read_command_line(Args, __doc__)
    check(args)
    if not all(w.isdigit() and int(w) % 64 == 0 and int(w) for w in args.widths.split(",")):
        raise UserError(f"--widths is {args.widths}; give multiples of 64, e.g. 64,128,256")
    rows = [measure(int(width), args.threads) for width in args.widths.split(",")]
    command = f"python -m bench.scaling --threads {args.threads} --widths {args.widths}"
    report = {"command": command, "rows": rows, "planned": planned(), **provenance()}
    files.write_json(RESULTS, report)
    files.write_text(RESULTS.with_suffix(".md"), markdown(report))
    print(markdown(report))


def measure(d_model: int, threads: int) -> dict:
    """Parameters, seconds of a step of one sequence and of growth x1.5 (weights in memory)."""
    cfg = replace(PAPER.model, d_model=d_model, n_head=d_model // 64, d_ff=4 * d_model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = open_trainer(Path(folder), model=cfg, batch_size=1, threads=threads)
        step_s = float(np.median(seconds(trainer.step)))
    weights = dict(GPT(cfg, 0).state_dict())
    began = time.perf_counter()
    grow(weights, cfg, -(-d_model * 3 // 128) * 64, GrowConfig("srio", **RECIPE))
    growth_s = time.perf_counter() - began
    return {"d_model": d_model, "params": count_parameters(cfg), "step_s": step_s,
            "flops": cfg.block_size * flops_per_token(cfg), "growth_s": growth_s}  # fmt: skip


def planned() -> list[dict]:
    """Hours on one GPU and GB of training state of each model in PLANNED."""
    rows = []
    for name, (cfg, per_parameter, runs) in PLANNED.items():
        params = count_parameters(cfg)
        flops = runs * per_parameter * params * flops_per_token(cfg)
        state = 16 * params
        rows.append({"name": name, "params": params, "runs": runs, "flops": flops,
                     "gpu_hours": flops / GPU_FLOPS / 3600, "state_gb": state / 1e9,
                     "gpus_for_state": -(-state // int(0.7 * GPU_BYTES))})  # fmt: skip
    return rows


def slope(rows: list[dict], key: str) -> float:
    """The exponent of `key` in d_model: a straight line through the logarithms."""
    d, values = ([np.log(row[k]) for row in rows] for k in ("d_model", key))
    return float(np.polyfit(d, values, 1)[0])


def markdown(report: dict) -> str:
    rows, where = report["rows"], report["hardware"].get("cpu") or report["hardware"].get("gpu")
    lines = ["# Scaling", "", f"`{report['command']}` on {where}, torch "
             f"{report['versions']['torch']}; L 14, V 50257, one sequence of 256 tokens a step.",
             "", "| d | parameters | step s | GFLOP/s | growth × 1.5 s |",
             "|--:|--:|--:|--:|--:|"]  # fmt: skip
    lines += [
        f"| {r['d_model']} | {r['params']:,} | {r['step_s']:.3f} "
        f"| {r['flops'] / r['step_s'] / 1e9:.0f} | {r['growth_s']:.2f} |"
        for r in rows
    ]
    if len(rows) > 1:
        slopes = ", ".join(f"{key[:-2]} time d^{slope(rows, key):.2f}"
                           for key in ("step_s", "growth_s"))  # fmt: skip
        lines += ["", f"Log-log slopes: {slopes}, FLOPs d^{slope(rows, 'flops'):.2f}."]
    lines += ["", "On paper, 20 tokens per parameter of the grown model, at an assumed "
              f"{GPU_FLOPS / 1e12:.0f} TFLOP/s per GPU (40 % of an H100):", "",
              "| what | parameters | FLOPs | GPU hours | hours on 8 | training state GB |",
              "|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    lines += [
        f"| {p['name']} | {p['params']:,} | {p['flops']:.3g} | {p['gpu_hours']:,.0f} "
        f"| {p['gpu_hours'] / 8:,.1f} | {p['state_gb']:.1f} |"
        for p in report["planned"]
    ]
    last = report["planned"][-1]
    lines += ["", f"A replica per GPU (DDP, as train.py has it) ends where the state fills it "
              f"beside activations: at about {0.7 * GPU_BYTES / 16 / 1e9:.1f} B parameters on "
              f"{GPU_BYTES / 1e9:.0f} GB. FSDP2 (`fully_shard` per block) would then divide it: "
              f"{last['name']} needs at least {last['gpus_for_state']} GPUs. Growth itself holds "
              "one matrix of the wide model at a time."]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    exit_on_user_error(main)
