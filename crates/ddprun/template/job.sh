#!/bin/bash
#SBATCH --job-name=NAME
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# `sbatch job.sh`, after `cargo build --release`. Each task is a rank. With GPUs: one task and `--gpus-per-task=1` for each, and a build with
# `--features nccl,cudnn`. Two minutes before its time limit, or when Slurm takes the machines, the run saves; the next job continues.
set -euo pipefail
export RAYON_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from sbatch

srun --kill-on-bad-exit=1 --label target/release/NAME checkpoints
