"""Hugging Face families: where each config keeps its sizes, and what growth must know of it."""

from dataclasses import dataclass, replace

from errors import UserError
from models.axes import Arch
from models.sizes import Sizes


@dataclass(frozen=True)
class Family:
    """Facts of one `model_type`: the config's own key for each size ("" where it has none), and
    what Arch needs. transformers knows the rest: what is tied, the prefix of a model with a head,
    and (attribute_map) its own name of hidden_size, num_attention_heads and head_dim.
    """

    ffn: str = "intermediate_size"
    expert_ffn: str = ""
    eps: str = "layer_norm_eps"  # "" where the epsilon is fixed in code
    activation: str = "hidden_act"
    head_activation: str = ""  # of the layer before the MLM norm; a key, or what is fixed in code
    kv: str = ""
    head_dim: str = ""
    rotary_dim: str = ""  # rotated coordinates of a head, in number
    also_width: str = ""  # a second key that must equal the width
    norm: str = "layernorm"
    affine: bool = True
    qk_norm: str = ""
    gated: bool = False
    scaled_attention: bool = True
    rope: str = ""
    unit_gain: bool = False  # a norm's gain is 1 + its weight
    scaled_embed: bool = False  # embeddings are multiplied by sqrt(d)


BERT = Family(head_activation="hidden_act")
T5 = Family(
    ffn="d_ff",
    eps="layer_norm_epsilon",
    activation="dense_act_fn",
    head_dim="head_dim",
    norm="rmsnorm",
    scaled_attention=False,
)
LLAMA = Family(
    eps="rms_norm_eps",
    kv="num_key_value_heads",
    head_dim="head_dim",
    norm="rmsnorm",
    gated=True,
    rope="half",
)
GEMMA = replace(LLAMA, unit_gain=True, scaled_embed=True)
GEMMA2 = replace(GEMMA, activation="hidden_activation", scaled_attention=False)

FAMILIES = {
    "gpt2": Family(ffn="n_inner", eps="layer_norm_epsilon", activation="activation_function"),
    "bert": BERT,
    "roformer": replace(BERT, also_width="embedding_size", rope="pairs"),
    "roberta": replace(BERT, head_activation="gelu"),
    "distilbert": Family(
        ffn="hidden_dim", eps="", activation="activation", head_activation="activation"
    ),
    "modernbert": Family(
        eps="norm_eps",
        activation="hidden_activation",
        head_activation="classifier_activation",
        gated=True,
        rope="half",
    ),
    "t5": T5,
    "mt5": T5,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": replace(LLAMA, qk_norm="head_dim"),
    "smollm3": LLAMA,
    "granite": replace(LLAMA, scaled_attention=False),  # by attention_multiplier, which stays
    "gemma": GEMMA,
    "gemma2": GEMMA2,  # scaled by query_pre_attn_scalar, which stays
    "gemma3_text": replace(GEMMA2, qk_norm="head_dim"),
    "olmo": replace(LLAMA, eps="", norm="layernorm", affine=False),
    "olmo2": replace(LLAMA, qk_norm="heads"),
    "phi3": LLAMA,
    "phi": Family(kv="num_key_value_heads", head_dim="head_dim", rope="half"),
    "gptj": Family(
        ffn="n_inner",
        eps="layer_norm_epsilon",
        activation="activation_function",
        rotary_dim="rotary_dim",
        rope="pairs",
    ),
    "starcoder2": replace(LLAMA, eps="norm_epsilon", norm="layernorm", gated=False),
    "mixtral": LLAMA,
    "qwen3_moe": replace(LLAMA, expert_ffn="moe_intermediate_size", qk_norm="head_dim"),
    "gpt_neox": Family(rope="half"),
    "falcon": Family(
        ffn="ffn_hidden_size",
        eps="layer_norm_epsilon",
        activation="activation",
        kv="num_kv_heads",
        rope="half",
    ),
    "opt": Family(
        ffn="ffn_dim",
        eps="",
        activation="activation_function",
        also_width="word_embed_proj_dim",
    ),
}


def family_of(model_type: str) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}. Add "
            f"its axis table in models/axes.py and its facts in models/hf.py"
        )
    return FAMILIES[model_type]


def sizes_of(config, family: Family) -> Sizes:
    """The sizes in a transformers config; UserError for a variant that no table describes."""
    d, heads = config.hidden_size, config.num_attention_heads
    also = getattr(config, family.also_width, d) if family.also_width else d
    if also not in (None, d):
        raise UserError(
            f"{family.also_width} {also} differs from hidden_size {d}: embeddings that are "
            f"projected to the width have no axis table (models/axes.py)"
        )
    if getattr(config, "do_layer_norm_before", True) is False:
        raise UserError("OPT with do_layer_norm_before=false (Post-LN) has no axis table")
    if getattr(config, "alibi", False):
        raise UserError("alibi: its slopes depend on the number of heads; there is no exact growth")
    if not (type(d) is int and type(heads) is int and d > 0 and heads > 0):
        raise UserError(f"config.json: width {d!r}, attention heads {heads!r}: not sizes")
    one = getattr(config, "multi_query", False) and not config.new_decoder_architecture  # Falcon
    return Sizes(
        d,
        heads,
        1 if one else (family.kv and getattr(config, family.kv)) or heads,
        (family.head_dim and getattr(config, family.head_dim, None)) or d // heads,
        getattr(config, family.ffn) or 4 * d,
        getattr(config, family.expert_ffn) if family.expert_ffn else 0,
        rotary_part(config, family),
        getattr(config, family.rotary_dim) if family.rotary_dim else 0,
        bool(family.head_dim),
        one,
    )


def rotary_part(config, family: Family) -> float:
    """The share of a head's coordinates that RoPE turns."""
    if family.rope == "half":
        return config.rope_parameters.get("partial_rotary_factor", 1.0)
    return 1.0 if family.rope else 0.0


def arch_of(config, family: Family) -> Arch:
    """What the maths needs to know of this model (models/axes.py, Arch)."""
    hidden = family.head_activation
    return Arch(
        norm=family.norm,
        affine=family.affine and getattr(config, "layer_norm_elementwise_affine", True),
        qk_norm=family.qk_norm,
        eps_in_config=bool(family.eps),
        activation=getattr(config, family.activation),
        gated=family.gated or getattr(config, "is_gated_act", False),
        head_activation=hidden and getattr(config, hidden, hidden),
        scaled_attention=getattr(config, "scale_attn_weights", True) and family.scaled_attention,
        rope=family.rope,
        scaled_head=getattr(config, "scale_decoder_outputs", False)
        or (family.scaled_embed and config.tie_word_embeddings),
    )


def widened_config(raw: dict, config, family: Family, new: Sizes) -> dict:
    """config.json with new sizes under the config class's own keys. What is absent or null there
    and has no default of its own keeps following the width."""
    wanted = {
        "hidden_size": new.d_model,
        "num_attention_heads": new.n_head,
        family.ffn: new.d_ff,
        family.expert_ffn: new.expert_ffn,
        family.kv: new.kv_heads,
        family.head_dim: new.head_dim,
        family.also_width: new.d_model,
    }
    apart = {family.ffn} if new.d_ff != 4 * new.d_model else set()  # null means 4 x width
    wanted = {
        key: n
        for key, n in wanted.items()
        if key and (key in apart or getattr(config, key, None) is not None)
    }
    kept = {key: value for key, value in raw.items() if key not in wanted}
    return kept | {config.attribute_map.get(key, key): n for key, n in wanted.items()}
