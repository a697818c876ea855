"""Figures: files appear, the same rows give the same bytes, odd inputs are drawn or refused."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis import aggregate
from errors import UserError
from figures import loss_curves, loss_table, style
from grid import VARIANTS
from tests.synthetic_rows import diverged, grid, row, write

ROOT = Path(aggregate.__file__).parents[1]


@pytest.mark.parametrize("module", [loss_curves, loss_table])
def test_files_and_determinism(tmp_path, module):
    rows = grid(("scratch", "nrio", "srio"), range(2))
    first = module.draw(rows, tmp_path / "a")
    again = module.draw(copy.deepcopy(rows), tmp_path / "b")
    assert [p.suffix for p in first] == [".png", ".svg"]
    for one, two in zip(first, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert b"<dc:date>" not in first[1].read_bytes()
    rows[-1]["metrics"]["val_loss"] += 0.01
    rows[-1]["curve"]["val"][-1] += 0.01
    assert module.draw(rows, tmp_path / "c")[0].read_bytes() != first[0].read_bytes()


@pytest.mark.parametrize("module", [loss_curves, loss_table])
def test_one_seed_a_diverged_run_and_a_dead_variant(tmp_path, module):
    rows = grid(("scratch", "nrio", "srio", "full", "zero-pad"), [0])
    rows = [diverged(r) if r["variant"] in ("full", "zero-pad") else r for r in rows]
    rows[-1]["curve"] = {}
    module.draw(rows, tmp_path)


@pytest.mark.parametrize("module", [loss_curves, loss_table])
def test_one_picture_per_stage(tmp_path, module):
    rows = grid(("nrio", "srio"), [0, 1], 2) + grid(("nrio", "srio"), [0, 1], 3)
    names = {path.stem for path in module.draw(rows, tmp_path)}
    assert len(names) == 2 and all("_stage" in name for name in names)


def test_a_longer_stage_of_its_own_does_not_take_the_panel_of_the_others():
    rows = grid(("nrio", "srio"), [0, 1]) + grid(("parent-continued-flops",), [0, 1])
    usual = max(rows[0]["curve"]["val_tokens"]) / 1e6
    for one in rows[-2:]:
        one["curve"]["val_tokens"] = [2 * t for t in one["curve"]["val_tokens"]]
    zoom = loss_curves._picture(rows).axes[1]
    assert zoom.get_xlim()[1] == pytest.approx(usual)


@pytest.mark.parametrize("module", [loss_curves, loss_table])
def test_incomparable_rows_are_refused(tmp_path, module):
    rows = grid()
    rows[0]["manifest_hash"] = "cd" * 32
    with pytest.raises(UserError, match="manifest"):
        module.draw(rows, tmp_path)
    with pytest.raises(UserError, match="lacks"):
        module.draw(grid()[1:], tmp_path)
    module.draw(grid()[1:], tmp_path, allow_missing=True)


def test_nothing_grown_or_no_baseline_is_no_error(tmp_path):
    """A grid of part of the variants ends with the pictures that it has."""
    assert len(loss_curves.draw(grid(("scratch",)), tmp_path)) == 2
    assert loss_table.draw(grid(("srio", "full")), tmp_path) == []
    assert loss_table.draw(grid(("nrio",)), tmp_path) == []


def test_mean_curve_is_the_mean():
    rows = grid(("nrio",), range(3))
    curve = loss_curves.curves(rows)[0]
    np.testing.assert_allclose(curve.mean, np.mean([r["curve"]["val"] for r in rows], axis=0))
    np.testing.assert_allclose(curve.tokens, np.array(rows[0]["curve"]["val_tokens"]) / 1e6)


@pytest.mark.parametrize("offsets, shown", [
    ((0.0, 0.01, 0.02, 4.0), (0.0, 0.02)), ((0.0, 4.0), (0.0, 4.0)), ((0.0, 0.0, 4.0), (0.0, 4.0)),
])  # fmt: skip
def test_what_is_far_behind_does_not_flatten_the_rest(offsets, shown):
    names = ("nrio", "srio", "full", "zero-pad")
    rows = [row(name, offset=x) for name, x in zip(names, offsets, strict=False)]
    figure = loss_curves._picture(rows)
    low, high = figure.axes[1].get_ylim()
    finals = [r["metrics"]["val_loss"] for r in rows]
    inside = [x for x, final in zip(offsets, finals, strict=True) if low <= final <= high]
    assert (min(inside), max(inside)) == shown
    if len(names := names[: len(offsets)]) > 2:  # nrio is what the table compares with
        low, high = loss_table._picture(rows, "nrio").axes[0].get_xlim()
        kept = [d for r in rows[1:] if low <= (d := r["metrics"]["val_loss"] - finals[0]) <= high]
        assert (len(kept) == len(names) - 1) == (shown[1] == max(offsets))


def test_every_variant_looks_different():
    looks = style.looks([*VARIANTS, "something-new"])
    # black on brown etc. never relies on colour alone: (colour, dash, marker) differ
    assert len({str(look) for look in looks.values()}) == len(VARIANTS) + 1
    assert style.color_of("srio-lo") == style.color_of("srio@epsilon=1") != style.OTHER
    assert style.color_of("unknown") == style.OTHER


def test_labels_are_moved_apart_and_stay_inside():
    places = style.spread_labels([0.5, 0.5, 0.5, 0.99, 1.0], 0.1, 0.0, 1.0)
    assert np.diff(places).min() >= 0.1 - 1e-12 and min(places) >= 0 and max(places) <= 1
    crowded = style.spread_labels([0.5] * 30, 0.1, 0.0, 1.0)
    assert min(crowded) >= -1e-9 and max(crowded) <= 1 and np.diff(crowded).min() > 0
    assert style.spread_labels([], 0.1, 0, 1) == []


@pytest.mark.parametrize("script", ["loss_curves", "loss_table"])
def test_command_from_the_repo_root(tmp_path, script):
    write([row(v, s) for v in ("scratch", "nrio", "srio") for s in range(2)], tmp_path)
    command = [sys.executable, "-m", f"figures.{script}", str(tmp_path), "--out", f"{tmp_path}/f"]
    # what every notebook leaves in the environment of the commands that it starts
    env = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {p.name for p in (tmp_path / "f").iterdir()} == {f"{script}.png", f"{script}.svg"}
    missing = subprocess.run(
        [*command[:3], "absent", *command[4:]], cwd=ROOT, capture_output=True, text=True
    )
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1
