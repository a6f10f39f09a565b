"""Whether a call of an exported program is one that its graph was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from .._torch import expression_of
from ..errors import ExportError
from ..ops import aten
from ..values import same_value


def checked_call(nodes: Sequence[fx.Node], values: Sequence[Any], ranges: dict[Any, Any]) -> list[Any]:
    """User inputs as the graph takes them, if they are like those that it was recorded on.

    Symbolic sizes must agree and lie in their ranges. A tensor that lies otherwise in memory is copied: the graph has
    views that are right for one layout only.
    """
    symbols: dict[Any, int] = {}
    pending: list[tuple[str, Any, int]] = []
    for node, value in zip(nodes, values, strict=True):
        expected = node.meta.get("val")
        if isinstance(expected, Tensor):
            pending += _check_tensor(node.name, expected, value)
        elif "val" in node.meta and not (type(value) is type(expected) and same_value(value, expected)):
            raise ExportError(f"{node.name} is {expected!r} in the exported program, which was called with {value!r}.")
    for place, size, actual in pending:
        expression = expression_of(size)
        if expression.is_symbol and expression not in symbols:
            symbols[expression] = actual
            if expression in ranges and actual not in ranges[expression]:
                bounds = ranges[expression]
                raise ExportError(f"{place} is {actual}, which is outside of {bounds.lower} to {bounds.upper}.")
    for place, size, actual in pending:
        wanted = expression_of(size).subs(symbols)
        if wanted != actual:
            raise ExportError(f"{place} is {actual}, but must be {wanted} ({expression_of(size)}).")
    return [_with_layout(node, value, symbols) for node, value in zip(nodes, values, strict=True)]


def _with_layout(node: fx.Node, value: Any, symbols: dict[Any, int]) -> Any:
    """A tensor with the strides that the graph was recorded for."""
    expected = node.meta.get("val")
    if not isinstance(expected, Tensor) or not value.numel():
        return value
    strides = [int(expression_of(n).subs(symbols)) if isinstance(n, SymInt) else n for n in expected.stride()]
    if all(n == m for size, n, m in zip(value.shape, strides, value.stride(), strict=True) if size > 1):
        return value
    if node.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        raise ExportError(
            f"{node.name} lies otherwise in memory than in the exported program, which reads memory by as_strided: "
            f"pass a tensor with the strides {tuple(strides)}."
        )
    with torch.no_grad():
        copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        return value.detach().clone() if _repeats(copy) else copy.copy_(value)


def _repeats(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_tensor(name: str, expected: Tensor, value: Any) -> list[tuple[str, Any, int]]:
    if not isinstance(value, Tensor):
        raise ExportError(f"{name} must be a tensor, not {type(value).__name__}.")
    fits = value.dtype == expected.dtype and value.dim() == expected.dim()
    pairs = list(zip(expected.shape, value.shape, strict=False))
    if not fits or any(not isinstance(n, SymInt) and n != m for n, m in pairs):
        raise ExportError(
            f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}, but the program was exported for "
            f"{tuple(expected.shape)} and {expected.dtype}."
        )
    return [(f"{name}.shape[{d}]", n, m) for d, (n, m) in enumerate(pairs) if isinstance(n, SymInt)]
