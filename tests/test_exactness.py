"""The exactness matrix: its models, its limits, what stands in it."""

import copy

import pytest
import torch

from checks import exactness, zoo
from growth import folder
from models.double import Float64
from models.sizes import TOGETHER

HUGGING_FACE = [name for name, spec in zoo.MODELS.items() if spec.family != "ours"]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_every_stack_of_the_zoo_has_two_layers(name):
    """T5's decoder has six and mT5's eight by default, and more rounding than the limit allows."""
    config = zoo.hugging_face(zoo.MODELS[name]).config
    assert config.num_hidden_layers == getattr(config, "num_decoder_layers", 2) == 2


def test_the_float32_limit_gives_way_only_to_a_parent_that_rounds_more_itself():
    assert exactness.limit_of("float64", 1.0) == 1e-10
    assert exactness.limit_of("float32", 3.3e-6) == 1e-5
    assert exactness.limit_of("float32", 5e-6) == pytest.approx(1.5e-5)


def cell(error: str, rounding: str) -> dict:
    row = exactness.row("m", zoo.MODELS["OLMo 2"], "float32", setting("more"), {}, [], 0.0)
    return row | {"max_rel_dlogit": error, "parent_rounding": rounding}


def setting(heads: str) -> exactness.Setting:
    found = exactness.settings_for(zoo.MODELS["OLMo 2"])
    return next(each for each in found if each.heads == heads)


def test_a_wider_limit_is_named():
    assert exactness.wider_limits([cell("9.0e-06", "3.0e-06")]) == []
    (line,) = exactness.wider_limits([cell("1.1e-05", "4.5e-06"), cell("9.0e-06", "4.5e-06")])
    assert "limit is 1.35e-05, 3 times" in line and "1 of its 2 cells exceed 1e-05" in line


def test_olmo_2_rounds_more_by_the_norms_of_what_it_writes():
    torch.manual_seed(0)
    net = zoo.shake(zoo.hugging_face(zoo.MODELS["OLMo 2"])).eval()
    with_norms = rounding(net)
    for name, module in net.named_modules():
        if name.endswith(("post_attention_layernorm", "post_feedforward_layernorm")):
            module.forward = lambda x: x
    assert exactness.limit_of("float32", with_norms) > 1e-5
    assert rounding(net) < 0.4 * with_norms


@torch.no_grad()
def rounding(net: torch.nn.Module) -> float:
    """What a float32 model loses to float32."""
    inputs, double = folder.probe(net.config), copy.deepcopy(net).double()
    with Float64(double):
        exact = double(**inputs).logits
    return exactness.relative(exact, net(**inputs).logits)


def test_spaces_that_grow_apart_stand_in_the_matrix():
    """Under the factor of what grows; a model whose heads have no size of their own has the FFN."""
    apart = {
        name: {
            (each.option, each.cfg.operator, each.shown, each.heads)
            for each in exactness.settings_for(zoo.MODELS[name])
            if each.apart != TOGETHER
        }
        for name in ("Llama GQA", "GPT-2", "ours")
    }
    assert apart["GPT-2"] == apart["ours"] == {c for c in apart["Llama GQA"] if "FFN a" in c[0]}
    assert {
        ("FFN alone", "pad", 1.5, "same"),
        ("heads alone", "lossless", 2, "more"),
        ("width alone", "pad", 1.5, "same"),
        ("heads ×2, FFN ×4", "lossless", 3, "more"),
    } < apart["Llama GQA"]


@pytest.mark.parametrize("build", ["ours", "Llama GQA"])
def test_a_cell_that_grows_apart_is_measured(build, tmp_path):
    spec = zoo.MODELS[build]
    make = exactness.ours if spec.family == "ours" else exactness.hugging_face
    measured = make(spec, torch.float64, tmp_path / "parent")
    for each in exactness.settings_for(spec):
        if each.apart != TOGETHER:
            numbers, notes = measured(each.factor, each.cfg, each.apart)
            assert numbers["max_rel_dlogit"] < exactness.LIMITS["float64"] and not notes
