"""Start runs through submitit: local processes or Slurm jobs, children after their parents.

A scheduler (`run_local`, or `submit_slurm` and Slurm itself) starts each run as a `RunJob` in its
own process, from a copy of the code taken at submission. What happened is read from files: the
caller's `is_done(run_id)` first, then `<out>/jobs/<run_id>/state.json`, which the job writes, then
the queue. Nothing is unpickled here, and nothing depends on what Slurm accounting remembers.
"""

from cluster.code import snapshot
from cluster.job import Job, RunJob, Status, job_folder, read_note
from cluster.local import local_gpus, run_local
from cluster.slurm import SlurmConfig, cancel, check_slurm, load_config, status, submit_slurm

__all__ = ["Job", "RunJob", "SlurmConfig", "Status", "cancel", "check_slurm", "job_folder"]
__all__ += ["load_config", "local_gpus", "read_note", "run_local", "snapshot", "status"]
__all__ += ["submit_slurm"]
