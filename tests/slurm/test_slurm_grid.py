"""The real grid (preset smoke) on a real one-node Slurm: the rows are those of a local run."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import cluster
import run_ablations
from checks.crash import without_clock
from cluster import Job
from cluster.execute import execute
from cluster.output import is_done, make_jobs
from grid import PRESETS, expand_grid
from tests.slurm.conftest import sbatch, wait_for
from tests.test_train import at_batch, crash

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.xdist_group("slurm")]
VARIANTS = ["scratch", "nrio", "srio"]
OF_THE_CALL = ("command", "commit", "dirty")


def write_texts(folder: Path) -> Path:
    words = "the wide model keeps what the small one learned and reads on".split()
    folder.mkdir()
    for i in range(60):
        text = " ".join(words[(i * j) % len(words)] for j in range(1, 400))
        (folder / f"{i}.txt").write_text(text)
    return folder


def make_spec(run, data: Path, **more) -> dict:
    code = {"commit": None, "dirty": False}
    spec = {"preset": "smoke", "data": str(data), "command": "test", "code": code, **more}
    return spec | {"run": asdict(run)}


def row(out: Path, run_id: str) -> dict:
    found = json.loads((out / "rows" / f"{run_id}.json").read_text())
    return {k: v for k, v in without_clock(found).items() if k not in OF_THE_CALL}


def states(out: Path, runs: list) -> dict[str, cluster.Status]:
    jobs = make_jobs(runs, {})
    return cluster.status(out, jobs, lambda run_id: is_done(out, run_id))


def job_id(out: Path, run_id: str) -> str:
    return cluster.read_note(out / "slurm_jobs.json")[run_id]["job_id"]


@pytest.fixture
def main(monkeypatch, capsys):
    """Call run_ablations.py here; what it printed."""

    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["run_ablations.py", *map(str, words)])
        run_ablations.main()
        return capsys.readouterr().out

    return call


def line_of(run_id: str, table: str) -> list[str]:
    return next(line for line in table.splitlines() if line.startswith(f"{run_id} ")).split()


def test_grid_is_submitted_requeued_and_ends_like_a_local_one(slurm, tmp_path, main):
    out, config = tmp_path / "out", tmp_path / "config.toml"
    config.write_text("cpus_per_task = 1\nminutes = 5\n")
    grid = ["--preset=smoke", f"--only={','.join(VARIANTS)}", "--seeds=0", f"--out={out}"]
    grid += [f"--source=file:{write_texts(tmp_path / 'texts')}", f"--corpora={tmp_path / 'c'}"]
    runs = expand_grid("smoke", VARIANTS, [0])
    args = run_ablations.Args(source=grid[4].partition("=")[2], corpora=tmp_path / "c")
    data = run_ablations.prepare_corpus(PRESETS["smoke"], args)
    for run in runs:
        execute(str(tmp_path / "here"), run.run_id, make_spec(run, data))

    signaller = threading.Thread(target=signal_one, args=(out, runs), daemon=True)
    signaller.start()
    started = sbatch("ablate.sh", *grid, "--slurm-config=config.toml", folder=tmp_path)
    log = tmp_path / f"ablate-{started}.out"
    wait_for(lambda: len(cluster.read_note(out / "slurm_jobs.json")) == 4, 60, log.read_text)

    def child_waits_for_its_parent() -> bool:
        now = states(out, runs)
        return now["parent-s0"].state == "running" and now["srio-s0"].reason == "Dependency"

    wait_for(child_waits_for_its_parent, 60, log.read_text)
    table = main("--status", *grid)
    assert line_of("parent-s0", table)[1] == "running"
    assert line_of("srio-s0", table)[1:3] == ["queued", "Dependency"]
    assert "1 running, 3 queued of 4" in table or "2 running, 2 queued of 4" in table

    wait_for(lambda: all(is_done(out, run.run_id) for run in runs), 120, log.read_text)
    signaller.join()
    assert restarts(out, runs) >= 1
    table = main("--status", *grid)
    assert "4 done of 4" in table and (out / "table.csv").exists()
    for run in runs:
        assert row(out, run.run_id) == row(tmp_path / "here", run.run_id)
        shown = line_of(run.run_id, table)
        assert shown[1:3] == ["done", "-"] and Path(shown[3]).exists()

    diverged = out / "rows" / "nrio-s0.json"
    bad = {"status": "diverged", "reason": "loss is nan at step 12"}
    diverged.write_text(json.dumps(json.loads(diverged.read_text()) | bad))
    table = main("--status", *grid)
    assert line_of("nrio-s0", table)[1] == "diverged" and "loss is nan at step 12" in table
    assert "3 done, 1 diverged of 4" in table
    again = main("--slurm", "--retry-failed", *grid, f"--slurm-config={config}")
    assert "submitted 1 of 4 runs: nrio-s0" in again
    assert "cancelled 1 runs: nrio-s0" in main("--cancel", *grid)
    wait_for(lambda: states(out, runs)["nrio-s0"].state == "failed", 20, log.read_text)
    assert line_of("nrio-s0", main("--status", *grid))[1:4] == ["failed", "Slurm:", "CANCELLED"]


def restarts(out: Path, runs: list) -> int:
    files = [cluster.job_folder(out, run.run_id) / "state.json" for run in runs]
    return sum(cluster.read_note(file).get("restarts", 0) for file in files)


def signal_one(out: Path, runs: list) -> None:
    """USR2 to every run that trains, until one has been requeued or all are done."""
    told = set()
    while not (restarts(out, runs) or all(is_done(out, r.run_id) for r in runs)):
        for run_id in {run.run_id for run in runs} - told:
            if (out / "runs" / run_id / "progress.json").exists():
                told.add(run_id)
                subprocess.run(["scancel", "--signal=USR2", job_id(out, run_id)], check=False)
        time.sleep(0.02)


def test_ranks_stop_and_die_together_and_any_number_of_them_goes_on(
    grid, corpus_folder, tmp_path, monkeypatch
):
    """One process; two, one of which gets a signal; two again, one of which dies; then one: the
    same losses at the same tokens."""
    run = expand_grid("smoke", ["scratch"], [0])[0]
    run = replace(run, train=run.train | {"steps": 20, "save_every": 5})
    spec = make_spec(run, corpus_folder)
    with monkeypatch.context() as patch:
        at_batch(patch, 7, crash)
        with pytest.raises(RuntimeError, match="crash"):
            execute(str(grid.out), run.run_id, spec)
    job = Job(run.run_id, make_spec(run, corpus_folder, stop_at=8, die_at=12))
    grid.submit(job, target="train_with_a_bad_rank", tasks_per_node=2, gpus_per_node=2)
    execute(str(tmp_path / "whole"), run.run_id, spec)
    failed = grid.wait(run.run_id, "failed", 60)
    assert "RuntimeError" in failed.reason and "\n" not in failed.reason
    steps = [path.name for path in (grid.out / "runs" / run.run_id).glob("step_*")]
    assert sorted(steps) == ["step_00000009", "step_00000010"]
    assert grid.note(run.run_id)["restarts"] == 1

    execute(str(grid.out), run.run_id, spec)
    ended, whole = row(grid.out, run.run_id), row(tmp_path / "whole", run.run_id)
    for part in ("metrics", "curve"):
        for key, value in whole[part].items():
            assert ended[part][key] == pytest.approx(value, abs=1e-4), key
    same = ("config", "config_hash", "seeds", "tokens", "flops", "manifest_hash")
    assert all(ended[key] == whole[key] for key in same)
