"""Exact growth of our GPT in float64, every switch, and what breaks it."""

import math
from dataclasses import replace

import pytest
import torch

from errors import UserError
from growth import gauge
from growth.apply import grow
from growth.operators import OPERATORS, lossless
from growth.plan import GrowConfig
from models.gpt import GPT, GPTConfig

BASE = GPTConfig(vocab_size=31, block_size=12, n_layer=2, n_head=2, head_dim=4, d_model=8, d_ff=20)
TOLERANCE = 1e-10


def trained_like(cfg: GPTConfig, seed: int = 0) -> GPT:
    """A float64 GPT whose every parameter is far from its initial value, so that no error hides
    behind a zero bias or a unit gain, and epsilon counts."""
    model = GPT(replace(cfg, norm_eps=1e-2), seed).double()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=gen, dtype=p.dtype) * 0.3)
    return model


def tokens(cfg: GPTConfig) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1)
    return torch.randint(cfg.vocab_size, (3, cfg.block_size), generator=gen)


def logits(weights: dict, cfg: GPTConfig) -> torch.Tensor:
    model = GPT(cfg, seed=None).double()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(tokens(cfg))


def error(model: GPT, d_new: int, settings: GrowConfig, **changed) -> float:
    """max |delta logit| over the logits' standard deviation; `changed` alters the wide config."""
    grown = grow(model.state_dict(), model.cfg, d_new, settings)
    with torch.no_grad():
        old = model(tokens(model.cfg))
    new = logits(grown.weights, replace(grown.cfg, **changed))
    return ((new - old).abs().max() / old.std()).item()


