"""What the recording says about wrapper subclasses: inputs, outputs and tangents that hold plain tensors.

The tensors inside are inputs and results of the graph like any other, and what was written to them is known from the
record. Autograd knows the wrapper only: whether it was written with gradients on, what is a view of it, its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import disable_modes, names_jagged_size, refusal_of_write
from ..abstract.engine import Engine
from ..errors import UnsupportedError
from ..functionalize.functionalizer import Functionalizer
from ..ops import ViewStep
from ..record.alias_groups import root_of
from ..record.fakify import RecordedInput
from ..record.recording import Recording
from ..record.subclasses import WrapperCalls
from ..slots import Primal
from ..subclasses.layout import layout_of, leaves_of
from .inputs import (
    Autograd,
    DataChange,
    InputFacts,
    Reshaped,
    Resized,
    StorageReplaced,
    WrittenBack,
    WrittenElsewhere,
    WrittenInGraph,
    is_stale,
)


def wrapper_facts(
    functionalizer: Functionalizer, recorded: RecordedInput, facts: dict[Primal, InputFacts], calls: WrapperCalls
) -> InputFacts:
    """What happened to a wrapper. Where autograd saw it, the whole wrapper is written back and not what is inside."""
    seen, geometry = recorded.seen, _before(recorded)
    if recorded.same_as is not None:
        return InputFacts(recorded, geometry=geometry, requires_grad=seen.requires_grad)
    if is_stale(seen) or (recorded.required_grad and not seen.requires_grad):
        raise UnsupportedError(
            f"the program detaches the tensor subclass {recorded.slot} in place, which cannot be compiled yet."
        )
    inner = [facts[(item.same_as or item).slot] for item in recorded.inner]
    data = _data_change(functionalizer, recorded, inner)
    reshapes = tuple(calls.reshapes.get(id(seen), ()))
    place = Reshaped(reshapes) if reshapes else None
    for item in inner:
        if isinstance(data, WrittenBack) or reshapes:
            facts[item.recorded.slot] = _left_to_the_wrapper(item, data, place)
    made = seen.requires_grad and not recorded.required_grad and seen.is_leaf
    if made and data is not None:
        raise UnsupportedError(
            f"the program makes {recorded.slot} require grad and writes to it, which cannot be compiled yet. Call "
            "requires_grad_() before."
        )
    return InputFacts(recorded, data, place, calls.own_version(seen), geometry, seen.requires_grad, made)


def _data_change(
    functionalizer: Functionalizer, recorded: RecordedInput, inner: Sequence[InputFacts]
) -> DataChange | None:
    writes = [item.data for item in inner if item.data is not None and item.data_changed]
    if not writes:
        return None
    if recorded.seen.grad_fn is recorded.start_node:
        off = all(data.autograd is Autograd.OFF for data in writes)
        return WrittenElsewhere(Autograd.OFF if off else Autograd.IGNORED, through=True)
    real = functionalizer.real_tensors.get(recorded.slot)
    refusal = None if real is None else refusal_of_write(real)
    if refusal is not None:
        raise refusal
    return WrittenBack(Autograd.FOLLOWED)


def refuse_related_wrappers(recording: Recording, wrappers: Sequence[InputFacts]) -> None:
    """Inputs that autograd may take for views of one another, where it saw a write to one: they are recorded apart."""
    roots = [(f, root_of(recording.real_tensors[f.recorded.slot])) for f in wrappers if f.recorded.same_as is None]
    for facts, root in roots:
        if facts.followed and any(root is other for f, other in roots if f is not facts):
            raise UnsupportedError(
                f"the program writes, with gradients on, to {facts.recorded.slot}, a tensor subclass of which another "
                "input is a view, or the other way round: this cannot be compiled yet. Pass a clone."
            )


def _left_to_the_wrapper(facts: InputFacts, data: DataChange | None, place: Reshaped | None) -> InputFacts:
    """Facts about an inner tensor to which the wrapper's own operators do what was done."""
    if isinstance(facts.place, (Resized, StorageReplaced)):
        raise UnsupportedError(
            f"the program resizes or moves {facts.recorded.slot}, which lies in a tensor subclass: this cannot be "
            "compiled yet."
        )
    if isinstance(data, WrittenBack) and isinstance(facts.data, (WrittenBack, WrittenInGraph)):
        facts = facts._replace(data=WrittenElsewhere(facts.data.autograd, through=True))
    return facts if place is None else facts._replace(place=None)


def _before(recorded: RecordedInput) -> Tensor:
    """A tensor with the shape that a wrapper came with."""
    layout = recorded.layout
    assert layout is not None
    if not all(type(n) is int for n in (*layout.size, *layout.stride)):  # a guard looks at the layout itself
        return torch.empty((0,) * len(layout.size), device="meta")
    with disable_modes():
        return torch.empty_strided(layout.size, layout.stride, dtype=recorded.seen.dtype, device="meta")


def chain_to(recording: Recording, wrapper: Tensor, base: Tensor) -> list[ViewStep] | None:
    """The views that give a wrapper from another, or None if it was not taken from it."""
    steps: list[ViewStep] = []
    for source, step in recording.session.recorder.wrappers.chain(wrapper):
        steps.append(step)
        if source is base:
            return steps[::-1]
    return None


def refuse_lost_aliasing(functionalizer: Functionalizer, wrapper: Tensor, path: str) -> None:
    """A new wrapper around memory of an input shares that memory, unless the graph replaces it."""
    for leaf in leaves_of(wrapper):
        state = functionalizer.state_of(leaf)
        if state.owner is not None and state.storage.writes:
            raise UnsupportedError(
                f"{path} is a new {type(wrapper).__name__} around memory of {state.owner.slot}, which the program "
                "writes to: this cannot be compiled yet. Return the input itself, a view of it, or a clone."
            )


# ------------------------------------------------------------------------------------------------ tangents
def wrapper_tangent(engine: Engine, target: Tensor) -> Tensor:
    """A fake for the gradient of a wrapper; a subclass may say what its gradients look like (T-6)."""
    with disable_modes(), torch.no_grad():
        like = layout_of(target.detach())
        guess: Tensor = like.build([_leaf_like(engine, leaf) for leaf in leaves_of(target)])
        coerce = getattr(guess, "__coerce_tangent_metadata__", None)
        if coerce is not None:
            guess = coerce()
            guess = layout_of(guess).build([_leaf_like(engine, leaf) for leaf in leaves_of(guess)])
    return guess


def _leaf_like(engine: Engine, leaf: Tensor) -> Tensor:
    """A tensor after which a jagged size is named stays what it is: the gradient has that very size."""
    return leaf if names_jagged_size(leaf) else engine.like(leaf, dense=True)
