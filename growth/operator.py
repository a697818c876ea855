"""What the rest of the project knows of an operator: one record, at the end of its module.

An operator is one file in growth/operators/. A static one has grow_tensor(plan, spec), the wide
tensor of one named parameter; it sees a single parameter at a time (plan.weights for the norm it
follows), so a model larger than memory can be streamed through it. A learned one has the four
functions of Learned, whose parameters growth/learn.py trains. growth/operators/__init__.py
collects the records; nothing else lists names.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from growth.plan import GrowConfig, Plan
from models.axes import Spec

BY_DESIGN = "not function-preserving by design"


@dataclass(frozen=True)
class ConfigChange:
    """What the wide model's config must say for the result to be exact."""

    eps: float = 1.0  # the norms' epsilon is multiplied by this
    rope_repeat: int = 1  # every RoPE frequency stands this often in a row
    theta_power: float = 1.0  # rope_theta becomes rope_theta ** theta_power


@dataclass(frozen=True)
class Learned:
    """A learned operator in four functions.

    start(plan): its parameters before step 0; maps(plan, params): the matrices they stand for;
    base(plan, spec): what of a tensor depends on no parameter, computed once; fold(plan, spec,
    base, maps): the wide tensor, differentiable in the maps.
    """

    start: Callable[[Plan], dict[str, torch.Tensor]]
    maps: Callable[[Plan, dict], dict[str, torch.Tensor]]
    base: Callable[[Plan, Spec], torch.Tensor]
    fold: Callable[[Plan, Spec, torch.Tensor, dict], torch.Tensor]


# (operator, plan, spec, a moment in the old shape, its kind) -> the moment in the new shape
Moments = Callable[["Operator", Plan, Spec, torch.Tensor, str], torch.Tensor]


@dataclass(frozen=True)
class Operator:
    """One way to grow."""

    name: str
    place: int  # where it stands in lists
    grow_tensor: Callable[[Plan, Spec], torch.Tensor] | None = None  # a static operator
    learned: Learned | None = None  # or a learned one
    # what it promises: the reasons why the result of a plan is not exact; none promises exactness
    inexact: Callable[[Plan], list[str]] = lambda plan: [BY_DESIGN]
    # what is exact and yet to be known of the result of a plan
    remarks: Callable[[Plan], list[str]] = lambda plan: []
    # how Adam's moments follow (growth/moments.py); None: they are not defined and must be reset
    moments: Callable[[GrowConfig], Moments | None] = lambda cfg: None
    config_change: Callable[[Plan], ConfigChange] = lambda plan: ConfigChange()
    # UserError for what it cannot do; Misfit (models/sizes.py) where another width would do
    check: Callable[[Plan], None] = lambda plan: None
    preserves: bool = False  # meant to keep the function
    whole: bool = False  # only whole factors
    each_space: bool = False  # spaces may grow apart, or not at all (models/sizes.py, Apart)
    wider_heads: bool = False  # has a form for wider heads, not only for more of them
    old_first: bool = True  # old coordinates stay in front, so that an old block exists
    # of the new residual coordinates, those that stand for the old ones, up to one factor
    old_places: Callable[[Plan], torch.Tensor] = lambda plan: torch.arange(plan.d_old)
    color: str = "#8C6D31"  # in pictures (Okabe and Ito, 2008), shared by a family of operators
