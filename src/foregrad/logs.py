"""Names of graphs, and showing graphs to those who asked for them with TORCH_LOGS."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal

from torch import fx

from ._torch import artifact_logger, structured_trace_wanted, trace_structured

Phase = Literal["joint", "forward", "backward", "inference"]

_recompiles_log = artifact_logger("recompiles")
_joint_log = artifact_logger("aot_joint_graph")
_graphs_log = artifact_logger("aot_graphs")
_model_name = "model"
_compiled_graphs = itertools.count()
_number = 0
_compiling: ContextVar[tuple[str, ...]] = ContextVar("graphs being compiled", default=())


def set_model_name(name: str) -> None:
    """Set the first part of all graph names.

    >>> set_model_name("gpt"); set_model_name("model")
    """
    global _model_name
    _model_name = name


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """The graphs that are being compiled now, the model's name, and the number of graphs compiled before.

    >>> get_aot_compilation_context()[:2]
    ([], 'model')
    """
    return list(_compiling.get()), _model_name, _number


def get_aot_graph_name() -> str:
    """The name of the graph that is being compiled: `<model>__<aot_id>_<phase>_<n>`."""
    return f"{_model_name}__{'_'.join(_compiling.get())}_{_number}"


get_graph_being_compiled = get_aot_graph_name


@contextlib.contextmanager
def compiling(aot_id: int, phase: Phase) -> Iterator[None]:
    """Name the graph that is compiled in this block."""
    global _number
    token = _compiling.set((f"{aot_id}_{phase}",))
    try:
        yield
    finally:
        _compiling.reset(token)
        _number = next(_compiled_graphs) + 1


def show_graph(module: Callable[[], fx.GraphModule], phase: Phase, aot_id: int) -> None:
    """Print a graph for TORCH_LOGS=aot_joint_graph or aot_graphs, and into a structured trace."""
    log = _joint_log if phase == "joint" else _graphs_log
    title = f"{phase.capitalize()} graph {aot_id}" if phase != "inference" else f"Forward graph {aot_id} (inference)"
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", f"TRACED GRAPH\n ===== {title} =====\n{_readable(module())}")
    if structured_trace_wanted():
        trace_structured(f"aot_{phase}_graph", payload_fn=lambda: _readable(module()))


def show_recompile(name: str, why: str) -> None:
    """Say why something is compiled again, for TORCH_LOGS=recompiles."""
    if _recompiles_log.isEnabledFor(logging.DEBUG):
        _recompiles_log.debug("%s", f"Recompiling {name}\n  {why}")


def _readable(module: fx.GraphModule) -> str:
    return module.print_readable(print_output=False)
