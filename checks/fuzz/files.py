"""Spoilt files: checkpoints, Hugging Face folders, corpora, texts, result rows, run folders, Slurm
settings. Where a file still means something after the damage, the run that follows must be right.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from checks.fuzz.damage import BOMBS, dump, lying_headers, spoil_bytes, spoil_json
from checks.fuzz.judge import Case
from checks.fuzz.options import check_run, shuffled
from checks.fuzz.world import reseal, run_arguments

Spoil = Callable[[Path], object]  # changes files below a folder


def seeded(rng: np.random.Generator) -> int:
    """A seed for one case, so that the case can be made again alone."""
    return int(rng.integers(2**32))


def write_bytes(path: Path, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_bytes(data)


def file_spoils(rng: np.random.Generator, source: Path, name: str) -> Iterator[tuple[str, Spoil]]:
    """What may have happened to any file: gone, a folder, a link elsewhere, a bomb, damaged."""

    def gone(folder: Path) -> None:
        (folder / name).unlink()

    def folder_there(folder: Path) -> None:
        gone(folder)
        (folder / name).mkdir()

    def link(target: str) -> Spoil:
        return lambda folder: (gone(folder), (folder / name).symlink_to(target))

    yield f"{name} missing", gone
    yield f"{name} is a folder", folder_there
    yield f"{name} is a link to itself", link(Path(name).name)
    yield f"{name} is a link to nothing", link("nowhere")
    yield f"{name} is a link to /dev/null", link("/dev/null")
    yield f"{name} is a pipe", lambda folder: (gone(folder), os.mkfifo(folder / name))
    for what, bomb in BOMBS:
        yield f"{name} is {what}", write_bytes(Path(name), bomb)
    data = (source / name).read_bytes()
    while True:
        what, spoilt = spoil_bytes(rng, data)
        yield f"{name}: {what}", write_bytes(Path(name), spoilt)


def json_spoils(rng: np.random.Generator, source: Path, name: str) -> Iterator[tuple[str, Spoil]]:
    """Fields of a JSON file removed or replaced, without end."""
    value = json.loads((source / name).read_text())
    while True:
        what, spoilt = spoil_json(rng, value)
        yield f"{name}: {what}"[:120], write_bytes(Path(name), dump(spoilt))


def mixed(rng: np.random.Generator, *sources: Iterator) -> Iterator:
    """Items of endless iterators, one of each in turn."""
    while True:
        for source in sources:
            yield next(source)


def copied(source: Path, name: str, spoil: Spoil, *more: Spoil) -> Spoil:
    """A case's folder: a copy of `source` called `name`, spoilt."""

    def make(folder: Path) -> None:
        shutil.copytree(source, folder / name)
        for act in (spoil, *more):
            act(folder / name)

    return make


# ---- checkpoints


