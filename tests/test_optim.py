"""Adam's state through growth, against autograd on float64 models."""

import math
from dataclasses import replace

import pytest
import torch

from errors import UserError
from growth.apply import grow
from growth.moments import FIRST, SECOND
from growth.operators.srio import matrix
from growth.optim import carry
from growth.plan import GrowConfig
from growth.rewarm import NewCoordinates, shapes_before
from growth.rotation import dense, givens, theta
from models.gpt import GPT
from models.sizes import Apart
from tests.grown import model_of, random_weights, tiny, tokens

FAMILIES = {
    "gpt2": {},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False},
    "untied": {"tied": False, "activation": "relu"},
}
EXACT = {"noise": 0.0, "attn": "zero", "ffn": "zero", "embed": "zero"}


def gradients(weights: dict, cfg, seed: int = 1) -> dict[str, torch.Tensor]:
    model = model_of(weights, cfg)
    model(*tokens(cfg, seed=seed)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def as_moments(first: dict, second: dict | None = None) -> dict:
    second = second or {name: m.square() for name, m in first.items()}
    return {f"{n}/{FIRST}": m for n, m in first.items()} | {
        f"{n}/{SECOND}": v for n, v in second.items()
    }


def wide_gradients(old, d_new: int, **settings):
    """(gradients before, grown model, its gradients)."""
    weights = random_weights(old)
    grown = grow(weights, old, d_new, GrowConfig(**settings))
    return gradients(weights, old), grown, gradients(grown.weights, grown.cfg)


def assert_close(carried: dict, actual: dict, kind: str = FIRST) -> None:
    for name, g in actual.items():
        torch.testing.assert_close(carried[f"{name}/{kind}"], g, atol=1e-12, rtol=1e-9, msg=name)


# ---- the gradient's map


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operator, d_new", [("net2net", 16), ("net2net", 24), ("sparkling", 16),
                                             ("lossless", 16), ("lossless", 24)])  # fmt: skip
def test_copies_carry_the_true_gradient(family, operator, d_new):
    before, grown, after = wide_gradients(tiny(8, **FAMILIES[family]), d_new,
                                          operator=operator, **EXACT)  # fmt: skip
    assert_close(carry(grown.plan, as_moments(before), "transfer"), after)


def test_mapping_gradients_as_weights_would_be_wrong():
    """The negative of the above: T G is not the gradient where T^T T is not 1."""
    before, grown, after = wide_gradients(tiny(8), 16, operator="lossless")
    as_weights = grow(before, tiny(8), 16, GrowConfig(operator="lossless")).weights
    name = "h.0.mlp.up.weight"  # W' = W / sqrt(2) but G' = G / (2 sqrt(2))
    assert not torch.allclose(as_weights[name], after[name])
    torch.testing.assert_close(as_weights[name] / 2, after[name])
    # where nothing but the isometric 1/sqrt(k) acts, both are the same
    assert torch.allclose(as_weights["h.0.attn.v.weight"], after["h.0.attn.v.weight"])


@pytest.mark.parametrize("operator", ["net2net", "lossless"])
def test_copies_carry_the_true_second_moment(operator):
    old = tiny(8)
    weights = random_weights(old)
    grown = grow(weights, old, 16, GrowConfig(operator=operator, noise=0.0))

    def moment(w, cfg) -> dict:
        batches = [gradients(w, cfg, seed) for seed in range(4)]
        return {name: sum(g[name].square() for g in batches) for name in w}

    carried = carry(grown.plan, as_moments(weights, moment(weights, old)), "transfer")
    assert_close(carried, moment(grown.weights, grown.cfg), SECOND)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.2])
def test_gradients_turn_with_the_weights(epsilon):
    """RMSNorm, gains folded: SRIO computes what NRIO does, and its gradients are R G R^T."""
    old = tiny(8, norm="rmsnorm", bias=False, tied=False)
    _, _, flat = wide_gradients(old, 12, operator="nrio", norm="fold")
    _, grown, turned = wide_gradients(old, 12, operator="srio", norm="fold", epsilon=epsilon)
    R = dense((8, 12), givens(theta(epsilon, 8, 12)))
    for name, spec in grown.plan.specs.items():
        if spec.part == "norm":
            continue
        g = flat[name]
        for dim in spec.dims("residual"):
            g = torch.tensordot(g, R, dims=([dim], [1])).movedim(-1, dim)
        torch.testing.assert_close(turned[name], g, atol=1e-12, rtol=1e-9, msg=name)


