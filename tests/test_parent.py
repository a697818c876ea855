"""A given parent: read from anywhere, named in every row, trained on and grown from."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import checkpoint
import grid
from analysis.pretrained import verdict
from analysis.publish import publish
from analysis.rows import load_rows, matched
from checks import zoo
from cluster.budget import memory_gb
from cluster.execute import execute
from cluster.parent import bring_parent, read_parent
from errors import UserError
from grid import PRESETS, expand_grid, with_parent
from models.gpt import flops_per_token
from tests import synthetic_rows

SHARED = {"preset": "smoke", "command": "x --parent /a/b/llama --out /c/d", "code": {}}
SHARED["code"] = {"commit": "0" * 40, "dirty": False}


@pytest.fixture
def llama(tmp_path) -> Path:
    """A grouped-query Llama of 4/2 heads with a licence."""
    torch.manual_seed(0)
    net = zoo.hugging_face(zoo.MODELS["Llama GQA tied"])
    net.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "LICENSE").write_text("Apache License\n")
    return tmp_path / "llama"


def small(path: Path, **changes) -> grid.Preset:
    """The smoke preset for this parent: 8 steps at context 16, on the synthetic corpus."""
    tokens = {"tokens": (1, 8 * 8 * 16), "last_tokens": 256, "eval_tokens": 512}
    preset = replace(PRESETS["smoke"], **tokens, evals=2, **changes)
    preset = replace(preset, model=replace(preset.model, block_size=16))
    _, model, entry = read_parent(path, 16)
    return with_parent(preset, model, entry["source"]["sha256"])


def run_all(preset, variants, out: Path, data: Path, seeds=(0,)) -> list[dict]:
    for run in expand_grid(preset, list(variants), list(seeds)):
        execute(str(out), run.run_id, SHARED | {"data": str(data), "run": asdict(run)})
    return load_rows(out)


def test_rows_name_the_parent_that_nobody_trained(llama, tmp_path, corpus_folder):
    preset, out = small(llama), tmp_path / "out"
    bring_parent(llama, out, preset, corpus_folder, "float32")
    variants = ("parent-continued", "parent-continued-flops", "lossless-pad", "nrio")
    rows = {row["variant"]: row for row in run_all(preset, variants, out, corpus_folder)}
    matched(list(rows.values()))  # they may be compared
    assert set(rows) == set(variants)
    parents = {row["parent"]["hash"] for row in rows.values()}
    assert parents == {checkpoint.load(out / "parent").hash}
    for row in rows.values():
        assert row["parent"]["source"]["name"] == "llama"
        assert row["parent"]["source"]["licence"] == "Apache License"
        assert row["config"]["parent"] == row["parent"]["source"]["sha256"]
    assert rows["lossless-pad"]["d_model"] == 48 and rows["parent-continued"]["d_model"] == 32
    for exact in ("parent-continued", "lossless-pad"):  # start where the parent is
        assert abs(rows[exact]["metrics"]["spike"]) < 1e-5
    assert abs(rows["nrio"]["metrics"]["spike"]) > 1e-3
    spent = {name: row["flops"]["stage"] for name, row in rows.items()}
    assert spent["parent-continued-flops"] == pytest.approx(spent["nrio"], rel=0.1)
    assert rows["parent-continued"]["tokens"]["stage"] == rows["nrio"]["tokens"]["stage"]
    assert spent["parent-continued"] < 0.7 * spent["nrio"]


def test_another_parent_or_corpus_is_never_mixed_in(llama, tmp_path, corpus_folder, make_corpus):
    preset, out = small(llama), tmp_path / "out"
    bring_parent(llama, out, preset, corpus_folder, "float32")
    bring_parent(llama, out, preset, corpus_folder, "float32")  # the same: nothing to do
    other = make_corpus(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="another --out"):
        bring_parent(llama, out, preset, other, "float32")
    ours = grid.Run(**asdict(expand_grid(preset, ["nrio"], [0])[0]))
    assert ours.plan["parent"] and "parent" not in expand_grid("smoke", ["nrio"], [0])[0].plan
    zoo.hugging_face(zoo.MODELS["Llama GQA tied"]).save_pretrained(llama)  # other weights
    with pytest.raises(UserError, match="was made from llama"):
        bring_parent(llama, out, preset, corpus_folder, "float32")


def test_seeds_share_the_parent_and_differ_in_data_and_fills(llama):
    a, b = expand_grid(small(llama), ["nrio"], [0, 1])
    assert a.needs is None and b.needs is None and a.parent == b.parent
    assert a.train["data_seed"] != b.train["data_seed"] and a.grow["seed"] != b.grow["seed"]


def test_our_own_checkpoint_as_a_parent(tmp_path, corpus_folder):
    """Its run folder will do; its tokens count."""
    small_run = replace(
        PRESETS["smoke"], tokens=(8 * 8 * 32, 8 * 8 * 32), last_tokens=256, eval_tokens=512, evals=2
    )
    first = run_all(small_run, ["parent-continued"], tmp_path / "a", corpus_folder)
    trained = tmp_path / "a" / "runs" / "parent-s0"
    assert [row["parent"] is None for row in first] == [True, False]  # stage 0, then 1
    weights, model, entry = read_parent(trained, 32)
    preset = with_parent(small_run, model, entry["source"]["sha256"])
    bring_parent(trained, tmp_path / "b", preset, corpus_folder, "float32")
    row = run_all(preset, ["nrio"], tmp_path / "b", corpus_folder)[0]
    assert row["tokens"]["parent"] == 8 * 8 * 32 and row["parent"]["val_loss"] is not None


def test_continuing_starts_without_adams_state(tmp_path, corpus_folder):
    """As a grown child does: the comparison is of models, not of optimizers."""
    tokens = {"tokens": (8 * 8 * 32, 8 * 8 * 32), "last_tokens": 256, "eval_tokens": 512}
    preset = replace(PRESETS["smoke"], **tokens, evals=2)
    run_all(preset, ["parent-continued"], tmp_path, corpus_folder)
    start = checkpoint.load(tmp_path / "grown" / "parent-continued-s0")
    parent = checkpoint.load(tmp_path / "runs" / "parent-s0" / "final")
    assert start.optimizer is None and parent.optimizer is not None
    assert start.hash == parent.hash and start.meta["step"] == 0


@pytest.mark.parametrize("d,heads,wide", [(32, 4, 48), (32, 2, 48)])
def test_widths_follow_the_presets_factor_in_whole_groups(d, heads, wide):
    model = replace(PRESETS["smoke"].model, d_model=d, n_head=heads, head_dim=d // heads, d_ff=64)
    assert with_parent(PRESETS["smoke"], model, "x").widths == (d, wide)
    assert with_parent(PRESETS["smoke"], model, "x", 64).widths == (d, 64)


def test_the_pretrained_presets_plan_themselves():
    """135 M -> 227 M and x2; equal tokens and equal FLOPs for the parent; nothing is trained."""
    for name, factor in (("pretrained", 4 / 3), ("pretrained-x2", 2)):
        preset = with_parent(PRESETS[name], PRESETS[name].model, "0" * 64)
        runs = {run.variant: run for run in expand_grid(preset, list(preset.variants), [0])}
        assert set(runs) == set(preset.variants)
        assert all(run.needs is None for run in runs.values())
        assert runs["nrio"].d_model == 576 * factor
        assert runs["parent-continued"].tokens == runs["nrio"].tokens
        continued, cfg = runs["parent-continued-flops"], preset.config(0)
        assert continued.tokens * flops_per_token(cfg) == pytest.approx(
            runs["nrio"].flops, rel=0.01
        )


def test_published_commands_name_no_place(tmp_path, monkeypatch, llama, corpus_folder):
    preset, out = small(llama), tmp_path / "mine"
    bring_parent(llama, out, preset, corpus_folder, "float32")
    run_all(preset, ["nrio", "parent-continued"], out, corpus_folder)
    monkeypatch.setattr("analysis.publish.ROOT", tmp_path / "repo")
    publish(out)
    commands = {row["command"] for row in load_rows(tmp_path / "repo" / "results" / "mine")}
    assert commands == {"x --parent llama --out runs/mine"}


# ---- the verdict


def rows_of(starts: dict[str, float], ends: dict[str, float], seeds=range(3)) -> list[dict]:
    """Made-up rows of a parent at 3.0: variant -> loss at 0 tokens, and at 1,000."""
    source = {"name": "llama", "sha256": "a" * 64, "licence": "MIT"}
    rows = []
    for variant, start in starts.items():
        for seed in seeds:
            last = ends[variant] + 1e-3 * seed + 1e-4 * (seed == 1) * len(variant)
            row = synthetic_rows.row(variant, seed)
            row["parent"] |= {"hash": "b" * 64, "val_loss": 3.0, "source": source}
            row["metrics"] |= {"val_loss": last, "spike": start - 3.0}
            row["curve"] = {"tokens": [1], "train": [3.0], "val_tokens": [0, 1000]}
            row["curve"]["val"] = [start, last]
            rows.append(row)
    return rows


def test_the_verdict_is_read_from_rows():
    starts = {"parent-continued": 3.0, "lossless-pad": 3.0001, "nrio": 3.5, "srio": 14.0}
    ends = {"parent-continued": 2.9, "lossless-pad": 2.85, "nrio": 2.95, "srio": 6.0}
    text = verdict(rows_of(starts, ends))
    assert "licence MIT; its loss before any step, on the same tokens: 3.0000" in text
    assert "Safe (start within 0.01 of the parent, every seed): lossless-pad." in text
    assert "Destroys the model (a nat or more above it): srio." in text
    assert "Best grown at the end: lossless-pad; decided against nrio, srio" in text
    assert "better against the ungrown parent" in text and "3 seeds" in text
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "| at once |" in lines["lossless-pad"] and "not in this stage" in lines["srio"]
    assert "| 911 |" in lines["nrio"]  # 3.5 -> 2.952: 3.001 after 499 / 548 of 1,000 tokens
    one = verdict(rows_of(starts, ends, seeds=[0]))
    assert "undecided against nrio, srio; undecided against the ungrown parent" in one
    assert verdict([synthetic_rows.row("nrio")]) == ""
    starts |= {"parent-continued-flops": 3.0}
    ends |= {"parent-continued-flops": 2.8}
    assert "at equal tokens, worse at equal FLOPs (+0.0" in verdict(rows_of(starts, ends))
    assert "equal FLOPs" not in text


def test_memory_is_estimated():
    """SmolLM2-135M with 512 tokens at a time: 4.71 GB were measured, of a whole run of train.py."""
    run = expand_grid("pretrained", ["parent-continued"], [0])[-1]
    run.train["micro_batch"] = 2
    assert memory_gb(run) == pytest.approx(4.71, rel=0.05)
