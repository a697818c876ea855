"""What goes wrong around a run: one line and exit code 2, or a row that says why; and the same
command then ends where an undisturbed run would have ended."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import checkpoint
import cluster.execute as execute_module
import train as train_module
from cluster import output
from cluster.execute import execute
from errors import UserError, exit_on_user_error
from grid import expand_grid
from tests.test_train import MODEL, arguments, at_batch, crash, result, timeless
from train import Interrupted, TrainConfig, train


@pytest.fixture
def cfg(tmp_path, corpus_folder) -> TrainConfig:
    """20 steps, saved every 5."""
    sizes = {"steps": 20, "batch_size": 8, "warmup_steps": 4, "last_tokens": 640}
    often = {"eval_every": 6, "eval_tokens": 320, "save_every": 5}
    place = {"device": "cpu", "dtype": "float64", "run_id": "run"}
    out = tmp_path / "run"
    return TrainConfig(out=out, data=corpus_folder, model=MODEL, lr=1e-2, **sizes, **often, **place)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus_folder):
    """The result of a run that nothing disturbed."""

    def get(cfg: TrainConfig) -> tuple:
        if not known:
            out = tmp_path_factory.mktemp("whole") / "run"
            train(replace(cfg, out=out, data=corpus_folder))
            known.append(result(replace(cfg, out=out)))
        return known[0]

    known: list[tuple] = []
    return get


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own, and a function to remount it with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)

    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small tmpfs needs root")
    yield folder, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run train.py's command line here: its exit code (0: done) and the last line it wrote."""

    def run(cfg: TrainConfig) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments(cfg)])
        try:
            exit_on_user_error(train_module.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, (said.err if code else said.out).splitlines()[-1]

    return run


def fill(folder: Path) -> Path:
    """Write until the disk is full."""
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space"), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def test_full_disk_while_training(cfg, whole, disk, command, monkeypatch):
    folder, _ = disk
    cfg = replace(cfg, out=folder / "run")
    at_batch(monkeypatch, 7, lambda: fill(folder))
    code, line = command(cfg)
    assert code == 2 and line.startswith("error: No space left on device"), line
    assert checkpoint.newest(cfg.out).meta["step"] == 5
    assert command(cfg)[0] == 2  # still full
    (folder / "ballast").unlink()
    assert command(cfg)[0] == 0
    assert result(cfg) == whole(cfg)
    assert not list(cfg.out.glob(".*"))  # no temporary files


def test_full_disk_before_the_first_write(cfg, disk, command):
    folder, remount = disk
    remount("size=4k")
    fill(folder)
    code, line = command(replace(cfg, out=folder / "run"))
    assert code == 2 and line.startswith("error: No space left on device"), line


def test_folder_that_becomes_read_only(cfg, whole, disk, command, monkeypatch):
    folder, remount = disk
    cfg = replace(cfg, out=folder / "run")
    at_batch(monkeypatch, 7, crash)
    with pytest.raises(RuntimeError):
        train(cfg)
    remount("ro")
    for out in (cfg.out, folder / "new"):
        code, line = command(replace(cfg, out=out))
        assert code == 2 and line.startswith("error: Read-only file system"), line
    remount("rw")
    assert command(cfg)[0] == 0
    assert result(cfg) == whole(cfg)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_folder_without_permission(cfg, tmp_path, command):
    (tmp_path / "theirs").mkdir(mode=0o500)
    code, line = command(replace(cfg, out=tmp_path / "theirs" / "run"))
    assert code == 2 and line.startswith("error: Permission denied"), line


def test_clock_and_file_times_decide_nothing(cfg, whole, monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 2**32))
    original = train_module.gradients

    def gradients(run, net, step):
        for path in cfg.out.rglob("*"):  # any time between 1970 and 2106
            seconds = rng.randrange(2**32)
            os.utime(path, (seconds, seconds))
        return original(run, net, step)

    monkeypatch.setattr(train_module, "gradients", gradients)
    at_batch(monkeypatch, 13, crash)
    with pytest.raises(RuntimeError):
        train(cfg)
    os.utime(cfg.out / "step_00000005", (2**32, 2**32))
    os.utime(cfg.out / "step_00000010", (0, 0))
    assert checkpoint.newest(cfg.out).meta["step"] == 10
    train(cfg)
    assert result(cfg) == whole(cfg)


# ---- the corpus


def change_shard(data: Path) -> None:
    with open(data / "train_00000.bin", "r+b") as file:
        file.seek(1000)
        file.write(b"\1\0\1\0")


@pytest.mark.parametrize(("step", "saved"), [(3, None), (18, 15)])
def test_shard_that_changes_under_the_run(cfg, whole, tmp_path, command, monkeypatch, step, saved):
    """Noticed before anything that may have been learned from it is saved."""
    good, cfg = cfg.data, replace(cfg, data=tmp_path / "corpus")
    shutil.copytree(good, cfg.data)
    at_batch(monkeypatch, step, lambda: change_shard(cfg.data))
    for _ in range(2):  # under the run, and when it starts again
        code, line = command(cfg)
        assert code == 2 and "train_00000.bin" in line and "sha256" in line, line
        newest = checkpoint.newest(cfg.out)
        assert (newest and newest.meta["step"]) == saved
    shutil.copy(good / "train_00000.bin", cfg.data)
    assert command(cfg)[0] == 0
    assert result(cfg) == whole(cfg)


def test_shard_that_is_cut_or_grows_under_the_run(cfg, tmp_path, command, monkeypatch):
    cfg = replace(cfg, data=shutil.copytree(cfg.data, tmp_path / "corpus"))
    at_batch(monkeypatch, 7, lambda: os.truncate(cfg.data / "val_00000.bin", 5000))
    code, line = command(cfg)
    assert code == 2 and "val_00000.bin had 4000 bytes and has 5000 now" in line, line
    code, line = command(cfg)
    assert code == 2 and "val_00000.bin has 5000 bytes" in line, line


