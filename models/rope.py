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

STRETCHABLE = ("default", "linear", "llama3")  # each frequency is scaled by its own value alone


def repeated(config, dim_old: int, k: int) -> dict:
    """rope_parameters with every frequency k times in a row. dim_old: rotated coordinates before.

    Raises UserError for a rope_type whose frequencies depend on more than their own number.
    """
    old, context = config.rope_parameters, config.max_position_embeddings
    factors = wavelengths(old, dim_old).repeat_interleave(k).tolist()
    return {
        **{n: v for n, v in old.items() if n == "partial_rotary_factor"},
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def wavelengths(parameters: dict, dim: int) -> torch.Tensor:
    """(dim/2,) float32: 1 / frequency, computed as transformers does."""
    kind = parameters.get("rope_type", "default")
    steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = parameters["rope_theta"] ** steps
    if kind == "default":
        return plain
    if kind == "linear":
        return plain * parameters["factor"]
    short, long = parameters.get("short_factor"), parameters.get("long_factor")
    if kind == "longrope" and short == long and parameters.get("attention_factor") == 1.0:
        return torch.tensor(short, dtype=torch.float32) * plain  # grown before
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
    """rope_parameters with theta ** power."""
    old = config.rope_parameters
    if old.get("rope_type", "default") not in STRETCHABLE:
        raise UserError(
            f"rope_type {old['rope_type']!r} cannot be stretched to wider heads; use --heads more"
        )
    return {**old, "rope_theta": old["rope_theta"] ** power}
