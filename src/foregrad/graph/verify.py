"""Checks on graphs: what holds after every pass."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from .._torch import OpOverload
from ..errors import NotFunctionalError, VerificationError
from ..functional_variants import really_written
from ..ops import Kind, aten, op_info
from .graph import Graph, Node, get_constant, nodes_in


def assert_functional_graph(graph: fx.Graph) -> int:
    """Check that a graph has no side effects but at most one final `copy_` or `set_` into each placeholder (M-13).

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> _ = graph.output(graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("a"),)))
    >>> assert_functional_graph(graph)
    0

    Returns:
        The number of such writes.
    """
    placeholders = {node for node in graph.nodes if node.op == "placeholder"}
    return _count_writes([(node.format_node(), node.target, node.args) for node in graph.nodes], placeholders)


def _count_writes(calls: Iterable[tuple[Any, Any, Sequence[Any]]], inputs: Collection[Any]) -> int:
    """How many calls, each with its text and its arguments, write to an input; any other write is refused."""
    written: set[Any] = set()
    for text, op, args in calls:
        if isinstance(op, OpOverload) and op._schema.is_mutable:
            allowed = op in (aten.copy_.default, aten.set_.source_Tensor) and args[0] in inputs
            if not allowed or args[0] in written:
                raise NotFunctionalError(
                    f"aot_autograd expected to have an entirely functional graph, but found {text}"
                )
            written.add(args[0])
    return len(written)


def verify(graph: Graph) -> None:
    """Check that a graph is functional, in order, and that its abstract values are there."""
    _count_writes([(f"{node.name} = {node.op}", node.op, node.args) for node in graph.nodes], set(graph.inputs))
    _verify_order(graph)


def verify_in_place(graph: Graph, written: Collection[Node]) -> None:
    """Check that a graph writes only to these inputs and to its own memory, and reads nothing that is overwritten."""
    _verify_order(graph)
    memory: dict[Node, Any] = {node: node for node in graph.inputs}
    writes: dict[Any, str] = {}  # what wrote last to memory, and what had done so when a node was made
    known: dict[Node, str | None] = dict.fromkeys(graph.inputs)

    def read(item: Node, reader: str) -> None:
        if known[item] != writes.get(memory[item]):
            raise VerificationError(f"{reader} reads {item.name}, which {writes[memory[item]]} has written over")

    for node in graph.nodes:
        for item in node.inputs() if node.op is not aten.copy_.default else node.args[1:]:
            read(item, node.name)
        targets = nodes_in(really_written(node.op, node.args, node.kwargs)) if isinstance(node.op, OpOverload) else []
        for item in targets:
            place = memory[item]
            is_constant = isinstance(place, Node) and place.op is get_constant
            if is_constant or (place in graph.inputs and place not in written):
                raise VerificationError(f"{node.name} writes to {place.name}, which the program does not write to")
            writes[place] = node.name
            for shown in _with_bases(item):  # a write through a view is one to what it is a view of
                known[shown] = node.name
        memory[node] = _memory_shown_by(node, targets, memory)
        known[node] = writes.get(memory[node])
    for item in nodes_in(graph.results):
        read(item, "the caller")


def _memory_shown_by(node: Node, targets: Sequence[Node], memory: dict[Node, Any]) -> Any:
    if targets:
        return memory[targets[0]]
    if node.op is operator.getitem:
        whole, index = node.args
        return memory[whole] if memory[whole] is not whole else (whole, index)
    return memory[node.args[0]] if _is_view(node) else node


def _with_bases(node: Node) -> Iterator[Node]:
    yield node
    while _is_view(node):
        node = node.args[0]
        yield node


def _is_view(node: Node) -> bool:
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def _verify_order(graph: Graph) -> None:
    seen = set(graph.inputs)
    for node in graph.nodes:
        for item in node.inputs():
            if item not in seen:
                raise VerificationError(f"{node.name} reads {item.name} before it is made")
        if node.meta is not None and node.op is not get_constant and "val" not in node.meta:
            raise VerificationError(f"{node.name} = {node.op} has no abstract value")
        if node.op is operator.getitem:
            value = node.args[0].value
            if isinstance(value, (list, tuple)) and not 0 <= node.args[1] < len(value):
                raise VerificationError(f"{node.name} takes a result that {node.args[0].name} does not have")
        seen.add(node)
    for item in nodes_in(graph.results):
        if item not in seen:
            raise VerificationError(f"{item.name} is returned and never made")
