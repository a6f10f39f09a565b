"""Exported programs in files, and to and from `torch.export.ExportedProgram`."""

from __future__ import annotations

import dataclasses
import io
import json
import operator
import os
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import FakeTensor, OpOverload, pytree
from ..errors import ExportError, ExportFileError
from ..ops import aten
from ..values import same_value
from .graph import ExportedGraph
from .signature import (
    ArgumentSpec,
    BackwardSignature,
    ConstantArgument,
    CustomObjArgument,
    ExportGraphSignature,
    GraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    SymIntArgument,
    TensorArgument,
    TokenArgument,
)


# ---------------------------------------------------------------------------------------------------------------------
# To and from `torch.export.ExportedProgram`, the form that other tools take.
def to_exported_program(exported: ExportedGraph) -> Any:
    """A graph, a signature and a state in torch's own classes.

    Its results are those of the module. Where the graph has gradients, it returns (result, gradients by name); where it
    has offsets of random numbers, it takes seeds and offsets as keyword arguments and returns the new ones by name,
    right after the result.
    """
    from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature

    specs = exported.specs
    module, constants = _lifted(exported, specs)
    in_spec, out_spec = call_trees(exported)
    held = exported.state_dict.items()
    state = {name: tensor if isinstance(tensor, nn.Parameter) else tensor.detach() for name, tensor in held}
    constants |= {name: exported.state[name].detach() for name in exported.non_persistent}
    call = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=_theirs(specs),
        state_dict=state,
        range_constraints=exported.ranges,
        module_call_graph=[ModuleCallEntry(fqn="", signature=call)],
        example_inputs=_example(exported),
        constants=constants,
    )


def call_trees(exported: ExportedGraph) -> tuple[Any, Any]:
    """The trees of what the program is called with, and of what it returns."""
    signature = exported.signature
    args, kwargs = pytree.tree_unflatten([0] * signature.in_spec.num_leaves, signature.in_spec)
    random = dict.fromkeys(signature.random_inputs.values(), 0)
    result = pytree.tree_unflatten([0] * signature.out_spec.num_leaves, signature.out_spec)
    parts: list[Any] = [result]
    if signature.random_outputs:
        parts.append(dict.fromkeys(signature.random_outputs.values(), 0))
    backward = signature.backward_signature
    if backward is not None:
        names = [*backward.gradients_to_parameters.values(), *backward.gradients_to_user_inputs.values()]
        parts.append(dict.fromkeys(names, 0))
    returned = tuple(parts) if len(parts) > 1 else result
    return pytree.tree_structure((args[signature.state_count :], {**kwargs, **random})), pytree.tree_structure(returned)


def _example(exported: ExportedGraph) -> Any:
    """The example call, if the program takes nothing else and no tensor of it is fake."""
    if exported.example is None or exported.signature.random_inputs:
        return None
    args, kwargs = exported.example
    if exported.wrappers is not None:
        args, kwargs = exported.wrappers.take_apart(args, kwargs)
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return None
    return pytree.tree_map_only(Tensor, Tensor.detach, args), pytree.tree_map_only(Tensor, Tensor.detach, kwargs)


def _lifted(exported: ExportedGraph, specs: ExportGraphSignature) -> tuple[fx.GraphModule, dict[str, Any]]:
    """A copy of the graph in which constants are inputs, after the buffers; `specs` follow."""
    source = exported.graph_module
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    constants: dict[str, Any] = {}
    places = list(source.graph.find_nodes(op="placeholder"))
    state_end = sum(s.kind in (InputKind.TOKEN, InputKind.PARAMETER, InputKind.BUFFER) for s in specs.input_specs)
    for node in places[:state_end]:
        copied[node] = _copy(graph, node, copied)
    for node in source.graph.find_nodes(op="get_attr"):
        held = operator.attrgetter(str(node.target))(source)
        if not isinstance(held, Tensor):
            raise ExportError(f"{node.name} is a {type(held).__name__}, which torch.export cannot store.")
        new = copied[node] = graph.placeholder(f"c_{node.name}")
        new.meta = {"val": node.meta["val"]}
        constants[str(node.target)] = held.detach()
        spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(new.name), str(node.target))
        specs.input_specs.insert(len(copied) - 1, spec)
    for node in places[state_end:]:
        copied[node] = _copy(graph, node, copied)
    for node, spec in zip(
        graph.find_nodes(op="placeholder"), specs.input_specs, strict=True
    ):  # each says what it holds
        node.meta.setdefault("val", spec.arg.value if isinstance(spec.arg, ConstantArgument) else None)
    updates = len(specs.buffers_to_mutate) + len(specs.parameters_to_mutate) + len(specs.user_inputs_to_mutate)
    for node in source.graph.nodes:
        if node.op == "call_function":
            copied[node] = _copy(graph, node, copied)
            _complete(copied[node])
        elif node.op == "output":
            values = list(fx.node.map_arg(node.args[0], copied.__getitem__))
            first = len(specs.output_tokens)
            for i in range(first, first + updates):
                values[i] = _detached(graph, specs, i, values[i])
            graph.output(tuple(values))
    return fx.GraphModule(nn.Module(), graph), constants


def _detached(graph: fx.Graph, specs: ExportGraphSignature, place: int, node: fx.Node) -> fx.Node:
    """What is written into state has no history, whatever the grad mode in which the program runs."""
    new = graph.call_function(aten.detach.default, (node,))
    new.meta = {"val": node.meta["val"]}
    spec = specs.output_specs[place]
    specs.output_specs[place] = dataclasses.replace(spec, arg=TensorArgument(new.name))
    return new


