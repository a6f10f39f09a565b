"""Views whose shape was changed under no_grad.

Eager finds out that such a view is not what it was, and takes it for a view of the new shape. A recording keeps the
view operators themselves, so autograd would differentiate the old shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import UnsupportedError
from ..ops import Kind, op_info
from ..record.engine import geometry_of
from ..record.lines import where
from ..record.overlap import tensors_in
from ..record.recording import Recording
from ..record.step import Step
from .outputs import OutputFacts, Plain


def refuse_reshaped_views(recording: Recording, outputs: OutputFacts) -> None:
    """Refuse a program that differentiates such a view; to return one of an input is fine, for it is taken again."""
    for position, tensor, before in recording.recorder.changes.reshaped_without_grad:
        if geometry_of(tensor) != geometry_of(before) and _is_view(recording, tensor):
            _refuse_uses(tensor, recording.steps[position : recording.forward_end], outputs)


def _is_view(recording: Recording, tensor: Tensor) -> bool:
    if tensor._is_view():
        return True
    slots = [recorded.slot for recorded in recording.inputs if recorded.seen is tensor]
    return any(recording.real_tensors[slot]._is_view() for slot in slots)


def _refuse_uses(tensor: Tensor, steps: Sequence[Step], outputs: OutputFacts) -> None:
    change, *later = steps
    views = {id(tensor)}
    used = False
    for step in later:
        if step.grad_enabled and any(id(t) in views for t in tensors_in((*step.args, *step.kwargs.values()))):
            kind = op_info(step.op).kind
            if kind is Kind.VIEW:
                views.update(id(t) for t in tensors_in([step.out]))
            used = used or kind is Kind.PURE or kind is Kind.WRITE
    computed = [result.tensor for result in outputs.results if isinstance(result, Plain)]
    if used or any(id(t) in views for t in (*computed, *outputs.bases)):
        raise UnsupportedError(
            f"{change.op}, at {where(change.stack)}, changes the shape of a view under no_grad, and the view is "
            "differentiated afterwards: this cannot be compiled yet. Take a new view instead."
        )
