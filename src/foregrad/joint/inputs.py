"""What the recording says about inputs: what the program wrote, reshaped, moved, made require grad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from torch import Tensor

from .._torch import creation_of, is_internal_assertion, refusal_of_write
from ..abstract.engine import geometry_of
from ..abstract.sparse import SPARSE
from ..errors import UnsupportedError
from ..functionalize.functionalizer import Functionalizer
from ..functionalize.state import TensorState, Write
from ..functionalize.storage import changes_memory, moves_storage, place_again, resizes
from ..functionalize.view_inverses import repeats_elements
from ..graph.graph import Step
from ..record.fakify import RecordedInput
from ..record.retrace import Retrace, WholeMemory
from ..slots import SyntheticBase, ViewRoot


class Autograd(Enum):
    """What autograd made of the writes to an input."""

    FOLLOWED = auto()  # the caller's tensor must continue the tape
    IGNORED = auto()  # some were made with gradients on, but to nothing that requires grad
    OFF = auto()  # all were made with gradients off


@dataclass(frozen=True, slots=True)
class WrittenBack:
    """The call copies new data into it; memory that inputs share is written back as a whole."""

    autograd: Autograd


@dataclass(frozen=True, slots=True)
class WrittenInGraph:
    """The graph itself holds the write."""

    autograd: Autograd


@dataclass(frozen=True, slots=True)
class WrittenElsewhere:
    """Its data changes with what is written back: the memory that it shares, the wrapper around it, tensors in it."""

    autograd: Autograd
    through: bool  # the program wrote through it, and not only through others


@dataclass(frozen=True, slots=True)
class Reshaped:
    """It shows the same elements in another shape."""

    steps: tuple[Step, ...]  # to carry out on the caller's tensor


@dataclass(frozen=True, slots=True)
class Resized:
    """It shows other elements than it did: its old ones are written back before."""

    steps: tuple[Step, ...]  # none for shared memory, whose members change their shape themselves


@dataclass(frozen=True, slots=True)
class StorageReplaced:
    """It lies in other memory."""

    step: Step  # the `set_` that put it there
    counted: bool  # `set_` counts as a write, `.data =` does not


DataChange = WrittenBack | WrittenInGraph | WrittenElsewhere
PlaceChange = Reshaped | Resized | StorageReplaced


class InputFacts(NamedTuple):
    """What the program did to one input."""

    recorded: RecordedInput
    data: DataChange | None = None  # nothing, unless its memory was written
    place: PlaceChange | None = None  # nothing, where it keeps its memory and its shape
    version_change: int = 0
    geometry: Tensor | None = None  # an abstract tensor with the shape that the input came with
    requires_grad: bool = False  # after the program ran
    made_to_require_grad: bool = False  # by `requires_grad_()` in the program

    @property
    def data_changed(self) -> bool:
        """Whether the program wrote to it, or through it."""
        return self.data.through if isinstance(self.data, WrittenElsewhere) else self.data is not None

    @property
    def written(self) -> bool:
        """Whether it is itself written to, by the call or by the graph."""
        return isinstance(self.data, (WrittenBack, WrittenInGraph))

    @property
    def followed(self) -> bool:
        """Whether autograd saw that it was written."""
        return self.data is not None and self.data.autograd is Autograd.FOLLOWED

    @property
    def reshapes(self) -> tuple[Step, ...]:
        """In-place changes of shape to carry out on the caller's tensor."""
        return self.place.steps if isinstance(self.place, (Reshaped, Resized)) else ()

    @property
    def is_acted_on(self) -> bool:
        """Whether something is done to the caller's tensor: it is written to, reshaped or moved."""
        return self.written or bool(self.reshapes) or isinstance(self.place, StorageReplaced)

    @property
    def takes_old_elements(self) -> bool:
        """Whether its new data has the geometry that it came with: it is written before any shape is changed."""
        if isinstance(self.place, (Resized, StorageReplaced)):
            return True
        if self.geometry is None or not isinstance(self.recorded.slot, SyntheticBase):
            return False
        return geometry_of(self.recorded.seen) == geometry_of(self.geometry)


