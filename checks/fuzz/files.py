"""Spoilt files: checkpoints, Hugging Face folders, corpora, texts, result rows, run folders, Slurm
settings; and sound ones in odd environments. Where a file still means something after the damage,
the run that follows must be right.
"""

import bz2
import gzip
import io
import json
import lzma
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from checks.fuzz.damage import BOMBS, dump, lying_headers, spoilt_bytes, spoilt_json
from checks.fuzz.judge import Case
from checks.fuzz.options import Cases, check_run
from checks.fuzz.world import reseal, run_arguments

Act = Callable[[Path], object]  # changes files below a folder
Spoil = tuple[str, Act]  # with what it does, in words
Spoils = st.SearchStrategy[Spoil]
BROKEN = (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError)


def writing(name: str, label: str = "") -> Callable[[tuple[str, bytes]], Spoil]:
    """(what, content) -> the spoil that puts the content where the file `name` was."""
    return lambda damage: (
        f"{label or name + ': '}{damage[0]}"[:120],
        lambda folder: (folder / name).write_bytes(damage[1]),
    )


def file_spoils(source: Path, name: str) -> Spoils:
    """What may have happened to any file: gone, a folder, a link elsewhere, a bomb, damaged."""

    def link(target: str) -> Spoil:
        act = lambda f: ((f / name).unlink(), (f / name).symlink_to(target))  # noqa: E731
        return f"{name} is a link to {target}", act

    other = [
        (f"{name} missing", lambda f: (f / name).unlink()),
        (f"{name} is a folder", lambda f: ((f / name).unlink(), (f / name).mkdir())),
        (f"{name} is a pipe", lambda f: ((f / name).unlink(), os.mkfifo(f / name))),
        *map(link, (Path(name).name, "nowhere", "/dev/null")),
    ]
    return st.one_of(
        st.sampled_from([*other, *map(writing(name), BOMBS)]),
        spoilt_bytes((source / name).read_bytes()).map(writing(name)),
    )


def json_spoils(source: Path, name: str) -> Spoils:
    """Fields of a JSON file removed or replaced."""
    spoilt = spoilt_json(json.loads((source / name).read_text()))
    return spoilt.map(lambda found: writing(name)((found[0], dump(found[1]))))


def lying_spoils(source: Path) -> Spoils:
    name = "model.safetensors"
    return lying_headers((source / name).read_bytes()).map(writing(name, "forged "))


def forged(spoils: Spoils, repair: Act) -> Spoils:
    """The same, with hashes that fit again, so that what is inside is judged."""

    def both(spoil: Spoil) -> Spoil:
        def act(folder: Path) -> None:
            spoil[1](folder)
            with suppress(*BROKEN):  # too spoilt even for that
                repair(folder)

        return f"forged {spoil[0].removeprefix('forged ')}", act

    return spoils.map(both)


def ends_well(folder: Path) -> None:
    """For inputs that may as well be good: any result will do."""


def cases(
    group: str, program: str, arguments: tuple[str, ...], given: tuple[str, ...],
    source: Path, name: str, spoils: Spoils, check: Act | None = None,
    writes: tuple[str, ...] = (), corpus: Path | None = None,
) -> Cases:  # fmt: skip
    """`program` beside a copy of `source` called `name`, spoilt, and a link to the sound corpus."""

    def case(spoil: Spoil) -> Case:
        what, act = spoil

        def make(folder: Path) -> None:
            shutil.copytree(source, folder / name)
            act(folder / name)
            if corpus:
                (folder / "corpus").symlink_to(corpus)

        about, call = f"{program}: {what}", f"{program}:main"
        return Case(group, about, call, arguments, given, make, check, writes)

    return spoils.map(case)


# ---- checkpoints


