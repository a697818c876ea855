"""The cluster layer on a real one-node Slurm (one_node.py), with a run that only counts."""

import shutil
import subprocess
from pathlib import Path

import pytest

import cluster
import provenance
from cluster import Job
from errors import UserError
from tests.slurm.conftest import Grid, sbatch, wait_for

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


def test_child_starts_when_its_parent_is_done(grid):
    sent = grid.submit(Job("parent", {"steps": 8}), Job("child", {"steps": 2}, needs=("parent",)))
    assert sent == ["parent", "child"]
    grid.wait("parent", "running")
    wait_for(lambda: grid.states()["child"].reason == "Dependency", 10, grid.states)
    assert grid.states()["child"].state == "queued"
    assert not (grid.out / "child").exists()
    grid.wait("child", "done")
    assert grid.is_done("parent") and grid.submit() == []  # nothing is submitted twice


def test_failed_parent_ends_its_descendants_and_a_retry_runs_them(grid):
    bad = Job("bad", {"fail": "width 7: must be even"})
    others = [Job("child", needs=("bad",)), Job("grandchild", needs=("child",)), Job("good")]
    grid.submit(bad, *others)
    grid.wait("grandchild", "failed")
    grid.wait("good", "done")
    states = grid.states()
    assert states["bad"].reason == "width 7: must be even"
    assert "UserError: width 7" in open(states["bad"].log).read()
    assert states["child"].reason == "parent bad failed"
    pending = ["squeue", "-h", "-t", "PENDING"]
    wait_for(lambda: not subprocess.check_output(pending), 10, grid.states)  # Slurm dropped them
    assert grid.submit(Job("bad"), *others) == ["bad", "child", "grandchild"]
    grid.wait("grandchild", "done")


def test_killed_process_is_a_failure_with_a_reason(grid):
    grid.submit(Job("killed", {"die": 9}))
    assert grid.wait("killed", "failed").reason == "Slurm: FAILED"


def test_signals_save_within_a_step_and_requeue_only_that_array_task(grid):
    signals = {"r0": None, "r1": "USR2", "r2": "USR1", "r3": "TERM"}
    runs = [Job(run_id, {"steps": 30, "sleep": 0.2}) for run_id in signals]
    grid.submit(*runs, Job("child", needs=("r3",)))
    assert len({grid.job_id(run_id).split("_")[0] for run_id in signals}) == 1  # one array
    for run_id in signals:
        grid.wait_step(run_id, 3)
    for run_id, name in signals.items():
        if name:
            grid.signal(run_id, name)
    grid.wait("child", "done")  # the dependency outlives the requeue
    for run_id, name in signals.items():
        grid.wait(run_id, "done")
        starts = grid.count(run_id)["starts"]
        assert len(starts) == 1 + bool(name) and grid.note(run_id)["restarts"] == bool(name)
        if name:
            assert 3 <= starts[0]["signalled"] <= starts[1]["step"] <= starts[0]["signalled"] + 1


def test_cancelled_run_saves_and_is_not_requeued(grid):
    grid.submit(Job("long", {"steps": 1000, "sleep": 0.2}), Job("child", needs=("long",)))
    grid.wait_step("long", 3)
    assert cluster.cancel(grid.out) == ["long", "child"]
    assert grid.wait("long", "failed").reason == "Slurm: CANCELLED"
    wait_for(lambda: grid.note("long")["state"] == "stopped", 10, grid.states)
    saved = grid.count("long")["step"]
    grid.submit(Job("long", {"steps": saved + 2}), Job("child", needs=("long",)))
    grid.wait("child", "done")
    assert grid.count("long")["starts"][1]["step"] == saved


def test_run_outlives_the_death_of_slurmd(grid, slurm):
    grid.submit(Job("run", {"steps": 25, "sleep": 0.2}), Job("child", needs=("run",)))
    grid.wait_step("run", 2)
    slurm.kill("slurmd")
    step = grid.count("run")["step"]
    grid.wait_step("run", step + 5)
    slurm.start_daemon("slurmd")
    grid.wait("child", "done")
    assert len(grid.count("run")["starts"]) == 1


def test_queued_run_uses_the_code_of_its_submission(grid, tmp_path, monkeypatch):
    root = tmp_path / "repository"
    copy_sources(root)
    monkeypatch.setattr(cluster.code, "ROOT", root)
    grid.submit(Job("first", {"steps": 10}), Job("second", needs=("first",)))
    payload = root / "tests" / "slurm" / "payload.py"
    payload.write_text("raise SystemError('edited after the submission')")
    grid.wait("second", "done")
    file = grid.count("second")["starts"][0]["file"]
    assert file.startswith(cluster.read_note(grid.out / "slurm_jobs.json")["second"]["code"])
    assert grid.submit(Job("third")) == ["third"]  # and a new submission uses the new code
    assert "edited after" in grid.wait("third", "failed").reason


def copy_sources(root: Path) -> None:
    for name in ("errors.py", "files.py", "provenance.py", "cluster", "tests/slurm"):
        copy = shutil.copytree if (provenance.ROOT / name).is_dir() else shutil.copy
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy(provenance.ROOT / name, root / name)


def test_refused_submission_is_a_user_error(grid):
    with pytest.raises(UserError, match="invalid partition"):
        grid.submit(Job("run"), partition="nowhere")


def test_train_sh_trains_two_ranks_and_comes_back_after_a_signal(slurm, tmp_path, corpus_folder):
    model = {"vocab_size": 48, "block_size": 16, "n_layer": 1, "n_head": 2, "head_dim": 4}
    model = {f"model.{name}": value for name, value in model.items()} | {"model.d_model": 8}
    options = {"data": corpus_folder, "out": "run", "steps": 400, "batch_size": 4, "device": "cpu"}
    options |= {"eval_every": 400, "eval_tokens": 64, "last_tokens": 64, **model}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    job_id = sbatch("train.sh", *words, folder=tmp_path)
    log, run = tmp_path / f"train-{job_id}.out", tmp_path / "run"
    wait_for(lambda: cluster.read_note(run / "progress.json").get("step"), 60, log.read_text)
    subprocess.run(["scancel", "--signal=USR2", job_id], check=True)
    wait_for((run / "done.json").exists, 90, log.read_text)
    assert "SIGUSR2 at step" in log.read_text()


def test_timed_out_run_is_requeued_and_goes_on(timed_out):
    wait_for(lambda: timed_out.note("run")["restarts"], 120, timed_out.states)
    wait_for(lambda: len(timed_out.count("run")["starts"]) > 1, 10, timed_out.states)
    first, second, *_ = (start["step"] for start in timed_out.count("run")["starts"])
    assert first == 0 and second > 20
    cluster.cancel(timed_out.out)
    assert "timed-out" in open(timed_out.states()["run"].log).read()


def test_preempted_run_saves_and_comes_back(timed_out, grid, tmp_path_factory):
    """After the timed-out run's test, for the urgent run takes the whole node."""
    grid.submit(Job("low", {"steps": 30, "sleep": 0.2}))
    grid.wait_step("low", 3)
    urgent = Grid(tmp_path_factory.mktemp("urgent"))
    urgent.submit(Job("urgent"), partition="urgent", extra={"exclusive": True})
    urgent.wait("urgent", "done")
    assert not grid.is_done("low")
    grid.wait("low", "done")
    assert len(grid.count("low")["starts"]) == 2
