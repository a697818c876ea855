"""Every claim in one place: results/claims.md, and README's copy of its table, from committed rows.

    python -m analysis.overview

C1 to C8 are decided by analysis/claims.py in every results folder; each has one line here, that of
the largest scale which decides it, and its other scales below. C9, S5 and S6 are decided by tests,
S1 to S4 by the exactness matrix, S3 and S4 on models trained here as well, L1 to L6 (what the
literature disputes), R1 to R4 (ours) by contrasts and trends over folders. What no row decides is
*not run*, with the reason. Seeds >= 100 are never used here.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from errors import exit_on_user_error, read_command_line


@dataclass(frozen=True)
class OverviewConfig:
    """All committed rows to results/claims.md and README's table."""

    results: Path = Path("results")
    readme: Path = Path("README.md")


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(OverviewConfig, __doc__))

from scipy import stats

import files
from analysis import note
from analysis.aggregate import aligned_lines
from analysis.claims import (
    ALPHA,
    CLAIMS,
    MIN_SEEDS,
    PARTS_HEAD,
    Claim,
    Contrast,
    Decision,
    decision_row,
    decisions,
    grown_stages,
    interval,
    overall,
    p_text,
    scale,
    widths,
)
from analysis.paired import Estimate, contrast
from analysis.rows import load_rows, matched
from analysis.tuning import FIRST_SEED

TRAIN, VAL = "metrics.train_loss", "metrics.val_loss"
EXACT = 1e-10  # relative error of a float64 logit that counts as rounding
BEGIN, END = "<!-- claims: python -m analysis.overview -->\n", "<!-- end of claims -->"
PAPER = ("openwebtext", "fineweb", "fineweb-edu")  # C10's corpora


@dataclass(frozen=True)
class Study:
    """The judged rows of one stage of one results folder."""

    folder: str
    stage: int | str
    first: bool  # the first growth
    rows: list[dict]

    @property
    def preset(self) -> str:
        return self.rows[0]["preset"]

    @property
    def corpus(self) -> str:
        return self.rows[0]["corpus"].get("source", "?")

    @property
    def grown(self) -> dict:
        """A finished row of a grown variant."""
        return next(r for r in self.rows if r["parent"] and r["status"] == "done")

    @property
    def size(self) -> str:
        return f"{self.preset}, d {'→'.join(map(str, widths(self.grown)))}"

    @property
    def factor(self) -> float:
        """Width after growth over the width before; NaN where the lineage does not say."""
        before = [width for width in widths(self.grown) if width < self.grown["d_model"]]
        return self.grown["d_model"] / before[-1] if before else math.nan

    @property
    def per_parameter(self) -> float:
        """Tokens of the stage per parameter, a learned operator's included."""
        tokens = self.grown["tokens"]
        return (tokens["stage"] + tokens["operator"]) / self.grown["params"]

    def effect(self, weights: dict[str, float], metric: str = TRAIN) -> Estimate:
        return contrast(self.rows, weights, metric)


@dataclass(frozen=True)
class Line:
    """One claim at one scale."""

    name: str
    text: str
    verdict: str
    scale: str = ""
    n: str = ""
    effect: str = ""
    interval: str = ""
    holm: str = ""
    rows: str = ""
    commands: tuple[str, ...] = ()
    rank: tuple = ()
    parts: tuple[str, ...] = ()  # of a claim that only this page decides: its comparisons

    def cells(self) -> dict:
        verdict = f"**{self.verdict}**" if self.verdict in ("reproduced", "not reproduced") else (
            self.verdict
        )  # fmt: skip
        return {
            "#": self.name, "claim": self.text, "verdict": verdict, "scale": self.scale,
            "n": self.n, "effect (nats)": self.effect, "95 % CI": self.interval,
            "Holm p": self.holm, "rows": self.rows,
        }  # fmt: skip


# ---- what there is


