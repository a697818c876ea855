"""A GPT in one file: pre-norm decoder, every switch that the growth experiments need.

Shapes: B sequences, T tokens, D = d_model (the residual stream), H heads of K = head_dim, F = d_ff,
V = vocab_size. Parameter names and their axes are listed in models/axes.py.
"""

import math
from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.config import GPTConfig
from models.kernels import attend, gelu, linear, linear_cross_entropy


class Attention(nn.Module):
    """Causal multi-head self-attention, scores scaled by 1/sqrt(K). With n_kv_head (grouped-query
    attention, arXiv 2305.13245) query head h reads key head h // group."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.head_dim, self.rope = cfg.head_dim, cfg.position == "rope"
        self.group, d_kv = cfg.n_head // cfg.kv_heads, cfg.kv_heads * cfg.head_dim
        self.q = nn.Linear(cfg.d_model, cfg.d_model, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, d_kv, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, d_kv, bias=cfg.bias)
        self.o = nn.Linear(cfg.d_model, cfg.d_model, bias=cfg.bias)

    def forward(self, x_btd: torch.Tensor, rope: tuple | None) -> torch.Tensor:
        shape = (*x_btd.shape[:2], -1, self.head_dim)
        q_bhtk, k_bhtk, v_bhtk = (
            linear(f, x_btd).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        if rope is not None:
            q_bhtk, k_bhtk = rotate(q_bhtk, *rope), rotate(k_bhtk, *rope)
        if self.group > 1:
            k_bhtk, v_bhtk = (t.repeat_interleave(self.group, 1) for t in (k_bhtk, v_bhtk))
        y_bhtk = attend(q_bhtk, k_bhtk, v_bhtk)
        return linear(self.o, y_bhtk.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two-layer FFN, or the gated form down(silu(gate(x)) * up(x)) for swiglu."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.activation = cfg.activation
        self.up = nn.Linear(cfg.d_model, cfg.d_ff, bias=cfg.bias)
        if cfg.activation == "swiglu":
            self.gate = nn.Linear(cfg.d_model, cfg.d_ff, bias=cfg.bias)
        self.down = nn.Linear(cfg.d_ff, cfg.d_model, bias=cfg.bias)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        h_btf = linear(self.up, x_btd)
        if self.activation == "swiglu":
            h_btf = F.silu(linear(self.gate, x_btd)) * h_btf
        elif self.activation == "gelu":
            h_btf = gelu(h_btf)
        elif self.activation == "gelu-erf":
            h_btf = F.gelu(h_btf)
        else:
            h_btf = F.relu(h_btf)
        return linear(self.down, h_btf)


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.ln_1, self.attn = make_norm(cfg), Attention(cfg)
        self.ln_2, self.mlp = make_norm(cfg), MLP(cfg)

    def forward(self, x_btd: torch.Tensor, rope: tuple | None) -> torch.Tensor:
        x_btd = x_btd + self.attn(self.ln_1(x_btd), rope)
        return x_btd + self.mlp(self.ln_2(x_btd))


class GPT(nn.Module):
    """`forward(idx)` gives logits (B, T, V); with targets, the mean cross-entropy in nats."""

    def __init__(self, cfg: GPTConfig, seed: int | None = 0):
        """seed: initialisation's own generator (data order never shares it); None leaves the
        weights unset for a state_dict that is loaded next."""
        super().__init__()
        self.cfg = cfg
        self.wte = embedding(cfg.vocab_size, cfg.d_model)
        if cfg.position == "learned":
            self.wpe = embedding(cfg.block_size, cfg.d_model)
        else:
            cos_tk, sin_tk = rope_tables(cfg)
            self.register_buffer("rope_cos", cos_tk, persistent=False)
            self.register_buffer("rope_sin", sin_tk, persistent=False)
        self.h = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = make_norm(cfg)
        if not cfg.tied:
            self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if seed is not None:
            init_weights(self, seed)

    def forward(self, idx_bt: torch.Tensor, targets_bt: torch.Tensor | None = None) -> torch.Tensor:
        T = idx_bt.shape[1]
        assert T <= self.cfg.block_size, f"{T} tokens exceed the context of {self.cfg.block_size}"
        x_btd, rope = self.wte(idx_bt), None
        if self.cfg.position == "learned":
            x_btd = x_btd + self.wpe.weight[:T]
        else:
            rope = (self.rope_cos[:T].to(x_btd.dtype), self.rope_sin[:T].to(x_btd.dtype))
        for block in self.h:
            x_btd = block(x_btd, rope)
        head_vd = self.wte.weight if self.cfg.tied else self.lm_head.weight
        x_btd = self.ln_f(x_btd)
        if targets_bt is None:
            return F.linear(x_btd, head_vd)
        return linear_cross_entropy(x_btd.flatten(0, 1), head_vd, targets_bt.flatten())


def embedding(n: int, d: int) -> nn.Embedding:
    """Unset weights: nn.Embedding's own initialisation imports torch.compile on the meta device, a
    second in every process that counts parameters."""
    return nn.Embedding(n, d, _weight=torch.empty(n, d))


def make_norm(cfg: GPTConfig) -> nn.Module:
    if cfg.norm == "layernorm":
        return nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps, bias=cfg.bias)
    return nn.RMSNorm(cfg.d_model, eps=cfg.norm_eps)


def rope_tables(cfg: GPTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, K) in float64 for half-split pairs (i, i + K/2); with rope_repeat = r each of
    the K/(2r) frequencies theta^(-2j/(K/r)) stands r times in a row."""
    n = cfg.head_dim // (2 * cfg.rope_repeat)
    freq = cfg.rope_theta ** (-torch.arange(n, dtype=torch.float64) / n)
    freq = freq.repeat_interleave(cfg.rope_repeat)
    angle_tk = torch.outer(torch.arange(cfg.block_size, dtype=torch.float64), freq).repeat(1, 2)
    return angle_tk.cos(), angle_tk.sin()


