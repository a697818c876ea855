"""The paper's claims C1 to C8, each decided from rows: reproduced, not reproduced, inconclusive.

A claim is a conjunction of contrasts (sums over variants of weight * loss, paired by seed), each of
a kind:

    below      the sum is below 0: its 95 % CI decides
    not below  it is above -margin: "does not beat". Two one-sided tests at 5 %: above -margin, or
               surely below it
    same       it is between -margin and margin: "within": two one-sided tests (TOST)

The margin is a share of what the full recipe gains over doing nothing at the same scale, so that
"small" means small against the effect in question. Fewer than five paired seeds decide nothing. The
loss is the paper's, the mean training loss over the last tokens of the stage; the validation loss
is shown beside it and decides only where a learned operator trained on other last batches than the
rest (rows from before first_batch). p-values are Holm's, over all deciding contrasts of the stage.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.paired import Estimate, contrast, estimate, holm, p_above, p_below, values_by_seed
from analysis.rows import aligned, by_stage, matched

MIN_SEEDS = 5
ALPHA = 0.05
MARGIN_SHARE = 0.25  # of |full - nrio|
SAME = "identical by construction"  # e.g. MRIO and SRIO at the first growth
TRAIN, VAL = ("train", "metrics.train_loss"), ("val", "metrics.val_loss")
METRICS = (TRAIN, VAL)


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of losses and what the paper claims of it."""

    weights: Mapping[str, float]
    kind: str = "below"  # below | above | not below | same
    decides: bool = True  # False: shown for the reader, not part of the verdict
    metric: tuple[str, str] | None = None  # (name, path in a row) instead of the losses

    def __str__(self) -> str:
        terms = [f"{'-+'[weight > 0]} {name}" for name, weight in self.weights.items()]
        metric = f" ({self.metric[0]})" if self.metric else ""
        return " ".join(terms).removeprefix("+ ") + metric


@dataclass(frozen=True)
class Claim:
    name: str
    text: str
    contrasts: tuple[Contrast, ...]
    spread_of: str = ""  # the claim compares its first difference with this variant's seed spread
    later: bool = False  # asked of the second growth and later ones only
    least: int = MIN_SEEDS  # paired seeds below which it is inconclusive


@dataclass(frozen=True)
class Decision:
    """One contrast on one metric of one stage: the estimate, the p-value that decides it and
    Holm's, its verdict ("" where it is only shown), and the variants that have no row."""

    claim: Claim
    part: Contrast
    metric: str
    found: Estimate
    p: float = math.nan
    holm: float = math.nan
    verdict: str = ""
    missing: tuple[str, ...] = ()


def _minus(better: str, worse: str, kind: str = "below", decides: bool = True) -> Contrast:
    return Contrast({better: 1, worse: -1}, kind, decides)


def _more(a: tuple[str, str], b: tuple[str, str], decides: bool = True) -> Contrast:
    """a[0] - a[1] is further below 0 than b[0] - b[1]."""
    return Contrast({a[0]: 1, a[1]: -1, b[0]: -1, b[1]: 1}, decides=decides)


def _gradient(kind: str) -> Contrast:
    """The new:old RMS gradient of `kind` is larger with gains and shifts rotated."""
    metric = (f"gradient {kind}", f"report.gradient_rms_new_to_old.{kind}")
    return Contrast({"srio": 1, "srio-rotate-only": -1}, "above", metric=metric)


