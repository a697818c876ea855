"""One file of documents as (where, value) pairs: text, JSON or parquet, compressed or not.

What a file is, its content says: compression and parquet by their first bytes, JSON by its name or
by a first line that is a record with the text field. A JSON file holds a record per line, an array
of records, or records one after the other over several lines; all are read bit by bit.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from errors import UserError

LONG_CHARS = 1 << 20  # a longer document is cut
RECORD_BYTES = 64 << 20  # a longer JSON record is refused
HEAD_BYTES = 1 << 16  # what is looked at to tell what a file is
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
LINES = (".jsonl", ".ndjson")
SUFFIXES = (".txt", ".json", *LINES, ".parquet")  # what is read inside a folder
BETWEEN, DECODER = re.compile(r"[\s,]*"), json.JSONDecoder()

Bad = Callable[[str, str], None]
Pairs = Iterator[tuple[str, object]]


def plain_name(path: Path) -> str:
    """The name in lower case, without what says that it is compressed."""
    name = path.name.lower()
    return next((name.removesuffix(s) for s in COMPRESSED if name.endswith(s)), name)


def read_file(path: Path, field: str, bad: Bad) -> Pairs:
    """(where, value) of every document of a file; value is what stands in `field`, of any
    type. Calls bad(where, why) for what cannot be read."""
    try:
        with open_plain(path) as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(b"PAR1") or plain_name(path).endswith(".parquet"):
            yield from _parquet(path, field, bad)
        elif head.startswith(b"PK\x03\x04"):
            bad(str(path), "a zip archive; unpack it")
        elif plain_name(path).endswith((".json", *LINES)) or _is_record(head, field):
            yield from _json(path, head.removeprefix(b"\xef\xbb\xbf").lstrip(), field, bad)
        else:
            yield from _text(path)
    except UnicodeDecodeError as error:
        bad(str(path), f"not UTF-8 ({error.reason})")
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        if getattr(error, "errno", None):  # of the disk, not of a decompressor
            raise
        bad(str(path), f"its compressed data is damaged ({error})")


def open_plain(path: Path) -> BinaryIO:
    """The file's bytes, decompressed if its first ones say that they are compressed."""
    with open(path, "rb") as file:
        head = file.read(6)
    for magic, open_it in OPEN.items():
        if head.startswith(magic):
            return open_it(path)
    return open(path, "rb")


def _zstd(path: Path) -> BinaryIO:
    import pyarrow  # half a second: only where it is needed

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


OPEN = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
OPEN |= {b"\x28\xb5\x2f\xfd": _zstd}


# ---- text


def _text(path: Path) -> Pairs:
    """The whole file as one document; of a long one the chunks, after a look at all of them: a file
    that is bad at its end is left out as a whole."""
    with closing(_chunks(path)) as chunks:
        text = next(chunks, "")
        if len(text) < LONG_CHARS:
            yield str(path), text
            return
        for _ in chunks:
            pass
    yield str(path), _chunks(path)


def _chunks(path: Path) -> Iterator[str]:
    with open_plain(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        while chunk := text.read(LONG_CHARS):
            yield chunk


# ---- JSON


def _json(path: Path, head: bytes, field: str, bad: Bad) -> Pairs:
    """Records of a JSON file; `head` is how it starts."""
    one_line = b"\n" not in head or _parsed(head.split(b"\n")[0]) is not None
    if plain_name(path).endswith(LINES) or head.startswith(b"{") and one_line:
        yield from _lines(path, field, bad)
        return
    number = 0
    try:
        for number, record in enumerate(_records(path), 1):
            yield from _document(f"{path}, record {number}", record, field, bad)
    except (ValueError, RecursionError):
        bad(f"{path}, after record {number}", "not JSON from here on")


def _lines(path: Path, field: str, bad: Bad) -> Pairs:
    with open_plain(path) as file:
        number = 0
        while line := file.readline(RECORD_BYTES):
            number += 1
            if len(line) == RECORD_BYTES and not line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: line of {RECORD_BYTES} bytes or more; cut it up")
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                bad(f"{path}:{number}", f"not UTF-8 ({error.reason})")
            except (ValueError, RecursionError):
                bad(f"{path}:{number}", "not JSON")
            else:
                yield from _document(f"{path}:{number}", record, field, bad)


def _records(path: Path) -> Iterator[object]:
    """The elements of an array, or the values that follow each other; ValueError where the text is
    no JSON or ends early."""
    chunks = _chunks(path)
    text = next(chunks, "").lstrip()
    end_mark, text = "]" * text.startswith("["), text.removeprefix("[")
    while True:
        end = 0
        for record, stop in _whole(text):
            yield record
            end = stop
        text = text[end:]
        if len(text) > RECORD_BYTES:
            raise UserError(f"{path}: a record of {RECORD_BYTES} bytes or more; cut it up")
        # as much again as there is, so that a long record is not parsed anew for every chunk
        more = "".join(islice(chunks, 1 + len(text) // LONG_CHARS))
        if not more:
            break
        text += more
    if text.strip(" \t\r\n,") != end_mark:
        raise ValueError("not whole")


def _whole(text: str) -> Iterator[tuple[object, int]]:
    """The records at the start of `text` with their ends, up to the first that may go on."""
    at = 0
    while (at := BETWEEN.match(text, at).end()) < len(text):
        try:
            record, at = DECODER.raw_decode(text, at)
        except ValueError:
            return
        if at == len(text) and isinstance(record, (int, float)):
            return
        yield record, at


def _parsed(line: bytes) -> object:
    """The line's JSON value, None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_record(head: bytes, field: str) -> bool:
    """Whether a file of any name starts with a line that is a JSON record with text in `field`."""
    record = _parsed(head.strip().split(b"\n")[0])
    return isinstance(record, dict) and isinstance(record.get(field), str)


def _document(where: str, record: object, field: str, bad: Bad) -> Pairs:
    if isinstance(record, dict) and field in record:
        yield where, record[field]
    else:
        bad(where, f"no text in field {field!r} (choose with --text-field)")


# ---- parquet


def _parquet(path: Path, column: str, bad: Bad) -> Pairs:
    import pyarrow.parquet

    try:
        yield from _rows(path, column)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        bad(str(path), f"not a readable parquet file ({type(error).__name__})")


def _rows(path: Path, column: str) -> Pairs:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if column not in names:
            raise UserError(
                f"{path}: no column {column!r}; choose --text-field from {', '.join(names)}"
            )
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield f"{path}, row {number}", value
