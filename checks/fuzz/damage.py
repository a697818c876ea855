"""Ways to spoil files. A Damage is (what was done, the content then); a Spoil is (what it does, how
it changes the files of a folder); both are drawn by hypothesis."""

import copy
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

Damage = tuple[str, bytes]
Act = Callable[[Path], object]
Spoil = tuple[str, Act]
Spoils = st.SearchStrategy[Spoil]


def shown(data: bytes) -> str:
    """The beginning, and the length."""
    return "empty" if not data else f"{len(data):,} bytes, {data[:12]!r}"


BOMBS = [(shown(data), data) for data in (  # no JSON object of any use, or expensive to read
    b"", b" \n\t", b"null", b"[]", b"{}", b"17", b'"text"', b"[" * 200_000, b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}", '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"\0" * 64,
    bytes(range(128, 256)), b" " * 40_000_000,
)]  # fmt: skip
ODD = (  # values that a field should not have
    *(None, True, -1, 0, 1.5, 10**30, -(10**30), float("nan"), float("inf"), 1e308, 10**400),
    *("", "x", "nan", "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "日本語", "x" * 100_000),
    *([], {}, [[]], [-1], {"a": {"b": []}}, [None] * 1000),
)
GONE = object()
IN_ITS_PLACE = {  # what stands where a file should be
    "missing": lambda path: None,
    "is a folder": Path.mkdir,
    "is a pipe": os.mkfifo,
    "is a link to itself": lambda path: path.symlink_to(path.name),
    "is a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "is a link to /dev/null": lambda path: path.symlink_to("/dev/null"),
}


def dump(value: object) -> bytes:
    # 1e999 is valid JSON, and Python reads it as infinity
    return json.dumps(value, indent=1).replace(": Infinity", ": 1e999").encode()


# ---- content


@st.composite
def spoilt_bytes(draw: st.DrawFn, data: bytes) -> Damage:
    """Truncated, one bit flipped, a part zeroed, junk inside or behind, doubled, or other text."""
    at, bit = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 7))
    junk, n = random.Random(at), min(64, len(data) - at)
    flipped = bytes([data[at] ^ 1 << bit])
    ways = (
        (f"cut after {at} bytes", data[:at]),
        (f"one bit of byte {at} flipped", data[:at] + flipped + data[at + 1 :]),
        (f"{n} bytes zeroed at {at}", data[:at] + b"\0" * n + data[at + n :]),
        (f"junk inserted at {at}", data[:at] + junk.randbytes(9) + data[at:]),
        ("junk appended", data + junk.randbytes(9)),
        ("written twice", data + data),
        ("random bytes", junk.randbytes(len(data))),
    )
    return draw(st.sampled_from(ways))


