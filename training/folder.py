"""A run's folder: one config and one process own it; metrics, progress, and what ends a run."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

import checkpoint
import files
from errors import UserError
from training.processes import Place, share
from training.settings import Setup, State


@contextmanager
def run_folder(out: Path, identity: dict, place: Place) -> Iterator[dict | None]:
    """Own `out` for this config and this process; yields the summary of a finished run or None."""
    with ExitStack() as stack:
        outcome = (None, None)
        try:
            if place.rank == 0:
                check_folder(out)
                stack.enter_context(files.lock(out / "lock", f"run folder {out}"))
                outcome = (None, own(out, identity))
        except (UserError, OSError) as error:
            if place.size == 1:
                raise
            outcome = (str(error), None)
        error, done = share(outcome, place)
        if error:
            raise UserError(error)
        yield done


def check_folder(out: Path) -> None:
    """UserError if `out` is there and no run folder."""
    known = {"config.json", "lock", "metrics.jsonl", "progress.json", "done.json", "final"}
    if out.exists() and not out.is_dir():
        raise UserError(f"out is {out}, a file; choose a folder")
    foreign = out.exists() and [p.name for p in out.iterdir() if not p.name.startswith(".")]
    if foreign and not (out / "config.json").exists() and set(foreign) - known:
        raise UserError(
            f"out is {out}, which holds other files ({sorted(set(foreign) - known)[0]}, ...); "
            f"choose an empty or new folder"
        )


def own(out: Path, identity: dict) -> dict | None:
    """Write config.json, or compare with the one there (UserError); done.json if it exists."""
    path = out / "config.json"
    if not path.exists():
        files.write_json(path, {"hash": checkpoint.hash_json(identity), "config": identity})
    theirs = files.read_json(path).get("config")
    theirs, ours = flatten(theirs if isinstance(theirs, dict) else {}), flatten(identity)
    keys = [k for k in sorted({*theirs, *ours}) if theirs.get(k) != ours.get(k)]
    if keys:
        shown = ", ".join(f"{k} ({theirs.get(k)} there, {ours.get(k)} here)" for k in keys[:4])
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        raise UserError(f"{out} belongs to a run with another {shown}{more}; choose another --out")
    return finished(out) if (out / "done.json").exists() else None


def finished(out: Path) -> dict | None:
    """done.json; None, and it is gone, where the model it tells of is not there or is damaged."""
    done = read_summary(out / "done.json")
    try:
        if done["status"] == "done":
            checkpoint.load(out / "final")
    except UserError as error:
        print(f"{error}; training it again", file=sys.stderr)
        (out / "done.json").unlink()
        return None
    return done


def read_summary(path: Path) -> dict:
    """done.json with what its readers count on; else a UserError."""
    done = files.read_json(path)
    metrics, speed = done.get("metrics"), done.get("tokens_per_s")
    loss = metrics.get("val_loss") if isinstance(metrics, dict) else None
    good = {"done": isinstance(loss, float), "diverged": isinstance(metrics, dict)}
    if not good.get(str(done.get("status"))) or not isinstance(speed, (int, float)):
        raise UserError(f"{path} is no summary of a run; delete it and run the same command again")
    return done


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

    def __init__(self, run: Setup, state: State):
        self.run, self.state, self.mute = run, state, run.place.rank > 0
        if self.mute:
            return
        self.path = run.cfg.out / "metrics.jsonl"
        self.file = open(self.path, "ab")
        self.file.truncate(min(self.file.tell(), state.metrics_bytes))
        self._check(state.step)
        run_hash = checkpoint.hash_json(run.identity)
        self.track, self.end_track = start_tracker(run.cfg.tracker, run.cfg.out, run.name, run_hash)
        self.began, self.first_step, self.told = time.monotonic(), state.step, 0.0
        self.tty = tty = sys.stderr.isatty()
        self.bar = tqdm(
            total=run.cfg.steps,
            initial=state.step,
            desc=run.name,
            unit="step",
            mininterval=0.2 if tty else 60,
            dynamic_ncols=tty,
        )

    def row(self, **values: float) -> None:
        """Add one line: step and tokens of this stage, and `values` (a NaN becomes null)."""
        if self.mute:
            return
        row = {"step": self.state.step, "tokens": self.run.spent(self.state.step)[0]}
        row |= {k: v if math.isfinite(v) else None for k, v in values.items()}
        with files.naming(self.path):
            self.file.write((json.dumps(row) + "\n").encode())
            self.file.flush()
        self.state.metrics_bytes = self.file.tell()
        self.track(row)
        if "loss" in row:
            self._show(row)
        else:
            self.bar.set_postfix_str(f"val loss {values['val_loss']:.3f}", refresh=self.tty)

    def evaluating(self) -> None:
        """The bar stands still now: it says why. A log file gets that line once."""
        if not self.mute:
            first, self.told = self.state.step == self.first_step, 0.0
            self.bar.set_postfix_str("evaluating", refresh=self.tty or first)

    def _show(self, row: dict) -> None:
        now, last = time.monotonic(), row["step"] == self.run.cfg.steps
        self.bar.update()
        if now - self.told < 0.5 and not last:
            return
        self.told = now
        steps = row["step"] - self.first_step
        speed = steps * self.run.tokens_per_step / max(now - self.began, 1e-9)
        loss = math.nan if row["loss"] is None else row["loss"]
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tok/s", refresh=False)
        progress = {"step": row["step"], "steps": self.run.cfg.steps}
        progress |= {"loss": row["loss"], "tokens_per_s": speed}
        with suppress(OSError):  # only for watching; what matters is written elsewhere
            files.write_json(self.run.cfg.out / "progress.json", progress, durable=False)

    def _check(self, steps: int) -> None:
        """Say at the start, not after hours, what a damaged log has lost. It never costs a model:
        the run goes on, and the summary counts the steps without a loss."""
        if lost := steps - sum("loss" in row for row in self.rows()):
            print(f"{self.path} is damaged: {lost} of {steps} steps are lost", file=sys.stderr)
            self.file.write(b"\n")  # the next row starts a line, whatever stands before it

    def rows(self) -> list[dict]:
        """The readable lines."""
        return [row for line in self.path.read_bytes().splitlines() if (row := parse_row(line))]

    def sync(self) -> None:
        """On disk before the checkpoint that counts on it."""
        with files.naming(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if not self.mute:
            self.bar.close()
            self.file.close()
            self.end_track()


def parse_row(line: bytes) -> dict | None:
    """A line of metrics.jsonl; None where it is not whole."""
    try:
        row = json.loads(line)
        good = isinstance(row["step"], int) and isinstance(row["tokens"], int)
        return row if good and {"loss", "val_loss"} & set(row) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def start_tracker(
    name: str, out: Path, run_name: str, run_hash: str
) -> tuple[Callable[[dict], object], Callable[[], object]]:
    """What sends one row of metrics.jsonl to tensorboard or wandb, and what ends it; "" does
    nothing. run_hash: two runs of one name in different grids are two runs."""
    if not name:
        return lambda row: None, lambda: None
    if name == "wandb":
        import wandb

        board = wandb.init(name=run_name, id=f"{run_name}-{run_hash[:12]}", resume="allow")
        return lambda row: board.log(row, step=row["step"]), board.finish
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"))

    def send(row: dict) -> None:
        for key, value in row.items():
            if value is not None and key not in ("step", "tokens"):
                writer.add_scalar(key, value, row["tokens"])

    return send, writer.close
