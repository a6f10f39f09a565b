"""What Dynamo's graph says about its inputs, and what cannot be compiled behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class FloatInTensor:
    """A float that stands where Dynamo has put a tensor around it: graphs ask it for its item, and nothing else."""

    value: float

    def item(self) -> float:
        return self.value


def inputs_of(graph: fx.GraphModule, given: Sequence[Any]) -> tuple[list[Input], list[Any]]:
    """The inputs of a graph in the user's words, and what it is recorded on."""
    known = placeholders(graph)
    _refuse_whole_backwards(given)
    if len(known) != len(given):
        return [Input(f"args[{i}]") for i in range(len(given))], list(given)
    specialize_floats([place.number for place in known if place.number is not None])
    pairs = zip(known, given, strict=True)
    return _distinct(known), [value if place.number is None else FloatInTensor(value.item()) for place, value in pairs]


def _distinct(known: Sequence[Placeholder]) -> list[Input]:
    """Slots with names of their own."""
    seen: set[str] = set()
    slots = []
    for place in known:
        name, number = place.name, 1
        while name in seen:
            number += 1
            name = f"{place.name} ({number})"
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
