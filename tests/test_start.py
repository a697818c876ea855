"""--help, and refusals that need no model, come before the imports that take a second."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = {"torch", "transformers", "pandas", "scipy", "matplotlib"}
RUN = """
import json, runpy, sys
sys.path.insert(0, "."); program, *sys.argv[1:] = sys.argv[1:]
start = runpy.run_path if program.endswith(".py") else runpy.run_module
try:
    start(program, run_name="__main__")
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
SCRIPTS = ("train.py", "grow.py", "run_ablations.py", "data/prepare.py")


def programs() -> list[str]:
    """Every file that reads a command line, as a user names it; not copies under runs/."""
    found = [path.relative_to(ROOT) for path in sorted(ROOT.glob("[!.rt]*/**/*.py"))]
    texts = {path: (ROOT / path).read_text() for path in found}
    reads = [path for path, text in texts.items() if "read_command_line(" in text]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in reads]
    return [*SCRIPTS, *(name for name in names if name != "data.prepare")]


def started(*words) -> tuple[int, str, set[str]]:
    """Exit code, stderr and loaded packages of a program."""
    command = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr, set(json.loads(done.stdout.splitlines()[-1]))


def test_all_programs_are_found():
    assert {"models.convert", "checks.fuzz", "analysis.aggregate"} < set(programs())


@pytest.mark.parametrize("program", programs())
def test_help_loads_nothing_slow(program):
    code, said, loaded = started(program, "--help")
    assert (code, said, loaded & SLOW) == (0, "", set())


@pytest.fixture
def folders(tmp_path):
    """A GPT-2 folder and a checkpoint of which only the sizes can be read."""
    for name, text in (
        ("hf/config.json", {"model_type": "gpt2", "n_embd": 768}),
        ("ours/state.json", {"meta": {"config": {"d_model": 768}}}),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(text))
    return tmp_path


@pytest.mark.parametrize("words, message", [
    (("grow.py", "{}/hf", "--out", "{}/x", "--width", 640), "new width 640 must be larger"),
    (("grow.py", "{}/ours", "--out", "{}/x", "--width", 640), "new width 640 must be larger"),
    (("grow.py", "{}/hf", "--out", "{}/x", "--factor", 1.001), "try --width 769"),
    (("grow.py", "{}/none", "--out", "{}/x", "--factor", 2), "is no folder"),
    (("grow.py", "{}/hf", "--out", "{}/x", "--factor", 2, "--std", -1), "grow.std is -1.0"),
    (("train.py", "--out", "{}/x", "--data", "{}", "--lr", -1), "lr is -1.0"),
    (("train.py", "--out", "{}/x", "--data", "{}", "--steps", 5, "--gate-steps", 6), "in 0..5"),
    (("run_ablations.py", "--jobs", "many"), "--jobs"),
])  # fmt: skip
def test_a_refusal_that_needs_no_model_loads_nothing_slow(words, message, folders):
    code, said, loaded = started(*(str(word).format(folders) for word in words))
    assert (code, loaded & SLOW) == (2, set()) and message in said, said
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not (folders / "x").exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"n_embd": "wide"}', '{"n_embd": 8, "dim": 9}', "{"])
def test_a_config_that_names_no_plain_width_is_left_to_growth(text, tmp_path):
    import grow

    (tmp_path / "config.json").write_text(text)
    assert grow.named_width(tmp_path) is None and grow.named_width(tmp_path / "none") is None


def test_growth_loads_what_it_uses():
    """The registry imports every operator: what one of them needs is imported where it is used."""
    look = "import grow, json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert loaded & SLOW == {"torch"} and "torch._dynamo" not in loaded


def test_growing_names_every_method_that_needs_no_data():
    from growth.operators import OPERATORS

    told = subprocess.run([sys.executable, "grow.py", "--help"], cwd=ROOT, capture_output=True,
                          text=True).stdout  # fmt: skip
    for name, operator in OPERATORS.items():
        assert not operator.grow_tensor or name in told, name
