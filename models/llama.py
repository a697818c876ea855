"""Our GPT as LlamaForCausalLM and back: the same arithmetic, other names.

Both rotate half-split pairs (i, i + K/2), so no weight is permuted and both ways are bitwise.
transformers computes RMSNorm and RoPE's sines in float32 whatever the dtype; computed in float64
there too, logits are equal to round-off (tests/test_llama.py).
"""

import torch

from errors import UserError
from models.gpt import GPT, GPTConfig

MODULES = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "lm_head": "lm_head",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    **{f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
NEEDED = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "rope_repeat": 1}


def llama_name(name: str) -> str:
    """h.3.attn.q.weight -> model.layers.3.self_attn.q_proj.weight."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("h."):
        return f"{MODULES[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"model.layers.{layer}.{MODULES[module]}.{kind}"


def to_llama(weights: dict, cfg: GPTConfig) -> tuple[dict, dict]:
    """Our state_dict as LlamaForCausalLM's, and its config.json. Raises UserError for switches that
    Llama does not have."""
    for name, value in NEEDED.items():
        if getattr(cfg, name) != value:
            raise UserError(f"Llama has no {name} {getattr(cfg, name)!r}; it needs {value!r}")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.block_size,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "rope_theta": cfg.rope_theta,  # where transformers before 5 looks
        "tie_word_embeddings": cfg.tied,
        "attention_bias": cfg.bias,
        "mlp_bias": cfg.bias,
    }
    return {llama_name(name): w.contiguous() for name, w in weights.items()}, raw


def from_llama(weights: dict, config, context: int = 0) -> tuple[dict, GPTConfig]:
    """A Llama's or Mistral's weights and transformers config as ours, with `context` positions (0:
    the config's; RoPE stores none, so any number is right).

    Raises UserError for a variant that our forward does not have.
    """
    cfg = from_llama_config(config, context)
    with torch.device("meta"):
        names = {llama_name(name): name for name in GPT(cfg, seed=None).state_dict()}
    stored = {n if n in names else f"model.{n}": w for n, w in weights.items()}  # a bare model's
    if odd := sorted(stored.keys() ^ names.keys()):
        raise UserError(
            f"{len(odd)} weights have no equal in models/gpt.py, or are missing (first: {odd[0]})"
        )
    return {ours: stored[theirs] for theirs, ours in names.items()}, cfg


def from_llama_config(config, context: int) -> GPTConfig:
    """Our config; UserError names what differs from models/gpt.py."""
    rope, biases = config.rope_parameters, {getattr(config, "attention_bias", False)}
    biases.add(getattr(config, "mlp_bias", False))
    context = context or config.max_position_embeddings
    window = getattr(config, "sliding_window", None) or context
    wrong = {
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        f"rope_type {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
        "biases in attention or FFN alone": len(biases) > 1,
        f"a sliding window of {window} tokens (give --context {window})": window < context,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise UserError(f"this model has {what}, which models/gpt.py does not have")
    return GPTConfig(
        vocab_size=config.vocab_size,
        block_size=context,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_kv_head=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        d_model=config.hidden_size,
        d_ff=config.intermediate_size,
        norm="rmsnorm",
        norm_eps=config.rms_norm_eps,
        bias=biases.pop(),
        activation="swiglu",
        position="rope",
        rope_theta=float(rope["rope_theta"]),
        tied=config.tie_word_embeddings,
    )
