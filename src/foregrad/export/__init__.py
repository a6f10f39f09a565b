"""Graphs out of programs: forward alone, or forward and backward as one, with every input and output named.

`export` gives an `Exported`, which prints as a table, runs, saves and converts itself; `aot_export_module` and
`aot_export_joint_simple` give the bare graph.
"""

from .api import aot_export_joint_simple, aot_export_module, export
from .files import save
from .program import Exported, load
from .signature import (
    BackwardSignature,
    ConstantArgument,
    CustomObjArgument,
    ExportBackwardSignature,
    ExportGraphSignature,
    GraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from .signature import TokenArgument as TokenArgument  # public, but no part of what * brings

__all__ = [
    "BackwardSignature",
    "ConstantArgument",
    "CustomObjArgument",
    "ExportBackwardSignature",
    "ExportGraphSignature",
    "Exported",
    "GraphSignature",
    "InputKind",
    "InputSpec",
    "OutputKind",
    "OutputSpec",
    "SymIntArgument",
    "TensorArgument",
    "aot_export_joint_simple",
    "aot_export_module",
    "export",
    "load",
    "save",
]
