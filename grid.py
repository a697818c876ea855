"""The ablation grid as data: variants, presets, and the runs they expand to.

Nothing here trains. A Run is plain data that cluster.execute.execute() carries out; two runs of one
seed and stage differ in nothing but their variant: same parent, same batches, same evaluation.
"""

import dataclasses
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from errors import UserError
from growth.apply import check_growth
from growth.operators import find as find_operator
from growth.optim import check_policy
from growth.plan import GrowConfig
from models.gpt import GPTConfig, count_parameters, flops_per_token
from training.config import TrainConfig, settled

GATE_FRACTION = 40 / 880  # the paper's 2 shards of 20 M tokens out of 44 M x 20
LAST_FRACTION = 20 / 880  # its training loss is the mean over the last shard


@dataclass(frozen=True)
class Variant:
    """One row of the comparison. grow None: trained from scratch at the new width."""

    line: str  # what it is
    source: str  # paper | note | comparison | ours
    grow: GrowConfig | None = None
    gate: bool = False
    # tokens: the stage's; flops: the parent's FLOPs are spent here too; paid: the stage's less what
    # a learned operator pays
    budget: str = "tokens"
    optimizer: str = "reset"
    continues: bool = False  # the parent trained on, not grown; flops: of the grown stage
    train: dict = field(default_factory=dict)  # its own training settings, as overrides name them


def grown(line: str, source: str, operator: str = "srio", *, gate=False, optimizer="reset",
          budget="tokens", train=None, **grow):  # fmt: skip
    cfg = GrowConfig(operator, **grow)
    return Variant(line, source, cfg, gate, budget, optimizer, train=train or {})


