"""Spaces that grow apart, each by its own factor: only the FFN, only heads, only the width."""

import json
import sys

import pytest
import torch

import checkpoint
import grow
from checks import zoo
from errors import UserError
from growth import folder, twin
from growth.apply import grow as grow_gpt
from growth.plan import GrowConfig
from models import hf
from models.sizes import Apart
from tests.grown import gap, random_weights, tiny

FAMILIES = {name: hf.FAMILIES[m.family] for name, m in zoo.MODELS.items() if m.family != "ours"}
LOSSLESS, PAD = GrowConfig("lossless"), GrowConfig("pad")
OPTIONS = {  # width, apart: of a model of width 32, 4 heads of 8 (2 key heads), 40 neurons
    "ffn": (32, Apart(ffn_factor=2)),
    "heads": (32, Apart(n_head=8)),
    "width": (64, Apart(n_head=4, ffn_factor=1)),
    "all": (96, Apart(n_head=8, ffn_factor=4)),
}
ODD = {  # the same for pad, by halves and quarters
    "ffn": (32, Apart(ffn_factor=1.5)),
    "heads": (32, Apart(n_head=8)),
    "width": (48, Apart(n_head=4, ffn_factor=1)),
    "all": (48, Apart(n_head=8, ffn_factor=1.25)),
}


@pytest.fixture(autouse=True)
def quiet():
    grow.quiet_transformers()


def parent(name: str, tmp_path):
    net = zoo.shake(zoo.hugging_face(zoo.MODELS[name])).double()
    net.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


EVERY = [(name, "all" if facts.head_dim else "ffn") for name, facts in FAMILIES.items()]
SOME = [(name, o) for name in ("Llama GQA", "T5", "Gemma 3", "Mixtral") for o in OPTIONS]


@pytest.mark.parametrize("name,option", dict.fromkeys(EVERY + SOME))
def test_every_family_grows_apart_exactly(name, option, tmp_path):
    path = parent(name, tmp_path)
    for cfg, (width, apart) in ((LOSSLESS, OPTIONS[option]), (PAD, ODD[option])):
        try:
            growth = folder.plan_folder(path, width, cfg, apart=apart)
        except UserError as refused:
            assert "heads have no size of their own" in str(refused) and apart.n_head
            continue
        if growth.inexact:
            assert "Post-LN" in growth.inexact[0] and width > 32
            continue
        assert twin.check(growth) < 1e-10
        out = tmp_path / cfg.operator
        report = folder.grow_folder(growth, out, progress=False)
        assert report["max_rel_dlogit"] < 1e-10
        assert report["n_head"][1] == (apart.n_head or 4) and report["d_model"][1] == width


