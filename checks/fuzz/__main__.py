"""Bad inputs by the hundred: options, files of every kind, result rows, settings, environments.

    python -m checks.fuzz --cases 300 --seed 0

Every case must end in one useful line ("error: ...", exit 2, nothing written) or in a run whose
result is right; within 5 s of CPU time and 1 GB, without a write outside its folder, without a
pickle. Writes results/fuzz.json (every case) and results/fuzz.md; exits 1 if there is a fault.
Some cases are run a second time as real commands; those of odd environments are nothing else.
hypothesis draws the cases.
"""

import importlib
import os
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from errors import UserError, exit_on_user_error, read_command_line
from settings import Range, check

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FuzzConfig:
    """How many bad inputs, which ones, and how many also as real commands."""

    cases: Annotated[int, Range(1, 10**6)] = 300
    seed: Annotated[int, Range(0)] = 0
    real: Annotated[int, Range(0)] = 12
    out: Path = ROOT / "results"
    only: str = ""  # cases whose group or name holds this text

    def __post_init__(self):
        check(self)


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(FuzzConfig, __doc__))

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch
from tqdm import tqdm

from checks.fuzz import files, options
from checks.fuzz.judge import Case, Verdict, judge
from checks.fuzz.world import make_world
from files import write_json, write_text
from provenance import provenance

GROUPS = {  # world -> cases: its share of them
    options.training: 4,
    options.grid: 4,
    options.growth: 3,
    options.preparation: 2,
    files.checkpoints: 6,
    files.hugging_face: 4,
    files.corpora: 4,
    files.texts: 2,
    files.rows: 4,
    files.publishing: 2,
    files.grid_folders: 1,
    files.run_folders: 3,
    files.environments: 2,
    files.slurm_settings: 2,
}
# imported before the cases start, so that a case pays only for what it does
MODULES = "train grow run_ablations analysis.publish analysis.aggregate analysis.claims"
MODULES += " figures.loss_curves figures.loss_table growth.child models.convert data.prepare"
MODULES += " pyarrow.parquet transformers.models.gpt2.modeling_gpt2"


def main() -> None:
    cfg = read_command_line(FuzzConfig, __doc__)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        found = report(cfg, *sweep(cfg, Path(place)))
    write_json(cfg.out / "fuzz.json", found)
    write_text(cfg.out / "fuzz.md", markdown(found))
    print(markdown(found))
    sys.exit(1 if found["faults"] else 0)


def sweep(cfg: FuzzConfig, place: Path) -> tuple[list[Verdict], list[Verdict]]:
    """Judge every case in a fork of this process, and some of them as real commands."""
    world = make_world(place / "world")
    torch.set_num_threads(1)
    for name in MODULES.split():
        importlib.import_module(name)
    cases = [c for c in draw(cfg.cases, cfg.seed, world) if cfg.only in c.group + c.name]
    if not cases:
        raise UserError(f"--only is {cfg.only!r}, which no case is named; leave it out")
    tqdm.set_lock(threading.RLock())  # its own is shared: a child killed with it would keep it
    verdicts = [judge(case, place) for case in tqdm(cases, unit="case", delay=1)]
    step = max(1, len(cases) // max(1, cfg.real))
    sample = [c for c in cases[step // 2 :: step] if c.is_command][: cfg.real]
    return verdicts, [judge(c, place, real=True) for c in tqdm(sample, unit="command", delay=1)]


def draw(n: int, seed: int, world: Path) -> list[Case]:
    """Cases of every group, by its share, the same for the same seed; no two are drawn alike."""
    total, found = sum(GROUPS.values()), []
    for group, share in GROUPS.items():
        given = hypothesis.given(group(world))(lambda case: found.append(case))
        given = hypothesis.settings(
            max_examples=max(1, -(-n * share // total)), database=None, deadline=None,
            phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
        )(hypothesis.seed(seed)(given))  # fmt: skip
        given()
    return found


# ---- the report


def report(cfg: FuzzConfig, verdicts: list[Verdict], real: list[Verdict]) -> dict:
    """Everything in fuzz.json: counts, extremes, every case with the line that the user reads."""
    groups = {v.group: Counter(refused=0, ran=0, faults=0) for v in verdicts}
    for verdict in verdicts:
        groups[verdict.group]["faults" if verdict.fault else verdict.outcome] += 1
    inside = [v for v in verdicts if v.group != "environments"]  # which all are commands
    commands = real + [v for v in verdicts if v.group == "environments"]

    def count(verdicts: list[Verdict]) -> dict:
        return {"cases": len(verdicts), "faults": sum(bool(v.fault) for v in verdicts)}

    def most(field: str, verdicts: list[Verdict]) -> float:
        return max((getattr(v, field) for v in verdicts), default=0)

    cpu = {"most_cpu_s": most("cpu_s", commands)}
    return {
        "command": f"python -m checks.fuzz --cases {cfg.cases} --seed {cfg.seed}",
        **provenance(),
        "cases": len(verdicts),
        "faults": count(verdicts + real)["faults"],
        "groups": groups,
        "most_cpu_s": most("cpu_s", inside),
        "most_memory_mb": most("memory_mb", inside),
        "commands": {**count(commands), **cpu, "list": [asdict(v) for v in real]},
        "list": [asdict(v) for v in verdicts],
    }


def markdown(found: dict) -> str:
    """The counts by group, then what the user reads: one example of each group, and each fault."""
    real, examples = found["commands"], {}
    for record in found["list"]:  # the first refusal of each group that is short enough to show
        if record["outcome"] == "refused" and not record["fault"] and len(record["line"]) < 170:
            examples.setdefault(record["group"], record)
    faults = [record for record in [*found["list"], *real["list"]] if record["fault"]]
    counts = [
        f"| {name} | {c['refused']} | {c['ran']} | {c['faults']} |"
        for name, c in found["groups"].items()
    ]
    shown = [f"- {r['name'][:120]}: `{r['line'][:300]}` **{r['fault']}**" for r in faults]
    return f"""# Bad inputs

`{found["command"]}`: {found["cases"]} bad inputs, **{found["faults"]} faults**.

Refused: exit 2, one line "error: ..." that names the value or the file, nothing written.
Ran: the damage did not matter (a field that nothing reads, a checkpoint that is skipped
for an older one) and the result was checked. A fault is anything else: a traceback, more
than 5 s of CPU time or 1 GB, a write elsewhere, an unpickled class, a wrong result.

| what was bad | refused | ran | faults |
| --- | ---: | ---: | ---: |
{chr(10).join(counts)}

Most CPU time of a case {found["most_cpu_s"]} s, most memory on top of the imports \
{found["most_memory_mb"]} MB.
{real["cases"]} cases as real commands (odd environments, and some of the others again), imports \
included: {real["faults"]} faults, at most {real["most_cpu_s"]} s of CPU time.

What the user reads (fuzz.json has every case):

{chr(10).join(f"- {r['name'][:120]}: `{r['line'][:300]}`" for r in examples.values())}
{chr(10).join(["", "## Faults", "", *shown, ""]) if shown else ""}"""


if __name__ == "__main__":
    exit_on_user_error(main)
