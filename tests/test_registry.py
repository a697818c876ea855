"""A new operator is one record, a new family one axis table and one row of facts."""

import dataclasses

import pytest
import torch

import grid
from analysis import aggregate
from checks import zoo
from errors import UserError
from figures import style
from growth import folder
from growth.apply import grow
from growth.child import grow_checkpoint
from growth.expand import expand
from growth.moments import FIRST, SECOND, always, filled
from growth.operator import Operator
from growth.operators import OPERATORS
from growth.optim import carry
from growth.plan import GrowConfig
from models import axes, hf
from tests.grown import random_weights, tiny
from tests.synthetic_rows import grid as rows_of

# ---- an operator, as its own file would have it


def grow_tensor(plan, spec):
    """NRIO with new blocks half as large."""
    w = plan.weights[spec.name]
    wide = expand(plan, spec, w)
    old = tuple(map(slice, w.shape))
    wide[old] = 2 * w
    return wide / 2


HALF = Operator("half", 99, grow_tensor, moments=always(filled), color="#123456")


@pytest.fixture
def half(monkeypatch):
    monkeypatch.setitem(OPERATORS, "half", HALF)
    monkeypatch.setitem(grid.VARIANTS, "half", grid.grown("half of NRIO", "ours", "half"))


def test_it_is_unknown_before():
    with pytest.raises(UserError, match="'half' is unknown"):
        grow(random_weights(tiny(8)), tiny(8), 12, GrowConfig("half"))


def test_it_grows_a_checkpoint_with_its_card_and_adam_state(half, tmp_path):
    import checkpoint

    old, weights = tiny(8), random_weights(tiny(8))
    moments = {f"{n}/{kind}": w.square() for n, w in weights.items() for kind in (FIRST, SECOND)}
    meta = {"config": dataclasses.asdict(old), "optimizer_step": 3}
    checkpoint.save(tmp_path / "parent", weights, meta, moments)
    record = grow_checkpoint(
        tmp_path / "parent", tmp_path / "child", 12, GrowConfig("half"), optimizer="transfer"
    )
    card = record["report"]
    assert card["operator"] == "half" and card["contract"] == "approximate" and not card["exact"]
    assert card["gradient_rms_new_to_old"]  # its old block stands first
    child = checkpoint.load(tmp_path / "child")
    assert torch.equal(child.model["wte.weight"][:, :8], weights["wte.weight"])
    kept = child.optimizer["wte.weight/exp_avg"]
    assert torch.equal(kept[:, :8], moments["wte.weight/exp_avg"]) and (kept[:, 8:] == 0).all()
    plan = grow(weights, old, 12, GrowConfig("half")).plan
    assert set(carry(plan, moments, "asymmetric")) == set(moments)


def test_it_grows_a_hugging_face_folder(half, tmp_path):
    zoo.shake(zoo.hugging_face(zoo.MODELS["Llama GQA"])).save_pretrained(tmp_path / "llama")
    growth = folder.plan_folder(tmp_path / "llama", 48, GrowConfig("half"))
    report = folder.grow_folder(growth, tmp_path / "wide", progress=False)
    assert report["operator"] == "half" and report["max_rel_dlogit"] > 1e-3


def test_it_stands_in_the_grid_and_in_the_table(half):
    (_, run) = grid.expand_grid("smoke", ["half"], [0])
    assert run.grow["operator"] == "half"
    table = aggregate.table(rows_of(("nrio", "half"), range(2)))
    assert table["variant"].tolist() == ["nrio", "half"]
    assert style.color_of("half") == HALF.color


# ---- a family


def test_a_family_is_one_table_and_one_row_of_facts(monkeypatch, tmp_path):
    """StableLM: Llama's names under LayerNorm, a quarter of each head rotated."""
    from transformers import StableLmConfig, StableLmForCausalLM

    facts = hf.Family(kv="num_key_value_heads", gated=True, rope="half")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40)
    sizes |= dict(num_key_value_heads=1, vocab_size=61, bos_token_id=0, eos_token_id=0)
    net = zoo.shake(StableLmForCausalLM(StableLmConfig(**sizes, use_qkv_bias=True)).double())
    net.save_pretrained(tmp_path / "parent")
    with pytest.raises(UserError, match="stablelm"):
        folder.plan_folder(tmp_path / "parent", 64, GrowConfig("lossless"))
    monkeypatch.setitem(axes.TABLES, "stablelm", axes.LLAMA)
    monkeypatch.setitem(hf.FAMILIES, "stablelm", facts)
    for width, settings in ((64, GrowConfig("lossless", heads="wider")), (48, GrowConfig("pad"))):
        growth = folder.plan_folder(tmp_path / "parent", width, settings)
        report = folder.grow_folder(growth, tmp_path / f"{width}", progress=False)
        assert report["max_rel_dlogit"] < 1e-10 and report["contract"] == "exact"
