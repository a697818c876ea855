"""How a run computes: precision, the CPU's float32 matrix product, compiled or not.

What is left open is decided once, when a run begins, by a second of measurement on its own model;
from then on it belongs to the run (config.json, row), so that a resumed run goes on with the same
arithmetic. Names of processors decide nothing.
"""

import platform
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F

import checkpoint
import files
from models.gpt import GPT, GPTConfig, flops_per_token
from settings import rules
from training.config import TrainConfig
from training.processes import Place

WORTH = 1.1  # how many times faster a path must be to replace torch's own
SMALL = 10**9  # FLOPs: a step below that takes milliseconds, whatever the path
EPS = torch.finfo(torch.float32).eps


def choose(cfg: TrainConfig, model_cfg: GPTConfig, place: Place) -> Place:
    """`place` with dtype, matmul and compile decided: as the run in cfg.out began, else as asked,
    "auto" by measurement. Sets torch's float32 matmul precision for this process."""
    begun = as_begun(cfg)
    if cfg.dtype == "auto" and "dtype" in begun:
        place = replace(place, dtype=begun["dtype"])
    wanted = begun.get("matmul", "highest") if cfg.matmul == "auto" and begun else cfg.matmul
    # several processes that measure might disagree; other dtypes have no such choice
    measured = place.size == 1 and place.device.type == "cpu" and place.dtype == "float32"
    if wanted == "auto" and measured:
        tokens = (cfg.micro_batch or cfg.batch_size) * model_cfg.block_size
        wanted = fastest(model_cfg, tokens)
    place = replace(place, matmul="highest" if wanted == "auto" else wanted)
    place = replace(place, compile=cfg.compile and begun.get("compile", True))
    if place.compile and place.device.type == "cpu" and not compiler_works():
        print("torch.compile fails here (no C++ compiler?): not compiled", file=sys.stderr)
        place = replace(place, compile=False)
    torch.set_float32_matmul_precision(place.matmul)
    return place


def as_begun(cfg: TrainConfig) -> dict:
    """dtype, matmul and compile as config.json has them; {} where no run has begun. What is no such
    setting is left out: whoever compares the whole config refuses it."""
    found = files.read_json(cfg.out / "config.json", default={}).get("config")
    known = {name: get_args(rules(TrainConfig)[name][0]) for name in ("dtype", "matmul")}
    known["compile"] = (True, False)
    found = found if isinstance(found, dict) else {}
    return {k: found[k] for k, allowed in known.items() if found.get(k) in allowed}


def fastest(cfg: GPTConfig, tokens: int) -> str:
    """ "medium" (oneDNN's product) where it is float32 indeed and makes a step of this model, of
    `tokens` tokens, at least WORTH times faster; else "highest", torch's default."""
    if tokens * flops_per_token(cfg) < SMALL:
        return "highest"
    shapes = {(cfg.d_model, cfg.d_model), (cfg.d_model, cfg.d_ff), (cfg.d_ff, cfg.d_model)}
    with matmul_precision("medium"):
        if not all(is_float32(F.linear, *shape) for shape in shapes):
            return "highest"
    seconds = step_seconds(cfg, tokens)
    return "medium" if seconds["highest"] > WORTH * seconds["medium"] else "highest"


def is_float32(product, n_in: int, n_out: int) -> bool:
    """Whether `product`(x, w) = x w^T is within float32 round-off: a relative error below
    eps sqrt(n_in), the growth of n_in independent roundings (bfloat16 and TF32 inputs give
    thousands of eps)."""
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, n_in, generator=gen) for n in (256, n_out))
    exact = x.double() @ w.double().T
    error = (product(x, w) - exact).norm() / exact.norm()
    return error.item() < EPS * n_in**0.5


def step_seconds(cfg: GPTConfig, tokens: int, rounds: int = 4) -> dict[str, float]:
    """CPU seconds of forward and backward pass, uncompiled, with either product: the best of
    `rounds`, in turns. Of a large model few tokens are enough: its products are large anyway."""
    model, seconds = GPT(cfg), {"highest": [], "medium": []}
    tokens = min(tokens, 20 * SMALL // flops_per_token(cfg))
    x_bt = torch.zeros(max(1, tokens // cfg.block_size), cfg.block_size).long()
    for _ in range(rounds):
        for name, times in seconds.items():
            with matmul_precision(name):
                began = time.process_time()  # not the wall's: other processes do not count
                model(x_bt, x_bt).backward()
                times.append(time.process_time() - began)
    return {name: min(times) for name, times in seconds.items()}


@contextmanager
def matmul_precision(name: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compiler_works() -> bool:
    """Whether torch.compile can make code for this CPU: there may be no compiler, or one without
    Python's headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64))
    except Exception:  # whatever it is, eager code goes on
        return False
    return True


def compile_cache(folder: Path) -> Path:
    """Where the runs of a grid share compiled code: one place per kind of processor and version,
    for code made for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    kind = sorted({x for x in lines if x.startswith(("flags", "model", "Features", "CPU part"))})
    key = checkpoint.hash_json({"cpu": kind, "torch": torch.__version__, "python": sys.version})
    return folder / "cache" / key[:16]
