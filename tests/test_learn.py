"""Learning an operator: true gradients, determinism, costs, refusals."""

import pytest
import torch
from torch.func import functional_call

from errors import UserError
from growth.apply import grow
from growth.learn import fold_flops, learn, widen
from growth.operators import OPERATORS, nrio
from growth.plan import GrowConfig
from models.gpt import GPT, flops_per_token
from tests.grown import model_of, plan, random_weights, tiny, tokens

STEPS = 12
LEARNED = [name for name, operator in OPERATORS.items() if operator.learned]


def batches(cfg, n: int = STEPS, seed: int = 0) -> list:
    """One learnable batch again and again: each token's successor is fixed."""
    x, _ = tokens(cfg, n=4, seed=seed)
    return [(x, (3 * x + 1) % cfg.vocab_size)] * n


def learned_plan(operator: str, d_new: int = 12, old=None, **settings):
    settings = {"learn_steps": STEPS, "learn_lr": 1e-2} | settings
    return plan(old or tiny(8), d_new, operator=operator, **settings)


def start(p):
    """(operator, base tensors, parameters that ask for gradients)."""
    operator = OPERATORS[p.cfg.operator].learned
    base = {name: operator.base(p, spec) for name, spec in p.specs.items()}
    return operator, base, {n: v.requires_grad_() for n, v in operator.start(p).items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("operator", LEARNED)
def test_functional_call_equals_an_explicit_wide_model(operator, tied):
    """Loss, and the gradient by hand: the explicit model's, pulled back through the fold. A tied
    head that kept its old weight, or got half a gradient, would show here."""
    p = learned_plan(operator, old=tiny(8, tied=tied))
    new, (x, y) = tiny(8, tied=tied).widened(12), tokens(tiny(8))
    operator, base, params = start(p)
    wide = widen(p, operator, base, params)
    explicit = model_of({n: w.detach() for n, w in wide.items()}, new)
    loss = functional_call(GPT(new, seed=None).double(), wide, (x, y))
    assert torch.equal(loss, explicit(x, y))
    direct = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
    explicit(x, y).backward()
    pairs = [(wide[n], q.grad) for n, q in explicit.named_parameters() if wide[n].requires_grad]
    tensors, gradients = zip(*pairs, strict=True)
    pulled = torch.autograd.grad(tensors, list(params.values()), gradients)
    for one, two in zip(direct, pulled, strict=True):
        torch.testing.assert_close(one, two)
    assert all(g.abs().max() > 0 for g in direct)


@pytest.mark.parametrize("operator", LEARNED)
def test_learning_lowers_the_loss_and_is_deterministic(operator):
    old, weights = tiny(8), random_weights(tiny(8))
    before = {name: w.clone() for name, w in weights.items()}
    lr = 1e-3 if operator == "ligo" else 1e-2
    cfg = GrowConfig(operator=operator, learn_steps=STEPS, learn_lr=lr, attn="convex")
    one, two = (grow(weights, old, 12, cfg, batches=batches(old)) for _ in range(2))
    assert one.learned.losses == two.learned.losses
    assert all(torch.equal(one.weights[n], two.weights[n]) for n in one.weights)
    assert one.learned.losses[-1] < one.learned.losses[0]
    x, y = batches(old)[0]
    assert model_of(one.weights, one.cfg)(x, y) < one.learned.losses[0]  # what is folded is learned
    assert all(torch.equal(before[n], w) for n, w in weights.items())  # the parent is frozen
    other = grow(weights, old, 12, cfg, batches=batches(old, seed=7))
    assert other.learned.losses != one.learned.losses


def test_costs_are_counted():
    old = tiny(8)
    new, p = old.widened(12), learned_plan("lrio")
    result = learn(p, OPERATORS["lrio"].learned, new, batches(old))
    x, _ = batches(old)[0]
    assert (result.steps, result.tokens) == (STEPS, STEPS * x.numel())
    assert len(result.losses) == STEPS and result.wall_s > 0
    # a (n x d) . (d x d) product and its gradient in the operator: 2 n d d each. One such pair per
    # residual axis of every parameter, n the tensor's other size
    wide = {n: nrio.grow_tensor(p, s).numel() for n, s in p.specs.items() if s.dims("residual")}
    each = sum(4 * 12 * numel for numel in wide.values())
    assert result.flops == result.tokens * flops_per_token(new) + STEPS * each


def test_a_dense_operator_costs_more_than_a_rotation():
    cost = {}
    for operator in ("srio-lo", "lrio", "ligo"):
        p = learned_plan(operator)
        cost[operator] = fold_flops(p, *start(p))
    assert 0 < cost["srio-lo"] < cost["lrio"] < cost["ligo"]


def test_weight_decay_pulls_to_the_start():
    old = tiny(8)
    sizes = {}
    for decay in (0.0, 50.0):
        p = learned_plan("lrio", learn_weight_decay=decay)
        D = learn(p, OPERATORS["lrio"].learned, old.widened(12), batches(old)).params["out"]
        sizes[decay] = D.abs().max().item()
    assert 0 < sizes[50.0] < sizes[0.0]


def test_divergence_is_refused_with_advice():
    with pytest.raises(UserError, match=r"loss (nan|inf) at step \d+ with learn_lr 1e\+300; lower"):
        p = learned_plan("lrio", learn_lr=1e300)
        learn(p, OPERATORS["lrio"].learned, tiny(8).widened(12), batches(tiny(8)))


def test_too_few_batches_are_refused():
    with pytest.raises(UserError, match="12 steps but only 5 batches"):
        p = learned_plan("ligo")
        learn(p, OPERATORS["ligo"].learned, tiny(8).widened(12), batches(tiny(8), n=5))


def test_an_operator_that_acts_on_nothing_is_refused():
    with pytest.raises(UserError, match="nothing to learn"):
        p = learned_plan("srio-lo", rotate_weights=False, norm="keep")
        learn(p, OPERATORS["srio-lo"].learned, tiny(8).widened(12), batches(tiny(8)))
    p = learned_plan("srio-lo", rotate_weights=False)  # gains alone: the "in" angle has no gradient
    result = learn(p, OPERATORS["srio-lo"].learned, tiny(8).widened(12), batches(tiny(8)))
    assert result.params["out"] != 0 and result.params["in"] == 0


def test_progress_is_shown(capsys):
    p = learned_plan("srio-lo")
    learn(p, OPERATORS["srio-lo"].learned, tiny(8).widened(12), batches(tiny(8)))
    shown = capsys.readouterr()
    assert "learning srio-lo" in shown.err and not shown.out