def studies(results: Path) -> list[Study]:
    """Every stage with grown models of every folder, its judged seeds only. Another dtype on the
    same seeds is no further evidence: analysis/precision.py compares it."""
    found = []
    for path in sorted(results.glob("*/rows")):
        judged = [row for row in load_rows(path.parent) if row["seed"] < FIRST_SEED]
        if not judged or judged[0]["preset"].endswith("-bf16"):
            continue
        rows, _ = matched(judged, allow_missing=True)
        for i, (stage, group) in enumerate(grown_stages(rows)):
            if any(row["parent"] and row["status"] == "done" for row in group):
                found.append(Study(path.parent.name, stage, i == 0, group))
    return found


def weight(study: Study) -> float:
    """How much a scale tells: parameters times tokens of the stage."""
    return study.grown["params"] ** 2 * study.per_parameter


# ---- lines

# what a claim asks of its rows beside the variants
NEEDS = {"C7": "after a second growth; preset mini-chain has it"}
NEEDS |= dict.fromkeys(("L4", "L5"), "at growth factor 2; preset tiny-x2 has them")


def paper_lines(all_studies: list[Study], asked: tuple[Claim, ...] = CLAIMS) -> list[Line]:
    """One line per claim and scale at which any of its parts ran; one "not run" line elsewhere."""
    lines = []
    decided = [(study, decisions(study.rows, study.first, asked)) for study in all_studies]
    for claim in asked:
        own = []
        for study, found in decided:
            parts = [d for d in found if d.claim is claim]
            if any(d.verdict for d in parts):
                own.append(decision_line(claim, study, parts))
        variants = ", ".join(sorted({v for c in claim.contrasts for v in c.weights}))
        where = NEEDS.get(claim.name, "together")
        lines += own or [Line(claim.name, claim.text, f"not run (no rows of {variants} {where})")]
    return lines


def decision_line(claim: Claim, study: Study, parts: list[Decision]) -> Line:
    """The claim at one scale; the numbers are those of the part that the verdict hangs on."""
    word, ran = overall(parts), [d for d in parts if d.verdict]
    least, more = min(d.found.n for d in ran), ""
    if word == "not run in full":
        undecided = (d.verdict for d in ran if d.verdict != "reproduced")
        more = f"; what ran: {next(undecided, 'reproduced')}"
    elif least < MIN_SEEDS and word.endswith("reproduced"):
        more = f" (n = {least})"
    last = next((d for d in ran if d.verdict == word), max(ran, key=lambda d: _p(d.holm)))
    known = word.startswith(("reproduced", "not reproduced"))
    n = max(d.found.n for d in ran)
    effect = f"{last.part}: {last.found.mean:+.4f}" if last.found.n else ""
    return Line(
        claim.name, claim.text, word + more, study.size, str(last.found.n),
        effect + free_of_price(parts), interval(last.found), p_text(last.holm),
        f"[{study.folder}](results/{study.folder}/claims.md)", commands_of(study),
        (known, n >= claim.least, word != "not run in full", weight(study), n, len(study.rows)),
        () if claim in CLAIMS else tuple(decision_row(d) for d in parts if not d.missing),
    )  # fmt: skip


def free_of_price(parts: list[Decision]) -> str:
    """What a learned operator does apart from the steps that it pays for, where a claim shows it
    beside the closed form."""
    for d in parts:
        if "nrio-paid" in d.part.weights and len(d.part.weights) == 4 and d.found.n > 1:
            return f" (apart from the steps it pays for: {d.found.mean:+.4f} {interval(d.found)})"
    return ""


def _p(p: float) -> float:
    return p if math.isfinite(p) else -1.0


def commands_of(study: Study) -> tuple[str, ...]:
    """Of all its rows, the one with most of them first."""
    return tuple(c for c, _ in Counter(str(r.get("command")) for r in study.rows).most_common())


