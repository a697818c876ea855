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
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from checks.fuzz import damage as odd
from checks.fuzz.damage import GONE, Act, Damage, Spoil, Spoils, dump, fields, lies, writing
from checks.fuzz.judge import Case, Cases, command
from checks.fuzz.options import check_run
from checks.fuzz.world import STEP, reseal, run_arguments

PARENT, MODEL = "grid/runs/parent-s0/final", "model.safetensors"
GROW, WIDE = ("--out", "wide", "--factor", "2"), ("wide",)
PREPARE = ("--tokenizer", "byte", "--out", "corpus", "--val-fraction", "0.2")
TABLE = ("table.csv", "table.md", "claims.md")
gz = partial(gzip.compress, mtime=0)  # the same bytes on every run


def spoilt(case: Case, source: Path, name: str, how: Spoils, corpus: Path | None = None) -> Cases:
    """`case` beside a copy of `source` called `name`, spoilt, and a link to the sound corpus."""

    def of(spoil: Spoil) -> Case:
        def make(folder: Path) -> None:
            shutil.copytree(source, folder / name)
            spoil[1](folder / name)
            if corpus:
                (folder / "corpus").symlink_to(corpus)

        return case.but(spoil[0], make=make)

    return how.map(of)


def ends_well(folder: Path) -> None:
    """For inputs that may as well be good: any result will do."""


# ---- checkpoints and Hugging Face folders


def checkpoints(world: Path) -> Cases:
    """A spoilt checkpoint as train.py --init and as grow.py SRC; half of them forged: their meta
    may say anything that makes sense, and a forger may even give other weights."""
    source, given = world / PARENT, ("ckpt", "model.", " h.0.")
    names = (MODEL, "optimizer.safetensors", "state.json")
    inside = fields(source, "state.json") | lying(source) | odd_tensors(source)
    broken, forged = st.one_of(odd.any_file(source, n) for n in names), odd.forged(inside, reseal)
    init = (*run_arguments(), "--init", "ckpt")
    train = command("checkpoints", "train", init, given, check=check_run, writes=("run",))
    grow = command("checkpoints", "grow", ("ckpt", *GROW), given, check=check_grown, writes=WIDE)
    return st.one_of([
        spoilt(of, source, "ckpt", how, world / "corpus") for case in (train, grow)
        for of, how in ((case, forged), (replace(case, check=None), broken))
    ])  # fmt: skip


def lying(source: Path) -> Spoils:
    return odd.lying_headers((source / MODEL).read_bytes()).map(writing(MODEL, "forged "))


def odd_tensors(source: Path) -> Spoils:
    """Sound safetensors files whose tensors are not those of the config."""
    import torch
    from safetensors.torch import load_file, save

    sound, up = load_file(source / MODEL), "h.0.mlp.up.weight"
    bad = [torch.full((32, 8), value) for value in (torch.nan, torch.inf, 3e38)]
    bad += [torch.zeros(32, 9), torch.zeros(0), torch.zeros(())]
    bad += [torch.zeros(32, 8, dtype=kind) for kind in (torch.int64, torch.complex64)]
    edits = [(f"{up} {t.dtype} {(*t.shape,)} of {t.flatten()[:1].tolist()}", {up: t}) for t in bad]
    edits += [
        ("a third layer", {"h.2.mlp.up.bias": torch.zeros(32)}),
        ("wte of another size", {"wte.weight": torch.zeros(9, 8)}),
        ("an unknown one", {"__class__": torch.zeros(1)}),
        (f"without {up}", {up: GONE}),
        ("without any", dict.fromkeys(sound, GONE)),
    ]
    found = [(what, save({name: t for name, t in (sound | edit).items() if t is not GONE}))
             for what, edit in edits]  # fmt: skip
    return st.sampled_from(found).map(writing(MODEL, "tensors: "))


def hugging_face(world: Path) -> Cases:
    """A spoilt Hugging Face folder as grow.py SRC, and as models/convert.py's source."""
    one, many, config = world / "hf", world / "hf_sharded", "config.json"
    names = ("model.safetensors.index.json", sorted(many.glob("*.safetensors"))[1].name)
    of_one = odd.any_file(one, config) | lying(one) | lies(one, config, ODD_CONFIGS)
    of_many = st.one_of([odd.any_file(many, name) for name in names])
    group, given = "Hugging Face folders", ("model", "safetensors", "config", "width")
    grow = command(group, "grow", ("model", *GROW), given, check=check_grown, writes=WIDE)
    to_ours = ("from-gpt2", "model", "wide")
    convert = command(group, "models.convert", to_ours, given, check=check_ours, writes=WIDE)
    return st.one_of([spoilt(case, source, "model", how) for case in (grow, grow, convert)
                      for source, how in ((one, of_one), (many, of_many))])  # fmt: skip


