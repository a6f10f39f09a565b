"""Between the flat graph and `torch.fx`, the form that users and compilers see."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import VerificationError
from ..record.lines import show_stack
from ..record.mirror import genuine
from ..slots import Token
from .ir import Node, get_constant
from .lazy import LazyModule
from .tensor_meta import tensor_meta


@dataclass(frozen=True, slots=True)
class Part:
    """A graph in flat form: what it takes, what it runs, what it returns."""

    placeholders: Sequence[Node]
    nodes: Sequence[Node]
    outputs: Sequence[Any]


def to_fx(part: Part) -> fx.GraphModule:
    """A graph module. Its graph is made when somebody looks at it, its code when it is first called."""
    return LazyModule(part, _fx_graph)


def _fx_graph(part: Part, constants: dict[int, str]) -> fx.Graph:
    graph = fx.Graph()
    written: dict[int, fx.Node] = {}

    def value(item: Any) -> Any:
        kind = item.__class__
        if kind is Node:
            return written[id(item)]
        if kind is list:
            return [value(x) for x in item]
        if kind is tuple:
            return tuple([value(x) for x in item])
        return item

    for node in part.placeholders:
        new = written[id(node)] = graph.create_node("placeholder", node.name, (), {}, node.name)
        new.meta = _meta(node)
    for node in part.nodes:
        if node.op is get_constant:
            new = graph.create_node("get_attr", constants[id(node)], (), {}, node.name)
        else:
            assert node.op is not None
            kwargs = {key: value(item) for key, item in node.kwargs.items()} if node.kwargs else {}
            args = tuple([value(item) for item in node.args])
            new = graph.create_node("call_function", node.op, args, kwargs, node.name)
        if new.name != node.name:
            raise VerificationError(f"the node {node.name} would be called {new.name} in torch.fx")
        new.meta = _meta(node)
        written[id(node)] = new
    graph.output(tuple([value(item) for item in part.outputs]))
    return graph


def _meta(node: Node) -> dict[str, Any]:
    """What a node tells about itself."""
    if node.meta is not None:
        return dict(node.meta)
    meta: dict[str, Any] = {}
    if node.slot is None or isinstance(node.value, (torch.Tensor, torch.SymInt)):
        meta["val"] = genuine(node.value)
    if node.written:
        meta["written"] = True
    if isinstance(node.slot, Token):
        meta["token"] = True
    if node.slot is None:
        meta["partitioner_tag"] = "is_backward" if node.backward else "is_forward"
        if node.impure:
            meta["impure"] = True
        if node.recomputed:
            meta["recomputed"] = True
        _tell_origin(node, meta)
    if "val" in meta:
        meta["tensor_meta"] = tensor_meta(meta["val"])
    return meta


_SAID = ("custom", "torch_fn", "source_fn_stack", "from_node")  # of what a program, or a node of a graph, says


def _tell_origin(node: Node, meta: dict[str, Any]) -> None:
    """Where a node comes from; one that was written behind the program has the line of what it is computed from."""
    source = node if node.stack else _first_with_line(node)
    if source.stack:
        meta["stack_trace"] = show_stack(source.stack)
    if source.origin is None:
        return
    number, running, modules, said = source.origin
    meta["seq_nr"] = number
    stack = None if modules is None else modules.stack()
    if said is not None:
        meta.update((field, said[field]) for field in _SAID if field in said)
        stack = said.get("nn_module_stack", stack)
    if stack is not None:
        meta["nn_module_stack"] = stack
    if node.backward:
        meta["autograd_backward"] = True
        meta["fwd_nn_module_stack"], meta["fwd_source_fn_stack"] = stack, meta.get("source_fn_stack")
        if running is None:
            meta["is_gradient_acc"] = True
        elif source is node:
            meta["autograd_node"] = number, running


_FAR = 16  # nodes that are looked at for a line


def _first_with_line(node: Node) -> Node:
    nearby = list(node.inputs())
    for other in nearby:
        if other.stack:
            return other
        if len(nearby) < _FAR:
            nearby += other.inputs()
    return node


def from_fx(module: fx.GraphModule) -> Part:
    """The flat form of a graph module."""
    read: dict[fx.Node, Node] = {}
    placeholders: list[Node] = []
    nodes: list[Node] = []
    outputs: Sequence[Any] = ()
    for node in module.graph.nodes:
        args = fx.node.map_arg(node.args, read.__getitem__)  # type: ignore[arg-type]
        if node.op == "output":
            outputs = args[0]
            break
        kwargs = fx.node.map_arg(node.kwargs, read.__getitem__)  # type: ignore[arg-type]
        target = node.target if node.op == "call_function" else None
        if node.op == "get_attr":
            target, args = get_constant, (operator.attrgetter(node.target)(module),)
        new = Node(target, _plain(args), dict(kwargs), node.meta.get("val"))
        new.name, new.meta = node.name, node.meta
        new.impure = bool(node.meta.get("impure"))
        new.recomputed = bool(node.meta.get("recomputed"))
        new.written = bool(node.meta.get("written"))
        new.backward = node.meta.get("partitioner_tag") == "is_backward"
        read[node] = new
        (placeholders if node.op == "placeholder" else nodes).append(new)
    return Part(placeholders, nodes, list(outputs))


def _plain(args: Any) -> Any:
    """Lists and tuples of a `torch.fx` node are of its own immutable kinds."""
    if isinstance(args, (list, tuple)):
        kind = list if isinstance(args, list) else tuple
        return kind(_plain(item) for item in args)
    return args
