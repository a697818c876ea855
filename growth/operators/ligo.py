"""LiGO, width only (arXiv 2303.00980), our own code: W' = B_out W B_in^T with B = [I; C], and only
C is learned. Block policies and rotations play no part.

One B for the residual stream (embeddings, norms, every reader's input, every writer's output). Per
layer one for q, k and v each (o reads through v's, repeated over the query heads of a key head) and
one for the FFN (up's and gate's output, down's input). The vocabulary and positions are not mapped.
Vectors are multiplied from the left. C starts as U(0, 1) rows scaled to sum 1. Never exact.

    ligo       C learned
    ligo-init  its start without the learning, for folders, where no training data is at hand
"""

import torch

from growth.operator import Learned, Operator
from growth.operators.nrio import fold_norm
from growth.plan import Plan
from growth.rotation import along
from models.axes import Spec

MAP_OF = {"o": "v", "up": "ffn", "gate": "ffn", "down": "ffn"}  # part -> whose map it shares


def map_name(plan: Plan, spec: Spec, space: str) -> str | None:
    """Which B acts on an axis of this space; None for one that does not grow."""
    old, new = plan.size(space, 0)
    if old == new:
        return None
    if space == "residual":
        return space
    if spec.part == "o" and plan.sizes["kv"][0] == plan.sizes["kv"][1]:
        return f"h.{spec.layer}.o"  # a single key head, which stays: v has no map
    return f"h.{spec.layer}.{MAP_OF.get(spec.part, spec.part)}"


def over_group(plan: Plan, space: str, B: torch.Tensor) -> torch.Tensor:
    """v's map (kv_new, kv_old) as what o reads (heads_new, heads_old): query head j of a group
    carries the values of its key head, so B acts alike on every j."""
    if space != "heads" or len(B) == plan.sizes["heads"][1]:
        return B
    (K_new, K), (_, kv_new) = plan.head_dim[::-1], plan.sizes["kv"]
    eye_jj = torch.eye(plan.sizes["heads"][1] // kv_new, dtype=B.dtype, device=B.device)
    wide = torch.einsum("gkhl,ij->gikhjl", B.view(-1, K_new, B.shape[1] // K, K), eye_jj)
    return wide.reshape(plan.sizes["heads"][::-1])


def init_params(plan: Plan) -> dict[str, torch.Tensor]:
    """C (new - old, old) per map, by name; every map draws from its own generator."""
    params = {}
    for spec in plan.specs.values():
        for space in spec.axes:
            name, (old, new) = map_name(plan, spec, space), plan.size(space, 0)
            if name is None or name in params or (space == "heads" and name.endswith(".v")):
                continue  # o comes by v's map
            params[name] = start(plan, name, old, new).to(plan.dtype)
    return params


def start(plan: Plan, name: str, old: int, new: int) -> torch.Tensor:
    """C (new - old, old), float64."""
    C = torch.from_numpy(plan.rng(f"ligo:{name}").random((new - old, old)))
    return C / C.sum(1, keepdim=True)


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
            w = along(w, dim, over_group(plan, space, maps[name]))
    return w


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    w = plan.weights[spec.name]
    for dim, space in enumerate(spec.axes):
        name = map_name(plan, spec, space)
        if name is not None:
            old, new = plan.sizes["kv"] if name.endswith(".v") else plan.size(space, 0)
            B = torch.cat([torch.eye(old).double(), start(plan, name, old, new)])
            w = along(w, dim, over_group(plan, space, B.to(w.dtype)))
    return w


LEARNED = Operator("ligo", 25, learned=Learned(init_params, maps, fold_norm, fold), color="#000000")
START = Operator("ligo-init", 26, grow_tensor, color=LEARNED.color)
