"""Small models for the growth tests: every parameter random, float64, gains and shifts included."""

import math

import torch

from growth.apply import gpt_source
from growth.plan import GrowConfig, Plan
from models.gpt import GPT, GPTConfig


def tiny(d_model: int = 8, **kwargs) -> GPTConfig:
    """Two layers, heads of 4, 23 tokens, context 12."""
    head_dim = kwargs.pop("head_dim", 4)
    sizes = {"vocab_size": 23, "block_size": 12, "n_layer": 2} | kwargs
    return GPTConfig(
        d_model=d_model, head_dim=head_dim, n_head=d_model // head_dim, d_ff=2 * d_model, **sizes
    )


def random_weights(cfg: GPTConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights N(0, 0.3), gains around 1: nothing is zero, equal or symmetric."""
    gen, weights = torch.Generator().manual_seed(seed), {}
    for name, p in GPT(cfg, seed=None).named_parameters():
        w = 0.3 * torch.randn(p.shape, generator=gen, dtype=torch.float64)
        weights[name] = w + 1 if ".ln_" in f".{name}" and name.endswith("weight") else w
    return weights


def model_of(weights: dict, cfg: GPTConfig) -> GPT:
    """A plain GPT with these weights, in their dtype."""
    model = GPT(cfg, seed=None).to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights, strict=True)
    return model


def tokens(cfg: GPTConfig, n: int = 3, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    draw = torch.randint(cfg.vocab_size, (n, cfg.block_size + 1), generator=gen)
    return draw[:, :-1], draw[:, 1:]


def gap(weights: dict, cfg: GPTConfig, wide: dict, wide_cfg: GPTConfig) -> float:
    """max |logit difference| of two models on the same tokens."""
    x, _ = tokens(cfg)
    with torch.no_grad():
        return (model_of(weights, cfg)(x) - model_of(wide, wide_cfg)(x)).abs().max().item()


def plan(old: GPTConfig, d_new: int, ages=(), weights=None, **settings):
    weights = random_weights(old) if weights is None else weights
    source, new = gpt_source(weights, old), old.widened(d_new).sizes
    return Plan(GrowConfig(**settings), source, new, (*ages, old.d_model, d_new))


def row_sums(angle: float, d_old: int, d_new: int) -> torch.Tensor:
    """The 2 x 2 row-sum matrix of R over the blocks (old, new), float64: entry (a, b) is what each
    row of block a sums to over the columns of block b. R^T's is that of -angle."""
    r = math.sqrt(d_old / (d_new - d_old))
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s / r], [s * r, c]], dtype=torch.float64)
