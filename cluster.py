"""Start runs through submitit: local processes or Slurm jobs, children after their parents.

A scheduler (`run_local`, or `submit_slurm` and Slurm itself) starts each run as a `RunJob` in its
own process, from a copy of the code taken at submission. What happened is read from files: the
caller's `is_done(run_id)` first, then `<out>/jobs/<run_id>/state.json`, which the job writes, then
the queue. Nothing is unpickled here, and nothing depends on what Slurm accounting remembers.

A run that is asked to stop saves within one step and raises `Interrupted` with its `signum`:
  SIGUSR1, SIGUSR2  Slurm's warning before the time limit or a preemption: saved, then requeued
                    by submitit's own handler, which counts time-outs;
  SIGTERM           saved; requeued only while Slurm still calls the job RUNNING (a preemption with
                    a grace time), for `scancel` sends it too. Local: saved and stopped.
A requeued job finds its newest checkpoint itself.
"""

import fcntl
import hashlib
import importlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import submitit
import tomllib
from submitit.helpers import TorchDistributedEnvironment, clean_env, environment_variables

from errors import UserError

ROOT = Path(__file__).resolve().parent
TARGET = "run_ablations:execute"  # called in the job as execute(out, run_id, spec)
POLL_S = 0.25  # pause between two looks at the local jobs
GRACE_S = 60.0  # a run may take this long to finish its step and save before it is killed
LOCK_WAIT_S = 30.0  # a rerun waits this long for a predecessor that is still saving
SHORT_MIN = 10  # submitit takes every signal for a time-out in jobs that are not longer than this
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
ENDED += ("DEADLINE", "PREEMPTED")


@dataclass(frozen=True)
class Job:
    """One run: `needs` are the run_ids that must be done first, `spec` is plain JSON data."""

    run_id: str
    spec: dict = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    minutes: float = 0.0  # estimate; the longest chain of runs is started first


@dataclass(frozen=True)
class Status:
    """state: queued, running, done or failed; `log` is the run's output, "" before it has one."""

    state: str
    reason: str = ""
    log: str = ""


# ---------------------------------------------------------------- inside a job


class RunJob:
    """What submitit pickles: names only, so that a requeued job looks for its checkpoint afresh."""

    def __init__(self, out: str, run_id: str, spec: dict, target: str = TARGET, scheduler: int = 0):
        self.out, self.run_id, self.spec = out, run_id, spec
        self.target, self.scheduler = target, scheduler  # scheduler: pid to stop with (local), or 0

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What a requeue runs: the same call again."""
        return submitit.helpers.DelayedSubmission(self)

    def __call__(self) -> None:
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's handler: requeues and exits
        signal.signal(signal.SIGUSR1, requeue)
        signal.signal(signal.SIGTERM, lambda *_: _leave(signal.SIGTERM, requeue))
        env = submitit.JobEnvironment()
        if self.scheduler:
            _stop_with(self.scheduler, os.getppid())
        if env.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        first = env.global_rank == 0
        note = self._note if first else lambda *_: None
        try:
            with _hold(job_folder(self.out, self.run_id) / "lock") if first else nullcontext():
                note("running")
                self._execute(requeue)
            note("done")
        except Exception as error:
            user = isinstance(error, UserError)
            note("failed", str(error) if user else f"{type(error).__name__}: {error}")
            raise

    def _execute(self, requeue: Callable) -> None:
        module, function = self.target.split(":")
        try:
            getattr(importlib.import_module(module), function)(self.out, self.run_id, self.spec)
        except Exception as error:
            if type(error).__name__ != "Interrupted":  # train's; its import here would cost seconds
                raise
            _leave(error.signum, requeue)

    def _note(self, state: str, reason: str = "") -> None:
        env = submitit.JobEnvironment()
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        where = {"host": socket.gethostname(), "pid": os.getpid(), "job_id": env.job_id}
        data = {"state": state, "reason": " ".join(reason.split()), "log": str(env.paths.stdout)}
        write_json(state_file(self.out, self.run_id), {**data, **where, "restarts": restarts})


def _leave(signum: int, requeue: Callable) -> None:
    """End this job after it saved; requeue it unless it is being cancelled. Does not return."""
    if signum != signal.SIGTERM or _slurm_says_running():
        requeue(signal.SIGUSR2, None)  # returns in tasks other than the first: they just end
        sys.exit(0)
    sys.exit(128 + signum)


def _slurm_says_running() -> bool:
    if "SLURM_JOB_ID" not in os.environ:
        return False
    command = ["squeue", "-h", "-o", "%T", "-j", submitit.JobEnvironment().job_id]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "RUNNING"


def _stop_with(*pids: int) -> None:
    """Stop this process (SIGTERM, later SIGKILL) when one of `pids` ends, be it by kill -9."""

    def watch() -> None:
        try:
            select.select([os.pidfd_open(pid) for pid in pids], [], [])
        except ProcessLookupError:  # it has ended already
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------- files


def job_folder(out: str | Path, run_id: str) -> Path:
    """`<out>/jobs/<run_id>`, made if it is missing."""
    folder = Path(out) / "jobs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def state_file(out: str | Path, run_id: str) -> Path:
    return job_folder(out, run_id) / "state.json"


def write_json(path: Path, data: dict) -> None:
    """Atomic: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