def checkpoints(world: Path) -> Cases:
    """A spoilt checkpoint as train.py --init and as grow.py SRC; half of them forged: their meta
    may say anything that makes sense, and a forger may even give other weights."""
    source = world / "grid" / "runs" / "parent-s0" / "final"
    spoilt = [file_spoils(source, f"{kind}.safetensors") for kind in ("model", "optimizer")]
    spoilt += [file_spoils(source, "state.json"), json_spoils(source, "state.json")]
    inside = [json_spoils(source, "state.json"), lying_spoils(source)]
    forgery = forged(st.one_of(*inside, st.sampled_from(odd_tensors())), reseal)
    train, grow = (*run_arguments(), "--init", "ckpt"), ("ckpt", "--out", "wide", "--factor", "2")
    where, found = (("ckpt", "model.", " h.0."), source, "ckpt"), []
    for spoils, init, grown in ((st.one_of(spoilt), 0, 0), (forgery, check_init, check_grown)):
        found += [
            cases("checkpoints", "train", train, *where, spoils, init or None, ("run",),
                  world / "corpus"),
            cases("checkpoints", "grow", grow, *where, spoils, grown or None, ("wide",)),
        ]  # fmt: skip
    return st.one_of(found)


def check_init(folder: Path) -> None:
    check_run(folder / "run")


def check_grown(folder: Path) -> None:
    """The child loads, and computes what its parent does."""
    import checkpoint

    child = checkpoint.load(folder / "wide")
    checkpoint.model_config(child)
    assert child.meta["growth"]["report"]["max_abs_dlogit"] < 1e-3, child.meta["growth"]["report"]


