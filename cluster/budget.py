"""What a grid will cost here: parameters, tokens, FLOPs, and hours from a few timed steps."""

import heapq
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import mean

import torch

from cluster.job import Job, longest_first
from cluster.local import thread_env
from grid import Preset, Run
from growth.operators import find
from models.gpt import GPTConfig, count_parameters
from models.kernels import CHUNK_BYTES, MIN_ROWS
from provenance import ROOT


def print_budget(name: str, preset: Preset, runs: list[Run], jobs: int) -> None:
    """The grid's runs with parameters, tokens, FLOPs, and a time estimate from timed steps."""
    print(f"preset {name}: {preset.line}")
    print(f"corpus {preset.source}, tokenizer {preset.tokenizer}; {len(runs)} runs\n")
    print(f"{'variant':24} {'width':>6} {'parameters':>11} {'seeds':>6} {'tokens/run':>11} "
          f"{'FLOPs/run':>10} {'min/run':>8} {'GB':>6}")  # fmt: skip
    groups, minutes, paces = {}, {}, {}
    # more runs at a time than cores share these: no more get done
    slots = min(jobs, len(runs), torch.cuda.device_count() or len(os.sched_getaffinity(0)))
    for run in runs:
        groups.setdefault((run.variant, run.stage), []).append(run)
    for (variant, _), members in groups.items():
        run, cfg = members[0], GPTConfig(**members[0].train["model"])
        if cfg not in paces:
            print(f"timing steps of {count_parameters(cfg):,} parameters, {slots} at once: seconds "
                  f"to a minute", file=sys.stderr, flush=True)  # fmt: skip
            paces[cfg] = measure_pace(run, jobs, slots)
        each = paces[cfg].minutes(run)
        minutes |= {member.run_id: each for member in members}
        print(f"{variant:24} {run.d_model:6} {count_parameters(cfg):11,} {len(members):6} "
              f"{run.tokens:11,} {run.flops:10.3g} {each:8.1f} {memory_gb(run):6.1f}")  # fmt: skip
    tokens, flops = sum(run.tokens for run in runs), sum(run.flops for run in runs)
    print(f"\ntotal {tokens:,} tokens, {flops:.3g} training FLOPs; learned operators add theirs")
    total = format_time(makespan(runs, minutes, slots))
    how = "timed uncompiled" if any(run.train.get("compile") for run in runs) else "timed here now"
    print(f"about {total}, {jobs} runs at a time, with evaluation and start ({how})")
    disk = 12e-9 * sum(count_parameters(GPTConfig(**run.train["model"])) for run in runs)
    print(f"memory per run about as above; final checkpoints take {disk:.3g} GB of disk in all")


def memory_gb(run: Run) -> float:
    """Estimated peak memory of a run's process in GB: the imports, and what is more of two.

    Training: float32 weights, gradients and two moments, the head's gradient twice, the logits of
    linear_cross_entropy, and per token of a micro-batch what the backward pass keeps (4 bytes each
    of 12 d and 2 F per layer, 5 F with a gate). Growing and saving: 32 bytes per parameter. The
    numbers are fits to what was measured on a CPU (tests/test_run_ablations.py has both); bfloat16
    needs less, a compiled run 0.15 GB more.
    """
    cfg, train = GPTConfig(**run.train["model"]), run.train
    tokens = (train.get("micro_batch") or train["batch_size"]) * cfg.block_size
    head = cfg.vocab_size * cfg.d_model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = 2 * max(4 * MIN_ROWS * cfg.vocab_size, CHUNK_BYTES[device])
    kept = cfg.n_layer * (12 * cfg.d_model + (5 if cfg.activation == "swiglu" else 2) * cfg.d_ff)
    training = 16 * count_parameters(cfg) + 8 * head + logits + 4 * tokens * kept
    imports = 0.5 if train.get("compile") else 0.35
    return imports + max(training, 32 * count_parameters(cfg)) / 1e9


def format_time(minutes: float) -> str:
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:,.0f} hours"


@dataclass(frozen=True)
class Pace:
    """Seconds of one run's parts, measured while as many run side by side as the grid will."""

    start_s: float  # from the launch to the first step
    step_s: float
    eval_token_s: float

    def minutes(self, run: Run) -> float:
        """Start, steps, evaluations; a learned operator's step costs about one of training."""
        train, learned = run.train, run.grow and find(run.grow["operator"]).learned
        steps = train["steps"] + (run.grow["learn_steps"] if learned else 0)
        evaluations = 1 + math.ceil(train["steps"] / train["eval_every"])
        evaluation_s = evaluations * train["eval_tokens"] * self.eval_token_s
        return (self.start_s + steps * self.step_s + evaluation_s) / 60


def measure_pace(run: Run, jobs: int, slots: int) -> Pace:
    """bench.step for this run's model in `slots` processes at once, with a run's threads each."""
    size, block = run.train["batch_size"], run.train["model"]["block_size"]
    n = min(size, max(1, 1024 // block))
    if torch.cuda.is_available():
        n = run.train.get("micro_batch") or size
    settings = {"model": run.train["model"], "batch_size": n}
    command = [sys.executable, "-m", "bench.step", json.dumps(settings)]
    env = os.environ | thread_env(len(os.sched_getaffinity(0)) // jobs)
    began = time.perf_counter()
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
        for _ in range(slots)
    ]
    found = [json.loads(process.communicate()[0]) for process in processes]
    wall_s = time.perf_counter() - began
    start_s = wall_s - max(each["timed_s"] for each in found)
    step_s, eval_token_s = (mean(each[k] for each in found) for k in ("step_s", "eval_token_s"))
    return Pace(start_s, step_s * size / n, eval_token_s)


def makespan(runs: list[Run], minutes: dict[str, float], slots: int) -> float:
    """When the last run ends, started as cluster/local.py does: the longest chain first."""
    jobs = [Job(r.run_id, {}, (r.needs,) if r.needs else (), minutes[r.run_id]) for r in runs]
    waiting, live, ended, now = longest_first(jobs), [], set(), 0.0
    known = {job.run_id for job in jobs}
    while waiting or live:
        ready = [job for job in waiting if set(job.needs) & known <= ended]
        for job in ready[: slots - len(live)]:
            heapq.heappush(live, (now + job.minutes, job.run_id))
            waiting.remove(job)
        now, run_id = heapq.heappop(live)
        ended.add(run_id)
    return now
