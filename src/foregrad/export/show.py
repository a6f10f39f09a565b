"""An exported program as a person wants to read it: a table of inputs and outputs, then the graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .arguments import ConstantArgument
from .exported import Exported
from .specs import InputKind, InputSpec, OutputKind, OutputSpec

_INPUTS = {
    InputKind.PARAMETER: "parameter {}",
    InputKind.BUFFER: "buffer {}",
    InputKind.USER_INPUT: "user input",
    InputKind.TOKEN: "token",
}
_OUTPUTS = {
    OutputKind.USER_OUTPUT: "user output",
    OutputKind.LOSS_OUTPUT: "loss",
    OutputKind.BUFFER_MUTATION: "new value of buffer {}",
    OutputKind.PARAMETER_MUTATION: "new value of parameter {}",
    OutputKind.USER_INPUT_MUTATION: "new value of {}",
    OutputKind.GRADIENT_TO_PARAMETER: "gradient of parameter {}",
    OutputKind.GRADIENT_TO_USER_INPUT: "gradient of {}",
    OutputKind.TOKEN: "token",
}


def show(exported: Exported) -> str:
    """Inputs, outputs, mutations, loss and gradients, then the code of the graph."""
    graph, signature, specs = exported.graph_module, exported.signature, exported.specs
    nodes = {node.name: node for node in graph.graph.nodes}
    count = sum(node.op == "call_function" for node in graph.graph.nodes)
    kind = "forward" if signature.backward_signature is None else "training step"
    rows = [("input", s.arg.name, _about_input(s, exported), _value(nodes, s)) for s in specs.input_specs]
    rows += [("output", _name(s), _about_output(s, exported), _value(nodes, s)) for s in specs.output_specs]
    widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else [0, 0, 0]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    header = f"exported {kind}: {count} operators"
    return "\n".join([header, *(f"  {line.rstrip()}" for line in lines), "", graph.code.strip()])


def _name(spec: OutputSpec) -> str:
    return repr(spec.arg.value) if isinstance(spec.arg, ConstantArgument) else spec.arg.name


def _about_input(spec: InputSpec, exported: Exported) -> str:
    role = exported.signature.random_inputs.get(spec.arg.name)
    first = exported.signature.ties.get(spec.target or "")
    text = role or _INPUTS[spec.kind].format(spec.target)
    return f"{text}, the same as {first}" if first is not None else text


def _about_output(spec: OutputSpec, exported: Exported) -> str:
    role = exported.signature.random_outputs.get(spec.arg.name)
    return role or _OUTPUTS[spec.kind].format(spec.target)


def _value(nodes: dict[str, fx.Node], spec: Any) -> str:
    if isinstance(spec.arg, ConstantArgument):
        return f"= {spec.arg.value!r}"
    node = nodes.get(spec.arg.name)
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(map(str, value.shape))})"
