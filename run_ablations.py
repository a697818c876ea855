"""Run the ablation grid: locally or on Slurm, resumable, one result row per finished run.

    python run_ablations.py --local                  # GPU if there is one (preset paper), else CPU
    python run_ablations.py --local --preset tiny    # the table in miniature, minutes on a CPU
    python run_ablations.py --dry-run --preset paper # tokens, FLOPs and time, nothing is run
    python run_ablations.py --slurm                  # submit to the cluster from a login node

Called again, it keeps finished rows and goes on with interrupted runs where they stopped.
Folders: OUT/rows (a JSON row per run), OUT/runs (checkpoints and metrics), OUT/jobs (logs), and
OUT/table.*, OUT/claims.md, OUT/*.png when the grid is complete.
"""

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from errors import UserError, exit_on_user_error, read_command_line

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Args:
    """The ablation grid: every variant of a preset, paired by seed."""

    preset: str = ""
    """name of a preset (README); default: paper, or tiny on a CPU"""
    only: str = ""
    """variants, comma-separated; a name may carry overrides (srio@epsilon=0.25@lr=0.001); "all" """
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
    """print the state of every run of the grid"""
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
    source: str = ""
    """another corpus for the preset, e.g. file:my_texts/; give it an --out of its own"""
    corpora: Path = ROOT / "corpora"
    """where prepared corpora lie"""


def main() -> None:
    import grid

    args = read_command_line(Args, __doc__)
    if args.list:
        return print_variants(grid.VARIANTS)
    if args.summarize:
        return summarize(args.summarize, ROOT / "figures" / args.summarize.resolve().name)
    if args.slurm and not args.preset:
        raise UserError("--slurm needs --preset: the node that submits need not be one that runs")
    name = args.preset or default_preset()
    preset = grid.find(grid.PRESETS, name, "preset")
    names = [v for v in args.only.split(",") if v] or list(preset.variants)
    names = list(grid.VARIANTS) if names == ["all"] else list(dict.fromkeys(names))
    runs = grid.expand_grid(name, names, grid.parse_seeds(args.seeds, preset.seeds))
    out = (args.out or ROOT / "runs" / name).resolve()
    if not 0 <= args.jobs <= 1024:
        raise UserError(f"--jobs is {args.jobs}; it must be 0 (one per core or GPU) to 1024")
    if args.dry_run:
        return print_budget(name, preset, runs, n_jobs(args.jobs))
    if args.publish:
        return publish(out, out.name)
    if args.status or args.cancel:
        return print_status(out, runs, args.cancel)
    if args.local == args.slurm:
        raise UserError(
            "nothing to do: choose one of --local, --slurm, --dry-run, --list, --status"
        )
    run_grid(args, name, preset, runs, out)


def default_preset() -> str:
    import torch

    name = "paper" if torch.cuda.is_available() else "tiny"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU found, CPU"
    print(f"preset {name}: {device} (choose another with --preset)")
    return name


def n_jobs(asked: int) -> int:
    import torch

    return asked or torch.cuda.device_count() or len(os.sched_getaffinity(0))


# ---- one run, in its own process


