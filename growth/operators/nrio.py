"""NRIO: no residual operator. The old block is copied and the policies fill the rest: the paper's
"do nothing" baseline when every policy is `random`. Never exact: LayerNorm sees new coordinates."""

import torch

from growth.expand import expand
from growth.moments import filled, unless_folded
from growth.operator import Operator
from growth.plan import Plan
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    return expand(plan, spec, fold_norm(plan, spec))


def fold_norm(plan: Plan, spec: Spec) -> torch.Tensor:
    """The old tensor; under norm="fold", with its norm's gain and shift moved into it.

    W diag(gamma) and b + W beta compute the same from (gamma, beta) = (1, 0). A norm that a tied or
    bias-free reader follows keeps its shift, and under a tied head its gain too: nothing could
    absorb it there.
    """
    w = plan.weights[spec.name]
    if plan.cfg.norm != "fold":
        return w
    if spec.part == "norm":
        if not foldable(plan, spec.module):
            return w
        return torch.zeros_like(w) if spec.is_bias else torch.ones_like(w)
    if spec.after is None or not foldable(plan, spec.after):
        return w
    gain, shift = plan.weights[f"{spec.after}.weight"], plan.weights.get(f"{spec.after}.bias")
    if not spec.is_bias:
        return w * gain if spec.out == 0 else w * gain[:, None]
    if shift is None:
        return w
    name = spec.name.removesuffix("bias") + "weight"
    matrix_oi = plan.weights[name] if plan.specs[name].out == 0 else plan.weights[name].T
    return w + matrix_oi @ shift


def foldable(plan: Plan, norm: str) -> bool:
    """True where every reader of `norm` can absorb its gain and, if it has one, its shift."""
    readers = [s for s in plan.specs.values() if s.after == norm and not s.is_bias]
    has_shift = f"{norm}.bias" in plan.specs
    biases = all(s.name.removesuffix("weight") + "bias" in plan.specs for s in readers)
    return bool(readers) and (biases or not has_shift)


NRIO = Operator("nrio", 0, grow_tensor, moments=unless_folded(filled), color="#0072B2")
