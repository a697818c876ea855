"""Publishing rows: everything is checked before anything is written, and what is there is whole."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import files
from analysis import publish as module
from analysis.publish import publish, summarize
from analysis.rows import load_rows, matched
from errors import UserError
from tests.synthetic_rows import diverged, grid, row, write

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = {"rows", "table.csv", "table.md", "claims.md"}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A repository whose results/ and figures/ are empty."""
    monkeypatch.setattr(module, "ROOT", tmp_path / "repository")
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


def snapshot(folder: Path) -> dict:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): path.read_bytes() for path in found}


def refused(root: Path, out: Path, message: str) -> None:
    """publish(out) is refused with `message` and changes nothing."""
    before = snapshot(root)
    with pytest.raises(UserError, match=message):
        publish(out)
    assert snapshot(root) == before


def test_rows_tables_and_pictures_are_published(root, tmp_path, capsys):
    rows = grid()
    rows[0]["command"] = "python a.py --out '/home/me/my runs/x' --corpora=/data/corpora"
    publish(write(rows, tmp_path / "x"))
    assert {path.name for path in (root / "results" / "x").iterdir()} == WRITTEN
    found = load_rows(root / "results" / "x")
    assert {r["run_id"] for r in found} == {r["run_id"] for r in rows}
    command = next(r for r in found if r["run_id"] == rows[0]["run_id"])["command"]
    assert command == "python a.py --out runs/x --corpora corpora"
    assert len(list((root / "figures" / "x").glob("*.png"))) == 2
    assert "Δ val" in capsys.readouterr().out
    summarize(root / "results" / "x", allow_missing=True)  # what `make figures` does


def test_later_rows_join_those_that_are_there_and_notes_stay(root, tmp_path):
    publish(write(grid(), tmp_path / "x"))
    (root / "results" / "x" / "NOTES.md").write_text("mine")
    more = grid(("nrio", "aki"), range(2))
    publish(write(more, tmp_path / "later" / "x"))
    found = load_rows(root / "results" / "x")
    assert len(found) == len(grid()) + 2 and "aki" in {r["variant"] for r in found}
    assert (root / "results" / "x" / "NOTES.md").read_text() == "mine"
    assert "aki lacks 2" in (root / "results" / "x" / "table.md").read_text()
    summarize(root / "results" / "x", allow_missing=True)


def test_incomplete_rows_are_refused_by_an_option_that_exists(root, tmp_path):
    out = write(grid()[:-1], tmp_path / "x")
    refused(root, out, "full lacks 2.*python -m analysis.aggregate FOLDER --allow-missing")
    assert not (root / "results" / "x").exists()
    publish(write([diverged(row("full", 2))], out))  # a run that diverged is no missing one


@pytest.mark.parametrize("what", ["preset", "manifest_hash"])
def test_another_preset_or_corpus_of_the_same_name_is_refused(root, tmp_path, what):
    publish(write(grid(), tmp_path / "x"))
    other = [one | {what: "other"} for one in grid()]  # the same run_ids: nothing would be kept
    refused(root, write(other, tmp_path / "elsewhere" / "x"), f"rows of {what} .*of other; rename")


def test_rows_that_cannot_stand_beside_the_kept_ones_are_refused(root, tmp_path):
    publish(write(grid(), tmp_path / "x"))
    other = grid(("aki",))
    for one in other:
        one["config"]["batch_size"] = 64
    refused(root, write(other, tmp_path / "elsewhere" / "x"), "batch_size is")


def test_a_row_that_names_another_place_is_refused(root, tmp_path):
    out = write(grid(), tmp_path / "x")
    evil = row("nrio") | {"run_id": "../../../../evil"}
    (out / "rows" / "nrio-s0-g2.json").write_text(json.dumps(evil))
    refused(root, out, "nrio-s0-g2.json: run_id '../../../../evil' must be")


@pytest.mark.parametrize("name", ["my x;touch Y", "-x", ".x", "ü x", "a\nb"])
def test_names_that_are_no_names_are_refused(root, tmp_path, name):
    out = write(grid(), tmp_path / name)
    refused(root, out, "which would name folders in results/")
    with pytest.raises(UserError, match="which would name folders"):
        summarize(out)


