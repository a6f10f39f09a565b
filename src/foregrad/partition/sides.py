"""The two sides of a joint graph: what the forward must compute, and what the backward reads of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from .._torch import expression_of, free_symbols, is_static
from ..errors import PartitionError
from ..graph.fx import Part
from ..graph.graph import Node, ancestors, get_constant, nodes_in
from .rules import saved_for_higher_orders


def cut_plainly(joint: Part, num_fwd_outputs: int) -> tuple[Part, Part]:
    """Nothing is computed twice."""
    forward_outputs, backward_outputs = split_outputs(joint, num_fwd_outputs)
    tangents = [node for node in joint.placeholders if "tangents" in node.name]
    random = [node for node in joint.placeholders if node.name.startswith(("bwd_seed", "bwd_base_offset"))]
    primals = [node for node in joint.placeholders if node not in tangents and node not in random]
    runs = ancestors([*nodes_in(forward_outputs), *_must_run(joint)])
    in_forward = _forward_set(joint, primals, tangents, runs)
    must_run = [node for node in joint.nodes if node.impure and node.backward]
    needed = ancestors([*nodes_in(backward_outputs), *must_run], stop=in_forward)
    saved = _saved_values(joint, in_forward, needed, backward_outputs)
    tensors = [node for node in saved if not is_symbolic(node)]
    sizes = saved_sizes(joint, in_forward, [node for node in saved if is_symbolic(node)], [*tensors, *tangents])
    used = runs | ancestors([*tensors, *sizes], stop=runs)
    forward_nodes = [node for node in joint.nodes if node in in_forward and node in used]
    backward_nodes = [node for node in joint.nodes if node in needed]
    return (
        complete(Part(primals, forward_nodes, [*forward_outputs, *tensors, *sizes])),
        complete(Part([*sizes, *tensors, *tangents, *if_used(random, needed)], backward_nodes, backward_outputs)),
    )


def split_outputs(joint: Part, num_fwd_outputs: int) -> tuple[list[Any], list[Any]]:
    """What the forward returns of itself, and the gradients."""
    outputs = list(joint.outputs)
    if not 0 <= num_fwd_outputs <= len(outputs):
        raise PartitionError(
            f"num_fwd_outputs says how many of the graph's {len(outputs)} outputs are the forward's; it cannot be "
            f"{num_fwd_outputs}."
        )
    return outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]


def if_used(random: list[Node], needed: set[Node]) -> list[Node]:
    """A backward takes its seed and its offset only if it draws."""
    return random if any(node in needed for node in random) else []


def is_symbolic(node: Node) -> bool:
    """Whether a node's value is a symbolic number."""
    return isinstance(node.value, (SymInt, SymFloat, SymBool))


def _must_run(joint: Part) -> list[Node]:
    """Random and effectful operators of the forward run there, dead or not: the random stream must not shift."""
    return [node for node in joint.nodes if node.impure and not node.backward]


def _forward_set(joint: Part, primals: Sequence[Node], tangents: Sequence[Node], runs: set[Node]) -> set[Node]:
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


def _reads_of_written_inputs(joint: Part) -> set[Node]:
    """What the forward computed from an input before it was overwritten: too late to compute in the backward."""
    tainted = {node for node in joint.placeholders if node.written}
    if not tainted:
        return set()
    for node in joint.nodes:
        if not node.backward and any(item in tainted for item in node.inputs()):
            tainted.add(node)
    return tainted


def _saved_values(joint: Part, in_forward: set[Node], needed: set[Node], outputs: Sequence[Any]) -> list[Node]:
    """What the backward reads of the forward, in the order in which the forward makes it."""
    read = {item for node in needed for item in node.inputs() if item in in_forward}
    read |= {item for item in nodes_in(outputs) if item in in_forward}
    read |= saved_for_higher_orders(joint, read) & in_forward
    constants = {node for node in read if node.op is get_constant}
    needed |= constants  # a constant is part of both graphs
    return [node for node in (*joint.placeholders, *joint.nodes) if node in read and node not in constants]


def saved_sizes(joint: Part, in_forward: set[Node], read: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """Sizes that the backward reads, and every symbol in the shape of one of its inputs; plain symbols first."""
    symbols: set[Any] = set()
    for node in (*inputs, *read):
        if _may_have_symbols(node.value):
            symbols |= free_symbols(node.value)
    if not symbols:
        return list(read)
    binding: dict[Any, Node] = {}
    for node in (*joint.placeholders, *joint.nodes):
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


def complete(part: Part) -> Part:
    """A part must compute all that it returns from what it takes."""
    known = {*part.placeholders, *part.nodes}
    for node in part.nodes:
        for item in node.inputs():
            if item not in known:
                raise PartitionError(f"Node {item.name} was invalid, but is output: it cannot be computed here.")
    for item in nodes_in(part.outputs):
        if item not in known:
            raise PartitionError(f"Node {item.name} was invalid, but is output: it cannot be computed here.")
    return part
