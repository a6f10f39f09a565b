"""Operators that write, or change the shape of a tensor: what is noted and refused around them.

Abstract kernels are more lenient than real ones, and they do not count every write. What eager would refuse is refused
here; what a tensor looked like before an operator changed it is kept, for the passes that come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import OpOverload, disable_modes, without_function_modes
from ..errors import UnsupportedError
from ..ops import Kind, aten, op_info, tensors_in, written_arguments
from ..values import PLAIN
from .engine import Engine
from .lines import Stack, where
from .overlap import ask_eager, lies_awkwardly, overlap_in_part, reads_what_it_writes, storage_of
from .step import Step

# Operators that read an argument at other places than they write to.
_SCATTERED = frozenset(
    {
        *("aten::addbmm_", "aten::addmm_", "aten::addmv_", "aten::addr_", "aten::baddbmm_"),
        *("aten::index_add_", "aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_", "aten::index_reduce_"),
        *("aten::masked_scatter_", "aten::put_", "aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_"),
    }
)

_CASTS: set[tuple[Any, ...]] = set()  # operators, with the dtypes of what they were given, that write what they compute

Shapes = Sequence[tuple[Tensor, torch.Size, Tensor | None]]  # tensors, their sizes, a copy of all their metadata


class Changes:
    """Looks at every operator that writes or reshapes, before and after it runs."""

    def __init__(self, engine: Engine, steps: Sequence[Step]) -> None:
        self._engine = engine
        self._steps = steps  # so far
        self.shapes_before: dict[int, list[tuple[int, Tensor]]] = {}  # by id: number of the step, metadata before it
        self._reshaped_views: list[Tensor] = []
        self.written_together: list[Tensor] = []  # by an operator on a list, where they share memory
        self.detached: list[Tensor] = []  # in place, after a view was taken
        self._taken: set[int] = set()  # ids of leaves that a custom function took, in whose forward gradients are off
        self.reshaped_without_grad: list[tuple[int, Tensor, Tensor]] = []  # number of the step, metadata before it

    def before(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack) -> Shapes:
        """Refuse what eager refuses; gives the tensors whose shape the operator may change, as they are now."""
        if op_info(op).kind is Kind.RESHAPE:
            if any(isinstance(arg, torch.UntypedStorage) for arg in args):
                raise UnsupportedError(f"{op}, at {where(stack)}, takes a storage: it cannot be compiled yet.")
            self._before_reshape(op, args[0], stack)
            return ()
        written = written_arguments(op, args, kwargs)
        if self.detached:
            self._refuse_write_behind_views(op, written, stack)
        if self._reshaped_views and torch.is_grad_enabled():
            self._refuse_rebase_of_reshaped(op, written, stack)
        others = (*args, *kwargs.values())
        info = op_info(op)
        if (info.pointwise or op._schema.name.startswith("aten::_foreach_")) and not info.random:
            _refuse_narrowing(op, args, kwargs)
        scattered = not info.pointwise and op._schema.name in _SCATTERED and reads_what_it_writes(written, others)
        if scattered or lies_awkwardly(written, others, info.pointwise):
            ask_eager(op, args, kwargs)
            if scattered or overlap_in_part(written, others):
                raise UnsupportedError(
                    f"{op}, at {where(stack)}, writes to memory that it reads as another argument: what comes out "
                    "depends on the order in which it does so, and cannot be compiled. Pass a clone."
                )
        may_resize = info.has_out
        if may_resize and any(a is t for a in args for t in written if isinstance(t, Tensor)):
            ask_eager(op, args, kwargs)  # a result that is an argument as well is not resized
        return [(t, t.shape, self._metadata(t) if may_resize else None) for t in written if isinstance(t, Tensor)]

    def after(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> None:
        """Note what was resized, and count what abstract tensors do not count."""
        for tensor, size, before in shapes:
            if before is not None and (size, before.stride()) != (tensor.shape, tensor.stride()):
                self._note(tensor, before)
            elif before is None and tensor.shape != size:  # a real kernel does not let it grow
                raise RuntimeError(
                    f"output with shape {list(size)} doesn't match the broadcast shape {list(tensor.shape)}"
                )
        if op_info(op).uncounted:
            torch.autograd.graph.increment_version(tuple(tensors_in(written_arguments(op, args, kwargs))))

    def _metadata(self, tensor: Tensor) -> Tensor:
        with without_function_modes():
            copy: Tensor = self._engine.run(aten.detach.default, (type(tensor),), (tensor,), {})
        return copy

    def _note(self, tensor: Tensor, before: Tensor) -> None:
        self.shapes_before.setdefault(id(tensor), []).append((len(self._steps), before))

    def note_taken(self, leaf: Tensor) -> None:
        """A custom function takes a leaf: autograd has an edge to it that no operator of the record shows."""
        self._taken.add(id(leaf))

    def _before_reshape(self, op: OpOverload, tensor: Tensor, stack: Stack) -> None:
        if id(tensor) in self._taken:
            raise UnsupportedError(
                f"{op}, at {where(stack)}, changes the shape of a tensor that requires grad, or moves it to other "
                "memory, after a custom function took it: this cannot be compiled yet. Do so outside the program."
            )
        if any(isinstance(n, SymInt) for n in tensor.shape):
            raise UnsupportedError(f"{op}, at {where(stack)}, of a symbolic size: it cannot be compiled yet.")
        views = [s for s in self._steps if s.args and s.args[0] is tensor and op_info(s.op).kind is Kind.VIEW]
        if tensor.requires_grad and any(step.op is not aten.detach.default for step in views):
            # Autograd would take these views again from the shape that their base has then.
            raise UnsupportedError(
                f"{op}, at {where(stack)}, changes the shape of a tensor of which a view was taken before: this cannot "
                "be compiled yet. Change the shape first, or take a view of another shape instead."
            )
        before = self._metadata(tensor)
        self._note(tensor, before)
        if not torch.is_grad_enabled() and tensor.requires_grad:
            self.reshaped_without_grad.append((len(self._steps), tensor, before))
        if tensor._is_view():
            self._reshaped_views.append(tensor)

    def note_detached(self, tensor: Tensor) -> None:
        """A tensor is detached in place; views of it that were taken before still know its history."""
        if tensor.requires_grad and any(t._base is tensor for step in self._steps for t in tensors_in([step.out])):
            self.detached.append(tensor)

    def _refuse_write_behind_views(self, op: OpOverload, written: Sequence[Any], stack: Stack) -> None:
        """Eager takes these views again by their geometry, and says that they still require grad."""
        storages = {storage_of(t) for t in tensors_in(written)}
        if any(storage_of(tensor) in storages for tensor in self.detached):
            raise UnsupportedError(
                f"{op}, at {where(stack)}, writes to a tensor that was detached in place after a view of it was taken: "
                "this cannot be compiled yet. Use detach()."
            )

    def _refuse_rebase_of_reshaped(self, op: OpOverload, written: Sequence[Any], stack: Stack) -> None:
        """Autograd takes a view of an abstract tensor again in the shape that it was made with."""
        storages = {storage_of(t) for t in tensors_in(written)}
        for view in self._reshaped_views:
            base = view._base
            if base is not None and base.requires_grad and storage_of(view) in storages:
                raise UnsupportedError(
                    f"{op}, at {where(stack)}, writes to memory of which a view has changed its shape in place: this "
                    "cannot be compiled yet. Take a new view instead of changing the shape of the old one."
                )


def _refuse_narrowing(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise eager's error about a result whose dtype cannot be cast to that of the tensor that it is written to.

    Shape inference lets some of them pass (`n.mul_(2.0)` of integers). A kernel is asked once about each mixture.
    """
    values = [*_flattened(args), *_flattened(kwargs.values())]
    key = op, *((v.dtype, v.dim() == 0) if isinstance(v, Tensor) else type(v) for v in values)
    if key in _CASTS:
        return
    if all(isinstance(value, Tensor) or type(value) in PLAIN for value in values):
        said = _said_by_kernel(op, args, kwargs)
        if "can't be cast" in said:  # about the rest, shape inference has its own say
            raise RuntimeError(said)
    _CASTS.add(key)


def _said_by_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The error of an operator for small tensors of the same dtypes, if there is one."""
    try:
        with disable_modes(), without_function_modes(), torch.no_grad():
            op(*map(_small, args), **{name: _small(value) for name, value in kwargs.items()})
    except Exception as error:
        return str(error)
    return ""


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) in (list, tuple):
            yield from value
        else:
            yield value


def _small(value: Any) -> Any:
    """A tensor of one element in the place of another: dtypes mix by whether there are dimensions."""
    if type(value) in (list, tuple):
        return [_small(item) for item in value]
    return torch.ones((1,) * value.dim(), dtype=value.dtype) if isinstance(value, Tensor) else value