SWITCHES = [
    dict(),
    dict(bias=False),
    dict(tied=False),
    dict(activation="relu"),
    dict(activation="swiglu"),
    dict(norm="rmsnorm"),
    dict(norm="rmsnorm", tied=False, activation="swiglu", position="rope", bias=False),
    dict(position="rope"),
    dict(position="rope", tied=False, activation="swiglu"),
]
GROWTHS = [
    ("lossless", 2, "more"),
    ("lossless", 2, "wider"),
    ("lossless", 3, "more"),
    ("lossless", 3, "wider"),
    ("pad", 1.5, "more"),
    ("pad", 1.5, "wider"),
    ("pad", 2, "wider"),
    ("exact-srio", 1.5, "more"),
    ("exact-srio", 1.5, "wider"),
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("operator,ratio,heads", GROWTHS)
@pytest.mark.parametrize("scale", ["norm", "eps"])
def test_exact(operator, ratio, heads, switches, scale):
    cfg = replace(BASE, **switches)
    settings = GrowConfig(operator=operator, heads=heads, gauge=scale)
    model = trained_like(cfg)
    width = int(ratio * cfg.d_model)
    if operator == "exact-srio" and cfg.norm == "rmsnorm" and cfg.tied:
        with pytest.raises(UserError, match="untie"):
            error(model, width, settings)
        return
    if cfg.position == "rope" and heads == "wider" and ratio == 1.5:
        cfg = replace(cfg, head_dim=8, n_head=1)  # 8 -> 12: RoPE needs an even head
        model = trained_like(cfg)
    assert error(model, width, settings) < TOLERANCE


@pytest.mark.parametrize("policy", ["convex", "tiled", "zero"])
@pytest.mark.parametrize("operator", ["pad", "exact-srio"])
def test_exact_whatever_fills_the_free_blocks(operator, policy):
    settings = GrowConfig(operator=operator, attn=policy, ffn=policy, embed=policy)
    assert error(trained_like(BASE), 12, settings) < TOLERANCE


@pytest.mark.parametrize("operator,d_new", [("lossless", 16), ("pad", 12), ("exact-srio", 12)])
def test_epsilon_must_change(operator, d_new):
    model = trained_like(BASE)
    settings = GrowConfig(operator=operator, gauge="norm")
    assert error(model, d_new, settings, norm_eps=model.cfg.norm_eps) > 1e-4


def test_wider_heads_need_the_fourth_root(monkeypatch):
    model, settings = trained_like(BASE), GrowConfig(operator="lossless", heads="wider")
    monkeypatch.setattr(lossless, "score_scale", lambda plan, copies=1: 1 / math.sqrt(copies))
    assert error(model, 16, settings) > 1e-2


def test_gelu_needs_the_split_and_relu_does_not(monkeypatch):
    gelu, relu = trained_like(BASE), trained_like(replace(BASE, activation="relu"))
    settings = GrowConfig(operator="lossless")
    monkeypatch.setattr(lossless, "homogeneous", lambda name: True)  # the plain rule for both
    assert error(relu, 16, settings) < TOLERANCE
    assert error(gelu, 16, settings) > 1e-2


def test_tiling_scrambles_heads(monkeypatch):
    model, settings = trained_like(BASE), GrowConfig(operator="lossless", heads="wider")
    plain = lossless.repeat_index

    def tiled(plan, space):
        old, new = plan.sizes[space]
        return torch.arange(new) % old if space == "heads" else plain(plan, space)

    monkeypatch.setattr(lossless, "repeat_index", tiled)  # [x1 .. xd, x1 .. xd]
    assert error(model, 16, settings) > 1e-2


def test_constants_are_the_notes_but_for_fc2_bias():
    model = trained_like(BASE)
    old, k = model.state_dict(), 2
    new = grow(old, model.cfg, 16, GrowConfig(operator="lossless", heads="wider")).weights

    def ratio(name):
        corner = new[name][0, 0] if new[name].ndim == 2 else new[name][0]
        return (corner / old[name].flatten()[0]).item()

    fourth = k**0.25
    assert ratio("wte.weight") == pytest.approx(1 / math.sqrt(2))
    assert ratio("h.0.ln_1.weight") == pytest.approx(1 / math.sqrt(2))
    assert ratio("h.0.attn.q.weight") == pytest.approx(fourth / 2)
    assert ratio("h.0.attn.q.bias") == pytest.approx(fourth / math.sqrt(2))
    assert ratio("h.0.attn.v.weight") == pytest.approx(1 / 2)
    assert ratio("h.0.attn.o.bias") == pytest.approx(1 / math.sqrt(2))
    assert ratio("h.0.mlp.up.weight") == pytest.approx(1 / math.sqrt(2))
    assert ratio("h.0.mlp.up.bias") == pytest.approx(1)
    assert ratio("h.0.mlp.down.weight") == pytest.approx(1 / (2 * math.sqrt(2)))
    assert ratio("h.0.mlp.down.bias") == pytest.approx(1 / math.sqrt(2))  # the note prints 1/2


def test_the_notes_fc2_bias_is_wrong():
    model = trained_like(BASE)
    grown = grow(model.state_dict(), model.cfg, 16, GrowConfig(operator="lossless"))
    old = logits(model.state_dict(), model.cfg)
    assert (logits(grown.weights, grown.cfg) - old).abs().max() < TOLERANCE * old.std()
    wrong = {n: w / math.sqrt(2) if "down.bias" in n else w for n, w in grown.weights.items()}
    assert (logits(wrong, grown.cfg) - old).abs().max() > 1e-2 * old.std()


def test_rope_wider_heads_are_approximate_with_recomputed_frequencies():
    model = trained_like(replace(BASE, position="rope"))
    assert error(model, 16, GrowConfig(operator="lossless", heads="wider")) < TOLERANCE
    recomputed = GrowConfig(operator="lossless", heads="wider", rope="recompute")
    assert 1e-3 < error(model, 16, recomputed)
    wide = GrowConfig(operator="pad", heads="wider")
    assert error(model, 16, wide) < TOLERANCE
    assert error(model, 16, wide, rope_theta=model.cfg.rope_theta) > 1e-3


def test_exact_growth_repeats_exactly():
    model = trained_like(replace(BASE, position="rope"))
    once = grow(model.state_dict(), model.cfg, 16, GrowConfig(operator="lossless", heads="wider"))
    twice = grow(once.weights, once.cfg, 24, GrowConfig(operator="pad", heads="wider"))
    old, new = logits(model.state_dict(), model.cfg), logits(twice.weights, twice.cfg)
    assert (new - old).abs().max() < TOLERANCE * old.std()


def test_norm_gauge_keeps_the_streams_norm():
    model = trained_like(BASE)
    x = model.wte.weight + model.wpe.weight[0]
    wide = grow(model.state_dict(), model.cfg, 16, GrowConfig("lossless")).weights
    y = wide["wte.weight"] + wide["wpe.weight"][0]
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1))
    wide = grow(model.state_dict(), model.cfg, 12, GrowConfig("exact-srio")).weights
    e, old = wide["wte.weight"], model.wte.weight  # a tied wte is padded with its mean instead
    assert torch.allclose(e[:, 8:], old.mean(1, keepdim=True).expand(-1, 4))
    assert (e.norm(dim=1) > old.norm(dim=1)).all()
    model = trained_like(replace(BASE, tied=False))
    x = model.wte.weight + model.wpe.weight[0]
    wide = grow(model.state_dict(), model.cfg, 12, GrowConfig("exact-srio")).weights
    y = wide["wte.weight"] + wide["wpe.weight"][0]
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1))
    padded = grow(model.state_dict(), model.cfg, 12, GrowConfig("pad")).weights
    z = padded["wte.weight"] + padded["wpe.weight"][0]
    assert (z.norm(dim=1) > x.norm(dim=1)).all()


