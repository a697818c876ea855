"""The cluster layer without a Slurm: local runs, signals, code copies, options, sbatch files."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cluster
import provenance
from cluster import Job, SlurmConfig, job, load_config, run_local
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TARGET = "tests.slurm.payload:run"


def done_in(out: Path):
    return lambda run_id: (out / run_id / "done.json").exists()


def run(out: Path, *jobs: Job, n_jobs: int = 2, **options) -> dict[str, cluster.Status]:
    return run_local(out, list(jobs), n_jobs, done_in(out), gpus=(), target=TARGET, **options)


def count(out: Path, run_id: str = "run") -> dict:
    return cluster.read_note(out / run_id / "count.json")


# ---- the local scheduler


def test_children_follow_their_parents_and_failures_pass_down(tmp_path):
    seen: list[dict] = []
    jobs = [
        *(Job("child", needs=("parent",)), Job("parent"), Job("bad", {"fail": "width 7 is odd"})),
        *(Job("lost", needs=("bad",)), Job("lost2", needs=("lost",)), Job("killed", {"die": 9})),
    ]
    states = run(tmp_path, *jobs, Job("orphan", needs=("nobody",)), on_progress=seen.append)
    by_state = {run_id: (s.state, s.reason) for run_id, s in states.items()}
    assert by_state == {
        "parent": ("done", ""),
        "child": ("done", ""),
        "bad": ("failed", "width 7 is odd"),
        "lost": ("failed", "parent bad failed"),
        "lost2": ("failed", "parent lost failed"),
        "killed": ("failed", "ended before it was done (killed? out of memory?)"),
        "orphan": ("failed", "parent nobody failed"),
    }
    running = [[s.state for s in states.values()].count("running") for states in seen]
    assert max(running) == 2
    assert "width 7 is odd" in Path(states["bad"].log).read_text()
    assert cluster.status(tmp_path, jobs, done_in(tmp_path))["lost2"].state == "failed"


def test_finished_runs_are_not_started_again_and_threads_are_shared(tmp_path):
    run(tmp_path, Job("run"))
    first = count(tmp_path)
    states = run(tmp_path, Job("run"), Job("other"), n_jobs=2)
    assert count(tmp_path) == first and states["run"].state == "done"
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert count(tmp_path, "other")["starts"][0]["threads"] == str(share)


def test_threads_the_user_asked_for_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run(tmp_path, Job("run"), n_jobs=1)
    assert count(tmp_path)["starts"][0]["threads"] == "7"


def test_usr2_restarts_a_local_run_where_it_was(tmp_path):
    sent = []

    def interrupt(states):
        if not sent and count(tmp_path).get("step", 0) >= 2:
            sent.append(count(tmp_path)["starts"][0]["pid"])
            os.kill(sent[0], signal.SIGUSR2)

    assert run(tmp_path, Job("run", {"steps": 30}), on_progress=interrupt)["run"].state == "done"
    first, second = count(tmp_path)["starts"]
    assert first["step"] == 0 and second["step"] >= 2 and first["pid"] != second["pid"]


def start_scheduler(out: Path, spec: dict) -> subprocess.Popen:
    """run_local in a process group of its own, like a command in a terminal."""
    code = f"""
from pathlib import Path; from tests.test_cluster import run, Job
run(Path({str(out)!r}), Job("run", {spec!r}), n_jobs=1)"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, process_group=0)
    wait_for(lambda: count(out).get("step", 0) >= 2 or process.poll() is not None)
    assert process.poll() is None
    return process


HANG_S = 600  # what nothing takes, on the busiest machine; waits end by an event before


def wait_for(condition) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopped_scheduler_lets_runs_save_and_leaves_no_process(tmp_path, signum):
    # a step takes longer than the second after which submitit's controller would kill the run
    scheduler = start_scheduler(tmp_path, {"steps": 100, "hold": 2})
    pid = count(tmp_path)["starts"][0]["pid"]
    os.killpg(scheduler.pid, signum)
    wait_for((tmp_path / "run" / "caught").exists)
    time.sleep(1.5)
    assert alive(pid) and scheduler.poll() is None
    (tmp_path / "run" / "go").write_text("")
    assert scheduler.wait(HANG_S) == 128 + signum
    assert not alive(pid) and count(tmp_path)["step"] == 3
    state = cluster.status(tmp_path, [Job("run")], done_in(tmp_path))["run"]
    assert (state.state, state.reason) == ("queued", "saved and stopped by a signal")


def test_rerun_right_after_kill_9_waits_for_the_old_run(tmp_path):
    scheduler = start_scheduler(tmp_path, {"steps": 100, "hold": 2})
    old = count(tmp_path)["starts"][0]["pid"]
    scheduler.kill()
    scheduler.wait()
    wait_for((tmp_path / "run" / "caught").exists)
    assert alive(old)

    def let_go(states):  # once the new run waits for the old one's lock
        if states["run"].state == "running":
            (tmp_path / "run" / "go").write_text("")

    states = run(tmp_path, Job("run", {"steps": 4}), on_progress=let_go)
    assert states["run"].state == "done"
    assert not alive(old) and count(tmp_path)["starts"][1]["step"] == 3


