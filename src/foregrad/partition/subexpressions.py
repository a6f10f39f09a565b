"""Common subexpressions: what two nodes of one side would compute alike is computed once.

A backward that computes something of the forward again does so because a checkpoint asked for it, or because autograd
did: nothing is merged across the two sides. Results keep memory of their own, and draws and effects stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..joint.graph import Part
from ..joint.ir import Node, nodes_in
from ..ops import Kind, op_info
from .rules import mark_of, why_not_again


def without_common_subexpressions(part: Part) -> Part:
    """The same graph with fewer nodes; those that are left are copies with the same names where an argument changed."""
    kept = {id(node) for node in nodes_in(part.outputs)}
    for node in reversed(part.nodes):  # results, and what they are views of, have memory of their own
        if id(node) in kept and _is_view(node):
            kept.update(id(item) for item in node.inputs())
    replaced: dict[int, Node] = {}
    known: dict[Any, Node] = {}
    nodes: list[Node] = []

    def value(item: Any) -> Any:
        kind = item.__class__
        if kind is Node:
            return replaced.get(id(item), item)
        if kind is list or kind is tuple:
            return kind([value(x) for x in item])
        return item

    for node in part.nodes:
        new = node
        if any(id(item) in replaced for item in node.inputs()):
            new = _copy(node, value(node.args), {key: value(item) for key, item in node.kwargs.items()})
            replaced[id(node)] = new
        key = None if id(node) in kept else _key(new)
        if key is not None:
            first = known.setdefault(key, new)
            if first is not new:
                replaced[id(node)] = first
                continue
        nodes.append(new)
    if not replaced:
        return part
    return Part(part.placeholders, nodes, [value(item) for item in part.outputs])


def _is_view(node: Node) -> bool:
    if node.op is operator.getitem:
        return True
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def _copy(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    new = Node(node.op, args, kwargs, node.value)
    for name in ("slot", "name", "meta", "backward", "impure", "recomputed", "written", "stack", "origin"):
        setattr(new, name, getattr(node, name))
    return new


def _key(node: Node) -> Any:
    """Equal for nodes that compute the same; None for one that stays as it is."""
    if not (isinstance(node.op, OpOverload) or node.op is operator.getitem) or why_not_again(node) is not None:
        return None
    if isinstance(node.op, OpOverload) and node.op._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return None
    kwargs = tuple(sorted((name, _part_of_key(item)) for name, item in node.kwargs.items())) if node.kwargs else ()
    try:
        key = node.op, node.backward, node.recomputed, mark_of(node), _part_of_key(node.args), kwargs
        hash(key)
    except TypeError:
        return None
    return key


def _part_of_key(value: Any) -> Any:
    kind = value.__class__
    if kind is Node:
        return Node, id(value)
    if kind is list or kind is tuple:
        return kind, tuple([_part_of_key(item) for item in value])
    if isinstance(value, (Tensor, torch.Generator)):
        return kind, id(value)
    return kind, repr(value) if kind is float else value  # 0.0 and -0.0 are equal
