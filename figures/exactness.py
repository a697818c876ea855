"""The exactness matrix as a picture: results/exactness.csv -> figures/exactness.png and .svg.

    python -m figures.exactness

One row per model, one column per method, heads and factor; the colour is log10 of max |delta logit|
over the logits' spread. Exact cells lie at the dtype's rounding; a cross marks what is refused.
"""

import csv
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from figures import style

DTYPES = ("float64", "float32", "bfloat16")
METHODS = ("lossless", "pad", "exact-srio")
LOW, HIGH = -15, 0  # log10 range of the colours


def draw(source: Path, out: Path) -> list[Path]:
    """Write exactness.png and .svg into `out`."""
    style.setup()
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file))
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = columns_of(rows)
    size = (0.26 * len(DTYPES) * len(columns) + 4, 0.3 * len(models) + 5)  # room for every label
    figure, all_axes = plt.subplots(1, len(DTYPES), figsize=size, sharey=True, layout="constrained")
    for axes, dtype in zip(all_axes, DTYPES, strict=True):
        image = draw_dtype(axes, [row for row in rows if row["dtype"] == dtype], models, columns)
        axes.set_title(dtype)
    all_axes[0].set_yticks(range(len(models)), models)
    bar = figure.colorbar(image, ax=all_axes, shrink=0.6, pad=0.01)
    bar.set_label("log10 of max |Δlogit| / std of the logits")
    return style.save(figure, out, "exactness")


def columns_of(rows: list[dict]) -> list[tuple[str, str, str, str]]:
    """(method, heads, option, factor), the defaults first, then each option."""
    found = {(r["method"], r["heads"], r["option"], r["factor"]) for r in rows}
    return sorted(found, key=lambda c: (c[2] != "", c[2], METHODS.index(c[0]), c[1], float(c[3])))


def draw_dtype(axes: Axes, rows: list[dict], models: list[str], columns: list[tuple]):
    """The heat map of one dtype; its image, for the colour bar."""
    grid, refused = np.full((len(models), len(columns)), np.nan), []
    for row in rows:
        y = models.index(row["model"])
        x = columns.index((row["method"], row["heads"], row["option"], row["factor"]))
        if row["max_rel_dlogit"]:
            grid[y, x] = np.log10(max(float(row["max_rel_dlogit"]), 1e-16))
        else:
            refused.append((x, y))
    image = axes.imshow(grid, vmin=LOW, vmax=HIGH, cmap="viridis", aspect="auto")
    axes.grid(False)
    if refused:
        axes.plot(*zip(*refused, strict=True), "x", color="#999999", markersize=5)
    axes.set_xticks(range(len(columns)), [label(c) for c in columns], rotation=90)
    for x in range(1, len(columns)):
        if columns[x][:3] != columns[x - 1][:3]:
            axes.axvline(x - 0.5, color="white", linewidth=1.5)
    return image


def label(column: tuple[str, str, str, str]) -> str:
    method, heads, option, factor = column
    return f"{method}, {heads} heads{', ' + option if option else ''}, ×{factor}"


if __name__ == "__main__":
    draw(Path("results/exactness.csv"), Path("figures"))
