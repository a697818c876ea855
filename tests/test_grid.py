"""The grid as data: fairness of its runs, overrides, seeds, refusals."""

from dataclasses import replace

import pytest
import torch

from analysis.aggregate import variant_key
from errors import UserError
from grid import (
    MAIN,
    PRESETS,
    VARIANTS,
    expand_grid,
    fitting,
    parse_names,
    parse_seeds,
    parse_variant,
)
from growth.plan import GrowConfig
from models.gpt import GPTConfig, count_parameters, flops_per_token

# what a variant may change: its budget, its gate, its re-warm-up, the steps learning has paid
# for, its learning rate for new coordinates
THE_VARIANT = {"steps", "warmup_steps", "save_every", "gate_steps", "rewarm_steps", "d_old"}
THE_VARIANT |= {"first_batch", "new_lr"}


@pytest.mark.parametrize("preset", PRESETS)
def test_variants_of_a_seed_differ_in_nothing_but_the_variant(preset):
    names, expected = fitting(preset), {"lossless", "lossless-noise"}
    expected = {} if preset in ("tiny-x2", "pretrained-x2") else expected
    expected = {"srio-eps1.25"} if preset in ("tiny-x3", "tiny-x4") else expected
    model = PRESETS[preset].model
    if model.norm == "rmsnorm" and model.tied:
        expected = {*expected, "exact-srio"}
        with pytest.raises(UserError, match="no exact form for RMSNorm with a tied head"):
            expand_grid(preset, ["exact-srio"], [3])
    assert set(VARIANTS) - set(names) == set(expected)
    runs = expand_grid(preset, names, [3])
    chosen = "@".join(PRESETS[preset].tuned.values()).split("@")  # by equal sweeps, per family
    tuned = {pair.partition("=")[0] for pair in chosen}
    for stage in {run.stage for run in runs} - {0}:
        same_stage = [run for run in runs if run.stage == stage]
        for key in set().union(*(run.train for run in same_stage)) - THE_VARIANT - tuned:
            if key == "model":
                continue
            assert len({str(run.train[key]) for run in same_stage}) == 1, key
        if preset.endswith("-stable"):
            continue  # there grown runs have no warm-up, by name
        long = [run.train for run in same_stage if run.train["steps"] >= 15]  # else one step is all
        warmups = {train["warmup_steps"] / train["steps"] for train in long}
        assert max(warmups) - min(warmups - {0}) < 0.02 + 1 / 40  # one share of the steps
        if stage == 1:
            assert {r.needs for r in same_stage if r.grow} == {"parent-s3"}


@pytest.mark.parametrize("preset", PRESETS)
def test_learned_operators_pay_for_their_tokens(preset):
    stage_tokens = {r.stage: r.tokens for r in expand_grid(preset, ["nrio"], [0])}
    for run in expand_grid(preset, ["ligo", "lrio", "srio-lo"], [0]):
        if run.grow:
            learned = run.grow["learn_steps"] * run.grow["learn_batch"]
            block = run.train["model"]["block_size"]
            assert run.tokens + learned * block == stage_tokens[run.stage] and learned > 0
    with pytest.raises(UserError, match="multiple"):
        expand_grid(preset, ["ligo@learn_steps=101@learn_batch=1"], [0])


def test_learning_batches_are_no_stage_s_own(corpus_folder):
    from cluster.execute import learning_batches
    from data.shards import Corpus

    corpus, cfg = Corpus(corpus_folder), GrowConfig("ligo", learn_steps=1, learn_batch=2)
    run = expand_grid("mini-chain", ["ligo"], [1])[1]
    x_bt, y_bt = next(learning_batches(corpus, run, cfg, 16))
    assert x_bt.shape == y_bt.shape == (2, 16)
    for stage in range(4):
        assert not torch.equal(x_bt, corpus.batch_at(0, 1000 + stage, 2, 16)[0])


def test_stages_and_seeds_see_different_batches():
    runs = expand_grid("mini-chain", ["nrio"], [0, 1])
    orders = {(run.seed, run.stage): run.train["data_seed"] for run in runs}
    assert len(set(orders.values())) == len(orders) == 6


def test_scratch_flops_spends_what_parent_and_stage_spend():
    for preset in ("tiny", "paper"):
        runs = {run.variant: run for run in expand_grid(preset, ["scratch-flops", "nrio"], [0])}
        spent = runs["parent"].flops + runs["nrio"].flops
        assert runs["scratch-flops"].flops == pytest.approx(spent, rel=2e-3)
        assert runs["scratch-flops"].flops > 1.2 * runs["nrio"].flops  # no empty statement


