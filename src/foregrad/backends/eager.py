"""The graphs as they are: one call for each operator, and nothing else between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..graph.fx import boxed_code


def run_graph(graph: fx.GraphModule, examples: Any) -> Callable[[list[Any]], Any]:
    """A compiler that runs a graph operator by operator, and frees each value after its last use.

    >>> import torch, foregrad
    >>> def show(graph, examples):
    ...     print(len(graph.graph.nodes), "nodes")
    ...     return foregrad.backends.run_graph(graph, examples)
    >>> foregrad.compile(torch.sin, show)(torch.zeros(2))
    3 nodes
    tensor([0., 0.])
    """
    run = boxed_code(graph)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
