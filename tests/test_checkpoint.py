import hashlib
import json
import os
import pickle
import struct
from dataclasses import asdict

import pytest
import safetensors.torch
import torch

import checkpoint
import files
from errors import UserError
from models.gpt import GPT, GPTConfig

CFG = GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=2, head_dim=4, d_model=8)
META = {"config": asdict(CFG), "step": 3, "ema": 0.1 + 0.2, "lineage": []}


@pytest.fixture
def model():
    return GPT(CFG, seed=1)


@pytest.fixture
def saved(tmp_path, model):
    moments = {"wte.weight/exp_avg": torch.ones(16, 8)}
    checkpoint.save(tmp_path / "ckpt", model.state_dict(), META, moments)
    return tmp_path / "ckpt"


def test_round_trip_is_bitwise(saved, model):
    ckpt = checkpoint.load(saved)
    assert ckpt.model.keys() == model.state_dict().keys()
    assert all(torch.equal(ckpt.model[k], v) for k, v in model.state_dict().items())
    assert ckpt.meta == META
    assert ckpt.hash == checkpoint.model_hash(model.state_dict())
    assert torch.equal(ckpt.optimizer["wte.weight/exp_avg"], torch.ones(16, 8))
    assert checkpoint.model_config(ckpt) == CFG


def test_same_weights_same_hash_and_other_weights_another(tmp_path, model):
    first = checkpoint.save(tmp_path / "a", model.state_dict(), META)
    assert checkpoint.save(tmp_path / "b", model.state_dict(), {"other": 1}) == first
    assert checkpoint.save(tmp_path / "c", GPT(CFG, seed=2).state_dict(), META) != first
    assert checkpoint.load(tmp_path / "a").optimizer is None


def test_wrapper_prefixes_and_tied_heads_never_reach_the_disk(tmp_path, model):
    wrapped = {f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}
    checkpoint.save(tmp_path / "c", wrapped, META)
    names = checkpoint.load(tmp_path / "c").model.keys()
    assert names == model.state_dict().keys() and "lm_head.weight" not in names


def test_views_of_a_larger_storage_are_stored_alone(tmp_path):
    big = torch.arange(100.0)
    checkpoint.save(tmp_path / "c", {"a": big[:10], "b": big[10:20]}, {})
    assert torch.equal(checkpoint.load(tmp_path / "c").model["b"], big[10:20])
    assert (tmp_path / "c" / checkpoint.MODEL).stat().st_size < 300


def test_an_existing_checkpoint_is_kept_without_force(saved, model):
    with pytest.raises(UserError, match="exists"):
        checkpoint.save(saved, model.state_dict(), {"new": 1})
    assert checkpoint.load(saved).meta == META
    checkpoint.save(saved, model.state_dict(), {"new": 1}, force=True)
    assert checkpoint.load(saved).meta == {"new": 1}


@pytest.mark.parametrize(
    "stage", [(checkpoint, "write_tensors"), (files, "sync"), (files, "publish")]
)
def test_a_save_that_dies_leaves_the_old_one_and_no_litter(saved, model, monkeypatch, stage):
    def die(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*stage, die)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(saved, model.state_dict(), {"new": 1}, force=True)
    assert checkpoint.load(saved).meta == META
    assert [p.name for p in saved.parent.iterdir()] == ["ckpt"]


