"""What a grid will cost here: parameters, tokens, FLOPs, and hours from a few timed steps."""

import time

import torch

from grid import Preset, Run
from models.gpt import GPT, GPTConfig, count_parameters


def print_budget(name: str, preset: Preset, runs: list[Run], jobs: int) -> None:
    """The grid's runs with parameters, tokens, FLOPs, and a time estimate from timed steps."""
    print(f"preset {name}: {preset.line}")
    print(f"corpus {preset.source}, tokenizer {preset.tokenizer}; {len(runs)} runs\n")
    print(f"{'variant':24} {'width':>6} {'parameters':>11} {'seeds':>6} {'tokens/run':>11} "
          f"{'FLOPs/run':>10} {'min/run':>8} {'GB':>6}")  # fmt: skip
    groups, minutes, rates = {}, 0.0, {}
    for run in runs:
        groups.setdefault((run.variant, run.stage), []).append(run)
    for (variant, _), members in groups.items():
        run, cfg = members[0], GPTConfig(**members[0].train["model"])
        if cfg not in rates:
            rates[cfg] = tokens_per_second(cfg, jobs)
        each = run.tokens / rates[cfg] / 60
        minutes += each * len(members)
        print(f"{variant:24} {run.d_model:6} {count_parameters(cfg):11,} {len(members):6} "
              f"{run.tokens:11,} {run.flops:10.3g} {each:8.1f} {memory_gb(run):6.1f}")  # fmt: skip
    tokens, flops = sum(run.tokens for run in runs), sum(run.flops for run in runs)
    print(f"\ntotal {tokens:,} tokens, {flops:.3g} training FLOPs; learned operators add theirs")
    total = format_time(minutes / max(1, min(jobs, len(runs))))
    print(f"about {total} on this machine, {jobs} runs at a time, evaluation not counted")
    disk = 12e-9 * sum(count_parameters(GPTConfig(**run.train["model"])) for run in runs)
    print(f"memory per run about as above; final checkpoints take {disk:.3g} GB of disk in all")


def memory_gb(run: Run) -> float:
    """Estimated peak of training in GB: float32 weights, gradients and two moments, and per token
    of a micro-batch what the backward pass keeps (4 bytes each of 16 d + 8 F per layer and of 4
    vocabularies; 3.9 where 4.0 was measured at 135 M parameters)."""
    cfg, train = GPTConfig(**run.train["model"]), run.train
    tokens = (train.get("micro_batch") or train["batch_size"]) * cfg.block_size
    kept = cfg.n_layer * (16 * cfg.d_model + 8 * cfg.d_ff) + 4 * cfg.vocab_size
    return (16 * count_parameters(cfg) + 4 * tokens * kept) / 1e9


def format_time(minutes: float) -> str:
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:,.0f} hours"


def tokens_per_second(cfg: GPTConfig, jobs: int) -> float:
    """Measured here: two forward and backward passes, after one to warm up."""
    cuda = torch.cuda.is_available()
    device, before = "cuda" if cuda else "cpu", torch.get_num_threads()
    if not cuda:
        torch.set_num_threads(max(1, before // jobs))
    model = GPT(cfg).to(device)
    n = 64 if cuda else max(1, 512 // cfg.block_size)
    x = torch.randint(cfg.vocab_size, (n, cfg.block_size), device=device)
    for i in range(3):
        if i == 1:
            start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = model(x, x)
        loss.backward()
        loss.item()  # waits for the device
    torch.set_num_threads(before)
    return 2 * x.numel() / (time.perf_counter() - start)
