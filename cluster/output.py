"""A grid's output folder, as the scheduler sees it: which runs are done, which rows are foreign.

OUT/rows holds a JSON row per finished run, OUT/runs checkpoints and metrics, OUT/grown the models
that runs start from, OUT/jobs locks, states and logs; OUT/grid.json says which runs were asked for.
"""

import os
import shutil
from collections.abc import Callable, Container
from dataclasses import asdict
from functools import partial
from pathlib import Path

import checkpoint
import files
from analysis.rows import comparable, load_rows, read_row, row_path
from cluster.job import Job, Status
from data.shards import Corpus
from errors import UserError
from grid import Run

GRID = "grid.json"


def check_place(out: Path) -> None:
    place = next(path for path in (out, *out.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"--out is {out}, but {place} is no folder to write in; choose another")


def check_rows(out: Path, preset: str, runs: list[Run]) -> list[dict]:
    """The rows that OUT holds. UserError where they could not stand in one table with each other
    and with those of `runs`: another preset, or the same run_id with another plan."""
    rows = load_rows(out) if any((out / "rows").glob("[!.]*.json")) else []
    plans = {run.run_id: checkpoint.hash_json(run.plan) for run in runs}
    for row in rows:
        path = row_path(out, row["run_id"])
        if row["preset"] != preset:
            raise UserError(
                f"{path} is of preset {row['preset']}, not {preset}: choose another --out"
            )
        if plans.get(row["run_id"], row.get("config_hash")) != row.get("config_hash"):
            raise UserError(
                f"{path} is the row of another configuration of {row['run_id']}; "
                f"choose another --out, or delete the row and {out / 'runs' / row['run_id']}"
            )
    comparable(rows)
    return rows


def check_corpus(rows: list[dict], out: Path, data: Path) -> None:
    """Rows of another corpus are never mixed in either."""
    wanted = Corpus(data).manifest_hash
    for row in rows:
        if row["manifest_hash"] != wanted:
            raise UserError(
                f"{row_path(out, row['run_id'])} was made on another corpus than {data.name}; "
                f"choose another --out"
            )


def note_grid(out: Path, preset: str, runs: list[Run]) -> None:
    """Add `runs` to those that OUT was asked for. The caller holds the scheduler's lock."""
    files.sweep(out, mine=GRID)
    known = {run.run_id: run for run in noted_grid(out, preset)[1]}
    known |= {run.run_id: run for run in runs}
    files.write_json(out / GRID, {"preset": preset, "runs": list(map(asdict, known.values()))})


def noted_grid(out: Path, preset: str = "") -> tuple[str, list[Run]]:
    """(preset, every run that commands asked OUT for); no runs where none was noted, or those of
    another preset than `preset`."""
    found = files.read_json(out / GRID, limit=1 << 30, remedy="delete it", default={})
    if not found or preset not in ("", found.get("preset")):
        return preset, []
    try:
        return found["preset"], [Run(**run) for run in found["runs"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{out / GRID} is no list of runs ({error}); delete it") from None


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


def finished(out: Path, runs: list[Run], retry: bool = False) -> Callable[[str], bool]:
    """is_done by run_id alone. `retry`: those that ended badly will be forgotten first."""
    parents = set()
    for run in runs:
        path = row_path(out, run.run_id)
        if not path.exists() or (retry and read_row(path)["status"] != "done"):
            parents.add(run.needs)
    return partial(is_done, out, parents=parents)


def forget_failed(out: Path, runs: list[Run], live: Container[str]) -> None:
    """Delete the folder and row of every run that ended badly, so that it starts afresh; not of
    those that are `live`. The caller holds the scheduler's lock. The row goes last: killed halfway,
    the run is still a failed one."""
    for run in runs:
        path = row_path(out, run.run_id)
        if run.run_id not in live and path.exists() and read_row(path)["status"] != "done":
            shutil.rmtree(out / "runs" / run.run_id, ignore_errors=True)
            shutil.rmtree(out / "grown" / run.run_id, ignore_errors=True)
            path.unlink()


def unfinished(out: Path, runs: list[Run], states: dict[str, Status]) -> dict[str, Status]:
    """The runs that did not end well, by run_id: what their row says, or how their job ended."""
    found = {run_id: status for run_id, status in states.items() if status.state == "failed"}
    for run in runs:
        path = row_path(out, run.run_id)
        row = read_row(path) if path.exists() else {"status": "done"}
        if row["status"] != "done":
            log = states.get(run.run_id, Status("")).log
            found[run.run_id] = Status(row["status"], row.get("reason") or "", log)
    return found
