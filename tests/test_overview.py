"""Claims of the whole repository: from rows alone, with a reason where nothing ran."""

import math
import re
from pathlib import Path

import pytest

from analysis import overview
from analysis.overview import BEGIN, BY_TEST, END, Study, factor_line, heads, in_readme, lines_of
from analysis.paired import contrast, estimate, measure
from figures import evidence, style
from tests.synthetic_rows import grid, row, write

ROOT = Path(__file__).parents[1]


def known_tests() -> set[str]:
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"def (test_\w+)\(", text))


def test_theory_and_claims_name_tests_that_exist():
    named = re.findall(r"`(test_\w+)`", (ROOT / "THEORY.md").read_text())
    named += [line.rows.split("::")[1] for line in BY_TEST]
    assert len(named) > 20 and set(named) <= known_tests()
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "THEORY.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_claim_has_a_line_even_without_a_row(tmp_path):
    lines = heads(lines_of(tmp_path))
    assert [line.name for line in lines] == [
        *(f"C{i}" for i in range(1, 11)), *(f"S{i}" for i in range(1, 7)),
        *(f"L{i}" for i in range(1, 7)), "R1", "R2", "R3", "R4",
    ]  # fmt: skip
    assert all("not run" in line.verdict or "by test" in line.verdict for line in lines)
    assert all("(" in line.verdict for line in lines)  # with its reason


def test_the_largest_scale_that_decides_is_shown_and_tuning_seeds_are_not_used(tmp_path):
    rows = [row(v, s, offset=o) for v, o in (("nrio", 0), ("full", -0.1), ("ligo", 0.1))
            for s in range(5)]  # fmt: skip
    write(rows, tmp_path / "small")
    large = [row(v, s, offset=o) for v, o in (("nrio", 0), ("full", -0.1), ("ligo", -0.3))
             for s in range(5)]  # fmt: skip
    for one in large:
        one["params"] *= 4
    write(large, tmp_path / "large")
    write([row(v, s) for v in ("nrio", "full", "ligo") for s in range(100, 105)], tmp_path / "tune")
    line = next(line for line in heads(lines_of(tmp_path)) if line.name == "C1")
    assert line.verdict == "not reproduced (elsewhere: reproduced)"
    assert "large" in line.rows and line.n == "5" and "tune" not in str(lines_of(tmp_path))


def test_another_dtype_on_the_same_seeds_is_no_further_evidence(tmp_path):
    for name, preset in (("one", "tiny"), ("two", "tiny-bf16")):
        rows = [row(v, s) | {"preset": preset} for v in ("nrio", "full", "ligo") for s in range(5)]
        write(rows, tmp_path / name)
    assert [s.folder for s in overview.studies(tmp_path)] == ["one"]


@pytest.mark.parametrize("preset, wanted", [("pretrained", "reproduced"), ("tiny", "(n<5)")])
def test_three_seeds_decide_on_a_pretrained_parent_and_nowhere_else(tmp_path, preset, wanted):
    rows = [row(v, s, offset=o) | {"preset": preset} for s in range(3)
            for v, o in (("lossless-pad", -0.1), ("nrio", 0), ("srio", 2), ("full", 1),
                         ("szp", -0.5))]  # fmt: skip
    write(rows, tmp_path / "rows")
    name = "L6" if preset == "pretrained" else "L1"
    line = next(line for line in heads(lines_of(tmp_path)) if line.name == name)
    assert wanted in line.verdict and line.n == "3"


def test_the_page_shows_every_comparison_of_what_it_alone_decides_and_every_command(tmp_path):
    rows = [row(v, s, offset=o) | {"preset": "pretrained", "command": f"grid --only {v}"}
            for s in range(3) for v, o in (("lossless-pad", -0.1), ("nrio", 0), ("srio", 2),
                                           ("full", 1))]  # fmt: skip
    write(rows, tmp_path / "given")
    lines = lines_of(tmp_path)
    line = next(line for line in lines if line.name == "L6")
    assert line.verdict == "reproduced (n = 3)" and "given/table.md" in line.rows
    text = overview.page(lines, overview.studies(tmp_path)).split("## L6")[1].split("\n## ")[0]
    for other in ("nrio", "srio", "full"):
        assert f"| lossless-pad - {other} | train | 3 |" in text
        assert f"- `grid --only {other}`" in text
    assert not any(line.parts for line in lines if line.name[0] == "C")