def execute(out: str, run_id: str, spec: dict) -> None:
    """Grow (where the run has a parent), train and write the row of one run; resumes by itself."""
    from data.shards import Corpus
    from grid import Run
    from growth.child import grow_checkpoint
    from growth.plan import GrowConfig
    from models.gpt import GPTConfig
    from train import TrainConfig, train

    run, folder, row = Run(**spec["run"]), Path(out) / "runs" / run_id, row_path(out, run_id)
    if row.exists() and (read_row(row)["status"] != "done" or (folder / "final").exists()):
        return require_done(run_id, read_row(row))
    first = int(os.environ.get("RANK", 0)) == 0  # of several processes, one grows and writes
    if first:
        sweep(row)
        sweep(Path(out) / "grown" / run_id)
    data = Path(spec["data"])
    model, child = GPTConfig(**run.train["model"]), None
    if run.grow:
        child, parent = Path(out) / "grown" / run_id, Path(out) / "runs" / run.needs / "final"
        if first and not child.exists():
            corpus, cfg = Corpus(data), GrowConfig(**run.grow)
            probe = next(iter(corpus.eval_batches(*probe_size(model))))
            batches = learning_batches(corpus, run, cfg, model.block_size)
            grow_checkpoint(parent, child, run.d_model, cfg, probe, batches, run.optimizer)
        wait_for(child)
    settings = {**run.train, "model": model, "run_id": run_id}
    summary = train(TrainConfig(out=folder, data=data, init=child, **settings))
    if first:
        write_row(row, make_row(run, spec, summary, child))
    require_done(run_id, summary)


def require_done(run_id: str, result: dict) -> None:
    """UserError where a run ended badly: its children must not start."""
    if result["status"] != "done":
        raise UserError(f"{run_id} {result['status']}: {result.get('reason')}")


def sweep(path: Path) -> None:
    """Remove what killed writers of `path` left beside it; a run has one writer at a time."""
    for kind in ("tmp", "old"):
        for rest in path.parent.glob(f".{path.name}.{kind}-*"):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()


def wait_for(folder: Path, seconds: float = 3600) -> None:
    """Until another process of this run has put `folder` in place (whole, by a rename)."""
    end = time.monotonic() + seconds
    while not folder.exists():
        if time.monotonic() > end:
            raise UserError(f"{folder} did not appear in {seconds:.0f} s; see the log of task 0")
        time.sleep(0.2)


