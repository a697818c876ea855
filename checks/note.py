"""What the note on lossless scaling says of trained models, measured on models trained here.

    python -m checks.note --data CORPUS --out results/note

mlm    a small BERT (GELU, post-LN) learns masked tokens, is widened x2 as grow.py does it, and
       judged on fixed masked positions: accuracy, loss and logits, in float64
rope   a small Llama-like GPT learns the corpus, is widened x2 with wider heads, by the note's rule
       (pairs repeated, RoPE's frequencies recomputed) and by the exact one (each frequency twice),
       and trains on beside its ungrown parent: same batches, same constant rate, Adam from zero

One row for each part and seed; a row that is there, of the same settings, is kept. The table is
analysis/note.py's.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from errors import exit_on_user_error, read_command_line
from settings import Range, check

Count = Annotated[int, Range(1, 10**6)]


@dataclass(frozen=True)
class NoteConfig:
    """Train small models, widen them x2, measure what the note claims."""

    data: Path  # prepared corpus
    out: Path = Path("results/note")
    seeds: Count = 5
    mlm_steps: Count = 1500
    mlm_batch: Count = 8
    parent_steps: Count = 500  # of the GPT with RoPE
    child_steps: Count = 32  # of each continuation
    batch: Count = 16
    context: Annotated[int, Range(4, 4096)] = 64
    eval_tokens: Count = 8_192  # of the GPT
    mlm_tokens: Count = 16_384  # of the BERT: 15 % of these are asked for


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(NoteConfig, __doc__))

import torch
import torch.nn.functional as F
from tqdm import tqdm

import files
from analysis import note
from data.shards import Corpus
from growth.child import continue_checkpoint, grow_checkpoint
from growth.folder import grow_folder, plan_folder
from growth.plan import GrowConfig
from models.config import GPTConfig
from models.double import Float64
from provenance import provenance
from train import train
from training.config import TrainConfig

D, HEADS = 64, 4
MASKED = 0.15
LR_MLM, LR = 2e-3, 4e-3  # LR was swept for our tiny GPTs
IGNORED = -100  # the label of a position that is not asked for, as in transformers


# ---- masked language model


def bert(vocab_size: int, context: int, seed: int) -> torch.nn.Module:
    """A BERT with GELU in blocks and head, without dropout; the last id is [MASK]."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    sizes = dict(hidden_size=D, num_hidden_layers=2, num_attention_heads=HEADS)
    sizes |= dict(intermediate_size=4 * D, max_position_embeddings=context)
    plain = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1)
    return BertForMaskedLM(
        BertConfig(vocab_size=vocab_size + 1, hidden_act="gelu", **sizes, **plain)
    )


