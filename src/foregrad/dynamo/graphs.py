"""What Dynamo's graph says about its inputs, and what cannot be compiled behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .._torch import (
    Placeholder,
    compiled_autograd_is_on,
    is_backward_state,
    placeholders,
    specialize_floats,
)
from ..errors import UnsupportedError
from ..slots import Input


def slots_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Input]:
    """The inputs of a graph in the user's words, once it is known that it can be compiled."""
    known = placeholders(graph)
    _refuse_whole_backwards(inputs)
    specialize_floats([place.number for place in known if place.number is not None])
    if len(known) != len(inputs):
        known = [Placeholder(f"args[{i}]", False, None) for i in range(len(inputs))]
    return _distinct(known)


def _distinct(known: Sequence[Placeholder]) -> list[Input]:
    """Slots with names of their own."""
    seen: set[str] = set()
    slots = []
    for place in known:
        name = place.name
        while name in seen:
            name += "'"
        seen.add(name)
        slots.append(Input(name, stays=place.is_static))
    return slots


def _refuse_whole_backwards(inputs: Sequence[Any]) -> None:
    """Compiled autograd captures backwards by itself, and hands over what belongs to them."""
    if compiled_autograd_is_on() or any(map(is_backward_state, inputs)):
        raise UnsupportedError(
            "compiled autograd captures the backward by itself, and Foregrad has one already: they cannot be used "
            "together. Switch it off (torch._dynamo.config.compiled_autograd = False), or call backward() outside of "
            "what is compiled."
        )
    if any(isinstance(value, (list, tuple, dict)) for value in inputs):
        raise UnsupportedError("a graph that takes lists or dicts of tensors cannot be compiled: pass the tensors.")