ODD_CONFIGS = {  # sizes and switches that contradict the weights, or ask for code
    "n_embd": (0, -8, 9, 10**9, 10**18, "8", 8.0, None, True),
    "n_layer": (0, -1, 1, 3, 10**7, 10**18, "2"),
    "n_head": (0, -1, 3, 10**9, None),
    "n_inner": (0, -1, 10**12), "vocab_size": (0, 10**15), "n_positions": (10**15,),
    "layer_norm_epsilon": (-1, "x"), "dtype": ("nope", 7), "torch_dtype": ("int8",),
    "model_type": ("bert", "llama", "t5", "nope", "", None, ["gpt2"], {}),
    "activation_function": ("os.system", None), "tie_word_embeddings": (False,),
    "architectures": (["os"], ["Trainer"], "x", [None], [7], {"a": 1}),
    "quantization_config": ({"quant_method": "x"},),
    "auto_map": ({"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},),
}  # fmt: skip


def check_ours(folder: Path) -> dict:
    """The new checkpoint loads; its meta."""
    import checkpoint

    made = checkpoint.load(folder / "wide")
    assert checkpoint.model_config(made)
    return made.meta


def check_grown(folder: Path) -> None:
    """The child loads, and computes what its parent does."""
    from safetensors.torch import load_file

    card = folder / "wide" / "growth_report.json"  # in a Hugging Face folder
    of_ours = None if card.exists() else check_ours(folder)["growth"]["report"]
    report = of_ours or json.loads(card.read_text())
    assert load_file(folder / "wide" / MODEL) and report["max_abs_dlogit"] < 1e-3, report


# ---- corpora and texts


def corpora(world: Path) -> Cases:
    """A spoilt manifest or shard, read by train.py; some with a manifest_hash that fits again.
    Fields that describe the corpus (source, counts, settings) may say anything."""
    source, name = world / "corpus", "manifest.json"
    shards = json.loads((source / name).read_text())["shards"]
    table = ODD_MANIFESTS | {"shards": ([], {}, None, [[]], [None], shards * 2)}
    described = odd.any_file(source, name) | odd.forged(fields(source, name), rehash_manifest)
    wrong = [odd.any_file(source, f"{split}_00000.bin") for split in ("train", "val")]
    wrong += [odd.forged(lies(source, name, table), rehash_manifest)]
    case = command("corpora", "train", run_arguments(), ("corpus", "vocab"), writes=("run",))
    described = spoilt(replace(case, check=check_run), source, "corpus", described)
    return described | spoilt(case, source, "corpus", st.one_of(wrong))


ODD_MANIFESTS = {  # counts, names and ids that lie
    "shards.0.name": (
        *("../corpus/train_00000.bin", "/etc/passwd", "train_00000.bin\0", "train_00000.bin\n"),
        *("train_0.bin", "TRAIN_00000.bin", "", None, "val_00000.bin", "train_99999.bin"),
        "train_٠٠٠٠٠.bin",
    ),
    "shards.0.tokens": (0, -1, 1, 10**18, 10**400, 1.5, "9", None, True),
    "shards.0.sha256": ("", "0" * 64, None, 7, "z" * 64),
    "vocab_size": (0, 1, 5, 65536, -1, 2.5, None, "257", 10**30, True),
    "eot": (-1, 257, 10**30, "x", 1.5, True),
    "format": (2, "1"),
    "tokenizer": ({}, [], None, {"spec": 1, "hash": 2}),
}


def rehash_manifest(folder: Path) -> None:
    from data.shards import manifest_hash

    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    path.write_bytes(dump(manifest | {"manifest_hash": manifest_hash(manifest)}))


TEXTS = {  # how the name ends -> bad contents
    "txt": (b"", b" \n\n\t", "Äpfel für alle".encode("latin-1") * 50, b"PK\x03\x04" + bytes(60),
            ("text " * 200).encode("utf-16"), b"x", b"\xed\xa0\x80" * 100),
    "jsonl": (b"", b'{"text": "good"}\n{"text": "cut of', b"[1, 2]\n", b'{"text": 7}\n',
              b'{"text": null}\n', b'{"body": "good"}\n', b"[" * 200_000 + b"\n", b"\0" * 500,
              b'{"text": ' + b"9" * 5000 + b"}\n", b'{"text": "\\ud800"}\n',
              bytes(range(256)) * 20),
    "json": (b"[1, 2]\n", b'[{"text": "good"}, {"te', b"[" * 200_000, b'[{"text": null}]'),
    "parquet": (b"", b"PAR1 this is none PAR1", b"PAR1" + b"\xff" * 400 + b"PAR1",
                b"PAR1" + b"\0" * 40 + (2**31 - 1).to_bytes(4, "little") + b"PAR1"),
    "txt.gz": (gz(b"word " * 4000)[:-30],),
    "gz": (b"no gzip, but its name says so\n",),
    "jsonl.gz": (gz(b""),),
    "jsonl.bz2": (bz2.compress(b"word " * 4000)[:-30],),
    "jsonl.zst": (b"\x28\xb5\x2f\xfd nothing",),
    "parquet.gz": (gz(b"PAR1"),),
}  # fmt: skip
ODD_TEXTS = (b"\0" * 3000, b"good text\n" * 200_000 + b"\xff")  # documents, if one likes
# not read inside a folder, whatever they hold
BESIDE = {"a.pdf": b"%PDF-1.7", "b.docx": b"PK\x03\x04", "README": b"x", "c.exe": b"MZ\0"}
BESIDE |= {".hidden.txt": b"hidden", "cut.jsonl": b'{"text": "x', "empty.txt.gz": b""}


def sound_forms(texts: list[bytes]) -> dict[str, bytes]:
    """The same documents in every form that data/readers.py reads, under right and wrong names."""
    import pyarrow

    records = [{"text": text.decode()} for text in texts]
    lines, array, table = json_lines(texts), json.dumps(records).encode(), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    bz, zstd = bz2.compress, pyarrow.Codec("zstd").compress
    return {
        **{"jsonl": lines, "json": lines, "txt": lines, "array.json": array},
        **{"indented.json": dump(records), "bom.json": b"\xef\xbb\xbf" + lines},
        **{"parquet": table.getvalue(), "parquet.txt": table.getvalue()},
        **{"blank.jsonl": b"\n \n" + lines, "null.jsonl": b'{"text": null}\n' + lines},
        **{"jsonl.gz": gz(lines), "jsonl.bz2": bz(lines), "jsonl.xz": lzma.compress(lines)},
        **{"jsonl.zst": bytes(zstd(lines)), "gzip.jsonl": gz(lines), "array.json.gz": gz(array)},
        **{"members.jsonl.gz": gz(b"") + gz(lines) + gz(b"")},
        **{"members.json.bz2": bz(lines) + bz(b"")},
    }


def json_lines(texts: list[bytes]) -> bytes:
    return b"".join(json.dumps({"text": text.decode()}).encode() + b"\n" for text in texts)


def texts(world: Path) -> Cases:
    """Bad texts for data/prepare.py, alone and among good ones, with and without --skip-bad; sound
    ones in every form, which must all give the same number of tokens."""
    from data.shards import Corpus

    good = [path.read_bytes() for path in sorted((world / "texts").iterdir())]
    total = sum(map(Corpus(world / "corpus").n_tokens, ("train", "val")))

    def case(text: Damage, among: bool, skip: bool) -> Case:
        (name, data), kind = text, text[0].split(".")[0]
        among = kind == "random" or among and kind != "sound"
        skips = ("--skip-bad",) if skip and (among or kind == "sound") else ()
        others = {f"good{i}.txt": text for i, text in enumerate(good)} if among else {}
        others |= BESIDE if skips and not among else {}

        def make(folder: Path) -> None:
            (folder / "texts").mkdir()
            for other, content in {name: data, **others}.items():
                (folder / "texts" / other).write_bytes(content)

        check = partial(check_corpus, total=total if kind == "sound" else None)
        check = check if among or kind in ("sound", "odd") else None
        about = " ".join((f"{name}: {odd.shown(data)}", *["among good texts"] * among, *skips))
        arguments = ("--source", "file:texts", *PREPARE, *skips)
        found = command("texts", "data.prepare", arguments, ("texts", name), writes=("corpus",))
        return replace(found, name=about, make=make, check=check)

    found = [(f"bad.{end}", data) for end in TEXTS for data in TEXTS[end]]
    found += [("odd.txt", data) for data in ODD_TEXTS]
    found += [(f"sound.{end}", data) for end, data in sound_forms(good).items()]
    damaged = odd.spoilt_bytes(json_lines(good)) | odd.spoilt_bytes(good[0] * 9)
    damaged = damaged.map(lambda found: found[1])
    random = st.tuples(st.sampled_from(("random.jsonl", "random.txt")), damaged)
    return st.builds(case, st.sampled_from(found) | random, st.booleans(), st.booleans())


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
    how = st.one_of(odd.any_file(source, name), *[fields(source, name)] * 3)
    arguments, given = (".", "--allow-missing"), ("nrio", "rows", "seed")
    table = command("result rows", "analysis.aggregate", arguments, given, writes=TABLE)
    read = spoilt(replace(table, check=check_table), source, "rows", how)
    return read | spoilt(table, source, "rows", odd_rows(source, name))


def check_table(folder: Path) -> None:
    import pandas as pd

    df = pd.read_csv(folder / "table.csv")
    assert {"scratch", "parent"} <= set(df["variant"]) and (df["n"] >= 0).all()


NO_NAMES = ["", "x" * 300, "\x1b[2J", "a\0b", "a\u202eb", "con fig", "$(id)", "nrio-s1\r"]
OUT_OF_RANGE = [-1, 1e300, math.nan, None, "1"]
ODD_ROWS = {  # names that are paths or another run's, numbers that cannot be
    "run_id": ["../../../X", "/etc/passwd", "nrio-s0", "srio-s1", "nrio-s1/../x", *NO_NAMES],
    "preset": ["..", "smoke;touch Y", "a b", ".git", *NO_NAMES],
    "variant": ["../nrio", "nrio\n", "-rf", "NRIO", *NO_NAMES],
    "seed": [-1, 10**30, 1.5, 1e300, True],
    "stage": [-1, "../1", 10**30, "\x1b[2J"],
    **dict.fromkeys(("params", "d_model"), [-1, 0, 1e300, math.nan]),
    **dict.fromkeys(("wall_s", "tokens_per_s"), [-1, 1e300, math.nan, math.inf, None]),
    **dict.fromkeys(("metrics.train_loss", "metrics.val_loss"), OUT_OF_RANGE),
    **{"metrics.val_loss_start": OUT_OF_RANGE},
    **{f"{part}.{of}": OUT_OF_RANGE for part in ("tokens", "flops")
       for of in ("parent", "operator", "stage", "total")},
}  # fmt: skip


def odd_rows(source: Path, name: str) -> Spoils:
    """Impossible rows, and a row of a case that differs only by its capital letters."""
    row = json.loads((source / name).read_text())
    table = dict(ODD_ROWS)
    for of in ("tokens", "train", "val_tokens", "val"):
        *cut, last = curve = row["curve"][of]
        table[f"curve.{of}"] = [[], None, {}, cut, *([*cut, v] for v in (-1, 1e300, math.nan))]
        table[f"curve.{of}"] += [curve[::-1], [0] * len(curve)] if "tokens" in of else []
    twin = dump(row | {"run_id": "NRIO-s1", "variant": "NRIO"})
    other = "a row of another case", lambda folder: (folder / "NRIO-s1.json").write_bytes(twin)
    return lies(source, name, table) | st.just(other)


def publishing(world: Path) -> Cases:
    """Rows that must not reach results/, and folders that must not name one there."""
    source, sound = world / "grid" / "rows", st.just(("nothing", lambda folder: None))
    names = st.sampled_from(["my x;touch Y", "-x", " ", "a\nb", ".x", "$(id)", "☃", "'; rm x"])

    def of(name: str, how: Spoils) -> Cases:
        call, given = "checks.fuzz.files:publish_here", ("rows/nrio-s1.json", "rename")
        case = Case("publishing", repr(name), call, (name,), given)
        return spoilt(case, source, f"{name}/rows", how)

    return of("out", odd_rows(source, "nrio-s1.json")) | names.flatmap(lambda name: of(name, sound))


def publish_here(out: Path) -> None:
    """run_ablations.py --publish, into the folder of the case."""
    from analysis import publish

    publish.ROOT = Path.cwd()
    publish.publish(out)


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
        given = (Path(name).name, name)
        case = command("grid folders", "run_ablations", arguments, given, check=ends_well)
        return spoilt(case, folder, "out", odd.any_file(folder, name))

    return st.one_of(map(of, files))


def run_folders(world: Path) -> Cases:
    """A spoilt folder of an interrupted run, continued by the same command. A damaged checkpoint is
    skipped: the run starts again from the one before, or from the start."""
    run, finished, state = world / "run", world / "finished", f"{STEP}/state.json"
    names = ("config.json", "metrics.jsonl", "progress.json", state)
    names += tuple(f"{STEP}/{part}.safetensors" for part in ("model", "optimizer"))
    broken = [odd.any_file(run, name) for name in names]
    broken += [odd.forged(fields(run, state), lambda folder: reseal(folder / STEP))]
    ended, given = (
        odd.any_file(finished, "done.json"),
        ("run", "config", "metrics", "done", "step_"),
    )
    case = command("run folders", "train", run_arguments(), given, check=check_run, writes=("run",))
    case = partial(spoilt, case, name="run", corpus=world / "corpus")
    return case(source=run, how=st.one_of(broken)) | case(source=finished, how=ended)


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
    fields = odd.spoilt_json(sound).map(lambda found: (found[0], dump(found[1])))
    bombs, texts = st.sampled_from(odd.BOMBS), [(text[:40], text.encode()) for text in SETTINGS]

    def case(spoil: Spoil) -> Case:
        (what, act), name = spoil, spoil[0].split(":")[0]
        call = "cluster.slurm:load_config"
        return Case("Slurm settings", what, call, (name,), (name,), act, ends_well)

    as_json = (bombs | fields).map(writing("slurm.json"))
    return (as_json | (bombs | st.sampled_from(texts)).map(writing("slurm.toml"))).map(case)


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
NAMES = ("a: b", "2026-01-01T10:00:00", "it's $HOME", "-x", "ü ☃", "a\nb")  # of --out
READ_ONLY = ("unshare", "-rm", "sh", "-c", "mount --bind . . && mount -o remount,bind,ro . && "
             "cd \"$PWD\" && exec \"$@\"", "sh")  # fmt: skip


def environments(world: Path) -> Cases:
    """Sound commands where the environment, the folder or the file system is odd; all of them real
    ones, for much of that is looked at when Python starts."""
    run, text = run_arguments(), ("--source", f"file:{world / 'texts'}", *PREPARE)

    def sound(program: str, arguments: tuple[str, ...], check: Act, *writes: str, given="") -> Case:
        make = lambda f: given and shutil.copytree(world / given, f / Path(given).name)  # noqa: E731
        return Case("environments", program, f"{program}:main", arguments, (), make, check, writes)

    def refused(case: Case, about: object, *blames: str, **changes) -> Case:
        return case.but(about, blames=blames, check=None, writes=(), **changes)

    table = sound("analysis.aggregate", (".",), check_table, *TABLE, given="grid/rows")
    draw = (".", "--out", "pictures")
    drawn = sound("figures.loss_curves", draw, check_pictures, "pictures", given="grid/rows")
    train = sound("train", run, check_run, "run", given="corpus")
    works = (table, drawn, train, sound("data.prepare", text, check_corpus, "corpus"))
    found = [work.but(e, env=(*e.items(),)) for e in ENVIRONMENTS for work in works]
    found += [refused(train, env, *env, env=(*env.items(),)) for env in REFUSED]
    for name in NAMES:
        arguments, check = (f"--out={name}", *run[2:]), partial(check_run, out=name)
        found.append(train.but(f"--out={name!r}", arguments=arguments, check=check, writes=(name,)))
    for name in ("wandb", "tensorboard", "datasets", "tests", "data"):
        beside = lambda f, name=name: (train.make(f), (f / name).mkdir())  # noqa: E731
        found.append(train.but(f"beside a folder {name}/", make=beside))
        if name in ("wandb", "tensorboard"):
            asked = {"arguments": (*run, "--tracker", name), "env": (("X", "1"),), "make": beside}
            found.append(refused(train, f"--tracker {name} beside {name}/", name, **asked))
    if subprocess.run([*READ_ONLY, "true"], cwd=world, capture_output=True).returncode == 0:
        for work, place in ((train, "run"), (table, "table"), (drawn, "pictures")):
            found.append(refused(work, "read-only", place, "Read-only", words=READ_ONLY))
    return st.sampled_from(found)


def check_pictures(folder: Path) -> None:
    assert len(list((folder / "pictures").glob("*.png"))) == 1
