"""An exact method's promise is checked: on a twin before any weight is touched, and on the card."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import grow
from checks import zoo
from errors import UserError
from growth import folder, twin
from growth.plan import GrowConfig
from growth.report import NotExact
from models import hf_folder, rope

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
SIZES |= dict(vocab_size=61, bos_token_id=0, eos_token_id=0, pad_token_id=0)
OPT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=40, vocab_size=61)
OPT |= dict(max_position_embeddings=32, word_embed_proj_dim=32, activation_function="relu")
PAD, REPEAT = GrowConfig("pad"), GrowConfig("lossless")


@pytest.fixture(autouse=True)
def quiet():
    grow.quiet_transformers()


def save(path: Path, kind: str, dtype=torch.float64, **config) -> Path:
    """A shaken model of a transformers class in a folder."""
    import transformers

    cls, torch_seed = getattr(transformers, kind), torch.manual_seed(0)
    assert torch_seed
    zoo.shake(cls(cls.config_class(**config)).to(dtype)).save_pretrained(path)
    return path


def edit(path: Path, drop=(), **changes) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw = {n: v for n, v in (raw | changes).items() if n not in drop}
    (path / "config.json").write_text(json.dumps(raw))


def run(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["grow.py", *map(str, args)])
    grow.main()


def report(path: Path) -> dict:
    return json.loads((path / "growth_report.json").read_text())


def grown(path: Path, d_new: int, cfg: GrowConfig, **how) -> dict:
    growth = folder.plan_folder(path, d_new, cfg)
    twin.check(growth)
    out = path.with_name(f"{path.name}-{d_new}-{cfg.heads}")
    return folder.grow_folder(growth, out, progress=False, force=True, **how)


# ---- the twin


@pytest.mark.parametrize("name", [n for n, m in zoo.MODELS.items() if m.family != "ours"])
def test_the_twin_is_as_exact_as_the_model(name, tmp_path):
    """Same ratios, other sizes, every kind of layer; as small as a test."""
    zoo.shake(zoo.hugging_face(zoo.MODELS[name])).save_pretrained(tmp_path / "m")
    for width, cfg in ((64, REPEAT), (48, PAD)):
        growth = folder.plan_folder(tmp_path / "m", width, cfg)
        small, wide, _ = twin.shrunk(growth, growth.source.config)
        assert wide * 32 == width * small.hidden_size
        error = twin.check(growth)
        assert error is None if growth.inexact else error < 1e-10


def test_the_twin_of_a_large_model_is_small_and_shows_every_kind_of_layer():
    """Llama 3 8B at x1.5, Gemma 3 at x2, a width that only whole groups of its heads can follow."""
    from transformers import Gemma3TextConfig, LlamaConfig

    for config, width, kinds in (
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=8), 6144, 0),
        (Gemma3TextConfig(), 4608, 2),
    ):
        family = hf_folder.hf.FAMILIES[config.model_type]
        old = hf_folder.hf.sizes_of(config, family)
        source = folder.Source({}, {}, old)
        plan = folder.Plan(REPEAT, source, old.widened(width), ())
        growth = type("G", (), {"plan": plan, "source": type("S", (), {"family": family})})
        small, wide, _ = twin.shrunk(growth, config)
        assert wide * config.hidden_size == width * small.hidden_size
        assert small.hidden_size <= 1024 and small.num_hidden_layers <= 6
        if kinds:
            assert len(set(small.layer_types)) == kinds
            assert len(small.layer_types) == small.num_hidden_layers


def test_a_switch_that_no_table_knows_is_refused_by_name(tmp_path, monkeypatch):
    """OLMo may clip q, k and v, which no scaled copy survives."""
    path = save(tmp_path / "olmo", "OlmoForCausalLM", **SIZES, clip_qkv=0.05)
    for more in ((), ("--no-card",), ("--dry-run",)):
        with pytest.raises(UserError, match=r"small random model .* is off by \d.*clip_qkv 0.05"):
            run(monkeypatch, path, "--out", tmp_path / "wide", "--factor", 2, *more)
    assert not (tmp_path / "wide").exists()
    run(monkeypatch, path, "--out", tmp_path / "wide", "--factor", 2, "--method", "nrio")
    assert report(tmp_path / "wide")["approximate"] == ["not function-preserving by design"]


@pytest.mark.parametrize("cfg,d_new", [(PAD, 48), (REPEAT, 64)])
def test_opt_without_its_last_norm_is_exact(cfg, d_new, tmp_path):
    path = save(tmp_path / "opt", "OPTForCausalLM", **OPT, _remove_final_layer_norm=True)
    assert grown(path, d_new, cfg)["max_rel_dlogit"] < 1e-10


@pytest.mark.parametrize("cfg", [PAD, REPEAT])
def test_opt_without_gains_is_exact(cfg, tmp_path):
    path = save(tmp_path / "opt", "OPTForCausalLM", **OPT, layer_norm_elementwise_affine=False,
                tie_word_embeddings=False)  # fmt: skip
    growth = folder.plan_folder(path, 64, cfg)
    if growth.inexact:  # epsilon is fixed in code, and no gain can make up for it
        assert "epsilon" in growth.inexact[0] and twin.check(growth) is None
    else:
        assert twin.check(growth) < 1e-10


@pytest.mark.parametrize("width,heads,d_new", [(48, 4, 72), (40, 4, 80)])
def test_rotated_coordinates_that_do_not_scale_are_refused(width, heads, d_new, tmp_path):
    """GPT-NeoX, a quarter of each head: 3 of 12 and 4 of 18; 2 of 10 and 5 of 20."""
    sizes = SIZES | dict(hidden_size=width, num_attention_heads=heads, rotary_pct=0.25)
    path = save(tmp_path / "neox", "GPTNeoXForCausalLM", **sizes)
    cfg = GrowConfig("pad" if d_new % width else "lossless", heads="wider")
    with pytest.raises(UserError, match="RoPE turns"):
        folder.plan_folder(path, d_new, cfg)
    assert grown(path, 2 * width, REPEAT)["max_rel_dlogit"] < 1e-10


# ---- the card


def test_a_broken_promise_writes_nothing_and_exits_1(tmp_path, monkeypatch, capsys):
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", torch.float32, n_embd=32, n_layer=2, n_head=4,
                vocab_size=61, n_positions=32)  # fmt: skip
    plain = folder.stored
    damage = lambda growth, name: plain(growth, name) * (1.01 if "ln_f" in name else 1)  # noqa: E731
    monkeypatch.setattr(folder, "stored", damage)
    monkeypatch.setattr(twin, "check", lambda growth: 0.0)  # it would see this
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, path, "--out", tmp_path / "wide", "--factor", 2)
    assert (
        "promises an exact result" in stopped.value.code and "--force-inexact" in stopped.value.code
    )
    assert sorted(tmp_path.iterdir()) == before
    run(monkeypatch, path, "--out", tmp_path / "wide", "--factor", 2, "--force-inexact")
    assert report(tmp_path / "wide")["max_rel_dlogit"] > 1e-3
    run(monkeypatch, path, "--out", tmp_path / "nrio", "--factor", 2, "--method", "nrio")


def test_our_broken_promise_writes_nothing(tmp_path, monkeypatch):
    import checkpoint
    from growth.child import grow_checkpoint
    from growth.operators import lossless
    from tests.grown import random_weights, tiny

    meta = {"config": tiny(8).as_dict()}
    checkpoint.save(tmp_path / "parent", random_weights(tiny(8)), meta)
    monkeypatch.setattr(lossless, "mixed_scale", lambda plan: 1.0)
    monkeypatch.setattr(lossless, "head_norm_scale", lambda plan: 1.0)
    with pytest.raises(NotExact, match="logits changed"):
        grow_checkpoint(tmp_path / "parent", tmp_path / "child", 16, REPEAT)
    assert not (tmp_path / "child").exists()
    grow_checkpoint(tmp_path / "parent", tmp_path / "child", 16, REPEAT, force_inexact=True)
    assert (tmp_path / "child").is_dir()


@pytest.mark.parametrize("gauge,factor", [("norm", 2**-0.5), ("eps", 1.0)])
@pytest.mark.parametrize("kind", ["LlamaModel", "BertModel"])
def test_headless_models_compare_hidden_states(kind, gauge, factor, tmp_path, monkeypatch, capsys):
    sizes = SIZES | (dict(num_key_value_heads=2) if kind == "LlamaModel" else {})
    path = save(tmp_path / "m", kind, **sizes)
    run(monkeypatch, path, "--out", tmp_path / "wide", "--factor", 2, "--gauge", gauge)
    card = report(tmp_path / "wide")
    assert card["max_rel_dlogit"] < 1e-10
    assert card["hidden_factor"] == pytest.approx(factor)
    assert f"x {factor:.4g}: their scale changes" in capsys.readouterr().out
    run(monkeypatch, path, "--out", tmp_path / "nrio", "--factor", 2, "--method", "nrio")
    assert report(tmp_path / "nrio")["max_rel_dlogit"] > 1e-2


def test_what_its_dtype_cannot_hold_is_refused(tmp_path, monkeypatch):
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", torch.float32, n_embd=32, n_layer=1, n_head=4,
                vocab_size=61, n_positions=32)  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    tensors["transformer.h.0.mlp.c_fc.bias"][3] = 1e5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for more in ((), ("--no-card",)):
        with pytest.raises(
            UserError, match="c_fc.bias has entries up to 1e.05, more than .*float16"
        ):
            run(
                monkeypatch,
                path,
                "--out",
                tmp_path / "w",
                "--factor",
                2,
                "--dtype",
                "float16",
                *more,
            )
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("what", ["c_proj", "mlp.c_fc", "h.0.", "transformer"])
def test_models_with_zeros_get_a_card_without_nan(what, tmp_path, monkeypatch):
    """Fresh muP or zero-init models: zero heads, FFNs, a zero layer, and logits that are all 0."""
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", torch.float32, n_embd=32, n_layer=2, n_head=4,
                vocab_size=61, n_positions=32)  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    zero = {n: torch.zeros_like(t) if what in n else t for n, t in tensors.items()}
    save_file(zero, path / "model.safetensors", metadata={"format": "pt"})
    for method in ("lossless", "pad", "sparkling", "srio"):
        out = tmp_path / method
        run(monkeypatch, path, "--out", out, "--factor", 2, "--method", method)
        text = (out / "growth_report.json").read_text()
        assert "NaN" not in text and "Infinity" not in text


def test_a_model_without_layers_grows(tmp_path):
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=0, n_head=4, vocab_size=61,
                n_positions=32)  # fmt: skip
    assert grown(path, 64, REPEAT)["max_rel_dlogit"] < 1e-10


# ---- which weights, which code, which config


def test_a_single_file_goes_before_a_stale_index(tmp_path):
    """As transformers reads it."""
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, vocab_size=61,
                n_positions=32)  # fmt: skip
    stale = {n: 0 * t for n, t in load_file(path / "model.safetensors").items()}
    save_file(stale, path / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    where = dict.fromkeys(stale, "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert grown(path, 64, REPEAT)["max_rel_dlogit"] < 1e-10


def test_code_of_the_models_own_is_refused(tmp_path):
    path = save(tmp_path / "m", "LlamaForCausalLM", **SIZES)
    edit(path, auto_map={"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"})
    with pytest.raises(UserError, match="auto_map names code of the model's own"):
        folder.plan_folder(path, 64, REPEAT)


@pytest.mark.parametrize("cfg", [REPEAT, PAD])
def test_frequencies_are_written_for_transformers_4_too(cfg, tmp_path):
    path = save(tmp_path / "m", "LlamaForCausalLM", **SIZES)
    wide = GrowConfig(cfg.operator, heads="wider")
    grown(path, 64, wide)
    raw = json.loads((tmp_path / "m-64-wider" / "config.json").read_text())
    new = raw["rope_parameters"]
    assert raw["rope_theta"] == new["rope_theta"]
    if cfg == REPEAT:
        assert raw["rope_scaling"] == new
    assert ["longrope" in text for text in told(tmp_path / "m-64-wider")] == [True] * (
        cfg == REPEAT
    )
    again = hf_folder.open_folder(tmp_path / "m-64-wider").config  # both keys are read as one
    assert again.rope_parameters == new and rope.each(new, lambda p: p)


def test_any_member_of_a_tied_group_will_do(tmp_path):
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, vocab_size=61,
                n_positions=32)  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    growth = folder.plan_folder(path, 64, REPEAT)
    assert growth.plan.tied and "transformer.wte.weight" in growth.plan.specs
    assert grown(path, 64, REPEAT)["max_rel_dlogit"] < 1e-10
    sizes = dict(d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=61)
    path = save(tmp_path / "t5", "T5ForConditionalGeneration", **sizes, decoder_start_token_id=0)
    tensors = load_file(path / "model.safetensors")
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert grown(path, 48, PAD)["max_rel_dlogit"] < 1e-10


def test_keys_that_are_aliases_or_absent_are_understood(tmp_path):
    path = save(tmp_path / "gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, vocab_size=61,
                n_positions=32)  # fmt: skip
    edit(path, drop=("n_embd", "n_head"), hidden_size=32, num_attention_heads=4)
    assert grown(path, 64, REPEAT)["max_rel_dlogit"] < 1e-10
    sizes = SIZES | dict(num_attention_heads=16, hidden_size=64, head_dim=4)
    path = save(tmp_path / "mistral", "MistralForCausalLM", **sizes)  # its default: 8 key heads
    edit(path, drop=("num_key_value_heads",))
    assert grown(path, 128, REPEAT)["max_rel_dlogit"] < 1e-10


def test_a_choice_among_answers_gets_a_card(tmp_path):
    path = save(tmp_path / "m", "BertForMultipleChoice", **SIZES)
    assert grown(path, 64, REPEAT)["max_rel_dlogit"] < 1e-10


# ---- what is exact and yet to be known


def from_zoo(path: Path, name: str) -> Path:
    torch.manual_seed(0)
    zoo.shake(zoo.hugging_face(zoo.MODELS[name]).double()).save_pretrained(path)
    return path


def told(path: Path) -> list[str]:
    return report(path)["remarks"]


@pytest.mark.parametrize("name,kept", [("Gemma 3", False), ("GPT-NeoX", True)])
def test_frequencies_that_transformers_4_cannot_read_are_told(name, kept, tmp_path):
    path = from_zoo(tmp_path / "m", name)
    for cfg in (REPEAT, PAD):
        grown(path, 64, cfg)
        assert not told(tmp_path / "m-64-more")
        grown(path, 64, GrowConfig(cfg.operator, heads="wider"))
        found = told(tmp_path / "m-64-wider")
        assert any("load this folder with transformers 5" in text for text in found) != kept
        assert any("longrope" in text for text in found) == (kept and cfg == REPEAT)


STUCK = (("Qwen3", "wider"), ("Gemma 3", "wider"), ("OLMo 2", "wider"), ("OLMo 2", "more"))


@pytest.mark.parametrize("name,heads", [*STUCK, ("Qwen3", "more"), ("Llama GQA", "wider")])
def test_rows_that_never_move_are_told(name, heads, tmp_path):
    """Read again once new heads are heard, as after a step of training."""
    cfg = GrowConfig("pad", heads=heads)
    growth = folder.plan_folder(from_zoo(tmp_path / "m", name), 48, cfg)
    folder.write_folder(growth, tmp_path / "wide")
    cls = hf_folder.model_class(growth.source.raw, growth.source.config)
    net = cls.from_pretrained(tmp_path / "wide", dtype=torch.float64)
    zoo.shake(torch.nn.ModuleList(layer.self_attn.o_proj for layer in net.model.layers))
    inputs = folder.probe(net.config)
    net(**inputs, labels=inputs["input_ids"]).loss.backward()
    k = net.model.layers[0].self_attn.k_proj.weight
    still = ((k.grad == 0) & (k == 0)).all(1).sum()
    assert still == (k.shape[0] // 3 if (name, heads) in STUCK else 0)
    assert any("never move" in r for r in growth.remarks) == ((name, heads) in STUCK)
    assert not folder.plan_folder(tmp_path / "m", 64, REPEAT).remarks


def test_an_untied_head_is_told_in_the_folder_and_on_the_screen(tmp_path, monkeypatch, capsys):
    path = from_zoo(tmp_path / "m", "OLMo tied")
    (path / "README.md").write_text("# The card\n")
    for args in (["--width", 48], ["--factor", 2], ["--factor", 2, "--dry-run"]):
        out = tmp_path / str(len(args) + args[1])
        run(monkeypatch, path, "--out", out, *args)
        assert "the output head is no longer tied" in capsys.readouterr().out
        assert len(args) == 3 or "no longer tied" in report(out)["remarks"][0]
        assert len(args) == 3 or "> - the output head is no" in (out / "README.md").read_text()
    run(monkeypatch, from_zoo(tmp_path / "u", "OLMo"), "--out", tmp_path / "none", "--factor", 2)
    assert "remark" not in capsys.readouterr().out and report(tmp_path / "none")["remarks"] == []


def test_tensors_keep_their_sources_names(tmp_path):
    """transformers 4 would start GPT-NeoX's head anew if it were called as 5 calls it."""
    path = from_zoo(tmp_path / "m", "GPT-NeoX")
    grown(path, 64, REPEAT)
    new = load_file(tmp_path / "m-64-more" / "model.safetensors")
    assert new.keys() == load_file(path / "model.safetensors").keys() and "embed_out.weight" in new


