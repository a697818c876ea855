"""The twin test: what an exact method promises is checked on a small random model first.

Before any real weight is read, growth/folder.py's plan is carried out on a twin: a float64 model
from the same config, with the same switches and the same ratios of every space but few heads, few
neurons and as many layers as show every kind. An architecture switch that no table knows shows in
its logits, however large the real model is and whether or not it gets a card.
"""

import copy
import tempfile
from dataclasses import replace
from fractions import Fraction
from math import ceil, gcd, lcm
from pathlib import Path

import torch

from errors import UserError
from growth import folder as folders
from growth.report import worst
from models import hf_folder
from models.sizes import Sizes

VOCAB, UNITS, TRIES = 61, 24, 12  # of the twin; switches that are tried before giving up


def check(growth: "folders.Growth") -> float | None:
    """The twin's largest error over the spread of what it computes; None where nothing is promised.

    Raises UserError where the method promises exactness and the twin does not keep it, naming the
    switch of config.json if resetting one mends it.
    """
    limit = growth.twin_limit
    if limit is None:
        return None
    error = measured(growth, growth.source.config)
    if error <= limit:
        return error
    source, operator = growth.source, growth.plan.cfg.operator
    switch = culprit(growth, limit)
    raise UserError(
        f"{source.path}: method {operator} promises an exact result, but a small random model of "
        f"this config grown the same way is off by {error:.2g} of its outputs' spread"
        + (f"; config.json's {switch} is a switch that growth does not know" if switch else "")
        + "; use a method that promises nothing (nrio), or describe the switch in models/axes.py "
        "and models/hf.py"
    )


def culprit(growth: "folders.Growth", limit: float) -> str:
    """The first switch away from its default whose reset makes the twin exact; "" without one."""
    config = growth.source.config
    default = type(config)().to_dict()
    odd = [(k, v) for k, v in config.to_dict().items() if is_switch(v) and default.get(k) != v]
    for name, value in [pair for pair in odd if pair[0] in default][:TRIES]:
        other = copy.deepcopy(config)
        setattr(other, name, default[name])
        try:
            if measured(growth, other) <= limit:
                return f"{name} {value!r}"
        except UserError:
            continue  # a model that cannot be is no witness
    return ""


def is_switch(value: object) -> bool:
    return isinstance(value, (bool, str, float))


def measured(growth: "folders.Growth", config) -> float:
    """The error of the twin of a model with this config."""
    plan = growth.plan
    small, width, apart = shrunk(growth, config)
    with tempfile.TemporaryDirectory() as place:
        paths = Path(place) / "small", Path(place) / "wide"
        net = random_model(hf_folder.model_class(growth.source.raw, small), small, plan.tied)
        net.save_pretrained(paths[0])
        del net
        twin = folders.plan_folder(paths[0], width, plan.cfg, apart=apart)
        folders.write_folder(twin, paths[1])
        before, after = (folders.outputs(path, twin.source) for path in paths)
    return worst(twin.plan, before, after)["max_rel_dlogit"]


def random_model(cls: type, config, tied: bool) -> torch.nn.Module:
    """Every parameter far from its initial value, so that no error hides behind a zero bias or a
    unit gain; tables that are not trained (RoFormer's sines) stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            net = cls(config).double()
        except Exception as error:  # noqa: BLE001 - what a config may hold has no end
            raise UserError(
                f"no small {cls.__name__} can be built from its config ({error})"
            ) from None
        head = net.get_output_embeddings()
        if head is not None and not tied:  # T5's config says tied even where the tensors differ
            head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
        with torch.no_grad():
            for p in net.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn_like(p))
    return net


def shrunk(growth: "folders.Growth", config):
    """(a config of few heads, neurons and layers, its new width, what grows apart from that): every
    ratio is the plan's."""
    old, new, family = growth.plan.source.sizes, growth.plan.new, growth.source.family
    config, (n_head, kv_heads) = copy.deepcopy(config), few_heads(old, new)
    more = int(Fraction(new.n_head, old.n_head) * n_head)
    wider = Fraction(new.d_model, old.d_model)
    # both widths multiples of their heads, as some configs ask for
    base = wider.denominator * lcm(
        n_head // gcd(n_head, wider.denominator), more // gcd(more, wider.numerator)
    )
    d_model = base * ceil(UNITS / base) if old.own_head_dim else n_head * old.head_dim
    wanted = {
        "hidden_size": d_model,
        "num_attention_heads": n_head,
        family.kv: kv_heads,
        family.head_dim: old.head_dim,
        family.ffn: unit(old.d_ff, new.d_ff, UNITS),
        family.expert_ffn: unit(old.expert_ffn, new.expert_ffn, UNITS),
        family.also_width: d_model,
        "vocab_size": VOCAB,
    }
    for name, value in wanted.items():
        if name and getattr(config, name, None) is not None:
            setattr(config, name, value)
    for name, value in config.to_dict().items():
        if name.endswith("_token_id") and value is not None:
            setattr(config, name, value if isinstance(value, int) and 0 <= value < VOCAB else 0)
    cut_layers(config)
    apart = replace(growth.plan.apart, n_head=more if growth.plan.apart.n_head else 0)
    return config, int(wider * d_model), apart


def few_heads(old: Sizes, new: Sizes) -> tuple[int, int]:
    """(query heads, key heads) that grow by the same ratios, two at least of what there are more
    than one of; all of them where key heads stay and their groups grow."""
    if old.kv_heads == 1:
        return unit(old.n_head, new.n_head, 2), 1
    if new.n_head * old.kv_heads != old.n_head * new.kv_heads:
        return old.n_head, old.kv_heads
    kv_heads = unit(old.kv_heads, new.kv_heads, 2)
    return kv_heads * min(old.n_head // old.kv_heads, 2), kv_heads


def unit(old: int, new: int, least: int) -> int:
    """The smallest size >= least that new / old takes to a whole number; 0 where there is none."""
    if not old:
        return 0
    step = Fraction(new, old).denominator
    return step * ceil(least / step)


def cut_layers(config) -> None:
    """As many of the first layers as show every kind that a list in the config tells apart, two at
    least."""
    depth = config.num_hidden_layers
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == depth > 2}
    kinds = list(zip(*map(tuple, (map(str, v) for v in lists.values())), strict=True))
    seen = next((i for i in range(1, depth) if set(kinds[:i]) == set(kinds)), depth) if kinds else 2
    for name, value in lists.items():
        setattr(config, name, value[: max(2, seen)])
    config.num_hidden_layers = min(depth, max(2, seen))
    if getattr(config, "num_decoder_layers", None):
        config.num_decoder_layers = min(config.num_decoder_layers, 2)
