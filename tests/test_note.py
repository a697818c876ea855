"""The note's claims about trained models: the measurement itself, short, and what breaks it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis import note as results
from analysis.overview import mlm_line, rope_line
from checks import note
from data.shards import Corpus
from models.gpt import GPTConfig, rope_tables
from models.hf_folder import open_folder

ROOT = Path(__file__).parents[1]
SHORT = dict(mlm_steps=2, mlm_batch=4, parent_steps=2, child_steps=2, batch=2, context=8)


@pytest.fixture(scope="module")
def rows(corpus_folder, tmp_path_factory):
    """Rows of a run of two steps, two seeds: part -> rows."""
    out = tmp_path_factory.mktemp("note")
    cfg = note.NoteConfig(corpus_folder, out, **SHORT, eval_tokens=64, mlm_tokens=512)
    corpus = Corpus(corpus_folder)
    for seed in (0, 1):
        for part in note.PARTS:
            note.make_row(part, corpus, cfg, seed)
    text = (out / "mlm-0.json").read_text()
    note.make_row("mlm", corpus, cfg, 0)  # there already: kept
    assert (out / "mlm-0.json").read_text() == text and str(corpus_folder) not in text
    return {part: results.rows_of(out, part) for part in note.PARTS} | {"out": out}


def test_bert_widened_is_its_parent_and_a_random_start_is_not(rows):
    for row in rows["mlm"]:
        parent, found = row["found"]["parent"], row["found"]
        for form in ("lossless", "note's scales"):
            assert found[form]["accuracy"] == parent["accuracy"] and found[form]["changed"] == 0
        assert found["lossless"]["max_rel_dlogit"] < 1e-12
        for form in ("note's scales, extra sqrt(2)", "note's scales, b/2", "nrio (control)"):
            assert found[form]["max_rel_dlogit"] > 1e-3
    assert "nrio" in results.table(rows["out"])


def test_the_extra_root_only_divides_logits(corpus_folder, tmp_path):
    """Without a decoder bias the literal rule is a temperature of sqrt(2)."""
    net = note.bert(48, 8, 0).double().eval()
    with torch.no_grad():
        net.cls.predictions.bias.zero_()
    net.save_pretrained(tmp_path / "parent")
    assert open_folder(tmp_path / "parent").raw["hidden_act"] == "gelu"
    x_bt, _ = Corpus(corpus_folder).batch_at(0, 0, 4, 8)
    batches = [note.mask(x_bt, 48, 0)]
    settings = note.FORMS[results.LITERAL][0]
    wide = note.widened(tmp_path / "parent", tmp_path / "wide", settings, torch.float64)
    note.extra_root(wide)
    before, _ = note.judge(net, batches)
    after, _ = note.judge(wide, batches)
    assert torch.allclose(after, before / math.sqrt(2), rtol=1e-6)


def test_recomputed_frequencies_move_the_loss_and_repeated_ones_do_not(rows):
    for row in rows["rope"]:
        curves, loss = row["found"]["curves"], row["found"]["parent_loss"]
        assert {*curves} == {*note.STARTS} and {*curves["exact"]} == {"0", "1", "2"}
        for start in ("parent", "exact"):
            assert curves[start]["0"] == pytest.approx(loss, abs=1e-5)
        assert curves["recomputed"]["0"] != pytest.approx(loss, abs=1e-7)


@pytest.mark.parametrize("k", [2, 3])
def test_one_copy_in_k_keeps_its_frequency(k):
    """Recomputed frequencies: new pair m copies old pair m // k; those with m % k = 0 turn as it
    does, the others slower."""
    old = GPTConfig(d_model=64, n_head=4, head_dim=16, position="rope")
    new = replace(old, d_model=64 * k, head_dim=16 * k, d_ff=0)
    cos_old, cos_new = (rope_tables(cfg)[0][1] for cfg in (old, new))  # of position 1
    turn_old, turn_new = cos_old[:8].acos().repeat_interleave(k), cos_new[: 8 * k].acos()
    same = (turn_new - turn_old).abs() < 1e-9
    assert torch.equal(same, torch.arange(8 * k) % k == 0)
    assert (turn_new[~same] < turn_old[~same]).all()


def test_masks_are_berts_and_fixed():
    x_bt = torch.randint(40, (64, 64), generator=torch.Generator().manual_seed(0))
    given_bt, labels_bt = note.mask(x_bt, 40, 7)
    asked_bt = labels_bt != note.IGNORED
    assert torch.equal(given_bt[~asked_bt], x_bt[~asked_bt])
    assert asked_bt.double().mean() == pytest.approx(0.15, abs=0.02)
    assert (given_bt[asked_bt] == 40).double().mean() == pytest.approx(0.8, abs=0.06)
    assert torch.equal(note.mask(x_bt, 40, 7)[0], given_bt)
    assert not torch.equal(note.mask(x_bt, 40, 8)[0], given_bt)


def test_steps_back_are_counted_and_may_be_never():
    row = {"found": {"parent_loss": 5.0, "curves": {"a": {"0": 5.2, "4": 5.0, "8": 4.9}}}}
    assert results.steps_back(row, "a") == 4
    row["found"]["parent_loss"] = 4.0
    assert math.isinf(results.steps_back(row, "a"))


def mlm_row(seed: int, moved: float) -> dict:
    forms = dict.fromkeys(("parent", "lossless", "note's scales", results.LITERAL), 0.2)
    scores = {form: {"accuracy": a, "loss": 5.0} for form, a in forms.items()}
    scores["note's scales"]["accuracy"] += moved
    return {"seed": seed, "command": "", "found": scores}


def rope_row(seed: int, after: float, start: float = 5.3) -> dict:
    curve = {"0": start + seed / 100, "8": after, "32": after}
    found = {"parent_loss": 5.0, "curves": {"recomputed": curve}}
    return {"seed": seed, "command": "", "config": {"parent_steps": 100}, "found": found}


def test_verdicts_by_hand():
    assert mlm_line([mlm_row(s, 0.0) for s in range(3)]).verdict == "reproduced"
    assert mlm_line([mlm_row(s, -0.01 * (s == 2)) for s in range(3)]).verdict == "not reproduced"
    assert rope_line([rope_row(s, 4.9) for s in range(5)]).verdict == "reproduced"
    assert rope_line([rope_row(s, 5.1) for s in range(5)]).verdict == "not reproduced"
    assert rope_line([rope_row(s, 4.9, 4.9) for s in range(5)]).verdict == "not reproduced"
    short = [rope_row(s, 5.1) for s in range(5)]
    for one in short:
        del one["found"]["curves"]["recomputed"]["32"]
    assert "too few" in rope_line(short).verdict
    assert "inconclusive (n<5)" in rope_line([rope_row(s, 4.9) for s in range(4)]).verdict


def test_committed_table_is_that_of_the_committed_rows():
    folder = ROOT / "results/note"
    assert (folder / "note.md").read_text() == results.table(folder)
    for part in note.PARTS:
        for row in results.rows_of(folder, part):
            assert not row["dirty"] and "/" not in row["command"].removesuffix("results/note")
