"""Kill a chain of runs with SIGKILL, hundreds of times, and ask for the same result to the bit.

    python -m checks.crash --kills 200

One chain is what a user runs: prepare a corpus, train a parent, grow it, train the child, write two
result rows (preset smoke of grid.py, with a small text of its own), publish them with their table.
A chain is killed, checked, started again, killed again, ..., until it gets through; then the next
chain begins. The moments are random: any time since the start, or right before a file operation (of
a random kind: shards, checkpoint, growth, row, published, log), or within milliseconds after it, in
the middle of the writing. An audit hook of Python tells of the operations: no code under test is
changed.

After every kill, whatever has a real name must be whole (a corpus, a checkpoint, a row, a summary)
and no saved step may be lost. At the end of a chain, weights and Adam moments must have the
hashes of an uninterrupted chain, metrics and rows must be equal but for the clock, and no temporary
file may be left. The report goes to results/crash.json and crash.md; exit 1 if anything failed.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from errors import UserError, exit_on_user_error, read_command_line

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Args:
    """Kill a chain of runs again and again; compare with a chain that was left alone."""

    kills: int = 200
    """SIGKILLs in all"""
    seed: int = 0
    """of the moments"""
    out: Path = ROOT / "runs" / "crash"
    """working folder; a chain that failed is kept here"""
    report: Path = ROOT / "results"
    """where crash.json and crash.md are written"""


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(Args, __doc__))

import pandas as pd
import torch
from tqdm import tqdm

import checkpoint
import files
from analysis import publish
from analysis.rows import load_rows
from cluster.execute import execute
from data.prepare import PrepareConfig, prepare
from data.shards import Corpus
from grid import PRESETS, expand_grid
from models.gpt import count_parameters
from provenance import provenance

VARIANT = "srio"
RUNS = ("parent-s0", f"{VARIANT}-s0")
CLOCK = {"wall_s", "train_s", "seconds", "tokens_per_s", "finished"}  # may differ between chains
KINDS = {  # what a chain is writing, by the folder it writes to
    "shards": "corpus shards and manifest",
    "checkpoint": "a checkpoint: saving, replacing, deleting",
    "growth": "the grown checkpoint",
    "row": "a result row",
    "published": "published rows, tables and pictures",
    "log": "metrics, progress, config, summary",
    "compute": "nothing: importing, training, evaluating, growing",
}
TRIGGERS = {"time": "any time", "before": "before a file operation", "after": "just after one"}
AFTER_S = 0.004  # a file of these sizes is written and synced in about this time
MOST_KILLS = 12  # of one chain
PATIENCE_S = 300  # for a chain that is not killed


@dataclass(frozen=True)
class Kill:
    """A moment to die: `seconds` after the start (time), right before the number-th file operation
    of a kind (before), or `seconds` after that (after)."""

    trigger: str  # one of TRIGGERS
    seconds: float = 0.0
    number: int = 0
    kind: str = "compute"


@dataclass(frozen=True)
class Reference:
    """The chain that was left alone: its results, its seconds, its file operations by kind."""

    results: dict
    seconds: float
    operations: dict[str, int]


def main() -> None:
    args = read_command_line(Args, __doc__)
    if not 1 <= args.kills <= 100_000:
        raise UserError(f"--kills is {args.kills}; it must be in 1..100000")
    out, began = args.out.resolve(), time.monotonic()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out is {out}, which is not empty; remove it or choose another folder")
    tqdm.monitor_interval = 0  # no thread in this process: it forks
    tqdm.set_lock(threading.RLock())  # its own is shared: a child killed with it would keep it
    preload()
    write_texts(out / "texts", args.seed)
    reference = run_reference(out / "reference")
    counts, chains, failures = run_chains(args, out, reference)
    report = {
        "schema": 1,
        "command": f"python -m checks.crash --kills {args.kills} --seed {args.seed}",
        "seed": args.seed,
        "kills": sum(counts.values()),
        "chains": chains,
        "by_kind": {k: {t: counts[t, k] for t in TRIGGERS} for k in KINDS},
        "failures": failures,
        "weights": {run: reference.results[run]["weights"] for run in RUNS},
        "chain_s": round(reference.seconds, 2),
        "wall_s": round(time.monotonic() - began, 1),
        **provenance(),
    }
    files.write_json(args.report / "crash.json", report)
    text = to_markdown(report)
    files.write_text(args.report / "crash.md", text)
    print(text)
    if failures:
        sys.exit(1)
    shutil.rmtree(out)


def preload() -> None:
    """Import here, once, what every life would import again (torch loads its compiler late)."""
    import analysis.pretrained  # noqa: F401
    import figures.loss_curves  # noqa: F401
    import figures.loss_table  # noqa: F401
    import growth.child  # noqa: F401
    import train  # noqa: F401

    torch.set_num_threads(1)
    count_parameters(PRESETS["smoke"].model)


# ---- one chain


def chain(folder: Path) -> None:
    """Corpus, parent, growth, child, rows; every part goes on where an earlier call was killed."""
    source = f"file:{folder.parent / 'texts'}"
    data = folder / "corpora" / "texts"
    prepare(PrepareConfig(source=source, tokenizer="byte", out=data, shard_tokens=4000))
    for run in expand_grid("smoke", [VARIANT], [0]):
        spec = {"preset": "smoke", "data": str(data), "command": "crash.py"}
        spec |= {"code": {"commit": None, "dirty": False}, "run": asdict(run)}
        execute(str(folder), run.run_id, spec)
    publish.ROOT = folder / "published"  # instead of the repository
    publish.publish(folder)


def write_texts(folder: Path, seed: int) -> None:
    """40 documents of 3 kB."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(300)]
    folder.mkdir(parents=True)
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=500)))


