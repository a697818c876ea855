"""The operators that keep the function: their modules by name, and the config each needs.

A module has grow_tensor(plan, spec), check(plan) and config_change(plan).
"""

from dataclasses import replace

from errors import UserError
from growth import exact_srio, lossless, pad
from growth.gauge import ConfigChange
from growth.plan import GrowConfig, Plan
from models.gpt import GPTConfig

EXACT = {"lossless": lossless, "pad": pad, "exact-srio": exact_srio}


def new_head_dim(cfg: GrowConfig, head_dim: int, d_old: int, d_new: int) -> int:
    """hd_new: kept with more heads, grown like the width with wider ones.

    Raises UserError for wider heads under an operator that has none, or of no whole size.
    """
    if cfg.heads == "more":
        return head_dim
    if cfg.operator not in EXACT:
        raise UserError(
            f"heads wider needs one of {', '.join(EXACT)}, not {cfg.operator!r}; use heads more"
        )
    if head_dim * d_new % d_old:
        step = d_old // head_dim
        low = d_new // step * step
        raise UserError(
            f"heads wider: head_dim {head_dim} x {d_new}/{d_old} is no whole number; the nearest "
            f"widths that give one are {low} and {low + step}"
        )
    return head_dim * d_new // d_old


def config_change(plan: Plan) -> ConfigChange:
    """What the config must change beyond its sizes; checks that the operator can act at all."""
    operator = EXACT.get(plan.cfg.operator)
    if operator is None:
        return ConfigChange()
    operator.check(plan)
    return operator.config_change(plan)


def exact_config(plan: Plan, old: GPTConfig, new: GPTConfig) -> GPTConfig:
    """`new` with the epsilon and the RoPE frequencies that make the result exact."""
    change = config_change(plan)
    return replace(
        new,
        norm_eps=old.norm_eps * change.eps,
        rope_repeat=old.rope_repeat * change.rope_repeat,
        rope_theta=old.rope_theta**change.theta_power,
    )
