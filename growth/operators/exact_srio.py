"""exact-srio: the function of growth/pad.py with writers rotated by R(epsilon = 0) instead of
padded with the mean. It keeps the stream's norm: ||R [x; 0]|| = ||x|| (a tied wte stays
padded, so not there).

R(0) turns the all-ones direction of the old stream onto that of the whole stream, so the new
LayerNorm removes exactly what the old one did and leaves [centred x; 0]; readers stay unrotated and
gamma' = gamma sqrt(d_old/d_new), as in padding. A tied head reads wte unrotated, so wte keeps its
mean padding there: it differs from R [e; 0] along all-ones only, which LayerNorm removes.

RMSNorm removes nothing and commutes with R once its gain is folded into its readers, so writers and
readers are rotated and gamma' = sqrt(d_old/d_new). A tied head has no gain of its own to fold into:
refused.
"""

from dataclasses import replace

import torch

from errors import UserError
from growth.operator import Operator
from growth.operators import pad
from growth.operators.nrio import fold_norm
from growth.plan import Plan
from growth.rotation import givens, rotate, theta
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    w = plan.weights[spec.name]
    if plan.arch.norm == "rmsnorm":
        w = fold_norm(replace(plan, cfg=replace(plan.cfg, norm="fold")), spec)
    wide = pad.pad(plan, spec, w)
    for dim in rotated_dims(plan, spec):
        if spec.writes_residual and dim == spec.out_dim:
            pad.zero_from(wide, dim, plan.d_old)  # R acts on [W; 0], not on the padding
        wide = rotate(wide, dim, (plan.d_old, plan.d_new), R(plan))
    return wide


def rotated_dims(plan: Plan, spec: Spec) -> list[int]:
    """Writers, a tied wte under LayerNorm excepted; readers under RMSNorm and without a norm."""
    if spec.part == "norm" or (spec.part == "embed" and plan.tied):
        return []
    reads = plan.arch.norm == "rmsnorm" or pad.reads_stream(plan, spec)
    return spec.dims("residual") if reads or spec.writes_residual else []


def R(plan: Plan) -> torch.Tensor:
    return givens(theta(0.0, plan.d_old, plan.d_new))


def check(plan: Plan) -> None:
    """Raises UserError where this operator has no exact form."""
    pad.check(plan)
    if plan.post_norm:
        raise UserError(
            "method exact-srio needs a model whose norms all read the stream (Pre-LN); in this one "
            "some write it: use method lossless with a whole factor"
        )
    if plan.arch.norm == "rmsnorm" and plan.cfg.gamma_new != 1:
        raise UserError(
            f"gamma_new is {plan.cfg.gamma_new}, but under RMSNorm exact-srio rotates what the "
            f"norm puts out, so all gains must be equal; use 1, or method pad"
        )
    if plan.arch.norm == "rmsnorm" and plan.tied:
        raise UserError(
            "method exact-srio has no exact form for RMSNorm with a tied head (the last gain "
            "cannot be folded); use method pad, or untie the head first"
        )


ROTATED_PAD = Operator(
    "exact-srio",
    8,
    grow_tensor,
    inexact=pad.inexact,
    remarks=pad.remarks,
    config_change=pad.config_change,
    check=check,
    preserves=True,
    wider_heads=True,
    color=pad.PAD.color,
)
