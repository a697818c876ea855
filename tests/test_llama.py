"""Grouped-query attention: the model, every operator, and Llama folders to our GPT and back."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from checks import zoo
from errors import UserError
from growth import folder
from growth.apply import grow
from growth.expand import combination
from growth.operators import OPERATORS, ligo
from growth.plan import GrowConfig, Plan
from growth.rewarm import shapes_before
from models import convert
from models.double import Float64
from models.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from models.llama import from_llama_config, llama_name, to_llama
from tests.grown import gap, model_of, plan, random_weights, tiny, tokens

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
GROUPED = tiny(16, n_kv_head=2)  # 4 query heads, 2 key heads
SINGLE = tiny(16, n_kv_head=1)


def with_own_keys(weights: dict, cfg: GPTConfig) -> dict:
    """The same model with a key and a value head for every query head."""
    wide = dict(weights)
    for name in (n for n in weights if ".attn.k." in n or ".attn.v." in n):
        heads = weights[name].unflatten(0, (cfg.kv_heads, cfg.head_dim))
        wide[name] = heads.repeat_interleave(cfg.n_head // cfg.kv_heads, 0).flatten(0, 1)
    return wide


# ---- the model


@pytest.mark.parametrize("switches", [{}, LLAMA])
@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_a_group_reads_one_key_head(n_kv_head, switches):
    cfg = tiny(16, n_kv_head=n_kv_head, **switches)
    weights, (x, _) = random_weights(cfg), tokens(cfg)
    plain = model_of(with_own_keys(weights, cfg), replace(cfg, n_kv_head=0))
    torch.testing.assert_close(model_of(weights, cfg)(x), plain(x), rtol=0, atol=1e-12)


def test_sizes_and_costs():
    full = replace(GROUPED, n_kv_head=0)
    saved = 2 * 2 * 16 * 8  # k and v of two layers: 8 of 16 outputs each
    assert count_parameters(full) - count_parameters(GROUPED) == saved + 2 * 2 * 8  # biases
    assert flops_per_token(full) - flops_per_token(GROUPED) == 3 * 2 * saved


def test_a_config_without_groups_is_serialised_as_before():
    """Hashes of committed rows and checkpoints stay."""
    assert replace(GROUPED, n_kv_head=4) == replace(GROUPED, n_kv_head=0)
    assert "n_kv_head" not in replace(GROUPED, n_kv_head=4).as_dict()
    assert GROUPED.as_dict()["n_kv_head"] == 2 and GPTConfig(**GROUPED.as_dict()) == GROUPED


@pytest.mark.parametrize("n_kv_head", [-1, 3, 8, 2.0, True])
def test_bad_groups_are_refused(n_kv_head):
    with pytest.raises(UserError, match="n_kv_head"):
        replace(GROUPED, n_kv_head=n_kv_head)


def test_widths_keep_whole_groups():
    assert GROUPED.widened(24).n_kv_head == 3
    assert GROUPED.sizes.at_width(32, wider_heads=True).kv_heads == 2
    assert SINGLE.widened(24).n_kv_head == 1 and SINGLE.widened(32).n_kv_head == 2
    with pytest.raises(UserError, match="2.5 key heads; the nearest that work: 24 and 32"):
        GROUPED.widened(20)
    for cfg in (GROUPED, SINGLE):
        before = shapes_before(cfg.widened(24), 16)
        assert before == {n: p.shape for n, p in GPT(cfg, seed=None).named_parameters()}


# ---- growth


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("old", [GROUPED, SINGLE, tiny(16, n_kv_head=2, **LLAMA)])
def test_every_operator_grows_grouped_heads(operator, old):
    weights, d_new = random_weights(old), 32 if operator == "lossless" else 24
    if operator == "exact-srio" and old.norm == "rmsnorm":
        return  # refused: a tied head
    cfg = GrowConfig(operator, attn="convex", ffn="tiled", learn_steps=2)
    child = grow(weights, old, d_new, cfg, batches=[tokens(old)] * 2)  # checks every shape
    if operator in ("lossless", "pad", "exact-srio"):
        assert gap(weights, old, child.weights, child.cfg) < 1e-10


@pytest.mark.parametrize("operator", ["net2net", "sparkling"])
def test_copies_keep_groups_together(operator, monkeypatch):
    """Exact at a whole factor, since a copied query head finds a copy of its own key head; with
    heads drawn one by one it does not."""
    weights, cfg = random_weights(GROUPED), GrowConfig(operator, noise=0.0)
    child = grow(weights, GROUPED, 32, cfg)
    assert gap(weights, GROUPED, child.weights, child.cfg) < 1e-10
    if operator == "net2net":
        unit = lambda plan, space: 4 if space in ("heads", "kv") else 1  # noqa: E731
        monkeypatch.setattr(Plan, "unit", unit)
        child = grow(weights, GROUPED, 32, cfg)
        assert gap(weights, GROUPED, child.weights, child.cfg) > 1e-3


def test_a_new_group_is_one_mix():
    p = plan(GROUPED, 24, attn="convex")
    mix = {s: combination(p, p.specs["h.0.attn.q.weight"], s) for s in ("heads", "kv")}
    per_head = mix["kv"].unflatten(1, (2, 4))[:4, :, :1].sum(0)[:, 0]  # (old key heads,)
    assert mix["heads"].shape == (8, 16) and mix["kv"].shape == (4, 8)
    torch.testing.assert_close(mix["heads"][0].unflatten(0, (2, 2, 4))[:, 0, 0], per_head)


@pytest.mark.parametrize("old", [GROUPED, SINGLE])
def test_ligo_o_reads_what_v_writes(old):
    """o's map repeated over a group acts on repeated values as v's does on values."""
    p = plan(old, 32, operator="ligo")
    B = ligo.maps(p, ligo.init_params(p))["h.0.v"]
    v = torch.randn(old.kv_heads * 4, dtype=torch.float64)
    per_query = lambda v: v.unflatten(0, (-1, 1, 4)).expand(-1, 4 // old.kv_heads, 4).flatten()  # noqa: E731
    torch.testing.assert_close(ligo.over_group(p, "heads", B) @ per_query(v), per_query(B @ v))


# ---- Llama folders


def float64_tables(self, x, position_ids):
    """transformers' RoPE without its casts to float32."""
    freq = self.config.rope_parameters["rope_theta"] ** (-torch.arange(4).double() / 4)
    angle = (position_ids[..., None] * freq).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


