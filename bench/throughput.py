"""Tokens per second of train.py's step beside its peers: results/throughput.json, .md, a picture.

    python -m bench.throughput --shape tiny --threads 1 --nanogpt ../nanoGPT --hf

One process, one set of shapes, batches, AdamW settings and gradient clipping for all; the
contestants take turns, and a number is the median over the turns. nanoGPT's model comes from a
clone (`--nanogpt`: the folder with model.py), transformers' GPT-2 from the installed package; both
run as their own training loops run them on a CPU, uncompiled, in float32 and in bfloat16 autocast,
and the ratio is to the faster. Memory is measured in a process per contestant. The last line is a
JSON object.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from errors import UserError, exit_on_user_error, read_command_line
from settings import Range, check


@dataclass(frozen=True)
class Args:
    shape: Literal["tiny", "d256", "d384", "d768"] = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of our step; a peer runs in both"""
    threads: Annotated[int, Range(1, 1024)] = 1
    batch_size: Annotated[int, Range(0, 10**6)] = 0
    """sequences per step; 0: 16 at tiny, else 4"""
    nanogpt: Path | None = None
    """a clone of nanoGPT, to compare with"""
    hf: bool = False
    """compare with transformers' GPT-2"""
    turns: Annotated[int, Range(1, 1000)] = 10
    """of every contestant"""
    alone: str = ""
    """run this contestant alone for a few steps, and print its peak memory"""


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(Args, __doc__))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F

import files
from bench.step import Trainer, open_trainer, seconds
from grid import PRESETS, Preset
from models.gpt import GPTConfig, flops_per_token
from provenance import provenance
from training.numerics import matmul_precision
from training.processes import Place, on_device

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "throughput.json"
PAPER = PRESETS["paper"]
# name -> (preset whose protocol it is, model, sequences per step on a CPU)
SHAPES = {"tiny": (PRESETS["tiny"], PRESETS["tiny"].config(1), 16)} | {
    f"d{d}": (PAPER, PAPER.model.widened(d), 4) for d in (256, 384, 768)
}


Step = Callable[[], object]


