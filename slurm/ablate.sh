#!/bin/bash
#SBATCH --job-name=ablate
#SBATCH --time=24:00:00
#SBATCH --output=ablate-%j.out
# A small job that prepares the corpus, where it is missing, and submits the ablation grid; the runs
# are jobs of their own. Compute nodes often have no network: prepare a hub corpus on the login node.
#   sbatch slurm/ablate.sh --preset NAME [options of run_ablations.py]          from any folder
#   sbatch --account=my-project slurm/ablate.sh --preset paper --slurm-config slurm/config.toml
# Output, relative to the folder of the command: ablate-JOBID.out. Then, to see how it goes:
#   python run_ablations.py --status [the same --preset, --only, --seeds, --out]
# PYTHON chooses another interpreter than the repository's .venv.
set -euo pipefail

# Slurm runs a copy of this script: ask where the original lies
script=${BASH_SOURCE[0]}
if [ -n "${SLURM_JOB_ID:-}" ]; then
  job=$(scontrol show job "$SLURM_JOB_ID")
  script=$(sed -n 's/^ *Command=\(.*ablate\.sh\).*/\1/p' <<<"$job")
fi
repository=$(cd "$(dirname "$script")/.." && pwd -P)
python=${PYTHON:-$repository/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}")
exec "$python" "$repository/run_ablations.py" --slurm "$@"
