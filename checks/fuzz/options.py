"""Bad values of the command lines: every option of train.py, run_ablations.py, grow.py and
data/prepare.py, given numbers, words and paths that nobody should give."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from checks.fuzz.judge import Case
from checks.fuzz.world import run_arguments

Cases = st.SearchStrategy[Case]
LONG, HUGE = "x" * 100_000, "9" * 30
WHOLE = f"nan inf -1 1.5 abc 1e3 {HUGE} -{HUGE} 0x10 1,000".split() + [""]
REAL = "nan inf -inf -1 1e400 abc --5 1/2 0,5".split() + [""]
TEXT = [*"nope Cosine ../../etc/passwd 日本語 %s%n \udcff".split(), " ", "'; rm -rf x; '", LONG]
PATHS = "missing file . full /dev/null file/below loop dangling 日本語/☃ \udcff /proc/none fifo"
PATHS = [*PATHS.split(), "", "x" * 300, "x/" * 3000]  # bad_places makes what stands there
CAN_BE_MADE = ("missing", "日本語/☃", "\udcff", "dangling")  # a new folder may be written there
VALUES = {int: WHOLE, float: REAL, str: TEXT, Literal: TEXT, Path: PATHS}


def bad_places(folder: Path) -> None:
    """The things that PATHS names."""
    (folder / "file").write_text("a file")
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("not ours")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere/at/all")
    os.mkfifo(folder / "fifo")


def blames(option: str, value: str) -> tuple[str, ...]:
    """The line must show the option or the value."""
    name = option.strip("-").split(".")[-1].replace("-", "_")
    path = value.removeprefix("file:")
    escaped = value.encode("unicode_escape", "surrogatepass").decode()
    shown = [text[:20] for text in (value, path, escaped) if text.strip(" .")]
    shown += [" . "] if value in ("", ".") else []  # both are this folder
    shown += [path.rpartition("/")[0][:20]] if "/" in path.strip("/") else []
    shown += ["the model"] if option.startswith("--model.") else []
    shown += ["/proc"] if value.startswith("/proc") else []
    shown += ["operator"] if name == "method" else []
    return (name, name.replace("_", "-"), *shown)


def odd_values(config: type, prefix: str = "--") -> Iterator[tuple[str, str]]:
    """(option, value) for every field of a config, by its type; nested configs, too."""
    for name, hint in get_type_hints(config, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        name = next((note.name for note in notes if getattr(note, "name", None)), name)
        option = f"{prefix}{name.replace('_', '-')}"
        if dataclasses.is_dataclass(kind):
            yield from odd_values(kind, f"{option}.")
        kinds = {get_origin(k) or k for k in (kind, *get_args(kind))}  # int | None is both
        values = next((VALUES[k] for k in VALUES if k in kinds), ())
        yield from ((option, value) for value in values)


def replaced(arguments: tuple[str, ...], option: str, *value: str) -> tuple[str, ...]:
    """The arguments with one option changed or added."""
    if option in arguments:
        at = arguments.index(option)
        return arguments[:at] + (option, *value) + arguments[at + 2 :]
    return (*arguments, option, *value)


def each(option: str, values: list[str] | str) -> list[tuple[str, str]]:
    return [(option, v) for v in (values.split() if isinstance(values, str) else values)]


def cases(
    group: str, program: str, base: tuple[str, ...], pairs: list[tuple[str, str]],
    more: Callable[[str, str], tuple[str, ...]] = lambda option, value: (),
) -> Cases:  # fmt: skip
    """`program` with one option of `base` changed to what must be refused; the line shows option or
    value, or what `more` says."""

    def case(pair: tuple[str, str]) -> Case:
        option, value = pair
        given = (*blames(option, value), *more(option, value))
        arguments, name = replaced(base, option, value), f"{program} {option} {value[:60]!r}"
        return Case(group, name, f"{program}:main", arguments, given, bad_places)

    return st.sampled_from(pairs).map(case)


# ---- train.py


def training(world: Path) -> Cases:
    """Options of train.py. Free words (run_id), new folders and integers that Python reads run."""
    from training.config import TrainConfig

    sizes = ("vocab-size", "block-size", "n-layer", "n-head", "head-dim", "d-model", "d-ff")
    pairs = [p for p in odd_values(TrainConfig) if p[0] != "--model.rope-theta"]
    pairs += [(f"--model.{size}", str(10**n)) for size in sizes for n in (9, 12, 18)]
    pairs += each("--lr", "0 100") + each("--device", "cuda:999 cuda meta cpu:7 mps")
    pairs += [("--beta1", "1"), ("--steps", "0"), ("--clip", "1e-9")]
    pairs += [("--data", str(world / "texts")), ("--init", str(world / "corpus"))]

    def make(folder: Path) -> None:
        (folder / "corpus").symlink_to(world / "corpus")
        bad_places(folder)

    def may_run(case: Case) -> Case:
        option, value = case.name.split()[1], case.arguments[-1]
        out = case.arguments[1]  # --out comes first
        runs = option == "--run-id" or (option, value) == ("--lr", "100") or value == "1e-9"
        runs |= option == "--out" and out in CAN_BE_MADE
        check = (lambda folder: check_run(folder / out)) if runs else None
        return dataclasses.replace(case, make=make, check=check, writes=(out.split("/")[0],))

    return cases("training options", "train", run_arguments(), pairs).map(may_run)


def check_run(out: Path) -> None:
    """A finished run: a summary with a finite loss, or one that says why it diverged."""
    done = json.loads((out / "done.json").read_text())
    assert done["status"] == "diverged" or np.isfinite(done["metrics"]["val_loss"]), done


# ---- run_ablations.py

SEEDS = [*f"x -1 0- - 5-3 0,,1 1.5 0-1000 0-99999999 {HUGE} 0-4;ls ² 1-2-3 --".split()]
SEEDS += [" 0", "0\n", LONG]
ONLY = """nope srio@ srio@=  srio@epsilon srio@epsilon=nan srio@epsilon=1e999 srio@epsilon=-3
    srio@epsilon= srio@lr=nan srio@lr=-1 srio@lr=inf srio@lr=x srio@clip=nan srio@seed=5
    srio@model=3 srio@gate=maybe srio@optimizer=what srio@learn_steps=-1 srio@operator=eval
    srio@epsilons=a,b srio@epsilons=nan srio@std=inf srio@noise_db=x srio@noise_db=nan
    lossless-pad@noise_db=nan scratch@epsilon=0.5 srio@schedule=what srio@../../x=1
    srio@lr=1e-3@lr=../x srio@std=-1 srio@dirichlet=0 srio@heads=wider srio@attn=what
    srio@norm=none srio@min_lr_ratio=2 srio@weight_decay=-1 srio@rotate_weights=2
    ../../etc/passwd srio@epsilon_reading=aloud srio@cross=x srio@gauge=x srio@rope=x
    srio@noise=-1 srio@learn_batch=0 srio@learn_lr=inf srio@learn_weight_decay=nan 日本語""".split()
ONLY += "srio@lr=0.001@lr=0.002 srio@epsilon=0.5@gate=true@epsilon=0.50".split()  # twice
ONLY += [LONG, "srio@" + "lr=0.001@" * 40 + "lr=0.001", "srio@lr=1e-3" + "0" * 300]
SOURCES = [*TEXT, *"file: file:missing file:/dev/null file:fifo file:full file:file".split()]


def grid(world: Path) -> Cases:
    """Options of run_ablations.py. All must be refused before anything is prepared or written."""
    local = ("--local", "--preset", "smoke", "--source", f"file:{world / 'texts'}")
    local += ("--corpora", "corpora", "--out", "out")
    pairs = each("--seeds", SEEDS) + each("--only", ONLY) + each("--preset", TEXT)
    pairs += each("--jobs", WHOLE) + each("--source", SOURCES)
    good = (*CAN_BE_MADE, "", ".", "full", "/proc/none")
    pairs += each("--out", [v for v in PATHS if v not in good])
    pairs += each("--corpora", "file /dev/null loop file/below /proc/none")
    pairs += each("--summarize", [v for v in PATHS if v])

    def more(option: str, value: str) -> tuple[str, ...]:
        keys = [part.split("=")[0].rstrip("s") for part in value.split("@")[1:4]]
        other = {"--source": "preset", "--summarize": "rows"}
        return (*filter(None, keys), option, other.get(option, option))

    return cases("grid options", "run_ablations", local, pairs, more)


# ---- grow.py and data/prepare.py


def growth(world: Path) -> Cases:
    """Options of grow.py, on one of our checkpoints and on a Hugging Face folder."""
    from grow import GrowArgs

    pairs = [pair for pair in odd_values(GrowArgs) if pair[0] not in ("--src", "--out", "--seed")]
    pairs = [pair for pair in pairs if not pair[0].startswith("--learn")]  # are no options here
    pairs += each("--factor", "1 0.5 1.01 1e9 1e18 1e300") + each("--epsilon", "7 -7")
    pairs += each("--width", f"0 8 9 {10**9} {10**18}") + each("--seed", f"-1 x {HUGE}")
    pairs += each("--out", [v for v in PATHS if v not in CAN_BE_MADE])
    pairs += each("--shard-gb", "0 -1 nan")
    allowed = (("--noise", "-1"), ("--epsilon", "-1"))  # dB; the range's end at factor 2
    pairs = [pair for pair in pairs if pair not in allowed]

    auto, srio = ("--factor", "2", "--method", "auto"), ("--factor", "2", "--method", "srio")
    bases = dict.fromkeys(("--epsilon", "--attn", "--ffn", "--embed"), srio) | {"--width": auto[2:]}

    def of(source: Path, pairs: list[tuple[str, str]]) -> Cases:
        by_base = {}
        for pair in pairs:
            by_base.setdefault(bases.get(pair[0], auto), []).append(pair)
        given = ("growth options", "grow")
        return st.one_of(
            [cases(*given, (str(source), "--out", "wide", *b), p) for b, p in by_base.items()]
        )

    ours = [pair for pair in pairs if pair[0] != "--shard-gb"]  # a checkpoint of ours has no shards
    parent = world / "grid" / "runs" / "parent-s0" / "final"
    return of(parent, ours) | of(world / "hf", pairs)


def preparation(world: Path) -> Cases:
    """Options of data/prepare.py."""
    from data.prepare import PrepareConfig

    free = ("--text-field", "--revision", "--source", "--out")
    pairs = [pair for pair in odd_values(PrepareConfig) if pair[0] not in free]
    pairs += each("--tokenizer", f"bpe: bpe:0 bpe:-1 bpe:256 bpe:65536 bpe:{HUGE} bpe:2e3 bpe:²")
    pairs += each("--val-fraction", "0 0.6 1e-300 1") + each("--block-size", f"0 {10**15}")
    pairs += [("--shard-tokens", "999")]
    pairs += each("--source", [*TEXT, "file:", "file:missing", "file:fifo", "file:full"])
    pairs += each("--source", f"file:/dev/null file:loop file:**/nothing file:[ file:{LONG}")
    pairs += each("--out", [v for v in PATHS if v not in (*CAN_BE_MADE, "")])
    base = ("--source", f"file:{world / 'texts'}", "--tokenizer", "byte", "--out", "corpus")
    base += ("--val-fraction", "0.2")

    return cases("preparation options", "data.prepare", base, pairs)