@st.composite
def spoilt_json(draw: st.DrawFn, value: object) -> tuple[str, object]:
    """A copy with one field, at any depth, removed or replaced by an odd value."""
    path = draw(st.sampled_from(list(places(value))))
    odd = draw(st.sampled_from((GONE, *ODD)) | json_values)
    what = "removed" if odd is GONE else f"is {str(odd)[:30]!r}"
    return f"{'.'.join(map(str, path))} {what}", put(value, path, odd)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The way to every value inside nested JSON; of a list, to its first and last item."""
    ends = {0: value[0], len(value) - 1: value[-1]} if isinstance(value, list) and value else {}
    for key, inner in (value if isinstance(value, dict) else ends).items():
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(value: object, path: tuple, new: object) -> object:
    """A copy of nested JSON with another value at `path`; GONE: none."""
    root = holder = copy.deepcopy(value)
    for key in path[:-1]:
        holder = holder[key]
    if new is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = copy.deepcopy(new)
    return root


def lying_headers(data: bytes) -> st.SearchStrategy[Damage]:
    """safetensors files whose header lies, one lie each, or with damage anywhere."""
    start = 8 + int.from_bytes(data[:8], "little")
    text, body, n = data[8:start], data[start:], len(data) - start
    header = json.loads(text)
    first, *_, last = (name for name in header if name != "__metadata__")

    def pack(header: object, body: bytes = body, length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return (len(text) if length is None else length).to_bytes(8, "little") + text + body

    ends = ((0, n + 4), (n, 2 * n), (4, 0), (0, 2**63), (0, 10**40), (-4, 0), (0, 0))
    fields = {
        "data_offsets": [*map(list, ends)],
        "shape": ([10**18], [2**32] * 2, [-1, 4], [0], [], [1.5], "16", None, [1] * 70),
        "dtype": ("I64", "BOOL", "F8_E4M3", "F64", "X99", "", None, 7),
    }
    of_one = [(f"{field} {str(lie)[:30]} of {name}", pack(put(header, (name, field), lie)))
              for field in fields for lie in fields[field] for name in (first, last)]  # fmt: skip
    names = ("../../evil", "/etc/passwd", "", "\0", "module.wte.weight", "x" * 10_000, "日本語")
    of_all = [(f"a tensor named {name[:20]!r}",
               pack({name if n == first else n: entry for n, entry in header.items()}))
              for name in names]  # fmt: skip
    whole = len(pack(header))
    of_all += [(f"header length {length}", pack(header, length=length))
               for length in (0, 1, 2**31, 2**63, 2**64 - 1, whole, whole - 8)]  # fmt: skip
    of_all += [(f"header is {what}", pack(bomb)) for what, bomb in BOMBS[:-1]]
    of_all += [("a name twice", pack(text.rstrip()[:-1] + b"," + text[1:]))]
    of_all += [("body left out", pack(header, b""))]
    of_all += [("metadata of another type", pack({"__metadata__": [1], **header}))]
    return st.sampled_from(of_one) | st.sampled_from(of_all) | spoilt_bytes(data)


# ---- files


def writing(name: str, label: str = "") -> Callable[[Damage], Spoil]:
    """The spoil that puts the content where the file `name` was."""
    return lambda damage: (
        f"{label or name + ': '}{damage[0]}"[:120],
        lambda folder: (folder / name).write_bytes(damage[1]),
    )


def any_file(source: Path, name: str) -> Spoils:
    """What may have happened to any file: gone, a folder, a link elsewhere, a bomb, damaged; to a
    JSON file also `fields`."""

    def instead(found: tuple[str, Act]) -> Spoil:
        what, make = found
        return f"{name} {what}", lambda folder: ((folder / name).unlink(), make(folder / name))

    other = [*map(instead, IN_ITS_PLACE.items()), *map(writing(name), BOMBS)]
    found = st.sampled_from(other) | spoilt_bytes((source / name).read_bytes()).map(writing(name))
    return found | fields(source, name) if name.endswith(".json") else found


def fields(source: Path, name: str) -> Spoils:
    """Fields of a JSON file removed or replaced."""
    spoilt = spoilt_json(json.loads((source / name).read_text()))
    return spoilt.map(lambda found: writing(name)((found[0], dump(found[1]))))


def lies(source: Path, name: str, table: dict[str, Iterable]) -> Spoils:
    """A field of a JSON file ("a.0": the first of list a) with one of its values in the table."""
    value = json.loads((source / name).read_text())
    paths = {place: [int(k) if k.isdigit() else k for k in place.split(".")] for place in table}
    found = [(f"{place} {str(odd)[:40]!r}", dump(put(value, paths[place], odd)))
             for place in table for odd in table[place]]  # fmt: skip
    return st.sampled_from(found).map(writing(name))


def forged(how: Spoils, repair: Act) -> Spoils:
    """The same, with hashes that fit again, so that what is inside is judged."""

    def both(spoil: Spoil) -> Spoil:
        def act(folder: Path) -> None:
            spoil[1](folder)
            with suppress(Exception):  # too spoilt even for that
                repair(folder)

        return f"forged {spoil[0].removeprefix('forged ')}", act

    return how.map(both)
