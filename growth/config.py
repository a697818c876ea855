"""The settings of a growth step. No torch, so that a command line is read without it."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from settings import Above, Range, check

Block = Literal["random", "zero", "convex", "tiled"]
BLOCKS = get_args(Block)  # what may fill new blocks (growth/expand.py)


@dataclass(frozen=True)
class GrowConfig:
    """Settings of one growth step; what the paper leaves open has a default and a switch."""

    operator: str = "srio"
    attn: Block = "random"  # what fills free attention blocks (q, k, v, o)
    ffn: Block = "random"  # the same for up, gate, down
    embed: Block = "random"  # for token and position embeddings and an untied head
    cross: Literal["random", "zero"] = "random"  # old-new and new-old blocks of a tiled matrix
    # concentration of the convex weights; small means near-copies
    dirichlet: Annotated[float, Above(0)] = 0.05
    # of the random fill; residual writers use std / sqrt(2 n_layer)
    std: Annotated[float, Above(0)] = 0.02
    epsilon: float = 0.5  # srio, mrio: gain of the new input block
    epsilon_reading: Literal["row-sum", "block"] = "row-sum"
    # mrio: epsilon is that of all turns together, or each age's own
    age_epsilon: Literal["total", "each"] = "total"
    epsilons: tuple[float, ...] = ()  # mrio: one per older age, oldest first, instead of epsilon
    gain_ratio: Annotated[float, Above(0)] = 1.0  # gains: new gains over old ones
    # pad, exact-srio: gain of new coordinates, free where these are 0
    gamma_new: Annotated[float, Range(0)] = 1.0
    shrink: Annotated[float, Range(0)] = 0.4  # szp: factor on the old weights
    rotate_weights: bool = True
    rotate_embeddings: bool = True
    heads: Literal["more", "wider"] = "more"  # more heads of the old size, or wider heads
    # scale of the exactly grown stream (growth/gauge.py)
    gauge: Literal["auto", "norm", "eps"] = "auto"
    # lossless, wider heads: repeat the frequencies, or recompute them (approximate)
    rope: Literal["repeat", "recompute"] = "repeat"
    # lossless: SNR in dB of exact noise that parts the copies; None is none
    noise_db: float | None = None
    # LayerNorm gains and shifts: rotated, kept, or folded into the readers
    norm: Literal["rotate", "keep", "fold"] = "rotate"
    # net2net, aki: RMS of the noise on copies, relative to the tensor's
    noise: Annotated[float, Range(0)] = 0.01
    learn_steps: Annotated[int, Range(1)] = 100  # AdamW steps, counted in tokens and FLOPs
    learn_batch: Annotated[int, Range(1)] = 16  # sequences per step
    learn_lr: Annotated[float, Above(0)] = 1e-3  # constant
    # all but LiGO learn a change from their start: decays to it
    learn_weight_decay: Annotated[float, Range(0)] = 0.1
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0  # of every random fill

    def __post_init__(self):
        check(self, "grow.")
        object.__setattr__(self, "epsilons", tuple(self.epsilons))  # JSON gives a list