def odd_tensors() -> list[Spoil]:
    """Sound safetensors files whose tensors are not those of the config."""
    import torch
    from safetensors.torch import load_file, save_file

    def edit(what: str, change: Callable[[dict], object]) -> Spoil:
        def act(folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")

        return f"tensors: {what}", act

    name = "h.0.mlp.up.weight"
    odd = [torch.full((32, 8), value) for value in (torch.nan, torch.inf, 3e38)]
    odd += [torch.zeros(32, 9), torch.zeros(0), torch.zeros(())]
    odd += [torch.zeros(32, 8, dtype=kind) for kind in (torch.int64, torch.complex64)]
    edits = [(f"{name} {t.dtype} {tuple(t.shape)} of {t.flatten()[:1].tolist()}",
              lambda tensors, t=t: tensors.update({name: t})) for t in odd]  # fmt: skip
    more = {"a third layer": {"h.2.mlp.up.bias": torch.zeros(32)}}
    more |= {"wte of another size": {"wte.weight": torch.zeros(9, 8)}}
    more |= {"an unknown one": {"__class__": torch.zeros(1)}}
    edits += [(what, lambda tensors, m=m: tensors.update(m)) for what, m in more.items()]
    edits += [(f"without {name}", lambda tensors: tensors.pop(name))]
    return [edit(*pair) for pair in [*edits, ("without any", dict.clear)]]


# ---- Hugging Face folders


def hugging_face(world: Path) -> Cases:
    """A spoilt Hugging Face folder as grow.py SRC, and as models/convert.py's source."""
    one, many, index = world / "hf", world / "hf_sharded", "model.safetensors.index.json"
    of_one = [file_spoils(one, "config.json"), json_spoils(one, "config.json")]
    of_one += [lying_spoils(one), odd_configs(one)]
    of_many = [file_spoils(many, index), json_spoils(many, index)]
    of_many += [file_spoils(many, sorted(many.glob("*.safetensors"))[1].name)]
    grow = ("grow", ("model", "--out", "wide", "--factor", "2"), check_folder)
    convert = ("models.convert", ("from-gpt2", "model", "wide"), check_converted)
    given = ("model", "safetensors", "config", "width")
    return st.one_of([
        cases("Hugging Face folders", program, arguments, given, source, "model",
              st.one_of(spoils), check, ("wide",))
        for program, arguments, check in (grow, grow, convert)
        for source, spoils in ((one, of_one), (many, of_many))
    ])  # fmt: skip


def odd_configs(source: Path) -> Spoils:
    """config.json with sizes and switches that contradict the weights, or ask for code."""
    raw = json.loads((source / "config.json").read_text())
    values = {
        "n_embd": (0, -8, 9, 10**9, 10**18, "8", 8.0, None, True),
        "n_layer": (0, -1, 1, 3, 10**7, 10**18, "2"),
        "n_head": (0, -1, 3, 10**9, None),
        "n_inner": (0, -1, 10**12),
        "vocab_size": (0, 10**15),
        "n_positions": (10**15,),
        "layer_norm_epsilon": (-1, "x"),
        "model_type": ("bert", "llama", "t5", "nope", "", None, ["gpt2"], {}),
        "activation_function": ("os.system", None),
        "architectures": (["os"], ["Trainer"], "x", [None], [7], {"a": 1}),
        "quantization_config": ({"quant_method": "x"},),
        "tie_word_embeddings": (False,),
        "auto_map": ({"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},),
        "torch_dtype": ("int8",),
        "dtype": ("nope", 7),
    }
    edits = [{key: value} for key in values for value in values[key]]
    lies = [(f"config.json says {edit}", dump(raw | edit)) for edit in edits]
    return st.sampled_from(lies).map(writing("config.json"))


def check_folder(folder: Path) -> None:
    from safetensors.torch import load_file

    report = json.loads((folder / "wide" / "growth_report.json").read_text())
    assert report["max_abs_dlogit"] < 1e-3, report
    assert load_file(folder / "wide" / "model.safetensors")


def check_converted(folder: Path) -> None:
    import checkpoint

    checkpoint.model_config(checkpoint.load(folder / "wide"))


# ---- corpora and texts


def corpora(world: Path) -> Cases:
    """A spoilt manifest or shard, read by train.py; some with a manifest_hash that fits again.
    Fields that describe the corpus (source, counts, settings) may say anything."""
    source, manifest = world / "corpus", "manifest.json"
    described = file_spoils(source, manifest) | json_spoils(source, manifest)
    described |= forged(json_spoils(source, manifest), rehash_manifest)
    wrong = [file_spoils(source, f"{split}_00000.bin") for split in ("train", "val")]
    wrong += [forged(odd_manifests(source), rehash_manifest)]
    return st.one_of([
        cases("corpora", "train", run_arguments(), ("corpus", "vocab"), source, "corpus", spoils,
              check, ("run",))
        for spoils, check in ((described, check_init), (st.one_of(wrong), None))
    ])  # fmt: skip


def odd_manifests(source: Path) -> Spoils:
    """Counts, names and ids that lie."""
    manifest = json.loads((source / "manifest.json").read_text())
    first, *others = manifest["shards"]
    names = ("../corpus/train_00000.bin", "/etc/passwd", "train_00000.bin\0", "train_00000.bin\n")
    names += ("train_0.bin", "TRAIN_00000.bin", "", None, "val_00000.bin", "train_99999.bin")
    of_shard = {
        "name": (*names, "train_٠٠٠٠٠.bin"),
        "tokens": (0, -1, 1, 10**18, 10**400, 1.5, "9", None, True),
        "sha256": ("", "0" * 64, None, 7, "z" * 64),
    }
    of_all = {
        "vocab_size": (0, 1, 5, 65536, -1, 2.5, None, "257", 10**30, True),
        "eot": (-1, 257, 10**30, "x", 1.5, True),
        "format": (2, "1"),
        "shards": ([], {}, None, [[]], [None], manifest["shards"] * 2),
        "tokenizer": ({}, [], None, {"spec": 1, "hash": 2}),
    }
    edits = [({"shards": [first | {k: v}, *others]}, k, v) for k in of_shard for v in of_shard[k]]
    edits += [({k: v}, k, v) for k in of_all for v in of_all[k]]
    lies = [(f"{k} {str(v)[:40]!r}", dump(manifest | edit)) for edit, k, v in edits]
    return st.sampled_from(lies).map(writing("manifest.json"))


def rehash_manifest(folder: Path) -> None:
    from data.shards import manifest_hash

    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["manifest_hash"] = manifest_hash(manifest)
    path.write_bytes(dump(manifest))


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
    ("list.json", b"[1, 2]\n"),
    ("cut.json", b'[{"text": "good"}, {"te'),
    ("deep.json", b"[" * 200_000),
    ("null.json", b'[{"text": null}]'),
    ("cut.txt.gz", gzip.compress(b"word " * 4000)[:-30]),
    ("none.jsonl.zst", b"\x28\xb5\x2f\xfd nothing"),
    ("zip.txt", b"PK\x03\x04" + bytes(60)),
    ("length.parquet", b"PAR1" + b"\0" * 40 + (2**31 - 1).to_bytes(4, "little") + b"PAR1"),
    ("empty.jsonl.gz", gzip.compress(b"")),
    ("cut.jsonl.bz2", bz2.compress(b"word " * 4000)[:-30]),
    ("no.gz", b"no gzip, but its name says so\n"),
    ("cut.parquet.gz", gzip.compress(b"PAR1")),
)
# not read inside a folder, whatever they hold
BESIDE = (("a.pdf", b"%PDF-1.7"), ("b.docx", b"PK\x03\x04"), ("README", b"x"), ("c.exe", b"MZ\0"))
BESIDE += ((".hidden.txt", b"hidden"), ("cut.jsonl", b'{"text": "x'), ("empty.txt.gz", b""))
BOM = b"\xef\xbb\xbf"


def sound_forms(texts: list[str]) -> dict[str, bytes]:
    """The same documents in every form that data/readers.py reads, under right and wrong names."""
    import pyarrow

    records = [{"text": text} for text in texts]
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    array, table = io.BytesIO(), io.BytesIO()
    array.write(json.dumps(records).encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    zstd = pyarrow.Codec("zstd").compress
    plain = {"jsonl": lines, "json": lines, "txt": lines, "array.json": array.getvalue()}
    plain |= {"indented.json": json.dumps(records, indent=1).encode(), "bom.json": BOM + lines}
    plain |= {"parquet": table.getvalue(), "parquet.txt": table.getvalue()}
    plain |= {"blank.jsonl": b"\n \n" + lines, "null.jsonl": b'{"text": null}\n' + lines}
    packed = {"jsonl.gz": gzip.compress(lines), "jsonl.bz2": bz2.compress(lines)}
    packed |= {"jsonl.xz": lzma.compress(lines), "jsonl.zst": bytes(zstd(lines))}
    packed |= {"gzip.jsonl": gzip.compress(lines), "array.json.gz": gzip.compress(plain["json"])}
    packed |= {"members.jsonl.gz": gzip.compress(b"") + gzip.compress(lines) + gzip.compress(b"")}
    packed |= {"members.json.bz2": bz2.compress(lines) + bz2.compress(b"")}
    return {f"sound.{name}": data for name, data in (plain | packed).items()}


def texts(world: Path) -> Cases:
    """Bad texts for data/prepare.py, alone and among good ones, with and without --skip-bad; sound
    ones in every form, which must all give the same number of tokens."""
    from data.shards import Corpus

    good = [path.read_bytes() for path in sorted((world / "texts").iterdir())]
    lines = b"".join(json.dumps({"text": t.decode()}).encode() + b"\n" for t in good)
    damaged = (spoilt_bytes(lines) | spoilt_bytes(good[0] * 9)).map(lambda found: found[1])
    spoilt = st.tuples(st.sampled_from(["random.jsonl", "random.txt"]), damaged)
    total = sum(map(Corpus(world / "corpus").n_tokens, ("train", "val")))

    def case(text: tuple[str, bytes], among: bool, skip: bool) -> Case:
        (name, data), sound = text, text[0].startswith("sound.")
        among = (among or name.startswith("random")) and not sound

        def make(folder: Path) -> None:
            (folder / "texts").mkdir()
            for other, content in BESIDE if sound and skip else ():
                (folder / "texts" / other).write_bytes(content)
            (folder / "texts" / name).write_bytes(data)
            for i, text in enumerate(good if among else []):
                (folder / "texts" / f"good{i}.txt").write_bytes(text)

        def check(folder: Path) -> None:
            check_corpus(folder, total if sound else None)

        arguments = ("--source", "file:texts", "--tokenizer", "byte", "--out", "corpus")
        skips = ("--skip-bad",) if skip and (among or sound) else ()
        arguments += ("--val-fraction", "0.2", *skips)
        about = f"{name}{' among good texts' if among else ''}{', --skip-bad' if skip else ''}"
        may_run = among or sound or name in ("nul.txt", "late.txt")
        return Case("texts", about, "data.prepare:main", arguments, ("texts", name), make,
                    check if may_run else None, ("corpus",))  # fmt: skip

    forms = st.sampled_from([*TEXTS, *sound_forms([t.decode() for t in good]).items()])
    return st.builds(case, forms | spoilt, st.booleans(), st.booleans())


def check_corpus(folder: Path, total: int | None = None) -> None:
    from data.shards import Corpus

    corpus = Corpus(folder / "corpus", verify="hash")
    assert corpus.n_tokens("train") > 64
    found = corpus.n_tokens("train") + corpus.n_tokens("val")
    assert total in (None, found), f"{found} tokens instead of {total}"


# ---- results and settings


def rows(world: Path) -> Cases:
    """A spoilt result row, read by the table."""
    source, name = world / "grid" / "rows", "nrio-s1.json"
    spoils = st.one_of(file_spoils(source, name), *[json_spoils(source, name)] * 4)
    given, written = ("nrio", "rows", "seed"), ("table.csv", "table.md", "claims.md")
    table = ("result rows", "analysis.aggregate", (".", "--allow-missing"), given, source, "rows")
    return cases(*table, spoils, check_table, written) | cases(*table, odd_rows(source, name))


def odd_rows(source: Path, name: str) -> Spoils:
    """A row whose names are paths or another run's, or whose numbers cannot be."""
    row = json.loads((source / name).read_text())
    values = {
        "run_id": ["../../../X", "/etc/passwd", "nrio-s0", "srio-s1", "nrio-s1/../x", *NO_NAMES],
        "preset": ["..", "smoke;touch Y", "a b", ".git", *NO_NAMES],
        "variant": ["../nrio", "nrio\n", "-rf", "NRIO", *NO_NAMES],
        "seed": [-1, 10**30, 1.5, 1e300, True],
        "stage": [-1, "../1", 10**30, "\x1b[2J"],
        **dict.fromkeys(("params", "d_model"), [-1, 0, 1e300, math.nan]),
        **dict.fromkeys(("wall_s", "tokens_per_s"), [-1, 1e300, math.nan, math.inf, None]),
        **{f"{part}.{of}": OUT_OF_RANGE for part in ("tokens", "flops")
           for of in ("parent", "operator", "stage", "total")},
        **{f"metrics.{x}": OUT_OF_RANGE for x in ("train_loss", "val_loss", "val_loss_start")},
        **{f"curve.{of}": [[], None, {}, row["curve"][of][:-1],
                           *([*row["curve"][of][:-1], odd] for odd in (-1, 1e300, math.nan))]
           for of in ("tokens", "train", "val_tokens", "val")},
        **{f"curve.{x} backwards": [row["curve"][x][::-1], [0] * len(row["curve"][x])]
           for x in ("tokens", "val_tokens")},
    }  # fmt: skip
    lies = []
    for place in values:
        part, _, key = place.removesuffix(" backwards").partition(".")
        for value in values[place]:
            lie = row | {part: row[part] | {key: value} if key else value}
            lies.append((f"{place} {str(value)[:40]!r}", dump(lie)))
    twin = dump(row | {"run_id": row["run_id"].upper(), "variant": row["variant"].upper()})
    twin = twin.replace(b"NRIO-S1", b"NRIO-s1")
    other = "a row of another case", lambda folder: (folder / "NRIO-s1.json").write_bytes(twin)
    return st.sampled_from(lies).map(writing(name)) | st.just(other)


NO_NAMES = ["", "x" * 300, "\x1b[2J", "a\0b", "a\u202eb", "con fig", "$(id)", "nrio-s1\r"]
OUT_OF_RANGE = [-1, 1e300, math.nan, None, "1"]


def publishing(world: Path) -> Cases:
    """Rows that must not reach results/, and folders that must not name one there."""
    source, sound = world / "grid" / "rows", ("nothing", lambda folder: None)
    names = st.sampled_from(["my x;touch Y", "-x", " ", "a\nb", ".x", "$(id)", "☃", "'; rm x"])
    spoilt = st.tuples(st.just("out"), odd_rows(source, "nrio-s1.json"))

    def case(found: tuple[str, Spoil]) -> Case:
        name, (what, act) = found

        def make(folder: Path) -> None:
            shutil.copytree(source, folder / name / "rows")
            act(folder / name / "rows")

        call = "checks.fuzz.files:publish_here"
        given = ("rows/nrio-s1.json", "rename")
        return Case("publishing", f"{name!r}: {what}", call, (name,), given, make)

    return (spoilt | st.tuples(names, st.just(sound))).map(case)


def publish_here(out: Path) -> None:
    """run_ablations.py --publish, into the folder of the case."""
    from analysis import publish

    publish.ROOT = Path.cwd()
    publish.publish(out)


def check_table(folder: Path) -> None:
    import pandas as pd

    df = pd.read_csv(folder / "table.csv")
    assert {"scratch", "parent"} <= set(df["variant"]) and (df["n"] >= 0).all()


def grid_folders(world: Path) -> Cases:
    """Spoilt notes of the scheduler and rows, read by run_ablations.py --status."""
    row = json.loads((world / "grid" / "rows" / "nrio-s0.json").read_text())
    files = {
        "jobs/nrio-s0/state.json": {"state": "failed", "reason": "out of memory", "log": "x/log"},
        "rows/nrio-s0.json": row,
        "rows/parent-s0.json": row | {"variant": "parent", "run_id": "parent-s0"},
    }
    arguments = ("--status", "--preset", "smoke", "--out", "out", "--only", "nrio", "--seeds", "0")

    def of(name: str) -> Cases:
        folder = world / "notes" / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(dump(files[name]))
        spoils, given = (
            file_spoils(folder, name) | json_spoils(folder, name),
            (Path(name).name, name),
        )
        return cases(
            "grid folders", "run_ablations", arguments, given, folder, "out", spoils, ends_well
        )

    return st.one_of(list(map(of, files)))  # fmt: skip


def run_folders(world: Path) -> Cases:
    """A spoilt folder of an interrupted run, continued by the same command. A damaged checkpoint is
    skipped: the run starts again from the one before, or from the start."""
    source, step, finished = world / "run", "step_00000002", world / "finished"
    names = ("config.json", "metrics.jsonl", "progress.json")
    names += tuple(f"{step}/{part}.safetensors" for part in ("model", "optimizer"))
    spoils = [file_spoils(source, name) for name in names]
    fields = json_spoils(source, f"{step}/state.json")
    spoils += [json_spoils(source, "config.json"), fields]
    spoils += [forged(fields, lambda folder: reseal(folder / step))]
    ended = file_spoils(finished, "done.json") | json_spoils(finished, "done.json")
    given = ("run", "config", "metrics", "done", "step_")
    return st.one_of([
        cases("run folders", "train", run_arguments(), given, place, "run", found, check_init,
              ("run",), world / "corpus")
        for place, found in ((source, st.one_of(spoils)), (finished, ended))
    ])  # fmt: skip


# ---- the environment


ENVIRONMENTS = (  # what a shell, a notebook, a batch system or another program may have left
    *({"LC_ALL": name, "LANG": name, "PYTHONUTF8": "0"} for name in ("C", "POSIX", "xx_YY.no")),
    *({"PYTHONIOENCODING": name} for name in ("ascii", "latin-1:strict", "utf-16")),
    *({"COLUMNS": n, "LINES": n} for n in ("1", "0", "-1", "x", "99999999")),
    *({name: None} for name in ("HOME", "PATH", "LANG", "TERM", "USER")),
    *({name: "/nowhere/at all"} for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR")),
    *({"MPLBACKEND": name} for name in ("module://matplotlib_inline.backend_inline", "x", "TkAgg")),
    *({"NO_COLOR": "1", "TERM": term} for term in ("dumb", "", "xterm")),
    {"FORCE_COLOR": "1"}, {"TZ": "Nowhere/Else"}, {"PYTHONOPTIMIZE": "2"}, {"SLURM_JOB_ID": "7"},
    {"CUDA_VISIBLE_DEVICES": "nothing"}, {"PYTHONHASHSEED": "3"}, {"DISPLAY": ":99"},
    *({"OMP_NUM_THREADS": n} for n in ("x", "0", "-1")),
)  # fmt: skip
REFUSED = ({"RANK": "x"}, {"WORLD_SIZE": "-2"}, {"RANK": "1"}, {"WORLD_SIZE": "2"})
READ_ONLY = ("unshare", "-rm", "sh", "-c", "mount --bind . . && mount -o remount,bind,ro . && "
             "cd \"$PWD\" && exec \"$@\"", "sh")  # fmt: skip


def environments(world: Path) -> Cases:
    """Sound commands where the environment, the folder or the file system is odd; all of them real
    ones, for much of that is looked at when Python starts."""
    run, corpus = run_arguments(), lambda folder: (folder / "corpus").symlink_to(world / "corpus")

    def rows_here(folder: Path) -> None:
        shutil.copytree(world / "grid" / "rows", folder / "rows")

    def pictures(folder: Path) -> None:
        assert len(list((folder / "pictures").glob("*.png"))) == 1

    table = ("analysis.aggregate", (".",), rows_here, check_table, ("table.csv", "table.md",
             "claims.md"))  # fmt: skip
    drawn = ("figures.loss_curves", (".", "--out", "pictures"), rows_here, pictures, ("pictures",))
    trained = ("train", run, corpus, check_init, ("run",))
    text = ("--source", f"file:{world / 'texts'}", "--tokenizer", "byte", "--out", "corpus")
    text = ("data.prepare", (*text, "--val-fraction", "0.2"), lambda f: None, check_corpus,
            ("corpus",))  # fmt: skip

    def case(about: str, work: tuple, env: dict | None = None, words: tuple = (),
             given: tuple[str, ...] = ()) -> Case:  # fmt: skip
        program, arguments, make, check, writes = work
        return Case("environments", f"{program}: {about}", f"{program}:main", arguments, given,
                    make, check, writes, tuple((env or {}).items()), words)  # fmt: skip

    found = [case(str(env), work, env) for env in ENVIRONMENTS
             for work in (table, drawn, trained, text)]  # fmt: skip
    found += [case(str(env), (*trained[:3], None, ()), env, given=tuple(env)) for env in REFUSED]
    for name in ("a: b", "2026-01-01T10:00:00", "it's $HOME", "-x", "ü ☃", "a\nb"):
        place = Path(name).name
        work = ("train", (f"--out={name}", *run[2:]), corpus,
                lambda f, place=place: check_run(f / place), (place,))  # fmt: skip
        found.append(case(f"--out={name!r}", work))
    for name in ("wandb", "tensorboard", "datasets", "tests", "data"):

        def beside(folder: Path, name: str = name) -> None:
            corpus(folder)
            (folder / name).mkdir()

        found.append(case(f"beside a folder {name}/", (*trained[:2], beside, *trained[3:])))
        if name in ("wandb", "tensorboard"):
            asked = ("train", (*run, "--tracker", name), beside, None, ())
            found.append(case(f"--tracker {name} beside {name}/", asked, {"X": "1"}, (), (name,)))
    closed = [("run" if work is trained else "table" if work is table else "pictures", work)
              for work in (trained, table, drawn)]  # fmt: skip
    if subprocess.run([*READ_ONLY, "true"], cwd=world, capture_output=True).returncode == 0:
        found += [case("read-only", (*work[:3], None, ()), None, READ_ONLY, (name, "Read-only"))
                  for name, work in closed]  # fmt: skip
    return st.sampled_from(found)


SETTINGS = (  # slurm.toml
    "", "=", "[", "partition", "partition = 7", "nodes = -1", "nodes = 1.5", "nodes = true",
    "nodes = 99999999999999999999", "minutes = 'x'", "setup = 'module load'", "setup = [[1]]",
    "extra = 'x'", "extra = []", "unknown = 1", "[slurm]\nnodes = 1", "nodes = 1\nnodes = 2",
    "a = " + "[" * 5000, "partition = \"\\u0000\"", "python = []", "nodes = nan", "minutes = 1e9",
    "a.b.c = 1", "partition = '''x\n#SBATCH --wrap=evil'''", "setup = [1, 2]", "mem_gb = inf",
    "account = \"two words\"", "gres = 1979-05-27", "x" * 100_000,
)  # fmt: skip


def slurm_settings(world: Path) -> Cases:
    """--slurm-config files, TOML and JSON, good enough for a SlurmConfig or refused."""
    sound = {"partition": "gpu", "nodes": 1, "setup": ["module load cuda"], "extra": {"x": "y"}}
    toml = [(text[:40], text.encode()) for text in SETTINGS] + list(BOMBS)
    spoilt = spoilt_json(sound).map(lambda found: (found[0], dump(found[1])))

    def case(name: str) -> Callable[[tuple[str, bytes]], Case]:
        def make(found: tuple[str, bytes]) -> Case:
            what, act = writing(name)(found)
            call = "cluster.slurm:load_config"
            return Case("Slurm settings", what, call, (name,), (name,), act, ends_well)

        return make

    json_file = st.sampled_from(BOMBS) | spoilt
    return json_file.map(case("slurm.json")) | st.sampled_from(toml).map(case("slurm.toml"))
