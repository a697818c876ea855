"""The grid's command line: refusals, budgets, and a grid that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

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

    monkeypatch.setattr(budget, "tokens_per_second", lambda cfg, jobs: 1e5)
    preset = PRESETS["paper"]
    runs = expand_grid("paper", list(preset.variants), list(preset.seeds))
    budget.print_budget("paper", preset, runs, 1)
    text = capsys.readouterr().out
    assert "23,988,480" in text and "44,240,256" in text and "884,801,536" in text
    assert "45 runs" in text and f"{sum(run.tokens for run in runs):,} tokens" in text


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
    row = json.loads((out / "rows" / "nrio-s0.json").read_text())
    assert row["parent"]["hash"] == row["lineage"][0]["hash"]
    assert row["tokens"]["total"] == row["tokens"]["parent"] + row["tokens"]["stage"]


def test_rows_of_another_plan_are_refused(corpus_args, tmp_path):
    out = tmp_path / "out"
    (out / "rows").mkdir(parents=True)
    row = {"status": "done", "config_hash": "0" * 64}
    (out / "rows" / "nrio-s0.json").write_text(json.dumps(row))
    done = call("--local", *corpus_args, "--only", "nrio", "--seeds", "0", "--out", out)
    assert done.returncode == 2 and "nrio-s0" in done.stderr


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
