"""Tokens at run time: the order of side effects is fixed in the graphs, so callers neither pass nor see tokens.

A graph that takes tokens is given None for each, and the tokens that it returns are dropped. In the unlifted form the
graph makes them itself, and nothing is left to hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .._torch import MAKE_TOKEN, SINK_TOKENS
from ..graph.fx import is_token, placeholders_of
from .compilers import Boxed

Install = Callable[[Boxed], None]


# ---------------------------------------------------------------------------------------------- hidden tokens
def hiding_first_tokens(install: Install, count: int) -> Install:
    """Install graphs that take and return `count` tokens before everything else."""
    return (lambda compiled: install(without_first_tokens(compiled, count))) if count else install


def without_first_tokens(compiled: Boxed, count: int) -> Boxed:
    """A graph whose first inputs and outputs are tokens, as a function without them."""
    if not count:
        return compiled

    def run(args: list[Any]) -> Any:
        args[:0] = [None] * count
        return compiled(args)[count:]

    return run


def hiding_last_tokens(install: Install, count: int) -> Install:
    """Install graphs that take and return `count` tokens behind everything else."""
    return (lambda compiled: install(without_last_tokens(compiled, count))) if count else install


def without_last_tokens(compiled: Boxed, count: int) -> Boxed:
    """A graph whose last inputs and outputs are tokens, as a function without them."""
    if not count:
        return compiled

    def run(args: list[Any]) -> Any:
        args += [None] * count
        return compiled(args)[:-count]

    return run


def count_tokens(module: fx.GraphModule) -> int:
    """How many tokens a graph takes."""
    return sum(is_token(node) for node in placeholders_of(module))


# ---------------------------------------------------------------------------------------------- unlifted form
def unlift_first_tokens(module: fx.GraphModule, count: int) -> None:
    """Let a graph make and drop the tokens that it would take and return before everything else (E-4)."""
    if count:
        results = _results(module)
        _unlift(module, _placeholders(module)[:count], results[:count], results[count:])


def unlift_last_tokens(module: fx.GraphModule, count: int) -> None:
    """The same for tokens behind everything else."""
    if count:
        results = _results(module)
        _unlift(module, _placeholders(module)[-count:], results[-count:], results[:-count])


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _results(module: fx.GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _unlift(module: fx.GraphModule, taken: Sequence[fx.Node], ends: Sequence[Any], rest: Sequence[Any]) -> None:
    graph = module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    tag = ends[0].meta.get("partitioner_tag")
    for token in taken:
        with graph.inserting_before(first):
            made = graph.call_function(MAKE_TOKEN)
        made.meta = {"val": token.meta.get("val"), "partitioner_tag": tag}
        token.replace_all_uses_with(made)
        graph.erase_node(token)
    output = graph.output_node()
    with graph.inserting_before(output):
        sink = graph.call_function(SINK_TOKENS, (list(ends),))
    sink.meta = {"val": None, "partitioner_tag": tag, "impure": True}
    output.args = (tuple(rest),)
    module.recompile()
