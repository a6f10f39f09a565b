"""Foregrad: ahead-of-time autograd for PyTorch.

Takes a function or a module, records it once on abstract tensors, and gives the whole computation, forward and
backward, as functional graphs to any compiler, behind a callable that does exactly what eager PyTorch does.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._torch import garbage_collection_paused

with garbage_collection_paused():  # a collection amid the classes of torch takes as long as all that follows
    from . import backends
    from .api import (
        aot_function,
        aot_module,
        aot_module_simplified,
        capture,
        compiled_function,
        compiled_module,
        explain_partition,
    )
    from .compat import InputAliasInfo, MutationType, OutputAliasInfo, OutputType, ViewAndMutationMeta
    from .compiling import compile
    from .dynamo import backend
    from .errors import ForegradError
    from .graph.verify import assert_functional_graph
    from .logs import get_aot_compilation_context, get_aot_graph_name, get_graph_being_compiled, set_model_name
    from .options import AOTConfig, config
    from .partition import default_partition, min_cut_rematerialization_partition
    from .runtime.compilers import make_boxed_compiler, make_boxed_func

if TYPE_CHECKING:
    from .export import aot_export_joint_simple, aot_export_module
    from .export.api import _aot_export_function as _aot_export_function
    from .testing import check
    from .training import train_step

__version__ = "0.1.0"

__all__ = [
    "AOTConfig",
    "ForegradError",
    "InputAliasInfo",
    "MutationType",
    "OutputAliasInfo",
    "OutputType",
    "ViewAndMutationMeta",
    "aot_export_joint_simple",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "assert_functional_graph",
    "backend",
    "backends",
    "capture",
    "check",
    "compile",
    "compiled_function",
    "compiled_module",
    "config",
    "default_partition",
    "explain_partition",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "set_model_name",
    "train_step",
]

_ON_DEMAND = {
    "_aot_export_function": ".export.api",
    "aot_export_joint_simple": ".export",
    "aot_export_module": ".export",
    "check": ".testing",
    "train_step": ".training",
}
"""Where to find what a program that compiles and trains does not use: a fifth of the package, loaded when asked for."""


def __getattr__(name: str) -> Any:
    if name in ("export", "testing"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_ON_DEMAND[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
