"""Exact growth of real transformers models in float64, what breaks it, and GPT-2 conversion."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoint
from checks import exactness, zoo
from errors import UserError
from growth import folder, operator
from growth.operators import OPERATORS, lossless, pad
from growth.plan import GrowConfig
from growth.report import compare
from models import convert, gpt2, hf, hf_folder, rope
from models.double import Float64
from models.gpt import GPT, GPTConfig

TOLERANCE = 1e-10
FAMILIES = [name for name, spec in zoo.MODELS.items() if spec.family != "ours"]
POST_LN = ("bert", "roformer", "roberta", "distilbert", "modernbert")


@pytest.fixture(autouse=True)
def quiet():
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def error(name: str, factor: float, settings: GrowConfig, tmp_path: Path) -> float:
    cell = exactness.hugging_face(zoo.MODELS[name], torch.float64, tmp_path / "parent")
    return cell(factor, settings)[0]["max_rel_dlogit"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_grows_exactly(name, tmp_path):
    cell = exactness.hugging_face(zoo.MODELS[name], torch.float64, tmp_path / "parent")
    for heads in ("more", "wider"):
        if name == "GPT-J" and heads == "wider":  # its config has no frequencies to repeat
            with pytest.raises(UserError, match="use heads more or method pad"):
                cell(2, GrowConfig("lossless", heads=heads))
            continue
        numbers, notes = cell(2, GrowConfig("lossless", heads=heads))
        assert numbers["max_rel_dlogit"] < TOLERANCE and not notes
    numbers, notes = cell(1.5, GrowConfig("pad"))
    if zoo.MODELS[name].family in POST_LN:
        assert numbers["max_rel_dlogit"] > 1e-2 and "Post-LN" in "".join(notes)
    else:
        assert numbers["max_rel_dlogit"] < TOLERANCE and not notes


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_are_exact_at_whole_factors_in_every_family(name, tmp_path):
    """Shared key heads, T5's table over heads and its logits over sqrt(d) included."""
    cell = exactness.hugging_face(zoo.MODELS[name], torch.float64, tmp_path / "parent")
    for settings in (GrowConfig("net2net", noise=0.0), GrowConfig("sparkling")):
        numbers, notes = cell(2, settings)
        assert numbers["max_rel_dlogit"] < TOLERANCE and not notes
    numbers, notes = cell(1.5, GrowConfig("net2net", noise=0.0))
    assert numbers["max_rel_dlogit"] > 1e-3 and "whole factors" in notes[0]


INEXACT = ["GPT-2", "BERT ReLU", "RoFormer", "T5", "Llama GQA", "GPT-NeoX", "Gemma 3", "OLMo tied"]


@pytest.mark.parametrize("name", INEXACT + ["OLMo 2", "ModernBERT", "Phi-3", "Qwen3-MoE"])
@pytest.mark.parametrize("operator", ["srio", "mrio", "nrio", "aki", "ligo-init"])
def test_inexact_operators_run_everywhere(operator, name, tmp_path):
    assert 1e-3 < error(name, 1.5, GrowConfig(operator), tmp_path) < 1e3


# ---- each ingredient is needed

WIDER, PAD = GrowConfig("lossless", heads="wider"), GrowConfig("pad")
FACTS = [  # a family, one fact of models/hf.py turned wrong, and a growth that shows it
    ("Qwen3", dict(qk_norm=""), 2, replace(PAD, heads="wider")),
    ("Gemma", dict(unit_gain=False), 2, WIDER),
    ("Gemma", dict(scaled_embed=False), 2, WIDER),
    ("Gemma 2", dict(scaled_attention=True), 2, WIDER),
    ("Gemma 3", dict(qk_norm=""), 2, replace(PAD, heads="wider")),
    ("OLMo 2", dict(qk_norm=""), 1.5, PAD),
    ("Phi-3", dict(rope=""), 2, WIDER),
    ("SmolLM3", dict(rope=""), 2, WIDER),
    ("Granite", dict(scaled_attention=True), 2, WIDER),
    ("Phi", dict(norm="rmsnorm"), 1.5, PAD),
    ("GPT-J", dict(norm="rmsnorm"), 1.5, PAD),
    ("StarCoder2", dict(norm="rmsnorm"), 1.5, PAD),
    ("ModernBERT", dict(head_activation="relu"), 2, WIDER),
    ("RoBERTa", dict(head_activation="relu"), 2, WIDER),
    ("DistilBERT", dict(gated=True), 2, WIDER),
    ("Falcon MQA", dict(norm="rmsnorm"), 1.5, PAD),
    ("Mixtral", dict(norm="layernorm"), 1.5, PAD),
    ("Qwen3-MoE", dict(norm="layernorm"), 1.5, PAD),
]