# Which variants decide which claim. Later variants only need their names to match these. What a
# learned operator is worth without its price is its difference to nrio-paid, not to nrio.
CLAIMS = (
    Claim(
        "C1",
        "The full recipe beats doing nothing and LiGO (paper: 4.2111 vs 4.2527 and 4.2606).",
        (
            _minus("full", "nrio"),
            _minus("full", "ligo"),
            _minus("ligo", "nrio", decides=False),
            _minus("ligo", "nrio-paid", decides=False),
        ),
    ),
    Claim(
        "C2",
        "Operators in order of loss: NRIO > LRIO > SRIO.",
        (
            _minus("lrio", "nrio"),
            _minus("srio", "lrio"),
            _minus("srio", "nrio", decides=False),
            _minus("lrio", "nrio-paid", decides=False),
        ),
    ),
    Claim(
        "C3",
        "Larger operators do not beat the small one.",
        (
            _minus("mrio", "srio", "not below"),
            _minus("lrio", "srio", "not below"),
            _more(("lrio", "nrio-paid"), ("srio", "nrio"), decides=False),
        ),
    ),
    Claim(
        "C4",
        "Learning the rotation (SRIO-LO) is slightly better than the closed form (SRIO-SO), "
        "within the spread between seeds.",
        (
            _minus("srio-lo", "srio", "same"),
            _more(("srio-lo", "nrio-paid"), ("srio", "nrio"), decides=False),
        ),
        spread_of="srio",
    ),
    Claim(
        "C5",
        "Convex attention with tiled FFN beats one policy everywhere.",
        (
            _minus("nrio-policies", "nrio"),
            _minus("nrio-policies", "nrio-convex"),
            _minus("nrio-policies", "nrio-tiled"),
        ),
    ),
    Claim(
        "C6",
        "SRIO and the policies carry the gain; the gate helps LRIO most and SRIO least.",
        (
            _minus("full-nogate", "nrio-policies"),  # SRIO, given the policies
            _minus("full-nogate", "srio"),  # the policies, given SRIO
            _more(("lrio-gate", "lrio"), ("nrio-gate", "nrio")),
            _more(("nrio-gate", "nrio"), ("srio-gate", "srio")),
            _minus("srio", "nrio", decides=False),
            _minus("nrio-policies", "nrio", decides=False),
            _more(("full-nogate", "nrio-policies"), ("srio", "nrio"), decides=False),
            _minus("full", "full-nogate", decides=False),  # the gate, given both
            _minus("policies-gate", "nrio-policies", decides=False),
            _minus("nrio-gate", "nrio", decides=False),
            _minus("srio-gate", "srio", decides=False),
            _minus("lrio-gate", "lrio", decides=False),
        ),
    ),
    Claim(
        "C7",
        "Growth repeats: grown again, the model still beats doing nothing and the same FLOPs from "
        "scratch (paper: 24 M to 120 M).",
        (_minus("full", "nrio"), _minus("full", "scratch-flops")),
        later=True,
    ),
    Claim(
        "C8",
        "Rotating gains and shifts raises the new:old gradient RMS ratio.",
        tuple(map(_gradient, ("attn", "ffn", "embed", "norm"))),
    ),
)


def verdict(found: Estimate, kind: str, margin: float = 0.0, least: int = MIN_SEEDS) -> str:
    """The verdict on one contrast of this kind (see the module's text)."""
    if found.by_seed and not any(found.by_seed.values()):
        return SAME
    if found.n < least:
        return f"inconclusive (n<{least})"
    if kind in ("below", "above"):
        low, high = found.low, found.high
        holds, fails = (high < 0, low > 0) if kind == "below" else (low > 0, high < 0)
    elif not margin > 0:
        return "inconclusive (no margin)"
    else:
        above, below = p_above(found, -margin) < ALPHA, p_below(found, margin) < ALPHA
        holds, fails = above, p_below(found, -margin) < ALPHA
        if kind == "same":
            holds, fails = above and below, fails or p_above(found, margin) < ALPHA
    return "reproduced" if holds else "not reproduced" if fails else "inconclusive"


def p_value(found: Estimate, kind: str, margin: float = 0.0) -> float:
    """The p-value of what a contrast of this kind claims, or, where the data speak against it, of
    its contrary; two-sided for below and above."""
    if kind in ("below", "above"):
        return found.p
    above, below = p_above(found, -margin), p_below(found, margin)
    if kind == "same":
        return min(max(above, below), p_above(found, margin), p_below(found, -margin))
    return min(above, p_below(found, -margin))


