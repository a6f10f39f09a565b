"""Graph modules whose `torch.fx` graph is made when somebody looks at it.

A compiler that only runs the graph never asks for its nodes, and Foregrad itself reads the flat form. Once the graph
was looked at it may have been edited, so from then on it is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import LazyGraphModule
from ..record.lines import show_stack
from ..slots import Token
from .flat_code import compile_flat, run_flat
from .ir import Node, get_constant

WORTH_COMPILING = 12  # calls: by then interpreting the graph has taken about as long as compiling its code does


class LazyModule(LazyGraphModule):
    """A graph module that is a flat graph until its `graph` is asked for.

    Its code is generated when it is first called, by torch only if the graph was looked at.
    """

    def __init__(self, part: Any, build: Callable[[Any, dict[int, str]], fx.Graph]) -> None:
        super().__init__(torch.nn.Module(), fx.Graph())
        self._foregrad_constants: dict[int, str] = {}  # names of attributes, by id of their nodes
        for node in part.nodes:
            if node.op is get_constant:
                kind = "tensor" if isinstance(node.args[0], torch.Tensor) else "object"
                name = f"_{kind}_constant{len(self._foregrad_constants)}"
                self._foregrad_constants[id(node)] = name
                setattr(self, name, node.args[0])
        self._foregrad_calls = 0
        self._foregrad_code: Callable[..., Any] | None = None
        self._foregrad_flat: tuple[Any, Callable[..., fx.Graph]] | None = (part, build)

    @property
    def _graph(self) -> fx.Graph:
        members = vars(self)
        if members.get("_foregrad_flat") is not None:
            part, build = members["_foregrad_flat"]
            graph = build(part, members["_foregrad_constants"])
            graph.owning_module = self
            self._graph = graph
        found: fx.Graph = members["_graph"]
        return found

    @_graph.setter
    def _graph(self, graph: fx.Graph) -> None:
        members = vars(self)
        members["_graph"] = graph
        for name in ("_foregrad_flat", "_foregrad_code", "_foregrad_constants"):
            members.pop(name, None)

    def __deepcopy__(self, memo: Any) -> Any:
        assert self.graph is not None  # made by being asked for
        return super().__deepcopy__(memo)

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        members = vars(self)
        flat = members.get("_foregrad_flat")
        if flat is None or kwargs:
            self.real_recompile()
            return self.forward(*args, **kwargs)  # hooks of the user's on all modules are not meant for graphs
        code = members["_foregrad_code"]
        if code is not None:
            return code(self, *args)
        part, names = flat[0], members["_foregrad_constants"]
        if self._foregrad_calls < WORTH_COMPILING:
            self._foregrad_calls += 1
            return run_flat(self, part.placeholders, part.nodes, part.outputs, names, args)
        code = members["_foregrad_code"] = compile_flat(part.placeholders, part.nodes, part.outputs, names)
        return code(self, *args)

    forward = _lazy_forward


def unread(module: fx.GraphModule) -> Any:
    """The flat form of a graph that nobody has looked at."""
    flat = vars(module).get("_foregrad_flat")
    return None if flat is None else flat[0]


def outputs_of(module: fx.GraphModule) -> Sequence[Any]:
    """What a graph returns: nodes of either form, and constants."""
    part = unread(module)
    found: Any = module.graph.output_node().args[0] if part is None else part.outputs
    return list(found)


def placeholders_of(module: fx.GraphModule) -> Sequence[Any]:
    """What a graph takes: nodes of either form."""
    part = unread(module)
    return list(module.graph.find_nodes(op="placeholder") if part is None else part.placeholders)


def value_of(node: Any) -> Any:
    """The abstract value of a node of either form, if it has one; anything else is its own value."""
    if node.__class__ is Node and node.meta is not None:
        return node.meta.get("val")
    if node.__class__ is Node:
        known = node.slot is None or isinstance(node.value, (torch.Tensor, torch.SymInt))
        return node.value if known else None
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def is_placeholder(node: Any) -> bool:
    """Whether a node of either form is an input of its graph."""
    return node.op is None if node.__class__ is Node else node.op == "placeholder"


def stack_of(node: Any) -> str:
    """The user's line for a node of either form."""
    if node.__class__ is Node and node.meta is None:
        return show_stack(node.stack) if node.stack else ""
    return str(node.meta.get("stack_trace") or "")


def is_token(placeholder: Any) -> bool:
    """Whether a placeholder of either form takes a token."""
    flat = placeholder.__class__ is Node and placeholder.meta is None
    return isinstance(placeholder.slot, Token) if flat else "token" in placeholder.meta


def operator_of(node: Any) -> Any:
    """The operator of a node of either form; a placeholder and a constant have none."""
    if node.__class__ is Node:
        return None if node.op is get_constant else node.op
    return node.target if node.op == "call_function" else None
