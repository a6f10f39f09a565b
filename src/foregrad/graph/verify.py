"""Checks on graphs: what every pass must leave behind."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .._torch import OpOverload
from ..errors import NotFunctionalError, VerificationError
from ..ops import aten
from .fx import unread
from .graph import nodes_in


def assert_functional_graph(graph: fx.Graph) -> int:
    """Check that a graph has no side effects but at most one final `copy_` or `set_` into each placeholder (M-13).

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> _ = graph.output(graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("a"),)))
    >>> assert_functional_graph(graph)
    0

    Returns:
        The number of such writes.
    """
    placeholders = {node for node in graph.nodes if node.op == "placeholder"}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        target = node.args[0]
        allowed = node.target in (aten.copy_.default, aten.set_.source_Tensor) and target in placeholders
        if not allowed or target in written:
            raise NotFunctionalError(
                f"aot_autograd expected to have an entirely functional graph, but found {node.format_node()}"
            )
        written.add(target)
    return len(written)


def verify_module(module: fx.GraphModule) -> None:
    """Check a graph in the form in which it is: a flat one need not become one of `torch.fx`."""
    part = unread(module)
    if part is None:
        verify_graph(module)
    else:
        verify_part(part)


def verify_part(part: Any) -> None:
    """The same checks on the flat form."""
    seen = set(map(id, part.placeholders))
    written: set[int] = set()
    for node in part.nodes:
        for item in node.inputs():
            if id(item) not in seen:
                raise VerificationError(f"{node.name} reads {item.name} before it is made")
        if isinstance(node.op, OpOverload) and node.op._schema.is_mutable:
            target = node.args[0]
            allowed = node.op in (aten.copy_.default, aten.set_.source_Tensor) and target in part.placeholders
            if not allowed or id(target) in written:
                raise NotFunctionalError(
                    f"aot_autograd expected to have an entirely functional graph, but found {node.name} = {node.op}"
                )
            written.add(id(target))
        if node.op is operator.getitem:
            value = node.args[0].value
            if isinstance(value, (list, tuple)) and not 0 <= node.args[1] < len(value):
                raise VerificationError(f"{node.name} takes a result that {node.args[0].name} does not have")
        seen.add(id(node))
    for item in nodes_in(part.outputs):
        if id(item) not in seen:
            raise VerificationError(f"{item.name} is returned and never made")


def verify_graph(module: fx.GraphModule) -> None:
    """Check that a graph is functional, in order, and that its abstract values are there."""
    assert_functional_graph(module.graph)
    seen: set[fx.Node] = set()
    for node in module.graph.nodes:
        for item in node.all_input_nodes:
            if item not in seen:
                raise VerificationError(f"{node.format_node()} reads {item.name} before it is made")
        if node.op == "call_function" and "val" not in node.meta:
            raise VerificationError(f"{node.format_node()} has no abstract value")
        if node.op == "call_function" and node.target is operator.getitem:
            _verify_element(node)
        seen.add(node)


def _verify_element(node: fx.Node) -> None:
    source: Any = node.args[0]
    value = source.meta["val"] if isinstance(source, fx.Node) else None
    if isinstance(value, (list, tuple)) and not 0 <= node.args[1] < len(value):  # type: ignore[operator]
        raise VerificationError(f"{node.format_node()} takes a result that {source.name} does not have")
