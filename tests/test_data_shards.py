"""Corpus: batch_at is a pure function, no window twice in an epoch, broken shards are refused."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import shards
from data.prepare import ShardWriter
from data.shards import Corpus, manifest_hash
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]
T = 8


def write_manifest(folder: Path, **changes) -> None:
    """Rewrites the manifest with changes, its own hash brought in line."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    manifest["manifest_hash"] = manifest_hash(manifest)
    path.write_text(json.dumps(manifest))


def make_corpus(folder: Path, train: int = 1003, val: int = 300, shard_tokens: int = 250) -> Path:
    """A corpus whose token ids count up, so that a window says where it came from."""
    folder.mkdir(parents=True)
    manifest = {"format": 1, "vocab_size": 5000, "eot": 4999, "shards": []}
    manifest["tokenizer"] = {"spec": "byte", "hash": "-"}
    for split, count, first in (("train", train, 0), ("val", val, 2000)):
        writer = ShardWriter(folder, split, shard_tokens)
        writer.add(list(range(first, first + count)), 0)
        writer.close()
        manifest["shards"] += writer.shards
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_manifest(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return make_corpus(tmp_path / "corpus")


def test_counts(folder):
    corpus = Corpus(folder, verify="hash")
    assert corpus.n_tokens("train") == 1003 and corpus.n_tokens("val") == 300
    # four shards of 250 give (250 - 1) // 8 = 31 windows each, the fifth, of 3 tokens, none
    assert corpus.n_windows("train", T) == 4 * 31
    assert corpus.vocab_size == 5000 and corpus.eot == 4999


def test_targets_are_inputs_shifted_by_one_and_never_cross_a_shard(folder):
    corpus = Corpus(folder)
    for step in range(20):
        x, y = corpus.batch_at(step, data_seed=1, batch_size=10, block_size=T)
        assert x.shape == y.shape == (10, T) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(y - x, torch.ones_like(x))
        assert torch.equal(x[:, 0] // 250, y[:, -1] // 250)


def test_batch_at_is_pure_in_any_call_order(folder):
    steps = [40, 0, 12, 12, 3, 40, 25, 0]
    fresh = {s: Corpus(folder).batch_at(s, 5, 10, T)[0] for s in set(steps)}
    corpus = Corpus(folder)
    list(corpus.eval_batches(100, 4, T))
    corpus.batch_at(7, 6, 3, 2 * T)
    for step in steps:
        assert torch.equal(corpus.batch_at(step, 5, 10, T)[0], fresh[step])


@pytest.mark.parametrize("step", [0, 3, 12, 13, 200])  # step 12 reaches over the first epoch's end
@pytest.mark.parametrize("parts", [1, 2, 5, 10])
def test_any_split_over_ranks_and_micro_batches_sees_the_same_tokens(folder, step, parts):
    corpus = Corpus(folder)
    whole_x, whole_y = corpus.batch_at(step, 0, 10, T)
    size = 10 // parts
    cuts = [corpus.batch_at(step, 0, 10, T, i * size, (i + 1) * size) for i in range(parts)]
    assert torch.equal(torch.cat([x for x, _ in cuts]), whole_x)
    assert torch.equal(torch.cat([y for _, y in cuts]), whole_y)


@pytest.mark.parametrize("batch_size", [1, 10, 31, 124])
def test_no_window_twice_in_an_epoch_and_all_of_them_once(folder, batch_size):
    corpus = Corpus(folder)
    n = corpus.n_windows("train", T)
    steps = -(-2 * n // batch_size)
    firsts = torch.cat([corpus.batch_at(s, 3, batch_size, T)[0][:, 0] for s in range(steps)])
    one, two = firsts[:n].tolist(), firsts[n : 2 * n].tolist()
    assert len(set(one)) == n and set(one) == set(two)
    assert one != two  # every epoch has its own order


def test_seed_decides_the_order_and_width_of_the_batch_does_not(folder):
    corpus = Corpus(folder)
    assert not torch.equal(corpus.batch_at(0, 0, 20, T)[0], corpus.batch_at(0, 1, 20, T)[0])
    halves = [corpus.batch_at(s, 0, 10, T)[0] for s in (0, 1)]
    assert torch.equal(torch.cat(halves), corpus.batch_at(0, 0, 20, T)[0])


def test_order_is_the_recorded_one():
    """Fails when a numpy release changes its streams: old rows could then not be reproduced."""
    assert shards._epoch_order(10, 0, 0).tolist() == GOLDEN_ORDER
    assert sorted(shards._epoch_order(1000, 2**63 - 1, 10**6)) == list(range(1000))


GOLDEN_ORDER = [0, 7, 8, 6, 9, 5, 1, 3, 2, 4]


def test_far_steps_do_not_overflow(folder):
    assert Corpus(folder).batch_at(10**15, 0, 10, T)[0].shape == (10, T)


def test_eval_batches_are_fixed_spread_and_complete(folder):
    corpus = Corpus(folder)
    n = corpus.n_windows("val", T)
    batches = list(corpus.eval_batches(10 * T, 4, T))
    again = list(corpus.eval_batches(10 * T, 3, T))
    x = torch.cat([x for x, _ in batches])
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert torch.equal(x, torch.cat([x for x, _ in again]))  # whatever the batch size
    assert len(set(x[:, 0].tolist())) == 10 and x[-1, 0] - x[0, 0] > 200  # spread over 300 tokens
    assert x.min() >= 2000  # never a training token
    assert sum(len(x) for x, _ in corpus.eval_batches(10**9, 7, T)) == n  # never more than all


def test_bad_arguments_say_the_range(folder):
    corpus = Corpus(folder)
    with pytest.raises(UserError, match=r"batch_size 125 .* 124 training windows.* 1\.\.124"):
        corpus.batch_at(0, 0, 125, T)
    with pytest.raises(UserError, match=r"block_size 250 is longer.* 1\.\.249"):
        corpus.batch_at(0, 0, 1, 250)
    with pytest.raises(UserError, match="val shard"):
        list(corpus.eval_batches(1000, 1, 250))
    with pytest.raises(UserError, match="data_seed is -1"):
        corpus.batch_at(0, -1, 1, T)
    with pytest.raises(UserError, match="block_size is 0"):
        corpus.n_windows("train", 0)
    with pytest.raises(UserError, match="batch_size is 0"):
        list(corpus.eval_batches(100, 0, T))
    with pytest.raises(UserError, match="choose size or hash"):
        Corpus(folder, verify="none")


def test_truncated_shard_is_refused_by_name(folder):
    path = folder / "train_00002.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train_00002\.bin has 498 bytes, its manifest says 500"):
        Corpus(folder)


def test_empty_shard_is_refused_by_name(folder):
    (folder / "val_00000.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"val_00000\.bin has 0 bytes"):
        Corpus(folder)


def test_altered_shard_is_refused_by_name_when_hashes_are_checked(folder):
    path = folder / "train_00001.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    Corpus(folder)  # sizes alone cannot tell
    with pytest.raises(UserError, match=r"train_00001\.bin: its sha256 differs"):
        Corpus(folder, verify="hash")


def test_swapped_shards_are_refused_when_hashes_are_checked(folder):
    a, b = folder / "train_00000.bin", folder / "train_00001.bin"
    a.rename(folder / "x"), b.rename(a), (folder / "x").rename(b)
    with pytest.raises(UserError, match=r"train_00000\.bin: its sha256 differs"):
        Corpus(folder, verify="hash")


def test_renamed_shard_is_missed_by_name(folder):
    (folder / "train_00003.bin").rename(folder / "train_00009.bin")
    with pytest.raises(UserError, match=r"train_00003\.bin cannot be read"):
        Corpus(folder)


def test_token_beyond_the_vocabulary_is_found(folder):
    write_manifest(folder, vocab_size=1000, eot=None)
    with pytest.raises(UserError, match="holds token id 1002, vocab_size is 1000"):
        Corpus(folder, verify="hash")


def shard(**changes) -> dict:
    return {"name": "train_00000.bin", "tokens": 250, "sha256": "0" * 64} | changes


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"format": 2}, "format 1"),
        ({"vocab_size": 70000}, "vocab_size is 70000"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"eot": 5000}, "eot is 5000"),
        ({"tokenizer": "byte"}, "no spec and hash"),
        ({"shards": {}}, "not a list"),
        ({"shards": [shard(name="../train_00000.bin")]}, "shard name"),
        ({"shards": [shard(name="/etc/passwd")]}, "shard name"),
        ({"shards": [shard(name="train_00000.bin\n")]}, "shard name"),
        ({"shards": [3]}, "shard name"),
        ({"shards": [shard(tokens=-1)]}, "no token count"),
        ({"shards": [shard(sha256="x")]}, "no sha256"),
        ({"shards": [shard(), shard()]}, "listed twice"),
        ({"vocab_size": 5001}, "manifest_hash does not fit"),
    ],
)
def test_manifest_that_makes_no_sense_is_refused(folder, changes, problem):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=problem):
        Corpus(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_manifest_that_is_no_manifest_is_refused(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match="manifest.json"):
        Corpus(folder)


def test_huge_manifest_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(shards, "MANIFEST_BYTES", 100)
    with pytest.raises(UserError, match="manifest.json has .* a real one at most 100"):
        Corpus(folder)


def test_missing_folder_names_the_command(tmp_path):
    with pytest.raises(UserError, match="run: python data/prepare.py --out"):
        Corpus(tmp_path / "nothing")


def test_manifest_hash_is_of_the_data_alone(folder, tmp_path):
    other = make_corpus(tmp_path / "other")
    write_manifest(other, settings={"source": "elsewhere"})
    assert Corpus(folder).manifest_hash == Corpus(other).manifest_hash
    longer = make_corpus(tmp_path / "longer", train=1004)
    assert Corpus(folder).manifest_hash != Corpus(longer).manifest_hash


READ_ALL = """
import resource, sys
from pathlib import Path
from data.shards import Corpus
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
corpus = Corpus(Path(sys.argv[1]), verify="hash")
for step in range(corpus.n_windows("train", 1024) // 64 // 5):
    corpus.batch_at(step, 0, 64, 1024)
print(peak() - before)
"""


@pytest.mark.slow
def test_reading_here_and_there_in_a_large_corpus_stays_within_memory(tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    big = np.random.default_rng(0).integers(0, 5000, 40_000_000, dtype=np.uint16)
    listed = json.loads((folder / "manifest.json").read_text())["shards"]
    listed = [s for s in listed if s["name"].startswith("val")]
    for i in range(5):  # 5 x 80 MB
        name = f"train_{i:05d}.bin"
        (folder / name).write_bytes(big)
        digest = hashlib.sha256(big).hexdigest()
        listed.append({"name": name, "tokens": len(big), "sha256": digest})
    write_manifest(folder, shards=listed)
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert int(done.stdout) < 320, done.stderr  # MB, for 400 MB of shards
