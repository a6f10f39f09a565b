"""How a write through a view reaches the tensor that the view was taken from.

Each row takes the base's old value and the view's new value and gives the base's new value. A view operator without
a row is carried back by its geometry (`as_strided_scatter`), which is right for every view of one dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._torch import OpOverload
from ..errors import UnsupportedError
from ..joint.ir import FlatGraph, Node
from ..ops import IDENTITIES, ViewStep, aten


@dataclass(frozen=True, slots=True)
class Carry:
    """What a row needs to carry a write from a view back to its base."""

    graph: FlatGraph
    step: ViewStep
    args: tuple[Any, ...]  # of the step, with nodes for symbolic numbers
    base: Node
    new: Node
    base_tensor: Tensor  # geometry of the base
    view_tensor: Tensor  # geometry of the view

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call(op, args, kwargs, self.base_tensor)

    def base_sizes(self) -> list[Any]:
        return [self.graph.number(n) if not isinstance(n, int) else n for n in self.base_tensor.shape]


Row = Callable[[Carry], Node]


def _scatter(op: OpOverload) -> Row:
    return lambda c: c.emit(op, c.base, c.new, *c.args, **c.step.kwargs)


def _same(op: OpOverload) -> Row:
    """The view operator is its own inverse."""
    return lambda c: c.emit(op, c.new, *c.args)


def _reshape(c: Carry) -> Node:
    return c.emit(aten.view.default, c.new, c.base_sizes())


def _permute(c: Carry) -> Node:
    order = [d % len(c.args[0]) for d in c.args[0]]
    return c.emit(aten.permute.default, c.new, [order.index(d) for d in range(len(order))])


def _split(c: Carry) -> Node:
    """A piece of `split` or `split_with_sizes` is a slice."""
    sizes, dim = c.args[0], (c.args[1] if len(c.args) > 1 else c.step.kwargs.get("dim", 0))
    index = c.step.index or 0
    start = index * sizes if c.step.op is aten.split.Tensor else sum(sizes[:index])
    return c.emit(aten.slice_scatter.default, c.base, c.new, dim, start, start + c.view_tensor.shape[dim])


def _unbind(c: Carry) -> Node:
    dim = c.args[0] if c.args else c.step.kwargs.get("dim", 0)
    return c.emit(aten.select_scatter.default, c.base, c.new, dim, c.step.index)


def _as_strided(c: Carry) -> Node:
    return c.emit(aten.as_strided_scatter.default, _detached(c), c.new, *c.args, **c.step.kwargs)


def _detached(c: Carry) -> Node:
    """The kernel of as_strided_scatter refuses a base that requires grad, as an input of a graph may."""
    return c.emit(aten.detach.default, c.base) if c.base.op is None else c.base


def _expand(c: Carry) -> Node:
    if c.base_tensor.shape == c.view_tensor.shape:
        return c.new
    raise UnsupportedError(
        "a write into a part of an expanded tensor cannot be compiled yet. Write to the tensor before it is expanded."
    )


def _by_geometry(c: Carry) -> Node:
    view = c.view_tensor
    offset = view.storage_offset() - c.base_tensor.storage_offset()
    numbers = [[c.graph.number(n) if not isinstance(n, int) else n for n in ns] for ns in (view.shape, view.stride())]
    return c.emit(aten.as_strided_scatter.default, _detached(c), c.new, *numbers, offset)


INVERSES: dict[OpOverload, Row] = {
    aten.select.int: _scatter(aten.select_scatter.default),
    aten.slice.Tensor: _scatter(aten.slice_scatter.default),
    aten.diagonal.default: _scatter(aten.diagonal_scatter.default),
    aten.as_strided.default: _as_strided,
    aten.expand.default: _expand,
    aten.t.default: _same(aten.t.default),
    aten.transpose.int: _same(aten.transpose.int),
    aten._conj.default: _same(aten._conj_physical.default),
    aten._neg_view.default: _same(aten.neg.default),
    aten.permute.default: _permute,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.unsqueeze.default: lambda c: c.emit(aten.squeeze.dim, c.new, c.args[0]),
    aten.view.dtype: lambda c: c.emit(aten.view.dtype, c.new, c.base_tensor.dtype),
    aten.view_as_real.default: lambda c: c.emit(aten.view_as_complex.default, c.new),
    aten.view_as_complex.default: lambda c: c.emit(aten.view_as_real.default, c.new),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    **{op: (lambda c: c.new) for op in IDENTITIES},
}

# Rows that copy the new value into place: they take it in any layout.
SCATTERS = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.diagonal.default,
        aten.as_strided.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
    }
)


def carry_back(carry: Carry) -> Node:
    """The base's new value after a write through a view of it."""
    return INVERSES.get(carry.step.op, _by_geometry)(carry)
