"""Copies of old units, old ones first (comparison rows; our own code).

    net2net  Net2Net (arXiv 1511.05641), for Transformers bert2BERT's FPI (arXiv 2110.07143): what
             writes a space is copied, what reads it is divided by how often each unit now stands
             there, so sums are unchanged; a little noise keeps twins from staying twins
    aki      bert2BERT's advanced initialisation: new output rows come from the layer above, not
             from the same layer (the last layer and the embeddings keep net2net's)

Each layer draws which whole heads and neurons to copy, the residual stream draws once; all as
evenly as the ratio allows. A tied head has no input scale of its own, so the final norm carries it.
Function-preserving at whole ratios without noise. At others not: LayerNorm and RMSNorm then weigh
some coordinates twice.
"""

import torch

from growth.expand import fill_new_blocks
from growth.gauge import width_root
from growth.moments import always, copied
from growth.operator import Operator
from growth.plan import Plan
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    w = plan.weights[spec.name]
    wide = copy_units(plan, spec, w, drawn, one_over_count)
    key = f"{spec.name}:{spec.part}"
    return wide if spec.part == "norm" else add_noise(plan, key, w, wide)


def grow_advanced(plan: Plan, spec: Spec) -> torch.Tensor:
    wide, above = grow_tensor(plan, spec), name_above(plan, spec)
    dim = spec.out_dim
    old, new = plan.size(spec.axes[dim], wide.shape[dim])
    if above is None or old == new or spec.part == "norm":
        return wide
    # the layer above, read through this layer's copies: its rows must fit this layer's units
    upper = copy_units(plan, spec, plan.weights[above], drawn, one_over_count)
    return torch.cat([wide.narrow(dim, 0, old), upper.narrow(dim, old, new - old)], dim)


def name_above(plan: Plan, spec: Spec) -> str | None:
    """The same parameter one layer up; None in the last layer and outside the layers."""
    name = spec.name.replace(f".{spec.layer}.", f".{(spec.layer or 0) + 1}.", 1)
    return name if spec.layer is not None and name in plan.weights else None


def copy_units(plan: Plan, spec: Spec, w: torch.Tensor, index, scale) -> torch.Tensor:
    """w with unit index(..)[j] at every new place j of a growing axis, times scale(index) where the
    parameter reads that axis. A tied head is its embedding: the norm before it reads in its place,
    and makes up for logits that are divided by sqrt(d)."""
    instead = plan.tied and spec.before_head
    for dim, space in enumerate(spec.axes):
        old, new = plan.size(space, w.shape[dim])
        if old < new:
            idx = index(plan, spec, space)
            w = w.index_select(dim, idx)
            if spec.side(dim) == "in" or instead:
                factor = scale(idx, old).to(w.dtype)
                w = (w.movedim(dim, -1) * factor).movedim(-1, dim)
    return w * width_root(plan) if instead else w


def drawn(plan: Plan, spec: Spec, space: str) -> torch.Tensor:
    """Old index of every new place: old units in order, then seeded draws without replacement.

    The heads of a layer draw once, for q, k, v and o. All layers draw alike where they share a
    table over heads (T5).
    """
    (old, new), unit, layer = plan.sizes[space], plan.unit(space), spec.layer
    if space in ("heads", "kv", "head"):
        shared = any("head" in s.axes for s in plan.specs.values())
        space, layer = "heads", None if shared else layer
    rng = plan.rng(f"copies:{None if space == 'residual' else layer}:{space}")
    rounds = [rng.permutation(old // unit) for _ in range(new // old)]
    first = torch.arange(old // unit)
    units = torch.cat([first, *map(torch.from_numpy, rounds)])[: new // unit]
    return (units[:, None] * unit + torch.arange(unit)).flatten()


def one_over_count(idx: torch.Tensor, old: int) -> torch.Tensor:
    return 1 / torch.bincount(idx, minlength=old)[idx].double()


def add_noise(plan: Plan, key: str, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """`wide` + N(0, cfg.noise x its RMS) on every entry outside the old block."""
    noise = torch.zeros_like(wide)
    std = plan.cfg.noise * wide.square().mean().sqrt().item()
    fill_new_blocks(plan, f"{key}:noise", noise, w.shape, std)
    return wide + noise


def inexact(plan: Plan) -> list[str]:
    """At other factors the norms weigh some coordinates twice."""
    whole = all(new % old == 0 for old, new in plan.sizes.values() if old)
    reasons = [] if whole else ["copies keep the function only at whole factors"]
    noisy = plan.cfg.operator == "net2net" and plan.cfg.noise > 0
    return reasons + (["noise on the copies; exact with none"] if noisy else [])


COPY = Operator("net2net", 3, grow_tensor, inexact=inexact, moments=always(copied), preserves=True)
ADVANCED = Operator("aki", 4, grow_advanced)