def test_paper_protocol():
    """24 M -> 44 M -> 70 M -> 101 M -> 119 M, 20 tokens per parameter, context 256."""
    chain = PRESETS["paper-chain"]
    sizes = [count_parameters(chain.config(k)) / 1e6 for k in range(5)]
    assert [round(size) for size in sizes] == [24, 44, 70, 101, 119]
    for run in expand_grid("paper", ["full"], [0]):
        cfg = GPTConfig(**run.train["model"])
        assert run.tokens == pytest.approx(20 * count_parameters(cfg), rel=1e-3)
        assert (cfg.block_size, cfg.head_dim, cfg.vocab_size) == (256, 64, 50257)
    full = expand_grid("paper", ["full"], [0])[1]
    assert full.train["gate_steps"] / full.train["steps"] == pytest.approx(40 / 880, rel=1e-2)
    assert full.train["last_tokens"] == pytest.approx(20e6, rel=1e-2)


def test_main_table_has_the_eight_variants_and_the_papers_comparators():
    assert set(MAIN) == {
        *("scratch", "scratch-flops", "nrio", "nrio-policies", "srio", "full", "full-nogate"),
        *("zero-pad", "mrio", "lrio", "ligo", "nrio-paid"),
    }
    for name in ("tiny", "mini", "paper"):
        assert PRESETS[name].variants == MAIN
    for name in ("mini-chain", "paper-chain"):
        assert {"mrio", "lrio", "srio"} <= set(PRESETS[name].variants)


def test_full_is_the_papers_recipe():
    cfg = VARIANTS["full"].grow
    assert (cfg.operator, cfg.attn, cfg.ffn) == ("srio", "convex", "tiled")
    assert VARIANTS["full"].gate and not VARIANTS["full-nogate"].gate
    assert replace(VARIANTS["full"], line="", gate=False) == replace(
        VARIANTS["full-nogate"], line=""
    )


def test_overrides_change_what_they_name():
    run = expand_grid("tiny", ["srio@epsilon=0.25@lr=0.001@gate=true"], [0])[-1]
    assert run.grow["epsilon"] == 0.25 and run.train["lr"] == 0.001
    assert run.train["d_old"] == 64 and run.run_id == "srio@epsilon=0.25@gate=true@lr=0.001-s0"
    plain = expand_grid("tiny", ["srio"], [0])[-1]
    assert plain.grow["epsilon"] == 0.5 and "gate_steps" not in plain.train


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("srio@epsilon=0.250", "srio@epsilon=0.25"),
        ("srio@lr=1e-3@epsilon=.25", "srio@epsilon=0.25@lr=0.001"),
        ("ligo@learn_lr=3e-05", "ligo@learn_lr=0.00003"),
        ("srio@epsilon=-0.0", "srio@epsilon=0"),
        ("srio@gate=True@clip=1.0", "srio@clip=1@gate=true"),
        ("mrio@epsilons=0.50", "mrio@epsilons=0.5"),
        ("ligo@learn_steps=0100", "ligo@learn_steps=100"),
        ("srio@attn=convex", "srio@attn=convex"),
    ],
)
def test_one_run_has_one_name(written, name):
    runs = [run for run in expand_grid("tiny", [written, name], [0]) if run.stage == 1]
    assert [run.run_id for run in runs] == [f"{name}-s0"] and runs[0].variant == name
    assert replace(runs[0], run_id="", variant="") == replace(
        expand_grid("tiny", [name], [0])[-1], run_id="", variant=""
    )


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("srio", ["srio"]),
        (" srio, full ,nrio,", ["srio", "full", "nrio"]),
        ("mrio@epsilons=0.1,0.2", ["mrio@epsilons=0.1,0.2"]),
        ("mrio@epsilons=0.1, -.5 ,1e-3, srio", ["mrio@epsilons=0.1,-.5,1e-3", "srio"]),
        ("mrio@epsilons=1,2@lr=0.1,szp", ["mrio@epsilons=1,2@lr=0.1", "szp"]),
        (" , ", []),
    ],
)
def test_a_comma_before_a_number_parts_no_names(written, names):
    assert parse_names(written) == names
    assert not any(name[0] in "+-.0123456789" for name in VARIANTS)


def test_an_override_of_several_numbers_is_one_run_per_stage():
    """A chain's first growth has one older age, its second two."""
    runs = expand_grid("mini-chain", parse_names("mrio@epsilons=0.10, 1,nrio"), [0])
    names = ["parent-s0", *(f"{name}-s0-g{stage}" for name in ("mrio@epsilons=0.1,1", "nrio")
                            for stage in (1, 2))]  # fmt: skip
    assert [run.run_id for run in runs] == names
    assert [run.grow["epsilons"] for run in runs[1:]] == [(0.1,), (0.1, 1.0), (), ()]
    for few in ("0.1", "0.1,0.2,0.3"):
        with pytest.raises(UserError, match="epsilons has . values but"):
            expand_grid("mini-chain", [f"mrio@epsilons={few}"], [0])


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("nope", "nope"),
        ("srio@lr=0.001@lr=0.002", "'lr' is given twice"),
        ("srio@epsilon=0.5@lr=0.001@epsilon=0.5", "'epsilon' is given twice"),
        ("srio@epsilon", "epsilon"),
        ("srio@epsilon=abc", "abc"),
        ("srio@what=1", "what"),
        ("scratch@epsilon=1", "epsilon"),
        ("srio@lr=../../x", "lr=../../x"),
        ("srio@gate=maybe", "maybe"),
        ("srio@attn=wrong", "wrong"),
    ],
)
def test_bad_variants_are_refused_by_name(variant, named):
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        expand_grid("tiny", [variant], [0])


