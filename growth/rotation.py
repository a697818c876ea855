"""The closed-form residual rotation: R = I + U (G - I) U^T, a low-rank update, never a dense R.

A model that grew from d_0 to d_1 ... to d_k has k + 1 *ages*: the coordinates [0, d_0),
[d_0, d_1), ..., the oldest first. U (d_k x (k+1)) holds one unit all-ones vector per age,
u_i = 1/sqrt(n_i) on age i and 0 elsewhere, so U is orthonormal and R is orthogonal exactly when the
small G is. With two ages and G the plane rotation by theta this is SRIO (paper summary, method 1):

    R u_old = cos(theta) u_old + sin(theta) u_grow.
"""

import math

import torch

from errors import UserError

READINGS = ("row-sum", "block")


def theta(epsilon: float, d_old: int, d_new: int, reading: str = "row-sum") -> float:
    """The angle (radians) that gives the new input block the gain epsilon.

    reading "row-sum": the new row of R^T's row-sum matrix sums to epsilon,
        cos(t) - r sin(t) = epsilon,  r = sqrt(d_old / g),
        t = arccos(epsilon / sqrt(1 + r^2)) - arctan(r);
        epsilon = 1 is the identity, epsilon = 0 turns the all-ones direction onto u_old.
    reading "block": cos(t) = epsilon.
    Raises UserError when epsilon is not finite or out of the reading's range, naming the range.
    """
    if reading not in READINGS:
        raise UserError(f"epsilon_reading is {reading!r}; choose one of {', '.join(READINGS)}")
    r = math.sqrt(d_old / (d_new - d_old))
    bound = math.hypot(1.0, r) if reading == "row-sum" else 1.0
    if not (math.isfinite(epsilon) and abs(epsilon) <= bound):
        raise UserError(
            f"epsilon is {epsilon}; reading {reading!r} at {d_old} -> {d_new} takes a number in "
            f"[{-bound:.6g}, {bound:.6g}]"
        )
    if reading == "block":
        return math.acos(epsilon)
    return 0.0 if epsilon == 1 else math.acos(epsilon / bound) - math.atan(r)


def givens(angle: float, n_ages: int = 2, i: int = 0, j: int = -1) -> torch.Tensor:
    """The (n_ages, n_ages) float64 rotation that turns u_i toward u_j by `angle` radians."""
    G, j = torch.eye(n_ages, dtype=torch.float64), j % n_ages
    G[i, i] = G[j, j] = math.cos(angle)
    G[j, i], G[i, j] = math.sin(angle), -math.sin(angle)
    return G


def rotate(x: torch.Tensor, dim: int, ages: tuple[int, ...], G: torch.Tensor) -> torch.Tensor:
    """R x along `dim`, O(d) per vector; differentiable in x and G.

    ages: the width after each age, oldest first, ending in x.shape[dim]. Writers take W <- R W and
    readers W <- W R^T: both are R applied to every vector along the residual axis; so are gains.
    """
    x = x.movedim(dim, -1)
    sizes = [b - a for a, b in zip((0, *ages), ages, strict=False)]
    coefficients = torch.stack(  # U^T x, one coefficient per age
        [part.sum(-1) / math.sqrt(n) for part, n in zip(x.split(sizes, -1), sizes, strict=True)], -1
    )
    change = coefficients @ (G - torch.eye(len(sizes), dtype=G.dtype)).T.to(x.dtype)
    per_unit = torch.cat(
        [
            (change[..., i : i + 1] / math.sqrt(n)).expand(*x.shape[:-1], n)
            for i, n in enumerate(sizes)
        ],
        dim=-1,
    )
    return (x + per_unit).movedim(-1, dim)


def along(w: torch.Tensor, dim: int, M: torch.Tensor) -> torch.Tensor:
    """M times every vector along `dim` of w: (.., n, ..) -> (.., m, ..) for M (m, n)."""
    return (w.movedim(dim, -1) @ M.T).movedim(-1, dim)


def dense(ages: tuple[int, ...], G: torch.Tensor) -> torch.Tensor:
    """R as a (d, d) matrix; d^2 entries: for tests, and for second moments."""
    return rotate(torch.eye(ages[-1], dtype=G.dtype), 0, ages, G)
