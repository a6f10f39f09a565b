"""The part of a graph that the host works out first: numbers, what they follow from, and what was decided by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..host_numbers import decided
from ..slots import Slot, Value
from .graph import Graph, GraphBuilder, GraphOutput, Node, ancestors, is_number, map_nodes, nodes_in
from .reads import Read, item


class HostPart(NamedTuple):
    """What runs before a graph, and gives the numbers that this one takes after its other inputs."""

    graph: Graph
    tensor: Node | None = None  # that the graph takes in their place, where it takes no floats
    returned: Mapping[Slot, Slot] = {}  # results of the program that are numbers, which such a graph does not give


def compare_decisions_only(graph: GraphBuilder) -> None:
    """Numbers that a program reads, and decides nothing by, are values like any others: nothing is compared."""
    decisive = ancestors(node for node in graph.nodes if node.op is decided)
    for node in graph.nodes:
        if isinstance(node.read, Read) and node.read.is_number and node not in decisive:
            node.become(Node(item, (node.args[0][0],), {}, node.value))
            node.read, node.impure = None, False


def decided_by_reads(nodes: Sequence[Node]) -> dict[Node, Node]:
    """What decides by numbers that were read, and what that follows from, each with the last read that it needs."""
    order = {node: i for i, node in enumerate(nodes) if node.read is not None}
    after: dict[Node, Node] = {}
    for node in nodes:
        if node.read is None and (is_number(node) or node.op is decided):
            known = [read for read in (after.get(taken, taken) for taken in node.inputs()) if read in order]
            if known:
                after[node] = max(known, key=order.__getitem__)
    decisive = ancestors(node for node in after if node.op is decided)
    return {node: read for node, read in after.items() if node in decisive}


def without_host_part(graph: Graph) -> tuple[HostPart | None, Graph]:
    """Cut a graph in two; there is no part for the host where nothing is computed with numbers.

    Numbers that follow from what the graph computes stay where they are.
    """
    if not any(node.op is decided or is_number(node) for node in graph.nodes):
        return None, graph
    late = _late_numbers(graph)
    decisions = [node for node in graph.nodes if node.op is decided and node not in late]
    numbers = {node for node in graph.nodes if is_number(node) and node not in late}
    if not decisions and not numbers:
        return None, graph
    results = nodes_in(graph.results)
    first_only = numbers.union(decisions)
    must_run = [node for node in graph.nodes if node.impure and node not in first_only]
    kept = ancestors([*results, *must_run], stop=numbers)
    read = {taken for node in kept for taken in node.inputs()}.union(results)
    taken = [node for node in graph.nodes if node in numbers and node in read]
    first = ancestors([*decisions, *taken])
    host = Graph(
        [node for node in graph.inputs if node in first],
        [node for node in graph.nodes if node in first],
        [GraphOutput(Value(node.name), node) for node in taken],
    )
    return HostPart(host), _over_inputs(graph, [node for node in graph.nodes if node in kept], taken)


def _late_numbers(graph: Graph) -> set[Node]:
    """Numbers that are read of what the graph computes, what follows from them, and what is decided by them."""
    behind: set[Node] = set()  # tensors among them: a rate may be a tensor, and read again
    for node in graph.nodes:
        if node.read is not None or node.op is item or any(taken in behind for taken in node.inputs()):
            behind.add(node)
    return {node for node in behind if is_number(node) or node.op is decided}


def _over_inputs(graph: Graph, nodes: Sequence[Node], numbers: Sequence[Node]) -> Graph:
    """A graph of some nodes that takes numbers, and does not compute them."""
    new: dict[Node, Node] = {}
    for node in numbers:
        new[node] = Node(None, (), {}, node.value, Value(node.name), node.name)

    def mapped(node: Node) -> Node:
        return new.get(node, node)

    inputs = [*graph.inputs, *map(mapped, numbers)]
    for node in nodes:
        if any(taken in new for taken in node.inputs()):
            kwargs = {name: map_nodes(value, mapped) for name, value in node.kwargs.items()}
            new[node] = node.copy(map_nodes(node.args, mapped), kwargs)
    outputs = [GraphOutput(slot, map_nodes(value, mapped)) for slot, value in graph.outputs]
    return Graph(inputs, [*map(mapped, nodes)], outputs, {*map(mapped, graph.overwritten)})
