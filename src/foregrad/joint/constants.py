"""Tensors that the program makes from Python values: part of the graph, and fresh at each call for whoever sees them.

A constant that nobody outside can see is used as it is. One whose memory a result shows is copied where it is first
met, so that everything else in the graph reads the very copy that the caller gets: autograd then notices a write to it
as it does in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._torch import OpOverload
from ..functionalize.walk import Functionalizer
from ..ops import Kind, aten, op_info
from ..record.engine import has_gaps
from .ir import Node, get_constant, nodes_in


def copy_seen_constants(walk: Functionalizer, results: Sequence[Any]) -> None:
    """Turn each constant whose memory is seen through `results` into a copy of itself, for all who read it."""
    seen = {id(root): root for node in nodes_in(results) if (root := _memory_of(node)) is not None}
    if not seen:
        return
    graph = walk.graph
    before, graph.nodes = graph.nodes, []
    for node in before:
        if id(node) in seen:
            graph.stack, graph.backward, graph.origin = node.stack, node.backward, node.origin
            node.become(_copy(walk, graph.constant(node.args[0], node.value)))
            graph.nodes.pop()  # the copy: the node stands in its place
        graph.nodes.append(node)
    graph.stack, graph.backward, graph.origin = (), False, None


def with_own_constants(walk: Functionalizer, results: Sequence[Any]) -> list[Any]:
    """The same results over copies of the constants that they show; graphs that were made before stay as they are."""
    renewed: dict[int, Node] = {}

    def again(node: Node) -> Node:
        if id(node) not in renewed:
            if node.op is get_constant:
                renewed[id(node)] = _copy(walk, node)
            else:
                assert node.op is not None
                args = (again(node.args[0]), *node.args[1:])
                renewed[id(node)] = walk.graph.call(node.op, args, node.kwargs, node.value)
        return renewed[id(node)]

    return [again(r) if isinstance(r, Node) and _memory_of(r) is not None else r for r in results]


def _memory_of(node: Node) -> Node | None:
    """The constant whose memory a node shows."""
    while _looks_at_its_argument(node):
        node = node.args[0]
    return node if node.op is get_constant and isinstance(node.args[0], Tensor) else None


def _looks_at_its_argument(node: Node) -> bool:
    if node.op is operator.getitem:
        return _looks_at_its_argument(node.args[0])
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def _copy(walk: Functionalizer, constant: Node) -> Node:
    held = constant.value
    alike = walk.engine.strided(held, held.stride(), held.device)
    if has_gaps(held):
        return walk.with_layout(constant, alike)
    return walk.graph.call(aten.lift_fresh_copy.default, (constant,), {}, alike)
