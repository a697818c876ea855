"""Lossless growth to any width by mean padding (after LEMON, arXiv 2310.07999).

Pre-LN: the new coordinates of the stream carry the mean of the old ones, so LayerNorm subtracts the
mean it always did and leaves 0 on them; its variance shrinks by d_old / d_new:

    x' = s [x; mean(x)]     gamma' = gamma sqrt(d_old/d_new)     epsilon' = epsilon s^2 d_old/d_new

Writers' new rows are the mean of their old rows. Readers' new columns meet 0 and are free, and so
are the rows of new heads and neurons, whose outgoing columns are 0: no two units need be alike. The
new gains multiply 0 as well: gamma_new (before the common factor) is free and sets how fast the new
coordinates learn.
RMSNorm: the same with 0 in place of the mean; so do norms that write the stream (Gemma 2, OLMo 2),
gamma' = s gamma sqrt(d_old/d_new). Wider heads: old coordinates first in each head, new
rows of k are 0, q and k grow by (hd_new/hd_old)^(1/4). RoPE's frequencies theta^(-2j/hd) stay where
they were with theta' = theta^(hd_new/hd_old), so wider heads are exact under plain RoPE too. Under
q_norm and k_norm new rows of q and k that the norm would count are 0 as well (wider heads; OLMo 2,
which norms all heads together): exact, but nothing sets them moving in training.

Post-LN (BERT): the norm writes the stream itself, y = gamma x^ + beta, and mean(y) depends on the
input unless gamma is constant. We write mean(beta): exact for constant gamma, approximate otherwise
(results/exactness.md has the measured error); the k-fold repeat of growth/lossless.py is exact.
"""

import math

import torch

from errors import UserError
from growth.expand import expand
from growth.gauge import gauge, normed_share, score_scale, width_root
from growth.moments import scaled
from growth.operator import ConfigChange, Operator
from growth.plan import Plan
from models.axes import Spec
from models.sizes import Misfit


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    return pad(plan, spec, plan.weights[spec.name])


def pad(plan: Plan, spec: Spec, w: torch.Tensor) -> torch.Tensor:
    """One parameter, its residual axis padded and its heads in place."""
    if spec.part == "norm":
        return pad_norm(plan, spec, w)
    if spec.part == "rotary":
        return w.index_select(1, table_index(plan))
    wide = silence(plan, spec, expand(plan, spec, w, spare(plan, spec)))
    if spec.writes_residual:
        fill_new_rows(wide, spec.out_dim, plan.d_old, plan.arch.norm == "layernorm")
        wide *= stream_scale(plan)
    if spec.in_space == "residual":
        wide *= read_scale(plan, spec)
    return arrange_heads(plan, spec, wide)


def read_scale(plan: Plan, spec: Spec) -> float:
    """What a reader takes on that no norm's gain does."""
    s = width_root(plan) if spec.part == "head" else 1.0
    if not plan.arch.affine:
        return s * math.sqrt(plan.d_old / plan.d_new)
    return s / stream_scale(plan) if reads_stream(plan, spec) else s


def reads_stream(plan: Plan, spec: Spec) -> bool:
    """A reader with no norm before it."""
    return spec.in_space == "residual" and spec.after is None and plan.arch.affine


def silence(plan: Plan, spec: Spec, wide: torch.Tensor) -> torch.Tensor:
    """Old blocks first: zero what new heads and neurons send out, new k rows of old heads, and new
    rows of q and k that a norm would count."""
    if spec.part in ("q", "k"):
        old = wide.narrow(spec.out_dim, 0, plan.sizes[spec.axes[spec.out_dim]][0])
        share = normed_share(plan, spec) if plan.arch.qk_norm else 1.0
        old *= (
            math.sqrt(config_change(plan).eps / share) if plan.arch.qk_norm else score_scale(plan)
        )
        if counted(plan, spec) or (spec.part == "k" and plan.cfg.heads == "wider"):
            zero_from(wide, spec.out_dim, old.shape[spec.out_dim])
    if (dim := silent_dim(plan, spec)) is not None:
        zero_from(wide, dim, plan.sizes[spec.in_space][0])
    return wide


def counted(plan: Plan, spec: Spec) -> bool:
    """Whether a norm would count the new rows of this parameter."""
    asked = plan.arch.qk_norm and spec.part in ("q", "k")
    return bool(asked) and normed_share(plan, spec) < 1


def silent_dim(plan: Plan, spec: Spec) -> int | None:
    """The axis whose new columns are 0: what new heads and neurons send out, and what would read
    a padded stream that is not 0 there."""
    silent = ["heads", "ffn", "expert_ffn", "pooled"]
    if plan.post_ln or (plan.arch.norm == "layernorm" and reads_stream(plan, spec)):
        silent.append("residual")
    if spec.in_space in silent and spec.in_space in plan.sizes:
        return spec.axes.index(spec.in_space) if spec.out != 0 else 1
    return None


def spare(plan: Plan, spec: Spec) -> set[int | None]:
    """Axes whose new coordinates pad writes itself."""
    return {silent_dim(plan, spec), spec.out_dim if spec.writes_residual else None}


def zero_from(wide: torch.Tensor, dim: int, start: int) -> None:
    wide.narrow(dim, start, wide.shape[dim] - start).zero_()


