"""Ways to spoil bytes, JSON and safetensors: each returns what it did and the spoilt content."""

import copy
import json
from collections.abc import Iterator

import numpy as np

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


def spoil_bytes(rng: np.random.Generator, data: bytes) -> Damage:
    """Truncated, one bit flipped, a part zeroed, junk inside or behind, doubled, or other text."""
    at = int(rng.integers(len(data)))
    kind = rng.integers(7)
    if kind == 0:
        return f"cut after {at} bytes", data[:at]
    if kind == 1:
        flipped = data[at] ^ (1 << int(rng.integers(8)))
        return f"one bit of byte {at} flipped", data[:at] + bytes([flipped]) + data[at + 1 :]
    if kind == 2:
        n = min(64, len(data) - at)
        return f"{n} bytes zeroed at {at}", data[:at] + b"\0" * n + data[at + n :]
    if kind == 3:
        return f"junk inserted at {at}", data[:at] + rng.bytes(9) + data[at:]
    if kind == 4:
        return "junk appended", data + rng.bytes(9)
    if kind == 5:
        return "written twice", data + data
    return "random bytes", rng.bytes(len(data))


def spoil_json(rng: np.random.Generator, value: object) -> tuple[str, object]:
    """A copy with one field removed or replaced by an odd value."""
    value = copy.deepcopy(value)
    path, holder, key = choose(rng, value)
    if rng.random() < 0.25:
        del holder[key]
        return f"{path} removed", value
    odd = ODD[int(rng.integers(len(ODD)))]
    holder[key] = copy.deepcopy(odd)
    return f"{path} is {str(odd)[:30]!r}" if odd != "" else f"{path} is ''", value


def choose(rng: np.random.Generator, value: object) -> tuple[str, object, object]:
    """A random place in nested JSON: (dotted name, its holder, its key). Any depth is as likely."""
    path, holder, key = "", None, None
    while isinstance(value, (dict, list)) and value:
        holder = value
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[int(rng.integers(len(keys)))]
        path, value = f"{path}.{key}".lstrip("."), value[key]
        if rng.random() < 0.25:
            break
    return path, holder, key


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


def lying_headers(rng: np.random.Generator, data: bytes) -> Iterator[Damage]:
    """safetensors files whose header lies, one lie each; then random damage without end."""
    header, body = read_safetensors(data)
    names = [name for name in header if name != "__metadata__"]

    def lie(**fields: object) -> dict:
        lying = copy.deepcopy(header)
        lying[names[int(rng.integers(len(names)))]] |= fields
        return lying

    for length in (0, 1, 2**31, 2**63, 2**64 - 1, len(data), len(data) - 8):
        yield f"header length {length}", pack_safetensors(header, body, length)
    end = len(body)
    for a, b in ((0, end + 4), (end, 2 * end), (4, 0), (0, 2**63), (0, 10**40), (-4, 0), (0, 0)):
        yield f"offsets {a}, {b}", pack_safetensors(lie(data_offsets=[a, b]), body)
    for shape in ([10**18], [2**32, 2**32], [-1, 4], [0], [], [1.5], "16", None, [1] * 70):
        yield f"shape {str(shape)[:30]}", pack_safetensors(lie(shape=shape), body)
    for dtype in ("I64", "BOOL", "F8_E4M3", "F64", "X99", "", None, 7):
        yield f"dtype {dtype!r}", pack_safetensors(lie(dtype=dtype), body)
    for name in (
        "../../evil",
        "/etc/passwd",
        "",
        "\0",
        "module.wte.weight",
        "x" * 10_000,
        "日本語",
    ):
        renamed = {(name if n == names[0] else n): entry for n, entry in header.items()}
        yield f"a tensor named {name[:20]!r}", pack_safetensors(renamed, body)
    one = json.dumps(header)
    yield "a name twice", pack_safetensors((one[:-1] + "," + one[1:]).encode(), body)
    yield "body left out", pack_safetensors(header, b"")
    yield "metadata of another type", pack_safetensors({"__metadata__": [1], **header}, body)
    for what, bomb in BOMBS[:-1]:
        yield f"header is {what}", pack_safetensors(bomb, body)
    while True:
        yield spoil_bytes(rng, data)