@pytest.mark.parametrize("name,wrong,factor,cfg", FACTS, ids=lambda x: str(x)[:40])
def test_every_fact_of_a_family_counts(name, wrong, factor, cfg, tmp_path, monkeypatch):
    family = zoo.MODELS[name].family
    monkeypatch.setitem(hf.FAMILIES, family, replace(hf.FAMILIES[family], **wrong))
    assert error(name, factor, cfg, tmp_path) > 1e-3


@pytest.mark.parametrize("operator", ["pad", "lossless"])
def test_gains_that_are_not_there_are_not_asked_to_scale(operator, tmp_path, monkeypatch):
    cfg = GrowConfig(operator, gauge="norm")  # what is left is epsilon, which OLMo's config lacks
    assert error("OLMo", 2, cfg, tmp_path / "a") < 0.03
    monkeypatch.setitem(hf.FAMILIES, "olmo", replace(hf.FAMILIES["olmo"], affine=True))
    assert error("OLMo", 2, cfg, tmp_path / "b") > 0.1


def test_a_head_whose_norm_has_no_gain_is_untied(tmp_path, monkeypatch):
    """OLMo-1B is tied, and nothing else could keep the scale of its logits."""
    assert error("OLMo tied", 1.5, PAD, tmp_path / "a") < TOLERANCE
    monkeypatch.setattr(hf_folder, "untied", lambda folder: folder)
    assert error("OLMo tied", 1.5, PAD, tmp_path / "b") > 1e-3


@pytest.mark.parametrize("name", ["GPT-2", "BERT GELU", "Llama GQA"])
def test_fourth_root(name, tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "score_scale", lambda plan, copies=1: 1 / math.sqrt(copies))
    assert error(name, 2, GrowConfig("lossless", heads="wider"), tmp_path) > 1e-3


def test_t5_has_no_fourth_root(tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "score_scale", lambda plan, copies=1: copies**-0.25)
    assert error("T5", 2, GrowConfig("lossless", heads="wider"), tmp_path) > 1e-3


def test_t5_divides_logits_by_the_new_width(tmp_path, monkeypatch):
    """The note's "nothing to do" for tied heads misses T5's 1/sqrt(d)."""
    monkeypatch.setattr(lossless, "width_root", lambda plan: 1.0)
    assert error("T5", 2, GrowConfig("lossless"), tmp_path) > 1e-2


@pytest.mark.parametrize("name", ["GPT-2", "BERT GELU"])
def test_gelu_split(name, tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "homogeneous", lambda activation: True)
    assert error(name, 2, GrowConfig("lossless"), tmp_path) > 1e-3


def test_epsilon(tmp_path, monkeypatch):
    kept = replace(OPERATORS["lossless"], config_change=lambda plan: operator.ConfigChange())
    monkeypatch.setitem(OPERATORS, "lossless", kept)
    assert error("GPT-2", 2, GrowConfig("lossless"), tmp_path) > 1e-8


def test_opt_cannot_change_epsilon_so_its_stream_grows(tmp_path):
    assert error("OPT", 2, GrowConfig("lossless", gauge="norm"), tmp_path / "a") > 1e-8
    assert error("OPT", 2, GrowConfig("lossless", gauge="eps"), tmp_path / "b") < TOLERANCE


