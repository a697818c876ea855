"""No data is ever read by anything that can run code.

Documented exceptions: `--allow-pickle` of grow.py, an option that must be given, reads .bin weights
by torch.load(weights_only=True), whose unpickler builds nothing but tensors; and submitit writes
and reads pickles of its own jobs, inside its own code and the job folder, which holds nothing else.
"""

import ast
import os
import pickle
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import checkpoint
import files
import grow
from checks.fuzz.world import reseal
from errors import UserError
from models import hf_folder
from models.convert import ConvertConfig, convert
from models.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
}
CALLS = {"torch.load", "eval", "exec", "pd.read_pickle", "pandas.read_pickle", "np.fromfile"}
KEYWORDS = defaultdict(lambda: {"trust_remote_code"}, load={"allow_pickle"})  # by method
EXCEPTIONS = {("models/hf_folder.py", "torch.load")}
SMALL = GPTConfig(vocab_size=17, block_size=8, n_layer=1, n_head=2, head_dim=4, d_model=8)


def own_files() -> list[Path]:
    """The project's Python files, its tests apart: these make the pickles that must be refused."""
    skipped = {"tests", "runs", "corpora", "out", "__pycache__"}
    found = [p for p in ROOT.rglob("*.py") if not any(s.startswith(".") for s in parts(p))]
    return [p for p in found if not skipped & set(parts(p))]


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts


def dangers(source: str) -> set[str]:
    """Imports and calls in Python source that read data by running it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.add(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name} & CALLS
            found |= {k.arg for k in node.keywords if k.arg in KEYWORDS[name.split(".")[-1]]}
    return found


def test_nothing_in_the_tree_unpickles():
    files = own_files()
    assert len(files) > 40
    found = {(str(p.relative_to(ROOT)), d) for p in files for d in dangers(p.read_text())}
    assert found == EXCEPTIONS


def test_the_one_torch_load_builds_only_tensors():
    tree = ast.parse((ROOT / "models" / "hf_folder.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    [load] = [n for n in calls if ast.unparse(n.func) == "torch.load"]
    assert {k.arg: ast.unparse(k.value) for k in load.keywords}["weights_only"] == "True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import yaml; yaml.load(open('x'))",
        "import torch; torch.load('x')",
        "np.load('x', allow_pickle=True)",
        "eval(input())",
        "exec(text)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_search_finds_each(source):
    assert dangers(source)


def test_the_search_leaves_the_harmless_alone():
    assert not dangers("model.eval(); np.load('x'); json.loads('1')")


# ---- a pickle that runs code when read


class Bomb:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """Where a bomb that goes off makes a folder."""
    return tmp_path / "ran"


@pytest.fixture
def ours(tmp_path):
    """A sound checkpoint of this project."""
    weights = GPT(SMALL, seed=0).state_dict()
    checkpoint.save(tmp_path / "ours", weights, {"config": vars(SMALL), "step": 0})
    return tmp_path / "ours"


@pytest.fixture
def theirs(ours, tmp_path):
    """The same as a Hugging Face folder."""
    convert(ConvertConfig("to-gpt2", ours, tmp_path / "theirs"))
    return tmp_path / "theirs"


def bombs(mark: Path, path: Path) -> list[bytes]:
    """The bomb as a plain pickle, and inside of a torch archive beside a tensor."""
    torch.save({"transformer.wte.weight": torch.zeros(1), "bomb": Bomb(mark)}, path)
    archive = path.read_bytes()
    path.unlink()
    return [pickle.dumps(Bomb(mark)), pickle.dumps({"a": Bomb(mark)}, protocol=0), archive]


def test_the_bomb_goes_off_when_unpickled(mark, tmp_path):
    for i, bomb in enumerate(bombs(mark, tmp_path / "bomb")):
        (tmp_path / "bomb.pt").write_bytes(bomb)
        if i == 2:
            torch.load(tmp_path / "bomb.pt", weights_only=False)
        else:
            pickle.loads(bomb)
        assert mark.is_dir()
        mark.rmdir()


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("forged", [False, True])
def test_a_pickle_as_checkpoint_is_refused_unread(ours, mark, tmp_path, kind, forged):
    (ours / "model.safetensors").write_bytes(bombs(mark, tmp_path / "bomb")[kind])
    if forged:
        reseal(ours)
    with pytest.raises(UserError, match="model.safetensors"):
        checkpoint.load(ours)
    assert not mark.exists()


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("allow", [False, True])
def test_a_pickle_as_model_folder_is_refused_unread(theirs, mark, tmp_path, kind, name, allow):
    (theirs / "model.safetensors").unlink()
    (theirs / name).write_bytes(bombs(mark, tmp_path / "bomb")[kind])
    with pytest.raises(UserError, match=name):
        hf_folder.open_folder(theirs, allow_pickle=allow)
    assert not mark.exists()


def test_grow_refuses_a_pickle_unless_asked(theirs, mark, tmp_path, monkeypatch):
    (theirs / "model.safetensors").unlink()
    (theirs / "pytorch_model.bin").write_bytes(bombs(mark, tmp_path / "bomb")[2])
    out = tmp_path / "wide"
    for extra, message in (((), "allow-pickle"), (("--allow-pickle",), "cannot be read")):
        arguments = [str(theirs), "--out", str(out), "--factor", "2", *extra]
        monkeypatch.setattr(sys, "argv", ["grow.py", *arguments])
        with pytest.raises(UserError, match=message):
            grow.main()
        assert not mark.exists() and not out.exists()


def test_code_that_a_config_names_is_not_run(theirs, mark, tmp_path):
    """auto_map asks transformers to import a file of the folder: refused by name, not run."""
    raw = files.read_json(theirs / "config.json")
    raw["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    files.write_json(theirs / "config.json", raw)
    (theirs / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    with pytest.raises(UserError, match="auto_map"):
        hf_folder.open_folder(theirs)
    assert not mark.exists()


def test_sound_pickled_weights_are_read_when_asked(theirs):
    sound = hf_folder.open_folder(theirs)
    weights = {name: sound.stored[name] for name in sound.stored}
    torch.save(weights, theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").unlink()
    with pytest.raises(UserError, match="allow-pickle"):
        hf_folder.open_folder(theirs)
    read = hf_folder.open_folder(theirs, allow_pickle=True).stored
    assert all(torch.equal(read[name], w) for name, w in weights.items())
