"""Train one GPT: one config, one run folder, one result.

    python train.py --out runs/small --data corpora/speeches-bpe2048 --steps 1000 ...

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

import math
import re
import sys
import time
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

from errors import UserError, exit_on_user_error, read_command_line
from training.config import TrainConfig, settled

if __name__ == "__main__":  # --help and refusals come before torch, which takes a second to load
    exit_on_user_error(lambda: settled(read_command_line(TrainConfig, __doc__)))

import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import files
from checkpoint import Checkpoint
from data.shards import Corpus
from growth.gate import Gate, alpha_at
from growth.rewarm import NewCoordinates, shapes_before
from models.gpt import GPT, GPTConfig
from training.folder import Log, run_folder
from training.numerics import choose
from training.optimizer import check_moments, load_optimizer, lr_at, make_optimizer, pack_optimizer
from training.processes import (
    Interrupted,
    Place,
    barrier,
    catch_signals,
    find_place,
    max_over_processes,
    mean_over_processes,
    on_device,
    process_group,
    share,
)
from training.settings import (
    Setup,
    State,
    check_fit,
    find_origin,
    identify,
)
from training.summary import describe, lineage_entry, summarize

HASH_BELOW = 1_000_000_000  # tokens: corpora up to 2 GB are verified by sha256 at every start
EMA = 0.95  # of the training loss, for the divergence rule
RISE = 3.0  # nats the EMA may rise above the first loss before a run counts as diverged


def train(cfg: TrainConfig) -> dict:
    """Run `cfg` to its end, from the newest checkpoint in cfg.out if there is one.

    Returns the summary that done.json holds (at once, if the run is finished). Raises UserError
    before anything is written where the config, the data or the checkpoint cannot be used, and
    Interrupted after SIGTERM, SIGUSR1, SIGUSR2 or SIGINT, with a checkpoint saved.
    """
    cfg = settled(cfg)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    place = find_place(cfg.device, cfg.dtype)
    corpus = open_corpus(cfg.data)
    init = checkpoint.load(cfg.init) if cfg.init else None
    model_cfg = checkpoint.model_config(init) if init else cfg.model
    check_fit(cfg, model_cfg, corpus, place)
    place = choose(cfg, model_cfg, place)
    origin, model = find_origin(init), build_model(cfg.seed, model_cfg, init, place)
    identity = identify(cfg, model_cfg, place, corpus, init)
    run = Setup(cfg, place, corpus, model, init, origin, identity)
    with process_group(place), run_folder(cfg.out, identity, place) as done:
        if done is not None:
            if place.rank == 0 and done["status"] == "done":
                checkpoint.prune(cfg.out, keep=0)  # a kill may have come between the two
            return done
        with catch_signals() as caught, ExitStack() as stack:
            return fit(run, caught, stack)


def fit(run: Setup, caught: dict, stack: ExitStack) -> dict:
    """The training loop: evaluate, update, log, save, until the last step; then the summary.

    stack: closes the log, however the loop ends, so that an error has a line of its own.
    """
    cfg, model, place = run.cfg, run.model, run.place
    optimizer, names = make_optimizer(cfg, model)
    state = resume(run, optimizer, names)
    gate = Gate(model, cfg.d_old, cfg.gate_steps) if state.step < cfg.gate_steps else None
    if cfg.rewarm_steps or cfg.new_lr != 1:
        shapes = shapes_before(model.cfg, cfg.d_old)
        NewCoordinates(model, optimizer, shapes, cfg.rewarm_steps, state.step, cfg.new_lr)
    parallel = data_parallel(model, place)
    net, net_train = compiled(place.compile, model, parallel)
    log = stack.enter_context(closing(Log(run, state)))
    began, wall_before, reason = time.perf_counter(), state.wall_s, None
    saved = state.step or None

    def save(name: str, **extra) -> None:
        nonlocal saved
        saved = state.step
        state.wall_s = wall_before + time.perf_counter() - began
        if place.rank == 0:
            run.corpus.check_unchanged()  # nothing learned from altered data is kept
            log.sync()
            moments, optimizer_step = pack_optimizer(optimizer, names)
            meta = describe(run, state) | {"optimizer_step": optimizer_step, "rng": pack_rng()}
            checkpoint.save(cfg.out / name, model.state_dict(), meta | extra, moments, force=True)
            checkpoint.prune(cfg.out, cfg.keep)
        barrier(place)  # no process leaves before the checkpoint is whole

    while reason is None:
        if signum := max_over_processes(caught["signum"], place):
            if saved != state.step:  # the one there is never replaced
                save(f"step_{state.step:08d}")
            raise Interrupted(signum, state.step)
        if gate and state.step == 0 and state.open_loss is None:  # before its first set: alpha 1
            log.evaluating()
            open_loss, n_tokens = evaluate(run, net, caught)
            if n_tokens == 0:
                continue
            state.open_loss, state.eval_tokens = open_loss, state.eval_tokens + n_tokens
        if gate and gate.set(state.step):
            gate = None
            net, net_train = compiled(place.compile, model, parallel)

        last = state.step == cfg.steps
        wanted = last or state.step % cfg.eval_every == 0 or state.step in cfg.eval_at
        if state.evaluated < state.step and wanted:
            log.evaluating()
            val_loss, n_tokens = evaluate(run, net, caught)
            if n_tokens == 0:
                continue  # interrupted: evaluated again after the resume
            state.evaluated, state.eval_tokens = state.step, state.eval_tokens + n_tokens
            log.row(val_loss=val_loss)
            if not math.isfinite(val_loss):
                reason = f"validation loss is {val_loss} after step {state.step}"
                break
        if last:
            break

        row, reason = update(run, net_train, optimizer, state)
        log.row(**row)
        if reason is None and state.step % cfg.save_every == 0 and state.step < cfg.steps:
            save(f"step_{state.step:08d}")

    state.wall_s = wall_before + time.perf_counter() - began
    rows = [] if log.mute else log.rows()
    summary = share(None if log.mute else summarize(run, state, reason, rows), place)
    if reason is None:
        summary["lineage"].append(lineage_entry(run, summary))
        save("final", lineage=summary["lineage"], metrics=summary["metrics"])
    if place.rank == 0:
        files.write_json(cfg.out / "done.json", summary)
        if reason is None:
            checkpoint.prune(cfg.out, keep=0)  # final/ holds everything from here on
    barrier(place)
    return summary


def update(
    run: Setup, net: torch.nn.Module, optimizer: torch.optim.AdamW, state: State
) -> tuple[dict, str | None]:
    """One optimizer step. Its row for metrics.jsonl, and why the run must stop or None.

    A loss or gradient that is not finite never reaches the weights or the moments.
    """
    cfg, tick, lr = run.cfg, time.perf_counter(), lr_at(state.step, run.cfg)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = gradients(run, net, state.step)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), cfg.clip or math.inf)
    # one transfer from the device per step; it waits until the gradients are there
    loss, norm = mean_over_processes(torch.stack((loss, norm.to(loss))), run.place).tolist()
    reason = divergence(state, loss, norm, cfg.warmup_steps, run.model.cfg.vocab_size)
    if reason is None:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    row = {"loss": loss, "lr": lr, "grad_norm": norm}
    if state.step < cfg.gate_steps:
        row["alpha"] = alpha_at(state.step, cfg.gate_steps)
    seconds = time.perf_counter() - tick
    state.step += 1
    state.train_s += seconds
    return row | {"tokens_per_s": run.tokens_per_step / seconds}, reason


def gradients(run: Setup, net: torch.nn.Module, step: int) -> torch.Tensor:
    """This process's mean loss (0-d), and the gradients of the global batch's mean loss in .grad.

    The global batch is cut into equal shares per process and these into micro-batches, each
    weighted by its part; DDP averages the shares. `no_sync` covers forward and backward.
    """
    cfg, place = run.cfg, run.place
    size = cfg.batch_size // place.size
    micro, first = min(cfg.micro_batch or size, size), size * place.rank
    total = torch.zeros((), device=place.device, dtype=torch.float64)
    for start in range(0, size, micro):
        stop = min(start + micro, size)
        batch = run.corpus.batch_at(
            *(cfg.first_batch + step, cfg.data_seed, cfg.batch_size, run.block_size),
            *(first + start, first + stop),
        )
        x_bt, y_bt = on_device(batch, place)
        more = place.size > 1 and stop < size
        with net.no_sync() if more else nullcontext():
            with place.autocast():
                loss = net(x_bt, y_bt) * ((stop - start) / size)
            loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(run: Setup, net: torch.nn.Module, caught: dict) -> tuple[float, int]:
    """Mean loss (nats per token) over the fixed validation tokens, and their number (over all
    processes). A signal in a single process cuts it short: the number is then 0."""
    cfg, place = run.cfg, run.place
    total = torch.zeros(2, device=place.device, dtype=torch.float64)  # sum of losses, tokens
    batch_size = min(cfg.micro_batch or cfg.batch_size, cfg.batch_size)
    for i, batch in enumerate(run.corpus.eval_batches(cfg.eval_tokens, batch_size, run.block_size)):
        if caught["signum"] and place.size == 1:
            return math.nan, 0
        if i % place.size == place.rank:
            x_bt, y_bt = on_device(batch, place)
            with place.autocast():
                total[0] += net(x_bt, y_bt).double() * y_bt.numel()
            total[1] += y_bt.numel()
    loss_sum, n_tokens = (mean_over_processes(total, place) * place.size).tolist()
    return loss_sum / n_tokens, round(n_tokens)


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


# ---- what the loop works on


def open_corpus(folder: Path) -> Corpus:
    """The corpus, its shards verified by sha256 where that takes about a second."""
    corpus = Corpus(folder)
    small = corpus.n_tokens("train") + corpus.n_tokens("val") < HASH_BELOW
    return Corpus(folder, verify="hash") if small else corpus


def build_model(seed: int, model_cfg: GPTConfig, init: Checkpoint | None, place: Place) -> GPT:
    """The GPT on its device, drawn from `seed` or with the weights of `init`."""
    torch.manual_seed(seed)  # for what may draw while training; nothing does today
    model = GPT(model_cfg, seed=None if init else seed)
    model.to(place.device, torch.float64 if place.dtype == "float64" else torch.float32)
    if init:
        checkpoint.load_weights(model, init.model, str(init.folder))
        check_moments(init)
    return model


def data_parallel(model: GPT, place: Place) -> torch.nn.Module:
    """`model` in DDP, or itself where one process trains alone. Only `model` itself is ever saved
    or loaded, so no wrapper's prefix reaches a checkpoint."""
    if place.size == 1:
        return model
    ids = [place.device.index] if place.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def compiled(
    wanted: bool, model: GPT, parallel: torch.nn.Module
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """What evaluation and training call. Compiled code does not notice that hooks were removed, so
    this is called again, and starts afresh, when the gate has gone."""
    if not wanted:
        return model, parallel
    torch.compiler.reset()
    net = torch.compile(model)
    return net, net if parallel is model else torch.compile(parallel)


def resume(run: Setup, optimizer: torch.optim.AdamW, names: list[str]) -> State:
    """Load the newest sound checkpoint of this run, or start as its init says; the loop's state."""
    found = checkpoint.newest(run.cfg.out) if run.place.rank == 0 else None
    folder = share(found and found.folder.name, run.place)
    if folder is None:
        if run.init:
            load_optimizer(optimizer, names, run.init)
        return State()
    ckpt = found or checkpoint.load(run.cfg.out / folder)
    if ckpt.meta.get("config_hash") != checkpoint.hash_json(run.identity):
        raise UserError(f"{ckpt.folder} belongs to another run; remove it or choose another --out")
    checkpoint.load_weights(run.model, ckpt.model, str(ckpt.folder))
    load_optimizer(optimizer, names, ckpt)
    unpack_rng(ckpt.meta["rng"])
    return State(**ckpt.meta["state"])


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


def check_given(cfg: TrainConfig, words: list[str]) -> None:
    """UserError where a --model option contradicts the checkpoint that --init names: it would be
    ignored without a word."""
    found = [re.match(r"--model\.(?:no-)?([\w-]+)", word) for word in words if cfg.init]
    given = [match[1] for match in found if match]
    theirs = checkpoint.model_config(checkpoint.load(cfg.init)) if given else None
    for option in given:
        name = option.replace("-", "_")
        ours, there = getattr(cfg.model, name), getattr(theirs, name)
        if ours != there:
            raise UserError(
                f"--model.{option} is {ours}, but the model in {cfg.init} has {there}; "
                f"with --init leave the --model options out"
            )


def main() -> None:
    cfg = read_command_line(TrainConfig, __doc__)
    check_given(cfg, sys.argv[1:])
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
