"""Folding leaves nothing: a grown model is a plain GPT of its width, operator for operator."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from growth.apply import grow
from growth.gate import Gate
from growth.operators import OPERATORS
from growth.plan import GrowConfig
from models.gpt import GPT, GPTConfig
from tests.grown import model_of, random_weights, tiny, tokens


class CountOps(TorchDispatchMode):
    """Every ATen operation that runs, by name."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_a_step(model: GPT, cfg: GPTConfig) -> Counter:
    """One forward and backward pass."""
    x, y = tokens(cfg)
    model.zero_grad(set_to_none=True)
    with CountOps() as counted:
        model(x, y).backward()
    return counted.ops


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_grown_model_is_a_plain_gpt(operator):
    old = tiny(8)
    cfg = GrowConfig(operator=operator, attn="convex", ffn="tiled", learn_steps=1)
    grown = grow(random_weights(old), old, 16, cfg, batches=[tokens(old)])
    plain = GPT(old.widened(16), seed=0).double()
    model = model_of(grown.weights, grown.cfg)
    assert list(model.state_dict()) == list(plain.state_dict()) == list(grown.weights)
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (model, plain)]
    assert shapes[0] == shapes[1]
    assert not any(w.requires_grad for w in grown.weights.values())
    assert ops_of_a_step(model, grown.cfg) == ops_of_a_step(plain, grown.cfg)


def test_the_gate_leaves_with_its_ramp():
    old = tiny(8)
    grown = grow(random_weights(old), old, 12, GrowConfig(operator="srio"))
    model, plain = model_of(grown.weights, grown.cfg), GPT(grown.cfg, seed=0).double()
    keys, ops = list(plain.state_dict()), ops_of_a_step(plain, grown.cfg)
    gate = Gate(model, 8, steps=3)
    assert list(model.state_dict()) == keys
    assert ops_of_a_step(model, grown.cfg) != ops  # during the ramp it is there
    gate.set(3)
    assert ops_of_a_step(model, grown.cfg) == ops
    assert not any(m._forward_hooks for m in model.modules())


def test_an_operator_left_in_the_forward_would_be_seen():
    cfg = tiny(8)
    model, plain = GPT(cfg, seed=0), GPT(cfg, seed=0)
    torch.nn.utils.parametrizations.orthogonal(model.h[0].attn.q)
    assert ops_of_a_step(model, cfg) != ops_of_a_step(plain, cfg)
    assert list(model.state_dict()) != list(plain.state_dict())


def layout(model: GPT) -> list[tuple]:
    """What a step costs beside its operations: modules in order, and how their weights lie."""
    found = [(name, type(module).__name__) for name, module in model.named_modules()]
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        found.append((name, p.dtype, p.stride(), p.untyped_storage().nbytes(), p.requires_grad))
    return found


@pytest.mark.parametrize("operator", ["srio", "pad", "net2net"])
def test_a_grown_model_lies_in_memory_as_a_plain_one(operator):
    """Same modules, and weights that are no views of anything wider: nothing to slow a step."""
    old = tiny(8)
    grown = grow(random_weights(old), old, 12, GrowConfig(operator, attn="convex", ffn="tiled"))
    model, plain = model_of(grown.weights, grown.cfg), GPT(grown.cfg, seed=0).double()
    assert layout(model) == layout(plain)
    assert all(w.is_contiguous() for w in grown.weights.values())
    weight = model.h[0].mlp.up.weight
    weight.data = weight.data.t().contiguous().t()  # the same numbers, read across
    assert layout(model) != layout(plain)
