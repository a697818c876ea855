"""How far a grid is: the bar while it runs here, the table of --status."""

import os
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

import files
from analysis.publish import summarize
from analysis.rows import read_row, row_path
from cluster import slurm
from cluster.job import Status
from cluster.output import check_rows, finished, make_jobs
from errors import UserError
from grid import Run


class GridBar:
    """One bar over the grid's tokens, read from rows and each run's progress.json."""

    def __init__(self, out: Path, runs: list[Run]):
        self.out, self.tokens = out, {run.run_id: run.tokens for run in runs}
        self.step_tokens = {run.run_id: run.tokens // run.train["steps"] for run in runs}
        self.seen, self.n_done = {}, -1
        quiet = not sys.stderr.isatty()  # a log gets a line every half minute
        self.bar = tqdm(
            total=sum(self.tokens.values()), unit="tok", unit_scale=True, smoothing=0.1,
            mininterval=30 if quiet else 0.3,
        )  # fmt: skip

    def __enter__(self) -> "GridBar":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def update(self, states: dict) -> None:
        for run_id, status in states.items():
            if status.state == "running":
                self.seen[run_id] = self.running(run_id)
            elif status.state == "done":
                self.seen[run_id] = self.tokens[run_id]
        done = sum(self.seen.values())
        if self.n_done < 0:  # what earlier calls did is no progress of this one
            self.bar.initial = done
        self.n_done = sum(s.state == "done" for s in states.values())
        live = [run_id for run_id, s in states.items() if s.state == "running"]
        self.bar.set_description(f"{self.n_done}/{len(states)} runs", refresh=False)
        self.bar.set_postfix_str(" ".join(live[:4]), refresh=False)
        self.bar.update(done - self.bar.n)

    def running(self, run_id: str) -> int:
        try:
            progress = files.read_json(self.out / "runs" / run_id / "progress.json")
            return progress["step"] * self.step_tokens[run_id]
        except (UserError, OSError, KeyError):
            return 0


def print_status(out: Path, preset: str, runs: list[Run], cancel: bool) -> None:
    """A table of the runs, how many are in each state, and the results when all have ended."""
    rows = check_rows(out, preset, runs)
    if cancel:
        cancelled = slurm.cancel(out)
        print(f"cancelled {len(cancelled)} runs: {' '.join(cancelled) or 'none was queued'}")
    states = slurm.status(out, make_jobs(runs, {}), finished(out, runs))
    width = max(len(run_id) for run_id in states)
    print(f"{'run':{width}}  {'state':8}  reason  log")
    shown = {run_id: shown_state(out, run_id, status) for run_id, status in states.items()}
    for run_id, (state, reason) in shown.items():
        print(f"{run_id:{width}}  {state:8}  {reason or '-'}  {states[run_id].log or '-'}")
    counts = Counter(state for state, _ in shown.values())
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f" of {len(states)}")
    if rows and not {"queued", "running"} & set(counts):
        if os.access(out, os.W_OK):
            return summarize(out, out, allow_missing=True)
        from analysis import aggregate  # pandas takes a second

        aggregate.print_table(aggregate.table(rows, allow_missing=True))  # looking writes nothing


def shown_state(out: Path, run_id: str, status: Status) -> tuple[str, str]:
    """A run's state and reason: what its row says, where it has one and does not run again."""
    path = row_path(out, run_id)
    if status.state in ("queued", "running") or not path.exists():
        return status.state, status.reason
    row = read_row(path)
    return row["status"], row.get("reason") or ""
