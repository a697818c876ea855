"""RoPE in a transformers config: how a wider head keeps the old frequencies.

A head of hd coordinates turns hd/2 pairs at theta^(-2j/hd). At k hd the standard formula gives
other frequencies, which is why the note calls RoPE inexact. Two configs express the old ones:

    repeated   rope_type "longrope" multiplies every frequency by a number of its own:
               1 / (f_j theta^(2j / k hd)) = theta^(-2 floor(j/k) / hd), in float32 to the bit
    stretched  theta' = theta^(hd_new/hd): the first hd/2 frequencies are the old ones, to float32
               rounding; for padded heads, whose new pairs meet keys of 0
"""

import torch

from errors import UserError

STRETCHABLE = ("default", "linear", "llama3")  # each frequency is scaled by its own value alone


def repeated(config, dim_old: int, k: int) -> dict:
    """rope_parameters with every frequency k times in a row."""
    old, dim = config.rope_parameters, dim_old * k
    kind, theta = old.get("rope_type", "default"), old["rope_theta"]
    if kind not in ("default", "linear"):
        raise UserError(
            f"rope_type {kind!r} with wider heads has no exact repeat; use --heads more, or "
            f"--rope recompute (approximate)"
        )
    wanted = inverse_frequencies(theta, dim_old) / old.get("factor", 1.0)
    factors = exact_factors(wanted.repeat_interleave(k), theta, dim)
    context = config.max_position_embeddings
    return {
        **{n: v for n, v in old.items() if n == "partial_rotary_factor"},
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def inverse_frequencies(theta: float, dim: int) -> torch.Tensor:
    """(dim/2,) float32, computed as transformers does."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def exact_factors(wanted: torch.Tensor, theta: float, dim: int) -> list[float]:
    """f (float32) with 1 / (f * theta^(2j/dim)) == wanted: the nearest, then neighbours."""
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    best = (1.0 / (wanted.double() * powers.double())).float()
    error = (1.0 / (best * powers) - wanted).abs()
    up, down = best.clone(), best.clone()
    for _ in range(8):
        up, down = torch.nextafter(up, up.new_tensor(9e9)), torch.nextafter(down, down * 0)
        for candidate in (up, down):
            other = (1.0 / (candidate * powers) - wanted).abs()
            best = torch.where(other < error, candidate, best)
            error = torch.minimum(error, other)
    return best.tolist()


def stretched(config, power: float) -> dict:
    """rope_parameters with theta ** power."""
    old = config.rope_parameters
    if old.get("rope_type", "default") not in STRETCHABLE:
        raise UserError(
            f"rope_type {old['rope_type']!r} cannot be stretched to wider heads; use --heads more"
        )
    return {**old, "rope_theta": old["rope_theta"] ** power}