def margin_of(rows: list[dict]) -> float:
    """MARGIN_SHARE of |full - nrio| in training loss on these rows; NaN without them."""
    return MARGIN_SHARE * abs(contrast(rows, {"full": 1, "nrio": -1}, TRAIN[1]).mean)


def decisions(
    rows: list[dict], first: bool = True, asked: tuple[Claim, ...] = CLAIMS
) -> list[Decision]:
    """Every contrast of every claim on the rows of one stage, the deciding ones with Holm's p over
    all of them. first: whether this is the first growth."""
    margin, found = margin_of(rows), []
    for claim in asked:
        if not (claim.later and first):
            for part in claim.contrasts:
                found += _decide(claim, part, rows, margin)
    corrected = holm([d.p for d in found])
    return [Decision(**vars(d) | {"holm": p}) for d, p in zip(found, corrected, strict=True)]


def _decide(claim: Claim, part: Contrast, rows: list[dict], margin: float) -> list[Decision]:
    """A contrast on the loss that decides, then on the other one."""
    present = {row["variant"] for row in rows}
    missing = tuple(variant for variant in part.weights if variant not in present)
    if missing:
        return [Decision(claim, part, "", estimate({}), missing=missing)]
    if part.metric:
        metrics = (part.metric,)
    else:
        unpaired = any(row["variant"] in part.weights and not aligned(row) for row in rows)
        metrics = METRICS[::-1] if unpaired else METRICS
    made = []
    for name, path in metrics:
        estimated = contrast(rows, part.weights, path)
        if part.decides and not made:
            p = p_value(estimated, part.kind, margin)
            word = verdict(estimated, part.kind, margin, claim.least)
            made.append(Decision(claim, part, name, estimated, p, verdict=word))
        else:
            made.append(Decision(claim, part, name, estimated))
    return made


def claims(rows: list[dict], allow_missing: bool = False) -> str:
    """Markdown: every claim with its comparisons, n, mean paired difference, 95 % CI, verdict.

    Decided once per stage that holds grown models. UserError when the rows cannot be compared.
    """
    rows, notes = matched(rows, allow_missing)
    lines = ["# The paper's claims, decided from the rows of this folder", "", _RULE, ""]
    stages = grown_stages(rows)
    for i, (stage, group) in enumerate(stages):
        lines += [f"## Stage {stage}: {scale(group)}", ""]
        margin = margin_of(group)
        lines += [f"Margin: {margin:.4f} nats." if margin == margin else "No margin here.", ""]
        found = decisions(group, first=i == 0)
        for claim in CLAIMS:
            own = [d for d in found if d.claim is claim]
            lines += _claim_lines(claim, own, group) if own else []
    if not stages:
        lines += ["No grown model among the rows: every claim is not run.", ""]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def grown_stages(rows: list[dict]) -> list[tuple[int | str, list[dict]]]:
    return [(stage, group) for stage, group in by_stage(rows) if any(r["parent"] for r in group)]


_RULE = (
    "A difference is (first - second) in nats/token, paired by seed: negative means that the first "
    "is better. Verdict by the training loss over the last tokens of the stage: *reproduced* when "
    "the 95 % CI lies on the claimed side of 0, *not reproduced* when on the other side, "
    f"*inconclusive* otherwise and whenever n < {MIN_SEEDS}. *Does not beat* and *within* are "
    "decided by one-sided tests at 5 % (two of them for *within*) against a margin of "
    f"{MARGIN_SHARE:g} x the measured |full - nrio| of the stage. Intervals are per comparison; "
    "Holm p corrects the p-value of each deciding comparison for their number in the stage, and a "
    "verdict that does not survive it says so; of *does not beat* and *within* it is that of the "
    "contrary where the data speak for that. What a learned operator does apart from the steps "
    "it pays for is its difference to nrio-paid. A verdict holds at the stated scale only."
)


