"""Graphs as modules of `torch.fx`: run as they are, converted when they are looked at, and read back."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from .._torch import LazyGraphModule, direct_call
from ..abstract.lean_tensors import to_fake_tensors
from ..abstract.sparse import strides_of
from ..errors import PartitionError, VerificationError
from ..host_numbers import Expression
from ..ops import aten
from ..slots import Grad, Input, Output, RandomState, Saved, Size, Slot, Tangent, Token
from ..stack_traces import show_stack
from .graph import Graph, GraphOutput, Node, get_constant, map_nodes, nodes_in, same_number
from .undone_views import without_undone_views

# ---------------------------------------------------------------------------------------------------------------------
# Modules whose `torch.fx` graph is made when it is looked at.
#
# A compiler that only runs the graph never asks for its nodes, and Foregrad itself reads its own form. Once the
# `torch.fx` graph was looked at it may have been edited, so from then on it is what counts.
WORTH_COMPILING = 12  # calls: by then interpreting the graph has taken about as long as compiling its code does


class LazyModule(LazyGraphModule):
    """A graph module that has no `torch.fx` graph until its `graph` is asked for.

    Its code is generated when it is first called, by torch only if the graph was looked at.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(torch.nn.Module(), fx.Graph())
        self._foregrad_constants: dict[Node, str] = {}  # names of attributes, by their nodes
        for node in graph.nodes:
            if node.op is get_constant:
                kind = "tensor" if isinstance(node.args[0], torch.Tensor) else "object"
                name = f"_{kind}_constant{len(self._foregrad_constants)}"
                self._foregrad_constants[node] = name
                setattr(self, name, node.args[0])
        self._foregrad_calls = 0
        self._foregrad_code: Callable[..., Any] | None = None
        self._foregrad_flat: Graph | None = graph

    @property
    def _graph(self) -> fx.Graph:
        members = vars(self)
        flat = members.get("_foregrad_flat")
        if flat is not None:
            graph = _fx_graph(flat, members["_foregrad_constants"])
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
        names = members["_foregrad_constants"]
        if self._foregrad_calls < WORTH_COMPILING:
            self._foregrad_calls += 1
            return run_flat(flat, self, names, args)
        code = members["_foregrad_code"] = compile_flat(flat, names)
        return code(self, *args)

    forward = _lazy_forward


# ---------------------------------------------------------------------------------------------------------------------
# Python code straight from the graph: one line for each operator, and values dropped after their last use.
#
# `torch.fx` writes code that a person can read, and Python takes long to compile it. Before the graph is looked at, its
# code is not read either.
_LITERALS = frozenset({int, bool, type(None), str})


