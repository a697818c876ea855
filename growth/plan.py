"""What one growth step needs to know: its settings, the model, the sizes before and after.

This is the contract of growth/operators/: an operator sees a Plan and one Spec at a time.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from growth.config import GrowConfig
from models.axes import Arch, Spec
from models.sizes import TOGETHER, Apart, Sizes


@dataclass(frozen=True)
class Source:
    """A model to grow, whoever stored it.

    weights: the old tensors by name, read when asked for; arch: what else the maths must know;
    tied: whether the output head is the embedding.
    """

    specs: dict[str, Spec]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    sizes: Sizes
    arch: Arch = Arch()
    tied: bool = True


@dataclass(frozen=True)
class Plan:
    """One growth step of one model. ages: the residual width after each age, oldest first, ending
    in the new width; apart: what did not follow the width."""

    cfg: GrowConfig
    source: Source
    new: Sizes
    ages: tuple[int, ...]
    apart: Apart = TOGETHER

    @property
    def specs(self) -> dict[str, Spec]:
        return self.source.specs

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.source.weights

    @property
    def arch(self) -> Arch:
        return self.source.arch

    @property
    def tied(self) -> bool:
        return self.source.tied

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """space -> (old, new), for every space that has a width."""
        new = self.new.spaces
        return {space: (old, new[space]) for space, old in self.source.sizes.spaces.items()}

    @property
    def head_dim(self) -> tuple[int, int]:
        return self.source.sizes.head_dim, self.new.head_dim

    @cached_property
    def n_layer(self) -> int:
        return 1 + max((s.layer for s in self.specs.values() if s.layer is not None), default=-1)

    @property
    def rotary(self) -> tuple[int, int]:
        """Coordinates of a head that RoPE turns, before and after."""
        return self.source.sizes.rotary, self.new.rotary

    @cached_property
    def post_norm(self) -> bool:
        """A norm writes the residual stream."""
        return any(spec.writes_stream for spec in self.specs.values())

    @property
    def post_ln(self) -> bool:
        """A LayerNorm does: the mean over the stream then depends on the input (BERT)."""
        return self.post_norm and self.arch.norm == "layernorm"

    @property
    def d_old(self) -> int:
        return self.source.sizes.d_model

    @property
    def d_new(self) -> int:
        return self.new.d_model

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

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

    def normal(self, key: str, shape: tuple[int, ...], std: float = 1.0) -> torch.Tensor:
        """N(0, std) in float32 by the key alone, as rng; torch draws three times as fast as numpy.
        Its generator takes 32 bits, and crc32 keeps keys that differ in one place apart."""
        gen = torch.Generator().manual_seed(zlib.crc32(f"{self.cfg.seed}:{key}".encode()))
        return torch.empty(shape).normal_(0.0, std, generator=gen)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> "Plan":
        return replace(self, source=replace(self.source, weights=weights))
