"""The growth report card: what one growth step did, measured on a fixed probe of tokens.

card() is the part that every model has: it asks the old and the new model for logits and looks at
the new weights. report_card() is our GPTs', with loss, gradients and rank, everything in float64
from weights grown in float64, so that "exact" can be read off the numbers: max |delta logit| of an
exact operator is round-off, ~1e-14 of the logits' spread. (The child is stored in its parent's
dtype, and rounds to that; learned operators learn in it.)
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch

from growth.gauge import gauge
from growth.operators import find
from growth.plan import Plan
from models.gpt import GPT, GPTConfig, count_parameters
from models.hf_folder import upcast

KINDS = {"embed": "embed", "head": "embed", "norm": "norm"}
KINDS |= dict.fromkeys(("q", "k", "v", "o"), "attn") | dict.fromkeys(("up", "gate", "down"), "ffn")
EXACT = 1e-10  # of the logits' spread, in float64
UNITS = 256  # FFN neurons of a layer that are compared with all of it


class NotExact(Exception):
    """What an exact method made is not what it promised."""


def card(
    plan: Plan,
    parameters: tuple[int, int],
    wide: Mapping[str, torch.Tensor],
    outputs: Callable[[], tuple[dict, dict]],
) -> dict:
    """JSON-able facts and measurements of one growth step. parameters: (old, new) counts; wide: the
    new tensors by name, read one at a time; outputs(): those of the old and the new model on the
    same tokens by name, "logits" or hidden states; none to compare nothing."""
    reasons = find(plan.cfg.operator).inexact(plan)
    found = {
        "operator": plan.cfg.operator,
        "gauge": gauge(plan),
        "d_model": [plan.d_old, plan.d_new],
        "n_head": list(plan.sizes["head"]),
        "head_dim": list(plan.head_dim),
        "d_ff": list(plan.sizes["ffn"]),
        "parameters": list(parameters),
        "contract": "approximate" if reasons else "exact",
        "approximate": reasons,
        "remarks": find(plan.cfg.operator).remarks(plan),
        "duplicate_distance": duplicate_distance(plan, wide),
    }
    return found | worst(plan, *outputs())


def compare(before: torch.Tensor, after: torch.Tensor) -> dict:
    """max |delta logit|, the same over the logits' standard deviation (absolute where that is 0),
    and KL(old || new) in nats per token."""
    before, after = before.double(), after.double()
    log_p, log_q = before.log_softmax(-1), after.log_softmax(-1)
    kl = max(0.0, (log_p.exp() * (log_p - log_q)).sum(-1).mean().item())
    return differences(before, after) | {"kl": kl}


def differences(before: torch.Tensor, after: torch.Tensor) -> dict:
    delta = (after - before).abs().max().item()
    spread = before.std(correction=0).item()
    return {"max_abs_dlogit": delta, "max_rel_dlogit": delta / (spread or 1.0)}


def compare_hidden(plan: Plan, before_btd: torch.Tensor, after_btd: torch.Tensor) -> dict:
    """The same of the last hidden states of a model without logits: the old coordinates among the
    new ones, divided by the factor that growth put on them all (least squares)."""
    places = find(plan.cfg.operator).old_places(plan)
    before, after = before_btd.double(), after_btd[..., places].double()
    factor = ((before * after).sum() / before.square().sum().clamp(min=1e-300)).item()
    return differences(before, after / (factor or 1.0)) | {"hidden_factor": factor}


def worst(plan: Plan, before: dict, after: dict) -> dict:
    """The largest of the differences between two models' outputs by name; {} without any."""
    found = [
        compare(old, after[name]) if "logits" in name else compare_hidden(plan, old, after[name])
        for name, old in before.items()
    ]
    return max(found, key=lambda each: each["max_rel_dlogit"], default={})


def duplicate_distance(
    plan: Plan, wide: Mapping[str, torch.Tensor], n: int = UNITS
) -> float | None:
    """The smallest distance between two FFN neurons of one layer, each the unit vector of its
    incoming and outgoing weights: 0 means two units are copies and will stay so (symmetry lock).
    Two units without any weight are copies too. In a layer of more than n units, the first n are
    compared with all. A layer: an encoder's or a decoder's, and of one expert; None without any.
    """
    layers: dict[str, list] = {}
    for name, spec in plan.specs.items():
        if spec.part in ("up", "gate", "down") and not spec.is_bias:
            expert = re.search(r"experts\.(\d+)\.", name)
            layer = name.partition(f".{spec.layer}.")[0], spec.layer, expert and expert[1]
            dim = next(i for i, space in enumerate(spec.axes) if space in ("ffn", "expert_ffn"))
            layers.setdefault(layer, []).append((name, dim))
    return min((closest(wide, parts, n) for parts in layers.values()), default=None)


