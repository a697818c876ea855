"""Run the ablation grid: locally or on Slurm, resumable, one result row per finished run.

    python run_ablations.py --local                  # GPU if there is one (preset paper), else CPU
    python run_ablations.py --local --preset tiny    # the table in miniature, minutes on a CPU
    python run_ablations.py --dry-run --preset paper # tokens, FLOPs and time, nothing is run
    python run_ablations.py --slurm                  # submit to the cluster from a login node

Called again, it keeps finished rows and goes on with interrupted runs where they stopped.
Exit code 0: every run of the grid ended well; 1: some run failed or diverged, and the table has
what there is; 2: the command was refused, and nothing was done.
Folders: OUT/rows (a JSON row per run), OUT/runs (checkpoints and metrics), OUT/jobs (logs), and
OUT/table.*, OUT/claims.md, OUT/*.png when every run has ended.
--status and --cancel need nothing but --out, or --preset where OUT is runs/PRESET.
"""

import os
import shlex
import sys
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

from errors import UserError, exit_on_user_error, read_command_line

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Args:
    """The ablation grid: every variant of a preset, paired by seed."""

    preset: str = ""
    """name of a preset (README); default: paper, or tiny on a CPU"""
    only: str = ""
    """variants, comma-separated; a name may carry overrides (srio@epsilon=0.25@lr=0.001, or several
    numbers: mrio@epsilons=0.1,0.2); or "all", or "tuning" (with --seeds 100-101) """
    seeds: str = ""
    """0-4 or 0,1,2; empty: the preset's"""
    local: bool = False
    """run here"""
    slurm: bool = False
    """submit to Slurm"""
    slurm_config: Path | None = None
    """TOML or JSON file with partition, account, time, ... (slurm/config.toml is an example)"""
    dry_run: bool = False
    """print the grid with tokens, FLOPs and estimated time, and stop"""
    list: bool = False
    """print every variant with what it is and where it comes from"""
    status: bool = False
    """print the state of every run that OUT was asked for (or of those that --only, --seeds name);
    when all have ended, make OUT's table, claims and pictures again and print the table"""
    retry_failed: bool = False
    """with --local or --slurm: run failed and diverged runs again, from their start"""
    cancel: bool = False
    """cancel the grid's Slurm jobs"""
    publish: bool = False
    """copy OUT's rows to results/, under OUT's name, with tables; pictures go to figures/"""
    summarize: Path | None = None
    """only make the tables and pictures of a results folder again, from its rows"""
    jobs: int = 0
    """runs at a time with --local; 0: one per CPU core or GPU"""
    out: Path | None = None
    """output folder; empty: runs/PRESET"""
    parent: Path | None = None
    """a model to grow, trained by nobody here: a checkpoint, or a Hugging Face folder of a GPT-2,
    Llama or Mistral, whose own tokenizer is used"""
    width: int = 0
    """with --parent: width of the grown model; 0: the preset's growth factor"""
    source: str = ""
    """another corpus for the preset, e.g. file:my_texts/; give it an --out of its own"""
    corpora: Path = ROOT / "corpora"
    """where prepared corpora lie"""


if __name__ == "__main__":  # --help and refusals come before torch, which takes a second to load
    exit_on_user_error(lambda: read_command_line(Args, __doc__))

import torch

import cluster
import grid
from analysis.publish import publish, summarize
from cluster import output
from cluster.budget import print_budget
from cluster.parent import bring_parent, read_parent
from cluster.progress import GridBar, print_status
from data.prepare import PrepareConfig, default_out, prepare
from provenance import code_version


