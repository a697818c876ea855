"""SZP: shrink the old weights, zero-pad, add a fresh scaled initialisation everywhere, also to the
old block (arXiv 2411.07340, 2605.13405; our own code).

    W' = lambda [W 0; 0 0] + N(0, s)

lambda is `shrink`. s is our initialisation's (std; residual writers std / sqrt(2 L)), which counts
for the old width and is carried to the new one as muP does, by 1/sqrt(fan-in): matrices take
s sqrt(fan_old / fan_new), embeddings s. Only the initialisation is muP's; learning rates are ours.
Biases are shrunk; gains and shifts are kept, new ones 1 and 0. Policies play no part. Never exact.
"""

import math

import torch

from growth.expand import WRITERS, expand
from growth.operator import Operator
from growth.plan import Plan
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    w = plan.weights[spec.name]
    if spec.part == "norm":
        return expand(plan, spec, w)
    sizes = [plan.size(axis, n) for axis, n in zip(spec.axes, w.shape, strict=True)]
    wide = w.new_zeros([new for _, new in sizes])
    wide[tuple(slice(old) for old, _ in sizes)] = plan.cfg.shrink * w
    if w.ndim == 1:
        return wide
    old, new = sizes[1 - spec.out_dim] if spec.in_space in plan.sizes else (1, 1)
    std = plan.cfg.std * math.sqrt(old / new)
    if spec.part in WRITERS:
        std /= math.sqrt(2 * plan.n_layer)
    return wide.add_(plan.normal(f"{spec.name}:{spec.part}", wide.shape, std))


SZP = Operator("szp", 10, grow_tensor)