def test_srio_carries_the_true_gradient_where_fills_are_silent():
    """RMSNorm with gains of ones, zero fills: exact up to the norm's own scale, sqrt(d_old/d_new),
    which is put back by hand here. The gains themselves are no linear image and are left out."""
    old = tiny(8, norm="rmsnorm", bias=False, tied=False)
    ones = {n: torch.ones(8).double() for n in random_weights(old) if ".ln_" in f".{n}"}
    weights = random_weights(old) | ones
    cfg = GrowConfig(operator="srio", norm="keep", epsilon=0.3, **EXACT)
    grown = grow(weights, old, 12, cfg)
    shrunk = torch.full((12,), math.sqrt(8 / 12), dtype=torch.float64)
    wide = grown.weights | dict.fromkeys(ones, shrunk)
    after = gradients(wide, replace(grown.cfg, norm_eps=old.norm_eps * 8 / 12))
    carried = carry(grown.plan, as_moments(gradients(weights, old)), "transfer")
    assert_close(carried, {n: g for n, g in after.items() if n not in ones})


def test_random_readers_send_gradients_that_no_old_moment_knows():
    """The negative: with free fills the wide gradient of new rows is not 0, what carry says is."""
    settings = {"norm": "keep", "attn": "random", "std": 0.3}
    before, grown, after = wide_gradients(tiny(8), 12, operator="nrio", **settings)
    carried = carry(grown.plan, as_moments(before), "transfer")
    name = "h.0.attn.o.weight"
    assert (carried[f"{name}/{FIRST}"][8:] == 0).all() and (after[name][8:] != 0).any()


# ---- second moments


PADDED = {
    "gpt2": {"norm": "layernorm"},
    "bias": {"norm": "rmsnorm", "bias": True},
    "llama": FAMILIES["llama"] | {"n_kv_head": 2, "n_layer": 1},
    "untied": {"norm": "rmsnorm", "tied": False},
    "untied gpt2": {"norm": "layernorm", "tied": False},
}


@pytest.mark.parametrize("gauge", ["norm", "eps"])
@pytest.mark.parametrize("policy", ["random", "convex", "tiled"])
@pytest.mark.parametrize("family", PADDED)
def test_padding_carries_the_old_blocks_true_gradient(family, policy, gauge):
    """Whatever the free blocks hold. Under LayerNorm up to all-ones of the stream in what writes
    it, a direction of which the parent's norm sees nothing."""
    fills = {"attn": policy, "ffn": policy, "gamma_new": 4.0, "gauge": gauge}
    old = tiny(16, **PADDED[family])
    before, grown, after = wide_gradients(old, 24, operator="pad", **fills)
    carried = carry(grown.plan, as_moments(before), "transfer")
    for name, spec in grown.plan.specs.items():
        block = tuple(map(slice, before[name].shape))
        gap = carried[f"{name}/{FIRST}"][block] - after[name][block]
        blind = old.norm == "layernorm" and spec.writes_residual
        assert blind == bool(gap.abs().max() > 1e-9), name
        if spec.writes_residual:
            gap = gap - gap.mean(spec.out_dim, keepdim=True)
        torch.testing.assert_close(gap, torch.zeros_like(gap), atol=1e-11, rtol=0, msg=name)


def test_padding_carries_the_old_blocks_true_second_moment():
    """The square of a gradient, so divided by c^2; gauge eps scales matrices too."""
    old = tiny(8, norm="rmsnorm")
    before, grown, after = wide_gradients(old, 12, operator="pad", gauge="eps", attn="convex")
    carried = carry(grown.plan, as_moments(before), "transfer")
    for name, g in after.items():
        block = tuple(map(slice, before[name].shape))
        torch.testing.assert_close(carried[f"{name}/{SECOND}"][block], g[block].square())