def main() -> None:
    args = read_command_line(Args, __doc__)
    check(args)
    if args.nanogpt and not (args.nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt is {args.nanogpt}, which has no model.py; give a nanoGPT clone")
    preset, model, size = SHAPES[args.shape]
    size = args.batch_size or size
    with tempfile.TemporaryDirectory() as folder:
        setups = contestants(args, model, size, Path(folder))
        if args.alone:
            return print(json.dumps({"peak_mb": peak_mb(setups[args.alone]())}))
        trainers = {name: make() for name, make in setups.items()}
        steps = {n: t.step if isinstance(t, Trainer) else t for n, t in trainers.items()}
        step_s = in_turns(steps, args.turns)
        ours = min((name for name in steps if name.startswith("ours")), key=step_s.get)
        row = describe(args, preset, trainers[ours], step_s[ours])
        row |= provenance(trainers[ours].setup.place)
    tokens = size * model.block_size
    row["tokens_per_s"] = {name: tokens / s for name, s in step_s.items()}
    row["peak_mb"] = {name: alone(name) for name in steps}
    row |= summary(row["tokens_per_s"], ours)
    row["command"] = f"python -m bench.throughput {shown(args)}"
    rows = keep(row)
    files.write_text(RESULTS.with_suffix(".md"), markdown(rows))
    from figures.throughput import draw

    draw(rows, ROOT / "figures")
    print(markdown(rows))
    print(json.dumps({k: row[k] for k in ("ours", "nanogpt", "hf", "ratio_nanogpt", "ratio_hf")}))


# ---- the contestants


def contestants(args: Args, model: GPTConfig, size: int, folder: Path) -> dict[str, Callable]:
    """name -> what sets it up: a Trainer of ours, or a peer's step."""
    common = {"model": model, "batch_size": size, "threads": args.threads}
    common |= {"device": "auto", "dtype": args.dtype, "eval_tokens": 8 * size * model.block_size}

    def ours(compiled: bool) -> Trainer:
        return open_trainer(folder, compile=compiled, **common)

    found: dict[str, Callable] = {
        f"ours {args.dtype}": lambda: ours(False),
        f"ours {args.dtype} compiled": lambda: ours(True),
    }
    peers = {"nanogpt": nanogpt} if args.nanogpt else {}
    peers |= {"hf": hf} if args.hf else {}
    for name, peer in peers.items():
        for dtype in ("float32", "bfloat16"):
            found[f"{name} {dtype}"] = lambda peer=peer, dtype=dtype: peer_step(
                *peer(args, model), open_trainer(folder, **common), dtype
            )
    return found


def nanogpt(args: Args, cfg: GPTConfig) -> tuple[torch.nn.Module, Callable]:
    spec = importlib.util.spec_from_file_location("nanogpt_model", args.nanogpt / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    sizes = {"block_size": cfg.block_size, "vocab_size": cfg.vocab_size, "n_layer": cfg.n_layer}
    sizes |= {"n_head": cfg.n_head, "n_embd": cfg.d_model, "dropout": 0.0, "bias": cfg.bias}
    return module.GPT(module.GPTConfig(**sizes)), lambda net, x_bt, y_bt: net(x_bt, y_bt)[1]


def hf(args: Args, cfg: GPTConfig) -> tuple[torch.nn.Module, Callable]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": cfg.block_size, "vocab_size": cfg.vocab_size, "n_layer": cfg.n_layer}
    sizes |= {"n_head": cfg.n_head, "n_embd": cfg.d_model, "use_cache": False}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

    def loss(net, x_bt, y_bt):
        logits_btv = net(input_ids=x_bt).logits
        return F.cross_entropy(logits_btv.flatten(0, 1).float(), y_bt.flatten())

    return GPT2LMHeadModel(GPT2Config(**sizes)), loss


def peer_step(model: torch.nn.Module, loss_of: Callable, ours: Trainer, dtype: str) -> Step:
    """One step of a peer's model: our batches, AdamW settings and clipping; its own forward."""
    cfg, run = ours.setup.cfg, ours.setup
    place = replace(run.place, dtype=dtype)
    model.to(place.device)
    betas = (cfg.beta1, cfg.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), cfg.lr, betas, cfg.adam_eps, cfg.weight_decay, fused=True
    )

    def step() -> None:
        batch = run.corpus.batch_at(0, cfg.data_seed, cfg.batch_size, run.block_size)
        x_bt, y_bt = on_device(batch, place)
        with matmul_precision("highest"):  # torch's default, as they leave it
            with place.autocast():
                loss = loss_of(model, x_bt, y_bt)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---- measuring


def in_turns(steps: dict[str, Step], turns: int) -> dict[str, float]:
    """Seconds of a step, each the median over `turns` turns of about a quarter of a second."""
    times = {name: [] for name in steps}
    for step in steps.values():  # compiles, and fills the caches
        step(), step()
    for _ in range(turns):
        for name, step in steps.items():
            began = time.perf_counter()
            while time.perf_counter() - began < 0.25:
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in times.items()}


def describe(args: Args, preset: Preset, trainer: Trainer, step_s: float) -> dict:
    """Our step apart: achieved FLOP/s, the part of the matrix products' peak, of the loader, and
    of evaluation under the shape's preset."""
    cfg, model = trainer.setup.cfg, trainer.setup.model.cfg
    tokens = cfg.batch_size * model.block_size
    achieved = tokens * flops_per_token(model) / step_s
    peak = product_flops(model, tokens, trainer.setup.place)
    eval_s = float(np.median(seconds(trainer.evaluate))) / cfg.eval_tokens
    evaluation = preset.evals * preset.eval_tokens * eval_s
    training = preset.steps(1) * preset.step_tokens * step_s / tokens
    return {
        "shape": args.shape,
        "dtype": args.dtype,
        "threads": args.threads,
        "batch_size": cfg.batch_size,
        "matmul": trainer.setup.place.matmul,
        "achieved_gflops": achieved / 1e9,
        "product_gflops": peak / 1e9,
        "fraction_of_peak": achieved / peak,
        "loader_share": float(np.median(seconds(trainer.load, 0.2))) / step_s,
        "evaluation_share": evaluation / (evaluation + training),
    }


def product_flops(cfg: GPTConfig, tokens: int, place: Place) -> float:
    """FLOP/s of the bare products x W^T, g W and g^T x of a step's weights, in its precision: the
    best of five each, weighted as they occur."""
    d, f = cfg.d_model, cfg.d_ff
    shapes = {(d, d): 4 * cfg.n_layer, (d, f): cfg.n_layer, (f, d): cfg.n_layer}
    shapes[(d, cfg.vocab_size)] = 1
    with matmul_precision(place.matmul):
        spent = sum(
            count * product_seconds(tokens, *shape, place) for shape, count in shapes.items()
        )
    return sum(6 * tokens * n * m * count for (n, m), count in shapes.items()) / spent


