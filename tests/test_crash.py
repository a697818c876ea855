"""The crash test, short: a few kills pass, and code that writes in place is found out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checks import crash
from errors import exit_on_user_error

ROOT = Path(__file__).resolve().parents[1]
SABOTAGED = """
import sys; sys.path.insert(0, sys.argv.pop(1))
import json, time
import cluster.execute, train
from checks import crash
from checks.crash import Kill

def write_row(path, row):  # a row that appears bit by bit
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(row)
    with open(path, "w") as file:
        for part in (text[:100], text[100:]):
            file.write(part)
            file.flush()
            time.sleep(0.5)

def resume(run, optimizer, names):  # Adam moments that a resumed run forgets
    state = original(run, optimizer, names)
    optimizer.state.clear()
    return state

original, train.resume = train.resume, resume
cluster.execute.write_row = write_row
moments = [Kill("before", number=60, kind="checkpoint"), Kill("after", 0.2, 2, "row")]
crash.choose = lambda *_: moments.pop(0)
crash.MOST_KILLS = 1
crash.main()
"""


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_few_kills_change_nothing(tmp_path):
    words = ["--kills", "5", "--seed", "1", "--out", "work", "--report", "report"]
    done = python("-m", "checks.crash", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "crash.json").read_text())
    assert report["kills"] == 5 and report["failures"] == []
    assert sum(sum(n.values()) for n in report["by_kind"].values()) == 5
    assert (tmp_path / "report" / "crash.md").read_text() in done.stdout
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_forgotten_moments_and_torn_rows_are_found(tmp_path):
    (tmp_path / "sabotaged.py").write_text(SABOTAGED)
    words = ["--kills", "2", "--out", "work", "--report", "report"]
    done = python("sabotaged.py", str(ROOT), *words, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failures = json.loads((tmp_path / "report" / "crash.json").read_text())["failures"]
    assert (
        "chain-000, end: parent-s0: weights differ from those of an uninterrupted run" in failures
    )
    assert any("chain-001, death 1 (row): half-written row" in what for what in failures)
    assert (tmp_path / "work" / "chain-001.log").exists()  # kept, for whoever looks into it


@pytest.mark.parametrize(
    ("option", "message"), [("--out=.", "not empty"), ("--kills=0", "1..100000")]
)
def test_a_used_folder_and_silly_numbers_are_refused(
    tmp_path, monkeypatch, capsys, option, message
):
    (tmp_path / "mine").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["crash.py", option])
    with pytest.raises(SystemExit, match="2"):
        exit_on_user_error(crash.main)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
