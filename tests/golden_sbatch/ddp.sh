#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --constraint=h200
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --job-name=ablation
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mem=64GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=OUT/jobs/slurm/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --reservation=course
#SBATCH --signal=USR2@120
#SBATCH --time=240

# setup
module load cuda
export PYTHONPATH=OUT/code/HASH
export PYTHONSAFEPATH=1
export OMP_NUM_THREADS=8
export MKL_NUM_THREADS=8
export OPENBLAS_NUM_THREADS=8

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output OUT/jobs/slurm/%j_%t_log.out --cpus-per-task=8 --wait=60 PYTHON -u -m submitit.core._submit OUT/jobs/slurm
