"""A copy of the code per submission, so that later edits do not reach queued or requeued runs."""

import hashlib
import os
import subprocess
from pathlib import Path

from cluster.job import read_json, sweep, write_json

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ("runs", "out", "corpora")


def snapshot(out: Path) -> Path:
    """Copy the program's *.py to `<out>/code/<hash of them>`; returns that folder. The caller
    holds the scheduler's lock."""
    sources = {path: (ROOT / path).read_bytes() for path in _sources()}
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:12]
    folder = out / "code" / digest
    if folder.exists():
        return folder
    sweep(folder)
    temporary = out / "code" / f".{digest}.{os.getpid()}"
    for path, content in sources.items():
        (temporary / path).parent.mkdir(parents=True, exist_ok=True)
        (temporary / path).write_bytes(content)
    write_json(temporary / "snapshot.json", code_version())
    os.replace(temporary, folder)
    return folder


def code_version() -> dict:
    """{"commit", "dirty"} of the code that runs here, be it the repository or a snapshot of it."""
    if (ROOT / "snapshot.json").exists():
        return read_json(ROOT / "snapshot.json")
    changed = _git("status", "--porcelain", "--", "*.py")
    return {"commit": (_git("rev-parse", "HEAD") or "").strip() or None, "dirty": changed != ""}


def code_env(code: Path) -> dict[str, str]:
    """Import from `code`, and not from the folder in which the command was given."""
    path = f"{code}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(code)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _sources() -> list[str]:
    """Relative paths of what git does not ignore, or, without git, of all outside the outputs."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py")
    if listed is not None:
        return sorted(path for path in listed.split("\0") if path and (ROOT / path).exists())
    tops = [top for top in ROOT.iterdir() if top.name[0] != "." and top.name not in OUTPUTS]
    files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py"))]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.suffix == ".py")


def _git(*arguments: str) -> str | None:
    """Output of git in this repository; None where there is none."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
