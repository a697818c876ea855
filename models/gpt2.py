"""Our GPT as GPT2LMHeadModel and back, and nanoGPT checkpoints as ours: the same arithmetic, other
names. models/convert.py is the command line.
"""

from dataclasses import replace

import torch

from errors import UserError
from models.gpt import GPTConfig

ACTIVATIONS = {  # their name -> ours
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu-erf",
    "relu": "relu",
}
NANOGPT = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")


def to_gpt2(weights: dict, cfg: GPTConfig) -> tuple[dict, dict]:
    """Our state_dict as GPT2LMHeadModel's, and its config.json. GPT-2 always has biases: a model
    without gets zeros. Raises UserError for switches GPT-2 does not have."""
    for name, needed in (("norm", ("layernorm",)), ("position", ("learned",))):
        if getattr(cfg, name) not in needed:
            raise UserError(f"GPT-2 has no {name} {getattr(cfg, name)!r}; it needs {needed[0]!r}")
    if cfg.activation == "swiglu":
        raise UserError("GPT-2 has no activation 'swiglu'; it needs 'gelu', 'gelu-erf' or 'relu'")
    like = {n: weights[n.replace("bias", "weight")] for n in biases(cfg)}
    w = {n: t.new_zeros(t.shape[0]) for n, t in like.items()} | dict(weights)
    out = {f"transformer.{n}": w[n] for n in w if n.startswith(("wte", "wpe", "ln_f"))}
    for i in range(cfg.n_layer):
        ours, theirs = f"h.{i}.", f"transformer.h.{i}."
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            out[theirs + name] = w[ours + name]
        for kind in ("weight", "bias"):
            qkv = torch.cat([w[f"{ours}attn.{part}.{kind}"] for part in "qkv"])
            out[f"{theirs}attn.c_attn.{kind}"] = qkv
            out[f"{theirs}attn.c_proj.{kind}"] = w[f"{ours}attn.o.{kind}"]
            out[f"{theirs}mlp.c_fc.{kind}"] = w[f"{ours}mlp.up.{kind}"]
            out[f"{theirs}mlp.c_proj.{kind}"] = w[f"{ours}mlp.down.{kind}"]
    if not cfg.tied:
        out["lm_head.weight"] = w["lm_head.weight"]
    # Conv1D stores (in, out); nn.Linear (out, in)
    flipped = {n: t.T if ".c_" in n and t.ndim == 2 else t for n, t in out.items()}
    return {n: t.contiguous() for n, t in flipped.items()}, gpt2_config(cfg)


def biases(cfg: GPTConfig) -> list[str]:
    """Names of every bias a GPT-2 of this depth has, in our names."""
    parts = ("ln_1", "attn.q", "attn.k", "attn.v", "attn.o", "ln_2", "mlp.up", "mlp.down")
    return ["ln_f.bias"] + [f"h.{i}.{part}.bias" for i in range(cfg.n_layer) for part in parts]


def gpt2_config(cfg: GPTConfig) -> dict:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.block_size,
        "n_embd": cfg.d_model,
        "n_layer": cfg.n_layer,
        "n_head": cfg.n_head,
        "n_inner": cfg.d_ff,
        "activation_function": next(n for n, ours in ACTIVATIONS.items() if ours == cfg.activation),
        "layer_norm_epsilon": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,  # a tokenizer's to say
        "eos_token_id": None,
    }


def from_gpt2(weights: dict, config) -> tuple[dict, GPTConfig]:
    """A GPT2LMHeadModel's state_dict and transformers config as ours.

    Raises UserError for a GPT-2 variant our forward does not have.
    """
    if config.activation_function not in ACTIVATIONS:
        raise UserError(
            f"activation_function {config.activation_function!r} has no equal in models/gpt.py; "
            f"known: {', '.join(ACTIVATIONS)}"
        )
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise UserError("this GPT-2 scales attention in a way models/gpt.py does not have")
    cfg = GPTConfig(
        vocab_size=config.vocab_size,
        block_size=config.n_positions,
        n_layer=config.n_layer,
        n_head=config.n_head,
        head_dim=config.n_embd // config.n_head,
        d_model=config.n_embd,
        d_ff=config.n_inner or 0,
        norm_eps=config.layer_norm_epsilon,
        activation=ACTIVATIONS[config.activation_function],
        tied=config.tie_word_embeddings,
    )
    out = {}
    for name, tensor in weights.items():
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")) or (cfg.tied and "lm_head" in name):
            continue  # old causal masks; the tied copy
        if ".c_attn." in name:
            pieces = tensor.chunk(3, dim=-1)
            found = {name.replace("c_attn", part): p for part, p in zip("qkv", pieces, strict=True)}
        else:
            renamed = name.replace("attn.c_proj", "attn.o").replace("mlp.c_fc", "mlp.up")
            found = {renamed.replace("mlp.c_proj", "mlp.down"): tensor}
        flip = ".c_" in name and tensor.ndim == 2
        out |= {n: (t.T if flip else t).contiguous() for n, t in found.items()}
    return out, cfg


def from_nanogpt(saved: dict, vocab_size: int = 0) -> tuple[dict, GPTConfig]:
    """nanoGPT's ckpt.pt (github.com/karpathy/nanoGPT: "model" and "model_args") as ours.

    nanoGPT pads the vocabulary (50257 to 50304); `vocab_size` rows are kept, 0 means all. Its GELU
    is the erf form. Raises UserError for what is no such checkpoint.
    """
    from transformers import GPT2Config

    args, weights = saved.get("model_args"), saved.get("model")
    if not isinstance(args, dict) or not isinstance(weights, dict) or set(NANOGPT) - args.keys():
        raise UserError(f"no nanoGPT checkpoint: it needs model, and model_args {NANOGPT}")
    if not 0 <= vocab_size <= args["vocab_size"]:
        raise UserError(
            f"vocabulary of {vocab_size}; it must be in 0 (all) to {args['vocab_size']}"
        )
    weights = {name.removeprefix("_orig_mod."): w for name, w in weights.items()}
    kept = vocab_size or args["vocab_size"]
    cut = ("transformer.wte.weight", "lm_head.weight")
    weights = {name: w[:kept] if name in cut else w for name, w in weights.items()}
    tied = "lm_head.weight" not in weights or torch.equal(*(weights[name] for name in cut))
    linear = {n: w.T if ".c_" in n and w.ndim == 2 else w for n, w in weights.items()}  # as Conv1D
    config = GPT2Config(
        vocab_size=kept,
        n_positions=args["block_size"],
        n_embd=args["n_embd"],
        n_layer=args["n_layer"],
        n_head=args["n_head"],
        activation_function="gelu",
        tie_word_embeddings=tied,
    )
    ours, cfg = from_gpt2(linear, config)
    return ours, replace(cfg, bias=args["bias"])
