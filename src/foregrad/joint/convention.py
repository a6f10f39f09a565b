"""The calling convention of a joint graph: what it takes, what its forward returns, and how placeholders are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..functionalize.walk import Functionalizer
from ..record.recording import Recording
from ..record.stand_ins import RecordedInput
from ..slots import Base, Grown, Memory, Output, Primal, Returned, Root, Updated
from ..subclasses.layout import Wrapped
from .inputs import InputFacts
from .ir import FlatGraph, Node
from .outputs import Constant, Number, OutputFacts, SameAsInput
from .wrappers import wrapped_value


def primals_of(
    graph: FlatGraph, recording: Recording, facts: dict[Primal, InputFacts], targets: dict[Returned, Tensor]
) -> tuple[tuple[Node | Wrapped, ...], tuple[InputFacts, ...]]:
    """What the graph takes; the second place of a tensor that was passed twice is dropped if it is written (D-2).

    To autograd, and to everything around the graph, the tensors in a wrapper subclass are one input; one that the
    program itself has taken out, and differentiates, is an input beside the wrapper.
    """
    kept: dict[Primal, Node] = {}
    for node in graph.placeholders:
        slot: Any = node.slot
        first = facts[slot].recorded.same_as
        if first is None or not (facts[first.slot].data_changed or facts[first.slot].reshapes):
            kept[slot] = node
    graph.placeholders[:] = kept.values()
    outer = {i.slot: r for r in recording.inputs if r.layout is not None and r.same_as is None for i in r.inner}
    if not outer:
        return tuple(kept.values()), tuple(facts[slot] for slot in kept)
    primals: dict[Primal, Node | Wrapped] = {}
    for slot, node in kept.items():
        around = outer.get(slot)
        if around is None:
            primals[slot] = node
        elif around.slot not in primals:
            primals[around.slot] = _in_wrapper(around, kept)
    for recorded in outer.values():  # even if the graph needs nothing of it, autograd does
        primals.setdefault(recorded.slot, _in_wrapper(recorded, kept))
    reached = recording.reached_inputs(list(targets.values()))
    primals |= {slot: kept[slot] for slot in outer if slot in reached}
    return tuple(primals.values()), tuple(facts[slot] for slot in primals)


def _in_wrapper(recorded: RecordedInput, kept: dict[Primal, Node]) -> Wrapped:
    assert recorded.layout is not None
    return Wrapped(recorded.layout, tuple(kept[item.slot] for item in recorded.inner if item.slot in kept))


def forward_values(
    functionalizer: Functionalizer, inputs: Iterable[InputFacts], outputs: OutputFacts
) -> dict[Returned, Any]:
    """The values that the forward returns: updated inputs, the user's outputs, bases."""
    values: dict[Returned, Any] = {}
    kept: dict[Primal, Node] = {}
    placeholders = {node.slot: node for node in functionalizer.graph.placeholders}
    for facts in inputs:
        slot = facts.recorded.slot
        if facts.written_in_graph:
            new = functionalizer.node_of(facts.recorded.seen)
            kept[slot] = functionalizer.graph.write_placeholder(placeholders[slot], new)
        elif facts.refitted or facts.moved:
            if facts.written:
                values[Updated(slot)] = functionalizer.read(functionalizer.state_before(facts.recorded))
            grown = facts.refitted and not isinstance(slot, (Memory, Root))
            if grown and functionalizer.state_of(facts.recorded.seen).storage.writes:
                values[Grown(slot)] = functionalizer.node_of(facts.recorded.seen)
        elif facts.written or facts.reshapes:
            values[Updated(slot)] = wrapped_value(facts.recorded.seen, functionalizer.node_of)
    for i, (result, tensor) in enumerate(zip(outputs.results, outputs.tensors, strict=True)):
        match result:
            case Constant(value):
                values[Output(i)] = value
            case Number(value):
                values[Output(i)] = functionalizer.graph.number(value)
            case SameAsInput(recorded) if recorded.slot in kept:
                values[Output(i)] = kept[recorded.slot]
            case _:
                assert tensor is not None
                values[Output(i)] = wrapped_value(tensor, functionalizer.node_of)
    for i, base in enumerate(outputs.bases):
        values[Base(i)] = wrapped_value(base, functionalizer.node_of)
    return values


def placeholder_names(primals: int, tangents: int) -> list[str]:
    """`primals_1`, ..., `tangents_1`, ...; without a backward `arg0_1`, ..."""
    if not tangents:
        return [f"arg{i}_1" for i in range(primals)]
    return [f"primals_{i + 1}" for i in range(primals)] + [f"tangents_{i + 1}" for i in range(tangents)]