RECIPE = {"attn": "convex", "ffn": "tiled"}  # the paper's block policies
FAST = {"learn_lr": 1e-2}  # rates: EXPERIMENTS.md (srio-lo flat; mrio-lo as srio-lo, unswept)
SLOW = {"learn_lr": 1e-4}
ZERO = dict.fromkeys(("attn", "ffn", "embed"), "zero")
NEW_LR = {"new_lr": 2.0}
VARIANTS = {
    "scratch": Variant("wide model from scratch, the stage's tokens", "comparison"),
    "scratch-flops": Variant(
        "wide model from scratch, FLOPs of parent + stage", "comparison", budget="flops"
    ),
    "nrio": grown("no operator, random new blocks: do nothing", "paper", "nrio"),
    "nrio-paid": grown(
        "nrio on the steps that learned operators have left", "comparison", "nrio", budget="paid"
    ),
    "nrio-policies": grown("no operator, convex attention + tiled FFN", "paper", "nrio", **RECIPE),
    "srio": grown("closed-form rotation, random new blocks", "paper"),
    "full": grown("SRIO + convex attention + tiled FFN + gate", "paper", gate=True, **RECIPE),
    "full-nogate": grown("the full recipe without its gate", "paper", **RECIPE),
    "zero-pad": grown("new blocks zero; new units never learn", "comparison", "nrio", **ZERO),
    # the paper's further operators, blocks random as in nrio and srio
    "srio-lo": grown("SRIO, an angle per side learned for 100 steps", "paper", "srio-lo", **FAST),
    "srio-free": grown("SRIO, a free 2 x 2 matrix learned", "paper", "srio-free", learn_lr=3e-3),
    "mrio": grown("a rotation over all growth ages, closed form", "paper", "mrio"),
    "mrio-per-age": grown("MRIO, epsilon for every age", "paper", "mrio", age_epsilon="each"),
    "mrio-lo": grown("MRIO, its skew matrix learned for 100 steps", "paper", "mrio-lo", **FAST),
    "lrio": grown("dense operator per side, learned for 100 steps", "paper", "lrio", **SLOW),
    "lrio-orth": grown("LRIO kept orthogonal", "paper", "lrio-orth"),
    "ligo": grown("LiGO: all expansion maps learned, 100 steps", "paper", "ligo", learn_lr=3e-4),
    # claims C5, C6 and the two halves of SRIO
    "nrio-convex": grown("convex blocks everywhere", "paper", "nrio", attn="convex", ffn="convex"),
    "nrio-tiled": grown("tiled blocks everywhere", "paper", "nrio", attn="tiled", ffn="tiled"),
    "nrio-gate": grown("no operator, with the gate", "paper", "nrio", gate=True),
    "srio-gate": grown("SRIO with the gate", "paper", gate=True),
    "policies-gate": grown("the policies with the gate", "paper", "nrio", gate=True, **RECIPE),
    "lrio-gate": grown("LRIO with the gate", "paper", "lrio", gate=True, **SLOW),
    "srio-rotate-only": grown("SRIO on weights, gains and shifts kept", "ours", norm="keep"),
    "srio-gamma-only": grown(
        "gains and shifts rotated, weights not", "ours", rotate_weights=False
    ),
    "policies-rotate-only": grown(
        "policies + SRIO on weights, gains and shifts kept", "ours", norm="keep", **RECIPE
    ),
    "policies-gamma-only": grown(
        "policies + gains and shifts rotated, weights not", "ours", rotate_weights=False, **RECIPE
    ),
    # what may act in SRIO's place
    "gains": grown("new gains twice the old, nothing else", "ours", "gains", gain_ratio=2.0),
    "gains-policies": grown(
        "policies + new gains twice the old", "ours", "gains", gain_ratio=2.0, **RECIPE
    ),
    "nrio-new-lr": grown("new coordinates learn twice as fast", "ours", "nrio", train=NEW_LR),
    "policies-new-lr": grown(
        "policies, new coordinates learn twice as fast", "ours", "nrio", train=NEW_LR, **RECIPE
    ),
    # exact starts
    "lossless-pad": grown("operator pad: mean padding, exact at any ratio, free random blocks",
                          "ours", "pad"),
    "pad-gain": grown("mean padding, new gains 4 (free: they multiply 0)", "ours", "pad",
                      gamma_new=4.0),
    "pad-gain-policies": grown("the same, free blocks by the policies", "ours", "pad",
                               gamma_new=4.0, **RECIPE),
    "lossless": grown("every coordinate repeated", "note", "lossless"),
    "lossless-noise": grown("copies parted by noise that cancels", "ours", "lossless",
                            noise_db=20.0),
    "exact-srio": grown("the same function, writers rotated at epsilon 0", "ours", "exact-srio"),
    # other people's copies
    "net2net": grown("random index copy (Net2Net, bert2BERT-FPI)", "comparison", "net2net"),
    "aki": grown("bert2BERT-AKI: copies from the next layer too", "comparison", "aki"),
    "sparkling": grown(
        "RMS-keeping copy, new coordinates re-warmed alone", "comparison", "sparkling",
        optimizer="asymmetric",
    ),
    # what growing must beat at once: the parent itself
    "parent-continued": Variant(
        "the ungrown parent trained on, the stage's tokens", "comparison", continues=True
    ),
    "parent-continued-flops": Variant(
        "the same, the grown stage's FLOPs", "comparison", budget="flops", continues=True
    ),
    "szp": grown("shrink, zero-pad, fresh initialisation everywhere", "comparison", "szp"),
    # Adam's state at growth
    "nrio-transfer": grown("NRIO, Adam state carried over", "ours", "nrio", optimizer="transfer"),
    "srio-transfer": grown("SRIO, Adam state through the rotation", "ours", optimizer="transfer"),
    "srio-asymmetric": grown(
        "SRIO, old block keeps its Adam state, new one re-warms", "ours", optimizer="asymmetric"
    ),
    "policies-asymmetric": grown("policies, Adam's state so", "ours", "nrio",
                                 optimizer="asymmetric", **RECIPE),
    "full-asymmetric": grown("the full recipe, Adam's state so", "ours", gate=True,
                             optimizer="asymmetric", **RECIPE),
    "pad-gain-asymmetric": grown("pad-gain-policies, Adam's state so", "ours", "pad",
                                 gamma_new=4.0, optimizer="asymmetric", **RECIPE),
} | {
    f"srio-eps{epsilon:g}": grown(f"SRIO at epsilon {epsilon:g}", "paper", epsilon=epsilon)
    for epsilon in (-0.5, 0.0, 0.25, 0.75, 1.0, 1.25)
}  # fmt: skip
# the main table's: what the paper compares, and what keeps it honest
MAIN = ("scratch", "scratch-flops", "nrio", "nrio-paid", "nrio-policies", "zero-pad", "srio")
MAIN += ("mrio", "lrio", "ligo", "full-nogate", "full")
CHAIN = ("scratch", "scratch-flops", "nrio", "srio", "mrio", "lrio", "full")  # repeated growth
# against scale; what won at tiny, too
SIZES = ("scratch-flops", "nrio", "nrio-policies", "srio", "full", "pad-gain")
SIZES += ("policies-asymmetric", "full-asymmetric", "pad-gain-asymmetric")
RATIOS = (*SIZES, "szp", "lossless-pad", "net2net", "sparkling")  # against the growth factor
# judged on seeds of their own: the best by the tuning seeds (results/tuning.md), each beside what
# it is built on
HELDOUT = ("scratch-flops", "nrio", "nrio-policies", "policies-asymmetric", "full")
HELDOUT += ("full-asymmetric", "pad-gain-policies", "pad-gain-asymmetric")
# a pretrained parent: what a user would try, the parent itself beside it; its Adam state is not
# published, so nobody has it
PRETRAINED = ("parent-continued", "parent-continued-flops", "lossless-pad", "zero-pad", "nrio")
PRETRAINED += ("net2net", "sparkling@optimizer=reset", "srio", "srio@epsilon=0.9", "srio-eps1")
PRETRAINED += ("srio@lr=0.0003@norm=fold", "srio-rotate-only", "full", "ligo", "pad-gain")
# What is tuned, on seeds >= 100 that no claim uses (--only tuning --seeds 100-101): the learning
# rate of every family of variants at the same values, and what each has of its own at as many more.
# The values beside the variant's own, which `name` alone runs. analysis/tuning.py makes the table.
FAMILIES = ("scratch-flops", "nrio", "nrio-policies", "srio", "full", "gains-policies", "szp")
FAMILIES += ("pad-gain-policies", "policies-new-lr", "ligo", "lrio")
TUNING = (
    *((name, "lr", (0.002, 0.008)) for name in FAMILIES),
    *((name, "warmup", (0.0, 0.2)) for name in ("nrio", "full", "pad-gain-policies")),
    ("full", "epsilon", (0.25, 0.75, 1.25)),
    ("full", "dirichlet", (0.5, 5.0)),
    ("full", "cross", ("zero",)),
    ("full", "embed", ("convex", "zero")),
    *((name, "optimizer", ("asymmetric",)) for name in ("nrio", "nrio-policies")),
    *((name, "optimizer", ("transfer", "asymmetric")) for name in ("full", "pad-gain-policies")),
    ("nrio-policies", "dirichlet", (0.5, 5.0)),
    ("gains-policies", "gain_ratio", (1.5, 3.0, 4.0)),
    ("pad-gain", "gamma_new", (1.0, 2.0, 8.0, 16.0)),
    ("pad-gain-policies", "gamma_new", (1.0, 2.0, 8.0, 16.0)),
    ("policies-new-lr", "new_lr", (1.5, 3.0)),
    ("szp", "shrink", (0.2, 0.6, 0.8, 1.0)),
    ("ligo", "learn_lr", (1e-4, 1e-3)),
    ("lrio", "learn_lr", (3e-5, 3e-4)),
)
# of a pretrained parent: the learning rate of one variant per family, three values each
PRETRAINED_TUNING = tuple(
    (name, "lr", (3e-5, 3e-4)) for name in ("parent-continued", "lossless-pad")
)
PRETRAINED_TUNING += (("nrio", "lr", (3e-5, 3e-4)), ("srio", "lr", (3e-4, 1e-3)))


