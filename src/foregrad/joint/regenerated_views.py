"""Views that autograd takes again by their geometry, once it finds that they are not what they were.

Eager does so with a view whose shape was changed under no_grad, and with any view whose memory was written. A recording
keeps the view operators themselves, so autograd would differentiate these: the old shape, or, where `as_strided`
reached beyond the tensor that it was applied to, less than the view shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._torch import is_custom_function_node, shares_version_counter
from ..abstract.engine import geometry_of
from ..abstract.kernel_checks import reaches_beyond
from ..errors import UnsupportedError
from ..graph.graph import Step
from ..ops import Kind, aten, op_info, tensors_in, written_arguments
from ..record.fakify import is_start_node
from ..record.recording import Recording
from ..record.tape import tape_nodes
from ..stack_traces import where
from .inputs import is_stale
from .outputs import OutputFacts, Plain


def refuse_regenerated_views(recording: Recording, outputs: OutputFacts, targets: Sequence[Tensor]) -> None:
    """Refuse a program that differentiates such a view; to return one is fine where it is taken again."""
    for position, tensor, before in recording.mutations.reshaped_without_grad:
        if geometry_of(tensor) != geometry_of(before) and _is_view(recording, tensor):
            _refuse_uses(tensor, recording.steps[position:], outputs, targets)
    forward = recording.steps
    for i, step in enumerate(forward):
        followed = step.op is aten.as_strided.default and step.grad_enabled
        if followed and (is_stale(step.out) or step.out.requires_grad) and reaches_beyond(step.out, step.args[0]):
            _refuse_later_uses(step, forward[i + 1 :], outputs, targets)


def _is_view(recording: Recording, tensor: Tensor) -> bool:
    if tensor._is_view():
        return True
    slots = [recorded.slot for recorded in recording.inputs if recorded.seen is tensor]
    return any(recording.real_tensors[slot]._is_view() for slot in slots)


def _refuse_uses(tensor: Tensor, steps: Sequence[Step], outputs: OutputFacts, targets: Sequence[Tensor]) -> None:
    change, *later = steps
    views = {id(tensor)}
    used = _follow(views, later, targets)
    computed = [result.tensor for result in outputs.results if isinstance(result, Plain)]
    if used or any(id(t) in views for t in (*computed, *outputs.bases)):
        raise UnsupportedError(
            f"{change.op}, at {where(change.stack)}, changes the shape of a view under no_grad, and the view is "
            "differentiated afterwards: this cannot be compiled yet. Take a new view instead."
        )


def _follow(views: set[int], steps: Sequence[Step], targets: Sequence[Tensor]) -> bool:
    """Whether anything is computed of views; those that are taken of them are added."""
    used = unseen = False
    for step in steps:
        if any(id(t) in views for t in tensors_in((*step.args, *step.kwargs.values()))):
            kind = op_info(step.op).kind
            if kind is Kind.VIEW and step.op is not aten.detach.default:
                views.update(id(t) for t in tensors_in([step.out]))
            used = used or (step.grad_enabled and (kind is Kind.PURE or kind is Kind.WRITE))
            unseen = unseen or not step.grad_enabled
    if used or not unseen:
        return used
    # In the forward of a custom function gradients are off.
    return any(is_custom_function_node(node) and not is_start_node(node) for node in tape_nodes(targets))


def _refuse_later_uses(taken: Step, steps: Sequence[Step], outputs: OutputFacts, targets: Sequence[Tensor]) -> None:
    views = {id(taken.out)}
    written = [k for k, step in enumerate(steps) if _counts_for(step, taken.out)]
    if not written:
        return
    _follow(views, steps[: written[0]], ())
    before = set(views)
    through = any(steps[k].grad_enabled and id(steps[k].args[0]) in views for k in written)
    used = _follow(views, steps[written[0] + 1 :], targets)
    computed = [result.tensor for result in outputs.results if isinstance(result, Plain)]
    returned = any(id(t) in views for t in (*computed, *outputs.bases))
    taken_later = any(id(t) in views - before for t in outputs.tensors if t is not None)
    if through or used or returned or taken_later:
        raise UnsupportedError(
            f"as_strided, at {where(taken.stack)}, reaches beyond the tensor that it is applied to, and the view is "
            "differentiated after its memory was written: this cannot be compiled yet. Apply it to the whole tensor, "
            "or take it after the write."
        )


def _counts_for(step: Step, view: Tensor) -> bool:
    """Whether a step is a write, or a change of shape, that counts for a view."""
    if op_info(step.op).kind not in (Kind.WRITE, Kind.RESHAPE):
        return False
    return any(shares_version_counter(t, view) for t in tensors_in(written_arguments(step.op, step.args, step.kwargs)))
