"""Block policies: what fills the rows and columns that growth adds (the paper's, and more).

A weight W (out x in) becomes a wider one with its old block first:

    [ old-old  old-new ]     random   N(0, std); residual writers N(0, std / sqrt(2 L))
    [ new-old  new-new ]     zero     zeros
                             convex   [I; C_out] W [I; C_in]^T, rows of C >= 0 with sum 1
                             tiled    new-new = W tiled and cropped; the cross blocks by `cross`

An axis whose space does not grow (vocab, position) contributes no new block.
"""

import math

import torch

from growth.plan import Plan
from models.axes import Spec

ATTENTION, FFN, WRITERS = (
    ("q", "k", "v", "o", "relpos"),
    ("up", "gate", "down", "dense", "router"),
    ("o", "down"),
)


def expand(plan: Plan, spec: Spec, w: torch.Tensor) -> torch.Tensor:
    """`w` (old sizes) widened by the policy of its part."""
    sizes = [plan.size(axis, n) for axis, n in zip(spec.axes, w.shape, strict=True)]
    if all(old == new for old, new in sizes):
        return w.clone()
    if w.ndim == 1:
        return expand_vector(plan, spec, w, *sizes[0])
    if spec.out == 1:  # stored (in, out)
        return expand_matrix(plan, spec, w.T, sizes[::-1], spec.axes[::-1]).T.contiguous()
    return expand_matrix(plan, spec, w, sizes, spec.axes)


def expand_vector(plan: Plan, spec: Spec, b: torch.Tensor, old: int, new: int):
    """New gains are 1 and new shifts 0; new biases follow the policy of their matrix's rows."""
    policy = policy_of(plan, spec.part)
    if spec.part == "norm":
        fill = torch.full((new - old,), 0.0 if spec.is_bias else 1.0)
    elif policy == "convex":
        fill = combination(plan, spec, spec.axes[0]).to(b.dtype) @ b
    elif policy == "tiled":
        fill = b[torch.arange(new - old) % old]
    else:
        fill = torch.zeros(new - old)
    return torch.cat([b, fill.to(b.dtype)])


def expand_matrix(plan: Plan, spec: Spec, w_oi: torch.Tensor, sizes, axes):
    (o_old, o_new), (i_old, i_new) = sizes
    policy, key = policy_of(plan, spec.part), f"{spec.name}:{spec.part}"
    if policy == "convex":
        c_out, c_in = (
            combination(plan, spec, axis).to(w_oi.dtype) if old < new else None
            for axis, (old, new) in zip(axes, sizes, strict=True)
        )
        rows = w_oi if c_out is None else torch.cat([w_oi, c_out @ w_oi])
        return rows if c_in is None else torch.cat([rows, rows @ c_in.T], dim=1)
    wide = torch.zeros(o_new, i_new, dtype=w_oi.dtype)
    if policy == "random" or (policy == "tiled" and plan.cfg.cross == "random"):
        std = plan.cfg.std / (math.sqrt(2 * plan.n_layer) if spec.part in WRITERS else 1.0)
        draw = plan.rng(key).standard_normal((o_new, i_new), dtype="float32") * std
        wide = torch.from_numpy(draw).to(w_oi.dtype)
    if policy == "tiled":
        # where only one axis grows, its new block has no cross blocks and is tiled whole
        first_o, first_i = (old if old < new else 0 for old, new in sizes)
        rows, cols = torch.arange(o_new - first_o) % o_old, torch.arange(i_new - first_i) % i_old
        wide[first_o:, first_i:] = w_oi[rows][:, cols]
    wide[:o_old, :i_old] = w_oi
    return wide


def policy_of(plan: Plan, part: str) -> str:
    if part in ATTENTION:
        return plan.cfg.attn
    return plan.cfg.ffn if part in FFN else plan.cfg.embed


def combination(plan: Plan, spec: Spec, space: str) -> torch.Tensor:
    """C (new - old, old), float64: rows >= 0 with sum 1, Dirichlet per new unit.

    A new head mixes whole old heads, position by position, and q, k, v and o of a layer share the
    mix, so that a new head is one head (or group, plan.unit); so do up, gate, down for a neuron.
    Along the residual stream every parameter draws its own.
    """
    old, new = plan.sizes[space]
    if space == "residual":
        key = f"{spec.module}:{spec.part}:residual"
    else:
        key = f"layer {spec.layer}:{'heads' if space == 'kv' else space}"
    unit = plan.unit(space)
    alpha = [plan.cfg.dirichlet] * (old // unit)
    mix = torch.from_numpy(plan.rng(key).dirichlet(alpha, size=(new - old) // unit))
    return torch.kron(mix, torch.eye(unit, dtype=mix.dtype)) if unit > 1 else mix
