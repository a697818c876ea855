"""Block policies: where the old block, the copies and the mixtures land, at every width ratio."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from growth.apply import grow_all
from growth.config import BLOCKS
from growth.expand import combination, expand
from growth.plan import GrowConfig, Plan
from tests.grown import plan, tiny

few = settings(max_examples=20)
widths = st.tuples(st.integers(1, 6), st.integers(1, 14))  # head_dim 1: g = 1 and g > d_old


def grown(old: int, g: int, head_dim: int = 1, **settings):
    return plan(tiny(old * head_dim, head_dim=head_dim), (old + g) * head_dim, **settings)


def wide_of(p, name: str) -> torch.Tensor:
    return expand(p, p.specs[name], p.weights[name])


@few
@given(widths, st.sampled_from(BLOCKS), st.sampled_from(BLOCKS), st.sampled_from(BLOCKS))
def test_the_old_block_is_kept_and_the_shape_is_right(sizes, attn, ffn, embed):
    p = grown(*sizes, attn=attn, ffn=ffn, embed=embed)
    for name, spec in p.specs.items():
        w, wide = p.weights[name], wide_of(p, name)
        shape = tuple(p.size(a, n)[1] for a, n in zip(spec.axes, w.shape, strict=True))
        assert wide.shape == shape and wide.dtype == w.dtype
        assert torch.equal(wide[tuple(map(slice, w.shape))], w), name


@few
@given(widths, st.sampled_from([0.05, 1.0, 20.0]), st.integers(0, 5))
def test_convex_rows_are_weights(sizes, concentration, seed):
    p = grown(*sizes, dirichlet=concentration, seed=seed)
    for name in ("h.0.attn.q.weight", "h.1.mlp.up.weight", "wte.weight"):
        spec = p.specs[name]
        for space in set(spec.axes) & set(p.sizes):
            C = combination(p, spec, space)
            assert C.shape == (p.sizes[space][1] - p.sizes[space][0], p.sizes[space][0])
            assert (C >= 0).all()
            torch.testing.assert_close(C.sum(1), torch.ones(len(C)).double())


@few
@given(widths)
def test_convex_matrix_is_B_W_Bt(sizes):
    p = grown(*sizes, attn="convex")
    name = "h.0.attn.o.weight"
    W, wide, spec = p.weights[name], wide_of(p, name), p.specs[name]
    C_out, C_in = (combination(p, spec, axis) for axis in spec.axes)
    n = len(W)
    torch.testing.assert_close(wide[n:, :n], C_out @ W)
    torch.testing.assert_close(wide[:n, n:], W @ C_in.T)
    torch.testing.assert_close(wide[n:, n:], C_out @ W @ C_in.T)


def test_convex_heads_mix_whole_heads_and_agree_across_q_k_v_o():
    p = grown(2, 3, head_dim=4, attn="convex")
    mixes = [combination(p, p.specs[f"h.0.attn.{part}.weight"], "heads") for part in "qkvo"]
    assert all(torch.equal(mixes[0], mix) for mix in mixes[1:])
    blocks = mixes[0].view(3, 4, 2, 4).permute(0, 2, 1, 3)  # new head, old head, 4 x 4
    scale = blocks[..., 0, 0][..., None, None]
    torch.testing.assert_close(blocks, scale * torch.eye(4, dtype=blocks.dtype))
    other = combination(p, p.specs["h.1.attn.q.weight"], "heads")
    assert not torch.equal(mixes[0], other)  # layers draw on their own


@few
@given(widths)
def test_tiled_blocks_land_where_they_must(sizes):
    p = grown(*sizes, ffn="tiled", cross="zero")
    W, wide = p.weights["h.0.mlp.up.weight"], wide_of(p, "h.0.mlp.up.weight")
    F, D = W.shape
    for i in range(F, len(wide)):
        assert torch.equal(wide[i, D:], W[(i - F) % F][torch.arange(wide.shape[1] - D) % D])
    assert (wide[:F, D:] == 0).all() and (wide[F:, :D] == 0).all()
    b, wide_b = p.weights["h.0.mlp.up.bias"], wide_of(p, "h.0.mlp.up.bias")
    assert torch.equal(wide_b[F:], b[torch.arange(len(wide_b) - F) % F])


def test_cross_random_fills_the_cross_blocks_only():
    zero, random = (wide_of(grown(4, 3, ffn="tiled", cross=c), "h.0.mlp.down.weight")
                    for c in ("zero", "random"))  # fmt: skip
    differ = zero != random
    assert differ[:4, 8:].all() and differ[4:, :8].all()
    assert not differ[:4, :8].any() and not differ[4:, 8:].any()


def test_random_fill_has_its_standard_deviation():
    p = grown(40, 60, std=0.05)
    for name, std in (("h.0.attn.q.weight", 0.05), ("h.0.attn.o.weight", 0.05 / math.sqrt(4))):
        assert wide_of(p, name)[40:].std().item() == pytest.approx(std, rel=0.05)
    assert (wide_of(grown(4, 3, attn="zero"), "h.0.attn.q.weight")[4:] == 0).all()


def test_new_gains_are_one_and_new_shifts_zero():
    p = grown(4, 3)
    assert (wide_of(p, "h.0.ln_1.weight")[4:] == 1).all()
    assert (wide_of(p, "h.0.ln_1.bias")[4:] == 0).all()


def test_draws_depend_on_the_seed_and_on_nothing_else():
    name = "h.1.attn.v.weight"
    one = wide_of(grown(4, 3, operator="nrio", ffn="convex"), name)
    two = wide_of(grown(4, 3, operator="srio", ffn="tiled", epsilon=0.1), name)
    assert torch.equal(one, two)
    assert not torch.equal(one, wide_of(grown(4, 3, seed=1), name))


@pytest.mark.parametrize("spare", [(), (0,), (1,), (0, 1)])
def test_a_block_that_is_not_wanted_is_0_and_moves_no_other(spare):
    p = grown(4, 3)
    spec = p.specs["h.0.mlp.up.weight"]
    whole, wide = (expand(p, spec, p.weights[spec.name], skip) for skip in ((), spare))
    for axis in spare:
        start = p.sizes[spec.axes[axis]][0]
        assert not wide.narrow(axis, start, wide.shape[axis] - start).any()
    assert torch.equal(wide[wide != 0], whole[wide != 0])
    assert (wide != 0).sum() == math.prod(
        w.shape[i] if i in spare else wide.shape[i] for w in [p.weights[spec.name]] for i in (0, 1)
    )


@pytest.mark.parametrize("operator", ["pad", "net2net", "nrio", "szp"])
def test_no_number_is_drawn_in_vain(operator, monkeypatch):
    """pad writes embeddings and writers itself; szp draws everywhere; the others outside the old
    block, net2net also in biases."""
    sizes, draw = [], Plan.normal
    monkeypatch.setattr(Plan, "normal", lambda *a: sizes.append(math.prod(a[2])) or draw(*a))
    p = grown(4, 2, operator=operator)
    dict(grow_all(p))
    wanted = 0
    for name, spec in p.specs.items():
        w = p.weights[name]
        new = math.prod(p.size(axis, n)[1] for axis, n in zip(spec.axes, w.shape, strict=True))
        if spec.part != "norm" and (w.ndim == 2 or operator == "net2net"):
            skipped = operator == "pad" and spec.writes_residual
            wanted += 0 if skipped else new - (0 if operator == "szp" else w.numel())
    assert sum(sizes) == wanted


@pytest.mark.parametrize(
    "setting", [{"attn": "mean"}, {"cross": "convex"}, {"dirichlet": 0.0}, {"std": math.nan},
                {"norm": "drop"}, {"learn_steps": 0}, {"learn_lr": -1.0}, {"noise": -0.1}]
)  # fmt: skip
def test_bad_settings_are_refused_by_name(setting):
    with pytest.raises(UserError, match=f"grow.{next(iter(setting))} is"):
        GrowConfig(**setting)
