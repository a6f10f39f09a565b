"""The two sides of a joint graph: what the forward must compute, and what the backward reads of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from .._torch import expression_of, free_symbols, is_static
from ..errors import PartitionError
from ..graph.fx import saved_slot
from ..graph.graph import Graph, GraphOutput, Node, ancestors, get_constant, nodes_in
from ..ops import SAVED_FOR_HIGHER_ORDERS
from ..slots import RandomState, belongs_to_backward


def cut_plainly(joint: Graph) -> tuple[Graph, Graph]:
    """Nothing is computed twice."""
    own, gradients = joint.forward_outputs, joint.backward_outputs
    primals, tangents, random = split_inputs(joint)
    # Random and effectful operators run where they were recorded, dead or not: the random stream must not shift.
    impure = [node for node in joint.nodes if node.impure]
    runs = ancestors([*nodes_in(value for _, value in own), *(node for node in impure if not node.backward)])
    in_forward = _forward_set(joint, primals, tangents, runs)
    wanted = nodes_in(value for _, value in gradients)
    needed = ancestors([*wanted, *(node for node in impure if node.backward)], stop=in_forward)
    saved = _saved_values(joint, in_forward, needed, wanted)
    numbers = [node for node in saved if is_symbolic(node)]
    tensors = [node for node in saved if not is_symbolic(node)] if numbers else saved
    sizes = saved_sizes(joint, in_forward, numbers, [*tensors, *tangents])
    used = runs | ancestors([*tensors, *sizes], stop=runs)
    forward_nodes = [node for node in joint.nodes if node in in_forward and node in used]
    backward_nodes = [node for node in joint.nodes if node in needed]
    return (
        complete(Graph(primals, forward_nodes, [*own, *saved_outputs([*tensors, *sizes])])),
        complete(Graph([*sizes, *tensors, *tangents, *if_used(random, needed)], backward_nodes, gradients)),
    )


def split_inputs(joint: Graph) -> tuple[list[Node], list[Node], list[Node]]:
    """What the forward takes; tangents and tokens of the backward; the backward's seed and offset."""
    primals = [node for node in joint.inputs if not belongs_to_backward(node.slot)]
    late = [node for node in joint.inputs if belongs_to_backward(node.slot)]
    random = [node for node in late if isinstance(node.slot, RandomState)]
    return primals, [node for node in late if node not in random], random


def saved_outputs(nodes: Iterable[Node]) -> list[GraphOutput]:
    """What the forward returns for the backward."""
    return [GraphOutput(saved_slot(node), node) for node in nodes]


def if_used(random: list[Node], needed: set[Node]) -> list[Node]:
    """A backward takes its seed and its offset only if it draws."""
    return random if any(node in needed for node in random) else []


def is_symbolic(node: Node) -> bool:
    """Whether a node's value is a symbolic number."""
    return isinstance(node.value, (SymInt, SymFloat, SymBool))


def _forward_set(joint: Graph, primals: Sequence[Node], tangents: Sequence[Node], runs: set[Node]) -> set[Node]:
    """Everything that the forward can be asked for: what it runs, single results of that, and sizes."""
    found = runs | set(primals)
    for tangent in tangents:
        if tangent in found:
            raise PartitionError(
                f"An output of the forward was invalid, but is output: it is computed from {tangent.name}."
            )
    found |= _reads_of_written_inputs(joint)
    for node in joint.nodes:
        if node not in found:
            result_of_forward = node.op is operator.getitem and node.args[0] in found
            if result_of_forward or (is_symbolic(node) and all(item in found for item in node.inputs())):
                found.add(node)
    return found


def _reads_of_written_inputs(joint: Graph) -> set[Node]:
    """What the forward computed from an input before it was overwritten: too late to compute in the backward."""
    tainted = {node for node in joint.inputs if node in joint.overwritten}
    if not tainted:
        return set()
    for node in joint.nodes:
        if not node.backward and any(item in tainted for item in node.inputs()):
            tainted.add(node)
    return tainted


def _saved_values(joint: Graph, in_forward: set[Node], needed: set[Node], wanted: Sequence[Node]) -> list[Node]:
    """What the backward reads of the forward, in the order in which the forward makes it."""
    read = {item for node in needed for item in node.inputs() if item in in_forward}
    read |= {item for item in wanted if item in in_forward}
    read |= saved_for_higher_orders(joint, read) & in_forward
    constants = {node for node in read if node.op is get_constant}
    needed |= constants  # a constant is part of both graphs
    return [node for node in (*joint.inputs, *joint.nodes) if node in read and node not in constants]


def saved_for_higher_orders(joint: Graph, read: set[Node]) -> set[Node]:
    """What a backward of the backward may read beside, of operators of which the backward reads something."""
    elements: dict[Node, list[Node]] = {node: [] for node in joint.nodes if node.op in SAVED_FOR_HIGHER_ORDERS}
    if not elements:
        return set()
    for node in joint.nodes:
        if node.op is operator.getitem and node.args[0] in elements:
            elements[node.args[0]].append(node)
    found: set[Node] = set()
    for node, items in elements.items():
        if any(item in read for item in items):
            arguments, results = SAVED_FOR_HIGHER_ORDERS[node.op]
            found.update(item for item in items if item.args[1] in results)
            found.update(node.args[i] for i in arguments)
    return found


def saved_sizes(joint: Graph, in_forward: set[Node], read: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """Sizes that the backward reads, and every symbol in the shape of one of its inputs; plain symbols first."""
    symbols: set[Any] = set()
    for node in (*inputs, *read):
        if _may_have_symbols(node.value):
            symbols |= free_symbols(node.value)
    if not symbols:
        return list(read)
    binding: dict[Any, Node] = {}
    for node in (*joint.inputs, *joint.nodes):
        if node in in_forward and isinstance(node.value, SymInt) and expression_of(node.value) in symbols:
            binding.setdefault(expression_of(node.value), node)
    first = list(binding.values())
    return first + [node for node in read if node not in first]


def _may_have_symbols(value: Any) -> bool:
    if is_static(value):
        return False
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return any(type(n) is not int for n in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, (Tensor, SymInt))


def complete(graph: Graph) -> Graph:
    """A graph must compute all that it returns from what it takes."""
    read = set(nodes_in(graph.results)).union(*(node.inputs() for node in graph.nodes))
    for item in read.difference(graph.inputs, graph.nodes):
        raise PartitionError(f"Node {item.name} was invalid, but is output: it cannot be computed here.")
    return graph
