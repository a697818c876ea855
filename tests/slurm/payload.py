"""A run without a model: it counts to `spec["steps"]`, one file write per step, and resumes.

Called in jobs as `run(out, run_id, spec)`, like `cluster.execute.execute`. It behaves as training
does: SIGUSR1, SIGUSR2 and SIGTERM save within one step and raise `Interrupted`.
"""

import json
import os
import signal
import time
from pathlib import Path

from errors import UserError
from files import write_json


class Interrupted(Exception):
    """Saved because of `signum`."""

    def __init__(self, signum: int):
        super().__init__(f"saved after signal {signum}")
        self.signum = signum


def run(out: str, run_id: str, spec: dict) -> None:
    """Count from the last saved step; `<out>/<run_id>/done.json` when finished."""
    if spec.get("fail"):
        raise UserError(spec["fail"])
    if spec.get("die"):
        os._exit(spec["die"])
    folder = Path(out) / run_id
    folder.mkdir(exist_ok=True)
    step, starts = _load(folder)
    caught: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

    def catch(signum: int, frame) -> None:
        caught.append(signum)
        starts[-1].setdefault("signalled", step)

    before = {n: signal.signal(n, catch) for n in numbers}
    threads = os.environ["OMP_NUM_THREADS"]
    starts.append({"step": step, "pid": os.getpid(), "threads": threads, "file": __file__})
    try:
        while step < spec.get("steps", 3):
            time.sleep(spec.get("sleep", 0.05))
            if step == spec.get("hold"):
                _hold(folder, caught)
            step += 1
            stop = bool(caught)  # a signal during the write is the next step's: this one lacks it
            write_json(folder / "count.json", {"step": step, "starts": starts})
            if stop:
                raise Interrupted(caught[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    write_json(folder / "done.json", {"step": step, "starts": starts, "spec": spec})


def _hold(folder: Path, caught: list[int]) -> None:
    """A step that takes until the file `go` is there; `caught` tells when a signal has come."""
    while not (folder / "go").exists():
        if caught:
            (folder / "caught").touch()
        time.sleep(0.02)


def _load(folder: Path) -> tuple[int, list[dict]]:
    if not (folder / "count.json").exists():
        return 0, []
    saved = json.loads((folder / "count.json").read_text())
    return saved["step"], saved["starts"]


def train_with_a_bad_rank(out: str, run_id: str, spec: dict) -> None:
    """`cluster.execute.execute`, but rank 1 alone gets SIGUSR2 when it reads the batch of
    spec["stop_at"], and in its next life SIGKILL at that of spec["die_at"]."""
    from cluster.execute import execute
    from data.shards import Corpus

    again = "SLURM_RESTART_COUNT" in os.environ
    moment, signum = ("die_at", signal.SIGKILL) if again else ("stop_at", signal.SIGUSR2)
    original = Corpus.batch_at

    def batch_at(self, step, *arguments):
        if step == spec[moment] and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signum)
        return original(self, step, *arguments)

    Corpus.batch_at = batch_at
    execute(out, run_id, spec)
