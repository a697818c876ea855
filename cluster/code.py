"""A copy of the code per submission, so that later edits do not reach queued or requeued runs."""

import hashlib
import os
from pathlib import Path

import files
from provenance import ROOT, SNAPSHOT, code_version, git

OUTPUTS = ("runs", "out", "corpora")


def snapshot(out: Path) -> Path:
    """Copy the program's *.py to `<out>/code/<hash of them>`; returns that folder. The caller
    holds the scheduler's lock."""
    sources = {path: (ROOT / path).read_bytes() for path in _sources()}
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:12]
    folder = out / "code" / digest
    files.sweep(folder.parent, mine="*")
    if folder.exists() and all(_holds(folder / path, text) for path, text in sources.items()):
        return folder
    with files.new_folder(folder, replace=True) as tmp:
        for path, content in sources.items():
            (tmp / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp / path).write_bytes(content)
        files.write_json(tmp / SNAPSHOT, code_version())
    return folder


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def code_env(code: Path) -> dict[str, str]:
    """Import from `code`, and not from the folder in which the command was given."""
    path = f"{code}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(code)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _sources() -> list[str]:
    """Relative paths of what git does not ignore, or, without git, of all outside the outputs."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py")
    if listed is not None:
        return sorted(path for path in listed.split("\0") if path and (ROOT / path).exists())
    tops = [top for top in ROOT.iterdir() if top.name[0] != "." and top.name not in OUTPUTS]
    found = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py"))]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix == ".py")
