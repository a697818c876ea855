"""gains: NRIO with one number, the ratio rho of new gains to old ones.

    gamma <- a [gamma; rho 1],     a = sqrt(d_new / (d_old + (d_new - d_old) rho^2)),

so that ||gamma||^2 stays what NRIO's is where the old gains are 1; shifts and weights are NRIO's.
SRIO's rotation does to gains of 1 what rho = (cos t + r sin t) / (cos t - sin t / r) does, with
r = sqrt(d_old / g): this operator asks whether that is all of SRIO. rho = 1 is NRIO, bit for bit.
Ours; never exact.
"""

import math

import torch

from growth.operator import Operator
from growth.operators import nrio
from growth.plan import Plan
from models.axes import Spec


def grow_tensor(plan: Plan, spec: Spec) -> torch.Tensor:
    wide, rho = nrio.grow_tensor(plan, spec), plan.cfg.gain_ratio
    if spec.part == "norm" and spec.axes == ("residual",) and not spec.is_bias:
        g = plan.d_new - plan.d_old
        wide[plan.d_old :] *= rho
        wide *= math.sqrt(plan.d_new / (plan.d_old + g * rho**2))
    return wide


GAINS = Operator("gains", 9, grow_tensor)
