"""A child checkpoint: cumulative costs, lineage, carried Adam state; and its report card."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import checkpoint
from data.shards import Corpus
from errors import UserError
from growth.apply import grow
from growth.child import grow_checkpoint
from growth.plan import GrowConfig
from growth.report import duplicate_distance, effective_rank, lines, report_card
from models.axes import specs
from models.gpt import GPT, GPTConfig
from train import train
from training.config import TrainConfig

CFG = GPTConfig(vocab_size=48, block_size=16, n_layer=2, n_head=2, head_dim=4, d_model=8)


@pytest.fixture(scope="module")
def parent(tmp_path_factory, corpus_folder):
    out = tmp_path_factory.mktemp("parent") / "run"
    train(
        TrainConfig(
            out=out, data=corpus_folder, model=CFG, steps=12, batch_size=4, warmup_steps=2,
            eval_every=6, eval_tokens=256, last_tokens=64, dtype="float64", lr=1e-2,
        )
    )  # fmt: skip
    return out / "final"


def batches(corpus_folder, n=3):
    corpus = Corpus(corpus_folder)
    return [corpus.batch_at(step, 7, 2, 16) for step in range(n)]


def test_costs_add_up(parent, corpus_folder, tmp_path):
    cfg = GrowConfig("lrio", learn_steps=3)
    record = grow_checkpoint(parent, tmp_path / "c", 12, cfg, batches=batches(corpus_folder))
    before, child = checkpoint.load(parent), checkpoint.load(tmp_path / "c")
    assert record["tokens"] == 3 * 2 * 16 and record["flops"] > 0
    assert child.meta["tokens_total"] == before.meta["tokens_total"] + record["tokens"]
    assert child.meta["flops_total"] == before.meta["flops_total"] + record["flops"]
    assert child.meta["growth"]["parent"] == before.hash
    assert child.meta["lineage"] == before.meta["lineage"]


def test_second_growth_knows_its_ages(parent, corpus_folder, tmp_path):
    grow_checkpoint(parent, tmp_path / "c", 12, GrowConfig("mrio"))
    out = tmp_path / "run"
    train(
        TrainConfig(
            out=out, data=corpus_folder, init=tmp_path / "c", steps=2, batch_size=4,
            warmup_steps=1, eval_every=2, eval_tokens=256, last_tokens=64, dtype="float64",
        )
    )  # fmt: skip
    final = checkpoint.load(out / "final")
    assert [entry["d_model"] for entry in final.meta["lineage"]] == [8, 12]
    mrio = grow_checkpoint(out / "final", tmp_path / "m", 16, GrowConfig("mrio"))
    srio = grow_checkpoint(out / "final", tmp_path / "s", 16, GrowConfig("srio"))
    assert mrio["report"]["loss"][1] != srio["report"]["loss"][1]  # three ages, not two


def test_adam_state_is_carried_or_not(parent, tmp_path):
    grow_checkpoint(parent, tmp_path / "reset", 12, GrowConfig("nrio"))
    grow_checkpoint(parent, tmp_path / "kept", 12, GrowConfig("nrio"), optimizer="transfer")
    assert checkpoint.load(tmp_path / "reset").optimizer is None
    kept = checkpoint.load(tmp_path / "kept")
    assert kept.meta["optimizer_step"] == 12
    assert kept.optimizer["wte.weight/exp_avg"].shape == (48, 12)
    with pytest.raises(UserError, match="policy"):
        grow_checkpoint(parent, tmp_path / "x", 12, GrowConfig("nrio"), optimizer="keep")
    assert not (tmp_path / "x").exists()


def test_nothing_is_overwritten(parent, tmp_path):
    grow_checkpoint(parent, tmp_path / "c", 12, GrowConfig("nrio"))
    with pytest.raises(UserError, match="exists"):
        grow_checkpoint(parent, tmp_path / "c", 12, GrowConfig("srio"))
    grow_checkpoint(parent, tmp_path / "c", 12, GrowConfig("srio"), force=True)
    assert checkpoint.load(tmp_path / "c").meta["growth"]["settings"]["operator"] == "srio"


def card(operator: str, d_new: int = 12, **settings) -> dict:
    weights = {k: v.detach() for k, v in GPT(CFG, seed=1).double().named_parameters()}
    grown = grow(weights, CFG, d_new, GrowConfig(operator, **settings))
    x_bt = torch.randint(48, (2, 17), generator=torch.Generator().manual_seed(3))
    return report_card(grown.plan, CFG, grown.weights, grown.cfg, x_bt[:, :-1], x_bt[:, 1:])


@pytest.mark.parametrize("operator", ["pad", "exact-srio"])
@pytest.mark.parametrize("d_new", [9, 15, 44])
def test_exact_at_every_ratio(operator, d_new):
    """One new coordinate (g = 1), less than twice, more than five times the width."""
    cfg = replace(CFG, n_head=8, head_dim=1)
    weights = {k: v.detach() for k, v in GPT(cfg, seed=1).double().named_parameters()}
    weights = {k: v + 0.1 * torch.randn_like(v) for k, v in weights.items()}
    x_bt = torch.randint(48, (2, 17), generator=torch.Generator().manual_seed(3))
    found = {}
    for name in (operator, "srio"):
        grown = grow(weights, cfg, d_new, GrowConfig(name))
        args = (grown.plan, cfg, grown.weights, grown.cfg, x_bt[:, :-1], x_bt[:, 1:])
        found[name] = report_card(*args)
    assert found[operator]["max_rel_dlogit"] < 1e-12 and found[operator]["contract"] == "exact"
    assert found["srio"]["max_rel_dlogit"] > 1e-6 and found["srio"]["contract"] == "approximate"


def test_interrupted_learning_leaves_nothing_and_repeats(parent, corpus_folder, tmp_path):
    cfg = GrowConfig("srio-lo", learn_steps=3)

    def broken():
        yield from batches(corpus_folder)[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow_checkpoint(parent, tmp_path / "c", 12, cfg, batches=broken())
    assert list(tmp_path.iterdir()) == []
    for name in ("c", "d"):
        grow_checkpoint(parent, tmp_path / name, 12, cfg, batches=batches(corpus_folder))
    assert checkpoint.load(tmp_path / "c").hash == checkpoint.load(tmp_path / "d").hash


def test_card_tells_exact_from_approximate():
    exact, approximate = card("pad"), card("nrio")
    shown = dict(lines(exact | {"approximate": [], "wall_s": 1.0}))
    assert shown["probe loss"].endswith("nats, on random tokens: no text")  # not the user's loss
    assert exact["exact"] and exact["kl"] < 1e-15 and abs(exact["spike"]) < 1e-13
    assert not approximate["exact"] and approximate["kl"] > 1e-9


def test_rotated_gains_raise_the_gradient_ratio_of_new_blocks():
    """Claim C8, at initialisation: new blocks' gradients grow against the old ones'."""
    rotated, kept = card("srio", epsilon=0.5), card("srio", epsilon=0.5, norm="keep")
    for kind in ("attn", "ffn"):
        assert (
            rotated["gradient_rms_new_to_old"][kind] > 1.1 * kept["gradient_rms_new_to_old"][kind]
        )


def test_card_quantities_by_hand():
    """KL(old || new) and the RMS ratio, computed again without the card's code."""
    weights = {k: v.detach() for k, v in GPT(CFG, seed=1).double().named_parameters()}
    grown = grow(weights, CFG, 12, GrowConfig("nrio", std=0.5))
    x_bt = torch.randint(48, (2, 17), generator=torch.Generator().manual_seed(3))
    x_bt, y_bt = x_bt[:, :-1], x_bt[:, 1:]
    found = report_card(grown.plan, CFG, grown.weights, grown.cfg, x_bt, y_bt)
    small, large = (GPT(cfg, seed=None).double() for cfg in (CFG, grown.cfg))
    small.load_state_dict(weights)
    large.load_state_dict(grown.weights)
    p, q = small(x_bt).softmax(-1), large(x_bt).softmax(-1)
    forward, backward = (p * (p / q).log()).sum(-1).mean(), (q * (q / p).log()).sum(-1).mean()
    assert found["kl"] == pytest.approx(forward.item(), rel=1e-9)
    assert abs(forward - backward) / forward > 1e-3  # the direction matters
    large(x_bt, y_bt).backward()
    new, old = [], []
    for block in large.h:
        for linear, (o, i) in ((block.mlp.up, (32, 8)), (block.mlp.down, (8, 32))):
            mask = torch.zeros_like(linear.weight, dtype=torch.bool)
            mask[:o, :i] = True
            new += [linear.weight.grad[~mask], linear.bias.grad[o:]]
            old += [linear.weight.grad[mask], linear.bias.grad[:o]]
    ratio = torch.cat(new).square().mean().sqrt() / torch.cat(old).square().mean().sqrt()
    assert found["gradient_rms_new_to_old"]["ffn"] == pytest.approx(ratio.item(), rel=1e-9)


