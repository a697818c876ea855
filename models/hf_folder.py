"""Reading and writing Hugging Face model folders tensor by tensor.

A folder is opened lazily: tensors come out of memory-mapped files one at a time, under current
names, the parts of a fused tensor each for itself, and a tied copy of another tensor not at all.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from tqdm import tqdm

import files
from errors import UserError
from models import hf
from models.axes import Spec, specs

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
BUFFERS = re.compile(  # constants that old checkpoints store and current code computes
    r".*\b((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq|position_ids|token_type_ids|"
    r"EncDecAttention\.relative_attention_bias\.weight)$"
)
MAX_LAYERS = 1000
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Folder:
    """An opened model: raw config.json, transformers' reading of it, and its tensors by name."""

    path: Path
    raw: dict
    config: object
    family: hf.Family
    stored: "Weights"
    weights: "Parameters"
    tied: bool

    @property
    def specs(self) -> dict[str, Spec]:
        return self.weights.layout.specs

    def saved_name(self, name: str) -> str:
        """What a tensor is called in a file: as the source had it, for transformers 4 does not read
        all that 5 writes today (GPT-NeoX's head)."""
        original = self.stored.files[name][1]
        return original if current_name(original) == name else name


class Weights(Mapping):
    """name -> stored tensor, read on access."""

    def __init__(self, files: dict, read: Callable):
        self.files, self.read = files, read
        about = {name: read.about(*place) for name, place in files.items()}
        self.shapes: dict[str, torch.Size] = {name: shape for name, (shape, _) in about.items()}
        self.dtypes: dict[str, torch.dtype] = {name: dtype for name, (_, dtype) in about.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(*self.files[name])

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def forget(self, name: str) -> None:
        del self.files[name], self.shapes[name], self.dtypes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class Layout:
    """How the stored tensors hold the parameters of `specs`, at given sizes."""

    specs: dict[str, Spec]
    sizes: hf.Sizes
    family: hf.Family = hf.Family()

    @cached_property
    def parts(self) -> dict[str, list[Spec]]:
        """What each stored tensor holds, in order; one but for a fused tensor."""
        found: dict[str, list[Spec]] = {}
        for spec in self.specs.values():
            found.setdefault(spec.tensor, []).append(spec)
        return found

    def rows(self, spec: Spec, tensor_rows: int) -> int:
        """The width of the axis that a part of a tensor of `tensor_rows` writes along."""
        fused = spec.name != spec.tensor
        return self.sizes.spaces[spec.axes[spec.out_dim]] if fused else tensor_rows

    def split(self, tensor: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
        """A stored tensor's parameters by name, as the forward uses them (in float32 at least)."""
        w = self.effective(self.parts[tensor][0], w)
        parts = self.parts[tensor]
        dim, groups = parts[0].out_dim, self.groups(parts[0])
        rows = [self.rows(spec, w.shape[dim]) // groups for spec in parts]
        pieces = w.unflatten(dim, (groups, -1)).split(rows, dim + 1)
        return {
            spec.name: piece.flatten(dim, dim + 1)
            for spec, piece in zip(parts, pieces, strict=True)
        }

    def effective(self, spec: Spec, w: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """1 + w for gains stored without their 1, w sqrt(d) for embeddings scaled so (Gemma)."""
        sign = -1 if inverse else 1
        if self.family.unit_gain and spec.part == "norm" and not spec.is_bias:
            return upcast(w) + sign
        if self.family.scaled_embed and spec.part == "embed":
            return upcast(w) * math.sqrt(self.sizes.d_model) ** sign
        return w

    def join(self, tensor: str, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of split."""
        parts = self.parts[tensor]
        dim, groups = parts[0].out_dim, self.groups(parts[0])
        if len(parts) == 1:  # no copy
            return self.effective(parts[0], pieces[parts[0].name], True)
        grouped = [pieces[spec.name].unflatten(dim, (groups, -1)) for spec in parts]
        return self.effective(parts[0], torch.cat(grouped, dim + 1).flatten(dim, dim + 1), True)

    def groups(self, spec: Spec) -> int:
        """How often the parts of a tensor alternate."""
        return self.sizes.kv_heads if spec.alternates else 1


def upcast(w: torch.Tensor) -> torch.Tensor:
    return w if w.dtype == torch.float64 else w.float()


class Parameters(Mapping):
    """name -> parameter, read on access, under the names of the layout's specs."""

    def __init__(self, stored: Weights, layout: Layout):
        self.stored, self.layout = stored, layout

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.layout.specs[name].tensor
        return self.layout.split(tensor, self.stored[tensor])[name]

    def __contains__(self, name: object) -> bool:
        return name in self.layout.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.specs)

    def __len__(self) -> int:
        return len(self.layout.specs)


# ---- reading


def open_folder(path: Path, allow_pickle: bool = False) -> Folder:
    """Open and check a model folder. Whatever is wrong with it is a UserError that names it."""
    path = Path(path)
    check_kind(path)
    raw = read_config(path)
    family = hf.family_of(raw.get("model_type"))
    if raw.get("quantization_config"):
        raise UserError(f"{path} is quantized; growth needs the float checkpoint it was made from")
    if raw.get("auto_map"):
        raise UserError(
            f"{path}/config.json's auto_map names code of the model's own, which may compute other "
            f"things than transformers' {raw['model_type']}; if it does not, remove auto_map"
        )
    config = transformers_config(path)
    files, read = find_weights(path, allow_pickle)
    names = {current_name(n): (file, n) for n, file in files.items() if not BUFFERS.fullmatch(n)}
    cls = model_class(raw, config)
    stored = Weights(one_of_each_tie(names, cls, config), read)
    tied = drop_tied_copies(path, raw, config, cls, stored)
    found = specs(raw["model_type"], stored, prefix(cls), cls.__name__)
    layout = Layout(found, hf.sizes_of(config, family), family)
    model = empty_model(path, cls, config)
    check_shapes(path, model, stored)
    check_complete(path, model, stored, tied)
    return Folder(path, raw, config, family, stored, Parameters(stored, layout), tied)


def untied(folder: Folder) -> Folder:
    """The same model with an output head of its own, equal to its embedding."""
    cls, config = model_class(folder.raw, folder.config), copy.deepcopy(folder.config)
    config.tie_word_embeddings = False
    files = dict(folder.stored.files)
    files |= {head: files[tied_names(cls)[head]] for head in heads(cls)}
    stored = Weights(files, folder.stored.read)
    found = specs(folder.raw["model_type"], stored, prefix(cls), cls.__name__)
    layout = replace(folder.weights.layout, specs=found)
    raw = folder.raw | {"tie_word_embeddings": False}
    weights = Parameters(stored, layout)
    return replace(folder, raw=raw, config=config, stored=stored, weights=weights, tied=False)


def check_kind(path: Path) -> None:
    """UserError for folders that hold something else than a model's float weights."""
    if any(path.glob("*.safetensors")) and (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} holds an adapter, not a model; merge it into its base first (peft: "
            f"merge_and_unload, then save_pretrained)"
        )
    if any(path.glob("*.gguf")) and not any(path.glob("*.bin")):
        raise UserError(
            f"{path} holds GGUF files; make a float folder of them first: python -m models.convert "
            f"from-gguf"
        )


def one_of_each_tie(names: dict, cls: type, config) -> dict:
    """Names with one canonical name for every tied tensor: where only a copy is stored, it gets the
    name of what it is a copy of."""
    for copy_, source in tied_names(cls).items():
        if not (getattr(config, "tie_word_embeddings", False) or "embed_tokens" in copy_):
            continue
        if copy_ in names and not {source, source.removeprefix(prefix(cls))} & names.keys():
            names = {source if name == copy_ else name: place for name, place in names.items()}
    return names


def read_config(path: Path) -> dict:
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{path} has no config.json: neither a Hugging Face model nor a checkpoint")
    try:
        return files.read_json(file)
    except UserError as error:
        raise UserError(f"{file} is no JSON object ({error})") from None


def transformers_config(path: Path):
    from transformers import AutoConfig  # seconds to import: only where it is needed

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - any of transformers' own complaints
        raise UserError(f"{path}/config.json is refused by transformers: {error}") from None


def find_weights(path: Path, allow_pickle: bool) -> tuple[dict[str, str], Callable]:
    """({name: file}, read(file, name)) of the folder's safetensors, else of its pickled weights;
    as transformers does, a single file before an index."""
    if (path / SINGLE).is_file():
        read = open_safetensors(path)
        return {name: SINGLE for name in read.header(SINGLE)}, read
    if (path / INDEX).is_file():
        return indexed(path, INDEX), open_safetensors(path)
    pickled = [name for name in PICKLES if (path / name).is_file()]
    if not pickled:
        raise UserError(f"{path} has no {SINGLE} or {INDEX}: there are no weights to grow")
    if not allow_pickle:
        raise UserError(
            f"{path}/{pickled[0]} is a pickle, which can run code when read; save it as "
            f"safetensors, or pass --allow-pickle (read with weights_only)"
        )
    read = open_pickles(path)
    if pickled[0] == PICKLES[0]:
        return {name: PICKLES[0] for name in read.header(PICKLES[0])}, read
    return indexed(path, PICKLES[1]), read


def indexed(path: Path, index: str) -> dict[str, str]:
    """The weight_map of an index; UserError for shards that are not there."""
    try:
        stored = files.read_json(path / index, limit=64 << 20)["weight_map"]
        stored = {str(name): str(file) for name, file in stored.items()}
    except (UserError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path / index} is no shard index ({error})") from None
    shards = sorted(set(stored.values()))
    if any("/" in shard or shard.startswith("..") for shard in shards):
        raise UserError(f"{path / index} names files outside its folder")
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of {len(shards)} shards are missing (first: {missing[0]}); "
            f"download them all"
        )
    return stored


class open_safetensors:
    """read(file, name). A file is mapped anew for every tensor, so that its pages leave memory with
    the tensor: a map that stays open would keep all that was ever read."""

    def __init__(self, path: Path):
        self.path, self.headers = path, {}

    def open(self, file: str):
        try:
            return safetensors.safe_open(self.path / file, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{self.path / file} is damaged or cut short ({error})") from None

    def header(self, file: str) -> dict[str, tuple[torch.Size, torch.dtype | None]]:
        """name -> (shape, dtype, None where it is no float), without reading a tensor."""
        if file not in self.headers:
            opened = self.open(file)
            pieces = {name: opened.get_slice(name) for name in opened.keys()}
            self.headers[file] = {
                name: (torch.Size(piece.get_shape()), FLOATS.get(piece.get_dtype()))
                for name, piece in pieces.items()
            }
        return self.headers[file]

    def about(self, file: str, name: str) -> tuple[torch.Size, torch.dtype | None]:
        if name not in self.header(file):
            raise UserError(f"{self.path / file} lacks {name}, which its index lists")
        return self.header(file)[name]

    def __call__(self, file: str, name: str) -> torch.Tensor:
        return self.open(file).get_tensor(name)


def load_pickle(path: Path) -> dict:
    """A dict of tensors and plain values; whatever would run code is refused, unread."""
    try:
        state = torch.load(path, "cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 - unpickling fails in many ways
        raise UserError(f"{path} cannot be read as weights ({error})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path} cannot be read as weights: it holds a {type(state).__name__}")
    return state


class open_pickles(open_safetensors):
    """The same for .bin files, read with weights_only and memory-mapped; they stay open."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.opened = {}

    def open(self, file: str) -> dict[str, torch.Tensor]:
        if file not in self.opened:
            state = load_pickle(self.path / file)
            if not all(isinstance(t, torch.Tensor) for t in state.values()):
                raise UserError(f"{self.path / file} holds more than tensors")
            self.opened[file] = state
        return self.opened[file]

    def header(self, file: str) -> dict[str, tuple[torch.Size, torch.dtype | None]]:
        return {
            n: (t.shape, t.dtype if t.dtype in FLOATS.values() else None)
            for n, t in self.open(file).items()
        }

    def __call__(self, file: str, name: str) -> torch.Tensor:
        return self.open(file)[name]


def current_name(name: str) -> str:
    """Names of old checkpoints as transformers writes them today."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return re.sub(r"^embed_out\.", "lm_head.", name)


def tied_names(cls: type) -> dict[str, str]:
    """copy -> source: one tensor when the config ties them, says transformers."""
    return dict(cls._tied_weights_keys or {})


def heads(cls: type) -> list[str]:
    """The output heads among the copies."""
    return [n for n in tied_names(cls) if "embed_tokens" not in n and n.endswith("weight")]


def prefix(cls: type) -> str:
    """What the names of a bare model, without its head, lack."""
    return f"{cls.base_model_prefix}."


def drop_tied_copies(path: Path, raw: dict, config, cls: type, weights: Weights) -> bool:
    """Forget stored copies of tied tensors; whether the output head is tied.

    T5's config always says tied and means "unless the file holds both"; elsewhere a flag that
    contradicts the weights is a UserError.
    """
    says_tied, pairs = getattr(config, "tie_word_embeddings", False), tied_names(cls)
    is_tied, t5 = says_tied and bool(heads(cls)), raw["model_type"] in ("t5", "mt5")
    for name, source in pairs.items():
        source = source if source in weights.files else source.removeprefix(prefix(cls))
        if not says_tied or name not in weights.files or source not in weights.files:
            continue
        if torch.equal(weights[name], weights[source]):
            weights.forget(name)
        elif t5 and name in heads(cls):
            is_tied = False
        else:
            raise UserError(
                f"{path}: config.json ties {name} to {source}, but the stored tensors differ; set "
                f"tie_word_embeddings to false there, or remove the copy that is not meant"
            )
    return is_tied


def check_shapes(path: Path, model: torch.nn.Module, weights: Weights) -> None:
    """Every stored tensor is a float of the shape that config.json implies."""
    wanted = {name: p.shape for name, p in stored_form(model).items()}
    for name, shape in weights.shapes.items():
        if weights.dtypes[name] is None:
            raise UserError(f"{path}: {name} is no float tensor; growth needs a float checkpoint")
        target = next((wanted[n] for n in aliases(name, model) if n in wanted), shape)
        if target != shape:
            raise UserError(
                f"{path}: {name} is {tuple(shape)}, but config.json implies {tuple(target)}"
            )


def check_complete(path: Path, model: torch.nn.Module, weights: Weights, tied: bool) -> None:
    """Every parameter of the model is stored, tied copies excepted."""
    wanted = stored_form(model).keys()
    copies = {name for name in tied_names(type(model)) if tied or "embed_tokens" in name}
    present = {alias for name in weights for alias in aliases(name, model)}
    missing = sorted(wanted - present - copies)
    if missing:
        is_head = "lm_head" in missing[0] or "decoder.weight" in missing[0]
        hint = "; config.json has tie_word_embeddings false: is it tied after all?"
        raise UserError(
            f"{path}: {len(missing)} parameters of {type(model).__name__} are not stored (first: "
            f"{missing[0]}){hint if is_head else ''}"
        )


def stored_form(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters as transformers stores them: stacked experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    own = dict(model.named_parameters(remove_duplicate=False))
    return {current_name(n): p for n, p in revert_weight_conversion(model, own).items()}


def aliases(name: str, model: torch.nn.Module) -> tuple[str, str, str]:
    """A tensor's name with the head, and in a bare model."""
    base = prefix(type(model))
    return name, base + name, name.removeprefix(base)


def empty_model(path: Path, cls: type, config) -> torch.nn.Module:
    """The model that a config describes, without memory for its weights."""
    layers = getattr(config, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise UserError(f"{path}/config.json says {layers} layers; at most {MAX_LAYERS} are read")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes of 0, which check_shapes refuses
            return cls(config)
    except Exception as error:  # noqa: BLE001 - what a config may hold has no end
        raise UserError(f"{path}/config.json: no {cls.__name__} can be built ({error})") from None


def model_class(raw: dict, config) -> type:
    """The transformers class the folder names, else the config's own with a masked-language,
    sequence-to-sequence or causal head."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named = [getattr(transformers, str(name), None) for name in raw.get("architectures") or []]
    heads = ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING") for head in heads]
    found = named + [table[type(config)] for table in tables if type(config) in table]
    models = (cls for cls in found if isinstance(cls, type))
    return next(cls for cls in models if issubclass(cls, transformers.PreTrainedModel))


# ---- writing


@contextmanager
def new_folder(dst: Path, force: bool) -> Iterator[Path]:
    """A hidden sibling folder that becomes `dst` when the block ends well, else goes away."""
    dst = Path(dst)
    if dst.exists() and not force:
        raise UserError(f"{dst} exists; choose another place or pass --force to replace it")
    if dst.exists() and not (dst / "config.json").is_file() and any(dst.iterdir()):
        raise UserError(f"{dst} holds something else than a model; it is never replaced")
    with files.new_folder(dst, replace=force) as tmp:
        yield tmp


def write_weights(
    folder: Path,
    sizes: dict[str, int],
    make: Callable[[str], torch.Tensor],
    shard_bytes: int = 2 * 10**9,
    progress: bool = True,
    doing: str = "growing",
) -> int:
    """Write make(name), of sizes[name] bytes, for every name into safetensors files of at most
    `shard_bytes` (one tensor at least); the total in bytes. Only one shard is in memory at a time,
    the largest tensors first: what computing them takes comes on top of little else."""
    shards: list[list[str]] = [[]]
    for name in sorted(sizes, key=sizes.get, reverse=True):
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    parts = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    parts = parts if len(shards) > 1 else [SINGLE]
    with tqdm(
        total=len(sizes), desc=doing, unit=" tensors", leave=False, disable=not progress
    ) as bar:
        for file, names in zip(parts, shards, strict=True):
            tensors = {}
            for name in names:
                tensors[name] = make(name)
                assert tensors[name].nbytes == sizes[name], (name, tensors[name].shape)
                bar.update()
            with files.naming(folder / file):
                safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
            del tensors
    total = sum(sizes.values())
    if len(shards) > 1:
        where = {name: file for file, names in zip(parts, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        files.write_json(folder / INDEX, index)
    return total