def boxed_code(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A function of one list, which it empties: it drops each input and each value after its last use."""
    members = vars(module)
    flat = members.get("_foregrad_flat")
    names = members.get("_foregrad_constants", {})
    if flat is None:  # it was looked at, and perhaps edited
        results = module.graph.output_node().args[0]
        flat = from_fx(module, [Output(i) for i, _ in enumerate(results)])  # type: ignore[arg-type]
        constants = [node for node in flat.nodes if node.op is get_constant]
        names = dict(zip(constants, _attributes(module), strict=True))
    code = compile_flat(without_undone_views(flat), names, boxed=True)
    return functools.partial(code, module)


def _attributes(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]


def compile_flat(graph: Graph, constants: dict[Node, str], boxed: bool = False) -> Callable[..., Any]:
    """A function of the module that holds the constants, by these names, and of the inputs; boxed, of their list."""
    prefix = "_"
    while any(node.name.startswith(prefix) for node in (*graph.inputs, *graph.nodes)):
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

    lines = _first_lines(graph, prefix, boxed)
    for node, gone in zip(graph.nodes, _last_uses(graph), strict=True):
        if node.op is operator.getitem:
            call = f"{text(node.args[0])}[{text(node.args[1])}]"
        elif node.op is get_constant:
            call = f"{prefix}self.{constants[node]}"
        else:
            given = [text(item) for item in node.args]
            given += [f"{name}={text(item)}" for name, item in node.kwargs.items()]
            call = f"{outside(_function(node))}({','.join(given)})"
        lines.append(f" {node.name}={call}" + (f";{'='.join([item.name for item in gone])}=None" if gone else ""))
    lines.append(f" return {text(tuple(graph.results))}")
    exec(compile("\n".join(lines), "<flat graph>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


# Kernels of a CPU make a tensor of a number, and give it the type of the other one, for each tensor of a list.
_BY_TENSOR = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("_foreach_add_", "_foreach_mul_", "_foreach_div_")
}


def _function(node: Node) -> Callable[..., Any]:
    """What is called for a node. A number that an operator made may be of another class when the graph runs."""
    if any(_example(item) is None for item in node.inputs()):
        return direct_call(node.op)
    if node.op in _BY_TENSOR and type(node.args[1]) in (int, float) and _are_floats_on_cpu(nodes_in(node.args[0])):
        tensors = [item.value for item in node.args[0]]
        number = torch.tensor(node.args[1], dtype=tensors[0].dtype, device="cpu")
        by_tensor = direct_call(_BY_TENSOR[node.op], (tensors, number))
        return lambda tensors, _: by_tensor(tensors, number)
    kwargs = {name: map_nodes(item, _example) for name, item in node.kwargs.items()}
    return direct_call(node.op, map_nodes(node.args, _example), kwargs)


def _are_floats_on_cpu(nodes: Sequence[Node]) -> bool:
    """Whether nodes are tensors of one type of floats that kernels calculate with as they are."""
    types = {(node.value.dtype, node.value.device.type) for node in nodes if isinstance(node.value, Tensor)}
    return types in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")})


def _example(node: Node) -> Any:
    """A value of the class that a node gives; None if that is not known."""
    return 0.5 if isinstance(node.value, Expression) else node.value if isinstance(node.value, Tensor) else None


def _first_lines(graph: Graph, prefix: str, boxed: bool) -> list[str]:
    """How the code begins: with its inputs, or with a list that it empties; inputs that nothing reads are dropped."""
    names = [node.name for node in graph.inputs]
    if not boxed:
        return [f"def forward({','.join([f'{prefix}self', *names])}):"]
    used = {*nodes_in(graph.results), *(item for node in graph.nodes for item in node.inputs())}
    unused = [node.name for node in graph.inputs if node not in used]
    taken = f" [{','.join(names)}]={prefix}args;{prefix}args.clear()"
    return [f"def forward({prefix}self,{prefix}args):", taken, *([f" {'='.join(unused)}=None"] if unused else [])]


def run_flat(graph: Graph, module: Any, constants: dict[Node, str], args: Sequence[Any]) -> tuple[Any, ...]:
    """Run the graph without any code: for the few calls that would not repay compiling it."""
    env: dict[Node, Any] = dict(zip(graph.inputs, args, strict=True))
    for node, gone in zip(graph.nodes, _last_uses(graph), strict=True):
        op = node.op
        if op is get_constant:
            result = getattr(module, constants[node])
        else:
            assert op is not None
            given = map_nodes(node.args, env.__getitem__)
            if node.kwargs:
                result = op(*given, **{name: map_nodes(item, env.__getitem__) for name, item in node.kwargs.items()})
            else:
                result = op(*given)
            del given
        env[node] = result
        del result
        for item in gone:
            del env[item]
    return tuple([map_nodes(item, env.__getitem__) for item in graph.results])


def _last_uses(graph: Graph) -> list[list[Node]]:
    """For each node, the values that nothing reads after it."""
    needed = set(nodes_in(graph.results))
    dropped = []
    for node in reversed(graph.nodes):
        gone = [] if node in needed else [node]
        for item in node.inputs():
            if item not in needed:
                needed.add(item)
                gone.append(item)
        dropped.append(gone)
    dropped.reverse()
    return dropped


# ---------------------------------------------------------------------------------------------------------------------
# To `torch.fx`, the form that users and compilers see.
def to_fx(graph: Graph) -> fx.GraphModule:
    """A graph module. Its `torch.fx` graph is made when it is looked at, its code when it is first called."""
    return LazyModule(graph)


def _fx_graph(flat: Graph, constants: dict[Node, str]) -> fx.Graph:
    graph = fx.Graph()
    written: dict[Node, fx.Node] = {}
    for node in flat.inputs:
        new = written[node] = graph.create_node("placeholder", node.name, (), {}, node.name)
        new.meta = _meta(node)
    for node in flat.nodes:
        if node.op is get_constant:
            new = graph.create_node("get_attr", constants[node], (), {}, node.name)
        else:
            assert node.op is not None
            kwargs = {key: map_nodes(item, written.__getitem__) for key, item in node.kwargs.items()}
            args = map_nodes(node.args, written.__getitem__)
            new = graph.create_node("call_function", node.op, args, kwargs, node.name)
        if new.name != node.name:
            raise VerificationError(f"the node {node.name} would be called {new.name} in torch.fx")
        new.meta = _meta(node)
        written[node] = new
    for node in flat.overwritten:
        written[node].meta["overwritten"] = True
    graph.output(tuple([map_nodes(item, written.__getitem__) for item in flat.results]))
    return graph


def _meta(node: Node) -> dict[str, Any]:
    """What a node tells about itself."""
    if node.meta is not None:
        return dict(node.meta)
    meta: dict[str, Any] = {}
    if node.slot is None or isinstance(node.value, (Tensor, torch.SymInt)):
        meta["val"] = to_fake_tensors(node.value)
    if isinstance(node.slot, Token):
        meta["token"] = True
    if node.slot is None:
        meta["partitioner_tag"] = "is_backward" if node.backward else "is_forward"
        if node.impure:
            meta["impure"] = True
        if node.recomputed:
            meta["recomputed"] = True
        if node.part:
            meta["part"] = node.part
        if node.read is not None:
            meta["read"] = node.read
        _tell_origin(node, meta)
    if "val" in meta:
        meta["tensor_meta"] = tensor_meta(meta["val"])
    return meta


_SAID = ("custom", "torch_fn", "source_fn_stack", "from_node")  # of what a program, or a node of a graph, says


def _tell_origin(node: Node, meta: dict[str, Any]) -> None:
    """Where a node comes from; one that was added after the program has the line of what it is computed from."""
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
    key = tensor.shape, strides_of(tensor), tensor.dtype, tensor.requires_grad
    try:
        return _known(*key)
    except TypeError:  # symbols cannot be looked up
        return _made(*key)


def _made(size: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> TensorMetadata:
    return TensorMetadata(size, dtype, requires_grad, stride, _memory_format(size, stride), dtype in _QUANTIZED, {})


_known = functools.lru_cache(maxsize=4096)(_made)  # a model has few shapes, and many tensors
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _memory_format(size: Sequence[Any], stride: Sequence[Any]) -> torch.memory_format | None:
    if len(size) != len(stride):  # it is sparse
        return None
    if _is_dense(size, stride, range(len(size))):
        return torch.contiguous_format
    order, layout = _LAST.get(len(size), ((), None))
    return layout if order and _is_dense(size, stride, order) else None


def _is_dense(size: Sequence[Any], stride: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in an order; those of size one may lie anywhere."""
    expected: Any = 1
    for dim in reversed(order):
        if not same_number(size[dim], 1):
            if not same_number(stride[dim], expected):
                return False
            expected = expected * size[dim]
    return True


# ---------------------------------------------------------------------------------------------------------------------
# From `torch.fx`: graphs that a partitioner is given, or gives back.
def joint_from_fx(module: fx.GraphModule, num_fwd_outputs: int) -> Graph:
    """A foreign joint graph, of whose flat outputs so many belong to the forward."""
    count = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
    if not 0 <= num_fwd_outputs <= count:
        raise PartitionError(
            f"num_fwd_outputs says how many of the graph's {count} outputs are the forward's; it cannot be "
            f"{num_fwd_outputs}."
        )
    gradients = [Grad(Input(f"output {i}")) for i in range(num_fwd_outputs, count)]
    return from_fx(module, [*map(Output, range(num_fwd_outputs)), *gradients])


def from_fx(module: fx.GraphModule, slots: Sequence[Slot]) -> Graph:
    """The graph of a module whose first outputs have these slots; what a forward returns after them, it saves."""
    read: dict[fx.Node, Node] = {}
    inputs: list[Node] = []
    nodes: list[Node] = []
    results: Sequence[Any] = ()

    def known(item: fx.Node) -> Any:
        if item not in read:
            raise VerificationError(f"{node.format_node()} reads {item.name} before it is made")
        return read[item]

    for node in module.graph.nodes:
        args = fx.node.map_arg(node.args, known)
        if node.op == "output":
            results = args[0]
            break
        kwargs = fx.node.map_arg(node.kwargs, known)
        target = node.target if node.op == "call_function" else None
        if node.op == "get_attr":
            target, args = get_constant, (operator.attrgetter(node.target)(module),)
        new = Node(target, _plain(args), dict(kwargs), node.meta.get("val"))
        new.name, new.meta = node.name, node.meta
        new.impure = bool(node.meta.get("impure"))
        new.recomputed = bool(node.meta.get("recomputed"))
        new.part, new.read = node.meta.get("part", 0), node.meta.get("read")
        new.backward = node.meta.get("partitioner_tag") == "is_backward"
        read[node] = new
        if node.op == "placeholder":
            new.slot = _slot_by_name(node, len(inputs))
            inputs.append(new)
        else:
            nodes.append(new)
    saved = [saved_slot(node) for node in results[len(slots) :]]
    outputs = [GraphOutput(*pair) for pair in zip((*slots, *saved), results, strict=True)]
    return Graph(inputs, nodes, outputs, {new for node, new in read.items() if node.meta.get("overwritten")})


def saved_slot(node: Node) -> Slot:
    """The slot of what a forward saves."""
    return Saved(node.name) if isinstance(node.value, Tensor) else Size(node.name)


def _slot_by_name(placeholder: fx.Node, index: int) -> Slot:
    """What a placeholder of a foreign graph takes: its name says it."""
    name = placeholder.name
    in_backward = "tangents" in name
    if "token" in placeholder.meta:
        return Token(name, in_backward)
    if in_backward:
        return Tangent(Output(index))
    if name.startswith("bwd_seed"):
        return RandomState("bwd", "seed")
    if name.startswith("bwd_base_offset"):
        return RandomState("bwd", "base_offset")
    return Input(name)


def _plain(args: Any) -> Any:
    """Lists and tuples of a `torch.fx` node are of its own immutable kinds."""
    if isinstance(args, (list, tuple)):
        kind = list if isinstance(args, list) else tuple
        return kind(_plain(item) for item in args)
    return args
