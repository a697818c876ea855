"""Rows to tables: one line per variant and stage, with paired statistics, costs and claims.

    python -m analysis.aggregate results/tiny

reads results/tiny/rows/*.json, prints the loss table and writes table.csv, table.md, claims.md.
Losses are nats per token. A difference is variant - baseline, paired by seed: negative is better.
"""

import math
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tyro

from errors import UserError, exit_on_user_error, read_command_line


@dataclass(frozen=True)
class AggregateConfig:
    """Rows of finished runs to table.csv, table.md and claims.md."""

    folder: tyro.conf.Positional[Path]  # a results folder, e.g. results/tiny
    baseline: str = ""  # the variant that all others are paired with; default: nrio
    out: Path | None = None  # where to write; default: the results folder
    allow_missing: bool = False  # use the seeds common to all variants instead of refusing


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(AggregateConfig, __doc__))

import pandas as pd

import files
from analysis.claims import claims, scale
from analysis.paired import contrast, estimate, holm, values_by_seed
from analysis.rows import by_stage, load_rows, matched, number

BASELINE = "nrio"


def variant_key(variant: str) -> tuple:
    """Sort key of variants in tables and pictures: the parent, then as grid.VARIANTS has them,
    then unknown ones by name."""
    name = variant.split("@")[0]  # a variant with overridden settings stands beside its original
    return (places().get(name, math.inf), variant)


@cache
def places() -> dict[str, int]:
    from grid import VARIANTS  # imports torch: only where a table is made

    return {name: i for i, name in enumerate(("parent", *VARIANTS))}


def table(rows: list[dict], baseline: str = "", allow_missing: bool = False) -> pd.DataFrame:
    """One line per (stage, variant); undefined numbers are NaN. `df.attrs` holds baseline, notes.

    Means and CIs are over the seeds that finished (`n`); `d_*` are paired differences to
    `baseline` (empty: nrio, or none where no row is of nrio), with p-values and Holm's correction
    over the variants of the stage. Raises UserError when rows may not be
    compared or the named baseline has no row.
    """
    rows, notes = matched(rows, allow_missing)
    named, baseline = baseline, baseline or BASELINE
    if not any(row["variant"] == baseline for row in rows):
        if named:
            variants = sorted({row["variant"] for row in rows}, key=variant_key)
            raise UserError(
                f"baseline {named!r} has no row; choose --baseline from: {', '.join(variants)}"
            )
        notes.append(f"no row of {baseline}: no paired differences")
    records = []
    for stage, group in by_stage(rows):
        variants = sorted({row["variant"] for row in group}, key=variant_key)
        found = [_record(stage, variant, group, baseline) for variant in variants]
        for name in ("train", "val"):
            corrected = holm([record[f"d_{name}_p"] for record in found])
            for record, p in zip(found, corrected, strict=True):
                record[f"d_{name}_holm"] = p
        records += found
    df = pd.DataFrame.from_records(records)
    scales = {stage: scale(group) for stage, group in by_stage(rows)}
    df.attrs = {"baseline": baseline, "notes": notes, "scales": scales}
    return df


def _record(stage: int | str, variant: str, group: list[dict], baseline: str) -> dict:
    own = [row for row in group if row["variant"] == variant]
    done = [row for row in own if row["status"] == "done"]
    record = {"stage": stage, "variant": variant, "n": len(done)}
    record["seeds"] = " ".join(str(row["seed"]) for row in done)
    record |= {status: sum(r["status"] == status for r in own) for status in ("diverged", "failed")}
    for name, metric in (("train", "metrics.train_loss"), ("val", "metrics.val_loss")):
        mean = estimate(values_by_seed(own, variant, metric))
        record |= {f"{name}_loss": mean.mean, f"{name}_loss_ci": mean.half}
        record |= _difference(name, variant, baseline, metric, group)
    record |= _reach(variant, group)
    for name, path in COSTS.items():
        record[name] = estimate(values_by_seed(own, variant, path)).mean
    return record


# Column -> where it stands in a row; the mean over finished seeds. spike = loss right after growth
# minus the parent's final loss (nats/token); spike_open the same with the gate open.
COSTS = {
    "spike": "metrics.spike",
    "spike_open": "metrics.spike_open",
    "d_model": "d_model",
    "params": "params",
    "tokens_stage": "tokens.stage",
    "tokens_operator": "tokens.operator",
    "tokens_parent": "tokens.parent",
    "flops_parent": "flops.parent",
    "flops_operator": "flops.operator",
    "flops_stage": "flops.stage",
    "flops_total": "flops.total",
    "tokens_per_s": "tokens_per_s",
    "wall_s": "wall_s",
}


def _difference(name: str, variant: str, baseline: str, metric: str, group: list[dict]) -> dict:
    """Columns of the paired difference variant - baseline; the baseline's own are undefined."""
    itself = variant == baseline
    found = estimate({}) if itself else contrast(group, {variant: 1, baseline: -1}, metric)
    columns = (f"d_{name}", f"d_{name}_ci", f"d_{name}_p", f"d_{name}_n")
    return dict(zip(columns, (found.mean, found.half, found.p, found.n), strict=True))