@pytest.mark.parametrize("change", ["touched", "replaced", "removed"])
def test_what_leaves_the_tokens_alone_does_not_stop_the_run(
    cfg, whole, tmp_path, monkeypatch, change
):
    good, cfg = cfg.data, replace(cfg, data=tmp_path / "corpus")
    shutil.copytree(good, cfg.data)

    def act() -> None:
        if change == "touched":
            return (cfg.data / "train_00000.bin").touch()
        cfg.data.rename(tmp_path / "old")
        if change == "replaced":
            shutil.copytree(good, cfg.data)
            change_shard(cfg.data)

    at_batch(monkeypatch, 7, act)
    train(cfg)
    assert result(cfg) == whole(cfg)


# ---- a run of the grid


def spec_of(run, corpus_folder: Path) -> dict:
    code = {"commit": None, "dirty": False}
    return {
        **{"preset": "smoke", "data": str(corpus_folder), "command": "test", "code": code},
        "run": asdict(run),
    }


def row(out: Path, run_id: str) -> dict:
    return timeless(json.loads((out / "rows" / f"{run_id}.json").read_text()))


@pytest.fixture(scope="module")
def grid_run(tmp_path_factory, corpus_folder):
    """A run of preset smoke, cut to 20 steps, and its undisturbed row."""
    run = expand_grid("smoke", ["scratch"], [0])[0]
    run = replace(run, train=run.train | {"steps": 20, "save_every": 5})
    out = tmp_path_factory.mktemp("grid")
    execute(str(out), run.run_id, spec_of(run, corpus_folder))
    return run, row(out, run.run_id)


def test_nan_gradients_make_a_row_that_says_why(grid_run, tmp_path, corpus_folder, monkeypatch):
    (run, undisturbed), spec = grid_run, spec_of(grid_run[0], corpus_folder)
    original = train_module.gradients

    def poisoned(run, net, step):
        loss = original(run, net, step)
        if step == 12:
            run.model.wte.weight.grad[0, 0] = float("nan")
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "gradients", poisoned)
        with pytest.raises(UserError, match="scratch-s0 diverged: .*gradient norm nan at step 12"):
            execute(str(tmp_path), run.run_id, spec)
        patch.setattr(train_module, "fit", None)  # called again, it does not train but says so
        with pytest.raises(UserError, match="scratch-s0 diverged"):
            execute(str(tmp_path), run.run_id, spec)
    assert row(tmp_path, run.run_id)["status"] == "diverged"
    assert "step 12" in row(tmp_path, run.run_id)["reason"]
    assert output.is_done(tmp_path, run.run_id)  # not repeated, unless asked to:
    output.forget_failed(tmp_path, [run], live=())
    execute(str(tmp_path), run.run_id, spec)
    assert row(tmp_path, run.run_id) == undisturbed


def test_a_parent_whose_model_is_gone_is_trained_again(tmp_path, corpus_folder):
    runs = expand_grid("smoke", ["nrio"], [0])
    runs = [replace(r, train=r.train | {"steps": 6, "save_every": 3}) for r in runs]
    parent, child = runs
    execute(str(tmp_path), parent.run_id, spec_of(parent, corpus_folder))
    before = row(tmp_path, parent.run_id)
    shutil.rmtree(tmp_path / "runs" / parent.run_id / "final")  # done.json and the row say "done"
    assert not output.finished(tmp_path, runs)(parent.run_id)
    for run in runs:
        execute(str(tmp_path), run.run_id, spec_of(run, corpus_folder))
    assert row(tmp_path, parent.run_id) == before
    assert row(tmp_path, child.run_id)["status"] == "done"
    assert output.finished(tmp_path, runs)(parent.run_id)


def test_full_disk_at_the_row(grid_run, disk, corpus_folder, monkeypatch):
    (run, undisturbed), (folder, remount) = grid_run, disk
    remount("size=4m")
    spec, original = spec_of(run, corpus_folder), execute_module.write_row

    def write_row(*arguments):
        if not (folder / "ballast").exists():
            fill(folder)
        original(*arguments)

    monkeypatch.setattr(execute_module, "write_row", write_row)
    with pytest.raises(OSError) as error:
        execute(str(folder), run.run_id, spec)
    assert error.value.errno == errno.ENOSPC
    assert not output.is_done(folder, run.run_id)
    (folder / "ballast").write_bytes(b"")
    execute(str(folder), run.run_id, spec)
    assert row(folder, run.run_id) == undisturbed
    assert not list((folder / "rows").glob(".*"))


def test_kill_between_the_summary_and_the_clearing(cfg, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "prune", lambda *_, **__: None)
        train(cfg)
    (cfg.out / ".final.old-99").mkdir()
    assert len(checkpoint.steps(cfg.out)) == 3
    train(cfg)
    assert not checkpoint.steps(cfg.out) and not list(cfg.out.glob(".*"))
    assert result(cfg) == whole(cfg)


def test_signal_right_after_a_resume_does_not_touch_the_only_checkpoint(cfg, whole, monkeypatch):
    cfg, resume = replace(cfg, keep=1), train_module.resume
    at_batch(monkeypatch, 7, crash)
    with pytest.raises(RuntimeError):
        train(cfg)

    def resume_and_signal(*arguments):
        state = resume(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return state

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "resume", resume_and_signal)
        patch.setattr(checkpoint, "save", None)
        with pytest.raises(Interrupted, match="SIGTERM at step 5"):
            train(cfg)
    train(cfg)
    assert result(cfg) == whole(cfg)