def scale(rows: list[dict]) -> str:
    """One line on the size of the experiment: preset, widths, parameters, tokens, corpus."""
    done = [row for row in rows if row["status"] == "done" and row["parent"]]
    row = done[0] if done else rows[0]
    parts = [f"preset {row['preset']}"]
    if done:
        parts.append(f"d {' → '.join(map(str, widths(row)))}")
        parts.append(f"{row['params']:,} parameters, {row['tokens']['stage']:,} tokens")
    corpus = row["corpus"]
    parts.append(f"corpus {corpus.get('source', '?')}, tokenizer {corpus.get('tokenizer', '?')}")
    return ", ".join(parts)


def widths(row: dict) -> list:
    """Widths of the ancestors, oldest first, and the row's own; each once."""
    lineage = row.get("lineage") or []
    found = [e["d_model"] for e in lineage if isinstance(e, dict) and "d_model" in e]
    return list(dict.fromkeys([*found, row["d_model"]]))


def _claim_lines(claim: Claim, found: list[Decision], rows: list[dict]) -> list[str]:
    lines = [f"### {claim.name}: {overall(found)}", "", claim.text, ""]
    table = [decision_row(d) for d in found if not d.missing]
    lines += [*PARTS_HEAD, *table, ""] if table else []
    lines += [f"- {d.part}: not run (no {', '.join(d.missing)})" for d in found if d.missing]
    lines += _spread_lines(claim, rows)
    if claim.name == "C6":
        lines += _share_lines(rows)
    return lines if lines[-1] == "" else [*lines, ""]


def overall(found: list[Decision]) -> str:
    """A conjunction: one failed part refutes it, an absent part leaves it undecided."""
    parts = [d for d in found if d.part.decides and (d.verdict or d.missing)]
    words = [d.verdict for d in parts if not d.missing]
    if "not reproduced" in words:
        return "not reproduced"
    if not words:
        return "not run"
    if len(words) < len(parts):
        return "not run in full"
    words = [word for word in words if word != SAME]
    undecided = [word for word in words if word != "reproduced"]
    if undecided or not words:
        return undecided[0] if undecided else SAME
    return "reproduced" + _unless_corrected(parts)


def _unless_corrected(parts: list[Decision]) -> str:
    return ", not after Holm" if any(d.holm >= ALPHA for d in parts) else ""


PARTS_HEAD = [
    "| difference | loss | n | mean | 95 % CI | Holm p | verdict |",
    "|---|---|--:|--:|---|--:|---|",
]


def decision_row(d: Decision) -> str:
    """Its line in a table under PARTS_HEAD."""
    word, corrected = "(shown only)", ""
    if d.verdict:
        word = d.verdict + (_unless_corrected([d]) if d.verdict.endswith("reproduced") else "")
        corrected = p_text(d.holm)
    return (
        f"| {d.part} | {d.metric} | {d.found.n} | {_mean(d.found)} | {interval(d.found)} | "
        f"{corrected} | {word} |"
    )


def p_text(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}" if math.isfinite(p) else "—"


def _mean(found: Estimate) -> str:
    return f"{found.mean:+.4f}" if found.n else "—"


def interval(found: Estimate) -> str:
    return f"[{found.low:+.4f}, {found.high:+.4f}]" if found.n > 1 else "—"


def _share_lines(rows: list[dict]) -> list[str]:
    """How much of the gain of full-nogate is SRIO's, added first and added last."""
    whole, alone, last = (
        contrast(rows, {better: 1, worse: -1}, TRAIN[1]).mean
        for better, worse in (
            ("full-nogate", "nrio"), ("srio", "nrio"), ("full-nogate", "nrio-policies")
        )
    )  # fmt: skip
    if not (whole < 0 and math.isfinite(alone + last)):
        return []
    return [
        f"- SRIO's share of the gain of full-nogate ({whole:+.4f}): {100 * alone / whole:.0f} % "
        f"where it comes first, {100 * last / whole:.0f} % where it comes on top of the policies"
    ]


def _spread_lines(claim: Claim, rows: list[dict]) -> list[str]:
    """Sets the difference against the standard deviation between seeds, where the claim does."""
    metric = TRAIN[1]
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
