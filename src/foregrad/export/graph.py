"""An exported program as a person wants to read it: a table of inputs and outputs, then the graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor, fx

from .signature import (
    ConstantArgument,
    ExportGraphSignature,
    GraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    classify,
)
from .subclasses import Wrappers

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


_ROWS = 24  # so many inputs or outputs of one kind are shown, or the first and the last of them
_LINES = 400  # of code
_WIDTH = 400  # of a line: a large graph takes and returns hundreds of values


@dataclass(frozen=True, eq=False)
class ExportedGraph:
    """A program as one graph without side effects: its signature, and the state of the module that it came from."""

    graph_module: fx.GraphModule
    signature: GraphSignature
    state: dict[str, Tensor]  # parameters and buffers
    non_persistent: frozenset[str] = frozenset()
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ranges: dict[Any, Any] = field(default_factory=dict)  # of symbolic sizes
    wrappers: Wrappers | None = None  # how arguments and results are put together; not known of loaded programs

    @property
    def specs(self) -> ExportGraphSignature:
        """The signature place by place."""
        return classify(self.graph_module, self.signature, self.non_persistent)

    @property
    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers."""
        return {name: tensor for name, tensor in self.state.items() if name not in self.non_persistent}


@dataclass(frozen=True, slots=True)
class _Row:
    side: str
    name: str
    about: str
    value: str
    kind: Any  # rows of one kind that follow each other are a group


def show(exported: ExportedGraph, whole: bool = False) -> str:
    """Inputs, outputs, mutations, loss and gradients, then the code of the graph: cut where it is long, or whole."""
    graph, specs = exported.graph_module, exported.specs
    nodes = {node.name: node for node in graph.graph.nodes}
    rows = [
        _Row("input", s.arg.name, _about_input(s, exported), _value_of_input(nodes, s, exported), s.kind)
        for s in specs.input_specs
    ]
    rows += [_Row("output", _name(s), _about_output(s, exported), _value(nodes, s), s.kind) for s in specs.output_specs]
    lines = [line for _, group in groupby(rows, lambda row: row.kind) for line in _cut(list(group), whole)]
    widths = [max((len(cells[i]) for cells in lines if len(cells) > 1), default=0) for i in range(3)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(cells, (*widths, 0), strict=False)) for cells in lines]
    code = graph.code.strip().splitlines()
    return "\n".join([_header(exported), *(f"  {line.rstrip()}" for line in table), "", *_cut_code(code, whole)])


def _header(exported: ExportedGraph) -> str:
    signature, state = exported.signature, exported.state
    count = sum(node.op == "call_function" for node in exported.graph_module.graph.nodes)
    own = [name for name in signature.parameters if name not in signature.ties]
    elements = sum(state[name].numel() for name in own)
    kind = "forward" if signature.backward_signature is None else "training step"
    return f"exported {kind}: {count} operators, {len(own)} parameters of {elements:,} elements"


def _cut(group: list[_Row], whole: bool) -> list[tuple[str, ...]]:
    rows = [(row.side, row.name, row.about, row.value) for row in group]
    if whole or len(rows) <= _ROWS:
        return list(rows)
    first, last = _ROWS * 2 // 3, _ROWS // 6
    return [*rows[:first], (f"... {len(rows) - first - last} more",), *rows[-last:]]


def _cut_code(lines: list[str], whole: bool) -> list[str]:
    if whole:
        return lines
    if len(lines) > _LINES:
        first, last = _LINES * 2 // 3, _LINES // 6
        lines = [*lines[:first], f"    ... {len(lines) - first - last} more lines", *lines[-last:]]
    return [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines]


def _name(spec: OutputSpec) -> str:
    return repr(spec.arg.value) if isinstance(spec.arg, ConstantArgument) else spec.arg.name


def _about_input(spec: InputSpec, exported: ExportedGraph) -> str:
    role = exported.signature.random_inputs.get(spec.arg.name)
    return f"random {role}" if role else _INPUTS[spec.kind].format(spec.target)


def _value_of_input(nodes: dict[str, fx.Node], spec: InputSpec, exported: ExportedGraph) -> str:
    first = exported.signature.ties.get(spec.target or "")
    return _value(nodes, spec) + (f", the same as {first}" if first is not None else "")


def _about_output(spec: OutputSpec, exported: ExportedGraph) -> str:
    role = exported.signature.random_outputs.get(spec.arg.name)
    return f"random {role}" if role else _OUTPUTS[spec.kind].format(spec.target)


def _value(nodes: dict[str, fx.Node], spec: Any) -> str:
    if isinstance(spec.arg, ConstantArgument):
        return f"= {spec.arg.value!r}"
    node = nodes.get(spec.arg.name)
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(map(str, value.shape))})"
