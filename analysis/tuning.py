"""What was tuned on what: a table from the rows of seeds >= 100, which no claim uses.

    python -m analysis.tuning            # reads results/*/rows, writes results/tuning.md

One line per variant and setting: the values tried with their mean final validation loss over the
seeds, the best one, whether it lies at an edge of what was tried, and how many runs it cost. Equal
effort is a column, not a promise: a reader can compare.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from errors import exit_on_user_error, read_command_line


@dataclass(frozen=True)
class TuningConfig:
    """Rows of seeds >= 100 to results/tuning.md."""

    results: Path = Path("results")
    out: Path | None = None  # default: RESULTS/tuning.md


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(TuningConfig, __doc__))

import files
from analysis.aggregate import aligned_lines, variant_key
from analysis.rows import flatten, load_rows

FIRST_SEED = 100  # seeds from here on tune, the ones below judge


@dataclass(frozen=True)
class Sweep:
    """One setting of one variant: value (as text) -> {seed: final validation loss}; None where the
    run broke off."""

    folder: str
    preset: str
    variant: str
    key: str
    losses: dict[str, dict[int, float | None]]

    @property
    def seeds(self) -> list[int]:
        """Those that every value has."""
        return sorted(set.intersection(*(set(values) for values in self.losses.values())))

    def mean(self, value: str) -> float:
        """Mean over the common seeds; infinite where a run broke off."""
        losses = [self.losses[value][seed] for seed in self.seeds]
        whole = losses and None not in losses
        return sum(losses) / len(losses) if whole else float("inf")

    @property
    def best(self) -> str:
        return min(self.losses, key=self.mean)

    @property
    def at_edge(self) -> bool:
        """Whether the best of numeric values is the smallest or largest tried."""
        try:
            values = sorted(self.losses, key=float)
        except ValueError:
            return False
        return self.best in (values[0], values[-1])


def sweeps(folder: str, rows: list[dict]) -> list[Sweep]:
    """The sweeps among the rows of seeds >= FIRST_SEED of one folder: variants with exactly one
    override, and the variant itself at the value its row names."""
    rows = [row for row in rows if row["seed"] >= FIRST_SEED and row["variant"] != "parent"]
    found: dict[tuple, dict] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        name, *overrides = row["variant"].split("@")
        if len(overrides) == 1:
            key, _, value = overrides[0].partition("=")
            found[name, key][value][row["seed"]] = _loss(row)
    for (name, key), losses in found.items():
        for row in rows:
            value = _setting(row, key)
            if row["variant"] == name and value is not None:
                losses[value].setdefault(row["seed"], _loss(row))
    preset = rows[0]["preset"] if rows else ""
    made = [Sweep(folder, preset, name, key, dict(losses)) for (name, key), losses in found.items()]
    return sorted(
        (s for s in made if len(s.losses) > 1 and s.seeds),
        key=lambda s: (variant_key(s.variant), s.key),
    )


def _loss(row: dict) -> float | None:
    return row["metrics"]["val_loss"] if row["status"] == "done" else None


def _setting(row: dict, key: str) -> str | None:
    """The value of a setting in a row, written as overrides are."""
    train = row["config"].get("train") or {}
    if key == "warmup":
        return f"{train['warmup_steps'] / train['steps']:.2g}"
    settings = {name.split(".")[-1]: value for name, value in flatten(row["config"])}
    if key == "new_lr":
        settings.setdefault(key, 1.0)
    return str(settings[key]) if key in settings else None


def table(found: list[Sweep]) -> str:
    """Markdown; the losses of all values beside each other, the best one bold."""
    lines = [
        "# What was tuned on what",
        "",
        f"Final validation loss (nats/token), mean over the seeds. No seed below {FIRST_SEED} is "
        "used here, and no claim uses one from there on. *Edge*: the best value is the smallest or "
        "largest that was tried. One setting at a time, the others at the variant's own values.",
        "",
    ]
    for preset in dict.fromkeys(s.preset for s in found):
        own = [s for s in found if s.preset == preset]
        lines += [f"## Preset {preset}", "", *_lines(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def _lines(found: list[Sweep]) -> list[str]:
    cells = []
    for s in found:
        values = sorted(s.losses, key=_number)
        shown = [f"{v}: {s.mean(v):.4f}" for v in values]
        shown = [f"**{t}**" if v == s.best else t for t, v in zip(shown, values, strict=True)]
        cells.append(
            {
                "variant": s.variant,
                "setting": s.key,
                "value: loss": ", ".join(shown),
                "edge": "yes" if s.at_edge else "",
                "seeds": " ".join(map(str, s.seeds)),
                "runs": str(sum(map(len, s.losses.values()))),
                "rows": s.folder,
            }
        )
    return aligned_lines(cells)


def _number(value: str) -> tuple[float, str]:
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value


def main() -> None:
    cfg = read_command_line(TuningConfig, __doc__)
    found = []
    for folder in sorted(path.parent for path in cfg.results.glob("*/rows")):
        found += sweeps(folder.name, load_rows(folder))
    files.write_text(cfg.out or cfg.results / "tuning.md", table(found))
    print(f"{len(found)} sweeps")


if __name__ == "__main__":
    exit_on_user_error(main)