def main() -> None:
    args = read_command_line(Args, __doc__)
    if args.list:
        return print_variants()
    if args.summarize:
        return summarize(args.summarize, allow_missing=True)
    if args.slurm and not args.preset:
        raise UserError("--slurm needs --preset: the node that submits need not be one that runs")
    looking = (args.status or args.cancel) and not (args.only or args.seeds)
    noted = output.noted_grid(args.out)[0] if looking and args.out else ""
    name = args.preset or noted or default_preset()
    out = (args.out or ROOT / "runs" / name).resolve()
    if looking and (runs := output.noted_grid(out, name)[1]):
        return print_status(out, name, runs, args.cancel)
    preset = grid.find(grid.PRESETS, name, "preset")
    if args.parent:
        preset = of_parent(preset, args)
    elif preset.needs_parent and args.dry_run:  # at the preset's own sizes
        preset = grid.with_parent(preset, preset.model, "none", args.width)
    elif args.width or (preset.needs_parent and not args.publish):
        raise UserError(
            f"preset {name} and --width grow a model that is there; give --parent FOLDER"
        )
    names = grid.parse_names(args.only) or list(preset.variants)
    groups = {"all": lambda: grid.fitting(preset), "tuning": lambda: grid.tuning(preset)}
    names = groups[names[0]]() if names[0] in groups else list(dict.fromkeys(names))
    runs = grid.expand_grid(preset, names, grid.parse_seeds(args.seeds, preset.seeds))
    if not 0 <= args.jobs <= 1024:
        raise UserError(f"--jobs is {args.jobs}; it must be 0 (one per core or GPU) to 1024")
    if args.dry_run:
        return print_budget(name, preset, runs, n_jobs(args.jobs))
    if args.publish:
        return publish(out)
    if args.status or args.cancel:
        return print_status(out, name, runs, args.cancel)
    if args.local == args.slurm:
        raise UserError(
            "nothing to do: choose one of --local, --slurm, --dry-run, --list, --status"
        )
    run_grid(args, name, preset, runs, out)


def of_parent(preset: grid.Preset, args: Args) -> grid.Preset:
    """The preset for the model in args.parent, read with its own tokenizer where it has one."""
    _, model, entry = read_parent(args.parent, preset.model.block_size)
    if (args.parent / "tokenizer.json").is_file():
        preset = replace(preset, tokenizer=f"hf:{args.parent.resolve()}")
    return grid.with_parent(preset, model, entry["source"]["sha256"], args.width)


def print_variants() -> None:
    width = max(map(len, grid.VARIANTS))
    for name, variant in grid.VARIANTS.items():
        print(f"{name:{width}}  {variant.source:10}  {variant.line}")


def default_preset() -> str:
    name = "paper" if torch.cuda.is_available() else "tiny"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU found, CPU"
    print(f"preset {name}: {device} (choose another with --preset)")
    return name


def n_jobs(asked: int) -> int:
    return asked or torch.cuda.device_count() or len(os.sched_getaffinity(0))


def run_grid(args: Args, name: str, preset: grid.Preset, runs: list[grid.Run], out: Path) -> None:
    """Prepare the corpus, run or submit what is missing, then table, claims and figures."""
    # refused before anything is written
    config = cluster.load_config(args.slurm_config)
    if args.slurm:
        cluster.check_slurm(config, name if preset.gpu else "")
    output.check_place(out)
    rows = output.check_rows(out, name, runs)
    data = prepare_corpus(preset, args)
    output.check_corpus(rows, out, data)
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    shared = {"preset": name, "data": str(data), "command": command, "code": code_version()}
    jobs, done = output.make_jobs(runs, shared), output.finished(out, runs, args.retry_failed)

    def begin(live: Container[str]) -> None:  # called when nobody else starts runs in OUT
        output.note_grid(out, name, runs)
        if args.retry_failed:
            output.forget_failed(out, runs, live)
        if args.parent:
            bring_parent(args.parent, out, preset, data, preset.train.get("dtype", "auto"))

    if args.slurm:
        sent = cluster.submit_slurm(out, jobs, config, done, prepare=begin)
        print(f"submitted {len(sent)} of {len(runs)} runs: {' '.join(sent) or 'nothing to do'}")
        return print("watch with --status; when all are done it prints the table")
    states = {}
    if args.retry_failed or not all(done(run.run_id) for run in runs):
        with GridBar(out, runs) as bar:
            states = cluster.run_local(
                out, jobs, n_jobs(args.jobs), done, bar.update, prepare=begin
            )
    bad = output.unfinished(out, runs, states)
    for run_id, status in bad.items():
        log = f" (log: {status.log})" if status.log else ""
        print(f"{status.state}: {run_id}: {status.reason}{log}")
    if any(output.is_done(out, run.run_id) for run in runs):
        summarize(out, out, allow_missing=bool(bad or args.only or args.seeds))
    if bad:
        print("the same command goes on; with --retry-failed, diverged runs start afresh")
        sys.exit(1)


def prepare_corpus(preset: grid.Preset, args: Args) -> Path:
    """Its folder; the one that `data/prepare.py` makes by itself for this source."""
    cfg = PrepareConfig(source=args.source or preset.source, tokenizer=preset.tokenizer)
    return prepare(replace(cfg, out=args.corpora.resolve() / default_out(cfg).name))


if __name__ == "__main__":
    exit_on_user_error(main)
