"""The paper's claims C1 to C6, each decided from rows: reproduced, not reproduced, inconclusive.

A claim is a conjunction of contrasts (sums over variants of weight * training loss, paired by
seed), each with the sign the paper claims. One contrast is reproduced when its 95 % CI lies on
the claimed side of 0, not reproduced when it lies on the other side, and inconclusive otherwise
or with fewer than five paired seeds. The metric is the paper's: mean training loss over the last
tokens of the stage; the validation loss is shown beside it and decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.paired import Estimate, contrast, values_by_seed
from analysis.rows import by_stage, matched

MIN_SEEDS = 5
MARGIN = 0.01  # nats/token: "does not beat" allows a lead smaller than this
SAME = "identical by construction"  # e.g. MRIO and SRIO at the first growth
METRICS = (("train", "metrics.train_loss"), ("val", "metrics.val_loss"))


@dataclass(frozen=True)
class Contrast:
    """`sign` -1: the paper claims that the weighted sum of losses is below 0; +1: above."""

    weights: Mapping[str, float]
    sign: int = -1
    margin: float = 0.0  # the claim holds while the sum is above -margin (sign +1)
    decides: bool = True  # False: shown for the reader, not part of the verdict

    def __str__(self) -> str:
        terms = [f"{'-+'[weight > 0]} {name}" for name, weight in self.weights.items()]
        return " ".join(terms).removeprefix("+ ")


@dataclass(frozen=True)
class Claim:
    name: str
    text: str
    contrasts: tuple[Contrast, ...]
    spread_of: str = ""  # the claim compares its first difference with this variant's seed spread


def _below(better: str, worse: str, decides: bool = True) -> Contrast:
    return Contrast({better: 1, worse: -1}, -1, decides=decides)


def _not_below(larger: str, smaller: str) -> Contrast:
    """`larger` is not better than `smaller` by MARGIN or more: a tie holds."""
    return Contrast({larger: 1, smaller: -1}, +1, MARGIN)


def _gate_helps_more(a: str, b: str) -> Contrast:
    """The gate's effect on operator a is further below 0 than its effect on operator b."""
    return Contrast({f"{a}-gate": 1, a: -1, f"{b}-gate": -1, b: 1}, -1)


# Which variants decide which claim. Later variants only need their names to match these.
CLAIMS = (
    Claim(
        "C1",
        "The full recipe beats doing nothing and LiGO (paper: 4.2111 vs 4.2527 and 4.2606).",
        (_below("full", "nrio"), _below("full", "ligo")),
    ),
    Claim(
        "C2",
        "Operators in order of loss: NRIO > LRIO > SRIO.",
        (_below("lrio", "nrio"), _below("srio", "lrio"), _below("srio", "nrio", decides=False)),
    ),
    Claim(
        "C3",
        "Larger operators do not beat the small one.",
        (_not_below("mrio", "srio"), _not_below("lrio", "srio")),
    ),
    Claim(
        "C4",
        "Learning the rotation (SRIO-LO) is slightly better than the closed form (SRIO-SO), "
        "within the spread between seeds.",
        (_below("srio-lo", "srio"),),
        spread_of="srio",
    ),
    Claim(
        "C5",
        "Convex attention with tiled FFN beats one policy everywhere.",
        (
            _below("nrio-policies", "nrio"),
            _below("nrio-policies", "nrio-convex"),
            _below("nrio-policies", "nrio-tiled"),
        ),
    ),
    Claim(
        "C6",
        "SRIO and the policies carry the gain; the gate helps LRIO most and SRIO least.",
        (
            _below("srio", "nrio"),
            _below("nrio-policies", "nrio"),
            _gate_helps_more("lrio", "srio"),
            _below("full", "full-nogate", decides=False),
        ),
    ),
)


def verdict(difference: Estimate, sign: int, margin: float = 0.0) -> str:
    """The verdict on one contrast whose paper sign is `sign` (-1: below 0, +1: above -margin)."""
    if difference.by_seed and not any(difference.by_seed.values()):
        return SAME
    if difference.n < MIN_SEEDS:
        return f"inconclusive (n<{MIN_SEEDS})"
    low, high = sorted((sign * difference.low, sign * difference.high))
    if high < 0:
        return "not reproduced"
    return "reproduced" if low > -margin else "inconclusive"


def claims(rows: list[dict], allow_missing: bool = False) -> str:
    """Markdown: every claim with its comparisons, n, mean paired difference, 95 % CI, verdict.

    Decided once per stage that holds grown models. UserError when the rows cannot be compared.
    """
    rows, notes = matched(rows, allow_missing)
    grown = [(stage, group) for stage, group in by_stage(rows) if any(r["parent"] for r in group)]
    lines = ["# The paper's claims, decided from the rows of this folder", "", _RULE, ""]
    for stage, group in grown:
        lines += [f"## Stage {stage}: {scale(group)}", ""]
        for claim in CLAIMS:
            lines += _claim_lines(claim, group)
    if not grown:
        lines += ["No grown model among the rows: every claim is not run.", ""]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