def _reach(variant: str, group: list[dict]) -> dict:
    """What a grown variant spends in all, its parent and operator included, to reach the final
    validation loss of `scratch-flops` of the same seed, which spent the same FLOPs on itself alone.

    The means exist only when every seed reaches it: a mean over those that do would flatter.
    """
    target = values_by_seed(group, "scratch-flops", "metrics.val_loss")
    budget = values_by_seed(group, "scratch-flops", "flops.total")
    own = [r for r in group if r["variant"] == variant and r["status"] == "done" and r["parent"]]
    own = {row["seed"]: row for row in own if row["seed"] in target}
    stage = {seed: tokens_to_reach(row, target[seed]) for seed, row in own.items()}
    reached = {seed: tokens for seed, tokens in stage.items() if math.isfinite(tokens)}
    tokens = {s: number(own[s], "tokens.parent") + t for s, t in reached.items()}
    flops = {s: _flops_after(own[s], t) for s, t in reached.items()}
    saving = {s: 100 * (1 - f / budget[s]) for s, f in flops.items() if budget[s] > 0}
    complete = bool(own) and len(reached) == len(own)
    return {
        "reach_tokens": estimate(tokens).mean if complete else math.nan,
        "reach_flops": estimate(flops).mean if complete else math.nan,
        "reach_saving_pct": estimate(saving).mean if complete else math.nan,
        "reach_seeds": f"{len(reached)}/{len(own)}" if own else "",
    }


def _flops_after(row: dict, tokens: float) -> float:
    """Total FLOPs of a run after `tokens` of operator and stage."""
    spent = max(0.0, tokens - number(row, "tokens.operator")) / number(row, "tokens.stage")
    before = number(row, "flops.parent") + number(row, "flops.operator")
    return before + spent * number(row, "flops.stage")


def tokens_to_reach(row: dict, target: float) -> float:
    """Tokens (operator's + stage's) until the validation curve first is <= target; NaN if never.

    Linear between evaluations. The parent's tokens are not counted here.
    """
    tokens, losses = row["curve"]["val_tokens"], row["curve"]["val"]
    operator = number(row, "tokens.operator")
    for i, loss in enumerate(losses):
        if loss > target:
            continue
        if i == 0:
            return operator + tokens[0]
        part = (losses[i - 1] - target) / (losses[i - 1] - loss)
        return operator + tokens[i - 1] + part * (tokens[i] - tokens[i - 1])
    return math.nan


# ---- print and write ---------------------------------------------------------------------------


def markdown(df: pd.DataFrame) -> str:
    """The table as aligned markdown, readable as plain text: per stage losses, then costs."""
    lines = []
    for stage, group in df.groupby("stage", sort=False):
        lines += [f"## Stage {stage}: {df.attrs['scales'][stage]}", ""]
        lines += [*_aligned(_loss_cells(group)), ""]
        lines += [*_aligned(_cost_cells(group)), ""]
    return "\n".join(lines + _legend(df, MORE_IN_FILE)) + "\n"


def print_table(df: pd.DataFrame) -> None:
    """Print one compact table per stage to stdout; table.md has every column."""
    for stage, group in df.groupby("stage", sort=False):
        print(f"Stage {stage}: {df.attrs['scales'][stage]}\n")
        losses, costs = _loss_cells(group), _cost_cells(group)
        cells = losses[["variant", "n", "val loss", "Δ val", "Δ train", "spike"]]
        cells = cells.join(costs[["stage tokens", "total FLOPs"]])
        print("\n".join(_aligned(cells)), end="\n\n")
    print("\n".join(_legend(df, MORE_IN_TERMINAL)), flush=True)


def write_table(df: pd.DataFrame, folder: Path) -> None:
    """Write table.csv (full precision, empty = undefined) and table.md into `folder`."""
    files.write_text(folder / "table.csv", df.to_csv(index=False))
    files.write_text(folder / "table.md", markdown(df))


def _legend(df: pd.DataFrame, more: str) -> list[str]:
    text = (
        "Losses in nats/token: mean ± 95 % CI over n seeds. "
        f"Δ = variant − {df.attrs['baseline']}, paired by seed, ± 95 % CI (Student t); negative is "
        "better. — = undefined (one seed has no interval). Train = mean over the last tokens of "
        "the stage. Spike = validation loss right after growth − the parent's final one. FLOPs are "
        f"those of matrix products; total = parent + operator + stage. {more}"
    )
    notes = [textwrap.fill(f"- {note}", 100, subsequent_indent="  ") for note in df.attrs["notes"]]
    return [textwrap.fill(text, 100), *([""] if notes else []), *notes]


