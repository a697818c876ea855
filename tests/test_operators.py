"""What each operator promises, and where the promise ends (float64)."""

import math
from dataclasses import replace
from functools import reduce
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from growth.apply import check_covers, grow
from growth.learn import widen
from growth.operators import OPERATORS, ligo, lrio, mrio, net2net, srio
from growth.plan import GrowConfig
from growth.rotation import dense, givens, theta
from tests.grown import gap, plan, random_weights, row_sums, tiny

few = settings(max_examples=20)
FAMILIES = {
    "gpt2": {},
    "relu": {"activation": "relu"},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False},
    "untied": {"tied": False},
    "llama-untied": {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied": False},
}


def through(p, name=None) -> dict:
    """Every wide tensor of a plan, as its static operator makes it."""
    operator = OPERATORS[name or p.cfg.operator]
    return {n: operator.grow_tensor(p, spec) for n, spec in p.specs.items()}


def at_start(p) -> dict:
    """Every wide tensor of a plan as its learned operator starts."""
    operator = OPERATORS[p.cfg.operator].learned
    base = {n: operator.base(p, spec) for n, spec in p.specs.items()}
    return widen(p, operator, base, operator.start(p))


def equal(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict, b: dict) -> bool:
    return all(torch.allclose(a[name], b[name], atol=1e-12, rtol=0) for name in a)


# ---- every operator


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_covers_every_parameter(operator, family):
    old = tiny(8, **FAMILIES[family])
    for d_new in (16,) if operator == "lossless" else (12, 28):
        if operator == "exact-srio" and family == "llama":
            continue  # refused: test_lossless.py
        p = plan(old, d_new, operator=operator, attn="convex", ffn="tiled")
        check_covers(at_start(p) if OPERATORS[operator].learned else through(p), old.widened(d_new))


def test_unknown_and_unfed_operators_are_refused():
    old = tiny(8)
    with pytest.raises(UserError, match="choose one of nrio, srio"):
        grow(random_weights(old), old, 12, GrowConfig(operator="rio"))
    with pytest.raises(UserError, match="needs training batches"):
        grow(random_weights(old), old, 12, GrowConfig(operator="ligo"))


# ---- SRIO


def scaled_norms(wide: dict, old, new):
    """Gains of ones times sqrt(d_old / d_new), and the norm's epsilon to match: what a silent new
    part asks for, since it adds nothing to the variance."""
    r = old.d_model / new.d_model
    gains = {n: w * math.sqrt(r) if ".ln_" in f".{n}" else w for n, w in wide.items()}
    return gains, replace(new, norm_eps=old.norm_eps * r)


def folded_gap(old, weights: dict, epsilon: float, d_new: int, norm: str = "fold") -> float:
    """Zero fills, gains folded into the readers, all rotated by R(epsilon): |dlogit| to the old."""
    zero = {"attn": "zero", "ffn": "zero", "embed": "zero", "norm": norm}
    p = plan(old, d_new, weights=weights, operator="srio", epsilon=epsilon, **zero)
    wide, new = scaled_norms(through(p), old, old.widened(d_new))
    return gap(weights, old, wide, new)


@pytest.mark.parametrize("epsilon, d_new", product([-0.5, 0.0, 0.3, 1.0, 1.1], [12, 20, 44]))
def test_rmsnorm_with_folded_gains_is_exact_for_every_epsilon(epsilon, d_new):
    old = tiny(8, **FAMILIES["llama-untied"])
    assert folded_gap(old, random_weights(old), epsilon, d_new) < 1e-11


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_rmsnorm_is_not_exact_when_gains_are_not_folded(epsilon):
    tied, untied = (tiny(8, **FAMILIES[name]) for name in ("llama", "llama-untied"))
    assert folded_gap(tied, random_weights(tied), epsilon, 12) > 1e-3  # no reader absorbs ln_f's
    assert folded_gap(untied, random_weights(untied), epsilon, 12, norm="keep") > 1e-3


