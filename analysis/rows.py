"""Result rows: read them, refuse what is malformed, refuse what cannot be compared.

A row is one JSON file, `results/<preset>/rows/<variant>-s<seed>[-g<stage>].json`, written when a
run ends. Rows may be compared when they share the corpus and the protocol, and, seed by seed, the
data order and the parent checkpoint; only then is a paired difference the effect of the variant.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import files
from errors import UserError

STATUSES = ("done", "diverged", "failed")
FIELDS = {
    "schema": int,
    "preset": str,
    "variant": str,
    "seed": int,
    "stage": (int, str),
    "run_id": str,
    "status": str,
    "commit": (str, type(None)),
    "dirty": bool,
    "config": dict,
    "seeds": dict,
    "manifest_hash": str,
    "corpus": dict,
    "parent": (dict, type(None)),
    "hardware": dict,
}
DONE_FIELDS = {
    "params": int,
    "d_model": int,
    "metrics": dict,
    "tokens": dict,
    "flops": dict,
    "curve": dict,
}
# What names files, folders and table cells: no separators, no blanks, no leading dot or dash.
NAME = re.compile(r"\w[\w.,:=@+-]{0,149}")
NAMES = ("preset", "variant", "stage", "run_id")
MAX_SEED, MAX_STAGE = 10**6, 1000
LOSS, TOKENS, FLOPS = (0, 1e4), (0, 1e18), (0, 1e30)  # nats/token; wider than any real run
DONE_NUMBERS = {  # where a finished row holds a number, and its range
    **dict.fromkeys(("metrics.train_loss", "metrics.val_loss", "metrics.val_loss_start"), LOSS),
    **{f"tokens.{part}": TOKENS for part in ("parent", "operator", "stage", "total")},
    **{f"flops.{part}": FLOPS for part in ("parent", "operator", "stage", "total")},
    "params": (1, 1e15),
    "d_model": (1, 1e7),
    "wall_s": (0, 1e9),
    "tokens_per_s": (0, 1e12),
}
CURVE = (("tokens", "train"), ("val_tokens", "val"))

# Settings that define the measurement: equal for all rows of a stage (matched by their last name).
PROTOCOL = ("eval_tokens", "batch_size")
WINDOW = ("last_tokens",)  # tokens that the training loss is averaged over
# Settings that may differ between two runs of one variant: they do not change what is computed.
RUN_ONLY = (
    *("seed", "init", "data", "out", "config_hash", "run_id", "parent", "parent_hash"),
    *("device", "threads", "compile", "micro_batch", "tracker", "keep", "save_every", "d_old"),
)
CHAIN = "chain from "
# trained to equal FLOPs, or on what learned operators have left: stage tokens differ by design
OWN_BUDGET = ("scratch-flops", "parent-continued-flops", "nrio-paid")


def load_rows(folder: Path) -> list[dict]:
    """Read every row of `folder`/rows (or of `folder` itself), sorted by stage, variant, seed.

    Raises UserError naming the file when a row is unreadable, too large, or not a whole row.
    """
    folder = Path(folder)
    found = sorted(_row_folder(folder).glob("[!.]*.json"))
    if not found:
        raise UserError(
            f"no rows (*.json) in {_row_folder(folder)}: no run has ended there yet; "
            "run_ablations.py --status says how far they are"
        )
    rows = [read_row(file) for file in found]
    check_case(row["run_id"] for row in rows)
    seen: dict[tuple, Path] = {}
    for file, row in zip(found, rows, strict=True):
        key = (row["stage"], row["variant"], row["seed"])
        if key in seen:
            raise UserError(
                f"{seen[key].name} and {file.name} both hold {row_name(row)}; delete one of them"
            )
        seen[key] = file
    return sorted(rows, key=lambda row: (stage_key(row["stage"]), row["variant"], row["seed"]))


def check_case(names: Iterable[str]) -> None:
    """UserError where two names are one but for upper and lower case: a file system that has none
    (macOS, Windows) keeps one of their files only."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise UserError(f"{other} and {name} differ by case only; rename or delete one of them")


def row_path(out: str | Path, run_id: str) -> Path:
    return Path(out) / "rows" / f"{run_id}.json"


def write_row(path: Path, row: dict) -> None:
    """Whole or not at all; ValueError where it holds a NaN or an infinity."""
    files.write_text(path, row_text(row) + "\n")


