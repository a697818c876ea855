"""Train one GPT: one config, one run folder, one result.

    python train.py --out runs/small --data corpora/speeches --steps 1000 --model.d-model 96 ...

A run folder belongs to one config and one process. Whatever stops a run, the same command goes on
from the newest checkpoint and ends bitwise (CPU) where an uninterrupted run would have ended.

    config.json      what defines the run, and its hash
    metrics.jsonl    one line per update and per evaluation
    progress.json    where the run is (for watching; not needed to resume)
    step_XXXXXXXX/   checkpoints to resume from; gone once the run is done
    final/           the trained model, from which a child can be grown
    done.json        the summary; its presence means the run is finished

Several processes (torchrun, or srun with several tasks) share one run by DDP: the global batch, its
order and the loss do not depend on their number.
"""

import fcntl
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint
from checkpoint import Checkpoint, write_json
from data.shards import Corpus
from errors import UserError, exit_on_user_error
from growth.gate import Gate, alpha_at
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token

HASH_BELOW = 1_000_000_000  # tokens: corpora up to 2 GB are verified by sha256 at every start
EMA = 0.95  # of the training loss, for the divergence rule
RISE = 3.0  # nats the EMA may rise above the first loss before a run counts as diverged
CURVE_POINTS = 200


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Lengths are in optimizer steps unless they say tokens."""

    out: Path  # run folder
    data: Path  # prepared corpus
    init: Path | None = None  # checkpoint to start from; its model config replaces `model`
    model: GPTConfig = field(default_factory=GPTConfig)
    seed: int = 0  # initialisation only
    data_seed: int = 0  # order of the training windows
    steps: int = 1000
    batch_size: int = 32  # sequences per optimizer step, over all processes
    micro_batch: int = 0  # sequences per forward; 0: all of a process's share at once
    lr: float = 1e-3
    min_lr_ratio: float = 0.1  # final learning rate / lr
    warmup_steps: int = 100
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, linear decay) | constant
    decay_fraction: float = 0.2  # wsd: part of `steps` spent decaying
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    clip: float = 1.0  # largest global gradient norm; 0: no clipping
    eval_every: int = 100  # also before the first step and after the last
    eval_tokens: int = 65_536
    save_every: int = 200
    keep: int = 2  # step checkpoints kept while running
    last_tokens: int = 20_000_000  # window of the final training loss (the last shard)
    dtype: str = "auto"  # auto | float32 | bfloat16 (autocast) | float64
    compile: bool = False
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    threads: int = 0  # CPU threads; 0: torch's choice
    tracker: str = ""  # "" | tensorboard | wandb
    gate_steps: int = 0  # length of the warm-up gate after growth (growth/gate.py)
    gate_d_old: int = 0  # width before growth
    run_id: str = ""  # name of the run in lineages; default: name of the run folder


# not part of what a run computes: these may change when it is resumed
FREE = {"out", "data", "init", "run_id", "threads", "device", "compile", "micro_batch"}
FREE |= {"save_every", "keep", "tracker"}


class Interrupted(Exception):
    """A signal stopped the run after a checkpoint was saved; the same command goes on from it."""

    def __init__(self, signum: int, step: int):
        super().__init__(f"{signal.Signals(signum).name} at step {step}; saved, run again to go on")
        self.signum = signum
        self.exit_code = 130 if signum == signal.SIGINT else 75


@dataclass(frozen=True)
class Place:
    """This process among those that train together, its device, and the precision."""

    rank: int = 0
    size: int = 1
    local: int = 0  # rank on this machine: picks the GPU
    device: torch.device = torch.device("cpu")
    dtype: str = "float32"

    def autocast(self):
        if self.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


@dataclass
class State:
    """What a resumed run needs besides weights, Adam moments and RNG. Stored in checkpoints."""

    step: int = 0  # updates done
    evaluated: int = -1  # step of the latest evaluation
    first_loss: float | None = None
    ema: float | None = None  # of the training loss
    metrics_bytes: int = 0  # length of metrics.jsonl
    eval_tokens: int = 0  # seen by evaluations so far
    train_s: float = 0.0  # seconds in updates
    wall_s: float = 0.0  # seconds in all


def train(cfg: TrainConfig) -> dict:
    """Run `cfg` to its end, from the newest checkpoint in cfg.out if there is one.

    Returns the summary that done.json holds (at once, if the run is finished). Raises UserError
    before anything is written where the config, the data or the checkpoint cannot be used, and
    Interrupted after SIGTERM, SIGUSR1, SIGUSR2 or SIGINT, with a checkpoint saved.
    """
    check_config(cfg)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    place = find_place(cfg)
    corpus = open_corpus(cfg.data)
    init = checkpoint.load(cfg.init) if cfg.init else None
    model_cfg = checkpoint.model_config(init) if init else cfg.model
    check_fit(cfg, model_cfg, corpus, place)
    model = build_model(cfg, model_cfg, init, place)
    track = make_tracker(cfg) if place.rank == 0 and cfg.tracker else None
    identity = identify(cfg, model_cfg, place, corpus, init)
    with process_group(place), run_folder(cfg.out, identity, place) as done:
        if done is not None:
            return done
        with catch_signals() as caught:
            return fit(cfg, model, corpus, init, identity, place, caught, track)


def fit(
    cfg: TrainConfig,
    model: GPT,
    corpus: Corpus,
    init: Checkpoint | None,
    identity: dict,
    place: Place,
    caught: dict,
    track: Callable[[dict], None] | None = None,
) -> dict:
    """The training loop: evaluate, update, log, save, until the last step; then the summary."""
    tokens_per_step = cfg.batch_size * model.cfg.block_size
    optimizer, names = make_optimizer(cfg, model)
    state = resume(cfg, model, optimizer, names, init, identity, place)
    gate = Gate(model, cfg.gate_d_old, cfg.gate_steps) if state.step < cfg.gate_steps else None
    net, parallel = wrap(cfg, model, place)
    log = Log(cfg, state, tokens_per_step, place, track)
    began, wall_before, reason = time.perf_counter(), state.wall_s, None

    def save(name: str, **extra) -> None:
        state.wall_s = wall_before + time.perf_counter() - began
        if place.rank == 0:
            log.sync()
            moments, optimizer_step = pack_optimizer(optimizer, names)
            meta = describe(cfg, model, corpus, init, identity, state)
            meta |= {"optimizer_step": optimizer_step} | extra
            checkpoint.save(cfg.out / name, model.state_dict(), meta, moments, force=True)
            checkpoint.prune(cfg.out, cfg.keep)
        barrier(place)  # no process leaves before the checkpoint is whole

    while reason is None:
        if signum := max_over_processes(caught["signum"], place):
            save(f"step_{state.step:08d}")
            log.close()
            raise Interrupted(signum, state.step)
        if gate and gate.set(state.step):
            gate = None
            net, parallel = wrap(cfg, model, place)  # compiled code had the hooks in it

        last = state.step == cfg.steps
        if state.evaluated < state.step and (last or state.step % cfg.eval_every == 0):
            val_loss, n_tokens = evaluate(net, corpus, cfg, model.cfg.block_size, place, caught)
            if n_tokens == 0:
                continue  # interrupted: evaluated again after the resume
            state.evaluated, state.eval_tokens = state.step, state.eval_tokens + n_tokens
            log.row(val_loss=val_loss)
            if not math.isfinite(val_loss):
                reason = f"validation loss is {val_loss} after step {state.step}"
                break
        if last:
            break

        tick = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr_at(state.step, cfg)
        loss = gradients(parallel, corpus, cfg, state.step, model.cfg.block_size, place)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip or math.inf)
        loss, norm = mean_over_processes(torch.stack((loss, norm.to(loss))), place).tolist()
        reason = divergence(state, loss, norm, cfg.warmup_steps, model.cfg.vocab_size)
        if reason is None:  # a NaN never reaches the weights or the moments
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - tick

        row = {"loss": loss, "lr": lr_at(state.step, cfg), "grad_norm": norm}
        if gate:
            row["alpha"] = alpha_at(state.step, cfg.gate_steps)
        state.step += 1
        state.train_s += seconds
        log.row(**row, tokens_per_s=tokens_per_step / seconds)
        if reason is None and state.step % cfg.save_every == 0 and state.step < cfg.steps:
            save(f"step_{state.step:08d}")

    state.wall_s = wall_before + time.perf_counter() - began
    summary = share(summarize(cfg, model, corpus, init, identity, state, reason, log, place), place)
    if reason is None:
        own = lineage_entry(cfg, model, corpus, init, summary)
        summary["lineage"].append(own)
        save("final", lineage=summary["lineage"], metrics=summary["metrics"])
    log.close()
    if place.rank == 0:
        write_json(cfg.out / "done.json", summary)
        if reason is None:
            checkpoint.prune(cfg.out, keep=0)  # final/ holds everything from here on
    barrier(place)
    return summary


def gradients(
    net: torch.nn.Module, corpus: Corpus, cfg: TrainConfig, step: int, block: int, place: Place
) -> torch.Tensor:
    """This process's mean loss (0-d), and the gradients of the global batch's mean loss in .grad.

    The global batch is cut into equal shares per process and these into micro-batches, each
    weighted by its part; DDP averages the shares. `no_sync` covers forward and backward.
    """
    share_size = cfg.batch_size // place.size
    micro, offset = min(cfg.micro_batch or share_size, share_size), place.rank * share_size
    total = torch.zeros((), device=place.device, dtype=torch.float64)
    for start in range(0, share_size, micro):
        stop = min(start + micro, share_size)
        x_bt, y_bt = on_device(
            corpus.batch_at(
                step, cfg.data_seed, cfg.batch_size, block, offset + start, offset + stop
            ),
            place,
        )
        accumulate_only = place.size > 1 and stop < share_size
        with net.no_sync() if accumulate_only else nullcontext():
            with place.autocast():
                loss = net(x_bt, y_bt) * ((stop - start) / share_size)
            loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(
    net: torch.nn.Module, corpus: Corpus, cfg: TrainConfig, block: int, place: Place, caught: dict
) -> tuple[float, int]:
    """Mean loss (nats per token) over the fixed validation tokens, and their number (over all
    processes). A signal in a single process cuts it short: the number is then 0."""
    total = torch.zeros(2, device=place.device, dtype=torch.float64)  # sum of losses, tokens
    batch_size = min(cfg.micro_batch or cfg.batch_size, cfg.batch_size)
    for i, batch in enumerate(corpus.eval_batches(cfg.eval_tokens, batch_size, block)):
        if caught["signum"] and place.size == 1:
            return math.nan, 0
        if i % place.size == place.rank:
            x_bt, y_bt = on_device(batch, place)
            with place.autocast():
                loss = net(x_bt, y_bt)
            total += torch.stack(
                (loss.double() * y_bt.numel(), torch.tensor(y_bt.numel()).to(loss))
            )
    loss_sum, n_tokens = (mean_over_processes(total, place) * place.size).tolist()
    return loss_sum / n_tokens, round(n_tokens)


def lr_at(step: int, cfg: TrainConfig) -> float:
    """The learning rate of update number `step` (from 0); a pure function.

    Linear warm-up to cfg.lr over warmup_steps, then cosine to lr * min_lr_ratio at the last step,
    or constant, or wsd: constant, then linear to lr * min_lr_ratio over the last decay_fraction.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    low = cfg.lr * cfg.min_lr_ratio
    if cfg.schedule == "cosine":
        part = (step + 1 - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
        return low + (cfg.lr - low) * 0.5 * (1 + math.cos(math.pi * part))
    if cfg.schedule == "wsd":
        left, decay = cfg.steps - 1 - step, max(1, round(cfg.decay_fraction * cfg.steps))
        return low + (cfg.lr - low) * min(1.0, left / decay)
    return cfg.lr


def divergence(
    state: State, loss: float, norm: float, warmup_steps: int, vocab_size: int
) -> str | None:
    """Why the run must stop, or None; updates the loss EMA in `state`.

    It stops where loss or gradient norm is not finite, where the EMA of the loss is RISE nats above
    the first loss, or, after warm-up, above 2 ln V: twice what a uniform guess would get.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"loss is {loss} and gradient norm {norm} at step {state.step}"
    state.first_loss = loss if state.first_loss is None else state.first_loss
    state.ema = loss if state.ema is None else EMA * state.ema + (1 - EMA) * loss
    if state.ema > state.first_loss + RISE:
        return (
            f"average loss {state.ema:.2f} at step {state.step} is more than {RISE} nats above the "
            f"first loss {state.first_loss:.2f}"
        )
    if state.step >= warmup_steps + 100 and state.ema > 2 * math.log(vocab_size):
        return f"average loss {state.ema:.2f} at step {state.step} is above 2 ln V"
    return None


# ---- model and optimizer


def build_model(
    cfg: TrainConfig, model_cfg: GPTConfig, init: Checkpoint | None, place: Place
) -> GPT:
    """The GPT on its device, from cfg.seed or from the weights of `init`."""
    torch.manual_seed(
        cfg.seed
    )  # nothing draws from it today; it is saved and restored all the same
    model = GPT(model_cfg, seed=None if init else cfg.seed)
    model.to(place.device, torch.float64 if place.dtype == "float64" else torch.float32)
    if init:
        checkpoint.load_weights(model, init.model, str(init.folder))
    return model


def wrap(cfg: TrainConfig, model: GPT, place: Place) -> tuple[torch.nn.Module, torch.nn.Module]:
    """`model` compiled if asked for, and that in DDP if there are several processes. Only `model`
    itself is ever saved or loaded, so no wrapper's prefix reaches a checkpoint."""
    net = model
    if cfg.compile:
        torch._dynamo.reset()  # compiled code does not notice that hooks came or went
        net = torch.compile(model)
    if place.size == 1:
        return net, net
    ids = [place.device.index] if place.device.type == "cuda" else None
    return net, DistributedDataParallel(net, device_ids=ids, broadcast_buffers=False)


def decay_groups(model: GPT) -> tuple[list[str], list[str]]:
    """Names of the parameters with weight decay (matrices, embeddings) and without (norms, biases).

    Every parameter is in exactly one group; a tied head is wte.weight and counts once.
    """
    names = [name for name, _ in model.named_parameters()]
    plain = [n for n in names if n.endswith("bias") or ".ln_" in f".{n}"]
    decayed = [n for n in names if n not in set(plain)]
    shapes = {name: p.ndim for name, p in model.named_parameters()}
    assert all(shapes[n] == 1 for n in plain) and all(shapes[n] == 2 for n in decayed)
    assert len({id(p) for p in model.parameters()}) == len(names) == len(plain) + len(decayed)
    return decayed, plain


def make_optimizer(cfg: TrainConfig, model: GPT) -> tuple[torch.optim.AdamW, list[str]]:
    """AdamW (decoupled decay, arXiv 1711.05101), and the parameters' names in its order."""
    decayed, plain = decay_groups(model)
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[n] for n in decayed], "weight_decay": cfg.weight_decay},
        {"params": [params[n] for n in plain], "weight_decay": 0.0},
    ]
    betas = (cfg.beta1, cfg.beta2)
    return torch.optim.AdamW(groups, cfg.lr, betas, cfg.adam_eps, fused=True), decayed + plain


