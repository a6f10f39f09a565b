"""Operators that write, or change the shape of a tensor: what is noted and refused around them.

Abstract kernels are more lenient than real ones, and they do not count every write. What eager would refuse is refused
here; what a tensor looked like before an operator changed it is kept, for the passes that come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import OpOverload, disable_modes, is_refused_cast, pytree, without_function_modes
from ..abstract.engine import Engine
from ..abstract.kernel_checks import ask_eager, may_self_overlap, overlap_in_part, reads_what_it_writes, storage_of
from ..abstract.sparse import SPARSE
from ..errors import FirstCallError, UnsupportedError
from ..graph.graph import Step
from ..ops import Kind, aten, op_info, tensors_in, written_arguments
from ..stack_traces import Stack, where
from ..values import PLAIN

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


@dataclass(frozen=True, slots=True)
class Mutations:
    """What operators that write or reshape have done, and their steps do not tell."""

    shapes_before: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)
    """By id of a tensor: the number of each step that changed its shape, and its metadata before that."""
    reshaped_without_grad: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """The number of the step, the tensor, and its metadata before it."""
    written_together: list[Tensor] = field(default_factory=list)  # by an operator on a list, where they share memory
    detached: list[Tensor] = field(default_factory=list)  # in place, after a view was taken


class MutationChecks:
    """Looks at every operator that writes or reshapes, before and after it runs."""

    def __init__(self, engine: Engine, steps: Sequence[Step], noted: Mutations) -> None:
        self._engine = engine
        self._steps = steps  # so far
        self._noted = noted
        self._reshaped_views: list[Tensor] = []
        self._taken: set[int] = set()  # ids of leaves that a custom function took, in whose forward gradients are off

    def before(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack) -> Shapes:
        """Refuse what eager refuses; gives the tensors whose shape the operator may change, as they are now."""
        if op_info(op).kind is Kind.RESHAPE:
            if any(isinstance(arg, torch.UntypedStorage) for arg in args):
                raise UnsupportedError(f"{op}, at {where(stack)}, takes a storage: it cannot be compiled yet.")
            self._before_reshape(op, args[0], stack)
            return ()
        written = written_arguments(op, args, kwargs)
        if any(tensor.layout in SPARSE for tensor in tensors_in(written)):
            raise UnsupportedError(
                f"{op}, at {where(stack)}, writes to a sparse tensor: this cannot be compiled yet. Use the operator "
                "that gives a new tensor (mul for mul_), or compile with fallback='eager'."
            )
        if op is _OBSERVES:
            _refuse_first_observation(args, stack)
        if self._noted.detached:
            self._refuse_write_behind_views(op, written, stack)
        if self._reshaped_views and torch.is_grad_enabled():
            self._refuse_rebase_of_reshaped(op, written, stack)
        traits = op_info(op).traits
        if ("pointwise" in traits or op._schema.name.startswith("aten::_foreach_")) and "random" not in traits:
            _refuse_narrowing(op, args, kwargs)
        _refuse_overlap(op, args, kwargs, written, stack)
        may_resize = "out" in traits
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
        if "uncounted" in op_info(op).traits:
            torch.autograd.graph.increment_version(tuple(tensors_in(written_arguments(op, args, kwargs))))

    def _metadata(self, tensor: Tensor) -> Tensor:
        with without_function_modes():
            copy: Tensor = self._engine.run(aten.detach.default, (type(tensor),), (tensor,), {})
        return copy

    def _note(self, tensor: Tensor, before: Tensor) -> None:
        self._noted.shapes_before.setdefault(id(tensor), []).append((len(self._steps), before))

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
            self._noted.reshaped_without_grad.append((len(self._steps), tensor, before))
        if tensor._is_view():
            self._reshaped_views.append(tensor)

    def note_detached(self, tensor: Tensor) -> None:
        """A tensor is detached in place; views of it that were taken before still know its history."""
        if tensor.requires_grad and any(t._base is tensor for step in self._steps for t in tensors_in([step.out])):
            self._noted.detached.append(tensor)

    def _refuse_write_behind_views(self, op: OpOverload, written: Sequence[Any], stack: Stack) -> None:
        """Eager takes these views again by their geometry, and says that they still require grad."""
        storages = {storage_of(t) for t in tensors_in(written)}
        if any(storage_of(tensor) in storages for tensor in self._noted.detached):
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


def _refuse_overlap(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Any], stack: Stack
) -> None:
    """Raise what eager says to a write to memory that overlaps itself, or an argument, and refuse what it lets pass."""
    arguments, pointwise = (*args, *kwargs.values()), "pointwise" in op_info(op).traits
    scattered = not pointwise and op._schema.name in _SCATTERED and reads_what_it_writes(written, arguments)
    if scattered or may_self_overlap(written, arguments, pointwise):
        ask_eager(op, args, kwargs)
        if scattered or overlap_in_part(written, arguments):
            raise UnsupportedError(
                f"{op}, at {where(stack)}, writes to memory that it reads as another argument: what comes out depends "
                "on the order in which it does so, and cannot be compiled. Pass a clone."
            )


_OBSERVES = aten._fused_moving_avg_obs_fq_helper.default


def _refuse_first_observation(args: tuple[Any, ...], stack: Stack) -> None:
    """An observer of channels that has observed nothing yet gives its buffers their size, if its data says it is on."""
    if not args[3].numel():
        raise FirstCallError(f"an observer of channels, at {where(stack)}, gives its buffers their size")


def _refuse_narrowing(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise eager's error about a result whose dtype cannot be cast to that of the tensor that it is written to.

    Shape inference lets some of them pass (`n.mul_(2.0)` of integers). A kernel is asked once about each mixture.
    """
    values = [*_flattened(args), *_flattened(kwargs.values())]
    key = op, *((v.dtype, v.dim() == 0) if isinstance(v, Tensor) else type(v) for v in values)
    if key in _CASTS:
        return
    if all(isinstance(value, Tensor) or type(value) in PLAIN for value in values):
        try:
            with disable_modes(), without_function_modes(), torch.no_grad():
                op(*map(_small, args), **{name: _small(value) for name, value in kwargs.items()})
        except Exception as error:
            if is_refused_cast(error):  # about the rest, shape inference has its own say
                raise
    _CASTS.add(key)


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