def results(folder: Path) -> dict:
    """All that must be the same in every finished chain, by run; nothing that the clock decides."""
    found = {}
    for run in RUNS:
        final = checkpoint.load(folder / "runs" / run / "final")
        metrics = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        found[run] = {
            "weights": final.hash,
            "moments": final.optimizer_hash,
            "metrics": [without_clock(json.loads(line)) for line in metrics],
            "summary": read(folder / "runs" / run / "done.json"),
            "row": read(folder / "rows" / f"{run}.json"),
            "published": read(published(folder) / "rows" / f"{run}.json"),
        }
    return found


def published(folder: Path) -> Path:
    return folder / "published" / "results" / folder.name


def read(path: Path) -> dict:
    return without_clock(files.read_json(path))


def without_clock(value: object) -> object:
    if isinstance(value, list):
        return [without_clock(v) for v in value]
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in CLOCK}
    return value


# ---- lives and deaths


def run_reference(folder: Path) -> Reference:
    began, counts = time.monotonic(), folder.with_name("operations.json")

    def count_and_run() -> None:
        operations = Counter()
        on_operation(folder, lambda kind: operations.update([kind]))
        chain(folder)
        counts.write_text(json.dumps(dict(operations)))

    if not finishes(fork(count_and_run, folder)):
        log = folder.with_name("reference.log")
        raise UserError(f"the chain fails even when nobody kills it; see {log}")
    seconds = time.monotonic() - began
    return Reference(results(folder), seconds, json.loads(counts.read_text()))


def run_chains(args: Args, out: Path, reference: Reference) -> tuple[Counter, int, list[str]]:
    """Chains until all kills are spent: kills by (trigger, kind), number of chains, failures."""
    rng, counts, failures, chains = random.Random(args.seed), Counter(), [], 0
    with tqdm(total=args.kills, unit="kill", desc="crash test") as bar:
        while bar.n < args.kills:
            folder = out / f"chain-{chains:03}"
            died = run_chain(folder, rng, reference, args.kills - bar.n, bar, failures)
            counts.update(died)
            if not any(failure.startswith(folder.name) for failure in failures):
                shutil.rmtree(folder)
                folder.with_name(f"{folder.name}.log").unlink()
            chains += 1
            bar.set_postfix_str(f"{chains} chains, {len(failures)} failures", refresh=False)
    return counts, chains, failures


