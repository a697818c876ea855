"""What a GPT is: its sizes and switches. No torch, so that a command line is read without it."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from errors import UserError
from models.sizes import Sizes
from settings import Above, Range, check

Size = Annotated[int, Range(1, 10**9)]  # beyond any model, and no product of two overflows
YOUNG = {"n_kv_head": 0}  # fields younger than rows and checkpoints, with what those mean


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and switches of a GPT. The defaults are the 24 M model of the paper's first stage."""

    vocab_size: Size = 50257
    block_size: Size = 256  # context length T
    n_layer: Size = 14
    n_head: Size = 4
    head_dim: Size = 64
    d_model: Size = 256  # must equal n_head * head_dim
    d_ff: Size = 0  # 0 means 4 * d_model
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Annotated[float, Above(0)] = 1e-5
    bias: bool = True
    # gelu in its tanh form, as GPT-2; gelu-erf as nanoGPT
    activation: Literal["gelu", "gelu-erf", "relu", "swiglu"] = "gelu"
    position: Literal["learned", "rope"] = "learned"  # a table, or rotated queries and keys
    rope_theta: Annotated[float, Above(0)] = 10000.0  # RoPE's frequencies: theta^(-2j/head_dim)
    rope_repeat: Size = 1  # each frequency stands this often in a row: exact k-fold wider heads
    tied: bool = True  # lm_head shares wte's weight
    n_kv_head: Annotated[int, Range(0)] = 0  # key and value heads, shared by queries; 0: n_head

    def __post_init__(self):
        if self.d_ff == 0:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        if self.n_kv_head == self.n_head:
            object.__setattr__(self, "n_kv_head", 0)  # one model, one config
        check(self, "model.")
        if self.n_head % self.kv_heads:
            raise UserError(
                f"model.n_kv_head is {self.n_kv_head}; it must be 0 (as many as n_head) or "
                f"divide n_head {self.n_head}"
            )
        if self.n_head * self.head_dim != self.d_model:
            raise UserError(
                f"n_head x head_dim = {self.n_head} x {self.head_dim} = "
                f"{self.n_head * self.head_dim}, but d_model is {self.d_model}; make them equal"
            )
        if self.position == "rope" and self.head_dim % (2 * self.rope_repeat):
            raise UserError(
                f"head_dim {self.head_dim} with rope_repeat {self.rope_repeat}: RoPE turns pairs, "
                f"so head_dim must be a multiple of {2 * self.rope_repeat}"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def sizes(self) -> Sizes:
        sizes = self.d_model, self.n_head, self.kv_heads, self.head_dim, self.d_ff
        return Sizes(*sizes, rotary_part=1.0 if self.position == "rope" else 0.0)

    def as_dict(self) -> dict:
        """The config as rows, checkpoints and hashes hold it: asdict without young fields that are
        unset, so that a model keeps its hash when the class gains a field."""
        return {k: v for k, v in asdict(self).items() if k not in YOUNG or v != YOUNG[k]}

    def resized(self, new: Sizes) -> "GPTConfig":
        return replace(
            self,
            d_model=new.d_model,
            n_head=new.n_head,
            n_kv_head=new.kv_heads,
            head_dim=new.head_dim,
            d_ff=new.d_ff,
        )

    def widened(self, d_model: int) -> "GPTConfig":
        """The same model at a new width, or at its own: head_dim kept (more heads), F/D kept."""
        return self.resized(self.sizes.widened(d_model)) if d_model != self.d_model else self
