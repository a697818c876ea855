"""The axis tables against the parameters that transformers really makes."""

from dataclasses import replace

import pytest
import torch

from checks import zoo
from errors import UserError
from models import hf_folder
from models.axes import TABLES, parse, specs, spread
from models.gpt import GPT, GPTConfig

SIZES = dict(residual=32, heads=32, kv=16, head=4, ffn=40, vocab=61, rotary=8, pooled=32)


def meta(spec: zoo.Model) -> torch.nn.Module:
    with torch.device("meta"):
        return zoo.hugging_face(replace(spec, tied=True))


@pytest.mark.parametrize("name", [n for n, m in zoo.MODELS.items() if m.family != "ours"])
def test_tables_cover_every_parameter_and_its_shape(name):
    spec = zoo.MODELS[name]
    net = meta(spec)
    found = specs(spec.family, net.state_dict(), hf_folder.prefix(type(net)))
    grouped = spec.family in zoo.GROUPED
    for param, shape in ((n, p.shape) for n, p in net.state_dict().items()):
        row = found[param]
        for axis, size in zip(row.axes, shape, strict=True):
            fused = len(row.parts) if axis != "residual" else 1
            want = SIZES["heads"] if axis == "kv" and not grouped else SIZES.get(axis)
            assert want is None or size == fused * want, (param, axis)
        assert row.after is None or f"{row.after}.weight" in net.state_dict()
    weights = [row for row in found.values() if len(row.axes) == 2 and row.part not in ("head",)]
    assert {"q", "k", "v", "o", "up", "down"} <= {part for row in weights for part in row.parts}


def test_our_table_covers_every_switch():
    base = GPTConfig(vocab_size=7, n_layer=1, n_head=2, head_dim=4, d_model=8)
    for switches in ({}, dict(norm="rmsnorm", activation="swiglu", tied=False, position="rope")):
        names = GPT(replace(base, **switches)).state_dict()
        assert specs("gpt", names).keys() == names.keys()


def test_bare_models_find_their_norm_under_their_own_name():
    row = specs("gpt2", ["h.3.attn.c_attn.weight"], "transformer.")["h.3.attn.c_attn.weight"]
    assert (row.layer, row.after, row.parts) == (3, "h.3.ln_1", ["q", "k", "v"])
    full = "transformer.h.3.attn.c_attn.weight"
    assert specs("gpt2", [full], "transformer.")[full].after == "transformer.h.3.ln_1"


def test_cross_attention_keys_read_the_encoders_norm():
    name = "decoder.block.1.layer.1.EncDecAttention.k.weight"
    assert specs("t5", [name])[name].after == "encoder.final_layer_norm"


def test_fused_layouts_are_told_apart():
    names = {"gpt2": "transformer.h.0.attn.c_attn.bias"}
    names["gpt_neox"] = "gpt_neox.layers.0.attention.query_key_value.bias"
    assert not specs("gpt2", [names["gpt2"]])[names["gpt2"]].per_head
    assert specs("gpt_neox", [names["gpt_neox"]])[names["gpt_neox"]].per_head


def test_one_row_describes_a_weight_and_its_bias():
    found = specs("gpt2", ["transformer.h.0.attn.c_attn." + kind for kind in ("weight", "bias")])
    weight, bias = found.values()
    assert (weight.axes, weight.out) == (("residual", "heads"), 1)
    assert (bias.axes, bias.out, bias.part, bias.after) == (("heads",), None, "q|k|v", weight.after)
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
