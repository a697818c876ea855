"""The pictures of the evidence, each from committed rows: figures/NAME.png and .svg.

    python -m figures.evidence scale    # effect against size, with trend and the paper's number
    python -m figures.evidence          # all of them

Names: scale, forest, epsilon, gains, policies, gradients, staircase, symmetry, rotation. One that
has no rows yet says so and is not drawn. Bars are 95 % CIs, paired by seed; left or down is better.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from errors import exit_on_user_error, read_command_line


@dataclass(frozen=True)
class EvidenceConfig:
    """The pictures of the evidence."""

    name: tyro.conf.Positional[
        Literal[
            "all", "scale", "forest", "epsilon", "gains", "policies", "gradients", "staircase",
            "symmetry", "rotation",
        ]
    ] = "all"  # fmt: skip
    results: Path = Path("results")
    out: Path = Path("figures")


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(EvidenceConfig, __doc__))

import matplotlib.pyplot as plt
import numpy as np

import files
from analysis.aggregate import variant_key
from analysis.claims import MIN_SEEDS, decisions, p_text
from analysis.overview import Study, asked_of, studies, trend
from analysis.paired import Estimate
from figures import style
from growth.rotation import theta
from models.gpt import GPTConfig, count_parameters

# drawn against size, minus nrio, in its color
SIZES = {"nrio-policies": "#0072B2", "full": "#E69F00", "full-asymmetric": "#009E73",
         "pad-gain-asymmetric": "#56B4E9"}  # fmt: skip
PAPER = (count_parameters(GPTConfig().widened(384)), -0.0416)  # parameters, full - nrio
OLD, NEW = "#0072B2", "#D55E00"  # coordinates before and after growth


def bars(axes, x: float, found: Estimate, color: str, marker: str = "o", label: str = "") -> None:
    """Mean and 95 % CI, upright; hollow where one seed has no interval."""
    face = color if found.n > 1 else "white"
    half = found.half if found.n > 1 else 0.0
    axes.errorbar(x, found.mean, half, fmt=marker, color=color, markerfacecolor=face, capsize=3,
                  markersize=7, label=label or None)  # fmt: skip


# ---- effect against size


SCALES = ("ladder-", "tiny", "mini")  # presets that grow by 1.5 and restart as the paper does


def scales(found: list[Study]) -> list[Study]:
    """One study per size with five seeds of full and nrio, smallest first: of several, the one with
    most of what is drawn."""
    usual = [
        s for s in found
        if s.first and s.preset.startswith(SCALES) and "stable" not in s.preset
        and s.factor == 1.5
        and s.effect({"full": 1, "nrio": -1}).n >= MIN_SEEDS
    ]  # fmt: skip
    best: dict[tuple, Study] = {}
    for s in usual:
        key = s.grown["params"], round(s.per_parameter, 1)
        drawn = [
            len({r["variant"] for r in each.rows} & {*SIZES}) for each in (s, best.get(key, s))
        ]
        if drawn[0] >= drawn[1]:
            best[key] = s
    return [best[key] for key in sorted(best)]


def scale(found: list[Study]) -> plt.Figure | None:
    """variant - nrio in training loss against the child's parameters; a trend where three sizes of
    the ladder are there; the paper's number where it lies."""
    shown = scales(found)
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=(9.2, 5.6), layout="constrained")
    looks = style.looks(list(SIZES))
    lowest = min(s.grown["params"] for s in shown)
    for i, (variant, color) in enumerate(SIZES.items()):
        points = [(s, s.effect({variant: 1, "nrio": -1})) for s in shown]
        points = [(s, e) for s, e in points if e.n]
        for j, (s, effect) in enumerate(points):
            x = s.grown["params"] * (1 + 0.05 * (i - 1.5))
            bars(axes, x, effect, color, looks[variant]["marker"], "" if j else variant)
        ladder = [(s.grown["params"], e) for s, e in points if s.preset.startswith("ladder-")]
        if len(ladder) >= 3:
            draw_trend(axes, ladder, color, lowest)
    axes.axhline(0, color="black", linewidth=1)
    axes.plot(*PAPER, "*", color=SIZES["full"], markersize=15)
    axes.annotate("paper: full − nrio, 24M → 44M\n20 tokens/parameter", PAPER, ha="right",
                  xytext=(-12, 0), textcoords="offset points", va="center")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(lowest / 1.5, PAPER[0] * 1.5)
    for s in shown:
        axes.annotate(f"{s.preset}\n{s.per_parameter:.2g}", (s.grown["params"], 1.01), ha="center",
                      xycoords=("data", "axes fraction"), fontsize=style.FONT - 2)  # fmt: skip
    axes.set_xlabel("parameters after growth")
    axes.set_ylabel("paired difference to nrio\n(training loss, nats/token), ↓ better")
    axes.set_title("What each variant gains over doing nothing (preset, tokens per parameter)",
                   loc="left", pad=36)  # fmt: skip
    axes.legend(loc="center right", frameon=False)
    return figure


