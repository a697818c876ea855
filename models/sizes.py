"""The widths of a model, and the widths it can grow to: decided here for every family."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

from errors import UserError

MAX_WIDTH = 1_000_000  # far beyond any model


class Misfit(UserError):
    """A width that some part of the model cannot follow."""


@dataclass(frozen=True)
class Apart:
    """What grows apart from the width: a number of heads (0: as the width says), a factor of the
    FFN (0: the width's)."""

    n_head: int = 0
    ffn_factor: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.n_head or self.ffn_factor)


TOGETHER = Apart()  # all follow the width


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
    own_head_dim: bool = False  # the config says it; else heads x head size is the width
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

    def at_width(
        self,
        d_model: int,
        wider_heads: bool = False,
        whole: bool = False,
        apart: Apart = TOGETHER,
    ) -> "Sizes":
        """Every size scaled by d_model / self.d_model, up or down; Misfit says what cannot be.

        wider_heads: the same number of wider heads instead of more heads of one size. whole: only
        whole factors will do. apart: what does not follow the width.
        """
        ratio = Fraction(d_model, self.d_model)
        if whole and ratio.denominator > 1:
            raise Misfit(
                f"width {d_model} is no multiple of {self.d_model}, and every coordinate is "
                f"repeated (method pad takes any width)"
            )

        def scaled(n: int, by: Fraction, what: str) -> int:
            if (n * by).denominator > 1:
                raise Misfit(f"width {d_model} would need {float(n * by):g} {what}")
            return int(n * by)

        n_head, kv_heads, head_dim = self.n_head, self.kv_heads, self.head_dim
        if apart.n_head:
            n_head, kv_heads = self.with_heads(apart.n_head, d_model, whole)
        elif wider_heads:
            head_dim = scaled(head_dim, ratio, "coordinates per head")
        else:
            n_head = scaled(n_head, ratio, f"heads of {head_dim}")
            kv_heads = self.key_heads(n_head)
            if not kv_heads:
                group = self.n_head // self.kv_heads
                raise Misfit(f"width {d_model} would need {n_head / group:g} key heads")
        by = Fraction(str(apart.ffn_factor)) if apart.ffn_factor else ratio
        if whole and by.denominator > 1:
            raise UserError(
                f"--ffn-factor {apart.ffn_factor:g} is no whole number, and every neuron is "
                f"repeated; use method pad"
            )
        return replace(
            self,
            d_model=d_model,
            n_head=n_head,
            kv_heads=kv_heads,
            head_dim=head_dim,
            d_ff=scaled(self.d_ff, by, "FFN neurons"),
            expert_ffn=scaled(self.expert_ffn, by, "FFN neurons of an expert"),
        )

    def key_heads(self, n_head: int) -> int:
        """Key heads beside n_head query heads: the groups stay, or a single key head does; 0 where
        neither can be."""
        group = self.n_head // self.kv_heads
        if n_head % group == 0 and not self.one_kv:
            return n_head // group
        return 1 if self.kv_heads == 1 else 0

    def with_heads(self, n_head: int, d_model: int, whole: bool) -> tuple[int, int]:
        """(query heads, key heads) for n_head heads of the old size, whatever the width."""
        if n_head < self.n_head or (whole and n_head % self.n_head):
            only = f"a multiple of {self.n_head}" if whole else f"at least {self.n_head}"
            raise UserError(f"--heads {n_head}: the number of heads must be {only}")
        if not self.own_head_dim and n_head * self.head_dim != d_model:
            raise UserError(
                f"--heads {n_head}: this model's heads have no size of their own, so {n_head} of "
                f"{self.head_dim} need --width {n_head * self.head_dim}"
            )
        kv_heads = self.key_heads(n_head)
        if not kv_heads and n_head % self.kv_heads:
            raise UserError(
                f"--heads {n_head} do not divide among {self.kv_heads} key heads, nor into groups "
                f"of {self.n_head // self.kv_heads}; choose a multiple of one of them"
            )
        return n_head, kv_heads or self.kv_heads


def fitting(make: Callable, d_old: int, d_new: int, same: bool = False):
    """make(d_new) for a width above d_old, or, with `same`, of d_old; where it raises Misfit, a
    UserError with the nearest widths at which it does not."""
    check_wider(d_old, d_new, same)

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


def check_wider(d_old: int, d_new: int, same: bool = False) -> None:
    if not d_old + (not same) <= d_new <= MAX_WIDTH:
        raise UserError(
            f"new width {d_new} must be larger than the old width {d_old}, and at most {MAX_WIDTH}"
        )
