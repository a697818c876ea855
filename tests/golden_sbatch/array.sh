#!/bin/bash

# Parameters
#SBATCH --array=0-1%2
#SBATCH --cpus-per-task=2
#SBATCH --job-name=ablation
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=OUT/jobs/slurm/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@48
#SBATCH --time=8

# setup
export PYTHONPATH=OUT/code/HASH
export PYTHONSAFEPATH=1
export OMP_NUM_THREADS=2
export MKL_NUM_THREADS=2
export OPENBLAS_NUM_THREADS=2

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output OUT/jobs/slurm/%A_%a_%t_log.out --cpus-per-task=2 --wait=60 PYTHON -u -m submitit.core._submit OUT/jobs/slurm