@dataclass(frozen=True)
class Preset:
    """One protocol. widths: the parent's, then one per growth stage."""

    line: str
    source: str
    tokenizer: str
    model: GPTConfig
    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    batch_size: int  # sequences per optimizer step
    lr: dict[str, float]  # by family: parent, scratch, grown
    tokens: tuple[int, ...] = ()  # per width; empty means `per_parameter`
    per_parameter: float = 20
    variants: tuple[str, ...] = MAIN
    gate_tokens: float = 0.0  # 0: the paper's share of the stage
    last_tokens: float = 0.0  # window of the training loss; 0: the paper's share of the stage
    learn_batch: int = 4  # sequences per step of a learned operator
    evals: int = 20
    eval_tokens: int = 16_384
    # training settings as overrides name them: of all runs, and by family over it
    train: dict = field(default_factory=dict)
    families: dict[str, dict] = field(default_factory=dict)
    tuning: tuple = TUNING  # (variant, setting, values beside its own) of --only tuning
    tuned: dict[str, str] = field(default_factory=dict)  # variant -> overrides, chosen by it
    gpu: bool = False  # not for a CPU
    parent: str = ""  # sha256 of a given parent (--parent), which no run trains
    needs_parent: bool = False  # makes no sense without one

    def config(self, stage: int) -> GPTConfig:
        return self.model if stage == 0 else self.model.widened(self.widths[stage])

    def steps(self, stage: int) -> int:
        size = count_parameters(self.config(stage))
        tokens = self.tokens[stage] if self.tokens else self.per_parameter * size
        return max(1, round(tokens / self.step_tokens))

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.model.block_size

    def flops(self, stage: int) -> int:
        """Training FLOPs of the first stages up to and with `stage`, operators not counted."""
        return sum(
            self.steps(k) * self.step_tokens * flops_per_token(self.config(k))
            for k in range(stage + 1)
        )


