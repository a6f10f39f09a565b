"""Exported programs in files: those of `torch.export`, with the signature beside the program."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import pytree
from ..errors import ExportError, ExportFileError
from ..values import same_value
from .arguments import ConstantArgument
from .exported import Exported
from .program import graph_of, to_exported_program
from .signature import BackwardSignature, GraphSignature
from .specs import ExportGraphSignature, InputKind, OutputKind

_NAME = "foregrad_signature.json"
_FORMAT = 1


def save(exported: Exported, path: str | os.PathLike[str]) -> None:
    """Write an exported program, weights included, to a file; torch's own tools can load it too.

    >>> import tempfile, torch, foregrad.export
    >>> exported = foregrad.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(exported, f"{folder}/linear.pt2")
    ...     again = load(f"{folder}/linear.pt2")
    >>> bool((again(torch.ones(1, 2)) == exported(torch.ones(1, 2))).all())
    True
    """
    program = to_exported_program(exported)
    for spec in exported.specs.output_specs:
        if isinstance(spec.arg, ConstantArgument) and isinstance(spec.arg.value, str):
            raise ExportError(
                f"torch.export cannot load a program that returns text, {spec.arg.value!r}: leave it out."
            )
    stored = io.BytesIO()
    try:
        beside = {_NAME: _to_json(exported)}
        with warnings.catch_warnings():  # torch puts such tensors together from what is there of their storage
            warnings.filterwarnings("ignore", "No complete tensor found in the group")
            torch.export.save(program, stored, extra_files=beside)
    except Exception as error:
        raise ExportError(f"torch.export cannot store this program: {error}") from error
    part = f"{os.fspath(path)}.part"  # a file that is only half written never has the wanted name
    try:
        with open(part, "wb") as file:
            file.write(stored.getbuffer())
        os.replace(part, path)
    except OSError as error:
        raise ExportFileError(f"{path} cannot be written: {error}") from error


def load(path: str | os.PathLike[str], weights: Any = None) -> Exported:
    """Read an exported program; `weights` are put in the place of its own, all or none."""
    beside = {_NAME: ""}
    if not os.path.isfile(path):
        raise ExportFileError(f"{path} does not exist, or is no file.")
    try:
        with open(path, "rb") as file:
            stored = io.BytesIO(file.read())
        with warnings.catch_warnings():  # before torch 2.13; the tensors are copied
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            program = torch.export.load(stored, extra_files=beside)
    except Exception as error:
        raise ExportFileError(f"{path} does not hold an exported program that can be loaded: {error}") from error
    if not beside[_NAME]:
        raise ExportFileError(f"{path} was not written by foregrad.export.save: it has no signature.")
    try:
        exported = _from_json(beside[_NAME], program)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ExportFileError(f"the signature in {path} does not fit its program: {error}") from error
    if weights is not None:
        exported.load_state_dict(weights)
    return exported


def _to_json(exported: Exported) -> str:
    signature = exported.signature
    fields = dataclasses.asdict(dataclasses.replace(signature, in_spec=None, out_spec=None))
    return json.dumps(
        {
            "format": _FORMAT,
            "signature": fields,
            "in_spec": pytree.treespec_dumps(signature.in_spec),
            "out_spec": pytree.treespec_dumps(signature.out_spec),
            "non_persistent": sorted(exported.non_persistent),
        }
    )


def _from_json(text: str, program: Any) -> Exported:
    stored = json.loads(text)
    if stored["format"] != _FORMAT:
        raise ValueError(f"it has the format {stored['format']}, not {_FORMAT}")
    fields = stored["signature"]
    if fields["backward_signature"] is not None:
        fields["backward_signature"] = BackwardSignature(**fields["backward_signature"])
    fields["in_spec"] = pytree.treespec_loads(stored["in_spec"])
    fields["out_spec"] = pytree.treespec_loads(stored["out_spec"])
    graph = graph_of(program)
    signature = _with_names_of(GraphSignature(**fields), program.graph_signature)
    non_persistent = frozenset(stored["non_persistent"])
    state: dict[str, Tensor] = {}
    for name in (*signature.parameters, *signature.buffers):
        first = signature.ties.get(name)
        held = program.constants if name in non_persistent else program.state_dict
        if first is not None and not torch.equal(held[name], held[first]):
            raise ValueError(f"{name} and {first} are one tensor in it")
        state[name] = _own(held[name]) if first is None else state[first]
    exported = Exported(graph, signature, state, non_persistent, program.example_inputs, program.range_constraints)
    _require_agreement(exported, program.graph_signature)
    return exported


def _require_agreement(exported: Exported, theirs: Any) -> None:
    """Both signatures in the file must say the same of every place."""
    specs, signature = exported.specs, exported.signature

    def places(items: Any) -> list[tuple[str, Any, str | None]]:
        named = [s for s in items if s.kind.name != "CONSTANT_TENSOR"]
        return [(s.kind.name, getattr(s.arg, "value", s.arg.name), s.target) for s in named]

    pairs = ((specs.input_specs, theirs.input_specs), (specs.output_specs, theirs.output_specs))
    for mine, stored in pairs:
        for a, b in zip(places(mine), places(stored), strict=True):
            if not same_value(a, b):
                raise ValueError(f"{a} stands where the program has {b}")
    users = [s.arg.name for s in specs.input_specs if s.kind is InputKind.USER_INPUT]
    if [*signature.user_inputs, *signature.random_inputs] != users:
        raise ValueError(f"it names the inputs {signature.user_inputs}, not {users}")
    if not _names_results(signature, specs):
        raise ValueError(f"it names the results {signature.user_outputs}")
    state = len(signature.parameters) + len(signature.buffers)
    inputs, outputs = state + len(signature.user_inputs), len(signature.user_outputs)
    if (signature.in_spec.num_leaves, signature.out_spec.num_leaves) != (inputs, outputs):
        raise ValueError(f"its trees do not have {inputs} arguments and {outputs} results")


def _names_results(signature: GraphSignature, specs: ExportGraphSignature) -> bool:
    kinds = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    found = [s.arg for s in specs.output_specs if s.kind in kinds]
    names = [None if isinstance(arg, ConstantArgument) and not arg.name else arg.name for arg in found]
    return names == [*signature.user_outputs, *signature.random_outputs]


def _own(tensor: Tensor) -> Tensor:
    """A copy: what was loaded may lie in memory that must not be written."""
    copy = tensor.detach().clone()
    if copy.stride() != tensor.stride() and 0 not in tensor.stride():  # the graph was recorded for these strides
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor.detach())
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _with_names_of(signature: GraphSignature, theirs: Any) -> GraphSignature:
    """Updates were given nodes of their own in the stored program."""
    return dataclasses.replace(
        signature,
        buffers_to_mutate=dict(theirs.buffers_to_mutate),
        parameters_to_mutate=dict(theirs.parameters_to_mutate),
        user_inputs_to_mutate=dict(theirs.user_inputs_to_mutate),
    )
