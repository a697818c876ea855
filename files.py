"""Files: written whole or not at all, read within bounds, locked, and swept after killed writers.

Everything is written beside its place under a temporary name, synced, and renamed. There is one
form of such names, so that whoever next writes into a folder finds what any killed writer left:

    .<name>.tmp-<host>-<pid>-<random>    not finished yet, or being deleted
    .<name>.old-<host>-<pid>-<random>    the folder <name>, set aside while a new one takes its name
"""

import errno
import json
import math
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from errors import UserError

MAX_JSON = 8 << 20  # bytes; real ones are a few tens of kB
TEMPORARY = re.compile(r"\.(.+)\.(tmp|old)-(.+)-(\d+)-[0-9a-f]{8}")
ANY_TEMPORARY = re.compile(r"\.(.+)\.(tmp|old)-.+")  # of earlier versions, too
DAY_S = 86_400.0
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)


# ---- writing


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace a file atomically. `durable` makes its folder and survives a power cut (fsync); a
    file that is only for watching does neither."""
    path = Path(path)
    if durable:
        path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    tmp = temporary(path)
    try:
        with naming(path), open(tmp, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException as error:
        with suppress(OSError):  # not there, or on a disk that has become read-only
            tmp.unlink()
        if isinstance(error, OSError) and error.filename == str(tmp):  # not a name of the user's
            error.filename = str(path)
        raise
    if durable:
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: object, durable: bool = True) -> None:
    """Replace a JSON file atomically; ValueError where `value` holds a NaN or an infinity."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), durable)


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """A hidden folder that becomes `path` when the block ends well, else goes away without a trace.

    What is at `path` is replaced, or, without `replace`, makes this an OSError at the end.
    """
    path = Path(path)
    made = [folder for folder in path.parents if not folder.exists()]  # the nearest first
    tmp = temporary(path)
    try:
        tmp.mkdir(parents=True)
        sweep(path.parent)
        yield tmp
        publish(tmp, path, replace)
    except BaseException:  # a full disk or Ctrl-C, too
        shutil.rmtree(tmp, ignore_errors=True)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def publish(tmp: Path, path: Path, replace: bool) -> None:
    """Sync a finished folder and give it its name. Whoever may read the folder may read what is in
    it: safetensors makes its files for their owner alone."""
    mode = tmp.stat().st_mode & 0o666
    for part in (*tmp.rglob("*"), tmp):
        if part.is_file() and mode & ~(found := part.stat().st_mode):
            part.chmod(found | mode)
        sync(part)
    old = temporary(path, "old")
    if replace:
        with suppress(FileNotFoundError):
            os.rename(path, old)
    try:
        os.rename(tmp, path)
    finally:
        _clear(old, path)
    sync(path.parent)


def discard(path: Path) -> None:
    """Delete a folder: renamed first, so that a kill never leaves half of it under its name."""
    tmp = temporary(path)
    os.rename(path, tmp)
    shutil.rmtree(tmp, ignore_errors=True)


def temporary(path: Path, kind: str = "tmp") -> Path:
    """A name beside `path` that no other writer has."""
    owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return path.with_name(f".{path.name}.{kind}-{owner}")


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of a file that is open already (a full disk) says which file it was, and one that a
    library tells in words (safetensors) is an OSError, too."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


# ---- what killed writers left


def sweep(folder: Path, mine: str = "") -> None:
    """Clear what killed writers left in `folder`: those of this host whose process is gone, those
    of others that are a day older than the folder's last change, and all of `mine`, a name that
    only the caller writes ("*": every name)."""
    with suppress(OSError):  # it helps the next writer; it never costs one its file
        for name in os.listdir(folder):
            found, rest = ANY_TEMPORARY.fullmatch(name), Path(folder) / name
            if found and (mine in ("*", found[1]) or _is_dead(rest)):
                _clear(rest, Path(folder) / found[1])


def _clear(rest: Path, path: Path) -> None:
    """Remove a leftover of `path`; a folder that was set aside comes back if nothing took over."""
    aside = ANY_TEMPORARY.fullmatch(rest.name)[2] == "old"
    if aside and rest.exists() and not path.exists():
        os.rename(rest, path)
    elif rest.is_dir():
        discard(rest) if aside else shutil.rmtree(rest, ignore_errors=True)
    else:
        rest.unlink(missing_ok=True)


def _is_dead(rest: Path) -> bool:
    name = TEMPORARY.fullmatch(rest.name)
    if name is None:
        return False
    if name[3] == socket.gethostname():
        return not _is_running(int(name[4]))
    with suppress(OSError):
        parts = [rest, *rest.iterdir()] if rest.is_dir() else [rest]
        now = rest.parent.stat().st_mtime  # by the file server's clock; ours may be another
        return now - max(part.stat().st_mtime for part in parts) > DAY_S
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


# ---- reading


def read_json(
    path: Path,
    limit: int = MAX_JSON,
    remedy: str = "it is damaged or not ours",
    default: dict | None = None,
) -> dict:
    """A JSON object from an untrusted file: bounded size and depth, no NaN; else a UserError that
    ends with `remedy`. `default`, where given, is returned where there is nothing."""
    path = Path(path)
    if default is not None and not path.exists():
        return default
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is missing or no file; is this the right folder?")
    size = path.stat().st_size
    if size > limit:
        raise UserError(f"{path} has {size:,} bytes, a real one at most {limit:,}; {remedy}")
    try:
        value = json.loads(path.read_bytes(), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object; {remedy}")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no finite number")
    return float(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


# ---- locks


@contextmanager
def lock(path: Path, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold `path` as the lock of `what`; the kernel frees it when this process ends, however it
    ends. UserError that names the holder where another process keeps it longer than `wait_s`."""
    import filelock  # 50 ms: only where there is something to lock

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # its fallback, a marker file, would outlive a killed holder
    own = filelock.FileLock(
        path, wait_s, poll_interval=0.2, fallback_to_soft=False, on_acquired=_sign
    )
    try:
        own.acquire()
    except filelock.Timeout:
        holder = path.read_text().strip() or "another process"
        raise UserError(
            f"{what} is in use by {holder}; wait for it, stop it, or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{path}: no lock ({error.strerror}); start no second process", file=sys.stderr)
    try:
        yield
    finally:
        own.release()


def _sign(handle: int) -> None:
    """Who holds the lock, in the lock file."""
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock."""
    if not Path(path).exists():
        return False
    from filelock import lock_descriptor

    with open(path) as file:
        try:
            return not lock_descriptor(file.fileno(), blocking=False)
        except OSError:  # a file system without locks
            return False
