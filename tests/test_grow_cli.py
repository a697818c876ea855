"""grow.py end to end: what it writes, and one line, exit 2 and nothing written for bad input."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import grow
from checks import zoo
from errors import UserError
from models.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[1]


def save(folder: Path, name: str = "GPT-2", dtype=torch.float32, **kwargs) -> Path:
    torch.manual_seed(0)
    net = zoo.shake(zoo.hugging_face(zoo.MODELS[name])).to(dtype)
    net.save_pretrained(folder, **kwargs)
    return folder


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return save(tmp_path / "gpt2")


def run(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["grow.py", *map(str, args)])
    grow.main()


def edit_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


# ---- what it writes


@pytest.mark.parametrize("how", [("--factor", 2), ("--factor", 1.5), ("--width", 48)])
def test_it_writes_a_loadable_exact_model(how, gpt2, tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    (gpt2 / "tokenizer.json").write_text("{}")
    run(monkeypatch, gpt2, "--out", tmp_path / "wide", *how)
    report = json.loads((tmp_path / "wide" / "growth_report.json").read_text())
    assert report["max_rel_dlogit"] < 1e-5 and report["kl"] < 1e-9
    assert report["d_model"][1] == (64 if how[1] == 2 else 48)
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert sum(p.numel() for p in net.parameters()) == report["parameters"][1]
    assert (tmp_path / "wide" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "wide" / "generation_config.json").is_file()
    assert "max |dlogit|" in capsys.readouterr().out


@pytest.mark.parametrize("name,alias,own", [("GPT-2", "hidden_size", "n_embd")])
def test_a_size_under_transformers_other_name(name, alias, own, tmp_path, monkeypatch):
    source = save(tmp_path / "source", name)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {alias: raw.pop(own)}))
    run(monkeypatch, source, "--out", tmp_path / "wide", "--factor", 2)
    wide = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert wide[own] == 64 and alias not in wide


def test_a_size_that_only_the_class_knows(tmp_path, monkeypatch):
    """Mistral has 8 key heads unless config.json says otherwise."""
    from transformers import AutoModelForCausalLM

    sizes = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    mistral = replace(zoo.MODELS["Mistral"], extra=tuple(sizes.items()))
    zoo.hugging_face(mistral).save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    raw = json.loads(file.read_text())
    del raw["num_key_value_heads"]
    file.write_text(json.dumps(raw))
    run(monkeypatch, tmp_path / "source", "--out", tmp_path / "wide", "--factor", 2)
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert net.config.num_key_value_heads == 16


def test_shards_in_and_out(tmp_path, monkeypatch):
    source = save(tmp_path / "gpt2", max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    run(monkeypatch, source, "--out", tmp_path / "wide", "--factor", 2, "--shard-gb", 1e-4)
    assert len(list((tmp_path / "wide").glob("model-*-of-*.safetensors"))) > 1
    report = json.loads((tmp_path / "wide" / "growth_report.json").read_text())
    assert report["max_rel_dlogit"] < 1e-5


def test_half_precision_and_other_dtypes(tmp_path, monkeypatch):
    source = save(tmp_path / "gpt2", dtype=torch.bfloat16)
    run(monkeypatch, source, "--out", tmp_path / "same", "--factor", 2)
    run(monkeypatch, source, "--out", tmp_path / "single", "--factor", 2, "--dtype", "float32")
    kinds = [
        {t.dtype for t in load_file(tmp_path / n / "model.safetensors").values()}
        for n in ("same", "single")
    ]
    assert kinds == [{torch.bfloat16}, {torch.float32}]


def test_dry_run_writes_nothing(gpt2, tmp_path, monkeypatch, capsys):
    run(monkeypatch, gpt2, "--out", tmp_path / "wide", "--factor", 2, "--dry-run")
    out = capsys.readouterr().out
    assert "transformer.wte.weight" in out and "(61, 32) -> (61, 64)" in out
    assert "parameters" in out and not (tmp_path / "wide").exists()


def test_force_replaces_and_its_absence_refuses(gpt2, tmp_path, monkeypatch):
    out = tmp_path / "wide"
    run(monkeypatch, gpt2, "--out", out, "--factor", 2)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--force"):
        run(monkeypatch, gpt2, "--out", out, "--factor", 3)
    assert (out / "model.safetensors").read_bytes() == before
    run(monkeypatch, gpt2, "--out", out, "--factor", 3, "--force")
    assert (out / "model.safetensors").read_bytes() != before


def test_same_seed_same_bytes(gpt2, tmp_path, monkeypatch):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(monkeypatch, gpt2, "--out", tmp_path / name, "--width", 48, "--seed", seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c


def test_approximate_parts_are_named(tmp_path, monkeypatch, capsys):
    source = save(tmp_path / "llama", "Llama GQA")
    args = (source, "--factor", 2, "--heads", "wider")
    run(monkeypatch, *args, "--out", tmp_path / "a", "--rope", "recompute")
    assert re.search(r"\n  approximate +RoPE", capsys.readouterr().out)
    run(monkeypatch, *args, "--out", tmp_path / "b")
    assert "\n  approximate" not in capsys.readouterr().out


def test_srio_and_nrio_grow_too(gpt2, tmp_path, monkeypatch):
    for method in ("srio", "nrio", "ligo-init", "exact-srio"):
        out = tmp_path / method
        run(monkeypatch, gpt2, "--out", out, "--width", 48, "--method", method)
        report = json.loads((out / "growth_report.json").read_text())
        assert (report["max_rel_dlogit"] < 1e-5) == (method == "exact-srio")


def test_old_names_and_buffers_are_understood(tmp_path, monkeypatch):
    """Bare-model names without their prefix, and stored causal masks."""
    source = save(tmp_path / "gpt2")
    tensors = load_file(source / "model.safetensors")
    old = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    save_file(old, source / "model.safetensors", metadata={"format": "pt"})
    run(monkeypatch, source, "--out", tmp_path / "wide", "--factor", 1.5)
    report = json.loads((tmp_path / "wide" / "growth_report.json").read_text())
    assert report["max_rel_dlogit"] < 1e-5


def test_our_checkpoints_grow(tmp_path, monkeypatch, capsys):
    cfg = GPTConfig(vocab_size=31, block_size=8, n_layer=1, n_head=2, head_dim=4, d_model=8)
    weights = zoo.shake(GPT(cfg, 0).double()).state_dict()
    checkpoint.save(tmp_path / "ours", weights, {"config": vars(cfg), "step": 0})
    run(monkeypatch, tmp_path / "ours", "--out", tmp_path / "wide", "--factor", 1.5)
    assert "exact" in capsys.readouterr().out
    assert checkpoint.model_config(checkpoint.load(tmp_path / "wide")).d_model == 12
    run(monkeypatch, tmp_path / "ours", "--out", tmp_path / "no", "--factor", 2, "--dry-run")
    assert "wte.weight" in capsys.readouterr().out and not (tmp_path / "no").exists()


# ---- bad input


def drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change(folder: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


WTE, UP = "transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"
BROKEN = {
    "no config": (lambda p: (p / "config.json").unlink(), "config.json"),
    "bad json": (lambda p: (p / "config.json").write_text("{"), "no JSON"),
    "unknown family": (lambda p: edit_config(p, model_type="mamba"), "gpt2, bert.*models/axes.py"),
    "no family": (lambda p: (p / "config.json").write_text("{}"), "supported"),
    "quantized": (lambda p: edit_config(p, quantization_config={"bits": 4}), "quantized"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no weights"),
    "cut short": (lambda p: truncate(p / "model.safetensors"), "damaged or cut short"),
    "other width": (lambda p: edit_config(p, n_embd=64), "config.json implies"),
    "missing tensor": (lambda p: drop(p, UP), f"(?s)not stored.*{UP}"),
    "unknown tensor": (lambda p: change(p, "adapter.weight", torch.ones(2)), "adapter.weight"),
    "integers": (lambda p: change(p, UP, torch.ones(32, 40, dtype=torch.int8)), "float"),
    "not finite": (lambda p: change(p, UP, torch.full((32, 40), torch.nan)), "not finite"),
    "false tie": (lambda p: change(p, "lm_head.weight", torch.ones(61, 32)), "tie_word_embeddings"),
    "false untie": (lambda p: edit_config(p, tie_word_embeddings=False), "tie_word_embeddings"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sources_are_named_and_nothing_is_written(name, gpt2, tmp_path, monkeypatch):
    damage, message = BROKEN[name]
    damage(gpt2)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        run(monkeypatch, gpt2, "--out", tmp_path / "wide", "--factor", 2)
    assert sorted(tmp_path.iterdir()) == before


def test_missing_shard(tmp_path, monkeypatch):
    source = save(tmp_path / "gpt2", max_shard_size="20KB")
    shard = sorted(source.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"missing.*{shard.name}"):
        run(monkeypatch, source, "--out", tmp_path / "wide", "--factor", 2)


def test_pickles_only_on_request(gpt2, tmp_path, monkeypatch):
    tensors = load_file(gpt2 / "model.safetensors")
    (gpt2 / "model.safetensors").unlink()
    torch.save(tensors, gpt2 / "pytorch_model.bin")
    args = (gpt2, "--out", tmp_path / "wide", "--factor", 2)
    with pytest.raises(UserError, match="--allow-pickle"):
        run(monkeypatch, *args)
    run(monkeypatch, *args, "--allow-pickle")
    assert (tmp_path / "wide" / "model.safetensors").is_file()
    assert not (tmp_path / "wide" / "pytorch_model.bin").exists()


def test_a_pickle_that_runs_code_is_refused(gpt2, tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    (gpt2 / "model.safetensors").unlink()
    torch.save({"a": Evil()}, gpt2 / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read"):
        run(monkeypatch, gpt2, "--out", tmp_path / "w", "--factor", 2, "--allow-pickle")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "args,message",
    [
        (("--factor", 2, "--width", 64), "exactly one"),
        ((), "exactly one"),
        (("--factor", 0.5), "above 32"),
        (("--factor", 1.51), "--width 48"),
        (("--width", 48, "--method", "lossless"), "64 and 96"),
        (("--width", 50), "48 and 56"),
        (("--width", 50, "--heads", "wider"), "nearest"),
        (("--factor", 2, "--method", "lrio"), "run_ablations"),
        (("--factor", 2, "--dtype", "int8"), "float32"),
        (("--factor", 2, "--heads", "most"), "more, wider"),
        (("--factor", 2, "--method", "srio", "--epsilon", 9), "epsilon"),
        (("--factor", 1.5, "--noise", 20), "lossless"),
        (("--factor", 2, "--noise", "nan"), "finite"),
    ],
)
def test_bad_requests_say_what_would_do(args, message, gpt2, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=message):
        run(monkeypatch, gpt2, "--out", tmp_path / "wide", *args)
    assert not (tmp_path / "wide").exists()


def test_places_that_would_lose_data_are_refused(gpt2, tmp_path, monkeypatch):
    for out in (gpt2, gpt2 / "inside", tmp_path):
        with pytest.raises(UserError, match="overlaps"):
            run(monkeypatch, gpt2, "--out", out, "--factor", 2, "--force")
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("years of work")
    with pytest.raises(UserError, match="never replaced"):
        run(monkeypatch, gpt2, "--out", other, "--factor", 2, "--force")
    assert (other / "chapter.tex").is_file()


def test_an_error_is_one_line_and_exit_2(tmp_path):
    command = [sys.executable, "grow.py", str(tmp_path / "no"), "--out", "x", "--factor", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "is no folder" in done.stderr


def test_a_full_disk_leaves_nothing(gpt2, tmp_path, monkeypatch):
    from models import hf_folder

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_folder.safetensors.torch, "save_file", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="space"):
        run(monkeypatch, gpt2, "--out", tmp_path / "wide", "--factor", 2)
    assert sorted(tmp_path.iterdir()) == before
    shutil.rmtree(gpt2)
