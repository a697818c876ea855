"""The warm-up gate: what blocks write to new coordinates enters the residual stream slowly.

After growth from d_old, alpha multiplies the coordinates >= d_old of every attention and FFN output
before the residual add (embeddings are not gated, as in the paper). alpha rises linearly from 0 to
1 over `steps` optimizer steps and is a pure function of the stage's step, so a resumed run goes on
exactly. After the ramp the hooks are gone: the forward has no extra operation, and the state_dict
never had an extra key.
"""

import torch

from errors import UserError
from models.gpt import GPT


def alpha_at(step: int, steps: int) -> float:
    """alpha in [0, 1] for the update number `step` (from 0); 1 where there is no ramp."""
    return min(1.0, step / steps) if steps > 0 else 1.0


class Gate:
    """Forward hooks on every block's attn and mlp of `model`; see the module's text."""

    def __init__(self, model: GPT, d_old: int, steps: int):
        d_new = model.cfg.d_model
        if not 0 < d_old < d_new:
            raise UserError(
                f"d_old is {d_old}; it must be in 1..{d_new - 1}, the width before growth"
            )
        like = model.wte.weight
        self.d_old, self.steps = d_old, steps
        # one factor per coordinate, changed in place: no recompilation while alpha rises
        self.scale_d = torch.ones(d_new, dtype=like.dtype, device=like.device)
        self.handles = [
            part.register_forward_hook(self._scale)
            for block in model.h
            for part in (block.attn, block.mlp)
        ]

    def _scale(self, module, args, y_btd: torch.Tensor) -> torch.Tensor:
        return y_btd * self.scale_d

    def set(self, step: int) -> bool:
        """Set alpha for `step`. True where the ramp just ended and the hooks were removed: a
        compiled forward must then be compiled again."""
        self.scale_d[self.d_old :] = alpha_at(step, self.steps)
        if step < self.steps or not self.handles:
            return False
        self.remove()
        return True

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
