"""How a write through a view reaches the tensor that the view was taken from.

Each row takes the base's old value and the view's new value and gives the base's new value. Every view operator of ATen
has a row. Where a view shows elements more than once (`expand`, windows that overlap), the write is carried past it by
the numbers of the elements that were written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, hint_of, is_static
from ..errors import UnsupportedError
from ..graph.graph import Node, Step
from ..ops import IDENTITIES, ViewStep, aten
from ..stack_traces import where
from .state import TensorState, Walk


@dataclass(frozen=True, slots=True)
class Carry:
    """What a row needs to carry a write from a view back to its base."""

    walk: Walk
    step: ViewStep
    args: tuple[Any, ...]  # of the step, with nodes for symbolic numbers
    base: Node
    new: Node
    base_tensor: Tensor  # geometry of the base
    view_tensor: Tensor  # geometry of the view

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """A node with the value of the base."""
        return self.walk.graph.call(op, args, kwargs, self.base_tensor)

    def base_sizes(self) -> list[Any]:
        return list(self.walk.args(self.base_tensor.shape))


Row = Callable[[Carry], Node]


def _scatter(op: OpOverload) -> Row:
    return lambda c: c.emit(op, c.base, c.new, *c.args, **c.step.kwargs)


def _same(op: OpOverload) -> Row:
    """The view operator is its own inverse."""
    return lambda c: c.emit(op, c.new, *c.args)


def _reshape(c: Carry) -> Node:
    """A reshape back gives the base's strides, but those of dimensions of size one."""
    base, sizes = c.base_tensor, c.base_sizes()
    if not is_static(base) or 1 not in base.shape or c.new.value.layout is not torch.strided:
        return c.emit(aten.view.default, c.new, sizes)
    if (c.new.value.shape, c.new.value.stride()) == (base.shape, base.stride()):
        return c.new
    node = c.walk.emit(aten.view.default, c.new, sizes)
    if node.value.stride() != base.stride() and _same_place(node.value, base):
        return c.emit(aten.as_strided.default, node, sizes, list(base.stride()))
    return node


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Whether the strides of two tensors of one shape put their elements at the same places."""
    return all(n == 1 or k == m for n, k, m in zip(a.shape, a.stride(), b.stride(), strict=True))


def _permute(c: Carry) -> Node:
    order = [d % len(c.args[0]) for d in c.args[0]]
    return c.emit(aten.permute.default, c.new, [order.index(d) for d in range(len(order))])


def _split(c: Carry) -> Node:
    """A piece of `split` or `split_with_sizes` is a slice."""
    sizes, dim = c.step.args[0], (c.step.args[1] if len(c.args) > 1 else c.step.kwargs.get("dim", 0))
    index = c.step.index or 0
    start = sum(sizes[:index]) if isinstance(sizes, (list, tuple)) else index * sizes
    first, last = c.walk.args([start, start + c.view_tensor.shape[dim]])
    return c.emit(aten.slice_scatter.default, c.base, c.new, dim, first, last)


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
    if c.base_tensor.numel() == c.view_tensor.numel():
        return _reshape(c)
    raise UnsupportedError("a write to a symbolic part of an expanded tensor cannot be compiled yet.")


def _unfold(c: Carry) -> Node:
    """Each place of the windows is a slice of the base; later windows win, as they lie."""
    dim, size, step = c.args
    if not c.base_tensor.dim():
        return c.emit(aten.view.default, c.new, [])
    dim %= c.base_tensor.dim()
    node, count = c.base, c.view_tensor.shape[dim]
    for k in reversed(range(size)):
        piece = c.walk.emit(aten.select.int, c.new, -1, k)
        last = c.walk.args([k + (count - 1) * step + 1])[0]
        node = c.emit(aten.slice_scatter.default, node, piece, dim, k, last, step)
    return node


def _coo_indices(c: Carry) -> Node:
    return _coo(c, c.new, c.walk.emit(aten._values.default, c.base))


def _coo_values(c: Carry) -> Node:
    return _coo(c, c.walk.emit(aten._indices.default, c.base), c.new)


def _coo(c: Carry, indices: Node, values: Node) -> Node:
    base = c.base_tensor
    return c.emit(
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        base.sparse_dim(),
        base.dense_dim(),
        c.base_sizes(),
        indices,
        values,
        dtype=base.dtype,
        layout=base.layout,
        device=c.walk.device(base),
        pin_memory=False,
        is_coalesced=base.is_coalesced(),
    )


def _compressed(part: int) -> Row:
    """A row for the compressed indices (0), the plain indices (1) or the values (2) of a compressed sparse tensor."""

    def row(c: Carry) -> Node:
        base = c.base_tensor
        by_row = base.layout in (torch.sparse_csr, torch.sparse_bsr)
        names = ("crow_indices", "col_indices", "values") if by_row else ("ccol_indices", "row_indices", "values")
        parts = [c.walk.emit(getattr(aten, name).default, c.base) for name in names]
        parts[part] = c.new
        options = {"dtype": base.dtype, "layout": base.layout, "device": c.walk.device(base)}
        return c.emit(aten._sparse_compressed_tensor_unsafe.default, *parts, c.base_sizes(), **options)

    return row


def _values(c: Carry) -> Node:
    if c.base_tensor.is_nested:
        about = (aten._nested_tensor_size, aten._nested_tensor_strides, aten._nested_tensor_storage_offsets)
        return c.emit(aten._nested_view_from_buffer.default, c.new, *(c.walk.emit(op.default, c.base) for op in about))
    return _coo_values(c) if c.base_tensor.layout is torch.sparse_coo else _compressed(2)(c)


def _jagged_values(c: Carry) -> Node:
    about = ("offsets", "jagged_dummy", "lengths", "ragged_idx", "min_seqlen", "max_seqlen")
    parts = [c.walk.emit(getattr(aten, f"_nested_get_{name}").default, c.base) for name in about]
    return c.emit(aten._nested_view_from_jagged.default, c.new, *parts)


def _no_inverse(c: Carry) -> Node:
    raise UnsupportedError(f"a write through {c.step.op} cannot be compiled.")


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
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.unfold.default: _unfold,
    aten.slice_inverse.default: lambda c: c.emit(aten.slice.Tensor, c.new, *c.args[1:]),
    aten._test_autograd_multiple_dispatch_view.default: _reshape,
    aten._fw_primal.default: lambda c: c.new,
    aten._make_dual.default: lambda c: c.new,
    aten._indices.default: _coo_indices,
    aten.indices.default: _coo_indices,
    aten._values.default: _coo_values,
    aten.values.default: _values,
    aten.crow_indices.default: _compressed(0),
    aten.ccol_indices.default: _compressed(0),
    aten.col_indices.default: _compressed(1),
    aten.row_indices.default: _compressed(1),
    aten._nested_view_from_buffer.default: lambda c: c.emit(aten.values.default, c.new),
    aten._nested_view_from_jagged.default: lambda c: c.emit(aten._nested_get_values.default, c.new),
    aten._nested_get_values.default: _jagged_values,
    aten._sparse_broadcast_to.default: _no_inverse,
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
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unbind.int,
    }
)


def carry_back(carry: Carry) -> Node:
    """The base's new value after a write through a view of it."""
    return INVERSES.get(carry.step.op, _no_inverse)(carry)