def product_seconds(tokens: int, n_in: int, n_out: int, place: Place) -> float:
    """Seconds of the three products of one weight."""
    dtype = torch.bfloat16 if place.dtype == "bfloat16" else torch.float32
    like = {"dtype": dtype, "device": place.device}
    x, g = torch.randn(tokens, n_in, **like), torch.randn(tokens, n_out, **like)
    w = torch.randn(n_out, n_in, **like)
    products = (lambda: F.linear(x, w), lambda: g @ w, lambda: g.T @ x)
    return sum(min(timed(product, place) for _ in range(6)) for product in products)


def timed(action: Callable, place: Place) -> float:
    began = time.perf_counter()
    action()
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    return time.perf_counter() - began


def alone(name: str) -> float:
    """Peak memory in MB of a process that runs nothing but three steps of this contestant."""
    command = [sys.executable, "-m", "bench.throughput", *sys.argv[1:], "--alone", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])["peak_mb"]


def peak_mb(contestant: Trainer | Step) -> float:
    step = contestant.step if isinstance(contestant, Trainer) else contestant
    for _ in range(3):
        step()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be our parent's, if larger
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e6


# ---- the report


def summary(speeds: dict[str, float], ours: str) -> dict:
    """Our tokens/s, each peer's in its faster dtype (None: not run), and the ratios to it."""
    found = {"ours": speeds[ours], "ours_is": ours}
    for peer in ("nanogpt", "hf"):
        fastest = max((v for name, v in speeds.items() if name.startswith(peer)), default=None)
        found |= {peer: fastest, f"ratio_{peer}": fastest and speeds[ours] / fastest}
    return found


def keep(row: dict) -> list[dict]:
    """The rows of results/throughput.json, this one in the place of its predecessor."""
    key = ("shape", "dtype", "threads")
    rows = files.read_json(RESULTS, default={}).get("rows", [])
    rows = [r for r in rows if [r[k] for k in key] != [row[k] for k in key]] + [row]
    rows.sort(key=lambda r: (list(SHAPES).index(r["shape"]), r["dtype"], r["threads"]))
    files.write_json(RESULTS, {"rows": rows})
    return rows


def shown(args: Args) -> str:
    """The options, without where a clone lies on this machine."""
    words = [f"--shape {args.shape} --dtype {args.dtype} --threads {args.threads}"]
    words += ["--nanogpt nanoGPT"] if args.nanogpt else []
    return " ".join(words + (["--hf"] if args.hf else []))


def markdown(rows: list[dict]) -> str:
    lines = [
        "# Training throughput",
        "",
        "tokens/s, medians of one interleaved run per line (`make bench`); a ratio is to the "
        "peer's faster dtype; peak: the bare matrix products' speed at the same shapes.",
        "",
        "| shape | dtype | threads | ours | nanoGPT fp32 / bf16 | transformers fp32 / bf16 "
        "| × nanoGPT | × transformers | GFLOP/s | of peak | loader | evaluation | MB | where |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for r in rows:
        speeds, where = r["tokens_per_s"], r["hardware"].get("cpu") or r["hardware"].get("gpu")
        peers = [
            " / ".join(number(speeds.get(f"{peer} {dtype}")) for dtype in ("float32", "bfloat16"))
            for peer in ("nanogpt", "hf")
        ]
        way = "compiled" if r["ours_is"].endswith("compiled") else "eager"
        way += ", oneDNN" if r["matmul"] == "medium" else ""
        ratios = [f"{x:.2f}" if x else "–" for x in (r["ratio_nanogpt"], r["ratio_hf"])]
        shares = [f"{100 * r[k]:.1f} %" for k in ("loader_share", "evaluation_share")]
        lines.append(
            f"| {r['shape']} | {r['dtype']} | {r['threads']} | {number(r['ours'])} ({way}) "
            f"| {' | '.join(peers)} | {' | '.join(ratios)} | {r['achieved_gflops']:.0f} "
            f"| {100 * r['fraction_of_peak']:.0f} % | {' | '.join(shares)} "
            f"| {r['peak_mb'][r['ours_is']]:,.0f} | {where}, torch {r['versions']['torch']} |"
        )
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    return f"{value:,.0f}" if value else "–"


if __name__ == "__main__":
    exit_on_user_error(main)