_KEPT_META = ("val", "stack_trace", "partitioner_tag")


def _copy(graph: fx.Graph, node: fx.Node, copied: dict[fx.Node, Any]) -> fx.Node:
    new = graph.node_copy(node, copied.__getitem__)
    new.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    return new


def _complete(node: fx.Node) -> None:
    """An operator of several results, made by a pass, says what they are through those that are used only."""
    if node.meta.setdefault("val", None) is not None or not isinstance(node.target, OpOverload):
        return
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next((v.fake_mode for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, FakeTensor)), None)
    if mode is not None and node.target._schema.returns:
        with mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)


def _theirs(specs: ExportGraphSignature) -> Any:
    from torch.export import graph_signature as theirs

    def argument(arg: ArgumentSpec) -> Any:
        match arg:
            case TensorArgument(name):
                return theirs.TensorArgument(name=name)
            case TokenArgument(name):
                return theirs.TokenArgument(name=name)
            case SymIntArgument(name):
                return theirs.SymIntArgument(name=name)
            case ConstantArgument(name, value):
                return theirs.ConstantArgument(name=name, value=value)
            case CustomObjArgument(name, kind):
                raise ExportError(f"{name} is a {kind}, which torch.export cannot store. Pass tensors or numbers.")

    inputs = [
        theirs.InputSpec(theirs.InputKind[s.kind.name], argument(s.arg), s.target, s.persistent)
        for s in specs.input_specs
    ]
    outputs = [theirs.OutputSpec(theirs.OutputKind[s.kind.name], argument(s.arg), s.target) for s in specs.output_specs]
    return theirs.ExportGraphSignature(input_specs=inputs, output_specs=outputs)


def graph_of(program: Any) -> fx.GraphModule:
    """The graph of a loaded ExportedProgram in the form that Foregrad exports: constants are held, not fed."""
    specs = program.graph_signature.input_specs
    held = {s.arg.name: s.target for s in specs if s.kind.name == "CONSTANT_TENSOR"}
    graph = fx.Graph()
    root = nn.Module()
    copied: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in held:
            target = held[node.name]
            setattr(root, target, program.constants[target])
            copied[node] = graph.get_attr(target)
            copied[node].meta = {"val": node.meta.get("val")}
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    return fx.GraphModule(root, graph)


# ---------------------------------------------------------------------------------------------------------------------
# Exported programs in files: those of `torch.export`, with the signature beside the program.
_NAME = "foregrad_signature.json"
_FORMAT = 1


def save(exported: ExportedGraph, path: str | os.PathLike[str]) -> None:
    """Write an exported program, weights included, to a file; torch's own tools can load it too.

    >>> import tempfile, torch, foregrad.export
    >>> exported = foregrad.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(exported, f"{folder}/linear.pt2")
    ...     again = foregrad.export.load(f"{folder}/linear.pt2")
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


def read(path: str | os.PathLike[str]) -> ExportedGraph:
    """What a file that `save` wrote holds."""
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
        return _from_json(beside[_NAME], program)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ExportFileError(f"the signature in {path} does not fit its program: {error}") from error


def _to_json(exported: ExportedGraph) -> str:
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


def _from_json(text: str, program: Any) -> ExportedGraph:
    stored = json.loads(text)
    if stored["format"] != _FORMAT:
        raise ValueError(f"it has the format {stored['format']}, not {_FORMAT}")
    fields = stored["signature"]
    if fields["backward_signature"] is not None:
        fields["backward_signature"] = BackwardSignature(**fields["backward_signature"])
    fields["in_spec"] = pytree.treespec_loads(stored["in_spec"])
    fields["out_spec"] = pytree.treespec_loads(stored["out_spec"])
    for updates in ("buffers_to_mutate", "parameters_to_mutate", "user_inputs_to_mutate"):
        fields[updates] = dict(getattr(program.graph_signature, updates))  # which were given nodes of their own
    signature = GraphSignature(**fields)
    non_persistent = frozenset(stored["non_persistent"])
    state: dict[str, Tensor] = {}
    for name in (*signature.parameters, *signature.buffers):
        first = signature.ties.get(name)
        held = program.constants if name in non_persistent else program.state_dict
        if first is not None and not torch.equal(held[name], held[first]):
            raise ValueError(f"{name} and {first} are one tensor in it")
        state[name] = _own(held[name]) if first is None else state[first]
    example, ranges = program.example_inputs, program.range_constraints
    exported = ExportedGraph(graph_of(program), signature, state, non_persistent, example, ranges)
    _require_agreement(exported, program.graph_signature)
    return exported


def _require_agreement(exported: ExportedGraph, theirs: Any) -> None:
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
    kinds = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    results = [s.arg for s in specs.output_specs if s.kind in kinds]
    names = [None if isinstance(arg, ConstantArgument) and not arg.name else arg.name for arg in results]
    if names != [*signature.user_outputs, *signature.random_outputs]:
        raise ValueError(f"it names the results {signature.user_outputs}")
    inputs, outputs = signature.state_count + len(signature.user_inputs), len(signature.user_outputs)
    if (signature.in_spec.num_leaves, signature.out_spec.num_leaves) != (inputs, outputs):
        raise ValueError(f"its trees do not have {inputs} arguments and {outputs} results")


def _own(tensor: Tensor) -> Tensor:
    """A copy: what was loaded may lie in memory that must not be written."""
    copy = tensor.detach().clone()
    if copy.stride() != tensor.stride() and 0 not in tensor.stride():  # the graph was recorded for these strides
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor.detach())
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