BY_TEST = (
    Line("C9", "Nothing remains at run time after folding and the ramp.", "reproduced (by test)",
         rows="tests/test_fold.py::test_a_grown_model_is_a_plain_gpt"),
    Line("S5", "[x, x] tiling scrambles heads.", "reproduced (by test)",
         rows="tests/test_lossless.py::test_tiling_scrambles_heads"),
    Line("S6", "Norms of the stream are preserved.", "reproduced (by test)",
         rows="tests/test_lossless.py::test_norm_gauge_keeps_the_streams_norm"),
)  # fmt: skip


def corpora_line(all_studies: list[Study]) -> Line:
    """C10: full - nrio at every scale that has five seeds, by corpus, at the first growth."""
    text = "Holds on OpenWebText, FineWeb and FineWeb-Edu."
    found: dict[str, list[tuple[Study, Estimate]]] = {}
    for study in sorted(all_studies, key=weight, reverse=True):
        effect = study.effect({"full": 1, "nrio": -1})
        if study.first and effect.n >= MIN_SEEDS:
            found.setdefault(study.corpus, []).append((study, effect))
    if not found:
        return Line("C10", text, "not run (no corpus has five seeds of full and nrio)")
    holds = all(e.high < 0 for corpus in PAPER for _, e in found.get(corpus, ()))
    papers = all(corpus in found for corpus in PAPER)
    told = ", ".join(
        f"{corpus} in {sum(e.high < 0 for _, e in each)} of {len(each)} experiments"
        for corpus, each in found.items()
    )
    verdict = ("reproduced" if holds else "not reproduced") if papers else (
        f"not run on these (a hub and a GPU are needed); full beats nrio on {told}"
    )  # fmt: skip
    ends = [(corpus, pair) for corpus, each in found.items() for pair in extremes(each)]
    return Line(
        "C10", text, verdict, " / ".join(s.size for _, (s, _) in ends),
        str(min(e.n for each in found.values() for _, e in each)),
        " to ".join(f"{corpus}, {s.folder}: {e.mean:+.4f}" for corpus, (s, e) in ends),
        " to ".join(interval(e) for _, (_, e) in ends),
        rows=", ".join(f"[{s.folder}](results/{s.folder}/claims.md)" for _, (s, _) in ends),
    )  # fmt: skip


def extremes(each: list[tuple[Study, Estimate]]) -> list[tuple[Study, Estimate]]:
    """The smallest and the largest effect; one where there is one."""
    ranked = sorted(each, key=lambda pair: pair[1].mean)
    return ranked[:1] + ranked[1:][-1:]


S3 = "BERT with GELU is exact with its own scales, so lossless in MLM accuracy."
S4 = "RoPE is only approximate by pairwise repeat; training recovers it quickly."


def note_lines(matrix: Path, trained: Path) -> list[Line]:
    """S1 to S4 from the exactness matrix (float64, relative to the logits' spread); S3 and S4 also
    from models trained here, which decide where the matrix agrees."""
    mlm, rope = (note.rows_of(trained, part) for part in ("mlm", "rope"))
    lines = matrix_lines(matrix)
    agrees = {line.name: line.verdict == "reproduced" for line in lines}
    lines += [mlm_line(mlm)] if mlm and agrees["S3"] else []
    return lines + ([rope_line(rope)] if rope and agrees["S4"] else [])


def mlm_line(rows: list[dict]) -> Line:
    """S3: reproduced where no seed's accuracy moves, by our scales or by the note's."""
    forms = ("lossless", "note's scales")
    moved = [v for form in forms
             for v in note.mlm(rows, form, "accuracy", "parent").by_seed.values()]  # fmt: skip
    loss = note.mlm(rows, "lossless", "loss", "parent")
    literal = [note.mlm(rows, note.LITERAL, what, "parent") for what in ("accuracy", "loss")]
    effect = (
        f"accuracy {max(moved, key=abs):+.4f}, loss {loss.mean:+.4f}; literal extra √2: accuracy "
        f"{literal[0].mean:+.4f}, loss {literal[1].mean:+.4f}"
    )
    verdict = "not reproduced" if any(moved) else "reproduced"
    return trained_line("S3", S3, verdict, "BERT trained here", rows, effect, literal[1])