def fill_new_rows(wide: torch.Tensor, dim: int, d_old: int, mean: bool) -> None:
    """New coordinates along `dim`: the mean of the old ones (LayerNorm) or 0 (RMSNorm)."""
    new = wide.narrow(dim, d_old, wide.shape[dim] - d_old)
    new.copy_(wide.narrow(dim, 0, d_old).mean(dim, keepdim=True).expand_as(new)) if mean else (
        new.zero_()
    )


def pad_norm(plan: Plan, spec: Spec, w: torch.Tensor) -> torch.Tensor:
    if spec.axes != ("residual",):  # q_norm, k_norm
        old, new = plan.sizes[spec.axes[0]]
        wide = torch.cat([w * (score_scale(plan) * math.sqrt(old / new)), w.new_ones(new - old)])
        return arrange_heads(plan, spec, wide)
    if spec.is_bias:
        new = w.mean() if spec.writes_stream else w.new_zeros(())
    else:
        new = w.new_tensor(plan.cfg.gamma_new)
    wide = torch.cat([w, new.expand(plan.d_new - plan.d_old)])
    if not spec.is_bias:
        wide *= math.sqrt(plan.d_old / plan.d_new)
    if spec.before_head and plan.tied:
        wide *= width_root(plan) / stream_scale(plan)
    return wide * stream_scale(plan) if spec.writes_stream else wide


def stream_scale(plan: Plan) -> float:
    if gauge(plan) == "norm" or plan.post_ln:
        return 1.0
    return math.sqrt(plan.d_new / plan.d_old)


def arrange_heads(plan: Plan, spec: Spec, wide: torch.Tensor) -> torch.Tensor:
    """From [all old coordinates, all new ones] to each head's old ones then its new ones."""
    if plan.cfg.heads == "more":
        return wide
    for dim, space in enumerate(spec.axes):
        if space in ("heads", "kv", "head_dim"):
            wide = wide.index_select(dim, head_order(plan, space))
    return wide


def head_order(plan: Plan, space: str) -> torch.Tensor:
    """(new,) where each coordinate of the wide space stands in [old; new] order."""
    old, new = plan.head_dim
    n_head = plan.sizes[space][1] // new
    place = torch.full((n_head, new), -1)
    place[:, slots(plan)] = torch.arange(n_head * old).view(n_head, old)
    place[place < 0] = torch.arange(n_head * old, n_head * new)
    return place.flatten()


def slots(plan: Plan) -> torch.Tensor:
    """(hd_old,) where a head's old coordinates go: first, or, under half-split RoPE, first in each
    of the two rotated halves, with unrotated coordinates (GPT-NeoX) after them."""
    old, (r_old, r_new) = torch.arange(plan.head_dim[0]), plan.rotary
    if plan.arch.rope != "half":
        return old
    second = old - r_old // 2 + r_new // 2
    return torch.where(old < r_old // 2, old, torch.where(old < r_old, second, old - r_old + r_new))


def table_index(plan: Plan) -> torch.Tensor:
    """(hd_new,) columns of RoFormer's stored table [sines; cosines]: old frequencies first, then
    the same again (their keys are 0)."""
    old, new = (hd // 2 for hd in plan.sizes["head_dim"])
    return torch.cat([torch.arange(new) % old, old + torch.arange(new) % old])


def config_change(plan: Plan) -> ConfigChange:
    rotary = plan.rotary
    stretch = plan.arch.rope == "half" and plan.cfg.heads == "wider"
    return ConfigChange(
        eps=stream_scale(plan) ** 2 * plan.d_old / plan.d_new,
        theta_power=rotary[1] / rotary[0] if stretch else 1.0,
    )


def check(plan: Plan) -> None:
    """UserError for fillers that need whole heads where there are none; Misfit for odd halves."""
    if plan.cfg.heads == "wider" and plan.cfg.attn in ("convex", "tiled"):
        raise UserError(
            f"grow.attn {plan.cfg.attn!r} fills whole heads, but heads wider has none; use "
            f"heads more, or attn random or zero"
        )
    for head_dim, rotary in zip(plan.head_dim, plan.rotary, strict=True):
        if plan.cfg.heads == "wider" and plan.arch.rope and rotary % 2:
            raise Misfit(
                f"RoPE turns pairs, but heads of {head_dim} would rotate {rotary} coordinates, an "
                f"odd number; choose another width or heads more"
            )


def inexact(plan: Plan) -> list[str]:
    if not plan.post_ln or plan.d_new == plan.d_old:
        return []
    return [
        "Post-LN: mean padding is exact only for constant LayerNorm gains and without the MLM "
        "head; a whole factor with method lossless is exact"
    ]


def remarks(plan: Plan) -> list[str]:
    """Rows that are 0 on both sides of a product stay there, however long the model trains."""
    if not (plan.arch.qk_norm and any(counted(plan, spec) for spec in plan.specs.values())):
        return []
    instead = "heads more or a" if plan.arch.qk_norm == "head_dim" else "A"
    return [
        "exact, but the new rows of q and k are 0, for q_norm and k_norm would count them; so is "
        f"their gradient, and they never move in training. {instead} whole factor with method "
        f"lossless has no such rows"
    ]


PAD = Operator(
    "pad",
    7,
    grow_tensor,
    inexact=inexact,
    remarks=remarks,
    config_change=config_change,
    check=check,
    # wider heads interleave old coordinates and new ones
    moments=lambda cfg: scaled if cfg.heads == "more" else None,
    preserves=True,
    each_space=True,
    wider_heads=True,
    color="#56B4E9",
)
