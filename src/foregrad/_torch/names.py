"""The private names of torch that the seam uses, read off its own source: `foregrad doctor` looks which are missing.

This file imports nothing of them, and is there when another file of the seam cannot be imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@functools.cache
def private_names() -> tuple[str, ...]:
    """All of them, by their full names.

    >>> "torch._C._autograd._get_sequence_nr" in private_names()
    True
    """
    trees = [ast.parse(file.read_text()) for file in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple(sorted({name for tree in trees for name in _names_in(tree) if _is_private(name)}))


def missing_names() -> list[str]:
    """Those that this torch does not have."""
    return [name for name in private_names() if not _is_there(name)]


def _names_in(tree: ast.Module) -> Iterator[str]:
    """The dotted names that are imported, and those that are read of what was imported."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.asname or name.name.partition(".")[0]: name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            yield from (f"{node.module}.{name.name}" for name in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, *rest = _parts(node)
            if head in imported:
                yield ".".join((imported[head], *rest))


def _parts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _is_private(name: str) -> bool:
    parts = name.split(".")
    private = (part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and any(private) and "ops" not in parts


def _is_there(name: str) -> bool:
    value: Any = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            if not hasattr(value, "__path__") or importlib.util.find_spec(path) is None:
                return False
            importlib.import_module(path)
        value = sys.modules.get(path) or getattr(value, part)  # a module may go by the name of what it holds
    return True
