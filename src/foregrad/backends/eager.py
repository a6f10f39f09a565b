"""The graphs as they are: one call for each operator, and nothing else between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from ..graph.fx import boxed_code
from ..graph.undone_views import without_undone_views
from ..options import Compilers
from ..partition import default_partition
from .backend import Backend, the_same


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


def backend() -> Backend:
    """The backend "eager": a value that is computed again is one more kernel, a view that is left out one call less."""
    compilers = Compilers(run_graph, run_graph, run_graph, without_undone_views)
    return Backend("eager", functools.partial(the_same, compilers), numbers="inputs", partition=default_partition)
