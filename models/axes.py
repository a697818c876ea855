"""Which axis of which parameter lives in which space: one table per architecture.

Growth acts on named axes, never on sizes. Each row reads

    name pattern    part    axes    [after NORM]

`*` stands for the layer number. Axes are written in the order the tensor stores them; the arrow
points from input to output: `heads <- residual` is an nn.Linear weight (out, in), and
`residual -> heads` or `vocab -> residual` is a Conv1D or embedding weight (in, out). A reader of
the residual stream has residual as its input, a writer has it as its output, a norm has it alone.
`q|k|v` is one tensor that holds several parts side by side along its output axis (`heads|kv|kv`
where they are not alike); in `q:k:v` they alternate, once for every key head (GPT-NeoX). Each part
is a parameter of its own to growth, NAME.q.weight; models/hf_folder.py splits and joins them.
`after ln_1` names the norm whose output the row reads (it is where gains may be folded to); a norm
that no row reads writes the residual stream. `after a|b` is the first of them that is there; where
none is, the row reads the stream itself.
`in PREFIX` is put before the names, and the norms, of the indented rows below it (a norm written
/name excepted). {a|b} stands for one row with each; equal braces take the same value in a row.

Spaces: residual (D), heads (H K), kv (key/value heads of GQA), head (H: one entry per head), ffn
(F), expert_ffn (of Qwen3-MoE's experts), head_dim (K: q_norm, a stored table of sines), pooled (D,
a classifier's input), vocab, position, expert, and the fixed ones no width touches.

A new family is one table here and one row of facts in models/hf.py.
"""

import itertools
import re
from dataclasses import dataclass, replace

from errors import UserError

PARTS = (
    "embed norm q k v o up gate down router head relpos rotary dense pool fixed"
).split()  # dense: the (D, D) layer before BERT's MLM norm; pool: the hidden layer of a classifier

GPT = """
wte              embed     vocab -> residual
wpe              embed     position -> residual
in h.*
  {ln_1|ln_2}    norm      residual
  attn.q         q         heads <- residual   after ln_1
  attn.{k|v}     {k|v}     kv <- residual      after ln_1
  attn.o         o         residual <- heads
  mlp.{up|gate}  {up|gate} ffn <- residual     after ln_2
  mlp.down       down      residual <- ffn
ln_f             norm      residual
lm_head          head      vocab <- residual   after ln_f
"""

GPT2 = """
transformer.wte   embed    vocab -> residual
transformer.wpe   embed    position -> residual
in transformer.h.*
  {ln_1|ln_2}     norm     residual
  attn.c_attn     q|k|v    residual -> heads   after ln_1
  attn.c_proj     o        heads -> residual
  mlp.c_fc        up       residual -> ffn     after ln_2
  mlp.c_proj      down     ffn -> residual
transformer.ln_f  norm     residual
lm_head           head     vocab <- residual   after transformer.ln_f
"""

# Post-LN: every norm writes the residual stream, so only the MLM head's decoder is "after" one.
BERT_BODY = """
in bert.embeddings
  word_embeddings            embed  vocab -> residual
  position_embeddings        embed  position -> residual
  token_type_embeddings      embed  type -> residual
  LayerNorm                  norm   residual
in bert.encoder.layer.*
  attention.self.query       q      heads <- residual
  attention.self.key         k      heads <- residual
  attention.self.value       v      heads <- residual
  attention.output.dense     o      residual <- heads
  intermediate.dense         up     ffn <- residual
  output.dense               down   residual <- ffn
  {attention.output|output}.LayerNorm  norm  residual
bert.pooler.dense            pool   pooled <- residual
"""

BERT = (
    BERT_BODY
    + """
cls.seq_relationship         head   class <- pooled
in cls.predictions
  transform.dense            dense  residual <- residual
  transform.LayerNorm        norm   residual
  decoder                    head   vocab <- residual   after transform.LayerNorm
  bias                       fixed  vocab
"""
)

ROFORMER = (
    BERT.replace("bert.", "roformer.")
    + """
roformer.encoder.embed_positions.weight  rotary  position -> head_dim
"""
)

ROBERTA = (
    BERT_BODY.replace("bert.", "roberta.")
    + """
in lm_head
  dense                      dense  residual <- residual
  layer_norm                 norm   residual
  decoder                    head   vocab <- residual   after layer_norm
  bias                       fixed  vocab
in classifier
  dense                      pool   pooled <- residual
  out_proj                   head   class <- pooled
"""
)

