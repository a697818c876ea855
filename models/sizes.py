"""The widths of a model, and the widths it can grow to: decided here for every family."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from errors import UserError

MAX_WIDTH = 1_000_000  # far beyond any model


class Misfit(UserError):
    """A width that some part of the model cannot follow."""


@dataclass(frozen=True)
class Sizes:
    """The widths of one model. kv_heads equals n_head without grouped-query attention; RoPE turns
    the share rotary_part of a head's coordinates, or rotary_dim of them whatever its size."""

    d_model: int
    n_head: int
    kv_heads: int
    head_dim: int
    d_ff: int
    expert_ffn: int = 0
    rotary_part: float = 0.0
    rotary_dim: int = 0
    one_kv: bool = False  # a single key head, which stays: the config has no word for more

    @property
    def rotary(self) -> int:
        """Rotated coordinates of a head."""
        return self.rotary_dim or int(self.head_dim * self.rotary_part)

    @property
    def spaces(self) -> dict[str, int]:
        """The width of every space of the axis tables (models/axes.py) that has one."""
        return {
            "residual": self.d_model,
            "heads": self.n_head * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "head": self.n_head,
            "ffn": self.d_ff,
            "pooled": self.d_model,
            "head_dim": self.head_dim,
            "expert_ffn": self.expert_ffn,
        }

    def widened(self, d_model: int) -> "Sizes":
        """The sizes at a larger width, with more heads; UserError names the nearest that work."""
        return fitting(self.at_width, self.d_model, d_model)

    def at_width(self, d_model: int, wider_heads: bool = False, whole: bool = False) -> "Sizes":
        """Every size scaled by d_model / self.d_model, up or down; Misfit says what cannot be.

        wider_heads: the same number of wider heads instead of more heads of one size. whole: only
        multiples of the old width will do.
        """

        def scaled(n: int, what: str) -> int:
            if n * d_model % self.d_model:
                raise Misfit(f"width {d_model} would need {n * d_model / self.d_model:g} {what}")
            return n * d_model // self.d_model

        if whole and d_model % self.d_model:
            raise Misfit(
                f"width {d_model} is no multiple of {self.d_model}, and every coordinate is "
                f"repeated (method pad takes any width)"
            )
        n_head, kv_heads, head_dim = self.n_head, self.kv_heads, self.head_dim
        if wider_heads:
            head_dim = scaled(head_dim, "coordinates per head")
        else:
            n_head, group = scaled(n_head, f"heads of {head_dim}"), self.n_head // kv_heads
            if n_head % group == 0 and not self.one_kv:
                kv_heads = n_head // group
            elif kv_heads > 1:  # a single key head may stay and serve the new heads too
                raise Misfit(f"width {d_model} would need {n_head / group:g} key heads")
        return replace(
            self,
            d_model=d_model,
            n_head=n_head,
            kv_heads=kv_heads,
            head_dim=head_dim,
            d_ff=scaled(self.d_ff, "FFN neurons"),
            expert_ffn=scaled(self.expert_ffn, "FFN neurons of an expert"),
        )


def fitting(make: Callable, d_old: int, d_new: int):
    """make(d_new) for a width above d_old; where it raises Misfit, a UserError with the nearest
    widths at which it does not."""
    if not d_old < d_new <= MAX_WIDTH:
        raise UserError(
            f"new width {d_new} must be larger than the old width {d_old}, and at most {MAX_WIDTH}"
        )

    def works(d: int) -> bool:
        try:
            return bool(make(d))
        except Misfit:
            return False

    try:
        return make(d_new)
    except Misfit as misfit:
        below = next((d for d in range(d_new - 1, d_old, -1) if works(d)), None)
        above = (d for d in range(d_new + 1, d_new + 2 * d_old + 1) if works(d))
        near = [*([below] if below else []), *islice(above, 1 if below else 2)]
        hint = f"; the nearest that work: {' and '.join(map(str, near))}" if near else ""
        raise UserError(f"{misfit}{hint}") from None
