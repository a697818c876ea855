"""Text -> corpus folder: `python data/prepare.py --source speeches --tokenizer bpe:2048`.

Documents are read one by one, split into train and val by a hash of their text (never by
position, so adding or reordering documents moves none across), tokenized in small batches and
streamed into uint16 shards. The folder appears whole or not at all: it is written beside its
place under a temporary name and renamed at the end. Memory does not grow with the corpus.
"""

import hashlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

if __package__ in (None, ""):
    # run as a script: Python put data/ first on the path, whose tokenizers.py would hide the
    # library of that name; the repo root belongs there
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(p for p in sys.path if Path(p or ".").resolve() != _here)]

import numpy as np
from tqdm import tqdm

import files
from data.shards import FORMAT, SHARD_NAME, SPLITS, Corpus, manifest_hash, read_manifest
from data.sources import BadInput, Source, open_source
from data.tokenizers import Tokenizer, make_tokenizer, parse_spec
from errors import UserError, exit_on_user_error, read_command_line

BATCH_CHARS = 1 << 20  # text tokenized at a time
OWN_FILES = ("manifest.json", "tokenizer.json")


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare. Two corpora with equal settings are equal, byte for byte."""

    source: str = "speeches"
    """speeches, encyclopedia, stdlib, openwebtext, fineweb, fineweb-edu, or file:PATH"""
    tokenizer: str = "bpe:2048"
    """gpt2, byte, bpe:N (trained on the training split), or hf:FOLDER (a model's own)"""
    out: Path | None = None
    """corpus folder to make; corpora/<source>-<tokenizer> when not given"""
    shard_tokens: int = 20_000_000
    """tokens per shard file (2 bytes each)"""
    val_fraction: float = 0.05
    """share of documents held out for validation"""
    text_field: str = "text"
    """field of a JSON record, column of a parquet table, that holds the text"""
    revision: str = ""
    """commit of a Hugging Face set; the pinned one when empty"""
    limit_mb: float = 0
    """stop after this many MB of text; 0 reads everything"""
    bpe_train_mb: float = 100
    """bpe:N is trained on the first so many MB of the training split"""
    block_size: int = 64
    """refuse a corpus whose train or val split is shorter than one window of this length"""
    skip_bad: bool = False
    """leave out files, lines and rows that cannot be read, and count them in the manifest"""
    force: bool = False
    """replace a corpus folder that was prepared with other settings"""


@dataclass
class Counts:
    """What a split holds so far."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of UTF-8 text


def prepare(config: PrepareConfig) -> Path:
    """Makes the corpus folder, or finds it made with the same settings; returns its path."""
    _check(config)
    out = config.out or default_out(config)
    source = open_source(config.source, config.text_field, config.revision)
    settings = _settings(config, source)
    files.sweep(out.parent)
    if _already_prepared(out, settings, config.force):
        print(f"{out} is already prepared with these settings")
        return out
    began = time.monotonic()
    try:
        with files.new_folder(out, replace=config.force) as temp:
            manifest = _write(temp, config, source, settings)
    except OSError:
        if not _already_prepared(out, settings, force=False):  # another one may have been faster
            raise
        return out
    print(summary(out, manifest, time.monotonic() - began))
    return out


def default_out(config: PrepareConfig) -> Path:
    """corpora/<source>-<tokenizer>, such as corpora/speeches-bpe2048."""
    name = config.source
    if name.startswith("file:"):
        name = Path(name.removeprefix("file:").rstrip("/*")).stem.strip("*.") or "files"
    kind, _, what = config.tokenizer.partition(":")
    return Path("corpora") / f"{name}-{kind}{'-' if kind == 'hf' else ''}{Path(what).name}"


def summary(out: Path, manifest: dict, seconds: float) -> str:
    """One line for the terminal: counts, skipped inputs, time and speed."""
    megabytes = sum(c["bytes"] for c in manifest["counts"].values()) / 1e6
    parts = []
    for split in SPLITS:
        c = manifest["counts"][split]
        parts.append(f"{split} {c['tokens']:,} tokens in {c['documents']:,} documents")
    skipped, left_out = manifest["skipped"]["count"], manifest["skipped"]["left_out"]
    others = ", ".join(f"{n} {suffix}" for suffix, n in sorted(left_out.items()))
    return (
        f"prepared {out}: {', '.join(parts)}; vocabulary {manifest['vocab_size']:,}"
        + (f"; skipped {skipped:,}" if skipped else "")
        + (f"; not read: {others}" if others else "")
        + f"; {seconds:.1f} s, {megabytes / max(seconds, 1e-9):.1f} MB/s"
    )


def is_validation(text: str, val_fraction: float) -> bool:
    """True when the document belongs to the val split: sha256(text) as a number in [0, 1)."""
    head = hashlib.sha256(text.encode()).digest()[:8]
    return int.from_bytes(head, "big") < val_fraction * 2**64


# --- checks -------------------------------------------------------------------------------------


def _check(config: PrepareConfig) -> None:
    parse_spec(config.tokenizer)
    if not 0 < config.val_fraction <= 0.5:
        raise UserError(f"val_fraction is {config.val_fraction}; it must be above 0, at most 0.5")
    for name, low, high in (("shard_tokens", 1000, 10**10), ("block_size", 1, 10**9)):
        if not low <= getattr(config, name) <= high:
            raise UserError(f"{name} is {getattr(config, name)}; it must be in {low}..{high}")
    if not 0 <= config.limit_mb < math.inf:
        raise UserError(f"limit_mb is {config.limit_mb}; it must be >= 0 (0 reads everything)")
    if not 0 < config.bpe_train_mb < math.inf:
        raise UserError(f"bpe_train_mb is {config.bpe_train_mb}; it must be > 0")


def _settings(config: PrepareConfig, source: Source) -> dict:
    """What decides the bytes of the corpus; compared when the folder exists."""
    names = ("source", "tokenizer", "shard_tokens", "val_fraction", "text_field")
    names += ("limit_mb", "skip_bad", "bpe_train_mb")
    settings = {name: getattr(config, name) for name in names} | {"revision": source.revision}
    if config.tokenizer.startswith("hf:"):  # by content: the folder may move
        settings["tokenizer"] = make_tokenizer(config.tokenizer, lambda: []).spec
    return settings


def _already_prepared(out: Path, settings: dict, force: bool) -> bool:
    """True: same settings, nothing to do. False: go on. UserError: something else is there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    others = [p.name for p in out.iterdir() if not _is_ours(p)] if out.is_dir() else [out.name]
    if others or not (out / "manifest.json").exists():
        raise UserError(
            f"{out} exists and is not a prepared corpus (it holds {(others or ['no manifest'])[0]}"
            "); choose another --out"
        )
    if force:
        return False
    before = read_manifest(out).get("settings", {})
    changed = [k for k, v in settings.items() if before.get(k) != v]
    if changed:
        key = changed[0]
        raise UserError(
            f"{out} was prepared with other settings ({key}: {before.get(key)!r}, now "
            f"{settings[key]!r}); choose another --out, or replace it with --force"
        )
    Corpus(out)  # refuses missing and truncated shards
    return True


def _is_ours(path: Path) -> bool:
    return path.is_file() and (path.name in OWN_FILES or bool(SHARD_NAME.fullmatch(path.name)))


# --- the stream ---------------------------------------------------------------------------------


def _write(temp: Path, config: PrepareConfig, source: Source, settings: dict) -> dict:
    """Fills the temporary folder; returns the manifest."""
    tokenizer = make_tokenizer(config.tokenizer, lambda: _bpe_texts(config, source))
    if tokenizer.definition:
        files.write_text(temp / "tokenizer.json", tokenizer.definition)
    bad = BadInput(config.skip_bad)
    writers = {split: ShardWriter(temp, split, config.shard_tokens) for split in SPLITS}
    _tokenize(_limited(source.documents(bad), config.limit_mb), config, source, tokenizer, writers)
    for writer in writers.values():
        writer.close()
    _require_windows(config, writers)
    manifest = {
        "format": FORMAT,
        "source": config.source,
        "revision": source.revision,
        "tokenizer": {"spec": tokenizer.spec, "hash": tokenizer.hash},
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "counts": {split: asdict(writer.counts) for split, writer in writers.items()},
        "skipped": {"count": bad.count, "first": bad.first, "left_out": source.left_out},
        "shards": [shard for split in SPLITS for shard in writers[split].shards],
        "settings": settings,
    }
    manifest["manifest_hash"] = manifest_hash(manifest)
    files.write_json(temp / "manifest.json", manifest)
    return manifest


def _tokenize(
    documents: Iterator[str],
    config: PrepareConfig,
    source: Source,
    tokenizer: Tokenizer,
    writers: dict[str, "ShardWriter"],
) -> None:
    """documents -> split by hash -> ids + EOT -> shards, with a progress bar (MB/s, tokens)."""
    with _progress(f"tokenize {config.source}", _total(config, source)) as bar:
        for texts in _batches(documents):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                ids.append(tokenizer.eot)
                split = "val" if is_validation(text, config.val_fraction) else "train"
                size = len(text.encode())
                writers[split].add(ids, size)
                bar.update(size)
            tokens = sum(writer.counts.tokens for writer in writers.values())
            bar.set_postfix_str(f"{tokens / 1e6:.1f} M tokens", refresh=False)


def _bpe_texts(config: PrepareConfig, source: Source) -> Iterator[str]:
    """The first `bpe_train_mb` of the training split: what a BPE may learn from."""
    documents = _limited(source.documents(BadInput(config.skip_bad)), config.limit_mb)
    train = (text for text in documents if not is_validation(text, config.val_fraction))
    total = min(_total(config, source) or 1e18, config.bpe_train_mb * 1e6)
    with _progress(f"read for {config.tokenizer}", None if total > 1e17 else int(total)) as bar:
        for text in _limited(train, config.bpe_train_mb):
            bar.update(len(text.encode()))
            yield text


def _limited(documents: Iterator[str], limit_mb: float) -> Iterator[str]:
    """Documents until `limit_mb` MB of UTF-8 text have been given; 0 gives all."""
    given = 0
    for text in documents:
        yield text
        given += len(text.encode())
        if limit_mb and given >= limit_mb * 1e6:
            return


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Lists of documents of about BATCH_CHARS characters in all."""
    texts, size = [], 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _total(config: PrepareConfig, source: Source) -> int | None:
    limit = int(config.limit_mb * 1e6) or None
    known = [n for n in (limit, source.total_bytes) if n]
    return min(known) if known else None


def _progress(what: str, total: int | None) -> tqdm:
    # the delay keeps an error that comes at once a single line
    options = {"unit": "B", "unit_scale": True, "mininterval": 0.5, "delay": 0.5, "leave": False}
    return tqdm(desc=what, total=total, **options)


def _require_windows(config: PrepareConfig, writers: dict[str, "ShardWriter"]) -> None:
    documents = sum(w.counts.documents for w in writers.values())
    if documents == 0:
        raise UserError(f"source {config.source!r} holds no text; give at least one document")
    for split, writer in writers.items():
        longest = max((shard["tokens"] for shard in writer.shards), default=0)
        if longest <= config.block_size:
            raise UserError(
                f"{split} split of {config.source!r} has {writer.counts.tokens} tokens from "
                f"{writer.counts.documents} of {documents} documents, less than one window of "
                f"{config.block_size} + 1; give more documents, "
                + ("a larger --val-fraction" if split == "val" else "a smaller --val-fraction")
                + " or a smaller --block-size"
            )


@dataclass
class ShardWriter:
    """Writes one split as files of `shard_tokens` uint16 ids, hashing as it goes."""

    folder: Path
    split: str
    shard_tokens: int
    counts: Counts = field(default_factory=Counts)
    shards: list[dict] = field(default_factory=list)  # finished ones: name, tokens, bytes, sha256

    def __post_init__(self):
        self._file, self._digest, self._tokens = None, None, 0

    def add(self, ids: list[int], text_bytes: int) -> None:
        """Appends one document; it may go on in the next shard."""
        tokens = np.asarray(ids, dtype="<u2")
        self.counts.documents += 1
        self.counts.tokens += len(tokens)
        self.counts.bytes += text_bytes
        while len(tokens):
            if self._file is None:
                self._open()
            part = tokens[: self.shard_tokens - self._tokens]
            with files.naming(self.folder / self._name):
                self._file.write(part)
            self._digest.update(part)
            self._tokens += len(part)
            tokens = tokens[len(part) :]
            if self._tokens == self.shard_tokens:
                self.close()

    def _open(self) -> None:
        self._name = f"{self.split}_{len(self.shards):05d}.bin"
        self._file = (self.folder / self._name).open("xb")
        self._digest, self._tokens = hashlib.sha256(), 0

    def close(self) -> None:
        """Finishes the open shard, if there is one."""
        if self._file is None:
            return
        with files.naming(self.folder / self._name):
            self._file.close()
        self._file = None
        self.shards.append(
            {
                "name": self._name,
                "tokens": self._tokens,
                "bytes": 2 * self._tokens,
                "sha256": self._digest.hexdigest(),
            }
        )


def main() -> None:
    """Command line."""
    prepare(read_command_line(PrepareConfig, __doc__))


if __name__ == "__main__":
    exit_on_user_error(main)
