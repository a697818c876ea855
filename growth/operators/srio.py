"""SRIO: the policies fill the new blocks, then every vector along the residual axis is turned by R
of growth/rotation.py: writers W <- R W, readers W <- W R^T, gains and shifts gamma <- R gamma. All
of it folds into the weights.

    srio       static, R in closed form from epsilon ("SRIO-SO")
    srio-lo    an angle per side, learned ("SRIO-LO"); starts at the closed form
    srio-free  the 2 x 2 row-sum matrix of each side, learned and unconstrained ("non-orthogonal")

The learned forms have an output side and an input side. What writes the stream takes "out", and so
does every vector: gains and shifts live in the coordinates that the writers set. What reads the
stream takes "in". A tied head is its embedding, so it takes "out", which is what a stream turned by
R_out needs from its head: E R_out^T R_out x = E x.

Exact where the norm commutes with R: RMSNorm with its gain folded, any epsilon; LayerNorm only at
epsilon = 0, folded likewise. The new part must be silent (zero) and gains and norm_eps be scaled
for the wider stream, which this module leaves alone: growth/exact_srio.py is the operator that is
exact.
"""

import torch

from growth.moments import rotated, unless_folded
from growth.operator import BY_DESIGN, Learned, Operator
from growth.operators import nrio
from growth.plan import Plan
from growth.rotation import givens, rotate, theta
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    G = matrix(plan)
    return fold(plan, spec, nrio.grow_tensor(plan, spec), {"out": G, "in": G})


def matrix(plan: Plan) -> torch.Tensor:
    """G (2 x 2, float64): the rotation by theta(epsilon) over (everything old, new)."""
    angle = theta(plan.cfg.epsilon, plan.d_old, plan.d_new, plan.cfg.epsilon_reading)
    return givens(angle)


def rotates(plan: Plan, spec: Spec) -> bool:
    """Whether the settings let R act on this parameter."""
    if spec.part == "norm":
        return plan.cfg.norm == "rotate"
    return plan.cfg.rotate_weights and (spec.part != "embed" or plan.cfg.rotate_embeddings)


def fold(plan: Plan, spec: Spec, wide: torch.Tensor, maps: dict) -> torch.Tensor:
    """R along every residual axis of `wide`; maps: side ("out", "in") -> G, n x n, which acts on
    the last n ages (older ones count as one)."""
    if rotates(plan, spec):
        for dim in spec.dims("residual"):
            G = maps[spec.side(dim)]
            wide = rotate(wide, dim, plan.ages[-len(G) :], G)
    return wide


def turn_params(plan: Plan) -> dict[str, torch.Tensor]:
    return zero_angles(matrix(plan))


def turn_maps(plan: Plan, params: dict) -> dict[str, torch.Tensor]:
    return turned(matrix(plan), params)


def zero_angles(G: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per side the n(n-1)/2 angles (radians) that learning adds to the static G (n x n): zeros."""
    n = len(G)
    return {side: torch.zeros(n * (n - 1) // 2, dtype=G.dtype) for side in ("out", "in")}


def turned(G: torch.Tensor, params: dict) -> dict[str, torch.Tensor]:
    """exp(A) G per side, A skew with the learned angles below its diagonal; for 2 x 2 the angle
    adds to theta. exp(0) = I, so learning starts at the static solution exactly."""
    n, maps = len(G), {}
    for side, angles in params.items():
        A = torch.zeros(n, n, dtype=angles.dtype, device=angles.device)
        A = A.index_put(tuple(torch.tril_indices(n, n, -1, device=angles.device)), angles)
        maps[side] = torch.linalg.matrix_exp(A - A.T) @ G.to(angles)
    return maps


def free_params(plan: Plan) -> dict[str, torch.Tensor]:
    """Per side what is added to the row-sum matrix S (2 x 2) of the closed form: zeros."""
    return {side: torch.zeros(2, 2, dtype=torch.float64) for side in ("out", "in")}


def free_maps(plan: Plan, params: dict) -> dict[str, torch.Tensor]:
    """G per side from its row sums: S_ab = G_ab sqrt(n_b / n_a), so dG_ab = dS_ab sqrt(n_a /
    n_b)."""
    n = torch.tensor([plan.d_old, plan.d_new - plan.d_old], dtype=torch.float64)
    G, scale = matrix(plan), (n[:, None] / n).sqrt()
    return {side: G.to(dS) + dS * scale.to(dS) for side, dS in params.items()}


def check(plan: Plan) -> None:
    """UserError where epsilon has no angle."""
    matrix(plan)


def inexact(plan: Plan) -> list[str]:
    """Where R commutes with the norm, only what fills the new blocks changes the function."""
    commutes = plan.arch.norm == "rmsnorm" and plan.cfg.norm == "fold"
    return ["exact only with silent new blocks"] if commutes else [BY_DESIGN]


STATIC = Operator(
    "srio",
    1,
    grow_tensor,
    inexact=inexact,
    moments=unless_folded(rotated(matrix, rotates, fold)),
    check=check,
    color="#E69F00",
)
LEARNED = Operator(
    "srio-lo",
    20,
    learned=Learned(turn_params, turn_maps, nrio.grow_tensor, fold),
    check=check,
    color=STATIC.color,
)
FREE = Operator(
    "srio-free",
    21,
    learned=Learned(free_params, free_maps, nrio.grow_tensor, fold),
    check=check,
    color=STATIC.color,
)
