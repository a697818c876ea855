"""Why a growth operator starts where it does on a given model: gains, outlier channels, ablations.

    python -m checks.gains PARENT --data CORPUS --width 768 --out results/pretrained

PARENT is what run_ablations.py --parent takes. Nothing is trained. Three tables of losses on
validation tokens, in nats per token:

1. right after growth, for every form of every operator, over growth seeds;
2. the same fills with gains and shifts rotated in part: old coordinates, new ones, the channels
   where the normalised stream is largest, all others;
3. norm by norm: its gains, its largest channel, and the loss when it alone is rotated.

With m the mean of the old gains and m' that of the new ones before turning (1, the policy's), R of
SRIO adds (cos theta - 1) m - sin theta sqrt(g/d_old) m' to every old gain and (cos theta - 1) m' +
sin theta sqrt(d_old/g) m to every new one (growth/rotation.py). The second term knows nothing of
the model: of gains of 1 it takes 15 % (epsilon 0.5, x1.33), of smaller ones it may take all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from errors import UserError, exit_on_user_error, read_command_line


@dataclass(frozen=True)
class Args:
    """Diagnose growth operators on one model, without training."""

    parent: tyro.conf.Positional[Path]  # a checkpoint of ours, or a Hugging Face folder
    data: Path  # a corpus with the model's tokenizer
    width: int  # of the grown model
    out: Path  # folder for gains.md
    tokens: int = 2048  # validation tokens of each loss
    context: int = 256  # tokens per sequence
    seeds: int = 3  # growth seeds of the first table
    threads: int = 1
    table: Literal["all", "starts", "parts", "norms"] = "all"  # one alone: gains-TABLE.md


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(Args, __doc__))

import torch
from tqdm import tqdm

from cluster.parent import read_parent
from data.shards import Corpus
from growth.apply import grow
from growth.plan import GrowConfig
from growth.rotation import givens, rotate, theta
from models.gpt import GPT, GPTConfig

TOP = 4  # channels called the largest
ZERO = dict.fromkeys(("attn", "ffn", "embed"), "zero")
FORMS = {
    "pad (exact)": GrowConfig("pad"),
    "zero-pad": GrowConfig("nrio", **ZERO),
    "nrio": GrowConfig("nrio"),
    "net2net": GrowConfig("net2net"),
    "sparkling": GrowConfig("sparkling"),
    "srio, epsilon 0.5": GrowConfig("srio"),
    "srio, epsilon 0.9": GrowConfig("srio", epsilon=0.9),
    "srio, epsilon 1 (no turn)": GrowConfig("srio", epsilon=1.0),
    "srio, gains kept": GrowConfig("srio", norm="keep"),
    "srio, gains folded into readers": GrowConfig("srio", norm="fold"),
    "srio, gains alone": GrowConfig("srio", rotate_weights=False),
    "full recipe (without gate)": GrowConfig("srio", attn="convex", ffn="tiled"),
    "full recipe, gains kept": GrowConfig("srio", attn="convex", ffn="tiled", norm="keep"),
}


def main() -> None:
    args = read_command_line(Args, __doc__)
    if min(args.tokens, args.context, args.seeds, args.threads) < 1:
        raise UserError("--tokens, --context, --seeds and --threads must be at least 1")
    torch.set_num_threads(args.threads)
    weights, cfg, entry = read_parent(args.parent, args.context)
    corpus = Corpus(args.data)
    batches = list(corpus.eval_batches(args.tokens, 1, cfg.block_size))
    if corpus.vocab_size > cfg.vocab_size:
        raise UserError(
            f"{args.data} has {corpus.vocab_size} token ids, the model {cfg.vocab_size}; prepare "
            f"the corpus with --tokenizer hf:{args.parent}"
        )
    study = Study(weights, cfg, args.width, batches)
    text = "\n".join(report(study, args, entry["source"])).rstrip() + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    name = "gains.md" if args.table == "all" else f"gains-{args.table}.md"
    (args.out / name).write_text(text)
    print(text)


@dataclass(frozen=True)
class Study:
    """One model, one new width, fixed validation batches."""

    weights: dict
    cfg: GPTConfig
    width: int
    batches: list

    def grow(self, settings: GrowConfig) -> tuple[dict, GPTConfig]:
        grown = grow(self.weights, self.cfg, self.width, settings)
        return grown.weights, grown.cfg

    @torch.no_grad()
    def loss(self, weights: dict, cfg: GPTConfig) -> float:
        model, total, n = load(weights, cfg), 0.0, 0
        for x_bt, y_bt in self.batches:
            total += model(x_bt, y_bt).item() * y_bt.numel()
            n += y_bt.numel()
        return total / n

    @torch.no_grad()
    def streams(self) -> dict[str, torch.Tensor]:
        """Norm name -> RMS over tokens of each channel of its normalised input, before the gain."""
        model, sums, n = load(self.weights, self.cfg), {}, 0

        def catch(name: str) -> Callable:
            def hook(module, args):
                x_nd = args[0].flatten(0, 1)
                if self.cfg.norm == "layernorm":
                    x_nd = x_nd - x_nd.mean(1, keepdim=True)
                unit = x_nd / x_nd.square().mean(1, keepdim=True).sqrt()
                sums[name] = sums.get(name, 0) + unit.square().sum(0)

            return hook

        for name in norms(self.weights):
            model.get_submodule(name).register_forward_pre_hook(catch(name))
        for x_bt, _ in self.batches:
            model(x_bt)
            n += x_bt.numel()
        return {name: (total / n).sqrt() for name, total in sums.items()}


def load(weights: dict, cfg: GPTConfig) -> GPT:
    model = GPT(cfg, seed=None)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def norms(weights: dict) -> list[str]:
    """Names of the norms, in order of depth."""
    names = [n.removesuffix(".weight") for n in weights if ".ln_" in f".{n}"]
    return [n for n in names if not n.endswith("bias")]


def report(study: Study, args: Args, source: dict) -> Iterator[str]:
    cfg = study.cfg
    yield f"# Gains and growth: {source['name']}, {cfg.d_model} -> {args.width}\n"
    yield (
        f"`python -m checks.gains` on {args.tokens:,} validation tokens of {args.data.name}, no "
        f"training; weights sha256 {source['sha256'][:16]}, licence {source['licence']}.\n"
    )
    tables = {
        "starts": ("Loss right after growth", lambda: starts(study, args.seeds)),
        "parts": ("Which part of the rotated gains does it", lambda: parts(study)),
        "norms": ("Norm by norm", lambda: each_norm(study)),
    }
    for name, (title, lines) in tables.items():
        if args.table in ("all", name):
            yield f"## {title}\n"
            yield from lines()
            yield ""


def starts(study: Study, seeds: int) -> Iterator[str]:
    yield "| start | mean | least | most |\n|---|--:|--:|--:|"
    parent = study.loss(study.weights, study.cfg)
    yield f"| parent, not grown | {parent:.4f} | | |"
    for name, settings in tqdm(FORMS.items(), desc="starts"):
        found = [study.loss(*study.grow(replace(settings, seed=seed))) for seed in range(seeds)]
        mean = sum(found) / seeds
        yield f"| {name} | {mean:.4f} | {min(found):.4f} | {max(found):.4f} |"


def parts(study: Study) -> Iterator[str]:
    """nrio's weights, SRIO's gains in some coordinates only."""
    plain, wide = study.grow(GrowConfig("nrio"))
    turned, _ = study.grow(GrowConfig("srio", rotate_weights=False))
    rms, d_old = study.streams(), study.cfg.d_model
    largest = {name: top(rms[name]) for name in rms}

    def mixed(choose: Callable[[str], torch.Tensor]) -> float:
        """Loss with the rotated gains where choose(norm) says so: (d_new,) booleans."""
        weights = dict(plain)
        for key in (f"{n}.{kind}" for n in rms for kind in ("weight", "bias")):
            if key in weights:
                pick = choose(key.rsplit(".", 1)[0])
                weights[key] = torch.where(pick, turned[key], plain[key])
        return study.loss(weights, wide)

    old = torch.arange(study.width) < d_old

    def at_largest(name: str) -> torch.Tensor:
        return torch.zeros(study.width, dtype=torch.bool).index_fill_(0, largest[name], True)

    srio, _ = study.grow(GrowConfig("srio"))
    yield "| gains rotated in | loss |\n|---|--:|"
    for what, choose in {
        "no coordinate (nrio)": lambda name: old & ~old,
        "new coordinates": lambda name: ~old,
        "old coordinates": lambda name: old,
        f"the {TOP} old channels of largest normalised stream, of each norm": at_largest,
        "all other old channels": lambda name: old & ~at_largest(name),
        "all coordinates": lambda name: old | ~old,
    }.items():
        yield f"| {what} | {mixed(choose):.4f} |"
    for name, weights in (("gains alone", plain), ("srio", srio)):
        for what, fill in (("the old ones' mean", torch.mean), ("0", lambda gain: 0.0)):
            loss = study.loss(weights | started_at(study, fill), wide)
            yield f"| all coordinates ({name}), new gains {what} before turning | {loss:.4f} |"


def started_at(study: Study, fill: Callable) -> dict:
    """Every norm's gains, turned by SRIO's R from [old gains, fill(old gains)]."""
    ages = study.cfg.d_model, study.width
    G, found = givens(theta(0.5, *ages)), {}
    for key in (f"{name}.weight" for name in norms(study.weights)):
        gain = study.weights[key]
        new = torch.full((study.width - len(gain),), float(fill(gain)))
        found[key] = rotate(torch.cat([gain, new]), 0, ages, G)
    return found


def top(rms_d: torch.Tensor) -> torch.Tensor:
    return rms_d.topk(min(TOP, len(rms_d))).indices


def each_norm(study: Study) -> Iterator[str]:
    """One row for each norm; `let through`: |shift| x RMS of the largest channel, over the RMS of
    all that the norm gives."""
    plain, wide = study.grow(GrowConfig("nrio"))
    turned, _ = study.grow(GrowConfig("srio", rotate_weights=False))
    base, rms = study.loss(plain, wide), study.streams()
    columns = ["norm", "mean gain", "std", "least", "most", "shift of old gains", "gain of new"]
    columns += ["largest channel's RMS", "its gain", "let through", "loss if rotated alone"]
    yield f"| {' | '.join(columns)} |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name in tqdm(rms, desc="norms"):
        key = f"{name}.weight"
        gain, new = study.weights[key], turned[key]
        shift = (new[: len(gain)] - gain).mean().item()
        i = rms[name].argmax()
        given = (gain * rms[name]).square().mean().sqrt().item()
        alone = {k: turned[k] for k in (key, f"{name}.bias") if k in plain}
        loss = study.loss(plain | alone, wide) - base
        cells = (gain.mean(), gain.std(), gain.min(), gain.max(), shift, new[len(gain) :].mean())
        cells = [f"{float(c):.3g}" for c in cells]
        through = abs(shift) * rms[name][i].item() / given
        cells += [f"{rms[name][i]:.2f}", f"{gain[i]:.3g}", f"{through:.3g}", f"{loss:+.4f}"]
        yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    exit_on_user_error(main)
