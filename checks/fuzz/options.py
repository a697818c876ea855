"""Bad values of the command lines: every option of train.py, run_ablations.py, grow.py and
data/prepare.py, given numbers, words and paths that nobody should give."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from checks.fuzz.judge import Case
from checks.fuzz.world import run_arguments

LONG = "x" * 100_000
WHOLE = ("nan", "inf", "-1", "1.5", "abc", "", "1e3", "9" * 30, "-" + "9" * 30, "0x10", "1,000")
REAL = ("nan", "inf", "-inf", "-1", "1e400", "abc", "", "--5", "1/2", "0,5")
TEXT = (
    "nope",
    "Cosine",
    " ",
    "../../etc/passwd",
    LONG,
    "日本語",
    "'; rm -rf x; '",
    "%s%n",
    "\udcff",
)
PATHS = (  # what stands there is made by bad_places
    *("missing", "file", "", ".", "full", "/dev/null", "x" * 300, "x/" * 3000, "file/below"),
    *("loop", "dangling", "日本語/☃", "\udcff", "/proc/none", "fifo"),
)
CAN_BE_MADE = ("missing", "日本語/☃", "\udcff", "dangling")  # a new folder may be written there


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
    shown = [text[:20] for text in (value, path, escaped(value)) if text.strip(" .")]
    shown += [" . "] if value in ("", ".") else []  # both are this folder
    shown += [path.rpartition("/")[0][:20]] if "/" in path.strip("/") else []
    shown += ["the model"] if option.startswith("--model.") else []
    shown += ["/proc"] if value.startswith("/proc") else []
    shown += ["operator"] if name == "method" else []
    return (name, name.replace("_", "-"), *shown)


def escaped(text: str) -> str:
    return text.encode("unicode_escape", "surrogatepass").decode()


def shuffled(rng: np.random.Generator, items: list) -> Iterator:
    """All items, in random order, again and again."""
    while True:
        yield from (items[i] for i in rng.permutation(len(items)))


def odd_values(config: type, prefix: str = "--") -> Iterator[tuple[str, str]]:
    """(option, value) for every field of a config, by its type; nested configs, too."""
    for field in dataclasses.fields(config):
        option = f"{prefix}{field.name.replace('_', '-')}"
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        if dataclasses.is_dataclass(field.type):
            yield from odd_values(field.type, f"{option}.")
        elif field.type is int:
            yield from ((option, value) for value in WHOLE)
        elif field.type is float or "float" in str(kind or field.type):
            yield from ((option, value) for value in REAL)
        elif field.type is str:
            yield from ((option, value) for value in TEXT)
        elif "Path" in str(field.type):
            yield from ((option, value) for value in PATHS)


def replaced(arguments: tuple[str, ...], option: str, *value: str) -> tuple[str, ...]:
    """The arguments with one option changed or added."""
    if option in arguments:
        at = arguments.index(option)
        return arguments[:at] + (option, *value) + arguments[at + 2 :]
    return (*arguments, option, *value)


# ---- train.py


def training(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """Options of train.py. Free words (run_id), new folders and integers that Python reads run."""
    from training.settings import TrainConfig

    sizes = ("vocab-size", "block-size", "n-layer", "n-head", "head-dim", "d-model", "d-ff")
    pairs = [p for p in odd_values(TrainConfig) if p[0] != "--model.rope-theta"]
    pairs += [(f"--model.{size}", str(10**n)) for size in sizes for n in (9, 12, 18)]
    pairs += [
        ("--lr", "100"),
        ("--lr", "0"),
        ("--beta1", "1"),
        ("--steps", "0"),
        ("--clip", "1e-9"),
    ]
    pairs += [("--device", d) for d in ("cuda:999", "cuda", "meta", "cpu:7", "mps")]
    pairs += [("--data", str(world / "texts")), ("--init", str(world / "corpus"))]

    def make(folder: Path) -> None:
        (folder / "corpus").symlink_to(world / "corpus")
        bad_places(folder)

    for option, value in shuffled(rng, pairs):
        runs = option == "--run-id" or option == "--lr" and value == "100" or value == "1e-9"
        runs |= option == "--out" and value in CAN_BE_MADE
        name = f"train.py {option} {value[:40]!r}"
        out = value if option == "--out" else "run"
        yield Case(
            "training options", name, "train:main", replaced(run_arguments(), option, value),
            blames(option, value), make, (lambda f, out=out: check_run(f / out)) if runs else None,
            (out.split("/")[0],),
        )  # fmt: skip


def check_run(out: Path) -> None:
    """A finished run: a summary with a finite loss, or one that says why it diverged."""
    done = json.loads((out / "done.json").read_text())
    assert done["status"] == "diverged" or np.isfinite(done["metrics"]["val_loss"]), done


# ---- run_ablations.py

SEEDS = (
    "x",
    "-1",
    "0-",
    "-",
    "5-3",
    "0,,1",
    "1.5",
    "0-1000",
    "0-99999999",
    "9" * 30,
    "0-4;ls",
    " 0",
)
SEEDS += ("0\n", "²", "1-2-3", "--", LONG)
ONLY = (
    *("nope", "srio@", "srio@=", "srio@epsilon", "srio@epsilon=nan", "srio@epsilon=1e999"),
    *("srio@epsilon=-3", "srio@epsilon=", "srio@lr=nan", "srio@lr=-1", "srio@lr=inf", "srio@lr=x"),
    *("srio@clip=nan", "srio@seed=5", "srio@model=3", "srio@gate=maybe", "srio@optimizer=what"),
    *("srio@learn_steps=-1", "srio@operator=eval", "srio@epsilons=a,b", "srio@epsilons=nan"),
    *("srio@std=inf", "srio@noise_db=x", "srio@noise_db=nan", "lossless-pad@noise_db=nan"),
    *("scratch@epsilon=0.5", "srio@schedule=what", "srio@../../x=1", "srio@lr=1e-3@lr=../x"),
    *("srio@std=-1", "srio@dirichlet=0", "srio@heads=wider", "srio@attn=what", "srio@norm=none"),
    *("srio@min_lr_ratio=2", "srio@weight_decay=-1", "srio@rotate_weights=2", "../../etc/passwd"),
    *("srio@epsilon_reading=aloud", "srio@cross=x", "srio@gauge=x", "srio@rope=x", "srio@noise=-1"),
    *("srio@learn_batch=0", "srio@learn_lr=inf", "srio@learn_weight_decay=nan", "日本語", LONG),
    *("srio@" + "lr=0.001@" * 40 + "lr=0.001", "srio@lr=1e-3" + "0" * 300),
)  # fmt: skip


def grid(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """Options of run_ablations.py. All must be refused before anything is prepared or written."""
    local = ("--local", "--preset", "smoke", "--source", f"file:{world / 'texts'}")
    local += ("--corpora", "corpora", "--out", "out")
    pairs = [("--seeds", v) for v in SEEDS] + [("--only", v) for v in ONLY]
    pairs += [("--preset", v) for v in TEXT] + [("--jobs", v) for v in WHOLE]
    sources = (
        *TEXT,
        "file:",
        "file:missing",
        "file:/dev/null",
        "file:fifo",
        "file:full",
        "file:file",
    )
    pairs += [("--source", v) for v in sources]
    pairs += [("--out", v) for v in PATHS if v not in (*CAN_BE_MADE, "", ".", "full", "/proc/none")]
    pairs += [("--corpora", v) for v in ("file", "/dev/null", "loop", "file/below", "/proc/none")]
    pairs += [("--summarize", v) for v in PATHS if v]
    for option, value in shuffled(rng, pairs):
        name = f"run_ablations.py {option} {value[:60]!r}"
        keys = [part.split("=")[0].rstrip("s") for part in value.split("@")[1:4]]
        given = (*blames(option, value), *filter(None, keys), option)
        given += ("preset",) if option == "--source" else ()
        given += ("rows",) if option == "--summarize" else ()
        arguments = replaced(local, option, value)
        yield Case("grid options", name, "run_ablations:main", arguments, given, bad_places)


# ---- grow.py and data/prepare.py


def growth(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """Options of grow.py, on one of our checkpoints and on a Hugging Face folder."""
    from grow import GrowArgs

    pairs = [pair for pair in odd_values(GrowArgs) if pair[0] not in ("--src", "--out", "--seed")]
    pairs += [("--factor", v) for v in ("1", "0.5", "1.01", "1e9", "1e18", "1e300")]
    pairs += [("--width", v) for v in ("0", "8", "9", str(10**9), str(10**18))]
    pairs += [("--epsilon", v) for v in ("7", "-7")] + [
        ("--seed", v) for v in ("-1", "x", "9" * 30)
    ]
    pairs += [("--out", v) for v in PATHS if v not in CAN_BE_MADE]
    allowed = (("--noise", "-1"), ("--epsilon", "-1"))  # dB; the range's end at factor 2
    pairs = [pair for pair in pairs if pair not in allowed]
    pairs += [("--shard-gb", v) for v in ("0", "-1", "nan")]
    both = [(pair, source) for pair in pairs for source in ("ours", "hf")]
    sources = {"ours": world / "grid" / "runs" / "parent-s0" / "final", "hf": world / "hf"}
    for (option, value), source in shuffled(rng, both):
        if source == "ours" and option == "--shard-gb":
            continue  # has no meaning there
        method = "srio" if option in ("--epsilon", "--attn", "--ffn", "--embed") else "auto"
        base = ("--out", "wide", "--method", method)
        base += () if option in ("--factor", "--width") else ("--factor", "2")
        arguments = (str(sources[source]), *replaced(base, option, value))
        name = f"grow.py {source} {option} {value[:40]!r}"
        yield Case(
            "growth options", name, "grow:main", arguments, blames(option, value), bad_places
        )


def preparation(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """Options of data/prepare.py."""
    from data.prepare import PrepareConfig

    free = ("--text-field", "--revision", "--source", "--out")
    pairs = [pair for pair in odd_values(PrepareConfig) if pair[0] not in free]
    pairs += [
        ("--tokenizer", f"bpe:{n}") for n in ("", "0", "-1", "256", "65536", "9" * 20, "2e3", "²")
    ]
    pairs += [("--val-fraction", v) for v in ("0", "0.6", "1e-300", "1")]
    pairs += [("--shard-tokens", "999"), ("--block-size", "0"), ("--block-size", str(10**15))]
    pairs += [("--source", v) for v in (*TEXT, "file:", "file:missing", "file:fifo", "file:full")]
    pairs += [("--source", "file:" + v) for v in ("/dev/null", "loop", "**/nothing", "[", LONG)]
    pairs += [("--out", v) for v in PATHS if v not in (*CAN_BE_MADE, "")]
    base = ("--source", f"file:{world / 'texts'}", "--tokenizer", "byte", "--out", "corpus")
    base += ("--val-fraction", "0.2")
    for option, value in shuffled(rng, pairs):
        name = f"data/prepare.py {option} {value[:40]!r}"
        arguments = replaced(base, option, value)
        yield Case("preparation options", name, "data.prepare:main", arguments,
                   blames(option, value), bad_places)  # fmt: skip