def draw_trend(axes, points: list, color: str, lowest: float) -> None:
    """The fitted line over log10 parameters with the slope's CI as a band about the centre."""
    logs = [(math.log10(x), e) for x, e in points]
    slope, half, _ = trend(logs)
    ys = [(x, y) for x, e in logs for y in e.by_seed.values()]
    cx, cy = (sum(v) / len(ys) for v in zip(*ys, strict=True))
    grid = np.linspace(math.log10(lowest), math.log10(PAPER[0]), 60)
    axes.plot(10**grid, cy + slope * (grid - cx), color=color, linewidth=1.2)
    ends = [cy + (slope + k * half) * (grid - cx) for k in (-1, 1)]
    axes.fill_between(10**grid, *ends, color=color, alpha=0.10, linewidth=0)


# ---- contrasts as a forest


def forest(found: list[Study]) -> plt.Figure | None:
    """Every deciding contrast of every claim at every scale with five seeds; not a pretrained
    parent's, whose differences are a thousand times larger."""
    lines = []
    for study in found:
        if study.preset.startswith("pretrained"):
            continue
        made = [d for asked in asked_of(study) for d in decisions(study.rows, study.first, asked)]
        lines += [
            (d, study)
            for d in made
            if d.verdict and d.found.n >= d.claim.least and not d.part.metric
        ]
    if not lines:
        return None
    lines.sort(key=lambda pair: ("CLR".index(pair[0].claim.name[0]), int(pair[0].claim.name[1:])))
    height = 1.6 + 0.36 * len(lines)
    figure, axes = plt.subplots(figsize=(11, height), layout="constrained")
    colors = {"reproduced": "#009E73", "not reproduced": "#D55E00"}
    for y, (d, _) in enumerate(lines):
        color = colors.get(d.verdict, "#777777")
        axes.errorbar(d.found.mean, y, xerr=d.found.half, fmt="o", color=color, capsize=3)
        text = f"{d.found.mean:+.4f}  p {p_text(d.holm)}".replace("-", "−")
        axes.annotate(text, (1.01, y), va="center",
                      xycoords=("axes fraction", "data"), fontsize=style.FONT - 2)  # fmt: skip
    labels = [f"{d.claim.name}  {d.part} ({s.folder})" for d, s in lines]
    axes.set_yticks(range(len(lines)), [text.replace(" - ", " − ") for text in labels])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.axvline(0, color="black", linewidth=1)
    axes.grid(False, axis="y")
    axes.set_xlabel("difference (nats/token), ← the first is better; Holm p at the right")
    for word, color in (*colors.items(), ("inconclusive", "#777777")):
        axes.plot([], [], "o", color=color, label=word)
    axes.legend(loc="lower left", frameon=False, bbox_to_anchor=(0, 1), ncols=3)
    return figure


# ---- sweeps of one number


def sweep(found: list[Study], key: str, operator: str, label: str, sets: dict) -> plt.Figure | None:
    """variant - nrio against a growth setting, one line per policy pair; sets: value -> note."""
    best: dict[tuple, dict[float, Estimate]] = defaultdict(dict)
    for study in found:
        for variant in sorted({row["variant"] for row in study.rows}):
            row = next(r for r in study.rows if r["variant"] == variant)
            grow = row["config"].get("grow") or {}
            if grow.get("operator") != operator or not plain(grow, row):
                continue
            effect, name = to_nrio(study, variant), pair(grow)
            old = best[name, study.preset].get(grow.get(key, 1.0))
            if effect.n and (old is None or effect.n > old.n):
                best[name, study.preset][grow.get(key, 1.0)] = effect
    best = {k: v for k, v in best.items() if len(v) >= 3}
    if not best:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for i, ((name, preset), values) in enumerate(sorted(best.items())):
        color = ("#E69F00", "#009E73", "#0072B2", "#CC79A7")[i % 4]
        xs = sorted(values)
        axes.plot(xs, [values[x].mean for x in xs], color=color, linewidth=1)
        for j, x in enumerate(xs):
            seeds = sorted({v.n for v in values.values()})
            n = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else seeds[0]
            text = "" if j else f"{name} blocks, {preset}, n = {n}"
            bars(axes, x, values[x], color, label=text)
    for value, note in sets.items():
        axes.axvline(value, color="#999999", linewidth=1, linestyle=":")
        axes.annotate(note, (value, 1), xycoords=("data", "axes fraction"), ha="center",
                      va="bottom", fontsize=style.FONT - 2)  # fmt: skip
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xlabel(label)
    axes.set_ylabel("paired difference to nrio\n(validation loss, nats/token), ↓ better")
    axes.legend(loc="upper center", frameon=False, title="hollow: one seed, no interval")
    return figure