def test_second_scheduler_on_the_same_folder_is_refused(tmp_path):
    scheduler = start_scheduler(tmp_path, {"steps": 1000})
    states = cluster.status(tmp_path, [Job("run")], done_in(tmp_path))
    assert states["run"].state == "running"
    with pytest.raises(UserError, match=f"in use by pid {scheduler.pid} on"):
        run(tmp_path, Job("run"))
    scheduler.terminate()
    assert scheduler.wait(HANG_S) == 143


def test_longest_chain_first_and_parents_before_children():
    chain = [Job("child", needs=("parent",), minutes=4), Job("parent", minutes=2)]
    ordered = job.longest_first([*chain, Job("alone", minutes=5)])
    assert [j.run_id for j in ordered] == ["parent", "alone", "child"]
    with pytest.raises(UserError, match="need each other"):
        job.longest_first([Job("a", needs=("b",)), Job("b", needs=("a",))])


def test_what_killed_writers_left_is_removed(tmp_path):
    version = cluster.snapshot(tmp_path / "elsewhere").name
    rest = "tmp-elsewhere-99-0123abcd"  # a process of another host: only the lock's holder knows
    rests = [f"jobs/run/.state.json.{rest}", f"code/.{version}.{rest}/train.py"]
    for rest in rests:
        (tmp_path / rest).parent.mkdir(parents=True)
        (tmp_path / rest).write_text("{")
    assert run(tmp_path, Job("run"))["run"].state == "done"
    assert not [path for path in tmp_path.rglob(".*")]


# ---- code copies


def test_snapshot_holds_the_program_and_its_version(tmp_path):
    folder = cluster.snapshot(tmp_path)
    assert (folder / "cluster" / "job.py").read_bytes() == (ROOT / "cluster/job.py").read_bytes()
    assert not (folder / ".venv").exists() and folder == cluster.snapshot(tmp_path)
    command = [sys.executable, "-c", "import provenance; print(provenance.code_version())"]
    env = {**os.environ, **cluster.code.code_env(folder)}
    printed = subprocess.check_output(command, cwd=ROOT, env=env, text=True)
    assert printed.strip() == str(provenance.code_version())


def test_snapshot_copies_the_program_s_folders_and_no_others(tmp_path, monkeypatch):
    root = tmp_path / "program"
    others = ("venv/lib/f.py", "env/g.py", "scratch/h.py", ".hidden.d/i.py")
    for name in ("a.py", "models/b.py", "models/c.txt", ".venv/d.py", "runs/code/e.py", *others):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    for module in (cluster.code, provenance):
        monkeypatch.setattr(module, "ROOT", root)
    folder = cluster.snapshot(tmp_path)
    copied = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert copied == {"a.py", "models/b.py", "snapshot.json"}
    assert provenance.code_version() == {"commit": None, "dirty": True}


def test_other_people_s_code_in_the_folder_makes_no_row_dirty(tmp_path, monkeypatch):
    """README's `pip install --target gguf` lies beside the program."""

    def git(*words: str) -> None:
        settings = ("-c", "user.name=n", "-c", "user.email=n@n")
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True)

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    for path in ("a.py", "models/b.py", "models/deep/c.py", "bench/e.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for words in (("init", "-q"), ("add", "a.py", "models", "bench"), ("commit", "-qm", "all")):
        git(*words)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "reader.py").write_text("")
    assert not provenance.code_version()["dirty"]
    for path in ("new.py", "models/deep/d.py", "bench/f.py"):
        (tmp_path / path).write_text("")
        assert provenance.code_version()["dirty"], path
        (tmp_path / path).unlink()
    (tmp_path / "models" / "deep" / "c.py").write_text("changed")
    assert provenance.code_version()["dirty"]


def test_all_that_a_run_may_import_is_copied():
    """Every folder of the repository with code in it, but for benchmarks, which no run imports."""
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"bench"}
    assert folders == set(cluster.code.PACKAGES)


def test_a_colon_in_the_folder_s_name_is_no_obstacle(tmp_path):
    out = tmp_path / "2026-11-30T10:00"  # PYTHONPATH has no way to write it
    here = Path.cwd()
    states = run(out, Job("parent"), Job("child", needs=("parent",)))
    assert {s.state for s in states.values()} == {"done"}, states
    code = Path(count(out, "parent")["starts"][0]["file"])
    assert code.is_relative_to(out / "code") and Path.cwd() == here


def test_a_colon_reaches_slurm_s_jobs_too(tmp_path, pretend_slurm, monkeypatch):
    out = tmp_path / "10:00 o'clock"
    monkeypatch.setenv("PYTHONPATH", "mine")
    cluster.submit_slurm(out, [Job("run")], SlurmConfig(), lambda run_id: False)
    text = next((out / "jobs" / "slurm").glob("*_submission.sh")).read_text()
    code = next(path for path in (out / "code").iterdir())
    lines = [line for line in text.splitlines() if line.startswith(("cd ", "export PYTHON"))]
    script = "; ".join([*lines, "cd -P .; pwd; echo $PYTHONPATH"])
    place, path = subprocess.check_output(["bash", "-c", script], text=True).splitlines()
    assert place == str(code.parent) and path == f"{code.name}:{Path.cwd() / 'mine'}"


