"""Tokens at run time: the order of side effects is fixed in the graphs, so callers neither pass nor see tokens.

A graph that takes tokens is given None for each, and the tokens that it returns are dropped. In the unlifted form the
graph makes them itself, and nothing is left to hide.
"""

from __future__ import annotations

from typing import Any

from .._torch import MAKE_TOKEN, SINK_TOKENS
from ..graph.graph import Graph, GraphOutput, Node, map_nodes, name_nodes
from ..slots import Token, belongs_to_backward
from .compilers import Boxed, CompilerInput, for_compiler


# ---------------------------------------------------------------------------------------------- hidden tokens
def without_first_tokens(compiled: Boxed, count: int) -> Boxed:
    """A graph whose first inputs and outputs are tokens, as a function without them."""

    def run(args: list[Any]) -> Any:
        args[:0] = [None] * count
        return compiled(args)[count:]

    return run if count else compiled


def without_last_tokens(compiled: Boxed, count: int) -> Boxed:
    """A graph whose last inputs and outputs are tokens, as a function without them."""

    def run(args: list[Any]) -> Any:
        args += [None] * count
        return compiled(args)[:-count]

    return run if count else compiled


def count_tokens(graph: Graph) -> int:
    """How many tokens a graph takes."""
    return len(graph.inputs_of(Token))


# ---------------------------------------------------------------------------------------------- unlifted form
def unlift_tokens(given: CompilerInput) -> CompilerInput:
    """A graph that makes and drops the tokens that it would take and return (E-4)."""
    graph = given.graph
    taken = graph.inputs_of(Token)
    if not taken:
        return given
    sink = Node(SINK_TOKENS, ([value for _, value in graph.outputs_of(Token)],), {}, None)
    sink.impure = True
    copies: dict[Node, Node] = {node: node for node in graph.inputs}
    copies |= {token: Node(MAKE_TOKEN, (), {}, token.value) for token in taken}
    made = [copies[token] for token in taken]
    for node in (*made, sink):
        node.backward = belongs_to_backward(taken[0].slot)
    for node in (*graph.nodes, sink):
        kwargs = {key: map_nodes(item, copies.__getitem__) for key, item in node.kwargs.items()}
        copies[node] = node.copy(map_nodes(node.args, copies.__getitem__), kwargs)
    nodes = [*made, *(copies[node] for node in (*graph.nodes, sink))]
    inputs = [node for node in graph.inputs if node not in taken]
    name_nodes(nodes, [node.name for node in (*inputs, *nodes)])
    rest = [output for output in graph.outputs if not isinstance(output.slot, Token)]
    outputs = [GraphOutput(slot, map_nodes(value, copies.__getitem__)) for slot, value in rest]
    return for_compiler(Graph(inputs, nodes, outputs))
