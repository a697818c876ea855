"""Loss by steps after growth, read off the rows' curves."""

import pytest

from analysis import lag
from analysis.lag import rise, table
from tests.synthetic_rows import row, write


def rows_with(variant: str, losses: list[float], seeds=range(3)) -> list[dict]:
    """Rows at 0, 10 and 40 steps of 10 tokens; the parent's loss is 3."""
    found = []
    for seed in seeds:
        one = row(variant, seed)
        one["config"] |= {"batch_size": 2, "block_size": 5}
        one["parent"]["val_loss"] = 3.0
        one["curve"] |= {"val_tokens": [0, 100, 400], "val": [x + 0.1 * seed for x in losses]}
        found.append(one)
    return found


ROWS = rows_with("nrio", [3.5, 3.2, 2.6]) + rows_with("srio", [3.0, 3.3, 2.9])


def test_against_a_variant_and_against_the_parent():
    paired = rise(ROWS, "srio", 10, "nrio")
    assert paired.n == 3 and paired.mean == pytest.approx(0.1) and paired.half < 1e-9
    alone = rise(ROWS, "srio", 25, "")  # half way between 3.3 and 2.9, seeds 0.0, 0.1, 0.2 above
    assert alone.mean == pytest.approx(0.2) and alone.half > 0.1
    assert rise(ROWS, "srio", 41, "").n == 0  # beyond the end of the curve


def test_the_table_names_what_it_has():
    text = "\n".join(table(ROWS, [0, 41], "nrio"))
    assert "srio" in text and "-0.5000" in text and "—" in text and "nrio" not in text


@pytest.mark.parametrize("options, said", [
    (["--steps", "1,x"], "give whole numbers"), (["--minus", "absent"], "choose one of nrio, srio"),
])  # fmt: skip
def test_refusals(tmp_path, monkeypatch, options, said):
    monkeypatch.setattr("sys.argv", ["lag", str(write(ROWS, tmp_path)), *options])
    with pytest.raises(lag.UserError, match=said):
        lag.main()
