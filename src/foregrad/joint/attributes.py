"""Python attributes that the program puts on its results: each call puts them there again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor

from ..errors import UnsupportedError
from ..record.attributes import own_attributes
from ..slots import Output
from ..subclasses.layout import is_wrapper
from ..values import is_plain
from .effects import Effects


@dataclass(frozen=True, slots=True)
class AttributeSet:
    """An attribute of a result: a plain value, or another result."""

    of: Output
    name: str
    value: Any


def attributes_of_results(
    hidden: Effects, is_input: Callable[[Tensor], bool], is_abstract: Callable[[object], bool]
) -> tuple[AttributeSet, ...]:
    """What stands on the results; tensors and symbolic numbers among it become results that the user does not see.

    Attributes of inputs are the caller's own.
    """
    found: list[AttributeSet] = []
    known: dict[int, int] = {}  # places of results by id
    for i, leaf in enumerate(hidden.leaves):  # it grows
        if not is_abstract(leaf) or is_wrapper(leaf) or is_input(leaf) or known.setdefault(id(leaf), i) != i:
            continue
        for name, value in own_attributes(leaf).items():
            path = f"{hidden.paths[i]}.{name}"
            if isinstance(value, (Tensor, SymInt, SymFloat)):
                place = next((n for n, other in enumerate(hidden.leaves) if other is value), None)
                found.append(AttributeSet(Output(i), name, Output(hidden.add(value, path) if place is None else place)))
            elif is_plain(value):
                found.append(AttributeSet(Output(i), name, value))
            else:
                raise UnsupportedError(
                    f"the program puts a {type(value).__name__} on a result, as {path}: this cannot be compiled yet. "
                    "Return it beside the result, or compile with fallback='eager'."
                )
    return tuple(found)
