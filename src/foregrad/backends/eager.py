"""The graphs as they are: one call for each operator, and nothing else between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ..errors import ConfigError
from ..graph.fx import boxed_code
from .backend import Backend, of_compiler


def backend(mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """The backend "eager"."""
    if mode is not None or options:
        raise ConfigError(
            f"{'mode' if mode is not None else 'options'} is for the backend 'inductor'; 'eager' has none."
        )
    return of_compiler("eager", run_graph)


def run_graph(graph: fx.GraphModule, examples: Any) -> Any:
    """A compiler that runs a graph operator by operator, and frees each value after its last use."""
    code = boxed_code(graph)

    def run(args: list[Any]) -> Any:
        return code(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
