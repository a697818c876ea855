"""A learning rate of its own for new coordinates: a warm-up for them alone, a factor, or both.

The warm-up is half of the `asymmetric` optimizer policy: growth/optim.py leaves the old block its
Adam state and gives new coordinates none. The factor is a rival explanation of what larger new
gains do. Both scale the updates, outside train.py's loop, by hooks on the optimizer.
"""

import math

import torch

from models.gpt import GPT, GPTConfig


def shapes_before(cfg: GPTConfig, d_old: int) -> dict[str, torch.Size]:
    """Parameter shapes of the model that cfg's grew from (head_dim and d_ff/d_model kept)."""
    old = cfg.resized(cfg.sizes.at_width(d_old))
    with torch.device("meta"):
        return {name: p.shape for name, p in GPT(old, seed=None).named_parameters()}


class NewCoordinates:
    """Scales every update of the coordinates outside the old block.

    Hooks on `optimizer` (Adam or AdamW) keep the parameters before each step and afterwards set
    p <- before + s (p - before) outside the block, weight decay included. In step t of the stage
    (from 1) s is `factor` times t/steps, at most 1, times the ratio of the bias correction of a
    state of age t to that of the kept step count: together the updates Adam would make from an
    empty state at `factor` times the learning rate. With factor 1 the hooks remove themselves when
    s has reached 1 (to 1 %). A resumed run passes the steps done.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                 old_shapes: dict[str, torch.Size], steps: int, done: int = 0,
                 factor: float = 1.0):  # fmt: skip
        self.steps, self.done, self.factor, self.before = steps, done, factor, {}
        self.grown = [
            (p, tuple(map(slice, old_shapes[name])))
            for name, p in model.named_parameters()
            if p.shape != old_shapes[name]
        ]
        self.handles = [
            optimizer.register_step_pre_hook(self.keep),
            optimizer.register_step_post_hook(self.scale),
        ]

    def keep(self, optimizer, args, kwargs) -> None:
        self.before = {p: p.detach().clone() for p, _ in self.grown}

    @torch.no_grad()
    def scale(self, optimizer, args, kwargs) -> None:
        self.done += 1
        group = optimizer.param_groups[0]
        step = int(optimizer.state[self.grown[0][0]]["step"])  # the same for all of them
        ramp = min(1.0, self.done / self.steps) if self.steps else 1.0
        s = self.factor * ramp * correction(self.done, group) / correction(step, group)
        for p, block in self.grown:
            slow = torch.lerp(self.before[p], p, s)
            slow[block] = p[block]
            p.copy_(slow)
        self.before = {}
        if self.factor == 1 and self.done >= self.steps and s > 0.99:
            self.remove()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


def correction(step: int, group: dict) -> float:
    """Adam's bias correction of an update: sqrt(1 - beta2^step) / (1 - beta1^step)."""
    beta1, beta2 = group["betas"]
    return math.sqrt(1 - beta2**step) / (1 - beta1**step)