@pytest.mark.parametrize("heads", ["more", "wider"])
def test_noise_keeps_the_function_and_parts_the_copies(heads):
    model = trained_like(BASE)
    settings = GrowConfig(operator="lossless", heads=heads, noise_db=20.0)
    assert error(model, 16, settings) < TOLERANCE
    w = grow(model.state_dict(), model.cfg, 16, settings).weights["h.0.mlp.up.weight"]
    assert (w[0] - w[1]).norm() > 0.05 * w[0].norm()
    unpaired = grow(model.state_dict(), model.cfg, 16, replace(settings, noise_db=None))
    w = unpaired.weights["h.0.mlp.up.weight"]
    assert torch.equal(w[0], w[1])
    gen = torch.Generator().manual_seed(0)
    loose = {
        n: p + 0.1 * p.std() * torch.randn(p.shape, generator=gen, dtype=p.dtype)
        for n, p in unpaired.weights.items()
    }
    old = logits(model.state_dict(), model.cfg)
    assert (logits(loose, unpaired.cfg) - old).abs().max() > 1e-2 * old.std()


def copy_distance(weights: dict) -> float:
    """RMS distance between the two rows of each pair, over the rows' RMS; up, q and wte columns."""
    distances = []
    for name in ("h.0.mlp.up.weight", "h.1.attn.v.weight"):
        a, b = weights[name][0::2], weights[name][1::2]
        distances.append((a - b).norm() / a.norm())
    e = weights["wte.weight"]
    return min(*distances, (e[:, 0::2] - e[:, 1::2]).norm() / e.norm()).item()


def test_copies_separate_only_with_noise():
    """50 steps of AdamW: without noise pairs stay equal to rounding, with it every pair parts."""
    model = GPT(replace(BASE, activation="gelu"), seed=0).double()

    def tuned(noise_db):
        settings = GrowConfig(operator="lossless", heads="wider", noise_db=noise_db)
        grown = grow(model.state_dict(), model.cfg, 16, settings)
        wide = GPT(grown.cfg, seed=None).double()
        wide.load_state_dict(grown.weights)
        optimizer = torch.optim.AdamW(wide.parameters(), lr=3e-3)
        gen = torch.Generator().manual_seed(2)
        for _ in range(50):
            x_bt = torch.randint(BASE.vocab_size, (8, BASE.block_size), generator=gen)
            optimizer.zero_grad()
            wide(x_bt[:, :-1], (x_bt[:, :-1] * 3 + 1) % BASE.vocab_size).backward()
            optimizer.step()
        return copy_distance(wide.state_dict())

    assert tuned(None) < 1e-9
    assert tuned(10.0) > 1e-2


def test_scales_of_a_doubled_head():
    plan = grow(
        trained_like(BASE).state_dict(),
        replace(BASE, norm_eps=1e-2),
        16,
        GrowConfig(operator="lossless", heads="wider"),
    ).plan
    assert gauge.score_scale(plan, 2.0) == pytest.approx(2**-0.25)
    assert OPERATORS["lossless"].config_change(plan).eps == pytest.approx(0.5)


@pytest.mark.parametrize(
    "settings,d_new,message",
    [
        (dict(operator="lossless"), 12, "multiple of 8"),
        (dict(operator="nrio", heads="wider"), 12, "heads more"),
        (dict(operator="pad", heads="wider", attn="convex"), 12, "random or zero"),
        (dict(operator="pad", heads="wider"), 13, "nearest"),
    ],
)
def test_bad_requests_name_the_remedy(settings, d_new, message):
    with pytest.raises(UserError, match=message):
        grow(trained_like(BASE).state_dict(), BASE, d_new, GrowConfig(**settings))


@pytest.mark.parametrize("gamma_new", [0.0, 0.5, 4.0, 16.0])
@pytest.mark.parametrize("operator", ["pad", "exact-srio"])
@pytest.mark.parametrize("switches", [*SWITCHES[:3], *SWITCHES[4:7]], ids=str)
def test_gains_of_silent_coordinates_are_free(operator, switches, gamma_new):
    cfg = replace(BASE, **switches)
    settings = GrowConfig(operator=operator, gamma_new=gamma_new, attn="convex", ffn="tiled")
    if operator == "exact-srio" and cfg.norm == "rmsnorm":
        with pytest.raises(UserError, match="gamma_new"):
            error(trained_like(cfg), 12, settings)
        return
    assert error(trained_like(cfg), 12, settings) < TOLERANCE


def test_gains_are_not_free_where_coordinates_are_not_silent():
    model = trained_like(BASE)
    grown = grow(model.state_dict(), BASE, 12, GrowConfig(operator="nrio"))
    louder = {n: w.clone() for n, w in grown.weights.items()}
    louder["ln_f.weight"][8:] *= 4
    assert (logits(louder, grown.cfg) - logits(grown.weights, grown.cfg)).abs().max() > 0.1
