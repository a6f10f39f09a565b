"""Foregrad: ahead-of-time autograd for PyTorch.

Takes a function or a module, records it once on abstract tensors, and gives the whole computation, forward and
backward, as functional graphs to any compiler, behind a callable that does exactly what eager PyTorch does.
"""

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
from .errors import ForegradError
from .export import aot_export_joint_simple, aot_export_module
from .export.api import _aot_export_function as _aot_export_function
from .graph.verify import assert_functional_graph
from .logs import get_aot_compilation_context, get_aot_graph_name, get_graph_being_compiled, set_model_name
from .options import AOTConfig, config
from .partition import default_partition, min_cut_rematerialization_partition
from .runtime.compilers import make_boxed_compiler, make_boxed_func
from .testing import check

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
    "capture",
    "check",
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
]