def rope_line(rows: list[dict]) -> Line:
    """S4: reproduced where growth costs loss and every seed is soon back at its parent's."""
    start = note.gap(rows, "recomputed", 0)
    worst = max(note.steps_back(row, "recomputed") for row in rows)
    quick = note.QUICK * rows[0]["config"]["parent_steps"]
    trained = max(map(int, rows[0]["found"]["curves"]["recomputed"]))
    effect = (
        f"start {start.mean:+.4f}, after {trained} steps "
        f"{note.gap(rows, 'recomputed', trained).mean:+.4f}"
    )
    if start.n < MIN_SEEDS:
        verdict = f"approximate: reproduced; recovery: inconclusive (n<{MIN_SEEDS})"
    elif worst > trained and trained < quick:
        verdict = f"approximate: reproduced; recovery: inconclusive ({trained} steps are too few)"
    else:
        verdict = "reproduced" if start.low > 0 and worst <= quick else "not reproduced"
    return trained_line("S4", S4, verdict, "RoPE GPT trained here", rows, effect, start)


def trained_line(name, text, verdict, model: str, rows, effect: str, found: Estimate) -> Line:
    """A line on rows of checks/note.py; it stands above the matrix' own."""
    link = "[note](results/note/note.md), [exactness](results/exactness.md)"
    return Line(name, text, verdict, f"{model}, d 64→128", str(len(rows)), effect, interval(found),
                rows=link, commands=(rows[0]["command"],), rank=(True,))  # fmt: skip


def matrix_lines(matrix: Path) -> list[Line]:
    if not matrix.exists():
        return [Line(f"S{i}", "", "not run (no results/exactness.csv)") for i in range(1, 5)]
    with open(matrix, newline="") as file:
        cells = [c for c in csv.DictReader(file) if c["dtype"] == "float64" and c["max_rel_dlogit"]]
    cells = [c for c in cells if c["method"] == "lossless"]
    default = [c for c in cells if c["option"] == ""]
    bert = [c for c in default if c["model"].startswith("BERT")]
    curved = [c for c in bert if c["activation"] != "relu"]
    rope = [c for c in cells if "recompute" in c["option"]]
    unrotated = ("ours", "GPT-2", "T5", "mT5")
    plain = [c for c in default if c["model"].startswith(unrotated) and "RoPE" not in c["model"]]
    return [
        exact_line("S1", "GPT and T5 are exact with any activation, GLU included.", plain),
        exact_line("S2", "BERT with ReLU is exact.", [c for c in bert if c not in curved]),
        exact_line("S3", S3, curved),
        exact_line("S4", S4, rope, exact=False),
    ]


def exact_line(name: str, text: str, cells: list[dict], exact: bool = True) -> Line:
    """Reproduced when all cells are exact to rounding, or, with exact False, when none is."""
    errors = [float(c["max_rel_dlogit"]) for c in cells]
    if not errors:
        return Line(name, text, "not run (no such cell in the matrix)")
    holds = all((error < EXACT) == exact for error in errors)
    span = f"{min(errors):.1e} to {max(errors):.1e} of the logits' spread"
    return Line(name, text, "reproduced" if holds else "not reproduced", "untrained, width 32",
                f"{len(errors)} cells", span, rows="[exactness](results/exactness.md)")  # fmt: skip


def _below(better: str, worse: str, metric: tuple[str, str] | None = None) -> Contrast:
    return Contrast({better: 1, worse: -1}, metric=metric)


