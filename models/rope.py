"""RoPE in a transformers config: how a wider head keeps the old frequencies.

A head of hd coordinates turns hd/2 pairs at theta^(-2j/hd). At k hd the standard formula gives
other frequencies, which is why the note calls RoPE inexact. Two configs express the old ones:

    repeated   rope_type "longrope" has a factor f_j for every frequency, 1 / (f_j theta^(2j/hd)).
               With theta = 1 and f_j = old theta^(2 floor(j/k) / hd) it gives them to the bit
    stretched  theta' = theta^(hd_new/hd): the first hd/2 frequencies are the old ones, to float32
               rounding; for padded heads, whose new pairs meet keys of 0
"""

import torch

from errors import UserError

STRETCHABLE = ("default", "linear", "llama3", "longrope")  # a scale for every frequency


def repeated(config, dim_old: int, k: int) -> dict:
    """rope_parameters with every frequency k times in a row. dim_old: rotated coordinates before.

    Raises UserError for a rope_type whose frequencies depend on more than their own number.
    """

    def repeat(old: dict) -> dict:
        plain = {"factor": 1.0, "attention_factor": 1.0} | {
            "original_max_position_embeddings": config.max_position_embeddings
        }
        if "partial_rotary_factor" in old:
            plain["partial_rotary_factor"] = old["partial_rotary_factor"]
        factors = {
            name: wavelengths(old, dim_old, name).repeat_interleave(k).tolist()
            for name in ("short_factor", "long_factor")
        }
        kept = old if old.get("rope_type") == "longrope" else plain
        return kept | {"rope_type": "longrope", "rope_theta": 1.0} | factors

    return each(config.rope_parameters, repeat)


def each(parameters: dict, change) -> dict:
    """change(..) of rope_parameters, or of those of every layer type (Gemma 3, ModernBERT)."""
    if all(isinstance(value, dict) for value in parameters.values()):
        return {kind: change(value) for kind, value in parameters.items()}
    return change(parameters)


def wavelengths(parameters: dict, dim: int, factor: str) -> torch.Tensor:
    """(dim/2,) float32: 1 / frequency, computed as transformers does; `factor`: longrope's list."""
    kind = parameters.get("rope_type", "default")
    steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = parameters["rope_theta"] ** steps
    if kind == "default":
        return plain
    if kind == "linear":
        return plain * parameters["factor"]
    if kind == "longrope":
        return torch.tensor(parameters[factor], dtype=torch.float32) * plain
    raise UserError(
        f"rope_type {kind!r} with wider heads has no exact repeat; use --heads more, or "
        f"--rope recompute (approximate)"
    )


def sinusoids(n_positions: int, dim: int) -> torch.Tensor:
    """(n_positions, dim) RoFormer's table [sines; cosines] at the standard frequencies, float64."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequency)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def stretched(config, power: float) -> dict:
    """rope_parameters with theta ** power, and a factor of 1 for every new frequency."""

    def stretch(old: dict) -> dict:
        if old.get("rope_type", "default") not in STRETCHABLE:
            raise UserError(
                f"rope_type {old['rope_type']!r} cannot be stretched to wider heads; use "
                f"--heads more"
            )
        new = {**old, "rope_theta": old["rope_theta"] ** power}
        for name in {"short_factor", "long_factor"} & old.keys():
            new[name] = old[name] + [1.0] * (round(len(old[name]) * power) - len(old[name]))
        return new

    return each(config.rope_parameters, stretch)


def written(raw: dict, parameters: dict) -> dict:
    """config.json with new rope_parameters, and with the same under the keys that transformers 4
    reads; what differs by layer type (Gemma 3, ModernBERT) cannot be said in those."""
    old = ("rope_scaling", "rope_local_base_freq", "local_rope_theta", "global_rope_theta")
    raw = {n: v for n, v in raw.items() if n not in old} | {"rope_parameters": parameters}
    if "rope_theta" not in parameters:
        return {n: v for n, v in raw.items() if n not in ("rope_theta", "rotary_emb_base")}
    theta = parameters["rope_theta"]
    raw |= {key: theta for key in ("rope_theta", "rotary_emb_base") if key in (*raw, "rope_theta")}
    if parameters.get("rope_type", "default") != "default":
        raw["rope_scaling"] = parameters  # 5 reads this one where both are there
    return raw


def remarks(old: dict, new: dict) -> list[str]:
    """What transformers 4 makes of frequencies that a config.json says in 5's way; found by hand,
    with 4.57.3."""
    parameters = new.get("rope_parameters") or {}
    if parameters == (old.get("rope_parameters") or {}):
        return []
    if "rope_theta" not in parameters:
        return [
            "RoPE's frequencies differ by layer type, which transformers 4 has no keys for: it "
            "would compute other outputs; load this folder with transformers 5"
        ]
    if parameters.get("rope_type") == "longrope":
        return [
            "RoPE's frequencies are written as longrope, under the keys of transformers 5 and of 4 "
            "(4.57 computes the same, or, for OLMo, OLMo 2 and Phi-3, refuses to load it)"
        ]
    return []