def test_a_start_up_failure_is_reported_by_its_own_last_line(tmp_path, monkeypatch):
    snapshot = cluster.local.snapshot
    monkeypatch.setattr(cluster.local, "snapshot", lambda out: broken(snapshot(out)))
    state = run(tmp_path / "out", Job("run"))["run"]
    assert state.state == "failed" and Path(state.log).exists()
    assert state.reason == "did not start: ImportError: libcuda.so.1 is missing"


def test_the_last_line_of_a_log_is_the_program_s(tmp_path):
    log = tmp_path / "log"
    log.write_text("x\nImportError: no libcuda\nsrun: error: n1: task 0: Exited with 1\n\n")
    assert job.last_line(str(log)) == "ImportError: no libcuda"
    assert job.last_line(str(tmp_path / "none")) == job.last_line("") == ""


def broken(code: Path) -> Path:
    (code / "cluster" / "job.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    return code


def test_a_run_that_ended_without_a_result_names_what_leaves_that_state(tmp_path):
    path = job.state_file(tmp_path, "run")
    cluster.job.files.write_json(path, {"state": "done", "log": "a.log"})
    state = job.outcome(tmp_path, "run", lambda run_id: False)
    assert state.state == "failed" and state.log == "a.log"
    for place in (tmp_path / "runs" / "run", tmp_path / "rows" / "run.json"):
        assert str(place) in state.reason


# ---- options


def test_example_config_is_valid():
    assert isinstance(load_config(ROOT / "slurm" / "config.toml"), SlurmConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partion = 'x'", "unknown setting partion; choose from partition"),
        ("minutes = 'long'", "minutes = 'long' must be a int"),
        ("minutes = -1", "minutes = -1 must be a int >= 0"),
        ("setup = 'module load cuda'", "setup = .* must be a tuple"),
        ("minutes = ", "write TOML or JSON"),
    ],
)
def test_bad_config_is_a_user_error(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_missing_config_and_missing_slurm_are_user_errors(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="No such file"):
        load_config(tmp_path / "none.toml")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch not found"):
        cluster.submit_slurm(tmp_path, [Job("run")], SlurmConfig(), lambda run_id: False)


# ---- sbatch files


@pytest.fixture
def pretend_slurm(tmp_path, monkeypatch):
    """sbatch that numbers its calls, an empty queue, an srun that is only there."""
    scripts = {
        "sbatch": 'n=$(($(cat $0.n) + 1)); echo $n > $0.n; echo "Submitted batch job $n"',
        "squeue": "",
        "srun": "",
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sbatch.n").write_text("100")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_sbatch_files_are_the_golden_ones(tmp_path, pretend_slurm):
    out = tmp_path / "out"
    roots = [Job("parent-s0"), Job("parent-s1")]
    children = [Job(f"{v}-s0", needs=("parent-s0",)) for v in ("nrio", "srio")]
    cluster.submit_slurm(out, roots + children, SlurmConfig(minutes=8), lambda run_id: False)
    gpu = SlurmConfig(
        **{"partition": "gpu", "account": "lab", "qos": "long", "constraint": "h200"},
        **{"gpus_per_node": 4, "tasks_per_node": 4, "cpus_per_task": 8, "mem_gb": 64},
        **{"setup": ("module load cuda",), "extra": {"reservation": "course"}},
    )
    cluster.submit_slurm(out, [Job("ddp")], gpu, lambda run_id: False)
    golden = ROOT / "tests" / "golden_sbatch"
    for number, name in {101: "array", 102: "children", 103: "ddp"}.items():
        text = (out / "jobs" / "slurm" / f"{number}_submission.sh").read_text()
        text = text.replace(str(out), "OUT").replace(sys.executable, "PYTHON")
        text = re.sub("OUT/code/[0-9a-f]{12}", "OUT/code/HASH", text)
        assert text == (golden / f"{name}.sh").read_text(), f"{name}.sh differs"


def test_interrupted_submission_starts_again_only_what_is_not_queued(tmp_path, pretend_slurm):
    jobs = [Job("a"), Job("b", needs=("a",))]
    assert cluster.submit_slurm(tmp_path, jobs, SlurmConfig(), lambda r: r == "a") == ["b"]
    text = next((tmp_path / "jobs" / "slurm").glob("*_submission.sh")).read_text()
    assert "dependency" not in text  # its parent is done
    (tmp_path / "squeue").write_text("#!/bin/bash\necho '101|PENDING|Resources'\n")
    assert cluster.submit_slurm(tmp_path, jobs, SlurmConfig(), lambda r: r == "a") == []
    assert cluster.status(tmp_path, jobs, lambda r: r == "a")["b"].reason == "Resources"
