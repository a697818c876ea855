"""Grow a Hugging Face folder into a wider one, tensor by tensor, and measure what changed."""

import ctypes
import re
import resource
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

import files
from errors import UserError
from growth import exact, ligo_init, lossless, nrio, srio
from growth.gauge import ConfigChange, gauge
from growth.plan import GrowConfig, Plan
from models import hf, hf_folder, rope
from models.axes import Spec
from models.double import Float64

OPERATORS = {name: module.grow_tensor for name, module in exact.EXACT.items()} | {
    "srio": srio.grow_tensor,
    "nrio": nrio.grow_tensor,
    "ligo-init": ligo_init.grow_tensor,
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
DTYPES["float16"] = torch.float16


@dataclass(frozen=True)
class Growth:
    """One planned growth of a folder: the source, the plan, and what the new config.json says."""

    source: hf_folder.Folder
    plan: Plan
    layout: hf_folder.Layout  # of the new tensors
    raw: dict
    notes: tuple[str, ...]  # what is approximate, and why
    dtype: torch.dtype | None  # of what is written; None keeps every tensor's own

    def dtype_of(self, tensor: str) -> torch.dtype:
        return self.dtype or self.source.stored.dtypes[tensor]

    @property
    def new(self) -> hf.Sizes:
        return self.layout.sizes

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """New shapes of the stored tensors by name, without reading one."""
        return {name: self.shape(name, old) for name, old in self.source.stored.shapes.items()}

    def shape(self, tensor: str, old: torch.Size) -> torch.Size:
        parts = self.layout.parts[tensor]
        new = [self.plan.size(axis, n)[1] for axis, n in zip(parts[0].axes, old, strict=True)]
        if len(parts) > 1:
            new[parts[0].out_dim] = sum(self.plan.sizes[s.axes[s.out_dim]][1] for s in parts)
        return torch.Size(new)


def plan_folder(
    src: Path, d_new: int, cfg: GrowConfig, dtype: str = "", allow_pickle: bool = False
) -> Growth:
    """Plan the growth of folder `src` to width `d_new`; nothing is written.

    Raises UserError as models/hf_folder.open_folder does, for an operator that is not in OPERATORS,
    a width the method cannot reach, or a dtype that is not in DTYPES.
    """
    if cfg.operator not in OPERATORS:
        raise UserError(
            f"method {cfg.operator!r} is not one for Hugging Face folders; choose one of "
            f"{', '.join(OPERATORS)} (learned operators need training data: run_ablations.py)"
        )
    source = hf_folder.open_folder(src, allow_pickle)
    if cfg.operator in exact.EXACT and source.tied and not any_gain_before_head(source.specs):
        source = hf_folder.untied(source)  # nothing else could keep the scale of the logits
    old = hf.sizes_of(source.config, source.family)
    new = wider(old, d_new, cfg)
    plan = Plan(
        cfg,
        source.specs,
        {space: (width, new.spaces[space]) for space, width in old.spaces.items()},
        (old.head_dim, new.head_dim),
        n_layer(source.specs),
        (old.d_model, new.d_model),
        source.weights,
        source.tied,
        hf.arch_of(source.config, source.family, old, new),
    )
    raw, notes = new_config(source, plan, new, exact.config_change(plan))
    if dtype and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    if dtype:
        raw = {n: v for n, v in raw.items() if n != "torch_dtype"} | {"dtype": dtype}
    layout = hf_folder.Layout(plan.specs, new, source.family)
    return Growth(source, plan, layout, raw, tuple(notes), DTYPES.get(dtype))


def any_gain_before_head(specs: dict) -> bool:
    return any(spec.before_head for spec in specs.values())


def n_layer(specs: dict) -> int:
    return 1 + max(spec.layer for spec in specs.values() if spec.layer is not None)


def wider(old: hf.Sizes, d_new: int, cfg: GrowConfig) -> hf.Sizes:
    """All sizes at width `d_new`, every ratio kept; UserError with the nearest widths if none."""
    if d_new <= old.d_model:
        raise UserError(f"new width {d_new} must be larger than the old one, {old.d_model}")
    if cfg.operator == "lossless":
        lossless.whole_factor(old.d_model, d_new)
    head_dim = exact.new_head_dim(cfg, old.head_dim, old.d_model, d_new)
    n_head = old.n_head if cfg.heads == "wider" else scaled(old.n_head, old, d_new, "heads")
    group = old.n_head // old.kv_heads
    if cfg.heads == "wider" or (old.kv_heads == 1 and cfg.operator != "lossless"):
        kv_heads = old.kv_heads
    elif n_head % group:
        raise UserError(
            f"{n_head} heads do not split into the {group} query heads per key head that this "
            f"model has; choose a factor that makes {old.kv_heads} key heads grow in whole numbers"
        )
    else:
        kv_heads = n_head // group
    d_ff = scaled(old.d_ff, old, d_new, "FFN neurons")
    expert_ffn = scaled(old.expert_ffn, old, d_new, "FFN neurons of an expert")
    return hf.Sizes(d_new, n_head, kv_heads, head_dim, d_ff, expert_ffn)


def scaled(n: int, old: hf.Sizes, d_new: int, what: str) -> int:
    """n d_new / d_old; UserError with the nearest good widths where that is no whole number."""
    if n * d_new % old.d_model:
        widths = [d for d in range(old.d_model, 2 * d_new) if n * d % old.d_model == 0]
        low = max((d for d in widths if old.d_model < d < d_new), default=None)
        near = [str(d) for d in (low, min(d for d in widths if d > d_new)) if d]
        raise UserError(
            f"width {d_new} would need {n * d_new / old.d_model:g} {what}; the nearest widths with "
            f"a whole number: {' and '.join(near)}"
        )
    return n * d_new // old.d_model


def new_config(source: hf_folder.Folder, plan: Plan, new: hf.Sizes, change: ConfigChange):
    """(config.json of the wide model, notes on what it cannot express)."""
    family, notes = source.family, []
    raw = hf.widened_config(source.raw, source.config, family, new)
    if family.eps and change.eps != 1:
        raw[family.eps] = getattr(source.config, family.eps) * change.eps
    if not family.eps and abs(change.eps - 1) > 1e-12:
        notes.append(f"the norm's epsilon is fixed in code but should be x{change.eps:.4g}")
    if family.rope == "half" and change.rope_repeat > 1:
        parameters = rope.repeated(source.config, plan.arch.rotary[0], change.rope_repeat)
        raw = rope.written(raw, parameters)
    if family.rope == "half" and change.theta_power != 1:
        raw = rope.written(raw, rope.stretched(source.config, change.theta_power))
        notes.append("RoPE's old frequencies come from theta' and agree to float32 rounding")
    if plan.cfg.operator in exact.EXACT:
        notes += approximations(plan)
    return raw, notes


def approximations(plan: Plan) -> list[str]:
    """Which part of an exact method is not exact for this architecture."""
    arch, cfg, notes = plan.arch, plan.cfg, []
    if cfg.operator == "pad" and plan.post_ln:
        notes.append(
            "Post-LN: mean padding is exact only for constant LayerNorm gains and without the MLM "
            "head; a whole factor with method lossless is exact"
        )
    if cfg.operator == "lossless" and cfg.heads == "wider" and cfg.rope == "recompute":
        if arch.rope:
            notes.append("RoPE frequencies are recomputed for the wider heads (the note's rule)")
    hidden = arch.head_activation
    if cfg.operator == "lossless" and hidden not in ("", "relu") and gauge(plan) == "norm":
        notes.append("the MLM head's LayerNorm sees epsilon/k where epsilon would be exact")
    return notes


def grow_folder(
    growth: Growth,
    dst: Path,
    force: bool = False,
    shard_gb: float = 2.0,
    card: bool = True,
    progress: bool = True,
) -> dict:
    """Write the wide folder `dst` and return its report, which is also stored there.

    Peak memory: one shard of new tensors and the pages of the old ones that were read.
    """
    start, source = time.perf_counter(), growth.source

    with hf_folder.new_folder(dst, force) as tmp:
        sizes = {n: s.numel() * growth.dtype_of(n).itemsize for n, s in growth.shapes.items()}
        size = hf_folder.write_weights(
            tmp, sizes, partial(make_tensor, growth), int(shard_gb * 1e9), progress
        )
        files.write_json(tmp / "config.json", growth.raw)
        hf_folder.copy_other_files(source.path, tmp)
        report = facts(growth, size) | {"grow_seconds": time.perf_counter() - start}
        report["closest_two_units"] = closest_two_units(growth)
        return_memory()
        if card:
            report |= measure(source.path, tmp, growth)
        report["wall_seconds"] = time.perf_counter() - start
        report["peak_rss_mb"] = peak_rss_mb()
        files.write_json(tmp / "growth_report.json", report)
    return report


def make_tensor(growth: Growth, tensor: str) -> torch.Tensor:
    """One wide stored tensor, computed in float32 at least, in the growth's dtype."""
    parts = {spec.name: make(growth, spec) for spec in growth.layout.parts[tensor]}
    return growth.layout.join(tensor, parts).to(growth.dtype_of(tensor)).contiguous()


def make(growth: Growth, spec: Spec) -> torch.Tensor:
    """One wide parameter, in float32 at least."""
    narrow = replace(growth.plan, weights=Upcast(growth.plan.weights))
    wide = OPERATORS[growth.plan.cfg.operator](narrow, spec)
    if not torch.isfinite(torch.stack(wide.aminmax())).all():  # NaN and inf reach the extremes
        raise UserError(f"grown parameter {spec.name} is not finite; check the source's")
    return wide


class Upcast(dict):
    """Half-precision tensors read as float32, so that scaling rounds once, on storing."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = self.weights[name]
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def __contains__(self, name) -> bool:
        return name in self.weights

    def get(self, name, default=None):
        return self[name] if name in self.weights else default


def facts(growth: Growth, size: int) -> dict:
    plan, source = growth.plan, growth.source
    old = {name: shape.numel() for name, shape in source.stored.shapes.items()}
    return {
        "source": source.path.name,
        "model_type": source.raw["model_type"],
        "settings": asdict(plan.cfg),
        "gauge": gauge(plan),
        "d_model": [plan.d_old, plan.d_new],
        "n_head": [plan.sizes["head"][0], growth.new.n_head],
        "head_dim": list(plan.head_dim),
        "d_ff": list(plan.sizes["ffn"]),
        "parameters": [sum(old.values()), sum(s.numel() for s in growth.shapes.values())],
        "bytes": size,
        "dtype": sorted({str(growth.dtype_of(n)).removeprefix("torch.") for n in source.stored}),
        "approximate": list(growth.notes),
    }


def closest_two_units(growth: Growth, n: int = 256) -> float:
    """The least distance between two FFN neurons of the first layer, over their RMS norm; among the
    first and the last n. 0 says that copies are locked together (lossless without noise)."""
    spec = next(s for s in growth.plan.specs.values() if s.part == "up" and not s.is_bias)
    rows_fd = make(growth, spec).to(growth.dtype_of(spec.tensor)).float().movedim(spec.out_dim, 0)
    rows_fd = torch.cat([rows_fd[:n], rows_fd[-n:]]) if len(rows_fd) > 2 * n else rows_fd
    distance = torch.cdist(rows_fd, rows_fd, compute_mode="donot_use_mm_for_euclid_dist")
    distance.fill_diagonal_(torch.inf)
    return (distance.min() / rows_fd.square().sum(1).mean().sqrt()).item()


def measure(old: Path, new: Path, growth: Growth) -> dict:
    """max |delta logit|, relative to the logits' standard deviation, and KL(old || new) in nats, on
    64 fixed random tokens; empty for models without logits."""
    before = probe_logits(old, growth.source)
    return_memory()
    after = probe_logits(new, growth.source)
    return {} if before is None or after is None else compare(before, after)


def compare(before: torch.Tensor, after: torch.Tensor) -> dict:
    before, after = before.double(), after.double()
    delta = (after - before).abs().max().item()
    log_p, log_q = before.log_softmax(-1), after.log_softmax(-1)
    return {
        "max_abs_dlogit": delta,
        "max_rel_dlogit": delta / before.std().item(),
        "kl": max(0.0, (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()),
    }


def probe_logits(path: Path, source: hf_folder.Folder) -> torch.Tensor | None:
    """Logits (B, T, V) of a folder's model, loaded as a user would; None where it has none."""
    cls = hf_folder.model_class(source.raw, source.config)
    double = torch.float64 in source.stored.dtypes.values()
    kind = torch.float64 if double else torch.float32  # half precision: its weights' rounding only
    try:
        model = cls.from_pretrained(path, dtype=kind, local_files_only=True).eval()
        with torch.no_grad(), Float64(model):
            output = model(**probe(source.config))
    except Exception as error:  # noqa: BLE001 - what a config may hold has no end
        raise UserError(f"{path}: transformers cannot run this model ({error!r})") from None
    return getattr(output, "logits", None)


def probe(config) -> dict:
    length = min(32, getattr(config, "max_position_embeddings", 32) or 32)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, length), generator=gen)
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
