"""Rows of two dtypes side by side: paired by seed, from rows alone."""

import pytest

from analysis import precision
from analysis.precision import PrecisionConfig, grown_rows, minus, moved, page, paired
from errors import UserError
from tests.synthetic_rows import diverged, grid, row, write

VARIANTS = ("scratch-flops", "nrio", "nrio-policies", "full")


@pytest.fixture
def folders(tmp_path):
    """float32 rows, and bfloat16's: every loss 0.01 higher, full's 0.03 and by its seed."""
    base, other = grid(VARIANTS), grid(VARIANTS)
    for one in other:
        more = 0.03 + 0.001 * one["seed"] if one["variant"] == "full" else 0.01
        for name in ("train_loss", "val_loss"):
            one["metrics"][name] += more
        one["hardware"]["dtype"], one["tokens_per_s"] = "bfloat16", 50_000.0
    write(base, tmp_path / "tiny-main")
    write(other, tmp_path / "tiny-bf16")
    return tmp_path


def test_losses_and_differences_are_paired_by_seed(folders):
    base, other = (grown_rows(folders / name) for name in ("tiny-main", "tiny-bf16"))
    nrio = moved(base, other, {"nrio": 1}, precision.TRAIN)
    full = moved(base, other, {"full": 1}, precision.VAL)
    assert nrio.n == 3 and nrio.mean == pytest.approx(0.01) and nrio.half < 1e-9
    assert full.mean == pytest.approx(0.031) and full.low > 0.02
    shift = moved(base, other, minus(("full", "nrio")), precision.TRAIN)
    assert shift.mean == pytest.approx(0.021)
    assert moved(base, other, minus(("nrio", "scratch-flops")), precision.TRAIN).mean == (
        pytest.approx(0, abs=1e-9)
    )


def test_the_page_says_both_dtypes_and_speeds(folders):
    base, other = (grown_rows(folders / name) for name in ("tiny-main", "tiny-bf16"))
    text = page(base, other, PrecisionConfig())
    assert "# Training in bfloat16" in text and "50,000 / 75,000" in text
    assert "+0.0310" in text and "bfloat16 less float32" in text


def test_without_rows_of_both_nothing_is_written(folders, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["precision", "--results", str(folders), "--other", "absent"])
    precision.main()
    assert "no rows in" in capsys.readouterr().out
    assert not (folders / "precision.md").exists()


def test_only_runs_that_both_finished_are_compared():
    base, other = grid(VARIANTS), [*grid(VARIANTS, range(2)), row("srio"), diverged(row("nrio", 2))]
    base, other = paired(base, [r for r in other if r["status"] == "done"])
    assert {(r["variant"], r["seed"]) for r in other} == {
        (v, s) for v in VARIANTS for s in range(2)
    }
    assert [r["run_id"] for r in base] == [r["run_id"] for r in other]
    assert moved(base, other, {"nrio": 1}, precision.TRAIN).n == 2


def test_a_diverged_row_does_not_count(folders):
    write([diverged(row("nrio", 7))], folders / "tiny-bf16")
    assert 7 not in {r["seed"] for r in grown_rows(folders / "tiny-bf16")}


def test_rows_that_differ_in_more_than_the_dtype_are_refused():
    base, other = grid(VARIANTS), grid(VARIANTS)
    other[0]["config"]["lr"] = 2e-3
    with pytest.raises(UserError, match="also differ in .*lr"):
        paired(base, other)