DISTILBERT = """
in distilbert.embeddings
  word_embeddings            embed  vocab -> residual
  position_embeddings        embed  position -> residual
  LayerNorm                  norm   residual
in distilbert.transformer.layer.*
  attention.{q|k|v}_lin      {q|k|v}  heads <- residual
  attention.out_lin          o      residual <- heads
  ffn.lin1                   up     ffn <- residual
  ffn.lin2                   down   residual <- ffn
  {sa|output}_layer_norm     norm   residual
vocab_transform              dense  residual <- residual
vocab_layer_norm             norm   residual
vocab_projector              head   vocab <- residual   after vocab_layer_norm
pre_classifier               pool   pooled <- residual
"""

# The first layer's attention has no norm: it reads what embeddings.norm writes.
MODERNBERT = """
in model.embeddings
  tok_embeddings   embed    vocab -> residual
  norm             norm     residual
in model.layers.*
  {attn|mlp}_norm  norm     residual
  attn.Wqkv        q|k|v    heads <- residual      after attn_norm
  attn.Wo          o        residual <- heads
  mlp.Wi           gate|up  ffn <- residual        after mlp_norm
  mlp.Wo           down     residual <- ffn
model.final_norm   norm     residual
head.dense         dense    residual <- residual   after model.final_norm
head.norm          norm     residual
decoder            head     vocab <- residual      after head.norm
classifier         head     class <- residual      after head.norm
"""

# wi is the plain FFN; wi_0 (gate) and wi_1 are the gated one of T5 1.1 and mT5.
T5 = """
{shared|encoder.embed_tokens|decoder.embed_tokens}  embed  vocab -> residual
in {encoder|decoder}.block.*.layer.0
  layer_norm                      norm     residual
  SelfAttention.{q|k|v}           {q|k|v}  heads <- residual   after layer_norm
  SelfAttention.o                 o        residual <- heads
  SelfAttention.relative_attention_bias.weight  relpos  bucket -> head
in decoder.block.*.layer.1
  EncDecAttention.q               q        heads <- residual   after layer_norm
  EncDecAttention.{k|v}           {k|v}    heads <- residual   after /encoder.final_layer_norm
  EncDecAttention.o               o        residual <- heads
in {encoder|decoder}.block.*.layer.{1|2}
  layer_norm                      norm     residual
  DenseReluDense.{wi|wi_1}        up       ffn <- residual     after layer_norm
  DenseReluDense.wi_0             gate     ffn <- residual     after layer_norm
  DenseReluDense.wo               down     residual <- ffn
{encoder|decoder}.final_layer_norm  norm   residual
lm_head                           head     vocab <- residual   after decoder.final_layer_norm
"""

# Llama may have biases everywhere, Qwen2 has them on q, k and v; OLMo has no norm to name.
LLAMA = """
model.embed_tokens          embed  vocab -> residual
in model.layers.*
  input_layernorm           norm   residual
  self_attn.q_proj          q      heads <- residual   after input_layernorm
  self_attn.{k|v}_proj      {k|v}  kv <- residual      after input_layernorm
  self_attn.o_proj          o      residual <- heads
  post_attention_layernorm  norm   residual
  mlp.{gate|up}_proj        {gate|up}  ffn <- residual  after post_attention_layernorm
  mlp.down_proj             down   residual <- ffn
model.norm                  norm   residual
lm_head                     head   vocab <- residual   after model.norm
score                       head   class <- residual   after model.norm
"""

HEAD_NORMS = """
in model.layers.*
  self_attn.{q|k}_norm      norm   head_dim
"""

QWEN3 = LLAMA + HEAD_NORMS

# A norm on both sides of every block: post_attention_layernorm writes the stream here.
GEMMA2 = (
    LLAMA.replace("after post_attention_layernorm", "after pre_feedforward_layernorm")
    + """
in model.layers.*
  {pre|post}_feedforward_layernorm  norm  residual
"""
)

GEMMA3 = GEMMA2 + HEAD_NORMS

# Gemma 2 without the norms that read: q, k, v, gate and up read the stream.
OLMO2 = (
    GEMMA2
    + """
in model.layers.*
  self_attn.q_norm          norm   heads
  self_attn.k_norm          norm   kv
"""
)