@pytest.fixture
def llama(tmp_path):
    """A folder of a random grouped-query Llama in float64."""
    net = zoo.shake(zoo.hugging_face(zoo.MODELS["Llama GQA"]).double())
    net.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_llama_and_ours_agree_both_ways(llama, tmp_path, monkeypatch):
    from transformers.models.llama import modeling_llama

    convert.convert(convert.ConvertConfig("from-llama", llama, tmp_path / "ours"))
    ckpt = checkpoint.load(tmp_path / "ours")
    cfg = checkpoint.model_config(ckpt)
    assert (cfg.n_head, cfg.n_kv_head, cfg.d_model) == (4, 2, 32)
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    ours = model_of(ckpt.model, cfg)(ids)

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", float64_tables)
    theirs = modeling_llama.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float64)
    with Float64(theirs):
        assert (ours - theirs(ids).logits).abs().max() < 1e-12 * ours.std()

    convert.convert(convert.ConvertConfig("to-llama", tmp_path / "ours", tmp_path / "back"))
    before, after = (load_file(f / "model.safetensors") for f in (llama, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    back = modeling_llama.LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float64)
    assert torch.equal(back(ids).logits, theirs(ids).logits)
    assert ckpt.meta["source"]["licence"] == "not stated" and ckpt.meta["source"]["sha256"]


def test_growing_the_folder_or_the_checkpoint_is_the_same(llama, tmp_path):
    cfg = GrowConfig("pad", attn="random", seed=3)
    folder.grow_folder(folder.plan_folder(llama, 48, cfg), tmp_path / "wide", card=False)
    weights, meta = convert.read_folder(tmp_path / "wide")
    small, old = convert.read_folder(llama)
    child = grow(small, GPTConfig(**old["config"]), 48, cfg)
    ours = GPTConfig(**meta["config"])
    assert replace(child.cfg, norm_eps=1.0) == replace(ours, norm_eps=1.0)
    assert child.cfg.norm_eps == pytest.approx(ours.norm_eps)
    assert gap(weights, ours, small, GPTConfig(**old["config"])) < 1e-12
    assert gap(child.weights, child.cfg, small, GPTConfig(**old["config"])) < 1e-12


def test_what_belongs_to_the_model_travels_back(llama, tmp_path, capsys):
    """--tokenizer with the original's folder: its special ids, chat template and generation
    settings, card and licence; with a tokenizer.json alone, that."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")).save(
        str(llama / "tokenizer.json")
    )
    raw = json.loads((llama / "config.json").read_text()) | {"bos_token_id": 5, "eos_token_id": 6}
    (llama / "config.json").write_text(json.dumps(raw))
    (llama / "generation_config.json").write_text('{"eos_token_id": 6}')
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    (llama / "trainer.log").write_text("")
    (llama / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    convert.convert(convert.ConvertConfig("from-llama", llama, tmp_path / "ours"))
    said = capsys.readouterr().out
    assert "a checkpoint of ours, " in said and f"train.py --init {tmp_path / 'ours'}" in said
    for place, name in ((llama, "all"), (llama / "tokenizer.json", "tokenizer"), (None, "bare")):
        out = tmp_path / name
        convert.convert(convert.ConvertConfig("to-llama", tmp_path / "ours", out, place))
        said = capsys.readouterr().out
        assert f"wrote {out}: a Hugging Face folder, " in said
        assert ("no tokenizer" in said) == (place is None)
        assert f"{sum(t.numel() for t in load_file(out / 'model.safetensors').values()):,}" in said
    travelled = {file.name for file in (tmp_path / "all").iterdir()}
    assert {"generation_config.json", "chat_template.jinja", "README.md"} < travelled
    assert "trainer.log" not in travelled
    assert json.loads((tmp_path / "all" / "config.json").read_text())["eos_token_id"] == 6
    assert "not those of `llama`" in (tmp_path / "all" / "README.md").read_text()
    assert convert.licence_of(tmp_path / "all") == "mit"
    assert {file.name for file in (tmp_path / "tokenizer").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }


def test_a_context_of_ones_own(llama, tmp_path):
    options = {"context": 8}
    convert.convert(convert.ConvertConfig("from-llama", llama, tmp_path / "ours", **options))
    assert checkpoint.model_config(checkpoint.load(tmp_path / "ours")).block_size == 8


def test_the_licence_is_read_from_the_card(tmp_path):
    (tmp_path / "LICENSE").write_text("\nMIT License\n\nCopyright")
    assert convert.licence_of(tmp_path) == "MIT License"
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    assert convert.licence_of(tmp_path) == "apache-2.0"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "biases"),
        ({"sliding_window": 8}, "--context 8"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
        ({"head_dim": 4}, "d_model"),
    ],
)
def test_variants_we_lack_are_refused(change, message):
    config = zoo.hugging_face(zoo.MODELS["Llama GQA"]).config
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(UserError, match=message):
        from_llama_config(config, 0)


def test_what_llama_lacks_is_refused(llama, tmp_path):
    with pytest.raises(UserError, match="layernorm"):
        to_llama({}, GROUPED)
    with pytest.raises(UserError, match="not a gpt2"):
        convert.convert(convert.ConvertConfig("from-gpt2", llama, tmp_path / "x"))
    raw = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(raw | {"attention_bias": True}))
    with pytest.raises(UserError):
        convert.convert(convert.ConvertConfig("from-llama", llama, tmp_path / "x"))
    assert llama_name("h.11.mlp.up.weight") == "model.layers.11.mlp.up_proj.weight"


def test_what_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(UserError, match="GGUF"):  # with or without the packages that read it
        convert.convert(convert.ConvertConfig("from-gguf", tmp_path / "x.gguf", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    "SMOLLM2" not in os.environ, reason="set SMOLLM2 to a folder of it (README, from-gguf)"
)
def test_real_weights_grow_exactly(tmp_path):
    """SmolLM2-135M, 576 -> 768 by padding: the same logits in float64 (4 GB, half a minute)."""
    weights, meta = convert.read_folder(Path(os.environ["SMOLLM2"]), context=64)
    small, old = {n: w.double() for n, w in weights.items()}, GPTConfig(**meta["config"])
    child = grow(small, old, 768, GrowConfig("pad"))
    assert gap(small, old, child.weights, child.cfg) < 1e-10
