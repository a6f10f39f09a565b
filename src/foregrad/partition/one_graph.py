"""Recomputation inside one graph: a training step, whose backward and updates stand behind its forward.

The graph is taken for a joint one, of a forward and of everything that follows from a backward. It is cut in two as any
other, and put together again: what the second part computes again is there twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graph.graph import Graph, GraphOutput, Node, get_constant, map_nodes, name_nodes
from ..graph.released import of_backward
from ..ops import aten
from ..options import Config
from ..slots import Grad, Input, Slot, Value
from .rematerialize import rematerialized


def within_budget(graph: Graph, options: Config) -> Graph:
    """The same graph, where as much is computed again as the memory budget of the options asks for.

    Args:
        graph: of a program that is not differentiated, and runs a backward. It writes to inputs by one `copy_` each, at
            its end.
        options: with the budget.
    """
    new, late = _with_sides(graph)
    results = [
        GraphOutput(Grad(Input(str(i))) if value in late else slot, map_nodes(value, lambda node: new.get(node, node)))
        for i, (slot, value) in enumerate(graph.outputs)
    ]
    # What the forward gives inputs for good is not computed again: others may be written by then.
    given = [new[node].args[1] for node in graph.nodes if _is_last_write(node) and node.args[1] not in late]
    kept = [GraphOutput(Value(node.name), node) for node in given]
    joint = Graph(graph.inputs, [*new.values()], [*results, *kept])
    forward, backward = rematerialized(joint, options, keeps_sides=True)
    return _joined(graph, forward, backward, [slot for slot, _ in results])


def _with_sides(graph: Graph) -> tuple[dict[Node, Node], set[Node]]:
    """Copies of all nodes that know on which side they are, and the nodes that follow from a backward.

    Draws and effects after a backward has begun stay behind those that it makes.
    """
    new: dict[Node, Node] = {}
    late: set[Node] = set()
    has_begun = False
    for node in graph.nodes:
        copied = new[node] = _over(node, new)
        has_begun = has_begun or of_backward(node)
        follows = of_backward(node) or (has_begun and node.impure) or not late.isdisjoint(node.inputs())
        if follows or _is_last_write(node):
            late.add(node)
        copied.backward = node in late
    return new, late


def _over(node: Node, new: Mapping[Node, Node]) -> Node:
    """A copy of a node over what stands for its arguments."""

    def mapped(item: Node) -> Node:
        return new.get(item, item)

    return node.copy(map_nodes(node.args, mapped), {name: map_nodes(v, mapped) for name, v in node.kwargs.items()})


def _joined(graph: Graph, forward: Graph, backward: Graph, slots: Sequence[Slot]) -> Graph:
    """One graph of both; writes to inputs come last, and read what the forward has made itself."""
    first = {*forward.nodes}
    again: dict[Node, Node] = {}  # what is computed a second time, and what reads it
    moved: dict[Node, Node] = {}  # the latter alone
    nodes, writes = [*forward.nodes], []
    for node in backward.nodes:
        if node in first and node.op is get_constant:
            continue
        if _is_last_write(node):
            written = moved[node] = _over(node, moved)  # which may be a result
            writes.append(written)
            continue
        copied = again[node] = _over(node, again)
        if node in first:
            copied.name = ""
        else:
            moved[node] = copied
        nodes.append(copied)
    nodes += writes
    name_nodes(nodes, [node.name for node in (*forward.inputs, *nodes) if node.name])
    results = dict([*forward.outputs, *backward.outputs])
    outputs = [
        GraphOutput(slot, map_nodes(results[known], lambda item: moved.get(item, item)))
        for (slot, _), known in zip(graph.outputs, slots, strict=True)
    ]
    return Graph(forward.inputs, nodes, outputs, graph.overwritten)


def _is_last_write(node: Node) -> bool:
    return node.op is aten.copy_.default
