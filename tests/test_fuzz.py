"""A short sweep of checks.fuzz, and the judge itself: it must find what it is there to find."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checks.fuzz import damage, judge
from checks.fuzz.judge import Case
from errors import UserError

ROOT = Path(__file__).parents[1]


def test_a_short_sweep_has_no_fault(tmp_path):
    command = [sys.executable, "-m", "checks.fuzz", "--cases", "40", "--seed", "7"]
    done = subprocess.run(
        [*command, "--real", "0", "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "fuzz.json").read_text())
    assert found["cases"] >= 40 and found["faults"] == 0 and len(found["groups"]) == 12
    assert sum(g["refused"] for g in found["groups"].values()) > 25


def test_the_committed_report_is_whole_and_without_faults():
    found = json.loads((ROOT / "results" / "fuzz.json").read_text())
    assert found["cases"] >= 300 and found["faults"] == 0 and found["commands"]["cases"] >= 10
    assert found["most_cpu_s"] < judge.CPU_S and found["most_memory_mb"] < judge.MEMORY_MB
    assert found["command"] in (ROOT / "results" / "fuzz.md").read_text()


# ---- programs that end badly, one each way, and two that end well


def good(path: Path):
    raise UserError(f"{path} is bad; choose another")


def accepts(path: Path):
    pass


def crashes(path: Path):
    raise ValueError(path)


def exits_1(path: Path):
    sys.exit(1)


def says_nothing_useful(path: Path):
    raise UserError("something is wrong")


def says_two_lines(path: Path):
    print("warning: this and that", file=sys.stderr)
    good(path)


def writes_first(path: Path):
    Path("half.json").write_text("{")
    good(path)


def writes_elsewhere(path: Path):
    Path("../notes/escaped").write_text("")
    good(path)


def unpickles(path: Path):
    pickle.loads(pickle.dumps(Path("x")))
    good(path)


def loops(path: Path):
    while True:
        pass


def allocates(path: Path):
    np.ones(40_000_000)
    good(path)


ENDINGS = [
    (good, ""),
    (accepts, "was accepted"),
    (crashes, "exit 70"),
    (exits_1, "exit 1"),
    (says_nothing_useful, "names none of"),
    (says_two_lines, "2 lines"),
    (writes_first, "wrote or changed half.json"),
    (writes_elsewhere, "open outside of its folder"),
    (unpickles, "unpickled pathlib"),
    (loops, "CPU time"),
    (allocates, "allocated"),
]


@pytest.mark.parametrize(
    "program, fault", ENDINGS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_judge_sees_every_bad_ending(program, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "CPU_S", 1)
    monkeypatch.setattr(judge, "MEMORY_MB", 200)
    case = Case("test", "test", f"{__name__}:{program.__name__}", ("bad.json",), ("bad.json",))
    verdict = judge.judge(case, tmp_path)
    assert fault in verdict.fault and bool(fault) == bool(verdict.fault), verdict


def test_a_good_run_may_write_only_what_it_should(tmp_path):
    def case(*writes: str) -> Case:
        return Case(
            "test", "test", f"{__name__}:writes", ("out",), (), writes=writes, check=is_there
        )

    assert judge.judge(case("out"), tmp_path).fault == ""
    assert "wrote or changed out" in judge.judge(case("table.csv"), tmp_path).fault


def writes(path: Path):
    path.mkdir()
    (path / "result").write_text("1")


def is_there(folder: Path):
    assert (folder / "out" / "result").read_text() == "1"


def test_spoilt_json_differs_and_the_source_stays_as_it_was():
    value = {"a": [1, {"b": 2}], "c": "d"}
    rng, before = np.random.default_rng(0), json.dumps(value)
    spoilt = [damage.spoil_json(rng, value) for _ in range(200)]
    assert json.dumps(value) == before
    assert all(what and repr(found) != repr(value) for what, found in spoilt)
