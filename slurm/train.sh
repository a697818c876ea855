#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=240
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.out
# One training run by N ranks, one per task (train.py reads rank and world size from srun):
#   sbatch --gpus-per-node=2 slurm/train.sh --data corpora/c4 --out runs/big [options of train.py]
# Before the time limit or a preemption it saves, exits with 75, and is put into the queue again.
set -uo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: a job for Slurm: sbatch $0 [options of train.py]" >&2; exit 2; }

job=$(scontrol show job "$SLURM_JOB_ID") # Slurm runs a copy of this script
script=$(sed -n 's/^ *Command=\(.*train\.sh\).*/\1/p' <<<"$job")
repository=$(cd "$(dirname "$script")/.." && pwd -P)
python=${PYTHON:-$repository/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}")

# SIGTERM ends the batch shell of a cancelled job; of a preempted one Slurm requeues by itself
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --wait=60 --cpus-per-task="$SLURM_CPUS_PER_TASK" "$python" "$repository/train.py" "$@"
status=$?
[ $status -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $status