PHI3 = (
    LLAMA
    + """
in model.layers.*
  self_attn.qkv_proj        q|k|v    heads|kv|kv <- residual   after input_layernorm
  mlp.gate_up_proj          gate|up  ffn <- residual           after post_attention_layernorm
"""
)

STARCODER2 = (
    LLAMA
    + """
in model.layers.*
  mlp.c_fc                  up     ffn <- residual     after post_attention_layernorm
  mlp.c_proj                down   residual <- ffn
"""
)

# Attention and FFN read the same norm.
PHI = """
model.embed_tokens          embed  vocab -> residual
in model.layers.*
  input_layernorm           norm   residual
  self_attn.q_proj          q      heads <- residual   after input_layernorm
  self_attn.{k|v}_proj      {k|v}  kv <- residual      after input_layernorm
  self_attn.dense           o      residual <- heads
  mlp.fc1                   up     ffn <- residual     after input_layernorm
  mlp.fc2                   down   residual <- ffn
model.final_layernorm       norm   residual
lm_head                     head   vocab <- residual   after model.final_layernorm
"""

GPTJ = """
transformer.wte             embed  vocab -> residual
in transformer.h.*
  ln_1                      norm   residual
  attn.{q|k|v}_proj         {q|k|v}  heads <- residual   after ln_1
  attn.out_proj             o      residual <- heads
  mlp.fc_in                 up     ffn <- residual     after ln_1
  mlp.fc_out                down   residual <- ffn
transformer.ln_f            norm   residual
lm_head                     head   vocab <- residual   after transformer.ln_f
"""

MIXTRAL = (
    LLAMA
    + """
in model.layers.*
  block_sparse_moe.gate          router  expert <- residual  after post_attention_layernorm
  block_sparse_moe.experts.*.w1  gate    ffn <- residual     after post_attention_layernorm
  block_sparse_moe.experts.*.w3  up      ffn <- residual     after post_attention_layernorm
  block_sparse_moe.experts.*.w2  down    residual <- ffn
"""
)

QWEN3_MOE = (
    QWEN3
    + """
in model.layers.*
  mlp.gate                 router  expert <- residual      after post_attention_layernorm
  mlp.experts.*.gate_proj  gate    expert_ffn <- residual  after post_attention_layernorm
  mlp.experts.*.up_proj    up      expert_ffn <- residual  after post_attention_layernorm
  mlp.experts.*.down_proj  down    residual <- expert_ffn
"""
)

# One key head for all, or one for every group: both are a q:k:v that alternates by key heads.
FALCON = """
transformer.word_embeddings        embed  vocab -> residual
in transformer.h.*
  self_attention.query_key_value   q:k:v  heads:kv:kv <- residual  after ln_attn|input_layernorm
  self_attention.dense             o      residual <- heads
  {ln_attn|ln_mlp|input_layernorm|post_attention_layernorm}  norm  residual
  mlp.dense_h_to_4h  up  ffn <- residual  after ln_mlp|post_attention_layernorm|input_layernorm
  mlp.dense_4h_to_h                down   residual <- ffn
transformer.ln_f                   norm   residual
lm_head                            head   vocab <- residual        after transformer.ln_f
"""

GPT_NEOX = """
gpt_neox.embed_in             embed  vocab -> residual
in gpt_neox.layers.*
  input_layernorm             norm   residual
  attention.query_key_value   q:k:v  heads <- residual   after input_layernorm
  attention.dense             o      residual <- heads
  post_attention_layernorm    norm   residual
  mlp.dense_h_to_4h           up     ffn <- residual     after post_attention_layernorm
  mlp.dense_4h_to_h           down   residual <- ffn
gpt_neox.final_layer_norm     norm   residual
lm_head                       head   vocab <- residual   after gpt_neox.final_layer_norm
"""

OPT = """
in model.decoder
  embed_tokens                embed    vocab -> residual
  embed_positions             embed    position -> residual
  final_layer_norm            norm     residual
in model.decoder.layers.*
  self_attn_layer_norm        norm     residual
  self_attn.{q|k|v}_proj      {q|k|v}  heads <- residual   after self_attn_layer_norm
  self_attn.out_proj          o        residual <- heads
  final_layer_norm            norm     residual
  fc1                         up       ffn <- residual     after final_layer_norm
  fc2                         down     residual <- ffn
lm_head                       head     vocab <- residual   after model.decoder.final_layer_norm
"""

