"""Names for the inputs of an exported graph: those of the function's parameters, made fit to be names of nodes."""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..slots import Input


class Names:
    """Gives out names, each of them once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)

    def fresh(self, wanted: str) -> str:
        """A name that can stand in Python code, as near as possible to the wanted one.

        >>> names = Names(["x"])
        >>> names.fresh("x"), names.fresh("layers.0['w']"), names.fresh("print")
        ('x_1', 'layers_0_w', 'print_1')
        """
        stem = re.sub(r"\W+|__+", "_", re.sub(r"\W+", "_", wanted)).strip("_") or "arg"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        name, count = stem, 0
        while name in self.taken or not name.isidentifier() or _is_reserved(name):
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name


def _is_reserved(name: str) -> bool:
    return keyword.iskeyword(name) or hasattr(builtins, name) or name in ("torch", "device", "inf", "nan", "self")


def argument_names(function: Callable[..., Any], slots: Sequence[Input]) -> list[tuple[Input, str]]:
    """A name for each leaf of the arguments: that of the parameter of `forward`, and the way down from there."""
    names = _parameter_names(function)
    found = []
    for slot in slots:
        kind, rest = re.fullmatch(r"(args|kwargs)\[(.*)", slot.path).groups()  # type: ignore[union-attr]
        first, _, below = rest.partition("]")
        if kind == "args":
            index = int(first)
            name = names[index] if index < len(names) else f"args_{index}"
        else:
            name = first.strip("'\"")
        found.append((slot, f"{name}_{below}" if below else name))
    return found


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