def to_nrio(study: Study, variant: str) -> Estimate:
    """variant - nrio in validation loss; 0 for nrio itself."""
    weights = {"nrio": 0} if variant == "nrio" else {variant: 1, "nrio": -1}
    return study.effect(weights, "metrics.val_loss")


def plain(grow: dict, row: dict) -> bool:
    """Nothing but the swept number, the blocks and the gate differ from the operator's defaults."""
    usual = {"norm": "rotate", "rotate_weights": True, "embed": "random", "cross": "random"}
    return row["config"].get("optimizer") == "reset" and "lr=" not in row["variant"] and all(
        grow.get(k, v) == v for k, v in usual.items()
    ) and not (row["config"].get("train") or {}).get("gate_steps")  # fmt: skip


def pair(grow: dict) -> str:
    return grow["attn"] if grow["attn"] == grow["ffn"] else f"{grow['attn']} + {grow['ffn']}"


def epsilon(found: list[Study]) -> plt.Figure | None:
    notes = {0.0: "ε = 0\nmean of the old", 1.0: "ε = 1\nno turn"}
    return sweep(found, "epsilon", "srio", "ε, gain of the new input block", notes)


def gains(found: list[Study]) -> plt.Figure | None:
    angle, r = theta(0.5, 64, 96), math.sqrt(2)
    ratio = (math.cos(angle) + math.sin(angle) * r) / (math.cos(angle) - math.sin(angle) / r)
    notes = {1.0: "nrio", ratio: "SRIO's at ε = 0.5"}
    return sweep(found, "gain_ratio", "gains", "new gains : old gains", notes)


# ---- policies


POLICIES = ("zero", "random", "convex", "tiled")


def policies(found: list[Study]) -> plt.Figure | None:
    """attention policy x FFN policy without any operator, minus random x random."""
    by_preset: dict[str, dict[tuple[str, str], Estimate]] = defaultdict(dict)
    for study in found:
        cells = by_preset[study.preset]  # one picture holds one scale
        for variant in sorted({row["variant"] for row in study.rows}):
            row = next(r for r in study.rows if r["variant"] == variant)
            grow = row["config"].get("grow") or {}
            if grow.get("operator") != "nrio" or not plain(grow, row) or variant == "nrio-paid":
                continue
            effect = to_nrio(study, variant)
            key = grow["attn"], grow["ffn"]
            if effect.n and (key not in cells or effect.n > cells[key].n):
                cells[key] = effect
    source, cells = max(by_preset.items(), key=lambda item: len(item[1]), default=("", {}))
    if len(cells) < 4:
        return None
    grid = np.full((4, 4), np.nan)
    for (attn, ffn), effect in cells.items():
        grid[POLICIES.index(attn), POLICIES.index(ffn)] = effect.mean
    limit = np.nanmax(np.abs(grid)) or 0.01
    figure, axes = plt.subplots(figsize=(6.6, 5.4), layout="constrained")
    image = axes.imshow(grid, cmap="RdBu_r", vmin=-limit, vmax=limit)
    for (attn, ffn), effect in cells.items():
        half = f"\n± {effect.half:.4f}" if effect.n > 1 else ""
        text = f"{effect.mean:+.4f}{half}\nn = {effect.n}".replace("-", "−")
        dark = abs(effect.mean) > 0.6 * limit
        axes.text(POLICIES.index(ffn), POLICIES.index(attn), text, ha="center", va="center",
                  fontsize=style.FONT - 2, color="white" if dark else "black")  # fmt: skip
    for missing in np.argwhere(np.isnan(grid)):
        axes.text(missing[1], missing[0], "not run", ha="center", va="center", color="#999999")
    axes.set_xticks(range(4), POLICIES)
    axes.set_yticks(range(4), POLICIES)
    axes.set_xlabel("FFN blocks")
    axes.set_ylabel("attention blocks")
    axes.grid(False)
    axes.set_title(f"validation loss − nrio's, no operator ({source})", loc="left")
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


