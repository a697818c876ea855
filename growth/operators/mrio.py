"""MRIO: SRIO for a model that grew before. One all-ones direction u_i per growth age; the rotation
lives in their span.

    mrio     static: one Givens rotation per older age i, in the plane (u_i, u_new), whose angle is
             the closed form for that age alone, theta(e, n_i, n_i + n_new) (growth/rotation.py)
    mrio-lo  per side exp(A) G, A skew (k+1 x k+1), learned; starts at the static G

Composed, the new row of R^T sums to less than each turn's own e (at e = 0.5: 0.026, -0.41, -0.88
after two, three, four turns), so MRIO at e = epsilon would compare strength with SRIO, not size.
`age_epsilon`:

    total    e is common to all turns and solved for, so that the new row of R^T sums to epsilon, as
             SRIO's does
    each     e = epsilon for every turn; `epsilons` gives each age its own

epsilon = 0 does not make it exact. With one older age it is SRIO, bit for bit. Ages come from the
checkpoint's lineage (plan.ages).
"""

import math
from functools import cache, reduce

import numpy as np
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
    n_older, given = len(ages) - 1, cfg.epsilons
    if given and len(given) != n_older:
        raise UserError(
            f"epsilons has {len(given)} values but this model has {n_older} older ages, of widths "
            f"{', '.join(map(str, ages[:-1]))}; give {n_older}, or none to use epsilon"
        )
    if n_older > 1 and not given and cfg.age_epsilon == "total":
        given = (common_epsilon(cfg, ages),) * n_older
    return turn_angles(given or (cfg.epsilon,) * n_older, cfg, ages)


def turn_angles(each, cfg: GrowConfig, ages: tuple[int, ...]) -> list[float]:
    """theta of every older age for its own epsilon in `each`."""
    *older, n_new = sizes_of(ages)
    pairs = zip(older, each, strict=True)
    return [theta(epsilon, n, n + n_new, cfg.epsilon_reading) for n, epsilon in pairs]


def sizes_of(ages: tuple[int, ...]) -> list[int]:
    """How many coordinates each age added."""
    return [b - a for a, b in zip((0, *ages), ages, strict=False)]


def total_epsilon(turns: list[float], ages: tuple[int, ...], reading: str = "row-sum") -> float:
    """The gain of the new block after the turns t_0 .. t_(k-1) of the older ages. row-sum: what the
    new row of R^T sums to, f_0 of f_k = 1, f_i = cos(t_i) f_(i+1) - sqrt(n_i / n_new) sin(t_i);
    block: the product of the cosines."""
    *older, n_new = sizes_of(ages)
    total = 1.0
    for angle, n in zip(reversed(turns), reversed(older), strict=True):
        total *= math.cos(angle)
        if reading == "row-sum":
            total -= math.sqrt(n / n_new) * math.sin(angle)
    return total


@cache
def common_epsilon(cfg: GrowConfig, ages: tuple[int, ...]) -> float:
    """The e of every turn for which all of them together have the gain cfg.epsilon: of several, the
    one nearest to 1 (no turn). Bracketed on a grid, then by Brent's method."""
    *older, n_new = sizes_of(ages)
    bound = math.hypot(1.0, math.sqrt(min(older) / n_new))  # theta's own
    if cfg.epsilon_reading == "block":
        bound = 1.0

    def total(e: float) -> float:
        turns = turn_angles((e,) * len(older), cfg, ages)
        return total_epsilon(turns, ages, cfg.epsilon_reading)

    from scipy.optimize import brentq  # half a second that no other operator needs

    grid = np.linspace(1.0, bound if cfg.epsilon > 1 else -bound, 401).tolist()
    reached = [total(e) for e in grid]
    for i, (e, value) in enumerate(zip(grid, reached, strict=True)):
        if abs(value - cfg.epsilon) < 1e-12:
            return e
        if i and (reached[i - 1] - cfg.epsilon) * (value - cfg.epsilon) < 0:
            return brentq(lambda x: total(x) - cfg.epsilon, grid[i - 1], e, xtol=1e-15)
    raise UserError(
        f"epsilon is {cfg.epsilon}; one turn for each of the widths "
        f"{', '.join(map(str, ages[:-1]))} reaches {min(reached):.6g} to {max(reached):.6g} "
        f"together; choose one of these, or age_epsilon each"
    )


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
