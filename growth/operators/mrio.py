"""MRIO: SRIO for a model that grew before. One all-ones direction u_i per growth age; the rotation
lives in their span.

    mrio     static: one Givens rotation per older age i, in the plane (u_i, u_new), whose angle is
             the closed form for that age alone: theta(epsilon_i, n_i, n_i + n_new)
             (growth/rotation.py)
    mrio-lo  per side exp(A) G, A skew (k+1 x k+1), learned; starts at the static G

Every angle is exact in its own plane; composed, the new row of R^T sums to less than epsilon (SRIO:
epsilon itself), so at one epsilon MRIO turns further than SRIO, and epsilon = 0 does not make it
exact. With one older age it is SRIO, bit for bit. Ages come from the checkpoint's lineage
(plan.ages).
"""

from functools import reduce

import torch

from errors import UserError
from growth.moments import rotated, unless_folded
from growth.operator import Learned, Operator
from growth.operators import nrio, srio
from growth.plan import GrowConfig, Plan
from growth.rotation import givens, theta
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    G = matrix(plan)
    return srio.fold(plan, spec, nrio.grow_tensor(plan, spec), {"out": G, "in": G})


def matrix(plan: Plan) -> torch.Tensor:
    """G (k+1 x k+1, float64) over the ages, oldest first; the oldest age is turned first."""
    turns = [
        givens(angle, len(plan.ages), i) for i, angle in enumerate(angles(plan.cfg, plan.ages))
    ]
    return reduce(lambda done, turn: turn @ done, turns)


def angles(cfg: GrowConfig, ages: tuple[int, ...]) -> list[float]:
    """The angle (radians) of every older age, oldest first; UserError where an epsilon has none."""
    sizes = [b - a for a, b in zip((0, *ages), ages, strict=False)]
    n_older, given, n_new = len(ages) - 1, cfg.epsilons, sizes[-1]
    if given and len(given) != n_older:
        raise UserError(
            f"epsilons has {len(given)} values but this model has {n_older} older ages, of widths "
            f"{', '.join(map(str, ages[:-1]))}; give {n_older}, or none to use epsilon"
        )
    each = given or (cfg.epsilon,) * n_older
    return [
        theta(epsilon, n, n + n_new, cfg.epsilon_reading)
        for n, epsilon in zip(sizes, each, strict=False)
    ]


def turn_params(plan: Plan) -> dict[str, torch.Tensor]:
    return srio.zero_angles(matrix(plan))


def turn_maps(plan: Plan, params: dict) -> dict[str, torch.Tensor]:
    return srio.turned(matrix(plan), params)


def check(plan: Plan) -> None:
    """UserError where an epsilon has no angle: an older age is narrower, and so is its range."""
    angles(plan.cfg, plan.ages)


STATIC = Operator(
    "mrio",
    2,
    grow_tensor,
    inexact=srio.inexact,
    moments=unless_folded(rotated(matrix, srio.rotates, srio.fold)),
    check=check,
    color="#D55E00",
)
LEARNED = Operator(
    "mrio-lo",
    22,
    learned=Learned(turn_params, turn_maps, nrio.grow_tensor, srio.fold),
    check=check,
    color=STATIC.color,
)
