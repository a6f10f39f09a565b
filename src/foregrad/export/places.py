"""The inputs and outputs of an exported graph by what they are, and the signature that gives each its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..joint.ir import Node
from ..slots import Buffer, Input, Param
from .signature import BackwardSignature, GraphSignature
from .structure import Structure
from .wrappers import Named, owner_of, path_of


@dataclass
class Inputs:
    """The placeholders of the graph, in their order."""

    tokens: list[Node] = field(default_factory=list)
    state: dict[Named, Node] = field(default_factory=dict)  # parameters, then buffers
    arguments: dict[Named, Node] = field(default_factory=dict)
    random: dict[str, Node] = field(default_factory=dict)  # seeds and offsets, by their roles

    @property
    def named(self) -> dict[Named, Node]:
        """What the module or its caller has a name for."""
        return {**self.state, **self.arguments}

    def flat(self) -> list[Node]:
        """All of them."""
        return [*self.tokens, *self.state.values(), *self.arguments.values(), *self.random.values()]


@dataclass
class Outputs:
    """What the graph returns, in its order."""

    tokens: list[Node] = field(default_factory=list)
    updates: list[tuple[Named, Any]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    loss: int | None = None  # which of them, if the graph has a backward
    offsets: list[tuple[str, Node]] = field(default_factory=list)
    gradients: list[tuple[Named, Node]] = field(default_factory=list)

    def flat(self) -> list[Any]:
        """All of it."""
        updates, offsets = [node for _, node in self.updates], [node for _, node in self.offsets]
        return [*self.tokens, *updates, *self.results, *offsets, *(node for _, node in self.gradients)]


def signature_of(inputs: Inputs, outputs: Outputs, structure: Structure, ties: Mapping[str, str]) -> GraphSignature:
    """Names for every place of the graph; `ties` are further names of tensors of the state, and their first names."""
    state, arguments = inputs.state, inputs.arguments
    params = {node.name: path_of(slot) for slot, node in state.items() if _is(slot, Param)}
    buffers = {node.name: path_of(slot) for slot, node in state.items() if _is(slot, Buffer)}
    return GraphSignature(
        parameters=list(params.values()),
        buffers=list(buffers.values()),
        user_inputs=[node.name for node in arguments.values()],
        user_outputs=[getattr(node, "name", None) for node in outputs.results],
        inputs_to_parameters=params,
        inputs_to_buffers=buffers,
        buffers_to_mutate={n.name: path_of(s) for s, n in outputs.updates if _is(s, Buffer)},
        parameters_to_mutate={n.name: path_of(s) for s, n in outputs.updates if _is(s, Param)},
        user_inputs_to_mutate={n.name: arguments[s].name for s, n in outputs.updates if _is(s, Input)},
        in_spec=structure.in_spec,
        out_spec=structure.out_spec,
        backward_signature=_backward_signature(inputs, outputs),
        input_tokens=[node.name for node in inputs.tokens],
        output_tokens=[node.name for node in outputs.tokens],
        ties=dict(ties),
        random_inputs={node.name: role for role, node in inputs.random.items()},
        random_outputs={node.name: role for role, node in outputs.offsets},
    )


def _backward_signature(inputs: Inputs, outputs: Outputs) -> BackwardSignature | None:
    if outputs.loss is None:
        return None
    return BackwardSignature(
        {node.name: path_of(slot) for slot, node in outputs.gradients if _is(slot, Param)},
        {node.name: inputs.arguments[slot].name for slot, node in outputs.gradients if _is(slot, Input)},
        outputs.results[outputs.loss].name,
    )


def _is(slot: Named, kind: type) -> bool:
    """Whether a slot is a parameter, a buffer or an argument, or lies in one."""
    return isinstance(owner_of(slot), kind)