TABLES = {
    "gpt": GPT,
    "gpt2": GPT2,
    "bert": BERT,
    "roformer": ROFORMER,
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
    "t5": T5,
    "mt5": T5,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "gemma": LLAMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo": LLAMA,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "phi": PHI,
    "gptj": GPTJ,
    "starcoder2": STARCODER2,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt_neox": GPT_NEOX,
    "falcon": FALCON,
    "opt": OPT,
}

HEADS = {  # what a class's own head reads, where the family's table does not say
    "ForSequenceClassification": "classifier  head  class <- pooled",
    "ForMultipleChoice": "classifier  head  class <- pooled",
    "ForTokenClassification": "classifier  head  class <- residual",
    "ForQuestionAnswering": "qa_outputs  head  class <- residual",
}


@dataclass(frozen=True)
class Arch:
    """What the maths of growth must know of an architecture beyond its table."""

    norm: str = "layernorm"  # layernorm | rmsnorm
    affine: bool = True  # False: norms have no gains (OLMo)
    qk_norm: str = ""  # the space whose entries of q, or k, are normed together: head_dim | heads
    eps_in_config: bool = True  # False: the norm's epsilon is fixed in code (OPT)
    activation: str = "gelu"  # of the FFN; with `gated`, of its gate
    gated: bool = False
    head_activation: str = ""  # of the dense layer before the output head (BERT's MLM), if any
    scaled_attention: bool = True  # scores divided by sqrt(head_dim); T5's are not
    rope: str = ""  # "" | half (Llama: pairs i, i + K/2) | pairs (RoFormer: pairs 2i, 2i + 1)
    scaled_head: bool = False  # logits divided by sqrt(d) (T5; Gemma's tied head)


@dataclass(frozen=True)
class Spec:
    """One parameter: what it is and the space of each of its axes, in stored order.

    part: one of PARTS; axes: space names; out: index of the output axis (None for a vector); layer:
    its number or None; after: the norm it reads; tensor: the stored tensor that it is, or is a part
    of; alternates: with the other parts, once for every key head; writes_stream: a norm does;
    before_head: a norm that the output head reads.
    """

    name: str
    part: str
    axes: tuple[str, ...]
    out: int | None
    layer: int | None
    after: str | None = None
    tensor: str = ""
    alternates: bool = False
    writes_stream: bool = False
    before_head: bool = False

    @property
    def is_bias(self) -> bool:
        return self.name.endswith("bias")

    @property
    def module(self) -> str:
        """The name of the layer it belongs to."""
        return self.name.rsplit(".", 1)[0]

    @property
    def out_dim(self) -> int:
        """The axis it writes along; a vector's only one."""
        return self.out or 0

    @property
    def in_space(self) -> str | None:
        """The space a matrix reads; None for a vector."""
        return None if self.out is None else self.axes[1 - self.out]

    @property
    def writes_residual(self) -> bool:
        """True for embeddings, o, down and the MLM head's dense layer, and for their biases."""
        return self.part != "norm" and self.axes[self.out_dim] == "residual"

    def side(self, dim: int) -> str:
        """'out' where the parameter writes along `dim` (every axis of a vector), else 'in'."""
        return "out" if self.out is None or dim == self.out else "in"

    def dims(self, space: str) -> list[int]:
        return [i for i, axis in enumerate(self.axes) if axis == space]


@dataclass(frozen=True)
class Row:
    name: str  # as in the table
    pattern: re.Pattern
    part: str
    axes: tuple[str, ...]
    out: int | None
    after: str  # norms, "|" between them


def parse(table: str) -> list[Row]:
    """The rows of a table's text; malformed rows raise ValueError."""
    rows, prefix = [], ""
    for line in filter(str.strip, table.splitlines()):
        if line.startswith("in "):
            prefix = line[3:].strip() + "."
            continue
        row, _, after = line.strip().partition(" after ")
        if line.startswith(" "):
            row, after = prefix + row, "|".join(prefix + n for n in after.split("|") if n)
        if "/" in after:
            after = after.partition("/")[2]
        rows += [row for choice in spread(f"{row} after {after}") for row in parse_row(choice)]
    return rows