def input_facts(functionalizer: Functionalizer, recorded: RecordedInput, keep_writes: bool) -> InputFacts:
    """Read off what happened to an input in the forward; `keep_writes` lets the graph write where autograd is blind."""
    seen = recorded.seen
    if not isinstance(seen, Tensor):
        return InputFacts(recorded)
    if recorded.same_as is not None:  # everything is said of the first
        shape = functionalizer.state_before(recorded.same_as).tensor
        return InputFacts(recorded, geometry=shape, requires_grad=seen.requires_grad)
    requires_grad = _requires_grad(recorded)
    if recorded.required_grad and not requires_grad:
        raise UnsupportedError(f"the program makes {recorded.slot} not require grad, which cannot be compiled yet.")
    before = functionalizer.state_before(recorded)
    place = _place_change(functionalizer, recorded, before)
    if _may_go_stale(functionalizer, recorded):
        raise Retrace(WholeMemory(recorded.slot))
    data = _data_change(functionalizer, recorded, before, place, keep_writes)
    return InputFacts(
        recorded=recorded,
        data=data,
        place=place,
        version_change=0 if seen.is_inference() else seen._version,
        geometry=before.tensor,
        requires_grad=requires_grad,
        made_to_require_grad=_is_made_to_require_grad(functionalizer, recorded, bool(before.storage.writes)),
    )


# ------------------------------------------------------------------------------------------------------ data
def _data_change(
    functionalizer: Functionalizer,
    recorded: RecordedInput,
    before: TensorState,
    place: PlaceChange | None,
    keep_writes: bool,
) -> DataChange | None:
    writes = before.storage.writes
    if not writes:
        return None
    if before.tensor.layout in SPARSE:
        raise UnsupportedError(
            f"the program writes to {recorded.slot}, which is sparse: this cannot be compiled yet. Write to a clone "
            "of it, or compile with fallback='eager'."
        )
    if recorded.parent is None and _hides_memory(before.tensor):
        raise Retrace(WholeMemory(recorded.slot))
    autograd = Autograd.IGNORED if any(write.step.grad_enabled for write in writes) else Autograd.OFF
    if _is_followed(functionalizer, recorded, place):
        if _must_be_a_view(functionalizer, recorded, writes):
            raise Retrace(WholeMemory(recorded.slot))
        autograd = Autograd.FOLLOWED
    is_followed_root = isinstance(recorded.slot, ViewRoot) and autograd is Autograd.FOLLOWED
    if recorded.parent is not None and not is_followed_root:
        return WrittenElsewhere(autograd, through=any(write.goes_through(recorded) for write in writes))
    seen = recorded.seen
    stays = not isinstance(place, (Resized, StorageReplaced)) and geometry_of(seen) == geometry_of(before.tensor)
    in_graph = keep_writes and stays and (autograd is Autograd.OFF or not seen.requires_grad)
    return WrittenInGraph(autograd) if in_graph else WrittenBack(autograd)


def _is_followed(functionalizer: Functionalizer, recorded: RecordedInput, place: PlaceChange | None) -> bool:
    """Whether autograd saw that the input was written; a write that it forbids is refused."""
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
    if not isinstance(place, (Resized, StorageReplaced)):
        return node is not recorded.start_node  # all the nodes may be those of changes of shape
    if node is not recorded.start_node and (recorded.required_grad or recorded.seen.requires_grad):
        raise UnsupportedError(
            f"the program writes to {recorded.slot} and moves it to other memory, which cannot be differentiated yet. "
            "Write to a copy of it."
        )
    return False


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
    it was used in between, and does not allow it to be written.
    """
    through_views = [write.target.input is not recorded for write in writes]
    return not recorded.required_grad and True in through_views and False in through_views[through_views.index(True) :]


def _hides_memory(tensor: Tensor) -> bool:
    """Whether what is written to a tensor is not simply what then lies in its memory."""
    return tensor.is_conj() or tensor.is_neg() or repeats_elements(tensor)


# ----------------------------------------------------------------------------------------------------- place
def _place_change(functionalizer: Functionalizer, recorded: RecordedInput, before: TensorState) -> PlaceChange | None:
    seen = recorded.seen
    steps = tuple(functionalizer.reshapes.get(id(seen), ()))
    if not steps:
        return None
    if recorded.parent is not None and any(map(resizes, steps)) and _requires_grad(recorded):
        raise UnsupportedError(
            f"the program resizes {recorded.slot}, and a write to the memory that it shares makes it require grad: "
            "this cannot be compiled yet. Write to a copy of it."
        )
    if functionalizer.state_of(seen).storage is not before.storage:
        _refuse_move(recorded, before.tensor, functionalizer.real_tensors.get(recorded.slot))
        return StorageReplaced(steps[-1], counted=not functionalizer.moves_uncounted(recorded))
    resized = any(map(changes_memory, steps))
    lasting = _lasting_reshapes(recorded, before.tensor, steps, resized)
    if lasting and not is_stale(seen) and seen.is_leaf and seen.requires_grad:
        raise UnsupportedError(
            f"the program changes the shape of the leaf {recorded.slot}, which cannot be compiled yet. Use a view."
        )
    if resized:
        return Resized(lasting)
    return Reshaped(lasting) if lasting else None


def _lasting_reshapes(
    recorded: RecordedInput, before: Tensor, steps: tuple[Step, ...], resized: bool
) -> tuple[Step, ...]:
    """The changes of shape that the caller's tensor must go through to end up as the program left it."""
    if isinstance(recorded.slot, (SyntheticBase, ViewRoot)):  # an input that is their root reshapes itself
        return ()
    moves = any(map(moves_storage, steps))
    # A change that autograd follows is carried out even if the next one takes it back: views of the tensor see it.
    followed = recorded.required_grad and any(step.grad_enabled for step in steps)
    if geometry_of(recorded.seen) == geometry_of(before) and (moves or not (resized or followed)):
        return ()
    if moves:  # away and back again
        return (*filter(resizes, steps), place_again(steps[-1], recorded.seen))
    return steps