@pytest.mark.parametrize("d_new", [12, 20, 44])
def test_layernorm_with_folded_gains_is_exact_at_epsilon_zero_only(d_new):
    """Recipe 5b's second arrangement. The head has no bias to take ln_f's shift: it must be 0."""
    old = tiny(8, tied=False)
    weights = random_weights(old)
    assert folded_gap(old, weights, 0.0, d_new) > 1e-3
    weights |= {"ln_f.weight": torch.ones(8).double(), "ln_f.bias": torch.zeros(8).double()}
    for epsilon in (-0.5, 0.0, 0.5, 1.0):
        assert (folded_gap(old, weights, epsilon, d_new) < 1e-11) == (epsilon == 0.0)


@few
@given(st.floats(-1, 1), st.integers(0, 9))
def test_rotating_any_rmsnorm_model_changes_nothing_in_its_function(fraction, seed):
    """R commutes with the norm, whatever the fills: SRIO and NRIO compute the same."""
    old, epsilon = tiny(8, **FAMILIES["llama-untied"]), fraction * math.sqrt(3) * 0.999
    weights, new = random_weights(old, seed), old.widened(12)
    shared = {"weights": weights, "norm": "fold", "attn": "convex", "ffn": "tiled"}
    one, two = (through(plan(old, 12, operator=name, epsilon=epsilon, **shared))
                for name in ("nrio", "srio"))  # fmt: skip
    assert gap(one, new, two, new) < 1e-11


def test_the_two_halves_of_srio_act_apart():
    old = tiny(8)
    nrio, full = (through(plan(old, 12, operator=o)) for o in ("nrio", "srio"))
    rotate_only = through(plan(old, 12, operator="srio", norm="keep"))
    gamma_only = through(plan(old, 12, operator="srio", rotate_weights=False))
    for name in nrio:
        is_norm = ".ln_" in f".{name}"
        assert torch.equal(rotate_only[name], (nrio if is_norm else full)[name]), name
        assert torch.equal(gamma_only[name], (full if is_norm else nrio)[name]), name
        off_stream = name.endswith(("q.bias", "k.bias", "v.bias", "up.bias"))
        assert torch.equal(nrio[name], full[name]) == off_stream, name
    unrotated = through(plan(old, 12, operator="srio", rotate_embeddings=False))
    assert torch.equal(unrotated["wte.weight"], nrio["wte.weight"])


def test_gamma_of_ones_grows_to_the_closed_form():
    old = tiny(8)
    p = plan(old, 12, weights=random_weights(old) | {"ln_f.weight": torch.ones(8).double()})
    angle = theta(0.5, 8, 12)
    new = math.cos(angle) + math.sin(angle) * math.sqrt(8 / 4)
    assert through(p)["ln_f.weight"][8:].tolist() == pytest.approx([new] * 4)


# ---- MRIO


def test_mrio_is_srio_at_one_age_bit_for_bit():
    old = tiny(8)
    for epsilon, reading in product((-0.5, 0.0, 0.5, 1.0), ("row-sum", "block")):
        shared = {"epsilon": epsilon, "epsilon_reading": reading, "attn": "convex"}
        assert equal(through(plan(old, 12, operator="srio", **shared)),
                     through(plan(old, 12, operator="mrio", **shared)))  # fmt: skip
    one, two = (through(plan(old, 12, ages=(4,), operator=o)) for o in ("srio", "mrio"))
    assert not equal(one, two)  # a model grown before has another age


@few
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.floats(-0.9, 0.9))
def test_mrio_is_orthogonal_over_any_ages(sizes, epsilon):
    ages = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
    old = tiny(ages[-1], head_dim=1)
    # a negative total may be out of reach of ages much narrower than the new one
    for how in ({"age_epsilon": "each", "epsilon": epsilon}, {"epsilon": abs(epsilon)}):
        p = plan(old, ages[-1] + 3, ages=ages[:-1], operator="mrio", **how)
        R = dense(p.ages, mrio.matrix(p))
        torch.testing.assert_close(R @ R.T, torch.eye(len(R)).double(), atol=1e-12, rtol=0)


AGES = st.lists(st.integers(1, 400), min_size=3, max_size=6)