def rotate(x_bhtk: torch.Tensor, cos_tk: torch.Tensor, sin_tk: torch.Tensor) -> torch.Tensor:
    """RoPE (arXiv 2104.09864, half-split pairing as in Llama)."""
    a, b = x_bhtk.chunk(2, dim=-1)
    return x_bhtk * cos_tk + torch.cat((-b, a), dim=-1) * sin_tk


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """GPT-2's: N(0, 0.02), residual writers N(0, 0.02 / sqrt(2 L)), biases 0, norm gains 1.
    Drawn in float32 on the CPU in order of names, so every device and dtype starts the same."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if ".ln_" in f".{name}" or name.endswith("bias"):
            p.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        writer = name.endswith((".o.weight", ".down.weight"))
        std = 0.02 / math.sqrt(2 * model.cfg.n_layer) if writer else 0.02
        p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=gen))


@cache
def count_parameters(cfg: GPTConfig) -> int:
    """All parameters, a tied head once."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(cfg, seed=None).parameters())


def flops_per_token(cfg: GPTConfig, backward: bool = True) -> int:
    """Matrix-product FLOPs per token: 2 per weight in a product (the head included, embeddings and
    norms not), and 4 T H K per layer for scores and mixing, counted over the full T x T square
    (PaLM appendix B, arXiv 2204.02311). With the backward pass, three times the forward."""
    d_attn = 2 * (cfg.n_head + cfg.kv_heads) * cfg.head_dim  # q and o, k and v
    per_layer = cfg.d_model * (d_attn + (3 if cfg.activation == "swiglu" else 2) * cfg.d_ff)
    weights = cfg.n_layer * per_layer + cfg.vocab_size * cfg.d_model
    forward = 2 * weights + 4 * cfg.n_layer * cfg.block_size * cfg.n_head * cfg.head_dim
    return (3 if backward else 1) * forward
