"""The verdict on a given parent (run_ablations.py --parent): which way of growing it is safe, how
soon each is back where the parent was, and which is best at the end.

Everything is generated from rows. Losses are validation losses in nats per token, differences are
paired by seed with Student's 95 % interval, and an interval that holds 0 decides nothing.
"""

import math
from collections.abc import Iterator

from analysis.paired import contrast, estimate, values_by_seed
from analysis.rows import by_stage

SAFE = 0.01  # nats above the parent right after growth
REFERENCE = "parent-continued"
FINAL = "metrics.val_loss"


def verdict(rows: list[dict]) -> str:
    """Markdown; empty where no row has a given parent."""
    given = [row for row in rows if (row["parent"] or {}).get("source")]
    return "".join("\n" + "\n".join(section(group)) + "\n" for _, group in by_stage(given))


def section(rows: list[dict]) -> Iterator[str]:
    parent, source = rows[0]["parent"], rows[0]["parent"]["source"]
    variants = sorted({row["variant"] for row in rows}, key=lambda v: (end(rows, v), v))
    yield f"## A given parent: {source['name']}\n"
    yield (
        f"Weights sha256 {source['sha256'][:16]}, licence {source['licence']}; its loss before any "
        f"step, on the same tokens: {parent['val_loss']:.4f}. *Start* is the loss right after "
        f"growth minus that; *back after* the tokens until the loss is the parent's again, for the "
        f"slowest seed; *end* the final loss minus that of `{REFERENCE}`, the ungrown parent "
        f"trained on with the same tokens. Best first.\n"
    )
    yield "| variant | n | start (worst) | back after | end | 95 % CI |\n|---|--:|--:|--:|--:|---|"
    for variant in variants:
        yield line(rows, variant)
    yield ""
    yield from conclusions(rows, variants)


def end(rows: list[dict], variant: str) -> float:
    found = estimate(values_by_seed(rows, variant, FINAL))
    return found.mean if found.n else math.inf


def line(rows: list[dict], variant: str) -> str:
    found = contrast(rows, {variant: 1, REFERENCE: -1}, FINAL)
    start, back = worst_start(rows, variant), tokens_back(rows, variant)
    interval = f"[{found.low:+.4f}, {found.high:+.4f}]" if found.n > 1 else "—"
    cells = [
        variant,
        str(len(values_by_seed(rows, variant, FINAL))),
        "—" if start is None else f"{start:+.4f}",
        "at once" if back == 0 else "not in this stage" if math.isinf(back) else f"{back:,.0f}",
        f"{found.mean:+.4f}" if found.n and variant != REFERENCE else "—",
        interval if variant != REFERENCE else "—",
    ]
    return f"| {' | '.join(cells)} |"


def worst_start(rows: list[dict], variant: str) -> float | None:
    """The largest spike over seeds; None where none was measured."""
    return max(values_by_seed(rows, variant, "metrics.spike").values(), default=None)


def tokens_back(rows: list[dict], variant: str) -> float:
    """Training tokens after which the validation loss is at most the parent's (+ rounding),
    linearly between evaluations, for the slowest seed; 0 if it never was above, inf if it still
    is."""
    return max(
        (back_in(row) for row in rows if row["variant"] == variant and row["status"] == "done"),
        default=math.inf,
    )


def back_in(row: dict) -> float:
    wanted = row["parent"]["val_loss"] + 1e-3  # the float32 child of an exact start is not below
    points = list(zip(row["curve"]["val_tokens"], row["curve"]["val"], strict=True))
    if points[0][1] <= wanted:
        return 0.0
    for (t0, y0), (t1, y1) in zip(points, points[1:], strict=False):
        if y1 <= wanted:
            return t0 + (t1 - t0) * (y0 - wanted) / (y0 - y1)
    return math.inf


def compared(rows: list[dict], first: str, second: str) -> str:
    """better | worse | undecided: final losses, by the sign of the whole interval."""
    found = contrast(rows, {first: 1, second: -1}, FINAL)
    if found.n < 2 or not found.low * found.high > 0:
        return "undecided"
    return "better" if found.mean < 0 else "worse"


def at_equal_flops(rows: list[dict], best: str) -> str:
    """How `best` does against the parent trained on with the grown stage's FLOPs, if it was."""
    found = contrast(rows, {best: 1, f"{REFERENCE}-flops": -1}, FINAL)
    if found.n < 2:
        return ""
    word = compared(rows, best, f"{REFERENCE}-flops")
    return f", {word} at equal FLOPs ({found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}])"


def conclusions(rows: list[dict], variants: list[str]) -> Iterator[str]:
    grown = [v for v in variants if not v.startswith(REFERENCE)]
    starts = {v: worst_start(rows, v) for v in grown}
    safe = [v for v in grown if starts[v] is not None and starts[v] < SAFE]
    yield f"- Safe (start within {SAFE} of the parent, every seed): {', '.join(safe) or 'none'}."
    if harmful := [v for v in grown if (starts[v] or 0) >= 1]:
        yield f"- Destroys the model (a nat or more above it): {', '.join(harmful)}."
    if grown:
        best, *others = grown
        beaten = [v for v in others if compared(rows, best, v) == "better"]
        rest = [v for v in others if v not in beaten]
        yield (
            f"- Best grown at the end: {best}; decided against {', '.join(beaten) or 'none'}, "
            f"undecided against {', '.join(rest) or 'none'}; {compared(rows, best, REFERENCE)} "
            f"against the ungrown parent at equal tokens{at_equal_flops(rows, best)}."
        )
    if (fewest := min(len(values_by_seed(rows, v, FINAL)) for v in variants)) < 5:
        yield f"- {fewest} seeds: intervals are wide, and not corrected for their number."
