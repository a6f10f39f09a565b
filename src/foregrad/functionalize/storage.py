"""Operators that change the geometry of a tensor in place, or move it to other memory: `t_`, `resize_`, `set_`.

From here on the tensor is a view of what it was, of grown memory, or of something else altogether. The steps are kept:
they are carried out once more on the caller's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import SymInt, Tensor

from ..abstract.engine import geometry_of, has_gaps
from ..errors import UnsupportedError
from ..graph.graph import Step
from ..ops import Kind, ViewStep, aten, op_info, tensors_in
from ..record.retrace import Retrace, WholeMemory
from ..stack_traces import where
from .state import TensorState, Walk

_RESIZES = frozenset({aten.resize_.default, aten.resize_as_.default})


# In-place changes of shape whose view has another overload.
_VIEW_FORMS = {aten.transpose_.default: aten.transpose.int}


def reshape(walk: Walk, step: Step) -> None:
    """Follow a step that changes the geometry of its first argument."""
    tensor = step.args[0]
    state, before = walk.state_of(tensor), walk.shape_now(tensor)
    walk.step_over()  # the shapes from here on
    if step.op in _RESIZES and _lies_alike(before, walk.shape_now(tensor)):
        return  # torch looks at the size first: not even memory that the tensor has too little of is made longer
    if step.op is aten.resize_as_.default:  # its template is no plain number
        walk.reshapes.setdefault(id(tensor), []).extend(_same_change(step, tensor, walk.shape_now(tensor)))
    else:
        walk.reshapes.setdefault(id(tensor), []).append(step)
    if moves_storage(step):
        if step.grad_enabled and tensor.requires_grad:
            raise UnsupportedError(
                f"{step.op}, at {where(step.stack)}, of a tensor that requires grad: it has no derivative, and cannot "
                "be compiled. Do it under torch.no_grad()."
            )
        _move(walk, step, tensor)
    elif step.op in _RESIZES:
        _resize(walk, step, state, tensor)
    else:
        parent = state
        view = ViewStep(_view_form(step), tuple(step.args[1:]), step.kwargs, None, step.grad_enabled, step.op)
        if step.op is aten.as_strided_.default:
            require_whole_memory(walk, state.root, always=False, view=walk.shape_now(tensor))
            parent, view = memory_of(state), by_absolute_offset(view, walk.shape_now(tensor))
            refuse_reaching_beside(parent, walk.shape_now(tensor), step)
        walk.add_view(parent, tensor, view).source = state


def _view_form(step: Step) -> Any:
    name = step.op._schema.name.split("::")[1].removesuffix("_")
    functional = _VIEW_FORMS.get(step.op) or getattr(getattr(aten, name, None), step.op._overloadname, None)
    if functional is None or op_info(functional).kind is not Kind.VIEW:
        raise UnsupportedError(f"{step.op}, at {where(step.stack)}, cannot be compiled yet.")
    return functional


def moves_storage(step: Step) -> bool:
    """Whether a step leaves a tensor on other memory."""
    return step.op._schema.name == "aten::set_"


def resizes(step: Step) -> bool:
    """Whether a step may make the memory of a tensor longer."""
    return step.op in _RESIZES


def changes_memory(step: Step) -> bool:
    """Whether a step may leave a tensor with other elements than it had, and not only with another shape."""
    return step.op in _RESIZES or step.op is aten.as_strided_.default or moves_storage(step)


def place_again(step: Step, tensor: Tensor) -> Step:
    """A step that gives the caller's tensor the geometry of this one."""
    geometry = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    return Step(aten.as_strided_.default, (tensor, *geometry), {}, tensor, False, step.backward, step.stack, None)