@few
@given(AGES, st.floats(0, 1), st.sampled_from(["row-sum", "block"]))
def test_mrio_turns_by_one_total_epsilon(sizes, epsilon, reading):
    """Whatever the number of ages, the new row of R^T sums to epsilon, as SRIO's does."""
    ages = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
    cfg = GrowConfig("mrio", epsilon=epsilon, epsilon_reading=reading)
    turns = [givens(t, len(ages), i) for i, t in enumerate(mrio.angles(cfg, ages))]
    G = reduce(lambda done, turn: turn @ done, turns)
    root = torch.tensor([float(n) for n in sizes], dtype=torch.float64).sqrt()
    row = (G.T[-1] * root).sum() / root[-1] if reading == "row-sum" else G[-1, -1]
    assert row.item() == pytest.approx(epsilon, abs=1e-9)


def test_epsilon_per_age_is_another_strength():
    """The sums that made a common total necessary: 256 -> 384 -> 512 -> 640 at 0.5."""
    each = GrowConfig("mrio", age_epsilon="each")
    for ages, total in (((256, 384, 512), 0.026), ((256, 384, 512, 640), -0.406)):
        assert mrio.total_epsilon(mrio.angles(each, ages), ages) == pytest.approx(total, abs=1e-3)
    old = tiny(8)
    one, two = (plan(old, 12, operator="mrio", age_epsilon=a) for a in ("total", "each"))
    assert torch.equal(mrio.matrix(one), mrio.matrix(two))  # one older age: SRIO
    with pytest.raises(UserError, match="epsilon is 1.9.* reaches"):
        mrio.angles(GrowConfig("mrio", epsilon=1.9), (48, 72, 96))


def test_mrio_has_one_epsilon_per_age():
    old = tiny(12)
    for i, epsilons in enumerate([(0.3, 1.0), (1.0, 0.3)]):
        p = plan(old, 16, ages=(8,), operator="mrio", epsilons=epsilons)
        angle = theta(0.3, (8, 4)[i], (8, 4)[i] + 4)
        assert torch.equal(mrio.matrix(p), givens(angle, 3, i))
    p = plan(old, 16, ages=(8,), operator="mrio", epsilons=(0.3, 0.6))
    oldest_first = givens(theta(0.6, 4, 8), 3, 1) @ givens(theta(0.3, 8, 12), 3, 0)
    torch.testing.assert_close(mrio.matrix(p), oldest_first)
    with pytest.raises(UserError, match="epsilons has 1 values .* 2 older ages"):
        mrio.matrix(plan(old, 16, ages=(8,), operator="mrio", epsilons=(0.3,)))


# ---- learned operators: where they start, what their parameters mean


@pytest.mark.parametrize("learned, static", [("srio-lo", "srio"), ("srio-free", "srio"),
                                             ("mrio-lo", "mrio"), ("lrio", "nrio")])  # fmt: skip
def test_learning_starts_at_the_static_operator_bit_for_bit(learned, static):
    old, ages = tiny(12), (8,)
    start = at_start(plan(old, 20, ages=ages, operator=learned))
    assert equal(start, through(plan(old, 20, ages=ages, operator=static)))


def test_orthogonal_lrio_starts_at_the_identity_and_stays_orthogonal():
    p = plan(tiny(8), 12, operator="lrio-orth")
    assert close(at_start(p), through(plan(tiny(8), 12, operator="nrio")))
    noise = {side: P + torch.randn_like(P) for side, P in lrio.orthogonal_params(p).items()}
    for M in lrio.orthogonal_maps(p, noise).values():
        torch.testing.assert_close(M @ M.T, torch.eye(12).double())
        assert (M - torch.eye(12)).abs().max() > 0.1
    M = lrio.free_maps(p, {"out": torch.randn(12, 12).double()})["out"]
    assert (M @ M.T - torch.eye(12)).abs().max() > 0.1  # the unconstrained one does not


