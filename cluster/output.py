"""A grid's output folder, as the scheduler sees it: which runs are done, which rows are foreign.

OUT/rows holds a JSON row per finished run, OUT/runs checkpoints and metrics, OUT/grown the models
that runs start from, OUT/jobs locks, states and logs.
"""

import os
import shutil
from collections.abc import Callable, Container
from dataclasses import asdict
from functools import partial
from pathlib import Path

import checkpoint
from analysis.rows import read_row, row_path
from cluster.job import Job
from data.shards import Corpus
from errors import UserError
from grid import Run


def check_place(out: Path) -> None:
    place = next(path for path in (out, *out.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"--out is {out}, but {place} is no folder to write in; choose another")


def check_rows(out: Path, runs: list[Run]) -> None:
    """Rows of another protocol are never mixed in: same run_id, other config is refused."""
    for run in runs:
        path = row_path(out, run.run_id)
        if path.exists() and read_row(path).get("config_hash") != checkpoint.hash_json(run.plan):
            raise UserError(
                f"{path} is the row of another configuration of {run.run_id}; "
                f"choose another --out, or delete the row and {out / 'runs' / run.run_id}"
            )


def check_corpus(out: Path, runs: list[Run], data: Path) -> None:
    """Rows of another corpus are never mixed in either."""
    wanted = Corpus(data).manifest_hash
    for path in (row_path(out, run.run_id) for run in runs):
        if path.exists() and read_row(path).get("manifest_hash") != wanted:
            raise UserError(
                f"{path} was made on another corpus than {data.name}; choose another --out"
            )


def make_jobs(runs: list[Run], shared: dict) -> list[Job]:
    return [
        Job(
            run.run_id,
            {**shared, "run": asdict(run)},
            (run.needs,) if run.needs else (),
            minutes=run.flops / 1e9 / 60,  # only the order counts: the longest chain starts first
        )
        for run in runs
    ]


def is_done(out: Path, run_id: str, parents: Container[str] = ()) -> bool:
    """Whether a run has its row. One that others are still to grow from must also have ended well
    and have its final checkpoint."""
    path = row_path(out, run_id)
    if run_id not in parents or not path.exists():
        return path.exists()
    return read_row(path)["status"] == "done" and (out / "runs" / run_id / "final").exists()


def finished(out: Path, runs: list[Run]) -> Callable[[str], bool]:
    """is_done by run_id alone."""
    missing = [run for run in runs if not row_path(out, run.run_id).exists()]
    return partial(is_done, out, parents={run.needs for run in missing})


def forget_failed(out: Path, runs: list[Run]) -> None:
    """Delete the folder and row of every run that ended badly, so that it starts afresh."""
    for run in runs:
        path = row_path(out, run.run_id)
        if path.exists() and read_row(path)["status"] != "done":
            shutil.rmtree(out / "runs" / run.run_id, ignore_errors=True)
            shutil.rmtree(out / "grown" / run.run_id, ignore_errors=True)
            path.unlink()
