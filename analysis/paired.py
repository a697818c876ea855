"""Statistics of paired runs: means and differences over seeds, with 95 % confidence intervals.

Two runs of one seed share their parent and their batches, so most of the noise between seeds
cancels in their difference. The interval is Student's t over seeds (n - 1 degrees of freedom);
with one seed there is no interval, and it is NaN here and "—" in print, never 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.rows import flatten, number

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `half` is half the width of its 95 % CI, `p` the two-sided test of 0."""

    n: int
    mean: float
    half: float
    p: float
    by_seed: dict[int, float]

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(by_seed: Mapping[int, float]) -> Estimate:
    """Mean, CI half-width and p-value of the values of several seeds; NaN where undefined."""
    values = np.array(list(by_seed.values()), dtype=float)
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    if n < 2 or np.ptp(values) == 0:  # no spread: no test
        return Estimate(n, mean, math.nan if n < 2 else 0.0, math.nan, dict(by_seed))
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(CONFIDENCE)
    return Estimate(n, mean, float(high - low) / 2, float(test.pvalue), dict(by_seed))


def measure(row: dict, metric: str) -> float:
    """The number at a dotted path, or, for "lag.N", the validation loss N steps after growth: on
    the curve, linear between evaluations, NaN beyond its end."""
    if not metric.startswith("lag."):
        return number(row, metric)
    settings = dict(flatten(row["config"]))
    tokens = int(metric[4:])
    for name in ("batch_size", "block_size"):
        tokens *= next((v for k, v in settings.items() if k.split(".")[-1] == name), math.nan)
    xs, ys = row["curve"]["val_tokens"], row["curve"]["val"]
    return float(np.interp(tokens, xs, ys, right=math.nan)) if tokens == tokens else math.nan


def values_by_seed(rows: list[dict], variant: str, metric: str) -> dict[int, float]:
    """{seed: value} of a variant's finished rows; `metric` as measure() takes it."""
    pairs = (
        (row["seed"], measure(row, metric))
        for row in rows
        if row["variant"] == variant and row["status"] == "done"
    )
    return {seed: value for seed, value in sorted(pairs) if math.isfinite(value)}


def contrast(rows: list[dict], weights: Mapping[str, float], metric: str) -> Estimate:
    """sum_v weights[v] * metric of variant v, taken seed by seed, then averaged over seeds.

    {"srio": 1, "nrio": -1} is the paired difference srio - nrio; four terms compare two
    differences. Only seeds that every named variant finished count. Rows are of one stage.
    """
    values = {variant: values_by_seed(rows, variant, metric) for variant in weights}
    seeds = sorted(set.intersection(*(set(v) for v in values.values())))
    return estimate({s: sum(w * values[v][s] for v, w in weights.items()) for s in seeds})


def p_above(found: Estimate, bound: float, side: str = "greater") -> float:
    """One-sided p-value of "the mean is above bound" (Student t); NaN where undefined."""
    if found.n < 2 or not math.isfinite(bound):
        return math.nan
    if not found.half > 0:
        return float((found.mean <= bound) if side == "greater" else (found.mean >= bound))
    return float(stats.ttest_1samp(list(found.by_seed.values()), bound, alternative=side).pvalue)


def p_below(found: Estimate, bound: float) -> float:
    """One-sided p-value of "the mean is below bound"."""
    return p_above(found, bound, "less")


def holm(ps: list[float]) -> list[float]:
    """Holm's step-down correction (1979) of the p-values that are numbers; NaN stays NaN.

    The i-th smallest of m is multiplied by m - i + 1, never below the one before it, at most 1.
    """
    order = sorted((p, i) for i, p in enumerate(ps) if not math.isnan(p))
    corrected, floor = [math.nan] * len(ps), 0.0
    for rank, (p, i) in enumerate(order):
        floor = max(floor, min(1.0, (len(order) - rank) * p))
        corrected[i] = floor
    return corrected
