"""One run as a job: what submitit pickles, how it answers signals, what it notes in files.

A run that is asked to stop saves within one step and raises `Interrupted` with its `signum`:
  SIGUSR1, SIGUSR2  Slurm's warning before the time limit or a preemption: saved, then requeued
                    by submitit's own handler, which counts the time-outs;
  SIGTERM           saved; requeued only while Slurm still calls the job RUNNING (a preemption with
                    a grace time), for `scancel` sends SIGTERM too. Local: saved and stopped.
"""

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import submitit
from submitit.helpers import DelayedSubmission, TorchDistributedEnvironment

import files
from errors import UserError

TARGET = "cluster.execute:execute"  # called in the job as execute(out, run_id, spec)
GRACE_S = 60.0  # a run may take this long to finish its step and save before it is killed
SLURM_SAYS = ("srun: ", "slurmstepd: ")
LOCK_WAIT_S = 30.0  # a rerun waits this long for a predecessor that is still saving


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


class RunJob:
    """Names only, no paths of checkpoints: a requeued job looks for the newest one afresh."""

    def __init__(self, out: str, run_id: str, spec: dict, target: str = TARGET):
        self.out, self.run_id, self.spec, self.target = out, run_id, spec, target

    def checkpoint(self) -> DelayedSubmission:
        """What a requeue runs: the same call again."""
        return DelayedSubmission(self)

    def __call__(self) -> None:
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's handler: requeues and exits
        signal.signal(signal.SIGUSR1, requeue)
        signal.signal(signal.SIGTERM, lambda signum, _: _leave(signum, requeue))
        env = submitit.JobEnvironment()
        if env.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        if env.global_rank > 0:  # only the first task holds the lock and writes notes
            return self._execute(requeue)
        folder = job_folder(self.out, self.run_id)
        with files.lock(folder / "lock", f"run {self.run_id}", LOCK_WAIT_S):
            files.sweep(folder, mine="*")
            try:
                self._note("running")
                self._execute(requeue)
                self._note("done")
            except SystemExit:
                self._note("stopped", "saved and stopped by a signal")
                raise
            except Exception as error:
                name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                self._note("failed", f"{name}{error}")
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
        note = {"state": state, "reason": " ".join(reason.split()), "log": str(env.paths.stdout)}
        note |= {"job_id": env.job_id, "host": socket.gethostname(), "pid": os.getpid()}
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        files.write_json(state_file(self.out, self.run_id), note | {"restarts": restarts})


class LocalRunJob(RunJob):
    """A RunJob that ends with its scheduler, on the given GPU ("" for none)."""

    def __init__(self, *arguments: object, scheduler: int, gpu: str):
        super().__init__(*arguments)
        self.scheduler, self.gpu = scheduler, gpu

    def __call__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu
        _stop_with(self.scheduler, os.getppid())
        super().__call__()


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


def job_folder(out: str | Path, run_id: str) -> Path:
    """Where a run's lock, state and (local) submitit files and log lie."""
    return Path(out) / "jobs" / run_id


def state_file(out: str | Path, run_id: str) -> Path:
    """Where a job notes its state, reason, log, job id and place."""
    return job_folder(out, run_id) / "state.json"


def scheduler_lock(out: Path):
    """Held while runs of `out` are started: two schedulers would start them twice."""
    return files.lock(out / "jobs" / "scheduler.lock", f"the grid in {out}", wait_s=2)


def read_note(path: Path) -> dict:
    """A note of this room, {} if there is none."""
    return files.read_json(path, remedy="delete it and run again", default={})


def outcome(out: Path, run_id: str, is_done: Callable[[str], bool], log: str = "") -> Status:
    """What the files say of a run that no longer runs; `log` is where one that never noted
    anything wrote to."""
    note = read_note(state_file(out, run_id))
    state, log = note.get("state"), note.get("log") or log
    if is_done(run_id):
        return Status("done", log=log)
    if state == "stopped":  # starts again with the next command
        return Status("queued", note["reason"], log)
    if state == "done":
        places = f"{Path(out) / 'runs' / run_id} and {Path(out) / 'rows' / run_id}.json"
        return Status("failed", f"ended without a result: delete {places}, then run again", log)
    if state == "queued" and (line := last_line(log)):  # it never came to our code
        return Status("failed", f"did not start: {line}", log)
    reason = note.get("reason") or "ended before it was done (killed? out of memory?)"
    return Status("failed", reason, log)


def last_line(log: str) -> str:
    """The last line of a log that says something, "" where there is none. What Slurm adds, that a
    task has ended, is none."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - 4096))
        lines = file.read().decode(errors="replace").split("\n")
        said = [line for line in lines if line.strip() and not line.startswith(SLURM_SAYS)]
        return said[-1].strip()[:300] if said else ""
    return ""


def longest_first(jobs: list[Job]) -> list[Job]:
    """Order by the minutes of the longest chain that starts with the run: parents come first."""
    known = {job.run_id: job for job in jobs}
    needs = {job.run_id: [p for p in job.needs if p in known] for job in jobs}
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise UserError(f"these runs need each other: {error.args[1]}; mend the grid") from None
    after = dict.fromkeys(known, 0.0)
    for run_id in reversed(order):  # children first
        for parent in needs[run_id]:
            chain = after[run_id] + known[run_id].minutes
            after[parent] = max(after[parent], chain)
    place = {run_id: i for i, run_id in enumerate(order)}
    return sorted(jobs, key=lambda j: (-after[j.run_id] - j.minutes, place[j.run_id]))
