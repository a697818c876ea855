"""Shared fixtures: one torch thread, and a tiny synthetic corpus that a small model can learn."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# what a shell's `&` or nohup leaves ignored, tests that stop their children by it would wait for
signal.signal(signal.SIGINT, signal.default_int_handler)
# a busy machine is slow, and no test is about that
hypothesis.settings.register_profile(
    "any", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any")

from data.shards import manifest_hash  # noqa: E402

torch.set_num_threads(1)


def write_corpus(
    folder: Path, vocab_size: int = 48, train: int = 12_000, val: int = 2_000, seed: int = 0
) -> Path:
    """A prepared corpus of random tokens where each mostly follows from the one before it."""
    rng = np.random.default_rng(seed)
    n = train + val
    follow, jump = rng.permutation(vocab_size), rng.random(n) < 0.2
    tokens = rng.integers(0, vocab_size, n)
    for i in range(1, n):
        if not jump[i]:
            tokens[i] = follow[tokens[i - 1]]
    folder.mkdir(parents=True)
    parts = {"train_00000.bin": tokens[:train], "val_00000.bin": tokens[train:]}
    shards = []
    for name, part in parts.items():
        data = part.astype("<u2").tobytes()
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        shards.append({"name": name, "tokens": len(part), "sha256": digest})
    manifest = {
        "format": 1,
        "source": "synthetic",
        "vocab_size": vocab_size,
        "eot": None,
        "tokenizer": {"spec": f"synthetic:{vocab_size}", "hash": "0" * 64},
        "shards": shards,
    }
    manifest["manifest_hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """The tiny synthetic corpus: 48 token ids, 12,000 training and 2,000 validation tokens."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "synthetic")


@pytest.fixture(scope="session")
def make_corpus():
    """write_corpus(folder, vocab_size, train, val, seed)."""
    return write_corpus