def test_tiling_scrambles_heads(tmp_path, monkeypatch):
    plain = lossless.repeat_index

    def tiled(plan, space):
        old, new = plan.sizes[space]
        return torch.arange(new) % old if space == "heads" else plain(plan, space)

    monkeypatch.setattr(lossless, "repeat_index", tiled)
    assert error("GPT-2", 2, GrowConfig("lossless", heads="wider"), tmp_path) > 1e-3


def test_roformer_repeats_in_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "repeat_index", lambda plan, space: half_split(plan, space))
    assert error("RoFormer", 2, GrowConfig("lossless", heads="wider"), tmp_path) > 1e-3


def half_split(plan, space):
    return torch.arange(plan.sizes[space][1]) // (1 if space == "head" else 2)


def test_roformers_stored_table_is_what_makes_wider_heads_exact(tmp_path):
    """Recomputed at the new size it is only close, as the note says; recomputing is not broken."""
    note = GrowConfig("lossless", heads="wider", rope="recompute")
    assert 1e-3 < error("RoFormer", 2, note, tmp_path) < 1
    table = zoo.hugging_face(zoo.MODELS["RoFormer"]).roformer.encoder
    want = rope.sinusoids(32, 8).float()
    assert torch.allclose(table.embed_positions.weight, want, atol=1e-6)


def test_neox_parts_alternate_head_by_head(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_folder.Layout, "groups", lambda self, spec: 1)
    assert error("GPT-NeoX", 2, GrowConfig("lossless"), tmp_path) > 1e-3


def test_mean_not_zeros_is_what_layernorm_needs(tmp_path, monkeypatch):
    plain = pad.fill_new_rows
    monkeypatch.setattr(pad, "fill_new_rows", lambda w, dim, d, mean: plain(w, dim, d, False))
    assert error("GPT-2", 1.5, GrowConfig("pad"), tmp_path) > 1e-3


# ---- what a config can and cannot say


def error_with(name: str, switches: dict, factor: float, cfg: GrowConfig, place: Path) -> float:
    model = replace(zoo.MODELS[name], extra=(*zoo.MODELS[name].extra, *switches.items()))
    cell = exactness.hugging_face(model, torch.float64, place / "parent")
    return cell(factor, cfg)[0]["max_rel_dlogit"]


YARN = dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0))
REFUSED = [
    ("Phi", dict(qk_layernorm=True), "k_layernorm"),
    ("Falcon MQA", dict(alibi=True), "alibi"),
    ("Llama GQA", YARN, "yarn"),
]


@pytest.mark.parametrize("name,switches,message", REFUSED)
def test_what_has_no_exact_form_is_refused_by_name(name, switches, message, tmp_path):
    with pytest.raises(UserError, match=message):
        error_with(name, switches, 2, WIDER, tmp_path)


def test_longrope_keeps_both_of_its_lists(tmp_path, monkeypatch):
    """Phi-3-mini-128k: other factors beyond the original context, which the probe exceeds."""
    long = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16)
    long |= dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 2.0, 4.0, 8.0])
    switches = dict(rope_parameters=long, original_max_position_embeddings=16)
    assert error_with("Phi-3", switches, 2, WIDER, tmp_path / "a") < TOLERANCE
    padded = replace(PAD, heads="wider")
    assert error_with("Phi-3", switches, 2, padded, tmp_path / "b") < 1e-6  # theta' rounds
    plain = rope.wavelengths
    monkeypatch.setattr(rope, "wavelengths", lambda old, dim, name: plain(old, dim, "short_factor"))
    assert error_with("Phi-3", switches, 2, WIDER, tmp_path / "c") > 1e-3


def test_a_lone_key_head_stays_where_the_config_has_no_word_for_more(tmp_path):
    exactness.hugging_face(zoo.MODELS["Falcon MQA"], torch.float64, tmp_path / "parent")
    growth = folder.plan_folder(tmp_path / "parent", 64, GrowConfig("lossless"))
    assert (growth.plan.new.n_head, growth.plan.new.kv_heads) == (8, 1)


# ---- other heads, Post-LN, RoPE, half precision