def test_a_head_count_that_the_ratio_would_split_becomes_possible(tmp_path):
    """576 -> 648 would need 10 1/8 heads of 64; with the heads as they are it is exact."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, vocab_size=61)
    sizes |= dict(intermediate_size=36, num_hidden_layers=1, head_dim=64)
    sizes |= dict(bos_token_id=0, eos_token_id=0)
    net = zoo.shake(LlamaForCausalLM(LlamaConfig(**sizes)).double())
    net.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="10.125 heads of 64"):
        folder.plan_folder(tmp_path / "m", 648, PAD)
    with pytest.raises(UserError, match=r"hidden size \(640\) is not a multiple of .* heads \(9\)"):
        folder.plan_folder(tmp_path / "m", 640, PAD, apart=Apart(n_head=9, ffn_factor=1))
    growth = folder.plan_folder(tmp_path / "m", 648, PAD, apart=Apart(n_head=9, ffn_factor=1))
    small, wide, apart = twin.shrunk(growth, growth.source.config)
    assert small.hidden_size * 648 == wide * 576 and apart.n_head == small.num_attention_heads
    assert twin.check(growth) < 1e-10
    report = folder.grow_folder(growth, tmp_path / "wide", progress=False)
    assert report["max_rel_dlogit"] < 1e-10 and report["n_head"] == [9, 9]


@pytest.mark.parametrize("cfg", [LOSSLESS, PAD, GrowConfig("lossless", noise_db=20.0)])
@pytest.mark.parametrize("switches", [{}, {"activation": "swiglu", "norm": "rmsnorm"}])
def test_ours_widens_its_ffn_alone(cfg, switches):
    old = tiny(8, **switches)
    weights = random_weights(old)
    grown = grow_gpt(weights, old, 8, cfg, apart=Apart(ffn_factor=2))
    assert (grown.cfg.d_model, grown.cfg.d_ff) == (8, 2 * old.d_ff)
    assert gap(weights, old, grown.weights, grown.cfg) < 1e-10
    both = grow_gpt(weights, old, 16, cfg, apart=Apart(ffn_factor=3))
    assert (both.cfg.d_model, both.cfg.d_ff) == (16, 3 * old.d_ff)
    assert gap(weights, old, both.weights, both.cfg) < 1e-10


def test_one_space_at_another_scale_would_show(monkeypatch):
    """The negative: the FFN's factor where the width's belongs."""
    from growth.operators import lossless

    old, plain = tiny(8), lossless.copies
    weights = random_weights(old)
    monkeypatch.setattr(lossless, "copies", lambda plan, space="residual": plain(plan, "ffn"))
    monkeypatch.setattr(lossless, "repeat_index", index_by(plain))
    grown = grow_gpt(weights, old, 16, LOSSLESS, apart=Apart(ffn_factor=3))
    assert gap(weights, old, grown.weights, grown.cfg) > 1e-3


def index_by(copies):
    return lambda plan, space: torch.arange(plan.sizes[space][1]) // copies(plan, space)


def run(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["grow.py", *map(str, args)])
    grow.main()


def test_command_line(tmp_path, monkeypatch):
    path = parent("Llama GQA", tmp_path)
    for i, (args, sizes, method) in enumerate(
        [
            (("--ffn-factor", 2), (32, 4, 80), "lossless"),
            (("--ffn-factor", 1.5), (32, 4, 60), "pad"),
            (("--heads", 8), (32, 8, 40), "lossless"),
            (("--width", 64, "--heads", 4, "--ffn-factor", 1), (64, 4, 40), "lossless"),
            (("--factor", 1.5, "--ffn-factor", 2), (48, 6, 80), "pad"),
        ]
    ):
        out = tmp_path / str(i)
        run(monkeypatch, path, "--out", out, *args)
        report = json.loads((out / "growth_report.json").read_text())
        assert (report["d_model"][1], report["n_head"][1], report["d_ff"][1]) == sizes
        assert report["operator"] == method and report["max_rel_dlogit"] < 1e-10
    checkpoint.save(tmp_path / "ours", random_weights(tiny(8)), {"config": tiny(8).as_dict()})
    run(monkeypatch, tmp_path / "ours", "--out", tmp_path / "wide", "--ffn-factor", 2)
    assert checkpoint.model_config(checkpoint.load(tmp_path / "wide")).d_ff == 32


@pytest.mark.parametrize(
    "args,says",
    [
        (("--ffn-factor", 0.5), "at least 1"),
        (("--ffn-factor", 1.37), "54.8 FFN neurons"),
        (("--ffn-factor", 1.5, "--method", "lossless"), "no whole number"),
        (("--heads", 3), "at least 4"),
        (("--heads", 7, "--method", "pad"), "divide among 2 key heads"),
        (("--heads", 6, "--method", "lossless"), "a multiple of 4"),
        (("--heads", "0"), "more, wider, or a number"),
        (("--ffn-factor", 2, "--method", "srio"), "grows all spaces alike"),
        (("--factor", 2, "--width", 64, "--ffn-factor", 2), "exactly one"),
    ],
)
def test_bad_requests_say_what_would_do(args, says, tmp_path, monkeypatch):
    path = parent("Llama GQA", tmp_path)
    with pytest.raises(UserError, match=says):
        run(monkeypatch, path, "--out", tmp_path / "w", *args)
    with pytest.raises(UserError, match="need --width 64"):
        run(monkeypatch, parent("GPT-2", tmp_path / "b"), "--out", tmp_path / "w", "--heads", 8)
    assert not (tmp_path / "w").exists()