def _refuse_move(recorded: RecordedInput, before: Tensor, real: Tensor | None) -> None:
    """Moves to other memory that autograd would have to follow."""
    seen = recorded.seen
    is_view = recorded.required_grad and real is not None and real._is_view()
    if is_view or is_stale(seen) or seen.grad_fn is not recorded.start_node:
        raise UnsupportedError(
            f"the program moves {recorded.slot} to other memory and writes to it there, which cannot be differentiated "
            "yet. Write to a copy of it."
        )
    if (recorded.required_grad or seen.requires_grad) and seen.shape != before.shape:
        raise UnsupportedError(
            f"{recorded.slot} requires grad and takes another shape, which cannot be compiled yet. Pass a tensor of "
            "that shape."
        )


# ------------------------------------------------------------------------------------------------- autograd
def _may_go_stale(functionalizer: Functionalizer, recorded: RecordedInput) -> bool:
    """Whether a change made an input unusable to autograd: a view under no_grad, one of several results.

    The recording sees so only if the input is a view there too.
    """
    real = functionalizer.real_tensors.get(recorded.slot)
    if real is None or recorded.parent is not None or not recorded.required_grad:
        return False
    if recorded.was_inference or not recorded.seen._version:
        return False
    return real._is_view() and creation_of(real) != "DEFAULT"


def _is_made_to_require_grad(functionalizer: Functionalizer, recorded: RecordedInput, written: bool) -> bool:
    seen = recorded.seen
    made = not is_stale(seen) and seen.requires_grad and not recorded.required_grad and seen.is_leaf
    if made and seen._base is not None and seen._base.requires_grad and not functionalizer.is_asked_for(recorded):
        return False  # what it is a view of was made so
    if made and (written or not _is_own(recorded)):
        also = "writes to its memory" if written else "what it is a view of"
        raise UnsupportedError(
            f"the program makes {recorded.slot} require grad and {also}, which cannot be compiled yet. Call "
            "requires_grad_() before."
        )
    return made


def _is_own(recorded: RecordedInput) -> bool:
    """Whether autograd takes an input for itself, and not for a view of memory that inputs share."""
    return recorded.parent is None or isinstance(recorded.slot, ViewRoot) or recorded.seen is recorded.parent.seen


def _requires_grad(recorded: RecordedInput) -> bool:
    """After the program ran. A view that must not be written cannot even be asked once its memory has changed."""
    return recorded.required_grad if is_stale(recorded.seen) else bool(recorded.seen.requires_grad)


def is_stale(tensor: Tensor) -> bool:
    """Whether autograd refuses to say anything about a view, because a write to its base made it invalid."""
    try:
        tensor.grad_fn  # noqa: B018
    except RuntimeError as error:
        if is_internal_assertion(error):  # autograd lost it, and would say nothing of it the next time
            raise
        return True
    return False


def has_version(facts: InputFacts) -> bool:
    """Whether the version counter can be seen."""
    return not facts.recorded.was_inference and not isinstance(facts.recorded.slot, (SyntheticBase, ViewRoot))
