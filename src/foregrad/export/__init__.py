"""Graphs out of programs: forward alone, or forward and backward as one, with every input and output named.

`export` gives an `Exported`, which prints as a table, runs, saves and converts itself; `aot_export_module` and
`aot_export_joint_simple` give the bare graph.
"""

from .api import aot_export_module, export
from .arguments import ConstantArgument, CustomObjArgument, SymIntArgument, TensorArgument
from .arguments import TokenArgument as TokenArgument  # public, but no part of what * brings
from .exported import Exported
from .files import load, save
from .joint_simple import aot_export_joint_simple
from .signature import BackwardSignature, GraphSignature
from .specs import (
    ExportBackwardSignature,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
)

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
