"""Learning an operator: some steps of AdamW on the LM loss, every weight frozen, then it is folded.

The wide weights are a differentiable function of the operator's few parameters; the model runs on
them through torch.func.functional_call, so nothing is written into a module. Restarting after an
interruption repeats the same steps: the result depends on the plan and the batches alone.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from errors import UserError
from growth.operator import Learned
from growth.plan import Plan
from models.gpt import GPT, GPTConfig, flops_per_token

BETAS, CLIP = (0.9, 0.95), 1.0


@dataclass(frozen=True)
class LearnResult:
    """What learning gave and what it cost; losses are per step, before its update."""

    params: dict[str, torch.Tensor] = field(repr=False)
    steps: int
    tokens: int
    flops: int
    losses: list[float] = field(repr=False)
    wall_s: float


def learn(plan: Plan, operator: Learned, new: GPTConfig, batches: Iterable) -> LearnResult:
    """plan.cfg.learn_steps steps on `batches` of (x, y) tokens (B, T), on the batches' device.

    FLOPs: the model's forward and backward pass per token (gradients reach every wide weight), and
    the operator's own matrix products, forward and backward, once per step.
    Raises UserError for too few batches and for a loss that is not finite.
    """
    cfg, began, losses = plan.cfg, time.perf_counter(), []
    batches = list(islice(batches, cfg.learn_steps))
    if len(batches) < cfg.learn_steps:
        raise UserError(
            f"{cfg.operator} learns for {cfg.learn_steps} steps but only {len(batches)} batches "
            f"came; give more data or lower learn_steps"
        )
    device = batches[0][0].device
    with torch.no_grad():
        base = {name: operator.base(plan, spec).to(device) for name, spec in plan.specs.items()}
    params = {name: p.to(device).requires_grad_() for name, p in operator.start(plan).items()}
    model = GPT(new, seed=None).to(device, plan.dtype).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        params.values(), cfg.learn_lr, BETAS, weight_decay=cfg.learn_weight_decay
    )
    each_fold = fold_flops(plan, operator, base, params)
    for step, batch in enumerate(tqdm(batches, desc=f"learning {cfg.operator}", unit="step")):
        loss = functional_call(model, widen(plan, operator, base, params), batch)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise UserError(
                f"learning {cfg.operator} gave loss {losses[-1]} at step {step} with learn_lr "
                f"{cfg.learn_lr}; lower it (try {cfg.learn_lr / 3:.2g}), or check the parent"
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), CLIP)
        optimizer.step()
    tokens = sum(x_bt.numel() for x_bt, _ in batches)
    flops = tokens * flops_per_token(new) + cfg.learn_steps * each_fold
    learned = {name: p.detach().cpu() for name, p in params.items()}
    return LearnResult(learned, cfg.learn_steps, tokens, flops, losses, time.perf_counter() - began)


def widen(plan: Plan, operator: Learned, base: dict, params: dict) -> dict[str, torch.Tensor]:
    """Every wide tensor by name, as a function of `params`."""
    # operators make small constants (I, u_i): this puts them beside the parameters
    with torch.device(next(iter(params.values())).device):
        maps = operator.maps(plan, params)
        return {n: operator.fold(plan, s, base[n], maps) for n, s in plan.specs.items()}


def fold_flops(plan: Plan, operator: Learned, base: dict, params: dict) -> int:
    """Matrix-product FLOPs of one fold and its backward pass, as torch counts them (a matrix
    exponential, a few d x d products, is not). UserError where no tensor depends on `params`."""
    with FlopCounterMode(display=False) as counter:
        wide = [w for w in widen(plan, operator, base, params).values() if w.requires_grad]
        if not wide:
            raise UserError(
                f"{plan.cfg.operator} has nothing to learn with rotate_weights off and norm "
                f"{plan.cfg.norm!r}; turn one on"
            )
        torch.autograd.backward(wide, [torch.ones_like(w) for w in wide])
    for p in params.values():
        p.grad = None
    return counter.get_total_flops()
