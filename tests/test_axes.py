"""The axis tables against the parameters that transformers really makes."""

from dataclasses import replace

import pytest
import torch

from checks import zoo
from errors import UserError
from models import hf, hf_folder
from models.axes import TABLES, parse, specs, spread
from models.gpt import GPT, GPTConfig


def meta(spec: zoo.Model) -> torch.nn.Module:
    with torch.device("meta"):
        return zoo.hugging_face(replace(spec, tied=True))


@pytest.mark.parametrize("name", [n for n, m in zoo.MODELS.items() if m.family != "ours"])
def test_tables_cover_every_parameter_and_its_shape(name):
    spec = zoo.MODELS[name]
    net = meta(spec)
    stored = hf_folder.stored_form(net)
    found = specs(spec.family, stored, hf_folder.prefix(type(net)))
    sizes = hf.sizes_of(net.config, hf.FAMILIES[spec.family])
    for tensor, parts in hf_folder.Layout(found, sizes).parts.items():
        for dim, n in enumerate(stored[tensor].shape):
            rows = parts if dim == parts[0].out_dim else parts[:1]
            widths = [(sizes.spaces | {"vocab": 61}).get(row.axes[dim]) for row in rows]
            assert None in widths or n == sum(widths), (tensor, dim)
    assert {row.tensor for row in found.values()} == stored.keys()
    assert {"q", "k", "v", "o", "up", "down"} <= {row.part for row in found.values()}
    norms = {row.name.rsplit(".", 1)[0] for row in found.values() if row.part == "norm"}
    post = {row.name.rsplit(".", 1)[0] for row in found.values() if row.writes_stream}
    read = {row.after for row in found.values()} - {None}
    assert read <= norms - post


def test_our_table_covers_every_switch():
    base = GPTConfig(vocab_size=7, n_layer=1, n_head=2, head_dim=4, d_model=8)
    for switches in ({}, dict(norm="rmsnorm", activation="swiglu", tied=False, position="rope")):
        names = GPT(replace(base, **switches)).state_dict()
        assert specs("gpt", names).keys() == names.keys()


def test_bare_models_find_their_norm_under_their_own_name():
    for base in ("", "transformer."):
        names = [f"{base}h.3.{name}.weight" for name in ("attn.c_attn", "ln_1")]
        row = specs("gpt2", names, "transformer.")[f"{base}h.3.attn.c_attn.k.weight"]
        assert (row.layer, row.after, row.tensor) == (3, f"{base}h.3.ln_1", names[0])


def test_a_reader_whose_norm_is_not_there_reads_the_stream():
    name = "model.decoder.layers.0.fc1.weight"
    assert specs("opt", [name])[name].after is None


def test_cross_attention_keys_read_the_encoders_norm():
    name = "decoder.block.1.layer.1.EncDecAttention.k.weight"
    found = specs("t5", [name, "encoder.final_layer_norm.weight"])
    assert found[name].after == "encoder.final_layer_norm"


def test_fused_tensors_are_split_and_joined():
    """Side by side: q0 q1 k0 k1 v0 v1; alternating, once for every key head: q0 k0 v0 q1 k1 v1."""
    w = torch.arange(24.0)
    sizes = hf.Sizes(d_model=8, n_head=2, kv_heads=2, head_dim=4, d_ff=32)
    stems = {"gpt2": "transformer.h.0.attn.c_attn"}
    stems["gpt_neox"] = "gpt_neox.layers.0.attention.query_key_value"
    for (family, stem), second in zip(stems.items(), (4, 12), strict=True):
        layout = hf_folder.Layout(specs(family, [f"{stem}.bias"]), sizes)
        parts = layout.split(f"{stem}.bias", w)
        assert list(parts) == [f"{stem}.{part}.bias" for part in "qkv"]
        assert parts[f"{stem}.q.bias"].tolist() == [0, 1, 2, 3, *range(second, second + 4)]
        assert torch.equal(layout.join(f"{stem}.bias", parts), w)


def test_one_row_describes_a_weight_and_its_bias():
    found = specs("gpt2", ["transformer.h.0.mlp.c_fc." + kind for kind in ("weight", "bias")])
    weight, bias = found.values()
    assert (weight.axes, weight.out) == (("residual", "ffn"), 1)
    assert (bias.axes, bias.out, bias.part, bias.after) == (("ffn",), None, "up", weight.after)
    rows = parse("a.bias  fixed  vocab\na.weight  relpos  bucket -> head")
    assert [row.pattern.pattern for row in rows] == [r"a\.bias", r"a\.weight"]


def test_braces_spread_together():
    rows = spread("{a|b}.{1|2} q x after {a|b}.n")
    assert rows == ["a.1 q x after a.n", "a.2 q x after a.n", "b.1 q x after b.n", *rows[3:]]
    assert len(rows) == 4


def test_unknown_parameters_and_families_are_never_guessed():
    with pytest.raises(UserError, match="0 rows"):
        specs("gpt2", ["transformer.h.0.attn.c_attn.lora_A"])
    with pytest.raises(UserError, match="models/axes.py"):
        specs("mamba", [])
    with pytest.raises(ValueError, match="unknown part"):
        parse("a.weight  qq  residual")


def test_tables_are_disjoint():
    """No parameter may match two rows: specs() would refuse it."""
    for family in TABLES:
        patterns = [row.pattern.pattern for row in parse(TABLES[family])]
        assert len(patterns) == len(set(patterns)), family
