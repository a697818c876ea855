"""How Adam's moments follow an operator: the maps that operator records name (growth/optim.py).

Let growth be linear in a parameter, W' = T W (+ fills). If the function is kept, L(W) = L'(T W), so
the chain rule ties the gradients: G = T^T G'. The wide gradient that satisfies it with no part the
map cannot see is

    G' = T (T^T T)^-1 G,        the transposed pseudo-inverse, not T itself.

A rotation has T^T T = I: gradients turn like weights, G' = R_out G R_in^T. A copy with factor c to
n places has T^T T = n c^2: G' = G / (n c) at each (the wide gradient of w/k at k x k places is G/k;
of Net2Net's W/count_in it is G/count_out). It is the true gradient exactly when copies stay
symmetric and fills are silent; tests/test_optim.py compares it with autograd. Padding copies
nothing and scales the old block by c, so that T^T T = c^2 there: G' = G / c.

Second moments go through the squares of the same factors (an off-diagonal product counts as
uncorrelated). Blocks that a policy filled, convex and tiled ones too, are treated as new: first
moment 0, second moment the mean along the axis, so that the kept step count cannot make their first
updates too long.
"""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace

import torch

from growth.operator import Moments, Operator
from growth.plan import GrowConfig, Plan
from growth.rotation import along, dense
from models.axes import Spec

FIRST, SECOND = "exp_avg", "exp_avg_sq"


def filled(operator: Operator, plan: Plan, spec: Spec, m: torch.Tensor, kind: str) -> torch.Tensor:
    """The old block as it is, new coordinates as if new."""
    for dim, space in enumerate(spec.axes):
        old, new = plan.size(space, m.shape[dim])
        mean = m.mean(dim, keepdim=True) * (kind == SECOND)
        m = torch.cat([m, mean.repeat_interleave(new - old, dim)], dim)
    return m


def rotated(
    matrix: Callable[[Plan], torch.Tensor], rotates: Callable[[Plan, Spec], bool], fold: Callable
) -> Moments:
    """`filled`, then the operator's own rotation of weights: matrix(plan) over the ages, its
    squared entries for second moments. fold(plan, spec, w, maps) applies it to w where rotates()
    says so."""

    def moments(operator, plan: Plan, spec: Spec, m: torch.Tensor, kind: str) -> torch.Tensor:
        m = filled(operator, plan, spec, m, kind)
        if not rotates(plan, spec):
            return m
        G = matrix(plan)
        if kind == FIRST:
            return fold(plan, spec, m, {"out": G, "in": G})
        squares = dense(plan.ages[-len(G) :], G).square().to(m.dtype)  # d x d, once per growth
        for dim in spec.dims("residual"):
            m = along(m, dim, squares)
        return m

    return moments


def copied(operator: Operator, plan: Plan, spec: Spec, m: torch.Tensor, kind: str) -> torch.Tensor:
    """T (T^T T)^-1 m for an operator T that copies: T^T T is diagonal, found as T^T T 1."""
    plan = replace(plan, cfg=replace(plan.cfg, noise=0.0, noise_db=None))

    def T(w: torch.Tensor) -> torch.Tensor:
        return operator.grow_tensor(plan.with_weights(ChainMap({spec.name: w}, plan.weights)), spec)

    factors, transpose = torch.func.vjp(T, torch.ones_like(m))
    (diagonal,) = transpose(factors)
    return T(m / diagonal) if kind == FIRST else factors * T(m / diagonal.square())


def scaled(operator: Operator, plan: Plan, spec: Spec, m: torch.Tensor, kind: str) -> torch.Tensor:
    """`filled`, the old block divided by what the operator multiplies it with, c: W' = c W, so
    G' = G / c there. Under RMSNorm that is the old block's true gradient at an exact start. Under
    LayerNorm a writer's differs along all-ones of the stream: the parent's norm sees nothing of
    that direction, the child's counts it against d_new coordinates and new columns read it; its
    second moment lacks that part. In gauge "norm" c is 1 but for gains, sqrt(d_old / d_new)."""
    grown = operator.grow_tensor(plan.with_weights(ChainMap({spec.name: torch.ones_like(m)},
                                                            plan.weights)), spec)  # fmt: skip
    factor = grown[tuple(map(slice, m.shape))]
    return filled(operator, plan, spec, m / (factor if kind == FIRST else factor.square()), kind)


def always(moments: Moments) -> Callable[[GrowConfig], Moments]:
    return lambda cfg: moments


def unless_folded(moments: Moments) -> Callable[[GrowConfig], Moments | None]:
    """Folding gains into readers is no linear map of one parameter."""
    return lambda cfg: None if cfg.norm == "fold" else moments
