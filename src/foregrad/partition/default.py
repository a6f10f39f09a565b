"""The predictable baseline: the forward holds what its outputs need, and what the backward uses of it is saved."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch  # noqa: F401 (the doctest uses it)
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from .._torch import LazyGraphModule, expression_of, free_symbols
from ..errors import PartitionError

_SYMBOLIC = (SymInt, SymFloat, SymBool)


def default_partition(
    joint_module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph so that nothing is computed twice.

    >>> import foregrad
    >>> joint = foregrad.capture(lambda x: x.sin(), torch.ones(2, requires_grad=True))
    >>> forward, backward = default_partition(joint.joint_graph, joint.example_inputs, num_fwd_outputs=1)
    >>> [node.name for node in backward.graph.nodes]
    ['primals_1', 'tangents_1', 'cos', 'mul', 'output']

    Args:
        joint_module: a graph of forward and backward; placeholders whose name contains `tangents` are tangents.
        joint_inputs: example values, as (primals, tangents).
        num_fwd_outputs: how many of the flat outputs belong to the forward.
    """
    nodes = list(joint_module.graph.nodes)
    outputs = list(nodes[-1].args[0])
    forward_outputs, backward_outputs = outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]
    primals, tangents = _split_placeholders(nodes)
    in_forward = _forward_set(nodes, primals, forward_outputs)
    needed = _ancestors(_nodes_in(backward_outputs), stop=in_forward)
    saved = _saved_values(nodes, in_forward, needed, backward_outputs)
    tensors = [node for node in saved if not _is_symbolic(node)]
    sizes = _saved_sizes(nodes, in_forward, [node for node in saved if _is_symbolic(node)], [*tensors, *tangents])
    used = _ancestors([*_nodes_in(forward_outputs), *tensors, *sizes, *_must_run(nodes)], stop=set())
    forward = extract(
        joint_module, primals, [n for n in nodes if n in in_forward and n in used], [*forward_outputs, *tensors, *sizes]
    )
    backward = extract(joint_module, [*sizes, *tensors, *tangents], [n for n in nodes if n in needed], backward_outputs)
    return forward, backward


def _split_placeholders(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    placeholders = [node for node in nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if "tangents" in node.name]
    return [node for node in placeholders if "tangents" not in node.name], tangents


def _nodes_in(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _SYMBOLIC)


def _must_run(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Random and effectful operators of the forward run there, dead or not: the random stream must not shift."""
    return [n for n in nodes if n.meta.get("impure") and n.meta.get("partitioner_tag") != "is_backward"]


def _ancestors(wanted: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """What the wanted nodes are computed from, themselves included, up to the nodes to stop at."""
    found: set[fx.Node] = set()
    pending = [node for node in wanted if node not in stop]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(item for item in node.all_input_nodes if item not in stop)
    return found


def _forward_set(nodes: Sequence[fx.Node], primals: Sequence[fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
    """Everything that the forward can be asked for: its outputs' operators, their single results, and sizes."""
    found = _ancestors([*_nodes_in(outputs), *_must_run(nodes)], stop=set()) | set(primals)
    if any(node.op == "placeholder" and "tangents" in node.name for node in found):
        raise PartitionError("An output of the forward was invalid, but is output: it is computed from a tangent.")
    for node in nodes:
        if node.op == "call_function" and node not in found:
            result_of_forward = node.target is operator.getitem and node.args[0] in found
            size = _is_symbolic(node) and all(item in found for item in node.all_input_nodes)
            if result_of_forward or size:
                found.add(node)
    return found


def _saved_values(
    nodes: Sequence[fx.Node], in_forward: set[fx.Node], needed: set[fx.Node], outputs: Sequence[Any]
) -> list[fx.Node]:
    """What the backward reads of the forward, in the order in which the forward makes it."""
    read = {item for node in needed for item in node.all_input_nodes if item in in_forward}
    read |= {item for item in _nodes_in(outputs) if item in in_forward}
    constants = {node for node in read if node.op == "get_attr"}
    needed |= constants  # a constant is part of both graphs
    return [node for node in nodes if node in read and node not in constants]


def _saved_sizes(
    nodes: Sequence[fx.Node], in_forward: set[fx.Node], read: Sequence[fx.Node], inputs: Sequence[fx.Node]
) -> list[fx.Node]:
    """Sizes that the backward reads, and every symbol in the shape of one of its inputs; plain symbols first."""
    symbols: set[Any] = set()
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            symbols |= free_symbols(value)
    for node in read:
        symbols |= free_symbols(node.meta["val"])
    binding: dict[Any, fx.Node] = {}
    for node in nodes:
        if node in in_forward and isinstance(node.meta.get("val"), SymInt):
            expression = expression_of(node.meta["val"])
            if expression in symbols:
                binding.setdefault(expression, node)
    first = [node for node in nodes if node in set(binding.values())]
    return first + [node for node in read if node not in first]


def extract(
    module: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    """A graph of its own with these nodes; names and metadata are kept."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.create_node("placeholder", node.name, (), {}, name=node.name)
        new[node].meta = dict(node.meta)
    for node in nodes:
        if node.op != "placeholder":
            _copy_node(graph, node, new)
    result = fx.node.map_arg(tuple(outputs), lambda n: _available(n, new))
    graph.output(result)
    return LazyGraphModule(module, graph)


def _copy_node(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
    args = fx.node.map_arg(node.args, lambda n: _available(n, new))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: _available(n, new))
    new[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
    new[node].meta = dict(node.meta)


def _available(node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in new:
        raise PartitionError(f"Node {node.name} was invalid, but is output: it cannot be computed from the given inputs.")
    return new[node]
