"""Run a grid on Slurm: arrays of independent runs, each started when its parents have succeeded."""

import json
import os
import shlex
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields
from pathlib import Path

import submitit
from submitit.helpers import clean_env, environment_variables

import files
from cluster.code import code_env, snapshot, start_in
from cluster.job import (
    TARGET,
    Job,
    RunJob,
    Status,
    job_folder,
    last_line,
    longest_first,
    outcome,
    read_note,
    scheduler_lock,
    state_file,
)
from cluster.local import thread_env
from errors import UserError

SHORT_MIN = 10  # submitit takes every signal for a time-out in jobs that are not longer than this
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
ENDED += ("DEADLINE", "PREEMPTED")


@dataclass(frozen=True)
class SlurmConfig:
    """What Slurm is asked for, per run; a TOML or JSON file with these names (--slurm-config)."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gres: str = ""  # e.g. "gpu:a100:1"; or gpus_per_node
    gpus_per_node: int = 0
    nodes: int = 1
    tasks_per_node: int = 1  # more than one: DDP, one rank per task, started by srun
    cpus_per_task: int = 2
    mem_gb: int = 0  # 0: the partition's default
    minutes: int = 240  # time limit; a run that needs longer is requeued and goes on
    signal_s: int = 0  # warning before the limit, seconds; 0: a tenth of the limit, 5 to 120
    max_timeouts: int = 0  # requeues after a time-out; 0: 20 (1000 for limits up to 10 minutes)
    parallel: int = 64  # runs of one array at a time
    setup: tuple[str, ...] = ()  # shell lines before the run, e.g. "module load cuda"
    extra: dict = field(default_factory=dict)  # further sbatch options, e.g. {"reservation": "x"}
    python: str = ""  # "": the interpreter that submits

    def parameters(self, code: Path, after: list[str]) -> dict:
        """submitit's parameters for runs that start after the jobs `after` have succeeded."""
        named = ("partition", "account", "qos", "constraint", "gres", "gpus_per_node", "nodes")
        options = {name: getattr(self, name) or None for name in named}
        setup = [f"cd {shlex.quote(str(start_in(code)))}"] if start_in(code) else []
        setup += [f"export {k}={shlex.quote(v)}" for k, v in code_env(code).items()]
        setup += [f"export {k}={v}" for k, v in thread_env(self.cpus_per_task).items()]
        extra = {"requeue": True, "kill-on-invalid-dep": "yes", **self.extra}
        return {
            **options,
            "job_name": "ablation",
            "time": self.minutes,
            "ntasks_per_node": self.tasks_per_node,
            "cpus_per_task": self.cpus_per_task,
            # cpus are not inherited since 22.05; when a rank dies the others end a minute later
            "srun_args": [f"--cpus-per-task={self.cpus_per_task}", "--wait=60"],
            "mem": f"{self.mem_gb}GB" if self.mem_gb else None,
            "signal_delay_s": self.signal_s or max(5, min(120, self.minutes * 6)),
            "array_parallelism": self.parallel,
            "dependency": "afterok:" + ":".join(after) if after else None,
            "setup": [*self.setup, *setup],
            "stderr_to_stdout": True,
            "wckey": None,
            "additional_parameters": extra,
        }


def load_config(path: Path | None) -> SlurmConfig:
    """Read a SlurmConfig from TOML or JSON; an unknown name or a wrong type is a UserError."""
    if path is None:
        return SlurmConfig()
    try:
        with open(path) as file:
            text = file.read(1 << 20)  # real ones are a few lines
        data = json.loads(text) if str(path).endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {error}; write TOML or JSON, see slurm/config.toml") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, not named settings; see slurm/")
    types = {f.name: type(getattr(SlurmConfig(), f.name)) for f in fields(SlurmConfig)}
    for name, value in data.items():
        if name not in types:
            raise UserError(f"{path}: unknown setting {name}; choose from {', '.join(types)}")
        if types[name] is tuple and isinstance(value, list):
            data[name] = value = tuple(map(str, value))
        if type(value) is not types[name] or (types[name] is int and not 0 <= value <= 10**6):
            kind = f"{types[name].__name__} >= 0" + " and <= 1000000" * (types[name] is int)
            raise UserError(f"{path}: {name} = {repr(value)[:80]} must be a {kind}")
        if isinstance(value, str) and not value.isprintable():
            raise UserError(f"{path}: {name} = {value[:80]!r} must be one printable line")
    return SlurmConfig(**data)


def check_slurm(config: SlurmConfig, gpu_preset: str = "") -> None:
    """UserError where nothing can be submitted, or where `gpu_preset` would get no GPU."""
    if not shutil.which("sbatch"):
        raise UserError("sbatch not found: submit from a Slurm login node, or use --local")
    if gpu_preset and not (config.gres or config.gpus_per_node):
        raise UserError(
            f"preset {gpu_preset} needs a GPU per run and the Slurm settings name none; give "
            f"--slurm-config FILE with gpus_per_node = 1 (see slurm/config.toml)"
        )


