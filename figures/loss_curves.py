"""Validation loss from growth on, one line per variant, one picture per stage.

    python -m figures.loss_curves results/tiny --out figures/tiny

Left: the whole stage. Right: its last part, scaled to the grown variants, which end close to each
other. Thick: mean over the seeds that finished; faint: each seed; a cross ends a diverged run.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import tyro

from errors import exit_on_user_error, read_command_line


@dataclass(frozen=True)
class CurvesConfig:
    """Loss curves from growth on, as PNG and SVG."""

    folder: tyro.conf.Positional[Path]  # a results folder, e.g. results/tiny
    out: Path  # folder for the pictures
    allow_missing: bool = False  # use the seeds common to all variants instead of refusing


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(CurvesConfig, __doc__))

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from analysis.aggregate import variant_key
from analysis.rows import by_stage, load_rows, matched
from figures import style

ZOOM = 0.6  # the right panel starts at this share of the stage's tokens
MANY = 10  # above this many variants the single seeds are left out
LEADERS = 20  # above this many the lines to the labels would merge into one bar


@dataclass(frozen=True)
class Curve:
    """Mean validation loss (nats/token) of a variant at `tokens` (millions), and its seeds'."""

    variant: str
    tokens: np.ndarray
    mean: np.ndarray
    seeds: list[tuple[np.ndarray, np.ndarray]]
    broken: list[tuple[np.ndarray, np.ndarray]]  # runs that did not finish, as far as they went
    lost: int  # how many did not finish
    grown: bool

    @property
    def final(self) -> float:
        """Mean final loss; infinite when no seed finished."""
        return float(self.mean[-1]) if len(self.mean) else np.inf


def draw(rows: list[dict], out: Path, allow_missing: bool = False) -> list[Path]:
    """One picture per stage with grown models, or per stage if none has; returns the files."""
    rows, _ = matched(rows, allow_missing)
    stages = [(s, g) for s, g in by_stage(rows) if any(row["parent"] for row in g)]
    stages = stages or by_stage(rows)
    style.setup()
    paths = []
    for stage, group in stages:
        name = "loss_curves" if len(stages) == 1 else f"loss_curves_stage{stage}"
        paths += style.save(_picture(group), out, name)
    return paths


def curves(rows: list[dict]) -> list[Curve]:
    """The curves of one stage's rows, in table order."""
    variants = sorted({row["variant"] for row in rows}, key=variant_key)
    return [_curve(v, [row for row in rows if row["variant"] == v]) for v in variants]


def _curve(variant: str, rows: list[dict]) -> Curve:
    seeds = [_xy(row) for row in rows if row["status"] == "done"]
    broken = [_xy(row) for row in rows if row["status"] != "done"]
    tokens = seeds[0][0] if seeds else np.array([])
    # one variant has one evaluation cadence; interpolation only guards against an odd last point
    mean = np.mean([np.interp(tokens, x, y) for x, y in seeds], axis=0) if seeds else tokens
    grown = any(row["parent"] for row in rows)
    drawn = [xy for xy in broken if len(xy[0])]
    return Curve(variant, tokens, mean, seeds, drawn, len(broken), grown)


def _xy(row: dict) -> tuple[np.ndarray, np.ndarray]:
    curve = row.get("curve") or {}
    x = np.array(curve.get("val_tokens") or [], dtype=float) / 1e6
    y = np.array(curve.get("val") or [], dtype=float)
    x, y = x[: len(y)], y[: len(x)]
    return x[np.isfinite(y)], y[np.isfinite(y)]


def _picture(rows: list[dict]) -> plt.Figure:
    all_curves = curves(rows)
    looks = style.looks([curve.variant for curve in all_curves])
    height = max(5.4, 0.29 * len(all_curves) + 1)  # a line of its own for every label
    figure, (whole, zoom) = plt.subplots(1, 2, figsize=(12, height), width_ratios=(1, 1.15))
    for axes in (whole, zoom):
        for curve in all_curves:
            _plot(axes, curve, looks[curve.variant], len(all_curves) <= MANY)
        axes.set_xlabel("tokens of this stage (millions)")
    _scale_whole(whole, all_curves)
    if any((row["parent"] or {}).get("source") for row in rows):  # what matters comes first
        first = min((c.tokens[1] for c in all_curves if len(c.tokens) > 1), default=1.0)
        whole.set_xscale("symlog", linthresh=first)
        whole.set_xlim(left=0)
    _mark_broken(whole, all_curves, looks)
    _parent_line(whole, rows)
    whole.set_ylabel("validation loss (nats/token)")
    n = max(len(curve.seeds) for curve in all_curves)
    whole.set_title(f"whole stage, mean of {n} seed{'s' * (n != 1)}", loc="left")
    _scale_zoom(zoom, all_curves)
    grown = any(curve.grown for curve in all_curves)
    zoom.set_title("last part" + ", grown variants" * grown, loc="left")
    figure.tight_layout()
    figure.subplots_adjust(right=0.78, wspace=0.2)
    _label_ends(zoom, all_curves, looks)
    return figure


