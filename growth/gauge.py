"""The freedom of exact growth: how large the wide residual stream is, and what that asks of the
config.

Every exact operator may scale the whole stream by a constant s, because a norm undoes it. With
n = d_new / d_old the wide norm's variance is s^2 v (repeat) or s^2 v / n (pad), so the same
function needs epsilon' = epsilon * s^2 (or / n). Two choices of s matter:

    norm   ||x'|| = ||x||: s = 1/sqrt(k) for the k-fold repeat, 1 for padding; epsilon' = epsilon/n
    eps    epsilon' = epsilon: s = 1 for the repeat, sqrt(n) for padding; for models whose config
           cannot change epsilon (OPT), or where one layer's scale is fixed (BERT's MLM head: GELU
           leaves its norm an input of scale 1)

`auto` takes `norm` wherever that is exact and `eps` elsewhere.
"""

import math

from growth.plan import Plan
from models.axes import Spec

HOMOGENEOUS = ("relu", "leaky_relu")  # f(s x) = s f(x) for s > 0


def gauge(plan: Plan) -> str:
    """The gauge in force: "norm" or "eps"."""
    if plan.cfg.gauge != "auto":
        return plan.cfg.gauge
    hidden = plan.arch.head_activation
    return "eps" if not plan.arch.eps_in_config or (hidden and not homogeneous(hidden)) else "norm"


def homogeneous(activation: str) -> bool:
    return activation in HOMOGENEOUS


def head_growth(plan: Plan) -> float:
    """hd_new / hd_old."""
    return plan.head_dim[1] / plan.head_dim[0]


def score_scale(plan: Plan, copies: float = 1.0) -> float:
    """s for q and for k, so that scores stay: copies * s^2 / sqrt(hd_new) = 1 / sqrt(hd_old), where
    each old coordinate of a head stands `copies` times; unscaled attention (T5) has no square root.

    The k-fold repeat of wider heads gives s = k^(-1/4): the note's q weight k^(1/4)/k and bias
    k^(1/4)/sqrt(k) once the stream's 1/sqrt(k) is read.
    """
    root = math.sqrt(head_growth(plan)) if plan.arch.scaled_attention else 1.0
    return math.sqrt(root / copies)


def normed_share(plan: Plan, spec: Spec) -> float:
    """Old over new size of what q_norm, or k_norm, norms together: a head or all heads."""
    space = spec.axes[spec.out_dim] if plan.arch.qk_norm == "heads" else "head_dim"
    old, new = plan.sizes[space]
    return old / new


def width_root(plan: Plan) -> float:
    """sqrt(d_new / d_old) where the head divides logits by sqrt(d) (tied T5), else 1."""
    return math.sqrt(plan.d_new / plan.d_old) if plan.arch.scaled_head else 1.0
