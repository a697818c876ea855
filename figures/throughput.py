"""results/throughput.json as a picture: tokens/s of each contestant, a panel per measured shape.

python -m figures.throughput
"""

from pathlib import Path

from matplotlib import pyplot as plt

import files
from figures import style

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"ours": "#009E73", "nanogpt": "#0072B2", "hf": "#E69F00"}
NAMES = {"nanogpt": "nanoGPT", "hf": "transformers"}


def draw(rows: list[dict], out: Path) -> list[Path]:
    """Write throughput.png and .svg into `out`."""
    style.setup()
    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5.8 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(rows) :]:
        ax.set_axis_off()
    for ax, row in zip(axes.flat, rows, strict=False):
        speeds = row["tokens_per_s"]
        peers = [name.split()[0] for name in speeds]
        labels = [" ".join([NAMES.get(p, p), *n.split()[1:]])
                  for p, n in zip(peers, speeds, strict=True)]  # fmt: skip
        bars = ax.barh(labels, list(speeds.values()), color=[COLOURS[peer] for peer in peers])
        ax.bar_label(bars, fmt="{:,.0f}", padding=3)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.22)
        ax.set_axisbelow(True)
        threads = f"{row['threads']} thread" + "s" * (row["threads"] > 1)
        ax.set_title(f"{row['shape']}, our dtype {row['dtype']}, {threads}")
        ax.set_xlabel("training tokens/s")
    return style.save(figure, out, "throughput")


if __name__ == "__main__":
    draw(files.read_json(ROOT / "results" / "throughput.json")["rows"], ROOT / "figures")
