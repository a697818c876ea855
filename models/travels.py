"""What travels along to a folder with new weights, grown or trained on: an allow-list, so that
nothing that belongs to the old ones (other formats, adapters, code) stands beside them.

Tokenizer, generation settings, chat templates, licence; the model card with a note on top; and the
settings of a sentence-transformers pipeline, whose pooling names the width.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import files
from errors import UserError

ALLOWED = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|generation_config|preprocessor_config|"
    r"chat_template|config_sentence_transformers|sentence_bert_config|modules)\.json|"
    r"(tokenizer|spiece|sentencepiece|tekken).*\.(model|json)|vocab\.(txt|bpe)|merges\.txt|"
    r".*\.(tiktoken|jinja)|(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)[^/]*"
)
FOLDERS = ("additional_chat_templates",)
POOLING, MODULES = "1_Pooling", "modules.json"
KINDS = ("Transformer", "Pooling", "Normalize")  # sentence-transformers modules without weights


def check(src: Path) -> list[dict]:
    """The modules of a sentence-transformers pipeline, none elsewhere; UserError for one whose own
    weights read the width."""
    if not (src / MODULES).is_file():
        return []
    try:
        modules = json.loads((src / MODULES).read_bytes())
        found = [{"kind": m["type"].rsplit(".", 1)[-1], "path": m["path"]} for m in modules]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{src / MODULES} is no list of modules ({error!r})") from None
    for module in found:
        outside = Path(module["path"]).is_absolute() or ".." in Path(module["path"]).parts
        if module["kind"] not in KINDS or outside:
            raise UserError(
                f"{src / MODULES} has a {module['kind']} module at {module['path']!r}; growth "
                f"knows {', '.join(KINDS)}: remove it, and train a new one afterwards"
            )
    return found


def copy(src: Path, dst: Path, widths: tuple[int, int], note: str) -> None:
    """Copy what is allowed from `src`; widths: (old, new); the model card begins with `note`."""
    for file in sorted(src.iterdir()):
        if file.is_file() and ALLOWED.fullmatch(file.name):
            shutil.copyfile(file, dst / file.name)
        if file.is_dir() and file.name in FOLDERS:
            shutil.copytree(file, dst / file.name)
    if (src / "README.md").is_file():
        text = (src / "README.md").read_text(errors="replace")
        (dst / "README.md").write_text(with_note(text, note))
    for module in check(src):
        if module["path"]:
            (dst / module["path"]).mkdir(parents=True)
            copy_module(src / module["path"], dst / module["path"], widths)


def copy_module(src: Path, dst: Path, widths: tuple[int, int]) -> None:
    """The settings of one module; a width in them grows."""
    if not (src / "config.json").is_file():
        return
    settings = files.read_json(src / "config.json")
    for key, value in settings.items():
        if key.endswith("embedding_dimension") and value == widths[0]:
            settings[key] = widths[1]
    files.write_json(dst / "config.json", settings)


def grown_note(name: str, widths: tuple[int, int], method: str, remarks: Sequence[str] = ()) -> str:
    """What a grown model's card says first."""
    note = (
        f"> **Grown model.** The weights here are those of `{name}`, grown from width {widths[0]} "
        f"to {widths[1]} (method {method}; what changed is in growth_report.json). What follows is "
        f"the original's card.\n"
    )
    return note + "".join(f">\n> - {remark}\n" for remark in remarks) + "\n"


def trained_note(name: str) -> str:
    """What the card of a converted checkpoint says first."""
    return (
        f"> **Other weights.** The weights here are not those of `{name}`, whose tokenizer, "
        f"settings and card these are: they were grown or trained on. What follows is the "
        f"original's card.\n\n"
    )


def with_note(card: str, note: str) -> str:
    """A model card with a note after its front matter."""
    front = re.match(r"---\n.*?\n---\n+", card, re.DOTALL)
    return card[: front.end()] + note + card[front.end() :] if front else note + card