def mask(x_bt: torch.Tensor, vocab_size: int, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, labels) (B, T): 15 % of the tokens are asked for, of these 80 % replaced by [MASK],
    10 % by a random token, 10 % kept (BERT, arXiv 1810.04805). A function of `key` alone."""
    gen = torch.Generator().manual_seed(key)
    asked_bt = torch.rand(x_bt.shape, generator=gen) < MASKED
    asked_bt[0, 0] = True  # never none
    how_bt = torch.rand(x_bt.shape, generator=gen)
    drawn_bt = torch.randint(vocab_size, x_bt.shape, generator=gen)
    changed_bt = torch.where(how_bt < 0.8, vocab_size, torch.where(how_bt < 0.9, drawn_bt, x_bt))
    return torch.where(asked_bt, changed_bt, x_bt), torch.where(asked_bt, x_bt, IGNORED)


def asked_logits(net: torch.nn.Module, x_bt: torch.Tensor, labels_bt: torch.Tensor) -> torch.Tensor:
    """(n, V) logits of the positions that are asked for; the head runs on these alone."""
    return net.cls(net.bert(x_bt).last_hidden_state[labels_bt != IGNORED])


def train_mlm(net: torch.nn.Module, corpus: Corpus, cfg: NoteConfig, seed: int) -> None:
    steps, key = cfg.mlm_steps, 1_000_003 * (seed + 1)
    optimizer = torch.optim.AdamW(net.parameters(), LR_MLM, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR_MLM, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
    )
    for step in tqdm(range(steps), desc=f"BERT, seed {seed}", mininterval=5):
        x_bt, _ = corpus.batch_at(step, seed, cfg.mlm_batch, cfg.context)
        x_bt, labels_bt = mask(x_bt, corpus.vocab_size, key + step)
        F.cross_entropy(asked_logits(net, x_bt, labels_bt), targets(labels_bt)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()


def targets(labels_bt: torch.Tensor) -> torch.Tensor:
    return labels_bt[labels_bt != IGNORED]


@torch.no_grad()
def judge(net: torch.nn.Module, batches: list) -> tuple[torch.Tensor, torch.Tensor]:
    """((n, V) logits, (n,) targets) of all asked positions of the validation batches."""
    with Float64(net):
        found = [asked_logits(net, *batch) for batch in batches]
    return torch.cat(found), torch.cat([targets(labels_bt) for _, labels_bt in batches])


def scores(before_nv: torch.Tensor, after_nv: torch.Tensor, target_n: torch.Tensor) -> dict:
    """Accuracy and loss (nats) of `after`, its largest change of a logit over the spread of
    `before`, and the share of positions whose prediction changed."""
    best = after_nv.argmax(1)
    return {
        "accuracy": (best == target_n).double().mean().item(),
        "loss": F.cross_entropy(after_nv.double(), target_n).item(),
        "max_rel_dlogit": ((after_nv - before_nv).abs().max() / before_nv.std()).item(),
        "changed": (best != before_nv.argmax(1)).double().mean().item(),
    }


def extra_root(net: torch.nn.Module) -> None:
    """The note's sentence taken literally: the LayerNorm after the head's GELU layer divides by
    sqrt(2) once more than the plain rule does."""
    norm = net.cls.predictions.transform.LayerNorm
    norm.weight.data /= math.sqrt(2)
    norm.bias.data /= math.sqrt(2)


def printed_bias(net: torch.nn.Module) -> None:
    """The note's table taken literally: the bias after an FFN's GELU is b/2, not b/sqrt(2)."""
    for layer in net.bert.encoder.layer:
        layer.output.dense.bias.data /= math.sqrt(2)


WIDER = GrowConfig("lossless", heads="wider")
SCALED = replace(WIDER, gauge="norm")  # the note's own 1/sqrt(2) on BERT's stream
# name -> settings, what is then changed in the wide model, dtype of the folders
FORMS: dict[str, tuple[GrowConfig, Callable | None, torch.dtype]] = {
    "lossless": (WIDER, None, torch.float64),
    "lossless, float32": (WIDER, None, torch.float32),
    "note's scales": (SCALED, None, torch.float64),
    note.LITERAL: (SCALED, extra_root, torch.float64),
    "note's scales, b/2": (SCALED, printed_bias, torch.float64),
    "nrio (control)": (GrowConfig("nrio"), None, torch.float64),
}


def measure_mlm(corpus: Corpus, cfg: NoteConfig, seed: int, place: Path) -> dict:
    """{form: scores} of one trained BERT, "parent" among them."""
    net = bert(corpus.vocab_size, cfg.context, seed)
    train_mlm(net, corpus, cfg, seed)
    validation = corpus.eval_batches(cfg.mlm_tokens, 32, cfg.context)
    batches = [mask(x_bt, corpus.vocab_size, i) for i, (x_bt, _) in enumerate(validation)]
    found, before = {}, {}
    for dtype in (torch.float32, torch.float64):
        net.to(dtype).save_pretrained(place / str(dtype))
        before[dtype], target_n = judge(net.eval(), batches)
    found["parent"] = scores(before[dtype], before[dtype], target_n)
    for name, (settings, edit, dtype) in FORMS.items():
        wide = widened(place / str(dtype), place / "wide", settings, dtype)
        if edit:
            edit(wide)
        found[name] = scores(before[dtype], judge(wide, batches)[0], target_n)
    return found


def widened(parent: Path, out: Path, settings: GrowConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The model that grow.py writes for `parent`, loaded by transformers."""
    from transformers import BertForMaskedLM

    grow_folder(plan_folder(parent, 2 * D, settings), out, force=True, progress=False)
    return BertForMaskedLM.from_pretrained(out, dtype=dtype, local_files_only=True).eval()


