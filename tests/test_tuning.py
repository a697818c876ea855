"""The table of what was tuned on what: from rows alone, and never on a judged seed."""

import subprocess
import sys
from pathlib import Path

import pytest

from analysis.tuning import FIRST_SEED, sweeps, table
from grid import PRESETS, TUNING, VARIANTS, canonical, expand_grid, tuning
from tests.synthetic_rows import diverged, row, write

ROOT = Path(__file__).parents[1]


def tuned(variant: str, seed: int, loss: float, **train) -> dict:
    one = row(variant, seed)
    one["metrics"]["val_loss"] = loss
    one["config"] = {"train": {"lr": 0.004, "steps": 100, "warmup_steps": 5} | train,
                     "grow": {"epsilon": 0.5}}  # fmt: skip
    return one


def test_a_sweep_joins_the_variants_own_value():
    rows = [tuned("srio", s, 3.0) for s in (100, 101)]
    rows += [tuned(f"srio@epsilon={e}", s, loss) for e, loss in ((0.25, 2.9), (0.75, 3.1))
             for s in (100, 101)]  # fmt: skip
    rows += [tuned("srio@warmup=0.2", s, 2.8) for s in (100, 101)]
    epsilon, warmup = sweeps("tiny-tuning", rows)
    assert epsilon.mean("0.5") == 3.0 and epsilon.best == "0.25" and epsilon.at_edge
    assert list(sorted(warmup.losses)) == ["0.05", "0.2"] and warmup.best == "0.2"
    text = table([epsilon, warmup])
    assert "**0.25: 2.9000**, 0.5: 3.0000, 0.75: 3.1000" in text and "100 101" in text


def test_judged_seeds_and_lonely_values_are_not_tuning():
    rows = [tuned(f"srio@epsilon={e}", FIRST_SEED - 1, 3.0) for e in (0.25, 0.75)]
    assert sweeps("x", rows) == []
    assert sweeps("x", [tuned("srio@epsilon=0.25", 100, 3.0)]) == []


def test_a_broken_run_is_never_the_best():
    rows = [tuned("srio", 100, 3.0), diverged(tuned("srio@lr=0.1", 100, 1.0))]
    (sweep,) = sweeps("x", rows)
    assert sweep.best == "0.004" and "0.1: inf" in table([sweep])


def test_the_grid_tunes_every_family_at_the_same_rates():
    rates = {name: values for name, key, values in TUNING if key == "lr"}
    assert len(set(rates.values())) == 1 and {"scratch-flops", "nrio", "full", "ligo"} <= set(rates)
    runs = expand_grid("tiny", tuning(PRESETS["tiny"]), [100])
    names = {run.variant for run in runs} - {"parent"}
    assert set(rates) <= names <= {n for n in names if n.split("@")[0] in VARIANTS}
    for name, key, values in TUNING:  # none is the variant's own, which runs by itself
        own = next(r for r in runs if r.variant == name)
        for value in values:
            other = next(r for r in runs if r.variant == f"{name}@{key}={canonical(value)}")
            assert (own.train, own.grow, own.optimizer) != (
                other.train, other.grow, other.optimizer
            ), (name, key, value)  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("--results", "nowhere")])
def test_the_command(tmp_path, arguments):
    rows = [tuned("nrio", 100, 3.0), tuned("nrio@lr=0.002", 100, 2.9)]
    write(rows, tmp_path / "tiny-tuning")
    where = arguments or ("--results", str(tmp_path))
    command = [sys.executable, "-m", "analysis.tuning", *where, "--out", str(tmp_path / "t.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("0.002: 2.9" in (tmp_path / "t.md").read_text()) == (not arguments)
