"""What one growth step needs to know: its settings, the sizes before and after, the old weights.

An operator is a module with one function, grow_tensor(plan, spec, params) -> the wide tensor of one
named parameter. It sees a single parameter at a time (plus plan.weights for the norm it follows),
so a checkpoint larger than memory can be streamed through it. Learned operators are made of the
four functions that growth/learn.py names; it trains their parameters and growth/apply.py folds
them.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from errors import UserError
from models.axes import Arch, Spec

POLICIES = ("random", "zero", "convex", "tiled")


@dataclass(frozen=True)
class GrowConfig:
    """Settings of one growth step; what the paper leaves open has a default and a switch."""

    operator: str = "srio"
    attn: str = "random"  # policy of q, k, v, o: random | zero | convex | tiled
    ffn: str = "random"  # policy of up, gate, down
    embed: str = "random"  # policy of token and position embeddings and an untied head
    cross: str = "random"  # old-new and new-old blocks of a tiled matrix: random | zero
    dirichlet: float = 0.05  # concentration of the convex weights; small means near-copies
    std: float = 0.02  # random fill; residual writers use std / sqrt(2 n_layer)
    epsilon: float = 0.5  # gain of the new input block
    epsilon_reading: str = "row-sum"  # row-sum | block
    epsilons: tuple[float, ...] = ()  # mrio: one per older age, oldest first; none: epsilon
    rotate_weights: bool = True
    rotate_embeddings: bool = True
    heads: str = "more"  # more heads of one size, or wider ones: more | wider (exact operators)
    gauge: str = "auto"  # scale of the exactly grown stream: auto | norm | eps (growth/gauge.py)
    rope: str = "repeat"  # lossless, wider heads: repeat the frequencies | recompute (approximate)
    noise_db: float | None = None  # lossless: exact noise on copies, this SNR in dB; None is none
    norm: str = "rotate"  # LayerNorm gains and shifts: rotate | keep | fold (into the readers)
    noise: float = 0.01  # net2net, aki: RMS of the noise on copies, relative to the tensor's
    learn_steps: int = 100  # learned operators: AdamW steps, counted in tokens and FLOPs
    learn_batch: int = 16  # sequences per step
    learn_lr: float = 1e-3  # constant
    learn_weight_decay: float = 0.1  # all but LiGO learn a change from their start: decays to it
    seed: int = 0

    def __post_init__(self):
        choices = {name: POLICIES for name in ("attn", "ffn", "embed")} | {
            "cross": ("random", "zero"),
            "norm": ("rotate", "keep", "fold"),
            "heads": ("more", "wider"),
            "gauge": ("auto", "norm", "eps"),
            "rope": ("repeat", "recompute"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"grow.{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        for name in ("dirichlet", "std", "learn_lr"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise UserError(f"grow.{name} is {value}; it must be a finite number > 0")
        for name in ("learn_steps", "learn_batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"grow.{name} is {value!r}; it must be a whole number >= 1")
        for name in ("noise", "learn_weight_decay"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise UserError(f"grow.{name} is {value}; it must be a finite number >= 0")
        if self.noise_db is not None and not np.isfinite(self.noise_db):
            raise UserError(f"grow.noise_db is {self.noise_db}; it must be a finite number of dB")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise UserError(f"grow.seed is {self.seed}; it must be a whole number in 0..2**63-1")
        object.__setattr__(self, "epsilons", tuple(self.epsilons))  # JSON gives a list


@dataclass(frozen=True)
class Plan:
    """One growth step of one model.

    sizes: space -> (old, new), for every space of the table that has a width; ages: the residual
    width after each age, oldest first, ending in the new width; weights: the old tensors by name.
    """

    cfg: GrowConfig
    specs: dict[str, Spec]
    sizes: dict[str, tuple[int, int]]
    head_dim: tuple[int, int]
    n_layer: int
    ages: tuple[int, ...]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    tied: bool = True
    arch: Arch = Arch()

    @property
    def d_old(self) -> int:
        return self.sizes["residual"][0]

    @property
    def d_new(self) -> int:
        return self.sizes["residual"][1]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

    @cached_property
    def post_norm(self) -> bool:
        """A norm writes the residual stream."""
        return any(spec.writes_stream for spec in self.specs.values())

    @property
    def post_ln(self) -> bool:
        """A LayerNorm does: the mean over the stream then depends on the input (BERT)."""
        return self.post_norm and self.arch.norm == "layernorm"

    def size(self, space: str, tensor_size: int) -> tuple[int, int]:
        """(old, new) of an axis; spaces without a width (vocab, position) keep the tensor's."""
        return self.sizes.get(space, (tensor_size, tensor_size))

    def unit(self, space: str) -> int:
        """Coordinates of a space that move together: a head. Under grouped-query attention the
        query heads of one key head are one unit, so that copies and mixes of both stay a group
        (unless key heads do not grow)."""
        if space not in ("heads", "kv"):
            return 1
        (q_old, q_new), (kv_old, kv_new) = self.sizes["heads"], self.sizes["kv"]
        grouped = space == "heads" and q_old * kv_new == q_new * kv_old
        return self.head_dim[0] * (q_old // kv_old if grouped else 1)

    def rng(self, key: str) -> np.random.Generator:
        """A generator of its own for every key: draws depend on neither order nor operator, so two
        variants with one growth seed fill the same block with the same numbers."""
        return np.random.Generator(np.random.Philox(key=[self.cfg.seed, zlib.crc32(key.encode())]))