# ---- RoPE

STARTS = {
    "parent": None,  # not grown
    "recomputed": replace(WIDER, rope="recompute"),
    "exact": WIDER,
}


def measure_rope(corpus: Corpus, cfg: NoteConfig, seed: int, place: Path) -> dict:
    """{"parent_loss", "curves": {start: {step: validation loss}}} of one seed."""
    model = GPTConfig(
        vocab_size=corpus.vocab_size, block_size=cfg.context, n_layer=2, n_head=HEADS,
        head_dim=D // HEADS, d_model=D, d_ff=3 * D, norm="rmsnorm", bias=False,
        activation="swiglu", position="rope",
    )  # fmt: skip
    shared = dict(data=cfg.data, seed=seed, data_seed=seed, batch_size=cfg.batch, device="cpu")
    shared |= dict(eval_tokens=cfg.eval_tokens, dtype="float32", save_every=10**6)
    steps = cfg.parent_steps
    parent = TrainConfig(
        place / "small", model=model, steps=steps, lr=LR, eval_every=steps, **shared
    )
    loss, curves = train(parent)["metrics"]["val_loss"], {}
    for name, settings in STARTS.items():
        init = place / f"{name}-start"
        if settings is None:
            continue_checkpoint(parent.out / "final", init)
        else:
            grow_checkpoint(parent.out / "final", init, 2 * D, settings)
        run = TrainConfig(
            place / name, init=init, steps=cfg.child_steps, first_batch=steps, lr=LR / 10,
            schedule="constant", warmup_steps=0, eval_every=cfg.child_steps,
            eval_at=note.STEPS, **shared,
        )  # fmt: skip
        curve = train(run)["curve"]
        steps_done = [tokens // (cfg.batch * cfg.context) for tokens in curve["val_tokens"]]
        curves[name] = dict(zip(map(str, steps_done), curve["val"], strict=True))
    return {"parent_loss": loss, "curves": curves}


# ---- rows

PARTS = {"mlm": measure_mlm, "rope": measure_rope}


def main() -> None:
    cfg = read_command_line(NoteConfig, __doc__)
    check(cfg)
    torch.set_num_threads(1)
    corpus = Corpus(cfg.data, verify="hash")
    cfg.out.mkdir(parents=True, exist_ok=True)
    for seed in range(cfg.seeds):
        for part in PARTS:
            make_row(part, corpus, cfg, seed)
    print(note.write(cfg.out))


def make_row(part: str, corpus: Corpus, cfg: NoteConfig, seed: int) -> None:
    """Measure one part with one seed and write its row, unless it is there."""
    path = cfg.out / f"{part}-{seed}.json"
    settings = {k: v for k, v in asdict(cfg).items() if k not in ("data", "out", "seeds")}
    source = {key: corpus.manifest[key] for key in ("source", "manifest_hash")}
    source["tokenizer"] = corpus.manifest["tokenizer"]["spec"]
    row = {"part": part, "seed": seed, "config": settings, "corpus": source}
    if path.exists() and row.items() <= files.read_json(path).items():
        return
    with tempfile.TemporaryDirectory() as place:
        found = PARTS[part](corpus, cfg, seed, Path(place))
    command = "python -m checks.note --data CORPUS --out results/note"
    files.write_json(path, row | {"command": command, "found": found, **provenance()})


if __name__ == "__main__":
    exit_on_user_error(main)