# ----------------------------------------------------------------------------------- elements shown more than once
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})


def repeats_elements(tensor: Tensor) -> bool:
    """Whether some elements of a tensor lie at the same place in memory."""
    if is_static(tensor) and tensor.is_contiguous():
        return False
    sizes, strides = [hint_of(n) for n in tensor.shape], [hint_of(n) for n in tensor.stride()]
    if 0 in sizes:
        return False
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(sizes, strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def carry_past_repetition(
    walk: Walk, step: Step, path: Sequence[TensorState], node: Node
) -> tuple[Sequence[TensorState], Node]:
    """Carry a write past the views that show elements more than once.

    `path` leads from the written tensor to the root. What is left of it, and the value to carry on with, are returned.
    """
    if step.op not in _FILLS and repeats_elements(path[0].tensor):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, writes to a view whose elements overlap in memory: what comes out "
            "depends on the order in which they are written, and cannot be compiled."
        )
    repeating = [i for i, state in enumerate(path[:-1]) if repeats_elements(state.tensor)]
    if not repeating:
        return path, node
    last = repeating[-1] + 1
    return path[last:], _scatter_by_number(walk, path[: last + 1], node)


def _scatter_by_number(walk: Walk, path: Sequence[TensorState], new: Node) -> Node:
    """Number the elements of the last tensor of the path, and see which of them the first one shows."""
    base = path[-1].tensor
    numbers = walk.emit(aten.arange.default, base.numel(), device=walk.device(base))
    numbers = walk.emit(aten.view.default, numbers, list(base.shape))
    for state in reversed(path[:-1]):
        view = state.step
        assert view is not None
        by_memory = view.op is aten.as_strided.default and (not base.is_contiguous() or base.storage_offset())
        if state.tensor.dtype != base.dtype or by_memory:
            raise UnsupportedError("a write through a view of a part of an expanded tensor cannot be compiled yet.")
        if view.op not in IDENTITIES and view.op is not aten.view.dtype:  # which shows the same, in the same dtype
            numbers = walk.emit(view.op, numbers, *walk.args(view.args), **walk.kwargs(view.kwargs))
            if view.index is not None:
                numbers = walk.emit(operator.getitem, numbers, view.index)
    flat = [_flat(walk, value) for value in (walk.read(path[-1]), numbers, new)]
    put = walk.emit(aten.index_put.default, flat[0], [flat[1]], flat[2])
    result = walk.emit(aten.view.default, put, list(base.shape))
    return result if base.is_contiguous() else walk.with_layout(result, base)


def _flat(walk: Walk, node: Node) -> Node:
    dense = walk.emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return walk.emit(aten.view.default, dense, [-1])


def takes_any_layout(state: TensorState) -> bool:
    """Whether a write to this view is copied into place, so that the layout of the new value does not matter."""
    return state.step is not None and state.step.op in SCATTERS