LAG = ("loss after 16 steps", "lag.16")
VALIDATION = ("validation loss", VAL)
# One line per statement that only needs contrasts within a folder.
DISPUTED = (
    Claim("L1", "Preserving the function is not needed: plain growth (SZP) beats elaborate ones.",
          (_below("szp", "full"), _below("szp", "lossless-pad"))),
    Claim("L4", "Exact copies win at short lag, others at long.",
          (_below("lossless", "nrio", LAG), _below("nrio", "lossless"))),
    Claim("L5", "RMS-keeping copies with asymmetric reset and re-warm-up win at 2×.",
          (_below("sparkling", "nrio"), _below("sparkling", "full"))),
)  # fmt: skip
PRETRAINED = Claim(
    "L6", "On a pretrained model the operators' order is another one: exact starts win.",
    (_below("lossless-pad", "nrio"), _below("lossless-pad", "srio"),
     _below("lossless-pad", "full")),
    least=3,  # hours a seed on a CPU
)  # fmt: skip


def _ours(recipe: str, *told: Contrast) -> tuple[Contrast, ...]:
    """What a recipe of ours must beat: the paper's, the policies treated alike, the baselines."""
    beaten = ("full", "policies-asymmetric", "nrio", "scratch-flops")
    return tuple(_below(recipe, v) for v in beaten) + tuple(replace(t, decides=False) for t in told)


KEPT = "with Adam's state kept for old coordinates, and new ones alone warmed up, beats the "
KEPT += "recipe, the policies with the same, doing nothing, and the FLOPs from scratch."
OURS = (
    Claim("R1", f"Ours: the full recipe {KEPT}",
          _ours("full-asymmetric", _below("policies-asymmetric", "nrio-policies"))),
    Claim("R2", f"Ours: an exact start (padding, free new gains of 4, policies) {KEPT}",
          _ours("pad-gain-asymmetric", _below("pad-gain-asymmetric", "full-asymmetric"),
                _below("pad-gain-asymmetric", "pad-gain-policies"),
                _below("pad-gain-policies", "full"))),
    Claim("R3", "Ours: one number, free new gains of 4 in place of 1, lifts a plain exact start "
          "above doing nothing and the recipe.",
          tuple(_below("pad-gain", v) for v in ("lossless-pad", "nrio", "full"))
          + (Contrast({"pad-gain-asymmetric": 1, "pad-gain": -1}, decides=False),)),
    # by validation loss: more steps end on other batches
    Claim("R4", "Ours: widening pays, by that start: it beats the ungrown parent trained on with "
          "the same FLOPs.",
          (_below("pad-gain", "parent-continued-flops", VALIDATION),)
          + tuple(Contrast({v: 1, "parent-continued-flops": -1}, decides=False, metric=VALIDATION)
                  for v in ("pad-gain-asymmetric", "nrio", "full"))),
)  # fmt: skip


def asked_of(study: Study) -> list[tuple[Claim, ...]]:
    """The claims that a study may decide; Holm's correction is within each group."""
    if study.preset.startswith("pretrained"):
        return [CLAIMS, (PRETRAINED,)]
    return [CLAIMS, DISPUTED[:1], *[DISPUTED[1:]] * (study.factor == 2), OURS]


def disputed_lines(all_studies: list[Study]) -> list[Line]:
    groups = (DISPUTED[:1], DISPUTED[1:], OURS)
    trained = [s for s in all_studies if OURS in asked_of(s)]
    lines = [factor_line(trained), length_line(trained)]
    for group in groups:
        lines += paper_lines([s for s in trained if group in asked_of(s)], group)
    pretrained = [s for s in all_studies if s not in trained]
    lines += paper_lines(pretrained, (PRETRAINED,))
    return [replace(line, rows=line.rows.replace("/claims.md", "/table.md")) for line in lines]


def family(all_studies: list[Study], *presets: str) -> list[Study]:
    """The first growths of presets with these beginnings that compare growing with scratch."""
    return [
        s for s in all_studies
        if s.first and s.preset.startswith(presets)
        and s.effect({"nrio": 1, "scratch-flops": -1}).n >= MIN_SEEDS
    ]  # fmt: skip