def test_squares_of_the_rotation():
    old = tiny(8)
    weights = random_weights(old)
    grown = grow(weights, old, 12, GrowConfig(operator="srio"))
    v = {n: w.square() + 0.1 for n, w in weights.items()}
    carried = carry(grown.plan, as_moments(weights, v), "transfer")
    R2 = dense((8, 12), matrix(grown.plan)).square()
    q = v["h.0.attn.q.weight"]
    q = torch.cat([q, q.mean(0, keepdim=True).expand(4, -1)])  # new heads: each column's mean
    q = torch.cat([q, q.mean(1, keepdim=True).expand(-1, 4)], 1)  # new inputs: each row's
    torch.testing.assert_close(carried[f"h.0.attn.q.weight/{SECOND}"], q @ R2.T)
    assert all((m > 0).all() for key, m in carried.items() if key.endswith(SECOND))


@pytest.mark.parametrize("fill, longest", [("carried", 1.5), ("zero", 3.1)])
def test_first_updates_are_not_too_long(fill, longest):
    """A kept step count with empty second moments gives first updates of 3.16 lr at beta2 .999."""
    old = tiny(8)
    weights = random_weights(old)
    grown = grow(weights, old, 12, GrowConfig(operator="nrio"))
    g = gradients(weights, old)
    second = {n: m.square() + 1e-10 for n, m in g.items()}
    moments = carry(grown.plan, as_moments(g, second), "transfer")
    if fill == "zero":
        moments = carry(grown.plan, as_moments(g, second), "asymmetric")
    optimizer, model = adam(grown, moments, step=10_000, betas=(0.9, 0.999))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(*tokens(grown.cfg)).backward()
    optimizer.step()
    name = "wpe.weight"  # its new columns get the gradients of a fresh position table
    moved = (model.get_parameter(name) - before[name]).abs()[:, 8:].max().item() / 1e-3
    assert moved > longest if fill == "zero" else moved < longest


# ---- policies


def adam(grown, moments: dict | None, step: int, betas=(0.9, 0.95), lr=1e-3):
    model = model_of(grown.weights, grown.cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=0.0)
    if moments:
        for name, p in model.named_parameters():
            optimizer.state[p] = {
                "step": torch.tensor(float(step)),
                FIRST: moments[f"{name}/{FIRST}"].clone(),
                SECOND: moments[f"{name}/{SECOND}"].clone(),
            }
    return optimizer, model


def test_reset_keeps_nothing_and_asymmetric_only_the_old_block():
    old = tiny(8)
    weights = random_weights(old)
    for operator in ("nrio", "srio", "net2net"):
        plan = grow(weights, old, 12, GrowConfig(operator=operator)).plan
        assert carry(plan, as_moments(weights), "reset") is None
        full, part = (carry(plan, as_moments(weights), p) for p in ("transfer", "asymmetric"))
        for key, m in part.items():
            block = tuple(map(slice, weights[key.rsplit("/", 1)[0]].shape))
            assert torch.equal(m[block], full[key][block])
            assert m.count_nonzero() == m[block].count_nonzero()


@pytest.mark.parametrize(
    "settings, policy, message",
    [({"operator": "aki"}, "transfer", "not defined for operator 'aki'"),
     ({"operator": "pad", "heads": "wider"}, "asymmetric", "not defined for .*heads 'wider'"),
     ({"operator": "srio", "norm": "fold"}, "transfer", "norm 'fold'"),
     ({"operator": "lossless"}, "asymmetric", "interleaves"),
     ({"operator": "srio"}, "halve", "choose one of reset, transfer, asymmetric")],
)  # fmt: skip
def test_what_is_not_defined_is_refused(settings, policy, message):
    old = tiny(8)
    plan = grow(random_weights(old), old, 16, GrowConfig(**settings)).plan
    with pytest.raises(UserError, match=message):
        carry(plan, as_moments(plan.weights), policy)


