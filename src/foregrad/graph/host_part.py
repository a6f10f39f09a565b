"""The part of a graph that the host works out first: numbers, what they follow from, and what was decided by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..host_numbers import Expression, decided
from ..slots import Value
from .graph import Graph, GraphOutput, Node, ancestors, map_nodes, nodes_in


class HostPart(NamedTuple):
    """What runs before a graph, and the numbers that the graph takes after its other inputs."""

    graph: Graph
    numbers: Sequence[Node]


def is_number(node: Node) -> bool:
    """Whether a node gives a number that the host works out."""
    return isinstance(node.value, Expression)


def without_host_part(graph: Graph) -> tuple[HostPart | None, Graph]:
    """Cut a graph in two; there is no part for the host where nothing is computed with numbers."""
    decisions = [node for node in graph.nodes if node.op is decided]
    numbers = {node for node in graph.nodes if is_number(node)}
    if not decisions and not numbers:
        return None, graph
    results = nodes_in(graph.results)
    must_run = [node for node in graph.nodes if node.impure and node.op is not decided and node not in numbers]
    kept = ancestors([*results, *must_run], stop=numbers)
    read = {item for node in kept for item in node.inputs()}.union(results)
    taken = [node for node in graph.nodes if node in numbers and node in read]
    first = ancestors([*decisions, *taken])
    host = Graph(
        [node for node in graph.inputs if node in first],
        [node for node in graph.nodes if node in first],
        [GraphOutput(Value(node.name), node) for node in taken],
    )
    return HostPart(host, taken), _over_inputs(graph, [node for node in graph.nodes if node in kept], taken)


def _over_inputs(graph: Graph, nodes: Sequence[Node], numbers: Sequence[Node]) -> Graph:
    """A graph of some nodes that takes numbers, and does not compute them."""
    new: dict[Node, Node] = {}
    for node in numbers:
        new[node] = Node(None, (), {}, node.value, Value(node.name), node.name)

    def mapped(node: Node) -> Node:
        return new.get(node, node)

    inputs = [*graph.inputs, *map(mapped, numbers)]
    for node in nodes:
        if any(item in new for item in node.inputs()):
            kwargs = {name: map_nodes(value, mapped) for name, value in node.kwargs.items()}
            new[node] = node.copy(map_nodes(node.args, mapped), kwargs)
    outputs = [GraphOutput(slot, map_nodes(value, mapped)) for slot, value in graph.outputs]
    return Graph(inputs, [*map(mapped, nodes)], outputs, {*map(mapped, graph.overwritten)})