def test_srio_lo_adds_an_angle_to_each_side():
    p = plan(tiny(8), 12, operator="srio-lo")
    params = {"out": torch.tensor([0.2]).double(), "in": torch.tensor([-0.1]).double()}
    angle, maps = theta(0.5, 8, 12), srio.turn_maps(p, params)
    torch.testing.assert_close(maps["out"], givens(angle + 0.2))
    torch.testing.assert_close(maps["in"], givens(angle - 0.1))
    base = OPERATORS["nrio"].grow_tensor(p, p.specs["h.0.attn.q.weight"])
    q = srio.fold(p, p.specs["h.0.attn.q.weight"], base, maps)
    torch.testing.assert_close(q, base @ dense((8, 12), maps["in"]).T)
    base = OPERATORS["nrio"].grow_tensor(p, p.specs["h.0.attn.o.weight"])
    o = srio.fold(p, p.specs["h.0.attn.o.weight"], base, maps)
    torch.testing.assert_close(o, dense((8, 12), maps["out"]) @ base)


def test_srio_free_parameters_are_row_sums():
    p, dS = plan(tiny(8), 12, operator="srio-free"), torch.randn(2, 2).double()
    R = dense((8, 12), srio.free_maps(p, {"out": dS})["out"])
    sums = torch.stack([R[:, :8].sum(1), R[:, 8:].sum(1)], 1)[[0, 8]]
    torch.testing.assert_close(sums, row_sums(theta(0.5, 8, 12), 8, 12) + dS)


def test_ligo_is_the_product_of_its_maps():
    p = plan(tiny(8, activation="swiglu"), 12, operator="ligo")
    params = ligo.init_params(p)
    for C in params.values():
        assert (C >= 0).all()
        torch.testing.assert_close(C.sum(1), torch.ones(len(C)).double())
    B, W = ligo.maps(p, params), p.weights
    assert set(B) == {"residual"} | {f"h.{i}.{m}" for i in (0, 1) for m in ("q", "k", "v", "ffn")}
    r, q, v, f = (B[n] for n in ("residual", "h.1.q", "h.1.v", "h.1.ffn"))
    expected = {
        "wte.weight": W["wte.weight"] @ r.T,
        "wpe.weight": W["wpe.weight"] @ r.T,
        "h.1.ln_1.weight": r @ W["h.1.ln_1.weight"],
        "h.1.attn.q.weight": q @ W["h.1.attn.q.weight"] @ r.T,
        "h.1.attn.q.bias": q @ W["h.1.attn.q.bias"],
        "h.1.attn.o.weight": r @ W["h.1.attn.o.weight"] @ v.T,
        "h.1.attn.o.bias": r @ W["h.1.attn.o.bias"],
        "h.1.mlp.gate.weight": f @ W["h.1.mlp.gate.weight"] @ r.T,
        "h.1.mlp.down.weight": r @ W["h.1.mlp.down.weight"] @ f.T,
    }
    start = at_start(p)
    for name, w in expected.items():
        torch.testing.assert_close(start[name], w)


# ---- copies


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operator", ["net2net", "sparkling"])
def test_copies_are_exact_at_whole_ratios_only(family, operator):
    old = tiny(8, **FAMILIES[family])
    for d_new, exact in ((16, True), (24, True), (12, False)):
        p = plan(old, d_new, operator=operator, noise=0.0)
        assert (gap(p.weights, old, through(p), old.widened(d_new)) < 1e-11) == exact
    if operator == "net2net":
        p = plan(old, 16, operator=operator)  # its default noise parts the copies
        assert gap(p.weights, old, through(p), old.widened(16)) > 1e-5