def test_seeds():
    assert parse_seeds("0-4", ()) == [0, 1, 2, 3, 4]
    assert parse_seeds("3,1,1-2", ()) == [1, 2, 3]
    assert parse_seeds("", (7,)) == [7]
    for bad in ("a", "-1", "4-0", "0-5000", "1,,2", "1.5"):
        with pytest.raises(UserError):
            parse_seeds(bad, (0,))


def test_flops_by_hand():
    """d 256, L 14, F 1024, V 50257, T 256: 12 d^2 per layer, the head, and 4 T d per layer."""
    cfg = GPTConfig()
    weights = 14 * 12 * 256**2 + 50257 * 256
    forward = 2 * weights + 14 * 4 * 256 * 256
    assert flops_per_token(cfg) == 3 * forward == 154_265_088
    assert 23.9e6 < count_parameters(cfg) < 24.1e6


def test_mrio_refuses_what_an_older_age_cannot_do():
    """72 -> 96 after 48 -> 72: the age of width 24 bounds epsilon by sqrt(1 + 24/24)."""
    expand_grid("mini-chain", ["mrio-per-age@epsilon=1.4"], [0])
    with pytest.raises(UserError, match="epsilon is 1.5"):
        expand_grid("mini-chain", ["mrio-per-age@epsilon=1.5"], [0])
    expand_grid("mini-chain", ["mrio@epsilon=1.5"], [0])  # its two turns together reach that
    with pytest.raises(UserError, match="epsilon is 1.75"):  # the first growth: at most 1.732
        expand_grid("mini-chain", ["mrio@epsilon=1.75"], [0])
    with pytest.raises(UserError, match="2 values"):
        expand_grid("tiny", ["mrio@epsilons=0.1,0.2"], [0])


def test_tables_have_the_order_of_the_grid():
    names = ["unknown", *reversed(VARIANTS), "parent", "nrio@lr=0.001"]
    known = list(VARIANTS)
    known.insert(known.index("nrio") + 1, "nrio@lr=0.001")
    assert sorted(names, key=variant_key) == ["parent", *known, "unknown"]


def test_what_paid_for_learning_ends_on_everybodys_batches():
    """The last window is the same text for all: step i of a learned variant is batch i + paid."""
    names = ["nrio", "nrio-paid", "ligo", "lrio", "srio-lo"]
    runs = {run.variant: run for run in expand_grid("tiny", names, [0])}
    for name in names[1:]:
        train = runs[name].train
        assert train["first_batch"] == 25
        assert train["first_batch"] + train["steps"] == runs["nrio"].train["steps"]
    assert "first_batch" not in runs["nrio"].train
    assert runs["nrio-paid"].grow == runs["nrio"].grow


def test_growth_in_the_stable_phase():
    runs = {r.variant: r.train for r in expand_grid("tiny-stable", ["scratch", "nrio"], [0])}
    assert runs["parent"]["schedule"] == "constant" and runs["parent"]["warmup_steps"] > 0
    assert runs["nrio"]["schedule"] == "wsd" and runs["nrio"]["warmup_steps"] == 0
    assert runs["scratch"]["schedule"] == "wsd" and runs["scratch"]["warmup_steps"] > 0


def test_restart_overrides():
    names = ["full@warmup=0.2@gate_share=0.3", "full@warmup=0", "nrio-new-lr@new_lr=3"]
    long, none, fast = (run.train for run in expand_grid("tiny", names, [0])[1:])
    assert long["warmup_steps"] == 78 and long["gate_steps"] == 117
    assert none["warmup_steps"] == 0 and fast["new_lr"] == 3 and fast["d_old"] == 64
    assert not {"warmup", "gate_share"} & set(long)


def test_tuned_settings_give_way_to_the_ones_named():
    tuned = {"srio": "epsilon=0.75@lr=0.002"}
    name, variant, train = parse_variant("srio", tuned)
    assert variant.grow.epsilon == 0.75 and train == {"lr": 0.002}
    name, variant, train = parse_variant("srio@lr=0.0080", tuned)
    assert variant.grow.epsilon == 0.75 and train == {"lr": 0.008}
    assert name == "srio@lr=0.008" and parse_variant("nrio", tuned)[2] == {}


def test_ladder_keeps_heads_ratio_and_tokens_per_parameter():
    for name, preset in PRESETS.items():
        if name.startswith("ladder-"):
            old, new = preset.config(0), preset.config(1)
            assert (old.n_head, new.n_head, new.d_model * 2) == (4, 6, old.d_model * 3)
            tokens = preset.steps(1) * preset.step_tokens / count_parameters(new)
            assert tokens == pytest.approx(5, rel=5e-3)
