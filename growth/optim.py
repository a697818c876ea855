"""Adam's state through growth: what becomes of exp_avg and exp_avg_sq when the weights widen.

    reset       nothing is kept
    transfer    both moments through the operator's map (growth/moments.py), step kept
    asymmetric  as transfer in the old block; the new coordinates start with no state and their own
                learning-rate warm-up (growth/rewarm.py)

An operator's record says whether such a map is defined: for rotations, copies and padding.
Elsewhere T^T T has no inverse or T is not known to preserve anything, and the state must be reset:
learned operators, aki. asymmetric needs an old block, which lossless, interleaving, has not.
"""

from typing import Literal, get_args

import torch

from errors import UserError
from growth.moments import FIRST, SECOND
from growth.operators import OPERATORS, find
from growth.plan import GrowConfig, Plan

State = Literal["reset", "transfer", "asymmetric"]
STATES = get_args(State)


def carry(plan: Plan, moments: dict[str, torch.Tensor] | None, policy: str) -> dict | None:
    """The child's moments, keyed "<parameter>/exp_avg" and "<parameter>/exp_avg_sq"; None on reset.

    Raises UserError for an unknown policy, a parent without moments, and an operator or sizes for
    which the policy is not defined.
    """
    check_policy(policy, plan.cfg)
    check_apart(plan, policy)
    if policy == "reset":
        return None
    if not moments:
        raise UserError(f"policy {policy!r} needs the parent's optimizer state; use reset")
    operator, child = find(plan.cfg.operator), {}
    through = operator.moments(plan.cfg)
    for name, spec in plan.specs.items():
        for kind in (FIRST, SECOND):
            wide = through(operator, plan, spec, moments[f"{name}/{kind}"], kind)
            if policy == "asymmetric":
                wide = only_block(wide, plan.weights[name].shape)
            child[f"{name}/{kind}"] = wide
    return child


def check_policy(policy: str, cfg: GrowConfig) -> None:
    """Raises UserError for an unknown policy, and an operator that it is not defined for."""
    if policy not in STATES:
        raise UserError(f"optimizer policy {policy!r}; choose one of {', '.join(STATES)}")
    if policy == "reset":
        return
    operator = find(cfg.operator)
    if operator.moments(cfg) is None:
        defined = [name for name, each in OPERATORS.items() if each.moments(GrowConfig(name))]
        raise UserError(
            f"optimizer policy {policy!r} is not defined for operator {cfg.operator!r} with norm "
            f"{cfg.norm!r}, heads {cfg.heads!r}; use reset, or one of {', '.join(defined)} unfolded"
        )
    if policy == "asymmetric" and not operator.old_first:
        raise UserError(
            f"{cfg.operator} interleaves old and new coordinates; use transfer or reset"
        )


def check_apart(plan: Plan, policy: str) -> None:
    """UserError for asymmetric where heads or FFN did not follow the width: the warm-up of new
    coordinates (growth/rewarm.py) knows the old block by the width alone."""
    if policy == "asymmetric" and plan.apart:
        raise UserError(
            "optimizer policy 'asymmetric' needs heads and FFN that grow with the width; use "
            "transfer or reset"
        )


def only_block(wide: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`wide` inside its first `shape` entries, 0 outside."""
    block, kept = tuple(map(slice, shape)), torch.zeros_like(wide)
    kept[block] = wide[block]
    return kept
