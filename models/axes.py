"""Which axis of which parameter lives in which space: one table per architecture.

Growth acts on named axes, never on sizes. Each row reads

    name pattern    part    axes    [after NORM]

`*` stands for the layer number. Axes are written in the order the tensor stores them; the arrow
points from input to output: `heads <- residual` is an nn.Linear weight (out, in), and
`residual -> heads` or `vocab -> residual` is a Conv1D or embedding weight (in, out). A reader of
the residual stream has residual as its input, a writer has it as its output, a norm has it alone.
`q|k|v` is one tensor that holds several parts side by side along its non-residual axis.
`after ln_1` names the norm whose output the row reads (it is where gains may be folded to).

Spaces: residual (D), heads (H K), kv (key/value heads of GQA), ffn (F), vocab, position, and the
fixed ones no width touches.
"""

import re
from dataclasses import dataclass

from errors import UserError

PARTS = (
    "embed norm q k v o up gate down head relpos dense fixed"  # dense: a (D, D) projection
).split()

GPT = """
wte.weight              embed  vocab -> residual
wpe.weight              embed  position -> residual
h.*.ln_1.weight         norm   residual
h.*.ln_1.bias           norm   residual
h.*.attn.q.weight       q      heads <- residual   after h.*.ln_1
h.*.attn.q.bias         q      heads               after h.*.ln_1
h.*.attn.k.weight       k      heads <- residual   after h.*.ln_1
h.*.attn.k.bias         k      heads               after h.*.ln_1
h.*.attn.v.weight       v      heads <- residual   after h.*.ln_1
h.*.attn.v.bias         v      heads               after h.*.ln_1
h.*.attn.o.weight       o      residual <- heads
h.*.attn.o.bias         o      residual
h.*.ln_2.weight         norm   residual
h.*.ln_2.bias           norm   residual
h.*.mlp.up.weight       up     ffn <- residual     after h.*.ln_2
h.*.mlp.up.bias         up     ffn                 after h.*.ln_2
h.*.mlp.gate.weight     gate   ffn <- residual     after h.*.ln_2
h.*.mlp.gate.bias       gate   ffn                 after h.*.ln_2
h.*.mlp.down.weight     down   residual <- ffn
h.*.mlp.down.bias       down   residual
ln_f.weight             norm   residual
ln_f.bias               norm   residual
lm_head.weight          head   vocab <- residual   after ln_f
"""

TABLES = {"gpt": GPT}


@dataclass(frozen=True)
class Spec:
    """One parameter: what it is and the space of each of its axes, in stored order.

    part: one of PARTS ("q|k|v" for a fused tensor); axes: space names; out: index of the output
    axis (None for a vector); layer: its number or None; after: the norm it reads, or None.
    """

    name: str
    part: str
    axes: tuple[str, ...]
    out: int | None
    layer: int | None
    after: str | None = None

    @property
    def is_bias(self) -> bool:
        return self.name.endswith("bias")

    @property
    def parts(self) -> list[str]:
        return self.part.split("|")

    def side(self, dim: int) -> str:
        """'out' where the parameter writes along `dim` (every axis of a vector), else 'in'."""
        return "out" if self.out is None or dim == self.out else "in"

    def dims(self, space: str) -> list[int]:
        return [i for i, axis in enumerate(self.axes) if axis == space]


@dataclass(frozen=True)
class Row:
    pattern: re.Pattern
    part: str
    axes: tuple[str, ...]
    out: int | None
    after: str | None


def parse(table: str) -> list[Row]:
    """The rows of a table's text; malformed rows raise ValueError."""
    rows = []
    for line in filter(None, (line.strip() for line in table.splitlines())):
        head, _, after = line.partition(" after ")
        name, part, axes = head.split(None, 2)
        unknown = set(part.split("|")) - set(PARTS)
        if unknown:
            raise ValueError(f"unknown part {sorted(unknown)} in axis table row: {line}")
        arrow = re.search(r"<-|->", axes)
        spaces = tuple(re.split(r"\s*(?:<-|->)\s*", axes.strip()))
        out = None if arrow is None else (0 if arrow[0] == "<-" else 1)
        pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)"))
        rows.append(Row(pattern, part, spaces, out, after.strip() or None))
    return rows


def specs(family: str, names) -> dict[str, Spec]:
    """The Spec of every name, in the given order.

    Raises UserError for a family without a table, or for names that no row or two rows describe:
    an unknown parameter is never grown by guessing.
    """
    if family not in TABLES:
        raise UserError(
            f"no axis table for architecture {family!r}; known: {', '.join(TABLES)}. "
            f"Add one in models/axes.py"
        )
    rows, found = parse(TABLES[family]), {}
    for name in names:
        hits = [(row, match) for row in rows if (match := row.pattern.fullmatch(name))]
        if len(hits) != 1:
            raise UserError(
                f"parameter {name!r} has {len(hits)} rows in the axis table {family!r}; it needs "
                f"exactly one in models/axes.py"
            )
        row, match = hits[0]
        layer = match[1] if match.groups() else None
        found[name] = Spec(
            name,
            row.part,
            row.axes,
            row.out,
            None if layer is None else int(layer),
            row.after.replace("*", layer) if row.after and layer else row.after,
        )
    return found
