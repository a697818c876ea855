"""The diagnosis of a start: a planted outlier channel is found, and blamed."""

import math
from pathlib import Path

import pytest
import torch

import checkpoint
from checks import gains
from errors import UserError
from tests.grown import random_weights, tiny

CFG = tiny(16, norm="rmsnorm", bias=False, vocab_size=48)


def study(outlier: bool) -> gains.Study:
    """A model whose channel 3 is 100 times the others, silenced by every gain; or a plain one."""
    weights = {n: w.float() for n, w in random_weights(CFG).items()}
    if outlier:
        for name, w in weights.items():
            if name == "wte.weight":
                w[:, 3] = 30.0
            if ".ln_" in f".{name}":
                w.abs_()[3] = 1e-4
    gen = torch.Generator().manual_seed(0)
    draw = torch.randint(48, (4, 13), generator=gen)
    return gains.Study(weights, CFG, 24, [(draw[:, :-1], draw[:, 1:])])


def moved(lines: list[str], what: str) -> float:
    """|loss - nrio's| of the row that starts with `what`."""
    loss = {line.split("|")[1].strip(): float(line.split("|")[2]) for line in lines}
    base = next(v for k, v in loss.items() if k.startswith("no coordinate"))
    return abs(next(v for k, v in loss.items() if k.startswith(what)) - base)


def test_the_outlier_channel_is_blamed(monkeypatch):
    monkeypatch.setattr(gains, "TOP", 1)
    for outlier in (True, False):
        lines = list(gains.parts(study(outlier)))[1:]
        largest, others = (moved(lines, w) for w in ("the 1 old", "all other old"))
        assert (largest > 5 * others) == outlier
    rows = [line.split("|") for line in gains.each_norm(study(True)) if line.startswith("| h.")]
    assert len(rows) == 4
    assert all(float(row[8]) > 3 and float(row[9]) == pytest.approx(1e-4) for row in rows)


def test_streams_are_normalised():
    for rms_d in study(False).streams().values():
        assert rms_d.square().mean().item() == pytest.approx(1.0, rel=1e-5)


def test_the_command_writes_its_tables(tmp_path, corpus_folder, monkeypatch):
    monkeypatch.setattr(gains, "FORMS", dict(list(gains.FORMS.items())[:3]))
    weights = {n: w.float() for n, w in random_weights(CFG).items()}
    checkpoint.save(tmp_path / "parent", weights, {"config": CFG.as_dict(), "step": 0})

    def run(*options: str) -> None:
        arguments = ["gains", str(tmp_path / "parent"), "--data", str(corpus_folder)]
        arguments += ["--width", "24", "--context", "12", "--tokens", "48", "--seeds", "1"]
        monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path / "out"), *options])
        gains.main()

    run()
    text = Path(tmp_path / "out" / "gains.md").read_text()
    assert "| pad (exact) |" in text and "| ln_f |" in text and str(tmp_path) not in text
    parent, pad = (
        float(line.split("|")[2])
        for line in text.splitlines()
        if line.startswith(("| parent", "| pad"))
    )
    assert abs(parent - pad) < 1e-3
    with pytest.raises(UserError, match="at least 1"):
        run("--tokens", "0")


def test_what_the_rotation_adds_to_a_gain():
    """The formula in the module's text; new gains of 1 act on the old ones whatever those are."""
    s, d, g = study(False), 16, 8
    angle = gains.theta(0.5, 16, 24)
    sin, cos = math.sin(angle), math.cos(angle)
    for fill in (torch.mean, lambda gain: 1.0):
        for key, new in gains.started_at(s, fill).items():
            old = s.weights[key]
            m, start = old.mean().item(), float(fill(old))
            shift = (cos - 1) * m - sin * math.sqrt(g / d) * start
            torch.testing.assert_close(new[:16], old + shift)
            added = (cos - 1) * start + sin * math.sqrt(d / g) * m
            torch.testing.assert_close(new[16:], torch.full((8,), start + added))
