"""Grow one of our GPTs: sizes and ages from two configs, every parameter through the operator."""

from dataclasses import dataclass

import torch

from errors import UserError
from growth import nrio, srio
from growth.plan import GrowConfig, Plan
from models.axes import specs
from models.gpt import GPT, GPTConfig

OPERATORS = {"nrio": nrio.grow_tensor, "srio": srio.grow_tensor}


@dataclass(frozen=True)
class Grown:
    """A wider model: its weights by name, its config, and the plan that made it."""

    weights: dict[str, torch.Tensor]
    cfg: GPTConfig
    plan: Plan


def plan_gpt(weights: dict, old: GPTConfig, new: GPTConfig, cfg: GrowConfig, ages=()) -> Plan:
    """The plan for old -> new; `ages` are the widths of earlier stages, oldest first, without
    old.d_model (a model never grown has none)."""
    sizes = {
        "residual": (old.d_model, new.d_model),
        "heads": (old.n_head * old.head_dim, new.n_head * new.head_dim),
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
    )


def grow(weights: dict, old: GPTConfig, d_new: int, cfg: GrowConfig, ages=()) -> Grown:
    """Widen a GPT's state_dict to `d_new` (head_dim kept, more heads).

    Raises UserError for an unknown operator, an impossible width, or epsilon out of range.
    """
    if cfg.operator not in OPERATORS:
        raise UserError(
            f"operator {cfg.operator!r} is unknown; choose one of {', '.join(OPERATORS)}"
        )
    new = old.widened(d_new)
    if new.d_model == old.d_model:
        raise UserError(f"new width {d_new} is the old width; growth needs a larger one")
    plan = plan_gpt(weights, old, new, cfg, ages)
    operator = OPERATORS[cfg.operator]
    wide = {name: operator(plan, spec) for name, spec in plan.specs.items()}
    check_covers(wide, new)
    return Grown(wide, new, plan)


def check_covers(weights: dict, cfg: GPTConfig) -> None:
    """Every parameter of the wide model is there once, by name, with its shape and finite."""
    with torch.device("meta"):
        target = {name: p.shape for name, p in GPT(cfg, seed=None).named_parameters()}
    assert weights.keys() == target.keys(), f"names differ: {weights.keys() ^ target.keys()}"
    for name, w in weights.items():
        assert w.shape == target[name], f"{name}: {tuple(w.shape)}, needs {tuple(target[name])}"
        if not torch.isfinite(w).all():
            raise UserError(f"grown parameter {name} is not finite; check the parent checkpoint")
