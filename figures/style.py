"""One look for all pictures: a colour-blind-safe colour per family, a dash pattern within it.

Colours are Okabe and Ito's (2008). An operator's record says its colour (growth/operator.py), which
its variants share; they differ in dash pattern and marker, so more than twenty variants stay apart,
also in grey print. Sizes are meant to be read at half size.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from analysis.aggregate import variant_key
from files import write_bytes
from grid import VARIANTS
from growth.operators import OPERATORS

# by the longest prefix of a name; every other variant has the colour of its operator's record
OTHER = "#8C6D31"  # brown
BY_NAME = {"scratch": "#777777", "zero-pad": "#56B4E9", "full": "#009E73", "": OTHER}
BY_NAME["policies"] = "#0072B2"  # as nrio, whatever is added to them
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2, 2, 2, 2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FONT = 12
FAR = 8


def setup() -> None:
    """Fonts, thin axes, no top and right spines; SVG ids that do not depend on the time."""
    plt.rcParams.update(
        {
            "font.size": FONT,
            "axes.labelsize": FONT,
            "axes.titlesize": FONT,
            "xtick.labelsize": FONT - 1,
            "ytick.labelsize": FONT - 1,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "lines.linewidth": 1.8,
            "svg.hashsalt": "loss",
            "svg.fonttype": "path",  # the same picture on every machine
            "path.simplify": True,
        }
    )


def color_of(variant: str) -> str:
    """The colour of a variant's family, overrides (@...) or not."""
    prefix = max((name for name in BY_NAME if variant.startswith(name)), key=len)
    known = VARIANTS.get(variant.split("@")[0])
    if prefix or known is None or known.grow is None:
        return BY_NAME[prefix]
    return OPERATORS[known.grow.operator].color


def looks(variants: list[str]) -> dict[str, dict]:
    """{variant: colour, dash pattern and marker}, in table order; no two alike up to 35 each."""
    counts: dict[str, int] = {}
    found = {}
    for variant in sorted(variants, key=variant_key):
        color = color_of(variant)
        i = counts[color] = counts.get(color, -1) + 1
        found[variant] = {
            "color": color,
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
    return found


def far(distances: Sequence[float]) -> float:
    """The distance beyond which a variant is left outside a picture, for the others would be one
    line in it: FAR times the median of those that are not 0."""
    apart = [distance for distance in distances if distance > 0]
    return FAR * median(apart) if apart else 0.0


def spread_labels(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near `wanted` (ascending), at least `gap` apart, inside [low, high] if they fit."""
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    places: list[float] = []
    for value in wanted:  # push up from below ...
        places.append(max(value, places[-1] + gap if places else low))
    top = high
    for i in reversed(range(len(places))):  # ... and back down from the top
        places[i] = min(places[i], top)
        top = places[i] - gap
    return places


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write folder/name.png (200 dpi) and .svg, byte for byte the same for the same rows."""
    paths = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata, bbox_inches="tight")
        paths.append(Path(folder) / f"{name}.{kind}")
        write_bytes(paths[-1], buffer.getvalue())
    plt.close(figure)
    return paths
