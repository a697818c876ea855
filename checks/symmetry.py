"""Do copied neurons part? The smallest distance between two of them, step after step of training.

    python -m checks.symmetry runs/tiny-main --data corpora/speeches-bpe2048

grows the parents of a grid (of preset tiny or tiny-x*) by 2 and trains the children with the
settings and batches of preset tiny-x2. The distance is the report card's (growth/report.py): 0
means that two FFN neurons of one layer compute the same and get the same gradient, so that they
stay copies. results/symmetry.json and .md; `python -m figures.evidence symmetry` draws it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from errors import UserError, exit_on_user_error, read_command_line
from settings import Range, check


@dataclass(frozen=True)
class Args:
    grid: tyro.conf.Positional[Path]  # a grid's folder, which has the parents
    data: Path  # its corpus
    preset: str = "tiny-x2"
    variants: str = "lossless,lossless-noise,lossless-noise@noise_db=40,net2net,lossless-pad,nrio"
    seeds: str = "0-2"
    steps: Annotated[int, Range(1, 10**6)] = 256
    threads: Annotated[int, Range(1, 1024)] = 1
    out: Path = Path("results")


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(Args, __doc__))

from tqdm import tqdm

import checkpoint
import files
from analysis.paired import estimate
from bench.step import trainer_of
from grid import Run, expand_grid, parse_names, parse_seeds
from growth.apply import gpt_source, plan_growth
from growth.child import grow_checkpoint
from growth.plan import GrowConfig
from growth.report import duplicate_distance
from provenance import provenance
from training.config import TrainConfig


def main() -> None:
    args = read_command_line(Args, __doc__)
    check(args)
    runs = [
        run
        for run in expand_grid(args.preset, parse_names(args.variants), parse_seeds(args.seeds, ()))
        if run.grow
    ]
    found = {}
    for run in tqdm(runs, desc="training", unit="run"):
        found.setdefault(run.variant, {})[str(run.seed)] = follow(run, args)
    command = f"python -m checks.symmetry {args.grid} --data {args.data}"
    report = {"command": command, "preset": args.preset, "distance": found, **provenance()}
    files.write_json(args.out / "symmetry.json", report)
    files.write_text(args.out / "symmetry.md", markdown(report))
    print(markdown(report))


def follow(run: Run, args: Args) -> dict[str, float]:
    """step -> distance after it, at 0, 1, 2, 4, ... up to args.steps."""
    parent = args.grid / "runs" / str(run.needs) / "final"
    if not parent.is_dir():
        raise UserError(f"{parent} is missing; run_ablations.py --preset {args.preset} makes it")
    old = checkpoint.load(parent)
    cfg = GrowConfig(**run.grow)
    source = gpt_source(old.model, checkpoint.model_config(old))
    plan, distances = plan_growth(source, run.d_model, cfg), {}
    with tempfile.TemporaryDirectory() as place:
        child = Path(place) / "child"
        grow_checkpoint(parent, child, run.d_model, cfg)
        settings = {k: v for k, v in run.train.items() if k != "model"} | {"threads": args.threads}
        trainer = trainer_of(TrainConfig(Path(place) / "run", args.data, child, **settings))
        for step in range(args.steps + 1):
            if step & (step - 1) == 0 or step == args.steps:
                distances[str(step)] = duplicate_distance(plan, trainer.setup.model.state_dict())
            if step < args.steps:
                trainer.step()
    return distances


def markdown(report: dict) -> str:
    steps = list(next(iter(next(iter(report["distance"].values())).values())))
    shown = [step for step in steps if step == "0" or int(step) in (1, 16, int(steps[-1]))]
    lines = ["# Do copies part?", "", f"`{report['command']}`: the smallest distance between two "
             "FFN neurons of a layer, unit vectors of their weights (0: copies), mean over seeds "
             "and 95 % CI.", "", f"| variant | n | {' | '.join(f'step {s}' for s in shown)} |",
             f"|---|--:|{'---|' * len(shown)}"]  # fmt: skip
    for variant, seeds in report["distance"].items():
        cells = []
        for step in shown:
            e = estimate({seed: curve[step] for seed, curve in seeds.items()})
            cells.append(f"{e.mean:.2g} ± {e.half:.1g}" if e.n > 1 else f"{e.mean:.2g}")
        lines.append(f"| {variant} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    exit_on_user_error(main)
