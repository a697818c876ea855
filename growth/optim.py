"""Adam's state through growth: what becomes of exp_avg and exp_avg_sq when the weights widen.

The gradient's map. Let growth be linear in a parameter, W' = T W (+ fills). If the function is
kept, L(W) = L'(T W), so the chain rule ties the gradients: G = T^T G'. The wide gradient that
satisfies it with no part the map cannot see is

    G' = T (T^T T)^-1 G,        the transposed pseudo-inverse, not T itself.

A rotation has T^T T = I: gradients turn like weights, G' = R_out G R_in^T. A copy with factor c to
n places has T^T T = n c^2: G' = G / (n c) at each (the wide gradient of w/k at k x k places is G/k;
of Net2Net's W/count_in it is G/count_out). It is the true gradient exactly when copies stay
symmetric and fills are silent; tests/test_optim.py compares it with autograd.

Second moments go through the squares of the same factors (an off-diagonal product counts as
uncorrelated). Blocks that a policy filled, convex and tiled ones too, are treated as new: first
moment 0, second moment the mean along the axis, so that the kept step count cannot make their first
updates too long.

    reset       nothing is kept
    transfer    both moments through the maps, step kept
    asymmetric  as transfer in the old block; the new coordinates start with no state and their own
                learning-rate warm-up (growth/rewarm.py)

Defined for nrio, srio and mrio (norm rotate or keep) and for the copies: net2net, sparkling,
lossless (which interleaves its copies: no asymmetric). Elsewhere T^T T has no such inverse or T is
not known to preserve anything, and the state must be reset: learned operators, aki, padding.
"""

from dataclasses import replace

import torch

from errors import UserError
from growth import mrio, srio
from growth.apply import OPERATORS
from growth.lrio import along
from growth.plan import GrowConfig, Plan
from growth.rotation import dense
from models.axes import Spec

POLICIES = ("reset", "transfer", "asymmetric")
ROTATIONS = {"nrio": None, "srio": srio.matrix, "mrio": mrio.matrix}
COPIES = ("net2net", "sparkling", "lossless")
FIRST, SECOND = "exp_avg", "exp_avg_sq"


def carry(plan: Plan, moments: dict[str, torch.Tensor] | None, policy: str) -> dict | None:
    """The child's moments, keyed "<parameter>/exp_avg" and "<parameter>/exp_avg_sq"; None on reset.

    Raises UserError for an unknown policy, a parent without moments, and an operator for which the
    transfer is not defined.
    """
    check_policy(policy, plan.cfg)
    if policy == "reset":
        return None
    if not moments:
        raise UserError(f"policy {policy!r} needs the parent's optimizer state; use reset")
    through = copied if plan.cfg.operator in COPIES else rotated
    child = {}
    for name, spec in plan.specs.items():
        for kind in (FIRST, SECOND):
            wide = through(plan, spec, moments[f"{name}/{kind}"], kind)
            if policy == "asymmetric":
                wide = only_block(wide, plan.weights[name].shape)
            child[f"{name}/{kind}"] = wide
    return child


def check_policy(policy: str, cfg: GrowConfig) -> None:
    """Raises UserError for an unknown policy, and an operator that it is not defined for."""
    if policy not in POLICIES:
        raise UserError(f"optimizer policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if policy == "reset":
        return
    operator = cfg.operator
    if operator not in (*ROTATIONS, *COPIES) or (operator in ROTATIONS and cfg.norm == "fold"):
        raise UserError(
            f"optimizer policy {policy!r} is not defined for operator {operator!r} with norm "
            f"{cfg.norm!r}; use reset, or one of {', '.join((*ROTATIONS, *COPIES))} unfolded"
        )
    if operator == "lossless" and policy == "asymmetric":
        raise UserError("lossless interleaves old and new coordinates; use transfer or reset")


def rotated(plan: Plan, spec: Spec, m: torch.Tensor, kind: str) -> torch.Tensor:
    """Old block and fills, then R along the residual axes (its squared entries for exp_avg_sq)."""
    for dim, space in enumerate(spec.axes):
        old, new = plan.size(space, m.shape[dim])
        mean = m.mean(dim, keepdim=True) * (kind == SECOND)
        m = torch.cat([m, mean.repeat_interleave(new - old, dim)], dim)
    matrix = ROTATIONS[plan.cfg.operator]
    if matrix is None or not srio.rotates(plan, spec):
        return m
    G = matrix(plan)
    if kind == FIRST:
        return srio.fold(plan, spec, m, {"out": G, "in": G})
    squares = dense(plan.ages[-len(G) :], G).square().to(m.dtype)  # d x d, once per growth
    for dim in spec.dims("residual"):
        m = along(m, dim, squares)
    return m


def copied(plan: Plan, spec: Spec, m: torch.Tensor, kind: str) -> torch.Tensor:
    """T (T^T T)^-1 m for an operator T that copies: T^T T is diagonal, found as T^T T 1."""
    plan = replace(plan, cfg=replace(plan.cfg, noise=0.0, noise_db=None))
    operator = OPERATORS[plan.cfg.operator]

    def T(w: torch.Tensor) -> torch.Tensor:
        return operator(replace(plan, weights={**plan.weights, spec.name: w}), spec)

    factors, transpose = torch.func.vjp(T, torch.ones_like(m))
    (diagonal,) = transpose(factors)
    return T(m / diagonal) if kind == FIRST else factors * T(m / diagonal.square())


def only_block(wide: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`wide` inside its first `shape` entries, 0 outside."""
    block, kept = tuple(map(slice, shape)), torch.zeros_like(wide)
    kept[block] = wide[block]
    return kept
