"""The model: sizes, initialisation, causality, rotary positions, refusals."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from errors import UserError
from models.gpt import (
    GPT,
    GPTConfig,
    count_parameters,
    flops_per_token,
    rope_tables,
    rotate,
)
from models.kernels import attend, linear_cross_entropy

TINY = GPTConfig(vocab_size=50, block_size=12, n_layer=2, n_head=2, head_dim=8, d_model=16)
SWITCHES = [
    {},
    {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "position": "rope", "tied": False},
    {"activation": "relu", "bias": False},
    {"position": "rope", "rope_repeat": 2},
]


@pytest.mark.parametrize("switches", SWITCHES)
def test_position_t_sees_nothing_after_t(switches):
    model = GPT(replace(TINY, **switches)).double().eval()
    x_bt = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    y_bt = x_bt.clone()
    y_bt[:, 7:] = (y_bt[:, 7:] + 1) % 50
    a, b = model(x_bt), model(y_bt)
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=1e-14)
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-3


@pytest.mark.parametrize("switches", SWITCHES)
def test_parameters_by_hand(switches):
    cfg = replace(TINY, **switches)
    d, f, v, layers = 16, 64, 50, 2
    n_ffn = 3 if cfg.activation == "swiglu" else 2
    per_layer = 4 * d * d + n_ffn * d * f + 2 * d
    if cfg.bias:
        per_layer += 4 * d + (n_ffn - 1) * f + d + 2 * d * (cfg.norm == "layernorm")
    total = v * d + layers * per_layer + d + d * (cfg.bias and cfg.norm == "layernorm")
    total += 12 * d * (cfg.position == "learned") + v * d * (not cfg.tied)
    assert count_parameters(cfg) == total
    weights = layers * (4 * d * d + n_ffn * d * f) + v * d
    assert flops_per_token(cfg) == 3 * (2 * weights + layers * 4 * 12 * d)


def test_initialisation_has_its_own_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = GPT(TINY, seed=5)
    torch.set_rng_state(before)
    torch.manual_seed(2)
    b, c = GPT(TINY, seed=5), GPT(TINY, seed=6)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.ndim == 1 or not torch.equal(p, r), name


def test_initial_scale():
    cfg = replace(TINY, d_model=128, n_head=16, n_layer=4, d_ff=0)
    weights = dict(GPT(cfg).named_parameters())
    for name, std in {
        "wte.weight": 0.02,
        "h.1.attn.q.weight": 0.02,
        "h.1.attn.o.weight": 0.02 / math.sqrt(8),
        "h.3.mlp.down.weight": 0.02 / math.sqrt(8),
    }.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.03), name
    assert (weights["h.0.ln_1.weight"] == 1).all() and (weights["h.0.mlp.up.bias"] == 0).all()


def test_rope_scores_depend_on_distance_only():
    cfg = replace(TINY, position="rope")
    cos_tk, sin_tk = rope_tables(cfg)
    gen = torch.Generator().manual_seed(0)
    q_k, k_k = torch.randn(2, 8, dtype=torch.float64, generator=gen)

    def score(i, j):
        q = rotate(q_k.expand(1, 1, 12, 8), cos_tk, sin_tk)[0, 0, i]
        return (q * rotate(k_k.expand(1, 1, 12, 8), cos_tk, sin_tk)[0, 0, j]).sum()

    torch.testing.assert_close(score(5, 3), score(9, 7), rtol=0, atol=1e-13)
    assert (score(5, 3) - score(5, 4)).abs() > 1e-3


def test_rope_repeat_repeats_the_narrow_heads_frequencies():
    narrow = rope_tables(replace(TINY, position="rope"))[0]
    wide = rope_tables(
        replace(TINY, position="rope", head_dim=16, d_model=32, d_ff=0, rope_repeat=2)
    )[0]
    torch.testing.assert_close(wide[:, :8:2], narrow[:, :4], rtol=0, atol=0)
    torch.testing.assert_close(wide[:, 1:8:2], narrow[:, :4], rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 20},
        {"n_head": 0},
        {"norm": "batchnorm"},
        {"norm_eps": float("nan")},
        {"vocab_size": -1},
        {"n_layer": True},
        {"position": "rope", "head_dim": 5, "d_model": 10},
        {"rope_theta": 0.0},
    ],
)
def test_bad_configs_are_refused(change):
    with pytest.raises(UserError):
        replace(TINY, **change)


@pytest.mark.parametrize("d_new", [8, 20])
def test_impossible_widths_are_refused(d_new):
    with pytest.raises(UserError, match=str(d_new)):
        TINY.widened(d_new)
    assert TINY.widened(24) == replace(TINY, d_model=24, n_head=3, d_ff=96)


# ---- equal forms of one computation


@pytest.mark.parametrize("multiple", [0, 64, 50])
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_head_in_chunks_is_the_cross_entropy_in_full(rows, multiple):
    """Loss and gradients in float64; 40 rows are more than there are; 50 words made 64 as on a GPU,
    or left at 50."""
    gen = torch.Generator().manual_seed(0)
    x_nd, head_vd = (torch.randn(n, 8, dtype=torch.float64, generator=gen) for n in (30, 50))
    targets_n = torch.randint(50, (30,), generator=gen)
    results = []
    for f in (
        lambda x, head: F.cross_entropy(F.linear(x, head), targets_n),
        lambda x, head: linear_cross_entropy(x, head, targets_n, rows, multiple),
    ):
        x, head = x_nd.clone().requires_grad_(), head_vd.clone().requires_grad_()
        loss = f(x, head)
        (3 * loss).backward()
        results.append((loss.detach(), x.grad, head.grad))
        with torch.no_grad():
            assert f(x, head) == loss
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-15)


def test_head_under_autocast():
    """Products in bfloat16, sums in float32: within bfloat16 rounding of the float32 loss."""
    torch.manual_seed(0)
    x, head, targets = torch.randn(30, 8), torch.randn(50, 8).requires_grad_(), torch.arange(30)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, head, targets, 7)
    loss.backward()
    assert loss.dtype == head.grad.dtype == torch.float32
    other = head.detach().clone().requires_grad_()
    F.cross_entropy(x @ other.T, targets).backward()
    assert 0 < (head.grad - other.grad).norm() / other.grad.norm() < 0.01


@pytest.mark.parametrize("switches", SWITCHES)
def test_forms_for_compiled_cpu_code_compute_the_same(switches, monkeypatch):
    """Attention in three products, GELU by a sigmoid, bias apart: loss and gradients, float64."""
    model = GPT(replace(TINY, **switches)).double()
    for p in model.parameters():  # nothing at zero
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    x_bt, y_bt = torch.randint(50, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for compiling in (False, True):
        monkeypatch.setattr("models.kernels.compiled_for_cpu", lambda x, answer=compiling: answer)
        model.zero_grad()
        loss = model(x_bt, y_bt)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-14)


def test_attention_with_onednn_products():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 12, 8)
    plain = attend(q, k, v)
    try:
        torch.set_float32_matmul_precision("medium")
        products = attend(q, k, v)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(plain, products)
    torch.testing.assert_close(plain, products, rtol=0, atol=2e-2)  # may be bfloat16 in hardware
