"""nanoGPT's ckpt.pt as our checkpoint, against nanoGPT's own arithmetic written out; and the id
that ends a text in an exported folder."""

import json

import pytest
import torch
import torch.nn.functional as F

import checkpoint
from errors import UserError
from models.convert import ConvertConfig, convert
from models.gpt import GPT, GPTConfig

ARGS = dict(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=64, dropout=0.0)


def saved(bias: bool, prefix: str = "") -> dict:
    """What nanoGPT's train.py saves, with weights far from their initial values."""
    gen, d = torch.Generator().manual_seed(0), ARGS["n_embd"]
    shapes = {"wte.weight": (ARGS["vocab_size"], d), "wpe.weight": (ARGS["block_size"], d)}
    for i in range(ARGS["n_layer"]):
        for name, rows, columns in (
            ("attn.c_attn", 3 * d, d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", 4 * d, d),
            ("mlp.c_proj", d, 4 * d),
        ):
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (rows,)}
    for norm in [f"h.{i}.ln_{j}" for i in range(ARGS["n_layer"]) for j in (1, 2)] + ["ln_f"]:
        shapes |= {f"{norm}.weight": (d,), f"{norm}.bias": (d,)}
    model = {
        f"{prefix}transformer.{name}": torch.randn(shape, generator=gen, dtype=torch.float64) * 0.5
        for name, shape in shapes.items()
        if bias or not name.endswith("bias")
    }
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    args = ARGS | {"bias": bias}
    return {"model": model, "model_args": args, "iter_num": 3, "optimizer": {}, "config": {"a": 1}}


def nanogpt(model: dict, ids: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V): nanoGPT's model.py as functions of its state_dict."""

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    w = {n.removeprefix("_orig_mod.").removeprefix("transformer."): t for n, t in model.items()}
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for i in range(ARGS["n_layer"]):
        qkv = linear(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)).split(ARGS["n_embd"], 2)
        heads = [t.unflatten(2, (ARGS["n_head"], -1)).transpose(1, 2) for t in qkv]
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(f"h.{i}.attn.c_proj", y)
        h = F.gelu(linear(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x)))
        x = x + linear(f"h.{i}.mlp.c_proj", h)
    return norm("ln_f", x) @ w["lm_head.weight"].T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("vocab_size", [0, 50])
def test_logits_stay(bias, prefix, vocab_size, tmp_path):
    theirs = saved(bias, prefix)
    torch.save(theirs, tmp_path / "ckpt.pt")
    convert(
        ConvertConfig("from-nanogpt", tmp_path / "ckpt.pt", tmp_path / "ours", None, 0, vocab_size)
    )
    ckpt = checkpoint.load(tmp_path / "ours")
    model = GPT(checkpoint.model_config(ckpt), seed=None).double()
    checkpoint.load_weights(model, ckpt.model, "ours")
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, want = model(ids), nanogpt(theirs["model"], ids)
    assert ours.shape[-1] == (vocab_size or 64)
    assert (ours - want[..., : ours.shape[-1]]).abs().max() < 1e-12 * want.std()
    assert ckpt.meta["source"]["name"] == "ckpt.pt" and len(ckpt.meta["source"]["sha256"]) == 64


def test_the_erf_form_is_not_the_tanh_form(tmp_path):
    theirs = saved(True)
    torch.save(theirs, tmp_path / "ckpt.pt")
    convert(ConvertConfig("from-nanogpt", tmp_path / "ckpt.pt", tmp_path / "ours"))
    ckpt = checkpoint.load(tmp_path / "ours")
    assert checkpoint.model_config(ckpt).activation == "gelu-erf"
    tanh = GPT(GPTConfig(**{**ckpt.meta["config"], "activation": "gelu"}), seed=None).double()
    checkpoint.load_weights(tanh, ckpt.model, "ours")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert (tanh(ids) - nanogpt(theirs["model"], ids)).abs().max() > 1e-4


@pytest.mark.parametrize(
    "content,message",
    [
        ({"weights": {}}, "no nanoGPT checkpoint"),
        ({"model": {}, "model_args": {"n_layer": 2}}, "no nanoGPT checkpoint"),
        ([1, 2], "it holds a list"),
        ({"model": print}, "cannot be read as weights"),
    ],
)
def test_what_is_no_nanogpt_checkpoint_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=message):
        convert(ConvertConfig("from-nanogpt", tmp_path / "ckpt.pt", tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_the_exported_folder_knows_how_a_text_ends(tmp_path):
    """The id of the tokenizer's end of text, not the last piece of the vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    cfg = GPTConfig(vocab_size=8, block_size=4, n_layer=1, n_head=1, head_dim=4, d_model=4)
    checkpoint.save(tmp_path / "ours", GPT(cfg, 0).state_dict(), {"config": vars(cfg)})
    vocab = {"<|endoftext|>": 0} | {chr(97 + i): i + 1 for i in range(7)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    convert(
        ConvertConfig("to-gpt2", tmp_path / "ours", tmp_path / "out", tmp_path / "tokenizer.json")
    )
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["eos_token_id"] == raw["bos_token_id"] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 0
    with pytest.raises(UserError, match="8 entries"):
        small = GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, head_dim=4, d_model=4)
        checkpoint.save(tmp_path / "small", GPT(small, 0).state_dict(), {"config": vars(small)})
        convert(
            ConvertConfig(
                "to-gpt2", tmp_path / "small", tmp_path / "no", tmp_path / "tokenizer.json"
            )
        )
