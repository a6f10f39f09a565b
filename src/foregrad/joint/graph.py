"""From the flat graph to `torch.fx`: the form that users and compilers see."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .._torch import LazyGraphModule, OpOverload
from ..record.lines import show_stack
from .ir import FlatGraph, Node, get_constant


class FxWriter:
    """Writes nodes of a flat graph into a `torch.fx` graph, each under a name of its own."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._written: dict[int, fx.Node] = {}

    def placeholder(self, node: Node, name: str) -> fx.Node:
        """An input."""
        written = self._written[id(node)] = self.graph.placeholder(name)
        if isinstance(node.value, (torch.Tensor, torch.SymInt)):
            written.meta["val"] = node.value
        return written

    def call(self, node: Node) -> fx.Node:
        """The result of an operator, or a constant."""
        if node.op is get_constant:
            name = f"_tensor_constant{len(self.constants)}"
            self.constants[name] = node.args[0]
            written = self.graph.create_node("get_attr", name, (), {})
        else:
            assert node.op is not None
            kwargs = {key: self.value(item) for key, item in node.kwargs.items()} if node.kwargs else {}
            args = tuple([self.value(item) for item in node.args])
            written = self.graph.create_node("call_function", node.op, args, kwargs, _name_for(node.op))
        self._written[id(node)] = written
        meta = written.meta
        meta["val"] = node.value
        meta["partitioner_tag"] = "is_backward" if node.backward else "is_forward"
        if node.impure:
            meta["impure"] = True
        if node.stack:
            meta["stack_trace"] = show_stack(node.stack)
        return written

    def value(self, item: Any) -> Any:
        """An argument, with the written nodes in place of the flat ones."""
        kind = item.__class__
        if kind is Node:
            return self._written[id(item)]
        if kind is list:
            return [self.value(x) for x in item]
        if kind is tuple:
            return tuple([self.value(x) for x in item])
        return item

    def written(self, node: Node) -> fx.Node:
        """The `torch.fx` node of a flat one."""
        return self._written[id(node)]

    def knows(self, node: Node) -> bool:
        """Whether a flat node was written."""
        return id(node) in self._written

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """Close the graph. Its code is generated when it is first called."""
        self.graph.output(tuple(self.value(item) for item in outputs))
        return LazyGraphModule(_holder(self.constants), self.graph)


def _name_for(op: Any) -> str:
    """Nodes are named after the operator, not after its overload."""
    return op._opname if isinstance(op, OpOverload) else op.__name__  # type: ignore[no-any-return]


def _holder(constants: dict[str, torch.Tensor]) -> torch.nn.Module:
    holder = torch.nn.Module()
    for name, tensor in constants.items():
        setattr(holder, name, tensor)
    return holder


def write_fx(graph: FlatGraph, nodes: Sequence[Node], names: Sequence[str], outputs: Sequence[Any]) -> tuple[fx.GraphModule, FxWriter]:
    """A graph module of live nodes, with the given names for its placeholders."""
    writer = FxWriter()
    for node, name in zip(graph.placeholders, names, strict=True):
        writer.placeholder(node, name)
    for node in nodes:
        writer.call(node)
    return writer.finish(outputs), writer


def op_count(module: fx.GraphModule) -> int:
    """How many operators a graph runs."""
    return sum(n.op == "call_function" and n.target is not operator.getitem for n in module.graph.nodes)
