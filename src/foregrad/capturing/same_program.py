"""Whether a program does the same with symbols in place of numbers that it reads.

A symbol behaves like a whole number, but its text and its type are others, and no code can be kept from asking for
them. So a program is recorded with the numbers themselves as well, once, and what it has done is compared: where it is
not the same, it keeps the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor

from .._torch import hint_of
from ..graph.graph import Node, Step
from ..graph.reads import READ
from ..host_numbers import host_number
from ..values import same_value
from .capture import Capture


def does_the_same(one: Capture, other: Capture) -> bool:
    """Whether two recordings of a call have the same operators, forward and backward, results and effects."""
    described = [[*_Described().of(capture)] for capture in (one, other)]
    return same_value(*described)


def _is_of_numbers(node: Node) -> bool:
    """Whether it reads, or computes with symbols where the other program has nothing to compute."""
    return node.op is READ or isinstance(node.value, (int, float, SymInt, SymFloat, SymBool))


class _Described:
    """What a recording did, in plain values; tensors are numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def of(self, capture: Capture) -> Iterator[Any]:
        """Its operators, those of the backward as they are in the graph, its results, what it puts into objects."""
        joint = capture.joint
        for step in joint.recording.steps:
            if step.op is not READ and not step.backward:
                yield self._of_step(step)
        yield from (self._of_node(node) for node in joint.graph.nodes if node.backward and not _is_of_numbers(node))
        yield [*capture.result.paths]
        yield self._value(capture.result.leaves)
        yield [(type(effect).__name__, self._value(getattr(effect, "key", None))) for effect in joint.effects]

    def _of_step(self, step: Step) -> Any:
        given = self._value(step.args), [*step.kwargs], self._value([*step.kwargs.values()])
        return str(step.op), given, self._value(step.out), step.grad_enabled

    def _of_node(self, node: Node) -> Any:
        given = self._value(node.args), [*node.kwargs], self._value([*node.kwargs.values()])
        return str(node.op), given, self._value(node)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._value(value.value)
        number = host_number(value)
        if number is not None:
            return number.value
        if isinstance(value, SymInt):
            return hint_of(value)
        if isinstance(value, (SymFloat, SymBool)):
            return value.node.hint
        if isinstance(value, Tensor):
            size = tuple(map(hint_of, value.shape))
            return self._numbers.setdefault(id(value), len(self._numbers)), size, str(value.dtype), value.requires_grad
        if isinstance(value, (list, tuple)):
            return [*map(self._value, value)]
        return value
