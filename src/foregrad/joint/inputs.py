"""What the recording says about inputs: what the program wrote, reshaped, moved, made require grad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .._torch import creation_of, refusal_of_write
from ..abstract.engine import geometry_of
from ..errors import UnsupportedError
from ..functionalize.functionalizer import Functionalizer
from ..functionalize.state import TensorState, Write
from ..functionalize.storage import changes_memory, moves_storage, place_again, resizes
from ..functionalize.view_inverses import repeats_elements
from ..graph.graph import Step
from ..record.fakify import RecordedInput
from ..record.retrace import Retrace, WholeMemory
from ..slots import SyntheticBase, ViewRoot


class InputFacts(NamedTuple):
    """What the program did to one input."""

    recorded: RecordedInput
    is_leaf: bool
    data_changed: bool  # the program wrote to it, or through it
    written: bool  # its new data is written back; memory that inputs share is written back as a whole
    written_in_graph: bool  # the graph itself holds the write
    reshapes: tuple[Step, ...]  # in-place changes of shape to carry out on the caller's tensor
    refitted: bool  # they leave it with other elements than it had: its old ones are written back before
    moved: Step | None  # the `set_` that left it on other memory
    moved_uncounted: bool  # it was `.data =`, which does not count as a write
    all_writes_without_grad: bool
    write_seen_by_autograd: bool  # the caller's tensor must continue the tape
    version_change: int
    geometry: Tensor | None  # an abstract tensor with the shape that the input came with
    requires_grad: bool  # after the program ran
    made_to_require_grad: bool  # by `requires_grad_()` in the program

    @property
    def keeps_place(self) -> bool:
        """Whether its new data has the geometry that it came with: it is written before any shape is changed."""
        if self.refitted or self.moved is not None:
            return True
        if self.geometry is None or not isinstance(self.recorded.slot, SyntheticBase):
            return False
        return geometry_of(self.recorded.seen) == geometry_of(self.geometry)


def input_facts(functionalizer: Functionalizer, recorded: RecordedInput, keep_writes: bool) -> InputFacts:
    """Read off what happened to an input in the forward; `keep_writes` lets the graph write where autograd is blind."""
    seen = recorded.seen
    if not isinstance(seen, Tensor):
        return untouched(recorded, requires_grad=False)
    if recorded.same_as is not None:  # everything is said of the first
        shape = functionalizer.state_before(recorded.same_as).tensor
        return untouched(recorded, requires_grad=seen.requires_grad, geometry=shape)
    requires_grad = _requires_grad(recorded)
    if recorded.required_grad and not requires_grad and not is_stale(seen):
        raise UnsupportedError(f"the program makes {recorded.slot} not require grad, which cannot be compiled yet.")
    before = functionalizer.state_before(recorded)
    place = _place(functionalizer, recorded, before)
    writes = before.storage.writes
    if writes and recorded.parent is None and _hides_memory(before.tensor):
        raise Retrace(WholeMemory(recorded.slot))
    if _may_go_stale(functionalizer, recorded):
        raise Retrace(WholeMemory(recorded.slot))
    tracked = bool(writes) and _is_tracked(functionalizer, recorded, place)
    if tracked and _must_be_a_view(functionalizer, recorded, writes):
        raise Retrace(WholeMemory(recorded.slot))
    without_grad = bool(writes) and not tracked and not any(write.step.grad_enabled for write in writes)
    written = bool(writes) and (recorded.parent is None or (isinstance(recorded.slot, ViewRoot) and tracked))
    in_graph = keep_writes and written and (without_grad or not seen.requires_grad)
    through = recorded.parent is None or any(write.goes_through(recorded) for write in writes)
    return InputFacts(
        recorded=recorded,
        is_leaf=recorded.was_leaf,
        data_changed=bool(writes) and through,
        written=written,
        written_in_graph=in_graph and _stays(place, seen, before.tensor),
        reshapes=place.reshapes,
        refitted=place.refitted,
        moved=place.moved,
        moved_uncounted=place.moved is not None and functionalizer.moves_uncounted(recorded),
        all_writes_without_grad=without_grad,
        write_seen_by_autograd=tracked,
        version_change=0 if seen.is_inference() else seen._version,
        geometry=before.tensor,
        requires_grad=requires_grad,
        made_to_require_grad=requires_grad and _is_made_to_require_grad(recorded, bool(writes)),
    )


def _hides_memory(tensor: Tensor) -> bool:
    """Whether what is written to a tensor is not simply what then lies in its memory."""
    return tensor.is_conj() or tensor.is_neg() or repeats_elements(tensor)


def _stays(place: _Place, seen: Tensor, before: Tensor) -> bool:
    return not (place.refitted or place.moved) and geometry_of(seen) == geometry_of(before)


@dataclass(frozen=True, slots=True)
class _Place:
    """How an input lies in memory afterwards: see the fields of the same names in `InputFacts`."""

    reshapes: tuple[Step, ...]
    refitted: bool
    moved: Step | None


_UNCHANGED = _Place((), False, None)


def _place(functionalizer: Functionalizer, recorded: RecordedInput, before: TensorState) -> _Place:
    seen = recorded.seen
    steps = tuple(functionalizer.reshapes.get(id(seen), ()))
    if not steps:
        return _UNCHANGED
    if recorded.parent is not None and any(map(resizes, steps)) and _requires_grad(recorded):
        raise UnsupportedError(
            f"the program resizes {recorded.slot}, and a write to the memory that it shares makes it require grad: "
            "this cannot be compiled yet. Write to a copy of it."
        )
    moved = steps[-1] if functionalizer.state_of(seen).storage is not before.storage else None
    if moved:
        _refuse_move(recorded, before.tensor, functionalizer.real_tensors.get(recorded.slot))
    refitted = moved is None and any(map(changes_memory, steps))
    moves = any(map(moves_storage, steps))
    # A change that autograd follows is carried out even if the next one takes it back: views of the tensor see it.
    followed = recorded.required_grad and any(step.grad_enabled for step in steps)
    cancelled = geometry_of(seen) == geometry_of(before.tensor) and (moves or not (refitted or followed))
    if moves:  # away and back again
        steps = (*filter(resizes, steps), place_again(steps[-1], seen))
    # An input that is the root of shared memory changes its shape itself.
    reshapes = () if moved or cancelled or isinstance(recorded.slot, (SyntheticBase, ViewRoot)) else steps
    if reshapes and not is_stale(seen) and seen.is_leaf and seen.requires_grad:
        raise UnsupportedError(
            f"the program changes the shape of the leaf {recorded.slot}, which cannot be compiled yet. Use a view."
        )
    return _Place(reshapes, refitted, moved)


def _refuse_move(recorded: RecordedInput, before: Tensor, real: Tensor | None) -> None:
    """Moves to other memory that autograd would have to follow."""
    seen = recorded.seen
    is_view = recorded.required_grad and real is not None and real._is_view()
    if is_view or is_stale(seen) or seen.grad_fn is not recorded.start_node:
        raise UnsupportedError(
            f"the program moves {recorded.slot} to other memory and writes to it there, which cannot be differentiated "
            "yet. Write to a copy of it."
        )
    if recorded.required_grad and seen.shape != before.shape:
        raise UnsupportedError(
            f"{recorded.slot} requires grad and takes another shape, which cannot be compiled yet. Pass a tensor of "
            "that shape."
        )


def _may_go_stale(functionalizer: Functionalizer, recorded: RecordedInput) -> bool:
    """Whether an input was changed that autograd then forbids to use: a view under no_grad, one of several results.

    The recording sees so only if the input is a view there too.
    """
    real = functionalizer.real_tensors.get(recorded.slot)
    if real is None or recorded.parent is not None or not recorded.required_grad:
        return False
    if recorded.was_inference or not recorded.seen._version:
        return False
    return real._is_view() and creation_of(real) != "DEFAULT"


def _must_be_a_view(functionalizer: Functionalizer, recorded: RecordedInput, writes: Sequence[Write]) -> bool:
    """Whether an input that is a view is written in a way of which autograd thinks otherwise where it is none."""
    real = functionalizer.real_tensors.get(recorded.slot)
    if real is None or recorded.parent is not None or not real._is_view():
        return False
    together = (functionalizer.state_of(tensor) for tensor in functionalizer.written_together)
    return _is_written_behind_its_back(recorded, writes) or any(state.owner is recorded for state in together)


def _is_written_behind_its_back(recorded: RecordedInput, writes: Sequence[Write]) -> bool:
    """Whether an input is written through a view first, and then itself.

    In eager the first write makes what both are views of require grad. Autograd takes the input for a leaf then, unless
    somebody has used it in between, and lets nobody write to it.
    """
    through_views = [write.target.input is not recorded for write in writes]
    return not recorded.required_grad and True in through_views and False in through_views[through_views.index(True) :]


def _is_tracked(functionalizer: Functionalizer, recorded: RecordedInput, place: _Place) -> bool:
    """Whether autograd saw that the input was written; what it forbids to write is refused."""
    if not _is_own(recorded) or recorded.seen.grad_fn is recorded.start_node:
        return False
    real = functionalizer.real_tensors.get(recorded.slot)
    refusal = refusal_of_write(real) if recorded.parent is None and real is not None else None
    if refusal is not None:  # the recording did not know that it is a view
        raise refusal
    node = recorded.seen.grad_fn
    for step in functionalizer.reshapes.get(id(recorded.seen), ()) if recorded.required_grad else ():
        if step.grad_enabled and not resizes(step) and node is not None and node is not recorded.start_node:
            node = node.next_functions[0][0]
    if not place.moved and not place.refitted:
        return node is not recorded.start_node  # all the nodes may be those of changes of shape
    if node is not recorded.start_node and (recorded.required_grad or recorded.seen.requires_grad):
        raise UnsupportedError(
            f"the program writes to {recorded.slot} and moves it to other memory, which cannot be differentiated yet. "
            "Write to a copy of it."
        )
    return False


def _is_made_to_require_grad(recorded: RecordedInput, written: bool) -> bool:
    seen = recorded.seen
    made = not is_stale(seen) and seen.requires_grad and not recorded.required_grad and seen.is_leaf
    if made and seen._base is not None and seen._base.requires_grad:  # what it is a view of was made so
        return False
    if made and (written or not _is_own(recorded)):
        raise UnsupportedError(
            f"the program makes {recorded.slot} require grad and writes to its memory, which cannot be compiled yet. "
            "Call requires_grad_() before."
        )
    return made


def _is_own(recorded: RecordedInput) -> bool:
    """Whether autograd takes an input for itself, and not for a view of memory that inputs share."""
    return recorded.parent is None or isinstance(recorded.slot, ViewRoot) or recorded.seen is recorded.parent.seen


def _requires_grad(recorded: RecordedInput) -> bool:
    """After the program ran. A view that must not be written cannot even be asked once its memory has changed."""
    return recorded.required_grad if is_stale(recorded.seen) else bool(recorded.seen.requires_grad)


def untouched(recorded: RecordedInput, requires_grad: bool, geometry: Tensor | None = None) -> InputFacts:
    """The facts about an input that nothing was done to."""
    return InputFacts(
        recorded=recorded,
        is_leaf=recorded.was_leaf,
        data_changed=False,
        written=False,
        written_in_graph=False,
        reshapes=(),
        refitted=False,
        moved=None,
        moved_uncounted=False,
        all_writes_without_grad=False,
        write_seen_by_autograd=False,
        version_change=0,
        geometry=geometry,
        requires_grad=requires_grad,
        made_to_require_grad=False,
    )


def is_stale(tensor: Tensor) -> bool:
    """Whether autograd refuses to say anything about a view, because its base was written behind its back."""
    try:
        tensor.grad_fn  # noqa: B018
    except RuntimeError as error:
        if "INTERNAL ASSERT FAILED" in str(error):  # autograd lost it, and would say nothing of it the next time
            raise
        return True
    return False


def has_version(facts: InputFacts) -> bool:
    """Whether anybody can look at the version counter."""
    return not facts.recorded.was_inference and not isinstance(facts.recorded.slot, (SyntheticBase, ViewRoot))