MORE_IN_FILE = (
    "CIs are per comparison; p is two-sided and Holm's, corrected for the number of variants. "
    "Spike in brackets: with the warm-up gate open. To scratch-flops = tokens and FLOPs, the "
    "parent's and the operator's included, until the final validation loss of scratch-flops, and "
    "the share of its FLOPs saved."
)
MORE_IN_TERMINAL = "table.md adds training losses, p-values, FLOPs to scratch-flops, and costs."


def _loss_cells(group: pd.DataFrame) -> pd.DataFrame:
    cells = pd.DataFrame({"variant": group["variant"], "n": [_n(r) for _, r in group.iterrows()]})
    for name in ("val", "train"):
        loss = f"{name}_loss"
        cells[f"{name} loss"] = _with_ci(group[loss], group[f"{loss}_ci"], "{:.4f}")
        cells[f"Δ {name}"] = _with_ci(group[f"d_{name}"], group[f"d_{name}_ci"], "{:+.4f}")
        cells[f"Holm p ({name})"] = [_p(p) for p in group[f"d_{name}_holm"]]
    cells["spike"] = [_spike(r) for _, r in group.iterrows()]
    cells["to scratch-flops"] = [_reach_text(r) for _, r in group.iterrows()]
    return cells


def _cost_cells(group: pd.DataFrame) -> pd.DataFrame:
    cells = pd.DataFrame({"variant": group["variant"]})
    cells["width"] = [_text(v, "{:.0f}") for v in group["d_model"]]
    for name in ("params", "tokens_stage", "tokens_operator"):
        title = " ".join(reversed(name.split("_")))  # tokens_stage -> stage tokens
        cells[title] = [_count(v) for v in group[name]]
    for part in ("parent", "operator", "stage", "total"):
        cells[f"{part} FLOPs"] = [_text(v, "{:.3g}") for v in group[f"flops_{part}"]]
    cells["tokens/s"] = [_text(v, "{:,.0f}") for v in group["tokens_per_s"]]
    cells["wall s"] = [_text(v, "{:,.1f}") for v in group["wall_s"]]
    return cells


def _n(record: pd.Series) -> str:
    """Finished seeds, and those that are not, so that nobody overlooks a diverged run."""
    lost = [f"{record[s]} {s}" for s in ("diverged", "failed") if record[s]]
    return str(record["n"]) + (f" (+{', '.join(lost)})" if lost else "")


def _with_ci(means: pd.Series, halves: pd.Series, form: str) -> list[str]:
    pairs = zip(means, halves, strict=True)
    return [f"{_text(m, form)} ± {_text(h, '{:.4f}')}" if m == m else "—" for m, h in pairs]


def _text(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "—"


def _count(value: float) -> str:
    """A number of tokens or parameters: 960, 15.6 k, 44 M, 2.4 G."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return _text(value, "{:.0f}")


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else _text(p, "{:.3f}")


def _spike(record: pd.Series) -> str:
    text, opened = (_text(record[name], "{:+.3f}") for name in ("spike", "spike_open"))
    return text if opened in ("—", text) else f"{text} ({opened})"


def _reach_text(record: pd.Series) -> str:
    if not record["reach_seeds"]:
        return "—"
    if not math.isfinite(record["reach_tokens"]):
        return f"not reached ({record['reach_seeds']} seeds)"
    flops = _text(record["reach_flops"], "{:.3g}")
    saved = f"{record['reach_saving_pct']:.0f} % saved"
    return f"{_count(record['reach_tokens'])}, {flops} ({saved})"


def _aligned(cells: pd.DataFrame) -> list[str]:
    """Markdown lines with padded columns: the first left, the others right."""
    columns = [[name, *cells[name].astype(str)] for name in cells]
    widths = [max(3, *map(len, column)) for column in columns]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[text.ljust(widths[0]) for text in columns[0]]]
    padded += [[text.rjust(w) for text in c] for c, w in zip(columns[1:], widths[1:], strict=True)]
    lines = [list(line) for line in zip(*padded, strict=True)]
    return [f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]]


def aligned_lines(cells: list[dict]) -> list[str]:
    """A list of records as markdown lines with padded columns, all left-aligned."""
    columns = [[name, *(str(cell[name]) for cell in cells)] for name in cells[0]] if cells else []
    widths = [max(map(len, column)) for column in columns]
    padded = [[t.ljust(w) for t in column] for column, w in zip(columns, widths, strict=True)]
    lines = [f"| {' | '.join(line)} |" for line in zip(*padded, strict=True)]
    return [lines[0], f"|{'|'.join('-' * (w + 2) for w in widths)}|", *lines[1:]] if lines else []


def main() -> None:
    cfg = read_command_line(AggregateConfig, __doc__)
    rows = load_rows(cfg.folder)
    df = table(rows, cfg.baseline, cfg.allow_missing)
    text = claims(rows, cfg.allow_missing)  # before the first write: all of it or nothing
    out = cfg.out or cfg.folder
    write_table(df, out)
    files.write_text(out / "claims.md", text)
    print_table(df)


if __name__ == "__main__":
    exit_on_user_error(main)
