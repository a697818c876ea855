import pytest
import torch

from errors import UserError
from growth.gate import Gate, alpha_at
from models.gpt import GPT, GPTConfig

CFG = GPTConfig(vocab_size=16, block_size=8, n_layer=2, n_head=3, head_dim=4, d_model=12)
OLD = 8
X = torch.arange(16).reshape(2, 8) % 16


@pytest.fixture
def model():
    return GPT(CFG, seed=3).double()


def outputs(model):
    """The residual updates of every attention and FFN, as the block adds them, and the logits."""
    seen, handles = [], []
    for block in model.h:
        for part in (block.attn, block.mlp):
            handles.append(part.register_forward_hook(lambda m, a, y: seen.append(y.detach())))
    logits = model(X)
    for handle in handles:
        handle.remove()
    return seen, logits


def test_alpha_is_a_linear_ramp_of_the_step_alone():
    assert [alpha_at(s, 4) for s in (0, 1, 2, 3, 4, 99)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert alpha_at(0, 0) == 1


def test_only_new_coordinates_are_scaled(model):
    free, _ = outputs(model)
    gate = Gate(model, OLD, steps=4)
    gate.set(1)
    gated, _ = outputs(model)
    assert torch.equal(gated[0][..., :OLD], free[0][..., :OLD])  # same input: the first attention
    assert torch.equal(gated[0][..., OLD:], free[0][..., OLD:] * 0.25)
    assert not torch.equal(gated[0][..., OLD:], free[0][..., OLD:])
    gate.set(0)
    assert all(not y[..., OLD:].any() and y[..., :OLD].any() for y in outputs(model)[0])


def test_after_the_ramp_nothing_is_left(model):
    free = model(X)
    keys = list(model.state_dict())
    gate = Gate(model, OLD, steps=4)
    assert list(model.state_dict()) == keys
    assert not gate.set(3) and not torch.equal(model(X), free)
    assert gate.set(4), "the end of the ramp is reported once"
    assert not gate.set(5)
    assert torch.equal(model(X), free)
    assert not any(m._forward_hooks for m in model.modules())


def test_gradients_of_new_rows_scale_with_alpha(model):
    """At alpha 0 the new rows of every writer get no gradient, later they do."""
    gate = Gate(model, OLD, steps=4)
    gate.set(0)
    model(X, X).backward()
    for block in model.h:
        for writer in (block.attn.o, block.mlp.down):
            assert not writer.weight.grad[OLD:].any() and writer.weight.grad[:OLD].any()
    model.zero_grad()
    gate.set(2)
    model(X, X).backward()
    assert model.h[0].attn.o.weight.grad[OLD:].any()


@pytest.mark.parametrize("d_old", [0, 12, 13, -1])
def test_a_width_that_was_not_before_growth_is_refused(model, d_old):
    with pytest.raises(UserError, match="1..11"):
        Gate(model, d_old, steps=4)
