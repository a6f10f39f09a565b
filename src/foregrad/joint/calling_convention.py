"""The calling convention of a joint graph: what it takes, what its forward returns, and what is differentiated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError
from ..functionalize.functionalizer import Functionalizer
from ..functionalize.rng import Draws, RandomInputs
from ..graph.graph import GraphBuilder, GraphOutput, Node
from ..options import AOTConfig, Loss
from ..record.fakify import RecordedInput
from ..record.recording import Recording
from ..slots import Base, Grown, Output, Primal, RandomState, Returned, SyntheticBase, Updated, ViewRoot
from ..subclasses.layout import Wrapped
from .differentiate import value_of
from .inputs import (
    Autograd,
    InputFacts,
    Reshaped,
    Resized,
    StorageReplaced,
    WrittenBack,
    WrittenInGraph,
    is_stale,
)
from .outputs import Constant, Number, OutputFacts, Plain, SameAsInput


# ---------------------------------------------------------------------------------------------------------------------
# What is differentiated of a program's results: all that can be, and in export the loss, or nothing.
def targets_of(
    config: AOTConfig, facts: Sequence[InputFacts], outputs: OutputFacts, visible: int
) -> dict[Returned, Tensor]:
    """What is differentiated, as the options ask for it; the first `visible` results are the user's."""
    match config.differentiate:
        case Loss(index):
            return _loss_target(index, outputs, visible)
        case False:
            return {}
        case _:
            return _all_targets(facts, outputs)


def _all_targets(facts: Sequence[InputFacts], outputs: OutputFacts) -> dict[Returned, Tensor]:
    """Everything that can be differentiated."""
    targets: dict[Returned, Tensor] = {}
    for item in facts:
        match item.data:
            case WrittenBack(Autograd.FOLLOWED):
                targets[Updated(item.recorded.slot)] = item.recorded.seen
    for i, result in enumerate(outputs.results):
        if isinstance(result, Plain) and result.differentiable:
            targets[Output(i)] = result.tensor
    for i, base in enumerate(outputs.bases):
        targets[Base(i)] = base
    return targets


def _loss_target(index: int, outputs: OutputFacts, visible: int) -> dict[Returned, Tensor]:
    """The loss among the first `visible` results, which must be the only one that requires grad."""
    if not 0 <= index < visible:
        raise ExportError(f"output_loss_index={index}, but the program returns {visible} values.")
    loss = outputs.tensors[index]
    if loss is None:
        raise ExportError(f"output {index} was marked as the loss, but it does not require gradients: it is no tensor.")
    if is_stale(loss) or not loss.requires_grad:
        raise ExportError(
            f"output {index} was marked as the loss, but it does not require gradients. Mark another output, or let a "
            "parameter or an input that it is computed from require grad."
        )
    if loss.numel() != 1:
        raise ExportError(
            f"We require the output marked as the loss (at index {index}) to be a scalar, but it has shape "
            f"{tuple(loss.shape)}. Reduce it, as with sum() or mean()."
        )
    if loss.is_complex():
        raise ExportError(f"the loss (at index {index}) is complex. Take a real number of it, as with abs().")
    for i, tensor in enumerate(outputs.tensors[:visible]):
        if i != index and tensor is not None and tensor is not loss and not is_stale(tensor) and tensor.requires_grad:
            raise ExportError(
                "Found an output of the forward that requires gradients, that was not the scalar loss: it stands at "
                f"index {i}, has shape {tuple(tensor.shape)}, and the loss is at {index}. A backward exists for the "
                "loss alone: detach() the other outputs."
            )
    return {Output(index): loss}


# ---------------------------------------------------------------------------------------------------------------------
# What a joint graph takes and gives under `functionalize_rng_ops`.
@dataclass(frozen=True, slots=True)
class RandomSide:
    """The state that one direction is given, and the offset that it gives back."""

    seed: Node
    base: Node
    offset: Node
    device: torch.device  # whose generator gives the state

    @property
    def draws(self) -> bool:
        """Whether anything is drawn."""
        return self.offset is not self.base


@dataclass(frozen=True, slots=True)
class RandomFacts:
    """Seeds and offsets, forward and backward; None where draws stay as they are."""

    forward: RandomSide | None
    backward: RandomSide | None

    @property
    def placeholders(self) -> list[Node]:
        """Seed and offset of the forward, then of the backward."""
        sides = [side for side in (self.forward, self.backward) if side is not None]
        return [node for side in sides for node in (side.seed, side.base)]

    @property
    def values(self) -> list[Any]:
        """Abstract values of the placeholders."""
        return [node.value for node in self.placeholders]

    @property
    def forward_outputs(self) -> list[GraphOutput]:
        """The forward's new offset."""
        return [] if self.forward is None else [GraphOutput(RandomState("fwd", "offset"), self.forward.offset)]

    @property
    def backward_outputs(self) -> list[GraphOutput]:
        """The backward's new offset, if it draws."""
        draws = self.backward is not None and self.backward.draws
        return [GraphOutput(RandomState("bwd", "offset"), self.backward.offset)] if draws else []  # type: ignore[union-attr]


def random_facts(draws: Draws, training: bool) -> RandomFacts:
    """The seeds and offsets of a graph; one without a backward has those of the forward only."""
    return RandomFacts(_side(draws.forward), _side(draws.backward) if training else None)


def _side(inputs: RandomInputs | None) -> RandomSide | None:
    return None if inputs is None else RandomSide(inputs.seed, inputs.base, inputs.offset, inputs.device)


# ---------------------------------------------------------------------------------------------------------------------
# The calling convention of a joint graph: what it takes, what its forward returns, and how placeholders are called.
def primals_of(
    graph: GraphBuilder, recording: Recording, facts: dict[Primal, InputFacts], targets: dict[Returned, Tensor]
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
    reached = recording.session.reached_inputs(list(targets.values()))
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
        match facts.data, facts.place:
            case WrittenInGraph(), _:
                new = functionalizer.node_of(facts.recorded.seen)
                kept[slot] = functionalizer.graph.write_placeholder(placeholders[slot], new)
            case data, Resized() | StorageReplaced():
                if isinstance(data, WrittenBack):
                    values[Updated(slot)] = functionalizer.read(functionalizer.state_before(facts.recorded))
                grown = isinstance(facts.place, Resized) and not isinstance(slot, (SyntheticBase, ViewRoot))
                if grown and functionalizer.state_of(facts.recorded.seen).storage.writes:
                    values[Grown(slot)] = functionalizer.node_of(facts.recorded.seen)
            case (WrittenBack(), _) | (_, Reshaped()):
                values[Updated(slot)] = value_of(functionalizer, facts.recorded.seen)
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
                values[Output(i)] = value_of(functionalizer, tensor)
    for i, base in enumerate(outputs.bases):
        values[Base(i)] = value_of(functionalizer, base)
    return values


def placeholder_names(primals: int, tangents: int) -> list[str]:
    """`primals_1`, ..., `tangents_1`, ...; without a backward `arg0_1`, ..."""
    if not tangents:
        return [f"arg{i}_1" for i in range(primals)]
    return [f"primals_{i + 1}" for i in range(primals)] + [f"tangents_{i + 1}" for i in range(tangents)]