def factor_line(all_studies: list[Study]) -> Line:
    """L2: nrio - scratch-flops (equal FLOPs) against the growth factor, from tiny-x* alone."""
    text = "Above some growth factor scratch at equal FLOPs wins; 2× is the most reliable."
    found = {}
    for s in family(all_studies, "tiny-x"):
        found[s.factor] = (s, s.effect({"nrio": 1, "scratch-flops": -1}))
    if len(found) < 3 or 2.0 not in found:
        return Line("L2", text, "not run (tiny-x* presets at three factors or more, 2× among them)")
    largest = found[max(found)][1]
    most = min(found, key=lambda f: found[f][1].mean)
    if largest.low > 0:
        verdict = "reproduced" if most == 2 else f"not reproduced (the best factor is {most:g})"
    else:
        wins = "growing still wins" if largest.high < 0 else "undecided"
        verdict = f"not reproduced up to {max(found):g}× ({wins} there)"
    return series_line("L2", text, verdict, {f"{f:g}×": p for f, p in sorted(found.items())})


def series_line(name: str, text: str, verdict: str, found: dict) -> Line:
    """A line of several studies: label -> (study, effect)."""
    links = ", ".join(f"[{s.folder}](results/{s.folder}/table.md)" for s, _ in found.values())
    return Line(
        name, text, verdict, ", ".join(dict.fromkeys(s.preset for s, _ in found.values())),
        str(min(e.n for _, e in found.values())),
        "; ".join(f"{label} {e.mean:+.3f}" for label, (_, e) in found.items()),
        "; ".join(interval(e) for _, e in found.values()), rows=links,
    )  # fmt: skip


def length_line(all_studies: list[Study]) -> Line:
    """L3: nrio - scratch-flops against log2 tokens per parameter, mini at several of them;
    ladder-48 is mini at 5."""
    text = "The gain over scratch fades as tokens per parameter grow."
    chosen = family(all_studies, "mini", "ladder-48")
    chosen = [s for s in chosen if "stable" not in s.preset]
    found = {s.per_parameter: (s, s.effect({"nrio": 1, "scratch-flops": -1})) for s in chosen}
    if len(found) < 3:
        return Line("L3", text, "not run (mini at three numbers of tokens per parameter or more)")
    slope, half, p = trend([(math.log2(x), e) for x, (_, e) in found.items()])
    verdict = "inconclusive" if p >= ALPHA else "reproduced" if slope > 0 else "not reproduced"
    line = series_line("L3", text, verdict, {f"{x:.0f}": found[x] for x in sorted(found)})
    effect = f"{slope:+.4f} per doubling ({line.effect})"
    ends = f"[{slope - half:+.4f}, {slope + half:+.4f}]"
    return replace(line, effect=effect, interval=ends, holm=p_text(p))


def trend(points: Iterable[tuple[float, Estimate]]) -> tuple[float, float, float]:
    """Slope of the effect on x over all seeds of all points, half its 95 % CI, two-sided p: least
    squares with the seeds as independent repetitions."""
    pairs = [(x, y) for x, effect in points for y in effect.by_seed.values()]
    fit = stats.linregress(*zip(*pairs, strict=True))
    return fit.slope, float(stats.t.ppf(0.975, len(pairs) - 2)) * fit.stderr, fit.pvalue


# ---- the page


def lines_of(results: Path) -> list[Line]:
    """Every line, in the order of the claims."""
    found = studies(results)
    lines = [*paper_lines(found), corpora_line(found), *BY_TEST, *note_lines(
        results / "exactness.csv", results / "note"), *disputed_lines(found)]  # fmt: skip
    return sorted(lines, key=lambda line: ("CSLR".index(line.name[0]), int(line.name[1:])))


