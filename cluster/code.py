"""A copy of the code per submission, so that later edits do not reach queued or requeued runs."""

import hashlib
import os
from pathlib import Path

import files
from provenance import PACKAGES, ROOT, SNAPSHOT, code_version


def snapshot(out: Path) -> Path:
    """Copy the program's *.py to `<out>/code/<hash of them>`; returns that folder. The caller
    holds the scheduler's lock."""
    found = [*ROOT.glob("*.py"), *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_bytes() for path in found}
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
    place = code.name if start_in(code) else str(code)  # Python resolves it when it starts
    more = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    return {"PYTHONPATH": ":".join([place, *more]), "PYTHONSAFEPATH": "1"}


def start_in(code: Path) -> Path | None:
    """Where Python must start to find `code`; None: anywhere. A colon ends a path in PYTHONPATH and
    cannot be escaped there, so a snapshot below such a folder is named relative to its own."""
    return code.parent if ":" in str(code) else None