def learning_batches(corpus, run, cfg, block_size: int):
    """What a learned operator sees: training windows in an order of its own, the same for all."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    data_seed = run.train["data_seed"] + 500  # stages count from 1: never a stage's own order
    for step in range(cfg.learn_steps):
        batch = corpus.batch_at(step, data_seed, cfg.learn_batch, block_size)
        yield tuple(tokens_bt.to(device) for tokens_bt in batch)


def probe_size(model) -> tuple[int, int, int]:
    """eval_batches arguments for one batch of about 1,024 tokens: the report card's probe."""
    sequences = max(1, 1024 // model.block_size)
    return sequences * model.block_size, sequences, model.block_size


def make_row(run, spec: dict, summary: dict, child: Path | None) -> dict:
    """The result row: everything a table, a claim or a sceptical reader needs."""
    import checkpoint

    growth = checkpoint.read_state(child)["meta"]["growth"] if child else {"report": None}
    return {
        "schema": 1,
        "preset": spec["preset"],
        "variant": run.variant,
        "seed": run.seed,
        "stage": run.stage,
        "command": spec["command"],
        **{key: spec["code"][key] for key in ("commit", "dirty")},
        **summary,
        "config": planned(run),
        "config_hash": checkpoint.hash_json(planned(run)),
        "report": growth["report"],
    }


def planned(run) -> dict:
    """What the grid decides of a run; rows of one run_id with another plan are never mixed."""
    return {"train": run.train, "grow": run.grow, "optimizer": run.optimizer}


def row_path(out: str | Path, run_id: str) -> Path:
    return Path(out) / "rows" / f"{run_id}.json"


def write_row(path: Path, row: dict) -> None:
    import checkpoint

    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(path, row)


# ---- the grid


def run_grid(args: Args, name: str, preset, runs: list, out: Path) -> None:
    """Prepare the corpus, run or submit what is missing, then table, claims and figures."""
    import cluster

    check_rows(out, runs)
    # refused before anything is written
    config = cluster.load_config(args.slurm_config)
    check_place(out)
    if args.retry_failed:
        forget_failed(out, runs)
    if args.slurm and preset.gpu and not (config.gres or config.gpus_per_node):
        raise UserError(
            f"preset {name} needs a GPU per run and the Slurm settings name none; give "
            f"--slurm-config FILE with gpus_per_node = 1 (see slurm/config.toml)"
        )
    data = prepare_corpus(preset, args)
    check_corpus(out, runs, data)
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    shared = {"preset": name, "data": str(data), "command": command, "code": cluster.code_version()}
    jobs, done = make_jobs(runs, shared), finished(out, runs)
    if args.slurm:
        sent = cluster.submit_slurm(out, jobs, config, done)
        print(f"submitted {len(sent)} of {len(runs)} runs: {' '.join(sent) or 'nothing to do'}")
        return print("watch with --status; when all are done it prints the table")
    states = {}
    if not all(done(run.run_id) for run in runs):
        with GridBar(out, runs) as bar:
            states = cluster.run_local(out, jobs, n_jobs(args.jobs), done, bar.update)
    failed = {run_id: s for run_id, s in states.items() if s.state == "failed"}
    for run_id, s in failed.items():
        print(f"failed: {run_id}: {s.reason}" + (f" (log: {s.log})" if s.log else ""))
    summarize(out, out, allow_missing=bool(failed or args.only or args.seeds))
    if failed:
        sys.exit(1)


def check_place(out: Path) -> None:
    place = next(path for path in (out, *out.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"--out is {out}, but {place} is no folder to write in; choose another")


def make_jobs(runs: list, shared: dict) -> list:
    import cluster

    return [
        cluster.Job(
            run.run_id,
            {**shared, "run": asdict(run)},
            (run.needs,) if run.needs else (),
            minutes=run.flops / 1e9 / 60,  # only the order counts: the longest chain starts first
        )
        for run in runs
    ]


def prepare_corpus(preset, args: Args) -> Path:
    """Its folder; the one that `data/prepare.py` makes by itself for this source."""
    from data.prepare import PrepareConfig, default_out, prepare

    cfg = PrepareConfig(source=args.source or preset.source, tokenizer=preset.tokenizer)
    return prepare(replace(cfg, out=args.corpora.resolve() / default_out(cfg).name))


def is_done(out: Path, run_id: str, parents: Container[str] = ()) -> bool:
    """Whether a run has its row. One that others are still to grow from must also have ended well
    and have its final checkpoint."""
    path = row_path(out, run_id)
    if run_id not in parents or not path.exists():
        return path.exists()
    return read_row(path)["status"] == "done" and (out / "runs" / run_id / "final").exists()


def finished(out: Path, runs: list) -> Callable[[str], bool]:
    """is_done by run_id alone."""
    missing = [run for run in runs if not row_path(out, run.run_id).exists()]
    return partial(is_done, out, parents={run.needs for run in missing})


def read_row(path: Path) -> dict:
    import checkpoint

    try:
        row = checkpoint.read_json(path)
        return {key: row[key] for key in row if key} | {"status": row["status"]}
    except (UserError, KeyError):
        raise UserError(f"{path} is no result row; delete it and run the grid again") from None


def check_rows(out: Path, runs: list) -> None:
    """Rows of another protocol are never mixed in: same run_id, other config is refused."""
    import checkpoint

    for run in runs:
        path = row_path(out, run.run_id)
        if path.exists() and read_row(path).get("config_hash") != checkpoint.hash_json(
            planned(run)
        ):
            raise UserError(
                f"{path} is the row of another configuration of {run.run_id}; "
                f"choose another --out, or delete the row and {out / 'runs' / run.run_id}"
            )


def check_corpus(out: Path, runs: list, data: Path) -> None:
    """Rows of another corpus are never mixed in either."""
    from data.shards import Corpus

    wanted = Corpus(data).manifest_hash
    for path in (row_path(out, run.run_id) for run in runs):
        if path.exists() and read_row(path).get("manifest_hash") != wanted:
            raise UserError(
                f"{path} was made on another corpus than {data.name}; choose another --out"
            )


def forget_failed(out: Path, runs: list) -> None:
    """Delete the folder and row of every run that ended badly, so that it starts afresh."""
    for run in runs:
        path = row_path(out, run.run_id)
        if path.exists() and read_row(path)["status"] != "done":
            shutil.rmtree(out / "runs" / run.run_id, ignore_errors=True)
            shutil.rmtree(out / "grown" / run.run_id, ignore_errors=True)
            path.unlink()


class GridBar:
    """One bar over the grid's tokens, read from rows and each run's progress.json."""

    def __init__(self, out: Path, runs: list):
        self.out, self.tokens = out, {run.run_id: run.tokens for run in runs}
        self.step_tokens = {run.run_id: run.tokens // run.train["steps"] for run in runs}
        self.seen, self.n_done = {}, -1
        quiet = not sys.stderr.isatty()  # a log gets a line every half minute
        self.bar = tqdm(
            total=sum(self.tokens.values()), unit="tok", unit_scale=True, smoothing=0.1,
            mininterval=30 if quiet else 0.3,
        )  # fmt: skip

    def __enter__(self) -> "GridBar":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def update(self, states: dict) -> None:
        for run_id, status in states.items():
            if status.state == "running":
                self.seen[run_id] = self.running(run_id)
            elif status.state == "done":
                self.seen[run_id] = self.tokens[run_id]
        done = sum(self.seen.values())
        if self.n_done < 0:  # what earlier calls did is no progress of this one
            self.bar.initial = done
        self.n_done = sum(s.state == "done" for s in states.values())
        live = [run_id for run_id, s in states.items() if s.state == "running"]
        self.bar.set_description(f"{self.n_done}/{len(states)} runs", refresh=False)
        self.bar.set_postfix_str(" ".join(live[:4]), refresh=False)
        self.bar.update(done - self.bar.n)

    def running(self, run_id: str) -> int:
        try:
            text = (self.out / "runs" / run_id / "progress.json").read_text()
            return json.loads(text)["step"] * self.step_tokens[run_id]
        except (OSError, ValueError, KeyError):
            return 0


def summarize(folder: Path, pictures: Path, allow_missing: bool = False) -> None:
    """Table and claims of the rows in `folder`, written beside them; the table printed; figures."""
    from analysis import aggregate
    from analysis.claims import claims
    from analysis.rows import load_rows
    from figures import loss_curves, loss_table

    rows = load_rows(folder)
    df = aggregate.table(rows, allow_missing=allow_missing)
    aggregate.write_table(df, folder)
    aggregate.write_atomic(folder / "claims.md", claims(rows, allow_missing).encode())
    aggregate.print_table(df)
    for figure in (loss_curves, loss_table):
        for path in figure.draw(rows, pictures, allow_missing=allow_missing):
            print(f"wrote {path}")


def publish(out: Path, name: str) -> None:
    """Copy rows to results/NAME, where they are committed, and make its tables and figures."""
    from analysis.rows import load_rows, matched

    target, rows = ROOT / "results" / name, {row["run_id"]: row for row in load_rows(out)}
    there = load_rows(target) if (target / "rows").is_dir() else []
    kept = [row for row in there if row["run_id"] not in rows]
    matched([*rows.values(), *kept], allow_missing=True)  # refuses before anything is replaced
    print(f"results/{name}: {len(rows)} rows from {out}, {len(kept)} more kept")
    for row in rows.values():
        # the folder's own name, not where it lay on this machine
        row["command"] = re.sub(r"--out[ =]\S+", f"--out runs/{name}", row["command"])
        write_row(row_path(target, row["run_id"]), row)
    summarize(target, ROOT / "figures" / name, allow_missing=bool(kept))


# ---- what the grid is


def print_variants(variants: dict) -> None:
    width = max(map(len, variants))
    for name, variant in variants.items():
        print(f"{name:{width}}  {variant.source:10}  {variant.line}")


def print_budget(name: str, preset, runs: list, jobs: int) -> None:
    """The grid's runs with parameters, tokens, FLOPs, and a time estimate from timed steps."""
    from models.gpt import GPTConfig, count_parameters

    print(f"preset {name}: {preset.line}")
    print(f"corpus {preset.source}, tokenizer {preset.tokenizer}; {len(runs)} runs\n")
    print(f"{'variant':24} {'width':>6} {'parameters':>11} {'seeds':>6} {'tokens/run':>11} "
          f"{'FLOPs/run':>10} {'min/run':>8}")  # fmt: skip
    groups, minutes, rates = {}, 0.0, {}
    for run in runs:
        groups.setdefault((run.variant, run.stage), []).append(run)
    for (variant, _), members in groups.items():
        run, cfg = members[0], GPTConfig(**members[0].train["model"])
        if cfg not in rates:
            rates[cfg] = tokens_per_second(cfg, jobs)
        each = run.tokens / rates[cfg] / 60
        minutes += each * len(members)
        print(f"{variant:24} {run.d_model:6} {count_parameters(cfg):11,} {len(members):6} "
              f"{run.tokens:11,} {run.flops:10.3g} {each:8.1f}")  # fmt: skip
    tokens, flops = sum(run.tokens for run in runs), sum(run.flops for run in runs)
    print(f"\ntotal {tokens:,} tokens, {flops:.3g} training FLOPs; learned operators add theirs")
    total = format_time(minutes / max(1, min(jobs, len(runs))))
    print(f"about {total} on this machine, {jobs} runs at a time, evaluation not counted")


def format_time(minutes: float) -> str:
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:,.0f} hours"


def tokens_per_second(cfg, jobs: int) -> float:
    """Measured here: two forward and backward passes, after one to warm up."""
    import torch

    from models.gpt import GPT

    cuda = torch.cuda.is_available()
    device, before = "cuda" if cuda else "cpu", torch.get_num_threads()
    if not cuda:
        torch.set_num_threads(max(1, before // jobs))
    model = GPT(cfg).to(device)
    n = 64 if cuda else max(1, 512 // cfg.block_size)
    x = torch.randint(cfg.vocab_size, (n, cfg.block_size), device=device)
    for i in range(3):
        if i == 1:
            start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = model(x, x)
        loss.backward()
        loss.item()  # waits for the device
    torch.set_num_threads(before)
    return 2 * x.numel() / (time.perf_counter() - start)


def print_status(out: Path, runs: list, cancel: bool) -> None:
    """A table of the runs, how many are in each state, and the results when all have ended."""
    import cluster

    check_rows(out, runs)
    if cancel:
        cancelled = cluster.cancel(out)
        print(f"cancelled {len(cancelled)} runs: {' '.join(cancelled) or 'none was queued'}")
    states = cluster.status(out, make_jobs(runs, {}), finished(out, runs))
    width = max(len(run_id) for run_id in states)
    print(f"{'run':{width}}  {'state':8}  reason  log")
    shown = {run_id: shown_state(out, run_id, status) for run_id, status in states.items()}
    for run_id, (state, reason) in shown.items():
        print(f"{run_id:{width}}  {state:8}  {reason or '-'}  {states[run_id].log or '-'}")
    counts = Counter(state for state, _ in shown.values())
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f" of {len(states)}")
    if not {"queued", "running"} & set(counts) and (out / "rows").exists():
        summarize(out, out, allow_missing=True)


def shown_state(out: Path, run_id: str, status) -> tuple[str, str]:
    """A run's state and reason: what its row says, where it has one and does not run again."""
    path = row_path(out, run_id)
    if status.state in ("queued", "running") or not path.exists():
        return status.state, status.reason
    row = read_row(path)
    return row["status"], row.get("reason") or ""


if __name__ == "__main__":
    exit_on_user_error(main)
