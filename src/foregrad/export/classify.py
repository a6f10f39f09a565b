"""The signature of a graph place by place, from its names."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .arguments import ArgumentSpec, ConstantArgument, CustomObjArgument, SymIntArgument, TensorArgument, TokenArgument
from .signature import GraphSignature
from .specs import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec


def classify(graph: fx.GraphModule, signature: GraphSignature, non_persistent: frozenset[str]) -> ExportGraphSignature:
    """A spec for each input and output: the order is that of `GraphSignature`."""
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    inputs = [_input(node, signature, non_persistent) for node in placeholders]
    returned = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    return ExportGraphSignature(inputs, _outputs(returned, signature))


def _input(node: fx.Node, signature: GraphSignature, non_persistent: frozenset[str]) -> InputSpec:
    name = node.name
    if name in signature.input_tokens:
        return InputSpec(InputKind.TOKEN, TokenArgument(name), None)
    if name in signature.inputs_to_parameters:
        return InputSpec(InputKind.PARAMETER, TensorArgument(name), signature.inputs_to_parameters[name])
    if name in signature.inputs_to_buffers:
        target = signature.inputs_to_buffers[name]
        return InputSpec(InputKind.BUFFER, TensorArgument(name), target, target not in non_persistent)
    return InputSpec(InputKind.USER_INPUT, argument_of(node), None)


def argument_of(value: Any) -> ArgumentSpec:
    """What stands at a place: a node, by what it holds, or a constant."""
    if not isinstance(value, fx.Node):
        return ConstantArgument("", value)
    held = value.meta.get("val")
    if isinstance(held, torch.Tensor) or "val" not in value.meta:
        return TensorArgument(value.name)
    if isinstance(held, torch.SymInt):
        return SymIntArgument(value.name)
    if isinstance(held, (int, float, bool, str)) or held is None:
        return ConstantArgument(value.name, held)
    return CustomObjArgument(value.name, type(held).__qualname__)


def _outputs(returned: list[Any], signature: GraphSignature) -> list[OutputSpec]:
    """Position tells what an output is, for one node may be an updated buffer and a result."""
    backward = signature.backward_signature
    kinds: list[tuple[OutputKind, str | None]] = [(OutputKind.TOKEN, None)] * len(signature.output_tokens)
    updates = {
        **{n: (OutputKind.PARAMETER_MUTATION, t) for n, t in signature.parameters_to_mutate.items()},
        **{n: (OutputKind.BUFFER_MUTATION, t) for n, t in signature.buffers_to_mutate.items()},
        **{n: (OutputKind.USER_INPUT_MUTATION, t) for n, t in signature.user_inputs_to_mutate.items()},
    }
    start = len(kinds)
    kinds += [updates[node.name] for node in returned[start : start + len(updates)]]
    for name in signature.user_outputs:
        is_loss = backward is not None and name == backward.loss_output
        kinds.append((OutputKind.LOSS_OUTPUT if is_loss else OutputKind.USER_OUTPUT, None))
    if [kind for kind, _ in kinds].count(OutputKind.LOSS_OUTPUT) > 1:  # the loss, returned twice
        seen = False
        for i, (kind, _) in enumerate(kinds):
            if kind is OutputKind.LOSS_OUTPUT:
                kinds[i] = (OutputKind.USER_OUTPUT if seen else kind, None)
                seen = True
    kinds += [(OutputKind.USER_OUTPUT, None)] * len(signature.random_outputs)
    if backward is not None:
        kinds += [(OutputKind.GRADIENT_TO_PARAMETER, t) for t in backward.gradients_to_parameters.values()]
        kinds += [(OutputKind.GRADIENT_TO_USER_INPUT, t) for t in backward.gradients_to_user_inputs.values()]
    tokens = len(signature.output_tokens)
    return [
        OutputSpec(kind, TokenArgument(value.name) if i < tokens else argument_of(value), target)
        for i, (value, (kind, target)) in enumerate(zip(returned, kinds, strict=True))
    ]
