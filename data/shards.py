"""A prepared corpus: memory-mapped uint16 shards, and `batch_at`, a pure function of the step.

A corpus is a folder: manifest.json, train_00000.bin ..., val_00000.bin ... (raw little-endian
uint16 token ids, documents separated by EOT) and, for a trained BPE, tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import files
from errors import UserError

if TYPE_CHECKING:
    import torch

FORMAT = 1
SPLITS = ("train", "val")
SHARD_NAME = re.compile(r"(train|val)_\d{5}\.bin")  # also keeps paths out of the manifest
MANIFEST_BYTES = 32 << 20
# Pages read through a map count as our memory until they are let go, and one window can map 2 MB
# (the kernel maps what its cache holds around it). A corpus larger than SMALL_BYTES lets go every
# so many windows, 256 MB at most; a smaller one may stay mapped, which reads 2 to 3 times faster.
SMALL_BYTES = 256 << 20
WINDOWS_BETWEEN_RELEASES = 128


def read_manifest(folder: Path) -> dict:
    """The checked manifest of a corpus folder; UserError when it is missing or makes no sense."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not a prepared corpus (no readable manifest.json); "
            f"run: python data/prepare.py --out {folder}"
        )
    manifest = files.read_json(path, MANIFEST_BYTES, "prepare the corpus again with --force")
    problem = _manifest_problem(manifest)
    if problem:
        raise UserError(f"{path}: {problem}; prepare the corpus again with --force")
    return manifest


def _manifest_problem(manifest: dict) -> str | None:
    """What is wrong with a manifest, or None. Nothing in it is trusted before this."""
    if manifest.get("format") != FORMAT:
        return f"not a corpus manifest of format {FORMAT}"
    vocab, eot = manifest.get("vocab_size"), manifest.get("eot")
    if not _is_count(vocab) or not 1 <= vocab <= 65535:
        return f"vocab_size is {vocab!r}, not in 1..65535"
    if "eot" not in manifest:
        return "eot is missing"
    if eot is not None and not (_is_count(eot) and eot < vocab):
        return f"eot is {eot!r}, not below vocab_size {vocab}"
    tokenizer, shards = manifest.get("tokenizer"), manifest.get("shards")
    if not isinstance(tokenizer, dict) or not all(
        isinstance(tokenizer.get(k), str) for k in ("spec", "hash")
    ):
        return "tokenizer has no spec and hash"
    if not isinstance(shards, list):
        return "shards is not a list"
    problem = next(filter(None, map(_shard_problem, shards)), None)
    if problem:
        return problem
    if len({shard["name"] for shard in shards}) < len(shards):
        return "a shard is listed twice"
    if manifest.get("manifest_hash") != manifest_hash(manifest):
        return "its manifest_hash does not fit its content: altered"
    return None


