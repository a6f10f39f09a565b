"""Excerpts of the flat graph: what computes some nodes from others, and a copy of it with names of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedError
from .fx import Part
from .graph import FlatGraph, Node, name_nodes, nodes_in


def impure_since(graph: FlatGraph, start: int) -> list[Node]:
    """What was written into the graph from a place on and runs whether anybody reads it or not."""
    return [node for node in graph.nodes[start:] if node.impure]


def between(graph: FlatGraph, given: Sequence[Node], wanted: Sequence[Node]) -> list[Node]:
    """What computes the wanted nodes from the given ones, each behind what it reads."""
    nodes = _needed(given, wanted)
    if any(node.impure for node in nodes):  # in the order of the recording: draws must not change places
        place = {id(node): i for i, node in enumerate(graph.nodes)}
        nodes.sort(key=lambda node: place[id(node)])
    return nodes


def _needed(given: Sequence[Node], wanted: Sequence[Node]) -> list[Node]:
    done = {id(node) for node in given}
    order: list[Node] = []
    pending: list[tuple[Node, bool]] = [(node, False) for node in reversed(wanted)]
    while pending:
        node, ready = pending.pop()
        if id(node) in done and not ready:
            continue
        if ready:
            if id(node) not in done:
                done.add(id(node))
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


def read_by(nodes: Sequence[Node], outputs: Sequence[Any]) -> set[int]:
    """Ids of everything that an excerpt reads or returns."""
    return {id(item) for node in nodes for item in node.inputs()} | {id(node) for node in nodes_in(outputs)}


def copied_part(
    placeholders: Sequence[Node],
    tangents: Sequence[Node],
    nodes: Sequence[Node],
    outputs: Sequence[Node | None],
    in_forward: set[int],
) -> tuple[Part, dict[str, Node]]:
    """A copy with names as those of any joint graph, so that it is partitioned like one, and the originals by name.

    `in_forward` are the ids of nodes that belong to its forward.
    """
    copies: dict[int, Node] = {}

    def copied(value: Any) -> Any:
        kind = value.__class__
        if kind is Node:
            return copies[id(value)]
        return kind([copied(item) for item in value]) if kind is list or kind is tuple else value

    for stem, inputs in (("primals", placeholders), ("tangents", tangents)):
        for i, node in enumerate(inputs):
            copy = copies[id(node)] = Node(None, (), {}, node.value)
            copy.name, copy.slot = f"{stem}_{i + 1}", node.slot
    taken = list(copies.values())
    for node in nodes:
        kwargs = {key: copied(item) for key, item in node.kwargs.items()}
        copy = copies[id(node)] = Node(node.op, copied(node.args), kwargs, node.value)
        copy.backward, copy.impure = id(node) not in in_forward, node.impure
        copy.stack, copy.origin = node.stack, node.origin
    own = [copies[id(node)] for node in nodes]
    name_nodes(own, [node.name for node in taken])
    originals = {copies[id(node)].name: node for node in (*placeholders, *tangents, *nodes)}
    return Part(taken, own, [None if node is None else copies[id(node)] for node in outputs]), originals