def parse_row(line: str) -> list[Row]:
    """The row of NAME.weight and that of NAME.bias; of one of them where NAME says which."""
    head, _, after = map(str.strip, line.partition(" after "))
    name, part, axes = head.split(None, 2)
    unknown = set(re.split("[|:]", part)) - set(PARTS)
    if unknown:
        raise ValueError(f"unknown part {sorted(unknown)} in axis table row: {line}")
    arrow = re.search(r"<-|->", axes)
    spaces = tuple(re.split(r"\s*(?:<-|->)\s*", axes.strip()))
    out = None if arrow is None else (0 if arrow[0] == "<-" else 1)
    kinds = {".weight": (spaces, out), ".bias": (spaces[out or 0 :][:1], None)}
    if name.endswith(tuple(kinds)):
        kinds = {"": (spaces, out)}
    return [
        Row(name, re.compile(re.escape(name + kind).replace(r"\*", r"(\d+)")), part, *at, after)
        for kind, at in kinds.items()
    ]


def spread(line: str) -> list[str]:
    """The rows a line with {a|b} stands for: one for each choice, the same for equal braces."""
    braces = re.search(r"\{([^}]*)\}", line)
    if not braces:
        return [line]
    rows = (spread(line.replace(braces[0], choice)) for choice in braces[1].split("|"))
    return list(itertools.chain.from_iterable(rows))


def specs(family: str, names, prefix: str = "", cls: str = "") -> dict[str, Spec]:
    """The Specs of every stored name, in the given order; a fused tensor has one for each part.
    `prefix` ("transformer."): names of a bare model without its head lack it, and are looked up
    with it. `cls`: the model's class, whose end may be one of HEADS.

    Raises UserError for a family without a table, or for names that no row or two rows describe:
    an unknown parameter is never grown by guessing.
    """
    if family not in TABLES:
        raise UserError(
            f"no axis table for architecture {family!r}; known: {', '.join(TABLES)}. "
            f"Add one in models/axes.py"
        )
    rows, found = parse(TABLES[family]), {}
    heads = parse("\n".join(row for end, row in HEADS.items() if cls.endswith(end)))
    read = {norm for row in rows for norm in row.after.split("|")}
    before_head = {row.after for row in rows if row.axes == ("vocab", "residual") and row.out == 0}
    for name in names:
        hits = matches(rows, name) or matches(rows, prefix + name) or matches(heads, name)
        if len(hits) != 1:
            raise UserError(
                f"parameter {name!r} has {len(hits)} rows in the axis table {family!r}; it needs "
                f"exactly one in models/axes.py"
            )
        row, match = hits[0]
        layer = match[1] if match.groups() else None
        norms = row.after.replace("*", layer or "").split("|")
        if match[0] != name:
            norms = [norm.removeprefix(prefix) for norm in norms]  # the bare model's own names
        whole = Spec(
            name,
            row.part,
            row.axes,
            row.out,
            None if layer is None else int(layer),
            next((norm for norm in norms if f"{norm}.weight" in names), None),
            name,
            ":" in row.part,
            row.part == "norm" and row.axes == ("residual",) and row.name not in read,
            row.part == "norm" and row.name in before_head,
        )
        found |= {spec.name: spec for spec in split(whole)}
    return found


def split(whole: Spec) -> list[Spec]:
    """The parts of a fused tensor's spec; itself for any other."""
    parts = re.split("[|:]", whole.part)
    if len(parts) == 1:
        return [whole]
    stem, kind = whole.name.rsplit(".", 1)
    axes = [re.split("[|:]", axis) for axis in whole.axes]
    return [
        replace(
            whole,
            name=f"{stem}.{part}.{kind}",
            part=part,
            axes=tuple(axis[i] if len(axis) > 1 else axis[0] for axis in axes),
        )
        for i, part in enumerate(parts)
    ]


def matches(rows: list[Row], name: str) -> list[tuple[Row, re.Match]]:
    return [(row, match) for row in rows if (match := row.pattern.fullmatch(name))]


def gpt_arch(cfg) -> Arch:
    """Arch of our GPT (models/gpt.py)."""
    return Arch(
        norm=cfg.norm,
        activation="silu" if cfg.activation == "swiglu" else cfg.activation,
        gated=cfg.activation == "swiglu",
        rope="half" if cfg.position == "rope" else "",
    )