# ---- gradients by layer


def gradients(found: list[Study]) -> plt.Figure | None:
    """New : old gradient RMS by layer right after growth, from the report cards."""
    wanted = ("nrio", "srio-rotate-only", "srio-gamma-only", "srio", "full", "pad-gain")
    rich = sorted(found, key=lambda s: (sum(has(s, v) for v in wanted[:4]), len(s.rows)))
    study = rich[-1] if rich else None
    shown = [v for v in wanted if study and has(study, v)]
    if len(shown) < 2:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    looks = style.looks(list(wanted))
    for axes, kind, title in zip(panels, ("attn", "ffn"), ("attention", "FFN"), strict=True):
        for variant in shown:
            values = by_layer(study, variant, kind)
            xs, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
            look = looks[variant]
            axes.plot(xs, mean, color=look["color"], linestyle=look["linestyle"],
                      marker=look["marker"], label=variant)  # fmt: skip
            if len(values) > 1:
                axes.fill_between(xs, values.min(0), values.max(0), color=look["color"], alpha=0.12)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(xs)
        axes.set_xlabel("layer")
        axes.set_title(title, loc="left")
    panels[0].set_ylabel("gradient RMS, new entries : old entries")
    panels[1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    n = len({row["seed"] for row in study.rows})
    title = f"Right after growth ({study.folder}, {n} seed{'s' * (n > 1)})"
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def has(study: Study, variant: str) -> bool:
    return by_layer(study, variant, "attn").size > 0


def by_layer(study: Study, variant: str, kind: str) -> np.ndarray:
    """(seeds, layers) ratios of the finished rows of a variant."""
    found = []
    for row in study.rows:
        card = (row.get("report") or {}).get("gradient_rms_new_to_old") or {}
        keys = [k for k in card if k.endswith(f".{kind}")]
        keys.sort(key=lambda k: int(k.split(".")[1]))
        if row["variant"] == variant and keys:
            found.append([card[k] for k in keys])
    return np.array(found)


# ---- a chain, loss against FLOPs


def staircase(found: list[Study]) -> plt.Figure | None:
    """Validation loss against all FLOPs spent, stage after stage, mean over seeds."""
    folders = {s.folder for s in found if not s.first}
    if not folders:
        return None
    folder = max(folders, key=lambda f: sum(len(s.rows) for s in found if s.folder == f))
    rows = [row for s in found if s.folder == folder for row in s.rows if row["status"] == "done"]
    figure, axes = plt.subplots(figsize=(9.5, 5.4), layout="constrained")
    variants = sorted({row["variant"] for row in rows} - {"parent"}, key=variant_key)
    looks = style.looks(variants)
    for variant in variants:
        named = variant
        for stage in sorted({row["stage"] for row in rows}):
            own = [r for r in rows if (r["variant"], r["stage"]) == (variant, stage)]
            if not own:
                continue
            before = np.mean([r["flops"]["parent"] + r["flops"]["operator"] for r in own])
            each = own[0]["flops"]["stage"] / own[0]["tokens"]["stage"]
            xs = before + each * np.array(own[0]["curve"]["val_tokens"])
            ys = np.mean([r["curve"]["val"] for r in own], axis=0)
            look = looks[variant]
            axes.plot(xs, ys, color=look["color"], linestyle=look["linestyle"], label=named)
            axes.plot(xs[-1], ys[-1], look["marker"], color=look["color"], markersize=6)
            named = None
    ends = [r["metrics"]["val_loss"] for r in rows]
    axes.set_ylim(min(ends) - 0.05, max(ends) + 0.6)
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs in all (matrix products), all earlier stages included")
    axes.set_ylabel("validation loss (nats/token)")
    axes.set_title(f"{folder}: a marker ends each stage", loc="left")
    axes.legend(frameon=False)
    return figure


# ---- copies


def symmetry(path: Path) -> plt.Figure | None:
    """The smallest distance between two FFN neurons over steps (checks/symmetry.py)."""
    report = files.read_json(path, default={})
    if not report:
        return None
    figure, axes = plt.subplots(figsize=(9.5, 4.8), layout="constrained")
    looks = style.looks(list(report["distance"]))
    for variant, seeds in report["distance"].items():
        steps = [int(step) for step in next(iter(seeds.values()))]
        values, look = np.array([list(curve.values()) for curve in seeds.values()]), looks[variant]
        axes.plot(steps, values.mean(0), label=f"{variant}, n = {len(seeds)}", **look)
        axes.fill_between(steps, values.min(0), values.max(0), color=look["color"], alpha=0.12)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("steps after growth")
    axes.set_ylabel("smallest distance between\ntwo neurons of a layer (0: copies)")
    axes.set_title(f"Do copies part? {report['preset']}; band: the seeds' range", loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


# ---- the rotation


def rotation() -> plt.Figure:
    """R in the plane of u_old and u_grow at 256 -> 384, and what epsilon does to it."""
    d_old, d_new = 256, 384
    figure, (plane, curve) = plt.subplots(1, 2, figsize=(11.5, 5.2), layout="constrained")
    ones = np.array([math.sqrt(d_old), math.sqrt(d_new - d_old)]) / math.sqrt(d_new)
    axis = {"arrowstyle": "->", "color": "black"}
    plane.annotate("", (1, 0), (0, 0), arrowprops=axis)
    plane.annotate("", (0, 1), (0, 0), arrowprops=axis)
    plane.annotate("", ones, (0, 0), arrowprops=axis | {"color": "#777777"})
    plane.text(1.03, -0.02, "$u_{old}$")
    plane.text(-0.05, 1.04, "$u_{grow}$")
    plane.text(*(1.03 * ones), "all ones", color="#777777")
    turns = ((1.0, "#0072B2", (0.3, -0.09)), (0.5, "#E69F00", (0.81, 0.25)))
    for epsilon, color, place in (*turns, (0.0, "#D55E00", (0.71, 0.42))):
        t = theta(epsilon, d_old, d_new)
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2}
        plane.annotate("", (0.82 * math.cos(t), 0.82 * math.sin(t)), (0, 0), arrowprops=arrow)
        plane.text(*place, f"$R\\,u_{{old}}$, ε = {epsilon:g}", color=color)
    turn = np.linspace(0, 2 * math.pi, 200)
    plane.plot(np.cos(turn), np.sin(turn), color="#cccccc", linewidth=1)
    plane.set_xlim(-0.25, 1.35)
    plane.set_ylim(-0.25, 1.2)
    plane.set_aspect("equal")
    plane.grid(False)
    plane.set_xticks([])
    plane.set_yticks([])
    plane.spines[["left", "bottom"]].set_visible(False)
    plane.set_title(f"the plane of the rotation, {d_old} → {d_new}", loc="left")
    r = math.sqrt(d_old / (d_new - d_old))
    xs = np.linspace(-0.5, 1.25, 200)
    angles = np.array([theta(x, d_old, d_new) for x in xs])
    old, new = np.cos(angles) - np.sin(angles) / r, np.cos(angles) + np.sin(angles) * r
    curve.plot(xs, old, color=OLD, label="gain of old coordinates")
    curve.plot(xs, new, color=NEW, label="gain of new coordinates")
    curve.plot(xs, np.degrees(angles) / 45, color="#777777", linestyle="--", label="angle / 45°")
    curve.axhline(1, color="black", linewidth=0.8)
    curve.axvline(0.5, color="#999999", linewidth=1, linestyle=":")
    curve.set_xlabel("ε (row-sum reading)")
    curve.set_title("what becomes of gains of 1", loc="left")
    curve.legend(frameon=False)
    return figure


def main() -> None:
    cfg = read_command_line(EvidenceConfig, __doc__)
    style.setup()
    found = sorted(studies(cfg.results), key=lambda study: -len(study.rows))
    makers = {
        "scale": lambda: scale(found), "forest": lambda: forest(found),
        "epsilon": lambda: epsilon(found), "gains": lambda: gains(found),
        "policies": lambda: policies(found), "gradients": lambda: gradients(found),
        "staircase": lambda: staircase(found),
        "symmetry": lambda: symmetry(cfg.results / "symmetry.json"), "rotation": rotation,
    }  # fmt: skip
    for name, make in makers.items() if cfg.name == "all" else [(cfg.name, makers[cfg.name])]:
        figure = make()
        if figure is None:
            print(f"{name}: no rows that it needs")
            continue
        print(*style.save(figure, cfg.out, name), sep="\n")


if __name__ == "__main__":
    exit_on_user_error(main)
