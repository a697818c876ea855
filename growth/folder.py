"""Grow a Hugging Face folder into a wider one, tensor by tensor, and measure what changed."""

import ctypes
import re
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import files
from errors import UserError
from growth.apply import grow_all, plan_growth, stored_as
from growth.operators import OPERATORS, find
from growth.plan import GrowConfig, Plan, Source
from growth.report import NotExact
from growth.report import card as report_card
from models import hf, hf_folder, rope, travels
from models.axes import Spec
from models.double import Float64
from models.sizes import TOGETHER, Apart

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
DTYPES["float16"] = torch.float16
# of a deep model's outputs over their spread; float32 seen on real weights: 7e-5
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4}
UNTIED = (
    "the output head is no longer tied to the embedding (tie_word_embeddings false): the norm "
    "before it has no gain, and nothing else could keep the scale of the logits"
)


@dataclass(frozen=True)
class Growth:
    """One planned growth of a folder: the source, the plan, and what the new config.json says."""

    source: hf_folder.Folder
    plan: Plan
    raw: dict
    inexact: tuple[str, ...]  # why the result is not exact; none promises exactness
    rounding: tuple[str, ...]  # what is exact to float32 rounding only
    remarks: tuple[str, ...]  # what is exact and yet to be known
    dtype: torch.dtype | None  # of what is written; None keeps every tensor's own

    def dtype_of(self, tensor: str) -> torch.dtype:
        return self.dtype or self.source.stored.dtypes[tensor]

    @property
    def notes(self) -> list[str]:
        return [*self.inexact, *self.rounding]

    @property
    def twin_limit(self) -> float | None:
        """How far a float64 model may be off, over the spread of its outputs; None: as it likes."""
        if self.inexact:
            return None
        return 1e-5 if self.rounding else 1e-9

    @property
    def card_limit(self) -> float | None:
        """The same for the model itself, whose weights are rounded to what they are stored in."""
        if self.twin_limit is None:
            return None
        stored = {self.dtype_of(name) for name in self.source.stored}
        return max(self.twin_limit, *(ROUNDING[dtype] for dtype in stored))

    @property
    def layout(self) -> hf_folder.Layout:
        """Of the new tensors."""
        return hf_folder.Layout(self.plan.specs, self.plan.new, self.source.family)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """New shapes of the stored tensors by name, without reading one."""
        parts = self.layout.parts
        return {n: self.shape(parts[n], old) for n, old in self.source.stored.shapes.items()}

    def shape(self, parts: list[Spec], old: torch.Size) -> torch.Size:
        new = [self.plan.size(axis, n)[1] for axis, n in zip(parts[0].axes, old, strict=True)]
        if len(parts) > 1:
            new[parts[0].out_dim] = sum(self.plan.sizes[s.axes[s.out_dim]][1] for s in parts)
        return torch.Size(new)

    @property
    def bytes(self) -> dict[str, int]:
        """What each stored tensor takes on disk."""
        return {n: s.numel() * self.dtype_of(n).itemsize for n, s in self.shapes.items()}

    @property
    def parameters(self) -> tuple[int, int]:
        """Old and new count."""
        old, new = self.source.stored.shapes, self.shapes
        return sum(s.numel() for s in old.values()), sum(s.numel() for s in new.values())


def plan_folder(
    src: Path,
    d_new: int,
    cfg: GrowConfig,
    dtype: str = "",
    allow_pickle: bool = False,
    apart: Apart = TOGETHER,
) -> Growth:
    """Plan the growth of folder `src` to width `d_new`; nothing is written.

    Raises UserError as models/hf_folder.open_folder and growth/apply.plan_growth do, for a learned
    operator, or for a dtype that is not in DTYPES.
    """
    if find(cfg.operator).learned:
        static = [name for name, operator in OPERATORS.items() if operator.grow_tensor]
        raise UserError(
            f"method {cfg.operator!r} is learned and needs training data: run_ablations.py; for "
            f"folders choose one of {', '.join(static)}"
        )
    if dtype and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    folder = hf_folder.open_folder(src, allow_pickle)
    travels.check(folder.path)
    loose = find(cfg.operator).preserves and folder.tied and not gain_before_head(folder)
    if loose:
        folder = hf_folder.untied(folder)  # nothing else could keep the scale of the logits
    plan = plan_growth(folder_source(folder), d_new, cfg, apart=apart)
    raw, inexact, rounding = new_config(folder, plan)
    if dtype:
        raw = {n: v for n, v in raw.items() if n != "torch_dtype"} | {"dtype": dtype}
    check_config(folder, raw)
    inexact = (*inexact, *find(cfg.operator).inexact(plan))
    remarks = (*[UNTIED] * loose, *find(cfg.operator).remarks(plan))
    remarks += (*rope.remarks(folder.raw, raw),)
    return Growth(folder, plan, raw, inexact, tuple(rounding), remarks, DTYPES.get(dtype))


