"""Grow a checkpoint in width: one of ours, or a Hugging Face folder.

    python grow.py SRC --out DST --factor 2                    # exact, every coordinate repeated
    python grow.py SRC --out DST --width 1152 --method pad     # exact at any ratio
    python grow.py SRC --out DST --factor 2 --dry-run          # shapes and parameter counts only

SRC is a folder: state.json (ours), or config.json with safetensors (GPT-2, BERT, RoFormer, T5, mT5,
Llama, Mistral, Qwen2, GPT-NeoX, OPT). DST loads as SRC did (AutoModel*.from_pretrained, or our
train.py) and holds the report card: what changed in the logits, and what, if anything, is
approximate.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import checkpoint
from errors import UserError, exit_on_user_error, read_command_line
from growth.apply import LEARNED, plan_gpt, wide_config
from growth.child import grow_checkpoint
from growth.exact import exact_config, new_head_dim
from growth.folder import Growth, grow_folder, plan_folder
from growth.plan import GrowConfig
from growth.report import print_card
from models import hf, hf_folder
from models.gpt import GPT, count_parameters

MAX_WIDTH = 1_000_000  # far beyond any model


@dataclass(frozen=True)
class GrowArgs:
    """What to grow, by how much, and how."""

    src: tyro.conf.Positional[Path]
    out: Path
    factor: float = 0.0  # new width / old width; or give --width
    width: int = 0
    method: str = "auto"  # auto: lossless at whole factors, else pad; or another operator
    heads: str = "more"  # more heads of the old size, or wider heads: more | wider
    noise: float | None = None  # lossless: SNR in dB of exact noise that parts the copies
    rope: str = "repeat"  # lossless wider heads: repeat | recompute (the note's, approximate)
    gauge: str = "auto"  # scale of the wide stream: auto | norm | eps (growth/gauge.py)
    epsilon: float = 0.5  # srio: gain of the new input block
    attn: str = "random"  # what fills free attention blocks: random | zero | convex | tiled
    ffn: str = "random"
    embed: str = "random"
    seed: int = 0  # of every random fill
    dtype: str = ""  # float32 | float64 | bfloat16 | float16; empty keeps the source's
    shard_gb: float = 2.0  # largest weights file
    card: bool = True  # compare logits before and after, as a user would load them
    force: bool = False  # replace DST
    dry_run: bool = False
    allow_pickle: bool = False  # read pytorch_model.bin (with weights_only)


def main() -> None:
    args = read_command_line(GrowArgs, __doc__)
    check_places(args)
    if (args.src / "state.json").is_file():
        grow_ours(args)
    else:
        grow_hugging_face(args)


def check_places(args: GrowArgs) -> None:
    """Nothing is read before the source is a folder and the destination is free."""
    if not args.src.is_dir():
        raise UserError(f"{args.src} is no folder; SRC is a checkpoint or a Hugging Face folder")
    if (args.src / "final" / "state.json").is_file():
        raise UserError(
            f"{args.src} is a run folder; give one of its checkpoints: {args.src}/final"
        )
    if (args.factor > 0) == (args.width > 0):
        raise UserError(
            f"factor {args.factor:g} and width {args.width}: give exactly one of --factor F > 1 "
            f"and --width N"
        )
    if not (args.factor < math.inf and args.width <= MAX_WIDTH):
        raise UserError(
            f"factor {args.factor:g}, width {args.width}: the new width must be at most {MAX_WIDTH}"
        )
    if not 0 < args.shard_gb < math.inf:
        raise UserError(f"--shard-gb is {args.shard_gb}; it must be a finite number above 0")
    src, out = args.src.resolve(), args.out.resolve()
    if out == src or src in out.parents or out in src.parents:
        raise UserError(f"--out {args.out} overlaps the source {args.src}; choose another folder")
    if args.out.exists() and not (args.force or args.dry_run):
        raise UserError(f"{args.out} exists; choose another place or pass --force to replace it")


def new_width(args: GrowArgs, d_old: int) -> int:
    if args.width:
        return args.width
    width = d_old * args.factor
    if width > MAX_WIDTH:
        raise UserError(f"factor {args.factor:g} gives width {width:g}, more than {MAX_WIDTH}")
    if not (width == round(width) and width > d_old):
        low = max(int(width), d_old + 1)
        raise UserError(
            f"factor {args.factor:g} gives width {width:g}; it must be a whole number above "
            f"{d_old}: try --width {low} or --width {low + 1}"
        )
    return round(width)


def settings(args: GrowArgs, d_old: int, d_new: int) -> GrowConfig:
    """The growth settings; `auto` repeats where the factor is whole and pads elsewhere."""
    auto = "pad" if d_new % d_old else "lossless"
    method = auto if args.method == "auto" else args.method
    if args.noise is not None and method != "lossless":
        raise UserError(f"--noise parts the copies that method lossless makes; {method} makes none")
    return GrowConfig(
        operator=method,
        attn=args.attn,
        ffn=args.ffn,
        embed=args.embed,
        epsilon=args.epsilon,
        heads=args.heads,
        gauge=args.gauge,
        rope=args.rope,
        noise_db=args.noise,
        seed=args.seed,
    )


def check_room(out: Path, parameters: int) -> None:
    """The new weights fit on the disk, at 2 bytes a parameter at least."""
    place = next(path for path in out.resolve().parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if 2 * parameters > free:
        raise UserError(
            f"{out}: {parameters:,} parameters need {2e-9 * parameters:,.0f} GB at least, "
            f"{free / 1e9:,.0f} GB are free; choose a smaller width or another disk"
        )


# ---- Hugging Face folders


def grow_hugging_face(args: GrowArgs) -> None:
    quiet_transformers()
    raw = hf_folder.read_config(args.src)
    family = hf.family_of(raw.get("model_type"))
    d_old = hf.sizes_of(hf_folder.transformers_config(args.src), family).d_model
    d_new = new_width(args, d_old)
    cfg = settings(args, d_old, d_new)
    growth = plan_folder(args.src, d_new, cfg, args.dtype, args.allow_pickle)
    if args.dry_run:
        old = growth.source.stored.shapes
        print_shapes(old, growth.shapes)
        print_notes(growth)
        return
    check_room(args.out, sum(s.numel() for s in growth.shapes.values()))
    report = grow_folder(growth, args.out, args.force, args.shard_gb, args.card)
    print_report(report)
    print(f"wrote {args.out}")


def quiet_transformers() -> None:
    """Its progress bars and advice would bury ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def print_shapes(old: dict, new: dict) -> None:
    """name, old shape, new shape, and the totals."""
    pad = max(len(name) for name in new)
    for name, shape in new.items():
        print(f"{name:<{pad}}  {tuple(old[name])!s:>16} -> {tuple(shape)}")
    counts = [sum(s.numel() for s in shapes.values()) for shapes in (old, new)]
    print(f"parameters {counts[0]:,} -> {counts[1]:,} (x{counts[1] / counts[0]:.2f})")


