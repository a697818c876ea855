"""Grow a checkpoint in width: one of ours, or a Hugging Face folder.

    python grow.py SRC --out DST --factor 2                    # exact, every coordinate repeated
    python grow.py SRC --out DST --width 1152 --method pad     # exact at any ratio
    python grow.py SRC --out DST --ffn-factor 2                # only the FFN; --heads N: only heads
    python grow.py SRC --out DST --factor 2 --dry-run          # shapes and parameter counts only

SRC is a folder: state.json (ours), or config.json with safetensors (GPT-2, Llama, Mistral, Qwen,
Gemma, Phi, OPT, BERT, T5 and their kin; README has the list). DST loads as SRC did
(AutoModel*.from_pretrained, or our train.py) and holds the report card: what changed in the logits,
and what, if anything, is approximate.
"""

import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

import files
from errors import UserError, exit_on_user_error, read_command_line
from growth.config import GrowConfig
from models.sizes import MAX_WIDTH, Apart, Sizes, check_wider
from settings import Above, Range

Hidden = tyro.conf.Suppress  # settings of learned operators, which need data: run_ablations.py


@dataclass(frozen=True, kw_only=True)
class GrowArgs(GrowConfig):
    """What to grow, by how much, and how."""

    src: tyro.conf.Positional[Path]
    out: Path
    factor: Annotated[float, Range(0)] = 0.0  # new width / old width; or give --width
    width: Annotated[int, Range(0, MAX_WIDTH)] = 0
    # more heads of the old size, or wider heads: more | wider; or their number, apart from the
    # width (lossless, pad)
    heads: str = "more"
    # new FFN neurons / old, apart from the width (lossless, pad)
    ffn_factor: Annotated[float, Range(0)] = 0.0
    # auto: lossless at whole factors, else pad (the grid's variant lossless-pad); or nrio, srio,
    # mrio, exact-srio, net2net, aki, sparkling, gains, szp, ligo-init (not learned)
    operator: Annotated[str, tyro.conf.arg(name="method")] = "auto"
    # lossless: SNR in dB of exact noise that parts the copies
    noise_db: Annotated[float | None, tyro.conf.arg(name="noise")] = None
    # net2net, aki: RMS of the noise on copies, relative to the tensor's
    noise: Annotated[float, tyro.conf.arg(name="copy-noise")] = GrowConfig.noise
    learn_steps: Hidden[int] = GrowConfig.learn_steps
    learn_batch: Hidden[int] = GrowConfig.learn_batch
    learn_lr: Hidden[float] = GrowConfig.learn_lr
    learn_weight_decay: Hidden[float] = GrowConfig.learn_weight_decay
    dtype: str = ""  # float32 | float64 | bfloat16 | float16; empty keeps the source's
    shard_gb: Annotated[float, Above(0)] = 2.0  # largest weights file
    card: bool = True  # compare logits before and after, as a user would load them
    force: bool = False  # replace DST
    force_inexact: bool = False  # keep what an exact method made though its card is not exact
    dry_run: bool = False
    allow_pickle: bool = False  # read pytorch_model.bin (with weights_only)


def check_places(args: GrowArgs) -> None:
    """Nothing is read before the source is a folder and the destination is free."""
    if not args.src.is_dir():
        raise UserError(f"{args.src} is no folder; SRC is a checkpoint or a Hugging Face folder")
    if (args.src / "final" / "state.json").is_file():
        raise UserError(
            f"{args.src} is a run folder; give one of its checkpoints: {args.src}/final"
        )
    if (args.factor > 0) + (args.width > 0) != 1 and not (apart(args) and not args.factor):
        raise UserError(
            f"factor {args.factor:g} and width {args.width}: give exactly one of --factor F > 1 "
            f"and --width N (or neither, with --heads N or --ffn-factor)"
        )
    src, out = args.src.resolve(), args.out.resolve()
    if out == src or src in out.parents or out in src.parents:
        raise UserError(f"--out {args.out} overlaps the source {args.src}; choose another folder")
    if args.out.exists() and not (args.force or args.dry_run):
        raise UserError(f"{args.out} exists; choose another place or pass --force to replace it")


def apart(args: GrowArgs) -> Apart:
    """What grows apart from the width."""
    number = args.heads.isascii() and args.heads.isdigit()
    if not (number and 0 < int(args.heads) <= MAX_WIDTH or args.heads in ("more", "wider")):
        raise UserError(f"heads is {args.heads!r}; choose one of more, wider, or a number of heads")
    if args.ffn_factor and args.ffn_factor < 1:
        raise UserError(f"--ffn-factor is {args.ffn_factor:g}; it must be at least 1")
    return Apart(int(args.heads) if number else 0, args.ffn_factor)


def new_width(args: GrowArgs, d_old: int) -> int:
    if args.width or not args.factor:
        return args.width or d_old
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


def check_early(args: GrowArgs) -> None:
    """What can be refused without torch."""
    check_places(args)
    if d_old := named_width(args.src):
        check_wider(d_old, new_width(args, d_old), bool(apart(args)))