def test_new_coordinates_cannot_warm_up_alone_where_spaces_grew_apart():
    """The hooks know the old block by the width; the moments themselves are right."""
    old, apart = tiny(8), Apart(ffn_factor=4.0)
    plan = grow(random_weights(old), old, 12, GrowConfig(operator="pad"), apart=apart).plan
    moments = as_moments(plan.weights)
    with pytest.raises(UserError, match="grow with the width"):
        carry(plan, moments, "asymmetric")
    assert carry(plan, moments, "transfer")


def test_learned_operators_and_missing_state_are_refused():
    old = tiny(8)
    plan = grow(random_weights(old), old, 12, GrowConfig(operator="srio")).plan
    learned = replace(plan, cfg=replace(plan.cfg, operator="srio-lo"))
    with pytest.raises(UserError, match="not defined for operator 'srio-lo'"):
        carry(learned, as_moments(plan.weights), "transfer")
    with pytest.raises(UserError, match="needs the parent's optimizer state"):
        carry(plan, None, "transfer")


# ---- re-warm-up of new coordinates


def steps_of(grown, moments, n: int, warm=None, done: int = 0, betas=(0.9, 0.999)):
    """The parameters after n steps; warm: steps of the asymmetric warm-up."""
    optimizer, model = adam(grown, moments, step=500, betas=betas)
    hooks = None
    if warm:
        hooks = NewCoordinates(model, optimizer, shapes_before(grown.cfg, 8), warm, done)
    for i in range(n):
        optimizer.zero_grad()
        sum((p * (i + 1) * torch.arange(p.numel()).view(p.shape).cos()).sum()
            for p in model.parameters()).backward()  # fmt: skip
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, hooks


def test_new_coordinates_move_as_under_a_fresh_warmed_up_adam():
    """Gradients that do not depend on the weights: the reference is plain Adam from an empty state
    under a linear warm-up, and the old block must not notice anything."""
    old = tiny(8)
    grown = grow(random_weights(old), old, 12, GrowConfig(operator="nrio"))
    moments = carry(grown.plan, as_moments(random_weights(old)), "asymmetric")
    plain, _ = steps_of(grown, moments, 5)
    warmed, hooks = steps_of(grown, moments, 5, warm=8)
    optimizer, model = adam(grown, None, 0, betas=(0.9, 0.999))
    for i in range(5):
        optimizer.param_groups[0]["lr"] = 1e-3 * (i + 1) / 8
        optimizer.zero_grad()
        sum((p * (i + 1) * torch.arange(p.numel()).view(p.shape).cos()).sum()
            for p in model.parameters()).backward()  # fmt: skip
        optimizer.step()
    for name, shape in shapes_before(grown.cfg, 8).items():
        block = tuple(map(slice, shape))
        assert torch.equal(warmed[name][block], plain[name][block]), name
        fresh, mine = model.get_parameter(name).detach().clone(), warmed[name].clone()
        fresh[block] = mine[block] = 0
        torch.testing.assert_close(mine, fresh, atol=1e-7, rtol=0, msg=name)  # Adam's eps
        if fresh.numel() > math.prod(shape):
            plain[name][block] = 0
            assert not torch.allclose(mine, plain[name], atol=1e-5)  # the hooks did act
    assert hooks.handles


def test_the_hooks_leave_when_the_warm_up_is_over():
    old = tiny(8)
    grown = grow(random_weights(old), old, 12, GrowConfig(operator="nrio"))
    moments = carry(grown.plan, as_moments(random_weights(old)), "asymmetric")
    _, hooks = steps_of(grown, moments, 130, warm=4, betas=(0.9, 0.95))
    assert not hooks.handles and hooks.done < 130
    resumed, hooks = steps_of(grown, moments, 1, warm=4, done=400, betas=(0.9, 0.95))
    assert not hooks.handles
    torch.testing.assert_close(resumed, steps_of(grown, moments, 1, betas=(0.9, 0.95))[0])


def test_old_shapes_are_the_parents():
    old = tiny(8, activation="swiglu")
    expected = {n: p.shape for n, p in GPT(old, seed=None).named_parameters()}
    assert shapes_before(old.widened(20), 8) == expected
