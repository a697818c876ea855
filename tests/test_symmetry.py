"""Copies stay copies in training, and any noise parts them: checks/symmetry.py by its own run."""

from dataclasses import replace

import checkpoint
from checks import symmetry
from figures import evidence, style
from grid import PRESETS, expand_grid
from models.gpt import GPT


def test_copies_stay_copies_and_noise_parts_them(corpus_folder, tmp_path, monkeypatch):
    smoke = PRESETS["smoke"]
    small = replace(smoke, widths=(16, 32), model=replace(smoke.model, vocab_size=48))
    monkeypatch.setitem(PRESETS, "small", replace(small, tokens=(2_048, 2_048)))
    names = ["lossless", "lossless-noise"]
    model = small.config(0)
    parent = tmp_path / "grid" / "runs" / "parent-s0" / "final"
    checkpoint.save(parent, GPT(model, 0).state_dict(), {"config": model.as_dict()})
    args = symmetry.Args(tmp_path / "grid", corpus_folder, "small", steps=5)
    found = {
        run.variant: {"0": symmetry.follow(run, args)}
        for run in expand_grid("small", names, [0])
        if run.grow
    }
    exact, noisy = (found[name]["0"] for name in names)
    assert list(exact) == ["0", "1", "2", "4", "5"] and max(exact.values()) < 1e-6
    assert min(noisy.values()) > 1e-3 and noisy["5"] != noisy["0"]
    report = {"command": "c", "preset": "small", "distance": found}
    assert "| lossless-noise | 1 |" in symmetry.markdown(report)
    evidence.files.write_json(tmp_path / "symmetry.json", report)
    style.setup()
    picture = evidence.symmetry(tmp_path / "symmetry.json")
    assert style.save(picture, tmp_path, "symmetry")[0].stat().st_size > 10_000
    assert evidence.symmetry(tmp_path / "none.json") is None