def check_config(folder: hf_folder.Folder, raw: dict) -> None:
    """UserError where transformers would not take the wide model's config."""
    try:
        type(folder.config).from_dict(dict(raw))
    except Exception as error:  # noqa: BLE001 - any of transformers' own complaints
        text = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"{folder.path}: transformers refuses the config of the wide model ({text}); choose "
            f"another width or number of heads"
        ) from None


def gain_before_head(folder: hf_folder.Folder) -> bool:
    return any(spec.before_head for spec in folder.specs.values())


def folder_source(folder: hf_folder.Folder) -> Source:
    """The model in a folder, as the pipeline sees it."""
    sizes = hf.sizes_of(folder.config, folder.family)
    arch = hf.arch_of(folder.config, folder.family)
    return Source(folder.specs, Upcast(folder.weights), sizes, arch, folder.tied)


class Upcast(Mapping):
    """Half-precision tensors read as float32, so that scaling rounds once, on storing."""

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self.weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.weights[name]
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def __iter__(self):
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def new_config(source: hf_folder.Folder, plan: Plan) -> tuple[dict, list[str], list[str]]:
    """(config.json of the wide model, what it cannot express, what only to float32 rounding)."""
    family, inexact, rounding = source.family, [], []
    change = find(plan.cfg.operator).config_change(plan)
    raw = hf.widened_config(source.raw, source.config, family, plan.new)
    if family.eps and change.eps != 1:
        raw[family.eps] = getattr(source.config, family.eps) * change.eps
    if not family.eps and abs(change.eps - 1) > 1e-12:
        inexact.append(f"the norm's epsilon is fixed in code but should be x{change.eps:.4g}")
    if family.rope == "half" and change.rope_repeat > 1:
        parameters = rope.repeated(source.config, plan.rotary[0], change.rope_repeat)
        raw = rope.written(raw, parameters)
    if family.rope == "half" and change.theta_power != 1:
        raw = rope.written(raw, rope.stretched(source.config, change.theta_power))
        rounding.append("RoPE's old frequencies come from theta' and agree to float32 rounding")
    return raw, inexact, rounding


def grow_folder(
    growth: Growth,
    dst: Path,
    force: bool = False,
    shard_gb: float = 2.0,
    card: bool = True,
    progress: bool = True,
    force_inexact: bool = False,
) -> dict:
    """Write the wide folder `dst` and return its report, which is also stored there.

    Peak memory: one shard of new tensors and the pages of the old ones that were read.
    Raises NotExact, and writes nothing, where the card breaks the promise of an exact method.
    """
    start = time.perf_counter()
    with hf_folder.new_folder(dst, force) as tmp:
        write_folder(growth, tmp, int(shard_gb * 1e9), progress)
        widths = growth.plan.d_old, growth.plan.d_new
        method, remarks = growth.plan.cfg.operator, growth.remarks
        note = travels.grown_note(growth.source.path.resolve().name, widths, method, remarks)
        travels.copy(growth.source.path, tmp, widths, note)
        report = facts(growth) | {"wall_s": time.perf_counter() - start}
        return_memory()
        outputs = (lambda: measure(growth, tmp)) if card else (lambda: ({}, {}))
        report |= report_card(growth.plan, growth.parameters, written(growth, tmp), outputs)
        report |= {"contract": "approximate" if growth.inexact else "exact"}
        report |= {"approximate": growth.notes, "remarks": remarks}
        report |= {"total_s": time.perf_counter() - start}
        report["peak_rss_mb"] = peak_rss_mb()
        if not force_inexact:
            keep_promise(growth, report)
        files.write_json(tmp / "growth_report.json", report)
    return report