# ------------------------------------------------------------------------------------------------------- set_
def _move(walk: Walk, step: Step, tensor: Tensor) -> None:
    if tensor._is_view() and tensor.requires_grad:
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, moves a view to other memory, which cannot be compiled yet. Make a "
            "new tensor instead."
        )
    if tensor.requires_grad and walk.is_used_before(tensor):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, moves a tensor that requires grad to other memory after it was used, "
            "which cannot be compiled yet."
        )
    if any(_lazy_bits(source) != _lazy_bits(tensor) for source in tensors_in(step.args[1:])):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, moves a tensor to the memory of one that is lazily conjugated or "
            "negated, where it is not so itself, or the other way round: this cannot be compiled yet. Resolve it first "
            "(resolve_conj, resolve_neg)."
        )
    if step.op is aten.set_.source_Tensor:
        walk.add_view(walk.state_of(step.args[1]), tensor, ViewStep(aten.alias.default, (), {}, None))
    elif step.op is aten.set_.source_Tensor_storage_offset:
        source, offset, size, *rest = step.args[1:]
        stride = rest[0] if rest and rest[0] else list(tensor.stride())
        view = ViewStep(aten.as_strided.default, (list(size), list(stride), offset), {}, None)
        walk.add_view(walk.state_of(source).root, tensor, view)
    elif step.op is aten.set_.default:
        options = {"dtype": tensor.dtype, "device": walk.device(tensor)}
        walk.add_fresh(tensor, walk.graph.call(aten.empty.memory_format, ([0],), options, walk.shape_now(tensor)))
    else:
        raise UnsupportedError(f"{step.op}, at {where(step.stack)}, takes a storage: it cannot be compiled yet.")


def _lazy_bits(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


# ----------------------------------------------------------------------------------------------------- resize_
def _resize(walk: Walk, step: Step, state: TensorState, tensor: Tensor) -> None:
    """The tensor becomes a view of its storage in another size; the storage grows where that does not fit."""
    shape = walk.shape_now(tensor)
    root = state.root
    if root.tensor.dtype != tensor.dtype or _is_symbolic(shape) or _is_symbolic(root.tensor):
        raise UnsupportedError(f"{step.op}, at {where(step.stack)}, of a symbolic size: it cannot be compiled yet.")
    if _lazy_bits(tensor) != _lazy_bits(root.tensor):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, resizes a lazily conjugated or negated view, which cannot be compiled "
            "yet. Resolve it first (resolve_conj, resolve_neg)."
        )
    require_whole_memory(walk, root, always=True)
    if (
        state.owner is not None
        and state.owner.seen is not tensor
        and shape.storage_offset() + extent(shape) > _reach(root)
    ):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, makes the memory of {state.owner.slot} longer through a view of it, "
            "which cannot be compiled yet."
        )
    root = grow(walk, root, shape.storage_offset() + extent(shape))
    geometry = list(shape.shape), list(shape.stride()), shape.storage_offset()
    view = ViewStep(aten.as_strided.default, geometry, {}, None, step.grad_enabled, aten.as_strided_.default)
    walk.add_view(root, tensor, view).source = state


def _lies_alike(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor is still where it was in its memory."""
    if _is_symbolic(before) or _is_symbolic(after):
        return False
    same_place = before.storage_offset() == after.storage_offset()
    return bool(same_place and before.shape == after.shape and before.stride() == after.stride())


def extent(tensor: Tensor) -> int:
    """How many elements of memory a tensor spans."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def memory_of(state: TensorState) -> TensorState:
    """What `as_strided` looks at: the whole storage, wherever the tensor itself lies in it.

    That is the first of the tensors that it was taken from which shows the memory in the same dtype, and as it is.
    """
    kind = state.tensor.dtype, _lazy_bits(state.tensor)
    return next(s for s in reversed(state.path_to_root()) if (s.tensor.dtype, _lazy_bits(s.tensor)) == kind)


def refuse_reaching_beside(memory: TensorState, view: Tensor, step: Step) -> None:
    """A view by geometry of memory that is shown in another dtype only in part."""
    if memory.parent is None or _is_symbolic(view) or _is_symbolic(memory.tensor):
        return
    start, end = memory.tensor.storage_offset(), _reach(memory)
    if view.numel() and not start <= view.storage_offset() <= view.storage_offset() + extent(view) <= end:
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, reaches beyond a view of another dtype, or a conjugate, that it is "
            "applied to: this cannot be compiled yet. Apply it to the tensor that owns the memory."
        )


