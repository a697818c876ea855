"""The model zoo: a small random model of every family, with its switches.

The exactness matrix and the tests grow these. Every parameter is far from its initial value.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from growth import folder
from models import hf, hf_folder
from models.double import Float64
from models.gpt import GPT, GPTConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers reads it when first imported, below

D, HEADS, FFN, VOCAB, CONTEXT = 32, 4, 40, 61, 32


@dataclass(frozen=True)
class Model:
    """One row of the matrix: a family with its switches. `extra` goes to the config as it is."""

    family: str
    tied: bool = True
    bias: bool = True
    activation: str = "gelu"
    extra: tuple[tuple[str, object], ...] = ()

    @property
    def config(self) -> dict:
        return dict(self.extra)


def model(family: str, tied=True, bias=True, activation="gelu", **extra) -> Model:
    return Model(family, tied, bias, activation, tuple(extra.items()))


GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0)
GRANITE |= dict(attention_multiplier=0.2)

FALCON_MHA = dict(multi_query=False, parallel_attn=False, num_kv_heads=HEADS)

MODELS = {
    "ours": model("ours"),
    "ours untied": model("ours", tied=False),
    "ours no bias": model("ours", bias=False),
    "ours ReLU": model("ours", activation="relu"),
    "ours RMSNorm SwiGLU RoPE": model(
        "ours", False, False, "swiglu", norm="rmsnorm", position="rope"
    ),
    "ours RoPE tied": model("ours", position="rope"),
    "GPT-2": model("gpt2", activation="gelu_new"),
    "GPT-2 untied": model("gpt2", tied=False, activation="gelu_new"),
    "GPT-2 ReLU": model("gpt2", activation="relu"),
    "BERT GELU": model("bert"),
    "BERT GELU untied": model("bert", tied=False),
    "BERT ReLU": model("bert", activation="relu"),
    "RoFormer": model("roformer"),
    "T5": model("t5", bias=False, activation="relu"),
    "T5 1.1 gated untied": model("t5", False, False, "gated-gelu"),
    "mT5 gated untied": model("mt5", False, False, "gated-gelu"),
    "Llama GQA": model("llama", False, False, "silu"),
    "Llama GQA tied": model("llama", True, False, "silu"),
    "Llama with biases": model("llama", False, True, "silu", attention_bias=True, mlp_bias=True),
    "Mistral": model("mistral", False, False, "silu"),
    "Qwen2": model("qwen2", True, True, "silu"),
    "Qwen3": model("qwen3", True, False, "silu"),
    "Gemma": model("gemma", True, False, "gelu_pytorch_tanh"),
    "Gemma 2": model("gemma2", True, False, "gelu_pytorch_tanh", query_pre_attn_scalar=5),
    "Gemma 3": model("gemma3_text", True, False, "gelu_pytorch_tanh", query_pre_attn_scalar=5),
    "OLMo": model("olmo", False, False, "silu"),
    "OLMo tied": model("olmo", True, False, "silu"),
    "OLMo 2": model("olmo2", False, False, "silu"),
    "Phi-3": model("phi3", False, False, "silu"),
    "SmolLM3": model("smollm3", True, False, "silu", no_rope_layers=[1, 0]),
    "Granite": model("granite", True, False, "silu", **GRANITE),
    "Phi": model("phi", False, True, "gelu_new"),
    "GPT-J": model("gptj", False, True, "gelu_new", rotary_dim=4),
    "StarCoder2": model("starcoder2", True, True, "gelu_pytorch_tanh"),
    "ModernBERT": model("modernbert", True, False, "gelu"),
    "RoBERTa": model("roberta", max_position_embeddings=CONTEXT + 1),
    "DistilBERT": model("distilbert"),
    "Mixtral": model("mixtral", False, False, "silu", num_local_experts=3),
    "Qwen3-MoE": model("qwen3_moe", False, False, "silu", num_experts=3, num_experts_per_tok=2),
    "Falcon MQA": model("falcon", True, False),
    "Falcon GQA": model("falcon", True, False, new_decoder_architecture=True, num_kv_heads=2),
    "Falcon MHA": model("falcon", False, False, **FALCON_MHA),
    "GPT-NeoX": model("gpt_neox", tied=False, rotary_pct=0.5),
    "OPT": model("opt", activation="relu"),
    "OPT no gains": model("opt", activation="relu", layer_norm_elementwise_affine=False),
    "OPT no last norm": model("opt", activation="relu", _remove_final_layer_norm=True),
    "OPT no bias": model("opt", bias=False, activation="relu", enable_bias=False),
}


def ours(spec: Model) -> GPT:
    """One of our GPTs."""
    cfg = GPTConfig(
        vocab_size=VOCAB,
        block_size=CONTEXT,
        n_layer=2,
        n_head=HEADS,
        head_dim=D // HEADS,
        d_model=D,
        d_ff=FFN,
        bias=spec.bias,
        tied=spec.tied,
        activation=spec.activation,
        **spec.config,
    )
    return GPT(cfg, 0)


def hugging_face(spec: Model) -> torch.nn.Module:
    """A randomly initialised transformers model."""
    from transformers import AutoConfig

    family = hf.FAMILIES[spec.family]
    activation = {family.activation: spec.activation}
    if spec.family in ("t5", "mt5"):
        activation = {"feed_forward_proj": spec.activation, "num_decoder_layers": 2}
    sizes = {"hidden_size": D, "num_attention_heads": HEADS, family.ffn: FFN}
    sizes |= {key: D for key in (family.also_width,) if key}
    sizes |= {key: D // HEADS for key in (family.head_dim,) if key}
    sizes |= {key: 24 for key in (family.expert_ffn,) if key}
    sizes |= {key: 2 for key in (family.kv,) if key}
    sizes |= dict(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=CONTEXT)
    sizes |= dict(bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=spec.tied)
    config = AutoConfig.for_model(spec.family, **(sizes | activation | spec.config))
    net = hf_folder.model_class({}, config)(config)
    if not spec.tied and hasattr(net, "lm_head"):  # T5 ties until the two tensors differ
        net.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, D) * D**-0.5)
    return net


def shake(net: torch.nn.Module) -> torch.nn.Module:
    """Move every parameter away from its initial value, so that no error hides behind a zero bias
    or a unit gain. RoFormer's stored sines stay."""
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "embed_positions" not in name or p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype))
    return net


def logits(path: Path, source: hf_folder.Folder, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a saved folder in `dtype`, of all that it computes if that is float64."""
    cls = hf_folder.model_class(source.raw, source.config)
    net = cls.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    with torch.no_grad(), Float64(net):
        return net(**folder.probe(source.config)).logits