def heads(lines: list[Line]) -> list[Line]:
    """One line per claim: the largest scale that decides it; it says how the others went."""
    best = []
    for name in dict.fromkeys(line.name for line in lines):
        own = [line for line in lines if line.name == name]
        head = max(own, key=lambda line: line.rank)
        others = {line.verdict for line in own if line.rank and line.rank[:2][-1]} - {head.verdict}
        told = ", ".join(sorted(v.replace("not run in full; what ran:", "in part") for v in others))
        more = f" (elsewhere: {told})" if others else ""
        best.append(replace(head, verdict=head.verdict + more))
    return best


def page(lines: list[Line], all_studies: list[Study]) -> str:
    """results/claims.md."""
    text = [
        "# Every claim",
        "",
        "Generated by `python -m analysis.overview` from the committed rows. A difference is "
        "paired by seed, of the training loss over the stage's last tokens, negative is better for "
        "the first; the effect shown is the part that the verdict hangs on. *Reproduced*: the 95 % "
        "CI of every part lies on the claimed side; *not reproduced*: one lies on the other side; "
        f"*inconclusive* otherwise, and with fewer than {MIN_SEEDS} seeds (L6: {PRETRAINED.least}, "
        "since a seed takes long; S3: any, since no seed may move); what *does not beat* and "
        "*within* ask: each folder's claims.md. Holm p corrects for all comparisons that decide "
        "claims of one kind at one scale; *not after Holm*: one has a p of 0.05 or more then. One "
        "line per claim: the largest scale that decides it, *elsewhere* what other folders with "
        "enough seeds say, *in part* where some comparisons did not run; all follow.",
        "",
        *relative(aligned_lines([line.cells() for line in heads(lines)])),
        "",
    ]
    for name in dict.fromkeys(line.name for line in lines):
        own = [line for line in lines if line.name == name and line.scale]
        if len(own) > 1 or any(line.commands for line in own):
            text += [f"## {name}: {own[0].text}", ""]
            cells = [{k: v for k, v in line.cells().items() if k not in ("#", "claim")}
                     for line in sorted(own, key=lambda line: line.rank, reverse=True)]  # fmt: skip
            text += [*relative(aligned_lines(cells)), ""]
            for line in own:
                text += [*comparisons(line), ""] if line.parts else []
            commands = dict.fromkeys(c for line in own for c in line.commands)
            text += [*(f"- `{command}`" for command in commands), ""]
    text += ["## Scales", ""]
    text += [f"- {s.folder}, stage {s.stage}: {scale(s.rows)}" for s in all_studies]
    return "\n".join(text).rstrip() + "\n"


def comparisons(line: Line) -> list[str]:
    """The table of a claim's comparisons at one scale."""
    return [f"{line.scale}:", "", *PARTS_HEAD, *line.parts]


def relative(table: list[str]) -> list[str]:
    """Links of README as a file inside results/ needs them."""
    return [line.replace("](results/", "](") for line in table]


def in_readme(readme: str, table: list[str]) -> str:
    """README with its marked block replaced."""
    head, _, rest = readme.partition(BEGIN)
    _, found, tail = rest.partition(END)
    return head + BEGIN + "\n".join(table) + "\n" + END + tail if found else readme


def main() -> None:
    cfg = read_command_line(OverviewConfig, __doc__)
    lines = lines_of(cfg.results)
    files.write_text(cfg.results / "claims.md", page(lines, studies(cfg.results)))
    if cfg.readme.is_file():
        kept = ("#", "claim", "verdict", "effect (nats)", "95 % CI", "rows")
        cells = [{key: line.cells()[key] for key in kept} for line in heads(lines)]
        table = aligned_lines(cells)
        files.write_text(cfg.readme, in_readme(cfg.readme.read_text(), table))
    print(*(f"{line.name:4} {line.verdict}" for line in heads(lines)), sep="\n")


if __name__ == "__main__":
    exit_on_user_error(main)