def closest(wide: Mapping[str, torch.Tensor], parts: list[tuple[str, int]], n: int) -> float:
    """duplicate_distance of one layer; parts: (name, dimension of its neurons)."""
    found = [upcast(wide[name]).movedim(dim, 0) for name, dim in parts]  # (F, D) each
    squares = [torch.linalg.vector_norm(w, dim=1, dtype=torch.float64).square() for w in found]
    norm = sum(squares).sqrt()
    if (norm == 0).sum() > 1:
        return 0.0
    norm = norm.clamp(min=torch.finfo(torch.float32).tiny)
    cosine = sum((w[:n] / norm[:n, None].to(w.dtype)) @ w.T for w in found) / norm
    cosine.diagonal().fill_(-1.0)
    pair = list(divmod(int(cosine.argmax()), len(norm)))  # measured anew: float32 products would
    one, other = torch.cat([w[pair].double() for w in found], 1)  # show copies 3e-4 apart
    return torch.dist(one / norm[pair[0]], other / norm[pair[1]]).item()


# ---- our GPTs


def report_card(
    plan: Plan, old: GPTConfig, wide: dict, new: GPTConfig, x_bt: torch.Tensor, y_bt: torch.Tensor
) -> dict:
    """card(), and what training will meet; x, y (B, T) are the probe's tokens and targets."""
    small, large = load(plan.weights, old), load(wide, new)
    parameters = count_parameters(old), count_parameters(new)
    with torch.no_grad():
        outputs = lambda: ({"logits": small(x_bt)}, {"logits": large(x_bt)})  # noqa: E731
        found = card(plan, parameters, wide, outputs)
        losses = [model(x_bt, y_bt).item() for model in (small, large)]
    return found | {
        "probe_tokens": x_bt.numel(),
        "loss": losses,
        "spike": losses[1] - losses[0],
        "exact": found["max_rel_dlogit"] < EXACT,
        "gradient_rms_new_to_old": gradient_ratios(plan, large, x_bt, y_bt),
        "effective_rank": {
            "stream": effective_rank(stream(large, x_bt)),
            "stream_before": effective_rank(stream(small, x_bt)),
        },
    }


def load(weights, cfg: GPTConfig) -> GPT:
    model = GPT(cfg, seed=None)
    model.load_state_dict({name: w.double() for name, w in weights.items()}, assign=True)  # no copy
    return model.eval()


def gradient_ratios(plan: Plan, model: GPT, x_bt: torch.Tensor, y_bt: torch.Tensor) -> dict:
    """RMS gradient of the new entries over that of the old block (claim C8): pooled per kind
    (embed, norm, attn, ffn), and per block (h.0.attn, h.0.ffn, ...).

    Empty where old and new coordinates interleave and no block is old: wider heads, k-fold repeat.
    """
    if plan.cfg.heads == "wider" or not find(plan.cfg.operator).old_first:
        return {}
    sums = {}

    def add(name: str, p: torch.Tensor) -> None:
        """Called as soon as p's gradient is whole, and lets it go: not all fit in memory."""
        spec, grad, p.grad = plan.specs[name], p.grad, None
        old = tuple(slice(plan.size(a, n)[0]) for a, n in zip(spec.axes, p.shape, strict=True))
        inside, kind = grad[old].square().sum(), KINDS[spec.part]
        for key in (kind, f"h.{spec.layer}.{kind}") if kind in ("attn", "ffn") else (kind,):
            entry = sums.setdefault(key, [0.0, 0, 0.0, 0])
            entry[0] += (grad.square().sum() - inside).item()
            entry[1] += grad.numel() - grad[old].numel()
            entry[2] += inside.item()
            entry[3] += grad[old].numel()

    handles = [
        p.register_post_accumulate_grad_hook(partial(add, name))
        for name, p in model.named_parameters()
    ]
    model(x_bt, y_bt).backward()
    for handle in handles:
        handle.remove()
    return {
        kind: (max(new, 0.0) / n_new) ** 0.5 / (kept / n_kept) ** 0.5
        for kind, (new, n_new, kept, n_kept) in sums.items()
        if n_new and kept
    }


