"""In-place operators on lists of tensors (`torch._foreach_*_`) whose tensors share memory.

Eager writes to one tensor after another, so that a later one sees what was written to an earlier one. The functional
operator computes all results from the old values: where it would make a difference, the list is taken apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..ops import aten
from .overlap import storage_of


def lists_share_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what is written to one tensor of the list may be read for another."""
    targets = args[0]
    if len({storage_of(target) for target in targets}) < len(targets):
        return True
    written = {storage_of(target): i for i, target in enumerate(targets)}
    for argument in (*args[1:], *kwargs.values()):
        items = argument if isinstance(argument, (list, tuple)) else [argument] * len(targets)
        for i, item in enumerate(items):
            if isinstance(item, Tensor) and written.get(storage_of(item), i) != i:
                return True
    return False


def one_after_another(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the operator for single tensors, in the order of the list."""
    single = getattr(aten, op._schema.name.removeprefix("aten::_foreach_"))
    count = len(args[0])

    def at(i: int, value: Any) -> Any:
        several = isinstance(value, (list, tuple)) and len(value) == count
        return value[i] if several else value

    for i in range(count):
        given = [at(i, value) for value in args]
        options = {name: at(i, value) for name, value in kwargs.items()}
        if len(given) == 4:  # addcmul_ and addcdiv_ take their factor by name
            options["value"] = given.pop()
        single(*given, **options)
        torch.autograd.graph.increment_version(args[0][i])
