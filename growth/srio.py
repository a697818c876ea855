"""SRIO, static: the policies fill the new blocks, then every vector along the residual axis is
rotated by the closed-form R of growth/rotation.py (writers W <- R W, readers W <- W R^T, gains and
shifts gamma <- R gamma). All of it folds into the weights.

Exact only where the norm commutes with R: RMSNorm with its gain folded, any epsilon (with a new part
that is silent); see growth/lossless.py for LayerNorm."""

import torch

from growth import nrio
from growth.plan import Plan
from growth.rotation import givens, rotate, theta
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec, params=None) -> torch.Tensor:
    wide = nrio.grow_tensor(plan, spec)
    return rotate_residual(plan, spec, wide, matrix(plan)) if rotates(plan, spec) else wide


def matrix(plan: Plan) -> torch.Tensor:
    """G (2 x 2, float64): the rotation by theta(epsilon) over (everything old, new)."""
    angle = theta(plan.cfg.epsilon, plan.d_old, plan.d_new, plan.cfg.epsilon_reading)
    return givens(angle)


def rotates(plan: Plan, spec: Spec) -> bool:
    """Whether the settings let R act on this parameter."""
    if spec.part == "norm":
        return plan.cfg.norm == "rotate"
    return plan.cfg.rotate_weights and (spec.part != "embed" or plan.cfg.rotate_embeddings)


def rotate_residual(plan: Plan, spec: Spec, wide: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """R along every residual axis; G of n x n acts on the last n ages, older ones counted as one."""
    ages = plan.ages[-len(G) :]
    for dim in spec.dims("residual"):
        wide = rotate(wide, dim, ages, G)
    return wide
