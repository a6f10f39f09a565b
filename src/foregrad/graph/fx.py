"""Graph modules: the flat graph run as it is, and `torch.fx` for a compiler or a user who looks at it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from .._torch import LazyGraphModule
from ..abstract.lean_tensors import to_fake_tensors
from ..errors import VerificationError
from ..slots import Token
from ..stack_traces import show_stack
from .graph import Node, get_constant, nodes_in

# ---------------------------------------------------------------------------------------------------------------------
# What `torch.fx` nodes tell about their tensors in `tensor_meta`, beside the abstract value itself.
_LAST = {4: ((0, 2, 3, 1), torch.channels_last), 5: ((0, 2, 3, 4, 1), torch.channels_last_3d)}


def tensor_meta(value: Any) -> Any:
    """The metadata of a tensor, or of those in a list or tuple.

    >>> tensor_meta(torch.ones(2, 3)).stride
    (3, 1)
    """
    if isinstance(value, Tensor):
        return _metadata(value)
    return type(value)(map(tensor_meta, value)) if type(value) in (list, tuple) else None


def _metadata(tensor: Tensor) -> TensorMetadata:
    facts = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
    try:
        return _known(*facts)
    except TypeError:  # symbols cannot be looked up
        return _made(*facts)


def _made(size: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> TensorMetadata:
    return TensorMetadata(size, dtype, requires_grad, stride, _memory_format(size, stride), dtype in _QUANTIZED, {})


_known = functools.lru_cache(maxsize=4096)(_made)  # a model has few shapes, and many tensors
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _memory_format(size: Sequence[Any], stride: Sequence[Any]) -> torch.memory_format | None:
    if _is_dense(size, stride, range(len(size))):
        return torch.contiguous_format
    order, layout = _LAST.get(len(size), ((), None))
    return layout if order and _is_dense(size, stride, order) else None


def _is_dense(size: Sequence[Any], stride: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in an order; those of size one may lie anywhere."""
    expected: Any = 1
    for dim in reversed(order):
        if not _same(size[dim], 1):
            if not _same(stride[dim], expected):
                return False
            expected = expected * size[dim]
    return True


def _same(one: Any, other: Any) -> bool:
    """Whether numbers are equal as they stand: symbols are compared without a guard."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


# ---------------------------------------------------------------------------------------------------------------------
# Python code straight from the flat graph: one line for each operator, and values dropped after their last use.
#
# `torch.fx` writes code that a person can read, and Python takes long to compile it. While nobody has looked at a
# graph there is nobody to read its code.
_LITERALS = frozenset({int, bool, type(None), str})


def compile_flat(
    placeholders: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Any], constants: dict[int, str]
) -> Callable[..., Any]:
    """A function of the module that holds the constants, by these names, and of the placeholders."""
    dropped = _last_uses(nodes, outputs)
    prefix = "_"
    while any(node.name.startswith(prefix) for node in (*placeholders, *nodes)):
        prefix += "_"
    known: dict[int, str] = {}
    namespace: dict[str, Any] = {}

    def outside(value: Any) -> str:
        """The name of a function or another object that is no literal."""
        name = known.get(id(value))
        if name is None:
            name = known[id(value)] = f"{prefix}{len(known)}"
            namespace[name] = value
        return name

    def text(value: Any) -> str:
        kind = value.__class__
        if kind is Node:
            name: str = value.name
            return name
        if kind in _LITERALS:
            return repr(value)
        if kind is list:
            return f"[{','.join([text(item) for item in value])}]"
        if kind is tuple:
            return f"({''.join([text(item) + ',' for item in value])})"
        return outside(value)

    lines = [f"def forward({','.join([f'{prefix}self', *(node.name for node in placeholders)])}):"]
    for node, gone in zip(nodes, dropped, strict=True):
        if node.op is operator.getitem:
            call = f"{text(node.args[0])}[{text(node.args[1])}]"
        elif node.op is get_constant:
            call = f"{prefix}self.{constants[id(node)]}"
        else:
            given = [text(item) for item in node.args]
            given += [f"{name}={text(item)}" for name, item in node.kwargs.items()]
            call = f"{outside(node.op)}({','.join(given)})"
        lines.append(f" {node.name}={call}" + (f";{'='.join([item.name for item in gone])}=None" if gone else ""))
    lines.append(f" return {text(tuple(outputs))}")
    exec(compile("\n".join(lines), "<flat graph>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def run_flat(
    module: Any,
    placeholders: Sequence[Node],
    nodes: Sequence[Node],
    outputs: Sequence[Any],
    constants: dict[int, str],
    args: Sequence[Any],
) -> tuple[Any, ...]:
    """Run the graph without any code: for the few calls that would not repay compiling it."""
    env: dict[int, Any] = dict(zip(map(id, placeholders), args, strict=True))
    for node, gone in zip(nodes, _last_uses(nodes, outputs), strict=True):
        op = node.op
        if op is get_constant:
            result = getattr(module, constants[id(node)])
        else:
            assert op is not None
            given = [_value(env, item) for item in node.args]
            named = {name: _value(env, item) for name, item in node.kwargs.items()} if node.kwargs else {}
            result = op(*given, **named)
            del given, named
        env[id(node)] = result
        del result
        for item in gone:
            del env[id(item)]
    return tuple([_value(env, item) for item in outputs])


def _value(env: dict[int, Any], item: Any) -> Any:
    """What an argument of a node is now. (A function inside of another that calls itself would keep `env` alive.)"""
    kind = item.__class__
    if kind is Node:
        return env[id(item)]
    if kind is list or kind is tuple:
        return kind([_value(env, x) for x in item])
    return item


def _last_uses(nodes: Sequence[Node], outputs: Sequence[Any]) -> list[list[Node]]:
    """For each node, the values that nobody reads after it."""
    needed = set(map(id, nodes_in(outputs)))
    dropped = []
    for node in reversed(nodes):
        gone = [] if id(node) in needed else [node]
        for item in node.inputs():
            if id(item) not in needed:
                needed.add(id(item))
                gone.append(item)
        dropped.append(gone)
    dropped.reverse()
    return dropped


# ---------------------------------------------------------------------------------------------------------------------
# Graph modules whose `torch.fx` graph is made when somebody looks at it.
#
# A compiler that only runs the graph never asks for its nodes, and Foregrad itself reads the flat form. Once the graph
# was looked at it may have been edited, so from then on it is what counts.
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


# ---------------------------------------------------------------------------------------------------------------------
# Between the flat graph and `torch.fx`, the form that users and compilers see.
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
        meta["val"] = to_fake_tensors(node.value)
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
