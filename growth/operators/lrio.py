"""LRIO: a dense d_new x d_new operator per side, learned on the LM loss with all weights frozen,
then folded: writers W <- M_out W, readers W <- W M_in^T, gains and shifts gamma <- M_out gamma, on
the parameters SRIO would turn (its settings rotate_*, norm). Starts at the identity, which is NRIO.

    lrio       unconstrained: M = I + D
    lrio-orth  orthogonal, by torch's own parametrization (matrix exponential of a skew matrix)
"""

import torch
from torch.func import functional_call
from torch.nn.utils.parametrizations import orthogonal

from growth.operator import Learned, Operator
from growth.operators import nrio, srio
from growth.plan import Plan
from growth.rotation import along
from models.axes import Spec

ORIGINAL = "parametrizations.weight.original"  # torch's name for the unconstrained tensor


def fold(plan: Plan, spec: Spec, wide: torch.Tensor, maps: dict) -> torch.Tensor:
    if srio.rotates(plan, spec):
        for dim in spec.dims("residual"):
            wide = along(wide, dim, maps[spec.side(dim)])
    return wide


def free_params(plan: Plan) -> dict[str, torch.Tensor]:
    like = plan.weights["wte.weight"]
    return {side: like.new_zeros(plan.d_new, plan.d_new) for side in ("out", "in")}


def free_maps(plan: Plan, params: dict) -> dict[str, torch.Tensor]:
    return {
        side: torch.eye(len(D), dtype=D.dtype, device=D.device) + D for side, D in params.items()
    }


def orthogonal_params(plan: Plan) -> dict[str, torch.Tensor]:
    start = dict(parametrized(plan.weights["wte.weight"], plan.d_new).named_parameters())[ORIGINAL]
    return {side: start.detach().clone() for side in ("out", "in")}


def orthogonal_maps(plan: Plan, params: dict) -> dict[str, torch.Tensor]:
    module, maps = parametrized(params["out"], plan.d_new), {}
    eye = torch.eye(plan.d_new, dtype=params["out"].dtype, device=params["out"].device)
    for side, original in params.items():
        maps[side] = functional_call(module, {ORIGINAL: original}, (eye,)).T  # x W^T with x = I
    return maps


def parametrized(like: torch.Tensor, d: int) -> torch.nn.Module:
    """A d x d linear layer at the identity, kept orthogonal by torch; dtype and device of
    `like`."""
    module = torch.nn.utils.skip_init(
        torch.nn.Linear, d, d, bias=False, dtype=like.dtype, device=like.device
    )
    torch.nn.init.eye_(module.weight)
    return orthogonal(module, orthogonal_map="matrix_exp")


FREE = Operator(
    "lrio",
    23,
    learned=Learned(free_params, free_maps, nrio.grow_tensor, fold),
    color="#CC79A7",
)
ORTHOGONAL = Operator(
    "lrio-orth",
    24,
    learned=Learned(orthogonal_params, orthogonal_maps, nrio.grow_tensor, fold),
    color=FREE.color,
)