# ---- what travels along


def test_only_what_is_allowed_travels(tmp_path):
    path = save(tmp_path / "m", "LlamaForCausalLM", **SIZES)
    allowed = [
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
    ]
    for name in [
        *allowed,
        "model.zip",
        "m.tflite",
        "evil.py",
        "adapter_config.json",
        "trainer.log",
    ]:
        (path / name).write_text("{}")
    (path / "README.md").write_text("---\nlicense: mit\n---\n\n# The card\n")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("x")
    (path / "onnx").mkdir()
    (path / "onnx" / "model.onnx").write_text("x")
    grown(path, 64, REPEAT)
    out = tmp_path / "m-64-more"
    mine = {"config.json", "model.safetensors", "growth_report.json", "generation_config.json"}
    mine |= {"README.md", "additional_chat_templates", *allowed}
    assert {file.name for file in out.iterdir()} == mine
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n") and card.endswith("# The card\n")
    assert "Grown model" in card and "`m`, grown from width 32 to 64 (method lossless" in card


def sentence_encoder(path: Path, *kinds: str) -> Path:
    save(path, "BertModel", **SIZES)
    names = ["Transformer", "Pooling", "Normalize", *kinds]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(names)
    ]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "2_Normalize").mkdir()
    return path


def test_a_sentence_encoders_pooling_grows(tmp_path):
    path = sentence_encoder(tmp_path / "m")
    grown(path, 64, REPEAT)
    out = tmp_path / "m-64-more"
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert pooling == {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    assert (out / "2_Normalize").is_dir() and (out / "modules.json").is_file()
    with pytest.raises(UserError, match="has a Dense module .*remove it"):
        folder.plan_folder(sentence_encoder(tmp_path / "dense", "Dense"), 64, REPEAT)


@pytest.mark.parametrize(
    "name,text,says",
    [
        ("adapter_config.json", "{}", "holds an adapter.*merge_and_unload"),
        ("model.gguf", "GGUF", "GGUF.*from-gguf"),
    ],
)
def test_what_holds_no_weights_of_its_own_is_refused_with_a_way_out(name, text, says, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_text(text)
    with pytest.raises(UserError, match=says):
        folder.plan_folder(tmp_path / "m", 64, REPEAT)


# ---- room, leftovers, widths


def test_the_check_for_room_knows_the_dtype(tmp_path, monkeypatch):
    path = save(tmp_path / "m", "LlamaForCausalLM", torch.float32, **SIZES)
    need = sum(folder.plan_folder(path, 64, REPEAT).bytes.values())
    usage = lambda place: type("U", (), {"free": need - 1})  # noqa: E731
    monkeypatch.setattr(grow.shutil, "disk_usage", usage)
    with pytest.raises(UserError, match="GB are free"):
        run(monkeypatch, path, "--out", tmp_path / "w", "--factor", 2)
    run(monkeypatch, path, "--out", tmp_path / "w", "--factor", 2, "--dtype", "bfloat16")


def test_leftovers_of_a_killed_growth_are_swept(tmp_path, monkeypatch):
    path = save(tmp_path / "m", "LlamaForCausalLM", **SIZES)
    dead = tmp_path / f".wide.tmp-{os.uname().nodename}-999999999-{'0' * 8}"
    dead.mkdir()
    (dead / "model.safetensors").write_text("half")
    run(monkeypatch, path, "--out", tmp_path / "wide", "--factor", 2)
    assert not dead.exists()


@pytest.mark.parametrize(
    "kind,config,d_new,says",
    [
        ("Llama", dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3), 640,
         "3.33333 key heads; the nearest that work: 768 and 960"),
        ("Llama", dict(hidden_size=24, num_attention_heads=3, head_dim=8), 28,
         "3.5 heads of 8; the nearest that work: 32 and 40"),
        ("T5", dict(d_model=30, num_heads=4, d_kv=8, d_ff=60), 40,
         "5.33333 heads of 8; the nearest that work: 45 and 60"),
    ],
)  # fmt: skip
def test_a_refused_width_names_those_that_work(kind, config, d_new, says, tmp_path):
    sizes = SIZES | dict(num_hidden_layers=1, intermediate_size=1536)
    if kind == "T5":
        sizes, kind = dict(vocab_size=61, num_layers=1), "T5ForConditionalGeneration"
    kind = "LlamaForCausalLM" if kind == "Llama" else kind
    path = save(tmp_path / "m", kind, torch.float32, **sizes | config)
    with pytest.raises(UserError, match=f"(?s){says}"):
        folder.plan_folder(path, d_new, PAD)
    good = int(says.split()[-3])
    assert folder.plan_folder(path, good, PAD).plan.d_new == good
