"""The sound inputs that the sweep spoils: texts, a corpus, a small grid's rows and checkpoints, a
run that was interrupted, and Hugging Face folders; all tiny, all made by the project itself."""

import json
import multiprocessing
import shutil
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

SMALL = {"vocab_size": 257, "block_size": 16, "n_layer": 2}
SMALL |= {"n_head": 2, "head_dim": 4, "d_model": 8}
SHORT = {"steps": 3, "batch_size": 2, "warmup_steps": 1, "eval_every": 3, "eval_tokens": 64}
SHORT |= {"save_every": 2, "last_tokens": 64}
STEP = "step_00000002"  # the last checkpoint of the interrupted run


def make_world(place: Path) -> Path:
    """Fill the new folder `place`, in a process of its own; this one stays free of threads."""
    place.mkdir(parents=True)
    maker = multiprocessing.get_context("fork").Process(target=fill, args=(place,))
    maker.start()
    maker.join()
    assert maker.exitcode == 0, (place / "log").read_text()
    return place


def fill(place: Path) -> None:
    with open(place / "log", "w") as log, redirect_stdout(log), redirect_stderr(log):
        fill_texts(place / "texts", place / "corpus")
        fill_grid(place / "grid", place / "corpus")
        interrupt_run(place / "run", place / "corpus")
        parent = place / "grid" / "runs" / "parent-s0"
        shutil.copytree(place / "run", place / "finished")
        shutil.copy(parent / "done.json", place / "finished")
        export(parent / "final", place)


def fill_texts(texts: Path, corpus: Path) -> None:
    from data.prepare import PrepareConfig, prepare

    texts.mkdir()
    for i in range(40):
        words = " ".join(str(i * j * j % 977) for j in range(60))
        (texts / f"{i:02}.txt").write_text(f"Text {i}: {words}\n")
    prepare(PrepareConfig(f"file:{texts}", "byte", corpus, val_fraction=0.2, block_size=16))


def fill_grid(out: Path, corpus: Path) -> None:
    """Two seeds of parent, scratch and nrio, a few steps each: real rows and checkpoints."""
    from cluster.execute import execute
    from grid import expand_grid

    code = {"commit": "0" * 40, "dirty": False}
    spec = {"preset": "smoke", "data": str(corpus), "command": "fuzz", "code": code}
    for run in expand_grid("smoke", ["scratch", "nrio"], [0, 1]):
        d_model = 8 if run.stage == 0 else 12
        sizes = SMALL | {"d_ff": 0, "d_model": d_model, "n_head": d_model // 4}
        train = run.train | SHORT | {"model": run.train["model"] | sizes}
        run = replace(run, d_model=d_model, train=train)
        execute(str(out), run.run_id, spec | {"run": asdict(run)})


def interrupt_run(out: Path, corpus: Path) -> None:
    """A run folder with checkpoints that stopped before its last step: what run_arguments start."""
    import train
    from models.gpt import GPTConfig
    from training.config import TrainConfig

    left = [train.update] * 2
    with mock.patch.object(train, "update", lambda *given: left.pop()(*given)):
        with suppress(IndexError):  # the third
            train.train(TrainConfig(out, corpus, model=GPTConfig(**SMALL), **SHORT))
    assert (out / STEP).is_dir()


def export(ckpt: Path, place: Path) -> None:
    """The checkpoint as a Hugging Face folder of one file, and as one of several shards."""
    from transformers import GPT2LMHeadModel

    from models.convert import ConvertConfig, convert

    convert(ConvertConfig("to-gpt2", ckpt, place / "hf"))
    model = GPT2LMHeadModel.from_pretrained(place / "hf")
    model.save_pretrained(place / "hf_sharded", max_shard_size="5KB")


def run_arguments() -> tuple[str, ...]:
    """Command-line arguments of the short run: the folder's `corpus`, into its `run`."""
    options = SHORT | {f"model.{name}": value for name, value in SMALL.items()}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return ("--out", "run", "--data", "corpus", *(part for pair in pairs for part in pair))


def reseal(folder: Path) -> None:
    """Make a spoilt checkpoint's state.json agree with its files again: a forger would."""
    import checkpoint

    state = json.loads((folder / "state.json").read_text())
    for name, entry in state["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": checkpoint.hash_file(folder / name)}
    with suppress(ValueError):  # NaN has no canonical JSON
        state["meta_sha256"] = checkpoint.hash_json(state["meta"])
    (folder / "state.json").write_text(json.dumps(state))
