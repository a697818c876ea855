"""SPARKLING-style copy (arXiv 2602.02472; comparison row, in our own words and code).

New units are copies of the old ones in order (whole heads), and every matrix that reads a widened
space is scaled by one number so that the root mean square of what it computes stays: with copy
counts c over the old units, 1 / sqrt(mean c^2) (inputs taken as uncorrelated), which is 1/k at
k-fold width and exact there. The paper breaks the copies' symmetry by its optimizer, not by noise:
state reset and learning-rate re-warm-up for the new parameters alone, which is growth/optim.py's
`asymmetric`.
"""

import torch

from growth.moments import always, copied
from growth.operator import Operator
from growth.operators.net2net import copy_units, inexact
from growth.plan import Plan
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    return copy_units(plan, spec, plan.weights[spec.name], in_order, keep_rms)


def in_order(plan: Plan, spec: Spec, space: str) -> torch.Tensor:
    """Old index of every new place: 0 .. old-1 again and again; old is whole heads, so they are."""
    old, new = plan.sizes[space]
    return torch.arange(new) % old


def keep_rms(idx: torch.Tensor, old: int) -> torch.Tensor:
    """1 / sqrt(mean c^2) for every place."""
    counts = torch.bincount(idx, minlength=old).double()
    return counts.square().mean().rsqrt().expand(len(idx))


COPY = Operator(
    "sparkling", 5, grow_tensor, inexact=inexact, moments=always(copied), preserves=True
)
