"""LiGO, width only (arXiv 2303.00980), our own code: W' = B_out W B_in^T with B = [I; C], and only
C is learned. Block policies and rotations play no part.

One B for the residual stream (embeddings, norms, every reader's input, every writer's output). Per
layer one for q, k and v each (o reads through v's) and one for the FFN (up's and gate's output,
down's input). The vocabulary and positions are not mapped. Vectors are multiplied from the left. C
starts as U(0, 1) rows scaled to sum 1. Never exact.
"""

import torch

from growth.lrio import along
from growth.plan import Plan
from models.axes import Spec

MAP_OF = {"o": "v", "up": "ffn", "gate": "ffn", "down": "ffn"}  # part -> whose map it shares


def map_name(plan: Plan, spec: Spec, space: str) -> str | None:
    """Which B acts on an axis of this space; None for one that does not grow."""
    old, new = plan.size(space, 0)
    if old == new:
        return None
    return space if space == "residual" else f"h.{spec.layer}.{MAP_OF.get(spec.part, spec.part)}"


def init_params(plan: Plan) -> dict[str, torch.Tensor]:
    """C (new - old, old) per map, by name; every map draws from its own generator."""
    params = {}
    for spec in plan.specs.values():
        for space in spec.axes:
            name, (old, new) = map_name(plan, spec, space), plan.size(space, 0)
            if name is None or name in params:
                continue
            C = torch.from_numpy(plan.rng(f"ligo:{name}").random((new - old, old)))
            params[name] = (C / C.sum(1, keepdim=True)).to(plan.weights[spec.name].dtype)
    return params


def maps(plan: Plan, params: dict) -> dict[str, torch.Tensor]:
    """B = [I; C] (new, old) per map."""
    return {
        name: torch.cat([torch.eye(C.shape[1], dtype=C.dtype, device=C.device), C])
        for name, C in params.items()
    }


def fold(plan: Plan, spec: Spec, w: torch.Tensor, maps: dict) -> torch.Tensor:
    for dim, space in enumerate(spec.axes):
        name = map_name(plan, spec, space)
        if name is not None:
            w = along(w, dim, maps[name])
    return w