def run_chain(
    folder: Path, rng: random.Random, reference: Reference, left: int, bar: tqdm, failures: list
) -> list[tuple[str, str]]:
    """Kill and restart one chain until it ends; the (trigger, kind) of its deaths."""
    died, newest = [], dict.fromkeys(RUNS, -1)
    while True:
        kill = None
        if len(died) < min(left, MOST_KILLS):
            kill = choose(rng, folder, reference)
        status = live(folder, kill)
        if status == 0:
            break
        if status != -signal.SIGKILL:
            failures.append(f"{folder.name}: life {len(died) + 1} ended with {status}, see its log")
            return died
        kind = debris(folder) if kill.trigger == "time" else kill.kind
        died.append((kill.trigger, kind))
        bar.update()
        found = check_killed(folder, reference, newest)
        failures += [f"{folder.name}, death {len(died)} ({kind}): {what}" for what in found]
    failures += [f"{folder.name}, end: {what}" for what in check_finished(folder, reference)]
    return died


def choose(rng: random.Random, folder: Path, reference: Reference) -> Kill:
    """A moment of those that may still come."""
    trigger = rng.choice(list(TRIGGERS))
    if trigger == "time":
        return Kill(trigger, rng.random() * reference.seconds)
    made = {"shards": (folder / "corpora" / "texts").exists()}
    made |= {"growth": (folder / "grown" / RUNS[1]).exists()}
    kind = rng.choice([k for k in reference.operations if not made.get(k)])
    number = rng.randint(1, reference.operations[kind])
    return Kill(trigger, rng.random() * AFTER_S * (trigger == "after"), number, kind)


def live(folder: Path, kill: Kill | None) -> int:
    """Run the chain in a forked child; how it ended: 0, a number > 0, or -9 when killed."""
    signalled, signal_now = os.pipe()

    def run() -> None:
        if kill and kill.number:
            on_operation(folder, countdown(kill, signal_now))
        chain(folder)

    pid = fork(run, folder)
    child = os.pidfd_open(pid)
    try:
        patience = kill.seconds if kill and kill.trigger == "time" else PATIENCE_S
        ready = select.select([child, signalled], [], [], patience)[0]
        if signalled in ready:
            time.sleep(kill.seconds)
        if child not in ready:
            os.kill(pid, signal.SIGKILL)
    finally:
        status = os.waitpid(pid, 0)[1]
        for handle in (child, signalled, signal_now):
            os.close(handle)
    return os.waitstatus_to_exitcode(status)


