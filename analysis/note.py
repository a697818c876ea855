"""The note's claims about trained models: results/note/note.md from the rows of checks/note.py.

    python -m analysis.note

Intervals are Student's 95 % over seeds. A model is back at its parent's loss at the first judged
step whose validation loss is not above the parent's at growth.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from errors import exit_on_user_error, read_command_line


@dataclass(frozen=True)
class NoteTableConfig:
    """Rows of checks/note.py to note.md beside them."""

    folder: Path = Path("results/note")


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(NoteTableConfig, __doc__))

import files
from analysis.aggregate import aligned_lines
from analysis.paired import Estimate, estimate

STEPS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHOWN = (0, 1, 4, 8, 16)  # in the table
LITERAL = "note's scales, extra sqrt(2)"
QUICK = 0.1  # of the parent's steps: what "quickly recovered" is taken to mean


def rows_of(folder: Path, part: str) -> list[dict]:
    return [files.read_json(path) for path in sorted(folder.glob(f"{part}-*.json"))]


def mlm(rows: list[dict], form: str, what: str, against: str = "") -> Estimate:
    """A score of a form over seeds, less that of `against` where named."""
    minus = {row["seed"]: row["found"][against][what] if against else 0.0 for row in rows}
    return estimate({row["seed"]: row["found"][form][what] - minus[row["seed"]] for row in rows})


def gap(rows: list[dict], start: str, step: int, against: str = "") -> Estimate:
    """Validation loss `step` steps after growth less that of `against`, or, without one, less the
    parent's before growth."""
    found = {}
    for row in rows:
        curves, key = row["found"]["curves"], str(step)
        base = curves[against][key] if against else row["found"]["parent_loss"]
        found[row["seed"]] = curves[start][key] - base
    return estimate(found)


def steps_back(row: dict, start: str) -> float:
    """Steps until the loss is the parent's at growth; infinite where it never is."""
    curve, bar = row["found"]["curves"][start], row["found"]["parent_loss"]
    return min((int(s) for s, loss in curve.items() if loss <= bar + 1e-6), default=math.inf)


def back_text(rows: list[dict], start: str) -> str:
    """Steps back at the parent's loss, by seed."""
    last = max(map(int, rows[0]["found"]["curves"][start]))
    steps = [steps_back(row, start) for row in rows]
    return ", ".join(f"{n:g}" if math.isfinite(n) else f"not in {last}" for n in steps)


def table(folder: Path) -> str:
    """Markdown of both parts."""
    return "\n".join([*mlm_lines(rows_of(folder, "mlm")), "", *rope_lines(rows_of(folder, "rope"))])


def head(rows: list[dict]) -> str:
    first = rows[0]
    commits = sorted({str(row["commit"])[:9] + "+dirty" * row["dirty"] for row in rows})
    seeds = ", ".join(str(row["seed"]) for row in rows)
    return (
        f"`{first['command']}`, seeds {seeds} (n = {len(rows)}), commit {', '.join(commits)}; "
        f"{first['corpus']['source']} {first['corpus']['tokenizer']}; settings: "
        + ", ".join(f"{k} {v}" for k, v in first["config"].items())
        + "."
    )


def mlm_lines(rows: list[dict]) -> list[str]:
    lines = ["# The note's claims, on models trained here", "", "## BERT with GELU, x2", ""]
    if not rows:
        return [*lines, "Not run."]
    cells = [
        {
            "form": form,
            "MLM accuracy (%)": cell(mlm(rows, form, "accuracy"), "{:.2f}", 100),
            "- parent's": cell(mlm(rows, form, "accuracy", "parent"), "{:+.3f}", 100),
            "loss - parent's (nats)": cell(mlm(rows, form, "loss", "parent"), "{:+.2g}"),
            "predictions changed (%)": cell(mlm(rows, form, "changed"), "{:.3f}", 100),
            "max Δlogit / std": f"{max(row['found'][form]['max_rel_dlogit'] for row in rows):.1e}",
        }
        for form in rows[0]["found"]
    ]
    return [*lines, head(rows), "", *aligned_lines(cells)]


def rope_lines(rows: list[dict]) -> list[str]:
    lines = ["## RoPE, heads twice as wide", ""]
    if not rows:
        return [*lines, "Not run.", ""]
    starts = rows[0]["found"]["curves"]
    judged = [step for step in SHOWN if str(step) in starts["parent"]]
    judged = sorted({*judged, max(map(int, starts["parent"]))})
    cells = [
        {"start": start, **{f"step {s}": cell(gap(rows, start, s), "{:+.4f}") for s in judged},
         "back after (steps, by seed)": back_text(rows, start)}
        for start in starts
    ]  # fmt: skip
    rest = [
        {"recomputed less": other,
         **{f"step {s}": cell(gap(rows, "recomputed", s, other), "{:+.4f}") for s in judged}}
        for other in starts if other != "recomputed"
    ]  # fmt: skip
    text = "Validation loss less the parent's at growth, by steps of training after it; nats:"
    then = "The recomputed start less the others at the same step:"
    return [*lines, head(rows), "", text, "", *aligned_lines(cells), "", then, "",
            *aligned_lines(rest), ""]  # fmt: skip


def cell(found: Estimate, form: str, times: float = 1.0) -> str:
    """Mean and interval."""
    mean, low, high = (form.format(v * times) for v in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if found.n > 1 and found.half > 0 else mean


def write(folder: Path) -> str:
    text = table(folder)
    files.write_text(folder / "note.md", text)
    return text


def main() -> None:
    print(write(read_command_line(NoteTableConfig, __doc__).folder))


if __name__ == "__main__":
    exit_on_user_error(main)
