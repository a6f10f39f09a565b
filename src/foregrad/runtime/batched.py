"""A backward under vmap: the graph runs as it is, but for what torch cannot batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..errors import UnsupportedError
from ..ops import aten
from .compilers import Boxed


def batched(module: fx.GraphModule) -> Boxed:
    """A backward graph as a function that may be given batched tangents.

    One of the two vmaps of torch has no rule for `as_strided_scatter`, and the other takes it for an operator on whole
    batches.
    """
    if all(node.target is not aten.as_strided_scatter.default for node in module.graph.nodes):
        return lambda args: module.forward(*args)
    return _Interpreter(module).boxed_run


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.as_strided_scatter.default:
            return _scatter(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _scatter(base: Tensor, new: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """The operator, made of those that can be batched; the copy is batched if one of the two is."""
    if base.storage_offset():
        raise UnsupportedError("a batched backward through as_strided of a part of a storage is not supported yet.")
    one = base.new_zeros(()) + new.new_zeros(())
    copy = one.new_empty_strided(base.shape, base.stride()).copy_(base)
    copy.as_strided(size, stride, storage_offset or 0).copy_(new)
    return copy
