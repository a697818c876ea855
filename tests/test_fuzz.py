"""A short sweep of checks.fuzz, and the judge itself: it must find what it is there to find."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.fuzz import __main__ as fuzz
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
    assert found["cases"] >= 40 and found["faults"] == 0 and len(found["groups"]) == 14
    assert sum(g["refused"] for g in found["groups"].values()) > 25


def test_the_report_counts_and_shows_every_fault():
    cfg = fuzz.FuzzConfig(cases=3, seed=5)
    ends = [("a", "refused", "error: x", ""), ("a", "ran", "", ""), ("b", "refused", "", "exit 1")]
    verdicts = [
        judge.Verdict(group, f"case {i}", outcome, line, cpu_s=i / 4, memory_mb=i, fault=fault)
        for i, (group, outcome, line, fault) in enumerate(ends)
    ]
    found = fuzz.report(cfg, verdicts, verdicts[2:])
    assert (found["cases"], found["faults"], found["commands"]["faults"]) == (3, 2, 1)
    assert found["groups"]["a"] == {"refused": 1, "ran": 1, "faults": 0}
    assert found["groups"]["b"] == {"refused": 0, "ran": 0, "faults": 1}
    assert (found["most_cpu_s"], found["most_memory_mb"]) == (0.5, 2)
    text = fuzz.markdown(found)
    assert "python -m checks.fuzz --cases 3 --seed 5`: 3 bad inputs, **2 faults**" in text
    assert "| a | 1 | 1 | 0 |" in text and "- case 0: `error: x`" in text
    assert text.count("**exit 1**") == 2 and "## Faults" in text
    assert "## Faults" not in fuzz.markdown(fuzz.report(cfg, verdicts[:2], []))


def test_a_sweep_with_a_fault_says_so_and_exits_1(tmp_path, monkeypatch, capsys):
    bad = Case("test", "a crash", f"{__name__}:crashes", ("bad.json",), ())
    monkeypatch.setattr(fuzz, "make_world", lambda place: place)
    monkeypatch.setattr(fuzz, "GROUPS", {lambda world: st.just(bad): 1})
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "1", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        fuzz.main()
    assert stop.value.code == 1 and "- a crash: `" in capsys.readouterr().out
    assert json.loads((tmp_path / "fuzz.json").read_text())["faults"] == 1


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


VALUE = {"a": [1, {"b": 2}], "c": "d"}


@given(damage.spoilt_json(VALUE))
def test_spoilt_json_differs_and_the_source_stays_as_it_was(spoilt):
    what, found = spoilt
    assert what and VALUE == {"a": [1, {"b": 2}], "c": "d"}
    assert set(damage.places(VALUE)) == {("a",), ("a", 0), ("a", 1), ("a", 1, "b"), ("c",)}
    kept = [place for place in damage.places(VALUE) if what.startswith(".".join(map(str, place)))]
    assert kept and (repr(found) != repr(VALUE) or "is 1" in what or "is 2" in what)


@given(damage.spoilt_bytes(bytes(range(64))))
def test_spoilt_bytes_differ(spoilt):
    assert spoilt[1] != bytes(range(64))


def test_the_same_seed_draws_the_same_cases_and_no_two_alike(tmp_path, monkeypatch):
    cases = st.integers(0, 30).map(lambda i: Case("test", f"case {i}", "a:b", (), ()))
    monkeypatch.setattr(fuzz, "GROUPS", {lambda world: cases: 1, lambda world: cases: 2})
    first, again, other = (fuzz.draw(30, seed, tmp_path) for seed in (1, 1, 2))
    assert [c.name for c in first] == [c.name for c in again] != [c.name for c in other]
    assert len(first) == 30 and len({c.name for c in first[10:]}) == 20