def test_net2net_copies_whole_heads_as_evenly_as_possible():
    p = plan(tiny(8), 28, operator="net2net")
    idx = net2net.drawn(p, p.specs["h.0.attn.q.weight"], "heads")
    assert (idx.view(-1, 4) % 4 == torch.arange(4)).all() and (idx[:8] == torch.arange(8)).all()
    assert sorted(torch.bincount(idx[::4] // 4).tolist()) == [3, 4]
    q, o = (net2net.drawn(p, p.specs[f"h.0.attn.{x}.weight"], "heads") for x in "qo")
    assert torch.equal(q, o)


def test_aki_takes_new_rows_from_the_layer_above():
    old = tiny(8)
    p = plan(old, 12, operator="aki", noise=0.0)
    aki, fpi = through(p), through(p, "net2net")
    for name in aki:
        same = torch.equal(aki[name], fpi[name])
        assert same == (not name.startswith("h.0.") or ".ln_" in name), name
    rows = net2net.drawn(p, p.specs["h.0.mlp.up.bias"], "ffn")[16:]
    assert torch.equal(aki["h.0.mlp.up.bias"][16:], p.weights["h.1.mlp.up.bias"][rows])
    assert torch.equal(aki["h.0.mlp.up.bias"][:16], p.weights["h.0.mlp.up.bias"])


def test_sparkling_keeps_the_rms_of_what_is_read():
    old = tiny(64, head_dim=8)
    p = plan(old, 96, operator="sparkling")
    W, wide = p.weights["h.0.mlp.up.weight"], through(p)["h.0.mlp.up.weight"]
    x = torch.randn(64, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, after = W @ x, wide @ x[torch.arange(96) % 64]
    ratio = after.square().mean().sqrt() / before.square().mean().sqrt()
    assert ratio.item() == pytest.approx(1, abs=0.05)


# ---- gains, SZP


@pytest.mark.parametrize("ratio", [1.0, 0.5, 2.0])
def test_gains_set_the_ratio_and_nothing_else(ratio):
    old = tiny(8)
    p = plan(old, 12, operator="gains", gain_ratio=ratio, attn="convex", ffn="tiled")
    nrio, wide = through(p, "nrio"), through(p)
    if ratio == 1:
        assert equal(nrio, wide)
    for name, spec in p.specs.items():
        if spec.part != "norm" or spec.is_bias:
            assert torch.equal(nrio[name], wide[name])
            continue
        factor = wide[name] / nrio[name]
        assert torch.allclose(factor[8:] / factor[0], torch.tensor(ratio).double())
        assert torch.allclose(factor[:8], factor[0])
        ones = torch.cat([factor[:8], factor[8:]])
        assert ones.square().sum().item() == pytest.approx(12)


def test_gains_at_srios_ratio_are_srios_gains():
    """With gains of 1, SRIO's rotation is one point of this family: 0.72 and 1.40 at 64 -> 96."""
    weights = {n: torch.ones_like(w) for n, w in random_weights(tiny(64)).items()}
    angle, r = theta(0.5, 64, 96), math.sqrt(2)
    old, new = math.cos(angle) - math.sin(angle) / r, math.cos(angle) + math.sin(angle) * r
    assert (old, new) == (pytest.approx(0.724, abs=1e-3), pytest.approx(1.397, abs=1e-3))
    srio_, gains_ = (
        through(plan(tiny(64), 96, weights=weights, operator=name, gain_ratio=new / old))
        for name in ("srio", "gains")
    )
    torch.testing.assert_close(srio_["ln_f.weight"], gains_["ln_f.weight"])


def test_szp_shrinks_pads_and_perturbs_everything():
    old = tiny(64, head_dim=16)
    weights = random_weights(old)
    p = plan(old, 128, weights=weights, operator="szp", shrink=0.25)
    silent = through(replace(p, cfg=replace(p.cfg, std=1e-30)))
    wide = through(p)
    for name, spec in p.specs.items():
        w, block = weights[name], tuple(map(slice, weights[name].shape))
        factor = 1.0 if spec.part == "norm" else 0.25
        torch.testing.assert_close(silent[name][block], factor * w)
        fresh = wide[name] - silent[name]
        if w.ndim == 1:
            assert not fresh.any()
            continue
        fan = 1.0 if spec.part == "embed" else math.sqrt(1 / 2)
        writers = math.sqrt(1 / (2 * old.n_layer)) if spec.part in ("o", "down") else 1.0
        for piece in (fresh, fresh[block]):  # the old block too
            assert piece.std().item() == pytest.approx(0.02 * fan * writers, rel=0.1)
