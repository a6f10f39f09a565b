"""Excerpts of a graph: what computes some nodes from others, and a copy of it with names of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedError
from ..slots import Slot
from .graph import Graph, GraphBuilder, GraphOutput, Node, map_nodes, name_nodes, nodes_in


def impure_since(graph: GraphBuilder, start: int) -> list[Node]:
    """What was written into the graph from a place on and runs whether it is read or not."""
    return [node for node in graph.nodes[start:] if node.impure]


def between(graph: GraphBuilder, given: Sequence[Node], wanted: Sequence[Node]) -> list[Node]:
    """What computes the wanted nodes from the given ones, each after what it reads.

    A backward stays in the order of the recording, in which draws follow each other and autograd frees what it can;
    what it computes of the forward again comes right before it is read.
    """
    nodes = _needed(given, wanted)
    place = {node: i for i, node in enumerate(graph.nodes)}
    backward = sorted((node for node in nodes if node.backward), key=place.__getitem__)
    return _needed(given, [*backward, *wanted])


def _needed(given: Sequence[Node], wanted: Sequence[Node]) -> list[Node]:
    done = set(given)
    order: list[Node] = []
    pending: list[tuple[Node, bool]] = [(node, False) for node in reversed(wanted)]
    while pending:
        node, ready = pending.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            order.append(node)
            continue
        if node.op is None or (node.impure and not node.backward):
            raise UnsupportedError(
                "this backward needs a value of the forward that was not saved for it. default_partition saves what "
                "autograd does: compile with it, and without a memory budget."
            )
        pending.append((node, True))
        pending.extend((item, False) for item in node.inputs())
    return order


def read_by(nodes: Sequence[Node], outputs: Sequence[Any]) -> set[Node]:
    """Everything that an excerpt reads or returns."""
    return {item for node in nodes for item in node.inputs()} | set(nodes_in(outputs))


def copied_joint(
    forward_inputs: Sequence[tuple[Slot, Node]],
    backward_inputs: Sequence[Node],
    nodes: Sequence[Node],
    outputs: Sequence[GraphOutput],
    in_forward: set[Node],
) -> tuple[Graph, dict[str, Node]]:
    """A copy with names as those of any joint graph, so that it is partitioned like one, and the originals by name.

    `in_forward` are the nodes that belong to its forward.
    """
    copies: dict[Node, Node] = {}
    for stem, inputs in (("primals", forward_inputs), ("tangents", [(node.slot, node) for node in backward_inputs])):
        for i, (slot, node) in enumerate(inputs):
            copy = copies[node] = Node(None, (), {}, node.value)
            copy.name, copy.slot = f"{stem}_{i + 1}", slot
    taken = list(copies.values())
    for node in nodes:
        kwargs = {key: map_nodes(item, copies.__getitem__) for key, item in node.kwargs.items()}
        copy = copies[node] = node.copy(map_nodes(node.args, copies.__getitem__), kwargs)
        copy.name, copy.backward = "", node not in in_forward
        copy.recomputed = False
    own = [copies[node] for node in nodes]
    name_nodes(own, [node.name for node in taken])
    returned = [GraphOutput(slot, map_nodes(value, copies.__getitem__)) for slot, value in outputs]
    return Graph(taken, own, returned), {copy.name: node for node, copy in copies.items()}
