"""Bad values of the command lines: every option of train.py, run_ablations.py, grow.py and
data/prepare.py, given numbers, words and paths that nobody should give."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from checks.fuzz.judge import Case, Cases, command
from checks.fuzz.world import run_arguments

Pairs = list[tuple[str, str]]  # option, value
LONG, HUGE = "x" * 100_000, "9" * 30
WHOLE = f"nan inf -1 1.5 abc 1e3 {HUGE} -{HUGE} 0x10 1,000".split() + [""]
REAL = "nan inf -inf -1 1e400 abc --5 1/2 0,5".split() + [""]
TEXT = [*"nope Cosine ../../etc/passwd 日本語 %s%n \udcff".split(), " ", "'; rm -rf x; '", LONG]
PATHS = "missing file . full /dev/null file/below loop dangling 日本語/☃ \udcff /proc/none fifo"
PATHS = [*PATHS.split(), "", "x" * 300, "x/" * 3000]  # bad_places makes what stands there
CAN_BE_MADE = ("missing", "日本語/☃", "\udcff", "dangling")  # a new folder may be written there
NO_PLACES = [path for path in PATHS if path not in CAN_BE_MADE]
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
    escaped = value.encode("unicode_escape", "surrogatepass").decode()
    said = [text for text in (value, value.removeprefix("file:"), escaped) if text.strip(" .")]
    said += [value.rpartition("/")[0]] if "/" in value.strip("/") else []
    said += [" . "] if value in ("", ".") else []  # both are this folder
    said += ["the model"] if option.startswith("--model.") else []
    said += ["/proc"] if value.startswith("/proc") else []
    said += ["operator"] if name == "method" else []
    return (name, name.replace("_", "-"), *(text[:20] for text in said))


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


def each(option: str, values: Iterable[str] | str) -> Pairs:
    return [(option, v) for v in (values.split() if isinstance(values, str) else values)]


def with_option(arguments: tuple[str, ...], option: str, value: str) -> tuple[str, ...]:
    """The arguments with one option last, in place of what it was."""
    at = arguments.index(option) if option in arguments else len(arguments)
    return (*arguments[:at], *arguments[at + 2 :], option, value)


def cases(
    group: str, program: str, base: Callable[[str], tuple[str, ...]], pairs: Pairs,
    more: Callable[[str, str], tuple[str, ...]] = lambda option, value: (),
) -> Cases:  # fmt: skip
    """`program` with base(option), where one option has what must be refused; the line shows option
    or value, or what `more` says."""

    def case(pair: tuple[str, str]) -> Case:
        option, value = pair
        arguments = with_option(base(option), option, value)
        found = command(group, program, arguments, blames(*pair) + more(*pair), make=bad_places)
        return dataclasses.replace(found, name=f"{program} {option} {value[:60]!r}")

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
    base = with_option(run_arguments(), "--data", str(world / "corpus"))

    def may_run(case: Case) -> Case:
        option, value = case.arguments[-2:]
        out = value if option == "--out" else "run"
        runs = (option, value) in (("--lr", "100"), ("--clip", "1e-9")) or option == "--run-id"
        runs |= option == "--out" and value in CAN_BE_MADE
        check = (lambda folder: check_run(folder, out)) if runs else None
        return dataclasses.replace(case, check=check, writes=(out.split("/")[0],))

    return cases("training options", "train", lambda option: base, pairs).map(may_run)


def check_run(folder: Path, out: str = "run") -> None:
    """A finished run: a summary with a finite loss, or one that says why it diverged."""
    done = json.loads((folder / out / "done.json").read_text())
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
    base = ("--local", "--preset", "smoke", "--source", f"file:{world / 'texts'}")
    base += ("--corpora", "corpora", "--out", "out")
    pairs = each("--seeds", SEEDS) + each("--only", ONLY) + each("--preset", TEXT)
    pairs += each("--jobs", WHOLE) + each("--source", SOURCES)
    pairs += each("--out", [v for v in NO_PLACES if v not in ("", ".", "full", "/proc/none")])
    pairs += each("--corpora", "file /dev/null loop file/below /proc/none")
    pairs += each("--summarize", [v for v in PATHS if v])

    def more(option: str, value: str) -> tuple[str, ...]:
        keys = [part.split("=")[0].rstrip("s") for part in value.split("@")[1:4]]
        other = {"--source": "preset", "--summarize": "rows"}
        return (*filter(None, keys), option, other.get(option, option))

    return cases("grid options", "run_ablations", lambda option: base, pairs, more)


# ---- grow.py and data/prepare.py


def growth(world: Path) -> Cases:
    """Options of grow.py, on one of our checkpoints and on a Hugging Face folder."""
    from grow import GrowArgs

    free = "--src --out --seed --learn-steps --learn-batch --learn-lr --learn-weight-decay".split()
    allowed = (("--noise", "-1"), ("--epsilon", "-1"))  # dB; the range's end at factor 2
    pairs = [p for p in odd_values(GrowArgs) if p[0] not in free and p not in allowed]
    pairs += each("--factor", "1 0.5 1.01 1e9 1e18 1e300") + each("--epsilon", "7 -7")
    pairs += each("--width", f"0 8 9 {10**9} {10**18}") + each("--seed", f"-1 x {HUGE}")
    pairs += each("--out", NO_PLACES) + each("--shard-gb", "0 -1 nan")
    srio = dict.fromkeys(("--epsilon", "--attn", "--ffn", "--embed"), "srio")

    def of(source: Path, pairs: Pairs) -> Cases:
        def base(option: str) -> tuple[str, ...]:
            factor = () if option == "--width" else ("--factor", "2")
            return (str(source), "--out", "wide", *factor, "--method", srio.get(option, "auto"))

        return cases("growth options", "grow", base, pairs)

    ours = [pair for pair in pairs if pair[0] != "--shard-gb"]  # a checkpoint of ours has no shards
    return of(world / "grid/runs/parent-s0/final", ours) | of(world / "hf", pairs)


def preparation(world: Path) -> Cases:
    """Options of data/prepare.py."""
    from data.prepare import PrepareConfig

    free = ("--text-field", "--revision", "--source", "--out")
    pairs = [pair for pair in odd_values(PrepareConfig) if pair[0] not in free]
    pairs += each("--tokenizer", f"bpe: bpe:0 bpe:-1 bpe:256 bpe:65536 bpe:{HUGE} bpe:2e3 bpe:²")
    pairs += each("--val-fraction", "0 0.6 1e-300 1") + each("--block-size", f"0 {10**15}")
    pairs += each("--source", f"file:/dev/null file:loop file:**/nothing file:[ file:{LONG}")
    pairs += each("--source", [*TEXT, *"file: file:missing file:fifo file:full".split()])
    pairs += each("--out", filter(None, NO_PLACES)) + [("--shard-tokens", "999")]
    base = ("--source", f"file:{world / 'texts'}", "--tokenizer", "byte", "--out", "corpus")
    base += ("--val-fraction", "0.2")
    return cases("preparation options", "data.prepare", lambda option: base, pairs)