def checkpoints(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """A spoilt checkpoint as train.py --init and as grow.py SRC; half of them forged: their hashes
    fit again, so that what is inside is judged."""
    source = world / "grid" / "runs" / "parent-s0" / "final"
    weights = (source / "model.safetensors").read_bytes()
    lies = ((w, write_bytes(Path("model.safetensors"), d)) for w, d in lying_headers(rng, weights))
    kinds = [
        (file_spoils(rng, source, "state.json"), False),
        (file_spoils(rng, source, "model.safetensors"), False),
        (json_spoils(rng, source, "state.json"), False),
        (json_spoils(rng, source, "state.json"), True),
        (((f"forged {w}", s) for w, s in lies), True),
        (((f"forged {w}", s) for w, s in json_spoils(rng, source, "state.json")), True),
        (file_spoils(rng, source, "optimizer.safetensors"), False),
        (((f"forged tensors: {w}", s) for w, s in odd_tensors(rng, source)), True),
    ]
    for i in range(10**9):
        spoils, forged = kinds[i % len(kinds)]
        what, spoil = next(spoils)
        make = copied(source, "ckpt", spoil, *((try_reseal,) if forged else ()))
        # forged meta may say anything that makes sense; a forger may even give other weights
        if i // len(kinds) % 2 == 0:
            arguments = (*run_arguments(), "--init", "ckpt")
            yield Case("checkpoints", f"train.py --init: {what}", "train:main", arguments,
                       ("ckpt", "model.", " h.0."), with_corpus(world, make),
                       check_init if forged else None, ("run",))  # fmt: skip
        else:
            arguments = ("ckpt", "--out", "wide", "--factor", "2")
            yield Case("checkpoints", f"grow.py: {what}", "grow:main", arguments,
                       ("ckpt", "model.", " h.0."), make, check_grown if forged else None,
                       ("wide",))  # fmt: skip


def try_reseal(folder: Path) -> None:
    try:
        reseal(folder)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        pass  # too spoilt even for that


def with_corpus(world: Path, make: Spoil) -> Spoil:
    def both(folder: Path) -> None:
        (folder / "corpus").symlink_to(world / "corpus")
        make(folder)

    return both


def check_init(folder: Path) -> None:
    check_run(folder / "run")


def check_grown(folder: Path) -> None:
    """The child loads, and computes what its parent does."""
    import checkpoint

    child = checkpoint.load(folder / "wide")
    checkpoint.model_config(child)
    assert child.meta["growth"]["report"]["max_abs_dlogit"] < 1e-3, child.meta["growth"]["report"]


def odd_tensors(rng: np.random.Generator, source: Path) -> Iterator[tuple[str, Spoil]]:
    """Sound safetensors files whose tensors are not those of the config."""
    import torch
    from safetensors.torch import load_file, save_file

    def edit(change: Callable[[dict], object]) -> Spoil:
        def act(folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")

        return act

    name = "h.0.mlp.up.weight"
    odd = (torch.full((32, 8), torch.nan), torch.full((32, 8), torch.inf), torch.zeros(32, 9))
    odd += (torch.zeros(0), torch.zeros(()), torch.zeros(32, 8, dtype=torch.int64))
    odd += (torch.zeros(32, 8, dtype=torch.complex64), torch.full((32, 8), 3e38))
    edits = [(f"{name} {t.dtype} {tuple(t.shape)} of {t.flatten()[:1].tolist()}",
              lambda tensors, t=t: tensors.update({name: t})) for t in odd]  # fmt: skip
    edits += [
        (f"without {name}", lambda tensors: tensors.pop(name)),
        ("without any", lambda tensors: tensors.clear()),
        ("a third layer", lambda tensors: tensors.update({"h.2.mlp.up.bias": torch.zeros(32)})),
        ("wte of another size", lambda tensors: tensors.update({"wte.weight": torch.zeros(9, 8)})),
        ("an unknown one", lambda tensors: tensors.update({"__class__": torch.zeros(1)})),
    ]
    for what, change in shuffled(rng, edits):
        yield what, edit(change)


# ---- Hugging Face folders


def hugging_face(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """A spoilt Hugging Face folder as grow.py SRC, and as models/convert.py's source."""
    one, many = world / "hf", world / "hf_sharded"
    weights = (one / "model.safetensors").read_bytes()
    lies = ((w, write_bytes(Path("model.safetensors"), d)) for w, d in lying_headers(rng, weights))
    index = "model.safetensors.index.json"
    kinds = [
        (file_spoils(rng, one, "config.json"), one),
        (json_spoils(rng, one, "config.json"), one),
        (lies, one),
        (file_spoils(rng, many, index), many),
        (json_spoils(rng, many, index), many),
        (file_spoils(rng, many, "model-00002-of-00003.safetensors"), many),
        (odd_configs(rng, one), one),
    ]
    for i in range(10**9):
        spoils, source = kinds[i % len(kinds)]
        what, spoil = next(spoils)
        arguments = ("model", "--out", "wide", "--factor", "2")
        call, check = "grow:main", check_folder
        if i % 5 == 4:
            arguments, call = ("from-gpt2", "model", "wide"), "models.convert:main"
            check = check_converted
        yield Case("Hugging Face folders", f"{call.split(':')[0]}.py: {what}", call, arguments,
                   ("model", "safetensors", "config", "width"), copied(source, "model", spoil),
                   check, ("wide",))  # fmt: skip


def odd_configs(rng: np.random.Generator, source: Path) -> Iterator[tuple[str, Spoil]]:
    """config.json with sizes and switches that contradict the weights, or ask for code."""
    raw = json.loads((source / "config.json").read_text())
    edits = [{"n_embd": n} for n in (0, -8, 9, 10**9, 10**18, "8", 8.0, None, True)]
    edits += [{"n_layer": n} for n in (0, -1, 1, 3, 10**7, 10**18, "2")]
    edits += [{"n_head": n} for n in (0, -1, 3, 10**9, None)]
    edits += [{"n_inner": n} for n in (0, -1, 10**12)] + [{"vocab_size": 0}, {"vocab_size": 10**15}]
    edits += [{"n_positions": 10**15}, {"layer_norm_epsilon": -1}, {"layer_norm_epsilon": "x"}]
    edits += [{"model_type": t} for t in ("bert", "llama", "t5", "nope", "", None, ["gpt2"], {})]
    edits += [{"activation_function": "os.system"}, {"activation_function": None}]
    edits += [{"architectures": a} for a in (["os"], ["Trainer"], "x", [None], [7], {"a": 1})]
    edits += [{"quantization_config": {"quant_method": "x"}}, {"tie_word_embeddings": False}]
    edits += [{"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}]
    edits += [{"torch_dtype": "int8"}, {"dtype": "nope"}, {"dtype": 7}]
    for edit in shuffled(rng, edits):
        yield f"config.json says {edit}", write_bytes(Path("config.json"), dump(raw | edit))


def check_folder(folder: Path) -> None:
    from safetensors.torch import load_file

    report = json.loads((folder / "wide" / "growth_report.json").read_text())
    assert report["max_abs_dlogit"] < 1e-3, report
    assert load_file(folder / "wide" / "model.safetensors")


def check_converted(folder: Path) -> None:
    import checkpoint

    checkpoint.model_config(checkpoint.load(folder / "wide"))


# ---- corpora and texts


def corpora(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """A spoilt manifest or shard, read by train.py; some with a manifest_hash that fits again."""
    source = world / "corpus"
    manifest = json.loads((source / "manifest.json").read_text())
    kinds = [
        (file_spoils(rng, source, "manifest.json"), False),
        (json_spoils(rng, source, "manifest.json"), False),
        (odd_manifests(rng, manifest), True),
        (json_spoils(rng, source, "manifest.json"), True),
        (file_spoils(rng, source, "train_00000.bin"), False),
        (file_spoils(rng, source, "val_00000.bin"), True),
    ]
    for i in range(10**9):
        spoils, forged = kinds[i % len(kinds)]
        what, spoil = next(spoils)
        make = copied(source, "corpus", spoil, *((rehash_manifest,) if forged else ()))
        # fields that describe the corpus (source, counts, settings) may say anything
        may_run = what.startswith("manifest.json:") or what.startswith("forged")
        yield Case("corpora", f"{what}{', hash forged' if forged else ''}", "train:main",
                   run_arguments(), ("corpus", "vocab"), make, check_init if may_run else None,
                   ("run",))  # fmt: skip


def odd_manifests(rng: np.random.Generator, manifest: dict) -> Iterator[tuple[str, Spoil]]:
    """Counts, names and ids that lie."""
    edits = [("name", n) for n in ("../corpus/train_00000.bin", "/etc/passwd", "train_00000.bin\0")]
    edits += [
        ("name", n) for n in ("train_00000.bin\n", "train_0.bin", "TRAIN_00000.bin", "", None)
    ]
    edits += [("name", "val_00000.bin"), ("name", "train_99999.bin"), ("name", "train_٠٠٠٠٠.bin")]
    edits += [("tokens", n) for n in (0, -1, 1, 10**18, 10**400, 1.5, "9", None, True)]
    edits += [("sha256", s) for s in ("", "0" * 64, None, 7, "z" * 64)]
    tops = [("vocab_size", n) for n in (0, 1, 5, 65536, -1, 2.5, None, "257", 10**30, True)]
    tops += [("eot", n) for n in (-1, 257, 10**30, "x", 1.5, True)] + [
        ("format", 2),
        ("format", "1"),
    ]
    tops += [("shards", s) for s in ([], {}, None, [[]], [None], manifest["shards"] * 2)]
    tops += [("tokenizer", t) for t in ({}, [], None, {"spec": 1, "hash": 2})]
    for key, value in shuffled(rng, edits + tops):
        first = manifest["shards"][0] | ({key: value} if (key, value) in edits else {})
        lying = manifest | {"shards": [first, *manifest["shards"][1:]]}
        lying |= {key: value} if (key, value) in tops else {}
        yield f"forged {key} {str(value)[:40]!r}", write_bytes(Path("manifest.json"), dump(lying))


def rehash_manifest(folder: Path) -> None:
    from data.shards import manifest_hash

    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        manifest["manifest_hash"] = manifest_hash(manifest)
        path.write_bytes(dump(manifest))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        pass


TEXTS = (  # file name, content
    ("empty.txt", b""),
    ("blank.txt", b" \n\n\t"),
    ("latin.txt", "Äpfel für alle".encode("latin-1") * 50),
    ("utf16.txt", ("text " * 200).encode("utf-16")),
    ("nul.txt", b"\0" * 3000),
    ("short.txt", b"x"),
    ("late.txt", b"good text\n" * 200_000 + b"\xff"),
    ("surrogates.txt", b"\xed\xa0\x80" * 100),
    ("cut.jsonl", b'{"text": "good"}\n{"text": "cut of'),
    ("list.jsonl", b"[1, 2]\n"),
    ("number.jsonl", b'{"text": 7}\n'),
    ("null.jsonl", b'{"text": null}\n'),
    ("other.jsonl", b'{"body": "good"}\n'),
    ("deep.jsonl", b"[" * 200_000 + b"\n"),
    ("digits.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n"),
    ("surrogate.jsonl", b'{"text": "\\ud800"}\n'),
    ("binary.jsonl", bytes(range(256)) * 20),
    ("nul.jsonl", b"\0" * 500),
    ("empty.jsonl", b""),
    ("no.parquet", b"PAR1 this is none PAR1"),
    ("empty.parquet", b""),
    ("magic.parquet", b"PAR1" + b"\xff" * 400 + b"PAR1"),
    ("length.parquet", b"PAR1" + b"\0" * 40 + (2**31 - 1).to_bytes(4, "little") + b"PAR1"),
)


def texts(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """Bad texts for data/prepare.py, alone and among good ones, with and without --skip-bad."""
    options = ("--tokenizer", "byte", "--out", "corpus", "--val-fraction", "0.2")
    good = [(world / "texts" / f"{i:02}.txt").read_bytes() for i in range(40)]
    lines = b"".join(json.dumps({"text": t.decode()}).encode() + b"\n" for t in good)

    def items() -> Iterator[tuple[str, bytes, bool]]:
        for name, data in TEXTS:
            yield name, data, False
            yield name, data, True
        while True:
            what, data = spoil_bytes(rng, lines if rng.random() < 0.5 else good[0] * 9)
            yield f"random{len(what)}.{'jsonl' if rng.random() < 0.7 else 'txt'}", data, True

    for name, data, among in items():
        skip = among and rng.random() < 0.5

        def make(folder: Path, name=name, data=data, among=among) -> None:
            (folder / "texts").mkdir()
            (folder / "texts" / name).write_bytes(data)
            for i, text in enumerate(good if among else []):
                (folder / "texts" / f"good{i}.txt").write_bytes(text)

        arguments = ("--source", "file:texts", *options, *(("--skip-bad",) if skip else ()))
        about = f"{name}{' among good texts' if among else ''}{', --skip-bad' if skip else ''}"
        may_run = among or name in ("nul.txt", "late.txt")
        yield Case("texts", about, "data.prepare:main", arguments, ("texts", name), make,
                   check_corpus if may_run else None, ("corpus",))  # fmt: skip


def check_corpus(folder: Path) -> None:
    from data.shards import Corpus

    assert Corpus(folder / "corpus", verify="hash").n_tokens("train") > 64


# ---- results and settings


def rows(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """A spoilt result row, read by the table, --summarize and --status."""
    source = world / "grid" / "rows"
    name = "nrio-s1.json"
    spoils = mixed(rng, file_spoils(rng, source, name), *[json_spoils(rng, source, name)] * 4)
    for what, spoil in spoils:

        def make(folder: Path, spoil=spoil) -> None:
            copied(source, "rows", spoil)(folder)

        yield Case("result rows", f"analysis.aggregate: {what}", "analysis.aggregate:main",
                   (".", "--allow-missing"), ("nrio", "rows", "seed"), make, check_table,
                   ("table.csv", "table.md", "claims.md"))  # fmt: skip


def check_table(folder: Path) -> None:
    import pandas as pd

    df = pd.read_csv(folder / "table.csv")
    assert {"scratch", "parent"} <= set(df["variant"]) and (df["n"] >= 0).all()


def grid_folders(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """Spoilt notes of the scheduler and rows, read by run_ablations.py --status."""
    note = {"state": "failed", "reason": "out of memory", "log": "jobs/x/log", "job_id": "7"}

    def source_of(name: str, value: dict) -> Path:
        folder = world / "notes" / name.replace("/", "-")
        if not folder.exists():
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_bytes(dump(value))
        return folder

    row = json.loads((world / "grid" / "rows" / "nrio-s0.json").read_text())
    files = {"jobs/nrio-s0/state.json": note, "rows/nrio-s0.json": row}
    files["rows/parent-s0.json"] = row | {"variant": "parent", "run_id": "parent-s0"}
    kinds = []
    for name, value in files.items():
        folder = source_of(name, value)
        kinds.append((name, folder, file_spoils(rng, folder, name)))
        kinds.append((name, folder, json_spoils(rng, folder, name)))
    arguments = ("--status", "--preset", "smoke", "--out", "out", "--only", "nrio", "--seeds", "0")
    for i in range(10**9):
        name, source, spoils = kinds[i % len(kinds)]
        what, spoil = next(spoils)
        yield Case("grid folders", f"run_ablations.py --status: {what}", "run_ablations:main",
                   arguments, (Path(name).name, name), copied(source, "out", spoil),
                   lambda folder: None)  # fmt: skip


def run_folders(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """A spoilt folder of an interrupted run, continued by the same command. A damaged checkpoint is
    skipped: the run starts again from the one before, or from the start."""
    source, step = world / "run", "step_00000002"
    done = world / "grid" / "runs" / "parent-s0" / "done.json"
    finished = world / "finished"
    if not finished.exists():
        shutil.copytree(source, finished)
        shutil.copy(done, finished)
    kinds = [
        (file_spoils(rng, source, "config.json"), source),
        (json_spoils(rng, source, "config.json"), source),
        (file_spoils(rng, source, "metrics.jsonl"), source),
        (file_spoils(rng, source, f"{step}/model.safetensors"), source),
        (json_spoils(rng, source, f"{step}/state.json"), source),
        (sealed(json_spoils(rng, source, f"{step}/state.json"), step), source),
        (file_spoils(rng, finished, "done.json"), finished),
        (json_spoils(rng, finished, "done.json"), finished),
        (file_spoils(rng, source, "progress.json"), source),
        (file_spoils(rng, source, f"{step}/optimizer.safetensors"), source),
    ]
    for i in range(10**9):
        spoils, folder = kinds[i % len(kinds)]
        what, spoil = next(spoils)
        yield Case("run folders", what, "train:main", run_arguments(),
                   ("run", "config", "metrics", "done", "step_"),
                   with_corpus(world, copied(folder, "run", spoil)), check_init,
                   ("run",))  # fmt: skip


def sealed(spoils: Iterator[tuple[str, Spoil]], step: str) -> Iterator[tuple[str, Spoil]]:
    for what, spoil in spoils:

        def both(folder: Path, spoil=spoil) -> None:
            spoil(folder)
            try_reseal(folder / step)

        yield f"forged {what}", both


SETTINGS = (  # slurm.toml
    "", "=", "[", "partition", "partition = 7", "nodes = -1", "nodes = 1.5", "nodes = true",
    "nodes = 99999999999999999999", "minutes = 'x'", "setup = 'module load'", "setup = [[1]]",
    "extra = 'x'", "extra = []", "unknown = 1", "[slurm]\nnodes = 1", "nodes = 1\nnodes = 2",
    "a = " + "[" * 5000, "partition = \"\\u0000\"", "python = []", "nodes = nan", "minutes = 1e9",
    "a.b.c = 1", "partition = '''x\n#SBATCH --wrap=evil'''", "setup = [1, 2]", "mem_gb = inf",
    "account = \"two words\"", "gres = 1979-05-27", "x" * 100_000,
)  # fmt: skip


def slurm_settings(rng: np.random.Generator, world: Path) -> Iterator[Case]:
    """--slurm-config files, TOML and JSON, good enough for a SlurmConfig or refused."""
    sound = {"partition": "gpu", "nodes": 1, "setup": ["module load cuda"], "extra": {"x": "y"}}

    def items() -> Iterator[tuple[str, str, bytes]]:
        for text in SETTINGS:
            yield f"TOML {text[:40]!r}", "slurm.toml", text.encode()
        for what, bomb in BOMBS:
            yield f"JSON: {what}", "slurm.json", bomb
            yield f"TOML: {what}", "slurm.toml", bomb
        while True:
            what, spoilt = spoil_json(rng, sound)
            yield f"JSON: {what}"[:120], "slurm.json", dump(spoilt)

    for what, name, data in items():
        yield Case("Slurm settings", what, "cluster.slurm:load_config", (name,), (name,),
                   write_bytes(Path(name), data), lambda folder: None)  # fmt: skip
