"""files.py: whole or not at all, swept after every kill, bounded reading, locks that die too."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import checkpoint
import files
from analysis.aggregate import table, write_table
from errors import UserError
from tests.synthetic_rows import grid

ROOT = Path(__file__).resolve().parents[1]


def killed(write, operation: str) -> None:
    """Call `write` in a child that dies of SIGKILL in its first `operation` (a function of os)."""
    pid = os.fork()
    if pid == 0:
        setattr(os, operation, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def save(folder: Path) -> None:
    checkpoint.save(folder / "model", {"w": torch.ones(2)}, {"step": 1}, force=True)


def write_folder(folder: Path) -> None:
    with files.new_folder(folder / "wide", replace=True) as tmp:
        files.write_text(tmp / "part", "new")


WRITERS = {
    "a table": lambda folder: write_table(table(grid(("nrio",))), folder),
    "a row": lambda folder: files.write_json(folder / "nrio-s0.json", {}),
    "a checkpoint": save,
    "a grown folder": write_folder,
}


@pytest.mark.parametrize("operation", ["fsync", "rename", "replace"])
@pytest.mark.parametrize("writer", WRITERS)
def test_any_writer_sweeps_up_after_any_killed_one(tmp_path, writer, operation):
    if operation != "fsync":
        operation = "rename" if writer in ("a checkpoint", "a grown folder") else "replace"
    killed(lambda: WRITERS[writer](tmp_path), operation)
    assert [p.name[0] for p in tmp_path.iterdir()] == ["."]
    files.write_text(tmp_path / "another", "")
    assert [p.name for p in tmp_path.iterdir()] == ["another"]


def test_a_folder_set_aside_by_a_killed_writer_comes_back(tmp_path):
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "part").write_text("old")
    rename, calls = os.rename, []

    def second_kills(*names):
        calls.append(names)
        os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 2 else rename(*names)

    pid = os.fork()
    if pid == 0:
        os.rename = second_kills
        write_folder(tmp_path)
        os._exit(1)
    os.waitpid(pid, 0)
    assert not (tmp_path / "wide").exists()
    files.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["wide"]
    assert (tmp_path / "wide" / "part").read_text() == "old"
    write_folder(tmp_path)
    assert (tmp_path / "wide" / "part").read_text() == "new"


def test_what_a_writer_may_still_need_is_left_alone(tmp_path):
    here, old = socket.gethostname(), time.time() - 2 * files.DAY_S
    kept = [f".a.tmp-{here}-{os.getppid()}-00000000", ".b.tmp-other-1-00000000", ".c.tmp-mine"]
    gone = [f".d.old-{here}-{2**22 + 1}-00000000", ".e.tmp-other-1-00000000", ".f.tmp-x-1-11111111"]
    for name in (*kept, *gone):
        (tmp_path / name).mkdir()
    for name in gone[1:]:
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "d").mkdir()
    (tmp_path / gone[2] / "part").write_text("")  # still being filled
    files.sweep(tmp_path)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == sorted([*kept, gone[2], "d"])
    files.sweep(tmp_path, mine="b")
    assert kept[1] not in os.listdir(tmp_path)
    files.sweep(tmp_path, mine="*")
    assert os.listdir(tmp_path) == ["d"]


def test_what_is_old_is_told_without_this_machine_s_clock(tmp_path, monkeypatch):
    """A clock days ahead of the file server's must not cost another host its unfinished file."""
    monkeypatch.setattr(time, "time", lambda: 4e9)
    live, future = ".a.tmp-other-1-00000000", ".b.tmp-other-1-00000000"
    for name in (live, future):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / future, (3e9, 3e9))  # written before the server's clock was set back
    files.write_text(tmp_path / "x", "x")
    assert sorted(os.listdir(tmp_path)) == [live, future, "x"]


def test_a_failed_folder_leaves_no_trace_and_nothing_is_replaced_unasked(tmp_path):
    with pytest.raises(KeyboardInterrupt), files.new_folder(tmp_path / "a" / "b" / "c") as tmp:
        (tmp / "part").write_text("")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    write_folder(tmp_path)
    with pytest.raises(OSError), files.new_folder(tmp_path / "wide"):
        pass
    assert os.listdir(tmp_path) == ["wide"] and os.listdir(tmp_path / "wide") == ["part"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as error:
        files.write_text(tmp_path / "table.md", "x")
    assert error.value.filename == str(tmp_path / "table.md")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no valid JSON"),
        ("[1]", "a list, not an object"),
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": 1e999}', "1e999 is no finite number"),
        ("[" * 10**5, "no valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "no valid JSON"),
        (" " * 101, "101 bytes, a real one at most 100"),
    ],
)
def test_json_is_read_within_bounds(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    limit = 100 if text.isspace() else files.MAX_JSON
    with pytest.raises(UserError, match=f"x.json .*{message}.*; mend it"):
        files.read_json(path, limit, remedy="mend it")


def test_json_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="missing"):
        files.read_json(tmp_path / "x.json")
    assert files.read_json(tmp_path / "x.json", default={}) == {}
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match="no file"):
        files.read_json(tmp_path / "pipe.json", default={})


# ---- locks

HOLD = """
import sys, time, files
with files.lock(sys.argv[1], "the grid"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_names_its_holder_and_dies_with_it(tmp_path, signum):
    path = tmp_path / "deep" / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n" and files.is_locked(path)
    message = f"the grid is in use by pid {holder.pid} on {socket.gethostname()}; wait for it"
    with pytest.raises(UserError, match=message), files.lock(path, "the grid"):
        pass
    holder.send_signal(signum)
    holder.wait()
    assert not files.is_locked(path)
    with files.lock(path, "the grid"):
        assert path.read_text().startswith(f"pid {os.getpid()} on ") and files.is_locked(path)
        with pytest.raises(UserError, match=f"pid {os.getpid()}"), files.lock(path, "the grid"):
            pass
    assert not files.is_locked(path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_still_works_and_says_so(tmp_path, monkeypatch, capsys, number):
    def no_locks(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with files.lock(tmp_path / "lock", "run folder"):
        assert not files.is_locked(tmp_path / "lock")
    assert "no lock (no locks here); start no second process" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["lock"]


def test_a_lock_that_may_not_be_opened_is_no_missing_lock(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError), files.lock(tmp_path / "lock", "run folder"):
        pass


def test_a_new_folder_s_files_are_for_whom_the_folder_is(tmp_path):
    """safetensors makes files that only their owner may read; a cluster's group shares models."""
    before = os.umask(0o027)
    try:
        with files.new_folder(tmp_path / "new") as tmp:
            (tmp / "weights").write_bytes(b"x")
            (tmp / "weights").chmod(0o600)
            (tmp / "text").write_text("x")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert modes == {"weights": 0o640, "text": 0o640}
