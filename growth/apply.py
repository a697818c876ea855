"""The one pipeline of growth: a Source and a width make a Plan, and every parameter goes through
its operator, one at a time. growth/child.py writes what comes out as our checkpoint,
growth/folder.py as a Hugging Face folder."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from errors import UserError
from growth.learn import LearnResult, learn
from growth.operators import OPERATORS, find
from growth.plan import GrowConfig, Plan, Source
from models.axes import Spec, gpt_arch, specs
from models.gpt import GPT, GPTConfig
from models.sizes import TOGETHER, Apart, fitting


def plan_growth(
    source: Source,
    d_new: int,
    cfg: GrowConfig,
    ages: tuple[int, ...] = (),
    apart: Apart = TOGETHER,
) -> Plan:
    """The plan for `source` at width `d_new`; no tensor is read. ages: the widths of earlier
    stages, oldest first, without the present one (a model never grown has none); apart: what does
    not follow the width, which may then stay.

    Raises UserError for an unknown operator, an impossible width (with the nearest that work), and
    for what the operator cannot do with this model.
    """
    operator, wider = find(cfg.operator), cfg.heads == "wider"
    if wider and not operator.wider_heads:
        able = [name for name, each in OPERATORS.items() if each.wider_heads]
        raise UserError(
            f"heads wider needs one of {', '.join(able)}, not {cfg.operator!r}; use heads more"
        )

    if apart and not operator.each_space:
        able = [name for name, each in OPERATORS.items() if each.each_space]
        raise UserError(
            f"method {cfg.operator} grows all spaces alike; --heads N and --ffn-factor need one of "
            f"{', '.join(able)}"
        )
    d_old = source.sizes.d_model

    def plan(d: int) -> Plan:
        new = source.sizes.at_width(d, wider, operator.whole, apart)
        made = Plan(cfg, source, new, (*ages, d_old, d) if d > d_old else (*ages, d), apart)
        operator.check(made)
        return made

    return fitting(plan, d_old, d_new, same=bool(apart))


@torch.no_grad()
def grow_all(
    plan: Plan, params: dict | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, wide tensor) of every parameter, or of `names`, one at a time. params: a learned
    operator's."""
    make = maker(plan, params)
    for name in plan.specs if names is None else names:
        yield name, make(plan.specs[name])


def maker(plan: Plan, params: dict | None) -> Callable[[Spec], torch.Tensor]:
    """spec -> wide tensor."""
    operator = find(plan.cfg.operator)
    if operator.grow_tensor:
        return lambda spec: operator.grow_tensor(plan, spec)
    if params is None:
        raise UserError(
            f"method {plan.cfg.operator!r} is learned and needs training batches: run_ablations.py"
        )
    maps = operator.learned.maps(plan, params)
    return lambda spec: operator.learned.fold(plan, spec, operator.learned.base(plan, spec), maps)


def stored_as(name: str, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`wide` in the dtype it is stored in; UserError where an entry is not finite there."""
    stored = wide.to(dtype).contiguous()
    if torch.isfinite(torch.stack(stored.aminmax())).all():  # NaN and inf reach the extremes
        return stored
    if torch.isfinite(torch.stack(wide.aminmax())).all():
        raise UserError(
            f"grown parameter {name} has entries up to {wide.abs().max().item():.3g}, more than "
            f"{dtype} holds; store it as bfloat16 or float32"
        )
    raise UserError(f"grown parameter {name} is not finite; check the source's {name}")


# ---- our GPTs


@dataclass(frozen=True)
class Grown:
    """A wider model: its weights by name, its config, the plan that made it, and what learning the
    operator gave and cost (None for a static one)."""

    weights: dict[str, torch.Tensor]
    cfg: GPTConfig
    plan: Plan
    learned: LearnResult | None = None


def grow(
    weights: dict,
    old: GPTConfig,
    d_new: int,
    cfg: GrowConfig,
    ages: tuple[int, ...] = (),
    batches: Iterable | None = None,
    apart: Apart = TOGETHER,
) -> Grown:
    """Widen a GPT's state_dict to `d_new` (head_dim kept, more heads, unless cfg.heads is wider).

    batches: (x, y) tokens (B, T) for cfg.learn_steps steps; learned operators need them.
    Raises UserError as plan_growth does.
    """
    plan, learned = plan_growth(gpt_source(weights, old), d_new, cfg, ages, apart), None
    new, operator = wide_config(plan, old), find(cfg.operator)
    if operator.learned and batches is not None:
        learned = learn(plan, operator.learned, new, batches)
    wide = dict(grow_all(plan, learned and learned.params))
    check_covers(wide, new)
    return Grown(wide, new, plan, learned)


def gpt_source(weights: dict, cfg: GPTConfig) -> Source:
    return Source(specs("gpt", weights), weights, cfg.sizes, gpt_arch(cfg), cfg.tied)


def wide_config(plan: Plan, old: GPTConfig) -> GPTConfig:
    """The grown model's config, with the epsilon and the RoPE frequencies its operator asks for."""
    change = find(plan.cfg.operator).config_change(plan)
    return replace(
        old.resized(plan.new),
        norm_eps=old.norm_eps * change.eps,
        rope_repeat=old.rope_repeat * change.rope_repeat,
        rope_theta=old.rope_theta**change.theta_power,
    )


def check_growth(old: GPTConfig, d_new: int, cfg: GrowConfig, ages: tuple[int, ...] = ()) -> Plan:
    """The plan for a model of this config without its weights; the UserErrors of plan_growth."""
    return plan_growth(gpt_source(no_weights(old), old), d_new, cfg, ages)


@cache
def no_weights(cfg: GPTConfig) -> dict[str, torch.Tensor]:
    """The model's parameters by name, shapes without memory."""
    with torch.device("meta"):
        return dict(GPT(cfg, seed=None).named_parameters())


def check_covers(weights: dict, cfg: GPTConfig) -> None:
    """Every parameter of the wide model is there once, by name, with its shape and finite."""
    target = {name: p.shape for name, p in no_weights(cfg).items()}
    assert weights.keys() == target.keys(), f"names differ: {weights.keys() ^ target.keys()}"
    for name, w in weights.items():
        assert w.shape == target[name], f"{name}: {tuple(w.shape)}, needs {tuple(target[name])}"
        if not torch.isfinite(w).all():
            raise UserError(f"grown parameter {name} is not finite; check the parent checkpoint")
