"""Views that undo each other: where nothing is fused, each view is one more call."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator

import torch
from torch import Tensor

from .._torch import OpOverload
from ..ops import Kind, op_info
from .graph import Graph, GraphOutput, Node, map_nodes, nodes_in, same_number


def without_undone_views(graph: Graph) -> Graph:
    """The same graph, where a view that lies in memory as what it was taken from is that: `t(t(x))` is `x`.

    Results of a forward stay tensors of their own, and a gradient becomes neither an input nor another result. Nodes
    whose arguments change are copies with the same names.
    """
    inputs = set(graph.inputs)  # those of a backward are what the forward has computed
    own = set(nodes_in(value for _, value in graph.forward_outputs))
    taken = {*graph.inputs, *nodes_in(graph.results)}
    now: dict[Node, Node] = {}
    nodes: list[Node] = []

    def new_of(node: Node) -> Node:
        return now.get(node, node)

    for node in graph.nodes:
        new = node
        if any(item in now for item in node.inputs()):
            kwargs = {key: map_nodes(item, new_of) for key, item in node.kwargs.items()}
            new = now[node] = node.copy(map_nodes(node.args, new_of), kwargs)
        same = next((seen for seen in _looked_at(new, inputs) if _lie_alike(seen.value, new.value)), None)
        if same is None or node in own or (node in taken and same in taken):
            nodes.append(new)
            continue
        now[node] = same
        if node in taken:
            taken.add(same)
    if not now:
        return graph
    outputs = [GraphOutput(slot, map_nodes(value, new_of)) for slot, value in graph.outputs]
    return Graph(graph.inputs, _without_dead_views(nodes, outputs), outputs, set(map(new_of, graph.overwritten)))


def _looked_at(node: Node, inputs: Container[Node]) -> Iterator[Node]:
    """What a view looks at, and what that looks at in turn, as far as it is in the graph."""
    while node not in inputs and _is_view(node):
        node = node.inputs()[0]
        yield node


def _is_view(node: Node) -> bool:
    if not isinstance(node.op, OpOverload) or not isinstance(node.value, Tensor) or not node.inputs():
        return False
    info = op_info(node.op)
    return info.kind is Kind.VIEW and "identity" not in info.traits and not node.impure


def _lie_alike(one: object, other: Tensor) -> bool:
    """Whether two views of the same memory are the same to every operator."""
    if not isinstance(one, Tensor) or {one.layout, other.layout} != {torch.strided}:
        return False
    if any(of(one) != of(other) for of in (_dtype, Tensor.is_conj, Tensor.is_neg, Tensor.dim)):
        return False
    here, there = ((*x.shape, *x.stride(), x.storage_offset()) for x in (one, other))
    return all(map(same_number, here, there))


_dtype = operator.attrgetter("dtype")


def _without_dead_views(nodes: list[Node], outputs: list[GraphOutput]) -> list[Node]:
    read = set(nodes_in(value for _, value in outputs))
    kept = []
    for node in reversed(nodes):
        if node in read or not _is_view(node):
            kept.append(node)
            read.update(node.inputs())
    return kept[::-1]