def pack_optimizer(
    optimizer: torch.optim.AdamW, names: list[str]
) -> tuple[dict[str, torch.Tensor] | None, int]:
    """Adam's moments by parameter name, and its step; (None, 0) before the first update."""
    states = optimizer.state_dict()["state"]
    if not states:
        return None, 0
    moments = {
        f"{name}/{kind}": states[i][kind]
        for i, name in enumerate(names)
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return moments, int(states[0]["step"])


def unpack_optimizer(
    optimizer: torch.optim.AdamW, names: list[str], ckpt: Checkpoint, shapes: dict
) -> None:
    """The inverse of pack_optimizer, by name; UserError where a moment is missing or misshapen."""
    if ckpt.optimizer is None:
        return
    step = ckpt.meta.get("optimizer_step")
    wanted = {f"{n}/{kind}": shapes[n] for n in names for kind in ("exp_avg", "exp_avg_sq")}
    if {k: v.shape for k, v in ckpt.optimizer.items()} != wanted or type(step) is not int:
        raise UserError(f"{ckpt.folder}: the optimizer state does not fit its weights")
    state = {
        i: {"step": torch.tensor(float(step))}
        | {kind: ckpt.optimizer[f"{name}/{kind}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
        for i, name in enumerate(names)
    }
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def pack_rng() -> dict:
    """Generator states as hex: torch's on the CPU and on each GPU (data order has no state)."""
    states = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        states["cuda"] = [s.numpy().tobytes().hex() for s in torch.cuda.get_rng_state_all()]
    return states


def unpack_rng(states: dict) -> None:
    def tensor(text: str) -> torch.Tensor:
        return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["cpu"]))
    if torch.cuda.is_available() and len(states.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([tensor(text) for text in states["cuda"]])


# ---- the run folder


def resume(
    cfg: TrainConfig,
    model: GPT,
    optimizer: torch.optim.AdamW,
    names: list[str],
    init: Checkpoint | None,
    identity: dict,
    place: Place,
) -> State:
    """Load the newest sound checkpoint of this run, or start as `init` says; the loop's state."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    found = checkpoint.newest(cfg.out) if place.rank == 0 else None
    folder = share(found and found.folder.name, place)
    if folder is None:
        if init:
            unpack_optimizer(optimizer, names, init, shapes)
        return State()
    ckpt = found or checkpoint.load(cfg.out / folder)
    if ckpt.meta.get("config_hash") != checkpoint.hash_json(identity):
        raise UserError(f"{ckpt.folder} belongs to another run; remove it or choose another --out")
    checkpoint.load_weights(model, ckpt.model, str(ckpt.folder))
    unpack_optimizer(optimizer, names, ckpt, shapes)
    unpack_rng(ckpt.meta["rng"])
    return State(**ckpt.meta["state"])


def identify(
    cfg: TrainConfig,
    model_cfg: GPTConfig,
    place: Place,
    corpus: Corpus,
    init: Checkpoint | None,
) -> dict:
    """What defines a run's numbers. Data and parent count by content, not by path."""
    identity = {k: v for k, v in asdict(cfg).items() if k not in FREE}
    identity |= {"model": asdict(model_cfg), "dtype": place.dtype, "data": corpus.manifest_hash}
    identity["init"] = [init.hash, init.optimizer_hash] if init else None
    return identity


@contextmanager
def run_folder(out: Path, identity: dict, place: Place) -> Iterator[dict | None]:
    """Own `out` for this config and this process; yields the summary of a finished run or None."""
    lock, outcome = None, (None, None)
    try:
        if place.rank == 0:
            lock = take_lock(out)
            outcome = (None, claim(out, identity))
    except (UserError, OSError) as error:
        if lock:
            lock.close()
        if place.size == 1:
            raise
        outcome = (str(error), None)
    error, done = share(outcome, place)
    if error:
        raise UserError(error)
    try:
        yield done
    finally:
        if lock:
            lock.close()


def take_lock(out: Path):
    """An open file that holds the folder's lock until it is closed or the process ends, by
    whatever death. UserError if `out` is no run folder or another process has it."""
    known = {"config.json", "lock", "metrics.jsonl", "progress.json", "done.json", "final"}
    if out.exists() and not out.is_dir():
        raise UserError(f"out is {out}, a file; choose a folder")
    foreign = out.exists() and [p.name for p in out.iterdir() if not p.name.startswith(".")]
    if foreign and not (out / "config.json").exists() and set(foreign) - known:
        raise UserError(
            f"out is {out}, which holds other files ({sorted(set(foreign) - known)[0]}, ...); "
            f"choose an empty or new folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / "lock", "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = (out / "lock").read_text().strip() or "another process"
        lock.close()
        raise UserError(
            f"run folder {out} is in use by {holder}; wait for it, stop it, or choose another --out"
        ) from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def claim(out: Path, identity: dict) -> dict | None:
    """Write config.json, or compare with the one there (UserError); done.json if it exists."""
    path = out / "config.json"
    if not path.exists():
        write_json(path, {"hash": checkpoint.hash_json(identity), "config": identity})
    theirs = checkpoint.read_json(path).get("config")
    theirs, ours = flatten(theirs if isinstance(theirs, dict) else {}), flatten(identity)
    keys = [k for k in sorted({*theirs, *ours}) if theirs.get(k) != ours.get(k)]
    if keys:
        shown = ", ".join(f"{k} ({theirs.get(k)} there, {ours.get(k)} here)" for k in keys[:4])
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        raise UserError(f"{out} belongs to a run with another {shown}{more}; choose another --out")
    return checkpoint.read_json(out / "done.json") if (out / "done.json").exists() else None


def flatten(tree: dict, prefix: str = "") -> dict:
    """{"model": {"d_model": 8}} -> {"model.d_model": 8}"""
    flat = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


class Log:
    """metrics.jsonl, progress.json, the bar and the tracker, all of process 0; the others' is mute.

    metrics.jsonl is cut back to the checkpoint's length first, so that after a resume it equals
    that of an uninterrupted run but for tokens_per_s.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        state: State,
        tokens_per_step: int,
        place: Place,
        track: Callable[[dict], None] | None,
    ):
        self.cfg, self.state, self.track = cfg, state, track
        self.tokens_per_step, self.mute, self.last_progress = tokens_per_step, place.rank > 0, 0.0
        if self.mute:
            return
        self.path = cfg.out / "metrics.jsonl"
        self.file = open(self.path, "ab")
        if self.file.tell() < state.metrics_bytes:
            raise UserError(
                f"{self.path} is shorter than its checkpoint knows; remove {cfg.out} to start again"
            )
        self.file.truncate(state.metrics_bytes)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(
            total=cfg.steps,
            initial=state.step,
            desc=cfg.run_id or cfg.out.name,
            unit="step",
            mininterval=60 if quiet else 0.2,
            dynamic_ncols=not quiet,
        )

    def row(self, **values: float) -> None:
        """Add one line: step and tokens of this stage, and `values` (a NaN becomes null)."""
        if self.mute:
            return
        state = self.state
        row = {"step": state.step, "tokens": state.step * self.tokens_per_step}
        row |= {k: v if math.isfinite(v) else None for k, v in values.items()}
        self.file.write((json.dumps(row) + "\n").encode())
        self.file.flush()
        state.metrics_bytes = self.file.tell()
        if self.track:
            self.track(row)
        if "loss" in values:
            self.bar.set_postfix_str(
                f"loss {values['loss']:.3f}, {values['tokens_per_s']:,.0f} tok/s", refresh=False
            )
            self.bar.update()
            if time.monotonic() - self.last_progress > 0.5:
                self.progress(values["loss"])

    def progress(self, loss: float) -> None:
        self.last_progress, state = time.monotonic(), self.state
        speed = self.bar.format_dict["rate"] or (self.bar.n - self.bar.initial) / max(
            self.bar.format_dict["elapsed"], 1e-9
        )
        value = {"step": state.step, "steps": self.cfg.steps}
        value |= {"loss": loss if math.isfinite(loss) else None}
        value |= {"tokens_per_s": speed * self.tokens_per_step}
        write_json(self.cfg.out / "progress.json", value, durable=False)

    def rows(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def sync(self) -> None:
        """On disk before the checkpoint that counts on it."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        if not self.mute:
            self.bar.close()
            self.file.close()


def make_tracker(cfg: TrainConfig) -> Callable[[dict], None]:
    """A function that takes one row of metrics.jsonl; UserError if the package is missing."""
    try:
        if cfg.tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(cfg.out / ".tensorboard"))
            return lambda row: [
                writer.add_scalar(k, v, row["tokens"])
                for k, v in row.items()
                if v is not None and k not in ("step", "tokens")
            ]
        import wandb
    except ImportError:
        raise UserError(
            f"tracker {cfg.tracker} is not installed; pip install {cfg.tracker}, or leave it out"
        ) from None
    name = cfg.run_id or cfg.out.name
    run = wandb.init(
        name=name, id=name, resume="allow", config=json.loads(json.dumps(asdict(cfg), default=str))
    )
    return lambda row: run.log(row, step=row["step"])


# ---- what a run leaves behind


def describe(
    cfg: TrainConfig,
    model: GPT,
    corpus: Corpus,
    init: Checkpoint | None,
    identity: dict,
    state: State,
) -> dict:
    """Checkpoint meta: config, counts of this stage and of the whole lineage, loop state, RNG."""
    tokens, flops = spent(cfg, model, state)
    return {
        "config": asdict(model.cfg),
        "run_id": cfg.run_id or cfg.out.name,
        "config_hash": checkpoint.hash_json(identity),
        "manifest_hash": corpus.manifest_hash,
        "step": state.step,
        "tokens": tokens,
        "flops": flops,
        "tokens_total": before(init, "tokens") + tokens,
        "flops_total": before(init, "flops") + flops,
        "lineage": ancestors(init),
        "growth": growth_of(init),
        "state": asdict(state),
        "rng": pack_rng(),
    }


def spent(cfg: TrainConfig, model: GPT, state: State) -> tuple[int, int]:
    """Training tokens and FLOPs of this stage so far; evaluation is not training."""
    tokens = state.step * cfg.batch_size * model.cfg.block_size
    return tokens, tokens * flops_per_token(model.cfg)


def ancestors(init: Checkpoint | None) -> list[dict]:
    """The finished stages before this run, oldest first."""
    lineage = init.meta.get("lineage") if init else None
    return [entry for entry in lineage or [] if isinstance(entry, dict)]


def growth_of(init: Checkpoint | None) -> dict | None:
    growth = init.meta.get("growth") if init else None
    return growth if isinstance(growth, dict) else None


def before(init: Checkpoint | None, what: str) -> int:
    """Tokens or FLOPs spent on the lineage before this stage, the operator's included."""
    return init.meta.get(f"{what}_total", 0) if init else 0


def by_origin(init: Checkpoint | None, what: str, stage: int) -> dict:
    """Tokens or FLOPs by what they were spent on."""
    operator = (growth_of(init) or {}).get(what, 0)
    total = before(init, what)
    return {
        "parent": total - operator,
        "operator": operator,
        "stage": stage,
        "total": total + stage,
    }


def summarize(
    cfg: TrainConfig,
    model: GPT,
    corpus: Corpus,
    init: Checkpoint | None,
    identity: dict,
    state: State,
    reason: str | None,
    log: Log,
    place: Place,
) -> dict | None:
    """The result of a run as done.json has it; None in processes other than 0."""
    if log.mute:
        return None
    rows = log.rows()
    losses = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    vals = [(row["tokens"], row["val_loss"]) for row in rows if "val_loss" in row]
    window = max(1, round(cfg.last_tokens / log.tokens_per_step))
    ok = reason is None
    metrics = {
        "train_loss": mean([loss for _, loss in losses[-window:]]) if ok else None,
        "val_loss": vals[-1][1] if ok else None,
        "val_loss_start": vals[0][1],
    }
    parent = parent_of(init)
    known = parent and parent["manifest_hash"] == corpus.manifest_hash
    metrics["spike"] = difference(vals[0][1], parent["val_loss"]) if known else None
    tokens, flops = spent(cfg, model, state)
    forward = flops_per_token(model.cfg, backward=False)
    return {
        "status": "done" if ok else "diverged",
        "reason": reason,
        "run_id": cfg.run_id or cfg.out.name,
        "config": identity,
        "config_hash": checkpoint.hash_json(identity),
        "seeds": {
            "init": cfg.seed,
            "data": cfg.data_seed,
            "growth": ((growth_of(init) or {}).get("settings") or {}).get("seed"),
        },
        "manifest_hash": corpus.manifest_hash,
        "corpus": {
            "source": corpus.manifest.get("source"),
            "tokenizer": corpus.manifest["tokenizer"]["spec"],
            "train_tokens": corpus.n_tokens("train"),
            "val_tokens": corpus.n_tokens("val"),
        },
        "lineage": ancestors(init),
        "parent": parent,
        "params": count_parameters(model.cfg),
        "d_model": model.cfg.d_model,
        "metrics": metrics,
        "tokens": by_origin(init, "tokens", tokens),
        "flops": by_origin(init, "flops", flops) | {"evaluation": state.eval_tokens * forward},
        "wall_s": state.wall_s,
        "tokens_per_s": tokens / state.train_s if state.train_s else 0.0,
        "hardware": hardware(place),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "curve": curve(losses, vals),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def parent_of(init: Checkpoint | None) -> dict | None:
    """The checkpoint this run grew from or went on from, with what it cost in all."""
    if init is None:
        return None
    last = (ancestors(init) or [{}])[-1]
    known = {k: last.get(k) for k in ("run_id", "val_loss", "train_loss", "manifest_hash")}
    hash_ = last.get("hash") or (growth_of(init) or {}).get("parent") or init.hash
    cost = {what: by_origin(init, what, 0)["parent"] for what in ("tokens", "flops")}
    return known | {"hash": hash_} | cost


def lineage_entry(
    cfg: TrainConfig, model: GPT, corpus: Corpus, init: Checkpoint | None, summary: dict
) -> dict:
    """This finished stage as its descendants will list it."""
    return {
        "stage": len(ancestors(init)),
        "run_id": cfg.run_id or cfg.out.name,
        "hash": checkpoint.model_hash(model.state_dict()),
        "d_model": model.cfg.d_model,
        "tokens": summary["tokens"]["stage"],
        "flops": summary["flops"]["stage"],
        "growth": {k: v for k, v in (growth_of(init) or {}).items() if k != "report"} or None,
        "val_loss": summary["metrics"]["val_loss"],
        "train_loss": summary["metrics"]["train_loss"],
        "manifest_hash": corpus.manifest_hash,
    }


def curve(losses: list[tuple], vals: list[tuple]) -> dict:
    """Training loss as at most CURVE_POINTS block means, every validation loss; without NaNs."""
    losses = [(t, v) for t, v in losses if v is not None]
    vals = [(t, v) for t, v in vals if v is not None]
    size = max(1, math.ceil(len(losses) / CURVE_POINTS))
    blocks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return {
        "tokens": [mean([t for t, _ in block]) for block in blocks],
        "train": [mean([v for _, v in block]) for block in blocks],
        "val_tokens": [t for t, _ in vals],
        "val": [v for _, v in vals],
    }


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def hardware(place: Place) -> dict:
    if place.device.type == "cuda":
        name = {"gpu": torch.cuda.get_device_name(place.device)}
    else:
        name = {"cpu": cpu_name()}
    return name | {
        "threads": torch.get_num_threads(),
        "dtype": place.dtype,
        "processes": place.size,
    }


def cpu_name() -> str:
    """The model name as /proc/cpuinfo has it, or what Python knows elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


# ---- processes, devices, signals


def find_place(cfg: TrainConfig) -> Place:
    """Rank and size from torchrun's environment or srun's, then device and precision."""
    env = os.environ
    if "WORLD_SIZE" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        first = env["SLURM_STEP_NODELIST"]
        if "[" in first or "," in first:
            command = ["scontrol", "show", "hostnames", first]
            first = subprocess.check_output(command, text=True).split()[0]
        env |= {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"]}
        env |= {"LOCAL_RANK": env["SLURM_LOCALID"], "MASTER_ADDR": first}
        env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))
    rank, size, local = (
        int(env.get(key, default))
        for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    device = pick_device(cfg.device, local)
    return Place(rank, size, local, device, pick_dtype(cfg.dtype, device))


def pick_device(name: str, local: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name}, but torch finds no CUDA here; use --device cpu")
    if name == "cuda":
        name = f"cuda:{local % torch.cuda.device_count()}"
    if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
        raise UserError(f"device is {name}; this machine has {torch.cuda.device_count()} GPU(s)")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> str:
    """auto: bfloat16 on GPUs that have it, else float32 (bfloat16 is slower on small CPU runs)."""
    if name != "auto":
        return name
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has else "float32"


@contextmanager
def process_group(place: Place) -> Iterator[None]:
    """torch.distributed for the length of a run, if there are several processes."""
    if place.size == 1 or dist.is_initialized():
        yield
        return
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    dist.init_process_group("nccl" if place.device.type == "cuda" else "gloo")
    yield
    # not after an error: the others may be gone, and ending the process is what frees them
    dist.destroy_process_group()


def share(value: object, place: Place) -> object:
    """Process 0's value, in every process."""
    if place.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=place.device)
    return box[0]


def mean_over_processes(value: torch.Tensor, place: Place) -> torch.Tensor:
    if place.size > 1:
        dist.all_reduce(value)
        value /= place.size
    return value


def max_over_processes(number: int, place: Place) -> int:
    if place.size == 1:
        return number
    value = torch.tensor(number, device=place.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def barrier(place: Place) -> None:
    if place.size > 1:
        dist.barrier()


def on_device(batch: tuple[torch.Tensor, ...], place: Place) -> tuple[torch.Tensor, ...]:
    if place.device.type == "cpu":
        return batch
    return tuple(t.pin_memory().to(place.device, non_blocking=True) for t in batch)


@contextmanager
def catch_signals() -> Iterator[dict]:
    """{"signum": 0} that SIGTERM, SIGUSR1, SIGUSR2 and SIGINT set; a second SIGINT raises.

    Python lets only the main thread set handlers; in another one signals are left alone.
    """
    caught = {"signum": 0}
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(signum, frame) -> None:
        if signum == caught["signum"] == signal.SIGINT:
            raise KeyboardInterrupt
        caught["signum"] = signum

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    previous = {number: signal.signal(number, note) for number in signals}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# ---- checks, all before anything is written


def open_corpus(folder: Path) -> Corpus:
    """The corpus, its shards verified by sha256 where that takes about a second."""
    corpus = Corpus(folder)
    small = corpus.n_tokens("train") + corpus.n_tokens("val") < HASH_BELOW
    return Corpus(folder, verify="hash") if small else corpus


def check_config(cfg: TrainConfig) -> None:
    """Every number in its range, every choice known; UserError names value, range and remedy."""
    choices = {
        "schedule": ("cosine", "wsd", "constant"),
        "dtype": ("auto", "float32", "bfloat16", "float64"),
        "tracker": ("", "tensorboard", "wandb"),
    }
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            shown = ", ".join(repr(a) for a in allowed)
            raise UserError(f"{name} is {getattr(cfg, name)!r}; choose one of {shown}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(cfg.device)):
        raise UserError(f"device is {cfg.device!r}; choose auto, cpu, cuda or cuda:N")
    whole = {"seed": (0, 2**63 - 1), "data_seed": (0, 2**63 - 1), "steps": (1, 10**8 - 1)}
    whole |= dict.fromkeys(("batch_size", "eval_every", "eval_tokens"), (1, 10**12))
    whole |= dict.fromkeys(("save_every", "keep", "last_tokens"), (1, 10**15))
    whole |= {"micro_batch": (0, 10**9), "threads": (0, 1024), "gate_d_old": (0, 10**9)}
    # the warm-up must end before the last step, and the gate with it at the latest
    whole |= {"warmup_steps": (0, cfg.steps - 1), "gate_steps": (0, cfg.steps)}
    real = {"lr": (1e-12, 100.0), "min_lr_ratio": (0.0, 1.0), "decay_fraction": (0.0, 1.0)}
    real |= {"weight_decay": (0.0, 100.0), "beta1": (0.0, 0.99999), "beta2": (0.0, 0.9999999)}
    real |= {"adam_eps": (1e-30, 1.0), "clip": (0.0, 1e9)}
    for kinds, ranges in (((int,), whole), ((int, float), real)):
        for name, (low, high) in ranges.items():
            value = getattr(cfg, name)
            if type(value) not in kinds or not low <= value <= high:
                kind = "a whole number" if kinds == (int,) else "a number"
                raise UserError(f"{name} is {value!r}; it must be {kind} in {low}..{high}")


def check_fit(cfg: TrainConfig, model_cfg: GPTConfig, corpus: Corpus, place: Place) -> None:
    """Config, model, corpus and processes fit together and into memory."""
    if corpus.vocab_size > model_cfg.vocab_size:
        raise UserError(
            f"the corpus has {corpus.vocab_size} token ids, the model's vocab_size is "
            f"{model_cfg.vocab_size}; use model.vocab_size >= {corpus.vocab_size}"
        )
    for split, needed in (("train", cfg.batch_size), ("val", 1)):
        windows = corpus.n_windows(split, model_cfg.block_size)
        if windows < needed:
            raise UserError(
                f"the corpus has {windows} {split} windows of {model_cfg.block_size} tokens, "
                f"{needed} are needed; use a smaller batch_size or context, or more data"
            )
    if cfg.batch_size % place.size:
        raise UserError(
            f"batch_size {cfg.batch_size} does not divide among {place.size} processes; "
            f"use a multiple of {place.size}"
        )
    if cfg.gate_steps and not 0 < cfg.gate_d_old < model_cfg.d_model:
        raise UserError(
            f"gate_d_old is {cfg.gate_d_old}; with a gate it must be in 1..{model_cfg.d_model - 1}"
        )
    if model_cfg.n_layer > 1000:
        raise UserError(f"model.n_layer is {model_cfg.n_layer}; it must be in 1..1000")
    needed = 16 * count_parameters(model_cfg)  # weights, gradients and two moments in float32
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"the model needs at least {needed / 1e9:.1f} GB to train, this machine has "
            f"{memory / 1e9:.1f} GB; use a smaller model"
        )


def main() -> None:
    cfg = tyro.cli(TrainConfig, description=__doc__)
    try:
        summary = train(cfg)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    loss, speed = summary["metrics"]["val_loss"], summary["tokens_per_s"]
    if summary["status"] == "done":
        print(f"done: validation loss {loss:.4f}, {speed:,.0f} tokens/s, in {cfg.out}")
    else:
        print(f"diverged: {summary['reason']}; last good checkpoint in {cfg.out}")


if __name__ == "__main__":
    exit_on_user_error(main)