def _plot(axes: Axes, curve: Curve, look: dict, show_seeds: bool) -> None:
    for x, y in curve.seeds if show_seeds and len(curve.seeds) > 1 else []:
        axes.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.3)
    for x, y in curve.broken:
        axes.plot(x, y, color=look["color"], linewidth=0.9, alpha=0.6)
    axes.plot(curve.tokens, curve.mean, color=look["color"], linestyle=look["linestyle"])


def _parent_line(axes: Axes, rows: list[dict]) -> None:
    losses = {row["seed"]: row["parent"].get("val_loss") for row in rows if row["parent"]}
    losses = [loss for loss in losses.values() if loss is not None]
    if losses:
        low, high = axes.get_ylim()  # a note outside them would leave half the picture blank
        margin = 0.06 * (high - low)
        axes.set_ylim(min(low, np.mean(losses) - margin), max(high, np.mean(losses) + margin))
        axes.axhline(np.mean(losses), color="black", linestyle="--", linewidth=1.2)
        axes.annotate(
            "parent's final loss",
            (1, np.mean(losses)),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
        )


def _scale_whole(axes: Axes, all_curves: list[Curve]) -> None:
    """Losses up to the worst spike after growth: runs from scratch may enter from above."""
    grown = [curve for curve in all_curves if curve.grown and curve.seeds]
    finished = [y for curve in grown or all_curves for _, y in curve.seeds]
    ends = [curve.mean[-1:] for curve in all_curves if len(curve.mean)]
    if not ends:
        return
    top, bottom = max(map(np.max, finished + ends)), min(map(np.min, ends))
    axes.set_ylim(bottom - 0.08 * (top - bottom), top + 0.08 * (top - bottom))


def _mark_broken(axes: Axes, all_curves: list[Curve], looks: dict[str, dict]) -> None:
    """A cross where a run broke off, at the top edge when its loss is above it."""
    top = axes.get_ylim()[1]
    for curve in all_curves:
        for x, y in curve.broken:
            color = looks[curve.variant]["color"]
            axes.plot(x[-1], min(y[-1], top), "x", color=color, markersize=9, clip_on=False)


def _scale_zoom(axes: Axes, all_curves: list[Curve]) -> None:
    """Last part of the stage; the loss range of the grown means within it, without those with a
    longer stage of their own and those so far behind that the others would be one line."""
    grown = [curve for curve in all_curves if curve.grown and len(curve.tokens)]
    shown = grown or [curve for curve in all_curves if len(curve.tokens)]
    if not shown:
        return
    end = median_low(curve.tokens[-1] for curve in shown)
    shown = [curve for curve in shown if curve.tokens[-1] <= 1.01 * end]
    best = min(curve.final for curve in shown)
    limit = style.far([curve.final - best for curve in shown])
    shown = [curve for curve in shown if curve.final - best <= limit]
    end = max(curve.tokens[-1] for curve in shown)
    inside = np.concatenate([curve.mean[curve.tokens >= ZOOM * end] for curve in shown])
    margin = 0.06 * (np.ptp(inside) or 0.01)
    axes.set_xlim(ZOOM * end, end)
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(inside.min() - margin, inside.max() + margin)


def _label_ends(axes: Axes, all_curves: list[Curve], looks: dict[str, dict]) -> None:
    """Name and final loss of each variant beside its end, moved apart; arrows for those outside."""
    ordered = sorted(all_curves, key=lambda curve: curve.final)
    low, high = axes.get_ylim()
    ends = [(curve.final - low) / (high - low) for curve in ordered]  # in axes heights
    gap = 0.056 * 5.4 / axes.figure.get_figheight()
    places = style.spread_labels([min(max(e, 0), 1) for e in ends], gap, 0.0, 1.0)
    for curve, end, place in zip(ordered, ends, places, strict=True):
        color, dashes = (looks[curve.variant][name] for name in ("color", "linestyle"))
        line = {"transform": axes.transAxes, "clip_on": False, "color": color}
        beyond = len(curve.tokens) > 0 and curve.tokens[-1] > 1.001 * axes.get_xlim()[1]
        if 0 <= end <= 1 and not beyond and len(ordered) <= LEADERS:
            axes.plot((1, 1.03), (end, place), linewidth=0.8, **line)
        axes.plot((1.035, 1.11), (place, place), linestyle=dashes, **line)
        axes.text(1.12, place, _label(curve, end, beyond), transform=axes.transAxes, va="center")


def _label(curve: Curve, end: float, beyond: bool) -> str:
    """Arrows say where the end lies when the panel does not show it."""
    if not curve.seeds:
        return f"{curve.variant} (all lost)"
    arrow = " ↑" if end > 1 else " ↓" if end < 0 else " →" if beyond else ""
    lost = f" ({curve.lost} lost)" if curve.lost else ""
    return f"{curve.variant} {curve.final:.3f}{arrow}{lost}"


def main() -> None:
    cfg = read_command_line(CurvesConfig, __doc__)
    for path in draw(load_rows(cfg.folder), cfg.out, cfg.allow_missing):
        print(path)


if __name__ == "__main__":
    exit_on_user_error(main)
