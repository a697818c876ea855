"""The grid's command line: refusals, budgets, and a grid that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import checkpoint
import cluster
import run_ablations
from analysis.rows import row_path, write_row
from data.shards import Corpus
from errors import UserError
from grid import expand_grid
from tests import synthetic_rows

ROOT = Path(__file__).parents[1]
VOLATILE = ("wall_s", "tokens_per_s")


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "run_ablations.py"), *map(str, arguments)]


def call(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--local", "--preset", "papr"),
        ("--local", "--preset", "tiny", "--only", "sriox"),
        ("--local", "--preset", "tiny", "--only", "srio@epsilon=3"),
        ("--local", "--preset", "tiny", "--only", "srio@epsilon=nan"),
        ("--local", "--preset", "tiny", "--only", "nrio@operator=what"),
        ("--local", "--preset", "tiny", "--seeds", "x"),
        ("--local", "--preset", "tiny", "--jobs", "-1"),
        ("--local", "--slurm", "--preset", "tiny"),
        ("--preset", "tiny"),
        ("--local", "--preset", "smoke", "--source", "file:no-such-folder/*.txt"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(arguments, tmp_path):
    out = tmp_path / "out"
    done = call(*arguments, "--out", out, "--corpora", tmp_path / "corpora")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert not out.exists() and not (tmp_path / "corpora").exists()


def test_list_names_every_variant():
    from grid import VARIANTS

    lines = call("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(VARIANTS)
    assert all(line.split()[1] in ("paper", "note", "comparison", "ours") for line in lines)


def test_dry_run_prints_the_papers_budget(monkeypatch, capsys):
    from cluster import budget
    from grid import PRESETS, expand_grid

    pace = budget.Pace(start_s=60, step_s=0.1, eval_token_s=0)
    monkeypatch.setattr(budget, "measure_pace", lambda run, jobs, slots: pace)
    preset = PRESETS["paper"]
    runs = expand_grid("paper", list(preset.variants), list(preset.seeds))
    budget.print_budget("paper", preset, runs, 1)
    text, said = capsys.readouterr()
    assert "timing steps of 23,988,480 parameters, 1 at once" in said  # it is silent for a while
    assert "23,988,480" in text and "44,240,256" in text and "884,801,536" in text
    assert "65 runs" in text and f"{sum(run.tokens for run in runs):,} tokens" in text


def test_a_budget_counts_start_evaluation_and_learning():
    from cluster.budget import Pace
    from grid import expand_grid

    pace = Pace(start_s=30, step_s=0.5, eval_token_s=0.001)
    parent, nrio, learned = expand_grid("smoke", ["nrio", "srio-lo"], [0])
    for run, more in ((parent, 0), (nrio, 0), (learned, learned.grow["learn_steps"])):
        evaluations = len(range(0, run.train["steps"], run.train["eval_every"])) + 1
        seconds = 30 + 0.5 * (run.train["steps"] + more)
        seconds += evaluations * run.train["eval_tokens"] * 0.001
        assert pace.minutes(run) == pytest.approx(seconds / 60)


def test_a_budget_is_the_schedules_length():
    """Children wait for their parent; more slots than runs are no use."""
    from cluster.budget import makespan
    from grid import expand_grid

    runs = expand_grid("smoke", ["scratch", "nrio", "full"], [0, 1])
    minutes = {run.run_id: 5.0 if run.variant == "parent" else 2.0 for run in runs}
    assert makespan(runs, minutes, 1) == 22
    assert makespan(runs, minutes, 2) == 11
    assert makespan(runs, minutes, 100) == 7


def test_a_pace_is_measured_where_the_runs_will_run():
    from cluster.budget import measure_pace
    from grid import expand_grid

    pace = measure_pace(expand_grid("smoke", ["nrio"], [0])[0], jobs=2, slots=1)
    assert pace.start_s > 0.5 and 0 < pace.step_s < 1 and 0 < pace.eval_token_s < pace.step_s


MEASURED_GB = [  # VmHWM of cluster.execute for whole runs, or of train.update where `changes` says
    ("smoke", "nrio", 0, {}, 0.357),
    ("smoke", "nrio", 1, {}, 0.369),
    ("tiny", "nrio", 0, {}, 0.396),
    ("tiny", "nrio", 1, {}, 0.442),
    ("tiny", "ligo", 1, {}, 0.494),
    ("mini", "nrio", 1, {"compile": True}, 0.539),
    ("mini", "nrio", 1, {"compile": False}, 0.404),
    ("paper", "full", 0, {"micro_batch": 4, "compile": False}, 1.125),
    ("paper", "full", 1, {"micro_batch": 4, "compile": False}, 1.959),
    ("paper", "full", 0, {"micro_batch": 8, "compile": False}, 1.457),
    ("pretrained-lr", "parent-continued", 1, {"micro_batch": 2}, 4.71),
    ("pretrained-lr", "srio", 1, {}, 7.08),  # grow.py and train.py, whichever took more
]


@pytest.mark.parametrize(("name", "variant", "stage", "changes", "measured"), MEASURED_GB)
def test_memory_is_estimated_to_a_quarter(name, variant, stage, changes, measured):
    from cluster.budget import memory_gb
    from grid import PRESETS, with_parent

    preset = PRESETS[name]
    if preset.needs_parent:
        preset = with_parent(preset, preset.model, "none")
    run = next(r for r in expand_grid(preset, [variant], [0]) if r.stage == stage)
    found = memory_gb(replace(run, train=run.train | changes))
    assert 0.75 < found / measured < 1.25, found


@pytest.fixture(scope="module")
def corpus_args(tmp_path_factory) -> list[str]:
    """A real preset on a small text of our own, prepared once."""
    folder = tmp_path_factory.mktemp("texts")
    words = "the wide model keeps what the small one learned and reads on".split()
    for i in range(60):
        text = " ".join(words[(i * j) % len(words)] for j in range(1, 400))
        (folder / f"{i}.txt").write_text(text)
    return ["--preset", "smoke", "--source", f"file:{folder}", "--corpora", str(folder / "c")]


def table(out: Path) -> pd.DataFrame:
    frame = pd.read_csv(out / "table.csv")
    return frame.drop(columns=[c for c in frame if c.startswith(VOLATILE) or "wall" in c])


def test_killed_grid_goes_on_to_the_same_table(corpus_args, tmp_path):
    grid = ["--local", *corpus_args, "--only", "scratch,nrio,srio-gate", "--seeds", "0"]
    whole = call(*grid, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    rows = {path.stem for path in (tmp_path / "whole" / "rows").glob("*.json")}
    assert rows == {"parent-s0", "scratch-s0", "nrio-s0", "srio-gate-s0"}
    assert (tmp_path / "whole" / "loss_curves.png").stat().st_size > 10_000

    out = tmp_path / "killed"
    process = subprocess.Popen(
        command(*grid, "--out", out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.time() + 120
    while not (out / "rows" / "parent-s0.json").exists() and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)  # children are starting, growing or training now
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = call(*grid, "--out", out)
    assert again.returncode == 0, again.stderr
    pd.testing.assert_frame_equal(table(tmp_path / "whole"), table(out), check_exact=True)

    began = time.time()
    third = call(*grid, "--out", out)
    assert third.returncode == 0 and time.time() - began < 30
    looked = call("--status", "--out", out)  # it knows what it was asked for
    assert looked.returncode == 0 and "\n4 done of 4\n" in looked.stdout, looked.stdout
    assert "Δ val" in looked.stdout and f"wrote {out}/loss_curves.png" in looked.stdout
    row = json.loads((out / "rows" / "nrio-s0.json").read_text())
    assert row["parent"]["hash"] == row["lineage"][0]["hash"]
    assert row["tokens"]["total"] == row["tokens"]["parent"] + row["tokens"]["stage"]


def test_chain_counts_what_it_spent_and_restarts_the_gate(tmp_path):
    """16 -> 24 -> 32: every child names its parent, costs add up, ages reach MRIO."""
    from dataclasses import asdict

    from analysis import aggregate
    from analysis.rows import load_rows
    from cluster.execute import execute
    from data.prepare import PrepareConfig, prepare
    from grid import expand_grid

    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i} grows " * 150)
    source = f"file:{tmp_path / 'texts'}"
    data = prepare(PrepareConfig(source=source, tokenizer="byte", out=tmp_path / "c"))
    shared = {"preset": "smoke-chain", "data": str(data), "command": "test"}
    shared["code"] = {"commit": None, "dirty": False}
    runs = expand_grid("smoke-chain", ["nrio", "full", "mrio", "srio"], [0])
    for run in runs:
        execute(str(tmp_path), run.run_id, {**shared, "run": asdict(run)})
    rows = {row["run_id"]: row for row in load_rows(tmp_path)}
    first, second = rows["full-s0-g1"], rows["full-s0-g2"]
    assert first["parent"]["hash"] == rows["parent-s0"]["lineage"][-1]["hash"]
    assert second["parent"]["hash"] == first["lineage"][-1]["hash"]
    assert [entry["d_model"] for entry in second["lineage"]] == [16, 24, 32]
    for what in ("tokens", "flops"):
        assert second[what]["parent"] == first[what]["total"]
        assert second[what]["total"] == second[what]["parent"] + second[what]["stage"]
    for name in ("full-s0-g1", "full-s0-g2"):
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        alphas = [json.loads(line).get("alpha") for line in lines if "loss" in json.loads(line)]
        assert alphas[0] == 0 and alphas[-1] is None
    same = [rows[f"{v}-s0-g1"]["metrics"]["val_loss"] for v in ("mrio", "srio")]
    later = [rows[f"{v}-s0-g2"]["metrics"]["val_loss_start"] for v in ("mrio", "srio")]
    assert same[0] == same[1] and later[0] != later[1]  # one older age, then two
    table = aggregate.table(list(rows.values()))
    assert set(table["stage"]) == {0, 1, 2}


# ---- check, lock, write: in this order


@pytest.fixture
def main(monkeypatch, capsys, corpus_folder):
    """run_ablations.py in this process, on a prepared corpus: (exit code, stdout, stderr)."""
    monkeypatch.setattr(run_ablations, "prepare_corpus", lambda *_: corpus_folder)
    capsys.readouterr()

    def call_main(*words: object) -> tuple:
        monkeypatch.setattr(sys, "argv", ["run_ablations.py", *map(str, words)])
        try:
            run_ablations.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call_main


@pytest.fixture
def nothing_starts(monkeypatch):
    """Whoever prepares a corpus, starts a run or submits one fails the test."""

    def started(*arguments, **options):
        raise AssertionError("something was started before everything was checked")

    monkeypatch.setattr(run_ablations, "prepare_corpus", started)
    monkeypatch.setattr(run_ablations.cluster, "run_local", started)
    monkeypatch.setattr(run_ablations.cluster, "submit_slurm", started)


def write_rows(out: Path, corpus: Path, variant="scratch", seeds=(0, 1), **changes) -> list[dict]:
    """Rows of preset smoke as its runs would leave them."""
    found = []
    for run in expand_grid("smoke", [variant], list(seeds)):
        row = synthetic_rows.row(run.variant, run.seed, run.stage)
        row |= {"run_id": run.run_id, "preset": "smoke", "config": run.plan}
        row |= {"config_hash": checkpoint.hash_json(run.plan)}
        row |= {"manifest_hash": Corpus(corpus).manifest_hash} | changes
        write_row(row_path(out, run.run_id), row)
        found.append(row)
    return found


SMOKE = ("--local", "--preset", "smoke", "--only", "scratch", "--seeds", "0-1", "--out")


def test_two_presets_in_one_folder_are_refused_before_training(
    main, nothing_starts, tmp_path, corpus_folder
):
    write_rows(tmp_path, corpus_folder, seeds=[7])
    with pytest.raises(UserError, match="scratch-s7.json is of preset smoke, not tiny"):
        main("--local", "--preset", "tiny", "--only", "nrio", "--out", tmp_path)
    with pytest.raises(UserError, match="is of preset smoke, not tiny"):
        main("--status", "--preset", "tiny", "--out", tmp_path)


def test_rows_of_another_plan_are_refused_before_training(
    main, nothing_starts, tmp_path, corpus_folder
):
    write_rows(tmp_path, corpus_folder, config_hash="0" * 64)
    with pytest.raises(UserError, match="scratch-s0.json is the row of another configuration"):
        main(*SMOKE, tmp_path)


def test_rows_that_do_not_go_together_are_refused_before_training(
    main, nothing_starts, tmp_path, corpus_folder
):
    write_rows(tmp_path, corpus_folder, seeds=[7])
    write_rows(tmp_path, corpus_folder, seeds=[8], hardware={"gpu": "x", "dtype": "bfloat16"})
    with pytest.raises(UserError, match="hardware.dtype is float32 .* bfloat16"):
        main(*SMOKE, tmp_path)


def test_rows_of_another_corpus_are_refused(main, monkeypatch, tmp_path, corpus_folder):
    monkeypatch.setattr(run_ablations.cluster, "run_local", None)
    write_rows(tmp_path, corpus_folder, seeds=[7], manifest_hash="0" * 64)
    with pytest.raises(UserError, match="scratch-s7.json was made on another corpus"):
        main(*SMOKE, tmp_path)


def test_places_settings_and_slurm_are_looked_for_before_a_corpus_is_prepared(
    main, nothing_starts, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no folder to write in"):
        main(*SMOKE, tmp_path / "file" / "out")
    slurm = ("--slurm", "--preset", "paper", "--out", tmp_path / "out")
    with pytest.raises(UserError, match=r"none\.toml: .*No such file"):
        main(*slurm, "--slurm-config", tmp_path / "none.toml")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch not found"):
        main(*slurm)
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="preset paper needs a GPU per run"):
        main(*slurm)
    assert not (tmp_path / "out").exists()


def test_retry_failed_deletes_nothing_while_another_grid_runs(main, tmp_path, corpus_folder):
    write_rows(tmp_path, corpus_folder, status="diverged", reason="loss is nan at step 12")
    (tmp_path / "runs" / "scratch-s0").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    hold = "import files, sys\nwith files.lock(sys.argv[1], 'x'): print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(tmp_path / "jobs" / "scheduler.lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match=f"is in use by pid {other.pid}"):
            main(*SMOKE, tmp_path, "--retry-failed")
        other.communicate("\n")
    assert [p for p in sorted(tmp_path.rglob("*")) if "jobs" not in p.parts] == before


def test_retry_failed_forgets_what_ended_badly_and_nobody_runs(
    main, tmp_path, corpus_folder, monkeypatch
):
    write_rows(tmp_path, corpus_folder, seeds=[0, 1], status="diverged", reason="nan")
    write_rows(tmp_path, corpus_folder, seeds=[2])
    for i in range(3):
        (tmp_path / "runs" / f"scratch-s{i}").mkdir(parents=True)
    called = []

    def run_local(out, jobs, n, is_done, on_progress, prepare):
        called.append({job.run_id: is_done(job.run_id) for job in jobs})
        prepare({"scratch-s1"})
        called.append({job.run_id: is_done(job.run_id) for job in jobs})
        return {}

    monkeypatch.setattr(run_ablations.cluster, "run_local", run_local)
    grid = ("--local", "--preset", "smoke", "--only", "scratch", "--seeds", "0-2", "--out")
    code, said, _ = main(*grid, tmp_path, "--retry-failed")
    assert called[1] == {"scratch-s0": False, "scratch-s1": True, "scratch-s2": True}
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"scratch-s1", "scratch-s2"}
    assert code == 1 and "diverged: scratch-s1: nan" in said


# ---- how it ends


def test_exit_code_says_whether_every_run_ended_well(main, tmp_path, corpus_folder):
    write_rows(tmp_path, corpus_folder)
    code, said, _ = main(*SMOKE, tmp_path)
    assert code == 0 and "Δ val" in said
    write_rows(tmp_path, corpus_folder, seeds=[1], status="diverged", reason="loss is nan at 12")
    code, said, _ = main(*SMOKE, tmp_path)  # a leaf; a parent is no other case
    assert code == 1 and "diverged: scratch-s1: loss is nan at 12" in said and "Δ val" in said
    assert "--retry-failed" in said


def test_a_grid_without_any_row_says_why_and_nothing_else(
    main, tmp_path, corpus_folder, monkeypatch
):
    failed = {f"scratch-s{i}": cluster.Status("failed", "width 7 is odd", "a.log") for i in (0, 1)}
    monkeypatch.setattr(run_ablations.cluster, "run_local", lambda *_, **__: failed)
    code, said, err = main(*SMOKE, tmp_path)
    assert code == 1 and err.count("error") == 0
    assert "failed: scratch-s0: width 7 is odd (log: a.log)" in said and "no rows" not in said


def test_names_with_blanks_around_them(main, nothing_starts):
    code, said, _ = main("--dry-run", "--preset=smoke", "--only", "srio, full ,srio", "--seeds=0")
    assert code == 0 and "3 runs" in said and "\nsrio " in said and "\nfull " in said
    only = ("--only", "mrio@epsilons=0.1,0.2")
    code, said, _ = main("--dry-run", "--preset=smoke-chain", *only, "--seeds=0")
    assert code == 0 and "3 runs" in said and "\nmrio@epsilons=0.1,0.2 " in said


def test_looking_needs_only_the_folder(main, monkeypatch, tmp_path):
    """The runs of every command that OUT was given, not the preset's; named ones where asked."""
    monkeypatch.setattr(
        run_ablations.cluster, "run_local", lambda *_, prepare, **__: prepare(()) or {}
    )
    for only, seed in (("scratch", 0), ("nrio", 1)):
        main(*SMOKE[:3], "--only", only, "--seeds", seed, "--out", tmp_path)
    code, said, _ = main("--status", "--out", tmp_path)
    assert code == 0 and "3 queued of 3" in said and "no GPU found" not in said
    assert all(f"\n{run_id} " in said for run_id in ("scratch-s0", "parent-s1", "nrio-s1"))
    assert "1 queued of 1" in main("--status", *SMOKE[1:5], "--seeds=0", "--out", tmp_path)[1]
    (tmp_path / "grid.json").write_text('{"preset": "smoke", "runs": [{"what": 1}]}')
    with pytest.raises(UserError, match="grid.json is no list of runs .* delete it"):
        main("--status", "--out", tmp_path)


def test_looking_at_a_grid_on_a_read_only_file_system(tmp_path, corpus_folder):
    """Somebody else's results: --status shows them; what must write says where it cannot."""
    out = tmp_path / "out"
    write_rows(out, corpus_folder)
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    read_only = ["unshare", "-rm", "sh", "-c", mount, str(out)]
    if subprocess.run([*read_only, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    def there(*arguments: str) -> subprocess.CompletedProcess:
        words = [*read_only, *command(*arguments, "--preset", "smoke", "--only", "scratch")]
        return subprocess.run([*words, "--out", str(out)], capture_output=True, text=True)

    looked = there("--status")
    assert looked.returncode == 0 and "2 done of 2" in looked.stdout, looked.stderr
    assert "Δ val" in looked.stdout and looked.stderr == ""
    refused = there("--local")
    assert refused.returncode == 2 and refused.stderr.startswith("error: --out is "), refused.stderr
    words = [*read_only, sys.executable, "-m", "analysis.aggregate", str(out)]
    named = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert named.stderr.startswith(f"error: Read-only file system: {out}/table.csv; choose a place")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
