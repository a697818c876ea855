"""Run a grid on this machine: at most n runs at a time, each a submitit job of its own."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

import submitit
from submitit.helpers import clean_env, environment_variables

import files
from cluster.code import code_env, snapshot, start_in
from cluster.job import (
    TARGET,
    Job,
    LocalRunJob,
    Status,
    job_folder,
    longest_first,
    outcome,
    scheduler_lock,
    state_file,
)

POLL_S = 0.25  # pause between two looks at the jobs
ASK_AGAIN_S = 2.0  # a run that has just started may not listen yet when it is asked to stop


def run_local(
    out: Path,
    jobs: list[Job],
    n_jobs: int,
    is_done: Callable[[str], bool],
    on_progress: Callable[[dict[str, Status]], None] = lambda states: None,
    prepare: Callable[[tuple], object] = lambda live: None,
    gpus: tuple[str, ...] | None = None,
    target: str = TARGET,
) -> dict[str, Status]:
    """Run all jobs that are not done, at most `n_jobs` at a time; returns their last states.

    Each run gets cores // n_jobs threads (OMP_NUM_THREADS, where the user has set it), and one of
    `gpus` in turn (None: those of the machine).
    Ctrl-C or SIGTERM lets the runs save and stop, then exits with 128 + signal; a second one does
    not wait. If this process is killed outright, its runs save and stop by themselves. `prepare` is
    called once the folder is locked, with the run_ids that somebody else runs: none.
    """
    out = Path(out).resolve()
    gpus = local_gpus() if gpus is None else gpus
    with scheduler_lock(out), _caught_signals() as caught:
        prepare(())
        grid = _Grid(out, jobs, n_jobs, is_done, gpus, target)
        while True:
            grid.collect(stopping=bool(caught))
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


def local_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name for name in chosen.split(",") if name)
    import torch

    return tuple(map(str, range(torch.cuda.device_count())))


class _Grid:
    """The state of every run, and the live ones: run_id -> (submitit job, slot)."""

    def __init__(self, out, jobs, n_jobs, is_done, gpus, target):
        self.out, self.n_jobs, self.gpus, self.target = out, n_jobs, gpus, target
        self.is_done, self.code, self.asked_at = is_done, snapshot(out), 0.0
        self.live: dict[str, tuple[submitit.Job, int]] = {}
        self.waiting = longest_first([job for job in jobs if not is_done(job.run_id)])
        self.states = {job.run_id: Status("done") for job in jobs}
        self.states |= {job.run_id: Status("queued") for job in self.waiting}

    def collect(self, stopping: bool) -> None:
        """Note what became of the runs that ended."""
        for run_id in [run_id for run_id, (job, _) in self.live.items() if job.done()]:
            log = str(self.live.pop(run_id)[0].paths.stdout)
            state = outcome(self.out, run_id, self.is_done, log)
            if state.state == "queued" and not stopping:  # somebody else stopped it
                state = Status("failed", state.reason, state.log)
            self.states[run_id] = state

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
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else ""
        run = LocalRunJob(
            *(str(self.out), job.run_id, job.spec, self.target), scheduler=os.getpid(), gpu=gpu
        )
        executor = submitit.LocalExecutor(job_folder(self.out, job.run_id))
        executor.update_parameters(timeout_min=60 * 24 * 365, stderr_to_stdout=True)
        files.write_json(state_file(self.out, job.run_id), {"state": "queued"})
        env = code_env(self.code) | local_threads(self.n_jobs)
        place = chdir(start_in(self.code) or Path.cwd())
        with place, clean_env(), environment_variables(**env), _blocked_signals():
            started = executor.submit(run)
        self.live[job.run_id] = started, slot
        self.states[job.run_id] = Status("running", log=str(started.paths.stdout))

    def stop(self, hard: bool) -> None:
        """Ask the runs to save and stop, again and again; `hard`: do not wait for them."""
        if not hard and time.monotonic() - self.asked_at < ASK_AGAIN_S:
            return
        self.asked_at = time.monotonic()
        for job, _ in self.live.values():
            with suppress(ProcessLookupError):  # a local job's id is the pid of its controller
                os.kill(int(job.job_id), signal.SIGKILL if hard else signal.SIGTERM)


def local_threads(n_jobs: int) -> dict[str, str]:
    """Threads of one run of several on this machine. Idle ones sleep (PASSIVE): on tiny shapes two
    that spin take 17 times the CPU time of one thread, two that sleep twice it."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    share = int(asked) if asked.isdigit() else len(os.sched_getaffinity(0)) // n_jobs
    return thread_env(share) | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def thread_env(threads: int) -> dict[str, str]:
    """Bound the threads of numpy and torch; 0 counts as 1."""
    return {f"{name}_NUM_THREADS": str(max(1, threads)) for name in ("OMP", "MKL", "OPENBLAS")}


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