@torch.no_grad()
def stream(model: GPT, x_bt: torch.Tensor) -> torch.Tensor:
    """The residual stream before the last norm, (B T, D)."""
    caught = []
    hook = model.ln_f.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    model(x_bt)
    hook.remove()
    return caught[0].flatten(0, 1)


def effective_rank(a_nd: torch.Tensor) -> float:
    """exp(entropy of the normalised singular values) (Roy and Vetterli 2007), between 1 and D."""
    s = torch.linalg.svdvals(a_nd)
    p = s / s.sum().clamp(min=1e-300)
    return torch.exp(-(p * p.clamp(min=1e-300).log()).sum()).item()


# ---- printing


def print_card(card: dict) -> None:
    """The card as a few aligned lines for grow.py, whose probe is random tokens; what a model has
    not is left out."""
    kind = [card[key] for key in ("model_type", "operator") if key in card]
    verdict = card["contract"] if card.get("exact", True) else "approximate"
    print(f"{', '.join([*kind, *card.get('dtype', [])])}: {verdict}")
    for label, text in lines(card):
        print(f"  {label:<17} {text}")


def lines(card: dict) -> list[tuple[str, str]]:
    found = [(key, "{} -> {}".format(*card[key])) for key in ("d_model", "n_head", "head_dim")]
    found += [("d_ff", "{} -> {}".format(*card["d_ff"]))]
    found += [("parameters", "{:,} -> {:,}".format(*card["parameters"]))]
    if "loss" in card:
        text = "{:.4f} -> {:.4f} nats, on random tokens: no text".format(*card["loss"])
        found += [("probe loss", text)]
    if "hidden_factor" in card:
        found += [("hidden states", f"x {card['hidden_factor']:.4g}: their scale changes")]
        spread = f"({card['max_rel_dlogit']:.3g} of their std)"
        found += [("max |dhidden|", f"{card['max_abs_dlogit']:.3g} {spread}, rescaled")]
    elif "max_abs_dlogit" in card:
        spread = f"({card['max_rel_dlogit']:.3g} of their std)"
        found += [("max |dlogit|", f"{card['max_abs_dlogit']:.3g} {spread}")]
        found += [("KL(old || new)", f"{card['kl']:.3g} nats/token")]
    else:
        found += [("logits", "not compared (--no-card)")]
    if "twin_error" in card:
        found += [("twin", f"{card['twin_error']:.2g} off (a small random model, float64)")]
    if card["duplicate_distance"] is not None:
        text = f"{card['duplicate_distance']:.3g} (FFN units; 0: locked copies)"
        found += [("closest two", text)]
    ratios = card.get("gradient_rms_new_to_old", {}).items()
    if ratios:
        text = ", ".join(f"{kind} {ratio:.3g}" for kind, ratio in ratios if "." not in kind)
        found += [("gradient new:old", text)]
    if "effective_rank" in card:
        text = "{stream_before:.1f} -> {stream:.1f} (stream)".format(**card["effective_rank"])
        found += [("effective rank", text)]
    found += [("approximate", note) for note in card["approximate"]]
    found += [("remark", note) for note in card["remarks"]]
    found += [("wall time", f"{card['wall_s']:.2f} s")]
    if "bytes" in card:
        found += [("written", f"{card['bytes'] / 1e6:.0f} MB")]
        found += [("peak memory", f"{card['peak_rss_mb']:.0f} MB")]
    return found


def print_shapes(old: Mapping[str, torch.Size], new: Mapping[str, torch.Size]) -> None:
    """name, old shape, new shape, and the totals."""
    pad = max(len(name) for name in new)
    for name, shape in new.items():
        print(f"{name:<{pad}}  {tuple(old[name])!s:>16} -> {tuple(shape)}")
    counts = [sum(s.numel() for s in shapes.values()) for shapes in (old, new)]
    print(f"parameters {counts[0]:,} -> {counts[1]:,} (x{counts[1] / counts[0]:.2f})")