def test_a_failure_while_writing_leaves_what_was_there(root, tmp_path, monkeypatch):
    publish(write(grid(), tmp_path / "x"))
    before = snapshot(root)
    monkeypatch.setattr(module, "write_results", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        publish(write(grid(("aki",)), tmp_path / "more" / "x"))
    assert snapshot(root) == before
    assert {p.name for p in (root / "results").iterdir()} == {"x", ".lock"}


def test_two_who_publish_at_once_are_both_heard(root, tmp_path, monkeypatch):
    outs = [write(grid((v, "nrio")), tmp_path / v / "x") for v in ("aki", "net2net", "srio")]
    original = module.write_results

    def slowly(*arguments, **options):
        time.sleep(0.2)
        original(*arguments, **options)

    monkeypatch.setattr(module, "write_results", slowly)
    monkeypatch.setattr(module, "draw", lambda *_, **__: None)  # pyplot is not for threads
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(publish, outs))
    found = {r["variant"] for r in load_rows(root / "results" / "x")}
    assert found == {"aki", "net2net", "srio", "nrio"}


def test_of_two_processes_that_publish_one_run_one_wins(root, tmp_path, monkeypatch):
    """The same rows with other numbers, from two users: nothing of the two is mixed."""
    monkeypatch.setattr(module, "draw", lambda *_, **__: None)
    outs = [tmp_path / user / "x" for user in "ab"]
    for user, out in enumerate(outs):
        write([one | {"wall_s": 40.0 + user} for one in grid()], out)
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=publish, args=(out,)) for out in outs]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    found = {one["wall_s"] for one in load_rows(root / "results" / "x")}
    assert len(found) == 1 and found <= {40.0, 41.0}
    assert {p.name for p in (root / "results").iterdir()} == {"x", ".lock"}


def test_two_thousand_rows_are_read_once_and_written_once(root, tmp_path, monkeypatch):
    rows = grid(["nrio", *(f"nrio@lr={i / 1000}" for i in range(1, 40))], range(50))
    began = time.process_time()
    assert len(matched(rows)[0]) == 2000
    assert time.process_time() - began < 5  # 0.1 s; looking at every pair of rows took 10
    synced, original = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(original(handle)))
    monkeypatch.setattr(module, "draw", lambda *_, **__: None)
    publish(write(rows[:100], tmp_path / "x"))
    assert len(synced) < 100 + 20  # every row once, not its folder with each


@pytest.mark.parametrize("place", ["row", "kept", "folder"])
def test_names_that_differ_by_case_only_are_refused(root, tmp_path, place):
    """macOS and Windows would keep one of the two."""
    publish(write(grid(), tmp_path / "x"))
    if place == "folder":
        return refused(root, write(grid(), tmp_path / "X"), "[xX] and [xX] differ by case only")
    other = [
        one | {"variant": "NRIO", "run_id": f"NRIO-s{one['seed']}-g2"} for one in grid(["nrio"])
    ]
    out = write(other + (grid() if place == "row" else []), tmp_path / "other" / "x")
    refused(root, out, "-s0-g2 and .*-s0-g2 differ by case only")


def test_who_waits_too_long_is_told_who_publishes(root, tmp_path):
    out = write(grid(), tmp_path / "x")
    hold = "import files, sys, time\nwith files.lock(sys.argv[1], 'x'): print(flush=True); input()"
    lock = root / "results" / ".lock"
    command = [sys.executable, "-c", hold, str(lock)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        other.stdout.readline()
        with pytest.MonkeyPatch.context() as patch:
            original = files.lock
            patch.setattr(module.files, "lock", lambda path, what, wait_s: original(path, what, 0))
            refused(root, out, f"results/x is in use by pid {other.pid}")
        other.communicate("\n")
    publish(out)


def test_pictures_never_take_the_table_down(root, tmp_path, monkeypatch, capsys):
    from figures import loss_table

    monkeypatch.setattr(loss_table, "draw", lambda *_, **__: 1 / 0)
    publish(write(grid(), tmp_path / "x"))
    assert {path.name for path in (root / "results" / "x").iterdir()} == WRITTEN
    said = capsys.readouterr()
    assert said.err == (
        "warning: no pictures: ZeroDivisionError: division by zero; the table is whole\n"
    )
    assert "Δ val" in said.out


def test_a_notebook_s_backend_does_not_matter(tmp_path):
    write(grid(), tmp_path / "x")
    env = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    code = f"from analysis.publish import *; summarize(Path({str(tmp_path / 'x')!r}), Path('p'))"
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert len(list((tmp_path / "p").glob("*.png"))) == 2
