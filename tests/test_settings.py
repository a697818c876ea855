"""Settings checked against their own annotations."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from errors import UserError
from settings import Above, Range, check


@dataclass(frozen=True)
class Config:
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    n_layer: Annotated[int, Range(1, 1000)] = 14
    seed: Annotated[int, Range(0)] = 0
    lr: Annotated[float, Above(0)] = 1e-3
    share: Annotated[float, Range(0.0, 1.0)] = 1
    noise_db: float | None = None
    clip: Annotated[float | None, Range(0.0)] = None
    name: str = ""

    def __post_init__(self):
        check(self, "model.")


def test_what_is_allowed_passes():
    Config()
    Config("rmsnorm", 1000, 10**18, 5, 0, -3.5, 0.0)


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("norm", "batchnorm", "model.norm is 'batchnorm'; choose one of layernorm, rmsnorm"),
        ("norm", ["rmsnorm"], "choose one of"),
        ("n_layer", 0, "model.n_layer is 0; it must be a whole number in 1..1000"),
        ("n_layer", 1001, "1..1000"),
        ("n_layer", 2.0, "whole number"),
        ("n_layer", True, "whole number"),
        ("n_layer", "3", "'3'; it must be a whole number"),
        ("n_layer", None, "whole number"),
        ("seed", -1, "whole number >= 0"),
        ("lr", 0.0, "model.lr is 0.0; it must be a finite number > 0"),
        ("lr", math.nan, "finite number"),
        ("lr", 10**400, "finite number"),
        ("lr", math.inf, "finite number"),
        ("share", 1.5, "in 0.0..1.0"),
        ("noise_db", math.nan, "model.noise_db is nan; it must be a finite number"),
        ("clip", -1.0, ">= 0.0"),
    ],
)
def test_what_is_not_is_named_with_its_range(field, value, says):
    with pytest.raises(UserError) as caught:
        Config(**{field: value})
    assert says in str(caught.value)