def print_notes(growth: Growth) -> None:
    for note in growth.notes:
        print(f"approximate: {note}")


def print_report(report: dict) -> None:
    """The report card as a few aligned lines."""
    settings = report["settings"]
    print(f"{report['model_type']}, {settings['operator']}, {'/'.join(report['dtype'])}")
    for key in ("d_model", "n_head", "head_dim", "d_ff"):
        print("  {:<12} {} -> {}".format(key, *report[key]))
    print("  {:<12} {:,} -> {:,}".format("parameters", *report["parameters"]))
    if "max_abs_dlogit" in report:
        relative = report["max_rel_dlogit"]
        print(f"  max |dlogit| {report['max_abs_dlogit']:.3g} ({relative:.3g} of their std)")
        print(f"  KL(old||new) {report['kl']:.3g} nats/token")
    else:
        print("  logits       not compared (no output head, or --no-card)")
    print(f"  closest two  {report['closest_two_units']:.3g} (FFN units; 0: locked copies)")
    for note in report["approximate"]:
        print(f"  approximate  {note}")
    size, seconds = report["bytes"] / 1e6, report["grow_seconds"]
    print(
        f"  written      {size:.0f} MB in {seconds:.1f} s ({report['wall_seconds']:.1f} s in all)"
    )
    print(f"  peak memory  {report['peak_rss_mb']:.0f} MB")


# ---- our checkpoints


def grow_ours(args: GrowArgs) -> None:
    if args.dtype:
        raise UserError("--dtype is for Hugging Face folders; our checkpoints keep theirs")
    if args.method in LEARNED:
        raise UserError(f"method {args.method!r} is learned and needs data; use run_ablations.py")
    ckpt = checkpoint.load(args.src)
    old = checkpoint.model_config(ckpt)
    d_new = new_width(args, old.d_model)
    cfg = settings(args, old.d_model, d_new)
    if args.dry_run:
        new = old.widened(d_new, new_head_dim(cfg, old.head_dim, old.d_model, d_new))
        new = exact_config(plan_gpt(ckpt.model, old, new, cfg), old, new)
        with torch.device("meta"):
            wide = {name: p.shape for name, p in GPT(new, seed=None).named_parameters()}
        print_shapes({name: t.shape for name, t in ckpt.model.items()}, wide)
        assert count_parameters(new) == sum(shape.numel() for shape in wide.values())
        return
    new = wide_config(old, d_new, cfg)
    check_room(args.out, count_parameters(new))
    print_card(grow_checkpoint(args.src, args.out, d_new, cfg, force=args.force)["report"])
    print(f"wrote {args.out}")


if __name__ == "__main__":
    exit_on_user_error(main)
