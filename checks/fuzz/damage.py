"""Ways to spoil bytes, JSON and safetensors: strategies of (what was done, the spoilt content)."""

import copy
import json
import random
from collections.abc import Iterator

from hypothesis import strategies as st

Damage = tuple[str, bytes]

BOMBS = (  # no JSON object of any use, or one that is expensive to read
    ("empty", b""),
    ("blank", b" \n\t"),
    ("null", b"null"),
    ("a list", b"[]"),
    ("an empty object", b"{}"),
    ("a number", b"17"),
    ("text", b'"text"'),
    ("200,000 open brackets", b"[" * 200_000),
    ("100,000 nested objects", b'{"a":' * 100_000),
    ("an integer of 5,000 digits", b'{"a": ' + b"9" * 5000 + b"}"),
    ("UTF-16", '{"a": 1}'.encode("utf-16")),
    ("a byte order mark", b"\xef\xbb\xbf{}"),
    ("NUL bytes", b"\0" * 64),
    ("bytes that are no text", bytes(range(128, 256))),
    ("40 MB of blanks", b" " * 40_000_000),
)
ODD = (  # values that a field should not have
    *(None, True, -1, 0, 1.5, 10**30, -(10**30), float("nan"), float("inf"), 1e308, 10**400),
    *("", "x", "nan", "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "日本語", "x" * 100_000),
    *([], {}, [[]], [-1], {"a": {"b": []}}, [None] * 1000),
)
GONE = object()


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
    )  # fmt: skip
    return draw(st.sampled_from(ways))


@st.composite
def spoilt_json(draw: st.DrawFn, value: object) -> tuple[str, object]:
    """A copy with one field, at any depth, removed or replaced by an odd value."""
    value = copy.deepcopy(value)
    path = draw(st.sampled_from(list(places(value))))
    odd = draw(st.sampled_from((GONE, *ODD)) | json_values)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    name = ".".join(map(str, path))
    if odd is GONE:
        del holder[path[-1]]
        return f"{name} removed", value
    holder[path[-1]] = copy.deepcopy(odd)
    return f"{name} is {str(odd)[:30]!r}", value


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


def dump(value: object) -> bytes:
    # 1e999 is valid JSON, and Python reads it as infinity
    return json.dumps(value, indent=1).replace(": Infinity", ": 1e999").encode()


def read_safetensors(data: bytes) -> tuple[dict, bytes]:
    """Header and body."""
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def pack_safetensors(header: object, body: bytes, length: int | None = None) -> bytes:
    """A file that claims a header of `length` bytes; the true length when None."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + body


def lying_headers(data: bytes) -> st.SearchStrategy[Damage]:
    """safetensors files whose header lies, one lie each, or with damage anywhere."""
    header, body = read_safetensors(data)
    names = [name for name in header if name != "__metadata__"]
    return st.one_of(
        st.sampled_from(list(lies_about_one(header, body, names))),
        st.sampled_from(list(lies_about_all(header, body, names[0]))),
        spoilt_bytes(data),
    )


def lies_about_one(header: dict, body: bytes, names: list[str]) -> Iterator[Damage]:
    n = len(body)
    lies = [("offsets", {"data_offsets": list(ends)}) for ends in (
        (0, n + 4), (n, 2 * n), (4, 0), (0, 2**63), (0, 10**40), (-4, 0), (0, 0),
    )]  # fmt: skip
    shapes = ([10**18], [2**32, 2**32], [-1, 4], [0], [], [1.5], "16", None, [1] * 70)
    lies += [("shape", {"shape": shape}) for shape in shapes]
    kinds = ("I64", "BOOL", "F8_E4M3", "F64", "X99", "", None, 7)
    lies += [("dtype", {"dtype": kind}) for kind in kinds]
    for what, fields in lies:
        for name in (names[0], names[-1]):
            lying = header | {name: header[name] | fields}
            shown = str(*fields.values())[:30]
            yield f"{what} {shown} of {name}", pack_safetensors(lying, body)


def lies_about_all(header: dict, body: bytes, first: str) -> Iterator[Damage]:
    n = len(json.dumps(header)) + len(body) + 8
    for length in (0, 1, 2**31, 2**63, 2**64 - 1, n, n - 8):
        yield f"header length {length}", pack_safetensors(header, body, length)
    odd = ("../../evil", "/etc/passwd", "", "\0", "module.wte.weight", "x" * 10_000, "日本語")
    for name in odd:
        renamed = {(name if n == first else n): entry for n, entry in header.items()}
        yield f"a tensor named {name[:20]!r}", pack_safetensors(renamed, body)
    one = json.dumps(header)
    yield "a name twice", pack_safetensors((one[:-1] + "," + one[1:]).encode(), body)
    yield "body left out", pack_safetensors(header, b"")
    yield "metadata of another type", pack_safetensors({"__metadata__": [1], **header}, body)
    for what, bomb in BOMBS[:-1]:
        yield f"header is {what}", pack_safetensors(bomb, body)