def submit_slurm(
    out: Path,
    jobs: list[Job],
    config: SlurmConfig,
    is_done: Callable[[str], bool],
    target: str = TARGET,
    prepare: Callable[[Container[str]], object] = lambda live: None,
) -> list[str]:
    """Submit what is neither done nor in the queue; returns the run_ids submitted. `prepare` is
    called once the folder is locked, with the run_ids in the queue.

    Runs with the same unfinished parents form one array, which starts when all of them succeeded.
    Runs whose parents are neither done, queued nor in `jobs` are left out. Job ids and logs are
    kept in `<out>/slurm_jobs.json`.
    """
    check_slurm(config)
    out = Path(out).resolve()
    with scheduler_lock(out):
        files.sweep(out, mine="slurm_jobs.json")
        record, code = read_note(out / "slurm_jobs.json"), snapshot(out)
        ids = {run_id: record[run_id]["job_id"] for run_id in _queue(record)}
        prepare(ids.keys())
        todo = longest_first([j for j in jobs if j.run_id not in ids and not is_done(j.run_id)])
        parents = {j.run_id: [p for p in j.needs if not is_done(p)] for j in todo}
        submitted: list[str] = []
        while ready := [j for j in todo if ids.keys() >= set(parents[j.run_id])]:
            after = parents[ready[0].run_id]
            group = [j for j in ready if parents[j.run_id] == after]
            sent = _submit_array(out, group, config, code, [ids[p] for p in after], target)
            ids |= {run_id: entry["job_id"] for run_id, entry in sent.items()}
            record |= sent
            files.write_json(out / "slurm_jobs.json", record)
            submitted += sent
            todo = [j for j in todo if j.run_id not in sent]
    return submitted


def _submit_array(
    out: Path, group: list[Job], config: SlurmConfig, code: Path, after: list[str], target: str
) -> dict[str, dict]:
    executor = submitit.SlurmExecutor(
        folder=out / "jobs" / "slurm",
        max_num_timeout=config.max_timeouts or (1000 if config.minutes <= SHORT_MIN else 20),
        python=config.python or None,
    )
    executor.update_parameters(**config.parameters(code, after))
    for job in group:
        files.write_json(state_file(out, job.run_id), {"state": "queued"})
    runs = [RunJob(str(out), job.run_id, job.spec, target) for job in group]
    # SLURM_CONF is not a trace of the job that may be submitting: it names the cluster
    keep = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    try:
        with clean_env(), environment_variables(**keep):
            sent = executor.submit_array(runs)
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"sbatch refused the job: {error}; see --slurm-config") from None
    entries = [{"job_id": job.job_id, "log": str(job.paths.stdout)} for job in sent]
    about = {"code": str(code), "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return {job.run_id: {**entry, **about} for job, entry in zip(group, entries, strict=True)}


def _queue(record: dict[str, dict]) -> dict[str, tuple[str, str]]:
    """run_id -> (Slurm's state, reason) of the recorded jobs that have not ended."""
    rows = _squeue() if record else {}
    known = {run_id: rows.get(entry["job_id"]) for run_id, entry in record.items()}
    return {run_id: row for run_id, row in known.items() if row and row[0] not in ENDED}


def _squeue() -> dict[str, tuple[str, str]]:
    """Job id -> (state, reason) of this user's jobs, the ended ones that Slurm still knows too."""
    command = ["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{error}: squeue must work here to know the queue") from None
    if done.returncode:
        raise UserError(f"squeue does not answer: {done.stderr}; try again when Slurm is up")
    rows = (line.split("|") for line in done.stdout.splitlines())
    return {job_id: (state, reason) for job_id, state, reason in rows}


def status(out: Path, jobs: list[Job], is_done: Callable[[str], bool]) -> dict[str, Status]:
    """The state of every run, local or Slurm: result files first, then the queue and the notes."""
    out = Path(out).resolve()
    record = read_note(out / "slurm_jobs.json")
    rows = _squeue() if record else {}
    states: dict[str, Status] = {}
    for job in longest_first(jobs):
        entry = record.get(job.run_id, {})
        slurm = rows.get(entry.get("job_id"))
        states[job.run_id] = _status(out, job, is_done, entry, slurm)
        failed = [p for p in job.needs if p in states and states[p].state == "failed"]
        if failed and states[job.run_id].state != "done":
            states[job.run_id] = Status("failed", f"parent {failed[0]} failed")
    return {job.run_id: states[job.run_id] for job in jobs}


def _status(out, job, is_done, entry: dict, slurm: tuple[str, str] | None) -> Status:
    note = read_note(state_file(out, job.run_id))
    log = note.get("log") or entry.get("log", "")
    if is_done(job.run_id):
        return Status("done", log=log)
    if slurm and slurm[0] not in ENDED:
        state = "queued" if slurm[0] in ("PENDING", "CONFIGURING", "REQUEUED") else "running"
        return Status(state, slurm[1].replace("None", "") if state == "queued" else "", log)
    if files.is_locked(job_folder(out, job.run_id) / "lock"):  # a local run
        return Status("running", log=log)
    if not note:
        return Status("queued", "not submitted")
    if note["state"] != "failed" and slurm:
        said = f": {last_line(log)}" if note["state"] == "queued" and last_line(log) else ""
        return Status("failed", f"Slurm: {slurm[0]}{said}", log)
    return outcome(out, job.run_id, is_done, log)


def cancel(out: Path, run_ids: list[str] | None = None) -> list[str]:
    """scancel the given runs, or all that are queued or running (these save first)."""
    record = read_note(Path(out) / "slurm_jobs.json")
    live = [run_id for run_id in _queue(record) if run_ids is None or run_id in run_ids]
    if live:
        subprocess.run(["scancel", *(record[run_id]["job_id"] for run_id in live)], check=True)
    return live