def test_what_a_learned_operator_pays_stands_beside_its_effect(tmp_path):
    offsets = {"nrio": 0, "nrio-paid": 0.05, "srio": -0.01, "srio-lo": 0.01, "full": -0.03}
    write([row(v, s, offset=o) for v, o in offsets.items() for s in range(5)], tmp_path / "small")
    line = next(line for line in lines_of(tmp_path) if line.name == "C4")
    assert "srio-lo - srio: +0.0" in line.effect and "pays for: -0.0299" in line.effect


def test_readme_block_is_replaced_and_nothing_else():
    text = f"before\n{BEGIN}old\n{END}\nafter"
    assert in_readme(text, ["| new |"]) == f"before\n{BEGIN}| new |\n{END}\nafter"
    assert in_readme("no block", ["| new |"]) == "no block"


def test_committed_claims_are_those_of_the_committed_rows():
    lines = lines_of(ROOT / "results")
    page = overview.page(lines, overview.studies(ROOT / "results"))
    assert (ROOT / "results/claims.md").read_text() == page
    readme = (ROOT / "README.md").read_text()
    block = readme.split(BEGIN)[1].split(END)[0]
    for line in heads(lines):
        assert f"| {line.name}" in block and line.text in block


def test_trend_by_hand():
    points = [(x, estimate({s: 2 * x + 0.1 * (s - 1) for s in range(3)})) for x in (0.0, 1.0, 2.0)]
    slope, half, p = overview.trend(points)
    assert slope == pytest.approx(2) and 0 < half < 0.2 and p < 1e-6


def test_loss_by_lag_is_read_off_the_curve():
    one = row("nrio")
    one["config"] |= {"batch_size": 2, "block_size": 5}
    one["curve"] |= {"val_tokens": [0, 100, 400], "val": [5.0, 4.0, 1.0]}
    assert measure(one, "lag.10") == 4.0 and measure(one, "lag.5") == 4.5
    assert math.isnan(measure(one, "lag.41"))
    found = contrast([one, row("srio") | {"config": one["config"], "curve": one["curve"]}],
                     {"nrio": 1, "srio": -1}, "lag.20")  # fmt: skip
    assert found.by_seed == {0: 0.0}


def study(preset: str, width: int, effect: float) -> Study:
    rows = [row(v, s, 1, o) for v, o in (("nrio", effect), ("scratch-flops", 0.0))
            for s in range(5)]  # fmt: skip
    for one in rows:
        one["preset"] = preset
        if one["parent"]:
            one |= {"d_model": width, "lineage": [{"d_model": 64}, {"d_model": width}]}
    return Study(preset, 1, True, rows)


def test_growth_factor_needs_scratch_to_win_somewhere():
    rising = [study(f"tiny-x{f:g}", int(64 * f), e) for f, e in ((1.5, -0.1), (2, -0.2), (4, 0.1))]
    assert factor_line(rising).verdict == "reproduced"
    assert "not reproduced up to 2×" in factor_line(
        [study(f"tiny-x{f:g}", int(64 * f), -0.1 * f) for f in (1.25, 1.5, 2)]
    ).verdict  # fmt: skip
    assert "not run" in factor_line(rising[:2]).verdict


def test_pictures_are_drawn_where_rows_are_and_skipped_where_not(tmp_path):
    style.setup()
    assert evidence.scale([]) is evidence.forest([]) is evidence.epsilon([]) is None
    assert evidence.staircase([]) is evidence.gradients([]) is evidence.policies([]) is None
    rows = grid(("nrio", "srio", "full", "ligo"), range(5), 1)
    found = [Study("tiny", 1, True, rows)]
    for make in (evidence.scale, evidence.forest):
        assert style.save(make(found), tmp_path, make.__name__)[0].stat().st_size > 10_000
    assert style.save(evidence.rotation(), tmp_path, "rotation")
