"""Updates that follow their gradients: a training step that lets each gradient go before the next ones come.

An optimizer steps when all gradients are there, and autograd holds all of them until then. In a graph each update can
run as soon as its gradient is known and nothing reads the old parameter any more. What lists of tensors are updated by
one operator (`_fused_adamw`, `_foreach_add`) is taken apart where that makes a difference: these operators work tensor
by tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from .._torch import OpOverload
from ..ops import Kind, aten, op_info
from .graph import Graph, Node, ancestors, map_nodes, name_nodes, nodes_in

_START = -1  # before all nodes


def with_gradients_released(graph: Graph) -> Graph:
    """The same graph with each update as early as it can be.

    Args:
        graph: of a program that is not differentiated. It writes to inputs by one `copy_` each, at its end.
    """
    return _Reordering(graph).run()


class _Reordering:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        fixed = [node for node in graph.nodes if of_backward(node) or (node.impure and not _is_last_write(node))]
        self._stays = ancestors([*nodes_in(graph.results), *fixed])
        self._written = {node.args[0] for node in graph.nodes if _is_last_write(node)}
        self._root: dict[Node, Node] = {}  # what a view looks at
        self._last_read: dict[Node, int] = {}  # of what is written, by the nodes that stay
        self._place: dict[Node, int] = dict.fromkeys(graph.inputs, _START)  # after which of those a node can run
        self._parts: dict[Node, Node] = {}  # what stands for nodes that were taken apart, or read such
        self._singles: dict[Node, list[Node]] = {}  # one operator for each tensor, in the place of one for all
        self._lists: dict[Node, tuple[list[Node], int]] = {}  # which of their results, where they have several
        self._nodes: list[tuple[int, Node]] = []

    def run(self) -> Graph:
        for place, node in enumerate(self._graph.nodes):
            if _looks_at_argument(node):
                self._root[node] = self._root_of(node.args[0])
            if node in self._stays:
                self._last_read.update((self._root_of(item), place) for item in node.inputs())
        for place, node in enumerate(self._graph.nodes):
            if node in self._stays:
                self._put(place, node)
            elif node.op is operator.getitem and (node.args[0] in self._singles or node.args[0] in self._lists):
                self._take_result(node)
            elif _is_last_write(node):
                self._put(len(self._graph.nodes), self._over_parts(node))
            elif not self._take_apart(node):
                self._put(self._earliest(node.inputs()), self._over_parts(node))
        self._nodes.sort(key=operator.itemgetter(0))  # those of one place stay in order
        nodes = [node for _, node in self._nodes]
        name_nodes(nodes, [node.name for node in (*self._graph.inputs, *nodes) if node.name])
        return Graph(self._graph.inputs, nodes, self._graph.outputs, self._graph.overwritten)

    def _put(self, place: int, node: Node) -> None:
        self._place[node] = place
        self._nodes.append((place, node))

    def _root_of(self, node: Node) -> Node:
        return self._root.get(node, node)

    def _part_of(self, node: Node) -> Node:
        return self._parts.get(node, node)

    def _earliest(self, inputs: Sequence[Node]) -> int:
        """After which place a node that reads these can run: what it may write over is read by then."""
        places = [_START]
        for item in inputs:
            places.append(self._place[self._part_of(item)])
            if self._root_of(item) in self._written:
                places.append(self._last_read.get(self._root_of(item), _START))
        return max(places)

    def _over_parts(self, node: Node) -> Node:
        """A node over what stands for its arguments."""
        if not any(item in self._parts for item in node.inputs()):
            return node
        new = self._parts[node] = self._copy(node, node.args, node.kwargs)
        return new

    def _copy(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Node:
        mapped = {name: map_nodes(value, self._part_of) for name, value in kwargs.items()}
        return node.copy(map_nodes(args, self._part_of), mapped)

    def _take_apart(self, node: Node) -> bool:
        """One operator for each tensor of the lists, if some of them can run earlier than others."""
        count = _length_of_lists(node)
        if count < 2:
            return False
        arguments = [(_sliced(node.args, i, count), _sliced(node.kwargs, i, count)) for i in range(count)]
        places = [self._earliest(nodes_in([*args, *kwargs.values()])) for args, kwargs in arguments]
        if len({*places}) == 1:
            return False
        singles = self._singles[node] = [self._copy(node, args, kwargs) for args, kwargs in arguments]
        for place, single in zip(places, singles, strict=True):
            single.name, single.value = "", None  # what it gives, its results say
            self._put(place, single)
        return True

    def _take_result(self, node: Node) -> None:
        """A result of an operator that was taken apart: a tensor, or one of several lists."""
        whole, index = node.args
        if whole in self._lists:
            singles, which = self._lists[whole]
            self._parts[node] = self._item(self._item(singles[index], which, [node.value]), 0, node.value)
        elif len(whole.op._schema.returns) == 1:
            self._parts[node] = self._item(self._singles[whole][index], 0, node.value)
        else:
            self._lists[node] = self._singles[whole], index

    def _item(self, whole: Node, index: int, value: Any) -> Node:
        node = whole.copy((whole, index), {})
        node.op, node.value, node.name = operator.getitem, value, ""
        self._put(self._place[whole], node)
        return node


def of_backward(node: Node) -> bool:
    """Whether a node of autograd's has run the operator."""
    return node.origin is not None and node.origin[1] is not None


def _is_last_write(node: Node) -> bool:
    return node.op is aten.copy_.default


def _looks_at_argument(node: Node) -> bool:
    if node.op is operator.getitem:
        return True
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def _length_of_lists(node: Node) -> int:
    """How many tensors an operator works on, one by one; 0 if it does not."""
    name = node.op._schema.name if isinstance(node.op, OpOverload) else ""
    if not name.startswith(("aten::_foreach_", "aten::_fused_")) or not isinstance(node.args[0], (list, tuple)):
        return 0
    lists = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, (list, tuple)) and value]
    count = len(node.args[0])
    return count if all(len(value) == count for value in lists) else 0


def _sliced(values: Any, index: int, count: int) -> Any:
    if isinstance(values, dict):
        return {name: _sliced((value,), index, count)[0] for name, value in values.items()}
    return tuple(
        [value[index]] if isinstance(value, (list, tuple)) and len(value) == count else value for value in values
    )
