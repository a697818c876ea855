"""Block policies: what fills the rows and columns that growth adds (the paper's, and more).

A weight W (out x in) becomes a wider one with its old block first:

    [ old-old  old-new ]     random   N(0, std); residual writers N(0, std / sqrt(2 L))
    [ new-old  new-new ]     zero     zeros
                             convex   [I; C_out] W [I; C_in]^T, rows of C >= 0 with sum 1
                             tiled    new-new = W tiled and cropped; the cross blocks by `cross`

An axis whose space does not grow (vocab, position) contributes no new block. Every random block is
drawn by a key of its own, so one that is not wanted costs nothing and moves no other.
"""

import itertools
import math
from collections.abc import Collection

import torch

from growth.plan import Plan
from models.axes import Spec

ATTENTION, FFN, WRITERS = (
    ("q", "k", "v", "o", "relpos"),
    ("up", "gate", "down", "dense", "router"),
    ("o", "down"),
)


def expand(
    plan: Plan, spec: Spec, w: torch.Tensor, spare: Collection[int | None] = ()
) -> torch.Tensor:
    """`w` (old sizes) widened by the policy of its part. spare: axes whose new coordinates the
    caller writes itself, so that nothing is drawn for them."""
    sizes = [plan.size(axis, n) for axis, n in zip(spec.axes, w.shape, strict=True)]
    if all(old == new for old, new in sizes):
        return w.clone()
    if w.ndim == 1:
        return expand_vector(plan, spec, w, *sizes[0])
    wanted = [dim not in spare for dim in range(2)]
    if spec.out == 1:  # stored (in, out)
        args = sizes[::-1], spec.axes[::-1], wanted[::-1]
        return expand_matrix(plan, spec, w.T, *args).T.contiguous()  # a copy for convex only
    return expand_matrix(plan, spec, w, sizes, spec.axes, wanted)


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


def expand_matrix(plan: Plan, spec: Spec, w_oi: torch.Tensor, sizes, axes, wanted):
    (o_old, o_new), (i_old, i_new) = sizes
    policy = policy_of(plan, spec.part)
    if policy == "convex":
        c_out, c_in = (
            combination(plan, spec, axis).to(w_oi.dtype) if old < new else None
            for axis, (old, new) in zip(axes, sizes, strict=True)
        )
        rows = w_oi if c_out is None else torch.cat([w_oi, c_out @ w_oi])
        return rows if c_in is None else torch.cat([rows, rows @ c_in.T], dim=1)
    # in memory as w_oi is: nothing but new blocks crosses the grain
    wide = (
        w_oi.new_zeros(i_new, o_new).T if w_oi.T.is_contiguous() else w_oi.new_zeros(o_new, i_new)
    )
    if policy == "random" or (policy == "tiled" and plan.cfg.cross == "random"):
        std = plan.cfg.std / (math.sqrt(2 * plan.n_layer) if spec.part in WRITERS else 1.0)
        fill_new_blocks(plan, f"{spec.name}:{spec.part}", wide, w_oi.shape, std, wanted)
    if policy == "tiled":
        # where only one axis grows, its new block has no cross blocks and is tiled whole
        first_o, first_i = (old if old < new else 0 for old, new in sizes)
        rows, cols = torch.arange(o_new - first_o) % o_old, torch.arange(i_new - first_i) % i_old
        wide[first_o:, first_i:] = w_oi[rows][:, cols]
    wide[:o_old, :i_old] = w_oi
    return wide


def fill_new_blocks(plan: Plan, key: str, wide, old, std: float, wanted=(True, True)) -> None:
    """N(0, std) in the blocks of `wide` outside its leading block of shape `old`, new rows or
    columns only where `wanted`; a vector has one such block."""
    sides = [(slice(n), slice(n, None)) for n in old]
    for new in itertools.product((0, 1), repeat=len(old)):
        block = wide[tuple(side[i] for side, i in zip(sides, new, strict=True))]
        unwanted = any(i and not w for i, w in zip(new, wanted, strict=False))
        if any(new) and block.numel() and not unwanted:
            block.copy_(plan.normal(f"{key}:{new}", block.shape, std))


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
