"""Lossless k-fold width by repetition (the note on lossless scaling): the same function, exactly.

Every space repeats its coordinates, interleaved, and carries them at a scale s:

    x'_i = s x_{ceil(i/k)}          (i = 1 .. k d)

so one rule covers every linear map from a space of scale s_in to one of scale s_out:

    W' = s_out / (k s_in) * repeat(W),      b' = s_out * repeat(b),      gamma' = s_out * gamma

With the stream at s = 1/sqrt(k) and k = 2 it gives the note's constants: w/2 and b/sqrt(2) for a
linear layer, w/sqrt(2) and b before a GELU. After the GELU (s_in = 1) it gives w/(2 sqrt(2)) and
b/sqrt(2); the note prints b/2 there, which is off by sqrt(2) (tests/test_lossless.py).

Scales: residual and v 1/sqrt(k); q and k k^(-1/4) in wider heads and 1 in more heads (score_scale);
FFN 1 before a curved activation, 1/sqrt(k) before a ReLU; a gate 1 and its `up` 1/sqrt(k), so that
their product has 1/sqrt(k). Heads: "wider" repeats within each head; [x, x] over all of them would
scramble heads. "more" repeats whole heads. Under q_norm and k_norm q and k are at the stream's
scale, as their epsilon is, and the norms' gains carry k^(-1/4). Copies get equal gradients for
ever; `noise_db` parts them: noise that sums to zero over the copies of each input, so the function
stays exact.
"""

import math

import torch

from growth.gauge import gauge, head_growth, homogeneous, score_scale, width_root
from growth.moments import always, copied
from growth.operator import ConfigChange, Operator
from growth.plan import Plan
from models.axes import Spec
from models.rope import sinusoids
from models.sizes import Misfit


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    w = plan.weights[spec.name]
    if spec.part == "rotary" and plan.cfg.rope == "recompute":
        return sinusoids(w.shape[0], plan.sizes["head_dim"][1]).to(w.dtype)
    w = w * scale(plan, spec)  # before it is large
    for dim, space in enumerate(spec.axes):
        if space in plan.sizes:
            w = w.index_select(dim, repeat_index(plan, space))
    return w if plan.cfg.noise_db is None else w + noise(plan, spec, w)


def copies(plan: Plan, space: str = "residual") -> int:
    """k = new / old of a space."""
    old, new = plan.sizes[space]
    return new // old


def repeat_index(plan: Plan, space: str) -> torch.Tensor:
    """(new,) the old index that each new coordinate of `space` repeats."""
    k, new = copies(plan, space), torch.arange(plan.sizes[space][1])
    hd = plan.head_dim[0]
    if plan.cfg.heads == "more":
        if space in ("heads", "kv"):  # whole heads: [h1, h1, h2, h2]; groups of GQA stay together
            return new // hd // k * hd + new % hd
        return new if space == "head_dim" else new // k
    if space == "head":
        return new
    if space in ("heads", "kv") and plan.arch.rope == "pairs":  # [x1, x2, x1, x2, x3, x4, ...]
        return new // 2 // k * 2 + new % 2
    return new // k  # half-split pairs (i, i + hd/2) stay pairs under plain interleaving


def stream_scale(plan: Plan) -> float:
    return 1 / math.sqrt(copies(plan)) if gauge(plan) == "norm" else 1.0


def head_norm_scale(plan: Plan) -> float:
    """Of the norm before the output head. Tied: s k s_embed / sqrt(k if T5) = 1. The note's BERT
    rule "divide by an extra sqrt(k)" and its GPT rule "nothing to do" are this at 1/sqrt(k)."""
    s = stream_scale(plan)
    return width_root(plan) / (copies(plan) * s) if plan.tied else s


def ffn_scale(plan: Plan) -> float:
    plain = plan.arch.gated or homogeneous(plan.arch.activation)
    return 1 / math.sqrt(copies(plan, "ffn")) if plain else 1.0


def mixed_scale(plan: Plan) -> float:
    """Of v and of what attention mixes from it."""
    return 1 / math.sqrt(copies(plan, "heads"))


