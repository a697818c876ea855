"""Where a number comes from: the code's commit, the machine, the versions of what it ran on."""

import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import files

if TYPE_CHECKING:
    from training.processes import Place

ROOT = Path(__file__).resolve().parent
# folders of the repository that a run may import from; what else lies there (a virtual environment,
# `pip --target`) is none of the program's
PACKAGES = ("analysis", "checks", "cluster", "data", "figures", "growth", "models", "tests")
PACKAGES += ("training",)
SNAPSHOT = "snapshot.json"  # in a copy of the code: what code_version() said where it was made


def provenance(place: "Place | None" = None) -> dict:
    """{"commit", "dirty", "hardware", "versions"} of this process."""
    return {**code_version(), "hardware": hardware(place), "versions": versions()}


def code_version() -> dict:
    """{"commit", "dirty"} of the code that runs here, be it the repository or a snapshot of it."""
    if (ROOT / SNAPSHOT).exists():
        return files.read_json(ROOT / SNAPSHOT)
    own = [":(glob)*.py", *(f":(glob){name}/**/*.py" for name in (*PACKAGES, "bench"))]
    changed = git("status", "--porcelain", "--untracked-files=all", "--", *own)
    return {"commit": (git("rev-parse", "HEAD") or "").strip() or None, "dirty": changed != ""}


def git(*arguments: str) -> str | None:
    """Output of git in this repository; None where there is none."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def versions() -> dict:
    import numpy
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | {"numpy": numpy.__version__}


def hardware(place: "Place | None" = None) -> dict:
    """The device's name, threads, precision and number of processes; without `place`, those of one
    process in float32 on the CPU."""
    import torch

    if place and place.device.type == "cuda":
        name = {"gpu": torch.cuda.get_device_name(place.device)}
    else:
        name = {"cpu": cpu_name()}
    return name | {
        "threads": torch.get_num_threads(),
        "dtype": place.dtype if place else "float32",
        "matmul": place.matmul if place else "highest",
        "compile": place.compile if place else False,
        "processes": place.size if place else 1,
    }


def cpu_name() -> str:
    """The model name as /proc/cpuinfo has it, or what Python knows elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()