def test_float32_parents_are_judged_in_float64(tmp_path):
    weights = {k: v.detach() for k, v in GPT(CFG, seed=1).named_parameters()}
    meta = {"config": asdict(CFG), "lineage": []}
    checkpoint.save(tmp_path / "p", weights, meta)
    for operator, exact in (("pad", True), ("nrio", False)):
        record = grow_checkpoint(tmp_path / "p", tmp_path / operator, 12, GrowConfig(operator))
        assert record["report"]["exact"] is exact
        stored = checkpoint.load(tmp_path / operator).model
        assert {w.dtype for w in stored.values()} == {torch.float32}


def test_ages_of_any_history(tmp_path):
    weights = {k: v.detach() for k, v in GPT(CFG, seed=1).named_parameters()}
    entry = {"d_model": 8}
    checkpoint.save(tmp_path / "a", weights, {"config": asdict(CFG), "lineage": [entry, entry]})
    grow_checkpoint(tmp_path / "a", tmp_path / "b", 12, GrowConfig("mrio"))  # trained twice at 8
    m = grow_checkpoint(tmp_path / "b", tmp_path / "m", 16, GrowConfig("mrio"))  # never at 12
    s = grow_checkpoint(tmp_path / "b", tmp_path / "s", 16, GrowConfig("srio"))
    assert m["report"]["loss"][1] != s["report"]["loss"][1]


def test_copies_are_seen_as_copies():
    assert card("lossless", d_new=16)["duplicate_distance"] < 1e-7
    assert card("pad", d_new=16)["duplicate_distance"] > 0.1


def test_effective_rank_of_known_matrices():
    assert effective_rank(torch.eye(5, dtype=torch.float64)) == pytest.approx(5)
    rank_one = torch.outer(torch.arange(1.0, 4), torch.ones(4)).double()
    assert effective_rank(rank_one) == pytest.approx(1)


def test_duplicate_distance_by_hand():
    up = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    down = torch.zeros(2, 3)
    weights = {"h.0.mlp.up.weight": up, "h.0.mlp.down.weight": down}
    p = SimpleNamespace(specs=specs("gpt", weights))
    assert duplicate_distance(p, weights) == pytest.approx(0, abs=1e-7)
    weights["h.0.mlp.down.weight"] = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert duplicate_distance(p, weights) == pytest.approx((2 - 2**0.5) ** 0.5)