CLASSIFIERS = [
    ("BertForSequenceClassification", "bert", "gelu"),
    ("BertForPreTraining", "bert", "gelu"),
    ("BertForTokenClassification", "bert", "relu"),  # ReLU: the stream's scale changes
    ("RobertaForSequenceClassification", "roberta", "relu"),
    ("DistilBertForSequenceClassification", "distilbert", "gelu"),
    ("DistilBertForQuestionAnswering", "distilbert", "gelu"),
    ("ModernBertForTokenClassification", "modernbert", "gelu"),
    ("LlamaForSequenceClassification", "llama", "silu"),
]


@pytest.mark.parametrize("kind,family,activation", CLASSIFIERS)
def test_classifiers_are_exact(kind, family, activation, tmp_path):
    import transformers

    torch.manual_seed(0)
    config = zoo.hugging_face(zoo.model(family, activation=activation)).config
    cls = getattr(transformers, kind)
    zoo.shake(cls(config).double()).save_pretrained(tmp_path / "parent")
    for heads, scale in (("more", "auto"), ("wider", "norm")):
        if family in ("distilbert", "modernbert"):
            scale = "auto"  # epsilon fixed in code; a GELU before the last norm
        growth = folder.plan_folder(
            tmp_path / "parent", 64, GrowConfig("lossless", heads=heads, gauge=scale)
        )
        folder.grow_folder(growth, tmp_path / heads, card=False)
        small, wide = (
            cls.from_pretrained(tmp_path / name, dtype=torch.float64).eval()
            for name in ("parent", heads)
        )
        for x, y in zip(outputs(small), outputs(wide), strict=True):
            assert (x - y).abs().max() < TOLERANCE * x.std()


def outputs(net) -> list[torch.Tensor]:
    with torch.no_grad(), Float64(net):
        return [x for x in net(input_ids=torch.arange(1, 20)[None], use_cache=False).to_tuple()]


