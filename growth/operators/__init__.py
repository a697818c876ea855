"""The registry: every Operator record of the modules in this folder, by name."""

import importlib
import pkgutil

from errors import UserError
from growth.operator import Operator

_modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
_records = [r for module in _modules for r in vars(module).values() if isinstance(r, Operator)]
OPERATORS: dict[str, Operator] = {r.name: r for r in sorted(_records, key=lambda r: r.place)}


def find(name: str) -> Operator:
    """The record of operator `name`; UserError lists the known ones."""
    if name not in OPERATORS:
        raise UserError(f"operator {name!r} is unknown; choose one of {', '.join(OPERATORS)}")
    return OPERATORS[name]
