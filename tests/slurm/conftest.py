"""The one-node Slurm of these tests, and a grid of payload runs on it."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster
from tests.slurm.one_node import OneNodeSlurm, obstacle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def slurm():
    """A running OneNodeSlurm; skips where there cannot be one, except in CI, where there must."""
    if reason := obstacle():
        required = os.environ.get("CI") == "true" and os.geteuid() == 0
        (pytest.fail if required else pytest.skip)(reason)
    one_node = OneNodeSlurm()
    os.environ.update(one_node.env)
    try:
        one_node.start()
        yield one_node
    finally:
        one_node.stop()
        del os.environ["SLURM_CONF"]


class Grid:
    """Payload runs in one output folder."""

    def __init__(self, out: Path):
        self.out, self.jobs = out, []

    def submit(self, *jobs: cluster.Job, target: str = "run", **config) -> list[str]:
        settings = {"cpus_per_task": 1, "minutes": 5, **config}
        self.jobs = list(jobs) or self.jobs
        config = cluster.SlurmConfig(**settings)
        return cluster.submit_slurm(
            self.out, self.jobs, config, self.is_done, f"tests.slurm.payload:{target}"
        )

    def is_done(self, run_id: str) -> bool:
        return (self.out / run_id / "done.json").exists()

    def states(self) -> dict[str, cluster.Status]:
        return cluster.status(self.out, self.jobs, self.is_done)

    def wait(self, run_id: str, state: str, seconds: float = 40) -> cluster.Status:
        wait_for(lambda: self.states()[run_id].state == state, seconds, self.states)
        return self.states()[run_id]

    def wait_step(self, run_id: str, step: int) -> None:
        wait_for(lambda: self.count(run_id).get("step", 0) >= step, 40, self.states)

    def count(self, run_id: str) -> dict:
        """{"step", "starts": [{"step", ...} of each start]} as last saved."""
        return cluster.read_note(self.out / run_id / "count.json")

    def job_id(self, run_id: str) -> str:
        return cluster.read_note(self.out / "slurm_jobs.json")[run_id]["job_id"]

    def note(self, run_id: str) -> dict:
        return cluster.read_note(cluster.job_folder(self.out, run_id) / "state.json")

    def signal(self, run_id: str, name: str) -> None:
        subprocess.run(["scancel", f"--signal={name}", self.job_id(run_id)], check=True)


def sbatch(script: str, *arguments: object, folder: Path) -> str:
    """Submit slurm/<script> from `folder`; returns the job's id."""
    command = ["sbatch", "--parsable", "--cpus-per-task=1", ROOT / "slurm" / script, *arguments]
    return subprocess.check_output(list(map(str, command)), cwd=folder, text=True).strip()


def wait_for(condition: Callable[[], object], seconds: float, describe: Callable) -> None:
    """Until `condition` holds, which takes less than `seconds` on an idle machine; a busy one may
    take ten times as long before the wait counts as a hang."""
    end = time.monotonic() + 10 * seconds
    while not condition():
        assert time.monotonic() < end, f"not in {10 * seconds} s: {describe()}"
        time.sleep(0.2)


@pytest.fixture
def grid(slurm, tmp_path) -> Grid:
    return Grid(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def timed_out(slurm, tmp_path_factory) -> Grid:
    """A run with a limit of one minute, started first: the other tests run meanwhile."""
    grid = Grid(tmp_path_factory.mktemp("timed_out"))
    grid.submit(cluster.Job("run", {"steps": 1000, "sleep": 0.2}), minutes=1, signal_s=5)
    return grid