def by_absolute_offset(view: ViewStep, result: Tensor) -> ViewStep:
    """The same `as_strided`, with the offset that it takes from the tensor if it is given none."""
    size, stride = view.args[:2]
    return replace(view, args=(size, stride, result.storage_offset()), kwargs={})


def _reach(root: TensorState) -> int:
    return int(root.tensor.storage_offset() + extent(root.tensor))


def grow(walk: Walk, root: TensorState, wanted: int) -> TensorState:
    """Memory that holds so many elements: the storage's root itself, or a longer one of which that becomes a view."""
    tensor = root.tensor
    have = _reach(root)
    if wanted <= have:
        return root
    if has_gaps(tensor) or tensor.storage_offset():
        raise UnsupportedError("a tensor with gaps in memory is resized, which cannot be compiled yet.")
    flat = walk.emit(aten.as_strided.default, walk.read(root), [have], [1], 0)
    node = walk.emit(aten.constant_pad_nd.default, flat, [0, wanted - have])
    grown = TensorState(root.storage, node, node.value)
    root.parent = grown
    geometry = list(tensor.shape), list(tensor.stride()), 0
    root.step = ViewStep(aten.as_strided.default, geometry, {}, None)
    root.storage.generation += 1
    grown.generation = root.storage.generation
    return grown


def require_whole_memory(walk: Walk, root: TensorState, always: bool, view: Tensor | None = None) -> None:
    """Ask for another recording if what lies beside an input in memory may be reached through it.

    `always` asks wherever the input does not fill its storage; otherwise only where its place in it matters, or where
    a view of it reaches further than it does itself.
    """
    recorded = root.input
    if recorded is None:
        return
    tensor, real = root.tensor, walk.real_tensors.get(recorded.slot)
    if _is_symbolic(tensor):
        raise UnsupportedError(f"{recorded.slot} has a symbolic size and is read beyond its own elements.")
    further = view is not None and not _is_symbolic(view) and view.storage_offset() + extent(view) > _reach(root)
    whole = always or not tensor.numel() or further
    has_more = real is not None and whole and real.untyped_storage().nbytes() != extent(tensor) * tensor.itemsize
    if tensor.storage_offset() or has_gaps(tensor) or has_more:
        raise Retrace(WholeMemory(recorded.slot))


def _is_symbolic(tensor: Tensor) -> bool:
    return any(isinstance(n, SymInt) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


# -------------------------------------------------------------------------------------------------------- out=
def fit_results(walk: Walk, step: Step, targets: Sequence[Any]) -> None:
    """Results that an operator was given by `out=`, and that it resized."""
    resized = [(t, walk.shape_now(t)) for t in targets if isinstance(t, Tensor) and walk.shape_now(t) is not t]
    walk.step_over()
    for target, before in resized:
        shape, state = walk.shape_now(target), walk.state_of(target)
        if geometry_of(shape) == geometry_of(before):
            continue
        strided = any(not walk.shape_now(t).is_contiguous() for t in tensors_in(step.args))
        if strided or target.requires_grad:
            raise UnsupportedError(
                f"{step.op}, at {where(step.stack)}, resizes a result that it was given, which cannot be compiled "
                "here. Give it a tensor of the right shape, or none."
            )
        walk.reshapes.setdefault(id(target), []).extend(_same_change(step, target, shape))
        if before.numel() == 0 and walk.lies_alone(state):
            size, stride = list(shape.shape), list(shape.stride())
            options = {"dtype": shape.dtype, "device": walk.device(shape)}
            walk.add_fresh(target, walk.graph.call(aten.empty_strided.default, (size, stride), options, shape))
        else:
            _resize(walk, step, state, target)


def _same_change(step: Step, target: Tensor, shape: Tensor) -> list[Step]:
    """Steps that give the caller's tensor the geometry that `out=` gave it."""
    size, stride = list(shape.shape), list(shape.stride())

    def change(op: Any, *args: Any) -> Step:
        return Step(op, (target, *args), {}, target, False, step.backward, step.stack, None)

    steps = [change(aten.resize_.default, size)]
    return steps if shape.is_contiguous() else [*steps, change(aten.as_strided_.default, size, stride)]
