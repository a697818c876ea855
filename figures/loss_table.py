"""The loss table as a picture: paired difference to the baseline, per variant, with its 95 % CI.

    python -m figures.loss_table results/tiny --out figures/tiny

Dot and bar: mean over seeds and 95 % CI (Student t); small dots: the seeds; hollow dot, no bar: one
seed, so no interval. Left of 0 is better than the baseline. What lies outside is an arrow.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from errors import UserError, exit_on_user_error, read_command_line


@dataclass(frozen=True)
class TableConfig:
    """Paired differences to the baseline, as PNG and SVG."""

    folder: tyro.conf.Positional[Path]  # a results folder, e.g. results/tiny
    out: Path  # folder for the pictures
    baseline: str = ""  # the variant that all others are paired with; default: nrio
    allow_missing: bool = False  # use the seeds common to all variants instead of refusing


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(TableConfig, __doc__))

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from analysis.aggregate import BASELINE, variant_key
from analysis.paired import Estimate, contrast
from analysis.rows import by_stage, load_rows, matched
from figures import style

PANELS = (("validation loss", "metrics.val_loss"), ("training loss", "metrics.train_loss"))


def draw(
    rows: list[dict], out: Path, baseline: str = BASELINE, allow_missing: bool = False
) -> list[Path]:
    """One picture per stage that holds the baseline and others; returns the files written."""
    rows, _ = matched(rows, allow_missing)
    stages = [(s, g) for s, g in by_stage(rows) if {baseline} < {r["variant"] for r in g}]
    style.setup()
    paths = []
    for stage, group in stages:
        name = "loss_table" if len(stages) == 1 else f"loss_table_stage{stage}"
        paths += style.save(_picture(group, baseline), out, name)
    return paths


def _picture(rows: list[dict], baseline: str) -> plt.Figure:
    others = {row["variant"] for row in rows} - {baseline}
    variants = sorted(others, key=variant_key)
    looks = style.looks(variants)
    grown = {row["variant"] for row in rows if row["parent"]}
    height = 1.5 + 0.42 * max(3, len(variants))
    figure, panels = plt.subplots(1, 2, figsize=(12, height), sharey=True)
    for axes, (title, metric) in zip(panels, PANELS, strict=True):
        found = {v: contrast(rows, {v: 1, baseline: -1}, metric) for v in variants}
        shown = [e for v, e in found.items() if v in grown] or list(found.values())
        far = style.far([abs(e.mean) for e in shown])
        limit = _limit([e for e in shown if abs(e.mean) <= far])
        for y, variant in enumerate(variants):
            _draw_estimate(axes, y, found[variant], looks[variant], limit)
        axes.axvline(0, color="black", linewidth=1)
        axes.set_xlim(-limit, limit)
        axes.set_title(f"{title} − {baseline}'s", loc="left")
        axes.set_xlabel("paired difference (nats/token), ← better")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0, pad=10)
    seeds = [contrast(rows, {v: 1, baseline: -1}, PANELS[0][1]).n for v in variants]
    names = [f"{v}  n={n}" for v, n in zip(variants, seeds, strict=True)]
    panels[0].set_yticks(range(len(variants)), names)
    panels[0].set_ylim(len(variants) - 0.4, -0.6)  # first variant on top
    figure.tight_layout()
    figure.subplots_adjust(right=0.86, wspace=0.48)
    return figure


def _limit(estimates: list[Estimate]) -> float:
    """Half-width of the axis: every grown seed, and intervals as far as they stay comparable."""
    seeds = [abs(value) for e in estimates for value in e.by_seed.values()] or [0.01]
    ends = [abs(end) for e in estimates for end in (e.low, e.high) if end == end]
    return 1.12 * (max([*seeds, *(min(end, 3 * max(seeds)) for end in ends)]) or 0.01)


def _draw_estimate(axes: Axes, y: int, found: Estimate, look: dict, limit: float) -> None:
    text = f"{found.mean:+.4f} ± " + (f"{found.half:.4f}" if found.n > 1 else "—")
    if not found.n:
        text = "no finished pair"
    place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": style.FONT - 2}
    axes.text(1.03, y, text.replace("-", "−"), **place)
    if not found.n:
        return
    inside = [value for value in found.by_seed.values() if abs(value) <= limit]
    axes.plot(inside, [y + 0.24] * len(inside), ".", color=look["color"], alpha=0.5, markersize=6)
    if found.n > 1:
        ends = (max(found.low, -limit), min(found.high, limit))
        axes.plot(ends, (y, y), color=look["color"], linewidth=2.2)
        for end, symbol, cut in zip(ends, "<>", (found.low, found.high), strict=True):
            if cut != end and abs(found.mean) <= limit:
                _edge(axes, end, y, symbol, look)
    if abs(found.mean) > limit:
        _edge(axes, limit if found.mean > 0 else -limit, y, ">" if found.mean > 0 else "<", look)
        return
    face = look["color"] if found.n > 1 else "white"
    axes.plot(
        found.mean, y, look["marker"], color=look["color"], markerfacecolor=face, markersize=8
    )


def _edge(axes: Axes, x: float, y: int, symbol: str, look: dict) -> None:
    axes.plot(x, y, symbol, color=look["color"], markersize=9, clip_on=False)


def main() -> None:
    cfg = read_command_line(TableConfig, __doc__)
    baseline = cfg.baseline or BASELINE
    paths = draw(load_rows(cfg.folder), cfg.out, baseline, cfg.allow_missing)
    if not paths:
        raise UserError(f"no stage of {cfg.folder} has {baseline!r} and another variant")
    print(*paths, sep="\n")


if __name__ == "__main__":
    exit_on_user_error(main)
