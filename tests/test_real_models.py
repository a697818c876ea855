"""Growth of real pretrained weights, where SMOLLM2 and MINILM name their folders."""

import os
import sys
from pathlib import Path

import pytest
import torch

from bench import real_models
from errors import UserError


def needs(name: str):
    reason = f"set {name} to a folder of it, as bench/real_models.py says"
    return pytest.mark.skipif(name not in os.environ, reason=reason)


@needs("SMOLLM2")
@pytest.mark.slow
def test_a_doubled_language_model_says_the_same(tmp_path):
    before = real_models.language_model(Path(os.environ["SMOLLM2"]), torch.float32)
    real_models.grow(Path(os.environ["SMOLLM2"]), tmp_path / "wide", ["--factor", "2"])
    after = real_models.language_model(tmp_path / "wide", torch.float32)
    assert real_models.gap(before, after) < 1e-3  # trained weights round more than random ones
    assert abs(after.row["loss"] - before.row["loss"]) < 1e-5
    assert after.row["answer"] == before.row["answer"] and "Paris" in before.row["answer"]


@needs("MINILM")
@pytest.mark.slow
def test_a_doubled_encoder_measures_the_same(tmp_path):
    before = real_models.encoder(Path(os.environ["MINILM"]), torch.float32)
    for heads in ("more", "wider"):
        options = ["--factor", "2", "--heads", heads]
        real_models.grow(Path(os.environ["MINILM"]), tmp_path / heads, options)
        after = real_models.encoder(tmp_path / heads, torch.float32)
        assert real_models.gap(before, after) < 1e-5
    assert before.output[0, 1] > 0.5 > before.output[0, 2]


def test_the_report_has_a_line_for_every_growth():
    grown = dict(d_model=[4, 8], parameters=[10, 4e6], wall_s=1.0, peak_rss_mb=2.0)
    grown |= dict(error_float32=1e-6, error_float64=1e-15)
    said = {"loss": 3.0, "answer": "Paris | it is"}
    rows = [{"model": "smollm2", "growth": "as it is"} | said]
    rows += [{"model": "smollm2", "growth": "pad"} | said | grown]
    rows += [{"model": "minilm", "growth": "pad", "cosines": [[0.5] * 4] * 4} | grown]
    text = real_models.markdown(
        {"command": "x", "rows": rows, "hardware": {"cpu": "one", "threads": 2}}
    )
    assert "| as it is |  |  | 3.0000 |  |  |  |  | Paris \\| it is |" in text
    assert "| pad | 8 | 4 M | 3.0000 | 1.0e-06 | 1.0e-15 | 1 | 2 | the same |" in text
    bars = {line.count("|") - line.count("\\|") for line in text.split("\n") if "| pad |" in line}
    assert bars == {10, 14}


def test_without_a_model_it_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["real_models"])
    with pytest.raises(UserError, match="--smollm2"):
        real_models.main()