def row_text(value: object, indent: str = "") -> str:
    """JSON with a field per line and an array of numbers on one, so that a diff can be read."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {row_text(v, inner)}" for key, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        lines = [f"{inner}{row_text(v, inner)}" for v in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def row_name(row: dict) -> str:
    """How messages name a row: variant, seed, stage."""
    return f"{row['variant']} seed {row['seed']} (stage {row['stage']})"


def stage_key(stage: int | str) -> tuple:
    """Sort key: numbered stages first, in order, then named ones."""
    return (isinstance(stage, str), stage)


def number(row: dict, path: str) -> float:
    """The number at a dotted path such as "metrics.val_loss"; NaN when there is none."""
    value: object = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return float(value) if _is_number(value) else math.nan


def _row_folder(folder: Path) -> Path:
    if (folder / "rows").is_dir():
        return folder / "rows"
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}; run the grid first, or give (--out) a folder that it "
            f"wrote, or one of results/"
        )
    return folder


def read_row(file: Path) -> dict:
    """One whole, well-formed row; a UserError that names the file otherwise."""
    row = files.read_json(file, remedy="delete it and rerun its run")
    problem = _problem(row)
    if not problem and file.stem != row["run_id"]:
        problem = f"this is the row of {row['run_id']}"
    if problem:
        raise UserError(f"{file}: {problem}; delete it and rerun its run")
    return row


def _problem(row: dict) -> str | None:
    """What is wrong with a parsed row, or None. Unfinished runs may lack their measurements."""
    problem = _wrong_type(row, FIELDS)
    if problem:
        return problem
    if row["schema"] != 1:
        return f"schema is {row['schema']}, this program reads 1"
    for name in NAMES:
        if not NAME.fullmatch(str(row[name])):
            return f"{name} {str(row[name])[:40]!r} must be 1 to 150 letters, digits or .,:=@+-_"
    for name, most in (("seed", MAX_SEED), ("stage", MAX_STAGE)):
        if isinstance(row[name], int) and not 0 <= row[name] <= most:
            return f"{name} is {str(row[name])[:40]}; it must be in 0..{most}"
    run = f"{row['variant']}-s{row['seed']}"  # in a chain, with -g and the stage
    if row["run_id"] not in (run, f"{run}-g{row['stage']}"):
        return f"run_id {row['run_id']!r} is not that of {row_name(row)}, e.g. {run}"
    if row["status"] not in STATUSES:
        return f"status is {row['status']!r}, allowed: {', '.join(STATUSES)}"
    if row["parent"] is not None and not isinstance(row["parent"].get("hash"), str):
        return "parent.hash must be text"
    return _problem_when_done(row) if row["status"] == "done" else None


def _wrong_type(row: dict, fields: dict) -> str | None:
    for name, kind in fields.items():
        if name not in row:
            return f"field {name!r} is missing"
        value = row[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"field {name!r} is {str(value)[:40]!r}, which has the wrong type"
    return None


def _problem_when_done(row: dict) -> str | None:
    problem = _wrong_type(row, DONE_FIELDS)
    if problem:
        return problem
    for path, (low, high) in DONE_NUMBERS.items():
        if not low <= number(row, path) <= high:  # NaN where there is no number
            return f"{path} must be a number in {low:g}..{high:g} in a row with status 'done'"
    return next(filter(None, (_curve_problem(row["curve"], x, y) for x, y in CURVE)), None)


def _curve_problem(curve: dict, x: str, y: str) -> str | None:
    xs, ys = curve.get(x), curve.get(y)
    if not (_all_in(xs, *TOKENS) and _all_in(ys, *LOSS) and len(xs) == len(ys) > 0):
        return (
            f"curve.{x} and curve.{y} must be lists of equal length >= 1: tokens in "
            f"0..{TOKENS[1]:g}, losses in 0..{LOSS[1]:g}"
        )
    if any(a >= b for a, b in pairwise(xs)):
        return f"curve.{x} must rise from each point to the next"
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, int):  # JSON integers have no bound, floats do
        return not isinstance(value, bool) and abs(value) < 10**300
    return isinstance(value, float)


def _all_in(values: object, low: float, high: float) -> bool:
    return isinstance(values, list) and all(_is_number(v) and low <= v <= high for v in values)


# ---- comparability -----------------------------------------------------------------------------


def matched(rows: list[dict], allow_missing: bool = False) -> tuple[list[dict], list[str]]:
    """The rows that may be compared, with notes the reader must see. UserError if none may.

    With `allow_missing`, a stage keeps only the seeds that every variant has, and a note says so.
    Diverged and failed runs count as present: they are shown, never silently replaced.
    """
    notes, kept = comparable(rows), []
    for stage, group in by_stage(rows):
        group, stage_notes = _common_seeds(stage, group, allow_missing)
        kept += group
        notes += stage_notes + _window_notes(stage, group)
    return kept, notes + _warnings(kept)


def comparable(rows: list[dict]) -> list[str]:
    """UserError where two rows may not stand in one table, whatever seeds are still to come; notes
    that the reader must see."""
    _same_everywhere(rows)
    notes: list[str] = []
    for stage, group in by_stage(rows):
        _same_config(group)
        _same_protocol(group)
        _same_data_order(group)
        notes += _same_parent(stage, group, rows)
    return notes


def by_stage(rows: list[dict]) -> list[tuple[int | str, list[dict]]]:
    """(stage, its rows), stages in order."""
    stages = sorted({row["stage"] for row in rows}, key=stage_key)
    return [(stage, [row for row in rows if row["stage"] == stage]) for stage in stages]


def flatten(config: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested settings as (dotted name, value) pairs."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _same_everywhere(rows: list[dict]) -> None:
    for field, noun in (("manifest_hash", "corpora (manifest hashes)"), ("preset", "presets")):
        values = Counter(row[field] for row in rows)
        if len(values) > 1:
            odd = values.most_common()[-1][0]
            example = next(row for row in rows if row[field] == odd)
            raise UserError(
                f"rows of {len(values)} {noun} are mixed; e.g. {row_name(example)} has "
                f"{odd[:16]}; keep one per results folder"
            )


def _refuse_difference(group: list[dict], view, remedy: str) -> None:
    """UserError when `view(row)`, a dict, is not the same for all rows of `group`."""
    first = view(group[0]) if group else {}
    for row in group[1:]:
        other = view(row)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise UserError(
                    f"{name} is {str(first.get(name))[:40]} in {row_name(group[0])} but "
                    f"{str(other.get(name))[:40]} in {row_name(row)}; {remedy}"
                )


def _same_config(group: list[dict]) -> None:
    """All seeds of one variant ran one configuration, apart from seeds, paths and hardware."""

    def settings(row: dict) -> dict:
        return {name: value for name, value in flatten(row["config"]) if not _run_only(name)}

    for variant in sorted({row["variant"] for row in group}):
        of_variant = [row for row in group if row["variant"] == variant]
        _refuse_difference(of_variant, settings, "rerun the seeds of a variant with one config")


def _run_only(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[-1] in RUN_ONLY or parts[-1].endswith("_seed") or "seeds" in parts


def _same_protocol(group: list[dict]) -> None:
    """Same evaluation, batch size, precision and stage tokens, so only the variant differs."""
    remedy = "compare runs of one protocol only"
    _refuse_difference(group, lambda row: _settings(row, PROTOCOL) | _precision(row), remedy)
    group = [row for row in group if not _own_budget(row)]
    _refuse_difference(group, lambda row: _settings(row, WINDOW), remedy)
    done = [row for row in group if row["status"] == "done"]
    if not done:
        return
    budget = Counter(map(_spent, done)).most_common(1)[0][0]
    for row in done:
        if _spent(row) != budget:
            raise UserError(
                f"{row_name(row)} spent {_spent(row):,.0f} stage tokens, the others {budget:,.0f}; "
                "compare runs of one token budget only"
            )


def _spent(row: dict) -> float:
    """Tokens after the parent: a learned operator pays for its own from the stage."""
    return number(row, "tokens.stage") + number(row, "tokens.operator")


def _window_notes(stage: int | str, group: list[dict]) -> list[str]:
    """Says where a run with its own budget averages its training loss over another window."""
    windows = {row["variant"]: _settings(row, WINDOW).get("last_tokens") for row in group}
    usual = Counter(windows.values()).most_common(1)[0][0]
    notes = [
        f"stage {stage}: the training loss of {variant} is a mean over the last {window} tokens, "
        f"that of the others over {usual}: compare its validation loss"
        for variant, window in sorted(windows.items())
        if window != usual
    ]
    apart = sorted({row["variant"] for row in group if not aligned(row)})
    if apart:
        notes.append(
            f"stage {stage}: the last training batches of {_listed(apart)} are other ones than "
            "the rest's (rows from before aligned windows): the validation loss decides there"
        )
    return notes


def aligned(row: dict) -> bool:
    """Whether the run ended on the batches that all of its stage ended on: a learned operator,
    which pays with steps, must have begun so much later in the common order."""
    train = row["config"].get("train")
    return not number(row, "tokens.operator") > 0 or "first_batch" in (train or {})


def _settings(row: dict, names: tuple) -> dict:
    pairs = ((name.split(".")[-1], value) for name, value in flatten(row["config"]))
    return {name: value for name, value in pairs if name in names}


def _precision(row: dict) -> dict:
    return {"hardware.dtype": row["hardware"].get("dtype")}


def _own_budget(row: dict) -> bool:
    return row["variant"].split("@")[0] in OWN_BUDGET


def _same_data_order(group: list[dict]) -> None:
    for seed in sorted({row["seed"] for row in group}):
        same_seed = [row for row in group if row["seed"] == seed]
        _refuse_difference(
            same_seed, lambda row: {"seeds.data": row["seeds"].get("data")}, "pair equal data seeds"
        )


def _same_parent(stage: int | str, group: list[dict], rows: list[dict]) -> list[str]:
    """Grown rows of one seed start from one checkpoint, or each from its own last stage.

    The second case is a chain: there the parents differ by design, but not their first ancestor,
    and a note says so.
    """
    grown = [row for row in group if row["parent"] is not None]
    by_id = {row["run_id"]: row for row in rows}
    origins = {row["run_id"]: _origin(row, by_id) for row in grown}
    for seed in sorted({row["seed"] for row in grown}):
        _refuse_difference(
            [row for row in grown if row["seed"] == seed],
            lambda row: {"parent": origins[row["run_id"]]},
            "variants of a seed must start from the same parent checkpoint",
        )
    if not any(origin.startswith(CHAIN) for origin in origins.values()):
        return []
    return [
        f"stage {stage}: each variant grows from its own model of the stage before, so its "
        "differences are those of the whole chain"
    ]


def _origin(row: dict, by_id: dict[str, dict]) -> str:
    """The parent's hash; for a chained row, the hash its variant's chain started from."""
    other = by_id.get(row["parent"].get("run_id"))
    if other and (other["variant"], other["seed"]) == (row["variant"], row["seed"]):
        if stage_key(other["stage"]) < stage_key(row["stage"]):
            return CHAIN + (_origin(other, by_id) if other["parent"] else "its own start")
    return row["parent"]["hash"][:16]


def _common_seeds(
    stage: int | str, group: list[dict], allow_missing: bool
) -> tuple[list[dict], list[str]]:
    seeds: dict[str, set[int]] = {}
    for row in group:
        seeds.setdefault(row["variant"], set()).add(row["seed"])
    wanted = set().union(*seeds.values())
    missing = {variant: sorted(wanted - have) for variant, have in seeds.items() if wanted - have}
    if not missing:
        return group, []
    listing = "; ".join(f"{variant} lacks {_listed(m)}" for variant, m in sorted(missing.items()))
    if not allow_missing:
        raise UserError(
            f"stage {stage}: seeds are missing: {listing}; run them (python -m analysis.aggregate "
            "FOLDER --allow-missing compares the common seeds only)"
        )
    common = set.intersection(*seeds.values())
    if not common:
        raise UserError(f"stage {stage}: no seed is common to all variants: {listing}; run them")
    note = f"stage {stage}: only the common seeds {_listed(sorted(common))} are used; {listing}"
    return [row for row in group if row["seed"] in common], [note]


def _listed(values: list) -> str:
    return ", ".join(str(value) for value in values)


def _warnings(rows: list[dict]) -> list[str]:
    """What does not forbid a comparison but belongs beside it."""
    notes = []
    for row in rows:
        if row["status"] != "done":
            reason = row.get("reason") or "no reason recorded"
            notes.append(
                f"{row_name(row)} {row['status']}: {reason}; it is in no mean, so means and "
                "differences of this variant are over the surviving seeds"
            )
    dirty = sorted({row["variant"] for row in rows if row["dirty"]})
    if dirty:
        notes.append(f"made from an uncommitted working tree: {_listed(dirty)}")
    commits = sorted({str(row["commit"])[:10] for row in rows})
    if len(commits) > 1:
        notes.append(f"rows come from {len(commits)} commits: {_listed(commits)}")
    machines = {json.dumps(row["hardware"], sort_keys=True) for row in rows}
    if len(machines) > 1:
        notes.append(f"rows come from {len(machines)} machine setups: tokens/s are not comparable")
    return notes