def test_meta_that_is_not_json_is_never_written(tmp_path, model):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path / "c", model.state_dict(), {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


# ---- refusals. Each takes a sound checkpoint folder, damages it, and says what must be reported.


def edit(folder, **changes):
    """Change state.json, with its own hash made right again: only the change is wrong."""
    state = json.loads((folder / checkpoint.STATE).read_text())
    state |= changes
    if isinstance(state["meta"], dict):
        state["meta_sha256"] = checkpoint.hash_json(state["meta"])
    (folder / checkpoint.STATE).write_text(json.dumps(state))


def forge(folder, data: bytes):
    """Replace the weights by any bytes, with size and sha256 in state.json made to fit."""
    (folder / checkpoint.MODEL).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(folder, files={checkpoint.MODEL: entry})


def header(text: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode()


def truncate(folder):
    os.truncate(folder / checkpoint.MODEL, 100)


def flip(folder):
    data = bytearray((folder / checkpoint.MODEL).read_bytes())
    data[-1] ^= 1
    (folder / checkpoint.MODEL).write_bytes(data)


def alter_meta(folder):
    text = (folder / checkpoint.STATE).read_text()
    (folder / checkpoint.STATE).write_text(text.replace('"step": 3', '"step": 4'))


def state_is(text: str):
    return lambda folder: (folder / checkpoint.STATE).write_text(text)


LYING = '{"wte.weight":{"dtype":"F32","shape":[%s],"data_offsets":[%s]}}'
REFUSED = {
    "weights missing": (lambda f: (f / checkpoint.MODEL).unlink(), "missing"),
    "optimizer missing": (lambda f: (f / checkpoint.OPTIMIZER).unlink(), "missing"),
    "state missing": (lambda f: (f / checkpoint.STATE).unlink(), "not a checkpoint"),
    "truncated": (truncate, "truncated"),
    "one bit": (flip, "altered"),
    "meta altered": (alter_meta, "altered"),
    "half a state": (state_is('{"format": "gpt-gro'), "no valid JSON"),
    "state empty": (state_is(""), "no valid JSON"),
    "state a list": (state_is("[]"), "not an object"),
    "state of another program": (state_is('{"step": 1}'), "not a checkpoint"),
    "deep JSON": (state_is("[" * 1_000_000), "no valid JSON"),
    "huge JSON": (state_is(" " * (files.MAX_JSON + 1)), "bytes"),
    "huge integer": (state_is('{"version": ' + "9" * 10_000 + "}"), "no valid JSON"),
    "NaN in JSON": (state_is('{"format": NaN}'), "no valid JSON"),
    "other format": (lambda f: edit(f, format="pytorch"), "format"),
    "later version": (lambda f: edit(f, version=2), "version 2"),
    "no meta": (lambda f: edit(f, meta=None), "damaged"),
    "path traversal": (
        lambda f: edit(f, files={"../ckpt/model.safetensors": {"bytes": 1, "sha256": ""}}),
        "damaged",
    ),
    "files a list": (lambda f: edit(f, files=["model.safetensors"]), "damaged"),
    "header longer than the file": (lambda f: forge(f, header("{}", 1 << 40)), "header"),
    "header of 2^64 - 1": (lambda f: forge(f, header("{}", (1 << 64) - 1)), "header"),
    "header cut": (lambda f: forge(f, b"\x08\0\0"), "header"),
    "header no JSON": (lambda f: forge(f, header("{{{{")), "no sound safetensors"),
    "absurd shape": (
        lambda f: forge(f, header(LYING % ("4294967296,4294967296,4294967296", "0,8")) + b"8" * 8),
        "no sound safetensors",
    ),
    "offsets beyond the data": (
        lambda f: forge(f, header(LYING % ("2", "0,8"))),
        "no sound safetensors",
    ),
    "integers for weights": (
        lambda f: forge(f, safetensors.torch.save({"wte.weight": torch.ones(2).int()})),
        "no weight",
    ),
    "prefix inside": (
        lambda f: forge(f, safetensors.torch.save({"module.wte.weight": torch.ones(2)})),
        "no weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(saved, name):
    damage, message = REFUSED[name]
    damage(saved)
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(saved)
    assert "ckpt" in str(caught.value) and "\n" not in str(caught.value)[:200]


def test_a_place_that_is_no_checkpoint_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="checkpoint"):
            checkpoint.load(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoint"):
        checkpoint.load(tmp_path / "file")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_pickle_is_refused_and_not_run(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    forge(saved, pickle.dumps(Bomb()))
    with pytest.raises(UserError):
        checkpoint.load(saved)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 16, "n_head": 4},
        {"n_layer": 2},
        {"n_layer": 10**9},
        {"vocab_size": 10**12},
        {"block_size": 10**12},
        {"norm_eps": 10**400},
        {"n_head": 3},
        {"new_field": 1},
        {"d_ff": None},
    ],
)
def test_a_config_that_disagrees_with_the_weights_is_refused(saved, change):
    edit(saved, meta=META | {"config": asdict(CFG) | change})
    with pytest.raises(UserError):
        checkpoint.model_config(checkpoint.load(saved))


def test_weights_of_another_shape_or_name_are_refused(model):
    tensors = model.state_dict()
    checkpoint.load_weights(model, tensors, "same")
    for wrong in (
        {k: v for k, v in tensors.items() if k != "ln_f.bias"},
        tensors | {"extra": torch.ones(1)},
        tensors | {"ln_f.bias": torch.ones(9)},
    ):
        with pytest.raises(UserError, match="another model config"):
            checkpoint.load_weights(model, wrong, "wrong")


def test_newest_skips_what_is_damaged_or_half_written(tmp_path, model, capsys):
    assert checkpoint.newest(tmp_path) is None
    for step in (2, 10, 100):
        meta = META | {"step": step}
        checkpoint.save(tmp_path / f"step_{step:08d}", model.state_dict(), meta)
    (tmp_path / ".step_00000200.tmp-1").mkdir()
    (tmp_path / "step_final").mkdir()
    assert checkpoint.newest(tmp_path).meta["step"] == 100
    truncate(tmp_path / "step_00000100")
    assert checkpoint.newest(tmp_path).meta["step"] == 10
    assert "step_00000100" in capsys.readouterr().err


def test_prune_keeps_the_newest_and_sweeps_up(tmp_path, model):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / f"step_{step:08d}", model.state_dict(), META)
    (tmp_path / ".step_00000004.tmp-1").mkdir()
    (tmp_path / ".progress.json.tmp-1").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.prune(tmp_path, keep=2)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["notes.txt", "step_00000002", "step_00000003"]
