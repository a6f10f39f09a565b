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


def show(exported: ExportedGraph, whole: bool = False) -> str:
    """Inputs, outputs, mutations, loss and gradients, then the code of the graph: cut where it is long, or whole."""
    graph, specs, signature = exported.graph_module, exported.specs, exported.signature
    nodes = {node.name: node for node in graph.graph.nodes}
    rows: list[tuple[Any, tuple[str, ...]]] = []  # by kind
    for given in specs.input_specs:
        about = _about(given, _INPUTS[given.kind], signature.random_inputs)
        first = signature.ties.get(given.target or "")
        value = _value(nodes, given) + (f", the same as {first}" if first is not None else "")
        rows.append((given.kind, ("input", given.arg.name, about, value)))
    for returned in specs.output_specs:
        about = _about(returned, _OUTPUTS[returned.kind], signature.random_outputs)
        name = repr(returned.arg.value) if isinstance(returned.arg, ConstantArgument) else returned.arg.name
        rows.append((returned.kind, ("output", name, about, _value(nodes, returned))))
    groups = [[cells for _, cells in group] for _, group in groupby(rows, lambda row: row[0])]
    lines = [line for group in groups for line in (group if whole else _cut(group))]
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


def _cut(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first and the last rows of one kind."""
    if len(rows) <= _ROWS:
        return rows
    first, last = _ROWS * 2 // 3, _ROWS // 6
    return [*rows[:first], (f"... {len(rows) - first - last} more",), *rows[-last:]]


def _cut_code(lines: list[str], whole: bool) -> list[str]:
    if whole:
        return lines
    if len(lines) > _LINES:
        first, last = _LINES * 2 // 3, _LINES // 6
        lines = [*lines[:first], f"    ... {len(lines) - first - last} more lines", *lines[-last:]]
    return [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines]


def _about(spec: InputSpec | OutputSpec, text: str, random: dict[str, str]) -> str:
    role = random.get(spec.arg.name)
    return f"random {role}" if role else text.format(spec.target)


def _value(nodes: dict[str, fx.Node], spec: Any) -> str:
    if isinstance(spec.arg, ConstantArgument):
        return f"= {spec.arg.value!r}"
    node = nodes.get(spec.arg.name)
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(map(str, value.shape))})"
