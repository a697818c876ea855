"""Settings that say beside their field what they may be, checked by one function.

    @dataclass(frozen=True)
    class Config:
        norm: Literal["layernorm", "rmsnorm"] = "layernorm"
        n_layer: Annotated[int, Range(1, 1000)] = 14
        lr: Annotated[float, Above(0)] = 1e-3
        noise_db: float | None = None

        def __post_init__(self):
            check(self, "model.")

tyro reads the same types for the command line.
"""

import math
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from errors import UserError


@dataclass(frozen=True)
class Range:
    """low <= value <= high, both included; an open side is infinite."""

    low: float = -math.inf
    high: float = math.inf

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            return f" in {self.low}..{self.high}"
        return f" >= {self.low}" if self.low > -math.inf else ""


@dataclass(frozen=True)
class Above:
    """value > low."""

    low: float

    def holds(self, value: float) -> bool:
        return value > self.low

    def __str__(self) -> str:
        return f" > {self.low}"


def check(cfg: object, prefix: str = "") -> None:
    """Every field of a dataclass against its annotation: a Literal is a choice, an int a whole
    number, a float a finite number, both in their Range; `X | None` may be None; other types are
    not looked at. UserError names prefix + field, the value and what is allowed."""
    for name, (kind, limits, optional) in rules(type(cfg)).items():
        value = getattr(cfg, name)
        if value is None and optional:
            continue
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                shown = ", ".join(str(choice) or repr("") for choice in get_args(kind))
                raise UserError(f"{prefix}{name} is {value!r}; choose one of {shown}")
        elif not (is_number(value, kind) and all(limit.holds(value) for limit in limits)):
            what = "whole number" if kind is int else "finite number"
            where = "".join(map(str, limits))
            raise UserError(f"{prefix}{name} is {value!r}; it must be a {what}{where}")


def is_number(value: object, kind: type) -> bool:
    """A bool is no number, and a float no int."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    try:
        return kind is int or math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


@cache
def rules(config: type) -> dict[str, tuple]:
    """field -> (Literal, int or float; its limits; whether it may be None)."""
    found = {}
    for name, hint in get_type_hints(config, include_extras=True).items():
        limits, optional = [], False
        while get_origin(hint) in (Annotated, Union, UnionType):
            if get_origin(hint) is Annotated:
                hint, *more = get_args(hint)
                limits += [m for m in more if isinstance(m, (Range, Above))]
            else:
                kinds = [kind for kind in get_args(hint) if kind is not NoneType]
                optional = len(kinds) < len(get_args(hint))
                hint = kinds[0] if len(kinds) == 1 else object
        if hint in (int, float) or get_origin(hint) is Literal:
            found[name] = (hint, limits, optional)
    return found