_RULE = (
    "A difference is (first - second) in nats/token, paired by seed: negative means that the first "
    "is better. Verdict by the training loss over the last tokens of the stage: *reproduced* when "
    "the 95 % CI lies on the claimed side of 0, *not reproduced* when on the other side, "
    f"*inconclusive* otherwise and whenever n < {MIN_SEEDS}. A claim of not beating holds when the "
    f"CI excludes a lead of {MARGIN} nats or more. Intervals are per comparison, not "
    "corrected for their number. A verdict holds at the stated scale only."
)


def scale(rows: list[dict]) -> str:
    """One line on the size of the experiment: preset, widths, parameters, tokens, corpus."""
    done = [row for row in rows if row["status"] == "done" and row["parent"]]
    row = done[0] if done else rows[0]
    parts = [f"preset {row['preset']}"]
    if done:
        widths = [*_lineage_widths(row), row["d_model"]]
        parts.append(f"d {' → '.join(str(width) for width in dict.fromkeys(widths))}")
        parts.append(f"{row['params']:,} parameters, {row['tokens']['stage']:,} tokens")
    corpus = row["corpus"]
    parts.append(f"corpus {corpus.get('source', '?')}, tokenizer {corpus.get('tokenizer', '?')}")
    return ", ".join(parts)


def _lineage_widths(row: dict) -> list:
    """Widths of the ancestors, oldest first."""
    lineage = row.get("lineage") or []
    return [e["d_model"] for e in lineage if isinstance(e, dict) and "d_model" in e]


def _claim_lines(claim: Claim, rows: list[dict]) -> list[str]:
    present = {row["variant"] for row in rows}
    parts = [(part, _missing(part, present)) for part in claim.contrasts]
    lines = [f"### {claim.name}: {_overall(parts, rows)}", "", claim.text, ""]
    table = [_part_lines(part, rows) for part, missing in parts if not missing]
    if table:
        lines += [
            "| difference | loss | n | mean | 95 % CI | verdict |",
            "|---|---|--:|--:|---|---|",
        ]
        lines += [*sum(table, []), ""]
    lines += [f"- {part}: not run (no {', '.join(absent)})" for part, absent in parts if absent]
    lines += _spread_lines(claim, rows)
    return lines if lines[-1] == "" else [*lines, ""]


def _missing(part: Contrast, present: set[str]) -> list[str]:
    return [variant for variant in part.weights if variant not in present]


def _overall(parts: list[tuple[Contrast, list[str]]], rows: list[dict]) -> str:
    """A conjunction: one failed part refutes it, an absent part leaves it undecided."""
    parts = [(part, missing) for part, missing in parts if part.decides]
    found = [
        verdict(contrast(rows, part.weights, METRICS[0][1]), part.sign, part.margin)
        for part, missing in parts
        if not missing
    ]
    if "not reproduced" in found:
        return "not reproduced"
    if not found:
        return "not run"
    if len(found) < len(parts):
        return "not run in full"
    found = [word for word in found if word != SAME]
    undecided = [word for word in found if word != "reproduced"]
    return undecided[0] if undecided else "reproduced" if found else SAME


def _part_lines(part: Contrast, rows: list[dict]) -> list[str]:
    lines = []
    for name, metric in METRICS:
        found = contrast(rows, part.weights, metric)
        decides = part.decides and metric == METRICS[0][1]
        word = verdict(found, part.sign, part.margin) if decides else "(shown only)"
        lines.append(
            f"| {part} | {name} | {found.n} | {_mean(found)} | {_interval(found)} | {word} |"
        )
    return lines


def _mean(found: Estimate) -> str:
    return f"{found.mean:+.4f}" if found.n else "—"


def _interval(found: Estimate) -> str:
    return f"[{found.low:+.4f}, {found.high:+.4f}]" if found.n > 1 else "—"


def _spread_lines(claim: Claim, rows: list[dict]) -> list[str]:
    """Sets the difference against the standard deviation between seeds, where the claim does."""
    metric = METRICS[0][1]
    found = contrast(rows, claim.contrasts[0].weights, metric)
    values = list(values_by_seed(rows, claim.spread_of, metric).values())
    if not claim.spread_of or found.n < 2 or len(values) < 2:
        return []
    mean = sum(values) / len(values)
    spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    inside = "within" if abs(found.mean) <= spread else "beyond"
    return [
        f"- |mean difference| {abs(found.mean):.4f} is {inside} the spread between seeds "
        f"(standard deviation of {claim.spread_of}: {spread:.4f})"
    ]