def keep_promise(growth: Growth, report: dict) -> None:
    """NotExact where an exact method's card shows more than rounding."""
    error, limit = report.get("max_rel_dlogit", 0.0), growth.card_limit
    if limit is not None and not error <= limit:
        raise NotExact(
            f"method {growth.plan.cfg.operator} promises an exact result, but the outputs changed "
            f"by {error:.3g} of their spread ({'/'.join(report['dtype'])} rounds to {limit:g} at "
            f"most); nothing was written. --force-inexact keeps it; the model may hold values that "
            f"its dtype cannot, or a part that growth does not know"
        )


def write_folder(
    growth: Growth, folder: Path, shard_bytes: int = 2 * 10**9, progress: bool = False
) -> None:
    """The weights and config.json of the wide model, into an empty folder."""
    folder.mkdir(exist_ok=True)
    names = {growth.source.saved_name(name): name for name in growth.source.stored}
    sizes = dict(zip(names, growth.bytes.values(), strict=True))
    make = lambda saved: stored(growth, names[saved])  # noqa: E731
    hf_folder.write_weights(folder, sizes, make, shard_bytes, progress)
    files.write_json(folder / "config.json", growth.raw)


def stored(growth: Growth, tensor: str) -> torch.Tensor:
    """One wide tensor as it is written; a fused one is put together from its parameters."""
    layout = growth.layout
    parts = dict(grow_all(growth.plan, names=[spec.name for spec in layout.parts[tensor]]))
    return stored_as(tensor, layout.join(tensor, parts), growth.dtype_of(tensor))


def written(growth: Growth, folder: Path) -> Mapping[str, torch.Tensor]:
    """The parameters of the folder that was written, by name, read when asked for."""
    files, read = hf_folder.find_weights(folder, allow_pickle=False)
    places = {hf_folder.current_name(name): (file, name) for name, file in files.items()}
    tensors = hf_folder.Weights(places, read)
    return hf_folder.Parameters(tensors, growth.layout)


def facts(growth: Growth) -> dict:
    plan, source = growth.plan, growth.source
    return {
        "source": source.path.name,
        "model_type": source.raw["model_type"],
        "settings": asdict(plan.cfg) | {"apart": asdict(plan.apart)},
        "bytes": sum(growth.bytes.values()),
        "dtype": sorted({str(growth.dtype_of(n)).removeprefix("torch.") for n in source.stored}),
    }


def measure(growth: Growth, new: Path) -> tuple[dict, dict]:
    """The old and the new model's outputs on 64 fixed random tokens."""
    before = outputs(growth.source.path, growth.source)
    return_memory()
    return before, outputs(new, growth.source)


def outputs(path: Path, source: hf_folder.Folder) -> dict[str, torch.Tensor]:
    """What a folder's model, loaded as a user would, says of the probe: its logits by name, or its
    last hidden states (B, T, D) where it has none."""
    cls = hf_folder.model_class(source.raw, source.config)
    double = torch.float64 in source.stored.dtypes.values()
    kind = torch.float64 if double else torch.float32  # half precision: its weights' rounding only
    try:
        model = cls.from_pretrained(path, dtype=kind, local_files_only=True).eval()
        with torch.no_grad(), Float64(model):
            found = model(**probe(source.config, cls.__name__))
    except Exception as error:  # noqa: BLE001 - what a config may hold has no end
        raise UserError(f"{path}: transformers cannot run this model ({error!r})") from None
    logits = {name: value for name, value in found.items() if name.endswith("logits")}
    return logits or {"hidden states": found.last_hidden_state}


def probe(config, cls: str = "") -> dict:
    """Two sequences of 32 random tokens; as two choices of one question where the class takes
    choices."""
    length = min(32, getattr(config, "max_position_embeddings", 32) or 32)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, length), generator=gen)
    ids = ids[None] if cls.endswith("ForMultipleChoice") else ids
    extra = {"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {}
    return {"input_ids": ids, **extra}


def return_memory() -> None:
    """Hand freed heap back to the system (glibc keeps it, and the card loads whole models next)."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another C library: nothing is lost but memory


def peak_rss_mb() -> float:
    """This process's largest resident size. getrusage also counts what its parent had when it was
    started, so Linux's own high-water mark comes first."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1e3
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
