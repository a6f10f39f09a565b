"""Excerpts of a graph: what computes some nodes from others, and a copy of it with names of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import OpOverload
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


# ---------------------------------------------------------------------------------------------------------------------
# Nodes that compute the same.
def computation_of(node: Node, now: Callable[[Node], Node] = lambda node: node) -> Any:
    """Equal for nodes that compute the same from the same; None where that cannot be told.

    `now` gives what stands for an input.
    """
    if not (isinstance(node.op, OpOverload) or node.op is operator.getitem):
        return None
    if isinstance(node.op, OpOverload) and node.op._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return None
    kwargs = tuple(sorted((name, _part_of_key(item, now)) for name, item in node.kwargs.items())) if node.kwargs else ()
    key = node.op, _part_of_key(node.args, now), kwargs
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _part_of_key(value: Any, now: Callable[[Node], Node]) -> Any:
    kind = value.__class__
    if kind is Node:
        return Node, id(now(value))
    if kind is list or kind is tuple:
        return kind, tuple([_part_of_key(item, now) for item in value])
    if isinstance(value, (Tensor, torch.Generator)):
        return kind, id(value)
    return kind, repr(value) if kind is float else value  # 0.0 and -0.0 are equal


def read_from_given(graph: GraphBuilder, start: int, given: Sequence[Node]) -> None:
    """Let what was written from a place on read the given nodes, where it computes what one of them holds.

    A partition may save what only a backward computes of the forward, in the place of all that leads there.
    """
    if not any(node.backward for node in given):
        return
    same: dict[Node, Node] = {}
    known: dict[Any, Node] = {}

    def first(node: Node) -> Node:
        return same.get(node, node)

    for node in graph.nodes:
        key = None if node.impure else computation_of(node, first)
        if key is not None:
            same[node] = known.setdefault(key, node)
    held = {first(node): node for node in given}
    for node in graph.nodes[start:]:
        node.args = map_nodes(node.args, lambda item: held.get(first(item), item))
        node.kwargs = {
            name: map_nodes(item, lambda item: held.get(first(item), item)) for name, item in node.kwargs.items()
        }


def read_by(nodes: Sequence[Node], outputs: Sequence[Any]) -> set[Node]:
    """Everything that an excerpt reads or returns."""
    return {item for node in nodes for item in node.inputs()} | set(nodes_in(outputs))


def inputs_needed(given: Sequence[Node], read: set[Node]) -> list[int]:
    """Which of the given nodes an excerpt takes: what it reads, and sizes, in which compilers find their symbols."""
    return [i for i, node in enumerate(given) if node in read or isinstance(node.value, SymInt)]


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