# ---------------------------------------------------------------------------------------------------------------------
# Memory that Python can write to behind torch's back: arrays of numpy and buffers that a program makes tensors of.
#
# What an operator reads of it becomes a constant of the graph, so it is copied at that moment. A tensor that shares
# such memory (`torch.from_numpy`) would show later writes as well: a program that makes them is refused.
class ForeignMemory:
    """The tensors over such memory that a recording has met, with what they held."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps  # so far
        self._shared: list[tuple[Tensor, Tensor, int]] = []  # a tensor, a copy, the step that took it, while code runs
        self._lifted: list[int] = []  # all such steps
        self._shown: set[int] = set()  # storages of recorded tensors that the program has an array of

    def note_shown(self, tensor: Tensor) -> None:
        """The program has made an array of a tensor, which would see what is written to it."""
        self._shown.add(storage_of(tensor))

    def copied(self, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an operator that reads no recorded tensor, with copies of those over such memory."""
        with disable_modes(), without_function_modes():
            copies = [_copy(arg) if isinstance(arg, Tensor) and _is_foreign(arg) else arg for arg in args]
        if copies[0] is not args[0] and op is aten.lift_fresh.default:  # what it gives shares the memory
            self._shared.append((args[0], copies[0], len(self._steps)))
            self._lifted.append(len(self._steps))
        return tuple(copies)

    def refuse_write(self, written: Sequence[Any], stack: Stack) -> None:
        """A write to a tensor that shares such memory: the array would not see it."""
        lifted = {storage_of(self._steps[position].out) for position in self._lifted if position < len(self._steps)}
        shared = lifted | self._shown
        if shared and any(storage_of(tensor) in shared for tensor in tensors_in(written)):
            raise UnsupportedError(
                f"a tensor that shares the memory of an array, or a buffer, is written, at {where(stack)}: this cannot "
                "be compiled. Write to a clone."
            )

    def require_unchanged(self, result: Any) -> None:
        """Refuse a program, with this result, that wrote to memory of which it has made a tensor.

        It has run: the memory is let go, for a tensor keeps the array alive that it lies in.
        """
        shared, self._shared = self._shared, []
        for tensor, copy, position in shared:
            with disable_modes(), without_function_modes():
                same = torch.equal(_bytes_of(tensor), _bytes_of(copy))
            if not same and self._shows_writes(position, result):
                raise UnsupportedError(
                    f"the array, or buffer, that became a tensor at {where(self._steps[position].stack)} is written "
                    "afterwards: the tensor shares its memory, which cannot be compiled. Use torch.tensor(), which "
                    "makes a copy."
                )

    def _shows_writes(self, position: int, result: Any) -> bool:
        """Whether a tensor that shares memory may have been looked at after a write: not if it was copied at once."""
        lifted = self._steps[position].out
        users = [step for step in self._steps[position + 1 :] if any(t is lifted for t in tensors_in(step.args))]
        copied = len(users) == 1 and users[0] is self._steps[position + 1] and users[0].op in _COPIES
        return not copied or any(leaf is lifted for leaf in pytree.tree_leaves(result))


_COPIES = (aten._to_copy.default, aten.clone.default)


def _is_foreign(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and not tensor.untyped_storage().resizable()


def _copy(tensor: Tensor) -> Tensor:
    """A tensor that lies in a copy of the memory as the other does in the original."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone(), *place)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# In-place operators on lists of tensors (`torch._foreach_*_`) whose tensors share memory.
#
# Eager writes to one tensor after another, so that a later one sees what was written to an earlier one. The functional
# operator computes all results from the old values: where it would make a difference, the list is taken apart.
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
