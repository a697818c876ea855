"""Grow one of our GPTs: sizes and ages from two configs, every parameter through the operator."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from errors import UserError
from growth import exact_srio, ligo, lossless, lrio, mrio, net2net, nrio, pad, sparkling, srio
from growth.exact import exact_config, new_head_dim
from growth.learn import Learned, LearnResult, learn, widen
from growth.plan import GrowConfig, Plan
from growth.rotation import theta
from models.axes import gpt_arch, specs
from models.gpt import GPT, GPTConfig

OPERATORS = {
    "nrio": nrio.grow_tensor,
    "srio": srio.grow_tensor,
    "mrio": mrio.grow_tensor,
    "net2net": net2net.grow_tensor,
    "aki": net2net.grow_advanced,
    "sparkling": sparkling.grow_tensor,
    "lossless": lossless.grow_tensor,
    "pad": pad.grow_tensor,
    "exact-srio": exact_srio.grow_tensor,
}
LEARNED = {  # start, maps, base, fold: growth/learn.py
    "srio-lo": Learned(srio.turn_params, srio.turn_maps, nrio.grow_tensor, srio.fold),
    "srio-free": Learned(srio.free_params, srio.free_maps, nrio.grow_tensor, srio.fold),
    "mrio-lo": Learned(mrio.turn_params, mrio.turn_maps, nrio.grow_tensor, srio.fold),
    "lrio": Learned(lrio.free_params, lrio.free_maps, nrio.grow_tensor, lrio.fold),
    "lrio-orth": Learned(lrio.orthogonal_params, lrio.orthogonal_maps, nrio.grow_tensor, lrio.fold),
    "ligo": Learned(ligo.init_params, ligo.maps, nrio.fold_norm, ligo.fold),
}


@dataclass(frozen=True)
class Grown:
    """A wider model: its weights by name, its config, the plan that made it, and what learning the
    operator gave and cost (None for a static one)."""

    weights: dict[str, torch.Tensor]
    cfg: GPTConfig
    plan: Plan
    learned: LearnResult | None = None


def plan_gpt(weights: dict, old: GPTConfig, new: GPTConfig, cfg: GrowConfig, ages=()) -> Plan:
    """The plan for old -> new; `ages` are the widths of earlier stages, oldest first, without
    old.d_model (a model never grown has none)."""
    sizes = {
        "residual": (old.d_model, new.d_model),
        "heads": (old.n_head * old.head_dim, new.n_head * new.head_dim),
        "kv": (old.kv_heads * old.head_dim, new.kv_heads * new.head_dim),
        "ffn": (old.d_ff, new.d_ff),
    }
    return Plan(
        cfg,
        specs("gpt", weights),
        sizes,
        (old.head_dim, new.head_dim),
        old.n_layer,
        (*ages, old.d_model, new.d_model),
        weights,
        old.tied,
        gpt_arch(old, new),
    )


def grow(
    weights: dict,
    old: GPTConfig,
    d_new: int,
    cfg: GrowConfig,
    ages: tuple[int, ...] = (),
    batches: Iterable | None = None,
) -> Grown:
    """Widen a GPT's state_dict to `d_new` (head_dim kept, more heads, unless cfg.heads is wider).

    batches: (x, y) tokens (B, T) for cfg.learn_steps steps; learned operators need them.
    Raises UserError for an unknown operator, an impossible width, or epsilon out of range.
    """
    new = wide_config(old, d_new, cfg, ages)
    plan, learned = plan_gpt(weights, old, new, cfg, ages), None
    new = exact_config(plan, old, new)
    if cfg.operator in LEARNED:
        if batches is None:
            raise UserError(f"operator {cfg.operator!r} is learned and needs training batches")
        operator = LEARNED[cfg.operator]
        learned = learn(plan, operator, new, batches)
        with torch.no_grad():
            base = {name: operator.base(plan, spec) for name, spec in plan.specs.items()}
            wide = widen(plan, operator, base, learned.params)
    else:
        operator = OPERATORS[cfg.operator]
        wide = {name: operator(plan, spec) for name, spec in plan.specs.items()}
    check_covers(wide, new)
    return Grown(wide, new, plan, learned)


def wide_config(
    old: GPTConfig, d_new: int, cfg: GrowConfig, ages: tuple[int, ...] = ()
) -> GPTConfig:
    """The grown model's sizes, without touching a weight; the UserErrors that grow() would raise
    for the operator, the width and epsilon."""
    names = (*OPERATORS, *LEARNED)
    if cfg.operator not in names:
        raise UserError(f"operator {cfg.operator!r} is unknown; choose one of {', '.join(names)}")
    new = old.widened(d_new, new_head_dim(cfg, old.head_dim, old.d_model, d_new))
    if new.d_model == old.d_model:
        raise UserError(f"new width {d_new} is the old width; growth needs a larger one")
    for epsilon in (cfg.epsilon, *cfg.epsilons):
        theta(epsilon, old.d_model, d_new, cfg.epsilon_reading)
    if cfg.operator.startswith("mrio"):  # an older age is narrower: its range of epsilon is too
        mrio.angles(cfg, (*ages, old.d_model, d_new))
    return new


def check_covers(weights: dict, cfg: GPTConfig) -> None:
    """Every parameter of the wide model is there once, by name, with its shape and finite."""
    with torch.device("meta"):
        target = {name: p.shape for name, p in GPT(cfg, seed=None).named_parameters()}
    assert weights.keys() == target.keys(), f"names differ: {weights.keys() ^ target.keys()}"
    for name, w in weights.items():
        assert w.shape == target[name], f"{name}: {tuple(w.shape)}, needs {tuple(target[name])}"
        if not torch.isfinite(w).all():
            raise UserError(f"grown parameter {name} is not finite; check the parent checkpoint")
