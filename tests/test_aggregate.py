"""Aggregation: paired statistics by hand and against scipy, each refusal, honest gaps, claims."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from analysis import aggregate
from analysis import rows as rows_module
from analysis.aggregate import load_rows, markdown, print_table, table, tokens_to_reach, write_table
from analysis.claims import CLAIMS, claims, decisions, margin_of, p_value, verdict
from analysis.paired import contrast, estimate, holm, p_above, p_below
from analysis.rows import matched
from errors import UserError
from files import MAX_JSON
from tests.synthetic_rows import STAGE_TOKENS, diverged, grid, row, write

ROOT = Path(aggregate.__file__).parents[1]


def line(df, variant, stage=2):
    return df[(df.variant == variant) & (df.stage == stage)].iloc[0]


# ---- statistics --------------------------------------------------------------------------------


def test_interval_by_hand():
    # differences 1, 2, 3: mean 2, sd 1, sem 1/sqrt(3), t(.975, 2) = 4.302653
    found = estimate({0: 1.0, 1: 2.0, 2: 3.0})
    assert found.mean == 2
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.p == pytest.approx(0.0741799, rel=1e-5)  # t = 2 sqrt(3)


def test_paired_difference_equals_scipy_ttest_rel():
    rows = grid(seeds=range(5))
    df = table(rows)
    for metric, name in (("val_loss", "val"), ("train_loss", "train")):
        a, b = (
            np.array([r["metrics"][metric] for r in rows if r["variant"] == variant])
            for variant in ("full", "nrio")
        )
        expected = stats.ttest_rel(a, b)
        interval = expected.confidence_interval(0.95)
        got = line(df, "full")
        assert got[f"d_{name}"] == pytest.approx((a - b).mean(), rel=1e-12)
        assert got[f"d_{name}_p"] == pytest.approx(expected.pvalue, rel=1e-9)
        assert got[f"d_{name}_ci"] == pytest.approx((interval.high - interval.low) / 2, rel=1e-9)
        assert got[f"{name}_loss_ci"] == pytest.approx(
            stats.t.ppf(0.975, 4) * a.std(ddof=1) / math.sqrt(5), rel=1e-12
        )


def test_pairing_is_by_seed_not_by_order():
    rows = grid(("nrio", "srio"), range(4))
    other_order = [r for r in rows if r["variant"] == "nrio"]
    other_order += [r for r in reversed(rows) if r["variant"] == "srio"]
    for i, r in enumerate(rows):  # seeds differ, and not evenly: positions would pair wrongly
        r["metrics"]["val_loss"] += 0.1 * r["seed"] ** 2 + 0.001 * (i % 3)
    expected, shuffled = table(rows), table(other_order)
    assert line(shuffled, "srio").d_val == pytest.approx(line(expected, "srio").d_val)
    assert line(shuffled, "srio").d_val_ci < 0.01
    assert line(shuffled, "srio").d_val_ci == pytest.approx(line(expected, "srio").d_val_ci)


def test_unpaired_interval_would_be_wider():
    # seeds differ by 0.004 each; pairing removes that
    got = line(table(grid(seeds=range(5))), "full")
    assert got.d_val_ci < got.val_loss_ci


def test_contrast_of_four_variants():
    values = {"a": (3.0, 5.0), "b": (1.0, 1.0), "c": (2.0, 2.0), "d": (1.0, 3.0)}
    rows = []
    for variant, losses in values.items():
        for seed, loss in enumerate(losses):
            rows.append(row(variant, seed))
            rows[-1]["metrics"]["val_loss"] = loss
    found = contrast(rows, {"a": 1, "b": -1, "c": -1, "d": 1}, "metrics.val_loss")
    assert found.by_seed == {0: 1.0, 1: 5.0}


def test_one_seed_has_no_interval():
    df = table(grid(seeds=[0]))
    got = line(df, "srio")
    assert got.n == 1 and math.isfinite(got.d_val)
    assert math.isnan(got.val_loss_ci) and math.isnan(got.d_val_ci) and math.isnan(got.d_val_p)
    text = next(text for text in markdown(df).splitlines() if text.startswith("| srio "))
    assert "± —" in text and "± 0.0000" not in text and "nan" not in text


def test_baseline_has_no_difference_to_itself():
    got = line(table(grid()), "nrio")
    assert math.isnan(got.d_val) and got.d_val_n == 0


def test_total_flops_and_costs_are_means():
    rows = grid(("nrio", "srio"), range(2))
    rows[0]["wall_s"], rows[1]["wall_s"] = 10.0, 20.0
    got = line(table(rows), "nrio")
    assert got.wall_s == 15 and got.flops_total == pytest.approx(2.1e13)
    assert got.tokens_stage == STAGE_TOKENS


# ---- tokens to reach scratch -------------------------------------------------------------------


def test_tokens_to_reach_interpolates_and_adds_the_operators():
    one = row("srio")
    one["curve"] |= {"val_tokens": [0, 100, 200], "val": [5.0, 4.0, 2.0]}
    assert tokens_to_reach(one, 3.0) == 150
    assert tokens_to_reach(one, 4.5) == 50
    assert tokens_to_reach(one, 6.0) == 0
    assert math.isnan(tokens_to_reach(one, 1.9))
    one["tokens"]["operator"] = 7
    assert tokens_to_reach(one, 3.0) == 157


def test_reach_needs_every_seed_and_counts_the_parent():
    rows = grid(("scratch-flops", "nrio", "srio"), range(2))
    for one in rows:
        if one["variant"] == "scratch-flops":
            one["metrics"]["val_loss"] = 3.0
            one["flops"]["total"] = 2.1e13
        else:
            one["curve"] |= {"val_tokens": [0, STAGE_TOKENS], "val": [4.0, 2.0]}
    rows[-1]["curve"]["val"] = [4.0, 3.5]  # srio, seed 1 never gets there
    df = table(rows)
    assert line(df, "nrio").reach_tokens == 7_000_000 + STAGE_TOKENS / 2
    assert line(df, "nrio").reach_flops == pytest.approx(1e13 + 0.55e13)
    assert line(df, "nrio").reach_saving_pct == pytest.approx(100 * (1 - 1.55 / 2.1))
    assert "8.5 M, 1.55e+13 (26 % saved)" in markdown(df)
    assert math.isnan(line(df, "srio").reach_tokens) and line(df, "srio").reach_seeds == "1/2"
    assert "not reached (1/2 seeds)" in markdown(df)
    assert line(df, "scratch-flops").reach_seeds == ""


def test_the_spike_of_a_gated_run_is_shown_open_too():
    rows = grid(("nrio", "full"), range(2))
    for one in rows:
        gated = one["variant"] == "full"
        one["metrics"] |= {"spike": 0.2, "spike_open": 0.3 if gated else 0.2}
    text = markdown(table(rows))
    assert "+0.200 (+0.300)" in text and text.count("+0.200") == 2


# ---- gaps and failures -------------------------------------------------------------------------


def test_diverged_run_is_shown_and_in_no_mean():
    rows = grid()
    rows = [diverged(r) if (r["variant"], r["seed"]) == ("full", 1) else r for r in rows]
    df = table(rows)
    got = line(df, "full")
    assert (got.n, got.diverged, got.seeds, got.d_val_n) == (2, 1, "0 2", 2)
    text = markdown(df)
    assert "2 (+1 diverged)" in text and "surviving seeds" in text


def test_wholly_diverged_variant_keeps_its_line():
    rows = grid(("nrio",)) + [diverged(r) for r in grid(("full",))]
    df = table(rows)
    assert line(df, "full").n == 0
    assert "0 (+3 diverged)" in markdown(df)


def test_missing_seed_is_refused_by_name():
    rows = [r for r in grid() if (r["variant"], r["seed"]) != ("srio", 2)]
    with pytest.raises(UserError, match="srio lacks 2"):
        table(rows)


def test_allow_missing_uses_common_seeds_and_says_so():
    rows = [r for r in grid() if (r["variant"], r["seed"]) != ("srio", 2)]
    df = table(rows, allow_missing=True)
    assert set(df.n) == {2} and set(df.seeds) == {"0 1"}
    assert "common seeds 0, 1" in markdown(df)


def test_no_common_seed_is_refused():
    with pytest.raises(UserError, match="no seed is common"):
        table(grid(("nrio",), [0]) + grid(("srio",), [1]), allow_missing=True)


def _change(row_, path, value):
    *parents, last = path.split(".")
    target = row_
    for name in parents:
        target = target[name]
    target[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("manifest_hash", "cd" * 32, "manifest"),
        ("preset", "mini", "presets"),
        ("config.lr", 2e-3, "lr is"),
        ("config.growth.operator", "other", "growth.operator"),
        ("config.eval_tokens", 1, "eval_tokens"),
        ("config.last_tokens", 1, "last_tokens"),
        ("config.batch_size", 1, "batch_size"),
        ("hardware.dtype", "bfloat16", "dtype"),
        ("tokens.stage", 1, "stage tokens"),
        ("seeds.data", 77, "seeds.data"),
        ("parent.hash", "f" * 64, "same parent"),
    ],
)
def test_incomparable_rows_are_refused(path, value, message):
    rows = grid()
    odd = next(r for r in rows if (r["variant"], r["seed"]) == ("srio", 1))
    _change(odd, path, value)
    with pytest.raises(UserError, match=message) as caught:
        table(rows)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        claims(rows)


@pytest.mark.parametrize("name", ["seed", "data_seed", "out", "device", "threads"])
def test_seeds_and_paths_may_differ_between_seeds(name):
    rows = grid()
    rows[0]["config"][name] = "elsewhere"
    table(rows)


def test_operator_tokens_may_come_out_of_the_stage():
    rows = grid()
    for one in rows:
        if one["variant"] == "srio":
            one["tokens"] |= {"operator": 1000, "stage": STAGE_TOKENS - 1000}
    table(rows)


def test_unknown_baseline_lists_the_choices():
    with pytest.raises(UserError, match="'nope'.*scratch, .*nrio"):
        table(grid(), baseline="nope")


def test_without_nrio_there_are_no_differences_and_a_note():
    df = table(grid(("scratch", "srio")))
    assert df.d_val.isna().all() and "no row of nrio" in markdown(df)


def test_longer_run_may_average_over_a_longer_window_and_it_is_noted():
    rows = grid()
    for one in rows:
        if one["variant"] == "scratch-flops":
            one["config"]["last_tokens"] = 600_000
    assert "of scratch-flops is a mean over the last 600000 tokens" in markdown(table(rows))
    rows[0]["config"]["last_tokens"] = rows[1]["config"]["last_tokens"] = 1
    with pytest.raises(UserError, match="last_tokens"):
        table(rows)


def test_variant_with_overrides_is_a_variant_beside_its_original():
    df = table(grid(("srio@epsilon=0.25@lr=0.001", "nrio", "srio", "full")))
    assert list(df.variant) == ["nrio", "srio", "srio@epsilon=0.25@lr=0.001", "full"]


def test_dirty_rows_and_commits_are_noted_not_refused():
    rows = grid()
    rows[0]["dirty"], rows[1]["commit"] = True, "1" * 40
    text = markdown(table(rows))
    assert "uncommitted working tree: scratch" in text and "2 commits" in text


def _chain():
    """Two stages; in the second each variant grows from its own first-stage result."""
    rows = grid(("nrio", "srio"), range(2), stage=2)
    for one in grid(("nrio", "srio"), range(2), stage=3):
        one["parent"] |= {"run_id": f"{one['variant']}-s{one['seed']}-g2", "hash": one["variant"]}
        rows.append(one)
    return rows


def test_chain_has_one_table_per_stage_with_its_own_parents():
    df = table(_chain())
    assert list(df.stage) == [2, 2, 3, 3]
    assert "## Stage 2" in markdown(df) and "## Stage 3" in markdown(df)
    assert "stage 3: each variant grows from its own model" in markdown(df).replace("\n  ", " ")


def test_chain_mixed_with_a_foreign_parent_is_refused():
    rows = _chain()
    rows[-1]["parent"]["run_id"] = "somewhere-else"
    with pytest.raises(UserError, match="same parent"):
        table(rows)


def test_stage_without_the_baseline_has_no_differences():
    df = table(grid(("nrio", "srio")) + grid(("parent",), stage=1))
    assert math.isnan(line(df, "parent", 1).d_val) and math.isfinite(line(df, "srio").d_val)


# ---- reading -----------------------------------------------------------------------------------


def test_rows_survive_the_disk(tmp_path):
    rows = load_rows(write(grid(), tmp_path))
    assert len(rows) == len(grid())
    assert load_rows(tmp_path / "rows") == rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\xff\xfe\x00",
        "1" * 5000,
    ],
)
def test_malformed_file_is_refused_by_name(tmp_path, text):
    write(grid(("nrio",)), tmp_path)
    bad = tmp_path / "rows" / "srio-s0.json"
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match="srio-s0.json"):
        load_rows(tmp_path)


def test_half_written_row_is_refused_by_name(tmp_path):
    write(grid(("nrio",)), tmp_path)
    file = tmp_path / "rows" / "nrio-s1-g2.json"
    file.write_text(file.read_text()[:-200])
    with pytest.raises(UserError, match="nrio-s1-g2.json"):
        load_rows(tmp_path)


def test_oversized_row_is_refused_unread(tmp_path):
    (tmp_path / "rows").mkdir()
    with open(tmp_path / "rows" / "big.json", "wb") as file:
        file.truncate(MAX_JSON + 1)
    with pytest.raises(UserError, match="big.json"):
        load_rows(tmp_path)


@pytest.mark.parametrize("field", sorted(row("nrio").keys() - {"command", "config_hash"}))
def test_missing_or_mistyped_field_is_refused(tmp_path, field):
    optional = {"reason", "lineage", "versions", "report", "finished"}
    for value in ("absent", ["wrong"]):
        one = row("nrio")
        if value == "absent":
            del one[field]
        else:
            one[field] = value
        write([one | {"variant": "nrio", "seed": 0, "stage": 2}], tmp_path)
        (tmp_path / "rows" / "nrio-s0-g2.json").write_text(json.dumps(one))
        if field in optional:
            load_rows(tmp_path)
        else:
            with pytest.raises(UserError, match="nrio-s0-g2.json"):
                load_rows(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("status", "running"),
        ("seed", True),
        ("stage", "../x"),
        ("variant", "a|b"),
        ("metrics.val_loss", None),
        ("metrics.val_loss", float("nan")),
        ("metrics.train_loss", 10**400),
        ("curve.val", [1.0]),
        ("curve.val", "abc"),
        ("flops.total", "many"),
        ("parent.hash", 3),
        # names that would be paths, or of another run
        ("run_id", "../../../X"),
        ("run_id", "nrio-s0/../../x"),
        ("run_id", "nrio-s1-g2"),
        ("run_id", "srio-s0-g2"),
        ("run_id", "nrio-s0-g3"),
        ("preset", "tiny;touch Y"),
        ("preset", ".."),
        ("variant", "nrio\n"),
        # numbers that cannot be
        ("seed", -1),
        ("seed", 10**30),
        ("stage", -2),
        ("params", 0),
        ("d_model", -96),
        ("metrics.val_loss", -0.1),
        ("metrics.val_loss_start", 1e300),
        ("tokens.stage", -1),
        ("tokens.total", 1e300),
        ("flops.total", -1e13),
        ("flops.operator", 1e300),
        ("wall_s", -1.0),
        ("tokens_per_s", 1e300),
        ("curve.val_tokens", [0.0] * 13),
        ("curve.tokens", [12.0 - i for i in range(12)]),
        ("curve.val", [-1.0] * 13),
        ("curve.val", [1e300] * 13),
        ("curve.train", []),
    ],
)
def test_bad_value_is_refused(tmp_path, path, value):
    one = row("nrio")
    _change(one, path, value)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "nrio-s0-g2.json").write_text(json.dumps(one))
    named = "NaN" if value != value else path.split(".")[0]  # JSON has no NaN
    with pytest.raises(UserError, match=f"nrio-s0-g2.json.*{named}"):
        load_rows(tmp_path)


def test_the_right_values_at_the_edges_are_read(tmp_path):
    one = row("nrio") | {"run_id": "nrio-s0", "wall_s": 0, "tokens_per_s": 0}
    one["curve"] |= {"tokens": [1], "train": [0.0], "val_tokens": [0], "val": [9_999]}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "nrio-s0.json").write_text(json.dumps(one))
    assert load_rows(tmp_path) == [one]


def test_an_empty_curve_is_refused(tmp_path):
    one = row("nrio")
    one["curve"] = dict.fromkeys(one["curve"], [])
    with pytest.raises(UserError, match="curve.tokens .* length >= 1"):
        load_rows(write([one], tmp_path))


def test_a_row_under_another_name_is_refused(tmp_path):
    write(grid(("nrio",), [0]), tmp_path)
    (tmp_path / "rows" / "nrio-s0-g2.json").rename(tmp_path / "rows" / "srio-s0-g2.json")
    with pytest.raises(UserError, match="srio-s0-g2.json: this is the row of nrio-s0-g2"):
        load_rows(tmp_path)


def test_diverged_row_may_lack_its_numbers(tmp_path):
    bad = diverged(row("nrio"))
    bad["metrics"]["train_loss"] = None  # JSON has no NaN, and no row of ours does
    bad["curve"] = {}
    assert load_rows(write([bad], tmp_path))[0]["status"] == "diverged"


def test_duplicate_row_is_refused(tmp_path):
    write(grid(("nrio",), [0]), tmp_path)
    again = json.dumps(row("nrio") | {"run_id": "nrio-s0"})
    (tmp_path / "rows" / "nrio-s0.json").write_text(again)
    with pytest.raises(UserError, match="nrio-s0-g2.json and nrio-s0.json both hold"):
        load_rows(tmp_path)


def test_temp_files_are_not_rows(tmp_path):
    write(grid(("nrio",)), tmp_path)
    (tmp_path / "rows" / ".nrio-s9.json").write_text("{")
    (tmp_path / "rows" / "nrio-s9.json.tmp").write_text("{")
    assert len(load_rows(tmp_path)) == 3


@pytest.mark.parametrize("make", [lambda p: p / "absent", lambda p: p])
def test_no_folder_or_no_rows(tmp_path, make):
    with pytest.raises(UserError):
        load_rows(make(tmp_path))


# ---- claims ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([-3, -2, -3, -2, -3], "below", "reproduced"),
        ([3, 2, 3, 2, 3], "below", "not reproduced"),
        ([3, 2, 3, 2, 3], "above", "reproduced"),
        ([-3, 2, 3, -2, 1], "below", "inconclusive"),
        ([-3, -2, -3, -2], "below", "inconclusive (n<5)"),
        ([-3], "below", "inconclusive (n<5)"),
        # a lead that is real but smaller than the margin of 5 is no lead
        ([-3, -2, -3, -2, -3], "not below", "reproduced"),
        ([-3, -2, -3, -2, -3], "same", "reproduced"),
        ([-5.1, -4.9, -5, -5.1, -4.9], "not below", "inconclusive"),
        ([-8, -7, -8, -7, -8], "not below", "not reproduced"),
        ([-8, -7, -8, -7, -8], "same", "not reproduced"),
        ([8, 7, 8, 7, 8], "not below", "reproduced"),
        ([8, 7, 8, 7, 8], "same", "not reproduced"),
        ([4, -4, 9, -9, 1], "same", "inconclusive"),
    ],
)
def test_verdict(values, kind, expected):
    found = estimate(dict(enumerate(values)))
    assert verdict(found, kind, 5.0) == expected
    if "n<5" not in expected:  # the p-value that Holm corrects is that of what was decided
        assert (p_value(found, kind, 5.0) < 0.05) == expected.endswith("reproduced")


def test_equivalence_needs_a_margin():
    found = estimate(dict(enumerate([0.1, -0.1, 0.2, -0.2, 0.1])))
    for margin in (0.0, math.nan):
        assert verdict(found, "same", margin) == "inconclusive (no margin)"


def test_one_sided_tests_equal_scipys():
    values = [0.3, -0.1, 0.2, 0.4, 0.1]
    found = estimate(dict(enumerate(values)))
    for test, side in ((p_above, "greater"), (p_below, "less")):
        expected = stats.ttest_1samp(values, -0.2, alternative=side).pvalue
        assert test(found, -0.2) == pytest.approx(expected, rel=1e-9)
    assert math.isnan(p_above(estimate({0: 1.0}), 0))
    same = estimate({0: 1.0, 1: 1.0})
    assert (p_above(same, 0), p_above(same, 2), p_below(same, 2)) == (0.0, 1.0, 0.0)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, math.nan, 0.9])[::2] == [1.0, 1.0] and holm([]) == []
    assert math.isnan(holm([0.5, math.nan])[1])


def test_the_margin_is_a_share_of_the_effect_at_that_scale():
    rows = _claim_rows({"nrio": 0, "full": -0.1, "srio": -0.05, "mrio": -0.06, "lrio": -0.2})
    assert margin_of(rows) == pytest.approx(0.025, abs=2e-3)
    text = claims(rows)
    assert "Margin: 0.02" in text
    parts = {str(d.part): d for d in decisions(rows) if d.verdict}
    assert parts["mrio - srio"].verdict == "reproduced"  # better by 0.01, less than the margin
    assert parts["lrio - srio"].verdict == "not reproduced"
    assert "No margin" in claims(_claim_rows({"nrio": 0, "srio": 0}))


def test_a_verdict_that_does_not_survive_holm_says_so():
    rows = _claim_rows({"nrio": 0, "nrio-policies": 0, "nrio-convex": 0, "nrio-tiled": 0,
                        "full": -0.1, "ligo": 0})  # fmt: skip
    for one in rows:  # nrio-policies - nrio: p = 0.03, one of five deciding comparisons
        if one["variant"] == "nrio-policies":
            other = next(r for r in rows if r["variant"] == "nrio" and r["seed"] == one["seed"])
            delta = (-0.001, -0.002, -0.003, -0.004, -0.0003)[one["seed"]]
            one["metrics"]["train_loss"] = other["metrics"]["train_loss"] + delta
    found = next(d for d in decisions(rows) if str(d.part) == "nrio-policies - nrio" and d.verdict)
    assert found.verdict == "reproduced" and found.p < 0.05 < found.holm
    assert "reproduced, not after Holm" in claims(rows)


def test_rows_from_before_aligned_windows_are_decided_by_validation():
    rows = _claim_rows({"nrio": 0, "full": -0.1, "ligo": 0.1})
    for one in rows:
        if one["variant"] == "ligo":
            one["tokens"] |= {"operator": 1000, "stage": STAGE_TOKENS - 1000}
    parts = {str(d.part): d for d in decisions(rows) if d.verdict}
    assert (parts["full - ligo"].metric, parts["full - nrio"].metric) == ("val", "train")
    assert "last training batches of ligo are other ones" in claims(rows)
    for one in rows:
        one["config"]["train"] = {"first_batch": 8} if one["variant"] == "ligo" else {}
    parts = {str(d.part): d for d in decisions(rows) if d.verdict}
    assert parts["full - ligo"].metric == "train" and "other ones" not in claims(rows)


def test_c6_attributes_the_gain_where_it_arises():
    """SRIO worth 0.002 alone and 0.007 on top of the policies: both are said."""
    offsets = {"nrio": 0, "srio": -0.002, "nrio-policies": -0.012, "full-nogate": -0.019}
    rows = _claim_rows(offsets)
    for one in rows:
        one["metrics"]["train_loss"] = 3.0 + 0.01 * one["seed"] + offsets[one["variant"]]
    text = claims(rows).split("### C6")[1]
    assert "11 % where it comes first, 37 % where it comes on top" in text
    assert "| full-nogate - nrio-policies | train | 5 | -0.0070" in text
    assert "| full-nogate - nrio-policies - srio + nrio | train | 5 | -0.0050" in text


def test_c7_asks_the_second_growth_and_c8_the_report_card():
    later = [row(v, s, 3, o) for v, o in (("nrio", 0), ("full", -0.1), ("scratch-flops", 0.1))
             for s in range(5)]  # fmt: skip
    text = claims(_claim_rows({"nrio": 0, "full": -0.1}) + later)
    first, second = text.split("## Stage 3")
    assert "### C7" not in first and "### C7: reproduced" in second
    rows = _claim_rows({"srio": 0, "srio-rotate-only": 0})
    for one in rows:
        value = 0.2 + 0.01 * one["seed"] if one["variant"] == "srio" else 0.1
        kinds = dict.fromkeys(("attn", "ffn", "embed", "norm"), value)
        one["report"] = {"gradient_rms_new_to_old": kinds}
    assert _heading(claims(rows), "C8").endswith(": reproduced")


def _heading(text, name):
    return next(t for t in text.splitlines() if t.startswith(f"### {name}:"))


def _claim_rows(offsets, seeds=range(5)):
    return [row(v, s, offset=o) for v, o in offsets.items() for s in seeds]


def test_claims_reproduced_refuted_and_absent():
    text = claims(_claim_rows({"nrio": 0, "full": -0.1, "ligo": 0.1, "srio": 0, "mrio": -0.1}))
    assert _heading(text, "C1").endswith(": reproduced")
    assert _heading(text, "C2").endswith(": not run")
    assert _heading(text, "C3").endswith(": not reproduced")  # mrio beats srio; lrio is absent
    assert _heading(text, "C4").endswith(": not run")
    assert "no lrio" in text


def test_claim_with_one_part_absent_is_not_reproduced_by_the_rest():
    text = claims(_claim_rows({"nrio": 0, "full": -0.1}))
    assert _heading(text, "C1").endswith(": not run in full")


def test_few_seeds_decide_nothing():
    text = claims(_claim_rows({"nrio": 0, "full": -0.1, "ligo": 0.1}, seeds=range(4)))
    assert _heading(text, "C1").endswith(": inconclusive (n<5)")


def test_claim_c4_reports_the_seed_spread():
    text = claims(_claim_rows({"srio": 0, "srio-lo": -0.0001}))
    assert "within the spread between seeds" in text.split("### C4")[1].split("### C5")[0]


def test_claims_state_the_scale():
    text = claims(grid())
    assert "preset tiny" in text and "d 64 → 96" in text and "3,000,000 tokens" in text


def test_every_claim_of_the_paper_has_contrasts():
    assert [claim.name for claim in CLAIMS] == [f"C{i}" for i in range(1, 9)]
    assert all(any(part.decides for part in claim.contrasts) for claim in CLAIMS)


# ---- writing and the command -------------------------------------------------------------------


def test_csv_holds_full_precision(tmp_path):
    df = table(grid())
    write_table(df, tmp_path)
    import pandas as pd

    back = pd.read_csv(tmp_path / "table.csv")
    assert list(back.columns) == list(df.columns)
    assert np.array_equal(back.d_val, df.d_val, equal_nan=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table.csv", "table.md"]


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "x")))
    with pytest.raises(OSError):
        write_table(table(grid()), tmp_path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_printed_table_is_compact(capsys):
    print_table(table(grid()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 140
    assert sum(text.startswith("| full ") for text in lines) == 1


def test_inputs_are_not_changed():
    rows = grid()
    before = copy.deepcopy(rows)
    table(rows), claims(rows), matched(rows)
    assert rows == before


def _run(*arguments):
    command = [sys.executable, "-m", "analysis.aggregate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_command_writes_all_three_the_same_twice(tmp_path):
    write(grid(), tmp_path)
    names = ("table.csv", "table.md", "claims.md")
    first = _run(tmp_path)
    assert first.returncode == 0 and "Δ val" in first.stdout, first.stderr
    written = [(tmp_path / name).read_bytes() for name in names]
    assert _run(tmp_path).returncode == 0
    assert [(tmp_path / name).read_bytes() for name in names] == written


def test_command_refuses_in_one_line_and_writes_nothing(tmp_path):
    write(grid()[:-1], tmp_path)
    result = _run(tmp_path, "--out", tmp_path / "out")
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "full lacks 2" in result.stderr and not (tmp_path / "out").exists()
    assert _run(tmp_path, "--out", tmp_path / "out", "--allow-missing").returncode == 0


def test_larger_operators_that_tie_do_not_beat_the_small_one():
    tie = estimate({0: 0.001, 1: -0.001, 2: 0.0005, 3: -0.0004, 4: 0.0001})
    better = estimate({seed: -0.02 - 0.001 * seed for seed in range(5)})
    wide = estimate({0: 0.05, 1: -0.05, 2: 0.02, 3: -0.03, 4: 0.01})
    assert verdict(tie, "not below", 0.01) == "reproduced"
    assert verdict(tie, "above") == "inconclusive"
    assert verdict(better, "not below", 0.01) == "not reproduced"
    assert verdict(wide, "not below", 0.01) == "inconclusive"
    zero = estimate(dict.fromkeys(range(5), 0.0))
    assert verdict(zero, "not below") == "identical by construction"


def test_a_row_is_written_with_a_field_or_an_array_per_line(tmp_path):
    one = row("nrio") | {"lineage": [{"stage": 0, "d_model": 64}, {"stage": 1, "growth": {}}]}
    path = rows_module.row_path(tmp_path, one["run_id"])
    rows_module.write_row(path, one)
    lines = path.read_text().splitlines()
    assert json.loads(path.read_text()) == one and list(json.loads(path.read_text())) == list(one)
    assert '  "val": ' + json.dumps(one["curve"]["val"]) in lines and ' "lineage": [' in lines
    assert '   "stage": 0,' in lines and max(len(line.split(": ")) for line in lines) == 2
    with pytest.raises(ValueError, match="JSON compliant"):
        rows_module.write_row(path, one | {"wall_s": float("nan")})
    assert json.loads(path.read_text()) == one


def test_committed_rows_are_as_they_would_be_written():
    for path in sorted((ROOT / "results").glob("*/rows/*.json")):
        assert path.read_text() == rows_module.row_text(rows_module.read_row(path)) + "\n", path
