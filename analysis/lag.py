"""Validation loss N steps after growth, against another variant or the parent, from rows.

    python -m analysis.lag results/tiny-x2 --steps 0,16,128 --minus nrio
    python -m analysis.lag results/tiny-heldout --steps 0,24,48,72     # minus the parent at growth

Means over seeds with 95 % CIs, paired by seed; between evaluations the curve is read linearly.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from errors import UserError, exit_on_user_error, read_command_line


@dataclass(frozen=True)
class LagConfig:
    """Rows of a folder to a table on the screen."""

    folder: tyro.conf.Positional[Path]
    steps: str = "0,16,128"
    minus: str = ""  # a variant; empty: the parent's loss at growth


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(LagConfig, __doc__))

from analysis.aggregate import aligned_lines, variant_key
from analysis.claims import grown_stages, interval
from analysis.paired import Estimate, contrast, estimate, measure
from analysis.rows import load_rows


def rise(rows: list[dict], variant: str, step: int, minus: str) -> Estimate:
    """Loss of `variant` at `step` less that of `minus` then, or, without one, the parent's at
    growth."""
    if minus:
        return contrast(rows, {variant: 1, minus: -1}, f"lag.{step}")
    own = [r for r in rows if r["variant"] == variant and r["status"] == "done"]
    found = {r["seed"]: measure(r, f"lag.{step}") - r["parent"]["val_loss"] for r in own}
    return estimate({seed: value for seed, value in found.items() if value == value})


def table(rows: list[dict], steps: list[int], minus: str) -> list[str]:
    """Markdown: one line per grown variant of one stage."""
    variants = {r["variant"] for r in rows if r["parent"]} - {minus}
    cells = []
    for variant in sorted(variants, key=variant_key):
        found = {step: rise(rows, variant, step, minus) for step in steps}
        cells.append({"variant": variant, "n": str(max(e.n for e in found.values()))} | {
            f"{step} steps": f"{e.mean:+.4f} {interval(e)}" if e.n else "—"
            for step, e in found.items()
        })  # fmt: skip
    return aligned_lines(cells)


def main() -> None:
    cfg = read_command_line(LagConfig, __doc__)
    if not all(step.isdigit() for step in cfg.steps.split(",")):
        raise UserError(f"--steps is {cfg.steps}; give whole numbers of steps, e.g. 0,16,128")
    steps = [int(step) for step in cfg.steps.split(",")]
    for stage, rows in grown_stages(load_rows(cfg.folder)):
        known = {row["variant"] for row in rows}
        if cfg.minus and cfg.minus not in known:
            raise UserError(f"--minus is {cfg.minus}; choose one of {', '.join(sorted(known))}")
        against = cfg.minus or "the parent at growth"
        print(f"stage {stage}: validation loss minus that of {against}\n")
        print(*table(rows, steps, cfg.minus), sep="\n")


if __name__ == "__main__":
    exit_on_user_error(main)