def test_post_ln_padding_is_exact_for_constant_gains(tmp_path):
    """BERT without its MLM head: exact where every LayerNorm gain is one number, else not."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
    net = zoo.shake(BertModel(BertConfig(vocab_size=61, **sizes)).double())
    errors = []
    for constant in (True, False):
        with torch.no_grad():
            for name, p in net.named_parameters():
                if constant and name.endswith("LayerNorm.weight"):
                    p.fill_(1.3)
                elif name.endswith("LayerNorm.weight"):
                    p.mul_(1 + 0.2 * torch.randn(p.shape).double())
        net.save_pretrained(tmp_path / "parent")
        growth = folder.plan_folder(tmp_path / "parent", 48, GrowConfig("pad"))
        folder.grow_folder(growth, tmp_path / "wide", force=True, card=False)
        wide = BertModel.from_pretrained(tmp_path / "wide", dtype=torch.float64).eval()
        ids = torch.arange(20)[None]
        with torch.no_grad():
            a, b = (m(input_ids=ids).last_hidden_state for m in (net.eval(), wide))
        errors.append(((a - b[..., :32]).abs().max() / a.std()).item())
    assert errors[0] < TOLERANCE and errors[1] > 1e-3


def test_rope_frequencies_survive_two_growths(tmp_path):
    cell = exactness.hugging_face(zoo.MODELS["Llama GQA"], torch.float64, tmp_path / "parent")
    cfg = GrowConfig("lossless", heads="wider")
    assert cell(2, cfg)[0]["max_rel_dlogit"] < TOLERANCE
    source = hf_folder.open_folder(tmp_path / "parent")
    growth = folder.plan_folder(tmp_path / "wide", 128, cfg)
    folder.grow_folder(growth, tmp_path / "wider", card=False)
    a, b = (zoo.logits(tmp_path / n, source, torch.float64) for n in ("parent", "wider"))
    assert compare(a, b)["max_rel_dlogit"] < TOLERANCE


def test_repeated_frequencies_are_the_same_bits():
    old = {"rope_theta": 10000.0, "rope_type": "default"}
    config = type("Config", (), {"rope_parameters": old, "max_position_embeddings": 32})
    new = rope.repeated(config, 64, 3)
    wanted = 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64))
    assert torch.equal(1.0 / torch.tensor(new["short_factor"]), wanted.repeat_interleave(3))


def test_bfloat16_weights_are_rounded_once(tmp_path):
    torch.manual_seed(0)
    net = zoo.hugging_face(zoo.MODELS["GPT-2"]).to(torch.bfloat16)
    net.save_pretrained(tmp_path / "parent")
    growth = folder.plan_folder(tmp_path / "parent", 64, GrowConfig("lossless"))
    folder.grow_folder(growth, tmp_path / "wide", card=False)
    wide = hf_folder.open_folder(tmp_path / "wide")
    assert wide.raw["dtype"] == "bfloat16"
    name = "transformer.wte.weight"
    want = (net.transformer.wte.weight.float() / math.sqrt(2)).to(torch.bfloat16)
    assert torch.equal(wide.weights[name][:, ::2], want)


def test_noise_parts_copies_and_keeps_the_function(tmp_path):
    cfg = GrowConfig("lossless", heads="wider", noise_db=20.0)
    for i, name in enumerate(("GPT-2", "GPT-NeoX", "T5", "Llama GQA", "BERT GELU")):
        assert error(name, 2, cfg, tmp_path / str(i)) < TOLERANCE


# ---- our GPT and theirs

OURS = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, head_dim=8, d_model=16, d_ff=40)


@pytest.mark.parametrize("switches", [{}, dict(tied=False), dict(bias=False, activation="relu")])
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_ours_and_gpt2_agree_both_ways(switches, dtype, limit, tmp_path):
    from transformers import AutoModelForCausalLM

    cfg = replace(OURS, **switches)
    ours = zoo.shake(GPT(cfg, 0).to(dtype)).eval()
    checkpoint.save(tmp_path / "ours", ours.state_dict(), {"config": vars(cfg), "step": 0})
    convert.convert(convert.ConvertConfig("to-gpt2", tmp_path / "ours", tmp_path / "theirs"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=dtype).eval()
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = ours(ids), theirs(ids).logits
    assert (a - b).abs().max() < limit * a.std()

    convert.convert(convert.ConvertConfig("from-gpt2", tmp_path / "theirs", tmp_path / "back"))
    back = checkpoint.load(tmp_path / "back")
    again = GPT(checkpoint.model_config(back), seed=None).to(dtype)
    checkpoint.load_weights(again, back.model, "back")
    with torch.no_grad():
        assert (again(ids) - a).abs().max() < limit * a.std()


def test_tanh_gelu_is_not_erf_gelu(tmp_path):
    """gelu_new is the tanh form; plain gelu would be close, and wrong."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = zoo.shake(GPT(OURS, 0).double())
    weights, raw = gpt2.to_gpt2(ours.state_dict(), OURS)
    ids = torch.arange(16)[None]
    for activation, same in (("gelu_new", True), ("gelu", False)):
        net = GPT2LMHeadModel(GPT2Config(**raw | {"activation_function": activation})).double()
        net.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
        with torch.no_grad():
            delta = (net.eval()(ids).logits - ours(ids)).abs().max()
        assert (delta < 1e-10) == same


def test_what_gpt2_lacks_is_refused():
    with pytest.raises(UserError, match="rmsnorm"):
        gpt2.to_gpt2({}, replace(OURS, norm="rmsnorm"))
    with pytest.raises(UserError, match="swiglu"):
        gpt2.to_gpt2({}, replace(OURS, activation="swiglu"))


def test_exported_folder_generates_text(tmp_path):
    import tokenizers
    from transformers import pipeline

    vocab = {chr(97 + i): i for i in range(26)} | {f"<{i}>": i for i in range(26, 61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<26>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cfg = convert.ConvertConfig(
        "to-gpt2", tmp_path / "ours", tmp_path / "theirs", tokenizer=tmp_path / "tokenizer.json"
    )
    checkpoint.save(tmp_path / "ours", GPT(OURS, 0).state_dict(), {"config": vars(OURS)})
    convert.convert(cfg)
    generate = pipeline("text-generation", str(tmp_path / "theirs"), device="cpu")
    text = generate("a b c", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith("a b c") and len(text) > len("a b c")