@contextmanager
def _hold(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold a lock that the kernel frees when its process ends, however it ends."""
    deadline = time.monotonic() + wait_s
    with open(path, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = path.read_text().strip()
                    raise UserError(f"{path} is held by {holder}: wait for it or stop it") from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _held(path: Path) -> bool:
    """Whether a live process holds the lock."""
    try:
        with _hold(path, wait_s=0):
            return False
    except UserError:
        return True


def snapshot(out: Path) -> Path:
    """Copy the program to `<out>/code/<hash>`, so that later edits do not reach queued runs."""
    sources = {path: (ROOT / path).read_bytes() for path in _sources()}
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:12]
    folder = out / "code" / digest
    if folder.exists():
        return folder
    temporary = out / "code" / f".{digest}.{os.getpid()}"
    for path, content in sources.items():
        (temporary / path).parent.mkdir(parents=True, exist_ok=True)
        (temporary / path).write_bytes(content)
    write_json(temporary / "snapshot.json", code_version())
    os.replace(temporary, folder)
    return folder


def _sources() -> list[str]:
    """The program's *.py, relative to the root: what git does not ignore, or all without git."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", "*.py")
    if listed is not None:
        return sorted(path for path in listed.splitlines() if (ROOT / path).exists())
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    own = [p for p in paths if p.parts[0] not in ("runs", "out") and not str(p).startswith(".")]
    return sorted(map(str, own))


def code_version() -> dict:
    """{"commit", "dirty"} of the code that runs here, be it the repository or a snapshot of it."""
    if (ROOT / "snapshot.json").exists():
        return read_json(ROOT / "snapshot.json")
    changed = _git("status", "--porcelain", "--", "*.py")
    return {"commit": (_git("rev-parse", "HEAD") or "").strip() or None, "dirty": changed != ""}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 and (ROOT / ".git").exists() else None


# ---------------------------------------------------------------- local


def run_local(
    out: Path,
    jobs: list[Job],
    n_jobs: int,
    is_done: Callable[[str], bool],
    on_progress: Callable[[dict[str, Status]], None] = lambda states: None,
    gpus: tuple[int, ...] = (),
    target: str = TARGET,
) -> dict[str, Status]:
    """Run all jobs that are not done, at most `n_jobs` at a time; returns their last states.

    Each run gets cores // n_jobs threads, and one of `gpus` in turn. Ctrl-C or SIGTERM lets the
    runs save and stop, then exits with 128 + signal; a second one kills them. If this process is
    killed outright, its runs save and stop by themselves.
    """
    out = Path(out).resolve()
    job_folder(out, "")
    with _hold(out / "jobs" / "scheduler.lock", wait_s=2), _caught_signals() as caught:
        grid = _LocalGrid(out, jobs, n_jobs, is_done, gpus, target)
        while True:
            grid.collect()
            if caught:
                grid.stop(hard=len(caught) > 1)
            else:
                grid.start_ready()
            on_progress(dict(grid.states))
            if not grid.live:
                break
            time.sleep(POLL_S)
    if caught:
        sys.exit(128 + caught[0])
    return grid.states


class _LocalGrid:
    """The state of every run, and the live ones: run_id -> (submitit job, slot)."""

    def __init__(self, out, jobs, n_jobs, is_done, gpus, target):
        self.out, self.n_jobs, self.gpus, self.target = out, n_jobs, gpus, target
        self.is_done, self.code, self.told_at = is_done, snapshot(out), 0.0
        self.live: dict[str, tuple[submitit.Job, int]] = {}
        self.waiting = longest_first([job for job in jobs if not is_done(job.run_id)])
        self.states = {job.run_id: Status("done") for job in jobs}
        self.states |= {job.run_id: Status("queued") for job in self.waiting}

    def collect(self) -> None:
        """Note what became of the runs that ended."""
        for run_id, (job, _) in list(self.live.items()):
            if job.done():
                del self.live[run_id]
                self.states[run_id] = _outcome(self.out, run_id, self.is_done)
            else:
                self.states[run_id] = Status("running", log=str(job.paths.stdout))

    def start_ready(self) -> None:
        """Fill the free slots; a run whose parent failed fails with it."""
        for job in list(self.waiting):
            parents = {run_id: self._state(run_id) for run_id in job.needs}
            failed = [run_id for run_id, state in parents.items() if state == "failed"]
            if failed:
                self.states[job.run_id] = Status("failed", f"parent {failed[0]} failed")
            elif len(self.live) < self.n_jobs and set(parents.values()) <= {"done"}:
                self._start(job)
            else:
                continue
            self.waiting.remove(job)

    def _state(self, run_id: str) -> str:
        if run_id in self.states:
            return self.states[run_id].state
        return "done" if self.is_done(run_id) else "failed"  # a parent outside this grid

    def _start(self, job: Job) -> None:
        slot = min(set(range(self.n_jobs)) - {slot for _, slot in self.live.values()})
        executor = submitit.LocalExecutor(job_folder(self.out, job.run_id))
        executor.update_parameters(timeout_min=60 * 24 * 365, stderr_to_stdout=True)
        if self.gpus:
            gpu = self.gpus[slot % len(self.gpus)]
            executor.update_parameters(gpus_per_node=1, visible_gpus=(gpu,))
        write_json(state_file(self.out, job.run_id), {"state": "queued"})
        run = RunJob(str(self.out), job.run_id, job.spec, self.target, scheduler=os.getpid())
        threads = max(1, len(os.sched_getaffinity(0)) // self.n_jobs)
        env = {**_code_env(self.code), **_thread_env(threads)}
        with clean_env(), environment_variables(**env), _blocked_signals():
            self.live[job.run_id] = executor.submit(run), slot
        self.states[job.run_id] = Status("running", log=str(self.live[job.run_id][0].paths.stdout))

    def stop(self, hard: bool) -> None:
        """Ask the runs to save and stop; again every 2 s, for a run may not listen yet."""
        if not hard and time.monotonic() - self.told_at < 2:
            return
        self.told_at = time.monotonic()
        for job, _ in self.live.values():
            with suppress(ProcessLookupError):  # a local job's id is the pid of its controller
                os.kill(int(job.job_id), signal.SIGKILL if hard else signal.SIGTERM)


def longest_first(jobs: list[Job]) -> list[Job]:
    """Order by the minutes of the longest chain that starts with the run: parents come first."""
    known, chain = {job.run_id: job for job in jobs}, {job.run_id: 0.0 for job in jobs}

    def visit(job: Job, after: float, depth: int) -> None:
        if depth > len(jobs):
            raise UserError(f"run {job.run_id} needs itself: mend the grid's parents")
        length = after + max(job.minutes, 1e-3)
        if length > chain[job.run_id]:
            chain[job.run_id] = length
            for parent in job.needs:
                if parent in known:
                    visit(known[parent], length, depth + 1)

    for job in jobs:
        visit(job, 0.0, 0)
    return sorted(jobs, key=lambda job: -chain[job.run_id])


def _outcome(out: Path, run_id: str, is_done: Callable[[str], bool]) -> Status:
    """What the files say of a run that no longer runs."""
    note = read_json(state_file(out, run_id))
    log = note.get("log", "")
    if is_done(run_id):
        return Status("done", log=log)
    reason = note.get("reason") or {"done": "ended without a result"}.get(note.get("state"))
    return Status("failed", reason or "stopped before it was done (killed? out of memory?)", log)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and a closed terminal in a list instead of dying of them."""
    caught: list[int] = []
    names = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    names = [name for name in names if signal.getsignal(name) != signal.SIG_IGN]  # nohup stays
    before = {name: signal.signal(name, lambda n, _: caught.append(n)) for name in names}
    try:
        yield caught
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Processes started here never see the terminal's Ctrl-C: the scheduler tells them to stop.

    (submitit's local controller would kill its task one second after a Ctrl-C.)
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _code_env(code: Path) -> dict[str, str]:
    """Import from `code`, and not from the folder in which the command was given."""
    path = f"{code}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(code)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _thread_env(threads: int) -> dict[str, str]:
    return {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}


# ---------------------------------------------------------------- Slurm


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
        setup = [f"export {k}={shlex.quote(v)}" for k, v in _code_env(code).items()]
        setup += [f"export {k}={v}" for k, v in _thread_env(self.cpus_per_task).items()]
        extra = {"requeue": True, "kill-on-invalid-dep": "yes", **self.extra}
        return {
            **options,
            "job_name": "ablation",
            "time": self.minutes,
            "ntasks_per_node": self.tasks_per_node,
            "cpus_per_task": self.cpus_per_task,
            "srun_args": [f"--cpus-per-task={self.cpus_per_task}"],  # not inherited since 22.05
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
        text = Path(path).read_text()
        data = json.loads(text) if str(path).endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; write TOML or JSON, see slurm/config.toml") from None
    types = {f.name: type(getattr(SlurmConfig(), f.name)) for f in fields(SlurmConfig)}
    for name, value in data.items():
        if name not in types:
            raise UserError(f"{path}: unknown setting {name}; choose from {', '.join(types)}")
        if types[name] is tuple and isinstance(value, list):
            data[name] = value = tuple(map(str, value))
        if type(value) is not types[name] or (types[name] is int and value < 0):
            raise UserError(f"{path}: {name} = {value!r} must be a {types[name].__name__} >= 0")
    return SlurmConfig(**data)


def submit_slurm(
    out: Path,
    jobs: list[Job],
    config: SlurmConfig,
    is_done: Callable[[str], bool],
    target: str = TARGET,
) -> list[str]:
    """Submit what is neither done nor in the queue; returns the run_ids submitted.

    Runs with the same unfinished parents form one array, which starts when all of them succeeded.
    Runs whose parents are neither done, queued nor in `jobs` are left out. Job ids and logs are
    kept in `<out>/slurm_jobs.json`.
    """
    out = Path(out).resolve()
    job_folder(out, "")
    with _hold(out / "jobs" / "scheduler.lock", wait_s=2):
        record, code = read_json(out / "slurm_jobs.json"), snapshot(out)
        ids = {run_id: record[run_id]["job_id"] for run_id in _queue(record)}
        todo = longest_first([j for j in jobs if j.run_id not in ids and not is_done(j.run_id)])
        parents = {j.run_id: [p for p in j.needs if not is_done(p)] for j in todo}
        submitted: list[str] = []
        while ready := [j for j in todo if ids.keys() >= set(parents[j.run_id])]:
            after = parents[ready[0].run_id]
            group = [j for j in ready if parents[j.run_id] == after]
            sent = _submit_array(out, group, config, code, [ids[p] for p in after], target)
            ids |= {run_id: entry["job_id"] for run_id, entry in sent.items()}
            record |= sent
            write_json(out / "slurm_jobs.json", record)
            submitted += sent
            todo = [j for j in todo if j.run_id not in sent]
    return submitted


def _submit_array(
    out: Path, group: list[Job], config: SlurmConfig, code: Path, after: list[str], target: str
) -> dict[str, dict]:
    if not shutil.which("sbatch"):
        raise UserError("sbatch not found: submit from a Slurm login node, or use --local")
    executor = submitit.SlurmExecutor(
        folder=out / "jobs" / "slurm",
        max_num_timeout=config.max_timeouts or (1000 if config.minutes <= SHORT_MIN else 20),
        python=config.python or None,
    )
    executor.update_parameters(**config.parameters(code, after))
    for job in group:
        write_json(state_file(out, job.run_id), {"state": "queued"})
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
    record = read_json(out / "slurm_jobs.json")
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
    note = read_json(state_file(out, job.run_id))
    log = note.get("log") or entry.get("log", "")
    if is_done(job.run_id):
        return Status("done", log=log)
    if slurm and slurm[0] not in ENDED:
        state = "queued" if slurm[0] in ("PENDING", "CONFIGURING", "REQUEUED") else "running"
        return Status(state, slurm[1] if state == "queued" else "", log)
    if not note:
        return Status("queued", "not submitted")
    if not entry and _held(job_folder(out, job.run_id) / "lock"):
        return Status("running", log=log)
    if note["state"] != "failed" and slurm:
        return Status("failed", f"Slurm: {slurm[0]}", log)
    return _outcome(out, job.run_id, is_done)


def cancel(out: Path, run_ids: list[str] | None = None) -> list[str]:
    """scancel the given runs, or all that are queued or running (these save first)."""
    record = read_json(Path(out) / "slurm_jobs.json")
    live = [run_id for run_id in _queue(record) if run_ids is None or run_id in run_ids]
    if live:
        subprocess.run(["scancel", *(record[run_id]["job_id"] for run_id in live)], check=True)
    return live