def named_width(src: Path) -> int | None:
    """The width that the source's own config names; None where it is not plain to see, so that
    growth itself must find what is wrong."""
    found = [src / name for name in ("state.json", "config.json") if (src / name).is_file()]
    try:
        raw = files.read_json(found[0])
        raw = raw["meta"]["config"] if found[0].name == "state.json" else raw
        widths = [raw[key] for key in ("hidden_size", "n_embd", "d_model", "dim") if key in raw]
    except (UserError, LookupError, TypeError):
        return None
    return widths[0] if len(widths) == 1 and type(widths[0]) is int and widths[0] > 0 else None


if __name__ == "__main__":  # --help and refusals come before torch, which takes a second to load
    exit_on_user_error(lambda: check_early(read_command_line(GrowArgs, __doc__)))

import checkpoint
from growth import twin
from growth.apply import gpt_source, no_weights, plan_growth, wide_config
from growth.child import ages_of, grow_checkpoint
from growth.folder import grow_folder, plan_folder
from growth.operators import find
from growth.report import NotExact, print_card, print_shapes
from models import hf, hf_folder
from models.gpt import count_parameters


def main() -> None:
    args = read_command_line(GrowArgs, __doc__)
    check_early(args)
    if args.operator != "auto":
        find(args.operator)  # before transformers is loaded
    grow = grow_ours if (args.src / "state.json").is_file() else grow_hugging_face
    try:
        grow(args)
    except NotExact as broken:
        sys.exit(f"error: {broken}")  # 1: nothing is wrong with what the user asked for


def settings(args: GrowArgs, old: Sizes, d_new: int) -> GrowConfig:
    """The growth settings; `auto` repeats where every factor is whole and pads elsewhere."""
    found, other = {f.name: getattr(args, f.name) for f in fields(GrowConfig)}, apart(args)
    if args.operator == "auto":
        whole = d_new % old.d_model == 0 and other.n_head % old.n_head == 0
        whole = whole and other.ffn_factor == int(other.ffn_factor)
        found["operator"] = "lossless" if whole else "pad"
    if other.n_head:
        found["heads"] = "more"
    if args.noise_db is not None and found["operator"] != "lossless":
        raise UserError(
            f"--noise parts the copies that method lossless makes; {found['operator']} makes none"
        )
    return GrowConfig(**found)


def check_room(out: Path, size: int) -> None:
    """The new weights, of `size` bytes, fit on the disk."""
    place = next(path for path in out.resolve().parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if size > free:
        raise UserError(
            f"{out}: the weights need {size / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free; choose "
            f"a smaller width, a smaller --dtype or another disk"
        )


def grow_hugging_face(args: GrowArgs) -> None:
    quiet_transformers()
    raw = hf_folder.read_config(args.src)
    family = hf.family_of(raw.get("model_type"))
    old = hf.sizes_of(hf_folder.transformers_config(args.src), family)
    d_new = new_width(args, old.d_model)
    cfg, how = settings(args, old, d_new), (args.dtype, args.allow_pickle, apart(args))
    growth = plan_folder(args.src, d_new, cfg, *how)
    twin_error = twin.check(growth)
    if args.dry_run:
        print_shapes(growth.source.stored.shapes, growth.shapes)
        for label, notes in (("approximate", growth.notes), ("remark", growth.remarks)):
            for note in notes:
                print(f"{label}: {note}")
        return
    check_room(args.out, sum(growth.bytes.values()))
    how = dict(shard_gb=args.shard_gb, card=args.card, force_inexact=args.force_inexact)
    report = grow_folder(growth, args.out, args.force, **how)
    print_card(report if twin_error is None else report | {"twin_error": twin_error})
    print(f"wrote {args.out}")


def quiet_transformers() -> None:
    """Its progress bars and advice would bury ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def grow_ours(args: GrowArgs) -> None:
    if args.dtype:
        raise UserError("--dtype is for Hugging Face folders; our checkpoints keep theirs")
    ckpt = checkpoint.load(args.src)
    old = checkpoint.model_config(ckpt)
    d_new = new_width(args, old.d_model)
    cfg = settings(args, old.sizes, d_new)
    if find(cfg.operator).learned:
        raise UserError(f"method {cfg.operator!r} is learned and needs data; use run_ablations.py")
    ages = ages_of(ckpt.meta, old.d_model)
    plan = plan_growth(gpt_source(ckpt.model, old), d_new, cfg, ages, apart(args))
    new = wide_config(plan, old)
    if args.dry_run:
        print_shapes(*({n: p.shape for n, p in no_weights(cfg).items()} for cfg in (old, new)))
        return
    itemsize = next(iter(ckpt.model.values())).dtype.itemsize
    check_room(args.out, count_parameters(new) * itemsize)
    flags = dict(force=args.force, force_inexact=args.force_inexact, apart=apart(args))
    print_card(grow_checkpoint(args.src, args.out, d_new, cfg, **flags)["report"])
    print(f"wrote {args.out}")


if __name__ == "__main__":
    exit_on_user_error(main)