TINY = GPTConfig(vocab_size=2048, block_size=64, n_layer=4, n_head=4, head_dim=16, d_model=64)
MINI = GPTConfig(vocab_size=1024, block_size=64, n_layer=4, n_head=4, head_dim=12, d_model=48)
LR_SMALL = dict.fromkeys(("parent", "scratch", "grown"), 4e-3)  # swept on tiny: EXPERIMENTS.md
LR_PAPER = {"parent": 1e-3, "scratch": 1e-3, "grown": 1e-3}
SMOLLM2 = GPTConfig(  # SmolLM2-135M, trained at 2,048 tokens, here on windows of 256
    vocab_size=49152, n_layer=30, n_head=9, n_kv_head=3, d_model=576, d_ff=1536, norm="rmsnorm",
    bias=False, activation="swiglu", position="rope", rope_theta=1e5,
)  # fmt: skip
ON_CPU = {"micro_batch": 2, "save_every": 20, "dtype": "float32", "matmul": "highest"}
ON_CPU |= {"eval_at": (2, 5, 10)}  # where a loss after growth falls fastest
# from results/pretrained-lr: exact starts and the parent keep 1e-4 (pad and parent were swept),
# what starts within a nat of the parent (results/pretrained/gains-starts.md) has nrio's rate, what
# starts farther has srio's
PRETRAINED_TUNED = dict.fromkeys(("nrio", "net2net", "zero-pad", "ligo"), "lr=0.0003")
PRETRAINED_TUNED |= dict.fromkeys(("srio-eps1", "srio-rotate-only"), "lr=0.0003")
PRETRAINED_TUNED |= dict.fromkeys(("srio", "full", "sparkling"), "lr=0.001")
LR_PRETRAINED = {"parent": 1e-4, "scratch": 1e-4, "grown": 1e-4}
SMOKE = GPTConfig(vocab_size=257, block_size=32, n_layer=2, n_head=4, head_dim=4, d_model=16)
PRESETS = {
    "smoke": Preset(
        "seconds a run: shows that everything works here, says nothing about the methods",
        "speeches", "byte", SMOKE, (16, 24), (0, 1), 8, LR_SMALL,
        tokens=(20_480, 10_240), last_tokens=1_024, evals=4, eval_tokens=4_096, learn_batch=2,
    ),
    "smoke-chain": Preset(
        "the same for repeated growth: 16 -> 24 -> 32",
        "speeches", "byte", SMOKE, (16, 24, 32), (0, 1), 8, LR_SMALL,
        tokens=(20_480, 10_240, 10_240), last_tokens=1_024, evals=4, eval_tokens=4_096,
        learn_batch=2, variants=CHAIN,
    ),
    "tiny": Preset(
        "the paper's table in miniature, minutes on 2 CPU cores",
        "speeches", "bpe:2048", TINY, (64, 96), (0, 1), 16, LR_SMALL,
        tokens=(1_000_000, 400_000), last_tokens=40_960, evals=16,
    ),
    "mini": Preset(
        "20 tokens per parameter and 5 paired seeds, for claims on a CPU",
        "speeches", "bpe:1024", MINI, (48, 72), (0, 1, 2, 3, 4), 16, LR_SMALL,
        train={"compile": True},
    ),
    "mini-chain": Preset(
        "repeated growth on a CPU: 48 -> 72 -> 96",
        "speeches", "bpe:1024", MINI, (48, 72, 96), (0, 1, 2, 3, 4), 16, LR_SMALL, variants=CHAIN,
        train={"compile": True},
    ),
    "paper": Preset(
        "the paper's headline: 24 M -> 44 M on GPT-2 BPE, 20 tokens per parameter",
        "openwebtext", "gpt2", GPTConfig(), (256, 384), (0, 1, 2, 3, 4), 128, LR_PAPER,
        gate_tokens=40e6, last_tokens=20e6, learn_batch=64,
        evals=40, eval_tokens=1_048_576, train={"micro_batch": 64, "compile": True}, gpu=True,
    ),
    "paper-chain": Preset(
        "the paper's repeated growth: 24 M -> 44 M -> 70 M -> 101 M -> 119 M",
        "openwebtext", "gpt2", GPTConfig(), (256, 384, 512, 640, 704), (0, 1, 2, 3, 4), 128,
        LR_PAPER, variants=CHAIN,
        gate_tokens=40e6, last_tokens=20e6, learn_batch=64,
        evals=40, eval_tokens=1_048_576, train={"micro_batch": 64, "compile": True}, gpu=True,
    ),
    "pretrained": Preset(
        "a model you have, x1.33 (SmolLM2-135M: 135 M -> 227 M), 100 steps; hours on a CPU",
        "speeches", "gpt2", SMOLLM2, (576, 768), (0, 1, 2), 4, LR_PRETRAINED,
        tokens=(102_400, 102_400), last_tokens=10_240, learn_batch=1, evals=5, eval_tokens=8_192,
        variants=PRETRAINED, tuned=PRETRAINED_TUNED, needs_parent=True,
        train=ON_CPU | {"save_every": 50, "micro_batch": 1},  # a run fits in 6 GB
    ),
    "pretrained-short": Preset(
        "the first 40 steps of such a run, seven variants: what two slow cores can pay",
        "speeches", "gpt2", SMOLLM2, (576, 768), (0, 1, 2), 4, LR_PRETRAINED,
        tokens=(40_960, 40_960), last_tokens=4_096, learn_batch=1, evals=2, eval_tokens=4_096,
        variants=("parent-continued", "parent-continued-flops", "lossless-pad", "nrio", "srio",
                  "pad-gain", "full"),
        tuned=PRETRAINED_TUNED, needs_parent=True, train=ON_CPU,
    ),
    "pretrained-lr": Preset(
        "28 steps of such runs, for their learning rates (--only tuning, seed 100)",
        "speeches", "gpt2", SMOLLM2, (576, 768), (100,), 4, LR_PRETRAINED,
        tokens=(28_672, 28_672), last_tokens=4_096, learn_batch=1, evals=1, eval_tokens=4_096,
        variants=("parent-continued", "lossless-pad", "nrio", "srio"), tuning=PRETRAINED_TUNING,
        needs_parent=True, train=ON_CPU | {"eval_at": ()},
    ),
    "pretrained-x2": Preset(
        "a model you have, twice as wide, 2,000 steps of 65 k tokens, on a GPU",
        "openwebtext", "gpt2", replace(SMOLLM2, block_size=1024), (576, 1152), (0, 1, 2), 64,
        LR_PRETRAINED, tokens=(131_072_000, 131_072_000), last_tokens=6_553_600, learn_batch=64,
        evals=40, eval_tokens=262_144, variants=PRETRAINED, needs_parent=True,
        train={"micro_batch": 16, "compile": True}, gpu=True,
    ),
}  # fmt: skip
PRESETS["tiny-heldout"] = replace(
    PRESETS["tiny"], seeds=tuple(range(5, 11)), variants=HELDOUT,
    line="tiny on seeds that chose nothing: what the tuning seeds found best, judged",
)  # fmt: skip
PRESETS["tiny-bf16"] = replace(
    PRESETS["tiny"], seeds=tuple(range(5)), train={"dtype": "bfloat16"},
    variants=("scratch-flops", "nrio", "nrio-policies", "full"),
    line="tiny under bfloat16 autocast, parents too: does the dtype move a loss or a verdict?",
)  # fmt: skip
# Growth in the stable phase: the parent never decays, the child goes on at its rate without a
# second warm-up, and one decay ends the whole. The presets themselves keep the paper's reading:
# every stage a cosine to 10 % of its own.
STABLE = {"parent": {"schedule": "constant"}, "grown": {"warmup": 0.0}}
PRESETS |= {
    f"{name}-stable": replace(
        PRESETS[name], line=f"{name}, grown before any decay (WSD)", families=STABLE,
        train=PRESETS[name].train | {"schedule": "wsd"},
    )
    for name in ("tiny", "mini")
}  # fmt: skip
# How far: tiny's parent and tokens per parameter at other growth factors, the loss also 16 and 128
# steps after growth. How long: mini at other tokens per parameter.
PRESETS |= {
    f"tiny-x{factor:g}": replace(
        PRESETS["tiny"], line=f"tiny at growth factor {factor:g}", widths=(64, round(64 * factor)),
        tokens=(1_000_000, tokens), variants=variants,
        train=PRESETS["tiny"].train | {"eval_at": (16, 128)},
    )
    for factor, tokens, variants in (
        (1.25, 312_000, RATIOS), (1.5, 400_000, RATIOS),
        *((k, tokens, (*RATIOS, "lossless", "lossless-noise"))
          for k, tokens in ((2, 655_000), (3, 1_355_000), (4, 2_300_000))),
    )
}  # fmt: skip
PRESETS |= {
    f"mini-tpp{n}": replace(
        PRESETS["mini"], line=f"mini with {n} tokens per parameter", per_parameter=n,
        variants=(*SIZES, "szp"),
    )
    for n in (2, 5, 60)
}  # fmt: skip
# How large: the same growth by 1.5 (4 heads to 6) at one number of tokens per parameter.
PRESETS |= {
    f"ladder-{d}": replace(
        PRESETS["mini"], line=f"one step of the ladder of sizes: {d} -> {d * 3 // 2}",
        model=replace(MINI, d_model=d, head_dim=d // 4, d_ff=4 * d), widths=(d, d * 3 // 2),
        per_parameter=5, variants=SIZES,
    )
    for d in (32, 48, 64, 96, 128)
}  # fmt: skip


def tuning(preset: Preset) -> list[str]:
    """The variants of its sweeps: every name by itself, then with each value."""
    names = dict.fromkeys(name for name, _, _ in preset.tuning)
    swept = [f"{name}@{key}={canonical(v)}" for name, key, values in preset.tuning for v in values]
    return [*names, *swept]


@dataclass(frozen=True)
class Run:
    """One training run, as data. needs: the run whose final checkpoint it grows from, or None."""

    run_id: str
    variant: str
    seed: int
    stage: int
    needs: str | None
    d_model: int
    train: dict  # TrainConfig fields but for out, data and init
    grow: dict | None
    optimizer: str = "reset"
    continues: bool = False
    parent: str = ""  # sha256 of a given parent

    @property
    def tokens(self) -> int:
        return self.train["steps"] * self.train["batch_size"] * self.train["model"]["block_size"]

    @property
    def flops(self) -> int:
        """Training FLOPs of this stage; the parent's and the operator's are counted in its row."""
        return self.tokens * flops_per_token(GPTConfig(**self.train["model"]))

    @property
    def plan(self) -> dict:
        """What the grid decides; rows of one run_id with another plan are never mixed."""
        plan = {"train": self.train, "grow": self.grow, "optimizer": self.optimizer}
        return plan | ({"parent": self.parent} if self.parent else {})


def expand_grid(preset: str | Preset, variants: list[str], seeds: list[int]) -> list[Run]:
    """Every run of the grid, parents before children; `variants` may carry overrides
    ("srio@epsilon=0.25@lr=0.001")."""
    preset = find(PRESETS, preset, "preset") if isinstance(preset, str) else preset
    runs, parsed = [], {}
    for text in variants:
        found = parse_variant(text, preset.tuned)
        parsed[found[0]] = found
    for seed in seeds:
        started = any(variant.grow or variant.continues for _, variant, _ in parsed.values())
        if started and not preset.parent:
            runs.append(make_run(preset, "parent", Variant("", ""), {}, seed, 0))
        for name, variant, overrides in parsed.values():
            for stage in range(1, len(preset.widths)):
                runs.append(make_run(preset, name, variant, overrides, seed, stage))
    return runs


def with_parent(preset: Preset, model: GPTConfig, sha256: str, width: int = 0) -> Preset:
    """The preset with a given parent; width: of its child, else the preset's growth factors as near
    as whole heads (or groups of them) allow."""
    unit, factors = model.head_dim * (model.n_head // model.kv_heads), preset.widths[1:]
    near = [round(model.d_model * w / preset.widths[0] / unit) * unit for w in factors]
    return replace(preset, model=model, widths=(model.d_model, *([width] if width else near)),
                   parent=sha256)  # fmt: skip


def fitting(preset: str | Preset) -> list[str]:
    """Every variant that the preset's widths allow: some need a whole factor, or a range of
    epsilon."""

    def fits(name: str) -> bool:
        try:
            return bool(expand_grid(preset, [name], [0]))
        except UserError:
            return False

    return [name for name in VARIANTS if fits(name)]


def make_run(
    preset: Preset, name: str, variant: Variant, overrides: dict, seed: int, stage: int
) -> Run:
    cfg, steps = preset.config(stage), preset.steps(stage)
    if variant.continues:
        cfg, wide = preset.config(stage - 1), flops_per_token(cfg)
        steps = round(steps * wide / flops_per_token(cfg)) if variant.budget == "flops" else steps
    elif variant.budget == "flops":
        steps = round(preset.flops(stage) / (preset.step_tokens * flops_per_token(cfg)))
    grow, paid = None, 0
    if variant.grow:
        batch = {} if "learn_batch" in overrides else {"learn_batch": preset.learn_batch}
        epsilons = variant.grow.epsilons
        if len(epsilons) == len(preset.widths) - 1:  # those of the last stage: an older age each
            epsilons = epsilons[:stage]
        grow_cfg = replace(variant.grow, seed=seed, epsilons=epsilons, **batch)
        old, ages = preset.config(stage - 1), preset.widths[: stage - 1]
        check_growth(old, cfg.d_model, grow_cfg, ages)  # refuses what cannot be
        if variant.budget == "paid" or find_operator(grow_cfg.operator).learned:
            paid = learning_steps(grow_cfg, preset.batch_size, steps)
        grow = asdict(grow_cfg)
    starts = bool(variant.grow or variant.continues)  # from a parent
    family = "parent" if stage == 0 else "grown" if starts else "scratch"
    own = {key: value for key, value in overrides.items() if key in TRAIN_KEYS}
    own = preset.train | preset.families.get(family, {}) | variant.train | own
    train = {"model": cfg.as_dict()}
    train |= train_settings(preset, stage, seed, steps - paid, family, own)
    if paid:  # the last window is everybody's
        train["first_batch"] = paid
    if variant.gate:
        share = own.get("gate_share") or (
            preset.gate_tokens / (preset.steps(stage) * preset.step_tokens) or GATE_FRACTION
        )
        train["gate_steps"] = min(steps - paid, max(1, round(share * preset.steps(stage))))
    if variant.optimizer == "asymmetric":  # the old block goes on; only new coordinates re-warm
        train |= {"rewarm_steps": train["warmup_steps"], "warmup_steps": 0}
    if variant.gate or variant.optimizer == "asymmetric" or "new_lr" in train:
        train["d_old"] = preset.widths[stage - 1]
    suffix = f"-g{stage}" if len(preset.widths) > 2 and stage else ""
    run_id = f"{name}-s{seed}{suffix}"
    check_run(run_id, train, variant)
    needs = None
    if starts and not (stage == 1 and preset.parent):
        needs = f"parent-s{seed}" if stage == 1 else f"{name}-s{seed}-g{stage - 1}"
    more = (variant.optimizer, variant.continues, preset.parent if starts else "")
    return Run(run_id, name, seed, stage, needs, cfg.d_model, train, grow, *more)


def train_settings(
    preset: Preset, stage: int, seed: int, steps: int, family: str, own: dict
) -> dict:
    """TrainConfig fields of one run but its model: the preset's, then `own` over them. `warmup` is
    a share of the steps, and `gate_share` (of the stage's) is for the caller."""
    stage_tokens = preset.steps(stage) * preset.step_tokens
    fields = {key: value for key, value in own.items() if key not in ("warmup", "gate_share")}
    return {
        "steps": steps,
        "batch_size": preset.batch_size,
        "seed": seed,
        "data_seed": 1000 * seed + stage,  # every variant of a stage sees the same batches
        "lr": preset.lr[family],
        "warmup_steps": round(own["warmup"] * steps) if "warmup" in own else max(1, steps // 20),
        "eval_every": max(1, preset.steps(stage) // preset.evals),
        "eval_tokens": preset.eval_tokens,
        "save_every": max(1, steps // 10),
        "last_tokens": round(preset.last_tokens or LAST_FRACTION * stage_tokens),
        **fields,
    }


def learning_steps(cfg: GrowConfig, batch_size: int, steps: int) -> int:
    """Steps of the stage that a learned operator pays for with its own: equal tokens for all."""
    paid, rest = divmod(cfg.learn_steps * cfg.learn_batch, batch_size)
    if rest or paid >= steps:
        raise UserError(
            f"learn_steps x learn_batch = {cfg.learn_steps} x {cfg.learn_batch} sequences must be "
            f"a multiple of the batch of {batch_size}, below the stage's {steps * batch_size}"
        )
    return paid


def check_run(run_id: str, train: dict, variant: Variant) -> None:
    """What train() and the optimizer's transfer would refuse is refused before anything starts."""
    if len(run_id.encode()) > 150:
        raise UserError(f"run name {run_id!r} has more than 150 bytes; use fewer overrides")
    try:
        settled(TrainConfig(Path(), Path(), **train | {"model": GPTConfig(**train["model"])}))
        if variant.grow:
            check_policy(variant.optimizer, variant.grow)
    except UserError as error:
        raise UserError(f"{run_id}: {error}") from None


def find(table: dict, name: str, what: str):
    if name not in table:
        raise UserError(f"{what} {name!r} is unknown; choose one of {', '.join(table)}")
    return table[name]


def parse_names(text: str) -> list[str]:
    """ "srio, mrio@epsilons=0.1,0.2" -> its variants. No variant's name starts like a number: what
    does goes on with the values of the override before it."""
    parts = re.split(r",(?!\s*[-+.\d])", text)
    return [name for part in parts if (name := re.sub(r"\s*,\s*", ",", part).strip())]


def parse_variant(text: str, tuned: dict[str, str] | None = None) -> tuple[str, Variant, dict]:
    """ "name@key=value@..." -> its canonical form (keys in order, numbers as short as they can be:
    one run has one name), the variant with its growth settings changed, and the training settings
    to change. Keys are GrowConfig fields, TRAIN_KEYS, `gate` and `optimizer`. `tuned` holds what a
    preset chose for a name; what `text` says itself goes before it and alone is in the name."""
    name, *pairs = text.split("@")
    variant, train, given = find(VARIANTS, name, "variant"), {}, {}
    chosen = [pair for pair in (tuned or {}).get(name, "").split("@") if pair]
    for i, pair in enumerate([*chosen, *pairs]):
        key, sign, value = pair.partition("=")
        if key in given:
            raise UserError(f"override {key!r} is given twice in {text!r}; give it once")
        if not sign or not re.fullmatch(r"[\w.,+-]+", value):
            raise UserError(f"override {pair!r} in {text!r} must read key=value, e.g. lr=0.001")
        if key in ("gate", "optimizer"):
            value = convert(value, getattr(variant, key), text)
            variant = replace(variant, **{key: value})
        elif key in TRAIN_KEYS:
            value = train[key] = convert(value, TRAIN_KEYS[key], text)
        elif variant.grow and key in {f.name for f in dataclasses.fields(GrowConfig)} - {"seed"}:
            value = convert(value, getattr(variant.grow, key), text)
            train |= {key: value} if key == "learn_batch" else {}
            variant = replace(variant, grow=replace(variant.grow, **{key: value}))
        else:
            known = [f.name for f in dataclasses.fields(GrowConfig)] if variant.grow else []
            raise UserError(
                f"override key {key!r} in {text!r} is unknown; choose one of "
                f"{', '.join([*TRAIN_KEYS, 'gate', 'optimizer', *known])}"
            )
        if i >= len(chosen):
            given[key] = canonical(value)
    return "@".join([name, *(f"{key}={given[key]}" for key in sorted(given))]), variant, train


def canonical(value: object) -> str:
    """An override's value as run names show it: 0.250 is 0.25, 3e-05 is 0.00003, True is true."""
    if isinstance(value, tuple):
        return ",".join(map(canonical, value))
    if isinstance(value, float):
        return np.format_float_positional(value + 0.0, trim="-")  # + 0.0: -0 is 0
    return str(value).lower() if isinstance(value, bool) else str(value)


# TrainConfig fields, warmup (share of the steps), gate_share (of the stage), new_lr (grown only)
TRAIN_KEYS = dict.fromkeys(("lr", "weight_decay", "min_lr_ratio", "decay_fraction", "clip"), 0.0)
TRAIN_KEYS |= {"schedule": "", "beta2": 0.0, "warmup": 0.0, "gate_share": 0.0, "new_lr": 0.0}


def convert(value: str, like, text: str):
    """`value` as the type of `like`; a bool is true/false, a tuple comma-separated numbers."""
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False}[value.lower()]
        if like is None:  # the optional settings are all numbers
            return float(value)
        if isinstance(like, tuple):
            return tuple(float(v) for v in value.split(","))
        return type(like)(value)
    except (ValueError, KeyError):
        kind = type(like).__name__
        raise UserError(f"value {value!r} in {text!r} is no {kind}; e.g. {like!r}") from None


def parse_seeds(text: str, default: tuple[int, ...]) -> list[int]:
    """ "0-4" or "0,2,5" -> seeds, ascending and unique."""
    if not text:
        return list(default)
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        raise UserError(f"--seeds is {text!r}; write 0-4 or 0,1,2 (whole numbers >= 0)")
    seeds = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds |= set(range(int(first), int(last or first) + 1))
    if len(seeds) > 1000 or not seeds:
        raise UserError(
            f"--seeds {text!r} names {len(seeds)} seeds; between 1 and 1000 are allowed"
        )
    return sorted(seeds)
