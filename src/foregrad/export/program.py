"""To and from `torch.export.ExportedProgram`, the form that other tools take."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import FakeTensor, OpOverload, pytree
from ..errors import ExportError
from ..ops import aten
from .arguments import ArgumentSpec, ConstantArgument, CustomObjArgument, SymIntArgument, TensorArgument, TokenArgument
from .exported import Exported
from .specs import ExportGraphSignature, InputKind, InputSpec


def to_exported_program(exported: Exported) -> Any:
    """A graph, a signature and a state in torch's own classes.

    Its results are those of the module. Where the graph has gradients, it returns (result, gradients by name); where it
    has offsets of random numbers, it takes seeds and offsets as keyword arguments and returns the new ones by name,
    right behind the result.
    """
    from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature

    specs = exported.specs
    module, constants = _lifted(exported, specs)
    in_spec, out_spec = call_trees(exported)
    state = {name: _as_stored(tensor) for name, tensor in exported.state_dict.items()}
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


def call_trees(exported: Exported) -> tuple[Any, Any]:
    """The trees of what the program is called with, and of what it returns."""
    signature = exported.signature
    count = len(signature.parameters) + len(signature.buffers)
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
    return pytree.tree_structure((args[count:], {**kwargs, **random})), pytree.tree_structure(returned)


def _as_stored(tensor: Tensor) -> Tensor:
    """A state holds parameters and plain buffers."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach()


def _example(exported: Exported) -> Any:
    """The example call, if the program takes nothing else and no tensor of it is fake."""
    if exported.example is None or exported.signature.random_inputs:
        return None
    args, kwargs = exported.example
    if exported.wrappers is not None:
        args, kwargs = exported.wrappers.take_apart(args, kwargs)
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return None
    return pytree.tree_map_only(Tensor, Tensor.detach, args), pytree.tree_map_only(Tensor, Tensor.detach, kwargs)


def _lifted(exported: Exported, specs: ExportGraphSignature) -> tuple[fx.GraphModule, dict[str, Any]]:
    """A copy of the graph in which constants are inputs, behind the buffers; `specs` follow."""
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
        name = f"c_{node.name}"
        new = copied[node] = graph.placeholder(name)
        new.meta = {"val": node.meta["val"]}
        constants[str(node.target)] = held.detach()
        specs.input_specs.insert(len(copied) - 1, _constant_spec(new.name, str(node.target)))
    for node in places[state_end:]:
        copied[node] = _copy(graph, node, copied)
    for node, spec in zip(graph.find_nodes(op="placeholder"), specs.input_specs, strict=True):
        _describe(node, spec)
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


def _constant_spec(name: str, target: str) -> InputSpec:
    return InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name), target)


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


def _describe(node: fx.Node, spec: InputSpec) -> None:
    """Every input of an ExportedProgram says what it holds."""
    if "val" not in node.meta:
        node.meta["val"] = spec.arg.value if isinstance(spec.arg, ConstantArgument) else None


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
