"""LiGO's start without its learning: W' = B_out W B_in^T with B = [I; C], the rows of C U(0, 1) and
scaled to sum 1 (growth/ligo.py). For folders, where no training data is at hand. Never exact."""

import torch

from growth.ligo import map_name, over_group
from growth.lrio import along
from growth.plan import Plan
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec, params=None) -> torch.Tensor:
    w = plan.weights[spec.name]
    for dim, space in enumerate(spec.axes):
        name = map_name(plan, spec, space)
        if name is not None:
            old, new = plan.sizes["kv"] if name.endswith(".v") else plan.size(space, 0)
            C = torch.from_numpy(plan.rng(f"ligo:{name}").random((new - old, old)))
            B = torch.cat([torch.eye(old, dtype=C.dtype), C / C.sum(1, keepdim=True)])
            w = along(w, dim, over_group(plan, space, B.to(w.dtype)))
    return w