def fork(function: Callable[[], None], folder: Path) -> int:
    """Call `function` in a child of this process (torch is imported already); the child's pid."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(
            folder.with_name(f"{folder.name}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never back into the parent's loop


def finishes(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def countdown(kill: Kill, signal_now: int) -> Callable[[str], None]:
    """At the number-th call for the kill's kind: die before the operation happens, or tell the
    parent through the pipe `signal_now`."""
    left = [kill.number]

    def count(kind: str) -> None:
        left[0] -= kind == kill.kind
        if left[0] == 0 and kind == kill.kind:
            if kill.trigger == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(signal_now, b"!")

    return count


def on_operation(folder: Path, call: Callable[[str], None]) -> None:
    """Call call(kind) in this process before each file operation that writes below `folder`."""

    def hook(event: str, values: tuple) -> None:
        if event == "open":
            path, mode, _ = values
            if mode is not None and set(mode) <= set("rbt"):
                return
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            path = values[0]
        else:
            return
        kind = kind_of(folder, os.fsdecode(path)) if isinstance(path, (str, bytes, Path)) else None
        if kind:
            call(kind)

    sys.addaudithook(hook)


def kind_of(folder: Path, path: str) -> str | None:
    """The kind of what lies at `path`; None for what is no part of the chain."""
    if not os.path.isabs(path):  # shutil.rmtree, which works relative to open folders
        return "checkpoint"
    parts = Path(path).parts[len(folder.parts) :] if path.startswith(f"{folder}/") else ()
    if len(parts) < 2:
        return None
    kinds = {"corpora": "shards", "grown": "growth", "rows": "row", "runs": "log"}
    kinds |= {"published": "published"}
    if parts[0] == "runs" and any(word in part for word in ("step_", "final") for part in parts):
        return "checkpoint"
    return kinds.get(parts[0])


# ---- checks


def debris(folder: Path) -> str:
    """What a killed chain was writing, as its temporary files tell."""
    for path in sorted(folder.rglob(".*")):
        if is_temporary(path) and (kind := kind_of(folder, str(path))):
            return kind
    return "compute"


def is_temporary(path: Path) -> bool:
    return files.TEMPORARY.fullmatch(path.name) is not None


def check_killed(folder: Path, reference: Reference, newest: dict[str, int]) -> list[str]:
    """What is wrong after a kill; `newest`, the newest saved step by run, is brought up to date."""
    wrong = []

    def attempt(what: str, read: Callable[[], object]) -> object:
        try:
            return read()
        except (UserError, ValueError, KeyError, OSError) as error:
            wrong.append(f"half-written {what}: {error}")

    data = folder / "corpora" / "texts"
    if data.exists():
        attempt("corpus", lambda: Corpus(data, verify="hash"))
    if published(folder).exists():
        attempt("table", lambda: pd.read_csv(published(folder) / "table.csv"))
        attempt("published rows", lambda: load_rows(published(folder)))
    for run in RUNS:
        place, expected = folder / "runs" / run, reference.results[run]
        row = folder / "rows" / f"{run}.json"
        if row.exists() and attempt("row", lambda row=row: read(row)) not in (
            None,
            expected["row"],
        ):
            wrong.append(f"{row.name} is not the row of an uninterrupted run")
        for name in ("config.json", "progress.json", "done.json"):
            if (place / name).exists():
                attempt(name, lambda path=place / name: read(path))
        folders = [*checkpoint.steps(place), place / "final", folder / "grown" / run]
        for path in filter(Path.exists, folders):
            attempt(path.name, lambda path=path: checkpoint.load(path))
        steps = [int(path.name[5:]) for path in checkpoint.steps(place)]
        steps += [1 << 60] if (place / "done.json").exists() else []
        if max(steps, default=-1) < newest[run]:
            wrong.append(f"{run}: step {newest[run]} was saved and is lost")
        newest[run] = max(steps, default=-1)
    return wrong


def check_finished(folder: Path, reference: Reference) -> list[str]:
    """How a finished chain differs from the one that was left alone."""
    try:
        found = results(folder)
    except (UserError, OSError, ValueError) as error:
        return [f"no readable result: {error}"]
    wrong = [
        f"{run}: {part} differ from those of an uninterrupted run"
        for run in RUNS
        for part in found[run]
        if found[run][part] != reference.results[run][part]
    ]
    rest = [p for p in folder.rglob(".*") if is_temporary(p)]
    rest += [p for run in RUNS for p in checkpoint.steps(folder / "runs" / run)]
    return wrong + [f"left behind: {p.relative_to(folder)}" for p in rest]


# ---- report


def to_markdown(report: dict) -> str:
    failures, hardware_name = report["failures"], report["hardware"].get("cpu", "a GPU")
    commit = (report["commit"] or "unknown")[:12] + (" + changes" if report["dirty"] else "")
    verdict = (
        "Nothing half-written was found under a real name, no saved step was lost; final weights, "
        "Adam moments, metrics and rows are bitwise those of an uninterrupted chain; no temporary "
        "file is left."
    )
    lines = [
        "# Crash test",
        "",
        f"`{report['command']}` (commit {commit}; {report['wall_s']:.0f} s on {hardware_name}, "
        f"torch {report['versions']['torch']})",
        "",
        f"{report['kills']} kills with SIGKILL in {report['chains']} chains (corpus, parent, "
        f"growth, child, rows, published rows; {report['chain_s']:.1f} s each when left alone): "
        f"**{len(failures)} failures**. {'' if failures else verdict}",
        "",
        f"| while writing | {' | '.join(TRIGGERS.values())} | kills |",
        f"|---|{'---:|' * len(TRIGGERS)}---:|",
    ]
    total = Counter()
    for kind, n in report["by_kind"].items():
        total.update(n)
        cells = [*map(str, n.values()), str(sum(n.values()))]
        lines.append(f"| {KINDS[kind]} | {' | '.join(cells)} |")
    lines.append(f"| all | {' | '.join(str(total[t]) for t in TRIGGERS)} | {sum(total.values())} |")
    lines += ["", *(f"- {failure}" for failure in failures)] if failures else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    exit_on_user_error(main)
