"""What cannot be exported, said before a graph is made of it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor

from .._torch import is_traceable_wrapper_subclass
from ..errors import ExportError
from ..frontend.capturing import Capture
from ..joint.effects import GradAssigned, Moved
from ..joint.inputs import InputFacts
from ..record.engine import geometry_of
from ..record.hooks import has_hooks
from ..slots import Buffer, GradOf, Hidden, Input, Output, Param, Primal
from .wrappers import Named, owner_of


def refuse_subclasses(values: Iterable[tuple[str, Any]], where: str) -> None:
    """Inputs whose tensors are made of others, where a graph must be called as the program is."""
    for name, value in values:
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            raise ExportError(
                f"{where} is not supported with traceable tensor subclass inputs: {name} is a {type(value).__name__}. "
                "Pass its inner tensors, and rebuild it in the program."
            )


def refuse_what_is_lost(capture: Capture, joint: bool) -> None:
    """What a program does that a graph without side effects, and a signature of names, cannot tell."""
    program = capture.joint
    for facts in (*program.memories, *program.inputs):
        _refuse_reshapes(facts)
    if capture.shared:
        _refuse_shared_memory(capture)
    for slot in program.signature.primals:
        if isinstance(slot, GradOf):
            raise ExportError(
                f"the program reads {slot}, a gradient from before the call, which an exported graph does not have. "
                "Pass it as an argument."
            )
    _refuse_effects(capture)
    for attribute in program.attributes:
        raise ExportError(
            f"the program puts the attribute {attribute.name!r} on {attribute.of}: an exported graph returns plain "
            "tensors. Return the value beside the result."
        )
    for facts in program.inputs:
        if isinstance(owner_of(facts.recorded.slot), Hidden):
            _refuse_hidden(facts, joint)
    for name, error in program.backward_errors.items():
        assert isinstance(name, Output)
        raise error
    if joint:
        _refuse_gradients_without_a_name(capture)


def _refuse_reshapes(facts: InputFacts) -> None:
    if facts.reshapes or facts.moved or facts.refitted:
        raise ExportError(
            f"Found an input that received a metadata mutation, {facts.recorded.slot}: an exported graph can return "
            "new data for an input but cannot change its shape or move it. Work on a view or a copy of it."
        )


def _refuse_shared_memory(capture: Capture) -> None:
    members = [t for memory in capture.shared for t in memory.members]
    slots = [s for s, t in capture.joint.recording.real_tensors.items() if any(t is m for m in members)]
    names = ", ".join(map(str, slots))
    first = members[0]
    duplicated = all((t.data_ptr(), geometry_of(t)) == (first.data_ptr(), geometry_of(first)) for t in members)
    if len(members) > 1:
        raise ExportError(
            f"Encountered {'duplicated' if duplicated else 'aliased'} inputs that are mutated in the graph you are "
            f"trying to export: {names} share memory. Pass copies, or one of them."
        )
    raise ExportError(
        f"the program reaches memory beside {names}, or writes to elements that it shows twice. Pass a contiguous copy."
    )


def _refuse_effects(capture: Capture) -> None:
    program = capture.joint
    for effect in program.effects:
        if isinstance(effect, GradAssigned):
            raise ExportError(
                f"the program sets the gradient of {effect.of}, which an exported graph cannot. Return it instead."
            )
        if isinstance(effect, Moved):
            raise ExportError(f"Found an input that received a metadata mutation, {effect.input}, by set_.")
    for write in program.backward_writes:
        if write.reshapes or not isinstance(write.of, (Param, Buffer, Input)):
            raise ExportError(f"the backward changes {write.of}, which an exported graph cannot tell.")
    if program.hooks:
        raise ExportError("the program registers hooks on its inputs or results, which an exported graph would lose.")


def _refuse_hidden(facts: InputFacts, joint: bool) -> None:
    slot = facts.recorded.slot
    if facts.data_changed:
        raise ExportError(
            f"the program writes to {slot}, which is neither an argument nor a buffer: an exported graph would lose "
            "it. Register it with register_buffer."
        )
    if joint and facts.requires_grad:
        raise ExportError(
            f"{slot} requires grad and is neither an argument nor a parameter, so that its gradient has no name. "
            "Register it as a parameter, or detach it."
        )


def _refuse_gradients_without_a_name(capture: Capture) -> None:
    program = capture.joint
    for slot, gradient in zip(program.signature.primals, program.signature.grads, strict=True):
        if gradient is not None and not isinstance(slot, (Param, Input)):
            raise ExportError(f"{slot} requires grad and gets a gradient that has no name. Make it a parameter.")
    for slot, tensor in program.recording.real_tensors.items():
        if tensor.requires_grad and has_hooks(tensor):
            raise ExportError(f"{slot} has hooks on its gradient, which an exported graph would lose. Remove them.")


def refuse_unnamed_gradient(places: Iterable[Named], inputs: Container[Named]) -> None:
    """The gradient of an argument is named by the argument's node."""
    for place in places:
        slot = owner_of(place)
        if isinstance(slot, Input) and place not in inputs:
            raise ExportError(
                f"the gradient of {slot} is put together otherwise than {slot} itself (one of them is a tensor "
                "subclass), so that it has no name. Make it a parameter."
            )


def refuse_written_shape(slot: Primal, new: Tensor | None, old: Tensor) -> None:
    """A buffer that the program assigns takes the place of the old one only if it is like it."""
    assert new is not None
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ExportError(
            f"the program assigns {slot}, which has shape {tuple(old.shape)} and dtype {old.dtype}, a tensor of shape "
            f"{tuple(new.shape)} and dtype {new.dtype}: the new value of a buffer must be like the old one."
        )