def out_scale(plan: Plan, spec: Spec) -> float:
    """s of what this parameter produces."""
    arch, part = plan.arch, spec.part
    if part == "norm" and spec.axes == ("residual",):
        return head_norm_scale(plan) if spec.before_head else stream_scale(plan)
    if arch.qk_norm and part in ("q", "k"):  # epsilon asks for this, the norm's gain gives the rest
        return stream_scale(plan)
    if part in ("q", "k", "norm"):
        return score_scale(plan, head_growth(plan))
    if part == "dense":  # BERT's MLM head
        return stream_scale(plan) if homogeneous(plan.arch.head_activation) else 1.0
    return {
        "embed": stream_scale(plan),
        "o": stream_scale(plan),
        "down": stream_scale(plan),
        "v": mixed_scale(plan),
        "up": ffn_scale(plan),
        "head": width_root(plan) if spec.in_space == "residual" and not plan.tied else 1.0,
    }.get(part, 1.0)  # gate, router, head, relpos, rotary, pool, fixed


def in_scale(plan: Plan, spec: Spec, space: str) -> float:
    """s of what this parameter reads."""
    if space == "residual" and not plan.arch.affine:
        return 1.0  # straight from a norm without gains
    if space == "residual":
        return head_norm_scale(plan) if spec.part == "head" else stream_scale(plan)
    if space in ("ffn", "expert_ffn"):
        return ffn_scale(plan)
    return mixed_scale(plan) if space == "heads" else 1.0


def scale(plan: Plan, spec: Spec) -> float:
    """s_out / (k s_in) for a matrix that reads a repeated space, s_out for everything else."""
    s, space = out_scale(plan, spec), spec.in_space
    reads = spec.part not in ("embed", "relpos", "rotary") and space in plan.sizes
    return s / (copies(plan, space) * in_scale(plan, spec, space)) if reads else s


def noise(plan: Plan, spec: Spec, w: torch.Tensor) -> torch.Tensor:
    """Noise at `noise_db` below w's RMS that sums to zero over the copies of each input."""
    space = spec.in_space
    if spec.part in ("embed", "relpos", "rotary") or space not in plan.sizes:
        return torch.zeros_like(w)  # no input is repeated, so nothing would cancel
    dim, index = spec.axes.index(space) if spec.out != 0 else 1, repeat_index(plan, space)
    rms = w.square().mean().sqrt() * 10 ** (-plan.cfg.noise_db / 20)
    draw = torch.from_numpy(plan.rng(f"{spec.name}:{spec.part}:noise").standard_normal(w.shape))
    draw = draw.movedim(dim, 0)
    sums = torch.zeros(plan.sizes[space][0], *draw.shape[1:], dtype=draw.dtype)
    centred = draw - sums.index_add_(0, index, draw)[index] / copies(plan, space)
    return (centred.movedim(0, dim) * rms).to(w.dtype)


def config_change(plan: Plan) -> ConfigChange:
    repeats = plan.arch.rope and plan.cfg.rope == "repeat" and plan.cfg.heads == "wider"
    return ConfigChange(
        eps=stream_scale(plan) ** 2,
        rope_repeat=copies(plan, "heads") if repeats else 1,
    )


def check(plan: Plan) -> None:
    """Misfit unless, with wider heads, what RoPE turns grows by a whole factor."""
    k, (old, new) = copies(plan, "heads"), plan.rotary
    if plan.cfg.heads == "wider" and new != k * old:
        raise Misfit(
            f"heads wider: RoPE turns {old} coordinates of a head and would turn {new}, not "
            f"{k} x {old}, so the frequencies cannot be repeated; use heads more or method pad"
        )


def inexact(plan: Plan) -> list[str]:
    reasons, hidden = [], plan.arch.head_activation
    if plan.cfg.heads == "wider" and plan.cfg.rope == "recompute" and plan.arch.rope:
        reasons.append("RoPE frequencies are recomputed for the wider heads (the note's rule)")
    if hidden and not homogeneous(hidden) and gauge(plan) == "norm":
        reasons.append("the MLM head's LayerNorm sees epsilon/k where epsilon would be exact")
    return reasons


REPEAT = Operator(
    "lossless",
    6,
    grow_tensor,
    inexact=inexact,
    moments=always(copied),
    config_change=config_change,
    check=check,
    preserves=True,
    whole=True,
    each_space=True,
    wider_heads=True,
    old_first=False,
    old_places=lambda plan: torch.arange(plan.d_old) * copies(plan),
    color="#56B4E9",
)
