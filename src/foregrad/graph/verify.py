"""Checks on graphs: what holds after every pass."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx

from .._torch import OpOverload
from ..errors import NotFunctionalError, VerificationError
from ..ops import aten
from .graph import Graph, get_constant, nodes_in


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
    return _count_writes([(node.format_node(), node.target, node.args) for node in graph.nodes], placeholders)


def _count_writes(calls: Iterable[tuple[Any, Any, Sequence[Any]]], inputs: Collection[Any]) -> int:
    """How many calls, each with its text and its arguments, write to an input; any other write is refused."""
    written: set[Any] = set()
    for text, op, args in calls:
        if isinstance(op, OpOverload) and op._schema.is_mutable:
            allowed = op in (aten.copy_.default, aten.set_.source_Tensor) and args[0] in inputs
            if not allowed or args[0] in written:
                raise NotFunctionalError(
                    f"aot_autograd expected to have an entirely functional graph, but found {text}"
                )
            written.add(args[0])
    return len(written)


def verify(graph: Graph) -> None:
    """Check that a graph is functional, in order, and that its abstract values are there."""
    _count_writes([(f"{node.name} = {node.op}", node.op, node.args) for node in graph.nodes], set(graph.inputs))
    seen = set(graph.inputs)
    for node in graph.nodes:
        for item in node.inputs():
            if item not in seen:
                raise VerificationError(f"{node.name} reads {item.name} before it is made")
        if node.meta is not None and node.op is not get_constant and "val" not in node.meta:
            raise VerificationError(f"{node.name} = {node.op} has no abstract value")
        if node.op is operator.getitem:
            value = node.args[0].value
            if isinstance(value, (list, tuple)) and not 0 <= node.args[1] < len(value):
                raise VerificationError(f"{node.name} takes a result that {node.args[0].name} does not have")
        seen.add(node)
    for item in nodes_in(graph.results):
        if item not in seen:
            raise VerificationError(f"{item.name} is returned and never made")
