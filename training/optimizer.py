"""AdamW with its two decay groups, its state by parameter name, and the learning rate."""

import math

import torch

from checkpoint import Checkpoint
from errors import UserError
from models.gpt import GPT
from training.config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_at(step: int, cfg: TrainConfig) -> float:
    """The learning rate of update number `step` (from 0); a pure function.

    Linear warm-up to cfg.lr over warmup_steps, then cosine to lr * min_lr_ratio at the last step,
    or constant, or wsd: constant, then linear to lr * min_lr_ratio over the last decay_fraction.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    low = cfg.lr * cfg.min_lr_ratio
    if cfg.schedule == "cosine":
        part = (step + 1 - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
        return low + (cfg.lr - low) * 0.5 * (1 + math.cos(math.pi * part))
    if cfg.schedule == "wsd":
        left, decay = cfg.steps - 1 - step, max(1, round(cfg.decay_fraction * cfg.steps))
        return low + (cfg.lr - low) * min(1.0, left / decay)
    return cfg.lr


def decay_groups(model: GPT) -> tuple[list[str], list[str]]:
    """Names of the parameters with weight decay (matrices, embeddings) and without (norms, biases).

    Every parameter is in exactly one group; a tied head is wte.weight and counts once.
    """
    names = [name for name, _ in model.named_parameters()]
    plain = [n for n in names if n.endswith("bias") or ".ln_" in f".{n}"]
    decayed = [n for n in names if n not in set(plain)]
    shapes = {name: p.ndim for name, p in model.named_parameters()}
    assert all(shapes[n] == 1 for n in plain) and all(shapes[n] == 2 for n in decayed)
    assert len({id(p) for p in model.parameters()}) == len(names) == len(plain) + len(decayed)
    return decayed, plain


def make_optimizer(cfg: TrainConfig, model: GPT) -> tuple[torch.optim.AdamW, list[str]]:
    """AdamW (decoupled decay, arXiv 1711.05101), and the parameters' names in its order."""
    decayed, plain = decay_groups(model)
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[n] for n in decayed], "weight_decay": cfg.weight_decay},
        {"params": [params[n] for n in plain], "weight_decay": 0.0},
    ]
    betas = (cfg.beta1, cfg.beta2)
    return torch.optim.AdamW(groups, cfg.lr, betas, cfg.adam_eps, fused=True), decayed + plain


def pack_optimizer(
    optimizer: torch.optim.AdamW, names: list[str]
) -> tuple[dict[str, torch.Tensor] | None, int]:
    """Adam's moments by parameter name, and its step; (None, 0) before the first update."""
    states = optimizer.state_dict()["state"]
    if not states:
        return None, 0
    moments = {
        f"{name}/{kind}": states[i][kind] for i, name in enumerate(names) for kind in MOMENTS
    }
    return moments, int(states[0]["step"])


def check_moments(ckpt: Checkpoint) -> None:
    """UserError where a checkpoint has moments and one is missing, unknown or misshapen."""
    if ckpt.optimizer is None:
        return
    wanted = {f"{name}/{kind}": p.shape for name, p in ckpt.model.items() for kind in MOMENTS}
    found = {key: moment.shape for key, moment in ckpt.optimizer.items()}
    step = ckpt.meta.get("optimizer_step")
    if found != wanted or type(step) is not int or step < 1:
        raise UserError(f"{ckpt.folder}: its optimizer state does not fit its weights")


def load_optimizer(optimizer: torch.optim.AdamW, names: list[str], ckpt: Checkpoint) -> None:
    """The inverse of pack_optimizer, by name. Nothing happens where the checkpoint has no moments;
    raises UserError as check_moments does."""
    check_moments(ckpt)
    if ckpt.optimizer is None:
        return
    step, states = torch.tensor(float(ckpt.meta["optimizer_step"])), {}
    for i, name in enumerate(names):
        states[i] = {kind: ckpt.optimizer[f"{name}/{kind}"].clone() for kind in MOMENTS}
        states[i]["step"] = step.clone()
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
