"""The growth report card: what one growth step did, measured on a fixed probe of tokens.

Everything is computed in float64 from weights grown in float64, so that "exact" can be read off the
numbers: max |delta logit| of an exact operator is round-off, ~1e-14 of the logits' spread. (The
child is stored in its parent's dtype, and rounds to that; learned operators learn in it.)
"""

import torch
import torch.nn.functional as F

from growth.exact import EXACT
from growth.plan import Plan
from models.gpt import GPT, GPTConfig, count_parameters

KINDS = {"embed": "embed", "head": "embed", "norm": "norm"}
KINDS |= dict.fromkeys(("q", "k", "v", "o"), "attn") | dict.fromkeys(("up", "gate", "down"), "ffn")


def report_card(
    plan: Plan, old: GPTConfig, wide: dict, new: GPTConfig, x_bt: torch.Tensor, y_bt: torch.Tensor
) -> dict:
    """JSON-able measurements of one growth step; x, y (B, T) are the probe's tokens and targets."""
    small, large = load(plan.weights, old), load(wide, new)
    with torch.no_grad():
        before, after = small(x_bt), large(x_bt)
        loss_before, loss_after = (
            F.cross_entropy(z.flatten(0, 1), y_bt.flatten()).item() for z in (before, after)
        )
        log_p, log_q = before.log_softmax(-1), after.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
        delta, spread = (after - before).abs().max().item(), before.std().item()
    return {
        "operator": plan.cfg.operator,
        "d_model": [old.d_model, new.d_model],
        "parameters": [count_parameters(old), count_parameters(new)],
        "probe_tokens": x_bt.numel(),
        "loss": [loss_before, loss_after],
        "spike": loss_after - loss_before,
        "max_abs_dlogit": delta,
        "max_rel_dlogit": delta / spread,
        "kl": kl,
        "contract": contract(plan),
        "exact": delta / spread < 1e-10,
        "gradient_rms_new_to_old": gradient_ratios(plan, large, x_bt, y_bt),
        "duplicate_distance": duplicate_distance(wide, new.n_layer),
        "effective_rank": {
            "stream": effective_rank(stream(large, x_bt)),
            "stream_before": effective_rank(stream(small, x_bt)),
        },
    }


def contract(plan: Plan) -> str:
    """What the operator promises: exact, exact if ..., or approximate. `exact` is what was seen."""
    operator = plan.cfg.operator
    if operator in EXACT:
        return "exact"
    if operator in ("net2net", "sparkling"):
        return "exact if the factor is whole" + (", noise 0" if operator == "net2net" else "")
    if operator in ("srio", "mrio") and plan.arch.norm == "rmsnorm" and plan.cfg.norm == "fold":
        return "exact if the new blocks are silent"
    return "approximate"


def load(weights, cfg: GPTConfig) -> GPT:
    model = GPT(cfg, seed=None)
    model.load_state_dict({name: w.double() for name, w in weights.items()}, assign=True)  # no copy
    return model.eval()


def gradient_ratios(plan: Plan, model: GPT, x_bt: torch.Tensor, y_bt: torch.Tensor) -> dict:
    """RMS gradient of the new entries over that of the old block (claim C8): pooled per kind
    (embed, norm, attn, ffn), and per block (h.0.attn, h.0.ffn, ...).

    Empty where old and new coordinates interleave and no block is old: wider heads, k-fold repeat.
    """
    if plan.cfg.heads == "wider" or plan.cfg.operator == "lossless":
        return {}
    model.zero_grad()
    model(x_bt, y_bt).backward()
    sums = {}
    for name, p in model.named_parameters():
        spec, grad = plan.specs[name], p.grad
        old = tuple(slice(plan.size(a, n)[0]) for a, n in zip(spec.axes, p.shape, strict=True))
        inside, kind = grad[old].square().sum(), KINDS[spec.part]
        for key in (kind, f"h.{spec.layer}.{kind}") if kind in ("attn", "ffn") else (kind,):
            entry = sums.setdefault(key, [0.0, 0, 0.0, 0])
            entry[0] += (grad.square().sum() - inside).item()
            entry[1] += grad.numel() - grad[old].numel()
            entry[2] += inside.item()
            entry[3] += grad[old].numel()
    model.zero_grad()
    return {
        kind: (max(new, 0.0) / n_new) ** 0.5 / (kept / n_kept) ** 0.5
        for kind, (new, n_new, kept, n_kept) in sums.items()
        if n_new and kept
    }


def duplicate_distance(weights: dict, n_layer: int) -> float:
    """The smallest distance between two FFN neurons of one layer, each the unit vector of its
    incoming and outgoing weights: 0 means two units are copies and will stay so (symmetry lock).
    Two units without any weight are copies too."""
    smallest = float("inf")
    for i in range(n_layer):
        mlp = {k.removeprefix(f"h.{i}.mlp."): w for k, w in weights.items() if f"h.{i}.mlp" in k}
        parts = [mlp["up.weight"], mlp.get("gate.weight"), mlp["down.weight"].T]
        units = torch.cat([w for w in parts if w is not None], 1).double()
        units = F.normalize(units, dim=1)
        dead = units.square().sum(1) == 0
        gram = (units @ units.T).fill_diagonal_(-1.0)
        closest = 0.0 if dead.sum() > 1 else max(2 - 2 * gram.max().item(), 0.0) ** 0.5
        smallest = min(smallest, closest)
    return smallest


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
    p = s / s.sum()
    return torch.exp(-(p * p.clamp(min=1e-300).log()).sum()).item()


def print_card(card: dict) -> None:
    """The card as a few aligned lines for a terminal."""
    old, new = card["d_model"]
    ratios = card["gradient_rms_new_to_old"].items()
    ratios = ", ".join(f"{k} {v:.3g}" for k, v in ratios if "." not in k)
    verdict = "exact" if card["exact"] else "approximate"
    print(f"{card['operator']}: width {old} -> {new}, {verdict} (float64)")
    print(f"  contract          {card['contract']}")
    print("  parameters        {:,} -> {:,}".format(*card["parameters"]))
    print("  probe loss        {:.4f} -> {:.4f} nats".format(*card["loss"]))
    print(f"  max |dlogit|      {card['max_abs_dlogit']:.3g} ({card['max_rel_dlogit']:.3g} of std)")
    print(f"  KL(old || new)    {card['kl']:.3g} nats/token")
    print(f"  gradient new:old  {ratios}")
    rank = card["effective_rank"]
    print(f"  effective rank    {rank['stream_before']:.1f} -> {rank['stream']:.1f} (stream)")
    print(f"  closest two units {card['duplicate_distance']:.3g}")
    print(f"  wall time         {card['wall_s']:.2f} s")