def _shard_problem(shard: object) -> str | None:
    name = shard.get("name") if isinstance(shard, dict) else None
    if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
        return f"shard name {str(name)[:80]!r} is not of the form train_00000.bin"
    if not _is_count(shard.get("tokens")) or shard["tokens"] < 1:
        return f"shard {name} has no token count"
    if not re.fullmatch(r"[0-9a-f]{64}", str(shard.get("sha256"))):
        return f"shard {name} has no sha256"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def manifest_hash(manifest: dict) -> str:
    """sha256 over what defines the token stream; not over paths, dates or settings."""
    keys = ("format", "vocab_size", "eot")
    parts = {key: manifest[key] for key in keys}
    parts["tokenizer"] = {key: manifest["tokenizer"][key] for key in ("spec", "hash")}
    parts["shards"] = [[s["name"], s["tokens"], s["sha256"]] for s in manifest["shards"]]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class Corpus:
    """Read access to a prepared corpus folder.

    verify="size" compares shard sizes with the manifest (instant); "hash" also reads every shard:
    sha256 and token ids below vocab_size. A shard that fails is refused by name (UserError).
    """

    def __init__(self, folder: Path, verify: str = "size"):
        if verify not in ("size", "hash"):
            raise UserError(f"verify is {verify!r}; choose size or hash")
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.manifest_hash = manifest_hash(self.manifest)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eot: int | None = self.manifest["eot"]
        self._maps: list[mmap.mmap] = []
        self._opened: dict[str, tuple[dict, np.ndarray, tuple | None]] = {}
        self._shards: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for shard in sorted(self.manifest["shards"], key=lambda s: s["name"]):
            tokens = self._open_shard(shard)
            if verify == "hash":
                self._check_content(shard, tokens)
            self._shards[shard["name"].split("_")[0]].append(tokens)
            self._opened[shard["name"]] = (shard, tokens, self._stamp(shard))
        self._reads = 0
        self._is_large = 2 * sum(self.n_tokens(split) for split in SPLITS) > SMALL_BYTES

    def n_tokens(self, split: str) -> int:
        """Tokens in a split ("train" or "val"), EOTs included."""
        return sum(len(shard) for shard in self._shards[split])

    def n_windows(self, split: str, block_size: int) -> int:
        """Non-overlapping windows of `block_size` inputs with their targets, inside shards."""
        return int(self._window_ends(split, block_size)[-1])

    def batch_at(
        self,
        step: int,
        data_seed: int,
        batch_size: int,
        block_size: int,
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences [start, stop) of the global batch of `step`: inputs x and targets y.

        Returns two int64 tensors (stop - start, block_size), y shifted by one token. A pure
        function of its arguments: ranks and micro-batches that cut [0, batch_size) in any way
        see the same tokens, and nothing has to be stored to resume. Training windows are drawn
        without replacement, in an order fixed by (data_seed, epoch).
        """
        stop = batch_size if stop is None else stop
        assert step >= 0 and 0 <= start < stop <= batch_size, (step, start, stop, batch_size)
        if not 0 <= data_seed < 1 << 63:
            raise UserError(f"data_seed is {data_seed}; it must be in 0..2**63-1")
        n = self._require_windows("train", block_size)
        if batch_size > n:
            raise UserError(
                f"batch_size {batch_size} is larger than the {n} training windows of {block_size} "
                f"tokens in {self.folder}; choose batch_size in 1..{n} or a larger corpus"
            )
        first = step * batch_size  # Python integers: no overflow at any step
        windows = [
            _epoch_order(n, data_seed, (first + i) // n)[(first + i) % n]
            for i in range(start, stop)
        ]
        return self._read("train", windows, block_size)

    def eval_batches(
        self, n_tokens: int, batch_size: int, block_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A fixed validation set of about `n_tokens` target tokens, always the same (x, y)s.

        Its windows are spread evenly over the val split (documents are stored in source order,
        so its beginning alone can be of one kind); all of them when the split has fewer tokens.
        The last batch may be smaller: weigh batches by their number of tokens.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be >= 1")
        n = self._require_windows("val", block_size)
        count = min(n, max(1, n_tokens // block_size))
        windows = [i * n // count for i in range(count)]
        for at in range(0, count, batch_size):
            yield self._read("val", windows[at : at + batch_size], block_size)

    def check_unchanged(self) -> None:
        """Refuse (UserError) what was altered since it was opened, and so may have been read.

        A file of the same inode, size and times is taken as unchanged. Otherwise the hash of what
        is mapped decides: touched files, and folders replaced or removed meanwhile, are no harm.
        """
        for name, (shard, tokens, before) in self._opened.items():
            now = self._stamp(shard)
            if now == before:
                continue
            if now and before and now[0] == before[0] and now[1] != before[1]:
                raise UserError(
                    f"shard {self.folder / name} had {before[1]} bytes and has {now[1]} now: it "
                    "changed under the run; prepare the corpus again with --force and go on"
                )
            self._check_content(shard, tokens)
            self._opened[name] = (shard, tokens, now)

    # --- inside ---------------------------------------------------------------------------------

    def _open_shard(self, shard: dict) -> np.ndarray:
        path = self.folder / shard["name"]
        size = 2 * shard["tokens"]
        if not path.is_file():
            raise UserError(f"shard {path} cannot be read (no such file); prepare it again")
        try:
            with path.open("rb") as file:
                found = path.stat().st_size
                if found != size:
                    raise UserError(
                        f"shard {path} has {found} bytes, its manifest says {size}: truncated or "
                        "altered; prepare the corpus again with --force"
                    )
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(
                f"shard {path} cannot be read ({error.strerror}); "
                "prepare the corpus again with --force"
            ) from None
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype="<u2")

    def _stamp(self, shard: dict) -> tuple | None:
        """(inode, bytes, times) of a shard's file; None where there is none."""
        try:
            stat = (self.folder / shard["name"]).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    def _check_content(self, shard: dict, tokens: np.ndarray) -> None:
        digest, highest = hashlib.sha256(), 0
        for at in range(0, len(tokens), 1 << 22):
            part = tokens[at : at + (1 << 22)]
            digest.update(part)
            highest = max(highest, int(part.max()))
        self._release()
        path = self.folder / shard["name"]
        if digest.hexdigest() != shard["sha256"]:
            raise UserError(f"shard {path}: its sha256 differs from the manifest's; prepare again")
        if highest >= self.vocab_size:
            raise UserError(
                f"shard {path} holds token id {highest}, vocab_size is {self.vocab_size}; "
                "prepare the corpus again"
            )

    def _window_ends(self, split: str, block_size: int) -> np.ndarray:
        """Running number of windows after each shard, with a leading 0."""
        if block_size < 1:
            raise UserError(f"block_size is {block_size}; it must be >= 1")
        counts = [(len(shard) - 1) // block_size for shard in self._shards[split]]
        return np.cumsum([0, *counts])

    def _require_windows(self, split: str, block_size: int) -> int:
        n = self.n_windows(split, block_size)
        if n == 0:
            longest = max((len(s) - 1 for s in self._shards[split]), default=0)
            raise UserError(
                f"block_size {block_size} is longer than any {split} shard of {self.folder} "
                f"({longest + 1} tokens); choose block_size in 1..{longest} or a larger corpus"
            )
        return n

    def _read(
        self, split: str, windows: list[int], block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch  # here, so that preparing a corpus does not wait for it

        ends = self._window_ends(split, block_size)
        tokens_bt = np.empty((len(windows), block_size + 1), dtype=np.int64)
        for row, window in zip(tokens_bt, windows, strict=True):
            shard = int(np.searchsorted(ends, window, side="right")) - 1
            at = (int(window) - int(ends[shard])) * block_size
            row[:] = self._shards[split][shard][at : at + block_size + 1]
            self._reads += 1
            if self._reads % WINDOWS_BETWEEN_RELEASES == 0 and self._is_large:
                self._release()
        both = torch.from_numpy(tokens_bt)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _release(self) -> None:
        """Lets go of mapped pages (they stay in the system's cache): memory stays bounded."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)


@lru_cache(maxsize=2)  # two: a batch may reach over the end of an epoch
def _epoch_order(n: int, data_seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n): Philox keyed by (data_seed, epoch), no other state."""
    order = np.arange(n, dtype=np.uint32)
    np.random.Generator(np.random.Philox(key=[data_seed, epoch])).shuffle(order)
    order.flags.writeable = False
    return order
